//! Observers: running minimum and maximum of an activation tensor. Not tied to a tensor library: they take slices
//! or the minimum and maximum that a kernel already computed.

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
}
