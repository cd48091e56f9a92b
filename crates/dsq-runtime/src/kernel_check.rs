//! One linear module of a checkpoint on the kernel that it gets here, beside the scalar reference on the same inputs: whether this machine
//! computes what the arithmetic says. Not attention, norms and rotary embedding (the tests of `dsq-kernels` hold those), and no text: inputs come from a
//! fixed stream.

use crate::RuntimeError;
use crate::llama::{linear, product};
use dsq_checkpoint::{Checkpoint, LinearWeight};
use dsq_kernels::linear::{matmul_int8_reference, matmul_reference};
use dsq_kernels::{Activations, Isa, Linear};
use dsq_quant::{InputGrid, QuantizedMatrix};

/// Tokens of the inputs: one alone and a pair take other ways through a kernel than many.
const TOKENS: [usize; 3] = [1, 2, 5];

/// What a check found.
#[derive(Debug, Clone, PartialEq)]
pub struct KernelCheck {
    /// The kernel, as `dsq doctor` names it.
    pub kernel: String,
    /// Outputs compared.
    pub outputs: usize,
    /// Outputs whose bits differ from those of the scalar reference.
    pub other_bits: usize,
    /// The largest difference to sums in f64, over the bound of f32: `(k + 2) 2^-24 sum |x w|`. Above 1 the kernel is wrong. `None` where
    /// inputs are rounded to codes: there the bits decide.
    pub worst: Option<f64>,
}

impl KernelCheck {
    /// Whether the kernel gives what it must.
    pub fn passes(&self) -> bool {
        match self.worst {
            Some(worst) => worst <= 1.0,
            None => self.other_bits == 0,
        }
    }
}

/// Runs the module on its kernel and on the reference.
///
/// # Errors
/// Those of reading the module.
pub fn check_kernel(model: &Checkpoint, module: &str) -> Result<KernelCheck, RuntimeError> {
    let (fast, input) = (linear(model, module)?, model.input_grid(module)?);
    check(&fast, &input, model.linear(module)?)
}

fn check(fast: &Linear, input: &Option<InputGrid>, weight: LinearWeight) -> Result<KernelCheck, RuntimeError> {
    let (n, k) = (fast.n(), fast.k());
    let kernel = match input {
        None => fast.describe(),
        Some(grid) => fast.describe_on_grid(grid),
    };
    let integer = input.as_ref().is_some_and(|grid| fast.multiplies_int8(Activations::Float, Some(grid)));
    let scalar = scalar(fast);
    // The plain loop over codes, where their order is that of the inputs.
    let codes = match &weight {
        LinearWeight::Quantized(q) => Some(q.clone()),
        _ => None,
    };
    let values = weight.into_f32();
    let mut out = KernelCheck { kernel, outputs: 0, other_bits: 0, worst: (input.is_none()).then_some(0.0) };
    for m in TOKENS {
        let x = inputs(m, k);
        let run = |l: &Linear| {
            let mut y = vec![0.0f32; m * n];
            product(Activations::Float, input, &[l], &x, m, &mut [&mut y]);
            y
        };
        let (y, mut reference) = (run(fast), run(&scalar));
        if let Some(q) = &codes {
            plain(q, input, integer, &x, m, &mut reference);
        }
        out.outputs += y.len();
        out.other_bits += y.iter().zip(&reference).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        if let Some(worst) = &mut out.worst {
            *worst = worst.max(over_bound(&values, &x, &y, [m, n, k]));
        }
    }
    Ok(out)
}

/// The reference of codes; where inputs are rounded and then multiplied in f32, the scalar path stands as it is.
fn plain(q: &QuantizedMatrix, input: &Option<InputGrid>, integer: bool, x: &[f32], m: usize, out: &mut [f32]) {
    match input {
        None => matmul_reference(q, x, m, out),
        Some(grid) if integer => matmul_int8_reference(q, Some(grid), x, m, out),
        Some(_) => {}
    }
}

