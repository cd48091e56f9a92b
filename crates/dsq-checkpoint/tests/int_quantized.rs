//! Folders in `int-quantized`, integer weights behind activations that are quantized for each token: what is exported is read
//! back equal, and what contradicts itself is refused by name. Not packed integers (see `export.rs`).

mod fixtures;

use dsq_checkpoint::{Checkpoint, CheckpointError, ExportTensor, LinearWeight, ModelConfig, export_folder};
use dsq_quant::{FloatType, Granularity, Mapping, QParams, QuantArgs, QuantConfig, QuantScheme};
use fixtures::{llama, quantized_layers};
use serde_json::{Value, json};
use std::path::Path;

const UP: &str = "model.layers.0.mlp.up_proj";

fn config(name: &str, granularity: Granularity, mapping: Mapping) -> QuantConfig {
    let mut scheme = QuantScheme::preset(name, granularity, FloatType::Bf16).unwrap().for_tokens();
    scheme.weights.mapping = mapping;
    QuantConfig::new(scheme, &["lm_head".to_owned()]).unwrap()
}

fn export(out: &Path, q: &QuantConfig) -> Result<Vec<ExportTensor>, CheckpointError> {
    let config = llama(false);
    let layers = quantized_layers(&config, FloatType::Bf16, q);
    export_folder(out, &ModelConfig::Llama(config), layers.clone(), Some(q), vec![], true)?;
    Ok(layers)
}

#[test]
fn codes_lie_in_bytes_and_read_back_equal_with_the_scheme_of_their_inputs() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    for (name, granularity) in
        [("W8A8", Granularity::PerChannel), ("W4A8", Granularity::PerChannel), ("W4A8", Granularity::PerGroup(8))]
    {
        for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
            let q = config(name, granularity, mapping);
            let layers = export(&out, &q).unwrap();
            let ckpt = Checkpoint::open(&out).unwrap();
            assert!(ckpt.faults().is_empty(), "{:?}", ckpt.faults());
            for layer in &layers {
                let ExportTensor::Linear { module, matrix, .. } = layer else { continue };
                assert!(ckpt.is_quantized(module));
                assert_eq!(ckpt.linear(module).unwrap(), LinearWeight::Quantized(matrix.clone()), "{module}");
                assert_eq!(ckpt.dynamic_activation(module), q.scheme.activations);
                assert_eq!(ckpt.activation(module).unwrap(), None);
                let (weight, scale) = (ckpt.info(&format!("{module}.weight")), format!("{module}.weight_scale"));
                let weight = weight.unwrap();
                assert_eq!((weight.dtype.as_str(), weight.shape), ("I8", vec![matrix.n, matrix.k]));
                let zeros = ckpt.info(&format!("{module}.weight_zero_point"));
                assert_eq!(zeros.is_some(), mapping == Mapping::Asymmetric);
                if let Some(z) = zeros {
                    assert_eq!((z.dtype.as_str(), z.shape), ("I8", ckpt.info(&scale).unwrap().shape));
                }
            }
            assert_eq!(ckpt.dynamic_activation("lm_head"), None);
            let text = std::fs::read(out.join("config.json")).unwrap();
            let value: Value = serde_json::from_slice(&text).unwrap();
            let (quantization, group) =
                (&value["quantization_config"], &value["quantization_config"]["config_groups"]["group_0"]);
            assert_eq!((&quantization["format"], &group["format"]), (&json!("int-quantized"), &json!("int-quantized")));
            let inputs = json!({
                "num_bits": 8, "type": "int", "symmetric": true, "strategy": "token", "group_size": null,
                "dynamic": true, "observer": null,
            });
            assert_eq!(group["input_activations"], inputs);
        }
    }
}

