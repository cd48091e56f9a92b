//! Tests of the kernels beside this file.

use super::exp::exp;
use super::*;
use dsq_quant::{KvGrid, QuantArgs, QuantType};

pub(super) fn uniform(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            (s >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

pub(super) fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// Derivative of `f` along each coordinate of `x`, in f64 central differences, against `grad`.
fn check_gradient(name: &str, x: &[f32], grad: &[f32], f: &dyn Fn(&[f64]) -> f64) {
    let x: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    let size = grad.iter().fold(0.0f64, |a, &g| a.max(f64::from(g).abs()));
    assert!(size > 1e-3, "{name}: the gradient is not trivially zero");
    for i in 0..x.len() {
        let h = 1e-5;
        let (mut lo, mut hi) = (x.clone(), x.clone());
        lo[i] -= h;
        hi[i] += h;
        let slope = (f(&hi) - f(&lo)) / (2.0 * h);
        // f32 rounding of a few dozen operations against the largest gradient; the differences in f64 err by h^2.
        assert!(
            (slope - f64::from(grad[i])).abs() < 64.0 * f64::from(f32::EPSILON) * size.max(1.0),
            "{name}[{i}]: slope {slope}, gradient {}",
            grad[i]
        );
    }
}

#[test]
fn exp_is_within_2_ulp_and_keeps_nan() {
    let mut worst = 0.0f64;
    for i in 0..4_000_000u32 {
        let x = -87.0 + 175.0 * (i as f32 / 4_000_000.0);
        let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
        let ulp = f64::from(f32::from_bits((want as f32).to_bits() + 1)) - f64::from(want as f32);
        worst = worst.max((got - want).abs() / ulp);
    }
    assert!(worst < 2.0, "{worst} ulp");
    assert_eq!(exp(0.0), 1.0);
    for nan in [f32::NAN, f32::from_bits(0x7fc0_0001), f32::from_bits(0xffff_ffff)] {
        assert!(exp(nan).is_nan());
    }
    assert!(exp(f32::NEG_INFINITY) > 0.0 && exp(f32::INFINITY).is_finite());
}

#[test]
fn rms_norm_matches_f64_and_its_gradient_the_slope() {
    let (m, d, eps) = (37, 20, 1e-5);
    let (x, w, g) = (uniform(m * d, 1), uniform(d, 2), uniform(m * d, 3));
    let f = |x: &[f64], w: &[f64]| -> Vec<f64> {
        x.chunks(d)
            .flat_map(|r| {
                let inv = 1.0 / (r.iter().map(|v| v * v).sum::<f64>() / d as f64 + f64::from(eps)).sqrt();
                r.iter().zip(w).map(move |(v, w)| v * inv * w).collect::<Vec<_>>()
            })
            .collect()
    };
    let wide = |x: &[f32]| x.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
    let (mut out, mut inv, mut dx) = (vec![0.0; m * d], vec![0.0; m], vec![0.0; m * d]);
    rms_norm(&x, &w, eps, &mut out, &mut inv);
    for (a, b) in out.iter().zip(f(&wide(&x), &wide(&w))) {
        assert!((f64::from(*a) - b).abs() < 1e-6, "{a} {b}");
    }
    let dw = rms_norm_gradient(&g, &x, &w, &inv, &mut dx);
    let loss = |out: Vec<f64>| out.iter().zip(&g).map(|(o, &g)| o * f64::from(g)).sum::<f64>();
    check_gradient("x", &x, &dx, &|x| loss(f(x, &wide(&w))));
    check_gradient("w", &w, &dw, &|w| loss(f(&wide(&x), w)));
}

#[test]
fn silu_mul_matches_f64_and_its_gradient_the_slope() {
    let n = 200;
    let (x, u, g) = (uniform(n, 4).iter().map(|v| v * 8.0).collect::<Vec<_>>(), uniform(n, 5), uniform(n, 6));
    let f = |x: f64, u: f64| x / (1.0 + (-x).exp()) * u;
    let mut out = vec![0.0; n];
    silu_mul(&x, &u, &mut out);
    for i in 0..n {
        assert!((f64::from(out[i]) - f(x[i].into(), u[i].into())).abs() < 4e-6);
    }
    let (mut dx, mut du) = (vec![0.0; n], vec![0.0; n]);
    silu_mul_gradient(&g, &x, &u, &mut dx, &mut du);
    let loss = |x: &[f64], u: &[f64]| (0..n).map(|i| f(x[i], u[i]) * f64::from(g[i])).sum::<f64>();
    let wide = |x: &[f32]| x.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
    check_gradient("gate", &x, &dx, &|x| loss(x, &wide(&u)));
    check_gradient("up", &u, &du, &|u| loss(&wide(&x), u));
}

fn reference_cross_entropy(x: &[f64], labels: &[i32], n: usize) -> f64 {
    x.chunks(n)
        .zip(labels)
        .filter(|(_, l)| **l != IGNORED)
        .map(|(r, &l)| r.iter().map(|v| v.exp()).sum::<f64>().ln() - r[l as usize])
        .sum()
}

fn reference_distill(student: &[f64], teacher: &[f64], n: usize, temperature: f64) -> f64 {
    let log_softmax = |x: &[f64]| -> Vec<f64> {
        let max = x.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b / temperature));
        let lse = max + x.iter().map(|v| (v / temperature - max).exp()).sum::<f64>().ln();
        x.iter().map(|v| v / temperature - lse).collect()
    };
    let row = |(s, t): (&[f64], &[f64])| -> f64 {
        log_softmax(t).iter().zip(log_softmax(s)).map(|(p, q)| p.exp() * (p - q)).sum()
    };
    student.chunks(n).zip(teacher.chunks(n)).map(row).sum::<f64>() * temperature * temperature
}

