//! The attention of a layer on packed weights: grouped queries (biases of qwen2, norms of heads of qwen3), or latent attention
//! (DeepSeek-V2, arXiv:2405.04434). Not the kernel over the cache (see `dsq_kernels::attention`), not feed-forward blocks.
//!
//! Of latent attention the cache holds keys and values of all heads, as of any other: a token's latent is expanded once, when it
//! comes in. That is `heads * (qk + value)` numbers a position where the latent and its rotated key are `kv_rank + rope`.

use crate::cache::{KvType, Scratch};
use crate::llama::{Part, WithBias, add_bias, product};
use crate::profile::{Clock, Op};
use crate::rope::RopeTable;
use crate::{KvPolicy, RuntimeError};
use dsq_checkpoint::{Checkpoint, LATENT_NORM_EPS, Latent as Shape, LlamaConfig};
use dsq_kernels::attention::{KvFormat, PagedLayer, Queries, attend};
use dsq_kernels::elementwise::rms_norm;
use dsq_kernels::{Activations, Linear};
use dsq_quant::{InputGrid, KvGrid};

/// The kinds of attention, with what all of them have.
#[derive(Debug)]
pub(crate) struct Attention {
    kind: Kind,
    o: Linear,
    o_input: Option<InputGrid>,
    o_bias: Option<Vec<f32>>,
    /// The grids on which the cache holds keys and values; `None`: as f32.
    pub(crate) kv: Option<KvGrid>,
    /// Positions that a token sees; `None`: all before it.
    pub(crate) window: Option<usize>,
}

#[derive(Debug)]
enum Kind {
    Grouped(Box<Grouped>),
    Latent(Box<Latent>),
}

#[derive(Debug)]
struct Grouped {
    qkv: [Linear; 3],
    input: Option<InputGrid>,
    /// Biases of q, k and v.
    bias: [Option<Vec<f32>>; 3],
    /// Norms of query and key heads, `[head_dim]` each.
    head_norms: Option<[Vec<f32>; 2]>,
}

#[derive(Debug)]
struct Latent {
    shape: Shape,
    /// What reads the residual stream: q_proj or q_a_proj, and kv_a_proj_with_mqa.
    first: [Linear; 2],
    input: Option<InputGrid>,
    /// The norm of the latent of queries, q_b_proj and how its input is quantized.
    q_b: Option<(Vec<f32>, Linear, Option<InputGrid>)>,
    kv_norm: Vec<f32>,
    kv_b: Linear,
    kv_b_input: Option<InputGrid>,
}

/// What latent attention works in, kept for the next layer and step: it grows to what was ever needed.
#[derive(Debug, Clone, Default)]
pub(crate) struct LatentRoom {
    /// The latents of queries, and those with the rotated key of keys and values.
    q: Vec<f32>,
    kv: Vec<f32>,
    /// Latents of keys and values alone.
    latent: Vec<f32>,
    normed: Vec<f32>,
    /// Keys and values of all heads.
    expanded: Vec<f32>,
}

impl LatentRoom {
    pub(crate) fn bytes(&self) -> usize {
        let Self { q, kv, latent, normed, expanded } = self;
        [q, kv, latent, normed, expanded].iter().map(|b| b.capacity()).sum::<usize>() * size_of::<f32>()
    }
}

/// Widths of the rows of queries, keys and values, and of attention's output.
pub(crate) fn widths(c: &LlamaConfig) -> [usize; 4] {
    match &c.latent {
        None => {
            let (q, kv) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
            [q, kv, kv, q]
        }
        Some(a) => [a.qk(), a.qk(), a.value, a.value].map(|width| c.num_attention_heads * width),
    }
}

/// The cache of a layer, of so many blocks.
pub(crate) fn new_cache(c: &LlamaConfig, layer: &Attention, blocks: usize, kv: KvType, policy: KvPolicy) -> PagedLayer {
    let format = layer.kv.map_or(kv.format(), KvFormat::Codes);
    let cache = match &c.latent {
        None => {
            let scale = 1.0 / (c.head_dim as f32).sqrt();
            PagedLayer::new(blocks, c.num_key_value_heads, [c.head_dim; 2], scale, format)
        }
        Some(a) => {
            let scale = c.attention_scale() as f32;
            PagedLayer::new(blocks, c.num_attention_heads, [a.qk(), a.value], scale, format)
        }
    };
    match (policy, layer.window) {
        (KvPolicy::Window { sinks, window }, None) => cache.windowed(Some(window)).with_sinks(sinks),
        (KvPolicy::Window { window, .. }, Some(own)) => cache.windowed(Some(window.min(own))),
        (KvPolicy::Full | KvPolicy::Entropy { .. }, own) => cache.windowed(own),
    }
}

impl Attention {
    pub(crate) fn load(model: &Checkpoint, config: &LlamaConfig, i: usize) -> Result<Self, RuntimeError> {
        let part = Part { model, layer: i };
        let name = |part: &str| format!("self_attn.{part}");
        let kind = match config.latent {
            None => Kind::Grouped(Box::new(Grouped::load(&part, config)?)),
            Some(shape) => Kind::Latent(Box::new(Latent::load(&part, shape)?)),
        };
        let (o, o_input) = (part.linear(&name("o_proj"))?, part.input(&[&name("o_proj")])?);
        let o_bias = part.bias(config, &name("o_proj"))?;
        Ok(Self { kind, o, o_input, o_bias, kv: model.kv_grid(i)?, window: config.window(i) })
    }

