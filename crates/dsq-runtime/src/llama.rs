//! A Llama-like model on packed weights: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, tied or untied
//! head. Not attention (see `attention.rs`) and feed-forward blocks (`feed_forward.rs`), not sampling (see `generate.rs`), not the file formats (see `dsq-checkpoint`).
//!
//! The bits of a token's logits depend on the tokens before it only: not on the number of threads, nor on how the
//! sequence was cut into calls, nor on the sequences beside it (see the orders in `dsq-kernels`).

mod exchange;

pub use exchange::ModelPart;
pub(crate) use exchange::WithBias;

use crate::attention::{self, Attention};
use crate::cache::{KvCache, KvPool, KvType, Scratch, Sequence};
use crate::feed_forward::{FeedForward, Room};
use crate::profile::Op;
use crate::prune::{PERIOD, Slots, next_pruning};
use crate::rope::RopeTable;
use crate::{KvPolicy, RuntimeError};
use dsq_checkpoint::{Checkpoint, Dtype, LinearWeight, LlamaConfig, ModelConfig, RopeScaling};
use dsq_kernels::attention::{BLOCK, KvFormat, PagedLayer, Queries};
use dsq_kernels::elementwise::{add, add_rms_norm, rms_norm};
use dsq_kernels::{Activations, FloatLinear, FloatPacking, Linear, Team, matmul_many_in, matmul_many_on_grid};
use dsq_quant::{FloatType, InputGrid};
use rayon::prelude::*;

/// Tokens of a prompt that go through the layers together: the activations of a chunk stay in the cache.
pub(crate) const PREFILL: usize = 192;

/// Which positions' logits a forward pass returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// Of no token (a part of a prompt).
    None,
    /// Of the last token: `[vocab]`.
    Last,
    /// Of every token: `[tokens, vocab]`.
    All,
    /// Of the tokens `from..to` of the entry: `[to - from, vocab]`.
    Part {
        /// The first.
        from: usize,
        /// Behind the last.
        to: usize,
    },
}

/// What one sequence does in a step: `tokens` are appended to it.
#[derive(Debug)]
pub struct Entry<'a> {
    /// The sequence, of the pool that the step is given.
    pub sequence: &'a mut Sequence,
    /// At least one token.
    pub tokens: &'a [u32],
    /// Which logits the step returns of them.
    pub logits: Logits,
}

