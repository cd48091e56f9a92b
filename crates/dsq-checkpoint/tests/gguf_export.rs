//! Writing GGUF: what llama.cpp's quantizer makes of the same weights, which codes are carried over without loss, the tokenizer's
//! keys, and outputs that would damage something. The commands are tests/it/gguf.rs.

mod fixtures;

use dsq_checkpoint::{
    Checkpoint, CheckpointError, ExportTensor, GgufExport, GgufOptions, GgufType, LinearWeight, LlamaConfig,
    ModelConfig, Proof, Severity, export_folder,
};
use dsq_quant::{FloatType, GgufGrid, Granularity, Mapping, QuantArgs, QuantConfig, QuantScheme, QuantType};
use fixtures::{float_layers, list, llama, quantized_layers, values};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

fn options(ty: GgufType) -> GgufOptions {
    GgufOptions { ty, dtype: None, requantize: false, keep: Vec::new(), overwrite: false }
}

fn encode(grid: GgufGrid, x: &[f32]) -> Result<Vec<u8>, dsq_quant::QuantError> {
    grid.quantize(x)
}

fn write(source: &Path, out: &Path, options: GgufOptions) -> Result<Proof, CheckpointError> {
    let ckpt = Checkpoint::open(source)?;
    GgufExport::new(&ckpt, out, options)?.write(&encode, &mut || ())
}

/// Largest difference and number of changed tensors, as told before anything is written.
fn loss(source: &Path, out: &Path, options: GgufOptions) -> (usize, f64) {
    let ckpt = Checkpoint::open(source).unwrap();
    let options = GgufOptions { overwrite: true, ..options };
    let loss = GgufExport::new(&ckpt, out, options).unwrap().loss(&encode, &mut || ()).unwrap().unwrap();
    (loss.tensors, loss.max_abs_error)
}

fn folder(dir: &Path, config: &LlamaConfig, layers: Vec<ExportTensor>, q: Option<&QuantConfig>) -> PathBuf {
    let out = dir.join("model");
    export_folder(&out, &ModelConfig::Llama(config.clone()), layers, q, vec![], true).unwrap();
    out
}

/// Values of every tensor that both have by one name are the same bits but for the sign of a zero.
fn same_values(a: &Path, b: &Path) {
    let (a, b) = (Checkpoint::open(a).unwrap(), Checkpoint::open(b).unwrap());
    assert_eq!(a.config(), b.config());
    let mut compared = 0;
    for spec in a.config().linears() {
        let of = |c: &Checkpoint| c.linear(&spec.module).unwrap().into_f32();
        assert!(of(&a) == of(&b), "{}", spec.module);
        compared += 1;
    }
    for name in ["model.embed_tokens.weight", "model.norm.weight", "model.layers.1.input_layernorm.weight"] {
        assert_eq!(a.read_f32(name).unwrap(), b.read_f32(name).unwrap(), "{name}");
    }
    assert!(compared >= 14);
}

/// The model of tests/golden/gguf/make_llama_cpp.py.
fn golden_model(dir: &Path) -> PathBuf {
    let config = LlamaConfig {
        hidden_size: 256,
        intermediate_size: 288,
        num_hidden_layers: 8,
        head_dim: 64,
        vocab_size: 96,
        max_position_embeddings: 64,
        bos_token_id: None,
        eos_token_ids: vec![],
        ..llama(false)
    };
    let mut s = 1u32;
    let mut uniform = || {
        s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f64::from(s >> 8) / f64::from(1 << 24) - 0.5
    };
    let mut layers = Vec::new();
    let mut tensor = |name: String, shape: Vec<usize>| {
        let start = if shape.len() == 1 { 1.0 } else { 0.0 };
        let data = (0..shape.iter().product()).map(|_| (start + uniform() * 0.125) as f32).collect();
        layers.push(ExportTensor::Float { name: format!("{name}.weight"), shape, data, dtype: FloatType::F32 });
    };
    tensor("model.embed_tokens".into(), vec![96, 256]);
    for i in 0..8 {
        let mut part = |name: &str, shape: &[usize]| tensor(format!("model.layers.{i}.{name}"), shape.to_vec());
        part("input_layernorm", &[256]);
        part("self_attn.q_proj", &[256, 256]);
        part("self_attn.k_proj", &[128, 256]);
        part("self_attn.v_proj", &[128, 256]);
        part("self_attn.o_proj", &[256, 256]);
        part("post_attention_layernorm", &[256]);
        part("mlp.gate_proj", &[288, 256]);
        part("mlp.up_proj", &[288, 256]);
        part("mlp.down_proj", &[256, 288]);
    }
    tensor("model.norm".into(), vec![256]);
    tensor("lm_head".into(), vec![96, 256]);
    folder(dir, &config, layers, None)
}

