//! A suite file: which recipes a regression run trains and what it changes in them, which models it quantizes and how, and how far each
//! metric may move. It runs nothing.
//!
//! ```toml
//! [tolerance]                                  # for every recipe
//! perplexity = { relative = 0.02 }             # may get worse by 2% of the baseline
//! top1_agreement = { absolute = 0.01 }         # may get worse by 0.01
//! bits_per_weight = "exact"                    # equal on any hardware
//! codes_sha256 = "exact_on_same_hardware"      # equal where training gives the same bits
//! requantize_mismatches = { at_most = 0 }      # a bound, whatever the baseline says; cannot be blessed away
//!
//! [fixed.tolerance]                            # the fixed-input checks: nothing is trained, equal on any hardware
//! codes_sha256 = "exact"
//! perplexity = { within = 1e-4 }               # may differ by 1e-4 of the baseline, either way
//!
//! [golden]
//! path = "golden"                              # golden sets of every version; they have their bounds with them
//!
//! [[recipe]]
//! path = "../recipes/tiny-llama-w4a16.toml"    # relative to this file
//! set = ["train.steps=100"]                    # as dsq train --set
//! tolerance = { kl = { relative = 0.2 } }      # adds to and overrides the above
//!
//! [[model]]                                    # a float model, quantized in several ways
//! name = "smollm2"
//! source = "models:smollm2.gguf"               # in $DSQ_MODELS, else ~/.cache/dsq; or a path relative to this file
//! text = ["../recipes/data/pydoc/heldout.txt"] # held-out text
//! context = 256                                # tokens of a window
//! windows = 48                                 # at most
//!
//! [[model.variant]]
//! name = "w4a16_g64"                           # a row beside `base`, the model itself
//! quantize = ["--scheme", "W4A16"]             # as dsq quantize takes them; or export = [...], as dsq export does; or path = "..."
//! activations = "int8"                         # how it runs: float (the default) or int8
//! ```
//!
//! A metric that the suite does not name is not compared. `"ROW/METRIC"` in place of a metric's name speaks of one row.

use crate::EvalError;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// How far a metric may move away from its baseline.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tolerance {
    /// Equal, on any hardware.
    Exact,
    /// Equal where [`crate::Hardware`] is the same; not comparable elsewhere, and reported as such.
    ExactOnSameHardware,
    /// At most this, whatever the baseline says.
    AtMost(f64),
    /// At least this, whatever the baseline says.
    AtLeast(f64),
    /// May get worse by this share of the baseline's value.
    Relative(f64),
    /// May get worse by this much.
    Absolute(f64),
    /// May differ either way by this share of the baseline's value.
    Within(f64),
}

impl Tolerance {
    /// Whether `value` keeps a bound that does not depend on a baseline; `None` for the other kinds.
    pub(crate) fn keeps_bound(self, value: Option<f64>) -> Option<bool> {
        match self {
            Tolerance::AtMost(x) => Some(value.is_some_and(|v| v <= x)),
            Tolerance::AtLeast(x) => Some(value.is_some_and(|v| v >= x)),
            _ => None,
        }
    }
}

impl std::fmt::Display for Tolerance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Tolerance::Exact => f.write_str("exact"),
            Tolerance::ExactOnSameHardware => f.write_str("exact (same hardware)"),
            Tolerance::AtMost(x) => write!(f, "at most {}", crate::report::significant(*x)),
            Tolerance::AtLeast(x) => write!(f, "at least {}", crate::report::significant(*x)),
            Tolerance::Relative(x) => write!(f, "{}% worse", crate::report::significant(x * 100.0)),
            Tolerance::Absolute(x) => write!(f, "{} worse", crate::report::significant(*x)),
            Tolerance::Within(x) => write!(f, "+-{}%", crate::report::significant(x * 100.0)),
        }
    }
}

/// Tolerances by metric, or by `ROW/METRIC`.
pub type Tolerances = BTreeMap<String, Tolerance>;

/// The tolerance of `metric` in the row of that name: the row's own before that of the metric.
pub fn tolerance_of(tolerances: &Tolerances, row: &str, metric: &str) -> Option<Tolerance> {
    tolerances.get(&format!("{row}/{metric}")).or_else(|| tolerances.get(metric)).copied()
}

