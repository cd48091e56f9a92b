//! `dsq quantize --kv-cache int8|fp8` as a person runs it: what is written, that the scales are those of the model that ships,
//! that `eval` sees keys and values on their grids, in whatever pieces a sequence comes, and what is refused. Not the codes
//! themselves (see `dsq-quant`), not the kernel (see `dsq-kernels`).

use crate::command::{fails, text, works};
use crate::ptq::Case;
use dsq_checkpoint::Checkpoint;
use dsq_model::{Layer, Llama, Sequences, layers::Embedding};
use dsq_quant::{KvGrid, QuantArgs, QuantType};
use dsq_runtime::{LlamaRuntime, Logits};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const TYPES: [(&str, QuantType); 2] = [("int8", QuantType::Int8), ("fp8", QuantType::Fp8E4M3)];
const SCALES: [&str; 2] = ["model.layers.1.self_attn.k_scale", "model.layers.1.self_attn.v_scale"];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn prompts() -> Vec<Vec<u32>> {
    serde_json::from_slice(&std::fs::read(golden("llama_tiny/tokens.json")).unwrap()).unwrap()
}

/// The header of a folder's weights as JSON, where their data starts, and all bytes.
fn weights(folder: &Path) -> (Value, usize, Vec<u8>) {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..data]).unwrap(), data, bytes)
}

/// Replaces the one F32 value of a tensor.
fn set_scale(folder: &Path, tensor: &str, value: f32) {
    let (header, data, mut bytes) = weights(folder);
    let at = data + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
}

/// Changes `quantization_config.kv_cache_scheme`.
fn set_scheme(folder: &Path, change: impl Fn(&mut Value)) {
    let file = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    change(&mut config["quantization_config"]["kv_cache_scheme"]);
    std::fs::write(&file, config.to_string()).unwrap();
}

