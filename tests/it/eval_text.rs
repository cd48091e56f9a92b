//! `dsq eval` on text as a person runs it: windows, documents, a file of the reference's logits; `dsq report` of what came out. Not the
//! formulas (see the tests of `dsq-eval`).

use crate::command::{fails, text, works};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&works(&[args, &["--json"]].concat())).unwrap()
}

/// Names of the files in a folder.
fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn a_file_of_the_references_logits_takes_the_place_of_the_reference() {
    let (dir, float) = (tempfile::tempdir().unwrap(), golden("llama_tiny"));
    let path = |name: &str| dir.path().join(name);
    let (ids, w4, w8, kept) = (path("ids.json"), path("w4"), path("w8"), path("kept"));
    let list = |from: usize| (0..90).map(|i| (i * i * 31 + from * 7) % 128).collect::<Vec<usize>>();
    std::fs::write(&ids, serde_json::to_string(&[list(1), list(2)]).unwrap()).unwrap();
    for (out, scheme) in [(&w4, "W4A16"), (&w8, "W8A16")] {
        works(&["quantize", text(&float), "--out", text(out), "--scheme", scheme, "--group-size", "32"]);
    }
    let eval = |model: &Path, more: &[&str]| {
        let args = ["eval", text(model), "--reference", text(&float), "--tokens-file", text(&ids), "--context", "40"];
        json(&[&args[..], more].concat())
    };
    let cache = ["--reference-cache", text(&kept)];
    let plain = eval(&w4, &[]);
    let (wrote, read) = (eval(&w4, &cache), eval(&w4, &cache));
    assert_eq!(wrote["rows"][0], read["rows"][0], "the same bits");
    assert!(wrote["rows"][1]["resident_bytes"].is_number() && read["rows"][1]["resident_bytes"].is_null());
    let number =
        |report: &Value, key: &str| report["rows"][0][key].as_f64().unwrap_or_else(|| panic!("{key}: {report}"));
    // A vocabulary of 128 has half of its logits exact; the others are off by 1/256 at most.
    assert!((number(&plain, "kl") - number(&read, "kl")).abs() < 1.0 / 256.0 && number(&plain, "kl") > 1e-5);
    assert_eq!(plain["rows"][0]["perplexity"], read["rows"][0]["perplexity"]);
    assert!(number(&eval(&w8, &cache), "kl") < number(&read, "kl"), "of another model");
    assert_eq!(files(dir.path()), ["ids.json", "kept", "w4", "w8"]);

    // Another context, another reference, a damaged file: refused, and the file stays.
    let before = std::fs::read(&kept).unwrap();
    let args = ["eval", text(&w4), "--tokens-file", text(&ids), "--reference-cache", text(&kept)];
    fails(
        &[&args[..], &["--reference", text(&float), "--context", "30"]].concat(),
        3,
        &["kept", "context 30", "context 40"],
    );
    fails(
        &[&args[..], &["--reference", text(&w8), "--context", "40"]].concat(),
        3,
        &["kept", "expected logits of model"],
    );
    assert_eq!(std::fs::read(&kept).unwrap(), before);
    std::fs::write(&kept, &before[..before.len() - 10]).unwrap();
    fails(&[&args[..], &["--reference", text(&float), "--context", "40"]].concat(), 3, &["kept", "a file of logits"]);

    // A run that fails leaves no file behind.
    let gone = path("gone/kept");
    let args =
        ["eval", text(&w4), "--tokens-file", text(&ids), "--reference", text(&float), "--reference-cache", text(&gone)];
    fails(&args, 4, &["gone"]);
    assert_eq!(files(dir.path()), ["ids.json", "kept", "w4", "w8"]);
}

#[test]
fn strides_and_documents_say_what_is_predicted() {
    let (dir, model) = (tempfile::tempdir().unwrap(), golden("tasks/model"));
    let file = dir.path().join("texts.jsonl");
    let line = |i: usize| {
        format!("{}\n", serde_json::json!({ "text": format!("{} words of text", "many ".repeat(3 + i % 5)) }))
    };
    std::fs::write(&file, (0..24).map(line).collect::<String>()).unwrap();
    let eval = ["eval", text(&model), "--text", text(&file), "--context", "8"];
    let plain = json(&eval);
    assert_eq!((&plain["documents"], &plain["blocks"], &plain["stride"]), (&24.into(), &"documents".into(), &8.into()));
    let strided = json(&[&eval[..], &["--stride", "3"]].concat());
    let number =
        |report: &Value, key: &str| report["rows"][0][key].as_f64().unwrap_or_else(|| panic!("{key}: {report}"));
    // Every token but the first of each document.
    assert!(number(&strided, "tokens") > number(&plain, "tokens"));
    let all: f64 =
        json(&["eval", text(&model), "--text", text(&file), "--context", "64"])["rows"][0]["tokens"].as_f64().unwrap();
    assert_eq!(number(&strided, "tokens"), all);
    for key in ["bits_per_byte", "word_perplexity", "perplexity", "bits_per_weight"] {
        assert!(number(&strided, key) > 0.0);
    }
    fails(&[&eval[..], &["--stride", "9"]].concat(), 2, &["stride: expected 1 token to the context, got 9"]);
    std::fs::write(&file, "{\"body\": 1}\n").unwrap();
    fails(&eval, 3, &["texts.jsonl: line 1: expected an object with a text in `text`"]);
}

#[test]
fn reports_become_one_page() {
    let (dir, model) = (tempfile::tempdir().unwrap(), golden("llama_tiny"));
    let path = |name: &str| dir.path().join(name);
    let (ids, a, b, page, md) = (path("ids.json"), path("a.json"), path("b.json"), path("page.html"), path("page.md"));
    std::fs::write(&ids, serde_json::to_string(&[(0..60).collect::<Vec<u32>>()]).unwrap()).unwrap();
    for (out, context) in [(&a, "20"), (&b, "30")] {
        works(&[
            "eval",
            text(&model),
            "--reference",
            text(&model),
            "--tokens-file",
            text(&ids),
            "--context",
            context,
            "--out",
            text(out),
        ]);
    }
    works(&["report", text(&a), text(&b), "--html", text(&page), "--markdown", text(&md)]);
    let (page, md) = (std::fs::read_to_string(page).unwrap(), std::fs::read_to_string(md).unwrap());
    assert!(page.contains("history of perplexity") && page.contains("<svg") && page.contains("llama_tiny"));
    assert!(md.contains("| perplexity |") && md.contains("## llama_tiny (eval"), "{md}");
    fails(&["report", text(&ids)], 3, &["ids.json: expected a report of dsq"]);
}
