//! `dsq regress --bisect` as a person runs it: faults that are planted in one layer of a small model, in a tokenizer, a config or a binary.
//! Each must be named with its layer and its kind. Not the patterns themselves (see the tests of `regress/bisect`).

use crate::command::{dsq, fails, text, works};
use dsq_checkpoint::{Dtype, NamedTensor, SafetensorsFile, TensorData, write_safetensors};
use dsq_quant::{FloatType, pack_i32};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

const LAYERS: usize = 5;
const HIDDEN: usize = 64;
const GROUP: usize = 32;

/// Whose faults are planted.
const MODULE: &str = "model.layers.2.self_attn.q_proj";
const TIES: &str = "model.layers.3.mlp.up_proj";

/// Folders: `source` (float), `w4`, `w4_asymmetric` (packed), `ids.json`, `text.txt`.
struct Models {
    dir: tempfile::TempDir,
}

impl Models {
    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A copy of the folder `from`, changed.
    fn copy(&self, from: &str, to: &str, change: impl FnOnce(&Path)) -> PathBuf {
        let (from, to) = (self.at(from), self.at(to));
        std::fs::create_dir(&to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
        change(&to);
        to
    }

    /// What `--bisect` says of these models on the ids.
    fn ask(&self, models: &[&Path], more: &[&str]) -> Value {
        let ids = self.at("ids.json");
        let mut args = vec!["regress", "--bisect"];
        args.extend(models.iter().map(|m| text(m)));
        args.extend(["--tokens-file", text(&ids), "--json"]);
        serde_json::from_str(&works(&[&args[..], more].concat())).unwrap()
    }
}

/// The lines of an answer.
fn lines(answer: &Value) -> Vec<String> {
    answer["answer"].as_array().unwrap().iter().map(|l| l.as_str().unwrap().to_owned()).collect()
}

/// The share of the finding at `i`.
fn share(answer: &Value, i: usize) -> f64 {
    answer["findings"][i]["share"].as_f64().unwrap_or_else(|| panic!("no share: {answer}"))
}

/// Values of a fixed stream in [-1, 1), multiples of 2^-16.
fn values(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 47) as f32 - 65_536.0) / 65_536.0
    };
    (0..len).map(|_| next()).collect()
}

/// Writes a float model whose weights come from `seed`.
fn write_source(out: &Path, seed: u64) {
    std::fs::create_dir(out).unwrap();
    let (h, f, vocab) = (HIDDEN, 96, 1024);
    let mut config: Value = serde_json::from_slice(
        &std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama_tiny/config.json")).unwrap(),
    )
    .unwrap();
    for (key, value) in [("num_hidden_layers", LAYERS), ("num_key_value_heads", 4), ("vocab_size", vocab)] {
        config[key] = json!(value);
    }
    let mut tensors = Vec::new();
    let mut add = |name: String, shape: Vec<usize>, data: Vec<f32>| {
        tensors.push(NamedTensor { name, data: TensorData::Float { shape, data, dtype: FloatType::F32 } });
    };
    let norm = |seed: u64| values(seed, h).iter().map(|x| 1.0 + x / 4.0).collect::<Vec<f32>>();
    add("model.embed_tokens.weight".into(), vec![vocab, h], values(seed, vocab * h));
    add("model.norm.weight".into(), vec![h], norm(seed + 1));
    for i in 0..LAYERS {
        let at = |name: &str| format!("model.layers.{i}.{name}");
        let seed = seed + 100 * (i as u64 + 1);
        add(at("input_layernorm.weight"), vec![h], norm(seed));
        add(at("post_attention_layernorm.weight"), vec![h], norm(seed + 1));
        let linears = [
            ("self_attn.q_proj", h, h),
            ("self_attn.k_proj", h, h),
            ("self_attn.v_proj", h, h),
            ("self_attn.o_proj", h, h),
            ("mlp.gate_proj", f, h),
            ("mlp.up_proj", f, h),
            ("mlp.down_proj", h, f),
        ];
        for (j, (name, n, k)) in linears.into_iter().enumerate() {
            let mut w: Vec<f32> = values(seed + 10 + j as u64, n * k).iter().map(|x| x / 4.0).collect();
            if at(name) == TIES {
                // Of each group the largest value is 7.5 steps of 2^-5, and every fifth lies half way between two codes.
                for (i, x) in w.iter_mut().enumerate() {
                    let step = (i * 7 % 13) as f32 - 6.0;
                    *x = match i % GROUP {
                        0 => 7.5 / 32.0,
                        j if j % 5 == 0 => (step + 0.5) / 32.0,
                        _ => step / 32.0,
                    };
                }
            }
            add(format!("{}.weight", at(name)), vec![n, k], w);
        }
    }
    write_safetensors(&out.join("model.safetensors"), &tensors).unwrap();
    std::fs::write(out.join("config.json"), config.to_string()).unwrap();
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/data/pydoc/tokenizer.json");
    std::fs::copy(tokenizer, out.join("tokenizer.json")).unwrap();
}

