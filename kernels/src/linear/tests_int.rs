//! Tests of the layers with INT8 activations: every path against the reference (bits), the reference against exact arithmetic.

use super::int::{self, IntPath};
use super::tests::{args, assert_bits, numbers};
use super::*;
#[cfg(target_arch = "x86_64")]
use crate::isa::{has_avx_vnni, has_avx2, has_avx512_vnni};
use dsq_quant::{FloatType, Granularity, InputGrid, Mapping, QParams, QuantArgs};
use proptest::prelude::*;

fn paths() -> Vec<IntPath> {
    let mut all = vec![IntPath::Scalar];
    all.extend(Isa::supported().into_iter().map(IntPath::of));
    // Those too that a better one hides.
    #[cfg(target_arch = "x86_64")]
    {
        let vl = has_avx512_vnni() && is_x86_feature_detected!("avx512vl");
        let found = [(IntPath::Avx2, has_avx2()), (IntPath::Vnni256, has_avx_vnni()), (IntPath::Vnni256Vl, vl)];
        all.extend(found.into_iter().filter(|(_, has)| *has).map(|(path, _)| path));
    }
    all.sort_by_key(|path| *path as u8);
    all.dedup();
    all
}

/// Runs a matrix on a path, with its padding poisoned.
fn run(q: &QuantizedMatrix, path: IntPath, grid: Option<&InputGrid>, x: &[f32], m: usize) -> Vec<f32> {
    let mut panels = Panels::pack_codes(q).unwrap();
    panels.poison_padding();
    let mut out = vec![f32::NAN; m * q.n];
    int::matmul(path, grid, &[&panels], x, m, &mut [&mut out]);
    out
}

fn reference(q: &QuantizedMatrix, grid: Option<&InputGrid>, x: &[f32], m: usize) -> Vec<f32> {
    let mut out = vec![0.0; m * q.n];
    matmul_int8_reference(q, grid, x, m, &mut out);
    out
}

fn same(got: &[f32], want: &[f32], what: &str) {
    for (i, (a, b)) in got.iter().zip(want).enumerate() {
        assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{what}: output {i}: {a} against {b}");
    }
}

/// All paths equal the reference; the reference is within the bound of the header of exact arithmetic on `x`.
fn check(q: &QuantizedMatrix, x: &[f32], m: usize, what: &str) {
    let want = reference(q, None, x, m);
    for path in paths() {
        same(&run(q, path, None, x, m), &want, &format!("{what} {path:?} m {m} n {} k {}", q.n, q.k));
    }
    let u = 2f64.powi(-24);
    for t in 0..m {
        for row in 0..q.n {
            // `larger` is the sum with |q| + |z| in place of |q - z|.
            let (mut exact, mut larger, mut rounding, mut segments) = (0.0f64, 0.0f64, 0.0f64, 0.0);
            for (group, start) in (0..q.k).step_by(q.group_len()).enumerate() {
                let p = q.qparams(q.scale_index(row, group));
                let end = (start + q.group_len()).min(q.k);
                segments += (end - start).div_ceil(64) as f64;
                for at in (start..end).step_by(16) {
                    let columns = at..end.min(at + 16);
                    let values = &x[t * q.k..][columns.clone()];
                    let absmax = values.iter().fold(0.0f64, |m, v| m.max(f64::from(v.abs())));
                    for (i, v) in columns.zip(values) {
                        let (code, scale) = (i32::from(q.codes[row * q.k + i]), f64::from(p.scale));
                        let w = f64::from(code - p.zero) * scale;
                        exact += w * f64::from(*v);
                        larger += f64::from(code.abs() + p.zero.abs()) * scale * (f64::from(v.abs()) + absmax / 254.0);
                        rounding += w.abs() * (absmax / 254.0 * (1.0 + 2f64.powi(-14)) + 127.0 * 2f64.powi(-126));
                    }
                }
            }
            let bound = (segments + 9.0) * u * larger * 1.01 + rounding + 1e-40;
            let got = f64::from(want[t * q.n + row]);
            assert!((got - exact).abs() <= bound, "{what}: {got} against {exact}, bound {bound:e}");
        }
    }
}

fn matrix(
    n: usize,
    k: usize,
    bits: usize,
    granularity: Granularity,
    mapping: Mapping,
    dtype: FloatType,
) -> QuantizedMatrix {
    QuantizedMatrix::quantize(&numbers(n * k, (n + k) as u64), n, k, args(bits, granularity, mapping, dtype)).unwrap()
}

const MAPPINGS: [Mapping; 2] = [Mapping::Symmetric, Mapping::Asymmetric];

