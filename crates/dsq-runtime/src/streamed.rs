//! Logits of a language model that need not fit into memory: a few layers are read, run on all sequences, and dropped. The same
//! bits as [`crate::LlamaRuntime`] gives. Not generation: every sequence goes through once.

use crate::attention;
use crate::cache::{KvType, Scratch};
use crate::llama::{Head, PREFILL, embed, layer, linear, llama_config, widths};
use crate::rope::RopeTable;
use crate::{KvPolicy, RuntimeError};
use dsq_checkpoint::{Checkpoint, Dtype, LlamaConfig};
use dsq_kernels::attention::{BLOCK, Queries};
use dsq_kernels::{Activations, KeepMemory, Team, matmul_many_in};
use rayon::prelude::*;
use std::time::Instant;

/// The tensor of the rows that tokens become.
const EMBEDDING: &str = "model.embed_tokens.weight";
/// Bytes of layers that are in memory together, unless one alone has more.
const TOGETHER: u64 = 1 << 30;

/// The logits `[tokens, vocab]` of each of `sequences`, row major.
///
/// # Errors
/// As [`crate::LlamaRuntime::load`] and [`crate::LlamaRuntime::forward`]; a sequence has at most 192 tokens.
pub fn streamed_logits(
    model: &Checkpoint,
    sequences: &[Vec<u32>],
    threads: usize,
) -> Result<Vec<Vec<f32>>, RuntimeError> {
    let c = llama_config(model)?;
    check(c, sequences)?;
    let refused = |e: &dyn std::fmt::Display| RuntimeError::Model {
        file: model.path().display().to_string(),
        problem: format!("cannot start {threads} threads: {e}"),
    };
    let team = Team::new(threads).map_err(|e| refused(&e))?;
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).build().map_err(|e| refused(&e))?;

    let (h, f) = (c.hidden_size, (0..c.num_hidden_layers).map(|i| c.widest_block(i)).max().unwrap_or(0));
    let _keep = KeepMemory::new();
    let tied = c.tie_word_embeddings && !model.is_quantized("lm_head");
    // Of an embedding that is no head a few rows are enough, where they can be read alone.
    let floats = !model.is_quantized("model.embed_tokens") && model.dtype(EMBEDDING).and_then(Dtype::float).is_some();
    let embedding = if floats && !tied { None } else { Some(linear(model, "model.embed_tokens")?) };
    // All sequences go through a layer together, so that its weights are read and widened once.
    let rows: usize = sequences.iter().map(Vec::len).sum();
    let mut scratch = Scratch::default();
    scratch.resize(rows, widths(c, f));
    let (mut tables, mut blocks): (Vec<Vec<u32>>, u32) = (Vec::new(), 0);
    for tokens in sequences {
        let end = blocks + tokens.len().div_ceil(BLOCK) as u32;
        tables.push((blocks..end).collect());
        blocks = end;
        scratch.positions.extend(0..tokens.len());
    }
    let lens = sequences.iter().map(Vec::len);
    let queries: Vec<Queries> =
        tables.iter().zip(lens.clone()).map(|(table, tokens)| Queries { table, past: 0, tokens }).collect();
    let rope = RopeTable::new(lens.max().unwrap_or(0), &c.rotary());
    let all = sequences.concat();
    match &embedding {
        Some(embedding) => embed(embedding, &all, &mut scratch.hidden),
        None => {
            for (&id, row) in all.iter().zip(scratch.hidden.chunks_exact_mut(h)) {
                let values = model.read_row(EMBEDDING, id as usize)?.unwrap_or_default();
                row.iter_mut().zip(values).for_each(|(x, value)| *x = value);
            }
        }
    }
    let embedding = embedding.filter(|_| tied);

    let together = (TOGETHER / layer_bytes(model).max(1)).clamp(1, threads.max(1) as u64) as usize;
    for first in (0..c.num_hidden_layers).step_by(together) {
        let numbers = first..(first + together).min(c.num_hidden_layers);
        let layers = pool
            .install(|| numbers.clone().into_par_iter().map(|i| layer(model, c, i)).collect::<Result<Vec<_>, _>>())?;
        std::thread::scope(|scope| {
            // The disk reads what comes next meanwhile; this thread waits for it, and does nothing else.
            let next = numbers.end..(numbers.end + together);
            scope.spawn(|| names_of(model, next).iter().for_each(|name| model.read_ahead(name)));
            team.enter(|| -> Result<(), RuntimeError> {
                for (i, layer) in numbers.zip(&layers) {
                    let (kv, policy) = (KvType::F32, KvPolicy::Full);
                    let mut cache = attention::new_cache(c, &layer.attention, blocks as usize, kv, policy);
                    layer.run(c, i, Activations::Float, &queries, &mut cache, &rope, &mut scratch)?;
                }
                Ok(())
            })
        })?;
    }
    let head = match embedding {
        Some(embedding) => embedding,
        None => linear(model, "lm_head")?,
    };
    let (norm, input) = (model.read_f32("model.norm.weight")?, model.input_grid("lm_head")?);
    let head = Head { norm: &norm, matrix: &head, input: &input, mode: Activations::Float };
    let mut out = Vec::with_capacity(sequences.len());
    team.enter(|| {
        let mut row = 0;
        for tokens in sequences {
            let mut logits = Vec::new();
            head.norm(c, row..row + tokens.len(), 0, &mut scratch);
            head.run(c, tokens.len(), &mut scratch, &mut logits);
            out.push(logits);
            row += tokens.len();
        }
    });
    Ok(out)
}

