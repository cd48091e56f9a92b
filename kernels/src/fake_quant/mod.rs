//! Fake quantization for training: values on the grid that will ship, and the straight-through mask. The arithmetic
//! is that of [`dsq_quant::QuantArgs::fake_quantize`], bit for bit; this module only walks faster.
//!
//! - Shapes: `w`, `out`, `inside` `[n, k]`; groups as [`dsq_quant::QuantArgs::scale_shape`].
//! - Layout: row major, contiguous.
//! - Requires: AVX2 for the fast path (found at run time); any length, tails included.
//! - Order: element-wise; a group's minimum and maximum do not depend on the order, so any thread count gives the
//!   same bits.
//! - Cost: one division, one round and one multiplication for each value; two reads, one write, one mask byte. The
//!   search of `WeightObserver::Mse` costs 31 such walks without writes.
//! - Error: none against the reference (bit-equal).

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
mod blocks;
mod learned;
mod scalar;

pub use learned::{
    Learned, LearnedGradients, fake_quant_learned, fake_quant_learned_gradient, fake_quant_rows_gradient, scaled_codes,
    scaled_codes_gradient,
};

use dsq_quant::{Granularity, InputGrid, QParams, QuantArgs, QuantError};
use rayon::prelude::*;

/// Values that one parallel task handles at least: below this, spawning costs more than it gains.
pub(crate) const TASK: usize = 1 << 14;

/// Fake-quantizes a weight by the ranges of its own groups: `out` gets the values on the grid and `inside` 1 where
/// the straight-through gradient passes, else 0. A global scale (NVFP4) is that of the weight's own largest magnitude.
///
/// A group that cannot be quantized (a value that is not finite, or a scale that overflows its dtype) becomes NaN
/// with an open mask, so that a training loop sees it in its loss; the error of the first such group is returned
/// once everything else is done.
///
/// # Errors
/// [`QuantError::Length`], [`QuantError::GroupNotDividing`], [`QuantError::Setting`] for parts that do not fit together (nothing
/// is written then), [`QuantError::NonFinite`] and [`QuantError::ScaleOverflow`] as said above.
pub fn fake_quant_weight(
    w: &[f32],
    n: usize,
    k: usize,
    args: &QuantArgs,
    out: &mut [f32],
    inside: &mut [u8],
) -> Result<(), QuantError> {
    let global = args.has_global_scale().then(|| QuantArgs::global_scale(largest_magnitude(w)));
    fake_quant_weight_under(w, n, k, args, global, out, inside)
}

/// [`fake_quant_weight`] under a given global scale, for layers that share one; `None` for schemes without. Bit-equal to
/// `QuantizedMatrix::quantize_under(..).dequantize()`.
///
/// # Errors
/// As [`fake_quant_weight`], and for a global scale where there must be none, or the reverse.
pub fn fake_quant_weight_under(
    w: &[f32],
    n: usize,
    k: usize,
    args: &QuantArgs,
    global: Option<f32>,
    out: &mut [f32],
    inside: &mut [u8],
) -> Result<(), QuantError> {
    check_len("weight", n * k, w.len())?;
    check_len("output", n * k, out.len())?;
    check_len("mask", n * k, inside.len())?;
    let [rows, groups] = args.scale_shape(n, k)?;
    args.check_global(global)?;
    if w.is_empty() {
        return Ok(());
    }
    if let Granularity::PerBlock(rows, columns) = args.granularity {
        return blocks::fake_quant(w, k, args, [rows, columns], out, inside);
    }
    let per_scale = (w.len() / (rows * groups)).max(1);
    if per_scale > 4 * TASK {
        // Few long groups (a per-tensor scale): split the walk inside a group instead.
        return w
            .chunks(per_scale)
            .zip(out.chunks_mut(per_scale).zip(inside.chunks_mut(per_scale)))
            .enumerate()
            .map(|(i, (w, (out, inside)))| {
                match qparams(w.par_chunks(TASK).map(range).reduce(empty, join), args, global, i, w) {
                    Ok(p) => fake_quant_with(w, args, p, out, inside),
                    Err(e) => poison(out, inside, e),
                }
            })
            .fold(Ok(()), Result::and);
    }
    let run = (TASK / per_scale).max(1);
    w.par_chunks(per_scale * run)
        .zip(out.par_chunks_mut(per_scale * run).zip(inside.par_chunks_mut(per_scale * run)))
        .enumerate()
        .map(|(task, (w, (out, inside)))| {
            let mut first = Ok(());
            let groups = w.chunks(per_scale).zip(out.chunks_mut(per_scale).zip(inside.chunks_mut(per_scale)));
            for (i, (w, (out, inside))) in groups.enumerate() {
                let done = match qparams(range(w), args, global, task * run + i, w) {
                    Ok(p) => {
                        walk(w, args, p, out, inside);
                        Ok(())
                    }
                    Err(e) => poison(out, inside, e),
                };
                first = first.and(done);
            }
            first
        })
        // The first error in index order, whatever finishes first.
        .reduce(|| Ok(()), Result::and)
}

