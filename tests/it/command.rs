//! The `dsq` command as a person runs it, for the tests beside this file. No test of its own.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Runs a command.
pub fn dsq(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dsq")).args(args).output().unwrap()
}

/// Runs a command that must succeed; its stdout.
pub fn works(args: &[&str]) -> String {
    let out = dsq(args);
    assert_eq!(out.status.code(), Some(0), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// Runs a command that must fail with this code and these words on stderr: one error line, perhaps a hint.
pub fn fails(args: &[&str], code: i32, words: &[&str]) {
    let out = dsq(args);
    let text = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(code), "{args:?}: {text}");
    for word in words {
        assert!(text.contains(word), "{text:?} lacks {word:?}");
    }
    assert!(text.starts_with("error: ") && text.lines().count() <= 2, "{text:?}");
    assert!(out.stdout.is_empty());
}

/// A real model or pictures, by name, of `$DSQ_MODELS` or the user's cache; without them the test is skipped, which
/// `DSQ_REQUIRE_MODELS=1` turns into a failure.
pub fn cached(name: &str) -> Option<PathBuf> {
    let folder = match std::env::var_os("DSQ_MODELS") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(std::env::var_os("HOME").unwrap_or_default()).join(".cache/dsq"),
    };
    let path = folder.join(name);
    if !path.exists() {
        let required = std::env::var("DSQ_REQUIRE_MODELS").is_ok_and(|v| v == "1");
        assert!(!required, "DSQ_REQUIRE_MODELS=1, and there is no {}; run .ci/fetch-models.sh", path.display());
        println!("skipped: no {}; run .ci/fetch-models.sh", path.display());
        return None;
    }
    Some(path)
}

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Faults above a note in what `dsq inspect --json` says.
pub fn faults_of(seen: &serde_json::Value) -> Vec<&serde_json::Value> {
    seen["faults"].as_array().unwrap().iter().filter(|f| f["severity"] != "note").collect()
}