fn models() -> &'static Models {
    static MODELS: OnceLock<Models> = OnceLock::new();
    MODELS.get_or_init(|| {
        let m = Models { dir: tempfile::tempdir().unwrap() };
        write_source(&m.at("source"), 1);
        for (name, more) in [("w4", &[][..]), ("w4_asymmetric", &["--asymmetric"])] {
            quantize(&m.at("source"), &m.at(name), more);
        }
        let list = |from: u64| (0..60).map(|i| (i * i * 31 + from * 7) % 1024).collect::<Vec<u64>>();
        std::fs::write(m.at("ids.json"), json!([list(1), list(2)]).to_string()).unwrap();
        std::fs::write(m.at("text.txt"), "The file is opened, and a list of all names in it is given. ".repeat(5))
            .unwrap();
        m
    })
}

fn quantize(source: &Path, out: &Path, more: &[&str]) {
    let args = ["quantize", text(source), "--out", text(out), "--group-size", "32", "--scale-dtype", "f32"];
    works(&[&args[..], more].concat());
}

/// Changes tensors of `model.safetensors`.
fn edit(folder: &Path, change: impl FnOnce(&mut BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>)) {
    let path = folder.join("model.safetensors");
    let file = SafetensorsFile::open(&path).unwrap();
    let names: Vec<String> = file.names().map(str::to_owned).collect();
    let mut all = BTreeMap::new();
    for name in names {
        let (dtype, bytes) = file.read_stored(&name).unwrap();
        let shape = file.info(&name).unwrap().shape;
        all.insert(name, (dtype, shape, bytes));
    }
    change(&mut all);
    let raw = |(name, (dtype, shape, bytes))| NamedTensor { name, data: TensorData::Raw { shape, bytes, dtype } };
    write_safetensors(&path, &all.into_iter().map(raw).collect::<Vec<_>>()).unwrap();
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
}

/// Multiplies scale `at` of a module.
fn scale(folder: &Path, module: &str, at: usize, by: f32) {
    edit(folder, |t| {
        let bytes = &mut t.get_mut(&format!("{module}.weight_scale")).unwrap().2;
        let x = floats(bytes)[at] * by;
        bytes[4 * at..4 * at + 4].copy_from_slice(&x.to_le_bytes());
    });
}

/// Moves the rows of a module: row `r` becomes what row `of(r)` was.
fn move_rows(folder: &Path, module: &str, of: impl Fn(usize) -> usize) {
    edit(folder, |t| {
        for part in ["weight_packed", "weight_scale"] {
            let (_, shape, bytes) = t.get_mut(&format!("{module}.{part}")).unwrap();
            let len = bytes.len() / shape[0];
            let old = bytes.clone();
            for r in 0..shape[0] {
                bytes[r * len..(r + 1) * len].copy_from_slice(&old[of(r) * len..(of(r) + 1) * len]);
            }
        }
    });
}

