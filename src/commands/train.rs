//! `dsq train`: a recipe from start to table.

use crate::jobs::{Start, Tick, cnn, lm};
use crate::recipe::{Job, Recipe};
use crate::{Global, error::CliError, interrupt, output};
use dsq_eval::Report;
use dsq_train::{Control, RunDir};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

/// Options of `dsq train`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The recipe, a TOML file.
    recipe: PathBuf,
    /// Run folder (default: runs/NAME).
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Go on from the newest checkpoint of the run folder.
    #[arg(long, conflicts_with = "overwrite")]
    resume: bool,
    /// Replace an earlier run in the run folder.
    #[arg(long)]
    overwrite: bool,
    /// Check the recipe and its data, and stop.
    #[arg(long)]
    check: bool,
    /// Change a value of the recipe, as in `train.steps=100`; may be given several times.
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    let recipe = Recipe::load(&args.recipe, &args.set)?;
    if args.check {
        match &recipe.job {
            Job::Lm(job) => drop(lm::plan(job, &args.recipe, recipe.seed)?),
            Job::Cnn(job) => cnn::check(job)?,
        }
        if global.json {
            let report = Report::new("train").about("recipe", recipe.name.as_str());
            output::line(report.about("recipe_sha256", recipe.digest()).about("check", "ok").to_json());
        } else {
            output::line(format!("{}: ok (recipe {} {})", args.recipe.display(), recipe.name, recipe.digest()));
        }
        return Ok(0);
    }
    let out = args.out.unwrap_or_else(|| Path::new("runs").join(&recipe.name));
    let report = train(&recipe, &args.recipe, &out, args.resume, args.overwrite, global)?;
    if global.json {
        output::line(report.to_json());
    } else {
        output::line(report.table());
        output::line(format!("run folder: {}", out.display()));
    }
    Ok(0)
}

/// Trains, exports and evaluates a recipe into a new run folder; prints nothing but progress on a terminal.
///
/// # Errors
/// Those of the recipe's job.
pub fn train_recipe(recipe: &Recipe, out: &Path, global: &Global) -> Result<Report, CliError> {
    train(recipe, Path::new(&recipe.name), out, false, false, global)
}

fn train(
    recipe: &Recipe,
    recipe_path: &Path,
    out: &Path,
    resume: bool,
    overwrite: bool,
    global: &Global,
) -> Result<Report, CliError> {
    global.use_threads();
    let stop = interrupt::stop_flag()?;
    let mut bar: Option<(String, indicatif::ProgressBar)> = None;
    let mut leftovers = RunDir::leftovers(out);
    let mut on_tick = |tick: &Tick| {
        // Only now: the first tick means that the run folder is ours, and nobody else was writing there.
        for path in leftovers.drain(..) {
            let path = dsq_checkpoint::printable(&path.to_string_lossy());
            output::note(format!("{path}: half written by a run that was killed; ignored and removed"));
        }
        if bar.as_ref().is_none_or(|(phase, _)| phase != tick.phase) {
            if let Some((_, old)) = &bar {
                old.finish();
            }
            let template = "{prefix:>20} [{bar:30}] {pos}/{len} {msg}  {elapsed} (eta {eta})";
            bar =
                Some((tick.phase.to_string(), output::progress(tick.of, template).with_prefix(tick.phase.to_string())));
        }
        if let Some((_, bar)) = &bar {
            bar.set_position(tick.done);
            bar.set_message(tick.note.clone());
        }
        if stop.load(Ordering::SeqCst) { Control::Stop } else { Control::Continue }
    };
    let mut start = Start { recipe, out, resume, overwrite, global, on_tick: &mut on_tick };
    let report = match &recipe.job {
        Job::Lm(job) => lm::run(job, &mut start, recipe_path),
        Job::Cnn(job) => cnn::run(job, &mut start),
    };
    if let Some((_, bar)) = &bar {
        if report.is_ok() { bar.finish() } else { bar.abandon() }
    }
    report
}
