//! GPTQ against the algorithm as its paper writes it, in f64 and without blocks; against plain rounding; its faults.

use super::super::tests::{normal, with_threads};
use super::*;
use dsq_quant::{FloatType, Granularity, Mapping, QuantType, WeightObserver};

fn args(granularity: Granularity) -> QuantArgs {
    QuantArgs::int4(granularity, FloatType::F16)
}

/// Inputs whose values depend on each other: `m` tokens of `k` values that are mixtures of `rank` sources.
fn correlated(m: usize, k: usize, rank: usize, seed: u64) -> Vec<f32> {
    let (mix, source) = (normal(rank * k, seed), normal(m * rank, seed + 1));
    let noise = normal(m * k, seed + 2);
    let mut x: Vec<f32> = noise.iter().map(|v| 0.1 * v).collect();
    for (x, s) in x.chunks_mut(k).zip(source.chunks(rank)) {
        for (s, mix) in s.iter().zip(mix.chunks(k)) {
            x.iter_mut().zip(mix).for_each(|(x, m)| *x += s * m);
        }
    }
    x
}

fn hessian_of(x: &[f32], k: usize) -> Hessian {
    let mut h = Hessian::new(k);
    h.add(x);
    h
}

fn full(h: &Hessian) -> Vec<f64> {
    (0..h.k() * h.k()).map(|i| h.at(i / h.k(), i % h.k())).collect()
}

/// Gauss-Jordan with partial pivoting.
fn inverse(a: &[f64], k: usize) -> Vec<f64> {
    let mut m: Vec<Vec<f64>> = (0..k)
        .map(|i| a[i * k..][..k].iter().copied().chain((0..k).map(|j| f64::from(u8::from(i == j)))).collect())
        .collect();
    for c in 0..k {
        let p = (c..k).max_by(|&x, &y| m[x][c].abs().total_cmp(&m[y][c].abs())).unwrap();
        m.swap(c, p);
        let d = m[c][c];
        m[c].iter_mut().for_each(|v| *v /= d);
        let pivot = m[c].clone();
        for (r, row) in m.iter_mut().enumerate().filter(|(r, _)| *r != c) {
            let f = row[c];
            assert!(r < k);
            row.iter_mut().zip(&pivot).for_each(|(v, p)| *v -= f * p);
        }
    }
    m.into_iter().flat_map(|row| row[k..].to_vec()).collect()
}

/// The upper Cholesky factor `U` of `a = U^T U`.
fn cholesky_upper(a: &[f64], k: usize) -> Vec<f64> {
    let mut u = vec![0.0; k * k];
    for i in 0..k {
        for j in i..k {
            let s: f64 = (0..i).map(|l| u[l * k + i] * u[l * k + j]).sum();
            u[i * k + j] = if i == j { (a[i * k + i] - s).sqrt() } else { (a[i * k + j] - s) / u[i * k + i] };
        }
    }
    u
}

/// The paper's algorithm in f64, one column at a time, with activation order and static groups: the rest of the weights
/// is updated by the rows of the Cholesky factor of the *inverse* Hessian.
fn reference(w: &[f32], n: usize, k: usize, h: &Hessian, a: QuantArgs) -> Vec<i8> {
    let diagonal = h.diagonal();
    let mut order: Vec<usize> = (0..k).collect();
    order.sort_by(|&x, &y| diagonal[y].partial_cmp(&diagonal[x]).unwrap().then(x.cmp(&y)));
    let live: Vec<f64> = diagonal.iter().copied().filter(|d| *d > 0.0).collect();
    let mean = live.iter().sum::<f64>() / live.len() as f64;
    let mut m: Vec<f64> = (0..k * k).map(|i| h.at(order[i / k], order[i % k])).collect();
    for j in 0..k {
        m[j * k + j] = 0.01 * mean + if m[j * k + j] > 0.0 { m[j * k + j] } else { mean };
    }
    let u = cholesky_upper(&inverse(&m, k), k);
    let params = QuantizedMatrix::qparams_of(w, n, k, a).unwrap();
    let grid = QuantizedMatrix::quantize_with(w, n, k, a, &params).unwrap();
    let mut codes = vec![0i8; n * k];
    for r in 0..n {
        let mut row: Vec<f64> = order.iter().map(|&c| f64::from(w[r * k + c])).collect();
        for j in 0..k {
            let p = params[grid.scale_index(r, order[j] / grid.group_len())];
            let q = a.quantize(row[j] as f32, p);
            codes[r * k + order[j]] = q;
            let e = (row[j] - f64::from(a.dequantize(q, p))) / u[j * k + j];
            for l in j + 1..k {
                row[l] -= e * u[j * k + l];
            }
        }
    }
    codes
}

