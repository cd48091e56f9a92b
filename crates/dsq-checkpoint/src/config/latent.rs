//! The keys of deepseek_v2 and deepseek_v3: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), their experts, and layers
//! that predict tokens beyond the next (DeepSeek-V3, arXiv:2412.19437). Not the keys that all language models have (see
//! `llama.rs`).

use super::LlamaConfig;
use super::experts::{Experts, Groups, Routing, Scores, or_default, per_token};
use super::fields::Fields;
use super::rope::RopeScaling;
use crate::CheckpointError;
use serde_json::{Map, Value, json};
use std::path::Path;

/// Multi-head latent attention: keys and values of all heads are made of one narrow latent and one rotated key of each token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Latent {
    /// Width of the latent that queries are made of; `None`: they are made of the residual stream, as in V2-Lite.
    pub q_rank: Option<usize>,
    /// Width of the latent of keys and values.
    pub kv_rank: usize,
    /// Width of the part of a query or key head that has no position.
    pub nope: usize,
    /// Width of the part that is rotated; even. One key of this width serves all heads.
    pub rope: usize,
    /// Width of a value head.
    pub value: usize,
    /// Whether rotary pairs are neighbours, `(x0, x1), (x2, x3)`, and not half of the part apart.
    pub interleaved: bool,
    /// Layers after the last for predictions beyond the next token. dsq neither runs nor exports them.
    pub mtp_layers: usize,
}

/// Epsilon of the norms of latents, whatever `rms_norm_eps` is: so in DeepSeek's code, and in transformers.
pub const LATENT_NORM_EPS: f32 = 1e-6;

impl Latent {
    /// Width of a query or key head.
    pub fn qk(&self) -> usize {
        self.nope + self.rope
    }

