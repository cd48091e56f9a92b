//! Folders with FP8, NVFP4 and MXFP4 weights, alone and mixed: what is exported is read back equal, and what contradicts
//! itself is refused by name. Whether the bytes are those of compressed-tensors is tested in `packed.rs`.

mod fixtures;

use dsq_checkpoint::{
    Checkpoint, CheckpointError, ExportTensor, LinearWeight, ModelConfig, NamedTensor, TensorData, check_groups,
    export_folder, write_safetensors,
};
use dsq_quant::{FloatType, Granularity, Pattern, QuantArgs, QuantConfig, QuantScheme, QuantType, QuantizedMatrix};
use fixtures::{llama, quantized_layers, scheme, values};
use serde_json::{Value, json};
use std::path::Path;

const UP: &str = "model.layers.0.mlp.up_proj";

fn weights_only(weights: QuantArgs) -> QuantScheme {
    QuantScheme { weights, activations: None }
}

fn export(out: &Path, q: &QuantConfig, dtype: FloatType) -> Vec<ExportTensor> {
    let config = llama(false);
    let layers = quantized_layers(&config, dtype, q);
    export_folder(out, &ModelConfig::Llama(config), layers.clone(), Some(q), vec![], true).unwrap();
    layers
}

fn assert_reads_back(out: &Path, layers: &[ExportTensor]) {
    let ckpt = Checkpoint::open(out).unwrap();
    for layer in layers {
        if let ExportTensor::Linear { module, matrix, .. } = layer {
            assert!(ckpt.is_quantized(module));
            assert_eq!(ckpt.linear(module).unwrap(), LinearWeight::Quantized(matrix.clone()), "{module}");
        }
    }
    // Each layer was rounded by itself, under a global scale of its own, which `lint.rs` remarks.
    let other: Vec<_> = ckpt.faults().into_iter().filter(|f| !f.field.ends_with("weight_global_scale")).collect();
    assert!(other.is_empty(), "{other:?}");
}

fn config_of(out: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap()
}

#[test]
fn every_float_coded_scheme_reads_back_equal() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    let mut cases = vec![
        (QuantArgs::nvfp4(), FloatType::Bf16, "nvfp4-pack-quantized"),
        (QuantArgs::mxfp4(), FloatType::F16, "mxfp4-pack-quantized"),
    ];
    for granularity in [
        Granularity::PerTensor,
        Granularity::PerChannel,
        Granularity::PerBlock(128, 128),
        Granularity::PerBlock(48, 40),
    ] {
        for dtype in FloatType::ALL {
            cases.push((QuantArgs::fp8(granularity, dtype), dtype, "float-quantized"));
        }
    }
    for (args, dtype, format) in cases {
        let q = scheme(args);
        let layers = export(&out, &q, dtype);
        assert_reads_back(&out, &layers);
        let config = config_of(&out);
        assert_eq!(config["quantization_config"]["format"], format);
        assert_eq!(config["quantization_config"]["config_groups"]["group_0"]["format"], format);
        let proof: Value = serde_json::from_slice(&std::fs::read(out.join("dsq-proof.json")).unwrap()).unwrap();
        let (mut bits, mut n) = (0.0, 0.0);
        for spec in ModelConfig::Llama(llama(false)).linears().iter().filter(|s| s.module != "lm_head") {
            let size = (spec.n() * spec.k()) as f64;
            bits += args.bits_per_weight(spec.n(), spec.k()).unwrap() * size;
            n += size;
        }
        let got = proof["bits_per_weight"].as_f64().unwrap();
        assert!((got - bits / n).abs() < 1e-12, "{args:?}: {got} against {}", bits / n);
        assert!(proof["bytes"]["codes"].as_u64().unwrap() as f64 == n * args.qtype.bits() as f64 / 8.0);
    }
}

