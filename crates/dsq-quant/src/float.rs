//! Stored float dtypes and the rounding to them. Not a tensor type.

use half::{bf16, f16};
use serde::{Deserialize, Serialize};

/// A float dtype in which a scale or a copied tensor is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum FloatType {
    /// IEEE binary32.
    #[default]
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl FloatType {
    /// Every dtype, widest first.
    pub const ALL: [FloatType; 3] = [FloatType::F32, FloatType::F16, FloatType::Bf16];

    /// Rounds `x` to this dtype (nearest, ties to even) and returns it as f32. Overflow gives infinity.
    #[inline]
    pub fn round(self, x: f32) -> f32 {
        match self {
            FloatType::F32 => x,
            FloatType::F16 => f16::from_f32(x).to_f32(),
            FloatType::Bf16 => bf16::from_f32(x).to_f32(),
        }
    }

    /// Largest finite value.
    pub fn max(self) -> f32 {
        match self {
            FloatType::F32 => f32::MAX,
            FloatType::F16 => f16::MAX.to_f32(),
            FloatType::Bf16 => bf16::MAX.to_f32(),
        }
    }

    /// Smallest positive normal value.
    pub fn min_positive(self) -> f32 {
        match self {
            FloatType::F32 => f32::MIN_POSITIVE,
            FloatType::F16 => f16::MIN_POSITIVE.to_f32(),
            FloatType::Bf16 => bf16::MIN_POSITIVE.to_f32(),
        }
    }

    /// Machine epsilon (gap above 1), the value that a zero scale is replaced with, as in
    /// compressed-tensors' `calculate_qparams`.
    pub fn epsilon(self) -> f32 {
        match self {
            FloatType::F32 => f32::EPSILON,
            FloatType::F16 => f16::EPSILON.to_f32(),
            FloatType::Bf16 => bf16::EPSILON.to_f32(),
        }
    }

    /// Bits of one value.
    pub fn bits(self) -> usize {
        match self {
            FloatType::F32 => 32,
            FloatType::F16 | FloatType::Bf16 => 16,
        }
    }

    /// The name in safetensors headers: `F32`, `F16`, `BF16`.
    pub fn name(self) -> &'static str {
        match self {
            FloatType::F32 => "F32",
            FloatType::F16 => "F16",
            FloatType::Bf16 => "BF16",
        }
    }
}

impl std::fmt::Display for FloatType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for FloatType {
    type Err = crate::QuantError;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        match s.to_ascii_lowercase().as_str() {
            "f32" | "float32" => Ok(FloatType::F32),
            "f16" | "float16" => Ok(FloatType::F16),
            "bf16" | "bfloat16" => Ok(FloatType::Bf16),
            _ => Err(crate::QuantError::Setting { field: "dtype", expected: "f32, f16 or bf16".into(), got: s.into() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_value_survives_the_round_trip() {
        for bits in 0..=u16::MAX {
            for (dtype, x) in
                [(FloatType::F16, f16::from_bits(bits).to_f32()), (FloatType::Bf16, bf16::from_bits(bits).to_f32())]
            {
                if !x.is_nan() {
                    assert_eq!(dtype.round(x).to_bits(), x.to_bits(), "{dtype} {bits:#06x}");
                }
            }
        }
    }

    #[test]
    fn rounds_ties_to_even_and_overflows_to_infinity() {
        // 1 + eps/2 lies half way between 1 and 1 + eps; 1 + 3 eps/2 between 1 + eps and 1 + 2 eps.
        for dtype in [FloatType::F16, FloatType::Bf16] {
            let eps = dtype.epsilon();
            assert_eq!(dtype.round(1.0 + eps / 2.0), 1.0);
            assert_eq!(dtype.round(1.0 + 1.5 * eps), 1.0 + 2.0 * eps);
        }
        assert_eq!(FloatType::F16.round(6e5 / 7.0), f32::INFINITY);
        assert_eq!(FloatType::Bf16.round(6e5 / 7.0), 85504.0);
    }
}
