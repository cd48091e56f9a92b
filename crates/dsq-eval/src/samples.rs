//! The raw sums behind a row, block by block, so that two runs on the same input can be compared pair by pair. Not
//! part of a printed report; baselines keep them.

use crate::Estimate;
use serde::{Deserialize, Serialize};

/// Sums per block.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Samples {
    /// One block is one window of text.
    Text {
        /// Predicted tokens in the window.
        tokens: Vec<u32>,
        /// Sum of negative log likelihoods, nats.
        nll: Vec<f64>,
        /// Sum of KL(reference || model), nats; empty without a reference.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        kl: Vec<f64>,
        /// Positions where model and reference have the same first choice; empty without a reference.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        agree: Vec<u32>,
    },
    /// One block is one image.
    Images {
        /// `1` where the first choice is the label, `0` elsewhere, one character an image.
        correct: String,
        /// The same for the five first choices; empty in older baselines.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        top5: String,
    },
    /// One block is one item of a task.
    Items {
        /// `1` where the gold answer is the likeliest; empty for texts to be predicted.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        accuracy: String,
        /// `1` where each token of the gold answer is the first choice.
        greedy: String,
    },
}

/// A metric as a function of the blocks it is taken over.
type Statistic<'a> = Box<dyn Fn(&mut dyn Iterator<Item = usize>) -> f64 + 'a>;

/// Sum over sum of what `of` gives for the blocks.
pub(crate) fn ratio(ids: &mut dyn Iterator<Item = usize>, of: impl Fn(usize) -> (f64, f64)) -> f64 {
    let (a, b) = ids.map(of).fold((0.0, 0.0), |(a, b), (x, y)| (a + x, b + y));
    a / b
}

