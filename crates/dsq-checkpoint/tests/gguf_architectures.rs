//! GGUF files of every architecture: folder to file and back without a changed byte or key, what a file says without dsq's own key,
//! and what llama.cpp would not honour, refused by name. llama.cpp's answers are tests/conformance, logits tests/it/gguf.rs.

mod gguf_writer;

use dsq_checkpoint::gguf::GgufFile;
use dsq_checkpoint::{
    Checkpoint, CheckpointError, ExportTensor, GgufExport, GgufOptions, GgufType, LlamaConfig, ModelConfig, Proof,
    RopeScaling, export_folder,
};
use dsq_quant::{FloatType, GgufGrid, QuantError};
use gguf_writer::{BOOL, F32, FLOAT32, UINT32, floats, open, refused_with, toy};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn encode(grid: GgufGrid, x: &[f32]) -> Result<Vec<u8>, QuantError> {
    grid.quantize(x)
}

fn write(source: &Path, out: &Path, ty: GgufType) -> Result<Proof, CheckpointError> {
    let ckpt = Checkpoint::open(source)?;
    let options = GgufOptions { ty, dtype: None, requantize: false, keep: Vec::new(), overwrite: true };
    GgufExport::new(&ckpt, out, options)?.write(&encode, &mut || ())
}

/// A golden model under a changed config.
fn model(dir: &Path, golden: &str, changes: &Value) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(golden);
    let out = dir.join("model");
    std::fs::create_dir_all(&out).unwrap();
    std::fs::copy(source.join("model.safetensors"), out.join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    // Both spellings of rotary keys would have to agree.
    if changes.get("rope_scaling").is_some() {
        let theta = config["rope_parameters"]["rope_theta"].as_f64().unwrap_or(10000.0);
        config.as_object_mut().unwrap().remove("rope_parameters");
        config["rope_theta"] = json!(theta);
    }
    std::fs::write(out.join("config.json"), config.to_string()).unwrap();
    out
}

fn llama(ckpt: &Checkpoint) -> LlamaConfig {
    let ModelConfig::Llama(mut config) = ckpt.config().clone() else { panic!("a language model") };
    config.latent.iter_mut().for_each(|a| a.mtp_layers = 0);
    config
}

fn yarn(more: Value) -> Value {
    let mut all = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
    all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"rope_scaling": all})
}

fn llama3() -> Value {
    json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32})
}