/// `tr((W - Q) H (W - Q)^T)` in f64, row by row.
fn exact_errors(w: &[f32], q: &QuantizedMatrix, h: &Hessian) -> Vec<f64> {
    let (k, h) = (q.k, full(h));
    let values = q.dequantize();
    let row = |(w, v): (&[f32], &[f32])| {
        let e: Vec<f64> = w.iter().zip(v).map(|(a, b)| f64::from(*a) - f64::from(*b)).collect();
        (0..k).map(|i| e[i] * (0..k).map(|j| h[i * k + j] * e[j]).sum::<f64>()).sum()
    };
    w.chunks(k).zip(values.chunks(k)).map(row).collect()
}

fn every_scheme() -> Vec<QuantArgs> {
    let mut out = Vec::new();
    for qtype in QuantType::INTS {
        for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
            for granularity in [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(32)] {
                for scale_dtype in FloatType::ALL {
                    for observer in [WeightObserver::MinMax, WeightObserver::Mse] {
                        out.push(QuantArgs { qtype, granularity, mapping, scale_dtype, observer });
                    }
                }
            }
        }
    }
    out
}

#[test]
fn codes_are_those_of_the_papers_algorithm_in_f64_for_every_scheme() {
    // 160 columns: two blocks of the walk, three panels of the factorization.
    let (n, k) = (12, 160);
    let w: Vec<f32> = normal(n * k, 5).iter().map(|v| 0.05 * v).collect();
    let h = hessian_of(&correlated(500, k, 40, 11), k);
    let factor = Factor::new(&h).unwrap();
    assert_eq!(factor.damping(), 0.01);
    for a in every_scheme() {
        let params = QuantizedMatrix::qparams_of(&w, n, k, a).unwrap();
        let grid = QuantizedMatrix::quantize_with(&w, n, k, a, &params).unwrap();
        let (got, _, losses) = choose(&w, n, k, &factor, a, &params, &grid);
        let q = QuantizedMatrix { codes: got.clone(), ..grid.clone() };
        for (loss, exact) in losses.iter().zip(exact_errors(&w, &q, &h)) {
            // Targets are f32 and of the size of a weight, 2^-24 of which is a share of the step: of INT8's some 2^-16.
            let share = if a.qtype == QuantType::Int8 { 1e-3 } else { 1e-4 };
            assert!((loss / exact - 1.0).abs() < share, "{a:?}: {loss} against {exact}");
        }
        let want = reference(&w, n, k, &h, a);
        // A target may lie so near the middle of two codes that f32 and f64 choose differently; from there on that row
        // differs. At eight bits this is likelier: steps are 16 times smaller against the same rounding of f32.
        let same = (0..n).filter(|r| got[r * k..][..k] == want[r * k..][..k]).count();
        assert!(same >= n - 1 - usize::from(a.qtype == QuantType::Int8), "{a:?}: {same} of {n} rows");
        let with = |codes: Vec<i8>| {
            let q = QuantizedMatrix { codes, ..grid.clone() };
            q.validate().unwrap();
            exact_errors(&w, &q, &h).iter().sum::<f64>()
        };
        let (got, want) = (with(got), with(want));
        assert!((got / want - 1.0).abs() < 0.02, "{a:?}: {got} against {want}");
    }
}

