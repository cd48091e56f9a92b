//! The key-value pairs of a GGUF file that dsq writes: carried over from a GGUF source, or made from a config and the
//! tokenizer files of a folder (`vocabulary.rs`). Not their bytes (see `write.rs`).

use super::mix::GgufType;
use super::value::{Metadata, Value};
use super::{GgufFile, vocabulary};
use crate::{Checkpoint, CheckpointError, LlamaConfig};
use std::path::Path;

/// `general.quantization_version`: the version of ggml's block formats.
const QUANTIZATION_VERSION: u32 = 2;
/// Keys of a source that say how its own file is laid out or was made.
const OF_THE_FILE: [&str; 1] = ["general.alignment"];
/// What a source's keys must begin with to be carried over: not parts of a split file, nor the record of an importance matrix.
const CARRIED: [&str; 3] = ["general.", "llama.", "tokenizer."];

/// The pairs of a file for `out`.
///
/// # Errors
/// [`CheckpointError::Invalid`] naming what of the tokenizer or config GGUF cannot say.
pub(crate) fn metadata(
    source: &Checkpoint,
    config: &LlamaConfig,
    ty: GgufType,
    out: &Path,
) -> Result<Metadata, CheckpointError> {
    let mut metadata = Metadata::new(out);
    match source.gguf() {
        Some(file) => carry_over(file, &mut metadata),
        None => {
            architecture(source, config, &mut metadata)?;
            vocabulary::add(source, config, &mut metadata)?;
        }
    }
    metadata.set("general.file_type", Value::U32(ty.file_type()));
    metadata.set("general.quantization_version", Value::U32(QUANTIZATION_VERSION));
    Ok(metadata)
}

fn carry_over(file: &GgufFile, metadata: &mut Metadata) {
    for (key, value) in file.header.metadata.sorted() {
        if CARRIED.iter().any(|start| key.starts_with(start)) && !OF_THE_FILE.contains(&key) {
            metadata.set(key, value.clone());
        }
    }
}

fn architecture(source: &Checkpoint, config: &LlamaConfig, metadata: &mut Metadata) -> Result<(), CheckpointError> {
    let c = config;
    if c.rms_norm_eps <= 0.0 {
        let problem = format!("a GGUF file has a positive epsilon; expected more than 0, got {}", c.rms_norm_eps);
        return Err(source.invalid("rms_norm_eps", problem));
    }
    let text = |text: &str| Value::String(text.to_owned());
    metadata.set("general.architecture", text("llama"));
    metadata.set("general.type", text("model"));
    let mut set = |name: &str, value: Value| metadata.set(&format!("llama.{name}"), value);
    let mut size = |name: &str, n: usize| match u32::try_from(n) {
        Ok(n) => {
            set(name, Value::U32(n));
            Ok(())
        }
        Err(_) => Err(source.invalid(name, format!("expected at most {}, got {n}", u32::MAX))),
    };
    size("block_count", c.num_hidden_layers)?;
    size("context_length", c.max_position_embeddings)?;
    size("embedding_length", c.hidden_size)?;
    size("feed_forward_length", c.intermediate_size)?;
    size("attention.head_count", c.num_attention_heads)?;
    size("attention.head_count_kv", c.num_key_value_heads)?;
    size("rope.dimension_count", c.head_dim)?;
    size("vocab_size", c.vocab_size)?;
    if c.head_dim * c.num_attention_heads != c.hidden_size {
        size("attention.key_length", c.head_dim)?;
        size("attention.value_length", c.head_dim)?;
    }
    set("attention.layer_norm_rms_epsilon", Value::F32(c.rms_norm_eps));
    set("rope.freq_base", Value::F32(c.rope_theta));
    Ok(())
}
