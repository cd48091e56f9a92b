//! The integer kernel in AVX2; see the header of `int.rs`. Not the VNNI form (`int_vnni.rs`).
//!
//! INT4: products of pairs in 16 bits (`vpmaddubsw`: at most 15 * 128 * 2, no saturation), added in 16 bits that wrap over the whole
//! segment. A lane holds half of a row's columns, at most 32, and starts at 8 times minus the sum of their inputs, so what it
//! ends with is `sum (u - 8) x`, at most 32 * 8 * 127 = 32,512: exact, though sums on the way may wrap. Inputs of -128 alone would give
//! 32,768 (`Rounded::wide`), in segments of 64; in those of 16 none overflows. Then one `vpmaddwd` joins the two lanes of a row in 32 bits.
//!
//! INT8: pairs of products do not fit 16 bits, so codes and inputs are widened and multiplied by `vpmaddwd`.

use super::input::Tile;
use super::int::{is_int8, octets, offset};
use super::kernel::{scale, store_row};
use super::layout::{BLOCK, OCTET, Panels};
use crate::simd::Avx2;
use std::arch::x86_64::*;
use std::ops::Range;

/// How far ahead of what is multiplied weights are asked for.
const AHEAD: usize = 2048;

/// Blocks of 16 rows for one tile of up to 4 tokens.
///
/// Safety: AVX2, FMA and F16C; the rest as [`super::int::tile`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn tile(p: &Panels, blocks: Range<usize>, tile: Tile, out: *mut f32) {
    macro_rules! run {
        ($($t:literal),*) => {
            // SAFETY: forwarded.
            unsafe {
                match (tile.tokens, is_int8(p)) {
                    $(($t, false) => blocks.for_each(|b| tokens::<$t, false>(p, b, tile, out)),
                    ($t, true) => blocks.for_each(|b| tokens::<$t, true>(p, b, tile, out)),)*
                    _ => unreachable!("tiles have 1 to 4 tokens"),
                }
            }
        };
    }
    run!(1, 2, 3, 4);
}

/// Safety: as [`tile`], and the tile has `T` tokens.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tokens<const T: usize, const INT8: bool>(p: &Panels, block: usize, tile: Tile, out: *mut f32) {
    // SAFETY: the octets of the segments lie in the block and in the tile; scales and zero points exist for its groups.
    unsafe {
        let nibbles = _mm256_set1_epi8(15);
        let bytes = _mm256_set1_epi16(255);
        let ones = _mm256_set1_epi16(1);
        let zeros = p.scales.as_ref().map(|s| &s.zeros).filter(|z| z.len() > 0);
        let mut w = p.weights.as_ptr().add(block * p.block_bytes);
        let (mut x, mut scales, mut sums) = (tile.codes, tile.scales, tile.sums);
        let mut totals = [[_mm256_setzero_ps(); 2]; T];
        for s in &p.int_segments {
            // What is taken back after the sum: the zero points, and of INT8 the offset.
            let minus: Option<[__m256i; 2]> = match zeros {
                None if INT8 => Some([_mm256_set1_epi16(offset(p) as i16); 2]),
                None => None,
                Some(z) => {
                    let z = z.as_ptr().add((block * p.groups + s.group) * BLOCK);
                    let both = |z: *const u8| {
                        let z = _mm256_cvtepi8_epi32(_mm_loadl_epi64(z.cast()));
                        let z = if INT8 { _mm256_add_epi32(z, _mm256_set1_epi32(offset(p))) } else { z };
                        let low = _mm256_and_si256(z, _mm256_set1_epi32(0xffff));
                        _mm256_or_si256(low, _mm256_slli_epi32::<16>(z))
                    };
                    Some([both(z), both(z.add(8))])
                }
            };
            let mut acc = [[_mm256_setzero_si256(); 2]; T];
            if !INT8 {
                for t in 0..T {
                    acc[t] = [_mm256_slli_epi16::<3>(_mm256_set1_epi32(*sums.add(t))); 2];
                }
            }
            for _ in 0..octets(s) {
                _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(AHEAD).cast());
                if INT8 {
                    _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(AHEAD + 64).cast());
                    for quad in 0..2 {
                        for half in 0..2 {
                            let words = _mm256_loadu_si256(w.add(64 * quad + 32 * half).cast());
                            let (a, b) = (_mm256_and_si256(words, bytes), _mm256_srli_epi16::<8>(words));
                            for t in 0..T {
                                let quad = x.add(t * OCTET + 4 * quad).cast::<i32>().read_unaligned();
                                let v = _mm256_set1_epi32(quad);
                                let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(v));
                                let odd = _mm256_srai_epi16::<8>(v);
                                let sum = _mm256_add_epi32(_mm256_madd_epi16(a, even), _mm256_madd_epi16(b, odd));
                                acc[t][half] = _mm256_add_epi32(acc[t][half], sum);
                            }
                        }
                    }
                    w = w.add(128);
                } else {
                    let words = [_mm256_loadu_si256(w.cast()), _mm256_loadu_si256(w.add(32).cast())];
                    let lo = [_mm256_and_si256(words[0], nibbles), _mm256_and_si256(words[1], nibbles)];
                    for t in 0..T {
                        let v = _mm256_set1_epi32(x.add(t * OCTET).cast::<i32>().read_unaligned());
                        for half in 0..2 {
                            acc[t][half] = _mm256_add_epi16(acc[t][half], _mm256_maddubs_epi16(lo[half], v));
                        }
                    }
                    let hi = [
                        _mm256_and_si256(_mm256_srli_epi16::<4>(words[0]), nibbles),
                        _mm256_and_si256(_mm256_srli_epi16::<4>(words[1]), nibbles),
                    ];
                    for t in 0..T {
                        let v = _mm256_set1_epi32(x.add(t * OCTET + 4).cast::<i32>().read_unaligned());
                        for half in 0..2 {
                            acc[t][half] = _mm256_add_epi16(acc[t][half], _mm256_maddubs_epi16(hi[half], v));
                        }
                    }
                    w = w.add(64);
                }
                x = x.add(T * OCTET);
            }
            let scale = scale::<Avx2>(p, block, s.group).unwrap_or([_mm256_set1_ps(1.0); 2]);
            for t in 0..T {
                let input_scale = _mm256_set1_ps(*scales.add(t));
                for half in 0..2 {
                    let mut dot = acc[t][half];
                    if !INT8 {
                        dot = _mm256_madd_epi16(dot, ones);
                    }
                    if let Some(minus) = minus {
                        let sum = _mm256_set1_epi32(*sums.add(t));
                        dot = _mm256_add_epi32(dot, _mm256_madd_epi16(sum, minus[half]));
                    }
                    let part = _mm256_mul_ps(_mm256_cvtepi32_ps(dot), input_scale);
                    totals[t][half] = _mm256_fmadd_ps(scale[half], part, totals[t][half]);
                }
            }
            scales = scales.add(T);
            sums = sums.add(T);
        }
        for (t, &total) in totals.iter().enumerate() {
            store_row::<Avx2>(p, block, total, out.add((tile.first + t) * p.n));
        }
    }
}
