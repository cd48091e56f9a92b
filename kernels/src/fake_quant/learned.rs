//! Fake quantization with learned scales and zero points (LSQ, LSQ+): values on the grid that will ship, and the gradients
//! of all three. The formulas are `dsq_quant`'s `learned_qparams`, `fake_quantize` and `learned_gradients`; this module
//! walks them.
//!
//! - Shapes: `w`, `out` `[n, k]`; `scales` and `zeros` one for each group, row major; groups lie one after the other.
//! - Layout: row major, contiguous.
//! - Requires: AVX2 for the fast path (found at run time); any length, tails included.
//! - Order: a group is cut into runs of 4,096 values; in a run, lane `i` of 16 sums the values `i`, `i + 16`, ... in f32;
//!   lanes, then runs, are added in f64. Knows neither threads nor the path.
//! - Cost: forward as `fake_quant_with`; backward one division and one rounding a value, two reads, one write.
//! - Error: none against the reference (bit-equal).

use super::{TASK, check_len};
use dsq_quant::{Mapping, QParams, QuantArgs, QuantError};
use rayon::prelude::*;

const RUN: usize = 1 << 12;
const LANES: usize = 16;

/// Gradients of [`fake_quant_learned`].
#[derive(Debug, Clone, PartialEq)]
pub struct LearnedGradients {
    /// For the values.
    pub w: Vec<f32>,
    /// For the scales.
    pub scale: Vec<f32>,
    /// For the zero points; empty when symmetric.
    pub zero: Vec<f32>,
}

/// Writes the values of `w` on the grids of the learned `scales` and `zeros` (empty when symmetric).
///
/// # Errors
/// [`QuantError::Length`] when the scales do not divide the values into equal groups, or another length is wrong.
pub fn fake_quant_learned(
    w: &[f32],
    args: &QuantArgs,
    scales: &[f32],
    zeros: &[f32],
    out: &mut [f32],
) -> Result<(), QuantError> {
    check_len("output", w.len(), out.len())?;
    let per = group_len(w.len(), args, scales, zeros)?;
    let params = |i: usize| args.learned_qparams(scales[i], zeros.get(i).copied().unwrap_or(0.0));
    if per > 4 * TASK {
        for (i, (w, out)) in w.chunks(per).zip(out.chunks_mut(per)).enumerate() {
            let p = params(i);
            w.par_chunks(TASK).zip(out.par_chunks_mut(TASK)).for_each(|(w, out)| values(w, args, p, out));
        }
        return Ok(());
    }
    let run = (TASK / per).max(1);
    w.par_chunks(per * run).zip(out.par_chunks_mut(per * run)).enumerate().for_each(|(task, (w, out))| {
        for (i, (w, out)) in w.chunks(per).zip(out.chunks_mut(per)).enumerate() {
            values(w, args, params(task * run + i), out);
        }
    });
    Ok(())
}

/// The gradients of [`fake_quant_learned`] for the gradient `g` of its output.
///
/// # Errors
/// As [`fake_quant_learned`].
pub fn fake_quant_learned_gradient(
    w: &[f32],
    g: &[f32],
    args: &QuantArgs,
    scales: &[f32],
    zeros: &[f32],
) -> Result<LearnedGradients, QuantError> {
    check_len("gradient", w.len(), g.len())?;
    let per = group_len(w.len(), args, scales, zeros)?;
    let params = |i: usize| args.learned_qparams(scales[i], zeros.get(i).copied().unwrap_or(0.0));
    let mut dw = vec![0.0f32; w.len()];
    let mut sums = vec![[0.0f32; 2]; scales.len()];
    if per > 4 * TASK {
        for (i, sum) in sums.iter_mut().enumerate() {
            let (p, at) = (params(i), i * per..(i + 1) * per);
            let runs = w[at.clone()].par_chunks(RUN).zip(g[at.clone()].par_chunks(RUN)).zip(dw[at].par_chunks_mut(RUN));
            let parts: Vec<[f64; 2]> = runs.map(|((w, g), dw)| gradient_run(w, g, args, p, dw)).collect();
            *sum = total(parts.into_iter());
        }
    } else {
        let run = (TASK / per).max(1);
        let tasks = w.par_chunks(per * run).zip(g.par_chunks(per * run)).zip(dw.par_chunks_mut(per * run));
        tasks.zip(sums.par_chunks_mut(run)).enumerate().for_each(|(task, (((w, g), dw), sums))| {
            let groups = w.chunks(per).zip(g.chunks(per)).zip(dw.chunks_mut(per));
            for (i, (((w, g), dw), sum)) in groups.zip(sums).enumerate() {
                let p = params(task * run + i);
                let runs = w.chunks(RUN).zip(g.chunks(RUN)).zip(dw.chunks_mut(RUN));
                *sum = total(runs.map(|((w, g), dw)| gradient_run(w, g, args, p, dw)));
            }
        });
    }
    let scale = sums.iter().map(|s| s[0]).collect();
    let zero = match args.mapping {
        Mapping::Symmetric => Vec::new(),
        Mapping::Asymmetric => sums.iter().map(|s| s[1]).collect(),
    };
    Ok(LearnedGradients { w: dw, scale, zero })
}

