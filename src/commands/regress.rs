//! `dsq regress`: runs a suite, compares with the committed baselines, prints the verdicts; or makes new baselines.
//! Exit code 1 when a check fell or is missing, 3 when a baseline cannot be used.

use crate::{Global, commands::report, error::CliError, output, recipe, recipe::Recipe, regress};
use dsq_checkpoint::write_atomic;
use dsq_eval::{
    Ask, Check, Identity, Job, Outcome, Purpose, Report, Setup, Suite, SuiteRecipe, Verdict, Version, junit, run_suite,
};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Options of `dsq regress`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The suite: a name (`quick` is regression/quick.toml) or a TOML file.
    #[arg(value_name = "SUITE", default_value = "quick")]
    suite: PathBuf,
    /// Only this job of the suite: `fixed`, `golden`, or the name of a recipe or a model. May be given again.
    #[arg(long, value_name = "JOB")]
    only: Vec<String>,
    /// Make what is measured now the new baselines of this version and show the change.
    #[arg(long, requires = "reason")]
    bless: bool,
    /// Why the baselines change; kept in them.
    #[arg(long, value_name = "TEXT", requires = "bless")]
    reason: Option<String>,
    /// With --bless: also train with this many seeds (each recipe's own and those behind it), so that the baselines know how far seeds are
    /// apart, for --seed.
    #[arg(long, value_name = "N", requires = "bless", value_parser = clap::value_parser!(u64).range(2..=32))]
    seeds: Option<u64>,
    /// Train with this seed in place of each recipe's own: codes are not compared, and verdicts allow for the noise between seeds, as far as
    /// the baselines know it.
    #[arg(long, value_name = "N", conflicts_with = "bless")]
    seed: Option<u64>,
    /// Measure nothing: print what each version of dsq measured, from its baselines.
    #[arg(long, conflicts_with_all = ["bless", "seed", "report", "junit", "keep"])]
    history: bool,
    /// With --bless: let this dsq, of another version, make and measure the recipes and models of the suite by its own commands, so that the
    /// history reaches back to it.
    #[arg(long, value_name = "FILE", requires_all = ["bless", "version"], conflicts_with = "seeds")]
    binary: Option<PathBuf>,
    /// With --binary: the version under which its baselines are kept.
    #[arg(long = "as", value_name = "VERSION", id = "version", requires = "binary")]
    version: Option<String>,
    /// Also write the checks and every measurement to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Also write one page with the checks, the measurements, the history and plots.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Also write the checks as JUnit XML, which CI systems read.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Keep the run folders in this folder instead of a temporary one.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    #[command(flatten)]
    bisect: super::bisect::Args,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    if args.bisect.given() {
        return super::bisect::run(&args.bisect, global);
    }
    let reason = args.reason.as_deref().map(str::trim);
    if reason == Some("") {
        return Err(CliError::usage("--reason: expected a sentence that says why the baselines change, got none"));
    }
    let mut suite = Suite::load(&suite_path(&args.suite))?;
    if !args.only.is_empty() {
        suite.keep(&args.only)?;
    }
    if args.history {
        let table = regress::history::history(&suite, &[])?;
        if let Some(file) = &args.html {
            write_atomic(file, report::page(vec![(format!("history of {}", suite.name), table.clone())]).as_bytes())?;
        }
        output::line(if global.json { table.to_json() } else { table.table() });
        return Ok(0);
    }
    let mut setup = regress::setup::detect(global)?;
    if let Some(version) = &args.version {
        if Version::parse(version).is_none() {
            return Err(CliError::usage(format!("--as: expected a version as 1.2.3, got {version:?}")));
        }
        // Of the other program nothing more is known.
        setup = Setup { dsq: version.clone(), kernels: BTreeMap::new(), dependencies: BTreeMap::new(), ..setup };
    }
    let scratch = tempfile::tempdir().map_err(|e| CliError::new(4, format!("temporary folder: cannot create: {e}")))?;
    let folder = args.keep.as_deref().unwrap_or(scratch.path());
    let purpose =
        Purpose { bless: reason, seeds: args.seeds.unwrap_or(1), seed: args.seed, partial: args.binary.is_some() };
    // Golden sets are read before anything is measured; what they hold cannot be blessed.
    let sets = match &suite.golden {
        Some(golden) if reason.is_none() => regress::golden::sets(&golden.path)?,
        _ => Vec::new(),
    };
    let work = Work {
        suite: &suite,
        folder,
        global,
        binary: args.binary.as_deref(),
        trained: RefCell::default(),
        notes: RefCell::default(),
    };
    let mut outcome =
        run_suite::<CliError>(&suite, &setup, purpose, &mut |job| work.identify(job), &mut |job, ask| {
            work.measure(job, ask)
        })?;
    outcome.notes.extend(work.notes.take());
    for set in &sets {
        outcome.checks.extend(set.checks(&folder.join("golden"), &setup, global)?);
    }
    for baseline in &outcome.blessed {
        if let Some(parent) = baseline.path.parent() {
            std::fs::create_dir_all(parent)
                .map_err(|e| CliError::new(4, format!("{}: cannot create: {e}", parent.display())))?;
        }
        write_atomic(&baseline.path, baseline.to_json().as_bytes())?;
    }
    let checks = checks(&suite, &setup, &outcome, reason);
    if let Some(file) = &args.report {
        write_atomic(file, format!("{}\n", checks.to_json()).as_bytes())?;
    }
    if let Some(file) = &args.junit {
        write_atomic(file, junit(&suite.name, &outcome.checks).as_bytes())?;
    }
    if let Some(file) = &args.html {
        let now = if reason.is_some() { &[][..] } else { &outcome.reports };
        let history = regress::history::history(&suite, now)?;
        let mut all = vec![(format!("regress {}", suite.name), checks.clone()), ("history".into(), history)];
        all.extend(outcome.reports.iter().cloned());
        write_atomic(file, report::page(all).as_bytes())?;
    }
    if global.json {
        output::line(checks.to_json());
    } else {
        print(&outcome);
    }
    Ok(u8::from(args.reason.is_none() && outcome.failed()))
}

