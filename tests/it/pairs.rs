//! Every pair of formats, as a person exports them: whether values stay, or by how much they change, told before anything is
//! written and measured on what was written. The table of docs/formats.md is this test's. Not the layouts (dsq-checkpoint's tests)
//! and not the peers' answers (tests/conformance).

use crate::command::{dsq, text, works};
use dsq_checkpoint::Checkpoint;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// What is exported: how the docs call it, and how it is made of `llama_tiny` (`quantize` options; `>` FORMAT: export that once
/// more, `GGUF TYPE`: export the float model so). A `/` is a golden folder.
const SOURCES: [(&str, &str); 27] = [
    ("INT4 group 32, f16 scales", "--group-size 32 --scale-dtype f16"),
    ("INT4 group 32, bf16 scales", "--group-size 32 --scale-dtype bf16"),
    ("INT4 group 32, f32 scales", "--group-size 32 --scale-dtype f32"),
    ("INT4 group 32, zero points", "--group-size 32 --scale-dtype f16 --asymmetric"),
    ("INT4 outputs, f16 scales", "--granularity channel --scale-dtype f16"),
    ("INT4 group 32, activation order", "/ct_order_symmetric"),
    ("INT4 the same with zero points", "/ct_order_asymmetric"),
    ("INT8 group 32, f16 scales", "--scheme W8A16 --group-size 32 --scale-dtype f16"),
    ("INT8 group 32, zero points", "--scheme W8A16 --group-size 32 --scale-dtype f16 --asymmetric"),
    ("INT8 tensor, f16 scales", "--scheme W8A16 --granularity tensor --scale-dtype f16"),
    ("INT3 group 32, f16 scales", "--scheme W3A16 --group-size 32 --scale-dtype f16"),
    ("INT3 group 32, zero points", "--scheme W3A16 --group-size 32 --scale-dtype f16 --asymmetric"),
    ("INT2 group 32, f16 scales", "--scheme W2A16 --group-size 32 --scale-dtype f16"),
    ("INT2 group 32, zero points", "--scheme W2A16 --group-size 32 --scale-dtype f16 --asymmetric"),
    ("FP8 E4M3 outputs", "--scheme FP8A16"),
    ("NVFP4", "--scheme NVFP4A16"),
    ("MXFP4", "--scheme MXFP4A16"),
    ("GPTQ v1 INT4 group 32", "--group-size 32 --scale-dtype f16 > gptq"),
    ("GPTQ v2 INT4, zero points", "--group-size 32 --scale-dtype f16 --asymmetric > gptq2"),
    ("GPTQ v1, activation order", "/ct_order_symmetric > gptq"),
    ("AWQ", "--group-size 32 --scale-dtype f16 --asymmetric > awq"),
    ("AWQ, all zero points 8", "--group-size 32 --scale-dtype f16 > awq"),
    ("GGUF Q4_0", "GGUF Q4_0"),
    ("GGUF Q4_1", "GGUF Q4_1"),
    // Rows of 64 and 96 are no K-quants: llama.cpp's stand-ins for them.
    ("GGUF Q5_0 and Q8_0", "GGUF Q4_K_M"),
    ("GGUF Q8_0", "GGUF Q8_0"),
    ("GGUF F16", "GGUF F16"),
];

/// What is written: how the docs call it, and the options.
const TARGETS: [(&str, &str); 10] = [
    ("c-t", "compressed-tensors"),
    ("GPTQ v1", "gptq"),
    ("GPTQ v2", "gptq --gptq-version v2"),
    ("AWQ", "awq"),
    ("Q4_0", "gguf --gguf-type Q4_0"),
    ("Q4_1", "gguf --gguf-type Q4_1"),
    ("Q8_0", "gguf --gguf-type Q8_0"),
    ("F16", "gguf --gguf-type F16"),
    ("ONNX", "onnx"),
    ("f32", "safetensors"),
];

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

fn export(from: &Path, to: &Path, format: &str) {
    works(&[&["export", text(from), "--out", text(to), "--format"][..], &words(format)].concat());
}

/// Makes a source at `at`, and says whether it holds codes or blocks.
fn make(how: &str, at: &Path) -> bool {
    let float = root("tests/golden/llama_tiny");
    if let Some(ty) = how.strip_prefix("GGUF ") {
        export(&float, at, &format!("gguf --gguf-type {ty}"));
        return ty != "F16";
    }
    let (first, then) = how.split_once(" > ").unwrap_or((how, ""));
    let folder = if then.is_empty() { at.to_path_buf() } else { at.with_extension("first") };
    match first.strip_prefix('/') {
        Some(golden) => {
            std::fs::create_dir(&folder).unwrap();
            for file in ["config.json", "model.safetensors"] {
                std::fs::copy(root("tests/golden").join(golden).join(file), folder.join(file)).unwrap();
            }
        }
        None => drop(works(&[&["quantize", text(&float), "--out", text(&folder)][..], &words(first)].concat())),
    }
    match then {
        "" => {}
        "gptq2" => export(&folder, at, "gptq --gptq-version v2"),
        format => export(&folder, at, format),
    }
    true
}

