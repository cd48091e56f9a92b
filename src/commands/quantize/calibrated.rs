//! The methods of `dsq quantize` that look at text: what text, the run over the model, and what is told of it. The methods
//! themselves are dsq-train's `ptq`.

use super::{Args, Layer, Method, Weight, default_dtype, source_name, source_record, workers};
use crate::{Global, error::CliError, input, output, overlap::Sketch};
use dsq_checkpoint::{Checkpoint, CheckpointError, ExportTensor, LinearSpec, ModelConfig, SourceRecord, printable};
use dsq_quant::{QParams, QuantArgs, QuantConfig};
use dsq_runtime::{Specials, TextTokenizer};
use dsq_train::TrainError;
use dsq_train::ptq::{
    self, BlockFit, Blocks, Calibration, Fit, Journal, PtqMethod, PtqNorm, PtqProgress, PtqSettings, Scaling, Tuning,
};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::PathBuf;

/// Tokens that calibration takes unless told otherwise.
const DEFAULT_TOKENS: usize = 32_768;
/// Tokens of a window unless told otherwise, or the model's limit.
const DEFAULT_CONTEXT: usize = 512;
/// Steps, or passes, of training at most.
const MOST_STEPS: usize = 1_000_000;
/// Steps of learned rounding for each block unless --epochs says otherwise (AutoRound's own default).
const AUTOROUND_STEPS: usize = 200;

/// Options of the methods that need text.
#[derive(clap::Args, Debug)]
pub(super) struct CalibrationArgs {
    /// Text for every --method but rtn, and for --kv-cache and other options that measure something; UTF-8, of the kind that
    /// the model will see; for image models a folder of JPEG files, with every method. What is measured on it afterwards says little.
    #[arg(long, value_name = "FILE|DIR")]
    calib: Option<PathBuf>,
    /// Tokens to take from --calib, in windows that are spread over the whole text [default: 32768].
    #[arg(long, value_name = "N")]
    calib_tokens: Option<usize>,
    /// Tokens in a window [default: 512 or the model's limit, whichever is less].
    #[arg(long, value_name = "N")]
    calib_context: Option<usize>,
    /// Scale input columns by the magnitude of their inputs, as --method awq does, before gptq, gptaq, autoround or blockwise
    /// chooses codes.
    #[arg(long)]
    awq_scales: bool,
    /// Divide inputs of large magnitude, and multiply their weights, by SmoothQuant's scales with this alpha (0 to 1; 0.5 is
    /// usual), for schemes whose activations are quantized too.
    #[arg(long, value_name = "ALPHA")]
    smooth_quant: Option<f64>,
    /// Mixed precision: give each layer the one of --candidates with which the predictions on --calib change least, at this
    /// many bits per weight over all of them, scales included. Layers with --override or --ignore keep theirs.
    #[arg(long, value_name = "BITS")]
    pub(super) target_bits: Option<f64>,
    /// Schemes to choose from with --target-bits [default: W4A16,W8A16, which servers have kernels for].
    #[arg(long, value_name = "SCHEME[:N|channel|tensor],...", value_delimiter = ',')]
    pub(super) candidates: Vec<String>,
    /// Passes over the windows for each block, with --method blockwise [default: 2] or autoround [default: 200 steps or a
    /// few more].
    #[arg(long, value_name = "N")]
    epochs: Option<usize>,
    /// Steps of end-to-end training after the blocks, with --method blockwise or autoround; a step takes about 1,024 tokens, each other
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
    /// Go on with a run that was interrupted, from OUT.journal, at the block it was at; with the same model, text and options. The
    /// result has the same bytes. Runs that look at text keep such a journal.
    #[arg(long)]
    pub(super) resume: bool,
}

/// The calibration text of a model.
pub(super) struct Text {
    calibration: Calibration,
    /// That of the end-to-end steps, if there are such.
    further: Option<Calibration>,
    path: PathBuf,
    sketch: Sketch,
}

impl Text {
    /// The windows.
    pub(super) fn calibration(&self) -> &Calibration {
        &self.calibration
    }

