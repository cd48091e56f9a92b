//! Models of every size: tensors stream through `dsq quantize` and `dsq export` within a bound on memory, folders are split by
//! `--max-shard-size`, `--plan` says what is needed and refuses what is not there. Not the quantization (see `ptq.rs`).

use crate::command::{dsq, fails, text, works};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

/// Writes the folder of a Llama in bf16. `sparse`: the weights are zeros that take no room on the disk.
pub(crate) fn llama(dir: &Path, layers: usize, d: usize, ffn: usize, sparse: bool) {
    std::fs::create_dir_all(dir).unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": d, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": d / 64, "num_key_value_heads": d / 64, "head_dim": 64,
        "vocab_size": 128, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": false,
    });
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let mut tensors =
        vec![("model.embed_tokens.weight".to_owned(), vec![128, d]), ("lm_head.weight".into(), vec![128, d])];
    for i in 0..layers {
        let mut add = |name: &str, shape: [usize; 2]| {
            tensors.push((format!("model.layers.{i}.{name}.weight"), shape.into_iter().filter(|&n| n > 0).collect()));
        };
        for norm in ["input_layernorm", "post_attention_layernorm"] {
            add(norm, [d, 0]);
        }
        for name in ["q", "k", "v", "o"] {
            add(&format!("self_attn.{name}_proj"), [d, d]);
        }
        add("mlp.gate_proj", [ffn, d]);
        add("mlp.up_proj", [ffn, d]);
        add("mlp.down_proj", [d, ffn]);
    }
    tensors.push(("model.norm.weight".into(), vec![d]));
    let (mut header, mut at) = (serde_json::Map::new(), 0u64);
    for (name, shape) in &tensors {
        let end = at + 2 * shape.iter().map(|&n| n as u64).product::<u64>();
        header.insert(name.clone(), json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}));
        at = end;
    }
    let header = Value::Object(header).to_string();
    let mut file = File::create(dir.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    if sparse {
        return file.set_len(8 + header.len() as u64 + at).unwrap();
    }
    let mut state = 1u64;
    let mut run = Vec::new();
    let mut left = at;
    while left > 0 {
        run.clear();
        while run.len() < left.min(1 << 20) as usize {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // A sign, an exponent of a weight and a mantissa: magnitudes from 2^-8 to 2^-5.
            let bits = (state >> 48) as u16;
            run.extend((bits & 0x81ff | 0x3b80).to_le_bytes());
        }
        let take = run.len().min(left as usize);
        file.write_all(&run[..take]).unwrap();
        left -= take as u64;
    }
}

/// The files of a folder.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}

