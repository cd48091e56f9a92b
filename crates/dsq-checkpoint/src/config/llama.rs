//! The config of a Llama-like model (llama, qwen2, qwen3, mistral, mixtral, deepseek_v2, deepseek_v3), in the keys of Hugging Face
//! `transformers` (versions 4 and 5). Not the rotary keys (see `rope.rs`), those of experts (`experts.rs`) and of latent attention
//! (`latent.rs`).

use super::LinearSpec;
use super::experts::Experts;
use super::fields::{Fields, show};
use super::latent::{self, Latent};
use super::rope::{self, RopeScaling};
use crate::{CheckpointError, Fault, Severity};
use serde_json::{Map, Value, json};
use std::path::Path;

/// Biases of linear layers that a config asks for, beside those of q, k and v that qwen2 has anyway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Biases {
    /// Of q, k, v and o (`attention_bias` of llama and qwen3).
    pub attention: bool,
    /// Of gate, up and down (`mlp_bias` of llama).
    pub mlp: bool,
}

/// Architecture of a Llama-like model (RMSNorm, RoPE, grouped-query attention, SwiGLU). qwen2 has biases of q, k and v, llama and qwen3
/// may have others, qwen3 a norm of each query and key head, and qwen2, qwen3, mistral and mixtral may have attention windows; mixtral, deepseek_v2 and
/// deepseek_v3 have experts, the last two latent attention.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// `model_type`: `llama`, `qwen2`, `qwen3`, `mistral`, `mixtral`, `deepseek_v2` or `deepseek_v3`.
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward block.
    pub intermediate_size: usize,
    /// Layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides `num_attention_heads`.
    pub num_key_value_heads: usize,
    /// Width of a head; even. Not necessarily `hidden_size / num_attention_heads`. Of latent attention: of the part that is rotated.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Longest context.
    pub max_position_embeddings: usize,
    /// Epsilon of RMSNorm.
    pub rms_norm_eps: f32,
    /// Base of the rotary embedding.
    pub rope_theta: f32,
    /// How its frequencies are scaled.
    pub rope_scaling: Option<RopeScaling>,
    /// How many positions a token of each layer sees, its own and those right before it; `None`: all. Empty where no layer
    /// has a window.
    pub windows: Vec<Option<usize>>,
    /// Experts in the place of feed-forward blocks; `None`: all layers are dense.
    pub experts: Option<Experts>,
    /// Latent attention; `None`: grouped-query attention.
    pub latent: Option<Latent>,
    /// Biases of llama and qwen3.
    pub biases: Biases,
    /// Whether the output matrix is the embedding.
    pub tie_word_embeddings: bool,
    /// Beginning-of-sequence token.
    pub bos_token_id: Option<u32>,
    /// Tokens that end a sequence.
    pub eos_token_ids: Vec<u32>,
    /// Padding token.
    pub pad_token_id: Option<u32>,
}

/// The architectures of this config: `model_type`, and the name in `architectures`.
pub(super) const FAMILY: [(&str, &str); 7] = [
    ("llama", "LlamaForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"),
    ("qwen3", "Qwen3ForCausalLM"),
    ("mistral", "MistralForCausalLM"),
    ("mixtral", "MixtralForCausalLM"),
    ("deepseek_v2", "DeepseekV2ForCausalLM"),
    ("deepseek_v3", "DeepseekV3ForCausalLM"),
];

/// Experts of all layers together: DeepSeek-V3 has 14,848. A config alone should not fill the memory with names.
const MOST_EXPERTS: usize = 1 << 17;

/// Keys of models with experts that only training asks for, or the place where an expert runs.
const OF_EXPERTS_WITHOUT_MEANING: [&str; 6] =
    ["aux_loss_alpha", "ep_size", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "seq_aux"];

/// Keys that say nothing about what the model computes at inference.
const WITHOUT_MEANING: [&str; 26] = [
    "_name_or_path",
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "attention_dropout",
    "attn_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "id2label",
    "initializer_range",
    "is_llama_config",
    "label2id",
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
    "unsloth_fixed",
    "unsloth_version",
    "use_cache",
    "use_return_dict",
];

