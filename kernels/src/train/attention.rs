//! Causal attention with rotary positions and grouped key/value heads, forward and backward.
//!
//! - Shapes: `q`, output `[b, t, heads * d]`; `k`, `v` `[b, t, kv_heads * d]`; head `h` reads kv head
//!   `h / (heads / kv_heads)`.
//! - Formula: `q' = rope(q) / sqrt(d)`, `k' = rope(k)`, `p = softmax over j <= i of q'[i] . k'[j]`, output `p v`.
//!   Rotary pairs are half a head apart (Hugging Face's layout). With a [`KvGrid`] `k'` and `v` are put on it first, as a KV
//!   cache of codes holds them; the gradient passes straight through. With a window `w` position `i` sees `j` in `i - w < j <= i` only.
//! - Order: one task for each sequence and kv head; the heads of a group and the blocks of rows go in order, so any
//!   thread count gives the same bits. Products by the small matrix product of `conv::gemm`.
//! - Cost: that of full attention, with a window too; the probabilities of the forward pass are kept, `b * heads * t^2` floats.

use super::exp::exp;
use super::{lane_sum, vectorized};
use crate::conv::gemm::{Left, Right, gemm};
use dsq_quant::KvGrid;
use rayon::prelude::*;
use std::borrow::Cow;

/// Rows of a block: columns right of the block are neither computed nor read.
const BLOCK: usize = 32;

/// Sizes of an attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// Sequences.
    pub b: usize,
    /// Tokens of a sequence.
    pub t: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; even.
    pub d: usize,
    /// Positions that a token sees, its own and those right before it, at least its own; `None`: all.
    pub window: Option<usize>,
}

/// Cosines and sines of the rotary positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rope {
    /// From tables `[t, d / 2]` for positions `0..t` and heads of width `d`; where both are times a factor, so is what
    /// [`Rope`] turns, and its gradient.
    ///
    /// # Panics
    /// When the tables are not of one length, or of no whole rows.
    pub fn new(d: usize, [cos, sin]: [Vec<f32>; 2]) -> Self {
        let half = d / 2;
        assert!(cos.len() == sin.len() && half > 0 && cos.len().is_multiple_of(half), "tables: [t, d / 2]");
        Self { half, cos, sin }
    }

    /// Rotates `x` (one head at position `i`) times `scale` into `out`; `back` turns the other way.
    #[inline]
    fn rotate(&self, i: usize, x: &[f32], scale: f32, back: bool, out: &mut [f32]) {
        let (cos, sin) = (&self.cos[i * self.half..][..self.half], &self.sin[i * self.half..][..self.half]);
        let (x0, x1) = x.split_at(self.half);
        let (o0, o1) = out.split_at_mut(self.half);
        let sign = if back { -1.0 } else { 1.0 };
        for j in 0..self.half {
            let s = sin[j] * sign;
            o0[j] = (x0[j] * cos[j] - x1[j] * s) * scale;
            o1[j] = (x1[j] * cos[j] + x0[j] * s) * scale;
        }
    }
}

/// The result of a forward pass, with what the backward pass needs.
#[derive(Debug)]
pub struct Attention {
    /// Output `[b, t, heads * d]`.
    pub out: Vec<f32>,
    /// Probabilities `[t, t]` of each head of the group, for each sequence and kv head. Right of a row's block they
    /// are not set.
    probs: Vec<Vec<f32>>,
}

/// Gradients of the inputs, in their shapes.
#[derive(Debug)]
pub struct AttentionGradients {
    /// Of `q`.
    pub q: Vec<f32>,
    /// Of `k`.
    pub k: Vec<f32>,
    /// Of `v`.
    pub v: Vec<f32>,
}

impl AttentionShape {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    fn scale(&self) -> f32 {
        1.0 / (self.d as f32).sqrt()
    }

    /// Offset of sequence `b`, head `h` in a tensor of `heads` heads.
    fn offset(&self, b: usize, h: usize, heads: usize) -> usize {
        b * self.t * heads * self.d + h * self.d
    }

    /// One head, rotated and scaled, as `[t, d]`.
    fn rotated(&self, x: &[f32], offset: usize, heads: usize, scale: f32, rope: &Rope) -> Vec<f32> {
        let mut out = vec![0.0; self.t * self.d];
        for (i, out) in out.chunks_exact_mut(self.d).enumerate() {
            rope.rotate(i, &x[offset + i * heads * self.d..][..self.d], scale, false, out);
        }
        out
    }

