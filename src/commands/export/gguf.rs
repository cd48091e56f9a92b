//! `dsq export --format gguf`: the options, what is told of a quantized source before anything is written, and the report. The
//! file, its types and its proof are dsq-checkpoint's.

use super::{Args, quantized_inputs};
use crate::plan::{self, Plan};
use crate::{Global, error::CliError, output, proof_logits};
use dsq_checkpoint::{
    Checkpoint, ExportLoss, GgufExport, GgufOptions, GgufType, Judge, Proof, Workers, check_room, printable,
};
use dsq_kernels::quantize::quantize_blocks;
use serde_json::json;

/// Writes the file.
pub(super) fn run(args: &Args, global: &Global) -> Result<u8, CliError> {
    if args.max_shard_size.is_some() {
        return Err(CliError::usage("--max-shard-size: a GGUF file is one file here; expected no such option, got it"));
    }
    let Some(ty) = args.gguf_type else {
        let names = GgufType::ALL.map(GgufType::name).join(", ");
        return Err(CliError::usage(format!("--gguf-type: expected one of {names} with --format gguf, got none")));
    };
    global.use_threads();
    let ckpt = Checkpoint::open(&args.model)?;
    let options =
        GgufOptions { ty, dtype: args.dtype, requantize: args.requantize, keep: Vec::new(), overwrite: args.overwrite };
    let export = GgufExport::new(&ckpt, &args.out, options)?;
    if args.plan {
        let mut plan = plan_of(args, &export)?;
        args.logits.plan(&mut plan, &ckpt, global.threads());
        return plan.tell(global, &args.out);
    }
    check_room(&args.out, export.bytes())?;
    let count = export.tensors() as u64;
    let bar = output::progress(count, "compare {bar:30} {pos}/{len} tensors {eta}");
    let loss = export.loss(&quantize_blocks, &mut || bar.inc(1))?;
    bar.finish_and_clear();
    if let Some(loss) = loss.as_ref().filter(|l| l.tensors > 0) {
        if !args.requantize {
            let at = printable(&args.model.to_string_lossy());
            let problem = format!("{} does not hold what this quantized model holds; {loss}", ty.name());
            return Err(CliError::usage(format!(
                "{at}: --gguf-type: expected a type without loss, got one: {problem}"
            ))
            .with_hint("--requantize writes it all the same; the float model gives a better file"));
        }
        output::note(format!("requantized: {loss}"));
    }
    let inputs = quantized_inputs(&ckpt)?;
    let bar = output::progress(count, "write {bar:30} {pos}/{len} tensors {eta}");
    let judge = |exported: &Checkpoint| args.logits.compare(&ckpt, exported, global.threads());
    let proof = export.judged(Judge(&judge)).write(&quantize_blocks, &mut || bar.inc(1))?;
    bar.finish_and_clear();
    report(args, global, ty, &proof, loss.as_ref(), inputs);
    Ok(0)
}

/// What writing the file will need: matrices are encoded one after the other, on all threads.
fn plan_of(args: &Args, export: &GgufExport) -> Result<Plan, CliError> {
    let (disk, memory) = (export.bytes(), plan::stream_memory(&[], Workers::new(1)) + export.working_bytes());
    let written = plan::write_rate(&args.out)?;
    let (mut seconds, mut measured) = (0.0, String::new());
    if let Some((grid, rows)) = export.main_grid() {
        let sample: Vec<f32> = (0..1 << 20).map(|i| (i as f32 * 0.37).sin()).collect();
        let took = plan::timed(|| quantize_blocks(grid, &sample))
            .map_err(|e| CliError::new(70, format!("{}: {e}", grid.name())))?;
        // A source of codes is compared before; reading, hashing and reading back take about 4 ns a value.
        let passes = if export.is_quantized() { 2.0 } else { 1.0 };
        seconds += passes * rows as f64 * (took / sample.len() as f64 + 4e-9);
        measured =
            format!("{} is encoded at {:.0} million values a second", grid.name(), sample.len() as f64 / took / 1e6);
    }
    if let Some(w) = written {
        seconds += disk as f64 / w;
        measured += &format!("{}the disk takes {:.0} MB/s", if measured.is_empty() { "" } else { ", " }, w / 1e6);
    }
    Ok(Plan { memory, disk, seconds, measured, journal: None })
}

fn report(args: &Args, global: &Global, ty: GgufType, proof: &Proof, loss: Option<&ExportLoss>, inputs: usize) {
    let size: u64 = proof.bytes.values().sum();
    let became = proof.became();
    let scales = proof.tensors.iter().filter(|t| t.reason.is_some_and(|r| r.contains("KV cache"))).count();
    if global.json {
        let row = json!({"name": "model", "bits_per_weight": proof.model_bits_per_weight, "bytes": size});
        let mut object = json!({
            "out": args.out,
            "gguf_type": ty.name(),
            "bits_per_weight": proof.bits_per_weight,
            "bytes": proof.bytes,
            "tensors": became,
            "rows": [row],
        });
        if let Some(loss) = loss {
            object["loss"] = json!({
                "tensors": loss.tensors,
                "max_abs_error": loss.max_abs_error,
                "relative_error": loss.relative_error,
            });
        }
        super::add_dropped(&mut object, scales, inputs);
        object["logits"] = proof_logits::brief(proof);
        output::line(object.to_string());
        return;
    }
    let out = printable(&args.out.to_string_lossy());
    let (tensors, bits) = (proof.tensors.len(), proof.model_bits_per_weight);
    output::line(format!("{out}: {tensors} tensors, {size} bytes, {bits:.4} bits per weight"));
    let mut types: Vec<String> = Vec::new();
    for (name, bytes) in proof.bytes.iter().filter(|(name, _)| **name != "header") {
        types.push(format!("{name} {bytes}"));
    }
    let kinds: Vec<String> = became.iter().map(|(what, n)| format!("{n} {what}")).collect();
    output::line(format!("{}: bytes {}; tensors {}", ty.name(), types.join(", "), kinds.join(", ")));
    if loss.is_some_and(|l| l.tensors == 0) {
        let what = if args.dtype.is_some() {
            "every value of the source's codes"
        } else {
            "every value of the quantized source"
        };
        output::line(format!("{what} was kept"));
    }
    if scales > 0 {
        output::line(format!("note: the {scales} scales of the KV cache are left out: a GGUF file has none"));
    }
    if inputs > 0 {
        output::line(format!(
            "note: the inputs of {inputs} layers are on no grid any more: a GGUF file has none of inputs"
        ));
    }
    output::line(format!("proof: every tensor was read back equal ({out}.dsq-proof.json)"));
    proof_logits::tell(proof);
}