/// Where and how jobs are measured.
struct Work<'a> {
    suite: &'a Suite,
    folder: &'a Path,
    global: &'a Global,
    /// Another dsq that measures.
    binary: Option<&'a Path>,
    /// What that one could not do.
    notes: RefCell<Vec<String>>,
    /// What recipes gave, by name and seed: models made of them do not train them again.
    trained: RefCell<BTreeMap<(String, u64), Report>>,
}

impl Work<'_> {
    /// The recipe of that name in the suite, which was checked to be there.
    fn recipe(&self, name: &str) -> Result<&SuiteRecipe, CliError> {
        let found = self.suite.recipes.iter().find(|r| r.name() == name);
        found.ok_or_else(|| CliError::new(70, format!("regress: no recipe {name}")))
    }

    fn identify(&self, job: &Job<'_>) -> Result<Identity, CliError> {
        let of = |r: &SuiteRecipe| -> Result<Identity, CliError> {
            let recipe = Recipe::load(&r.path, &r.set)?;
            Ok(Identity { recipe_sha256: recipe.digest(), seed: recipe.seed })
        };
        match job {
            Job::Fixed => Ok(Identity { recipe_sha256: regress::fixed::identity(), seed: 0 }),
            Job::Recipe(r) => of(r),
            Job::Model(m) => {
                let recipe = m.recipe.as_deref().map(|name| of(self.recipe(name)?)).transpose()?;
                let digest = recipe.as_ref().map(|r| r.recipe_sha256.as_str());
                let recipe_sha256 = regress::model::identity(m, digest)?;
                Ok(Identity { recipe_sha256, seed: recipe.map_or(0, |r| r.seed) })
            }
        }
    }

    fn measure(&self, job: &Job<'_>, ask: Ask<'_>) -> Result<Report, CliError> {
        let identity = self.identify(job)?;
        let seed = ask.seed.filter(|_| job.trains()).unwrap_or(identity.seed);
        let dir = self.folder.join(format!("{}-seed{seed}", job.name()));
        let report = match job {
            Job::Fixed if self.binary.is_some() => {
                return Err(CliError::usage(
                    "--binary measures recipes and models; expected --only with such, got fixed",
                ));
            }
            Job::Fixed => regress::fixed::measure(&self.folder.join(job.name()), self.global.threads(), &mut |_, _| {}),
            Job::Recipe(r) => self.train(r, seed),
            Job::Model(m) => {
                let source = match &m.recipe {
                    Some(name) => {
                        let recipe = self.recipe(name)?;
                        self.train(recipe, seed)?;
                        self.run_dir(recipe, seed).join(crate::jobs::place::FLOAT)
                    }
                    None => regress::model::resolve(m.source.as_deref().unwrap_or(Path::new("")))?,
                };
                let suite = self.suite.path.parent().unwrap_or(Path::new(""));
                let (baseline, global) = (ask.baseline, self.global);
                let run = regress::model::Run { source, dir, suite, baseline, global };
                match self.binary {
                    Some(dsq) => regress::other::measure(dsq, m, &run, &mut self.notes.borrow_mut()),
                    None => regress::model::measure(m, &run),
                }
            }
        };
        // A suite starts from the beginning: the hint of the training, to resume, does not help here.
        let report = report.map_err(|e| match e.code() {
            130 => CliError::new(130, format!("interrupted in {}; nothing was compared", job.name())),
            _ => e,
        })?;
        Ok(report.about("recipe_sha256", identity.recipe_sha256).about("seed", seed))
    }

    fn run_dir(&self, recipe: &SuiteRecipe, seed: u64) -> PathBuf {
        self.folder.join(format!("{}-seed{seed}", recipe.name()))
    }

    /// Trains a recipe with `seed`, unless this run has done so.
    fn train(&self, r: &SuiteRecipe, seed: u64) -> Result<Report, CliError> {
        let key = (r.name(), seed);
        if let Some(report) = self.trained.borrow().get(&key) {
            return Ok(report.clone());
        }
        let mut set = r.set.clone();
        let own = Recipe::load(&r.path, &set)?;
        if seed != own.seed {
            set.push(format!("seed={seed}"));
            // A residual network trains with a list of seeds.
            if let recipe::Job::Cnn(job) = &own.job {
                let seeds: Vec<u64> = (seed..).take(job.train.seeds.len()).collect();
                set.push(format!("train.seeds={seeds:?}"));
            }
        }
        let dir = self.run_dir(r, seed);
        let report = match self.binary {
            Some(dsq) => regress::other::train(dsq, r, &set, &dir, self.global)?,
            None => regress::recipe::measure(&Recipe::load(&r.path, &set)?, &dir, self.global)?,
        };
        self.trained.borrow_mut().insert(key, report.clone());
        Ok(report)
    }
}