    /// Keys `[b, t, kv_heads * d]` after the rotary embedding, `[b, kv_heads, t, d]`: what a cache holds.
    ///
    /// # Panics
    /// As [`Attention::forward`].
    pub fn rotated_keys(&self, k: &[f32], rope: &Rope) -> Vec<f32> {
        let heads = (0..self.b * self.kv_heads).into_par_iter().map(|task| {
            let at = self.offset(task / self.kv_heads, task % self.kv_heads, self.kv_heads);
            self.rotated(k, at, self.kv_heads, 1.0, rope)
        });
        heads.collect::<Vec<_>>().concat()
    }

    /// The keys of one head as attention multiplies with them, `[t, d]`.
    fn keys(&self, k: &[f32], offset: usize, rope: &Rope, grid: Option<&KvGrid>) -> Vec<f32> {
        let mut out = self.rotated(k, offset, self.kv_heads, 1.0, rope);
        if let Some(g) = grid {
            g.round(g.k, &mut out);
        }
        out
    }

    /// Copies one head's `[t, d]` to its place in a tensor of `heads` heads, `[t, heads * d]` of one sequence.
    fn place(&self, local: &[f32], h: usize, heads: usize, out: &mut [f32]) {
        for (local, out) in local.chunks_exact(self.d).zip(out.chunks_exact_mut(heads * self.d)) {
            out[h * self.d..][..self.d].copy_from_slice(local);
        }
    }
}

/// The values as attention multiplies with them, in their own layout.
fn values_on<'a>(v: &'a [f32], grid: Option<&KvGrid>) -> Cow<'a, [f32]> {
    let Some(g) = grid else { return v.into() };
    let mut out = v.to_vec();
    g.round(g.v, &mut out);
    out.into()
}

/// `[d, t]` of a head's `[t, d]` at `x[i * row..]`.
fn transposed(x: &[f32], row: usize, t: usize, d: usize) -> Vec<f32> {
    let mut out = vec![0.0; t * d];
    for i in 0..t {
        for (c, &v) in x[i * row..][..d].iter().enumerate() {
            out[c * t + i] = v;
        }
    }
    out
}

vectorized! {
    fn softmax(row: &mut [f32], len: usize) {
        let (live, dead) = row.split_at_mut(len);
        let mut max = f32::NEG_INFINITY;
        for &v in live.iter() {
            max = if v > max { v } else { max };
        }
        for v in live.iter_mut() {
            *v = exp(*v - max);
        }
        let inv = 1.0 / lane_sum(len, |i| live[i]);
        for v in live.iter_mut() {
            *v *= inv;
        }
        dead.fill(0.0);
    }
}

vectorized! {
    fn softmax_gradient(p: &[f32], dp: &mut [f32]) {
        let n = p.len();
        let dp = &mut dp[..n];
        let mean = lane_sum(n, |i| p[i] * dp[i]);
        for i in 0..n {
            dp[i] = p[i] * (dp[i] - mean);
        }
    }
}

impl Attention {
    /// The forward pass; with `grid` over keys and values as a cache of codes holds them.
    ///
    /// # Panics
    /// When a slice is shorter than `shape` says, or `rope` was made for fewer tokens or another width.
    pub fn forward([q, k, v]: [&[f32]; 3], shape: &AttentionShape, rope: &Rope, grid: Option<&KvGrid>) -> Self {
        let &AttentionShape { b, t, heads, kv_heads, d, window } = shape;
        let v = values_on(v, grid);
        let group = shape.group();
        let parts: Vec<(Vec<f32>, Vec<f32>)> = (0..b * kv_heads)
            .into_par_iter()
            .map(|task| {
                let (b, g) = (task / kv_heads, task % kv_heads);
                let kv_at = shape.offset(b, g, kv_heads);
                let kt = transposed(&shape.keys(k, kv_at, rope, grid), d, t, d);
                let v = Right { data: &v[kv_at..], row: kv_heads * d };
                let (mut out, mut probs) = (vec![0.0; group * t * d], vec![0.0; group * t * t]);
                for (h, (out, probs)) in out.chunks_exact_mut(t * d).zip(probs.chunks_exact_mut(t * t)).enumerate() {
                    let q = shape.rotated(q, shape.offset(b, g * group + h, heads), heads, shape.scale(), rope);
                    for i in (0..t).step_by(BLOCK) {
                        let rows = BLOCK.min(t - i);
                        let end = i + rows;
                        let p = &mut probs[i * t..end * t];
                        let a = Left { data: &q[i * d..], row: d, col: 1 };
                        gemm(a, Right { data: &kt, row: t }, p, t, [rows, end, d], false);
                        for (r, row) in p.chunks_exact_mut(t).enumerate() {
                            let seen = i + r + 1;
                            let start = window.map_or(0, |w| seen.saturating_sub(w.max(1)));
                            row[..start].fill(0.0);
                            softmax(&mut row[start..end], seen - start);
                        }
                        gemm(Left { data: p, row: t, col: 1 }, v, &mut out[i * d..end * d], d, [rows, d, end], false);
                    }
                }
                (out, probs)
            })
            .collect();
        let mut out = vec![0.0; b * t * heads * d];
        out.par_chunks_mut((t * heads * d).max(1)).zip(parts.par_chunks(kv_heads)).for_each(|(out, parts)| {
            for (h, local) in parts.iter().flat_map(|p| p.0.chunks_exact((t * d).max(1))).enumerate() {
                shape.place(local, h, heads, out);
            }
        });
        Self { out, probs: parts.into_iter().map(|p| p.1).collect() }
    }

