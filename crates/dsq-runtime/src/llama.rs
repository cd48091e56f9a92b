//! A Llama-like model on packed weights: RMSNorm, rotary embedding, grouped-query attention, SwiGLU, tied or untied
//! head; biases of qwen2, norms of heads of qwen3, attention windows. Not sampling (see `generate.rs`), not the file formats (see `dsq-checkpoint`).
//!
//! The bits of a token's logits depend on the tokens before it only: not on the number of threads, nor on how the
//! sequence was cut into calls (see the orders in `dsq-kernels`).

use crate::RuntimeError;
use crate::cache::{KvCache, Scratch};
use crate::rope::RopeTable;
use dsq_checkpoint::{Checkpoint, LinearWeight, LlamaConfig, ModelConfig, RopeScaling};
use dsq_kernels::attention::{LayerCache, attend};
use dsq_kernels::elementwise::{rms_norm, silu_mul};
use dsq_kernels::fake_quant::fake_quant_rows;
use dsq_kernels::{FloatLinear, Linear, Team, matmul_many};
use dsq_quant::{FloatType, InputGrid, KvGrid};
use rayon::prelude::*;

/// Tokens of a prompt that go through the layers together: the activations of a chunk stay in the cache.
const PREFILL: usize = 192;

/// Which positions' logits a forward pass returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// Of the last token: `[vocab]`.
    Last,
    /// Of every token: `[tokens, vocab]`.
    All,
}

#[derive(Debug)]
struct Layer {
    input_norm: Vec<f32>,
    qkv: [Linear; 3],
    /// Biases of q, k and v.
    qkv_bias: [Option<Vec<f32>>; 3],
    /// Norms of query and key heads, `[head_dim]` each.
    head_norms: Option<[Vec<f32>; 2]>,
    o: Linear,
    post_norm: Vec<f32>,
    gate_up: [Linear; 2],
    down: Linear,
    /// How the inputs of q, k and v, of o, of gate and up, and of down are quantized; `None`: not at all.
    inputs: [Option<InputGrid>; 4],
    /// The grids on which the cache holds keys and values; `None`: as f32.
    kv: Option<KvGrid>,
    /// Positions that a token sees; `None`: all before it.
    window: Option<usize>,
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
        Ok(Self { config, embedding, layers, final_norm, head, head_input, team })
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
        let layer = |l: &Layer| LayerCache::new(tokens, c.num_key_value_heads, c.head_dim, l.kv).windowed(l.window);
        let layers = self.layers.iter().map(layer).collect();
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
        let differs = |(l, c): &(&Layer, &LayerCache)| (l.kv, l.window) != (c.grid(), c.window());
        if let Some((l, c)) = self.layers.iter().zip(&cache.layers).find(differs) {
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
        let (h, d) = (c.hidden_size, c.head_dim);
        let (q_width, kv_width) = (c.num_attention_heads * d, c.num_key_value_heads * d);
        let KvCache { layers, rope, scratch, .. } = cache;
        let f = c.intermediate_size;
        scratch.resize(m, [h, h, q_width, kv_width, kv_width, q_width, f, f, f]);
        let Scratch { hidden, normed, q, k, v, mixed, gate, up, ffn } = scratch;
        for (&id, row) in tokens.iter().zip(hidden.chunks_exact_mut(h)) {
            self.embedding.row(id as usize, row);
        }
        for (i, (layer, kv)) in self.layers.iter().zip(layers).enumerate() {
            rms_norm(hidden, &layer.input_norm, c.rms_norm_eps, normed);
            let [qkv_input, o_input, gate_up_input, down_input] = &layer.inputs;
            quantize_rows(normed, h, qkv_input);
            let [wq, wk, wv] = &layer.qkv;
            matmul_many(&[wq, wk, wv], normed, m, &mut [q, k, v]);
            for (bias, out) in layer.qkv_bias.iter().zip([&mut *q, &mut *k, &mut *v]) {
                if let Some(bias) = bias {
                    out.chunks_exact_mut(bias.len()).for_each(|row| add(row, bias));
                }
            }
            if let Some(norms) = &layer.head_norms {
                for (norm, heads) in norms.iter().zip([&mut *q, &mut *k]) {
                    // `mixed` is free until attention writes it, and as wide as the queries.
                    let out = &mut mixed[..heads.len()];
                    rms_norm(heads, norm, c.rms_norm_eps, out);
                    heads.copy_from_slice(out);
                }
            }
            for t in 0..m {
                rope.rotate(&mut q[t * q_width..(t + 1) * q_width], past + t);
                let at = t * kv_width..(t + 1) * kv_width;
                rope.rotate(&mut k[at.clone()], past + t);
                let (k, v) = (&k[at.clone()], &v[at]);
                if layer.kv.is_some() {
                    expect_finite(i, past + t, k, v)?;
                }
                kv.put(past + t, k, v);
            }
            attend(kv, q, c.num_attention_heads, past, mixed);
            quantize_rows(mixed, q_width, o_input);
            layer.o.matmul(mixed, m, normed);
            add(hidden, normed);
            rms_norm(hidden, &layer.post_norm, c.rms_norm_eps, normed);
            quantize_rows(normed, h, gate_up_input);
            let [wg, wu] = &layer.gate_up;
            matmul_many(&[wg, wu], normed, m, &mut [gate, up]);
            silu_mul(gate, up, ffn);
            quantize_rows(ffn, f, down_input);
            layer.down.matmul(ffn, m, normed);
            add(hidden, normed);
        }
        Ok(())
    }

