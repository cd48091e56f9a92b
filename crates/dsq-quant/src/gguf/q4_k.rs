//! Values to Q4_K and Q5_K super-blocks, as ggml's `quantize_row_q4_K_ref` and `quantize_row_q5_K_ref` make them without an
//! importance matrix. Not the other K-quants.
//!
//! Each of the 8 sub-blocks of 32 values is fitted by `scale * code - min` (codes 0..15 or 0..31, min not negative) with weighted
//! least squares; the 8 scales and the 8 minima are then stored as 6-bit multiples of two f16 numbers, and the codes are
//! chosen again against what was stored. Every sum runs from the first value to the last in f32.

use super::{SUPER_BLOCK, f16_at, nearest, put_f16};

/// Values of a sub-block, and sub-blocks of a super-block.
const LEN: usize = 32;
const SUBS: usize = SUPER_BLOCK / LEN;
/// The largest 6-bit scale.
const TOP_SCALE: f32 = 63.0;

/// What the two differ in.
struct Search {
    /// The largest code.
    top: i32,
    /// Ranges tried after the first: the step is range / (top + t) for t = first, first + 0.1, ...
    first: f32,
    /// How many.
    trials: usize,
}

const Q4: Search = Search { top: 15, first: -1.0, trials: 21 };
const Q5: Search = Search { top: 31, first: -0.5, trials: 16 };

/// f16 d, f16 dmin, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles.
pub(super) fn encode(x: &[f32], bytes: &mut [u8], inside: &mut [u8]) -> Result<(), f32> {
    let codes = choose_codes(&Q4, x, bytes, inside)?;
    store_codes(&codes, bytes);
    Ok(())
}

/// As Q4_K, with 32 bytes for the fifth bits (bit b of byte i for value i of sub-block b) before the nibbles.
pub(super) fn encode_q5(x: &[f32], bytes: &mut [u8], inside: &mut [u8]) -> Result<(), f32> {
    let codes = choose_codes(&Q5, x, bytes, inside)?;
    for (i, code) in codes.iter().enumerate() {
        bytes[16 + i % LEN] |= (code >> 4) << (i / LEN);
    }
    store_codes(&codes.map(|c| c & 15), &mut bytes[32..]);
    Ok(())
}

/// Stores the scales and gives the codes, chosen against what was stored.
fn choose_codes(q: &Search, x: &[f32], bytes: &mut [u8], inside: &mut [u8]) -> Result<[u8; SUPER_BLOCK], f32> {
    let mut codes = [0u8; SUPER_BLOCK];
    let (mut scales, mut mins) = ([0.0f32; SUBS], [0.0f32; SUBS]);
    for (j, (x, codes)) in x.chunks_exact(LEN).zip(codes.chunks_exact_mut(LEN)).enumerate() {
        (scales[j], mins[j]) = fit(q, x, codes);
    }
    let (steps, mins) = store_scales(&scales, &mins, bytes)?;
    inside.fill(1);
    for j in 0..SUBS {
        if steps[j] == 0.0 {
            // The value is -min for any code; those of the fit stay.
            continue;
        }
        for i in LEN * j..LEN * (j + 1) {
            let code = nearest((x[i] + mins[j]) / steps[j]);
            codes[i] = code.clamp(0, q.top) as u8;
            inside[i] = u8::from((0..=q.top).contains(&code));
        }
    }
    Ok(codes)
}

/// Stores the fitted scales and minima of a super-block in the first 16 of its 144 bytes. Gives the step and the minimum of
/// each sub-block that a decoder will see, against which the codes are to be chosen. For searches that walk faster than
/// [`GgufGrid::quantize`](super::GgufGrid::quantize).
///
/// # Errors
/// The scale or minimum that does not fit f16.
pub fn store_scales(
    scales: &[f32; SUBS],
    mins: &[f32; SUBS],
    bytes: &mut [u8],
) -> Result<([f32; SUBS], [f32; SUBS]), f32> {
    let largest = |v: &[f32; SUBS]| v.iter().fold(0.0f32, |a, &b| if b > a { b } else { a });
    let (max_scale, max_min) = (largest(scales), largest(mins));
    put_f16(bytes, 0, max_scale / TOP_SCALE)?;
    put_f16(bytes, 2, max_min / TOP_SCALE)?;
    let inverse = |max: f32| if max > 0.0 { TOP_SCALE / max } else { 0.0 };
    let (inverse_scale, inverse_min) = (inverse(max_scale), inverse(max_min));
    let (d, dmin) = (f16_at(bytes, 0), f16_at(bytes, 2));
    let stored = &mut bytes[4..16];
    stored.fill(0);
    let (mut steps, mut offsets) = ([0.0; SUBS], [0.0; SUBS]);
    for j in 0..SUBS {
        // A fitted scale below zero wraps around to a large byte, as in the original.
        let six = |v: f32| (nearest(v) as u8).min(63);
        let (scale, min) = (six(inverse_scale * scales[j]), six(inverse_min * mins[j]));
        put_scale_min(stored, j, scale, min);
        (steps[j], offsets[j]) = (d * f32::from(scale), dmin * f32::from(min));
    }
    Ok((steps, offsets))
}

