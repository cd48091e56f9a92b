//! How evenly an engine's steps take: requests of random lengths come and go at random while a number of sequences generate. Steps take
//! turns with one that does the same work each time, whose spread is the machine's. Not the speed of a fixed batch (see `bench.rs`).

use super::{Args, quantile};
use crate::error::CliError;
use dsq_runtime::{
    Engine, EngineSettings, Entry, KvPolicy, KvPool, LlamaRuntime, Logits, Output, Request, Sampling, Sequence,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Value, json};
use std::time::Instant;

/// Share of the steps that warm up: what they take and allocate does not count.
const WARM_UP: usize = 10;

/// One row for each number of sequences: `steps` steps under random admissions and cancellations, from a fixed seed. Somebody always waits,
/// so that a step has `2 * sequences` tokens: one of each sequence that generates, the rest of prompts.
pub(super) fn measure(model: &LlamaRuntime, args: &Args, sequences: usize, steps: usize) -> Result<Value, CliError> {
    let prompt = args.prompt_tokens.iter().copied().max().unwrap_or(1);
    let len = prompt + args.gen_tokens;
    let pool = args.runtime.new_pool(model, sequences + 1, len)?;
    let step_tokens = 2 * sequences;
    let settings = EngineSettings { sequences, step_tokens, share_prefixes: pool.policy().shares() };
    let mut engine = Engine::new(model, None, pool, settings)?;
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let vocab = model.config().vocab_size as u32;
    let mut same = Same::new(model, args, sequences)?;
    let (mut latencies, mut machine, mut tokens, mut requests) = (Vec::new(), Vec::new(), 0usize, 0usize);
    let (mut out, mut ids): (Vec<Output>, Vec<_>) = (Vec::new(), Vec::new());
    let (mut bytes, mut reallocations) = (0, 0);
    let warm = steps / WARM_UP;
    let mut seconds = 0.0;
    for step in 0..steps + warm {
        // Somebody waits at all times, and now and then somebody leaves.
        while engine.waiting() < 2 {
            let prompt = (0..rng.random_range(1..=prompt)).map(|_| rng.random_range(0..vocab)).collect();
            let sampling = Sampling { temperature: 0.8, top_k: 40, seed: rng.random(), ..Sampling::default() };
            let max_tokens = rng.random_range(1..=args.gen_tokens);
            ids.push(engine.submit(Request { prompt, max_tokens, sampling, ..Request::default() })?);
            requests += 1;
        }
        if rng.random_range(0..200) == 0 {
            let at = rng.random_range(0..ids.len());
            engine.cancel(ids.swap_remove(at));
        }
        out.clear();
        let start = Instant::now();
        engine.step(&mut out);
        let time = start.elapsed().as_secs_f64();
        let start = Instant::now();
        same.step(model)?;
        let fixed = start.elapsed().as_secs_f64();
        let made = out.iter().filter(|o| o.token.is_some()).count();
        for o in out.iter().filter(|o| o.finished.is_some()) {
            ids.retain(|id| *id != o.id);
        }
        if step < warm {
            bytes = engine.pool().bytes();
            continue;
        }
        if engine.pool().bytes() != bytes {
            bytes = engine.pool().bytes();
            reallocations += 1;
        }
        seconds += time;
        tokens += made;
        latencies.push(time * 1e3);
        machine.push(fixed * 1e3);
    }
    let [p50, p99] = [0.5, 0.99].map(|q| quantile(&mut latencies, q));
    let [same50, same99] = [0.5, 0.99].map(|q| quantile(&mut machine, q));
    Ok(json!({
        "name": format!("engine {sequences}"),
        "batch": sequences,
        "prompt_tokens": prompt,
        "gen_tokens": args.gen_tokens,
        "threads": model.threads(),
        "activations": args.runtime.activations_name(),
        "kv_type": engine.pool().format_name(),
        "steps": steps,
        "requests": requests,
        "tokens_per_second": tokens as f64 / seconds,
        "latency_p50_ms": p50,
        "latency_p99_ms": p99,
        "latency_p99_over_p50": p99 / p50,
        "same_work_p50_ms": same50,
        "same_work_p99_over_p50": same99 / same50,
        "reallocations": reallocations,
        "kv_cache_bytes": engine.pool().bytes(),
    }))
}

/// A step of as many tokens as the engine's, whose work never changes: sequences cut back to where they were.
struct Same {
    pool: KvPool,
    sequences: Vec<Sequence>,
    len: usize,
    logits: Vec<f32>,
}

impl Same {
    /// Sequences of the length that the engine's have on average: half of the longest prompt, and half of the rest.
    fn new(model: &LlamaRuntime, args: &Args, sequences: usize) -> Result<Self, CliError> {
        let len = (args.prompt_tokens.iter().copied().max().unwrap_or(1) + args.gen_tokens).div_ceil(2);
        let mut pool = model.new_pool(
            sequences * (len + 2).next_multiple_of(KvPool::block_len()),
            len + 2,
            args.runtime.kv_type(),
            KvPolicy::Full,
        )?;
        let mut made = Vec::new();
        for _ in 0..sequences {
            let mut sequence = pool.new_sequence();
            let tokens = vec![0; len];
            let entry = Entry { sequence: &mut sequence, tokens: &tokens, logits: Logits::None };
            model.step(&mut pool, &mut [entry], &mut Vec::new())?;
            made.push(sequence);
        }
        Ok(Self { pool, sequences: made, len, logits: Vec::new() })
    }

    /// Two tokens of each sequence, and the logits of the last.
    fn step(&mut self, model: &LlamaRuntime) -> Result<(), CliError> {
        let entries = self.sequences.iter_mut();
        let mut batch: Vec<Entry> =
            entries.map(|sequence| Entry { sequence, tokens: &[1, 2], logits: Logits::Last }).collect();
        model.step(&mut self.pool, &mut batch, &mut self.logits)?;
        for sequence in &mut self.sequences {
            self.pool.truncate(sequence, self.len)?;
        }
        Ok(())
    }
}
