//! ResNet as transformers lays it out (`ResNetForImageClassification`): stages of basic blocks or bottlenecks. Not dsq's own small
//! network for training (see `config/resnet.rs`).

use super::{Activation, ConvLayer, ImageConfig, MAX_CHANNELS, Padding, Pool};
use crate::CheckpointError;
use crate::config::fields::{Fields, show};
use serde_json::{Map, Value, json};

/// `model_type` in `config.json`.
pub(super) const MODEL_TYPE: &str = "resnet";
/// PyTorch's default, which no config has as a key.
pub(super) const NORM_EPS: f32 = 1e-5;
/// A bottleneck's inner channels are its outputs over this.
const REDUCTION: usize = 4;
/// Most blocks of all stages together; ResNet-152 has 50.
const MAX_BLOCKS: usize = 4096;

/// What a config says of the stages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Residual {
    /// Channels of the stem: a 7x7 convolution with stride 2.
    pub embedding_size: usize,
    /// Channels that each stage gives.
    pub hidden_sizes: Vec<usize>,
    /// Blocks of each stage.
    pub depths: Vec<usize>,
    /// Whether a block is 1x1, 3x3, 1x1, and not 3x3, 3x3.
    pub bottleneck: bool,
    /// Whether the first stage has stride 2 too.
    pub downsample_in_first_stage: bool,
    /// Whether the stride of a bottleneck is that of its first 1x1, as in the paper, and not of its 3x3 (torchvision's v1.5).
    pub downsample_in_bottleneck: bool,
}

impl Residual {
    pub(super) fn from_fields(f: &Fields) -> Result<Self, CheckpointError> {
        let sizes = |key: &'static str, default: &[usize], most: usize| -> Result<Vec<usize>, CheckpointError> {
            let Some(list) = f.list(key)? else { return Ok(default.to_vec()) };
            let one = |v: &Value| {
                let n = v.as_u64().filter(|n| (1..=most as u64).contains(n));
                n.map(|n| n as usize)
                    .ok_or_else(|| f.error(key, format!("expected integers from 1 to {most}, got {}", show(v))))
            };
            list.iter().map(one).collect()
        };
        let hidden_sizes = sizes("hidden_sizes", &[256, 512, 1024, 2048], MAX_CHANNELS)?;
        let depths = sizes("depths", &[3, 4, 6, 3], MAX_BLOCKS)?;
        if depths.is_empty() || depths.len() != hidden_sizes.len() {
            let problem =
                format!("expected one for each of the {} hidden_sizes, got {}", hidden_sizes.len(), depths.len());
            return Err(f.error("depths", problem));
        }
        let blocks: usize = depths.iter().sum();
        if blocks > MAX_BLOCKS {
            return Err(f.error("depths", format!("expected at most {MAX_BLOCKS} blocks in all, got {blocks}")));
        }
        let bottleneck = match f.string("layer_type")?.unwrap_or("bottleneck") {
            "bottleneck" => true,
            "basic" => false,
            other => return Err(f.error("layer_type", format!("expected basic or bottleneck, got {other}"))),
        };
        if let (true, Some(few)) = (bottleneck, hidden_sizes.iter().find(|n| **n < REDUCTION)) {
            return Err(f.error("hidden_sizes", format!("expected at least {REDUCTION} for a bottleneck, got {few}")));
        }
        f.only("hidden_act", &json!("relu"), "the only activation that dsq has for it")?;
        // What a backbone gives to other models; a classifier does not look at it.
        for key in ["out_features", "out_indices", "stage_names"] {
            f.get(key);
        }
        Ok(Self {
            embedding_size: f.integer("embedding_size", 1..=MAX_CHANNELS as i64)?.map_or(64, |n| n as usize),
            hidden_sizes,
            depths,
            bottleneck,
            downsample_in_first_stage: f.boolean("downsample_in_first_stage")?.unwrap_or(false),
            downsample_in_bottleneck: f.boolean("downsample_in_bottleneck")?.unwrap_or(false),
        })
    }

    pub(super) fn to_json(&self) -> Map<String, Value> {
        let mut map = Map::new();
        for (key, value) in [
            ("embedding_size", json!(self.embedding_size)),
            ("hidden_sizes", json!(self.hidden_sizes)),
            ("depths", json!(self.depths)),
            ("layer_type", json!(if self.bottleneck { "bottleneck" } else { "basic" })),
            ("hidden_act", json!("relu")),
            ("downsample_in_first_stage", json!(self.downsample_in_first_stage)),
            ("downsample_in_bottleneck", json!(self.downsample_in_bottleneck)),
        ] {
            map.insert(key.into(), value);
        }
        map
    }

    /// `ResNet-50` by the count of its layers with weights, as the paper does.
    pub(super) fn title(&self) -> String {
        let each = if self.bottleneck { 3 } else { 2 };
        format!("ResNet-{}", each * self.depths.iter().sum::<usize>() + 2)
    }

    pub(super) fn layers(&self, config: &ImageConfig) -> Vec<ConvLayer> {
        let conv = |name: String, shape: [usize; 4], stride: usize| ConvLayer {
            padding: Padding::Half,
            activation: Some(Activation::Relu),
            ..ConvLayer::plain(format!("{name}.convolution"), format!("{name}.normalization"), shape, stride)
        };
        let stem = [self.embedding_size, config.channels, 7, 7];
        let mut out = vec![conv("resnet.embedder.embedder".into(), stem, 2)];
        let mut width = self.embedding_size;
        for (s, (&n, &depth)) in self.hidden_sizes.iter().zip(&self.depths).enumerate() {
            for b in 0..depth {
                let block = format!("resnet.encoder.stages.{s}.layers.{b}");
                let stride = if b == 0 && (s > 0 || self.downsample_in_first_stage) { 2 } else { 1 };
                let first = out.len();
                // In front of the others, so that the new skip is there when it is added.
                if stride != 1 || width != n {
                    let layer = conv(format!("{block}.shortcut"), [n, width, 1, 1], stride);
                    out.push(ConvLayer { activation: None, on_skip: true, ..layer });
                }
                let inner = n / REDUCTION;
                let [early, late] = if self.downsample_in_bottleneck { [stride, 1] } else { [1, stride] };
                let parts = match self.bottleneck {
                    true => vec![([inner, width, 1], early), ([inner, inner, 3], late), ([n, inner, 1], 1)],
                    false => vec![([n, width, 3], stride), ([n, n, 3], 1)],
                };
                for (i, ([n, c, kernel], stride)) in parts.into_iter().enumerate() {
                    out.push(conv(format!("{block}.layer.{i}"), [n, c, kernel, kernel], stride));
                }
                out[first].starts_block = true;
                if let Some(last) = out.last_mut() {
                    last.adds_skip = true;
                }
                width = n;
            }
        }
        if let Some(behind_stem) = out.get_mut(1) {
            behind_stem.pool = Some(Pool::Max);
        }
        out.push(ConvLayer::classifier("classifier.1", config.num_classes, width));
        out
    }
}
