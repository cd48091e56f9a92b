//! The Llama family with gradients, in the names of Hugging Face `transformers`: RMSNorm, grouped-query attention with
//! rotary positions (half a head apart), SwiGLU, tied or untied output; biases of qwen2, norms of heads of qwen3, attention windows;
//! experts of mixtral and deepseek (see `experts.rs`), latent attention (`latent.rs`). Not a tokenizer and not text generation.

use crate::experts::{Experts, FeedForward, Router};
use crate::latent::{self, LatentAttention};
use crate::layers::{Embedding, Linear, RmsNorm, SwiGlu, forward_many};
use crate::names::{enter, leave, stored_name};
use crate::ops;
use crate::{HiddenTarget, IGNORED, ModelError, Teacher};
use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Int, Tensor};
use dsq_checkpoint::{Checkpoint, LlamaConfig, ModelConfig};
use dsq_kernels::train::{AttentionShape, Rope};
use dsq_quant::{InputGrid, KvGrid};
use rand_chacha::{
    ChaCha8Rng,
    rand_core::{RngCore, SeedableRng},
};
use std::sync::Arc;

/// Standard deviation of new weights; matrices that write to the residual stream get it divided by
/// `sqrt(2 * layers)` (GPT-2's rule).
const INIT_STD: f32 = 0.02;

/// Self-attention.
#[derive(Module, Debug)]
pub struct SelfAttention {
    /// `[heads * head_dim, d]`.
    pub q_proj: Linear,
    /// `[kv_heads * head_dim, d]`.
    pub k_proj: Linear,
    /// `[kv_heads * head_dim, d]`.
    pub v_proj: Linear,
    /// `[d, heads * head_dim]`.
    pub o_proj: Linear,
    /// Norm of each query head `[head_dim]`, before it is rotated.
    q_norm: Option<RmsNorm>,
    /// Norm of each key head `[head_dim]`.
    k_norm: Option<RmsNorm>,
}

/// The kinds of attention.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum Attention {
    /// Heads of queries in groups that share a head of keys and values.
    Grouped(SelfAttention),
    /// Keys and values of all heads made of one latent.
    Latent(LatentAttention),
}

/// One layer.
#[derive(Module, Debug)]
pub struct Layer {
    /// Norm before attention.
    pub input_layernorm: RmsNorm,
    /// Attention.
    pub self_attn: Attention,
    /// Norm before the feed-forward block.
    pub post_attention_layernorm: RmsNorm,
    /// Feed-forward block.
    pub mlp: FeedForward,
    /// The grids on which attention sees rotated keys and values; `None`: as they are.
    #[module(skip)]
    kv: Option<KvGrid>,
    /// Positions that a token sees; `None`: all before it.
    #[module(skip)]
    window: Option<usize>,
    /// Ends of the module names of the linear layers, in the order of the model.
    #[module(skip)]
    names: Arc<Vec<String>>,
}

/// Shape and rotary tables of a batch: `b` sequences of `t` tokens.
#[derive(Debug, Clone)]
pub struct Sequences {
    shape: AttentionShape,
    rope: Arc<Rope>,
}

impl Sequences {
    /// For `b` sequences of `t` tokens in a model of this architecture.
    pub fn new(config: &LlamaConfig, b: usize, t: usize) -> Self {
        let c = config;
        if let Some(a) = &c.latent {
            let (shape, rope) = latent::sequences(c, a, b, t);
            return Self { shape, rope: Arc::new(rope) };
        }
        let (heads, kv_heads) = (c.num_attention_heads, c.num_key_value_heads);
        // The window is the layer's.
        let shape = AttentionShape { b, t, heads, kv_heads, d: c.head_dim, window: None };
        Self { shape, rope: Arc::new(Rope::new(c.head_dim, c.rotary().table(t))) }
    }
}

/// What sees the inputs of linear layers during a forward pass, each before it is used: the names of the layers that read it, and the
/// tensor `[b, t, k]`. A grid that it returns is that of these layers from then on, in this pass too.
pub type Watch<'a, E> = dyn FnMut(&[String], &Tensor<3>) -> Result<Option<InputGrid>, E> + 'a;

