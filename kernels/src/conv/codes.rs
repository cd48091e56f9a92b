//! Codes of a float tensor as f32 integers, with the straight-through gradient, and the range of a tensor. The
//! formula is [`QuantArgs::quantize`]'s; this file only makes it fast. Not a dequantization: the caller multiplies by
//! the scale, after the convolution.
//!
//! Shapes: `x` is `params.len()` equal runs, one for each of `params`. Order: element by element. Error: none, bit-equal
//! to [`QuantArgs`] (a NaN stays NaN, so that it is seen). Requires: nothing; compiled for AVX2 where that is present.

use dsq_quant::{QParams, QuantArgs};
use rayon::prelude::*;

/// Values that one task takes.
const TASK: usize = 1 << 14;

/// `code - zero` of every value: an integer, exact in f32.
///
/// # Panics
/// When `params` does not split `x` into equal runs.
pub fn code_values(x: &[f32], args: &QuantArgs, params: &[QParams]) -> Vec<f32> {
    let run = run_len(x.len(), params.len());
    let mut out = vec![0.0f32; x.len()];
    let range = [args.qtype.qmin() as f32, args.qtype.qmax() as f32];
    for ((x, out), &p) in x.chunks(run).zip(out.chunks_mut(run)).zip(params) {
        each(x, x, out, |x, _, out| codes(x, out, p, range));
    }
    out
}

/// `code - qmin` of every value as a byte, the input of [`super::Int4Conv`]; a NaN gives the code of 0, as
/// [`QuantArgs::quantize`] does.
pub fn code_bytes(x: &[f32], args: &QuantArgs, p: QParams) -> Vec<u8> {
    let mut out = vec![0u8; x.len()];
    let range = [args.qtype.qmin() as f32, args.qtype.qmax() as f32];
    out.par_chunks_mut(TASK).zip(x.par_chunks(TASK)).for_each(|(out, x)| bytes(x, out, p, range));
    out
}

/// The gradient for `x` from the gradient `g` of [`code_values`], by the clipped straight-through estimator: `g / scale`
/// where `x / scale + zero` lies within the code range (ends included), 0 outside.
///
/// # Panics
/// As [`code_values`], and when `g` has another length.
pub fn code_gradient(x: &[f32], g: &[f32], args: &QuantArgs, params: &[QParams]) -> Vec<f32> {
    assert_eq!(x.len(), g.len(), "gradient length");
    let run = run_len(x.len(), params.len());
    let mut out = vec![0.0f32; x.len()];
    let range = [args.qtype.qmin() as f32, args.qtype.qmax() as f32];
    for (((x, g), out), &p) in x.chunks(run).zip(g.chunks(run)).zip(out.chunks_mut(run)).zip(params) {
        each(x, g, out, |x, g, out| gradients(x, g, out, p, range));
    }
    out
}

/// Smallest and largest value; `(0, 0)` of nothing. NaN counts as neither.
pub fn min_max(x: &[f32]) -> (f32, f32) {
    if x.is_empty() {
        return (0.0, 0.0);
    }
    x.par_chunks(TASK).map(range_of).reduce(|| (f32::INFINITY, f32::NEG_INFINITY), |a, b| (a.0.min(b.0), a.1.max(b.1)))
}

fn run_len(len: usize, params: usize) -> usize {
    assert!(params > 0 && len.is_multiple_of(params), "{len} values in {params} runs");
    (len / params).max(1)
}

/// Runs `f` over matching pieces: in parallel when there is enough to share.
fn each(a: &[f32], b: &[f32], out: &mut [f32], f: impl Fn(&[f32], &[f32], &mut [f32]) + Sync) {
    if out.len() <= TASK {
        f(a, b, out);
    } else {
        out.par_chunks_mut(TASK).zip(a.par_chunks(TASK)).zip(b.par_chunks(TASK)).for_each(|((o, a), b)| f(a, b, o));
    }
}

#[inline(always)]
fn codes_body(x: &[f32], out: &mut [f32], p: QParams, [lo, hi]: [f32; 2]) {
    let (s, z) = (p.scale, p.zero as f32);
    for (o, &x) in out.iter_mut().zip(x) {
        // Adding 0 turns -0 into 0, as the conversion to an integer code does.
        *o = (x / s + z).clamp(lo, hi).round_ties_even() - z + 0.0;
    }
}

#[inline(always)]
fn bytes_body(x: &[f32], out: &mut [u8], p: QParams, [lo, hi]: [f32; 2]) {
    let (s, z) = (p.scale, p.zero as f32);
    for (o, &x) in out.iter_mut().zip(x) {
        *o = ((x / s + z).clamp(lo, hi).round_ties_even() as i32 - lo as i32) as u8;
    }
}

#[inline(always)]
fn gradients_body(x: &[f32], g: &[f32], out: &mut [f32], p: QParams, [lo, hi]: [f32; 2]) {
    let (s, z) = (p.scale, p.zero as f32);
    for ((o, &x), &g) in out.iter_mut().zip(x).zip(g) {
        let c = x / s + z;
        *o = if c >= lo && c <= hi { g / s } else { 0.0 };
    }
}

