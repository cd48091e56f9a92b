//! `dsq export`: writes a model in another format. Codes are carried over as they are; chosen anew only for GGUF (`export/gguf.rs`),
//! and with `--requantize`. Tensors are read, converted and written one by one: of codes once before, to know what they become.

mod gguf;
mod layers;
mod onnx;

use super::quantize::{float_outline, float_tensor};
use crate::plan::{self, Plan};
use crate::{Global, error::CliError, output, proof_logits, size::Size};
use dsq_checkpoint::{
    Checkpoint, ExportTensor, FolderFormat, FolderTarget, FolderWriter, GgufType, Judge, ModelConfig, Outline, Proof,
    Workers, check_output, export_stream, folder_bytes, printable,
};
use dsq_quant::{FloatType, Pattern, QuantConfig, QuantScheme};
pub(super) use layers::packed_names;
use layers::{Layers, Survey};
use serde_json::json;
use std::borrow::Cow;
use std::collections::HashSet;
use std::path::PathBuf;

/// Options of `dsq export`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A Hugging Face folder (float, compressed-tensors, GPTQ or AWQ) or a GGUF file.
    model: PathBuf,
    /// The folder to write; of GGUF and ONNX the file.
    #[arg(long, value_name = "DIR|FILE")]
    out: PathBuf,
    /// The format to write.
    #[arg(long, value_enum)]
    format: Format,
    /// Which GGUF file, by llama.cpp's names.
    #[arg(long, value_name = "F32|BF16|F16|Q8_0|Q4_0|Q4_1|Q4_K_M")]
    gguf_type: Option<GgufType>,
    /// Which version of GPTQ: v1, as AutoGPTQ reads (the default), or v2.
    #[arg(long, value_enum, value_name = "v1|v2")]
    gptq_version: Option<GptqVersion>,
    /// Allow that values of a quantized model change where the target's grids do not hold them; by how much is told first.
    #[arg(long)]
    requantize: bool,
    /// Dtype of float tensors (default: as stored; f32 for GGUF blocks and for codes). For GGUF: of the matrices that a quantized
    /// model has in float. For ONNX: of float matrices.
    #[arg(long, value_name = "f16|bf16|f32")]
    dtype: Option<FloatType>,
    /// Split the weights of a folder into files of at most this many bytes, `5GB` say, with an index as transformers writes it
    /// [default: one file].
    #[arg(long, value_name = "SIZE")]
    max_shard_size: Option<Size>,
    /// Replace the output folder if it holds a model, or the output file if it is a GGUF file or an ONNX file of dsq's.
    #[arg(long)]
    overwrite: bool,
    #[command(flatten)]
    logits: proof_logits::LogitsArgs,
    /// Say how much memory, disk and time the run will need, and write nothing; exit code 5 where there is less memory, 4 where
    /// there is less disk. Of codes that become codes the source is read once for it.
    #[arg(long)]
    plan: bool,
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
    /// A graph that onnxruntime runs.
    Onnx,
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
            (Format::Safetensors | Format::Gguf | Format::Onnx, _) => None,
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
    if args.format == Format::Onnx {
        return onnx::run(&args, global);
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
    let workers = Workers::new(global.threads());
    let layers = Layers::new(&args.model, &ckpt, format);
    if keep_codes && layers.specs().is_empty() {
        let at = printable(&args.model.to_string_lossy());
        return Err(CliError::usage(format!("{at}: --format: expected a quantized model, got float weights"))
            .with_hint("dsq quantize chooses codes; dsq export only carries them over"));
    }
    let aux = ckpt.aux_files()?;
    let survey = layers.survey(workers)?;
    check_blocks(&args, &survey)?;
    let has_grids = format == Some(FolderFormat::CompressedTensors);
    let inputs = if has_grids { 0 } else { quantized_inputs(&ckpt)? };
    let mut outlines = survey.outlines(&layers, args.dtype.unwrap_or_default());
    let linears = outlines.len();
    let mut done = layers.names();
    let dropped = cache_scales(&ckpt, has_grids, &mut outlines, &mut done)?;
    let caches = outlines.len();
    let floats: Vec<String> = ckpt.names().into_iter().filter(|n| !done.contains(n)).collect();
    outlines.extend(floats.iter().map(|name| float_outline(&ckpt, name.clone(), args.dtype)));
    check_loss(&args, format.unwrap_or_default(), &survey)?;
    let mut scheme = scheme_of(&outlines, &ckpt, has_grids)?;
    if let Some(scheme) = scheme.as_mut().filter(|_| has_grids) {
        scheme.kv_cache = ckpt.kv_cache();
    }
    let judge = |exported: &Checkpoint| args.logits.compare(&ckpt, exported, global.threads());
    let target = FolderTarget {
        format: format.unwrap_or_default(),
        overwrite: args.overwrite,
        max_shard: args.max_shard_size.map(|s| s.0),
        workers,
        judge: Some(Judge(&judge)),
        ..FolderTarget::new(&args.out, ckpt.config(), scheme.as_ref())
    };
    if args.plan {
        let disk = folder_bytes(&target, &outlines)? + aux.iter().map(|(_, b)| b.len() as u64).sum::<u64>();
        let sample = || layers.make(linears / 2, &survey, args.dtype.unwrap_or_default());
        let mut plan = folder_plan(&args, &outlines, workers, disk, (linears > 0).then_some(sample))?;
        args.logits.plan(&mut plan, &ckpt, global.threads());
        return plan.tell(global, &args.out);
    }
    let bar = output::progress(outlines.len() as u64, "write {bar:30} {pos}/{len} tensors {eta}");
    let cache = outlines[linears..caches].to_vec();
    let make = |i: usize| -> Result<Cow<ExportTensor>, CliError> {
        bar.inc(1);
        let made = if i < linears {
            layers.make(i, &survey, args.dtype.unwrap_or_default())?
        } else if let Some(Outline::KvCache { layer, grid }) = cache.get(i - linears) {
            ExportTensor::KvCache { layer: *layer, grid: *grid }
        } else {
            float_tensor(&ckpt, floats[i - caches].clone(), args.dtype)?
        };
        Ok(Cow::Owned(made))
    };
    let proof = export_stream(&target, outlines, aux, &make)?;
    bar.finish_and_clear();
    report(&args, global, &proof, dropped, inputs);
    Ok(0)
}

