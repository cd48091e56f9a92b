//! `dsq export --format gptq|awq` and commands on such folders, as a person runs them. The folders by themselves are dsq-checkpoint's
//! tests (`columns.rs`); the peers' answers are tests/conformance.

use crate::command::{dsq, fails, text, works};
use dsq_checkpoint::{Checkpoint, LinearWeight};
use dsq_runtime::{LlamaRuntime, Logits};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn export(model: &Path, out: &Path, more: &[&str]) -> String {
    works(&[&["export", text(model), "--out", text(out), "--overwrite", "--format"][..], more].concat())
}

fn quantize(model: &str, out: &Path, more: &[&str]) {
    let f16: &[&str] = if more.contains(&"--scale-dtype") { &[] } else { &["--scale-dtype", "f16"] };
    works(&[&["quantize", text(&golden(model)), "--out", text(out), "--overwrite"][..], f16, more].concat());
}

fn logits(model: &Path) -> Vec<f32> {
    let runtime = LlamaRuntime::load(&Checkpoint::open(model).unwrap(), 2).unwrap();
    let ids: Vec<u32> = (0..48).map(|i| (i * 37 + 11) % 96).collect();
    let mut cache = runtime.new_cache(ids.len()).unwrap();
    runtime.forward(&ids, &mut cache, Logits::All).unwrap()
}

/// Codes, scales and zero points of every layer but the scheme that says so.
fn codes(model: &Path) -> Vec<(Vec<i8>, Vec<f32>, Vec<i8>)> {
    let ckpt = Checkpoint::open(model).unwrap();
    let linears = ckpt.config().linears().into_iter();
    linears
        .filter(|spec| ckpt.is_quantized(&spec.module))
        .map(|spec| {
            let LinearWeight::Quantized(m) = ckpt.linear(&spec.module).unwrap() else { panic!("codes") };
            let zeros = if m.zeros.is_empty() { vec![0; m.scales.len()] } else { m.zeros };
            (m.codes, m.scales, zeros)
        })
        .collect()
}

