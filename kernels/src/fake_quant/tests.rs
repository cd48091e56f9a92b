//! Tests of the kernels beside this file.

use super::*;
use dsq_quant::{FloatType, Granularity, Mapping, QuantType, QuantizedMatrix, WeightObserver};

/// xorshift, so that the kernels need no dependency for random values.
pub(crate) fn values(n: usize, seed: u64, mut f: impl FnMut(u32) -> f32) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            f((s >> 32) as u32)
        })
        .collect()
}

pub(crate) fn normal(n: usize, seed: u64) -> Vec<f32> {
    values(4 * n, seed, |u| (f64::from(u) / 4294967296.0 - 0.5) as f32).chunks(4).map(|c| c.iter().sum()).collect()
}

pub(super) fn all_args(granularities: &[Granularity]) -> Vec<QuantArgs> {
    let mut out = Vec::new();
    for &granularity in granularities {
        for qtype in QuantType::INTS {
            for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                for scale_dtype in FloatType::ALL {
                    for observer in [WeightObserver::MinMax, WeightObserver::Mse] {
                        out.push(QuantArgs { qtype, granularity, mapping, scale_dtype, observer });
                    }
                }
            }
        }
        // Of float codes what has these granularities; the others are in `float_args`.
        if !matches!(granularity, Granularity::PerGroup(_)) {
            out.push(QuantArgs::fp8(granularity, FloatType::Bf16));
        }
    }
    out
}

/// Those of them with integer codes.
pub(crate) fn integer_args(granularities: &[Granularity]) -> Vec<QuantArgs> {
    all_args(granularities).into_iter().filter(|a| a.qtype.float().is_none()).collect()
}

/// Every kind of float-coded grid.
pub(crate) fn float_args() -> Vec<QuantArgs> {
    let mut out = vec![QuantArgs::mxfp4(), QuantArgs::nvfp4()];
    for granularity in [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerBlock(3, 40)] {
        for qtype in [QuantType::Fp8E4M3, QuantType::Fp8E5M2] {
            for scale_dtype in [FloatType::F32, FloatType::Bf16] {
                out.push(QuantArgs { qtype, ..QuantArgs::fp8(granularity, scale_dtype) });
            }
        }
    }
    out
}

pub(super) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

fn assert_walks_agree(x: &[f32], args: &QuantArgs, p: QParams) {
    let (mut a, mut b) = (vec![0.0; x.len()], vec![0.0; x.len()]);
    let (mut ma, mut mb) = (vec![9u8; x.len()], vec![9u8; x.len()]);
    scalar::walk(x, args, p, &mut a, &mut ma);
    walk(x, args, p, &mut b, &mut mb);
    assert_eq!(bits(&a), bits(&b), "{args:?} {p:?}");
    assert_eq!(ma, mb, "{args:?} {p:?}");
}

#[test]
fn c010_ties_round_to_even_on_the_fast_path() {
    let args = QuantArgs::int4(Granularity::PerTensor, FloatType::F32);
    let x = [0.5f32, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5, 6.5, 7.5, -8.5];
    let (mut out, mut inside) = ([0.0; 10], [9u8; 10]);
    fake_quant_with(&x, &args, QParams { scale: 1.0, zero: 0 }, &mut out, &mut inside).unwrap();
    assert_eq!(bits(&out), bits(&[0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 4.0, 6.0, 7.0, -8.0]));
    assert_eq!(inside, [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]);
}

#[test]
fn the_walks_agree_on_every_32nd_bit_pattern_of_f32() {
    // Every sign, exponent and the upper 18 bits of the mantissa, NaN and infinities included; the low 5 bits vary.
    let int4 = QuantArgs::int4(Granularity::PerTensor, FloatType::F32);
    let cases = [
        (int4, QParams { scale: 0.1, zero: 0 }),
        (QuantArgs { mapping: Mapping::Asymmetric, ..int4 }, QParams { scale: 0.337_3, zero: -5 }),
        (QuantArgs { qtype: QuantType::Fp8E4M3, ..int4 }, QParams { scale: 0.1, zero: 0 }),
        (QuantArgs { qtype: QuantType::Fp8E5M2, ..int4 }, QParams { scale: 0.25, zero: 0 }),
        (QuantArgs::mxfp4(), QParams { scale: 0.125, zero: 0 }),
    ];
    for (args, p) in cases {
        (0u32..1 << 12).into_par_iter().for_each(|block| {
            let pattern = |i: u32| (block << 15 | i) << 5 | (i.wrapping_mul(0x9E37_79B9) >> 27);
            let x: Vec<f32> = (0u32..1 << 15).map(|i| f32::from_bits(pattern(i))).collect();
            assert_walks_agree(&x, &args, p);
        });
    }
}