/// The forward pass of a layer in the steps between its linear layers, so that a caller can see the input of each of
/// them (the input of q, k and v is one tensor, that of gate and up too). [`Layer::forward`] is these steps in order;
/// there is no other formula.
impl Layer {
    /// Layer `i` of a checkpoint (a quantized one gives its dequantized weights), without the rest of the model.
    ///
    /// # Errors
    /// As [`Llama::from_checkpoint`].
    pub fn from_checkpoint(checkpoint: &Checkpoint, i: usize, device: &Device) -> Result<Self, ModelError> {
        let config = llama_config(checkpoint)?;
        let mut layer = Self::build(config, i, device, &mut |name, shape| stored(checkpoint, name, shape))?;
        for (part, linear) in layer.linears_mut() {
            linear.set_inputs(checkpoint.input_grid(&format!("model.layers.{i}.{part}"))?);
        }
        layer.kv = checkpoint.kv_grid(i)?;
        Ok(layer)
    }

    /// Layer `i` of a model whose tensors `values` gives by their Hugging Face names and shapes, in float.
    ///
    /// # Errors
    /// Those of `values`.
    pub fn from_values<E>(
        config: &LlamaConfig,
        i: usize,
        device: &Device,
        mut values: impl FnMut(&str, &[usize]) -> Result<Vec<f32>, E>,
    ) -> Result<Self, E> {
        Self::build(config, i, device, &mut values)
    }

    /// The same with inputs of linear layers, keys and values as they are, on no grid.
    pub fn without_grids(mut self) -> Self {
        self.linears_mut().into_iter().for_each(|(_, linear)| linear.set_inputs(None));
        self.kv = None;
        self
    }

    /// The grids on which attention sees rotated keys and values, as a KV cache of codes holds them; `None`: as they are.
    pub fn set_kv_grid(&mut self, grid: Option<KvGrid>) {
        self.kv = grid;
    }

    /// Keys after the rotary embedding and values, as they go into a KV cache (not on its grids), in any order: from the input of
    /// q_proj, k_proj and v_proj.
    pub fn keys_and_values(&self, h: Tensor<3>, batch: &Sequences) -> [Vec<f32>; 2] {
        let [k, v] = match &self.self_attn {
            Attention::Grouped(a) => {
                let [k, v] = forward_many([&a.k_proj, &a.v_proj], h);
                [norm_heads(a.k_norm.as_ref(), k, batch.shape.d), v]
            }
            Attention::Latent(a) => {
                let [_, k, v] = a.heads(h);
                [k, v]
            }
        };
        [batch.shape.rotated_keys(&host(k), &batch.rope), host(v)]
    }

    /// Asks `values` for every tensor of layer `i`.
    fn build<E>(
        config: &LlamaConfig,
        i: usize,
        device: &Device,
        values: &mut impl FnMut(&str, &[usize]) -> Result<Vec<f32>, E>,
    ) -> Result<Self, E> {
        let c = config;
        let (d, eps) = (c.hidden_size, c.rms_norm_eps);
        let (q, kv) = (c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim);
        let mut self_attn = match &c.latent {
            Some(a) => Attention::Latent(LatentAttention::build(c, a, i, device, values)?),
            None => {
                let mut linear =
                    |part: &str, shape| Linear::build(c, i, &format!("self_attn.{part}"), shape, device, values);
                Attention::Grouped(SelfAttention {
                    q_proj: linear("q_proj", [q, d])?,
                    k_proj: linear("k_proj", [kv, d])?,
                    v_proj: linear("v_proj", [kv, d])?,
                    o_proj: linear("o_proj", [d, q])?,
                    q_norm: None,
                    k_norm: None,
                })
            }
        };
        let mlp = match Experts::build(c, i, device, values)? {
            Some(experts) => FeedForward::Experts(experts),
            None => {
                let (names, ffn) = (LlamaConfig::dense_names(false), c.intermediate_size);
                FeedForward::Dense(SwiGlu::build(c, i, names, ffn, device, values)?)
            }
        };
        let mut norm = |part: &str, width: usize| {
            let name = format!("model.layers.{i}.{part}.weight");
            values(&name, &[width]).map(|v| RmsNorm::from_values(v, eps, device))
        };
        let input_layernorm = norm("input_layernorm", d)?;
        let post_attention_layernorm = norm("post_attention_layernorm", d)?;
        if let (Attention::Grouped(a), true) = (&mut self_attn, c.has_head_norms()) {
            a.q_norm = Some(norm("self_attn.q_norm", c.head_dim)?);
            a.k_norm = Some(norm("self_attn.k_norm", c.head_dim)?);
        }
        let names = Arc::new(c.layer_linears(i).into_iter().map(|l| l.0).collect());
        Ok(Self { input_layernorm, self_attn, post_attention_layernorm, mlp, kv: None, window: c.window(i), names })
    }

