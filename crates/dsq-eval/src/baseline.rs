//! A committed measurement that later ones are compared with. Read strictly: what cannot be trusted is an error and
//! never a pass.

use crate::{EvalError, Hardware, Report, Row, Samples, Tolerances};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Version of the baseline's form.
pub const BASELINE_FORMAT: u32 = 1;

/// Largest baseline file that is read, bytes.
const MAX_BYTES: u64 = 16 << 20;

/// A baseline file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    /// Version of this form ([`BASELINE_FORMAT`]).
    pub format: u32,
    /// Version of dsq that measured.
    pub dsq: String,
    /// Name of the suite.
    pub suite: String,
    /// Name of the recipe, or `fixed`.
    pub recipe: String,
    /// SHA-256 of the recipe as it ran, the suite's settings included.
    pub recipe_sha256: String,
    /// The recipe's seed.
    pub seed: u64,
    /// The machine.
    pub hardware: Hardware,
    /// Why this became the baseline.
    pub reason: String,
    /// The measurement.
    pub rows: Vec<BaselineRow>,
    /// The file it was read from.
    #[serde(skip)]
    pub path: PathBuf,
}

/// One row of a baseline.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaselineRow {
    /// The row's name.
    pub name: String,
    /// Finite numbers and texts.
    pub metrics: Map<String, Value>,
    /// Digest -> part -> digest of that part.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parts: BTreeMap<String, BTreeMap<String, String>>,
    /// Sums per block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub samples: Option<Samples>,
}

impl Baseline {
    /// Makes a baseline of what `report` says on the metrics that `tolerances` name. `report.about` must hold
    /// `recipe_sha256` and may hold `seed`.
    ///
    /// # Errors
    /// [`EvalError::Baseline`] when a named metric is in no row, a value is not finite, or the digest is missing: such
    /// a report cannot become a baseline.
    pub fn of_report(
        path: &Path,
        suite: &str,
        recipe: &str,
        report: &Report,
        tolerances: &Tolerances,
        hardware: Hardware,
        reason: &str,
    ) -> Result<Self, EvalError> {
        let refuse = |field: &str, problem: &str| Err(EvalError::baseline(path, field, problem));
        let Some(Value::String(recipe_sha256)) = report.about.get("recipe_sha256") else {
            return refuse("recipe_sha256", "expected the recipe's digest in the report, got none");
        };
        for metric in tolerances.keys() {
            if !report.rows.iter().any(|r| r.metrics.contains_key(metric)) {
                return refuse(metric, "the suite names it; expected it in a row of the report, got none");
            }
        }
        for row in &report.rows {
            for (metric, value) in &row.metrics {
                let Some(tolerance) = tolerances.get(metric) else { continue };
                if tolerance.keeps_bound(value.as_f64()) == Some(false) {
                    let field = format!("rows.{}.{metric}", row.name);
                    return refuse(&field, &format!("cannot be blessed; expected {tolerance}, got {value}"));
                }
            }
        }
        let rows = report.rows.iter().map(|row| BaselineRow::of_row(row, tolerances)).filter(|r| !r.metrics.is_empty());
        let baseline = Self {
            format: BASELINE_FORMAT,
            dsq: report.dsq.clone(),
            suite: suite.into(),
            recipe: recipe.into(),
            recipe_sha256: recipe_sha256.clone(),
            seed: report.about.get("seed").and_then(Value::as_u64).unwrap_or(0),
            hardware,
            reason: reason.into(),
            rows: rows.collect(),
            path: path.into(),
        };
        baseline.validate()?;
        Ok(baseline)
    }

