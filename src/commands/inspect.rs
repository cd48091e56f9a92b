//! `dsq inspect`: what is in a model, how it is quantized, what it really costs a weight, and every fault found.

use crate::{Global, error::CliError, output, proof_logits};
use dsq_checkpoint::{
    Checkpoint, Fault, LinearWeight, LlamaConfig, ModelConfig, OnnxFile, OnnxTensor, RopeScaling, Severity, printable,
};
use dsq_quant::{FloatType, Granularity, KvGrid, Mapping, QuantArgs};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

/// Options of `dsq inspect`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A Hugging Face folder, a GGUF file, an image model as a PyTorch file, or an ONNX file (`*.onnx`).
    model: PathBuf,
    /// Run the model on the prompts of its proof too, and compare the logits.
    #[arg(long)]
    verify: bool,
    /// With --verify: the model that it was made from, whose tensors and logits are compared with the proof.
    #[arg(long, value_name = "MODEL", requires = "verify")]
    source: Option<PathBuf>,
}

/// One weight: a stored tensor, or the parts of a quantized module taken together.
struct Row {
    name: String,
    kind: String,
    shape: Vec<usize>,
    bytes: u64,
}

impl Row {
    fn weights(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product()
    }

    fn bits_per_weight(&self) -> f64 {
        bits(self.bytes, self.weights())
    }
}

fn bits(bytes: u64, weights: u64) -> f64 {
    if weights == 0 { 0.0 } else { bytes as f64 * 8.0 / weights as f64 }
}

/// Runs the command. Exit code 1 when a fault above a note was found.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    if args.model.extension().is_some_and(|e| e == "onnx") {
        if args.verify {
            let problem = "dsq does not run ONNX files; expected no such option, got it";
            return Err(CliError::usage(format!("--verify: {problem}"))
                .with_hint("without it the file is compared with its proof"));
        }
        return onnx(&args, global);
    }
    let ckpt = Checkpoint::open(&args.model)?;
    let source = args.source.as_deref().map(Checkpoint::open).transpose()?;
    let rows = rows(&ckpt)?;
    let mut faults = ckpt.faults();
    faults.extend(ckpt.missing_files());
    if args.verify {
        faults.extend(proof_logits::verify(&ckpt, source.as_ref(), global.threads())?);
    } else {
        faults.extend(proof_logits::unmeasured(&ckpt));
    }
    let kinds = kinds(&rows);
    if global.json {
        let mut model = json!({"model": args.model, "config": ckpt.config().to_json()});
        if let Some(cache) = cache_json(&ckpt) {
            model["kv_cache"] = cache;
        }
        output::line(as_json(model, &rows, &kinds, &faults).to_string());
    } else {
        let about = std::iter::once(describe(ckpt.config())).chain(describe_cache(&ckpt)).collect::<Vec<_>>();
        print(&about, &rows, &kinds, &faults);
    }
    Ok(u8::from(faults.iter().any(|f| f.severity > Severity::Note)))
}

/// Real bits for each weight of a model, scales and everything beside the codes counted.
///
/// # Errors
/// As reading its layers gives.
pub fn bits_per_weight(ckpt: &Checkpoint) -> Result<f64, CliError> {
    let (weights, bytes) = total(&kinds(&rows(ckpt)?));
    Ok(bits(bytes, weights))
}

/// An ONNX file, which is a graph and no model that dsq runs: its tensors, and whether it is still what was exported.
fn onnx(args: &Args, global: &Global) -> Result<u8, CliError> {
    let file = OnnxFile::open(&args.model)?;
    let row = |t: OnnxTensor| Row { name: t.name, kind: t.dtype, shape: t.shape, bytes: t.bytes };
    let rows: Vec<Row> = file.tensors()?.into_iter().map(row).collect();
    let (faults, kinds) = (file.faults(), kinds(&rows));
    if global.json {
        let model = json!({"model": args.model, "about": file.describe()});
        output::line(as_json(model, &rows, &kinds, &faults).to_string());
    } else {
        print(&[file.describe()], &rows, &kinds, &faults);
    }
    Ok(u8::from(faults.iter().any(|f| f.severity > Severity::Note)))
}

