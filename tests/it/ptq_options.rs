//! Options of `dsq quantize` that change what a method does, as a person runs them: activations on stored grids and on float
//! codes, SmoothQuant, weighted ranges, learned rounding, mixed precision, and the warning of `dsq eval` that it measures on
//! the calibration text. The methods by themselves are `ptq.rs`.

use crate::command::{self, text, works};
use crate::ptq::{Case, fails};
use dsq_checkpoint::Checkpoint;
use dsq_model::Llama;
use dsq_runtime::{LlamaRuntime, Logits};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

const WINDOWS: [&str; 2] = ["--calib-context", "64"];

fn eval(case: &Case, name: &str) -> Value {
    let (folder, model, held) = (case.at(name), case.at("model"), case.at("calib.txt"));
    let args = ["eval", text(&folder), "--reference", text(&model), "--text", text(&held)];
    serde_json::from_str(&works(&[&args[..], &["--context", "64", "--max-tokens", "2048", "--json"]].concat())).unwrap()
}

fn kl(case: &Case, name: &str) -> f64 {
    eval(case, name)["rows"][0]["kl"].as_f64().unwrap()
}

fn quantization(folder: &Path) -> Value {
    let config = std::fs::read(folder.join("config.json")).unwrap();
    serde_json::from_slice::<Value>(&config).unwrap()["quantization_config"].clone()
}

/// How far the logits of the training graph and of the runtime are apart, over their size.
fn apart(folder: &Path) -> f64 {
    let ckpt = Checkpoint::open(folder).unwrap();
    let ids: Vec<u32> = (0..48).map(|i| (i * 37 + 11) % 96).collect();
    let runtime = LlamaRuntime::load(&ckpt, 2).unwrap();
    let mut cache = runtime.new_cache(ids.len()).unwrap();
    let got = runtime.forward(&ids, &mut cache, Logits::All).unwrap();
    let graph = Llama::from_checkpoint(&ckpt, &Default::default()).unwrap();
    let ids = ids.into_iter().map(|t| t as i32).collect();
    let want = graph.logits(Arc::new(ids), 1).into_data().try_into_vec::<f32>().unwrap();
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    norm(&mut got.iter().zip(&want).map(|(a, b)| a - b)) / norm(&mut want.iter().copied())
}

#[test]
fn stored_and_float_grids_of_activations_are_written_read_and_run() {
    let case = Case::new();
    let float = |strategy: &str, dynamic: bool| json!(["float", strategy, dynamic, true]);
    for (i, (more, expected, most)) in [
        // Three bits of mantissa: an error of 2.6% in weights and in activations.
        (&["--scheme", "FP8"][..], float("tensor", false), 0.5),
        (&["--scheme", "FP8_DYNAMIC"], float("token", true), 0.5),
        (&["--scheme", "W8A8", "--static-activations"], json!(["int", "tensor", false, true]), 0.1),
        (
            &["--scheme", "W8A8", "--static-activations", "--asymmetric-activations"],
            json!(["int", "tensor", false, false]),
            0.1,
        ),
        (&["--scheme", "W8A8", "--asymmetric-activations"], json!(["int", "token", true, false]), 0.02),
        (&["--scheme", "MXFP4"], float("group", true), 4.0),
        (&["--scheme", "NVFP4"], json!(["float", "tensor_group", "local", true]), 4.0),
        (&["--scheme", "W4A4", "--group-size", "32"], json!(["int", "tensor", false, false]), 4.0),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("out{i}");
        let method = ["rtn", "gptq"][usize::from(i % 2 == 1 && !more.contains(&"NVFP4"))];
        let text_is_needed = expected[2] != json!(true) || method == "gptq";
        let folder = case.at(&name);
        if text_is_needed {
            case.quantize(&name, &[&WINDOWS[..], &["--method", method], more].concat());
        } else {
            let model = case.at("model");
            works(&[&["quantize", text(&model), "--out", text(&folder)][..], more].concat());
        }
        let group = quantization(&folder)["config_groups"]["group_0"]["input_activations"].clone();
        let got = json!([group["type"], group["strategy"], group["dynamic"], group["symmetric"]]);
        assert_eq!(got, expected, "{more:?}");
        assert!(works(&["inspect", text(&folder)]).contains("no faults found"), "{more:?}");
        let seen = kl(&case, &name);
        assert!(seen > 0.0 && seen < most, "{more:?}: {seen}");
        // Another export carries the grids over, byte for byte.
        let again = case.at(&format!("again{i}"));
        works(&["export", text(&folder), "--out", text(&again), "--format", "compressed-tensors"]);
        for file in ["config.json", "model.safetensors"] {
            assert!(
                std::fs::read(folder.join(file)).unwrap() == std::fs::read(again.join(file)).unwrap(),
                "{more:?} {file}"
            );
        }
        // The two passes round the same numbers but for the last bits of their sums, which seldom change a code: coarser
        // codes cost more when they do.
        let apart = apart(&folder);
        assert!(apart < if most < 1.0 { 0.02 } else { 0.5 }, "{more:?}: {apart}");
    }
}