    /// Excludes what is never quantized from training: norms, biases and routers.
    pub fn freeze_floats(mut self) -> Self {
        self.input_layernorm = self.input_layernorm.no_grad();
        self.post_attention_layernorm = self.post_attention_layernorm.no_grad();
        self.self_attn = match self.self_attn {
            Attention::Grouped(mut a) => {
                a.q_norm = a.q_norm.map(Module::no_grad);
                a.k_norm = a.k_norm.map(Module::no_grad);
                Attention::Grouped(a)
            }
            Attention::Latent(a) => Attention::Latent(a.freeze_norms()),
        };
        self.mlp = self.mlp.freeze_floats();
        self.linears_mut().into_iter().for_each(|(_, linear)| linear.freeze_bias());
        self
    }

    /// The residual stream after the layer, from that before it, `[b, t, d]`.
    pub fn forward(&self, x: Tensor<3>, batch: &Sequences) -> Tensor<3> {
        let attended = self.o_input(self.qkv_input(x.clone()), batch);
        let x = self.after_attention(x, attended);
        self.after_feed_forward(x)
    }

    /// The residual stream after the layer, from that after attention.
    pub fn after_feed_forward(&self, x: Tensor<3>) -> Tensor<3> {
        let h = self.gate_up_input(x.clone());
        x + self.mlp.forward(h)
    }

    /// [`Layer::forward`] of layer `i`, whose inputs `watch` sees.
    fn forward_watched<E>(
        &mut self,
        i: usize,
        x: Tensor<3>,
        batch: &Sequences,
        watch: &mut Watch<E>,
    ) -> Result<Tensor<3>, E> {
        let h = self.qkv_input(x.clone());
        let mut attended = h.clone();
        for set in self.attention_sets() {
            attended = self.attention_input(set[0], h.clone(), batch);
            self.show(i, &set, &attended, watch)?;
        }
        let x = self.after_attention(x, attended);
        let h = self.gate_up_input(x.clone());
        let routed = match &self.mlp {
            FeedForward::Dense(_) => return Ok(x + self.block_watched(i, 0, h, watch)?),
            FeedForward::Experts(experts) => experts.route(h.clone()),
        };
        let mut outs = Vec::new();
        for e in routed.hit() {
            let tokens = routed.tokens_of(e);
            let dims = tokens.dims();
            outs.push(self.block_watched(i, e, tokens.unsqueeze::<3>(), watch)?.reshape(dims));
        }
        let mut sum = routed.combine(outs, h.dims());
        let shared = self.mlp.blocks().len() - 1;
        if matches!(&self.mlp, FeedForward::Experts(e) if e.shared().is_some()) {
            sum = sum + self.block_watched(i, shared, h, watch)?;
        }
        Ok(x + sum)
    }

    /// The output of block `j` of the feed-forward blocks, whose inputs `watch` sees.
    fn block_watched<E>(&mut self, i: usize, j: usize, h: Tensor<3>, watch: &mut Watch<E>) -> Result<Tensor<3>, E> {
        let [gate, up, down] = self.block_names(j);
        self.show(i, &[gate.as_str(), up.as_str()], &h, watch)?;
        let inner = self.mlp.blocks()[j].inner(h);
        self.show(i, &[down.as_str()], &inner, watch)?;
        Ok(self.mlp.blocks()[j].down_proj.forward(inner))
    }

    /// Shows the input of some of the linears, and takes the grid that comes back.
    fn show<E>(&mut self, i: usize, parts: &[&str], x: &Tensor<3>, watch: &mut Watch<E>) -> Result<(), E> {
        let names: Vec<String> = parts.iter().map(|part| format!("model.layers.{i}.{part}")).collect();
        if let Some(grid) = watch(&names, x)? {
            let chosen = self.linears_mut().into_iter().filter(|(part, _)| parts.contains(&part.as_str()));
            chosen.for_each(|(_, linear)| linear.set_inputs(Some(grid)));
        }
        Ok(())
    }

