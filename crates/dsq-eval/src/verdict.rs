//! Comparing a report with a baseline, metric by metric. No training and no printing.
//!
//! A measured value fails when the 95% interval of its worsening lies wholly beyond the tolerance. The interval is
//! paired (same windows or images on both sides) where baseline and report carry samples over the same blocks;
//! otherwise the plain difference decides.

use crate::report::{show, significant, table};
use crate::{Baseline, BaselineRow, EvalError, Hardware, Report, Row, Tolerance, suite::Tolerances};
use serde_json::Value;

/// Which way is better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// Smaller is better.
    Lower,
    /// Larger is better.
    Higher,
    /// Neither: any move counts as a worsening.
    Neither,
}

/// Which way a metric is better, by its name.
pub fn direction(metric: &str) -> Direction {
    match metric {
        "perplexity" | "kl" | "bits_per_weight" | "resident_bytes" | "latency_p50_ms" | "latency_p99_ms"
        | "step_ms" => Direction::Lower,
        "top1" | "top5" | "top1_agreement" | "tokens_per_second" | "prompt_tokens_per_second" => Direction::Higher,
        _ => Direction::Neither,
    }
}

/// What a check came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// Within its tolerance.
    Pass,
    /// Better by more than its tolerance.
    Improved,
    /// An exact value of other hardware: neither a pass nor a failure, and counted apart.
    NotComparable,
    /// The baseline has it, the report has not.
    Missing,
    /// Worse by more than its tolerance, or different where it must be equal.
    Regressed,
}

impl Verdict {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Pass => "pass",
            Verdict::Improved => "improved",
            Verdict::NotComparable => "not comparable",
            Verdict::Missing => "missing",
            Verdict::Regressed => "regressed",
        }
    }

    /// Whether it makes the run fail (exit 1).
    pub fn fails(self) -> bool {
        matches!(self, Verdict::Missing | Verdict::Regressed)
    }
}

/// One compared metric.
#[derive(Debug, Clone, PartialEq)]
pub struct Check {
    /// Recipe, or `fixed`.
    pub recipe: String,
    /// Row of the report.
    pub row: String,
    /// Metric.
    pub metric: String,
    /// The baseline's value; null when it has none.
    pub baseline: Value,
    /// The measured value; null when there is none.
    pub measured: Value,
    /// How far it may move.
    pub tolerance: Tolerance,
    /// What it came to.
    pub verdict: Verdict,
    /// The change with its interval, the parts of a digest that moved, or why something is missing.
    pub note: String,
}

impl Check {
    /// The check as a row of a report, named `RECIPE/ROW/METRIC`.
    pub fn to_row(&self) -> Row {
        let mut row = Row::new(format!("{}/{}/{}", self.recipe, self.row, self.metric));
        row.metrics.insert("baseline".into(), self.baseline.clone());
        row.metrics.insert("measured".into(), self.measured.clone());
        row.text("tolerance", self.tolerance.to_string()).text("verdict", self.verdict.name()).text("note", &self.note)
    }

    /// Checks as an aligned text table.
    pub fn table(checks: &[Check]) -> String {
        let rows: Vec<Vec<String>> = checks
            .iter()
            .map(|c| {
                let value = |v: &Value| if v.is_null() { "-".into() } else { show(&c.metric, v) };
                vec![
                    c.recipe.clone(),
                    c.row.clone(),
                    c.metric.clone(),
                    value(&c.baseline),
                    value(&c.measured),
                    c.tolerance.to_string(),
                    c.verdict.name().into(),
                    c.note.clone(),
                ]
            })
            .collect();
        table(&["recipe", "row", "metric", "baseline", "measured", "tolerance", "verdict", "note"], &rows)
    }
}

