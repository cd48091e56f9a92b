//! A small f32 matrix product for the convolutions: `c = a b` or `c += a b`, `a` with any strides, `b` row major.
//! Not a general BLAS: no blocking over `k` (the callers bring blocks that fit the cache) and no threads.
//!
//! Shapes: `a [m, k]`, `b [k, n]`, `c [m, n]`. Layout: `a(i, l) = a[i * rsa + l * csa]`, `b(l, j) = b[l * ldb + j]`,
//! `c(i, j) = c[i * ldc + j]`. Requires: nothing; AVX2 and FMA are detected at run time.
//! Order: each output is one chain over `l = 0 .. k` (fused multiply-adds with AVX2, separate ones without), then added to
//! `c` when accumulating. Error: at most `k` roundings of the partial sums, `|err| <= k * 2^-24 * sum |a||b|` to first
//! order. Cost: 12 FMA for 8 loads in the 6x16 tile.

/// Strides of the left matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Left<'a> {
    pub data: &'a [f32],
    pub row: usize,
    pub col: usize,
}

/// The right matrix, row major.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Right<'a> {
    pub data: &'a [f32],
    pub row: usize,
}

/// `c = a b`, or `c += a b` with `accumulate`.
///
/// # Panics
/// When a buffer is shorter than its shape and strides say.
pub(crate) fn gemm(a: Left, b: Right, c: &mut [f32], ldc: usize, [m, n, k]: [usize; 3], accumulate: bool) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(c.len() >= (m - 1) * ldc + n && ldc >= n, "c is too short");
    if k > 0 {
        assert!(a.data.len() > (m - 1) * a.row + (k - 1) * a.col, "a is too short");
        assert!(b.data.len() >= (k - 1) * b.row + n, "b is too short");
    }
    #[cfg(target_arch = "x86_64")]
    if crate::isa::has_avx2() {
        // SAFETY: the features are present, and the asserts above cover every access.
        unsafe { avx2::gemm(a, b, c, ldc, [m, n, k], accumulate) };
        return;
    }
    gemm_scalar(a, b, c, ldc, [m, n, k], accumulate);
}

