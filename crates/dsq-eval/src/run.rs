//! One regression run: what to measure, against which baselines, in which order. It trains nothing itself: the caller
//! hands in the measuring; and it writes nothing: new baselines are returned.

use crate::{
    Baseline, Check, EvalError, Report, Seeds, Setup, Suite, SuiteModel, SuiteRecipe, Tolerances, Verdict, Version,
    compare,
};
use std::path::PathBuf;

/// One thing that a suite measures.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Job<'a> {
    /// The fixed-input checks.
    Fixed,
    /// A recipe.
    Recipe(&'a SuiteRecipe),
    /// A model and what is made of it.
    Model(&'a SuiteModel),
}

impl Job<'_> {
    /// What checks and baselines call it.
    pub fn name(&self) -> String {
        match self {
            Job::Fixed => "fixed".into(),
            Job::Recipe(r) => r.name(),
            Job::Model(m) => m.name.clone(),
        }
    }

    /// Whether a seed decides what comes of it.
    pub fn trains(&self) -> bool {
        match self {
            Job::Fixed => false,
            Job::Recipe(_) => true,
            Job::Model(m) => m.recipe.is_some(),
        }
    }
}

/// How a job is to be measured.
#[derive(Debug, Clone, Copy)]
pub struct Ask<'a> {
    /// The seed in place of the job's own. The report says which seed it is of; its `recipe_sha256` is that of the job's own.
    pub seed: Option<u64>,
    /// What it will be compared with: a measurement may end once all is decided. `None` where all of it is wanted.
    pub baseline: Option<&'a Baseline>,
}

/// What a run is for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Purpose<'a> {
    /// Make new baselines, for this reason.
    pub bless: Option<&'a str>,
    /// With `bless`: how many seeds are measured, the job's own and those behind it, for the noise between them. 0 and 1: the job's own.
    pub seeds: u64,
    /// Compare runs of this seed instead of each job's own.
    pub seed: Option<u64>,
    /// With `bless`: metrics of the suite that were not measured are left out of the baseline, and said so, instead of refused. For a
    /// program of another version, which may not know them.
    pub partial: bool,
}

/// What a measurement is of; known before it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// SHA-256 of the recipe as it will run, the suite's settings included.
    pub recipe_sha256: String,
    /// Its seed.
    pub seed: u64,
}

/// What a run came to.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Every check, in the order of the suite.
    pub checks: Vec<Check>,
    /// Every report, by job.
    pub reports: Vec<(String, Report)>,
    /// New baselines to write to their `path`; only when blessing.
    pub blessed: Vec<Baseline>,
    /// What blessing replaced without being able to compare it.
    pub notes: Vec<String>,
}

impl Outcome {
    /// Whether any check fails (exit 1). When blessing, checks only show the change.
    pub fn failed(&self) -> bool {
        self.checks.iter().any(|c| c.verdict.fails())
    }

    /// One line: how many checks came to what.
    pub fn summary(&self) -> String {
        let order = [
            Verdict::Pass,
            Verdict::Improved,
            Verdict::NotComparable,
            Verdict::Missing,
            Verdict::BaseMoved,
            Verdict::Regressed,
        ];
        let counts: Vec<String> = order
            .iter()
            .map(|v| (v, self.checks.iter().filter(|c| c.verdict == *v).count()))
            .filter(|(_, n)| *n > 0)
            .map(|(v, n)| format!("{n} {}", v.name()))
            .collect();
        if counts.is_empty() { "no checks".into() } else { counts.join(", ") }
    }
}