/// The keys and values that compressed-tensors 0.20.1 writes for its presets (its defaults left out).
#[test]
fn configs_are_spelt_as_compressed_tensors_spells_them() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    let args = |a: QuantArgs| {
        export(&out, &scheme(a), FloatType::Bf16);
        config_of(&out)["quantization_config"]["config_groups"]["group_0"]["weights"].take()
    };
    let base = |bits: u32, strategy: &str, group: Value| {
        json!({"num_bits": bits, "type": "float", "symmetric": true, "strategy": strategy, "group_size": group,
               "dynamic": false, "observer": "minmax"})
    };
    assert_eq!(args(QuantArgs::fp8(Granularity::PerChannel, FloatType::Bf16)), base(8, "channel", Value::Null));
    assert_eq!(args(QuantArgs::fp8(Granularity::PerTensor, FloatType::Bf16)), base(8, "tensor", Value::Null));
    let mut block = base(8, "block", Value::Null);
    block["block_structure"] = json!([128, 128]);
    assert_eq!(args(QuantArgs::fp8(Granularity::PerBlock(128, 128), FloatType::Bf16)), block);
    let mut nvfp4 = base(4, "tensor_group", json!(16));
    nvfp4["scale_dtype"] = json!("torch.float8_e4m3fn");
    assert_eq!(args(QuantArgs::nvfp4()), nvfp4);
    let mut mxfp4 = base(4, "group", json!(32));
    mxfp4["scale_dtype"] = json!("torch.uint8");
    assert_eq!(args(QuantArgs::mxfp4()), mxfp4);
    let int4 = args(QuantArgs::int4(Granularity::PerGroup(32), FloatType::Bf16));
    assert_eq!(
        int4,
        json!({"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32,
                            "dynamic": false, "observer": "minmax"})
    );
    // What recipes' digests are made of.
    assert_eq!(
        serde_json::to_string(&QuantArgs::int4(Granularity::PerGroup(128), FloatType::Bf16)).unwrap(),
        r#"{"qtype":"int4","granularity":{"per_group":128},"mapping":"symmetric","scale_dtype":"bf16","observer":"minmax"}"#
    );
}

#[test]
fn several_formats_in_one_folder_are_mixed_precision() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    let mut q = scheme(QuantArgs::nvfp4());
    let fp8 = QuantArgs::fp8(Granularity::PerChannel, FloatType::F32);
    let int4 = QuantArgs::int4(Granularity::PerGroup(32), FloatType::F32);
    for (pattern, args) in [("re:.*down_proj", QuantArgs::mxfp4()), ("q_proj", fp8), ("lm_head", int4)] {
        q.overrides.push((Pattern::new(pattern).unwrap(), weights_only(args)));
    }
    let layers = export(&out, &q, FloatType::F32);
    assert_reads_back(&out, &layers);
    let config = config_of(&out);
    assert_eq!(config["quantization_config"]["format"], "mixed-precision");
    let groups = config["quantization_config"]["config_groups"].as_object().unwrap();
    let mut formats: Vec<_> = groups.values().map(|g| g["format"].as_str().unwrap()).collect();
    formats.sort_unstable();
    assert_eq!(formats, ["float-quantized", "mxfp4-pack-quantized", "nvfp4-pack-quantized", "pack-quantized"]);
}

#[test]
fn what_has_no_format_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    let config = llama(false);
    let e5m2 = QuantArgs { qtype: QuantType::Fp8E5M2, ..QuantArgs::fp8(Granularity::PerChannel, FloatType::F32) };
    let q = scheme(e5m2);
    let layers = quantized_layers(&config, FloatType::F32, &q);
    let e = export_folder(&out, &ModelConfig::Llama(config), layers, Some(&q), vec![], false).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("no format for FP8 E5M2"), "{e}");
    assert!(!out.exists());
    // A convolution.
    let spec = ModelConfig::ResNet(dsq_checkpoint::ResNetConfig {
        in_channels: 1,
        image_size: 4,
        channels: vec![4],
        blocks_per_stage: 1,
        num_classes: 10,
        norm_eps: 1e-5,
        mean: vec![0.0],
        std: vec![1.0],
    });
    let conv = spec.linears().into_iter().find(|s| s.shape.len() == 4).unwrap();
    let fp8 = QuantArgs::fp8(Granularity::PerChannel, FloatType::F32);
    let matrix = QuantizedMatrix::quantize(&values(conv.n() * conv.k(), 1), conv.n(), conv.k(), fp8).unwrap();
    let layer = ExportTensor::Linear {
        module: conv.module,
        shape: conv.shape,
        matrix,
        activation: None,
        source: None,
        order: None,
    };
    let e = export_folder(&out, &spec, vec![layer], Some(&scheme(fp8)), vec![], false).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("linear layers only"), "{e}");
    // A hidden size that 16 divides and 32 does not.
    let model = ModelConfig::Llama(dsq_checkpoint::LlamaConfig { intermediate_size: 80, ..llama(false) });
    check_groups(Path::new("m"), &model, &scheme(QuantArgs::nvfp4())).unwrap();
    let e = check_groups(Path::new("m"), &model, &scheme(QuantArgs::mxfp4())).unwrap_err();
    assert!(e.hint().unwrap().starts_with("choose another scheme"), "{e:?}");
}

