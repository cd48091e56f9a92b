//! EfficientNet-Lite0 from a PyTorch file to an INT4 folder that is evaluated: the reader and the float forward against torch,
//! the graph that is calibrated against the runtime, and the commands on the real model and pictures. Those are neither
//! committed nor fetched here: see `.ci/fetch-models.sh`.

use crate::command::{cached, fails, text, works};
use dsq_checkpoint::{Checkpoint, ExportTensor, ImageConfig, ModelConfig, export_folder};
use dsq_quant::{FloatType, Granularity, QuantConfig, QuantScheme};
use dsq_runtime::ImageRuntime;
use dsq_train::ptq::cnn::{CnnMethod, CnnOutcome, CnnSettings, quantize_images};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::Path;

#[test]
fn tensors_and_logits_are_those_of_torch() {
    let Some(model) = cached("efficientnet_lite0.pth") else { return };
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/efficientnet/lite0.json");
    let golden: Value = serde_json::from_slice(&std::fs::read(golden).unwrap()).unwrap();
    let ckpt = Checkpoint::open(&model).unwrap();
    let mut names = ckpt.names();
    names.sort();
    assert_eq!(names.len(), 296);
    let mut hash = Sha256::new();
    for name in &names {
        hash.update(name.as_bytes());
        hash.update(ckpt.read_stored(name).unwrap().1);
    }
    let found: String = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(found, golden["tensors_sha256"].as_str().unwrap(), "values of the tensors, 50 of them with odd strides");

    let runtime = ImageRuntime::load(&ckpt).unwrap();
    let pixels: Vec<u8> = (0..224 * 224 * 3).map(|p: u64| (p * 7919 % 251) as u8).collect();
    let logits = runtime.forward(&runtime.config().preparation.normalize(&pixels), 1).unwrap();
    // torch's own f32 pass is off by `float32_error` (5.4e-6) from its f64 one; ours adds in another order and folds batch norm,
    // which rounds every weight once more: ten times that. What is told apart are the logits of wrong padding or a wrong
    // epsilon, which differ by tenths.
    let bound = 10.0 * golden["float32_error"].as_f64().unwrap();
    for (i, want) in golden["logits"].as_array().unwrap().iter().enumerate() {
        let (got, want) = (f64::from(logits[i]), want.as_f64().unwrap());
        assert!((got - want).abs() < bound, "class {i}: {got} against {want}, bound {bound}");
    }
}

/// Top-1 of both rows and the agreement, of 20 pictures.
fn top1(model: &Path, reference: &Path, pictures: &Path) -> [f64; 3] {
    let json = works(&["eval", text(model), "--reference", text(reference), "--images", text(pictures), "--json"]);
    let json: Value = serde_json::from_str(&json).unwrap();
    let [model, reference] = [0, 1].map(|i| json["rows"][i].clone());
    assert_eq!((&model["name"], &reference["name"]), (&"model".into(), &"reference".into()));
    assert_eq!(model["images"], 20);
    let number = |row: &Value, key: &str| (20.0 * row[key].as_f64().unwrap()).round();
    [number(&model, "top1"), number(&reference, "top1"), number(&model, "top1_agreement")]
}

#[test]
fn twenty_pictures_keep_their_classes_at_four_and_eight_bits() {
    let (Some(model), Some(pictures)) = (cached("efficientnet_lite0.pth"), cached("imagenet20")) else { return };
    let dir = tempfile::tempdir().unwrap();
    let quantize = |name: &str, options: &[&str]| {
        let out = dir.path().join(name);
        let base =
            ["quantize", text(&model), "--out", text(&out), "--granularity", "channel", "--calib", text(&pictures)];
        works(&[&base, options].concat());
        out
    };
    let plain = quantize("plain", &["--scheme", "W4A8", "--method", "rtn"]);
    let [w4, float, _] = top1(&plain, &model, &pictures);
    assert_eq!(float, 18.0);
    assert!(w4 <= 6.0, "plain rounding to four bits is not expected to work: {w4} of 20");
    let w8 = quantize("w8", &["--scheme", "W8A8", "--method", "rtn"]);
    assert!(top1(&w8, &model, &pictures)[0] >= 17.0);
    for method in ["gptq", "autoround"] {
        let w4 = quantize(method, &["--scheme", "W4A8", "--method", method, "--equalize", "--correct-bias"]);
        let [top, _, agreement] = top1(&w4, &model, &pictures);
        assert!(top >= 15.0 && agreement >= 15.0, "{method}: {top} of 20, agreement {agreement}");
        assert!(works(&["inspect", text(&w4)]).contains("INT4 channel, F32 scales, 8-bit input"));
        let proof = std::fs::read_to_string(w4.join("dsq-proof.json")).unwrap();
        assert!(proof.contains("batch norm folded in, channels equalised"));
    }
}

