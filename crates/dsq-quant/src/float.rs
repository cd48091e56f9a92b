//! Stored float dtypes and the rounding to them. Not a tensor type.

use crate::MiniFloat;
use crate::minifloat::{e8m0_encode, mx_power, nearest_power};
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
    /// FP8 E4M3 (see [`MiniFloat::E4M3`]): the scales of NVFP4 groups. Of scales only.
    F8E4M3,
    /// Powers of two, 2^-127 to 2^127, as a biased exponent: the scales of MX groups. Of scales only.
    F8E8M0,
}

/// The smallest E8M0 value.
pub(crate) const MIN_E8M0: f32 = f32::from_bits(1 << 22);

impl FloatType {
    /// The dtypes that a tensor of any values can have, widest first.
    pub const ALL: [FloatType; 3] = [FloatType::F32, FloatType::F16, FloatType::Bf16];

    /// Rounds `x` to this dtype (nearest, ties to even) and returns it as f32. Overflow gives infinity, for E4M3, which has
    /// none, too (unlike a code, a scale is never saturated). E8M0, for positive `x`: down to a power of two from below 1.75
    /// times it, up from there, and never below 2^-127.
    #[inline]
    pub fn round(self, x: f32) -> f32 {
        match self {
            FloatType::F32 => x,
            FloatType::F16 => f16::from_f32(x).to_f32(),
            FloatType::Bf16 => bf16::from_f32(x).to_f32(),
            // 464 is the tie between the largest value and what would be the next one; it goes to the even, 448.
            FloatType::F8E4M3 if x.abs() > 464.0 => f32::INFINITY.copysign(x),
            FloatType::F8E4M3 => MiniFloat::E4M3.decode(MiniFloat::E4M3.encode(x)),
            FloatType::F8E8M0 if e8m0_encode(x) != 255 => x,
            FloatType::F8E8M0 => mx_power(x).max(MIN_E8M0),
        }
    }

    /// What a trained scale is stored as: the nearest of this dtype. That is [`FloatType::round`] but for E8M0, whose rule for
    /// ranges always rounds down to 1.75 times a power of two; here 1.5 times one goes up.
    pub fn nearest(self, x: f32) -> f32 {
        match self {
            FloatType::F8E8M0 => nearest_power(x),
            _ => self.round(x),
        }
    }

    /// Largest finite value.
    pub fn max(self) -> f32 {
        match self {
            FloatType::F32 => f32::MAX,
            FloatType::F16 => f16::MAX.to_f32(),
            FloatType::Bf16 => bf16::MAX.to_f32(),
            FloatType::F8E4M3 => MiniFloat::E4M3.max(),
            FloatType::F8E8M0 => 2.0f32.powi(127),
        }
    }

    /// Smallest positive normal value (of E8M0, which has only those, the smallest).
    pub fn min_positive(self) -> f32 {
        match self {
            FloatType::F32 => f32::MIN_POSITIVE,
            FloatType::F16 => f16::MIN_POSITIVE.to_f32(),
            FloatType::Bf16 => bf16::MIN_POSITIVE.to_f32(),
            FloatType::F8E4M3 => 2.0f32.powi(-6),
            FloatType::F8E8M0 => MIN_E8M0,
        }
    }

    /// Machine epsilon (gap above 1), the value that a zero scale is replaced with, as in
    /// compressed-tensors' `calculate_qparams`.
    pub fn epsilon(self) -> f32 {
        match self {
            FloatType::F32 => f32::EPSILON,
            FloatType::F16 => f16::EPSILON.to_f32(),
            FloatType::Bf16 => bf16::EPSILON.to_f32(),
            FloatType::F8E4M3 => 0.125,
            FloatType::F8E8M0 => 1.0,
        }
    }

    /// Bits of one value.
    pub fn bits(self) -> usize {
        match self {
            FloatType::F32 => 32,
            FloatType::F16 | FloatType::Bf16 => 16,
            FloatType::F8E4M3 | FloatType::F8E8M0 => 8,
        }
    }

    /// The name in safetensors headers: `F32`, `F16`, `BF16`, `F8_E4M3`, `F8_E8M0`.
    pub fn name(self) -> &'static str {
        match self {
            FloatType::F32 => "F32",
            FloatType::F16 => "F16",
            FloatType::Bf16 => "BF16",
            FloatType::F8E4M3 => "F8_E4M3",
            FloatType::F8E8M0 => "F8_E8M0",
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
    fn scales_of_one_byte_round_and_overflow() {
        let e = FloatType::F8E4M3;
        assert_eq!(
            [464.0, 464.1, 0.9, 2f32.powi(-10), 0.0].map(|x| e.round(x)),
            [448.0, f32::INFINITY, 0.875, 0.0, 0.0]
        );
        let e = FloatType::F8E8M0;
        assert_eq!([0.0, 1.0, 1.7, 1.75, 1e-45].map(|x| e.round(x)), [MIN_E8M0, 1.0, 1.0, 2.0, MIN_E8M0]);
        assert_eq!([MIN_E8M0, f32::MAX].map(|x| e.round(x)), [MIN_E8M0, f32::INFINITY]);
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