/// Compares `report` with `baseline` on the metrics that `tolerances` name; `hardware` is where the report was
/// measured. Every metric of the baseline gives a check, present or not.
///
/// # Errors
/// [`EvalError::Baseline`] (exit 3) when the baseline is of another recipe or seed, or lacks a named metric that the
/// report has: it cannot tell whether something fell.
pub fn compare(
    baseline: &Baseline,
    report: &Report,
    tolerances: &Tolerances,
    hardware: &Hardware,
) -> Result<Vec<Check>, EvalError> {
    let refuse = |field: String, problem: String| Err(EvalError::baseline(&baseline.path, field, problem));
    let digest = report.about.get("recipe_sha256").and_then(Value::as_str).unwrap_or("none");
    let seed = report.about.get("seed").and_then(Value::as_u64).unwrap_or(0);
    baseline.check_identity(digest, seed)?;
    for row in &report.rows {
        for metric in row.metrics.keys().filter(|m| tolerances.contains_key(*m)) {
            if !baseline.row(&row.name).is_some_and(|b| b.metrics.contains_key(metric)) {
                return refuse(
                    format!("rows.{}.{metric}", row.name),
                    format!("expected a value to compare {} with, got none", show(metric, &row.metrics[metric])),
                );
            }
        }
    }
    let elsewhere = baseline.hardware.difference(hardware);
    let mut checks = Vec::new();
    for base in &baseline.rows {
        let row = report.row(&base.name);
        for (metric, value) in &base.metrics {
            let Some(&tolerance) = tolerances.get(metric) else { continue };
            let measured = row.and_then(|r| r.metrics.get(metric)).cloned();
            let (verdict, note) = match (&measured, row) {
                (Some(m), Some(row)) => judge(base, row, metric, value, m, tolerance, elsewhere.as_deref()),
                (None, Some(_)) => (Verdict::Missing, "the report does not have it any more".into()),
                (_, None) => (Verdict::Missing, "the report does not have the row any more".into()),
            };
            checks.push(Check {
                recipe: baseline.recipe.clone(),
                row: base.name.clone(),
                metric: metric.clone(),
                baseline: value.clone(),
                measured: measured.unwrap_or(Value::Null),
                tolerance,
                verdict,
                note,
            });
        }
    }
    // A metric of the suite that neither side has would otherwise vanish without a trace.
    for (metric, &tolerance) in tolerances {
        if !checks.iter().any(|c| &c.metric == metric) {
            checks.push(Check {
                recipe: baseline.recipe.clone(),
                row: "-".into(),
                metric: metric.clone(),
                baseline: Value::Null,
                measured: Value::Null,
                tolerance,
                verdict: Verdict::Missing,
                note: "the suite names it, baseline and report lack it".into(),
            });
        }
    }
    Ok(checks)
}

fn judge(
    base: &BaselineRow,
    row: &Row,
    metric: &str,
    expected: &Value,
    measured: &Value,
    tolerance: Tolerance,
    elsewhere: Option<&str>,
) -> (Verdict, String) {
    let equal = match (expected.as_f64(), measured.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => expected == measured,
    };
    if let (Tolerance::ExactOnSameHardware, Some(why)) = (tolerance, elsewhere) {
        let same = if equal { "equal all the same" } else { "differs" };
        return (Verdict::NotComparable, format!("baseline of other hardware ({why}); {same}"));
    }
    if let Tolerance::Exact | Tolerance::ExactOnSameHardware = tolerance {
        return match equal {
            true => (Verdict::Pass, String::new()),
            false => (Verdict::Regressed, moved_parts(base, row, metric)),
        };
    }
    if let Some(kept) = tolerance.keeps_bound(measured.as_f64()) {
        return match kept {
            true => (Verdict::Pass, String::new()),
            false => (Verdict::Regressed, format!("expected {tolerance}, got {measured}")),
        };
    }
    let (Some(a), Some(b)) = (expected.as_f64(), measured.as_f64()) else {
        return (Verdict::Regressed, format!("expected a finite number, got {measured}"));
    };
    // Worsening: positive is worse. Without a better side, either way is.
    let limit = match tolerance {
        Tolerance::Absolute(x) => x,
        Tolerance::Relative(x) | Tolerance::Within(x) => x * a.abs(),
        _ => 0.0,
    };
    let paired = match (&base.samples, &row.samples) {
        (Some(old), Some(new)) => new.rounded().paired_difference(old, metric).filter(|e| e.has_interval()),
        _ => None,
    };
    let change = b - a;
    let (low, high) = paired.map_or((change, change), |e| (e.low, e.high));
    let mut note = if change == 0.0 { String::new() } else { signed(metric, change, a) };
    if let (Some(e), false) = (paired, change == 0.0) {
        note += &format!(", 95% of the paired difference [{}, {}]", significant(e.low), significant(e.high));
    }
    let two_sided = matches!(tolerance, Tolerance::Within(_)) || direction(metric) == Direction::Neither;
    let verdict = if two_sided {
        if low > limit || high < -limit { Verdict::Regressed } else { Verdict::Pass }
    } else {
        let (worse_low, worse_high) = match direction(metric) {
            Direction::Higher => (-high, -low),
            _ => (low, high),
        };
        if worse_low > limit {
            Verdict::Regressed
        } else if worse_high < -limit {
            Verdict::Improved
        } else {
            Verdict::Pass
        }
    };
    (verdict, note)
}