#[test]
fn distillation_matches_f64_and_its_gradient_the_slope() {
    let wide = |x: &[f32]| x.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
    for (m, n, temperature) in [(3, 37, 1.0f32), (2, 16, 2.0), (5, 50, 0.5)] {
        let student: Vec<f32> = uniform(m * n, 5).iter().map(|x| x * 4.0).collect();
        let teacher: Vec<f32> = uniform(m * n, 6).iter().map(|x| x * 4.0).collect();
        let (sum, lse) = distill(&student, &teacher, n, temperature);
        let want = reference_distill(&wide(&student), &wide(&teacher), n, f64::from(temperature));
        assert!((sum - want).abs() < 1e-5 * want, "{sum} against {want}");
        let mut dx = vec![0.0; m * n];
        distill_gradient(&student, &teacher, &lse, n, temperature, 0.5, &mut dx);
        let loss = |s: &[f64]| 0.5 * reference_distill(s, &wide(&teacher), n, f64::from(temperature));
        check_gradient("student", &student, &dx, &loss);
        // A student that is its teacher: no loss beyond rounding, and no gradient at all.
        let (sum, lse) = distill(&teacher, &teacher, n, temperature);
        assert_eq!(sum, 0.0);
        distill_gradient(&teacher, &teacher, &lse, n, temperature, 1.0, &mut dx);
        assert!(dx.iter().all(|&d| d == 0.0));
        // What is not finite shows in the loss.
        let mut bad = student.clone();
        bad[n / 2] = f32::NAN;
        assert!(distill(&bad, &teacher, n, temperature).0.is_nan());
    }
}

#[test]
fn c066_a_residual_stream_is_held_against_its_target_where_there_is_a_label() {
    let (m, d) = (70, 23);
    let (x, target) = (uniform(m * d, 31), uniform(m * d, 32));
    let labels: Vec<i32> = (0..m as i32).map(|i| if i % 3 == 1 { IGNORED } else { i }).collect();
    let sums = |x: &[f64]| {
        let mut out = [0.0f64; 2];
        for (i, (&x, &t)) in x.iter().zip(&target).enumerate() {
            if labels[i / d] != IGNORED {
                out[0] += (x - f64::from(t)).powi(2);
                out[1] += f64::from(t).powi(2);
            }
        }
        out
    };
    let wide: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    for (got, want) in masked_error(&x, &target, &labels).into_iter().zip(sums(&wide)) {
        assert!((got - want).abs() < 1e-6 * want, "{got} against {want}");
    }
    let dx = masked_error_gradient(&x, &target, &labels, 0.5);
    check_gradient("residual stream", &x, &dx, &|x| 0.5 * sums(x)[0]);
    assert!(dx.chunks(d).zip(&labels).all(|(row, l)| (*l == IGNORED) == row.iter().all(|&v| v == 0.0)));
    // Equal streams: nothing at all. No labels: neither an error nor a size. What is not finite shows.
    assert_eq!(masked_error(&x, &x, &labels)[0], 0.0);
    assert!(masked_error_gradient(&x, &x, &labels, 1.0).iter().all(|&v| v == 0.0));
    assert_eq!(masked_error(&x, &target, &vec![IGNORED; m]), [0.0; 2]);
    assert_eq!(masked_error(&[], &[], &[]), [0.0; 2]);
    let mut bad = x.clone();
    bad[2] = f32::NAN;
    assert!(masked_error(&bad, &target, &labels)[0].is_nan());
}