#[test]
fn smooth_quant_moves_the_error_of_activations_into_weights_and_changes_no_function() {
    let case = Case::new();
    // Inputs of one channel a hundred times those of the others, as large models have them; the weights make up for it.
    let file = case.at("model/model.safetensors");
    scale_channel(&file, "model.layers.0.post_attention_layernorm.weight", "model.layers.0.mlp", 100.0);
    let scheme = ["--scheme", "W8A8", "--static-activations"];
    case.quantize("plain", &[&WINDOWS[..], &scheme].concat());
    let seen = case.quantize("smooth", &[&WINDOWS[..], &scheme, &["--smooth-quant", "0.5"]].concat());
    assert_eq!(seen["calibration"]["smooth_quant"], json!(0.5));
    let proof = case.proof("smooth");
    let tensors = proof["tensors"].as_array().unwrap();
    let rescaled: Vec<&Value> = tensors.iter().filter(|t| t["became"] == "rescaled").collect();
    assert_eq!(rescaled.len(), 4, "both norms of both layers");
    assert!(rescaled.iter().all(|t| t["source"]["rescaled"].as_str().unwrap().contains("SmoothQuant")));
    let (plain, smooth) = (kl(&case, "plain"), kl(&case, "smooth"));
    assert!(smooth < 0.5 * plain, "plain {plain}, smooth {smooth}");
}

/// Multiplies the first value of a norm, and divides the first column of the layers after it.
fn scale_channel(file: &Path, norm: &str, layer: &str, by: f32) {
    let mut bytes = std::fs::read(file).unwrap();
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let entries: Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
    let mut change = |name: &str, every: usize, by: f32| {
        let at = |i: usize| 8 + header + entries[name]["data_offsets"][i].as_u64().unwrap() as usize;
        for at in (at(0)..at(1)).step_by(4 * every) {
            let old = f32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            bytes[at..at + 4].copy_from_slice(&(old * by).to_le_bytes());
        }
    };
    let k = |name: &str| entries[name]["shape"].as_array().unwrap().last().unwrap().as_u64().unwrap() as usize;
    change(norm, k(norm), by);
    for part in ["gate_proj", "up_proj"] {
        let name = format!("{layer}.{part}.weight");
        change(&name, k(&name), 1.0 / by);
    }
    std::fs::write(file, bytes).unwrap();
}

#[test]
fn weighted_ranges_and_learned_rounding_lower_the_error_of_outputs() {
    let case = Case::new();
    let grid = ["--group-size", "32", "--scheme", "W3A16", "--calib-context", "64"];
    let with = |name: &str, more: &[&str]| case.quantize(name, &[&grid[..], more].concat());
    let plain = with("plain", &["--method", "gptq", "--observer", "mse"]);
    let weighted = with("weighted", &["--observer", "weighted-mse"]);
    // Both tell the output error of rounding on their grids.
    let sum = |seen: &Value| -> f64 {
        seen["rows"].as_array().unwrap().iter().map(|r| r["output_error_rtn"].as_f64().unwrap()).sum()
    };
    // The first layers have the same inputs in both; later ones those of the layers before them.
    let first = |seen: &Value| seen["rows"][0]["output_error_rtn"].as_f64().unwrap();
    assert!(first(&weighted) < first(&plain), "{} against {}", first(&weighted), first(&plain));
    assert!(sum(&weighted).is_finite());
    works(&[
        "quantize",
        text(&case.at("model")),
        "--out",
        text(&case.at("rtn")),
        "--group-size",
        "32",
        "--scheme",
        "W3A16",
    ]);
    for (name, more) in [
        ("symmetric", &["--method", "autoround"][..]),
        ("asymmetric", &["--method", "autoround", "--asymmetric", "--observer", "mse"]),
    ] {
        let seen = with(name, more);
        let blocks = seen["calibration"]["blocks"].as_array().unwrap();
        assert_eq!((blocks.len(), &seen["calibration"]["epochs"]), (2, &json!(100)), "two batches, 200 steps");
        for b in blocks {
            let (start, end) = (b["error_start"].as_f64().unwrap(), b["error"].as_f64().unwrap());
            assert!(b["kept"] == json!(true) && end < 0.8 * start, "{b}");
        }
        assert!(kl(&case, name) < 0.7 * kl(&case, "rtn"));
    }
}

