//! MobileNetV2 as transformers lays it out (`MobileNetV2ForImageClassification`): the channels for a depth multiplier, the layers.
//! Not its segmentation model, nor dilated convolutions (an `output_stride` below 32).

use super::{Activation, ConvLayer, ImageConfig, MAX_CHANNELS, MAX_SIDE, Padding};
use crate::CheckpointError;
use crate::config::fields::{Fields, show};
use serde_json::{Map, Value, json};

/// `model_type` in `config.json`.
pub(super) const MODEL_TYPE: &str = "mobilenet_v2";

/// Channels behind the stem and behind each of the 16 inverted residuals, before the multiplier.
const CHANNELS: [usize; 17] = [16, 24, 24, 32, 32, 32, 64, 64, 64, 64, 96, 96, 96, 160, 160, 160, 320];
/// Stride of each inverted residual.
const STRIDES: [usize; 16] = [2, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1, 2, 1, 1, 1];
/// Channels of the first convolution and of the last, before the multiplier.
const STEM: usize = 32;
const HEAD: usize = 1280;

/// What a config says of the channels and the padding.
#[derive(Debug, Clone, PartialEq)]
pub struct MobileNet {
    /// Factor of all channels.
    pub depth_multiplier: f64,
    /// Channels are multiples of this.
    pub depth_divisible_by: usize,
    /// Least channels of a layer.
    pub min_depth: usize,
    /// Inner channels of an inverted residual over its inputs.
    pub expand_ratio: f64,
    /// Whether the stem has no 1x1 convolution behind its first one.
    pub first_layer_is_expansion: bool,
    /// Whether the last convolution keeps its 1,280 channels under a multiplier below 1.
    pub finegrained_output: bool,
    /// Whether activations are ReLU6, and not ReLU.
    pub relu6: bool,
    /// Whether padding is TensorFlow's, and not PyTorch's.
    pub tf_padding: bool,
}

impl Default for MobileNet {
    /// What transformers takes for absent keys: the models of TensorFlow.
    fn default() -> Self {
        Self {
            depth_multiplier: 1.0,
            depth_divisible_by: 8,
            min_depth: 8,
            expand_ratio: 6.0,
            first_layer_is_expansion: true,
            finegrained_output: true,
            relu6: true,
            tf_padding: true,
        }
    }
}