#[test]
fn what_an_image_model_cannot_take_is_refused_by_name() {
    let Some(model) = cached("efficientnet_lite0.pth") else { return };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let fails_with = |options: &[&str], code: i32, words: &str| {
        let base = ["quantize", text(&model), "--out", text(&out), "--scheme", "W4A8"];
        fails(&[&base, options].concat(), code, &[words]);
        assert!(!out.exists());
    };
    fails_with(&[], 2, "--calib: ranges of activations are measured on pictures");
    fails_with(&["--calib", text(dir.path())], 3, "expected 1 to 128 files");
    fails_with(&["--granularity", "group"], 2, "--granularity: expected channel");
    fails_with(&["--method", "awq", "--calib", text(dir.path())], 2, "--method: expected rtn, gptq or autoround");
    fails_with(
        &["--method", "autoround", "--epochs", "2", "--calib", text(dir.path())],
        2,
        "--epochs: not for an image",
    );
    fails_with(&["--ignore", "conv"], 2, "expected patterns that match a layer");
    fails_with(&["--calib-tokens", "5"], 2, "--calib-tokens: not for an image model");
    fails_with(&["--activation-percentile", "50"], 2, "--activation-percentile: percentile: expected above 50");
    fails_with(&["--awq-scales"], 2, "--awq-scales: not for an image model");
    fails(&["eval", text(&model)], 2, &["--text"]);
    fails(&["eval", text(&model), "--images", text(dir.path())], 3, &["expected 1 to 100000 files"]);
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama_tiny");
    fails(
        &["eval", text(&tiny), "--images", text(dir.path())],
        2,
        &["--images measures resnet, mobilenet_v2 and efficientnet_lite0"],
    );
    fails(&["quantize", text(&tiny), "--out", text(&out), "--equalize"], 2, &["--equalize: only for image models"]);
    let float = ["quantize", text(&model), "--out", text(&out), "--scheme", "W4A16", "--activation-percentile", "99"];
    fails(&float, 2, &["--activation-percentile: expected a scheme with quantized activations, as W4A8, got W4A16"]);
    let percentile = ["quantize", text(&tiny), "--out", text(&out), "--activation-percentile", "99"];
    fails(&percentile, 2, &["--activation-percentile: only for image models"]);
}

/// A network with weights of no meaning, as a float folder, for pictures of 32 x 32.
fn random_model(dir: &Path) -> Checkpoint {
    let config = ImageConfig::efficientnet_lite0(32, 10);
    let mut seed = 7u64;
    let mut uniform = |lo: f32, hi: f32| {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        lo + (hi - lo) * ((seed >> 40) as f32 / (1u64 << 24) as f32)
    };
    let mut tensors = Vec::new();
    let mut float = |name: String, shape: Vec<usize>, lo: f32, hi: f32| {
        let data = (0..shape.iter().product()).map(|_| uniform(lo, hi)).collect();
        tensors.push(ExportTensor::Float { name, shape, data, dtype: FloatType::F32 });
    };
    for l in config.layers() {
        let k = l.shape[1..].iter().product::<usize>() as f32;
        let width = (6.0 / k).sqrt();
        float(format!("{}.weight", l.module), l.stored_shape(), -width, width);
        match &l.norm {
            None => float(format!("{}.bias", l.module), vec![10], -1.0, 1.0),
            Some(norm) => {
                for (part, lo, hi) in
                    [("weight", 0.5, 1.5), ("bias", -0.5, 1.0), ("running_mean", -0.2, 0.2), ("running_var", 0.5, 2.0)]
                {
                    float(format!("{norm}.{part}"), vec![l.shape[0]], lo, hi);
                }
            }
        }
    }
    export_folder(dir, &ModelConfig::Image(config), tensors, None, Vec::new(), false).unwrap();
    Checkpoint::open(dir).unwrap()
}

fn write(out: &Path, outcome: &CnnOutcome, scheme: &QuantConfig) {
    let mut tensors = Vec::new();
    for l in outcome.layers.clone() {
        let float = |part: &str, shape: Vec<usize>, data: Vec<f32>| ExportTensor::Float {
            name: format!("{}.{part}", l.module),
            shape,
            data,
            dtype: FloatType::F32,
        };
        tensors.push(float("bias", vec![l.bias.len()], l.bias));
        tensors.extend(l.clip.map(|c| float("clip", vec![c.len()], c)));
        tensors.push(match l.matrix {
            None => float("weight", l.shape, l.weight),
            Some(matrix) => ExportTensor::Linear {
                module: l.module,
                shape: l.shape,
                matrix,
                activation: l.activation,
                source: None,
                order: None,
            },
        });
    }
    let model = ModelConfig::Image(outcome.config.clone());
    export_folder(out, &model, tensors, Some(scheme), Vec::new(), false).unwrap();
}