#[test]
fn every_scheme_gives_a_valid_matrix_that_is_never_worse_than_rounding() {
    let (n, k) = (9, 96);
    let w = normal(n * k, 21);
    let h = hessian_of(&correlated(300, k, 12, 3), k);
    let factor = Factor::new(&h).unwrap();
    for a in every_scheme() {
        let (q, fit) = quantize(&w, n, k, &h, Some(&factor), a).unwrap();
        q.validate().unwrap();
        let rtn = QuantizedMatrix::quantize(&w, n, k, a).unwrap();
        assert_eq!(
            (&q.scales, &q.zeros),
            (&rtn.scales, &rtn.zeros),
            "static groups: the scales are those of the weights"
        );
        let (errors, plain) = (exact_errors(&w, &q, &h), exact_errors(&w, &rtn, &h));
        for (e, p) in errors.iter().zip(&plain) {
            assert!(*e <= p * (1.0 + 1e-9), "{a:?}: {e} against {p}");
        }
        let (e, p): (f64, f64) = (errors.iter().sum(), plain.iter().sum());
        assert!((fit.error / e - 1.0).abs() < 1e-4 && (fit.rtn_error / p - 1.0).abs() < 1e-4, "{fit:?} {e} {p}");
        assert!(e < 0.8 * p, "{a:?}: correlated inputs leave much to gain: {e} against {p}");
    }
}

/// Inputs that break naive implementations.
fn adversarial(k: usize, seed: u64) -> Vec<(&'static str, Hessian)> {
    let mut out = Vec::new();
    let x = correlated(200, k, k / 4, seed);
    out.push(("plain", hessian_of(&x, k)));
    out.push(("one token", hessian_of(&x[..k], k)));
    out.push(("three tokens", hessian_of(&x[..3 * k], k)));
    let mut edit = |what, f: &dyn Fn(usize, f32) -> f32| {
        let x: Vec<f32> = x.iter().enumerate().map(|(i, &v)| f(i % k, v)).collect();
        out.push((what, hessian_of(&x, k)));
    };
    edit("dead columns", &|c, v| if c % 5 == 0 { 0.0 } else { v });
    edit("all dead", &|_, _| 0.0);
    edit("one live", &|c, v| if c == 3 { v } else { 0.0 });
    edit("one huge diagonal", &|c, v| if c == 7 { 1e6 * v } else { v });
    edit("one tiny diagonal", &|c, v| if c == 7 { 1e-20 * v } else { v });
    edit("tiny", &|_, v| 1e-18 * v);
    edit("huge", &|_, v| 1e15 * v);
    let first: Vec<f32> = x.iter().step_by(k).copied().collect();
    let same: Vec<f32> = first.iter().flat_map(|v| vec![*v; k]).collect();
    out.push(("all columns identical", hessian_of(&same, k)));
    out
}

#[test]
fn c033_f113_no_hessian_makes_it_worse_than_rounding_or_not_finite() {
    let (n, k) = (10, 64);
    for seed in 0..4 {
        let w = normal(n * k, 100 + seed);
        for (what, h) in adversarial(k, seed) {
            let factor = Factor::new(&h);
            let factor = factor.unwrap_or_else(|| panic!("{what}: damping must be enough for a sum of squares"));
            for a in [args(Granularity::PerGroup(32)), args(Granularity::PerChannel)] {
                let (q, fit) = quantize(&w, n, k, &h, Some(&factor), a).unwrap();
                q.validate().unwrap();
                let rtn = QuantizedMatrix::quantize(&w, n, k, a).unwrap();
                for (e, p) in h.output_errors(&sub(&w, &q)).iter().zip(h.output_errors(&sub(&w, &rtn))) {
                    assert!(e.is_finite() && *e <= p, "{what}: {e} against {p}");
                }
                assert!(fit.error <= fit.rtn_error && fit.error.is_finite(), "{what}: {fit:?}");
                // Columns that carry nothing are rounded plainly.
                let dead: Vec<usize> = (0..k).filter(|&c| h.at(c, c) == 0.0).collect();
                assert_eq!(fit.dead_columns, dead.len(), "{what}");
                for r in 0..n {
                    for &c in &dead {
                        assert_eq!(q.codes[r * k + c], rtn.codes[r * k + c], "{what} {r} {c}");
                    }
                }
            }
        }
    }
}

fn sub(w: &[f32], q: &QuantizedMatrix) -> Vec<f32> {
    w.iter().zip(q.dequantize()).map(|(a, b)| a - b).collect()
}

