//! A recipe as a suite measures it: trained, exported, run and evaluated as `dsq train` does, then the digests of the
//! export and the check of its codes and scales against the formula.

use super::digest::{add_digests, requantize};
use crate::{
    Global,
    commands::train::train_recipe,
    error::CliError,
    jobs::place,
    recipe::{Job, Recipe},
};
use dsq_checkpoint::Checkpoint;
use dsq_eval::Report;
use std::path::Path;

/// The row of the float model.
const FLOAT_ROW: &str = "float";

/// Trains `recipe` in the run folder `dir` and measures it. The row `exported` gets the digests and
/// `requantize_mismatches`, and of a language model `graph_difference`: how far its perplexity is from that of the training
/// graph, relative.
///
/// # Errors
/// What training refuses; exit code 3 for a run folder without the export or the weights it was made from.
pub fn measure(recipe: &Recipe, dir: &Path, global: &Global) -> Result<Report, CliError> {
    if matches!(&recipe.job, Job::Lm(job) if job.quant.gguf.is_some()) {
        let problem =
            "a suite compares codes of compressed-tensors folders; expected another quant.scheme, got one of GGUF";
        return Err(CliError::usage(format!("{}: {problem}", recipe.name)));
    }
    let report = train_recipe(recipe, dir, global)?;
    add_checks(report, dir)
}

/// Adds to `report` what the run folder `dir` holds.
pub(super) fn add_checks(mut report: Report, dir: &Path) -> Result<Report, CliError> {
    let export = Checkpoint::open(&dir.join(place::EXPORTED))?;
    let masters = Checkpoint::open(&dir.join(place::MASTER))?;
    let Some(at) = report.rows.iter().position(|r| r.name == "exported") else {
        let problem = "rows: expected a row `exported` in the report, got none";
        return Err(CliError::new(3, format!("{}: {problem}", dir.display())));
    };
    let row = add_digests(report.rows.remove(at), &export)?;
    let check = requantize(&export, &mut |module| Ok(masters.linear(module)?.into_f32()))?;
    let mut row = row.number("requantize_mismatches", check.mismatches as f64);
    if let Some(first) = check.first {
        row = row.text("first_mismatch", first);
    }
    // The runtime runs the export; the training graph is where its codes came from. They must be the same model.
    let graph = report.row("qat").and_then(|r| r.get("perplexity"));
    if let Some((exported, graph)) = row.get("perplexity").zip(graph) {
        row.set("graph_difference", (exported / graph - 1.0).abs());
    }
    report.rows.insert(at, row);
    // What was made from the float model is judged beside it.
    if report.row(FLOAT_ROW).is_some() {
        for row in report.rows.iter_mut().filter(|r| r.name != FLOAT_ROW) {
            row.base = Some(FLOAT_ROW.into());
        }
    }
    Ok(report)
}
