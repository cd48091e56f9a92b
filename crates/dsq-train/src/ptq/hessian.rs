//! What calibration keeps of the inputs of a layer: the sum of `x x^T`, the mean magnitudes and the ranges, and, where the float
//! model runs beside, how far its inputs are off, `sum (y - x) x^T`; never the inputs. Not the methods that use them (see
//! `gptq.rs`, `gptaq.rs`, `awq.rs`).

use dsq_kernels::train::{Strided, add_gram, matmul};
use rayon::prelude::*;

/// Tokens whose products are summed in f32 (one chain of fused multiply-adds); these sums are added in f64.
const ROWS: usize = 2048;
/// Columns whose magnitudes and ranges one task follows.
const COLUMNS: usize = 512;
/// Columns of the sum that errors are multiplied with at a time.
const ERROR_COLUMNS: usize = 256;
/// Rows of errors that are multiplied at a time.
const ERROR_ROWS: usize = 4096;

/// `H = sum x x^T` over the inputs `x [k]` of a linear layer, which is half the Hessian of its squared output error.
///
/// Layout: `[k, k]` row major, of which only the upper half with the diagonal is meaningful. Order: runs of 2,048 tokens in
/// f32, added in f64 in the order in which they come, so that the sum is the same for any number of threads.
#[derive(Debug, Clone)]
pub struct Hessian {
    k: usize,
    sum: Vec<f64>,
    magnitude: Vec<f64>,
    /// Smallest and largest value of each input; 0 is in the range.
    range: Vec<[f32; 2]>,
    tokens: usize,
    /// `sum (y - x) x^T`, `[k, k]` row major, where inputs `y` were given beside `x`; else empty.
    drift: Vec<f64>,
}

