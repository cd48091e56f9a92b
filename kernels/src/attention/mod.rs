//! Causal grouped-query attention over a block cache of keys and values. Not the projections, not the rotary embedding.
//!
//! - Shapes: queries `[m, heads, d]` at positions `past .. past + m`, output `[m, heads, d]`; head `h` reads the
//!   key/value head `h / (heads / kv_heads)`; the query at position `p` sees positions `0..=p`.
//! - Layout: [`LayerCache`]. Keys in blocks of 16 positions, `[kv head][block][d][16]`, so that 16 scores are one vector
//!   and need no horizontal sum; values `[kv head][position][d padded to 16]`.
//! - Requires: nothing; paths as in `linear`.
//! - Order: score = sum over d in increasing order, fused, then times `1 / sqrt(d)`; the maximum over the visible
//!   positions is taken away; `exp` as in `elementwise`; the weights are summed in 16 lanes (lane = position mod 16),
//!   folded in halves; output = (sum over positions in increasing order, fused) / that sum. One query's order knows
//!   neither m nor `past` beyond its own position: a prompt in one piece, in chunks, or token by token gives the
//!   same bits (zeros may differ in sign).
//! - Cost: `2 * d` multiply-adds for each query and visible position; tiles of 4 queries x 4 blocks.
//! - Error: scores `(d + 1) u * sum |q| |k|`; weights as `exp`; the sum over p positions `(p + p/16 + 5) u`, relative to
//!   the largest |value|.

#[cfg(test)]
mod tests;

use crate::Isa;
use crate::elementwise::exp;
use crate::memory::Floats;
use crate::parallel::{OutPtr, split};
use crate::simd::{LANES, Simd, dispatch, largest, sum};
use std::ops::Range;

/// Keys and values of one layer, allocated once.
#[derive(Debug, Clone)]
pub struct LayerCache {
    kv_heads: usize,
    d: usize,
    blocks: usize,
    keys: Floats,
    values: Floats,
}

impl LayerCache {
    /// Room for `positions` (rounded up to a block of 16).
    pub fn new(positions: usize, kv_heads: usize, d: usize) -> Self {
        let blocks = positions.div_ceil(LANES);
        let keys = Floats::zeroed(kv_heads * blocks * d * LANES);
        let values = Floats::zeroed(kv_heads * blocks * LANES * d.next_multiple_of(LANES));
        Self { kv_heads, d, blocks, keys, values }
    }

    /// Positions that fit.
    pub fn capacity(&self) -> usize {
        self.blocks * LANES
    }

    /// Bytes held in memory.
    pub fn bytes(&self) -> usize {
        (self.keys.as_slice().len() + self.values.as_slice().len()) * size_of::<f32>()
    }

    /// Writes the key and value rows (`[kv_heads, d]`) of one position.
    ///
    /// # Panics
    /// When the position or a length is out of range (the caller's bug).
    pub fn put(&mut self, position: usize, key: &[f32], value: &[f32]) {
        let (d, padded) = (self.d, self.d.next_multiple_of(LANES));
        assert!(position < self.capacity() && key.len() == self.kv_heads * d && value.len() == key.len());
        let capacity = self.capacity();
        let (keys, values) = (self.keys.as_mut_slice(), self.values.as_mut_slice());
        for head in 0..self.kv_heads {
            let block = ((head * self.blocks + position / LANES) * d) * LANES + position % LANES;
            for i in 0..d {
                keys[block + i * LANES] = key[head * d + i];
            }
            let row = (head * capacity + position) * padded;
            values[row..row + d].copy_from_slice(&value[head * d..(head + 1) * d]);
        }
    }
}

/// Queries of one head that are worked on together.
const TILE: usize = 4;

/// Attention of `m` queries `[m, heads, d]` whose first is at position `past`; positions `0..past + m` of the cache
/// are filled. `out` is `[m, heads, d]`.
///
/// # Panics
/// When a length or position is out of range (the caller's bug).
pub fn attend(cache: &LayerCache, q: &[f32], heads: usize, past: usize, out: &mut [f32]) {
    attend_on(Isa::detect(), cache, q, heads, past, out);
}