#[test]
fn every_tensor_is_what_llama_cpp_makes_of_the_same_weights() {
    let dir = tempfile::tempdir().unwrap();
    let model = golden_model(dir.path());
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/gguf/llama_cpp.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    for ty in GgufType::ALL {
        let out = dir.path().join(format!("{}.gguf", ty.name()));
        let proof = write(&model, &out, options(ty)).unwrap();
        let want = golden[ty.name()].as_object().unwrap();
        assert_eq!(proof.tensors.len(), want.len());
        let ckpt = Checkpoint::open(&out).unwrap();
        for t in &proof.tensors {
            let (file, hash) = t.stored.iter().next().unwrap();
            let found = format!("{} {}", ckpt.info(&t.name).unwrap().dtype, &hash[..16]);
            assert_eq!(want[file], found.as_str(), "{} {file}", ty.name());
        }
        // The sum of all classes is the file.
        assert_eq!(proof.bytes.values().sum::<u64>(), std::fs::metadata(&out).unwrap().len());
        let bits = 8.0 * (proof.bytes.values().sum::<u64>() - proof.bytes["header"]) as f64;
        let weights: usize = ckpt.names().iter().map(|n| ckpt.info(n).unwrap().shape.iter().product::<usize>()).sum();
        assert!((proof.model_bits_per_weight - bits / weights as f64).abs() < 1e-9);
    }
}

#[test]
fn codes_that_the_blocks_hold_are_carried_over_without_a_second_rounding() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.gguf");
    let int =
        |qtype, mapping, granularity| QuantArgs { qtype, mapping, ..QuantArgs::int4(granularity, FloatType::F16) };
    use Mapping::{Asymmetric, Symmetric};
    let group = Granularity::PerGroup(32);
    for (args, ty, grid) in [
        (int(QuantType::Int4, Symmetric, group), GgufType::Q4_0, "Q4_0"),
        (int(QuantType::Int4, Symmetric, Granularity::PerChannel), GgufType::Q4_0, "Q4_0"),
        (int(QuantType::Int3, Symmetric, group), GgufType::Q4_0, "Q4_0"),
        (int(QuantType::Int4, Symmetric, group), GgufType::Q4_1, "Q4_1"),
        (int(QuantType::Int4, Symmetric, group), GgufType::Q8_0, "Q8_0"),
        (int(QuantType::Int4, Asymmetric, group), GgufType::Q8_0, "Q8_0"),
        (int(QuantType::Int8, Symmetric, group), GgufType::Q8_0, "Q8_0"),
    ] {
        for tied in [true, false] {
            let scheme = fixtures::scheme(args);
            let model = folder(
                dir.path(),
                &llama(tied),
                quantized_layers(&llama(tied), FloatType::Bf16, &scheme),
                Some(&scheme),
            );
            assert_eq!(loss(&model, &out, options(ty)), (0, 0.0), "{args:?} {ty:?}");
            let proof = write(&model, &out, GgufOptions { overwrite: true, ..options(ty) }).unwrap();
            same_values(&model, &out);
            let of = |what: &str| proof.tensors.iter().filter(|t| t.became == what).count();
            assert_eq!(of("transcoded"), 14);
            assert_eq!(of("requantized"), 0);
            let (a, b) = (Checkpoint::open(&model).unwrap(), Checkpoint::open(&out).unwrap());
            // Floats stay as they are stored; each source tensor is accounted for.
            assert_eq!(b.info("model.embed_tokens.weight").unwrap().dtype, "BF16");
            assert_eq!(b.info("model.layers.0.self_attn.q_proj.weight").unwrap().dtype, grid);
            let parts = [".weight_packed", ".weight_scale", ".weight_shape", ".weight_zero_point"];
            for name in a.names() {
                let module = parts.iter().find_map(|p| name.strip_suffix(p)).map(|m| format!("{m}.weight"));
                assert!(proof.tensors.iter().any(|t| t.name == *module.as_ref().unwrap_or(&name)), "{name}");
            }
        }
    }
}