#[test]
fn ties_and_neighbours_of_ties_agree_for_many_scales() {
    for args in all_args(&[Granularity::PerTensor]) {
        for seed in 0..50 {
            let scale = args.scale_dtype.round(normal(1, seed)[0].abs() + 1e-3);
            for zero in [0, -8, 3, 7] {
                let zero = if args.mapping == Mapping::Symmetric { 0 } else { zero };
                let x: Vec<f32> = (-300..=300)
                    .flat_map(|i| {
                        let tie = (i as f32 + 0.5) * scale;
                        [tie, f32::from_bits(tie.to_bits() + 1), f32::from_bits(tie.to_bits() - 1), i as f32 * scale]
                    })
                    .collect();
                assert_walks_agree(&x, &args, QParams { scale, zero });
            }
        }
    }
}

#[test]
fn a_weight_lands_where_the_shipped_matrix_lands() {
    // Odd sizes, so that tails and uneven tasks occur; the last shape takes the path for long groups.
    for (n, k) in [(1, 1), (3, 7), (5, 96), (130, 192), (1, 100_003)] {
        let granularities =
            [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(if k % 32 == 0 { 32 } else { k })];
        for args in all_args(&granularities) {
            let w = normal(n * k, (n * 31 + k) as u64);
            let (mut out, mut inside) = (vec![f32::NAN; n * k], vec![9u8; n * k]);
            fake_quant_weight(&w, n, k, &args, &mut out, &mut inside).unwrap();
            let shipped = QuantizedMatrix::quantize(&w, n, k, args).unwrap();
            assert_eq!(bits(&out), bits(&shipped.dequantize()), "{n}x{k} {args:?}");
            let per_scale = n * k / shipped.scales.len();
            for (i, (&x, &m)) in w.iter().zip(&inside).enumerate() {
                assert_eq!(args.fake_quantize(x, shipped.qparams(i / per_scale)).1, m == 1, "{n}x{k} {args:?} {i}");
            }
        }
    }
}

#[test]
fn any_thread_count_gives_the_same_bits() {
    let (n, k) = (257, 331);
    let w = normal(n * k, 5);
    for granularity in [Granularity::PerTensor, Granularity::PerChannel] {
        let args = QuantArgs::int4(granularity, FloatType::Bf16);
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let (mut out, mut inside) = (vec![0.0; n * k], vec![0u8; n * k]);
            pool.install(|| fake_quant_weight(&w, n, k, &args, &mut out, &mut inside)).unwrap();
            (bits(&out), inside)
        };
        let one = run(1);
        for threads in [2, 3, 7] {
            assert_eq!(run(threads), one);
        }
    }
}

#[test]
fn c001_f110_degenerate_groups_stay_finite() {
    let k = 64;
    let mut w = normal(k, 1);
    w.extend(vec![0.0; k]);
    w.extend((0..k).map(|i| if i % 2 == 0 { 1e-38 } else { -1e-38 }));
    w.extend((0..k).map(|i| if i == 5 { 1e30 } else { 1.0 }));
    for args in all_args(&[Granularity::PerChannel]) {
        let (mut out, mut inside) = (vec![0.0; 4 * k], vec![9u8; 4 * k]);
        let done = fake_quant_weight(&w, 4, k, &args, &mut out, &mut inside);
        assert!(out[..3 * k].iter().all(|v| v.is_finite()), "{args:?}");
        if args.scale_dtype == FloatType::F16 {
            assert!(matches!(done, Err(QuantError::ScaleOverflow { group: 3, .. })), "{done:?}");
            assert!(out[3 * k..].iter().all(|v| v.is_nan()));
        } else {
            assert!(done.is_ok() && out[3 * k..].iter().all(|v| v.is_finite()), "{args:?}");
        }
    }
}

