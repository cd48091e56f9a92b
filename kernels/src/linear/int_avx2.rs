//! The dot products of the integer kernel in AVX2; see the header of `int.rs`. Not the VNNI form (`int_vnni.rs`).
//!
//! INT4: products of pairs in 16 bits (`vpmaddubsw`: at most 15 * 128 * 2), four of which are added in a lane: at most 15,360. Then one
//! `vpmaddwd` joins the two lanes of a row in 32 bits. INT8: pairs of products do not fit 16 bits, so codes and inputs are widened and
//! multiplied by `vpmaddwd`.

use super::input::Tile;
use super::int::{Dots, is_int8, tiles, tokens};
use super::layout::{OCTET, Panels};
use crate::simd::Avx2;
use std::arch::x86_64::*;
use std::ops::Range;

/// AVX2, FMA and F16C.
struct Plain;

tiles!(
    #[target_feature(enable = "avx2,fma,f16c")]
    tile, Plain, 1 2 3 4 5 6 7 8
);

/// [`Dots::octet`] in registers of 256 bits: the even and the odd quads of rows 0 to 7 and 8 to 15.
///
/// Safety: as there.
#[inline(always)]
pub(super) unsafe fn octet<const INT8: bool>(w: *const u8) -> [[__m256i; 2]; 2] {
    // SAFETY: 64 bytes, of INT8 128.
    unsafe {
        let words = [_mm256_loadu_si256(w.cast()), _mm256_loadu_si256(w.add(32).cast())];
        if INT8 {
            return [words, [_mm256_loadu_si256(w.add(64).cast()), _mm256_loadu_si256(w.add(96).cast())]];
        }
        let nibbles = _mm256_set1_epi8(15);
        [
            [_mm256_and_si256(words[0], nibbles), _mm256_and_si256(words[1], nibbles)],
            [
                _mm256_and_si256(_mm256_srli_epi16::<4>(words[0]), nibbles),
                _mm256_and_si256(_mm256_srli_epi16::<4>(words[1]), nibbles),
            ],
        ]
    }
}

// SAFETY (all methods): as the trait says.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Dots for Plain {
    type S = Avx2;
    type Octet = [[__m256i; 2]; 2];
    const AHEAD: usize = 2048;

    #[inline(always)]
    unsafe fn octet<const INT8: bool>(w: *const u8) -> Self::Octet {
        unsafe { octet::<INT8>(w) }
    }

    #[inline(always)]
    unsafe fn dots<const T: usize, const INT8: bool, const N: usize>(
        w: [Self::Octet; N],
        x: *const u8,
        start: *const i32,
    ) -> [__m256; 2] {
        unsafe {
            let start = _mm256_set1_epi32(*start);
            let mut dots = [if INT8 { _mm256_slli_epi32::<4>(start) } else { _mm256_setzero_si256() }; 2];
            for (i, w) in w.into_iter().enumerate() {
                let quads = x.add(i * T * OCTET).cast::<i32>();
                for (j, codes) in w.into_iter().enumerate() {
                    let quad = _mm256_set1_epi32(quads.add(j).read_unaligned());
                    for half in 0..2 {
                        dots[half] = if INT8 {
                            let bytes = _mm256_set1_epi16(255);
                            let even = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(quad));
                            let even = _mm256_madd_epi16(_mm256_and_si256(codes[half], bytes), even);
                            let odd = _mm256_srai_epi16::<8>(quad);
                            let odd = _mm256_madd_epi16(_mm256_srli_epi16::<8>(codes[half]), odd);
                            _mm256_add_epi32(dots[half], _mm256_add_epi32(even, odd))
                        } else {
                            _mm256_add_epi16(dots[half], _mm256_maddubs_epi16(codes[half], quad))
                        };
                    }
                }
            }
            dots.map(|dot| {
                let dot = match INT8 {
                    true => dot,
                    false => _mm256_add_epi32(_mm256_madd_epi16(dot, _mm256_set1_epi16(1)), start),
                };
                _mm256_cvtepi32_ps(dot)
            })
        }
    }
}
