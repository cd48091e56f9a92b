//! How a weight's own values give the range of its grid: the whole range, or the one of least squared error. Not the
//! observers of activations, which follow a range over batches (see `observer.rs`).

use crate::{QParams, QuantArgs, QuantError, with_format};
use serde::{Deserialize, Serialize};

/// How a weight's own values give the range of its grid.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum WeightObserver {
    /// From the smallest to the largest value: nothing is clipped.
    #[default]
    MinMax,
    /// That range, shrunk to the share of it (100%, 98%, ... 40%) whose grid has the least squared error; of equal ones
    /// the widest. Clipping a few large values pays when it makes the step of all the others smaller; four bits gain
    /// most. The search of AWQ's clipping and of llm-compressor's `mse` observer, on a fixed grid.
    Mse,
}

/// Candidates of [`WeightObserver::Mse`] and what one of them is of the whole range.
const CANDIDATES: usize = 31;
const STEP: f32 = 0.02;

/// Values whose squared errors are summed in f32, lane by lane; these sums are added in f64.
pub(crate) const RUN: usize = 1 << 12;
pub(crate) const LANES: usize = 16;

impl QuantArgs {
    /// Scale and zero point of a group of weights with minimum `lo` and maximum `hi`. `error` is
    /// [`QuantArgs::squared_error`] of the group's values: a parameter, so that a kernel can bring a faster walk.
    ///
    /// # Errors
    /// As [`QuantArgs::qparams`] (of the whole range).
    #[inline]
    pub fn weight_qparams(&self, lo: f32, hi: f32, error: impl Fn(QParams) -> f64) -> Result<QParams, QuantError> {
        self.stored_weight_qparams(lo, hi, None, error)
    }

    /// [`QuantArgs::weight_qparams`] under a global scale: returns the stored scale, and asks `error` of the one in effect.
    ///
    /// # Errors
    /// As [`QuantArgs::qparams`] (of the whole range).
    #[inline]
    pub fn stored_weight_qparams(
        &self,
        lo: f32,
        hi: f32,
        global: Option<f32>,
        error: impl Fn(QParams) -> f64,
    ) -> Result<QParams, QuantError> {
        let mut best = self.stored_qparams(lo, hi, global)?;
        if self.observer == WeightObserver::MinMax {
            return Ok(best);
        }
        let mut least = error(self.in_effect(best, global));
        for i in 1..CANDIDATES {
            let share = 1.0 - STEP * i as f32;
            let p = self.stored_qparams(lo * share, hi * share, global)?;
            let e = error(self.in_effect(p, global));
            if e < least {
                (best, least) = (p, e);
            }
        }
        Ok(best)
    }

    /// The squared error of `x` on the grid of `p`. Order: runs of 4,096 values; in a run, lane `i` takes the values
    /// `i`, `i + 16`, ... one after the other in f32; the lanes of a run, then the runs, are added in f64.
    #[inline(always)]
    pub fn squared_error(&self, x: &[f32], p: QParams) -> f64 {
        if let Some(f) = self.qtype.float() {
            return with_format!(f, F => sum_of_squares(x, |x| F.round(x / p.scale) * p.scale - x));
        }
        let (qmin, qmax, zero) = (self.qtype.qmin() as f32, self.qtype.qmax() as f32, p.zero as f32);
        sum_of_squares(x, |x| {
            let q = (x / p.scale + zero).max(qmin).min(qmax).round_ties_even();
            (q - zero) * p.scale - x
        })
    }
}

