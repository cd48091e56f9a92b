//! How one tensor is quantized: code range, grouping, mapping, scale dtype, and the one place that turns a
//! range into a scale and a value into a code. Not the walk over a matrix (see `matrix.rs`).

use crate::float::MIN_E8M0;
use crate::{FloatType, MiniFloat, QuantError, WeightObserver};
use serde::{Deserialize, Serialize};

/// The type of a stored code. An integer code is its own value; a float code is a bit pattern that stands for one.
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
    /// FP8, values -448..=448; the code is the byte (as an i8).
    Fp8E4M3,
    /// FP8 with a wider exponent, values -57344..=57344; the code is the byte (as an i8). compressed-tensors cannot store it.
    Fp8E5M2,
    /// FP4, values -6..=6; codes 0..=15.
    Fp4E2M1,
}

impl QuantType {
    /// Every type.
    pub const ALL: [QuantType; 7] = [
        QuantType::Int2,
        QuantType::Int3,
        QuantType::Int4,
        QuantType::Int8,
        QuantType::Fp8E4M3,
        QuantType::Fp8E5M2,
        QuantType::Fp4E2M1,
    ];
    /// The integer types.
    pub const INTS: [QuantType; 4] = [QuantType::Int2, QuantType::Int3, QuantType::Int4, QuantType::Int8];

    /// Bits of a code.
    pub fn bits(self) -> usize {
        match self {
            QuantType::Int2 => 2,
            QuantType::Int3 => 3,
            QuantType::Int4 | QuantType::Fp4E2M1 => 4,
            QuantType::Int8 | QuantType::Fp8E4M3 | QuantType::Fp8E5M2 => 8,
        }
    }

    /// The float format of its codes; `None` for an integer type.
    #[inline]
    pub fn float(self) -> Option<MiniFloat> {
        match self {
            QuantType::Int2 | QuantType::Int3 | QuantType::Int4 | QuantType::Int8 => None,
            QuantType::Fp8E4M3 => Some(MiniFloat::E4M3),
            QuantType::Fp8E5M2 => Some(MiniFloat::E5M2),
            QuantType::Fp4E2M1 => Some(MiniFloat::E2M1),
        }
    }

    /// Smallest value of a code (for an integer type: the smallest code).
    #[inline]
    pub fn qmin(self) -> i32 {
        match self.float() {
            None => -(1 << (self.bits() - 1)),
            Some(f) => -(f.max() as i32),
        }
    }

    /// Largest value of a code (for an integer type: the largest code).
    #[inline]
    pub fn qmax(self) -> i32 {
        match self.float() {
            None => (1 << (self.bits() - 1)) - 1,
            Some(f) => f.max() as i32,
        }
    }

    /// The name for a person: `INT4`, `FP8 E4M3`, `FP4 E2M1`.
    pub fn name(self) -> &'static str {
        match self {
            QuantType::Int2 => "INT2",
            QuantType::Int3 => "INT3",
            QuantType::Int4 => "INT4",
            QuantType::Int8 => "INT8",
            QuantType::Fp8E4M3 => "FP8 E4M3",
            QuantType::Fp8E5M2 => "FP8 E5M2",
            QuantType::Fp4E2M1 => "FP4 E2M1",
        }
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
    /// One scale for each block of this many rows and columns; blocks at the lower and the right edge may be smaller. Of
    /// FP8 weights only.
    PerBlock(usize, usize),
    /// One scale for each row of an activation (a token), found from its values when the model runs: *dynamic*. Never of
    /// weights.
    PerToken,
    /// One scale for each run of this many values of a token, found when the model runs; must divide `k`. Never of weights.
    PerTokenGroup(usize),
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

/// Values that share a scale in NVFP4 and in MXFP4.
const NVFP4_GROUP: usize = 16;
const MXFP4_GROUP: usize = 32;

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

    /// Symmetric FP8 E4M3 weights, ranges from minimum and maximum.
    pub fn fp8(granularity: Granularity, scale_dtype: FloatType) -> Self {
        Self { qtype: QuantType::Fp8E4M3, ..Self::int4(granularity, scale_dtype) }
    }

