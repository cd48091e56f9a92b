//! `config.json`: which model the tensors make up. Every key is honoured or refused by name; nothing is ignored that
//! changes what the model computes.

mod experts;
pub(crate) mod fields;
mod image;
mod latent;
mod llama;
mod resnet;
mod rope;

pub(crate) use experts::Stack;
pub use experts::{Experts, Groups, Routing, Scores};
pub use image::{
    Activation, ConvLayer, Filter, ImageConfig, ImageFamily, MAX_POOL, MobileNet, Padding, Pool, Preparation, Residual,
    Resize,
};
pub use latent::{LATENT_NORM_EPS, Latent};
pub(crate) use llama::short;
pub use llama::{Biases, LlamaConfig};
pub use resnet::ResNetConfig;
pub use rope::{RopeScaling, Rotary, Yarn};

use crate::json::parse_json;
use crate::{CheckpointError, Fault};
use fields::Fields;
use serde_json::Value;
use std::path::Path;

/// A linear (or convolution) module that a config calls for, as a matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LinearSpec {
    /// Full module name, `model.layers.0.self_attn.q_proj`.
    pub module: String,
    /// Shape of its weight: `[n, k]`, or `[out, in, kh, kw]` of a convolution.
    pub shape: Vec<usize>,
}

impl LinearSpec {
    /// Outputs `n`.
    pub fn n(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    /// Reduction dimension `k`: all dimensions but the first.
    pub fn k(&self) -> usize {
        self.shape.iter().skip(1).product()
    }
}

/// The architecture of a model.
#[derive(Debug, Clone, PartialEq)]
#[allow(clippy::large_enum_variant)] // A program holds one or two.
pub enum ModelConfig {
    /// A Llama-like language model: llama, qwen2, qwen3, mistral, mixtral, deepseek_v2 or deepseek_v3.
    Llama(LlamaConfig),
    /// dsq's own residual network for small images.
    ResNet(ResNetConfig),
    /// A classifier of pictures: resnet, mobilenet_v2 or EfficientNet-Lite0.
    Image(ImageConfig),
}

impl ModelConfig {
    /// Reads the text of a `config.json`; `file` is for messages.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] naming the key, for text that is not strict JSON, a missing or wrong value, an
    /// unknown architecture or a key that dsq does not honour.
    pub fn from_json(text: &str, file: &Path) -> Result<Self, CheckpointError> {
        Self::from_value(&parse_json(text.as_bytes(), file)?, file).map(|(config, _)| config)
    }

    /// Reads a parsed `config.json`; also gives what is worth noting (defaults taken, odd values).
    pub(crate) fn from_value(value: &Value, file: &Path) -> Result<(Self, Vec<Fault>), CheckpointError> {
        let fields = Fields::new(value, file, "")?;
        let model_type = fields.string("model_type")?;
        let architectures = fields.strings("architectures")?.unwrap_or_default();
        if architectures.len() > 1 {
            return Err(fields.error("architectures", format!("expected one architecture, got {architectures:?}")));
        }
        let known = |model: &str, architecture: &str| {
            architectures.iter().all(|a| a == architecture) && model_type.is_none_or(|t| t == model)
        };
        let mut faults = Vec::new();
        let language = llama::FAMILY.iter().find(|(model, architecture)| known(model, architecture));
        let image = image::FAMILY.iter().find(|(model, architecture)| known(model, architecture));
        let config = if let (Some((model, _)), true) = (language, model_type.is_some() || !architectures.is_empty()) {
            Self::Llama(LlamaConfig::from_fields(&fields, model, file, &mut faults)?)
        } else if model_type == Some(ResNetConfig::MODEL_TYPE) && architectures.is_empty() {
            Self::ResNet(ResNetConfig::from_fields(&fields)?)
        } else if let (Some((model, _)), true) = (image, model_type.is_some() || !architectures.is_empty()) {
            Self::Image(ImageConfig::from_fields(&fields, model)?)
        } else if model_type == Some(ImageConfig::EFFICIENTNET) && architectures.is_empty() {
            Self::Image(ImageConfig::efficientnet_from_fields(&fields)?)
        } else {
            let (key, got) = match (model_type, architectures.first()) {
                (Some(t), Some(a)) if llama::FAMILY.iter().chain(&image::FAMILY).any(|(known, _)| *known == t) => {
                    ("architectures", a.as_str())
                }
                (Some(t), _) => ("model_type", t),
                (None, Some(a)) => ("architectures", a.as_str()),
                (None, None) => ("model_type", "nothing"),
            };
            let problem = format!(
                "architecture not supported; expected {}, {} or {}, got {got}",
                llama::FAMILY
                    .iter()
                    .chain(&image::FAMILY)
                    .map(|(model, architecture)| format!("{model} ({architecture})"))
                    .collect::<Vec<_>>()
                    .join(", "),
                ResNetConfig::MODEL_TYPE,
                ImageConfig::EFFICIENTNET,
            );
            return Err(fields.error(key, problem));
        };
        Ok((config, faults))
    }

