//! `dsq export --format onnx`: the options, what is told of what the graph does not hold, and the report. The graph, the file and its
//! proof are dsq-checkpoint's.

use super::{Args, quantized_inputs};
use crate::plan::{self, Plan};
use crate::{Global, error::CliError, output};
use dsq_checkpoint::{Checkpoint, ModelConfig, OnnxExport, OnnxOptions, Proof, Workers, printable};
use serde_json::json;

/// Writes the file.
pub(super) fn run(args: &Args, global: &Global) -> Result<u8, CliError> {
    if args.requantize {
        let problem = "expected no such option with --format onnx, which keeps every code and scale, got it";
        return Err(CliError::usage(format!("--requantize: {problem}")));
    }
    if args.max_shard_size.is_some() {
        let problem = "an ONNX model is one file, or two; expected no such option, got it";
        return Err(CliError::usage(format!("--max-shard-size: {problem}")));
    }
    let ckpt = Checkpoint::open(&args.model)?;
    let options = OnnxOptions { dtype: args.dtype, overwrite: args.overwrite, ..OnnxOptions::default() };
    let export = OnnxExport::new(&ckpt, &args.out, options)?;
    if args.plan {
        let (disk, memory) = (export.bytes(), plan::stream_memory(&[], Workers::new(1)) + export.working_bytes());
        let written = plan::write_rate(&args.out)?;
        let measured = written.map_or_else(String::new, |w| format!("the disk takes {:.0} MB/s", w / 1e6));
        // Reading, packing, hashing and reading back: of SmolLM2 114 MB of floats and 42 MB of codes a second of one core.
        let seconds = written.map_or(0.0, |w| disk as f64 / w) + disk as f64 / 6e7;
        return Plan { memory, disk, seconds, measured, journal: None }.tell(global, &args.out);
    }
    // An image model's are in the graph.
    let inputs = if matches!(ckpt.config(), ModelConfig::Llama(_)) { quantized_inputs(&ckpt)? } else { 0 };
    let dequantized = export.dequantized();
    let bar = output::progress(export.steps() as u64, "write {bar:30} {pos}/{len} tensors {eta}");
    let proof = export.write(&mut || bar.inc(1))?;
    bar.finish_and_clear();
    report(args, global, &proof, inputs, dequantized);
    Ok(0)
}

fn report(args: &Args, global: &Global, proof: &Proof, inputs: usize, dequantized: usize) {
    let size: u64 = proof.bytes.values().sum();
    let became = proof.became();
    let scales = proof.tensors.iter().filter(|t| t.reason.is_some_and(|r| r.contains("KV cache"))).count();
    if global.json {
        let row = json!({"name": "model", "bits_per_weight": proof.model_bits_per_weight, "bytes": size});
        let mut object = json!({
            "out": args.out,
            "bits_per_weight": proof.bits_per_weight,
            "bytes": proof.bytes,
            "tensors": became,
            "files": proof.files.keys().collect::<Vec<_>>(),
            "rows": [row],
        });
        super::add_dropped(&mut object, scales, inputs);
        if dequantized > 0 {
            object["dequantized"] = dequantized.into();
        }
        output::line(object.to_string());
        return;
    }
    let out = printable(&args.out.to_string_lossy());
    let (tensors, bits) = (proof.tensors.len(), proof.model_bits_per_weight);
    output::line(format!("{out}: {tensors} tensors, {size} bytes of weights, {bits:.4} bits per weight"));
    let kinds: Vec<String> = became.iter().map(|(what, n)| format!("{n} {what}")).collect();
    output::line(format!("tensors: {}; files: {}", kinds.join(", "), proof.files.len()));
    if scales > 0 {
        output::line(format!("note: the {scales} scales of the KV cache are left out: the graph has a float cache"));
    }
    if inputs > 0 {
        output::line(format!(
            "note: the inputs of {inputs} layers are on no grid any more: MatMulNBits multiplies floats with codes"
        ));
    }
    if dequantized > 0 {
        output::line(format!(
            "note: the codes of {dequantized} tensors have no operator and are written as the floats that they stand for"
        ));
    }
    output::line(format!("proof: every tensor was read back equal ({out}.dsq-proof.json)"));
}