/// The reference.
pub(crate) fn gemm_scalar(a: Left, b: Right, c: &mut [f32], ldc: usize, [m, n, k]: [usize; 3], accumulate: bool) {
    for i in 0..m {
        for j in 0..n {
            let sum = (0..k).fold(0.0f32, |s, l| s + a.data[i * a.row + l * a.col] * b.data[l * b.row + j]);
            let out = &mut c[i * ldc + j];
            *out = if accumulate { *out + sum } else { sum };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{Left, Right};
    use std::arch::x86_64::*;

    const MR: usize = 6;
    const NR: usize = 16;

    /// # Safety
    /// AVX2 and FMA; the buffers cover their shapes.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn gemm(a: Left, b: Right, c: &mut [f32], ldc: usize, [m, n, k]: [usize; 3], accumulate: bool) {
        // Column panels narrower than NR are copied out with zeros behind them.
        let mut panel = Vec::new();
        for j in (0..n).step_by(NR) {
            let width = NR.min(n - j);
            let (bp, ldb) = if width == NR {
                (b.data[j..].as_ptr(), b.row)
            } else {
                panel.clear();
                panel.resize(k * NR, 0.0);
                for l in 0..k {
                    panel[l * NR..l * NR + width].copy_from_slice(&b.data[l * b.row + j..l * b.row + j + width]);
                }
                (panel.as_ptr(), NR)
            };
            let mut i = 0;
            while i < m {
                let rows = MR.min(m - i);
                // SAFETY: rows i .. i + rows and columns j .. j + width lie inside the buffers; bp covers k rows of
                // NR values at stride ldb (checked for the full panels by the caller's assert).
                unsafe {
                    let ap = a.data.as_ptr().add(i * a.row);
                    let cp = c.as_mut_ptr().add(i * ldc + j);
                    match rows {
                        6 => tile::<6>(ap, a.row, a.col, bp, ldb, cp, ldc, width, k, accumulate),
                        5 => tile::<5>(ap, a.row, a.col, bp, ldb, cp, ldc, width, k, accumulate),
                        4 => tile::<4>(ap, a.row, a.col, bp, ldb, cp, ldc, width, k, accumulate),
                        3 => tile::<3>(ap, a.row, a.col, bp, ldb, cp, ldc, width, k, accumulate),
                        2 => tile::<2>(ap, a.row, a.col, bp, ldb, cp, ldc, width, k, accumulate),
                        _ => tile::<1>(ap, a.row, a.col, bp, ldb, cp, ldc, width, k, accumulate),
                    }
                }
                i += rows;
            }
        }
    }

    #[target_feature(enable = "avx2,fma")]
    #[inline]
    unsafe fn tile<const R: usize>(
        a: *const f32,
        rsa: usize,
        csa: usize,
        b: *const f32,
        ldb: usize,
        c: *mut f32,
        ldc: usize,
        width: usize,
        k: usize,
        accumulate: bool,
    ) {
        // SAFETY: the caller's contract covers every pointer below.
        unsafe {
            let mut acc = [[_mm256_setzero_ps(); 2]; R];
            for l in 0..k {
                let b0 = _mm256_loadu_ps(b.add(l * ldb));
                let b1 = _mm256_loadu_ps(b.add(l * ldb + 8));
                for r in 0..R {
                    let av = _mm256_broadcast_ss(&*a.add(r * rsa + l * csa));
                    acc[r][0] = _mm256_fmadd_ps(av, b0, acc[r][0]);
                    acc[r][1] = _mm256_fmadd_ps(av, b1, acc[r][1]);
                }
            }
            for r in 0..R {
                let cr = c.add(r * ldc);
                if width == NR {
                    let (mut v0, mut v1) = (acc[r][0], acc[r][1]);
                    if accumulate {
                        v0 = _mm256_add_ps(_mm256_loadu_ps(cr), v0);
                        v1 = _mm256_add_ps(_mm256_loadu_ps(cr.add(8)), v1);
                    }
                    _mm256_storeu_ps(cr, v0);
                    _mm256_storeu_ps(cr.add(8), v1);
                } else {
                    let mut tail = [0.0f32; NR];
                    _mm256_storeu_ps(tail.as_mut_ptr(), acc[r][0]);
                    _mm256_storeu_ps(tail.as_mut_ptr().add(8), acc[r][1]);
                    for (j, v) in tail[..width].iter().enumerate() {
                        *cr.add(j) = if accumulate { *cr.add(j) + v } else { *v };
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_tail_equals_the_reference_exactly_on_integers_and_within_the_bound_on_floats() {
        let mut seed = 1u32;
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        for (m, n, k) in [(1, 1, 1), (6, 16, 9), (7, 17, 33), (13, 10, 64), (5, 32, 0), (64, 33, 144), (3, 48, 5)] {
            for transposed in [false, true] {
                for integers in [true, false] {
                    let mut fill = |len: usize| -> Vec<f32> {
                        (0..len).map(|_| if integers { (next() * 30.0).round() } else { next() }).collect()
                    };
                    let (a, b, c0) = (fill(m * k + 1), fill(k * n + n), fill(m * n));
                    let left =
                        if transposed { Left { data: &a, row: 1, col: m } } else { Left { data: &a, row: k, col: 1 } };
                    let right = Right { data: &b, row: n };
                    for accumulate in [false, true] {
                        let (mut fast, mut slow) = (c0.clone(), c0.clone());
                        gemm(left, right, &mut fast, n, [m, n, k], accumulate);
                        gemm_scalar(left, right, &mut slow, n, [m, n, k], accumulate);
                        for (i, (f, s)) in fast.iter().zip(&slow).enumerate() {
                            // Both are within k roundings of the exact sum, whose magnitude is at most k / 4 + 1/2.
                            let bound = if integers {
                                0.0
                            } else {
                                2.0 * (k + 1) as f32 * (k as f32 / 4.0 + 0.5) / 16_777_216.0
                            };
                            assert!((f - s).abs() <= bound, "{m} {n} {k} at {i}: {f} {s}");
                        }
                    }
                }
            }
        }
    }
}
