//! The grids on which a KV cache holds the keys and values of one layer: what may be a scheme for them, how scales follow
//! from the largest magnitudes that calibration met, and the rounding of values to them. Not the cache (see `dsq-kernels`), not
//! the search for the magnitudes (see `dsq-train`).

use crate::{FloatType, Granularity, Mapping, QParams, QuantArgs, QuantError, QuantType};

/// The grids of keys (after the rotary embedding) and values of one layer: one scale each.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct KvGrid {
    /// INT8 or FP8 E4M3, symmetric, one scale for the tensor ([`QuantArgs::kv_cache`]).
    pub args: QuantArgs,
    /// The scale of the keys.
    pub k: QParams,
    /// The scale of the values.
    pub v: QParams,
}

impl QuantArgs {
    /// The scheme of a KV cache with codes of this type: symmetric, one static f32 scale for a tensor.
    ///
    /// # Errors
    /// [`QuantError::Setting`] for another type than INT8 and FP8 E4M3.
    pub fn kv_cache(qtype: QuantType) -> Result<Self, QuantError> {
        let args = Self { qtype, ..Self::kv_int8() };
        args.check_kv_cache().map(|()| args)
    }

    /// [`QuantArgs::kv_cache`] of INT8.
    pub fn kv_int8() -> Self {
        Self { qtype: QuantType::Int8, ..Self::int4(Granularity::PerTensor, FloatType::F32) }
    }

    /// [`QuantArgs::kv_cache`] of FP8 E4M3.
    pub fn kv_fp8() -> Self {
        Self { qtype: QuantType::Fp8E4M3, ..Self::kv_int8() }
    }

    /// Whether this can be the scheme of a KV cache.
    ///
    /// # Errors
    /// [`QuantError::Setting`] for anything but symmetric INT8 or FP8 E4M3 with one scale for the tensor.
    pub fn check_kv_cache(&self) -> Result<(), QuantError> {
        let known = matches!(self.qtype, QuantType::Int8 | QuantType::Fp8E4M3);
        if known && self.granularity == Granularity::PerTensor && self.mapping == Mapping::Symmetric {
            return self.check();
        }
        Err(QuantError::Setting {
            field: "KV cache",
            expected: "symmetric INT8 or FP8 E4M3 with one scale for the tensor".into(),
            got: format!("{:?} {}, {:?}", self.mapping, self.qtype.name(), self.granularity),
        })
    }
}

impl KvGrid {
    /// The grids of keys and values whose largest magnitudes are `k` and `v`, by the rule of every symmetric tensor
    /// ([`QuantArgs::qparams`]): INT8 `absmax / 127.5`, FP8 `absmax / 448`; a magnitude of 0 gives the dtype's epsilon.
    ///
    /// # Errors
    /// As [`QuantArgs::check_kv_cache`]; [`QuantError::NonFinite`] (index 0: keys, 1: values) for a magnitude that is not finite.
    pub fn from_absmax(args: QuantArgs, k: f32, v: f32) -> Result<Self, QuantError> {
        args.check_kv_cache()?;
        let found = [k, v];
        if let Some(index) = found.iter().position(|x| !x.is_finite()) {
            let count = found.iter().filter(|x| !x.is_finite()).count();
            return Err(QuantError::NonFinite { index, value: found[index], count });
        }
        let of = |absmax: f32| args.qparams(-absmax.abs(), absmax.abs());
        Ok(Self { args, k: of(k)?, v: of(v)? })
    }

    /// What is wrong with a stored scale, in words; `None`: nothing. It must be positive, and every code times it finite.
    pub fn scale_problem(args: &QuantArgs, scale: f32) -> Option<String> {
        let largest = f32::MAX / -(args.qtype.qmin() as f32);
        (!(scale > 0.0 && scale <= largest))
            .then(|| format!("expected a positive number up to {largest:e}, got {scale}"))
    }