#[test]
fn f112_a_value_that_is_not_finite_poisons_its_group_alone_and_is_named() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0usize, 3, 9] {
            let mut w = normal(4 * 10, 3);
            w[20 + at] = bad;
            let args = QuantArgs::int4(Granularity::PerChannel, FloatType::F32);
            let (mut out, mut inside) = (vec![0.0; 40], vec![9u8; 40]);
            let err = fake_quant_weight(&w, 4, 10, &args, &mut out, &mut inside).unwrap_err();
            assert!(matches!(err, QuantError::NonFinite { index, count: 1, .. } if index == 20 + at), "{err}");
            let nan: Vec<bool> = out.iter().map(|v| v.is_nan()).collect();
            assert_eq!(nan, (0..40).map(|i| (20..30).contains(&i)).collect::<Vec<_>>());
        }
    }
}

#[test]
fn the_gradient_passes_where_the_mask_is_open() {
    let mut grad = [1.0f32, f32::INFINITY, -3.0, f32::NAN];
    straight_through(&mut grad, &[1, 0, 1, 0]).unwrap();
    assert_eq!(grad, [1.0, 0.0, -3.0, 0.0]);
    assert!(straight_through(&mut grad, &[1]).is_err());
}

#[test]
fn f084_sizes_that_do_not_fit_are_refused() {
    let args = QuantArgs::int4(Granularity::PerGroup(3), FloatType::F32);
    let err = fake_quant_weight(&[0.0; 8], 2, 4, &args, &mut [0.0; 8], &mut [0; 8]).unwrap_err();
    assert_eq!(err, QuantError::GroupNotDividing { k: 4, group_size: 3 });
    let err = fake_quant_weight(&[0.0; 7], 2, 4, &args, &mut [0.0; 8], &mut [0; 8]).unwrap_err();
    assert!(matches!(err, QuantError::Length { what: "weight", expected: 8, got: 7 }));
}

#[test]
fn float_codes_land_where_the_shipped_matrix_lands() {
    for (n, k) in [(1, 32), (5, 96), (130, 192), (1, 100_000)] {
        let w = normal(n * k, (n + k) as u64);
        for mut args in float_args().into_iter().filter(|a| a.scale_shape(n, k).is_ok()) {
            for observer in [WeightObserver::MinMax, WeightObserver::Mse] {
                args.observer = observer;
                let own = args.has_global_scale().then(|| QuantArgs::global_scale(largest_magnitude(&w)));
                // Of a layer that shares it, three times as large.
                for global in [own, own.map(|g| g / 3.0)] {
                    let (mut out, mut inside) = (vec![f32::NAN; n * k], vec![9u8; n * k]);
                    fake_quant_weight_under(&w, n, k, &args, global, &mut out, &mut inside).unwrap();
                    let shipped = QuantizedMatrix::quantize_under(&w, n, k, args, global).unwrap();
                    assert_eq!(bits(&out), bits(&shipped.dequantize()), "{n}x{k} {args:?} {global:?}");
                    for (i, &x) in w.iter().enumerate() {
                        let p = shipped.qparams(shipped.scale_index(i / k, i % k / shipped.group_len()));
                        assert_eq!(inside[i] == 1, args.fake_quantize(x, p).1, "{args:?} {i}");
                    }
                }
                let (mut out, mut inside) = (vec![f32::NAN; n * k], vec![9u8; n * k]);
                fake_quant_weight(&w, n, k, &args, &mut out, &mut inside).unwrap();
                let shipped = QuantizedMatrix::quantize(&w, n, k, args).unwrap();
                assert_eq!(bits(&out), bits(&shipped.dequantize()), "{args:?}");
            }
        }
    }
    let mut none = [0.0; 16];
    for (args, global) in [(QuantArgs::nvfp4(), None), (QuantArgs::mxfp4(), Some(1.0))] {
        let k = if global.is_none() { 16 } else { 32 };
        let e = fake_quant_weight_under(&[1.0; 32][..k], 1, k, &args, global, &mut vec![0.0; k], &mut vec![0; k]);
        assert!(matches!(e.unwrap_err(), QuantError::Setting { field: "global_scale", .. }));
    }
    let e = fake_quant_weight_under(&[1.0; 16], 1, 16, &QuantArgs::nvfp4(), Some(1e6), &mut none, &mut [0; 16]);
    assert!(matches!(e.unwrap_err(), QuantError::ScaleOverflow { group: 0, .. }) && none.iter().all(|v| v.is_nan()));
}

