//! A committed measurement that later ones are compared with. Read strictly: what cannot be trusted is an error and
//! never a pass.

use crate::{EvalError, Hardware, Report, Row, Samples, Tolerance, Tolerances, suite::tolerance_of};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Version of the baseline's form.
pub const BASELINE_FORMAT: u32 = 2;

/// Largest baseline file that is read, bytes.
const MAX_BYTES: u64 = 16 << 20;

/// What measures: everything beside the recipe that numbers may depend on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// Version of dsq.
    pub dsq: String,
    /// `cpu`...
    pub device: String,
    /// The kernel that each kind of layer runs on, as `dsq doctor` tells.
    pub kernels: BTreeMap<String, String>,
    /// Versions of the direct dependencies that it was built with.
    pub dependencies: BTreeMap<String, String>,
    /// The machine.
    pub hardware: Hardware,
}

impl Setup {
    /// How `self` and `other` differ, on a line; `None` when they do not.
    pub fn difference(&self, other: &Setup) -> Option<String> {
        let mut all = Vec::new();
        let mut tell = |what: &str, there: &str, here: &str| {
            if there != here {
                all.push(format!("{what} {there} there, {here} here"));
            }
        };
        tell("dsq", &self.dsq, &other.dsq);
        tell("device", &self.device, &other.device);
        for (there, here) in [(&self.kernels, &other.kernels), (&self.dependencies, &other.dependencies)] {
            let mut names: Vec<&String> = there.keys().chain(here.keys()).collect();
            names.sort_unstable();
            names.dedup();
            for name in names {
                let of = |side: &BTreeMap<String, String>| side.get(name).cloned().unwrap_or_else(|| "none".into());
                tell(name, &of(there), &of(here));
            }
        }
        all.extend(self.hardware.difference(&other.hardware));
        (!all.is_empty()).then(|| all.join("; "))
    }
}

/// How far a metric moves from one training seed to another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seeds {
    /// The seeds that were measured.
    pub seeds: Vec<u64>,
    /// Row -> metric -> standard deviation over the seeds, on the metric's own scale (see `Scale`).
    pub spread: BTreeMap<String, BTreeMap<String, f64>>,
}

impl Seeds {
    /// The spread of what the reports, one for each seed, say on the metrics that may move by a tolerance; two reports at least.
    pub(crate) fn of_reports(reports: &[&Report], tolerances: &Tolerances) -> Self {
        let seeds = reports.iter().map(|r| r.about.get("seed").and_then(Value::as_u64).unwrap_or(0)).collect();
        let mut spread: BTreeMap<String, BTreeMap<String, f64>> = BTreeMap::new();
        for row in reports.first().iter().flat_map(|r| &r.rows) {
            for metric in row.metrics.keys() {
                let moves = matches!(
                    tolerance_of(tolerances, &row.name, metric),
                    Some(Tolerance::Relative(_) | Tolerance::Absolute(_) | Tolerance::Within(_))
                );
                let values: Vec<f64> =
                    reports.iter().filter_map(|r| r.row(&row.name)?.get(metric)).filter(|x| x.is_finite()).collect();
                if !moves || values.len() != reports.len() {
                    continue;
                }
                let values: Vec<f64> = values.iter().map(|x| Scale::of(metric).to(*x)).collect();
                let mean = values.iter().sum::<f64>() / values.len() as f64;
                let squares: f64 = values.iter().map(|x| (x - mean).powi(2)).sum();
                let deviation = (squares / (values.len() - 1) as f64).sqrt();
                spread.entry(row.name.clone()).or_default().insert(metric.clone(), deviation);
            }
        }
        Self { seeds, spread }
    }

