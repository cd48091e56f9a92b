//! Golden sets: small checkpoints that earlier versions of dsq exported, and what those versions said of them. This version must read the
//! same values, give the same logits within the stated bound, export the same values from the same source, and train the recipes of that
//! time to what they gave. The sets are made by regression/make_golden.py and never changed; there is nothing to bless here.

use crate::{Global, error::CliError, input, recipe::Recipe, reference::forward, regress};
use dsq_checkpoint::{Checkpoint, hex_sha256, printable};
use dsq_eval::{Check, Tolerance, Verdict, Version};
use dsq_runtime::{KvType, LlamaRuntime};
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Version of the form of golden.json.
const FORMAT: u32 = 1;

/// The golden.json of a version.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Golden {
    format: u32,
    version: String,
    /// The commit that was that version, and its date.
    commit: String,
    date: String,
    /// The float model that all entries were made from, beside the versions' folders.
    source: PathBuf,
    tokens: Vec<Vec<u32>>,
    entries: Vec<Entry>,
    recipes: Vec<GoldenRecipe>,
    /// What that version could not make, and why.
    left_out: Vec<LeftOut>,
}

/// An exported checkpoint.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    /// `quantize` or `export`, and its options.
    command: String,
    options: Vec<String>,
    /// The entry that it was exported from; the source where none is named.
    #[serde(default)]
    of: Option<String>,
    /// Largest change of a logit over the largest logit.
    bound: f64,
    /// SHA-256 of each file.
    files: BTreeMap<String, String>,
    /// For each quantized layer SHA-256 of its values, f32 little endian.
    values: BTreeMap<String, String>,
    /// Of the last token of the first list.
    logits: Vec<f64>,
}

/// A recipe, and what it gave.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GoldenRecipe {
    file: PathBuf,
    row: String,
    metric: String,
    seeds: Vec<u64>,
    values: Vec<f64>,
}

/// What a set does not have.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct LeftOut {
    name: String,
    because: String,
}

/// The golden set of a version, read and checked.
pub struct Set {
    folder: PathBuf,
    golden: Golden,
}

/// Reads the golden sets in `folder`, oldest first, and checks the bytes of every file.
///
/// # Errors
/// Exit code 3, `golden set unusable`, for a folder without sets, and a set that is damaged, incomplete or of another version than its
/// folder says.
pub fn sets(folder: &Path) -> Result<Vec<Set>, CliError> {
    let entries =
        std::fs::read_dir(folder).map_err(|e| unusable(folder, format!("expected a folder of golden sets: {e}")))?;
    let mut versions: Vec<Version> = entries.filter_map(|e| Version::parse(e.ok()?.file_name().to_str()?)).collect();
    versions.sort_unstable();
    if versions.is_empty() {
        return Err(unusable(folder, "expected at least one version's set, got none"));
    }
    versions.iter().map(|v| Set::read(&folder.join(v.to_string()))).collect()
}

fn unusable(path: &Path, problem: impl std::fmt::Display) -> CliError {
    let at = printable(&path.to_string_lossy());
    CliError::new(3, format!("{at}: golden set unusable: {problem}"))
        .with_hint("golden sets are never changed: take the committed one again (git checkout)")
}

