//! `dsq export --format onnx` and `dsq inspect FILE.onnx`, as a person runs them. The file by itself is dsq-checkpoint's tests
//! (`onnx_export.rs`); what onnxruntime computes is tests/conformance.

use crate::command::{cached, dsq, fails, text, works};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&works(args)).unwrap()
}

#[test]
fn codes_become_operators_and_the_file_is_checked_against_its_proof() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (q, out) = (at("q"), at("m.onnx"));
    for (model, scheme) in [
        ("llama_tiny", &["--scheme", "W4A16", "--group-size", "32"][..]),
        ("qwen2_tiny", &["--scheme", "W4A16", "--asymmetric", "--group-size", "16"]),
        ("qwen3_tiny", &["--scheme", "W8A16", "--granularity", "channel"]),
        ("mistral_tiny", &["--scheme", "W3A16", "--group-size", "32"]),
    ] {
        works(&[&["quantize", text(&golden(model)), "--out", text(&q), "--overwrite"][..], scheme].concat());
        let seen = works(&["export", text(&q), "--out", text(&out), "--format", "onnx", "--overwrite"]);
        let linears = if model == "llama_tiny" { 14 } else { 21 };
        assert!(seen.contains(&format!("{linears} transcoded")) && seen.contains("proof: every tensor"), "{seen}");
        assert!(!seen.contains("note:"), "{seen}");
        let inspected = json(&["inspect", text(&out), "--json"]);
        let about = inspected["about"].as_str().unwrap();
        assert!(about.contains("ONNX of dsq") && about.contains(&format!("{linears} MatMulNBits")), "{about}");
        assert_eq!(inspected["faults"], Value::Array(vec![]));
    }
    let mut bytes = std::fs::read(&out).unwrap();
    let last = bytes.len() - 400;
    bytes[last] ^= 1;
    std::fs::write(&out, &bytes).unwrap();
    let bad = dsq(&["inspect", text(&out)]);
    let seen = String::from_utf8(bad.stdout).unwrap();
    assert!(bad.status.code() == Some(1) && seen.contains("changed since the export"), "{seen}");
}

#[test]
fn what_the_graph_does_not_hold_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (q, out, calib) = (at("q"), at("m.onnx"), at("calib.txt"));
    std::fs::write(&calib, "the quick brown fox jumps over the lazy dog. ".repeat(200)).unwrap();
    let model = golden("llama_tiny");
    works(&["quantize", text(&model), "--out", text(&q), "--scheme", "W8A8"]);
    let export = ["export", text(&q), "--out", text(&out), "--format", "onnx", "--overwrite"];
    let seen = works(&export);
    assert!(seen.contains("note: the inputs of 14 layers are on no grid any more"), "{seen}");
    assert_eq!(json(&[&export[..], &["--json"]].concat())["dropped_input_grids"], 14);
    // A GGUF file: blocks of integer codes stay codes, others become floats.
    let gguf = at("m.gguf");
    for (ty, transcoded, dequantized) in [("Q4_0", 14, None), ("Q8_0", 14, None), ("Q4_1", 0, Some(15))] {
        works(&["export", text(&model), "--out", text(&gguf), "--format", "gguf", "--gguf-type", ty, "--overwrite"]);
        let from = ["export", text(&gguf), "--out", text(&out), "--format", "onnx", "--overwrite", "--json"];
        let told = json(&from);
        assert_eq!(told["tensors"]["transcoded"].as_u64().unwrap_or(0), transcoded, "{ty}: {told}");
        if let Some(n) = dequantized {
            assert_eq!(told["dequantized"], n, "{told}");
        }
    }
}

#[test]
fn files_of_others_stay_and_a_missing_proof_is_noted() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (golden("llama_tiny"), dir.path().join("m.onnx"));
    let args = ["export", text(&model), "--out", text(&out), "--format", "onnx", "--overwrite"];
    for beside in ["m.onnx.data", "m.onnx.data2", "m.onnx.dsq-proof.json"] {
        let path = dir.path().join(beside);
        std::fs::write(&path, "mine").unwrap();
        fails(&args, 2, &[beside, "got another"]);
        assert!(std::fs::read(&path).unwrap() == b"mine" && !out.exists());
        std::fs::remove_file(&path).unwrap();
    }
    works(&args);
    std::fs::remove_file(dir.path().join("m.onnx.dsq-proof.json")).unwrap();
    let seen = json(&["inspect", text(&out), "--json"]);
    assert!(seen["faults"][0]["severity"] == "note" && seen["faults"].to_string().contains("no proof"), "{seen}");
}

