//! The scalar product in f64, for factorizations. Not the f32 product of matrices (see `matmul.rs`).
//!
//! - Order: eight lanes, element `i` in lane `i % 8`, each product rounded before it is added; the lanes are added in order, then
//!   what is left over. The same bits on every path.

use super::vectorized;

/// `sum a[i] b[i]` over the shorter of the two.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    product(a, b)
}

vectorized! {
    fn product(a: &[f64], b: &[f64]) -> f64 {
        let len = a.len().min(b.len());
        let (a8, b8) = (a[..len].chunks_exact(8), b[..len].chunks_exact(8));
        let tail: f64 = a8.remainder().iter().zip(b8.remainder()).map(|(x, y)| x * y).sum();
        let mut lanes = [0.0f64; 8];
        for (x, y) in a8.zip(b8) {
            for (l, lane) in lanes.iter_mut().enumerate() {
                *lane += x[l] * y[l];
            }
        }
        lanes.iter().sum::<f64>() + tail
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_and_tail_cover_every_element() {
        for n in [0usize, 1, 7, 8, 9, 63, 64, 1001] {
            let a: Vec<f64> = (0..n).map(|i| i as f64).collect();
            let b: Vec<f64> = (0..n).map(|i| (i % 3) as f64).collect();
            let want: f64 = (0..n).map(|i| (i * (i % 3)) as f64).sum();
            assert_eq!(dot(&a, &b), want);
        }
    }
}
