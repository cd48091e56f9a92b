//! Residual networks and MobileNetV2 in PyTorch files: their config is read off names and shapes, and their tensors get the names of
//! a Hugging Face folder. Names are those of torchvision, and of timm where those differ. What no shape says (padding, epsilon, the
//! place of a stride, the preparation of pictures) is torchvision's. Not the reading of such files (see `pytorch/`).

use super::{
    ConvLayer, ImageConfig, ImageFamily, MAX_CHANNELS, MobileNet, NORM_PARTS, Preparation, Residual, residual,
};
use std::collections::HashSet;

/// Depth multipliers of published models. (Below 0.35 the stem has as many channels as the block behind it, to which torchvision and
/// timm then add its input, and transformers does not.)
const MULTIPLIERS: [f64; 9] = [1.0, 1.4, 1.3, 1.2, 1.1, 0.75, 0.5, 0.35, 2.0];
/// Inverted residuals of each stage, by which timm numbers them.
const STAGES: [usize; 6] = [2, 3, 4, 3, 3, 1];

/// The names of a layer's convolution and batch norm in a file, by its module here.
type Naming = fn(&[&str]) -> Option<(String, String)>;

/// See [`ImageConfig::detect`].
pub(super) fn detect(
    names: &[String],
    shape: &dyn Fn(&str) -> Option<Vec<usize>>,
) -> Option<(ImageConfig, Vec<(String, String)>)> {
    let config = |family, first: &[usize], classes: &[usize]| ImageConfig {
        family,
        channels: first[1],
        num_classes: classes[0],
        labels: None,
        norm_eps: residual::NORM_EPS,
        batch_norm: true,
        channel_clip: false,
        preparation: Preparation::imagenet([224; 2], first[1]),
    };
    let fits = |config: ImageConfig, naming| {
        let renamed = renamed(&config.layers(), naming, names, shape)?;
        Some((config, renamed))
    };
    let sized = |name: &str, dims: usize| {
        shape(name).filter(|s| s.len() == dims && s.iter().all(|d| (1..=MAX_CHANNELS).contains(d)))
    };
    let (four, two) = (|name: &str| sized(name, 4), |name: &str| sized(name, 2));
    if let (Some(first), Some(fc)) = (four("conv1.weight"), two("fc.weight")) {
        return fits(config(ImageFamily::ResNet(stages(&first, shape)?), &first, &fc), resnet as Naming);
    }
    let torchvision = ("features.0.0.weight", "classifier.1.weight", mobilenet as Naming);
    for (first, last, naming) in [torchvision, ("conv_stem.weight", "classifier.weight", mobilenet_timm)] {
        let (Some(first), Some(last)) = (four(first), two(last)) else { continue };
        for depth_multiplier in MULTIPLIERS {
            let family = MobileNet { depth_multiplier, tf_padding: false, ..MobileNet::default() };
            if let Some(found) = fits(config(ImageFamily::MobileNetV2(family), &first, &last), naming) {
                return Some(found);
            }
        }
    }
    None
}

/// Every tensor of the file by its name here; `None` where a layer is missing or has another shape, or where a tensor is left over.
fn renamed(
    layers: &[ConvLayer],
    naming: Naming,
    names: &[String],
    shape: &dyn Fn(&str) -> Option<Vec<usize>>,
) -> Option<Vec<(String, String)>> {
    let mut out = Vec::new();
    for layer in layers {
        let (conv, norm) = naming(&layer.module.split('.').collect::<Vec<_>>())?;
        shape(&format!("{conv}.weight")).filter(|s| *s == layer.stored_shape())?;
        out.push((format!("{conv}.weight"), format!("{}.weight", layer.module)));
        match &layer.norm {
            None => out.push((format!("{conv}.bias"), format!("{}.bias", layer.module))),
            Some(ours) => {
                let parts = NORM_PARTS.iter().chain(&["num_batches_tracked"]);
                out.extend(parts.map(|part| (format!("{norm}.{part}"), format!("{ours}.{part}"))));
            }
        }
    }
    let known: HashSet<&str> = out.iter().map(|(theirs, _)| theirs.as_str()).collect();
    names.iter().all(|n| known.contains(n.as_str())).then_some(out)
}

