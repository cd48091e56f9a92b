//! Multi-head latent attention with gradients (DeepSeek-V2, arXiv:2405.04434): queries of a latent or of the residual stream, keys
//! and values of one latent and one rotated key for all heads. Keys and values of all heads are made and attended to as in any
//! other layer; nothing is folded into other matrices. Not the attention itself (see `ops::attention`).
//!
//! The kernel knows heads of one width that are rotated whole, in pairs half a head apart. So heads are laid out anew: the part
//! without a position in pairs that do not turn, the rotated part in its pairs, and zeros where a head is wider than it needs to be.

use crate::layers::{Linear, RmsNorm, forward_many};
use crate::ops::gather::{self, Columns};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use dsq_checkpoint::{LATENT_NORM_EPS, Latent, LlamaConfig};
use dsq_kernels::train::{AttentionShape, Rope};
use std::sync::Arc;

/// Latent attention.
#[derive(Module, Debug)]
pub struct LatentAttention {
    /// `[heads * qk, d]`, where queries have no latent.
    q_proj: Option<Linear>,
    /// `[q_rank, d]`.
    q_a_proj: Option<Linear>,
    q_a_layernorm: Option<RmsNorm>,
    /// `[heads * qk, q_rank]`.
    q_b_proj: Option<Linear>,
    /// `[kv_rank + rope, d]`.
    kv_a_proj_with_mqa: Linear,
    kv_a_layernorm: RmsNorm,
    /// `[heads * (nope + value), kv_rank]`.
    kv_b_proj: Linear,
    /// `[d, heads * value]`.
    pub(crate) o_proj: Linear,
    #[module(skip)]
    maps: Arc<Maps>,
}

/// Where the columns of heads, as the kernel takes them, come from.
#[derive(Debug)]
struct Maps {
    /// Of the outputs of q_proj or q_b_proj.
    q: Arc<Columns>,
    /// Of the outputs of kv_b_proj.
    k: Arc<Columns>,
    /// Of those of kv_a_proj_with_mqa, the same for every head.
    k_rope: Arc<Columns>,
    /// The latent in the outputs of kv_a_proj_with_mqa.
    latent: Arc<Columns>,
    /// Of the outputs of kv_b_proj.
    v: Arc<Columns>,
    /// Of the kernel's output.
    out: Arc<Columns>,
}

/// Pairs of a head as the kernel takes it: those without a position, those that turn, and room for values.
fn pairs(a: &Latent) -> (usize, usize) {
    let still = a.nope.div_ceil(2);
    (still, (still + a.rope / 2).max(a.value.div_ceil(2)))
}

/// Attention of `b` sequences of `t` tokens, and the rotary tables of its heads.
pub(crate) fn sequences(config: &LlamaConfig, a: &Latent, b: usize, t: usize) -> (AttentionShape, Rope) {
    let (still, half) = pairs(a);
    let heads = config.num_attention_heads;
    let shape = AttentionShape { b, t, heads, kv_heads: heads, d: 2 * half, window: None };
    let turning = a.rope / 2;
    let tables = config.rotary().table(t).into_iter().zip([1.0f32, 0.0]).map(|(table, rest)| {
        let mut out = vec![rest; t * half];
        for (out, row) in out.chunks_exact_mut(half).zip(table.chunks_exact(turning)) {
            out[still..still + turning].copy_from_slice(row);
        }
        out
    });
    let mut tables = tables;
    let tables = [tables.next().unwrap_or_default(), tables.next().unwrap_or_default()];
    (shape, Rope::new(2 * half, tables))
}

