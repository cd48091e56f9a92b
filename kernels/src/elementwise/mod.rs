//! Row-wise and element-wise operations of a language model: RMSNorm, SiLU gate, rotary embedding, and the exponential they
//! share with attention. Not matrix products (see `linear`).
//!
//! - Shapes: rows `[m, n]`, row major, any m and n.
//! - Layout: plain f32 slices.
//! - Requires: nothing; paths as in `linear`.
//! - Order: RMSNorm sums squares in 16 lanes (`lane += x * x`, fused, lane = column mod 16, the last partial vector
//!   padded with zeros), folds the lanes in halves (8, 4, 2, 1), divides by n, adds epsilon, takes the square root
//!   and its reciprocal (each rounded once), then `(x * reciprocal) * weight`. SiLU: `gate / (1 + exp(-gate)) * up`.
//!   Rotary embedding: `x cos - y sin` and `y cos + x sin`, each product and sum rounded once.
//! - Cost: one pass (SiLU, rotary embedding), two passes (RMSNorm); split over rows when there are several.
//! - Error: `exp` is within 2.5e-7 relative of the exact value on [-87.3, 88.3] (tested over a grid against f64), and
//!   saturates beyond; SiLU within 6e-7 relative of f64 where `|gate| <= 87`.

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

/// `out = expression of a and b`, over `len` values in vectors; the last partial vector goes through a zero-padded buffer. A macro,
/// because a closure is not compiled with the features of the function around it, and then calls each instruction.
///
/// Safety: the path's features; the inputs readable, `out` writable for `len` values.
macro_rules! each {
    ($s:ident, [$x:expr, $y:expr], $out:expr, $len:expr, |$a:ident, $b:ident| $f:expr) => {{
        let (x, y, out, len): (*const f32, *const f32, *mut f32, usize) = ($x, $y, $out, $len);
        let full = len / LANES * LANES;
        for i in (0..full).step_by(LANES) {
            let ($a, $b) = ($s::load(x.add(i)), $s::load(y.add(i)));
            $s::store(out.add(i), $f);
        }
        if full < len {
            let mut buffer = [[0.0f32; LANES]; 2];
            std::ptr::copy_nonoverlapping(x.add(full), buffer[0].as_mut_ptr(), len - full);
            std::ptr::copy_nonoverlapping(y.add(full), buffer[1].as_mut_ptr(), len - full);
            let ($a, $b) = ($s::load(buffer[0].as_ptr()), $s::load(buffer[1].as_ptr()));
            let mut lanes = [0.0f32; LANES];
            $s::store(lanes.as_mut_ptr(), $f);
            std::ptr::copy_nonoverlapping(lanes.as_ptr(), out.add(full), len - full);
        }
    }};
}

/// `out = x / sqrt(mean(x^2) + eps) * weight`, row by row; `x` and `out` are `[m, n]` with `n = weight.len()`.
///
/// # Panics
/// When the lengths do not fit (the caller's bug).
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    rms_norm_on(Isa::detect(), x, weight, eps, out);
}

/// [`rms_norm`] of `x + delta`, and the sum in the place of `x`: the same bits as one after the other.
///
/// # Panics
/// When the lengths do not fit (the caller's bug).
pub fn add_rms_norm(x: &mut [f32], delta: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let (n, isa) = (weight.len(), Isa::detect());
    assert!(x.len() == delta.len() && x.len() == out.len(), "x, delta and out: [m, n]");
    assert!(n > 0 && x.len().is_multiple_of(n), "x: whole rows of {n}");
    let (m, sums, to) = (x.len() / n, OutPtr(x.as_mut_ptr()), OutPtr(out.as_mut_ptr()));
    split(m, ROWS, &|rows| {
        let (w, len) = (weight.as_ptr(), rows.len() * n);
        // SAFETY: rows of `x`, `delta` and `out`, which hold as many values; the parts' rows are disjoint.
        unsafe {
            let (x, delta, out) =
                (sums.get().add(rows.start * n), delta.as_ptr().add(rows.start * n), to.get().add(rows.start * n));
            dispatch!(isa, add_range(x: *mut f32, delta: *const f32, len: usize));
            for row in 0..rows.len() {
                let (x, out) = (x.add(row * n).cast_const(), out.add(row * n));
                dispatch!(isa, rms_norm_row(x: *const f32, w: *const f32, n: usize, eps: f32, out: *mut f32));
            }
        }
    });
}

/// `x += delta`, element by element.
///
/// # Panics
/// When the lengths differ (the caller's bug).
pub fn add(x: &mut [f32], delta: &[f32]) {
    let isa = Isa::detect();
    assert_eq!(x.len(), delta.len(), "x and delta: equal lengths");
    let to = OutPtr(x.as_mut_ptr());
    split(x.len(), 1 << 15, &|r| {
        let len = r.len();
        // SAFETY: ranges of equally long slices, disjoint in `x`.
        unsafe {
            let (x, delta) = (to.get().add(r.start), delta.as_ptr().add(r.start));
            dispatch!(isa, add_range(x: *mut f32, delta: *const f32, len: usize));
        }
    });
}

