//! The element types of GGUF tensors and their decoding to f32, as the decoders of ggml (`ggml-quants.c`) define it.
//!
//! Every decoder here is exact up to its last operation: an f16 scale has 11 significant bits, a block scale at most 8 and a
//! code at most 8, so each product fits the 24 bits of an f32 and only the addition of a minimum rounds, once. The result
//! therefore does not depend on the order of the products or on fused multiply-add, and equals ggml's on every machine.
//! Not an encoder: dsq writes no GGUF here.

use half::{bf16, f16};

/// The element type of a GGUF tensor that dsq can decode. The discriminant is the number in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GgmlType {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q4K = 12,
    Q5K = 13,
    Q6K = 14,
    Bf16 = 30,
}

/// Values per K-quant super-block.
const SUPER_BLOCK: usize = 256;

impl GgmlType {
    /// Every type that can be decoded.
    pub(crate) const ALL: [GgmlType; 11] = [
        GgmlType::F32,
        GgmlType::F16,
        GgmlType::Bf16,
        GgmlType::Q4_0,
        GgmlType::Q4_1,
        GgmlType::Q5_0,
        GgmlType::Q5_1,
        GgmlType::Q8_0,
        GgmlType::Q4K,
        GgmlType::Q5K,
        GgmlType::Q6K,
    ];

    /// The type with number `id` in the file, if dsq can decode it.
    pub(crate) fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| *t as u32 == id)
    }

    /// ggml's name: `Q4_1`, `Q4_K`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            GgmlType::F32 => "F32",
            GgmlType::F16 => "F16",
            GgmlType::Bf16 => "BF16",
            GgmlType::Q4_0 => "Q4_0",
            GgmlType::Q4_1 => "Q4_1",
            GgmlType::Q5_0 => "Q5_0",
            GgmlType::Q5_1 => "Q5_1",
            GgmlType::Q8_0 => "Q8_0",
            GgmlType::Q4K => "Q4_K",
            GgmlType::Q5K => "Q5_K",
            GgmlType::Q6K => "Q6_K",
        }
    }

    /// Values per block; a row (`ne[0]`) is a whole number of blocks.
    pub(crate) fn block_len(self) -> usize {
        match self {
            GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 => 1,
            GgmlType::Q4_0 | GgmlType::Q4_1 | GgmlType::Q5_0 | GgmlType::Q5_1 | GgmlType::Q8_0 => 32,
            GgmlType::Q4K | GgmlType::Q5K | GgmlType::Q6K => SUPER_BLOCK,
        }
    }

    /// Bytes per block.
    pub(crate) fn block_bytes(self) -> usize {
        match self {
            GgmlType::F32 => 4,
            GgmlType::F16 | GgmlType::Bf16 => 2,
            GgmlType::Q4_0 => 2 + 16,
            GgmlType::Q4_1 => 2 + 2 + 16,
            GgmlType::Q5_0 => 2 + 4 + 16,
            GgmlType::Q5_1 => 2 + 2 + 4 + 16,
            GgmlType::Q8_0 => 2 + 32,
            GgmlType::Q4K => 2 + 2 + 12 + 128,
            GgmlType::Q5K => 2 + 2 + 12 + 32 + 128,
            GgmlType::Q6K => 128 + 64 + 16 + 2,
        }
    }

    /// Decodes whole blocks: `bytes` holds `out.len() / block_len` of them.
    pub(crate) fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        debug_assert_eq!(out.len() % self.block_len(), 0);
        debug_assert_eq!(bytes.len(), out.len() / self.block_len() * self.block_bytes());
        let decode: fn(&[u8], &mut [f32]) = match self {
            GgmlType::F32 => |b, x| x[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            GgmlType::F16 => |b, x| x[0] = f16_at(b, 0),
            GgmlType::Bf16 => |b, x| x[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            GgmlType::Q4_0 => q4_0,
            GgmlType::Q4_1 => q4_1,
            GgmlType::Q5_0 => q5_0,
            GgmlType::Q5_1 => q5_1,
            GgmlType::Q8_0 => q8_0,
            GgmlType::Q4K => q4_k,
            GgmlType::Q5K => q5_k,
            GgmlType::Q6K => q6_k,
        };
        for (block, values) in bytes.chunks_exact(self.block_bytes()).zip(out.chunks_exact_mut(self.block_len())) {
            decode(block, values);
        }
    }
}