fn signed(metric: &str, change: f64, from: f64) -> String {
    let sign = if change > 0.0 { "+" } else { "-" };
    let size = show(metric, &change.abs().into());
    if from == 0.0 {
        return format!("{sign}{size}");
    }
    format!("{sign}{size} ({sign}{}%)", significant((change / from).abs() * 100.0))
}

/// Which parts of a digest differ, the first few by name.
fn moved_parts(base: &BaselineRow, row: &Row, metric: &str) -> String {
    let (Some(old), Some(new)) = (base.parts.get(metric), row.parts.get(metric)) else {
        return "differs".into();
    };
    let mut moved: Vec<&str> = old.iter().filter(|(k, v)| new.get(*k) != Some(v)).map(|(k, _)| k.as_str()).collect();
    moved.extend(new.keys().filter(|k| !old.contains_key(*k)).map(String::as_str));
    match moved.len() {
        0 => "differs, the parts do not".into(),
        n if n <= 3 => format!("differs in {}", moved.join(", ")),
        n => format!("differs in {n} of {}: {}, ...", old.len().max(new.len()), moved[..3].join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Estimate, Samples};
    use std::path::Path;

    fn samples(shift: f64) -> Samples {
        Samples::Text {
            tokens: vec![100; 50],
            nll: (0..50).map(|i| 200.0 + f64::from(i * 17 % 50) + shift).collect(),
            kl: (0..50).map(|i| 5.0 + f64::from(i % 7) / 10.0 + shift / 10.0).collect(),
            agree: vec![80; 50],
        }
    }

    fn report(shift: f64) -> Report {
        let mut r = Report::new("train").about("recipe_sha256", "abc").about("seed", 3);
        let s = samples(shift);
        let mut row = Row::new("exported");
        for metric in ["perplexity", "kl", "top1_agreement"] {
            row = row.estimate(metric, &s.estimate(metric).unwrap());
        }
        row = row.number("bits_per_weight", 4.5).text("codes_sha256", "aa").text("scales_sha256", "bb");
        for (part, digest) in [("layer.0", "01"), ("layer.1", "02")] {
            row.parts.entry("codes_sha256".into()).or_default().insert(part.into(), digest.into());
        }
        row.samples = Some(s);
        r.rows.push(row);
        r
    }

    fn tolerances() -> Tolerances {
        [
            ("perplexity", Tolerance::Relative(0.01)),
            ("kl", Tolerance::Relative(0.05)),
            ("top1_agreement", Tolerance::Absolute(0.02)),
            ("bits_per_weight", Tolerance::Exact),
            ("codes_sha256", Tolerance::ExactOnSameHardware),
            ("scales_sha256", Tolerance::ExactOnSameHardware),
        ]
        .map(|(m, t)| (m.to_string(), t))
        .into()
    }

    fn baseline() -> Baseline {
        let path = Path::new("b.json");
        Baseline::of_report(path, "quick", "r", &report(0.0), &tolerances(), Hardware::detect(), "first").unwrap()
    }

    fn verdicts(report: &Report) -> Vec<(String, Verdict)> {
        let checks = compare(&baseline(), report, &tolerances(), &Hardware::detect()).unwrap();
        checks.into_iter().filter(|c| c.verdict != Verdict::Pass).map(|c| (c.metric, c.verdict)).collect()
    }

    #[test]
    fn the_same_report_passes_everywhere() {
        let checks = compare(&baseline(), &report(0.0), &tolerances(), &Hardware::detect()).unwrap();
        assert_eq!(checks.len(), 6);
        assert!(checks.iter().all(|c| c.verdict == Verdict::Pass && c.note.is_empty()), "{checks:?}");
    }

    #[test]
    fn worse_better_and_within_the_tolerance() {
        // +2 nats in 100 tokens: perplexity +2.02%, KL +0.2 of 5.3 (3.8%).
        assert_eq!(verdicts(&report(2.0)), [("perplexity".into(), Verdict::Regressed)]);
        assert_eq!(verdicts(&report(0.5)), []);
        assert_eq!(verdicts(&report(-2.0)), [("perplexity".into(), Verdict::Improved)]);
        assert_eq!(
            verdicts(&report(4.0)),
            [("perplexity".into(), Verdict::Regressed), ("kl".into(), Verdict::Regressed)]
        );
    }

    #[test]
    fn noise_whose_interval_reaches_into_the_tolerance_passes() {
        let mut r = report(0.0);
        let Some(Samples::Text { nll, .. }) = &mut r.rows[0].samples else { unreachable!() };
        // One window out of 50 is wild: the mean moves by 2 nats, but the interval reaches down to 0.
        nll[0] += 100.0;
        let value = r.rows[0].samples.as_ref().unwrap().estimate_value("perplexity").unwrap();
        r.rows[0].set("perplexity", value);
        let checks = compare(&baseline(), &r, &tolerances(), &Hardware::detect()).unwrap();
        assert_eq!(checks[0].verdict, Verdict::Pass);
        assert!(checks[0].note.contains("paired difference [0, "), "{}", checks[0].note);
        // Without samples the plain difference decides.
        r.rows[0].samples = None;
        assert_eq!(verdicts(&r), [("perplexity".into(), Verdict::Regressed)]);
    }

    #[test]
    fn exact_metrics_and_missing_ones() {
        let mut r = report(0.0);
        r.rows[0] = r.rows[0].clone().text("codes_sha256", "ab").number("bits_per_weight", 4.25);
        r.rows[0].parts.get_mut("codes_sha256").unwrap().insert("layer.1".into(), "03".into());
        r.rows[0].metrics.remove("scales_sha256");
        let checks = compare(&baseline(), &r, &tolerances(), &Hardware::detect()).unwrap();
        let of = |m: &str| checks.iter().find(|c| c.metric == m).unwrap();
        assert_eq!(
            (of("codes_sha256").verdict, of("codes_sha256").note.as_str()),
            (Verdict::Regressed, "differs in layer.1")
        );
        assert_eq!(of("bits_per_weight").verdict, Verdict::Regressed);
        assert_eq!(of("scales_sha256").verdict, Verdict::Missing);
        r.rows.clear();
        assert!(
            compare(&baseline(), &r, &tolerances(), &Hardware::detect())
                .unwrap()
                .iter()
                .all(|c| c.verdict == Verdict::Missing)
        );
    }

    #[test]
    fn f102_other_hardware_is_said_and_statistics_still_decide() {
        let mut base = baseline();
        base.hardware.features.push("avx1024".into());
        let mut r = report(4.0);
        r.rows[0] = r.rows[0].clone().text("codes_sha256", "ab");
        let checks = compare(&base, &r, &tolerances(), &Hardware::detect()).unwrap();
        let of = |m: &str| checks.iter().find(|c| c.metric == m).unwrap();
        assert_eq!(of("codes_sha256").verdict, Verdict::NotComparable);
        assert!(of("codes_sha256").note.contains("avx1024 only there") && of("codes_sha256").note.ends_with("differs"));
        assert!(of("scales_sha256").note.ends_with("equal all the same"));
        assert_eq!(of("perplexity").verdict, Verdict::Regressed);
        assert_eq!(of("bits_per_weight").verdict, Verdict::Pass, "exact everywhere");
    }

    #[test]
    fn f102_a_stale_baseline_or_one_without_the_metric_is_unusable() {
        for (key, value) in [("recipe_sha256", Value::from("abd")), ("seed", 4.into())] {
            let mut r = report(0.0);
            r.about.insert(key.into(), value);
            let err = compare(&baseline(), &r, &tolerances(), &Hardware::detect()).unwrap_err();
            assert!(err.to_string().contains(key) && err.exit_code() == 3, "{err}");
        }
        let mut base = baseline();
        base.rows[0].metrics.remove("kl");
        let err = compare(&base, &report(0.0), &tolerances(), &Hardware::detect()).unwrap_err();
        assert!(err.to_string().contains("rows.exported.kl: baseline unusable") && err.exit_code() == 3, "{err}");
        // A metric of the suite that nobody has any more.
        let mut more = tolerances();
        more.insert("top1".into(), Tolerance::Absolute(0.01));
        let checks = compare(&baseline(), &report(0.0), &more, &Hardware::detect()).unwrap();
        assert_eq!(checks.last().map(|c| (c.metric.as_str(), c.verdict)), Some(("top1", Verdict::Missing)));
    }

    #[test]
    fn f112_a_measured_nan_is_red() {
        let mut r = report(0.0);
        r.rows[0] = r.rows[0].clone().estimate("kl", &Estimate::without_interval(f64::NAN));
        assert_eq!(verdicts(&r), [("kl".into(), Verdict::Regressed)]);
    }

    #[test]
    fn two_sided_tolerances_catch_an_improvement_too() {
        let within: Tolerances = [("perplexity".to_string(), Tolerance::Within(1e-3))].into();
        let base = Baseline { rows: vec![BaselineRow { samples: None, ..baseline().rows[0].clone() }], ..baseline() };
        for (shift, want) in [(0.01, Verdict::Pass), (-1.0, Verdict::Regressed), (1.0, Verdict::Regressed)] {
            let checks = compare(&base, &report(shift), &within, &Hardware::detect()).unwrap();
            assert_eq!(checks[0].verdict, want, "{shift}");
        }
    }
}
