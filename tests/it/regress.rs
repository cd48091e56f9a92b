//! `dsq regress` from the outside, on a suite that trains nothing (fixed inputs only): exit codes, verdicts, baselines.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder with a suite of the repository's fixed-input checks.
struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let quick =
            std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("regression/quick.toml")).unwrap();
        let fixed = &quick[quick.find("[fixed.tolerance]").unwrap()..quick.find("[golden]").unwrap()];
        std::fs::create_dir(dir.path().join("regression")).unwrap();
        std::fs::write(dir.path().join("regression/tiny.toml"), fixed).unwrap();
        Self { dir }
    }

    fn baseline(&self) -> PathBuf {
        self.dir.path().join(format!("regression/baselines/{}/tiny-fixed.json", env!("CARGO_PKG_VERSION")))
    }

    fn run(&self, args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_dsq")).current_dir(self.dir.path()).arg("regress").args(args).output().unwrap()
    }

    /// Runs and checks the exit code; stdout and stderr.
    fn expect(&self, args: &[&str], code: i32) -> (String, String) {
        let out = self.run(args);
        let (stdout, stderr) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
        assert_eq!(out.status.code(), Some(code), "{args:?}\n{stdout}\n{stderr}");
        (stdout, stderr)
    }
}

#[test]
fn bless_pass_red_and_bless_again() {
    let b = Bench::new();
    let (_, err) = b.expect(&["tiny"], 3);
    assert!(err.contains("tiny-fixed.json: file: baseline unusable: expected a baseline file, got none"), "{err}");
    assert!(err.contains("hint: ") && err.contains("--bless"), "{err}");
    b.expect(&["tiny", "--bless"], 2);
    b.expect(&["tiny", "--reason", "x"], 2);
    b.expect(&["tiny", "--bless", "--reason", " "], 2);
    assert!(!b.baseline().exists());
    let (out, _) = b.expect(&["tiny", "--bless", "--reason", "first measurement"], 0);
    assert!(out.contains("note: nothing to show the change from") && out.contains("wrote "), "{out}");
    let blessed = std::fs::read_to_string(b.baseline()).unwrap();
    assert!(blessed.contains("\"reason\": \"first measurement\""));

    let (out, _) = b.expect(&["tiny"], 0);
    assert!(out.lines().last().unwrap().ends_with(" pass"), "{out}");

    // A stored digest that the code does not give any more: red, by name, on stdout and in JSON.
    let at = blessed.find("\"scales_sha256\": \"").unwrap() + 18;
    let other = if blessed.as_bytes()[at] == b'0' { "1" } else { "0" };
    std::fs::write(b.baseline(), format!("{}{other}{}", &blessed[..at], &blessed[at + 1..])).unwrap();
    let (out, _) = b.expect(&["tiny"], 1);
    let red: Vec<&str> = out.lines().filter(|l| l.contains("regressed") && l.starts_with("fixed")).collect();
    assert!(red.len() == 1 && red[0].contains("scales_sha256"), "{out}");
    assert!(out.contains("\nregressed: fixed/w4_g32_f32/scales_sha256: differs"), "{out}");
    let report = b.dir.path().join("report.json");
    let (out, _) = b.expect(&["tiny", "--json", "--report", report.to_str().unwrap()], 1);
    let json: serde_json::Value = serde_json::from_str(&out).unwrap();
    let red: Vec<&serde_json::Value> =
        json["rows"].as_array().unwrap().iter().filter(|r| r["verdict"] == "regressed").collect();
    assert_eq!(red.len(), 1);
    assert!(
        red[0]["name"].as_str().unwrap().starts_with("fixed/w4_")
            && red[0]["name"].as_str().unwrap().ends_with("/scales_sha256")
    );
    assert_eq!(json["failed"], true);
    assert_eq!(std::fs::read_to_string(&report).unwrap().trim(), out.trim());

    let (out, _) = b.expect(&["tiny", "--bless", "--reason", "put it right"], 0);
    assert!(out.contains("regressed") && out.contains("against the old ones: "), "{out}");
    assert_eq!(std::fs::read_to_string(b.baseline()).unwrap(), blessed.replace("first measurement", "put it right"));
}

#[test]
fn f102_bad_baselines_end_with_exit_3_and_say_so() {
    let b = Bench::new();
    b.expect(&["tiny", "--bless", "--reason", "first"], 0);
    let good = std::fs::read_to_string(b.baseline()).unwrap();
    for (what, text) in [
        ("empty", String::new()),
        ("cut", good[..good.len() / 3].into()),
        ("no number", good.replacen("\"perplexity\": ", "\"perplexity\": NaN, \"x\": ", 1)),
        ("stale", good.replacen("\"recipe_sha256\": \"", "\"recipe_sha256\": \"0", 1)),
        ("lacks a metric", good.replacen("\"perplexity\": ", "\"perplexitz\": ", 1)),
        ("of another seed", good.replacen("\"seed\": 0", "\"seed\": 1", 1)),
    ] {
        std::fs::write(b.baseline(), text).unwrap();
        let (out, err) = b.expect(&["tiny"], 3);
        assert!(out.is_empty() && err.contains("baseline unusable"), "{what}: {out} {err}");
    }
    // Exact checks hold on other hardware as well: the record of it alone changes nothing here.
    std::fs::write(b.baseline(), good.replacen("\"arch\": \"", "\"arch\": \"vax", 1)).unwrap();
    b.expect(&["tiny"], 0);
}

