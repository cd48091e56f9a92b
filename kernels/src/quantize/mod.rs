//! Rounding of weights to their grid: a [`QuantizedMatrix`] from f32 values, bit-equal to
//! [`QuantizedMatrix::quantize`], parameters and errors included; this module only walks faster. Not fake quantization
//! (see `fake_quant`), and not the packing into words, which `dsq_quant::pack_rows` does eight codes at a time.
//!
//! - Shapes: `w` `[n, k]`; parameters as [`QuantArgs::scale_shape`], row major.
//! - Layout: row major, contiguous.
//! - Requires: AVX2 for the fast path (found at run time); any length, tails included.
//! - Order: element-wise; a group's minimum and maximum do not depend on the order, and the sum of the search of
//!   `WeightObserver::Mse` has an order of its own, so any thread count gives the same bits.
//! - Cost: two reads of a value, the second from the cache, and one division; a code of one byte is written.
//! - Error: none against the reference (bit-equal). Whatever cannot be quantized, and any scheme that is not of integer
//!   codes in runs along `k`, is handed to the reference, which names the fault.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod blocks;
mod gguf;
mod scalar;

pub use gguf::{encode_blocks, fake_quantize_blocks, quantize_blocks};

use crate::fake_quant::{TASK, empty, join, range, squared_error};
use dsq_quant::{Granularity, Mapping, QParams, QuantArgs, QuantError, QuantType, QuantizedMatrix};
use rayon::prelude::*;

/// [`QuantizedMatrix::quantize`].
///
/// # Errors
/// As there.
pub fn quantize(w: &[f32], n: usize, k: usize, args: QuantArgs) -> Result<QuantizedMatrix, QuantError> {
    fast(w, n, k, args).map_or_else(|| QuantizedMatrix::quantize(w, n, k, args), Ok)
}

/// [`quantize`] in the thread that calls, for some rows at a time: of no more values than a core's cache holds it is as fast as memory.
///
/// # Errors
/// As there.
pub fn quantize_here(w: &[f32], n: usize, k: usize, args: QuantArgs) -> Result<QuantizedMatrix, QuantError> {
    let fast = || {
        let split = Split::new(w, n, k, &args)?;
        let (mut params, mut codes) = (vec![UNSET; split.count], vec![0i8; w.len()]);
        find_params(w, split.per_scale, &args, &mut params)?;
        choose_codes(w, split.per_scale, &args, &params, &mut codes);
        Some(matrix(n, k, args, &params, codes))
    };
    fast().map_or_else(|| QuantizedMatrix::quantize(w, n, k, args), Ok)
}

/// [`QuantizedMatrix::quantize_with`].
///
/// # Errors
/// As there.
pub fn quantize_with(
    w: &[f32],
    n: usize,
    k: usize,
    args: QuantArgs,
    params: &[QParams],
) -> Result<QuantizedMatrix, QuantError> {
    fast_with(w, n, k, args, params).map_or_else(|| QuantizedMatrix::quantize_with(w, n, k, args, params), Ok)
}

/// [`QuantizedMatrix::qparams_of`].
///
/// # Errors
/// As there.
pub fn qparams_of(w: &[f32], n: usize, k: usize, args: QuantArgs) -> Result<Vec<QParams>, QuantError> {
    fast_params(w, n, k, args).map_or_else(|| QuantizedMatrix::qparams_of(w, n, k, args), Ok)
}

fn fast(w: &[f32], n: usize, k: usize, args: QuantArgs) -> Option<QuantizedMatrix> {
    let split = Split::new(w, n, k, &args)?;
    if split.long() {
        let params = fast_params(w, n, k, args)?;
        return fast_with(w, n, k, args, &params);
    }
    let mut params = vec![UNSET; split.count];
    let mut codes = vec![0i8; w.len()];
    let (values, groups) = (split.per_scale * split.run, split.run);
    w.par_chunks(values).zip(params.par_chunks_mut(groups)).zip(codes.par_chunks_mut(values)).try_for_each(
        |((w, params), codes)| {
            find_params(w, split.per_scale, &args, params)?;
            choose_codes(w, split.per_scale, &args, params, codes);
            Some(())
        },
    )?;
    Some(matrix(n, k, args, &params, codes))
}

