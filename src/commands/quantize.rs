//! `dsq quantize`: post-training quantization into a compressed-tensors folder: rounded to the nearest grid point here, by
//! GPTQ or AWQ in `calibrated.rs`, image models in `images.rs`. The grid is dsq-quant's, the methods are dsq-train's, the folder and its proof are
//! dsq-checkpoint's.

mod calibrated;
mod floats;
mod images;
mod images_plan;
mod journal;
mod kv_cache;
mod mixed;
mod plan;
mod stream;

use calibrated::Calibrated;
use floats::Floats;
use plan::Run;
use stream::{Layers, Output};

use crate::{Global, error::CliError, output, proof_logits, size::Size};
use dsq_checkpoint::{
    Checkpoint, CheckpointError, Dtype, ExportTensor, FolderTarget, FolderWriter, Judge, LinearSpec, ModelConfig,
    Outline, Proof, SourceRecord, Workers, check_groups, check_output, printable,
};
use dsq_quant::{
    FloatType, Granularity, Mapping, Pattern, QParams, QuantArgs, QuantConfig, QuantScheme, QuantizedMatrix,
    WeightObserver,
};
use dsq_train::ptq::{Fit, Journal};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Options of `dsq quantize`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A Hugging Face folder with float weights (or, with --requantize, with codes), a GGUF file, or an image model as a PyTorch
    /// file.
    model: PathBuf,
    /// The folder to write.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Preset: W4A16, W8A16, W3A16, W2A16, W8A8, W4A8, W4A4 (integers), FP8, FP8_DYNAMIC, FP8_BLOCK, NVFP4, MXFP4, FP8A16,
    /// FP8A16_BLOCK, NVFP4A16 or MXFP4A16 (float codes). A16: activations stay float. A8: they become INT8; of a language model
    /// each token on a scale of its own, found when the model runs (but see --static-activations), of an image model on a
    /// scale from --calib. FP8: activations have one stored scale, from --calib; FP8_DYNAMIC: one for each token, FP8_BLOCK
    /// and MXFP4: one for each run of a token, NVFP4 too, under a global one from --calib. W4A4: INT4 activations on one stored scale.
    /// [default: W4A16]
    #[arg(long)]
    scheme: Option<String>,
    /// Which weights share a scale [default: group; channel for FP8A16 and W8A8; what the name says for the other float codes].
    #[arg(long, value_enum)]
    granularity: Option<GranularityName>,
    /// Weights that share a scale, with --granularity group; must divide in_features of every quantized layer
    /// [default: 64].
    #[arg(long, value_name = "N")]
    group_size: Option<usize>,
    /// How codes are chosen.
    #[arg(long, value_enum, default_value = "rtn")]
    method: Method,
    #[command(flatten)]
    calibration: calibrated::CalibrationArgs,
    /// Codes in which the KV cache holds keys and values, on scales found in --calib, one for the keys and one for the values of a
    /// layer (language models) [default: none, they stay in float].
    #[arg(long, value_enum, value_name = "int8|fp8")]
    kv_cache: Option<kv_cache::KvCacheName>,
    #[command(flatten)]
    images: images::ImageArgs,
    /// Store a zero point for each scale.
    #[arg(long)]
    asymmetric: bool,
    /// Put the INT8 activations of a language model on one stored scale, from the range that --calib meets, instead of one for
    /// each token.
    #[arg(long)]
    static_activations: bool,
    /// Give INT8 activations of a language model a zero point.
    #[arg(long)]
    asymmetric_activations: bool,
    /// How a layer's values give the range of its grid.
    #[arg(long, value_enum, default_value = "minmax")]
    observer: ObserverName,
    /// Dtype of the stored scales (default: that of the model's weights; f16 for a GGUF file, whose own scales are f16; NVFP4
    /// and MXFP4 have their own).
    #[arg(long, value_name = "f16|bf16|f32")]
    scale_dtype: Option<FloatType>,
    /// Dtype of the tensors that stay in float (default: as stored; f16 for a GGUF file).
    #[arg(long, value_name = "f16|bf16|f32")]
    dtype: Option<FloatType>,
    /// Leave these layers in float: a name, the last part of one, or re: and a regular expression. `lm_head` is, unless
    /// it is overridden.
    #[arg(long, value_name = "PATTERN")]
    ignore: Vec<String>,
    /// Another scheme for some layers, and if given another group size, `channel` or `tensor`. `lm_head=W8A16` stores the
    /// head of a tied model as a matrix of its own, beside the float embedding.
    #[arg(long = "override", value_name = "PATTERN=SCHEME[:N|channel|tensor]")]
    overrides: Vec<String>,
    /// Split the weights into files of at most this many bytes, `5GB` say, with an index as transformers writes it
    /// [default: one file].
    #[arg(long, value_name = "SIZE")]
    max_shard_size: Option<Size>,
    /// Take a model that is codes already (compressed-tensors, FP8 of DeepSeek, GPTQ, AWQ, GGUF): the values of its codes are quantized
    /// anew. The proof says of each layer what became of them.
    #[arg(long)]
    requantize: bool,
    /// Replace the output folder if it holds a model.
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    logits: proof_logits::LogitsArgs,
    /// Say how much memory, disk and time the run will need, and do nothing; exit code 5 where there is less memory, 4 where there
    /// is less disk.
    #[arg(long)]
    plan: bool,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug)]
