//! `dsq export --format gguf` and recipes that train on the blocks of a GGUF file, as a person runs them. The files by themselves
//! are dsq-checkpoint's tests (`gguf_export.rs`); llama.cpp's answers are tests/conformance.

use crate::command::{cached, dsq, fails, faults_of, text, works};
use dsq_checkpoint::Checkpoint;
use dsq_runtime::{LlamaRuntime, Logits};
use serde_json::Value;
use std::path::{Path, PathBuf};

const TYPES: [&str; 5] = ["F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M"];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

/// Exports as GGUF; stdout.
fn gguf(model: &Path, out: &Path, ty: &str, more: &[&str]) -> String {
    works(&[&["export", text(model), "--out", text(out), "--format", "gguf", "--gguf-type", ty][..], more].concat())
}

fn logits(model: &Path) -> Vec<f32> {
    let runtime = LlamaRuntime::load(&Checkpoint::open(model).unwrap(), 2).unwrap();
    let ids: Vec<u32> = (0..48).map(|i| (i * 37 + 11) % 96).collect();
    let mut cache = runtime.new_cache(ids.len()).unwrap();
    runtime.forward(&ids, &mut cache, Logits::All).unwrap()
}

#[test]
fn a_file_runs_as_its_dequantized_weights_do() {
    let dir = tempfile::tempdir().unwrap();
    for model in ["llama_tiny", "llama_tiny_untied"] {
        for ty in TYPES {
            let (out, float) =
                (dir.path().join(format!("{model}-{ty}.gguf")), dir.path().join(format!("{model}-{ty}")));
            let seen = gguf(&golden(model), &out, ty, &[]);
            assert!(seen.contains("bits per weight") && seen.contains("proof: "), "{seen}");
            works(&["export", text(&out), "--out", text(&float), "--format", "safetensors"]);
            // The same values in f32, through another file: the same bits.
            assert_eq!(logits(&out), logits(&float), "{model} {ty}");
            let far = logits(&golden(model)).iter().zip(logits(&out)).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
            assert!(far > 0.0 && (ty != "F16" || far < 0.1), "{model} {ty}: {far}");
            let shown = dsq(&["inspect", text(&out), "--json"]);
            let inspected: Value = serde_json::from_slice(&shown.stdout).unwrap();
            // No matrix of these is wide enough for a block of Q4_K, which the name of the file promises.
            let known = |f: &Value| ty == "Q4_K_M" && f["field"] == "";
            assert!(faults_of(&inspected).into_iter().all(known), "{inspected}");
            assert!(ty == "Q4_K_M" || shown.status.code() == Some(0), "{inspected}");
            // A file for token ids only is told by one note.
            let faults = inspected["faults"].as_array().unwrap();
            let missing = |f: &&Value| f["problem"] == "expected a tokenizer, got none" && f["severity"] == "note";
            assert_eq!(faults.iter().filter(missing).count(), 1, "{inspected}");
        }
    }
}

/// Rows that no block divides get another type, which is printed and counted, or the file is refused.
#[test]
fn c031_rows_that_blocks_do_not_divide_are_told() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("m"), dir.path().join("m.gguf"));
    crate::size::llama(&model, 2, 192, 172, false);
    // 192 is no multiple of 256: Q5_0 for Q4_K, Q8_0 for Q6_K. 172 is none of 32: F16.
    let seen = gguf(&model, &out, "Q4_K_M", &[]);
    assert!(["Q5_0 ", "Q8_0 ", "F16 "].iter().all(|ty| seen.contains(ty)) && !seen.contains("Q4_K "), "{seen}");
    let shown: Value =
        serde_json::from_str(&String::from_utf8(dsq(&["inspect", text(&out), "--json"]).stdout).unwrap()).unwrap();
    let down = shown["rows"].as_array().unwrap().iter().find(|r| r["name"] == "model.layers.0.mlp.down_proj.weight");
    assert_eq!(down.unwrap()["type"], "F16");
    assert!(seen.contains(&format!("{:.4} bits per weight", shown["bits_per_weight"].as_f64().unwrap())), "{seen}");
    for ty in ["Q4_0", "Q8_0"] {
        let to = dir.path().join(ty);
        let args = ["export", text(&model), "--out", text(&to), "--format", "gguf", "--gguf-type", ty];
        fails(&args, 2, &["down_proj", "172", "32"]);
        assert!(!to.exists());
    }
}

