//! What each version of dsq measured, side by side: from the committed baselines, oldest first, and the present run behind them. It measures
//! nothing.

use dsq_eval::{Baseline, EvalError, Report, Row, Suite, tolerance_of};
use serde_json::{Map, Value};

/// The metrics of which a quantized model is told beside its float model, the first that a row has.
const MAIN: [&str; 4] = ["perplexity", "top1", "accuracy", "greedy"];

/// A row of one version.
struct Entry {
    version: String,
    row: String,
    base: Option<String>,
    metrics: Map<String, Value>,
}

/// For each job and quantized row of `suite`, a row for each version: `version`, `metric` and its `value`, `fp32` (the same of the float model
/// that it was made from), `difference`, `trend` (the change of the difference from the version before), `kl`, `bits_per_weight`. `now`: reports of
/// the present run by job.
///
/// # Errors
/// Baselines that cannot be used.
pub fn history(suite: &Suite, now: &[(String, Report)]) -> Result<Report, EvalError> {
    let mut report = Report::new("regress").about("suite", suite.name.as_str());
    let recipes = suite.recipes.iter().map(|r| (r.name(), &r.tolerance));
    let models = suite.models.iter().map(|m| (m.name.clone(), &m.tolerance));
    for (job, tolerances) in recipes.chain(models) {
        let mut entries = Vec::new();
        for version in suite.baseline_versions(&job)? {
            let baseline = Baseline::load(&suite.baseline_path(&version.to_string(), &job))?;
            entries.extend(baseline.rows.into_iter().map(|r| Entry {
                version: version.to_string(),
                row: r.name,
                base: r.base,
                metrics: r.metrics,
            }));
        }
        for row in now.iter().filter(|(name, _)| *name == job).flat_map(|(_, r)| &r.rows) {
            let named = |metric: &String| tolerance_of(tolerances, &row.name, metric).is_some();
            let metrics = row.metrics.iter().filter(|(m, _)| named(m)).map(|(m, v)| (m.clone(), v.clone())).collect();
            entries.push(Entry { version: "now".into(), row: row.name.clone(), base: row.base.clone(), metrics });
        }
        let mut names: Vec<&str> = Vec::new();
        for e in entries.iter().filter(|e| e.base.is_some()) {
            if !names.contains(&e.row.as_str()) {
                names.push(&e.row);
            }
        }
        for name in names {
            let mut before = None;
            for e in entries.iter().filter(|e| e.row == name) {
                report.rows.extend(line(&job, e, &entries, &mut before));
            }
        }
    }
    Ok(report)
}

/// One line of the table; `before` is the difference of the version before, and becomes this one's.
fn line(job: &str, e: &Entry, all: &[Entry], before: &mut Option<f64>) -> Option<Row> {
    let number = |e: &Entry, metric: &str| e.metrics.get(metric).and_then(Value::as_f64);
    let metric = MAIN.into_iter().find(|m| number(e, m).is_some())?;
    let value = number(e, metric)?;
    let mut row = Row::new(format!("{job}/{}", e.row)).text("version", &e.version);
    row = row.text("metric", metric).number("value", value);
    let floats = all.iter().find(|f| f.version == e.version && Some(&f.row) == e.base.as_ref());
    if let Some(fp32) = floats.and_then(|f| number(f, metric)) {
        let difference = value - fp32;
        // A smaller loss is better: of perplexity a smaller difference, of shares a larger one.
        let worse = if metric == "perplexity" { 1.0 } else { -1.0 };
        row = row.number("fp32", fp32).number("difference", difference);
        let trend = match before.map(|b| worse * (difference - b)) {
            None => "-".into(),
            // The digits that the table shows.
            Some(d) if d.abs() < 5e-5 * value.abs() => "same".into(),
            Some(d) if d > 0.0 => format!("worse by {:.4}", d),
            Some(d) => format!("better by {:.4}", -d),
        };
        row = row.text("trend", trend);
        *before = Some(difference);
    }
    for metric in ["kl", "bits_per_weight"] {
        if let Some(x) = number(e, metric) {
            row = row.number(metric, x);
        }
    }
    Some(row)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsq_eval::{Hardware, Setup};

    #[test]
    fn versions_stand_in_order_with_their_difference_and_trend() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s.toml");
        let text = "[tolerance]\nperplexity = { relative = 0.1 }\n[[recipe]]\npath = \"r.toml\"\n";
        std::fs::write(&path, text).unwrap();
        let suite = Suite::load(&path).unwrap();
        let report = |float: f64, own: f64| {
            let mut r = Report::new("train").about("recipe_sha256", "abc").about("seed", 1);
            r.rows.push(Row::new("float").number("perplexity", float));
            let mut row = Row::new("exported").number("perplexity", own).number("kl", 0.5);
            row.base = Some("float".into());
            r.rows.push(row);
            r
        };
        for (version, float, own) in [("0.9.0", 10.0, 11.0), ("0.10.0", 10.0, 10.5)] {
            let setup = Setup {
                dsq: version.into(),
                device: "cpu".into(),
                kernels: Default::default(),
                dependencies: Default::default(),
                hardware: Hardware::detect(),
            };
            let path = suite.baseline_path(version, "r");
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            let tolerances = &suite.recipes[0].tolerance;
            let b = Baseline::of_report(&path, "s", "r", &report(float, own), tolerances, setup, "test").unwrap();
            std::fs::write(&path, b.to_json()).unwrap();
        }
        let table = history(&suite, &[("r".into(), report(9.0, 10.25))]).unwrap();
        let told: Vec<_> = table
            .rows
            .iter()
            .map(|r| {
                let text = |m: &str| r.metrics[m].as_str().unwrap().to_owned();
                (text("version"), r.get("difference").unwrap(), text("trend"))
            })
            .collect();
        let want = [("0.9.0", 1.0, "-"), ("0.10.0", 0.5, "better by 0.5000"), ("now", 1.25, "worse by 0.7500")];
        assert_eq!(told, want.map(|(v, d, t)| (v.to_string(), d, t.to_string())));
        assert!(
            table.rows.iter().all(|r| r.name == "r/exported" && r.get("kl").is_none()),
            "what the suite does not name is left out"
        );
    }
}
