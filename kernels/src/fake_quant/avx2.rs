//! The AVX2 walk, bit-equal to `scalar`: a real division (the product with a reciprocal differs at ties) and
//! `vroundps` to nearest even. Not a place for another formula.

use super::{Range, scalar};
use dsq_quant::{MiniFloat, QParams, QuantArgs, with_format};
use std::arch::x86_64::*;

const LANES: usize = 8;

/// # Safety
/// AVX2 must be present.
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) unsafe fn range(x: &[f32]) -> Range {
    let zero = _mm256_setzero_ps();
    let (mut lo, mut hi, mut bad) = (zero, zero, zero);
    let chunks = x.chunks_exact(LANES);
    let tail = chunks.remainder();
    for c in chunks {
        // SAFETY: the chunk holds 8 values; loads need no alignment.
        let v = unsafe { _mm256_loadu_ps(c.as_ptr()) };
        // With a NaN in `v`, minps and maxps give their second operand: the running value.
        lo = _mm256_min_ps(v, lo);
        hi = _mm256_max_ps(v, hi);
        bad = _mm256_or_ps(bad, _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v));
    }
    // Neither holds a NaN, so the order of the last steps is free.
    let pair = |v: __m256| (_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
    let ((lo_a, lo_b), (hi_a, hi_b)) = (pair(lo), pair(hi));
    let (lo, hi) = (_mm_min_ps(lo_a, lo_b), _mm_max_ps(hi_a, hi_b));
    let (lo, hi) = (_mm_min_ps(lo, _mm_movehl_ps(lo, lo)), _mm_max_ps(hi, _mm_movehl_ps(hi, hi)));
    let lo = _mm_cvtss_f32(_mm_min_ss(lo, _mm_movehdup_ps(lo)));
    let hi = _mm_cvtss_f32(_mm_max_ss(hi, _mm_movehdup_ps(hi)));
    let finite = _mm256_movemask_ps(bad) == 0 && lo.is_finite() && hi.is_finite();
    let whole = Range { lo, hi, finite };
    if tail.is_empty() { whole } else { super::join(whole, scalar::range(tail)) }
}

/// # Safety
/// AVX2 must be present, and the three slices must have one length.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn walk(x: &[f32], args: &QuantArgs, p: QParams, out: &mut [f32], inside: &mut [u8]) {
    let (qmin, qmax) = (_mm256_set1_ps(args.qtype.qmin() as f32), _mm256_set1_ps(args.qtype.qmax() as f32));
    let (scale, zero) = (_mm256_set1_ps(p.scale), _mm256_set1_ps(p.zero as f32));
    // `q - z` as `q + (0 - z)`: a code of -0.0 must become +0.0, as the integer code does.
    let minus_zero = _mm256_set1_ps(0.0 - p.zero as f32);
    let ones = _mm_set1_epi8(1);
    let whole = x.len() / LANES * LANES;
    for i in (0..whole).step_by(LANES) {
        // SAFETY: i + 8 <= the length of all three slices; no access needs alignment.
        unsafe {
            let c = _mm256_add_ps(_mm256_div_ps(_mm256_loadu_ps(x.as_ptr().add(i)), scale), zero);
            let passes = _mm256_and_ps(_mm256_cmp_ps::<_CMP_GE_OQ>(c, qmin), _mm256_cmp_ps::<_CMP_LE_OQ>(c, qmax));
            let ordered = _mm256_cmp_ps::<_CMP_ORD_Q>(c, c);
            let q = _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(_mm256_min_ps(
                _mm256_max_ps(c, qmin),
                qmax,
            ));
            // NaN gives code 0, as Rust's saturating cast does.
            let q = _mm256_and_ps(q, ordered);
            let value = _mm256_mul_ps(_mm256_add_ps(q, minus_zero), scale);
            _mm256_storeu_ps(out.as_mut_ptr().add(i), value);
            // Eight 32-bit masks to eight bytes of 0 or 1.
            let m = _mm256_castps_si256(passes);
            let words = _mm_packs_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m));
            let bytes = _mm_and_si128(_mm_packs_epi16(words, words), ones);
            _mm_storel_epi64(inside.as_mut_ptr().add(i).cast(), bytes);
        }
    }
    scalar::walk(&x[whole..], args, p, &mut out[whole..], &mut inside[whole..]);
}

/// `scalar::walk` of float codes by their values alone ([`MiniFloat::round`]), compiled for wider vectors.
///
/// # Safety
/// AVX2 must be present.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn float_walk(x: &[f32], f: MiniFloat, scale: f32, out: &mut [f32], inside: &mut [u8]) {
    with_format!(f, F => for ((&x, out), inside) in x.iter().zip(out).zip(inside) {
        let c = x / scale;
        *out = F.round(c) * scale;
        *inside = u8::from(c.abs() <= F.max());
    });
}

/// The reference, compiled for wider vectors: no operation changes, and none is fused.
///
/// # Safety
/// AVX2 must be present.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn squared_error(x: &[f32], args: &QuantArgs, p: QParams) -> f64 {
    args.squared_error(x, p)
}
