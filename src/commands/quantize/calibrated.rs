//! The methods of `dsq quantize` that look at text: what text, the run over the model, and what is told of it. The methods
//! themselves are dsq-train's `ptq`.

use super::{Args, Layer, Method, default_dtype, source_name, source_record, workers};
use crate::{Global, error::CliError, input, output};
use dsq_checkpoint::{Checkpoint, CheckpointError, ExportTensor, LinearSpec, ModelConfig, printable};
use dsq_quant::{QuantConfig, QuantizedMatrix};
use dsq_runtime::{Specials, TextTokenizer};
use dsq_train::TrainError;
use dsq_train::ptq::{
    self, BlockFit, Calibration, Fit, PtqLinear, PtqMethod, PtqNorm, PtqProgress, PtqSettings, Tuning,
};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use std::path::PathBuf;

/// Tokens that calibration takes unless told otherwise.
const DEFAULT_TOKENS: usize = 32_768;
/// Tokens of a window unless told otherwise, or the model's limit.
const DEFAULT_CONTEXT: usize = 512;

/// Options of the methods that need text.
#[derive(clap::Args, Debug)]
pub(super) struct CalibrationArgs {
    /// Text for --method gptq, awq and blockwise and for --kv-cache, UTF-8, of the kind that the model will see; for image models a folder of
    /// JPEG files, with every method. What is measured on it afterwards says little.
    #[arg(long, value_name = "FILE|DIR")]
    calib: Option<PathBuf>,
    /// Tokens to take from --calib, in windows that are spread over the whole text [default: 32768].
    #[arg(long, value_name = "N")]
    calib_tokens: Option<usize>,
    /// Tokens in a window [default: 512 or the model's limit, whichever is less].
    #[arg(long, value_name = "N")]
    calib_context: Option<usize>,
    /// Scale input columns by the magnitude of their inputs, as --method awq does, before gptq or blockwise chooses codes.
    #[arg(long)]
    awq_scales: bool,
    /// Passes over the windows for each block, with --method blockwise [default: 2].
    #[arg(long, value_name = "N")]
    epochs: Option<usize>,
    /// Steps of end-to-end training after the blocks, with --method blockwise; a step takes about 1,024 tokens, each other
    /// ones while --calib has them [default: 0].
    #[arg(long, value_name = "N")]
    steps: Option<usize>,
    /// Learning rate of the weights in --steps, as a share of their root mean square; 0 fixes the codes and trains the scales
    /// alone [default: 0].
    #[arg(long, value_name = "RATE")]
    end_weight_rate: Option<f64>,
    /// Learning rate of the scales in --steps, as a share of their root mean square [default: 0.001].
    #[arg(long, value_name = "RATE")]
    end_scale_rate: Option<f64>,
}

/// The calibration text of a model.
pub(super) struct Text {
    calibration: Calibration,
    awq_scales: bool,
    /// That of the end-to-end steps, if there are such.
    further: Option<Calibration>,
    path: PathBuf,
    sha256: String,
}

impl Text {
    /// The windows.
    pub(super) fn calibration(&self) -> &Calibration {
        &self.calibration
    }

    /// For `--json`.
    pub(super) fn about(&self, method: Method) -> Value {
        json!({
            "method": name(method),
            "awq_scales": self.awq_scales || method == Method::Awq,
            "text": self.path,
            "sha256": self.sha256,
            "tokens": self.calibration.tokens(),
            "context": self.calibration.context(),
            "end_tokens": self.further.as_ref().map(Calibration::tokens),
        })
    }
}

pub(super) fn name(method: Method) -> &'static str {
    match method {
        Method::Rtn => "rtn",
        Method::Gptq => "gptq",
        Method::Awq => "awq",
        Method::Blockwise => "blockwise",
    }
}

impl CalibrationArgs {
    /// What `--calib` names.
    pub(super) fn calib(&self) -> Option<&std::path::Path> {
        self.calib.as_deref()
    }