/// Writes the values of fixed codes (`code - zero`, exact in f32) on the grids of the learned `scales`: `code * stored scale`.
///
/// # Errors
/// [`QuantError::Length`] when the scales do not divide the codes into equal groups, or another length is wrong.
pub fn scaled_codes(codes: &[f32], args: &QuantArgs, scales: &[f32], out: &mut [f32]) -> Result<(), QuantError> {
    check_len("output", codes.len(), out.len())?;
    let per = runs_of(codes.len(), scales)?;
    out.par_chunks_mut(per).zip(codes.par_chunks(per)).zip(scales).with_min_len((TASK / per).max(1)).for_each(
        |((out, codes), &scale)| {
            let scale = args.learned_qparams(scale, 0.0).scale;
            out.iter_mut().zip(codes).for_each(|(o, c)| *o = c * scale);
        },
    );
    Ok(())
}

/// The gradient of [`scaled_codes`] for the scales, from that of its output: the sum of `g * code` over the group.
///
/// # Errors
/// As [`scaled_codes`].
pub fn scaled_codes_gradient(codes: &[f32], g: &[f32], scales: &[f32]) -> Result<Vec<f32>, QuantError> {
    check_len("gradient", codes.len(), g.len())?;
    let per = runs_of(codes.len(), scales)?;
    let dot = |(codes, g): (&[f32], &[f32])| {
        let run = |(c, g): (&[f32], &[f32])| {
            let mut lanes = [0.0f32; LANES];
            for (c, g) in c.chunks(LANES).zip(g.chunks(LANES)) {
                lanes.iter_mut().zip(c.iter().zip(g)).for_each(|(l, (c, g))| *l += c * g);
            }
            lanes.iter().map(|&l| f64::from(l)).sum::<f64>()
        };
        codes.chunks(RUN).zip(g.chunks(RUN)).map(run).sum::<f64>() as f32
    };
    Ok(codes.par_chunks(per).zip(g.par_chunks(per)).with_min_len((TASK / per).max(1)).map(dot).collect())
}

fn runs_of(len: usize, scales: &[f32]) -> Result<usize, QuantError> {
    let per = len.checked_div(scales.len()).unwrap_or(0);
    check_len("values of the groups", per * scales.len(), len)?;
    Ok(per.max(1))
}

fn total(parts: impl Iterator<Item = [f64; 2]>) -> [f32; 2] {
    parts.fold([0.0f64; 2], |a, b| [a[0] + b[0], a[1] + b[1]]).map(|v| v as f32)
}

/// Values of a group; 1 when there are none.
fn group_len(len: usize, args: &QuantArgs, scales: &[f32], zeros: &[f32]) -> Result<usize, QuantError> {
    let wanted = if args.mapping == Mapping::Asymmetric { scales.len() } else { 0 };
    check_len("zero points", wanted, zeros.len())?;
    runs_of(len, scales)
}

fn values(w: &[f32], args: &QuantArgs, p: QParams, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was found.
        return unsafe { values_avx2(w, args, p, out) };
    }
    values_plain(w, args, p, out);
}

