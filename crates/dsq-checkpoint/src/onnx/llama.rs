//! The graph of a Llama-like language model: what `dsq-runtime` computes, in standard operators and `MatMulNBits`. Not the weights
//! (see `source.rs`), no grids of inputs and no KV cache in codes.
//!
//! Inputs and outputs are called as Hugging Face's optimum calls them: `input_ids` INT64 `[batch, sequence]`, `attention_mask` INT64
//! `[batch, past + sequence]` (1 for a token, 0 for padding), `past_key_values.N.key` and `.value` FLOAT `[batch, kv heads, past,
//! head_dim]` (`past` may be 0); `logits` FLOAT `[batch, sequence, vocab]`, `present.N.key` and `.value` with what was given appended.
//!
//! Positions count the ones of the mask, so that a row padded on the left begins at 0. Cosines and sines are a table of the
//! model's whole context, the one that the runtime uses; a position beyond it is an error of the runtime that gathers.

use super::graph::{Declared, Dim, Graph, Make};
use super::proto::{AttributeProto, DataType};
use super::source::{Source, cast, matmul};
use crate::{CheckpointError, LlamaConfig};

/// Names of the dimensions that change from run to run.
const BATCH: Dim = Dim::Named("batch_size");
const SEQUENCE: Dim = Dim::Named("sequence_length");
const PAST: Dim = Dim::Named("past_sequence_length");
const TOTAL: Dim = Dim::Named("total_sequence_length");

/// What every layer reads beside the hidden states.
struct Shared {
    /// Cosines and sines of the positions, `[batch, sequence, 1, head_dim / 2]`.
    rotary: [String; 2],
    /// For each window (`None`: all positions) which keys a query sees, `[batch, 1, 1, sequence, total]`.
    masks: Vec<(Option<usize>, String)>,
}

/// The graph of the model.
///
/// # Errors
/// [`CheckpointError::Usage`] for a layer that has no operator; errors of reading.
pub(super) fn build(source: &Source, c: &LlamaConfig) -> Result<Graph, CheckpointError> {
    let mut g = Graph::default();
    let cache = [BATCH, Dim::Fixed(c.num_key_value_heads), PAST, Dim::Fixed(c.head_dim)];
    let present = [BATCH, Dim::Fixed(c.num_key_value_heads), TOTAL, Dim::Fixed(c.head_dim)];
    g.input("input_ids", DataType::Int64, &[BATCH, SEQUENCE]);
    g.input("attention_mask", DataType::Int64, &[BATCH, TOTAL]);
    g.output("logits", DataType::Float, &[BATCH, SEQUENCE, Dim::Fixed(c.vocab_size)]);
    for i in 0..c.num_hidden_layers {
        for part in ["key", "value"] {
            g.input(&format!("past_key_values.{i}.{part}"), DataType::Float, &cache);
            g.output(&format!("present.{i}.{part}"), DataType::Float, &present);
        }
    }
    let shared = shared(&mut g, c);
    let embedding = "model.embed_tokens.weight";
    let ty = source.declare(&mut g, embedding, &[c.vocab_size, c.hidden_size]);
    // Rows are cast as they are taken, not the whole table.
    let rows = g.op("Gather", &[embedding, "input_ids"], "model.embed_tokens/Gather");
    let mut hidden = cast(&mut g, &rows, ty);
    for i in 0..c.num_hidden_layers {
        hidden = layer(&mut g, source, c, i, &hidden, &shared)?;
    }
    let normed = rms_norm(&mut g, source, c, "model.norm", &hidden, c.hidden_size);
    let logits = if c.tie_word_embeddings && !source.ckpt.is_quantized("lm_head") {
        let w = cast(&mut g, embedding, ty);
        matmul(&mut g, "lm_head", &normed, &w)
    } else {
        source.linear(&mut g, "lm_head", &normed)?
    };
    g.op("Identity", &[&logits], "logits");
    Ok(g)
}