#[test]
fn asymmetric_codes_fit_q4_1_where_f16_holds_the_minimum_and_the_loss_is_told_where_it_does_not() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out.gguf");
    let args = QuantArgs { mapping: Mapping::Asymmetric, ..QuantArgs::int4(Granularity::PerGroup(32), FloatType::F16) };
    let scheme = fixtures::scheme(args);
    let mut layers = quantized_layers(&llama(true), FloatType::F32, &scheme);
    let model = folder(dir.path(), &llama(true), layers.clone(), Some(&scheme));
    let (tensors, max) = loss(&model, &out, options(GgufType::Q4_1));
    // -zero * scale has up to 15 significant bits, f16 has 11: off by 2^-12 of at most 15 steps of at most 0.05.
    assert!(tensors == 14 && max > 0.0 && max < 2e-4, "{tensors} {max}");
    let e = write(&model, &out, options(GgufType::Q4_1)).unwrap_err();
    assert!(e.exit_code() == 6 && e.to_string().contains("Q4_1 does not hold these values"), "{e}");
    assert_eq!(list(dir.path()), ["model"]);
    let proof = write(&model, &out, GgufOptions { requantize: true, ..options(GgufType::Q4_1) }).unwrap();
    let told = proof.tensors.iter().filter(|t| t.became == "requantized").filter_map(|t| t.source.as_ref());
    let largest = told.fold(0.0f64, |m, s| m.max(s.max_abs_error));
    // Every code is the one that it was: only minima were rounded. (With --requantize the embedding is quantized too.)
    assert!(largest >= max && largest < 2e-4, "{largest} {max}");
    let embedding = Checkpoint::open(&out).unwrap().info("model.embed_tokens.weight").unwrap();
    assert_eq!(embedding.dtype, "Q8_0");

    for layer in &mut layers {
        if let ExportTensor::Linear { matrix, .. } = layer {
            matrix.scales.iter_mut().for_each(|s| *s = 2f32.powi(s.log2() as i32));
        }
    }
    let model = folder(dir.path(), &llama(true), layers, Some(&scheme));
    assert_eq!(loss(&model, &out, options(GgufType::Q4_1)), (0, 0.0));
    write(&model, &out, GgufOptions { overwrite: true, ..options(GgufType::Q4_1) }).unwrap();
    same_values(&model, &out);
}

#[test]
fn blocks_of_one_file_become_those_of_another_and_codes_of_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let model = folder(dir.path(), &llama(false), float_layers(&llama(false), FloatType::F32), None);
    for ty in [GgufType::Q4_0, GgufType::Q8_0, GgufType::Q4_1] {
        let first = at(&format!("{}.gguf", ty.name()));
        write(&model, &first, options(ty)).unwrap();
        // The same kind: the same file but for nothing.
        let again = at("again.gguf");
        let proof = write(&first, &again, GgufOptions { overwrite: true, ..options(ty) }).unwrap();
        assert!(std::fs::read(&first).unwrap() == std::fs::read(&again).unwrap(), "{ty:?}");
        assert!(proof.tensors.iter().all(|t| t.became == "copied"));
    }
    for (from, to, exact) in [
        (GgufType::Q4_0, GgufType::Q4_1, true),
        (GgufType::Q4_0, GgufType::Q8_0, true),
        (GgufType::Q8_0, GgufType::F16, false),
        (GgufType::Q4_1, GgufType::Q4_0, false),
        (GgufType::Q8_0, GgufType::Q4KM, false),
    ] {
        let first = at(&format!("{}.gguf", from.name()));
        let (tensors, max) = loss(&first, &at("x.gguf"), options(to));
        assert_eq!((tensors == 0, max == 0.0), (exact, exact), "{from:?} {to:?}");
        if exact {
            write(&first, &at("again.gguf"), GgufOptions { overwrite: true, ..options(to) }).unwrap();
            same_values(&first, &at("again.gguf"));
        }
    }
    // Q4_0 is INT4 with zero points (its steps have either sign), Q8_0 is INT8; Q4_1 has minima that no zero point is.
    for (ty, kind, exact) in [
        (GgufType::Q4_0, (QuantType::Int4, Mapping::Asymmetric), true),
        (GgufType::Q8_0, (QuantType::Int8, Mapping::Symmetric), true),
        (GgufType::Q4_1, (QuantType::Int4, Mapping::Asymmetric), false),
    ] {
        let file = Checkpoint::open(&at(&format!("{}.gguf", ty.name()))).unwrap();
        let module = "model.layers.1.self_attn.k_proj";
        let matrix = file.block_codes(module).unwrap().unwrap();
        assert_eq!((matrix.args.qtype, matrix.args.mapping), kind, "{ty:?}");
        assert_eq!((matrix.args.granularity, matrix.args.scale_dtype), (Granularity::PerGroup(32), FloatType::F16));
        let values = file.read_f32(&format!("{module}.weight")).unwrap();
        assert_eq!(matrix.dequantize() == values, exact, "{ty:?}");
    }
}

