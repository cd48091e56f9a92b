//! The AVX2 walk over blocks of GGUF, bit-equal to `GgufGrid::quantize`. The sums of the K-quants run from the first value to the
//! last, so that no sum may be split; eight runs of values go side by side instead, one in each lane, and every lane does what the
//! reference does with its run. What was found is stored by dsq-quant. Not a place for another formula.
//!
//! Whatever the reference refuses (values that are not finite, scales that f16 does not hold) gives `None`.

use dsq_quant::GgufGrid;
use dsq_quant::gguf::{q4_k, q6_k};
use half::f16;
use std::arch::x86_64::*;

/// Lanes of a register.
const L: usize = 8;

/// Whole blocks to bytes: `x.len()` is a multiple of the block, `bytes` as long as the blocks are. `None` where the reference refuses
/// something; `bytes` is then of no use.
#[target_feature(enable = "avx2,f16c")]
pub(super) fn encode(grid: GgufGrid, x: &[f32], bytes: &mut [u8]) -> Option<()> {
    if !finite(x) {
        return None;
    }
    match grid {
        GgufGrid::Q4_0 => {
            for (x, bytes) in x.as_chunks().0.iter().zip(bytes.as_chunks_mut().0) {
                encode_q4_0(x, bytes)?;
            }
        }
        GgufGrid::Q4K => {
            for (x, bytes) in x.as_chunks().0.iter().zip(bytes.as_chunks_mut().0) {
                encode_q4_k(x, bytes)?;
            }
        }
        GgufGrid::Q6K => {
            for (x, bytes) in x.as_chunks().0.iter().zip(bytes.as_chunks_mut().0) {
                encode_q6_k(x, bytes)?;
            }
        }
        _ => return None,
    }
    Some(())
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(x: &[f32], at: usize) -> __m256 {
    let eight = &x[at..at + L];
    // SAFETY: eight numbers of four bytes; loads need no alignment.
    unsafe { _mm256_loadu_ps(eight.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn to_array(v: __m256) -> [f32; L] {
    let mut out = [0.0; L];
    // SAFETY: eight numbers of four bytes; stores need no alignment.
    unsafe { _mm256_storeu_ps(out.as_mut_ptr(), v) };
    out
}

/// `|v|`.
#[inline]
#[target_feature(enable = "avx2")]
fn magnitude(v: __m256) -> __m256 {
    _mm256_andnot_ps(_mm256_set1_ps(-0.0), v)
}

#[target_feature(enable = "avx2")]
fn finite(x: &[f32]) -> bool {
    let limit = _mm256_set1_ps(f32::INFINITY);
    let mut all = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    let (eights, rest) = x.as_chunks::<L>();
    for eight in eights {
        all = _mm256_and_ps(all, _mm256_cmp_ps::<_CMP_LT_OQ>(magnitude(load(eight, 0)), limit));
    }
    _mm256_movemask_ps(all) == 0xff && rest.iter().all(|v| v.is_finite())
}

/// `nearest` of the reference: the low bits of `x + 1.5 * 2^23`, then between `low` and `high`.
#[inline]
#[target_feature(enable = "avx2")]
fn nearest(x: __m256, low: i32, high: i32) -> __m256i {
    let bits = _mm256_castps_si256(_mm256_add_ps(x, _mm256_set1_ps(12_582_912.0)));
    let n = _mm256_sub_epi32(_mm256_and_si256(bits, _mm256_set1_epi32(0x007f_ffff)), _mm256_set1_epi32(0x0040_0000));
    _mm256_min_epi32(_mm256_max_epi32(n, _mm256_set1_epi32(low)), _mm256_set1_epi32(high))
}

/// Eight runs of `LEN` values that lie one after the other, as `LEN` registers with a lane for each run.
#[inline]
#[target_feature(enable = "avx2")]
fn side_by_side<const LEN: usize>(x: &[f32]) -> [__m256; LEN] {
    let zero = _mm256_setzero_ps();
    let mut out = [zero; LEN];
    for part in 0..LEN / L {
        let (mut rows, mut pairs, mut fours) = ([zero; L], [zero; L], [zero; L]);
        for j in 0..L {
            rows[j] = load(x, j * LEN + part * L);
        }
        for i in 0..L / 2 {
            pairs[2 * i] = _mm256_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
            pairs[2 * i + 1] = _mm256_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
        }
        for i in 0..L / 2 {
            let (a, b) = (pairs[i / 2 * 4 + i % 2], pairs[i / 2 * 4 + i % 2 + 2]);
            fours[2 * i] = _mm256_shuffle_ps::<0x44>(a, b);
            fours[2 * i + 1] = _mm256_shuffle_ps::<0xee>(a, b);
        }
        for i in 0..L / 2 {
            out[part * L + i] = _mm256_permute2f128_ps::<0x20>(fours[i], fours[i + 4]);
            out[part * L + i + 4] = _mm256_permute2f128_ps::<0x31>(fours[i], fours[i + 4]);
        }
    }
    out
}

/// The way back, of codes: bytes of eight runs, one run after the other.
#[inline]
#[target_feature(enable = "avx2")]
fn one_after_the_other<const LEN: usize>(codes: &[__m256i; LEN], out: &mut [u8]) {
    for (at, c) in codes.chunks_exact(4).enumerate() {
        let low = _mm256_or_si256(c[0], _mm256_slli_epi32::<8>(c[1]));
        let high = _mm256_or_si256(_mm256_slli_epi32::<16>(c[2]), _mm256_slli_epi32::<24>(c[3]));
        let mut fours = [[0u8; 4]; L];
        // SAFETY: eight times four bytes; stores need no alignment.
        unsafe { _mm256_storeu_si256(fours.as_mut_ptr().cast(), _mm256_or_si256(low, high)) };
        for (run, four) in out.chunks_exact_mut(LEN).zip(fours) {
            run[4 * at..4 * at + 4].copy_from_slice(&four);
        }
    }
}

/// Finite values.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn encode_q4_0(x: &[f32; 32], bytes: &mut [u8; 18]) -> Option<()> {
    let v = [load(x, 0), load(x, L), load(x, 2 * L), load(x, 3 * L)];
    let m = [magnitude(v[0]), magnitude(v[1]), magnitude(v[2]), magnitude(v[3])];
    let eight = _mm256_max_ps(_mm256_max_ps(m[0], m[1]), _mm256_max_ps(m[2], m[3]));
    let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    let most = _mm256_set1_ps(_mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps::<1>(two, two))));
    let mut places = 0u32;
    for (i, m) in m.into_iter().enumerate() {
        places |= (_mm256_movemask_ps(_mm256_cmp_ps::<_CMP_EQ_OQ>(m, most)) as u32) << (L * i);
    }
    // The value of largest magnitude, the first of equals. Of zeros the reference takes +0.
    let first = x[places.trailing_zeros() as usize % 32];
    let widest = if first == 0.0 { 0.0 } else { first };
    let d = widest / -8.0;
    let half = _mm_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm_set_ss(d));
    let half = f16::from_bits(_mm_cvtsi128_si32(half) as u16);
    if !half.is_finite() {
        return None;
    }
    bytes[..2].copy_from_slice(&half.to_le_bytes());
    let id = _mm256_set1_ps(if d == 0.0 { 0.0 } else { 1.0 / d });
    let mut c = [_mm256_setzero_si256(); 4];
    for (c, v) in c.iter_mut().zip(v) {
        // Truncation makes of what is not finite the least integer, and that becomes 0, as in the reference.
        let code = _mm256_cvttps_epi32(_mm256_add_ps(_mm256_mul_ps(v, id), _mm256_set1_ps(8.5)));
        *c = _mm256_min_epi32(_mm256_max_epi32(code, _mm256_setzero_si256()), _mm256_set1_epi32(15));
    }
    let low = _mm256_or_si256(c[0], _mm256_slli_epi32::<4>(c[2]));
    let high = _mm256_or_si256(c[1], _mm256_slli_epi32::<4>(c[3]));
    // The packing instruction works in halves of a register.
    let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high));
    let packed = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
    let nibbles = &mut bytes[2..18];
    // SAFETY: 16 bytes; stores need no alignment.
    unsafe { _mm_storeu_si128(nibbles.as_mut_ptr().cast(), packed) };
    Some(())
}