    /// Logits of the last `rows` tokens of the chunk in `scratch.hidden`.
    fn append_logits(&self, rows: usize, scratch: &mut Scratch, out: &mut Vec<f32>) {
        if rows == 0 {
            return;
        }
        let h = self.config.hidden_size;
        let from = scratch.hidden.len() - rows * h;
        let normed = &mut scratch.normed[..rows * h];
        rms_norm(&scratch.hidden[from..], &self.final_norm, self.config.rms_norm_eps, normed);
        quantize_rows(normed, h, &self.head_input);
        let at = out.len();
        out.resize(at + rows * self.config.vocab_size, 0.0);
        self.head.as_ref().unwrap_or(&self.embedding).matmul(normed, rows, &mut out[at..]);
    }

    /// Bytes of weights in memory: packed linears, embedding, norms, biases.
    pub fn resident_bytes(&self) -> usize {
        let floats = |l: &Layer| {
            let biases: usize = l.qkv_bias.iter().flatten().map(Vec::len).sum();
            let heads: usize = l.head_norms.iter().flatten().map(Vec::len).sum();
            l.input_norm.len() + l.post_norm.len() + biases + heads
        };
        let floats = self.layers.iter().map(floats).sum::<usize>() + self.final_norm.len();
        self.linears().map(|(_, l, _)| l.bytes()).sum::<usize>() + floats * size_of::<f32>()
    }

    /// Bytes of weights that one decoded token reads: all of them, but of an untied embedding one row only.
    pub fn bytes_per_token(&self) -> usize {
        let embedding = if self.head.is_some() { self.embedding.bytes() } else { 0 };
        self.resident_bytes() - embedding
    }

    /// Bytes that a decoded token reads of the cache where `positions` are filled: keys and values of all layers, as far as their
    /// windows go.
    pub fn kv_bytes(&self, positions: f64) -> f64 {
        let c = &self.config;
        let of = |l: &Layer| {
            let bytes = if l.kv.is_some() { 1 } else { size_of::<f32>() };
            bytes as f64 * l.window.map_or(positions, |w| positions.min(w as f64))
        };
        (2 * c.num_key_value_heads * c.head_dim) as f64 * self.layers.iter().map(of).sum::<f64>()
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
        let named = |i: usize, name: &str| format!("model.layers.{i}.{name}");
        let embedding = std::iter::once(("model.embed_tokens".to_string(), &self.embedding, &None));
        let layers = self.layers.iter().enumerate().flat_map(move |(i, l)| {
            let [qkv, o, gate_up, down] = &l.inputs;
            [
                (named(i, "self_attn.q_proj"), &l.qkv[0], qkv),
                (named(i, "self_attn.k_proj"), &l.qkv[1], qkv),
                (named(i, "self_attn.v_proj"), &l.qkv[2], qkv),
                (named(i, "self_attn.o_proj"), &l.o, o),
                (named(i, "mlp.gate_proj"), &l.gate_up[0], gate_up),
                (named(i, "mlp.up_proj"), &l.gate_up[1], gate_up),
                (named(i, "mlp.down_proj"), &l.down, down),
            ]
        });
        embedding.chain(layers).chain(self.head.iter().map(|h| ("lm_head".to_string(), h, &self.head_input)))
    }
}

