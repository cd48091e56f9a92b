//! `dsq quantize` of an image model: pictures instead of text, and weights whose batch norm is folded. The methods are
//! dsq-train's `ptq::cnn`.

use super::{Args, GranularityName, Method, ObserverName, calibrated, images_plan, source_record, workers};
use crate::{Global, error::CliError, output, pictures, proof_logits};
use dsq_checkpoint::{
    Checkpoint, CheckpointError, ExportTensor, FolderTarget, ImageConfig, Judge, ModelConfig, Proof, export_layers,
    printable,
};
use dsq_quant::{FloatType, Granularity, Mapping, Percentile, QuantConfig, QuantScheme, WeightObserver};
use dsq_train::TrainError;
use dsq_train::ptq::cnn::{self, CnnLayer, CnnMethod, CnnSettings};
use serde_json::json;

/// Most pictures: all activations of a layer are in memory, some 60 MB for each picture and its mirror image.
const MAX_PICTURES: usize = 128;

/// Options that only image models take.
#[derive(clap::Args, Debug)]
pub(super) struct ImageArgs {
    /// Image models: equalise the ranges of channels across layers first (changes no output of the float model).
    #[arg(long)]
    equalize: bool,
    /// Image models: let biases take up the mean error of each layer's outputs on --calib.
    #[arg(long)]
    correct_bias: bool,
    /// Image models: end the ranges of activations at this percentile of their values on --calib, above 50 (default: 100, the
    /// whole ranges).
    #[arg(long, value_name = "P")]
    activation_percentile: Option<f64>,
}

impl ImageArgs {
    /// Whether ranges of channels are equalised.
    pub(super) fn equalizes(&self) -> bool {
        self.equalize
    }

    /// The first option that was given, for a model that takes none.
    pub(super) fn given(&self) -> Option<&'static str> {
        let options = [
            ("--equalize", self.equalize),
            ("--correct-bias", self.correct_bias),
            ("--activation-percentile", self.activation_percentile.is_some()),
        ];
        options.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
    }
}

/// Runs the command on an image model.
pub(super) fn run(args: &Args, global: &Global, ckpt: &Checkpoint, model: &ImageConfig) -> Result<u8, CliError> {
    let at = printable(&args.model.to_string_lossy());
    if ckpt.quantization().is_some() {
        let problem = "the model is quantized already; expected float weights, got codes";
        return Err(CliError::usage(format!("{at}: quantization_config: {problem}")));
    }
    let method = match args.method {
        Method::Rtn => CnnMethod::Rtn,
        Method::Gptq => CnnMethod::Gptq,
        Method::Autoround => CnnMethod::AutoRound,
        Method::Awq | Method::Gptaq | Method::Blockwise => {
            let got = calibrated::name(args.method);
            return Err(CliError::usage(format!(
                "--method: expected rtn, gptq or autoround for an image model, got {got}"
            )));
        }
    };
    let config = quant_config(args, model)?;
    if let Some(p) = args.images.activation_percentile {
        Percentile::new(p).map_err(|e| CliError::usage(format!("--activation-percentile: {e}")))?;
        if config.scheme.activations.is_none() {
            let problem = "expected a scheme with quantized activations, as W4A8, got";
            return Err(CliError::usage(format!("--activation-percentile: {problem} {}", args.scheme())));
        }
    }
    let Some(dir) = args.calibration.calib() else {
        let problem = "ranges of activations are measured on pictures; expected a folder of JPEG files, got none";
        return Err(CliError::usage(format!("--calib: {problem}"))
            .with_hint("give --calib DIR, pictures of the kind that the model will see; labels are not looked at"));
    };
    let files = pictures::list(dir, MAX_PICTURES)?;
    if args.plan {
        return images_plan::plan(args, global, ckpt, model, &config, method, files.len())?.tell(global, &args.out);
    }
    let images = pictures::with_mirrored(pictures::read(&files, model)?, model.preparation.size[1]);
    let settings = CnnSettings {
        config: &config,
        method,
        equalize: args.images.equalize,
        correct_bias: args.images.correct_bias,
        percentile: args.images.activation_percentile,
    };
    let bar = output::progress(1, "quantize {bar:30} {pos}/{len} layers {eta}");
    let mut progress = |done: usize, total: usize| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    };
    let outcome = workers(global)?.install(|| cnn::quantize_images(ckpt, settings, &images, &mut progress));
    bar.finish_and_clear();
    let outcome = outcome.map_err(|e| match e {
        TrainError::Quant { module, source } => CheckpointError::quant(&args.model, module, source).into(),
        other => CliError::from(other),
    })?;
    let errors: Vec<(String, f64)> = outcome.layers.iter().map(|l| (l.module.clone(), l.error)).collect();
    let model = ModelConfig::Image(outcome.config);
    let mut tensors = Vec::new();
    for layer in outcome.layers {
        tensors.extend(exported(args, ckpt, layer)?);
    }
    let judge = |exported: &Checkpoint| args.logits.compare(ckpt, exported, global.threads());
    let target = FolderTarget {
        overwrite: args.overwrite,
        judge: Some(Judge(&judge)),
        ..FolderTarget::new(&args.out, &model, Some(&config))
    };
    let proof = export_layers(&target, tensors, ckpt.aux_files()?)?;
    report(args, global, &proof, &errors, files.len());
    Ok(0)
}

