//! `dsq quantize --requantize`: a source of codes, in whatever format, gives what its values in a float folder give, and the proof says
//! that it was codes. Not how codes are read (see `columns.rs`, `gguf.rs`, `parity_architectures.rs`).

use crate::command::{fails, text, works};
use crate::parity_architectures::rewrite;
use crate::ptq::Case;
use serde_json::{Value, json};

/// What became of the weights of the folder `out`, and the dtype that the proof has of their sources.
fn became(case: &Case, out: &str) -> Vec<(String, String, String)> {
    let proof = case.proof(out);
    let rows = proof["tensors"].as_array().unwrap().iter().filter(|t| t["source"].is_object());
    let word = |v: &Value| v.as_str().unwrap().to_owned();
    rows.map(|t| (word(&t["name"]), word(&t["became"]), word(&t["source"]["dtype"]))).collect()
}

#[test]
fn codes_of_every_format_give_what_their_values_give() {
    let case = Case::new();
    let (model, calib) = (case.at("model"), case.at("calib.txt"));
    let at = |name: &str| case.at(name).to_str().unwrap().to_owned();
    let quantize = |out: &str, more: &[&str]| {
        works(&[&["quantize", text(&model), "--out", &at(out)], more].concat());
    };
    quantize("packed", &["--group-size", "32", "--asymmetric", "--scale-dtype", "f16"]);
    let stored = ["--scheme", "W8A8", "--static-activations", "--kv-cache", "int8", "--calib-tokens", "512"];
    quantize("ct", &[&stored[..], &["--calib", text(&calib)]].concat());
    quantize("block", &["--scheme", "FP8A16_BLOCK", "--scale-dtype", "f32"]);
    let settings = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128]});
    rewrite(&case.at("block"), |name| name.replace("weight_scale", "weight_scale_inv"), settings);
    for format in ["gptq", "awq"] {
        works(&["export", &at("packed"), "--out", &at(format), "--format", format]);
    }
    let calibrated = ["--method", "gptq", "--calib", text(&calib), "--calib-tokens", "512"];
    for source in ["packed", "ct", "block", "gptq", "awq"] {
        let refused = ["quantize", &at(source), "--out", &at("no"), "--group-size", "32"];
        fails(&refused, 2, &["quantized already", "--requantize"]);
        let float = format!("{source}-float");
        works(&["export", &at(source), "--out", &at(&float), "--format", "safetensors", "--dtype", "f32"]);
        for (name, more) in [("rtn", &[][..]), ("gptq", &calibrated[..])] {
            let (ours, theirs) = (format!("{source}-{name}"), format!("{source}-{name}-float"));
            // A layer that the new scheme leaves in float was codes too.
            let grid = [
                "--group-size",
                "16",
                "--scale-dtype",
                "f16",
                "--dtype",
                "f32",
                "--ignore",
                "re:.*1.*up_proj",
                "--json",
            ];
            let told =
                works(&[&["quantize", &at(source), "--out", &at(&ours), "--requantize"], &grid[..], more].concat());
            works(&[&["quantize", &at(&float), "--out", &at(&theirs)], &grid[..], more].concat());
            let bytes = |out: &str| std::fs::read(case.at(out).join("model.safetensors")).unwrap();
            assert!(bytes(&ours) == bytes(&theirs), "{ours}");
            let rows = became(&case, &ours);
            assert_eq!(rows.len(), 13, "{rows:?}");
            for (_, became, dtype) in &rows {
                assert_eq!((became.as_str(), dtype.as_str()), ("requantized", "F32 (values of codes)"), "{ours}");
            }
            assert!(became(&case, &theirs).iter().all(|(_, became, dtype)| became == "quantized" && dtype == "F32"));
            let told: Value = serde_json::from_str(&told).unwrap();
            let rows = told["rows"].as_array().unwrap();
            assert!(rows.len() == 13 && rows.iter().all(|r| r["became"] == "requantized"), "{told}");
            assert!(works(&["inspect", &at(&ours)]).contains("no faults found"));
        }
    }
    let said = works(&["quantize", &at("ct"), "--out", &at("said"), "--requantize", "--group-size", "16"]);
    assert!(said.contains("quantized already; its grids of inputs and its scales of a KV cache"), "{said}");
    let plan = works(&["quantize", &at("block"), "--out", &at("plan"), "--requantize", "--group-size", "16", "--plan"]);
    assert!(plan.contains("memory: at most"), "{plan}");
    let refused = ["quantize", text(&model), "--out", &at("no"), "--requantize"];
    fails(&refused, 2, &["--requantize", "got float weights"]);
}

/// A folder of DeepSeek with experts and latents, whose `kv_b_proj` is codes and becomes floats.
#[test]
fn a_folder_of_deepseek_in_fp8_takes_one_step() {
    let case = Case::of("deepseek_v3_tiny");
    let (model, calib) = (case.at("model"), case.at("calib.txt"));
    let at = |name: &str| case.at(name).to_str().unwrap().to_owned();
    let more = ["--scheme", "FP8A16_BLOCK", "--override", "kv_b_proj=FP8A16_BLOCK", "--scale-dtype", "f32"];
    works(&[&["quantize", text(&model), "--out", &at("block")], &more[..]].concat());
    let settings = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128]});
    rewrite(&case.at("block"), |name| name.replace("weight_scale", "weight_scale_inv"), settings);
    works(&["export", &at("block"), "--out", &at("float"), "--format", "safetensors", "--dtype", "f32"]);
    let grid = ["--group-size", "32", "--scale-dtype", "f16", "--dtype", "f32"];
    let calibrated = ["--method", "gptaq", "--calib", text(&calib), "--calib-tokens", "512", "--calib-context", "64"];
    for (name, more) in [("rtn", &[][..]), ("gptaq", &calibrated[..])] {
        let (ours, theirs) = (at(name), at(&format!("{name}-float")));
        works(&[&["quantize", &at("block"), "--out", &ours, "--requantize"], &grid[..], more].concat());
        works(&[&["quantize", &at("float"), "--out", &theirs], &grid[..], more].concat());
        let bytes = |out: &str| std::fs::read(std::path::Path::new(out).join("model.safetensors")).unwrap();
        assert!(bytes(&ours) == bytes(&theirs), "{name}");
        let rows = became(&case, name);
        assert!(rows.iter().all(|(_, became, _)| became == "requantized"), "{rows:?}");
        assert!(works(&["inspect", &ours]).contains("no faults found"));
    }
}