#[test]
fn a_folder_runs_as_the_one_it_came_from() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for model in ["llama_tiny", "llama_tiny_untied"] {
        for (scheme, formats) in [
            (
                &["--scheme", "W4A16", "--group-size", "32"][..],
                &[&["gptq"][..], &["gptq", "--gptq-version", "v2"], &["awq"]][..],
            ),
            (&["--scheme", "W4A16", "--granularity", "channel"], &[&["gptq"], &["awq"]]),
            (
                &["--scheme", "W4A16", "--group-size", "32", "--asymmetric"],
                &[&["gptq", "--gptq-version", "v2"], &["awq"]],
            ),
            (&["--scheme", "W8A16", "--group-size", "32"], &[&["gptq"]]),
            (&["--scheme", "W2A16", "--group-size", "32"], &[&["gptq"]]),
            (&["--scheme", "W4A16", "--group-size", "32", "--ignore", "down_proj"], &[&["gptq"], &["awq"]]),
        ] {
            let [q, out, back] = ["q", "out", "back"].map(at);
            // The head stays in float here: AWQ has no quantized one. GPTQ has, below.
            quantize(model, &q, scheme);
            for format in formats {
                // The untied model has layers of 48 outputs, which GPTQ does not hold.
                if model == "llama_tiny_untied" && format[0] == "gptq" {
                    let args =
                        [&["export", text(&q), "--out", text(&out), "--overwrite", "--format"][..], format].concat();
                    fails(&args, 2, &["k_proj", "multiples of 32, got 48 and 64"]);
                    continue;
                }
                let seen = export(&q, &out, format);
                assert!(seen.contains("proof: every tensor was read back equal"), "{seen}");
                assert_eq!(logits(&q), logits(&out), "{model} {scheme:?} {format:?}");
                assert_eq!(codes(&q), codes(&out));
                assert!(works(&["inspect", text(&out)]).contains("no faults found"));
                // And back: the same codes, and the same bytes when the way is taken again.
                export(&out, &back, &["compressed-tensors"]);
                assert_eq!((codes(&q), logits(&q)), (codes(&back), logits(&back)));
                let weights = std::fs::read(out.join("model.safetensors")).unwrap();
                export(&back, &out, format);
                assert!(weights == std::fs::read(out.join("model.safetensors")).unwrap());
            }
        }
    }
    // From one to the other.
    let [q, gptq, awq, back] = ["q", "gptq", "awq", "back"].map(at);
    quantize("llama_tiny", &q, &["--scheme", "W4A16", "--group-size", "32"]);
    export(&q, &gptq, &["gptq"]);
    export(&gptq, &awq, &["awq"]);
    export(&awq, &back, &["gptq"]);
    for file in ["model.safetensors", "config.json", "quantize_config.json"] {
        assert!(std::fs::read(gptq.join(file)).unwrap() == std::fs::read(back.join(file)).unwrap(), "{file}");
    }
    let proof: Value = serde_json::from_slice(&std::fs::read(awq.join("dsq-proof.json")).unwrap()).unwrap();
    let transcoded = proof["tensors"].as_array().unwrap().iter().filter(|t| t["became"] == "transcoded").count();
    assert_eq!(transcoded, 14);
    // A quantized head is GPTQ's alone.
    quantize("llama_tiny", &q, &["--scheme", "W4A16", "--group-size", "32", "--override", "lm_head=W4A16:32"]);
    export(&q, &gptq, &["gptq"]);
    assert_eq!(logits(&q), logits(&gptq));
    let settings = std::fs::read_to_string(gptq.join("quantize_config.json")).unwrap();
    assert!(settings.contains("\"lm_head\": true"), "{settings}");
    let args = ["export", text(&q), "--out", text(&awq), "--overwrite", "--format", "awq"];
    fails(&args, 2, &["lm_head", "AWQ has no quantized output matrix"]);
    // dsq eval reads it as any other.
    let tokens = golden("llama_tiny").join("tokens.json");
    works(&["eval", text(&gptq), "--logits-out", text(&at("l.safetensors")), "--tokens-file", text(&tokens)]);
}

#[test]
fn blocks_of_gguf_go_to_gptq_and_awq() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let [file, out, back] = ["m.gguf", "out", "back.gguf"].map(at);
    works(&["export", text(&golden("llama_tiny")), "--out", text(&file), "--format", "gguf", "--gguf-type", "Q4_0"]);
    for format in ["gptq", "awq"] {
        export(&file, &out, &[format]);
        let [a, b] = [&file, &out].map(|p| Checkpoint::open(p).unwrap());
        for spec in a.config().linears() {
            assert!(
                a.linear(&spec.module).unwrap().into_f32() == b.linear(&spec.module).unwrap().into_f32(),
                "{}",
                spec.module
            );
        }
    }
    // Symmetric codes go the other way.
    let [q, gptq] = ["q", "gptq"].map(at);
    quantize("llama_tiny", &q, &["--scheme", "W4A16", "--group-size", "32"]);
    export(&q, &gptq, &["gptq"]);
    let seen = works(&["export", text(&gptq), "--out", text(&back), "--format", "gguf", "--gguf-type", "Q4_0"]);
    assert!(seen.contains("every value of the quantized source was kept") && seen.contains("14 transcoded"), "{seen}");
}

