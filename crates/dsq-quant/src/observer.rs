//! Observers: running minimum and maximum of an activation tensor. Not tied to a tensor library: they take slices
//! or the minimum and maximum that a kernel already computed.
//!
//! Several workers that each see a part of a batch hold the ranges of one that sees all of it when they reduce the part's minimum
//! and maximum over the workers before [`Observer::observe`]: both are exact in any order, a mean of ranges is neither. Histograms of
//! percentiles merge ([`crate::Percentile::merge`]).

use crate::{QParams, QuantArgs, QuantError};
use serde::{Deserialize, Serialize};

/// Collects a range over batches.
pub trait Observer {
    /// Takes the minimum and maximum of one batch.
    fn observe(&mut self, lo: f32, hi: f32);
    /// The range so far; `None` before the first batch.
    fn range(&self) -> Option<(f32, f32)>;

    /// The quantization parameters of the range so far.
    ///
    /// # Errors
    /// [`QuantError::Setting`] before the first batch, or as [`QuantArgs::qparams`].
    fn qparams(&self, args: &QuantArgs) -> Result<QParams, QuantError> {
        let (lo, hi) = self.range().ok_or_else(|| QuantError::Setting {
            field: "observer",
            expected: "at least one batch".into(),
            got: "none".into(),
        })?;
        args.qparams(lo, hi)
    }
}

/// Which observer a recipe names.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
#[serde(rename_all = "snake_case")]
pub enum ObserverKind {
    /// Widest range ever seen.
    MinMax,
    /// Exponential moving average of the batch ranges.
    #[default]
    MovingAverage,
    /// The range between two percentiles of all values ever seen ([`crate::Percentile`]); above 50, at most 100.
    Percentile(f64),
}

/// Widest range ever seen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
pub struct MinMax {
    range: Option<(f32, f32)>,
}

impl Observer for MinMax {
    fn observe(&mut self, lo: f32, hi: f32) {
        self.range = Some(self.range.map_or((lo, hi), |(a, b)| (a.min(lo), b.max(hi))));
    }
    fn range(&self) -> Option<(f32, f32)> {
        self.range
    }
}

/// `range <- range + (batch - range) * rate`, started at the first batch.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MovingAverage {
    rate: f32,
    range: Option<(f32, f32)>,
}

impl MovingAverage {
    /// `rate` in (0, 1]: the weight of the newest batch (0.01 is the field's default).
    pub fn new(rate: f32) -> Self {
        Self { rate, range: None }
    }

    /// Starts again from a saved range.
    pub fn with_range(rate: f32, range: Option<(f32, f32)>) -> Self {
        Self { rate, range }
    }
}

impl Observer for MovingAverage {
    fn observe(&mut self, lo: f32, hi: f32) {
        let step = |old: f32, new: f32| old + (new - old) * self.rate;
        self.range = Some(self.range.map_or((lo, hi), |(a, b)| (step(a, lo), step(b, hi))));
    }
    fn range(&self) -> Option<(f32, f32)> {
        self.range
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FloatType, Granularity};

    #[test]
    fn min_max_widens_and_moving_average_follows() {
        let mut a = MinMax::default();
        let mut b = MovingAverage::new(0.5);
        let args = QuantArgs::int4(Granularity::PerTensor, FloatType::F32);
        assert!(a.qparams(&args).is_err());
        for (lo, hi) in [(-1.0, 1.0), (-3.0, 0.5), (-2.0, 2.0)] {
            a.observe(lo, hi);
            b.observe(lo, hi);
        }
        assert_eq!(a.range(), Some((-3.0, 2.0)));
        assert_eq!(b.range(), Some((-2.0, 1.375)));
        assert_eq!(a.qparams(&args).unwrap().scale, 3.0 / 7.5);
    }

    #[test]
    fn parts_of_a_batch_reduced_before_are_the_whole_batch() {
        let batch = |seed: u32| (0..96).map(move |i| ((i * 37 + seed * 101) as f32 * 0.61).sin() * (seed + 1) as f32);
        let range = |x: &[f32]| x.iter().fold((f32::MAX, f32::MIN), |(lo, hi), &v| (lo.min(v), hi.max(v)));
        let (mut one, mut average) = (MinMax::default(), MovingAverage::new(0.1));
        let mut workers = vec![(MinMax::default(), MovingAverage::new(0.1)); 3];
        for seed in 0..5 {
            let x: Vec<f32> = batch(seed).collect();
            let (lo, hi) = range(&x);
            one.observe(lo, hi);
            average.observe(lo, hi);
            let parts: Vec<(f32, f32)> = x.chunks(32).map(range).collect();
            let (lo, hi) = parts.iter().fold((f32::MAX, f32::MIN), |(lo, hi), p| (lo.min(p.0), hi.max(p.1)));
            for (a, b) in &mut workers {
                a.observe(lo, hi);
                b.observe(lo, hi);
            }
        }
        for (a, b) in workers {
            assert_eq!((a, b), (one, average));
        }
    }
}
