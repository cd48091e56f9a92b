//! Looking at a comparison while it runs, and stopping once it is decided: intervals that hold at all looks together. Not the interval
//! of a finished run (see `bootstrap.rs`), and no verdict (see `verdict.rs`).
//!
//! The interval is the asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (Time-uniform central limit
//! theory and asymptotic confidence sequences, Annals of Statistics 52(6), 2024, theorem 2.2): after `t` values of mean `m` and standard deviation `s`,
//!
//! `m +- s sqrt(2 (t r^2 + 1) / (t^2 r^2) * ln(sqrt(t r^2 + 1) / a))`
//!
//! holds the true mean at every `t` at once with probability `1 - a` (in the limit of many values, as any interval by a
//! standard error; so no look is taken before [`FIRST_LOOK`] of them). `r` sets where it is tightest: their equation for the best `r`
//! at `t*`, `r^2 = (-2 ln a + ln(-2 ln a + 1)) / t*`.
//!
//! It is about 1.5 times as wide as an interval for one look at the same place: the price of looking at any time.
//! The order of the blocks must not depend on what is in them: callers draw it.

use crate::Samples;

/// Blocks before the first look.
pub const FIRST_LOOK: usize = 16;

/// How often the interval may miss the truth at any look: 5%.
const ALPHA: f64 = 0.05;

/// The change of a ratio of sums from one run to another, over the same blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Change {
    /// On all blocks so far.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// Half the width of the interval after `t` values with standard deviation `s`, tightest at `best` values.
fn half_width(t: usize, s: f64, best: usize) -> f64 {
    let (t, best) = (t as f64, best.max(1) as f64);
    let rho2 = (-2.0 * ALPHA.ln() + (-2.0 * ALPHA.ln() + 1.0).ln()) / best;
    s * (2.0 * (t * rho2 + 1.0) / (t * t * rho2) * ((t * rho2 + 1.0).sqrt() / ALPHA).ln()).sqrt()
}

/// The change of `metric` from `old` to `new`, where `new` has the first blocks of `old` (whose number is the most there can be), with an
/// interval that holds at all looks. `perplexity` is compared by the mean of its logarithm and given back as
/// `exp(change of the mean) * old - old`. `None` for other blocks, too few, or a metric that is no ratio of sums.
pub(crate) fn change(new: &Samples, old: &Samples, metric: &str) -> Option<Change> {
    let (n, most) = (new.blocks(), old.blocks());
    if n < FIRST_LOOK || n > most {
        return None;
    }
    let old = old.first(n);
    if !new.same_blocks(&old) {
        return None;
    }
    let (a, b) = (new.ratio_parts(metric)?, old.ratio_parts(metric)?);
    let size: f64 = a.1.iter().sum();
    let differences: Vec<f64> = a.0.iter().zip(&b.0).map(|(x, y)| x - y).collect();
    let value = differences.iter().sum::<f64>() / size;
    // A ratio of means is, to first order, the mean of these (the delta method): blocks of unequal size count by it.
    let mean_size = size / n as f64;
    let squares: f64 = differences.iter().zip(&a.1).map(|(d, size)| ((d - value * size) / mean_size).powi(2)).sum();
    let deviation = (squares / (n - 1) as f64).sqrt();
    let half = half_width(n, deviation, most / 2);
    let (low, high) = (value - half, value + half);
    if metric != "perplexity" {
        return Some(Change { value, low, high });
    }
    let before = old.estimate_value(metric)?;
    let of = |x: f64| before * x.exp_m1();
    Some(Change { value: of(value), low: of(low), high: of(high) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn text(nll: Vec<f64>) -> Samples {
        Samples::Text { tokens: vec![100; nll.len()], nll, kl: vec![], agree: vec![] }
    }

    #[test]
    fn the_width_is_that_of_the_paper() {
        // Worked by hand for t = 100, s = 1, a = 0.05, best = 100: r^2 = (5.99146 + ln 6.99146) / 100 = 0.0793615,
        // 2 * 8.93615 / (100 * 7.93615) = 0.0225201, ln(sqrt(8.93615) / 0.05) = 4.090786; sqrt of the product.
        assert!((half_width(100, 1.0, 100) - 0.303_522).abs() < 1e-5, "{}", half_width(100, 1.0, 100));
    }

    #[test]
    fn all_looks_together_miss_at_most_their_rate() {
        // 400 runs of 256 blocks whose true change is 0, looked at after every block from the first look on. The share of runs with any
        // look that excludes 0 is at most 5% in the limit; blocks of exponential differences are skewed, and a standard deviation of the
        // estimate over 400 runs is 1.1%, so 9% or more would be a fault of the code (4 standard deviations above).
        let mut rng = ChaCha8Rng::seed_from_u64(11);
        let mut wrong = 0;
        for _ in 0..400 {
            let old: Vec<f64> = (0..256).map(|_| 300.0 + 50.0 * rng.random::<f64>()).collect();
            let noise = |rng: &mut ChaCha8Rng| -(1.0 - rng.random::<f64>()).ln() - 1.0;
            let new: Vec<f64> = old.iter().map(|x| x + noise(&mut rng)).collect();
            let (old, new) = (text(old), text(new));
            let misses = |n: usize| {
                let c = change(&new.first(n), &old, "perplexity").unwrap();
                c.low > 0.0 || c.high < 0.0
            };
            wrong += usize::from((FIRST_LOOK..=256).any(misses));
        }
        assert!(wrong < 36, "{wrong} of 400");
    }

    #[test]
    fn a_shift_is_found_long_before_the_end_and_its_size_is_right() {
        let mut rng = ChaCha8Rng::seed_from_u64(12);
        let old: Vec<f64> = (0..256).map(|_| 300.0 + 50.0 * rng.random::<f64>()).collect();
        // +2% of perplexity: 1.98 nats in 100 tokens, noise of a quarter of that.
        let new: Vec<f64> = old.iter().map(|x| x + 100.0 * 1.02f64.ln() + rng.random::<f64>() - 0.5).collect();
        let (old, new) = (text(old), text(new));
        let c = change(&new.first(FIRST_LOOK), &old, "perplexity").unwrap();
        let before = old.first(FIRST_LOOK).estimate_value("perplexity").unwrap();
        assert!(c.low > 0.01 * before && c.high < 0.03 * before && c.low < c.value && c.value < c.high, "{c:?}");
    }

    #[test]
    fn only_the_first_blocks_of_the_same_text_compare() {
        let a = text((0..40).map(f64::from).collect());
        assert_eq!(change(&a.first(FIRST_LOOK - 1), &a, "perplexity"), None);
        let same = change(&a.first(20), &a, "perplexity").unwrap();
        assert_eq!((same.value, same.low, same.high), (0.0, 0.0, 0.0));
        assert_eq!(change(&a.first(20), &a, "kl"), None);
        let Samples::Text { tokens, .. } = a.first(20) else { unreachable!() };
        let other = Samples::Text {
            tokens: tokens.iter().map(|t| t + 1).collect(),
            nll: vec![1.0; 20],
            kl: vec![],
            agree: vec![],
        };
        assert_eq!(change(&other, &a, "perplexity"), None);
    }
}