impl LlamaConfig {
    /// Reads a config of the type `model_type`, one of [`FAMILY`]; what is absent is what it is in transformers 5.
    pub(super) fn from_fields(
        f: &Fields,
        model_type: &str,
        file: &Path,
        faults: &mut Vec<Fault>,
    ) -> Result<Self, CheckpointError> {
        let mut defaulted = Vec::new();
        let mut default = |key: &'static str, value: String| defaulted.push(format!("{key} = {value}"));
        let deepseek = is_deepseek(model_type);
        if let Some(code) = f.get("auto_map") {
            // The published folders of DeepSeek name code for what transformers has by now.
            if !deepseek {
                let problem = format!("dsq never runs a model's own code; expected no key, got {}", show(code));
                return Err(f.error("auto_map", problem));
            }
            let what = format!("not used: {model_type} runs by dsq's own code, not by that of the folder");
            faults.push(Fault::new(Severity::Note, file, "auto_map", what));
        }
        let hidden_size = f.required("hidden_size", f.size("hidden_size"))?;
        let intermediate_size = f.required("intermediate_size", f.size("intermediate_size"))?;
        let num_hidden_layers = f.required("num_hidden_layers", f.integer("num_hidden_layers", 1..=4096))? as usize;
        let num_attention_heads = f.required("num_attention_heads", f.size("num_attention_heads"))?;
        let vocab_size = f.required("vocab_size", f.size("vocab_size"))?;
        if deepseek {
            latent::check_heads(f, num_attention_heads, file)?;
        }
        let latent = if deepseek { Some(Latent::read(f, model_type, &mut default)?) } else { None };
        let experts = match model_type {
            "mixtral" => Some(Experts::of_mixtral(f, intermediate_size, &mut default)?),
            _ if deepseek => Some(Experts::of_deepseek(f, model_type, &mut default)?),
            _ => None,
        };
        if model_type == "deepseek_v2" && f.boolean("norm_topk_prob")? == Some(true) {
            let what = "not used, as transformers does not: scores of the chosen experts are multiplied by routed_scaling_factor and not \
                        divided by their sum; vLLM and DeepSeek's own code divide";
            faults.push(Fault::new(Severity::Warning, file, "norm_topk_prob", what));
        }
        if let Some(e) = experts.filter(|e| e.count.saturating_mul(num_hidden_layers) > MOST_EXPERTS) {
            let key = if deepseek { "n_routed_experts" } else { "num_local_experts" };
            let problem =
                format!("expected at most {MOST_EXPERTS} over all {num_hidden_layers} layers, got {} a layer", e.count);
            return Err(f.error(key, problem));
        }
        let num_key_value_heads = f.size("num_key_value_heads")?.unwrap_or_else(|| {
            let fixed = match model_type {
                "mistral" | "mixtral" => Some(8),
                "qwen2" | "qwen3" => Some(32),
                _ => None,
            };
            match fixed.filter(|_| !f.has("num_key_value_heads")) {
                Some(n) => {
                    default("num_key_value_heads", n.to_string());
                    n
                }
                None => {
                    default("num_key_value_heads", format!("num_attention_heads = {num_attention_heads}"));
                    num_attention_heads
                }
            }
        });
        if !num_attention_heads.is_multiple_of(num_key_value_heads) {
            return Err(f.error(
                "num_key_value_heads",
                format!("expected a divisor of num_attention_heads = {num_attention_heads}, got {num_key_value_heads}"),
            ));
        }
        let head_dim = match f.size("head_dim")? {
            Some(d) => d,
            None if latent.is_some() => latent.map_or(0, |a| a.rope),
            None if model_type == "qwen3" => {
                default("head_dim", "128".into());
                128
            }
            None if hidden_size.is_multiple_of(num_attention_heads) => {
                let d = hidden_size / num_attention_heads;
                default("head_dim", format!("hidden_size / num_attention_heads = {d}"));
                d
            }
            None => {
                return Err(f.error(
                    "num_attention_heads",
                    format!("expected a divisor of hidden_size = {hidden_size} (no head_dim given), got {num_attention_heads}"),
                ));
            }
        };
        if !head_dim.is_multiple_of(2) {
            return Err(f.error("head_dim", format!("expected an even number (rotary pairs), got {head_dim}")));
        }
        let max_position_embeddings = f.size("max_position_embeddings")?.unwrap_or_else(|| {
            let n = match model_type {
                "mistral" | "mixtral" => 4096 * 32,
                "qwen2" | "qwen3" => 32_768,
                "deepseek_v3" => 4096,
                _ => 2048,
            };
            default("max_position_embeddings", n.to_string());
            n
        });
        let rms_norm_eps = f.number("rms_norm_eps")?.unwrap_or_else(|| {
            let eps = if model_type == "mixtral" { 1e-5 } else { 1e-6 };
            default("rms_norm_eps", format!("{eps:e}"));
            eps
        }) as f32;
        if rms_norm_eps < 0.0 || !rms_norm_eps.is_finite() {
            return Err(f.error("rms_norm_eps", format!("expected a small positive number, got {rms_norm_eps}")));
        }
        if rms_norm_eps == 0.0 {
            let what = "an all-zero row would divide by zero; expected a small positive number, got 0";
            faults.push(Fault::new(Severity::Warning, file, "rms_norm_eps", what));
        }
        let tie_word_embeddings = f.boolean("tie_word_embeddings")?.unwrap_or_else(|| {
            default("tie_word_embeddings", "false".into());
            false
        });
        let (rope_theta, rope_scaling) = rope::read(f, file)?;
        let rope_theta = rope_theta.unwrap_or_else(|| {
            let theta = if model_type == "mixtral" { 1e6 } else { 1e4 };
            default("rope_theta", theta.to_string());
            theta
        });
        if matches!(rope_scaling, Some(RopeScaling::Dynamic { .. })) {
            let what = format!(
                "dynamic rotary scaling begins beyond max_position_embeddings = {max_position_embeddings}, which dsq refuses to run"
            );
            faults.push(Fault::new(Severity::Note, file, "rope_scaling", what));
        }
        if f.get("hidden_act").is_none() {
            default("hidden_act", "silu".into());
        }
        f.only("hidden_act", &json!("silu"), "the only activation dsq has for this model")?;
        let mut biases = Biases::default();
        match model_type {
            "llama" | "qwen3" => biases.attention = f.boolean("attention_bias")?.unwrap_or(false),
            // It has biases of q, k and v and no such key.
            "qwen2" => {}
            _ => f.only("attention_bias", &json!(false), "dsq has such biases of llama, qwen2 and qwen3")?,
        }
        match model_type {
            "llama" => biases.mlp = f.boolean("mlp_bias")?.unwrap_or(false),
            _ => f.only("mlp_bias", &json!(false), "dsq has such biases of llama")?,
        }
        f.only("pretraining_tp", &json!(1), "tensor-parallel slicing is not supported")?;
        f.only("rope_interleaved", &json!(false), "rotary pairs are half a head apart")?;
        f.only("is_encoder_decoder", &json!(false), "the model is a decoder")?;
        f.only("add_cross_attention", &json!(false), "the model is a decoder")?;
        f.only("partial_rotary_factor", &json!(1.0), "the whole head is rotated")
            .or_else(|e| f.only("partial_rotary_factor", &json!(1), "the whole head is rotated").map_err(|_| e))?;
        f.only("use_mrope", &json!(false), "a position is one number")?;
        let windows = read_windows(f, model_type, num_hidden_layers, &mut default)?;
        let bos_token_id = single(f, "bos_token_id", vocab_size)?;
        let pad_token_id = match f.integer("pad_token_id", -1..=i64::from(u32::MAX))? {
            Some(-1) => None,
            _ => single(f, "pad_token_id", vocab_size)?,
        };
        let eos_token_ids = f.token_ids("eos_token_id", vocab_size)?;
        let of_experts: &[&str] = if experts.is_some() { &OF_EXPERTS_WITHOUT_MEANING } else { &[] };
        f.refuse_the_rest(&[&WITHOUT_MEANING, of_experts].concat())?;
        if !defaulted.is_empty() {
            let what = format!("keys absent, defaults taken: {}", defaulted.join(", "));
            faults.push(Fault::new(Severity::Note, file, "", what));
        }
        Ok(Self {
            model_type: model_type.into(),
            hidden_size,
            intermediate_size,
            num_hidden_layers,
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            vocab_size,
            max_position_embeddings,
            rms_norm_eps,
            rope_theta,
            rope_scaling,
            windows,
            experts,
            latent,
            biases,
            tie_word_embeddings,
            bos_token_id,
            eos_token_ids,
            pad_token_id,
        })
    }

