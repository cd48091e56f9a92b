//! Comparing a report with a baseline, metric by metric. No training and no printing.
//!
//! A measured value fails when the 95% interval of its worsening lies wholly beyond the tolerance. The interval is
//! paired (same windows or images on both sides) where baseline and report carry samples over the same blocks;
//! otherwise the plain difference decides. To a run of another seed the noise from seed to seed is added, as far as the baseline knows
//! it.
//!
//! A row that was made from another row of the same run (a quantized model from its float model) is judged beside that one: what
//! the float model moved by is told of the float model (`base moved`), and taken off the quantized one.

use crate::report::{show, significant, table};
use crate::samples::combine;
use crate::suite::{Tolerances, tolerance_of};
use crate::{Baseline, BaselineRow, EvalError, Report, Row, Samples, Setup, Tolerance, sequential};
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
        | "step_ms" | "kl_median" | "kl_p90" | "kl_p99" | "kl_p99_9" | "kl_max" | "rms_delta_p" | "bits_per_byte"
        | "word_perplexity" => Direction::Lower,
        "top1"
        | "top5"
        | "top1_agreement"
        | "accuracy"
        | "accuracy_per_byte"
        | "accuracy_per_token"
        | "greedy"
        | "agreement"
        | "tokens_per_second"
        | "prompt_tokens_per_second" => Direction::Higher,
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
    /// The float model that other rows were made from is not what it was; said of that model's row.
    BaseMoved,
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
            Verdict::BaseMoved => "base moved",
            Verdict::Regressed => "regressed",
        }
    }

    /// Whether it makes the run fail (exit 1).
    pub fn fails(self) -> bool {
        matches!(self, Verdict::Missing | Verdict::BaseMoved | Verdict::Regressed)
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

/// Compares `report` with `baseline` on the metrics that `tolerances` name; `setup` is what measured the report. Every metric of the
/// baseline gives a check, present or not. A report of another seed compares where the baseline knows how far seeds are apart.
///
/// # Errors
/// [`EvalError::Baseline`] (exit 3) when the baseline is of another recipe or seed, or lacks a named metric that the
/// report has: it cannot tell whether something fell.
pub fn compare(
    baseline: &Baseline,
    report: &Report,
    tolerances: &Tolerances,
    setup: &Setup,
) -> Result<Vec<Check>, EvalError> {
    let refuse = |field: String, problem: String| Err(EvalError::baseline(&baseline.path, field, problem));
    let digest = report.about.get("recipe_sha256").and_then(Value::as_str).unwrap_or("none");
    let seed = report.about.get("seed").and_then(Value::as_u64).unwrap_or(0);
    let known = if baseline.seeds.is_some() { baseline.seed } else { seed };
    baseline.check_identity(digest, known)?;
    for row in &report.rows {
        for metric in row.metrics.keys().filter(|m| tolerance_of(tolerances, &row.name, m).is_some()) {
            if !baseline.row(&row.name).is_some_and(|b| b.metrics.contains_key(metric)) {
                return refuse(
                    format!("rows.{}.{metric}", row.name),
                    format!("expected a value to compare {} with, got none", show(metric, &row.metrics[metric])),
                );
            }
        }
    }
    // Why the bits need not be the same.
    let elsewhere = match (seed == baseline.seed, baseline.setup.hardware.difference(&setup.hardware)) {
        (_, Some(why)) => Some(format!("baseline of other hardware ({why})")),
        (false, None) => Some(format!("baseline of seed {}", baseline.seed)),
        (true, None) => None,
    };
    let mut checks = Vec::new();
    for base in &baseline.rows {
        let row = report.row(&base.name);
        for (metric, value) in &base.metrics {
            let Some(tolerance) = tolerance_of(tolerances, &base.name, metric) else { continue };
            let measured = row.and_then(|r| r.metrics.get(metric)).cloned();
            let mut beside = value.clone();
            let (verdict, note) = match (&measured, row) {
                (Some(measured), Some(row)) => {
                    let (elsewhere, other_seed) = (elsewhere.as_deref(), seed != baseline.seed);
                    let sides = Sides { baseline, report, old: base, new: row, elsewhere, other_seed };
                    // Of a run that ended early, the baseline on the same blocks stands beside it.
                    if let Some(x) = sides.on_same_blocks(metric) {
                        beside = x.into();
                    }
                    sides.judge(metric, value, measured, tolerance)
                }
                (None, Some(_)) => (Verdict::Missing, "the report does not have it any more".into()),
                (_, None) => (Verdict::Missing, "the report does not have the row any more".into()),
            };
            checks.push(Check {
                recipe: baseline.recipe.clone(),
                row: base.name.clone(),
                metric: metric.clone(),
                baseline: beside,
                measured: measured.unwrap_or(Value::Null),
                tolerance,
                verdict,
                note,
            });
        }
    }
    // A metric of the suite that neither side has would otherwise vanish without a trace.
    for (metric, &tolerance) in tolerances {
        let (row, name) = metric.rsplit_once('/').map_or((None, &metric[..]), |(row, name)| (Some(row), name));
        if !checks.iter().any(|c| c.metric == name && row.is_none_or(|r| r == c.row)) {
            checks.push(Check {
                recipe: baseline.recipe.clone(),
                row: row.unwrap_or("-").into(),
                metric: name.into(),
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

/// A row of a baseline beside that of a report.
struct Sides<'a> {
    baseline: &'a Baseline,
    report: &'a Report,
    old: &'a BaselineRow,
    new: &'a Row,
    elsewhere: Option<&'a str>,
    other_seed: bool,
}

/// A change of a metric, from what was expected.
struct Moved {
    /// What was expected.
    from: f64,
    /// The change and the ends of its interval.
    value: f64,
    low: f64,
    high: f64,
    /// What the interval is, in words; nothing without one.
    of: String,
}

impl Sides<'_> {
    fn judge(&self, metric: &str, expected: &Value, measured: &Value, tolerance: Tolerance) -> (Verdict, String) {
        let equal = match (expected.as_f64(), measured.as_f64()) {
            (Some(a), Some(b)) => a == b,
            _ => expected == measured,
        };
        let worse = if self.is_base() { Verdict::BaseMoved } else { Verdict::Regressed };
        if let (Tolerance::ExactOnSameHardware, Some(why)) = (tolerance, self.elsewhere) {
            let same = if equal { "equal all the same" } else { "differs" };
            return (Verdict::NotComparable, format!("{why}; {same}"));
        }
        if let Tolerance::Exact | Tolerance::ExactOnSameHardware = tolerance {
            return match equal {
                true => (Verdict::Pass, String::new()),
                false if self.made_of_another() && metric.ends_with("_sha256") => {
                    (Verdict::NotComparable, "made from another base model".into())
                }
                false => (worse, moved_parts(self.old, self.new, metric)),
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
        let moved = self.moved(metric, a, b);
        let mut note = if moved.value == 0.0 { String::new() } else { signed(metric, moved.value, moved.from) };
        if !moved.of.is_empty() && moved.low < moved.high {
            note += &format!(", {} [{}, {}]", moved.of, significant(moved.low), significant(moved.high));
        }
        if let (Some(old), Some(new)) = (&self.old.samples, &self.new.samples)
            && new.blocks() < old.blocks()
        {
            let sep = if note.is_empty() { "" } else { "; " };
            note += &format!("{sep}decided on {} of {} blocks", new.blocks(), old.blocks());
        }
        let verdict = match moved.place(metric, tolerance, self.is_base()) {
            Place::Worse => worse,
            Place::Better => Verdict::Improved,
            Place::Within | Place::Open => Verdict::Pass,
        };
        (verdict, note)
    }

    /// The baseline's value on the blocks of a run that ended early; `None` of a whole run.
    fn on_same_blocks(&self, metric: &str) -> Option<f64> {
        let (old, new) = (self.old.samples.as_ref()?, self.new.samples.as_ref()?);
        (new.blocks() < old.blocks()).then(|| old.first(new.blocks()).estimate_value(metric))?
    }

    /// Whether other rows were made from this one.
    fn is_base(&self) -> bool {
        self.baseline.rows.iter().any(|r| r.base.as_ref() == Some(&self.old.name))
    }

    /// The row of the model that this one was made from, there and here.
    fn floats(&self) -> Option<(&BaselineRow, &Row)> {
        let name = self.old.base.as_ref()?;
        Some((self.baseline.row(name)?, self.report.row(name)?))
    }

    /// Whether that model has other weights than it had.
    fn made_of_another(&self) -> bool {
        let digest = "model_sha256";
        self.floats().is_some_and(|(old, new)| old.metrics.get(digest) != new.metrics.get(digest))
    }

    /// The change of `metric` from `a` to `b`. Of a row that was made from another row, what that one moved by is taken off: the ratio
    /// of perplexities, and the differences of shares, are expected to be as they were.
    fn moved(&self, metric: &str, a: f64, b: f64) -> Moved {
        let plain = || Moved { from: a, value: b - a, low: b - a, high: b - a, of: String::new() };
        let mut moved = self.paired(metric).unwrap_or_else(|| {
            // Without samples.
            let floats =
                self.floats().and_then(|(old, new)| Some((old.metrics.get(metric)?.as_f64()?, new.get(metric)?)));
            match (floats, metric) {
                (Some((x, y)), "perplexity") if x > 0.0 => {
                    let from = a * y / x;
                    Moved { from, value: b - from, low: b - from, high: b - from, of: String::new() }
                }
                _ => plain(),
            }
        });
        // Other hardware begins with the same values and ends near them; another seed does not.
        if let (true, Some(seeds)) = (self.other_seed, &self.baseline.seeds) {
            let (below, above) = seeds.noise(&self.old.name, metric, moved.from + moved.value);
            if below > 0.0 || above > 0.0 {
                moved.low = moved.value - (moved.value - moved.low).hypot(below);
                moved.high = moved.value + (moved.high - moved.value).hypot(above);
                moved.of = match moved.of.is_empty() {
                    true => "95% over seeds".into(),
                    false => format!("{} and over seeds", moved.of),
                };
            }
        }
        moved
    }

    /// The same block by block; `None` where the samples are not of the same blocks or do not carry the metric.
    fn paired(&self, metric: &str) -> Option<Moved> {
        let (old, new) = (self.old.samples.as_ref()?, self.new.samples.as_ref()?.rounded());
        // The float model may have been measured on more blocks, for other rows.
        let floats = self.floats();
        let floats = floats
            .and_then(|(old, now)| Some((old.samples.as_ref()?, now.samples.as_ref()?.first(new.blocks()).rounded())));
        Moved::of_samples(metric, (old, &new), floats.as_ref().map(|(then, now)| (*then, now)))
    }
}

impl Moved {
    /// From the samples of a row, there and here, and of the row that it was made from. Here may be the first blocks alone.
    fn of_samples(
        metric: &str,
        (old, new): (&Samples, &Samples),
        floats: Option<(&Samples, &Samples)>,
    ) -> Option<Self> {
        let n = new.blocks();
        // What is expected of these blocks, now that the float model gives what it gives.
        let expected = match (old, floats) {
            (Samples::Text { tokens, nll, kl, agree }, Some((then, now))) => {
                let (Samples::Text { nll: then, .. }, Samples::Text { nll: now, .. }) = (then, now) else {
                    return None;
                };
                if then.len() != nll.len() || now.len() != n {
                    return None;
                }
                let mut nll = nll.clone();
                nll.iter_mut().zip(then.iter().zip(now)).for_each(|(x, (then, now))| *x += now - then);
                Samples::Text { tokens: tokens.clone(), nll, kl: kl.clone(), agree: agree.clone() }
            }
            _ => old.clone(),
        };
        if n < old.blocks() {
            let change = sequential::change(new, &expected, metric)?;
            let from = expected.first(n).estimate_value(metric)?;
            let of = "95% at any look".into();
            return Some(Self { from, value: change.value, low: change.low, high: change.high, of });
        }
        let (e, from) = match floats {
            Some((then, now)) if !matches!(old, Samples::Text { .. }) => {
                let e = combine(&[new, old, now, then], metric, |v| v[0] - v[1] - (v[2] - v[3]))?;
                (e, new.estimate_value(metric)? - e.value)
            }
            _ => (new.paired_difference(&expected, metric)?, expected.estimate_value(metric)?),
        };
        // Without an interval the plain difference of all that was measured decides.
        if !e.has_interval() {
            return Some(Self { from, value: e.value, low: e.value, high: e.value, of: String::new() });
        }
        Some(Self { from, value: e.value, low: e.low, high: e.high, of: "95% of the paired difference".into() })
    }

    /// Where the interval lies. Without a better side, and of a base model, a move either way is one for the worse.
    fn place(&self, metric: &str, tolerance: Tolerance, is_base: bool) -> Place {
        let limit = match tolerance {
            Tolerance::Absolute(x) => x,
            Tolerance::Relative(x) | Tolerance::Within(x) => x * self.from.abs(),
            _ => 0.0,
        };
        let direction = direction(metric);
        if is_base || matches!(tolerance, Tolerance::Within(_)) || direction == Direction::Neither {
            return match () {
                () if self.low > limit || self.high < -limit => Place::Worse,
                () if self.low >= -limit && self.high <= limit => Place::Within,
                () => Place::Open,
            };
        }
        // Of the worsening: positive is worse.
        let (low, high) = if direction == Direction::Higher { (-self.high, -self.low) } else { (self.low, self.high) };
        match () {
            () if low > limit => Place::Worse,
            () if high < -limit => Place::Better,
            () if high <= limit => Place::Within,
            () => Place::Open,
        }
    }
}

/// Where an interval lies beside a tolerance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Wholly beyond it.
    Worse,
    /// Wholly beyond it on the good side.
    Better,
    /// Wholly no worse than it.
    Within,
    /// Across it.
    Open,
}

/// Whether `metric` of a row is decided by the first blocks of it: the interval that holds at any look lies wholly within or wholly beyond
/// the tolerance. `row`: samples of all blocks there, and of the first ones here; `base`: the same of the row that it was made from.
/// A tolerance that needs no interval, and a metric that does not depend on the blocks, are decided; quantiles and the like never are.
/// `is_base`: whether this is the row that others were made from.
pub fn decided(
    tolerance: Tolerance,
    metric: &str,
    (old, new): (&Samples, &Samples),
    base: Option<(&Samples, &Samples)>,
    is_base: bool,
) -> bool {
    if !matches!(tolerance, Tolerance::Relative(_) | Tolerance::Absolute(_) | Tolerance::Within(_)) {
        return true;
    }
    if old.ratio_parts(metric).is_none() {
        return !WHOLE.contains(&metric);
    }
    let (new, base) = (new.rounded(), base.map(|(then, now)| (then, now.first(new.blocks()).rounded())));
    let base = base.as_ref().map(|(then, now)| (*then, now));
    Moved::of_samples(metric, (old, &new), base).is_some_and(|m| m.place(metric, tolerance, is_base) != Place::Open)
}

/// Metrics that depend on the blocks and are no ratio of sums over them that samples carry.
const WHOLE: [&str; 9] = [
    "kl_median",
    "kl_p90",
    "kl_p99",
    "kl_p99_9",
    "kl_max",
    "rms_delta_p",
    "bits_per_byte",
    "word_perplexity",
    "tokens",
];

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
    use crate::{Estimate, Hardware};
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

    fn setup() -> Setup {
        Setup {
            dsq: "0.1.0".into(),
            device: "cpu".into(),
            kernels: Default::default(),
            dependencies: Default::default(),
            hardware: Hardware::detect(),
        }
    }

    fn baseline() -> Baseline {
        let path = Path::new("b.json");
        Baseline::of_report(path, "quick", "r", &report(0.0), &tolerances(), setup(), "first").unwrap()
    }

    fn verdicts(report: &Report) -> Vec<(String, Verdict)> {
        let checks = compare(&baseline(), report, &tolerances(), &setup()).unwrap();
        checks.into_iter().filter(|c| c.verdict != Verdict::Pass).map(|c| (c.metric, c.verdict)).collect()
    }

    #[test]
    fn the_same_report_passes_everywhere() {
        let checks = compare(&baseline(), &report(0.0), &tolerances(), &setup()).unwrap();
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
        let checks = compare(&baseline(), &r, &tolerances(), &setup()).unwrap();
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
        let checks = compare(&baseline(), &r, &tolerances(), &setup()).unwrap();
        let of = |m: &str| checks.iter().find(|c| c.metric == m).unwrap();
        assert_eq!(
            (of("codes_sha256").verdict, of("codes_sha256").note.as_str()),
            (Verdict::Regressed, "differs in layer.1")
        );
        assert_eq!(of("bits_per_weight").verdict, Verdict::Regressed);
        assert_eq!(of("scales_sha256").verdict, Verdict::Missing);
        r.rows.clear();
        assert!(
            compare(&baseline(), &r, &tolerances(), &setup()).unwrap().iter().all(|c| c.verdict == Verdict::Missing)
        );
    }

    #[test]
    fn f102_other_hardware_is_said_and_statistics_still_decide() {
        let mut base = baseline();
        base.setup.hardware.features.push("avx1024".into());
        let mut r = report(4.0);
        r.rows[0] = r.rows[0].clone().text("codes_sha256", "ab");
        let checks = compare(&base, &r, &tolerances(), &setup()).unwrap();
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
            let err = compare(&baseline(), &r, &tolerances(), &setup()).unwrap_err();
            assert!(err.to_string().contains(key) && err.exit_code() == 3, "{err}");
        }
        let mut base = baseline();
        base.rows[0].metrics.remove("kl");
        let err = compare(&base, &report(0.0), &tolerances(), &setup()).unwrap_err();
        assert!(err.to_string().contains("rows.exported.kl: baseline unusable") && err.exit_code() == 3, "{err}");
        // A metric of the suite that nobody has any more.
        let mut more = tolerances();
        more.insert("top1".into(), Tolerance::Absolute(0.01));
        let checks = compare(&baseline(), &report(0.0), &more, &setup()).unwrap();
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
            let checks = compare(&base, &report(shift), &within, &setup()).unwrap();
            assert_eq!(checks[0].verdict, want, "{shift}");
        }
    }

    /// A float model and what was made of it: 50 windows, quantization costs 3 nats in each.
    fn pair(base_shift: f64, own_shift: f64) -> Report {
        let mut r = Report::new("model").about("recipe_sha256", "abc").about("seed", 3);
        // The divergence does not move.
        let of = |shift: f64| {
            let (Samples::Text { tokens, nll, .. }, Samples::Text { kl, agree, .. }) = (samples(shift), samples(0.0))
            else {
                unreachable!()
            };
            Samples::Text { tokens, nll, kl, agree }
        };
        let s = [of(base_shift), of(base_shift + 3.0 + own_shift)];
        for (name, s) in ["base", "w4"].into_iter().zip(s) {
            let mut row = Row::new(name).estimate("perplexity", &s.estimate("perplexity").unwrap());
            if name == "w4" {
                row = row.estimate("kl", &s.estimate("kl").unwrap()).text("codes_sha256", format!("{base_shift}"));
                row.base = Some("base".into());
            } else {
                row = row.text("model_sha256", format!("{base_shift}"));
            }
            row.samples = Some(s);
            r.rows.push(row);
        }
        r
    }

    fn pair_tolerances() -> Tolerances {
        [
            ("perplexity", Tolerance::Relative(0.01)),
            ("kl", Tolerance::Relative(0.05)),
            ("codes_sha256", Tolerance::Exact),
            ("model_sha256", Tolerance::Exact),
        ]
        .map(|(m, t)| (m.to_string(), t))
        .into()
    }

    fn pair_baseline() -> Baseline {
        let (path, t) = (Path::new("b.json"), pair_tolerances());
        Baseline::of_report(path, "quick", "r", &pair(0.0, 0.0), &t, setup(), "first").unwrap()
    }

    fn of_pair(report: &Report) -> Vec<(String, Verdict)> {
        let checks = compare(&pair_baseline(), report, &pair_tolerances(), &setup()).unwrap();
        let told = checks.into_iter().filter(|c| c.verdict != Verdict::Pass);
        told.map(|c| (format!("{}/{}", c.row, c.metric), c.verdict)).collect()
    }

    #[test]
    fn a_base_that_moved_is_told_apart_from_a_quantized_model_that_moved() {
        assert_eq!(of_pair(&pair(0.0, 0.0)), []);
        assert_eq!(of_pair(&pair(0.0, 2.0)), [("w4/perplexity".into(), Verdict::Regressed)]);
        // Either way, and the quantized model keeps its distance: only the base is red. Its codes are of other weights.
        for shift in [2.0, -2.0] {
            let want = [
                ("base/perplexity", Verdict::BaseMoved),
                ("base/model_sha256", Verdict::BaseMoved),
                ("w4/codes_sha256", Verdict::NotComparable),
            ];
            assert_eq!(of_pair(&pair(shift, 0.0)), want.map(|(m, v)| (m.to_string(), v)), "{shift}");
        }
        // Both moved: both are told.
        let both = of_pair(&pair(-2.0, 2.0));
        assert!(both.contains(&("base/perplexity".into(), Verdict::BaseMoved)), "{both:?}");
        assert!(both.contains(&("w4/perplexity".into(), Verdict::Regressed)), "{both:?}");
        // A base that got worse by as much as the quantized model got better does not hide it.
        let hidden = of_pair(&pair(2.0, -2.0));
        assert!(hidden.contains(&("w4/perplexity".into(), Verdict::Improved)), "{hidden:?}");
    }

    #[test]
    fn without_samples_the_ratio_of_perplexities_decides() {
        let strip = |mut r: Report| {
            r.rows.iter_mut().for_each(|row| row.samples = None);
            r
        };
        assert_eq!(of_pair(&strip(pair(0.0, 2.0))), [("w4/perplexity".into(), Verdict::Regressed)]);
        let moved = of_pair(&strip(pair(2.0, 0.0)));
        assert!(!moved.iter().any(|(m, _)| m == "w4/perplexity"), "{moved:?}");
    }

    #[test]
    fn shares_are_expected_to_keep_their_distance_to_the_base() {
        // 200 items; the base has 120 right and loses 40 of them; the quantized model loses the same.
        let marks = |right: std::ops::Range<usize>| -> String {
            (0..200).map(|i| if right.contains(&i) { '1' } else { '0' }).collect()
        };
        let report = |base: std::ops::Range<usize>, own: std::ops::Range<usize>| {
            let mut r = Report::new("model").about("recipe_sha256", "abc").about("seed", 3);
            for (name, right) in [("base", base), ("w4", own)] {
                let s = Samples::Items { accuracy: marks(right.clone()), greedy: marks(right) };
                let mut row = Row::new(name).estimate("accuracy", &s.estimate("accuracy").unwrap());
                row.samples = Some(s);
                row.base = (name == "w4").then(|| "base".into());
                r.rows.push(row);
            }
            r
        };
        let t: Tolerances = [("accuracy".to_string(), Tolerance::Absolute(0.02))].into();
        let path = Path::new("b.json");
        let old = Baseline::of_report(path, "quick", "r", &report(0..120, 0..110), &t, setup(), "first").unwrap();
        let of = |r: &Report| -> Vec<(String, Verdict)> {
            let checks = compare(&old, r, &t, &setup()).unwrap();
            checks.into_iter().filter(|c| c.verdict != Verdict::Pass).map(|c| (c.row, c.verdict)).collect()
        };
        assert_eq!(of(&report(0..120, 0..110)), []);
        assert_eq!(of(&report(40..120, 40..110)), [("base".into(), Verdict::BaseMoved)]);
        assert_eq!(of(&report(0..120, 40..110)), [("w4".into(), Verdict::Regressed)]);
    }

    #[test]
    fn the_noise_between_seeds_counts_for_another_seed() {
        // +2.02% of perplexity is beyond 1%, and certain on these windows.
        let mut base = baseline();
        assert_eq!(verdicts(&report(2.0)), [("perplexity".into(), Verdict::Regressed)]);
        // Three seeds that are 0.1 apart at a perplexity of 9.1: t sqrt(2) 0.1 = 0.61.
        let spread = [("exported".to_string(), [("perplexity".to_string(), 0.01)].into())].into();
        base.seeds = Some(crate::Seeds { seeds: vec![3, 4, 5], spread });
        let judge = |base: &Baseline, seed: u64| {
            let r = report(2.0).about("seed", seed);
            let checks = compare(base, &r, &tolerances(), &setup()).unwrap();
            let told: Vec<(String, Verdict)> =
                checks.iter().filter(|c| c.verdict != Verdict::Pass).map(|c| (c.metric.clone(), c.verdict)).collect();
            (told, checks[0].note.clone())
        };
        // The same seed on the same hardware gives the same bits: there is no noise.
        assert_eq!(judge(&base, 3).0, [("perplexity".into(), Verdict::Regressed)]);
        let (told, note) = judge(&base, 4);
        let exact = ["codes_sha256", "scales_sha256"].map(|m| (m.to_string(), Verdict::NotComparable));
        assert_eq!(told, exact, "{note}");
        assert!(note.contains("and over seeds ["), "{note}");
        // A change far beyond the noise is still red.
        base.seeds.as_mut().unwrap().spread.get_mut("exported").unwrap().insert("perplexity".into(), 0.001);
        assert!(judge(&base, 4).0.contains(&("perplexity".into(), Verdict::Regressed)));
    }

    #[test]
    fn a_run_that_stopped_early_is_judged_on_the_blocks_that_it_has() {
        let cut = |mut r: Report, n: usize| {
            let row = &mut r.rows[0];
            let s = row.samples.take().unwrap().first(n);
            for metric in ["perplexity", "kl", "top1_agreement"] {
                row.set(metric, s.estimate_value(metric).unwrap());
            }
            row.samples = Some(s);
            r
        };
        let base = baseline();
        let all = base.rows[0].samples.as_ref().unwrap();
        let t = Tolerance::Relative(0.01);
        for (shift, want) in
            [(0.0, Verdict::Pass), (0.2, Verdict::Pass), (2.0, Verdict::Regressed), (-2.0, Verdict::Improved)]
        {
            let r = cut(report(shift), 20);
            let new = r.rows[0].samples.as_ref().unwrap();
            assert!(decided(t, "perplexity", (all, new), None, false), "{shift}");
            let checks = compare(&base, &r, &tolerances(), &setup()).unwrap();
            assert_eq!(checks[0].verdict, want, "{shift}: {}", checks[0].note);
            assert!(shift == 0.0 || checks[0].note.contains('+') || checks[0].note.contains('-'));
        }
        // Too early; across the tolerance (noise of 2 nats a window in a change of 1%); a quantile needs all blocks.
        assert!(!decided(t, "perplexity", (all, &all.first(8)), None, false));
        let Samples::Text { tokens, mut nll, kl, agree } = all.clone() else { unreachable!() };
        nll.iter_mut().enumerate().for_each(|(i, x)| *x += 1.0 + if i % 2 == 0 { 6.0 } else { -6.0 });
        let noisy = Samples::Text { tokens, nll, kl, agree };
        assert!(!decided(t, "perplexity", (all, &noisy.first(30)), None, false));
        assert!(
            !decided(t, "kl_p99", (all, all), None, false)
                && decided(Tolerance::Exact, "kl_p99", (all, all), None, false)
        );
        assert!(decided(t, "bits_per_weight", (all, all), None, false));
        // Against a base that moved with it, nothing moved.
        let (then, now) = (samples(0.0), samples(5.0));
        assert!(decided(t, "perplexity", (&then, &now.first(20)), Some((&then, &now)), false));
    }
}
