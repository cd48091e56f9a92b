//! The integer kernel in AVX-512 VNNI; see the header of `int.rs`. Not the AVX2 form (`int_avx2.rs`).

use super::input::Tile;
use super::int::{is_int8, octets, offset};
use super::kernel::{scale, store_row};
use super::layout::{BLOCK, OCTET, Panels};
use crate::simd::Avx512;
use std::arch::x86_64::*;
use std::ops::Range;

/// How far ahead of what is multiplied weights are asked for.
const AHEAD: usize = 8192;

/// Blocks of 16 rows for one tile of up to 12 tokens.
///
/// Safety: AVX-512F, BW and VNNI; the rest as [`super::int::tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn tile(p: &Panels, blocks: Range<usize>, tile: Tile, out: *mut f32) {
    macro_rules! run {
        ($($t:literal),*) => {
            // SAFETY: forwarded.
            unsafe {
                match (tile.tokens, is_int8(p)) {
                    $(($t, false) => blocks.for_each(|b| tokens::<$t, false>(p, b, tile, out)),
                    ($t, true) => blocks.for_each(|b| tokens::<$t, true>(p, b, tile, out)),)*
                    _ => unreachable!("tiles have 1 to 12 tokens"),
                }
            }
        };
    }
    run!(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12);
}

/// Safety: as [`tile`], and the tile has `T` tokens.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma,f16c")]
unsafe fn tokens<const T: usize, const INT8: bool>(p: &Panels, block: usize, tile: Tile, out: *mut f32) {
    // SAFETY: the octets of the segments lie in the block and in the tile; scales and zero points exist for its groups.
    unsafe {
        let nibbles = _mm512_set1_epi8(15);
        let zeros = p.scales.as_ref().map(|s| &s.zeros).filter(|z| z.len() > 0);
        let mut w = p.weights.as_ptr().add(block * p.block_bytes);
        let (mut x, mut scales, mut sums, mut starts) = (tile.codes, tile.scales, tile.sums, tile.starts);
        let mut totals = [_mm512_setzero_ps(); T];
        for s in &p.int_segments {
            let minus = match zeros {
                None => _mm512_setzero_si512(),
                Some(z) => {
                    let z = z.as_ptr().add((block * p.groups + s.group) * BLOCK);
                    let z = _mm512_cvtepi8_epi32(_mm_loadu_si128(z.cast()));
                    let z = _mm512_add_epi32(z, _mm512_set1_epi32(offset(p)));
                    // Never negative, so both halves of the word are it.
                    _mm512_or_si512(z, _mm512_slli_epi32::<16>(z))
                }
            };
            let mut even = [_mm512_setzero_si512(); T];
            // With few tokens a second chain of sums hides the latency of the first.
            let mut odd = [_mm512_setzero_si512(); T];
            for t in 0..T {
                even[t] = match zeros {
                    None if INT8 => _mm512_slli_epi32::<4>(_mm512_set1_epi32(*starts.add(t))),
                    None => _mm512_set1_epi32(*starts.add(t)),
                    Some(_) => _mm512_madd_epi16(_mm512_set1_epi32(*sums.add(t)), minus),
                };
            }
            for _ in 0..octets(s) {
                let (lo, hi) = if INT8 {
                    _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(AHEAD).cast());
                    _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(AHEAD + 64).cast());
                    (_mm512_loadu_si512(w.cast()), _mm512_loadu_si512(w.add(64).cast()))
                } else {
                    _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(AHEAD).cast());
                    let words = _mm512_loadu_si512(w.cast());
                    (_mm512_and_si512(words, nibbles), _mm512_and_si512(_mm512_srli_epi32::<4>(words), nibbles))
                };
                let quad =
                    |t: usize, j: usize| _mm512_set1_epi32(x.add(t * OCTET + 4 * j).cast::<i32>().read_unaligned());
                for t in 0..T {
                    even[t] = _mm512_dpbusd_epi32(even[t], lo, quad(t, 0));
                }
                for t in 0..T {
                    if T <= 6 {
                        odd[t] = _mm512_dpbusd_epi32(odd[t], hi, quad(t, 1));
                    } else {
                        even[t] = _mm512_dpbusd_epi32(even[t], hi, quad(t, 1));
                    }
                }
                w = w.add(if INT8 { 128 } else { 64 });
                x = x.add(T * OCTET);
            }
            let scale = scale::<Avx512>(p, block, s.group).unwrap_or(_mm512_set1_ps(1.0));
            for t in 0..T {
                let dot = if T <= 6 { _mm512_add_epi32(even[t], odd[t]) } else { even[t] };
                let part = _mm512_mul_ps(_mm512_cvtepi32_ps(dot), _mm512_set1_ps(*scales.add(t)));
                totals[t] = _mm512_fmadd_ps(scale, part, totals[t]);
            }
            scales = scales.add(T);
            sums = sums.add(T);
            starts = starts.add(T);
        }
        for (t, &total) in totals.iter().enumerate() {
            store_row::<Avx512>(p, block, total, out.add((tile.first + t) * p.n));
        }
    }
}
