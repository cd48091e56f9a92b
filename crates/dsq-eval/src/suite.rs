//! A suite file: which recipes a regression run trains, what it changes in them, and how far each metric may move.
//! It runs nothing.
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
//! [[recipe]]
//! path = "../recipes/tiny-llama-w4a16.toml"    # relative to this file
//! set = ["train.steps=100"]                    # as dsq train --set
//! tolerance = { kl = { relative = 0.2 } }      # adds to and overrides the above
//! ```
//!
//! A metric that the suite does not name is not compared.

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

/// Tolerances by metric.
pub type Tolerances = BTreeMap<String, Tolerance>;

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
    /// The recipes, in the order they run.
    #[serde(default, rename = "recipe")]
    pub recipes: Vec<SuiteRecipe>,
}

/// The fixed-input checks of a suite.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fixed {
    /// Their tolerances; the suite's own do not apply.
    pub tolerance: Tolerances,
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
        if suite.recipes.is_empty() && suite.fixed.is_none() {
            return Err(refuse("expected at least one [[recipe]] or [fixed], got none".into()));
        }
        let fixed = suite.fixed.iter().flat_map(|f| &f.tolerance);
        for (metric, tolerance) in suite.recipes.iter().flat_map(|r| &r.tolerance).chain(fixed) {
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

    /// Where the baseline of a recipe (or of `fixed`) lies: `baselines/SUITE-NAME.json` beside the suite file.
    pub fn baseline_path(&self, recipe: &str) -> PathBuf {
        let folder = self.path.parent().unwrap_or(Path::new(""));
        folder.join("baselines").join(format!("{}-{recipe}.json", self.name))
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
        assert!(suite.baseline_path(&recipe.name()).ends_with("regression/baselines/quick-a.json"));
    }

    #[test]
    fn f082_wrong_suites_are_refused_with_the_place() {
        let err = Suite::load(Path::new("nowhere/quick.toml")).unwrap_err();
        assert_eq!(
            (err.to_string().as_str(), err.exit_code()),
            ("nowhere/quick.toml: expected a suite file, got none", 2)
        );
        for (text, want) in [
            ("", "at least one [[recipe]]"),
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
}
