//! A float model and its quantized forms as a suite measures them: the forms are made by `dsq quantize` and `dsq export`, then all of them
//! run on the same windows of text, the float model first, so that a change of the one is told apart from a change of the others.
//! Comparing and judging is in `dsq-eval`.

use super::digest::{add_digests, requantize};
use crate::commands::inspect::bits_per_weight;
use crate::commands::{eval, eval_images, eval_tasks};
use crate::documents::Documents;
use crate::reference::{digest, forward};
use crate::{Global, error::CliError, input, output};
use clap::Parser;
use dsq_checkpoint::{Checkpoint, ModelConfig, hex_sha256};
use dsq_eval::{
    Activations, BASE_ROW, Baseline, Report, Row, Samples, SuiteModel, TextEval, Tolerances, Variant, Window, decided,
    tolerance_of,
};
use dsq_runtime::{KvType, LlamaRuntime, TextTokenizer};
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;
use serde_json::json;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Draws which windows are measured, and in which order: a run may stop after any of them.
const WINDOWS_SEED: u64 = 0x6473_715f_7769_6e64;

/// Characters at the beginning of a text that are tokenized as a prompt, to compare what tokenizers put before it.
const PROMPT: usize = 4096;

/// A file or folder of a suite; `models:NAME` is NAME in $DSQ_MODELS, else in ~/.cache/dsq.
///
/// # Errors
/// Exit code 3 where nothing is there, with what fetches it.
pub fn resolve(path: &Path) -> Result<PathBuf, CliError> {
    let Some(name) = SuiteModel::in_models(path) else {
        return match path.exists() {
            true => Ok(path.into()),
            false => Err(CliError::new(3, format!("{}: expected a file or folder, got none", path.display()))),
        };
    };
    let folder = std::env::var_os("DSQ_MODELS").map(PathBuf::from).or_else(|| {
        let home = PathBuf::from(std::env::var_os("HOME").filter(|h| !h.is_empty())?);
        Some(home.join(".cache/dsq"))
    });
    let path = folder.unwrap_or_default().join(name);
    match path.exists() {
        true => Ok(path),
        false => {
            Err(CliError::new(3, format!("{}: expected {name}, which the suite measures, got none", path.display()))
                .with_hint("bash .ci/fetch-models.sh fetches the models of the suites; DSQ_MODELS names their folder"))
        }
    }
}

/// Digest of the job as it will run: what is made of which model, and the bytes of texts and tasks. Not the model's own bytes: a model that
/// changed is a measurement (`base moved`), no other job. `recipe`: digest of the recipe that trains it.
///
/// # Errors
/// Files that are missing or cannot be read.
pub fn identity(model: &SuiteModel, recipe: Option<&str>) -> Result<String, CliError> {
    let files = |paths: &[PathBuf]| -> Result<Vec<String>, CliError> {
        paths.iter().map(|p| Ok(hex_sha256(&input::bytes(&resolve(p)?)?))).collect()
    };
    for path in model.source.iter().chain(model.variants.iter().filter_map(|v| v.path.as_ref())) {
        resolve(path)?;
    }
    let images = match &model.images {
        None => None,
        Some(dir) => Some(files(&crate::pictures::list(&resolve(dir)?, usize::MAX)?)?),
    };
    let variants: Vec<_> = model
        .variants
        .iter()
        .map(|v| json!({"name": v.name, "quantize": v.quantize, "export": v.export, "path": v.path.as_ref().and_then(|p| p.file_name()).map(|n| n.to_string_lossy()), "activations": v.activations}))
        .collect();
    let source = model.source.as_ref().and_then(|s| s.file_name()).map(|n| n.to_string_lossy().into_owned());
    let job = json!({
        "source": source, "recipe": recipe, "text": files(&model.text)?, "context": model.context, "windows": model.windows,
        "tasks": files(&model.tasks)?, "max_items": model.max_items, "images": images, "variants": variants,
    });
    Ok(hex_sha256(job.to_string().as_bytes()))
}

