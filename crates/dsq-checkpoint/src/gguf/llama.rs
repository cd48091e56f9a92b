//! What the `llama` architecture's keys and tensor names mean in Hugging Face terms: the config, the name of every tensor,
//! its shape, and the row order of the query and key projections. Not the reading of weights.

use super::header::TensorEntry;
use super::value::{Metadata, Value};
use crate::error::printable;
use crate::{CheckpointError, LlamaConfig};
use std::collections::HashMap;

/// A tensor under its Hugging Face name.
#[derive(Debug, Clone)]
pub(crate) struct MappedTensor {
    /// Hugging Face name.
    pub(crate) name: String,
    /// Index in the file's tensor table.
    pub(crate) index: usize,
    /// Shape in Hugging Face order: `[out, in]`, or `[d]` for a norm.
    pub(crate) shape: Vec<usize>,
    /// Heads whose rows llama.cpp stores interleaved (query and key projections), to be undone on reading.
    pub(crate) interleaved_heads: Option<usize>,
}

/// Largest size that is taken from a key; products of two stay far inside u64.
const MAX_SIZE: u64 = 1 << 30;

/// Tensors per layer: nine.
const LAYER_TENSORS: u64 = 9;

/// Keys of the architecture that say nothing about what the model computes, or repeat what is checked elsewhere.
const WITHOUT_MEANING: [&str; 3] =
    ["tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"];

/// The row of the Hugging Face tensor that row `r` of the file holds.
///
/// llama.cpp rotates neighbouring pairs, Hugging Face pairs half a head apart, so `convert_hf_to_gguf.py` stores the rows of a
/// head of width `d` in the order 0, d/2, 1, d/2 + 1, ...: `reshape(heads, 2, d/2, in).swap(1, 2)`.
pub(crate) fn original_row(r: usize, head_dim: usize) -> usize {
    let (head, within) = (r / head_dim, r % head_dim);
    head * head_dim + (within % 2) * (head_dim / 2) + within / 2
}

/// Reads the keys of a `llama` model, `prefix` being `general.architecture`.
struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'a str,
    asked: Vec<String>,
}

impl Keys<'_> {
    fn key(&mut self, name: &str) -> String {
        let key = format!("{}.{name}", self.prefix);
        self.asked.push(key.clone());
        key
    }

    fn size(&mut self, name: &str) -> Result<Option<usize>, CheckpointError> {
        let key = self.key(name);
        match self.metadata.unsigned(&key)? {
            Some(n) if (1..=MAX_SIZE).contains(&n) => Ok(Some(n as usize)),
            Some(n) => Err(self.metadata.invalid(&key, format!("expected a size from 1 to {MAX_SIZE}, got {n}"))),
            None => Ok(None),
        }
    }

    fn required_size(&mut self, name: &str) -> Result<usize, CheckpointError> {
        let found = self.size(name)?;
        found.ok_or_else(|| self.metadata.missing(&format!("{}.{name}", self.prefix), "a UINT32"))
    }

    fn float(&mut self, name: &str) -> Result<Option<f32>, CheckpointError> {
        let key = self.key(name);
        self.metadata.float(&key)
    }

    /// Accepts a key only when it is absent or has one of these values.
    fn only(&mut self, name: &str, allowed: &[Value], why: &str) -> Result<(), CheckpointError> {
        let key = self.key(name);
        match self.metadata.get(&key) {
            Some(v) if !allowed.contains(v) => {
                Err(self.metadata.wrong_type(&key, &format!("{} ({why})", allowed[0].describe()), v))
            }
            _ => Ok(()),
        }
    }

    /// Refuses the first key of the architecture that nobody asked for.
    fn refuse_the_rest(&self) -> Result<(), CheckpointError> {
        let start = format!("{}.", self.prefix);
        for key in self.metadata.keys() {
            let Some(name) = key.strip_prefix(&start) else { continue };
            if !self.asked.iter().any(|asked| asked == key) && !WITHOUT_MEANING.contains(&name) {
                return Err(self
                    .metadata
                    .invalid(key, "dsq does not know this key; expected only keys that it honours"));
            }
        }
        Ok(())
    }
}

