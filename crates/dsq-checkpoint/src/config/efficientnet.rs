//! EfficientNet-Lite0 as the Python package `efficientnet-lite-pytorch` lays it out: its table of layers, its tensor names,
//! what its input is. Not a forward pass, and no other EfficientNet.

use super::LinearSpec;
use super::fields::Fields;
use crate::CheckpointError;
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

/// What is not fixed by the name of the architecture.
#[derive(Debug, Clone, PartialEq)]
pub struct EfficientNetConfig {
    /// Height and width of the input.
    pub image_size: usize,
    /// Classes.
    pub num_classes: usize,
    /// Epsilon of batch norm (before folding).
    pub norm_eps: f32,
    /// The input is `(pixel - mean) / std`, pixels 0 to 255.
    pub mean: f32,
    /// See `mean`.
    pub std: f32,
    /// Share of the shorter side of a picture that its central square takes before it is resized.
    pub crop: f32,
    /// Whether the tensors of batch norm are there; without them every layer has a bias.
    pub batch_norm: bool,
    /// Whether ReLU6 clips each channel at a value of its own (`{module}.clip`) instead of 6: what equalisation makes of it.
    pub channel_clip: bool,
}

/// One convolution (the classifier is one over a single pixel) in forward order, with what is done around it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvLayer {
    /// Module name.
    pub module: String,
    /// Module name of its batch norm; none for the classifier.
    pub norm: Option<String>,
    /// `[n, c, kh, kw]`; `c` is 1 of a depthwise convolution.
    pub shape: [usize; 4],
    /// Stride; the padding is such that outputs are `ceil(input / stride)`, the odd pixel right and below.
    pub stride: usize,
    /// Whether output channel `j` reads input channel `j` alone.
    pub depthwise: bool,
    /// Whether ReLU6 follows.
    pub relu6: bool,
    /// Whether a block begins here, whose input is the skip of the layer that `adds_skip`.
    pub starts_block: bool,
    /// Whether the input of the block is added to the output.
    pub adds_skip: bool,
    /// Whether the input is the mean over all pixels.
    pub pools: bool,
}

impl Default for EfficientNetConfig {
    /// Lite0 for ImageNet: what its TensorFlow original is given (pixels less 127 over 128, a central crop of 224/256).
    fn default() -> Self {
        Self {
            image_size: 224,
            num_classes: 1000,
            norm_eps: 1e-3,
            mean: 127.0,
            std: 128.0,
            crop: 0.875,
            batch_norm: true,
            channel_clip: false,
        }
    }
}

impl EfficientNetConfig {
    /// `model_type` in `config.json`.
    pub const MODEL_TYPE: &'static str = "efficientnet_lite0";