/// The name of a type number that dsq cannot decode, for messages; types 4 and 5 (Q4_2, Q4_3) were removed from ggml.
pub(crate) fn foreign_type_name(id: u32) -> &'static str {
    match id {
        4 => "Q4_2, removed from ggml",
        5 => "Q4_3, removed from ggml",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        40 => "NVFP4",
        _ => "unknown",
    }
}

fn f16_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// f16 d, 16 bytes of nibbles: low ones are values 0..16, high ones 16..32. Value (q - 8) * d.
fn q4_0(b: &[u8], x: &mut [f32]) {
    let d = f16_at(b, 0);
    for (j, byte) in b[2..18].iter().enumerate() {
        x[j] = f32::from((byte & 15) as i8 - 8) * d;
        x[j + 16] = f32::from((byte >> 4) as i8 - 8) * d;
    }
}

/// f16 d, f16 m, nibbles as in Q4_0. Value q * d + m.
fn q4_1(b: &[u8], x: &mut [f32]) {
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
fn q5_0(b: &[u8], x: &mut [f32]) {
    let (d, high) = (f16_at(b, 0), high_bits(b, 2));
    for (j, byte) in b[6..22].iter().enumerate() {
        let low = (byte & 15) | (((high >> j) & 1) as u8) << 4;
        let upper = (byte >> 4) | (((high >> (j + 16)) & 1) as u8) << 4;
        x[j] = f32::from(low as i8 - 16) * d;
        x[j + 16] = f32::from(upper as i8 - 16) * d;
    }
}

/// f16 d, f16 m, 32 high bits, nibbles as in Q4_0. Value q * d + m.
fn q5_1(b: &[u8], x: &mut [f32]) {
    let (d, m, high) = (f16_at(b, 0), f16_at(b, 2), high_bits(b, 4));
    for (j, byte) in b[8..24].iter().enumerate() {
        let low = (byte & 15) | (((high >> j) & 1) as u8) << 4;
        let upper = (byte >> 4) | (((high >> (j + 16)) & 1) as u8) << 4;
        x[j] = f32::from(low) * d + m;
        x[j + 16] = f32::from(upper) * d + m;
    }
}

/// f16 d, 32 signed bytes. Value q * d.
fn q8_0(b: &[u8], x: &mut [f32]) {
    let d = f16_at(b, 0);
    for (value, byte) in x.iter_mut().zip(&b[2..34]) {
        *value = f32::from(*byte as i8) * d;
    }
}

/// The 6-bit scale and minimum of sub-block `j` (0..8) in the 12 bytes that Q4_K and Q5_K share.
fn scale_min(s: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        ((s[j + 4] & 15) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4))
    }
}

/// f16 d, f16 dmin, 12 scale bytes, 128 bytes of nibbles: 32 bytes hold the 64 values of two sub-blocks, low nibbles first.
/// Value d * scale * q - dmin * min.
fn q4_k(b: &[u8], x: &mut [f32]) {
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
fn q5_k(b: &[u8], x: &mut [f32]) {
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
fn q6_k(b: &[u8], x: &mut [f32]) {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &serde_json::Value) -> Vec<u8> {
        let hex = hex.as_str().unwrap();
        (0..hex.len()).step_by(2).map(|i| u8::from_str_radix(&hex[i..i + 2], 16).unwrap()).collect()
    }

    #[test]
    fn every_type_decodes_exactly_as_pypi_gguf() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/gguf/blocks.json");
        let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        for ty in GgmlType::ALL {
            let (blocks, values) = (bytes(&golden[ty.name()]["bytes"]), bytes(&golden[ty.name()]["values"]));
            assert_eq!(blocks.len() / ty.block_bytes() * ty.block_len(), values.len() / 4, "{}", ty.name());
            let mut out = vec![0f32; values.len() / 4];
            ty.dequantize(&blocks, &mut out);
            let found: Vec<u8> = out.iter().flat_map(|x| x.to_le_bytes()).collect();
            assert_eq!(found, values, "{}", ty.name());
        }
    }
}
