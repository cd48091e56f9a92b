//! Values to the blocks of 32 whose scale has a closed form: Q4_0, Q4_1, Q8_0, in the arithmetic of ggml's
//! `quantize_row_*_ref`. Not the K-quants, whose scales are searched (see `q4_k.rs`).
//!
//! The codes are chosen against the scale *before* it is stored as f16, unlike compressed-tensors' grids; that is how the
//! format is written everywhere. The reciprocal of a scale below 2^-128 is infinite; such a block decodes to zeros
//! whatever its codes are, and they become 0 where the product is not finite, as on x86.

use super::put_f16;

/// f16 d, 16 bytes of nibbles. `d` is the value of largest magnitude (the first of equals), sign and all, over -8, so that
/// this value gets code 0 exactly; the code is `x / d + 8.5`, truncated, at most 15.
pub(super) fn q4_0(x: &[f32], bytes: &mut [u8], inside: &mut [u8]) -> Result<(), f32> {
    let widest = x.iter().fold(0.0f32, |widest, &v| if v.abs() > widest.abs() { v } else { widest });
    let d = widest / -8.0;
    put_f16(bytes, 0, d)?;
    let id = reciprocal(d);
    nibbles(x, &mut bytes[2..], inside, |v| v * id + 8.5);
    Ok(())
}

/// f16 d, f16 m, 16 bytes of nibbles. `m` is the smallest value, `d` a fifteenth of the range; the code is
/// `(x - m) / d + 0.5`, truncated, at most 15.
pub(super) fn q4_1(x: &[f32], bytes: &mut [u8], inside: &mut [u8]) -> Result<(), f32> {
    let (min, max) =
        x.iter().fold((x[0], x[0]), |(lo, hi), &v| (if v < lo { v } else { lo }, if v > hi { v } else { hi }));
    let d = (max - min) / 15.0;
    put_f16(bytes, 0, d)?;
    put_f16(bytes, 2, min)?;
    let id = reciprocal(d);
    nibbles(x, &mut bytes[4..], inside, |v| (v - min) * id + 0.5);
    Ok(())
}

/// f16 d, 32 signed bytes. `d` is the largest magnitude over 127; the code is `x / d`, rounded half away from zero.
pub(super) fn q8_0(x: &[f32], bytes: &mut [u8], inside: &mut [u8]) -> Result<(), f32> {
    let d = x.iter().fold(0.0f32, |a, v| a.max(v.abs())) / 127.0;
    put_f16(bytes, 0, d)?;
    let id = reciprocal(d);
    for (byte, &v) in bytes[2..].iter_mut().zip(x) {
        let code = (v * id).round();
        *byte = if code.is_finite() { code as i8 as u8 } else { 0 };
    }
    // The largest magnitude becomes 127 and no other exceeds it: nothing clips.
    inside.fill(1);
    Ok(())
}

fn reciprocal(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// Byte j holds the codes of values j (low) and j + 16 (high). `place` is the code before truncation, not negative.
fn nibbles(x: &[f32], bytes: &mut [u8], inside: &mut [u8], place: impl Fn(f32) -> f32) {
    let code = |j: usize, inside: &mut [u8]| {
        let c = place(x[j]);
        inside[j] = u8::from(c < 16.0 || !c.is_finite());
        if c.is_finite() { (c as u8).min(15) } else { 0 }
    };
    for j in 0..16 {
        bytes[j] = code(j, inside) | code(j + 16, inside) << 4;
    }
}