/// A tokenizer of the bytes a to z, two merges, a special token and an added one.
fn tokenizer() -> Value {
    let mut vocab: serde_json::Map<String, Value> =
        ('a'..='z').enumerate().map(|(i, c)| (c.to_string(), (i + 1).into())).collect();
    vocab.insert("<s>".into(), 0.into());
    vocab.insert("ab".into(), 27.into());
    vocab.insert("abc".into(), 28.into());
    json!({
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
            {"id": 29, "content": "<tool>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false},
        ],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "Sequence", "processors": [
            {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
            {"type": "TemplateProcessing",
             "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
             "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
             "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}},
        ]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "vocab": vocab, "merges": [["a", "b"], ["ab", "c"]]},
    })
}

fn with_tokenizer(dir: &Path, tokenizer: &Value) -> PathBuf {
    let out = dir.join("model");
    let mut config = llama(true);
    config.eos_token_ids = vec![0, 29];
    let template = json!({"chat_template": "{{ messages }}"});
    let aux = vec![
        ("tokenizer.json".to_owned(), tokenizer.to_string().into_bytes()),
        ("tokenizer_config.json".to_owned(), template.to_string().into_bytes()),
    ];
    let layers = float_layers(&config, FloatType::F32);
    export_folder(&out, &ModelConfig::Llama(config), layers, None, aux, true).unwrap();
    out
}

#[test]
fn f063_a_tokenizer_keeps_its_ids_its_template_and_its_bos() {
    let dir = tempfile::tempdir().unwrap();
    let (out, again) = (dir.path().join("t.gguf"), dir.path().join("again.gguf"));
    let source = tokenizer();
    let model = with_tokenizer(dir.path(), &source);
    write(&model, &out, options(GgufType::F16)).unwrap();
    let ckpt = Checkpoint::open(&out).unwrap();
    assert_eq!(ckpt.config(), Checkpoint::open(&model).unwrap().config());
    assert_eq!(ckpt.chat_template().unwrap().as_deref(), Some("{{ messages }}"));
    let load = |bytes: Vec<u8>| tokenizers::Tokenizer::from_bytes(bytes).unwrap();
    let (ours, theirs) = (load(ckpt.tokenizer_json().unwrap().unwrap()), load(source.to_string().into_bytes()));
    for text in ["abc", "abacus", "<tool>ab", "x<s>y", "", "zabcz ab"] {
        for special in [false, true] {
            let ids = |t: &tokenizers::Tokenizer| t.encode(text, special).unwrap().get_ids().to_vec();
            assert_eq!(ids(&ours), ids(&theirs), "{text:?} {special}");
        }
    }
    // From one GGUF file to the next every key is carried over.
    write(&out, &again, options(GgufType::F16)).unwrap();
    assert!(std::fs::read(&out).unwrap() == std::fs::read(&again).unwrap());
}

#[test]
fn f063_what_the_keys_of_a_tokenizer_cannot_say_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("t.gguf");
    let bos = |id: u32| {
        json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"a": {"id": "a", "ids": [id], "tokens": ["a"]}}})
    };
    for (path, value, words) in [
        ("/model/type", json!("Unigram"), &["model.type", "BPE", "Unigram"][..]),
        ("/model/byte_fallback", json!(true), &["normalizer, pre_tokenizer", "Metaspace"]),
        ("/model/ignore_merges", json!(true), &["model.ignore_merges", "expected false", "gpt-2", "got true"]),
        ("/normalizer", json!({"type": "NFC"}), &["normalizer (NFC)", "expected false", "got true"]),
        ("/normalizer", json!({"type": "Lowercase"}), &["normalizer", "Lowercase"]),
        ("/pre_tokenizer", json!({"type": "Whitespace"}), &["pre_tokenizer", "smollm", "Whitespace"]),
        ("/pre_tokenizer/add_prefix_space", json!(true), &["pre_tokenizer", "one of smollm"]),
        ("/added_tokens/1/lstrip", json!(true), &["added_tokens", "<tool>", "lstrip", "got true"]),
        ("/added_tokens/1/id", json!(30), &["<tool>", "id: expected 29", "got 30"]),
        ("/model/vocab/zz", json!(40), &["model.vocab", "zz", "below the 40 rows", "got 40"]),
        ("/model/vocab/zz", json!(3), &["model.vocab", "zz", "got 3", "\"c\""]),
        ("/post_processor", bos(1), &["post_processor", "BOS", "expected 0", "got 1"]),
        ("/post_processor", json!({"type": "RobertaProcessing"}), &["post_processor", "RobertaProcessing"]),
        ("/model/merges", json!(["a x y"]), &["tokenizer.ggml.merges[0]", "a x y"]),
        ("/model/merges", json!([["a", "q"]]), &["tokenizer.ggml.merges[0]", "aq"]),
    ] {
        let mut changed = tokenizer();
        // A key that is not there yet: the last part of the path.
        let (parent, key) = path.rsplit_once('/').unwrap();
        match changed.pointer_mut(parent).unwrap() {
            Value::Array(list) => list[key.parse::<usize>().unwrap()] = value,
            other => other[key] = value,
        }
        let model = with_tokenizer(dir.path(), &changed);
        let e = write(&model, &out, options(GgufType::Q8_0)).unwrap_err();
        let text = e.to_string();
        assert_eq!(e.exit_code(), 3, "{path}: {text}");
        assert!(text.contains("tokenizer.json") && words.iter().all(|w| text.contains(w)), "{path}: {text}");
        assert_eq!(list(dir.path()), ["model"]);
    }
}

