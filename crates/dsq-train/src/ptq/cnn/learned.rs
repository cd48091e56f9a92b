//! Learned rounding of one convolution: codes, scales and zero points moved by the signs of gradients, AutoRound's way, with the
//! steps of `ptq/autoround.rs`. Not a block at a time, as there: `round.rs` has said what the layer should be, so the loss of a
//! row is `e H e^T`, with `e` what the rounded row is off from the refitted one, and its gradient `2 e H` is one matrix product.
//! No pass over pictures, no autodiff.
//!
//! Why not AdaRound's rectified sigmoid (Nagel et al., arXiv:2004.10568): a prototype with a thousand steps of Adam for each layer
//! (on `H + lambda I` of the refit; ten of the pictures of docs/results.md, the best of four settings) had a lower `e H e^T` in six of
//! the first fourteen dense layers and a higher one in eight, for five times the products: not clearly better. It leaves scales
//! as they are; signed steps with fixed scales were worse than it in all fourteen. What a thousand signed steps give, or a
//! sigmoid with trained scales, was not measured.

use super::round::Refitted;
use crate::ptq::autoround::{Latent, rate};
use crate::ptq::gptq::row_errors;
use dsq_kernels::fake_quant::{Learned, fake_quant_learned, fake_quant_learned_gradient};
use dsq_kernels::train::{Strided, matmul};
use dsq_quant::{QuantArgs, QuantError, QuantizedMatrix};

/// Steps, AutoRound's own number.
const STEPS: usize = 200;

/// Codes for the refitted weight, one scale for each row. Of each row the best of all steps is kept, of which the first is
/// rounding to nearest: no row is worse than that by `e H e^T`. (The paper keeps the best step of a whole block.)
///
/// # Errors
/// As [`QuantizedMatrix::quantize`].
pub(super) fn round(refitted: &Refitted, args: QuantArgs) -> Result<QuantizedMatrix, QuantError> {
    let Refitted { weight: w, n, k, h } = refitted;
    let (n, k) = (*n, *k);
    let mut out = dsq_kernels::quantize::quantize(w, n, k, args)?;
    let rounded = row_errors(w, &out, h);
    let origin = Latent {
        size: [n, k],
        global: None,
        weight: w.to_vec(),
        scale: out.scales.clone(),
        zero: out.zeros.iter().map(|&z| f32::from(z)).collect(),
    };
    let (mut at, mut best) = (origin.clone(), origin.clone());
    let mut least = vec![f64::INFINITY; n];
    let (mean, mut errors) = (h.mean_f32(), vec![0.0f32; n * k]);
    for step in 0..=STEPS {
        let grid = Learned { args: &args, scales: &at.scale, zeros: &at.zero, k, global: None };
        fake_quant_learned(&at.weight, &grid, &mut errors)?;
        errors.iter_mut().zip(w).for_each(|(e, w)| *e -= w);
        // Half the gradient, whose signs are those of the whole.
        let gradient = matmul(Strided::rows(&errors, k), Strided::rows(&mean, k), [n, k, k]);
        for (r, (e, g)) in errors.chunks(k).zip(gradient.chunks(k)).enumerate() {
            let error: f64 = e.iter().zip(g).map(|(e, g)| f64::from(*e) * f64::from(*g)).sum();
            if error < least[r] {
                least[r] = error;
                best.copy_row(&at, r, k);
            }
        }
        if step < STEPS {
            let g = fake_quant_learned_gradient(&at.weight, &gradient, &grid)?;
            at.move_by_signs(&origin, &args, [&g.w, &g.scale, &g.zero].map(|g| Some(g.as_slice())), rate(step, STEPS));
        }
    }
    let zero = |r: usize| best.zero.get(r).copied().unwrap_or(0.0);
    let params: Vec<_> = (0..n).map(|r| args.learned_qparams(best.scale[r], zero(r))).collect();
    let learned = QuantizedMatrix::quantize_with(&best.weight, n, k, args, &params)?;
    // Measured once more, by the sums that everything is measured by.
    for (r, (new, old)) in row_errors(w, &learned, h).into_iter().zip(rounded).enumerate() {
        if new < old {
            let row = r * k..(r + 1) * k;
            out.codes[row.clone()].copy_from_slice(&learned.codes[row]);
            out.scales[r] = learned.scales[r];
            if let Some(zero) = out.zeros.get_mut(r) {
                *zero = learned.zeros[r];
            }
        }
    }
    out.validate()?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptq::hessian::Hessian;
    use crate::ptq::tests::{normal, with_threads};
    use dsq_quant::{FloatType, Granularity, Mapping, QuantType, WeightObserver};

    #[test]
    fn learned_codes_are_neighbours_of_the_nearest_and_no_row_is_worse() {
        let (n, k) = (13, 48);
        // Inputs that depend on each other, and one that is always 0.
        let x = normal(300 * k, 1);
        let x: Vec<f32> =
            x.iter().enumerate().map(|(i, v)| if i % k == 7 { 0.0 } else { v + 1.5 * x[i / k * k] }).collect();
        let mut h = Hessian::new(k);
        h.add(&x);
        let w = normal(n * k, 2);
        let refitted = Refitted { weight: w.clone(), n, k, h };
        for (qtype, mapping, observer, scale_dtype) in [
            (QuantType::Int4, Mapping::Symmetric, WeightObserver::MinMax, FloatType::F32),
            (QuantType::Int4, Mapping::Asymmetric, WeightObserver::MinMax, FloatType::Bf16),
            (QuantType::Int3, Mapping::Symmetric, WeightObserver::Mse, FloatType::F32),
            (QuantType::Int2, Mapping::Asymmetric, WeightObserver::Mse, FloatType::F16),
            (QuantType::Int8, Mapping::Symmetric, WeightObserver::MinMax, FloatType::F32),
        ] {
            let args = QuantArgs { qtype, mapping, observer, ..QuantArgs::int4(Granularity::PerChannel, scale_dtype) };
            let learned = round(&refitted, args).unwrap();
            for threads in [1, 3] {
                assert_eq!(with_threads(threads, || round(&refitted, args).unwrap()), learned);
            }
            let plain = QuantizedMatrix::quantize(&w, n, k, args).unwrap();
            let [new, old] = [&learned, &plain].map(|q| row_errors(&w, q, &refitted.h));
            assert!(new.iter().zip(&old).all(|(new, old)| new <= old), "{args:?}");
            let [new, old] = [new, old].map(|e| e.iter().sum::<f64>());
            assert!(new < 0.8 * old, "{args:?}: {new} against {old}");
            for (i, (&w, &code)) in w.iter().zip(&learned.codes).enumerate() {
                let p = learned.qparams(i / k);
                let nearest = args.quantize(w, p);
                assert!((i32::from(code) - i32::from(nearest)).abs() <= 1, "{args:?}: {code} for {w}, {nearest}");
                let first = plain.scales[i / k];
                assert!((p.scale / first - 1.0).abs() <= 0.51, "{args:?}: scale {} from {first}", p.scale);
            }
        }
    }

    #[test]
    fn inputs_that_say_nothing_leave_rounding_alone() {
        let (n, k) = (3, 9);
        let args = QuantArgs::int4(Granularity::PerChannel, FloatType::F32);
        let weight = normal(n * k, 3);
        let plain = QuantizedMatrix::quantize(&weight, n, k, args).unwrap();
        let mut h = Hessian::new(k);
        h.add(&vec![0.0; 20 * k]);
        assert_eq!(round(&Refitted { weight, n, k, h }, args).unwrap(), plain);
    }
}
