//! What policies of the cache hold of a text and lose of its attention, beside the full cache on the same tokens. Not perplexity and
//! divergence, which follow from the logits (see `dsq_eval`), not the policies (see `policy.rs`).

use crate::cache::LOST;
use crate::llama::{PREFILL, widths};
use crate::prune::{PERIOD, next_pruning};
use crate::{Entry, KvPolicy, KvPool, KvType, LlamaRuntime, Logits, RuntimeError, Sequence};
use dsq_kernels::attention::{BLOCK, PagedLayer, Queries, attention_mass};
use std::time::{Duration, Instant};

/// A text under a policy.
#[derive(Debug, Clone)]
pub struct PolicyRun {
    /// Logits of every token, `[tokens, vocab]`.
    pub logits: Vec<f32>,
    /// The attention weight of the full cache on positions that the policy still held, summed over layers, heads and queries: the
    /// query at position `p` of a layer counts the weights that it gives, in the full cache and with the keys and queries computed
    /// there, to those positions up to `p` that it sees under the policy.
    pub hits: f64,
    /// All attention weight: layers * heads * tokens. `hits / weight` is the hit rate, 1 for [`KvPolicy::Full`].
    pub weight: f64,
    /// Positions that a token behind the text sees before itself, on average over the layers.
    pub positions: f64,
    /// Bytes of keys and values of the blocks that are held behind the text.
    pub bytes: usize,
    /// Bytes of keys and values that are allocated for the text, which goes through in pieces of at most 192 tokens.
    pub allocated: usize,
}

/// What each layer held after each pruning, `[pruning][layer]`, its positions in increasing order.
type Prunings = Vec<Vec<Vec<usize>>>;

impl LlamaRuntime {
    /// Runs `tokens` under each of the policies and with the full cache, from which hits are counted.
    ///
    /// # Errors
    /// As [`LlamaRuntime::new_cache_of`] and [`LlamaRuntime::step`].
    pub fn run_policies(
        &self,
        tokens: &[u32],
        kv: KvType,
        policies: &[KvPolicy],
    ) -> Result<Vec<PolicyRun>, RuntimeError> {
        let mut runs = Vec::with_capacity(policies.len());
        let mut held = Vec::with_capacity(policies.len());
        for &policy in policies {
            let mut pool = self.new_pool(policy.blocks(tokens.len(), PREFILL) * BLOCK, tokens.len(), kv, policy)?;
            let (run, prunings) = self.run_policy(tokens, &mut pool)?;
            runs.push(run);
            // Sights of the layers, and what was pruned.
            let sights = pool.layers.iter().map(|l| (l.sinks(), l.window().unwrap_or(usize::MAX)));
            held.push((sights.collect::<Vec<_>>(), prunings));
        }
        self.full_masses(tokens, kv, &mut |layer, p, mass| {
            for (run, (sights, prunings)) in runs.iter_mut().zip(&held) {
                let sum = |range: &[f32]| range.iter().map(|&m| f64::from(m)).sum::<f64>();
                run.weight += sum(mass);
                run.hits += match prunings.get((p / PERIOD).wrapping_sub(1)) {
                    Some(kept) => {
                        let kept = kept[layer].iter().map(|&s| f64::from(mass[s])).sum::<f64>();
                        kept + sum(&mass[p / PERIOD * PERIOD..])
                    }
                    None => {
                        let (sinks, window) = sights[layer];
                        let start = (p + 1).saturating_sub(window);
                        sum(&mass[..sinks.min(start)]) + sum(&mass[start..])
                    }
                };
            }
        })?;
        Ok(runs)
    }

