//! A quantized `[n, k]` matrix: codes, scales, zero points, and the reference walk that makes them. Neither a
//! disk layout (see `dsq-checkpoint`) nor a kernel layout (see `dsq-kernels`).

use crate::{Granularity, Mapping, QParams, QuantArgs, QuantError};
use std::borrow::Cow;
use std::ops::Range;

/// Groups whose largest magnitude is below this count as degenerate (all zero, or so small that no sum with
/// weights of ordinary size sees them): 2^-64.
pub const DEGENERATE_ABSMAX: f32 = 1.0 / (1u64 << 63) as f32 / 2.0;

/// Codes and quantization parameters of an `[n, k]` matrix (row major; `n` outputs, `k` the reduction).
#[derive(Debug, Clone, PartialEq)]
pub struct QuantizedMatrix {
    /// How it was quantized.
    pub args: QuantArgs,
    /// Outputs (rows).
    pub n: usize,
    /// Reduction dimension (columns).
    pub k: usize,
    /// Signed codes `[n, k]`; of float types the bit patterns.
    pub codes: Vec<i8>,
    /// Stored scales, shape [`QuantArgs::scale_shape`].
    pub scales: Vec<f32>,
    /// Zero points in the signed domain, as many as scales; empty when symmetric.
    pub zeros: Vec<i8>,
    /// What divides every scale; exactly where [`QuantArgs::has_global_scale`] says so.
    pub global_scale: Option<f32>,
}

impl QuantizedMatrix {
    /// Rounds `w` (`[n, k]`, row major) to the nearest point of the grid that its own values give (RTN).
    ///
    /// # Errors
    /// Non-finite values, a scale that overflows, a group size that does not divide `k`, a wrong length.
    pub fn quantize(w: &[f32], n: usize, k: usize, args: QuantArgs) -> Result<Self, QuantError> {
        let global = args.has_global_scale().then(|| QuantArgs::global_scale(absmax(w)));
        Self::quantize_under(w, n, k, args, global)
    }

    /// [`QuantizedMatrix::quantize`] under a given global scale, for layers that share one; `None` for schemes without.
    ///
    /// # Errors
    /// As [`QuantizedMatrix::quantize`], and for a global scale where there must be none, or the reverse.
    pub fn quantize_under(
        w: &[f32],
        n: usize,
        k: usize,
        args: QuantArgs,
        global: Option<f32>,
    ) -> Result<Self, QuantError> {
        let params = Self::stored_qparams_of(w, n, k, args, global)?;
        Self::quantize_on(w, n, k, args, &params, global)
    }

    /// The quantization parameters that `w`'s own values give by `args.observer`, one for each scale, row major. They are
    /// those in effect; what is stored may differ from them by a global scale.
    ///
    /// # Errors
    /// As [`QuantizedMatrix::quantize`].
    pub fn qparams_of(w: &[f32], n: usize, k: usize, args: QuantArgs) -> Result<Vec<QParams>, QuantError> {
        let global = args.has_global_scale().then(|| QuantArgs::global_scale(absmax(w)));
        Self::qparams_under(w, n, k, args, global)
    }

    /// [`QuantizedMatrix::qparams_of`] under a given global scale; `None` for schemes without.
    ///
    /// # Errors
    /// As [`QuantizedMatrix::quantize_under`].
    pub fn qparams_under(
        w: &[f32],
        n: usize,
        k: usize,
        args: QuantArgs,
        global: Option<f32>,
    ) -> Result<Vec<QParams>, QuantError> {
        let stored = Self::stored_qparams_of(w, n, k, args, global)?;
        Ok(stored.into_iter().map(|p| args.in_effect(p, global)).collect())
    }

    fn stored_qparams_of(
        w: &[f32],
        n: usize,
        k: usize,
        args: QuantArgs,
        global: Option<f32>,
    ) -> Result<Vec<QParams>, QuantError> {
        check_len("weight", n * k, w.len())?;
        args.scale_shape(n, k)?;
        check_finite(w)?;
        args.check_global(global)?;
        groups(w, n, k, &args)
            .enumerate()
            .map(|(i, values)| {
                let (lo, hi) = min_max(&values);
                let error = |p| args.squared_error(&values, p);
                args.stored_weight_qparams(lo, hi, global, error).map_err(|e| e.in_group(i))
            })
            .collect()
    }