impl Set {
    fn read(folder: &Path) -> Result<Self, CliError> {
        let file = folder.join("golden.json");
        let bytes = input::bytes(&file).map_err(|e| unusable(&file, e))?;
        let golden: Golden = serde_json::from_slice(&bytes).map_err(|e| unusable(&file, e))?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        if golden.format != FORMAT {
            return Err(unusable(&file, format!("format: expected {FORMAT}, got {}", golden.format)));
        }
        if golden.version != name {
            return Err(unusable(&file, format!("version: expected {name}, got {}", golden.version)));
        }
        if golden.commit.is_empty() || golden.date.is_empty() {
            return Err(unusable(&file, "commit, date: expected both, got an empty text"));
        }
        if golden.entries.is_empty() || golden.tokens.first().is_none_or(Vec::is_empty) {
            return Err(unusable(&file, "expected entries and tokens, got none"));
        }
        if let Some(l) = golden.left_out.iter().find(|l| l.name.is_empty() || l.because.is_empty()) {
            return Err(unusable(
                &file,
                format!("left_out: expected a name and a reason, got {:?} and {:?}", l.name, l.because),
            ));
        }
        for entry in &golden.entries {
            let at = |problem: String| unusable(&file, format!("entry {:?}: {problem}", entry.name));
            if entry.values.is_empty() || entry.logits.is_empty() || entry.files.is_empty() {
                return Err(at("expected files, values and logits, got none of one".into()));
            }
            if !(entry.bound > 0.0 && entry.bound < 1.0) || entry.logits.iter().any(|z| !z.is_finite()) {
                return Err(at(format!(
                    "expected a bound between 0 and 1 and finite logits, got bound {}",
                    entry.bound
                )));
            }
            for (path, expected) in &entry.files {
                let path = folder.join(path);
                let got = hex_sha256(&input::bytes(&path).map_err(|e| unusable(&path, e))?);
                if got != *expected {
                    return Err(unusable(&path, format!("SHA-256: expected {expected}, got {got}")));
                }
            }
        }
        for r in &golden.recipes {
            if r.values.len() < 3 || r.values.len() != r.seeds.len() || r.values.iter().any(|x| !x.is_finite()) {
                let problem = format!("{}: expected a finite value for each of 3 seeds or more", r.file.display());
                return Err(unusable(&file, problem));
            }
        }
        Ok(Self { folder: folder.into(), golden })
    }

    /// Reads, runs and makes again every entry, in the empty folder `scratch`, and trains the recipes.
    ///
    /// # Errors
    /// I/O; what stops an entry alone is a check that fails.
    pub fn checks(&self, scratch: &Path, global: &Global) -> Result<Vec<Check>, CliError> {
        let mut checks = Vec::new();
        for entry in &self.golden.entries {
            checks.extend(self.check(entry, scratch, global));
        }
        for recipe in &self.golden.recipes {
            checks.push(self.train(recipe, scratch, global)?);
        }
        Ok(checks)
    }

    fn check(&self, entry: &Entry, scratch: &Path, global: &Global) -> Vec<Check> {
        let path = self.folder.join(&entry.name);
        let row = format!("{} {}", self.golden.version, entry.name);
        let check = |metric: &str, tolerance: f64, got: Result<(f64, String), CliError>| {
            let (measured, note) = match got {
                Ok((x, note)) => (Some(x), note),
                Err(e) => (None, e.to_string()),
            };
            at_most(&row, metric, tolerance, measured, note)
        };
        let values = values_of(&path).map(|got| differing(&entry.values, &got));
        let again =
            self.make(entry, scratch, global).and_then(|p| values_of(&p)).map(|got| differing(&entry.values, &got));
        vec![
            check("value_mismatches", 0.0, values),
            check("logits_difference", entry.bound, self.logits(entry, &path, global)),
            check("reproduction_mismatches", 0.0, again),
        ]
    }

    /// The largest change of a logit over the largest logit.
    fn logits(&self, entry: &Entry, path: &Path, global: &Global) -> Result<(f64, String), CliError> {
        let runtime = LlamaRuntime::load(&Checkpoint::open(path)?, global.threads())?;
        let all = forward((&runtime, KvType::F32), &self.golden.tokens[0])?;
        let last = &all[all.len().saturating_sub(entry.logits.len())..];
        if all.len() != entry.logits.len() * self.golden.tokens[0].len() {
            let (expected, got) = (entry.logits.len(), all.len() / self.golden.tokens[0].len());
            return Err(CliError::new(3, format!("logits: expected {expected} a token, got {got}")));
        }
        let largest = entry.logits.iter().fold(0.0f64, |m, z| m.max(z.abs()));
        let change = last.iter().zip(&entry.logits).map(|(a, b)| (f64::from(*a) - b).abs());
        // NaN must not be lost in a maximum.
        let worst = change.fold(0.0f64, |m, x| if x.is_nan() || x > m { x } else { m });
        Ok((worst / largest, String::new()))
    }

