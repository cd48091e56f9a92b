//! The weight observer `mse` with importance: the squared error of a column counts by how large its inputs are. Not the
//! unweighted search (see `weight_observer.rs`, whose candidates these are), and not GPTQ or AWQ, which also use how inputs
//! go together.
//!
//! The output of a linear layer is `sum_c w_c x_c`, so for inputs that are not correlated the expected squared error of an
//! output is `sum_c E[x_c^2] (q_c - w_c)^2`: the importance of column `c` is the mean of `x_c^2` over calibration text.

use crate::matrix::{check_finite, check_len, min_max};
use crate::weight_observer::{LANES, RUN};
use crate::{QParams, QuantArgs, QuantError, QuantizedMatrix};

impl QuantArgs {
    /// The squared error of `x` on the grid of `p`, each square times the importance of its value (as many as values).
    /// The order is that of [`QuantArgs::squared_error`], to which it is equal when every importance is 1.
    pub fn weighted_squared_error(&self, x: &[f32], importance: &[f32], p: QParams) -> f64 {
        let mut total = 0.0f64;
        for (run, weights) in x.chunks(RUN).zip(importance.chunks(RUN)) {
            let mut lanes = [0.0f32; LANES];
            for (values, weights) in run.chunks(LANES).zip(weights.chunks(LANES)) {
                for ((lane, &v), &weight) in lanes.iter_mut().zip(values).zip(weights) {
                    let d = self.fake_quantize(v, p).0 - v;
                    *lane += weight * (d * d);
                }
            }
            total += lanes.iter().map(|&l| f64::from(l)).sum::<f64>();
        }
        total
    }
}

impl QuantizedMatrix {
    /// [`QuantizedMatrix::qparams_of`], where the search of `WeightObserver::Mse` weighs the squared error of column `c` by
    /// `importance[c]` (`k` values, finite and not negative; only their ratios within a group matter). A group without
    /// importance keeps its whole range. `WeightObserver::MinMax` searches nothing, so importance changes nothing there.
    ///
    /// # Errors
    /// As [`QuantizedMatrix::quantize`]; [`QuantError::Length`] and [`QuantError::Setting`] for the importance.
    pub fn weighted_qparams_of(
        w: &[f32],
        n: usize,
        k: usize,
        args: QuantArgs,
        importance: &[f32],
    ) -> Result<Vec<QParams>, QuantError> {
        check_len("importance", k, importance.len())?;
        if let Some(bad) = importance.iter().find(|v| !(v.is_finite() && **v >= 0.0)) {
            return Err(QuantError::Setting {
                field: "importance",
                expected: "finite values, 0 or more".into(),
                got: bad.to_string(),
            });
        }
        check_len("weight", n * k, w.len())?;
        let [rows, groups] = args.scale_shape(n, k)?;
        check_finite(w)?;
        let per_scale = (n * k).checked_div(rows * groups).unwrap_or(1).max(1);
        // A scale covers a run within a row, a row, or (for the whole tensor) all rows, whose columns then repeat.
        let repeats = per_scale.div_ceil(k.max(1)).max(1);
        let importance = importance.repeat(repeats);
        w.chunks(per_scale)
            .enumerate()
            .map(|(i, chunk)| {
                let (lo, hi) = min_max(chunk);
                let first = (i * per_scale).checked_rem(k).unwrap_or(0);
                let weights = &importance[first..first + chunk.len()];
                args.weight_qparams(lo, hi, |p| args.weighted_squared_error(chunk, weights, p))
                    .map_err(|e| e.in_group(i))
            })
            .collect()
    }