    /// How far below and above `value` a metric of a run may be expected beside another run of a different seed, from noise alone. Holds for all
    /// metrics that have a spread at once, 95 times of 100: `t sqrt(2) s` on the metric's scale, with Student's `t` of one degree of
    /// freedom less than there are seeds, at 5% divided by the number of metrics (Bonferroni). Nothing where the metric has no spread.
    pub(crate) fn noise(&self, row: &str, metric: &str, value: f64) -> (f64, f64) {
        let s = self.spread.get(row).and_then(|m| m.get(metric)).copied().unwrap_or(0.0);
        if s == 0.0 {
            return (0.0, 0.0);
        }
        let metrics: usize = self.spread.values().map(BTreeMap::len).sum();
        let two_sided = 0.05 / metrics.max(1) as f64;
        let half = student(self.seeds.len().saturating_sub(1), two_sided) * 2f64.sqrt() * s;
        let scale = Scale::of(metric);
        let at = scale.to(value);
        (value - scale.from(at - half), scale.from(at + half) - value)
    }
}

/// The scale on which a metric moves by about as much up as down.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scale {
    /// Perplexity and divergences: a factor.
    Log,
    /// Shares: the odds.
    Odds,
    /// As it is.
    Plain,
}

impl Scale {
    fn of(metric: &str) -> Self {
        match metric {
            m if m == "perplexity" || m.starts_with("kl") => Scale::Log,
            "top1" | "top5" | "top1_agreement" | "accuracy" | "greedy" => Scale::Odds,
            _ => Scale::Plain,
        }
    }

    fn to(self, x: f64) -> f64 {
        match self {
            Scale::Log => x.max(1e-12).ln(),
            // A share of 1 is one that some thousand more would show to be less.
            Scale::Odds => {
                let x = x.clamp(1e-4, 1.0 - 1e-4);
                (x / (1.0 - x)).ln()
            }
            Scale::Plain => x,
        }
    }

    fn from(self, y: f64) -> f64 {
        match self {
            Scale::Log => y.exp(),
            Scale::Odds => 1.0 / (1.0 + (-y).exp()),
            Scale::Plain => y,
        }
    }
}

/// The value that Student's t with `freedom` degrees of freedom exceeds, either way, with probability `two_sided`. By bisection on the
/// closed form for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).
pub fn student(freedom: usize, two_sided: f64) -> f64 {
    let n = freedom.max(1);
    let within = |t: f64| -> f64 {
        let angle = (t / (n as f64).sqrt()).atan();
        let (sin, cos) = angle.sin_cos();
        let odd = n % 2 == 1;
        // Terms of even powers of the cosine, or of odd ones.
        let (mut term, mut sum, mut i) = if odd { (cos, 0.0, 1) } else { (1.0, 0.0, 0) };
        while i + 2 <= n {
            sum += term;
            let next = (i + 1) as f64 / (i + 2) as f64;
            term *= next * cos * cos;
            i += 2;
        }
        if odd { 2.0 / std::f64::consts::PI * (angle + sin * sum) } else { sin * sum }
    };
    let (mut low, mut high) = (0.0, 1.0);
    while 1.0 - within(high) > two_sided && high < 1e12 {
        high *= 2.0;
    }
    for _ in 0..200 {
        let middle = 0.5 * (low + high);
        if 1.0 - within(middle) > two_sided { low = middle } else { high = middle }
    }
    high
}