#[test]
fn c033_the_case_of_eight_columns() {
    // Three tokens; channel 1 is dead, 2 and 3 are one, 4 is a million times as large.
    let k = 8;
    let mut x = normal(3 * k, 9);
    for row in x.chunks_mut(k) {
        (row[1], row[3]) = (0.0, row[2]);
        row[4] *= 1e6;
    }
    let h = hessian_of(&x, k);
    let w = normal(4 * k, 10);
    let factor = Factor::new(&h);
    let a = args(Granularity::PerChannel);
    let (q, fit) = quantize(&w, 4, k, &h, factor.as_ref(), a).unwrap();
    assert!(q.dequantize().iter().all(|v| v.is_finite()));
    assert!(fit.error <= fit.rtn_error && fit.dead_columns == 1 && fit.damping.is_some(), "{fit:?}");
}

#[test]
fn c033_damping_rises_in_steps_and_then_the_layer_is_rounded() {
    let k = 8;
    let with_corner = |corner: f64| {
        let mut a = vec![0.0; k * k];
        (0..k).for_each(|i| a[i * k + i] = 1.0);
        (a[1], a[k]) = (corner, corner);
        Hessian::from_matrix(k, a)
    };
    // The smallest eigenvalue is 1 - corner: no sum of squares, as a rounded one may be.
    assert_eq!(Factor::new(&with_corner(0.5)).unwrap().damping(), 0.01);
    assert_eq!(Factor::new(&with_corner(1.02)).unwrap().damping(), 0.1);
    assert_eq!(Factor::new(&with_corner(1.3)).unwrap().damping(), 1.0);
    assert!(Factor::new(&with_corner(1e6)).is_none());
    assert_eq!(dampings().count(), ATTEMPTS);
    let w = normal(5 * k, 3);
    let a = args(Granularity::PerChannel);
    let (q, fit) = quantize(&w, 5, k, &with_corner(1e6), None, a).unwrap();
    assert_eq!(q, QuantizedMatrix::quantize(&w, 5, k, a).unwrap());
    assert_eq!((fit.damping, fit.plain_rows), (None, 5));
}

#[test]
fn c017_codes_of_grouped_layers_need_no_group_index() {
    // The order of the walk mixes groups; the scales of column c are those of group c / g all the same. Without
    // correlations no error is passed on, so the codes must be those of plain rounding.
    let (n, k, g) = (4, 64, 32);
    let mut w = normal(n * k, 31);
    (0..n * k).filter(|i| i % k >= g).for_each(|i| w[i] *= 10.0);
    let mut diagonal = vec![0.0; k * k];
    (0..k).for_each(|i| diagonal[i * k + i] = (1 + i * 29 % 64) as f64);
    let h = Hessian::from_matrix(k, diagonal);
    let factor = Factor::new(&h).unwrap();
    assert!(factor.order.windows(2).filter(|o| o[0] / g != o[1] / g).count() > 10);
    let a = args(Granularity::PerGroup(g));
    let params = QuantizedMatrix::qparams_of(&w, n, k, a).unwrap();
    let rtn = QuantizedMatrix::quantize(&w, n, k, a).unwrap();
    assert_eq!(choose(&w, n, k, &factor, a, &params, &rtn).0, rtn.codes);
    assert_eq!(quantize(&w, n, k, &h, Some(&factor), a).unwrap().0, rtn);
}

#[test]
fn c001_c003_degenerate_and_constant_groups_stay_what_they_are() {
    let k = 64;
    let mut w = normal(k, 41);
    w.extend(vec![0.0; k]);
    w.extend((0..k).map(|i| if i % 2 == 0 { 1e-30 } else { -1e-30 }));
    w.extend(vec![0.25; k]);
    let h = hessian_of(&correlated(100, k, 8, 42), k);
    let factor = Factor::new(&h).unwrap();
    for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
        let a = QuantArgs { mapping, ..args(Granularity::PerGroup(32)) };
        let (q, _) = quantize(&w, 4, k, &h, Some(&factor), a).unwrap();
        let values = q.dequantize();
        assert!(q.scales.iter().all(|s| s.is_finite() && *s > 0.0));
        assert!(values[k..3 * k].iter().all(|v| v.abs() <= 1e-30), "{mapping:?}");
        if mapping == Mapping::Asymmetric {
            let scale = FloatType::F16.round(0.25 / 15.0);
            assert!(values[3 * k..].iter().all(|v| (v - 15.0 * scale).abs() < 1e-6), "{:?}", &values[3 * k..]);
        }
        let (alone, _) = quantize(&w[..k], 1, k, &h, Some(&factor), a).unwrap();
        assert_eq!(alone.codes, q.codes[..k], "a row does not depend on the others");
    }
}

