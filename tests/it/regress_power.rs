//! Faults that are planted in checkpoints which a suite measures: each must turn it red, under the right name. What is not changed must not.

use crate::command::{text, works};
use dsq_quant::{FloatType, Granularity, QuantArgs, QuantizedMatrix, pack_i32};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A model that is no longer random after a few steps, with the tokenizer of the repository.
const RECIPE: &str = r#"
name = "micro"
seed = 3
[model]
architecture = "llama"
vocab_size = 1024
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
max_position_embeddings = 64
[data]
train = "DATA/train.txt"
heldout = "DATA/heldout.txt"
tokenizer = "DATA/tokenizer.json"
[train]
steps = 40
batch_size = 4
seq_len = 32
learning_rate = 1e-2
[qat]
steps = 1
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

/// A layer whose faults are planted.
const MODULE: &str = "model.layers.1.self_attn.v_proj";

/// A folder with a float model, two packed forms of it, a suite and its baseline.
struct Bench {
    dir: tempfile::TempDir,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let data = format!("{}/recipes/data/pydoc", env!("CARGO_MANIFEST_DIR"));
        std::fs::write(at("micro.toml"), RECIPE.replace("DATA", &data)).unwrap();
        works(&["train", text(&at("micro.toml")), "--out", text(&at("run")), "--json"]);
        let float = at("run/float");
        let scheme = ["--scheme", "W4A16", "--group-size", "32", "--scale-dtype", "f32"];
        for (name, more) in [("w4", &[][..]), ("w4_asymmetric", &["--asymmetric"])] {
            let out = at(name);
            works(&[&["quantize", text(&float), "--out", text(&out)], &scheme[..], more].concat());
        }
        let suite = format!(
            "[[model]]\nname = \"m\"\nsource = \"run/float\"\ntext = [\"{data}/heldout.txt\"]\ncontext = 64\nwindows = 64\n\
             [model.tolerance]\nmodel_sha256 = \"exact\"\ntokens_sha256 = \"exact\"\ntoken_mismatches = {{ at_most = 0 }}\n\
             codes_sha256 = \"exact\"\nscales_sha256 = \"exact\"\nzeros_sha256 = \"exact\"\nfloats_sha256 = \"exact\"\n\
             perplexity = {{ relative = 0.01 }}\nkl = {{ relative = 0.1 }}\n\
             [[model.variant]]\nname = \"w4\"\npath = \"w4\"\n[[model.variant]]\nname = \"w4_asymmetric\"\npath = \"w4_asymmetric\"\n"
        );
        std::fs::write(at("suite.toml"), suite).unwrap();
        let bench = Self { dir };
        bench.regress(&["--bless", "--reason", "test"], 0);
        bench
    }

    fn at(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn regress(&self, args: &[&str], code: i32) -> String {
        let suite = self.at("suite.toml");
        let out = Command::new(env!("CARGO_BIN_EXE_dsq"))
            .arg("regress")
            .arg(suite)
            .args(args)
            .arg("--json")
            .output()
            .unwrap();
        let (stdout, stderr) = (String::from_utf8(out.stdout).unwrap(), String::from_utf8(out.stderr).unwrap());
        assert_eq!(out.status.code(), Some(code), "{args:?}\n{stdout}\n{stderr}");
        if code == 3 { stderr } else { stdout }
    }

    /// What is red: the verdict by `ROW/METRIC`, and the notes.
    fn red(&self, code: i32) -> BTreeMap<String, (String, String)> {
        let report: Value = serde_json::from_str(&self.regress(&[], code)).unwrap();
        let fails = |r: &&Value| ["regressed", "missing", "base moved"].contains(&r["verdict"].as_str().unwrap());
        let text = |v: &Value| v.as_str().unwrap().to_owned();
        let of = |r: &Value| {
            (text(&r["name"]).split_once('/').unwrap().1.to_owned(), (text(&r["verdict"]), text(&r["note"])))
        };
        report["rows"].as_array().unwrap().iter().filter(fails).map(of).collect()
    }

    /// Replaces the bytes of tensors in a folder, runs, and puts the folder back.
    fn with(&self, folder: &str, plant: impl FnOnce(&Path)) -> BTreeMap<String, (String, String)> {
        let (folder, kept) = (self.at(folder), self.at("kept"));
        copy(&folder, &kept);
        plant(&folder);
        let red = self.red(1);
        std::fs::remove_dir_all(&folder).unwrap();
        std::fs::rename(&kept, &folder).unwrap();
        red
    }
}

fn copy(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

/// Changes the bytes of a tensor in `model.safetensors`.
fn edit(folder: &Path, tensor: &str, change: impl FnOnce(&mut [u8])) {
    let file = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let offset = |i: usize| header + json[tensor]["data_offsets"][i].as_u64().unwrap() as usize;
    change(&mut bytes[offset(0)..offset(1)]);
    std::fs::write(&file, bytes).unwrap();
}

fn read(folder: &Path, tensor: &str) -> Vec<u8> {
    let mut out = Vec::new();
    edit(folder, tensor, |b| out = b.to_vec());
    out
}

/// The red metrics of `row`; nothing of another row may be red.
fn metrics<'a>(red: &'a BTreeMap<String, (String, String)>, row: &str) -> Vec<&'a str> {
    let of = |name: &'a String| name.strip_prefix(row).and_then(|m| m.strip_prefix('/'));
    red.keys().map(|name| of(name).unwrap_or_else(|| panic!("{name} is red: {red:?}"))).collect()
}

