//! Grids whose scale and zero point are trained: which parameters ship for a learned pair, and the gradients of a fake
//! quantized value. Not the walk over a tensor (see `dsq-kernels`, `fake_quant`) and not an optimizer.

use crate::{Granularity, Mapping, MiniFloat, QParams, QuantArgs, QuantError};

impl QuantArgs {
    /// The parameters that ship for a learned scale and zero point (both f32, in training): the scale rounded to its stored
    /// dtype ([`crate::FloatType::nearest`]), the zero point rounded to the nearest code. A scale that is not above zero once
    /// stored becomes the dtype's smallest normal number. NaN and infinity stay in the scale: the values become NaN, and
    /// `QuantizedMatrix` refuses it. For schemes without a global scale.
    #[inline]
    pub fn learned_qparams(&self, scale: f32, zero: f32) -> QParams {
        self.stored_learned_qparams(scale, zero, None)
    }

    /// [`QuantArgs::learned_qparams`] under a global scale. The learned scale is the one in effect, in the unit of the values
    /// as with every other scheme; what is returned is the stored one, `scale * global` rounded, at most the largest E4M3 number:
    /// where training makes the largest group's scale larger still, its values clip.
    #[inline]
    pub fn stored_learned_qparams(&self, scale: f32, zero: f32, global: Option<f32>) -> QParams {
        let (scaled, dtype) = (global.map_or(scale, |g| scale * g), self.scale_dtype);
        let largest = global.map_or(f32::INFINITY, |_| dtype.max());
        // The comparisons leave NaN alone, and a scale below zero to what comes after.
        let stored = match scaled {
            s if s > largest => largest,
            s if s <= 0.0 => 0.0,
            s => dtype.nearest(s),
        };
        let scale = if stored == 0.0 { dtype.min_positive() } else { stored };
        let zero = match self.mapping {
            Mapping::Symmetric => 0,
            Mapping::Asymmetric => {
                zero.clamp(self.qtype.qmin() as f32, self.qtype.qmax() as f32).round_ties_even() as i32
            }
        };
        QParams { scale, zero }
    }

    /// The derivatives of `fake_quantize(x, p)` by `x`, by the scale and by the zero point, where every rounding (of the
    /// code, of the stored scale, of the zero point) passes its gradient through. With `c = x / scale + zero`:
    ///
    /// - `c` in the code range: `1`, `q - zero - x / scale`, `0`;
    /// - below or above it, where `q` is the end of the range: `0`, `q - zero`, `-scale`.
    ///
    /// A float code: the same with what it stands for in the place of `q - zero` ([`MiniFloat::learned_gradients`]).
    ///
    /// Source: LSQ (Esser et al., arXiv:1902.08153), and LSQ+ (Bhalgat et al., arXiv:2004.09576) for the zero point, which
    /// lies in the domain of codes here.
    #[inline(always)]
    pub fn learned_gradients(&self, x: f32, p: QParams) -> [f32; 3] {
        match self.qtype.float() {
            None => self.integer_gradients(x, p),
            Some(f) => f.learned_gradients(x, p.scale),
        }
    }

    /// [`QuantArgs::learned_gradients`] of integer codes: no question about the type, so that a loop of it vectorizes.
    #[inline(always)]
    pub fn integer_gradients(&self, x: f32, p: QParams) -> [f32; 3] {
        let (qmin, qmax, zero) = (self.qtype.qmin() as f32, self.qtype.qmax() as f32, p.zero as f32);
        let t = x / p.scale;
        let c = t + zero;
        let q = c.max(qmin).min(qmax).round_ties_even();
        if c >= qmin && c <= qmax { [1.0, (q - zero) - t, 0.0] } else { [0.0, q - zero, -p.scale] }
    }

