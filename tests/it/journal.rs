//! A calibrated `dsq quantize` that is killed at any moment goes on with `--resume` to the bytes of a run that nobody disturbed, and
//! refuses to go on as another run. Not the methods (see `ptq.rs`).

use crate::command::{dsq, text};
use crate::ptq::{Case, fails};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A run with every kind of state: scales in norms, a second stream, training, latent weights.
const RUN: [&str; 13] = [
    "--calib-tokens",
    "1024",
    "--calib-context",
    "64",
    "--group-size",
    "32",
    "--method",
    "blockwise",
    "--epochs",
    "1",
    "--steps",
    "2",
    "--awq-scales",
];

fn args(case: &Case, out: &Path, run: &[&str], more: &[&str]) -> Vec<String> {
    let (model, calib) = (case.at("model"), case.at("calib.txt"));
    let fixed = ["quantize", text(&model), "--out", text(out), "--calib", text(&calib)];
    [&fixed, run, more].concat().into_iter().map(str::to_owned).collect()
}

fn start(args: &[String]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_dsq")).args(args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    entries.map(|e| (e.file_name().into_string().unwrap(), std::fs::read(e.path()).unwrap())).collect()
}

fn journal(out: &Path) -> PathBuf {
    out.with_file_name(format!("{}.journal", out.file_name().unwrap().to_str().unwrap()))
}

/// Kills the run `times` times, each time after another delay of at most `longest`, going on each time; what is complete before that
/// must be `want` and begins again. Ends with a complete output.
fn killed(case: &Case, out: &Path, run: &[&str], times: usize, longest: Duration, want: &BTreeMap<String, Vec<u8>>) {
    let (mut kills, mut delay) = (0, 7u64);
    let mut more: &[&str] = &[];
    loop {
        let mut child = start(&args(case, out, run, more));
        if kills < times {
            delay = (delay * 48_271) % 2_147_483_647;
            std::thread::sleep(longest.mul_f64(delay as f64 / 2_147_483_647.0));
            let _ = child.kill();
        }
        let status = child.wait().unwrap();
        kills += usize::from(status.code().is_none());
        // The last step of all is to remove the journal: without one an output is complete.
        if status.success() || (out.join("dsq-proof.json").exists() && !journal(out).exists()) {
            assert_eq!(files(out), *want, "after {kills} kills");
            if kills >= times {
                return;
            }
            std::fs::remove_dir_all(out).unwrap();
            more = &[];
            continue;
        }
        assert_eq!(status.code(), None, "ended by itself after {kills} kills");
        more = &["--resume"];
    }
}

/// The straight run, and how long it took.
fn straight(case: &Case, run: &[&str]) -> (BTreeMap<String, Vec<u8>>, Duration) {
    let out = case.at("straight");
    let began = Instant::now();
    assert!(start(&args(case, &out, run, &[])).wait().unwrap().success());
    assert!(!journal(&out).exists());
    (files(&out), began.elapsed())
}

#[test]
fn a_run_killed_after_each_block_goes_on_to_the_same_bytes() {
    for run in [
        &RUN[..],
        &["--calib-tokens", "512", "--group-size", "32", "--method", "gptaq", "--kv-cache", "int8"],
        &["--calib-tokens", "512", "--group-size", "32", "--method", "awq", "--scheme", "W8A8", "--static-activations"],
    ] {
        let case = Case::new();
        let (want, _) = straight(&case, run);
        let out = case.at("out");
        let mut more: &[&str] = &[];
        // Each run is killed once it has written another block, the last one while it writes the output.
        for block in ["block-00000.safetensors", "state.safetensors", "block-00001.safetensors", "writing"] {
            let mut child = start(&args(&case, &out, run, more));
            let at = journal(&out).join(block);
            let began = Instant::now();
            while !at.exists() && child.try_wait().unwrap().is_none() && began.elapsed() < Duration::from_secs(120) {
                std::thread::sleep(Duration::from_micros(200));
            }
            let _ = child.kill();
            let ended = child.wait().unwrap();
            if ended.success() || !journal(&out).exists() {
                break;
            }
            more = &["--resume"];
        }
        if journal(&out).exists() {
            assert!(start(&args(&case, &out, run, more)).wait().unwrap().success(), "{run:?}");
        }
        assert_eq!(files(&out), want, "{run:?}");
        assert!(!journal(&out).exists());
    }
}

