//! Parity of the residual network: prepared training graph == converted layers == exported folder read back == integer
//! runtime, codes, scales, zero points and logits bit for bit, over many seeds. Ties `dsq-model` and `dsq-runtime`, which
//! never see each other.

use dsq_checkpoint::{Checkpoint, LinearWeight, ResNetConfig};
use dsq_model::resnet::{BnPlacement, GridPart, Pass, QatSettings, ResNet, Updates};
use dsq_quant::{FloatType, Granularity, ObserverKind, QuantConfig, QuantScheme};
use dsq_runtime::CnnRuntime;
use dsq_train::cnn::{CnnExport, argmax};

/// A deterministic stream of numbers in -1 .. 1.
fn numbers(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

fn pixels(seed: u64, len: usize) -> Vec<u8> {
    let mut next = numbers(seed);
    (0..len).map(|_| ((next() + 1.0) * 127.5) as u8).collect()
}

struct Case {
    config: ResNetConfig,
    scheme: &'static str,
    granularity: Granularity,
    dtype: FloatType,
    ignore: &'static [&'static str],
    /// Whether scales are learned.
    learned: bool,
}

/// A network with statistics, gammas (some negative, some zero) and betas away from their initial values, calibrated.
fn network(case: &Case, seed: u64) -> (ResNet, QuantConfig) {
    let mut net = ResNet::new(&case.config, seed);
    let mut next = numbers(seed + 77);
    for param in net.params_mut() {
        if param.name.ends_with(".bn.weight") {
            param.data.iter_mut().for_each(|g| *g = next() * 1.5 + 0.4);
            if seed.is_multiple_of(3) {
                param.data[0] = 0.0;
            }
        } else if param.name.ends_with(".bias") {
            param.data.iter_mut().for_each(|b| *b = next() * 0.5);
        }
    }
    let (side, c) = (case.config.image_size, case.config.in_channels);
    let images = case.config.normalize(&pixels(seed + 1, 8 * side * side * c));
    for _ in 0..4 {
        let mut updates = Updates::default();
        net.logits(&images, Pass::FloatTrain, &mut updates).unwrap();
        net.apply(updates);
    }
    let scheme = QuantScheme::preset(case.scheme, case.granularity, case.dtype).unwrap();
    let ignore: Vec<String> = case.ignore.iter().map(|s| s.to_string()).collect();
    let quant = QuantConfig::new(scheme, &ignore).unwrap();
    let kinds = [ObserverKind::MinMax, ObserverKind::MovingAverage, ObserverKind::Percentile(99.0)];
    let observer = kinds[seed as usize % 3];
    let (placement, learned) = (BnPlacement::Skipped, case.learned);
    net.prepare(QatSettings { config: quant.clone(), placement, observer, rate: 0.1, learned }).unwrap();
    if learned {
        net.start_grids(&images).unwrap();
        for param in net.params_mut() {
            match param.grid {
                None => {}
                Some(GridPart::Scale) => param.data.iter_mut().for_each(|s| *s *= 1.0 + 0.3 * next()),
                Some(GridPart::Zero { .. }) => param.data.iter_mut().for_each(|z| *z += next()),
            }
        }
        return (net, quant);
    }
    let mut updates = Updates::default();
    net.logits(&images, Pass::Calibrate, &mut updates).unwrap();
    net.apply(updates);
    (net, quant)
}

fn config(in_channels: usize, image_size: usize, channels: &[usize], blocks_per_stage: usize) -> ResNetConfig {
    ResNetConfig {
        in_channels,
        image_size,
        channels: channels.to_vec(),
        blocks_per_stage,
        num_classes: 10,
        norm_eps: 1e-5,
        mean: vec![0.3; in_channels],
        std: vec![0.35; in_channels],
    }
}

