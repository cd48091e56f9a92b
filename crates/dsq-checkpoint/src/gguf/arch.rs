//! What the keys of an architecture of llama.cpp mean as a config: `llama` (llama, mistral and mixtral), `qwen2`, `qwen3` and
//! `deepseek2` (deepseek_v2 and deepseek_v3). Not the way from a config to keys (see `keys.rs`), nor the tensors (`layout.rs`).
//!
//! A key that changes what the model computes is honoured, or refused by name, and so is what no config of `transformers` says.

use super::header::TensorEntry;
use super::layout::Layout;
use super::value::{Metadata, Value};
use super::{keys, rope};
use crate::error::printable;
use crate::{
    CheckpointError, Experts, Groups, LATENT_NORM_EPS, Latent, LlamaConfig, ModelConfig, RopeScaling, Routing, Scores,
};
use std::path::Path;

/// Largest size that is taken from a key; products of two stay far inside u64.
const MAX_SIZE: u64 = 1 << 30;

/// Tensors per layer: at least nine.
const LAYER_TENSORS: u64 = 9;

/// Experts of all layers together, as in a folder (`config/llama.rs`): each has a name.
const MOST_EXPERTS: usize = 1 << 17;

/// Keys of the architecture that say nothing about what the model computes.
const WITHOUT_MEANING: [&str; 2] = ["tensor_data_layout", "rope.scaling.finetuned"];

/// The key of dsq's own that holds the whole config, where the others do not say all of it.
pub(crate) const CONFIG: &str = "dsq.config";

/// An architecture of llama.cpp.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Arch {
    Llama,
    Qwen2,
    Qwen3,
    Deepseek2,
}

impl Arch {
    const ALL: [Arch; 4] = [Arch::Llama, Arch::Qwen2, Arch::Qwen3, Arch::Deepseek2];

    /// Its name in `general.architecture`, which its keys begin with.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Arch::Llama => "llama",
            Arch::Qwen2 => "qwen2",
            Arch::Qwen3 => "qwen3",
            Arch::Deepseek2 => "deepseek2",
        }
    }

    /// The architecture that runs a model.
    pub(crate) fn of(c: &LlamaConfig) -> Self {
        match c.model_type.as_str() {
            "qwen2" => Arch::Qwen2,
            "qwen3" => Arch::Qwen3,
            "deepseek_v2" | "deepseek_v3" => Arch::Deepseek2,
            _ => Arch::Llama,
        }
    }
}

/// What of a config llama.cpp has no place for: a field, and what was expected and found.
#[derive(Debug, PartialEq)]
pub(crate) struct Unsaid {
    pub(crate) field: &'static str,
    pub(crate) problem: String,
}

impl Unsaid {
    pub(crate) fn new(field: &'static str, problem: String) -> Self {
        Self { field, problem }
    }
}

/// Reads the keys of a model, `prefix` being `general.architecture`.
pub(crate) struct Keys<'a> {
    pub(crate) metadata: &'a Metadata,
    prefix: &'a str,
    asked: Vec<String>,
}

