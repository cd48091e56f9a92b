//! Softmax cross-entropy over rows of logits, forward and backward.
//!
//! - Shapes: `logits` and their gradient `[m, n]` (n classes), `labels` `[m]`; a label of [`IGNORED`] takes no part.
//! - Formula: `lse = max + ln(sum e^(x - max))`, loss of a row `lse - x[label]`; the sum over rows in f64, in order.
//! - Error: `lse` within `n/16 + 16` roundings and 2 ulp of `exp` of the exact one.

use super::exp::exp;
use super::{ROW_BLOCK, lane_sum, vectorized};
use rayon::prelude::*;

/// The label of a position that takes no part in the loss.
pub const IGNORED: i32 = -100;

/// The **sum** of the losses of the rows that have a label, and the log-sum-exp of each row (0 for ignored rows).
///
/// # Panics
/// When a label is neither [`IGNORED`] nor below `n`: the caller checks data.
pub fn cross_entropy(logits: &[f32], labels: &[i32], n: usize) -> (f64, Vec<f32>) {
    let mut lse = vec![0.0f32; labels.len()];
    let losses: Vec<f64> = logits
        .par_chunks(ROW_BLOCK * n)
        .zip(labels.par_chunks(ROW_BLOCK).zip(lse.par_chunks_mut(ROW_BLOCK)))
        .map(|(logits, (labels, lse))| {
            let mut sum = 0.0;
            for ((x, &label), lse) in logits.chunks_exact(n).zip(labels).zip(lse) {
                if label != IGNORED {
                    *lse = log_sum_exp(x, 1.0);
                    sum += f64::from(*lse) - f64::from(x[label as usize]);
                }
            }
            sum
        })
        .collect();
    (losses.iter().sum(), lse)
}

/// `ln(sum e^(factor x))` of a row; `factor` is positive, and 1 changes no bit.
pub(super) fn log_sum_exp(x: &[f32], factor: f32) -> f32 {
    scaled_log_sum_exp(x, factor)
}

vectorized! {
    fn scaled_log_sum_exp(x: &[f32], factor: f32) -> f32 {
        let mut lanes = [f32::NEG_INFINITY; 16];
        for c in x.chunks(16) {
            for (l, &v) in lanes.iter_mut().zip(c) {
                *l = if v > *l { v } else { *l };
            }
        }
        let max = lanes.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        // A NaN logit passes the comparisons above but not the sum, so the loss shows it.
        let max = max * factor;
        max + lane_sum(x.len(), |i| exp(x[i] * factor - max)).ln()
    }
}

/// The gradient of `scale * sum of losses`: `(softmax - onehot) * scale`, zero in ignored rows.
pub fn cross_entropy_gradient(logits: &[f32], labels: &[i32], lse: &[f32], n: usize, scale: f32, out: &mut [f32]) {
    out.par_chunks_mut(ROW_BLOCK * n)
        .zip(logits.par_chunks(ROW_BLOCK * n))
        .zip(labels.par_chunks(ROW_BLOCK).zip(lse.par_chunks(ROW_BLOCK)))
        .for_each(|((out, logits), (labels, lse))| {
            for (((out, x), &label), &lse) in out.chunks_exact_mut(n).zip(logits.chunks_exact(n)).zip(labels).zip(lse) {
                if label == IGNORED {
                    out.fill(0.0);
                } else {
                    softmax_row(x, lse, scale, out);
                    out[label as usize] -= scale;
                }
            }
        });
}

vectorized! {
    fn softmax_row(x: &[f32], lse: f32, scale: f32, out: &mut [f32]) {
        for (o, &x) in out.iter_mut().zip(x) {
            *o = exp(x - lse) * scale;
        }
    }
}
