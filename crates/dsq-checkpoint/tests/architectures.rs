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
        ("mistral_tiny", "attention_bias"),
        ("qwen3_tiny", "mlp_bias"),
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

/// The config with one key changed.
fn set(name: &str, key: &str, value: Value) -> Result<LlamaConfig, String> {
    with(name, |c| drop(c.insert(key.into(), value)))
}

#[test]
fn models_with_experts_open_and_their_configs_survive_json() {
    for name in ["mixtral_tiny", "deepseek_v2_lite_tiny", "deepseek_v2_tiny", "deepseek_v3_tiny"] {
        let ckpt = Checkpoint::open(&golden(name)).unwrap();
        let ModelConfig::Llama(c) = ckpt.config() else { panic!("{name}") };
        let e = c.experts.unwrap();
        assert_eq!((e.width, e.count), (32, if name.contains("lite") || name.contains("mixtral") { 6 } else { 8 }));
        assert_eq!(c.latent.is_some(), name.starts_with("deepseek"));
        let json = ckpt.config().to_json();
        assert_eq!(ModelConfig::from_json(&json.to_string(), Path::new("x")).unwrap(), *ckpt.config(), "{json}");
        assert_eq!(json.get("head_dim").is_some(), name == "mixtral_tiny", "{json}");
        // Layers beyond the last are noted and no fault.
        let noted = ckpt.faults().iter().any(|f| f.problem.contains("beyond the next"));
        assert_eq!(noted, name == "deepseek_v3_tiny", "{:?}", ckpt.faults());
        // What other tools take for linear layers and what is never quantized.
        let routers = ckpt.config().always_float();
        assert_eq!(routers.len(), if name == "mixtral_tiny" { 2 } else { 1 });
        assert!(ckpt.config().linears().iter().all(|l| !routers.contains(&l.module)));
    }
    let v3 = set("deepseek_v3_tiny", "num_nextn_predict_layers", json!(0)).unwrap();
    assert_eq!((v3.latent.unwrap().mtp_layers, v3.mtp_layer("model.layers.2.enorm.weight")), (0, None));
    assert_eq!(read(&value("deepseek_v3_tiny")).unwrap().mtp_layer("model.layers.2.enorm.weight"), Some(2));
}

