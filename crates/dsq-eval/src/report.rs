//! Rows of named metrics, as JSON and as a text table. Not a file format of its own: `--json` prints a report, and
//! `report.json` holds one.
//!
//! The contract: a table is `rows`, a list of objects with `name` and metrics under their full names (`perplexity`,
//! `kl`, `top1_agreement`, `top1`, `bits_per_weight`, `tokens_per_second`...). A metric `x` with an interval also has
//! `x_low` and `x_high`. Shares run from 0 to 1. Digests are texts under a name that ends with `_sha256`.

use crate::{Estimate, Samples};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Version of the report's form.
pub const REPORT_FORMAT: u32 = 1;

/// Metrics that fit side by side on a line.
const MOST_COLUMNS: usize = 9;

/// One line of a table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Which model or setting: `float`, `rtn`, `qat`, `exported`, `model`, `reference`...
    pub name: String,
    /// Metrics under their full names: numbers (null where one is not finite) and texts.
    #[serde(flatten)]
    pub metrics: Map<String, Value>,
    /// The row of the float model that this one was made from, where the same run measured it: a change of that one is no change of this
    /// one. Not printed, kept in baselines.
    #[serde(skip)]
    pub base: Option<String>,
    /// Sums per block for paired comparison; not printed, kept in baselines.
    #[serde(skip)]
    pub samples: Option<Samples>,
    /// The parts of a digest (`codes_sha256` -> module -> digest of that module), so that a verdict can name the
    /// part that moved; not printed, kept in baselines.
    #[serde(skip)]
    pub parts: BTreeMap<String, BTreeMap<String, String>>,
}

impl Row {
    /// A row without metrics.
    pub fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), metrics: Map::new(), base: None, samples: None, parts: BTreeMap::new() }
    }

    /// Adds a number.
    #[must_use]
    pub fn number(mut self, metric: &str, value: f64) -> Self {
        self.set(metric, value);
        self
    }

    /// Adds a number and its interval.
    #[must_use]
    pub fn estimate(mut self, metric: &str, e: &Estimate) -> Self {
        self.set(metric, e.value);
        if e.has_interval() {
            self.set(&format!("{metric}_low"), e.low);
            self.set(&format!("{metric}_high"), e.high);
        }
        self
    }

    /// Adds a number and its interval when there is one.
    #[must_use]
    pub fn maybe(self, metric: &str, e: Option<&Estimate>) -> Self {
        match e {
            Some(e) => self.estimate(metric, e),
            None => self,
        }
    }

    /// Adds a text.
    #[must_use]
    pub fn text(mut self, metric: &str, value: impl Into<String>) -> Self {
        self.metrics.insert(metric.into(), Value::String(value.into()));
        self
    }

    /// Adds the metrics of a text evaluation (`perplexity`, `kl`, `top1_agreement`, `tokens`) and its samples.
    #[must_use]
    pub fn text_metrics(mut self, m: &crate::TextMetrics) -> Self {
        self.samples = Some(m.samples.clone());
        self.estimate("perplexity", &m.perplexity)
            .maybe("kl", m.kl.as_ref())
            .maybe("top1_agreement", m.top1_agreement.as_ref())
            .number("tokens", m.tokens as f64)
    }

    /// Adds what else `dsq eval` tells of a text (`bits_per_byte`, `word_perplexity`, `kl_median`, `kl_p90`, `kl_p99`, `kl_p99_9`,
    /// `kl_max`, `rms_delta_p`), as far as it was measured.
    #[must_use]
    pub fn text_details(self, m: &crate::TextMetrics) -> Self {
        let row =
            self.maybe("bits_per_byte", m.bits_per_byte.as_ref()).maybe("word_perplexity", m.word_perplexity.as_ref());
        let Some(d) = &m.divergence else { return row };
        row.estimate("kl_median", &d.kl_median)
            .estimate("kl_p90", &d.kl_p90)
            .estimate("kl_p99", &d.kl_p99)
            .estimate("kl_p99_9", &d.kl_p99_9)
            .number("kl_max", d.kl_max)
            .estimate("rms_delta_p", &d.rms_delta_p)
    }

    /// Adds the metrics of an image evaluation (`top1`, `top1_agreement`, `images`) and its samples.
    #[must_use]
    pub fn image_metrics(mut self, m: &crate::ImageMetrics) -> Self {
        self.samples = Some(m.samples.clone());
        self.estimate("top1", &m.top1)
            .maybe("top5", m.top5.as_ref())
            .maybe("top1_agreement", m.top1_agreement.as_ref())
            .number("images", m.images as f64)
    }

    /// Sets a number; whole numbers are written without a fraction.
    pub fn set(&mut self, metric: &str, value: f64) {
        let whole = value.fract() == 0.0 && value.abs() < 9e15 && !(value == 0.0 && value.is_sign_negative());
        let value = if whole { Value::from(value as i64) } else { Value::from(value) };
        self.metrics.insert(metric.into(), value);
    }

    /// A metric's number; `None` when it is absent, a text or not finite.
    pub fn get(&self, metric: &str) -> Option<f64> {
        self.metrics.get(metric).and_then(Value::as_f64)
    }
}

