//! Batch norm in training: normalization by the statistics of the batch, and its gradients. Running statistics and the
//! normalization by them belong to the model.
//!
//! Shapes: `x [rows, c]`, where `rows` counts the pixels of the batch; `gamma`, `beta`, mean and variance `[c]`.
//! Layout: channels last. Requires: nothing. Order: rows are summed in f32 in blocks of [`BLOCK`], the blocks in f64 in
//! order: the same bits for any number of threads. Error: a block's sum carries at most 64 roundings, whatever `rows`.
//! Cost: reads `x` three times forward, and `x` and `g` twice backward.

use rayon::prelude::*;

/// Rows summed in f32 before the sum moves to f64.
const BLOCK: usize = 64;
/// Rows that one task takes.
const TASK: usize = 32 * BLOCK;

/// `(y, mean, variance)` of `y = (x - mean) / sqrt(variance + eps) * gamma + beta`; the variance is the biased one
/// (divided by `rows`).
///
/// # Panics
/// When lengths disagree or there is no row.
pub fn batch_norm_forward(x: &[f32], gamma: &[f32], beta: &[f32], eps: f32) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
    let c = gamma.len();
    assert!(c > 0 && beta.len() == c && !x.is_empty() && x.len().is_multiple_of(c), "batch norm shapes");
    let rows = (x.len() / c) as f64;
    let mean: Vec<f32> = sums::<1>(x, x, c, |_, x, _| [x])[0].iter().map(|s| (s / rows) as f32).collect();
    let var: Vec<f32> = sums::<1>(x, x, c, |j, x, _| {
        let d = x - mean[j];
        [d * d]
    })[0]
        .iter()
        .map(|s| (s / rows) as f32)
        .collect();
    let scale: Vec<f32> = (0..c).map(|j| gamma[j] / (var[j] + eps).sqrt()).collect();
    let mut y = vec![0.0f32; x.len()];
    y.par_chunks_mut(TASK * c).zip(x.par_chunks(TASK * c)).for_each(|(y, x)| {
        for (y, x) in y.chunks_exact_mut(c).zip(x.chunks_exact(c)) {
            for j in 0..c {
                y[j] = (x[j] - mean[j]) * scale[j] + beta[j];
            }
        }
    });
    (y, mean, var)
}

/// The gradients of [`batch_norm_forward`].
#[derive(Debug, Clone, PartialEq)]
pub struct BatchNormGrads {
    /// For `x`, `[rows, c]`; the batch statistics' own dependence on `x` is in it.
    pub dx: Vec<f32>,
    /// For `gamma`.
    pub dgamma: Vec<f32>,
    /// For `beta`.
    pub dbeta: Vec<f32>,
}

/// Gradients from the output's gradient `g [rows, c]` and the statistics that the forward pass returned.
///
/// # Panics
/// When lengths disagree.
pub fn batch_norm_backward(x: &[f32], g: &[f32], gamma: &[f32], mean: &[f32], var: &[f32], eps: f32) -> BatchNormGrads {
    let c = gamma.len();
    assert!(c > 0 && mean.len() == c && var.len() == c && x.len() == g.len() && x.len().is_multiple_of(c), "shapes");
    let rows = (x.len() / c) as f64;
    let inv: Vec<f32> = var.iter().map(|v| 1.0 / (v + eps).sqrt()).collect();
    let [dbeta, dgamma] = sums::<2>(x, g, c, |j, x, g| [g, g * (x - mean[j]) * inv[j]]);
    let mean_g: Vec<f32> = dbeta.iter().map(|s| (s / rows) as f32).collect();
    let mean_gx: Vec<f32> = dgamma.iter().map(|s| (s / rows) as f32).collect();
    let scale: Vec<f32> = (0..c).map(|j| gamma[j] * inv[j]).collect();
    let mut dx = vec![0.0f32; x.len()];
    dx.par_chunks_mut(TASK * c).zip(x.par_chunks(TASK * c)).zip(g.par_chunks(TASK * c)).for_each(|((dx, x), g)| {
        for ((dx, x), g) in dx.chunks_exact_mut(c).zip(x.chunks_exact(c)).zip(g.chunks_exact(c)) {
            for j in 0..c {
                dx[j] = scale[j] * (g[j] - mean_g[j] - (x[j] - mean[j]) * inv[j] * mean_gx[j]);
            }
        }
    });
    let narrow = |v: &[f64]| v.iter().map(|&s| s as f32).collect();
    BatchNormGrads { dx, dgamma: narrow(&dgamma), dbeta: narrow(&dbeta) }
}

