//! Which tensors a GGUF file of a model has, and what each of them holds of the model's tensors under their Hugging Face names:
//! one as it is, one with its rows in another order, the same layer of all experts, or one part of what latent attention makes
//! keys and values with. Not the keys (see `arch.rs`), nor bytes.

use super::arch::Arch;
use super::header::TensorEntry;
use super::value::Metadata;
use crate::error::printable;
use crate::{CheckpointError, Latent, LlamaConfig};
use std::collections::HashMap;

/// The tensor that rotary frequencies are divided by, `[head_dim / 2]`.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// How a tensor of the file lies beside the tensors that it holds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Order {
    /// One tensor, or several of one shape one behind the other.
    AsIs,
    /// A query or key projection of the `llama` architecture: heads of so many rows, interleaved (see [`original_row`]).
    Interleaved(usize),
    /// Of `kv_b_proj`, whose heads are rows for keys and then rows for values: the first ones, `[heads, latent, nope]`, those of
    /// each head transposed.
    Keys(Latent),
    /// The others, `[heads, value, latent]`.
    Values(Latent),
    /// What follows from the config: [`ROPE_FACTORS`].
    Computed,
}

/// A tensor of a file.
#[derive(Debug, Clone)]
pub(crate) struct FileTensor {
    /// Its name there.
    pub(crate) file: String,
    /// Its shape there, outermost first.
    pub(crate) shape: Vec<usize>,
    /// The Hugging Face names of what it holds, in order.
    pub(crate) parts: Vec<String>,
    /// The shape that each of them has.
    pub(crate) part_shape: Vec<usize>,
    /// How it holds them.
    pub(crate) order: Order,
}

/// What a file leaves open where its config says the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    /// `kv_b_proj` is in two tensors, as llama.cpp's converter writes it since April 2025; before, it was one.
    pub(crate) split_kv_b: bool,
    /// There is a tensor [`ROPE_FACTORS`].
    pub(crate) rope_factors: bool,
}

/// The row of the Hugging Face tensor that row `r` of the file holds.
///
/// llama.cpp rotates neighbouring pairs in the `llama` architecture, Hugging Face pairs half a head apart, so
/// `convert_hf_to_gguf.py` stores the rows of a head of width `d` in the order 0, d/2, 1, d/2 + 1, ...:
/// `reshape(heads, 2, d/2, in).swap(1, 2)`.
pub(crate) fn original_row(r: usize, head_dim: usize) -> usize {
    let (head, within) = (r / head_dim, r % head_dim);
    head * head_dim + (within % 2) * (head_dim / 2) + within / 2
}

impl Order {
    /// Where element `i` of a tensor of this order lies in `kv_b_proj`, whose rows have `rank` values; none for other orders.
    fn place(self, i: usize, rank: usize) -> Option<usize> {
        let (head, row, column) = match self {
            Order::Keys(a) => (i / (rank * a.nope), i % a.nope, i / a.nope % rank),
            Order::Values(a) => (i / (a.value * rank), a.nope + i / rank % a.value, i % rank),
            _ => return None,
        };
        let (Order::Keys(a) | Order::Values(a)) = self else { return None };
        Some((head * (a.nope + a.value) + row) * rank + column)
    }
}

impl FileTensor {
    /// Whether it holds a part of `kv_b_proj`.
    pub(crate) fn is_half(&self) -> bool {
        matches!(self.order, Order::Keys(_) | Order::Values(_))
    }

    /// Width of a row in the file; 0: it is a list.
    pub(crate) fn columns(&self) -> usize {
        if self.shape.len() < 2 { 0 } else { self.shape[self.shape.len() - 1] }
    }

    /// Of the values of a tensor that it holds those that it stores, in the order of the file but for interleaved rows.
    pub(crate) fn take(&self, values: Vec<f32>) -> Vec<f32> {
        if !self.is_half() {
            return values;
        }
        let (rank, len) = (self.part_shape[1], self.shape.iter().product());
        (0..len).map(|i| values[self.order.place(i, rank).unwrap_or(i)]).collect()
    }

    /// The way back of [`FileTensor::take`], for a half: puts what is `stored` into its places of the whole.
    pub(crate) fn put(&self, stored: &[f32], whole: &mut [f32]) {
        for (i, value) in stored.iter().enumerate() {
            whole[self.order.place(i, self.part_shape[1]).unwrap_or(i)] = *value;
        }
    }
}