/// As `QuantArgs::fake_quantize`, without a branch, so that it vectorizes; NaN values and scales stay visible.
#[inline(always)]
fn values_plain(w: &[f32], args: &QuantArgs, p: QParams, out: &mut [f32]) {
    let (qmin, qmax, zero) = (args.qtype.qmin() as f32, args.qtype.qmax() as f32, p.zero as f32);
    for (out, &x) in out.iter_mut().zip(w) {
        let c = x / p.scale + zero;
        let q = c.max(qmin).min(qmax).round_ties_even();
        // `q + (0 - zero)`: a code of -0.0 becomes +0.0, as an integer code does.
        *out = if c.is_nan() { c } else { (q + (0.0 - zero)) * p.scale };
    }
}

/// # Safety
/// AVX2 must be present.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn values_avx2(w: &[f32], args: &QuantArgs, p: QParams, out: &mut [f32]) {
    values_plain(w, args, p, out);
}

fn gradient_run(w: &[f32], g: &[f32], args: &QuantArgs, p: QParams, dw: &mut [f32]) -> [f64; 2] {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: AVX2 was found.
        return unsafe { gradient_avx2(w, g, args, p, dw) };
    }
    gradient_plain(w, g, args, p, dw)
}

#[inline(always)]
fn gradient_plain(w: &[f32], g: &[f32], args: &QuantArgs, p: QParams, dw: &mut [f32]) -> [f64; 2] {
    let (mut scale, mut zero) = ([0.0f32; LANES], [0.0f32; LANES]);
    let mut walk = |w: &[f32], g: &[f32], dw: &mut [f32]| {
        for i in 0..w.len().min(LANES) {
            let [dx, ds, dz] = args.learned_gradients(w[i], p);
            // A closed gate gives 0, whatever the gradient is.
            dw[i] = if dx == 0.0 { 0.0 } else { g[i] };
            scale[i] += g[i] * ds;
            zero[i] += g[i] * dz;
        }
    };
    let whole = w.len() / LANES * LANES;
    let blocks = w[..whole].chunks_exact(LANES).zip(g[..whole].chunks_exact(LANES));
    for ((w, g), dw) in blocks.zip(dw[..whole].chunks_exact_mut(LANES)) {
        walk(w, g, dw);
    }
    walk(&w[whole..], &g[whole..], &mut dw[whole..]);
    [scale, zero].map(|lanes| lanes.iter().map(|&l| f64::from(l)).sum())
}

