//! Golden sets: small checkpoints that earlier versions of dsq exported, and what those versions said of them. This version must read the
//! same values, give the same logits within the stated bound, export the same values from the same source, and train the recipes of that
//! time to what they gave. The sets are made by regression/make_golden.py and never changed; there is nothing to bless here. versions.toml
//! beside them says which there must be, with digests, so that neither a set nor an entry can be gone without a word.

use super::digest::add_digests;
use crate::{Global, error::CliError, input, recipe::Recipe, reference::forward, regress};
use dsq_checkpoint::{Checkpoint, hex_sha256, printable};
use dsq_eval::{Check, Hardware, Row, Setup, Tolerance, Verdict, Version};
use dsq_runtime::{KvType, LlamaRuntime};
use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Version of the form of golden.json.
const FORMAT: u32 = 1;

/// The list of the sets that there must be.
const INDEX: &str = "versions.toml";

/// What a set says of itself.
const GOLDEN: &str = "golden.json";

/// versions.toml.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Index {
    /// SHA-256 of what lies beside the versions' folders: the float models, and the text for those that look at one.
    files: BTreeMap<String, String>,
    version: Vec<Listed>,
}

/// A version in the list.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Listed {
    version: String,
    commit: String,
    date: String,
    /// What came with it, for people.
    came: String,
    /// SHA-256 of golden.json and the recipes, in the version's folder.
    files: BTreeMap<String, String>,
}

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
    /// The float model, in place of the set's own.
    #[serde(default)]
    source: Option<PathBuf>,
    /// Where it was made, of an entry whose codes follow from sums of floats (it looked at a text): other hardware adds in another order, so
    /// it need not make the same codes.
    #[serde(default)]
    hardware: Option<Hardware>,
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
    let file = folder.join(INDEX);
    let text = input::bytes(&file).and_then(|bytes| input::utf8(&file, bytes)).map_err(|e| unusable(&file, e))?;
    let index: Index = toml::from_str(&text).map_err(|e| unusable(&file, e))?;
    let mut versions = BTreeMap::new();
    for listed in &index.version {
        let Some(version) = Version::parse(&listed.version) else {
            return Err(unusable(&file, format!("version: expected one as 1.2.3, got {:?}", listed.version)));
        };
        if listed.came.is_empty() || !listed.files.contains_key(GOLDEN) {
            let problem = format!("{version}: expected what came with it, and the digest of {GOLDEN}");
            return Err(unusable(&file, problem));
        }
        if versions.insert(version, listed).is_some() {
            return Err(unusable(&file, format!("version: expected {version} once, got it twice")));
        }
    }
    if versions.is_empty() {
        return Err(unusable(&file, "expected at least one version's set, got none"));
    }
    let entries =
        std::fs::read_dir(folder).map_err(|e| unusable(folder, format!("expected a folder of golden sets: {e}")))?;
    for entry in entries {
        let entry = entry.map_err(|e| unusable(folder, e))?;
        let version = entry.file_name().to_str().and_then(Version::parse);
        if version.is_some_and(|v| !versions.contains_key(&v)) {
            return Err(unusable(&entry.path(), format!("expected a version that {INDEX} lists")));
        }
    }
    same_files(folder, &index.files)?;
    versions.into_values().map(|listed| Set::read(&folder.join(&listed.version), listed)).collect()
}

/// Checks SHA-256 of each file in `folder`.
fn same_files(folder: &Path, files: &BTreeMap<String, String>) -> Result<(), CliError> {
    for (name, expected) in files {
        let path = folder.join(name);
        let got = hex_sha256(&input::bytes(&path).map_err(|e| unusable(&path, e))?);
        if got != *expected {
            return Err(unusable(&path, format!("SHA-256: expected {expected}, got {got}")));
        }
    }
    Ok(())
}

fn unusable(path: &Path, problem: impl std::fmt::Display) -> CliError {
    let at = printable(&path.to_string_lossy());
    CliError::new(3, format!("{at}: golden set unusable: {problem}"))
        .with_hint("golden sets are never changed: take the committed one again (git checkout)")
}

