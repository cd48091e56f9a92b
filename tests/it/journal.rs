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

/// A run with everything else that is written down: the search for mixed precision, the steps end to end, the walk for the cache, and
/// a head of its own.
const SEARCHED: [&str; 19] = [
    "--calib-tokens",
    "1024",
    "--calib-context",
    "64",
    "--group-size",
    "32",
    "--method",
    "autoround",
    "--epochs",
    "1",
    "--steps",
    "2",
    "--target-bits",
    "6",
    "--kv-cache",
    "int8",
    "--override",
    "lm_head=W8A16",
    "--awq-scales",
];

/// Whether a run writes such a file into its journal.
fn has(run: &[&str], file: &str) -> bool {
    match file {
        "search.safetensors" => run.contains(&"--target-bits"),
        "cache.safetensors" => run.contains(&"--kv-cache"),
        _ if file.starts_with("end") => run.contains(&"--steps"),
        "writing" => true,
        _ => run.contains(&"--method"),
    }
}

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
        &SEARCHED,
        &["--calib-tokens", "512", "--group-size", "32", "--target-bits", "6", "--kv-cache", "fp8"],
    ] {
        let case = Case::new();
        let (want, _) = straight(&case, run);
        let out = case.at("out");
        let mut more: &[&str] = &[];
        // Each run is killed once it has written another file, the last one while it writes the output.
        for block in [
            "search.safetensors",
            "block-00000.safetensors",
            "state.safetensors",
            "block-00001.safetensors",
            "end-00000.safetensors",
            "end.safetensors",
            "cache.safetensors",
            "writing",
        ] {
            if !has(run, block) {
                continue;
            }
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
    let case = Case::new();
    let (want, took) = straight(&case, &SEARCHED);
    killed(&case, &case.at("out"), &SEARCHED, 20, took, &want);
}

/// `cargo test --release --workspace --locked -- --ignored 200`
#[test]
#[ignore = "takes minutes; run once and reported in docs/results.md"]
fn a_run_killed_200_times_goes_on_to_the_same_bytes() {
    for run in [&RUN[..], &SEARCHED] {
        let case = Case::new();
        let (want, took) = straight(&case, run);
        for round in 0..10 {
            let longest = took.mul_f64(0.5 + round as f64 / 10.0);
            killed(&case, &case.at(&format!("out{round}")), run, 20, longest, &want);
        }
    }
}

/// Starts a run and kills it as soon as `file` is in its journal, which must happen before its end.
fn killed_at(case: &Case, out: &Path, run: &[&str], file: &str) {
    let mut child = start(&args(case, out, run, &[]));
    while !journal(out).join(file).exists() {
        assert!(child.try_wait().unwrap().is_none(), "over before it could be killed");
        std::thread::sleep(Duration::from_micros(100));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

fn copy(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir(to).unwrap();
    files(from).into_iter().for_each(|(name, bytes)| std::fs::write(to.join(name), bytes).unwrap());
}

/// When each file of a journal was written, but for what every run writes.
fn written(dir: &Path) -> BTreeMap<String, std::time::SystemTime> {
    let entries = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap());
    let all = entries.map(|e| (e.file_name().into_string().unwrap(), e.metadata().unwrap().modified().unwrap()));
    all.filter(|(name, _)| !["run.lock", "writing"].contains(&name.as_str())).collect()
}

#[test]
fn a_changed_byte_of_any_file_is_refused_and_finished_parts_are_not_made_again() {
    let case = Case::new();
    let (want, _) = straight(&case, &SEARCHED);
    let out = case.at("out");
    killed_at(&case, &out, &SEARCHED, "search.safetensors");
    let resume = || dsq(&args(&case, &out, &SEARCHED, &["--resume"]).iter().map(String::as_str).collect::<Vec<_>>());
    // A whole journal: the run is refused at its last step, because another model has the output's name.
    std::fs::write(journal(&out).join("writing"), "").unwrap();
    let other = dsq(&["quantize", text(&case.at("model")), "--out", text(&out), "--group-size", "16"]);
    assert_eq!(other.status.code(), Some(0));
    assert_eq!(resume().status.code(), Some(2));
    let names: Vec<String> = files(&journal(&out)).into_keys().collect();
    for name in ["search", "block-00000", "block-00001", "block-00002", "state", "end-00000", "end", "cache"] {
        assert!(names.contains(&format!("{name}.safetensors")), "{names:?}");
    }
    let before = written(&journal(&out));
    assert_eq!(resume().status.code(), Some(2));
    assert_eq!(written(&journal(&out)), before, "what was finished was made again");
    std::fs::remove_dir_all(&out).unwrap();
    let whole = case.at("whole");
    copy(&journal(&out), &whole);
    let mut refused = 0;
    for name in names.iter().filter(|n| !["run.lock", "writing"].contains(&n.as_str())) {
        let bytes = std::fs::read(whole.join(name)).unwrap();
        for k in 0..8 {
            let at = k * (bytes.len() - 1) / 7;
            let mut changed = bytes.clone();
            changed[at] ^= 1 << k;
            std::fs::write(journal(&out).join(name), &changed).unwrap();
            let ended = resume();
            let said = String::from_utf8_lossy(&ended.stderr).into_owned();
            if ended.status.success() {
                // A blank of a header that became another blank.
                assert_eq!(files(&out), want, "{name}, byte {at}");
                std::fs::remove_dir_all(&out).unwrap();
                copy(&whole, &journal(&out));
                continue;
            }
            refused += 1;
            let code = ended.status.code().unwrap();
            assert!(code == 3 || (name == "journal.json" && code == 2), "{name}, byte {at}: {said}");
            assert!(said.contains(if name == "journal.json" { "out.journal" } else { name }), "{name}: {said}");
            assert!(!out.exists() && journal(&out).join("journal.json").exists());
            std::fs::write(journal(&out).join(name), &bytes).unwrap();
        }
        let cut = &bytes[..bytes.len() - 1];
        std::fs::write(journal(&out).join(name), cut).unwrap();
        assert_eq!(resume().status.code(), Some(3), "{name} cut");
        std::fs::write(journal(&out).join(name), &bytes).unwrap();
    }
    assert!(refused > 7 * (names.len() - 2), "{refused} of {names:?}");
    assert!(resume().status.success());
    assert_eq!(files(&out), want);
    assert!(!journal(&out).exists());
}

/// A whole journal of a run that is refused at its last step, because another model has the output's name; that one is removed.
fn whole(case: &Case, out: &Path, run: &[&str]) {
    killed_at(case, out, run, "state.safetensors");
    std::fs::write(journal(out).join("writing"), "").unwrap();
    let other = dsq(&["quantize", text(&case.at("model")), "--out", text(out), "--group-size", "16"]);
    assert_eq!(other.status.code(), Some(0));
    let resumed = start(&args(case, out, run, &["--resume"])).wait().unwrap();
    assert_eq!(resumed.code(), Some(2));
    std::fs::remove_dir_all(out).unwrap();
}

#[test]
fn files_of_another_number_or_run_are_refused() {
    let case = Case::new();
    let run = |epochs: &'static str| {
        ["--method", "blockwise", "--epochs", epochs, "--steps", "2", "--calib-tokens", "512", "--group-size", "32"]
    };
    let (run, other) = (run("1"), run("2"));
    let (want, _) = straight(&case, &run);
    let (out, out2, kept) = (case.at("out"), case.at("out2"), case.at("kept"));
    whole(&case, &out, &run);
    whole(&case, &out2, &other);
    copy(&journal(&out), &kept);
    let refused = |name: &str, words: &[&str]| {
        let all = args(&case, &out, &run, &["--resume"]);
        let ended = dsq(&all.iter().map(String::as_str).collect::<Vec<_>>());
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(ended.status.code() == Some(3) && !out.exists(), "{name}: {said}");
        assert!(words.iter().all(|w| said.contains(w)) && said.contains(name), "{said} lacks {words:?}");
        copy(&kept, &journal(&out));
    };
    let at = |name: &str| journal(&out).join(name);
    let written_as = |want: &str, got: &str| format!("file: expected what was written as {want}, got {got}");
    let [a, b, end, last] =
        ["block-00000", "block-00001", "end-00000", "end-00001"].map(|name| format!("{name}.safetensors"));
    // One over another, beside them, two swapped, a layer of the steps after the blocks.
    std::fs::copy(at(&a), at(&b)).unwrap();
    refused(&b, &[&written_as(&b, &a)]);
    let count = (0..).take_while(|i| at(&format!("block-{i:05}.safetensors")).exists()).count();
    let beyond = format!("block-{count:05}.safetensors");
    std::fs::copy(at(&a), at(&beyond)).unwrap();
    refused(&beyond, &[&written_as(&beyond, &a)]);
    std::fs::rename(at(&a), at("aside")).unwrap();
    std::fs::rename(at(&b), at(&a)).unwrap();
    std::fs::rename(at("aside"), at(&b)).unwrap();
    refused(&a, &[&written_as(&a, &b)]);
    std::fs::copy(at(&end), at(&last)).unwrap();
    refused(&last, &[&written_as(&last, &end)]);
    // Any file of a run with other options.
    for name in [&a[..], &b, &end, "end.safetensors", "state.safetensors"] {
        std::fs::copy(journal(&out2).join(name), at(name)).unwrap();
        refused(name, &["of another run: ", "options.--epochs: expected 1 as in the run, got 2"]);
    }
    assert!(start(&args(&case, &out, &run, &["--resume"])).wait().unwrap().success());
    assert_eq!(files(&out), want);
}

#[test]
fn a_plan_tells_of_a_journal() {
    let case = Case::new();
    let out = case.at("out");
    killed_at(&case, &out, &RUN, "state.safetensors");
    let plan = |run: &[&str]| -> serde_json::Value {
        let all = args(&case, &out, run, &["--plan", "--json"]);
        serde_json::from_str(&crate::command::works(&all.iter().map(String::as_str).collect::<Vec<_>>())).unwrap()
    };
    let seen = plan(&RUN)["plan"]["journal"].clone();
    assert!(seen["blocks"].as_u64().unwrap() >= 1 && seen["of"] == 2 && seen["fits"] == true, "{seen}");
    let seen = plan(&[&RUN[..], &["--override", "q_proj=W8A16"]].concat())["plan"]["journal"].clone();
    assert!(seen["fits"] == false && seen["differences"].to_string().contains("options.--override"), "{seen}");
    let all = args(&case, &out, &RUN, &["--plan"]);
    let said = crate::command::works(&all.iter().map(String::as_str).collect::<Vec<_>>());
    assert!(said.contains("of 2 blocks are done; --resume goes on with it"), "{said}");
    std::fs::remove_dir_all(journal(&out)).unwrap();
    assert_eq!(plan(&RUN)["plan"]["journal"], serde_json::Value::Null);
}

#[test]
fn another_run_is_refused_by_name() {
    let case = Case::new();
    let out = case.at("out");
    let run = ["--calib-tokens", "512", "--group-size", "32", "--method", "gptq"];
    // Killed as soon as there is something to go on with.
    killed_at(&case, &out, &run, "state.safetensors");
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
    let model = case.at("model");
    let rounding = ["quantize", text(&model), "--group-size", "32", "--resume"];
    fails(&rounding, &out, 2, &["--resume", "got rtn"]);
}
