//! Signals during `dsq train`: what is saved, what is said, and with which exit code it ends. Not kill -9 (see
//! `crates/dsq-train/tests/kill.rs`).
#![cfg(unix)]

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// A model that trains in milliseconds a step, for longer than any test waits.
const SETTINGS: [&str; 9] = [
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "model.num_key_value_heads=1",
    "train.batch_size=1",
    "train.seq_len=16",
    "train.steps=1000000",
    "train.save_every=1000000",
];

fn train(out: &Path, more: &[&str]) -> Command {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_dsq"));
    command.arg("train").arg(root.join("recipes/tiny-llama-w4a16.toml")).arg("--out").arg(out).args(more);
    for setting in SETTINGS {
        command.args(["--set", setting]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn steps(out: &Path) -> usize {
    std::fs::read_to_string(out.join("log.jsonl")).unwrap_or_default().lines().count()
}

/// Waits until the run has made more than `steps` steps.
fn wait_for(child: &mut Child, out: &Path, more_than: usize) {
    let start = Instant::now();
    while steps(out) <= more_than {
        if let Some(status) = child.try_wait().unwrap() {
            let mut text = String::new();
            child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
            panic!("ended early with {status}: {text}");
        }
        assert!(start.elapsed() < Duration::from_secs(120), "no step in two minutes");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn send(child: &Child, signal: &str) {
    let status = Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap();
    assert!(status.success());
}

fn stop(mut child: Child, out: &Path, signal: &str, more_than: usize) -> Output {
    wait_for(&mut child, out, more_than);
    send(&child, signal);
    child.wait_with_output().unwrap()
}

#[test]
fn f095_a_signal_finishes_the_step_saves_and_ends_with_its_code() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let mut done = 0;
    for (signal, code, more) in [("-INT", 130, None), ("-TERM", 143, Some("--resume")), ("-INT", 130, Some("--resume"))]
    {
        let more: Vec<&str> = more.into_iter().collect();
        let ended = stop(train(&out, &more).spawn().unwrap(), &out, signal, done);
        let text = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(code), "{signal}: {text}");
        assert!(text.contains("interrupted") && text.contains("--resume"), "{text}");
        assert!(ended.stdout.is_empty());
        // Everything that was logged was saved: the newest checkpoint is the last line's.
        let now = steps(&out);
        assert!(now > done, "{now} steps after {done}: each run went on from the one before");
        assert!(out.join(format!("checkpoints/step-{now:08}/state.json")).is_file(), "step {now}");
        done = now;
    }
}

#[test]
fn f093_what_a_killed_run_left_half_written_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let first = stop(train(&out, &[]).spawn().unwrap(), &out, "-INT", 0);
    assert_eq!(first.status.code(), Some(130));
    let half = out.join("checkpoints/.tmp-step-00999999");
    std::fs::create_dir(&half).unwrap();
    let ended = stop(train(&out, &["--resume"]).spawn().unwrap(), &out, "-INT", steps(&out));
    let text = String::from_utf8(ended.stderr).unwrap();
    let named = text.lines().filter(|l| l.starts_with("note: ") && l.contains(".tmp-step-00999999")).count();
    assert_eq!((named, half.exists()), (1, false), "{text}");
}