/// What a measurement needs beside the job.
pub struct Run<'a> {
    /// The float model.
    pub source: PathBuf,
    /// An empty folder for the quantized forms.
    pub dir: PathBuf,
    /// The folder of the suite's file.
    pub suite: &'a Path,
    /// What it will be compared with: the run ends once that is decided.
    pub baseline: Option<&'a Baseline>,
    pub global: &'a Global,
}

/// Makes the variants of `model` and measures all of them. Rows: `base`, then the variants; of tasks, `base:TASK` and `VARIANT:TASK`.
///
/// # Errors
/// What quantizing, exporting or running refuses.
pub fn measure(model: &SuiteModel, run: &Run<'_>) -> Result<Report, CliError> {
    std::fs::create_dir_all(&run.dir)
        .map_err(|e| CliError::new(4, format!("{}: cannot create: {e}", run.dir.display())))?;
    let base = Checkpoint::open(&run.source)?;
    let mut made = Vec::new();
    for variant in &model.variants {
        let path = make(model, variant, run)?;
        made.push(Made { variant, checkpoint: Checkpoint::open(&path)?, path });
    }
    let mut report = Report::new("regress").about("model", model.name.as_str());
    let base_row = Row::new(BASE_ROW).text("model_sha256", digest(&base)?);
    let mut rows = vec![base_row];
    for m in &made {
        let mut row = Row::new(&m.variant.name);
        row.base = Some(BASE_ROW.into());
        rows.push(m.add_checks(row, &base)?);
    }
    match &model.images {
        Some(dir) => images(&resolve(dir)?, &mut rows, &made, run)?,
        None => report = text(report, model, &mut rows, (&base, &made), run)?,
    }
    if !model.tasks.is_empty() {
        tasks(model, &mut rows, &made, run)?;
    }
    report.rows = rows;
    Ok(report)
}

/// A quantized form on the disk.
struct Made<'a> {
    variant: &'a Variant,
    checkpoint: Checkpoint,
    path: PathBuf,
}

/// Makes a variant.
fn make(model: &SuiteModel, variant: &Variant, run: &Run<'_>) -> Result<PathBuf, CliError> {
    if let Some(path) = &variant.path {
        return resolve(path);
    }
    let (command, options) = match (&variant.quantize, &variant.export) {
        (Some(options), _) => ("quantize", options),
        (None, options) => ("export", options.as_ref().unwrap_or(const { &Vec::new() })),
    };
    let ending = if options.iter().any(|o| o == "gguf") { ".gguf" } else { "" };
    let out = run.dir.join(format!("{}{ending}", variant.name));
    let options = options.iter().map(|o| option(o, run.suite)).collect::<Result<Vec<_>, _>>()?;
    run_dsq(command, &run.source, &out, options, run.global).map_err(|e| {
        let at = format!("model {:?}, variant {:?}", model.name, variant.name);
        CliError::new(e.code(), format!("{at}: {e}"))
    })?;
    Ok(out)
}

/// Runs `dsq COMMAND SOURCE --out OUT OPTIONS` as a process of its own: its memory is given back, and it prints elsewhere.
///
/// # Errors
/// What it says, with its exit code.
pub fn run_dsq(
    command: &str,
    source: &Path,
    out: &Path,
    options: Vec<OsString>,
    global: &Global,
) -> Result<(), CliError> {
    let mut words: Vec<OsString> = vec![command.into(), source.into(), "--out".into(), out.into()];
    words.extend(options);
    run_program(None, words, global).map(|_| ())
}

/// Runs a dsq, this one where no other is given, with these words; what it prints.
///
/// # Errors
/// What it says, with its exit code.
pub fn run_program(program: Option<&Path>, words: Vec<OsString>, global: &Global) -> Result<String, CliError> {
    let command = words.first().map(|w| w.to_string_lossy().into_owned()).unwrap_or_default();
    let own =
        std::env::current_exe().map_err(|e| CliError::new(4, format!("dsq: cannot find its own program: {e}")))?;
    let program = program.unwrap_or(&own);
    let mut process = Command::new(program);
    process.args(words).args(["--threads", &global.threads().to_string()]);
    let at = program.display();
    let done = process.output().map_err(|e| CliError::new(4, format!("{at} {command}: cannot start: {e}")))?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&done.stderr);
    let said = said.lines().find_map(|l| l.strip_prefix("error: ")).unwrap_or(said.trim());
    let code = done.status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(70);
    Err(CliError::new(code, format!("dsq {command}: {said}")))
}

