//! f32 convolutions with TensorFlow's "SAME" padding, dense and depthwise: outputs are `ceil(input / stride)`, and where an odd
//! number of pixels is missing the extra one is right and below. Not a gradient, no bias, no activation.
//!
//! Shapes: `x [m, side, side, c]`, weight `[n, c, k, k]` (dense) or `[c, 1, k, k]` (depthwise), `y [m, out, out, n]`. Layout:
//! NHWC. Requires: nothing. Order: a dense output as in `float.rs`; a depthwise one is one chain over `[kh, kw]`, separate
//! multiplications and additions. Error: that of the chain; none where values and weights are integers and every sum stays
//! below 2^24, which is how quantized layers use it. Cost: one padded copy of the input, then the products.

use super::{ConvShape, conv_f32, im2col};
use rayon::prelude::*;

/// The geometry of a square convolution with "SAME" padding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SameConv {
    /// Height and width of the input.
    pub side: usize,
    /// Input channels.
    pub c: usize,
    /// Output channels; those of the input when `depthwise`.
    pub n: usize,
    /// Height and width of the kernel.
    pub kernel: usize,
    /// Stride, at least 1.
    pub stride: usize,
    /// Whether output channel `j` reads input channel `j` alone.
    pub depthwise: bool,
}

impl SameConv {
    /// Height and width of the output.
    pub fn output(&self) -> usize {
        self.side.div_ceil(self.stride)
    }

    /// Values that one output sums.
    pub fn k(&self) -> usize {
        self.kernel * self.kernel * if self.depthwise { 1 } else { self.c }
    }

    /// Pixels of padding above (and left), and in all.
    fn pads(&self) -> (usize, usize) {
        let all = ((self.output() - 1) * self.stride + self.kernel).saturating_sub(self.side);
        (all / 2, all)
    }

    /// As a convolution without padding over the padded picture. (Where a stride leaves pixels over at the end, they are not
    /// in it.)
    fn padded(&self) -> ConvShape {
        let side = (self.output() - 1) * self.stride + self.kernel;
        ConvShape { input: [side, side], c: self.c, n: self.n, kernel: [self.kernel; 2], stride: self.stride, pad: 0 }
    }

    /// The pictures with zeros around them.
    fn pad(&self, x: &[f32]) -> Vec<f32> {
        let s = self.padded();
        let (side, before) = (s.input[0], self.pads().0);
        let (row, picture) = (side * self.c, self.side * self.side * self.c);
        assert!(
            picture > 0 && x.len().is_multiple_of(picture),
            "pictures of {} x {} x {}",
            self.side,
            self.side,
            self.c
        );
        let taken = self.side.min(side - before) * self.c;
        let mut out = vec![0.0f32; x.len() / picture * side * row];
        out.par_chunks_mut(side * row).zip(x.par_chunks(picture)).for_each(|(out, x)| {
            let rows = out.chunks_exact_mut(row).skip(before).zip(x.chunks_exact(self.side * self.c));
            rows.for_each(|(out, x)| out[before * self.c..][..taken].copy_from_slice(&x[..taken]));
        });
        out
    }

    /// `y = conv(x, w)`.
    ///
    /// # Panics
    /// When a length is not that of its shape.
    pub fn forward(&self, x: &[f32], w: &[f32]) -> Vec<f32> {
        assert!(!self.depthwise || self.c == self.n, "a depthwise convolution keeps its channels");
        assert_eq!(w.len(), self.n * self.k(), "weight length");
        let s = self.padded();
        let padded;
        let x = if s.input == [self.side; 2] {
            x
        } else {
            padded = self.pad(x);
            &padded
        };
        if self.depthwise { depthwise(x, w, &s) } else { conv_f32(x, w, &s) }
    }

    /// The inputs of the outputs, a row for each: `[m * rows, kernel * kernel * c]` in the order `[kh, kw, c]`, of `rows`
    /// output pixels of each picture (all of them, or `most` evenly spread ones). Gives the rows of each picture too.
    ///
    /// # Panics
    /// As [`SameConv::forward`].
    pub fn columns(&self, x: &[f32], most: usize) -> (Vec<f32>, usize) {
        let s = self.padded();
        let padded = self.pad(x);
        let (pixels, len) = (s.pixels(), s.k());
        let rows = pixels.min(most);
        let mut out = vec![0.0f32; padded.len() / s.input_len() * rows * len];
        out.par_chunks_mut(rows * len).zip(padded.par_chunks(s.input_len())).for_each(|(out, x)| {
            for (i, row) in out.chunks_exact_mut(len).enumerate() {
                im2col(x, &s, i * pixels / rows, 1, 0.0, row, len);
            }
        });
        (out, rows)
    }
}