    /// Reads a baseline.
    ///
    /// # Errors
    /// [`EvalError::Baseline`] (exit 3) for a file that is missing, empty, not JSON, of another version, has unknown,
    /// missing or repeated fields, values that are not finite, or sums that contradict the metrics.
    pub fn load(path: &Path) -> Result<Self, EvalError> {
        let refuse = |problem: String| EvalError::baseline(path, "file", problem);
        let meta = std::fs::metadata(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => refuse("expected a baseline file, got none".into()),
            _ => EvalError::Io { path: path.into(), action: "read", source: e },
        })?;
        if !meta.is_file() || meta.len() > MAX_BYTES {
            return Err(refuse(format!(
                "expected a plain file of at most {MAX_BYTES} bytes, got {} bytes",
                meta.len()
            )));
        }
        let bytes =
            std::fs::read(path).map_err(|source| EvalError::Io { path: path.into(), action: "read", source })?;
        if bytes.is_empty() {
            return Err(refuse("expected JSON, got an empty file".into()));
        }
        let mut baseline: Self = serde_json::from_slice(&bytes).map_err(|e| refuse(e.to_string()))?;
        baseline.path = path.into();
        baseline.validate()?;
        Ok(baseline)
    }

    /// The file's content: JSON, a metric or field a line, sums on one line each.
    pub fn to_json(&self) -> String {
        // Maps with text keys and finite numbers always serialize.
        let value = serde_json::to_value(self).unwrap_or_default();
        let mut out = String::new();
        write_json(&value, 0, &mut out);
        out.push('\n');
        out
    }

    /// Whether this baseline is of the recipe and the seed that are about to run.
    ///
    /// # Errors
    /// [`EvalError::Baseline`] when it is not: the baseline is stale.
    pub fn check_identity(&self, recipe_sha256: &str, seed: u64) -> Result<(), EvalError> {
        if recipe_sha256 != self.recipe_sha256 {
            let problem = format!("measured with another recipe; expected {recipe_sha256}, got {}", self.recipe_sha256);
            return Err(EvalError::baseline(&self.path, "recipe_sha256", problem));
        }
        if seed != self.seed {
            return Err(EvalError::baseline(&self.path, "seed", format!("expected {seed}, got {}", self.seed)));
        }
        Ok(())
    }

    /// The row of that name.
    pub fn row(&self, name: &str) -> Option<&BaselineRow> {
        self.rows.iter().find(|r| r.name == name)
    }

    fn validate(&self) -> Result<(), EvalError> {
        let refuse = |field: String, problem: String| Err(EvalError::baseline(&self.path, field, problem));
        if self.format != BASELINE_FORMAT {
            return refuse("format".into(), format!("expected {BASELINE_FORMAT}, got {}", self.format));
        }
        if self.rows.is_empty() {
            return refuse("rows".into(), "expected at least one, got none".into());
        }
        for (i, row) in self.rows.iter().enumerate() {
            let at = |what: &str| format!("rows.{}.{what}", row.name);
            if self.rows[..i].iter().any(|r| r.name == row.name) {
                return refuse(at("name"), "expected different names, got this one twice".into());
            }
            if row.metrics.is_empty() {
                return refuse(at("metrics"), "expected at least one, got none".into());
            }
            for (metric, value) in &row.metrics {
                let fine = match value {
                    Value::String(s) => !s.is_empty(),
                    Value::Number(x) => x.as_f64().is_some_and(f64::is_finite),
                    _ => false,
                };
                if !fine {
                    return refuse(at(metric), format!("expected a finite number or a text, got {value}"));
                }
            }
            let Some(samples) = &row.samples else { continue };
            if let Err(problem) = samples.validate() {
                return refuse(at("samples"), problem);
            }
            // The sums are rounded to 1e-6 nats a window: far below this in any of the metrics.
            for metric in ["perplexity", "kl", "top1_agreement", "top1"] {
                let stated = row.metrics.get(metric).and_then(Value::as_f64);
                let summed = samples.estimate_value(metric);
                if let (Some(a), Some(b)) = (stated, summed)
                    && (a - b).abs() > 1e-5 * a.abs().max(1e-2)
                {
                    return refuse(at(metric), format!("contradicts the samples; expected {b}, got {a}"));
                }
            }
        }
        Ok(())
    }
}

impl BaselineRow {
    fn of_row(row: &Row, tolerances: &Tolerances) -> Self {
        let keep = |metric: &str| tolerances.contains_key(metric);
        Self {
            name: row.name.clone(),
            metrics: row.metrics.iter().filter(|(m, _)| keep(m)).map(|(m, v)| (m.clone(), v.clone())).collect(),
            parts: row.parts.iter().filter(|(m, _)| keep(m)).map(|(m, p)| (m.clone(), p.clone())).collect(),
            samples: row.samples.as_ref().map(Samples::rounded),
        }
    }
}