    /// Puts values on a grid of this scheme, as a cache that stores their codes gives them back. A value that is not finite
    /// becomes NaN: no code stands for it.
    pub fn round(&self, p: QParams, values: &mut [f32]) {
        for x in values {
            *x = if x.is_finite() { self.args.dequantize(self.args.quantize(*x, p), p) } else { f32::NAN };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn both() -> [QuantArgs; 2] {
        [QuantType::Int8, QuantType::Fp8E4M3].map(|t| QuantArgs::kv_cache(t).unwrap())
    }

    #[test]
    fn scales_are_those_of_any_symmetric_tensor() {
        let [int8, fp8] = both();
        let g = KvGrid::from_absmax(int8, 2.55, 0.0).unwrap();
        assert_eq!((g.k.scale, g.v.scale), (2.55 / 127.5, f32::EPSILON));
        let g = KvGrid::from_absmax(fp8, 44.8, 448.0).unwrap();
        assert_eq!((g.k.scale, g.v.scale), (44.8 / 448.0, 1.0));
        // The largest magnitude of an INT8 grid lies half a step beyond the largest code, and rounds down to it.
        let g = KvGrid::from_absmax(int8, 127.5, 127.5).unwrap();
        let mut x = [127.5, -127.5, 126.5, 1e30, f32::NAN, f32::INFINITY];
        g.round(g.k, &mut x);
        assert_eq!(x[..4], [127.0, -128.0, 126.0, 127.0]);
        assert!(x[4].is_nan() && x[5].is_nan());
    }

    /// The worked example of docs/numerics.md.
    #[test]
    fn the_worked_example_holds() {
        let [int8, fp8] = both();
        let codes = |args: QuantArgs, p, x: [f32; 4]| x.map(|x| args.quantize(x, p) as u8);
        let p = KvGrid::from_absmax(int8, 2.55, 0.0).unwrap().k;
        assert_eq!(codes(int8, p, [1.0, -0.013, 2.55, -2.55]), [50, -1i8 as u8, 127, 0x80]);
        let g = KvGrid::from_absmax(fp8, 0.0, 2.24).unwrap();
        let mut x = [0.9, -0.01, 0.0003, 3.0];
        assert_eq!(codes(fp8, g.v, x), [0x73, 0xc0, 0x17, 0x7e]);
        g.round(g.v, &mut x);
        for (x, want) in x.iter().zip([0.88, -0.01, 0.000_292_97, 2.24]) {
            assert!((x - want).abs() <= 1e-5 * want.abs(), "{x} {want}");
        }
    }

    #[test]
    fn what_is_no_scheme_or_scale_of_a_cache_is_refused() {
        for qtype in [QuantType::Int4, QuantType::Fp8E5M2, QuantType::Fp4E2M1] {
            let e = QuantArgs::kv_cache(qtype).unwrap_err().to_string();
            assert!(e.contains("INT8 or FP8 E4M3") && e.contains(qtype.name()), "{e}");
        }
        let [int8, fp8] = both();
        let channel = QuantArgs { granularity: Granularity::PerChannel, ..fp8 };
        let asymmetric = QuantArgs { mapping: Mapping::Asymmetric, ..int8 };
        assert!(channel.check_kv_cache().is_err() && asymmetric.check_kv_cache().is_err());
        for (k, v, index) in [(f32::NAN, 1.0, 0), (1.0, f32::INFINITY, 1)] {
            let e = KvGrid::from_absmax(int8, k, v).unwrap_err();
            assert!(matches!(e, QuantError::NonFinite { index: i, .. } if i == index), "{e}");
        }
        for args in both() {
            for scale in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::MAX] {
                let problem = KvGrid::scale_problem(&args, scale).unwrap();
                assert!(problem.contains(&scale.to_string()), "{problem}");
            }
            for scale in [f32::from_bits(1), 1e-30, 1.0, f32::MAX / 448.0] {
                assert_eq!(KvGrid::scale_problem(&args, scale), None, "{scale}");
            }
        }
    }

    proptest! {
        #[test]
        fn rounding_is_idempotent_and_off_by_at_most_half_a_step(absmax in 1e-20f32..1e20, share in -1f32..1.0, fp8: bool) {
            let args = both()[usize::from(fp8)];
            let g = KvGrid::from_absmax(args, absmax, absmax).unwrap();
            let x = absmax * share;
            let mut y = [x];
            g.round(g.k, &mut y);
            let mut again = y;
            g.round(g.k, &mut again);
            prop_assert_eq!(y[0].to_bits(), again[0].to_bits());
            // FP8: half a unit in the last of three mantissa places, or half the smallest code; INT8: half a step, and at the
            // upper end, where 127.5 became 127, a little more.
            let bound = match fp8 {
                true => (x.abs() / 16.0).max(g.k.scale * 2f32.powi(-10)),
                false => g.k.scale * 0.5,
            };
            prop_assert!((y[0] - x).abs() <= bound * 1.0001, "{} to {}, scale {}", x, y[0], g.k.scale);
        }
    }
}