    /// The keys of `config.json`, without dtype and quantization, which the export adds.
    pub fn to_json(&self) -> Value {
        match self {
            Self::Llama(c) => c.to_json(),
            Self::ResNet(c) => c.to_json(),
            Self::Image(c) => c.to_json(),
        }
    }

    /// The linear and convolution modules that the config calls for, in forward order, `lm_head` last (unless tied).
    pub fn linears(&self) -> Vec<LinearSpec> {
        match self {
            Self::Llama(c) => c.linears(),
            Self::ResNet(c) => c.linears(),
            Self::Image(c) => c.linears(),
        }
    }

    /// The other tensors that the config calls for, with their shapes: embeddings, norms and biases that must be there.
    pub(crate) fn other_tensors(&self) -> Vec<(String, Vec<usize>)> {
        match self {
            Self::Llama(c) => c.other_tensors(),
            Self::ResNet(_) => Vec::new(),
            Self::Image(c) => c.other_tensors(),
        }
    }

    /// Modules whose outputs a server computes as one matrix, or that read one tensor, `module` among them: they must share what
    /// is one value for a matrix, as the global scale of NVFP4, and the form of their input. q, k and v; gate and up, of each expert;
    /// what latent attention makes of the residual stream; any other module alone.
    pub fn fused_with(&self, module: &str) -> Vec<String> {
        const GATE_UP: [&[&str]; 2] = [&["gate_proj", "up_proj"], &["w1", "w3"]];
        let Self::Llama(c) = self else { return vec![module.to_owned()] };
        let attention: &[&str] = match c.latent.map(|a| a.q_rank) {
            None => &["q_proj", "k_proj", "v_proj"],
            Some(None) => &["q_proj", "kv_a_proj_with_mqa"],
            Some(Some(_)) => &["q_a_proj", "kv_a_proj_with_mqa"],
        };
        for parts in [attention].into_iter().chain(GATE_UP) {
            let stem = |p: &&str| module.strip_suffix(*p).filter(|stem| stem.ends_with('.'));
            if let Some(stem) = parts.iter().find_map(stem) {
                return parts.iter().map(|p| format!("{stem}{p}")).collect();
            }
        }
        vec![module.to_owned()]
    }

    /// Modules that stay in float unless asked for: `lm_head`, `kv_b_proj` of latent attention (servers fold it into queries and
    /// outputs), and nothing in a CNN. Routers of experts always stay in float, see [`ModelConfig::always_float`].
    pub fn default_ignore(&self) -> Vec<String> {
        match self {
            Self::Llama(c) if c.latent.is_some() => vec!["lm_head".into(), "kv_b_proj".into()],
            Self::Llama(_) => vec!["lm_head".into()],
            Self::ResNet(_) | Self::Image(_) => Vec::new(),
        }
    }

    /// Modules that other tools take for linear layers and that are never quantized: the routers of experts.
    pub fn always_float(&self) -> Vec<String> {
        match self {
            Self::Llama(c) => c.routers(),
            Self::ResNet(_) | Self::Image(_) => Vec::new(),
        }
    }

    /// Whether a tensor decides which experts run: the weight or the correction bias of a router.
    pub fn decides_experts(&self, name: &str) -> bool {
        let Self::Llama(c) = self else { return false };
        c.experts.is_some() && (name.ends_with(".gate.weight") || name.ends_with(".gate.e_score_correction_bias"))
    }
}
