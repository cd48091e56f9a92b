//! Point estimates with 95% intervals by the percentile bootstrap over blocks. Which blocks is the caller's choice
//! (windows of text, images); values inside a block may depend on each other, blocks are taken as independent.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// The seed of every bootstrap: the same blocks are drawn for every metric and every run.
pub const BOOTSTRAP_SEED: u64 = 0x6473_715f_6576_616c;

/// How many times the blocks are resampled.
pub const RESAMPLES: usize = 2000;

/// A measured value and its 95% confidence interval. An interval that could not be had (fewer than two blocks) is
/// infinite at both ends and is left out of reports.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    /// The value on the whole input.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

impl Estimate {
    /// A value of which nothing more is known.
    pub fn without_interval(value: f64) -> Self {
        Self { value, low: f64::NEG_INFINITY, high: f64::INFINITY }
    }

    /// The value of `statistic` on all blocks, with its bootstrap interval.
    pub(crate) fn of_blocks(blocks: usize, statistic: impl Fn(&mut dyn Iterator<Item = usize>) -> f64) -> Self {
        let value = statistic(&mut (0..blocks));
        match bootstrap_interval(blocks, BOOTSTRAP_SEED, statistic) {
            Some((low, high)) => Self { value, low, high },
            None => Self::without_interval(value),
        }
    }

    /// Whether both ends are finite.
    pub fn has_interval(&self) -> bool {
        self.low.is_finite() && self.high.is_finite()
    }
}

/// The 2.5% and 97.5% quantiles of `statistic` over [`RESAMPLES`] draws of `blocks` block indices with replacement
/// (ChaCha8 from `seed`; quantiles by linear interpolation between order statistics). `None` with fewer than two
/// blocks, or when a draw gives NaN.
pub fn bootstrap_interval(
    blocks: usize,
    seed: u64,
    statistic: impl Fn(&mut dyn Iterator<Item = usize>) -> f64,
) -> Option<(f64, f64)> {
    if blocks < 2 {
        return None;
    }
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let mut values: Vec<f64> = (0..RESAMPLES)
        .map(|_| statistic(&mut (0..blocks).map(|_| rng.random_range(0..blocks as u64) as usize)))
        .collect();
    if values.iter().any(|v| v.is_nan()) {
        return None;
    }
    values.sort_unstable_by(f64::total_cmp);
    let quantile = |q: f64| {
        let at = q * (values.len() - 1) as f64;
        let (i, t) = (at.floor() as usize, at.fract());
        let next = values[(i + 1).min(values.len() - 1)];
        values[i] + t * (next - values[i])
    };
    Some((quantile(0.025), quantile(0.975)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_is_the_same_for_the_same_seed_and_holds_the_mean() {
        let x: Vec<f64> = (0..40).map(|i| f64::from(i * 37 % 40)).collect();
        let mean = |ids: &mut dyn Iterator<Item = usize>| ids.map(|i| x[i]).sum::<f64>() / 40.0;
        let a = bootstrap_interval(40, 1, mean).unwrap();
        assert_eq!(a, bootstrap_interval(40, 1, mean).unwrap());
        assert_ne!(a, bootstrap_interval(40, 2, mean).unwrap());
        // Normal theory for the mean of 0..39: 19.5 +- 1.96 * sqrt(133.25 / 40). The quantiles of 2000 draws have a
        // standard error of 0.05 deviations (sqrt(0.025 * 0.975 / 2000) / density 0.058), so 5 of them are 0.5.
        let half = 1.96 * (133.25f64 / 40.0).sqrt();
        assert!((a.0 - (19.5 - half)).abs() < 0.5 && (a.1 - (19.5 + half)).abs() < 0.5, "{a:?}");
    }

    #[test]
    fn one_block_has_no_interval() {
        assert_eq!(bootstrap_interval(1, 0, |_| 0.0), None);
        assert_eq!(bootstrap_interval(0, 0, |_| 0.0), None);
        let e = Estimate::of_blocks(1, |_| 3.0);
        assert!(e.value == 3.0 && !e.has_interval());
    }

    #[test]
    fn intervals_cover_the_truth_at_their_rate() {
        // 500 data sets of 60 blocks of exponential values (skewed, as losses are), true mean 1. The percentile
        // interval of a skewed mean covers a little less than its 95%: 93% is the textbook figure at this size. The
        // binomial standard deviation over 500 is 1.1%, so below 90% or above 98% is a fault of the code.
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let hits = (0..500)
            .filter(|&set| {
                let x: Vec<f64> = (0..60).map(|_| -(1.0 - rng.random::<f64>()).ln()).collect();
                let mean = |ids: &mut dyn Iterator<Item = usize>| ids.map(|i| x[i]).sum::<f64>() / 60.0;
                let (low, high) = bootstrap_interval(60, set, mean).unwrap();
                low <= 1.0 && 1.0 <= high
            })
            .count();
        assert!((450..=490).contains(&hits), "{hits} of 500");
    }
}