/// What a command measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of this form ([`REPORT_FORMAT`]).
    pub format: u32,
    /// Version of dsq.
    pub dsq: String,
    /// The command: `train`, `eval`, `bench`, `regress`...
    pub command: String,
    /// What else names the measurement: `recipe_sha256`, `seed`, `model`, `reference`, `context`...
    #[serde(flatten)]
    pub about: Map<String, Value>,
    /// The table.
    pub rows: Vec<Row>,
}

impl Report {
    /// A report of `command` without rows.
    pub fn new(command: impl Into<String>) -> Self {
        Self {
            format: REPORT_FORMAT,
            dsq: env!("CARGO_PKG_VERSION").into(),
            command: command.into(),
            about: Map::new(),
            rows: Vec::new(),
        }
    }

    /// Adds something that names the measurement.
    #[must_use]
    pub fn about(mut self, key: &str, value: impl Into<Value>) -> Self {
        self.about.insert(key.into(), value.into());
        self
    }

    /// The row of that name.
    pub fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|r| r.name == name)
    }

    /// One JSON object on one line.
    pub fn to_json(&self) -> String {
        // Maps with text keys and finite-or-null numbers always serialize.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The cells of a table of the rows, its head first: a column for each metric in the order of first appearance (more than nine: a
    /// line for each, and a column for each row), intervals in brackets behind their value, `-` where a row lacks the metric, shares
    /// in percent.
    pub fn cells(&self) -> Vec<Vec<String>> {
        let mut columns: Vec<&str> = Vec::new();
        for row in &self.rows {
            for key in row.metrics.keys() {
                let bound =
                    ["_low", "_high"].iter().any(|s| key.strip_suffix(s).is_some_and(|k| row.metrics.contains_key(k)));
                if !bound && !columns.contains(&key.as_str()) {
                    columns.push(key);
                }
            }
        }
        let mut rows: Vec<Vec<String>> = self
            .rows
            .iter()
            .map(|row| {
                let cell = |c: &&str| match row.metrics.get(*c) {
                    None => "-".to_string(),
                    Some(v) => {
                        let bounds = row.get(&format!("{c}_low")).zip(row.get(&format!("{c}_high")));
                        let value = show(c, v);
                        match bounds {
                            None => value,
                            Some((low, high)) => {
                                format!("{value} [{}, {}]", show(c, &low.into()), show(c, &high.into()))
                            }
                        }
                    }
                };
                std::iter::once(row.name.clone()).chain(columns.iter().map(cell)).collect()
            })
            .collect();
        rows.insert(0, std::iter::once("").chain(columns.iter().copied()).map(str::to_owned).collect());
        if columns.len() > MOST_COLUMNS {
            rows = (0..=columns.len()).map(|c| rows.iter().map(|r| r[c].clone()).collect()).collect();
        }
        rows
    }

    /// The rows as an aligned text table, see [`Report::cells`].
    pub fn table(&self) -> String {
        let rows = self.cells();
        let header: Vec<&str> = rows[0].iter().map(String::as_str).collect();
        table(&header, &rows[1..])
    }
}

/// A value as a table shows it: shares as percent, digests cut to 12 characters, other numbers to 5 significant
/// digits.
pub(crate) fn show(metric: &str, value: &Value) -> String {
    let number = match value {
        Value::String(s) if metric.ends_with("_sha256") => return s.chars().take(12).collect(),
        Value::String(s) => return s.clone(),
        Value::Null => return "not finite".into(),
        other => match other.as_f64() {
            Some(x) => x,
            None => return other.to_string(),
        },
    };
    let of_tasks = metric.starts_with("accuracy") || metric.starts_with("greedy") || metric.ends_with("padding_share");
    let share = ["top1", "top5", "top1_agreement", "top1_difference", "hit_rate", "rms_delta_p", "agreement"];
    if of_tasks || share.contains(&metric) {
        return format!("{:.2}%", 100.0 * number);
    }
    significant(number)
}

