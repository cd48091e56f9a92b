//! The small per-channel steps around a convolution: scale and shift, the mean over a picture, the largest of neighbours. Not
//! batch norm.
//!
//! Shapes: `x [rows, c]`, `scale`, `shift` `[c]`. Layout: channels last. Requires: nothing. Order: element by element; a
//! mean is one chain over the pixels; parameter gradients as in `batch_norm`. Error: a multiplication and an addition, each
//! rounded (never fused, so that training and the runtime agree bit for bit).

use super::batch_norm::sums;
use rayon::prelude::*;

/// Values that one task takes, a whole number of rows.
fn task(c: usize) -> usize {
    (1 << 14) / c.max(1) * c + c
}

/// `x * scale + shift`.
///
/// # Panics
/// When lengths disagree.
pub fn affine_forward(x: &[f32], scale: &[f32], shift: &[f32]) -> Vec<f32> {
    let c = scale.len();
    assert!(c > 0 && shift.len() == c && x.len().is_multiple_of(c), "affine shapes");
    let mut y = vec![0.0f32; x.len()];
    y.par_chunks_mut(task(c)).zip(x.par_chunks(task(c))).for_each(|(y, x)| {
        for (y, x) in y.chunks_exact_mut(c).zip(x.chunks_exact(c)) {
            for j in 0..c {
                y[j] = x[j] * scale[j] + shift[j];
            }
        }
    });
    y
}

/// [`affine_forward`] of integer sums, each converted to f32 first (exact below 2^24).
///
/// # Panics
/// When lengths disagree.
pub fn affine_sums(x: &[i32], scale: &[f32], shift: &[f32]) -> Vec<f32> {
    let c = scale.len();
    assert!(c > 0 && shift.len() == c && x.len().is_multiple_of(c), "affine shapes");
    let mut y = vec![0.0f32; x.len()];
    y.par_chunks_mut(task(c)).zip(x.par_chunks(task(c))).for_each(|(y, x)| {
        for (y, x) in y.chunks_exact_mut(c).zip(x.chunks_exact(c)) {
            for j in 0..c {
                y[j] = x[j] as f32 * scale[j] + shift[j];
            }
        }
    });
    y
}

/// The gradient for `x`: `g * scale`.
///
/// # Panics
/// When lengths disagree.
pub fn affine_dx(g: &[f32], scale: &[f32]) -> Vec<f32> {
    let c = scale.len();
    assert!(c > 0 && g.len().is_multiple_of(c), "affine shapes");
    let mut dx = vec![0.0f32; g.len()];
    dx.par_chunks_mut(task(c)).zip(g.par_chunks(task(c))).for_each(|(dx, g)| {
        for (dx, g) in dx.chunks_exact_mut(c).zip(g.chunks_exact(c)) {
            for j in 0..c {
                dx[j] = g[j] * scale[j];
            }
        }
    });
    dx
}

/// The gradients for `scale` and `shift`, `[c]` each: the sums of `g * x` and of `g`.
///
/// # Panics
/// When lengths disagree.
pub fn affine_dparams(x: &[f32], g: &[f32], c: usize) -> [Vec<f32>; 2] {
    assert!(c > 0 && g.len() == x.len() && x.len().is_multiple_of(c), "affine shapes");
    sums::<2>(x, g, c, |_, x, g| [g * x, g]).map(|s| s.into_iter().map(|v| v as f32).collect())
}

/// The mean over the `pixels` of each picture: `[m, pixels, c]` gives `[m, c]`, the sum in order times `1 / pixels`.
///
/// # Panics
/// When lengths disagree.
pub fn mean_pool(x: &[f32], pixels: usize, c: usize) -> Vec<f32> {
    assert!(pixels * c > 0 && x.len().is_multiple_of(pixels * c), "pool shapes");
    let part = 1.0 / pixels as f32;
    let mut out = Vec::with_capacity(x.len() / pixels);
    for picture in x.chunks_exact(pixels * c) {
        let at = out.len();
        out.resize(at + c, 0.0f32);
        for row in picture.chunks_exact(c) {
            out[at..].iter_mut().zip(row).for_each(|(o, v)| *o += v);
        }
        out[at..].iter_mut().for_each(|o| *o *= part);
    }
    out
}