/// The config of the model, from its keys and from the presence of an output matrix.
///
/// # Errors
/// [`CheckpointError::Invalid`] naming the key that is missing, of another type, or not supported.
pub(crate) fn config(metadata: &Metadata, tensors: &[TensorEntry]) -> Result<LlamaConfig, CheckpointError> {
    let arch = "general.architecture";
    let prefix = metadata.string(arch)?.ok_or_else(|| metadata.missing(arch, "\"llama\""))?;
    if prefix != "llama" {
        return Err(metadata.invalid(arch, format!("expected \"llama\", got {:?}", printable(prefix))));
    }
    let kind = metadata.string("general.type")?.unwrap_or("model");
    if kind != "model" {
        return Err(metadata.invalid("general.type", format!("expected \"model\", got {:?}", printable(kind))));
    }
    refuse_split(metadata)?;
    match metadata.unsigned("general.quantization_version")? {
        None | Some(2) => {}
        Some(n) => return Err(metadata.invalid("general.quantization_version", format!("expected 2, got {n}"))),
    }
    let mut keys = Keys { metadata, prefix, asked: Vec::new() };
    let hidden_size = keys.required_size("embedding_length")?;
    let num_hidden_layers = keys.required_size("block_count")?;
    let intermediate_size = keys.required_size("feed_forward_length")?;
    let num_attention_heads = keys.required_size("attention.head_count")?;
    let num_key_value_heads = keys.size("attention.head_count_kv")?.unwrap_or(num_attention_heads);
    let max_position_embeddings = keys.required_size("context_length")?;
    let rows = vocab_rows(&mut keys, tensors)?;
    // The layers are listed below; their number must be backed by tensors first.
    let room = (tensors.len() as u64).saturating_sub(2) / LAYER_TENSORS;
    if num_hidden_layers as u64 > room {
        let problem =
            format!("expected at most {room} layers for the file's {} tensors, got {num_hidden_layers}", tensors.len());
        return Err(metadata.invalid("llama.block_count", problem));
    }
    if !num_attention_heads.is_multiple_of(num_key_value_heads) {
        let problem = format!("expected a divisor of head_count = {num_attention_heads}, got {num_key_value_heads}");
        return Err(metadata.invalid("llama.attention.head_count_kv", problem));
    }
    let head_dim = head_dim(&mut keys, hidden_size, num_attention_heads)?;
    let key = "attention.layer_norm_rms_epsilon";
    let eps = keys.float(key)?.ok_or_else(|| metadata.missing(&format!("llama.{key}"), "a FLOAT32"))?;
    if !(eps.is_finite() && eps > 0.0) {
        return Err(metadata.invalid(&format!("llama.{key}"), format!("expected a small positive number, got {eps}")));
    }
    let rope_theta = keys.float("rope.freq_base")?.unwrap_or(10000.0);
    if !(rope_theta.is_finite() && rope_theta > 0.0) {
        return Err(metadata.invalid("llama.rope.freq_base", format!("expected a positive number, got {rope_theta}")));
    }
    refuse_variants(&mut keys)?;
    keys.refuse_the_rest()?;
    let ids = SpecialIds::read(metadata, rows)?;
    Ok(LlamaConfig {
        model_type: "llama".into(),
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        vocab_size: rows,
        max_position_embeddings,
        rms_norm_eps: eps,
        rope_theta,
        rope_scaling: None,
        windows: Vec::new(),
        experts: None,
        latent: None,
        biases: Default::default(),
        tie_word_embeddings: !tensors.iter().any(|t| t.name == "output.weight"),
        bos_token_id: ids.bos,
        eos_token_ids: ids.eos,
        pad_token_id: ids.pad,
    })
}

