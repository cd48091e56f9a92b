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

/// The same weights under another config, an image model, a source of codes under the name `weight`.
#[test]
fn sources_are_compared_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (source, q) = (golden("llama_tiny"), at("q"));
    works(&["quantize", text(&source), "--out", text(&q), "--group-size", "16"]);
    let other = at("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::copy(source.join("model.safetensors"), other.join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    config["rms_norm_eps"] = json!(0.01);
    std::fs::write(other.join("config.json"), config.to_string()).unwrap();
    let (code, fields) = verify(&q, &["--source", text(&other)]);
    assert!(code == Some(1) && fields.contains(&"logits.kl".to_owned()), "{fields:?}");
    // It has none of the tensors, and no prompt can be put to it.
    let (code, fields) = verify(&q, &["--source", text(&golden("image/resnet_basic"))]);
    assert!(code == Some(1) && fields.len() > 10 && fields.contains(&"logits".to_owned()), "{fields:?}");
    for scheme in ["W8A8", "FP8_DYNAMIC"] {
        let (codes, again, floats) = (at(scheme), at("again"), at("floats"));
        works(&["quantize", text(&source), "--out", text(&codes), "--scheme", scheme]);
        assert_eq!(verify(&codes, &["--source", text(&source)]), (Some(0), vec![]), "{scheme}");
        works(&["quantize", text(&codes), "--out", text(&again), "--group-size", "16", "--requantize", "--overwrite"]);
        assert_eq!(verify(&again, &["--source", text(&codes)]), (Some(0), vec![]), "{scheme}");
        works(&[
            "export",
            text(&codes),
            "--out",
            text(&floats),
            "--format",
            "safetensors",
            "--dtype",
            "f16",
            "--overwrite",
        ]);
        assert_eq!(verify(&floats, &["--source", text(&codes)]), (Some(0), vec![]), "{scheme}");
    }
    let (file, gptq) = (at("m.gguf"), at("gptq"));
    works(&["export", text(&source), "--out", text(&file), "--format", "gguf", "--gguf-type", "Q4_0"]);
    assert_eq!(
        verify(&file, &["--source", text(&source)]).1.iter().filter(|f| *f != "tokenizer.ggml.model").count(),
        0
    );
    works(&["export", text(&file), "--out", text(&gptq), "--format", "gptq"]);
    assert_eq!(verify(&gptq, &["--source", text(&file)]), (Some(0), vec![]));
    let (image, values) = (golden("image/resnet_basic"), at("image"));
    works(&["export", text(&image), "--out", text(&values), "--format", "safetensors"]);
    assert_eq!(verify(&values, &["--source", text(&image)]), (Some(0), vec![]));
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
    // A proof that proves less than it should.
    let first_stored = sound["tensors"][0]["stored"].as_object().unwrap().len();
    assert_eq!(with(&|v| drop(v["tensors"].as_array_mut().unwrap().remove(0))).1.len(), first_stored);
    assert_eq!(with(&|v| *v = json!({})).0, Some(1));
    assert!(with(&|v| v["tensors"] = json!([])).1.len() > 20);
    assert_eq!(with(&|v| drop(v["files"].as_object_mut().unwrap().remove("config.json"))), wrong(&["files"]));
    assert_eq!(with(&|v| v["tensors"][0]["source"]["max_abs_error"] = json!(0.0)), wrong(&[first]));
    assert_eq!(with(&|v| v["logits"]["top1_agreement"] = json!(0.01)), wrong(&["logits.top1_agreement"]));
    // One that asks for anything.
    for (questions, last) in [
        (json!({"prompts": []}), json!([])),
        (json!({"prompts": vec![vec![1_000_000_000u64; 64]; 1000]}), json!(vec![vec![(1, 0.123_456_789)]; 1000])),
        (json!({"prompts": vec![vec![1; 65]; 4]}), json!(vec![vec![(1, 0.5)]; 4])),
        (json!({"prompts": vec![vec![1u64 << 40, 1]; 4]}), json!(vec![vec![(1, 0.5)]; 4])),
        (json!({"prompts": vec![vec![-1, 1]; 4]}), json!(vec![vec![(1, 0.5)]; 4])),
        (json!({"prompts": vec![vec![4000, 1]; 4]}), json!(vec![vec![(1, 0.5)]; 4])),
        (sound["logits"]["questions"].clone(), json!([[], [], [], []])),
        (sound["logits"]["questions"].clone(), json!(vec![vec![(-1, 0.5)]; 4])),
        (json!({"pictures": 4}), json!(vec![vec![(1, 0.5)]; 4])),
        (json!({"pictures": 1u64 << 60}), json!(vec![vec![(1, 0.5)]; 4])),
        (json!("prompts"), json!(null)),
    ] {
        let (code, fields) = with(&|v| {
            (v["logits"]["questions"], v["logits"]["last"]) = (questions.clone(), last.clone());
        });
        assert!(code == Some(1) && fields[0] == "logits", "{fields:?}");
    }
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
    fails(&["inspect", text(&q), "--verify"], 3, &["dsq-proof.json"]);
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    fails(&["inspect", text(&q), "--verify"], 3, &["dsq-proof.json", "a regular file"]);
    works(&["export", text(&source), "--out", text(&at("m.onnx")), "--format", "onnx"]);
    fails(&["inspect", text(&at("m.onnx")), "--verify"], 2, &["--verify", "does not run ONNX"]);
    assert_eq!(dsq(&["inspect", text(&q), "--source", text(&source)]).status.code(), Some(2));
}

/// Left out where that is asked for, and said so by name; everything else is as with them.
#[test]
fn logits_can_be_left_out() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let left_out = json!({"not_measured": "left out: --no-logits"});
    let source = golden("llama_tiny");
    let (with, without) = (at("with"), at("without"));
    works(&["quantize", text(&source), "--out", text(&with), "--group-size", "16"]);
    works(&["quantize", text(&source), "--out", text(&without), "--group-size", "16", "--no-logits"]);
    let mut expected = proof(&with);
    expected["logits"] = left_out.clone();
    assert_eq!(proof(&without), expected);
    for model in [&with, &without] {
        let seen = works(&["inspect", text(model)]);
        assert_eq!(seen.contains("not measured when the proof was written: left out: --no-logits"), model == &without);
    }
    assert_eq!(verify(&without, &["--source", text(&source)]), (Some(0), vec![]));
    for (format, out) in [("gptq", at("gptq")), ("gguf", at("m.gguf"))] {
        let more: &[&str] = if format == "gguf" { &["--gguf-type", "Q8_0"] } else { &[] };
        let (model, out) = (text(&without), text(&out));
        works(&[&["export", model, "--out", out, "--format", format, "--requantize", "--no-logits"], more].concat());
    }
    assert_eq!(proof(&at("gptq"))["logits"], left_out);
}