#[test]
fn f112_a_block_with_a_value_that_is_not_finite_is_lost_and_no_other() {
    let (n, k) = (7, 100);
    let mut w = normal(n * k, 3);
    // Row 4, column 85: the last block of the second band.
    w[4 * k + 85] = f32::INFINITY;
    let args = QuantArgs::fp8(Granularity::PerBlock(3, 40), FloatType::F32);
    let (mut out, mut inside) = (vec![0.0; n * k], vec![9u8; n * k]);
    let e = fake_quant_weight(&w, n, k, &args, &mut out, &mut inside).unwrap_err();
    assert!(matches!(e, QuantError::NonFinite { index: 485, count: 1, .. }), "{e}");
    for (i, v) in out.iter().enumerate() {
        assert_eq!(v.is_nan(), (3..6).contains(&(i / k)) && i % k >= 80, "{i}");
    }
    w[4 * k + 85] = 1e9;
    let args = QuantArgs::fp8(Granularity::PerBlock(3, 40), FloatType::F16);
    let e = fake_quant_weight(&w, n, k, &args, &mut out, &mut inside).unwrap_err();
    assert!(matches!(e, QuantError::ScaleOverflow { group: 5, .. }), "{e}");
    // Of NVFP4 a value that is not finite does not move the global scale.
    let mut w = normal(64, 4);
    let largest = w[16..].iter().fold(0.0f32, |m, x| m.max(x.abs()));
    w[3] = f32::NEG_INFINITY;
    w[..16].iter_mut().filter(|v| v.is_finite()).for_each(|v| *v *= 1e-3);
    assert_eq!(largest_magnitude(&w), largest);
    let (mut out, mut inside) = (vec![0.0; 64], vec![9u8; 64]);
    let e = fake_quant_weight(&w, 2, 32, &QuantArgs::nvfp4(), &mut out, &mut inside).unwrap_err();
    assert!(matches!(e, QuantError::NonFinite { index: 3, .. }), "{e}");
    assert!(out[..16].iter().all(|v| v.is_nan()) && out[16..].iter().all(|v| v.is_finite()));
}

fn dynamic(args: QuantArgs) -> InputGrid {
    InputGrid { args, params: None }
}