    pub(super) fn read(
        f: &Fields,
        model_type: &str,
        default: &mut dyn FnMut(&'static str, String),
    ) -> Result<Self, CheckpointError> {
        let mut size = |key: &'static str, otherwise: usize| or_default(f, key, otherwise, default);
        let (kv_rank, nope, rope, value) = (
            size("kv_lora_rank", 512)?,
            size("qk_nope_head_dim", 128)?,
            size("qk_rope_head_dim", 64)?,
            size("v_head_dim", 128)?,
        );
        let q_rank = if f.has("q_lora_rank") { f.size("q_lora_rank")? } else { Some(size("q_lora_rank", 1536)?) };
        if !rope.is_multiple_of(2) {
            return Err(f.error("qk_rope_head_dim", format!("expected an even number (rotary pairs), got {rope}")));
        }
        // transformers writes what follows from other keys.
        f.only("head_dim", &json!(rope), "it is qk_rope_head_dim")?;
        f.only("qk_head_dim", &json!(nope + rope), "it is qk_nope_head_dim + qk_rope_head_dim")?;
        let mut latent = Self { q_rank, kv_rank, nope, rope, value, interleaved: true, mtp_layers: 0 };
        if model_type == "deepseek_v3" {
            latent.interleaved = f.boolean("rope_interleave")?.unwrap_or(true);
            let key = if f.has("num_mtp_layers") { "num_mtp_layers" } else { "num_nextn_predict_layers" };
            latent.mtp_layers = f.integer(key, 0..=64)?.map_or(0, |n| n as usize);
        }
        Ok(latent)
    }

    pub(super) fn write(&self, c: &LlamaConfig, map: &mut Map<String, Value>) {
        let mut put = |key: &str, value: Value| drop(map.insert(key.into(), value));
        put("q_lora_rank", json!(self.q_rank));
        put("kv_lora_rank", json!(self.kv_rank));
        put("qk_nope_head_dim", json!(self.nope));
        put("qk_rope_head_dim", json!(self.rope));
        put("v_head_dim", json!(self.value));
        if c.model_type == "deepseek_v3" {
            put("rope_interleave", json!(self.interleaved));
            put("num_nextn_predict_layers", json!(self.mtp_layers));
        }
    }
}

impl Experts {
    /// Reads the keys of deepseek_v2 and deepseek_v3.
    pub(super) fn of_deepseek(
        f: &Fields,
        model_type: &str,
        default: &mut dyn FnMut(&'static str, String),
    ) -> Result<Self, CheckpointError> {
        let v3 = model_type == "deepseek_v3";
        let mut size =
            |key: &'static str, [v2, three]: [usize; 2]| or_default(f, key, if v3 { three } else { v2 }, default);
        let count = size("n_routed_experts", [64, 256])?;
        let width = size("moe_intermediate_size", [1407, 2048])?;
        let chosen = match f.has("num_experts_per_tok") || v3 {
            true => size("num_experts_per_tok", [8, 8])?,
            false => f.required("num_experts_per_tok", f.size("num_experts_per_tok"))?,
        };
        let shared = match f.integer("n_shared_experts", 0..=1 << 16)? {
            Some(n) => n as usize,
            None if f.has("n_shared_experts") => 0,
            None => size("n_shared_experts", [2, 1])?,
        };
        let first_layer = f.integer("first_k_dense_replace", 0..=4096)?.map_or(if v3 { 3 } else { 0 }, |n| n as usize);
        let every = f.size("moe_layer_freq")?.unwrap_or(1);
        let per_token = per_token(f, chosen, count)?;
        let scores = if v3 { Scores::Sigmoid } else { Scores::Softmax };
        f.only("scoring_func", &json!(if v3 { "sigmoid" } else { "softmax" }), "the only scores of this type")?;
        let method = f.string("topk_method")?.unwrap_or(if v3 { "noaux_tc" } else { "greedy" });
        let groups = match method {
            "greedy" if !v3 => None,
            "group_limited_greedy" if !v3 => Some([None, None]),
            "noaux_tc" if v3 => Some([Some(8), Some(4)]),
            _ => {
                let known = if v3 { "\"noaux_tc\"" } else { "\"greedy\" or \"group_limited_greedy\"" };
                return Err(f.error("topk_method", format!("expected {known}, got {method:?}")));
            }
        };
        let (given, kept) = (f.size("n_group")?, f.size("topk_group")?);
        let groups = match groups {
            None => None,
            Some([otherwise, kept_otherwise]) => {
                let groups = Groups {
                    count: f.required("n_group", Ok(given.or(otherwise.filter(|_| !f.has("n_group")))))?,
                    kept: f.required("topk_group", Ok(kept.or(kept_otherwise.filter(|_| !f.has("topk_group")))))?,
                };
                check_groups(f, groups, count, per_token, scores)?;
                Some(groups)
            }
        };
        // Of V2 transformers reads the key and does nothing with it (told by the caller).
        let normalized = v3 && f.boolean("norm_topk_prob")?.unwrap_or(true);
        let scale = f.number("routed_scaling_factor")?.unwrap_or(if v3 { 2.5 } else { 1.0 }) as f32;
        if !(scale.is_finite() && scale > 0.0) {
            return Err(f.error("routed_scaling_factor", format!("expected a positive number, got {scale}")));
        }
        let routing = Routing { per_token, scores, groups, normalized, scale };
        Ok(Self { count, width, shared, first_layer, every, routing })
    }

    pub(super) fn write_deepseek(&self, map: &mut Map<String, Value>) {
        let r = &self.routing;
        let sigmoid = r.scores == Scores::Sigmoid;
        let method = match (sigmoid, r.groups) {
            (true, _) => "noaux_tc",
            (false, None) => "greedy",
            (false, Some(_)) => "group_limited_greedy",
        };
        let all = json!({
            "n_routed_experts": self.count,
            "moe_intermediate_size": self.width,
            "num_experts_per_tok": r.per_token,
            "n_shared_experts": self.shared,
            "first_k_dense_replace": self.first_layer,
            "moe_layer_freq": self.every,
            "scoring_func": if sigmoid { "sigmoid" } else { "softmax" },
            "topk_method": method,
            "n_group": r.groups.map(|g| g.count),
            "topk_group": r.groups.map(|g| g.kept),
            "norm_topk_prob": r.normalized,
            "routed_scaling_factor": super::llama::short(r.scale),
        });
        map.extend(all.as_object().cloned().unwrap_or_default());
    }
}

fn check_groups(
    f: &Fields,
    groups: Groups,
    count: usize,
    per_token: usize,
    scores: Scores,
) -> Result<(), CheckpointError> {
    let Groups { count: n, kept } = groups;
    let size = count / n;
    // Sigmoid scores are summed over the best two of a group.
    let least = if scores == Scores::Sigmoid { 2 } else { 1 };
    if !count.is_multiple_of(n) || size < least {
        let problem =
            format!("expected a divisor of the {count} experts that leaves at least {least} a group, got {n}");
        return Err(f.error("n_group", problem));
    }
    if kept > n || kept * size < per_token {
        let problem = format!(
            "expected at most n_group = {n} and enough groups of {size} for num_experts_per_tok = {per_token}, got {kept}"
        );
        return Err(f.error("topk_group", problem));
    }
    Ok(())
}

/// Linear layers of latent attention by the ends of their names within `self_attn`, in the order in which they run.
impl LlamaConfig {
    pub(super) fn latent_linears(&self, a: &Latent) -> Vec<(String, usize, usize)> {
        let (d, heads) = (self.hidden_size, self.num_attention_heads);
        let q = heads * a.qk();
        let mut out = match a.q_rank {
            None => vec![("q_proj", q, d)],
            Some(rank) => vec![("q_a_proj", rank, d), ("q_b_proj", q, rank)],
        };
        out.push(("kv_a_proj_with_mqa", a.kv_rank + a.rope, d));
        out.push(("kv_b_proj", heads * (a.nope + a.value), a.kv_rank));
        out.push(("o_proj", d, heads * a.value));
        out.into_iter().map(|(part, n, k)| (format!("self_attn.{part}"), n, k)).collect()
    }

    /// What scores of queries and keys are multiplied by: `1 / sqrt(width)`, and where YaRN has `mscale_all_dim` also the square of
    /// its magnitude.
    pub fn attention_scale(&self) -> f64 {
        let Some(a) = &self.latent else { return 1.0 / (self.head_dim as f64).sqrt() };
        let magnitude = match self.rope_scaling {
            Some(RopeScaling::Yarn(y)) => y.mscale_all_dim.filter(|m| *m != 0.0).map_or(1.0, |m| y.magnitude(m)),
            _ => 1.0,
        };
        magnitude * magnitude / (a.qk() as f64).sqrt()
    }

    /// The layer after the last that `name` is a tensor of, if it is one for predictions beyond the next token.
    pub fn mtp_layer(&self, name: &str) -> Option<usize> {
        let mtp = self.latent.map_or(0, |a| a.mtp_layers);
        let layer = name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()?;
        (self.num_hidden_layers..self.num_hidden_layers + mtp).contains(&layer).then_some(layer)
    }
}

/// Refuses key and value heads that are not as many as query heads.
pub(super) fn check_heads(f: &Fields, heads: usize, file: &Path) -> Result<(), CheckpointError> {
    match f.size("num_key_value_heads")? {
        Some(n) if n != heads => {
            let problem = format!("latent attention has a key for each query head; expected {heads}, got {n}");
            Err(CheckpointError::invalid(file, "num_key_value_heads", problem))
        }
        _ => Ok(()),
    }
}
