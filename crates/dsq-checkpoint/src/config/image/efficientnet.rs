//! EfficientNet-Lite0 as the Python package `efficientnet-lite-pytorch` lays it out: its table of layers, its tensor names,
//! what its input is. Not a forward pass, and no other EfficientNet.

use super::preparation::short;
use super::{ConvLayer, Filter, ImageConfig, ImageFamily, Preparation, Resize};
use crate::CheckpointError;
use crate::config::fields::Fields;
use serde_json::{Value, json};

/// One run of blocks: how many, side of the depthwise kernel, stride of the first, expansion, input and output channels.
type Stage = (usize, usize, usize, usize, usize, usize);

/// The stages of Lite0 (Tan and Le, arXiv:1905.11946, without squeeze-and-excitation).
const STAGES: [Stage; 7] = [
    (1, 3, 1, 1, 32, 16),
    (2, 3, 2, 6, 16, 24),
    (2, 5, 2, 6, 24, 40),
    (3, 3, 2, 6, 40, 80),
    (3, 5, 1, 6, 80, 112),
    (4, 5, 2, 6, 112, 192),
    (1, 3, 1, 6, 192, 320),
];
/// Channels of the stem and of the layer before the classifier.
const STEM: usize = 32;
const HEAD: usize = 1280;
/// Channels of the picture.
const COLOURS: usize = 3;
/// Its `model_type` in `config.json`.
pub(super) const MODEL_TYPE: &str = "efficientnet_lite0";

impl ImageConfig {
    /// `model_type` of EfficientNet-Lite0.
    pub const EFFICIENTNET: &'static str = MODEL_TYPE;

    /// EfficientNet-Lite0 for pictures of `side` pixels: 0.001 as epsilon, pictures as its TensorFlow original is given them (pixels
    /// less 127 over 128, a central crop of 224/256).
    pub fn efficientnet_lite0(side: usize, num_classes: usize) -> Self {
        Self::efficientnet_of(side, num_classes, [127.0, 128.0, 0.875])
    }

    fn efficientnet_of(side: usize, num_classes: usize, [mean, std, crop]: [f32; 3]) -> Self {
        Self {
            family: ImageFamily::EfficientNetLite0,
            channels: COLOURS,
            num_classes,
            labels: None,
            norm_eps: 1e-3,
            batch_norm: true,
            channel_clip: false,
            preparation: Preparation {
                size: [side; 2],
                resize: Resize::Square(crop),
                filter: Filter::Bicubic,
                rescale: 1.0,
                mean: vec![mean; COLOURS],
                std: vec![std; COLOURS],
            },
        }
    }