/// The layer on the scalar path.
fn scalar(l: &Linear) -> Linear {
    match l.clone() {
        Linear::Int4(l) => Linear::Int4(l.with_isa(Isa::Scalar)),
        Linear::Int8(l) => Linear::Int8(l.with_isa(Isa::Scalar)),
        Linear::Fp8(l) => Linear::Fp8(l.with_isa(Isa::Scalar)),
        Linear::Fp4(l) => Linear::Fp4(l.with_isa(Isa::Scalar)),
        Linear::Float(l) => Linear::Float(l.with_isa(Isa::Scalar)),
        ordered => ordered,
    }
}

/// Values of a fixed stream (SplitMix64) in [-2, 2), one in 64 of them eight times as large, as activations have.
fn inputs(m: usize, k: usize) -> Vec<f32> {
    (0..(m * k) as u64)
        .map(|i| {
            let mut z = (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            let x = ((z >> 40) as f32 / (1 << 22) as f32) - 2.0;
            if z & 63 == 0 { 8.0 * x } else { x }
        })
        .collect()
}

/// The largest difference of `y` to sums in f64 over the bound of a sum of `k` products in f32, in any order. NaN counts as infinite.
fn over_bound(w: &[f32], x: &[f32], y: &[f32], [m, n, k]: [usize; 3]) -> f64 {
    let mut worst = 0.0f64;
    for (t, x) in x.chunks_exact(k).take(m).enumerate() {
        for (row, w) in w.chunks_exact(k).enumerate() {
            let (mut sum, mut size) = (0.0f64, 0.0f64);
            for (a, b) in x.iter().zip(w) {
                let p = f64::from(*a) * f64::from(*b);
                sum += p;
                size += p.abs();
            }
            let error = (f64::from(y[t * n + row]) - sum).abs();
            let bound = (k + 2) as f64 * f64::from(f32::EPSILON) / 2.0 * size + f64::from(f32::MIN_POSITIVE);
            worst = if error.is_nan() { f64::INFINITY } else { worst.max(error / bound) };
            if worst.is_infinite() {
                return worst;
            }
        }
    }
    worst
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsq_quant::{FloatType, Granularity, QuantArgs, QuantType};

    fn matrix(args: QuantArgs) -> QuantizedMatrix {
        let w: Vec<f32> = (0..40 * 64).map(|i| ((i * 37 % 101) as f32 - 50.0) / 100.0).collect();
        QuantizedMatrix::quantize(&w, 40, 64, args).unwrap()
    }

    #[test]
    fn a_sound_kernel_passes_and_another_weight_does_not() {
        let int4 = QuantArgs::int4(Granularity::PerGroup(32), FloatType::F32);
        for args in [
            int4,
            QuantArgs { qtype: QuantType::Int8, ..int4 },
            QuantArgs::fp8(Granularity::PerChannel, FloatType::F32),
        ] {
            let q = matrix(args);
            let fast = Linear::new(&q).unwrap();
            let got = check(&fast, &None, LinearWeight::Quantized(q.clone())).unwrap();
            assert!(got.passes() && got.other_bits == 0 && got.outputs == 8 * 40, "{got:?}");
            // A kernel that reads one scale wrongly, by 1%.
            let mut bad = q.clone();
            bad.scales[3] *= 1.01;
            let got = check(&Linear::new(&bad).unwrap(), &None, LinearWeight::Quantized(q)).unwrap();
            assert!(!got.passes() && got.other_bits > 0, "{got:?}");
        }
    }

    #[test]
    fn inputs_on_a_grid_are_held_to_the_bits() {
        let int8 = QuantArgs {
            qtype: QuantType::Int8,
            granularity: Granularity::PerToken,
            ..QuantArgs::int4(Granularity::PerToken, FloatType::F32)
        };
        let input = InputGrid::dynamic(Some(int8));
        let q = matrix(QuantArgs::int4(Granularity::PerChannel, FloatType::F32));
        let fast = Linear::new(&q).unwrap();
        let got = check(&fast, &input, LinearWeight::Quantized(q.clone())).unwrap();
        assert!(got.passes() && got.worst.is_none() && got.kernel.contains("int8"), "{got:?}");
        let mut bad = q.clone();
        bad.codes[7] ^= 1;
        assert!(!check(&Linear::new(&bad).unwrap(), &input, LinearWeight::Quantized(q)).unwrap().passes());
    }
}