    /// What attention adds to the residual stream for its normed rows `scratch.normed [m, d]`, in `scratch.delta`; keys and values go into
    /// the cache behind those that it holds of each sequence.
    ///
    /// # Errors
    /// [`RuntimeError::Numerics`] for a key or value that the cache has no form for.
    pub(crate) fn run(
        &self,
        c: &LlamaConfig,
        layer: usize,
        mode: Activations,
        batch: &[Queries],
        cache: &mut PagedLayer,
        rope: &RopeTable,
        scratch: &mut Scratch,
    ) -> Result<(), RuntimeError> {
        let Scratch { normed, q, k, v, mixed, delta, positions, latent, clock, .. } = scratch;
        let rows = Rows { c, mode, rope, positions };
        match &self.kind {
            Kind::Grouped(a) => a.heads(&rows, normed, [&mut q[..], &mut k[..], &mut v[..]], mixed, clock),
            Kind::Latent(a) => a.heads(&rows, normed, [&mut q[..], &mut k[..], &mut v[..]], latent, clock),
        }
        let format = cache.format();
        let [_, k_width, v_width, _] = widths(c);
        for (what, rows, width) in [("keys", &k, k_width), ("values", &v, v_width)] {
            if format.refused(rows).is_none() {
                continue;
            }
            let found = rows.chunks_exact(width).zip(&*positions).find_map(|(row, p)| Some((format.refused(row)?, p)));
            if let Some((value, position)) = found {
                let form = if matches!(format, KvFormat::F16) { "f16" } else { "codes" };
                let of = format!("{what} of position {position} for a cache of {form}");
                return Err(RuntimeError::Numerics { what: format!("model.layers.{layer}.self_attn: {of}"), value });
            }
        }
        cache.put_rows(batch, k, v);
        clock.lap(Op::Put);
        attend(cache, batch, q, c.num_attention_heads, mixed);
        clock.lap(Op::Attend);
        product(mode, &self.o_input, &[&self.o], mixed, positions.len(), &mut [&mut *delta]);
        add_bias(delta, &self.o_bias);
        clock.lap(Op::Output);
        Ok(())
    }

    /// The linear layers in the order of the model, and how their inputs are quantized.
    pub(crate) fn linears(&self) -> Vec<(&Linear, &Option<InputGrid>)> {
        let mut out = match &self.kind {
            Kind::Grouped(a) => a.qkv.iter().map(|l| (l, &a.input)).collect(),
            Kind::Latent(a) => {
                let [q, kv] = &a.first;
                let mut out = vec![(q, &a.input)];
                out.extend(a.q_b.iter().map(|(_, l, input)| (l, input)));
                out.extend([(kv, &a.input), (&a.kv_b, &a.kv_b_input)]);
                out
            }
        };
        out.push((&self.o, &self.o_input));
        out
    }

    /// The linear layers of [`Attention::linears`] with their biases, to be exchanged.
    pub(crate) fn linears_mut(&mut self) -> Vec<WithBias<'_>> {
        let mut out: Vec<WithBias<'_>> = match &mut self.kind {
            Kind::Grouped(a) => a.qkv.iter_mut().zip(&mut a.bias).map(|(l, bias)| (l, Some(bias))).collect(),
            Kind::Latent(a) => {
                let [q, kv] = &mut a.first;
                let mut out: Vec<WithBias<'_>> = vec![(q, None)];
                out.extend(a.q_b.iter_mut().map(|(_, l, _)| (l, None)));
                out.extend([(kv, None), (&mut a.kv_b, None)]);
                out
            }
        };
        out.push((&mut self.o, Some(&mut self.o_bias)));
        out
    }

    /// Values of norms and biases.
    pub(crate) fn floats(&self) -> usize {
        let o_bias = self.o_bias.as_ref().map_or(0, Vec::len);
        o_bias
            + match &self.kind {
                Kind::Grouped(a) => {
                    let biases: usize = a.bias.iter().flatten().map(Vec::len).sum();
                    biases + a.head_norms.iter().flatten().map(Vec::len).sum::<usize>()
                }
                Kind::Latent(a) => a.kv_norm.len() + a.q_b.as_ref().map_or(0, |(norm, ..)| norm.len()),
            }
    }
}

impl Grouped {
    fn load(part: &Part, config: &LlamaConfig) -> Result<Self, RuntimeError> {
        let names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
        let bias = |name: &str| part.bias(config, name);
        let head_norm = |norm: &str| part.floats(&format!("self_attn.{norm}.weight"));
        let head_norms =
            if config.has_head_norms() { Some([head_norm("q_norm")?, head_norm("k_norm")?]) } else { None };
        Ok(Self {
            qkv: [part.linear(names[0])?, part.linear(names[1])?, part.linear(names[2])?],
            input: part.input(&names)?,
            bias: [bias(names[0])?, bias(names[1])?, bias(names[2])?],
            head_norms,
        })
    }