/// The tensors of a folder, to be changed and written again.
fn tensors_of(out: &Path) -> Vec<NamedTensor> {
    let ckpt = Checkpoint::open(out).unwrap();
    let raw = |name: String| {
        let (dtype, bytes) = ckpt.read_stored(&name).unwrap();
        let shape = ckpt.info(&name).unwrap().shape;
        NamedTensor { name, data: TensorData::Raw { shape, bytes, dtype } }
    };
    ckpt.names().into_iter().map(raw).collect()
}

/// What opening, or reading one layer, or the lint says of a folder whose tensors were changed.
fn after(out: &Path, change: impl Fn(&str, &mut Vec<u8>)) -> String {
    let tensors = tensors_of(out);
    let changed: Vec<NamedTensor> = tensors
        .iter()
        .cloned()
        .map(|mut t| {
            if let TensorData::Raw { bytes, .. } = &mut t.data {
                change(t.name.strip_prefix(&format!("{UP}.")).unwrap_or_default(), bytes);
            }
            t
        })
        .collect();
    let file = out.join("model.safetensors");
    write_safetensors(&file, &changed).unwrap();
    std::fs::remove_file(out.join("dsq-proof.json")).ok();
    let text = match Checkpoint::open(out).and_then(|c| c.linear(UP).map(|_| c)) {
        Ok(c) => c.faults().iter().map(ToString::to_string).collect(),
        Err(e) => {
            assert_eq!(e.exit_code(), 3, "{e}");
            assert!(Checkpoint::open(out).unwrap().faults().iter().any(|f| f.to_string().contains(UP)), "lint too");
            e.to_string()
        }
    };
    write_safetensors(&file, &tensors).unwrap();
    text
}

#[test]
fn f049_stored_codes_and_scales_that_are_no_numbers_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    export(&out, &scheme(QuantArgs::fp8(Granularity::PerChannel, FloatType::F32)), FloatType::F32);
    assert_eq!(after(&out, |_, _| {}), "");
    let text = after(&out, |part, bytes| {
        if part == "weight" {
            bytes[70] = 0xff
        }
    });
    assert!(text.contains("0xff at index 70"), "{text}");
    let text = after(&out, |part, bytes| {
        if part == "weight_scale" {
            bytes[..4].fill(0)
        }
    });
    assert!(text.contains("group 0: scale"), "{text}");

    export(&out, &scheme(QuantArgs::nvfp4()), FloatType::F32);
    let text = after(&out, |part, bytes| {
        if part == "weight_scale" {
            bytes[3] = 0x7f
        }
    });
    assert!(text.contains("group 3: scale") && text.contains("NaN"), "{text}");
    let text = after(&out, |part, bytes| {
        if part == "weight_scale" {
            bytes[3] |= 0x80
        }
    });
    assert!(text.contains("group 3: scale"), "{text}");
    for global in [0.0f32, -1.0, f32::INFINITY, f32::NAN] {
        let text = after(&out, |part, bytes| {
            if part == "weight_global_scale" {
                bytes.copy_from_slice(&global.to_le_bytes())
            }
        });
        assert!(text.contains("global scale"), "{text}");
    }

    export(&out, &scheme(QuantArgs::mxfp4()), FloatType::F32);
    let text = after(&out, |part, bytes| {
        if part == "weight_scale" {
            bytes[5] = 255
        }
    });
    assert!(text.contains("group 5: scale"), "{text}");
}

