//! `config.json`, `quantization_config` and the files beside the weights: what is inconsistent is refused before any weight is
//! read, by the name of the file and the key. Not sharded folders (see `shards.rs`).

mod fixtures;

use dsq_checkpoint::{
    Checkpoint, ExportTensor, LinearWeight, LlamaConfig, ModelConfig, NamedTensor, RopeScaling, Severity, TensorData,
    write_safetensors,
};
use dsq_quant::{FloatType, Mapping};
use fixtures::folder::{Model, check};
use fixtures::{f32_file, float_layers, llama};
use serde_json::{Value, json};
use std::path::Path;

#[test]
fn f036_a_missing_prefix_names_the_nearest() {
    let model = Model::float(&llama(true));
    let renamed: Vec<NamedTensor> = float_layers(&llama(true), FloatType::F32)
        .into_iter()
        .map(|l| {
            let ExportTensor::Float { name, shape, data, dtype } = l else { panic!("float") };
            let name = name.trim_start_matches("model.").to_owned();
            NamedTensor { name, data: TensorData::Float { shape, data, dtype } }
        })
        .collect();
    write_safetensors(&model.path("model.safetensors"), &renamed).unwrap();
    let e = model.open().unwrap_err();
    assert_eq!(e.exit_code(), 3);
    assert!(e.to_string().contains("model.embed_tokens.weight"), "{e}");
    assert_eq!(e.hint().unwrap(), "the nearest name in the file is embed_tokens.weight");
}

#[test]
fn f037_configs_that_cannot_be_read() {
    let model = Model::float(&llama(true));
    let path = model.path("config.json");
    for (text, word) in
        [("", "JSON"), ("[1]", "object"), ("{\"hidden_size\": 1, \"hidden_size\": 1}", "twice"), ("{} //", "JSON")]
    {
        std::fs::write(&path, text).unwrap();
        check(model.open(), &["config.json", word]);
    }
    // A file of 1 GB that takes no space: refused by its size, not read.
    std::fs::File::create(&path).unwrap().set_len(1 << 30).unwrap();
    check(model.open(), &["config.json", "1073741824"]);
    std::fs::remove_file(&path).unwrap();
    check(model.open(), &["config.json", "no such file"]);
}

#[test]
fn f038_f041_required_keys_and_architectures() {
    let model = Model::float(&llama(true));
    for key in ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"] {
        model.refuses(&["config.json", key, "missing"], |c| {
            c.as_object_mut().unwrap().remove(key);
        });
        model.refuses(&[key, "null"], |c| c[key] = Value::Null);
    }
    model.refuses(&["model_type", "not supported", "gpt2"], |c| {
        *c = json!({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64});
    });
    model.refuses(&["model_type", "not supported"], |c| c["model_type"] = json!("mamba"));
    model.refuses(&["architectures", "LlamaForSequenceClassification"], |c| {
        c["architectures"] = json!(["LlamaForSequenceClassification"]);
    });
    model.refuses(&["architectures", "one architecture"], |c| c["architectures"] = json!(["LlamaForCausalLM", "X"]));
    model.refuses(&["auto_map", "own code"], |c| c["auto_map"] = json!({"AutoModel": "evil.py"}));
    model.refuses(&["model_type", "nothing"], |c| {
        let map = c.as_object_mut().unwrap();
        map.remove("model_type");
        map.remove("architectures");
    });
    model.refuses(&["attention_multiplier", "does not know"], |c| c["attention_multiplier"] = json!(2.0));
}