#[inline(always)]
fn range_body(x: &[f32]) -> (f32, f32) {
    const LANES: usize = 16;
    let (mut lo, mut hi) = ([f32::INFINITY; LANES], [f32::NEG_INFINITY; LANES]);
    for chunk in x.chunks(LANES) {
        for (i, &v) in chunk.iter().enumerate() {
            lo[i] = if v < lo[i] { v } else { lo[i] };
            hi[i] = if v > hi[i] { v } else { hi[i] };
        }
    }
    (lo.into_iter().fold(f32::INFINITY, f32::min), hi.into_iter().fold(f32::NEG_INFINITY, f32::max))
}

/// Defines `$name`, which runs `$body` compiled for AVX2 where the processor has it.
macro_rules! with_avx2 {
    ($name:ident, $body:ident, ($($arg:ident: $ty:ty),*) -> $out:ty) => {
        fn $name($($arg: $ty),*) -> $out {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $ty),*) -> $out {
                    $body($($arg),*)
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: the feature is present.
                    return unsafe { avx2($($arg),*) };
                }
            }
            $body($($arg),*)
        }
    };
}

with_avx2!(codes, codes_body, (x: &[f32], out: &mut [f32], p: QParams, range: [f32; 2]) -> ());
with_avx2!(bytes, bytes_body, (x: &[f32], out: &mut [u8], p: QParams, range: [f32; 2]) -> ());
with_avx2!(gradients, gradients_body, (x: &[f32], g: &[f32], out: &mut [f32], p: QParams, range: [f32; 2]) -> ());
with_avx2!(range_of, range_body, (x: &[f32]) -> (f32, f32));

#[cfg(test)]
mod tests {
    use super::*;
    use dsq_quant::{FloatType, Granularity, Mapping, QuantType};

    #[test]
    fn c010_codes_and_gradient_equal_the_reference_bit_for_bit() {
        let mut seed = 7u32;
        for (qtype, mapping) in [
            (QuantType::Int4, Mapping::Symmetric),
            (QuantType::Int4, Mapping::Asymmetric),
            (QuantType::Int8, Mapping::Asymmetric),
        ] {
            let args = QuantArgs { qtype, mapping, ..QuantArgs::int4(Granularity::PerChannel, FloatType::F32) };
            let params: Vec<QParams> =
                [(-1.0, 3.0), (0.0, 0.7), (-2.0, 0.0)].iter().map(|&(lo, hi)| args.qparams(lo, hi).unwrap()).collect();
            let run = 2 * TASK + 3;
            let mut x = Vec::new();
            for p in &params {
                for i in 0..run {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    // Ties, range ends, negative zero, and anything in between.
                    x.push(match i % 4 {
                        0 => ((seed >> 20) as f32 % 40.0 - 20.0 + 0.5) * p.scale,
                        1 => (args.qtype.qmax() - p.zero) as f32 * p.scale,
                        2 => -0.0,
                        _ => (seed >> 8) as f32 / (1 << 24) as f32 * 8.0 - 4.0,
                    });
                }
            }
            let g: Vec<f32> = (0..x.len()).map(|i| i as f32 * 0.01 - 3.0).collect();
            let (codes, grad) = (code_values(&x, &args, &params), code_gradient(&x, &g, &args, &params));
            let bytes: Vec<_> = x.chunks(run).zip(&params).map(|(x, &p)| code_bytes(x, &args, p)).collect();
            assert_eq!(i32::from(code_bytes(&[f32::NAN], &args, params[0])[0]) + args.qtype.qmin(), 0);
            for i in 0..x.len() {
                let p = params[i / run];
                let want = f32::from(args.quantize(x[i], p)) - p.zero as f32;
                assert_eq!(i32::from(bytes[i / run][i % run]) + args.qtype.qmin(), i32::from(args.quantize(x[i], p)));
                let (value, inside) = args.fake_quantize(x[i], p);
                assert_eq!(codes[i].to_bits(), (want + 0.0).to_bits(), "{} {p:?}", x[i]);
                assert_eq!((codes[i] * p.scale).to_bits(), value.to_bits());
                assert_eq!(grad[i], if inside { g[i] / p.scale } else { 0.0 });
            }
        }
    }

    #[test]
    fn the_range_is_that_of_a_plain_walk() {
        let x: Vec<f32> = (0..3 * TASK + 5).map(|i| ((i * 7919) % 100_003) as f32 - 50_000.0).collect();
        let want = x.iter().fold((f32::MAX, f32::MIN), |(a, b), &v| (a.min(v), b.max(v)));
        assert_eq!(min_max(&x), want);
        assert_eq!(min_max(&[f32::NAN, 2.0, -1.0]), (-1.0, 2.0));
        assert_eq!(min_max(&[]), (0.0, 0.0));
    }
}