    /// NVFP4 weights: FP4 in groups of 16 with E4M3 scales and one f32 divisor for the tensor.
    pub fn nvfp4() -> Self {
        Self { qtype: QuantType::Fp4E2M1, ..Self::int4(Granularity::PerGroup(NVFP4_GROUP), FloatType::F8E4M3) }
    }

    /// MXFP4 weights: FP4 in groups of 32 with scales that are powers of two.
    pub fn mxfp4() -> Self {
        Self { qtype: QuantType::Fp4E2M1, ..Self::int4(Granularity::PerGroup(MXFP4_GROUP), FloatType::F8E8M0) }
    }

    /// NVFP4 activations: as the weights, in runs of 16 values of a token, under a stored global scale of the layer's input.
    pub fn nvfp4_tokens() -> Self {
        Self { granularity: Granularity::PerTokenGroup(NVFP4_GROUP), ..Self::nvfp4() }
    }

    /// MXFP4 activations: as the weights, in runs of 32 values of a token.
    pub fn mxfp4_tokens() -> Self {
        Self { granularity: Granularity::PerTokenGroup(MXFP4_GROUP), ..Self::mxfp4() }
    }

    /// Whether the scales of a tensor have a common f32 divisor (NVFP4).
    pub fn has_global_scale(&self) -> bool {
        self.scale_dtype == FloatType::F8E4M3
    }

    /// Whether the parts fit together. Every function that takes a shape asks this first.
    ///
    /// # Errors
    /// [`QuantError::Setting`] for zero points of float codes, FP4 outside NVFP4 and MXFP4, blocks of anything but FP8, or
    /// one-byte scales of another type.
    pub fn check(&self) -> Result<(), QuantError> {
        let setting =
            |field, expected: &str, got: String| Err(QuantError::Setting { field, expected: expected.into(), got });
        let name = self.qtype.name();
        if self.qtype.float().is_some() && self.mapping == Mapping::Asymmetric {
            return setting("mapping", "symmetric: float codes have no zero point", format!("asymmetric {name}"));
        }
        let got = || format!("{name}, {:?}, {} scales", self.granularity, self.scale_dtype);
        match (self.qtype, self.granularity, self.scale_dtype) {
            (
                QuantType::Fp4E2M1,
                Granularity::PerGroup(NVFP4_GROUP) | Granularity::PerTokenGroup(NVFP4_GROUP),
                FloatType::F8E4M3,
            )
            | (
                QuantType::Fp4E2M1,
                Granularity::PerGroup(MXFP4_GROUP) | Granularity::PerTokenGroup(MXFP4_GROUP),
                FloatType::F8E8M0,
            ) => Ok(()),
            (QuantType::Fp4E2M1, ..) => setting(
                "scheme",
                "FP4 in groups of 16 with E4M3 scales (NVFP4), or of 32 with E8M0 scales (MXFP4)",
                got(),
            ),
            (_, _, FloatType::F8E4M3 | FloatType::F8E8M0) => setting("scale_dtype", "f32, f16 or bf16", got()),
            (QuantType::Fp8E4M3 | QuantType::Fp8E5M2, Granularity::PerBlock(r, c), _) if r > 0 && c > 0 => Ok(()),
            (_, Granularity::PerBlock(..), _) => setting("granularity", "blocks of at least 1x1 of FP8 weights", got()),
            (QuantType::Fp8E4M3 | QuantType::Fp8E5M2, Granularity::PerGroup(_), _) => {
                setting("granularity", "one FP8 scale for the tensor, a row or a block", got())
            }
            (QuantType::Int8 | QuantType::Fp8E4M3, Granularity::PerToken, FloatType::F32)
            | (QuantType::Fp8E4M3, Granularity::PerTokenGroup(_), FloatType::F32) => Ok(()),
            (_, Granularity::PerToken | Granularity::PerTokenGroup(_), _) => setting(
                "activations",
                "INT8 or FP8 E4M3 with f32 scales for each token, or FP8 E4M3 for runs of one",
                got(),
            ),
            _ => Ok(()),
        }
    }

