//! The config of dsq's own residual network for small images (CIFAR-style ResNet-8, -20, ...).

use super::LinearSpec;
use super::fields::{Fields, show};
use crate::CheckpointError;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// Architecture of the residual network: a 3x3 stem, stages of basic blocks (two 3x3 convolutions; the first block of
/// every stage but the first has stride 2), global average pooling, one linear layer. A 1x1 `downsample` convolution
/// stands where the shape changes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ResNetConfig {
    /// Channels of the image.
    pub in_channels: usize,
    /// Height and width of the image.
    pub image_size: usize,
    /// Channels of each stage; the stem gives `channels[0]`.
    pub channels: Vec<usize>,
    /// Basic blocks in a stage.
    pub blocks_per_stage: usize,
    /// Classes.
    pub num_classes: usize,
    /// Epsilon of batch norm (before folding).
    pub norm_eps: f32,
    /// Mean of the input, one a channel, in units of pixels / 255.
    pub mean: Vec<f32>,
    /// Standard deviation of the input, one a channel.
    pub std: Vec<f32>,
}

impl ResNetConfig {
    /// `model_type` in `config.json`.
    pub const MODEL_TYPE: &'static str = "dsq_resnet";

    pub(super) fn from_fields(f: &Fields) -> Result<Self, CheckpointError> {
        let in_channels = f.required("in_channels", f.size("in_channels"))?;
        let list = f.required("channels", f.list("channels"))?;
        let channels = list
            .iter()
            .map(|v| {
                v.as_u64()
                    .filter(|c| (1..=1 << 20).contains(c))
                    .map(|c| c as usize)
                    .ok_or_else(|| f.error("channels", format!("expected integers of at least 1, got {}", show(v))))
            })
            .collect::<Result<Vec<_>, _>>()?;
        if channels.is_empty() || channels.len() > 16 {
            return Err(f.error("channels", format!("expected 1 to 16 stages, got {}", channels.len())));
        }
        let numbers = |key: &'static str| {
            let list = f.required(key, f.list(key))?;
            let xs = list
                .iter()
                .map(|v| {
                    v.as_f64()
                        .map(|x| x as f32)
                        .filter(|x| x.is_finite())
                        .ok_or_else(|| f.error(key, format!("expected numbers, got {}", show(v))))
                })
                .collect::<Result<Vec<_>, _>>()?;
            if xs.len() != in_channels {
                return Err(f.error(key, format!("expected in_channels = {in_channels} numbers, got {}", xs.len())));
            }
            Ok(xs)
        };
        let (mean, std) = (numbers("mean")?, numbers("std")?);
        if let Some(bad) = std.iter().find(|s| **s <= 0.0) {
            return Err(f.error("std", format!("expected positive numbers, got {bad}")));
        }
        let norm_eps = f.required("norm_eps", f.number("norm_eps"))? as f32;
        if !(norm_eps > 0.0 && norm_eps < 1.0) {
            return Err(f.error("norm_eps", format!("expected a small positive number, got {norm_eps}")));
        }
        let config = Self {
            in_channels,
            image_size: f.required("image_size", f.size("image_size"))?,
            channels,
            blocks_per_stage: f.required("blocks_per_stage", f.size("blocks_per_stage"))?,
            num_classes: f.required("num_classes", f.size("num_classes"))?,
            norm_eps,
            mean,
            std,
        };
        f.refuse_the_rest(&["quantization_config", "torch_dtype", "dtype"])?;
        if config.blocks_per_stage > 1024 {
            let what = format!("expected at most 1024, got {}", config.blocks_per_stage);
            return Err(f.error("blocks_per_stage", what));
        }
        Ok(config)
    }

    /// The keys of `config.json`.
    pub fn to_json(&self) -> Value {
        let short = |x: f32| x.to_string().parse::<f64>().unwrap_or_else(|_| f64::from(x));
        let list = |xs: &[f32]| xs.iter().map(|&x| short(x)).collect::<Vec<_>>();
        json!({
            "model_type": Self::MODEL_TYPE,
            "in_channels": self.in_channels,
            "image_size": self.image_size,
            "channels": self.channels,
            "blocks_per_stage": self.blocks_per_stage,
            "num_classes": self.num_classes,
            "norm_eps": short(self.norm_eps),
            "mean": list(&self.mean),
            "std": list(&self.std),
        })
    }

    /// Pixels `[m, c, h, w]` as the network's input: `(pixel / 255 - mean) / std` of the channel. Training and the runtime
    /// both call this, so that they see the same bits. Pixels behind the last whole picture are left out.
    pub fn normalize(&self, pixels: &[u8]) -> Vec<f32> {
        let plane = self.image_size * self.image_size;
        let channels = || self.mean.iter().zip(&self.std);
        pixels
            .chunks_exact((plane * self.in_channels).max(1))
            .flat_map(|picture| picture.chunks(plane.max(1)).zip(channels()))
            .flat_map(|(plane, (mean, std))| plane.iter().map(move |&p| (f32::from(p) / 255.0 - mean) / std))
            .collect()
    }

    pub(super) fn linears(&self) -> Vec<LinearSpec> {
        let conv = |module: String, out: usize, input: usize, side: usize| LinearSpec {
            module,
            shape: vec![out, input, side, side],
        };
        let mut width = self.channels[0];
        let mut out = vec![conv("conv1".into(), width, self.in_channels, 3)];
        for (s, &c) in self.channels.iter().enumerate() {
            for b in 0..self.blocks_per_stage {
                let block = format!("layer{}.{b}", s + 1);
                out.push(conv(format!("{block}.conv1"), c, width, 3));
                out.push(conv(format!("{block}.conv2"), c, c, 3));
                if b == 0 && (s > 0 || width != c) {
                    out.push(conv(format!("{block}.downsample"), c, width, 1));
                }
                width = c;
            }
        }
        out.push(LinearSpec { module: "fc".into(), shape: vec![self.num_classes, width] });
        out
    }
}
