//! Tests of the linear layers: against the scalar reference (bits), the reference against f64 (derived bound).

use super::*;
use dsq_quant::{Granularity, Mapping, QuantArgs};
use proptest::prelude::*;

/// Numbers in about [-1, 1], from a seed.
pub(super) fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..len)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            (s >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

pub(super) fn args(bits: usize, granularity: Granularity, mapping: Mapping, scale_dtype: FloatType) -> QuantArgs {
    let qtype = QuantType::INTS.into_iter().find(|q| q.bits() == bits).unwrap();
    QuantArgs { qtype, mapping, ..QuantArgs::int4(granularity, scale_dtype) }
}

/// Runs a quantized matrix on a path, with its padding poisoned.
fn run(q: &QuantizedMatrix, isa: Isa, x: &[f32], m: usize) -> Vec<f32> {
    let mut panels = Panels::pack_codes(q).unwrap();
    panels.poison_padding();
    let mut out = vec![f32::NAN; m * q.n];
    matmul(&[(&panels, isa)], x, m, &mut [&mut out]);
    out
}

pub(super) fn assert_bits(got: &[f32], want: &[f32], what: &str) {
    for (i, (a, b)) in got.iter().zip(want).enumerate() {
        assert_eq!(a.to_bits(), b.to_bits(), "{what}: output {i}: {a} against {b}");
    }
}

/// Every path equals the reference bit for bit, and the reference equals f64 within the bound of the header.
fn check(q: &QuantizedMatrix, m: usize, x: &[f32], what: &str) {
    let mut want = vec![0.0; m * q.n];
    matmul_reference(q, x, m, &mut want);
    for isa in Isa::supported() {
        assert_bits(&run(q, isa, x, m), &want, &format!("{what} {isa:?} m {m} n {} k {}", q.n, q.k));
    }
    let w = q.dequantize();
    let segments = q.k.div_ceil(q.group_len().max(1)) * q.group_len().div_ceil(layout::SEGMENT);
    for t in 0..m {
        for row in 0..q.n {
            let (mut exact, mut magnitude) = (0.0f64, 0.0f64);
            for i in 0..q.k {
                // The grid value itself carries one rounding, which the kernel does not make: recompute it in f64.
                let p = q.qparams(q.scale_index(row, i / q.group_len()));
                let value = f64::from(q.args.code_value(q.codes[row * q.k + i], p.zero)) * f64::from(p.scale);
                assert!((value - f64::from(w[row * q.k + i])).abs() <= value.abs() * 2f64.powi(-24) + 1e-45);
                let term = value * f64::from(x[t * q.k + i]);
                exact += term;
                magnitude += term.abs();
            }
            let bound = (64 + segments) as f64 * 2f64.powi(-24) * magnitude + 1e-40;
            let got = f64::from(want[t * q.n + row]);
            assert!((got - exact).abs() <= bound, "{what}: {got} against {exact}, bound {bound:e}");
        }
    }
}

#[test]
fn every_shape_grouping_and_mapping_equals_the_reference() {
    let shapes = [(1, 8), (2, 24), (3, 40), (16, 64), (17, 96), (33, 120), (48, 200), (65, 576)];
    for (case, &(n, k)) in shapes.iter().enumerate() {
        for granularity in
            [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(8), Granularity::PerGroup(k / 2)]
        {
            for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                for bits in [2, 3, 4, 8] {
                    let dtype = FloatType::ALL[case % 3];
                    let w = numbers(n * k, case as u64 + 1);
                    let q = QuantizedMatrix::quantize(&w, n, k, args(bits, granularity, mapping, dtype)).unwrap();
                    for m in [1, 2, 5, 9] {
                        let x = numbers(m * k, 77 + m as u64);
                        check(&q, m, &x, &format!("{granularity:?} {mapping:?} int{bits} {dtype}"));
                    }
                }
            }
        }
    }
}