/// The runtime computes from a file, bit for bit, what it computes from the folder that it was made of.
#[test]
fn a_file_of_any_architecture_runs_as_its_folder_does() {
    let dir = tempfile::tempdir().unwrap();
    for (name, changes) in [
        ("qwen2_tiny", serde_json::json!({"use_sliding_window": false})),
        ("qwen3_tiny", serde_json::json!({})),
        ("mistral_tiny", serde_json::json!({"sliding_window": null})),
        ("llama_tiny_llama3rope", serde_json::json!({})),
        ("mixtral_tiny", serde_json::json!({})),
        ("deepseek_v2_lite_tiny", serde_json::json!({"rms_norm_eps": 1e-6})),
        ("deepseek_v3_tiny", serde_json::json!({"rms_norm_eps": 1e-6})),
    ] {
        let [model, out] = [name, "m.gguf"].map(|n| dir.path().join(n));
        std::fs::create_dir(&model).unwrap();
        std::fs::copy(golden(name).join("model.safetensors"), model.join("model.safetensors")).unwrap();
        let config = std::fs::read(golden(name).join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&config).unwrap();
        config.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        std::fs::write(model.join("config.json"), config.to_string()).unwrap();
        gguf(&model, &out, "F32", &["--overwrite"]);
        assert_eq!(logits(&model), logits(&out), "{name}");
        let seen = dsq(&["inspect", text(&out), "--json"]).stdout;
        let seen: Value = serde_json::from_slice(&seen).unwrap();
        assert!(faults_of(&seen).is_empty(), "{seen}");
        // In blocks: every part of a stacked tensor is read back as it was written, or the export fails.
        if !name.starts_with("deepseek") {
            gguf(&model, &out, "Q8_0", &["--overwrite"]);
            assert_ne!(logits(&model), logits(&out), "{name}");
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    for ty in ["Q4_K_M", "Q4_0"] {
        let files = ["1", "2", "7"].map(|threads| {
            let out = dir.path().join("m.gguf");
            gguf(&golden("llama_tiny_untied"), &out, ty, &["--threads", threads, "--overwrite"]);
            (std::fs::read(&out).unwrap(), std::fs::read(dir.path().join("m.gguf.dsq-proof.json")).unwrap())
        });
        assert!(files[0] == files[1] && files[1] == files[2]);
    }
}

#[test]
fn options_that_do_not_fit_are_refused_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out, q) = (golden("llama_tiny"), dir.path().join("x.gguf"), dir.path().join("q"));
    let base = ["export", text(&model), "--out", text(&out)];
    let with = |more: &[&'static str]| [&base[..], more].concat();
    fails(&with(&["--format", "gguf"]), 2, &["--gguf-type", "Q4_K_M", "got none"]);
    fails(&with(&["--format", "safetensors", "--gguf-type", "Q4_0"]), 2, &["--gguf-type", "--format gguf"]);
    fails(
        &with(&["--format", "gguf", "--gguf-type", "Q4_0", "--dtype", "bf16"]),
        2,
        &["--dtype", "a float source", "got BF16"],
    );
    let bad = dsq(&with(&["--format", "gguf", "--gguf-type", "Q5_K_M"]));
    assert_eq!(bad.status.code(), Some(2));
    fails(&with(&["--format", "compressed-tensors"]), 2, &["float weights"]);
    fails(&with(&["--format", "safetensors", "--requantize"]), 2, &["--requantize", "got it"]);
    // Codes that no block of the type holds: the size of the loss is told, and nothing is written.
    works(&["quantize", text(&model), "--out", text(&q), "--group-size", "16", "--scale-dtype", "f16"]);
    let args = ["export", text(&q), "--out", text(&out), "--format", "gguf", "--gguf-type", "Q4_0"];
    fails(&args, 2, &["Q4_0 does not hold", "14 tensors", "max abs error", "relative Frobenius", "hint: --requantize"]);
    assert!(!out.exists());
    let seen = dsq(&[&args[..], &["--requantize", "--json"]].concat());
    let told = String::from_utf8(seen.stderr).unwrap();
    assert!(told.starts_with("note: requantized: values change in 15 tensors: max abs error"), "{told}");
    let json: Value = serde_json::from_slice(&seen.stdout).unwrap();
    assert!(json["loss"]["max_abs_error"].as_f64().unwrap() > 0.0, "{json}");
    assert_eq!(json["tensors"]["requantized"], 14);
}

#[test]
fn codes_go_to_gguf_and_back_without_loss() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let model = golden("llama_tiny");
    for (scheme, ty, kind) in [
        (&["--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "f16"][..], "Q4_0", "INT4 group 32, F16 scales"),
        (&["--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "bf16"], "Q4_0", "INT4 group 32, F16 scales"),
        (&["--scheme", "W8A16", "--group-size", "32", "--scale-dtype", "f16"], "Q8_0", "INT8 group 32, F16 scales"),
    ] {
        let [q, file, back, again] = ["q", "q.gguf", "back", "again.gguf"].map(at);
        works(&[&["quantize", text(&model), "--out", text(&q), "--overwrite"][..], scheme].concat());
        let seen = gguf(&q, &file, ty, &["--overwrite"]);
        assert!(
            seen.contains("every value of the quantized source was kept") && seen.contains("14 transcoded"),
            "{seen}"
        );
        works(&["export", text(&file), "--out", text(&back), "--format", "compressed-tensors", "--overwrite"]);
        assert!(works(&["inspect", text(&back)]).contains(kind));
        let (a, b) = (Checkpoint::open(&q).unwrap(), Checkpoint::open(&back).unwrap());
        for spec in a.config().linears() {
            let of = |c: &Checkpoint| c.linear(&spec.module).unwrap();
            let (dsq_checkpoint::LinearWeight::Quantized(a), dsq_checkpoint::LinearWeight::Quantized(b)) =
                (of(&a), of(&b))
            else {
                panic!("codes")
            };
            assert_eq!((&a.codes, &a.scales), (&b.codes, &b.scales), "{}", spec.module);
        }
        gguf(&back, &again, ty, &["--overwrite"]);
        let tensors = |p: &Path| {
            let c = Checkpoint::open(p).unwrap();
            c.names().into_iter().map(|n| (c.sha256(&n).unwrap(), n)).collect::<Vec<_>>()
        };
        assert_eq!(tensors(&file), tensors(&again));
    }
    // llama.cpp's own Q4_0 has steps of either sign: zero points, the same values. Its Q4_1 has minima that no zero point is.
    let [file, back] = ["n.gguf", "n"].map(at);
    gguf(&model, &file, "Q4_0", &[]);
    works(&["export", text(&file), "--out", text(&back), "--format", "compressed-tensors"]);
    assert!(works(&["inspect", text(&back)]).contains("INT4 group 32, F16 scales and zero points"));
    assert_eq!(logits(&file).len(), logits(&back).len());
    let [a, b] = [&file, &back].map(|p| Checkpoint::open(p).unwrap());
    for spec in a.config().linears() {
        assert!(a.linear(&spec.module).unwrap().into_f32() == b.linear(&spec.module).unwrap().into_f32());
    }
    gguf(&model, &file, "Q4_1", &["--overwrite"]);
    let args = ["export", text(&file), "--out", text(&back), "--format", "compressed-tensors", "--overwrite"];
    fails(&args, 2, &["whole multiples", "14 layers", "max abs error", "hint: --requantize"]);
    works(&[&args[..], &["--requantize"]].concat());
}

#[test]
fn smollm2_is_copied_tensor_by_tensor_with_its_tokenizer() {
    let Some(model) = cached("smollm2.gguf") else { return };
    let dir = tempfile::tempdir().unwrap();
    let (out, folder, again) = (dir.path().join("a.gguf"), dir.path().join("f"), dir.path().join("b.gguf"));
    let seen = gguf(&model, &out, "Q4_1", &[]);
    assert!(seen.contains("tensors 272 copied"), "{seen}");
    let (a, b) = (Checkpoint::open(&model).unwrap(), Checkpoint::open(&out).unwrap());
    for name in a.names() {
        assert_eq!(a.sha256(&name).unwrap(), b.sha256(&name).unwrap(), "{name}");
    }
    assert_eq!(a.tokenizer_json().unwrap(), b.tokenizer_json().unwrap());
    // Through a folder the keys are made from tokenizer.json: the same tokenizer, and f16 holds the values of no Q4_1 block less.
    works(&["export", text(&model), "--out", text(&folder), "--format", "safetensors", "--dtype", "f16"]);
    gguf(&folder, &again, "F16", &[]);
    let c = Checkpoint::open(&again).unwrap();
    assert_eq!(a.tokenizer_json().unwrap(), c.tokenizer_json().unwrap());
    assert_eq!(a.chat_template().unwrap(), c.chat_template().unwrap());
    assert_eq!(a.config(), c.config());
}

/// A recipe that trains for a second.
pub fn recipe(dir: &Path) -> PathBuf {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/data/pydoc");
    let train: String = std::fs::read_to_string(data.join("train.txt")).unwrap().chars().take(30_000).collect();
    std::fs::write(dir.join("short.txt"), train).unwrap();
    let data = data.display();
    let text = format!(
        "name = \"micro\"\n[model]\narchitecture = \"llama\"\nvocab_size = 1024\nhidden_size = 256\n\
         intermediate_size = 288\nnum_hidden_layers = 2\nnum_attention_heads = 4\nmax_position_embeddings = 32\n\
         [data]\ntrain = \"short.txt\"\nheldout = \"{data}/heldout.txt\"\ntokenizer = \"{data}/tokenizer.json\"\n\
         [train]\nsteps = 3\nbatch_size = 4\nseq_len = 32\nlearning_rate = 3e-3\n\
         [qat]\nsteps = 2\nlearning_rate = 5e-4\nfloat_equal_tokens = false\n\
         [quant]\nscheme = \"Q4_0\"\nignore = [\"re:.*layers\\\\.1\\\\.mlp\\\\.up_proj$\"]\n[export]\nformat = \"gguf\"\n\
         [eval]\ncontext = 32\nmax_tokens = 256\n"
    );
    std::fs::write(dir.join("micro.toml"), text).unwrap();
    dir.join("micro.toml")
}

#[test]
fn recipes_train_on_the_blocks_that_their_file_stores() {
    let dir = tempfile::tempdir().unwrap();
    let recipe = recipe(dir.path());
    for (ty, down) in [("Q4_0", "Q4_0"), ("Q4_1", "Q4_1"), ("Q8_0", "Q8_0"), ("Q4_K_M", "Q8_0")] {
        let run = dir.path().join(ty);
        let set = format!("quant.scheme={ty}");
        let seen = works(&["train", text(&recipe), "--out", text(&run), "--set", &set, "--json"]);
        let seen: Value = serde_json::from_str(&seen).unwrap();
        let of = |name: &str| {
            seen["rows"].as_array().unwrap().iter().find(|r| r["name"] == name).unwrap()["perplexity"].as_f64()
        };
        let (qat, exported, rtn) = (of("qat").unwrap(), of("exported").unwrap(), of("rtn").unwrap());
        assert!((qat / exported - 1.0).abs() < 1e-6, "{ty}: {qat} {exported}");
        assert!((rtn / qat - 1.0).abs() < 0.2, "{ty}: {rtn} {qat}");
        let file = run.join("exported.gguf");
        let (out, master) = (Checkpoint::open(&file).unwrap(), Checkpoint::open(&run.join("master")).unwrap());
        let kind = |module: &str| out.info(&format!("model.layers.1.{module}.weight")).unwrap().dtype;
        assert_eq!((kind("mlp.down_proj").as_str(), kind("mlp.up_proj").as_str()), (down, "F32"), "{ty}");
        assert_eq!(out.info("model.embed_tokens.weight").unwrap().dtype, "F32");
        for spec in out.config().linears() {
            let name = format!("{}.weight", spec.module);
            let grid = dsq_quant::GgufGrid::ALL.into_iter().find(|g| g.name() == out.info(&name).unwrap().dtype);
            let mut values = master.read_f32(&name).unwrap();
            if let Some(grid) = grid {
                // The blocks are those of the master weights, by the formula of the forward pass.
                let bytes = grid.quantize(&values).unwrap();
                grid.dequantize(&bytes, &mut values).unwrap();
            }
            assert!(out.read_f32(&name).unwrap() == values, "{ty} {name}");
        }
        let heldout = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/data/pydoc/heldout.txt");
        let args = ["eval", text(&file), "--text", text(&heldout), "--context", "32", "--max-tokens", "256", "--json"];
        let seen: Value = serde_json::from_str(&works(&args)).unwrap();
        assert_eq!(seen["rows"][0]["perplexity"].as_f64(), Some(exported), "{ty}: the file by itself");
    }
    for (set, words) in [
        ("quant.scheme=W4A16", &["export.format", "expected \"compressed-tensors\"", "Q4_K_M, got \"gguf\""][..]),
        ("export.format=compressed-tensors", &["export.format", "expected \"gguf\"", "Q4_0"]),
        ("quant.observer=mse", &["observer: expected no such key", "Q4_0 leaves no choice", "got \"mse\""]),
        ("quant.group_size=64", &["group_size", "32", "got 64"]),
        ("qat.learned_scales=true", &["qat.learned_scales", "Q4_0", "got true"]),
        ("model.intermediate_size=80", &["down_proj (80)"]),
        ("quant.scheme=Q5_K_M", &["Q5_K_M", "Q4_K_M"]),
    ] {
        let out = dsq(&["train", text(&recipe), "--check", "--set", set]);
        let err = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(2), "{set}: {err}");
        assert!(words.iter().all(|w| err.contains(w)), "{set}: {err}");
    }
}