#[test]
fn training_graph_export_and_runtime_agree_bit_for_bit() {
    let float_ends: &[&str] = &["re:conv1$", "fc"];
    let case = |config, scheme, granularity, dtype, ignore| {
        let learned = false;
        Case { config, scheme, granularity, dtype, ignore, learned }
    };
    let (channel, tensor) = (Granularity::PerChannel, Granularity::PerTensor);
    let learned = |case| Case { learned: true, ..case };
    let cases = [
        (16, case(config(1, 14, &[8, 12], 1), "W4A4", Granularity::PerChannel, FloatType::F32, float_ends)),
        (4, case(config(1, 28, &[16, 32, 64], 1), "W4A4", Granularity::PerChannel, FloatType::Bf16, float_ends)),
        (4, case(config(3, 9, &[5, 7], 2), "W4A4", Granularity::PerTensor, FloatType::F16, float_ends)),
        (4, case(config(1, 10, &[9, 9], 1), "W4A4", Granularity::PerChannel, FloatType::F32, &[])),
        (4, case(config(1, 10, &[8, 16], 1), "W4A16", Granularity::PerChannel, FloatType::F32, &["fc"])),
        (8, case(config(1, 14, &[8, 12], 1), "W2A4", channel, FloatType::F32, float_ends)),
        // Of the two layers that read a block's input, one is left in float.
        (4, case(config(1, 14, &[8, 12], 1), "W4A4", channel, FloatType::F32, &["conv1", "fc"])),
        (4, case(config(1, 14, &[8, 12], 1), "W4A4", channel, FloatType::F32, &["re:.*downsample$", "fc"])),
        (4, learned(case(config(1, 14, &[8, 12], 1), "W4A4", channel, FloatType::F32, &["re:.*downsample$", "fc"]))),
        (16, learned(case(config(1, 14, &[8, 12], 1), "W4A4", channel, FloatType::F32, float_ends))),
        (8, learned(case(config(1, 28, &[16, 32, 64], 1), "W2A4", channel, FloatType::F32, float_ends))),
        (4, learned(case(config(1, 10, &[9, 9], 2), "W4A4", channel, FloatType::Bf16, &[]))),
        (4, learned(case(config(3, 9, &[5, 7], 1), "W2A4", tensor, FloatType::F16, &["fc"]))),
        (4, learned(case(config(1, 10, &[8, 16], 1), "W2A16", channel, FloatType::F32, &["fc"]))),
        (8, case(config(1, 14, &[8, 12], 1), "W8A8", channel, FloatType::F32, float_ends)),
        (4, case(config(1, 28, &[16, 32, 64], 1), "W8A8", channel, FloatType::Bf16, float_ends)),
        (4, case(config(3, 9, &[5, 7], 2), "W8A8", tensor, FloatType::F16, &[])),
        (4, case(config(1, 14, &[8, 12], 1), "W4A8", channel, FloatType::F32, &[])),
        (8, learned(case(config(1, 14, &[8, 12], 1), "W8A8", channel, FloatType::F32, &[]))),
        (4, learned(case(config(1, 10, &[9, 9], 2), "W4A8", channel, FloatType::Bf16, float_ends))),
    ];
    for (seeds, case) in cases {
        for seed in 0..seeds {
            let (net, quant) = network(&case, seed);
            let (side, c) = (case.config.image_size, case.config.in_channels);
            let layers = net.convert().unwrap();
            let export = CnnExport {
                seed,
                config: case.config.clone(),
                layers: layers.clone(),
                master: net.named_tensors(),
                logits: Vec::new(),
            };
            let dir = tempfile::tempdir().unwrap();
            let out = dir.path().join("exported");
            export.write(&out, &quant, false).unwrap();

            let ckpt = Checkpoint::open(&out).unwrap();
            for layer in &layers {
                let weight = ckpt.linear(&layer.module).unwrap();
                match &layer.matrix {
                    Some(matrix) => assert_eq!(weight, LinearWeight::Quantized(matrix.clone()), "{}", layer.module),
                    None => assert_eq!(weight.into_f32(), layer.weight, "{}", layer.module),
                }
                assert_eq!(ckpt.bias(&layer.module).unwrap().unwrap(), layer.bias);
                assert_eq!(ckpt.activation(&layer.module).unwrap(), layer.activation, "{}", layer.module);
            }

            let runtime = CnnRuntime::load(&ckpt).unwrap();
            let m = 3;
            let images = case.config.normalize(&pixels(seed + 900, m * side * side * c));
            let want = net.logits(&images, Pass::QatEval, &mut Updates::default()).unwrap();
            let got = runtime.forward(&images, m).unwrap();
            assert_eq!(got.len(), m * case.config.num_classes);
            let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&got), bits(&want), "{} seed {seed}", case.scheme);
            // The pictures must not all look alike, or the comparison would prove little.
            let spread = got.chunks(10).any(|row| row.iter().zip(&got[..10]).any(|(a, b)| a != b));
            assert!(
                spread && got.iter().any(|v| v.abs() > 1e-3),
                "{:?}",
                got.chunks(10).map(argmax).collect::<Vec<_>>()
            );
        }
    }
}

