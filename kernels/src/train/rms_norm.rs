//! RMSNorm, forward and backward.
//!
//! - Shapes: `x`, `out`, gradients of them `[m, d]`; `w` and its gradient `[d]`; `inv` `[m]`.
//! - Formula: `inv = 1 / sqrt(mean(x^2) + eps)`, `out = (x * inv) * w` (the order of transformers' `LlamaRMSNorm`).
//! - Order: sums over `d` in sixteen lanes; the gradient of `w` over `m` by blocks of 32 rows.
//! - Error: `mean(x^2)` carries at most `d/16 + 16` roundings.

use super::{ROW_BLOCK, lane_sum, vectorized};
use rayon::prelude::*;

/// Normalises rows of length `w.len()`; `inv` gets the inverse root mean square of each row.
pub fn rms_norm(x: &[f32], w: &[f32], eps: f32, out: &mut [f32], inv: &mut [f32]) {
    let d = w.len();
    let rows = ROW_BLOCK * d;
    x.par_chunks(rows)
        .zip(out.par_chunks_mut(rows).zip(inv.par_chunks_mut(ROW_BLOCK)))
        .for_each(|(x, (out, inv))| forward(x, w, eps, out, inv));
}

vectorized! {
    fn forward(x: &[f32], w: &[f32], eps: f32, out: &mut [f32], inv: &mut [f32]) {
        let d = w.len();
        for ((x, out), inv) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)).zip(inv) {
            *inv = 1.0 / (lane_sum(d, |i| x[i] * x[i]) / d as f32 + eps).sqrt();
            for ((o, &x), &w) in out.iter_mut().zip(x).zip(w) {
                *o = (x * *inv) * w;
            }
        }
    }
}

/// Gradients of [`rms_norm`]: `grad` of the output gives that of `x` (returned in `dx`) and that of `w` (returned).
pub fn rms_norm_gradient(grad: &[f32], x: &[f32], w: &[f32], inv: &[f32], dx: &mut [f32]) -> Vec<f32> {
    let d = w.len();
    let rows = ROW_BLOCK * d;
    let parts: Vec<Vec<f32>> = grad
        .par_chunks(rows)
        .zip(x.par_chunks(rows))
        .zip(inv.par_chunks(ROW_BLOCK).zip(dx.par_chunks_mut(rows)))
        .map(|((grad, x), (inv, dx))| {
            let mut dw = vec![0.0; d];
            backward(grad, x, w, inv, dx, &mut dw);
            dw
        })
        .collect();
    let mut dw = vec![0.0; d];
    for part in parts {
        for (sum, v) in dw.iter_mut().zip(part) {
            *sum += v;
        }
    }
    dw
}

vectorized! {
    fn backward(grad: &[f32], x: &[f32], w: &[f32], inv: &[f32], dx: &mut [f32], dw: &mut [f32]) {
        let d = w.len();
        for (((g, x), dx), &inv) in
            grad.chunks_exact(d).zip(x.chunks_exact(d)).zip(dx.chunks_exact_mut(d)).zip(inv)
        {
            let (g, x, w) = (&g[..d], &x[..d], &w[..d]);
            // dx = inv * (g w - xhat * mean(g w xhat)), xhat = x inv.
            let mean = lane_sum(d, |i| g[i] * w[i] * (x[i] * inv)) / d as f32;
            for i in 0..d {
                let hat = x[i] * inv;
                dx[i] = inv * (g[i] * w[i] - hat * mean);
                dw[i] += g[i] * hat;
            }
        }
    }
}
