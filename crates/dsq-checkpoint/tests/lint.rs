//! Models that can be read and are wrong all the same: each finding of `lint.rs` from a folder that has nothing but that fault.
//! Not what makes a folder unreadable (see the tests of each format).

mod fixtures;

use dsq_checkpoint::{Checkpoint, ExportTensor, Fault, ModelConfig, Severity, export_folder};
use dsq_quant::{FloatType, Granularity, QuantArgs, QuantConfig, QuantType, QuantizedMatrix};
use fixtures::{llama, quantized_layers, scheme};
use serde_json::json;
use std::path::{Path, PathBuf};

struct Folder {
    dir: tempfile::TempDir,
}

impl Folder {
    fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    fn export(&self, name: &str, q: &QuantConfig, change: impl Fn(&str, &mut QuantizedMatrix)) -> PathBuf {
        self.export_with(name, q, vec![], change)
    }

    fn export_with(
        &self,
        name: &str,
        q: &QuantConfig,
        aux: Vec<(String, Vec<u8>)>,
        change: impl Fn(&str, &mut QuantizedMatrix),
    ) -> PathBuf {
        let config = llama(false);
        let mut layers = quantized_layers(&config, FloatType::F32, q);
        for layer in &mut layers {
            if let ExportTensor::Linear { module, matrix, .. } = layer {
                change(module, matrix);
            }
        }
        let out = self.dir.path().join(name);
        export_folder(&out, &ModelConfig::Llama(config), layers, Some(q), aux, true).unwrap();
        out
    }
}

fn faults(path: &Path) -> Vec<Fault> {
    Checkpoint::open(path).unwrap().faults()
}

/// The one fault of a folder: its field and text.
fn only(path: &Path, severity: Severity) -> (String, String) {
    let found = faults(path);
    assert_eq!(found.len(), 1, "{found:?}");
    assert_eq!(found[0].severity, severity);
    (found[0].field.clone(), found[0].problem.clone())
}

fn int4() -> QuantConfig {
    scheme(QuantArgs::int4(Granularity::PerGroup(32), FloatType::F32))
}

#[test]
fn fused_layers_with_global_scales_of_their_own() {
    let folder = Folder::new();
    let q = scheme(QuantArgs::nvfp4());
    // Rounded layer by layer, each under its own.
    let (field, problem) = {
        let found = faults(&folder.export("own", &q, |_, _| {}));
        assert_eq!(found.len(), 4, "q, k, v and gate, up of two layers: {found:?}");
        assert!(found.iter().all(|f| f.severity == Severity::Warning && f.hint.is_some()));
        (found[0].field.clone(), found[0].problem.clone())
    };
    assert_eq!(field, "model.layers.0.self_attn.q_proj.weight_global_scale");
    assert!(problem.contains("expected one, got") && problem.contains("self_attn.v_proj"), "{problem}");
    let one = |_: &str, m: &mut QuantizedMatrix| {
        *m = QuantizedMatrix::quantize_under(&m.dequantize(), m.n, m.k, m.args, Some(500.0)).unwrap();
    };
    assert_eq!(faults(&folder.export("one", &q, one)), []);
}

#[test]
fn scales_that_nobody_measured() {
    let folder = Folder::new();
    let v = "model.layers.1.self_attn.v_proj";
    let ones = |module: &str, m: &mut QuantizedMatrix| {
        if module == v {
            m.scales.fill(1.0);
        }
    };
    let (field, problem) = only(&folder.export("ones", &int4(), ones), Severity::Warning);
    assert!(field == format!("{v}.weight_packed") && problem.contains("every scale is 1"), "{field} {problem}");
    // One scale of 1 among others is a scale like any other.
    let one = |_: &str, m: &mut QuantizedMatrix| m.scales[0] = 1.0;
    assert_eq!(faults(&folder.export("one", &int4(), one)), []);
}

#[test]
fn a_layer_of_zeros() {
    let folder = Folder::new();
    let down = "model.layers.0.mlp.down_proj";
    let zero = |module: &str, m: &mut QuantizedMatrix| {
        if module == down {
            m.codes.fill(0);
        }
    };
    let (field, problem) = only(&folder.export("zero", &int4(), zero), Severity::Warning);
    assert!(field == format!("{down}.weight_packed") && problem.contains("every weight is 0"), "{field} {problem}");
}

#[test]
fn a_float_matrix_of_zeros() {
    let folder = Folder::new();
    let config = llama(false);
    let mut layers = fixtures::float_layers(&config, FloatType::F32);
    for layer in &mut layers {
        if let ExportTensor::Float { name, data, .. } = layer
            && (name == "lm_head.weight" || name == "model.norm.weight")
        {
            data.fill(0.0);
        }
    }
    let out = folder.dir.path().join("zero");
    export_folder(&out, &ModelConfig::Llama(config), layers, None, vec![], true).unwrap();
    // A norm of zeros is what some models store for a factor of one.
    let (field, problem) = only(&out, Severity::Warning);
    assert!(field == "lm_head.weight" && problem.contains("every weight is 0"), "{field} {problem}");
}

#[test]
fn a_name_that_promises_other_bits() {
    let folder = Folder::new();
    let w8 = scheme(QuantArgs { qtype: QuantType::Int8, ..QuantArgs::int4(Granularity::PerChannel, FloatType::F32) });
    let (_, problem) = only(&folder.export("llama-w4a16", &w8, |_, _| {}), Severity::Warning);
    assert!(problem.contains("expected 4 bits, got 8 bits"), "{problem}");
    assert_eq!(faults(&folder.export("llama-w8a16", &w8, |_, _| {})), []);
    assert_eq!(faults(&folder.export("llama-8bit", &w8, |_, _| {})), []);
}

#[test]
fn f057_more_tokens_than_embeddings() {
    let folder = Folder::new();
    let with = |name: &str, ids: [u32; 2]| {
        let text = json!({"model": {"type": "BPE", "vocab": {"a": 0, "b": ids[0]}, "merges": []},
            "added_tokens": [{"id": ids[1], "content": "<s>"}]});
        let aux = vec![("tokenizer.json".to_owned(), text.to_string().into_bytes())];
        folder.export_with(name, &int4(), aux, |_, _| {})
    };
    // The embedding has 40 rows; fewer tokens are padding.
    assert_eq!(faults(&with("fits", [38, 39])), []);
    for (name, ids) in [("vocab", [40, 1]), ("added", [1, 40])] {
        let (_, problem) = only(&with(name, ids), Severity::Error);
        assert!(problem.contains("40 rows, got 40"), "{problem}");
    }
}

#[test]
fn absent_files_are_notes_of_their_own() {
    let folder = Folder::new();
    let missing = |path: &Path| -> Vec<String> {
        let found = Checkpoint::open(path).unwrap().missing_files();
        assert!(found.iter().all(|f| f.severity == Severity::Note));
        found.into_iter().map(|f| f.field).collect()
    };
    assert_eq!(missing(&folder.export("bare", &int4(), |_, _| {})), ["tokenizer.json"]);
    let tokenizer = ("tokenizer.json".to_owned(), b"{}".to_vec());
    let with = |name: &str, aux| missing(&folder.export_with(name, &int4(), aux, |_, _| {}));
    assert_eq!(with("base", vec![tokenizer.clone()]), ["chat_template"]);
    let template = ("chat_template.jinja".to_owned(), b"{{ messages }}".to_vec());
    assert!(with("chat", vec![tokenizer, template]).is_empty());
}
