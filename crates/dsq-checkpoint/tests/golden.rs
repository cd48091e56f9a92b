//! Folders and vectors made by Python's transformers and compressed-tensors (see `tests/golden/README.md`).

use dsq_checkpoint::{Checkpoint, LinearWeight, ModelConfig};
use std::path::PathBuf;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

#[test]
fn folders_of_transformers_open_in_both_spellings() {
    for (name, theta, head_dim, tied) in [("llama_tiny", 1e4, 16, true), ("llama_tiny_untied", 1e6, 24, false)] {
        let ckpt = Checkpoint::open(&golden(name)).unwrap();
        let ModelConfig::Llama(c) = ckpt.config() else { panic!("{name} is a llama") };
        assert_eq!((c.rope_theta, c.head_dim, c.tie_word_embeddings), (theta, head_dim, tied), "{name}");
        for spec in ckpt.config().linears() {
            let LinearWeight::Float { n, k, data } = ckpt.linear(&spec.module).unwrap() else { panic!("float") };
            assert_eq!((n, k, data.len()), (spec.n(), spec.k(), n * k), "{}", spec.module);
        }
        let LinearWeight::Float { data: head, .. } = ckpt.linear("lm_head").unwrap() else { panic!("float") };
        let embedding = ckpt.read_f32("model.embed_tokens.weight").unwrap();
        assert_eq!(head == embedding, tied, "{name}");
        assert!(ckpt.faults().is_empty(), "{:?}", ckpt.faults());
    }
}

#[test]
fn f045_rotary_scaling_is_refused_by_name() {
    let e = Checkpoint::open(&golden("llama_tiny_llama3rope")).unwrap_err();
    assert_eq!(e.exit_code(), 3);
    let text = e.to_string();
    assert!(text.contains("rope_parameters") && text.contains("llama3"), "{text}");
}