    /// For `--json`.
    pub(super) fn about(&self, args: &Args) -> Value {
        json!({
            "method": name(args.method),
            "awq_scales": args.calibration.awq_scales || args.method == Method::Awq,
            "smooth_quant": args.calibration.smooth_quant,
            "text": self.path,
            "sha256": self.sketch.sha256,
            "tokens": self.calibration.tokens(),
            "context": self.calibration.context(),
            "end_tokens": self.further.as_ref().map(Calibration::tokens),
        })
    }

    /// What of it the result depends on.
    pub(super) fn fingerprint(&self) -> Value {
        json!({
            "text": self.sketch.sha256,
            "windows": self.calibration.sha256(),
            "end_windows": self.further.as_ref().map(Calibration::sha256),
        })
    }

    /// What is written beside the model, so that `dsq eval` can tell when it is measured on this text.
    pub(super) fn sketch(&self) -> Result<(String, Vec<u8>), CliError> {
        self.sketch.file()
    }
}

/// Whether the run measures the inputs of layers on text.
///
/// # Errors
/// Exit code 2 when it would, or something else would, and there is no text; for text that nothing looks at; and for options
/// that the schemes have no use for.
pub(super) fn looks_at_text(args: &Args, config: &QuantConfig) -> Result<bool, CliError> {
    let c = &args.calibration;
    let schemes = || config.overrides.iter().map(|(_, s)| s).chain([&config.scheme]);
    if let Some(alpha) = c.smooth_quant
        && schemes().all(|s| s.activations.is_none())
    {
        let problem = "it makes the grids of activations finer, and the scheme leaves these float";
        return Err(CliError::usage(format!(
            "--smooth-quant: {problem}; expected W8A8, W4A8 or FP8, got {} and alpha {alpha}",
            args.scheme()
        )));
    }
    let fixed = schemes().any(|s| s.activations.is_some_and(|a| !a.is_dynamic()));
    let rounding = [
        ("--smooth-quant", c.smooth_quant.is_some()),
        ("--observer weighted-mse", args.observer == super::ObserverName::WeightedMse),
        ("a scheme with static activations", fixed),
    ];
    let measured = rounding.into_iter().find(|(_, given)| *given).map(|(option, _)| option);
    let why = measured.or(c.target_bits.map(|_| "--target-bits")).or(args.kv_cache.map(|_| "--kv-cache"));
    match (args.method, why, &c.calib) {
        (Method::Rtn, Some(why), None) => {
            Err(CliError::usage(format!("--calib: {why} measures the model on text; expected a file, got none"))
                .with_hint("give --calib FILE, text of the kind that the model will see"))
        }
        (Method::Rtn, None, _) => {
            let given = [
                ("--calib", c.calib.is_some()),
                ("--calib-tokens", c.calib_tokens.is_some()),
                ("--calib-context", c.calib_context.is_some()),
                ("--resume", c.resume),
            ];
            match given.iter().find(|(_, given)| *given) {
                Some((option, _)) => Err(CliError::usage(format!(
                    "{option}: rounding to nearest looks at no text; expected --method gptq, gptaq, awq, blockwise or autoround, or \
                     --kv-cache, --target-bits, --smooth-quant or --observer weighted-mse, got rtn"
                ))),
                None => Ok(false),
            }
        }
        (Method::Rtn, ..) => Ok(measured.is_some()),
        _ => Ok(true),
    }
}

pub(super) fn name(method: Method) -> &'static str {
    match method {
        Method::Rtn => "rtn",
        Method::Gptq => "gptq",
        Method::Gptaq => "gptaq",
        Method::Awq => "awq",
        Method::Blockwise => "blockwise",
        Method::Autoround => "autoround",
    }
}

impl CalibrationArgs {
    /// Steps of end-to-end training.
    pub(super) fn steps(&self) -> usize {
        self.steps.unwrap_or(0)
    }