#[test]
fn c066_ignored_rows_take_no_part_in_cross_entropy() {
    let (m, n) = (35, 19);
    let x: Vec<f32> = uniform(m * n, 7).iter().map(|v| v * 3.0).collect();
    let labels: Vec<i32> = (0..m as i32).map(|i| if i % 4 == 1 { IGNORED } else { i * 7 % n as i32 }).collect();
    let wide: Vec<f64> = x.iter().map(|&v| f64::from(v)).collect();
    let (sum, lse) = cross_entropy(&x, &labels, n);
    assert!((sum - reference_cross_entropy(&wide, &labels, n)).abs() < 1e-5);
    let mut dx = vec![9.0; m * n];
    cross_entropy_gradient(&x, &labels, &lse, n, 0.5, &mut dx);
    check_gradient("logits", &x, &dx, &|x| 0.5 * reference_cross_entropy(x, &labels, n));
    let (sum, lse) = cross_entropy(&x, &vec![IGNORED; m], n);
    cross_entropy_gradient(&x, &vec![IGNORED; m], &lse, n, 1.0, &mut dx);
    assert!(sum == 0.0 && dx.iter().all(|&v| v == 0.0));
    // NaN and huge logits: the first shows, the second stays finite.
    let mut bad = x.clone();
    bad[3] = f32::NAN;
    assert!(cross_entropy(&bad, &labels, n).0.is_nan());
    bad[3] = 3e38;
    assert!(cross_entropy(&bad, &labels, n).0.is_finite());
}

/// Attention in f64, straight from the definition.
fn reference_attention(q: &[f64], k: &[f64], v: &[f64], s: &AttentionShape, theta: f64) -> Vec<f64> {
    let rope = |x: &[f64], i: usize| -> Vec<f64> {
        let half = s.d / 2;
        (0..s.d)
            .map(|c| {
                let angle = i as f64 * theta.powf(-2.0 * (c % half) as f64 / s.d as f64);
                let other = if c < half { -x[c + half] } else { x[c - half] };
                x[c] * angle.cos() + other * angle.sin()
            })
            .collect()
    };
    let head =
        |x: &[f64], b: usize, i: usize, h: usize, heads: usize| x[((b * s.t + i) * heads + h) * s.d..][..s.d].to_vec();
    let mut out = vec![0.0; q.len()];
    for b in 0..s.b {
        for h in 0..s.heads {
            let g = h / (s.heads / s.kv_heads);
            for i in 0..s.t {
                let qi = rope(&head(q, b, i, h, s.heads), i);
                let from = s.window.map_or(0, |w| (i + 1).saturating_sub(w));
                let scores: Vec<f64> = (from..=i)
                    .map(|j| {
                        let kj = rope(&head(k, b, j, g, s.kv_heads), j);
                        (qi.iter().zip(kj).map(|(a, b)| a * b).sum::<f64>() / (s.d as f64).sqrt()).exp()
                    })
                    .collect();
                let sum: f64 = scores.iter().sum();
                for (j, p) in scores.iter().enumerate() {
                    let vj = head(v, b, from + j, g, s.kv_heads);
                    for c in 0..s.d {
                        out[((b * s.t + i) * s.heads + h) * s.d + c] += p / sum * vj[c];
                    }
                }
            }
        }
    }
    out
}

/// The tables for base `theta`.
fn rope(t: usize, d: usize, theta: f32) -> Rope {
    let angle = |n: usize| (n / (d / 2)) as f64 * f64::from(theta).powf(-((2 * (n % (d / 2))) as f64) / d as f64);
    let table = |f: fn(f64) -> f64| (0..t * d / 2).map(|n| f(angle(n)) as f32).collect();
    Rope::new(d, [table(f64::cos), table(f64::sin)])
}