#[derive(Debug)]
pub(crate) struct Layer {
    input_norm: Vec<f32>,
    pub(crate) attention: Attention,
    post_norm: Vec<f32>,
    pub(crate) feed_forward: FeedForward,
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
    activations: Activations,
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
        Ok(Self {
            config,
            embedding,
            layers,
            final_norm,
            head,
            head_input,
            widest,
            activations: Activations::Float,
            team,
        })
    }

    /// With another form of the activations that go into linear layers whose checkpoint stores none.
    pub fn with_activations(self, activations: Activations) -> Self {
        Self { activations, ..self }
    }

    /// The form of the activations.
    pub fn activations(&self) -> Activations {
        self.activations
    }

    /// The longest context of a language model, before any weight is read.
    ///
    /// # Errors
    /// [`RuntimeError::Model`] for another architecture.
    pub fn context_of(model: &Checkpoint) -> Result<usize, RuntimeError> {
        Ok(llama_config(model)?.max_position_embeddings)
    }

    /// Whether a language model can run under a policy, before any weight is read.
    ///
    /// # Errors
    /// As [`KvPolicy::check`]; [`RuntimeError::Input`] for entropy on a model with windows of its own; [`RuntimeError::Model`] for
    /// another architecture.
    pub fn check_policy(model: &Checkpoint, policy: KvPolicy) -> Result<(), RuntimeError> {
        policy.check_model(llama_config(model)?)
    }

    /// The architecture.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    pub(crate) fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Width of the widest feed-forward block.
    pub(crate) fn widest(&self) -> usize {
        self.widest
    }

    /// Rows of the embedding, one for each token.
    pub(crate) fn embed(&self, tokens: &[u32], hidden: &mut [f32]) {
        embed(&self.embedding, tokens, hidden);
    }

    /// Runs `work` on the model's threads.
    pub(crate) fn enter<T>(&self, work: impl FnOnce() -> T) -> T {
        self.team.enter(work)
    }

    /// The matrix of the logits, and how its input is quantized.
    pub(crate) fn head(&self) -> (&Linear, &Option<InputGrid>) {
        (self.head.as_ref().unwrap_or(&self.embedding), &self.head_input)
    }

    /// Worker threads.
    pub fn threads(&self) -> usize {
        self.team.threads()
    }

    /// Memory for a sequence of at most `tokens` tokens, allocated now, with keys and values in f32 or as the checkpoint says.
    ///
    /// # Errors
    /// [`RuntimeError::TooLong`] beyond `max_position_embeddings`.
    pub fn new_cache(&self, tokens: usize) -> Result<KvCache, RuntimeError> {
        self.new_cache_of(tokens, KvType::F32, KvPolicy::Full)
    }

    /// [`LlamaRuntime::new_cache`] with another form and another policy.
    ///
    /// # Errors
    /// As [`LlamaRuntime::new_pool`].
    pub fn new_cache_of(&self, tokens: usize, kv: KvType, policy: KvPolicy) -> Result<KvCache, RuntimeError> {
        KvCache::new(self, tokens, kv, policy)
    }

    /// Memory for `positions` of all sequences together (rounded down to blocks), each of at most `longest`, allocated now.
    ///
    /// # Errors
    /// [`RuntimeError::TooLong`] when `longest` is beyond `max_position_embeddings`; as [`LlamaRuntime::check_policy`].
    pub fn new_pool(
        &self,
        positions: usize,
        longest: usize,
        kv: KvType,
        policy: KvPolicy,
    ) -> Result<KvPool, RuntimeError> {
        let c = &self.config;
        policy.check_model(c)?;
        if longest > c.max_position_embeddings {
            let of = match c.rope_scaling {
                Some(RopeScaling::Dynamic { .. }) => {
                    "max_position_embeddings; dynamic rotary scaling would change the keys that are in the cache beyond it"
                }
                _ => "max_position_embeddings",
            };
            return Err(RuntimeError::TooLong { what: "context", limit: c.max_position_embeddings, of, got: longest });
        }
        let blocks = positions / BLOCK;
        let layers = self.layers.iter().map(|l| attention::new_cache(c, &l.attention, blocks, kv, policy)).collect();
        Ok(KvPool::new(layers, RopeTable::new(longest, &c.rotary()), longest, blocks, policy))
    }

    /// Appends `tokens` to the sequence in `cache` and returns logits. Under a policy they go through in pieces, between which what is not
    /// kept is given back.
    ///
    /// # Errors
    /// As [`LlamaRuntime::step`]. The cache then stays as it was, or is empty if one of several pieces was done.
    pub fn forward(&self, tokens: &[u32], cache: &mut KvCache, logits: Logits) -> Result<Vec<f32>, RuntimeError> {
        let (limit, got) = (cache.capacity(), cache.len() + tokens.len());
        if got > limit {
            return Err(RuntimeError::TooLong { what: "tokens", limit, of: "positions of the context", got });
        }
        let KvCache { pool, sequence, .. } = cache;
        let mut out = Vec::new();
        if pool.policy() == KvPolicy::Full {
            self.step(pool, &mut [Entry { sequence, tokens, logits }], &mut out)?;
            return Ok(out);
        }
        self.check(pool, &[Entry { sequence, tokens, logits }])?;
        let (mut made, pieces) = (Vec::new(), tokens.len().div_ceil(PREFILL));
        for (i, tokens) in tokens.chunks(PREFILL).enumerate() {
            let start = i * PREFILL;
            let logits = match logits {
                Logits::Last if i + 1 < pieces => Logits::None,
                Logits::Part { from, to } => {
                    Logits::Part { from: from.saturating_sub(start), to: to.saturating_sub(start) }
                }
                other => other,
            };
            if let Err(e) = self.step(pool, &mut [Entry { sequence, tokens, logits }], &mut made) {
                if i > 0 {
                    pool.cut(sequence, 0);
                }
                return Err(e);
            }
            out.append(&mut made);
        }
        Ok(out)
    }

    /// Appends to each sequence its tokens, all in one pass, and writes the logits that they ask for, entry after entry, in the
    /// place of what `logits` holds. A sequence gets the bits that it would get alone.
    ///
    /// # Errors
    /// [`RuntimeError::TooLong`] for a sequence beyond the pool's longest; [`RuntimeError::NoBlocks`] where the pool has too few;
    /// [`RuntimeError::Input`] for no token, an id beyond the vocabulary, or a pool of another model; [`RuntimeError::Numerics`] for a
    /// key or value that the cache has no form for. The sequences then stay as they were; under a policy that prunes those are empty
    /// of which the step had come to a token that is asked what stays.
    pub fn step(&self, pool: &mut KvPool, batch: &mut [Entry], logits: &mut Vec<f32>) -> Result<(), RuntimeError> {
        logits.clear();
        self.check(pool, batch)?;
        let lacking = batch.iter().map(|e| pool.lacking(e.sequence, e.sequence.len + e.tokens.len())).sum();
        if lacking > pool.free_blocks() {
            return Err(RuntimeError::NoBlocks { needed: lacking, free: pool.free_blocks() });
        }
        for e in batch.iter_mut() {
            let len = e.sequence.len + e.tokens.len();
            pool.grow(e.sequence, len);
            if !pool.policy().shares() {
                e.sequence.slots.get_or_insert_with(|| Box::new(Slots::new(self.layers.len()))).begin();
            }
        }
        let before: Vec<usize> = batch.iter().map(|e| e.sequence.len).collect();
        let done = self.team.enter(|| self.run_chunks(pool, batch, logits));
        if done.is_err() {
            for (e, len) in batch.iter_mut().zip(before) {
                let changed = e.sequence.slots.as_ref().is_some_and(|s| s.changed());
                pool.cut(e.sequence, if changed { 0 } else { len });
            }
        } else {
            batch.iter_mut().for_each(|e| pool.settle(e.sequence));
        }
        done
    }

    fn check(&self, pool: &KvPool, batch: &[Entry]) -> Result<(), RuntimeError> {
        let input = |problem: String| Err(RuntimeError::Input { what: "tokens", problem });
        if pool.layers.len() != self.layers.len() {
            return input(format!("expected a cache of {} layers, got {}", self.layers.len(), pool.layers.len()));
        }
        for (layer, cache) in self.layers.iter().map(|l| &l.attention).zip(&pool.layers) {
            let grid = match cache.format() {
                KvFormat::Codes(grid) => Some(grid),
                KvFormat::F32 | KvFormat::F16 | KvFormat::Dynamic(_) => None,
            };
            if layer.kv != grid || layer.window.is_some_and(|w| cache.window().is_none_or(|got| got > w)) {
                let (want, got) = ((layer.kv, layer.window), (grid, cache.window()));
                return input(format!("expected a cache of this model ({want:?}), got one of another ({got:?})"));
            }
        }
        for e in batch {
            if e.tokens.is_empty() {
                return input("expected at least one token, got none".into());
            }
            if let Some(id) = e.tokens.iter().find(|&&id| id as usize >= self.config.vocab_size) {
                return input(format!("expected ids below the vocabulary's {} rows, got {id}", self.config.vocab_size));
            }
            let got = e.sequence.len + e.tokens.len();
            if got > pool.longest {
                let of = "positions of the context";
                return Err(RuntimeError::TooLong { what: "tokens", limit: pool.longest, of, got });
            }
        }
        Ok(())
    }

    /// Takes the batch through the layers, at most [`PREFILL`] tokens at once. A sequence that is pruned ends a piece where it is.
    fn run_chunks(&self, pool: &mut KvPool, batch: &mut [Entry], logits: &mut Vec<f32>) -> Result<(), RuntimeError> {
        let budget = pool.policy().budget();
        // The next entry, and how many of its tokens are done.
        let (mut first, mut done) = (0, 0);
        while first < batch.len() {
            let (mut room, mut last, mut end) = (PREFILL, first, done);
            while last < batch.len() && room > 0 {
                let at = batch[last].sequence.len;
                let piece = if budget.is_some() { next_pruning(at) - at } else { room };
                let taken = (batch[last].tokens.len() - end).min(room).min(piece);
                room -= taken;
                end += taken;
                if end < batch[last].tokens.len() {
                    break;
                }
                (last, end) = (last + 1, 0);
            }
            // Entries first..last to their ends, and of `last` the tokens up to `end`.
            let part = |i: usize, len: usize| {
                let from = if i == first { done } else { 0 };
                from..if i == last { end } else { len }
            };
            let behind = (last + 1).min(batch.len());
            let entries = &mut batch[first..behind];
            let mut slots: Vec<Box<Slots>> = entries.iter_mut().filter_map(|e| e.sequence.slots.take()).collect();
            let parts = entries.iter().enumerate().map(|(i, e)| (e, part(first + i, e.tokens.len())));
            let parts: Vec<_> = parts.filter(|(_, p)| !p.is_empty()).collect();
            let done_layers = self.run_layers(pool, &parts, &mut slots);
            if done_layers.is_ok() {
                self.append_logits(&parts, &mut pool.scratch, logits);
            }
            let taken: Vec<usize> = parts.iter().map(|(_, p)| p.len()).collect();
            entries.iter_mut().zip(slots).for_each(|(e, slots)| e.sequence.slots = Some(slots));
            done_layers?;
            for (e, taken) in entries.iter_mut().zip(taken) {
                let Sequence { table, len, slots } = &mut *e.sequence;
                if let (Some(slots), Some(budget)) = (slots, &budget) {
                    slots.append(*len, taken);
                    if (*len + taken).is_multiple_of(PERIOD) {
                        slots.prune(budget, &mut pool.layers, table);
                    }
                }
                *len += taken;
            }
            (first, done) = (last, end);
        }
        Ok(())
    }

    /// Takes parts of the entries' tokens, which come next in their sequences, through the layers. `slots` are those of the entries, none
    /// where nothing is pruned.
    fn run_layers(
        &self,
        pool: &mut KvPool,
        parts: &[(&Entry, std::ops::Range<usize>)],
        slots: &mut [Box<Slots>],
    ) -> Result<(), RuntimeError> {
        let (c, m) = (&self.config, parts.iter().map(|(_, p)| p.len()).sum());
        let h = c.hidden_size;
        let KvPool { layers, rope, scratch, .. } = pool;
        scratch.resize(m, widths(c, self.widest));
        scratch.positions.clear();
        scratch.clock.enter(usize::MAX);
        let mut queries = Vec::with_capacity(parts.len());
        let mut row = 0;
        for (e, part) in parts {
            embed(&self.embedding, &e.tokens[part.clone()], &mut scratch.hidden[row * h..(row + part.len()) * h]);
            let past = e.sequence.len;
            scratch.positions.extend(past..past + part.len());
            queries.push(Queries { table: &e.sequence.table, past, tokens: part.len() });
            row += part.len();
        }
        scratch.clock.lap(Op::Embed);
        for (i, (layer, kv)) in self.layers.iter().zip(layers).enumerate() {
            queries.iter_mut().zip(&*slots).for_each(|(q, s)| q.past = s.filled(i));
            layer.run(c, i, self.activations, &queries, kv, rope, scratch)?;
            let mut row = 0;
            for (queries, slots) in queries.iter().zip(&mut *slots) {
                let (at, width) = (scratch.positions[row], scratch.q.len() / m);
                let q = &scratch.q[row * width..(row + queries.tokens) * width];
                slots.observe(i, kv, *queries, at, (q, c.num_attention_heads));
                row += queries.tokens;
            }
            if !slots.is_empty() {
                scratch.clock.lap(Op::Attend);
            }
        }
        Ok(())
    }

    /// Logits of the rows that the entries ask for.
    fn append_logits(&self, parts: &[(&Entry, std::ops::Range<usize>)], scratch: &mut Scratch, out: &mut Vec<f32>) {
        let (matrix, input) = self.head();
        let head = Head { norm: &self.final_norm, matrix, input, mode: self.activations };
        let (mut row, mut wanted) = (0, 0);
        scratch.clock.enter(usize::MAX);
        for (e, part) in parts {
            let rows = match e.logits {
                Logits::None => row..row,
                Logits::Last if part.end == e.tokens.len() => row + part.len() - 1..row + part.len(),
                Logits::Last => row..row,
                Logits::All => row..row + part.len(),
                Logits::Part { from, to } => {
                    let (from, to) = (from.clamp(part.start, part.end), to.clamp(part.start, part.end));
                    row + from - part.start..row + to.max(from) - part.start
                }
            };
            head.norm(&self.config, rows.clone(), wanted, scratch);
            wanted += rows.len();
            row += part.len();
        }
        scratch.clock.lap(Op::Norm);
        head.run(&self.config, wanted, scratch, out);
        scratch.clock.lap(Op::Head);
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

    /// Modules and the kernel that each runs on, and why.
    pub fn kernels(&self) -> Vec<(String, String)> {
        let rounded = |input: &Option<InputGrid>| match input {
            None => String::new(),
            Some(InputGrid { args, params: Some(_) }) => format!("; inputs on a stored {} grid", args.qtype.name()),
            Some(InputGrid { args, params: None }) => {
                format!("; inputs on an {} grid for each token", args.qtype.name())
            }
        };
        let described = |l: &Linear, input: &Option<InputGrid>| match input {
            None => l.describe_in(self.activations),
            Some(grid) => l.describe_on_grid(grid) + &rounded(input),
        };
        self.linears().map(|(name, l, input)| (name, described(l, input))).collect()
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
    /// Takes the residual stream `scratch.hidden [m, d]` of the batch through the layer.
    ///
    /// # Errors
    /// As [`Attention::run`].
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn run(
        &self,
        c: &LlamaConfig,
        i: usize,
        mode: Activations,
        batch: &[Queries],
        kv: &mut PagedLayer,
        rope: &RopeTable,
        scratch: &mut Scratch,
    ) -> Result<(), RuntimeError> {
        scratch.clock.enter(i);
        rms_norm(&scratch.hidden, &self.input_norm, c.rms_norm_eps, &mut scratch.normed);
        scratch.clock.lap(Op::Norm);
        self.attention.run(c, i, mode, batch, kv, rope, scratch)?;
        let Scratch { hidden, normed, gate, up, ffn, delta, chosen, clock, .. } = scratch;
        add_rms_norm(hidden, delta, &self.post_norm, c.rms_norm_eps, normed);
        clock.lap(Op::Norm);
        let room = &mut Room { gate, up, ffn, chosen, clock };
        self.feed_forward.run(mode, normed, hidden.len() / c.hidden_size, room, delta);
        add(hidden, delta);
        clock.lap(Op::Add);
        Ok(())
    }
}

/// Widths of the rows of [`Scratch`], where the widest feed-forward block has `f` values.
pub(crate) fn widths(c: &LlamaConfig, f: usize) -> [usize; 10] {
    let (h, [q, k, v, mixed]) = (c.hidden_size, attention::widths(c));
    [h, h, q, k, v, mixed, f, f, f, h]
}

/// What comes after the last layer.
pub(crate) struct Head<'a> {
    pub(crate) norm: &'a [f32],
    pub(crate) matrix: &'a Linear,
    pub(crate) input: &'a Option<InputGrid>,
    pub(crate) mode: Activations,
}

