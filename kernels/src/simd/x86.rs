//! The 16-lane vector in AVX2 (two registers) and AVX-512 (one register).

use super::Simd;
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(crate) struct Avx2;

/// Applies a two-register operation half by half.
macro_rules! halves {
    ($f:ident, $a:expr, $b:expr) => {
        [$f($a[0], $b[0]), $f($a[1], $b[1])]
    };
}

// SAFETY (all methods): the caller runs on a CPU with AVX2, FMA and F16C; pointers as the trait says.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx2 {
    type V = [__m256; 2];
    const TILE_BLOCKS: usize = 1;
    const TILE_TOKENS: usize = 6;
    const VECTORS: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        unsafe {
            _mm256_storeu_ps(p, v[0]);
            _mm256_storeu_ps(p.add(8), v[1]);
        }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { halves!(_mm256_add_ps, a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { halves!(_mm256_sub_ps, a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { halves!(_mm256_mul_ps, a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { halves!(_mm256_div_ps, a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { halves!(_mm256_max_ps, a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        unsafe { halves!(_mm256_min_ps, a, b) }
    }
    #[inline(always)]
    unsafe fn pow2(n: Self::V) -> Self::V {
        unsafe {
            n.map(|n| {
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23))
            })
        }
    }
    #[inline(always)]
    unsafe fn nibble(p: *const u8, j: i32) -> Self::V {
        unsafe {
            let half = |p: *const u8| {
                // A nibble in bits 4j to 4j + 3 below the exponent of 2^(23 - 4j) is that number plus the nibble: no shift, no
                // conversion, and the difference is exact. One shift brings nibbles 5 to 7 there.
                let words = _mm256_loadu_si256(p.cast());
                let (words, j) = if j < 5 { (words, j) } else { (_mm256_srli_epi32::<20>(words), j - 5) };
                let field = _mm256_and_si256(words, _mm256_set1_epi32(15 << (4 * j)));
                let sum = _mm256_or_si256(field, _mm256_set1_epi32((150 - 4 * j) << 23));
                _mm256_sub_ps(_mm256_castsi256_ps(sum), _mm256_set1_ps((1i32 << (23 - 4 * j)) as f32 + 8.0))
            };
            [half(p), half(p.add(32))]
        }
    }
    #[inline(always)]
    unsafe fn byte(p: *const u8, j: i32) -> Self::V {
        unsafe {
            // As signed bytes, moved to the top of their words: the shift back extends the sign.
            let half = |p: *const u8| {
                let words = _mm256_xor_si256(_mm256_loadu_si256(p.cast()), _mm256_set1_epi8(-128));
                let top = _mm256_sll_epi32(words, _mm_cvtsi32_si128(24 - 8 * j));
                _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top))
            };
            [half(p), half(p.add(32))]
        }
    }
    #[inline(always)]
    unsafe fn int8(p: *const u8) -> Self::V {
        unsafe {
            let half = |p: *const u8| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())));
            [half(p), half(p.add(8))]
        }
    }
    #[inline(always)]
    unsafe fn e2m1(p: *const u8, j: i32) -> Self::V {
        unsafe {
            // A table of the eight magnitudes in a register; the permutation reads the low three bits of each lane.
            let table = _mm256_setr_ps(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0);
            let half = |p: *const u8| {
                let field = _mm256_srl_epi32(_mm256_loadu_si256(p.cast()), _mm_cvtsi32_si128(4 * j));
                let sign = _mm256_slli_epi32(_mm256_and_si256(field, _mm256_set1_epi32(8)), 28);
                _mm256_xor_ps(_mm256_permutevar8x32_ps(table, field), _mm256_castsi256_ps(sign))
            };
            [half(p), half(p.add(32))]
        }
    }
    #[inline(always)]
    unsafe fn e4m3(p: *const u8) -> Self::V {
        unsafe { Self::mul(Self::e4m3_by_256(p), Self::splat(256.0)) }
    }
    #[inline(always)]
    unsafe fn e4m3_by_256(p: *const u8) -> Self::V {
        unsafe {
            // As a binary16 with the same bits the value is 2^-8 of what it should be, subnormal codes included.
            let half = |p: *const u8| {
                let bits = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast())), 7);
                _mm256_cvtph_ps(_mm_and_si128(bits, _mm_set1_epi16(0xbfffu16 as i16)))
            };
            [half(p), half(p.add(8))]
        }
    }
    #[inline(always)]
    unsafe fn e5m2(p: *const u8) -> Self::V {
        unsafe {
            // The upper byte of a binary16.
            let half = |p: *const u8| _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast())), 8));
            [half(p), half(p.add(8))]
        }
    }
    #[inline(always)]
    unsafe fn e8m0(p: *const u8) -> Self::V {
        unsafe {
            // The byte is the exponent of an f32; 0 stands for 2^-127, a subnormal number.
            let half = |p: *const u8| {
                let bits = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())), 23);
                _mm256_castsi256_ps(_mm256_max_epi32(bits, _mm256_set1_epi32(1 << 22)))
            };
            [half(p), half(p.add(8))]
        }
    }
    #[inline(always)]
    unsafe fn f16(p: *const u8) -> Self::V {
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast()))] }
    }
    #[inline(always)]
    unsafe fn bf16(p: *const u8) -> Self::V {
        unsafe {
            let half = |p: *const u8| {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))
            };
            [half(p), half(p.add(16))]
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch(p.cast(), _MM_HINT_T0) }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Avx512;