/// What writing a folder will need. `sample` makes one of its layers, for the time.
fn folder_plan(
    args: &Args,
    outlines: &[Outline],
    workers: Workers,
    disk: u64,
    sample: Option<impl FnOnce() -> Result<ExportTensor, CliError>>,
) -> Result<Plan, CliError> {
    let memory = plan::stream_memory(outlines, workers);
    let written = plan::write_rate(&args.out)?;
    let mut measured = written.map_or(String::new(), |w| format!("the disk takes {:.0} MB/s", w / 1e6));
    let mut seconds = written.map_or(0.0, |w| disk as f64 / w);
    if let Some(sample) = sample {
        let mut values = 0;
        let took = plan::timed(|| sample().map(|layer| values = Outline::of(&layer).values()))?;
        let all: u64 = outlines.iter().map(Outline::values).sum();
        // Hashing, writing and reading back take as long again.
        seconds += 2.0 * took * all as f64 / values.max(1) as f64 / workers.threads.max(1) as f64;
        measured = format!("a layer of {values} weights is made in {:.0} ms, {measured}", 1e3 * took);
    }
    Ok(Plan { memory, disk, seconds, measured, journal: None })
}

/// Refuses, or with `--requantize` tells, that the blocks of a GGUF file do not become codes without loss.
fn check_blocks(args: &Args, survey: &Survey) -> Result<(), CliError> {
    let Some(first) = &survey.blocks.first else { return Ok(()) };
    let changed = &survey.blocks;
    let loss = format!(
        "values change in {} layers, {first} the first: max abs error {:e}, relative Frobenius error at most {:e}",
        changed.layers, changed.max, changed.relative
    );
    if !args.requantize {
        let at = printable(&args.model.to_string_lossy());
        let problem = "expected minima that are whole multiples of their steps, got others";
        return Err(CliError::usage(format!("{at}: --format: {problem}; {loss}"))
            .with_hint("--requantize takes the nearest; dsq quantize chooses codes by a method of your choice"));
    }
    output::note(format!("requantized: {loss}"));
    Ok(())
}

/// Refuses, or with `--requantize` tells, that scales change when they are rounded to f16, or codes because AWQ has no groups in
/// activation order.
fn check_loss(args: &Args, format: FolderFormat, survey: &Survey) -> Result<(), CliError> {
    let loss = &survey.loss;
    if loss.tensors == 0 {
        return Ok(());
    }
    if !args.requantize {
        let at = printable(&args.model.to_string_lossy());
        if survey.ordered > 0 && format == FolderFormat::Awq {
            let n = survey.ordered;
            let problem =
                format!("AWQ has no groups in activation order; expected runs of inputs, got others in {n} layers");
            return Err(CliError::usage(format!("{at}: --format: {problem}; {loss}"))
                .with_hint("--requantize chooses codes anew; GPTQ and compressed-tensors hold these as they are"));
        }
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
    outlines: &mut Vec<Outline>,
    done: &mut HashSet<String>,
) -> Result<usize, CliError> {
    let ModelConfig::Llama(c) = ckpt.config() else { return Ok(0) };
    let mut dropped = 0;
    for layer in 0..c.num_hidden_layers {
        let Some(grid) = ckpt.kv_grid(layer)? else { continue };
        done.extend(["k_scale", "v_scale"].map(|s| format!("model.layers.{layer}.self_attn.{s}")));
        match keep {
            true => outlines.push(Outline::KvCache { layer, grid }),
            false => dropped += 2,
        }
    }
    Ok(dropped)
}

/// The schemes of quantized layers: that of the first for all, an override for each that differs, and the layers that stay
/// in float; `None` when none is quantized.
fn scheme_of(outlines: &[Outline], ckpt: &Checkpoint, has_grids: bool) -> Result<Option<QuantConfig>, CliError> {
    let mut schemes = Vec::new();
    for outline in outlines {
        if let Outline::Linear { module, args, activation, .. } = outline {
            let activations = activation.or(ckpt.dynamic_activation(module).filter(|_| has_grids));
            schemes.push((module.clone(), QuantScheme { weights: *args, activations }));
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
        object["logits"] = proof_logits::brief(proof);
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
    proof_logits::tell(proof);
}
