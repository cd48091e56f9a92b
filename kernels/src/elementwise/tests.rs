//! Tests against f64, and of equal bits on every path.

use super::*;

#[inline(always)]
unsafe fn exp_all<S: Simd>(x: *const f32, len: usize, out: *mut f32) {
    // SAFETY: `len` values each.
    unsafe { each!(S, [x, x], out, len, |v, _b| exp::<S>(v)) }
}

fn exp_on(isa: Isa, x: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len()];
    let (x, len, out_ptr) = (x.as_ptr(), x.len(), out.as_mut_ptr());
    // SAFETY: x and out have `len` values.
    unsafe { dispatch!(isa, exp_all(x: *const f32, len: usize, out_ptr: *mut f32)) };
    out
}

#[test]
fn exp_is_close_to_f64_everywhere_and_equal_on_every_path() {
    let xs: Vec<f32> = (-873_000..=883_000).step_by(7).map(|i| i as f32 * 1e-4).chain([0.0, -0.0, 1e-30]).collect();
    let got = exp_on(Isa::Scalar, &xs);
    let mut worst = 0.0f64;
    for (x, y) in xs.iter().zip(&got) {
        let exact = f64::from(*x).exp();
        worst = worst.max((f64::from(*y) - exact).abs() / exact);
    }
    assert!(worst < 2.5e-7, "{worst:e}");
    assert_eq!(got[xs.len() - 3..], [1.0, 1.0, 1.0]);
    for isa in Isa::supported() {
        assert!(exp_on(isa, &xs).iter().zip(&got).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?}");
    }
    for x in exp_on(Isa::detect(), &[f32::NEG_INFINITY, -1e30, f32::INFINITY, 1e30]) {
        assert!(x.is_finite() && x >= 0.0);
    }
}

#[test]
fn weights_below_the_top_are_close_to_f64_and_equal_on_every_path() {
    for (len, divisor) in [(1, 1.0), (15, 0.7), (16, 1.0), (1003, 2.5)] {
        let mut x = wave(len, 20.0);
        let top = x.iter().copied().fold(f32::MIN, f32::max);
        x[len / 2] = f32::NEG_INFINITY;
        let mut first = x.clone();
        exp_below_on(Isa::Scalar, &mut first, top, divisor);
        for (x, w) in x.iter().zip(&first).filter(|(x, _)| x.is_finite()) {
            let exact = ((f64::from(*x) - f64::from(top)) / f64::from(divisor)).exp();
            // exp's own error, and that of a difference and a quotient of at most 40 / 0.7, rounded once each.
            let bound = 2.5e-7 + 2.0 * (40.0 / f64::from(divisor)) * f64::from(f32::EPSILON) / 2.0;
            assert!((f64::from(*w) - exact).abs() <= 1.01 * bound * exact, "{x} {w} {exact}");
        }
        assert!(first[len / 2] < 2e-38);
        for isa in Isa::supported() {
            let mut out = x.clone();
            exp_below_on(isa, &mut out, top, divisor);
            assert!(out.iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?}");
        }
    }
}

fn wave(len: usize, scale: f32) -> Vec<f32> {
    (0..len).map(|i| ((i * 37 % 101) as f32 / 50.0 - 1.0) * scale).collect()
}

#[test]
fn silu_is_close_to_f64_and_equal_on_every_path() {
    for len in [1, 15, 16, 17, 1536, 20_000] {
        let (gate, up) = (wave(len, 87.0), wave(len + 3, 2.0)[3..].to_vec());
        let mut first = vec![0.0; len];
        silu_mul_on(Isa::Scalar, &gate, &up, &mut first);
        for i in 0..len {
            let (g, u) = (f64::from(gate[i]), f64::from(up[i]));
            let exact = g / (1.0 + (-g).exp()) * u;
            assert!((f64::from(first[i]) - exact).abs() <= 6e-7 * exact.abs() + 1e-36, "{g} {u}");
        }
        for isa in Isa::supported() {
            let mut out = vec![0.0; len];
            silu_mul_on(isa, &gate, &up, &mut out);
            assert!(out.iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?}");
        }
    }
}