    /// Whether scales are found when the model runs, so that nothing of them is stored. (Of NVFP4 activations the scales
    /// of runs are found then too, but under a stored global scale.)
    pub fn is_dynamic(&self) -> bool {
        let tokens = matches!(self.granularity, Granularity::PerToken | Granularity::PerTokenGroup(_));
        tokens && !self.has_global_scale()
    }

    /// The group length along `k`: `k` itself for per-channel and per-tensor; of the last block of a row less may be left.
    ///
    /// # Errors
    /// [`QuantError::GroupNotDividing`] when the group size is zero or does not divide `k`; as [`QuantArgs::check`].
    pub fn group_len(&self, k: usize) -> Result<usize, QuantError> {
        self.check()?;
        match self.granularity {
            Granularity::PerTensor | Granularity::PerChannel | Granularity::PerToken => Ok(k),
            Granularity::PerGroup(g) | Granularity::PerTokenGroup(g) if g > 0 && k.is_multiple_of(g) => Ok(g),
            Granularity::PerGroup(group_size) | Granularity::PerTokenGroup(group_size) => {
                Err(QuantError::GroupNotDividing { k, group_size })
            }
            Granularity::PerBlock(_, columns) => Ok(columns),
        }
    }

    /// The shape of the scales of an `[n, k]` matrix: `[n, k/g]`, `[n, 1]`, `[1, 1]`, or the number of blocks down and across.
    ///
    /// # Errors
    /// As [`QuantArgs::group_len`].
    pub fn scale_shape(&self, n: usize, k: usize) -> Result<[usize; 2], QuantError> {
        let g = self.group_len(k)?;
        Ok(match self.granularity {
            Granularity::PerTensor => [1, 1],
            Granularity::PerChannel | Granularity::PerToken => [n, 1],
            Granularity::PerGroup(_) | Granularity::PerTokenGroup(_) => [n, k.checked_div(g).unwrap_or(0)],
            Granularity::PerBlock(rows, columns) => [n.div_ceil(rows), k.div_ceil(columns)],
        })
    }

    /// The global scale of a tensor whose largest magnitude is `absmax`: 448 * 6 / absmax, what makes the largest group's
    /// scale the largest E4M3 number; computed as `(1 / absmax) * 2688`, each step rounded, because PyTorch divides a number
    /// by a tensor so. It **divides** (NVIDIA's own files store the reciprocal). Below about 7.9e-36 it would
    /// overflow and is 1. Source: compressed-tensors' `generate_gparam`. Layers whose outputs a server computes as one
    /// matrix (q, k and v; gate and up) share the global scale of the largest magnitude of all.
    pub fn global_scale(absmax: f32) -> f32 {
        let scale = 1.0 / absmax.max(f32::MIN_POSITIVE) * (MiniFloat::E4M3.max() * MiniFloat::E2M1.max());
        if scale.is_finite() { scale } else { 1.0 }
    }

    /// Scale and zero point for values in `[lo, hi]`, both finite.
    ///
    /// Formula and order of compressed-tensors' `calculate_qparams`: the range is widened to hold 0; symmetric
    /// `scale = absmax / ((qmax - qmin) / 2)`, asymmetric `scale = (hi - lo) / (qmax - qmin)` and
    /// `zero = round(clamp(qmin - lo / scale))` with the scale before it is stored; then the scale is rounded to
    /// `scale_dtype`, and a zero scale becomes the dtype's epsilon. E8M0 scales have their own rule (`generate_mx_scales`):
    /// the power of two near `absmax`, divided by 4, the power of two in FP4's largest value.
    ///
    /// # Errors
    /// [`QuantError::ScaleOverflow`] (with group 0: the caller knows the group) when the stored scale is infinite.
    pub fn qparams(&self, lo: f32, hi: f32) -> Result<QParams, QuantError> {
        self.stored_qparams(lo, hi, None)
    }