fn quant_config(args: &Args, model: &ImageConfig) -> Result<QuantConfig, CliError> {
    if let Some(GranularityName::Group | GranularityName::Tensor) = args.granularity {
        return Err(CliError::usage("--granularity: expected channel for an image model, got another"));
    }
    for (option, given) in [
        ("--group-size", args.group_size.is_some()),
        ("--override", !args.overrides.is_empty()),
        ("--dtype", args.dtype.is_some()),
        ("--max-shard-size", args.max_shard_size.is_some()),
        ("--static-activations", args.static_activations),
        ("--asymmetric-activations", args.asymmetric_activations),
        ("--observer weighted-mse", args.observer == ObserverName::WeightedMse),
    ] {
        if given {
            return Err(CliError::usage(format!("{option}: not for an image model; expected no such option, got one")));
        }
    }
    let dtype = args.scale_dtype.unwrap_or(FloatType::F32);
    let mut scheme = QuantScheme::preset(args.scheme(), Granularity::PerChannel, dtype)
        .map_err(|e| CliError::usage(format!("--scheme: {e}")))?;
    if scheme.weights.qtype.float().is_some() {
        let got = args.scheme();
        return Err(CliError::usage(format!("--scheme: expected integer codes for an image model, got {got}")));
    }
    if args.asymmetric {
        scheme.weights.mapping = Mapping::Asymmetric;
    }
    scheme.weights.observer = match args.observer {
        ObserverName::Minmax => WeightObserver::MinMax,
        ObserverName::Mse | ObserverName::WeightedMse => WeightObserver::Mse,
    };
    let config = QuantConfig::new(scheme, &args.ignore).map_err(|e| CliError::usage(format!("--ignore: {e}")))?;
    let names: Vec<String> = model.layers().into_iter().map(|l| l.module).collect();
    let unmatched = config.unmatched(&names);
    if !unmatched.is_empty() {
        let problem = format!("expected patterns that match a layer, got {}", unmatched.join(", "));
        return Err(
            CliError::usage(format!("--ignore: {problem}")).with_hint(format!("layer names look like {}", names[0]))
        );
    }
    if names.iter().all(|n| config.scheme_for(n).is_none()) {
        return Err(CliError::usage("--ignore: expected at least one layer to quantize, got none"));
    }
    Ok(config)
}

/// What is stored of a layer. The record compares the values of the codes with the folded (and equalised) weight, which has
/// no tensor of its own in the source.
fn exported(args: &Args, ckpt: &Checkpoint, layer: CnnLayer) -> Result<Vec<ExportTensor>, CliError> {
    let CnnLayer { module, shape, weight, matrix, bias, clip, activation, .. } = layer;
    let float = |part: &str, data: Vec<f32>| ExportTensor::Float {
        name: format!("{module}.{part}"),
        shape: vec![data.len()],
        data,
        dtype: FloatType::F32,
    };
    let mut out = vec![float("bias", bias)];
    out.extend(clip.map(|c| float("clip", c)));
    let name = format!("{module}.weight");
    out.push(match matrix {
        None => ExportTensor::Float { name, shape, data: weight, dtype: FloatType::F32 },
        Some(matrix) => {
            let mut source = source_record(ckpt, &name, &weight, &matrix.dequantize())?;
            let equalized = if args.images.equalize { ", channels equalised" } else { "" };
            source.rescaled = Some(format!("batch norm folded in{equalized}; the differences are to that weight"));
            ExportTensor::Linear { module, shape, matrix, activation, source: Some(source), order: None }
        }
    });
    Ok(out)
}

fn report(args: &Args, global: &Global, proof: &Proof, errors: &[(String, f64)], pictures: usize) {
    let size: u64 = proof.bytes.values().sum();
    if global.json {
        let rows: Vec<_> = errors.iter().map(|(name, e)| json!({"name": name, "output_error": e})).collect();
        let object = json!({
            "out": args.out,
            "bits_per_weight": proof.bits_per_weight,
            "model_bits_per_weight": proof.model_bits_per_weight,
            "bytes": proof.bytes,
            "calibration": {
                "method": calibrated::name(args.method),
                "pictures": pictures,
                "equalize": args.images.equalize,
                "correct_bias": args.images.correct_bias,
                "activation_percentile": args.images.activation_percentile.unwrap_or(100.0),
            },
            "logits": proof_logits::brief(proof),
            "rows": rows,
        });
        output::line(object.to_string());
        return;
    }
    output::line(format!(
        "{}: {:.4} bits per weight ({:.4} over the whole model), {size} bytes of weights",
        printable(&args.out.to_string_lossy()),
        proof.bits_per_weight,
        proof.model_bits_per_weight,
    ));
    let mean = errors.iter().map(|(_, e)| e).sum::<f64>() / errors.len().max(1) as f64;
    output::line(format!(
        "squared error of a layer's outputs on {pictures} pictures and their mirror images: mean {mean:.4} of their variance"
    ));
    if let Some((name, e)) = errors.iter().max_by(|a, b| a.1.total_cmp(&b.1)) {
        output::line(format!("  largest {e:.4} in {}", printable(name)));
    }
    output::line("proof: every code, scale, zero point and bias was read back equal (dsq-proof.json)");
    proof_logits::tell(proof);
}
