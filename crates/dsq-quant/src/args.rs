//! How one tensor is quantized: code range, grouping, mapping, scale dtype, and the one place that turns a
//! range into a scale and a value into a code. Not the walk over a matrix (see `matrix.rs`).

use crate::{FloatType, QuantError, WeightObserver};
use serde::{Deserialize, Serialize};

/// The type of a stored code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum QuantType {
    /// Codes -2..=1.
    Int2,
    /// Codes -4..=3.
    Int3,
    /// Codes -8..=7.
    Int4,
    /// Codes -128..=127.
    Int8,
}

impl QuantType {
    /// Every type.
    pub const ALL: [QuantType; 4] = [QuantType::Int2, QuantType::Int3, QuantType::Int4, QuantType::Int8];

    /// Bits of a code.
    pub fn bits(self) -> usize {
        match self {
            QuantType::Int2 => 2,
            QuantType::Int3 => 3,
            QuantType::Int4 => 4,
            QuantType::Int8 => 8,
        }
    }

    /// Smallest code.
    pub fn qmin(self) -> i32 {
        -(1 << (self.bits() - 1))
    }

    /// Largest code.
    pub fn qmax(self) -> i32 {
        (1 << (self.bits() - 1)) - 1
    }
}

/// Which values share one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Granularity {
    /// One scale for the tensor.
    PerTensor,
    /// One scale for each output row.
    PerChannel,
    /// One scale for each run of this many values along the reduction dimension `k`; must divide `k`.
    PerGroup(usize),
}

/// Whether zero sits at code 0 or at a stored zero point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, Default)]
#[serde(rename_all = "lowercase")]
pub enum Mapping {
    /// `x = q * scale`.
    #[default]
    Symmetric,
    /// `x = (q - zero) * scale`.
    Asymmetric,
}

/// Scale and zero point of one group. `scale` is already rounded to its stored dtype; `zero` lies in the code
/// range (0 when symmetric).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct QParams {
    /// Stored scale, finite and positive.
    pub scale: f32,
    /// Zero point in the signed code domain.
    pub zero: i32,
}

/// How one tensor is quantized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QuantArgs {
    /// Code type.
    pub qtype: QuantType,
    /// Which values share a scale.
    pub granularity: Granularity,
    /// Symmetric or asymmetric.
    pub mapping: Mapping,
    /// Dtype in which scales are stored.
    pub scale_dtype: FloatType,
    /// How a weight's own values give the range of its grid.
    #[serde(default)]
    pub observer: WeightObserver,
}

impl QuantArgs {
    /// Symmetric INT4 weights, ranges from minimum and maximum.
    pub fn int4(granularity: Granularity, scale_dtype: FloatType) -> Self {
        Self {
            qtype: QuantType::Int4,
            granularity,
            mapping: Mapping::Symmetric,
            scale_dtype,
            observer: WeightObserver::MinMax,
        }
    }

    /// The group length along `k`: `k` itself for per-channel and per-tensor.
    ///
    /// # Errors
    /// [`QuantError::GroupNotDividing`] when the group size is zero or does not divide `k`.
    pub fn group_len(&self, k: usize) -> Result<usize, QuantError> {
        match self.granularity {
            Granularity::PerTensor | Granularity::PerChannel => Ok(k),
            Granularity::PerGroup(g) if g > 0 && k.is_multiple_of(g) => Ok(g),
            Granularity::PerGroup(group_size) => Err(QuantError::GroupNotDividing { k, group_size }),
        }
    }

    /// The shape of the scales of an `[n, k]` matrix: `[n, k/g]`, `[n, 1]` or `[1, 1]`.
    ///
    /// # Errors
    /// As [`QuantArgs::group_len`].
    pub fn scale_shape(&self, n: usize, k: usize) -> Result<[usize; 2], QuantError> {
        let g = self.group_len(k)?;
        Ok(match self.granularity {
            Granularity::PerTensor => [1, 1],
            Granularity::PerChannel => [n, 1],
            Granularity::PerGroup(_) => [n, k.checked_div(g).unwrap_or(0)],
        })
    }

