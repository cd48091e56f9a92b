//! Folders and vectors made by Python's transformers and compressed-tensors (see `tests/golden/README.md`).

use dsq_checkpoint::{
    Checkpoint, ExportTensor, LinearWeight, ModelConfig, NamedTensor, SafetensorsFile, Severity, TensorData,
    export_folder, write_safetensors,
};
use dsq_quant::{FloatType, Granularity, Mapping, QuantArgs, QuantConfig, QuantScheme, QuantizedMatrix};
use std::path::PathBuf;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

#[test]
fn folders_of_transformers_open_in_both_spellings() {
    for (name, theta, head_dim, tied) in [("llama_tiny", 1e4, 16, true), ("llama_tiny_untied", 1e6, 24, false)] {
        let ckpt = Checkpoint::open(&golden(name)).unwrap();
        let ModelConfig::Llama(c) = ckpt.config() else { panic!("{name} is a llama") };
        assert_eq!((c.rope_theta, c.head_dim, c.tie_word_embeddings), (theta, head_dim, tied), "{name}");
        for spec in ckpt.config().linears() {
            let LinearWeight::Float { n, k, data } = ckpt.linear(&spec.module).unwrap() else { panic!("float") };
            assert_eq!((n, k, data.len()), (spec.n(), spec.k(), n * k), "{}", spec.module);
        }
        let LinearWeight::Float { data: head, .. } = ckpt.linear("lm_head").unwrap() else { panic!("float") };
        let embedding = ckpt.read_f32("model.embed_tokens.weight").unwrap();
        assert_eq!(head == embedding, tied, "{name}");
        assert!(ckpt.faults().is_empty(), "{:?}", ckpt.faults());
    }
}

/// Frequencies and attention factors of every scaling that dsq knows, as transformers computes them in f32.
#[test]
fn f045_rotary_scaling_is_that_of_transformers() {
    let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(golden("rope.json")).unwrap()).unwrap();
    let cases = cases.as_array().unwrap();
    for case in cases {
        let config = serde_json::json!({"model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
            "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 40, "head_dim": case["head_dim"],
            "rope_theta": case["rope_theta"], "rope_scaling": case["rope_scaling"],
            "max_position_embeddings": case["max_position_embeddings"]});
        let read = ModelConfig::from_json(&config.to_string(), "config.json".as_ref()).unwrap();
        let ModelConfig::Llama(config) = &read else { panic!("a llama") };
        let rotary = config.rotary();
        let want = case["frequencies"].as_array().unwrap();
        assert_eq!(rotary.frequencies.len(), want.len());
        // transformers takes its steps in f32, each off by half a unit in the last place, ours one rounding after f64 (and
        // each power by one unit); where a ramp goes from 1 to 0, what is small beside 1 is off by that much of 1.
        for (got, want) in rotary.frequencies.iter().zip(want) {
            let want = want.as_f64().unwrap();
            assert!((f64::from(*got) / want - 1.0).abs() < 2e-6, "{case}: {got} {want}");
        }
        let factor = case["attention_factor"].as_f64().unwrap();
        assert!((f64::from(rotary.attention_factor) - factor).abs() < 1e-7, "{case}");
    }
    assert_eq!(cases.len(), 40);
}

/// A folder that Python's compressed-tensors made is read, and quantizing the same weights gives the same tensors, bit
/// for bit.
#[test]
fn a_folder_of_compressed_tensors_is_what_dsq_writes() {
    let source = Checkpoint::open(&golden("llama_tiny_untied")).unwrap();
    for (name, mapping) in [("symmetric", Mapping::Symmetric), ("asymmetric", Mapping::Asymmetric)] {
        let theirs = Checkpoint::open(&golden(&format!("ct_folder_{name}"))).unwrap();
        assert_eq!(theirs.config(), source.config());
        assert!(theirs.faults().is_empty(), "{:?}", theirs.faults());
        let args = QuantArgs { mapping, ..QuantArgs::int4(Granularity::PerGroup(32), FloatType::F32) };
        let scheme = QuantConfig::new(QuantScheme { weights: args, activations: None }, &["lm_head".into()]).unwrap();
        let mut layers = Vec::new();
        for tensor in source.names() {
            let (shape, data) = (source.info(&tensor).unwrap().shape, source.read_f32(&tensor).unwrap());
            let module = tensor.trim_end_matches(".weight");
            let linear = source.config().linears().iter().any(|l| l.module == module);
            layers.push(match scheme.scheme_for(module).filter(|_| linear) {
                Some(s) => {
                    let matrix = QuantizedMatrix::quantize(&data, shape[0], shape[1], s.weights).unwrap();
                    assert_eq!(theirs.linear(module).unwrap(), LinearWeight::Quantized(matrix.clone()), "{module}");
                    ExportTensor::Linear {
                        module: module.into(),
                        shape,
                        matrix,
                        activation: None,
                        source: None,
                        order: None,
                    }
                }
                None => ExportTensor::Float { name: tensor, shape, data, dtype: FloatType::F32 },
            });
        }
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("m");
        export_folder(&out, source.config(), layers, Some(&scheme), vec![], false).unwrap();
        let ours = Checkpoint::open(&out).unwrap();
        let sorted = |c: &Checkpoint| {
            let mut names = c.names();
            names.sort();
            names
        };
        assert_eq!(sorted(&ours), sorted(&theirs));
        for tensor in ours.names() {
            assert_eq!(ours.info(&tensor), theirs.info(&tensor), "{tensor}");
            assert_eq!(ours.read_stored(&tensor).unwrap(), theirs.read_stored(&tensor).unwrap(), "{tensor}");
        }
    }
}

