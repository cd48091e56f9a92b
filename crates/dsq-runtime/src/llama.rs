//! A Llama-like model on packed weights: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, tied or untied
//! head. Not attention (see `attention.rs`) and feed-forward blocks (`feed_forward.rs`), not sampling (see `generate.rs`), not the file formats (see `dsq-checkpoint`).
//!
//! The bits of a token's logits depend on the tokens before it only: not on the number of threads, nor on how the
//! sequence was cut into calls (see the orders in `dsq-kernels`).

use crate::RuntimeError;
use crate::attention::{self, Attention};
use crate::cache::{KvCache, Scratch};
use crate::feed_forward::{FeedForward, Room};
use crate::rope::RopeTable;
use dsq_checkpoint::{Checkpoint, Dtype, LinearWeight, LlamaConfig, ModelConfig, RopeScaling};
use dsq_kernels::attention::LayerCache;
use dsq_kernels::elementwise::rms_norm;
use dsq_kernels::fake_quant::fake_quant_rows;
use dsq_kernels::{FloatLinear, FloatPacking, Linear, Team};
use dsq_quant::{FloatType, InputGrid};
use rayon::prelude::*;

/// Tokens of a prompt that go through the layers together: the activations of a chunk stay in the cache.
pub(crate) const PREFILL: usize = 192;

/// Which positions' logits a forward pass returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// Of the last token: `[vocab]`.
    Last,
    /// Of every token: `[tokens, vocab]`.
    All,
}

#[derive(Debug)]
pub(crate) struct Layer {
    input_norm: Vec<f32>,
    pub(crate) attention: Attention,
    post_norm: Vec<f32>,
    feed_forward: FeedForward,
}

/// A language model ready to run on the CPU.
#[derive(Debug)]
pub struct LlamaRuntime {
    config: LlamaConfig,
    embedding: Linear,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    /// None when the head is the embedding.
    head: Option<Linear>,
    head_input: Option<InputGrid>,
    /// Width of the widest feed-forward block.
    widest: usize,
    team: Team,
}

