//! The dot products of the integer kernel in 256-bit VNNI (AVX-VNNI: CPUs with it and without AVX-512); see the header of `int.rs`.
//! The 512-bit form is `int_vnni.rs`.
//!
//! The instruction has two encodings: AVX-VNNI's is what runs; that of AVX-512VL, the same arithmetic, is compiled for the tests, so
//! that CPUs with AVX-512 test the rest.

use super::input::Tile;
use super::int::{Dots, is_int8, tiles, tokens};
use super::layout::{OCTET, Panels};
use crate::simd::Avx2;
use std::arch::x86_64::*;
use std::ops::Range;

macro_rules! dots {
    ($path:ident, $dot:ident) => {
        struct $path;

        // SAFETY (all methods): as the trait says.
        #[allow(clippy::undocumented_unsafe_blocks)]
        impl Dots for $path {
            type S = Avx2;
            type Octet = [[__m256i; 2]; 2];
            const AHEAD: usize = 2048;

            #[inline(always)]
            unsafe fn octet<const INT8: bool>(w: *const u8) -> Self::Octet {
                unsafe { super::int_avx2::octet::<INT8>(w) }
            }

            #[inline(always)]
            unsafe fn dots<const T: usize, const INT8: bool, const N: usize>(
                w: [Self::Octet; N],
                x: *const u8,
                start: *const i32,
            ) -> [__m256; 2] {
                unsafe {
                    let start = _mm256_set1_epi32(*start);
                    let mut dots = [if INT8 { _mm256_slli_epi32::<4>(start) } else { start }; 2];
                    for (i, w) in w.into_iter().enumerate() {
                        let quads = x.add(i * T * OCTET).cast::<i32>();
                        for (j, codes) in w.into_iter().enumerate() {
                            let quad = _mm256_set1_epi32(quads.add(j).read_unaligned());
                            dots[0] = $dot(dots[0], codes[0], quad);
                            dots[1] = $dot(dots[1], codes[1], quad);
                        }
                    }
                    [_mm256_cvtepi32_ps(dots[0]), _mm256_cvtepi32_ps(dots[1])]
                }
            }
        }
    };
}

dots!(Vnni256, _mm256_dpbusd_avx_epi32);
tiles!(
    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    tile, Vnni256, 1 2 3 4 5 6 7 8
);

#[cfg(test)]
dots!(Vnni256Vl, _mm256_dpbusd_epi32);
#[cfg(test)]
tiles!(
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512vl,avx512vnni")]
    tile_vl, Vnni256Vl, 1 2 3 4 5 6 7 8
);
