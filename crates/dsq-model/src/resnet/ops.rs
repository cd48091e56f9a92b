//! The operations of the residual network on NHWC tensors, each one fused Burn operation over `dsq-kernels`.
//! No layer and no parameter (see `layers.rs`).

use crate::ops::slice_op::{Slice, SliceOp, apply1, apply2, apply3};
use burn::tensor::Tensor;
use dsq_kernels::conv::{self, ConvShape};
use dsq_quant::{Mapping, QParams, QuantArgs};
use std::sync::{Arc, OnceLock};

/// `conv(x, w)`: `x [m, h, w, c]`, `w [n, c, kh, kw]` gives `[m, oh, ow, n]`.
pub(super) fn conv2d(x: Tensor<4>, w: Tensor<4>, stride: usize, pad: usize) -> Tensor<4> {
    apply2(Arc::new(Conv { stride, pad }), x, w)
}

/// `x * scale + shift` along the last axis, a multiplication and then an addition (no fused rounding).
pub(super) fn affine(x: Tensor<4>, scale: Tensor<1>, shift: Tensor<1>) -> Tensor<4> {
    apply3(Arc::new(Affine), x, scale, shift)
}

/// The mean over the pixels: `[m, h, w, c]` gives `[m, 1, 1, c]`.
pub(super) fn mean_pool(x: Tensor<4>) -> Tensor<4> {
    apply1(Arc::new(MeanPool), x)
}

/// Batch norm by the statistics of the batch, and those: `(y, mean, biased variance)`.
pub(super) fn batch_norm(x: Tensor<4>, gamma: Tensor<1>, beta: Tensor<1>, eps: f32) -> (Tensor<4>, Vec<f32>, Vec<f32>) {
    let op = Arc::new(BatchNorm { eps, stats: OnceLock::new() });
    let y = apply3(op.clone(), x, gamma, beta);
    let (mean, var) = op.stats.get().cloned().unwrap_or_default();
    (y, mean, var)
}

/// `code - zero` of every value as an f32 integer, with the clipped straight-through gradient `g / scale`.
pub(super) fn codes<const D: usize>(x: Tensor<D>, args: QuantArgs, params: Vec<QParams>) -> Tensor<D> {
    apply1(Arc::new(Codes { args, params }), x)
}

/// [`codes`] on a learned grid, with gradients for the scales (one for each run of `x`, as [`shipped_scale`] gives them) and
/// the zero points (as many, not rounded; `None`: at the smallest code, for values of at least 0).
pub(super) fn learned_codes<const D: usize>(
    x: Tensor<D>,
    args: QuantArgs,
    scale: Tensor<1>,
    zero: Option<Tensor<1>>,
) -> Tensor<D> {
    let op = Arc::new(LearnedCodes(args));
    match zero {
        None => apply2(op, x, scale),
        Some(zero) => apply3(op, x, scale, zero),
    }
}

/// The scales that ship for learned ones; the rounding passes its gradient through.
pub(super) fn shipped_scale(scale: Tensor<1>, args: QuantArgs) -> Tensor<1> {
    apply1(Arc::new(ShippedScale(args)), scale)
}

/// `x`, with its gradient multiplied by `by`.
pub(super) fn scale_gradient(x: Tensor<1>, by: f32) -> Tensor<1> {
    apply1(Arc::new(ScaleGradient(by)), x)
}

#[derive(Debug)]
struct Conv {
    stride: usize,
    pad: usize,
}

impl Conv {
    fn shape(&self, x: &[usize], w: &[usize]) -> ConvShape {
        ConvShape { input: [x[1], x[2]], c: x[3], n: w[0], kernel: [w[2], w[3]], stride: self.stride, pad: self.pad }
    }
}

impl SliceOp for Conv {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        let s = self.shape(x[0].shape, x[1].shape);
        let [h, w] = s.output();
        (conv::conv_f32(x[0].data, x[1].data, &s), vec![x[0].shape[0], h, w, s.n])
    }

    fn backward(&self, x: &[Slice], g: &[f32], wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let s = self.shape(x[0].shape, x[1].shape);
        vec![
            wanted[0].then(|| conv::conv_f32_dx(g, x[1].data, &s)),
            wanted[1].then(|| conv::conv_f32_dw(x[0].data, g, &s)),
        ]
    }
}