/// Fake-quantizes activations `x [m, k]` in place and on the calling thread: against the stored parameters of a static
/// grid, else each row, or each run of one, by its own range (of NVFP4 under the stored global scale). Bit-equal to
/// [`fake_quant_with`] and to [`fake_quant_weight`] of the same rows; a run that cannot be quantized becomes NaN.
///
/// # Errors
/// [`QuantError::Length`] when `k` does not divide the values, [`QuantError::GroupNotDividing`] when the runs do not divide
/// `k`; of a run that cannot be quantized as there.
pub fn fake_quant_rows(x: &mut [f32], k: usize, grid: &InputGrid) -> Result<(), QuantError> {
    each_run(x, k, grid, |_, _| ())
}

/// [`fake_quant_rows`], which also tells in `inside` where the straight-through gradient passes, as [`fake_quant_weight`] does.
///
/// # Errors
/// As [`fake_quant_rows`]; [`QuantError::Length`] when the mask is not as long as the values.
pub fn fake_quant_rows_masked(x: &mut [f32], k: usize, grid: &InputGrid, inside: &mut [u8]) -> Result<(), QuantError> {
    check_len("mask", x.len(), inside.len())?;
    each_run(x, k, grid, |at, mask| inside[at..at + mask.len()].copy_from_slice(mask))
}

/// Puts each run of values that shares parameters on its grid; `seen` gets where it starts and its mask.
fn each_run(x: &mut [f32], k: usize, grid: &InputGrid, mut seen: impl FnMut(usize, &[u8])) -> Result<(), QuantError> {
    let InputGrid { args, params } = grid;
    if k == 0 || !x.len().is_multiple_of(k) {
        return check_len("activations", k, x.len());
    }
    let run = args.group_len(k)?;
    let fixed = params.filter(|_| !args.has_global_scale());
    let (mut out, mut inside) = (vec![0.0; run], vec![0u8; run]);
    let mut first = Ok(());
    for (i, row) in x.chunks_mut(run).enumerate() {
        let found = || {
            let range = finite(range(row), i, row)?;
            grid.run_qparams(range.lo, range.hi).map_err(|e| e.in_group(i))
        };
        let p = fixed.map_or_else(found, Ok);
        let done = match p {
            Ok(p) => {
                walk(row, args, p, &mut out, &mut inside);
                Ok(())
            }
            Err(e) => poison(&mut out, &mut inside, e),
        };
        first = first.and(done);
        row.copy_from_slice(&out);
        seen(i * run, &inside);
    }
    first
}

/// The largest magnitude of a weight, on all threads: what a global scale comes from ([`QuantArgs::global_scale`]). Values that
/// are not finite do not count: their own group is refused by name.
pub fn largest_magnitude(w: &[f32]) -> f32 {
    let Range { lo, hi, .. } = w.par_chunks(TASK).map(range).reduce(empty, join);
    let largest = hi.max(-lo);
    match largest.is_finite() {
        true => largest,
        false => w.iter().filter(|v| v.is_finite()).fold(0.0, |m, v| m.max(v.abs())),
    }
}

