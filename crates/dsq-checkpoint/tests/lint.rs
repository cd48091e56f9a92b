//! Models that can be read and are wrong all the same: each finding of `lint.rs` from a folder that has nothing but that fault.
//! Not what makes a folder unreadable (see the tests of each format).

mod fixtures;

use dsq_checkpoint::{
    Checkpoint, ExportTensor, Fault, ModelConfig, NamedTensor, SafetensorsFile, Severity, TensorData, export_folder,
    write_safetensors,
};
use dsq_quant::{
    FloatType, Granularity, Mapping, QParams, QuantArgs, QuantConfig, QuantScheme, QuantType, QuantizedMatrix,
};
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

/// The tensors of a folder, to be changed and written back; the proof of the export, which would tell of it, goes.
fn change(dir: &Path, change: impl FnOnce(&mut Vec<NamedTensor>)) {
    let path = dir.join("model.safetensors");
    let file = SafetensorsFile::open(&path).unwrap();
    let mut all: Vec<NamedTensor> = file
        .names()
        .map(|name| {
            let (dtype, bytes) = file.read_stored(name).unwrap();
            let shape = file.info(name).unwrap().shape;
            NamedTensor { name: name.into(), data: TensorData::Raw { shape, bytes, dtype } }
        })
        .collect();
    change(&mut all);
    write_safetensors(&path, &all).unwrap();
    let _ = std::fs::remove_file(dir.join("dsq-proof.json"));
}

fn floats(all: &mut [NamedTensor], name: &str, data: Vec<f32>) {
    let t = all.iter_mut().find(|t| t.name == name).unwrap();
    t.data = TensorData::Float { shape: t.data.shape().to_vec(), data, dtype: FloatType::F32 };
}

#[test]
fn scales_and_weights_that_are_no_numbers() {
    let folder = Folder::new();
    let v = "model.layers.1.self_attn.v_proj.weight_scale";
    for (name, bad, words) in [("nan", f32::NAN, "NaN"), ("inf", f32::INFINITY, "inf"), ("zero", 0.0, "0")] {
        let out = folder.export(name, &int4(), |_, _| {});
        change(&out, |all| {
            let mut data = vec![0.5; 64];
            data[5] = bad;
            floats(all, v, data);
        });
        // Told of the layer, and of the tensor where it holds no numbers.
        let (found, module) = (faults(&out), v.trim_end_matches(".weight_scale"));
        assert_eq!(found.len(), if name == "zero" { 1 } else { 2 }, "{found:?}");
        for f in &found {
            assert!(f.severity == Severity::Error && f.field.starts_with(module) && f.problem.contains(words), "{f:?}");
        }
        assert!(found[0].problem.contains("finite positive scale"), "{found:?}");
    }
    let out = folder.export("norm", &int4(), |_, _| {});
    change(&out, |all| floats(all, "model.norm.weight", [vec![1.0; 63], vec![f32::NAN]].concat()));
    let (field, problem) = only(&out, Severity::Error);
    assert!(field == "model.norm.weight" && problem.contains("1 non-finite"), "{field} {problem}");
}

#[test]
fn a_head_beside_an_embedding_that_is_the_head() {
    let folder = Folder::new();
    let config = llama(true);
    let out = folder.dir.path().join("tied");
    for (severity, words) in [(Severity::Note, "a copy of the embedding"), (Severity::Error, "got another matrix")] {
        let layers = fixtures::float_layers(&config, FloatType::F32);
        export_folder(&out, &ModelConfig::Llama(config.clone()), layers, None, vec![], true).unwrap();
        change(&out, |all| {
            let mut head = all.iter().find(|t| t.name == "model.embed_tokens.weight").unwrap().clone();
            head.name = "lm_head.weight".into();
            if let (TensorData::Raw { bytes, .. }, Severity::Error) = (&mut head.data, severity) {
                bytes[0] ^= 1;
            }
            all.push(head);
        });
        let (field, problem) = only(&out, severity);
        assert!(field == "lm_head.weight" && problem.contains(words), "{field} {problem}");
    }
}