/// The sum of the squares of `difference` over `x`, in the order of [`QuantArgs::squared_error`].
#[inline(always)]
fn sum_of_squares(x: &[f32], difference: impl Fn(f32) -> f32) -> f64 {
    let square = |x: f32| {
        let d = difference(x);
        d * d
    };
    let mut total = 0.0f64;
    for run in x.chunks(RUN) {
        let mut lanes = [0.0f32; LANES];
        let whole = run.chunks_exact(LANES);
        let tail = whole.remainder();
        for values in whole {
            for (lane, &v) in lanes.iter_mut().zip(values) {
                *lane += square(v);
            }
        }
        for (lane, &v) in lanes.iter_mut().zip(tail) {
            *lane += square(v);
        }
        total += lanes.iter().map(|&l| f64::from(l)).sum::<f64>();
    }
    total
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FloatType, Granularity, Mapping, QuantizedMatrix};

    fn args(mapping: Mapping, observer: WeightObserver) -> QuantArgs {
        QuantArgs { mapping, observer, ..QuantArgs::int4(Granularity::PerChannel, FloatType::Bf16) }
    }

    /// Sums of twelve uniforms: near enough to normal.
    fn weights(n: usize, seed: u64) -> Vec<f32> {
        let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        let mut uniform = || {
            s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (s >> 40) as f32 / (1u64 << 24) as f32
        };
        (0..n).map(|_| ((0..12).map(|_| uniform()).sum::<f32>() - 6.0) * 0.1).collect()
    }

    fn error_of(w: &[f32], k: usize, args: QuantArgs) -> Vec<f64> {
        let q = QuantizedMatrix::quantize(w, w.len() / k, k, args).unwrap();
        let square = |(v, x): (&f32, &f32)| f64::from(v - x).powi(2);
        let values = q.dequantize();
        values.chunks(k).zip(w.chunks(k)).map(|(v, x)| v.iter().zip(x).map(square).sum()).collect()
    }

    #[test]
    fn mse_is_never_worse_than_min_max_in_any_group_and_better_for_normal_weights() {
        let k = 576;
        let w = weights(8 * k, 3);
        for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
            let wide = error_of(&w, k, args(mapping, WeightObserver::MinMax));
            let best = error_of(&w, k, args(mapping, WeightObserver::Mse));
            for (b, w) in best.iter().zip(&wide) {
                // 2^-15: what sums of 4,096 f32 terms can be off by, relatively.
                assert!(*b <= w * (1.0 + 1.0 / 32768.0), "{b} against {w}");
            }
            assert!(best.iter().sum::<f64>() < 0.9 * wide.iter().sum::<f64>());
        }
    }

    #[test]
    fn the_search_finds_the_candidate_that_an_f64_search_finds() {
        let w = weights(4096 + 77, 9);
        let a = args(Mapping::Symmetric, WeightObserver::Mse);
        let (lo, hi) = w.iter().fold((0.0f32, 0.0f32), |(l, h), &x| (l.min(x), h.max(x)));
        let exact = |p: QParams| -> f64 {
            w.iter().map(|&x| (f64::from(a.dequantize(a.quantize(x, p), p)) - f64::from(x)).powi(2)).sum()
        };
        let found = a.weight_qparams(lo, hi, |p| a.squared_error(&w, p)).unwrap();
        let best = a.weight_qparams(lo, hi, exact).unwrap();
        assert_eq!(found, best);
        assert!((a.squared_error(&w, best) / exact(best) - 1.0).abs() < 1e-5);
    }

    #[test]
    fn the_worked_example_of_the_documentation() {
        let w = [0.32f32, -0.53, -0.45, -0.19, 0.32, 0.25, -0.21, -0.45];
        let mse = QuantArgs { scale_dtype: FloatType::F32, ..args(Mapping::Symmetric, WeightObserver::Mse) };
        let wide = QuantArgs { observer: WeightObserver::MinMax, ..mse };
        let [mse, wide] = [mse, wide].map(|a| QuantizedMatrix::quantize(&w, 1, 8, a).unwrap());
        assert_eq!(mse.codes, [5, -8, -7, -3, 5, 4, -3, -7]);
        assert!((mse.scales[0] - 0.0650133).abs() < 1e-7 && (wide.scales[0] - 0.0706667).abs() < 1e-7);
        let error = |q: &QuantizedMatrix| q.args.squared_error(&w, q.qparams(0));
        assert!((error(&mse) - 0.00055).abs() < 5e-6 && (error(&wide) - 0.00638).abs() < 5e-6);
    }

    #[test]
    fn c001_groups_without_a_best_range_keep_the_whole_one() {
        // All zero; squares that underflow; squares that overflow: every candidate is as good, the widest stays.
        for w in [vec![0.0f32; 64], vec![1e-30; 64], vec![1e25; 64]] {
            for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                let wide = QuantArgs { scale_dtype: FloatType::F32, ..args(mapping, WeightObserver::MinMax) };
                let mse = QuantArgs { observer: WeightObserver::Mse, ..wide };
                let a = QuantizedMatrix::quantize(&w, 1, 64, wide).unwrap();
                let b = QuantizedMatrix::quantize(&w, 1, 64, mse).unwrap();
                assert_eq!((a.scales, a.codes), (b.scales, b.codes));
            }
        }
    }
}