#[test]
fn f039_defaults_are_those_of_transformers_and_are_noted() {
    let config =
        LlamaConfig { num_key_value_heads: 4, max_position_embeddings: 2048, rms_norm_eps: 1e-6, ..llama(false) };
    let model = Model::float(&config);
    let ckpt = model
        .with_config(|c| {
            let map = c.as_object_mut().unwrap();
            for key in [
                "num_key_value_heads",
                "head_dim",
                "rope_theta",
                "rope_parameters",
                "tie_word_embeddings",
                "hidden_act",
                "max_position_embeddings",
                "rms_norm_eps",
            ] {
                map.remove(key);
            }
        })
        .unwrap();
    assert_eq!(ckpt.config(), &ModelConfig::Llama(config));
    let notes: Vec<_> = ckpt.faults().into_iter().filter(|f| f.severity == Severity::Note).collect();
    assert_eq!(notes.len(), 1);
    for key in
        ["num_key_value_heads = num_attention_heads = 4", "head_dim", "rope_theta = 10000", "rms_norm_eps = 1e-6"]
    {
        assert!(notes[0].problem.contains(key), "{}", notes[0].problem);
    }
}

#[test]
fn f040_values_of_the_wrong_type() {
    let model = Model::float(&llama(true));
    for bad in
        [json!("64"), json!(64.5), json!(-1), json!(0), json!(1u64 << 40), json!([64]), json!(true), json!(1e300)]
    {
        model.refuses(&["config.json", "hidden_size", "expected an integer"], |c| c["hidden_size"] = bad.clone());
        model.refuses(&["num_hidden_layers", "expected an integer"], |c| c["num_hidden_layers"] = bad);
    }
    model.with_config(|c| c["hidden_size"] = json!(64.0)).unwrap();
    model.refuses(&["tie_word_embeddings"], |c| c["tie_word_embeddings"] = json!("true"));
    model.refuses(&["hidden_act", "silu", "gelu"], |c| c["hidden_act"] = json!("gelu"));
    for (key, tensor) in [("attention_bias", "q_proj.bias"), ("mlp_bias", "gate_proj.bias")] {
        model.refuses(&[tensor, "got nothing"], |c| c[key] = json!(true));
        model.refuses(&[key, "true or false"], |c| c[key] = json!(1));
    }
}

#[test]
fn f042_heads_that_do_not_divide() {
    let model = Model::float(&llama(true));
    model.refuses(&["num_key_value_heads", "divisor of num_attention_heads = 4", "got 3"], |c| {
        c["num_key_value_heads"] = json!(3);
    });
    model.refuses(&["num_attention_heads", "divisor of hidden_size = 64"], |c| {
        c.as_object_mut().unwrap().remove("head_dim");
        c["num_attention_heads"] = json!(6);
    });
    model.refuses(&["head_dim", "even", "got 15"], |c| c["head_dim"] = json!(15));
}

#[test]
fn f043_c054_an_explicit_head_dim_is_honoured() {
    let config = LlamaConfig { hidden_size: 40, head_dim: 16, ..llama(true) };
    let model = Model::float(&config);
    let ckpt = model.open().unwrap();
    assert_eq!(ckpt.config(), &ModelConfig::Llama(config));
    let LinearWeight::Float { n, k, .. } = ckpt.linear("model.layers.0.self_attn.q_proj").unwrap() else {
        panic!("float")
    };
    assert_eq!((n, k), (64, 40));
    // Without the key it is 40 / 4 = 10, and the shapes say no.
    model.refuses(&["q_proj", "[40, 40]", "[64, 40]"], |c| {
        c.as_object_mut().unwrap().remove("head_dim");
    });
    model.refuses(&["head_dim", "got 15"], |c| c["head_dim"] = json!(15));
}

