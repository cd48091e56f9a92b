//! Values to the blocks of 32 whose scale has a closed form: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, in the arithmetic of ggml's
//! `quantize_row_*_ref`. Not the K-quants, whose scales are searched (see `q4_k.rs`, `q6_k.rs`).
//!
//! The codes are chosen against the scale *before* it is stored as f16, unlike compressed-tensors' grids; that is how the
//! format is written everywhere. The reciprocal of a scale below 2^-128 is infinite; such a block decodes to zeros
//! whatever its codes are, and they become 0 where the product is not finite, as on x86.

use super::put_f16;

/// f16 d, 16 bytes of nibbles. `d` is the value of largest magnitude (the first of equals), sign and all, over -8, so that
/// this value gets code 0 exactly; the code is `x / d + 8.5`, truncated, at most 15.
pub(super) fn q4_0(x: &[f32], bytes: &mut [u8], inside: &mut [u8]) -> Result<(), f32> {
    let d = widest(x) / -8.0;
    put_f16(bytes, 0, d)?;
    let id = reciprocal(d);
    let codes = codes(x, inside, 15, |v| v * id + 8.5);
    put_nibbles(&mut bytes[2..], &codes);
    Ok(())
}

/// f16 d, 32 high bits (bit j for value j), 16 bytes of nibbles: as Q4_0 with -16, and `x / d + 16.5`, at most 31.
pub(super) fn q5_0(x: &[f32], bytes: &mut [u8], inside: &mut [u8]) -> Result<(), f32> {
    let d = widest(x) / -16.0;
    put_f16(bytes, 0, d)?;
    let id = reciprocal(d);
    let codes = codes(x, inside, 31, |v| v * id + 16.5);
    put_high_bits(&mut bytes[2..6], &codes);
    put_nibbles(&mut bytes[6..], &codes);
    Ok(())
}

/// f16 d, f16 m, 16 bytes of nibbles. `m` is the smallest value, `d` a fifteenth of the range; the code is
/// `(x - m) / d + 0.5`, truncated, at most 15.
pub(super) fn q4_1(x: &[f32], bytes: &mut [u8], inside: &mut [u8]) -> Result<(), f32> {
    let (min, d) = lowest_and_step(x, 15.0);
    put_f16(bytes, 0, d)?;
    put_f16(bytes, 2, min)?;
    let id = reciprocal(d);
    let codes = codes(x, inside, 15, |v| (v - min) * id + 0.5);
    put_nibbles(&mut bytes[4..], &codes);
    Ok(())
}

/// f16 d, f16 m, 32 high bits, 16 bytes of nibbles: as Q4_1 with a 31st of the range.
pub(super) fn q5_1(x: &[f32], bytes: &mut [u8], inside: &mut [u8]) -> Result<(), f32> {
    let (min, d) = lowest_and_step(x, 31.0);
    put_f16(bytes, 0, d)?;
    put_f16(bytes, 2, min)?;
    let id = reciprocal(d);
    let codes = codes(x, inside, 31, |v| (v - min) * id + 0.5);
    put_high_bits(&mut bytes[4..8], &codes);
    put_nibbles(&mut bytes[8..], &codes);
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

/// The smallest value, and the range over `top`.
fn lowest_and_step(x: &[f32], top: f32) -> (f32, f32) {
    let (min, max) =
        x.iter().fold((x[0], x[0]), |(lo, hi), &v| (if v < lo { v } else { lo }, if v > hi { v } else { hi }));
    (min, (max - min) / top)
}

/// The fifth bit of each code.
fn put_high_bits(bytes: &mut [u8], codes: &[u8; 32]) {
    let high = codes.iter().enumerate().fold(0u32, |bits, (j, &c)| bits | u32::from(c >> 4) << j);
    bytes.copy_from_slice(&high.to_le_bytes());
}

fn reciprocal(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The value of largest magnitude, the first of equals; 0 of zeros.
fn widest(x: &[f32]) -> f32 {
    x.iter().fold(0.0f32, |widest, &v| if v.abs() > widest.abs() { v } else { widest })
}

/// The codes of 32 values: `place`, which is not negative, truncated, at most `top`.
fn codes(x: &[f32], inside: &mut [u8], top: u8, place: impl Fn(f32) -> f32) -> [u8; 32] {
    let mut codes = [0; 32];
    for ((code, inside), &v) in codes.iter_mut().zip(inside).zip(x) {
        let c = place(v);
        *inside = u8::from(c < f32::from(top) + 1.0 || !c.is_finite());
        *code = if c.is_finite() { (c as u8).min(top) } else { 0 };
    }
    codes
}

/// Byte j holds the low four bits of codes j (low) and j + 16 (high).
fn put_nibbles(bytes: &mut [u8], codes: &[u8; 32]) {
    for (j, byte) in bytes.iter_mut().enumerate() {
        *byte = (codes[j] & 15) | (codes[j + 16] & 15) << 4;
    }
}
