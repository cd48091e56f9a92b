//! The element types of GGUF tensors: numbers and names in the file, and decoding to f32. The formulas of the block types
//! are `dsq_quant::GgufGrid`'s. Not an encoder (see `export.rs`).

use dsq_quant::{FloatType, GgufGrid};
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

    /// The block grid; none for plain floats.
    pub(crate) fn grid(self) -> Option<GgufGrid> {
        Some(match self {
            GgmlType::F32 | GgmlType::F16 | GgmlType::Bf16 => return None,
            GgmlType::Q4_0 => GgufGrid::Q4_0,
            GgmlType::Q4_1 => GgufGrid::Q4_1,
            GgmlType::Q5_0 => GgufGrid::Q5_0,
            GgmlType::Q5_1 => GgufGrid::Q5_1,
            GgmlType::Q8_0 => GgufGrid::Q8_0,
            GgmlType::Q4K => GgufGrid::Q4K,
            GgmlType::Q5K => GgufGrid::Q5K,
            GgmlType::Q6K => GgufGrid::Q6K,
        })
    }

    /// The type of blocks of a grid.
    pub(crate) fn of_grid(grid: GgufGrid) -> Self {
        match grid {
            GgufGrid::Q4_0 => GgmlType::Q4_0,
            GgufGrid::Q4_1 => GgmlType::Q4_1,
            GgufGrid::Q5_0 => GgmlType::Q5_0,
            GgufGrid::Q5_1 => GgmlType::Q5_1,
            GgufGrid::Q8_0 => GgmlType::Q8_0,
            GgufGrid::Q4K => GgmlType::Q4K,
            GgufGrid::Q5K => GgmlType::Q5K,
            GgufGrid::Q6K => GgmlType::Q6K,
        }
    }

    /// The type of plain floats of a dtype; none for those that only scales have.
    pub(crate) fn of_float(dtype: FloatType) -> Option<Self> {
        match dtype {
            FloatType::F32 => Some(GgmlType::F32),
            FloatType::F16 => Some(GgmlType::F16),
            FloatType::Bf16 => Some(GgmlType::Bf16),
            FloatType::F8E4M3 | FloatType::F8E8M0 => None,
        }
    }

    /// The dtype of plain floats; none for blocks.
    pub(crate) fn float(self) -> Option<FloatType> {
        match self {
            GgmlType::F32 => Some(FloatType::F32),
            GgmlType::F16 => Some(FloatType::F16),
            GgmlType::Bf16 => Some(FloatType::Bf16),
            _ => None,
        }
    }

    /// ggml's name: `Q4_1`, `Q4_K`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            GgmlType::F32 => "F32",
            GgmlType::F16 => "F16",
            GgmlType::Bf16 => "BF16",
            _ => self.grid().map_or("", GgufGrid::name),
        }
    }

    /// Values per block; a row (`ne[0]`) is a whole number of blocks.
    pub(crate) fn block_len(self) -> usize {
        self.grid().map_or(1, GgufGrid::block_len)
    }

    /// Bytes per block.
    pub(crate) fn block_bytes(self) -> usize {
        self.grid().map_or(if self == GgmlType::F32 { 4 } else { 2 }, GgufGrid::block_bytes)
    }

    /// Decodes whole blocks: `bytes` holds `out.len() / block_len` of them.
    ///
    /// # Panics
    /// When it holds another number.
    pub(crate) fn dequantize(self, bytes: &[u8], out: &mut [f32]) {
        let Some(grid) = self.grid() else {
            assert_eq!(bytes.len(), out.len() * self.block_bytes(), "bytes of {}", self.name());
            for (b, x) in bytes.chunks_exact(self.block_bytes()).zip(out) {
                *x = match self {
                    GgmlType::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
                    GgmlType::Bf16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
                    _ => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
                };
            }
            return;
        };
        grid.dequantize(bytes, out).expect("as many blocks as values");
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