/// Golden model, changes of its config, architecture of the file.
fn cases() -> Vec<(&'static str, Value, &'static str)> {
    let eps = json!({"rms_norm_eps": 1e-6});
    vec![
        ("llama_tiny", json!({}), "llama"),
        (
            "llama_tiny_untied",
            json!({"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 1e6}),
            "llama",
        ),
        ("llama_tiny", json!({"rope_scaling": {"rope_type": "linear", "factor": 2.3}}), "llama"),
        ("llama_tiny_llama3rope", json!({}), "llama"),
        ("llama_tiny", yarn(json!({})), "llama"),
        ("llama_tiny", yarn(json!({"attention_factor": 0.8})), "llama"),
        ("llama_tiny", yarn(json!({"mscale": 1.5, "mscale_all_dim": 0.5})), "llama"),
        ("qwen2_tiny", json!({"use_sliding_window": false}), "qwen2"),
        ("qwen2_tiny", json!({"sliding_window": 256}), "qwen2"),
        ("qwen3_tiny", json!({}), "qwen3"),
        ("qwen3_tiny", yarn(json!({})), "qwen3"),
        ("mistral_tiny", json!({"sliding_window": null}), "llama"),
        ("mistral_tiny", json!({"sliding_window": 4096}), "llama"),
        ("mixtral_tiny", json!({}), "llama"),
        ("deepseek_v2_lite_tiny", eps.clone(), "deepseek2"),
        ("deepseek_v3_tiny", eps, "deepseek2"),
    ]
}

#[test]
fn a_folder_comes_back_as_it_was() {
    let dir = tempfile::tempdir().unwrap();
    for (golden, changes, arch) in cases() {
        let model = model(dir.path(), golden, &changes);
        let [out, again, back] = ["m.gguf", "again.gguf", "back"].map(|n| dir.path().join(n));
        let proof = write(&model, &out, GgufType::F32).unwrap_or_else(|e| panic!("{golden} {changes}: {e}"));
        let (a, b) = (Checkpoint::open(&model).unwrap(), Checkpoint::open(&out).unwrap());
        assert_eq!(llama(&a), llama(&b), "{golden} {changes}");
        let bytes = std::fs::read(&out).unwrap();
        let text = format!("general.architecture\u{8}\0\0\0{}\0\0\0\0\0\0\0{arch}", char::from(arch.len() as u8));
        assert!(bytes.windows(text.len()).any(|w| w == text.as_bytes()), "{golden}: {arch}");
        // Every tensor, through the file and through a folder made of it.
        let tensor = |name: String| {
            let (shape, data) = (b.info(&name).unwrap().shape, b.read_f32(&name).unwrap());
            ExportTensor::Float { name, shape, data, dtype: FloatType::F32 }
        };
        let tensors = b.names().into_iter().map(tensor).collect();
        export_folder(&back, b.config(), tensors, None, vec![], true).unwrap();
        let c = Checkpoint::open(&back).unwrap();
        assert_eq!(c.config().to_json(), ModelConfig::Llama(llama(&a)).to_json(), "{golden} {changes}");
        let kept: Vec<String> = a.names().into_iter().filter(|n| llama_layer(&a, n)).collect();
        assert_eq!(c.names().len(), kept.len());
        for name in &kept {
            assert_eq!(a.read_stored(name).unwrap(), c.read_stored(name).unwrap(), "{golden} {name}");
            assert_eq!(a.info(name).unwrap().shape, b.info(name).unwrap().shape, "{golden} {name}");
        }
        // Every source tensor is accounted for.
        for name in a.names() {
            let row = proof.tensors.iter().find(|t| t.name == name).unwrap_or_else(|| panic!("{name}"));
            assert_eq!(row.became, if kept.contains(&name) { "copied" } else { "dropped" }, "{name}");
        }
        // A file of a file is the same file; and its proof still holds.
        write(&out, &again, GgufType::F32).unwrap();
        assert_eq!(bytes, std::fs::read(&again).unwrap(), "{golden} {changes}");
        assert!(b.faults().is_empty(), "{:?}", b.faults());
    }
}

/// Whether a tensor is of a layer that dsq runs.
fn llama_layer(ckpt: &Checkpoint, name: &str) -> bool {
    let ModelConfig::Llama(config) = ckpt.config() else { panic!("a language model") };
    config.mtp_layer(name).is_none()
}

/// Without `dsq.config`, as in anyone's file, the keys and tensors give a model that computes the same.
#[test]
fn the_keys_of_llama_cpp_alone_give_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    for (golden, changes, _) in cases() {
        let model = model(dir.path(), golden, &changes);
        let out = dir.path().join("m.gguf");
        write(&model, &out, GgufType::F32).unwrap();
        let want = llama(&Checkpoint::open(&model).unwrap());
        let mut bytes = std::fs::read(&out).unwrap();
        if let Some(at) = bytes.windows(10).position(|w| w == b"dsq.config") {
            bytes[at..at + 3].copy_from_slice(b"not");
        }
        std::fs::write(&out, &bytes).unwrap();
        let got = llama(&Checkpoint::open(&out).unwrap());
        let model_type = if want.model_type == "mistral" { "llama" } else { &want.model_type };
        assert_eq!(got.model_type, model_type, "{golden} {changes}");
        let near = |a: f32, b: f32| (f64::from(a) / f64::from(b) - 1.0).abs() < 1e-5;
        let (a, b) = (got.rotary(), want.rotary());
        assert!(a.frequencies.iter().zip(&b.frequencies).all(|(a, b)| near(*a, *b)), "{golden} {changes}: {a:?} {b:?}");
        assert!(near(a.attention_factor, b.attention_factor), "{golden} {changes}: {a:?} {b:?}");
        assert!((got.attention_scale() / want.attention_scale() - 1.0).abs() < 1e-6, "{golden} {changes}");
        let plain = |c: &LlamaConfig| LlamaConfig {
            model_type: String::new(),
            rope_scaling: None,
            windows: Vec::new(),
            ..c.clone()
        };
        assert_eq!(plain(&got), plain(&want), "{golden} {changes}");
        assert_eq!(got.rope_scaling.is_some(), want.rope_scaling.is_some(), "{golden} {changes}");
    }
}

#[test]
fn dsqs_own_key_must_say_what_the_others_say() {
    let dir = tempfile::tempdir().unwrap();
    let model = model(dir.path(), "mistral_tiny", &json!({"sliding_window": 4096}));
    let out = dir.path().join("m.gguf");
    write(&model, &out, GgufType::F16).unwrap();
    let bytes = std::fs::read(&out).unwrap();
    let refused = |from: &[u8], to: &[u8], words: &[&str]| {
        let at = bytes.windows(from.len()).position(|w| w == from).unwrap();
        let mut changed = bytes.clone();
        changed[at..at + to.len()].copy_from_slice(to);
        std::fs::write(&out, changed).unwrap();
        let e = GgufFile::open(&out).unwrap_err();
        assert!(e.exit_code() == 3 && words.iter().all(|w| e.to_string().contains(w)), "{e}");
    };
    refused(
        b"llama.context_length\x04\0\0\0\0\x01",
        b"llama.context_length\x04\0\0\0\0\x02",
        &["llama.context_length", "UINT32 256", "dsq.config", "UINT32 512"],
    );
    refused(b"llama.rope.freq_base", b"llama.rope.freq_bass", &["llama.rope.freq_base", "got nothing"]);
    refused(b"\"mistral\"", b"\"mixtral\"", &["dsq.config"]);
    refused(b"\"mistral\"", b"\"qwen900\"", &["dsq.config", "qwen900"]);
    refused(b"\"eos_token_id\":0", b"\"eos_token_id\":3", &["tokenizer.ggml", "[3]", "[0]"]);
    refused(b"{\"architectures\"", b"[\"architectures\"", &["dsq.config"]);
}

#[test]
fn what_llama_cpp_would_not_honour_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let with = |change: Value| {
        let mut all = json!({"rms_norm_eps": 1e-6});
        all.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        all
    };
    let deepseek_yarn = |mscale: Value, all: Value| with(yarn(json!({"mscale": mscale, "mscale_all_dim": all})));
    for (golden, changes, words) in [
        ("mistral_tiny", json!({}), vec!["sliding_window", "full attention in llama", "= 256, got 8"]),
        ("qwen2_tiny", json!({}), vec!["sliding_window", "full attention in qwen2", "got 8"]),
        (
            "llama_tiny",
            json!({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
            vec!["rope_scaling", "dynamic"],
        ),
        ("llama_tiny", yarn(json!({"beta_fast": 16.0})), vec!["rope_scaling", "beta_fast", "16"]),
        ("llama_tiny", yarn(json!({"truncate": false})), vec!["rope_scaling", "truncate", "false"]),
        ("qwen3_tiny", json!({"rope_scaling": llama3()}), vec!["rope_scaling", "qwen3", "llama3"]),
        ("deepseek_v3_tiny", json!({}), vec!["rms_norm_eps", "1e-6, got 1e-5"]),
        ("deepseek_v3_tiny", with(json!({"rope_interleave": false})), vec!["rope_interleave", "got false"]),
        ("deepseek_v2_tiny", with(json!({})), vec!["n_group", "best two experts", "got 4"]),
        ("deepseek_v3_tiny", deepseek_yarn(json!(1.0), json!(0.5)), vec!["mscale", "Some(1.0) and Some(0.5)"]),
        ("deepseek_v3_tiny", deepseek_yarn(Value::Null, Value::Null), vec!["mscale", "None and None"]),
        (
            "deepseek_v3_tiny",
            with(json!({"rope_scaling": {"rope_type": "linear", "factor": 2.0}})),
            vec!["deepseek2", "yarn"],
        ),
    ] {
        let model = model(dir.path(), golden, &changes);
        let out = dir.path().join("m.gguf");
        let e = write(&model, &out, GgufType::F16).unwrap_err();
        assert!(e.exit_code() == 2 && words.iter().all(|w| e.to_string().contains(w)), "{golden} {changes}: {e}");
        assert!(!out.exists());
    }
}

#[test]
fn f077_scaling_keys_are_honoured_or_refused() {
    let config = |w: gguf_writer::Writer| {
        let (file, _folder) = open(&w.bytes()).unwrap();
        let ModelConfig::Llama(c) = file.config().clone() else { panic!("not a llama") };
        c
    };
    let linear = |factor| Some(RopeScaling::Linear { factor });
    assert_eq!(config(toy().f32("llama.rope.scaling.factor", 4.0)).rope_scaling, linear(4.0));
    assert_eq!(config(toy().f32("llama.rope.scale_linear", 2.0)).rope_scaling, linear(2.0));
    let none = toy().text("llama.rope.scaling.type", "none").f32("llama.rope.scaling.factor", 4.0);
    assert_eq!(config(none).rope_scaling, None);
    let yarn = || {
        let yarn = toy().text("llama.rope.scaling.type", "yarn").f32("llama.rope.scaling.factor", 4.0);
        yarn.u32("llama.rope.scaling.original_context_length", 16)
    };
    let Some(RopeScaling::Yarn(y)) = config(yarn()).rope_scaling else { panic!("yarn") };
    assert_eq!((y.factor, y.original_max_position_embeddings, y.attention_factor), (4.0, 16, None));
    let factor = config(yarn().f32("llama.rope.scaling.attn_factor", 0.5)).rotary().attention_factor;
    assert!((f64::from(factor) - 0.5 * (0.1 * 4f64.ln() + 1.0)).abs() < 1e-6);
    // What convert_hf_to_gguf.py writes and llama.cpp reads of no such model: allowed where it changes nothing.
    let said = yarn().f32("llama.rope.scaling.yarn_beta_fast", 32.0).f32("llama.rope.scaling.yarn_ext_factor", 1.0);
    assert_eq!(config(said).rope_scaling, Some(RopeScaling::Yarn(y)));
    for (key, value) in
        [("beta_fast", 16.0), ("beta_slow", 2.0), ("ext_factor", 0.5), ("attn_factor", 1.3), ("log_multiplier", 0.1)]
    {
        let key = format!("llama.rope.scaling.yarn_{key}");
        refused_with(&yarn().f32(&key, value), &[&key, &format!("got {value}")]);
    }
    refused_with(&toy().f32("llama.rope.scaling.attn_factor", 2.0), &["attn_factor", "got 2"]);
    refused_with(&toy().f32("llama.rope.scaling.factor", 0.5), &["llama.rope.scaling.factor", "got 0.5"]);
    refused_with(&yarn().f32("llama.rope.freq_base", 1.0), &["llama.rope.freq_base", "more than 1"]);
    for kind in ["longrope", ""] {
        refused_with(&toy().text("llama.rope.scaling.type", kind), &["llama.rope.scaling.type", "yarn", kind]);
    }
    let factors = |values: &[f32]| toy().tensor("rope_freqs.weight", &[values.len() as u64], F32, floats(values));
    assert!(matches!(config(factors(&[1.0, 8.0])).rope_scaling, Some(RopeScaling::Llama3 { factor: 8.0, .. })));
    assert_eq!(config(factors(&[1.0, 1.0])).rope_scaling, None);
    refused_with(&factors(&[8.0, 1.0]), &["rope_freqs.weight", "ramp"]);
    refused_with(&factors(&[1.0, 0.5]), &["rope_freqs.weight", "at least 1"]);
    refused_with(&factors(&[1.0; 3]), &["rope_freqs.weight", "2 finite"]);
    let both = factors(&[1.0, 8.0]).f32("llama.rope.scaling.factor", 2.0);
    refused_with(&both, &["rope_freqs.weight", "got both"]);
    let short = toy().tensor("rope_freqs.weight", &[1, 2], F32, floats(&[1.0, 8.0]));
    refused_with(&short, &["rope_freqs.weight", "list of F32"]);
}

#[test]
fn f074_keys_of_experts_and_latents_are_honoured_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (golden, cases) in [
        (
            "mixtral_tiny",
            vec![
                ("expert_used_count", UINT32, 7u32.to_le_bytes().to_vec(), "expert_count = 6, got 7"),
                ("expert_count", UINT32, 0u32.to_le_bytes().to_vec(), "got 2"),
                ("expert_count", UINT32, 5u32.to_le_bytes().to_vec(), "tensors do not fit"),
                ("expert_count", UINT32, (1u32 << 29).to_le_bytes().to_vec(), "at most 131072"),
            ],
        ),
        (
            "deepseek_v3_tiny",
            vec![
                (
                    "expert_gating_func",
                    UINT32,
                    3u32.to_le_bytes().to_vec(),
                    "expected 1 (softmax) or 2 (sigmoid), got 3",
                ),
                ("expert_gating_func", UINT32, 1u32.to_le_bytes().to_vec(), "best two experts"),
                ("expert_group_count", UINT32, 3u32.to_le_bytes().to_vec(), "expert_count = 8"),
                ("expert_weights_scale", FLOAT32, (-1f32).to_le_bytes().to_vec(), "got -1"),
                ("attention.layer_norm_rms_epsilon", FLOAT32, 1e-5f32.to_le_bytes().to_vec(), "norms of latents"),
                ("attention.key_length", UINT32, 41u32.to_le_bytes().to_vec(), "expected 40"),
                ("attention.head_count_kv", UINT32, 2u32.to_le_bytes().to_vec(), "expected 1, got 2"),
                ("rope.dimension_count", UINT32, 7u32.to_le_bytes().to_vec(), "expected"),
                ("leading_dense_block_count", UINT32, 2u32.to_le_bytes().to_vec(), "tensors do not fit"),
                ("rope.scaling.yarn_log_multiplier", FLOAT32, 0f32.to_le_bytes().to_vec(), "expected more than 0"),
            ],
        ),
    ] {
        let model = model(dir.path(), golden, &json!({"rms_norm_eps": 1e-6}));
        let out = dir.path().join("m.gguf");
        write(&model, &out, GgufType::F16).unwrap();
        let mut bytes = std::fs::read(&out).unwrap();
        if let Some(at) = bytes.windows(10).position(|w| w == b"dsq.config") {
            bytes[at..at + 3].copy_from_slice(b"not");
        }
        for (key, ty, value, words) in cases {
            assert_ne!(ty, BOOL);
            let mut changed = bytes.clone();
            let start = format!(".{key}");
            let at = bytes
                .windows(start.len() + 4)
                .position(|w| w[..start.len()] == *start.as_bytes() && w[start.len()..] == ty.to_le_bytes());
            let at = at.unwrap_or_else(|| panic!("{key}")) + start.len() + 4;
            changed[at..at + 4].copy_from_slice(&value);
            std::fs::write(&out, &changed).unwrap();
            let e = GgufFile::open(&out).expect_err(key);
            assert!(e.exit_code() == 3 && e.to_string().contains(words), "{golden} {key}: {e}");
        }
    }
}