    /// What can be known of the options for an image model.
    ///
    /// # Errors
    /// Exit code 2 for options about text or training.
    pub(super) fn check_images(&self) -> Result<(), CliError> {
        let given = [
            ("--calib-tokens", self.calib_tokens.is_some()),
            ("--calib-context", self.calib_context.is_some()),
            ("--awq-scales", self.awq_scales),
            ("--epochs", self.epochs.is_some()),
            ("--steps", self.steps.is_some()),
            ("--end-weight-rate", self.end_weight_rate.is_some()),
            ("--end-scale-rate", self.end_scale_rate.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((option, _)) => {
                Err(CliError::usage(format!("{option}: not for an image model; expected no such option, got one")))
            }
            None => Ok(()),
        }
    }

    /// What can be known without opening a file.
    ///
    /// # Errors
    /// Exit code 2 for a method or a KV cache (`kv_cache`) without text, or text without such.
    pub(super) fn check(&self, method: Method, kv_cache: bool) -> Result<(), CliError> {
        let method_name = name(method);
        let training = [
            ("--epochs", self.epochs.is_some()),
            ("--steps", self.steps.is_some()),
            ("--end-weight-rate", self.end_weight_rate.is_some()),
            ("--end-scale-rate", self.end_scale_rate.is_some()),
        ];
        if let Some((option, _)) = training.iter().find(|(_, given)| *given && method != Method::Blockwise) {
            let problem = format!("only training takes it; expected --method blockwise, got {method_name}");
            return Err(CliError::usage(format!("{option}: {problem}")));
        }
        for (option, rate) in [("--end-weight-rate", self.end_weight_rate), ("--end-scale-rate", self.end_scale_rate)] {
            if let Some(rate) = rate.filter(|r| !(0.0..=0.1).contains(r)) {
                return Err(CliError::usage(format!("{option}: expected a learning rate from 0 to 0.1, got {rate}")));
            }
        }
        if self.awq_scales && !matches!(method, Method::Gptq | Method::Blockwise) {
            let problem = format!("expected --method gptq or blockwise, got {method_name}");
            return Err(CliError::usage(format!("--awq-scales: {problem}")));
        }
        match (method, &self.calib) {
            (Method::Rtn, None) if kv_cache => Err(CliError::usage(
                "--calib: --kv-cache finds the scales of keys and values on text; expected a file, got none",
            )
            .with_hint("give --calib FILE, text of the kind that the model will see")),
            (Method::Rtn, Some(_)) if kv_cache => Ok(()),
            (Method::Rtn, _) => {
                let given = [
                    ("--calib", self.calib.is_some()),
                    ("--calib-tokens", self.calib_tokens.is_some()),
                    ("--calib-context", self.calib_context.is_some()),
                ];
                match given.iter().find(|(_, given)| *given) {
                    Some((option, _)) => Err(CliError::usage(format!(
                        "{option}: rounding to nearest looks at no text; expected --method gptq, awq or blockwise, or --kv-cache, got rtn"
                    ))),
                    None => Ok(()),
                }
            }
            (_, None) => Err(CliError::usage(format!(
                "--calib: --method {method_name} measures the inputs of layers on text; expected a file, got none"
            ))
            .with_hint("give --calib FILE, text of the kind that the model will see, or use --method rtn")),
            (_, Some(_)) => Ok(()),
        }
    }

    /// Reads and tokenizes the text.
    ///
    /// # Errors
    /// Exit code 2 for sizes that do not fit the model, 3 for a text that is too short or no UTF-8, or a model without a
    /// tokenizer; 4 for a file that cannot be read.
    pub(super) fn read(&self, ckpt: &Checkpoint) -> Result<Text, CliError> {
        let (Some(path), ModelConfig::Llama(model)) = (&self.calib, ckpt.config()) else {
            return Err(CliError::usage("--calib: expected a file and a language model"));
        };
        let limit = model.max_position_embeddings;
        let context = match self.calib_context {
            None => DEFAULT_CONTEXT.min(limit),
            Some(n) if (2..=limit).contains(&n) => n,
            Some(n) => {
                let problem = format!("expected 2 to {limit} (the model's positions), got {n}");
                return Err(CliError::usage(format!("--calib-context: {problem}")));
            }
        };
        let tokens = self.calib_tokens.unwrap_or(DEFAULT_TOKENS);
        if tokens < context {
            let problem = format!("expected at least one window of {context} tokens, got {tokens}");
            return Err(CliError::usage(format!("--calib-tokens: {problem}")));
        }
        let at = printable(&path.to_string_lossy());
        let bytes = input::bytes(path)?;
        let sha256 = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        let text = input::utf8(path, bytes)?;
        let ids = TextTokenizer::new(ckpt)?.encode(&text, Specials::AsText)?;
        if ids.len() < tokens {
            let problem = format!("expected at least {tokens} tokens (--calib-tokens), got {}", ids.len());
            return Err(CliError::new(3, format!("{at}: {problem}"))
                .with_hint("give a longer text, or a smaller --calib-tokens"));
        }
        let calibration = Calibration::new(&ids, tokens, context, model.vocab_size)?;
        let further = match self.steps {
            None | Some(0) => None,
            Some(steps) => {
                let count = steps.saturating_mul(Calibration::BATCH_TOKENS.max(context)).min(ids.len());
                Some(Calibration::new(&ids, count, context, model.vocab_size)?)
            }
        };
        Ok(Text { calibration, awq_scales: self.awq_scales, further, path: path.clone(), sha256 })
    }
}

/// What a method made of a model.
pub(super) struct Calibrated {
    /// The layers that the scheme names.
    pub(super) layers: Vec<Layer>,
    /// Norms that had to change with them.
    pub(super) norms: Vec<ExportTensor>,
    /// What block-wise training did.
    pub(super) trained: Option<Trained>,
}

/// What block-wise training was told and what it did.
pub(super) struct Trained {
    tuning: Tuning,
    blocks: Vec<BlockFit>,
    end_to_end: Option<[f64; 2]>,
}

impl Trained {
    /// For `--json`.
    pub(super) fn about(&self) -> Value {
        let blocks: Vec<_> = self
            .blocks
            .iter()
            .map(|b| json!({"layer": b.layer, "error_gptq": b.before, "error": b.after, "kept": b.kept}))
            .collect();
        json!({
            "epochs": self.tuning.epochs,
            "steps": self.tuning.steps,
            "end_weight_rate": self.tuning.end_weight_rate,
            "end_scale_rate": self.tuning.end_scale_rate,
            "seed": self.tuning.seed,
            "blocks": blocks,
            "divergence_first": self.end_to_end.map(|d| d[0]),
            "divergence_last": self.end_to_end.map(|d| d[1]),
        })
    }