    /// Chooses codes against given parameters (learned scales, for instance), one for each scale, row major. For schemes
    /// without a global scale; see [`QuantizedMatrix::quantize_on`].
    ///
    /// # Errors
    /// Wrong lengths, a group size that does not divide `k`, non-finite values, a parameter that cannot be stored.
    pub fn quantize_with(
        w: &[f32],
        n: usize,
        k: usize,
        args: QuantArgs,
        params: &[QParams],
    ) -> Result<Self, QuantError> {
        Self::quantize_on(w, n, k, args, params, None)
    }

    /// Chooses codes against given stored parameters and a global scale.
    ///
    /// # Errors
    /// As [`QuantizedMatrix::quantize_with`], and for a global scale where there must be none, or the reverse.
    pub fn quantize_on(
        w: &[f32],
        n: usize,
        k: usize,
        args: QuantArgs,
        params: &[QParams],
        global: Option<f32>,
    ) -> Result<Self, QuantError> {
        check_len("weight", n * k, w.len())?;
        let [rows, groups] = args.scale_shape(n, k)?;
        check_len("scales", rows * groups, params.len())?;
        check_finite(w)?;
        args.check_global(global)?;
        let mut codes = Vec::with_capacity(w.len());
        for (scale, run) in args.runs(n, k) {
            let p = args.in_effect(params[scale], global);
            codes.extend(w[run].iter().map(|&x| args.quantize(x, p)));
        }
        let scales = params.iter().map(|p| p.scale).collect();
        let zeros = match args.mapping {
            Mapping::Symmetric => Vec::new(),
            Mapping::Asymmetric => params.iter().map(|p| p.zero as i8).collect(),
        };
        let out = Self { args, n, k, codes, scales, zeros, global_scale: global };
        out.validate()?;
        Ok(out)
    }

    /// Checks lengths, that every scale is finite, positive and already rounded to its dtype, that every code and zero point
    /// lies in the code range, and that no float code is NaN or infinite.
    ///
    /// # Errors
    /// The first violation.
    pub fn validate(&self) -> Result<(), QuantError> {
        let [rows, groups] = self.args.scale_shape(self.n, self.k)?;
        check_len("codes", self.n * self.k, self.codes.len())?;
        check_len("scales", rows * groups, self.scales.len())?;
        let zeros = if self.args.mapping == Mapping::Asymmetric { rows * groups } else { 0 };
        check_len("zero points", zeros, self.zeros.len())?;
        self.args.check_global(self.global_scale)?;
        for (group, &value) in self.scales.iter().enumerate() {
            if !(value.is_finite() && value > 0.0 && self.args.scale_dtype.round(value) == value) {
                return Err(QuantError::BadQParam { group, what: "scale", value });
            }
            // Under a global scale the one in effect may vanish or overflow.
            let scale = self.qparams(group).scale;
            if !(scale.is_finite() && scale > 0.0) {
                return Err(QuantError::BadQParam { group, what: "scale over the global scale", value: scale });
            }
        }
        if let Some(f) = self.args.qtype.float() {
            let bad = self.codes.iter().position(|&q| !f.is_finite(q as u8));
            return bad.map_or(Ok(()), |index| Err(QuantError::BadCode { index, code: self.codes[index] as u8 }));
        }
        let range = self.args.qtype.qmin()..=self.args.qtype.qmax();
        if let Some(group) = self.zeros.iter().position(|&z| !range.contains(&i32::from(z))) {
            return Err(QuantError::BadQParam { group, what: "zero point", value: f32::from(self.zeros[group]) });
        }
        // The ends first: this walk has no exits, so that it is as fast as memory.
        let (lo, hi) = self.codes.iter().fold((0i8, 0i8), |(lo, hi), &q| (lo.min(q), hi.max(q)));
        let inside = range.contains(&i32::from(lo)) && range.contains(&i32::from(hi));
        let outside = |&q: &i8| !range.contains(&i32::from(q));
        if let Some(i) = if inside { None } else { self.codes.iter().position(outside) } {
            return Err(QuantError::Setting {
                field: "code",
                expected: format!("{} to {}", range.start(), range.end()),
                got: self.codes[i].to_string(),
            });
        }
        Ok(())
    }

