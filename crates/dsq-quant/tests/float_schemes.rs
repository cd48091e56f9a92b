//! The float-coded schemes as a caller uses them: FP8 for a tensor, a row or a block, NVFP4, MXFP4. Not the formats
//! themselves (see `minifloat.rs`), and not compressed-tensors' answers (see `dsq-checkpoint`).

use dsq_quant::{FloatType, Granularity, MiniFloat, QParams, QuantArgs, QuantError, QuantType, QuantizedMatrix};
use proptest::prelude::*;

fn normal(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..n).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
}

fn schemes() -> Vec<QuantArgs> {
    let mut out = vec![QuantArgs::nvfp4(), QuantArgs::mxfp4()];
    for granularity in [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerBlock(3, 40)] {
        for dtype in FloatType::ALL {
            for qtype in [QuantType::Fp8E4M3, QuantType::Fp8E5M2] {
                out.push(QuantArgs { qtype, ..QuantArgs::fp8(granularity, dtype) });
            }
        }
    }
    out
}

/// Which scale covers an element, said again without the walks of the crate.
fn scale_of(args: &QuantArgs, k: usize, row: usize, column: usize) -> usize {
    match args.granularity {
        Granularity::PerTensor => 0,
        Granularity::PerChannel | Granularity::PerToken => row,
        Granularity::PerGroup(g) | Granularity::PerTokenGroup(g) => row * (k / g) + column / g,
        Granularity::PerBlock(r, c) => row / r * k.div_ceil(c) + column / c,
    }
}

/// The least squared error that any choice of codes can have on the scales of `q`, in f64.
fn best_error(q: &QuantizedMatrix, w: &[f32]) -> f64 {
    let f = q.args.qtype.float().unwrap();
    let values: Vec<f64> =
        (0..1u16 << f.bits()).map(|c| c as u8).filter(|&c| f.is_finite(c)).map(|c| f64::from(f.decode(c))).collect();
    let global = q.global_scale.map_or(1.0, f64::from);
    w.iter()
        .enumerate()
        .map(|(i, &x)| {
            let scale = f64::from(q.scales[scale_of(&q.args, q.k, i / q.k, i % q.k)]) / global;
            values.iter().map(|v| (v * scale - f64::from(x)).powi(2)).fold(f64::INFINITY, f64::min)
        })
        .sum()
}

#[test]
fn the_error_is_the_least_that_the_grid_allows() {
    let (n, k) = (7, 96);
    for (seed, args) in schemes().into_iter().enumerate() {
        let w = normal(n * k, seed as u64 + 1);
        let q = QuantizedMatrix::quantize(&w, n, k, args).unwrap();
        let error: f64 = q.dequantize().iter().zip(&w).map(|(v, x)| (f64::from(*v) - f64::from(*x)).powi(2)).sum();
        let best = best_error(&q, &w);
        // Rounding of the quotient and of the product: far below a step.
        assert!(error >= best * (1.0 - 1e-5) && error <= best * (1.0 + 1e-5), "{args:?}: {error} against {best}");
    }
}

#[test]
fn c015_blocks_of_every_size_have_the_scales_and_codes_of_their_own_values() {
    let w = normal(300 * 200, 5);
    for (n, k, rows, columns) in
        [(300, 200, 128, 128), (128, 128, 128, 128), (1, 1, 128, 128), (5, 130, 2, 64), (7, 9, 3, 4)]
    {
        let w = &w[..n * k];
        let args = QuantArgs::fp8(Granularity::PerBlock(rows, columns), FloatType::F32);
        let q = QuantizedMatrix::quantize(w, n, k, args).unwrap();
        let [down, across] = args.scale_shape(n, k).unwrap();
        assert_eq!([down, across], [n.div_ceil(rows), k.div_ceil(columns)]);
        let mut largest = vec![0.0f32; down * across];
        for (i, x) in w.iter().enumerate() {
            let at = scale_of(&args, k, i / k, i % k);
            largest[at] = largest[at].max(x.abs());
        }
        assert_eq!(q.scales, largest.iter().map(|m| m / 448.0).collect::<Vec<_>>());
        for (i, &x) in w.iter().enumerate() {
            let at = scale_of(&args, k, i / k, i % k);
            assert_eq!(at, q.scale_index(i / k, i % k / q.group_len()));
            let p = QParams { scale: q.scales[at], zero: 0 };
            assert_eq!(q.codes[i], args.quantize(x, p));
        }
    }
}

