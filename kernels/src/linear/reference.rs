//! The scalar references of a quantized linear layer: plain loops over the codes, no layout, no threads. Slow.

use super::layout::{PIECE, SEGMENT};
use dsq_quant::{InputGrid, QuantizedMatrix};

/// `out [m, n] = x [m, k] * dequantize(W)^T` in the order of the header of [`crate::linear`]: the fast paths are
/// tested bit-equal to this.
pub fn matmul_reference(w: &QuantizedMatrix, x: &[f32], m: usize, out: &mut [f32]) {
    for t in 0..m {
        for row in 0..w.n {
            let mut total = 0.0f32;
            for (group, start) in (0..w.k).step_by(w.group_len().max(1)).enumerate() {
                let p = w.qparams(w.scale_index(row, group));
                let end = (start + w.group_len()).min(w.k);
                for from in (start..end).step_by(SEGMENT) {
                    let mut part = 0.0f32;
                    for i in from..end.min(from + SEGMENT) {
                        let q = w.args.code_value(w.codes[row * w.k + i], p.zero);
                        part = q.mul_add(x[t * w.k + i], part);
                    }
                    total = p.scale.mul_add(part, total);
                }
            }
            out[t * w.n + row] = total;
        }
    }
}

/// `out [m, n]` of [`crate::matmul_many_in`] with [`crate::Activations::Int8`], or with a symmetric INT8 grid of
/// [`crate::matmul_many_on_grid`]: the contract of `int.rs` value by value. The fast paths are tested bit-equal to this.
pub fn matmul_int8_reference(w: &QuantizedMatrix, grid: Option<&InputGrid>, x: &[f32], m: usize, out: &mut [f32]) {
    for t in 0..m {
        let token = &x[t * w.k..(t + 1) * w.k];
        let (codes, scales) = match grid {
            None => rounded(w, token),
            Some(grid) => on_grid(grid, token),
        };
        for row in 0..w.n {
            let mut total = 0.0f32;
            for_segments(w, |group, at, len| {
                let p = w.qparams(w.scale_index(row, group));
                let pieces = || (at..at + len).step_by(PIECE).map(|i| i..(i + PIECE).min(at + len));
                let mut part = 0.0f32;
                if !w.zeros.is_empty() {
                    let mut minus = 0.0f32;
                    for piece in pieces() {
                        let sum: i32 = piece.clone().map(|i| i32::from(codes[i])).sum();
                        minus = scales[piece.start].mul_add(-sum as f32, minus);
                    }
                    part = p.zero as f32 * minus;
                }
                for piece in pieces() {
                    let dot: i32 = piece.clone().map(|i| i32::from(w.codes[row * w.k + i]) * i32::from(codes[i])).sum();
                    part = (dot as f32).mul_add(scales[piece.start], part);
                }
                total = p.scale.mul_add(part, total);
            });
            out[t * w.n + row] = total;
        }
    }
}

/// `body(group, first column, columns)` for each segment.
fn for_segments(w: &QuantizedMatrix, mut body: impl FnMut(usize, usize, usize)) {
    for (group, start) in (0..w.k).step_by(w.group_len().max(1)).enumerate() {
        let end = (start + w.group_len()).min(w.k);
        for at in (start..end).step_by(SEGMENT) {
            body(group, at, SEGMENT.min(end - at));
        }
    }
}

/// Codes and, for each value, its scale, by the rule of the mode.
fn rounded(w: &QuantizedMatrix, x: &[f32]) -> (Vec<i8>, Vec<f32>) {
    let (mut codes, mut scales) = (vec![0i8; x.len()], vec![0.0f32; x.len()]);
    for_segments(w, |_, from, len| {
        for at in (from..from + len).step_by(PIECE) {
            let values = &x[at..(at + PIECE).min(from + len)];
            let absmax = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            let scale = absmax / 127.0;
            if !values.iter().all(|v| v.is_finite()) {
                scales[at..at + values.len()].fill(f32::NAN);
            } else if scale >= f32::MIN_POSITIVE {
                scales[at..at + values.len()].fill(scale);
                for (code, v) in codes[at..].iter_mut().zip(values) {
                    *code = (v * (127.0 / absmax)).round_ties_even() as i8;
                }
            }
        }
    });
    (codes, scales)
}

/// The same on a stored grid.
fn on_grid(grid: &InputGrid, x: &[f32]) -> (Vec<i8>, Vec<f32>) {
    let (mut codes, mut scales) = (vec![0i8; x.len()], vec![f32::NAN; x.len()]);
    let run = grid.args.group_len(x.len()).unwrap_or(x.len()).max(1);
    for (at, values) in (0..x.len()).step_by(run).zip(x.chunks(run)) {
        let (lo, hi) = values.iter().fold((0.0f32, 0.0f32), |(lo, hi), &v| (lo.min(v), hi.max(v)));
        let found = || grid.run_qparams(lo, hi).ok();
        if let (true, Some(p)) = (values.iter().all(|v| v.is_finite()), grid.params.or_else(found)) {
            scales[at..at + run].fill(p.scale);
            codes[at..].iter_mut().zip(values).for_each(|(c, &v)| *c = grid.args.quantize(v, p));
        }
    }
    (codes, scales)
}