fn rows(ckpt: &Checkpoint) -> Result<Vec<Row>, CliError> {
    let mut parts = HashSet::new();
    let mut rows = Vec::new();
    for spec in ckpt.config().linears() {
        if !ckpt.is_quantized(&spec.module) {
            continue;
        }
        let mut bytes = 0;
        // The shape and the input scale are no part of what a weight costs.
        for (part, counts) in [
            ("weight", true),
            ("weight_packed", true),
            ("weight_scale", true),
            ("weight_global_scale", true),
            ("weight_zero_point", true),
            ("qweight", true),
            ("scales", true),
            ("qzeros", true),
            ("g_idx", true),
            ("weight_g_idx", true),
            ("weight_shape", false),
            ("input_scale", false),
            ("input_global_scale", false),
            ("input_zero_point", false),
        ] {
            let name = ckpt.part(&spec.module, part);
            if let Some(info) = ckpt.info(&name) {
                bytes += if counts { info.bytes } else { 0 };
                parts.insert(name);
            }
        }
        let mut kind = match ckpt.linear(&spec.module)? {
            LinearWeight::Quantized(matrix) => scheme_name(&matrix.args),
            LinearWeight::Ordered { matrix, .. } => format!("{} in activation order", scheme_name(&matrix.args)),
            // No codes have such a weight.
            LinearWeight::Float { .. } => "codes".to_owned(),
        };
        if let Some((a, _)) = ckpt.activation(&spec.module)? {
            kind.push_str(&format!(", {}-bit input", a.qtype.bits()));
        }
        rows.push(Row { name: format!("{}.weight", spec.module), kind, shape: spec.shape, bytes });
    }
    // Scales of the KV cache are no weights, and no part of what one costs.
    if ckpt.kv_cache().is_some() {
        parts.extend(ckpt.names().into_iter().filter(|n| n.ends_with(".k_scale") || n.ends_with(".v_scale")));
    }
    for name in ckpt.names().into_iter().filter(|n| !parts.contains(n)) {
        if let Some(info) = ckpt.info(&name) {
            rows.push(Row { name, kind: info.dtype, shape: info.shape, bytes: info.bytes });
        }
    }
    Ok(rows)
}

/// `INT4 group 32, BF16 scales`, `NVFP4: FP4 E2M1 group 16, F8_E4M3 scales over one F32`.
fn scheme_name(args: &QuantArgs) -> String {
    let granularity = match args.granularity {
        Granularity::PerTensor => "tensor".to_owned(),
        Granularity::PerChannel => "channel".to_owned(),
        Granularity::PerGroup(g) => format!("group {g}"),
        Granularity::PerBlock(rows, columns) => format!("block {rows}x{columns}"),
        Granularity::PerToken => "token".to_owned(),
        Granularity::PerTokenGroup(g) => format!("{g} of a token"),
    };
    let zero = if args.mapping == Mapping::Asymmetric { " and zero points" } else { "" };
    let (name, over) = match args.scale_dtype {
        FloatType::F8E4M3 => ("NVFP4: ", " over one F32"),
        FloatType::F8E8M0 => ("MXFP4: ", ""),
        FloatType::F32 | FloatType::F16 | FloatType::Bf16 => ("", ""),
    };
    format!("{name}{} {granularity}, {} scales{over}{zero}", args.qtype.name(), args.scale_dtype)
}

/// Tensors, weights and bytes of each kind.
fn kinds(rows: &[Row]) -> BTreeMap<String, (usize, u64, u64)> {
    let mut out = BTreeMap::new();
    for row in rows {
        let (tensors, weights, bytes) = out.entry(row.kind.clone()).or_insert((0, 0, 0));
        *tensors += 1;
        *weights += row.weights();
        *bytes += row.bytes;
    }
    out
}