#[test]
fn float_codes_of_every_scheme_and_shape_equal_the_reference() {
    let shapes = [(1, 8), (2, 24), (3, 40), (16, 64), (17, 96), (33, 120), (48, 200), (65, 576), (40, 300)];
    for (case, &(n, k)) in shapes.iter().enumerate() {
        let dtype = FloatType::ALL[case % 3];
        let fp8 = |granularity| QuantArgs::fp8(granularity, dtype);
        let mut all = vec![
            fp8(Granularity::PerTensor),
            fp8(Granularity::PerChannel),
            fp8(Granularity::PerBlock(128, 128)),
            fp8(Granularity::PerBlock(5, 7)),
            fp8(Granularity::PerBlock(1, 70)),
            QuantArgs { qtype: QuantType::Fp8E5M2, ..fp8(Granularity::PerChannel) },
        ];
        all.extend([QuantArgs::nvfp4(), QuantArgs::mxfp4()].into_iter().filter(|a| a.group_len(k).is_ok()));
        for args in all {
            let q = QuantizedMatrix::quantize(&numbers(n * k, case as u64 + 1), n, k, args).unwrap();
            for m in [1, 2, 5, 9, 13] {
                check(&q, m, &numbers(m * k, 77 + m as u64), &format!("{args:?}"));
            }
        }
    }
}

/// Every finite code, and every scale that one byte can hold, comes out exactly; on every path.
#[test]
fn every_float_code_and_one_byte_scale_is_read_exactly() {
    for args in [QuantArgs::fp8(Granularity::PerChannel, FloatType::F32), QuantArgs::nvfp4(), QuantArgs::mxfp4()] {
        for e5m2 in [false, true] {
            let mut args = args;
            if e5m2 && args.qtype == QuantType::Fp8E4M3 {
                args.qtype = QuantType::Fp8E5M2;
            }
            let format = args.qtype.float().unwrap();
            let codes: Vec<u8> = (0..=255u8).filter(|&c| format.is_finite(c)).collect();
            // A row for each scale, which holds every code.
            let (bytes, n): (Vec<u8>, usize) = match args.scale_dtype {
                FloatType::F8E4M3 => ((1..0x7f).collect(), 126),
                FloatType::F8E8M0 => ((0..255).collect(), 255),
                _ => (vec![0], 1),
            };
            let scale_of = |b: u8| match args.scale_dtype {
                FloatType::F8E4M3 => dsq_quant::MiniFloat::E4M3.decode(b),
                FloatType::F8E8M0 => dsq_quant::e8m0_decode(b),
                _ => 1.0,
            };
            let k = codes.len().next_multiple_of(32);
            let row: Vec<i8> = codes.iter().copied().chain(std::iter::repeat(0)).take(k).map(|c| c as i8).collect();
            let groups = k / args.group_len(k).unwrap();
            let q = QuantizedMatrix {
                args,
                n,
                k,
                codes: row.repeat(n),
                scales: bytes.iter().flat_map(|&b| vec![scale_of(b); groups]).collect(),
                zeros: vec![],
                global_scale: args.has_global_scale().then_some(3.0),
            };
            let mut x = vec![0.0f32; k * k];
            for i in 0..k {
                x[i * k + i] = 1.0;
            }
            let values = q.dequantize();
            let panels = Panels::pack_codes(&q).unwrap();
            let mut read = vec![0.0; k];
            for r in 0..n {
                panels.row(r, &mut read);
                assert_bits(&read, &values[r * k..][..k], "row");
            }
            for isa in Isa::supported() {
                let out = run(&q, isa, &x, k);
                for i in 0..k {
                    let one = run(&q, isa, &x[i * k..(i + 1) * k], 1);
                    for r in 0..n {
                        // A sum that starts at +0 does not keep the sign of a zero.
                        let want = values[r * k + i] + 0.0;
                        assert_eq!(out[i * n + r].to_bits(), want.to_bits(), "{args:?} {isa:?} code {i} scale {r}");
                        assert_eq!(one[r].to_bits(), want.to_bits(), "{args:?} {isa:?} code {i} scale {r}, one token");
                    }
                }
            }
        }
    }
}