/// Runs `suite`: identifies every job and reads every baseline first, then measures and compares job by job. A job is compared with the
/// newest baseline that a version up to `setup.dsq` has. With [`Purpose::bless`] it makes new baselines of this version instead, and the
/// checks show the change from the old ones.
///
/// # Errors
/// What the closures return; [`EvalError::Baseline`] (exit 3) for a baseline that is missing, corrupt, or of another
/// recipe or seed: before anything is measured. When blessing, such baselines are replaced and noted; a report that
/// cannot become a baseline is an error.
pub fn run_suite<E: From<EvalError>>(
    suite: &Suite,
    setup: &Setup,
    purpose: Purpose<'_>,
    identify: &mut dyn FnMut(&Job<'_>) -> Result<Identity, E>,
    measure: &mut dyn FnMut(&Job<'_>, Ask<'_>) -> Result<Report, E>,
) -> Result<Outcome, E> {
    let mut jobs: Vec<(Job<'_>, &Tolerances)> = Vec::new();
    jobs.extend(suite.fixed.iter().map(|f| (Job::Fixed, &f.tolerance)));
    jobs.extend(suite.recipes.iter().map(|r| (Job::Recipe(r), &r.tolerance)));
    jobs.extend(suite.models.iter().map(|m| (Job::Model(m), &m.tolerance)));
    let mut out = Outcome::default();
    let mut planned: Vec<(Job<'_>, &Tolerances, PathBuf, Option<Baseline>)> = Vec::new();
    for (job, tolerances) in jobs {
        let identity = identify(&job)?;
        let own = suite.baseline_path(&setup.dsq, &job.name());
        let old = newest(suite, setup, &job.name()).and_then(|b| {
            b.check_identity(&identity.recipe_sha256, identity.seed)?;
            Ok(b)
        });
        if let (Ok(b), Some(seed)) = (&old, purpose.seed)
            && job.trains()
            && seed != identity.seed
            && b.seeds.is_none()
        {
            let problem =
                format!("seed {seed} needs the noise between seeds; expected it here (--bless --seeds N), got none");
            return Err(EvalError::baseline(&b.path, "seeds", problem).into());
        }
        let old = match (old, purpose.bless) {
            (Ok(b), _) => Some(b),
            (Err(e), None) => return Err(e.into()),
            (Err(e), Some(_)) => {
                out.notes.push(format!("nothing to show the change from: {e}"));
                None
            }
        };
        planned.push((job, tolerances, own, old));
    }
    for (job, tolerances, path, old) in planned {
        let baseline = old.as_ref().filter(|_| purpose.bless.is_none());
        let report = measure(&job, Ask { seed: purpose.seed.filter(|_| purpose.bless.is_none()), baseline })?;
        if let Some(old) = &old {
            if let Some(difference) = old.setup.difference(setup) {
                out.notes.push(format!("{}: the baseline is of another setup: {difference}", job.name()));
            }
            match (compare(old, &report, tolerances, setup), purpose.bless) {
                (Ok(checks), _) => out.checks.extend(checks),
                (Err(e), None) => return Err(e.into()),
                (Err(e), Some(_)) => out.notes.push(format!("nothing to show the change from: {e}")),
            }
        }
        if let Some(reason) = purpose.bless {
            let (name, setup) = (job.name(), setup.clone());
            let mut kept = tolerances.clone();
            if purpose.partial {
                let measured = |metric: &str| report.rows.iter().any(|r| r.metrics.contains_key(metric));
                kept.retain(|metric, _| measured(metric.rsplit('/').next().unwrap_or(metric)));
                let without: Vec<&str> =
                    tolerances.keys().filter(|m| !kept.contains_key(*m)).map(String::as_str).collect();
                if !without.is_empty() {
                    out.notes.push(format!("{name}: not measured and left out: {}", without.join(", ")));
                }
            }
            let mut new = Baseline::of_report(&path, &suite.name, &name, &report, &kept, setup, reason)?;
            new.seeds = spread(&job, &report, &kept, purpose.seeds, measure)?;
            out.blessed.push(new);
        }
        out.reports.push((job.name(), report));
    }
    Ok(out)
}

/// What other seeds than the job's own give; `None` where there is nothing random in it or one seed is asked for.
fn spread<E: From<EvalError>>(
    job: &Job<'_>,
    own: &Report,
    tolerances: &Tolerances,
    seeds: u64,
    measure: &mut dyn FnMut(&Job<'_>, Ask<'_>) -> Result<Report, E>,
) -> Result<Option<Seeds>, E> {
    if !job.trains() || seeds < 2 {
        return Ok(None);
    }
    let first = own.about.get("seed").and_then(serde_json::Value::as_u64).unwrap_or(0);
    let mut others = Vec::new();
    for seed in first + 1..first + seeds {
        others.push(measure(job, Ask { seed: Some(seed), baseline: None })?);
    }
    let all: Vec<&Report> = std::iter::once(own).chain(&others).collect();
    Ok(Some(Seeds::of_reports(&all, tolerances)))
}

/// The baseline of the newest version up to this one.
fn newest(suite: &Suite, setup: &Setup, job: &str) -> Result<Baseline, EvalError> {
    let here = Version::parse(&setup.dsq);
    let versions = suite.baseline_versions(job)?;
    let version = versions.into_iter().rfind(|v| here.is_none_or(|here| *v <= here));
    let version = version.map_or_else(|| setup.dsq.clone(), |v| v.to_string());
    let baseline = Baseline::load(&suite.baseline_path(&version, job))?;
    // A file that was copied from another place would compare other things under this name.
    for (field, expected, got) in [
        ("setup.dsq", version.as_str(), baseline.setup.dsq.as_str()),
        ("suite", suite.name.as_str(), baseline.suite.as_str()),
        ("recipe", job, baseline.recipe.as_str()),
    ] {
        if expected != got {
            return Err(EvalError::baseline(&baseline.path, field, format!("expected {expected:?}, got {got:?}")));
        }
    }
    Ok(baseline)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Hardware, Row, Tolerance};
    use std::collections::BTreeMap;

    struct Bench {
        dir: tempfile::TempDir,
        suite: Suite,
    }

    fn bench() -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("quick.toml");
        let text = "[tolerance]\nperplexity = { relative = 0.02 }\ncodes_sha256 = \"exact_on_same_hardware\"\n\
                    requantize_mismatches = { at_most = 0 }\n[fixed.tolerance]\ncodes_sha256 = \"exact\"\n[[recipe]]\npath = \"a.toml\"\n";
        std::fs::write(&path, text).unwrap();
        std::fs::create_dir_all(dir.path().join("baselines/0.1.0")).unwrap();
        let suite = Suite::load(&path).unwrap();
        assert_eq!(suite.recipes[0].tolerance["requantize_mismatches"], Tolerance::AtMost(0.0));
        Bench { dir, suite }
    }

    fn setup(version: &str) -> Setup {
        Setup {
            dsq: version.into(),
            device: "cpu".into(),
            kernels: BTreeMap::new(),
            dependencies: BTreeMap::new(),
            hardware: Hardware::detect(),
        }
    }

    fn report(job: &Job<'_>, perplexity: f64, codes: &str, mismatches: f64) -> Report {
        let mut r = Report::new("train").about("recipe_sha256", job.name()).about("seed", 1);
        let row = Row::new("exported").text("codes_sha256", codes);
        r.rows.push(match job {
            Job::Fixed => row,
            _ => row.number("perplexity", perplexity).number("requantize_mismatches", mismatches),
        });
        r
    }

    /// Runs the suite with constant reports; also returns how many jobs were measured.
    fn go(
        b: &Bench,
        bless: Option<&str>,
        perplexity: f64,
        codes: &str,
        mismatches: f64,
    ) -> (Result<Outcome, EvalError>, usize) {
        let mut measured = 0;
        let out = run_suite::<EvalError>(
            &b.suite,
            &setup("0.1.0"),
            Purpose { bless, ..Purpose::default() },
            &mut |job| Ok(Identity { recipe_sha256: job.name(), seed: 1 }),
            &mut |job, _| {
                measured += 1;
                Ok(report(job, perplexity, codes, mismatches))
            },
        );
        (out, measured)
    }

    fn bless(b: &Bench) {
        for new in go(b, Some("first"), 10.0, "aa", 0.0).0.unwrap().blessed {
            std::fs::write(&new.path, new.to_json()).unwrap();
        }
    }

    #[test]
    fn bless_then_pass_then_red_by_name() {
        let b = bench();
        bless(&b);
        let out = go(&b, None, 10.0, "aa", 0.0).0.unwrap();
        assert_eq!((out.failed(), out.summary().as_str()), (false, "4 pass"));
        let out = go(&b, None, 11.0, "ab", 3.0).0.unwrap();
        assert!(out.failed());
        let red: Vec<(&str, &str)> =
            out.checks.iter().filter(|c| c.verdict.fails()).map(|c| (c.recipe.as_str(), c.metric.as_str())).collect();
        assert_eq!(
            red,
            [("fixed", "codes_sha256"), ("a", "codes_sha256"), ("a", "perplexity"), ("a", "requantize_mismatches")]
        );
        assert_eq!(out.summary(), "4 regressed");
    }

    #[test]
    fn blessing_shows_the_change_and_cannot_bless_what_must_be_zero() {
        let b = bench();
        bless(&b);
        let out = go(&b, Some("kernel order"), 11.0, "ab", 0.0).0.unwrap();
        assert_eq!(out.blessed.len(), 2);
        assert!(out.blessed.iter().all(|n| n.reason == "kernel order"));
        assert_eq!(out.summary(), "1 pass, 3 regressed");
        let err = go(&b, Some("no"), 10.0, "aa", 1.0).0.unwrap_err();
        assert!(err.to_string().contains("requantize_mismatches"), "{err}");
    }

    #[test]
    fn f102_bad_baselines_stop_the_run_before_anything_is_measured() {
        let b = bench();
        let (out, measured) = go(&b, None, 10.0, "aa", 0.0);
        assert_eq!((out.unwrap_err().exit_code(), measured), (3, 0), "no baseline yet");
        bless(&b);
        let path = b.dir.path().join("baselines/0.1.0/quick-a.json");
        let good = std::fs::read_to_string(&path).unwrap();
        let damages: BTreeMap<&str, String> = [
            ("other recipe", good.replace("\"recipe_sha256\": \"a\"", "\"recipe_sha256\": \"b\"")),
            ("other seed", good.replace("\"seed\": 1", "\"seed\": 2")),
            ("of another version", good.replace("\"dsq\": \"0.1.0\"", "\"dsq\": \"0.0.9\"")),
            ("of another suite", good.replace("\"suite\": \"quick\"", "\"suite\": \"nightly\"")),
            ("of another job", good.replace("\"recipe\": \"a\"", "\"recipe\": \"fixed\"")),
            ("empty", String::new()),
            ("cut", good[..40].to_string()),
        ]
        .into();
        for (what, text) in damages {
            std::fs::write(&path, text).unwrap();
            let (out, measured) = go(&b, None, 10.0, "aa", 0.0);
            assert_eq!((out.unwrap_err().exit_code(), measured), (3, 0), "{what}");
            let notes = go(&b, Some("repair"), 10.0, "aa", 0.0).0.unwrap().notes;
            assert!(notes.len() == 1 && notes[0].contains("baseline unusable"), "{what}: {notes:?}");
        }
    }
}