fn total(kinds: &BTreeMap<String, (usize, u64, u64)>) -> (u64, u64) {
    kinds.values().fold((0, 0), |(w, b), (_, weights, bytes)| (w + weights, b + bytes))
}

fn severity_name(s: Severity) -> &'static str {
    match s {
        Severity::Note => "note",
        Severity::Warning => "warning",
        Severity::Error => "error",
    }
}

/// `model` with what was found in it.
fn as_json(model: Value, rows: &[Row], kinds: &BTreeMap<String, (usize, u64, u64)>, faults: &[Fault]) -> Value {
    let (weights, bytes) = total(kinds);
    let row = |r: &Row| json!({"name": r.name, "type": r.kind, "shape": r.shape, "bytes": r.bytes, "bits_per_weight": r.bits_per_weight()});
    let fault = |f: &Fault| json!({"severity": severity_name(f.severity), "file": f.file, "field": f.field, "problem": f.problem, "hint": f.hint});
    let mut object = model;
    object["weights"] = weights.into();
    object["bytes"] = bytes.into();
    object["bits_per_weight"] = bits(bytes, weights).into();
    object["faults"] = faults.iter().map(fault).collect();
    object["rows"] = rows.iter().map(row).collect();
    object
}

/// Type and scales of a quantized KV cache.
fn cache_json(ckpt: &Checkpoint) -> Option<Value> {
    let kv_cache = ckpt.kv_cache()?;
    let row = |(layer, g): (usize, KvGrid)| json!({"layer": layer, "k_scale": g.k.scale, "v_scale": g.v.scale});
    let layers: Vec<Value> = kv_grids(ckpt).into_iter().enumerate().map(row).collect();
    Some(json!({"type": kv_cache.qtype.name(), "layers": layers}))
}

fn print(about: &[String], rows: &[Row], kinds: &BTreeMap<String, (usize, u64, u64)>, faults: &[Fault]) {
    about.iter().for_each(output::line);
    let cells: Vec<Vec<String>> = rows
        .iter()
        .map(|r| {
            let shape = r.shape.iter().map(usize::to_string).collect::<Vec<_>>().join("x");
            let bits = format!("{:.4}", r.bits_per_weight());
            vec![printable(&r.name), r.kind.clone(), shape, r.bytes.to_string(), bits]
        })
        .collect();
    output::line(dsq_eval::table(&["tensor", "type", "shape", "bytes", "bits/weight"], &cells).trim_end());
    let mut cells: Vec<Vec<String>> = kinds
        .iter()
        .map(|(kind, (tensors, weights, bytes))| {
            let bits = format!("{:.4}", bits(*bytes, *weights));
            vec![kind.clone(), tensors.to_string(), weights.to_string(), bytes.to_string(), bits]
        })
        .collect();
    let (weights, bytes) = total(kinds);
    let all = format!("{:.4}", bits(bytes, weights));
    cells.push(vec!["all".into(), rows.len().to_string(), weights.to_string(), bytes.to_string(), all]);
    output::line("");
    output::line(dsq_eval::table(&["type", "tensors", "weights", "bytes", "bits/weight"], &cells).trim_end());
    output::line("");
    for fault in faults {
        output::line(format!("{}: {fault}", severity_name(fault.severity)));
        if let Some(hint) = &fault.hint {
            output::line(format!("hint: {hint}"));
        }
    }
    let found = faults.iter().filter(|f| f.severity > Severity::Note).count();
    output::line(match found {
        0 => "no faults found".to_owned(),
        1 => "1 fault found".to_owned(),
        n => format!("{n} faults found"),
    });
}

/// The grids of the KV cache, layer by layer (opening the model has checked them).
fn kv_grids(ckpt: &Checkpoint) -> Vec<KvGrid> {
    (0..).map_while(|i| ckpt.kv_grid(i).ok().flatten()).collect()
}