/// A suite file as written.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Suite {
    /// The file's name without its ending.
    #[serde(skip)]
    pub name: String,
    /// The file.
    #[serde(skip)]
    pub path: PathBuf,
    /// For every recipe.
    #[serde(default)]
    pub tolerance: Tolerances,
    /// The fixed-input checks, when the suite has them.
    pub fixed: Option<Fixed>,
    /// The golden sets, when the suite has them.
    pub golden: Option<GoldenSets>,
    /// The recipes, in the order they run.
    #[serde(default, rename = "recipe")]
    pub recipes: Vec<SuiteRecipe>,
    /// The models, in the order they run; after the recipes.
    #[serde(default, rename = "model")]
    pub models: Vec<SuiteModel>,
}

/// The fixed-input checks of a suite.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fixed {
    /// Their tolerances; the suite's own do not apply.
    pub tolerance: Tolerances,
}

/// The golden sets of a suite: checkpoints of earlier versions.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GoldenSets {
    /// Their folder; made absolute or relative to the working directory by [`Suite::load`].
    pub path: PathBuf,
}

/// One recipe of a suite.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SuiteRecipe {
    /// The recipe file; made absolute or relative to the working directory by [`Suite::load`].
    pub path: PathBuf,
    /// Settings to change, as `dsq train --set` takes them.
    #[serde(default)]
    pub set: Vec<String>,
    /// Adds to the suite's tolerances and overrides them; after [`Suite::load`]: all that apply.
    #[serde(default)]
    pub tolerance: Tolerances,
}

impl SuiteRecipe {
    /// The recipe file's name without its ending: what checks and baselines are called by.
    pub fn name(&self) -> String {
        self.path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default()
    }
}

/// A float model of a suite, and what is made of it.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SuiteModel {
    /// What checks and baselines are called by.
    pub name: String,
    /// A model's folder or file: `models:NAME` for one in the folder of models, else made absolute or relative to the working directory
    /// by [`Suite::load`]. This or `recipe`.
    #[serde(default)]
    pub source: Option<PathBuf>,
    /// The float model that a recipe of this suite trains, by the recipe's name.
    #[serde(default)]
    pub recipe: Option<String>,
    /// Held-out text, as `dsq eval --text`; paths as in `source`.
    #[serde(default)]
    pub text: Vec<PathBuf>,
    /// Tokens of a window.
    #[serde(default = "default_context")]
    pub context: usize,
    /// Windows, at most.
    #[serde(default = "default_windows")]
    pub windows: usize,
    /// Whether the run ends once all is decided (see `sequential.rs`); new baselines always take all windows.
    #[serde(default = "yes")]
    pub sequential: bool,
    /// Files of log-likelihood requests, as `dsq eval --tasks`; paths as in `source`.
    #[serde(default)]
    pub tasks: Vec<PathBuf>,
    /// Items of each of these files, at most.
    #[serde(default)]
    pub max_items: Option<usize>,
    /// For an image model: a folder of pictures, as `dsq eval --images`; path as in `source`.
    #[serde(default)]
    pub images: Option<PathBuf>,
    /// What is made of it.
    #[serde(default, rename = "variant")]
    pub variants: Vec<Variant>,
    /// As in [`SuiteRecipe`].
    #[serde(default)]
    pub tolerance: Tolerances,
}

fn default_context() -> usize {
    256
}

fn default_windows() -> usize {
    64
}

fn yes() -> bool {
    true
}

/// A quantized form of a model.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    /// The row's name.
    pub name: String,
    /// Options of `dsq quantize`, without model and output; paths as `models:NAME` or `suite:PATH`, relative to the suite's file. Of these
    /// three, one.
    #[serde(default)]
    pub quantize: Option<Vec<String>>,
    /// Options of `dsq export`.
    #[serde(default)]
    pub export: Option<Vec<String>>,
    /// A checkpoint that is there already; path as in [`SuiteModel::source`].
    #[serde(default)]
    pub path: Option<PathBuf>,
    /// What its linear layers multiply with: `float` or `int8`.
    #[serde(default)]
    pub activations: Activations,
}

/// What linear layers multiply with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activations {
    /// Inputs as they are.
    #[default]
    Float,
    /// Inputs rounded to eight bits.
    Int8,
}

/// The row of the float model itself.
pub const BASE_ROW: &str = "base";

/// Files of this prefix lie in the folder of models.
const MODELS: &str = "models:";

