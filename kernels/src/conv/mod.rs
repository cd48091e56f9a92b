//! Convolution kernels: the f32 ones that training runs on (forward and both gradients), and the integer one that
//! the runtime runs on. Pictures are NHWC throughout. Not a layer: no batch norm, no activation, no bias.
//!
//! Shapes: `m` pictures, `n` output channels, `k = kh * kw * c` the reduction. Every kernel walks the pixels of a
//! picture in blocks, gathers a block's `k` inputs (im2col) and multiplies; nothing the size of the whole im2col
//! matrix is ever held.

mod affine;
mod batch_norm;
mod codes;
mod float;
pub(crate) mod gemm;
mod int;
mod padded;

pub use affine::{affine_dparams, affine_dx, affine_forward, affine_sums, max_pool, mean_pool};
pub use batch_norm::{BatchNormGrads, batch_norm_backward, batch_norm_forward};
pub use codes::{CodeGradients, code_bytes, code_gradient, code_values, learned_code_gradient, min_max};
pub use float::{conv_f32, conv_f32_dw, conv_f32_dx};
pub use int::IntConv;
pub use padded::PaddedConv;

/// Rows (output pixels) that one im2col block holds: 64 rows of a 3x3 convolution over 64 channels are 147 KB of f32.
pub(crate) const BLOCK: usize = 64;

/// The geometry of a square-stride convolution over a batch of NHWC pictures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConvShape {
    /// Input height and width.
    pub input: [usize; 2],
    /// Input channels.
    pub c: usize,
    /// Output channels.
    pub n: usize,
    /// Kernel height and width.
    pub kernel: [usize; 2],
    /// Stride, both directions, at least 1.
    pub stride: usize,
    /// Zero padding on every side.
    pub pad: usize,
}

impl ConvShape {
    /// Whether the geometry makes sense: no zero extent, and a kernel no larger than the padded picture.
    pub fn is_valid(&self) -> bool {
        let fits = |i: usize| self.kernel[i] > 0 && self.kernel[i] <= self.input[i] + 2 * self.pad;
        self.c > 0 && self.n > 0 && self.stride > 0 && fits(0) && fits(1)
    }

    /// Output height and width: `(input + 2 pad - kernel) / stride + 1`. Needs a valid shape.
    pub fn output(&self) -> [usize; 2] {
        [0, 1].map(|i| (self.input[i] + 2 * self.pad - self.kernel[i]) / self.stride + 1)
    }

    /// The reduction dimension `kh * kw * c`.
    pub fn k(&self) -> usize {
        self.kernel[0] * self.kernel[1] * self.c
    }

    /// Values of one input picture.
    pub fn input_len(&self) -> usize {
        self.input[0] * self.input[1] * self.c
    }

    /// Output pixels of one picture.
    pub fn pixels(&self) -> usize {
        let [h, w] = self.output();
        h * w
    }

    /// Values of one output picture.
    pub fn output_len(&self) -> usize {
        self.pixels() * self.n
    }
}

/// Weights `[n, c, kh, kw]` (the stored order) as `[n, kh, kw, c]` (the order of an im2col row).
pub(crate) fn kernel_order<T: Copy>(w: &[T], s: &ConvShape) -> Vec<T> {
    let taps = s.kernel[0] * s.kernel[1];
    let mut out = Vec::with_capacity(w.len());
    for filter in w.chunks_exact(s.c * taps) {
        for tap in 0..taps {
            out.extend((0..s.c).map(|c| filter[c * taps + tap]));
        }
    }
    out
}

/// Gathers the inputs of output pixels `from .. from + rows` of one picture: row `r` of `col` (row length `ld`, at
/// least `k`) becomes the `k` inputs in the order `[kh, kw, c]`, with `zero` outside the picture. Columns beyond `k`
/// are left as they are.
pub(crate) fn im2col<T: Copy>(x: &[T], s: &ConvShape, from: usize, rows: usize, zero: T, col: &mut [T], ld: usize) {
    let [h, w] = s.input;
    let [kh, kw] = s.kernel;
    let out_w = s.output()[1];
    let span = kw * s.c;
    for (p, row) in (from..from + rows).zip(col.chunks_mut(ld)) {
        let (top, left) =
            ((p / out_w * s.stride) as isize - s.pad as isize, (p % out_w * s.stride) as isize - s.pad as isize);
        for ky in 0..kh {
            let dst = &mut row[ky * span..(ky + 1) * span];
            let y = top + ky as isize;
            if y < 0 || y >= h as isize {
                dst.fill(zero);
                continue;
            }
            // The part [lo, hi) of the kernel row that lies inside the picture.
            let lo = (-left).clamp(0, kw as isize) as usize;
            let hi = (w as isize - left).clamp(lo as isize, kw as isize) as usize;
            dst[..lo * s.c].fill(zero);
            dst[hi * s.c..].fill(zero);
            if hi > lo {
                let at = (y as usize * w + (left + lo as isize) as usize) * s.c;
                dst[lo * s.c..hi * s.c].copy_from_slice(&x[at..at + (hi - lo) * s.c]);
            }
        }
    }
}
