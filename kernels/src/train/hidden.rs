//! The squared distance of a student's residual stream from a teacher's, and its gradient: the hidden-state part of
//! distillation. Not the divergence of predictions (see `distill.rs`).
//!
//! - Shapes: `x`, `target` and the gradient `[m, d]`; `labels [m]`. A row whose label is [`IGNORED`] takes no part.
//! - Order: a row is summed in f32 over sixteen lanes, rows in f64 by blocks of a fixed size, added in order.
//! - Error: that of a dot product of `d` f32 values in sixteen lanes, relative to sums of squares, which do not cancel.

use super::{IGNORED, ROW_BLOCK, lane_sum, vectorized};
use rayon::prelude::*;

/// `[sum (x - target)^2, sum target^2]` over the rows that have a label.
///
/// # Panics
/// When the lengths differ, or the labels do not divide them.
pub fn masked_error(x: &[f32], target: &[f32], labels: &[i32]) -> [f64; 2] {
    let d = width(x, target, labels);
    let blocks: Vec<[f64; 2]> = x
        .par_chunks(ROW_BLOCK * d)
        .zip(target.par_chunks(ROW_BLOCK * d))
        .zip(labels.par_chunks(ROW_BLOCK))
        .map(|((x, target), labels)| {
            let mut sums = [0.0f64; 2];
            for ((x, target), _) in x.chunks_exact(d).zip(target.chunks_exact(d)).zip(labels).filter(labelled) {
                sums[0] += f64::from(squared_distance(x, target));
                sums[1] += f64::from(square(target));
            }
            sums
        })
        .collect();
    blocks.into_iter().fold([0.0; 2], |[a, b], [c, d]| [a + c, b + d])
}

/// The gradient by `x` of `scale` times the first sum of [`masked_error`]: `2 scale (x - target)`, 0 in rows without a label.
///
/// # Panics
/// As [`masked_error`].
pub fn masked_error_gradient(x: &[f32], target: &[f32], labels: &[i32], scale: f32) -> Vec<f32> {
    let d = width(x, target, labels);
    let mut out = vec![0.0f32; x.len()];
    out.par_chunks_mut(ROW_BLOCK * d)
        .zip(x.par_chunks(ROW_BLOCK * d).zip(target.par_chunks(ROW_BLOCK * d)))
        .zip(labels.par_chunks(ROW_BLOCK))
        .for_each(|((out, (x, target)), labels)| {
            let rows = x.chunks_exact(d).zip(target.chunks_exact(d)).zip(labels);
            for (out, ((x, target), _)) in out.chunks_exact_mut(d).zip(rows).filter(|(_, row)| labelled(row)) {
                gradient_row(x, target, 2.0 * scale, out);
            }
        });
    out
}

/// Values of a row; at least 1, so that nothing at all is no row.
fn width(x: &[f32], target: &[f32], labels: &[i32]) -> usize {
    assert_eq!(x.len(), target.len(), "residual streams of the student and the teacher");
    let d = x.len() / labels.len().max(1);
    assert_eq!(d * labels.len(), x.len(), "one label for each row");
    d.max(1)
}

fn labelled<T>((_, label): &(T, &i32)) -> bool {
    **label != IGNORED
}

vectorized! {
    fn squared_distance(x: &[f32], target: &[f32]) -> f32 {
        lane_sum(x.len(), |i| (x[i] - target[i]) * (x[i] - target[i]))
    }
}

vectorized! {
    fn square(x: &[f32]) -> f32 {
        lane_sum(x.len(), |i| x[i] * x[i])
    }
}

vectorized! {
    fn gradient_row(x: &[f32], target: &[f32], scale: f32, out: &mut [f32]) {
        for ((o, &x), &t) in out.iter_mut().zip(x).zip(target) {
            *o = (x - t) * scale;
        }
    }
}