/// Values of a sub-block of Q4_K.
const SUB: usize = 32;

/// Finite values.
#[target_feature(enable = "avx2")]
fn encode_q4_k(x: &[f32; 256], bytes: &mut [u8; 144]) -> Option<()> {
    let v = side_by_side::<SUB>(x);
    let fit = fit_q4_k(&v);
    let mins = to_array(_mm256_xor_ps(fit.min, _mm256_set1_ps(-0.0)));
    let (steps, mins) = q4_k::store_scales(&to_array(fit.scale), &mins, bytes).ok()?;
    let (step, min) = (load(&steps, 0), load(&mins, 0));
    let nothing = _mm256_cmp_ps::<_CMP_EQ_OQ>(step, _mm256_setzero_ps());
    let mut chosen = [_mm256_setzero_si256(); SUB];
    for i in 0..SUB {
        chosen[i] = nearest(_mm256_div_ps(_mm256_add_ps(v[i], min), step), 0, 15);
    }
    if _mm256_movemask_ps(nothing) != 0 {
        // A step of zero: the codes of the fit stay, and those of a flat sub-block are 0.
        for i in 0..SUB {
            let code = nearest(_mm256_mul_ps(fit.inverse, _mm256_sub_ps(v[i], fit.from)), 0, 15);
            let code = _mm256_andnot_si256(_mm256_castps_si256(fit.flat), code);
            chosen[i] = _mm256_blendv_epi8(chosen[i], code, _mm256_castps_si256(nothing));
        }
    }
    let mut codes = [0u8; 256];
    one_after_the_other(&chosen, &mut codes);
    q4_k::store_codes(&codes, bytes);
    Some(())
}

