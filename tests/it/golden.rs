//! Golden sets of earlier versions: this version reads, runs and makes them again; a set that is damaged or moved never passes.

use crate::command::text;
use dsq_checkpoint::hex_sha256;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A suite whose only job is a copy of the newest committed set, without its recipe.
struct Bench {
    dir: tempfile::TempDir,
}

const VERSION: &str = "0.3.0";
const OTHERS: [&str; 2] = ["0.1.0", "0.2.0"];

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("regression/golden");
        let to = dir.path().join("golden");
        copy(&from, &to);
        for version in OTHERS {
            std::fs::remove_dir_all(to.join(version)).unwrap();
        }
        std::fs::write(dir.path().join("s.toml"), "[golden]\npath = \"golden\"\n").unwrap();
        let bench = Self { dir };
        // Training has its own tests; a few entries of different kinds are enough for most of these.
        bench.change(|g| {
            g["recipes"] = Value::Array(Vec::new());
            let kept = ["w4a16_g32", "w8a8", "gptq_g32", "w4a16_g32_f16", "q4_k_m.gguf", "w4a16_gptq"];
            g["entries"].as_array_mut().unwrap().retain(|e| kept.contains(&e["name"].as_str().unwrap()));
        });
        bench
    }

    fn set(&self) -> PathBuf {
        self.dir.path().join("golden").join(VERSION)
    }

    fn change(&self, change: impl FnOnce(&mut Value)) {
        let file = self.set().join("golden.json");
        let mut golden: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        change(&mut golden);
        std::fs::write(&file, golden.to_string()).unwrap();
        self.list();
    }

    /// Says in versions.toml what golden.json is now, so that it is looked into.
    fn list(&self) {
        let golden = std::fs::read(self.set().join("golden.json")).unwrap();
        let said: Value = serde_json::from_slice(&golden).unwrap_or_default();
        let [commit, date] = ["commit", "date"].map(|k| said[k].as_str().unwrap_or("").to_owned());
        let list = format!(
            "files = {{}}\n[[version]]\nversion = \"{VERSION}\"\ncommit = \"{commit}\"\ndate = \"{date}\"\ncame = \"a test\"\n\
             files = {{ \"golden.json\" = \"{}\" }}\n",
            hex_sha256(&golden)
        );
        std::fs::write(self.index(), list).unwrap();
    }

    fn index(&self) -> PathBuf {
        self.dir.path().join("golden/versions.toml")
    }

    /// The exit code, the names of red checks, and stderr.
    fn run(&self) -> (i32, Vec<String>, String) {
        let suite = self.dir.path().join("s.toml");
        let out = Command::new(env!("CARGO_BIN_EXE_dsq")).args(["regress", text(&suite), "--json"]).output().unwrap();
        let stderr = String::from_utf8(out.stderr).unwrap();
        let json: Value = serde_json::from_slice(&out.stdout).unwrap_or_default();
        let rows = json["rows"].as_array().cloned().unwrap_or_default();
        let red =
            rows.iter().filter(|r| r["verdict"] != "pass").map(|r| r["name"].as_str().unwrap().to_owned()).collect();
        (out.status.code().unwrap(), red, stderr)
    }

    fn unusable(&self, words: &str) {
        let (code, _, err) = self.run();
        assert!(code == 3 && err.contains("golden set unusable") && err.contains(words), "{words}: {code} {err}");
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let (path, to) = (entry.as_ref().unwrap().path(), to.join(entry.unwrap().file_name()));
        if path.is_dir() {
            copy(&path, &to);
        } else {
            std::fs::copy(&path, &to).unwrap();
        }
    }
}

#[test]
fn the_committed_sets_of_all_versions_are_read_run_and_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let suite = dir.path().join("s.toml");
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("regression/golden");
    std::fs::write(&suite, format!("[golden]\npath = {:?}\n", golden)).unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_dsq")).args(["regress", text(&suite)]).output().unwrap();
    let told = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(0), "{told}");
    let versions =
        std::fs::read_dir(golden).unwrap().filter(|e| e.as_ref().unwrap().path().join("golden.json").exists());
    assert!(versions.count() >= 3);
    for kind in [
        "0.1.0 w4a16_g32 ",
        "0.2.0 nvfp4a16 ",
        "0.3.0 awq_g32_asymmetric ",
        "0.1.0 q4_k_m.gguf ",
        "0.2.0 fp8_static ",
        "0.1.0 micro ",
    ] {
        assert!(told.contains(kind), "{kind}");
    }
}

