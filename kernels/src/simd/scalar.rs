//! The 16-lane vector in plain Rust.

use super::{LANES, Simd};
use dsq_quant::{MiniFloat, e8m0_decode};
use half::{bf16, f16};

#[derive(Clone, Copy)]
pub(crate) struct Scalar;

#[inline(always)]
fn zip(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

// SAFETY (all methods): pointers are read or written unaligned within the bytes that the trait names.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Scalar {
    type V = [f32; LANES];
    const TILE_BLOCKS: usize = 1;
    const TILE_TOKENS: usize = 1;
    const VECTORS: usize = 1;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        unsafe { p.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        unsafe { p.cast::<Self::V>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |x, y| x + y)
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |x, y| x - y)
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |x, y| x * y)
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |x, y| x / y)
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |x, y| if x > y { x } else { y })
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        zip(a, b, |x, y| if x < y { x } else { y })
    }
    #[inline(always)]
    unsafe fn pow2(n: Self::V) -> Self::V {
        n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }
    #[inline(always)]
    unsafe fn nibble(p: *const u8, j: i32) -> Self::V {
        let words = unsafe { p.cast::<[u32; LANES]>().read_unaligned() };
        words.map(|w| ((u32::from_le(w) >> (4 * j)) & 15) as f32 - 8.0)
    }
    #[inline(always)]
    unsafe fn byte(p: *const u8, j: i32) -> Self::V {
        let words = unsafe { p.cast::<[u32; LANES]>().read_unaligned() };
        words.map(|w| ((u32::from_le(w) >> (8 * j)) & 255) as f32 - 128.0)
    }
    #[inline(always)]
    unsafe fn int8(p: *const u8) -> Self::V {
        unsafe { p.cast::<[i8; LANES]>().read_unaligned() }.map(f32::from)
    }
    #[inline(always)]
    unsafe fn e2m1(p: *const u8, j: i32) -> Self::V {
        let words = unsafe { p.cast::<[u32; LANES]>().read_unaligned() };
        words.map(|w| MiniFloat::E2M1.decode((u32::from_le(w) >> (4 * j)) as u8))
    }
    #[inline(always)]
    unsafe fn e4m3(p: *const u8) -> Self::V {
        unsafe { p.cast::<[u8; LANES]>().read_unaligned() }.map(|c| MiniFloat::E4M3.decode(c))
    }
    #[inline(always)]
    unsafe fn e4m3_by_256(p: *const u8) -> Self::V {
        unsafe { Self::e4m3(p) }.map(|x| x / 256.0)
    }
    #[inline(always)]
    unsafe fn e5m2(p: *const u8) -> Self::V {
        unsafe { p.cast::<[u8; LANES]>().read_unaligned() }.map(|c| MiniFloat::E5M2.decode(c))
    }
    #[inline(always)]
    unsafe fn e8m0(p: *const u8) -> Self::V {
        unsafe { p.cast::<[u8; LANES]>().read_unaligned() }.map(e8m0_decode)
    }
    #[inline(always)]
    unsafe fn f16(p: *const u8) -> Self::V {
        unsafe { p.cast::<[u16; LANES]>().read_unaligned() }.map(|h| f16::from_bits(h).to_f32())
    }
    #[inline(always)]
    unsafe fn bf16(p: *const u8) -> Self::V {
        unsafe { p.cast::<[u16; LANES]>().read_unaligned() }.map(|h| bf16::from_bits(h).to_f32())
    }
    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}
}