    /// The parameters of scale `i` (row major) that are in effect: the scale over the global one, where there is one.
    #[inline]
    pub fn qparams(&self, i: usize) -> QParams {
        let stored = QParams { scale: self.scales[i], zero: self.zeros.get(i).map_or(0, |&z| i32::from(z)) };
        self.args.in_effect(stored, self.global_scale)
    }

    /// Length of a group along `k`; the last may be shorter where groups are blocks.
    pub fn group_len(&self) -> usize {
        match self.args.granularity {
            Granularity::PerGroup(g) | Granularity::PerTokenGroup(g) | Granularity::PerBlock(_, g) => g,
            _ => self.k,
        }
    }

    /// Index of the scale that covers row `row`, group `group`.
    #[inline]
    pub fn scale_index(&self, row: usize, group: usize) -> usize {
        match self.args.granularity {
            Granularity::PerTensor => 0,
            Granularity::PerChannel | Granularity::PerToken => row,
            Granularity::PerGroup(g) | Granularity::PerTokenGroup(g) => row * (self.k / g) + group,
            Granularity::PerBlock(rows, columns) => row / rows * self.k.div_ceil(columns) + group,
        }
    }

    /// The values on the grid, `[n, k]` row major.
    pub fn dequantize(&self) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.codes.len());
        self.for_each_run(|_, values| out.extend_from_slice(values));
        out
    }

    /// Gives the values on the grid run by run, in order: the place of the first among all `n * k`, and the values, of no more
    /// memory than a cache holds.
    pub fn for_each_run(&self, mut take: impl FnMut(usize, &[f32])) {
        const MOST: usize = 1 << 12;
        let mut values = Vec::with_capacity(MOST.min(self.codes.len()));
        for (scale, run) in self.args.runs(self.n, self.k) {
            let (p, mut at) = (self.qparams(scale), run.start);
            for codes in self.codes[run].chunks(MOST) {
                values.clear();
                values.extend(codes.iter().map(|&q| self.args.dequantize(q, p)));
                take(at, &values);
                at += codes.len();
            }
        }
    }

    /// Groups of `w` that carry nothing (largest magnitude below [`DEGENERATE_ABSMAX`]), as flat scale indices.
    pub fn degenerate_groups(w: &[f32], n: usize, k: usize, args: QuantArgs) -> Result<Vec<usize>, QuantError> {
        check_len("weight", n * k, w.len())?;
        args.scale_shape(n, k)?;
        Ok(groups(w, n, k, &args)
            .enumerate()
            .filter(|(_, c)| c.iter().all(|x| x.abs() < DEGENERATE_ABSMAX))
            .map(|(i, _)| i)
            .collect())
    }
}

impl QuantArgs {
    /// The runs of a row-major `[n, k]` matrix in which one scale holds, in order, each with its scale's index. Of a shape
    /// that [`QuantArgs::scale_shape`] accepts.
    pub fn runs(&self, n: usize, k: usize) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let (len, rows) = match self.granularity {
            Granularity::PerTensor => (n * k, 1),
            Granularity::PerChannel | Granularity::PerToken => (k, 1),
            Granularity::PerGroup(g) | Granularity::PerTokenGroup(g) => (g, 1),
            Granularity::PerBlock(rows, columns) => (columns, rows),
        };
        let len = len.max(1);
        let width = if self.granularity == Granularity::PerTensor { n * k } else { k };
        let (down, across) = ((n * k).checked_div(width).unwrap_or(0), width.div_ceil(len));
        (0..down).flat_map(move |row| {
            (0..across).map(move |i| {
                let start = row * width + i * len;
                (row / rows * across + i, start..(start + len).min((row + 1) * width))
            })
        })
    }

    /// Whether there is a global scale where there must be one, and none elsewhere.
    ///
    /// # Errors
    /// [`QuantError::Setting`], and [`QuantError::BadQParam`] for one that is not finite and positive.
    pub fn check_global(&self, global: Option<f32>) -> Result<(), QuantError> {
        let setting = |expected: &str, got: String| {
            Err(QuantError::Setting { field: "global_scale", expected: expected.into(), got })
        };
        match (self.has_global_scale(), global) {
            (false, None) => Ok(()),
            (true, Some(g)) if g.is_finite() && g > 0.0 => Ok(()),
            (true, Some(value)) => Err(QuantError::BadQParam { group: 0, what: "global scale", value }),
            (true, None) => setting("a finite positive number", "none".into()),
            (false, Some(g)) => setting("none: only NVFP4 has one", g.to_string()),
        }
    }
}

