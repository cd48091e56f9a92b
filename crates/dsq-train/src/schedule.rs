//! The learning rate of phases that end at zero: CNN training and block-wise training. Not that of language models, which has
//! a floor (see `lm`, `LmPhase::rate`).

/// The learning rate of step `step` of `steps`: linear up to `peak` over `warmup` steps, then half a cosine down to zero.
pub(crate) fn learning_rate(step: usize, steps: usize, warmup: usize, peak: f64) -> f64 {
    if step < warmup {
        return peak * (step + 1) as f64 / warmup as f64;
    }
    let t = (step - warmup) as f64 / (steps - warmup.min(steps - 1)) as f64;
    peak * 0.5 * (1.0 + (std::f64::consts::PI * t).cos())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rate_rises_then_falls() {
        let rates: Vec<f64> = (0..10).map(|s| learning_rate(s, 10, 2, 1.0)).collect();
        assert_eq!(rates[..3], [0.5, 1.0, 1.0]);
        assert!(rates[2..].windows(2).all(|w| w[1] < w[0]) && rates[9] > 0.0 && rates[9] < 0.1);
        assert_eq!(learning_rate(0, 1, 0, 0.3), 0.3);
        assert!(learning_rate(3, 4, 9, 1.0).is_finite());
    }
}
