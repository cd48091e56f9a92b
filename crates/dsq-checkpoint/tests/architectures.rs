//! The configs of the language models beside llama: every key is honoured or refused by name, tensors that a type has must be
//! there, and what is written is read as the same. Not the forward passes (see `tests/golden`).

use dsq_checkpoint::{Checkpoint, LlamaConfig, ModelConfig};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

fn value(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(name).join("config.json")).unwrap()).unwrap()
}

fn read(value: &Value) -> Result<LlamaConfig, String> {
    match ModelConfig::from_json(&value.to_string(), Path::new("config.json")) {
        Ok(ModelConfig::Llama(c)) => Ok(c),
        Ok(other) => panic!("{other:?}"),
        Err(e) => {
            assert_eq!(e.exit_code(), 3);
            Err(e.to_string())
        }
    }
}

/// The config of a golden model with a change.
fn with(name: &str, change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> Result<LlamaConfig, String> {
    let mut value = value(name);
    change(value.as_object_mut().unwrap());
    read(&value)
}

#[test]
fn folders_of_transformers_open_and_their_configs_survive_json() {
    for (name, head_dim, windows) in [
        ("qwen2_tiny", 16, vec![None, Some(8), Some(8)]),
        ("qwen3_tiny", 24, vec![]),
        ("mistral_tiny", 16, vec![Some(8); 3]),
    ] {
        let ckpt = Checkpoint::open(&golden(name)).unwrap();
        let ModelConfig::Llama(c) = ckpt.config() else { panic!("{name}") };
        assert_eq!(Some(c.model_type.as_str()), name.strip_suffix("_tiny"));
        assert_eq!((c.head_dim, &c.windows), (head_dim, &windows), "{name}");
        assert_eq!(c.window(7), None, "no such layer");
        let json = ckpt.config().to_json();
        assert_eq!(ModelConfig::from_json(&json.to_string(), Path::new("x")).unwrap(), *ckpt.config(), "{json}");
        assert!(!json["architectures"][0].as_str().unwrap().is_empty());
        // In the terms of the first reader too: without the list of layers.
        let mut old = json.clone();
        old.as_object_mut().unwrap().remove("layer_types");
        assert_eq!(ModelConfig::from_json(&old.to_string(), Path::new("x")).unwrap(), *ckpt.config(), "{old}");
    }
}

#[test]
fn c056_f051_windows_are_honoured_or_refused() {
    let mistral = |window: Value| with("mistral_tiny", |c| drop(c.insert("sliding_window".into(), window)));
    assert_eq!(mistral(Value::Null).unwrap().windows, vec![]);
    assert_eq!(mistral(json!(1000)).unwrap().windows, vec![Some(1000); 3]);
    let absent = with("mistral_tiny", |c| drop(c.remove("sliding_window"))).unwrap();
    assert_eq!(absent.windows, vec![Some(4096); 3], "as in transformers");
    for bad in [json!(0), json!(-1), json!("8")] {
        assert!(mistral(bad).unwrap_err().contains("sliding_window"));
    }
    let layer_types = |name: &'static str, types: Value| with(name, |c| drop(c.insert("layer_types".into(), types)));
    for name in ["mistral_tiny", "llama_tiny"] {
        assert!(layer_types(name, json!(["full_attention"])).unwrap_err().contains("layer_types"), "{name}");
    }
    let (full, sliding) = ("full_attention", "sliding_attention");
    let some = layer_types("qwen2_tiny", json!([sliding, full, full])).unwrap();
    assert_eq!(some.windows, vec![Some(8), None, None]);
    assert_eq!(layer_types("qwen2_tiny", json!([full, full, full])).unwrap().windows, vec![]);
    for (types, words) in [
        (json!([full, full]), ["layer_types", "num_hidden_layers = 3, got 2"]),
        (json!([full, full, "chunked_attention"]), ["layer_types", "chunked_attention"]),
        (json!("full_attention"), ["layer_types", "a list"]),
    ] {
        let e = layer_types("qwen2_tiny", types).unwrap_err();
        assert!(words.iter().all(|w| e.contains(w)), "{e}");
    }
    let e = layer_types("qwen3_tiny", json!([full, full, sliding])).unwrap_err();
    assert!(e.contains("layer_types") && e.contains("in use"), "{e}");
    // From which layer on: the default of transformers is 28, and 0 is every layer.
    let first = |n: Option<Value>| {
        with("qwen2_tiny", |c| {
            c.remove("max_window_layers");
            n.map(|n| c.insert("max_window_layers".into(), n));
        })
    };
    assert_eq!(first(None).unwrap().windows, vec![]);
    assert_eq!(first(Some(json!(0))).unwrap().windows, vec![Some(8); 3]);
    assert!(first(Some(json!(-1))).unwrap_err().contains("max_window_layers"));
    // The window that is not in use may be anything.
    let unused = with("qwen3_tiny", |c| drop(c.insert("sliding_window".into(), json!(4096)))).unwrap();
    assert_eq!(unused, with("qwen3_tiny", |_| ()).unwrap());
    assert!(with("llama_tiny", |c| drop(c.insert("sliding_window".into(), json!(8)))).unwrap_err().contains("sliding"));
}

#[test]
fn f039_defaults_are_those_of_each_type_in_transformers() {
    let without = |name: &str, keys: &[&str]| {
        with(name, |c| keys.iter().for_each(|k| drop(c.remove(*k)))).map(|c| {
            (c.head_dim, c.num_key_value_heads, c.max_position_embeddings, c.rms_norm_eps, c.tie_word_embeddings)
        })
    };
    let keys = ["head_dim", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"];
    assert_eq!(without("qwen3_tiny", &keys), Ok((128, 2, 32_768, 1e-6, false)));
    assert_eq!(without("qwen2_tiny", &keys), Ok((16, 2, 32_768, 1e-6, false)));
    assert_eq!(without("mistral_tiny", &keys), Ok((16, 2, 131_072, 1e-6, false)));
    // Their numbers of key and value heads are not those of the query heads, which are 4 here.
    for (name, n) in [("mistral_tiny", "got 8"), ("qwen2_tiny", "got 32"), ("qwen3_tiny", "got 32")] {
        assert!(without(name, &["num_key_value_heads"]).unwrap_err().contains(n), "{name}");
        let null = with(name, |c| drop(c.insert("num_key_value_heads".into(), Value::Null))).unwrap();
        assert_eq!(null.num_key_value_heads, 4);
    }
}

#[test]
fn f041_biases_and_architectures_that_are_not_honoured_are_named() {
    for (name, key) in [
        ("qwen3_tiny", "attention_bias"),
        ("mistral_tiny", "attention_bias"),
        ("qwen2_tiny", "attention_bias"),
        ("qwen2_tiny", "mlp_bias"),
        ("qwen2_tiny", "use_mrope"),
        ("mistral_tiny", "use_sliding_window"),
    ] {
        let e = with(name, |c| drop(c.insert(key.into(), json!(true)))).unwrap_err();
        assert!(e.contains(key) && e.contains("true"), "{name}: {e}");
    }
    let e = with("qwen2_tiny", |c| drop(c.insert("architectures".into(), json!(["Qwen3ForCausalLM"])))).unwrap_err();
    assert!(e.contains("architectures") && e.contains("Qwen3ForCausalLM"), "{e}");
    let e = with("qwen2_tiny", |c| drop(c.insert("model_type".into(), json!("qwen2_moe")))).unwrap_err();
    assert!(e.contains("qwen2_moe") && e.contains("mistral (MistralForCausalLM)"), "{e}");
    // By either of the two.
    for key in ["model_type", "architectures"] {
        assert_eq!(with("qwen2_tiny", |c| drop(c.remove(key))).unwrap().model_type, "qwen2");
    }
}

/// A folder under the config of another type lacks tensors of that type, or has some that it would ignore.
#[test]
fn f048_tensors_of_another_type_are_told_by_name() {
    for (weights, config, words) in [
        ("qwen2_tiny", "mistral_tiny", ["q_proj.bias", "mistral has no bias"]),
        ("mistral_tiny", "qwen2_tiny", ["model.layers.0.self_attn.q_proj.bias", "got nothing"]),
        ("mistral_tiny", "qwen3_tiny", ["model.layers.0.self_attn.q_norm.weight", "got nothing"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(golden(weights).join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let mut value = value(config);
        value["head_dim"] = json!(16);
        value["tie_word_embeddings"] = json!(weights == "qwen2_tiny");
        std::fs::write(dir.path().join("config.json"), value.to_string()).unwrap();
        let e = Checkpoint::open(dir.path()).unwrap_err().to_string();
        assert!(words.iter().all(|w| e.contains(w)), "{weights} as {config}: {e}");
    }
}