#[test]
fn c005_scales_that_overflow_are_errors_that_name_the_group() {
    let (n, k) = (40, 64);
    let mut w = normal(n * k, 2);
    w[33 * k + 40] = 6e5;
    let h = hessian_of(&normal(10 * k, 3), k);
    let factor = Factor::new(&h).unwrap();
    let err = quantize(&w, n, k, &h, Some(&factor), args(Granularity::PerGroup(32))).unwrap_err();
    assert!(matches!(err, QuantError::ScaleOverflow { group: 67, hi, .. } if hi == 6e5), "{err}");
    let bf16 = QuantArgs { scale_dtype: FloatType::Bf16, ..args(Granularity::PerGroup(32)) };
    assert!(quantize(&w, n, k, &h, Some(&factor), bf16).unwrap().0.dequantize().iter().all(|v| v.is_finite()));
    w[33 * k + 40] = f32::NAN;
    let err = quantize(&w, n, k, &h, Some(&factor), bf16).unwrap_err();
    assert!(matches!(err, QuantError::NonFinite { index, .. } if index == 33 * k + 40), "{err}");
}

#[test]
fn c012_codes_are_chosen_against_the_stored_scale() {
    // Re-quantizing the values with the stored scales gives the codes again, whatever the scale's dtype.
    let (n, k) = (8, 96);
    let w = normal(n * k, 51);
    let h = hessian_of(&correlated(200, k, 10, 52), k);
    let factor = Factor::new(&h).unwrap();
    for a in every_scheme() {
        let (q, _) = quantize(&w, n, k, &h, Some(&factor), a).unwrap();
        assert!(q.scales.iter().all(|&s| a.scale_dtype.round(s) == s));
        let params: Vec<QParams> = (0..q.scales.len()).map(|i| q.qparams(i)).collect();
        assert_eq!(QuantizedMatrix::quantize_with(&q.dequantize(), n, k, a, &params).unwrap(), q);
    }
}

#[test]
fn the_worked_example_of_the_documentation() {
    let h = Hessian::from_matrix(2, vec![2.0, 1.0, 1.0, 1.0]);
    let (w, a) = ([0.4f32, 0.45], args(Granularity::PerChannel));
    let params = [QParams { scale: 1.0, zero: 0 }];
    let rtn = QuantizedMatrix::quantize_with(&w, 1, 2, a, &params).unwrap();
    let factor = Factor::new(&h).unwrap();
    let gptq = QuantizedMatrix { codes: choose(&w, 1, 2, &factor, a, &params, &rtn).0, ..rtn.clone() };
    assert_eq!((&rtn.codes[..], &gptq.codes[..]), (&[0, 0][..], &[0, 1][..]));
    assert!((row_errors(&w, &rtn, &h)[0] - 0.8825).abs() < 1e-6);
    assert!((row_errors(&w, &gptq, &h)[0] - 0.1825).abs() < 1e-6);
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let (n, k) = (50, 300);
    let w = normal(n * k, 61);
    let x = correlated(700, k, 30, 62);
    let run = |threads, a| {
        with_threads(threads, || {
            let h = hessian_of(&x, k);
            let factor = Factor::new(&h).unwrap();
            let coupling: Vec<u32> = factor.coupling.iter().map(|c| c.to_bits()).collect();
            (quantize(&w, n, k, &h, Some(&factor), a).unwrap(), coupling)
        })
    };
    for a in [args(Granularity::PerGroup(100)), args(Granularity::PerTensor)] {
        let one = run(1, a);
        for threads in [2, 7] {
            assert!(run(threads, a) == one, "{threads}");
        }
    }
}

#[test]
fn the_factor_times_its_transpose_is_the_matrix() {
    for k in [1, 2, 63, 64, 65, 200] {
        let h = hessian_of(&normal(2 * k * k, k as u64), k);
        let a = full(&h);
        let mut r = a.clone();
        upper_factor(&mut r, k, 0.0).unwrap();
        for i in 0..k {
            for j in i..k {
                let s: f64 = (j..k).map(|l| r[i * k + l] * r[j * k + l]).sum();
                assert!((s - a[i * k + j]).abs() < 1e-9 * a[0].max(a[i * k + i]), "{k} {i} {j}");
            }
        }
    }
}