#[test]
fn layers_of_float_codes_say_what_they_do_and_refuse_the_others() {
    let w = numbers(4 * 32, 1);
    let matrix = |args| QuantizedMatrix::quantize(&w, 4, 32, args).unwrap();
    let fp8 = matrix(QuantArgs::fp8(Granularity::PerChannel, FloatType::F32));
    let (nvfp4, int4) =
        (matrix(QuantArgs::nvfp4()), matrix(args(4, Granularity::PerChannel, Mapping::Symmetric, FloatType::F32)));
    let described = |q| Linear::new(q).unwrap().describe();
    assert!(described(&fp8).starts_with("fp8 e4m3 weights widened to f32 in registers, f32 activations: "));
    assert!(described(&nvfp4).starts_with("fp4 e2m1 weights looked up as f32 in a register, f32 activations: "));
    assert!(described(&int4).starts_with("int4 weights, f32 activations: "));
    assert!(Fp8Linear::new(&nvfp4).is_err() && Fp4Linear::new(&fp8).is_err() && Int4Linear::new(&nvfp4).is_err());
    assert!(Int8Linear::new(&fp8).is_err());
    for dtype in [FloatType::F8E4M3, FloatType::F8E8M0] {
        let e = FloatLinear::new(&w, 4, 32, dtype).unwrap_err();
        assert!(matches!(e, QuantError::Setting { field: "dtype", .. }), "{e}");
    }
    let mut nan = fp8.clone();
    nan.codes[3] = 0x7f;
    assert!(matches!(Fp8Linear::new(&nan).unwrap_err(), QuantError::BadCode { index: 3, code: 0x7f }));
}

#[test]
fn group_sizes_of_the_field_and_every_m_up_to_one_chunk_and_more() {
    for (k, g) in [(128, 32), (192, 64), (256, 128), (384, 192), (36, 12), (7, 7), (15, 5)] {
        let n = 37;
        let q = QuantizedMatrix::quantize(
            &numbers(n * k, 5),
            n,
            k,
            args(4, Granularity::PerGroup(g), Mapping::Symmetric, FloatType::F16),
        )
        .unwrap();
        for m in (1..=13).chain([47, 48, 49, 100]) {
            let x = numbers(m * k, m as u64);
            let mut want = vec![0.0; m * n];
            matmul_reference(&q, &x, m, &mut want);
            for isa in Isa::supported() {
                assert_bits(&run(&q, isa, &x, m), &want, &format!("{isa:?} group {g} m {m}"));
            }
        }
    }
}

#[test]
fn extreme_codes_and_zero_groups() {
    let (n, k, g) = (19, 128, 32);
    for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
        let a = args(4, Granularity::PerGroup(g), mapping, FloatType::F32);
        let mut q = QuantizedMatrix::quantize(&numbers(n * k, 9), n, k, a).unwrap();
        for (i, c) in q.codes.iter_mut().enumerate() {
            *c = [-8, 7, -8, 0][i % 4];
        }
        // Row 3 has a group of zeros; row 4 is all zeros.
        q.codes[3 * k + g..3 * k + 2 * g].fill(0);
        q.codes[4 * k..5 * k].fill(0);
        if mapping == Mapping::Asymmetric {
            for (i, z) in q.zeros.iter_mut().enumerate() {
                *z = [-8, 7, 0][i % 3];
            }
            q.zeros[4 * k / g..5 * k / g].fill(0);
        }
        for m in [1, 4] {
            check(&q, m, &numbers(m * k, 3), "extreme codes");
            let out = run(&q, Isa::detect(), &numbers(m * k, 3), m);
            assert!((0..m).all(|t| out[t * n + 4] == 0.0), "a row of zeros gives zero");
        }
    }
}