/// Safety: the path's features; `x` writable and `delta` readable for `len` values.
#[inline(always)]
unsafe fn add_range<S: Simd>(x: *mut f32, delta: *const f32, len: usize) {
    // SAFETY: forwarded.
    unsafe { each!(S, [x.cast_const(), delta], x, len, |a, d| S::add(a, d)) }
}

/// `x = exp((x - top) / divisor)`, element by element, where `top` is the largest: the weights of a softmax. Saturates as [`exp`], so what is
/// far below the top becomes 1.2e-38 and not 0.
pub fn exp_below(x: &mut [f32], top: f32, divisor: f32) {
    exp_below_on(Isa::detect(), x, top, divisor);
}

fn exp_below_on(isa: Isa, x: &mut [f32], top: f32, divisor: f32) {
    let (x, len) = (x.as_mut_ptr(), x.len());
    // SAFETY: the slice's own values.
    unsafe { dispatch!(isa, exp_below_range(x: *mut f32, len: usize, top: f32, divisor: f32)) }
}

/// Safety: the path's features; `x` writable for `len` values.
#[inline(always)]
unsafe fn exp_below_range<S: Simd>(x: *mut f32, len: usize, top: f32, divisor: f32) {
    // SAFETY: forwarded; the arithmetic is lane-wise.
    unsafe {
        let (top, divisor) = (S::splat(top), S::splat(divisor));
        each!(S, [x.cast_const(), x.cast_const()], x, len, |a, _b| exp::<S>(S::div(S::sub(a, top), divisor)));
    }
}

/// Rows that a thread is worth waking for.
const ROWS: usize = 8;

/// Cosines and sines of rotary embedding, `[positions, half]` each.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// Cosines.
    pub cos: &'a [f32],
    /// Sines.
    pub sin: &'a [f32],
    /// Pairs of a head, half its width.
    pub half: usize,
}

/// Rotates the heads of `x [m, heads, 2 half]` in place, row `t` at position `positions[t]`; value `i` of a head is paired with value
/// `half + i` (the convention of Hugging Face).
///
/// # Panics
/// When a length or a position does not fit (the caller's bug).
pub fn rotate(x: &mut [f32], positions: &[usize], by: Rotation) {
    rotate_on(Isa::detect(), x, positions, by);
}

fn rotate_on(isa: Isa, x: &mut [f32], positions: &[usize], by: Rotation) {
    let (m, half) = (positions.len(), by.half);
    assert!(half > 0 && m > 0 && x.len().is_multiple_of(m * 2 * half), "x: [m, heads, 2 half]");
    let known = by.cos.len().min(by.sin.len()) / half;
    assert!(positions.iter().all(|&p| p < known), "positions: below {known}");
    let (width, to) = (x.len() / m, OutPtr(x.as_mut_ptr()));
    split(m, ROWS, &|rows| {
        for t in rows {
            let at = positions[t] * half;
            for head in (0..width).step_by(2 * half) {
                // SAFETY: one head of row `t`, which no other part has, and the angles of its position.
                unsafe {
                    let (x, cos, sin) =
                        (to.get().add(t * width + head), by.cos.as_ptr().add(at), by.sin.as_ptr().add(at));
                    dispatch!(isa, rotate_head(x: *mut f32, cos: *const f32, sin: *const f32, half: usize));
                }
            }
        }
    });
}

/// Safety: the path's features; `x` writable for `2 half` values, `cos` and `sin` readable for `half`.
#[inline(always)]
unsafe fn rotate_head<S: Simd>(x: *mut f32, cos: *const f32, sin: *const f32, half: usize) {
    let full = half / LANES * LANES;
    // SAFETY: the caller's ranges.
    unsafe {
        for i in (0..full).step_by(LANES) {
            let (a, b, c, s) = (S::load(x.add(i)), S::load(x.add(half + i)), S::load(cos.add(i)), S::load(sin.add(i)));
            S::store(x.add(i), S::sub(S::mul(a, c), S::mul(b, s)));
            S::store(x.add(half + i), S::add(S::mul(b, c), S::mul(a, s)));
        }
        for i in full..half {
            let (a, b, c, s) = (*x.add(i), *x.add(half + i), *cos.add(i), *sin.add(i));
            *x.add(i) = a * c - b * s;
            *x.add(half + i) = b * c + a * s;
        }
    }
}

/// Runs `body(i, row)` on the rows of `x`, `width` values each, split over the threads where there are many.
///
/// # Panics
/// When `width` does not divide the length (the caller's bug).
pub fn for_rows(x: &mut [f32], width: usize, body: impl Fn(usize, &mut [f32]) + Sync) {
    assert!(width > 0 && x.len().is_multiple_of(width), "x: whole rows of {width}");
    let (m, to) = (x.len() / width, OutPtr(x.as_mut_ptr()));
    split(m, ROWS, &|rows| {
        for i in rows {
            // SAFETY: row `i` of `x`, which no other part has.
            body(i, unsafe { std::slice::from_raw_parts_mut(to.get().add(i * width), width) });
        }
    });
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
        each!(S, [x, w], out, n, |v, w| S::mul(S::mul(v, r), w));
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
        each!(S, [gate, up], out, len, |g, u| {
            let e = exp::<S>(S::sub(S::splat(0.0), g));
            S::mul(S::div(g, S::add(S::splat(1.0), e)), u)
        });
    }
}

// Behind the macro, which it uses.
#[cfg(test)]
mod tests;