impl Maps {
    fn new(config: &LlamaConfig, a: &Latent) -> Self {
        let heads = config.num_attention_heads;
        let (still, half) = pairs(a);
        let (d, turning) = (2 * half, a.rope / 2);
        // The column of a query or key head that stands at `j` of the kernel's head: of the part without a position, or of the
        // rotated one.
        let nope = |j: usize| match (j % half, j / half) {
            (p, 0) if p < still => Some(p),
            (p, _) if p < still && p + still < a.nope => Some(p + still),
            _ => None,
        };
        let rope = |j: usize| match (j % half, j / half) {
            (p, second) if (still..still + turning).contains(&p) => Some(match a.interleaved {
                true => 2 * (p - still) + second,
                false => p - still + second * turning,
            }),
            _ => None,
        };
        let map = |factor: f32, of: &dyn Fn(usize, usize) -> Option<usize>| {
            let from = (0..heads).flat_map(|h| (0..d).map(move |j| (h, j))).map(|(h, j)| of(h, j)).collect();
            Arc::new(Columns { from, factor })
        };
        // The kernel divides by the root of its own width.
        let scale = (config.attention_scale() * (d as f64).sqrt()) as f32;
        let (qk, kv) = (a.qk(), a.nope + a.value);
        let out = (0..heads).flat_map(|h| (0..a.value).map(move |j| Some(h * d + j))).collect();
        Self {
            q: map(scale, &|h, j| Some(h * qk + nope(j).or(rope(j).map(|r| a.nope + r))?)),
            k: map(1.0, &|h, j| Some(h * kv + nope(j)?)),
            k_rope: map(1.0, &|_, j| Some(a.kv_rank + rope(j)?)),
            latent: Arc::new(Columns { from: (0..a.kv_rank).map(Some).collect(), factor: 1.0 }),
            v: map(1.0, &|h, j| (j < a.value).then_some(h * kv + a.nope + j)),
            out: Arc::new(Columns { from: out, factor: 1.0 }),
        }
    }
}

impl LatentAttention {
    /// That of layer `i`, whose tensors `values` gives by their names and shapes.
    pub(crate) fn build<E>(
        config: &LlamaConfig,
        a: &Latent,
        i: usize,
        device: &Device,
        values: &mut impl FnMut(&str, &[usize]) -> Result<Vec<f32>, E>,
    ) -> Result<Self, E> {
        let (d, heads) = (config.hidden_size, config.num_attention_heads);
        let q = heads * a.qk();
        let mut linear = |part: &str, shape: [usize; 2]| {
            Linear::build(config, i, &format!("self_attn.{part}"), shape, device, values)
        };
        let (q_proj, q_a_proj, q_b_proj) = match a.q_rank {
            None => (Some(linear("q_proj", [q, d])?), None, None),
            Some(rank) => (None, Some(linear("q_a_proj", [rank, d])?), Some(linear("q_b_proj", [q, rank])?)),
        };
        let kv_a_proj_with_mqa = linear("kv_a_proj_with_mqa", [a.kv_rank + a.rope, d])?;
        let kv_b_proj = linear("kv_b_proj", [heads * (a.nope + a.value), a.kv_rank])?;
        let o_proj = linear("o_proj", [d, heads * a.value])?;
        let mut norm = |part: &str, width: usize| {
            let weight = values(&format!("model.layers.{i}.self_attn.{part}.weight"), &[width])?;
            Ok(RmsNorm::from_values(weight, LATENT_NORM_EPS, device))
        };
        let q_a_layernorm = a.q_rank.map(|rank| norm("q_a_layernorm", rank)).transpose()?;
        let kv_a_layernorm = norm("kv_a_layernorm", a.kv_rank)?;
        let maps = Arc::new(Maps::new(config, a));
        Ok(Self {
            q_proj,
            q_a_proj,
            q_a_layernorm,
            q_b_proj,
            kv_a_proj_with_mqa,
            kv_a_layernorm,
            kv_b_proj,
            o_proj,
            maps,
        })
    }