#[test]
fn what_would_change_values_is_told_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let [q, out] = ["q", "out"].map(at);
    quantize("llama_tiny", &q, &["--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "f32"]);
    let to = |format: &'static str| ["export", text(&q), "--out", text(&out), "--format", format].map(str::to_owned);
    for format in ["gptq", "awq"] {
        let args = to(format);
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let words = [
            "stores scales in f16",
            "values change in 14 tensors",
            "max abs error",
            "relative Frobenius",
            "--requantize",
        ];
        fails(&args, 2, &words);
        assert!(!out.exists());
        let seen = dsq(&[&args[..], &["--requantize"]].concat());
        assert!(String::from_utf8(seen.stderr).unwrap().starts_with("note: requantized: values change in 14 tensors"));
        let [(a, b), (c, d)] = [&q, &out]
            .map(|p| codes(p).into_iter().map(|(codes, scales, _)| (codes, scales)).unzip::<_, _, Vec<_>, Vec<_>>());
        assert!(a == c && b != d);
        std::fs::remove_dir_all(&out).unwrap();
    }
    // Zero points of 0 are version 2's alone.
    quantize("llama_tiny", &q, &["--scheme", "W4A16", "--group-size", "32", "--asymmetric"]);
    let args = ["export", text(&q), "--out", text(&out), "--format", "gptq"];
    let has_zero = codes(&q).iter().any(|(_, _, zeros)| zeros.contains(&-8));
    match has_zero {
        true => fails(&args, 2, &["would borrow from its neighbour", "--gptq-version v2"]),
        false => drop(works(&args)),
    }
    let _ = std::fs::remove_dir_all(&out);
    quantize("llama_tiny", &q, &["--scheme", "W4A16", "--group-size", "32", "--override", "down_proj=W8A16:32"]);
    fails(&args, 2, &["down_proj", "one scheme for all"]);
    quantize("llama_tiny", &q, &["--scheme", "FP8A16"]);
    fails(&args, 2, &["GPTQ v1 has no FP8 E4M3 weights"]);
    let float = golden("llama_tiny");
    fails(&["export", text(&float), "--out", text(&out), "--format", "awq"], 2, &["expected a quantized model"]);
    let v2 = ["export", text(&q), "--out", text(&out), "--format", "awq", "--gptq-version", "v2"];
    fails(&v2, 2, &["--gptq-version", "--format gptq"]);
    assert!(!out.exists());
    // Inputs on grids are left out, and told.
    quantize("llama_tiny", &q, &["--scheme", "W8A8"]);
    let seen = export(&q, &out, &["gptq"]);
    assert!(seen.contains("the inputs of 14 layers are on no grid any more"), "{seen}");
    // A folder is quantized once.
    fails(&["quantize", text(&out), "--out", text(&at("x"))], 2, &["quantized already"]);
    // Floats of the same values.
    let float = at("float");
    export(&out, &float, &["safetensors"]);
    let [a, b] = [&out, &float].map(|p| Checkpoint::open(p).unwrap());
    for spec in a.config().linears() {
        assert!(a.linear(&spec.module).unwrap().into_f32() == b.linear(&spec.module).unwrap().into_f32());
    }
}

#[test]
fn recipes_export_gptq_and_awq_folders() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = crate::gguf::recipe(dir.path());
    let sets = |format: &'static str, more: &[&'static str]| {
        let all = [&["quant.scheme=W4A16", "quant.group_size=32", "quant.scale_dtype=f16"][..], more].concat();
        let mut args: Vec<String> = all.iter().flat_map(|s| ["--set".to_owned(), (*s).to_owned()]).collect();
        args.extend(["--set".to_owned(), format!("export.format={format}")]);
        args
    };
    for (format, more, method) in [
        ("gptq", &[][..], "gptq"),
        ("gptq_v2", &["quant.asymmetric=true"], "gptq"),
        ("awq", &["quant.asymmetric=true"], "awq"),
        ("onnx", &[], "compressed-tensors"),
    ] {
        let run = dir.path().join(format);
        let set = sets(format, more);
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let seen = works(&[&["train", text(&recipe), "--out", text(&run), "--json"][..], &set].concat());
        let seen: Value = serde_json::from_str(&seen).unwrap();
        let of = |name: &str| {
            seen["rows"].as_array().unwrap().iter().find(|r| r["name"] == name).unwrap()["perplexity"].as_f64().unwrap()
        };
        assert!((of("qat") / of("exported") - 1.0).abs() < 1e-5, "{format}: {} {}", of("qat"), of("exported"));
        let config: Value = serde_json::from_slice(&std::fs::read(run.join("exported/config.json")).unwrap()).unwrap();
        assert_eq!(config["quantization_config"]["quant_method"], method);
        let out = Checkpoint::open(&run.join("exported")).unwrap();
        assert!(out.faults().is_empty(), "{:?}", out.faults());
        assert!(!out.is_quantized("model.layers.1.mlp.up_proj") && out.is_quantized("model.layers.0.mlp.up_proj"));
        // The file is what the command makes of the folder.
        let (file, again) = (run.join("exported.onnx"), dir.path().join("again.onnx"));
        assert_eq!(file.exists(), format == "onnx");
        if file.exists() {
            works(&["export", text(&run.join("exported")), "--out", text(&again), "--format", "onnx"]);
            assert!(std::fs::read(&file).unwrap() == std::fs::read(&again).unwrap());
            works(&["inspect", text(&file)]);
        }
    }
    for (format, more, words) in [
        ("gptq", &["quant.scheme=W4A8"][..], &["export.format", "no grids of inputs"][..]),
        ("gptq", &["quant.scale_dtype=f32"], &["export.format", "scale_dtype", "got F32"]),
        ("gptq", &["quant.asymmetric=true"], &["export.format", "expected \"gptq_v2\""]),
        ("awq", &["quant.scheme=W8A16"], &["export.format", "no INT8 weights"]),
        ("onnx", &["quant.scheme=W4A8"], &["export.format", "no grids of inputs"]),
        ("onnx", &["quant.group_size=8"], &["export.format", "blocks of 16", "got 8"]),
        ("gptq", &["model.intermediate_size=272"], &["multiples of 32, got 272 and 256"]),
    ] {
        let set = sets(format, more);
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let out = dsq(&[&["train", text(&recipe), "--check"][..], &set].concat());
        let err = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(2), "{set:?}: {err}");
        assert!(words.iter().all(|w| err.contains(w)), "{set:?}: {err}");
    }
}

