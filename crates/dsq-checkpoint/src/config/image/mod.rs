//! Image models as one list of layers: what a convolution reads, what is done around it, what its tensors are called. EfficientNet-Lite0,
//! ResNet (He et al., arXiv:1512.03385) and MobileNetV2 (Sandler et al., arXiv:1801.04381) are such lists; the runtime, the
//! calibration, the float model and the ONNX graph follow them and know no architecture. Not a forward pass.

mod efficientnet;
mod mobilenet;
mod preparation;
mod residual;
mod torch;

pub use mobilenet::MobileNet;
pub use preparation::{Filter, Preparation, Resize};
pub use residual::Residual;

use super::LinearSpec;
use super::fields::Fields;
use crate::{CheckpointError, Fault};
use serde_json::{Map, Value, json};
use std::path::Path;

/// `model_type` and the name in `architectures` of the models whose config is transformers' own.
pub(super) const FAMILY: [(&str, &str); 2] = [
    (residual::MODEL_TYPE, "ResNetForImageClassification"),
    (mobilenet::MODEL_TYPE, "MobileNetV2ForImageClassification"),
];

/// Keys of transformers that say nothing about what a classifier computes at inference.
const WITHOUT_MEANING: [&str; 19] = [
    "_commit_hash",
    "_name_or_path",
    "architectures",
    "chunk_size_feed_forward",
    "dtype",
    "initializer_range",
    "is_encoder_decoder",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "quantization_config",
    "return_dict",
    "task_specific_params",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "transformers_version",
    "use_return_dict",
];

/// Largest number of channels.
const MAX_CHANNELS: usize = 1 << 20;
/// Largest height and width of an input.
const MAX_SIDE: i64 = 4096;
/// The kernel, the stride and the padding of the pool behind the stem of a residual network.
pub const MAX_POOL: [usize; 3] = [3, 2, 1];

/// An image model.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageConfig {
    /// The architecture.
    pub family: ImageFamily,
    /// Channels of the picture.
    pub channels: usize,
    /// Classes.
    pub num_classes: usize,
    /// Names of the classes (`id2label`), if they are known.
    pub labels: Option<Vec<String>>,
    /// Epsilon of batch norm (before folding).
    pub norm_eps: f32,
    /// Whether the tensors of batch norm are there; without them every layer has a bias.
    pub batch_norm: bool,
    /// Whether ReLU6 clips each channel at a value of its own (`{module}.clip`) instead of 6: what equalisation makes of it.
    pub channel_clip: bool,
    /// How pictures become inputs.
    pub preparation: Preparation,
}

/// The architectures.
#[derive(Debug, Clone, PartialEq)]
pub enum ImageFamily {
    /// EfficientNet-Lite0, whose table is fixed.
    EfficientNetLite0,
    /// ResNet-18 and -34 (basic blocks), -50, -101 and -152 (bottlenecks).
    ResNet(Residual),
    /// MobileNetV2.
    MobileNetV2(MobileNet),
}

/// One convolution (the classifier is one over a single pixel) in forward order, with what is done around it: first `pool`, then the
/// convolution, the sum with the skip, and the activation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvLayer {
    /// Module name.
    pub module: String,
    /// Module name of its batch norm; none for the classifier.
    pub norm: Option<String>,
    /// `[n, c, kh, kw]`; `c` is 1 of a depthwise convolution.
    pub shape: [usize; 4],
    /// Stride.
    pub stride: usize,
    /// Zeros around the input.
    pub padding: Padding,
    /// Whether output channel `j` reads input channel `j` alone.
    pub depthwise: bool,
    /// What follows.
    pub activation: Option<Activation>,
    /// What is done to the input first.
    pub pool: Option<Pool>,
    /// Whether a block begins here: its input (behind `pool`) is the skip from here on.
    pub starts_block: bool,
    /// Whether this convolution reads the skip and makes the new one; the next layer reads what this one found.
    pub on_skip: bool,
    /// Whether the skip is added to the output.
    pub adds_skip: bool,
}

/// How many zeros are around the input of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Padding {
    /// TensorFlow's "SAME": outputs are `ceil(input / stride)`; where an odd number of pixels is missing the extra one is right and
    /// below.
    Same,
    /// Half the kernel on every side, as PyTorch's models have it.
    Half,
}

/// What follows a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `min(max(x, 0), 6)`.
    Relu6,
}

/// What stands in front of a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pool {
    /// The largest value of windows, see [`MAX_POOL`].
    Max,
    /// The mean over all pixels.
    Mean,
}