    /// Makes the entry anew, from the same source with the same options.
    fn make(&self, entry: &Entry, scratch: &Path, global: &Global) -> Result<PathBuf, CliError> {
        let source = match &entry.of {
            Some(name) => self.folder.join(name),
            None => self.folder.parent().unwrap_or(Path::new("")).join(&self.golden.source),
        };
        let out = scratch.join(format!("{}-{}", self.golden.version, entry.name));
        regress::model::run_dsq(&entry.command, &source, &out, entry.options.iter().map(Into::into).collect(), global)?;
        Ok(out)
    }

    /// Trains a recipe with its first seed: what it gives must lie where another seed would, 95 times of 100, by what that version's seeds
    /// gave: mean +- t s sqrt(1 + 1/n), with Student's t of n - 1.
    fn train(&self, r: &GoldenRecipe, scratch: &Path, global: &Global) -> Result<Check, CliError> {
        let path = self.folder.join(&r.file);
        let name = r.file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let recipe = Recipe::load(&path, &[format!("seed={}", r.seeds[0])])?;
        let run = scratch.join(format!("{}-{name}", self.golden.version));
        let report = crate::commands::train::train_recipe(&recipe, &run, global)?;
        let got = report.row(&r.row).and_then(|row| row.get(&r.metric));
        let n = r.values.len() as f64;
        let mean = r.values.iter().sum::<f64>() / n;
        let s = (r.values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0)).sqrt();
        let half = dsq_eval::student(r.values.len() - 1) * s * (1.0 + 1.0 / n).sqrt();
        let row = format!("{} {name}", self.golden.version);
        let note = format!("{} seeds of {} gave {mean:.4} +- {half:.4}", r.values.len(), self.golden.version);
        let mut check = at_most(&row, &r.metric, half, got.map(|x| (x - mean).abs()), note);
        check.baseline = mean.into();
        check.measured = got.map_or(Value::Null, Value::from);
        check.tolerance = Tolerance::Within(half / mean.abs());
        Ok(check)
    }
}

fn at_most(row: &str, metric: &str, tolerance: f64, measured: Option<f64>, note: String) -> Check {
    let kept = measured.is_some_and(|x| x <= tolerance);
    Check {
        recipe: "golden".into(),
        row: row.into(),
        metric: metric.into(),
        baseline: Value::Null,
        measured: measured.map_or(Value::Null, Value::from),
        tolerance: Tolerance::AtMost(tolerance),
        verdict: match (kept, measured) {
            (true, _) => Verdict::Pass,
            (false, Some(_)) => Verdict::Regressed,
            (false, None) => Verdict::Missing,
        },
        note,
    }
}

/// SHA-256 of the values of each layer.
fn values_of(path: &Path) -> Result<BTreeMap<String, String>, CliError> {
    let checkpoint = Checkpoint::open(path)?;
    let mut out = BTreeMap::new();
    for spec in checkpoint.config().linears() {
        let values = checkpoint.linear(&spec.module)?.into_f32();
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        out.insert(spec.module, hex_sha256(&bytes));
    }
    Ok(out)
}

/// How many layers have other values than expected, and which is the first.
fn differing(expected: &BTreeMap<String, String>, got: &BTreeMap<String, String>) -> (f64, String) {
    let other: Vec<&str> =
        expected.iter().filter(|(module, sha)| got.get(*module) != Some(sha)).map(|(m, _)| m.as_str()).collect();
    let note = other.first().map(|m| format!("differs in {m}")).unwrap_or_default();
    (other.len() as f64, note)
}
