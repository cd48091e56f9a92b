//! The logits in a proof, and `dsq inspect --verify`, as a person runs it. Not the hashes of tensors and files (dsq-checkpoint's
//! tests damage those bit by bit).

use crate::command::{dsq, fails, faults_of, text, works};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn proof(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("dsq-proof.json")).unwrap()).unwrap()
}

/// The fields of the faults that `inspect --verify` finds, and its exit code.
fn verify(model: &Path, more: &[&str]) -> (Option<i32>, Vec<String>) {
    let out = dsq(&[&["inspect", "--json", text(model), "--verify"], more].concat());
    let seen: Value = serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {out:?}"));
    let fields = faults_of(&seen).into_iter().map(|f| f["field"].as_str().unwrap().to_owned());
    (out.status.code(), fields.collect())
}

#[test]
fn a_proof_holds_logits_that_can_be_measured_again() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["llama_tiny", "qwen3_tiny", "mixtral_tiny", "deepseek_v3_tiny"] {
        let (source, q) = (golden(name), at(name));
        let seen = works(&["quantize", text(&source), "--out", text(&q), "--scheme", "W4A16", "--group-size", "16"]);
        assert!(seen.contains("logits on 4 fixed prompts: KL to the source 0."), "{seen}");
        let logits = proof(&q)["logits"].clone();
        assert!(logits["kl"].as_f64().unwrap() > 0.0 && logits["max_abs_difference"].as_f64().unwrap() > 0.0);
        assert_eq!(logits["questions"]["prompts"].as_array().unwrap().len(), 4);
        assert_eq!(verify(&q, &["--source", text(&source)]), (Some(0), vec![]), "{name}");
        // The same bits for any number of threads.
        let one = at(&format!("{name}-1"));
        works(&["quantize", text(&source), "--out", text(&one), "--group-size", "16", "--threads", "1"]);
        assert_eq!(proof(&one)["logits"], logits);
        // What is carried over says the same.
        let values = at(&format!("{name}-values"));
        let seen = works(&["export", text(&q), "--out", text(&values), "--format", "safetensors", "--dtype", "f32"]);
        assert!(seen.contains("KL to the source 0.0000, 100.0% the same"), "{seen}");
        assert!(proof(&values)["logits"]["max_abs_difference"].as_f64().unwrap() < 1e-4);
    }
}

#[test]
fn what_is_not_as_the_proof_says_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (source, q) = (golden("llama_tiny"), at("q"));
    works(&["quantize", text(&source), "--out", text(&q), "--group-size", "16", "--dtype", "f16"]);
    let (sound, file) = (proof(&q), q.join("dsq-proof.json"));
    let with = |change: &dyn Fn(&mut Value)| {
        let mut changed = sound.clone();
        change(&mut changed);
        std::fs::write(&file, changed.to_string()).unwrap();
        verify(&q, &["--source", text(&source)])
    };
    let wrong = |fields: &[&str]| (Some(1), fields.iter().map(|f| (*f).to_owned()).collect::<Vec<_>>());
    // One logit, of which a thousandth part of the largest is too far; a distance; the hash of a source; no logits.
    let logit =
        |v: &mut Value| v["logits"]["last"][1][0][1] = json!(v["logits"]["last"][1][0][1].as_f64().unwrap() + 0.1);
    assert_eq!(with(&logit), wrong(&["logits"]));
    assert_eq!(with(&|v| v["logits"]["kl"] = json!(0.0)), wrong(&["logits.kl"]));
    let first = sound["tensors"][0]["name"].as_str().unwrap();
    assert_eq!(with(&|v| v["tensors"][0]["source"]["sha256"] = "00".into()), wrong(&[first]));
    let why = json!({"not_measured": "no room"});
    assert_eq!(with(&|v| v["logits"] = why.clone()), (Some(0), vec![]), "a note");
    assert_eq!(with(&|_| {}), (Some(0), vec![]));
    // Floats that were converted were hashed too.
    let converted = sound["tensors"].as_array().unwrap().iter().position(|t| t["became"] == "converted").unwrap();
    let name = sound["tensors"][converted]["name"].as_str().unwrap();
    assert_eq!(with(&|v| v["tensors"][converted]["source"]["sha256"] = "00".into()), wrong(&[name]));
    // Another source, no proof, nothing to run, no --verify.
    let (code, fields) = verify(&q, &["--source", text(&golden("llama_tiny_untied"))]);
    assert!(code == Some(1) && fields.len() > 10, "{fields:?}");
    std::fs::remove_file(&file).unwrap();
    assert_eq!(verify(&q, &[]), wrong(&[""]));
    std::fs::write(&file, "{").unwrap();
    assert_eq!(verify(&q, &[]).0, Some(1));
    works(&["export", text(&source), "--out", text(&at("m.onnx")), "--format", "onnx"]);
    fails(&["inspect", text(&at("m.onnx")), "--verify"], 2, &["--verify", "does not run ONNX"]);
    assert_eq!(dsq(&["inspect", text(&q), "--source", text(&source)]).status.code(), Some(2));
}