/// An option as it is given to the command: `models:NAME` and `suite:PATH` (relative to the suite's file) become paths.
pub(super) fn option(text: &str, suite: &Path) -> Result<OsString, CliError> {
    match text.strip_prefix("suite:") {
        Some(path) => Ok(suite.join(path).into()),
        None if SuiteModel::in_models(Path::new(text)).is_some() => Ok(resolve(Path::new(text))?.into()),
        None => Ok(text.into()),
    }
}

impl Made<'_> {
    /// What can be known without running it: digests of what is stored, whether rounding is as the formula says, whether its tokenizer is
    /// the float model's.
    fn add_checks(&self, row: Row, base: &Checkpoint) -> Result<Row, CliError> {
        let mut row = add_digests(row, &self.checkpoint)?;
        let plain =
            |options: &Vec<String>| !options.iter().any(|o| o.starts_with("--method") || o.starts_with("--observer"));
        // Before an image model is quantized its BatchNorm is folded into other weights than it has in float.
        let language = matches!(base.config(), ModelConfig::Llama(_));
        if language && self.variant.quantize.as_ref().is_some_and(plain) {
            let check = requantize(&self.checkpoint, &mut |module| Ok(base.linear(module)?.into_f32()))?;
            row = row.number("requantize_mismatches", check.mismatches as f64);
            if let Some(first) = check.first {
                row = row.text("first_mismatch", first);
            }
        }
        Ok(row.number("bits_per_weight", bits_per_weight(&self.checkpoint)?))
    }
}

/// A model in memory, what it has been asked, and whether more is needed.
struct Side<'a> {
    row: usize,
    runtime: LlamaRuntime,
    eval: TextEval,
    /// Of the baseline; `None` where there is nothing to stop for.
    old: Option<&'a Samples>,
    done: bool,
}

