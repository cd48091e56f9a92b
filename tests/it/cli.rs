//! `dsq run`, `bench`, `tokenize` and the rules of every command, as a person runs them: what stops a generation, what is
//! refused and when, the caret of a recipe error, and one JSON object on stdout. Not the files that `quantize` and `export`
//! write (see `model_files.rs`) and not `regress` (see `regress.rs`).

use crate::command::faults_of;
use dsq_checkpoint::{Checkpoint, ExportTensor, LlamaConfig, ModelConfig, export_folder};
use dsq_quant::{FloatType, Granularity, QuantArgs, QuantConfig, QuantScheme, QuantizedMatrix};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn dsq_in(dir: &Path, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_dsq")).current_dir(dir).args(args).output().unwrap()
}

/// Runs a command and checks its exit code; stdout and stderr.
fn expect(dir: &Path, args: &[&str], code: i32) -> (String, String) {
    let out = dsq_in(dir, args);
    let (stdout, stderr) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
    assert_eq!(out.status.code(), Some(code), "{args:?}\n{stdout}\n{stderr}");
    (stdout, stderr)
}

/// Runs a command with `--json` that must succeed: stdout is one object on one line, stderr is empty.
fn object(dir: &Path, args: &[&str]) -> Value {
    let (stdout, stderr) = expect(dir, &[args, &["--json"]].concat(), 0);
    let value: Value = serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("{args:?}: {e}: {stdout}"));
    assert!(value.is_object() && stdout.ends_with('\n'), "{args:?}: {stdout}");
    assert!(stderr.is_empty(), "{args:?}: {stderr}");
    value
}

/// A folder with a tokenizer and two models of the same random weights: `float`, and `packed` (INT4, groups of 16).
struct Models {
    dir: tempfile::TempDir,
}

const CONTEXT: usize = 48;

impl Models {
    fn new() -> Self {
        let this = Self { dir: tempfile::tempdir().unwrap() };
        let config = LlamaConfig {
            model_type: "llama".into(),
            hidden_size: 32,
            intermediate_size: 48,
            num_hidden_layers: 2,
            num_attention_heads: 4,
            num_key_value_heads: 2,
            head_dim: 8,
            vocab_size: 1024,
            max_position_embeddings: CONTEXT,
            rms_norm_eps: 1e-5,
            rope_theta: 10_000.0,
            rope_scaling: None,
            windows: Vec::new(),
            experts: None,
            latent: None,
            biases: Default::default(),
            tie_word_embeddings: true,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
            pad_token_id: None,
        };
        let model = ModelConfig::Llama(config.clone());
        let mut state = 5u64;
        let mut values = |len: usize, size: f32| -> Vec<f32> {
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
            };
            (0..len).map(|_| size * next()).collect()
        };
        let weights = QuantArgs::int4(Granularity::PerGroup(16), FloatType::F32);
        let (mut float, mut packed) = (Vec::new(), Vec::new());
        let mut both = |name: String, shape: Vec<usize>, data: Vec<f32>| {
            float.push(ExportTensor::Float { name: name.clone(), shape: shape.clone(), data, dtype: FloatType::F32 });
            packed.extend(float.last().cloned());
        };
        both("model.embed_tokens.weight".into(), vec![1024, 32], values(1024 * 32, 1.0));
        let norms = (0..2).flat_map(|i| ["input", "post_attention"].map(|n| format!("model.layers.{i}.{n}_layernorm")));
        for norm in norms.chain(["model.norm".into()]) {
            both(format!("{norm}.weight"), vec![32], values(32, 0.2).iter().map(|v| 1.0 + v).collect());
        }
        for spec in model.linears() {
            let (n, k, module) = (spec.n(), spec.k(), spec.module);
            let data = values(n * k, 0.6);
            let matrix = QuantizedMatrix::quantize(&data, n, k, weights).unwrap();
            let (name, shape) = (format!("{module}.weight"), spec.shape);
            float.push(ExportTensor::Float { name, shape: shape.clone(), data, dtype: FloatType::F32 });
            packed.push(ExportTensor::Linear { module, shape, matrix, activation: None, source: None, order: None });
        }
        let quant = QuantConfig::new(QuantScheme { weights, activations: None }, &[]).unwrap();
        let tokenizer = std::fs::read(root("recipes/data/pydoc/tokenizer.json")).unwrap();
        for (name, tensors, scheme) in [("float", float, None), ("packed", packed, Some(&quant))] {
            let aux = vec![("tokenizer.json".to_owned(), tokenizer.clone())];
            export_folder(&this.path().join(name), &model, tensors, scheme, aux, false).unwrap();
        }
        this
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A copy of a model with keys of its config.json set.
    fn with_config(&self, from: &str, name: &str, keys: Value) {
        let (from, to) = (self.path().join(from), self.path().join(name));
        std::fs::create_dir(&to).unwrap();
        for entry in std::fs::read_dir(&from).unwrap().flatten() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
        let path = to.join("config.json");
        let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        keys.as_object().unwrap().iter().for_each(|(k, v)| config[k] = v.clone());
        std::fs::write(path, config.to_string()).unwrap();
    }