/// `tokenizers` looks for such a token behind the normalizer, llama.cpp in the text as it is.
#[test]
fn f063_added_tokens_that_a_normalizer_changes_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("t.gguf");
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
    let pieces =
        json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u{2581}"}, replace.clone()]});
    let tried = |normalizer: &Value, pre: &Value, bytes: bool, text: &str, normalized: bool| {
        let mut changed = tokenizer();
        changed["normalizer"] = normalizer.clone();
        changed["pre_tokenizer"] = pre.clone();
        changed["model"]["byte_fallback"] = json!(bytes);
        changed["added_tokens"][1]["content"] = json!(text);
        changed["added_tokens"][1]["normalized"] = json!(normalized);
        let model = with_tokenizer(dir.path(), &changed);
        write(&model, &out, options(GgufType::F16)).map(drop).map_err(|e| (e.exit_code(), e.to_string()))
    };
    let refused = |got: Result<(), (u8, String)>, words: &[&str]| {
        let (code, text) = got.unwrap_err();
        assert!(code == 3 && words.iter().all(|w| text.contains(w)), "{text}");
    };
    let (none, level) = (Value::Null, tokenizer()["pre_tokenizer"].clone());
    let words = |step| ["added_tokens", "normalized: expected false", step, "got true"];
    refused(tried(&pieces, &none, true, "<tool>", true), &words("Prepend"));
    refused(tried(&replace, &none, true, "<a b>", true), &words("Replace"));
    refused(tried(&replace, &none, true, "<a\u{2581}b>", true), &words("Replace"));
    refused(tried(&json!({"type": "NFC"}), &level, false, "<e\u{301}>", true), &words("NFC"));
    // Past this check: the tokenizer has no unk_token, and gpt-2 no normal form.
    for (normalizer, normalized) in [(&pieces, false), (&replace, true)] {
        refused(tried(normalizer, &none, true, "<tool>", normalized), &["model.unk_token"]);
    }
    refused(tried(&json!({"type": "NFC"}), &level, false, "<tool>", true), &["normalizer (NFC)"]);
    // Metaspace puts its prefix elsewhere than llama.cpp, in a sequence too.
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme, "split": false});
    for scheme in ["always", "first"] {
        for pre in [metaspace(scheme), json!({"type": "Sequence", "pretokenizers": [metaspace(scheme)]})] {
            let words =
                ["normalizer, pre_tokenizer", "prepend_scheme never", scheme, "llama.cpp does)", "Prepend and Replace"];
            refused(tried(&none, &pre, true, "<tool>", false), &words);
        }
    }
    refused(tried(&none, &metaspace("never"), true, "<tool>", true), &["model.unk_token"]);
    tried(&none, &level, false, "<e\u{301}>", true).unwrap();
}

