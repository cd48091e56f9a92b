//! The commands on a model split into several GGUF files: they do what they do with the whole. The files by themselves are
//! dsq-checkpoint's tests (`gguf_split.rs`).

use crate::command::{dsq, fails, text, works};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/gguf").join(name)
}

#[test]
fn commands_take_the_first_part_for_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let models = [golden("whole.gguf"), golden("split-00001-of-00003.gguf")];
    // What a command says of each, but for the name.
    let both = |args: &dyn Fn(&Path) -> Vec<String>| {
        let [whole, split] = models.each_ref().map(|m| {
            let args = args(m);
            let out = dsq(&args.iter().map(String::as_str).collect::<Vec<_>>());
            assert!(out.status.code().is_some_and(|c| c < 2), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
            String::from_utf8(out.stdout).unwrap().replace(text(m), "MODEL")
        });
        assert_eq!(whole, split);
        whole
    };
    let words = |list: &[&str]| list.iter().map(|w| (*w).to_owned()).collect::<Vec<_>>();
    let seen = both(&|m| words(&["inspect", text(m), "--json"]));
    assert!(serde_json::from_str::<Value>(&seen).is_ok(), "{seen}");
    assert!(!both(&|m| words(&["run", text(m), "--prompt", "the cat", "--max-tokens", "8"])).is_empty());

    let held = at("t.txt");
    std::fs::write(&held, "the path of that other cat. ".repeat(12)).unwrap();
    let eval = ["eval", text(&models[1]), "--reference", text(&models[0]), "--text", text(&held)];
    let seen: Value = serde_json::from_str(&works(&[&eval[..], &["--context", "32", "--json"]].concat())).unwrap();
    let row = &seen["rows"][0];
    assert_eq!((row["kl"].as_f64(), row["top1_agreement"].as_f64()), (Some(0.0), Some(1.0)), "{seen}");

    let folder = |name: &str| {
        let weights = std::fs::read(at(name).join("model.safetensors")).unwrap();
        (
            weights,
            std::fs::read(at(name).join("config.json")).unwrap(),
            std::fs::read(at(name).join("tokenizer.json")).unwrap(),
        )
    };
    for (command, more) in [("quantize", &["--group-size", "32"][..]), ("export", &["--format", "safetensors"])] {
        for (name, model) in ["a", "b"].into_iter().zip(&models) {
            works(&[&[command, text(model), "--out", text(&at(name)), "--overwrite"][..], more].concat());
        }
        assert!(folder("a") == folder("b"), "{command}");
    }
    for (name, model) in ["a.gguf", "b.gguf"].into_iter().zip(&models) {
        works(&[
            "export",
            text(model),
            "--out",
            text(&at(name)),
            "--format",
            "gguf",
            "--gguf-type",
            "Q8_0",
            "--requantize",
        ]);
    }
    let [a, b] = ["a.gguf", "b.gguf"].map(|n| std::fs::read(at(n)).unwrap());
    assert!(a == b, "one file, whatever the source was");
}

#[test]
fn f078_parts_that_are_missing_end_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let [first, second] = ["m-00001-of-00003.gguf", "m-00002-of-00003.gguf"].map(|n| dir.path().join(n));
    std::fs::copy(golden("split-00001-of-00003.gguf"), &first).unwrap();
    let words = ["split.count", "m-00002-of-00003.gguf, m-00003-of-00003.gguf", "hint: "];
    fails(&["inspect", text(&first)], 3, &words);
    fails(&["run", text(&first), "--prompt", "x"], 3, &words);
    fails(&["quantize", text(&first), "--out", text(&dir.path().join("q"))], 3, &words);
    std::fs::copy(golden("split-00002-of-00003.gguf"), &second).unwrap();
    fails(&["inspect", text(&second)], 3, &["split.no", "part 2 of 3", text(&first)]);
}