#[test]
fn groups_in_activation_order_come_back_byte_for_byte() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for (name, scheme) in [("ct_order_symmetric", ""), ("ct_order_asymmetric", " and zero points")] {
        let source = golden(name);
        let [gptq, back, again, float] = ["gptq", "back", "again", "float"].map(at);
        let v2 = &["gptq", "--gptq-version", "v2"];
        export(&source, &gptq, v2);
        export(&gptq, &back, &["compressed-tensors"]);
        export(&back, &again, v2);
        for file in ["model.safetensors", "config.json", "quantize_config.json"] {
            assert!(std::fs::read(gptq.join(file)).unwrap() == std::fs::read(again.join(file)).unwrap(), "{file}");
        }
        let [a, b] = [&source, &back].map(|p| Checkpoint::open(p).unwrap());
        assert_eq!(a.names().len(), b.names().len());
        for tensor in a.names() {
            assert_eq!(a.read_stored(&tensor).unwrap(), b.read_stored(&tensor).unwrap(), "{tensor}");
        }
        let settings: Value =
            serde_json::from_slice(&std::fs::read(gptq.join("quantize_config.json")).unwrap()).unwrap();
        assert_eq!(settings["desc_act"], true);
        let proof: Value = serde_json::from_slice(&std::fs::read(gptq.join("dsq-proof.json")).unwrap()).unwrap();
        let transcoded = proof["tensors"].as_array().unwrap().iter().filter(|t| t["became"] == "transcoded").count();
        assert_eq!(transcoded, 14);
        // The runtime gathers inputs before packed products: the same bits from either folder, and those of floats but for the
        // order of sums.
        let ours = logits(&source);
        assert_eq!(ours, logits(&gptq));
        export(&source, &float, &["safetensors"]);
        let largest = ours.iter().fold(0.0f32, |m, x| m.max(x.abs()));
        let far = ours.iter().zip(logits(&float)).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(far < 1e-5 * largest, "{far} of {largest}");
        let seen = works(&["inspect", text(&gptq)]);
        assert!(seen.contains(&format!("INT4 group 32, F16 scales{scheme} in activation order")), "{seen}");
        assert!(seen.contains("no faults found"), "{seen}");
    }
}