    /// The norms whose outputs linears read, by the ends of their names within the layer, to change them.
    pub fn norms_mut(&mut self) -> Vec<(&'static str, &mut RmsNorm)> {
        let mut out = vec![
            ("input_layernorm", &mut self.input_layernorm),
            ("post_attention_layernorm", &mut self.post_attention_layernorm),
        ];
        if let Attention::Latent(a) = &mut self.self_attn {
            out.extend(a.norms_mut());
        }
        out
    }

    /// The weight of the router `[experts, d]`, where there is one, to change it.
    pub fn router_mut(&mut self) -> Option<&mut Router> {
        match &mut self.mlp {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(experts) => Some(experts.router_mut()),
        }
    }

    /// Input `[b, t, d]` of the linears that attention begins with (q_proj, k_proj and v_proj), from the residual stream before
    /// the layer.
    pub fn qkv_input(&self, x: Tensor<3>) -> Tensor<3> {
        self.input_layernorm.forward(x)
    }

    /// Ends of the module names of attention's linears, those that read one tensor together, in the order in which they run; o_proj
    /// is the last.
    pub fn attention_sets(&self) -> Vec<Vec<&'static str>> {
        match &self.self_attn {
            Attention::Grouped(_) => {
                vec![vec!["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], vec!["self_attn.o_proj"]]
            }
            Attention::Latent(a) => a.sets(),
        }
    }

    /// Input `[b, t, k]` of the linear `part` of attention, from that of the first of them.
    pub fn attention_input(&self, part: &str, h: Tensor<3>, batch: &Sequences) -> Tensor<3> {
        match &self.self_attn {
            _ if part == "self_attn.o_proj" => self.o_input(h, batch),
            Attention::Grouped(_) => h,
            Attention::Latent(a) => a.input_of(part, h),
        }
    }

    /// Input `[b, t, heads * width]` of o_proj, from that of the first linears of attention.
    pub fn o_input(&self, h: Tensor<3>, batch: &Sequences) -> Tensor<3> {
        let shape = AttentionShape { window: self.window, ..batch.shape };
        match &self.self_attn {
            Attention::Grouped(a) => {
                let [q, k, v] = forward_many([&a.q_proj, &a.k_proj, &a.v_proj], h);
                let (q, k) = (norm_heads(a.q_norm.as_ref(), q, shape.d), norm_heads(a.k_norm.as_ref(), k, shape.d));
                ops::attention::attention([q, k, v], shape, batch.rope.clone(), self.kv)
            }
            Attention::Latent(a) => {
                a.o_input(ops::attention::attention(a.heads(h), shape, batch.rope.clone(), self.kv))
            }
        }
    }

    /// The residual stream after attention, from that before the layer and the input of o_proj.
    pub fn after_attention(&self, x: Tensor<3>, attended: Tensor<3>) -> Tensor<3> {
        let o_proj = match &self.self_attn {
            Attention::Grouped(a) => &a.o_proj,
            Attention::Latent(a) => &a.o_proj,
        };
        x + o_proj.forward(attended)
    }

    /// Normed input `[b, t, d]` of the feed-forward block, from the residual stream after attention.
    pub fn gate_up_input(&self, x: Tensor<3>) -> Tensor<3> {
        self.post_attention_layernorm.forward(x)
    }

    /// Ends of the module names of gate, up and down of block `j` of [`FeedForward::blocks`].
    pub fn block_names(&self, j: usize) -> [String; 3] {
        let first = self.names.len() - 3 * self.mlp.blocks().len();
        std::array::from_fn(|part| self.names[first + 3 * j + part].clone())
    }

    /// The linear layers with the ends of their module names (`self_attn.q_proj`), in the order of the model.
    pub fn linears(&self) -> Vec<(String, &Linear)> {
        let attention: Vec<&Linear> = match &self.self_attn {
            Attention::Grouped(a) => vec![&a.q_proj, &a.k_proj, &a.v_proj, &a.o_proj],
            Attention::Latent(a) => a.linears(),
        };
        let rest = self.mlp.blocks().into_iter().flat_map(SwiGlu::linears);
        self.names.iter().cloned().zip(attention.into_iter().chain(rest)).collect()
    }

    /// [`Layer::linears`], to change them.
    pub fn linears_mut(&mut self) -> Vec<(String, &mut Linear)> {
        let attention: Vec<&mut Linear> = match &mut self.self_attn {
            Attention::Grouped(a) => vec![&mut a.q_proj, &mut a.k_proj, &mut a.v_proj, &mut a.o_proj],
            Attention::Latent(a) => a.linears_mut(),
        };
        let rest = self.mlp.linears_mut();
        self.names.iter().cloned().zip(attention.into_iter().chain(rest)).collect()
    }
}

/// A Llama-like language model.
#[derive(Module, Debug)]
pub struct Llama {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    /// `None` when the output matrix is the embedding.
    lm_head: Option<Linear>,
    #[module(skip)]
    config: LlamaConfig,
}

impl Llama {
    /// A new model with seeded weights: the same bits for the same seed and config, on any machine.
    pub fn new(config: &LlamaConfig, seed: u64, device: &Device) -> Self {
        let residual = INIT_STD / ((2 * config.num_hidden_layers) as f32).sqrt();
        let mut stream = 0;
        Self::build(config, device, |name, shape| {
            stream += 1;
            let len = shape.iter().product();
            Ok::<_, std::convert::Infallible>(match shape.len() {
                1 if name.ends_with(".bias") => vec![0.0; len],
                1 => vec![1.0; len],
                _ if name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight") => {
                    normal(len, residual, seed, stream)
                }
                _ => normal(len, INIT_STD, seed, stream),
            })
        })
        .unwrap_or_else(|e| match e {})
    }

