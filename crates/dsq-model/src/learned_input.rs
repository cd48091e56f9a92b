//! The grid of a layer's input whose stored scale (and zero point) is trained, LSQ and LSQ+ as for weights: one for the tensor. Of
//! NVFP4, where runs of a token find scales of their own, the largest scale that one can have. The formulas are `dsq_quant`'s. Not
//! which inputs are learned, nor where they start (see `dsq-train`); those of image models are `resnet`'s.

use crate::LearnedGrid;
use crate::learned_grid::gradient_scale;
use crate::ops::slice_op::{Slice, SliceOp, apply2};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use dsq_kernels::fake_quant as kernel;
use dsq_quant::{InputGrid, QuantArgs, QuantError};
use std::sync::Arc;

/// A learned scale and zero point of an input.
#[derive(Module, Debug)]
pub struct LearnedInput {
    grid: LearnedGrid,
}

impl LearnedInput {
    /// Starts at a stored grid; `None` for one that is found when the model runs.
    pub fn start(at: &InputGrid, device: &Device) -> Option<Self> {
        let p = at.learned_params()?;
        Some(Self { grid: LearnedGrid::new(&[p], at.args.mapping, device) })
    }

    /// From [`LearnedInput::values`], one number each.
    pub fn from_values(scale: Vec<f32>, zero: Option<Vec<f32>>, device: &Device) -> Self {
        Self { grid: LearnedGrid::from_values(scale, zero, device) }
    }

    /// Scale and zero point as they are trained, `[1]` each; no zero point where the grid is symmetric.
    pub fn values(&self) -> (Vec<f32>, Option<Vec<f32>>) {
        self.grid.values()
    }

    /// What ships.
    pub fn grid(&self, args: QuantArgs) -> InputGrid {
        let (scale, zero) = self.values();
        let first = |v: &[f32]| v.first().copied().unwrap_or(f32::NAN);
        InputGrid::of_learned(args, first(&scale), zero.map_or(0.0, |z| first(&z)))
    }

    /// `x [.., k]` on the grid, with gradients for `x`, the scale and the zero point. Those of the last two are divided by
    /// `sqrt(k * largest code)`: LSQ's factor with the values of one token, because the loss is a mean over tokens.
    ///
    /// # Panics
    /// When the runs of a token do not divide `k`.
    pub fn fake_quant<const D: usize>(&self, x: Tensor<D>, args: &QuantArgs) -> Tensor<D> {
        let by = gradient_scale(x.dims()[D - 1], 1, args);
        match args.has_global_scale() {
            true => apply2(Arc::new(Runs { args: *args, by }), x, self.grid.scale.val()),
            false => self.grid.on_grid(x, args, by),
        }
    }
}

/// Runs of tokens on their own scales under a learned largest one: inputs are the values `[.., k]` and that scale `[1]`.
#[derive(Debug)]
struct Runs {
    args: QuantArgs,
    by: f32,
}

impl Runs {
    fn grid(&self, x: &[Slice]) -> (usize, InputGrid) {
        (x[0].shape.last().copied().unwrap_or(1), InputGrid::of_learned(self.args, x[1].data[0], 0.0))
    }
}

