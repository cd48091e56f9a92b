//! `dsq export`: writes a model in another format. Codes are carried over as they are; chosen anew only for GGUF (`export/gguf.rs`),
//! and with `--requantize`.

mod gguf;

use super::quantize::float_tensor;
use crate::{Global, error::CliError, output};
use dsq_checkpoint::{
    Checkpoint, ExportLoss, ExportTensor, FolderFormat, FolderWriter, GgufType, LinearWeight, ModelConfig, Proof,
    SourceRecord, check_output, convert_layers, export_folder_as, printable,
};
use dsq_quant::{FloatType, Pattern, QuantConfig, QuantScheme, QuantizedMatrix};
use serde_json::json;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;

/// Options of `dsq export`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A Hugging Face folder (float, compressed-tensors, GPTQ or AWQ) or a GGUF file.
    model: PathBuf,
    /// The folder to write; of GGUF the file.
    #[arg(long, value_name = "DIR|FILE")]
    out: PathBuf,
    /// The format to write.
    #[arg(long, value_enum)]
    format: Format,
    /// Which GGUF file, by llama.cpp's names.
    #[arg(long, value_name = "F16|Q8_0|Q4_0|Q4_1|Q4_K_M")]
    gguf_type: Option<GgufType>,
    /// Which version of GPTQ: v1, as AutoGPTQ reads (the default), or v2.
    #[arg(long, value_enum, value_name = "v1|v2")]
    gptq_version: Option<GptqVersion>,
    /// Allow that values of a quantized model change where the target's grids do not hold them; by how much is told first.
    #[arg(long)]
    requantize: bool,
    /// Dtype of float tensors (default: as stored; f32 for GGUF blocks and for codes). For GGUF: of the matrices that a quantized
    /// model has in float.
    #[arg(long, value_name = "f16|bf16|f32")]
    dtype: Option<FloatType>,
    /// Replace the output folder if it holds a model, or the output file if it is a GGUF file.
    #[arg(long)]
    overwrite: bool,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq)]
enum Format {
    /// Packed codes, as vLLM and transformers load them.
    CompressedTensors,
    /// Packed codes, as AutoGPTQ and GPTQModel write them.
    Gptq,
    /// Packed codes, as AutoAWQ writes them (version GEMM).
    Awq,
    /// Float weights.
    Safetensors,
    /// One file, as llama.cpp loads it.
    Gguf,
}

#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq)]
enum GptqVersion {
    V1,
    V2,
}

impl Args {
    /// How the folder stores codes; `None` for floats.
    fn folder_format(&self) -> Option<FolderFormat> {
        match (self.format, self.gptq_version) {
            (Format::CompressedTensors, _) => Some(FolderFormat::CompressedTensors),
            (Format::Gptq, Some(GptqVersion::V2)) => Some(FolderFormat::GptqV2),
            (Format::Gptq, _) => Some(FolderFormat::GptqV1),
            (Format::Awq, _) => Some(FolderFormat::Awq),
            (Format::Safetensors | Format::Gguf, _) => None,
        }
    }
}