#[test]
fn f047_an_end_named_twice_has_one_key() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("e.gguf");
    let mut config = llama(true);
    config.eos_token_ids = vec![2, 2, 7, 2];
    let model = folder(dir.path(), &config, float_layers(&config, FloatType::F32), None);
    write(&model, &out, options(GgufType::F16)).unwrap();
    config.eos_token_ids = vec![2, 7];
    assert_eq!(*Checkpoint::open(&out).unwrap().config(), ModelConfig::Llama(config));
}

#[test]
fn f089_nothing_is_damaged_and_nothing_is_left_behind() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let mut layers = float_layers(&llama(true), FloatType::F32);
    let model = folder(dir.path(), &llama(true), layers.clone(), None);
    let refused = |out: &Path, overwrite: bool, code: u8, words: &[&str]| {
        let e = write(&model, out, GgufOptions { overwrite, ..options(GgufType::Q4_0) }).unwrap_err();
        assert!(e.exit_code() == code && words.iter().all(|w| e.to_string().contains(w)), "{e}");
    };
    refused(&model, true, 2, &["--out", "is the input"]);
    refused(&model.join("x.gguf"), true, 2, &["--out", "inside the input"]);
    std::fs::create_dir(at("folder")).unwrap();
    refused(&at("folder"), true, 2, &["--out", "folder"]);
    std::fs::write(at("thesis.txt"), "years of work").unwrap();
    refused(&at("thesis.txt"), false, 2, &["--out", "exists"]);
    refused(&at("thesis.txt"), true, 2, &["--overwrite", "same format"]);
    assert_eq!(std::fs::read(at("thesis.txt")).unwrap(), b"years of work");
    write(&model, &at("q.gguf"), options(GgufType::Q4_0)).unwrap();
    refused(&at("q.gguf"), false, 2, &["--out", "exists"]);
    write(&model, &at("q.gguf"), GgufOptions { overwrite: true, ..options(GgufType::F16) }).unwrap();
    let before = std::fs::read(at("q.gguf")).unwrap();
    // A weight that cannot be stored, met in the middle of the file: the old one stays.
    for (value, ty, words) in
        [(f32::NAN, GgufType::Q4_0, "NaN"), (6e5, GgufType::F16, "overflow F16"), (6e6, GgufType::Q4_0, "F16")]
    {
        for layer in &mut layers {
            if let ExportTensor::Float { name, data, .. } = layer
                && name == "model.layers.1.mlp.up_proj.weight"
            {
                data[77] = if value.is_nan() { 1e30 } else { value };
            }
        }
        let changed = folder(&at("folder"), &llama(true), layers.clone(), None);
        if value.is_nan() {
            let file = changed.join("model.safetensors");
            let mut bytes = std::fs::read(&file).unwrap();
            let place = bytes.windows(4).rposition(|w| w == 1e30f32.to_le_bytes()).unwrap();
            bytes[place..place + 4].copy_from_slice(&f32::NAN.to_le_bytes());
            std::fs::write(&file, bytes).unwrap();
        }
        let e = write(&changed, &at("q.gguf"), GgufOptions { overwrite: true, ..options(ty) }).unwrap_err();
        assert!(e.exit_code() == 6 && e.to_string().contains("model.layers.1.mlp.up_proj.weight"), "{e}");
        assert!(e.to_string().contains(words), "{e}");
    }
    assert!(std::fs::read(at("q.gguf")).unwrap() == before);
    assert_eq!(list(dir.path()), ["folder", "model", "q.gguf", "q.gguf.dsq-proof.json", "thesis.txt"]);
    // Rows of 48 values: told of all such matrices at once, before anything is written.
    let narrow = LlamaConfig { intermediate_size: 48, ..llama(true) };
    let changed = folder(&at("folder"), &narrow, float_layers(&narrow, FloatType::F32), None);
    let e = write(&changed, &at("x.gguf"), options(GgufType::Q4_0)).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("model.layers.1.mlp.down_proj.weight (48)"), "{e}");
    let proof = write(&changed, &at("x.gguf"), options(GgufType::Q4KM)).unwrap();
    assert!(proof.bytes.contains_key("F16"), "llama.cpp's last resort");
}