#[test]
fn f082_a_suite_that_is_not_there_or_wrong_is_a_usage_error() {
    let b = Bench::new();
    let (_, err) = b.expect(&["nightly"], 2);
    assert!(err.contains("regression/nightly.toml: expected a suite file, got none"), "{err}");
    std::fs::write(b.dir.path().join("wrong.toml"), "[tolerance]\nkl = { relativ = 1.0 }\n").unwrap();
    let (_, err) = b.expect(&["wrong.toml"], 2);
    assert!(err.contains("line 2") && err.contains('^'), "{err}");
}

/// A recipe that trains for a second: one layer, a few steps, on the text of the repository.
const MICRO: &str = r#"
name = "micro"
seed = 3
[model]
architecture = "llama"
vocab_size = 1024
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 32
[data]
train = "DATA/train.txt"
heldout = "DATA/heldout.txt"
tokenizer = "DATA/tokenizer.json"
[train]
steps = 6
batch_size = 4
seq_len = 32
learning_rate = 3e-3
[qat]
steps = 4
learning_rate = 5e-4
float_equal_tokens = false
[quant]
scheme = "W4A16"
group_size = 32
[export]
format = "compressed-tensors"
[eval]
context = 32
max_tokens = 512
"#;

#[test]
fn a_recipe_is_trained_compared_and_goes_red_by_metric() {
    let b = Bench::new();
    let data = format!("{}/recipes/data/pydoc", env!("CARGO_MANIFEST_DIR"));
    std::fs::write(b.dir.path().join("micro.toml"), MICRO.replace("DATA", &data)).unwrap();
    let quick = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("regression/quick.toml")).unwrap();
    let policy = &quick[..quick.find("[fixed.tolerance]").unwrap()];
    let suite = format!(
        "{policy}\n[[recipe]]\npath = \"../micro.toml\"\nset = [\"qat.steps=5\"]\ntolerance = {{ graph_difference = {{ at_most = 5e-5 }} }}\n"
    );
    std::fs::write(b.dir.path().join("regression/micro.toml"), &suite).unwrap();

    b.expect(&["micro", "--bless", "--reason", "first"], 0);
    let path = b.dir.path().join(format!("regression/baselines/{}/micro-micro.json", env!("CARGO_PKG_VERSION")));
    let blessed = std::fs::read_to_string(&path).unwrap();
    for row in ["float", "rtn", "qat", "exported"] {
        assert!(blessed.contains(&format!("\"name\": \"{row}\"")), "{row}:\n{blessed}");
    }
    // The same bits again, with another number of threads.
    let (out, _) = b.expect(&["micro", "--threads", "1"], 0);
    assert!(out.lines().last().unwrap().ends_with(" pass") && !out.contains("improved"), "{out}");

    // One code of one layer other than before.
    let at = blessed.find("\"codes_sha256\": \"").unwrap() + 17;
    let flip = |s: &str, at: usize| {
        let other = if s.as_bytes()[at] == b'0' { "1" } else { "0" };
        format!("{}{other}{}", &s[..at], &s[at + 1..])
    };
    std::fs::write(&path, flip(&blessed, at)).unwrap();
    let (out, _) = b.expect(&["micro"], 1);
    assert!(out.contains("\nregressed: micro/exported/codes_sha256: "), "{out}");

    // On other hardware the digests do not compare and the rest decides; said plainly.
    std::fs::write(
        &path,
        flip(&blessed, at).replacen("\"avx\"", "\"avx1024\"", 1).replacen("\"os\": \"", "\"os\": \"other ", 1),
    )
    .unwrap();
    let (out, _) = b.expect(&["micro"], 0);
    assert!(out.contains("not comparable: the baselines are of other hardware"), "{out}");

    // Another setting is another recipe: the baseline is stale, which is known before training.
    std::fs::write(b.dir.path().join("regression/micro.toml"), suite.replace("qat.steps=5", "qat.steps=6")).unwrap();
    std::fs::write(&path, &blessed).unwrap();
    let (_, err) = b.expect(&["micro"], 3);
    assert!(err.contains("recipe_sha256: baseline unusable: measured with another recipe"), "{err}");
}