impl<'a> Keys<'a> {
    /// The whole name of a key.
    pub(crate) fn name(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    fn key(&mut self, name: &str) -> String {
        let key = self.name(name);
        self.asked.push(key.clone());
        key
    }

    pub(crate) fn size(&mut self, name: &str) -> Result<Option<usize>, CheckpointError> {
        let key = self.key(name);
        match self.metadata.unsigned(&key)? {
            Some(n) if (1..=MAX_SIZE).contains(&n) => Ok(Some(n as usize)),
            Some(n) => Err(self.metadata.invalid(&key, format!("expected a size from 1 to {MAX_SIZE}, got {n}"))),
            None => Ok(None),
        }
    }

    /// A size that may be 0, which is also what an absent one is.
    fn count(&mut self, name: &str) -> Result<usize, CheckpointError> {
        let key = self.key(name);
        match self.metadata.unsigned(&key)? {
            Some(n) if n > MAX_SIZE => {
                Err(self.metadata.invalid(&key, format!("expected a size up to {MAX_SIZE}, got {n}")))
            }
            n => Ok(n.unwrap_or(0) as usize),
        }
    }

    fn required_size(&mut self, name: &str) -> Result<usize, CheckpointError> {
        let found = self.size(name)?;
        found.ok_or_else(|| self.metadata.missing(&self.name(name), "a UINT32"))
    }

    pub(crate) fn float(&mut self, name: &str) -> Result<Option<f32>, CheckpointError> {
        let key = self.key(name);
        self.metadata.float(&key)
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<&'a str>, CheckpointError> {
        let key = self.key(name);
        self.metadata.string(&key)
    }

    fn invalid(&self, name: &str, problem: String) -> CheckpointError {
        self.metadata.invalid(&self.name(name), problem)
    }

    /// Accepts a key only when it is absent or has one of these values.
    fn only(&mut self, name: &str, allowed: &[Value], why: &str) -> Result<(), CheckpointError> {
        let key = self.key(name);
        match self.metadata.get(&key) {
            Some(v) if !allowed.contains(v) => {
                Err(self.metadata.wrong_type(&key, &format!("{} ({why})", allowed[0].describe()), v))
            }
            _ => Ok(()),
        }
    }

    /// Refuses the first key of the architecture that nobody asked for.
    fn refuse_the_rest(&self) -> Result<(), CheckpointError> {
        for key in self.of_architecture() {
            if !self.asked.iter().any(|asked| asked == key) {
                return Err(self
                    .metadata
                    .invalid(key, "dsq does not know this key; expected only keys that it honours"));
            }
        }
        Ok(())
    }

    /// The keys of the architecture that say something.
    fn of_architecture(&self) -> impl Iterator<Item = &'a str> {
        let start = format!("{}.", self.prefix);
        let says = move |key: &&str| key.strip_prefix(&start).is_some_and(|name| !WITHOUT_MEANING.contains(&name));
        self.metadata.keys().into_iter().filter(says)
    }
}

/// The config of the model, from its keys, the presence of some tensors, and the `factors` of rotary frequencies that it has as
/// a tensor; and what the file leaves open.
///
/// # Errors
/// [`CheckpointError::Invalid`] naming the key that is missing, of another type, or not supported.
pub(crate) fn config(
    metadata: &Metadata,
    tensors: &[TensorEntry],
    factors: Option<&[f32]>,
) -> Result<(LlamaConfig, Layout), CheckpointError> {
    let key = "general.architecture";
    let known = Arch::ALL.map(|a| format!("{:?}", a.name())).join(", ");
    let prefix = metadata.string(key)?.ok_or_else(|| metadata.missing(key, &format!("one of {known}")))?;
    let Some(arch) = Arch::ALL.into_iter().find(|a| a.name() == prefix) else {
        return Err(metadata.invalid(key, format!("expected one of {known}, got {:?}", printable(prefix))));
    };
    let kind = metadata.string("general.type")?.unwrap_or("model");
    if kind != "model" {
        return Err(metadata.invalid("general.type", format!("expected \"model\", got {:?}", printable(kind))));
    }
    match metadata.unsigned("general.quantization_version")? {
        None | Some(2) => {}
        Some(n) => return Err(metadata.invalid("general.quantization_version", format!("expected 2, got {n}"))),
    }
    let mut keys = Keys { metadata, prefix, asked: Vec::new() };
    let layout = Layout {
        split_kv_b: metadata.get(&keys.name("attention.key_length_mla")).is_some(),
        rope_factors: factors.is_some(),
    };
    let tied = !tensors.iter().any(|t| t.name == "output.weight");
    let c = match metadata.string(CONFIG)? {
        Some(text) => whole_config(&keys, arch, text, layout, factors)?,
        None => config_of_keys(&mut keys, arch, tensors, factors)?,
    };
    if c.tie_word_embeddings != tied {
        let problem = format!("expected tie_word_embeddings {tied}, as output.weight says, got {}", !tied);
        return Err(metadata.invalid(CONFIG, problem));
    }
    Ok((c, layout))
}