#[test]
fn mixed_precision_keeps_its_budget_and_is_better_than_the_fewest_bits() {
    let case = Case::new();
    let grid = ["--group-size", "32", "--calib-context", "64"];
    let candidates = ["--candidates", "W3A16,W4A16,W8A16"];
    let seen = case.quantize("mixed", &[&grid[..], &["--target-bits", "5.5"], &candidates].concat());
    let mixed = &seen["mixed_precision"];
    let bits = mixed["bits_per_weight"].as_f64().unwrap();
    assert!(bits <= 5.5 && bits > 5.0, "{bits}");
    assert!((seen["bits_per_weight"].as_f64().unwrap() - bits).abs() < 1e-9, "what is written is what was planned");
    let layers = mixed["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 8, "q, k and v are one, gate and up are one");
    for layer in layers {
        let kl = |i: usize| layer["choices"][i]["kl"].as_f64().unwrap();
        assert!(kl(0) > kl(1) && kl(1) > kl(2), "{layer}");
    }
    let config = quantization(&case.at("mixed"));
    assert!(config["config_groups"].as_object().unwrap().len() > 1 && config["format"] == "pack-quantized");
    assert!(works(&["inspect", text(&case.at("mixed"))]).contains("no faults found"));
    let file = std::fs::read(case.at("mixed/dsq-sensitivity.json")).unwrap();
    assert_eq!(serde_json::from_slice::<Value>(&file).unwrap(), *mixed);
    let model = case.at("model");
    works(&["quantize", text(&model), "--out", text(&case.at("four")), "--group-size", "32"]);
    assert!(kl(&case, "mixed") < kl(&case, "four"));
    // With a method, and a layer that keeps its own scheme.
    let own = ["--override", "model.layers.0.mlp.down_proj=W8A16:32", "--method", "gptq"];
    let seen = case.quantize("own", &[&grid[..], &["--target-bits", "4"], &candidates, &own].concat());
    let layers = seen["mixed_precision"]["layers"].as_array().unwrap();
    assert!(layers.len() == 7 && layers.iter().all(|l| l["chosen"] == "W3A16"), "4 bits: codes of 3 and scales");
}

#[test]
fn evaluation_on_the_calibration_text_is_told() {
    let case = Case::new();
    case.quantize("out", &[&WINDOWS[..], &["--method", "gptq", "--group-size", "32"]].concat());
    assert_eq!(eval(&case, "out")["calibration_overlap"], json!(1.0));
    let told = |held: &Path| {
        let folder = case.at("out");
        let out =
            command::dsq(&["eval", text(&folder), "--text", text(held), "--context", "64", "--max-tokens", "128"]);
        assert!(out.status.success());
        String::from_utf8(out.stderr).unwrap()
    };
    assert!(told(&case.at("calib.txt")).contains("100.0% of the lines"));
    let other = case.at("other.txt");
    std::fs::write(&other, "a line that no other text of these tests has\n".repeat(40)).unwrap();
    assert_eq!(told(&other), "");
    // A sketch that is none is refused, before any model is loaded.
    std::fs::write(case.at("out/dsq-calibration.json"), "[]").unwrap();
    let args = ["eval", text(&case.at("out")), "--text", text(&other)].map(str::to_owned);
    command::fails(&args.each_ref().map(String::as_str), 3, &["dsq-calibration.json", "sketch"]);
}

#[test]
fn options_that_cannot_work_are_refused_before_any_work() {
    let case = Case::new();
    let (model, calib, out) = (case.at("model"), case.at("calib.txt"), case.at("out"));
    let (model, calib) = (text(&model), text(&calib));
    let refused = |more: &[&str], words: &[&str]| fails(&[&["quantize", model][..], more].concat(), &out, 2, words);
    for (option, more) in [
        ("--observer weighted-mse", &["--observer", "weighted-mse", "--group-size", "32"][..]),
        ("static activations", &["--scheme", "FP8"][..]),
        ("static activations", &["--scheme", "W8A8", "--static-activations"]),
        ("--smooth-quant", &["--scheme", "W8A8", "--smooth-quant", "0.5"]),
        ("--target-bits", &["--target-bits", "5", "--group-size", "32"]),
    ] {
        refused(more, &["--calib", option, "got none"]);
    }
    refused(&["--scheme", "W8A8", "--smooth-quant", "1.5", "--calib", calib], &["--smooth-quant", "0 to 1", "1.5"]);
    refused(&["--smooth-quant", "0.5", "--calib", calib, "--group-size", "32"], &["--smooth-quant", "W8A8", "W4A16"]);
    let both = ["--scheme", "W8A8", "--method", "gptq", "--awq-scales", "--smooth-quant", "0.5", "--calib", calib];
    refused(&both, &["--smooth-quant", "AWQ"]);
    refused(&["--static-activations", "--group-size", "32"], &["--static-activations", "W8A8", "W4A16"]);
    refused(&["--scheme", "FP8_DYNAMIC", "--static-activations"], &["--static-activations", "FP8_DYNAMIC"]);
    refused(&["--scheme", "FP8_DYNAMIC", "--asymmetric-activations"], &["--asymmetric-activations", "no zero point"]);
    refused(&["--asymmetric-activations", "--group-size", "32"], &["--asymmetric-activations", "float"]);
    refused(&["--scheme", "FP8_BLOCK"], &["128", "64"]);
    refused(&["--candidates", "W4A16"], &["--target-bits"]);
    let budget = ["--target-bits", "6", "--group-size", "32", "--calib", calib];
    refused(&[&budget[..], &["--scheme", "W4A8"]].concat(), &["--scheme", "--candidates", "got W4A8"]);
    refused(&[&budget[..], &["--override", "re:model.*=W4A16:32"]].concat(), &["--target-bits", "got none"]);
    for mixed in [["--ignore", "v_proj"], ["--override", "up_proj=W4A16:32"]] {
        let words = ["read one tensor", "INT8 PerToken", "float"];
        refused(&[&["--scheme", "W4A8", "--group-size", "32"][..], &mixed].concat(), &words);
    }
    for (option, value) in [("--steps", "1000001"), ("--epochs", "0"), ("--epochs", "18446744073709551615")] {
        refused(&["--method", "autoround", "--calib", calib, option, value], &[option, "1000000", value]);
    }
    for (more, words) in [
        (&["--target-bits", "0.5"][..], &["--target-bits", "0.5"][..]),
        (&["--target-bits", "4"], &["--target-bits", "at least 5.0000", "got 4"]),
        (&["--target-bits", "5", "--candidates", "W4A16,W5A16"], &["--candidates", "W5A16"]),
        (&["--target-bits", "5", "--candidates", "W4A16,W8A8"], &["--candidates", "alike"]),
        (&["--target-bits", "5", "--candidates", "W4A16,W8A16:x"], &["--candidates", "W8A16:x"]),
    ] {
        refused(&[&["--calib", calib, "--calib-tokens", "512", "--group-size", "32"][..], more].concat(), words);
    }
}

#[test]
fn float_codes_go_through_every_method_that_trains_and_the_folder_is_what_was_trained() {
    let case = Case::new();
    for (i, (scheme, more)) in [
        ("NVFP4A16", &["--method", "gptq"][..]),
        ("NVFP4A16", &["--method", "blockwise", "--steps", "3"]),
        ("MXFP4A16", &["--method", "autoround", "--epochs", "2", "--steps", "3", "--end-weight-rate", "0.0005"]),
        ("FP8A16_BLOCK", &["--method", "blockwise", "--awq-scales", "--steps", "3"]),
        ("NVFP4A16", &["--method", "awq"]),
        ("NVFP4A16", &["--method", "gptq", "--awq-scales"]),
    ]
    .into_iter()
    .enumerate()
    {
        let name = format!("out{i}");
        case.quantize(&name, &[&WINDOWS[..], &["--scheme", scheme], more].concat());
        let folder = case.at(&name);
        assert!(works(&["inspect", text(&folder)]).contains("no faults found"), "{scheme} {more:?}");
        let distance = apart(&folder);
        assert!(distance < 1e-5, "{scheme} {more:?}: {distance}");
        assert!(kl(&case, &name) < 4.0, "{scheme} {more:?}: {}", kl(&case, &name));
    }
}