impl LlamaRuntime {
    /// Reads a model and packs its weights; one copy stays in memory. Float weights keep their stored dtype (those of
    /// a GGUF file are dequantized to f32).
    ///
    /// # Errors
    /// [`RuntimeError::Model`] for another architecture; errors of the checkpoint.
    pub fn load(model: &Checkpoint, threads: usize) -> Result<Self, RuntimeError> {
        let config = llama_config(model)?.clone();
        let refused = |e: &dyn std::fmt::Display| RuntimeError::Model {
            file: model.path().display().to_string(),
            problem: format!("cannot start {threads} threads: {e}"),
        };
        let team = Team::new(threads).map_err(|e| refused(&e))?;
        // Rayon reads and packs the layers; its threads end with the loading.
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).build();
        let pool = pool.map_err(|e| refused(&e))?;
        let (embedding, head, layers, final_norm) = pool.install(|| -> Result<_, RuntimeError> {
            let embedding = linear(model, "model.embed_tokens")?;
            let tied = config.tie_word_embeddings && !model.is_quantized("lm_head");
            let head = if tied { None } else { Some(linear(model, "lm_head")?) };
            let layers = (0..config.num_hidden_layers)
                .into_par_iter()
                .map(|i| layer(model, &config, i))
                .collect::<Result<Vec<_>, RuntimeError>>()?;
            Ok((embedding, head, layers, model.read_f32("model.norm.weight")?))
        })?;
        let head_input = model.input_grid("lm_head")?;
        let widest = (0..config.num_hidden_layers).map(|i| config.widest_block(i)).max().unwrap_or(0);
        Ok(Self { config, embedding, layers, final_norm, head, head_input, widest, team })
    }

    /// The longest context of a language model, before any weight is read.
    ///
    /// # Errors
    /// [`RuntimeError::Model`] for another architecture.
    pub fn context_of(model: &Checkpoint) -> Result<usize, RuntimeError> {
        Ok(llama_config(model)?.max_position_embeddings)
    }

    /// The architecture.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Worker threads.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// Memory for a sequence of at most `tokens` tokens, allocated now.
    ///
    /// # Errors
    /// [`RuntimeError::TooLong`] beyond `max_position_embeddings`.
    pub fn new_cache(&self, tokens: usize) -> Result<KvCache, RuntimeError> {
        let c = &self.config;
        if tokens > c.max_position_embeddings {
            let of = match c.rope_scaling {
                Some(RopeScaling::Dynamic { .. }) => {
                    "max_position_embeddings; dynamic rotary scaling would change the keys that are in the cache beyond it"
                }
                _ => "max_position_embeddings",
            };
            return Err(RuntimeError::TooLong { what: "context", limit: c.max_position_embeddings, of, got: tokens });
        }
        let layers = self.layers.iter().map(|l| attention::new_cache(c, &l.attention, tokens)).collect();
        let rope = RopeTable::new(tokens, &c.rotary());
        Ok(KvCache { layers, rope, len: 0, capacity: tokens, scratch: Scratch::default() })
    }

    /// Appends `tokens` to the sequence in `cache` and returns logits.
    ///
    /// # Errors
    /// [`RuntimeError::TooLong`] when they do not fit; [`RuntimeError::Input`] for no token, an id beyond the vocabulary, or a
    /// cache of another model; [`RuntimeError::Numerics`] for a key or value that is not finite and has no code in the cache.
    /// The cache then stays as it was.
    pub fn forward(&self, tokens: &[u32], cache: &mut KvCache, logits: Logits) -> Result<Vec<f32>, RuntimeError> {
        let c = &self.config;
        let input = |problem: String| Err(RuntimeError::Input { what: "tokens", problem });
        if tokens.is_empty() {
            return input("expected at least one token, got none".into());
        }
        if let Some(id) = tokens.iter().find(|&&id| id as usize >= c.vocab_size) {
            return input(format!("expected ids below the vocabulary's {} rows, got {id}", c.vocab_size));
        }
        if cache.layers.len() != self.layers.len() {
            return input(format!("expected a cache of {} layers, got {}", self.layers.len(), cache.layers.len()));
        }
        let attention = self.layers.iter().map(|l| &l.attention);
        let differs = |(l, c): &(&Attention, &LayerCache)| (l.kv, l.window) != (c.grid(), c.window());
        if let Some((l, c)) = attention.zip(&cache.layers).find(differs) {
            let (want, got) = ((l.kv, l.window), (c.grid(), c.window()));
            return input(format!("expected a cache of this model ({want:?}), got one of another ({got:?})"));
        }
        let got = cache.len + tokens.len();
        if got > cache.capacity {
            let of = "positions of the context";
            return Err(RuntimeError::TooLong { what: "tokens", limit: cache.capacity, of, got });
        }
        let (mut out, before) = (Vec::new(), cache.len);
        let done: Result<(), RuntimeError> = self.team.enter(|| {
            let chunks = tokens.chunks(PREFILL);
            let last = chunks.len() - 1;
            for (i, chunk) in chunks.enumerate() {
                self.run_layers(chunk, cache)?;
                cache.len += chunk.len();
                let rows = match logits {
                    Logits::All => chunk.len(),
                    Logits::Last => usize::from(i == last),
                };
                self.append_logits(rows, &mut cache.scratch, &mut out);
            }
            Ok(())
        });
        if done.is_err() {
            cache.len = before;
        }
        done.map(|()| out)
    }

    fn run_layers(&self, tokens: &[u32], cache: &mut KvCache) -> Result<(), RuntimeError> {
        let (c, m, past) = (&self.config, tokens.len(), cache.len);
        let h = c.hidden_size;
        let [q, k, v, mixed] = attention::widths(c);
        let KvCache { layers, rope, scratch, .. } = cache;
        let f = self.widest;
        scratch.resize(m, [h, h, q, k, v, mixed, f, f, f]);
        embed(&self.embedding, tokens, &mut scratch.hidden);
        let mut out = vec![0.0; m * h];
        for (i, (layer, kv)) in self.layers.iter().zip(layers).enumerate() {
            layer.run(c, i, past, &mut [(m, kv)], rope, scratch, &mut out)?;
        }
        Ok(())
    }

    /// Logits of the last `rows` tokens of the chunk in `scratch.hidden`.
    fn append_logits(&self, rows: usize, scratch: &mut Scratch, out: &mut Vec<f32>) {
        if rows == 0 {
            return;
        }
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        Head { norm: &self.final_norm, matrix: head, input: &self.head_input }.run(&self.config, rows, scratch, out);
    }

    /// Bytes of weights in memory: packed linears, embedding, norms, biases.
    pub fn resident_bytes(&self) -> usize {
        let floats =
            |l: &Layer| l.input_norm.len() + l.post_norm.len() + l.attention.floats() + l.feed_forward.bias_values();
        let routers: usize = self.layers.iter().map(|l| l.feed_forward.router_bytes()).sum();
        let floats = self.layers.iter().map(floats).sum::<usize>() + self.final_norm.len();
        self.linears().map(|(_, l, _)| l.bytes()).sum::<usize>() + routers + floats * size_of::<f32>()
    }

    /// Bytes of weights that one decoded token reads: all of them, but of an untied embedding one row only, and of experts those that
    /// it runs.
    pub fn bytes_per_token(&self) -> usize {
        let embedding = if self.head.is_some() { self.embedding.bytes() } else { 0 };
        let idle: usize = self.layers.iter().map(|l| l.feed_forward.idle_bytes()).sum();
        self.resident_bytes() - embedding - idle
    }

    /// Bytes that a decoded token reads of the cache where `positions` are filled: keys and values of all layers, as far as their
    /// windows go.
    pub fn kv_bytes(&self, positions: f64) -> f64 {
        let c = &self.config;
        let of = |l: &Layer| {
            let bytes = if l.attention.kv.is_some() { 1 } else { size_of::<f32>() };
            bytes as f64 * l.attention.window.map_or(positions, |w| positions.min(w as f64))
        };
        let [_, k, v, _] = attention::widths(c);
        (k + v) as f64 * self.layers.iter().map(of).sum::<f64>()
    }

    /// Modules and the kernel that each runs on, and why.
    pub fn kernels(&self) -> Vec<(String, String)> {
        let rounded = |input: &Option<InputGrid>| match input {
            None => String::new(),
            Some(InputGrid { args, params: Some(_) }) => format!("; inputs on a stored {} grid", args.qtype.name()),
            Some(InputGrid { args, params: None }) => {
                format!("; inputs on an {} grid for each token", args.qtype.name())
            }
        };
        self.linears().map(|(name, l, input)| (name, l.describe() + &rounded(input))).collect()
    }

    /// Every layer with its module name and how its input is quantized.
    fn linears(&self) -> impl Iterator<Item = (String, &Linear, &Option<InputGrid>)> {
        let embedding = std::iter::once(("model.embed_tokens".to_string(), &self.embedding, &None));
        let layers = self.layers.iter().enumerate().flat_map(move |(i, l)| {
            let linears = l.attention.linears().into_iter().chain(l.feed_forward.linears());
            let names = self.config.layer_linears(i).into_iter();
            names.zip(linears).map(move |((name, ..), (l, input))| (format!("model.layers.{i}.{name}"), l, input))
        });
        embedding.chain(layers).chain(self.head.iter().map(|h| ("lm_head".to_string(), h, &self.head_input)))
    }
}