/// What an export said of its loss: largest absolute difference, relative one, and whether the last is a bound.
fn told(stderr: &str) -> Option<(f64, f64, bool)> {
    let number = |after: &str| {
        let rest = stderr.split(after).nth(1)?;
        rest.split([' ', ',', '\n']).next()?.parse().ok()
    };
    let bound = stderr.contains("relative Frobenius error at most ");
    let relative = if bound { "relative Frobenius error at most " } else { "relative Frobenius error " };
    Some((number("max abs error ")?, number(relative)?, bound))
}

/// Largest absolute difference, and Frobenius norm of the difference over that of the values: of the matrices in `b` against those in
/// `a`.
fn measured(a: &Checkpoint, b: &Checkpoint, with_embedding: bool) -> (f64, f64) {
    let (mut largest, mut error, mut norm) = (0.0f64, 0.0, 0.0);
    let mut modules: Vec<String> = a.config().linears().into_iter().map(|l| l.module).collect();
    if with_embedding {
        modules.push("model.embed_tokens".into());
    }
    for module in modules {
        let [x, y] = [a, b].map(|c| c.linear(&module).unwrap().into_f32());
        assert_eq!(x.len(), y.len());
        for (x, y) in x.into_iter().zip(y) {
            let (x, d) = (f64::from(x), f64::from(y) - f64::from(x));
            largest = largest.max(d.abs());
            (error, norm) = (error + d * d, norm + x * x);
        }
    }
    (largest, (error / norm).sqrt())
}

/// `=` the same values, `~` other values, told and measured, `-` refused.
fn cell(source: &Path, coded: bool, dir: &Path, target: &str, name: &str) -> &'static str {
    let onnx = target == "onnx";
    let out = dir.join(if onnx { "out.onnx" } else { "out" });
    for path in [&out, &dir.join("out.onnx.dsq-proof.json"), &dir.join("out.dsq-proof.json")] {
        let _ = std::fs::remove_dir_all(path).or_else(|_| std::fs::remove_file(path));
    }
    let args = [&["export", text(source), "--out", text(&out), "--format"][..], &words(target)].concat();
    let first = dsq(&args);
    let stderr = String::from_utf8(first.stderr).unwrap();
    let a = Checkpoint::open(source).unwrap();
    let with_embedding = target.starts_with("gguf");
    if first.status.code() == Some(0) {
        assert!(!stderr.contains("values change"), "{name}: {stderr}");
        if onnx {
            // The command compares its file with the source, value for value; here what it says of it.
            let proof = std::fs::read(dir.join("out.onnx.dsq-proof.json")).unwrap();
            let proof: Value = serde_json::from_slice(&proof).unwrap();
            let kept = |t: &Value| t["source"]["max_abs_error"].as_f64().unwrap_or(0.0) == 0.0;
            assert!(proof["tensors"].as_array().unwrap().iter().all(kept), "{name}: {proof}");
            return "=";
        }
        let (largest, _) = measured(&a, &Checkpoint::open(&out).unwrap(), with_embedding && coded);
        // Floats are quantized by llama.cpp's rules: that is what was asked for, and no transcoding.
        assert!(largest == 0.0 || !coded, "{name}: {largest}");
        return if largest == 0.0 { "=" } else { "~" };
    }
    assert_eq!(first.status.code(), Some(2), "{name}: {stderr}");
    assert!(!out.exists(), "{name}: nothing may be written");
    let Some((promised, ..)) = told(&stderr) else {
        assert!(stderr.contains("expected"), "{name}: {stderr}");
        let again = dsq(&[&args[..], &["--requantize"]].concat());
        assert_eq!(again.status.code(), Some(2), "{name}: a refusal without a number is one for good");
        return "-";
    };
    assert!(stderr.contains("hint: --requantize"), "{name}: {stderr}");
    let forced = dsq(&[&args[..], &["--requantize"]].concat());
    let stderr = String::from_utf8(forced.stderr).unwrap();
    assert_eq!(forced.status.code(), Some(0), "{name}: {stderr}");
    let (max, relative, bound) = told(&stderr).unwrap();
    let (largest, error) = measured(&a, &Checkpoint::open(&out).unwrap(), with_embedding);
    assert_eq!(max, largest, "{name}: told and measured");
    assert!(max >= promised, "{name}: {promised} before, {max} then");
    let near = if bound { error <= relative * (1.0 + 1e-9) } else { (error / relative - 1.0).abs() < 1e-6 };
    assert!(near, "{name}: told {relative}, measured {error}");
    "~"
}

#[test]
fn every_pair_keeps_values_or_tells_the_error_that_is_measured() {
    let dir = tempfile::tempdir().unwrap();
    let mut table = format!("| from | {} |\n|---|{}\n", TARGETS.map(|t| t.0).join(" | "), "---|".repeat(TARGETS.len()));
    for (i, (source, how)) in SOURCES.iter().enumerate() {
        let at = dir.path().join(format!("source{i}"));
        let coded = make(how, &at);
        let cells =
            TARGETS.map(|(target, options)| cell(&at, coded, dir.path(), options, &format!("{source} to {target}")));
        table += &format!("| {source} | {} |\n", cells.join(" | "));
    }
    let docs = std::fs::read_to_string(root("docs/formats.md")).unwrap();
    assert!(docs.contains(&table), "docs/formats.md has another table of pairs; expected\n{table}");
}