/// Positions, their cosines and sines, and masks.
fn shared(g: &mut Graph, c: &LlamaConfig) -> Shared {
    let dimension_1 = || vec![AttributeProto::int("start", 1), AttributeProto::int("end", 2)];
    let length = g.op_with("Shape", &["input_ids"], "sequence", dimension_1());
    let total = g.op_with("Shape", &["attention_mask"], "total", dimension_1());
    let past = g.op("Sub", &[&total, &length], "past");
    // The ones of the mask before a token are its position.
    let (zero, one, axis) = (g.int(0), g.int(1), g.ints(&[1]));
    let sum = g.op("CumSum", &["attention_mask", &one], "mask/CumSum");
    let counted = g.op("Sub", &[&sum, &one], "mask/Sub");
    let counted = g.op("Max", &[&counted, &zero], "mask/Max");
    let positions = g.op("Slice", &[&counted, &past, &total, &axis], "positions");
    let half = c.head_dim / 2;
    let rotary = ["cos", "sin"].map(|name| {
        // In f32 always: the runtime's numbers.
        let [cos, sin] = c.rotary().table(c.max_position_embeddings);
        let table = if name == "cos" { cos } else { sin };
        let bytes = table.iter().flat_map(|v| v.to_le_bytes()).collect();
        let dims = [c.max_position_embeddings, half];
        let initializer = format!("rotary.{name}");
        g.unit(vec![Declared::new(&initializer, &dims, DataType::Float)], Make::Constant(bytes));
        let rows = g.op("Gather", &[&initializer, &positions], format!("{initializer}/Gather"));
        let axis = g.ints(&[2]);
        g.op("Unsqueeze", &[&rows, &axis], format!("{initializer}/Unsqueeze"))
    });
    // Index of a key against index of a query, both in the cache.
    let axes = g.ints(&[0]);
    let [from, to] =
        [(&past, "past/Squeeze"), (&total, "total/Squeeze")].map(|(x, out)| g.op("Squeeze", &[x, &axes], out));
    let rows = g.op("Range", &[&from, &to, &one], "queries/Range");
    let rows = g.op("Unsqueeze", &[&rows, &axis], "queries");
    let keys = g.op("Range", &[&zero, &to, &one], "keys");
    let causal = g.op("LessOrEqual", &[&keys, &rows], "mask/LessOrEqual");
    let to_bool = vec![AttributeProto::int("to", DataType::Bool as i64)];
    let given = g.op_with("Cast", &["attention_mask"], "mask/Cast", to_bool);
    let axes = g.ints(&[1, 2, 3]);
    let given = g.op("Unsqueeze", &[&given, &axes], "mask/Unsqueeze");
    let full = g.op("And", &[&causal, &given], "mask");
    let mut masks: Vec<(Option<usize>, String)> = Vec::new();
    for i in 0..c.num_hidden_layers {
        let window = c.window(i);
        if masks.iter().any(|(w, _)| *w == window) {
            continue;
        }
        let mask = match window {
            None => full.clone(),
            Some(w) => {
                // Its own and the w - 1 positions before it.
                let width = g.int(w as i64);
                let first = g.op("Sub", &[&rows, &width], format!("window.{w}/Sub"));
                let near = g.op("Greater", &[&keys, &first], format!("window.{w}/Greater"));
                g.op("And", &[&full, &near], format!("window.{w}"))
            }
        };
        masks.push((window, mask));
    }
    Shared { rotary, masks }
}