/// Weights of one size and inputs near their maximum: sums of 576 INT8 products pass 2^24, above which the f32 sums of the
/// training graph are rounded.
#[test]
fn sums_that_f32_does_not_hold_exactly_are_the_training_graphs_too() {
    let case = Case {
        config: config(1, 6, &[64], 1),
        scheme: "W8A8",
        granularity: Granularity::PerChannel,
        dtype: FloatType::F32,
        ignore: &["fc"],
        learned: false,
    };
    let mut net = ResNet::new(&case.config, 3);
    for param in net.params_mut() {
        match param.name.as_str() {
            "layer1.0.conv1.bn.weight" => param.data.fill(0.01),
            "layer1.0.conv1.bn.bias" => param.data.fill(5.0),
            "layer1.0.conv2.weight" => param.data.fill(0.1),
            _ => {}
        }
    }
    let images = case.config.normalize(&pixels(8, 4 * 36));
    let scheme = QuantScheme::preset(case.scheme, case.granularity, case.dtype).unwrap();
    let quant = QuantConfig::new(scheme, &["fc".into()]).unwrap();
    let placement = BnPlacement::Skipped;
    let observer = ObserverKind::MinMax;
    net.prepare(QatSettings { config: quant.clone(), placement, observer, rate: 0.1, learned: false }).unwrap();
    let mut updates = Updates::default();
    net.logits(&images, Pass::Calibrate, &mut updates).unwrap();
    net.apply(updates);
    let export = CnnExport {
        seed: 3,
        config: case.config.clone(),
        layers: net.convert().unwrap(),
        master: vec![],
        logits: vec![],
    };
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("exported");
    export.write(&out, &quant, false).unwrap();
    let runtime = CnnRuntime::load(&Checkpoint::open(&out).unwrap()).unwrap();
    let kernels = runtime.kernels();
    let kernel = |module: &str| &kernels.iter().find(|k| k.0 == module).unwrap().1;
    assert!(kernel("layer1.0.conv2").contains("2^24") && kernel("layer1.0.conv1").contains("8 bits"), "{kernels:?}");
    let want = net.logits(&images, Pass::QatEval, &mut Updates::default()).unwrap();
    assert_eq!(runtime.forward(&images, 4).unwrap(), want);
}

#[test]
fn a_planted_fault_in_the_export_moves_the_runtimes_logits() {
    let ignore: &[&str] = &["re:conv1$", "fc"];
    let case = Case {
        config: config(1, 14, &[8, 12], 1),
        scheme: "W4A4",
        granularity: Granularity::PerChannel,
        dtype: FloatType::F32,
        ignore,
        learned: false,
    };
    let (net, quant) = network(&case, 1);
    let images = case.config.normalize(&pixels(5, 4 * 14 * 14));
    let want = net.logits(&images, Pass::QatEval, &mut Updates::default()).unwrap();
    let run = |fault: &dyn Fn(&mut CnnExport)| {
        let mut export = CnnExport {
            seed: 1,
            config: case.config.clone(),
            layers: net.convert().unwrap(),
            master: vec![],
            logits: vec![],
        };
        fault(&mut export);
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("exported");
        export.write(&out, &quant, false).unwrap();
        CnnRuntime::load(&Checkpoint::open(&out).unwrap()).unwrap().forward(&images, 4).unwrap()
    };
    assert_eq!(run(&|_| {}), want);
    // One ulp on the scales of the last convolution (in front of an activation grid such an ulp mostly rounds away); a
    // zero point dropped (one that is off by one shifts codes and zero alike, and only the clipped end moves); a bias dropped.
    assert_ne!(
        run(&|e| {
            let last = e.layers.iter_mut().find(|l| l.module == "layer2.0.conv2").unwrap();
            let scales = &mut last.matrix.as_mut().unwrap().scales;
            scales.iter_mut().for_each(|s| *s = f32::from_bits(s.to_bits() + 1));
        }),
        want
    );
    assert_ne!(run(&|e| e.layers[1].activation.as_mut().unwrap().1.zero = 0), want);
    assert_ne!(run(&|e| e.layers[2].bias.fill(0.0)), want);
}

#[test]
fn a_folder_with_batch_norm_is_refused_by_the_runtime() {
    let case = Case {
        config: config(1, 10, &[4], 1),
        scheme: "W4A4",
        granularity: Granularity::PerChannel,
        dtype: FloatType::F32,
        ignore: &["fc"],
        learned: false,
    };
    let (net, _) = network(&case, 1);
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("float");
    let tensors = net
        .named_tensors()
        .into_iter()
        .map(|(name, shape, data)| dsq_checkpoint::ExportTensor::Float { name, shape, data, dtype: FloatType::F32 })
        .collect();
    let config = dsq_checkpoint::ModelConfig::ResNet(case.config.clone());
    dsq_checkpoint::export_folder(&out, &config, tensors, None, vec![], false).unwrap();
    let ckpt = Checkpoint::open(&out).unwrap();
    let err = CnnRuntime::load(&ckpt).unwrap_err();
    assert_eq!(err.exit_code(), 3);
    assert!(err.to_string().contains("expected batch norm folded"), "{err}");
    // The training side reads the same folder back, bit for bit.
    assert_eq!(ResNet::from_checkpoint(&ckpt).unwrap().named_tensors(), net.named_tensors());
}