/// Fake-quantizes values against given parameters (a static activation range).
///
/// # Errors
/// [`QuantError::Length`] when the buffers differ in length.
pub fn fake_quant_with(
    x: &[f32],
    args: &QuantArgs,
    p: QParams,
    out: &mut [f32],
    inside: &mut [u8],
) -> Result<(), QuantError> {
    check_len("output", x.len(), out.len())?;
    check_len("mask", x.len(), inside.len())?;
    x.par_chunks(TASK)
        .zip(out.par_chunks_mut(TASK).zip(inside.par_chunks_mut(TASK)))
        .for_each(|(x, (out, inside))| walk(x, args, p, out, inside));
    Ok(())
}

/// Makes a gradient the straight-through one: it stays where `inside` is 1 and becomes 0 elsewhere.
///
/// # Errors
/// [`QuantError::Length`] when the buffers differ in length.
pub fn straight_through(grad: &mut [f32], inside: &[u8]) -> Result<(), QuantError> {
    check_len("mask", grad.len(), inside.len())?;
    grad.par_chunks_mut(TASK).zip(inside.par_chunks(TASK)).for_each(|(grad, inside)| {
        for (g, &m) in grad.iter_mut().zip(inside) {
            *g = if m != 0 { *g } else { 0.0 };
        }
    });
    Ok(())
}

/// Minimum, maximum (0 included) and whether every value is finite.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Range {
    pub(crate) lo: f32,
    pub(crate) hi: f32,
    pub(crate) finite: bool,
}

pub(crate) fn empty() -> Range {
    Range { lo: 0.0, hi: 0.0, finite: true }
}

pub(crate) fn join(a: Range, b: Range) -> Range {
    Range { lo: a.lo.min(b.lo), hi: a.hi.max(b.hi), finite: a.finite && b.finite }
}

/// The range, unless a value of its group is not finite.
fn finite(range: Range, group: usize, w: &[f32]) -> Result<Range, QuantError> {
    if !range.finite {
        let at = w.iter().position(|x| !x.is_finite()).unwrap_or(0);
        let count = w.iter().filter(|x| !x.is_finite()).count();
        return Err(QuantError::NonFinite { index: group * w.len() + at, value: w[at], count });
    }
    Ok(range)
}

/// The parameters in effect of a group.
fn qparams(
    range: Range,
    args: &QuantArgs,
    global: Option<f32>,
    group: usize,
    w: &[f32],
) -> Result<QParams, QuantError> {
    let range = finite(range, group, w)?;
    let stored = args.stored_weight_qparams(range.lo, range.hi, global, |p| squared_error(w, args, p));
    stored.map(|p| args.in_effect(p, global)).map_err(|e| e.in_group(group))
}

fn poison(out: &mut [f32], inside: &mut [u8], error: QuantError) -> Result<(), QuantError> {
    out.fill(f32::NAN);
    inside.fill(1);
    Err(error)
}

pub(crate) fn range(x: &[f32]) -> Range {
    #[cfg(target_arch = "x86_64")]
    if crate::isa::has_avx2() {
        // SAFETY: AVX2 was found.
        return unsafe { avx2::range(x) };
    }
    scalar::range(x)
}

/// [`QuantArgs::squared_error`]; its order is fixed, so wider vectors give the same bits.
pub(crate) fn squared_error(x: &[f32], args: &QuantArgs, p: QParams) -> f64 {
    #[cfg(target_arch = "x86_64")]
    if crate::isa::has_avx2() {
        // SAFETY: AVX2 was found.
        return unsafe { avx2::squared_error(x, args, p) };
    }
    args.squared_error(x, p)
}

fn walk(x: &[f32], args: &QuantArgs, p: QParams, out: &mut [f32], inside: &mut [u8]) {
    debug_assert!(x.len() == out.len() && x.len() == inside.len());
    #[cfg(target_arch = "x86_64")]
    if crate::isa::has_avx2() {
        // SAFETY: AVX2 was found; the three slices have one length (checked by the callers).
        return unsafe {
            match args.qtype.float() {
                None => avx2::walk(x, args, p, out, inside),
                Some(f) => avx2::float_walk(x, f, p.scale, out, inside),
            }
        };
    }
    scalar::walk(x, args, p, out, inside);
}

fn check_len(what: &'static str, expected: usize, got: usize) -> Result<(), QuantError> {
    if expected == got { Ok(()) } else { Err(QuantError::Length { what, expected, got }) }
}

#[cfg(test)]
pub(crate) mod tests;