/// Opens a folder after its `quantization_config` was changed.
fn with_config(out: &Path, change: impl Fn(&mut Value)) -> Result<Checkpoint, CheckpointError> {
    let file = out.join("config.json");
    let old = std::fs::read(&file).unwrap();
    let mut value = config_of(out);
    change(&mut value["quantization_config"]);
    std::fs::write(&file, value.to_string()).unwrap();
    let opened = Checkpoint::open(out);
    std::fs::write(&file, old).unwrap();
    opened
}

#[test]
fn f049_configs_that_contradict_the_tensors_or_themselves_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    let refused = |change: &dyn Fn(&mut Value), words: &[&str]| {
        let e = with_config(&out, change).unwrap_err();
        assert_eq!(e.exit_code(), 3, "{e}");
        let text = e.to_string();
        assert!(words.iter().all(|w| text.contains(w)), "{text}: {words:?}");
    };
    export(&out, &scheme(QuantArgs::fp8(Granularity::PerBlock(128, 128), FloatType::F32)), FloatType::F32);
    // The name that compressed-tensors infers for FP8 weights alone.
    let naive = |v: &mut Value| {
        v["format"] = json!("naive-quantized");
        v["config_groups"]["group_0"]["format"] = json!("naive-quantized");
    };
    with_config(&out, naive).unwrap();
    fn args(v: &mut Value) -> &mut Value {
        &mut v["config_groups"]["group_0"]["weights"]
    }
    fn group(v: &mut Value) -> &mut Value {
        &mut v["config_groups"]["group_0"]
    }
    refused(&|v| group(v)["format"] = json!("pack-quantized"), &["float-quantized", "pack-quantized"]);
    refused(&|v| args(v)["block_structure"] = json!([128]), &["block_structure", "two positive"]);
    refused(&|v| args(v)["block_structure"] = json!([128, 0]), &["block_structure", "two positive"]);
    refused(&|v| args(v)["block_structure"] = Value::Null, &["block_structure"]);
    refused(&|v| args(v)["block_structure"] = json!([32, 128]), &["weight_scale", "[3, 1]", "[1, 1]"]);
    refused(&|v| args(v)["strategy"] = json!("channel"), &["block_structure"]);
    refused(&|v| args(v)["symmetric"] = json!(false), &["no zero point"]);
    refused(&|v| args(v)["num_bits"] = json!(6), &["num_bits", "4 or 8", "6"]);
    refused(&|v| args(v)["type"] = json!("int"), &["strategy", "blocks"]);
    let mut dynamic = json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": "token", "dynamic": true});
    with_config(&out, |v| group(v)["input_activations"] = dynamic.clone()).unwrap();
    with_config(&out, |v| group(v)["input_activations"] = Value::Null).unwrap();
    dynamic["dynamic"] = json!(false);
    refused(&|v| group(v)["input_activations"] = dynamic.clone(), &["input_activations.dynamic", "true", "false"]);
    dynamic = json!({"num_bits": 4, "type": "float", "symmetric": true, "strategy": "token", "dynamic": true});
    refused(&|v| group(v)["input_activations"] = dynamic.clone(), &["input_activations", "FP4"]);
    refused(&|v| v["ignore"] = json!(["lm_head", UP]), &[UP, "quantization_config does not name"]);

    export(&out, &scheme(QuantArgs::nvfp4()), FloatType::F32);
    // Older files do not name the dtype of the scales.
    with_config(&out, |v| args(v)["scale_dtype"] = Value::Null).unwrap();
    refused(&|v| args(v)["scale_dtype"] = json!("torch.uint8"), &["scale_dtype", "float8_e4m3fn", "uint8"]);
    refused(&|v| args(v)["group_size"] = json!(32), &["NVFP4"]);
    refused(&|v| group(v)["format"] = json!("mxfp4-pack-quantized"), &["nvfp4-pack-quantized"]);
    let mx = |v: &mut Value| {
        v["format"] = json!("mxfp4-pack-quantized");
        group(v)["format"] = Value::Null;
        *args(v) = json!({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32});
    };
    refused(&mx, &["weight_scale", "expected shape"]);
}
