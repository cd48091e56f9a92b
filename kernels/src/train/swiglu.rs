//! The gate of SwiGLU, `silu(gate) * up`, forward and backward, element by element.
//!
//! - Formula: `silu(x) = x / (1 + e^-x)`; with `s = 1 / (1 + e^-x)`, `silu'(x) = s * (1 + x * (1 - s))`.
//! - Error: that of `exp` (2 ulp) and four roundings.

use super::exp::exp;
use super::{TASK, vectorized};
use rayon::prelude::*;

/// `out = silu(gate) * up`; three slices of one length.
pub fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    out.par_chunks_mut(TASK)
        .zip(gate.par_chunks(TASK).zip(up.par_chunks(TASK)))
        .for_each(|(out, (gate, up))| forward(gate, up, out));
}

vectorized! {
    fn forward(gate: &[f32], up: &[f32], out: &mut [f32]) {
        for ((o, &x), &u) in out.iter_mut().zip(gate).zip(up) {
            *o = x / (1.0 + exp(-x)) * u;
        }
    }
}

/// Gradients of [`silu_mul`] for `gate` and `up`; five slices of one length.
pub fn silu_mul_gradient(grad: &[f32], gate: &[f32], up: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
    grad.par_chunks(TASK)
        .zip(gate.par_chunks(TASK).zip(up.par_chunks(TASK)))
        .zip(dgate.par_chunks_mut(TASK).zip(dup.par_chunks_mut(TASK)))
        .for_each(|((grad, (gate, up)), (dgate, dup))| backward(grad, gate, up, dgate, dup));
}

vectorized! {
    fn backward(grad: &[f32], gate: &[f32], up: &[f32], dgate: &mut [f32], dup: &mut [f32]) {
        for ((((&g, &x), &u), dg), du) in grad.iter().zip(gate).zip(up).zip(dgate).zip(dup) {
            let s = 1.0 / (1.0 + exp(-x));
            *du = g * (x * s);
            *dg = g * u * (s * (1.0 + x * (1.0 - s)));
        }
    }
}