/// The values that each scale is for, in the order of the scales.
fn groups<'a>(w: &'a [f32], n: usize, k: usize, args: &QuantArgs) -> impl Iterator<Item = Cow<'a, [f32]>> {
    let (rows, columns) = match args.granularity {
        Granularity::PerBlock(rows, columns) => (rows, columns),
        // One run is one group.
        _ => (1, k),
    };
    let blocks = matches!(args.granularity, Granularity::PerBlock(..));
    let whole = if blocks { None } else { Some(args.runs(n, k).map(|(_, run)| Cow::Borrowed(&w[run]))) };
    let parts = blocks.then(|| {
        (0..n).step_by(rows).flat_map(move |top| {
            (0..k).step_by(columns).map(move |left| {
                let right = (left + columns).min(k);
                (top..(top + rows).min(n)).flat_map(|r| &w[r * k + left..r * k + right]).copied().collect()
            })
        })
    });
    whole.into_iter().flatten().chain(parts.into_iter().flatten().map(Cow::Owned))
}

fn absmax(w: &[f32]) -> f32 {
    w.iter().fold(0.0f32, |m, x| m.max(x.abs()))
}

pub(crate) fn check_len(what: &'static str, expected: usize, got: usize) -> Result<(), QuantError> {
    if expected == got { Ok(()) } else { Err(QuantError::Length { what, expected, got }) }
}

pub(crate) fn check_finite(w: &[f32]) -> Result<(), QuantError> {
    match w.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(index) => {
            Err(QuantError::NonFinite { index, value: w[index], count: w.iter().filter(|x| !x.is_finite()).count() })
        }
    }
}

