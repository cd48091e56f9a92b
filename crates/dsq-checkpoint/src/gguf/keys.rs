//! The key-value pairs of a GGUF file that dsq writes: carried over from a GGUF source, or made from a config and the
//! tokenizer files of a folder (`vocabulary.rs`). Not their bytes (see `write.rs`).

use super::arch::{Arch, CONFIG, Unsaid};
use super::layout::Layout;
use super::mix::GgufType;
use super::value::{Metadata, Value};
use super::{GgufFile, rope, vocabulary};
use crate::config::short;
use crate::{Checkpoint, CheckpointError, Experts, LATENT_NORM_EPS, LlamaConfig, RopeScaling, Scores};
use std::path::Path;

/// `general.quantization_version`: the version of ggml's block formats.
const QUANTIZATION_VERSION: u32 = 2;
/// Keys of a source that say how its own file is laid out or was made.
const OF_THE_FILE: [&str; 1] = ["general.alignment"];
/// What a source's keys must begin with to be carried over, beside those of its architecture: not parts of a split file, nor the record of an importance matrix.
const CARRIED: [&str; 3] = ["general.", "tokenizer.", "dsq."];

/// The pairs of a file for `out`.
///
/// # Errors
/// [`CheckpointError::Usage`] naming what of the config llama.cpp has no place for, [`CheckpointError::Invalid`] what of the
/// tokenizer.
pub(crate) fn metadata(
    source: &Checkpoint,
    config: &LlamaConfig,
    layout: Layout,
    ty: GgufType,
    out: &Path,
) -> Result<Metadata, CheckpointError> {
    let mut metadata = Metadata::new(out);
    match source.gguf() {
        Some(file) => carry_over(file, &mut metadata),
        None => {
            let arch = Arch::of(config).name();
            let usage = |u: Unsaid| CheckpointError::usage(source.path(), u.field, u.problem);
            metadata.set("general.architecture", Value::String(arch.into()));
            metadata.set("general.type", Value::String("model".into()));
            for (name, value) in pairs(config, layout).map_err(usage)? {
                metadata.set(&format!("{arch}.{name}"), value);
            }
            if !say_all(config) {
                metadata.set(CONFIG, Value::String(config.to_json().to_string()));
            }
            vocabulary::add(source, config, &mut metadata)?;
        }
    }
    metadata.set("general.file_type", Value::U32(ty.file_type()));
    metadata.set("general.quantization_version", Value::U32(QUANTIZATION_VERSION));
    Ok(metadata)
}

fn carry_over(file: &GgufFile, metadata: &mut Metadata) {
    let arch = file.arch().name();
    for (key, value) in file.header.metadata.sorted() {
        let of_architecture = key.strip_prefix(arch).is_some_and(|rest| rest.starts_with('.'));
        if (of_architecture || CARRIED.iter().any(|start| key.starts_with(start))) && !OF_THE_FILE.contains(&key) {
            metadata.set(key, value.clone());
        }
    }
}