/// `quick` is `regression/quick.toml`; anything with an ending or a separator is a path.
fn suite_path(suite: &Path) -> PathBuf {
    if suite.components().count() == 1 && suite.extension().is_none() {
        Path::new("regression").join(suite).with_extension("toml")
    } else {
        suite.into()
    }
}

/// The checks as rows; the measurements behind them under `measured`.
fn checks(suite: &Suite, setup: &Setup, outcome: &Outcome, reason: Option<&str>) -> Report {
    let measured: serde_json::Map<String, serde_json::Value> = outcome
        .reports
        .iter()
        .map(|(name, r)| (name.clone(), serde_json::to_value(&r.rows).unwrap_or_default()))
        .collect();
    let mut report = Report::new("regress")
        .about("suite", suite.name.as_str())
        .about("setup", serde_json::to_value(setup).unwrap_or_default())
        .about("failed", reason.is_none() && outcome.failed())
        .about("summary", outcome.summary())
        .about("notes", outcome.notes.clone());
    if let Some(reason) = reason {
        report = report.about("blessed", reason);
    }
    report = report.about("measured", measured);
    report.rows = outcome.checks.iter().map(Check::to_row).collect();
    report
}

fn print(outcome: &Outcome) {
    for note in &outcome.notes {
        output::line(format!("note: {note}"));
    }
    if !outcome.checks.is_empty() {
        output::line(Check::table(&outcome.checks));
    }
    if outcome.checks.iter().any(|c| c.verdict == Verdict::NotComparable) {
        output::line(
            "not comparable: the baselines are of other hardware, another seed or another base model, which give other bits; the \
             tolerances and the fixed-input checks decide here",
        );
    }
    // Again at the end, where the eye lands: what fell.
    for c in outcome.checks.iter().filter(|c| c.verdict.fails() && outcome.blessed.is_empty()) {
        output::line(format!("{}: {}/{}/{}: {}", c.verdict.name(), c.recipe, c.row, c.metric, c.note));
    }
    for baseline in &outcome.blessed {
        output::line(format!("wrote {}", baseline.path.display()));
    }
    match outcome.blessed.is_empty() {
        true => output::line(outcome.summary()),
        false => output::line(format!("new baselines; against the old ones: {}", outcome.summary())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_suite_of_the_repository_and_a_path_is_itself() {
        assert_eq!(suite_path(Path::new("quick")), Path::new("regression/quick.toml"));
        assert_eq!(suite_path(Path::new("my.toml")), Path::new("my.toml"));
        assert_eq!(suite_path(Path::new("a/quick")), Path::new("a/quick"));
    }
}