    /// The keys of `config.json`. Rotary settings are written in the spelling of transformers 4 and in that of 5.
    pub fn to_json(&self) -> Value {
        let eos = match self.eos_token_ids.as_slice() {
            [] => Value::Null,
            [one] => json!(one),
            many => json!(many),
        };
        let mut rotary = rope::to_json(self.rope_scaling.as_ref());
        rotary["rope_theta"] = json!(short(self.rope_theta));
        let architecture = FAMILY.iter().find(|(t, _)| *t == self.model_type).map_or("", |(_, a)| a);
        let mut out = json!({
            "architectures": [architecture],
            "model_type": self.model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": short(self.rms_norm_eps),
            "rope_theta": short(self.rope_theta),
            "rope_parameters": rotary,
            "hidden_act": "silu",
            "attention_bias": self.biases.attention,
            "mlp_bias": self.biases.mlp,
            "tie_word_embeddings": self.tie_word_embeddings,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_token_id,
        });
        // Not there without scaling, so that the digests of recipes stay what they were.
        if self.rope_scaling.is_some() {
            out["rope_scaling"] = rope::to_json(self.rope_scaling.as_ref());
        }
        if let (Value::Object(map), true) = (&mut out, self.model_type != "llama") {
            map.remove("mlp_bias");
            if self.model_type != "qwen3" {
                map.remove("attention_bias");
            }
            match &self.latent {
                None => self.write_windows(map),
                Some(latent) => {
                    map.remove("head_dim");
                    latent.write(self, map);
                }
            }
            match (&self.experts, &self.latent) {
                (Some(experts), Some(_)) => experts.write_deepseek(map),
                (Some(experts), None) => experts.write_mixtral(map),
                (None, _) => {}
            }
        }
        out
    }