    /// [`QuantArgs::qparams`] under a global scale, by which the scale is multiplied before it is stored. What is returned
    /// is the stored scale; [`QuantArgs::in_effect`] gives the one that values are divided by.
    ///
    /// # Errors
    /// As [`QuantArgs::qparams`].
    pub fn stored_qparams(&self, lo: f32, hi: f32, global: Option<f32>) -> Result<QParams, QuantError> {
        let (lo, hi) = (lo.min(0.0), hi.max(0.0));
        let range = (self.qtype.qmax() - self.qtype.qmin()) as f32;
        let (scale, zero) = match self.mapping {
            Mapping::Symmetric if self.scale_dtype == FloatType::F8E8M0 => {
                ((self.scale_dtype.round((-lo).max(hi)) / 4.0).max(MIN_E8M0), 0)
            }
            Mapping::Symmetric => ((-lo).max(hi) / (range / 2.0), 0),
            Mapping::Asymmetric => {
                let scale = (hi - lo) / range;
                let qmin = self.qtype.qmin() as f32;
                let zero = if scale == 0.0 { 0.0 } else { (qmin - lo / scale).clamp(qmin, self.qtype.qmax() as f32) };
                (scale, zero.round_ties_even() as i32)
            }
        };
        let scale = global.map_or(scale, |g| g * scale);
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

    /// The parameters that values are divided and multiplied by, from stored ones: under a global scale the stored scale over
    /// it, one f32 division.
    #[inline]
    pub fn in_effect(&self, p: QParams, global: Option<f32>) -> QParams {
        QParams { scale: global.map_or(p.scale, |g| p.scale / g), ..p }
    }

    /// The code of `x`: `round_ties_even(clamp(x / scale + zero, qmin, qmax))`. Divides, as the peer does: the
    /// product with the reciprocal differs at ties. NaN gives 0. A float code: the nearest of `x / scale` after the same
    /// clamp, ties to even, as a bit pattern ([`MiniFloat::encode`]).
    #[inline]
    pub fn quantize(&self, x: f32, p: QParams) -> i8 {
        if let Some(f) = self.qtype.float() {
            return f.encode(x / p.scale) as i8;
        }
        let (qmin, qmax) = (self.qtype.qmin() as f32, self.qtype.qmax() as f32);
        (x / p.scale + p.zero as f32).clamp(qmin, qmax).round_ties_even() as i8
    }

    /// The value of a code before the scale: `q - zero`, or what a float code stands for.
    #[inline]
    pub fn code_value(&self, q: i8, zero: i32) -> f32 {
        match self.qtype.float() {
            None => (i32::from(q) - zero) as f32,
            Some(f) => f.decode(q as u8),
        }
    }

    /// The value of a code: `(q - zero) * scale`, one f32 multiplication; for a float code what it stands for times `scale`.
    #[inline]
    pub fn dequantize(&self, q: i8, p: QParams) -> f32 {
        self.code_value(q, p.zero) * p.scale
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
    /// (asymmetric zero points packed at the code width along `n`, padding counted; float codes have none).
    ///
    /// # Errors
    /// As [`QuantArgs::group_len`].
    pub fn bits_per_weight(&self, n: usize, k: usize) -> Result<f64, QuantError> {
        let [rows, groups] = self.scale_shape(n, k)?;
        let codes = match self.qtype.float() {
            None => n * crate::packed_words(k, self.qtype.bits()) * 32,
            Some(f) => n * k * f.bits(),
        };
        let mut bits = codes + rows * groups * self.scale_dtype.bits();
        if self.has_global_scale() {
            bits += 32;
        }
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
    fn c010_f111_ties_round_to_even() {
        let args = QuantArgs::int4(Granularity::PerTensor, FloatType::F32);
        let p = QParams { scale: 1.0, zero: 0 };
        let xs = [0.5f32, 1.5, 2.5, -0.5, -1.5, -2.5, 3.5, 6.5, 7.5, -8.5, -0.0, 9.0];
        let codes: Vec<i8> = xs.iter().map(|&x| args.quantize(x, p)).collect();
        assert_eq!(codes, [0, 2, 2, 0, -2, -2, 4, 6, 7, -8, 0, 7]);
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
                qtype: QuantType::INTS[qtype],
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