/// Rows of the embedding, one for each token.
pub(crate) fn embed(embedding: &Linear, tokens: &[u32], hidden: &mut [f32]) {
    for (&id, row) in tokens.iter().zip(hidden.chunks_exact_mut((hidden.len() / tokens.len().max(1)).max(1))) {
        embedding.row(id as usize, row);
    }
}

impl Layer {
    /// Takes the residual stream `scratch.hidden [m, d]` through the layer; `out` is room of its size. For the rows see
    /// [`Attention::run`].
    ///
    /// # Errors
    /// As [`Attention::run`].
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn run(
        &self,
        c: &LlamaConfig,
        i: usize,
        past: usize,
        caches: &mut [(usize, &mut LayerCache)],
        rope: &RopeTable,
        scratch: &mut Scratch,
        out: &mut [f32],
    ) -> Result<(), RuntimeError> {
        rms_norm(&scratch.hidden, &self.input_norm, c.rms_norm_eps, &mut scratch.normed);
        self.attention.run(c, i, past, caches, rope, scratch)?;
        let Scratch { hidden, normed, gate, up, ffn, .. } = scratch;
        add(hidden, normed);
        rms_norm(hidden, &self.post_norm, c.rms_norm_eps, normed);
        self.feed_forward.run(normed, hidden.len() / c.hidden_size, &mut Room { gate, up, ffn }, out);
        add(hidden, out);
        Ok(())
    }
}

