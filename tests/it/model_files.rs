//! `dsq quantize`, `dsq export` and `dsq inspect` as a person runs them: exit codes, messages, files.

use crate::command::{dsq, fails, faults_of, text, works};
use dsq_checkpoint::Checkpoint;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn list(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// A copy of a golden model with one F32 value changed.
fn with_value(dir: &Path, tensor: &str, index: usize, value: f32) -> PathBuf {
    with_values(dir, tensor, index, &[value])
}

/// A copy of a golden model with F32 values changed from `index` on.
fn with_values(dir: &Path, tensor: &str, index: usize, values: &[f32]) -> PathBuf {
    let model = dir.join("changed");
    std::fs::create_dir(&model).unwrap();
    std::fs::copy(golden("llama_tiny/config.json"), model.join("config.json")).unwrap();
    let mut file = std::fs::read(golden("llama_tiny/model.safetensors")).unwrap();
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let entries: Value = serde_json::from_slice(&file[8..8 + header]).unwrap();
    let at = 8 + header + entries[tensor]["data_offsets"][0].as_u64().unwrap() as usize + 4 * index;
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    file[at..at + bytes.len()].copy_from_slice(&bytes);
    std::fs::write(model.join("model.safetensors"), file).unwrap();
    model
}

#[test]
fn quantize_inspect_and_export_agree() {
    let dir = tempfile::tempdir().unwrap();
    let (q, again, float) = (dir.path().join("q"), dir.path().join("again"), dir.path().join("float"));
    let model = golden("llama_tiny");
    let json = works(&["quantize", text(&model), "--out", text(&q), "--group-size", "32", "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    // 4 bits and a 32-bit scale for 32 weights.
    assert_eq!(json["bits_per_weight"], 5.0);
    assert_eq!(json["rows"].as_array().unwrap().len(), 14);
    let sum: u64 = json["bytes"].as_object().unwrap().values().map(|v| v.as_u64().unwrap()).sum();
    assert_eq!(sum, std::fs::metadata(q.join("model.safetensors")).unwrap().len());
    assert_eq!(list(&q), ["config.json", "dsq-proof.json", "model.safetensors"]);

    let seen: Value = serde_json::from_str(&works(&["inspect", text(&q), "--json"])).unwrap();
    let row = |name: &str| seen["rows"].as_array().unwrap().iter().find(|r| r["name"] == name).unwrap().clone();
    assert_eq!(row("model.layers.1.mlp.down_proj.weight")["type"], "INT4 group 32, F32 scales");
    assert_eq!(row("model.layers.1.mlp.down_proj.weight")["bits_per_weight"], 5.0);
    assert_eq!(row("model.embed_tokens.weight")["type"], "F32");
    assert!(faults_of(&seen).is_empty(), "{seen}");
    assert!(works(&["inspect", text(&q)]).contains("no faults found"));

    works(&["export", text(&q), "--out", text(&again), "--format", "compressed-tensors"]);
    for name in ["config.json", "model.safetensors"] {
        assert_eq!(std::fs::read(q.join(name)).unwrap(), std::fs::read(again.join(name)).unwrap(), "{name}");
    }
    // The values of the codes as floats; quantizing those on the same grid finds the same values again.
    works(&["export", text(&q), "--out", text(&float), "--format", "safetensors"]);
    assert!(works(&["inspect", text(&float)]).contains("F32"));
    fails(
        &["export", text(&float), "--out", text(&again), "--format", "compressed-tensors", "--overwrite"],
        2,
        &["float weights"],
    );
    fails(&["quantize", text(&q), "--out", text(&dir.path().join("x"))], 2, &["quantized already"]);
}

#[test]
fn a_tied_head_gets_a_scheme_of_its_own_and_becomes_a_matrix_of_its_own() {
    let dir = tempfile::tempdir().unwrap();
    let (q, again, float) = (dir.path().join("q"), dir.path().join("again"), dir.path().join("float"));
    let model = golden("llama_tiny");
    let args = ["--group-size", "32", "--observer", "mse", "--override", "lm_head=W8A16:channel"];
    works(&[&["quantize", text(&model), "--out", text(&q)][..], &args].concat());
    let config: Value = serde_json::from_slice(&std::fs::read(q.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["tie_word_embeddings"], false);
    let groups = config["quantization_config"]["config_groups"].as_object().unwrap();
    let heads: Vec<_> = groups.values().filter(|g| g["targets"] == serde_json::json!(["lm_head"])).collect();
    assert_eq!((groups.len(), heads.len()), (2, 1));
    let weights = &heads[0]["weights"];
    assert_eq!(
        [&weights["num_bits"], &weights["strategy"], &weights["observer"]],
        [&Value::from(8), &Value::from("channel"), &Value::from("mse")]
    );
    assert_eq!(config["quantization_config"]["ignore"], serde_json::json!([]));

    // The embedding stays as it was; the head is within half a step of it, but for what the observer clips.
    works(&["export", text(&q), "--out", text(&float), "--format", "safetensors"]);
    let open = |dir: &Path| dsq_checkpoint::Checkpoint::open(dir).unwrap();
    let (source, out, packed) = (open(&model), open(&float), open(&q));
    let embedding = source.read_f32("model.embed_tokens.weight").unwrap();
    assert_eq!(out.read_f32("model.embed_tokens.weight").unwrap(), embedding);
    let dsq_checkpoint::LinearWeight::Quantized(head) = packed.linear("lm_head").unwrap() else { panic!("codes") };
    let values = out.read_f32("lm_head.weight").unwrap();
    assert_eq!(values, head.dequantize());
    for (i, (v, x)) in values.iter().zip(&embedding).enumerate() {
        let code = head.codes[i];
        let step = head.scales[head.scale_index(i / head.k, 0)];
        assert!((v - x).abs() <= 0.5001 * step || code == -128 || code == 127, "{i}: {x} became {v}");
    }
    // Two schemes survive a second export, byte for byte.
    works(&["export", text(&q), "--out", text(&again), "--format", "compressed-tensors"]);
    for name in ["config.json", "model.safetensors"] {
        assert_eq!(std::fs::read(q.join(name)).unwrap(), std::fs::read(again.join(name)).unwrap(), "{name}");
    }
    let out = text(dir.path()).to_string() + "/x";
    let wrong = |given: &'static str| ["quantize", text(&model), "--out", &out, "--override", given].map(str::to_owned);
    for (given, words) in [
        ("lm_head", &["--override", "PATTERN=SCHEME", "\"lm_head\""][..]),
        ("lm_head=W5A5", &["--override", "W4A16, W8A16", "W5A5"]),
        ("lm_head=W8A16:0", &["--override", "lm_head=W8A16:0"]),
        ("lm_heat=W8A16", &["--override", "lm_heat"]),
        (
            "lm_head=W8A16:48",
            &["got 64 and 48, which does not divide 3 of them", "lm_head (64)", "--ignore down_proj\n"],
        ),
        ("lm_head=NVFP5", &["--override", "NVFP4A16"]),
    ] {
        let args = wrong(given);
        fails(&args.iter().map(String::as_str).collect::<Vec<_>>(), 2, words);
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden("llama_tiny_untied");
    let files = ["1", "2", "7"].map(|threads| {
        let out = dir.path().join(threads);
        works(&["quantize", text(&model), "--out", text(&out), "--group-size", "32", "--threads", threads]);
        list(&out).into_iter().map(|n| std::fs::read(out.join(n)).unwrap()).collect::<Vec<_>>()
    });
    assert!(files[0] == files[1] && files[1] == files[2]);
}

#[test]
fn f089_outputs_that_would_damage_something() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_value(dir.path(), "model.norm.weight", 0, 1.0);
    let before: Vec<_> = list(&model).iter().map(|n| std::fs::read(model.join(n)).unwrap()).collect();
    for overwrite in [&[][..], &["--overwrite"][..]] {
        for (out, word) in [
            (model.clone(), "is the input"),
            (model.join("sub"), "inside the input"),
            (dir.path().to_path_buf(), "holds the input"),
        ] {
            let args = [&["quantize", text(&model), "--out", text(&out)][..], overwrite].concat();
            fails(&args, 2, &["--out", word]);
        }
    }
    let after: Vec<_> = list(&model).iter().map(|n| std::fs::read(model.join(n)).unwrap()).collect();
    assert_eq!(before, after);
    let out = dir.path().join("out");
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("config.json"), "old").unwrap();
    let args = ["quantize", text(&model), "--out", text(&out), "--group-size", "32"];
    fails(&args, 2, &["config.json in it", "hint:", "--overwrite"]);
    works(&[&args[..], &["--overwrite"]].concat());
    assert_eq!(list(dir.path()), ["changed", "out"]);
}

#[test]
fn f022_c005_weights_that_cannot_be_quantized() {
    let tensor = "model.layers.1.self_attn.v_proj.weight";
    for (value, args, words) in [
        (f32::NAN, &[][..], &["non-finite", "NaN at index 77", "got 1"][..]),
        (f32::INFINITY, &[], &["non-finite", "inf at index 77"]),
        (6e5, &["--scale-dtype", "f16"], &["group 2", "6e5", "F16", "bf16"]),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let model = with_value(dir.path(), tensor, 77, value);
        let out = dir.path().join("out");
        let args = [&["quantize", text(&model), "--out", text(&out), "--group-size", "32"][..], args].concat();
        fails(&args, 6, &[&[tensor, "changed"], words].concat());
        assert_eq!(list(dir.path()), ["changed"]);
    }
    // The same value with bf16 scales is fine.
    let dir = tempfile::tempdir().unwrap();
    let model = with_value(dir.path(), tensor, 77, 6e5);
    let out = dir.path().join("out");
    works(&["quantize", text(&model), "--out", text(&out), "--group-size", "32", "--scale-dtype", "bf16"]);
}

#[test]
fn c001_degenerate_groups_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let values: Vec<f32> = (0..96).map(|i| [0.0, 1e-30, -1e-30][i % 3]).collect();
    let model = with_values(dir.path(), "model.layers.0.mlp.up_proj.weight", 64, &values);
    let out = dir.path().join("out");
    let args = ["quantize", text(&model), "--out", text(&out), "--group-size", "32", "--scale-dtype", "f16"];
    let seen = works(&args);
    assert!(seen.contains("model.layers.0.mlp.up_proj: 3 groups hold nothing"), "{seen}");
    let json: Value = serde_json::from_str(&works(&[&args[..], &["--overwrite", "--json"]].concat())).unwrap();
    assert_eq!(json["degenerate_groups"][0]["groups"], 3);
    works(&["inspect", text(&out)]);
}

#[test]
fn f084_f085_settings_are_refused_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (golden("llama_tiny"), dir.path().join("out"));
    let run = |more: &[&str], words: &[&str]| {
        fails(&[&["quantize", text(&model), "--out", text(&out)], more].concat(), 2, words);
        assert!(list(dir.path()).is_empty());
    };
    run(&["--group-size", "64"], &["model.layers.{0..1}.mlp.down_proj (96)", "--ignore down_proj"]);
    run(&["--group-size", "0"], &["--group-size", "got 0"]);
    run(&["--group-size", "32", "--ignore", "dwon_proj"], &["--ignore", "dwon_proj", "match none"]);
    run(&["--group-size", "32", "--ignore", "re:("], &["--ignore", "re:("]);
    run(&["--group-size", "32", "--ignore", "re:.*"], &["at least one layer"]);
    run(&["--group-size", "32", "--scheme", "W5A5"], &["--scheme", "W4A16", "W5A5"]);
    run(&["--group-size", "32", "--scheme", "W4A4"], &["--calib", "static activations", "got none"]);
    for bad in [["--method", "magic"], ["--scale-dtype", "f12"], ["--granularity", "row"], ["--group-size", "-1"]] {
        let out = dsq(&[&["quantize", text(&model), "--out", text(&out)], &bad[..]].concat());
        assert_eq!(out.status.code(), Some(2), "{bad:?}");
    }
    // With the entry of the hint it runs.
    works(&["quantize", text(&model), "--out", text(&out), "--group-size", "64", "--ignore", "down_proj"]);
}

#[test]
fn every_granularity_and_zero_points_pass_the_proof() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (golden("llama_tiny"), dir.path().join("out"));
    for (more, kind) in [
        (&["--granularity", "channel"][..], "INT4 channel, F32 scales"),
        (&["--granularity", "tensor", "--scale-dtype", "bf16"], "INT4 tensor, BF16 scales"),
        (&["--group-size", "16", "--asymmetric"], "INT4 group 16, F32 scales and zero points"),
        (&["--group-size", "32", "--dtype", "bf16", "--scale-dtype", "f16"], "INT4 group 32, F16 scales"),
    ] {
        works(&[&["quantize", text(&model), "--out", text(&out), "--overwrite"], more].concat());
        let seen = works(&["inspect", text(&out)]);
        assert!(seen.contains(kind), "{seen}");
    }
}