/// The largest value of each `kernel` x `kernel` pixels, `stride` apart, that lie within the picture (PyTorch's `MaxPool2d`):
/// `[m, h, w, c]` gives `[m, oh, ow, c]`, and `[oh, ow]` too, `(h + 2 pad - kernel) / stride + 1`.
///
/// # Panics
/// When lengths disagree, or `pad` is more than half the kernel (a window would hold no pixel).
pub fn max_pool(x: &[f32], [h, w]: [usize; 2], c: usize, [kernel, stride, pad]: [usize; 3]) -> (Vec<f32>, [usize; 2]) {
    assert!(h * w * c > 0 && x.len().is_multiple_of(h * w * c), "pool shapes");
    assert!(2 * pad <= kernel && kernel <= h.min(w) + 2 * pad, "pool windows");
    let [oh, ow] = [h, w].map(|d| (d + 2 * pad - kernel) / stride + 1);
    let mut out = vec![f32::NEG_INFINITY; x.len() / (h * w) * oh * ow];
    out.par_chunks_mut(oh * ow * c).zip(x.par_chunks(h * w * c)).for_each(|(out, x)| {
        for (p, out) in out.chunks_exact_mut(c).enumerate() {
            let inside = |at: usize, d: usize| (at * stride).saturating_sub(pad)..(at * stride + kernel - pad).min(d);
            for pixel in inside(p / ow, h).flat_map(|y| inside(p % ow, w).map(move |x| y * w + x)) {
                out.iter_mut().zip(&x[pixel * c..]).for_each(|(o, v)| *o = if *v > *o || v.is_nan() { *v } else { *o });
            }
        }
    });
    (out, [oh, ow])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_gradients_equal_the_definition() {
        let (rows, c) = (5000, 7);
        let x: Vec<f32> = (0..rows * c).map(|i| (i % 13) as f32 - 6.0).collect();
        let g: Vec<f32> = (0..rows * c).map(|i| (i % 5) as f32 - 2.0).collect();
        let (scale, shift) = ([1.5f32, -2.0, 0.0, 3.0, 1.0, 0.5, -1.0], [1.0f32; 7]);
        let y = affine_forward(&x, &scale, &shift);
        let dx = affine_dx(&g, &scale);
        assert_eq!(affine_sums(&x.iter().map(|&v| v as i32).collect::<Vec<_>>(), &scale, &shift), y);
        let (mut dscale, mut dshift) = ([0.0f32; 7], [0.0f32; 7]);
        for i in 0..x.len() {
            assert_eq!(y[i], x[i] * scale[i % c] + 1.0);
            assert_eq!(dx[i], g[i] * scale[i % c]);
            dscale[i % c] += g[i] * x[i];
            dshift[i % c] += g[i];
        }
        // Small integers: the sums are exact in any order.
        assert_eq!(affine_dparams(&x, &g, c), [dscale.to_vec(), dshift.to_vec()]);
    }

    #[test]
    fn the_largest_of_neighbours_is_of_pixels_inside() {
        // 3 x 4 pixels of two channels, all below 0: zeros around would win.
        let x: Vec<f32> = (0..24).map(|i| if i % 2 == 0 { -1.0 - i as f32 } else { i as f32 - 100.0 }).collect();
        let (y, size) = max_pool(&x, [3, 4], 2, [3, 2, 1]);
        assert_eq!(size, [2, 2]);
        assert_eq!(y, [-1.0, -89.0, -3.0, -85.0, -9.0, -81.0, -11.0, -77.0]);
        assert!(max_pool(&[1.0, f32::NAN, 0.0, 2.0], [2, 2], 1, [3, 2, 1]).0[0].is_nan());
    }

    #[test]
    fn the_mean_is_over_pixels_not_channels() {
        assert_eq!(mean_pool(&[1.0, 10.0, 3.0, 30.0, 5.0, 0.0, 7.0, 2.0], 2, 2), [2.0, 20.0, 6.0, 1.0]);
    }
}