impl ConvLayer {
    /// A layer with ReLU6 and batch norm, "SAME" padding and nothing else.
    fn plain(module: String, norm: String, shape: [usize; 4], stride: usize) -> Self {
        Self {
            module,
            norm: Some(norm),
            shape,
            stride,
            padding: Padding::Same,
            depthwise: false,
            activation: Some(Activation::Relu6),
            pool: None,
            starts_block: false,
            on_skip: false,
            adds_skip: false,
        }
    }

    /// The layer behind all others: a matrix `[classes, channels]` over the mean of the pixels.
    fn classifier(module: &str, classes: usize, channels: usize) -> Self {
        let layer = Self::plain(module.into(), String::new(), [classes, channels, 1, 1], 1);
        Self { norm: None, activation: None, pool: Some(Pool::Mean), ..layer }
    }

    /// The shape of the stored weight: `[n, c]` of the classifier.
    pub fn stored_shape(&self) -> Vec<usize> {
        let [n, c, kh, kw] = self.shape;
        if self.norm.is_none() { vec![n, c] } else { vec![n, c, kh, kw] }
    }

    /// Input channels.
    pub fn inputs(&self) -> usize {
        if self.depthwise { self.shape[0] } else { self.shape[1] }
    }

    /// Zeros above and below, left and right of an input of this height and width.
    pub fn pads(&self, input: [usize; 2]) -> [[usize; 2]; 2] {
        let kernel = self.shape[2];
        match self.padding {
            Padding::Half => [[kernel / 2; 2]; 2],
            Padding::Same => input.map(|side| {
                let all = ((side.div_ceil(self.stride).max(1) - 1) * self.stride + kernel).saturating_sub(side);
                [all / 2, all - all / 2]
            }),
        }
    }

    /// Height and width of the output for this input.
    pub fn output(&self, input: [usize; 2]) -> [usize; 2] {
        let pads = self.pads(input);
        [0, 1].map(|i| (input[i] + pads[i][0] + pads[i][1] - self.shape[2]) / self.stride + 1)
    }
}

/// The tensors of a batch norm.
pub(crate) const NORM_PARTS: [&str; 4] = ["weight", "bias", "running_mean", "running_var"];

impl ImageConfig {
    /// Reads the config of a model of transformers, `model_type` being one of [`FAMILY`].
    pub(super) fn from_fields(f: &Fields, model_type: &str) -> Result<Self, CheckpointError> {
        let (num_classes, labels) = classes(f)?;
        let channels = f.integer("num_channels", 1..=1 << 12)?.map_or(3, |c| c as usize);
        let (family, norm_eps, size) = match model_type {
            residual::MODEL_TYPE => (ImageFamily::ResNet(Residual::from_fields(f)?), residual::NORM_EPS, [224; 2]),
            _ => {
                let (family, eps, size) = MobileNet::from_fields(f)?;
                (ImageFamily::MobileNetV2(family), eps, size)
            }
        };
        let config = Self {
            family,
            channels,
            num_classes,
            labels,
            norm_eps,
            batch_norm: f.boolean("batch_norm")?.unwrap_or(true),
            channel_clip: f.boolean("channel_clip")?.unwrap_or(false),
            preparation: Preparation::imagenet(size, channels),
        };
        if config.channel_clip && !config.layers().iter().any(|l| l.activation == Some(Activation::Relu6)) {
            return Err(f.error("channel_clip", "expected false for a model without ReLU6, got true"));
        }
        f.refuse_the_rest(&WITHOUT_MEANING)?;
        Ok(config)
    }

    /// Takes how pictures are prepared from `preprocessor_config.json` beside the config; without one, what ImageNet's models of
    /// torchvision are given, which is told.
    pub(crate) fn read_preparation(&mut self, dir: &Path, faults: &mut Vec<Fault>) -> Result<(), CheckpointError> {
        if self.family != ImageFamily::EfficientNetLite0 {
            self.preparation.read(dir, self.channels, faults)?;
        }
        Ok(())
    }

    /// `preprocessor_config.json` of a model whose file has none.
    pub(crate) fn preparation_file(&self) -> Option<(String, Vec<u8>)> {
        let own = self.family == ImageFamily::EfficientNetLite0;
        let text = self.preparation.to_json().map(|value| format!("{value:#}\n").into_bytes());
        text.filter(|_| !own).map(|bytes| (preparation::FILE.to_owned(), bytes))
    }

    /// The config of a PyTorch file with tensors of these names and shapes, and what its tensors are called in a Hugging Face
    /// folder (theirs, ours) where that is something else; `None` when it is no model that is known.
    pub(crate) fn detect(
        names: &[String],
        shape: impl Fn(&str) -> Option<Vec<usize>>,
    ) -> Option<(Self, Vec<(String, String)>)> {
        match Self::detect_efficientnet(&shape) {
            Some(config) => Some((config, Vec::new())),
            None => torch::detect(names, &shape),
        }
    }