impl Hessian {
    /// For inputs of `k` values; no token seen yet.
    pub fn new(k: usize) -> Self {
        Self {
            k,
            sum: vec![0.0; k * k],
            magnitude: vec![0.0; k],
            range: vec![[0.0; 2]; k],
            tokens: 0,
            drift: Vec::new(),
        }
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
            add_gram(rows, k, &mut self.sum);
            let columns = self.magnitude.par_chunks_mut(COLUMNS).zip(self.range.par_chunks_mut(COLUMNS));
            columns.enumerate().for_each(|(c, (magnitude, range))| {
                for row in rows.chunks(k) {
                    let row = &row[c * COLUMNS..][..magnitude.len()];
                    magnitude.iter_mut().zip(row).for_each(|(s, v)| *s += f64::from(v.abs()));
                    range.iter_mut().zip(row).for_each(|([lo, hi], v)| (*lo, *hi) = (lo.min(*v), hi.max(*v)));
                }
            });
            self.tokens += m;
        }
    }

    /// Whether no token was seen.
    pub(super) fn is_empty(&self) -> bool {
        self.tokens == 0
    }

    /// Takes inputs `x [m, k]` into the range of each, and into nothing else.
    pub(super) fn widen_range(&mut self, x: &[f32]) {
        for row in x.chunks_exact(self.k.max(1)) {
            self.range.iter_mut().zip(row).for_each(|([lo, hi], v)| (*lo, *hi) = (lo.min(*v), hi.max(*v)));
        }
    }

    /// Adds inputs `x [m, k]` and what they would be without the errors that are in them, `y [m, k]`: the float model's.
    ///
    /// # Panics
    /// When the lengths differ, or are no whole number of rows.
    pub fn add_beside(&mut self, x: &[f32], y: &[f32]) {
        let k = self.k;
        assert_eq!(x.len(), y.len(), "as many inputs of the float model");
        self.add(x);
        self.drift.resize(k * k, 0.0);
        for (x, y) in x.chunks((ROWS * k).max(1)).zip(y.chunks((ROWS * k).max(1))) {
            let off: Vec<f32> = y.iter().zip(x).map(|(y, x)| y - x).collect();
            let product = matmul(Strided::rows(&off, k).t(), Strided::rows(x, k), [k, k, x.len() / k]);
            self.drift.par_iter_mut().zip(product).for_each(|(s, p)| *s += f64::from(p));
        }
    }

    /// What outputs of the weights `w [n, k]` miss on `x` against those on `y`, times `x^T` and summed, `[n, k]`; `None` when no `y`
    /// were given.
    pub(super) fn missing(&self, w: &[f32]) -> Option<Vec<f32>> {
        let k = self.k;
        if self.drift.is_empty() {
            return None;
        }
        let drift: Vec<f32> = self.drift.iter().map(|&v| v as f32).collect();
        Some(matmul(Strided::rows(w, k), Strided::rows(&drift, k), [w.len() / k, k, k]))
    }

    /// Becomes that of the inputs divided by `s [k]`.
    pub(super) fn divide_inputs(&mut self, s: &[f32]) {
        let by: Vec<f64> = s.iter().map(|&v| 1.0 / f64::from(v)).collect();
        for sums in [&mut self.sum, &mut self.drift] {
            sums.par_chunks_mut(self.k.max(1)).zip(&by).for_each(|(row, r)| {
                row.iter_mut().zip(&by).for_each(|(v, c)| *v *= r * c);
            });
        }
        self.magnitude.iter_mut().zip(&by).for_each(|(v, c)| *v *= c);
        // Scales are positive.
        self.range.iter_mut().zip(s).for_each(|([lo, hi], s)| (*lo, *hi) = (*lo / s, *hi / s));
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

    /// The mean square of each input value: how much the error of a column counts.
    pub fn mean_square(&self) -> Vec<f32> {
        let tokens = self.tokens.max(1) as f64;
        self.diagonal().into_iter().map(|d| (d / tokens) as f32).collect()
    }

    /// The largest magnitude of each input value.
    pub fn largest_magnitude(&self) -> Vec<f32> {
        self.range.iter().map(|[lo, hi]| hi.max(-lo)).collect()
    }

    /// The smallest and the largest value of any input, and 0.
    pub fn range(&self) -> [f32; 2] {
        self.range.iter().fold([0.0; 2], |[lo, hi], r| [lo.min(r[0]), hi.max(r[1])])
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
    /// Products `e H` by chains of 256 steps in f32, their products with `e` added in f64; the order does not depend on the
    /// number of threads. Cost: `n k^2 / 2` multiply-adds.
    ///
    /// # Panics
    /// When `errors` is no whole number of rows.
    pub fn output_errors(&self, errors: &[f32]) -> Vec<f64> {
        let k = self.k;
        assert_eq!(errors.len() % k.max(1), 0, "errors are rows of {k} values");
        let tokens = self.tokens.max(1) as f64;
        let mut total = vec![0.0f64; errors.len().checked_div(k).unwrap_or(0)];
        for j0 in (0..k).step_by(ERROR_COLUMNS) {
            let j1 = (j0 + ERROR_COLUMNS).min(k);
            // Columns j0 to j1 of the mean, down to the end of its square on the diagonal.
            let mut columns = vec![0.0f32; j1 * (j1 - j0)];
            columns.par_chunks_mut(j1 - j0).enumerate().for_each(|(i, row)| {
                row.iter_mut().zip(j0..).for_each(|(v, j)| *v = (self.at(i, j) / tokens) as f32);
            });
            let columns = Strided::rows(&columns, j1 - j0);
            for (total, rows) in total.chunks_mut(ERROR_ROWS).zip(errors.chunks(ERROR_ROWS * k)) {
                let from = Strided { data: &rows[j0..], row: k, col: 1 };
                let product = matmul(from, columns.t(), [total.len(), j1, j1 - j0]);
                let rows = rows.par_chunks(k).zip(product.par_chunks(j1));
                total.par_iter_mut().zip(rows).for_each(|(total, (e, p))| {
                    let term = |(e, p): (&f32, &f32)| f64::from(*e) * f64::from(*p);
                    let above: f64 = e[..j0].iter().zip(p).map(term).sum();
                    let square: f64 = e[j0..j1].iter().zip(&p[j0..]).map(term).sum();
                    *total += 2.0 * above + square;
                });
            }
        }
        total.iter_mut().for_each(|t| *t *= tokens);
        total
    }

    /// From a whole symmetric matrix, as if one token had given it.
    #[cfg(test)]
    pub(crate) fn from_matrix(k: usize, sum: Vec<f64>) -> Self {
        assert_eq!(sum.len(), k * k);
        Self { k, sum, magnitude: vec![1.0; k], range: vec![[0.0; 2]; k], tokens: 1, drift: Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{normal, with_threads};
    use super::*;

    #[test]
    fn the_sum_is_that_of_f64_and_the_same_for_any_number_of_threads() {
        for (m, k) in [(1, 1), (3, 8), (700, 37), (4500, 200), (520, 400)] {
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
                    // A chain of fused f32 steps: each off by 2^-24 of the partial sum.
                    assert!((h.at(i, j) - exact).abs() <= m as f64 * 2f64.powi(-24) * size, "{m} {k} {i} {j}");
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
    fn divided_sums_are_those_of_divided_inputs() {
        let (m, n, k) = (50, 3, 12);
        let (x, y, w) = (normal(m * k, 1), normal(m * k, 2), normal(n * k, 3));
        let s: Vec<f32> = (0..k).map(|i| 0.5 + i as f32).collect();
        let divided = |v: &[f32]| -> Vec<f32> { v.iter().enumerate().map(|(i, v)| v / s[i % k]).collect() };
        let (mut got, mut want) = (Hessian::new(k), Hessian::new(k));
        got.add_beside(&x, &y);
        got.divide_inputs(&s);
        want.add_beside(&divided(&x), &divided(&y));
        for i in 0..k {
            assert!((0..k).all(|j| (got.at(i, j) - want.at(i, j)).abs() < 1e-4), "{i}");
        }
        let [got, want] = [&got, &want].map(|h| h.missing(&w).unwrap());
        assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-4), "{got:?} {want:?}");
        assert!(want.iter().any(|v| v.abs() > 1.0));
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