// SAFETY (all methods): the caller runs on a CPU with AVX-512F; pointers as the trait says.
#[allow(clippy::undocumented_unsafe_blocks)]
impl Simd for Avx512 {
    type V = __m512;
    const TILE_BLOCKS: usize = 2;
    const TILE_TOKENS: usize = 12;
    const VECTORS: usize = 32;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        unsafe { _mm512_storeu_ps(p, v) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn pow2(n: Self::V) -> Self::V {
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32(biased, 23))
        }
    }
    #[inline(always)]
    unsafe fn nibble(p: *const u8, j: i32) -> Self::V {
        unsafe {
            // The permutation reads the low 4 bits of each lane: shift and look up, no mask, no conversion.
            let table = _mm512_setr_ps(-8., -7., -6., -5., -4., -3., -2., -1., 0., 1., 2., 3., 4., 5., 6., 7.);
            let words = _mm512_loadu_si512(p.cast());
            _mm512_permutexvar_ps(_mm512_srl_epi32(words, _mm_cvtsi32_si128(4 * j)), table)
        }
    }
    #[inline(always)]
    unsafe fn byte(p: *const u8, j: i32) -> Self::V {
        unsafe {
            // See the AVX2 path.
            let words = _mm512_xor_si512(_mm512_loadu_si512(p.cast()), _mm512_set1_epi32(0x8080_8080u32 as i32));
            let top = _mm512_sll_epi32(words, _mm_cvtsi32_si128(24 - 8 * j));
            _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(top))
        }
    }
    #[inline(always)]
    unsafe fn int8(p: *const u8) -> Self::V {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn e2m1(p: *const u8, j: i32) -> Self::V {
        unsafe {
            // As `nibble`: a table of all sixteen values in a register.
            let table = _mm512_setr_ps(0., 0.5, 1., 1.5, 2., 3., 4., 6., -0., -0.5, -1., -1.5, -2., -3., -4., -6.);
            let words = _mm512_loadu_si512(p.cast());
            _mm512_permutexvar_ps(_mm512_srl_epi32(words, _mm_cvtsi32_si128(4 * j)), table)
        }
    }
    #[inline(always)]
    unsafe fn e4m3(p: *const u8) -> Self::V {
        unsafe { Self::mul(Self::e4m3_by_256(p), Self::splat(256.0)) }
    }
    #[inline(always)]
    unsafe fn e4m3_by_256(p: *const u8) -> Self::V {
        unsafe {
            // See the AVX2 path.
            let bits = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())), 7);
            _mm512_cvtph_ps(_mm256_and_si256(bits, _mm256_set1_epi16(0xbfffu16 as i16)))
        }
    }
    #[inline(always)]
    unsafe fn e5m2(p: *const u8) -> Self::V {
        unsafe { _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())), 8)) }
    }
    #[inline(always)]
    unsafe fn e8m0(p: *const u8) -> Self::V {
        unsafe {
            let bits = _mm512_slli_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())), 23);
            _mm512_castsi512_ps(_mm512_max_epi32(bits, _mm512_set1_epi32(1 << 22)))
        }
    }
    #[inline(always)]
    unsafe fn f16(p: *const u8) -> Self::V {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn bf16(p: *const u8) -> Self::V {
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        unsafe { _mm_prefetch(p.cast(), _MM_HINT_T0) }
    }
}