    /// The float model of a checkpoint (a quantized one gives its dequantized weights, inputs on the grids of their tokens and
    /// keys and values on those of its cache where its scheme has such).
    ///
    /// # Errors
    /// [`ModelError::Architecture`] for another kind of model, [`ModelError::Checkpoint`] for what cannot be read.
    pub fn from_checkpoint(checkpoint: &Checkpoint, device: &Device) -> Result<Self, ModelError> {
        let config = llama_config(checkpoint)?;
        let mut model = Self::build(config, device, |name, shape| stored(checkpoint, name, shape))?;
        for (name, linear) in model.linears_mut() {
            linear.set_inputs(checkpoint.input_grid(&name)?);
        }
        for (i, layer) in model.layers.iter_mut().enumerate() {
            layer.kv = checkpoint.kv_grid(i)?;
        }
        Ok(model)
    }

    /// A model of tensors by their Hugging Face names, for instance those of [`Llama::named_tensors`].
    ///
    /// # Errors
    /// [`ModelError::Tensor`] for one that is missing or has another length.
    pub fn from_tensors<'a>(
        config: &LlamaConfig,
        device: &Device,
        find: impl Fn(&str) -> Option<&'a [f32]>,
    ) -> Result<Self, ModelError> {
        Self::build(config, device, |name, shape| {
            let tensor = |problem: String| ModelError::Tensor { name: name.into(), problem };
            let data = find(name).ok_or_else(|| tensor(format!("missing; expected shape {shape:?}, got none")))?;
            let len = shape.iter().product::<usize>();
            if data.len() != len {
                return Err(tensor(format!("expected {len} values ({shape:?}), got {}", data.len())));
            }
            Ok(data.to_vec())
        })
    }

    /// Asks `values` for every tensor, in the order of [`Llama::named_tensors`].
    fn build<E>(
        config: &LlamaConfig,
        device: &Device,
        mut values: impl FnMut(&str, &[usize]) -> Result<Vec<f32>, E>,
    ) -> Result<Self, E> {
        let c = config;
        let (d, eps) = (c.hidden_size, c.rms_norm_eps);
        let embed = values("model.embed_tokens.weight", &[c.vocab_size, d])?;
        let mut layers = Vec::with_capacity(c.num_hidden_layers);
        for i in 0..c.num_hidden_layers {
            layers.push(Layer::build(c, i, device, &mut values)?);
        }
        let norm = RmsNorm::from_values(values("model.norm.weight", &[d])?, eps, device);
        let lm_head = match c.tie_word_embeddings {
            true => None,
            false => {
                let shape = [c.vocab_size, d];
                Some(Linear::from_values(values("lm_head.weight", &shape)?, shape, device))
            }
        };
        let embed_tokens = Embedding::from_values(embed, [c.vocab_size, d], device);
        Ok(Self { embed_tokens, layers, norm, lm_head, config: config.clone() })
    }

    /// Excludes everything that is never quantized from training: embedding, norms, biases and the head.
    pub fn freeze_floats(mut self) -> Self {
        self.embed_tokens = self.embed_tokens.no_grad();
        self.norm = self.norm.no_grad();
        self.lm_head = self.lm_head.map(Module::no_grad);
        self.layers = self.layers.into_iter().map(Layer::freeze_floats).collect();
        self
    }

    /// [`Layer::without_grids`] of every layer, and the head's input on none.
    pub fn without_grids(mut self) -> Self {
        self.layers = self.layers.into_iter().map(Layer::without_grids).collect();
        self.lm_head.iter_mut().for_each(|head| head.set_inputs(None));
        self
    }

    /// The architecture.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Logits `[b, t, vocab]` of tokens `[b, t]`.
    ///
    /// # Panics
    /// When a token lies outside the vocabulary.
    pub fn forward(&self, tokens: Tensor<2, Int>) -> Tensor<3> {
        let [b, _] = tokens.dims();
        let ids = tokens.into_data().convert::<i32>().try_to_vec::<i32>().expect("converted to i32");
        self.logits(Arc::new(ids), b)
    }

    /// Logits `[b, t, vocab]` of `b` sequences of one length.
    ///
    /// # Panics
    /// As [`Llama::forward`].
    pub fn logits(&self, ids: Arc<Vec<i32>>, b: usize) -> Tensor<3> {
        let (batch, x) = self.embedded(ids, b);
        self.logits_of(self.layers.iter().fold(x, |x, layer| layer.forward(x, &batch)))
    }

    /// The residual stream after each layer, `[b, t, d]` each, and the logits of [`Llama::logits`].
    ///
    /// # Panics
    /// As [`Llama::forward`].
    pub fn states_and_logits(&self, ids: Arc<Vec<i32>>, b: usize) -> (Vec<Tensor<3>>, Tensor<3>) {
        let (batch, mut x) = self.embedded(ids, b);
        let mut states = Vec::with_capacity(self.layers.len());
        for layer in &self.layers {
            x = layer.forward(x, &batch);
            states.push(x.clone());
        }
        (states, self.logits_of(x))
    }

    /// [`Llama::states_and_logits`], where `watch` sees the inputs of all linear layers.
    ///
    /// # Errors
    /// The first of `watch`.
    ///
    /// # Panics
    /// As [`Llama::forward`].
    pub fn watched<E>(
        &mut self,
        ids: Arc<Vec<i32>>,
        b: usize,
        watch: &mut Watch<E>,
    ) -> Result<(Vec<Tensor<3>>, Tensor<3>), E> {
        let (batch, mut x) = self.embedded(ids, b);
        let mut states = Vec::with_capacity(self.layers.len());
        for (i, layer) in self.layers.iter_mut().enumerate() {
            x = layer.forward_watched(i, x, &batch, watch)?;
            states.push(x.clone());
        }
        let x = self.norm.forward(x);
        if let Some(head) = &mut self.lm_head
            && let Some(grid) = watch(&["lm_head".to_owned()], &x)?
        {
            head.set_inputs(Some(grid));
        }
        Ok((states, self.head(x)))
    }

    /// The shape of a batch, and the residual stream before the first layer, `[b, t, d]`.
    pub fn embedded(&self, ids: Arc<Vec<i32>>, b: usize) -> (Sequences, Tensor<3>) {
        (Sequences::new(&self.config, b, ids.len() / b.max(1)), self.embed_tokens.forward(ids, b))
    }

    /// The layers, in order.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Logits `[b, t, vocab]` from the residual stream after the last layer, `[b, t, d]`.
    pub fn logits_of(&self, x: Tensor<3>) -> Tensor<3> {
        self.head(self.norm.forward(x))
    }

    /// Logits from the output of the last norm.
    fn head(&self, x: Tensor<3>) -> Tensor<3> {
        match &self.lm_head {
            Some(head) => head.forward(x),
            None => ops::linear::linear(x, self.embed_tokens.weight.val()),
        }
    }

    /// Mean over all tokens of the divergence of the predictions made of the residual stream `x [b, t, d]` after the last
    /// layer from the teacher's, in nats.
    pub fn divergence(&self, x: Tensor<3>, teacher: Teacher) -> Tensor<1> {
        let [b, t, _] = x.dims();
        ops::distill::distill(self.logits_of(x), teacher, (b * t).max(1) as f32)
    }

    /// The causal language-model loss `[1]` of a micro-batch of `b` sequences: the sum of the cross-entropies of
    /// `labels` (one for each token, already shifted; [`IGNORED`] takes no part) divided by `label_tokens`.
    ///
    /// `label_tokens` counts the labels of the **whole** batch: the losses and gradients of its micro-batches then add
    /// up to those of the mean over all label tokens. A batch without labels has loss 0 (pass any count).
    ///
    /// # Panics
    /// When the lengths differ, or a token or label lies outside the vocabulary.
    pub fn loss(&self, ids: Arc<Vec<i32>>, labels: Arc<Vec<i32>>, b: usize, label_tokens: usize) -> Tensor<1> {
        Self::loss_of(self.logits(ids, b), labels, label_tokens)
    }

    /// [`Llama::loss`] of logits `[b, t, vocab]`.
    ///
    /// # Panics
    /// When the lengths differ, or a label lies outside the vocabulary.
    pub fn loss_of(logits: Tensor<3>, labels: Arc<Vec<i32>>, label_tokens: usize) -> Tensor<1> {
        ops::cross_entropy::cross_entropy(logits, labels, label_tokens.max(1) as f32)
    }

    /// The loss of distillation `[1]` of a batch of `b` sequences: `weight` times the mean over tokens of
    /// `T^2 KL(teacher || self)`, and the rest times the mean cross-entropy of `labels`. With `hidden` also its weight times
    /// the mean over layers of `sum (self - teacher)^2 / sum teacher^2` of the residual stream, over the tokens that have a
    /// label.
    ///
    /// # Panics
    /// When the teacher has not as many logits, layers or values as this model gives, or as [`Llama::loss`].
    pub fn distill_loss(
        &self,
        ids: Arc<Vec<i32>>,
        labels: Arc<Vec<i32>>,
        b: usize,
        teacher: Teacher,
        weight: f32,
        hidden: Option<HiddenTarget>,
    ) -> Tensor<1> {
        Self::distill_loss_of(self.states_and_logits(ids, b), labels, teacher, weight, hidden)
    }

    /// [`Llama::distill_loss`] of what [`Llama::states_and_logits`] gives.
    ///
    /// # Panics
    /// As [`Llama::distill_loss`].
    pub fn distill_loss_of(
        (states, logits): (Vec<Tensor<3>>, Tensor<3>),
        labels: Arc<Vec<i32>>,
        teacher: Teacher,
        weight: f32,
        hidden: Option<HiddenTarget>,
    ) -> Tensor<1> {
        let distance = hidden.and_then(|target| ops::hidden::hidden_loss(states, target, &labels));
        let rows = labels.len().max(1) as f32;
        let mut loss = ops::distill::distill(logits.clone(), teacher, rows);
        if weight != 1.0 {
            let count = labels.iter().filter(|&&l| l != IGNORED).count().max(1) as f32;
            let entropy = ops::cross_entropy::cross_entropy(logits, labels, count);
            loss = loss.mul_scalar(weight) + entropy.mul_scalar(1.0 - weight);
        }
        match distance {
            None => loss,
            Some(distance) => loss + distance,
        }
    }

    /// Every tensor as `(name, shape, values)`, in Hugging Face names, in a fixed order. Learned grids and adapters are no
    /// tensors of the model (see [`Linear::grid`], [`Linear::learned_input`] and [`Linear::lora`]); a weight with an adapter is given without it.
    pub fn named_tensors(&self) -> Vec<(String, Vec<usize>, Vec<f32>)> {
        struct Collect<'a>(Vec<String>, Vec<(String, Vec<usize>, Vec<f32>)>, &'a LlamaConfig);
        impl ModuleVisitor for Collect<'_> {
            fn enter_module(&mut self, name: &str, container: &str) {
                enter(&mut self.0, name, container);
            }
            fn exit_module(&mut self, _name: &str, container: &str) {
                leave(&mut self.0, container);
            }
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if self.0.iter().any(|part| part == "grid" || part == "lora") {
                    return;
                }
                let tensor = param.val();
                let shape = tensor.dims().to_vec();
                self.1.push((stored_name(&self.0.join("."), self.2), shape, host(tensor)));
            }
        }
        let mut collect = Collect(Vec::new(), Vec::new(), &self.config);
        self.visit(&mut collect);
        collect.1
    }

    /// The linear layers by module name (`model.layers.0.self_attn.q_proj`), `lm_head` last when it is not tied.
    pub fn linears(&self) -> Vec<(String, &Linear)> {
        let mut out = Vec::new();
        for (i, layer) in self.layers.iter().enumerate() {
            out.extend(layer.linears().into_iter().map(|(name, l)| (format!("model.layers.{i}.{name}"), l)));
        }
        out.extend(self.lm_head.iter().map(|l| ("lm_head".to_owned(), l)));
        out
    }

    /// The norms before the linears of the layers by tensor name (`model.layers.0.input_layernorm.weight`), to change them.
    pub fn norms_mut(&mut self) -> Vec<(String, &mut RmsNorm)> {
        let mut out = Vec::new();
        for (i, l) in self.layers.iter_mut().enumerate() {
            out.extend(l.norms_mut().into_iter().map(|(name, norm)| (format!("model.layers.{i}.{name}.weight"), norm)));
        }
        out
    }

    /// The routers by tensor name (`model.layers.0.mlp.gate.weight`), to change them.
    pub fn routers_mut(&mut self) -> Vec<(String, &mut Router)> {
        let name = self.config.feed_forward_name();
        let routers = self.layers.iter_mut().enumerate().filter_map(|(i, l)| Some((i, l.router_mut()?)));
        routers.map(|(i, router)| (format!("model.layers.{i}.{name}.gate.weight"), router)).collect()
    }

    /// [`Llama::linears`], to change their settings.
    pub fn linears_mut(&mut self) -> Vec<(String, &mut Linear)> {
        let mut out = Vec::new();
        for (i, layer) in self.layers.iter_mut().enumerate() {
            out.extend(layer.linears_mut().into_iter().map(|(name, l)| (format!("model.layers.{i}.{name}"), l)));
        }
        out.extend(self.lm_head.iter_mut().map(|l| ("lm_head".to_owned(), l)));
        out
    }
}