    /// Queries, keys and values of all heads as the kernel takes them, `[b, t, heads * width]`, from the normed residual stream.
    pub(crate) fn heads(&self, h: Tensor<3>) -> [Tensor<3>; 3] {
        let [q, kv] = self.first(h);
        let q = match (&self.q_a_layernorm, &self.q_b_proj) {
            (Some(norm), Some(b)) => b.forward(norm.forward(q)),
            _ => q,
        };
        let expanded = self.kv_b_proj.forward(self.kv_b_input(kv.clone()));
        let k = gather::columns(expanded.clone(), &self.maps.k) + gather::columns(kv, &self.maps.k_rope);
        [gather::columns(q, &self.maps.q), k, gather::columns(expanded, &self.maps.v)]
    }

    /// The outputs of q_proj or q_a_proj, and of kv_a_proj_with_mqa.
    fn first(&self, h: Tensor<3>) -> [Tensor<3>; 2] {
        match self.q_a_proj.as_ref().or(self.q_proj.as_ref()) {
            Some(q) => forward_many([q, &self.kv_a_proj_with_mqa], h),
            // One of the two is always there.
            None => [h.clone(), self.kv_a_proj_with_mqa.forward(h)],
        }
    }

    fn kv_b_input(&self, kv: Tensor<3>) -> Tensor<3> {
        self.kv_a_layernorm.forward(gather::columns(kv, &self.maps.latent))
    }

    /// The input of the linear layer `part` other than o_proj, from the normed residual stream.
    pub(crate) fn input_of(&self, part: &str, h: Tensor<3>) -> Tensor<3> {
        match (part, &self.q_a_layernorm) {
            ("self_attn.kv_b_proj", _) => self.kv_b_input(self.kv_a_proj_with_mqa.forward(h)),
            ("self_attn.q_b_proj", Some(norm)) => {
                let [q, _] = self.first(h);
                norm.forward(q)
            }
            _ => h,
        }
    }

    /// The input `[b, t, heads * value]` of o_proj in the kernel's output.
    pub(crate) fn o_input(&self, attended: Tensor<3>) -> Tensor<3> {
        gather::columns(attended, &self.maps.out)
    }

    /// Layers that read one tensor, set by set, in the order in which they run.
    pub(crate) fn sets(&self) -> Vec<Vec<&'static str>> {
        match self.q_proj {
            Some(_) => vec![vec!["self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"]],
            None => vec![vec!["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"], vec!["self_attn.q_b_proj"]],
        }
        .into_iter()
        .chain([vec!["self_attn.kv_b_proj"], vec!["self_attn.o_proj"]])
        .collect()
    }

    /// The linear layers in the order of the model.
    pub(crate) fn linears(&self) -> Vec<&Linear> {
        let q = self.q_proj.iter().chain(&self.q_a_proj).chain(&self.q_b_proj);
        q.chain([&self.kv_a_proj_with_mqa, &self.kv_b_proj, &self.o_proj]).collect()
    }

    /// [`LatentAttention::linears`], to change them.
    pub(crate) fn linears_mut(&mut self) -> Vec<&mut Linear> {
        let q = self.q_proj.iter_mut().chain(&mut self.q_a_proj).chain(&mut self.q_b_proj);
        q.chain([&mut self.kv_a_proj_with_mqa, &mut self.kv_b_proj, &mut self.o_proj]).collect()
    }

    /// The norms of latents, by the ends of their names within a layer, to change them.
    pub(crate) fn norms_mut(&mut self) -> impl Iterator<Item = (&'static str, &mut RmsNorm)> {
        let q = self.q_a_layernorm.iter_mut().map(|norm| ("self_attn.q_a_layernorm", norm));
        q.chain([("self_attn.kv_a_layernorm", &mut self.kv_a_layernorm)])
    }

    /// Excludes norms from training.
    pub(crate) fn freeze_norms(self) -> Self {
        let q_a_layernorm = self.q_a_layernorm.map(Module::no_grad);
        Self { q_a_layernorm, kv_a_layernorm: self.kv_a_layernorm.no_grad(), ..self }
    }
}