/// What the search found for eight sub-blocks: `x ~ scale * code + min`, the codes being `(x - from) * inverse`, rounded.
struct FitQ4K {
    scale: __m256,
    min: __m256,
    inverse: __m256,
    from: __m256,
    /// All bits where the values are one and the same.
    flat: __m256,
}

#[inline]
#[target_feature(enable = "avx2")]
fn fit_q4_k(v: &[__m256; SUB]) -> FitQ4K {
    let zero = _mm256_setzero_ps();
    let mut squares = zero;
    for &v in v {
        squares = _mm256_add_ps(squares, _mm256_mul_ps(v, v));
    }
    let rms = _mm256_sqrt_ps(_mm256_div_ps(squares, _mm256_set1_ps(SUB as f32)));
    let mut w = [zero; SUB];
    let (mut min, mut max, mut sum_w, mut sum_x) = (v[0], v[0], zero, zero);
    for i in 0..SUB {
        w[i] = _mm256_add_ps(rms, magnitude(v[i]));
        min = _mm256_min_ps(v[i], min);
        max = _mm256_max_ps(v[i], max);
        sum_w = _mm256_add_ps(sum_w, w[i]);
        sum_x = _mm256_add_ps(sum_x, _mm256_mul_ps(w[i], v[i]));
    }
    min = _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(min, zero), min);
    let flat = _mm256_cmp_ps::<_CMP_EQ_OQ>(max, min);
    let inverse = _mm256_div_ps(_mm256_set1_ps(15.0), _mm256_sub_ps(max, min));
    let scale = _mm256_div_ps(_mm256_set1_ps(1.0), inverse);
    let mut codes = [zero; SUB];
    for i in 0..SUB {
        codes[i] = _mm256_cvtepi32_ps(nearest(_mm256_mul_ps(inverse, _mm256_sub_ps(v[i], min)), 0, 15));
    }
    let mut least = error_q4_k(v, &w, &codes, scale, min);
    let mut best = FitQ4K { scale, min, inverse, from: min, flat };
    for t in 0..21 {
        let min = best.min;
        let inverse = _mm256_div_ps(_mm256_set1_ps(-1.0 + 0.1 * t as f32 + 15.0), _mm256_sub_ps(max, min));
        let (mut sum_l, mut sum_l2, mut sum_xl) = (zero, zero, zero);
        for i in 0..SUB {
            let l = _mm256_cvtepi32_ps(nearest(_mm256_mul_ps(inverse, _mm256_sub_ps(v[i], min)), 0, 15));
            let wl = _mm256_mul_ps(w[i], l);
            codes[i] = l;
            sum_l = _mm256_add_ps(sum_l, wl);
            sum_l2 = _mm256_add_ps(sum_l2, _mm256_mul_ps(wl, l));
            sum_xl = _mm256_add_ps(sum_xl, _mm256_mul_ps(wl, v[i]));
        }
        let determinant = _mm256_sub_ps(_mm256_mul_ps(sum_w, sum_l2), _mm256_mul_ps(sum_l, sum_l));
        let for_scale = _mm256_sub_ps(_mm256_mul_ps(sum_w, sum_xl), _mm256_mul_ps(sum_x, sum_l));
        let for_min = _mm256_sub_ps(_mm256_mul_ps(sum_l2, sum_x), _mm256_mul_ps(sum_l, sum_xl));
        let (scale, from_sums) = (_mm256_div_ps(for_scale, determinant), _mm256_div_ps(for_min, determinant));
        let above = _mm256_cmp_ps::<_CMP_GT_OQ>(from_sums, zero);
        let scale = _mm256_blendv_ps(scale, _mm256_div_ps(sum_xl, sum_l2), above);
        let trial_min = _mm256_andnot_ps(above, from_sums);
        let e = error_q4_k(v, &w, &codes, scale, trial_min);
        let solved = _mm256_cmp_ps::<_CMP_GT_OQ>(determinant, zero);
        let better = _mm256_and_ps(solved, _mm256_cmp_ps::<_CMP_LT_OQ>(e, least));
        least = _mm256_blendv_ps(least, e, better);
        best.scale = _mm256_blendv_ps(best.scale, scale, better);
        best.min = _mm256_blendv_ps(best.min, trial_min, better);
        best.inverse = _mm256_blendv_ps(best.inverse, inverse, better);
        best.from = _mm256_blendv_ps(best.from, min, better);
    }
    best.scale = _mm256_andnot_ps(flat, best.scale);
    best
}

