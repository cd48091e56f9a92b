//! A vector of 16 f32 lanes on every path: `[f32; 16]`, two AVX2 registers, or one AVX-512 register.
//!
//! Every operation works lane by lane and is the IEEE operation (fused multiply-add rounds once), so a kernel
//! written over [`Simd`] gives the same bits on every path. All methods are inlined into an entry function that
//! enables the features (see `dispatch!`).
//!
//! Safety of every method: the CPU supports the path; pointers are valid for the bytes named in the comment.

mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use scalar::Scalar;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

#[allow(clippy::missing_safety_doc)]
pub(crate) trait Simd: Copy {
    /// Sixteen f32 lanes.
    type V: Copy;
    /// Row blocks (of 16) and tokens of the register tile of the multi-token kernel.
    const TILE_BLOCKS: usize;
    const TILE_TOKENS: usize;
    /// Vectors of 16 lanes that the registers hold.
    const VECTORS: usize;

    unsafe fn splat(x: f32) -> Self::V;
    /// 64 readable bytes.
    unsafe fn load(p: *const f32) -> Self::V;
    /// 64 writable bytes.
    unsafe fn store(p: *mut f32, v: Self::V);
    /// `a * b + c`, rounded once.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a > b ? a : b` (b when either is NaN).
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `a < b ? a : b` (b when either is NaN).
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// `2^n` for lanes that hold integers in -126..=127.
    unsafe fn pow2(n: Self::V) -> Self::V;
    /// 64 readable bytes: sixteen little-endian words; the value of lane `i` is nibble `j` of word `i`, minus 8.
    unsafe fn nibble(p: *const u8, j: i32) -> Self::V;
    /// 64 readable bytes: sixteen little-endian words; the value of lane `i` is byte `j` of word `i`, minus 128.
    unsafe fn byte(p: *const u8, j: i32) -> Self::V;
    /// 16 readable bytes: sixteen i8.
    unsafe fn int8(p: *const u8) -> Self::V;
    /// 64 readable bytes: sixteen little-endian words; the value of lane `i` is the FP4 E2M1 code in nibble `j` of word `i`.
    unsafe fn e2m1(p: *const u8, j: i32) -> Self::V;
    /// 16 readable bytes: sixteen FP8 E4M3 codes. A NaN code gives 480 or -480: the callers have none.
    unsafe fn e4m3(p: *const u8) -> Self::V;
    /// The same, each divided by 256.
    unsafe fn e4m3_by_256(p: *const u8) -> Self::V;
    /// 16 readable bytes: sixteen FP8 E5M2 codes.
    unsafe fn e5m2(p: *const u8) -> Self::V;
    /// 16 readable bytes: sixteen E8M0 exponents, `2^(byte - 127)`; 255 gives infinity: the callers have none.
    unsafe fn e8m0(p: *const u8) -> Self::V;
    /// 32 readable bytes: sixteen IEEE binary16.
    unsafe fn f16(p: *const u8) -> Self::V;
    /// 32 readable bytes: sixteen bfloat16.
    unsafe fn bf16(p: *const u8) -> Self::V;
    /// Asks for the cache line at `p` (any address).
    unsafe fn prefetch(p: *const u8);
}

/// The sum of the lanes in one fixed order: halves folded onto each other (8, 4, 2, 1).
#[inline(always)]
pub(crate) unsafe fn sum<S: Simd>(v: S::V) -> f32 {
    fold::<S>(v, |a, b| a + b)
}

/// The largest lane (lanes that are NaN may be skipped).
#[inline(always)]
pub(crate) unsafe fn largest<S: Simd>(v: S::V) -> f32 {
    fold::<S>(v, |a, b| if a > b { a } else { b })
}

#[inline(always)]
fn fold<S: Simd>(v: S::V, f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    // SAFETY: sixteen lanes are writable.
    unsafe { S::store(lanes.as_mut_ptr(), v) };
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] = f(lanes[i], lanes[i + half]);
        }
    }
    lanes[0]
}

/// Calls `$kernel::<S>($args)` on the path `$isa`, inside a function that enables the path's features.
macro_rules! dispatch {
    ($isa:expr, $kernel:ident $(::<$($g:ty),*>)? ($($arg:ident : $t:ty),* $(,)?)) => {{
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        unsafe fn on_avx2($($arg: $t),*) {
            // SAFETY: forwarded to the caller of the kernel; the features are enabled here.
            unsafe { $kernel::<$crate::simd::Avx2 $($(, $g)*)?>($($arg),*) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx2,fma,f16c")]
        unsafe fn on_avx512($($arg: $t),*) {
            // SAFETY: as above.
            unsafe { $kernel::<$crate::simd::Avx512 $($(, $g)*)?>($($arg),*) }
        }
        match $isa {
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx512 => on_avx512($($arg),*),
            #[cfg(target_arch = "x86_64")]
            $crate::Isa::Avx2 => on_avx2($($arg),*),
            _ => $kernel::<$crate::simd::Scalar $($(, $g)*)?>($($arg),*),
        }
    }};
}
pub(crate) use dispatch;

/// Defines a function twice: built for AVX2 and FMA, and for the baseline; the first is called where the CPU has it.
macro_rules! vectorized {
    (fn $name:ident($($arg:ident: $t:ty),* $(,)?) $(-> $r:ty)? $body:block) => {
        fn $name($($arg: $t),*) $(-> $r)? {
            #[inline(always)]
            fn body($($arg: $t),*) $(-> $r)? $body
            #[cfg(target_arch = "x86_64")]
            if crate::isa::has_avx2() {
                #[target_feature(enable = "avx2,fma")]
                unsafe fn wide($($arg: $t),*) $(-> $r)? { body($($arg),*) }
                // SAFETY: the features were found.
                return unsafe { wide($($arg),*) };
            }
            body($($arg),*)
        }
    };
}
pub(crate) use vectorized;
