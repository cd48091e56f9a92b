//! The dot products of the integer kernel in NEON (ARMv8.2 `sdot`); see the header of `int.rs`. The f32 parts are plain Rust.
//!
//! `sdot` takes signed bytes: a nibble is 0 to 15 either way, and INT8 loses its 128 by a flipped bit, so its sums start at 0.

use super::input::Tile;
use super::int::{Dots, is_int8, tiles, tokens};
use super::layout::{BLOCK, OCTET, Panels};
use crate::simd::Scalar;
use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

/// `acc + ` four products of each lane's bytes.
///
/// Safety: the CPU has `dotprod`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn dot(mut acc: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: one instruction on registers; its feature is enabled here. (The intrinsic is not stable.)
    unsafe {
        asm!("sdot {0:v}.4s, {1:v}.16b, {2:v}.16b", inout(vreg) acc, in(vreg) a, in(vreg) b,
            options(pure, nomem, nostack, preserves_flags));
    }
    acc
}

/// NEON and `dotprod`.
struct Neon;

tiles!(
    #[target_feature(enable = "neon,dotprod")]
    tile, Neon, 1 2 3 4
);

// SAFETY (all methods): as the trait says.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Dots for Neon {
    type S = Scalar;
    type Octet = [[int8x16_t; 4]; 2];
    const AHEAD: usize = 0;

    #[inline(always)]
    unsafe fn octet<const INT8: bool>(w: *const u8) -> Self::Octet {
        unsafe {
            let mut octet = [[vdupq_n_s8(0); 4]; 2];
            for r in 0..4 {
                let words = vld1q_u8(w.add(16 * r));
                let (even, odd) = if INT8 {
                    let flip = vdupq_n_u8(128);
                    (veorq_u8(words, flip), veorq_u8(vld1q_u8(w.add(64 + 16 * r)), flip))
                } else {
                    (vandq_u8(words, vdupq_n_u8(15)), vshrq_n_u8::<4>(words))
                };
                (octet[0][r], octet[1][r]) = (vreinterpretq_s8_u8(even), vreinterpretq_s8_u8(odd));
            }
            octet
        }
    }

    #[inline(always)]
    unsafe fn dots<const T: usize, const INT8: bool, const N: usize>(
        w: [Self::Octet; N],
        x: *const u8,
        start: *const i32,
    ) -> [f32; BLOCK] {
        unsafe {
            let mut dots = [vdupq_n_s32(if INT8 { 0 } else { *start }); 4];
            for (i, w) in w.into_iter().enumerate() {
                let quads = x.add(i * T * OCTET).cast::<i32>();
                for (j, codes) in w.into_iter().enumerate() {
                    let quad = vreinterpretq_s8_s32(vdupq_n_s32(quads.add(j).read_unaligned()));
                    for r in 0..4 {
                        dots[r] = dot(dots[r], codes[r], quad);
                    }
                }
            }
            let mut out = [0.0f32; BLOCK];
            for r in 0..4 {
                vst1q_f32(out.as_mut_ptr().add(4 * r), vcvtq_f32_s32(dots[r]));
            }
            out
        }
    }
}