#[inline]
#[target_feature(enable = "avx2")]
fn error_q4_k(v: &[__m256; SUB], w: &[__m256; SUB], codes: &[__m256; SUB], scale: __m256, min: __m256) -> __m256 {
    let mut sum = _mm256_setzero_ps();
    for i in 0..SUB {
        let d = _mm256_sub_ps(_mm256_add_ps(_mm256_mul_ps(scale, codes[i]), min), v[i]);
        sum = _mm256_add_ps(sum, _mm256_mul_ps(w[i], _mm256_mul_ps(d, d)));
    }
    sum
}

/// Values of a run of Q6_K.
const RUN: usize = 16;

/// Finite values.
#[target_feature(enable = "avx2")]
fn encode_q6_k(x: &[f32; 256], bytes: &mut [u8; 210]) -> Option<()> {
    let halves = [side_by_side::<RUN>(&x[..128]), side_by_side::<RUN>(&x[128..])];
    let fits = [fit_q6_k(&halves[0]), fit_q6_k(&halves[1])];
    let mut scales = [0.0f32; 2 * L];
    scales[..L].copy_from_slice(&to_array(fits[0].scale));
    scales[L..].copy_from_slice(&to_array(fits[1].scale));
    let Some(steps) = q6_k::store_scales(&scales, bytes).ok()? else {
        bytes.fill(0);
        return Some(());
    };
    let mut codes = [0u8; 256];
    for (h, (v, fit)) in halves.iter().zip(&fits).enumerate() {
        let step = load(&steps, L * h);
        let nothing = _mm256_cmp_ps::<_CMP_EQ_OQ>(step, _mm256_setzero_ps());
        let mut chosen = [_mm256_setzero_si256(); RUN];
        for i in 0..RUN {
            chosen[i] = _mm256_add_epi32(nearest(_mm256_div_ps(v[i], step), -32, 31), _mm256_set1_epi32(32));
        }
        if _mm256_movemask_ps(nothing) != 0 {
            // A step of zero: the codes of the fit stay, and those of a run that counts as zero are 0.
            for i in 0..RUN {
                let code = nearest(_mm256_mul_ps(fit.inverse, v[i]), -32, 31);
                let code = _mm256_add_epi32(code, _mm256_set1_epi32(32));
                let code = _mm256_andnot_si256(_mm256_castps_si256(fit.nothing), code);
                chosen[i] = _mm256_blendv_epi8(chosen[i], code, _mm256_castps_si256(nothing));
            }
        }
        one_after_the_other(&chosen, &mut codes[128 * h..128 * (h + 1)]);
    }
    q6_k::store_codes(&codes, bytes);
    Some(())
}