/// A baseline file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    /// Version of this form ([`BASELINE_FORMAT`]).
    pub format: u32,
    /// Name of the suite.
    pub suite: String,
    /// Name of the recipe, or `fixed`.
    pub recipe: String,
    /// SHA-256 of the recipe as it ran, the suite's settings included.
    pub recipe_sha256: String,
    /// The recipe's seed.
    pub seed: u64,
    /// Why this became the baseline.
    pub reason: String,
    /// What measured.
    pub setup: Setup,
    /// What other seeds gave, where they were asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seeds: Option<Seeds>,
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
    /// The row of the float model that it was made from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
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
        setup: Setup,
        reason: &str,
    ) -> Result<Self, EvalError> {
        let refuse = |field: &str, problem: &str| Err(EvalError::baseline(path, field, problem));
        let Some(Value::String(recipe_sha256)) = report.about.get("recipe_sha256") else {
            return refuse("recipe_sha256", "expected the recipe's digest in the report, got none");
        };
        for metric in tolerances.keys() {
            let named = |r: &Row| match metric.rsplit_once('/') {
                Some((row, metric)) => r.name == row && r.metrics.contains_key(metric),
                None => r.metrics.contains_key(metric),
            };
            if !report.rows.iter().any(named) {
                return refuse(metric, "the suite names it; expected it in a row of the report, got none");
            }
        }
        for row in &report.rows {
            for (metric, value) in &row.metrics {
                let Some(tolerance) = tolerance_of(tolerances, &row.name, metric) else { continue };
                if tolerance.keeps_bound(value.as_f64()) == Some(false) {
                    let field = format!("rows.{}.{metric}", row.name);
                    return refuse(&field, &format!("cannot be blessed; expected {tolerance}, got {value}"));
                }
            }
        }
        let rows = report.rows.iter().map(|row| BaselineRow::of_row(row, tolerances)).filter(|r| !r.metrics.is_empty());
        let baseline = Self {
            format: BASELINE_FORMAT,
            suite: suite.into(),
            recipe: recipe.into(),
            recipe_sha256: recipe_sha256.clone(),
            seed: report.about.get("seed").and_then(Value::as_u64).unwrap_or(0),
            reason: reason.into(),
            setup,
            seeds: None,
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
        let spreads = self.seeds.iter().flat_map(|s| s.spread.values()).flat_map(BTreeMap::values);
        if let Some(x) = spreads.clone().find(|x| !x.is_finite() || **x < 0.0) {
            return refuse("seeds.spread".into(), format!("expected finite numbers of at least 0, got {x}"));
        }
        if let Some(n) = self.seeds.as_ref().map(|s| s.seeds.len()).filter(|n| *n < 2) {
            return refuse("seeds.seeds".into(), format!("expected at least 2, got {n}"));
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
            if let Some(base) = row.base.as_ref().filter(|b| self.row(b).is_none()) {
                return refuse(at("base"), format!("expected a row of this file, got {base:?}"));
            }
            let Some(samples) = &row.samples else { continue };
            if let Err(problem) = samples.validate() {
                return refuse(at("samples"), problem);
            }
            // The sums are rounded to 1e-6 nats a window: far below this in any of the metrics.
            for metric in ["perplexity", "kl", "top1_agreement", "top1", "top5", "accuracy", "greedy"] {
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
        let keep = |metric: &str| tolerance_of(tolerances, &row.name, metric).is_some();
        Self {
            name: row.name.clone(),
            metrics: row.metrics.iter().filter(|(m, _)| keep(m)).map(|(m, v)| (m.clone(), v.clone())).collect(),
            parts: row.parts.iter().filter(|(m, _)| keep(m)).map(|(m, p)| (m.clone(), p.clone())).collect(),
            base: row.base.clone(),
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

    fn setup() -> Setup {
        Setup {
            dsq: "0.1.0".into(),
            device: "cpu".into(),
            kernels: [("int4 linear".into(), "avx2".into())].into(),
            dependencies: [("burn".into(), "0.22.1".into())].into(),
            hardware: Hardware::detect(),
        }
    }

    #[test]
    fn setups_tell_their_differences() {
        let (a, mut b) = (setup(), setup());
        assert_eq!(a.difference(&b), None);
        b.dependencies = [("half".into(), "2.0.0".into())].into();
        b.kernels.clear();
        b.dsq = "0.2.0".into();
        let want = "dsq 0.1.0 there, 0.2.0 here; int4 linear avx2 there, none here; burn 0.22.1 there, none here; half none there, 2.0.0 here";
        assert_eq!(a.difference(&b).unwrap(), want);
    }

    #[test]
    fn the_spread_of_seeds_is_their_standard_deviation() {
        let of = |seed: u64, perplexity: f64| {
            let mut r = Report::new("train").about("seed", seed);
            r.rows.push(Row::new("qat").number("perplexity", perplexity).number("kl", 0.5).text("codes_sha256", "aa"));
            r
        };
        let reports = [of(1, 10.0), of(2, 12.0), of(3, 14.0)];
        let seeds = Seeds::of_reports(&reports.iter().collect::<Vec<_>>(), &tolerances());
        assert_eq!(seeds.seeds, [1, 2, 3]);
        let logs = [10f64, 12.0, 14.0].map(f64::ln);
        let mean = logs.iter().sum::<f64>() / 3.0;
        let deviation = (logs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 2.0).sqrt();
        assert!((seeds.spread["qat"]["perplexity"] - deviation).abs() < 1e-12 && seeds.spread["qat"]["kl"] == 0.0);
        // Two metrics: 2.5% for each, 6.2053 with two degrees of freedom.
        let factor = (6.205_347 * 2f64.sqrt() * deviation).exp();
        let (below, above) = seeds.noise("qat", "perplexity", 12.0);
        assert!((above - 12.0 * (factor - 1.0)).abs() < 1e-4 && (below - 12.0 * (1.0 - 1.0 / factor)).abs() < 1e-4);
        assert_eq!((seeds.noise("qat", "kl", 0.5), seeds.noise("float", "perplexity", 9.0)), ((0.0, 0.0), (0.0, 0.0)));
    }

    #[test]
    fn students_t_is_that_of_the_tables() {
        for (freedom, two_sided, want) in [
            (1, 0.05, 12.7062),
            (2, 0.05, 4.3027),
            (3, 0.05, 3.1824),
            (4, 0.05, 2.7764),
            (7, 0.05, 2.3646),
            (10, 0.01, 3.1693),
            (7, 0.002, 4.7853),
            (30, 0.001, 3.6460),
        ] {
            assert!(
                (student(freedom, two_sided) - want).abs() < 1e-4,
                "{freedom} {two_sided}: {}",
                student(freedom, two_sided)
            );
        }
    }

    #[test]
    fn shares_and_divergences_move_on_their_own_scales() {
        for (metric, x) in [("kl", 3e-4), ("perplexity", 300.0), ("top1_agreement", 0.45), ("bits", -2.0)] {
            let scale = Scale::of(metric);
            assert!((scale.from(scale.to(x)) - x).abs() < 1e-9 * x.abs(), "{metric}");
        }
        assert!(Scale::Odds.to(1.0).is_finite() && Scale::Log.to(0.0).is_finite());
    }

    fn baseline() -> Baseline {
        let path = Path::new("b.json");
        Baseline::of_report(path, "quick", "r", &report(), &tolerances(), setup(), "first").unwrap()
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
            (good.replace("\"format\": 2", "\"format\": 1"), "expected 2, got 1"),
            (good.replace(&ppl, "null"), "finite number or a text, got null"),
            (good.replace(&ppl, "NaN"), "expected value"),
            (good.replace(&ppl, "1e999"), "out of range"),
            (good.replace(&ppl, "5.0"), "contradicts the samples"),
            (good.replace("\"seed\": 3,", ""), "missing field `seed`"),
            (good.replace("\"seed\": 3,", "\"seed\": 3, \"seed\": 4,"), "duplicate field"),
            (good.replace("\"seed\": 3,", "\"seed\": 3, \"sed\": 4,"), "unknown field"),
            (good.replace("\"rows\": [", "\"rows\": [], \"x\": ["), "unknown field"),
            (good.replace("\"tokens\": [7,", "\"tokens\": ["), "samples.nll"),
            (
                good.replace("\"setup\"", "\"seeds\": {\"seeds\": [1], \"spread\": {}},\n  \"setup\""),
                "expected at least 2, got 1",
            ),
            (
                good.replace(
                    "\"setup\"",
                    "\"seeds\": {\"seeds\": [1, 2], \"spread\": {\"a\": {\"kl\": -1.0}}},\n  \"setup\"",
                ),
                "got -1",
            ),
            (
                good.replace("\"name\": \"exported\",", "\"name\": \"exported\", \"base\": \"float\","),
                "expected a row of this file, got \"float\"",
            ),
            ("{\"format\": 2}".into(), "missing field"),
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
        let of = |r: &Report| Baseline::of_report(Path::new("b.json"), "quick", "r", r, &tolerances(), setup(), "x");
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