#[test]
fn f102_a_golden_set_that_is_damaged_never_passes() {
    let b = Bench::new();
    assert_eq!(b.run(), (0, Vec::new(), String::new()));

    let weights = b.set().join("w4a16_g32/model.safetensors");
    let good = std::fs::read(&weights).unwrap();
    let mut bad = good.clone();
    *bad.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, &bad).unwrap();
    b.unusable("w4a16_g32/model.safetensors: golden set unusable: SHA-256: expected ");
    std::fs::remove_file(&weights).unwrap();
    b.unusable("w4a16_g32/model.safetensors");
    std::fs::write(&weights, &good).unwrap();

    let json = std::fs::read(b.set().join("golden.json")).unwrap();
    for (words, change) in [
        ("version: expected 0.3.0, got 0.2.0", ("version", Value::from("0.2.0"))),
        ("format: expected 1, got 2", ("format", 2.into())),
        ("expected entries and tokens, got none", ("entries", Value::Array(Vec::new()))),
        ("invalid type", ("entries", Value::from("none"))),
        ("unknown field", ("entires", Value::Null)),
    ] {
        b.change(|g| g[change.0] = change.1);
        b.unusable(words);
        std::fs::write(b.set().join("golden.json"), &json).unwrap();
        b.list();
    }
    for (words, field, value) in [
        ("expected a bound between 0 and 1", "bound", Value::from(0.0)),
        ("expected files, values and logits, got none of one", "values", Value::Object(Default::default())),
        ("expected files, values and logits, got none of one", "logits", Value::Array(Vec::new())),
    ] {
        b.change(|g| g["entries"][0][field] = value);
        b.unusable(words);
        std::fs::write(b.set().join("golden.json"), &json).unwrap();
        b.list();
    }
    std::fs::remove_file(b.set().join("golden.json")).unwrap();
    b.unusable("golden.json");
    std::fs::rename(b.set(), b.dir.path().join("golden/newest")).unwrap();
    b.unusable("golden.json");
}

#[test]
fn f102_a_golden_set_or_an_entry_that_is_gone_never_passes() {
    let b = Bench::new();
    let index = std::fs::read_to_string(b.index()).unwrap();
    // An entry taken out, a bound widened, with everything that is left in order.
    for change in [&|g: &mut Value| drop(g["entries"].as_array_mut().unwrap().remove(0)), &|g: &mut Value| {
        g["entries"][0]["bound"] = 0.9.into()
    }] as [&dyn Fn(&mut Value); 2]
    {
        let json = std::fs::read(b.set().join("golden.json")).unwrap();
        b.change(change);
        std::fs::write(b.index(), &index).unwrap();
        b.unusable("golden.json: golden set unusable: SHA-256: expected ");
        std::fs::write(b.set().join("golden.json"), json).unwrap();
    }
    let other = "[[version]]\nversion = \"0.2.0\"\ncommit = \"c\"\ndate = \"d\"\ncame = \"x\"\nfiles = { \"golden.json\" = \"0\" }\n";
    let (other, source) = (format!("{other}[[version]]"), "files = { \"source/model.safetensors\" = \"00\" }");
    for (from, to, words) in [
        // A version whose set is not there, and one that is there unsaid.
        ("[[version]]", other.as_str(), "0.2.0/golden.json: golden set unusable"),
        (
            "version = \"0.3.0\"",
            "version = \"0.4.0\"",
            "0.3.0: golden set unusable: expected a version that versions.toml",
        ),
        ("version = \"0.3.0\"", "version = \"three\"", "version: expected one as 1.2.3, got "),
        ("commit = \"", "commit = \"f", "commit, date: expected "),
        ("golden.json", "golden.yaml", "and the digest of golden.json"),
        ("files = {}", source, "source/model.safetensors: golden set unusable: SHA-256: expected 00"),
    ] {
        assert!(index.contains(from), "{from}");
        std::fs::write(b.index(), index.replacen(from, to, 1)).unwrap();
        b.unusable(words);
    }
    std::fs::write(b.index(), "files = {}\nversion = []\n").unwrap();
    b.unusable("expected at least one version's set, got none");
    std::fs::remove_file(b.index()).unwrap();
    b.unusable("versions.toml");
    // A recipe without a digest could be changed to one that anything passes.
    b.change(|g| {
        g["recipes"] = serde_json::json!([{"file": "recipes/micro.toml", "row": "exported", "metric": "perplexity",
            "seeds": [1, 2, 3], "values": [1.0, 2.0, 3.0]}]);
    });
    b.unusable("recipes/micro.toml: expected its digest in versions.toml");
}