/// The width of a head: `attention.key_length`, else hidden / heads; the whole of it must be rotated.
fn head_dim(keys: &mut Keys, hidden_size: usize, heads: usize) -> Result<usize, CheckpointError> {
    let metadata = keys.metadata;
    let head_dim = match keys.size("attention.key_length")? {
        Some(d) => d,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let problem = format!("expected a divisor of embedding_length = {hidden_size}, got {heads}");
            return Err(metadata.invalid("llama.attention.head_count", problem));
        }
    };
    if !head_dim.is_multiple_of(2) {
        let problem = format!("expected heads of an even width (rotary pairs), got {head_dim}");
        return Err(metadata.invalid("llama.attention.key_length", problem));
    }
    for (name, what) in
        [("attention.value_length", "values as wide as keys"), ("rope.dimension_count", "the whole head rotated")]
    {
        if let Some(d) = keys.size(name)?.filter(|d| *d != head_dim) {
            let problem = format!("expected {head_dim} ({what}), got {d}");
            return Err(metadata.invalid(&format!("llama.{name}"), problem));
        }
    }
    Ok(head_dim)
}

/// Refuses what would make the model compute something else than a plain Llama.
fn refuse_variants(keys: &mut Keys) -> Result<(), CheckpointError> {
    let zero = [Value::U32(0), Value::F32(0.0)];
    let one = [Value::F32(1.0), Value::F32(0.0)];
    let none = Value::String("none".into());
    keys.only("expert_count", &zero, "mixtures of experts are not supported")?;
    keys.only("expert_used_count", &zero, "mixtures of experts are not supported")?;
    keys.only("attention.sliding_window", &zero, "attention is full")?;
    keys.only("attention.causal", &[Value::Bool(true)], "attention is causal")?;
    keys.only("rope.scaling.type", &[none], "rotary scaling is not supported")?;
    // llama.cpp reads a factor even without a type (as linear scaling); 1 and 0 mean none.
    keys.only("rope.scaling.factor", &one, "rotary scaling is not supported")?;
    keys.only("rope.scale_linear", &one, "rotary scaling is not supported")?;
    keys.only("rope.scaling.attn_factor", &one[..1], "rotary scaling is not supported")
}

/// Rows of the embedding, held against `vocab_size`.
fn vocab_rows(keys: &mut Keys, tensors: &[TensorEntry]) -> Result<usize, CheckpointError> {
    let metadata = keys.metadata;
    let Some(embedding) = tensors.iter().find(|t| t.name == "token_embd.weight") else {
        return Err(metadata.invalid("token_embd.weight", "expected a tensor of that name, got none"));
    };
    let rows = embedding.ne.get(1).copied().unwrap_or(1);
    if rows > MAX_SIZE {
        return Err(metadata.invalid(&embedding.name, format!("expected at most {MAX_SIZE} rows, got {rows}")));
    }
    match keys.size("vocab_size")? {
        Some(n) if n as u64 != rows => {
            let problem = format!("expected {rows}, the rows of token_embd.weight, got {n}");
            Err(metadata.invalid("llama.vocab_size", problem))
        }
        _ => Ok(rows as usize),
    }
}

/// A model in several files is refused: each one alone is not a model.
fn refuse_split(metadata: &Metadata) -> Result<(), CheckpointError> {
    let key = "split.count";
    // `gguf-split` writes UINT16.
    let count = match metadata.get(key) {
        None => return Ok(()),
        Some(Value::U16(n)) => u64::from(*n),
        Some(_) => metadata.unsigned(key)?.unwrap_or(0),
    };
    if count <= 1 {
        return Ok(());
    }
    let error = metadata.invalid(key, format!("expected a model in one file, got one of {count} parts"));
    Err(error.with_hint("merge the parts with: llama-gguf-split --merge FIRST-PART OUTPUT"))
}

/// The ids of special tokens, each below the number of embedding rows.
pub(crate) struct SpecialIds {
    pub(crate) bos: Option<u32>,
    /// End of text, of a turn and of a message, without repetition, in this order.
    pub(crate) eos: Vec<u32>,
    pub(crate) unk: Option<u32>,
    pub(crate) pad: Option<u32>,
}