impl Samples {
    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        match self {
            Samples::Text { tokens, .. } => tokens.len(),
            Samples::Images { correct, .. } => correct.len(),
            Samples::Items { greedy, .. } => greedy.len(),
        }
    }

    /// The first `n` blocks.
    pub fn first(&self, n: usize) -> Samples {
        fn cut<T: Clone>(v: &[T], n: usize) -> Vec<T> {
            v[..n.min(v.len())].to_vec()
        }
        let marks = |s: &str| s.chars().take(n).collect();
        match self {
            Samples::Text { tokens, nll, kl, agree } => {
                Samples::Text { tokens: cut(tokens, n), nll: cut(nll, n), kl: cut(kl, n), agree: cut(agree, n) }
            }
            Samples::Images { correct, top5 } => Samples::Images { correct: marks(correct), top5: marks(top5) },
            Samples::Items { accuracy, greedy } => Samples::Items { accuracy: marks(accuracy), greedy: marks(greedy) },
        }
    }

    /// Whether both are of the same blocks: the same windows of tokens, the same number of images or of items.
    pub fn same_blocks(&self, other: &Samples) -> bool {
        match (self, other) {
            (Samples::Text { tokens: a, .. }, Samples::Text { tokens: b, .. }) => a == b,
            (Samples::Images { .. }, Samples::Images { .. }) | (Samples::Items { .. }, Samples::Items { .. }) => {
                self.blocks() == other.blocks()
            }
            _ => false,
        }
    }

    /// Checks lengths and values.
    ///
    /// # Errors
    /// The first thing that is wrong, in words.
    pub fn validate(&self) -> Result<(), String> {
        match self {
            Samples::Text { tokens, nll, kl, agree } => {
                let n = tokens.len();
                for (what, len) in [("nll", nll.len()), ("kl", kl.len()), ("agree", agree.len())] {
                    if len != n && (what == "nll" || len != 0) {
                        return Err(format!("samples.{what}: expected {n} windows, got {len}"));
                    }
                }
                if kl.is_empty() != agree.is_empty() {
                    return Err("samples: expected kl and agree together, got one".into());
                }
                if let Some(x) = nll.iter().chain(kl).find(|x| !x.is_finite() || **x < 0.0) {
                    return Err(format!("samples: expected finite values of at least 0, got {x}"));
                }
                if tokens.contains(&0) || agree.iter().zip(tokens).any(|(a, t)| a > t) {
                    return Err("samples: expected agree <= tokens and tokens > 0 in every window".into());
                }
                Ok(())
            }
            Samples::Images { correct: all, top5: some } | Samples::Items { greedy: all, accuracy: some } => {
                if let Some(c) = all.chars().chain(some.chars()).find(|c| !matches!(c, '0' | '1')) {
                    return Err(format!("samples: expected 0 or 1 for each, got {c:?}"));
                }
                if !some.is_empty() && some.len() != all.len() {
                    return Err(format!("samples: expected {} of each kind, got {}", all.len(), some.len()));
                }
                Ok(())
            }
        }
    }

    /// The value of `metric` on the given blocks; `None` when these samples do not carry it.
    fn statistic(&self, metric: &str) -> Option<Statistic<'_>> {
        match (self, metric) {
            (Samples::Text { tokens, nll, .. }, "perplexity") => {
                Some(Box::new(move |ids| ratio(ids, |i| (nll[i], f64::from(tokens[i]))).exp()))
            }
            (Samples::Text { tokens, kl, .. }, "kl") if !kl.is_empty() => {
                Some(Box::new(move |ids| ratio(ids, |i| (kl[i], f64::from(tokens[i])))))
            }
            (Samples::Text { tokens, agree, .. }, "top1_agreement") if !agree.is_empty() => {
                Some(Box::new(move |ids| ratio(ids, |i| (f64::from(agree[i]), f64::from(tokens[i])))))
            }
            _ => {
                let marks = match (self, metric) {
                    (Samples::Images { correct, .. }, "top1") => correct,
                    (Samples::Images { top5, .. }, "top5") => top5,
                    (Samples::Items { accuracy, .. }, "accuracy") => accuracy,
                    (Samples::Items { greedy, .. }, "greedy") => greedy,
                    _ => return None,
                };
                let marks = marks.as_bytes();
                if marks.is_empty() {
                    return None;
                }
                Some(Box::new(move |ids| ratio(ids, |i| (f64::from(u8::from(marks[i] == b'1')), 1.0))))
            }
        }
    }

    /// Of metrics that are a ratio of sums over blocks (`kl`, `top1_agreement`, shares), or a growing function of one (`perplexity`, of the
    /// mean of `nll`): numerators and denominators, block by block.
    pub(crate) fn ratio_parts(&self, metric: &str) -> Option<(Vec<f64>, Vec<f64>)> {
        let marks = |s: &str| {
            let hits: Vec<f64> = s.bytes().map(|b| f64::from(u8::from(b == b'1'))).collect();
            let ones = vec![1.0; hits.len()];
            (!hits.is_empty()).then_some((hits, ones))
        };
        let per_token = |of: Vec<f64>, tokens: &[u32]| {
            (of.len() == tokens.len() && !of.is_empty()).then(|| (of, tokens.iter().map(|t| f64::from(*t)).collect()))
        };
        match (self, metric) {
            (Samples::Text { tokens, nll, .. }, "perplexity") => per_token(nll.clone(), tokens),
            (Samples::Text { tokens, kl, .. }, "kl") => per_token(kl.clone(), tokens),
            (Samples::Text { tokens, agree, .. }, "top1_agreement") => {
                per_token(agree.iter().map(|a| f64::from(*a)).collect(), tokens)
            }
            (Samples::Images { correct, .. }, "top1") => marks(correct),
            (Samples::Images { top5, .. }, "top5") => marks(top5),
            (Samples::Items { accuracy, .. }, "accuracy") => marks(accuracy),
            (Samples::Items { greedy, .. }, "greedy") => marks(greedy),
            _ => None,
        }
    }

    /// `metric` with its interval; `None` when these samples do not carry it.
    pub fn estimate(&self, metric: &str) -> Option<Estimate> {
        let statistic = self.statistic(metric)?;
        Some(Estimate::of_blocks(self.blocks(), statistic))
    }

    /// `metric` without its interval; `None` when these samples do not carry it.
    pub fn estimate_value(&self, metric: &str) -> Option<f64> {
        self.statistic(metric).map(|s| s(&mut (0..self.blocks())))
    }

    /// `self - other` of `metric` with the interval of the difference over the same blocks of both. `None` when the
    /// blocks are not the same (other windows, other images) or do not carry the metric.
    pub fn paired_difference(&self, other: &Samples, metric: &str) -> Option<Estimate> {
        combine(&[self, other], metric, |v| v[0] - v[1])
    }

    /// The same with sums rounded to 1e-6 nats a window, to keep baseline files small.
    pub fn rounded(&self) -> Samples {
        let round = |v: &Vec<f64>| v.iter().map(|x| (x * 1e6).round_ties_even() / 1e6).collect();
        match self {
            Samples::Text { tokens, nll, kl, agree } => {
                Samples::Text { tokens: tokens.clone(), nll: round(nll), kl: round(kl), agree: agree.clone() }
            }
            images => images.clone(),
        }
    }
}

