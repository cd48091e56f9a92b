//! The weights that fit outputs best, by least squares with a ridge. Not the choice of codes (see `gptq.rs`), not what the outputs should
//! be (see `gptaq.rs`, `cnn/round.rs`).

use super::hessian::Hessian;
use dsq_kernels::train::dot;
use rayon::prelude::*;

/// `w + cross (h + lambda I)^-1`, `w` and `cross` `[n, k]`, `lambda` being `ridge` times the mean diagonal of `h`; `w` where that
/// cannot be computed.
pub(super) fn refit(w: &[f32], cross: &[f32], h: &Hessian, ridge: f64) -> Vec<f32> {
    let k = h.k();
    let lambda = ridge * h.diagonal().iter().sum::<f64>() / k.max(1) as f64;
    let Some(lower) = cholesky(h, lambda) else { return w.to_vec() };
    let mut out = w.to_vec();
    out.par_chunks_mut(k).zip(cross.par_chunks(k)).for_each(|(w, cross)| {
        let mut x: Vec<f64> = cross.iter().map(|&v| f64::from(v)).collect();
        for i in 0..k {
            x[i] = (x[i] - dot(&lower[i * k..i * k + i], &x[..i])) / lower[i * k + i];
        }
        for i in (0..k).rev() {
            x[i] /= lower[i * k + i];
            let (done, xi) = (&lower[i * k..i * k + i], x[i]);
            x[..i].iter_mut().zip(done).for_each(|(x, l)| *x -= l * xi);
        }
        w.iter_mut().zip(&x).for_each(|(w, d)| *w = (f64::from(*w) + d) as f32);
    });
    if out.iter().all(|v| v.is_finite()) { out } else { w.to_vec() }
}

/// The lower triangular `L` of `h + lambda I = L L^T`, `[k, k]` row major, zeros above; `None` without a positive pivot. Each
/// element is one scalar product: the bits do not depend on the number of threads.
fn cholesky(h: &Hessian, lambda: f64) -> Option<Vec<f64>> {
    let k = h.k();
    let mut a = vec![0.0f64; k * k];
    for j in 0..k {
        let (row, below) = a[j * k..].split_at_mut(k);
        let pivot = h.at(j, j) + lambda - dot(&row[..j], &row[..j]);
        if !(pivot > 0.0 && pivot.is_finite()) {
            return None;
        }
        let pivot = pivot.sqrt();
        row[j] = pivot;
        let row = &*row;
        below.par_chunks_mut(k).enumerate().with_min_len(64).for_each(|(i, other)| {
            other[j] = (h.at(j + 1 + i, j) - dot(&other[..j], &row[..j])) / pivot;
        });
    }
    Some(a)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptq::tests::{normal, with_threads};

    #[test]
    fn the_refit_solves_its_equations() {
        let (k, n) = (7, 3);
        let mut h = Hessian::new(k);
        h.add(&normal(40 * k, 1));
        let (w, cross) = (normal(n * k, 2), normal(n * k, 3));
        let lambda = 0.1 * h.diagonal().iter().sum::<f64>() / k as f64;
        for ((new, old), cross) in refit(&w, &cross, &h, 0.1).chunks(k).zip(w.chunks(k)).zip(cross.chunks(k)) {
            for i in 0..k {
                let sum: f64 =
                    (0..k).map(|j| (h.at(i, j) + if i == j { lambda } else { 0.0 }) * f64::from(new[j] - old[j])).sum();
                assert!((sum - f64::from(cross[i])).abs() < 1e-4, "{sum} {}", cross[i]);
            }
        }
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        // Columns enough that the factorization is divided.
        let (k, n) = (300, 5);
        let mut h = Hessian::new(k);
        h.add(&normal(400 * k, 1));
        let (w, cross) = (normal(n * k, 2), normal(n * k, 3));
        let run = |threads| with_threads(threads, || refit(&w, &cross, &h, 0.01));
        let one = run(1);
        assert_ne!(one, w);
        for threads in [2, 5] {
            assert!(run(threads).iter().zip(&one).all(|(a, b)| a.to_bits() == b.to_bits()), "{threads}");
        }
    }
}