#[test]
fn one_hot_inputs_read_back_the_exact_codes() {
    let (n, k) = (21, 88);
    let a = args(4, Granularity::PerChannel, Mapping::Symmetric, FloatType::F32);
    let mut q = QuantizedMatrix::quantize(&numbers(n * k, 4), n, k, a).unwrap();
    q.scales.fill(1.0);
    let mut x = vec![0.0f32; k * k];
    for i in 0..k {
        x[i * k + i] = 1.0;
    }
    let out = run(&q, Isa::detect(), &x, k);
    for i in 0..k {
        assert_eq!(&run(&q, Isa::detect(), &x[i * k..(i + 1) * k], 1), &out[i * n..(i + 1) * n]);
        for row in 0..n {
            assert_eq!(out[i * n + row], f32::from(q.codes[row * k + i]));
        }
    }
}

#[test]
fn any_thread_count_gives_the_same_bits() {
    let (n, k) = (130, 192);
    let a = args(4, Granularity::PerGroup(64), Mapping::Symmetric, FloatType::F16);
    let layer = Int4Linear::new(&QuantizedMatrix::quantize(&numbers(n * k, 6), n, k, a).unwrap()).unwrap();
    for m in [1, 7, 60] {
        let x = numbers(m * k, 8);
        let outs: Vec<Vec<f32>> = [1, 2, 3, 5]
            .map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                let mut out = vec![0.0; m * n];
                pool.install(|| layer.matmul(&x, m, &mut out));
                out
            })
            .into();
        for o in &outs[1..] {
            assert_bits(o, &outs[0], "threads");
        }
    }
}

#[test]
fn float_storage_equals_a_plain_loop_over_the_rounded_weights() {
    for (n, k) in [(1, 1), (5, 7), (16, 64), (33, 130)] {
        for dtype in FloatType::ALL {
            let w: Vec<f32> = numbers(n * k, 2).iter().map(|&x| dtype.round(x)).collect();
            let layer = FloatLinear::new(&w, n, k, dtype).unwrap();
            let mut row = vec![0.0; k];
            for r in 0..n {
                layer.row(r, &mut row);
                assert_eq!(row, w[r * k..(r + 1) * k]);
            }
            for m in [1, 3, 50] {
                let x = numbers(m * k, 11);
                let mut want = vec![0.0f32; m * n];
                for t in 0..m {
                    for r in 0..n {
                        want[t * n + r] = (0..k).step_by(64).fold(0.0, |total, from| {
                            total
                                + (from..k.min(from + 64))
                                    .fold(0.0f32, |part, i| w[r * k + i].mul_add(x[t * k + i], part))
                        });
                    }
                }
                for isa in Isa::supported() {
                    let layer = layer.clone().with_isa(isa);
                    let mut out = vec![0.0; m * n];
                    layer.matmul(&x, m, &mut out);
                    assert_bits(&out, &want, &format!("{isa:?} {dtype} m {m}"));
                }
            }
        }
    }
}

#[test]
fn rows_read_back_as_dequantized() {
    let (n, k) = (18, 48);
    for bits in [2, 3, 4, 8] {
        let a = args(bits, Granularity::PerGroup(12), Mapping::Asymmetric, FloatType::Bf16);
        let q = QuantizedMatrix::quantize(&numbers(n * k, 12), n, k, a).unwrap();
        let panels = Panels::pack_codes(&q).unwrap();
        let mut out = vec![0.0; n * k];
        for row in 0..n {
            panels.row(row, &mut out[row * k..(row + 1) * k]);
        }
        assert_eq!(out, q.dequantize());
    }
}