/// The config in [`CONFIG`], if it says what the other keys say.
fn whole_config(
    keys: &Keys,
    arch: Arch,
    text: &str,
    layout: Layout,
    factors: Option<&[f32]>,
) -> Result<LlamaConfig, CheckpointError> {
    let metadata = keys.metadata;
    let hint = "without the key the others alone count";
    let other = |key: &str, problem: String| metadata.invalid(key, problem).with_hint(hint);
    let c = match ModelConfig::from_json(text, Path::new(CONFIG)) {
        Ok(ModelConfig::Llama(c)) if Arch::of(&c) == arch => c,
        Ok(_) => return Err(other(CONFIG, format!("expected the config of a {}, got another", arch.name()))),
        Err(e) => return Err(other(CONFIG, e.to_string())),
    };
    let pairs = keys::pairs(&c, layout).map_err(|u| other(CONFIG, format!("{}: {}", u.field, u.problem)))?;
    for (name, value) in &pairs {
        let key = keys.name(name);
        match metadata.get(&key) {
            Some(found) if found == value => {}
            found => {
                let got = found.map_or("nothing".into(), Value::describe);
                return Err(other(&key, format!("expected {}, as {CONFIG} says, got {got}", value.describe())));
            }
        }
    }
    if let Some(key) = keys.of_architecture().find(|key| !pairs.iter().any(|(name, _)| keys.name(name) == *key)) {
        return Err(other(key, format!("expected no such key beside {CONFIG}, got one")));
    }
    let ids = SpecialIds::read(metadata, c.vocab_size)?;
    if (ids.bos, &ids.eos, ids.pad) != (c.bos_token_id, &c.eos_token_ids, c.pad_token_id) {
        let want = (c.bos_token_id, &c.eos_token_ids, c.pad_token_id);
        let got = (ids.bos, &ids.eos, ids.pad);
        return Err(other(
            "tokenizer.ggml",
            format!("the ids of BOS, the ends and padding: expected {want:?}, as {CONFIG} says, got {got:?}"),
        ));
    }
    match factors {
        Some(factors) if !rope::same_factors(&c, factors, 1e-6) => {
            Err(other(super::layout::ROPE_FACTORS, format!("expected the factors of {CONFIG}, got others")))
        }
        None if rope::factors(&c).is_some() => Err(other(
            super::layout::ROPE_FACTORS,
            format!("expected a tensor of that name, as {CONFIG} says, got none"),
        )),
        _ => Ok(c),
    }
}