    /// Scale and zero point for values in `[lo, hi]`, both finite.
    ///
    /// Formula and order of compressed-tensors' `calculate_qparams`: the range is widened to hold 0; symmetric
    /// `scale = absmax / ((qmax - qmin) / 2)`, asymmetric `scale = (hi - lo) / (qmax - qmin)` and
    /// `zero = round(clamp(qmin - lo / scale))` with the scale before it is stored; then the scale is rounded to
    /// `scale_dtype`, and a zero scale becomes the dtype's epsilon.
    ///
    /// # Errors
    /// [`QuantError::ScaleOverflow`] (with group 0: the caller knows the group) when the stored scale is infinite.
    pub fn qparams(&self, lo: f32, hi: f32) -> Result<QParams, QuantError> {
        let (lo, hi) = (lo.min(0.0), hi.max(0.0));
        let range = (self.qtype.qmax() - self.qtype.qmin()) as f32;
        let (scale, zero) = match self.mapping {
            Mapping::Symmetric => ((-lo).max(hi) / (range / 2.0), 0),
            Mapping::Asymmetric => {
                let scale = (hi - lo) / range;
                let qmin = self.qtype.qmin() as f32;
                let zero = if scale == 0.0 { 0.0 } else { (qmin - lo / scale).clamp(qmin, self.qtype.qmax() as f32) };
                (scale, zero.round_ties_even() as i32)
            }
        };
        let stored = self.scale_dtype.round(scale);
        if !stored.is_finite() {
            return Err(QuantError::ScaleOverflow { group: 0, lo, hi, scale, dtype: self.scale_dtype });
        }
        if stored == 0.0 {
            // Nothing in the group can be told from zero at this dtype: every value becomes the zero point, that is 0.
            return Ok(QParams { scale: self.scale_dtype.epsilon(), zero });
        }
        Ok(QParams { scale: stored, zero })
    }

    /// The code of `x`: `round_ties_even(clamp(x / scale + zero, qmin, qmax))`. Divides, as the peer does: the
    /// product with the reciprocal differs at ties. NaN gives 0.
    #[inline]
    pub fn quantize(&self, x: f32, p: QParams) -> i8 {
        let (qmin, qmax) = (self.qtype.qmin() as f32, self.qtype.qmax() as f32);
        (x / p.scale + p.zero as f32).clamp(qmin, qmax).round_ties_even() as i8
    }

    /// The value of a code: `(q - zero) * scale`, one f32 multiplication.
    #[inline]
    pub fn dequantize(&self, q: i8, p: QParams) -> f32 {
        (i32::from(q) - p.zero) as f32 * p.scale
    }

    /// Quantize then dequantize, and whether the straight-through gradient passes: it does where
    /// `x / scale + zero` lies within the code range, ends included (clipped STE).
    #[inline]
    pub fn fake_quantize(&self, x: f32, p: QParams) -> (f32, bool) {
        let c = x / p.scale + p.zero as f32;
        let inside = c >= self.qtype.qmin() as f32 && c <= self.qtype.qmax() as f32;
        (self.dequantize(self.quantize(x, p), p), inside)
    }