impl Head<'_> {
    /// Norms rows of `scratch.hidden` into row `to` of `scratch.normed` and those behind it.
    pub(crate) fn norm(&self, c: &LlamaConfig, rows: std::ops::Range<usize>, to: usize, scratch: &mut Scratch) {
        let h = c.hidden_size;
        let normed = &mut scratch.normed[to * h..(to + rows.len()) * h];
        rms_norm(&scratch.hidden[rows.start * h..rows.end * h], self.norm, c.rms_norm_eps, normed);
    }

    /// Appends the logits of the first `rows` rows of `scratch.normed`.
    pub(crate) fn run(&self, c: &LlamaConfig, rows: usize, scratch: &mut Scratch, out: &mut Vec<f32>) {
        if rows == 0 {
            return;
        }
        let normed = &mut scratch.normed[..rows * c.hidden_size];
        let at = out.len();
        out.resize(at + rows * c.vocab_size, 0.0);
        product(self.mode, self.input, &[self.matrix], normed, rows, &mut [&mut out[at..]]);
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

/// Adds a bias to every row, if there is one.
pub(crate) fn add_bias(rows: &mut [f32], bias: &Option<Vec<f32>>) {
    if let Some(bias) = bias {
        rows.chunks_exact_mut(bias.len()).for_each(|row| add(row, bias));
    }
}

/// `outs[i] [m, n_i] = x [m, k] * W_i^T`, with the inputs on the grid that the checkpoint stores for them, else as `mode` says. A row that has no place on its grid (a value that is not finite) gives NaN.
pub(crate) fn product(
    mode: Activations,
    input: &Option<InputGrid>,
    layers: &[&Linear],
    x: &[f32],
    m: usize,
    outs: &mut [&mut [f32]],
) {
    match input {
        None => matmul_many_in(mode, layers, x, m, outs),
        Some(grid) => {
            if matmul_many_on_grid(grid, layers, x, m, outs).is_err() {
                // Runs that do not divide the inputs are refused when a checkpoint is opened.
                outs.iter_mut().for_each(|out| out.fill(f32::NAN));
            }
        }
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
