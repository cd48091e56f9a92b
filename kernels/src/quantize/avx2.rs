//! The AVX2 walk over groups, bit-equal to `scalar`: a real division, and the conversion to integers that rounds ties to
//! even. Not a place for another formula.

use super::{group_params, scalar};
use crate::fake_quant::avx2::range;
use dsq_quant::{QParams, QuantArgs};
use std::arch::x86_64::*;

/// # Safety
/// AVX2 must be present.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn find_params(w: &[f32], per_scale: usize, args: &QuantArgs, params: &mut [QParams]) -> Option<()> {
    for (w, p) in w.chunks(per_scale).zip(params) {
        // SAFETY: AVX2 is present.
        *p = group_params(unsafe { range(w) }, w, args)?;
    }
    Some(())
}

/// # Safety
/// AVX2 must be present.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn choose_codes(w: &[f32], per_scale: usize, args: &QuantArgs, params: &[QParams], codes: &mut [i8]) {
    for ((w, codes), &p) in w.chunks(per_scale).zip(codes.chunks_mut(per_scale)).zip(params) {
        // SAFETY: AVX2 is present.
        unsafe { group_codes(w, args, p, codes) };
    }
}

/// # Safety
/// AVX2 must be present.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn group_codes(w: &[f32], args: &QuantArgs, p: QParams, codes: &mut [i8]) {
    let (qmin, qmax) = (_mm256_set1_ps(args.qtype.qmin() as f32), _mm256_set1_ps(args.qtype.qmax() as f32));
    let (scale, zero) = (_mm256_set1_ps(p.scale), _mm256_set1_ps(p.zero as f32));
    // The packing instructions work in halves of a register: fours of codes come out as 0 2 4 6 1 3 5 7.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let mut values = w.chunks_exact(32);
    let mut out = codes.chunks_exact_mut(32);
    for (x, q) in values.by_ref().zip(out.by_ref()) {
        // SAFETY: the chunk holds 32 values; loads need no alignment.
        let eight = |i: usize| unsafe { _mm256_loadu_ps(x.as_ptr().add(8 * i)) };
        // The values are finite and the scale is positive, so no NaN reaches the clamp.
        let code = |x: __m256| {
            let c = _mm256_add_ps(_mm256_div_ps(x, scale), zero);
            _mm256_cvtps_epi32(_mm256_min_ps(_mm256_max_ps(c, qmin), qmax))
        };
        let low = _mm256_packs_epi32(code(eight(0)), code(eight(1)));
        let high = _mm256_packs_epi32(code(eight(2)), code(eight(3)));
        let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
        // SAFETY: the chunk holds 32 codes; stores need no alignment.
        unsafe { _mm256_storeu_si256(q.as_mut_ptr().cast(), bytes) };
    }
    scalar::choose_codes(values.remainder(), args, p, out.into_remainder());
}