/// Adds to `rows` what the windows of text give.
fn text(
    report: Report,
    model: &SuiteModel,
    rows: &mut [Row],
    (base, made): (&Checkpoint, &[Made<'_>]),
    run: &Run<'_>,
) -> Result<Report, CliError> {
    let ModelConfig::Llama(config) = base.config() else {
        let problem = "text measures language models; expected one, got an image model";
        return Err(CliError::usage(format!("{}: {problem}", run.source.display())));
    };
    if model.context > config.max_position_embeddings {
        let (limit, got) = (config.max_position_embeddings, model.context);
        return Err(CliError::usage(format!("model {:?}: context: expected at most {limit}, got {got}", model.name)));
    }
    let texts = model.text.iter().map(|t| resolve(t)).collect::<Result<Vec<_>, _>>()?;
    let documents = Documents::of_texts(&texts, base, config.vocab_size)?;
    let prompts = prompts(&texts, base)?;
    rows[0] = rows[0].clone().text("tokens_sha256", documents.sha256());
    for (m, row) in made.iter().zip(&mut rows[1..]) {
        let theirs = self::prompts(&texts, &m.checkpoint)?;
        row.set("token_mismatches", mismatches(&prompts, &theirs) as f64);
    }
    let windows = drawn(&documents, model)?;
    let (threads, baseline) = (run.global.threads(), run.baseline.filter(|_| model.sequential));
    let load = |row: usize, checkpoint: &Checkpoint, activations| -> Result<Side<'_>, CliError> {
        let old = baseline.and_then(|b| b.row(&rows[row].name)).and_then(|r| r.samples.as_ref());
        let runtime = LlamaRuntime::load(checkpoint, threads)?.with_activations(activations);
        Ok(Side { row, runtime, eval: TextEval::new(), old, done: false })
    };
    let mut sides = vec![load(0, base, dsq_runtime::Activations::Float)?];
    for (i, m) in made.iter().enumerate() {
        let activations = match m.variant.activations {
            Activations::Float => dsq_runtime::Activations::Float,
            Activations::Int8 => dsq_runtime::Activations::Int8,
        };
        sides.push(load(i + 1, &m.checkpoint, activations)?);
    }
    let bar = match run.global.json {
        true => indicatif::ProgressBar::hidden(),
        false => output::progress(windows.len() as u64, "eval {bar:30} {pos}/{len} windows {msg} {eta}"),
    };
    for window in &windows {
        if sides.iter().all(|s| s.done) {
            break;
        }
        step(&mut sides, window)?;
        bar.inc(1);
        if baseline.is_some() {
            look(&mut sides, rows, &model.tolerance);
        }
    }
    bar.finish_and_clear();
    let (all, mut measured) = (windows.len(), Vec::new());
    for side in sides {
        let metrics = side.eval.finish()?;
        let row = &mut rows[side.row];
        let used = metrics.samples.blocks();
        *row = row.clone().text_metrics(&metrics).number("windows", used as f64);
        // Quantiles of a part are not those of all.
        if used == all {
            *row = row.clone().text_details(&metrics);
        }
        if let Some(d) = metrics.divergence.as_ref().filter(|_| used == all) {
            measured.push(json!({"row": row.name, "kl_histogram": d.histogram}));
        }
    }
    Ok(report.about("windows", all).about("context", model.context).about("kl_histograms", measured))
}

/// The windows that are measured, in their order.
pub(super) fn drawn<'a>(documents: &'a Documents, model: &SuiteModel) -> Result<Vec<Window<'a>>, CliError> {
    let mut windows = documents.windows(model.context, model.context)?;
    windows.shuffle(&mut ChaCha8Rng::seed_from_u64(WINDOWS_SEED));
    windows.truncate(model.windows);
    // In another order than in the text no window continues the one before it: each is a block.
    windows.iter_mut().for_each(|w| w.joins = false);
    Ok(windows)
}