#[test]
fn attention_matches_f64_and_its_gradient_the_slope() {
    // 37 tokens: two blocks of rows, the second short.
    for (b, t, heads, kv_heads, d, window) in [
        (2, 37, 4, 2, 6, None),
        (1, 1, 2, 1, 4, None),
        (1, 5, 3, 3, 2, None),
        (2, 37, 4, 2, 6, Some(5)),
        (1, 37, 2, 1, 4, Some(33)),
        (1, 5, 3, 3, 2, Some(1)),
        (1, 5, 3, 3, 2, Some(9)),
    ] {
        let s = AttentionShape { b, t, heads, kv_heads, d, window };
        let rope = rope(t, d, 100.0);
        let scaled = |n: usize, seed: u64| uniform(n, seed).iter().map(|v| v * 2.0).collect::<Vec<f32>>();
        let (q, k, v) =
            (scaled(b * t * heads * d, 8), scaled(b * t * kv_heads * d, 9), scaled(b * t * kv_heads * d, 10));
        let g = uniform(q.len(), 11);
        let wide = |x: &[f32]| x.iter().map(|&v| f64::from(v)).collect::<Vec<f64>>();
        let run = Attention::forward([&q, &k, &v], &s, &rope, None);
        let want = reference_attention(&wide(&q), &wide(&k), &wide(&v), &s, 100.0);
        for (a, b) in run.out.iter().zip(&want) {
            assert!((f64::from(*a) - b).abs() < 4e-6, "{a} {b}");
        }
        let d = run.backward(&g, [&q, &k, &v], &s, &rope, None);
        let loss = |o: Vec<f64>| o.iter().zip(&g).map(|(o, &g)| o * f64::from(g)).sum::<f64>();
        let (q64, k64, v64) = (wide(&q), wide(&k), wide(&v));
        check_gradient("v", &v, &d.v, &|v| loss(reference_attention(&q64, &k64, v, &s, 100.0)));
        if t > 1 && window != Some(1) {
            check_gradient("q", &q, &d.q, &|q| loss(reference_attention(q, &k64, &v64, &s, 100.0)));
            check_gradient("k", &k, &d.k, &|k| loss(reference_attention(&q64, k, &v64, &s, 100.0)));
        }
    }
}

/// Attention over keys and values on a grid is what inference computes over a cache of their codes, and the gradient takes the
/// rounded ones for what they are.
#[test]
fn attention_on_a_grid_is_attention_over_a_cache_of_codes() {
    use crate::attention::{BLOCK, KvFormat, PagedLayer, Queries, attend};
    let s = AttentionShape { b: 1, t: 37, heads: 4, kv_heads: 2, d: 6, window: None };
    let rope = rope(s.t, s.d, 100.0);
    let (q, k, v) =
        (uniform(s.t * s.heads * s.d, 21), uniform(s.t * s.kv_heads * s.d, 22), uniform(s.t * s.kv_heads * s.d, 23));
    let windows = [None, Some(7), Some(1), Some(37)];
    for (i, window) in windows.into_iter().chain(windows).enumerate() {
        let (qtype, s) = ([QuantType::Int8, QuantType::Fp8E4M3][i / windows.len()], AttentionShape { window, ..s });
        let grid = KvGrid::from_absmax(QuantArgs::kv_cache(qtype).unwrap(), 0.8, 0.5).unwrap();
        let run = Attention::forward([&q, &k, &v], &s, &rope, Some(&grid));
        // `rotated_keys` puts heads before positions; the kernel wants positions first.
        let by_position = |x: Vec<f32>, heads: usize| {
            let at = |i: usize| (i / s.d / heads, i / s.d % heads, i % s.d);
            let value = |i| {
                let (t, h, c) = at(i);
                x[(h * s.t + t) * s.d + c]
            };
            (0..x.len()).map(value).collect::<Vec<f32>>()
        };
        let rotated_q = by_position(AttentionShape { kv_heads: s.heads, ..s }.rotated_keys(&q, &rope), s.heads);
        let rotated_k = by_position(s.rotated_keys(&k, &rope), s.kv_heads);
        let table: Vec<u32> = (0..s.t.div_ceil(BLOCK) as u32).collect();
        let scale = 1.0 / (s.d as f32).sqrt();
        let cache = PagedLayer::new(table.len(), s.kv_heads, [s.d; 2], scale, KvFormat::Codes(grid));
        let mut cache = cache.windowed(window);
        let queries = [Queries { table: &table, past: 0, tokens: s.t }];
        cache.put_rows(&queries, &rotated_k, &v);
        let mut want = vec![0.0; q.len()];
        attend(&cache, &queries, &rotated_q, s.heads, &mut want);
        for (a, b) in run.out.iter().zip(&want) {
            assert!((a - b).abs() < 2e-6, "{qtype:?}: {a} {b}");
        }
        let g = uniform(q.len(), 24);
        let mut on_grid = v.clone();
        grid.round(grid.v, &mut on_grid);
        assert_ne!(on_grid, v);
        let (a, b) = (
            run.backward(&g, [&q, &k, &v], &s, &rope, Some(&grid)),
            run.backward(&g, [&q, &k, &on_grid], &s, &rope, Some(&grid)),
        );
        assert!(bits(&a.q) == bits(&b.q) && bits(&a.k) == bits(&b.k) && bits(&a.v) == bits(&b.v), "{qtype:?}");
        // (The one score of a window of 1 has no slope.)
        let float = run.backward(&g, [&q, &k, &v], &s, &rope, None).q;
        assert!(bits(&a.q) != bits(&float) || window == Some(1), "not those of the float keys");
    }
}