#[test]
fn f049_keys_of_experts_and_latents_are_honoured_or_refused_by_name() {
    let (mixtral, lite, v2, v3) = ("mixtral_tiny", "deepseek_v2_lite_tiny", "deepseek_v2_tiny", "deepseek_v3_tiny");
    for (name, key, value, words) in [
        (mixtral, "num_experts_per_tok", json!(7), ["num_experts_per_tok", "at most the 6 experts"]),
        (mixtral, "num_local_experts", json!(0), ["num_local_experts", "got 0"]),
        (mixtral, "num_local_experts", json!(1 << 20), ["num_local_experts", "at most 131072"]),
        (mixtral, "n_shared_experts", json!(1), ["n_shared_experts", "does not know this key"]),
        (mixtral, "auto_map", json!({"AutoModel": "x.py"}), ["auto_map", "own code"]),
        (v2, "scoring_func", json!("sigmoid"), ["scoring_func", "softmax"]),
        (v2, "topk_method", json!("noaux_tc"), ["topk_method", "group_limited_greedy"]),
        (v2, "topk_group", Value::Null, ["topk_group", "null"]),
        (v2, "n_group", json!(3), ["n_group", "a divisor of the 8 experts"]),
        (v2, "topk_group", json!(1), ["topk_group", "num_experts_per_tok = 3, got 1"]),
        (v2, "num_key_value_heads", json!(2), ["num_key_value_heads", "expected 4, got 2"]),
        (v2, "attention_bias", json!(true), ["attention_bias", "true"]),
        (v2, "rope_interleave", json!(true), ["rope_interleave", "does not know this key"]),
        (v2, "head_dim", json!(24), ["head_dim", "qk_rope_head_dim"]),
        (v2, "qk_rope_head_dim", json!(7), ["qk_rope_head_dim", "even"]),
        (v2, "routed_scaling_factor", json!(0), ["routed_scaling_factor", "positive"]),
        (v2, "moe_layer_freq", json!(0), ["moe_layer_freq", "got 0"]),
        (v3, "scoring_func", json!("softmax"), ["scoring_func", "sigmoid"]),
        (v3, "topk_method", json!("greedy"), ["topk_method", "noaux_tc"]),
        (v3, "n_group", json!(8), ["n_group", "at least 2 a group"]),
        (v3, "num_nextn_predict_layers", json!(-1), ["num_nextn_predict_layers", "-1"]),
        (v3, "sliding_window", json!(8), ["sliding_window", "attention is full"]),
    ] {
        let e = set(name, key, value.clone()).expect_err(&format!("{name} {key} {value}"));
        assert!(words.iter().all(|w| e.contains(w)), "{name} {key}: {e}");
    }
    // Of V2 transformers reads this key and does nothing with it: so here, with a warning.
    let normed = with_warnings(v2, "norm_topk_prob", json!(true));
    assert_eq!(normed.0, read(&value(v2)).unwrap());
    assert!(normed.1.iter().any(|w| w.starts_with("norm_topk_prob: not used")), "{:?}", normed.1);
    // What training or placement alone asks for says nothing here.
    for key in ["aux_loss_alpha", "router_aux_loss_coef", "ep_size", "seq_aux"] {
        assert_eq!(set(v2, key, json!(1)).unwrap(), read(&value(v2)).unwrap(), "{key}");
        assert!(set("llama_tiny", key, json!(1)).unwrap_err().contains(key));
    }
    let e = read(&value(lite)).unwrap().experts.unwrap();
    assert_eq!((e.shared, e.first_layer, e.routing.groups), (2, 1, None), "greedy: n_group says nothing");
    let every = |n: usize| {
        let c = set(lite, "moe_layer_freq", json!(n)).unwrap();
        (0..4).map(|i| c.experts_of(i).is_some()).collect::<Vec<_>>()
    };
    assert_eq!(every(1), [false, true, true, true]);
    assert_eq!(every(2), [false, false, true, false]);
    assert_eq!(set(v2, "n_shared_experts", Value::Null).unwrap().experts.unwrap().shared, 0);
    // The published folders name code that is theirs; what runs is dsq's.
    assert_eq!(set(v3, "auto_map", json!({"AutoModel": "x.py"})).unwrap(), read(&value(v3)).unwrap());
    assert!(set(v3, "rope_interleave", json!(false)).is_ok_and(|c| !c.latent.unwrap().interleaved));
    // Defaults are those of transformers.
    let without = |name: &str, keys: &[&str]| with(name, |c| keys.iter().for_each(|k| drop(c.remove(*k)))).unwrap();
    let c = without(mixtral, &["rope_theta", "num_local_experts", "num_experts_per_tok", "rms_norm_eps"]);
    assert_eq!((c.rope_theta, c.rms_norm_eps), (1e6, 1e-5));
    assert_eq!(c.experts.map(|e| (e.count, e.routing.per_token)), Some((8, 2)));
}

