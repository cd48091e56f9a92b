//! The `dsq` command as a person runs it, for the tests beside this file. No test of its own.

use std::path::Path;
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

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