#[test]
fn a_changed_file_is_told_by_its_proof() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("q.gguf");
    let model = folder(dir.path(), &llama(true), float_layers(&llama(true), FloatType::F32), None);
    let proof = write(&model, &out, options(GgufType::Q8_0)).unwrap();
    let faults = || {
        let found = Checkpoint::open(&out).unwrap().faults();
        found
            .into_iter()
            .filter(|f| f.severity > Severity::Note && !f.field.starts_with("tokenizer"))
            .collect::<Vec<_>>()
    };
    assert_eq!(faults(), []);
    let mut bytes = std::fs::read(&out).unwrap();
    let hash: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(proof.files["q.gguf"], hash);
    let last = bytes.len() - 3;
    bytes[last] ^= 1;
    std::fs::write(&out, bytes).unwrap();
    let found = faults();
    assert!(found.iter().any(|f| f.severity == Severity::Error && f.field == "blk.1.ffn_down.weight"), "{found:?}");
    assert!(found.iter().any(|f| f.problem == "changed since the export"), "{found:?}");
}

#[test]
fn the_file_does_not_depend_on_how_blocks_are_divided() {
    let dir = tempfile::tempdir().unwrap();
    let config = llama(true);
    let model = folder(dir.path(), &config, float_layers(&config, FloatType::F32), None);
    let a = dir.path().join("a.gguf");
    write(&model, &a, options(GgufType::Q4_0)).unwrap();
    let b = dir.path().join("b.gguf");
    let by_rows = |grid: GgufGrid, x: &[f32]| {
        let parts: Result<Vec<_>, _> = x.chunks(96).map(|x| grid.quantize(x)).collect();
        Ok(parts?.concat())
    };
    let ckpt = Checkpoint::open(&model).unwrap();
    GgufExport::new(&ckpt, &b, options(GgufType::Q4_0)).unwrap().write(&by_rows, &mut || ()).unwrap();
    assert!(std::fs::read(a).unwrap() == std::fs::read(b).unwrap());
}

#[test]
fn a_head_with_a_scheme_of_its_own_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("q.gguf");
    let preset = |name: &str| QuantScheme::preset(name, Granularity::PerGroup(32), FloatType::F16).unwrap();
    let mut scheme = QuantConfig::new(preset("W4A16"), &[]).unwrap();
    scheme.overrides = vec![(dsq_quant::Pattern::new("lm_head").unwrap(), preset("W8A16"))];
    let model =
        folder(dir.path(), &llama(false), quantized_layers(&llama(false), FloatType::F32, &scheme), Some(&scheme));
    write(&model, &out, options(GgufType::Q4_0)).unwrap();
    same_values(&model, &out);
    let file = Checkpoint::open(&out).unwrap();
    assert_eq!(file.info("lm_head.weight").unwrap().dtype, "Q8_0");
    let LinearWeight::Float { data, .. } = file.linear("lm_head").unwrap() else { panic!("blocks are read as floats") };
    assert_eq!(data.len(), values(40 * 64, 1).len());
}