#[test]
fn c001_degenerate_groups_stay_finite_and_leave_others_alone() {
    let k = 256;
    let mut w = normal(k, 1);
    w.extend((0..k).map(|i| if i % 2 == 0 { 1e-30 } else { -1e-30 }));
    w.extend(vec![0.0; k]);
    w.extend((0..k).map(|i| if i == 5 { 1e-38 } else { 0.0 }));
    for args in schemes() {
        let q = QuantizedMatrix::quantize(&w, 4, k, args).unwrap();
        assert!(q.scales.iter().all(|s| s.is_finite() && *s > 0.0));
        let values = q.dequantize();
        for (v, x) in values[k..].iter().zip(&w[k..]) {
            assert!(v.is_finite() && (v - x).abs() <= 1e-30, "{args:?}: {x} -> {v}");
        }
        if !matches!(args.granularity, Granularity::PerBlock(..)) {
            assert_eq!(values[..k], QuantizedMatrix::quantize(&w[..k], 1, k, args).unwrap().dequantize());
        }
        let zero = QuantizedMatrix::quantize(&vec![0.0; 4 * k], 4, k, args).unwrap();
        assert!(zero.codes.iter().all(|c| *c == 0) && zero.dequantize().iter().all(|v| *v == 0.0));
        let degenerate = QuantizedMatrix::degenerate_groups(&w, 4, k, args).unwrap();
        assert_eq!(degenerate.is_empty(), args.granularity == Granularity::PerTensor, "{args:?}");
    }
}

#[test]
fn c005_scales_that_overflow_name_group_and_value() {
    let mut w = normal(4 * 64, 2);
    w[2 * 64 + 40] = 4e7;
    let overflow = |args: QuantArgs, w: &[f32]| match QuantizedMatrix::quantize(w, 4, 64, args).unwrap_err() {
        QuantError::ScaleOverflow { group, hi, dtype, .. } => (group, hi, dtype),
        other => panic!("{other}"),
    };
    let f16 = |granularity| QuantArgs::fp8(granularity, FloatType::F16);
    assert_eq!(overflow(f16(Granularity::PerChannel), &w), (2, 4e7, FloatType::F16));
    assert_eq!(overflow(f16(Granularity::PerTensor), &w), (0, 4e7, FloatType::F16));
    assert_eq!(overflow(f16(Granularity::PerBlock(2, 32)), &w), (3, 4e7, FloatType::F16));
    // 2^127 is the largest MX scale; from 1.75 * 2^127 on the power would be 2^128.
    w[70] = 1.75 * 2f32.powi(127);
    assert_eq!(overflow(QuantArgs::mxfp4(), &w), (2, 1.75 * 2f32.powi(127), FloatType::F8E8M0));
    w[70] = 1.7 * 2f32.powi(127);
    QuantizedMatrix::quantize(&w, 4, 64, QuantArgs::mxfp4()).unwrap();
    // A global scale that is not this tensor's.
    let e = QuantizedMatrix::quantize_under(&[1.0; 16], 1, 16, QuantArgs::nvfp4(), Some(1e6)).unwrap_err();
    assert!(matches!(e, QuantError::ScaleOverflow { group: 0, dtype: FloatType::F8E4M3, .. }), "{e}");
}

#[test]
fn f022_non_finite_weights_and_codes_are_refused() {
    for args in schemes() {
        let mut w = normal(64, 4);
        w[7] = f32::NAN;
        let e = QuantizedMatrix::quantize(&w, 2, 32, args);
        let e = e.unwrap_err();
        assert!(matches!(e, QuantError::NonFinite { index: 7, count: 1, .. }), "{e}");
        w[7] = 1.0;
        let mut q = QuantizedMatrix::quantize(&w, 2, 32, args).unwrap();
        q.codes[9] = if args.qtype == QuantType::Fp4E2M1 { 16 } else { 0x7f };
        let e = q.validate().unwrap_err();
        assert!(matches!(e, QuantError::BadCode { index: 9, .. }), "{e}");
    }
}

#[test]
fn parts_that_do_not_fit_together_are_refused() {
    let fp8 = QuantArgs::fp8(Granularity::PerChannel, FloatType::F32);
    for args in [
        QuantArgs { mapping: dsq_quant::Mapping::Asymmetric, ..fp8 },
        QuantArgs { granularity: Granularity::PerGroup(16), ..fp8 },
        QuantArgs { granularity: Granularity::PerBlock(0, 128), ..fp8 },
        QuantArgs { scale_dtype: FloatType::F8E8M0, ..fp8 },
        QuantArgs { qtype: QuantType::Fp4E2M1, ..fp8 },
        QuantArgs { granularity: Granularity::PerGroup(32), ..QuantArgs::nvfp4() },
        QuantArgs { qtype: QuantType::Int4, ..QuantArgs::nvfp4() },
        QuantArgs { qtype: QuantType::Int8, granularity: Granularity::PerBlock(128, 128), ..fp8 },
    ] {
        let e = QuantizedMatrix::quantize(&[1.0; 64], 1, 64, args).unwrap_err();
        assert!(matches!(e, QuantError::Setting { .. }), "{args:?}: {e}");
    }
    let under = |args, global| QuantizedMatrix::quantize_under(&[1.0; 64], 1, 64, args, global);
    for e in [under(fp8, Some(1.0)), under(QuantArgs::nvfp4(), None)] {
        assert!(matches!(e.unwrap_err(), QuantError::Setting { field: "global_scale", .. }));
    }
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        let e = under(QuantArgs::nvfp4(), Some(bad)).unwrap_err();
        assert!(matches!(e, QuantError::BadQParam { what: "global scale", .. }), "{e}");
    }
    let e = QuantizedMatrix::quantize(&[1.0; 40], 1, 40, QuantArgs::nvfp4()).unwrap_err();
    assert_eq!(e, QuantError::GroupNotDividing { k: 40, group_size: 16 });
}