/// `x [b, t, heads * d]`, each head normed, if there is a norm of them.
fn norm_heads(norm: Option<&RmsNorm>, x: Tensor<3>, d: usize) -> Tensor<3> {
    let Some(norm) = norm else { return x };
    let [b, t, width] = x.dims();
    norm.forward(x.reshape([b, t, width / d, d])).reshape([b, t, width])
}

/// The architecture of a checkpoint.
fn llama_config(checkpoint: &Checkpoint) -> Result<&LlamaConfig, ModelError> {
    match checkpoint.config() {
        ModelConfig::Llama(config) => Ok(config),
        other => Err(ModelError::Architecture { expected: "llama", got: format!("{other:?}") }),
    }
}

/// A tensor of a checkpoint, dequantized where it is stored as codes.
fn stored(checkpoint: &Checkpoint, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    if shape.len() == 1 || module == "model.embed_tokens" {
        return Ok(checkpoint.read_f32(name)?);
    }
    Ok(checkpoint.linear(module)?.into_f32())
}

/// Labels of next-token prediction for sequences of `t` tokens: each token's label is the next one, the last has none.
pub fn next_token_labels(ids: &[i32], t: usize) -> Vec<i32> {
    ids.chunks(t.max(1)).flat_map(|s| s[1..].iter().copied().chain([IGNORED])).collect()
}

/// The values of a tensor, row major.
pub(crate) fn host<const D: usize>(t: Tensor<D>) -> Vec<f32> {
    t.into_data().try_into_vec::<f32>().expect("models are f32")
}

/// `len` values of mean 0 and deviation `std`: sums of twelve uniforms, so only additions and multiplications, and the
/// same bits everywhere.
pub(crate) fn normal(len: usize, std: f32, seed: u64, stream: u64) -> Vec<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    let unit = 1.0 / (1u64 << 24) as f32;
    (0..len).map(|_| ((0..12).map(|_| (rng.next_u32() >> 8) as f32 * unit).sum::<f32>() - 6.0) * std).collect()
}