fn config_of_keys(
    keys: &mut Keys,
    arch: Arch,
    tensors: &[TensorEntry],
    factors: Option<&[f32]>,
) -> Result<LlamaConfig, CheckpointError> {
    let metadata = keys.metadata;
    let hidden_size = keys.required_size("embedding_length")?;
    let num_hidden_layers = keys.required_size("block_count")?;
    let intermediate_size = keys.required_size("feed_forward_length")?;
    let num_attention_heads = keys.required_size("attention.head_count")?;
    let mut num_key_value_heads = keys.size("attention.head_count_kv")?.unwrap_or(num_attention_heads);
    let max_position_embeddings = keys.required_size("context_length")?;
    let vocab_size = vocab_rows(keys, tensors)?;
    // The layers are listed below; their number must be backed by tensors first.
    let room = (tensors.len() as u64).saturating_sub(2) / LAYER_TENSORS;
    if num_hidden_layers as u64 > room {
        let problem =
            format!("expected at most {room} layers for the file's {} tensors, got {num_hidden_layers}", tensors.len());
        return Err(keys.invalid("block_count", problem));
    }
    if !num_attention_heads.is_multiple_of(num_key_value_heads) {
        let problem = format!("expected a divisor of head_count = {num_attention_heads}, got {num_key_value_heads}");
        return Err(keys.invalid("attention.head_count_kv", problem));
    }
    let (head_dim, latent) = match arch {
        Arch::Deepseek2 => {
            let latent = latent(keys, num_attention_heads, num_key_value_heads)?;
            num_key_value_heads = num_attention_heads;
            (latent.rope, Some(latent))
        }
        _ => (head_dim(keys, hidden_size, num_attention_heads)?, None),
    };
    let key = "attention.layer_norm_rms_epsilon";
    let rms_norm_eps = keys.float(key)?.ok_or_else(|| metadata.missing(&keys.name(key), "a FLOAT32"))?;
    if !(rms_norm_eps.is_finite() && rms_norm_eps > 0.0) {
        return Err(keys.invalid(key, format!("expected a small positive number, got {rms_norm_eps}")));
    }
    if latent.is_some() && rms_norm_eps != LATENT_NORM_EPS {
        let problem = "llama.cpp takes it for the norms of latents too, transformers always 1e-6; expected 1e-6, got";
        return Err(keys.invalid(key, format!("{problem} {rms_norm_eps:e}")));
    }
    let rope_theta = keys.float("rope.freq_base")?.unwrap_or(10000.0);
    if !(rope_theta.is_finite() && rope_theta > 0.0) {
        return Err(keys.invalid("rope.freq_base", format!("expected a positive number, got {rope_theta}")));
    }
    let experts = match arch {
        Arch::Qwen2 | Arch::Qwen3 => {
            let zero = [Value::U32(0), Value::F32(0.0)];
            keys.only("expert_count", &zero, "no experts in this architecture")?;
            keys.only("expert_used_count", &zero, "no experts in this architecture")?;
            None
        }
        Arch::Llama => mixtral(keys, intermediate_size)?,
        Arch::Deepseek2 => Some(deepseek(keys)?),
    };
    if let Some(e) = experts.filter(|e| e.count.saturating_mul(num_hidden_layers) > MOST_EXPERTS) {
        let problem =
            format!("expected at most {MOST_EXPERTS} over all {num_hidden_layers} layers, got {} a layer", e.count);
        return Err(keys.invalid("expert_count", problem));
    }
    // No window, or one that nothing lies outside of.
    let window = keys.count("attention.sliding_window")?;
    if window > 0 && window < max_position_embeddings {
        let problem = format!(
            "llama.cpp has full attention in this architecture; expected 0 or at least context_length = {max_position_embeddings}, got {window}"
        );
        return Err(keys.invalid("attention.sliding_window", problem));
    }
    keys.only("attention.causal", &[Value::Bool(true)], "attention is causal")?;
    keys.only("nextn_predict_layers", &[Value::U32(0)], "dsq predicts one token")?;
    let ids = SpecialIds::read(metadata, vocab_size)?;
    let model_type = match (arch, &experts) {
        (Arch::Llama, None) => "llama",
        (Arch::Llama, Some(_)) => "mixtral",
        (Arch::Deepseek2, Some(e)) if e.routing.scores == Scores::Sigmoid => "deepseek_v3",
        (Arch::Deepseek2, _) => "deepseek_v2",
        (Arch::Qwen2 | Arch::Qwen3, _) => arch.name(),
    };
    let mut c = LlamaConfig {
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
        rope_scaling: None,
        windows: Vec::new(),
        experts,
        latent,
        biases: Default::default(),
        tie_word_embeddings: !tensors.iter().any(|t| t.name == "output.weight"),
        bos_token_id: ids.bos,
        eos_token_ids: ids.eos,
        pad_token_id: ids.pad,
    };
    c.rope_scaling = rope::read(keys, &c, arch, factors)?;
    if matches!(c.rope_scaling, Some(RopeScaling::Yarn(_))) && rope_theta <= 1.0 {
        return Err(keys.invalid("rope.freq_base", format!("expected more than 1 with yarn, got {rope_theta}")));
    }
    keys.refuse_the_rest()?;
    Ok(c)
}

/// Experts of `llama`, as mixtral has them.
fn mixtral(keys: &mut Keys, width: usize) -> Result<Option<Experts>, CheckpointError> {
    let (count, per_token) = (keys.count("expert_count")?, keys.count("expert_used_count")?);
    if count == 0 && per_token == 0 {
        return Ok(None);
    }
    let per_token = experts_per_token(keys, per_token, count)?;
    let routing = Routing { per_token, scores: Scores::Softmax, groups: None, normalized: true, scale: 1.0 };
    let one = [Value::F32(1.0), Value::F32(0.0)];
    keys.only("expert_weights_scale", &one, "mixtral has none")?;
    keys.only("expert_shared_count", &[Value::U32(0)], "mixtral has none")?;
    keys.only("expert_group_count", &[Value::U32(0), Value::U32(1)], "mixtral has none")?;
    keys.only("expert_group_used_count", &[Value::U32(0), Value::U32(1)], "mixtral has none")?;
    keys.only("expert_gating_func", &[Value::U32(1), Value::U32(0)], "llama.cpp has a softmax here")?;
    Ok(Some(Experts { count, width, shared: 0, first_layer: 0, every: 1, routing }))
}