impl SuiteModel {
    /// The name in the folder of models, of a path that says so.
    pub fn in_models(path: &Path) -> Option<&str> {
        path.to_str()?.strip_prefix(MODELS)
    }

    /// All its paths.
    fn paths(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        let variants = self.variants.iter_mut().filter_map(|v| v.path.as_mut());
        self.source.iter_mut().chain(&mut self.text).chain(&mut self.tasks).chain(&mut self.images).chain(variants)
    }

    /// What is wrong with it by itself.
    fn problem(&self) -> Option<String> {
        let count = |n: usize| if n == 0 { "none" } else { "more" };
        let sources = usize::from(self.source.is_some()) + usize::from(self.recipe.is_some());
        if sources != 1 {
            return Some(format!("expected source or recipe, got {}", count(sources)));
        }
        match (self.images.is_some(), self.text.is_empty()) {
            (true, false) => return Some("expected text or images, got both".into()),
            (false, true) => return Some("expected text or images, got none".into()),
            _ => {}
        }
        if self.images.is_some() && !self.tasks.is_empty() {
            return Some("tasks: expected none beside images, got some".into());
        }
        if self.context < 2 {
            return Some(format!("context: expected at least 2 tokens, got {}", self.context));
        }
        if self.windows == 0 || self.max_items == Some(0) {
            return Some("windows, max_items: expected at least 1, got 0".into());
        }
        if self.variants.is_empty() {
            return Some("expected at least one [[model.variant]], got none".into());
        }
        let mut names = std::collections::BTreeSet::from([BASE_ROW]);
        for v in &self.variants {
            if v.name.is_empty() || v.name.contains('/') || !names.insert(&v.name) {
                return Some(format!(
                    "variant.name: expected a name of its own, other than {BASE_ROW} and without /, got {:?}",
                    v.name
                ));
            }
            let ways = [v.quantize.is_some(), v.export.is_some(), v.path.is_some()];
            let ways = ways.iter().filter(|w| **w).count();
            if ways != 1 {
                return Some(format!("variant {:?}: expected quantize, export or path, got {}", v.name, count(ways)));
            }
        }
        None
    }
}

impl Suite {
    /// Reads a suite file; resolves paths and tolerances.
    ///
    /// # Errors
    /// [`EvalError::Io`]; [`EvalError::Suite`] (exit 2) for what TOML or the form refuses (with line, column and
    /// caret), a tolerance that is not a finite positive number, two recipes of one name, or an empty suite.
    pub fn load(path: &Path) -> Result<Self, EvalError> {
        let refuse = |problem: String| EvalError::Suite { path: path.into(), problem };
        let text = std::fs::read_to_string(path).map_err(|source| match source.kind() {
            std::io::ErrorKind::NotFound => refuse("expected a suite file, got none".into()),
            std::io::ErrorKind::InvalidData => refuse("expected UTF-8 text, got something else".into()),
            _ => EvalError::Io { path: path.into(), action: "read", source },
        })?;
        let mut suite: Suite = toml::from_str(&text).map_err(|e| refuse(e.to_string().trim_end().to_string()))?;
        suite.name = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
        suite.path = path.into();
        let folder = path.parent().unwrap_or(Path::new(""));
        let mut names = std::collections::BTreeSet::new();
        for recipe in &mut suite.recipes {
            if !names.insert(recipe.name()) {
                return Err(refuse(format!("recipe: expected different names, got {:?} twice", recipe.name())));
            }
            recipe.path = normalized(&folder.join(&recipe.path));
            let own = std::mem::replace(&mut recipe.tolerance, suite.tolerance.clone());
            recipe.tolerance.extend(own);
            if recipe.tolerance.is_empty() {
                return Err(refuse(format!("recipe {:?}: expected at least one tolerance, got none", recipe.name())));
            }
        }
        for model in &mut suite.models {
            let name = model.name.clone();
            let refuse = |problem: String| refuse(format!("model {name:?}: {problem}"));
            if model.name.is_empty() || model.name.contains(['/', '\\']) || !names.insert(model.name.clone()) {
                return Err(refuse("name: expected one of its own, without /, among models and recipes".into()));
            }
            if let Some(problem) = model.problem() {
                return Err(refuse(problem));
            }
            if let Some(recipe) = &model.recipe
                && !suite.recipes.iter().any(|r| &r.name() == recipe)
            {
                return Err(refuse(format!("recipe: expected one of this suite, got {recipe:?}")));
            }
            for path in model.paths().filter(|p| SuiteModel::in_models(p).is_none()) {
                *path = normalized(&folder.join(&*path));
            }
            let own = std::mem::replace(&mut model.tolerance, suite.tolerance.clone());
            model.tolerance.extend(own);
            if model.tolerance.is_empty() {
                return Err(refuse("expected at least one tolerance, got none".into()));
            }
        }
        if let Some(golden) = &mut suite.golden {
            golden.path = normalized(&folder.join(&golden.path));
        }
        if suite.recipes.is_empty() && suite.models.is_empty() && suite.fixed.is_none() && suite.golden.is_none() {
            return Err(refuse("expected at least one [[recipe]], [[model]], [golden] or [fixed], got none".into()));
        }
        let fixed = suite.fixed.iter().flat_map(|f| &f.tolerance);
        let models = suite.models.iter().flat_map(|m| &m.tolerance);
        for (metric, tolerance) in suite.recipes.iter().flat_map(|r| &r.tolerance).chain(models).chain(fixed) {
            let (x, fine) = match tolerance {
                Tolerance::Exact | Tolerance::ExactOnSameHardware => continue,
                Tolerance::AtMost(x) | Tolerance::AtLeast(x) => (x, x.is_finite()),
                Tolerance::Relative(x) | Tolerance::Absolute(x) | Tolerance::Within(x) => {
                    (x, x.is_finite() && *x > 0.0)
                }
            };
            if !fine {
                return Err(refuse(format!("tolerance.{metric}: expected a finite number above 0, got {x}")));
            }
        }
        Ok(suite)
    }