    /// Passes over the windows, where they were told.
    pub(super) fn epochs(&self) -> Option<f64> {
        self.epochs.map(|e| e as f64)
    }

    /// Whether AWQ's scales are searched before codes are chosen.
    pub(super) fn awq_scales(&self) -> bool {
        self.awq_scales
    }

    /// Whether columns are scaled before codes are chosen.
    pub(super) fn scales(&self) -> bool {
        self.awq_scales || self.smooth_quant.is_some()
    }

    /// The options that the result depends on, by their names.
    pub(super) fn options(&self) -> Value {
        json!({
            "--calib-tokens": self.calib_tokens,
            "--calib-context": self.calib_context,
            "--awq-scales": self.awq_scales,
            "--smooth-quant": self.smooth_quant,
            "--target-bits": self.target_bits,
            "--candidates": self.candidates,
            "--epochs": self.epochs,
            "--steps": self.steps,
            "--end-weight-rate": self.end_weight_rate,
            "--end-scale-rate": self.end_scale_rate,
        })
    }

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
            ("--smooth-quant", self.smooth_quant.is_some()),
            ("--target-bits", self.target_bits.is_some()),
            ("--candidates", !self.candidates.is_empty()),
            ("--epochs", self.epochs.is_some()),
            ("--steps", self.steps.is_some()),
            ("--end-weight-rate", self.end_weight_rate.is_some()),
            ("--end-scale-rate", self.end_scale_rate.is_some()),
            ("--resume", self.resume),
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
    /// Exit code 2 for a method without text, and for settings that cannot be.
    pub(super) fn check(&self, method: Method) -> Result<(), CliError> {
        let method_name = name(method);
        let trains = matches!(method, Method::Blockwise | Method::Autoround);
        let training = [
            ("--epochs", self.epochs.is_some()),
            ("--steps", self.steps.is_some()),
            ("--end-weight-rate", self.end_weight_rate.is_some()),
            ("--end-scale-rate", self.end_scale_rate.is_some()),
        ];
        if let Some((option, _)) = training.iter().find(|(_, given)| *given && !trains) {
            let problem =
                format!("only training takes it; expected --method blockwise or autoround, got {method_name}");
            return Err(CliError::usage(format!("{option}: {problem}")));
        }
        for (option, given, least) in [("--steps", self.steps, 0), ("--epochs", self.epochs, 1)] {
            if let Some(n) = given.filter(|n| !(least..=MOST_STEPS).contains(n)) {
                return Err(CliError::usage(format!("{option}: expected {least} to {MOST_STEPS}, got {n}")));
            }
        }
        for (option, rate) in [("--end-weight-rate", self.end_weight_rate), ("--end-scale-rate", self.end_scale_rate)] {
            if let Some(rate) = rate.filter(|r| !(0.0..=0.1).contains(r)) {
                return Err(CliError::usage(format!("{option}: expected a learning rate from 0 to 0.1, got {rate}")));
            }
        }
        if self.awq_scales && matches!(method, Method::Rtn | Method::Awq) {
            let problem = format!("expected --method gptq, gptaq, blockwise or autoround, got {method_name}");
            return Err(CliError::usage(format!("--awq-scales: {problem}")));
        }
        if let Some(alpha) = self.smooth_quant {
            if !(0.0..=1.0).contains(&alpha) {
                return Err(CliError::usage(format!("--smooth-quant: expected an alpha from 0 to 1, got {alpha}")));
            }
            if self.awq_scales || method == Method::Awq {
                let problem = "both scale the same columns; expected --smooth-quant or AWQ's scales, got both";
                return Err(CliError::usage(format!("--smooth-quant: {problem}")));
            }
        }
        if let (Some(first), None) = (self.candidates.first(), self.target_bits) {
            let problem = format!("nothing chooses among them; expected --target-bits BITS too, got only {first:?}");
            return Err(CliError::usage(format!("--candidates: {problem}")));
        }
        if let Some(bits) = self.target_bits.filter(|b| !(1.0..=16.0).contains(b)) {
            return Err(CliError::usage(format!("--target-bits: expected 1 to 16 bits per weight, got {bits}")));
        }
        match (method, &self.calib) {
            (Method::Rtn, _) => Ok(()),
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
        let text = input::utf8(path, bytes)?;
        let sketch = Sketch::new(&text);
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
        Ok(Text { calibration, further, path: path.clone(), sketch })
    }
}

/// What a method made of a model.
pub(super) struct Calibrated<'a> {
    args: &'a Args,
    ckpt: &'a Checkpoint,
    /// The layers that the scheme names, in the journal.
    pub(super) blocks: Blocks,
    /// What they are, in the order of these.
    pub(super) specs: Vec<LinearSpec>,
    /// Stored grids of their inputs, by module.
    pub(super) inputs: HashMap<String, (QuantArgs, QParams)>,
    /// Norms that had to change with them.
    pub(super) norms: Vec<ExportTensor>,
    /// What block-wise training did.
    pub(super) trained: Option<Trained>,
    /// Layers of experts that no token of the text was sent to.
    pub(super) never_hit: Vec<String>,
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
            .map(|b| json!({"layer": b.layer, "error_start": b.before, "error": b.after, "kept": b.kept}))
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
                "squared error of the blocks' outputs: {mean:.3} of that of the codes before training (mean over blocks)"
            ));
        }
        for b in self.blocks.iter().filter(|b| !b.kept) {
            let (layer, after, before) = (b.layer, b.after, b.before);
            out.push(format!(
                "note: block {layer} keeps the codes it started from: training gave {after:.5}, they {before:.5}"
            ));
        }
        if let Some([first, last]) = self.end_to_end {
            out.push(format!(
                "end to end, on the calibration text: divergence from the float model {first:.4} to {last:.4}"
            ));
        }
        out
    }
}