/// The examples of docs/numerics.md.
#[test]
fn the_worked_examples_of_the_documentation() {
    let w = [0.7f32, -0.35, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3];
    let q = QuantizedMatrix::quantize(&w, 1, 8, QuantArgs::fp8(Granularity::PerChannel, FloatType::Bf16)).unwrap();
    assert_eq!(q.scales, [0.001_564_025_9]);
    assert_eq!(q.codes.iter().map(|&c| c as u8).collect::<Vec<_>>(), [0x7e, 0xf6, 0x60, 0x68, 0x6c, 0x70, 0x72, 0x74]);
    let values: Vec<f32> = q.codes.iter().map(|&c| MiniFloat::E4M3.decode(c as u8)).collect();
    assert_eq!(values, [448.0, -224.0, 32.0, 64.0, 96.0, 128.0, 160.0, 192.0]);

    let mut group = w.to_vec();
    group.extend([0.0; 8]);
    let q = QuantizedMatrix::quantize(&group, 1, 16, QuantArgs::nvfp4()).unwrap();
    assert_eq!((q.global_scale, &q.scales[..]), (Some(3840.0), &[448.0][..]));
    assert_eq!(q.codes[..8], [7, 13, 1, 2, 3, 3, 4, 5]);
    assert_eq!(q.qparams(0).scale, 0.11666667);

    group.extend([0.0; 16]);
    let q = QuantizedMatrix::quantize(&group, 1, 32, QuantArgs::mxfp4()).unwrap();
    assert_eq!(q.scales, [0.125]);
    assert_eq!(q.codes[..8], [7, 13, 1, 2, 2, 3, 4, 4]);
    assert_eq!(q.dequantize()[..8], [0.75, -0.375, 0.0625, 0.125, 0.125, 0.1875, 0.25, 0.25]);
}

#[test]
fn layers_that_share_a_global_scale_take_that_of_the_largest() {
    let (small, large) = (normal(4 * 32, 1), normal(4 * 32, 2).iter().map(|x| x * 8.0).collect::<Vec<_>>());
    let largest = |w: &[f32]| w.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let shared = QuantArgs::global_scale(largest(&large));
    let q = QuantizedMatrix::quantize_under(&small, 4, 32, QuantArgs::nvfp4(), Some(shared)).unwrap();
    let alone = QuantizedMatrix::quantize(&small, 4, 32, QuantArgs::nvfp4()).unwrap();
    assert_eq!(q.global_scale, Some(shared));
    assert!(q.scales.iter().zip(&alone.scales).all(|(a, b)| a < b), "smaller local scales under a smaller divisor");
    assert_eq!([0.0, 1e-38, 1e-36].map(QuantArgs::global_scale), [1.0; 3]);
    assert_eq!(QuantArgs::global_scale(2688.0), 1.0);
}

proptest! {
    #[test]
    fn requantizing_the_grid_with_its_own_scales_is_exact(seed in 0u64..1000, which in 0usize..20, exponent in -20i32..20) {
        let (n, k) = (6, 96);
        let w: Vec<f32> = normal(n * k, seed).iter().map(|x| x * 2f32.powi(exponent)).collect();
        let args = schemes()[which];
        let Ok(q) = QuantizedMatrix::quantize(&w, n, k, args) else {
            prop_assert!(args.scale_dtype == FloatType::F16, "only f16 scales overflow here");
            return Ok(());
        };
        let stored: Vec<_> = q.scales.iter().map(|&scale| QParams { scale, zero: 0 }).collect();
        let values = q.dequantize();
        let again = QuantizedMatrix::quantize_on(&values, n, k, args, &stored, q.global_scale).unwrap();
        // A code of -0 in FP4 comes back as 0; nothing else may change.
        let plain = |codes: &[i8]| codes.iter().map(|&c| if c == 8 && args.qtype == QuantType::Fp4E2M1 { 0 } else { c }).collect::<Vec<_>>();
        prop_assert_eq!(plain(&again.codes), plain(&q.codes));
        prop_assert_eq!(again.dequantize(), values);
        // Fake quantization gives the same values, and lets the gradient pass where nothing was clipped.
        for (i, x) in w.iter().enumerate() {
            let p = q.qparams(q.scale_index(i / k, i % k / q.group_len()));
            let (v, inside) = args.fake_quantize(*x, p);
            prop_assert_eq!(v.to_bits(), q.dequantize_one(i).to_bits());
            prop_assert_eq!(inside, (x / p.scale).abs() <= args.qtype.qmax() as f32);
        }
    }
}

trait One {
    fn dequantize_one(&self, i: usize) -> f32;
}

impl One for QuantizedMatrix {
    fn dequantize_one(&self, i: usize) -> f32 {
        self.args.dequantize(self.codes[i], self.qparams(scale_of(&self.args, self.k, i / self.k, i % self.k)))
    }
}
