//! LoRA adapters (Hu et al., arXiv:2106.09685): a low-rank change of a frozen weight, and the operation that merges it into the
//! weight with gradients for the two factors. The product is `dsq_kernels::train::matmul`. Not the choice of which layers have
//! one, and not what is trained beside it (see `dsq-train`, `qat`).

use crate::llama::{host, normal};
use crate::ops::slice_op::{Slice, SliceOp, apply3};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};
use dsq_kernels::train::{Strided, matmul};
use std::sync::Arc;

/// Streams of the random numbers of adapters lie above those of initial weights and below those of data order.
const FIRST_STREAM: u64 = 1 << 31;

/// The adapter of a weight `[n, k]`: the layer works with `w + alpha / r * B A`.
#[derive(Module, Debug)]
pub struct Lora {
    /// A, `[r, k]`.
    pub a: Param<Tensor<2>>,
    /// B, `[n, r]`.
    pub b: Param<Tensor<2>>,
    /// `alpha / r`.
    #[module(skip)]
    factor: f32,
}

impl Lora {
    /// A new adapter of rank `r` for a weight `[n, k]`: A is normal of deviation `1 / sqrt(k)`, seeded (the same bits on any
    /// machine; adapters of one seed and different `index` are unrelated), and B is 0, so that nothing changes yet.
    pub fn new([n, k]: [usize; 2], r: usize, alpha: f32, seed: u64, index: usize, device: &Device) -> Self {
        let a = normal(r * k, 1.0 / (k as f32).sqrt(), seed, FIRST_STREAM + index as u64);
        Self::from_values(a, vec![0.0; n * r], r, alpha, device)
    }

    /// From saved values of A `[r, k]` and B `[n, r]`, row major.
    ///
    /// # Panics
    /// When `r` does not divide both lengths.
    pub fn from_values(a: Vec<f32>, b: Vec<f32>, r: usize, alpha: f32, device: &Device) -> Self {
        let (k, n) = (a.len() / r, b.len() / r);
        let param =
            |v: Vec<f32>, shape: [usize; 2]| Param::from_tensor(Tensor::from_data(TensorData::new(v, shape), device));
        Self { a: param(a, [r, k]), b: param(b, [n, r]), factor: alpha / r as f32 }
    }

    /// The values of A `[r, k]` and B `[n, r]`, row major.
    pub fn values(&self) -> [Vec<f32>; 2] {
        [host(self.a.val()), host(self.b.val())]
    }

    /// `w + alpha / r * B A` of the frozen weight `w [n, k]`, with gradients for A and B (and `w`, where it has one).
    ///
    /// # Panics
    /// When the shapes do not fit.
    pub fn merged(&self, w: Tensor<2>) -> Tensor<2> {
        apply3(Arc::new(Merge(self.factor)), w, self.a.val(), self.b.val())
    }
}

/// The merge: inputs are the weight `[n, k]`, A `[r, k]` and B `[n, r]`.
#[derive(Debug)]
struct Merge(f32);

impl Merge {
    /// `[n, k, r]`.
    fn dims(x: &[Slice]) -> [usize; 3] {
        let ([n, k], [r, ak], [bn, br]) = (dims(&x[0]), dims(&x[1]), dims(&x[2]));
        assert!(ak == k && bn == n && br == r, "A [{r}, {ak}] and B [{bn}, {br}] fit the weight [{n}, {k}]");
        [n, k, r]
    }
}

fn dims(x: &Slice) -> [usize; 2] {
    [x.shape[0], x.shape[1]]
}

