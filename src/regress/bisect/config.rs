//! Which fields of two configs differ. Not what that does to the logits (see `walk.rs`).

use super::{Cause, Finding};
use dsq_checkpoint::LlamaConfig;

/// Fields that differ, with both values.
pub fn differing(good: &LlamaConfig, bad: &LlamaConfig) -> Vec<Finding> {
    let mut out = Vec::new();
    // Taken apart without `..`, so that a new field cannot be forgotten.
    macro_rules! fields {
        ($($field:ident),* $(,)?) => {{
            let LlamaConfig { $($field: _),* } = good;
            $(if good.$field != bad.$field {
                let kind = format!("{:?} in GOOD, {:?} in BAD", good.$field, bad.$field);
                out.push(Finding::new(Cause::Config, stringify!($field), kind));
            })*
        }};
    }
    fields!(
        model_type,
        hidden_size,
        intermediate_size,
        num_hidden_layers,
        num_attention_heads,
        num_key_value_heads,
        head_dim,
        vocab_size,
        max_position_embeddings,
        rms_norm_eps,
        rope_theta,
        rope_scaling,
        windows,
        experts,
        latent,
        biases,
        tie_word_embeddings,
        bos_token_id,
        eos_token_ids,
        pad_token_id,
    );
    out
}

/// Whether parts of one model fit into the other.
pub fn exchangeable(good: &LlamaConfig, bad: &LlamaConfig) -> bool {
    let shape = |c: &LlamaConfig| {
        let layers: Vec<_> = (0..c.num_hidden_layers).map(|i| c.layer_linears(i)).collect();
        (layers, [c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.vocab_size])
    };
    shape(good) == shape(bad)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsq_checkpoint::ModelConfig;
    use std::path::Path;

    #[test]
    fn a_changed_field_is_named_with_both_values() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama_tiny/config.json");
        let text = std::fs::read_to_string(&path).unwrap();
        let config = |text: &str| match ModelConfig::from_json(text, &path).unwrap() {
            ModelConfig::Llama(c) => c,
            other => panic!("{other:?}"),
        };
        let good = config(&text);
        assert_eq!(differing(&good, &good), []);
        let bad = config(&text.replace("10000.0", "500000.0"));
        let found = differing(&good, &bad);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].line(), "config: rope_theta (10000.0 in GOOD, 500000.0 in BAD)");
        assert!(exchangeable(&good, &bad));
        assert!(!exchangeable(
            &good,
            &config(&text.replace("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 1"))
        ));
    }
}