/// A bias that is rounded chooses other experts.
#[test]
fn what_decides_between_experts_keeps_its_dtype() {
    let dir = tempfile::tempdir().unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepseek_v3_tiny");
    let (exported, quantized) = (dir.path().join("e"), dir.path().join("q"));
    works(&["export", text(&model), "--out", text(&exported), "--format", "safetensors", "--dtype", "bf16"]);
    works(&["quantize", text(&model), "--out", text(&quantized), "--group-size", "8", "--dtype", "f16"]);
    let source = Checkpoint::open(&model).unwrap();
    for folder in [exported, quantized] {
        let ckpt = Checkpoint::open(&folder).unwrap();
        let mut kept = 0;
        for name in ckpt.names() {
            if name.contains(".mlp.gate.") {
                assert_eq!(ckpt.sha256(&name).unwrap(), source.sha256(&name).unwrap(), "{name}");
                kept += 1;
            } else if name.ends_with("norm.weight") {
                assert_ne!(ckpt.info(&name).unwrap().dtype, "F32", "{name}");
            }
        }
        assert!(kept >= 2);
    }
}

#[test]
fn f011_f022_inspect_finds_faults() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_value(dir.path(), "model.norm.weight", 3, f32::NAN);
    let out = dsq(&["inspect", text(&model)]);
    let seen = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(1), "{seen}");
    assert!(seen.contains("error: ") && seen.contains("NaN at index 3") && seen.contains("1 fault found"), "{seen}");
    let file = model.join("model.safetensors");
    let whole = std::fs::read(&file).unwrap();
    std::fs::write(&file, &whole[..whole.len() - 1]).unwrap();
    fails(&["inspect", text(&model)], 3, &["model.safetensors", "download incomplete?", &whole.len().to_string()]);
    fails(&["inspect", text(&dir.path().join("none"))], 3, &["no such file or folder"]);
}

#[cfg(unix)]
#[test]
fn c039_every_file_follows_the_umask() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let model = golden("llama_tiny");
    for (umask, file, folder) in [("077", 0o600, 0o700), ("022", 0o644, 0o755)] {
        let out = dir.path().join(umask);
        let script = format!(
            "umask {umask} && exec {:?} quantize {:?} --out {out:?} --group-size 32",
            env!("CARGO_BIN_EXE_dsq"),
            model
        );
        assert!(Command::new("sh").args(["-c", &script]).output().unwrap().status.success());
        let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&out), folder);
        for name in list(&out) {
            assert_eq!(mode(&out.join(&name)), file, "{name}");
        }
    }
}

#[test]
fn f096_an_output_that_cannot_be_made() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    let model = golden("llama_tiny");
    for out in [file.clone(), file.join("inside")] {
        fails(&["quantize", text(&model), "--out", text(&out), "--group-size", "32", "--overwrite"], 4, &["file"]);
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
}