#[test]
fn configs_that_contradict_the_tensors_or_themselves_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    export(&out, &config("W8A8", Granularity::PerChannel, Mapping::Symmetric)).unwrap();
    let file = out.join("config.json");
    let old: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let refused = |change: &dyn Fn(&mut Value), words: &[&str]| {
        let mut value = old.clone();
        change(&mut value["quantization_config"]);
        std::fs::write(&file, value.to_string()).unwrap();
        let e = Checkpoint::open(&out).unwrap_err();
        assert_eq!(e.exit_code(), 3, "{e}");
        let text = e.to_string();
        assert!(words.iter().all(|w| text.contains(w)), "{text}: {words:?}");
    };
    fn group(v: &mut Value) -> &mut Value {
        &mut v["config_groups"]["group_0"]
    }
    fn inputs(v: &mut Value) -> &mut Value {
        &mut group(v)["input_activations"]
    }
    // Without quantized inputs these are no packed integers.
    refused(&|v| *inputs(v) = Value::Null, &["format", "pack-quantized", "int-quantized"]);
    refused(&|v| group(v)["format"] = json!("pack-quantized"), &["int-quantized", "pack-quantized"]);
    refused(&|v| inputs(v)["dynamic"] = json!(false), &["input_activations.dynamic", "true", "false"]);
    refused(&|v| inputs(v)["dynamic"] = Value::Null, &["input_activations.dynamic", "true"]);
    refused(&|v| inputs(v)["group_size"] = json!(32), &["group_size", "32"]);
    refused(&|v| inputs(v)["num_bits"] = json!(4), &["INT8", "INT4"]);
    refused(&|v| inputs(v)["strategy"] = json!("group"), &["group_size", "group"]);
    refused(&|v| group(v)["weights"]["strategy"] = json!("token"), &["weights.strategy", "token"]);
    refused(&|v| group(v)["weights"]["symmetric"] = json!(false), &["weight_zero_point"]);
    refused(&|v| v["ignore"] = json!(["lm_head", UP]), &[UP]);
    // Scales of tokens are found in f32; those of weights have the dtype in which they are stored.
    let scales = ["input_activations.scale_dtype", "torch.float32", "token", "torch.bfloat16"];
    refused(&|v| inputs(v)["scale_dtype"] = json!("torch.bfloat16"), &scales);
    let words = ["weights.scale_dtype", "torch.bfloat16", "float8_e4m3fn"];
    refused(&|v| group(v)["weights"]["scale_dtype"] = json!("torch.float8_e4m3fn"), &words);
    refused(&|v| inputs(v)["scale_dtype"] = json!(16), &["input_activations.scale_dtype", "a string", "16"]);
    let mut value = old.clone();
    inputs(&mut value["quantization_config"])["scale_dtype"] = json!("float32");
    group(&mut value["quantization_config"])["weights"]["scale_dtype"] = json!("torch.bfloat16");
    std::fs::write(&file, value.to_string()).unwrap();
    Checkpoint::open(&out).unwrap();

    // Codes outside the range of their type.
    let mut value = old.clone();
    group(&mut value["quantization_config"])["weights"]["num_bits"] = json!(4);
    std::fs::write(&file, value.to_string()).unwrap();
    let e = Checkpoint::open(&out).and_then(|c| c.linear(UP).map(|_| ())).unwrap_err();
    assert!(e.to_string().contains("code"), "{e}");
}

#[test]
fn a_stored_scale_of_inputs_that_have_none_is_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    let q = config("W8A8", Granularity::PerChannel, Mapping::Symmetric);
    let mut layers = quantized_layers(&llama(false), FloatType::Bf16, &q);
    for layer in &mut layers {
        if let ExportTensor::Linear { activation, .. } = layer {
            let args: QuantArgs = q.scheme.activations.unwrap();
            *activation = Some((args, QParams { scale: 0.1, zero: 0 }));
        }
    }
    let e = export_folder(&out, &ModelConfig::Llama(llama(false)), layers, Some(&q), vec![], false).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("no stored scale") && !out.exists(), "{e}");
}
