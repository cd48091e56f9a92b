//! What a recipe sets in motion: train, export, run the export, measure. One file a kind of model. No printing (see
//! `commands/train.rs`).

pub mod cnn;
pub mod lm;

use crate::{Global, error::CliError, recipe::Recipe};
use dsq_checkpoint::{Checkpoint, OnnxExport, OnnxOptions};
use dsq_train::Control;
use std::path::Path;

/// Where the parts of a run folder lie.
pub mod place {
    /// The compressed-tensors export.
    pub const EXPORTED: &str = "exported";
    /// The export of a recipe on blocks of GGUF.
    pub const EXPORTED_GGUF: &str = "exported.gguf";
    /// The same as an ONNX file, where the recipe asks for one.
    pub const EXPORTED_ONNX: &str = "exported.onnx";
    /// The f32 master weights that the export's codes were computed from, as a float folder.
    pub const MASTER: &str = "master";
    /// The float model, before QAT.
    pub const FLOAT: &str = "float";
    /// The report of the run.
    pub const REPORT: &str = "report.json";
    /// The loss curve.
    pub const CURVE: &str = "loss.svg";
}

/// One line of progress: a phase, how far it is, and what there is to say.
#[derive(Debug, Clone)]
pub struct Tick<'a> {
    /// Phase: `float`, `qat`, `evaluate`...
    pub phase: &'a str,
    /// Units done in the phase.
    pub done: u64,
    /// Units of the phase.
    pub of: u64,
    /// The current loss or perplexity, ready to print.
    pub note: String,
}

/// How a job is started.
pub struct Start<'a> {
    /// The recipe.
    pub recipe: &'a Recipe,
    /// Run folder.
    pub out: &'a Path,
    /// Go on from the newest checkpoint.
    pub resume: bool,
    /// Replace an earlier run in `out`.
    pub overwrite: bool,
    /// Options of the command line.
    pub global: &'a Global,
    /// Told after each step; its answer `Stop` saves and ends.
    pub on_tick: &'a mut dyn FnMut(&Tick) -> Control,
}

/// Writes `folder` as an ONNX file; a file of an earlier run is replaced.
fn write_onnx(folder: &Path, out: &Path) -> Result<(), CliError> {
    let ckpt = Checkpoint::open(folder)?;
    let options = OnnxOptions { overwrite: true, ..OnnxOptions::default() };
    OnnxExport::new(&ckpt, out, options)?.write(&mut || ())?;
    Ok(())
}

/// What can be wrong with a model folder that a job is about to write, found before the work.
fn check_space(out: &Path, needed: u64) -> Result<(), CliError> {
    let mut dir = out;
    while !dir.exists() {
        dir = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    }
    Ok(dsq_checkpoint::check_space(dir, needed)?)
}