    /// The keys of windows, as the model's type spells them.
    fn write_windows(&self, map: &mut Map<String, Value>) {
        let window = self.windows.iter().copied().flatten().next();
        map.insert("sliding_window".into(), json!(window));
        if !["mistral", "mixtral"].contains(&self.model_type.as_str()) {
            let types = (0..self.num_hidden_layers).map(|i| match self.window(i) {
                None => FULL,
                Some(_) => SLIDING,
            });
            map.insert("use_sliding_window".into(), json!(window.is_some()));
            let first = self.windows.iter().position(Option::is_some).unwrap_or(self.num_hidden_layers);
            map.insert("max_window_layers".into(), json!(first));
            map.insert("layer_types".into(), types.collect());
        }
    }

    /// How many positions a token of layer `i` sees, its own and those right before it; `None`: all.
    pub fn window(&self, i: usize) -> Option<usize> {
        self.windows.get(i).copied().flatten()
    }

    /// Whether the linear layer `module` has a bias: q, k and v of qwen2, and what [`Biases`] say.
    pub fn has_bias(&self, module: &str) -> bool {
        let ends = |parts: &[&str]| parts.iter().any(|p| module.ends_with(p));
        let qkv = ["q_proj", "k_proj", "v_proj"];
        self.model_type == "qwen2" && ends(&qkv)
            || self.biases.attention && (ends(&qkv) || ends(&["o_proj"]))
            || self.biases.mlp && ends(&["gate_proj", "up_proj", "down_proj"])
    }

    /// Whether each query and key head is normed before it is rotated, by one weight for all query heads of a layer and one
    /// for all key heads: qwen3.
    pub fn has_head_norms(&self) -> bool {
        self.model_type == "qwen3"
    }

    /// The linear layers of layer `i` in the order of the model: end of the module name, outputs, inputs.
    pub fn layer_linears(&self, i: usize) -> Vec<(String, usize, usize)> {
        let d = self.hidden_size;
        let (q, kv) = (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim);
        let mut out = match &self.latent {
            Some(latent) => self.latent_linears(latent),
            None => [("q_proj", q, d), ("k_proj", kv, d), ("v_proj", kv, d), ("o_proj", d, q)]
                .map(|(part, n, k)| (format!("self_attn.{part}"), n, k))
                .into(),
        };
        out.extend(self.feed_forward_linears(i));
        out
    }

    pub(super) fn linears(&self) -> Vec<LinearSpec> {
        let d = self.hidden_size;
        let mut out = Vec::new();
        for i in 0..self.num_hidden_layers {
            out.extend(
                self.layer_linears(i)
                    .into_iter()
                    .map(|(name, n, k)| LinearSpec { module: format!("model.layers.{i}.{name}"), shape: vec![n, k] }),
            );
        }
        if !self.tie_word_embeddings {
            out.push(LinearSpec { module: "lm_head".into(), shape: vec![self.vocab_size, d] });
        }
        out
    }