#[test]
fn f044_rotary_settings_in_both_spellings() {
    let model = Model::float(&llama(true));
    let theta = |change: fn(&mut Value)| {
        let ModelConfig::Llama(c) = model.with_config(change).unwrap().config().clone() else { panic!("llama") };
        c.rope_theta
    };
    assert_eq!(theta(|c| c["rope_scaling"] = Value::Null), 1e4);
    assert_eq!(theta(|c| c["rope_scaling"] = json!({})), 1e4);
    assert_eq!(theta(|c| c["rope_scaling"] = json!({"type": "default"})), 1e4);
    assert_eq!(
        theta(|c| {
            c.as_object_mut().unwrap().remove("rope_theta");
            c["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 5e5});
        }),
        5e5
    );
    model.refuses(&["rope_parameters", "contradicts"], |c| {
        c["rope_parameters"] = json!({"rope_type": "default", "rope_theta": 5e5});
    });
    // The other spelling in the file says that nothing is scaled; without it the scaling is taken.
    for (key, other) in [("rope_scaling", "rope_parameters"), ("rope_parameters", "rope_scaling")] {
        let scaled = |c: &mut Value| {
            c.as_object_mut().unwrap().remove(other);
            c[key] = json!({"type": "linear", "factor": 2.0});
        };
        let ModelConfig::Llama(c) = model.with_config(scaled).unwrap().config().clone() else { panic!("llama") };
        assert_eq!((c.rope_theta, c.rope_scaling), (1e4, Some(RopeScaling::Linear { factor: 2.0 })), "{key}");
    }
    model.refuses(&["rope_parameters", "contradicts rope_scaling"], |c| {
        c["rope_scaling"] = json!({"type": "linear", "factor": 2.0});
    });
    for scaling in [
        json!({"rope_type": "linear"}),
        json!({"type": "dynamic", "factor": 0.5}),
        json!({"rope_type": "llama3", "factor": 8.0}),
        json!({"rope_type": "longrope", "factor": 8.0}),
        json!({"rope_type": "foo"}),
        json!({"rope_type": "default", "type": "linear", "factor": 2.0}),
        json!({"factor": 2.0}),
        json!({"rope_type": 7}),
        json!("linear"),
        json!([]),
    ] {
        for key in ["rope_scaling", "rope_parameters"] {
            model.refuses(&[key], |c| c[key] = scaling.clone());
        }
    }
    for bad in [json!(0), json!(-1e4), json!("1e4")] {
        model.refuses(&["rope_theta"], |c| {
            c.as_object_mut().unwrap().remove("rope_parameters");
            c["rope_theta"] = bad;
        });
    }
    model.refuses(&["partial_rotary_factor"], |c| c["partial_rotary_factor"] = json!(0.5));
    model.with_config(|c| c["partial_rotary_factor"] = json!(1.0)).unwrap();
}

#[test]
fn f047_special_tokens() {
    let model = Model::float(&llama(true));
    let tokens = |change: fn(&mut Value)| {
        let ModelConfig::Llama(c) = model.with_config(change).unwrap().config().clone() else { panic!("llama") };
        (c.bos_token_id, c.eos_token_ids, c.pad_token_id)
    };
    assert_eq!(tokens(|c| c["eos_token_id"] = json!([3, 5])), (Some(0), vec![3, 5], None));
    assert_eq!(tokens(|c| c["eos_token_id"] = Value::Null), (Some(0), vec![], None));
    assert_eq!(
        tokens(|c| {
            c.as_object_mut().unwrap().remove("bos_token_id");
            c["pad_token_id"] = json!(-1);
        }),
        (None, vec![0], None)
    );
    for bad in [json!(40), json!(-1), json!("0"), json!([0, 40])] {
        model.refuses(&["eos_token_id", "vocab_size = 40"], |c| c["eos_token_id"] = bad);
    }
}

#[test]
fn f048_shapes_and_layers_that_do_not_fit() {
    let model = Model::float(&llama(true));
    model.refuses(&["model.embed_tokens.weight", "[41, 64]", "[40, 64]"], |c| c["vocab_size"] = json!(41));
    // More layers than tensors: the first ten problems and their number.
    model.refuses(&["model.layers.2.", "18 tensors do not fit"], |c| c["num_hidden_layers"] = json!(4));
    let text = model.with_config(|c| c["num_hidden_layers"] = json!(4)).unwrap_err().to_string();
    assert_eq!(text.matches("model.layers.").count(), 10, "{text}");
    // Fewer layers than tensors would leave layers out.
    model.refuses(&["model.layers.1.", "num_hidden_layers = 1"], |c| c["num_hidden_layers"] = json!(1));
    model.refuses(&["lm_head.weight"], |c| c["tie_word_embeddings"] = json!(false));
}

#[test]
fn f016_a_linear_of_no_rows_is_refused() {
    let model = Model::float(&llama(true));
    let mut tensors: Vec<NamedTensor> = float_layers(&llama(true), FloatType::F32)
        .into_iter()
        .map(|l| {
            let ExportTensor::Float { name, shape, data, dtype } = l else { panic!("float") };
            NamedTensor { name, data: TensorData::Float { shape, data, dtype } }
        })
        .collect();
    let q = tensors.iter_mut().find(|t| t.name.ends_with("0.self_attn.q_proj.weight")).unwrap();
    q.data = TensorData::Float { shape: vec![0, 64], data: vec![], dtype: FloatType::F32 };
    write_safetensors(&model.path("model.safetensors"), &tensors).unwrap();
    check(model.open(), &["q_proj", "[0, 64]"]);
}

#[test]
fn f049_quantization_configs_that_dsq_cannot_run() {
    let model = Model::quantized(&llama(true), Mapping::Symmetric);
    model.open().unwrap();
    let q = |key: &'static str, bad: Value| move |c: &mut Value| c["quantization_config"][key] = bad;
    let w = |key: &'static str, bad: Value| {
        move |c: &mut Value| c["quantization_config"]["config_groups"]["group_0"]["weights"][key] = bad
    };
    model.refuses(
        &["quantization_config.quant_method", "\"awq\" or \"fp8\", got \"hqq\""],
        q("quant_method", json!("hqq")),
    );
    model.refuses(&["quantization_config.config_groups.group_0.format", "marlin-24"], |c| {
        c["quantization_config"]["config_groups"]["group_0"]["format"] = json!("marlin-24");
    });
    model.refuses(&["quantization_config.kv_cache_scheme", "INT4"], q("kv_cache_scheme", json!({"num_bits": 4})));
    // A scheme that can be run, without its scales.
    model.refuses(&["model.layers.0.self_attn.k_scale"], q("kv_cache_scheme", json!({"num_bits": 8})));
    model.refuses(&["quantization_config.sparsity_config"], q("sparsity_config", json!({"format": "sparse"})));
    model.refuses(&["quantization_config.quantization_status"], q("quantization_status", json!("frozen")));
    model.refuses(&["quantization_config.config_groups"], q("config_groups", json!({})));
    model.refuses(&["quantization_config.unheard_of"], q("unheard_of", json!(1)));
    model.refuses(&["quantization_config.ignore", "re:("], q("ignore", json!(["re:("])));
    for bits in [0, 5, 16] {
        model.refuses(&["group_0.weights.num_bits"], w("num_bits", json!(bits)));
    }
    for size in [0, -1, -2] {
        model.refuses(&["group_0.weights.group_size"], w("group_size", json!(size)));
    }
    model.refuses(&["group_0.weights.type", "complex"], w("type", json!("complex")));
    model.refuses(&["group_0.weights.strategy", "token"], w("strategy", json!("token")));
    model.refuses(&["group_0.weights.group_size", "block"], w("strategy", json!("block")));
    model.refuses(&["group_0.weights.group_size", "tensor_group"], w("strategy", json!("tensor_group")));
    model.refuses(&["group_0.weights.actorder", "\"sideways\""], w("actorder", json!("sideways")));
    let order = |c: &mut Value| {
        w("actorder", json!("group"))(c);
        w("strategy", json!("channel"))(c);
        w("group_size", Value::Null)(c);
    };
    model.refuses(&["group_0.weights.actorder", "integers in groups", "channel"], order);
    // Where no list of groups is there, they are runs of inputs.
    for order in ["group", "dynamic"] {
        model.with_config(w("actorder", json!(order))).unwrap();
    }
    model.refuses(&["group_0.weights.dynamic"], w("dynamic", json!(true)));
    model.refuses(&["group_0.weights.surprise"], w("surprise", json!(1)));
    model.with_config(w("actorder", json!("static"))).unwrap();
    // A group that does not divide, and codes without a scheme.
    model.refuses(&["down_proj", "in_features = 96"], w("group_size", json!(64)));
    model.refuses(&["weight_packed", "does not name"], |c| {
        c.as_object_mut().unwrap().remove("quantization_config");
    });
    // A scheme without codes.
    let float = Model::float(&llama(true));
    let mut config: Value = serde_json::from_slice(&std::fs::read(model.path("config.json")).unwrap()).unwrap();
    float.refuses(&["weight_packed", "expected this tensor"], |c| {
        c["quantization_config"] = config["quantization_config"].take();
    });
}

