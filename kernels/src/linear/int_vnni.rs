//! The dot products of the integer kernel in AVX-512 VNNI; see the header of `int.rs`. Not the AVX2 form (`int_avx2.rs`).

use super::input::Tile;
use super::int::{Dots, is_int8, tiles, tokens};
use super::layout::{OCTET, Panels};
use crate::simd::Avx512;
use std::arch::x86_64::*;
use std::ops::Range;

/// AVX-512F, BW and VNNI.
struct Vnni512;

tiles!(
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
    tile, Vnni512, 1 2 3 4 5 6 7 8 9 10 11 12
);

// SAFETY (all methods): as the trait says.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Dots for Vnni512 {
    type S = Avx512;
    type Octet = [__m512i; 2];
    const AHEAD: usize = 8192;

    #[inline(always)]
    unsafe fn octet<const INT8: bool>(w: *const u8) -> Self::Octet {
        unsafe {
            let words = _mm512_loadu_si512(w.cast());
            if INT8 {
                return [words, _mm512_loadu_si512(w.add(64).cast())];
            }
            let nibbles = _mm512_set1_epi8(15);
            [_mm512_and_si512(words, nibbles), _mm512_and_si512(_mm512_srli_epi32::<4>(words), nibbles)]
        }
    }

    #[inline(always)]
    unsafe fn dots<const T: usize, const INT8: bool, const N: usize>(
        w: [Self::Octet; N],
        x: *const u8,
        start: *const i32,
    ) -> __m512 {
        unsafe {
            let start = _mm512_set1_epi32(*start);
            let mut even = if INT8 { _mm512_slli_epi32::<4>(start) } else { start };
            // With few tokens a second chain of sums hides the latency of the first.
            let mut odd = _mm512_setzero_si512();
            for (i, w) in w.into_iter().enumerate() {
                let quads = x.add(i * T * OCTET).cast::<i32>();
                even = _mm512_dpbusd_epi32(even, w[0], _mm512_set1_epi32(quads.read_unaligned()));
                let quad = _mm512_set1_epi32(quads.add(1).read_unaligned());
                if T <= 2 {
                    odd = _mm512_dpbusd_epi32(odd, w[1], quad);
                } else {
                    even = _mm512_dpbusd_epi32(even, w[1], quad);
                }
            }
            _mm512_cvtepi32_ps(if T <= 2 { _mm512_add_epi32(even, odd) } else { even })
        }
    }
}
