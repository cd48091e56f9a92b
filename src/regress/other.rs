//! A suite's recipes and models as another dsq measures them: an older version, by its own commands, so that the history of a suite can
//! begin before the suite did. It knows no blocks: such numbers have no intervals. Fixed inputs, tasks and pictures are not asked of it.

use super::model::{Run, drawn, option, resolve, run_program};
use super::recipe::add_checks;
use crate::{Global, documents::Documents, error::CliError};
use dsq_checkpoint::{Checkpoint, ModelConfig, write_atomic};
use dsq_eval::{BASE_ROW, Report, Row, SuiteModel, SuiteRecipe};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// The report that `dsq` prints as JSON.
fn report(dsq: &Path, words: Vec<OsString>, global: &Global) -> Result<Report, CliError> {
    let printed = run_program(Some(dsq), words, global)?;
    serde_json::from_str(&printed)
        .map_err(|e| CliError::new(3, format!("{}: expected a report of dsq: {e}", dsq.display())))
}

/// Trains a recipe in the run folder `dir` with the program `dsq`; its export is read by this dsq.
///
/// # Errors
/// What the program says, with its exit code.
pub fn train(
    dsq: &Path,
    recipe: &SuiteRecipe,
    set: &[String],
    dir: &Path,
    global: &Global,
) -> Result<Report, CliError> {
    let mut words: Vec<OsString> =
        vec!["train".into(), (&recipe.path).into(), "--out".into(), dir.into(), "--json".into()];
    for setting in set {
        words.extend(["--set".into(), setting.into()]);
    }
    add_checks(report(dsq, words, global)?, dir)
}

/// Makes the variants of `model` with the program `dsq` and measures them with it on the windows that this dsq measures. What it cannot make is
/// a row that is not there; `notes` says why.
///
/// # Errors
/// What the program says of the measurement, with its exit code.
pub fn measure(dsq: &Path, model: &SuiteModel, run: &Run<'_>, notes: &mut Vec<String>) -> Result<Report, CliError> {
    if model.images.is_some() {
        let problem = "--binary measures recipes, and models on text; expected --only with such, got pictures";
        return Err(CliError::usage(format!("model {:?}: {problem}", model.name)));
    }
    std::fs::create_dir_all(&run.dir)
        .map_err(|e| CliError::new(4, format!("{}: cannot create: {e}", run.dir.display())))?;
    let base = Checkpoint::open(&run.source)?;
    let ModelConfig::Llama(config) = base.config() else {
        return Err(CliError::usage(format!("{}: expected a language model", run.source.display())));
    };
    let texts = model.text.iter().map(|t| resolve(t)).collect::<Result<Vec<PathBuf>, _>>()?;
    let documents = Documents::of_texts(&texts, &base, config.vocab_size)?;
    let windows: Vec<&[u32]> = drawn(&documents, model)?.iter().map(|w| w.tokens).collect();
    let tokens = run.dir.join("tokens.json");
    write_atomic(&tokens, serde_json::to_string(&windows).unwrap_or_default().as_bytes())?;
    let mut out = Report::new("regress").about("model", model.name.as_str());
    out.rows.push(Row::new(BASE_ROW));
    for variant in &model.variants {
        let (command, options) = match (&variant.quantize, &variant.export) {
            (Some(options), _) => ("quantize", options),
            (None, Some(options)) => ("export", options),
            (None, None) => continue,
        };
        let ending = if options.iter().any(|o| o == "gguf") { ".gguf" } else { "" };
        let path = run.dir.join(format!("{}{ending}", variant.name));
        let mut words: Vec<OsString> = vec![command.into(), (&run.source).into(), "--out".into(), (&path).into()];
        for o in options {
            words.push(option(o, run.suite)?);
        }
        if let Err(e) = run_program(Some(dsq), words, run.global) {
            notes.push(format!("{}/{}: {e}", model.name, variant.name));
            continue;
        }
        let mut words: Vec<OsString> = vec!["eval".into(), (&path).into(), "--reference".into(), (&run.source).into()];
        words.extend(["--tokens-file".into(), (&tokens).into(), "--context".into(), model.context.to_string().into()]);
        words.push("--json".into());
        if variant.activations == dsq_eval::Activations::Int8 {
            words.extend(["--activations".into(), "int8".into()]);
        }
        let measured = report(dsq, words, run.global)?;
        let named = |name: &str| measured.row(name).map(|r| r.metrics.clone()).unwrap_or_default();
        out.rows[0].metrics = named("reference");
        let mut row = super::digest::add_digests(Row::new(&variant.name), &Checkpoint::open(&path)?)?;
        row.metrics.extend(named("model"));
        row.base = Some(BASE_ROW.into());
        out.rows.push(row);
    }
    Ok(out)
}