#[test]
fn a_model_is_measured_kept_by_version_and_shown_with_its_history() {
    let b = Bench::new();
    let data = format!("{}/recipes/data/pydoc", env!("CARGO_MANIFEST_DIR"));
    std::fs::write(b.dir.path().join("micro.toml"), MICRO.replace("DATA", &data)).unwrap();
    let golden = format!("{}/tests/golden/tasks", env!("CARGO_MANIFEST_DIR"));
    let suite = format!(
        "[tolerance]\nperplexity = {{ relative = 0.02 }}\n[[recipe]]\npath = \"../micro.toml\"\n\
         [[model]]\nname = \"m\"\nrecipe = \"micro\"\ntext = [\"{data}/heldout.txt\"]\ncontext = 32\nwindows = 40\n\
         tasks = [\"{golden}/choice.jsonl\", \"{golden}/predict.jsonl\"]\n\
         tolerance = {{ kl = {{ relative = 0.1 }}, accuracy = {{ absolute = 0.1 }}, greedy = {{ absolute = 0.1 }}, codes_sha256 = \"exact_on_same_hardware\", requantize_mismatches = {{ at_most = 0 }} }}\n\
         [[model.variant]]\nname = \"w4\"\nquantize = [\"--scheme\", \"W4A16\", \"--group-size\", \"32\"]\n\
         [[model.variant]]\nname = \"w4a8\"\nquantize = [\"--scheme\", \"W4A16\", \"--group-size\", \"32\"]\nactivations = \"int8\"\n"
    );
    std::fs::write(b.dir.path().join("regression/s.toml"), &suite).unwrap();
    let (out, _) = b.expect(&["s", "--bless", "--reason", "first", "--seeds", "3"], 0);
    assert_eq!(out.matches("wrote ").count(), 2, "{out}");
    let own = b.dir.path().join(format!("regression/baselines/{}/s-m.json", env!("CARGO_PKG_VERSION")));
    let read = |path: &Path| -> serde_json::Value { serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap() };
    let baseline = read(&own);
    assert_eq!(baseline["seeds"]["seeds"], serde_json::json!([3, 4, 5]));
    assert!(baseline["seeds"]["spread"]["w4"]["perplexity"].as_f64().unwrap() > 0.0);
    assert_eq!(baseline["setup"]["dependencies"]["burn"], "0.22.1");

    // The same again needs a part of the windows; CI systems and people get their files.
    let at = |name: &str| b.dir.path().join(name).to_str().unwrap().to_owned();
    let (out, _) = b.expect(&["s", "--junit", &at("j.xml"), "--html", &at("h.html")], 0);
    assert!(out.contains("decided on 16 of 40 blocks"), "{out}");
    let tasks = |row: &str| out.lines().any(|l| l.contains(row) && l.contains(" pass"));
    assert!(tasks(" base:choice  ") && tasks(" w4:choice  ") && tasks(" w4a8:predict  "), "{out}");
    let xml = std::fs::read_to_string(at("j.xml")).unwrap();
    assert!(xml.contains("<testcase classname=\"m.w4a8\" name=\"kl\"/>") && xml.contains("failures=\"0\""), "{xml}");
    let html = std::fs::read_to_string(at("h.html")).unwrap();
    assert!(html.contains("difference to the float model") && html.contains("m/w4a8") && !html.contains("src="));
    // Another seed: codes are not compared, the rest is within the noise that three seeds showed.
    let (out, _) = b.expect(&["s", "--seed", "9"], 0);
    assert!(out.contains("baseline of seed 3; differs") && out.contains("over seeds ["), "{out}");

    // Another program, here this one under another name: the same numbers by its own commands, kept under the version that is told.
    let dsq = env!("CARGO_BIN_EXE_dsq");
    b.expect(&["s", "--binary", dsq, "--as", "0.0.1"], 2);
    b.expect(&["s", "--bless", "--reason", "history", "--binary", dsq, "--as", "one"], 2);
    let (out, _) = b.expect(&["s", "--bless", "--reason", "history", "--binary", dsq, "--as", "0.0.1"], 0);
    assert!(out.contains("m: not measured and left out: accuracy, greedy, requantize_mismatches"), "{out}");
    let old = read(&b.dir.path().join("regression/baselines/0.0.1/s-m.json"));
    for (i, row) in ["base", "w4", "w4a8"].into_iter().enumerate() {
        assert_eq!(old["rows"][i]["name"], row);
        for metric in ["perplexity", "kl", "codes_sha256"] {
            assert_eq!(old["rows"][i]["metrics"][metric], baseline["rows"][i]["metrics"][metric], "{row} {metric}");
        }
    }
    let (out, _) = b.expect(&["s", "--history"], 0);
    let lines: Vec<&str> = out.lines().filter(|l| l.starts_with("m/w4a8 ")).collect();
    assert!(lines.len() == 2 && lines[0].contains(" 0.0.1 ") && lines[1].contains("same"), "{out}");
    // The newest version up to this one is compared with, not the first.
    std::fs::remove_file(&own).unwrap();
    let (_, err) = b.expect(&["s"], 3);
    assert!(err.contains("baselines/0.0.1/s-m.json") && err.contains("requantize_mismatches"), "{err}");
}
