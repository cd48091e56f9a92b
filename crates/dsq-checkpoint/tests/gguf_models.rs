//! Whole GGUF files against what `transformers` and llama.cpp make of the same bytes: a tiny model that PyPI `gguf` wrote,
//! and SmolLM2-135M-Instruct. The real model is not committed and not fetched: see `.ci/fetch-models.sh`.

use dsq_checkpoint::gguf::GgufFile;
use dsq_checkpoint::{Checkpoint, ExportTensor, ModelConfig};
use dsq_quant::FloatType;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

fn json(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(golden(name)).unwrap()).unwrap()
}

/// The real model, from `$DSQ_MODELS` or the user's cache; without it the test is skipped, which
/// `DSQ_REQUIRE_MODELS=1` turns into a failure.
fn smollm2() -> Option<GgufFile> {
    let folder = match std::env::var_os("DSQ_MODELS") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/dsq"),
    };
    let path = folder.join("smollm2.gguf");
    if !path.is_file() {
        let required = std::env::var("DSQ_REQUIRE_MODELS").is_ok_and(|v| v == "1");
        assert!(!required, "DSQ_REQUIRE_MODELS=1, and there is no {}; run .ci/fetch-models.sh", path.display());
        println!("skipped: no {}; run .ci/fetch-models.sh", path.display());
        return None;
    }
    Some(GgufFile::open(&path).unwrap())
}

/// Every tensor has the shape and the exact f32 bytes that transformers has, and there is no other.
fn compare_tensors(file: &GgufFile, expected: &Value) {
    let expected = expected["tensors"].as_object().unwrap();
    let mut names = file.names();
    names.sort();
    assert_eq!(names, expected.keys().cloned().collect::<Vec<_>>());
    for (name, want) in expected {
        let shape: Vec<u64> = file.info(name).unwrap().shape.iter().map(|d| *d as u64).collect();
        assert_eq!(serde_json::json!(shape), want["shape"], "{name}");
        let mut hash = Sha256::new();
        for x in file.read_f32(name).unwrap() {
            hash.update(x.to_le_bytes());
        }
        let found: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(found, want["sha256"].as_str().unwrap(), "{name}");
    }
}

#[test]
fn c035_a_file_by_pypi_gguf_has_the_tensors_of_transformers() {
    let file = GgufFile::open(&golden("gguf/tiny.gguf")).unwrap();
    compare_tensors(&file, &json("gguf/tiny.json"));
    let ModelConfig::Llama(config) = file.config() else { panic!("not a llama") };
    assert_eq!((config.num_attention_heads, config.num_key_value_heads, config.head_dim), (8, 2, 8));
    assert_eq!((config.rope_theta, config.rms_norm_eps, config.max_position_embeddings), (50000.0, 1e-5, 128));
    assert!(!config.tie_word_embeddings);
    assert_eq!(file.info("model.layers.0.self_attn.k_proj.weight").unwrap().dtype, "Q5_0");
    assert!(file.tokenizer_json().unwrap().is_none());
}

#[test]
fn smollm2_has_the_tensors_and_the_config_of_transformers() {
    let Some(file) = smollm2() else { return };
    compare_tensors(&file, &json("gguf/smollm2.json"));
    let ModelConfig::Llama(config) = file.config() else { panic!("not a llama") };
    assert_eq!((config.hidden_size, config.intermediate_size, config.num_hidden_layers), (576, 1536, 30));
    assert_eq!((config.num_attention_heads, config.num_key_value_heads, config.head_dim), (9, 3, 64));
    assert_eq!((config.vocab_size, config.max_position_embeddings), (49152, 8192));
    assert_eq!((config.rope_theta, config.rms_norm_eps), (100000.0, 1e-5));
    assert!(config.tie_word_embeddings);
    assert_eq!((config.bos_token_id, config.pad_token_id), (Some(1), Some(2)));
    assert_eq!(config.eos_token_ids, [2]);
}

#[test]
fn f063_smollm2_tokenizer_gives_the_ids_of_llama_cpp() {
    let Some(file) = smollm2() else { return };
    let tokenizer = tokenizers::Tokenizer::from_bytes(file.tokenizer_json().unwrap().unwrap()).unwrap();
    let golden = json("smollm2_tokenizer.json");
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() >= 200);
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let want: Vec<u32> = case["ids"].as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect();
        let found = tokenizer.encode(text, true).unwrap();
        assert_eq!(found.get_ids(), want, "{text:?}");
        assert_eq!(tokenizer.decode(&want, false).unwrap(), text);
    }
}

#[test]
fn smollm2_brings_the_files_of_a_folder() {
    let Some(file) = smollm2() else { return };
    let files = file.aux_files().unwrap();
    let names: Vec<_> = files.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]);
    let parsed: Vec<Value> = files.iter().map(|(_, bytes)| serde_json::from_slice(bytes).unwrap()).collect();
    assert_eq!(parsed[1]["bos_token"], "<|im_start|>");
    assert_eq!(parsed[1]["eos_token"], "<|im_end|>");
    assert_eq!(parsed[1]["model_max_length"], 8192);
    assert_eq!(parsed[1]["chat_template"].as_str(), file.chat_template().unwrap().as_deref());
    assert!(file.chat_template().unwrap().unwrap().contains("<|im_start|>"));
    assert_eq!(parsed[3], serde_json::json!({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}));
    assert_eq!(parsed[0]["added_tokens"].as_array().unwrap().len(), 17);
    assert_eq!(parsed[0]["pre_tokenizer"]["pretokenizers"][0]["type"], "Digits");
}

/// GGUF -> float folder -> the same tensors, tokenizer and template. With `DSQ_KEEP_FOLDER=PATH` the folder is left there, for
/// a comparison with `transformers`.
#[test]
fn smollm2_as_a_float_folder_has_the_same_tensors_and_tokenizer() {
    let Some(file) = smollm2() else { return };
    let source = Checkpoint::open(file.path()).unwrap();
    let tensor = |name: String| {
        let shape = source.info(&name).unwrap().shape;
        ExportTensor::Float { data: source.read_f32(&name).unwrap(), name, shape, dtype: FloatType::F32 }
    };
    let tensors = source.names().into_iter().map(tensor).collect();
    let temporary = tempfile::tempdir().unwrap();
    let out = std::env::var_os("DSQ_KEEP_FOLDER").map_or(temporary.path().join("float"), PathBuf::from);
    dsq_checkpoint::export_folder(&out, source.config(), tensors, None, source.aux_files().unwrap(), false).unwrap();

    let folder = Checkpoint::open(&out).unwrap();
    assert_eq!(folder.config(), source.config());
    for (name, want) in json("gguf/smollm2.json")["tensors"].as_object().unwrap() {
        assert_eq!(folder.sha256(name).unwrap(), want["sha256"].as_str().unwrap(), "{name}");
    }
    assert_eq!(folder.tokenizer_json().unwrap(), source.tokenizer_json().unwrap());
    assert_eq!(folder.chat_template().unwrap(), source.chat_template().unwrap());
}
