//! Fake quantization in the forward pass, with the clipped straight-through gradient. The formula is `dsq_quant`'s;
//! the walk is `dsq_kernels::fake_quant`, on GGUF's grids `dsq_kernels::quantize`. Not the choice of which layers are quantized (see `dsq-train`, `qat`).

use crate::ops::flex::{FlexTensor, contiguous, tensor, values};
use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind, unary},
};
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use dsq_kernels::fake_quant as kernel;
use dsq_quant::{GgufGrid, InputGrid, QParams, QuantArgs, QuantError};
use std::sync::Arc;

/// A grid, and where its quantization parameters come from.
#[derive(Debug, Clone, Copy)]
pub enum Grid {
    /// From the ranges of the groups of the tensor itself; `[n, k]` = first dimension, the rest.
    OwnRange(QuantArgs),
    /// The same under a global scale that is not the tensor's own.
    Under(QuantArgs, f32),
    /// These, for the whole tensor; of NVFP4 its global scale.
    Fixed(QuantArgs, QParams),
    /// Blocks of GGUF.
    Gguf(GgufGrid),
}

/// The backend side of fake quantization.
#[backend_extension(Flex, Autodiff)]
pub trait FakeQuantOps: Backend {
    /// Values on the grid, and the clipped straight-through gradient.
    fn fake_quant(x: FloatTensor<Self>, grid: Grid) -> FloatTensor<Self>;
}

impl FakeQuantOps for Flex {
    fn fake_quant(x: FlexTensor, grid: Grid) -> FlexTensor {
        forward(x, grid).0
    }
}

impl<C: CheckpointStrategy> FakeQuantOps for Autodiff<Flex, C> {
    fn fake_quant(x: FloatTensor<Self>, grid: Grid) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct StraightThrough;

        impl Backward<Flex, 1> for StraightThrough {
            type State = Arc<Vec<u8>>;

            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
                let inside = ops.state;
                unary::<Flex, _>(ops.parents, ops.node, grads, |grad| {
                    let grad = contiguous(grad);
                    let shape = grad.shape();
                    // In place where nothing else holds the gradient, which is the rule for a weight's.
                    let mut grad = grad.into_data().try_into_vec::<f32>().expect("gradients are f32");
                    kernel::straight_through(&mut grad, &inside).expect("the gradient has the shape of the output");
                    tensor(grad, shape)
                });
            }
        }

        let (x, node) = x.into_parts();
        let (out, inside) = forward(x, grid);
        match StraightThrough.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(Arc::new(inside), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}

fn forward(x: FlexTensor, grid: Grid) -> (FlexTensor, Vec<u8>) {
    let x = contiguous(x);
    let shape = x.shape();
    let x = values(&x);
    let (mut out, mut inside) = (vec![0.0; x.len()], vec![0u8; x.len()]);
    let (n, k) = (shape[0], x.len().checked_div(shape[0]).unwrap_or(0));
    let done = match grid {
        Grid::OwnRange(args) => kernel::fake_quant_weight(x, n, k, &args, &mut out, &mut inside),
        Grid::Under(args, global) => {
            kernel::fake_quant_weight_under(x, n, k, &args, Some(global), &mut out, &mut inside)
        }
        // Each run has a scale of its own, but none above what the global scale allows: larger values clip.
        Grid::Fixed(args, p) if args.has_global_scale() => {
            out.copy_from_slice(x);
            let k = shape.last().copied().unwrap_or(1);
            let grid = InputGrid { args, params: Some(p) };
            kernel::fake_quant_rows_masked(&mut out, k, &grid, &mut inside)
        }
        Grid::Fixed(args, p) => kernel::fake_quant_with(x, &args, p, &mut out, &mut inside),
        Grid::Gguf(grid) => dsq_kernels::quantize::fake_quantize_blocks(grid, x, &mut out, &mut inside),
    };
    match done {
        // What cannot be quantized is NaN in the output; the training loop refuses the loss and names the tensor.
        Ok(()) | Err(QuantError::NonFinite { .. } | QuantError::ScaleOverflow { .. }) => {}
        Err(e) => panic!("fake_quant: {e}: the settings were not checked with check_shape"),
    }
    (tensor(out, shape), inside)
}