/// JSON with two spaces of indent, where a list of plain values stays on one line: a diff of two baselines shows a
/// line for each metric.
fn write_json(value: &Value, depth: usize, out: &mut String) {
    let pad = |depth: usize| "  ".repeat(depth);
    match value {
        Value::Object(map) if !map.is_empty() => {
            out.push_str("{\n");
            for (i, (key, v)) in map.iter().enumerate() {
                out.push_str(&format!("{}{}: ", pad(depth + 1), Value::from(key.as_str())));
                write_json(v, depth + 1, out);
                out.push_str(if i + 1 < map.len() { ",\n" } else { "\n" });
            }
            out.push_str(&format!("{}}}", pad(depth)));
        }
        Value::Array(list) if list.iter().any(|v| v.is_object() || v.is_array()) => {
            out.push_str("[\n");
            for (i, v) in list.iter().enumerate() {
                out.push_str(&pad(depth + 1));
                write_json(v, depth + 1, out);
                out.push_str(if i + 1 < list.len() { ",\n" } else { "\n" });
            }
            out.push_str(&format!("{}]", pad(depth)));
        }
        plain => out.push_str(&plain.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{TextEval, Tolerance};

    fn report() -> Report {
        let mut eval = TextEval::new();
        for w in 0..5u32 {
            let logits: Vec<f32> = (0..32).map(|i| ((i * 7 + w * 3) % 11) as f32).collect();
            eval.window(&[0, 1, 2, 3, 0, 1, 2, 3], &logits, Some(&[0.0; 32])).unwrap();
        }
        let mut r = Report::new("train").about("recipe_sha256", "abc").about("seed", 3);
        let mut row = Row::new("exported").text_metrics(&eval.finish().unwrap()).text("codes_sha256", "00ff");
        row.parts.entry("codes_sha256".into()).or_default().insert("layer".into(), "00".into());
        r.rows.push(row.number("tokens_per_second", 99.5));
        r
    }

    fn tolerances() -> Tolerances {
        [
            ("perplexity", Tolerance::Relative(0.01)),
            ("kl", Tolerance::Relative(0.1)),
            ("codes_sha256", Tolerance::Exact),
        ]
        .map(|(m, t)| (m.to_string(), t))
        .into()
    }

    fn baseline() -> Baseline {
        let path = Path::new("b.json");
        Baseline::of_report(path, "quick", "r", &report(), &tolerances(), Hardware::detect(), "first").unwrap()
    }

    fn read(text: &str) -> Result<Baseline, EvalError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("b.json");
        std::fs::write(&path, text).unwrap();
        Baseline::load(&path)
    }

    #[test]
    fn a_baseline_survives_its_file() {
        let b = baseline();
        let json = b.to_json();
        let again = read(&json).unwrap();
        assert_eq!(again.rows, b.rows);
        assert_eq!((again.seed, again.reason.as_str()), (3, "first"));
        let metrics: Vec<&String> = b.rows[0].metrics.keys().collect();
        assert_eq!(metrics, ["perplexity", "kl", "codes_sha256"], "only what the suite names");
        assert!(json.lines().any(|l| l.trim_start().starts_with("\"perplexity\": ")), "{json}");
    }

    #[test]
    fn f102_bad_baselines_never_pass() {
        let good = baseline().to_json();
        let ppl = baseline().rows[0].metrics["perplexity"].to_string();
        for (text, want) in [
            (String::new(), "empty file"),
            (good[..good.len() / 2].to_string(), "EOF"),
            (good.replace("\"format\": 1", "\"format\": 2"), "expected 1, got 2"),
            (good.replace(&ppl, "null"), "finite number or a text, got null"),
            (good.replace(&ppl, "NaN"), "expected value"),
            (good.replace(&ppl, "1e999"), "out of range"),
            (good.replace(&ppl, "5.0"), "contradicts the samples"),
            (good.replace("\"seed\": 3,", ""), "missing field `seed`"),
            (good.replace("\"seed\": 3,", "\"seed\": 3, \"seed\": 4,"), "duplicate field"),
            (good.replace("\"seed\": 3,", "\"seed\": 3, \"sed\": 4,"), "unknown field"),
            (good.replace("\"rows\": [", "\"rows\": [], \"x\": ["), "unknown field"),
            (good.replace("\"tokens\": [7,", "\"tokens\": ["), "samples.nll"),
            ("{\"format\": 1}".into(), "missing field"),
        ] {
            let err = read(&text).expect_err(want);
            assert!(err.to_string().contains(want), "{want}: {err}");
            assert!(err.to_string().contains("baseline unusable"), "{err}");
            assert_eq!(err.exit_code(), 3);
        }
        assert_eq!(Baseline::load(Path::new("/nonexistent/b.json")).unwrap_err().exit_code(), 3);
    }

    #[test]
    fn a_report_that_lacks_something_cannot_become_a_baseline() {
        let of = |r: &Report| {
            Baseline::of_report(Path::new("b.json"), "quick", "r", r, &tolerances(), Hardware::detect(), "x")
        };
        let mut r = report();
        r.rows[0].metrics.remove("codes_sha256");
        assert!(of(&r).unwrap_err().to_string().contains("codes_sha256"));
        let mut r = report();
        r.rows[0].set("kl", f64::NAN);
        assert!(of(&r).unwrap_err().to_string().contains("rows.exported.kl"));
        let mut r = report();
        r.about.remove("recipe_sha256");
        assert!(of(&r).is_err());
    }
}