    /// The derivatives of the code less its zero point, `q - zero`, by `x`, by the scale and by the zero point: for a value
    /// that stays in the domain of codes and is multiplied by the scale later, behind a convolution. With `c` as in
    /// [`QuantArgs::learned_gradients`]:
    ///
    /// - `c` in the code range: `1 / scale`, `-x / scale^2`, `0`;
    /// - below or above it: `0`, `0`, `-1`.
    ///
    /// The product rule of `(q - zero) * scale` makes [`QuantArgs::learned_gradients`] of them.
    #[inline(always)]
    pub fn learned_code_gradients(&self, x: f32, p: QParams) -> [f32; 3] {
        let (qmin, qmax) = (self.qtype.qmin() as f32, self.qtype.qmax() as f32);
        let t = x / p.scale;
        let c = t + p.zero as f32;
        if c >= qmin && c <= qmax { [1.0 / p.scale, -t / p.scale, 0.0] } else { [0.0, 0.0, -1.0] }
    }

    /// The shape of the scales that can be trained for an `[n, k]` matrix.
    ///
    /// # Errors
    /// [`QuantError::Setting`] for scales of tokens, which are found when the model runs; else as [`QuantArgs::scale_shape`].
    pub fn learned_shape(&self, n: usize, k: usize) -> Result<[usize; 2], QuantError> {
        if matches!(self.granularity, Granularity::PerToken | Granularity::PerTokenGroup(_)) {
            return Err(QuantError::Setting {
                field: "scheme",
                expected: "scales that are stored, for learned ones".into(),
                got: format!("{} {:?}, found when the model runs", self.qtype.name(), self.granularity),
            });
        }
        self.scale_shape(n, k)
    }
}

