//! What calibration keeps of the inputs of a layer: the sum of `x x^T` and the mean magnitudes, never the inputs. Not the
//! methods that use them (see `gptq.rs`, `awq.rs`).

use dsq_kernels::train::{Strided, matmul};
use rayon::prelude::*;

/// Tokens whose products are summed in f32 (one chain of fused multiply-adds); these sums are added in f64.
const ROWS: usize = 512;
/// Rows of the sum that are computed at a time; only what lies right of the diagonal's block is.
const PANEL: usize = 192;
/// Rows of errors that share one walk over the sum.
const ERROR_ROWS: usize = 8;

/// `H = sum x x^T` over the inputs `x [k]` of a linear layer, which is half the Hessian of its squared output error.
///
/// Layout: `[k, k]` row major, of which only the upper half with the diagonal is meaningful. Order: runs of 512 tokens in
/// f32, added in f64 in the order in which they come, so that the sum is the same for any number of threads.
#[derive(Debug, Clone)]
pub struct Hessian {
    k: usize,
    sum: Vec<f64>,
    magnitude: Vec<f64>,
    tokens: usize,
}

impl Hessian {
    /// For inputs of `k` values; no token seen yet.
    pub fn new(k: usize) -> Self {
        Self { k, sum: vec![0.0; k * k], magnitude: vec![0.0; k], tokens: 0 }
    }

    /// Adds inputs `x [m, k]`, row major.
    ///
    /// # Panics
    /// When `x` is no whole number of rows.
    pub fn add(&mut self, x: &[f32]) {
        let k = self.k;
        assert_eq!(x.len() % k.max(1), 0, "inputs are rows of {k} values");
        for rows in x.chunks((ROWS * k).max(1)) {
            let m = rows.len() / k;
            for i0 in (0..k).step_by(PANEL) {
                let (h, w) = (PANEL.min(k - i0), k - i0);
                let from = Strided { data: &rows[i0..], row: k, col: 1 };
                let part = matmul(from.t(), from, [h, w, m]);
                self.sum[i0 * k..].par_chunks_mut(k).zip(part.par_chunks(w)).for_each(|(sum, part)| {
                    sum[i0..].iter_mut().zip(part).for_each(|(s, &p)| *s += f64::from(p));
                });
            }
            for row in rows.chunks(k) {
                self.magnitude.iter_mut().zip(row).for_each(|(s, v)| *s += f64::from(v.abs()));
            }
            self.tokens += m;
        }
    }

    /// Length of an input.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Entry `(i, j)` of the symmetric matrix.
    pub fn at(&self, i: usize, j: usize) -> f64 {
        self.sum[i.min(j) * self.k + i.max(j)]
    }

    /// The diagonal.
    pub fn diagonal(&self) -> Vec<f64> {
        (0..self.k).map(|i| self.at(i, i)).collect()
    }

    /// Inputs that were 0 in every token.
    pub fn dead_columns(&self) -> usize {
        self.diagonal().iter().filter(|d| **d <= 0.0).count()
    }

    /// The mean magnitude of each input value; 0 before any token.
    pub fn mean_magnitude(&self) -> Vec<f64> {
        self.magnitude.iter().map(|s| s / self.tokens.max(1) as f64).collect()
    }

    /// An entry that is not finite: an input was not, or its square overflows f32.
    pub fn not_finite(&self) -> Option<f64> {
        // An infinity or NaN in any input is in its own square.
        self.diagonal().into_iter().find(|v| !v.is_finite())
    }

    /// The whole symmetric matrix in f32, divided by the number of tokens.
    pub(crate) fn mean_f32(&self) -> Vec<f32> {
        let (k, tokens) = (self.k, self.tokens.max(1) as f64);
        let mut out = vec![0.0f32; k * k];
        out.par_chunks_mut(k.max(1)).enumerate().for_each(|(i, row)| {
            row.iter_mut().enumerate().for_each(|(j, v)| *v = (self.at(i, j) / tokens) as f32);
        });
        out
    }