#[test]
fn each_planted_fault_is_red_under_its_name() {
    let b = Bench::new();
    assert_eq!(b.red(0), BTreeMap::new(), "nothing was changed");

    // One scale off by 1%.
    let red = b.with("w4", |f| {
        edit(f, &format!("{MODULE}.weight_scale"), |s| {
            let x = f32::from_le_bytes(s[20..24].try_into().unwrap());
            s[20..24].copy_from_slice(&(x * 1.01).to_le_bytes());
        })
    });
    assert_eq!(metrics(&red, "w4"), ["scales_sha256"], "{red:?}");
    assert_eq!(red["w4/scales_sha256"], ("regressed".into(), format!("differs in {MODULE}")));

    // Ties rounded away from zero: a weight of halves of its scale has them everywhere.
    let float = b.at("run/float");
    let red = b.with("w4", |f| {
        let codes = half_away(&read(&float, &format!("{MODULE}.weight")), &read(f, &format!("{MODULE}.weight_scale")));
        edit(f, &format!("{MODULE}.weight_packed"), |p| p.copy_from_slice(&codes));
    });
    assert_eq!(metrics(&red, "w4")[0], "codes_sha256", "{red:?}");
    assert_eq!(red["w4/codes_sha256"].1, format!("differs in {MODULE}"));

    // Zero points of one layer dropped: each is stored as 8, which means 0.
    let red = b.with("w4_asymmetric", |f| edit(f, &format!("{MODULE}.weight_zero_point"), |z| z.fill(0x88)));
    // By how much the divergence grows depends on the bits of training.
    assert!(metrics(&red, "w4_asymmetric").contains(&"zeros_sha256"), "{red:?}");
    assert_eq!(red["w4_asymmetric/zeros_sha256"].1, format!("differs in {MODULE}"));

    // Rows of q swapped with those of k, in codes and scales.
    let red = b.with("w4", |f| {
        for what in ["weight_packed", "weight_scale"] {
            let [q, k] = ["q_proj", "k_proj"].map(|m| format!("model.layers.0.self_attn.{m}.{what}"));
            let (old_q, old_k) = (read(f, &q), read(f, &k));
            edit(f, &q, |b| b.copy_from_slice(&old_k));
            edit(f, &k, |b| b.copy_from_slice(&old_q));
        }
    });
    assert!(metrics(&red, "w4").starts_with(&["codes_sha256"]) && red.contains_key("w4/scales_sha256"), "{red:?}");
    assert_eq!(red["w4/codes_sha256"].1, "differs in model.layers.0.self_attn.k_proj, model.layers.0.self_attn.q_proj");

    // A tokenizer that puts a token before every text, as the float model's does not.
    let red = b.with("w4", |f| {
        let file = f.join("tokenizer.json");
        let mut json: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        let first = json["model"]["vocab"].as_object().unwrap().iter().next().unwrap();
        let (token, id) = (first.0.clone(), first.1.as_u64().unwrap());
        json["post_processor"] = serde_json::json!({
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {token.clone(): {"id": token, "ids": [id], "tokens": [token]}},
        });
        std::fs::write(&file, json.to_string()).unwrap();
    });
    assert_eq!(metrics(&red, "w4"), ["token_mismatches"], "{red:?}");

    // Another base model: said of the base, and the quantized models, which are what they were, are judged beside it.
    let red = b.with("run/float", |f| {
        edit(f, "model.layers.0.mlp.down_proj.weight", |w| w.iter_mut().for_each(|x| *x = 0));
    });
    assert_eq!(red["base/model_sha256"].0, "base moved", "{red:?}");
    assert_eq!(red["base/perplexity"].0, "base moved", "{red:?}");

    // A stale baseline: it was measured on another text. Known before anything runs.
    let suite = std::fs::read_to_string(b.at("suite.toml")).unwrap();
    std::fs::write(b.at("suite.toml"), suite.replace("windows = 64", "windows = 63")).unwrap();
    let err = b.regress(&[], 3);
    assert!(err.contains("recipe_sha256") && err.contains("baseline unusable"), "{err}");
    std::fs::write(b.at("suite.toml"), suite).unwrap();
    assert_eq!(b.red(0), BTreeMap::new(), "all was put back");
}

/// The packed words of codes that a plain `round()` would choose, for a weight whose values are moved to ties where they are near one.
fn half_away(weight: &[u8], scales: &[u8]) -> Vec<u8> {
    let floats = |b: &[u8]| -> Vec<f32> { b.chunks(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect() };
    let (w, scales) = (floats(weight), floats(scales));
    let k = 32;
    // Real weights have no exact ties in f32; those within 1/50 of one stand for them, as they do in bf16 weights.
    let code = |i: usize, x: f32| -> i8 {
        let q = (x / scales[i / 32]).clamp(-8.0, 7.0);
        let tie = (q.abs().fract() - 0.5).abs() < 0.02;
        let away = if tie { q.signum() * q.abs().ceil() } else { q.round_ties_even() };
        away.clamp(-8.0, 7.0) as i8
    };
    let codes: Vec<i8> = w.iter().enumerate().map(|(i, x)| code(i, *x)).collect();
    let args = QuantArgs::int4(Granularity::PerGroup(32), FloatType::F32);
    let own = QuantizedMatrix::quantize(&w, w.len() / k, k, args).unwrap();
    assert!(codes.iter().zip(&own.codes).any(|(a, b)| a != b), "no value near a tie");
    codes.chunks(k).flat_map(|row| pack_i32(row, 4)).flat_map(|w| w.to_le_bytes()).collect()
}
