//! Grids that are trained: the scales (and zero points) of a weight or an activation as parameters, and the operation that
//! puts values on them with the gradients of LSQ and LSQ+. The formulas are `dsq_quant`'s, the walk is
//! `dsq_kernels::fake_quant`. Not the choice of what is learned (see `dsq-train`, `qat`).

use crate::llama::host;
use crate::ops::slice_op::{Slice, SliceOp, apply2, apply3};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use dsq_kernels::fake_quant::{self as kernel, Learned};
use dsq_quant::{Mapping, QParams, QuantArgs};
use std::sync::Arc;

/// The learned scales and zero points of one tensor.
#[derive(Module, Debug)]
pub struct LearnedGrid {
    /// Scales in effect, in f32, one for each group, row major; what ships is [`QuantArgs::stored_learned_qparams`] of them.
    pub scale: Param<Tensor<1>>,
    /// Zero points in the domain of codes, not rounded; `None` when symmetric.
    pub zero: Option<Param<Tensor<1>>>,
    /// The global scale under which the scales are stored, of schemes that have one; it is not trained.
    #[module(skip)]
    global: Option<f32>,
}

impl LearnedGrid {
    /// Starts at `params`, those in effect, one for each group.
    pub fn new(params: &[QParams], mapping: Mapping, device: &Device) -> Self {
        let zero = (mapping == Mapping::Asymmetric).then(|| params.iter().map(|p| p.zero as f32).collect());
        Self::from_values(params.iter().map(|p| p.scale).collect(), zero, device)
    }

    /// From saved values.
    pub fn from_values(scale: Vec<f32>, zero: Option<Vec<f32>>, device: &Device) -> Self {
        let param = |v: Vec<f32>| Param::from_tensor(Tensor::from_floats(v.as_slice(), device));
        Self { scale: param(scale), zero: zero.map(param), global: None }
    }

    /// The same scales in effect, stored under a global one.
    pub fn under(self, global: Option<f32>) -> Self {
        Self { global, ..self }
    }

    /// The global scale, of schemes that have one.
    pub fn global(&self) -> Option<f32> {
        self.global
    }

    /// The scales and zero points, as they are trained.
    pub fn values(&self) -> (Vec<f32>, Option<Vec<f32>>) {
        (host(self.scale.val()), self.zero.as_ref().map(|z| host(z.val())))
    }

    /// What ships, one for each group: stored parameters.
    pub fn qparams(&self, args: &QuantArgs) -> Vec<QParams> {
        let (scale, zero) = self.values();
        let zero = |i: usize| zero.as_ref().map_or(0.0, |z| z[i]);
        scale.iter().enumerate().map(|(i, &s)| args.stored_learned_qparams(s, zero(i), self.global)).collect()
    }

    /// The values of fixed codes (`code - zero`) of a matrix with `k` columns, in place.
    pub(crate) fn dequantize(&self, codes: &mut [f32], k: usize, args: &QuantArgs) {
        let (scales, zeros) = self.values();
        let zeros = zeros.unwrap_or_default();
        let grid = Learned { args, k, scales: &scales, zeros: &zeros, global: self.global };
        let mut out = vec![0.0; codes.len()];
        kernel::scaled_codes(codes, &grid, &mut out).expect("as many scales as the codes were made with");
        codes.copy_from_slice(&out);
    }

    /// `x` on the grid, with gradients for `x`, the scales and the zero points. Those of the last two are divided by
    /// `sqrt(values in a group * largest code)` (of blocks, in the average one), as LSQ does, so that they have the size of a
    /// weight's.
    ///
    /// # Panics
    /// When the groups do not divide the values: call [`crate::fake_quant::check_shape`] first.
    pub fn fake_quant<const D: usize>(&self, x: Tensor<D>, args: &QuantArgs) -> Tensor<D> {
        let by = gradient_scale(x.dims().iter().product(), self.scale.val().dims()[0], args);
        self.on_grid(x, args, by)
    }

    /// [`LearnedGrid::fake_quant`] with the gradients of scales and zero points times `by`.
    pub(crate) fn on_grid<const D: usize>(&self, x: Tensor<D>, args: &QuantArgs, by: f32) -> Tensor<D> {
        let op = Arc::new(OnGrid { args: *args, global: self.global, by });
        match &self.zero {
            None => apply2(op, x, self.scale.val()),
            Some(zero) => apply3(op, x, self.scale.val(), zero.val()),
        }
    }

    /// The values of fixed codes (`code - zero`), with a gradient for the scales alone, divided as that of
    /// [`LearnedGrid::fake_quant`].
    ///
    /// # Panics
    /// As [`LearnedGrid::fake_quant`].
    pub fn scaled_codes<const D: usize>(&self, codes: Tensor<D>, args: &QuantArgs) -> Tensor<D> {
        let op = Arc::new(Scaled(*args, self.global));
        match &self.zero {
            None => apply2(op, codes, self.scale.val()),
            Some(zero) => apply3(op, codes, self.scale.val(), zero.val()),
        }
    }
}

