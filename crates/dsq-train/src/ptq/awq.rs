//! AWQ: inputs of large magnitude get finer weights. Column `j` of a weight is multiplied by `s_j` before it is rounded,
//! and what makes input `j` is divided by `s_j`, so that the float model computes the same. The scales are
//! `s = mean|x|^alpha`, normalised so that the largest and the smallest multiply to 1; `alpha` is searched. Codes are
//! rounded to nearest on the grid of the scaled weights. Not the walk over a model (see `mod.rs`), and not the clipping
//! (that is `WeightObserver::Mse`).
//!
//! Beside it the scales of SmoothQuant, which are there for the grids of the inputs and need no search.
//!
//! Lin et al., "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration" (arXiv:2306.00978), section
//! 3.2, and its code (`llm-awq`, `auto_scale.py`: 20 values of alpha from 0, mean magnitudes, that normalisation). One
//! difference: the error that is minimised is that of the linear layers' outputs, `tr(E H E^T)`, for q, k and v too, where
//! the paper's code takes that of the whole attention block.

use super::hessian::Hessian;
use dsq_kernels::fake_quant::{fake_quant_weight_under, largest_magnitude};
use dsq_kernels::train::{Strided, matmul};
use dsq_quant::{FloatType, QuantArgs, QuantError};
use rayon::prelude::*;

/// Values of alpha that are tried: 0, 1/20, ... 19/20.
const GRID: usize = 20;
/// The least scale before normalisation: dead inputs have magnitude 0.
const LEAST: f64 = 1e-4;
/// Rows of errors that one task adds up.
const TASK_ROWS: usize = 32;

/// A layer whose columns are scaled.
#[derive(Debug)]
pub(super) struct Consumer<'a> {
    /// Weight `[n, k]`.
    pub w: &'a [f32],
    /// Its grid.
    pub args: QuantArgs,
    /// Those of one set share a global scale, where their schemes have one.
    pub set: usize,
}

/// Scales of the inputs that `consumers` share, `[k]`; `None` when 1 is best. Of consumers whose schemes have a global scale
/// (NVFP4) those of a set are rounded under that of the largest magnitude among them, once scaled: they must be all that share one. `magnitude
/// [k]` is what the scales are powers of; `realize` turns scales into those that can be had (by rounding what is divided to its stored
/// dtype, say).
///
/// # Errors
/// Where the unscaled weights cannot be quantized: which consumer, and why.
pub(super) fn search(
    h: &Hessian,
    magnitude: &[f64],
    consumers: &[Consumer],
    realize: impl Fn(Vec<f32>) -> Vec<f32>,
) -> Result<Option<Vec<f32>>, (usize, QuantError)> {
    let mean = h.mean_f32();
    let total = |s: &[f32]| -> Result<f64, (usize, QuantError)> {
        let (mut at, mut total) = (0, 0.0);
        // Set by set, so that no more than one is in memory twice.
        for set in consumers.chunk_by(|a, b| a.set == b.set) {
            let scaled: Vec<Vec<f32>> = set.iter().map(|c| scale_columns(c.w, s)).collect();
            let global = shared_global(set.iter().zip(&scaled).map(|(c, w)| (c.args, largest_magnitude(w))));
            for (i, (c, scaled)) in set.iter().zip(&scaled).enumerate() {
                total += error(c, scaled, s, global, &mean).map_err(|e| (at + i, e))?;
            }
            at += set.len();
        }
        Ok(total)
    };
    let mut least = total(&vec![1.0; h.k()])?;
    let mut best = None;
    for step in 1..GRID {
        let s = realize(scales(magnitude, step as f64 / GRID as f64));
        // A candidate whose grid overflows, or whose error cannot be told, is none.
        if let Ok(e) = total(&s)
            && e < least
        {
            (least, best) = (e, Some(s));
        }
    }
    Ok(best)
}