/// Five significant digits; whole numbers in full; powers of ten outside 1e-4..1e9.
pub(crate) fn significant(x: f64) -> String {
    if x == 0.0 {
        return "0".into();
    }
    if x.fract() == 0.0 && x.abs() < 1e12 {
        return format!("{x}");
    }
    let magnitude = x.abs().log10().floor() as i32;
    if !(-4..9).contains(&magnitude) {
        return format!("{x:.4e}");
    }
    format!("{x:.*}", (4 - magnitude).max(0) as usize)
}

/// Lays out cells under headers: two spaces between columns; columns of numbers flush right, others flush left; no
/// trailing spaces. Lines end with a newline but for the last.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let numeric = |c: usize| {
        let mut cells = rows.iter().filter_map(|r| r.get(c)).filter(|s| !s.is_empty() && *s != "-").peekable();
        cells.peek().is_some()
            && cells.all(|s| s.starts_with(|ch: char| ch.is_ascii_digit() || matches!(ch, '-' | '+' | '.')))
    };
    let width = |c: usize| {
        let cells = rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count());
        cells.chain([header[c].chars().count()]).max().unwrap_or(0)
    };
    let columns: Vec<(usize, bool)> = (0..header.len()).map(|c| (width(c), c > 0 && numeric(c))).collect();
    let line = |cells: Vec<&str>| {
        let mut out = String::new();
        for (cell, (width, right)) in cells.iter().zip(&columns) {
            let pad = " ".repeat(width.saturating_sub(cell.chars().count()));
            out.push_str(&if *right { format!("{pad}{cell}  ") } else { format!("{cell}{pad}  ") });
        }
        out.trim_end().to_string()
    };
    let mut lines = vec![line(header.to_vec())];
    lines.extend(rows.iter().map(|r| line(r.iter().map(String::as_str).collect())));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut r = Report::new("eval").about("seed", 7);
        let e = Estimate { value: 12.345_678, low: 12.0, high: 12.75 };
        r.rows.push(
            Row::new("model").estimate("perplexity", &e).number("top1_agreement", 0.912_34).number("tokens", 2048.0),
        );
        r.rows.push(Row::new("reference").estimate("perplexity", &Estimate::without_interval(9.5)));
        r
    }

    #[test]
    fn json_follows_the_contract() {
        let v: Value = serde_json::from_str(&report().to_json()).unwrap();
        assert_eq!(v["rows"][0]["name"], "model");
        assert_eq!(v["rows"][0]["perplexity"], 12.345_678);
        assert_eq!(v["rows"][0]["perplexity_high"], 12.75);
        assert_eq!(v["rows"][0]["tokens"], 2048);
        assert!(v["rows"][1].get("perplexity_low").is_none());
        assert_eq!((&v["command"], &v["seed"], &v["format"]), (&"eval".into(), &7.into(), &1.into()));
        assert_eq!(serde_json::from_str::<Report>(&report().to_json()).unwrap().rows, report().rows);
    }

    #[test]
    fn the_table_is_aligned() {
        let want = "           perplexity               top1_agreement  tokens\n\
                    model      12.346 [12, 12.750]              91.23%    2048\n\
                    reference               9.5000               -       -";
        let got = report().table();
        assert_eq!(got.lines().count(), 3);
        let norm = |s: &str| s.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<_>>();
        assert_eq!(norm(&got), norm(want), "\n{got}");
        // Flush right: every line of numbers ends at the same column.
        let ends: Vec<usize> = got.lines().map(str::len).collect();
        assert!(ends.iter().all(|e| *e == ends[0]), "\n{got}");
    }

    #[test]
    fn numbers_keep_five_digits() {
        let cases = [(0.0, "0"), (12345.678, "12346"), (1.234_567, "1.2346"), (0.000_123_456, "0.00012346")];
        for (x, want) in cases {
            assert_eq!(significant(x), want);
        }
        assert_eq!(significant(1.5e-7), "1.5000e-7");
        assert_eq!(show("codes_sha256", &"0123456789abcdef".into()), "0123456789ab");
        assert_eq!(show("perplexity", &Value::from(f64::NAN)), "not finite");
    }
}