#[test]
fn several_layers_at_once_equal_one_by_one() {
    let k = 96;
    let layers: Vec<Linear> = [40usize, 7, 64]
        .iter()
        .map(|&n| {
            let a = args(4, Granularity::PerGroup(32), Mapping::Symmetric, FloatType::F16);
            let q = QuantizedMatrix::quantize(&numbers(n * k, n as u64), n, k, a).unwrap();
            Linear::Int4(Int4Linear::new(&q).unwrap())
        })
        .chain([Linear::Float(FloatLinear::new(&numbers(20 * k, 1), 20, k, FloatType::F16).unwrap())])
        .collect();
    for m in [1, 3, 100] {
        let x = numbers(m * k, 5);
        let mut outs: Vec<Vec<f32>> = layers.iter().map(|l| vec![0.0; m * l.n()]).collect();
        let refs: Vec<&Linear> = layers.iter().collect();
        matmul_many(&refs, &x, m, &mut outs.iter_mut().map(|o| &mut o[..]).collect::<Vec<_>>());
        for (l, out) in layers.iter().zip(&outs) {
            let mut alone = vec![0.0; m * l.n()];
            l.matmul(&x, m, &mut alone);
            assert_bits(out, &alone, "alone");
        }
    }
}

#[test]
fn empty_shapes_are_no_accident() {
    let layer = FloatLinear::new(&[], 3, 0, FloatType::F32).unwrap();
    for m in [0, 1, 2] {
        let mut out = vec![1.0; m * 3];
        layer.matmul(&[], m, &mut out);
        assert_eq!(out, vec![0.0; m * 3]);
    }
    FloatLinear::new(&[], 0, 4, FloatType::F32).unwrap().matmul(&[1.0; 8], 2, &mut []);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn random_shapes_equal_the_reference(n in 1usize..70, groups in 1usize..5, g in 1usize..90, m in 1usize..30, seed: u64, asym: bool, dtype in 0usize..3) {
        let k = groups * g;
        let mapping = if asym { Mapping::Asymmetric } else { Mapping::Symmetric };
        let a = args(4, Granularity::PerGroup(g), mapping, FloatType::ALL[dtype]);
        let q = QuantizedMatrix::quantize(&numbers(n * k, seed), n, k, a).unwrap();
        let x = numbers(m * k, seed ^ 1);
        let mut want = vec![0.0; m * n];
        matmul_reference(&q, &x, m, &mut want);
        for isa in Isa::supported() {
            let got = run(&q, isa, &x, m);
            prop_assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?}");
        }
    }
}

/// Columns in an order of their own: the product of gathered inputs, one layer or several at once, and rows by input.
#[test]
fn layers_with_an_order_of_columns_gather_their_inputs() {
    let (n, k, m) = (24, 64, 5);
    let x = numbers(m * k, 90);
    let groups: Vec<usize> = (0..k).map(|i| i * 7 % k / 32).collect();
    let order = dsq_quant::ColumnOrder::from_groups(&groups);
    let args = QuantArgs::int4(Granularity::PerGroup(32), FloatType::F16);
    let q: Vec<QuantizedMatrix> =
        (0..3).map(|i| QuantizedMatrix::quantize(&numbers(n * k, 91 + i), n, k, args).unwrap()).collect();
    let plain: Vec<Linear> = q.iter().map(|q| Linear::new(q).unwrap()).collect();
    let ordered: Vec<Linear> = q.iter().map(|q| Linear::ordered(q, order.clone()).unwrap()).collect();
    let gathered = order.gather(&x);
    let run = |l: &Linear, x: &[f32]| {
        let mut out = vec![0.0; m * n];
        l.matmul(x, m, &mut out);
        out
    };
    for (a, b) in ordered.iter().zip(&plain) {
        assert_eq!(run(a, &x), run(b, &gathered));
        let (mut ours, mut theirs) = (vec![0.0; k], vec![0.0; k]);
        a.row(3, &mut ours);
        b.row(3, &mut theirs);
        assert_eq!(order.gather(&ours), theirs);
        assert!(a.bytes() > b.bytes() && a.describe().contains("activation order"));
    }
    // A plain layer between two of one order.
    let mut outs = vec![vec![0.0; m * n]; 4];
    let many = [&ordered[0], &ordered[1], &plain[2], &ordered[2]];
    matmul_many(&many, &x, m, &mut outs.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
    for (l, out) in many.into_iter().zip(outs) {
        assert_eq!(out, run(l, &x));
    }
    assert!(Linear::ordered(&q[0], dsq_quant::ColumnOrder::identity(32)).is_err());
}