/// The tensors of a file in the order in which dsq writes them.
pub(crate) fn file_tensors(c: &LlamaConfig, layout: Layout) -> Vec<FileTensor> {
    let d = c.hidden_size;
    let mut out = Vec::new();
    let mut add = |file: String, name: String, shape: Vec<usize>, order: Order| {
        out.push(FileTensor { file, shape: shape.clone(), parts: vec![name], part_shape: shape, order });
    };
    add("token_embd.weight".into(), "model.embed_tokens.weight".into(), vec![c.vocab_size, d], Order::AsIs);
    add("output_norm.weight".into(), "model.norm.weight".into(), vec![d], Order::AsIs);
    if !c.tie_word_embeddings {
        add("output.weight".into(), "lm_head.weight".into(), vec![c.vocab_size, d], Order::AsIs);
    }
    if layout.rope_factors {
        let (file, shape) = (ROPE_FACTORS.to_owned(), vec![c.head_dim / 2]);
        out.push(FileTensor { file, shape, parts: vec![], part_shape: vec![], order: Order::Computed });
    }
    for i in 0..c.num_hidden_layers {
        layer(c, layout, i, &mut out);
    }
    out
}

fn layer(c: &LlamaConfig, layout: Layout, i: usize, out: &mut Vec<FileTensor>) {
    let d = c.hidden_size;
    let norm = |file: &str, name: &str, width: usize| {
        let (file, name) = (format!("blk.{i}.{file}.weight"), format!("model.layers.{i}.{name}.weight"));
        FileTensor { file, shape: vec![width], parts: vec![name], part_shape: vec![width], order: Order::AsIs }
    };
    let interleaved = Arch::of(c) == Arch::Llama;
    out.push(norm("attn_norm", "input_layernorm", d));
    let mut norms = Vec::new();
    if c.has_head_norms() {
        norms.push(norm("attn_q_norm", "self_attn.q_norm", c.head_dim));
        norms.push(norm("attn_k_norm", "self_attn.k_norm", c.head_dim));
    }
    if let Some(a) = &c.latent {
        norms.extend(a.q_rank.map(|rank| norm("attn_q_a_norm", "self_attn.q_a_layernorm", rank)));
        norms.push(norm("attn_kv_a_norm", "self_attn.kv_a_layernorm", a.kv_rank));
    }
    norms.push(norm("ffn_norm", "post_attention_layernorm", d));
    let mut experts: Vec<(String, Vec<String>, Vec<usize>)> = Vec::new();
    for (part, n, k) in c.layer_linears(i) {
        if !part.starts_with("self_attn.") {
            out.append(&mut norms);
        }
        let name = format!("model.layers.{i}.{part}.weight");
        let end = part.rsplit('.').next().unwrap_or_default();
        let stem = match end {
            "q_proj" => "attn_q",
            "k_proj" => "attn_k",
            "v_proj" => "attn_v",
            "o_proj" => "attn_output",
            "q_a_proj" => "attn_q_a",
            "q_b_proj" => "attn_q_b",
            "kv_a_proj_with_mqa" => "attn_kv_a_mqa",
            "kv_b_proj" => "attn_kv_b",
            "gate_proj" | "w1" => "ffn_gate",
            "up_proj" | "w3" => "ffn_up",
            _ => "ffn_down",
        };
        if part.contains(".experts.") {
            let file = format!("blk.{i}.{stem}_exps.weight");
            match experts.iter_mut().find(|(f, ..)| *f == file) {
                Some((_, names, _)) => names.push(name),
                None => experts.push((file, vec![name], vec![n, k])),
            }
            continue;
        }
        let shared = if part.contains("shared_experts") { "_shexp" } else { "" };
        let file = format!("blk.{i}.{stem}{shared}.weight");
        let whole = |file: String, shape: Vec<usize>, order: Order| FileTensor {
            file,
            shape,
            parts: vec![name.clone()],
            part_shape: vec![n, k],
            order,
        };
        match (&c.latent, end) {
            (Some(a), "kv_b_proj") if layout.split_kv_b => {
                let heads = c.num_attention_heads;
                let (keys, values) = (vec![heads, a.kv_rank, a.nope], vec![heads, a.value, a.kv_rank]);
                out.push(whole(format!("blk.{i}.attn_k_b.weight"), keys, Order::Keys(*a)));
                out.push(whole(format!("blk.{i}.attn_v_b.weight"), values, Order::Values(*a)));
            }
            (None, "q_proj" | "k_proj") if interleaved => {
                out.push(whole(file, vec![n, k], Order::Interleaved(c.head_dim)));
            }
            _ => out.push(whole(file, vec![n, k], Order::AsIs)),
        }
        if c.has_bias(&part) {
            let (file, name) = (format!("blk.{i}.{stem}.bias"), format!("model.layers.{i}.{part}.bias"));
            out.push(FileTensor { file, shape: vec![n], parts: vec![name], part_shape: vec![n], order: Order::AsIs });
        }
    }
    for (file, parts, part_shape) in experts {
        let shape = [&[parts.len()], part_shape.as_slice()].concat();
        out.push(FileTensor { file, shape, parts, part_shape, order: Order::AsIs });
    }
    for (part, shape) in c.router_tensors(i) {
        let file = if part.ends_with(".weight") { "ffn_gate_inp.weight" } else { "exp_probs_b.bias" };
        let (file, parts) = (format!("blk.{i}.{file}"), vec![format!("model.layers.{i}.{part}")]);
        out.push(FileTensor { file, shape: shape.clone(), parts, part_shape: shape, order: Order::AsIs });
    }
}