enum GranularityName {
    Group,
    Channel,
    Tensor,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum ObserverName {
    /// Smallest and largest value.
    Minmax,
    /// The share of that range with the least squared error.
    Mse,
    /// The same, where the error of a column counts by the mean square of its inputs in --calib.
    WeightedMse,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    /// Round to nearest.
    Rtn,
    /// Choose codes column by column against the error that they leave in the outputs of --calib.
    Gptq,
    /// The same, for weights that first take up what the layers before them got wrong: against the float model's own inputs.
    Gptaq,
    /// Scale input columns by their magnitude in --calib, then round to nearest.
    Awq,
    /// Train weights, scales and zero points on the grid against the float model, from gptaq's codes on: block by block,
    /// then (--steps) all together.
    Blockwise,
    /// Learn for each weight whether it is rounded up or down, and the scales, from the signs of gradients: block by block
    /// against the float model, from rounding on.
    Autoround,
}

/// Weights that share a scale unless something else is said.
const DEFAULT_GROUP: usize = 64;

/// A layer after quantization, with the number of groups that carry nothing.
struct Layer {
    tensor: ExportTensor,
    degenerate: usize,
}

impl Layer {
    /// `weight` became `matrix`, on inputs with the grid `activation`; `source` tells how far its values are.
    fn new(
        args: &Args,
        spec: &LinearSpec,
        weight: &Weight,
        matrix: QuantizedMatrix,
        source: SourceRecord,
        activation: Option<(QuantArgs, QParams)>,
    ) -> Result<Self, CliError> {
        let degenerate = QuantizedMatrix::degenerate_groups(&weight.data, matrix.n, matrix.k, matrix.args)
            .map_err(|e| CliError::from(CheckpointError::quant(&args.model, &weight.name, e)))?
            .len();
        let (module, shape, source) = (spec.module.clone(), spec.shape.clone(), Some(source));
        Ok(Self { tensor: ExportTensor::Linear { module, shape, matrix, activation, source, order: None }, degenerate })
    }
}

impl Args {
    /// The preset of all layers that get no other.
    fn scheme(&self) -> &str {
        self.scheme.as_deref().unwrap_or("W4A16")
    }
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    // All that can be known without reading a weight comes first; of an image model also rounding takes --calib.
    if args.method != Method::Rtn {
        args.calibration.check(args.method)?;
    }
    check_output(&[&args.model], &args.out)?;
    // What a run left that was killed after it had given its output the name is written again.
    let again = args.calibration.resume && Journal::is_writing(&journal::path(&args.out));
    FolderWriter::check(&args.out, args.overwrite || again)?;
    let ckpt = Checkpoint::open(&args.model)?;
    if let ModelConfig::Image(model) = ckpt.config() {
        args.calibration.check_images()?;
        kv_cache::check_images(args.kv_cache)?;
        return images::run(&args, global, &ckpt, model);
    }
    args.calibration.check(args.method)?;
    if let Some(option) = args.images.given() {
        return Err(CliError::usage(format!("{option}: only for image models; expected no such option, got it")));
    }
    let mut model = ckpt.config().clone();
    let candidates = mixed::candidates(&args, &ckpt)?;
    let config = quant_config(&args, &ckpt, &mut model, &candidates)?;
    check_groups(&args.model, &model, &config)?;
    if let Some(target) = args.calibration.target_bits {
        mixed::check(&args, &model, &config, &candidates, target)?;
    }
    let looks = calibrated::looks_at_text(&args, &config)?;
    let text = match args.calibration.calib() {
        None => None,
        Some(_) => Some(args.calibration.read(&ckpt)?),
    };
    let specs: Vec<LinearSpec> =
        model.linears().into_iter().filter(|l| config.scheme_for(&l.module).is_some()).collect();
    let run = Run {
        args: &args,
        global,
        ckpt: &ckpt,
        model: &model,
        config: &config,
        candidates: &candidates,
        specs: &specs,
        text: text.as_ref(),
        looks,
    };
    if args.plan {
        return run.plan()?.tell(global, &args.out);
    }
    run.check_room()?;
    let journal = text.as_ref().map(|text| journal::open(&run, text)).transpose()?;
    let made = make(&run, journal.as_ref(), again);
    match (&made, journal) {
        // Another try would end the same way: there is nothing to go on with.
        (Err(e), Some(journal)) if e.code() == 6 => journal.remove()?,
        (Ok(_), Some(journal)) => journal.remove()?,
        _ => {}
    }
    let made = made?;
    report(&args, global, &made);
    Ok(0)
}

/// What a run made.
struct Made {
    proof: Proof,
    degenerate: Vec<(String, usize)>,
    fits: Vec<(String, Fit)>,
    notes: Vec<String>,
    /// For `--json`, by key.
    about: [(&'static str, Option<Value>); 2],
}

/// Chooses schemes where there are candidates, quantizes on the text where the run looks at one, else by rounding, finds the scales of
/// the cache, and writes the folder. `again`: an output that a run with this journal had written may be replaced.
fn make(run: &Run, journal: Option<&Journal>, again: bool) -> Result<Made, CliError> {
    let Run { args, global, ckpt, specs, text, looks, .. } = *run;
    let mut config = run.config.clone();
    let mut aux = ckpt.aux_files()?;
    let mut notes = Vec::new();
    let mut about = text.map(|t| t.about(args));
    let mut mixed = None;
    if let (Some(target), Some(text)) = (args.calibration.target_bits, text) {
        mixed = Some(mixed::choose(run, &mut config, text.calibration(), journal, target)?);
    }
    aux.extend(text.map(|text| text.sketch()).transpose()?);
    if let Some(mixed) = &mixed {
        aux.push((mixed::FILE.to_owned(), format!("{:#}\n", mixed.about()).into_bytes()));
    }
    let judge = |exported: &Checkpoint| args.logits.compare(ckpt, exported, global.threads());
    let target = FolderTarget {
        overwrite: args.overwrite,
        again,
        max_shard: args.max_shard_size.map(|s| s.0),
        workers: Workers::new(global.threads()),
        judge: Some(Judge(&judge)),
        ..FolderTarget::new(&args.out, run.model, Some(&config))
    };
    let layers = match (text, journal) {
        (Some(text), Some(journal)) if looks => {
            let found = calibrated::quantize(args, global, ckpt, &config, specs, text, journal)?;
            if let (false, Some(about)) = (found.never_hit.is_empty(), about.as_mut()) {
                about["experts_never_hit"] = json!(found.never_hit);
            }
            notes.extend(calibrated::never_hit_note(&found.never_hit));
            if let (Some(trained), Some(about)) = (&found.trained, about.as_mut().and_then(Value::as_object_mut)) {
                about.extend(trained.about().as_object().cloned().unwrap_or_default());
                notes.extend(trained.notes());
            }
            Layers::Chosen(Box::new(found))
        }
        _ => Layers::Rounded(stream::Rounding::new(args, global, ckpt, &config, specs)?, specs),
    };
    let output = Output::new(args, global, ckpt, layers);
    let mut cache = Vec::new();
    if let Some(text) = text {
        cache = kv_cache::grids(&output, run.model, &config, text, journal)?;
        notes.extend(kv_cache::note(&cache));
        kv_cache::tell(&cache, about.as_mut());
    }
    if let Some(journal) = journal {
        journal.writing()?;
    }
    let (proof, degenerate) = output.write(&target, cache, aux)?;
    let fits = output.fits();
    notes.extend(mixed.as_ref().map(mixed::Mixed::notes).unwrap_or_default());
    notes.extend(floats::lost_note(ckpt));
    let about = [("calibration", about), ("mixed_precision", mixed.map(|m| m.about()))];
    Ok(Made { proof, degenerate, fits, notes, about })
}

/// The schemes and what they leave alone, checked against the model; unties `model`'s head if it gets a scheme.
/// `candidates`: those of mixed precision, the first of which stands for the scheme until one is chosen for each layer.
fn quant_config(
    args: &Args,
    ckpt: &Checkpoint,
    model: &mut ModelConfig,
    candidates: &[(String, QuantScheme)],
) -> Result<QuantConfig, CliError> {
    let at = printable(&args.model.to_string_lossy());
    match (ckpt.quantization().is_some(), args.requantize) {
        (true, false) => {
            let problem = "the model is quantized already; expected float weights, got codes";
            return Err(CliError::usage(format!("{at}: quantization_config: {problem}"))
                .with_hint("give the float model, or --requantize to quantize the values of the codes anew"));
        }
        (false, true) if !ckpt.is_gguf() => {
            let problem = "expected no such option but for a model that is codes already, got float weights";
            return Err(CliError::usage(format!("--requantize: {problem}")));
        }
        _ => {}
    }
    if !matches!(ckpt.config(), ModelConfig::Llama(_)) {
        return Err(CliError::usage(format!(
            "{at}: model_type: this architecture has static activation scales, which need training data; expected llama"
        ))
        .with_hint("use a recipe: dsq train"));
    }
    let asked = asked_granularity(args)?;
    let scale_dtype = args.scale_dtype.or(default_dtype(ckpt)).unwrap_or_else(|| ckpt.main_dtype());
    let fixed = QuantScheme::fixed_grid(args.scheme());
    let common = asked.or(fixed.usual).unwrap_or(Granularity::PerGroup(DEFAULT_GROUP));
    let dtype = args.scale_dtype.or(fixed.scale_dtype).unwrap_or(scale_dtype);
    let scheme = match candidates.first() {
        Some((_, first)) => *first,
        None => weight_scheme(args, "--scheme", args.scheme(), common, dtype)?,
    };
    // What layers with another scheme get unless they say more.
    let others = granularity(args)?;
    let mut names: Vec<String> = model.linears().into_iter().map(|l| l.module).collect();
    let mut ignore = model.default_ignore();
    names.extend(ignore.iter().filter(|&n| !names.contains(n)).cloned().collect::<Vec<_>>());
    ignore.extend(args.ignore.iter().cloned());
    let mut config = QuantConfig::new(scheme, &ignore).map_err(|e| CliError::usage(format!("--ignore: {e}")))?;
    for text in &args.overrides {
        config.overrides.push(read_override(args, text, others, scale_dtype)?);
    }
    if let (Some(_), ModelConfig::Llama(c)) = (args.kv_cache, &*model)
        && c.latent.is_some()
    {
        let problem = "servers hold the latent of latent attention, dsq the keys and values made of it, so that scales would mean \
                       different things; expected no such option, got one";
        return Err(CliError::usage(format!("--kv-cache: {}: {problem}", c.model_type)));
    }
    config.kv_cache = args.kv_cache.map(kv_cache::KvCacheName::scheme).transpose()?;
    if let ModelConfig::Llama(c) = model {
        c.tie_word_embeddings &= config.scheme_for("lm_head").is_none();
    }
    let unmatched = config.unmatched(&names);
    if !unmatched.is_empty() {
        return Err(CliError::usage(format!(
            "--ignore, --override: expected patterns that match a linear layer, got {}, which match none",
            unmatched.join(", ")
        ))
        .with_hint(format!("layer names look like {}", names[0])));
    }
    if !model.linears().iter().any(|l| config.scheme_for(&l.module).is_some()) {
        return Err(CliError::usage("--ignore: expected at least one layer to quantize, got none"));
    }
    Ok(config)
}

/// Which weights share a scale, if something is said of it.
fn asked_granularity(args: &Args) -> Result<Option<Granularity>, CliError> {
    Ok(match (args.granularity, args.group_size) {
        (_, Some(0)) => return Err(CliError::usage("--group-size: expected at least 1, got 0")),
        (Some(GranularityName::Group), n) => Some(Granularity::PerGroup(n.unwrap_or(DEFAULT_GROUP))),
        (None, n) => n.map(Granularity::PerGroup),
        (Some(GranularityName::Channel), _) => Some(Granularity::PerChannel),
        (Some(GranularityName::Tensor), _) => Some(Granularity::PerTensor),
    })
}

/// [`asked_granularity`], or the usual one.
fn granularity(args: &Args) -> Result<Granularity, CliError> {
    Ok(asked_granularity(args)?.unwrap_or(Granularity::PerGroup(DEFAULT_GROUP)))
}

/// The dtype that scales and float tensors get when none is asked for; `None`: as the source stores them.
fn default_dtype(ckpt: &Checkpoint) -> Option<FloatType> {
    ckpt.is_gguf().then_some(FloatType::F16)
}

/// A preset, as a language model has it.
fn weight_scheme(
    args: &Args,
    option: &str,
    name: &str,
    granularity: Granularity,
    scale_dtype: FloatType,
) -> Result<QuantScheme, CliError> {
    let mut scheme =
        QuantScheme::preset(name, granularity, scale_dtype).map_err(|e| CliError::usage(format!("{option}: {e}")))?;
    scheme = if args.static_activations { scheme.for_tensor() } else { scheme.for_tokens() };
    if args.static_activations && scheme.activations.is_none_or(|a| a.is_dynamic()) {
        let problem = format!("expected a scheme with INT8 activations (W8A8 or W4A8) or FP8, got {name}");
        return Err(CliError::usage(format!("--static-activations: {problem}")));
    }
    if args.asymmetric_activations {
        scheme = scheme
            .with_asymmetric_activations()
            .map_err(|e| CliError::usage(format!("--asymmetric-activations: {name}: {e}")))?;
    }
    if scheme.weights.has_global_scale() && args.observer == ObserverName::WeightedMse {
        let problem = "the ranges of its groups are not searched with weights";
        return Err(CliError::usage(format!(
            "--observer: {problem}; expected minmax or mse for {name}, got weighted-mse"
        )));
    }
    if args.asymmetric {
        scheme.weights.mapping = Mapping::Asymmetric;
        scheme.weights.check().map_err(|e| CliError::usage(format!("--asymmetric: {e}")))?;
    }
    scheme.weights.observer = match args.observer {
        ObserverName::Minmax => WeightObserver::MinMax,
        ObserverName::Mse | ObserverName::WeightedMse => WeightObserver::Mse,
    };
    Ok(scheme)
}

/// `PATTERN=SCHEME[:N|channel|tensor]`.
fn read_override(
    args: &Args,
    text: &str,
    granularity: Granularity,
    scale_dtype: FloatType,
) -> Result<(Pattern, QuantScheme), CliError> {
    let wrong = || {
        let got = printable(text);
        CliError::usage(format!("--override: expected PATTERN=SCHEME[:N|channel|tensor], got {got:?}"))
    };
    // From the right: a pattern may hold `=` and `:`.
    let (pattern, scheme) = text.rsplit_once('=').filter(|(p, _)| !p.is_empty()).ok_or_else(wrong)?;
    let pattern = Pattern::new(pattern).map_err(|e| CliError::usage(format!("--override: {e}")))?;
    Ok((pattern, read_scheme(args, "--override", scheme, granularity, scale_dtype)?.ok_or_else(wrong)?))
}

/// `SCHEME[:N|channel|tensor]`; `None` when what follows the colon is none of these.
fn read_scheme(
    args: &Args,
    option: &str,
    scheme: &str,
    granularity: Granularity,
    scale_dtype: FloatType,
) -> Result<Option<QuantScheme>, CliError> {
    let fixed = QuantScheme::fixed_grid(scheme);
    let scale_dtype = fixed.scale_dtype.unwrap_or(scale_dtype);
    let (name, granularity) = match scheme.split_once(':') {
        None => (scheme, fixed.usual.unwrap_or(granularity)),
        Some((name, "channel")) => (name, Granularity::PerChannel),
        Some((name, "tensor")) => (name, Granularity::PerTensor),
        Some((name, n)) => match n.parse().ok().filter(|&n: &usize| n > 0) {
            Some(n) => (name, Granularity::PerGroup(n)),
            None => return Ok(None),
        },
    };
    weight_scheme(args, option, name, granularity, scale_dtype).map(Some)
}

fn workers(global: &Global) -> Result<rayon::ThreadPool, CliError> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(global.threads()).build();
    pool.map_err(|e| CliError::new(5, format!("cannot start worker threads: {e}")))
}

/// The tensor that a layer's weight comes from: that of a tied head is the embedding.
fn source_name(ckpt: &Checkpoint, module: &str) -> String {
    match module {
        "lm_head" if ckpt.info("lm_head.weight").is_none() => "model.embed_tokens.weight".to_string(),
        module => format!("{module}.weight"),
    }
}

/// What is known of the tensor `name`, whose values `w` became `values`.
fn source_record(ckpt: &Checkpoint, name: &str, w: &[f32], values: &[f32]) -> Result<SourceRecord, CliError> {
    Ok(SourceRecord::with_values(ckpt.sha256(name)?, stored_type(ckpt, name), w, values))
}

/// What a tensor's values are stored as.
fn stored_type(ckpt: &Checkpoint, name: &str) -> String {
    ckpt.info(name).map(|i| i.dtype).unwrap_or_default()
}

/// The weight of a layer in the source.
struct Weight {
    /// The tensor that it comes from.
    name: String,
    /// Values, of codes those that they stand for.
    data: Vec<f32>,
    /// Hash and dtype of the tensor, or of the values of codes.
    stored: (String, String),
}

impl Weight {
    /// `data`: memory for the values, which may have been another's.
    fn read(ckpt: &Checkpoint, module: &str, mut data: Vec<f32>) -> Result<Self, CheckpointError> {
        let name = source_name(ckpt, module);
        if ckpt.is_quantized(module) {
            let data = ckpt.linear(module)?.into_f32();
            let stored = SourceRecord::stored_codes(&data);
            return Ok(Self { name, data, stored });
        }
        let sha256 = ckpt.read_f32_hashed(&name, &mut data)?;
        let stored = (sha256, stored_type(ckpt, &name));
        Ok(Self { name, data, stored })
    }
}

/// One tensor of a source as it goes into a float folder.
pub(super) fn float_tensor(
    ckpt: &Checkpoint,
    name: String,
    dtype: Option<FloatType>,
) -> Result<ExportTensor, CliError> {
    let shape = ckpt.info(&name).map(|i| i.shape).unwrap_or_default();
    match float_dtype(ckpt, &name, dtype) {
        (dtype, true) => {
            let (_, bytes) = ckpt.read_stored(&name)?;
            Ok(ExportTensor::Copy { name, dtype, shape, bytes })
        }
        (dtype, false) => {
            let data = ckpt.read_f32(&name)?;
            Ok(ExportTensor::Float { name, shape, data, dtype: dtype.float().unwrap_or_default() })
        }
    }
}

/// What [`float_tensor`] will be.
pub(super) fn float_outline(ckpt: &Checkpoint, name: String, dtype: Option<FloatType>) -> Outline {
    let shape = ckpt.info(&name).map(|i| i.shape).unwrap_or_default();
    let (dtype, _) = float_dtype(ckpt, &name, dtype);
    Outline::Plain { name, shape, dtype }
}

/// The dtype that a tensor gets, and whether its bytes are copied.
fn float_dtype(ckpt: &Checkpoint, name: &str, dtype: Option<FloatType>) -> (Dtype, bool) {
    match (ckpt.dtype(name), dtype) {
        // What decides between experts stays as it is: a rounded bias chooses others (transformers keeps these in f32 too).
        (Some(s), _) if ckpt.config().decides_experts(name) => (s, true),
        (Some(s), None) => (s, true),
        (Some(s), Some(d)) if s == Dtype::from(d) || s.float().is_none() => (s, true),
        _ => (dtype.unwrap_or_default().into(), false),
    }
}

fn report(args: &Args, global: &Global, made: &Made) {
    let Made { proof, degenerate, fits, notes, about } = made;
    // Rescaled norms have a source too.
    let became = ["quantized", "requantized", "transcoded"];
    let quantized = proof.tensors.iter().filter(|t| became.contains(&t.became));
    let layers: Vec<_> = quantized.filter_map(|t| t.source.as_ref().map(|s| (t, s))).collect();
    let size: u64 = proof.bytes.values().sum();
    if global.json {
        let rows: Vec<_> = layers
            .iter()
            .map(|(t, s)| {
                let mut row = json!({
                    "name": t.name,
                    "bits_per_weight": t.bits_per_weight,
                    "relative_error": s.relative_error,
                    "max_abs_error": s.max_abs_error,
                });
                let fit = fits.iter().find(|(m, _)| t.name.strip_suffix(".weight") == Some(m));
                if let (Some((_, fit)), Some(row)) = (fit, row.as_object_mut()) {
                    row.extend(calibrated::fit_columns(fit));
                }
                if let (true, Some(row)) = (args.requantize, row.as_object_mut()) {
                    row.insert("became".into(), t.became.into());
                }
                row
            })
            .collect();
        let degenerate: Vec<_> = degenerate.iter().map(|(m, n)| json!({"name": m, "groups": n})).collect();
        let mut object = json!({
            "out": args.out,
            "bits_per_weight": proof.bits_per_weight,
            "model_bits_per_weight": proof.model_bits_per_weight,
            "bytes": proof.bytes,
            "degenerate_groups": degenerate,
            "logits": proof_logits::brief(proof),
        });
        for (key, value) in about {
            if let Some(value) = value {
                object[*key] = value.clone();
            }
        }
        object["rows"] = rows.into();
        output::line(object.to_string());
        return;
    }
    let mean = layers.iter().map(|(_, s)| s.relative_error).sum::<f64>() / layers.len().max(1) as f64;
    output::line(format!(
        "{}: {} layers quantized, {:.4} bits per weight ({:.4} over the whole model), {size} bytes of weights",
        printable(&args.out.to_string_lossy()),
        layers.len(),
        proof.bits_per_weight,
        proof.model_bits_per_weight,
    ));
    output::line(format!("relative error of a layer: mean {mean:.4}"));
    if let Some((t, s)) = layers.iter().max_by(|a, b| a.1.relative_error.total_cmp(&b.1.relative_error)) {
        output::line(format!("  largest {:.4} in {}", s.relative_error, printable(&t.name)));
    }
    for note in calibrated::notes(args.method, fits).iter().chain(notes) {
        output::line(note);
    }
    for (module, groups) in degenerate {
        output::line(format!("note: {}: {groups} groups hold nothing (all but zero)", printable(module)));
    }
    output::line("proof: every code, scale, zero point and copied tensor was read back equal (dsq-proof.json)");
    proof_logits::tell(proof);
}