/// Whether a weight of this shape can be fake-quantized: call it before the first forward pass.
///
/// # Errors
/// As [`QuantArgs::group_len`].
pub fn check_shape(shape: &[usize], args: &QuantArgs) -> Result<(), QuantError> {
    args.group_len(shape.iter().skip(1).product()).map(|_| ())
}

/// A weight on the grid that ships: parameters from its own groups (not differentiated), clipped straight-through
/// gradient. The first dimension is `n`, the others together are `k`. Bit-equal to
/// `QuantizedMatrix::quantize(w, n, k, args)?.dequantize()`. A global scale is that of the weight's own largest magnitude.
///
/// A group with a value that is not finite, or whose scale overflows its dtype, becomes NaN.
///
/// # Panics
/// When [`check_shape`] refuses the shape.
pub fn fake_quant_weight<const D: usize>(w: Tensor<D>, args: &QuantArgs) -> Tensor<D> {
    run(w, Grid::OwnRange(*args))
}

/// [`fake_quant_weight`] under a global scale that layers share; `None`: its own, or none.
///
/// # Panics
/// As [`fake_quant_weight`], and for a global scale where the scheme has none or one that is not finite and positive.
pub fn fake_quant_weight_under<const D: usize>(w: Tensor<D>, args: &QuantArgs, global: Option<f32>) -> Tensor<D> {
    run(w, global.map_or(Grid::OwnRange(*args), |g| Grid::Under(*args, g)))
}

/// A weight as a decoder of GGUF sees its blocks: bit-equal to [`GgufGrid::quantize`] and [`GgufGrid::dequantize`] one after the
/// other; the gradient passes where a rounded code needs no clipping ([`GgufGrid::fake_quantize`]). Blocks lie along the last
/// dimension. One whose scale overflows f16, or with a value that is not finite, becomes NaN.
///
/// # Errors
/// [`QuantError::GroupNotDividing`] when blocks do not divide the last dimension.
pub fn fake_quant_gguf<const D: usize>(w: Tensor<D>, grid: GgufGrid) -> Result<Tensor<D>, QuantError> {
    let (k, block) = (w.dims()[D - 1], grid.block_len());
    if !k.is_multiple_of(block) {
        return Err(QuantError::GroupNotDividing { k, group_size: block });
    }
    Ok(run(w, Grid::Gguf(grid)))
}

fn run<const D: usize>(x: Tensor<D>, grid: Grid) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as FakeQuantOps>::fake_quant(x.into_dispatch(), grid))
}

/// Activations on a fixed grid (one scale and zero point for the tensor), clipped straight-through gradient.
/// Bit-equal to [`QuantArgs::fake_quantize`].
pub fn fake_quant_activation<const D: usize>(x: Tensor<D>, args: &QuantArgs, p: QParams) -> Tensor<D> {
    run(x, Grid::Fixed(*args, p))
}

/// [`fake_quant_activation`] in tensor operations: the reference of the fused form, forward and backward.
pub fn fake_quant_activation_reference<const D: usize>(x: Tensor<D>, args: &QuantArgs, p: QParams) -> Tensor<D> {
    let scale = Tensor::<1>::from_floats([p.scale], &x.device()).reshape([1; D]);
    reference(x, args, scale, p.zero as f32)
}

/// [`fake_quant_weight_under`] of a symmetric weight in tensor operations: the reference of the fused form.
///
/// # Errors
/// As `QuantizedMatrix::qparams_under`; asymmetric mapping (each group has its own zero point) is refused.
pub fn fake_quant_weight_reference(
    w: Tensor<2>,
    args: &QuantArgs,
    global: Option<f32>,
) -> Result<Tensor<2>, QuantError> {
    if args.mapping != dsq_quant::Mapping::Symmetric {
        let expected = "symmetric".to_owned();
        return Err(QuantError::Setting { field: "mapping", expected, got: "asymmetric".into() });
    }
    let [n, k] = w.dims();
    let host = w.clone().into_data().try_to_vec::<f32>().unwrap_or_default();
    let params = dsq_quant::QuantizedMatrix::qparams_under(&host, n, k, *args, global)?;
    let mut scales = vec![0.0f32; n * k];
    for (i, run) in args.runs(n, k) {
        scales[run].fill(params[i].scale);
    }
    let scales = Tensor::<1>::from_floats(scales.as_slice(), &w.device()).reshape([n, k]);
    Ok(reference(w, args, scales, 0.0))
}

