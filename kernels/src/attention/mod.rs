//! Causal grouped-query attention over a block cache of keys and values. Not the projections, not the rotary embedding.
//!
//! - Shapes: queries `[m, heads, d]` at positions `past .. past + m`, output `[m, heads, value]`, where value heads may have another
//!   width than those of keys; head `h` reads the
//!   key/value head `h / (heads / kv_heads)`; the query at position `p` sees positions `0..=p`, with a window `w` the last
//!   `w` of them.
//! - Layout: [`LayerCache`] (see `cache.rs`), f32 or one-byte codes with a scale for the keys and one for the values. A code
//!   becomes `code value * scale`, one f32 product in registers, and from there on all is as for f32: a cache of codes gives the
//!   bits of a float cache that holds [`dsq_quant::QuantArgs::dequantize`] of them.
//! - Requires: nothing; paths as in `linear`.
//! - Order: score = sum over d in increasing order, fused, then times the cache's scale, `1 / sqrt(d)` unless it was given another; the maximum over the visible
//!   positions is taken away; `exp` as in `elementwise`; the weights are summed in 16 lanes (lane = position mod 16),
//!   folded in halves; output = (sum over positions in increasing order, fused) / that sum. One query's order knows
//!   neither m nor `past` beyond its own position (positions left of a window are not read, or weigh 0): a prompt in one piece, in chunks, or token by token gives the
//!   same bits (zeros may differ in sign).
//! - Cost: `2 * d` multiply-adds for each query and visible position; tiles of 4 queries x 4 blocks. Codes: a quarter of the
//!   bytes, a conversion and a product for each sixteen of them and tile.
//! - Error: scores `(d + 1) u * sum |q| |k|`; weights as `exp`; the sum over p positions `(p + p/16 + 5) u`, relative to
//!   the largest |value|.

mod cache;
mod form;
mod fused;
mod kernel;
mod mass;
mod paged;
#[cfg(test)]
mod paged_tests;
mod sight;
#[cfg(test)]
mod tests;

pub use cache::LayerCache;
pub use fused::{Queries, attend_paged};
pub use mass::attention_mass;
pub use paged::{BLOCK, KvFormat, PagedLayer};

use crate::Isa;
use crate::elementwise::exp;
use crate::parallel::{OutPtr, split};
use crate::simd::{LANES, Simd, dispatch, largest, sum};
use cache::Store;
use dsq_quant::QuantType;
use form::{E4m3, F32, Form, Int8};
use std::ops::Range;

/// Positions of a run of `fused.rs`. Part of its contract: another length gives other bits.
const RUN: usize = 256;

/// Queries of one head that are worked on together.
const TILE: usize = 4;

/// Attention of `m` queries `[m, heads, d]` whose first is at position `past`; positions `0..past + m` of the cache
/// are filled. `out` is `[m, heads, value]`.
///
/// # Panics
/// When a length or position is out of range (the caller's bug).
pub fn attend(cache: &LayerCache, q: &[f32], heads: usize, past: usize, out: &mut [f32]) {
    attend_on(Isa::detect(), cache, q, heads, past, out);
}

