//! Tests of the kernels beside this file: every scheme, bit-equal to the reference.

use super::*;
use crate::fake_quant::tests::{normal, values};
use dsq_quant::{FloatType, WeightObserver};

/// Integer schemes: the others go to the reference.
fn all_args(granularities: &[Granularity]) -> Vec<QuantArgs> {
    crate::fake_quant::tests::integer_args(granularities)
}

fn granularities(k: usize) -> Vec<Granularity> {
    let sizes = [1, 7, 32, 40, 96].into_iter().filter(|&g| k.is_multiple_of(g));
    [Granularity::PerTensor, Granularity::PerChannel].into_iter().chain(sizes.map(Granularity::PerGroup)).collect()
}

/// Equal values, or errors of one text (a NaN in an error equals itself there).
fn same<T: PartialEq>(a: &Result<T, QuantError>, b: &Result<T, QuantError>) -> bool {
    match (a, b) {
        (Ok(a), Ok(b)) => a == b,
        (Err(a), Err(b)) => format!("{a:?}") == format!("{b:?}"),
        _ => false,
    }
}

/// Scales are positive, so that equal ones have equal bits.
fn assert_equal(w: &[f32], n: usize, k: usize, args: QuantArgs) {
    let got = quantize(w, n, k, args);
    assert!(same(&got, &QuantizedMatrix::quantize(w, n, k, args)), "{n}x{k} {args:?}");
    assert!(same(&quantize_here(w, n, k, args), &got), "{n}x{k} {args:?}");
    assert!(got.is_err() || got.is_ok_and(|q| q.validate().is_ok()), "{n}x{k} {args:?}");
    if args.observer == WeightObserver::Mse {
        return;
    }
    assert!(same(&qparams_of(w, n, k, args), &QuantizedMatrix::qparams_of(w, n, k, args)), "{n}x{k} {args:?}");
    // Against parameters of other values: clipping and zero points that the values do not ask for.
    let other: Vec<f32> = w.iter().rev().map(|x| if x.is_finite() { x * 0.37 + 1e-3 } else { 1.0 }).collect();
    if let Ok(params) = QuantizedMatrix::qparams_of(&other, n, k, args) {
        let want = QuantizedMatrix::quantize_with(w, n, k, args, &params);
        assert!(same(&quantize_with(w, n, k, args, &params), &want), "{n}x{k} {args:?}");
    }
}

#[test]
fn every_scheme_equals_the_reference_at_every_size() {
    // Odd sizes, so that tails and uneven tasks occur; the last shape takes the path for long groups.
    for (n, k) in [(1, 1), (3, 7), (5, 96), (9, 280), (130, 192), (1, 100_003)] {
        let every = n * k < 5000;
        let some = |a: &QuantArgs| {
            every
                || a.observer == WeightObserver::MinMax
                || (a.qtype, a.scale_dtype) == (QuantType::Int4, FloatType::Bf16)
        };
        for args in all_args(&granularities(k)).into_iter().filter(some) {
            assert_equal(&normal(n * k, (n * 31 + k) as u64), n, k, args);
        }
    }
}

#[test]
fn c001_c010_adversarial_values_equal_the_reference() {
    let (n, k) = (3, 64);
    let mut rows: Vec<Vec<f32>> = vec![
        vec![0.0; k],
        vec![-0.0; k],
        vec![1e-30; k],
        (0..k).map(|i| if i == 5 { 1e-38 } else { 0.0 }).collect(),
        (0..k).map(|i| if i % 2 == 0 { 1e-45 } else { -1e-45 }).collect(),
        vec![0.25; k],
        vec![-0.25; k],
        (0..k).map(|i| i as f32 % 16.0 - 7.5).collect(),
        (0..k).map(|i| (i as f32 % 16.0 - 0.5).max(0.0)).collect(),
        (0..k).map(|i| if i == 3 { 100.0 } else { (i as f32 * 0.7).sin() * 0.01 }).collect(),
        (0..k).map(|i| (i as f32 * 0.7).sin().abs() + 0.01).collect(),
        (0..k).map(|i| f32::MAX * if i % 3 == 0 { -1.0 } else { 0.9 }).collect(),
        (0..k).map(|i| 6e5 * (i as f32).cos()).collect(),
        vec![f32::MIN_POSITIVE; k],
    ];
    rows.extend([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].map(|bad| {
        let mut row = normal(k, 3);
        row[k - 1] = bad;
        row
    }));
    let patterns = |seed| values(k, seed, f32::from_bits);
    rows.extend((0..4).map(patterns));
    rows.extend((10..24).map(|seed| patterns(seed).iter().map(|x| if x.is_finite() { *x } else { 1.0 }).collect()));
    for (i, row) in rows.iter().enumerate() {
        let mut w = normal(n * k, i as u64);
        w[k..2 * k].copy_from_slice(row);
        for args in all_args(&granularities(k)) {
            assert_equal(&w, n, k, args);
        }
    }
}

#[test]
fn wrong_sizes_and_parameters_are_refused_as_the_reference_refuses_them() {
    let args = QuantArgs::int4(Granularity::PerGroup(32), FloatType::F16);
    for (len, n, k) in [(63, 1, 64), (64, 1, 63), (0, 0, 64), (0, 3, 0), (0, 0, 0), (64, usize::MAX, 64)] {
        let w = vec![0.5; len];
        if n.checked_mul(k).is_some() {
            assert!(same(&quantize(&w, n, k, args), &QuantizedMatrix::quantize(&w, n, k, args)), "{n}x{k}");
        }
    }
    let w = normal(64, 1);
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, 0.1] {
        for zero in [0, 3, 8] {
            for args in [args, QuantArgs { mapping: Mapping::Asymmetric, ..args }] {
                let params = [QParams { scale: 1.0, zero: 0 }, QParams { scale, zero }];
                let want = QuantizedMatrix::quantize_with(&w, 1, 64, args, &params);
                assert!(same(&quantize_with(&w, 1, 64, args, &params), &want), "{args:?} {params:?}");
            }
        }
    }
    assert!(quantize_with(&w, 1, 64, args, &[QParams { scale: 1.0, zero: 0 }]).is_err());
}

#[test]
fn any_thread_count_gives_the_same_bits() {
    let (n, k) = (257, 331);
    let w = normal(n * k, 5);
    for args in all_args(&[Granularity::PerTensor, Granularity::PerChannel]) {
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| quantize(&w, n, k, args).unwrap())
        };
        assert!(run(1) == run(3), "{args:?}");
    }
}