/// The keys of an architecture for a config, without `ARCHITECTURE.` in front.
///
/// # Errors
/// What llama.cpp has no key for, or would not honour.
pub(crate) fn pairs(c: &LlamaConfig, layout: Layout) -> Result<Vec<(&'static str, Value)>, Unsaid> {
    let arch = Arch::of(c);
    let refuse = |field: &'static str, problem: String| Err(Unsaid::new(field, problem));
    if c.rms_norm_eps <= 0.0 {
        let problem = format!("a GGUF file has a positive epsilon; expected more than 0, got {}", c.rms_norm_eps);
        return refuse("rms_norm_eps", problem);
    }
    if let Some(w) = (0..c.num_hidden_layers).filter_map(|i| c.window(i)).find(|w| *w < c.max_position_embeddings) {
        let (name, all) = (arch.name(), c.max_position_embeddings);
        return refuse(
            "sliding_window",
            format!(
                "llama.cpp has full attention in {name}; expected none, or at least max_position_embeddings = {all}, got {w}"
            ),
        );
    }
    let mut out = Vec::new();
    let mut size = |name: &'static str, n: usize| match u32::try_from(n) {
        Ok(n) => {
            out.push((name, Value::U32(n)));
            Ok(())
        }
        Err(_) => Err(Unsaid::new(name, format!("expected at most {}, got {n}", u32::MAX))),
    };
    size("block_count", c.num_hidden_layers)?;
    size("context_length", c.max_position_embeddings)?;
    size("embedding_length", c.hidden_size)?;
    size("feed_forward_length", c.intermediate_size)?;
    size("attention.head_count", c.num_attention_heads)?;
    size("rope.dimension_count", c.head_dim)?;
    size("vocab_size", c.vocab_size)?;
    match &c.latent {
        Some(a) => {
            size("attention.head_count_kv", if layout.split_kv_b { 1 } else { c.num_attention_heads })?;
            // llama.cpp asks for it but of models of some numbers of layers, where it takes it for 0.
            size("attention.q_lora_rank", a.q_rank.unwrap_or(0))?;
            size("attention.kv_lora_rank", a.kv_rank)?;
            let [keys, values] = if layout.split_kv_b { [a.kv_rank + a.rope, a.kv_rank] } else { [a.qk(), a.value] };
            size("attention.key_length", keys)?;
            size("attention.value_length", values)?;
            if layout.split_kv_b {
                size("attention.key_length_mla", a.qk())?;
                size("attention.value_length_mla", a.value)?;
            }
        }
        None => {
            size("attention.head_count_kv", c.num_key_value_heads)?;
            if c.head_dim * c.num_attention_heads != c.hidden_size {
                if arch == Arch::Qwen2 {
                    let (d, heads) = (c.head_dim, c.num_attention_heads);
                    let problem = format!(
                        "llama.cpp has heads of hidden_size / num_attention_heads in qwen2; expected {} / {heads}, got {d}",
                        c.hidden_size
                    );
                    return refuse("head_dim", problem);
                }
                size("attention.key_length", c.head_dim)?;
                size("attention.value_length", c.head_dim)?;
            }
        }
    }
    if let Some(e) = &c.experts {
        size("expert_count", e.count)?;
        size("expert_used_count", e.routing.per_token)?;
        if arch == Arch::Deepseek2 {
            size("expert_feed_forward_length", e.width)?;
            size("expert_shared_count", e.shared)?;
            size("leading_dense_block_count", e.first_layer)?;
            size("expert_gating_func", if e.routing.scores == Scores::Sigmoid { 2 } else { 1 })?;
            if let Some(g) = e.routing.groups.filter(|g| g.kept < g.count) {
                size("expert_group_count", g.count)?;
                size("expert_group_used_count", g.kept)?;
            }
            deepseek(c, e, &mut out)?;
        }
    }
    out.push(("attention.layer_norm_rms_epsilon", Value::F32(c.rms_norm_eps)));
    out.push(("rope.freq_base", Value::F32(c.rope_theta)));
    out.extend(rope::pairs(c, arch)?);
    Ok(out)
}

/// What llama.cpp's `deepseek2` would compute otherwise is refused; adds the other keys of its experts.
fn deepseek(c: &LlamaConfig, e: &Experts, out: &mut Vec<(&'static str, Value)>) -> Result<(), Unsaid> {
    let refuse = |field: &'static str, problem: String| Err(Unsaid::new(field, problem));
    if c.rms_norm_eps != LATENT_NORM_EPS {
        let problem = "llama.cpp takes it for the norms of latents too, transformers always 1e-6; expected 1e-6, got";
        return refuse("rms_norm_eps", format!("{problem} {:e}", c.rms_norm_eps));
    }
    if c.latent.is_some_and(|a| !a.interleaved) {
        return refuse("rope_interleave", "llama.cpp rotates neighbours in deepseek2; expected true, got false".into());
    }
    // llama.cpp knows models without a latent of queries by their number of layers.
    let n = c.num_hidden_layers;
    let lite = n == 26 || n == 27 || n == 48 && c.vocab_size == 128_256;
    if let Some(rank) = c.latent.and_then(|a| a.q_rank).filter(|_| lite) {
        return refuse(
            "q_lora_rank",
            format!("llama.cpp takes a deepseek2 of {n} layers to have none; expected null, got {rank}"),
        );
    }
    if e.every != 1 {
        return refuse(
            "moe_layer_freq",
            format!("llama.cpp has experts in every layer of deepseek2; expected 1, got {}", e.every),
        );
    }
    if e.shared == 0 {
        return refuse(
            "n_shared_experts",
            "llama.cpp has shared experts in deepseek2; expected at least 1, got 0".into(),
        );
    }
    let groups = e.routing.groups.filter(|g| g.kept < g.count);
    if let Some(g) = groups.filter(|_| e.routing.scores == Scores::Softmax) {
        let problem = "llama.cpp scores a group by its best two experts, deepseek_v2 by its best; expected 1, got";
        return refuse("n_group", format!("{problem} {}", g.count));
    }
    out.push(("expert_weights_scale", Value::F32(e.routing.scale)));
    out.push(("expert_weights_norm", Value::Bool(e.routing.normalized)));
    Ok(())
}

/// Whether [`pairs`] and tensors give a config back as it is. Types of models that llama.cpp runs as one, windows that nothing lies
/// outside of, and numbers that f32 does not hold need [`CONFIG`].
fn say_all(c: &LlamaConfig) -> bool {
    let scaled = match c.rope_scaling {
        None => true,
        Some(RopeScaling::Linear { factor }) => short(factor as f32) == factor,
        Some(_) => false,
    };
    c.model_type != "mistral" && c.windows.is_empty() && c.latent.is_none() && scaled
}