#[test]
fn what_follows_from_sums_of_floats_is_compared_on_the_same_hardware_alone() {
    let b = Bench::new();
    b.change(|g| {
        g["entries"].as_array_mut().unwrap().retain(|e| e["name"] == "w4a16_gptq");
        // Fewer tokens make other codes.
        let options = g["entries"][0]["options"].as_array_mut().unwrap();
        let at = options.iter().position(|o| o == "--calib-tokens").unwrap();
        options[at + 1] = "64".into();
        g["entries"][0]["hardware"] = Value::Null;
    });
    let red = vec!["golden/0.3.0 w4a16_gptq/reproduction_mismatches".to_owned()];
    assert_eq!(b.run(), (1, red.clone(), String::new()));
    let elsewhere = serde_json::json!({"arch": "none", "os": "none", "features": [], "l1": "unknown", "math": "0"});
    b.change(|g| g["entries"][0]["hardware"] = elsewhere);
    // Not a pass, and no failure.
    assert_eq!(b.run(), (0, red, String::new()));
    b.change(|g| g["entries"][0]["options"].as_array_mut().unwrap().push("--no-such-option".into()));
    assert_eq!(b.run().0, 1);
}

#[test]
fn what_this_version_reads_runs_or_makes_otherwise_is_red() {
    let b = Bench::new();
    let json = std::fs::read(b.set().join("golden.json")).unwrap();
    let red = |change: &dyn Fn(&mut Value)| {
        b.change(|g| change(&mut g["entries"][0]));
        let (code, red, err) = b.run();
        std::fs::write(b.set().join("golden.json"), &json).unwrap();
        b.list();
        assert!(code == 1 && err.is_empty(), "{red:?} {err}");
        red
    };
    // Values that are not those of that version: neither as read nor as made again.
    let other = red(&|e| {
        let first = e["values"].as_object().unwrap().keys().next().unwrap().clone();
        e["values"][first] = "00".into();
    });
    assert_eq!(other, ["golden/0.3.0 w4a16_g32/value_mismatches", "golden/0.3.0 w4a16_g32/reproduction_mismatches"]);
    // A logit that moved by twice the bound.
    let other = red(&|e| {
        let logits = e["logits"].as_array().unwrap();
        let largest = logits.iter().map(|z| z.as_f64().unwrap().abs()).fold(0.0, f64::max);
        let moved = logits[3].as_f64().unwrap() + 2.0 * e["bound"].as_f64().unwrap() * largest;
        e["logits"][3] = moved.into();
    });
    assert_eq!(other, ["golden/0.3.0 w4a16_g32/logits_difference"]);
    // Other options make other values.
    let other = red(&|e| e["options"].as_array_mut().unwrap().push("--asymmetric".into()));
    assert_eq!(other, ["golden/0.3.0 w4a16_g32/reproduction_mismatches"]);
    // A command that fails is no pass.
    let other = red(&|e| e["options"].as_array_mut().unwrap().push("--no-such-option".into()));
    assert_eq!(other, ["golden/0.3.0 w4a16_g32/reproduction_mismatches"]);
}