/// A depthwise convolution without padding: `x [m, h, w, c]`, weight `[c, 1, kh, kw]`.
fn depthwise(x: &[f32], w: &[f32], s: &ConvShape) -> Vec<f32> {
    let (c, [kh, kw]) = (s.c, s.kernel);
    // [kh * kw, c], so that a tap is one run of channels.
    let taps: Vec<f32> = (0..kh * kw).flat_map(|t| (0..c).map(move |j| w[j * kh * kw + t])).collect();
    let ([_, width], [out_h, out_w]) = (s.input, s.output());
    assert!(x.len().is_multiple_of(s.input_len()), "pictures of {} values", s.input_len());
    let mut y = vec![0.0f32; x.len() / s.input_len() * s.output_len()];
    // A row of the output a task.
    y.par_chunks_mut(out_w * c).enumerate().for_each(|(i, y)| {
        let (picture, top) = (i / out_h, i % out_h * s.stride);
        let x = &x[picture * s.input_len()..][..s.input_len()];
        for (p, y) in y.chunks_exact_mut(c).enumerate() {
            for (t, w) in taps.chunks_exact(c).enumerate() {
                let at = ((top + t / kw) * width + p * s.stride + t % kw) * c;
                y.iter_mut().zip(&x[at..at + c]).zip(w).for_each(|((y, x), w)| *y += x * w);
            }
        }
    });
    y
}

#[cfg(test)]
mod tests {
    use super::*;

    fn integers(len: usize, seed: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 7 + seed * 13) % 11) as f32 - 5.0).collect()
    }

    /// By the definition of "SAME": `y[p] = sum x[p * stride + tap - before] * w[tap]`.
    fn reference(x: &[f32], w: &[f32], s: &SameConv, m: usize) -> Vec<f32> {
        let (out, (before, _)) = (s.output(), s.pads());
        let mut y = Vec::new();
        for at in 0..m * out * out * s.n {
            let (o, px, py, i) = (at % s.n, at / s.n % out, at / s.n / out % out, at / s.n / out / out);
            let mut sum = 0.0;
            for ky in 0..s.kernel {
                for kx in 0..s.kernel {
                    let inside = before..s.side + before;
                    let (iy, ix) = (py * s.stride + ky, px * s.stride + kx);
                    if !inside.contains(&iy) || !inside.contains(&ix) {
                        continue;
                    }
                    let pixel = ((i * s.side + iy - before) * s.side + ix - before) * s.c;
                    let channels = if s.depthwise { o..o + 1 } else { 0..s.c };
                    for c in channels {
                        let row = if s.depthwise { o } else { o * s.c + c };
                        sum += x[pixel + c] * w[(row * s.kernel + ky) * s.kernel + kx];
                    }
                }
            }
            y.push(sum);
        }
        y
    }

    #[test]
    fn dense_and_depthwise_equal_the_definition() {
        for (side, kernel, stride) in [(8, 3, 2), (7, 3, 2), (7, 5, 1), (6, 5, 2), (5, 1, 1), (4, 3, 1), (5, 1, 2)] {
            for (c, n, depthwise) in [(3, 5, false), (4, 4, true)] {
                let s = SameConv { side, c, n, kernel, stride, depthwise };
                let (x, w) = (integers(2 * side * side * c, 1), integers(n * s.k(), 2));
                assert_eq!(s.forward(&x, &w), reference(&x, &w, &s, 2), "{s:?}");
            }
        }
        // The case that differs from symmetric padding: 224 pixels, 3x3, stride 2 has its one padded pixel at the end.
        let s = SameConv { side: 224, c: 3, n: 32, kernel: 3, stride: 2, depthwise: false };
        assert_eq!((s.pads(), s.output()), ((0, 1), 112));
    }

    #[test]
    fn columns_are_what_the_convolution_multiplies() {
        let s = SameConv { side: 7, c: 3, n: 1, kernel: 3, stride: 2, depthwise: false };
        let (x, w) = (integers(2 * 7 * 7 * 3, 1), integers(27, 2));
        let y = s.forward(&x, &w);
        for most in [usize::MAX, 5] {
            let (rows, each) = s.columns(&x, most);
            assert_eq!((each, rows.len()), (16.min(most), 2 * each * 27));
            for (r, row) in rows.chunks_exact(27).enumerate() {
                // Rows are [kh, kw, c], weights [c, kh, kw].
                let sum: f32 = row.iter().enumerate().map(|(i, v)| v * w[i % 3 * 9 + i / 3]).sum();
                assert_eq!(sum, y[r / each * 16 + r % each * 16 / each]);
            }
        }
    }

    #[test]
    fn one_thread_and_many_give_the_same_bits() {
        let s = SameConv { side: 9, c: 5, n: 5, kernel: 3, stride: 1, depthwise: true };
        let real = |len, seed| integers(len, seed).iter().map(|v| (v * 0.37).sin()).collect::<Vec<f32>>();
        let (x, w) = (real(3 * 81 * 5, 1), real(45, 2));
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| s.forward(&x, &w))
        };
        assert_eq!(run(4), run(1));
    }
}