#[test]
fn the_calibrated_graph_is_the_exported_one_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let ckpt = random_model(&dir.path().join("float"));
    let pixels: Vec<u8> = (0..3 * 32 * 32 * 3).map(|p: u64| (p * p * 31 % 251) as u8).collect();
    let ModelConfig::Image(config) = ckpt.config() else { panic!("another architecture") };
    let images = config.preparation.normalize(&pixels);
    let float = ImageRuntime::load(&ckpt).unwrap().forward(&images, 3).unwrap();
    let run_at = |scheme: &QuantConfig, method, equalize, percentile| {
        let settings = CnnSettings { config: scheme, method, equalize, correct_bias: equalize, percentile };
        quantize_images(&ckpt, settings, &images, &mut |_, _| {}).unwrap()
    };
    let run = |scheme: &QuantConfig, method, equalize| run_at(scheme, method, equalize, None);
    // Of the wide layers only the first are quantized: the factors of the last take minutes of nothing new.
    let some = ["re:_blocks\\.(1[0-5]|[6-9]).*", "_conv_head", "_fc"].map(String::from);
    let runs = [
        ("W4A8", CnnMethod::Gptq, true),
        ("W4A8", CnnMethod::AutoRound, true),
        ("W8A8", CnnMethod::Rtn, false),
        ("W8A8", CnnMethod::AutoRound, false),
        ("W8A16", CnnMethod::Rtn, true),
    ];
    for (i, (name, method, equalize)) in runs.into_iter().enumerate() {
        let scheme = QuantScheme::preset(name, Granularity::PerChannel, FloatType::F32).unwrap();
        let scheme = QuantConfig::new(scheme, &some).unwrap();
        let outcome = run(&scheme, method, equalize);
        let out = dir.path().join(format!("q{i}"));
        write(&out, &outcome, &scheme);
        let ckpt = Checkpoint::open(&out).unwrap();
        assert!(ckpt.faults().is_empty(), "{:?}", ckpt.faults());
        let runtime = ImageRuntime::load(&ckpt).unwrap();
        let logits = runtime.forward(&images, 3).unwrap();
        let same = logits.iter().zip(&outcome.logits).all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same && logits.len() == 30 && logits != float, "{name}: {logits:?} {:?}", outcome.logits);
        let kernels = runtime.kernels();
        assert!(kernels[0].1.starts_with(&format!("int{}", &name[1..2])) || kernels[0].1.starts_with("f32, int8"));
        assert_eq!(kernels[49].1, "f32 (layer is not quantized)");
        // One thread gives the same codes and bits.
        if equalize && name == "W4A8" {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
            let one = pool.install(|| run(&scheme, method, equalize));
            assert_eq!(one.logits, outcome.logits);
        }
    }
    // Percentiles: 100 is the whole range; less is narrower where an activation has tails (behind a ReLU6 that saturates it has
    // none).
    let scheme = QuantScheme::preset("W8A8", Granularity::PerChannel, FloatType::F32).unwrap();
    let scheme = QuantConfig::new(scheme, &some).unwrap();
    let scales = |percentile| -> Vec<f32> {
        let outcome = run_at(&scheme, CnnMethod::Rtn, false, percentile);
        outcome.layers.iter().filter_map(|l| l.activation.map(|(_, p)| p.scale)).collect()
    };
    let (whole, most) = (scales(None), scales(Some(99.0)));
    assert_eq!(whole, scales(Some(100.0)));
    assert!(most.len() == whole.len() && most[0] <= whole[0], "{most:?} {whole:?}");
    assert!(most.iter().zip(&whole).any(|(m, w)| *m < 0.99 * w), "{most:?} {whole:?}");
    // With every layer in float, folding and equalisation change nothing but roundings: 50 layers, each weight and output
    // rounded a few times at 2^-24 of values that cancel by less than a hundred.
    let none = QuantScheme::preset("W8A16", Granularity::PerChannel, FloatType::F32).unwrap();
    let none = QuantConfig::new(none, &["re:.*".to_string()]).unwrap();
    let equalized = run(&none, CnnMethod::Rtn, true);
    assert_ne!(equalized.layers[2].weight, run(&none, CnnMethod::Rtn, false).layers[2].weight);
    let largest = float.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    for (a, b) in equalized.logits.iter().zip(&float) {
        assert!((a - b).abs() < 50.0 * 100.0 * 2f32.powi(-24) * largest, "{a} against {b}, largest {largest}");
    }
}