impl SpecialIds {
    pub(crate) fn read(metadata: &Metadata, rows: usize) -> Result<Self, CheckpointError> {
        let id = |name: &str| {
            let key = format!("tokenizer.ggml.{name}_token_id");
            match metadata.unsigned(&key)? {
                Some(n) if n < rows as u64 => Ok(Some(n as u32)),
                // llama.cpp's converters write 2^32 - 1 for "none".
                Some(n) if n == u64::from(u32::MAX) => Ok(None),
                Some(n) => Err(metadata.invalid(&key, format!("expected an id below {rows}, got {n}"))),
                None => Ok(None),
            }
        };
        let mut eos = Vec::new();
        for name in ["eos", "eot", "eom"] {
            if let Some(id) = id(name)?.filter(|id| !eos.contains(id)) {
                eos.push(id);
            }
        }
        Ok(Self { bos: id("bos")?, eos, unk: id("unknown")?, pad: id("padding")? })
    }
}

/// Every tensor of the file under its Hugging Face name, in file order; checks that the file holds exactly the tensors and
/// shapes that the config asks for.
///
/// # Errors
/// [`CheckpointError::Invalid`] naming the first ten differences.
pub(crate) fn map_tensors(
    metadata: &Metadata,
    config: &LlamaConfig,
    tensors: &[TensorEntry],
) -> Result<Vec<MappedTensor>, CheckpointError> {
    let mut expected: HashMap<String, MappedTensor> = expected_tensors(config).into_iter().collect();
    let (mut mapped, mut faults) = (Vec::with_capacity(tensors.len()), Vec::new());
    for (index, tensor) in tensors.iter().enumerate() {
        let name = printable(&tensor.name);
        let Some(want) = expected.remove(&tensor.name) else {
            let why = if tensor.name.starts_with("rope_freqs") { " (rotary scaling is not supported)" } else { "" };
            faults.push(format!("{name}: expected no tensor of that name{why}"));
            continue;
        };
        let found: Vec<u64> = tensor.ne.iter().rev().copied().collect();
        if !found.iter().copied().eq(want.shape.iter().map(|d| *d as u64)) {
            faults.push(format!("{name}: expected the shape {:?}, got {found:?}", want.shape));
        }
        mapped.push(MappedTensor { index, ..want });
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

/// The tensors of a config with their names in the file, in the order in which dsq writes them.
pub(crate) fn expected_tensors(c: &LlamaConfig) -> Vec<(String, MappedTensor)> {
    let (d, ffn) = (c.hidden_size, c.intermediate_size);
    let (q, kv) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
    let mut out = Vec::new();
    let mut add = |file: String, name: String, shape: Vec<usize>, interleaved_heads: Option<usize>| {
        out.push((file, MappedTensor { name, index: 0, shape, interleaved_heads }));
    };
    add("token_embd.weight".into(), "model.embed_tokens.weight".into(), vec![c.vocab_size, d], None);
    add("output_norm.weight".into(), "model.norm.weight".into(), vec![d], None);
    if !c.tie_word_embeddings {
        add("output.weight".into(), "lm_head.weight".into(), vec![c.vocab_size, d], None);
    }
    for i in 0..c.num_hidden_layers {
        let mut part = |file: &str, name: &str, shape: Vec<usize>, heads: Option<usize>| {
            add(format!("blk.{i}.{file}.weight"), format!("model.layers.{i}.{name}.weight"), shape, heads);
        };
        part("attn_norm", "input_layernorm", vec![d], None);
        part("attn_q", "self_attn.q_proj", vec![q, d], Some(c.num_attention_heads));
        part("attn_k", "self_attn.k_proj", vec![kv, d], Some(c.num_key_value_heads));
        part("attn_v", "self_attn.v_proj", vec![kv, d], None);
        part("attn_output", "self_attn.o_proj", vec![d, q], None);
        part("ffn_norm", "post_attention_layernorm", vec![d], None);
        part("ffn_gate", "mlp.gate_proj", vec![ffn, d], None);
        part("ffn_up", "mlp.up_proj", vec![ffn, d], None);
        part("ffn_down", "mlp.down_proj", vec![d, ffn], None);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::original_row;

    #[test]
    fn c035_rows_of_each_head_are_interleaved_halves() {
        // Two kv heads of width 4: the file's row r holds the original row listed here (formats.md section 5).
        let order: Vec<_> = (0..8).map(|r| original_row(r, 4)).collect();
        assert_eq!(order, [0, 2, 1, 3, 4, 6, 5, 7]);
    }
}