/// `KV cache: INT8, one scale for the keys and one for the values of a layer; keys 0.01 to 0.3, values 0.002 to 0.1`.
fn describe_cache(ckpt: &Checkpoint) -> Option<String> {
    let name = ckpt.kv_cache()?.qtype.name();
    let grids = kv_grids(ckpt);
    let range = |of: fn(&KvGrid) -> f32| {
        let (lo, hi) = grids.iter().map(of).fold((f32::MAX, 0.0f32), |(lo, hi), s| (lo.min(s), hi.max(s)));
        format!("{lo:.3e} to {hi:.3e}")
    };
    let (k, v) = (range(|g| g.k.scale), range(|g| g.v.scale));
    Some(format!("KV cache: {name}, a scale for the keys ({k}) and one for the values ({v}) of each layer"))
}

/// `, rotary scaling yarn`.
fn rope_name(scaling: RopeScaling) -> &'static str {
    match scaling {
        RopeScaling::Linear { .. } => ", rotary scaling linear",
        RopeScaling::Dynamic { .. } => ", rotary scaling dynamic",
        RopeScaling::Llama3 { .. } => ", rotary scaling llama3",
        RopeScaling::Yarn(_) => ", rotary scaling yarn",
    }
}

/// `, windows of 4096 in 28 layers`.
fn describe_windows(c: &LlamaConfig) -> String {
    let mut windows = c.windows.iter().flatten();
    let Some(first) = windows.next() else { return String::new() };
    format!(", windows of {first} in {} layers", 1 + windows.count())
}

/// `heads 4/2 of 16`, or `4 heads of 24+8, values 16, latents 32`.
fn describe_heads(c: &LlamaConfig) -> String {
    let heads = c.num_attention_heads;
    let Some(a) = &c.latent else { return format!("heads {heads}/{} of {}", c.num_key_value_heads, c.head_dim) };
    let q = a.q_rank.map(|rank| format!(", of queries {rank}")).unwrap_or_default();
    format!("{heads} heads of {}+{}, values {}, latents {}{q}", a.nope, a.rope, a.value, a.kv_rank)
}

/// `, 8 experts of 48 (2 a token, 1 shared) in 2 layers`.
fn describe_experts(c: &LlamaConfig) -> String {
    let Some(e) = &c.experts else { return String::new() };
    let layers = (0..c.num_hidden_layers).filter(|&i| c.experts_of(i).is_some()).count();
    let shared = if e.shared > 0 { format!(", {} shared", e.shared) } else { String::new() };
    format!(", {} experts of {} ({} a token{shared}) in {layers} layers", e.count, e.width, e.routing.per_token)
}

fn describe(config: &ModelConfig) -> String {
    match config {
        ModelConfig::Llama(c) => format!(
            "{}: {} layers, hidden {}, ffn {}, {}{}, vocabulary {}, context {}{}{}{}",
            c.model_type,
            c.num_hidden_layers,
            c.hidden_size,
            c.intermediate_size,
            describe_heads(c),
            describe_experts(c),
            c.vocab_size,
            c.max_position_embeddings,
            c.rope_scaling.map_or("", rope_name),
            describe_windows(c),
            if c.tie_word_embeddings { ", tied embeddings" } else { "" },
        ),
        ModelConfig::Image(c) => format!(
            "{}: {}x{} images, {} layers, {} classes, batch norm {}{}",
            c.title(),
            c.preparation.size[0],
            c.preparation.size[1],
            c.layers().len(),
            c.num_classes,
            if c.batch_norm { "as stored" } else { "folded" },
            if c.channel_clip { ", channels equalised" } else { "" },
        ),
        ModelConfig::ResNet(c) => format!(
            "residual network: {}x{}x{} images, stages {:?} of {} blocks, {} classes",
            c.in_channels, c.image_size, c.image_size, c.channels, c.blocks_per_stage, c.num_classes
        ),
    }
}
