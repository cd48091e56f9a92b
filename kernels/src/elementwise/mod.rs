//! Row-wise and element-wise operations of a language model: RMSNorm, SiLU gate, and the exponential they share with
//! attention. Not matrix products (see `linear`).
//!
//! - Shapes: rows `[m, n]`, row major, any m and n.
//! - Layout: plain f32 slices.
//! - Requires: nothing; paths as in `linear`.
//! - Order: RMSNorm sums squares in 16 lanes (`lane += x * x`, fused, lane = column mod 16, the last partial vector
//!   padded with zeros), folds the lanes in halves (8, 4, 2, 1), divides by n, adds epsilon, takes the square root
//!   and its reciprocal (each rounded once), then `(x * reciprocal) * weight`. SiLU: `gate / (1 + exp(-gate)) * up`.
//! - Cost: one pass (SiLU), two passes (RMSNorm); split over rows on the rayon pool when there are several.
//! - Error: `exp` is within 2.5e-7 relative of the exact value on [-87.3, 88.3] (tested over a grid against f64), and
//!   saturates beyond; SiLU within 6e-7 relative of f64 where `|gate| <= 87`.

#[cfg(test)]
mod tests;

use crate::Isa;
use crate::parallel::{OutPtr, split};
use crate::simd::{LANES, Simd, dispatch, sum};

/// `exp(x)`, saturating at exp(-87.3) and exp(88.3). Cephes' `expf`: `x = n ln2 + r`, a polynomial in r, times 2^n.
#[inline(always)]
pub(crate) unsafe fn exp<S: Simd>(x: S::V) -> S::V {
    // SAFETY: lane-wise arithmetic on the caller's path.
    unsafe {
        let x = S::max(S::min(x, S::splat(88.3)), S::splat(-87.3));
        // Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
        let shift = S::splat(12_582_912.0);
        let n = S::sub(S::fma(x, S::splat(std::f32::consts::LOG2_E), shift), shift);
        // ln2 in two parts, the first exact in products with |n| < 2^9.
        let r = S::fma(n, S::splat(-355.0 / 512.0), x);
        let r = S::fma(n, S::splat(2.121_944_4e-4), r);
        let mut y = S::splat(1.987_569_1e-4);
        for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
            y = S::fma(y, r, S::splat(c));
        }
        let y = S::add(S::fma(y, S::mul(r, r), r), S::splat(1.0));
        S::mul(y, S::pow2(n))
    }
}

/// Runs `body(first, len)` over `len` values in vectors; the last partial vector goes through a zero-padded buffer.
#[inline(always)]
unsafe fn each<S: Simd>(inputs: [*const f32; 2], out: *mut f32, len: usize, f: impl Fn(S::V, S::V) -> S::V) {
    // SAFETY: the inputs are readable and `out` is writable for `len` values.
    unsafe {
        let full = len / LANES * LANES;
        for i in (0..full).step_by(LANES) {
            S::store(out.add(i), f(S::load(inputs[0].add(i)), S::load(inputs[1].add(i))));
        }
        if full < len {
            let mut buffer = [[0.0f32; LANES]; 2];
            for (b, input) in buffer.iter_mut().zip(inputs) {
                std::ptr::copy_nonoverlapping(input.add(full), b.as_mut_ptr(), len - full);
            }
            let mut lanes = [0.0f32; LANES];
            S::store(lanes.as_mut_ptr(), f(S::load(buffer[0].as_ptr()), S::load(buffer[1].as_ptr())));
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), out.add(full), len - full);
        }
    }
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`, row by row; `x` and `out` are `[m, n]` with `n = weight.len()`.
///
/// # Panics
/// When the lengths do not fit (the caller's bug).
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    rms_norm_on(Isa::detect(), x, weight, eps, out);
}

fn rms_norm_on(isa: Isa, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let n = weight.len();
    assert_eq!(x.len(), out.len(), "x and out: [m, n]");
    assert!(n > 0 && x.len().is_multiple_of(n), "x: whole rows of {n}");
    let (m, to) = (x.len() / n, OutPtr(out.as_mut_ptr()));
    split(m, 1, &|rows| {
        for row in rows {
            let (x, w, out) = (&x[row * n..(row + 1) * n], weight.as_ptr(), to.get());
            // SAFETY: `x` and `weight` hold n values, the row of `out` too; rows are disjoint.
            unsafe {
                let out = out.add(row * n);
                let x = x.as_ptr();
                dispatch!(isa, rms_norm_row(x: *const f32, w: *const f32, n: usize, eps: f32, out: *mut f32));
            }
        }
    });
}

/// Safety: the path's features; `x` and `w` readable, `out` writable for `n` values.
#[inline(always)]
unsafe fn rms_norm_row<S: Simd>(x: *const f32, w: *const f32, n: usize, eps: f32, out: *mut f32) {
    // SAFETY: forwarded; the tail of the sum goes through a zero-padded buffer.
    unsafe {
        let full = n / LANES * LANES;
        let mut squares = S::splat(0.0);
        for i in (0..full).step_by(LANES) {
            let v = S::load(x.add(i));
            squares = S::fma(v, v, squares);
        }
        if full < n {
            let mut tail = [0.0f32; LANES];
            std::ptr::copy_nonoverlapping(x.add(full), tail.as_mut_ptr(), n - full);
            let v = S::load(tail.as_ptr());
            squares = S::fma(v, v, squares);
        }
        let r = S::splat(1.0 / (sum::<S>(squares) / n as f32 + eps).sqrt());
        each::<S>([x, w], out, n, |v, w| S::mul(S::mul(v, r), w));
    }
}

/// `out = silu(gate) * up` (SwiGLU's middle), element by element.
///
/// # Panics
/// When the lengths differ (the caller's bug).
pub fn silu_mul(gate: &[f32], up: &[f32], out: &mut [f32]) {
    silu_mul_on(Isa::detect(), gate, up, out);
}

fn silu_mul_on(isa: Isa, gate: &[f32], up: &[f32], out: &mut [f32]) {
    assert!(gate.len() == up.len() && up.len() == out.len(), "gate, up and out: equal lengths");
    let to = OutPtr(out.as_mut_ptr());
    // A thread is worth waking for some thousand exponentials; a lane's result does not depend on the cut.
    split(gate.len(), 8192, &|r| {
        let (len, to) = (r.len(), to.get());
        // SAFETY: ranges of equally long slices, disjoint in `out`.
        unsafe {
            let (gate, up, out) = (gate.as_ptr().add(r.start), up.as_ptr().add(r.start), to.add(r.start));
            dispatch!(isa, silu_mul_range(gate: *const f32, up: *const f32, len: usize, out: *mut f32));
        }
    });
}

/// Safety: the path's features; inputs readable, `out` writable for `len` values.
#[inline(always)]
unsafe fn silu_mul_range<S: Simd>(gate: *const f32, up: *const f32, len: usize, out: *mut f32) {
    // SAFETY: forwarded.
    unsafe {
        each::<S>([gate, up], out, len, |g, u| {
            let e = exp::<S>(S::sub(S::splat(0.0), g));
            S::mul(S::div(g, S::add(S::splat(1.0), e)), u)
        });
    }
}