fn attend_on(isa: Isa, cache: &LayerCache, q: &[f32], heads: usize, past: usize, out: &mut [f32]) {
    let row = heads * cache.d;
    assert!(row > 0 && q.len().is_multiple_of(row) && q.len() == out.len(), "queries and out: [m, heads, d]");
    assert!(heads.is_multiple_of(cache.kv_heads), "heads: a multiple of the key/value heads");
    let m = q.len() / row;
    assert!(past + m <= cache.capacity(), "positions: within the cache");
    let tiles = m.div_ceil(TILE);
    let (to, job) = (OutPtr(out.as_mut_ptr()), Job { cache, q: q.as_ptr() as usize, heads, past, m, tiles });
    split(heads * tiles, 1, &|units| {
        let mut scores = vec![0.0f32; TILE * (past + m).next_multiple_of(4 * LANES)];
        let (job, scores, out) = (&job, scores.as_mut_ptr(), to.get());
        // SAFETY: the asserts above; units write disjoint places; `scores` holds TILE padded rows.
        unsafe { dispatch!(isa, attend_units(job: &Job<'_>, units: Range<usize>, scores: *mut f32, out: *mut f32)) };
    });
}

struct Job<'a> {
    cache: &'a LayerCache,
    /// Address of the queries (a pointer is not Sync).
    q: usize,
    heads: usize,
    past: usize,
    m: usize,
    tiles: usize,
}

/// Safety: the path's features; the asserts of `attend_on` hold.
#[inline(always)]
unsafe fn attend_units<S: Simd>(job: &Job<'_>, units: Range<usize>, scores: *mut f32, out: *mut f32) {
    for unit in units {
        let (head, first) = (unit / job.tiles, unit % job.tiles * TILE);
        // SAFETY: a tile of four queries if four are left, else one by one.
        unsafe {
            if first + TILE <= job.m {
                attend_tile::<S, TILE>(job, head, first, scores, out);
            } else {
                for t in first..job.m {
                    attend_tile::<S, 1>(job, head, t, scores, out);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn attend_tile<S: Simd, const R: usize>(
    job: &Job<'_>,
    head: usize,
    first: usize,
    scores: *mut f32,
    out: *mut f32,
) {
    let (c, d) = (job.cache, job.cache.d);
    let kv = head / (job.heads / c.kv_heads);
    let seen = job.past + first + R;
    let blocks = seen.div_ceil(LANES);
    let stride = (job.past + job.m).next_multiple_of(4 * LANES);
    let padded = d.next_multiple_of(LANES);
    // SAFETY: `blocks` lies within the cache and `stride`; query and output rows are in range.
    unsafe {
        let q: [*const f32; R] =
            std::array::from_fn(|r| (job.q as *const f32).add(((first + r) * job.heads + head) * d));
        let keys = c.keys.as_slice().as_ptr().add(kv * c.blocks * d * LANES);
        let mut b = 0;
        while b + 4 <= blocks {
            score_blocks::<S, R, 4>(&q, keys.add(b * d * LANES), d, scores.add(b * LANES), stride);
            b += 4;
        }
        while b < blocks {
            score_blocks::<S, R, 1>(&q, keys.add(b * d * LANES), d, scores.add(b * LANES), stride);
            b += 1;
        }
        let mut sums = [0.0f32; R];
        for r in 0..R {
            sums[r] = soften::<S>(scores.add(r * stride), job.past + first + r + 1, blocks * LANES);
        }
        let values = c.values.as_slice().as_ptr().add(kv * c.capacity() * padded);
        let mut at = 0;
        while at + 4 * LANES <= padded {
            mix::<S, R, 4>(scores, stride, values.add(at), padded, seen, &sums, job, head, first, at, out);
            at += 4 * LANES;
        }
        while at < padded {
            mix::<S, R, 1>(scores, stride, values.add(at), padded, seen, &sums, job, head, first, at, out);
            at += LANES;
        }
    }
}

/// Scores of R queries against B blocks of 16 keys.
#[inline(always)]
unsafe fn score_blocks<S: Simd, const R: usize, const B: usize>(
    q: &[*const f32; R],
    keys: *const f32,
    d: usize,
    scores: *mut f32,
    stride: usize,
) {
    // SAFETY: the caller's ranges.
    unsafe {
        let mut dot = [[S::splat(0.0); B]; R];
        for i in 0..d {
            let k: [S::V; B] = std::array::from_fn(|b| S::load(keys.add((b * d + i) * LANES)));
            for r in 0..R {
                let qv = S::splat(*q[r].add(i));
                for b in 0..B {
                    dot[r][b] = S::fma(qv, k[b], dot[r][b]);
                }
            }
        }
        let scale = S::splat(1.0 / (d as f32).sqrt());
        for r in 0..R {
            for b in 0..B {
                S::store(scores.add(r * stride + b * LANES), S::mul(dot[r][b], scale));
            }
        }
    }
}

/// Turns the first `seen` of `padded` scores into `exp(score - largest)`, the rest into 0, and returns the sum.
#[inline(always)]
unsafe fn soften<S: Simd>(scores: *mut f32, seen: usize, padded: usize) -> f32 {
    // SAFETY: `scores` is writable for `padded` values, a multiple of 16 that is at least `seen`.
    unsafe {
        let row = std::slice::from_raw_parts_mut(scores, padded);
        // Masked places repeat the first score, which changes no maximum and stays finite in exp.
        let any = row[0];
        row[seen..].fill(any);
        let mut top = S::splat(any);
        for i in (0..padded).step_by(LANES) {
            top = S::max(S::load(scores.add(i)), top);
        }
        let top = S::splat(largest::<S>(top));
        for i in (0..padded).step_by(LANES) {
            S::store(scores.add(i), exp::<S>(S::sub(S::load(scores.add(i)), top)));
        }
        row[seen..].fill(0.0);
        let mut total = S::splat(0.0);
        for i in (0..padded).step_by(LANES) {
            total = S::add(total, S::load(scores.add(i)));
        }
        sum::<S>(total)
    }
}

/// Values weighted by R rows of weights, W vectors of a head wide, written to the output at column `at`.
#[inline(always)]
unsafe fn mix<S: Simd, const R: usize, const W: usize>(
    weights: *const f32,
    stride: usize,
    values: *const f32,
    padded: usize,
    seen: usize,
    sums: &[f32; R],
    job: &Job<'_>,
    head: usize,
    first: usize,
    at: usize,
    out: *mut f32,
) {
    // SAFETY: `seen` positions of values; the output rows are the caller's.
    unsafe {
        let mut acc = [[S::splat(0.0); W]; R];
        for t in 0..seen {
            let v: [S::V; W] = std::array::from_fn(|w| S::load(values.add(t * padded + w * LANES)));
            for r in 0..R {
                let p = S::splat(*weights.add(r * stride + t));
                for w in 0..W {
                    acc[r][w] = S::fma(p, v[w], acc[r][w]);
                }
            }
        }
        let d = job.cache.d;
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