#[derive(Debug)]
struct Affine;

impl SliceOp for Affine {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        (conv::affine_forward(x[0].data, x[1].data, x[2].data), x[0].shape.to_vec())
    }

    fn backward(&self, x: &[Slice], g: &[f32], wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let dx = wanted[0].then(|| conv::affine_dx(g, x[1].data));
        if !wanted[1] && !wanted[2] {
            return vec![dx, None, None];
        }
        let [dscale, dshift] = conv::affine_dparams(x[0].data, g, x[1].data.len());
        vec![dx, Some(dscale), Some(dshift)]
    }
}

#[derive(Debug)]
struct MeanPool;

impl SliceOp for MeanPool {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        let [m, h, w, c] = dims(x[0].shape);
        (conv::mean_pool(x[0].data, h * w, c), vec![m, 1, 1, c])
    }

    fn backward(&self, x: &[Slice], g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let [_, h, w, c] = dims(x[0].shape);
        let part = 1.0 / (h * w) as f32;
        let pixels = g.chunks_exact(c).flat_map(|g| std::iter::repeat_n(g, h * w));
        vec![Some(pixels.flat_map(|g| g.iter().map(|g| g * part)).collect())]
    }
}

fn dims(shape: &[usize]) -> [usize; 4] {
    [shape[0], shape[1], shape[2], shape[3]]
}

#[derive(Debug)]
struct BatchNorm {
    eps: f32,
    stats: OnceLock<(Vec<f32>, Vec<f32>)>,
}

impl SliceOp for BatchNorm {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        let (y, mean, var) = conv::batch_norm_forward(x[0].data, x[1].data, x[2].data, self.eps);
        let _ = self.stats.set((mean, var));
        (y, x[0].shape.to_vec())
    }

    fn backward(&self, x: &[Slice], g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let Some((mean, var)) = self.stats.get() else { return vec![None, None, None] };
        let grads = conv::batch_norm_backward(x[0].data, g, x[1].data, mean, var, self.eps);
        vec![Some(grads.dx), Some(grads.dgamma), Some(grads.dbeta)]
    }
}

#[derive(Debug)]
struct Codes {
    args: QuantArgs,
    params: Vec<QParams>,
}

impl SliceOp for Codes {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        (conv::code_values(x[0].data, &self.args, &self.params), x[0].shape.to_vec())
    }

    fn backward(&self, x: &[Slice], g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        vec![Some(conv::code_gradient(x[0].data, g, &self.args, &self.params))]
    }
}

/// Inputs are the values, the scales and, where there are such, the zero points.
#[derive(Debug)]
struct LearnedCodes(QuantArgs);

impl LearnedCodes {
    fn params(&self, x: &[Slice]) -> Vec<QParams> {
        let smallest = self.0.qtype.qmin() as f32;
        let smallest = if self.0.mapping == Mapping::Asymmetric { smallest } else { 0.0 };
        let zero = |i: usize| x.get(2).map_or(smallest, |z| z.data[i]);
        x[1].data.iter().enumerate().map(|(i, &s)| self.0.learned_qparams(s, zero(i))).collect()
    }
}

impl SliceOp for LearnedCodes {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        (conv::code_values(x[0].data, &self.0, &self.params(x)), x[0].shape.to_vec())
    }

    fn backward(&self, x: &[Slice], g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let d = conv::learned_code_gradient(x[0].data, g, &self.0, &self.params(x));
        let mut out = vec![Some(d.x), Some(d.scale)];
        if x.len() == 3 {
            out.push(Some(d.zero));
        }
        out
    }
}

#[derive(Debug)]
struct ShippedScale(QuantArgs);

impl SliceOp for ShippedScale {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        (x[0].data.iter().map(|&s| self.0.learned_qparams(s, 0.0).scale).collect(), x[0].shape.to_vec())
    }

    fn backward(&self, _x: &[Slice], g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        vec![Some(g.to_vec())]
    }
}

#[derive(Debug)]
struct ScaleGradient(f32);

impl SliceOp for ScaleGradient {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        (x[0].data.to_vec(), x[0].shape.to_vec())
    }

    fn backward(&self, _x: &[Slice], g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        vec![Some(g.iter().map(|g| g * self.0).collect())]
    }
}