/// What a gradient of scales is multiplied with.
pub(crate) fn gradient_scale(values: usize, scales: usize, args: &QuantArgs) -> f32 {
    let per = values.checked_div(scales).unwrap_or(1).max(1);
    1.0 / (per as f32 * args.qtype.qmax() as f32).sqrt()
}

/// The grid of a matrix as an operation sees it: inputs are the matrix (first dimension, the rest), the scales and, when
/// asymmetric, the zero points.
fn learned<'a>(x: &[Slice<'a>], args: &'a QuantArgs, global: Option<f32>) -> Learned<'a> {
    let zeros = x.get(2).map_or(&[][..], |z| z.data);
    Learned { args, k: x[0].shape.iter().skip(1).product(), scales: x[1].data, zeros, global }
}

/// Fixed codes on learned scales, under a global one: inputs are the codes and the grid.
#[derive(Debug)]
struct Scaled(QuantArgs, Option<f32>);

impl SliceOp for Scaled {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        let mut out = vec![0.0; x[0].data.len()];
        kernel::scaled_codes(x[0].data, &learned(x, &self.0, self.1), &mut out)
            .expect("the shape was checked with check_shape");
        (out, x[0].shape.to_vec())
    }

    fn backward(&self, x: &[Slice], g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let d = kernel::scaled_codes_gradient(x[0].data, g, &learned(x, &self.0, self.1))
            .expect("the gradient has the shape of the output");
        let by = gradient_scale(x[0].data.len(), x[1].data.len(), &self.0);
        let mut out = vec![None, Some(d.into_iter().map(|v| v * by).collect())];
        out.resize(x.len(), None);
        out
    }
}

/// Values on learned grids, under a global scale: inputs are the values and the grid, whose gradients are multiplied with `by`.
#[derive(Debug)]
struct OnGrid {
    args: QuantArgs,
    global: Option<f32>,
    by: f32,
}