#[test]
fn int8_activations_equal_the_reference_at_every_shape_and_grouping() {
    let shapes = [(1, 8), (2, 24), (3, 40), (16, 64), (17, 96), (33, 120), (48, 200), (65, 576), (7, 13 * 2)];
    for (case, &(n, k)) in shapes.iter().enumerate() {
        for granularity in
            [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(2), Granularity::PerGroup(k / 2)]
        {
            for mapping in MAPPINGS {
                for bits in [2, 3, 4, 8] {
                    let q = matrix(n, k, bits, granularity, mapping, FloatType::ALL[case % 3]);
                    for m in [1, 2, 5, 9] {
                        check(&q, &numbers(m * k, 7 + m as u64), m, &format!("{granularity:?} {mapping:?} int{bits}"));
                    }
                }
            }
        }
    }
}

#[test]
fn every_number_of_tokens_equals_the_reference() {
    for (k, g) in [(128, 32), (192, 64), (256, 128), (384, 192), (36, 12), (7, 7), (15, 5), (190, 95)] {
        for bits in [4, 8] {
            for mapping in MAPPINGS {
                let q = matrix(21, k, bits, Granularity::PerGroup(g), mapping, FloatType::F16);
                for m in (1..=26).chain([47, 100]) {
                    let x = numbers(m * k, m as u64);
                    let want = reference(&q, None, &x, m);
                    for path in paths() {
                        assert_bits(&run(&q, path, None, &x, m), &want, &format!("{path:?} int{bits} group {g} m {m}"));
                    }
                }
            }
        }
    }
}

/// More tokens than are rounded together, and more than a chunk: the same bits as one by one.
#[test]
fn a_token_does_not_see_its_batch() {
    let (n, k) = (20, 96);
    let q = matrix(n, k, 4, Granularity::PerGroup(32), Mapping::Symmetric, FloatType::F16);
    let m = 1100;
    let x = numbers(m * k, 3);
    for path in paths() {
        let all = run(&q, path, None, &x, m);
        for t in [0, 1, 500, 1023, 1024, 1099] {
            assert_bits(&run(&q, path, None, &x[t * k..(t + 1) * k], 1), &all[t * n..(t + 1) * n], "one by one");
        }
    }
    let layer = Linear::new(&q).unwrap();
    let outs = [1, 2, 3, 5].map(|threads| {
        let team = crate::Team::new(threads).unwrap();
        let mut out = vec![0.0; m * n];
        team.enter(|| matmul_many_in(Activations::Int8, &[&layer], &x, m, &mut [&mut out]));
        out
    });
    outs.iter().for_each(|o| assert_bits(o, &outs[0], "threads"));
}

