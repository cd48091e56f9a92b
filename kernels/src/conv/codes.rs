//! Codes of a float tensor as f32 integers, with the straight-through gradient (and those of a learned scale and zero
//! point), and the range of a tensor. The formulas are [`QuantArgs::quantize`]'s and
//! [`QuantArgs::learned_code_gradients`]'s; this file only makes them fast. Not a dequantization: the caller multiplies by
//! the scale, after the convolution.
//!
//! Shapes: `x` is `params.len()` equal runs, one for each of `params`. Order: element by element; the gradients of a scale
//! and a zero point are summed in pieces of 16,384 values, in a piece lane `i` of 16 takes the values `i`, `i + 16`, ... in
//! f32, lanes and pieces are added in f64. Error: none, bit-equal to [`QuantArgs`] (a NaN stays NaN, so that it is seen).
//! Requires: nothing; compiled for AVX2 where that is present.

use dsq_quant::{QParams, QuantArgs};
use rayon::prelude::*;

/// Values that one task takes.
const TASK: usize = 1 << 14;
/// Values of a step of sums.
const LANES: usize = 16;

/// Gradients of codes on learned grids.
#[derive(Debug, Clone, PartialEq)]
pub struct CodeGradients {
    /// For the values.
    pub x: Vec<f32>,
    /// For the scales, one for each run.
    pub scale: Vec<f32>,
    /// For the zero points, one for each run.
    pub zero: Vec<f32>,
}

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

/// `code - qmin` of every value as a byte, the input of [`super::IntConv`]; a NaN gives the code of 0, as
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

/// The gradients for `x`, the scales and the zero points from the gradient `g` of [`code_values`], by
/// [`QuantArgs::learned_code_gradients`].
///
/// # Panics
/// As [`code_gradient`].
pub fn learned_code_gradient(x: &[f32], g: &[f32], args: &QuantArgs, params: &[QParams]) -> CodeGradients {
    assert_eq!(x.len(), g.len(), "gradient length");
    let run = run_len(x.len(), params.len());
    let mut out = vec![0.0f32; x.len()];
    let range = [args.qtype.qmin() as f32, args.qtype.qmax() as f32];
    let piece = |((x, g), out): ((&[f32], &[f32]), &mut [f32]), p| learned(x, g, out, p, range);
    let sum = |parts: &mut dyn Iterator<Item = [f64; 2]>| {
        parts.fold([0.0f64; 2], |a, b| [a[0] + b[0], a[1] + b[1]]).map(|v| v as f32)
    };
    let sums: Vec<[f32; 2]> = if run > TASK {
        let runs = x.chunks(run).zip(g.chunks(run)).zip(out.chunks_mut(run)).zip(params);
        runs.map(|(((x, g), out), &p)| {
            let pieces = x.par_chunks(TASK).zip(g.par_chunks(TASK)).zip(out.par_chunks_mut(TASK));
            let parts: Vec<[f64; 2]> = pieces.map(|piece_of| piece(piece_of, p)).collect();
            sum(&mut parts.into_iter())
        })
        .collect()
    } else {
        let runs = x.par_chunks(run).zip(g.par_chunks(run)).zip(out.par_chunks_mut(run)).zip(params);
        runs.with_min_len((TASK / run).max(1)).map(|(x, &p)| sum(&mut std::iter::once(piece(x, p)))).collect()
    };
    let [scale, zero] = [0, 1].map(|i| sums.iter().map(|s| s[i]).collect());
    CodeGradients { x: out, scale, zero }
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

/// As [`QuantArgs::learned_code_gradients`] times `g`; the sums for the scale and the zero point.
#[inline(always)]
fn learned_body(x: &[f32], g: &[f32], out: &mut [f32], p: QParams, [lo, hi]: [f32; 2]) -> [f64; 2] {
    let (s, z) = (p.scale, p.zero as f32);
    let (mut scale, mut zero) = ([0.0f32; LANES], [0.0f32; LANES]);
    let mut walk = |x: &[f32], g: &[f32], out: &mut [f32]| {
        for i in 0..x.len().min(LANES) {
            let t = x[i] / s;
            let c = t + z;
            let inside = c >= lo && c <= hi;
            let d = g[i] / s;
            out[i] = if inside { d } else { 0.0 };
            scale[i] -= if inside { d * t } else { 0.0 };
            zero[i] -= if inside { 0.0 } else { g[i] };
        }
    };
    let whole = x.len() / LANES * LANES;
    let steps = x[..whole].chunks_exact(LANES).zip(g[..whole].chunks_exact(LANES));
    for ((x, g), out) in steps.zip(out[..whole].chunks_exact_mut(LANES)) {
        walk(x, g, out);
    }
    walk(&x[whole..], &g[whole..], &mut out[whole..]);
    [scale, zero].map(|lanes| lanes.iter().map(|&l| f64::from(l)).sum())
}

#[inline(always)]
fn range_body(x: &[f32]) -> (f32, f32) {
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
                if crate::isa::has_avx2() {
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
with_avx2!(learned, learned_body, (x: &[f32], g: &[f32], out: &mut [f32], p: QParams, range: [f32; 2]) -> [f64; 2]);
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
    fn learned_gradients_are_those_of_the_formula() {
        for (runs, len, qtype) in
            [(3, 75, QuantType::Int4), (40, 9, QuantType::Int2), (1, 3 * TASK + 7, QuantType::Int4)]
        {
            let mapping = Mapping::Asymmetric;
            let args = QuantArgs { qtype, mapping, ..QuantArgs::int4(Granularity::PerChannel, FloatType::F32) };
            let params: Vec<QParams> = (0..runs)
                .map(|i| QParams { scale: 0.1 + 0.01 * i as f32, zero: qtype.qmin() + i as i32 % 2 })
                .collect();
            let mut seed = 5u32;
            let mut next = || {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (seed >> 8) as f32 / (1 << 23) as f32 - 1.0
            };
            let x: Vec<f32> = (0..runs * len).map(|_| next() * 2.0).collect();
            let g: Vec<f32> = (0..runs * len).map(|_| next()).collect();
            let got = learned_code_gradient(&x, &g, &args, &params);
            assert_eq!(got.x, code_gradient(&x, &g, &args, &params));
            for (i, p) in params.iter().enumerate() {
                let (mut want, mut size) = ([0.0f64; 2], [0.0f64; 2]);
                for j in i * len..(i + 1) * len {
                    let [_, ds, dz] = args.learned_code_gradients(x[j], *p);
                    for (k, d) in [ds, dz].into_iter().enumerate() {
                        let term = f64::from(d) * f64::from(g[j]);
                        (want[k], size[k]) = (want[k] + term, size[k] + term.abs());
                    }
                }
                // A lane adds at most 1,024 terms, each rounded three times, and the sum is rounded once: 1,028 u of their size.
                for (got, k) in [(got.scale[i], 0), (got.zero[i], 1)] {
                    assert!((f64::from(got) - want[k]).abs() <= 1028.0 * 2f64.powi(-24) * size[k] + 1e-30, "{i} {k}");
                }
                assert!(len < 20 || (size[0] > 0.0 && size[1] > 0.0), "both sides of the clip");
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
