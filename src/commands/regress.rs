//! `dsq regress`: runs a suite, compares with the committed baselines, prints the verdicts; or makes new baselines.
//! Exit code 1 when a check fell or is missing, 3 when a baseline cannot be used.

use crate::{Global, error::CliError, output, recipe::Recipe, regress};
use dsq_checkpoint::write_atomic;
use dsq_eval::{Check, Hardware, Identity, Job, Outcome, Report, Suite, Verdict, run_suite};
use std::path::{Path, PathBuf};

/// Options of `dsq regress`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The suite: a name (`quick` is regression/quick.toml) or a TOML file.
    #[arg(value_name = "SUITE", default_value = "quick")]
    suite: PathBuf,
    /// Make what is measured now the new baselines and show the change.
    #[arg(long, requires = "reason")]
    bless: bool,
    /// Why the baselines change; kept in them.
    #[arg(long, value_name = "TEXT", requires = "bless")]
    reason: Option<String>,
    /// Also write the checks and every measurement to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Keep the run folders in this folder instead of a temporary one.
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    let reason = args.reason.as_deref().map(str::trim);
    if reason == Some("") {
        return Err(CliError::usage("--reason: expected a sentence that says why the baselines change, got none"));
    }
    let suite = Suite::load(&suite_path(&args.suite))?;
    let hardware = Hardware::detect();
    let scratch = tempfile::tempdir().map_err(|e| CliError::new(4, format!("temporary folder: cannot create: {e}")))?;
    let folder = args.keep.as_deref().unwrap_or(scratch.path());
    let outcome = run_suite::<CliError>(
        &suite,
        &hardware,
        reason,
        &mut |job| match job {
            Job::Fixed => Ok(Identity { recipe_sha256: regress::fixed::identity(), seed: 0 }),
            Job::Recipe(r) => {
                let recipe = Recipe::load(&r.path, &r.set)?;
                Ok(Identity { recipe_sha256: recipe.digest(), seed: recipe.seed })
            }
        },
        &mut |job| {
            let dir = folder.join(job.name());
            match job {
                Job::Fixed => regress::fixed::measure(&dir, global.threads(), &mut |_, _| {}),
                Job::Recipe(r) => {
                    let measured = regress::recipe::measure(&Recipe::load(&r.path, &r.set)?, &dir, global);
                    // A suite starts from the beginning: the hint of the training, to resume, does not help here.
                    measured.map_err(|e| match e.code() {
                        130 => CliError::new(130, format!("interrupted in {}; nothing was compared", job.name())),
                        _ => e,
                    })
                }
            }
        },
    )?;
    for baseline in &outcome.blessed {
        if let Some(parent) = baseline.path.parent() {
            std::fs::create_dir_all(parent)
                .map_err(|e| CliError::new(4, format!("{}: cannot create: {e}", parent.display())))?;
        }
        write_atomic(&baseline.path, baseline.to_json().as_bytes())?;
    }
    let report = report(&suite, &hardware, &outcome, reason);
    if let Some(file) = &args.report {
        write_atomic(file, format!("{}\n", report.to_json()).as_bytes())?;
    }
    if global.json {
        output::line(report.to_json());
    } else {
        print(&outcome);
    }
    Ok(u8::from(args.reason.is_none() && outcome.failed()))
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
fn report(suite: &Suite, hardware: &Hardware, outcome: &Outcome, reason: Option<&str>) -> Report {
    let measured: serde_json::Map<String, serde_json::Value> = outcome
        .reports
        .iter()
        .map(|(name, r)| (name.clone(), serde_json::to_value(&r.rows).unwrap_or_default()))
        .collect();
    let mut report = Report::new("regress")
        .about("suite", suite.name.as_str())
        .about("hardware", serde_json::to_value(hardware).unwrap_or_default())
        .about("failed", reason.is_none() && outcome.failed())
        .about("summary", outcome.summary());
    if let Some(reason) = reason {
        report = report.about("blessed", reason).about("notes", outcome.notes.clone());
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
            "not comparable: the baselines were measured on other hardware, where training gives other bits; the \
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