    /// Leaves the jobs of these names: `fixed`, `golden`, recipes and models.
    ///
    /// # Errors
    /// [`EvalError::Suite`] for a name that no job has, or a model without the recipe that trains it: it would be trained all the same.
    pub fn keep(&mut self, names: &[String]) -> Result<(), EvalError> {
        let recipes = self.recipes.iter().map(SuiteRecipe::name);
        let mut all: Vec<String> = recipes.chain(self.models.iter().map(|m| m.name.clone())).collect();
        all.extend(self.fixed.iter().map(|_| "fixed".to_string()).chain(self.golden.iter().map(|_| "golden".into())));
        if let Some(name) = names.iter().find(|n| !all.contains(n)) {
            let problem = format!("--only: expected one of {}, got {name:?}", all.join(", "));
            return Err(EvalError::Suite { path: self.path.clone(), problem });
        }
        let kept = |name: &str| names.iter().any(|n| n == name);
        self.fixed.take_if(|_| !kept("fixed"));
        self.golden.take_if(|_| !kept("golden"));
        self.models.retain(|m| kept(&m.name));
        let needed: Vec<String> = self.models.iter().filter_map(|m| m.recipe.clone()).collect();
        if let Some(recipe) = needed.iter().find(|r| !kept(r)) {
            let problem = format!("--only: expected {recipe:?} too, whose float model is measured, got it not");
            return Err(EvalError::Suite { path: self.path.clone(), problem });
        }
        self.recipes.retain(|r| kept(&r.name()));
        Ok(())
    }

    /// Where the baseline of a job lies that `version` of dsq measured: `baselines/VERSION/SUITE-NAME.json` beside the suite file.
    pub fn baseline_path(&self, version: &str, job: &str) -> PathBuf {
        self.baselines().join(version).join(format!("{}-{job}.json", self.name))
    }

    /// The folder of baselines, with a folder for each version.
    fn baselines(&self) -> PathBuf {
        self.path.parent().unwrap_or(Path::new("")).join("baselines")
    }

    /// The versions that have a baseline of `job`, oldest first. Folders whose names are no versions are passed over.
    ///
    /// # Errors
    /// [`EvalError::Io`] for a folder that cannot be read.
    pub fn baseline_versions(&self, job: &str) -> Result<Vec<Version>, EvalError> {
        let folder = self.baselines();
        let io = |source| EvalError::Io { path: folder.clone(), action: "read", source };
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(e) => return Err(io(e)),
        };
        let mut versions = Vec::new();
        for entry in entries {
            let name = entry.map_err(io)?.file_name();
            if let Some(version) = name.to_str().and_then(Version::parse)
                && self.baseline_path(&version.to_string(), job).is_file()
            {
                versions.push(version);
            }
        }
        versions.sort_unstable();
        Ok(versions)
    }
}