    pub(super) fn other_tensors(&self) -> Vec<(String, Vec<usize>)> {
        let d = self.hidden_size;
        let mut out = vec![("model.embed_tokens.weight".to_owned(), vec![self.vocab_size, d])];
        for i in 0..self.num_hidden_layers {
            out.push((format!("model.layers.{i}.input_layernorm.weight"), vec![d]));
            out.push((format!("model.layers.{i}.post_attention_layernorm.weight"), vec![d]));
            if self.has_head_norms() {
                let norms = ["q_norm", "k_norm"].map(|n| format!("model.layers.{i}.self_attn.{n}.weight"));
                out.extend(norms.map(|name| (name, vec![self.head_dim])));
            }
            if let Some(a) = &self.latent {
                let q_norm = a.q_rank.map(|rank| ("q_a_layernorm", rank));
                let norms = q_norm.into_iter().chain([("kv_a_layernorm", a.kv_rank)]);
                out.extend(norms.map(|(n, width)| (format!("model.layers.{i}.self_attn.{n}.weight"), vec![width])));
            }
            let router = self.router_tensors(i).into_iter();
            out.extend(router.map(|(name, shape)| (format!("model.layers.{i}.{name}"), shape)));
        }
        let biased = self.linears().into_iter().filter(|l| self.has_bias(&l.module));
        out.extend(biased.map(|l| (format!("{}.bias", l.module), vec![l.n()])));
        out.push(("model.norm.weight".to_owned(), vec![d]));
        out
    }
}

/// The names of `layer_types`.
const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

/// Whether a type has latent attention.
fn is_deepseek(model_type: &str) -> bool {
    ["deepseek_v2", "deepseek_v3"].contains(&model_type)
}

/// The window of each layer, empty where none has one: of mistral and mixtral `sliding_window`, in all layers; of qwen2 and qwen3 where
/// `use_sliding_window` says so, in those layers that `layer_types` names, or from `max_window_layers` on.
fn read_windows(
    f: &Fields,
    model_type: &str,
    layers: usize,
    default: &mut dyn FnMut(&'static str, String),
) -> Result<Vec<Option<usize>>, CheckpointError> {
    if model_type == "llama" || is_deepseek(model_type) {
        f.only("sliding_window", &Value::Null, "attention is full")?;
        f.only("use_sliding_window", &json!(false), "attention is full")?;
        return Ok(Vec::new());
    }
    let mut width = f.size("sliding_window")?;
    let everywhere = ["mistral", "mixtral"].contains(&model_type);
    let used = everywhere || f.boolean("use_sliding_window")?.unwrap_or(false);
    if used && model_type != "mixtral" && !f.has("sliding_window") {
        default("sliding_window", "4096".into());
        width = Some(4096);
    }
    let width = width.filter(|_| used);
    if everywhere {
        return Ok(width.map(|w| vec![Some(w); layers]).unwrap_or_default());
    }
    let first = f.integer("max_window_layers", 0..=i64::from(u32::MAX))?.map(|n| n as usize);
    let windows: Vec<Option<usize>> = match f.strings("layer_types")? {
        None => {
            if width.is_some() && first.is_none() {
                default("max_window_layers", "28".into());
            }
            (0..layers).map(|i| width.filter(|_| i >= first.unwrap_or(28))).collect()
        }
        Some(types) if types.len() != layers => {
            let problem = format!("expected one for each of num_hidden_layers = {layers}, got {}", types.len());
            return Err(f.error("layer_types", problem));
        }
        Some(types) => {
            let one = |t: String| match (t.as_str(), width) {
                (FULL, _) => Ok(None),
                (SLIDING, Some(w)) => Ok(Some(w)),
                (SLIDING, None) => {
                    let problem = format!("expected {FULL:?} without a sliding_window that is in use, got {SLIDING:?}");
                    Err(f.error("layer_types", problem))
                }
                _ => Err(f.error("layer_types", format!("expected {FULL:?} or {SLIDING:?}, got {t:?}"))),
            };
            types.into_iter().map(one).collect::<Result<_, _>>()?
        }
    };
    Ok(if windows.iter().any(Option::is_some) { windows } else { Vec::new() })
}

/// The f64 whose shortest decimal form is that of `x`, so that a config shows 1e-5 and not 9.999999747378752e-6.
pub(crate) fn short(x: f32) -> f64 {
    x.to_string().parse().unwrap_or_else(|_| f64::from(x))
}

fn single(f: &Fields, key: &'static str, vocab: usize) -> Result<Option<u32>, CheckpointError> {
    let ids = f.token_ids(key, vocab)?;
    match ids.as_slice() {
        [] => Ok(None),
        [one] => Ok(Some(*one)),
        _ => Err(f.error(key, format!("expected one token id, got {ids:?}"))),
    }
}