fn copy(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

fn logits(model: &Path, at: &Path) -> Vec<f32> {
    let (ids, out) = (golden("llama_tiny/tokens.json"), at.join("logits.safetensors"));
    works(&["eval", text(model), "--logits-out", text(&out), "--tokens-file", text(&ids)]);
    let file = std::fs::read(&out).unwrap();
    let data = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    file[data..].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn worst(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn scheme_and_scales_are_written_shown_and_carried_over() {
    let case = Case::new();
    let without = case.at("without");
    let model = case.at("model");
    works(&["quantize", text(&model), "--out", text(&without), "--group-size", "32"]);
    for (name, qtype) in TYPES {
        let more = ["--calib-context", "64", "--group-size", "32", "--kv-cache", name];
        let seen = case.quantize(name, &more);
        let folder = case.at(name);
        let told = &seen["calibration"]["kv_cache"];
        assert_eq!((&told["type"], told["layers"].as_array().unwrap().len()), (&json!(qtype.name()), 2));
        assert_eq!((&seen["calibration"]["method"], &seen["calibration"]["tokens"]), (&json!("rtn"), &json!(2048)));
        let config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
        let scheme = &config["quantization_config"]["kv_cache_scheme"];
        let kind = if name == "fp8" { "float" } else { "int" };
        for (key, value) in [
            ("num_bits", json!(8)),
            ("type", json!(kind)),
            ("strategy", json!("tensor")),
            ("dynamic", json!(false)),
            ("symmetric", json!(true)),
        ] {
            assert_eq!(scheme[key], value, "{key}");
        }
        let ckpt = Checkpoint::open(&folder).unwrap();
        assert_eq!(ckpt.kv_cache(), Some(QuantArgs::kv_cache(qtype).unwrap()));
        for i in 0..2 {
            let grid = ckpt.kv_grid(i).unwrap().unwrap();
            for (part, p) in [("k_scale", grid.k), ("v_scale", grid.v)] {
                let info = ckpt.info(&format!("model.layers.{i}.self_attn.{part}")).unwrap();
                assert_eq!((info.dtype.as_str(), &info.shape[..]), ("F32", &[1][..]));
                assert_eq!(told["layers"][i][part].as_f64().unwrap() as f32, p.scale);
            }
        }
        // The weights are those of rounding, whatever the cache holds.
        let plain = Checkpoint::open(&without).unwrap();
        for tensor in plain.names() {
            assert_eq!(plain.sha256(&tensor).unwrap(), ckpt.sha256(&tensor).unwrap(), "{tensor}");
        }
        assert_eq!(ckpt.names().len(), plain.names().len() + 4);
        let shown = works(&["inspect", text(&folder)]);
        assert!(shown.contains(&format!("KV cache: {}", qtype.name())) && shown.contains("no faults found"), "{shown}");
        let bits = |folder: &Path| {
            let seen: Value = serde_json::from_str(&works(&["inspect", text(folder), "--json"])).unwrap();
            (seen["bits_per_weight"].clone(), seen["rows"].clone(), seen["kv_cache"].clone())
        };
        let (with, plain) = (bits(&folder), bits(&without));
        assert_eq!((&with.0, &with.1), (&plain.0, &plain.1), "the scales are no weights");
        assert_eq!((&with.2, &plain.2), (told, &Value::Null));
        let proof = case.proof(name);
        let caches: Vec<&Value> =
            proof["tensors"].as_array().unwrap().iter().filter(|t| t["became"] == "kv_cache").collect();
        assert_eq!(caches.len(), 2);
        assert_eq!(caches[1]["name"], "model.layers.1.self_attn");
        assert_eq!(caches[1]["stored"].as_object().unwrap().keys().collect::<Vec<_>>(), SCALES);
        // Another format: codes and scales as they are, or floats and a note.
        let (again, float) = (case.at("again"), case.at("float"));
        let export = |out: &Path, format| {
            works(&["export", text(&folder), "--out", text(out), "--format", format, "--overwrite"])
        };
        export(&again, "compressed-tensors");
        for file in ["config.json", "model.safetensors"] {
            assert_eq!(std::fs::read(folder.join(file)).unwrap(), std::fs::read(again.join(file)).unwrap(), "{file}");
        }
        assert!(export(&float, "safetensors").contains("4 scales of the KV cache are left out"));
        assert_eq!(Checkpoint::open(&float).unwrap().kv_cache(), None);
    }
}

/// With one window the scales can be found again from the folder alone: each layer as it ships, on what the layers before it
/// make with their keys and values on their grids.
#[test]
fn scales_are_those_of_the_model_that_ships() {
    let case = Case::new();
    for (name, qtype) in TYPES {
        for (i, more) in [
            &["--scheme", "W4A16", "--group-size", "32"][..],
            &["--scheme", "W8A8", "--dtype", "bf16"],
            &["--scheme", "W4A16", "--group-size", "16", "--asymmetric", "--method", "awq", "--dtype", "bf16"],
            &["--scheme", "FP8A16", "--method", "gptq", "--awq-scales"],
            &["--scheme", "W2A16", "--group-size", "32", "--method", "blockwise", "--epochs", "1", "--steps", "2"],
        ]
        .into_iter()
        .enumerate()
        {
            let out = format!("{name}{i}");
            // (The later options win over those of `quantize`.)
            let window = ["--calib-context", "128", "--kv-cache", name];
            let (model, calib, folder) = (case.at("model"), case.at("calib.txt"), case.at(&out));
            let fixed = ["quantize", text(&model), "--out", text(&folder), "--calib", text(&calib)];
            works(&[&fixed[..], &["--calib-tokens", "128"], &window, more].concat());
            let ckpt = Checkpoint::open(&folder).unwrap();
            let source = std::fs::read(&calib).unwrap();
            let tokenizer = dsq_runtime::TextTokenizer::new(&ckpt).unwrap();
            let source = String::from_utf8(source).unwrap();
            let ids = tokenizer.encode(&source, dsq_runtime::Specials::AsText).unwrap();
            let ids: Vec<i32> = ids[..128].iter().map(|&id| id as i32).collect();
            let dsq_checkpoint::ModelConfig::Llama(config) = ckpt.config() else { panic!("llama") };
            let device = Default::default();
            let table = ckpt.read_f32("model.embed_tokens.weight").unwrap();
            let embedding = Embedding::from_values(table, [config.vocab_size, config.hidden_size], &device);
            let batch = Sequences::new(config, 1, 128);
            let mut x = embedding.forward(Arc::new(ids), 1);
            for l in 0..config.num_hidden_layers {
                let layer = Layer::from_checkpoint(&ckpt, l, &device).unwrap();
                let found = layer.keys_and_values(layer.qkv_input(x.clone()), &batch);
                let [k, v] = found.map(|x| x.iter().fold(0.0f32, |m, x| m.max(x.abs())));
                let want = KvGrid::from_absmax(QuantArgs::kv_cache(qtype).unwrap(), k, v).unwrap();
                assert_eq!(ckpt.kv_grid(l).unwrap(), Some(want), "{name} {more:?} layer {l}");
                x = layer.forward(x, &batch);
            }
        }
    }
}

/// The logits of the packed model with a cache of codes are those of the graph with fake-quantized keys and values, far closer than
/// to those of a float cache; the same bits in any pieces and on any number of threads.
#[test]
fn eval_sees_keys_and_values_on_their_grids() {
    let case = Case::new();
    for (name, _) in TYPES {
        let more = ["--calib-context", "64", "--group-size", "32", "--kv-cache", name];
        case.quantize(name, &more);
        let folder = case.at(name);
        let seen = logits(&folder, case.dir());
        let ckpt = Checkpoint::open(&folder).unwrap();
        let graph = Llama::from_checkpoint(&ckpt, &Default::default()).unwrap();
        let graph_logits = |model: &Llama| -> Vec<f32> {
            let of = |ids: &Vec<u32>| {
                let ids = Arc::new(ids.iter().map(|&id| id as i32).collect::<Vec<_>>());
                model.logits(ids, 1).into_data().try_into_vec::<f32>().unwrap()
            };
            prompts().iter().flat_map(of).collect()
        };
        let want = graph_logits(&graph);
        // The same weights with a float cache.
        let float = case.at("plain");
        copy(&folder, &float);
        works(&["export", text(&folder), "--out", text(&float), "--format", "safetensors", "--overwrite"]);
        let float =
            graph_logits(&Llama::from_checkpoint(&Checkpoint::open(&float).unwrap(), &Default::default()).unwrap());
        // Row by row: as near as without a quantized cache (`packed_weights_give_the_logits_of_their_dequantized_values`) until a key
        // or value lies within rounding of a tie, and the two passes choose neighbouring codes; then still far nearer than a
        // float cache.
        let rows =
            |a: &[f32], b: &[f32]| a.chunks(128).zip(b.chunks(128)).map(|(a, b)| worst(a, b)).collect::<Vec<_>>();
        let (near, far) = (rows(&seen, &want), rows(&seen, &float));
        println!("{name}: {near:?} from the graph with the same grids, {far:?} from a float cache");
        let equal = near.iter().filter(|d| **d <= 4e-5).count();
        let largest = |d: &[f32]| d.iter().copied().fold(0.0, f32::max);
        assert!(2 * equal > near.len(), "{name}: {equal} of {} rows", near.len());
        assert!(largest(&far) > 1000.0 * largest(&near), "{name}: {:e}, {:e}", largest(&near), largest(&far));

        let prompt = &prompts()[1];
        let load = |threads| LlamaRuntime::load(&ckpt, threads).unwrap();
        let model = load(1);
        let mut cache = model.new_cache(prompt.len()).unwrap();
        let whole = model.forward(prompt, &mut cache, Logits::All).unwrap();
        assert_eq!(whole[..], seen[seen.len() - whole.len()..], "eval runs this");
        for (threads, chunk) in [(1, 1), (2, 1), (2, 7), (3, 16), (2, 40)] {
            let model = load(threads);
            let mut cache = model.new_cache(prompt.len()).unwrap();
            let mut got = Vec::new();
            for part in prompt.chunks(chunk) {
                got.extend(model.forward(part, &mut cache, Logits::All).unwrap());
            }
            assert!(got == whole, "{name}: {threads} threads, pieces of {chunk}");
        }
        // A cache of the float model is not one of this.
        let plain = LlamaRuntime::load(&Checkpoint::open(&case.at("model")).unwrap(), 1).unwrap();
        let e = model.forward(prompt, &mut plain.new_cache(64).unwrap(), Logits::Last).unwrap_err();
        assert!(e.exit_code() == 2 && e.to_string().contains("cache of this model"), "{e}");
        // One byte a value instead of four.
        let bench = |folder: &Path, kv: &str| -> Value {
            let args = [
                "bench",
                text(folder),
                "--repeat",
                "1",
                "--prompt-tokens",
                "200",
                "--gen-tokens",
                "8",
                "--kv-type",
                kv,
                "--json",
            ];
            serde_json::from_str::<Value>(&works(&args)).unwrap()["rows"][0].clone()
        };
        let bytes = |row: &Value| row["kv_cache_bytes"].as_u64().unwrap();
        // 208 positions, two layers, keys and values of two heads of 16.
        let float = bench(&case.at("model"), "f32");
        assert_eq!(bytes(&float) - bytes(&bench(&folder, "f32")), 3 * 208 * 2 * 2 * 32);
        // The same with scales of their own, two f32 for each position and head.
        let own = bench(&case.at("model"), name);
        assert_eq!(bytes(&float) - bytes(&own), (3 * 32 - 2 * 4) * 208 * 2 * 2);
        assert_eq!(own["kv_type"], if name == "int8" { "int8, dynamic" } else { "fp8 e4m3, dynamic" });
    }
}

#[test]
fn any_number_of_threads_writes_the_same_scales() {
    let case = Case::new();
    for (name, _) in TYPES {
        let run = |threads: &str| {
            let more = ["--group-size", "32", "--kv-cache", name, "--threads", threads, "--overwrite"];
            case.quantize("out", &more);
            std::fs::read(case.at("out/model.safetensors")).unwrap()
        };
        let one = run("1");
        assert!(run("2") == one && run("7") == one, "{name}");
    }
}

#[test]
fn what_cannot_work_is_refused_before_any_work() {
    let case = Case::new();
    let (model, out, calib) = (case.at("model"), case.at("out"), case.at("calib.txt"));
    let run = |more: &[&str], code, words: &[&str]| {
        fails(&[&["quantize", text(&model), "--out", text(&out), "--group-size", "32"], more].concat(), code, words);
        assert!(!out.exists());
    };
    run(&["--kv-cache", "int8"], 2, &["--calib", "--kv-cache", "got none", "hint: give --calib"]);
    run(&["--kv-cache", "int8", "--calib-tokens", "64"], 2, &["--calib", "--kv-cache", "got none"]);
    run(&["--kv-cache", "fp8", "--method", "gptq"], 2, &["--calib", "gptq", "got none"]);
    run(&["--kv-cache", "fp8", "--calib", text(&calib)], 3, &["calib.txt", "32768", "4000"]);
    run(&["--kv-cache", "fp8", "--calib", text(&case.at("none"))], 4, &["none", "cannot read"]);
    run(&["--calib", text(&calib)], 2, &["--calib", "--kv-cache", "got rtn"]);
    let e = crate::command::dsq(&["quantize", text(&model), "--out", text(&out), "--kv-cache", "int4"]);
    assert_eq!(e.status.code(), Some(2));
    if let Some(net) = crate::command::cached("efficientnet_lite0.pth") {
        let args = ["quantize", text(&net), "--out", text(&out), "--kv-cache", "fp8", "--calib", text(&calib)];
        fails(&args, 2, &["--kv-cache", "image model", "no KV cache"]);
    }
}

#[test]
fn keys_that_overflow_are_named() {
    let case = Case::new();
    let (model, out, calib) = (case.at("model"), case.at("out"), case.at("calib.txt"));
    let fixed = ["quantize", text(&model), "--out", text(&out), "--calib", text(&calib), "--calib-tokens", "512"];
    let more = ["--group-size", "32", "--kv-cache", "int8"];
    works(&[&fixed[..], &more].concat());
    // In a model that is quantized already: what cannot be stored as a code is refused, not stored as another number.
    case.set("model.layers.1.input_layernorm.weight", f32::MAX);
    let words = ["model.layers.1.self_attn", "keys", "expected finite numbers", "got NaN"];
    fails(&[&fixed[..], &more, &["--overwrite"]].concat(), 6, &words);
    let (header, data, mut bytes) = weights(&out);
    let at = data + header["model.layers.1.input_layernorm.weight"]["data_offsets"][0].as_u64().unwrap() as usize;
    bytes[at..at + 4].copy_from_slice(&f32::MAX.to_le_bytes());
    std::fs::write(out.join("model.safetensors"), bytes).unwrap();
    let model = LlamaRuntime::load(&Checkpoint::open(&out).unwrap(), 2).unwrap();
    let mut cache = model.new_cache(64).unwrap();
    let e = model.forward(&prompts()[0], &mut cache, Logits::Last).unwrap_err();
    assert!(e.exit_code() == 6 && cache.is_empty(), "{e}");
    assert!(
        ["model.layers.1.self_attn", "position 0", "expected finite numbers"].iter().all(|w| e.to_string().contains(w)),
        "{e}"
    );
    let ids = golden("llama_tiny/tokens.json");
    fails(&["eval", text(&out), "--tokens-file", text(&ids)], 6, &["model.layers.1.self_attn", "position 0"]);
}

#[test]
fn a_layer_without_values_gets_epsilon() {
    let case = Case::new();
    let (header, data, mut bytes) = weights(&case.at("model"));
    let [from, to] = [0, 1]
        .map(|i| header["model.layers.0.self_attn.v_proj.weight"]["data_offsets"][i].as_u64().unwrap() as usize + data);
    bytes[from..to].fill(0);
    std::fs::write(case.at("model/model.safetensors"), bytes).unwrap();
    for (name, _) in TYPES {
        case.quantize(name, &["--calib-context", "64", "--group-size", "32", "--kv-cache", name]);
        let ckpt = Checkpoint::open(&case.at(name)).unwrap();
        let [a, b] = [0, 1].map(|i| ckpt.kv_grid(i).unwrap().unwrap().v.scale);
        assert!(a == f32::EPSILON && b != f32::EPSILON && b > 0.0, "{a} {b}");
        assert!(logits(&case.at(name), case.dir()).iter().all(|x| x.is_finite()));
    }
}

#[test]
fn scales_and_schemes_that_cannot_be_used_are_refused_by_name() {
    let case = Case::new();
    case.quantize("good", &["--calib-context", "64", "--group-size", "32", "--kv-cache", "fp8"]);
    let (good, bad) = (case.at("good"), case.at("bad"));
    let ids = golden("llama_tiny/tokens.json");
    let refused = |words: &[&str]| {
        let words = [&["bad"], words].concat();
        fails(&["inspect", text(&bad)], 3, &words);
        fails(&["eval", text(&bad), "--tokens-file", text(&ids)], 3, &words);
    };
    for tensor in SCALES {
        for (value, got) in [
            (0.0, "got 0"),
            (-0.0, "got -0"),
            (-0.5, "got -0.5"),
            (f32::NAN, "got NaN"),
            (f32::INFINITY, "got inf"),
            (f32::NEG_INFINITY, "got -inf"),
            (f32::MAX, "got 34028"),
        ] {
            copy(&good, &bad);
            set_scale(&bad, tensor, value);
            refused(&[tensor, "positive", got]);
        }
        // Under another name of the same length: missing, and one too many.
        copy(&good, &bad);
        let mut bytes = std::fs::read(bad.join("model.safetensors")).unwrap();
        let at = bytes.windows(tensor.len()).position(|w| w == tensor.as_bytes()).unwrap();
        bytes[at + tensor.len() - 1] = b'f';
        std::fs::write(bad.join("model.safetensors"), bytes).unwrap();
        refused(&[tensor, "expected this tensor, got nothing"]);
    }
    // A scale changed to another good one is what the proof tells.
    copy(&good, &bad);
    set_scale(&bad, SCALES[0], 0.125);
    let out = crate::command::dsq(&["inspect", text(&bad)]);
    let shown = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.code() == Some(1) && shown.contains(SCALES[0]) && shown.contains("SHA-256"), "{shown}");

    let field = "quantization_config.kv_cache_scheme";
    let set = |key: &'static str, value: Value| move |s: &mut Value| s[key] = value.clone();
    for (change, words) in [
        (Box::new(set("num_bits", json!(4))) as Box<dyn Fn(&mut Value)>, &["strategy", "FP4"][..]),
        (Box::new(set("num_bits", json!(16))), &["num_bits", "got 16"]),
        (Box::new(set("type", json!("posit"))), &["type", "posit"]),
        (Box::new(set("strategy", json!("attn_head"))), &["strategy", "attn_head"]),
        (Box::new(set("strategy", json!("channel"))), &["one scale for the tensor", "PerChannel"]),
        (Box::new(set("dynamic", json!(true))), &["dynamic", "false", "true"]),
        (Box::new(set("symmetric", json!(false))), &["symmetric", "ymmetric"]),
        (Box::new(set("rotation", json!("hadamard"))), &["rotation", "hadamard"]),
        (Box::new(|s| *s = json!("fp8")), &["expected a JSON object", "fp8"]),
    ] {
        copy(&good, &bad);
        set_scheme(&bad, change);
        refused(&[&["config.json", field], words].concat());
    }
    copy(&good, &bad);
    set_scheme(&bad, |s| {
        *s = json!({"num_bits": 4, "type": "int", "strategy": "tensor", "dynamic": false, "symmetric": true})
    });
    refused(&[field, "INT8 or FP8 E4M3", "INT4"]);
    // Scales that nobody asked for would be ignored.
    copy(&good, &bad);
    set_scheme(&bad, |s| *s = Value::Null);
    refused(&["self_attn.k_scale", "quantization_config does not call for"]);
    // What llm-compressor writes beside: keys that say nothing more, and scales in the model's dtype.
    copy(&good, &bad);
    set_scheme(&bad, |s| {
        for (key, value) in
            [("observer_kwargs", json!({})), ("actorder", Value::Null), ("block_structure", Value::Null)]
        {
            s[key] = value;
        }
    });
    assert_eq!(
        Checkpoint::open(&bad).unwrap().kv_grid(1).unwrap(),
        Checkpoint::open(&good).unwrap().kv_grid(1).unwrap()
    );
}