/// The largest sums that can occur, at segments of every length: all codes at one end, all inputs at one end.
#[test]
fn extreme_codes_and_inputs_are_exact() {
    for g in [2, 8, 30, 62, 64, 128] {
        let (n, k) = (18, 128 / g * g);
        for (bits, ends) in [(4, [-8, 7]), (8, [-128, 127]), (3, [-4, 3]), (2, [-2, 1])] {
            for mapping in MAPPINGS {
                for sign in [1.0, -1.0] {
                    for code in 0..3 {
                        let mut q = matrix(n, k, bits, Granularity::PerGroup(g), mapping, FloatType::F32);
                        q.codes
                            .iter_mut()
                            .enumerate()
                            .for_each(|(i, c)| *c = ends[if code == 2 { i % 2 } else { code }]);
                        q.scales.fill(1.0);
                        if mapping == Mapping::Asymmetric {
                            q.zeros.iter_mut().enumerate().for_each(|(i, z)| *z = [ends[0], ends[1], 0][i % 3]);
                        }
                        for m in [1, 2, 4, 12] {
                            let x = vec![127.0 * sign; m * k];
                            check(&q, &x, m, "extreme");
                            let out = run(&q, paths()[paths().len() - 1], None, &x, m);
                            for (i, got) in out.iter().enumerate() {
                                let row = i % n;
                                let want: i32 = (0..k)
                                    .map(|c| {
                                        let zero = q.zeros.get(row * (k / g) + c / g).map_or(0, |&z| i32::from(z));
                                        i32::from(q.codes[row * k + c]) - zero
                                    })
                                    .sum();
                                assert_eq!(*got, want as f32 * 127.0 * sign);
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn zeros_tiny_values_and_values_that_are_not_finite() {
    let (n, k) = (19, 192);
    for bits in [4, 8] {
        let q = matrix(n, k, bits, Granularity::PerGroup(64), Mapping::Asymmetric, FloatType::F32);
        let m = 13;
        let mut x = numbers(m * k, 5);
        x[..k].fill(0.0);
        x[k + 64..k + 128].fill(0.0);
        x[2 * k..3 * k].iter_mut().for_each(|v| *v *= 1e-36);
        x[3 * k..4 * k].iter_mut().for_each(|v| *v *= 1e-44);
        x[4 * k..5 * k].iter_mut().for_each(|v| *v *= 3e38);
        x[5 * k + 7] = f32::NAN;
        x[6 * k + 100] = f32::INFINITY;
        x[7 * k + 191] = f32::NEG_INFINITY;
        x[8 * k + 191] = -f32::NAN;
        x[9 * k..10 * k].iter_mut().enumerate().for_each(|(i, v)| *v = (i as f32 - 96.0) * 0.5);
        let want = reference(&q, None, &x, m);
        for path in paths() {
            let got = run(&q, path, None, &x, m);
            same(&got, &want, &format!("{path:?}"));
            for (t, row) in got.chunks(n).enumerate() {
                match t {
                    0 | 3 => assert!(row.iter().all(|&v| v == 0.0), "token {t}"),
                    5..=8 => assert!(row.iter().all(|v| v.is_nan()), "token {t}"),
                    // 3e38 times a hundred is beyond f32.
                    4 => {}
                    _ => assert!(row.iter().all(|v| v.is_finite()), "token {t}"),
                }
            }
        }
    }
}

fn grid(granularity: Granularity, dtype: FloatType, params: Option<QParams>) -> InputGrid {
    InputGrid { args: args(8, granularity, Mapping::Symmetric, dtype), params }
}

/// The codes of a grid are those of `QuantArgs`, ties, clipping and -128 included; what comes out is what `fake_quant_rows` and a
/// product give, but for the order of the sums.
#[test]
fn a_checkpoints_grid_keeps_its_codes_and_scales() {
    let (n, k) = (18, 192);
    for bits in [4, 8] {
        for mapping in MAPPINGS {
            let q = matrix(n, k, bits, Granularity::PerGroup(64), mapping, FloatType::F16);
            let layer = Linear::new(&q).unwrap();
            let grids = [
                grid(Granularity::PerChannel, FloatType::F32, None),
                grid(Granularity::PerChannel, FloatType::Bf16, None),
                grid(Granularity::PerGroup(64), FloatType::F32, None),
                grid(Granularity::PerTensor, FloatType::F32, Some(QParams { scale: 0.0125, zero: 0 })),
            ];
            for (case, g) in grids.iter().enumerate() {
                for m in [1, 3, 12, 13] {
                    let mut x = numbers(m * k, case as u64 + 70);
                    x.iter_mut().step_by(3).for_each(|v| *v = (*v * 128.0).round() * 0.0125 * 0.5);
                    x[5] = -40.0;
                    let want = reference(&q, Some(g), &x, m);
                    for path in paths() {
                        same(&run(&q, path, Some(g), &x, m), &want, &format!("{path:?} {g:?} m {m}"));
                    }
                    let mut out = vec![0.0; m * n];
                    matmul_many_on_grid(g, &[&layer], &x, m, &mut [&mut out]).unwrap();
                    same(&out, &want, "called by name");
                    let mut rounded = x.clone();
                    crate::fake_quant::fake_quant_rows(&mut rounded, k, g).unwrap();
                    let mut float = vec![0.0; m * n];
                    layer.matmul(&rounded, m, &mut float);
                    let w = q.dequantize();
                    for (i, (a, b)) in out.iter().zip(&float).enumerate() {
                        let (t, row) = (i / n, i % n);
                        let magnitude: f32 = (0..k).map(|c| (w[row * k + c] * rounded[t * k + c]).abs()).sum();
                        assert!((a - b).abs() <= magnitude * 80.0 * 2f32.powi(-24), "{a} against {b}");
                    }
                }
            }
        }
    }
}

/// Inputs on a grid that holds them exactly, all of one sign, so that the sums of the inputs are large beside the result: what is left is the
/// rounding of the kernel, which the header of `int.rs` bounds.
#[test]
fn roundings_of_the_kernel_stay_within_the_bound() {
    let (n, k, m) = (18, 1024, 3);
    let step = 2f32.powi(-7);
    let g = grid(Granularity::PerTensor, FloatType::F32, Some(QParams { scale: step, zero: 0 }));
    let x: Vec<f32> = numbers(m * k, 3).iter().map(|v| (64.0 + (v * 63.0).round()) * step).collect();
    for (bits, most) in [(4, 8), (8, 128), (8, 4)] {
        for mapping in MAPPINGS {
            for group in [16, 32, 64, 128, k] {
                let mut q = matrix(n, k, bits, Granularity::PerGroup(group), mapping, FloatType::F32);
                let codes = numbers(n * k, group as u64);
                q.codes.iter_mut().zip(codes).for_each(|(c, v)| *c = (v * most as f32) as i8);
                let segments = (k / group * group.div_ceil(64)) as f64;
                let got = reference(&q, Some(&g), &x, m);
                for path in paths() {
                    assert_bits(&run(&q, path, Some(&g), &x, m), &got, &format!("{path:?}"));
                }
                for (at, got) in got.iter().enumerate() {
                    let (token, row) = (&x[at / n * k..][..k], at % n);
                    let (mut exact, mut larger) = (0.0f64, 0.0f64);
                    for (i, x) in token.iter().enumerate() {
                        let p = q.qparams(q.scale_index(row, i / group));
                        let (code, weight) = (i32::from(q.codes[row * k + i]), f64::from(p.scale) * f64::from(*x));
                        exact += f64::from(code - p.zero) * weight;
                        larger += f64::from(code.abs() + p.zero.abs()) * weight;
                    }
                    let roundings = segments + if mapping == Mapping::Symmetric { 4.0 } else { 9.0 };
                    let bound = roundings * 2f64.powi(-24) * larger * 1.001;
                    let error = (f64::from(*got) - exact).abs();
                    assert!(
                        error <= bound,
                        "int{bits} {mapping:?} group {group}: {got} against {exact}, bound {bound:e}"
                    );
                }
            }
        }
    }
}

/// Inputs of -128, which the mode's own rule never gives but a grid does, and all codes the smallest.
#[test]
fn inputs_of_minus_128_do_not_overflow() {
    let (n, k) = (17, 128);
    let g = grid(Granularity::PerTensor, FloatType::F32, Some(QParams { scale: 1.0, zero: 0 }));
    for mapping in MAPPINGS {
        let mut q = matrix(n, k, 4, Granularity::PerGroup(64), mapping, FloatType::F32);
        q.codes.fill(-8);
        q.scales.fill(1.0);
        q.zeros.fill(0);
        for m in [1, 5] {
            let x = vec![-500.0; m * k];
            for path in paths() {
                assert!(run(&q, path, Some(&g), &x, m).iter().all(|&v| v == 128.0 * 8.0 * 128.0), "{path:?}");
            }
            let mut half = vec![1.0; m * k];
            half.iter_mut().enumerate().filter(|(i, _)| i % 8 >= 4).for_each(|(_, v)| *v = -128.0);
            let want = reference(&q, Some(&g), &half, m);
            for path in paths() {
                same(&run(&q, path, Some(&g), &half, m), &want, &format!("{path:?}"));
            }
        }
    }
}

#[test]
fn grids_that_do_not_reach_the_integer_kernel_say_why_and_run_in_f32() {
    let (n, k, m) = (20, 128, 3);
    let int4 = Linear::new(&matrix(n, k, 4, Granularity::PerGroup(64), Mapping::Symmetric, FloatType::F16)).unwrap();
    let fp8 =
        QuantizedMatrix::quantize(&numbers(n * k, 2), n, k, QuantArgs::fp8(Granularity::PerChannel, FloatType::F32));
    let fp8 = Linear::new(&fp8.unwrap()).unwrap();
    let symmetric = grid(Granularity::PerChannel, FloatType::F32, None);
    let asymmetric =
        InputGrid { args: args(8, Granularity::PerChannel, Mapping::Asymmetric, FloatType::F32), params: None };
    let short = grid(Granularity::PerGroup(8), FloatType::F32, None);
    let int4_grid =
        InputGrid { args: args(4, Granularity::PerChannel, Mapping::Symmetric, FloatType::F32), params: None };
    let x = numbers(m * k, 4);
    for (layer, g, why) in [
        (&int4, &asymmetric, "the grid is asymmetric"),
        (&int4, &short, "ends within 16 inputs"),
        (&int4, &int4_grid, "the grid is not int8"),
        (&fp8, &symmetric, "the weights are no int codes"),
    ] {
        assert!(layer.describe_on_grid(g).contains(why), "{}", layer.describe_on_grid(g));
        let (mut out, mut want, mut rounded) = (vec![0.0; m * n], vec![0.0; m * n], x.clone());
        matmul_many_on_grid(g, &[layer], &x, m, &mut [&mut out]).unwrap();
        crate::fake_quant::fake_quant_rows(&mut rounded, k, g).unwrap();
        layer.matmul(&rounded, m, &mut want);
        assert_bits(&out, &want, why);
    }
    // One layer of each kind in one call.
    let (mut a, mut b, mut want) = (vec![0.0; m * n], vec![0.0; m * n], vec![0.0; m * n]);
    matmul_many_on_grid(&symmetric, &[&int4, &fp8], &x, m, &mut [&mut a, &mut b]).unwrap();
    matmul_many_on_grid(&symmetric, &[&int4], &x, m, &mut [&mut want]).unwrap();
    assert_bits(&a, &want, "int4");
    matmul_many_on_grid(&symmetric, &[&fp8], &x, m, &mut [&mut want]).unwrap();
    assert_bits(&b, &want, "fp8");
    let torn = grid(Granularity::PerGroup(48), FloatType::F32, None);
    assert!(matmul_many_on_grid(&torn, &[&int4], &x, m, &mut [&mut want]).is_err());
}

#[test]
fn modes_are_named_and_layers_without_integers_stay_in_f32() {
    let (n, k, m) = (24, 128, 5);
    let x = numbers(m * k, 8);
    let of = |bits, g, i| {
        let a = args(bits, Granularity::PerGroup(g), Mapping::Symmetric, FloatType::F16);
        Linear::new(&QuantizedMatrix::quantize(&numbers(n * k, i), n, k, a).unwrap()).unwrap()
    };
    let groups: Vec<usize> = (0..k).map(|i| i * 7 % k / 32).collect();
    let order = dsq_quant::ColumnOrder::from_groups(&groups);
    let a = args(4, Granularity::PerGroup(32), Mapping::Symmetric, FloatType::F16);
    let act = QuantizedMatrix::quantize(&numbers(n * k, 9), n, k, a).unwrap();
    let ordered = Linear::ordered(&act, order.clone()).unwrap();
    let float = Linear::Float(FloatLinear::new(&numbers(n * k, 1), n, k, FloatType::F16).unwrap());
    let layers = [of(4, 32, 1), of(8, 32, 2), of(4, 64, 3), float, ordered, of(4, 32, 4)];
    assert!(layers.iter().all(|l| l.describe_in(Activations::Float) == l.describe()));
    let said: Vec<String> = layers.iter().map(|l| l.describe_in(Activations::Int8)).collect();
    assert!(
        said[0].starts_with("int4 weights, int8 activations with a scale for each token and 16 inputs: "),
        "{}",
        said[0]
    );
    assert!(said[3].ends_with("no int8 activations: the weights are no int codes"), "{}", said[3]);
    assert!(said[4].contains("activation order"));
    assert_eq!(layers.each_ref().map(Linear::takes_int8), [true, true, true, false, true, true]);
    let refs: Vec<&Linear> = layers.iter().collect();
    for mode in [Activations::Float, Activations::Int8] {
        let mut outs = vec![vec![0.0; m * n]; layers.len()];
        matmul_many_in(mode, &refs, &x, m, &mut outs.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
        for (l, out) in layers.iter().zip(&outs) {
            let mut alone = vec![0.0; m * n];
            matmul_many_in(mode, &[l], &x, m, &mut [&mut alone]);
            assert_bits(out, &alone, "alone");
        }
        if mode == Activations::Int8 {
            assert_bits(&outs[4], &reference(&act, None, &order.gather(&x), m), "ordered");
            let mut f32s = vec![0.0; m * n];
            layers[3].matmul(&x, m, &mut f32s);
            assert_bits(&outs[3], &f32s, "float weights");
            assert_ne!(outs[0], {
                let mut o = vec![0.0; m * n];
                layers[0].matmul(&x, m, &mut o);
                o
            });
        }
    }
    // Empty shapes.
    let mut none: [&mut [f32]; 1] = [&mut []];
    matmul_many_in(Activations::Int8, &refs[..1], &[], 0, &mut none);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]
    #[test]
    fn random_shapes_with_int8_activations_equal_the_reference(
        n in 1usize..70, groups in 1usize..5, g in 1usize..140, m in 1usize..30, seed: u64, asym: bool, eight: bool, dtype in 0usize..3
    ) {
        let k = groups * g;
        let a = args(if eight { 8 } else { 4 }, Granularity::PerGroup(g), MAPPINGS[usize::from(asym)], FloatType::ALL[dtype]);
        let q = QuantizedMatrix::quantize(&numbers(n * k, seed), n, k, a).unwrap();
        let x = numbers(m * k, seed ^ 1);
        let want = reference(&q, None, &x, m);
        for path in paths() {
            let got = run(&q, path, None, &x, m);
            prop_assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "{path:?}");
        }
    }
}
