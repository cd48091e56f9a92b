//! GPTAQ: weights that take up what the layers before them got wrong, before GPTQ chooses their codes. With `x` the inputs that the
//! quantized layers make, `y` those of the float model, `H = sum x x^T` and `D = sum (y - x) x^T`, the weight whose outputs on `x`
//! are nearest to `W y` is `W + W D H^-1`. Not the choice of codes (see `gptq.rs`), not the sums (see `hessian.rs`).
//!
//! Li et al., "GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration" (arXiv:2504.02692), which minimises the
//! same, `|Q x - W y|^2`, and weakens the correction too. One difference: the paper mixes it into the errors that GPTQ passes from column
//! to column; here the nearest weight is found first, by one factorization more, and GPTQ rounds that one.

use super::Hessian;
use super::refit::refit;

/// How much of the correction is taken, the paper's value. Of SmolLM2's divergence from the float model with a scale for each row it leaves
/// 75% of what GPTQ does, a half 80%, the whole 158%: it fits the calibration text (docs/results.md).
const SHARE: f32 = 0.25;
/// What is added to the diagonal of `H`, of its mean.
const RIDGE: f64 = 0.01;

/// The weights `w [n, k]` that GPTQ should round; `w` where the float model's inputs were not observed.
pub(super) fn targets(w: Vec<f32>, h: &Hessian) -> Vec<f32> {
    match h.missing(&w) {
        None => w,
        Some(mut missing) => {
            missing.iter_mut().for_each(|v| *v *= SHARE);
            refit(&w, &missing, h, RIDGE)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptq::tests::{normal, with_threads};

    #[test]
    fn targets_solve_the_normal_equations_of_the_float_outputs() {
        let (n, k, m) = (3, 6, 90);
        let x = normal(m * k, 1);
        // Inputs of the float model: those, mixed with each other and with something else.
        let noise = normal(m * k, 2);
        let y: Vec<f32> = (0..m * k).map(|i| x[i] + 0.3 * x[i / k * k + (i + 1) % k] + 0.1 * noise[i]).collect();
        let w = normal(n * k, 3);
        let run = |threads| {
            with_threads(threads, || {
                let mut h = Hessian::new(k);
                h.add_beside(&x[..50 * k], &y[..50 * k]);
                h.add_beside(&x[50 * k..], &y[50 * k..]);
                targets(w.clone(), &h)
            })
        };
        let got = run(1);
        assert_eq!(run(3), got);
        let sum = |a: &dyn Fn(usize) -> f64, b: usize| (0..m).map(|t| a(t) * f64::from(x[t * k + b])).sum::<f64>();
        let h = |i: usize, j: usize| sum(&|t| f64::from(x[t * k + i]), j);
        let ridge = RIDGE * (0..k).map(|i| h(i, i)).sum::<f64>() / k as f64;
        for r in 0..n {
            let row = |v: &[f32], j: usize| f64::from(v[r * k + j]);
            for j in 0..k {
                let missed = |t: usize| {
                    (0..k).map(|i| row(&w, i) * (f64::from(y[t * k + i]) - f64::from(x[t * k + i]))).sum::<f64>()
                };
                let want = f64::from(SHARE) * sum(&missed, j);
                let moved = (0..k).map(|i| (row(&got, i) - row(&w, i)) * (h(i, j) + if i == j { ridge } else { 0.0 }));
                let moved: f64 = moved.sum();
                assert!((moved - want).abs() < 1e-4 * h(j, j), "{r} {j}: {moved} against {want}");
            }
        }
    }

    #[test]
    fn weights_stay_where_nothing_is_missed_or_known() {
        let (k, w) = (5, normal(10, 4));
        let x = normal(20 * k, 5);
        let mut h = Hessian::new(k);
        h.add(&x);
        assert_eq!(targets(w.clone(), &h), w);
        let mut h = Hessian::new(k);
        h.add_beside(&x, &x);
        assert_eq!(targets(w.clone(), &h), w);
        let mut h = Hessian::new(k);
        h.add_beside(&vec![0.0; 20 * k], &x);
        assert_eq!(targets(w.clone(), &h), w, "dead inputs make up for nothing");
    }
}