/// Every tensor of the file with what it holds and its index in the file's table, in file order; checks that the file has exactly
/// the tensors and shapes that the config asks for.
///
/// # Errors
/// [`CheckpointError::Invalid`] naming the first ten differences.
pub(crate) fn map_tensors(
    metadata: &Metadata,
    config: &LlamaConfig,
    layout: Layout,
    tensors: &[TensorEntry],
) -> Result<Vec<(usize, FileTensor)>, CheckpointError> {
    let expected = file_tensors(config, layout);
    let mut expected: HashMap<String, FileTensor> = expected.into_iter().map(|t| (t.file.clone(), t)).collect();
    let (mut mapped, mut faults) = (Vec::with_capacity(tensors.len()), Vec::new());
    for (index, tensor) in tensors.iter().enumerate() {
        let name = printable(&tensor.name);
        let Some(want) = expected.remove(&tensor.name) else {
            faults.push(format!("{name}: expected no tensor of that name"));
            continue;
        };
        let found: Vec<u64> = tensor.ne.iter().rev().copied().collect();
        if !found.iter().copied().eq(want.shape.iter().map(|d| *d as u64)) {
            faults.push(format!("{name}: expected the shape {:?}, got {found:?}", want.shape));
        }
        mapped.push((index, want));
    }
    let mut absent: Vec<_> = expected.into_keys().map(|name| format!("{name}: expected a tensor, got none")).collect();
    absent.sort_unstable();
    faults.extend(absent);
    if faults.is_empty() {
        return Ok(mapped);
    }
    let more = if faults.len() > 10 { format!("; and {} more", faults.len() - 10) } else { String::new() };
    let problem = format!("the tensors do not fit the keys: {}{more}", faults[..faults.len().min(10)].join("; "));
    Err(metadata.invalid("tensors", problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c035_rows_of_each_head_are_interleaved_halves() {
        // Two kv heads of width 4: the file's row r holds the original row listed here (formats.md section 5).
        let order: Vec<_> = (0..8).map(|r| original_row(r, 4)).collect();
        assert_eq!(order, [0, 2, 1, 3, 4, 6, 5, 7]);
    }

    #[test]
    fn keys_and_values_of_latents_lie_as_the_converter_of_llama_cpp_puts_them() {
        // Two heads of two rows for keys and one for values, a latent of three: the whole is 0..18.
        let a = Latent { q_rank: None, kv_rank: 3, nope: 2, rope: 2, value: 1, interleaved: true, mtp_layers: 0 };
        let half = |order, shape: [usize; 3]| FileTensor {
            file: String::new(),
            shape: shape.to_vec(),
            parts: vec![String::new()],
            part_shape: vec![6, 3],
            order,
        };
        let [keys, values] = [half(Order::Keys(a), [2, 3, 2]), half(Order::Values(a), [2, 1, 3])];
        let whole: Vec<f32> = (0..18).map(|i| i as f32).collect();
        // view(2, 3, 3), split [2, 1] along rows, the first transposed.
        assert_eq!(keys.take(whole.clone()), [0., 3., 1., 4., 2., 5., 9., 12., 10., 13., 11., 14.]);
        assert_eq!(values.take(whole.clone()), [6., 7., 8., 15., 16., 17.]);
        let mut back = vec![0.0; 18];
        keys.put(&keys.take(whole.clone()), &mut back);
        values.put(&values.take(whole.clone()), &mut back);
        assert_eq!(back, whole);
    }
}