/// What the search found for eight runs: `x ~ scale * code`, the codes being `x * inverse`, rounded.
struct FitQ6K {
    scale: __m256,
    inverse: __m256,
    /// All bits where the values count as zero.
    nothing: __m256,
}

#[inline]
#[target_feature(enable = "avx2")]
fn fit_q6_k(v: &[__m256; RUN]) -> FitQ6K {
    let zero = _mm256_setzero_ps();
    let (mut w, mut wx) = ([zero; RUN], [zero; RUN]);
    let mut widest = zero;
    for i in 0..RUN {
        let wider = _mm256_cmp_ps::<_CMP_GT_OQ>(magnitude(v[i]), magnitude(widest));
        widest = _mm256_blendv_ps(widest, v[i], wider);
        w[i] = _mm256_mul_ps(v[i], v[i]);
        wx[i] = _mm256_mul_ps(w[i], v[i]);
    }
    let nothing = _mm256_cmp_ps::<_CMP_LT_OQ>(magnitude(widest), _mm256_set1_ps(1e-15));
    let mut best_inverse = _mm256_div_ps(_mm256_set1_ps(-32.0), widest);
    let (xl, l2) = sums_q6_k(v, &w, &wx, best_inverse);
    let some = _mm256_cmp_ps::<_CMP_NEQ_UQ>(l2, zero);
    let mut scale = _mm256_and_ps(some, _mm256_div_ps(xl, l2));
    let mut best = _mm256_mul_ps(scale, xl);
    for t in (-9..=9).filter(|&t| t != 0) {
        let inverse = _mm256_div_ps(_mm256_set1_ps(-(32.0 + 0.1 * t as f32)), widest);
        let (xl, l2) = sums_q6_k(v, &w, &wx, inverse);
        let more = _mm256_cmp_ps::<_CMP_GT_OQ>(_mm256_mul_ps(xl, xl), _mm256_mul_ps(best, l2));
        let better = _mm256_and_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(l2, zero), more);
        let ratio = _mm256_div_ps(xl, l2);
        scale = _mm256_blendv_ps(scale, ratio, better);
        best = _mm256_blendv_ps(best, _mm256_mul_ps(ratio, xl), better);
        best_inverse = _mm256_blendv_ps(best_inverse, inverse, better);
    }
    FitQ6K { scale: _mm256_andnot_ps(nothing, scale), inverse: best_inverse, nothing }
}

/// The sums of `x^3 * code` and of `x^2 * code^2`.
#[inline]
#[target_feature(enable = "avx2")]
fn sums_q6_k(v: &[__m256; RUN], w: &[__m256; RUN], wx: &[__m256; RUN], inverse: __m256) -> (__m256, __m256) {
    let (mut xl, mut l2) = (_mm256_setzero_ps(), _mm256_setzero_ps());
    for i in 0..RUN {
        let l = _mm256_cvtepi32_ps(nearest(_mm256_mul_ps(inverse, v[i]), -32, 31));
        xl = _mm256_add_ps(xl, _mm256_mul_ps(wx[i], l));
        l2 = _mm256_add_ps(l2, _mm256_mul_ps(_mm256_mul_ps(w[i], l), l));
    }
    (xl, l2)
}