/// Runs a command and gives the most memory that it had, in bytes (Linux tells).
fn peak(args: &[&str]) -> u64 {
    let mut child =
        Command::new(env!("CARGO_BIN_EXE_dsq")).args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut most = 0;
    loop {
        let text = std::fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|l| l.strip_prefix("VmHWM:")?.split_whitespace().next()?.parse::<u64>().ok());
        most = most.max(line.unwrap_or(0) * 1024);
        if let Some(status) = child.try_wait().unwrap() {
            assert!(status.success(), "{args:?}");
            return most;
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn memory_follows_the_largest_tensor_and_not_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let [model, packed, gptq, floats] = ["model", "packed", "gptq", "floats"].map(|n| dir.path().join(n));
    // 67 million weights: 134 MB, 67 MB as codes of a byte; the largest tensor has 0.8 million.
    llama(&model, 20, 512, 1536, false);
    let quantize = ["quantize", text(&model), "--out", text(&packed), "--scale-dtype", "f16", "--threads", "2"];
    let runs: [&[&str]; 3] = [
        &quantize,
        &["export", text(&packed), "--out", text(&gptq), "--format", "gptq", "--threads", "2"],
        &[
            "export",
            text(&packed),
            "--out",
            text(&floats),
            "--format",
            "safetensors",
            "--dtype",
            "bf16",
            "--threads",
            "2",
        ],
    ];
    for args in runs {
        let most = peak(args);
        // The program itself has 10 MB. Less than all codes, and than half of the model.
        assert!(most < 60_000_000, "{args:?}: {most} bytes");
        let again = [args, &["--overwrite", "--plan", "--json"]].concat();
        let plan: Value = serde_json::from_str(&works(&again)).unwrap();
        let said = plan["plan"]["memory_bytes"].as_u64().unwrap();
        assert!(most < said, "{args:?}: {most} bytes, {said} by the plan");
    }
}

/// A run that chooses codes on text has one block in memory at a time: four times the layers take no more.
#[cfg(target_os = "linux")]
#[test]
fn memory_of_a_calibrated_run_follows_the_largest_block_and_not_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let calib = dir.path().join("calib.txt");
    std::fs::write(&calib, "It was a bright cold day in April, and the clocks were striking thirteen. ".repeat(20))
        .unwrap();
    let run = |layers: usize, method: &[&str]| {
        let model = dir.path().join(format!("model{layers}"));
        if !model.exists() {
            // A block has 0.9 million weights.
            llama(&model, layers, 256, 768, false);
            std::fs::write(model.join("tokenizer.json"), crate::ptq::tokenizer().to_string()).unwrap();
        }
        let out = dir.path().join("out");
        let args = ["quantize", text(&model), "--out", text(&out), "--calib", text(&calib), "--calib-tokens", "256"];
        let args = [&args[..], &["--calib-context", "64", "--overwrite", "--threads", "2"], method].concat();
        let plan: Value = serde_json::from_str(&works(&[&args[..], &["--plan", "--json"]].concat())).unwrap();
        (peak(&args), plan["plan"]["memory_bytes"].as_u64().unwrap())
    };
    for method in [&["--method", "gptq"][..], &["--method", "gptaq", "--awq-scales"], &["--kv-cache", "int8"]] {
        let (few, _) = run(4, method);
        let (many, said) = run(16, method);
        // Codes of a byte alone would be 10 MB more, floats 42 MB.
        assert!(many < few + 6_000_000, "{method:?}: {few} and {many} bytes");
        assert!(many < said, "{method:?}: {many} bytes, {said} by the plan");
    }
}

#[test]
fn shards_and_threads_change_no_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    llama(&model, 2, 128, 256, false);
    let quantize = |name: &str, more: &[&str]| {
        let out = dir.path().join(name);
        works(&[&["quantize", text(&model), "--out", text(&out), "--override", "lm_head=W8A16"], more].concat());
        out
    };
    let one = quantize("one", &["--threads", "1"]);
    let whole = files(&one);
    assert_eq!(whole, files(&quantize("three", &["--threads", "3"])));
    let split = quantize("split", &["--max-shard-size", "60kB"]);
    let names: Vec<String> = files(&split).into_keys().collect();
    assert!(names.iter().any(|n| n.starts_with("model-00001-of-")), "{names:?}");
    assert!(!names.contains(&"model.safetensors".into()));
    let stored = |dir: &Path| {
        let proof: Value = serde_json::from_slice(&std::fs::read(dir.join("dsq-proof.json")).unwrap()).unwrap();
        proof["tensors"].clone()
    };
    assert_eq!(stored(&one), stored(&split));
    assert!(works(&["inspect", text(&split)]).contains("no faults found"));
    // Read back from its shards, and written to others.
    let back = |from: &Path, name: &str, more: &[&str]| {
        let out = dir.path().join(name);
        works(&[&["export", text(from), "--out", text(&out), "--format", "compressed-tensors"], more].concat());
        out
    };
    let (a, b) = (back(&one, "a", &[]), back(&split, "b", &["--max-shard-size", "50kB", "--threads", "3"]));
    assert_eq!(stored(&a), stored(&b));
    assert_eq!(files(&a)["model.safetensors"], whole["model.safetensors"]);
    assert!(files(&b).len() > files(&a).len());
    for (args, word) in [(["--max-shard-size", "0"], "\"0\""), (["--max-shard-size", "5 apples"], "5 apples")] {
        let out = dsq(&[&["quantize", text(&model), "--out", text(&dir.path().join("no"))], &args[..]].concat());
        assert_eq!(out.status.code(), Some(2));
        assert!(String::from_utf8(out.stderr).unwrap().contains(word));
    }
    let gguf = dir.path().join("x.gguf");
    let args = ["export", text(&one), "--out", text(&gguf), "--format", "gguf", "--gguf-type", "Q8_0"];
    fails(&[&args[..], &["--max-shard-size", "1GB"]].concat(), 2, &["--max-shard-size", "GGUF"]);
}

