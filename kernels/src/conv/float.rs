//! f32 convolution, its gradient for the input and its gradient for the weight. Not quantized.
//!
//! Shapes: `x [m, h, w, c]`, weight `[n, c, kh, kw]`, `y [m, oh, ow, n]`. Layout: NHWC, contiguous.
//! Requires: nothing (AVX2 and FMA inside `gemm` when present). Order: a forward output is one chain over
//! `[kh, kw, c]`; a weight gradient is summed over blocks of pixels in order within each of at most [`PARTS`] runs of
//! pictures, then over the runs in order: the split depends on `m` alone, so any number of threads gives the same bits.
//! Error: as `gemm`, with `k` (forward), `n * kh * kw` (input) or `m * oh * ow` (weight) terms.
//! Cost: the products, plus one copy of `k` values for each output pixel.

use super::gemm::{Left, Right, gemm};
use super::{BLOCK, ConvShape, im2col, kernel_order};
use rayon::prelude::*;

/// Partial sums of a weight gradient.
const PARTS: usize = 8;

/// `y = conv(x, w)`.
///
/// # Panics
/// When a buffer's length is not that of its shape, or the shape is invalid.
pub fn conv_f32(x: &[f32], w: &[f32], s: &ConvShape) -> Vec<f32> {
    let m = pictures(x, w, s);
    let (k, n) = (s.k(), s.n);
    // [k, n], so that a row of the product reads contiguous outputs.
    let wt = transpose(&kernel_order(w, s), n, k);
    let mut y = vec![0.0f32; m * s.output_len()];
    y.par_chunks_mut(s.output_len()).zip(x.par_chunks(s.input_len())).for_each_init(
        || vec![0.0f32; BLOCK * k],
        |col, (y, x)| {
            for (b, out) in y.chunks_mut(BLOCK * n).enumerate() {
                let rows = out.len() / n;
                im2col(x, s, b * BLOCK, rows, 0.0, col, k);
                gemm(Left { data: col, row: k, col: 1 }, Right { data: &wt, row: n }, out, n, [rows, n, k], false);
            }
        },
    );
    y
}

/// The gradient for `x` from the gradient `g [m, oh, ow, n]` of the output.
///
/// # Panics
/// As [`conv_f32`].
pub fn conv_f32_dx(g: &[f32], w: &[f32], s: &ConvShape) -> Vec<f32> {
    assert!(s.is_valid() && w.len() == s.n * s.k() && g.len().is_multiple_of(s.output_len()), "conv shapes");
    let m = g.len() / s.output_len();
    let (k, n) = (s.k(), s.n);
    let wk = kernel_order(w, s);
    let mut dx = vec![0.0f32; m * s.input_len()];
    dx.par_chunks_mut(s.input_len()).zip(g.par_chunks(s.output_len())).for_each_init(
        || vec![0.0f32; BLOCK * k],
        |col, (dx, g)| {
            for (b, grad) in g.chunks(BLOCK * n).enumerate() {
                let rows = grad.len() / n;
                gemm(Left { data: grad, row: n, col: 1 }, Right { data: &wk, row: k }, col, k, [rows, k, n], false);
                col2im(col, s, b * BLOCK, rows, dx);
            }
        },
    );
    dx
}

/// The gradient for the weight, `[n, c, kh, kw]`.
///
/// # Panics
/// As [`conv_f32`].
pub fn conv_f32_dw(x: &[f32], g: &[f32], s: &ConvShape) -> Vec<f32> {
    assert!(s.is_valid() && x.len().is_multiple_of(s.input_len()), "conv shapes");
    let m = x.len() / s.input_len();
    assert_eq!(g.len(), m * s.output_len(), "conv gradient length");
    let (k, n) = (s.k(), s.n);
    let run = m.div_ceil(PARTS).max(1);
    let partial: Vec<Vec<f32>> = x
        .par_chunks(run * s.input_len())
        .zip(g.par_chunks(run * s.output_len()))
        .map(|(x, g)| {
            let mut col = vec![0.0f32; BLOCK * k];
            let mut sum = vec![0.0f32; k * n];
            for (x, g) in x.chunks(s.input_len()).zip(g.chunks(s.output_len())) {
                for (b, grad) in g.chunks(BLOCK * n).enumerate() {
                    let rows = grad.len() / n;
                    im2col(x, s, b * BLOCK, rows, 0.0, &mut col, k);
                    gemm(
                        Left { data: &col, row: 1, col: k },
                        Right { data: grad, row: n },
                        &mut sum,
                        n,
                        [k, n, rows],
                        true,
                    );
                }
            }
            sum
        })
        .collect();
    let mut sum = vec![0.0f32; k * n];
    for part in partial {
        sum.iter_mut().zip(part).for_each(|(s, p)| *s += p);
    }
    // [kh, kw, c, n] -> [n, c, kh, kw].
    let taps = s.kernel[0] * s.kernel[1];
    let mut dw = vec![0.0f32; n * k];
    for tap in 0..taps {
        for c in 0..s.c {
            for o in 0..n {
                dw[(o * s.c + c) * taps + tap] = sum[(tap * s.c + c) * n + o];
            }
        }
    }
    dw
}

fn pictures(x: &[f32], w: &[f32], s: &ConvShape) -> usize {
    assert!(s.is_valid() && w.len() == s.n * s.k() && x.len().is_multiple_of(s.input_len()), "conv shapes");
    x.len() / s.input_len()
}