    /// The text under the policy of a pool, without hits.
    fn run_policy(&self, tokens: &[u32], pool: &mut KvPool) -> Result<(PolicyRun, Prunings), RuntimeError> {
        let mut sequence = pool.new_sequence();
        let (mut logits, mut made, mut prunings) = (Vec::new(), Vec::new(), Vec::new());
        let layers = pool.layers.len();
        while sequence.len() < tokens.len() {
            let at = sequence.len();
            let end = if pool.policy().shares() { at + PREFILL } else { next_pruning(at) }.min(tokens.len());
            let entry = Entry { sequence: &mut sequence, tokens: &tokens[at..end], logits: Logits::All };
            self.step(pool, &mut [entry], &mut made)?;
            logits.append(&mut made);
            if let Some(slots) = &sequence.slots
                && end.is_multiple_of(PERIOD)
            {
                prunings.push((0..layers).map(|layer| slots.positions(layer).collect()).collect());
            }
        }
        let of_block: usize = pool.layers.iter().map(PagedLayer::block_bytes).sum();
        let blocks = sequence.blocks().iter().filter(|block| **block != LOST).count();
        let run = PolicyRun {
            logits,
            hits: 0.0,
            weight: 0.0,
            positions: positions(pool, &sequence),
            bytes: blocks * of_block,
            allocated: pool.blocks() * of_block,
        };
        Ok((run, prunings))
    }

    /// Runs `tokens` with the full cache and gives what each query of each layer gives to the positions up to its own, summed over the
    /// heads: `take(layer, position, masses)`.
    fn full_masses(
        &self,
        tokens: &[u32],
        kv: KvType,
        take: &mut dyn FnMut(usize, usize, &[f32]),
    ) -> Result<(), RuntimeError> {
        let c = self.config();
        let mut pool = self.new_pool(tokens.len().next_multiple_of(BLOCK), tokens.len(), kv, KvPolicy::Full)?;
        let table: Vec<u32> = (0..pool.blocks() as u32).collect();
        let KvPool { layers, rope, scratch, .. } = &mut pool;
        let mut mass = Vec::new();
        for (i, tokens) in tokens.chunks(PREFILL).enumerate() {
            let past = i * PREFILL;
            scratch.resize(tokens.len(), widths(c, self.widest()));
            scratch.positions.clear();
            scratch.positions.extend(past..past + tokens.len());
            self.embed(tokens, &mut scratch.hidden);
            let queries = Queries { table: &table, past, tokens: tokens.len() };
            for (l, (layer, cache)) in self.layers().iter().zip(&mut *layers).enumerate() {
                self.enter(|| layer.run(c, l, self.activations(), &[queries], cache, rope, scratch))?;
                let positions = past + tokens.len();
                mass.resize(tokens.len() * positions, 0.0);
                self.enter(|| attention_mass(cache, queries, &scratch.q, c.num_attention_heads, &mut mass));
                for (p, of_query) in (past..).zip(mass.chunks_exact(positions)) {
                    take(l, p, &of_query[..=p]);
                }
            }
        }
        Ok(())
    }

    /// The time from a prompt to its first logits under each policy, the median of `rounds` (at least 1) that take turns, after one that does
    /// not count. Memory is there before.
    ///
    /// # Errors
    /// As [`LlamaRuntime::new_cache_of`] and [`LlamaRuntime::forward`].
    pub fn first_token(
        &self,
        prompt: &[u32],
        kv: KvType,
        policies: &[KvPolicy],
        rounds: usize,
    ) -> Result<Vec<Duration>, RuntimeError> {
        let caches = policies.iter().map(|&policy| self.new_cache_of(prompt.len(), kv, policy));
        let mut caches = caches.collect::<Result<Vec<_>, _>>()?;
        let mut times = vec![Vec::with_capacity(rounds); policies.len()];
        for round in 0..=rounds.max(1) {
            for (cache, times) in caches.iter_mut().zip(&mut times) {
                cache.truncate(0)?;
                let start = Instant::now();
                self.forward(prompt, cache, Logits::Last)?;
                if round > 0 {
                    times.push(start.elapsed());
                }
            }
        }
        let median = |mut times: Vec<Duration>| {
            times.sort_unstable();
            times[times.len() / 2]
        };
        Ok(times.into_iter().map(median).collect())
    }
}

/// Positions that a token behind a sequence sees before itself, on average over the layers.
fn positions(pool: &KvPool, sequence: &Sequence) -> f64 {
    let len = sequence.len();
    let of = |(i, layer): (usize, &PagedLayer)| match (&sequence.slots, layer.window()) {
        (Some(slots), _) => slots.filled(i),
        (None, Some(window)) => {
            let start = (len + 1).saturating_sub(window);
            layer.sinks().min(start) + len - start
        }
        (None, None) => len,
    };
    pool.layers.iter().enumerate().map(of).sum::<usize>() as f64 / pool.layers.len().max(1) as f64
}