#[test]
fn runs_of_a_token_have_scales_of_their_own() {
    let fp8 = QuantArgs::fp8(Granularity::PerTokenGroup(16), FloatType::F32);
    for (args, group) in [
        (
            fp8,
            QuantArgs { qtype: QuantType::Fp8E4M3, ..QuantArgs::int4(Granularity::PerTokenGroup(16), FloatType::F32) },
        ),
        (QuantArgs::mxfp4_tokens(), QuantArgs::mxfp4()),
        (
            QuantArgs::fp8(Granularity::PerToken, FloatType::F32),
            QuantArgs::fp8(Granularity::PerChannel, FloatType::F32),
        ),
    ] {
        let (m, k) = (3, 96);
        let mut x = normal(m * k, 5);
        x[..32].iter_mut().for_each(|v| *v *= 1e-3);
        let reference = QuantizedMatrix::quantize(&x, m, k, group).unwrap().dequantize();
        fake_quant_rows(&mut x, k, &dynamic(args)).unwrap();
        assert_eq!(bits(&x), bits(&reference), "{args:?}");
    }
    // NVFP4: under the global scale of a whole text, which is not that of these values.
    let grid = InputGrid::of_range(QuantArgs::nvfp4_tokens(), -3.0, 7.5).unwrap();
    let global = grid.params.map(|p| p.scale);
    assert_eq!(global, Some(QuantArgs::global_scale(7.5)));
    let mut x = normal(3 * 96, 6);
    let reference = QuantizedMatrix::quantize_under(&x, 3, 96, QuantArgs::nvfp4(), global).unwrap().dequantize();
    fake_quant_rows(&mut x, 96, &grid).unwrap();
    assert_eq!(bits(&x), bits(&reference));
    // Beyond the largest value of calibration a run clips: scale 448 over the global one, largest code 6.
    let mut x = [0.5f32; 16];
    x[3] = 75.0;
    fake_quant_rows(&mut x, 16, &grid).unwrap();
    assert_eq!((x[3], x[0]), (448.0 / global.unwrap() * 6.0, 448.0 / global.unwrap() * 0.5));
    // With the mask: the same values, and closed where one clips.
    let mut x = normal(3 * 96, 6);
    x[100] = 75.0;
    let (mut masked, mut inside) = (x.clone(), vec![9u8; x.len()]);
    let want: Vec<u8> = x
        .chunks(16)
        .flat_map(|run| {
            let (lo, hi) = run.iter().fold((0.0f32, 0.0f32), |(lo, hi), v| (lo.min(*v), hi.max(*v)));
            let p = grid.run_qparams(lo, hi).unwrap();
            run.iter().map(|v| u8::from(grid.args.fake_quantize(*v, p).1)).collect::<Vec<u8>>()
        })
        .collect();
    fake_quant_rows_masked(&mut masked, 96, &grid, &mut inside).unwrap();
    fake_quant_rows(&mut x, 96, &grid).unwrap();
    assert_eq!((bits(&masked), &inside, inside[100]), (bits(&x), &want, 0));
    assert!(fake_quant_rows_masked(&mut x, 96, &grid, &mut inside[1..]).is_err());
    assert!(matches!(
        fake_quant_rows(&mut [1.0; 24], 24, &dynamic(fp8)),
        Err(QuantError::GroupNotDividing { k: 24, group_size: 16 })
    ));
}

#[test]
fn rows_in_place_are_those_of_a_weight_with_a_scale_for_each_row() {
    let symmetric = QuantArgs {
        qtype: QuantType::Int8,
        granularity: Granularity::PerToken,
        ..QuantArgs::int4(Granularity::PerToken, FloatType::F32)
    };
    for args in [symmetric, QuantArgs { mapping: Mapping::Asymmetric, ..symmetric }] {
        for (m, k) in [(1, 1), (3, 7), (5, 64), (2, 1000)] {
            let mut x = normal(m * k, 11);
            x[..k].iter_mut().for_each(|v| *v *= 1e-3);
            let (mut out, mut inside) = (vec![0.0; m * k], vec![0u8; m * k]);
            fake_quant_weight(&x, m, k, &args, &mut out, &mut inside).unwrap();
            let reference = QuantizedMatrix::quantize(&x, m, k, args).unwrap().dequantize();
            let fixed = InputGrid::of_range(args, -0.5, 0.75).unwrap();
            let mut held = x.clone();
            let p = fixed.params.unwrap();
            let want: Vec<f32> = x.iter().map(|&v| args.fake_quantize(v, p).0).collect();
            fake_quant_rows(&mut x, k, &dynamic(args)).unwrap();
            assert_eq!(bits(&x), bits(&out));
            assert_eq!(bits(&x), bits(&reference));
            fake_quant_rows(&mut held, k, &fixed).unwrap();
            assert_eq!(bits(&held), bits(&want), "stored parameters do not look at the values");
        }
    }
    // A token that is not finite is lost, and no other.
    let mut x = [1.0, 2.0, f32::NAN, 4.0, 5.0, 6.0];
    let symmetric = dynamic(symmetric);
    assert!(matches!(fake_quant_rows(&mut x, 2, &symmetric), Err(QuantError::NonFinite { .. })));
    assert!(x[2].is_nan() && x[3].is_nan() && x[0].is_finite() && x[5].is_finite());
    assert!(fake_quant_rows(&mut x, 4, &symmetric).is_err());
    assert!(fake_quant_rows(&mut [], 4, &symmetric).is_ok());
}