impl MobileNet {
    /// The keys of the architecture; also the epsilon of batch norm and the size of a picture.
    pub(super) fn from_fields(f: &Fields) -> Result<(Self, f32, [usize; 2]), CheckpointError> {
        let number = |key: &'static str, default: f64, range: std::ops::RangeInclusive<f64>| {
            let v = f.number(key)?.unwrap_or(default);
            match range.contains(&v) {
                true => Ok(v),
                false => Err(f.error(key, format!("expected {} to {}, got {v}", range.start(), range.end()))),
            }
        };
        let count = |key: &'static str| f.integer(key, 1..=1 << 12).map(|n| n.map_or(8, |n| n as usize));
        let relu6 = match f.string("hidden_act")?.unwrap_or("relu6") {
            "relu6" => true,
            "relu" => false,
            other => return Err(f.error("hidden_act", format!("expected relu6 or relu, got {other}"))),
        };
        f.only("output_stride", &json!(32), "dsq has no dilated convolutions, which a smaller one asks for")?;
        // Dropout and what only segmentation looks at.
        for key in ["classifier_dropout_prob", "semantic_loss_ignore_index"] {
            f.get(key);
        }
        let out = Self {
            depth_multiplier: number("depth_multiplier", 1.0, 0.01..=64.0)?,
            depth_divisible_by: count("depth_divisible_by")?,
            min_depth: count("min_depth")?,
            expand_ratio: number("expand_ratio", 6.0, 0.01..=64.0)?,
            first_layer_is_expansion: f.boolean("first_layer_is_expansion")?.unwrap_or(true),
            finegrained_output: f.boolean("finegrained_output")?.unwrap_or(true),
            relu6,
            tf_padding: f.boolean("tf_padding")?.unwrap_or(true),
        };
        let eps = number("layer_norm_eps", 1e-3, 1e-12..=1.0)? as f32;
        let side = |v: &Value| {
            let n = v.as_i64().filter(|n| (1..=MAX_SIDE).contains(n)).map(|n| n as usize);
            n.ok_or_else(|| f.error("image_size", format!("expected sizes from 1 to {MAX_SIDE}, got {}", show(v))))
        };
        let size = match f.get("image_size") {
            None => [224; 2],
            Some(Value::Array(list)) if list.len() == 2 => [side(&list[0])?, side(&list[1])?],
            Some(one) => [side(one)?; 2],
        };
        Ok((out, eps, size))
    }

    pub(super) fn to_json(&self, config: &ImageConfig) -> Map<String, Value> {
        let [h, w] = config.preparation.size;
        let mut map = Map::new();
        for (key, value) in [
            ("image_size", if h == w { json!(h) } else { json!([h, w]) }),
            ("depth_multiplier", json!(self.depth_multiplier)),
            ("depth_divisible_by", json!(self.depth_divisible_by)),
            ("min_depth", json!(self.min_depth)),
            ("expand_ratio", json!(self.expand_ratio)),
            ("output_stride", json!(32)),
            ("first_layer_is_expansion", json!(self.first_layer_is_expansion)),
            ("finegrained_output", json!(self.finegrained_output)),
            ("hidden_act", json!(if self.relu6 { "relu6" } else { "relu" })),
            ("tf_padding", json!(self.tf_padding)),
            ("layer_norm_eps", json!(super::preparation::short(config.norm_eps))),
        ] {
            map.insert(key.into(), value);
        }
        map
    }

    /// Channels near `exact` that `depth_divisible_by` divides, not below nine tenths of it (TensorFlow's `make_divisible`).
    fn divisible(&self, exact: f64) -> usize {
        // `round` of Python: a half goes to the even number.
        let (n, by) = (exact.round_ties_even() as usize, self.depth_divisible_by);
        let near = ((2 * n + by) / 2 / by * by).max(self.min_depth);
        let near = if (near as f64) < 0.9 * n as f64 { near + by } else { near };
        near.min(MAX_CHANNELS)
    }

    fn channels(&self, n: usize) -> usize {
        self.divisible(n as f64 * self.depth_multiplier)
    }

    pub(super) fn layers(&self, config: &ImageConfig) -> Vec<ConvLayer> {
        let activation = Some(if self.relu6 { Activation::Relu6 } else { Activation::Relu });
        let padding = if self.tf_padding { Padding::Same } else { Padding::Half };
        let conv = |name: &str, shape: [usize; 4], stride: usize| ConvLayer {
            padding,
            activation,
            ..ConvLayer::plain(
                format!("mobilenet_v2.{name}.convolution"),
                format!("mobilenet_v2.{name}.normalization"),
                shape,
                stride,
            )
        };
        let depthwise = |name: &str, n: usize, stride: usize| ConvLayer {
            depthwise: true,
            ..conv(&format!("{name}.conv_3x3"), [n, 1, 3, 3], stride)
        };
        let reduce = |name: &str, n: usize, c: usize| ConvLayer {
            activation: None,
            ..conv(&format!("{name}.reduce_1x1"), [n, c, 1, 1], 1)
        };
        let (stem, mut width) = (self.channels(STEM), self.channels(CHANNELS[0]));
        let mut out = vec![conv("conv_stem.first_conv", [stem, config.channels, 3, 3], 2)];
        if !self.first_layer_is_expansion {
            out.push(conv("conv_stem.expand_1x1", [stem, stem, 1, 1], 1));
        }
        out.push(depthwise("conv_stem", stem, 1));
        out.push(reduce("conv_stem", width, stem));
        for (i, (&n, &stride)) in CHANNELS[1..].iter().zip(&STRIDES).enumerate() {
            let (name, n, inner) =
                (format!("layer.{i}"), self.channels(n), self.divisible(width as f64 * self.expand_ratio));
            let expand = conv(&format!("{name}.expand_1x1"), [inner, width, 1, 1], 1);
            out.push(ConvLayer { starts_block: true, ..expand });
            out.push(depthwise(&name, inner, stride));
            out.push(ConvLayer { adds_skip: stride == 1 && width == n, ..reduce(&name, n, inner) });
            width = n;
        }
        let head = if self.finegrained_output && self.depth_multiplier < 1.0 { HEAD } else { self.channels(HEAD) };
        out.push(conv("conv_1x1", [head, width, 1, 1], 1));
        out.push(ConvLayer::classifier("classifier", config.num_classes, head));
        out
    }
}