/// AWQ and GPTQ words under the wrong convention: of asymmetric codes every weight moves by a step.
#[test]
fn c016_zero_points_that_are_off_by_one() {
    let folder = Folder::new();
    let asymmetric =
        QuantArgs { mapping: Mapping::Asymmetric, ..QuantArgs::int4(Granularity::PerGroup(32), FloatType::F16) };
    let q = scheme(asymmetric);
    assert_eq!(faults(&folder.export("right", &q, |_, _| {})), []);
    for (name, by, way) in [("more", 1, "below"), ("less", -1, "above")] {
        let out = folder.export(name, &q, |_, m| m.zeros.iter_mut().for_each(|z| *z = (*z + by).clamp(-8, 7)));
        let (field, problem) = only(&out, Severity::Warning);
        assert!(field.starts_with("model.layers.0.") && field.ends_with("weight_packed"), "{field}");
        assert!(problem.contains("off by one") && problem.contains(way), "{problem}");
    }
    // One layer alone is a layer with a mean.
    let one = |module: &str, m: &mut QuantizedMatrix| {
        if module.ends_with("0.mlp.up_proj") {
            m.zeros.iter_mut().for_each(|z| *z = (*z + 1).min(7));
        }
    };
    assert_eq!(faults(&folder.export("one", &q, one)), []);
}

/// Experts that no token reached in the calibration: their stored scales are those that tools begin with.
#[test]
fn experts_without_calibration() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/mixtral_tiny");
    let ckpt = Checkpoint::open(&golden).unwrap();
    let folder = Folder::new();
    let (weights, inputs) = (
        QuantArgs::fp8(Granularity::PerChannel, FloatType::F32),
        QuantArgs::fp8(Granularity::PerTensor, FloatType::F32),
    );
    let q = QuantConfig::new(QuantScheme { weights, activations: Some(inputs) }, &["lm_head".to_owned()]).unwrap();
    let out = |name: &str, scale: &dyn Fn(&str) -> f32| {
        let layers: Vec<ExportTensor> = ckpt
            .names()
            .into_iter()
            .map(|name| {
                let (shape, data) = (ckpt.info(&name).unwrap().shape, ckpt.read_f32(&name).unwrap());
                let module = name.trim_end_matches(".weight").to_owned();
                let linear = ckpt.config().linears().iter().any(|l| l.module == module);
                if !linear || module == "lm_head" {
                    return ExportTensor::Float { name, shape, data, dtype: FloatType::F32 };
                }
                let matrix = QuantizedMatrix::quantize(&data, shape[0], shape[1], weights).unwrap();
                let activation = Some((inputs, QParams { scale: scale(&module), zero: 0 }));
                ExportTensor::Linear { module, shape, matrix, activation, source: None, order: None }
            })
            .collect();
        let out = folder.dir.path().join(name);
        export_folder(&out, ckpt.config(), layers, Some(&q), vec![], true).unwrap();
        out
    };
    assert_eq!(faults(&out("measured", &|_| 0.01)), []);
    for (name, never) in [("ones", 1.0), ("least", FloatType::F32.epsilon())] {
        let path = out(name, &|module: &str| {
            if module.contains("layers.1.block_sparse_moe.experts.4.") { never } else { 0.01 }
        });
        let (field, problem) = only(&path, Severity::Warning);
        assert_eq!(field, "model.layers.1.block_sparse_moe.experts.4.w1.input_scale");
        assert!(problem.contains("experts that no token reached") && problem.starts_with("3 scales"), "{problem}");
    }
}

/// No alarm without a fire: every golden folder of another tool's.
#[test]
fn good_folders_have_no_faults() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
    let mut count = 0;
    for entry in std::fs::read_dir(golden).unwrap() {
        let path = entry.unwrap().path();
        if !path.join("config.json").exists() || !path.join("model.safetensors").exists() {
            continue;
        }
        count += 1;
        let found: Vec<Fault> = faults(&path).into_iter().filter(|f| f.severity > Severity::Note).collect();
        assert_eq!(found, [], "{}", path.display());
    }
    assert!(count >= 16, "{count}");
}
