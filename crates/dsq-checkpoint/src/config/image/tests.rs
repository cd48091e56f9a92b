//! The layer lists against published sizes and against the names of PyTorch files; what configs are refused for.

use super::*;
use crate::ModelConfig;
use std::collections::HashMap;

fn read(text: &str) -> Result<ImageConfig, CheckpointError> {
    match ModelConfig::from_json(text, Path::new("config.json"))? {
        ModelConfig::Image(c) => Ok(c),
        _ => panic!("another architecture"),
    }
}

/// Trained parameters: weights, two values for each output of batch norm, the classifier's bias.
fn parameters(config: &ImageConfig) -> usize {
    let norm = |l: &ConvLayer| if l.norm.is_some() { 2 * l.shape[0] } else { l.shape[0] };
    config.layers().iter().map(|l| l.shape.iter().product::<usize>() + norm(l)).sum()
}

fn resnet(layer_type: &str, depths: [usize; 4], classes: usize) -> ImageConfig {
    let sizes = if layer_type == "basic" { [64, 128, 256, 512] } else { [256, 512, 1024, 2048] };
    let text = json!({"model_type": "resnet", "layer_type": layer_type, "depths": depths, "hidden_sizes": sizes,
        "num_labels": classes});
    read(&text.to_string()).unwrap()
}