    /// The backward pass: gradients for the gradient `grad` of the output and the inputs and the grid of the forward pass.
    ///
    /// # Panics
    /// As [`Attention::forward`].
    pub fn backward(
        &self,
        grad: &[f32],
        [q, k, v]: [&[f32]; 3],
        shape: &AttentionShape,
        rope: &Rope,
        grid: Option<&KvGrid>,
    ) -> AttentionGradients {
        let &AttentionShape { b, t, heads, kv_heads, d, .. } = shape;
        let v = values_on(v, grid);
        let group = shape.group();
        let parts: Vec<[Vec<f32>; 3]> = self
            .probs
            .par_iter()
            .enumerate()
            .map(|(task, probs)| {
                let (b, g) = (task / kv_heads, task % kv_heads);
                let kv_at = shape.offset(b, g, kv_heads);
                let k = shape.keys(k, kv_at, rope, grid);
                let vt = transposed(&v[kv_at..], kv_heads * d, t, d);
                let (mut dq, mut dk, mut dv) = (vec![0.0; group * t * d], vec![0.0; t * d], vec![0.0; t * d]);
                let mut dp = vec![0.0; BLOCK * t];
                for (h, (dq, probs)) in dq.chunks_exact_mut(t * d).zip(probs.chunks_exact(t * t)).enumerate() {
                    let at = shape.offset(b, g * group + h, heads);
                    let q = shape.rotated(q, at, heads, shape.scale(), rope);
                    let row = heads * d;
                    for i in (0..t).step_by(BLOCK) {
                        let rows = BLOCK.min(t - i);
                        let end = i + rows;
                        let p = &probs[i * t..end * t];
                        let go = &grad[at + i * row..];
                        gemm(
                            Left { data: go, row, col: 1 },
                            Right { data: &vt, row: t },
                            &mut dp,
                            t,
                            [rows, end, d],
                            false,
                        );
                        // dv += p^T go, over this block's rows.
                        gemm(
                            Left { data: p, row: 1, col: t },
                            Right { data: go, row },
                            &mut dv,
                            d,
                            [end, d, rows],
                            true,
                        );
                        for (p, dp) in p.chunks_exact(t).zip(dp.chunks_exact_mut(t)) {
                            softmax_gradient(&p[..end], dp);
                        }
                        let ds = Left { data: &dp, row: t, col: 1 };
                        gemm(ds, Right { data: &k, row: d }, &mut dq[i * d..end * d], d, [rows, d, end], false);
                        let ds_t = Left { data: &dp, row: 1, col: t };
                        gemm(ds_t, Right { data: &q[i * d..], row: d }, &mut dk, d, [end, d, rows], true);
                    }
                }
                // `dk` already carries 1/sqrt(d): it was multiplied with the scaled q.
                let turn_back = |x: Vec<f32>, scale: f32| {
                    let mut out = vec![0.0; x.len()];
                    for (n, (x, out)) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)).enumerate() {
                        rope.rotate(n % t, x, scale, true, out);
                    }
                    out
                };
                [turn_back(dq, shape.scale()), turn_back(dk, 1.0), dv]
            })
            .collect();
        let gather = |which: usize, heads: usize| {
            let mut out = vec![0.0; b * t * heads * d];
            out.par_chunks_mut((t * heads * d).max(1)).zip(parts.par_chunks(kv_heads)).for_each(|(out, parts)| {
                for (h, local) in parts.iter().flat_map(|p| p[which].chunks_exact((t * d).max(1))).enumerate() {
                    shape.place(local, h, heads, out);
                }
            });
            out
        };
        AttentionGradients { q: gather(0, heads), k: gather(1, kv_heads), v: gather(2, kv_heads) }
    }
}