    /// `model_type` in `config.json`.
    pub fn model_type(&self) -> &'static str {
        match self.family {
            ImageFamily::EfficientNetLite0 => efficientnet::MODEL_TYPE,
            ImageFamily::ResNet(_) => residual::MODEL_TYPE,
            ImageFamily::MobileNetV2(_) => mobilenet::MODEL_TYPE,
        }
    }

    /// What a person calls it: `ResNet-50`, `MobileNetV2 x0.75`, `EfficientNet-Lite0`.
    pub fn title(&self) -> String {
        match &self.family {
            ImageFamily::EfficientNetLite0 => "EfficientNet-Lite0".into(),
            ImageFamily::ResNet(r) => r.title(),
            ImageFamily::MobileNetV2(m) => format!("MobileNetV2 x{}", m.depth_multiplier),
        }
    }

    /// The keys of `config.json`.
    pub fn to_json(&self) -> Value {
        let mut map = match &self.family {
            ImageFamily::EfficientNetLite0 => return self.efficientnet_json(),
            ImageFamily::ResNet(r) => r.to_json(),
            ImageFamily::MobileNetV2(m) => m.to_json(self),
        };
        let (_, architecture) = FAMILY[FAMILY.iter().position(|(m, _)| *m == self.model_type()).unwrap_or(0)];
        map.insert("architectures".into(), json!([architecture]));
        map.insert("model_type".into(), json!(self.model_type()));
        map.insert("num_channels".into(), json!(self.channels));
        // Without `id2label` transformers takes two classes.
        let name = |i: usize| self.labels.as_ref().map_or_else(|| format!("LABEL_{i}"), |l| l[i].clone());
        let ids: Map<String, Value> = (0..self.num_classes).map(|i| (i.to_string(), json!(name(i)))).collect();
        let labels: Map<String, Value> = (0..self.num_classes).map(|i| (name(i), json!(i))).collect();
        map.insert("id2label".into(), ids.into());
        map.insert("label2id".into(), labels.into());
        if !self.batch_norm {
            map.insert("batch_norm".into(), json!(false));
        }
        if self.channel_clip {
            map.insert("channel_clip".into(), json!(true));
        }
        map.into()
    }

    /// All layers in forward order.
    pub fn layers(&self) -> Vec<ConvLayer> {
        match &self.family {
            ImageFamily::EfficientNetLite0 => self.efficientnet_layers(),
            ImageFamily::ResNet(r) => r.layers(self),
            ImageFamily::MobileNetV2(m) => m.layers(self),
        }
    }

    pub(super) fn linears(&self) -> Vec<LinearSpec> {
        let spec = |l: ConvLayer| LinearSpec { shape: l.stored_shape(), module: l.module };
        self.layers().into_iter().map(spec).collect()
    }

    /// Batch norms, or the biases that hold them once they are folded; clips.
    pub(super) fn other_tensors(&self) -> Vec<(String, Vec<usize>)> {
        let mut out = Vec::new();
        for l in self.layers() {
            let clipped = l.activation == Some(Activation::Relu6) && self.channel_clip;
            match l.norm.filter(|_| self.batch_norm) {
                Some(norm) => {
                    out.extend(NORM_PARTS.map(|part| (format!("{norm}.{part}"), vec![l.shape[0]])));
                }
                None => out.push((format!("{}.bias", l.module), vec![l.shape[0]])),
            }
            if clipped {
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

/// Number and names of the classes: `num_labels`, or as many as `id2label` has (transformers' rule), which must be 0, 1, 2...
fn classes(f: &Fields) -> Result<(usize, Option<Vec<String>>), CheckpointError> {
    let count = f.size("num_labels")?;
    f.get("label2id");
    let Some(value) = f.get("id2label") else { return Ok((count.unwrap_or(2), None)) };
    let expected = "names by the numbers of classes, \"0\", \"1\" and so on without a gap";
    let Value::Object(map) = value else {
        return Err(f.error("id2label", format!("expected {expected}, got {}", super::fields::show(value))));
    };
    let name = |i: usize| map.get(&i.to_string()).and_then(Value::as_str).map(str::to_owned);
    let labels: Option<Vec<String>> = (0..map.len()).map(name).collect();
    let Some(labels) = labels.filter(|l| !l.is_empty() && l.len() <= MAX_CHANNELS) else {
        return Err(f.error("id2label", format!("expected {expected}, got {} other entries", map.len())));
    };
    match count {
        Some(n) if n != labels.len() => {
            Err(f.error("num_labels", format!("expected the {} classes of id2label, got {n}", labels.len())))
        }
        _ => {
            let named = labels.iter().enumerate().any(|(i, l)| *l != format!("LABEL_{i}"));
            Ok((labels.len(), named.then_some(labels)))
        }
    }
}

#[cfg(test)]
mod tests;