#[test]
fn embedding_gradient_sums_the_rows_of_a_token() {
    let (ids, d) = ([2, 0, 2], 3);
    let table = uniform(4 * d, 12);
    let mut out = vec![0.0; 9];
    gather_rows(&table, d, &ids, &mut out);
    assert_eq!(out, [&table[6..9], &table[0..3], &table[6..9]].concat());
    let mut grad = vec![0.0; 12];
    scatter_rows(&[1., 2., 3., 10., 20., 30., 100., 200., 300.], d, &ids, &mut grad);
    assert_eq!(grad, [10., 20., 30., 0., 0., 0., 101., 202., 303., 0., 0., 0.]);
}

#[test]
fn adamw_follows_the_formula_in_f64() {
    let n = 40;
    let mut s = AdamW { lr: 1e-2, beta1: 0.9, beta2: 0.95, eps: 1e-8, decay: 0.1, t: 0, grad_scale: 0.5 };
    let mut w = uniform(n, 13);
    let (mut m, mut v) = (vec![0.0; n], vec![0.0; n]);
    let mut wide: Vec<f64> = w.iter().map(|&x| f64::from(x)).collect();
    let (mut m64, mut v64) = (vec![0.0f64; n], vec![0.0f64; n]);
    for t in 1..=20 {
        s.t = t;
        let g = uniform(n, 100 + t);
        adamw(&s, &mut w, &g, &mut m, &mut v);
        for i in 0..n {
            let g = f64::from(g[i]) * 0.5;
            m64[i] = 0.9 * m64[i] + 0.1 * g;
            v64[i] = 0.95 * v64[i] + 0.05 * g * g;
            let (mh, vh) = (m64[i] / (1.0 - 0.9f64.powi(t as i32)), v64[i] / (1.0 - 0.95f64.powi(t as i32)));
            wide[i] = wide[i] * (1.0 - 1e-3) - 1e-2 * mh / (vh.sqrt() + 1e-8);
            assert!((f64::from(w[i]) - wide[i]).abs() < 1e-6 * t as f64, "step {t}: {} {}", w[i], wide[i]);
        }
    }
}

#[test]
fn any_thread_count_gives_the_same_bits() {
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let (m, d) = (300, 64);
            let (x, w, g) = (uniform(m * d, 1), uniform(d, 2), uniform(m * d, 3));
            let (mut out, mut inv, mut dx) = (vec![0.0; m * d], vec![0.0; m], vec![0.0; m * d]);
            rms_norm(&x, &w, 1e-5, &mut out, &mut inv);
            let dw = rms_norm_gradient(&g, &x, &w, &inv, &mut dx);
            let labels: Vec<i32> = (0..m as i32).map(|i| i % d as i32).collect();
            let (loss, lse) = cross_entropy(&x, &labels, d);
            let s = AttentionShape { b: 3, t: 100, heads: 2, kv_heads: 1, d: 32, window: None };
            let rope = rope(100, 32, 1e4);
            let kv = &x[..m * 32];
            let a = Attention::forward([&x, kv, &g[..m * 32]], &s, &rope, None);
            let back = a.backward(&g, [&x, kv, &g[..m * 32]], &s, &rope, None);
            let norm = sum_of_squares(&x);
            let distance = masked_error(&x, &g, &labels);
            (
                bits(&out),
                bits(&dx),
                bits(&dw),
                loss.to_bits(),
                bits(&lse),
                bits(&a.out),
                bits(&back.q),
                bits(&back.k),
                (norm.to_bits(), distance.map(f64::to_bits)),
            )
        })
    };
    let one = run(1);
    for threads in [2, 3, 5] {
        assert!(run(threads) == one, "{threads} threads");
    }
}
