//! How much attention each position received: what policies that drop positions from a cache go by (H2O, arXiv:2306.14048). Plain
//! code in f64; not a fast path, and its weights are not the bits of `fused.rs`.

use super::fused::Queries;
use super::paged::{BLOCK, PagedLayer};
use crate::parallel::{OutPtr, split};
use std::ops::Range;

/// Adds the attention weights that the queries `q` (`[tokens, heads, d]`) of one sequence give to each position, summed over queries and
/// over the heads of a key/value head, to `mass` (`[kv_heads, past + tokens]`), and returns the entropy of each distribution in nats,
/// `[tokens, heads]`. Positions that a query does not see receive nothing from it. The masses of a call add up to `tokens * heads`.
/// The work is divided over key/value heads.
///
/// # Panics
/// When a length, a position or a block is out of range (the caller's bug).
pub fn attention_mass(layer: &PagedLayer, queries: Queries<'_>, q: &[f32], heads: usize, mass: &mut [f32]) -> Vec<f32> {
    let Queries { past, tokens, .. } = queries;
    let positions = past + tokens;
    assert!(heads > 0 && heads.is_multiple_of(layer.kv_heads), "heads: a multiple of the key/value heads");
    assert_eq!(q.len(), tokens * heads * layer.d, "queries: [tokens, heads, d]");
    assert_eq!(mass.len(), layer.kv_heads * positions, "mass: [kv_heads, past + tokens]");
    let mut entropies = vec![0.0f32; tokens * heads];
    let [masses, entropy] = [&mut *mass, &mut entropies].map(|x| OutPtr(x.as_mut_ptr()));
    let group = heads / layer.kv_heads;
    split(layer.kv_heads, 1, &|range| {
        for kv in range {
            // SAFETY: row `kv` of `mass [kv_heads, positions]`, which is borrowed exclusively and whose length was checked; each `kv` is in
            // one range.
            let mass = unsafe { std::slice::from_raw_parts_mut(masses.get().add(kv * positions), positions) };
            of_head(layer, queries, q, (kv, group), mass, &mut |t, g, value| {
                // SAFETY: `t < tokens` and `g < group`, so it lies in `entropies [tokens, heads]`; nobody else writes the heads of `kv`.
                unsafe { *entropy.get().add(t * heads + kv * group + g) = value };
            });
        }
    });
    entropies
}

/// [`attention_mass`] of the `group` heads of a key/value head.
fn of_head(
    layer: &PagedLayer,
    Queries { table, past, tokens }: Queries<'_>,
    q: &[f32],
    (kv, group): (usize, usize),
    mass: &mut [f32],
    entropy: &mut dyn FnMut(usize, usize, f32),
) {
    let (d, heads) = (layer.d, layer.kv_heads * group);
    let seen = |p: usize| -> [Range<usize>; 2] {
        let window = layer.sight.start(p);
        [0..layer.sight.sinks.min(window), window..p + 1]
    };
    let sees = |p: usize, block: usize| {
        let (a, b) = (block * BLOCK, (block + 1) * BLOCK);
        seen(p).iter().any(|r| r.start.max(a) < r.end.min(b))
    };
    // Scores, `[tokens, group, positions in whole blocks]`; those that a query does not see are not computed, or not used.
    let row = (past + tokens).next_multiple_of(BLOCK);
    let mut scores = vec![0.0f64; tokens * group * row];
    let (codes, mut keys) = (layer.key_codes(), vec![0.0f32; d * BLOCK]);
    for block in (0..row / BLOCK).filter(|&b| (past..past + tokens).any(|p| sees(p, b))) {
        layer.keys(table[block], kv, &codes, &mut keys);
        for t in (0..tokens).filter(|t| sees(past + t, block)) {
            for g in 0..group {
                let q = &q[(t * heads + kv * group + g) * d..][..d];
                let mut sums = [0.0f64; BLOCK];
                for (&q, keys) in q.iter().zip(keys.as_chunks::<BLOCK>().0) {
                    sums.iter_mut().zip(keys).for_each(|(sum, &k)| *sum += f64::from(k) * f64::from(q));
                }
                let to = &mut scores[(t * group + g) * row + block * BLOCK..][..BLOCK];
                to.iter_mut().zip(sums).for_each(|(to, sum)| *to = sum * f64::from(layer.scale));
            }
        }
    }
    let mut received = vec![0.0f64; past + tokens];
    for (i, scores) in scores.chunks_exact_mut(row).enumerate() {
        let (t, g) = (i / group, i % group);
        let seen = || seen(past + t).into_iter().flatten();
        let top = seen().fold(f64::NEG_INFINITY, |top, s| top.max(scores[s]));
        let (mut total, mut mean) = (0.0, 0.0);
        for s in seen() {
            let below = scores[s] - top;
            scores[s] = below.exp();
            total += scores[s];
            // Nothing times minus infinity is nothing here.
            mean += if scores[s] > 0.0 { scores[s] * below } else { 0.0 };
        }
        seen().for_each(|s| received[s] += scores[s] / total);
        // Of weights w = exp(below) / total: - sum w ln w = ln total - sum w below.
        entropy(t, g, (total.ln() - mean / total) as f32);
    }
    mass.iter_mut().zip(&received).for_each(|(to, from)| *to += *from as f32);
}
