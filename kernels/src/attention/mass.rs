//! How much attention each position received: what policies that drop positions from a cache go by (H2O, arXiv:2306.14048). Plain
//! code in f64; not a fast path, and its weights are not the bits of `fused.rs`.

use super::fused::Queries;
use super::paged::{BLOCK, PagedLayer};

/// Adds the attention weights that the queries `q` (`[tokens, heads, d]`) of one sequence give to each position, summed over queries and
/// over the heads of a key/value head, to `mass` (`[kv_heads, past + tokens]`), and returns the entropy of each distribution in nats,
/// `[tokens, heads]`. Positions that a query does not see receive nothing from it. The masses of a call add up to `tokens * heads`.
///
/// # Panics
/// When a length, a position or a block is out of range (the caller's bug).
pub fn attention_mass(layer: &PagedLayer, queries: Queries<'_>, q: &[f32], heads: usize, mass: &mut [f32]) -> Vec<f32> {
    let Queries { table, past, tokens } = queries;
    let (d, positions) = (layer.d, past + tokens);
    assert!(heads > 0 && heads.is_multiple_of(layer.kv_heads), "heads: a multiple of the key/value heads");
    assert_eq!(q.len(), tokens * heads * d, "queries: [tokens, heads, d]");
    assert_eq!(mass.len(), layer.kv_heads * positions, "mass: [kv_heads, past + tokens]");
    let group = heads / layer.kv_heads;
    let mut entropies = vec![0.0; tokens * heads];
    let mut received = vec![0.0f64; positions];
    let mut weights = Vec::new();
    for kv in 0..layer.kv_heads {
        received.fill(0.0);
        for (t, head) in (0..tokens).flat_map(|t| (kv * group..(kv + 1) * group).map(move |h| (t, h))) {
            let q = &q[(t * heads + head) * d..][..d];
            let p = past + t;
            let window = layer.sight.start(p);
            let seen = || (0..layer.sight.sinks.min(window)).chain(window..=p);
            weights.clear();
            weights.extend(seen().map(|s| {
                let key = layer.key(table[s / BLOCK], kv, s % BLOCK);
                let dot: f64 = key.zip(q).map(|(k, &q)| f64::from(k) * f64::from(q)).sum();
                dot * f64::from(layer.scale)
            }));
            let top = weights.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
            weights.iter_mut().for_each(|w| *w = (*w - top).exp());
            let total: f64 = weights.iter().sum();
            let mut entropy = 0.0;
            for (s, w) in seen().zip(&weights) {
                let w = w / total;
                received[s] += w;
                entropy -= if w > 0.0 { w * w.ln() } else { 0.0 };
            }
            entropies[t * heads + head] = entropy as f32;
        }
        for (to, from) in mass[kv * positions..][..positions].iter_mut().zip(&received) {
            *to += *from as f32;
        }
    }
    entropies
}