impl SliceOp for Runs {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        let ((k, grid), mut out) = (self.grid(x), x[0].data.to_vec());
        match kernel::fake_quant_rows(&mut out, k, &grid) {
            // NaN in the output: the training loop refuses the loss.
            Ok(()) | Err(QuantError::NonFinite { .. } | QuantError::ScaleOverflow { .. }) => (out, x[0].shape.to_vec()),
            Err(e) => panic!("fake_quant: {e}: the lengths were not checked"),
        }
    }

    fn backward(&self, x: &[Slice], g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let (k, grid) = self.grid(x);
        let (dx, scale) = kernel::fake_quant_rows_gradient(x[0].data, g, k, &grid)
            .expect("the forward pass had the same values, and the gradient has the shape of its output");
        vec![Some(dx), Some(vec![scale * self.by])]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::Linear;
    use crate::llama::{host, normal};
    use burn::tensor::TensorData;
    use dsq_quant::{FloatType, Granularity, Mapping, QParams, QuantType};

    fn int(qtype: QuantType, mapping: Mapping) -> QuantArgs {
        QuantArgs { qtype, mapping, ..QuantArgs::int4(Granularity::PerTensor, FloatType::F32) }
    }

    /// Grids that are narrower than the values below, so that some clip.
    fn grids() -> Vec<InputGrid> {
        let of = |args, scale, zero| InputGrid { args, params: Some(QParams { scale, zero }) };
        vec![
            of(int(QuantType::Int8, Mapping::Symmetric), 0.0107, 0),
            of(int(QuantType::Int8, Mapping::Asymmetric), 0.0083, 31),
            of(int(QuantType::Int4, Mapping::Asymmetric), 0.171, -2),
            of(QuantArgs::fp8(Granularity::PerTensor, FloatType::F32), 0.0031, 0),
            // 448 / 1792 = 0.25 is the largest scale of a run, which values up to 1.5 have.
            of(QuantArgs::nvfp4_tokens(), 1792.0, 0),
        ]
    }

    /// What the value of `x` on a grid is when its rounding stays where it is at `(s, z)`: `inside` and the rounding, or the end.
    #[derive(Clone, Copy)]
    enum Frozen {
        /// Within the range: `x` and this much of the scale.
        Inside(f64),
        /// At an end, this many scales (and zero points) away.
        End(f64),
        /// Of a run below the largest scale: a constant, and whether it clips.
        Own(f64, bool),
    }

    fn freeze(grid: &InputGrid, x: &[f32]) -> Vec<Frozen> {
        let (args, p) = (grid.args, grid.params.unwrap());
        let on = |x: f32, p: QParams| {
            let t = f64::from(x) / f64::from(p.scale) + f64::from(p.zero);
            let code = f64::from(args.code_value(args.quantize(x, p), 0));
            match args.fake_quantize(x, p).1 {
                true => Frozen::Inside(code - t),
                false => Frozen::End(code),
            }
        };
        if !args.has_global_scale() {
            return x.iter().map(|&x| on(x, p)).collect();
        }
        let mut out = Vec::new();
        for run in x.chunks(16) {
            let absmax = run.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            let own = grid.run_qparams(-absmax, absmax).unwrap();
            let capped = p.scale * (absmax / 6.0) > 448.0;
            assert!(!capped || own.scale == 448.0 / p.scale);
            out.extend(run.iter().map(|&x| match (capped, args.fake_quantize(x, own)) {
                (true, _) => on(x, own),
                (false, (value, inside)) => Frozen::Own(f64::from(value) - f64::from(x), inside),
            }));
        }
        out
    }

    /// A layer behind a learned grid: the gradients of its input, the scale and the zero point are those of the clipped identity,
    /// by central differences in f64, the last two times LSQ's factor.
    #[test]
    fn gradients_are_those_of_the_clipped_identity_by_finite_differences() {
        let device = Device::flex().autodiff();
        let (m, n, k) = (6, 5, 64);
        let tensor = |v: &[f32], rows| Tensor::<2>::from_data(TensorData::new(v.to_vec(), [rows, k]), &device);
        for grid in grids() {
            let args = grid.args;
            let (xv, wv) = (normal(m * k, 0.9, 3, 1), normal(n * k, 0.3, 3, 2));
            let seed = normal(m * n, 1.0, 3, 3);
            let mut layer = Linear::from_values(wv.clone(), [n, k], &device);
            layer.set_inputs(Some(grid));
            let x = tensor(&xv, m).require_grad();
            let plain = host(layer.forward(x.clone()));
            layer.learn_inputs();
            assert_eq!(layer.learned_input().unwrap().grid(args), grid, "a start is what ships");
            let y = layer.forward(x.clone());
            assert_eq!(host(y.clone()), plain, "{args:?}: the values do not depend on whether the grid is learned");
            let g = Tensor::<2>::from_data(TensorData::new(seed.clone(), [m, n]), &device);
            let grads = (y * g).sum().backward();
            let dx = host(x.grad(&grads).unwrap());
            let learned = &layer.learned_input().unwrap().grid;
            let ds = host(learned.scale.val().grad(&grads).unwrap())[0];
            let dz = learned.zero.as_ref().map(|z| host(z.val().grad(&grads).unwrap())[0]);
            assert_eq!(dz.is_some(), args.mapping == Mapping::Asymmetric);

            let frozen = freeze(&grid, &xv);
            let ends = frozen.iter().filter(|f| matches!(f, Frozen::End(_) | Frozen::Own(_, false))).count();
            assert!(ends > 10 && ends < xv.len() / 2, "{args:?}: {ends} clip");
            let loss = |x: &[f64], s: f64, z: f64| -> f64 {
                let on = |i: usize| match frozen[i] {
                    Frozen::Inside(r) => x[i] + r * s,
                    Frozen::End(q) => (q - z) * s,
                    Frozen::Own(r, true) => x[i] + r,
                    Frozen::Own(r, false) => f64::from(xv[i]) + r,
                };
                let row = |(i, j): (usize, usize)| {
                    (0..k).map(|l| on(i * k + l) * f64::from(wv[j * k + l])).sum::<f64>() * f64::from(seed[i * n + j])
                };
                (0..m * n).map(|o| row((o / n, o % n))).sum()
            };
            let x: Vec<f64> = xv.iter().map(|&v| f64::from(v)).collect();
            let (s, z) = (f64::from(learned.values().0[0]), f64::from(grid.params.unwrap().zero));
            let h = 1e-5;
            let size = dx.iter().fold(1e-3f32, |a, g| a.max(g.abs()));
            for (i, got) in dx.iter().enumerate() {
                let (mut up, mut down) = (x.clone(), x.clone());
                (up[i], down[i]) = (x[i] + h, x[i] - h);
                let want = (loss(&up, s, z) - loss(&down, s, z)) / (2.0 * h);
                assert!((f64::from(*got) - want).abs() < 1e-5 * f64::from(size), "{args:?} x {i}: {got} {want}");
            }
            let by = 1.0 / (k as f64 * f64::from(args.qtype.qmax())).sqrt();
            let near = |got: f32, want: f64, what: &str| {
                assert!((f64::from(got) - want).abs() < 1e-4 * want.abs(), "{args:?} {what}: {got} {want}");
                assert!(want.abs() > 1e-3, "{args:?} {what}: {want} would prove nothing");
            };
            near(ds, by * (loss(&x, s + h, z) - loss(&x, s - h, z)) / (2.0 * h), "scale");
            if let Some(dz) = dz {
                near(dz, by * (loss(&x, s, z + h) - loss(&x, s, z - h)) / (2.0 * h), "zero point");
            }
        }
    }

    #[test]
    fn what_ships_is_a_grid_whatever_is_learned_and_dynamic_grids_are_not_learned() {
        let device = Device::flex();
        for grid in grids() {
            for scale in [0.0, -3.0, 1e-40, 1e-6, 1e6] {
                let zero = (grid.args.mapping == Mapping::Asymmetric).then(|| vec![1e9]);
                let p = LearnedInput::from_values(vec![scale], zero, &device).grid(grid.args).params.unwrap();
                assert!(p.scale.is_finite() && p.scale > 0.0, "{:?} {scale}: {p:?}", grid.args);
                assert_eq!(p.zero == grid.args.qtype.qmax(), grid.args.mapping == Mapping::Asymmetric);
            }
        }
        let mut layer = Linear::from_values(vec![0.1; 64], [2, 32], &device);
        layer.learn_inputs();
        assert!(layer.learned_input().is_none());
        let args = QuantArgs::fp8(Granularity::PerToken, FloatType::F32);
        layer.set_inputs(Some(InputGrid { args, params: None }));
        layer.learn_inputs();
        assert!(layer.learned_input().is_none());
    }
}