#[test]
fn a_run_killed_at_random_goes_on_to_the_same_bytes() {
    let case = Case::new();
    let (want, took) = straight(&case, &RUN);
    killed(&case, &case.at("out"), &RUN, 20, took, &want);
}

/// `cargo test --release --workspace --locked -- --ignored 200`
#[test]
#[ignore = "takes minutes; run once and reported in docs/results.md"]
fn a_run_killed_200_times_goes_on_to_the_same_bytes() {
    let case = Case::new();
    let (want, took) = straight(&case, &RUN);
    for round in 0..10 {
        let longest = took.mul_f64(0.5 + round as f64 / 10.0);
        killed(&case, &case.at(&format!("out{round}")), &RUN, 20, longest, &want);
    }
}

#[test]
fn another_run_is_refused_by_name() {
    let case = Case::new();
    let out = case.at("out");
    let run = ["--calib-tokens", "512", "--group-size", "32", "--method", "gptq"];
    // Killed as soon as there is something to go on with.
    let mut child = start(&args(&case, &out, &run, &[]));
    while !journal(&out).join("state.safetensors").exists() {
        assert!(child.try_wait().unwrap().is_none(), "over before it could be killed");
        std::thread::sleep(Duration::from_micros(100));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    if !journal(&out).exists() {
        return;
    }
    let refused = |run: &[&str], more: &[&str], words: &[&str]| {
        let (model, calib) = (case.at("model"), case.at("calib.txt"));
        let fixed = ["quantize", text(&model), "--calib", text(&calib)];
        fails(&[&fixed, run, more].concat(), &out, 2, words);
        assert!(journal(&out).join("journal.json").exists());
    };
    refused(&run, &[], &["out.journal", "--resume"]);
    let other = ["--calib-tokens", "512", "--group-size", "16", "--method", "gptq"];
    refused(&other, &["--resume"], &["options.--group-size: expected 32 as in the run, got 16"]);
    let other = ["--calib-tokens", "256", "--group-size", "32", "--method", "gptaq"];
    refused(&other, &["--resume"], &["options.--calib-tokens", "512", "256", "options.--method", "Gptq", "Gptaq"]);
    let calib = std::fs::read(case.at("calib.txt")).unwrap();
    std::fs::write(case.at("calib.txt"), [b"x", &calib[..]].concat()).unwrap();
    refused(&run, &["--resume"], &["calibration.text: expected"]);
    std::fs::write(case.at("calib.txt"), calib).unwrap();
    let resume = || dsq(&args(&case, &out, &run, &["--resume"]).iter().map(String::as_str).collect::<Vec<_>>());
    // A damaged file is named, and what else there is stays.
    let state = journal(&out).join("state.safetensors");
    let whole = std::fs::read(&state).unwrap();
    std::fs::write(&state, &whole[..whole.len() / 2]).unwrap();
    assert_eq!(resume().status.code(), Some(3));
    std::fs::write(&state, &whole).unwrap();
    // A model that took the output's name is not replaced, though the run had begun to write, and the journal stays too.
    std::fs::write(journal(&out).join("writing"), "").unwrap();
    let model = case.at("model");
    let other = dsq(&["quantize", text(&model), "--out", text(&out), "--group-size", "16"]);
    assert_eq!(other.status.code(), Some(0));
    let theirs = files(&out);
    let refused_here = resume();
    let said = String::from_utf8_lossy(&refused_here.stderr).into_owned();
    assert!(refused_here.status.code() == Some(2) && said.contains("holds another model"), "{said}");
    assert!(files(&out) == theirs && journal(&out).join("journal.json").exists());
    std::fs::remove_dir_all(&out).unwrap();
    std::fs::remove_file(journal(&out).join("writing")).unwrap();
    case.set("model.layers.1.mlp.up_proj.weight", 0.25);
    refused(&run, &["--resume"], &["model.tensors: expected", "as in the run, got"]);
    // Rounding has nothing to go on with.
    let (model, calib) = (case.at("model"), case.at("calib.txt"));
    let rounding = ["quantize", text(&model), "--group-size", "32", "--resume"];
    fails(&rounding, &out, 2, &["--resume", "got rtn"]);
    let cache = ["--kv-cache", "int8", "--calib", text(&calib), "--calib-tokens", "512"];
    fails(&[&rounding[..], &cache].concat(), &out, 2, &["--resume", "got rtn"]);
}