/// Sums `f(channel, a, b)` over the rows, for each channel.
pub(super) fn sums<const N: usize>(
    a: &[f32],
    b: &[f32],
    c: usize,
    f: impl Fn(usize, f32, f32) -> [f32; N] + Sync,
) -> [Vec<f64>; N] {
    let parts: Vec<[Vec<f64>; N]> = a
        .par_chunks(TASK * c)
        .zip(b.par_chunks(TASK * c))
        .map(|(a, b)| {
            let mut total = std::array::from_fn(|_| vec![0.0f64; c]);
            let mut block: [Vec<f32>; N] = std::array::from_fn(|_| vec![0.0f32; c]);
            for (a, b) in a.chunks(BLOCK * c).zip(b.chunks(BLOCK * c)) {
                block.iter_mut().for_each(|s| s.fill(0.0));
                for (a, b) in a.chunks_exact(c).zip(b.chunks_exact(c)) {
                    for j in 0..c {
                        let v = f(j, a[j], b[j]);
                        for i in 0..N {
                            block[i][j] += v[i];
                        }
                    }
                }
                for i in 0..N {
                    total[i].iter_mut().zip(&block[i]).for_each(|(t, &s)| *t += f64::from(s));
                }
            }
            total
        })
        .collect();
    let mut total: [Vec<f64>; N] = std::array::from_fn(|_| vec![0.0f64; c]);
    for part in &parts {
        for i in 0..N {
            total[i].iter_mut().zip(&part[i]).for_each(|(t, s)| *t += s);
        }
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(len: usize, seed: u32) -> Vec<f32> {
        (0..len).map(|i| ((i as f32 + seed as f32 * 0.31) * 1.7).sin() * 2.0 + 0.3).collect()
    }

    #[test]
    fn forward_equals_an_f64_reference() {
        let (rows, c, eps) = (TASK + 77, 5, 1e-5f32);
        let x = values(rows * c, 1);
        let (gamma, beta) = (values(c, 2), values(c, 3));
        let (y, mean, var) = batch_norm_forward(&x, &gamma, &beta, eps);
        for j in 0..c {
            let col: Vec<f64> = x.iter().skip(j).step_by(c).map(|&v| f64::from(v)).collect();
            let m = col.iter().sum::<f64>() / rows as f64;
            let v = col.iter().map(|x| (x - m).powi(2)).sum::<f64>() / rows as f64;
            // 64 roundings of block sums, each below 64 * 2.3 (mean) or 64 * 5.3 (variance), over 64 rows.
            assert!((f64::from(mean[j]) - m).abs() < 64.0 * 2.3 / 16_777_216.0 * 1.1);
            assert!((f64::from(var[j]) - v).abs() < 64.0 * 5.3 / 16_777_216.0 * 1.1);
            for (i, x) in col.iter().enumerate() {
                let want = (x - m) / (v + f64::from(eps)).sqrt() * f64::from(gamma[j]) + f64::from(beta[j]);
                assert!((f64::from(y[i * c + j]) - want).abs() < 5e-5, "{} {want}", y[i * c + j]);
            }
        }
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let (rows, c, eps) = (7, 3, 1e-3f32);
        let (x, g) = (values(rows * c, 1), values(rows * c, 9));
        let (gamma, beta) = (values(c, 2), values(c, 3));
        let (_, mean, var) = batch_norm_forward(&x, &gamma, &beta, eps);
        let got = batch_norm_backward(&x, &g, &gamma, &mean, &var, eps);
        // The loss sum(g * y) in f64.
        let loss = |x: &[f64], gamma: &[f64], beta: &[f64]| -> f64 {
            (0..c)
                .map(|j| {
                    let col: Vec<f64> = (0..rows).map(|i| x[i * c + j]).collect();
                    let m = col.iter().sum::<f64>() / rows as f64;
                    let v = col.iter().map(|x| (x - m).powi(2)).sum::<f64>() / rows as f64;
                    let norm = |i: usize| (col[i] - m) / (v + f64::from(eps)).sqrt() * gamma[j] + beta[j];
                    (0..rows).map(|i| f64::from(g[i * c + j]) * norm(i)).sum::<f64>()
                })
                .sum()
        };
        let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
        let (x, gamma, beta) = (wide(&x), wide(&gamma), wide(&beta));
        let h = 1e-5;
        let slope = |v: &[f64], i: usize, f: &dyn Fn(&[f64]) -> f64| {
            let mut w = v.to_vec();
            w[i] += h;
            let up = f(&w);
            w[i] -= 2.0 * h;
            (up - f(&w)) / (2.0 * h)
        };
        for i in 0..x.len() {
            let want = slope(&x, i, &|x| loss(x, &gamma, &beta));
            assert!((f64::from(got.dx[i]) - want).abs() < 1e-4, "dx {} {want}", got.dx[i]);
        }
        for j in 0..c {
            let want = slope(&gamma, j, &|w| loss(&x, w, &beta));
            assert!((f64::from(got.dgamma[j]) - want).abs() < 1e-4, "dgamma {} {want}", got.dgamma[j]);
            let want = slope(&beta, j, &|w| loss(&x, &gamma, w));
            assert!((f64::from(got.dbeta[j]) - want).abs() < 1e-4, "dbeta {} {want}", got.dbeta[j]);
        }
    }
}