/// Bytes that [`streamed_logits`] holds at most, the logits not counted: layers as they are stored (those of a GGUF file in f32) and
/// one matrix in f32 for each thread, or the embedding and the head.
pub fn streamed_bytes(model: &Checkpoint, threads: usize) -> u64 {
    let values = |shape: &[usize]| shape.iter().map(|&d| d as u64).product::<u64>();
    let linears = model.config().linears().into_iter().filter(|l| l.module.starts_with("model.layers."));
    let largest = linears.map(|l| values(&l.shape)).max().unwrap_or(0);
    let layer = layer_bytes(model);
    let together = (TOGETHER / layer.max(1)).clamp(1, threads.max(1) as u64);
    let info = |name: &str| model.info(name).map_or(0, |i| 4 * values(&i.shape));
    let ends = info("model.embed_tokens.weight").max(info("lm_head.weight"));
    // What is read, its values, and what kernels want.
    (together * (layer + 12 * largest)).max(3 * ends) + ends
}

/// Seconds that [`streamed_logits`] takes for `tokens` tokens in all, about: a matrix of the usual size is read, packed and multiplied,
/// and stands for every weight (also those of experts that few tokens choose). Attention is not counted.
///
/// # Errors
/// As [`crate::LlamaRuntime::load`].
pub fn streamed_seconds(model: &Checkpoint, tokens: usize, threads: usize) -> Result<f64, RuntimeError> {
    llama_config(model)?;
    let mut linears = model.config().linears();
    linears.sort_by_key(|l| l.n() * l.k());
    let Some(sample) = linears.get(linears.len() / 2) else { return Ok(0.0) };
    let start = Instant::now();
    let matrix = linear(model, &sample.module)?;
    let (x, mut out) = (vec![0.5; tokens * sample.k()], vec![0.0; tokens * sample.n()]);
    matmul_many_in(Activations::Float, &[&matrix], &x, tokens, &mut [&mut out]);
    let seconds = start.elapsed().as_secs_f64();
    let all: f64 = linears.iter().map(|l| (l.n() * l.k()) as f64).sum();
    Ok(seconds * all / (sample.n() * sample.k()) as f64 / threads.max(1) as f64)
}

/// The layer of a tensor, by its name.
fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok())
}

/// The tensors of some layers.
fn names_of(model: &Checkpoint, layers: std::ops::Range<usize>) -> Vec<String> {
    let mut names = model.names();
    names.retain(|name| layer_of(name).is_some_and(|i| layers.contains(&i)));
    names
}

/// Bytes of the largest layer.
fn layer_bytes(model: &Checkpoint) -> u64 {
    let mut layers = std::collections::BTreeMap::new();
    for name in model.names() {
        let number = layer_of(&name);
        if let (Some(number), Some(info)) = (number, model.info(&name)) {
            let bytes = if model.is_gguf() { 4 * info.shape.iter().product::<usize>() as u64 } else { info.bytes };
            *layers.entry(number).or_insert(0) += bytes;
        }
    }
    layers.into_values().max().unwrap_or(0)
}

fn check(c: &LlamaConfig, sequences: &[Vec<u32>]) -> Result<(), RuntimeError> {
    let limit = PREFILL.min(c.max_position_embeddings);
    for tokens in sequences {
        if tokens.is_empty() {
            return Err(RuntimeError::Input { what: "tokens", problem: "expected at least one, got none".into() });
        }
        if tokens.len() > limit {
            let of = "positions of a sequence that goes through once";
            return Err(RuntimeError::TooLong { what: "tokens", limit, of, got: tokens.len() });
        }
        if let Some(id) = tokens.iter().find(|&&id| id as usize >= c.vocab_size) {
            let problem = format!("expected ids below the vocabulary's {} rows, got {id}", c.vocab_size);
            return Err(RuntimeError::Input { what: "tokens", problem });
        }
    }
    Ok(())
}