/// SmoothQuant's scales of the inputs that `consumers` share, `[k]`: `max|x_j|^alpha / max|w_j|^(1 - alpha)`, the second over
/// all rows of all consumers. Input `j` is divided by it. An input or a column that is 0 throughout keeps 1. Source: Xiao
/// et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models" (arXiv:2211.10438),
/// equation 4.
pub(super) fn smooth(largest: &[f32], consumers: &[Consumer], alpha: f64) -> Vec<f32> {
    let k = largest.len();
    let mut columns = vec![0.0f32; k];
    for row in consumers.iter().flat_map(|c| c.w.chunks(k.max(1))) {
        columns.iter_mut().zip(row).for_each(|(m, w)| *m = m.max(w.abs()));
    }
    let scale = |(&x, w): (&f32, f32)| match x > 0.0 && w > 0.0 {
        // Between the square roots of the smallest and the largest normal number, so that no product leaves f32.
        true => (f64::from(x).powf(alpha) / f64::from(w).powf(1.0 - alpha)).clamp(1e-5, 1e5) as f32,
        false => 1.0,
    };
    largest.iter().zip(columns).map(scale).collect()
}

/// `magnitude^alpha`, normalised.
fn scales(magnitude: &[f64], alpha: f64) -> Vec<f32> {
    let s: Vec<f64> = magnitude.iter().map(|m| m.powf(alpha).max(LEAST)).collect();
    let (lo, hi) = s.iter().fold((f64::MAX, 0.0f64), |(lo, hi), &v| (lo.min(v), hi.max(v)));
    let middle = (lo * hi).sqrt();
    s.iter().map(|v| (v / middle) as f32).collect()
}

/// The global scale that layers with these schemes and largest magnitudes share: that of the largest magnitude of those that have
/// one. Which value it has where none does means nothing.
pub(super) fn shared_global(layers: impl Iterator<Item = (QuantArgs, f32)>) -> f32 {
    QuantArgs::global_scale(layers.filter(|(args, _)| args.has_global_scale()).fold(0.0, |m, (_, w)| m.max(w)))
}

/// The mean squared output error over tokens, summed over rows, of `c` rounded with column scales `s`, which makes `scaled` of its
/// weight, under `global` where its scheme has a global scale; `mean` is the Hessian over the number of tokens. In f32, summed in
/// f64 in a fixed order.
fn error(c: &Consumer, scaled: &[f32], s: &[f32], global: f32, mean: &[f32]) -> Result<f64, QuantError> {
    let k = s.len();
    let n = c.w.len().checked_div(k).unwrap_or(0);
    let (mut errors, mut inside) = (vec![0.0f32; n * k], vec![0u8; n * k]);
    let global = c.args.has_global_scale().then_some(global);
    fake_quant_weight_under(scaled, n, k, &c.args, global, &mut errors, &mut inside)?;
    errors.par_chunks_mut(k.max(1)).zip(c.w.par_chunks(k.max(1))).for_each(|(e, w)| {
        e.iter_mut().zip(w).zip(s).for_each(|((e, w), s)| *e = w - *e / s);
    });
    let product = matmul(Strided::rows(&errors, k), Strided::rows(mean, k), [n, k, k]);
    let parts: Vec<f64> = errors
        .par_chunks((TASK_ROWS * k).max(1))
        .zip(product.par_chunks((TASK_ROWS * k).max(1)))
        .map(|(e, p)| e.iter().zip(p).map(|(e, p)| f64::from(*e) * f64::from(*p)).sum())
        .collect();
    Ok(parts.iter().sum())
}

/// `w [n, k]` with column `j` times `s[j]`.
pub(super) fn scale_columns(w: &[f32], s: &[f32]) -> Vec<f32> {
    let mut out = w.to_vec();
    out.par_chunks_mut(s.len().max(1)).for_each(|row| row.iter_mut().zip(s).for_each(|(v, s)| *v *= s));
    out
}

/// A norm weight divided by `s` and rounded to the dtype it is stored in; a value that would be lost there (0, or not
/// finite) is not divided.
pub(super) fn divided(norm: &[f32], s: &[f32], dtype: FloatType) -> Vec<f32> {
    let one = |(&w, &s): (&f32, &f32)| {
        let v = dtype.round(w / s);
        if v != 0.0 && v.is_finite() { v } else { dtype.round(w) }
    };
    norm.iter().zip(s).map(one).collect()
}