/// Folders that compressed-tensors 0.12 made with groups in activation order: the values that its own code unpacks, and written the same
/// tensors, bit for bit.
#[test]
fn groups_in_activation_order_are_those_of_compressed_tensors() {
    use sha2::{Digest, Sha256};
    for name in ["ct_order_symmetric", "ct_order_asymmetric"] {
        let theirs = Checkpoint::open(&golden(name)).unwrap();
        let values: serde_json::Value =
            serde_json::from_slice(&std::fs::read(golden(name).join("values.json")).unwrap()).unwrap();
        let noted: Vec<_> = theirs.faults();
        assert!(
            noted.len() == 1 && noted[0].problem.starts_with("14 layers have groups in activation order"),
            "{noted:?}"
        );
        let mut layers = Vec::new();
        let mut scheme = None;
        for spec in theirs.config().linears() {
            let LinearWeight::Ordered { matrix, order } = theirs.linear(&spec.module).unwrap() else {
                panic!("an order")
            };
            scheme = Some(QuantScheme { weights: matrix.args, activations: None });
            let bytes: Vec<u8> = order
                .scatter(&matrix.dequantize())
                .into_iter()
                // A zero has no sign.
                .flat_map(|v| (v + 0.0).to_le_bytes())
                .collect();
            let hash: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(values[&spec.module], hash, "{name} {}", spec.module);
            let (module, shape, order) = (spec.module, spec.shape, Some(order));
            layers.push(ExportTensor::Linear { module, shape, matrix, activation: None, source: None, order });
        }
        for tensor in theirs.names().into_iter().filter(|n| !n.contains("_proj")) {
            let (shape, data) = (theirs.info(&tensor).unwrap().shape, theirs.read_f32(&tensor).unwrap());
            layers.push(ExportTensor::Float { name: tensor, shape, data, dtype: FloatType::F32 });
        }
        let dir = tempfile::tempdir().unwrap();
        let scheme = QuantConfig::new(scheme.unwrap(), &["lm_head".into()]).unwrap();
        let export = |layers: Vec<ExportTensor>, name: &str| {
            let out = dir.path().join(name);
            export_folder(&out, theirs.config(), layers, Some(&scheme), vec![], false).unwrap();
            Checkpoint::open(&out).unwrap()
        };
        let ours = export(layers.clone(), "m");
        assert_eq!(ours.names().len(), theirs.names().len());
        for tensor in theirs.names() {
            assert_eq!(ours.read_stored(&tensor).unwrap(), theirs.read_stored(&tensor).unwrap(), "{tensor}");
        }
        // One layer whose columns come in order gets a list with the others, so that all have one scheme.
        if let ExportTensor::Linear { order, .. } = &mut layers[3] {
            *order = None;
        }
        let ours = export(layers, "one");
        let module = "model.layers.0.self_attn.o_proj";
        assert!(matches!(ours.linear(module).unwrap(), LinearWeight::Quantized(_)));
        assert!(ours.info(&format!("{module}.weight_g_idx")).is_some());
    }
}

/// A list of groups that some layers have and others do not: told, with the layers that are read as runs of inputs.
#[test]
fn a_list_of_groups_that_some_layers_lack_is_told() {
    let source = golden("ct_order_symmetric");
    let file = SafetensorsFile::open(&source.join("model.safetensors")).unwrap();
    let faults = |without: &dyn Fn(&str) -> bool| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(source.join("config.json"), dir.path().join("config.json")).unwrap();
        let kept = file.names().filter(|n| !(n.ends_with(".weight_g_idx") && without(n)));
        let tensors: Vec<NamedTensor> = kept
            .map(|name| {
                let (dtype, bytes) = file.read_stored(name).unwrap();
                let shape = file.info(name).unwrap().shape;
                NamedTensor { name: name.into(), data: TensorData::Raw { shape, bytes, dtype } }
            })
            .collect();
        write_safetensors(&dir.path().join("model.safetensors"), &tensors).unwrap();
        let found = Checkpoint::open(dir.path()).unwrap().faults();
        found.into_iter().filter(|f| f.severity == Severity::Warning).collect::<Vec<_>>()
    };
    let lacks = "model.layers.1.mlp.up_proj";
    let found = faults(&|n| n.starts_with(lacks));
    assert!(found.len() == 1 && found[0].field == format!("{lacks}.weight_g_idx"), "{found:?}");
    for words in ["13 layers have weight_g_idx", "got none in 1", lacks] {
        assert!(found[0].problem.contains(words), "{found:?}");
    }
    let found = faults(&|n| n.contains("layers.1."));
    assert!(found.len() == 1 && found[0].problem.contains("got none in 7"), "{found:?}");
    assert!(found[0].problem.ends_with("and 4 more"), "{found:?}");
    // None at all: a tool whose groups are runs of inputs.
    assert!(faults(&|_| true).is_empty());
}