/// # Safety
/// AVX2 must be present.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn gradient_avx2(w: &[f32], g: &[f32], args: &QuantArgs, p: QParams, dw: &mut [f32]) -> [f64; 2] {
    gradient_plain(w, g, args, p, dw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_quant::tests::{bits, integer_args as all_args, normal};
    use dsq_quant::{Granularity, QuantizedMatrix};

    #[test]
    fn values_are_those_of_the_shipped_matrix_and_gradients_those_of_the_formula() {
        for (n, k) in [(1, 1), (3, 7), (5, 96), (33, 192), (1, 70_003)] {
            let group = if k % 32 == 0 { 32 } else { k };
            for args in all_args(&[Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(group)]) {
                let w = normal(n * k, (n * 31 + k) as u64);
                let g = normal(n * k, 77);
                let count = args.learned_shape(n, k).unwrap().iter().product::<usize>();
                let scales: Vec<f32> =
                    normal(count, 5).iter().map(|v| v.abs() * 3.0 / args.qtype.qmax() as f32 + 1e-3).collect();
                let zeros: Vec<f32> = match args.mapping {
                    Mapping::Symmetric => Vec::new(),
                    Mapping::Asymmetric => normal(count, 6).iter().map(|v| v * 3.0).collect(),
                };
                let params: Vec<QParams> =
                    (0..count).map(|i| args.learned_qparams(scales[i], zeros.get(i).copied().unwrap_or(0.0))).collect();
                let shipped = QuantizedMatrix::quantize_with(&w, n, k, args, &params).unwrap();
                let mut out = vec![f32::NAN; n * k];
                fake_quant_learned(&w, &args, &scales, &zeros, &mut out).unwrap();
                assert_eq!(bits(&out), bits(&shipped.dequantize()), "{n}x{k} {args:?}");

                let d = fake_quant_learned_gradient(&w, &g, &args, &scales, &zeros).unwrap();
                let per = n * k / count;
                let mut want = vec![[0.0f64; 3]; count];
                for i in 0..n * k {
                    let [dx, ds, dz] = args.learned_gradients(w[i], params[i / per]);
                    assert_eq!(d.w[i], if dx == 1.0 { g[i] } else { 0.0 });
                    let terms = [f64::from(g[i]) * f64::from(ds), f64::from(g[i]) * f64::from(dz)];
                    let sum = &mut want[i / per];
                    (sum[0], sum[1]) = (sum[0] + terms[0], sum[1] + terms[1]);
                    sum[2] += terms[0].abs() + terms[1].abs();
                }
                for (i, w) in want.iter().enumerate() {
                    // A lane adds at most 256 terms, each rounded once, and the sum is rounded once: 258 u of their size.
                    let bound = 258.0 * 2f64.powi(-24) * w[2] + 1e-30;
                    assert!((f64::from(d.scale[i]) - w[0]).abs() <= bound, "{args:?} {i}");
                    if let Some(z) = d.zero.get(i) {
                        assert!((f64::from(*z) - w[1]).abs() <= bound, "{args:?} {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn fixed_codes_take_the_values_of_the_shipped_matrix_and_give_scales_their_gradient() {
        for (n, k, granularity) in
            [(5, 96, Granularity::PerGroup(32)), (3, 7, Granularity::PerChannel), (2, 9000, Granularity::PerTensor)]
        {
            for args in all_args(&[granularity]) {
                let q = QuantizedMatrix::quantize(&normal(n * k, 3), n, k, args).unwrap();
                let per = n * k / q.scales.len();
                let codes: Vec<f32> =
                    q.codes.iter().enumerate().map(|(i, &c)| (i32::from(c) - q.qparams(i / per).zero) as f32).collect();
                let mut out = vec![f32::NAN; n * k];
                scaled_codes(&codes, &args, &q.scales, &mut out).unwrap();
                assert_eq!(bits(&out), bits(&q.dequantize()), "{args:?}");
                let g = normal(n * k, 4);
                let got = scaled_codes_gradient(&codes, &g, &q.scales).unwrap();
                for (i, d) in got.iter().enumerate() {
                    let terms = || codes[i * per..][..per].iter().zip(&g[i * per..]).map(|(c, g)| f64::from(c * g));
                    let (sum, size) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
                    // As for the gradients of learned grids.
                    assert!((f64::from(*d) - sum).abs() <= 258.0 * 2f64.powi(-24) * size + 1e-30, "{args:?}");
                }
            }
        }
        assert!(scaled_codes(&[0.0; 5], &all_args(&[Granularity::PerChannel])[0], &[1.0; 2], &mut [0.0; 5]).is_err());
        assert!(scaled_codes_gradient(&[0.0; 4], &[0.0; 3], &[1.0; 2]).is_err());
    }

    #[test]
    fn any_thread_count_and_path_gives_the_same_bits() {
        for (n, k) in [(257, 331), (1, 200_000)] {
            let (w, g) = (normal(n * k, 5), normal(n * k, 6));
            let args = QuantArgs {
                mapping: Mapping::Asymmetric,
                ..QuantArgs::int4(Granularity::PerChannel, dsq_quant::FloatType::Bf16)
            };
            let (scales, zeros) = (vec![0.2f32; n], vec![0.7f32; n]);
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| fake_quant_learned_gradient(&w, &g, &args, &scales, &zeros)).unwrap()
            };
            let one = run(1);
            for threads in [2, 3, 7] {
                assert_eq!(run(threads), one);
            }
            let p = args.learned_qparams(0.2, 0.7);
            let (mut a, mut b) = (vec![0.0; RUN], vec![0.0; RUN]);
            let plain = gradient_plain(&w[..RUN], &g[..RUN], &args, p, &mut a);
            assert_eq!(plain, gradient_run(&w[..RUN], &g[..RUN], &args, p, &mut b));
            assert_eq!(a, b);
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let args = QuantArgs::int4(Granularity::PerChannel, dsq_quant::FloatType::F32);
        let mut out = [0.0; 6];
        assert!(fake_quant_learned(&[0.0; 6], &args, &[1.0; 4], &[], &mut out).is_err());
        assert!(fake_quant_learned(&[0.0; 6], &args, &[1.0; 3], &[0.0; 3], &mut out).is_err());
        assert!(fake_quant_learned(&[0.0; 5], &args, &[1.0; 3], &[], &mut out).is_err());
        assert!(fake_quant_learned_gradient(&[0.0; 6], &[0.0; 5], &args, &[1.0; 3], &[]).is_err());
    }
}