fn attend_on(isa: Isa, cache: &LayerCache, q: &[f32], heads: usize, past: usize, out: &mut [f32]) {
    let row = heads * cache.d;
    assert!(row > 0 && q.len().is_multiple_of(row), "queries: [m, heads, d]");
    assert_eq!(out.len(), q.len() / row * heads * cache.value, "out: [m, heads, value]");
    assert!(heads.is_multiple_of(cache.kv_heads), "heads: a multiple of the key/value heads");
    let m = q.len() / row;
    assert!(past + m <= cache.capacity(), "positions: within the cache");
    let tiles = m.div_ceil(TILE);
    let (keys, values, scales) = match &cache.store {
        Store::Floats { keys, values } => {
            (keys.as_slice().as_ptr().cast(), values.as_slice().as_ptr().cast(), [1.0; 2])
        }
        Store::Codes { grid, keys, values } => (keys.as_ptr(), values.as_ptr(), [grid.k.scale, grid.v.scale]),
    };
    let (keys, values): (*const u8, *const u8) = (keys, values);
    let to = OutPtr(out.as_mut_ptr());
    let job = Job {
        cache,
        q: q.as_ptr() as usize,
        keys: keys as usize,
        values: values as usize,
        scales,
        heads,
        past,
        m,
        tiles,
    };
    split(heads * tiles, 1, &|units| {
        let mut scores = vec![0.0f32; TILE * (past + m).next_multiple_of(4 * LANES)];
        let (job, scores, out) = (&job, scores.as_mut_ptr(), to.get());
        // SAFETY: the asserts above; units write disjoint places; `scores` holds TILE padded rows; the form is the store's.
        unsafe {
            match cache.grid().map(|g| g.args.qtype) {
                None => {
                    dispatch!(isa, attend_units::<F32>(job: &Job<'_>, units: Range<usize>, scores: *mut f32, out: *mut f32))
                }
                Some(QuantType::Fp8E4M3) => {
                    dispatch!(isa, attend_units::<E4m3>(job: &Job<'_>, units: Range<usize>, scores: *mut f32, out: *mut f32))
                }
                Some(_) => {
                    dispatch!(isa, attend_units::<Int8>(job: &Job<'_>, units: Range<usize>, scores: *mut f32, out: *mut f32))
                }
            }
        };
    });
}

struct Job<'a> {
    cache: &'a LayerCache,
    /// Address of the queries (a pointer is not Sync).
    q: usize,
    /// Addresses of the stored keys and values.
    keys: usize,
    values: usize,
    /// Scales of keys and values; of floats not used.
    scales: [f32; 2],
    heads: usize,
    past: usize,
    m: usize,
    tiles: usize,
}

/// Safety: the path's features; the asserts of `attend_on` hold; the cache is of the form `F`.
#[inline(always)]
unsafe fn attend_units<S: Simd, F: Form>(job: &Job<'_>, units: Range<usize>, scores: *mut f32, out: *mut f32) {
    for unit in units {
        let (head, first) = (unit / job.tiles, unit % job.tiles * TILE);
        // SAFETY: a tile of four queries if four are left, else one by one.
        unsafe {
            if first + TILE <= job.m {
                attend_tile::<S, F, TILE>(job, head, first, scores, out);
            } else {
                for t in first..job.m {
                    attend_tile::<S, F, 1>(job, head, t, scores, out);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn attend_tile<S: Simd, F: Form, const R: usize>(
    job: &Job<'_>,
    head: usize,
    first: usize,
    scores: *mut f32,
    out: *mut f32,
) {
    let (c, d) = (job.cache, job.cache.d);
    let kv = head / (job.heads / c.kv_heads);
    let seen = job.past + first + R;
    // The first position that query r of the tile sees, and the block of that of the first query.
    let start = |r: usize| c.window.map_or(0, |w| (job.past + first + r + 1).saturating_sub(w.max(1)));
    let first_block = start(0) / LANES;
    let blocks = seen.div_ceil(LANES);
    let stride = (job.past + job.m).next_multiple_of(4 * LANES);
    let padded = c.value.next_multiple_of(LANES);
    // SAFETY: `blocks` lies within the cache and `stride`; query and output rows are in range.
    unsafe {
        let q: [*const f32; R] =
            std::array::from_fn(|r| (job.q as *const f32).add(((first + r) * job.heads + head) * d));
        let keys = (job.keys as *const u8).add(kv * c.blocks * d * LANES * F::BYTES);
        let (block, scale, by) = (d * LANES * F::BYTES, S::splat(job.scales[0]), S::splat(c.scale));
        let mut b = first_block;
        while b + 4 <= blocks {
            score_blocks::<S, F, R, 4>(&q, keys.add(b * block), [scale, by], d, scores.add(b * LANES), stride);
            b += 4;
        }
        while b < blocks {
            score_blocks::<S, F, R, 1>(&q, keys.add(b * block), [scale, by], d, scores.add(b * LANES), stride);
            b += 1;
        }
        let mut sums = [0.0f32; R];
        for r in 0..R {
            sums[r] = soften::<S>(
                scores.add(r * stride),
                first_block * LANES,
                start(r)..job.past + first + r + 1,
                blocks * LANES,
            );
        }
        let values = (job.values as *const u8).add(kv * c.capacity() * padded * F::BYTES);
        let mut at = 0;
        while at + 4 * LANES <= padded {
            mix::<S, F, R, 4>(
                scores,
                stride,
                values.add(at * F::BYTES),
                padded,
                start(0)..seen,
                &sums,
                job,
                head,
                first,
                at,
                out,
            );
            at += 4 * LANES;
        }
        while at < padded {
            mix::<S, F, R, 1>(
                scores,
                stride,
                values.add(at * F::BYTES),
                padded,
                start(0)..seen,
                &sums,
                job,
                head,
                first,
                at,
                out,
            );
            at += LANES;
        }
    }
}

/// Scores of R queries against B blocks of 16 keys; `scales`: of the stored keys, and what scores are multiplied by.
#[inline(always)]
unsafe fn score_blocks<S: Simd, F: Form, const R: usize, const B: usize>(
    q: &[*const f32; R],
    keys: *const u8,
    scales: [S::V; 2],
    d: usize,
    scores: *mut f32,
    stride: usize,
) {
    // SAFETY: the caller's ranges.
    unsafe {
        let mut dot = [[S::splat(0.0); B]; R];
        for i in 0..d {
            let k: [S::V; B] =
                std::array::from_fn(|b| F::load::<S>(keys.add((b * d + i) * LANES * F::BYTES), scales[0]));
            for r in 0..R {
                let qv = S::splat(*q[r].add(i));
                for b in 0..B {
                    dot[r][b] = S::fma(qv, k[b], dot[r][b]);
                }
            }
        }
        for r in 0..R {
            for b in 0..B {
                S::store(scores.add(r * stride + b * LANES), S::mul(dot[r][b], scales[1]));
            }
        }
    }
}

/// Turns the scores of `seen` into `exp(score - largest)`, the rest from `from` on into 0, and returns the sum. `from` and `padded` are
/// multiples of 16 around `seen`, which is not empty.
#[inline(always)]
unsafe fn soften<S: Simd>(scores: *mut f32, from: usize, seen: Range<usize>, padded: usize) -> f32 {
    // SAFETY: `scores` is writable for `padded` values, and set from `from` on.
    unsafe {
        let row = std::slice::from_raw_parts_mut(scores, padded);
        // Masked places repeat the first score, which changes no maximum and stays finite in exp.
        let any = row[seen.start];
        row[from..seen.start].fill(any);
        row[seen.end..].fill(any);
        let mut top = S::splat(any);
        for i in (from..padded).step_by(LANES) {
            top = S::max(S::load(scores.add(i)), top);
        }
        let top = S::splat(largest::<S>(top));
        for i in (from..padded).step_by(LANES) {
            S::store(scores.add(i), exp::<S>(S::sub(S::load(scores.add(i)), top)));
        }
        row[from..seen.start].fill(0.0);
        row[seen.end..].fill(0.0);
        let mut total = S::splat(0.0);
        for i in (from..padded).step_by(LANES) {
            total = S::add(total, S::load(scores.add(i)));
        }
        sum::<S>(total)
    }
}

/// Values weighted by R rows of weights, W vectors of a head wide, written to the output at column `at`.
#[inline(always)]
unsafe fn mix<S: Simd, F: Form, const R: usize, const W: usize>(
    weights: *const f32,
    stride: usize,
    values: *const u8,
    padded: usize,
    seen: Range<usize>,
    sums: &[f32; R],
    job: &Job<'_>,
    head: usize,
    first: usize,
    at: usize,
    out: *mut f32,
) {
    // SAFETY: the positions `seen` of values; the output rows are the caller's.
    unsafe {
        let mut acc = [[S::splat(0.0); W]; R];
        let scale = S::splat(job.scales[1]);
        for t in seen {
            let v: [S::V; W] =
                std::array::from_fn(|w| F::load::<S>(values.add((t * padded + w * LANES) * F::BYTES), scale));
            for r in 0..R {
                let p = S::splat(*weights.add(r * stride + t));
                for w in 0..W {
                    acc[r][w] = S::fma(p, v[w], acc[r][w]);
                }
            }
        }
        let d = job.cache.value;
        for r in 0..R {
            let row = out.add(((first + r) * job.heads + head) * d);
            for w in 0..W {
                let (from, v) = (at + w * LANES, S::div(acc[r][w], S::splat(sums[r])));
                if from + LANES <= d {
                    S::store(row.add(from), v);
                } else {
                    let mut lanes = [0.0f32; LANES];
                    S::store(lanes.as_mut_ptr(), v);
                    std::ptr::copy_nonoverlapping(lanes.as_ptr(), row.add(from), d - from);
                }
            }
        }
    }
}