#[test]
fn rms_norm_is_close_to_f64_and_equal_on_every_path() {
    for n in [1, 7, 16, 64, 100, 576] {
        for m in [1, 3] {
            let (x, w) = (wave(m * n, 3.0), wave(n, 1.5));
            let mut first = vec![0.0; m * n];
            rms_norm_on(Isa::Scalar, &x, &w, 1e-5, &mut first);
            for row in 0..m {
                let r = &x[row * n..(row + 1) * n];
                let mean = r.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n as f64;
                for i in 0..n {
                    let exact = f64::from(r[i]) / (mean + f64::from(1e-5f32)).sqrt() * f64::from(w[i]);
                    // A lane sums n/16 squares, the fold adds 4; half of that reaches the root, then 5 roundings.
                    let bound = ((n / 16 + 1 + 4) as f64 / 2.0 + 6.0) * 2f64.powi(-24) * exact.abs();
                    assert!((f64::from(first[row * n + i]) - exact).abs() <= bound, "n {n}");
                }
            }
            for isa in Isa::supported() {
                let mut out = vec![0.0; m * n];
                rms_norm_on(isa, &x, &w, 1e-5, &mut out);
                assert!(out.iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?}");
            }
        }
    }
    let mut out = [1.0f32; 4];
    rms_norm(&[0.0; 4], &[1.0; 4], 1e-5, &mut out);
    assert_eq!(out, [0.0; 4], "a row of zeros stays zero");
}

#[test]
fn the_sum_and_its_norm_are_those_of_one_after_the_other() {
    for (m, n) in [(1, 1), (1, 17), (5, 576), (40, 48)] {
        let (x, delta, w) = (wave(m * n, 3.0), wave(m * n + 5, 1.0)[5..].to_vec(), wave(n, 2.0));
        let want: Vec<f32> = x.iter().zip(&delta).map(|(a, b)| a + b).collect();
        let mut normed = vec![0.0; m * n];
        rms_norm(&want, &w, 1e-5, &mut normed);
        let (mut sum, mut out) = (x.clone(), vec![0.0; m * n]);
        add_rms_norm(&mut sum, &delta, &w, 1e-5, &mut out);
        assert_eq!((&sum, &out), (&want, &normed), "{m} x {n}");
        let mut sum = x;
        add(&mut sum, &delta);
        assert_eq!(sum, want);
    }
}

#[test]
fn rotation_pairs_the_halves_on_every_path() {
    for (m, heads, half) in [(1, 1, 1), (3, 2, 5), (20, 9, 32), (9, 3, 24)] {
        let angles: Vec<f32> = (0..50 * half).map(|i| i as f32 * 0.37).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) =
            (angles.iter().map(|a| a.cos()).collect(), angles.iter().map(|a| a.sin()).collect());
        let positions: Vec<usize> = (0..m).map(|t| t * 17 % 50).collect();
        let x = wave(m * heads * 2 * half, 2.0);
        let mut want = x.clone();
        for (row, p) in want.chunks_exact_mut(heads * 2 * half).zip(&positions) {
            for head in row.chunks_exact_mut(2 * half) {
                for i in 0..half {
                    let (a, b, c, s) = (head[i], head[half + i], cos[p * half + i], sin[p * half + i]);
                    (head[i], head[half + i]) = (a * c - b * s, b * c + a * s);
                }
            }
        }
        for isa in Isa::supported() {
            let mut got = x.clone();
            rotate_on(isa, &mut got, &positions, Rotation { cos: &cos, sin: &sin, half });
            assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?} {m} {heads} {half}");
        }
    }
}

#[test]
fn every_row_is_visited_once_with_its_number() {
    let mut x = vec![0.0; 35 * 3];
    for_rows(&mut x, 3, |i, row| row.iter_mut().for_each(|v| *v += i as f32 + 1.0));
    assert!(x.iter().enumerate().all(|(i, &v)| v == (i / 3) as f32 + 1.0));
}