#[test]
fn faults_in_weights_are_named_with_layer_kind_and_share() {
    let m = models();
    let good = m.at("w4");
    let same = m.ask(&[&good, &good], &[]);
    assert!(lines(&same).is_empty(), "{same}");

    // One scale off by 1%.
    let bad = m.copy("w4", "scale", |f| scale(f, MODULE, 5, 1.01));
    let said = m.ask(&[&good, &bad], &[]);
    let expected = format!("weights: {MODULE} (scales: 1 of 128, number 5, times 1.0100), 100% of the change");
    assert_eq!(lines(&said), [expected], "{said}");
    assert!(said["kl"].as_f64().unwrap() > 0.0 && said["runs"].as_u64().unwrap() <= 12, "{said}");
    let row = said["rows"].as_array().unwrap().iter().find(|r| r["name"] == MODULE).unwrap();
    assert!((row["damage"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{row}");
    assert!((row["repair"].as_f64().unwrap() - 1.0).abs() < 1e-9, "{row}");

    // As a person reads it: the answer first.
    let ids = m.at("ids.json");
    let plain = works(&["regress", "--bisect", text(&good), text(&bad), "--tokens-file", text(&ids)]);
    assert!(plain.starts_with(&format!("weights: {MODULE} (scales")), "{plain}");

    // Two layers: both, the one that does more first.
    let bad = m.copy("w4", "two", |f| {
        for at in 0..128 {
            scale(f, "model.layers.4.mlp.down_proj", at, 1.1);
            scale(f, MODULE, at, 1.5);
        }
    });
    let said = m.ask(&[&good, &bad], &[]);
    let names: Vec<String> = lines(&said).iter().map(|l| l.split(' ').nth(1).unwrap().to_owned()).collect();
    assert_eq!(names.len(), 2, "{said}");
    assert!(names.contains(&MODULE.to_owned()) && share(&said, 0) >= share(&said, 1), "{said}");
    assert!(said["notes"].to_string().contains("first with at least 1% of the change: model.layers.2"), "{said}");

    // Half-away rounding in one layer, with the float weights and without.
    let bad = m.copy("w4", "half_away", |f| {
        let source = SafetensorsFile::open(&m.at("source/model.safetensors")).unwrap();
        let w = source.read_f32(&format!("{TIES}.weight")).unwrap();
        edit(f, |t| {
            let scales = floats(&t[&format!("{TIES}.weight_scale")].2);
            assert!(scales.iter().all(|s| *s == 1.0 / 32.0));
            let codes: Vec<i8> = w.iter().map(|x| (x * 32.0).round().clamp(-8.0, 7.0) as i8).collect();
            let words = codes.chunks(HIDDEN).flat_map(|row| pack_i32(row, 4)).flat_map(|w| w.to_le_bytes());
            t.get_mut(&format!("{TIES}.weight_packed")).unwrap().2 = words.collect();
        });
    });
    let source = m.at("source");
    let said = m.ask(&[&good, &bad], &["--reference", text(&source)]);
    let line = &lines(&said)[0];
    assert!(line.starts_with(&format!("weights: {TIES} (codes: ")), "{line}");
    assert!(line.contains("ties rounded half away from zero") && line.ends_with("100% of the change"), "{line}");
    let said = m.ask(&[&good, &bad], &[]);
    assert!(lines(&said)[0].contains("--reference tells"), "{said}");

    // Zero points of one layer dropped.
    let bad = m.copy("w4_asymmetric", "zeros", |f| {
        edit(f, |t| t.get_mut(&format!("{MODULE}.weight_zero_point")).unwrap().2.fill(0x88));
    });
    let said = m.ask(&[&m.at("w4_asymmetric"), &bad], &[]);
    let expected = format!("weights: {MODULE} (zero points: zero points dropped, all are 0), 100% of the change");
    assert_eq!(lines(&said), [expected], "{said}");
}

#[test]
fn moved_rows_and_exchanged_modules_are_named() {
    let m = models();
    let good = m.at("w4");
    // Pairs in the place of halves, in q: the order of GGUF files. Heads have 16 rows.
    let bad = m.copy("w4", "pairs", |f| move_rows(f, MODULE, |r| r / 16 * 16 + r % 2 * 8 + r % 16 / 2));
    let said = m.ask(&[&good, &bad], &[]);
    let line = &lines(&said)[0];
    assert!(line.starts_with(&format!("weights: {MODULE} (rows: rows permuted: the halves of each head")), "{line}");

    let bad = m.copy("w4", "two_rows", |f| move_rows(f, MODULE, |r| [1, 0].get(r).copied().unwrap_or(r)));
    let said = m.ask(&[&good, &bad], &[]);
    assert!(lines(&said)[0].contains("rows permuted: 2 of 64, 0 from 1, 1 from 0"), "{said}");

    // q and k exchanged: neither explains the change alone.
    let bad = m.copy("w4", "exchanged", |f| {
        edit(f, |t| {
            for part in ["weight_packed", "weight_scale"] {
                let [q, k] = ["q_proj", "k_proj"].map(|p| format!("model.layers.2.self_attn.{p}.{part}"));
                let (a, b) = (t[&q].clone(), t[&k].clone());
                t.insert(q, b);
                t.insert(k, a);
            }
        });
    });
    let said = m.ask(&[&good, &bad], &[]);
    let seen = lines(&said).join("\n");
    for (module, other) in [("q_proj", "k_proj"), ("k_proj", "q_proj")] {
        let at = |p: &str| format!("model.layers.2.self_attn.{p}");
        let expected = format!("{} (rows: all rows are those of {}: exchanged)", at(module), at(other));
        assert!(seen.contains(&expected), "{expected}\n{seen}");
    }
}

#[test]
fn tokenizer_config_base_and_form_are_told_apart() {
    let m = models();
    let (good, words) = (m.at("w4"), m.at("text.txt"));
    let ask = |a: &Path, b: &Path| -> Value {
        let args = ["regress", "--bisect", text(a), text(b), "--text", text(&words), "--json"];
        serde_json::from_str(&works(&args)).unwrap()
    };
    // A BOS that is missing.
    let with_bos = m.copy("w4", "bos", |f| {
        let file = f.join("tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let token = "<|endoftext|>";
        json["post_processor"] = json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token: {"id": token, "ids": [0], "tokens": [token]}},
        });
        std::fs::write(&file, json.to_string()).unwrap();
    });
    let said = ask(&with_bos, &good);
    let expected = "tokenizer: special tokens before every text (0 \"<|endoftext|>\" in GOOD, nothing in BAD)";
    assert_eq!(lines(&said), [expected], "{said}");

    // A merge that is missing: other ids.
    let bad = m.copy("w4", "merges", |f| {
        let file = f.join("tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        json["model"]["merges"].as_array_mut().unwrap().truncate(100);
        std::fs::write(&file, json.to_string()).unwrap();
    });
    let said = ask(&good, &bad);
    assert!(lines(&said)[0].starts_with("tokenizer: ids of text 0 ("), "{said}");

    // Another epsilon: the config's, to the whole of it.
    let bad = m.copy("w4", "epsilon", |f| {
        let file = f.join("config.json");
        let text = std::fs::read_to_string(&file).unwrap();
        let mut json: Value = serde_json::from_str(&text).unwrap();
        json["rms_norm_eps"] = json!(0.05);
        std::fs::write(&file, json.to_string()).unwrap();
    });
    let said = ask(&good, &bad);
    assert_eq!(lines(&said), ["config: rms_norm_eps (1e-5 in GOOD, 0.05 in BAD), 100% of the change"], "{said}");

    // Another base model; the module of ties is the same in both.
    write_source(&m.at("source2"), 50_001);
    let other = m.at("other");
    quantize(&m.at("source2"), &other, &[]);
    let said = ask(&good, &other);
    assert!(lines(&said)[0].starts_with("weights: another base model: 34 of 35 modules differ"), "{said}");

    // The same values in another form are no difference; another form of the same base is no other base.
    let values = m.at("values");
    works(&["export", text(&good), "--out", text(&values), "--format", "safetensors", "--dtype", "f32"]);
    assert!(lines(&ask(&good, &values)).is_empty());
    let said = ask(&good, &m.at("w4_asymmetric"));
    let seen = lines(&said).join("\n");
    assert!(seen.contains("and zero point for each 32 inputs in BAD") && !seen.contains("another base"), "{seen}");
}

#[test]
fn one_model_and_its_float_original_names_the_layer_that_costs_most() {
    let m = models();
    let source = m.at("source");
    let bad = m.copy("w4", "costly", |f| (0..128).for_each(|at| scale(f, MODULE, at, 3.0)));
    let said = m.ask(&[&bad], &["--reference", text(&source)]);
    let line = &lines(&said)[0];
    assert!(line.starts_with("weights: model.layers.2 (most of it model.layers.2.self_attn.q_proj"), "{said}");
    let layers = said["rows"].as_array().unwrap().iter().filter(|r| r["name"].as_str().unwrap().len() == 14).count();
    assert!(layers >= 3, "each layer that does something has a row: {said}");

    // Kernels against the scalar reference.
    let said: Value = serde_json::from_str(&works(&["regress", "--bisect", text(&bad), "--json"])).unwrap();
    assert!(lines(&said).is_empty() && said["rows"].as_array().unwrap().len() == 7 * LAYERS, "{said}");
    for row in said["rows"].as_array().unwrap() {
        assert!(row["worst"].as_f64().unwrap() <= 1.0 && row["other_bits"] == 0, "{row}");
    }
    let same = "plain Rust and this machine's kernels give the same bits";
    assert!(said["notes"].to_string().contains(same), "{said}");
}

/// A program that runs dsq and then `after` (POSIX shell; `$model` is the model, `$logits` the file of logits).
fn wrapper(m: &Models, name: &str, before: &str, after: &str) -> PathBuf {
    let path = m.at(name);
    let script = format!(
        "#!/bin/sh\nmodel=$2\nlogits=\nlast=\nfor a in \"$@\"; do\n  [ \"$last\" = --logits-out ] && logits=$a\n  last=$a\ndone\n\
         {before}\n'{}' \"$@\" || exit $?\n{after}\nexit 0\n",
        env!("CARGO_BIN_EXE_dsq")
    );
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn a_bad_binary_is_told_by_tokenizer_weights_or_the_kernel_of_a_layer() {
    let m = models();
    let (good, source, words) = (m.at("w4"), m.at("source"), m.at("text.txt"));
    let ask = |model: &Path, binary: &Path, more: &[&str]| -> Value {
        let args = ["regress", "--bisect", text(model), "--binary-bad", text(binary), "--text", text(&words), "--json"];
        serde_json::from_str(&works(&[&args[..], more].concat())).unwrap()
    };
    let same = wrapper(m, "same.sh", "", "");
    let said = ask(&good, &same, &[]);
    assert!(lines(&said).is_empty() && said["notes"].to_string().contains("the same bits"), "{said}");

    // The last logit is off where a module of layer 3 is in codes.
    let module = "model.layers.3.mlp.down_proj";
    let off = |value: &str| {
        format!(
            "if [ -n \"$logits\" ] && grep -q {module}.weight_packed \"$model/model.safetensors\"; then\n\
             size=$(wc -c < \"$logits\")\nprintf '{value}' | dd of=\"$logits\" bs=1 seek=$((size - 4)) conv=notrunc 2>/dev/null\nfi"
        )
    };
    let bad = wrapper(m, "kernel.sh", "", &off("\\000\\000\\310\\102"));
    let said = ask(&good, &bad, &[]);
    let line = &lines(&said)[0];
    assert!(line.starts_with(&format!("kernel: {module} (int4 weights")), "{said}");
    assert!(said["notes"].to_string().contains("the first 3 layers agree, the first 4 do not"), "{said}");

    // A file that cannot be cut into layers: told, and no more.
    let gguf = m.at("w4.gguf");
    works(&[
        "export",
        text(&good),
        "--out",
        text(&gguf),
        "--format",
        "gguf",
        "--gguf-type",
        "Q8_0",
        "--requantize",
        "--overwrite",
    ]);
    let anywhere = "if [ -n \"$logits\" ]; then\nsize=$(wc -c < \"$logits\")\n\
                    printf '\\000\\000\\310\\102' | dd of=\"$logits\" bs=1 seek=$((size - 4)) conv=notrunc 2>/dev/null\nfi";
    let said = ask(&gguf, &wrapper(m, "anywhere.sh", "", anywhere), &[]);
    assert!(lines(&said).len() == 1 && lines(&said)[0].starts_with("kernel: which layer is not known"), "{said}");

    // A BOS more: tokenizing and ids are the same, what the program reads by itself is not.
    let reads = format!("case \"$*\" in *--text*)\n{anywhere};;\nesac");
    let said = ask(&good, &wrapper(m, "bos.sh", "", &reads), &[]);
    assert!(lines(&said).len() == 1 && lines(&said)[0].contains("another BOS before it"), "{said}");
    assert!(lines(&said)[0].starts_with("tokenizer: "), "{said}");

    // Other bits within the bound are rounding.
    let said = ask(&good, &bad, &["--bound", "1e9"]);
    assert!(lines(&said).is_empty() && said["notes"].to_string().contains("rounding, within the bound"), "{said}");

    // A tokenizer that drops the first token.
    let script = format!(
        "if [ \"$1\" = tokenize ]; then '{}' \"$@\" | sed 's/\\[\\[[0-9]*,/[[/'; exit 0; fi",
        env!("CARGO_BIN_EXE_dsq")
    );
    let said = ask(&good, &wrapper(m, "tokenizer.sh", &script, ""), &[]);
    assert!(lines(&said).len() == 1 && lines(&said)[0].starts_with("tokenizer: ids of text 0"), "{said}");

    // A quantizer that damages a scale.
    let damaged = m.copy("w4", "damaged", |f| scale(f, MODULE, 5, 1.01));
    let script =
        format!("if [ \"$1\" = quantize ]; then cp '{}' \"$4/\"; fi", damaged.join("model.safetensors").display());
    let options = ["--", "--group-size", "32", "--scale-dtype", "f32"];
    let said = ask(&source, &wrapper(m, "quantize.sh", "", &script), &options);
    let expected = format!("weights: {MODULE} (scales: 1 of 128, number 5, times 1.0100), 100% of the change");
    assert_eq!(lines(&said), [expected], "{said}");
}

#[test]
fn questions_that_cannot_be_asked_are_refused() {
    let m = models();
    let (good, ids) = (m.at("w4"), m.at("ids.json"));
    let args = ["regress", "--bisect", text(&good), text(&good)];
    fails(&args, 2, &["--text", "expected a text that the models run on"]);
    fails(&[&args[..], &["--tokens-file", text(&ids), "--context", "9999"]].concat(), 2, &["--context", "at most 256"]);
    fails(&[&args[..], &["--tokens-file", text(&ids), "--bound=-1"]].concat(), 2, &["--bound", "got -1"]);
    let two = [&args[..], &["--tokens-file", text(&ids), "--binary-bad", "x"]].concat();
    fails(&two, 2, &["expected one, got two"]);
    let none = ["regress", "--bisect", text(&good), "--tokens-file", text(&ids), "--binary-bad", "/no/such/dsq"];
    fails(&none, 4, &["/no/such/dsq (BAD binary): cannot start"]);
    assert_eq!(dsq(&["regress", "quick", "--bisect", text(&good)]).status.code(), Some(2));
    assert_eq!(dsq(&["regress", "--text", text(&good)]).status.code(), Some(2));
    // Other shapes: said, and no layer exchanged.
    let other = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama_tiny");
    std::fs::write(m.at("small.json"), "[[1, 2, 3, 4]]").unwrap();
    let small = m.at("small.json");
    let seen = works(&["regress", "--bisect", text(&good), text(&other), "--tokens-file", text(&small), "--json"]);
    assert!(
        seen.contains("config: num_hidden_layers (5 in GOOD, 2 in BAD)") && seen.contains("shapes differ"),
        "{seen}"
    );
}