fn layer(
    g: &mut Graph,
    source: &Source,
    c: &LlamaConfig,
    i: usize,
    hidden: &str,
    shared: &Shared,
) -> Result<String, CheckpointError> {
    let at = |part: &str| format!("model.layers.{i}.{part}");
    let d = c.head_dim;
    let (heads, kv) = (c.num_attention_heads, c.num_key_value_heads);
    let normed = rms_norm(g, source, c, &at("input_layernorm"), hidden, c.hidden_size);
    let split = |g: &mut Graph, part: &str, heads: usize| -> Result<String, CheckpointError> {
        let module = at(&format!("self_attn.{part}"));
        let y = source.linear(g, &module, &normed)?;
        let shape = g.ints(&[0, 0, heads as i64, d as i64]);
        Ok(g.op("Reshape", &[&y, &shape], format!("{module}/Reshape")))
    };
    let (mut q, mut k, v) = (split(g, "q_proj", heads)?, split(g, "k_proj", kv)?, split(g, "v_proj", kv)?);
    if c.has_head_norms() {
        q = rms_norm(g, source, c, &at("self_attn.q_norm"), &q, d);
        k = rms_norm(g, source, c, &at("self_attn.k_norm"), &k, d);
    }
    let q = rotate(g, &at("self_attn.q"), &q, &shared.rotary);
    let k = rotate(g, &at("self_attn.k"), &k, &shared.rotary);
    // Keys and values: [batch, kv heads, total, head_dim].
    let append = |g: &mut Graph, x: &str, name: &str| {
        let perm = vec![AttributeProto::ints("perm", &[0, 2, 1, 3])];
        let new = g.op_with("Transpose", &[x], at(&format!("self_attn.{name}/Transpose")), perm);
        let past = format!("past_key_values.{i}.{name}");
        g.op_with("Concat", &[&past, &new], format!("present.{i}.{name}"), vec![AttributeProto::int("axis", 2)])
    };
    let (keys, values) = (append(g, &k, "key"), append(g, &v, "value"));
    // Heads that share keys and values are one more dimension: [batch, kv heads, heads of each, sequence, head_dim].
    let (group, axes) = (heads / kv, g.ints(&[2]));
    let shape = g.ints(&[0, 0, kv as i64, group as i64, d as i64]);
    let q = g.op("Reshape", &[&q, &shape], at("self_attn.q/Groups"));
    let perm = vec![AttributeProto::ints("perm", &[0, 2, 3, 1, 4])];
    let q = g.op_with("Transpose", &[&q], at("self_attn.q/Transpose"), perm);
    let perm = vec![AttributeProto::ints("perm", &[0, 1, 3, 2])];
    let keys = g.op_with("Transpose", &[&keys], at("self_attn.keys/Transpose"), perm);
    let keys = g.op("Unsqueeze", &[&keys, &axes], at("self_attn.keys"));
    let values = g.op("Unsqueeze", &[&values, &axes], at("self_attn.values"));
    let scores = g.op("MatMul", &[&q, &keys], at("self_attn.scores/MatMul"));
    let scale = g.float("const.attention_scale", 1.0 / (d as f32).sqrt());
    let scores = g.op("Mul", &[&scores, &scale], at("self_attn.scores/Mul"));
    let window = c.window(i);
    let mask = shared.masks.iter().find(|(w, _)| *w == window).map_or("mask", |(_, name)| name.as_str());
    // Not -infinity: a query that is padding sees nothing, and would become NaN.
    let lowest = g.float("const.lowest", f32::MIN);
    let scores = g.op("Where", &[mask, &scores, &lowest], at("self_attn.scores/Where"));
    let last = vec![AttributeProto::int("axis", -1)];
    let weights = g.op_with("Softmax", &[&scores], at("self_attn.scores/Softmax"), last);
    let mixed = g.op("MatMul", &[&weights, &values], at("self_attn.mixed/MatMul"));
    let perm = vec![AttributeProto::ints("perm", &[0, 3, 1, 2, 4])];
    let mixed = g.op_with("Transpose", &[&mixed], at("self_attn.mixed/Transpose"), perm);
    let shape = g.ints(&[0, 0, (heads * d) as i64]);
    let mixed = g.op("Reshape", &[&mixed, &shape], at("self_attn.mixed"));
    let o = source.linear(g, &at("self_attn.o_proj"), &mixed)?;
    let hidden = g.op("Add", &[hidden, &o], at("self_attn/Add"));
    let normed = rms_norm(g, source, c, &at("post_attention_layernorm"), &hidden, c.hidden_size);
    let gate = source.linear(g, &at("mlp.gate_proj"), &normed)?;
    let up = source.linear(g, &at("mlp.up_proj"), &normed)?;
    let sigmoid = g.op("Sigmoid", &[&gate], at("mlp/Sigmoid"));
    let silu = g.op("Mul", &[&gate, &sigmoid], at("mlp/Silu"));
    let ffn = g.op("Mul", &[&silu, &up], at("mlp/Mul"));
    let down = source.linear(g, &at("mlp.down_proj"), &ffn)?;
    Ok(g.op("Add", &[&hidden, &down], at("mlp/Add")))
}

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension, of `n` values, in the operators that onnxruntime makes one of.
fn rms_norm(g: &mut Graph, source: &Source, c: &LlamaConfig, module: &str, x: &str, n: usize) -> String {
    let weight = source.float(g, &format!("{module}.weight"), &[n]);
    let (two, eps, axes) = (g.float("const.two", 2.0), g.float("const.rms_norm_eps", c.rms_norm_eps), g.ints(&[-1]));
    let squares = g.op("Pow", &[x, &two], format!("{module}/Pow"));
    let mean = g.op_with(
        "ReduceMean",
        &[&squares, &axes],
        format!("{module}/ReduceMean"),
        vec![AttributeProto::int("keepdims", 1)],
    );
    let sum = g.op("Add", &[&mean, &eps], format!("{module}/Add"));
    let root = g.op("Sqrt", &[&sum], format!("{module}/Sqrt"));
    let normed = g.op("Div", &[x, &root], format!("{module}/Div"));
    g.op("Mul", &[&normed, &weight], module.to_owned())
}

/// Rotates the halves of every head of `x [batch, sequence, heads, head_dim]`.
fn rotate(g: &mut Graph, at: &str, x: &str, [cos, sin]: &[String; 2]) -> String {
    let halves = [format!("{at}/First"), format!("{at}/Second")];
    g.op_with(
        "Split",
        &[x],
        halves[0].clone(),
        vec![AttributeProto::int("axis", -1), AttributeProto::int("num_outputs", 2)],
    );
    if let Some(node) = g.nodes.last_mut() {
        node.output.push(halves[1].clone());
    }
    let [a, b] = &halves;
    let mut product = |x: &str, y: &str, name: &str| g.op("Mul", &[x, y], format!("{at}/{name}"));
    let [ac, bs, bc, as_] =
        [product(a, cos, "AC"), product(b, sin, "BS"), product(b, cos, "BC"), product(a, sin, "AS")];
    let first = g.op("Sub", &[&ac, &bs], format!("{at}/Sub"));
    let second = g.op("Add", &[&bc, &as_], format!("{at}/Add"));
    g.op_with("Concat", &[&first, &second], format!("{at}/Concat"), vec![AttributeProto::int("axis", -1)])
}