impl MiniFloat {
    /// The derivatives of `round(x / scale) * scale` by `x` and by the scale (and the 0 by a zero point, which float codes do not
    /// have), where every rounding passes its gradient through: with `t = x / scale`, within the largest values `1`,
    /// `round(t) - t`; beyond them `0` and that largest value, sign and all. LSQ's, with the value of a code in the place of the integer.
    #[inline(always)]
    pub fn learned_gradients(self, x: f32, scale: f32) -> [f32; 3] {
        let t = x / scale;
        let value = self.round(t);
        if t.abs() <= self.max() { [1.0, value - t, 0.0] } else { [0.0, value, 0.0] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FloatType, QuantType};

    /// The schemes of float codes, under a global scale where they have one, with a scale in effect that can be stored.
    fn float_schemes() -> Vec<(QuantArgs, Option<f32>, f32)> {
        let fp8 = |granularity, dtype| QuantArgs::fp8(granularity, dtype);
        let e5m2 = QuantArgs { qtype: QuantType::Fp8E5M2, ..fp8(Granularity::PerChannel, FloatType::F32) };
        vec![
            (fp8(Granularity::PerTensor, FloatType::F32), None, 0.003),
            (fp8(Granularity::PerChannel, FloatType::Bf16), None, 0.25),
            (fp8(Granularity::PerBlock(128, 128), FloatType::F16), None, 0.125),
            (e5m2, None, 0.01),
            (QuantArgs::mxfp4(), None, 0.25),
            (QuantArgs::nvfp4(), Some(700.0), 120.0 / 700.0),
        ]
    }

    #[test]
    fn gradients_of_float_codes_are_those_of_finite_differences() {
        for (args, global, scale) in float_schemes() {
            let p = args.in_effect(args.stored_learned_qparams(scale, 0.0, global), global);
            assert_eq!(p.scale, scale, "{args:?}: the example is stored exactly");
            let (f, s) = (args.qtype.float().unwrap(), f64::from(scale));
            let largest = f64::from(f.max());
            let (mut inside, mut outside) = (0, 0);
            // Every binade, beyond the ends too.
            for i in 0..4000 {
                let c = (i as f32 - 2000.0) / 2000.0;
                let x = (c.powi(3) * 1.2 + 1e-5) * f.max() * scale;
                let t = f64::from(x / scale);
                if (t.abs() - largest).abs() < 1e-3 * largest {
                    continue;
                }
                // What rounding added stays, as a constant; the clip does not.
                let r = f64::from(f.round(x / scale)) - t;
                let value = |x: f64, s: f64| if t.abs() < largest { (x / s + r) * s } else { largest.copysign(t) * s };
                let h = 1e-4 * s;
                let slope = [
                    (value(f64::from(x) + h, s) - value(f64::from(x) - h, s)) / (2.0 * h),
                    (value(f64::from(x), s + h) - value(f64::from(x), s - h)) / (2.0 * h),
                ];
                if t.abs() < largest {
                    inside += 1
                } else {
                    outside += 1
                }
                let [dx, ds, dz] = args.learned_gradients(x, p);
                assert_eq!(dz, 0.0);
                for (a, b) in [dx, ds].into_iter().zip(slope) {
                    assert!((f64::from(a) - b).abs() < 1e-5 * (1.0 + t.abs()), "{args:?} {x}: {a} against {b}");
                }
            }
            assert!(inside > 3000 && outside > 100, "{args:?} {inside} {outside}");
        }
    }

    #[test]
    fn scales_of_float_codes_ship_stored_and_never_beyond_their_dtype() {
        let mx = QuantArgs::mxfp4();
        assert_eq!(
            [0.2, 0.3, 0.19, 0.0, -3.0].map(|s| mx.learned_qparams(s, 0.0).scale),
            [0.25, 0.25, 0.25, FloatType::F8E8M0.min_positive(), FloatType::F8E8M0.min_positive()]
        );
        let (nv, global) = (QuantArgs::nvfp4(), Some(100.0));
        let stored = |s: f32| nv.stored_learned_qparams(s, 0.0, global).scale;
        assert_eq!([1.0, 1.02, 4.48, 99.0, 0.0, -1.0].map(stored), [96.0, 104.0, 448.0, 448.0, 0.015625, 0.015625]);
        assert!(stored(f32::NAN).is_nan() && mx.learned_qparams(f32::NAN, 0.0).scale.is_nan());
        // A stored scale under any global one comes back from the one in effect.
        for i in 1..127u8 {
            for global in [1.0, 3.3, 2688.0 / 0.013, 1e30] {
                let local = MiniFloat::E4M3.decode(i);
                assert_eq!(nv.stored_learned_qparams(local / global, 0.0, Some(global)).scale, local);
            }
        }
    }

    #[test]
    fn scales_of_tokens_are_not_learned() {
        for args in [QuantArgs::nvfp4_tokens(), QuantArgs::fp8(Granularity::PerToken, FloatType::F32)] {
            let e = args.learned_shape(4, 64).unwrap_err();
            assert!(matches!(&e, QuantError::Setting { got, .. } if got.contains("when the model runs")), "{e}");
        }
        assert_eq!(QuantArgs::fp8(Granularity::PerBlock(3, 5), FloatType::F32).learned_shape(7, 11).unwrap(), [3, 3]);
    }

    /// The clipped identity in f64 that the straight-through gradient differentiates: the code is not rounded but for the
    /// constant `r` that rounding added at the point.
    fn relaxed(args: &QuantArgs, x: f64, scale: f64, zero: f64, r: f64) -> f64 {
        let (qmin, qmax) = (f64::from(args.qtype.qmin()), f64::from(args.qtype.qmax()));
        let c = (x / scale + zero).clamp(qmin, qmax);
        let q = if c > qmin && c < qmax { c + r } else { c };
        (q - zero) * scale
    }

    #[test]
    fn gradients_are_those_of_finite_differences_for_every_type() {
        for qtype in QuantType::INTS {
            for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                let args = QuantArgs { qtype, mapping, ..QuantArgs::int4(Granularity::PerTensor, FloatType::F32) };
                let zero = if mapping == Mapping::Symmetric { 0 } else { qtype.qmin() + 1 };
                let p = QParams { scale: 0.25, zero };
                let (lo, hi) = (qtype.qmin() - zero, qtype.qmax() - zero);
                let (mut inside, mut outside) = (0, 0);
                for i in -400..400 {
                    let x = 0.25
                        * (lo.max(-20) as f32 - 2.0 + (hi.min(20) - lo.max(-20) + 4) as f32 * (i + 400) as f32 / 800.0)
                        + 0.003;
                    let (c, s) = (f64::from(x) / 0.25 + f64::from(zero), 0.25f64);
                    let (qmin, qmax) = (f64::from(qtype.qmin()), f64::from(qtype.qmax()));
                    if (c - qmin).abs() < 1e-3 || (c - qmax).abs() < 1e-3 {
                        continue;
                    }
                    if c > qmin && c < qmax {
                        inside += 1
                    } else {
                        outside += 1
                    }
                    let r = c.round_ties_even() - c;
                    let h = 1e-6;
                    let f =
                        |dx: f64, ds: f64, dz: f64| relaxed(&args, f64::from(x) + dx, s + ds, f64::from(zero) + dz, r);
                    let slope = [
                        (f(h, 0.0, 0.0) - f(-h, 0.0, 0.0)) / (2.0 * h),
                        (f(0.0, h, 0.0) - f(0.0, -h, 0.0)) / (2.0 * h),
                        (f(0.0, 0.0, h) - f(0.0, 0.0, -h)) / (2.0 * h),
                    ];
                    for (a, b) in args.learned_gradients(x, p).into_iter().zip(slope) {
                        assert!((f64::from(a) - b).abs() < 1e-4 * (1.0 + b.abs()), "{args:?} {x}: {a} against {b}");
                    }
                }
                assert!(inside > 100 && (outside > 50 || qtype == QuantType::Int8), "{qtype:?} {inside} {outside}");
            }
        }
    }

