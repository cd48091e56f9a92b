//! The integer kernel in 256-bit VNNI (AVX-VNNI: CPUs with it and without AVX-512); see the header of `int.rs`. The 512-bit form is
//! `int_vnni.rs`.
//!
//! The body is a macro over the instruction, which has two encodings: AVX-VNNI's is what runs; that of AVX-512VL, the same
//! arithmetic, is compiled for the tests, so that CPUs with AVX-512 test the body.

use super::input::Tile;
use super::int::{is_int8, octets, offset};
use super::kernel::{scale, store_row};
use super::layout::{BLOCK, OCTET, Panels};
use crate::simd::Avx2;
use std::arch::x86_64::*;
use std::ops::Range;

/// How far ahead of what is multiplied weights are asked for.
const AHEAD: usize = 2048;

macro_rules! kernel {
    ($tile:ident, $tokens:ident, $features:literal, $dot:ident) => {
        /// Blocks of 16 rows for one tile of up to 4 tokens.
        ///
        /// Safety: the features; the rest as [`super::int::tile`].
        #[target_feature(enable = $features)]
        pub(super) unsafe fn $tile(p: &Panels, blocks: Range<usize>, tile: Tile, out: *mut f32) {
            // SAFETY: forwarded.
            unsafe {
                match (tile.tokens, is_int8(p)) {
                    (1, false) => blocks.for_each(|b| $tokens::<1, false>(p, b, tile, out)),
                    (2, false) => blocks.for_each(|b| $tokens::<2, false>(p, b, tile, out)),
                    (3, false) => blocks.for_each(|b| $tokens::<3, false>(p, b, tile, out)),
                    (4, false) => blocks.for_each(|b| $tokens::<4, false>(p, b, tile, out)),
                    (1, true) => blocks.for_each(|b| $tokens::<1, true>(p, b, tile, out)),
                    (2, true) => blocks.for_each(|b| $tokens::<2, true>(p, b, tile, out)),
                    (3, true) => blocks.for_each(|b| $tokens::<3, true>(p, b, tile, out)),
                    (4, true) => blocks.for_each(|b| $tokens::<4, true>(p, b, tile, out)),
                    _ => unreachable!("tiles have 1 to 4 tokens"),
                }
            }
        }

        /// Safety: as the tile, which has `T` tokens.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn $tokens<const T: usize, const INT8: bool>(p: &Panels, block: usize, tile: Tile, out: *mut f32) {
            // SAFETY: the octets of the segments lie in the block and in the tile; scales and zero points exist for its groups.
            unsafe {
                let nibbles = _mm256_set1_epi8(15);
                let zeros = p.scales.as_ref().map(|s| &s.zeros).filter(|z| z.len() > 0);
                let mut w = p.weights.as_ptr().add(block * p.block_bytes);
                let (mut x, mut at) = (tile.codes, 0);
                let mut totals = [[_mm256_setzero_ps(); 2]; T];
                for s in &p.int_segments {
                    let mut acc = [[_mm256_setzero_si256(); 2]; T];
                    match zeros {
                        None => {
                            for t in 0..T {
                                let start = _mm256_set1_epi32(*tile.starts.add(at + t));
                                acc[t] = [if INT8 { _mm256_slli_epi32::<4>(start) } else { start }; 2];
                            }
                        }
                        Some(z) => {
                            let z = z.as_ptr().add((block * p.groups + s.group) * BLOCK);
                            for half in 0..2 {
                                let z = _mm256_cvtepi8_epi32(_mm_loadl_epi64(z.add(8 * half).cast()));
                                let z = _mm256_add_epi32(z, _mm256_set1_epi32(offset(p)));
                                // Never negative, so both halves of the word are it.
                                let minus = _mm256_or_si256(z, _mm256_slli_epi32::<16>(z));
                                for t in 0..T {
                                    acc[t][half] = _mm256_madd_epi16(_mm256_set1_epi32(*tile.sums.add(at + t)), minus);
                                }
                            }
                        }
                    }
                    for _ in 0..octets(s) {
                        _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(AHEAD).cast());
                        let (lo, hi);
                        let words = [_mm256_loadu_si256(w.cast()), _mm256_loadu_si256(w.add(32).cast())];
                        if INT8 {
                            _mm_prefetch::<_MM_HINT_T0>(w.wrapping_add(AHEAD + 64).cast());
                            lo = words;
                            hi = [_mm256_loadu_si256(w.add(64).cast()), _mm256_loadu_si256(w.add(96).cast())];
                        } else {
                            lo = [_mm256_and_si256(words[0], nibbles), _mm256_and_si256(words[1], nibbles)];
                            hi = [
                                _mm256_and_si256(_mm256_srli_epi16::<4>(words[0]), nibbles),
                                _mm256_and_si256(_mm256_srli_epi16::<4>(words[1]), nibbles),
                            ];
                        }
                        for (quad, codes) in [lo, hi].into_iter().enumerate() {
                            for t in 0..T {
                                let v = x.add(t * OCTET + 4 * quad).cast::<i32>().read_unaligned();
                                let v = _mm256_set1_epi32(v);
                                acc[t][0] = $dot(acc[t][0], codes[0], v);
                                acc[t][1] = $dot(acc[t][1], codes[1], v);
                            }
                        }
                        w = w.add(if INT8 { 128 } else { 64 });
                        x = x.add(T * OCTET);
                    }
                    let scale = scale::<Avx2>(p, block, s.group).unwrap_or([_mm256_set1_ps(1.0); 2]);
                    for t in 0..T {
                        let input_scale = _mm256_set1_ps(*tile.scales.add(at + t));
                        for half in 0..2 {
                            let part = _mm256_mul_ps(_mm256_cvtepi32_ps(acc[t][half]), input_scale);
                            totals[t][half] = _mm256_fmadd_ps(scale[half], part, totals[t][half]);
                        }
                    }
                    at += T;
                }
                for (t, &total) in totals.iter().enumerate() {
                    store_row::<Avx2>(p, block, total, out.add((tile.first + t) * p.n));
                }
            }
        }
    };
}

kernel!(tile, tokens, "avx2,fma,f16c,avxvnni", _mm256_dpbusd_avx_epi32);
#[cfg(test)]
kernel!(tile_vl, tokens_vl, "avx2,fma,f16c,avx512f,avx512vl,avx512vnni", _mm256_dpbusd_epi32);
