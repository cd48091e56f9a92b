//! `--kv-policy` and `dsq eval --kv-report` as a person runs them: rows, keys and refusals. Not what the policies keep (see the tests of
//! `dsq-runtime`).

use crate::command::{fails, text, works};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&works(&[args, &["--json"]].concat())).unwrap()
}

#[test]
fn the_report_has_a_row_for_each_policy() {
    let (dir, model) = (tempfile::tempdir().unwrap(), golden("llama_tiny"));
    let file = dir.path().join("ids.json");
    let list = |from: usize| (0..220).map(|i| (i * i * 31 + from * 7) % 128).collect::<Vec<usize>>();
    std::fs::write(&file, serde_json::to_string(&[list(1), list(2)]).unwrap()).unwrap();
    let eval = ["eval", text(&model), "--tokens-file", text(&file), "--context", "220"];
    let report = ["--kv-report", "--kv-budget", "40", "--kv-recent", "16"];
    let seen = json(&[&eval[..], &report].concat());
    let rows = seen["rows"].as_array().unwrap();
    let names: Vec<&str> = rows.iter().map(|r| r["name"].as_str().unwrap()).collect();
    assert_eq!(
        (&seen["command"], &seen["windows"], names),
        (&"eval".into(), &2.into(), vec!["full", "window", "entropy"])
    );
    let number = |row: usize, key: &str| rows[row][key].as_f64().unwrap_or_else(|| panic!("{key}: {}", rows[row]));
    let plain = json(&eval);
    assert_eq!(rows[0]["perplexity"], plain["rows"][0]["perplexity"]);
    assert_eq!((number(0, "kl"), number(0, "kv_positions")), (0.0, 220.0));
    assert!((number(0, "hit_rate") - 1.0).abs() < 1e-9);
    for row in [1, 2] {
        assert!(number(row, "kl") > 0.0 && number(row, "perplexity") > 0.0 && number(row, "tokens") == 438.0);
        assert!(number(row, "hit_rate") > 0.0 && number(row, "hit_rate") < 1.0);
        for key in ["kv_bytes", "kv_bytes_allocated", "kv_positions"] {
            assert!(number(row, key) > 0.0 && number(row, key) <= number(0, key), "{key} {seen}");
        }
        assert!(number(row, "kv_bytes") < number(0, "kv_bytes"));
    }
    (0..3).for_each(|row| assert!(number(row, "first_token_ms") > 0.0));
    let table = works(&[&eval[..], &report].concat());
    assert!(table.contains("hit_rate") && table.contains("100.00%") && table.contains("entropy"), "{table}");

    fails(&[&eval[..], &["--sinks", "4"]].concat(), 2, &["--sinks: expected --kv-report"]);
    let few = ["--kv-report", "--kv-budget", "10", "--kv-recent", "16"];
    fails(&[&eval[..], &few].concat(), 2, &["KV budget", "got 10"]);
    let mistral = golden("mistral_tiny");
    let eval = ["eval", text(&mistral), "--tokens-file", text(&file), "--context", "220"];
    fails(&[&eval[..], &report].concat(), 2, &["a window of 8 in layer 0"]);
}

#[test]
fn commands_run_under_a_policy_and_refuse_what_it_does_not_use() {
    let model = golden("llama_tiny");
    let bench = ["bench", text(&model), "--prompt-tokens", "200", "--gen-tokens", "10", "--repeat", "1"];
    let bytes = |more: &[&str]| json(&[&bench[..], more].concat())["rows"][0]["kv_cache_bytes"].as_u64().unwrap();
    let full = bytes(&[]);
    assert_eq!(bytes(&["--kv-policy", "window", "--kv-budget", "30"]), full, "a prompt that comes in one step");
    assert!(bytes(&["--kv-policy", "entropy", "--kv-budget", "40"]) < full);
    for policy in ["window", "entropy"] {
        let more = ["--engine-steps", "30", "--batch", "2", "--kv-policy", policy, "--kv-budget", "40"];
        assert_eq!(json(&[&bench[..6], &more].concat())["rows"][0]["steps"], 30);
    }
    json(&["profile", text(&model), "--prompt-tokens", "100", "--kv-policy", "entropy", "--kv-budget", "40"]);
    for (more, words) in [
        (&["--kv-budget", "5"][..], "--kv-budget: expected --kv-policy window or entropy, got full"),
        (&["--sinks", "5"], "--sinks: expected --kv-policy window or entropy, got full"),
        (&["--kv-recent", "5"], "--kv-recent: expected --kv-policy entropy, got full"),
        (
            &["--kv-policy", "window", "--kv-budget", "9", "--kv-recent", "5"],
            "--kv-recent: expected --kv-policy entropy, got window",
        ),
        (&["--kv-policy", "window"], "--kv-budget: expected"),
        (&["--kv-policy", "window", "--kv-budget", "0"], "KV window: expected at least 1 position, got 0"),
        (
            &["--kv-policy", "entropy", "--kv-budget", "9", "--kv-recent", "7"],
            "KV budget: expected at least the 4 sinks",
        ),
    ] {
        fails(&[&bench[..], more].concat(), 2, &[words]);
    }
    let mistral = golden("mistral_tiny");
    fails(
        &[
            "bench",
            text(&mistral),
            "--prompt-tokens",
            "9",
            "--gen-tokens",
            "1",
            "--kv-policy",
            "entropy",
            "--kv-budget",
            "40",
        ],
        2,
        &["a window of 8"],
    );
}