fn fast_with(w: &[f32], n: usize, k: usize, args: QuantArgs, params: &[QParams]) -> Option<QuantizedMatrix> {
    let split = Split::new(w, n, k, &args)?;
    let codes = args.qtype.qmin()..=args.qtype.qmax();
    let storable = |p: &QParams| {
        p.scale.is_finite()
            && p.scale > 0.0
            && args.scale_dtype.round(p.scale) == p.scale
            && codes.contains(&p.zero)
            && (p.zero == 0 || args.mapping == Mapping::Asymmetric)
    };
    if params.len() != split.count || !params.iter().all(storable) {
        return None;
    }
    let mut codes = vec![0i8; w.len()];
    let walk = |w: &[f32], params: &[QParams], codes: &mut [i8]| {
        choose_codes(w, split.per_scale, &args, params, codes);
        range(w).finite.then_some(())
    };
    if split.long() {
        for ((w, p), codes) in w.chunks(split.per_scale).zip(params.chunks(1)).zip(codes.chunks_mut(split.per_scale)) {
            w.par_chunks(TASK).zip(codes.par_chunks_mut(TASK)).try_for_each(|(w, codes)| walk(w, p, codes))?;
        }
    } else {
        let values = split.per_scale * split.run;
        w.par_chunks(values)
            .zip(params.par_chunks(split.run))
            .zip(codes.par_chunks_mut(values))
            .try_for_each(|((w, p), codes)| walk(w, p, codes))?;
    }
    Some(matrix(n, k, args, params, codes))
}

fn fast_params(w: &[f32], n: usize, k: usize, args: QuantArgs) -> Option<Vec<QParams>> {
    let split = Split::new(w, n, k, &args)?;
    let mut params = vec![UNSET; split.count];
    if split.long() {
        for (w, p) in w.chunks(split.per_scale).zip(&mut params) {
            let range = w.par_chunks(TASK).map(range).reduce(empty, join);
            *p = group_params(range, w, &args)?;
        }
    } else {
        w.par_chunks(split.per_scale * split.run)
            .zip(params.par_chunks_mut(split.run))
            .try_for_each(|(w, params)| find_params(w, split.per_scale, &args, params))?;
    }
    Some(params)
}

const UNSET: QParams = QParams { scale: 0.0, zero: 0 };

/// How a matrix is divided: `count` groups of `per_scale` values that lie one after the other, `run` groups a task.
struct Split {
    per_scale: usize,
    count: usize,
    run: usize,
}

impl Split {
    /// `None` for what the reference must see: wrong sizes, nothing at all, a scheme of another kind.
    fn new(w: &[f32], n: usize, k: usize, args: &QuantArgs) -> Option<Self> {
        let integer = matches!(args.qtype, QuantType::Int2 | QuantType::Int3 | QuantType::Int4 | QuantType::Int8);
        let runs =
            matches!(args.granularity, Granularity::PerTensor | Granularity::PerChannel | Granularity::PerGroup(_));
        let [rows, groups] = args.scale_shape(n, k).ok()?;
        let count = rows * groups;
        if !integer || !runs || w.is_empty() || n.checked_mul(k) != Some(w.len()) || count == 0 {
            return None;
        }
        let per_scale = w.len() / count;
        Some(Self { per_scale, count, run: (TASK / per_scale).max(1) })
    }

    /// Few long groups (a scale for the whole tensor): the work is divided inside a group.
    fn long(&self) -> bool {
        self.per_scale > 4 * TASK
    }
}

fn matrix(n: usize, k: usize, args: QuantArgs, params: &[QParams], codes: Vec<i8>) -> QuantizedMatrix {
    let zeros = match args.mapping {
        Mapping::Symmetric => Vec::new(),
        Mapping::Asymmetric => params.iter().map(|p| p.zero as i8).collect(),
    };
    QuantizedMatrix { args, n, k, codes, scales: params.iter().map(|p| p.scale).collect(), zeros, global_scale: None }
}

/// `None` when a value is not finite or the scale overflows.
#[inline]
fn group_params(range: crate::fake_quant::Range, w: &[f32], args: &QuantArgs) -> Option<QParams> {
    if !range.finite {
        return None;
    }
    args.weight_qparams(range.lo, range.hi, |p| squared_error(w, args, p)).ok()
}

/// The parameters of consecutive groups.
fn find_params(w: &[f32], per_scale: usize, args: &QuantArgs, params: &mut [QParams]) -> Option<()> {
    #[cfg(target_arch = "x86_64")]
    if crate::isa::has_avx2() {
        // SAFETY: AVX2 was found.
        return unsafe { avx2::find_params(w, per_scale, args, params) };
    }
    for (w, p) in w.chunks(per_scale).zip(params) {
        *p = group_params(range(w), w, args)?;
    }
    Some(())
}

/// The codes of consecutive groups; the values are finite and the parameters can be stored.
fn choose_codes(w: &[f32], per_scale: usize, args: &QuantArgs, params: &[QParams], codes: &mut [i8]) {
    debug_assert!(w.len() == codes.len() && w.len() <= params.len() * per_scale);
    #[cfg(target_arch = "x86_64")]
    if crate::isa::has_avx2() {
        // SAFETY: AVX2 was found.
        return unsafe { avx2::choose_codes(w, per_scale, args, params, codes) };
    }
    for ((w, codes), &p) in w.chunks(per_scale).zip(codes.chunks_mut(per_scale)).zip(params) {
        scalar::choose_codes(w, args, p, codes);
    }
}

#[cfg(test)]
mod tests;