/// What comes after the last layer.
pub(crate) struct Head<'a> {
    pub(crate) norm: &'a [f32],
    pub(crate) matrix: &'a Linear,
    pub(crate) input: &'a Option<InputGrid>,
}

impl Head<'_> {
    /// Appends the logits of the last `rows` tokens in `scratch.hidden`.
    pub(crate) fn run(&self, c: &LlamaConfig, rows: usize, scratch: &mut Scratch, out: &mut Vec<f32>) {
        let h = c.hidden_size;
        let from = scratch.hidden.len() - rows * h;
        let normed = &mut scratch.normed[..rows * h];
        rms_norm(&scratch.hidden[from..], self.norm, c.rms_norm_eps, normed);
        quantize_rows(normed, h, self.input);
        let at = out.len();
        out.resize(at + rows * c.vocab_size, 0.0);
        self.matrix.matmul(normed, rows, &mut out[at..]);
    }
}

pub(crate) fn llama_config(model: &Checkpoint) -> Result<&LlamaConfig, RuntimeError> {
    match model.config() {
        ModelConfig::Llama(config) => Ok(config),
        ModelConfig::ResNet(_) | ModelConfig::Image(_) => Err(RuntimeError::Model {
            file: model.path().display().to_string(),
            problem: "expected a language model, got an image model".into(),
        }),
    }
}

pub(crate) fn add(to: &mut [f32], from: &[f32]) {
    for (a, b) in to.iter_mut().zip(from) {
        *a += b;
    }
}

/// Adds a bias to every row, if there is one.
pub(crate) fn add_bias(rows: &mut [f32], bias: &Option<Vec<f32>>) {
    if let Some(bias) = bias {
        rows.chunks_exact_mut(bias.len()).for_each(|row| add(row, bias));
    }
}

/// Puts the rows of `x [m, k]` on their grid, or each on its own. A row that has none (a value that is not finite) becomes NaN, as
/// its logits would without.
pub(crate) fn quantize_rows(x: &mut [f32], k: usize, inputs: &Option<InputGrid>) {
    if let Some(grid) = inputs {
        let _ = fake_quant_rows(x, k, grid);
    }
}

pub(crate) fn layer(model: &Checkpoint, config: &LlamaConfig, i: usize) -> Result<Layer, RuntimeError> {
    let part = Part { model, layer: i };
    Ok(Layer {
        input_norm: part.floats("input_layernorm.weight")?,
        attention: Attention::load(model, config, i)?,
        post_norm: part.floats("post_attention_layernorm.weight")?,
        feed_forward: FeedForward::load(model, config, i)?,
    })
}