/// The stages that the tensors of a residual network make up.
fn stages(first: &[usize], shape: &dyn Fn(&str) -> Option<Vec<usize>>) -> Option<Residual> {
    let bottleneck = shape("layer1.0.conv3.weight").is_some();
    let last = if bottleneck { "conv3" } else { "conv2" };
    let (mut hidden_sizes, mut depths) = (Vec::new(), Vec::new());
    for stage in 1..=16 {
        let found = |block: usize| shape(&format!("layer{stage}.{block}.{last}.weight"));
        let Some(out) = found(0).and_then(|s| s.first().copied()) else { break };
        hidden_sizes.push(out);
        depths.push((1..1024).find(|&b| found(b).is_none())?);
    }
    let fits = !depths.is_empty() && hidden_sizes.iter().all(|n| (4..=MAX_CHANNELS).contains(n));
    fits.then_some(Residual {
        embedding_size: first[0],
        hidden_sizes,
        depths,
        bottleneck,
        downsample_in_first_stage: false,
        downsample_in_bottleneck: false,
    })
}

/// One more than a number in a name.
fn next(n: &str) -> Option<usize> {
    n.parse::<usize>().ok().map(|n| n + 1)
}

/// torchvision and timm.
fn resnet(module: &[&str]) -> Option<(String, String)> {
    Some(match *module {
        ["resnet", "embedder", ..] => ("conv1".into(), "bn1".into()),
        ["resnet", "encoder", "stages", s, "layers", b, "layer", i, _] => {
            let (block, i) = (format!("layer{}.{b}", next(s)?), next(i)?);
            (format!("{block}.conv{i}"), format!("{block}.bn{i}"))
        }
        ["resnet", "encoder", "stages", s, "layers", b, "shortcut", _] => {
            let block = format!("layer{}.{b}.downsample", next(s)?);
            (format!("{block}.0"), format!("{block}.1"))
        }
        _ => ("fc".into(), String::new()),
    })
}

/// torchvision: a sequence whose activations take numbers too.
fn mobilenet(module: &[&str]) -> Option<(String, String)> {
    let pair = |block: String, conv: &str, norm: &str| (format!("{block}.{conv}"), format!("{block}.{norm}"));
    Some(match *module {
        [_, "conv_stem", "first_conv", _] => pair("features.0".into(), "0", "1"),
        [_, "conv_stem", "conv_3x3", _] => pair("features.1.conv".into(), "0.0", "0.1"),
        [_, "conv_stem", "reduce_1x1", _] => pair("features.1.conv".into(), "1", "2"),
        [_, "layer", i, part, _] => {
            let block = format!("features.{}.conv", next(i)? + 1);
            match part {
                "expand_1x1" => pair(block, "0.0", "0.1"),
                "conv_3x3" => pair(block, "1.0", "1.1"),
                _ => pair(block, "2", "3"),
            }
        }
        [_, "conv_1x1", _] => pair("features.18".into(), "0", "1"),
        _ => ("classifier.1".into(), String::new()),
    })
}

/// timm: by stage and block.
fn mobilenet_timm(module: &[&str]) -> Option<(String, String)> {
    let pair = |conv: String, norm: String| (conv, norm);
    Some(match *module {
        [_, "conv_stem", "first_conv", _] => pair("conv_stem".into(), "bn1".into()),
        [_, "conv_stem", "conv_3x3", _] => pair("blocks.0.0.conv_dw".into(), "blocks.0.0.bn1".into()),
        [_, "conv_stem", "reduce_1x1", _] => pair("blocks.0.0.conv_pw".into(), "blocks.0.0.bn2".into()),
        [_, "layer", i, part, _] => {
            let (mut stage, mut at) = (1, i.parse::<usize>().ok()?);
            for count in STAGES {
                if at < count {
                    break;
                }
                (stage, at) = (stage + 1, at - count);
            }
            let block = format!("blocks.{stage}.{at}");
            match part {
                "expand_1x1" => pair(format!("{block}.conv_pw"), format!("{block}.bn1")),
                "conv_3x3" => pair(format!("{block}.conv_dw"), format!("{block}.bn2")),
                _ => pair(format!("{block}.conv_pwl"), format!("{block}.bn3")),
            }
        }
        [_, "conv_1x1", _] => pair("conv_head".into(), "bn2".into()),
        _ => pair("classifier".into(), String::new()),
    })
}