/// `of` the values of `metric` in several samples, with the interval over blocks that are drawn for all of them together. `None` when
/// their blocks are not the same or do not carry the metric.
pub(crate) fn combine(samples: &[&Samples], metric: &str, of: impl Fn(&[f64]) -> f64) -> Option<Estimate> {
    if samples.windows(2).any(|w| !w[0].same_blocks(w[1])) {
        return None;
    }
    let statistics = samples.iter().map(|s| s.statistic(metric)).collect::<Option<Vec<_>>>()?;
    Some(Estimate::of_blocks(samples.first()?.blocks(), |ids| {
        let ids: Vec<usize> = ids.collect();
        let values: Vec<f64> = statistics.iter().map(|s| s(&mut ids.iter().copied())).collect();
        of(&values)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(nll: &[f64]) -> Samples {
        Samples::Text { tokens: vec![10; nll.len()], nll: nll.to_vec(), kl: vec![], agree: vec![] }
    }

    #[test]
    fn a_small_steady_difference_shows_in_pairs_and_not_in_single_intervals() {
        let base: Vec<f64> = (0..100).map(|i| 20.0 + f64::from(i * 37 % 100) / 10.0).collect();
        let worse: Vec<f64> = base.iter().map(|x| x + 0.02).collect();
        let (a, b) = (text(&base).estimate("perplexity").unwrap(), text(&worse).estimate("perplexity").unwrap());
        assert!(b.low < a.high, "alone they overlap");
        let d = text(&worse).paired_difference(&text(&base), "perplexity").unwrap();
        assert!(d.low > 0.0 && (d.value - (b.value - a.value)).abs() < 1e-12, "{d:?}");
        assert!(text(&base).paired_difference(&text(&base[1..]), "perplexity").is_none());
        assert!(text(&base).estimate("kl").is_none());
    }

    #[test]
    fn bad_samples_are_named() {
        assert!(text(&[1.0, f64::NAN]).validate().unwrap_err().contains("NaN"));
        let s = Samples::Text { tokens: vec![1, 2], nll: vec![0.5], kl: vec![], agree: vec![] };
        assert_eq!(s.validate().unwrap_err(), "samples.nll: expected 2 windows, got 1");
        let images = |correct: &str, top5: &str| Samples::Images { correct: correct.into(), top5: top5.into() };
        assert!(images("01x", "").validate().is_err());
        assert!(images("011", "").validate().is_ok() && images("011", "111").validate().is_ok());
        assert!(images("011", "11").validate().unwrap_err().contains("expected 3 of each kind, got 2"));
    }
}