#[test]
fn a_plan_says_what_is_needed_and_does_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model"), dir.path().join("out"));
    llama(&model, 2, 128, 256, false);
    let quantize = ["quantize", text(&model), "--out", text(&out), "--plan"];
    let said = works(&quantize);
    for word in ["memory: at most", "disk:   at most", "time:   about", "MB/s"] {
        assert!(said.contains(word), "{said}");
    }
    let plan = |args: &[&str]| -> Value { serde_json::from_str(&works(&[args, &["--json"]].concat())).unwrap() };
    let seen = plan(&quantize);
    assert!(!out.exists() && std::fs::read_dir(dir.path()).unwrap().count() == 1, "a plan leaves nothing");
    let disk = seen["plan"]["disk_bytes"].as_u64().unwrap();
    assert!(seen["plan"]["seconds"].as_f64().unwrap() >= 0.0);
    works(&quantize[..4]);
    let took: u64 = files(&out).values().map(|b| b.len() as u64).sum();
    assert!(took <= disk + 4096 && disk < 2 * took, "{took} bytes, {disk} by the plan");
    for more in [
        &["--format", "compressed-tensors"][..],
        &["--format", "safetensors"],
        &["--format", "gguf", "--gguf-type", "Q8_0"],
    ] {
        let to = dir.path().join("to");
        let args = [&["export", text(&out), "--out", text(&to)], more].concat();
        let seen = plan(&[&args[..], &["--plan"]].concat());
        assert!(!to.exists());
        works(&args);
        let took =
            if to.is_dir() { files(&to).values().map(|b| b.len() as u64).sum() } else { to.metadata().unwrap().len() };
        let disk = seen["plan"]["disk_bytes"].as_u64().unwrap();
        assert!(took <= disk + 8192 && disk < 2 * took, "{more:?}: {took} bytes, {disk} by the plan");
        let _ = std::fs::remove_dir_all(&to).or_else(|_| std::fs::remove_file(&to));
    }
}

/// Shapes of a model larger than any disk here; its zeros take no room.
#[cfg(target_os = "linux")]
#[test]
fn what_is_not_there_is_refused_before_anything_starts() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model"), dir.path().join("out"));
    llama(&model, 700, 16384, 65536, true);
    for more in [&["--plan"][..], &[]] {
        fails(
            &[&["quantize", text(&model), "--out", text(&out)], more].concat(),
            4,
            &["not enough free space", "expected at least", "got"],
        );
        let gguf = dir.path().join("x.gguf");
        let args = ["export", text(&model), "--out", text(&gguf), "--format", "gguf", "--gguf-type", "Q4_0"];
        fails(&[&args[..], more].concat(), 4, &["not enough free space"]);
    }
    // A layer of 4 billion weights is too large for a process of 4 GB.
    let one = dir.path().join("one");
    llama(&one, 1, 16384, 65536, true);
    let run = format!(
        "ulimit -v 4000000; exec '{}' quantize '{}' --out '{}' --plan",
        env!("CARGO_BIN_EXE_dsq"),
        text(&one),
        text(&out)
    );
    let ended = Command::new("sh").args(["-c", &run]).output().unwrap();
    let said = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(5), "{said}");
    assert!(said.contains("memory: expected at least") && said.contains("got"), "{said}");
    assert!(!out.exists());
}