/// The scales that a norm weight was in effect divided by to become `stored`: the rounding of the stored weight goes into
/// the columns, where it costs nothing.
pub(super) fn in_effect(norm: &[f32], stored: &[f32]) -> Vec<f32> {
    norm.iter().zip(stored).map(|(&w, &v)| if v == 0.0 || !v.is_finite() { 1.0 } else { w / v }).collect()
}

/// `s`, each the nearest power of two, for a `norm` whose output a `router [experts, k]` reads too: which experts a token runs hangs on
/// its logits, and so they are the same bits. 1 where a norm weight divided by it or a router's column times it leaves its dtype.
pub(super) fn powers_of_two(
    s: Vec<f32>,
    norm: &[f32],
    dtype: FloatType,
    router: &[f32],
    of_router: FloatType,
) -> Vec<f32> {
    let k = s.len();
    let one = |(j, s): (usize, f32)| {
        let s = s.log2().round().exp2();
        let exact = |a: f32, by: f32, dtype: FloatType| {
            let (before, after) = (dtype.round(a), dtype.round(dtype.round(a) * by));
            after.is_finite() && after / by == before
        };
        let column = router.iter().skip(j).step_by(k.max(1));
        let fits =
            s.is_normal() && exact(norm[j], 1.0 / s, dtype) && column.into_iter().all(|&w| exact(w, s, of_router));
        if fits { s } else { 1.0 }
    };
    s.into_iter().enumerate().map(one).collect()
}

/// Means of `x [heads * d]` over the query heads that share a key and value head, `[kv_heads * d]`: o_proj's inputs are
/// mixtures of v_proj's rows, and a row goes to every head of its group.
pub(super) fn pooled(x: &[f64], kv_heads: usize, d: usize) -> Vec<f64> {
    let per = x.len() / (kv_heads * d).max(1);
    (0..kv_heads * d)
        .map(|i| (0..per).map(|h| x[(i / d * per + h) * d + i % d]).sum::<f64>() / per.max(1) as f64)
        .collect()
}