    pub(super) fn from_fields(f: &Fields) -> Result<Self, CheckpointError> {
        let number = |key: &'static str, range: std::ops::RangeInclusive<f64>| {
            let v = f.required(key, f.number(key))?;
            if !range.contains(&v) {
                let what = format!("expected {} to {}, got {v}", range.start(), range.end());
                return Err(f.error(key, what));
            }
            Ok(v as f32)
        };
        let config = Self {
            image_size: f.required("image_size", f.integer("image_size", 32..=4096))? as usize,
            num_classes: f.required("num_classes", f.size("num_classes"))?,
            norm_eps: number("norm_eps", 1e-12..=1.0)?,
            mean: number("mean", 0.0..=255.0)?,
            std: number("std", 1e-3..=1e6)?,
            crop: number("crop", 0.1..=1.0)?,
            batch_norm: f.required("batch_norm", f.boolean("batch_norm"))?,
            channel_clip: f.required("channel_clip", f.boolean("channel_clip"))?,
        };
        f.refuse_the_rest(&["quantization_config", "torch_dtype", "dtype"])?;
        Ok(config)
    }

    /// The config of a PyTorch file with these tensors (name and shape); `None` when it is no EfficientNet-Lite0. Only the
    /// number of classes is read off; the rest is what the package's model has.
    pub(crate) fn detect(shape: impl Fn(&str) -> Option<Vec<usize>>) -> Option<Self> {
        let fc = shape("_fc.weight")?;
        let all = Self { num_classes: *fc.first()?, ..Self::default() };
        let same = |l: &ConvLayer| shape(&format!("{}.weight", l.module)).is_some_and(|s| s == l.stored_shape());
        (fc.len() == 2 && (1..=1 << 20).contains(&fc[0]) && all.layers().iter().all(same)).then_some(all)
    }

    /// The keys of `config.json`.
    pub fn to_json(&self) -> Value {
        let short = |x: f32| x.to_string().parse::<f64>().unwrap_or_else(|_| f64::from(x));
        json!({
            "model_type": Self::MODEL_TYPE,
            "image_size": self.image_size,
            "num_classes": self.num_classes,
            "norm_eps": short(self.norm_eps),
            "mean": short(self.mean),
            "std": short(self.std),
            "crop": short(self.crop),
            "batch_norm": self.batch_norm,
            "channel_clip": self.channel_clip,
        })
    }

    /// All layers in forward order.
    pub fn layers(&self) -> Vec<ConvLayer> {
        let plain = |module: String, norm: String, shape: [usize; 4], stride: usize| ConvLayer {
            module,
            norm: Some(norm),
            shape,
            stride,
            depthwise: false,
            relu6: true,
            starts_block: false,
            adds_skip: false,
            pools: false,
        };
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
                out.push(ConvLayer { relu6: false, adds_skip: stride == 1 && c == n, ..layer });
                index += 1;
            }
        }
        let last = STAGES[STAGES.len() - 1].5;
        out.push(plain("_conv_head".into(), "_bn1".into(), [HEAD, last, 1, 1], 1));
        let fc = plain("_fc".into(), String::new(), [self.num_classes, HEAD, 1, 1], 1);
        out.push(ConvLayer { norm: None, relu6: false, pools: true, ..fc });
        out
    }

    /// Pixels `[m, h, w, 3]` as the network's input. The calibration and the runtime both call this.
    pub fn normalize(&self, pixels: &[u8]) -> Vec<f32> {
        pixels.iter().map(|&p| (f32::from(p) - self.mean) / self.std).collect()
    }

    pub(super) fn linears(&self) -> Vec<LinearSpec> {
        let spec = |l: ConvLayer| LinearSpec { shape: l.stored_shape(), module: l.module };
        self.layers().into_iter().map(spec).collect()
    }

    /// Batch norms, or the biases that hold them once they are folded; clips.
    pub(super) fn other_tensors(&self) -> Vec<(String, Vec<usize>)> {
        let mut out = Vec::new();
        for l in self.layers() {
            match l.norm.filter(|_| self.batch_norm) {
                Some(norm) => {
                    out.extend(NORM_PARTS.map(|part| (format!("{norm}.{part}"), vec![l.shape[0]])));
                }
                None => out.push((format!("{}.bias", l.module), vec![l.shape[0]])),
            }
            if l.relu6 && self.channel_clip {
                out.push((format!("{}.clip", l.module), vec![l.shape[0]]));
            }
        }
        out
    }

    /// Whether a tensor is one that the forward pass has no use for: the counters of batch norm.
    pub(crate) fn is_counter(&self, name: &str) -> bool {
        self.batch_norm && name.ends_with(".num_batches_tracked")
    }
}

/// The tensors of a batch norm.
const NORM_PARTS: [&str; 4] = ["weight", "bias", "running_mean", "running_var"];

impl ConvLayer {
    /// The shape of the stored weight: `[n, c]` of the classifier.
    pub fn stored_shape(&self) -> Vec<usize> {
        let [n, c, kh, kw] = self.shape;
        if self.norm.is_none() { vec![n, c] } else { vec![n, c, kh, kw] }
    }

    /// Input channels.
    pub fn inputs(&self) -> usize {
        if self.depthwise { self.shape[0] } else { self.shape[1] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_table_has_49_batch_norms_and_the_published_size() {
        let config = EfficientNetConfig::default();
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
        let config = EfficientNetConfig { batch_norm: false, image_size: 64, ..EfficientNetConfig::default() };
        let text = config.to_json().to_string();
        let read = |text: &str| crate::ModelConfig::from_json(text, Path::new("config.json"));
        assert_eq!(read(&text).unwrap(), crate::ModelConfig::EfficientNet(config));
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
        let all = EfficientNetConfig { num_classes: 7, ..EfficientNetConfig::default() };
        let shapes: std::collections::HashMap<String, Vec<usize>> =
            all.layers().iter().map(|l| (format!("{}.weight", l.module), l.stored_shape())).collect();
        let found = EfficientNetConfig::detect(|n| shapes.get(n).cloned());
        assert_eq!(found, Some(all));
        let mut other = shapes.clone();
        other.insert("_blocks.3._depthwise_conv.weight".into(), vec![144, 1, 3, 3]);
        assert_eq!(EfficientNetConfig::detect(|n| other.get(n).cloned()), None);
    }
}