    /// A copy of the packed model, one scale of which is NaN: it opens, and is refused when its weights are read.
    fn with_broken_scale(&self, name: &str) {
        self.with_config("packed", name, json!({}));
        let path = self.path().join(name).join("model.safetensors");
        let mut file = std::fs::read(&path).unwrap();
        let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let entries: Value = serde_json::from_slice(&file[8..8 + header]).unwrap();
        let tensor = &entries["model.layers.1.mlp.down_proj.weight_scale"];
        let at = 8 + header + tensor["data_offsets"][0].as_u64().unwrap() as usize;
        file[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        std::fs::write(path, file).unwrap();
    }

    /// The row of `dsq run --json`.
    fn run(&self, model: &str, more: &[&str]) -> Value {
        let seen = object(self.path(), &[&["run", model, "--prompt", "the list of"], more].concat());
        assert_eq!((&seen["command"], seen["rows"].as_array().unwrap().len()), (&json!("run"), 1));
        seen["rows"][0].clone()
    }
}

fn ids(row: &Value) -> Vec<u64> {
    row["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap()).collect()
}

#[test]
fn f047_generation_stops_at_an_end_token_and_does_not_print_it() {
    let m = Models::new();
    for model in ["float", "packed"] {
        let row = m.run(model, &["--max-tokens", "8"]);
        let free = ids(&row);
        assert_eq!((free.len(), &row["finish_reason"]), (8, &json!("length")));
        let tokens = object(m.path(), &["tokenize", model, "--text", "the list of"]);
        assert_eq!(row["prompt_tokens"], tokens["ids"][0].as_array().unwrap().len());
        // Greedy decoding makes this token third (at the earliest): as the end token it ends the text there.
        let at = (2..8).find(|&i| !free[..i].contains(&free[i])).expect("not a loop");
        let other = (0..1024).find(|id| !free.contains(id)).unwrap();
        for (name, eos, len) in [
            ("one", json!(free[at]), at),
            ("list", json!([other, free[at]]), at),
            ("first", json!(free[0]), 0),
            ("never", json!(other), 8),
        ] {
            let name = format!("{model}-{name}");
            m.with_config(model, &name, json!({ "eos_token_id": eos }));
            let row = m.run(&name, &["--max-tokens", "8"]);
            assert_eq!(ids(&row), free[..len], "{name}");
            assert_eq!(row["finish_reason"], if len < 8 { "stop" } else { "length" }, "{name}");
            // Without --json the text alone goes to stdout, with one newline behind it.
            let args = ["run", &name, "--prompt", "the list of", "--max-tokens", "8"];
            let (text, errors) = expect(m.path(), &args, 0);
            assert_eq!((text, errors.as_str()), (format!("{}\n", row["text"].as_str().unwrap()), ""), "{name}");
        }
        assert_eq!(m.run(&format!("{model}-first"), &[])["text"], "");
    }
}

#[test]
fn run_draws_the_same_tokens_for_the_same_seed_and_any_threads() {
    let m = Models::new();
    let draw = |seed: &str, threads: &str| {
        let more = ["--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--seed", seed, "--threads", threads];
        ids(&m.run("packed", &[&more[..], &["--max-tokens", "12"]].concat()))
    };
    assert_eq!(draw("1", "1"), draw("1", "2"));
    assert_ne!(draw("1", "1"), draw("2", "1"));
    let greedy = |more: &[&str]| ids(&m.run("packed", &[more, &["--max-tokens", "12"]].concat()));
    assert_eq!(greedy(&[]), greedy(&["--temperature", "1", "--top-k", "1"]));
    // The context ends the text: its last token is not fed back.
    let row = m.run("packed", &["--max-tokens", "1000"]);
    assert_eq!(ids(&row).len() + row["prompt_tokens"].as_u64().unwrap() as usize, CONTEXT + 1);
    assert_eq!(row["finish_reason"], "length");
}

#[test]
fn f119_i8_more_tokens_than_the_context_are_refused_before_the_weights_are_read() {
    let m = Models::new();
    m.with_broken_scale("broken");
    // The weights are what fails, once they are read.
    let (_, err) = expect(m.path(), &["run", "broken", "--prompt", "the list of"], 3);
    assert!(err.contains("model.layers.1.mlp.down_proj") && err.contains("NaN"), "{err}");

    let long = "word ".repeat(60);
    let tokens = object(m.path(), &["tokenize", "broken", "--text", &long]);
    let count = tokens["ids"][0].as_array().unwrap().len();
    assert!(count > CONTEXT);
    let (out, err) = expect(m.path(), &["run", "broken", "--prompt", &long], 2);
    let want = format!(
        "error: --prompt: expected at most 48 tokens (the model's context), got {count}\nhint: shorten the prompt\n"
    );
    assert_eq!((out.as_str(), err), ("", want));

    let (_, err) = expect(m.path(), &["bench", "broken", "--prompt-tokens", "40", "--gen-tokens", "9"], 2);
    let want =
        "error: --prompt-tokens and --gen-tokens: expected at most 48 tokens together (the model's context), got 49\n";
    assert_eq!(err, want);
    let (_, err) = expect(m.path(), &["bench", "broken", "--prompt-tokens", "40", "--gen-tokens", "8"], 3);
    assert!(err.contains("NaN"), "{err}");

    std::fs::write(m.path().join("ids.json"), "[[1, 2, 3, 4]]").unwrap();
    let eval = ["eval", "broken", "--tokens-file", "ids.json", "--context"];
    let (_, err) = expect(m.path(), &[&eval[..], &["49"]].concat(), 2);
    assert_eq!(err, "error: --context: expected 2 to 48 (the model's positions), got 49\n");
}

#[test]
fn f120_settings_of_run_and_bench_that_cannot_work() {
    let m = Models::new();
    for (args, words) in [
        (&["run", "packed", "--prompt", ""][..], "--prompt: expected at least one token, got none"),
        (&["run", "packed", "--prompt", "x", "--temperature", "NaN"], "temperature"),
        (&["run", "packed", "--prompt", "x", "--temperature=-1"], "temperature"),
        (&["run", "packed", "--prompt", "x", "--top-p", "0"], "top_p"),
        (&["run", "packed", "--prompt", "x", "--top-p", "2"], "top_p"),
        (&["run", "packed", "--prompt", "x", "--max-tokens=-1"], "--max-tokens"),
        (&["run", "packed", "--prompt", "x", "--threads", "0"], "--threads: expected at least 1, got 0"),
        (&["bench", "packed", "--repeat", "0"], "--repeat: expected at least 1, got 0"),
        (&["bench", "packed", "--gen-tokens", "0"], "--gen-tokens: expected at least 1, got 0"),
        (&["tokenize", "packed"], "--file"),
        (&["run", "packed"], "--prompt"),
    ] {
        let (out, err) = expect(m.path(), args, 2);
        assert!(out.is_empty() && err.contains(words), "{args:?}: {err}");
    }
    let (_, err) = expect(m.path(), &["run", "packed", "--prompt", "x", "--chat"], 3);
    assert_eq!(err, "error: packed: chat template: expected one, got none\nhint: leave out --chat\n");
    let (_, err) = expect(m.path(), &["doctor", "--device", "cuda:0"], 5);
    assert!(err.contains("--device: ") && err.contains("cuda:0") && err.contains("hint: use --device cpu"), "{err}");
    let golden = root("tests/golden/llama_tiny");
    let (_, err) = expect(m.path(), &["run", golden.to_str().unwrap(), "--prompt", "x"], 3);
    assert!(err.contains("tokenizer.json: file: expected tokenizer.json, got no such file"), "{err}");
}

#[test]
fn f063_tokenize_gives_ids_of_texts_and_of_special_texts_when_asked() {
    let m = Models::new();
    std::fs::write(m.path().join("texts.json"), r#"["", "a <|endoftext|>"]"#).unwrap();
    let seen = object(m.path(), &["tokenize", "packed", "--file", "texts.json", "--text", "the"]);
    let lists = seen["ids"].as_array().unwrap();
    assert_eq!((lists.len(), &lists[0]), (3, &json!([])));
    assert_eq!(lists[1].as_array().unwrap().last(), Some(&json!(0)), "the special token's id");
    let literal = object(m.path(), &["tokenize", "packed", "--literal", "--text", "a <|endoftext|>"]);
    assert!(!literal["ids"][0].as_array().unwrap().contains(&json!(0)));
    // Without --json: the list alone.
    let (plain, _) = expect(m.path(), &["tokenize", "packed", "--file", "texts.json", "--text", "the"], 0);
    assert_eq!(serde_json::from_str::<Value>(&plain).unwrap(), seen["ids"]);
    std::fs::write(m.path().join("texts.json"), r#"{"a": 1}"#).unwrap();
    let (_, err) = expect(m.path(), &["tokenize", "packed", "--file", "texts.json"], 2);
    assert!(err.starts_with("error: texts.json: expected a JSON list of strings, got: "), "{err}");
}

/// A recipe that trains for a second.
fn recipe(dir: &Path, name: &str, change: impl Fn(String) -> String) {
    let data = root("recipes/data/pydoc").display().to_string();
    let text = format!(
        "name = \"micro\"\n[model]\narchitecture = \"llama\"\nvocab_size = 1024\nhidden_size = 32\n\
         intermediate_size = 64\nnum_hidden_layers = 1\nnum_attention_heads = 2\nmax_position_embeddings = 32\n\
         [data]\ntrain = \"{data}/train.txt\"\nheldout = \"{data}/heldout.txt\"\ntokenizer = \"{data}/tokenizer.json\"\n\
         [train]\nsteps = 3\nbatch_size = 4\nseq_len = 32\nlearning_rate = 3e-3\n\
         [qat]\nsteps = 2\nlearning_rate = 5e-4\nfloat_equal_tokens = false\n\
         [quant]\nscheme = \"W4A16\"\ngroup_size = 32\n[export]\nformat = \"compressed-tensors\"\n\
         [eval]\ncontext = 32\nmax_tokens = 256\n"
    );
    std::fs::write(dir.join(name), change(text)).unwrap();
}

#[test]
fn json_is_one_object_on_stdout_for_every_command() {
    let m = Models::new();
    let dir = m.path();
    std::fs::write(dir.join("ids.json"), "[[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11]]").unwrap();
    recipe(dir, "micro.toml", |text| text);
    let rows = |v: &Value| v["rows"].as_array().map_or(0, Vec::len);
    let command = |v: &Value, name: &str| assert_eq!(v["command"], name, "{v}");

    let seen = object(dir, &["inspect", "packed"]);
    assert!(rows(&seen) > 14 && faults_of(&seen).is_empty(), "{seen}");
    let seen = object(dir, &["quantize", "float", "--out", "q", "--group-size", "16"]);
    assert!(rows(&seen) == 14 && seen["bits_per_weight"] == 6.0, "{seen}");
    object(dir, &["export", "q", "--out", "again", "--format", "compressed-tensors"]);
    let seen = object(dir, &["eval", "packed", "--reference", "float", "--tokens-file", "ids.json", "--context", "8"]);
    command(&seen, "eval");
    assert_eq!(
        (seen["rows"][0]["name"].as_str(), seen["rows"][1]["name"].as_str()),
        (Some("model"), Some("reference"))
    );
    assert!(seen["rows"][0]["perplexity"].is_number() && seen["rows"][0]["kl"].is_number(), "{seen}");
    let row = m.run("packed", &["--max-tokens", "3"]);
    assert!(row["text"].is_string() && row["seconds"].as_f64().unwrap() > 0.0, "{row}");

    let args = ["bench", "packed", "--prompt-tokens", "20", "--gen-tokens", "6", "--repeat", "2", "--threads", "1"];
    let seen = object(dir, &args);
    command(&seen, "bench");
    let row = &seen["rows"][0];
    assert_eq!((&row["name"], rows(&seen)), (&json!("batch 1"), 1));
    assert_eq!([&row["prompt_tokens"], &row["gen_tokens"], &row["repeat"], &row["threads"]], [20, 6, 2, 1]);
    for key in ["tokens_per_second", "prompt_tokens_per_second", "latency_p50_ms", "latency_p99_ms", "bandwidth_share"]
    {
        assert!(row[key].as_f64().is_some_and(|v| v > 0.0 && v.is_finite()), "{key}: {row}");
    }
    // 1024 * 32 embedding, 5 norms of 32, and the packed layers: 4 bits and an f32 scale for 16 weights.
    let linear = 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32);
    let (bytes, stored) = (row["resident_bytes"].as_u64().unwrap(), 4 * (1024 * 32 + 5 * 32) + linear * 6 / 8);
    // Two lists of the runs of each layer's inputs, 32 bytes a run: a layer of 32 inputs has 2, one of 48 has 3.
    let lists = 2 * 32 * 2 * (6 * 2 + 3);
    assert!((stored..stored * 101 / 100 + lists).contains(&bytes), "{stored} and padding to cache lines: {bytes}");
    let (plain, _) = expect(dir, &args, 0);
    assert!(
        plain.starts_with("batch 1, 1 threads, float activations, f16 cache, medians of 2\n")
            && plain.contains("int4 weights"),
        "{plain}"
    );

    assert!(object(dir, &["tokenize", "packed", "--text", "a"])["ids"].is_array());
    let seen = object(dir, &["doctor"]);
    command(&seen, "doctor");
    assert!(rows(&seen) == 6 && seen["rows"][0]["kernel"].is_string(), "{seen}");
    let seen = object(dir, &["bench", "micro.toml", "--train-steps", "2", "--set", "quant.scheme=W4A8"]);
    let row = &seen["rows"][0];
    assert!(
        rows(&seen) == 1 && row["name"] == "train step" && row["fake_quant_overhead"].as_f64() > Some(0.0),
        "{seen}"
    );
    assert!(row["step_ms"].as_f64() > Some(0.0) && row["tokens_per_second"].as_f64() > Some(0.0), "{seen}");
    let timed = ["bench", "micro.toml", "--train-steps", "2", "--set", "quant.scheme=W4A4"];
    assert!(object(dir, &timed)["rows"][0]["fake_quant_overhead"].as_f64() > Some(0.0));
    let seen = object(dir, &["train", "micro.toml", "--check"]);
    command(&seen, "train");
    assert!(!dir.join("runs").exists(), "a check makes nothing");
    let seen = object(dir, &["train", "micro.toml", "--out", "run"]);
    command(&seen, "train");
    let names: Vec<&str> = seen["rows"].as_array().unwrap().iter().map(|r| r["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["float", "rtn", "gptq", "awq", "qat", "exported"]);
}

#[test]
fn errors_with_json_are_one_object_on_stderr_and_nothing_on_stdout() {
    let m = Models::new();
    recipe(m.path(), "typo.toml", |t| t.replace("steps = 3", "stepz = 3"));
    for (args, code, words) in [
        (&["run", "none", "--prompt", "x"][..], 3, "none: "),
        (&["bench", "packed"], 2, "got 640"),
        (&["eval", "packed"], 2, "--text: "),
        (&["tokenize", "packed", "--file", "none.json"], 4, "none.json: cannot read"),
        (&["train", "typo.toml"], 2, "typo.toml:15:1: "),
        (&["doctor", "--device", "cuda:1"], 5, "cuda:1"),
    ] {
        let (out, err) = expect(m.path(), &[args, &["--json"]].concat(), code);
        let value: Value = serde_json::from_str(&err).unwrap_or_else(|e| panic!("{args:?}: {e}: {err}"));
        assert_eq!((out.as_str(), &value["error"]["code"]), ("", &json!(code)), "{args:?}");
        assert!(value["error"]["message"].as_str().unwrap().contains(words), "{args:?}: {err}");
    }
}

#[test]
fn f082_a_typo_in_a_recipe_shows_line_column_caret_and_the_nearest_key() {
    let dir = tempfile::tempdir().unwrap();
    recipe(dir.path(), "r.toml", |t| t.replace("learning_rate = 3e-3", "  lerning_rate = 3e-3 # high"));
    let want = "error: r.toml:18:3: unknown key `lerning_rate` in [train]; did you mean `learning_rate`?
  |   lerning_rate = 3e-3 # high
  |   ^^^^^^^^^^^^
";
    for more in [&["--check"][..], &["--out", "run"]] {
        let (out, err) = expect(dir.path(), &[&["train", "r.toml"], more].concat(), 2);
        assert_eq!((out.as_str(), err.as_str()), ("", want));
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "nothing was made");
    let (_, err) = expect(dir.path(), &["train", "none.toml"], 2);
    assert!(err.starts_with("error: none.toml: "), "{err}");
}

/// The recipe's digest as `--check` prints it, or the message of its refusal.
fn checked(dir: &Path, set: &[&str], code: i32) -> String {
    let set: Vec<&str> = set.iter().flat_map(|s| ["--set", s]).collect();
    let (out, err) = expect(dir, &[&["train", "micro.toml", "--check"], set.as_slice()].concat(), code);
    if code == 0 { out } else { err }
}

#[test]
fn hidden_states_need_distillation_and_absent_keys_leave_the_digest_alone() {
    let dir = tempfile::tempdir().unwrap();
    recipe(dir.path(), "micro.toml", |t| t);
    let plain = checked(dir.path(), &[], 0);
    assert_eq!(plain, checked(dir.path(), &["qat.hidden_weight=0"], 0));
    let distilled = checked(dir.path(), &["qat.distill_weight=1"], 0);
    assert_eq!(distilled, checked(dir.path(), &["qat.distill_weight=1", "qat.hidden_weight=0.0"], 0));
    let hidden = checked(dir.path(), &["qat.distill_weight=1", "qat.hidden_weight=0.5"], 0);
    assert!(plain != distilled && distilled != hidden);
    let err = checked(dir.path(), &["qat.hidden_weight=0.5"], 2);
    let want =
        "hidden_weight: expected distill_weight above 0 beside it, got hidden_weight = 0.5 and distill_weight = 0";
    assert!(err.contains(want), "{err}");
    assert!(checked(dir.path(), &["qat.distill_weight=1", "qat.hidden_weight=-1"], 2).contains("got -1"));
}

/// The recipe of an image model as `micro.toml`. Any file will do as data: a check reads no picture.
fn image_recipe(dir: &Path) {
    let text = std::fs::read_to_string(root("recipes/fashion-resnet-w4a4.toml")).unwrap();
    std::fs::write(dir.join("file"), "x").unwrap();
    let here = |line: &str| match line.split_once(" = ") {
        Some((key, _)) if key.ends_with("_images") || key.ends_with("_labels") => format!("{key} = \"file\"\n"),
        _ => format!("{line}\n"),
    };
    std::fs::write(dir.join("micro.toml"), text.lines().map(here).collect::<String>()).unwrap();
}

#[test]
fn the_scheme_of_an_image_model_is_read_and_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    image_recipe(dir.path());
    let mut digests: Vec<String> = ["W8A8", "W4A8", "W4A4", "W2A4", "W4A16"]
        .iter()
        .map(|scheme| checked(dir.path(), &[&format!("quant.scheme={scheme}"), "qat.wrong_way=none"], 0))
        .collect();
    digests.dedup();
    assert_eq!(digests.len(), 5);
    checked(dir.path(), &["quant.scheme=W8A8", "qat.learned_scales=true"], 0);
    let digest = |set: &[&str]| checked(dir.path(), set, 0);
    assert_eq!(digest(&[]), digest(&["export.format=compressed-tensors"]));
    assert!(digest(&[]) != digest(&["export.format=onnx"]));
    for (set, word) in [
        (&["quant.scheme=FP8_DYNAMIC"][..], "got FP8 E4M3"),
        (&["quant.scheme=W8A8", "quant.granularity=group", "quant.group_size=9"], "granularity"),
    ] {
        let err = checked(dir.path(), set, 2);
        assert!(err.contains(word), "{set:?}: {err}");
    }
}

#[test]
fn the_observer_of_activations_is_read_and_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    image_recipe(dir.path());
    let digest = |set: &[&str]| checked(dir.path(), set, 0);
    assert_eq!(digest(&[]), digest(&["qat.observer=moving_average"]));
    let percentile = digest(&["qat.observer=percentile"]);
    assert_eq!(percentile, digest(&["qat.observer=percentile", "qat.percentile=99.99"]));
    assert!(percentile != digest(&["qat.observer=percentile", "qat.percentile=99.9"]) && percentile != digest(&[]));
    for (set, words) in [
        (
            &["qat.percentile=99.9"][..],
            "percentile: expected observer = \"percentile\" beside it, got percentile = 99.9",
        ),
        (&["qat.observer=percentile", "qat.percentile=50"], "qat.percentile: expected above 50, at most 100, got 50"),
        (&["qat.observer=percentile", "qat.percentile=101"], "percentile: expected a number from 50 to 100, got 101"),
        (&["qat.observer=percentil"], "did you mean percentile?"),
        (&["qat.hidden_weight=1"], "unknown key `hidden_weight`"),
    ] {
        let err = checked(dir.path(), set, 2);
        assert!(err.contains(words), "{set:?}: {err}");
    }
}

#[test]
fn adapters_are_read_refused_by_name_and_never_exported() {
    let dir = tempfile::tempdir().unwrap();
    recipe(dir.path(), "micro.toml", |t| t);
    let digest = |set: &[&str]| checked(dir.path(), set, 0);
    assert_eq!(digest(&[]), digest(&["qat.lora_rank=0"]));
    assert_eq!(digest(&["qat.lora_rank=4"]), digest(&["qat.lora_rank=4", "qat.lora_alpha=4"]), "alpha is the rank");
    assert!(digest(&["qat.lora_rank=4"]) != digest(&["qat.lora_rank=4", "qat.lora_alpha=8"]));
    for (set, words) in [
        (&["qat.lora_alpha=8"][..], "lora_alpha: expected lora_rank of at least 1 beside it, got lora_alpha = 8"),
        (&["qat.lora_rank=-1"], "lora_rank: expected an integer from 0 to 65536, got -1"),
        (&["qat.lora_rank=4", "qat.lora_alpha=0"], "lora_alpha: expected a number from"),
        (&["qat.lora_rank=33"], "qat.lora_rank: expected at most 32, the lesser side of model.layers.0."),
    ] {
        let err = checked(dir.path(), set, 2);
        assert!(err.contains(words), "{set:?}: {err}");
    }

    let set = ["--set", "qat.lora_rank=4", "--set", "qat.learned_scales=true", "--set", "qat.learning_rate=1e-2"];
    let seen = object(dir.path(), &[&["train", "micro.toml", "--out", "run"][..], &set].concat());
    let perplexity = |name: &str| {
        let row = seen["rows"].as_array().unwrap().iter().find(|r| r["name"] == name).unwrap();
        row["perplexity"].as_f64().unwrap()
    };
    // The runtime runs what was trained.
    assert!((perplexity("exported") / perplexity("qat") - 1.0).abs() < 1e-4, "{seen}");
    let header = |folder: &str| {
        let file = std::fs::read(dir.path().join("run").join(folder).join("model.safetensors")).unwrap();
        let len = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        String::from_utf8(file[8..8 + len].to_vec()).unwrap()
    };
    assert!(header("exported").contains("q_proj.weight_packed"));
    assert!(["exported", "master", "float"].iter().all(|f| !header(f).contains("lora")));
    // Norms and the embedding are the float model's; the matrices are not.
    let read = |folder: &str, name: &str| {
        Checkpoint::open(&dir.path().join("run").join(folder)).unwrap().read_f32(name).unwrap()
    };
    for name in ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight"] {
        assert_eq!(read("float", name), read("exported", name), "{name}");
    }
    let name = "model.layers.0.mlp.up_proj.weight";
    assert_ne!(read("float", name), read("master", name));
}

#[test]
fn f041_an_unknown_architecture_is_refused_by_name_in_every_command() {
    let m = Models::new();
    std::fs::write(m.path().join("ids.json"), "[[1, 2, 3]]").unwrap();
    m.with_config("packed", "neox", json!({"model_type": "gpt_neox", "architectures": ["GPTNeoXForCausalLM"]}));
    let want = "neox/config.json: model_type: architecture not supported; expected llama (LlamaForCausalLM), qwen2 (Qwen2ForCausalLM), \
                qwen3 (Qwen3ForCausalLM), mistral (MistralForCausalLM), mixtral (MixtralForCausalLM), \
                deepseek_v2 (DeepseekV2ForCausalLM), deepseek_v3 (DeepseekV3ForCausalLM), resnet (ResNetForImageClassification), \
                mobilenet_v2 (MobileNetV2ForImageClassification), dsq_resnet or efficientnet_lite0, got gpt_neox\n";
    for args in [
        &["run", "neox", "--prompt", "x"][..],
        &["bench", "neox"],
        &["inspect", "neox"],
        &["tokenize", "neox", "--text", "x"],
        &["eval", "neox", "--tokens-file", "ids.json"],
        &["quantize", "neox", "--out", "q"],
        &["export", "neox", "--out", "q", "--format", "compressed-tensors"],
    ] {
        let (out, err) = expect(m.path(), args, 3);
        assert_eq!((out.as_str(), err), ("", format!("error: {want}")), "{args:?}");
    }
    m.with_config("packed", "code", json!({"auto_map": {"AutoModel": "evil.py"}}));
    let (_, err) = expect(m.path(), &["run", "code", "--prompt", "x"], 3);
    assert!(err.contains("auto_map") && err.contains("never runs a model's own code"), "{err}");
}

#[test]
fn f097_a_run_folder_in_use_is_refused_and_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    recipe(dir.path(), "micro.toml", |t| t);
    expect(dir.path(), &["train", "micro.toml", "--out", "run"], 0);
    let log = std::fs::read(dir.path().join("run/log.jsonl")).unwrap();
    // This process is the other one: it holds the lock as a training run does.
    let description: Value = serde_json::from_slice(&std::fs::read(dir.path().join("run/run.json")).unwrap()).unwrap();
    let held = dsq_train::RunDir::open(&dir.path().join("run"), &description["fingerprint"], true, false).unwrap();
    for more in ["--resume", "--overwrite"] {
        let (out, err) = expect(dir.path(), &["train", "micro.toml", "--out", "run", more], 4);
        let want = format!("error: run: in use by process {}\n", std::process::id());
        assert!(out.is_empty() && err.starts_with(&want) && err.contains("hint: wait for it"), "{err}");
    }
    drop(held);
    // Without either flag an earlier run is not touched, lock or no lock.
    let (_, err) = expect(dir.path(), &["train", "micro.toml", "--out", "run"], 2);
    assert!(err.contains("--resume") && err.contains("--overwrite"), "{err}");
    assert_eq!(std::fs::read(dir.path().join("run/log.jsonl")).unwrap(), log);
    // A process that another test is just starting may hold the lock with us for a moment more.
    let resumed = || dsq_in(dir.path(), &["train", "micro.toml", "--out", "run", "--resume"]).status.code();
    assert_eq!((0..50).map(|_| resumed()).find(|code| *code != Some(4)), Some(Some(0)));
}

#[cfg(unix)]
#[test]
fn f095_a_closed_pipe_ends_quietly() {
    let m = Models::new();
    for args in [&["inspect", "packed"][..], &["run", "packed", "--prompt", "x"], &["doctor", "--json"]] {
        let mut child = Command::new(env!("CARGO_BIN_EXE_dsq"))
            .current_dir(m.path())
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let out = child.wait_with_output().unwrap();
        assert_eq!((out.status.code(), String::from_utf8(out.stderr).unwrap().as_str()), (Some(0), ""), "{args:?}");
    }
}

#[test]
fn recipes_train_zero_points_and_activations_of_every_kind() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    short_recipe(dir, |t| t);
    for (i, set) in [
        &["quant.asymmetric=true"][..],
        &["quant.scheme=W4A8", "quant.asymmetric=true", "quant.asymmetric_activations=true"],
        &["quant.scheme=FP8_DYNAMIC", "quant.granularity=channel"],
        &["quant.scheme=MXFP4"],
        &["quant.scheme=NVFP4A16", "quant.group_size=16"],
        &["quant.scheme=NVFP4A16", "quant.group_size=16", "qat.learned_scales=true"],
        &["quant.scheme=MXFP4A16", "qat.learned_scales=true", "qat.distill_weight=1.0"],
        &["quant.scheme=FP8A16_BLOCK", "quant.granularity=block"],
        &["quant.scheme=FP8A16_BLOCK", "quant.granularity=block", "qat.learned_scales=true", "qat.lora_rank=2"],
        &["quant.scheme=FP8_BLOCK", "quant.granularity=block", "model.hidden_size=128", "model.intermediate_size=256"],
        &["quant.scheme=FP8", "quant.granularity=tensor", "qat.freeze_ranges_step=2", "qat.calibration_batches=3"],
        &["quant.scheme=W4A4", "qat.observer=percentile", "qat.percentile=99.9", "quant.observer=mse"],
        &["quant.scheme=W8A8", "quant.static_activations=true", "qat.observer=min_max", "qat.float_equal_tokens=true"],
        &["quant.scheme=W4A8", "quant.static_activations=true", "quant.asymmetric_activations=true"],
        &["quant.scheme=W8A8", "quant.static_activations=true", "qat.learned_scales=true", "qat.distill_weight=1.0"],
        &["quant.scheme=W4A4", "qat.learned_scales=true", "qat.observer=percentile"],
        &["quant.scheme=FP8", "quant.granularity=tensor", "qat.learned_scales=true", "qat.lora_rank=2"],
        &["quant.scheme=NVFP4", "quant.group_size=16"],
        &["quant.scheme=NVFP4", "quant.group_size=16", "qat.learned_scales=true", "qat.lora_rank=2"],
    ]
    .into_iter()
    .enumerate()
    {
        let set: Vec<&str> = set.iter().flat_map(|s| ["--set", s]).collect();
        let out = format!("run{i}");
        let seen = object(dir, &[&["train", "micro.toml", "--out", &out], set.as_slice()].concat());
        let rows = seen["rows"].as_array().unwrap();
        let of = |name: &str| rows.iter().find(|r| r["name"] == name).map(|r| r["perplexity"].as_f64().unwrap());
        // The graph and the runtime: an activation's code that flips moves a perplexity in its last digits; float inputs leave
        // the order of the sums in attention.
        let (qat, exported) = (of("qat").unwrap(), of("exported").unwrap());
        let most = if set.iter().any(|s| s.contains("A16")) { 1e-6 } else { 1e-3 };
        assert!((qat / exported - 1.0).abs() < most, "{set:?}: {qat} {exported}");
        let folder = format!("{out}/exported");
        let (seen, _) = expect(dir, &["inspect", &folder], 0);
        assert!(seen.contains("no faults found"), "{seen}");
        let heldout = root("recipes/data/pydoc/heldout.txt").display().to_string();
        let seen = object(dir, &["eval", &folder, "--text", &heldout, "--context", "32", "--max-tokens", "256"]);
        assert_eq!(seen["rows"][0]["perplexity"].as_f64(), Some(exported), "{set:?}: the folder by itself");
        // Whatever rounds the float model has its inputs on grids too, and stays near what is trained from there.
        for (name, perplexity) in ["rtn", "rtn_mse", "gptq", "awq"].iter().filter_map(|n| Some((n, of(n)?))) {
            assert!((perplexity / qat - 1.0).abs() < 0.05, "{set:?}: {name} {perplexity}, {qat}");
        }
        let text = std::fs::read(dir.join(&out).join("exported/config.json")).unwrap();
        let config: Value = serde_json::from_slice(&text).unwrap();
        let inputs = &config["quantization_config"]["config_groups"]["group_0"]["input_activations"];
        let stored =
            set.iter().any(|s| ["quant.static_activations=true", "quant.scheme=FP8", "quant.scheme=W4A4"].contains(s));
        // NVFP4 has both: a stored global scale, and one of each run.
        let other = i == 0 || set.iter().any(|s| s.contains("A16") || *s == "quant.scheme=NVFP4");
        assert!(other || inputs["dynamic"] == json!(!stored), "{set:?}: {inputs}");
    }
    // Rounding the trained weights gives what was exported: the global scales are theirs, shared by the layers that share them.
    expect(dir, &["quantize", "run4/master", "--out", "again", "--scheme", "NVFP4A16"], 0);
    let codes = |folder: &str| std::fs::read(dir.join(folder).join("model.safetensors")).unwrap();
    assert!(codes("again") == codes("run4/exported"));
    // Half a run and the rest: the same export, bit for bit.
    let set = ["--set", "quant.scheme=W4A4", "--set", "train.save_every=1"];
    let whole = object(dir, &[&["train", "micro.toml", "--out", "whole"], &set[..]].concat());
    std::fs::create_dir_all(dir.join("half/checkpoints")).unwrap();
    std::fs::copy(dir.join("whole/run.json"), dir.join("half/run.json")).unwrap();
    copy_folder(&dir.join("whole/checkpoints/step-00000004"), &dir.join("half/checkpoints/step-00000004"));
    let log: Vec<String> = std::fs::read_to_string(dir.join("whole/log.jsonl"))
        .unwrap()
        .lines()
        .take(4)
        .map(|l| format!("{l}\n"))
        .collect();
    std::fs::write(dir.join("half/log.jsonl"), log.concat()).unwrap();
    let half = object(dir, &[&["train", "micro.toml", "--out", "half", "--resume"], &set[..]].concat());
    let file = |run: &str| std::fs::read(dir.join(run).join("exported/model.safetensors")).unwrap();
    assert!(file("whole") == file("half"));
    let numbers = |seen: &Value| -> Vec<Value> {
        seen["rows"].as_array().unwrap().iter().map(|r| json!([r["name"], r["perplexity"]])).collect()
    };
    assert_eq!(numbers(&whole), numbers(&half));
    for (set, words) in [
        (&["quant.asymmetric_activations=true"][..], &["zero point", "float ones"][..]),
        (&["quant.scheme=FP8_DYNAMIC", "quant.granularity=channel", "quant.asymmetric=true"], &["no zero point"]),
        (&["quant.scheme=FP8", "quant.granularity=tensor", "quant.asymmetric_activations=true"], &["no zero point"]),
        (&["quant.static_activations=true"], &["static_activations", "W8A8 or W4A8", "got W4A16"]),
        (&["quant.scheme=MXFP4", "quant.static_activations=true"], &["static_activations", "got MXFP4"]),
        (&["qat.observer=min_max"], &["observer: expected no such key", "quant.static_activations", "got \"min_max\""]),
        (&["quant.scheme=W8A8", "qat.freeze_ranges_step=1"], &["freeze_ranges_step: expected no such key", "got 1"]),
        (&["quant.scheme=W4A4", "qat.percentile=99"], &["percentile: expected observer = \"percentile\""]),
        (
            &["quant.scheme=W4A4", "qat.observer=min_max", "qat.observer_rate=0.5"],
            &[
                "observer_rate: expected observer = \"moving_average\"",
                "observer_rate = 0.5 and observer = \"min_max\"",
            ],
        ),
        (
            &["quant.scheme=W4A4", "quant.static_activations=false"],
            &["static_activations: expected true or no such key", "W4A4", "got false"],
        ),
        (&["quant.scheme=W4A4", "qat.calibration_batches=0"], &["calibration_batches", "from 1", "got 0"]),
        (&["quant.scheme=W4A4", "quant.ignore=[\"k_proj\"]"], &["q_proj", "k_proj", "one form of it", "INT4", "float"]),
    ] {
        let err = checked(dir, set, 2);
        assert!(words.iter().all(|w| err.contains(w)), "{set:?}: {err}");
    }
}