/// The inverse of [`pooled`]: each group's values for all its heads.
pub(super) fn spread<T: Copy>(x: &[T], heads: usize, d: usize) -> Vec<T> {
    let per = heads * d / x.len().max(1);
    (0..heads * d).map(|i| x[i / d / per.max(1) * d + i % d]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{normal, with_threads};
    use super::*;
    use dsq_quant::{Granularity, Mapping, QuantizedMatrix, WeightObserver};

    fn args(granularity: Granularity) -> QuantArgs {
        QuantArgs::int4(granularity, FloatType::F16)
    }

    /// Inputs with a few columns of large magnitude, and a weight.
    fn case(n: usize, k: usize, seed: u64) -> (Hessian, Vec<f32>) {
        let mut x = normal(300 * k, seed);
        x.iter_mut().enumerate().filter(|(i, _)| i % k % 16 == 5).for_each(|(_, v)| *v *= 30.0);
        let mut h = Hessian::new(k);
        h.add(&x);
        (h, normal(n * k, seed + 1))
    }

    /// The output error in f64.
    fn exact(h: &Hessian, w: &[f32], s: &[f32], a: QuantArgs) -> f64 {
        let k = s.len();
        let q = QuantizedMatrix::quantize(&scale_columns(w, s), w.len() / k, k, a).unwrap().dequantize();
        let e: Vec<f32> = w.iter().zip(q.iter().enumerate()).map(|(w, (i, q))| w - q / s[i % k]).collect();
        h.output_errors(&e).iter().sum()
    }

    #[test]
    fn the_search_finds_the_best_candidate_and_is_never_worse_than_rounding() {
        let (n, k) = (24, 96);
        let (h, w) = case(n, k, 5);
        let magnitude = h.mean_magnitude();
        let mut gained = 0;
        for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
            for granularity in [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(32)] {
                for observer in [WeightObserver::MinMax, WeightObserver::Mse] {
                    let a = QuantArgs { mapping, observer, ..args(granularity) };
                    let s = search(&h, &magnitude, &[Consumer { w: &w, args: a, set: 0 }], |s| s).unwrap();
                    let s = s.unwrap_or(vec![1.0; k]);
                    let errors: Vec<f64> =
                        (0..GRID).map(|i| exact(&h, &w, &scales(&magnitude, i as f64 / GRID as f64), a)).collect();
                    let least = errors.iter().copied().fold(f64::MAX, f64::min);
                    assert!((exact(&h, &w, &s, a) / least - 1.0).abs() < 1e-3, "{a:?}: {errors:?}");
                    gained += usize::from(least < 0.99 * errors[0]);
                }
            }
        }
        assert!(gained >= 6, "large inputs leave something to gain on most grids: {gained} of 12");
    }

    /// Under NVFP4 every candidate has another global scale, that of the largest scaled weight of the set.
    #[test]
    fn under_a_shared_global_scale_the_search_is_by_that_of_the_whole_set() {
        let (n, k, a) = (24, 96, QuantArgs::nvfp4());
        for observer in [WeightObserver::MinMax, WeightObserver::Mse] {
            let a = QuantArgs { observer, ..a };
            let (h, w) = case(n, k, 5);
            // A hundred times as large: it alone decides, and scales of the first are far below the largest E4M3 number.
            let other: Vec<f32> = normal(8 * k, 9).iter().map(|v| 100.0 * v).collect();
            let magnitude = h.mean_magnitude();
            let set = [Consumer { w: &w, args: a, set: 0 }, Consumer { w: &other, args: a, set: 0 }];
            let of_set = |s: &[f32]| -> [f64; 2] {
                let scaled = [&w, &other].map(|w| scale_columns(w, s));
                let largest = scaled.iter().flatten().fold(0.0f32, |m, v| m.max(v.abs()));
                let global = Some(QuantArgs::global_scale(largest));
                [(&w, &scaled[0]), (&other, &scaled[1])].map(|(w, scaled)| {
                    let q = QuantizedMatrix::quantize_under(scaled, w.len() / k, k, a, global).unwrap().dequantize();
                    let e: Vec<f32> = w.iter().zip(q.iter().enumerate()).map(|(w, (i, q))| w - q / s[i % k]).collect();
                    h.output_errors(&e).iter().sum()
                })
            };
            let errors: Vec<[f64; 2]> =
                (0..GRID).map(|i| of_set(&scales(&magnitude, i as f64 / GRID as f64))).collect();
            let total = |e: &[f64; 2]| e[0] + e[1];
            let least = errors.iter().map(total).fold(f64::MAX, f64::min);
            let s = search(&h, &magnitude, &set, |s| s).unwrap().unwrap();
            assert!((total(&of_set(&s)) / least - 1.0).abs() < 1e-3, "{errors:?}");
            assert!(least < 0.95 * total(&errors[0]), "skewed inputs leave something to gain: {errors:?}");
            // Alone the first weight has a finer grid than in the set.
            let alone = search(&h, &magnitude, &set[..1], |s| s).unwrap().unwrap();
            let own = |s: &[f32]| exact(&h, &w, s, a);
            assert!(own(&alone) < 0.95 * own(&[1.0; 96]) && own(&alone) <= own(&s) * 1.001);
        }
    }

    #[test]
    fn f113_dead_and_equal_inputs_give_finite_scales_or_none() {
        let (n, k) = (8, 32);
        let w = normal(n * k, 3);
        let a = args(Granularity::PerChannel);
        for factor in [0.0, 1.0, 1e-15, 1e15] {
            let mut h = Hessian::new(k);
            let x: Vec<f32> =
                normal(50 * k, 4).iter().enumerate().map(|(i, v)| if i % k == 7 { 0.0 } else { v * factor }).collect();
            h.add(&x);
            if let Some(s) = search(&h, &h.mean_magnitude(), &[Consumer { w: &w, args: a, set: 0 }], |s| s).unwrap() {
                assert!(s.iter().all(|s| s.is_finite() && *s > 0.0));
                assert!(exact(&h, &w, &s, a) <= exact(&h, &w, &[1.0; 32], a) * 1.0001);
            }
        }
        // Nothing was ever seen: all errors are 0, and 1 is as good as any.
        assert_eq!(
            search(&Hessian::new(k), &vec![0.0; k], &[Consumer { w: &w, args: a, set: 0 }], |s| s).unwrap(),
            None
        );
    }

    #[test]
    fn c005_weights_that_cannot_be_quantized_are_named() {
        let (h, mut w) = case(4, 32, 9);
        w[70] = 6e5;
        let consumers = [
            Consumer { w: &normal(64, 1), args: args(Granularity::PerChannel), set: 0 },
            Consumer { w: &w, args: args(Granularity::PerChannel), set: 1 },
        ];
        let (i, e) = search(&h, &h.mean_magnitude(), &consumers, |s| s).unwrap_err();
        assert!(i == 1 && matches!(e, QuantError::ScaleOverflow { group: 2, .. }), "{i} {e}");
    }

    #[test]
    fn stored_norms_and_the_scales_in_effect_make_the_norm_again() {
        let norm = [1.0f32, -0.3, 2.5, 0.0, 1e-6, 60000.0];
        let s = [1.3f32, 0.7, 31.0, 2.0, 60.0, 0.01];
        for dtype in FloatType::ALL {
            let stored = divided(&norm, &s, dtype);
            assert!(stored.iter().zip(&norm).all(|(v, w)| v.is_finite() && (*v != 0.0 || *w == 0.0)));
            for ((v, s), w) in stored.iter().zip(in_effect(&norm, &stored)).zip(norm) {
                assert!((v * s - w).abs() <= 1.5e-7 * w.abs(), "{dtype}: {v} {s} {w}");
            }
        }
    }

    #[test]
    fn scales_before_a_router_change_no_bit_of_it() {
        let norm = [1.0f32, 0.3, 60000.0, 0.5];
        let router = [0.25f32, -1.5, 1e-7, 3e-8, 65504.0, 0.1, 2.0, 1.0];
        let [norm, router] =
            [norm.map(|v| FloatType::F16.round(v)).to_vec(), router.map(|v| FloatType::F16.round(v)).to_vec()];
        let s = powers_of_two(vec![3.1, 0.27, 0.26, 0.3], &norm, FloatType::F16, &router, FloatType::F16);
        // The largest f16 number has no multiple, 60,000 no quotient by a quarter, and the least has no fraction.
        assert_eq!(s, [1.0, 0.25, 1.0, 1.0]);
        let wide = powers_of_two(vec![3.1, 0.27, 0.26, 0.3], &norm, FloatType::Bf16, &router, FloatType::F32);
        assert_eq!(wide, [4.0, 0.25, 0.25, 0.25]);
    }

    #[test]
    fn heads_of_a_group_share_what_their_key_and_value_head_has() {
        // Four query heads, two key and value heads, head_dim 2.
        let x = [1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0, 40.0];
        let p = pooled(&x, 2, 2);
        assert_eq!(p, [2.0, 3.0, 20.0, 30.0]);
        assert_eq!(spread(&p, 4, 2), [2.0, 3.0, 2.0, 3.0, 20.0, 30.0, 20.0, 30.0]);
        assert_eq!(pooled(&x, 4, 2), x);
        assert_eq!(spread(&x, 4, 2), x);
    }

    #[test]
    fn any_number_of_threads_gives_the_same_bits() {
        let (h, w) = case(70, 96, 11);
        let a = args(Granularity::PerGroup(32));
        let run = |t| {
            with_threads(t, || search(&h, &h.mean_magnitude(), &[Consumer { w: &w, args: a, set: 0 }], |s| s).unwrap())
        };
        let one = run(1);
        assert!(one.is_some() && [2, 7].iter().all(|&t| run(t) == one));
    }
}
