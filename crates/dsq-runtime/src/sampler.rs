//! The choice of the next token from logits: greedy, or by temperature, top-k and top-p from a seeded generator.

use crate::RuntimeError;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Only this many most likely tokens; 0 for all.
    pub top_k: usize,
    /// Only the most likely tokens that together reach this probability; 1 for all.
    pub top_p: f32,
    /// Seed of the generator.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

/// A sampler and its generator.
#[derive(Debug)]
pub struct Sampler {
    settings: Sampling,
    rng: ChaCha8Rng,
}

impl Sampler {
    /// A sampler.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] for a setting out of range.
    pub fn new(settings: Sampling) -> Result<Self, RuntimeError> {
        let refuse = |what, expected: &str, got: f32| {
            Err(RuntimeError::Input { what, problem: format!("expected {expected}, got {got}") })
        };
        if !(settings.temperature >= 0.0 && settings.temperature <= 100.0) {
            return refuse("temperature", "a number from 0 to 100", settings.temperature);
        }
        if !(settings.top_p > 0.0 && settings.top_p <= 1.0) {
            return refuse("top_p", "a number above 0 and at most 1", settings.top_p);
        }
        Ok(Self { settings, rng: ChaCha8Rng::seed_from_u64(settings.seed) })
    }

    /// The next token. Among equal logits the lowest id wins.
    ///
    /// # Errors
    /// [`RuntimeError::Numerics`] for NaN, for infinity, and where nothing can be chosen.
    pub fn next(&mut self, logits: &[f32]) -> Result<u32, RuntimeError> {
        if let Some(&value) = logits.iter().find(|x| x.is_nan() || **x == f32::INFINITY) {
            return Err(RuntimeError::Numerics { what: "logits".into(), value });
        }
        let empty = || RuntimeError::Numerics { what: "logits".into(), value: f32::NEG_INFINITY };
        let best = (0..logits.len()).reduce(|a, b| if logits[b] > logits[a] { b } else { a }).ok_or_else(empty)?;
        if logits[best] == f32::NEG_INFINITY {
            return Err(empty());
        }
        if self.settings.temperature == 0.0 {
            return Ok(best as u32);
        }
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        if self.settings.top_k > 0 {
            order.truncate(self.settings.top_k);
        }
        let temperature = f64::from(self.settings.temperature);
        let weights: Vec<f64> =
            order.iter().map(|&i| (f64::from(logits[i] - logits[best]) / temperature).exp()).collect();
        let total: f64 = weights.iter().sum();
        let mut kept = 0;
        let mut mass = 0.0;
        while kept < weights.len() && (kept == 0 || mass < f64::from(self.settings.top_p) * total) {
            mass += weights[kept];
            kept += 1;
        }
        let mut at = self.rng.random::<f64>() * mass;
        for (&i, &w) in order.iter().zip(&weights[..kept]) {
            at -= w;
            if at < 0.0 {
                return Ok(i as u32);
            }
        }
        Ok(order[kept - 1] as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(settings: Sampling, logits: &[f32], times: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(settings).unwrap();
        let mut counts = vec![0; logits.len()];
        for _ in 0..times {
            counts[sampler.next(logits).unwrap() as usize] += 1;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_first_of_the_best() {
        assert_eq!(draw(Sampling::default(), &[0.0, 2.0, 2.0, -1.0], 3), [0, 3, 0, 0]);
    }

    #[test]
    fn frequencies_follow_the_softmax_and_the_seed_decides() {
        let settings = Sampling { temperature: 1.0, seed: 7, ..Default::default() };
        let logits = [(0.5f32).ln(), (0.3f32).ln(), (0.2f32).ln()];
        let n = 20_000;
        let counts = draw(settings, &logits, n);
        for (c, p) in counts.iter().zip([0.5f64, 0.3, 0.2]) {
            // Five standard deviations of a binomial.
            let bound = 5.0 * (p * (1.0 - p) * n as f64).sqrt();
            assert!((*c as f64 - p * n as f64).abs() < bound, "{counts:?}");
        }
        assert_eq!(counts, draw(settings, &logits, n));
        assert_ne!(counts, draw(Sampling { seed: 8, ..settings }, &logits, n));
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [(0.5f32).ln(), (0.3f32).ln(), (0.2f32).ln()];
        let base = Sampling { temperature: 1.0, ..Default::default() };
        assert_eq!(draw(Sampling { top_k: 1, ..base }, &logits, 50), [50, 0, 0]);
        assert_eq!(draw(Sampling { top_p: 0.6, ..base }, &logits, 500)[2], 0);
        assert_eq!(draw(Sampling { top_p: 0.4, ..base }, &logits, 50), [50, 0, 0]);
    }

    #[test]
    fn f120_settings_out_of_range_and_broken_logits_are_refused() {
        for (temperature, top_p) in [(f32::NAN, 1.0), (-1.0, 1.0), (1e9, 1.0), (1.0, 0.0), (1.0, 2.0)] {
            let settings = Sampling { temperature, top_p, ..Default::default() };
            assert_eq!(Sampler::new(settings).unwrap_err().exit_code(), 2);
        }
        let mut s = Sampler::new(Sampling::default()).unwrap();
        assert_eq!(s.next(&[0.0, f32::NAN]).unwrap_err().exit_code(), 6);
        assert_eq!(s.next(&[]).unwrap_err().exit_code(), 6);
        assert_eq!(s.next(&[f32::NEG_INFINITY; 2]).unwrap_err().exit_code(), 6);
    }
}