    /// Rotated queries and keys, and values; `room` is as wide as the queries.
    fn heads(&self, rows: &Rows, x: &mut [f32], [q, k, v]: [&mut [f32]; 3], room: &mut [f32], clock: &mut Clock) {
        let m = rows.positions.len();
        let [wq, wk, wv] = &self.qkv;
        product(rows.mode, &self.input, &[wq, wk, wv], x, m, &mut [q, k, v]);
        for (bias, out) in self.bias.iter().zip([&mut *q, &mut *k, &mut *v]) {
            add_bias(out, bias);
        }
        if let Some(norms) = &self.head_norms {
            for (norm, heads) in norms.iter().zip([&mut *q, &mut *k]) {
                let out = &mut room[..heads.len()];
                rms_norm(heads, norm, rows.c.rms_norm_eps, out);
                heads.copy_from_slice(out);
            }
        }
        clock.lap(Op::Qkv);
        rows.rope.rotate_rows(q, rows.positions);
        rows.rope.rotate_rows(k, rows.positions);
        clock.lap(Op::Rotate);
    }
}

impl Latent {
    fn load(part: &Part, shape: Shape) -> Result<Self, RuntimeError> {
        let name = |part: &str| format!("self_attn.{part}");
        let (q, kv) = (name(if shape.q_rank.is_some() { "q_a_proj" } else { "q_proj" }), name("kv_a_proj_with_mqa"));
        let q_b = match shape.q_rank {
            None => None,
            Some(_) => {
                let (norm, b) = (part.floats(&name("q_a_layernorm.weight"))?, name("q_b_proj"));
                Some((norm, part.linear(&b)?, part.input(&[&b])?))
            }
        };
        let kv_b = name("kv_b_proj");
        Ok(Self {
            shape,
            first: [part.linear(&q)?, part.linear(&kv)?],
            input: part.input(&[&q, &kv])?,
            q_b,
            kv_norm: part.floats(&name("kv_a_layernorm.weight"))?,
            kv_b: part.linear(&kv_b)?,
            kv_b_input: part.input(&[&kv_b])?,
        })
    }

    /// Queries and keys whose last parts are rotated, and values, of all heads.
    fn heads(&self, rows: &Rows, x: &mut [f32], [q, k, v]: [&mut [f32]; 3], room: &mut LatentRoom, clock: &mut Clock) {
        let Rows { c, mode, rope, positions } = *rows;
        let m = positions.len();
        let Shape { kv_rank, nope, value, interleaved, .. } = self.shape;
        let [first_q, first_kv] = &self.first;
        let LatentRoom { q: q_latent, kv, latent, normed, expanded } = room;
        kv.resize(m * first_kv.n(), 0.0);
        match &self.q_b {
            None => product(mode, &self.input, &[first_q, first_kv], x, m, &mut [q, kv]),
            Some((norm, b, input)) => {
                q_latent.resize(m * norm.len(), 0.0);
                product(mode, &self.input, &[first_q, first_kv], x, m, &mut [&mut *q_latent, &mut *kv]);
                normed.resize(q_latent.len(), 0.0);
                rms_norm(q_latent, norm, LATENT_NORM_EPS, normed);
                product(mode, input, &[b], normed, m, &mut [q]);
            }
        }
        latent.clear();
        latent.extend(kv.chunks_exact(first_kv.n()).flat_map(|row| &row[..kv_rank]));
        normed.resize(latent.len(), 0.0);
        rms_norm(latent, &self.kv_norm, LATENT_NORM_EPS, normed);
        expanded.resize(m * self.kv_b.n(), 0.0);
        product(mode, &self.kv_b_input, &[&self.kv_b], normed, m, &mut [&mut *expanded]);
        clock.lap(Op::Qkv);
        let (qk, heads) = (self.shape.qk(), c.num_attention_heads);
        for (t, row) in kv.chunks_exact_mut(first_kv.n()).enumerate() {
            let turned = &mut row[kv_rank..];
            rope.rotate_as(turned, positions[t], interleaved);
            let expanded = expanded[t * self.kv_b.n()..].chunks_exact(nope + value);
            let q = q[t * heads * qk..][..heads * qk].chunks_exact_mut(qk);
            let k = k[t * heads * qk..][..heads * qk].chunks_exact_mut(qk);
            let v = v[t * heads * value..][..heads * value].chunks_exact_mut(value);
            for (((q, k), v), from) in q.zip(k).zip(v).zip(expanded) {
                rope.rotate_as(&mut q[nope..], positions[t], interleaved);
                k[..nope].copy_from_slice(&from[..nope]);
                k[nope..].copy_from_slice(turned);
                v.copy_from_slice(&from[nope..]);
            }
        }
        clock.lap(Op::Rotate);
    }
}

/// What the rows of a forward pass have in common.
struct Rows<'a> {
    c: &'a LlamaConfig,
    mode: Activations,
    rope: &'a RopeTable,
    /// The position of each row in its sequence.
    positions: &'a [usize],
}