fn transpose(w: &[f32], n: usize, k: usize) -> Vec<f32> {
    let mut out = vec![0.0; n * k];
    for (j, row) in w.chunks_exact(k).enumerate() {
        for (l, &v) in row.iter().enumerate() {
            out[l * n + j] = v;
        }
    }
    out
}

/// Adds the rows of `col` back to the pixels they were gathered from.
fn col2im(col: &[f32], s: &ConvShape, from: usize, rows: usize, dx: &mut [f32]) {
    let [h, w] = s.input;
    let [kh, kw] = s.kernel;
    let out_w = s.output()[1];
    for (p, row) in (from..from + rows).zip(col.chunks(s.k())) {
        let (top, left) =
            ((p / out_w * s.stride) as isize - s.pad as isize, (p % out_w * s.stride) as isize - s.pad as isize);
        for ky in 0..kh {
            let y = top + ky as isize;
            if y < 0 || y >= h as isize {
                continue;
            }
            let lo = (-left).clamp(0, kw as isize) as usize;
            let hi = (w as isize - left).clamp(lo as isize, kw as isize) as usize;
            if hi > lo {
                let at = (y as usize * w + (left + lo as isize) as usize) * s.c;
                let src = &row[(ky * kw + lo) * s.c..(ky * kw + hi) * s.c];
                dx[at..at + src.len()].iter_mut().zip(src).for_each(|(d, v)| *d += v);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values that f32 sums exactly: the tests below ask for equality, not for a tolerance.
    fn integers(len: usize, mut seed: u32) -> Vec<f32> {
        (0..len)
            .map(|_| {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (seed >> 16) as f32 % 17.0 - 8.0
            })
            .collect()
    }

    fn shapes() -> Vec<(usize, ConvShape)> {
        let shape = |input, c, n, kernel, stride, pad| ConvShape { input, c, n, kernel, stride, pad };
        vec![
            (3, shape([9, 10], 8, 16, [3, 3], 1, 1)),
            (2, shape([9, 10], 8, 16, [3, 3], 2, 1)),
            (9, shape([5, 4], 1, 10, [3, 3], 1, 1)),
            (2, shape([14, 14], 16, 32, [1, 1], 2, 0)),
            (1, shape([1, 1], 64, 10, [1, 1], 1, 0)),
            (2, shape([6, 7], 3, 5, [5, 2], 3, 2)),
            (1, shape([2, 2], 2, 3, [3, 3], 1, 1)),
        ]
    }

    /// Calls `f(x index, w index, y index)` for every product of the convolution.
    fn each_product(m: usize, s: &ConvShape, mut f: impl FnMut(usize, usize, usize)) {
        let [oh, ow] = s.output();
        for i in 0..m {
            for (oy, ox, o) in (0..oh).flat_map(|y| (0..ow).flat_map(move |x| (0..s.n).map(move |o| (y, x, o)))) {
                for c in 0..s.c {
                    for (ky, kx) in (0..s.kernel[0]).flat_map(|y| (0..s.kernel[1]).map(move |x| (y, x))) {
                        let (y, x) = (oy * s.stride + ky, ox * s.stride + kx);
                        if (s.pad..s.input[0] + s.pad).contains(&y) && (s.pad..s.input[1] + s.pad).contains(&x) {
                            let xi = ((i * s.input[0] + y - s.pad) * s.input[1] + x - s.pad) * s.c + c;
                            let wi = ((o * s.c + c) * s.kernel[0] + ky) * s.kernel[1] + kx;
                            f(xi, wi, ((i * oh + oy) * ow + ox) * s.n + o);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn forward_and_both_gradients_equal_the_definition() {
        for (m, s) in shapes() {
            let x = integers(m * s.input_len(), 1);
            let w = integers(s.n * s.k(), 2);
            let g = integers(m * s.output_len(), 3);
            let (mut y, mut dx, mut dw) = (vec![0.0; g.len()], vec![0.0; x.len()], vec![0.0; w.len()]);
            each_product(m, &s, |xi, wi, yi| {
                y[yi] += x[xi] * w[wi];
                dx[xi] += g[yi] * w[wi];
                dw[wi] += g[yi] * x[xi];
            });
            assert_eq!(conv_f32(&x, &w, &s), y, "{s:?}");
            assert_eq!(conv_f32_dx(&g, &w, &s), dx, "{s:?}");
            assert_eq!(conv_f32_dw(&x, &g, &s), dw, "{s:?}");
        }
    }

    #[test]
    fn one_thread_and_many_give_the_same_bits() {
        let s = ConvShape { input: [9, 9], c: 5, n: 7, kernel: [3, 3], stride: 1, pad: 1 };
        let real = |len, seed| integers(len, seed).iter().map(|v| (v * 0.37).sin()).collect::<Vec<f32>>();
        let (x, w, g) = (real(11 * s.input_len(), 1), real(s.n * s.k(), 2), real(11 * s.output_len(), 3));
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| (conv_f32(&x, &w, &s), conv_f32_dx(&g, &w, &s), conv_f32_dw(&x, &g, &s)))
        };
        let one = run(1);
        assert_eq!(run(2), one);
        assert_eq!(run(5), one);
    }
}