#[test]
fn the_published_models_have_their_published_sizes() {
    for (kind, depths, name, count) in [
        ("basic", [2, 2, 2, 2], "ResNet-18", 11_689_512),
        ("basic", [3, 4, 6, 3], "ResNet-34", 21_797_672),
        ("bottleneck", [3, 4, 6, 3], "ResNet-50", 25_557_032),
        ("bottleneck", [3, 4, 23, 3], "ResNet-101", 44_549_160),
    ] {
        let config = resnet(kind, depths, 1000);
        assert_eq!((config.title().as_str(), parameters(&config)), (name, count));
    }
    for (multiplier, count) in [("1.0", 3_504_872), ("1.4", 6_108_776), ("0.75", 2_636_424), ("0.5", 1_968_680)] {
        let text = format!(r#"{{"model_type": "mobilenet_v2", "depth_multiplier": {multiplier}, "num_labels": 1000}}"#);
        assert_eq!(parameters(&read(&text).unwrap()), count, "{multiplier}");
    }
}

#[test]
fn every_layer_reads_what_the_ones_before_it_give() {
    let mobile = r#"{"model_type": "mobilenet_v2", "first_layer_is_expansion": false, "num_channels": 1}"#;
    let in_first = r#"{"model_type": "resnet", "downsample_in_first_stage": true, "downsample_in_bottleneck": true}"#;
    for config in
        [resnet("basic", [2; 4], 10), resnet("bottleneck", [1; 4], 10), read(mobile).unwrap(), read(in_first).unwrap()]
    {
        let (mut width, mut skip) = (config.channels, 0);
        for l in config.layers() {
            if l.starts_block {
                skip = width;
            }
            assert_eq!(l.inputs(), if l.on_skip { skip } else { width }, "{}", l.module);
            *(if l.on_skip { &mut skip } else { &mut width }) = l.shape[0];
            assert!(!l.adds_skip || skip == width, "{}", l.module);
        }
    }
    // Where the stride of a bottleneck stands.
    let strides = |text: &str| -> Vec<usize> {
        let layers = read(text).unwrap().layers();
        layers.iter().filter(|l| l.module.contains("stages.1.layers.0.layer")).map(|l| l.stride).collect()
    };
    assert_eq!(strides(r#"{"model_type": "resnet"}"#), [1, 2, 1]);
    assert_eq!(strides(in_first), [2, 1, 1]);
}

#[test]
fn configs_survive_json() {
    for text in [
        r#"{"model_type": "resnet", "layer_type": "basic", "embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 2],
            "id2label": {"0": "cat", "1": "dog", "2": "cow"}, "stage_names": ["stem"], "out_features": null}"#,
        r#"{"architectures": ["ResNetForImageClassification"], "model_type": "resnet", "batch_norm": false}"#,
        r#"{"model_type": "mobilenet_v2", "depth_multiplier": 0.35, "image_size": [33, 47], "tf_padding": false,
            "finegrained_output": false, "expand_ratio": 4, "min_depth": 4, "depth_divisible_by": 2,
            "hidden_act": "relu6", "layer_norm_eps": 1e-05, "channel_clip": true, "batch_norm": false,
            "classifier_dropout_prob": 0.2, "semantic_loss_ignore_index": 255, "num_labels": 1001}"#,
    ] {
        let config = read(text).unwrap();
        assert_eq!(read(&config.to_json().to_string()).unwrap(), config, "{text}");
    }
    assert_eq!(read(r#"{"model_type": "resnet"}"#).unwrap().num_classes, 2);
}

#[test]
fn what_a_config_asks_for_and_is_not_there_is_named() {
    for (text, words) in [
        (r#"{"model_type": "resnet", "hidden_act": "gelu"}"#, "hidden_act: expected \"relu\""),
        (r#"{"model_type": "resnet", "layer_type": "se"}"#, "layer_type: expected basic or bottleneck, got se"),
        (r#"{"model_type": "resnet", "depths": [1, 2]}"#, "depths: expected one for each of the 4 hidden_sizes, got 2"),
        (r#"{"model_type": "resnet", "depths": [1, 1, 0, 1]}"#, "depths: expected integers from 1"),
        (r#"{"model_type": "resnet", "hidden_sizes": [2, 8, 8, 8]}"#, "hidden_sizes: expected at least 4"),
        (r#"{"model_type": "resnet", "channel_clip": true}"#, "channel_clip: expected false"),
        (r#"{"model_type": "resnet", "se_ratio": 4}"#, "se_ratio"),
        (r#"{"model_type": "resnet", "architectures": ["ResNetModel"]}"#, "architectures: architecture not supported"),
        (r#"{"model_type": "resnet", "num_labels": 3, "id2label": {"0": "a"}}"#, "num_labels: expected the 1 classes"),
        (r#"{"model_type": "resnet", "id2label": {"1": "a"}}"#, "id2label: expected names"),
        (r#"{"model_type": "mobilenet_v2", "output_stride": 16}"#, "output_stride: expected 32"),
        (r#"{"model_type": "mobilenet_v2", "hidden_act": "hardswish"}"#, "hidden_act: expected relu6 or relu"),
        (r#"{"model_type": "mobilenet_v2", "depth_multiplier": 0}"#, "depth_multiplier: expected 0.01 to 64, got 0"),
        (r#"{"model_type": "mobilenet_v2", "image_size": [224]}"#, "image_size: expected sizes"),
        (r#"{"model_type": "mobilenet_v2", "tf_padding": 1}"#, "tf_padding: expected true or false"),
    ] {
        let e = read(text).unwrap_err().to_string();
        assert!(e.contains(words), "{text}: {e}");
    }
}

/// The tensors that torchvision's modules hold, by name and shape.
fn torchvision_resnet(bottleneck: bool, depths: &[usize]) -> HashMap<String, Vec<usize>> {
    let mut out = HashMap::new();
    let mut pair = |conv: String, norm: String, shape: Vec<usize>| {
        for part in NORM_PARTS {
            out.insert(format!("{norm}.{part}"), vec![shape[0]]);
        }
        out.insert(format!("{norm}.num_batches_tracked"), vec![]);
        out.insert(format!("{conv}.weight"), shape);
    };
    pair("conv1".into(), "bn1".into(), vec![64, 3, 7, 7]);
    let mut width = 64;
    for (s, &depth) in depths.iter().enumerate() {
        let planes = 64 << s;
        let n = if bottleneck { 4 * planes } else { planes };
        for b in 0..depth {
            let block = format!("layer{}.{b}", s + 1);
            let shapes = match bottleneck {
                true => vec![vec![planes, width, 1, 1], vec![planes, planes, 3, 3], vec![n, planes, 1, 1]],
                false => vec![vec![n, width, 3, 3], vec![n, n, 3, 3]],
            };
            for (i, shape) in shapes.into_iter().enumerate() {
                pair(format!("{block}.conv{}", i + 1), format!("{block}.bn{}", i + 1), shape);
            }
            if b == 0 && (s > 0 || width != n) {
                pair(format!("{block}.downsample.0"), format!("{block}.downsample.1"), vec![n, width, 1, 1]);
            }
            width = n;
        }
    }
    out.insert("fc.weight".into(), vec![1000, width]);
    out.insert("fc.bias".into(), vec![1000]);
    out
}

fn detect(tensors: &HashMap<String, Vec<usize>>) -> Option<(ImageConfig, Vec<(String, String)>)> {
    let names: Vec<String> = tensors.keys().cloned().collect();
    ImageConfig::detect(&names, |n| tensors.get(n).cloned())
}

#[test]
fn residual_networks_of_torchvision_are_told_by_their_tensors() {
    for (bottleneck, depths, count) in
        [(false, [2, 2, 2, 2], 11_689_512), (false, [3, 4, 6, 3], 21_797_672), (true, [3, 4, 6, 3], 25_557_032)]
    {
        let tensors = torchvision_resnet(bottleneck, &depths);
        let (config, renamed) = detect(&tensors).unwrap();
        assert_eq!(parameters(&config), count);
        assert_eq!((config.num_classes, config.norm_eps), (1000, 1e-5));
        // Every tensor has a name here that the config asks for, or is a counter.
        let ours: HashMap<&str, &str> = renamed.iter().map(|(a, b)| (a.as_str(), b.as_str())).collect();
        let mut wanted = config.other_tensors();
        wanted.extend(config.linears().into_iter().map(|l| (format!("{}.weight", l.module), l.shape)));
        for (name, shape) in &tensors {
            let ours = ours[name.as_str()];
            let found = wanted.iter().any(|(w, s)| w == ours && s == shape);
            assert!(found || ours.ends_with(".num_batches_tracked"), "{name}: {ours}");
        }
        // One tensor more, or of another shape (a wider network), is another architecture.
        let mut other = tensors.clone();
        other.insert("layer1.0.se.fc1.weight".into(), vec![4, 64, 1, 1]);
        assert!(detect(&other).is_none());
        let mut other = tensors.clone();
        other.insert("fc.weight".into(), vec![0, 512]);
        assert!(detect(&other).is_none());
        let mut other = tensors;
        other.insert("layer2.0.conv2.weight".into(), vec![256, 4, 3, 3]);
        assert!(detect(&other).is_none());
    }
}

/// The tensors of MobileNetV2 in torchvision or timm, from what both build: (expansion, channels, blocks, stride) of each stage.
fn mobilenet_file(timm: bool, multiplier: f64) -> HashMap<String, Vec<usize>> {
    let width = |n: usize| {
        let exact = n as f64 * multiplier;
        let near = ((exact + 4.0) as usize / 8 * 8).max(8);
        if (near as f64) < 0.9 * exact { near + 8 } else { near }
    };
    let mut out = HashMap::new();
    let mut pair = |conv: String, norm: String, shape: [usize; 4]| {
        for part in NORM_PARTS {
            out.insert(format!("{norm}.{part}"), vec![shape[0]]);
        }
        out.insert(format!("{norm}.num_batches_tracked"), vec![]);
        out.insert(format!("{conv}.weight"), shape.to_vec());
    };
    let mut c = width(32);
    let [stem, norm] = if timm { ["conv_stem", "bn1"] } else { ["features.0.0", "features.0.1"] };
    pair(stem.into(), norm.into(), [c, 3, 3, 3]);
    let mut index = 1;
    let stages = [(1, 16, 1), (6, 24, 2), (6, 32, 3), (6, 64, 4), (6, 96, 3), (6, 160, 3), (6, 320, 1)];
    for (stage, (expand, n, blocks)) in stages.into_iter().enumerate() {
        for b in 0..blocks {
            let (n, hidden) = (width(n), c * expand);
            let block = if timm { format!("blocks.{stage}.{b}") } else { format!("features.{index}.conv") };
            let parts: [(&str, &str, [usize; 4]); 3] = match (timm, expand) {
                (false, 1) => [("", "", [0; 4]), ("0.0", "0.1", [hidden, 1, 3, 3]), ("1", "2", [n, hidden, 1, 1])],
                (false, _) => [
                    ("0.0", "0.1", [hidden, c, 1, 1]),
                    ("1.0", "1.1", [hidden, 1, 3, 3]),
                    ("2", "3", [n, hidden, 1, 1]),
                ],
                (true, 1) => {
                    [("", "", [0; 4]), ("conv_dw", "bn1", [hidden, 1, 3, 3]), ("conv_pw", "bn2", [n, hidden, 1, 1])]
                }
                (true, _) => [
                    ("conv_pw", "bn1", [hidden, c, 1, 1]),
                    ("conv_dw", "bn2", [hidden, 1, 3, 3]),
                    ("conv_pwl", "bn3", [n, hidden, 1, 1]),
                ],
            };
            for (conv, norm, shape) in parts.into_iter().filter(|p| !p.0.is_empty()) {
                pair(format!("{block}.{conv}"), format!("{block}.{norm}"), shape);
            }
            (c, index) = (n, index + 1);
        }
    }
    let head = width(1280).max(1280);
    let [last, norm, classifier] =
        if timm { ["conv_head", "bn2", "classifier"] } else { ["features.18.0", "features.18.1", "classifier.1"] };
    pair(last.into(), norm.into(), [head, c, 1, 1]);
    out.insert(format!("{classifier}.weight"), vec![1000, head]);
    out.insert(format!("{classifier}.bias"), vec![1000]);
    out
}

#[test]
fn mobilenets_of_torchvision_and_timm_are_told_by_their_tensors() {
    for timm in [false, true] {
        for (multiplier, count) in [(1.0, 3_504_872), (1.4, 6_108_776), (0.75, 2_636_424), (0.5, 1_968_680)] {
            let tensors = mobilenet_file(timm, multiplier);
            let (config, renamed) = detect(&tensors).unwrap();
            assert_eq!((parameters(&config), config.norm_eps), (count, 1e-5));
            let ImageFamily::MobileNetV2(m) = &config.family else { panic!("{config:?}") };
            assert!(m.depth_multiplier == multiplier && !m.tf_padding);
            assert_eq!(renamed.len(), tensors.len());
        }
        // Its first block adds its input, which transformers' does not.
        assert!(detect(&mobilenet_file(timm, 0.1)).is_none());
    }
}