/// Runs the command.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    if args.gptq_version.is_some() && args.format != Format::Gptq {
        return Err(CliError::usage("--gptq-version: expected no such option but with --format gptq, got it"));
    }
    if args.format == Format::Gguf {
        return gguf::run(&args, global);
    }
    if args.gguf_type.is_some() {
        return Err(CliError::usage("--gguf-type: expected no such option but with --format gguf, got it"));
    }
    check_output(&[&args.model], &args.out)?;
    FolderWriter::check(&args.out, args.overwrite)?;
    let ckpt = Checkpoint::open(&args.model)?;
    let format = args.folder_format();
    let keep_codes = format.is_some();
    let f16_scales = format.is_some_and(|f| f != FolderFormat::CompressedTensors);
    if args.requantize && !(f16_scales || keep_codes && ckpt.is_gguf()) {
        let problem = "expected no such option but to GGUF, GPTQ or AWQ, or from GGUF to compressed-tensors, got it";
        return Err(CliError::usage(format!("--requantize: {problem}")));
    }
    let mut blocks = HashMap::new();
    if keep_codes && ckpt.is_gguf() {
        blocks = codes_of_blocks(&args, &ckpt)?;
    }
    if keep_codes && blocks.is_empty() && !ckpt.config().linears().iter().any(|l| ckpt.is_quantized(&l.module)) {
        let at = printable(&args.model.to_string_lossy());
        return Err(CliError::usage(format!("{at}: --format: expected a quantized model, got float weights"))
            .with_hint("dsq quantize chooses codes; dsq export only carries them over"));
    }
    let aux = ckpt.aux_files()?;
    let bar = output::progress(ckpt.names().len() as u64, "read {bar:30} {pos}/{len} tensors {eta}");
    let mut tensors = Vec::new();
    let mut done = HashSet::new();
    for spec in ckpt.config().linears() {
        if let Some((matrix, source)) = blocks.remove(&spec.module) {
            done.insert(format!("{}.weight", spec.module));
            bar.inc(1);
            let (module, shape, source) = (spec.module, spec.shape, Some(source));
            tensors.push(ExportTensor::Linear { module, shape, matrix, activation: None, source });
            continue;
        }
        if !ckpt.is_quantized(&spec.module) {
            continue;
        }
        for part in ["", "_packed", "_scale", "_global_scale", "_shape", "_zero_point"] {
            done.insert(ckpt.part(&spec.module, &format!("weight{part}")));
        }
        done.extend(["qweight", "qzeros", "scales", "g_idx"].map(|part| format!("{}.{part}", spec.module)));
        if ckpt.has_empty_bias(&spec.module) {
            done.insert(format!("{}.bias", spec.module));
        }
        let weight = ckpt.linear(&spec.module)?;
        if keep_codes && matches!(weight, LinearWeight::Float { .. }) {
            let problem =
                "groups in activation order have no place in this format; expected runs of inputs, got others";
            let at = printable(&args.model.to_string_lossy());
            return Err(CliError::usage(format!("{at}: {}.g_idx: {problem}", spec.module))
                .with_hint("--format safetensors writes the values of the codes as floats"));
        }
        // GPTQ and AWQ have no grids of inputs.
        let activation = if f16_scales { None } else { ckpt.activation(&spec.module)? };
        done.extend(["input_scale", "input_global_scale", "input_zero_point"].map(|p| format!("{}.{p}", spec.module)));
        bar.inc(1);
        match weight {
            LinearWeight::Quantized(matrix) if keep_codes => tensors.push(ExportTensor::Linear {
                module: spec.module,
                shape: spec.shape,
                matrix,
                activation,
                source: None,
            }),
            weight => {
                let (name, data) = (format!("{}.weight", spec.module), weight.into_f32());
                let dtype = args.dtype.unwrap_or_default();
                tensors.push(ExportTensor::Float { name, shape: spec.shape, data, dtype });
            }
        }
    }
    let has_grids = format == Some(FolderFormat::CompressedTensors);
    let inputs = if has_grids { 0 } else { quantized_inputs(&ckpt)? };
    let dropped = cache_scales(&ckpt, has_grids, &mut tensors, &mut done)?;
    for name in ckpt.names().into_iter().filter(|n| !done.contains(n)) {
        tensors.push(float_tensor(&ckpt, name, args.dtype)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let format = format.unwrap_or_default();
    let loss = convert_layers(format, &args.model, &mut tensors)?;
    check_loss(&args, format, &loss)?;
    let mut scheme = scheme_of(&tensors, &ckpt, has_grids)?;
    if let Some(scheme) = scheme.as_mut().filter(|_| has_grids) {
        scheme.kv_cache = ckpt.kv_cache();
    }
    let (config, out) = (ckpt.config(), &args.out);
    let proof = export_folder_as(format, out, config, tensors, scheme.as_ref(), aux, args.overwrite)?;
    report(&args, global, &proof, dropped, inputs);
    Ok(0)
}

/// The linears of a GGUF file whose blocks integer codes with an f16 scale for each 32 hold, with the record of the source; linears of
/// other types stay in float, with the values that they have.
fn codes_of_blocks(
    args: &Args,
    ckpt: &Checkpoint,
) -> Result<HashMap<String, (QuantizedMatrix, SourceRecord)>, CliError> {
    let mut out = HashMap::new();
    let (mut changed, mut first, mut max, mut relative) = (0, None, 0.0f64, 0.0f64);
    for spec in ckpt.config().linears() {
        let Some(matrix) = ckpt.block_codes(&spec.module)? else { continue };
        let name = format!("{}.weight", spec.module);
        let dtype = ckpt.info(&name).map(|i| i.dtype).unwrap_or_default();
        let source =
            SourceRecord::with_values(ckpt.sha256(&name)?, dtype, &ckpt.read_f32(&name)?, &matrix.dequantize());
        if source.max_abs_error > 0.0 {
            changed += 1;
            first.get_or_insert_with(|| format!("{} ({})", spec.module, source.dtype));
            (max, relative) = (max.max(source.max_abs_error), relative.max(source.relative_error));
        }
        out.insert(spec.module, (matrix, source));
    }
    let Some(first) = first else { return Ok(out) };
    let loss = format!(
        "values change in {changed} layers, {first} the first: max abs error {max:e}, relative Frobenius error at most {relative:e}"
    );
    if !args.requantize {
        let at = printable(&args.model.to_string_lossy());
        let problem = "expected minima that are whole multiples of their steps, got others";
        return Err(CliError::usage(format!("{at}: --format: {problem}; {loss}"))
            .with_hint("--requantize takes the nearest; dsq quantize chooses codes by a method of your choice"));
    }
    output::note(format!("requantized: {loss}"));
    Ok(out)
}

/// Refuses, or with `--requantize` tells, that scales change when they are rounded to f16.
fn check_loss(args: &Args, format: FolderFormat, loss: &ExportLoss) -> Result<(), CliError> {
    if loss.tensors == 0 {
        return Ok(());
    }
    if !args.requantize {
        let at = printable(&args.model.to_string_lossy());
        let problem =
            format!("{} stores scales in f16; expected scales that are f16 numbers, got others", format.name());
        return Err(CliError::usage(format!("{at}: --format: {problem}; {loss}"))
            .with_hint("--requantize rounds them to f16 and keeps the codes; dsq quantize --scale-dtype f16 chooses codes for such"));
    }
    output::note(format!("requantized: {loss}"));
    Ok(())
}

/// How many layers have inputs on grids, which a float folder has no place for.
fn quantized_inputs(ckpt: &Checkpoint) -> Result<usize, CliError> {
    let mut count = 0;
    for spec in ckpt.config().linears() {
        count += usize::from(ckpt.input_grid(&spec.module)?.is_some());
    }
    Ok(count)
}

/// Carries the scales of a KV cache over; a float folder has no scheme to put them in, so there they are left out, and it is
/// told how many.
fn cache_scales(
    ckpt: &Checkpoint,
    keep: bool,
    tensors: &mut Vec<ExportTensor>,
    done: &mut HashSet<String>,
) -> Result<usize, CliError> {
    let ModelConfig::Llama(c) = ckpt.config() else { return Ok(0) };
    let mut dropped = 0;
    for layer in 0..c.num_hidden_layers {
        let Some(grid) = ckpt.kv_grid(layer)? else { continue };
        done.extend(["k_scale", "v_scale"].map(|s| format!("model.layers.{layer}.self_attn.{s}")));
        match keep {
            true => tensors.push(ExportTensor::KvCache { layer, grid }),
            false => dropped += 2,
        }
    }
    Ok(dropped)
}

/// The schemes of quantized layers: that of the first for all, an override for each that differs, and the layers that stay
/// in float; `None` when none is quantized.
fn scheme_of(tensors: &[ExportTensor], ckpt: &Checkpoint, has_grids: bool) -> Result<Option<QuantConfig>, CliError> {
    let mut schemes = Vec::new();
    for tensor in tensors {
        if let ExportTensor::Linear { module, matrix, activation, .. } = tensor {
            let activations = activation.map(|(a, _)| a).or(ckpt.dynamic_activation(module).filter(|_| has_grids));
            schemes.push((module.clone(), QuantScheme { weights: matrix.args, activations }));
        }
    }
    let Some(&(_, first)) = schemes.first() else { return Ok(None) };
    let quantized: HashSet<&String> = schemes.iter().map(|(module, _)| module).collect();
    let float = ckpt.config().linears().into_iter().map(|l| l.module).filter(|m| !quantized.contains(m));
    let usage = |e: dsq_quant::QuantError| CliError::usage(e.to_string());
    let mut config = QuantConfig::new(first, &float.collect::<Vec<_>>()).map_err(usage)?;
    for (module, scheme) in schemes.iter().filter(|(_, s)| *s != first) {
        config.overrides.push((Pattern::new(module).map_err(usage)?, *scheme));
    }
    Ok(Some(config))
}

/// What of the source the output has no place for, for `--json`.
fn add_dropped(object: &mut serde_json::Value, kv_scales: usize, input_grids: usize) {
    for (key, n) in [("dropped_kv_scales", kv_scales), ("dropped_input_grids", input_grids)] {
        if n > 0 {
            object[key] = n.into();
        }
    }
}

fn report(args: &Args, global: &Global, proof: &Proof, dropped: usize, inputs: usize) {
    let size: u64 = proof.bytes.values().sum();
    if global.json {
        let row = json!({"name": "model", "bits_per_weight": proof.model_bits_per_weight, "bytes": size});
        let mut object = json!({"out": args.out, "bytes": proof.bytes, "rows": [row]});
        add_dropped(&mut object, dropped, inputs);
        output::line(object.to_string());
        return;
    }
    let out = printable(&args.out.to_string_lossy());
    let (tensors, bits) = (proof.tensors.len(), proof.model_bits_per_weight);
    output::line(format!("{out}: {tensors} tensors, {size} bytes of weights, {bits:.4} bits per weight"));
    if dropped > 0 {
        output::line(format!(
            "note: the {dropped} scales of the KV cache are left out: {} has a float cache",
            if args.format == Format::Safetensors { "a float model" } else { "this format" }
        ));
    }
    if inputs > 0 {
        output::line(format!(
            "note: the inputs of {inputs} layers are on no grid any more: {}",
            if args.format == Format::Safetensors {
                "a float model computes in float"
            } else {
                "this format has none of inputs"
            }
        ));
    }
    output::line("proof: every tensor was read back equal (dsq-proof.json)");
}
