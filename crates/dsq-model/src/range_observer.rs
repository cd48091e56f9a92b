//! The observers of activation ranges that a recipe names, as networks in training use them: fed with tensors, saved in
//! checkpoints. One type for image models and language models. The ranges themselves are `dsq_quant`'s; what is observed, and
//! when, is said in `resnet` and in `dsq-train`.

use crate::llama::host;
use crate::ops::slice_op::{Slice, SliceOp, apply1};
use burn::tensor::Tensor;
use dsq_kernels::conv;
use dsq_quant::{MinMax, MovingAverage, Observer, ObserverKind, Percentile, QParams, QuantArgs, QuantError};
use std::sync::{Arc, OnceLock};

/// An observer of one activation.
#[derive(Debug, Clone, PartialEq)]
pub enum RangeObserver {
    /// Widest range.
    MinMax(MinMax),
    /// Moving average.
    MovingAverage(MovingAverage),
    /// Between two percentiles.
    Percentile(Percentile),
}

impl RangeObserver {
    /// That has seen nothing; `rate` is that of the moving average, 0 excluded, to 1.
    ///
    /// # Errors
    /// [`QuantError::Setting`] for a percentile out of range.
    pub fn new(kind: ObserverKind, rate: f32) -> Result<Self, QuantError> {
        Ok(match kind {
            ObserverKind::MinMax => RangeObserver::MinMax(MinMax::default()),
            ObserverKind::MovingAverage => RangeObserver::MovingAverage(MovingAverage::new(rate)),
            ObserverKind::Percentile(p) => RangeObserver::Percentile(Percentile::new(p)?),
        })
    }

    /// Takes the values of one batch. The gradient of `x` is not touched.
    ///
    /// # Errors
    /// [`QuantError::NonFinite`] where values are counted; where a range is followed such a value shows in the range.
    pub fn observe<const D: usize>(&mut self, x: &Tensor<D>) -> Result<(), QuantError> {
        let follow = |o: &mut dyn Observer| {
            let (lo, hi) = range(x);
            o.observe(lo, hi);
        };
        match self {
            RangeObserver::MinMax(o) => follow(o),
            RangeObserver::MovingAverage(o) => follow(o),
            RangeObserver::Percentile(o) => return o.observe(&host(x.clone())),
        }
        Ok(())
    }

    /// The range so far, as it was met (0 need not lie in it); `None` before the first batch.
    pub fn range(&self) -> Option<(f32, f32)> {
        match self {
            RangeObserver::MinMax(o) => o.range(),
            RangeObserver::MovingAverage(o) => o.range(),
            RangeObserver::Percentile(o) => o.range(),
        }
    }

    /// The quantization parameters of the range so far.
    ///
    /// # Errors
    /// [`QuantError::Setting`] before the first batch, or as [`QuantArgs::qparams`].
    pub fn qparams(&self, args: &QuantArgs) -> Result<QParams, QuantError> {
        match self {
            RangeObserver::MinMax(o) => o.qparams(args),
            RangeObserver::MovingAverage(o) => o.qparams(args),
            RangeObserver::Percentile(o) => o.qparams(args),
        }
    }

    /// What a checkpoint keeps: the range `[lo, hi]`, or [`Percentile::state`]; nothing before the first batch.
    pub fn state(&self) -> Vec<f32> {
        match self {
            RangeObserver::Percentile(o) => o.state(),
            other => other.range().map_or(vec![], |(lo, hi)| vec![lo, hi]),
        }
    }

    /// What gave this [`RangeObserver::state`]; `None` when nothing can have.
    pub fn from_state(kind: ObserverKind, rate: f32, state: &[f32]) -> Option<Self> {
        let range = match (kind, state) {
            (ObserverKind::Percentile(p), _) => return Percentile::from_state(p, state).map(RangeObserver::Percentile),
            (_, []) => None,
            (_, &[lo, hi]) => Some((lo, hi)),
            _ => return None,
        };
        let mut observer = Self::new(kind, rate).ok()?;
        match (&mut observer, range) {
            (RangeObserver::MinMax(o), Some((lo, hi))) => o.observe(lo, hi),
            (RangeObserver::MovingAverage(o), _) => *o = MovingAverage::with_range(rate, range),
            _ => {}
        }
        Some(observer)
    }
}

/// The smallest and largest value of a tensor, read where they lie.
fn range<const D: usize>(x: &Tensor<D>) -> (f32, f32) {
    let op = Arc::new(Range(OnceLock::new()));
    let _: Tensor<1> = apply1(op.clone(), x.clone().detach());
    op.0.get().copied().unwrap_or_default()
}

#[derive(Debug)]
struct Range(OnceLock<(f32, f32)>);

impl SliceOp for Range {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        let _ = self.0.set(conv::min_max(x[0].data));
        (vec![0.0], vec![1])
    }

    fn backward(&self, _x: &[Slice], _g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        vec![None]
    }
}