fn reference<const D: usize>(x: Tensor<D>, args: &QuantArgs, scale: Tensor<D>, zero: f32) -> Tensor<D> {
    let (qmin, qmax) = (args.qtype.qmin() as f32, args.qtype.qmax() as f32);
    let c = (x / scale.clone()).add_scalar(zero).clamp(qmin, qmax);
    // The rounding passes the gradient; the clamp stops it outside the range. `+ 0.0` turns -0.0 into the +0.0 of an
    // integer code. (`c + (round(c) - c)` is exact: round(c) is 0 or within a factor of 2 of c.)
    if let Some(f) = args.qtype.float() {
        // The numbers of a small float on the host, as codes; a zero keeps no sign here.
        let data = c.clone().into_data().try_to_vec::<f32>().unwrap_or_default();
        let rounded: Vec<f32> = data.into_iter().map(|v| f.decode(f.encode(v))).collect();
        let rounded = Tensor::<1>::from_floats(rounded.as_slice(), &c.device()).reshape(c.dims());
        return (c.clone() + (rounded - c).detach()) * scale;
    }
    let q = c.clone() + (c.clone().round() - c).detach();
    (q.sub_scalar(zero)).add_scalar(0.0) * scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::llama::normal;
    use burn::tensor::{Device, Distribution, TensorData};
    use dsq_quant::{FloatType, Granularity, Mapping, QuantType, QuantizedMatrix, WeightObserver};

    fn host<const D: usize>(t: Tensor<D>) -> Vec<f32> {
        t.into_data().try_to_vec().unwrap()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|v| v.to_bits()).collect()
    }

    fn int4(granularity: Granularity) -> QuantArgs {
        QuantArgs::int4(granularity, FloatType::Bf16)
    }

    fn asym() -> (QuantArgs, QParams) {
        let args =
            QuantArgs { mapping: Mapping::Asymmetric, ..QuantArgs::int4(Granularity::PerTensor, FloatType::F32) };
        (args, args.qparams(-0.3, 1.7).unwrap())
    }

    #[test]
    fn the_forward_pass_gives_the_shipped_weight() {
        for device in [Device::flex(), Device::flex().autodiff()] {
            for granularity in [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(32)] {
                let w = Tensor::<2>::random([48, 96], Distribution::Normal(0.0, 1.0), &device);
                let args = int4(granularity);
                let shipped = QuantizedMatrix::quantize(&host(w.clone()), 48, 96, args).unwrap().dequantize();
                assert_eq!(bits(&host(fake_quant_weight(w.clone(), &args))), bits(&shipped));
                // A view that is not contiguous, and a convolution's four dimensions.
                let view = w.clone().transpose();
                let want =
                    QuantizedMatrix::quantize(&host(view.clone()), 96, 48, int4(Granularity::PerChannel)).unwrap();
                assert_eq!(
                    bits(&host(fake_quant_weight(view, &int4(Granularity::PerChannel)))),
                    bits(&want.dequantize())
                );
                let conv = fake_quant_weight(w.reshape([48, 6, 4, 4]), &args);
                assert_eq!((conv.dims(), bits(&host(conv.clone()))), ([48, 6, 4, 4], bits(&shipped)));
            }
        }
    }

    #[test]
    fn c010_activations_round_ties_to_even() {
        let args = QuantArgs::int4(Granularity::PerTensor, FloatType::F32);
        let x = [0.5f32, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5, 6.5, 7.5, -8.5];
        let x = Tensor::<1>::from_floats(x, &Device::flex());
        let y = fake_quant_activation(x, &args, QParams { scale: 1.0, zero: 0 });
        assert_eq!(host(y), [0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 4.0, 6.0, 7.0, -8.0]);
    }

    #[test]
    fn the_fused_form_is_bit_equal_to_the_tensor_operations_forward_and_backward() {
        let device = Device::flex().autodiff();
        let seed = Tensor::<2>::random([33, 64], Distribution::Normal(0.0, 1.0), &device);
        let run = |f: &dyn Fn(Tensor<2>) -> Tensor<2>, x: &Tensor<2>| {
            let x = x.clone().detach().require_grad();
            let y = f(x.clone());
            let grads = (y.clone() * seed.clone()).sum().backward();
            (bits(&host(y)), bits(&host(x.grad(&grads).unwrap())))
        };
        let x = Tensor::<2>::random([33, 64], Distribution::Normal(0.0, 1.0), &device);
        let mut shut = 0;
        for granularity in [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(16)] {
            let args = int4(granularity);
            let fused = run(&|w| fake_quant_weight(w, &args), &x);
            let plain = run(&|w| fake_quant_weight_reference(w, &args, None).unwrap(), &x);
            assert_eq!(fused.0, plain.0, "{granularity:?}");
            shut += assert_gradients_close(&fused.1, &plain.1);
        }
        assert!(shut > 0, "the weights have clipped ends");
        // Float codes clip where a range of least squared error leaves values out, and under a shared global scale.
        let fp8 = |qtype, granularity| QuantArgs { qtype, ..QuantArgs::fp8(granularity, FloatType::F32) };
        let plus = |bits: Vec<u32>| bits.into_iter().map(|b| if b == 1 << 31 { 0 } else { b }).collect::<Vec<_>>();
        let mut shut = 0;
        for (args, global) in [
            (fp8(QuantType::Fp8E4M3, Granularity::PerTensor), None),
            (fp8(QuantType::Fp8E4M3, Granularity::PerBlock(16, 24)), None),
            (fp8(QuantType::Fp8E5M2, Granularity::PerChannel), None),
            (QuantArgs::mxfp4(), None),
            (QuantArgs::nvfp4(), Some(420.0)),
        ] {
            let args = QuantArgs { observer: WeightObserver::Mse, ..args };
            let fused = run(&|w| fake_quant_weight_under(w, &args, global), &x);
            let plain = run(&|w| fake_quant_weight_reference(w, &args, global).unwrap(), &x);
            assert_eq!(plus(fused.0), plus(plain.0), "{args:?}");
            shut += assert_gradients_close(&fused.1, &plain.1);
        }
        assert!(shut > 0, "the weights have clipped ends");
        let (args, p) = asym();
        let fused = run(&|x| fake_quant_activation(x, &args, p), &x);
        let plain = run(&|x| fake_quant_activation_reference(x, &args, p), &x);
        assert_eq!(fused.0, plain.0);
        assert!(assert_gradients_close(&fused.1, &plain.1) > 0, "the activations have clipped ends");
    }

    /// The reference multiplies and divides the gradient by the scale: two roundings, so 2 ulp; zeros must agree. Gives how
    /// many are zero.
    fn assert_gradients_close(fused: &[u32], plain: &[u32]) -> usize {
        let (mut open, mut shut) = (0, 0);
        for (&a, &b) in fused.iter().zip(plain) {
            let (a, b) = (f32::from_bits(a), f32::from_bits(b));
            assert!((a - b).abs() <= 2.0 * f32::EPSILON * a.abs(), "{a} against {b}");
            if a == 0.0 { shut += 1 } else { open += 1 }
        }
        assert!(open > shut, "{open} open, {shut} shut");
        shut
    }

    #[test]
    fn the_gradient_is_that_of_the_clipped_identity_by_finite_differences() {
        // Straight-through means: differentiate clamp(x, lo, hi) instead of the staircase. Central differences of it,
        // away from the two kinks, against the gradient that the operation reports.
        let device = Device::flex().autodiff();
        let tensor = |qtype| QuantArgs { qtype, ..QuantArgs::int4(Granularity::PerTensor, FloatType::F32) };
        let fixed = |args: QuantArgs| (args, args.qparams(-0.3, 1.7).unwrap());
        // A symmetric grid reaches as far down as up: the clipped ends are those of a narrower range.
        let narrow = |args: QuantArgs| (args, args.qparams(-0.6, 0.6).unwrap());
        let x: Vec<f32> = (0..400).map(|i| -1.0 + 0.01 * i as f32 + 0.003).collect();
        for (args, p) in [
            asym(),
            fixed(tensor(QuantType::Int8)),
            narrow(tensor(QuantType::Int8)),
            narrow(tensor(QuantType::Fp8E4M3)),
        ] {
            let lo = (args.qtype.qmin() - p.zero) as f32 * p.scale;
            let hi = (args.qtype.qmax() - p.zero) as f32 * p.scale;
            let t = Tensor::<1>::from_floats(x.as_slice(), &device).require_grad();
            let grads = fake_quant_activation(t.clone(), &args, p).sum().backward();
            slopes(&x, &host(t.grad(&grads).unwrap()), |_| (lo, hi));
        }
        // NVFP4: each run of 16 clips at 6 times its scale, which grows with it up to 448 over the global scale.
        let args = QuantArgs::nvfp4_tokens();
        let grid = InputGrid::of_range(args, -0.3, 1.7).unwrap();
        let t = Tensor::<2>::from_data(TensorData::new(x.clone(), [5, 80]), &device).require_grad();
        let grads = fake_quant_activation(t.clone(), &args, grid.params.unwrap()).sum().backward();
        let ends: Vec<f32> = x
            .chunks(16)
            .map(|run| {
                let largest = run.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                6.0 * grid.run_qparams(-largest, largest).unwrap().scale
            })
            .collect();
        let grad = host(t.grad(&grads).unwrap());
        assert!(grad.iter().filter(|g| **g == 0.0).count() > 100, "beyond 1.7 everything clips");
        slopes(&x, &grad, |i| (-ends[i / 16], ends[i / 16]));
    }

    /// Holds the gradient of each value against the difference quotient of the clipped identity.
    fn slopes(x: &[f32], grad: &[f32], ends: impl Fn(usize) -> (f32, f32)) {
        let h = 1e-3f64;
        for (i, (x, g)) in x.iter().zip(grad).enumerate() {
            let (lo, hi) = ends(i);
            if (x - lo).abs() > 2e-3 && (x - hi).abs() > 2e-3 {
                let f = |x: f64| x.clamp(f64::from(lo), f64::from(hi));
                let slope = (f(f64::from(*x) + h) - f(f64::from(*x) - h)) / (2.0 * h);
                assert!((slope - f64::from(*g)).abs() < 1e-9, "x {x}: slope {slope}, gradient {g}");
            }
        }
    }

    #[test]
    fn int8_and_asymmetric_weights_ship_what_they_train() {
        for qtype in QuantType::INTS {
            for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                let args = QuantArgs { qtype, mapping, ..int4(Granularity::PerGroup(8)) };
                let w = Tensor::<2>::random([9, 40], Distribution::Uniform(-0.2, 1.0), &Device::flex());
                let shipped = QuantizedMatrix::quantize(&host(w.clone()), 9, 40, args).unwrap().dequantize();
                assert_eq!(bits(&host(fake_quant_weight(w, &args))), bits(&shipped));
            }
        }
    }

    #[test]
    fn gguf_weights_are_what_the_decoder_sees_and_their_gradient_is_that_of_the_clipped_identity() {
        let device = Device::flex().autodiff();
        let w = Tensor::<2>::random([6, 512], Distribution::Normal(0.0, 1.0), &device).require_grad();
        let seed = Tensor::<2>::random([6, 512], Distribution::Normal(0.0, 1.0), &device);
        let values = host(w.clone());
        for grid in GgufGrid::ALL {
            let y = fake_quant_gguf(w.clone(), grid).unwrap();
            let mut decoded = vec![f32::NAN; values.len()];
            grid.dequantize(&grid.quantize(&values).unwrap(), &mut decoded).unwrap();
            assert_eq!(bits(&host(y.clone())), bits(&decoded), "{grid:?}");
            let grads = (y * seed.clone()).sum().backward();
            let got = host(w.grad(&grads).unwrap());
            let (mut out, mut inside) = (decoded, vec![9; values.len()]);
            grid.fake_quantize(&values, &mut out, &mut inside).unwrap();
            let upstream = host(seed.clone());
            let want = |i: usize| if inside[i] == 1 { upstream[i] } else { 0.0 };
            assert!(got.iter().enumerate().all(|(i, g)| *g == want(i)), "{grid:?}");
        }
        // By finite differences: -8 sets the scale 1, so values pass unchanged up to 7.5 and stop there.
        let mut x = vec![0.0f32; 32];
        x[0] = -8.0;
        let xs: Vec<f32> = (1..32).map(|i| -7.6 + 0.51 * i as f32).collect();
        x[1..].copy_from_slice(&xs);
        x.iter_mut().for_each(|v| *v = v.min(7.9));
        let t = Tensor::<1>::from_floats(x.as_slice(), &device).require_grad();
        let grads = fake_quant_gguf(t.clone(), GgufGrid::Q4_0).unwrap().sum().backward();
        for (x, g) in x.iter().zip(host(t.grad(&grads).unwrap())).skip(1) {
            let f = |x: f64| x.clamp(-8.0, 7.5);
            let slope = (f(f64::from(*x) + 1e-3) - f(f64::from(*x) - 1e-3)) / 2e-3;
            assert!((slope - f64::from(g)).abs() < 1e-9, "{x}: slope {slope}, gradient {g}");
        }
        let short = Tensor::<2>::zeros([2, 48], &device);
        let e = fake_quant_gguf(short, GgufGrid::Q8_0).unwrap_err();
        assert_eq!(e, QuantError::GroupNotDividing { k: 48, group_size: 32 });
    }

    /// A layer that is trained on a grid comes nearer to its target than its start rounded to the grid.
    #[test]
    fn a_descent_on_every_grid_lowers_the_loss_of_what_ships() {
        let device = Device::flex().autodiff();
        let tensor = |v: Vec<f32>, n| Tensor::<2>::from_data(TensorData::new(v, [n, 256]), &device);
        let (x, start) = (tensor(normal(64 * 256, 1.0, 1, 1), 64), normal(4 * 256, 0.1, 1, 2));
        let target = x.clone().matmul(tensor(start.clone(), 4).transpose());
        let e5m2 = QuantArgs { qtype: QuantType::Fp8E5M2, ..QuantArgs::fp8(Granularity::PerChannel, FloatType::F32) };
        let block = QuantArgs::fp8(Granularity::PerBlock(128, 128), FloatType::F32);
        let gguf = Grid::Gguf;
        let mut high = Vec::new();
        // Q4_K searches its scales: they jump with the weights, so it gains less.
        for (grid, share) in [
            (gguf(GgufGrid::Q4_0), 0.8),
            (gguf(GgufGrid::Q4_1), 0.8),
            (gguf(GgufGrid::Q8_0), 0.8),
            (gguf(GgufGrid::Q4K), 0.95),
            (Grid::OwnRange(e5m2), 0.8),
            (Grid::OwnRange(block), 0.8),
            (Grid::OwnRange(QuantArgs::nvfp4()), 0.8),
            (Grid::OwnRange(QuantArgs::mxfp4()), 0.8),
        ] {
            let mut values = start.clone();
            let (mut first, mut best) = (f32::NAN, f32::INFINITY);
            for step in 0..200 {
                let w = tensor(values.clone(), 4).require_grad();
                let y = x.clone().matmul(run(w.clone(), grid).transpose());
                let loss = (y - target.clone()).powi_scalar(2).mean();
                let value = host(loss.clone())[0];
                (first, best) = (if step == 0 { value } else { first }, best.min(value));
                let grad = host(w.grad(&loss.backward()).unwrap());
                values.iter_mut().zip(grad).for_each(|(v, g)| *v -= 0.1 * g);
            }
            if best >= share * first {
                high.push(format!("{grid:?}: {best} against {first}"));
            }
        }
        assert!(high.is_empty(), "{high:?}");
    }

    #[test]
    fn f084_shapes_are_checked_before_work() {
        assert!(check_shape(&[8, 6, 3, 3], &int4(Granularity::PerGroup(27))).is_ok());
        assert!(check_shape(&[8, 6, 3, 3], &int4(Granularity::PerGroup(32))).is_err());
    }
}