/// Stores the 256 codes (0..15) of a super-block in its bytes from 16 on.
pub fn store_codes(codes: &[u8; SUPER_BLOCK], bytes: &mut [u8]) {
    for (bytes, codes) in bytes[16..].chunks_exact_mut(LEN).zip(codes.chunks_exact(2 * LEN)) {
        for (l, byte) in bytes.iter_mut().enumerate() {
            *byte = codes[l] | codes[l + LEN] << 4;
        }
    }
}

/// The 6-bit scale and minimum of sub-block `j` in the 12 bytes (zeroed before): the inverse of `decode::scale_min`.
pub(super) fn put_scale_min(s: &mut [u8], j: usize, scale: u8, min: u8) {
    if j < 4 {
        s[j] |= scale;
        s[j + 4] |= min;
    } else {
        s[j + 4] |= (scale & 15) | (min & 15) << 4;
        s[j - 4] |= (scale >> 4) << 6;
        s[j] |= (min >> 4) << 6;
    }
}

/// Codes, scale and min of `x ~ scale * code - min` with little squared error, weighted by `rms(x) + |x|`.
///
/// The first candidate spreads the codes over the whole range. Each trial spreads them over a range of another length,
/// then solves for the best scale and min of those codes (two unknowns, so a 2x2 system), and is kept if its error is the
/// least so far. A trial measures from the minimum that was kept last, which is what ggml does.
fn fit(q: &Search, x: &[f32], codes: &mut [u8]) -> (f32, f32) {
    let top = q.top as f32;
    let squares = x.iter().fold(0.0f32, |sum, v| sum + v * v);
    let rms = (squares / LEN as f32).sqrt();
    let weights: [f32; LEN] = std::array::from_fn(|i| rms + x[i].abs());
    let (mut min, mut max) = (x[0], x[0]);
    let (mut sum_w, mut sum_x) = (0.0f32, 0.0f32);
    for (&v, &w) in x.iter().zip(&weights) {
        min = if v < min { v } else { min };
        max = if v > max { v } else { max };
        sum_w += w;
        sum_x += w * v;
    }
    if min > 0.0 {
        min = 0.0;
    }
    if max == min {
        codes.fill(0);
        return (0.0, -min);
    }
    let choose = |inverse: f32, min: f32, codes: &mut [u8]| {
        for (code, &v) in codes.iter_mut().zip(x) {
            *code = nearest(inverse * (v - min)).clamp(0, q.top) as u8;
        }
    };
    let error = |scale: f32, min: f32, codes: &[u8]| {
        let terms = x.iter().zip(&weights).zip(codes);
        terms.fold(0.0f32, |sum, ((&v, &w), &code)| {
            let d = scale * f32::from(code) + min - v;
            sum + w * (d * d)
        })
    };
    let inverse = top / (max - min);
    let mut scale = 1.0 / inverse;
    choose(inverse, min, codes);
    let mut least = error(scale, min, codes);
    let mut trial = [0u8; LEN];
    for t in 0..q.trials {
        choose((q.first + 0.1 * t as f32 + top) / (max - min), min, &mut trial);
        let (mut sum_l, mut sum_l2, mut sum_xl) = (0.0f32, 0.0f32, 0.0f32);
        for ((&code, &w), &v) in trial.iter().zip(&weights).zip(x) {
            let l = f32::from(code);
            sum_l += w * l;
            sum_l2 += w * l * l;
            sum_xl += w * l * v;
        }
        let determinant = sum_w * sum_l2 - sum_l * sum_l;
        if determinant > 0.0 {
            let mut trial_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
            let mut trial_min = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
            if trial_min > 0.0 {
                trial_min = 0.0;
                trial_scale = sum_xl / sum_l2;
            }
            let e = error(trial_scale, trial_min, &trial);
            if e < least {
                codes.copy_from_slice(&trial);
                (least, scale, min) = (e, trial_scale, trial_min);
            }
        }
    }
    (scale, -min)
}