/// A micro recipe on the start of its text, which is tokenized in no time.
fn short_recipe(dir: &Path, change: impl Fn(String) -> String) {
    let data = root("recipes/data/pydoc");
    let text = std::fs::read_to_string(data.join("train.txt")).unwrap();
    std::fs::write(dir.join("short.txt"), text.chars().take(30_000).collect::<String>()).unwrap();
    recipe(dir, "micro.toml", |t| change(t.replace(&data.join("train.txt").display().to_string(), "short.txt")));
}

fn copy_folder(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap().flatten() {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn a_recipe_has_the_usual_grid_of_its_scheme_and_no_key_is_ignored() {
    let dir = tempfile::tempdir().unwrap();
    short_recipe(dir.path(), |t| t.replace("group_size = 32\n", ""));
    let digest = |set: &[&str]| checked(dir.path(), set, 0);
    // As `dsq quantize` has them when nothing is said.
    for (scheme, granularity) in
        [("W8A8", "channel"), ("FP8A16", "channel"), ("FP8_DYNAMIC", "channel"), ("FP8", "tensor")]
    {
        let scheme = format!("quant.scheme={scheme}");
        assert_eq!(digest(&[&scheme]), digest(&[&scheme, &format!("quant.granularity={granularity}")]));
    }
    let w8a8 = digest(&["quant.scheme=W8A8"]);
    let groups = digest(&["quant.scheme=W8A8", "quant.group_size=32"]);
    assert_eq!(groups, digest(&["quant.scheme=W8A8", "quant.granularity=group", "quant.group_size=32"]));
    assert_ne!(groups, w8a8);
    // A recipe of groups becomes one of channels, and a scheme's own group may be said.
    let sized = "quant.group_size=32";
    assert_eq!(digest(&["quant.scheme=W8A8", sized, "quant.granularity=channel"]), w8a8);
    let channels = digest(&["quant.scheme=FP8_DYNAMIC"]);
    assert_eq!(digest(&["quant.scheme=FP8_DYNAMIC", sized, "quant.granularity=channel"]), channels);
    assert_eq!(digest(&["quant.scheme=MXFP4"]), digest(&["quant.scheme=MXFP4", sized]));
    // Keys of static activations at their defaults are no other recipe.
    let fixed = ["quant.scheme=W8A8", "quant.static_activations=true"];
    let said = [
        "qat.calibration_batches=8",
        "qat.observer=moving_average",
        "qat.observer_rate=0.05",
        "qat.freeze_ranges_step=1",
    ];
    assert_eq!(digest(&fixed), digest(&[&fixed[..], &said].concat()));
    assert_ne!(digest(&fixed), digest(&[&fixed[..], &["qat.observer=min_max"]].concat()));
    assert_ne!(digest(&fixed), w8a8);
    for (set, words) in [
        (&["quant.scheme=FP8_DYNAMIC", sized][..], &["group_size: expected none", "FP8_DYNAMIC", "got 32"][..]),
        (&["quant.scheme=FP8_BLOCK", sized], &["group_size: expected none", "FP8_BLOCK", "got 32"]),
        (
            &["quant.scheme=FP8_DYNAMIC", "quant.granularity=tensor"],
            &["PerChannel, which FP8_DYNAMIC fixes", "PerTensor"],
        ),
        (&["quant.scheme=MXFP4", "quant.group_size=64"], &["PerGroup(32), which MXFP4 fixes", "PerGroup(64)"]),
        (&["quant.scheme=FP8_BLOCK"], &["divides in_features", "got 128"]),
        (&["quant.observer=weighted-mse"], &["observer: expected minmax or mse", "--calib", "got \"weighted-mse\""]),
        (&["quant.observer=weighted_mse"], &["observer: expected minmax or mse", "got \"weighted_mse\""]),
    ] {
        let err = checked(dir.path(), set, 2);
        assert!(words.iter().all(|w| err.contains(w)), "{set:?}: {err}");
    }
}

#[test]
fn bench_and_profile_measure_batches_engines_and_operations() {
    let m = Models::new();
    let dir = m.path();
    let args =
        ["--repeat", "1", "--gen-tokens", "3", "--prompt-tokens", "5,9", "--batch", "1,3", "--activations", "int8"];
    let seen = object(dir, &[&["bench", "packed"], &args[..], &["--csv", "b.csv", "--plot", "b.svg"]].concat());
    let names: Vec<&str> = seen["rows"].as_array().unwrap().iter().filter_map(|r| r["name"].as_str()).collect();
    assert_eq!(names, ["batch 1, prompt 5", "batch 3, prompt 5", "batch 1, prompt 9", "batch 3, prompt 9"]);
    assert!(seen["rows"][0]["kernels"].to_string().contains("int8 activations"), "{seen}");
    let csv = std::fs::read_to_string(dir.join("b.csv")).unwrap();
    assert!(csv.lines().count() == 5 && csv.starts_with("batch,prompt_tokens,"), "{csv}");
    assert!(std::fs::read_to_string(dir.join("b.svg")).unwrap().starts_with("<svg"));

    let engine = ["--prompt-tokens", "8", "--gen-tokens", "4", "--batch", "2", "--engine-steps", "40"];
    let seen = object(dir, &[&["bench", "packed"], &engine[..]].concat());
    let row = &seen["rows"][0];
    assert!(row["name"] == "engine 2" && row["steps"] == 40 && row["requests"].as_u64() > Some(2), "{seen}");

    let seen = object(dir, &["profile", "packed", "--prompt-tokens", "8", "--gen-tokens", "4", "--out", "p.json"]);
    assert_eq!(seen["command"], "profile");
    let of = |name: &str| seen["rows"].as_array().unwrap().iter().find(|r| r["name"] == name).cloned();
    for name in ["prompt qkv", "prompt attend", "decode gate_up", "decode head"] {
        let row = of(name).unwrap_or_else(|| panic!("{name}: {seen}"));
        assert!(row["measured_ms"].as_f64() > Some(0.0) && row["predicted_ms"].as_f64() > Some(0.0), "{row}");
    }
    let file: Value = serde_json::from_slice(&std::fs::read(dir.join("p.json")).unwrap()).unwrap();
    assert!(file["format"] == 1 && file["operations"].as_array().unwrap().iter().any(|o| o["layer"] == 1), "{file}");
    let (_, error) = expect(dir, &["profile", "packed", "--gen-tokens", "0"], 2);
    assert!(error.contains("--gen-tokens: expected at least 1, got 0"), "{error}");
}
