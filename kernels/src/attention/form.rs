//! The forms in which a cache holds a value, and how sixteen of them become f32 in registers. Not where they lie (see `paged.rs`
//! and `cache.rs`), not how they are made.

use crate::simd::Simd;

/// A form in which the cache holds a value.
pub(super) trait Form {
    /// Bytes of a value.
    const BYTES: usize;
    /// Sixteen values at `p`; `scale` is that of the codes.
    ///
    /// Safety: `16 * BYTES` readable bytes; the path's features.
    unsafe fn load<S: Simd>(p: *const u8, scale: S::V) -> S::V;
}

pub(super) struct F32;
pub(super) struct F16;
pub(super) struct Int8;
pub(super) struct E4m3;

impl Form for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8, _scale: S::V) -> S::V {
        // SAFETY: the caller's bytes.
        unsafe { S::load(p.cast()) }
    }
}

impl Form for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8, _scale: S::V) -> S::V {
        // SAFETY: the caller's bytes.
        unsafe { S::f16(p) }
    }
}

impl Form for Int8 {
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8, scale: S::V) -> S::V {
        // SAFETY: the caller's bytes.
        unsafe { S::mul(S::int8(p), scale) }
    }
}

impl Form for E4m3 {
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8, scale: S::V) -> S::V {
        // SAFETY: the caller's bytes; the cache holds no NaN codes.
        unsafe { S::mul(S::e4m3(p), scale) }
    }
}