fn experts_per_token(keys: &Keys, n: usize, count: usize) -> Result<usize, CheckpointError> {
    if (1..=count).contains(&n) {
        return Ok(n);
    }
    Err(keys.invalid("expert_used_count", format!("expected 1 to expert_count = {count}, got {n}")))
}

/// Experts of `deepseek2`.
fn deepseek(keys: &mut Keys) -> Result<Experts, CheckpointError> {
    let count = keys.required_size("expert_count")?;
    let used = keys.required_size("expert_used_count")?;
    let per_token = experts_per_token(keys, used, count)?;
    let scores = match keys.count("expert_gating_func")? {
        0 | 1 => Scores::Softmax,
        2 => Scores::Sigmoid,
        n => return Err(keys.invalid("expert_gating_func", format!("expected 1 (softmax) or 2 (sigmoid), got {n}"))),
    };
    let (groups, kept) = (keys.count("expert_group_count")?, keys.count("expert_group_used_count")?);
    let groups = match (scores, groups) {
        (Scores::Softmax, 0 | 1) => None,
        (Scores::Softmax, n) => {
            let problem =
                "llama.cpp scores a group by its best two experts, deepseek_v2 by its best; expected 0 or 1, got";
            return Err(keys.invalid("expert_group_count", format!("{problem} {n}")));
        }
        (Scores::Sigmoid, 0 | 1) => Some(Groups { count: 1, kept: 1 }),
        (Scores::Sigmoid, n) => {
            let size = count / n;
            if !count.is_multiple_of(n) || size < 2 || !(1..=n).contains(&kept) || kept * size < per_token {
                let problem = format!(
                    "expected a divisor of expert_count = {count} that leaves 2 a group, and groups for {per_token} experts, got {n}, {kept} of them used"
                );
                return Err(keys.invalid("expert_group_count", problem));
            }
            Some(Groups { count: n, kept })
        }
    };
    if scores == Scores::Sigmoid && count < 2 {
        return Err(keys.invalid("expert_count", format!("expected at least 2, got {count}")));
    }
    let key = "expert_weights_norm";
    let norm = keys.key(key);
    let normalized = keys.metadata.bool(&norm)?.unwrap_or(false);
    if normalized && scores == Scores::Softmax {
        return Err(keys.invalid(key, "implementations of deepseek_v2 disagree on it; expected false, got true".into()));
    }
    let key = "expert_weights_scale";
    let scale = keys.float(key)?.filter(|s| *s != 0.0).unwrap_or(1.0);
    if !(scale.is_finite() && scale > 0.0) {
        return Err(keys.invalid(key, format!("expected a positive number, got {scale}")));
    }
    let routing = Routing { per_token, scores, groups, normalized, scale };
    Ok(Experts {
        count,
        width: keys.required_size("expert_feed_forward_length")?,
        shared: keys.count("expert_shared_count")?,
        first_layer: keys.count("leading_dense_block_count")?,
        every: 1,
        routing,
    })
}

