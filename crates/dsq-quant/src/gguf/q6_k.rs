//! Values to Q6_K super-blocks, as ggml's `quantize_row_q6_K_ref` makes them without an importance matrix. Not the other
//! K-quants.
//!
//! Each run of 16 values is fitted by `scale * code` (codes -32..31) with least squares weighted by `x^2`; the 16 scales
//! are then stored as multiples -128..127 of one f16 number, and the codes are chosen again against what was stored.
//! Every sum runs from the first value to the last in f32.

use super::{SUPER_BLOCK, f16_at, nearest, put_f16};

/// Values of a run, and runs of a super-block.
const LEN: usize = 16;
const RUNS: usize = SUPER_BLOCK / LEN;
/// Codes are -HALF..HALF.
const HALF: i32 = 32;
/// Magnitudes below this count as zero.
const NOTHING: f32 = 1e-15;

/// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales, f16 d.
pub(super) fn encode(x: &[f32], bytes: &mut [u8], inside: &mut [u8]) -> Result<(), f32> {
    let mut codes = [0u8; SUPER_BLOCK];
    let mut scales = [0.0f32; RUNS];
    for ((x, codes), scale) in x.chunks_exact(LEN).zip(codes.chunks_exact_mut(LEN)).zip(&mut scales) {
        *scale = fit(x, codes);
    }
    inside.fill(1);
    let Some(steps) = store_scales(&scales, bytes)? else {
        // The bytes stay zero, and so do the values.
        return Ok(());
    };
    for run in 0..RUNS {
        if steps[run] == 0.0 {
            // The value is 0 for any code; those of the fit stay.
            continue;
        }
        for i in LEN * run..LEN * (run + 1) {
            let code = nearest(x[i] / steps[run]);
            codes[i] = (code.clamp(-HALF, HALF - 1) + HALF) as u8;
            inside[i] = u8::from((-HALF..HALF).contains(&code));
        }
    }
    store_codes(&codes, bytes);
    Ok(())
}

/// Stores the fitted scales of a super-block in the last 18 of its 210 bytes. Gives the step of each run that a decoder will see,
/// against which the codes are to be chosen; `None`, and nothing stored, where all values count as zero: such a block is zero bytes
/// throughout. For searches that walk faster than [`GgufGrid::quantize`](super::GgufGrid::quantize).
///
/// # Errors
/// The scale that does not fit f16.
pub fn store_scales(scales: &[f32; RUNS], bytes: &mut [u8]) -> Result<Option<[f32; RUNS]>, f32> {
    if scales.iter().any(|s| !s.is_finite()) {
        // The sums of the fit overflow f32 long after a scale does f16; ggml would lose the run without a word.
        return Err(f32::INFINITY);
    }
    let widest = scales.iter().fold(0.0f32, |a, &b| if b.abs() > a.abs() { b } else { a });
    if widest.abs() < NOTHING {
        return Ok(None);
    }
    let inverse = -128.0 / widest;
    put_f16(bytes, 208, 1.0 / inverse)?;
    let d = f16_at(bytes, 208);
    let mut steps = [0.0; RUNS];
    for run in 0..RUNS {
        let stored = nearest(inverse * scales[run]).min(127) as i8;
        bytes[192 + run] = stored as u8;
        steps[run] = d * f32::from(stored);
    }
    Ok(Some(steps))
}

/// Stores the 256 codes (0..63, which is the code plus 32) of a super-block in the first 192 of its bytes.
pub fn store_codes(codes: &[u8; SUPER_BLOCK], bytes: &mut [u8]) {
    for half in 0..2 {
        let codes = &codes[128 * half..];
        for l in 0..32 {
            let q = [codes[l], codes[l + 32], codes[l + 64], codes[l + 96]];
            bytes[64 * half + l] = (q[0] & 15) | (q[2] & 15) << 4;
            bytes[64 * half + l + 32] = (q[1] & 15) | (q[3] & 15) << 4;
            bytes[128 + 32 * half + l] = q[0] >> 4 | (q[1] >> 4) << 2 | (q[2] >> 4) << 4 | (q[3] >> 4) << 6;
        }
    }
}

/// Codes (plus [`HALF`]) and scale of `x ~ scale * code` with little squared error, weighted by `x^2`.
///
/// Each of 19 trials gives the value of largest magnitude (the first of equals) the place `-(32 + t)`, for t = 0, then -0.9,
/// -0.8, ... 0.9 without 0, rounds the others to match, and takes the best scale of those codes; the trial with the
/// largest share of the energy is kept, the first of equals.
fn fit(x: &[f32], codes: &mut [u8]) -> f32 {
    let widest = x.iter().fold(0.0f32, |a, &b| if b.abs() > a.abs() { b } else { a });
    if widest.abs() < NOTHING {
        codes.fill(0);
        return 0.0;
    }
    let code = |inverse: f32, v: f32| nearest(inverse * v).clamp(-HALF, HALF - 1);
    let choose = |inverse: f32, codes: &mut [u8]| {
        for (c, &v) in codes.iter_mut().zip(x) {
            *c = (code(inverse, v) + HALF) as u8;
        }
    };
    let sums = |inverse: f32| {
        x.iter().fold((0.0f32, 0.0f32), |(xl, l2), &v| {
            let (w, l) = (v * v, code(inverse, v) as f32);
            (xl + w * v * l, l2 + w * l * l)
        })
    };
    let first = -HALF as f32 / widest;
    choose(first, codes);
    let (xl, l2) = sums(first);
    let mut scale = if l2 != 0.0 { xl / l2 } else { 0.0 };
    let mut best = scale * xl;
    for t in (-9..=9).filter(|&t| t != 0) {
        let inverse = -(HALF as f32 + 0.1 * t as f32) / widest;
        let (xl, l2) = sums(inverse);
        if l2 > 0.0 && xl * xl > best * l2 {
            choose(inverse, codes);
            scale = xl / l2;
            best = scale * xl;
        }
    }
    scale
}