/// Quantizes the layers that the scheme names, and what had to change with them; the layers are in the `journal` then.
pub(super) fn quantize<'a>(
    args: &'a Args,
    global: &Global,
    ckpt: &'a Checkpoint,
    config: &QuantConfig,
    specs: &[LinearSpec],
    text: &Text,
    journal: &Journal,
) -> Result<Calibrated<'a>, CliError> {
    let method = match args.method {
        Method::Rtn | Method::Awq => PtqMethod::Rtn,
        Method::Gptq => PtqMethod::Gptq,
        Method::Gptaq => PtqMethod::Gptaq,
        Method::Blockwise => PtqMethod::Blockwise,
        Method::Autoround => PtqMethod::AutoRound,
    };
    let c = &args.calibration;
    let scaling = match c.smooth_quant {
        Some(alpha) => Scaling::Smooth(alpha),
        None if c.awq_scales || args.method == Method::Awq => Scaling::Awq,
        None => Scaling::None,
    };
    let weighted = args.observer == super::ObserverName::WeightedMse;
    let usual = Tuning::default();
    let epochs = match method {
        PtqMethod::AutoRound => AUTOROUND_STEPS.div_ceil(text.calibration.batch_count().max(1)),
        _ => usual.epochs,
    };
    let tuning = Tuning {
        epochs: c.epochs.unwrap_or(epochs),
        steps: c.steps.unwrap_or(usual.steps),
        end_weight_rate: c.end_weight_rate.unwrap_or(usual.end_weight_rate),
        end_scale_rate: c.end_scale_rate.unwrap_or(usual.end_scale_rate),
        ..usual
    };
    let float_dtype = args.dtype.or(default_dtype(ckpt));
    let layers = match ckpt.config() {
        ModelConfig::Llama(c) => c.num_hidden_layers,
        ModelConfig::ResNet(_) | ModelConfig::Image(_) => 0,
    };
    let bar = output::progress(1, "quantize {bar:30} {percent}% {msg} {eta}");
    let mut on_progress = |p: &PtqProgress| {
        bar.set_length(p.total as u64);
        bar.set_message(format!("layer {} of {layers}", (p.layer + 1).min(layers)));
        bar.set_position(p.done as u64);
    };
    let end_text = text.further.as_ref();
    let settings = PtqSettings {
        config,
        method,
        scaling,
        weighted,
        float_dtype,
        inputs: &[],
        tuning,
        end_text,
        journal: Some(journal),
    };
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
    let scales = if matches!(scaling, Scaling::Smooth(_)) { "SmoothQuant" } else { "AWQ" };
    let named = specs.iter().map(|s| s.module.as_str()).filter(|m| config.scheme_for(m).is_some());
    let blocks = journal.all_blocks(named)?;
    let by_module: HashMap<&str, &LinearSpec> = specs.iter().map(|s| (s.module.as_str(), s)).collect();
    let of = |module: &str| {
        let spec = by_module.get(module).map(|&s| s.clone());
        spec.ok_or_else(|| CliError::new(70, format!("{module}: no layer of the model")))
    };
    let specs = blocks.modules().map(of).collect::<Result<_, _>>()?;
    let stored = outcome.inputs.into_iter().filter_map(|(module, grid)| Some((module, (grid.args, grid.params?))));
    let inputs = stored.collect();
    let norms = outcome.norms.into_iter().map(|n| norm(ckpt, n, scales)).collect::<Result<_, _>>()?;
    let trains = matches!(method, PtqMethod::Blockwise | PtqMethod::AutoRound);
    let (trained, never_hit) = (trains.then_some(trained), outcome.never_hit);
    Ok(Calibrated { args, ckpt, blocks, specs, inputs, norms, trained, never_hit })
}