    /// Rounds `w` to the grid of [`QuantizedMatrix::weighted_qparams_of`].
    ///
    /// # Errors
    /// As there.
    pub fn weighted_quantize(
        w: &[f32],
        n: usize,
        k: usize,
        args: QuantArgs,
        importance: &[f32],
    ) -> Result<Self, QuantError> {
        let params = Self::weighted_qparams_of(w, n, k, args, importance)?;
        Self::quantize_with(w, n, k, args, &params)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::normal;
    use crate::{FloatType, Granularity, Mapping, QuantType, WeightObserver};
    use proptest::prelude::*;

    /// Squares of normal values: a few columns matter much more than the others.
    fn importances(k: usize, seed: u64) -> Vec<f32> {
        normal(k, seed ^ 0x5555).iter().map(|v| v * v * v * v).collect()
    }

    fn args(granularity: Granularity, mapping: Mapping) -> QuantArgs {
        QuantArgs { mapping, observer: WeightObserver::Mse, ..QuantArgs::int4(granularity, FloatType::Bf16) }
    }

    const GRANULARITIES: [Granularity; 3] =
        [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(24)];

    /// The weighted error of each scale's values, in f64.
    fn errors(q: &QuantizedMatrix, w: &[f32], importance: &[f32]) -> Vec<f64> {
        let term = |i: usize, v: f32| f64::from(importance[i % q.k]) * (f64::from(v) - f64::from(w[i])).powi(2);
        let terms: Vec<f64> = q.dequantize().into_iter().enumerate().map(|(i, v)| term(i, v)).collect();
        terms.chunks(w.len() / q.scales.len()).map(|c| c.iter().sum()).collect()
    }

    #[test]
    fn the_worked_example_of_the_documentation() {
        let w = [0.32f32, -0.53, -0.45, -0.19, 0.32, 0.25, -0.21, -0.45];
        let a = QuantArgs { scale_dtype: FloatType::F32, ..args(Granularity::PerChannel, Mapping::Symmetric) };
        let importance = [1.0f32, 1.0, 1.0, 1.0, 1.0, 1.0, 100.0, 1.0];
        let plain = QuantizedMatrix::quantize(&w, 1, 8, a).unwrap();
        let weighted = QuantizedMatrix::weighted_quantize(&w, 1, 8, a, &importance).unwrap();
        assert_eq!(plain.codes, [5, -8, -7, -3, 5, 4, -3, -7]);
        assert_eq!(weighted.codes, [5, -8, -6, -3, 5, 4, -3, -6]);
        assert!((plain.scales[0] - 0.0650133).abs() < 1e-7 && (weighted.scales[0] - 0.0692533).abs() < 1e-7);
        let [plain, weighted] = [&plain, &weighted].map(|q| errors(q, &w, &importance)[0]);
        assert!((plain - 0.0227).abs() < 5e-5 && (weighted - 0.0059).abs() < 5e-5);
    }

    #[test]
    fn wrong_importances_are_refused_and_none_keeps_the_whole_range() {
        let w = normal(4 * 48, 1);
        for granularity in GRANULARITIES {
            for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                let a = args(granularity, mapping);
                let run = |importance: &[f32]| QuantizedMatrix::weighted_quantize(&w, 4, 48, a, importance);
                assert!(matches!(run(&[1.0; 47]), Err(QuantError::Length { what: "importance", .. })));
                for bad in [-1.0, f32::NAN, f32::INFINITY] {
                    let mut importance = [1.0; 48];
                    importance[47] = bad;
                    assert!(matches!(run(&importance), Err(QuantError::Setting { field: "importance", .. })));
                }
                let wide = QuantArgs { observer: WeightObserver::MinMax, ..a };
                let wide = QuantizedMatrix::quantize(&w, 4, 48, wide).unwrap();
                let none = run(&[0.0; 48]).unwrap();
                assert_eq!((none.scales, none.codes), (wide.scales, wide.codes));
            }
        }
        assert!(QuantizedMatrix::weighted_quantize(&[], 0, 0, args(GRANULARITIES[1], Mapping::Symmetric), &[]).is_ok());
    }

    #[test]
    fn importance_lowers_the_weighted_error_of_normal_weights() {
        let (n, k) = (16, 96);
        let (w, importance) = (normal(n * k, 3), importances(k, 4));
        for granularity in GRANULARITIES {
            let a = args(granularity, Mapping::Symmetric);
            let plain = QuantizedMatrix::quantize(&w, n, k, a).unwrap();
            let weighted = QuantizedMatrix::weighted_quantize(&w, n, k, a, &importance).unwrap();
            let [plain, weighted] = [&plain, &weighted].map(|q| errors(q, &w, &importance).iter().sum::<f64>());
            assert!(
                weighted < 0.97 * plain || granularity == Granularity::PerTensor,
                "{granularity:?} {weighted} {plain}"
            );
            assert!(weighted <= plain * 1.0001);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        #[test]
        fn importance_of_one_is_the_unweighted_search(seed in 0u64..1_000_000, g in 0usize..3, asym: bool, qtype in 0usize..4) {
            let (n, k) = (3, 48);
            let w = normal(n * k, seed);
            let mapping = if asym { Mapping::Asymmetric } else { Mapping::Symmetric };
            let a = QuantArgs { qtype: QuantType::INTS[qtype], ..args(GRANULARITIES[g], mapping) };
            let plain = QuantizedMatrix::quantize(&w, n, k, a).unwrap();
            prop_assert_eq!(&QuantizedMatrix::weighted_quantize(&w, n, k, a, &[1.0; 48]).unwrap(), &plain);
            // A power of two changes no ratio and rounds nothing.
            prop_assert_eq!(&QuantizedMatrix::weighted_quantize(&w, n, k, a, &[0.25; 48]).unwrap(), &plain);
            // Without a search importance changes nothing.
            let wide = QuantArgs { observer: WeightObserver::MinMax, ..a };
            let plain = QuantizedMatrix::quantize(&w, n, k, wide).unwrap();
            prop_assert_eq!(&QuantizedMatrix::weighted_quantize(&w, n, k, wide, &importances(k, seed)).unwrap(), &plain);
        }

        #[test]
        fn no_group_is_worse_than_the_whole_range_or_the_unweighted_choice(seed in 0u64..1_000_000, g in 0usize..3, asym: bool) {
            let (n, k) = (4, 48);
            let (w, importance) = (normal(n * k, seed), importances(k, seed));
            let a = args(GRANULARITIES[g], if asym { Mapping::Asymmetric } else { Mapping::Symmetric });
            let found = errors(&QuantizedMatrix::weighted_quantize(&w, n, k, a, &importance).unwrap(), &w, &importance);
            for observer in [WeightObserver::MinMax, WeightObserver::Mse] {
                let other = QuantizedMatrix::quantize(&w, n, k, QuantArgs { observer, ..a }).unwrap();
                for (a, b) in found.iter().zip(errors(&other, &w, &importance)) {
                    // 2^-15: what sums of f32 terms in lanes can be off by, relatively.
                    prop_assert!(*a <= b * (1.0 + 1.0 / 32768.0), "{} against {}", a, b);
                }
            }
        }
    }
}