/// The tensors of a layer of a model.
pub(crate) struct Part<'a> {
    pub(crate) model: &'a Checkpoint,
    pub(crate) layer: usize,
}

impl Part<'_> {
    /// The full name of a part of the layer.
    pub(crate) fn name(&self, part: &str) -> String {
        format!("model.layers.{}.{part}", self.layer)
    }

    pub(crate) fn linear(&self, part: &str) -> Result<Linear, RuntimeError> {
        linear(self.model, &self.name(part))
    }

    /// The bias of a linear layer, where the model has one.
    pub(crate) fn bias(&self, config: &LlamaConfig, part: &str) -> Result<Option<Vec<f32>>, RuntimeError> {
        let wanted = config.has_bias(&self.name(part));
        if wanted { self.floats(&format!("{part}.bias")).map(Some) } else { Ok(None) }
    }

    pub(crate) fn floats(&self, tensor: &str) -> Result<Vec<f32>, RuntimeError> {
        Ok(self.model.read_f32(&self.name(tensor))?)
    }

    /// How the input that `parts` share is quantized: they must read it in one form.
    pub(crate) fn input(&self, parts: &[&str]) -> Result<Option<InputGrid>, RuntimeError> {
        let first = self.model.input_grid(&self.name(parts[0]))?;
        for part in parts {
            let other = self.model.input_grid(&self.name(part))?;
            if other != first {
                return Err(RuntimeError::Model {
                    file: self.model.path().display().to_string(),
                    problem: format!(
                        "{} and {}: expected one form of the input that they share, got {first:?} and {other:?}",
                        self.name(parts[0]),
                        self.name(part),
                    ),
                });
            }
        }
        Ok(first)
    }
}

pub(crate) fn linear(model: &Checkpoint, module: &str) -> Result<Linear, RuntimeError> {
    let quant = |source| RuntimeError::Quant { module: module.into(), source };
    if let Some(packed) = packed_as_read(model, module)? {
        return Ok(packed);
    }
    match model.linear(module)? {
        LinearWeight::Quantized(q) => Linear::new(&q).map_err(quant),
        LinearWeight::Ordered { matrix, order } => Linear::ordered(&matrix, order).map_err(quant),
        LinearWeight::Float { n, k, data } => {
            let dtype = stored_float(model, module);
            FloatLinear::new(&data, n, k, dtype).map(Linear::Float).map_err(quant)
        }
    }
}

/// A float matrix of a folder, packed out of its stored bytes; `None` for any other weight.
fn packed_as_read(model: &Checkpoint, module: &str) -> Result<Option<Linear>, RuntimeError> {
    let tied = matches!(model.config(), ModelConfig::Llama(c) if c.tie_word_embeddings) && module == "lm_head";
    let name = format!("{module}.weight");
    let (false, Some(info), Some(dtype)) =
        (tied || model.is_quantized(module), model.info(&name), model.dtype(&name).and_then(Dtype::float))
    else {
        return Ok(None);
    };
    // Anything else is refused, or read, as every weight is.
    let &[n, k] = &info.shape[..] else { return Ok(None) };
    if n * k == 0 {
        return Ok(None);
    }
    let quant = |source| RuntimeError::Quant { module: module.into(), source };
    let mut packing = FloatPacking::new(n, k, dtype).map_err(quant)?;
    if !model.read_runs(&name, packing.run_bytes(), |run| packing.add(run))? {
        return Ok(None);
    }
    packing.finish().map(|l| Some(Linear::Float(l))).map_err(quant)
}

/// The dtype in which a float weight is stored, so that packing is exact; f32 for what was dequantized.
fn stored_float(model: &Checkpoint, module: &str) -> FloatType {
    model
        .info(&format!("{module}.weight"))
        .and_then(|info| FloatType::ALL.into_iter().find(|f| f.name() == info.dtype))
        .unwrap_or(FloatType::F32)
}
