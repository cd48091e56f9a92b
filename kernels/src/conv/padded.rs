//! f32 convolutions with any number of zeros on each side of a picture, dense and depthwise. Not a gradient, no bias, no
//! activation, and no opinion on how many zeros there should be ("SAME" of TensorFlow and the padding of PyTorch are the
//! caller's).
//!
//! Shapes: `x [m, h, w, c]`, weight `[n, c, k, k]` (dense) or `[c, 1, k, k]` (depthwise), `y [m, oh, ow, n]`. Layout:
//! NHWC. Requires: nothing. Order: a dense output as in `float.rs`; a depthwise one is one chain over `[kh, kw]`, separate
//! multiplications and additions. Error: that of the chain; none where values and weights are integers and every sum stays
//! below 2^24, which is how quantized layers use it. Cost: one padded copy of the input, then the products.

use super::{ConvShape, conv_f32, im2col};
use rayon::prelude::*;

/// The geometry of a convolution with a square kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PaddedConv {
    /// Height and width of the input.
    pub input: [usize; 2],
    /// Zeros above and below, left and right.
    pub pads: [[usize; 2]; 2],
    /// Input channels.
    pub c: usize,
    /// Output channels; those of the input when `depthwise`.
    pub n: usize,
    /// Height and width of the kernel; at most those of the padded input.
    pub kernel: usize,
    /// Stride, at least 1.
    pub stride: usize,
    /// Whether output channel `j` reads input channel `j` alone.
    pub depthwise: bool,
}

impl PaddedConv {
    /// Height and width of the output: `(input + zeros - kernel) / stride + 1`.
    pub fn output(&self) -> [usize; 2] {
        [0, 1].map(|i| (self.input[i] + self.pads[i][0] + self.pads[i][1] - self.kernel) / self.stride + 1)
    }

    /// Pixels of one output picture.
    pub fn pixels(&self) -> usize {
        self.output()[0] * self.output()[1]
    }

    /// Values that one output sums.
    pub fn k(&self) -> usize {
        self.kernel * self.kernel * if self.depthwise { 1 } else { self.c }
    }

    /// As a convolution without padding over the padded picture. (Where a stride leaves pixels over at the end, they are not
    /// in it.)
    fn padded(&self) -> ConvShape {
        let input = self.output().map(|out| (out - 1) * self.stride + self.kernel);
        ConvShape { input, c: self.c, n: self.n, kernel: [self.kernel; 2], stride: self.stride, pad: 0 }
    }

    /// The pictures with zeros around them.
    fn pad(&self, x: &[f32]) -> Vec<f32> {
        let ([h, w], [height, width]) = (self.input, self.padded().input);
        let (top, left) = (self.pads[0][0], self.pads[1][0]);
        let (row, picture) = (width * self.c, h * w * self.c);
        assert!(picture > 0 && x.len().is_multiple_of(picture), "pictures of {h} x {w} x {}", self.c);
        let taken = w.min(width - left) * self.c;
        let mut out = vec![0.0f32; x.len() / picture * height * row];
        out.par_chunks_mut(height * row).zip(x.par_chunks(picture)).for_each(|(out, x)| {
            let rows = out.chunks_exact_mut(row).skip(top).zip(x.chunks_exact(w * self.c));
            rows.for_each(|(out, x)| out[left * self.c..][..taken].copy_from_slice(&x[..taken]));
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
        let x = if s.input == self.input {
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
    /// As [`PaddedConv::forward`].
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

    /// By the definition: `y[p] = sum x[p * stride + tap - before] * w[tap]`.
    fn reference(x: &[f32], w: &[f32], s: &PaddedConv, m: usize) -> Vec<f32> {
        let ([oh, ow], [h, width]) = (s.output(), s.input);
        let before = s.pads.map(|p| p[0]);
        let mut y = Vec::new();
        for at in 0..m * oh * ow * s.n {
            let (o, px, py, i) = (at % s.n, at / s.n % ow, at / s.n / ow % oh, at / s.n / ow / oh);
            let mut sum = 0.0;
            for ky in 0..s.kernel {
                for kx in 0..s.kernel {
                    let (iy, ix) = (py * s.stride + ky, px * s.stride + kx);
                    if !(before[0]..h + before[0]).contains(&iy) || !(before[1]..width + before[1]).contains(&ix) {
                        continue;
                    }
                    let pixel = ((i * h + iy - before[0]) * width + ix - before[1]) * s.c;
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
        for (input, pads, kernel, stride) in [
            ([8, 8], [[0, 1]; 2], 3, 2),
            ([7, 7], [[1, 1]; 2], 3, 2),
            ([7, 7], [[2, 2]; 2], 5, 1),
            ([6, 6], [[1, 2]; 2], 5, 2),
            ([5, 5], [[0, 0]; 2], 1, 1),
            ([5, 5], [[0, 0]; 2], 1, 2),
            ([9, 6], [[3, 3]; 2], 7, 2),
            ([5, 8], [[1, 1], [0, 1]], 3, 2),
            ([1, 1], [[1, 1]; 2], 3, 1),
        ] {
            for (c, n, depthwise) in [(3, 5, false), (4, 4, true)] {
                let s = PaddedConv { input, pads, c, n, kernel, stride, depthwise };
                let (x, w) = (integers(2 * input[0] * input[1] * c, 1), integers(n * s.k(), 2));
                assert_eq!(s.forward(&x, &w), reference(&x, &w, &s, 2), "{s:?}");
            }
        }
    }

    #[test]
    fn columns_are_what_the_convolution_multiplies() {
        let s = PaddedConv { input: [7; 2], pads: [[1, 1]; 2], c: 3, n: 1, kernel: 3, stride: 2, depthwise: false };
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
        let s = PaddedConv { input: [9; 2], pads: [[1, 1]; 2], c: 5, n: 5, kernel: 3, stride: 1, depthwise: true };
        let real = |len, seed| integers(len, seed).iter().map(|v| (v * 0.37).sin()).collect::<Vec<f32>>();
        let (x, w) = (real(3 * 81 * 5, 1), real(45, 2));
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| s.forward(&x, &w))
        };
        assert_eq!(run(4), run(1));
    }
}