    /// Bits per weight of an `[n, k]` matrix, scales and zero points counted as stored in compressed-tensors
    /// (asymmetric zero points packed at the code width along `n`, padding counted).
    ///
    /// # Errors
    /// As [`QuantArgs::group_len`].
    pub fn bits_per_weight(&self, n: usize, k: usize) -> Result<f64, QuantError> {
        let [rows, groups] = self.scale_shape(n, k)?;
        let mut bits = n * crate::packed_words(k, self.qtype.bits()) * 32 + rows * groups * self.scale_dtype.bits();
        if self.mapping == Mapping::Asymmetric {
            bits += crate::packed_words(rows, self.qtype.bits()) * groups * 32;
        }
        Ok(bits as f64 / (n * k) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn asym4() -> QuantArgs {
        QuantArgs { mapping: Mapping::Asymmetric, ..QuantArgs::int4(Granularity::PerTensor, FloatType::F32) }
    }

    #[test]
    fn c010_ties_round_to_even() {
        let args = QuantArgs::int4(Granularity::PerTensor, FloatType::F32);
        let p = QParams { scale: 1.0, zero: 0 };
        let xs = [0.5f32, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5, 6.5, 7.5, -8.5];
        let codes: Vec<i8> = xs.iter().map(|&x| args.quantize(x, p)).collect();
        assert_eq!(codes, [0, 2, 2, 0, -2, -2, 4, 6, 7, -8]);
    }

    #[test]
    fn c003_constant_groups_hold_zero() {
        let args = asym4();
        let check = |lo, hi, x, scale: f32, zero, code| {
            let p = args.qparams(lo, hi).unwrap();
            assert!((p.scale - scale).abs() < 1e-7, "{p:?}");
            assert_eq!((p.zero, args.quantize(x, p)), (zero, code));
            assert_eq!(args.dequantize(code, p), x);
        };
        // The signed domain: code c here is c + 8 in the unsigned convention.
        check(0.25, 0.25, 0.25, 1.0 / 60.0, -8, 7);
        check(-0.25, -0.25, -0.25, 1.0 / 60.0, 7, -8);
        let p = args.qparams(0.0, 0.0).unwrap();
        assert_eq!((p.zero, args.quantize(0.0, p)), (0, 0));
        let p = args.qparams(0.0, 0.25).unwrap();
        assert_eq!([0.0, 0.25].map(|x| args.dequantize(args.quantize(x, p), p)), [0.0, 0.25]);
    }

    #[test]
    fn c026_positive_range_is_widened_to_zero() {
        let p = asym4().qparams(1.0, 1.3).unwrap();
        assert!((p.scale - 0.086_666_7).abs() < 1e-6);
        assert_eq!(p.zero, -8);
        assert_eq!([1.0, 1.1, 1.2, 1.3].map(|x| asym4().quantize(x, p) + 8), [12, 13, 14, 15]);
    }

    #[test]
    fn c012_codes_are_chosen_against_the_stored_scale() {
        // The case fixes the scale rule at absmax / 7 to show the effect of storing the scale.
        let w = [0.7f32, -0.35, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3];
        for (dtype, want) in [
            (FloatType::F32, [7i8, -4, 0, 1, 2, 2, 2, 3]),
            (FloatType::F16, [7, -4, 1, 1, 2, 2, 3, 3]),
            (FloatType::Bf16, [7, -3, 0, 1, 1, 2, 2, 3]),
        ] {
            let args = QuantArgs::int4(Granularity::PerTensor, dtype);
            let p = QParams { scale: dtype.round(0.7 / 7.0), zero: 0 };
            let codes = w.map(|x| args.quantize(x, p));
            assert_eq!(codes, want, "{dtype}");
            let again = codes.map(|q| args.quantize(args.dequantize(q, p), p));
            assert_eq!(again, codes, "{dtype}: re-quantizing the dequantized tensor");
        }
    }

    proptest! {
        #[test]
        fn dequantized_values_are_fixed_points(lo in -1e3f32..0.0, span in 1e-3f32..1e3, t in 0.0f32..1.0, dtype in 0usize..3, asym: bool, qtype in 0usize..4) {
            let args = QuantArgs {
                qtype: QuantType::ALL[qtype],
                granularity: Granularity::PerTensor,
                mapping: if asym { Mapping::Asymmetric } else { Mapping::Symmetric },
                scale_dtype: FloatType::ALL[dtype],
                observer: WeightObserver::MinMax,
            };
            let p = args.qparams(lo, lo + span).unwrap();
            let x = lo + t * span;
            let q = args.quantize(x, p);
            let v = args.dequantize(q, p);
            prop_assert_eq!(args.quantize(v, p), q);
            prop_assert_eq!(args.fake_quantize(x, p).0.to_bits(), v.to_bits());
            // Inside the code range the error is at most half a step (plus rounding of the division).
            let (_, inside) = args.fake_quantize(x, p);
            if inside { prop_assert!((v - x).abs() <= p.scale * 0.5001); }
        }
    }
}