    #[test]
    fn gradients_of_codes_are_those_of_finite_differences_and_give_those_of_values() {
        for qtype in QuantType::INTS {
            let mapping = Mapping::Asymmetric;
            let args = QuantArgs { qtype, mapping, ..QuantArgs::int4(Granularity::PerTensor, FloatType::F32) };
            let p = QParams { scale: 0.25, zero: qtype.qmin() + 1 };
            let (qmin, qmax) = (f64::from(qtype.qmin()), f64::from(qtype.qmax()));
            for i in 0..900 {
                let x = 0.25 * (-3.0 + (qmax - qmin + 6.0) as f32 * i as f32 / 900.0) + 0.003;
                let (s, z) = (0.25f64, f64::from(p.zero));
                let c = f64::from(x) / s + z;
                if (c - qmin).abs() < 1e-3 || (c - qmax).abs() < 1e-3 {
                    continue;
                }
                let code = |x: f64, s: f64, z: f64| relaxed(&args, x, s, z, c.round_ties_even() - c) / s;
                let (x64, h) = (f64::from(x), 1e-6);
                let slope = [
                    (code(x64 + h, s, z) - code(x64 - h, s, z)) / (2.0 * h),
                    (code(x64, s + h, z) - code(x64, s - h, z)) / (2.0 * h),
                    (code(x64, s, z + h) - code(x64, s, z - h)) / (2.0 * h),
                ];
                let got = args.learned_code_gradients(x, p);
                for (a, b) in got.into_iter().zip(slope) {
                    assert!((f64::from(a) - b).abs() < 1e-4 * (1.0 + b.abs()), "{args:?} {x}: {a} against {b}");
                }
                let code = f32::from(args.quantize(x, p)) - p.zero as f32;
                let value = [got[0] * p.scale, code + got[1] * p.scale, got[2] * p.scale];
                for (a, b) in value.into_iter().zip(args.learned_gradients(x, p)) {
                    assert!((a - b).abs() <= 1e-6 * (1.0 + code.abs()), "{args:?} {x}: {a} against {b}");
                }
            }
        }
    }

    #[test]
    fn what_ships_is_stored_exactly_and_never_zero() {
        for dtype in FloatType::ALL {
            let args = QuantArgs { mapping: Mapping::Asymmetric, ..QuantArgs::int4(Granularity::PerTensor, dtype) };
            for (scale, zero) in [(0.1, 3.4), (-0.1, 99.0), (0.0, -99.0), (1e-30, 0.5), (0.333, -2.5)] {
                let p = args.learned_qparams(scale, zero);
                assert!(p.scale > 0.0 && dtype.round(p.scale) == p.scale && (-8..=7).contains(&p.zero), "{p:?}");
            }
            assert_eq!(args.learned_qparams(0.5, 2.5), QParams { scale: 0.5, zero: 2 });
            assert!(args.learned_qparams(f32::NAN, 0.0).scale.is_nan());
        }
        assert_eq!(QuantArgs::int4(Granularity::PerTensor, FloatType::F32).learned_qparams(0.5, 2.5).zero, 0);
    }
}