/// The widths of latent attention: in files since April 2025 `key_length` and `value_length` are those of what is in the cache, and
/// the ends in `_mla` those of heads.
fn latent(keys: &mut Keys, heads: usize, kv_heads: usize) -> Result<Latent, CheckpointError> {
    let kv_rank = keys.required_size("attention.kv_lora_rank")?;
    let q_rank = Some(keys.count("attention.q_lora_rank")?).filter(|n| *n > 0);
    let rope = keys.required_size("rope.dimension_count")?;
    let split = keys.size("attention.key_length_mla")?;
    let (qk, value) = match split {
        Some(qk) => {
            let value = keys.required_size("attention.value_length_mla")?;
            for (name, want) in [("key_length", kv_rank + rope), ("value_length", kv_rank)] {
                let name = format!("attention.{name}");
                let got = keys.required_size(&name)?;
                if got != want {
                    return Err(keys.invalid(&name, format!("expected {want} (what the cache holds), got {got}")));
                }
            }
            (qk, value)
        }
        None => (keys.required_size("attention.key_length")?, keys.required_size("attention.value_length")?),
    };
    let want = if split.is_some() { 1 } else { heads };
    if kv_heads != want {
        return Err(keys.invalid("attention.head_count_kv", format!("expected {want}, got {kv_heads}")));
    }
    if !rope.is_multiple_of(2) || qk <= rope {
        let problem = format!("expected an even number below the {qk} of a key, got {rope}");
        return Err(keys.invalid("rope.dimension_count", problem));
    }
    Ok(Latent { q_rank, kv_rank, nope: qk - rope, rope, value, interleaved: true, mtp_layers: 0 })
}

/// The width of a head: `attention.key_length`, else hidden / heads; the whole of it must be rotated.
fn head_dim(keys: &mut Keys, hidden_size: usize, heads: usize) -> Result<usize, CheckpointError> {
    let head_dim = match keys.size("attention.key_length")? {
        Some(d) => d,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            let problem = format!("expected a divisor of embedding_length = {hidden_size}, got {heads}");
            return Err(keys.invalid("attention.head_count", problem));
        }
    };
    if !head_dim.is_multiple_of(2) {
        let problem = format!("expected heads of an even width (rotary pairs), got {head_dim}");
        return Err(keys.invalid("attention.key_length", problem));
    }
    for (name, what) in
        [("attention.value_length", "values as wide as keys"), ("rope.dimension_count", "the whole head rotated")]
    {
        if let Some(d) = keys.size(name)?.filter(|d| *d != head_dim) {
            return Err(keys.invalid(name, format!("expected {head_dim} ({what}), got {d}")));
        }
    }
    Ok(head_dim)
}

/// Rows of the embedding, held against `vocab_size`.
fn vocab_rows(keys: &mut Keys, tensors: &[TensorEntry]) -> Result<usize, CheckpointError> {
    let metadata = keys.metadata;
    let Some(embedding) = tensors.iter().find(|t| t.name == "token_embd.weight") else {
        return Err(metadata.invalid("token_embd.weight", "expected a tensor of that name, got none"));
    };
    let rows = embedding.ne.get(1).copied().unwrap_or(1);
    if rows > MAX_SIZE {
        return Err(metadata.invalid(&embedding.name, format!("expected at most {MAX_SIZE} rows, got {rows}")));
    }
    match keys.size("vocab_size")? {
        Some(n) if n as u64 != rows => {
            Err(keys.invalid("vocab_size", format!("expected {rows}, the rows of token_embd.weight, got {n}")))
        }
        _ => Ok(rows as usize),
    }
}

/// The ids of special tokens, each below the number of embedding rows.
pub(crate) struct SpecialIds {
    pub(crate) bos: Option<u32>,
    /// End of text, of a turn and of a message, without repetition, in this order.
    pub(crate) eos: Vec<u32>,
    pub(crate) unk: Option<u32>,
    pub(crate) pad: Option<u32>,
}

impl SpecialIds {
    pub(crate) fn read(metadata: &Metadata, rows: usize) -> Result<Self, CheckpointError> {
        let id = |name: &str| {
            let key = format!("tokenizer.ggml.{name}_token_id");
            match metadata.unsigned(&key)? {
                Some(n) if n < rows as u64 => Ok(Some(n as u32)),
                // llama.cpp's converters write 2^32 - 1 for "none".
                Some(n) if n == u64::from(u32::MAX) => Ok(None),
                Some(n) => Err(metadata.invalid(&key, format!("expected an id below {rows}, got {n}"))),
                None => Ok(None),
            }
        };
        let mut eos = Vec::new();
        for name in ["eos", "eot", "eom"] {
            if let Some(id) = id(name)?.filter(|id| !eos.contains(id)) {
                eos.push(id);
            }
        }
        Ok(Self { bos: id("bos")?, eos, unk: id("unknown")?, pad: id("padding")? })
    }
}