    /// `e H e^T` for each row of `errors [n, k]`: the squared error that it makes in an output, summed over the tokens.
    /// In f64; the order does not depend on the number of threads. Cost: `n k^2 / 2` multiply-adds.
    ///
    /// # Panics
    /// When `errors` is no whole number of rows.
    pub fn output_errors(&self, errors: &[f32]) -> Vec<f64> {
        let k = self.k;
        assert_eq!(errors.len() % k.max(1), 0, "errors are rows of {k} values");
        let chunk = |rows: &[f32]| -> Vec<f64> {
            let rows: Vec<f64> = rows.iter().map(|&v| f64::from(v)).collect();
            let mut total = vec![0.0f64; rows.len() / k];
            for i in 0..k {
                let h = &self.sum[i * k..][i..k];
                for (t, row) in total.iter_mut().zip(rows.chunks(k)) {
                    let e = &row[i..];
                    if e[0] != 0.0 {
                        *t += e[0] * (h[0] * e[0] + 2.0 * dot(&h[1..], &e[1..]));
                    }
                }
            }
            total
        };
        errors.par_chunks((ERROR_ROWS * k).max(1)).map(chunk).collect::<Vec<_>>().concat()
    }

    /// From a whole symmetric matrix, as if one token had given it.
    #[cfg(test)]
    pub(crate) fn from_matrix(k: usize, sum: Vec<f64>) -> Self {
        assert_eq!(sum.len(), k * k);
        Self { k, sum, magnitude: vec![1.0; k], tokens: 1 }
    }
}

/// The scalar product, over eight lanes that are then added in order.
pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let (a8, b8) = (a.chunks_exact(8), b.chunks_exact(8));
    let tail: f64 = a8.remainder().iter().zip(b8.remainder()).map(|(x, y)| x * y).sum();
    for (x, y) in a8.zip(b8) {
        for (l, lane) in lanes.iter_mut().enumerate() {
            *lane += x[l] * y[l];
        }
    }
    lanes.iter().sum::<f64>() + tail
}

#[cfg(test)]
mod tests {
    use super::super::tests::{normal, with_threads};
    use super::*;

    #[test]
    fn the_sum_is_that_of_f64_and_the_same_for_any_number_of_threads() {
        for (m, k) in [(1, 1), (3, 8), (700, 37), (1100, 200), (520, 400)] {
            let x = normal(m * k, 7);
            let run = |threads| {
                with_threads(threads, || {
                    let mut h = Hessian::new(k);
                    h.add(&x[..(m / 2) * k]);
                    h.add(&x[(m / 2) * k..]);
                    h
                })
            };
            let h = run(1);
            for i in (0..k).step_by(5) {
                for j in (0..k).step_by(3) {
                    let (mut exact, mut size) = (0.0f64, 0.0f64);
                    for row in x.chunks(k) {
                        let p = f64::from(row[i]) * f64::from(row[j]);
                        exact += p;
                        size += p.abs();
                    }
                    // Chains of at most 512 fused f32 steps: each off by 2^-24 of the partial sum.
                    assert!((h.at(i, j) - exact).abs() <= 512.0 * 2f64.powi(-24) * size, "{m} {k} {i} {j}");
                    assert_eq!(h.at(i, j), h.at(j, i));
                }
            }
            let mean: f64 = x.iter().step_by(k).map(|v| f64::from(v.abs())).sum::<f64>() / m as f64;
            assert!((h.mean_magnitude()[0] - mean).abs() < 1e-12);
            for threads in [2, 7] {
                assert!(run(threads).sum.iter().zip(&h.sum).all(|(a, b)| a.to_bits() == b.to_bits()), "{threads}");
            }
        }
    }

    #[test]
    fn output_errors_are_those_of_the_outputs() {
        let (m, n, k) = (60, 19, 24);
        let (x, e) = (normal(m * k, 1), normal(n * k, 2));
        let mut h = Hessian::new(k);
        h.add(&x);
        for (row, got) in e.chunks(k).zip(h.output_errors(&e)) {
            let y = |x: &[f32]| row.iter().zip(x).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
            let exact: f64 = x.chunks(k).map(|x| y(x).powi(2)).sum();
            assert!((got / exact - 1.0).abs() < 1e-4, "{got} against {exact}");
        }
    }

    #[test]
    fn f088_inputs_that_are_not_finite_or_overflow_are_seen() {
        for bad in [f32::NAN, f32::INFINITY, 1e30] {
            let mut h = Hessian::new(3);
            h.add(&[1.0, 2.0, 3.0, 4.0, bad, 6.0]);
            assert!(h.not_finite().is_some(), "{bad}");
        }
        let mut h = Hessian::new(3);
        h.add(&[1.0, 2.0, 3.0]);
        assert_eq!(h.not_finite(), None);
    }
}