pub(crate) fn min_max(x: &[f32]) -> (f32, f32) {
    x.iter().fold((0.0f32, 0.0f32), |(lo, hi), &v| (lo.min(v), hi.max(v)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::normal;
    use crate::{FloatType, QuantType, WeightObserver};
    use proptest::prelude::*;

    #[test]
    fn c001_degenerate_groups_stay_finite_and_leave_others_alone() {
        let k = 256;
        let mut w = normal(k, 1);
        w.extend((0..k).map(|i| if i % 2 == 0 { 1e-30 } else { -1e-30 }));
        w.extend(vec![0.0; k]);
        w.extend((0..k).map(|i| if i == 5 { 1e-38 } else { 0.0 }));
        for dtype in FloatType::ALL {
            for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                let args = QuantArgs { mapping, ..QuantArgs::int4(Granularity::PerGroup(32), dtype) };
                let all = QuantizedMatrix::quantize(&w, 4, k, args).unwrap();
                let alone = QuantizedMatrix::quantize(&w[..k], 1, k, args).unwrap();
                let values = all.dequantize();
                assert_eq!(values[..k], alone.dequantize()[..]);
                for (v, x) in values[k..].iter().zip(&w[k..]) {
                    assert!(v.is_finite() && (v - x).abs() <= 1e-30, "{dtype} {mapping:?}: {x} -> {v}");
                }
                let degenerate = QuantizedMatrix::degenerate_groups(&w, 4, k, args).unwrap();
                assert_eq!(degenerate, (8..32).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn c005_f16_scale_overflow_names_group_and_value() {
        let mut w = normal(4 * 64, 2);
        w[2 * 64 + 40] = 6e5;
        let args = QuantArgs::int4(Granularity::PerGroup(32), FloatType::F16);
        let err = QuantizedMatrix::quantize(&w, 4, 64, args).unwrap_err();
        assert!(matches!(err, QuantError::ScaleOverflow { group: 5, hi, .. } if hi == 6e5), "{err}");
        let args = QuantArgs { scale_dtype: FloatType::Bf16, ..args };
        assert!(QuantizedMatrix::quantize(&w, 4, 64, args).unwrap().dequantize().iter().all(|x| x.is_finite()));
    }

    #[test]
    fn c015_error_is_that_of_an_f64_reference_at_every_group_size() {
        let (n, k) = (64, 4096);
        let w = normal(n * k, 3);
        let mut last = 0.0f64;
        for g in [32, 64, 128, 256, 512, 1024, 2048, 4096] {
            let q =
                QuantizedMatrix::quantize(&w, n, k, QuantArgs::int4(Granularity::PerGroup(g), FloatType::F32)).unwrap();
            let err: f64 = q.dequantize().iter().zip(&w).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
            let reference: f64 = w
                .chunks(g)
                .flat_map(|c| {
                    let s = c.iter().fold(0.0f64, |m, &x| m.max(f64::from(x).abs())) / 7.5;
                    c.iter().map(move |&x| {
                        ((f64::from(x) / s).clamp(-8.0, 7.0).round_ties_even() * s - f64::from(x)).powi(2)
                    })
                })
                .sum::<f64>()
                .sqrt();
            assert!((err / reference - 1.0).abs() < 1e-4, "g {g}: {err} against {reference}");
            assert!(last == 0.0 || err / last < 1.3, "g {g}: {last} -> {err}");
            last = err;
        }
    }

    #[test]
    fn f022_non_finite_weights_are_refused_with_index_and_count() {
        let mut w = normal(64, 4);
        w[7] = f32::NAN;
        w[40] = f32::INFINITY;
        let args = QuantArgs::int4(Granularity::PerGroup(32), FloatType::F32);
        let err = QuantizedMatrix::quantize(&w, 2, 32, args).unwrap_err();
        assert!(matches!(err, QuantError::NonFinite { index: 7, count: 2, .. }), "{err}");
    }

    #[test]
    fn f084_group_size_that_does_not_divide_is_refused() {
        let args = QuantArgs::int4(Granularity::PerGroup(128), FloatType::F32);
        let err = QuantizedMatrix::quantize(&[0.0; 3420], 1, 3420, args).unwrap_err();
        assert_eq!(err, QuantError::GroupNotDividing { k: 3420, group_size: 128 });
    }

    proptest! {
        #[test]
        fn requantizing_the_grid_with_its_own_scales_is_exact(seed in 0u64..1000, gran in 0usize..3, asym: bool, qtype in 0usize..4, dtype in 0usize..3) {
            let (n, k) = (6, 96);
            let w = normal(n * k, seed);
            let args = QuantArgs {
                qtype: QuantType::INTS[qtype],
                granularity: [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(32)][gran],
                mapping: if asym { Mapping::Asymmetric } else { Mapping::Symmetric },
                scale_dtype: FloatType::ALL[dtype],
                observer: WeightObserver::MinMax,
            };
            let q = QuantizedMatrix::quantize(&w, n, k, args).unwrap();
            let params: Vec<_> = (0..q.scales.len()).map(|i| q.qparams(i)).collect();
            let again = QuantizedMatrix::quantize_with(&q.dequantize(), n, k, args, &params).unwrap();
            prop_assert_eq!(&again, &q);
            // Half a step where nothing clips. At a clipped end the zero point is off by up to half a step, and the stored
            // scale by its dtype's rounding, over as many codes as there are; symmetric codes lack half a step there.
            let unit = [2f32.powi(-24), 2f32.powi(-11), 2f32.powi(-8)][dtype];
            let steps = 0.5 + (args.qtype.qmax() - args.qtype.qmin()) as f32 * unit;
            for (i, (v, x)) in q.dequantize().iter().zip(&w).enumerate() {
                let p = q.qparams(q.scale_index(i / k, i % k / q.group_len().max(1)));
                prop_assert!((v - x).abs() <= p.scale * steps * 1.001, "{} -> {}", x, v);
            }
        }
    }
}