#[test]
fn f049_stored_parameters_that_contradict_the_scheme() {
    let module = "model.layers.0.self_attn.q_proj";
    let model = Model::quantized(&llama(true), Mapping::Asymmetric);
    model.refuses(&["weight_zero_point", "symmetric"], |c| {
        c["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = json!(true);
    });
    // A scale that is not a number, and a shape that lies.
    let path = model.path("model.safetensors");
    let file = std::fs::read(&path).unwrap();
    let header: usize = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let entries: Value = serde_json::from_slice(&file[8..8 + header]).unwrap();
    let patch = |name: &str, bytes: &[u8]| {
        let at = 8 + header + entries[format!("{module}.{name}")]["data_offsets"][0].as_u64().unwrap() as usize;
        let mut changed = file.clone();
        changed[at..at + bytes.len()].copy_from_slice(bytes);
        std::fs::write(&path, changed).unwrap();
        model.open().unwrap().linear(module).unwrap_err()
    };
    for scale in [f32::NAN, f32::INFINITY, 0.0, -1.0] {
        let e = patch("weight_scale", &scale.to_le_bytes());
        assert!(e.exit_code() == 3 && e.to_string().contains("scale"), "{e}");
    }
    for shape in [[64i64, 63], [0, 64], [-1, 64], [1 << 40, 1 << 40], [1, 1 << 62]] {
        let bytes: Vec<u8> = shape.iter().flat_map(|d| d.to_le_bytes()).collect();
        let e = patch("weight_shape", &bytes);
        assert_eq!(e.exit_code(), 3, "{e}");
    }
}

/// The proof beside an export tells every changed bit, also those that are a valid model.
#[test]
fn f099_a_flipped_bit_is_told_by_the_proof() {
    let model = Model::quantized(&llama(true), Mapping::Symmetric);
    let path = model.path("model.safetensors");
    let file = std::fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    for at in (data..file.len()).step_by((file.len() - data) / 50) {
        let mut changed = file.clone();
        changed[at] ^= 1;
        std::fs::write(&path, changed).unwrap();
        let faults = model.open().unwrap().faults();
        assert!(
            faults.iter().any(|f| f.severity == Severity::Error && f.problem.contains("SHA-256")),
            "byte {at}: {faults:?}"
        );
    }
    std::fs::write(&path, file).unwrap();
    assert!(model.open().unwrap().faults().is_empty());
    let changed = model.with_config(|c| c["use_cache"] = json!(true)).unwrap();
    assert!(changed.faults().is_empty(), "the config is read when the faults are asked for");
    std::fs::write(model.path("config.json"), std::fs::read_to_string(model.path("config.json")).unwrap() + " ")
        .unwrap();
    let faults = model.open().unwrap().faults();
    assert!(
        matches!(&faults[..], [f] if f.severity == Severity::Warning && f.problem.contains("changed")),
        "{faults:?}"
    );
}

#[test]
fn f050_epsilons() {
    let model = Model::float(&llama(true));
    let warned = model.with_config(|c| c["rms_norm_eps"] = json!(0)).unwrap();
    assert!(warned.faults().iter().any(|f| f.field == "rms_norm_eps" && f.severity == Severity::Warning));
    for bad in [json!(-1e-5), json!("1e-6"), json!([])] {
        model.refuses(&["config.json", "rms_norm_eps"], |c| c["rms_norm_eps"] = bad);
    }
}

#[test]
fn f051_sliding_windows_are_refused() {
    let model = Model::float(&llama(true));
    model.with_config(|c| c["sliding_window"] = Value::Null).unwrap();
    model.refuses(&["sliding_window", "8"], |c| c["sliding_window"] = json!(8));
    model.refuses(&["sliding_window", "0"], |c| c["sliding_window"] = json!(0));
}

#[test]
fn f052_files_beside_the_weights() {
    let model = Model::float(&llama(true));
    let ckpt = model.open().unwrap();
    assert!(ckpt.tokenizer_json().unwrap().is_none() && ckpt.chat_template().unwrap().is_none());
    let config = |text: &str| {
        std::fs::write(model.path("tokenizer_config.json"), text).unwrap();
        model.open().unwrap().chat_template()
    };
    assert_eq!(config(r#"{"chat_template": "{{ a }}"}"#).unwrap().unwrap(), "{{ a }}");
    let named = r#"{"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]}"#;
    assert_eq!(config(named).unwrap().unwrap(), "d");
    for bad in [r#"{"chat_template": 7}"#, r#"{"chat_template": []}"#, "{", r#"{"a": 1, "a": 2}"#] {
        assert_eq!(config(bad).unwrap_err().exit_code(), 3, "{bad}");
    }
    // The file of its own goes before.
    std::fs::write(model.path("chat_template.jinja"), "own").unwrap();
    assert_eq!(model.open().unwrap().chat_template().unwrap().unwrap(), "own");
    std::fs::write(model.path("chat_template.jinja"), b"\xff").unwrap();
    assert_eq!(model.open().unwrap().chat_template().unwrap_err().exit_code(), 3);
}

#[test]
fn f027_swapped_bytes_are_suspected() {
    let model = Model::float(&llama(true));
    let data: Vec<f32> = vec![f32::from_bits(1.0f32.to_bits().swap_bytes()); 64];
    let mut tensors = Vec::new();
    for layer in float_layers(&llama(true), FloatType::F32) {
        let ExportTensor::Float { name, shape, data: values, dtype } = layer else { panic!("float") };
        let data = if name == "model.norm.weight" { data.clone() } else { values };
        tensors.push(NamedTensor { name, data: TensorData::Float { shape, data, dtype } });
    }
    write_safetensors(&model.path("model.safetensors"), &tensors).unwrap();
    let faults = model.open().unwrap().faults();
    assert!(faults.iter().any(|f| f.field == "model.norm.weight" && f.problem.contains("wrong order")), "{faults:?}");
}

/// Every byte of the config and the index, changed at random: an answer, never a panic.
#[test]
fn f099_damaged_texts_are_survived() {
    let model = Model::quantized(&llama(true), Mapping::Asymmetric);
    let path = model.path("config.json");
    let text = std::fs::read(&path).unwrap();
    let mut seed = 7u64;
    let mut random = move |n: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % n
    };
    for _ in 0..600 {
        let mut changed = text.clone();
        for _ in 0..=random(3) {
            let at = random(changed.len());
            match random(3) {
                0 => changed[at] = b"0123456789-.eE\"{}[]:, ntf"[random(24)],
                1 => changed[at] ^= 1 << random(8),
                _ => drop(changed.drain(at..(at + random(20)).min(changed.len()))),
            }
        }
        std::fs::write(&path, changed).unwrap();
        if let Ok(ckpt) = model.open() {
            for spec in ckpt.config().linears() {
                let _ = ckpt.linear(&spec.module);
                let _ = ckpt.activation(&spec.module);
            }
        }
    }
}

#[test]
fn paths_that_are_no_model() {
    let dir = tempfile::tempdir().unwrap();
    check(Checkpoint::open(&dir.path().join("none")), &["no such file or folder"]);
    check(Checkpoint::open(dir.path()), &["config.json", "no such file"]);
    let file = dir.path().join("model.safetensors");
    std::fs::write(&file, f32_file(&[("x", 1)])).unwrap();
    check(Checkpoint::open(&file), &["expected a model folder or a GGUF file"]);
    std::fs::write(dir.path().join("config.json"), "{\"model_type\": \"llama\"}").unwrap();
    check(Checkpoint::open(Path::new(dir.path())), &["hidden_size"]);
}