#[test]
fn a_plan_writes_nothing_and_bounds_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (golden("llama_tiny"), dir.path().join("m.onnx"));
    let args = ["export", text(&model), "--out", text(&out), "--format", "onnx"];
    let plan = json(&[&args[..], &["--plan", "--json"]].concat());
    assert!(!out.exists());
    works(&args);
    let bytes = std::fs::metadata(&out).unwrap().len();
    let planned = plan["plan"]["disk_bytes"].as_u64().unwrap();
    assert!(planned >= bytes && planned < 2 * bytes, "{plan} {bytes}");
    fails(&[&args[..], &["--overwrite", "--max-shard-size", "5GB"]].concat(), 2, &["--max-shard-size", "one file"]);
}

#[test]
fn what_does_not_fit_is_refused_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    for model in ["mixtral_tiny", "deepseek_v2_lite_tiny", "deepseek_v2_tiny", "deepseek_v3_tiny"] {
        let (folder, out) = (golden(model), dir.path().join("experts.onnx"));
        let args = ["export", text(&folder), "--out", text(&out), "--format", "onnx"];
        fails(
            &args,
            2,
            &["--format", "experts or latent attention", model.trim_end_matches("_tiny").trim_end_matches("_lite")],
        );
        assert!(!out.exists());
    }
    let at = |name: &str| dir.path().join(name);
    let (model, q, out) = (golden("llama_tiny"), at("q"), at("m.onnx"));
    let export = |model: &Path, more: &[&'static str], words: &[&str]| {
        let args = ["export", text(model), "--out", text(&out), "--format", "onnx"];
        fails(&[&args[..], more].concat(), 2, words);
        assert!(!out.exists());
    };
    export(&model, &["--requantize"], &["--requantize", "--format onnx", "got it"]);
    export(&model, &["--gguf-type", "Q4_0"], &["--gguf-type", "--format gguf"]);
    export(&model, &["--gptq-version", "v2"], &["--gptq-version"]);
    for (scheme, words) in [
        (
            &["--scheme", "W4A16", "--group-size", "8"][..],
            &["q_proj", "blocks of 16", "got 8", "hint: dsq export --format safetensors"][..],
        ),
        (&["--scheme", "NVFP4A16"], &["q_proj", "integer codes", "FP4 E2M1"]),
        (&["--scheme", "FP8A16"], &["q_proj", "integer codes", "FP8 E4M3"]),
    ] {
        works(&[&["quantize", text(&model), "--out", text(&q), "--overwrite"][..], scheme].concat());
        export(&q, &[], words);
    }
    std::fs::write(&out, "mine").unwrap();
    let args = ["export", text(&model), "--out", text(&out), "--format", "onnx"];
    fails(&args, 2, &["m.onnx", "expected a new name"]);
    fails(&[&args[..], &["--overwrite"]].concat(), 2, &["m.onnx", "will not be replaced"]);
    assert_eq!(std::fs::read(&out).unwrap(), b"mine");
    fails(&["inspect", text(&out)], 3, &["m.onnx", "expected an ONNX model"]);
}

#[test]
fn efficientnet_is_folded_and_keeps_its_grids() {
    let Some(weights) = cached("efficientnet_lite0.pth") else { return };
    let Some(pictures) = cached("imagenet20") else { return };
    let dir = tempfile::tempdir().unwrap();
    let (q, out) = (dir.path().join("q"), dir.path().join("m.onnx"));
    let told = json(&["export", text(&weights), "--out", text(&out), "--format", "onnx", "--json"]);
    // 49 layers with batch norm and its counter, and the classifier, whose weight and bias are one record.
    assert_eq!((&told["tensors"]["folded"], &told["tensors"]["dropped"]), (&49.into(), &49.into()), "{told}");
    works(&["quantize", text(&weights), "--out", text(&q), "--scheme", "W4A8", "--calib", text(&pictures)]);
    let told = json(&["export", text(&q), "--out", text(&out), "--format", "onnx", "--overwrite", "--json"]);
    // Codes; bias, scale and zero point of the input of each layer.
    assert_eq!((&told["tensors"]["transcoded"], &told["tensors"]["copied"]), (&50.into(), &150.into()), "{told}");
    let about = json(&["inspect", text(&out), "--json"])["about"].as_str().unwrap().to_owned();
    assert!(about.contains("49 Conv") && about.contains("50 QuantizeLinear"), "{about}");
}