impl Calibrated<'_> {
    /// Layer `i`, from the journal.
    ///
    /// # Errors
    /// Exit code 3 for a file of the journal that is not what was written.
    pub(super) fn layer(&self, i: usize) -> Result<Layer, CliError> {
        let (spec, linear) = (&self.specs[i], self.blocks.read(i)?);
        let weight = Weight::read(self.ckpt, &spec.module, Vec::new())?;
        let (sha256, dtype) = weight.stored.clone();
        let source = SourceRecord::with_values(sha256, dtype, &weight.data, &linear.values());
        let rescaled = linear.rescale.map(|r| {
            let rows =
                if r.rows.iter().any(|v| *v != 1.0) { "rows divided by the scales of the layer after it" } else { "" };
            let columns =
                if r.columns.iter().any(|v| *v != 1.0) { "columns times the scales of their inputs" } else { "" };
            [columns, rows].into_iter().filter(|s| !s.is_empty()).collect::<Vec<_>>().join(", ")
        });
        let activation = self.inputs.get(&spec.module).copied();
        Layer::new(self.args, spec, &weight, linear.matrix, SourceRecord { rescaled, ..source }, activation)
    }
}

/// A changed norm, bias or router. Its record compares what is stored with the source as it is: the scales lie in the layers after it.
fn norm(ckpt: &Checkpoint, norm: PtqNorm, scales: &str) -> Result<ExportTensor, CliError> {
    let PtqNorm { name, values: data, dtype } = norm;
    let mut source = source_record(ckpt, &name, &ckpt.read_f32(&name)?, &data)?;
    let shape = ckpt.info(&name).map(|i| i.shape).unwrap_or_default();
    let what = match shape.len() {
        2 => format!("columns times the {scales} scales of their inputs"),
        _ => format!("divided by the {scales} scales of the layers after it"),
    };
    source.rescaled = Some(format!("{what}; the differences are not undone"));
    Ok(ExportTensor::Rescaled { name, shape, data, dtype, source })
}

/// For a person: layers that no token reached.
pub(super) fn never_hit_note(modules: &[String]) -> Option<String> {
    let listed = modules.iter().map(|m| printable(m)).collect::<Vec<_>>().join(", ");
    let n = modules.len();
    (n > 0).then(|| {
        format!("warning: no calibration token was sent to the experts of {n} layers, which are rounded: {listed}")
    })
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
            _ if !matches!(method, Method::Gptq | Method::Gptaq | Method::Blockwise) => {}
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
