//! The AdamW update of one tensor, in one pass over weight, gradient and both moments.
//!
//! Formula and order of PyTorch's `AdamW`: `w *= 1 - lr * decay`; `m += (g - m) * (1 - b1)`; `v = v * b2 + g * g *
//! (1 - b2)`; `w -= (lr / (1 - b1^t)) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)`. Element by element.

use super::{TASK, lane_sum, vectorized};
use rayon::prelude::*;

/// The settings of one update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the first moment.
    pub beta1: f64,
    /// Decay of the second moment.
    pub beta2: f64,
    /// Added to the root of the second moment.
    pub eps: f64,
    /// Decoupled weight decay.
    pub decay: f64,
    /// Number of this update, from 1.
    pub t: u64,
    /// The gradient is multiplied by this first (clipping).
    pub grad_scale: f32,
}

/// The factors of an update, in f32.
#[derive(Clone, Copy)]
struct Factors {
    keep: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    step: f32,
    root: f32,
    eps: f32,
    grad_scale: f32,
}

/// Updates `w` and the moments `m`, `v`; four slices of one length.
pub fn adamw(settings: &AdamW, w: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32]) {
    let t = settings.t as f64;
    let f = Factors {
        keep: (1.0 - settings.lr * settings.decay) as f32,
        one_minus_beta1: (1.0 - settings.beta1) as f32,
        beta2: settings.beta2 as f32,
        one_minus_beta2: (1.0 - settings.beta2) as f32,
        step: (settings.lr / (1.0 - settings.beta1.powf(t))) as f32,
        root: (1.0 - settings.beta2.powf(t)).sqrt() as f32,
        eps: settings.eps as f32,
        grad_scale: settings.grad_scale,
    };
    w.par_chunks_mut(TASK)
        .zip(grad.par_chunks(TASK))
        .zip(m.par_chunks_mut(TASK).zip(v.par_chunks_mut(TASK)))
        .for_each(|((w, g), (m, v))| update(f, w, g, m, v));
}

vectorized! {
    fn update(f: Factors, w: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32]) {
        for (((w, &g), m), v) in w.iter_mut().zip(grad).zip(m).zip(v) {
            let g = g * f.grad_scale;
            *m += (g - *m) * f.one_minus_beta1;
            *v = *v * f.beta2 + g * g * f.one_minus_beta2;
            *w = *w * f.keep - f.step * *m / (v.sqrt() / f.root + f.eps);
        }
    }
}

/// The sum of squares in f64, over blocks of a fixed size (for the gradient norm).
pub fn sum_of_squares(x: &[f32]) -> f64 {
    let blocks: Vec<f64> = x.par_chunks(TASK).map(|c| c.chunks(1024).map(|c| f64::from(squares(c))).sum()).collect();
    blocks.iter().sum()
}

vectorized! {
    fn squares(x: &[f32]) -> f32 {
        lane_sum(x.len(), |i| x[i] * x[i])
    }
}