    /// For a person.
    pub(super) fn notes(&self) -> Vec<String> {
        let mut out = Vec::new();
        let shares: Vec<f64> =
            self.blocks.iter().filter(|b| b.before > 0.0).map(|b| b.after.min(b.before) / b.before).collect();
        if !shares.is_empty() {
            let mean = shares.iter().sum::<f64>() / shares.len() as f64;
            out.push(format!(
                "squared error of the blocks' outputs: {mean:.3} of that of GPTQ's codes (mean over blocks)"
            ));
        }
        for b in self.blocks.iter().filter(|b| !b.kept) {
            let (layer, after, before) = (b.layer, b.after, b.before);
            out.push(format!("note: block {layer} keeps GPTQ's codes: training gave {after:.5}, they {before:.5}"));
        }
        if let Some([first, last]) = self.end_to_end {
            out.push(format!(
                "end to end, on the calibration text: divergence from the float model {first:.4} to {last:.4}"
            ));
        }
        out
    }
}

/// Quantizes the layers that the scheme names, and what had to change with them.
pub(super) fn quantize(
    args: &Args,
    global: &Global,
    ckpt: &Checkpoint,
    config: &QuantConfig,
    specs: &[LinearSpec],
    text: &Text,
) -> Result<Calibrated, CliError> {
    let (method, awq) = match args.method {
        Method::Rtn => (PtqMethod::Rtn, false),
        Method::Awq => (PtqMethod::Rtn, true),
        Method::Gptq => (PtqMethod::Gptq, args.calibration.awq_scales),
        Method::Blockwise => (PtqMethod::Blockwise, args.calibration.awq_scales),
    };
    let c = &args.calibration;
    let usual = Tuning::default();
    let tuning = Tuning {
        epochs: c.epochs.unwrap_or(usual.epochs),
        steps: c.steps.unwrap_or(usual.steps),
        end_weight_rate: c.end_weight_rate.unwrap_or(usual.end_weight_rate),
        end_scale_rate: c.end_scale_rate.unwrap_or(usual.end_scale_rate),
        ..usual
    };
    let float_dtype = args.dtype.or(default_dtype(ckpt));
    let layers = match ckpt.config() {
        ModelConfig::Llama(c) => c.num_hidden_layers,
        ModelConfig::ResNet(_) | ModelConfig::EfficientNet(_) => 0,
    };
    let bar = output::progress(1, "quantize {bar:30} {percent}% {msg} {eta}");
    let mut on_progress = |p: &PtqProgress| {
        bar.set_length(p.total as u64);
        bar.set_message(format!("layer {} of {layers}", (p.layer + 1).min(layers)));
        bar.set_position(p.done as u64);
    };
    let end_text = text.further.as_ref();
    let settings = PtqSettings { config, method, awq, float_dtype, tuning, end_text };
    let outcome = workers(global)?.install(|| ptq::quantize_llama(ckpt, settings, &text.calibration, &mut on_progress));
    bar.finish_and_clear();
    let outcome = outcome.map_err(|e| match e {
        // In the words, with the hints, of rounding.
        TrainError::Quant { module, source } => {
            CheckpointError::quant(&args.model, source_name(ckpt, &module), source).into()
        }
        other => CliError::from(other),
    })?;
    let trained = Trained { tuning, blocks: outcome.blocks, end_to_end: outcome.end_to_end };
    let mut layers = Vec::new();
    for linear in outcome.linears {
        let Some(spec) = specs.iter().find(|s| s.module == linear.module) else {
            return Err(CliError::new(70, format!("{}: no layer of the model", linear.module)));
        };
        layers.push(layer(args, ckpt, spec, linear)?);
    }
    let norms = outcome.norms.into_iter().map(|n| norm(ckpt, n)).collect::<Result<_, _>>()?;
    Ok(Calibrated { layers, norms, trained: (method == PtqMethod::Blockwise).then_some(trained) })
}

fn layer(args: &Args, ckpt: &Checkpoint, spec: &LinearSpec, linear: PtqLinear) -> Result<Layer, CliError> {
    let name = source_name(ckpt, &spec.module);
    let data = ckpt.linear(&spec.module)?.into_f32();
    let mut source = source_record(ckpt, &name, &data, &linear.values())?;
    let PtqLinear { module, matrix, fit, rescale } = linear;
    source.rescaled = rescale.map(|r| {
        let rows =
            if r.rows.iter().any(|v| *v != 1.0) { "rows divided by the scales of the layer after it" } else { "" };
        let columns = if r.columns.iter().any(|v| *v != 1.0) { "columns times AWQ scales" } else { "" };
        [columns, rows].into_iter().filter(|s| !s.is_empty()).collect::<Vec<_>>().join(", ")
    });
    let degenerate = QuantizedMatrix::degenerate_groups(&data, matrix.n, matrix.k, matrix.args)
        .map_err(|e| CliError::from(CheckpointError::quant(&args.model, &name, e)))?
        .len();
    let shape = spec.shape.clone();
    let tensor = ExportTensor::Linear { module, shape, matrix, activation: None, source: Some(source) };
    Ok(Layer { tensor, degenerate, fit })
}

/// A changed norm. Its record compares what is stored with the source as it is: the scales lie in the layers after it.
fn norm(ckpt: &Checkpoint, norm: PtqNorm) -> Result<ExportTensor, CliError> {
    let PtqNorm { name, values: data, dtype } = norm;
    let mut source = source_record(ckpt, &name, &ckpt.read_f32(&name)?, &data)?;
    source.rescaled = Some("divided by the AWQ scales of the layers after it; the differences are not undone".into());
    Ok(ExportTensor::Rescaled { name, shape: vec![data.len()], data, dtype, source })
}

/// What `--json` tells of a layer's fit.
pub(super) fn fit_columns(fit: &Fit) -> Map<String, Value> {
    let all = json!({
        "output_error": fit.error,
        "output_error_rtn": fit.rtn_error,
        "dead_columns": fit.dead_columns,
        "plain_rows": fit.plain_rows,
        "damping": fit.damping,
    });
    all.as_object().cloned().unwrap_or_default()
}

/// What a person is told: how much of rounding's output error is left, and whatever did not go as it should.
pub(super) fn notes(method: Method, fits: &[(String, Fit)]) -> Vec<String> {
    let mut out = Vec::new();
    let shares: Vec<f64> = fits.iter().filter(|(_, f)| f.rtn_error > 0.0).map(|(_, f)| f.error / f.rtn_error).collect();
    if !shares.is_empty() {
        let mean = shares.iter().sum::<f64>() / shares.len() as f64;
        out.push(format!("squared output error on the calibration text: {mean:.3} of rounding's (mean over layers)"));
    }
    let usual = ptq::dampings().next();
    for (module, fit) in fits {
        let module = printable(module);
        if fit.dead_columns > 0 {
            let n = fit.dead_columns;
            out.push(format!("note: {module}: {n} inputs were 0 in all calibration tokens; their weights are rounded"));
        }
        match fit.damping {
            _ if method == Method::Awq => {}
            None => out.push(format!(
                "warning: {module}: the Hessian could not be factored at any damping up to {}; rounded to nearest",
                ptq::dampings().last().unwrap_or_default()
            )),
            Some(d) if Some(d) != usual => out.push(format!(
                "note: {module}: the Hessian took a damping of {d} of its mean diagonal, not {}",
                usual.unwrap_or_default()
            )),
            Some(_) => {}
        }
    }
    out
}
