//! Blocks to values, as the decoders of ggml (`ggml-quants.c`) define them. Not the walk over blocks (see `mod.rs`).

use super::f16_at;

/// f16 d, 16 bytes of nibbles: low ones are values 0..16, high ones 16..32. Value (q - 8) * d.
pub(super) fn q4_0(b: &[u8], x: &mut [f32]) {
    let d = f16_at(b, 0);
    for (j, byte) in b[2..18].iter().enumerate() {
        x[j] = f32::from((byte & 15) as i8 - 8) * d;
        x[j + 16] = f32::from((byte >> 4) as i8 - 8) * d;
    }
}

/// f16 d, f16 m, nibbles as in Q4_0. Value q * d + m.
pub(super) fn q4_1(b: &[u8], x: &mut [f32]) {
    let (d, m) = (f16_at(b, 0), f16_at(b, 2));
    for (j, byte) in b[4..20].iter().enumerate() {
        x[j] = f32::from(byte & 15) * d + m;
        x[j + 16] = f32::from(byte >> 4) * d + m;
    }
}

/// The 32 fifth bits of Q5_0 and Q5_1, bit j for value j.
fn high_bits(b: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

/// f16 d, 32 high bits, nibbles as in Q4_0. Value (q - 16) * d.
pub(super) fn q5_0(b: &[u8], x: &mut [f32]) {
    let (d, high) = (f16_at(b, 0), high_bits(b, 2));
    for (j, byte) in b[6..22].iter().enumerate() {
        let low = (byte & 15) | (((high >> j) & 1) as u8) << 4;
        let upper = (byte >> 4) | (((high >> (j + 16)) & 1) as u8) << 4;
        x[j] = f32::from(low as i8 - 16) * d;
        x[j + 16] = f32::from(upper as i8 - 16) * d;
    }
}

/// f16 d, f16 m, 32 high bits, nibbles as in Q4_0. Value q * d + m.
pub(super) fn q5_1(b: &[u8], x: &mut [f32]) {
    let (d, m, high) = (f16_at(b, 0), f16_at(b, 2), high_bits(b, 4));
    for (j, byte) in b[8..24].iter().enumerate() {
        let low = (byte & 15) | (((high >> j) & 1) as u8) << 4;
        let upper = (byte >> 4) | (((high >> (j + 16)) & 1) as u8) << 4;
        x[j] = f32::from(low) * d + m;
        x[j + 16] = f32::from(upper) * d + m;
    }
}

/// f16 d, 32 signed bytes. Value q * d.
pub(super) fn q8_0(b: &[u8], x: &mut [f32]) {
    let d = f16_at(b, 0);
    for (value, byte) in x.iter_mut().zip(&b[2..34]) {
        *value = f32::from(*byte as i8) * d;
    }
}

/// The 6-bit scale and minimum of sub-block `j` (0..8) in the 12 bytes that Q4_K and Q5_K share.
pub(super) fn scale_min(s: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        ((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4))
    }
}

/// f16 d, f16 dmin, 12 scale bytes, 128 bytes of nibbles: 32 bytes hold the 64 values of two sub-blocks, low nibbles first.
/// Value d * scale * q - dmin * min.
pub(super) fn q4_k(b: &[u8], x: &mut [f32]) {
    let (d, dmin, scales) = (f16_at(b, 0), f16_at(b, 2), &b[4..16]);
    for (pair, (bytes, values)) in b[16..144].chunks_exact(32).zip(x.chunks_exact_mut(64)).enumerate() {
        for half in 0..2 {
            let (scale, min) = scale_min(scales, 2 * pair + half);
            let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
            for (value, byte) in values[32 * half..32 * half + 32].iter_mut().zip(bytes) {
                *value = scale * f32::from((byte >> (4 * half)) & 15) - min;
            }
        }
    }
}

/// As Q4_K with 32 more bytes before the nibbles: bit `i` of byte `l` is the fifth bit of value `l` of sub-block `i`.
pub(super) fn q5_k(b: &[u8], x: &mut [f32]) {
    let (d, dmin, scales, high) = (f16_at(b, 0), f16_at(b, 2), &b[4..16], &b[16..48]);
    for (pair, (bytes, values)) in b[48..176].chunks_exact(32).zip(x.chunks_exact_mut(64)).enumerate() {
        for half in 0..2 {
            let block = 2 * pair + half;
            let (scale, min) = scale_min(scales, block);
            let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
            for (l, value) in values[32 * half..32 * half + 32].iter_mut().enumerate() {
                let q = ((bytes[l] >> (4 * half)) & 15) | (((high[l] >> block) & 1) << 4);
                *value = scale * f32::from(q) - min;
            }
        }
    }
}

/// 128 bytes of low nibbles, 64 bytes of high bit pairs, 16 signed scales (one per 16 values), f16 d. Value d * scale * (q - 32).
/// Each half of the block (128 values) is four runs of 32: run r takes nibble r/2 of bytes 32*(r%2).., and bit pair r of `qh`.
pub(super) fn q6_k(b: &[u8], x: &mut [f32]) {
    let (ql, qh, scales, d) = (&b[..128], &b[128..192], &b[192..208], f16_at(b, 208));
    for half in 0..2 {
        let (ql, qh, scales) = (&ql[64 * half..], &qh[32 * half..], &scales[8 * half..]);
        for run in 0..4 {
            for l in 0..32 {
                let low = (ql[32 * (run % 2) + l] >> (4 * (run / 2))) & 15;
                let q = (low | (((qh[l] >> (2 * run)) & 3) << 4)) as i8 - 32;
                let scale = d * f32::from(scales[2 * run + l / 16] as i8);
                x[128 * half + 32 * run + l] = scale * f32::from(q);
            }
        }
    }
}