fn llama_config(model: &Checkpoint) -> Result<&LlamaConfig, RuntimeError> {
    match model.config() {
        ModelConfig::Llama(config) => Ok(config),
        ModelConfig::ResNet(_) | ModelConfig::EfficientNet(_) => Err(RuntimeError::Model {
            file: model.path().display().to_string(),
            problem: "expected a language model, got an image model".into(),
        }),
    }
}

/// Refuses what a cache of codes could only store as another number. (In a float cache it makes the logits NaN.)
fn expect_finite(layer: usize, position: usize, k: &[f32], v: &[f32]) -> Result<(), RuntimeError> {
    match k.iter().chain(v).find(|x| !x.is_finite()) {
        None => Ok(()),
        Some(&value) => Err(RuntimeError::Numerics {
            what: format!(
                "model.layers.{layer}.self_attn: keys and values of position {position} for a cache of codes"
            ),
            value,
        }),
    }
}

fn add(to: &mut [f32], from: &[f32]) {
    for (a, b) in to.iter_mut().zip(from) {
        *a += b;
    }
}

/// Puts the rows of `x [m, k]` on their grid, or each on its own. A row that has none (a value that is not finite) becomes NaN, as
/// its logits would without.
fn quantize_rows(x: &mut [f32], k: usize, inputs: &Option<InputGrid>) {
    if let Some(grid) = inputs {
        let _ = fake_quant_rows(x, k, grid);
    }
}

fn layer(model: &Checkpoint, config: &LlamaConfig, i: usize) -> Result<Layer, RuntimeError> {
    let name = |part: &str| format!("model.layers.{i}.{part}");
    let get = |part: &str| linear(model, &name(part));
    // Layers that read one tensor read it in one form.
    let input = |parts: &[&str]| -> Result<Option<InputGrid>, RuntimeError> {
        let first = model.input_grid(&name(parts[0]))?;
        for part in parts {
            let other = model.input_grid(&name(part))?;
            if other != first {
                return Err(RuntimeError::Model {
                    file: model.path().display().to_string(),
                    problem: format!(
                        "{} and {}: expected one form of the input that they share, got {first:?} and {other:?}",
                        name(parts[0]),
                        name(part),
                    ),
                });
            }
        }
        Ok(first)
    };
    let inputs = [
        input(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])?,
        input(&["self_attn.o_proj"])?,
        input(&["mlp.gate_proj", "mlp.up_proj"])?,
        input(&["mlp.down_proj"])?,
    ];
    let bias = |part: &str| -> Result<Option<Vec<f32>>, RuntimeError> {
        let wanted = config.has_bias(&name(part));
        Ok(if wanted { Some(model.read_f32(&name(&format!("{part}.bias")))?) } else { None })
    };
    let head_norm = |part: &str| model.read_f32(&name(&format!("self_attn.{part}.weight")));
    let head_norms = if config.has_head_norms() { Some([head_norm("q_norm")?, head_norm("k_norm")?]) } else { None };
    Ok(Layer {
        input_norm: model.read_f32(&name("input_layernorm.weight"))?,
        qkv: [get("self_attn.q_proj")?, get("self_attn.k_proj")?, get("self_attn.v_proj")?],
        qkv_bias: [bias("self_attn.q_proj")?, bias("self_attn.k_proj")?, bias("self_attn.v_proj")?],
        head_norms,
        o: get("self_attn.o_proj")?,
        post_norm: model.read_f32(&name("post_attention_layernorm.weight"))?,
        gate_up: [get("mlp.gate_proj")?, get("mlp.up_proj")?],
        down: get("mlp.down_proj")?,
        inputs,
        kv: model.kv_grid(i)?,
        window: config.window(i),
    })
}

fn linear(model: &Checkpoint, module: &str) -> Result<Linear, RuntimeError> {
    let quant = |source| RuntimeError::Quant { module: module.into(), source };
    match model.linear(module)? {
        LinearWeight::Quantized(q) => Linear::new(&q).map_err(quant),
        LinearWeight::Float { n, k, data } => {
            let dtype = stored_float(model, module);
            FloatLinear::new(&data, n, k, dtype).map(Linear::Float).map_err(quant)
        }
    }
}

/// The dtype in which a float weight is stored, so that packing is exact; f32 for what was dequantized.
fn stored_float(model: &Checkpoint, module: &str) -> FloatType {
    model
        .info(&format!("{module}.weight"))
        .and_then(|info| FloatType::ALL.into_iter().find(|f| f.name() == info.dtype))
        .unwrap_or(FloatType::F32)
}