impl SliceOp for Merge {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        let [n, k, r] = Self::dims(x);
        let mut out = matmul(Strided::rows(x[2].data, r), Strided::rows(x[1].data, k), [n, k, r]);
        out.iter_mut().zip(x[0].data).for_each(|(v, w)| *v = w + self.0 * *v);
        (out, vec![n, k])
    }

    fn backward(&self, x: &[Slice], g: &[f32], wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let [n, k, r] = Self::dims(x);
        let scaled = |v: Vec<f32>| v.into_iter().map(|v| v * self.0).collect();
        let grad = || Strided::rows(g, k);
        let a = wanted[1].then(|| scaled(matmul(Strided::rows(x[2].data, r).t(), grad(), [r, k, n])));
        let b = wanted[2].then(|| scaled(matmul(grad(), Strided::rows(x[1].data, k).t(), [n, r, k])));
        vec![wanted[0].then(|| g.to_vec()), a, b]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::LearnedGrid;
    use crate::layers::Linear;
    use dsq_quant::{FloatType, Granularity, Mapping, QParams, QuantArgs, QuantType};

    /// `w + factor B A` in f64.
    fn merged(w: &[f64], a: &[f64], b: &[f64], [n, k, r]: [usize; 3], factor: f64) -> Vec<f64> {
        let product = |i: usize, j: usize| (0..r).map(|l| b[i * r + l] * a[l * k + j]).sum::<f64>();
        (0..n * k).map(|at| w[at] + factor * product(at / k, at % k)).collect()
    }

    #[test]
    fn the_worked_example_of_the_documentation() {
        let device = Device::flex().autodiff();
        let mut layer = Linear::from_values(vec![0.26, -0.97], [1, 2], &device);
        layer.set_quant(Some(QuantArgs::int4(Granularity::PerChannel, FloatType::F32)));
        layer.set_lora(Lora::from_values(vec![0.04, 0.1], vec![0.5], 1, 2.0, &device));
        layer.set_grid(LearnedGrid::from_values(vec![0.1], None, &device));
        let near = |got: Vec<f32>, want: &[f32]| {
            assert!(
                got.len() == want.len() && got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6),
                "{got:?} {want:?}"
            );
        };
        near(layer.values(), &[0.3, -0.87]);
        assert_eq!(layer.quantized().unwrap().unwrap().codes, [3, -8]);
        let weight = layer.effective_weight();
        near(host(weight.clone()), &[0.3, -0.8]);
        let grads = weight.sum().backward();
        let lora = layer.lora().unwrap();
        near(host(lora.a.val().grad(&grads).unwrap()), &[1.0, 0.0]);
        near(host(lora.b.val().grad(&grads).unwrap()), &[0.08]);
    }

    /// The gradients of A and B under fake quantization are the slopes of the clipped identity: what the layer multiplies
    /// with, without its rounding, on the grid of the step.
    #[test]
    fn gradients_of_a_and_b_are_the_slopes_of_the_clipped_identity() {
        let device = Device::flex().autodiff();
        let shape @ [n, k, r] = [6, 16, 3];
        let alpha = 1.5;
        let wide = |v: &[f32]| v.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
        for learned in [false, true] {
            for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                let args = QuantArgs {
                    qtype: QuantType::Int4,
                    mapping,
                    ..QuantArgs::int4(Granularity::PerGroup(8), FloatType::F32)
                };
                let (w, a, b) = (normal(n * k, 0.5, 1, 1), normal(r * k, 0.4, 1, 2), normal(n * r, 0.3, 1, 3));
                let seed = normal(n * k, 1.0, 1, 4);
                let mut layer = Linear::from_values(w.clone(), [n, k], &device);
                layer.set_quant(Some(args));
                layer.set_lora(Lora::from_values(a.clone(), b.clone(), r, alpha, &device));
                if learned {
                    layer.learn_grid().unwrap();
                    // Narrower than any observer would choose, so that much is clipped.
                    let (scale, zero) = layer.grid().unwrap().values();
                    let scale = scale.iter().map(|s| s * 0.6).collect();
                    layer.set_grid(LearnedGrid::from_values(scale, zero, &device));
                }
                let params: Vec<QParams> = match layer.grid() {
                    Some(grid) => grid.qparams(&args),
                    None => dsq_kernels::quantize::qparams_of(&layer.values(), n, k, args).unwrap(),
                };
                let weight = layer.effective_weight();
                let upstream = Tensor::<2>::from_data(TensorData::new(seed.clone(), [n, k]), &device);
                let grads = (weight * upstream).sum().backward();
                let lora = layer.lora().unwrap();
                let got = [&lora.a, &lora.b].map(|p| host(p.val().grad(&grads).unwrap()));
                assert!(layer.weight.val().grad(&grads).is_none(), "the base weight is frozen");

                let (lo, hi) = (f64::from(args.qtype.qmin()), f64::from(args.qtype.qmax()));
                let mut clipped = 0;
                let mut loss = |a: &[f64], b: &[f64]| -> f64 {
                    let values = merged(&wide(&w), a, b, shape, f64::from(alpha) / r as f64);
                    clipped = 0;
                    let value = |(at, v): (usize, f64)| {
                        let (scale, zero) = (f64::from(params[at / 8].scale), f64::from(params[at / 8].zero));
                        let c = v / scale + zero;
                        clipped += usize::from(!(lo..=hi).contains(&c));
                        (c.clamp(lo, hi) - zero) * scale * f64::from(seed[at])
                    };
                    values.into_iter().enumerate().map(value).sum()
                };
                let h = 1e-5;
                for (which, grad) in got.iter().enumerate() {
                    for i in 0..grad.len() {
                        let at = |step: f64, loss: &mut dyn FnMut(&[f64], &[f64]) -> f64| {
                            let mut x = [wide(&a), wide(&b)];
                            x[which][i] += step;
                            loss(&x[0], &x[1])
                        };
                        let slope = (at(h, &mut loss) - at(-h, &mut loss)) / (2.0 * h);
                        let off = (slope - f64::from(grad[i])).abs();
                        assert!(off < 1e-5, "{learned} {mapping:?} {which} {i}: slope {slope}, gradient {}", grad[i]);
                    }
                }
                assert!(clipped > 0 || (!learned && mapping == Mapping::Asymmetric), "something was clipped");
            }
        }
    }
}