/// The config with one key changed, in a folder, and what is worth a warning in it.
fn with_warnings(name: &str, key: &str, value: Value) -> (LlamaConfig, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(golden(name).join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let mut config = self::value(name);
    config[key] = value;
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let ckpt = Checkpoint::open(dir.path()).unwrap();
    let ModelConfig::Llama(c) = ckpt.config() else { panic!("{name}") };
    let warnings = ckpt.faults().into_iter().filter(|f| f.severity == dsq_checkpoint::Severity::Warning);
    (c.clone(), warnings.map(|f| format!("{}: {}", f.field, f.problem)).collect())
}

#[test]
fn biases_of_llama_and_qwen3_are_read_and_written() {
    for (name, mlp) in [("llama_bias_tiny", true), ("qwen3_bias_tiny", false)] {
        let ckpt = Checkpoint::open(&golden(name)).unwrap();
        let ModelConfig::Llama(c) = ckpt.config() else { panic!("{name}") };
        assert_eq!((c.biases.attention, c.biases.mlp), (true, mlp));
        assert!(c.has_bias("model.layers.1.self_attn.o_proj") && !c.has_bias("lm_head"));
        assert_eq!(c.has_bias("model.layers.1.mlp.down_proj"), mlp);
        let json = ckpt.config().to_json();
        assert_eq!(ModelConfig::from_json(&json.to_string(), Path::new("x")).unwrap(), *ckpt.config(), "{json}");
        // A key that says there are none, beside tensors that would be ignored.
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(golden(name).join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        let mut config = value(name);
        config["attention_bias"] = json!(false);
        std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        let e = Checkpoint::open(dir.path()).unwrap_err().to_string();
        assert!(e.contains("q_proj.bias") && e.contains("has no bias here"), "{e}");
    }
}

/// transformers' own modules of a model with experts (`save_original_format=False`): the experts of a layer in two tensors.
#[test]
fn stacked_experts_are_read_one_by_one() {
    use dsq_checkpoint::{NamedTensor, TensorData, write_safetensors};
    for name in ["mixtral_tiny", "deepseek_v2_tiny", "deepseek_v3_tiny"] {
        let plain = Checkpoint::open(&golden(name)).unwrap();
        let ModelConfig::Llama(c) = plain.config() else { panic!("{name}") };
        let stacked = |change: &dyn Fn(&mut Vec<NamedTensor>)| {
            let mut tensors: Vec<NamedTensor> = Vec::new();
            for tensor in plain.names() {
                let (dtype, bytes) = plain.read_stored(&tensor).unwrap();
                let mut shape = plain.info(&tensor).unwrap().shape;
                let (of, part) = match tensor.split_once(".experts.") {
                    Some((of, part)) => (of.replace("block_sparse_moe", "mlp"), part),
                    None => {
                        let name = tensor.replace("block_sparse_moe", "mlp");
                        tensors.push(NamedTensor { name, data: TensorData::Raw { shape, bytes, dtype } });
                        continue;
                    }
                };
                let part = part.split('.').nth(1).unwrap();
                let down = ["down_proj", "w2"].contains(&part);
                let name = format!("{of}.experts.{}", if down { "down_proj" } else { "gate_up_proj" });
                // Made whole below.
                if !down {
                    shape[0] *= 2;
                }
                let e = c.experts.unwrap().count;
                shape.insert(0, e);
                if !tensors.iter().any(|t| t.name == name) {
                    let layer: usize = tensor.split('.').nth(2).unwrap().parse().unwrap();
                    let all = (0..e).flat_map(|e| {
                        let [gate, up, down_name] = c.expert_names(e);
                        let of = if down { vec![down_name] } else { vec![gate, up] };
                        of.into_iter().map(move |n| format!("model.layers.{layer}.{n}.weight"))
                    });
                    let bytes = all.flat_map(|n| plain.read_stored(&n).unwrap().1).collect();
                    tensors.push(NamedTensor { name, data: TensorData::Raw { shape, bytes, dtype } });
                }
            }
            change(&mut tensors);
            let dir = tempfile::tempdir().unwrap();
            std::fs::copy(golden(name).join("config.json"), dir.path().join("config.json")).unwrap();
            write_safetensors(&dir.path().join("model.safetensors"), &tensors).unwrap();
            (Checkpoint::open(dir.path()), dir)
        };
        let (read, _dir) = stacked(&|_| {});
        let read = read.unwrap();
        for tensor in plain.names() {
            assert_eq!(read.info(&tensor), plain.info(&tensor), "{name} {tensor}");
            assert_eq!(read.read_stored(&tensor).unwrap(), plain.read_stored(&tensor).unwrap(), "{name} {tensor}");
        }
        assert_eq!(read.names().len(), plain.names().len());
        let noted: Vec<_> = read.faults().into_iter().filter(|f| f.field == "experts").collect();
        assert!(noted.len() == 1 && noted[0].problem.contains("stacked"), "{noted:?}");
        // Another layout of the same name is refused by that name.
        let refused = |change: &dyn Fn(&mut Vec<NamedTensor>), words: &[&str]| {
            let e = stacked(change).0.unwrap_err().to_string();
            assert!(words.iter().all(|w| e.contains(w)) && e.len() < 400, "{e}");
        };
        refused(
            &|all| {
                let t = all.iter_mut().find(|t| t.name.ends_with("gate_up_proj")).unwrap();
                if let TensorData::Raw { shape, .. } = &mut t.data {
                    shape.swap(1, 2);
                }
            },
            &["experts.gate_up_proj", "stacked experts; expected floats of shape"],
        );
        refused(
            &|all| {
                let layer = all.iter().find(|t| t.name.ends_with("gate_up_proj")).unwrap().name.clone();
                let layer: usize = layer.split('.').nth(2).unwrap().parse().unwrap();
                let one = format!("model.layers.{layer}.{}.weight", c.expert_names(0)[0]);
                let (dtype, bytes) = plain.read_stored(&one).unwrap();
                let shape = plain.info(&one).unwrap().shape;
                all.push(NamedTensor { name: one, data: TensorData::Raw { shape, bytes, dtype } });
            },
            &["stacked in one tensor and stored one by one"],
        );
    }
}