impl Set {
    fn read(folder: &Path, listed: &Listed) -> Result<Self, CliError> {
        let file = folder.join(GOLDEN);
        let bytes = input::bytes(&file).map_err(|e| unusable(&file, e))?;
        let golden: Golden = serde_json::from_slice(&bytes).map_err(|e| unusable(&file, e))?;
        let name = folder.file_name().unwrap_or_default().to_string_lossy();
        if golden.format != FORMAT {
            return Err(unusable(&file, format!("format: expected {FORMAT}, got {}", golden.format)));
        }
        if golden.version != name {
            return Err(unusable(&file, format!("version: expected {name}, got {}", golden.version)));
        }
        if golden.commit.is_empty() || (&golden.commit, &golden.date) != (&listed.commit, &listed.date) {
            let problem = format!(
                "commit, date: expected {:?} of {:?} ({INDEX}), got {:?} of {:?}",
                listed.commit, listed.date, golden.commit, golden.date
            );
            return Err(unusable(&file, problem));
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
            same_files(folder, &entry.files)?;
        }
        for r in &golden.recipes {
            if r.values.len() < 3 || r.values.len() != r.seeds.len() || r.values.iter().any(|x| !x.is_finite()) {
                let problem = format!("{}: expected a finite value for each of 3 seeds or more", r.file.display());
                return Err(unusable(&file, problem));
            }
            if !listed.files.contains_key(r.file.to_str().unwrap_or_default()) {
                let problem = format!("{}: expected its digest in {INDEX}, got none", r.file.display());
                return Err(unusable(&file, problem));
            }
        }
        // Last, so that what is wrong with a set is named where it can be.
        same_files(folder, &listed.files)?;
        Ok(Self { folder: folder.into(), golden })
    }

    /// Reads, runs and makes again every entry, in the empty folder `scratch`, and trains the recipes, on the hardware of `setup`.
    ///
    /// # Errors
    /// I/O; what stops an entry alone is a check that fails.
    pub fn checks(&self, scratch: &Path, setup: &Setup, global: &Global) -> Result<Vec<Check>, CliError> {
        let mut checks = Vec::new();
        for entry in &self.golden.entries {
            checks.extend(self.check(entry, scratch, setup, global));
        }
        for recipe in &self.golden.recipes {
            checks.push(self.train(recipe, scratch, global)?);
        }
        Ok(checks)
    }

    fn check(&self, entry: &Entry, scratch: &Path, setup: &Setup, global: &Global) -> Vec<Check> {
        let path = self.folder.join(&entry.name);
        let row = format!("{} {}", self.golden.version, entry.name);
        let check = |metric: &str, tolerance: f64, got: Result<(f64, String), CliError>| {
            let (measured, note) = match got {
                Ok((x, note)) => (Some(x), note),
                Err(e) => (None, e.to_string()),
            };
            at_most(&row, metric, tolerance, measured, note)
        };
        let values = values_of(&path).map(|got| told(&differing(&entry.values, &got)));
        let again = self.make(entry, scratch, global).and_then(|made| reproduced(entry, &path, &made));
        let mut again = check("reproduction_mismatches", 0.0, again);
        if entry.hardware.as_ref().is_some_and(|h| *h != setup.hardware) {
            again.tolerance = Tolerance::ExactOnSameHardware;
            // A command that fails, fails everywhere.
            if again.verdict == Verdict::Regressed {
                again.verdict = Verdict::NotComparable;
            }
        }
        vec![
            check("value_mismatches", 0.0, values),
            check("logits_difference", entry.bound, self.logits(entry, &path, global)),
            again,
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
        let beside = self.folder.parent().unwrap_or(Path::new(""));
        let source = match &entry.of {
            Some(name) => self.folder.join(name),
            None => beside.join(entry.source.as_ref().unwrap_or(&self.golden.source)),
        };
        let out = scratch.join(format!("{}-{}", self.golden.version, entry.name));
        let options = entry.options.iter().map(|o| regress::model::option(o, beside)).collect::<Result<_, _>>()?;
        regress::model::run_dsq(&entry.command, &source, &out, options, global)?;
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
        let half = dsq_eval::student(r.values.len() - 1, 0.05) * s * (1.0 + 1.0 / n).sqrt();
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

/// The names whose digests differ, or that only one side has.
fn differing(expected: &BTreeMap<String, String>, got: &BTreeMap<String, String>) -> BTreeSet<String> {
    expected.keys().chain(got.keys()).filter(|name| expected.get(*name) != got.get(*name)).cloned().collect()
}

/// How many differ, and which is the first.
fn told(differing: &BTreeSet<String>) -> (f64, String) {
    let note = differing.first().map(|m| format!("differs in {m}")).unwrap_or_default();
    (differing.len() as f64, note)
}

/// What `made` has otherwise than the committed checkpoint at `path`: the values of layers, and, read by this version on both sides, codes,
/// scales, zero points, activation parameters and floats, each of which could differ where the values do not.
fn reproduced(entry: &Entry, path: &Path, made: &Path) -> Result<(f64, String), CliError> {
    let mut names = differing(&entry.values, &values_of(made)?);
    let digests = |p: &Path| -> Result<Row, CliError> { add_digests(Row::new(&entry.name), &Checkpoint::open(p)?) };
    let (expected, got) = (digests(path)?, digests(made)?);
    let kinds: BTreeSet<&String> = expected.parts.keys().chain(got.parts.keys()).collect();
    let none = BTreeMap::new();
    for kind in kinds {
        names.extend(differing(expected.parts.get(kind).unwrap_or(&none), got.parts.get(kind).unwrap_or(&none)));
    }
    Ok(told(&names))
}