/// Runs one window through every model that still needs it, the float model first.
fn step(sides: &mut [Side<'_>], window: &Window<'_>) -> Result<(), CliError> {
    let (base, others) = sides.split_at_mut(1);
    let logits = forward((&base[0].runtime, KvType::F32), window.tokens)?;
    base[0].eval.add(window, &logits, None)?;
    for side in others.iter_mut().filter(|s| !s.done) {
        let own = forward((&side.runtime, KvType::F32), window.tokens)?;
        side.eval.add(window, &own, Some(&logits))?;
    }
    Ok(())
}

/// Marks those that need no more windows: all of their metrics are decided against the baseline.
fn look(sides: &mut [Side<'_>], rows: &[Row], tolerances: &Tolerances) {
    let base_new = sides[0].eval.samples();
    let base = sides[0].old.zip(base_new.as_ref());
    let certain = |side: &Side<'_>| -> bool {
        let (Some(old), Some(new)) = (side.old, side.eval.samples()) else { return false };
        let (row, is_base) = (&rows[side.row].name, side.row == 0);
        let names = ["perplexity", "kl", "top1_agreement"].into_iter().map(str::to_owned);
        let named = tolerances.keys().map(|k| k.rsplit('/').next().unwrap_or(k).to_owned());
        names.chain(named).all(|metric| {
            let Some(tolerance) = tolerance_of(tolerances, row, &metric) else { return true };
            decided(tolerance, &metric, (old, &new), base.filter(|_| !is_base), is_base)
        })
    };
    let done: Vec<bool> = sides.iter().map(|s| s.done || certain(s)).collect();
    sides.iter_mut().zip(done).for_each(|(s, done)| s.done = done);
}

/// The beginning of each text as a prompt, with what the tokenizer puts before it.
fn prompts(texts: &[PathBuf], model: &Checkpoint) -> Result<Vec<Vec<u32>>, CliError> {
    let tokenizer = TextTokenizer::new(model)?;
    let prompt = |path: &PathBuf| -> Result<Vec<u32>, CliError> {
        let text: String = input::text(path)?.chars().take(PROMPT).collect();
        Ok(tokenizer.encode_prompt(&text)?)
    };
    texts.iter().map(prompt).collect()
}

/// Places at which two lists of token ids differ, those that only one has included.
fn mismatches(a: &[Vec<u32>], b: &[Vec<u32>]) -> usize {
    let differ =
        |(a, b): (&Vec<u32>, &Vec<u32>)| a.len().abs_diff(b.len()) + a.iter().zip(b).filter(|(x, y)| x != y).count();
    a.iter().zip(b).map(differ).sum()
}

/// A command line of `dsq eval`.
#[derive(Parser)]
struct EvalLine {
    #[command(flatten)]
    args: eval::Args,
}

fn eval_args(words: Vec<OsString>) -> Result<eval::Args, CliError> {
    let line = std::iter::once(OsString::from("eval")).chain(words);
    EvalLine::try_parse_from(line).map(|l| l.args).map_err(|e| CliError::new(70, format!("regress: dsq eval: {e}")))
}

/// Adds to `rows` what the pictures of a folder give.
fn images(dir: &Path, rows: &mut [Row], made: &[Made<'_>], run: &Run<'_>) -> Result<(), CliError> {
    for (i, m) in made.iter().enumerate() {
        let words =
            [m.path.as_os_str(), "--images".as_ref(), dir.as_os_str(), "--reference".as_ref(), run.source.as_os_str()];
        let args = eval_args(words.map(OsString::from).into())?;
        let (measured, _) = eval_images::measure(&args, dir, run.global)?;
        for (name, at) in [("model", i + 1), ("reference", 0)] {
            let Some(from) = measured.row(name) else { continue };
            rows[at].metrics.extend(from.metrics.clone().into_iter().filter(|(k, _)| k != "resident_bytes"));
            rows[at].samples = from.samples.clone();
        }
    }
    Ok(())
}

/// Adds rows of tasks.
fn tasks(model: &SuiteModel, rows: &mut Vec<Row>, made: &[Made<'_>], run: &Run<'_>) -> Result<(), CliError> {
    let files = model.tasks.iter().map(|t| resolve(t)).collect::<Result<Vec<_>, _>>()?;
    let base = (BASE_ROW, run.source.as_path(), Activations::Float);
    let variants = made.iter().map(|m| (m.variant.name.as_str(), m.path.as_path(), m.variant.activations));
    for (name, path, activations) in std::iter::once(base).chain(variants) {
        let mut words: Vec<OsString> = vec![path.into(), "--tasks".into()];
        words.extend(files.iter().map(|f| f.as_os_str().into()));
        if let Some(n) = model.max_items {
            words.extend(["--max-items".into(), n.to_string().into()]);
        }
        if activations == Activations::Int8 {
            words.extend(["--activations".into(), "int8".into()]);
        }
        let (measured, _) = eval_tasks::measure(&eval_args(words)?, run.global)?;
        for mut row in measured.rows {
            let task = std::mem::take(&mut row.name);
            row.name = format!("{name}:{task}");
            row.base = (name != BASE_ROW).then(|| format!("{BASE_ROW}:{task}"));
            rows.push(row);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_lists_differ_where_ids_do_and_where_one_ends() {
        let list = |v: &[&[u32]]| v.iter().map(|l| l.to_vec()).collect::<Vec<_>>();
        assert_eq!(mismatches(&list(&[&[1, 2, 3]]), &list(&[&[1, 2, 3]])), 0);
        assert_eq!(mismatches(&list(&[&[1, 2, 3], &[4]]), &list(&[&[1, 9, 3, 4], &[]])), 3);
    }

    #[test]
    fn f003_a_missing_model_is_named_with_what_fetches_it() {
        let err = resolve(Path::new("models:no-such-model.gguf")).unwrap_err();
        assert!(err.code() == 3 && err.to_string().contains("expected no-such-model.gguf"), "{err}");
        assert_eq!(resolve(Path::new("no/such/file")).unwrap_err().code(), 3);
    }
}