/// A version of dsq: three numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub [u32; 3]);

impl Version {
    /// Reads `1.2.3`; `None` for anything else.
    pub fn parse(text: &str) -> Option<Self> {
        let parts = text.split('.').map(|p| p.parse().ok()).collect::<Option<Vec<u32>>>()?;
        let version = Self(parts.try_into().ok()?);
        (version.to_string() == text).then_some(version)
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c] = self.0;
        write!(f, "{a}.{b}.{c}")
    }
}

/// Takes `x/../` out of a path as text, so that messages show `recipes/a.toml` and not `regression/../recipes/a.toml`.
fn normalized(path: &Path) -> PathBuf {
    use std::path::Component;
    let mut out = PathBuf::new();
    for part in path.components() {
        let last_is_name = matches!(out.components().next_back(), Some(Component::Normal(_)));
        match part {
            Component::ParentDir if last_is_name => {
                out.pop();
            }
            Component::CurDir => {}
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(text: &str) -> Result<Suite, EvalError> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("regression")).unwrap();
        let path = dir.path().join("regression/quick.toml");
        std::fs::write(&path, text).unwrap();
        Suite::load(&path)
    }

    #[test]
    fn a_suite_is_read_and_resolved() {
        let suite = load(
            "[tolerance]\nperplexity = { relative = 0.02 }\ncodes_sha256 = \"exact_on_same_hardware\"\n\
             [fixed.tolerance]\ncodes_sha256 = \"exact\"\n\
             [[recipe]]\npath = \"../recipes/a.toml\"\nset = [\"steps=5\"]\ntolerance = { perplexity = { absolute = 1.0 } }\n",
        )
        .unwrap();
        let recipe = &suite.recipes[0];
        assert!(recipe.path.ends_with("recipes/a.toml") && !recipe.path.to_string_lossy().contains(".."));
        assert_eq!(recipe.tolerance["perplexity"], Tolerance::Absolute(1.0));
        assert_eq!(recipe.tolerance["codes_sha256"], Tolerance::ExactOnSameHardware);
        assert!(suite.baseline_path("0.2.0", &recipe.name()).ends_with("regression/baselines/0.2.0/quick-a.json"));
    }

    #[test]
    fn f082_wrong_suites_are_refused_with_the_place() {
        let err = Suite::load(Path::new("nowhere/quick.toml")).unwrap_err();
        assert_eq!(
            (err.to_string().as_str(), err.exit_code()),
            ("nowhere/quick.toml: expected a suite file, got none", 2)
        );
        for (text, want) in [
            ("", "at least one [[recipe]], [[model]], [golden] or [fixed]"),
            ("[[recipe]]\npath = \"a.toml\"\n", "at least one tolerance"),
            ("[tolerence]\n", "unknown field `tolerence`"),
            ("[tolerance]\nkl = { relativ = 1.0 }\n", "line 2"),
            ("[tolerance]\nkl = { relative = nan }\n[[recipe]]\npath = \"a.toml\"\n", "tolerance.kl"),
            ("[tolerance]\nkl = { relative = -0.1 }\n[[recipe]]\npath = \"a.toml\"\n", "above 0, got -0.1"),
            ("[tolerance]\nkl = \"exact\"\n[[recipe]]\npath = \"a.toml\"\n[[recipe]]\npath = \"b/a.toml\"\n", "twice"),
        ] {
            let err = load(text).unwrap_err();
            assert!(err.to_string().contains(want) && err.exit_code() == 2, "{text:?}: {err}");
        }
    }

    const MODEL: &str = "[tolerance]\nkl = { relative = 0.1 }\n[[model]]\nname = \"m\"\nsource = \"models:a.gguf\"\ntext = [\"../t.txt\"]\n\
                         [[model.variant]]\nname = \"w4\"\nquantize = [\"--scheme\", \"W4A16\"]\n";

    #[test]
    fn a_model_is_read_and_resolved() {
        let suite = load(&format!("{MODEL}activations = \"int8\"\n")).unwrap();
        let m = &suite.models[0];
        assert_eq!(SuiteModel::in_models(m.source.as_deref().unwrap()), Some("a.gguf"));
        assert!(m.text[0].ends_with("t.txt") && m.text[0].is_absolute() && m.sequential);
        assert_eq!((m.variants[0].activations, m.tolerance.len()), (Activations::Int8, 1));
    }

    #[test]
    fn f082_wrong_models_are_refused_by_name() {
        for (from, to, want) in [
            ("source", "sauce", "unknown field `sauce`"),
            ("source = \"models:a.gguf\"", "recipe = \"r\"", "recipe: expected one of this suite, got \"r\""),
            ("source = \"models:a.gguf\"", "", "expected source or recipe, got none"),
            ("text = [\"../t.txt\"]", "", "expected text or images, got none"),
            ("text = [\"../t.txt\"]", "text = [\"t\"]\nimages = \"i\"", "expected text or images, got both"),
            ("text =", "context = 1\ntext =", "context: expected at least 2 tokens, got 1"),
            ("text =", "windows = 0\ntext =", "expected at least 1, got 0"),
            ("\"w4\"", "\"base\"", "other than base"),
            ("quantize = [\"--scheme\", \"W4A16\"]", "", "variant \"w4\": expected quantize, export or path, got none"),
            ("quantize", "export = []\nquantize", "variant \"w4\": expected quantize, export or path, got more"),
            ("\"m\"", "\"m/n\"", "without /"),
        ] {
            let err = load(&MODEL.replace(from, to)).unwrap_err();
            assert!(err.to_string().contains(want) && err.exit_code() == 2, "{to:?}: {err}");
        }
    }

    #[test]
    fn jobs_are_chosen_by_name() {
        let text = format!(
            "{MODEL}[[recipe]]\npath = \"a.toml\"\n[fixed.tolerance]\nkl = \"exact\"\n[golden]\npath = \"g\"\n"
        );
        let keep = |text: &str, names: &[&str]| {
            let mut suite = load(text).unwrap();
            suite.keep(&names.iter().map(|n| n.to_string()).collect::<Vec<_>>()).map(|()| suite)
        };
        let suite = keep(&text, &["m", "golden"]).unwrap();
        assert!(suite.fixed.is_none() && suite.golden.is_some() && suite.recipes.is_empty() && suite.models.len() == 1);
        let err = keep(&text, &["n"]).unwrap_err();
        assert!(err.to_string().contains("--only: expected one of a, m, fixed, golden, got \"n\""), "{err}");
        let trained = text.replace("source = \"models:a.gguf\"", "recipe = \"a\"");
        assert!(keep(&trained, &["m"]).unwrap_err().to_string().contains("expected \"a\" too"));
        assert_eq!(keep(&trained, &["a", "m"]).unwrap().recipes.len(), 1);
    }

    #[test]
    fn versions_are_found_and_sorted_as_numbers() {
        assert_eq!(Version::parse("0.10.2"), Some(Version([0, 10, 2])));
        for text in ["1.2", "1.2.3.4", "01.2.3", "a.b.c", "1.2.-3", "+1.2.3", ""] {
            assert_eq!(Version::parse(text), None, "{text}");
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("quick.toml");
        std::fs::write(&path, "[fixed.tolerance]\nkl = \"exact\"\n").unwrap();
        let suite = Suite::load(&path).unwrap();
        assert_eq!(suite.baseline_versions("fixed").unwrap(), []);
        for version in ["0.10.0", "0.9.0", "0.9.1", "old"] {
            let file = suite.baseline_path(version, if version == "0.9.1" { "other" } else { "fixed" });
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, "").unwrap();
        }
        assert_eq!(suite.baseline_versions("fixed").unwrap(), [Version([0, 9, 0]), Version([0, 10, 0])]);
    }

    #[test]
    fn a_row_has_its_own_tolerance() {
        let t: Tolerances = [("kl", Tolerance::Relative(0.1)), ("w4/kl", Tolerance::Relative(0.2))]
            .map(|(m, t)| (m.to_string(), t))
            .into();
        assert_eq!(tolerance_of(&t, "w4", "kl"), Some(Tolerance::Relative(0.2)));
        assert_eq!(tolerance_of(&t, "w8", "kl"), Some(Tolerance::Relative(0.1)));
        assert_eq!(tolerance_of(&t, "w8", "top1"), None);
    }
}