impl SliceOp for OnGrid {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        let mut out = vec![0.0; x[0].data.len()];
        kernel::fake_quant_learned(x[0].data, &learned(x, &self.args, self.global), &mut out)
            .expect("the shape was checked with check_shape");
        (out, x[0].shape.to_vec())
    }

    fn backward(&self, x: &[Slice], g: &[f32], wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let d = kernel::fake_quant_learned_gradient(x[0].data, g, &learned(x, &self.args, self.global))
            .expect("the gradient has the shape of the output");
        let scaled = |v: Vec<f32>| v.into_iter().map(|v| v * self.by).collect();
        let mut out = vec![wanted[0].then_some(d.w), Some(scaled(d.scale))];
        if x.len() == 3 {
            out.push(Some(scaled(d.zero)));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::normal;
    use burn::tensor::TensorData;
    use dsq_quant::{FloatType, Granularity, QuantType, QuantizedMatrix, WeightObserver};

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|v| v.to_bits()).collect()
    }

    /// The fused operation against tensor operations that Burn differentiates itself.
    #[test]
    fn the_fused_form_equals_tensor_operations_forward_and_backward() {
        let device = Device::flex().autodiff();
        let (n, k) = (12, 64);
        for qtype in QuantType::INTS {
            for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                for granularity in [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(16)] {
                    let args = QuantArgs { qtype, mapping, ..QuantArgs::int4(granularity, FloatType::F32) };
                    let normals = |stream| -> Tensor<2> {
                        Tensor::from_data(TensorData::new(normal(n * k, 1.0, 1, stream), [n, k]), &device)
                    };
                    let (w, seed) = (normals(1).require_grad(), normals(2));
                    let values = host(w.clone());
                    let init = QuantArgs { observer: WeightObserver::Mse, ..args };
                    let mut params = QuantizedMatrix::qparams_of(&values, n, k, init).unwrap();
                    // Narrower than any observer would choose, so that every type clips.
                    params.iter_mut().for_each(|p| p.scale *= 0.5);
                    let grid = LearnedGrid::new(&params, mapping, &device);
                    let out = grid.fake_quant(w.clone(), &args);
                    let shipped = QuantizedMatrix::quantize_with(&values, n, k, args, &grid.qparams(&args)).unwrap();
                    assert_eq!(bits(&host(out.clone())), bits(&shipped.dequantize()));
                    let grads = (out * seed.clone()).sum().backward();
                    let got_w = host(w.grad(&grads).unwrap());
                    let got_s = host(grid.scale.val().grad(&grads).unwrap());
                    let got_z = grid.zero.as_ref().map(|z| host(z.val().grad(&grads).unwrap()));

                    let groups = params.len();
                    let w = w.detach().require_grad();
                    let column =
                        |v: Vec<f32>| Tensor::<2>::from_data(TensorData::new(v, [groups, 1]), &device).require_grad();
                    let s = column(params.iter().map(|p| p.scale).collect());
                    let z = column(params.iter().map(|p| p.zero as f32).collect());
                    let (qmin, qmax) = (qtype.qmin() as f32, qtype.qmax() as f32);
                    let c = (w.clone().reshape([groups, n * k / groups]) / s.clone() + z.clone()).clamp(qmin, qmax);
                    let q = c.clone() + (c.clone().round() - c).detach();
                    let out = ((q - z.clone()) * s.clone()).reshape([n, k]);
                    let grads = (out * seed).sum().backward();
                    let by = 1.0 / ((n * k / groups) as f32 * qmax).sqrt();
                    let near = |got: &[f32], want: Vec<f32>, by: f32, what: &str| {
                        let size = want.iter().fold(0.0f32, |m, v| m.max(v.abs())) * by;
                        for (a, b) in got.iter().zip(want) {
                            assert!((a - b * by).abs() <= 2e-5 * size + 1e-6, "{args:?} {what}: {a} {}", b * by);
                        }
                    };
                    near(&got_w, host(w.grad(&grads).unwrap()), 1.0, "w");
                    near(&got_s, host(s.grad(&grads).unwrap()), by, "scale");
                    if let Some(got) = got_z {
                        near(&got, host(z.grad(&grads).unwrap()), by, "zero");
                    }
                }
            }
        }
    }

    /// Float codes against tensor operations that Burn differentiates itself, the rounding brought from the host.
    #[test]
    fn float_codes_equal_tensor_operations_forward_and_backward() {
        let device = Device::flex().autodiff();
        let (n, k) = (12, 64);
        let fp8 = |granularity| QuantArgs::fp8(granularity, FloatType::Bf16);
        for (args, global) in [
            (fp8(Granularity::PerTensor), None),
            (fp8(Granularity::PerChannel), None),
            (fp8(Granularity::PerBlock(5, 40)), None),
            (QuantArgs::mxfp4(), None),
            (QuantArgs::nvfp4(), Some(500.0)),
        ] {
            let tensor = |v: Vec<f32>| Tensor::<2>::from_data(TensorData::new(v, [n, k]), &device);
            let (values, seed) = (normal(n * k, 1.0, 1, 1), tensor(normal(n * k, 1.0, 1, 2)));
            let init = QuantArgs { observer: WeightObserver::Mse, ..args };
            let mut params = QuantizedMatrix::qparams_under(&values, n, k, init, global).unwrap();
            // Narrower, so that every type clips; and not on the stored dtype, so that it is rounded.
            params.iter_mut().for_each(|p| p.scale *= 0.52);
            let grid = LearnedGrid::new(&params, args.mapping, &device).under(global);
            let w = tensor(values.clone()).require_grad();
            let out = grid.fake_quant(w.clone(), &args);
            let shipped =
                QuantizedMatrix::quantize_on(&values, n, k, args, &grid.qparams(&args), grid.global()).unwrap();
            assert_eq!(bits(&host(out.clone())), bits(&shipped.dequantize()), "{args:?}");
            let grads = (out * seed.clone()).sum().backward();
            let (got_w, got_s) = (host(w.grad(&grads).unwrap()), host(grid.scale.val().grad(&grads).unwrap()));

            // One scale for each value, so that the sums over groups are ours.
            let mut of = vec![0; n * k];
            args.runs(n, k).for_each(|(i, run)| of[run].fill(i));
            let w = tensor(values.clone()).require_grad();
            let s = tensor(of.iter().map(|&i| shipped.qparams(i).scale).collect()).require_grad();
            let largest = args.qtype.qmax() as f32;
            let c = (w.clone() / s.clone()).clamp(-largest, largest);
            let f = args.qtype.float().unwrap();
            let rounded = tensor(host(c.clone()).into_iter().map(|v| f.decode(f.encode(v))).collect());
            let out = (c.clone() + (rounded - c).detach()) * s.clone();
            let grads = (out * seed).sum().backward();
            let each = host(s.grad(&grads).unwrap());
            let by = 1.0 / ((n * k / params.len()) as f32 * largest).sqrt();
            let mut want = vec![[0.0f32; 2]; params.len()];
            for (i, d) in each.iter().enumerate() {
                let sum = &mut want[of[i]];
                (sum[0], sum[1]) = (sum[0] + d * by, sum[1] + (d * by).abs());
            }
            for (a, [b, size]) in got_s.iter().zip(want) {
                assert!((a - b).abs() <= 1e-4 * size + 1e-6, "{args:?} scale: {a} {b}");
            }
            let want = host(w.grad(&grads).unwrap());
            for (a, b) in got_w.iter().zip(&want) {
                assert!((a - b).abs() <= 1e-5 && (*a == 0.0) == (*b == 0.0), "{args:?} w: {a} {b}");
            }
            assert!(want.contains(&0.0), "{args:?}: something clips");
        }
    }
}
