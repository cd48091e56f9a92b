//! The integer kernel in NEON with dot products (ARMv8.2 `sdot`); see the header of `int.rs`. The f32 parts are plain Rust.
//!
//! `sdot` takes signed bytes: a nibble is 0 to 15 either way, and INT8 loses its 128 by a flipped bit.

use super::input::Tile;
use super::int::{is_int8, octets, offset};
use super::kernel::{scale, store_row};
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

/// Blocks of 16 rows for one tile of up to 4 tokens.
///
/// Safety: NEON and `dotprod`; the rest as [`super::int::tile`].
#[target_feature(enable = "neon,dotprod")]
pub(super) unsafe fn tile(p: &Panels, blocks: Range<usize>, tile: Tile, out: *mut f32) {
    macro_rules! run {
        ($($t:literal),*) => {
            // SAFETY: forwarded.
            unsafe {
                match tile.tokens {
                    $($t => blocks.for_each(|b| tokens::<$t>(p, b, tile, out)),)*
                    _ => unreachable!("tiles have 1 to 4 tokens"),
                }
            }
        };
    }
    run!(1, 2, 3, 4);
}

/// Safety: as [`tile`], and the tile has `T` tokens.
#[inline]
#[target_feature(enable = "neon,dotprod")]
unsafe fn tokens<const T: usize>(p: &Panels, block: usize, tile: Tile, out: *mut f32) {
    // SAFETY: the octets of the segments lie in the block and in the tile; scales and zero points exist for its groups.
    unsafe {
        let int8 = is_int8(p);
        let zeros = p.scales.as_ref().map(|s| &s.zeros).filter(|z| z.len() > 0);
        let mut w = p.weights.as_ptr().add(block * p.block_bytes);
        let (mut x, mut at) = (tile.codes, 0);
        let mut totals = [[0.0f32; BLOCK]; T];
        for s in &p.int_segments {
            // What is subtracted of each row's codes.
            let mut minus = [if int8 { 0 } else { offset(p) }; BLOCK];
            if let Some(z) = zeros {
                let z = z.as_ptr().add((block * p.groups + s.group) * BLOCK);
                minus.iter_mut().enumerate().for_each(|(i, m)| *m += i32::from(*z.add(i) as i8));
            }
            let mut acc = [[vdupq_n_s32(0); 4]; T];
            for t in 0..T {
                let sums = *tile.sums.add(at + t);
                if zeros.is_none() && !int8 {
                    acc[t] = [vdupq_n_s32(*tile.starts.add(at + t)); 4];
                    continue;
                }
                let sum = vdupq_n_s32(i32::from(sums as i16) + (sums >> 16));
                for r in 0..4 {
                    acc[t][r] = vmulq_s32(vld1q_s32(minus.as_ptr().add(4 * r)), sum);
                }
            }
            for _ in 0..octets(s) {
                for r in 0..4 {
                    let words = vld1q_u8(w.add(16 * r));
                    let (lo, hi) = if int8 {
                        let flip = vdupq_n_u8(128);
                        (veorq_u8(words, flip), veorq_u8(vld1q_u8(w.add(64 + 16 * r)), flip))
                    } else {
                        (vandq_u8(words, vdupq_n_u8(15)), vshrq_n_u8::<4>(words))
                    };
                    let (lo, hi) = (vreinterpretq_s8_u8(lo), vreinterpretq_s8_u8(hi));
                    for t in 0..T {
                        let quads = x.add(t * OCTET).cast::<i32>();
                        let even = vreinterpretq_s8_s32(vdupq_n_s32(quads.read_unaligned()));
                        let odd = vreinterpretq_s8_s32(vdupq_n_s32(quads.add(1).read_unaligned()));
                        acc[t][r] = dot(dot(acc[t][r], lo, even), hi, odd);
                    }
                }
                w = w.add(if int8 { 128 } else { 64 });
                x = x.add(T * OCTET);
            }
            let scale = scale::<Scalar>(p, block, s.group).unwrap_or([1.0; BLOCK]);
            for t in 0..T {
                let input_scale = vdupq_n_f32(*tile.scales.add(at + t));
                for r in 0..4 {
                    let total = totals[t].as_mut_ptr().add(4 * r);
                    let part = vmulq_f32(vcvtq_f32_s32(acc[t][r]), input_scale);
                    vst1q_f32(total, vfmaq_f32(vld1q_f32(total), vld1q_f32(scale.as_ptr().add(4 * r)), part));
                }
            }
            at += T;
        }
        for (t, &total) in totals.iter().enumerate() {
            store_row::<Scalar>(p, block, total, out.add((tile.first + t) * p.n));
        }
    }
}