    pub(in crate::config) fn efficientnet_from_fields(f: &Fields) -> Result<Self, CheckpointError> {
        let number = |key: &'static str, range: std::ops::RangeInclusive<f64>| {
            let v = f.required(key, f.number(key))?;
            if !range.contains(&v) {
                let what = format!("expected {} to {}, got {v}", range.start(), range.end());
                return Err(f.error(key, what));
            }
            Ok(v as f32)
        };
        let side = f.required("image_size", f.integer("image_size", 32..=4096))? as usize;
        let num_classes = f.required("num_classes", f.size("num_classes"))?;
        let norm_eps = number("norm_eps", 1e-12..=1.0)?;
        let input = [number("mean", 0.0..=255.0)?, number("std", 1e-3..=1e6)?, number("crop", 0.1..=1.0)?];
        let config = Self {
            norm_eps,
            batch_norm: f.required("batch_norm", f.boolean("batch_norm"))?,
            channel_clip: f.required("channel_clip", f.boolean("channel_clip"))?,
            ..Self::efficientnet_of(side, num_classes, input)
        };
        f.refuse_the_rest(&["quantization_config", "torch_dtype", "dtype"])?;
        Ok(config)
    }

    /// The config of a PyTorch file with these tensors (name and shape); `None` when it is no EfficientNet-Lite0. Only the
    /// number of classes is read off; the rest is what the package's model has.
    pub(super) fn detect_efficientnet(shape: &dyn Fn(&str) -> Option<Vec<usize>>) -> Option<Self> {
        let fc = shape("_fc.weight")?;
        let all = Self::efficientnet_lite0(224, *fc.first()?);
        let same = |l: &ConvLayer| shape(&format!("{}.weight", l.module)).is_some_and(|s| s == l.stored_shape());
        (fc.len() == 2 && (1..=1 << 20).contains(&fc[0]) && all.layers().iter().all(same)).then_some(all)
    }

    pub(super) fn efficientnet_json(&self) -> Value {
        let p = &self.preparation;
        let first = |xs: &[f32]| short(xs.first().copied().unwrap_or_default());
        let crop = if let Resize::Square(share) = p.resize { share } else { 1.0 };
        json!({
            "model_type": MODEL_TYPE,
            "image_size": p.size[0],
            "num_classes": self.num_classes,
            "norm_eps": short(self.norm_eps),
            "mean": first(&p.mean),
            "std": first(&p.std),
            "crop": short(crop),
            "batch_norm": self.batch_norm,
            "channel_clip": self.channel_clip,
        })
    }

    pub(super) fn efficientnet_layers(&self) -> Vec<ConvLayer> {
        let plain = ConvLayer::plain;
        let mut out = vec![plain("_conv_stem".into(), "_bn0".into(), [STEM, COLOURS, 3, 3], 2)];
        let mut index = 0;
        for (count, kernel, first_stride, expand, first_in, n) in STAGES {
            for b in 0..count {
                let (c, stride) = if b == 0 { (first_in, first_stride) } else { (n, 1) };
                let (block, hidden) = (format!("_blocks.{index}"), c * expand);
                let name = |part: &str| format!("{block}.{part}");
                if expand != 1 {
                    let layer = plain(name("_expand_conv"), name("_bn0"), [hidden, c, 1, 1], 1);
                    out.push(ConvLayer { starts_block: true, ..layer });
                }
                let layer = plain(name("_depthwise_conv"), name("_bn1"), [hidden, 1, kernel, kernel], stride);
                out.push(ConvLayer { depthwise: true, starts_block: expand == 1, ..layer });
                let layer = plain(name("_project_conv"), name("_bn2"), [n, hidden, 1, 1], 1);
                out.push(ConvLayer { activation: None, adds_skip: stride == 1 && c == n, ..layer });
                index += 1;
            }
        }
        let last = STAGES[STAGES.len() - 1].5;
        out.push(plain("_conv_head".into(), "_bn1".into(), [HEAD, last, 1, 1], 1));
        out.push(ConvLayer::classifier("_fc", self.num_classes, HEAD));
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_table_has_49_batch_norms_and_the_published_size() {
        let config = ImageConfig::efficientnet_lite0(224, 1000);
        let layers = config.layers();
        assert_eq!(layers.iter().filter(|l| l.norm.is_some()).count(), 49);
        assert_eq!(layers.len(), 50);
        let weights: usize = layers.iter().map(|l| l.shape.iter().product::<usize>()).sum();
        let norms: usize = layers.iter().filter(|l| l.norm.is_some()).map(|l| 2 * l.shape[0]).sum();
        // 4,652,008 trained parameters, the number that the TensorFlow original gives for Lite0.
        assert_eq!(weights + norms + 1000, 4_652_008);
        // Every block's channels fit the one before it.
        let mut width = COLOURS;
        for l in &layers {
            assert_eq!(l.inputs(), width, "{}", l.module);
            width = l.shape[0];
        }
        assert_eq!(layers.iter().filter(|l| l.adds_skip).count(), 9);
    }

    #[test]
    fn the_config_survives_json_and_bad_values_are_named() {
        let config = ImageConfig { batch_norm: false, ..ImageConfig::efficientnet_lite0(64, 1000) };
        let text = config.to_json().to_string();
        let read = |text: &str| crate::ModelConfig::from_json(text, Path::new("config.json"));
        assert_eq!(read(&text).unwrap(), crate::ModelConfig::Image(config));
        for (from, to, key) in [
            ("\"image_size\":64", "\"image_size\":8", "image_size"),
            ("\"crop\":0.875", "\"crop\":2", "crop"),
            ("\"std\":128.0", "\"std\":0", "std"),
            ("\"batch_norm\":false", "\"batch_norm\":1", "batch_norm"),
            ("\"batch_norm\":false", "\"batch_norm\":false,\"se_ratio\":0.25", "se_ratio"),
        ] {
            assert!(text.contains(from), "{text}");
            let e = read(&text.replace(from, to)).unwrap_err().to_string();
            assert!(e.contains(key), "{e}");
        }
    }

    #[test]
    fn only_lite0_is_detected() {
        let all = ImageConfig::efficientnet_lite0(224, 7);
        let shapes: std::collections::HashMap<String, Vec<usize>> =
            all.layers().iter().map(|l| (format!("{}.weight", l.module), l.stored_shape())).collect();
        let found = ImageConfig::detect_efficientnet(&|n| shapes.get(n).cloned());
        assert_eq!(found, Some(all));
        let mut other = shapes.clone();
        other.insert("_blocks.3._depthwise_conv.weight".into(), vec![144, 1, 3, 3]);
        assert_eq!(ImageConfig::detect_efficientnet(&|n| other.get(n).cloned()), None);
    }
}
