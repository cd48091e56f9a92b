//! Distillation: the divergence of a student's predictions from a teacher's, and its gradient (Hinton et al. 2015).
//!
//! - Shapes: `student`, `teacher` and the gradient `[m, n]` logits of n classes.
//! - Formula: with `p = softmax(teacher / T)` and `q = softmax(student / T)`, the loss of a row is `T^2 KL(p || q)`, that is
//!   `T^2 (sum p (teacher - student) / T + lse(student / T) - lse(teacher / T))`; its gradient by the student's logits is
//!   `T (q - p)`. `T^2` keeps the gradient's size the same for any T. Rows are summed in f64, in order.
//! - Error: as `cross_entropy.rs`; the loss of a row is a difference of numbers of the size of the logits, so below 1e-6
//!   of those it is rounding (and may be negative).

use super::cross_entropy::log_sum_exp;
use super::exp::exp;
use super::{ROW_BLOCK, lane_sum, vectorized};
use rayon::prelude::*;

/// The sum of the losses of all rows; `lse` gets the log-sum-exps of the student's and the teacher's row, divided by the
/// temperature, which [`distill_gradient`] takes.
///
/// # Panics
/// When the lengths differ.
pub fn distill(student: &[f32], teacher: &[f32], n: usize, temperature: f32) -> (f64, Vec<[f32; 2]>) {
    assert_eq!(student.len(), teacher.len(), "logits of the student and the teacher");
    let inverse = 1.0 / temperature;
    let mut lse = vec![[0.0f32; 2]; student.len() / n.max(1)];
    let losses: Vec<f64> = student
        .par_chunks(ROW_BLOCK * n)
        .zip(teacher.par_chunks(ROW_BLOCK * n))
        .zip(lse.par_chunks_mut(ROW_BLOCK))
        .map(|((student, teacher), lse)| {
            let mut sum = 0.0;
            for ((s, t), lse) in student.chunks_exact(n).zip(teacher.chunks_exact(n)).zip(lse) {
                *lse = [log_sum_exp(s, inverse), log_sum_exp(t, inverse)];
                sum += f64::from(weighted_gap(s, t, lse[1], inverse)) + f64::from(lse[0]) - f64::from(lse[1]);
            }
            sum
        })
        .collect();
    (losses.iter().sum::<f64>() * f64::from(temperature * temperature), lse)
}

vectorized! {
    fn weighted_gap(s: &[f32], t: &[f32], lse: f32, inverse: f32) -> f32 {
        lane_sum(s.len(), |i| exp(t[i] * inverse - lse) * ((t[i] - s[i]) * inverse))
    }
}

/// The gradient of `scale * sum of losses` by the student's logits.
pub fn distill_gradient(
    student: &[f32],
    teacher: &[f32],
    lse: &[[f32; 2]],
    n: usize,
    temperature: f32,
    scale: f32,
    out: &mut [f32],
) {
    let inverse = 1.0 / temperature;
    out.par_chunks_mut(ROW_BLOCK * n)
        .zip(student.par_chunks(ROW_BLOCK * n).zip(teacher.par_chunks(ROW_BLOCK * n)))
        .zip(lse.par_chunks(ROW_BLOCK))
        .for_each(|((out, (student, teacher)), lse)| {
            let rows = student.chunks_exact(n).zip(teacher.chunks_exact(n));
            for ((out, (s, t)), lse) in out.chunks_exact_mut(n).zip(rows).zip(lse) {
                gradient_row(s, t, *lse, inverse, temperature * scale, out);
            }
        });
}

vectorized! {
    fn gradient_row(s: &[f32], t: &[f32], lse: [f32; 2], inverse: f32, scale: f32, out: &mut [f32]) {
        for ((o, &s), &t) in out.iter_mut().zip(s).zip(t) {
            *o = (exp(s * inverse - lse[0]) - exp(t * inverse - lse[1])) * scale;
        }
    }
}
