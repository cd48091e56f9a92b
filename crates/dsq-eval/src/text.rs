//! Perplexity, KL divergence and top-1 agreement of a language model on a token sequence. No tokenizer and no model:
//! logits come from the caller.
//!
//! Definitions. The tokens of a document are cut into windows of `context` tokens. Without a stride they do not overlap; with one,
//! each window begins `stride` tokens behind the one before and predicts only what that one did not. The last one may be shorter and
//! counts when it predicts something. The model sees each window from an empty cache, so its first token is never predicted: a
//! window of `L` tokens predicts its tokens `from` to `L` (`from` is 2, or where the window before ended; the logits after the last
//! token are not used). Over all predictions `t`, with logits `z` in f32 and everything else in f64:
//!
//! - perplexity `exp(mean(lse(z_t) - z_t[target_t]))`, bits per byte `sum(lse(z_t) - z_t[target_t]) / (ln 2 * bytes)`, and perplexity
//!   by words `exp(sum(...) / words)`, over the text that the predicted tokens spell,
//! - KL `sum_v p_t[v] (log p_t[v] - log q_t[v])`, `p` the reference's and `q` the model's probabilities, nats: its mean, quantiles
//!   (the smallest value with that share of predictions at or below it) and maximum,
//! - top-1 agreement: the share of predictions where both have the same first choice (lowest index at a tie),
//! - RMS of the change of probability, `sqrt(mean((q_t[target_t] - p_t[target_t])^2))`.
//!
//! Intervals: 95% bootstrap over blocks ([`crate::bootstrap_interval`]), which are windows, or documents where the caller joins the
//! windows of one; sums are in the order of the tokens, so the bits do not depend on the number of threads. A maximum has no
//! interval: the bootstrap says nothing of what was not drawn.

use crate::samples::ratio;
use crate::{Estimate, EvalError, Samples};
use rayon::prelude::*;

/// What [`evaluate_text`] measured.
#[derive(Debug, Clone, PartialEq)]
pub struct TextMetrics {
    /// Perplexity of the model.
    pub perplexity: Estimate,
    /// Mean KL(reference || model) in nats; `None` without a reference.
    pub kl: Option<Estimate>,
    /// Share of predictions with the same first choice as the reference, 0 to 1; `None` without a reference.
    pub top1_agreement: Option<Estimate>,
    /// Perplexity of the reference on the same predictions; `None` without a reference.
    pub reference_perplexity: Option<Estimate>,
    /// `perplexity - reference_perplexity` with its paired interval; `None` without a reference.
    pub perplexity_difference: Option<Estimate>,
    /// More of how far both are apart; `None` without a reference.
    pub divergence: Option<Divergence>,
    /// Bits for each byte of the predicted text; `None` where the caller does not know the bytes.
    pub bits_per_byte: Option<Estimate>,
    /// Perplexity for each word of the predicted text; `None` where the caller does not know the words.
    pub word_perplexity: Option<Estimate>,
    /// Number of predictions.
    pub tokens: usize,
    /// The sums per window, for paired comparison with another run.
    pub samples: Samples,
    /// The reference's own sums per window (no KL); `None` without a reference.
    pub reference_samples: Option<Samples>,
}

/// How the predictions of a model and of its reference differ, beyond means.
#[derive(Debug, Clone, PartialEq)]
pub struct Divergence {
    /// KL of half the predictions is at most this, in nats.
    pub kl_median: Estimate,
    /// Of 90% of them.
    pub kl_p90: Estimate,
    /// Of 99% of them.
    pub kl_p99: Estimate,
    /// Of 99.9% of them.
    pub kl_p99_9: Estimate,
    /// The largest.
    pub kl_max: f64,
    /// Root of the mean square by which the probability of the next token changes, 0 to 1.
    pub rms_delta_p: Estimate,
    /// How many predictions have a KL in each bin of [`Divergence::bin`].
    pub histogram: Vec<u32>,
}

impl Divergence {
    /// The largest KL, in nats, of a bin of the histogram: four to a decade, from 1e-8 on. The first holds all below, the last all above.
    pub fn bin(i: usize) -> f64 {
        10f64.powf(i as f64 / 4.0 - 8.0)
    }

    /// Number of bins: up to 100 nats.
    pub const BINS: usize = 41;
}

/// A window of text, what of it is predicted, and the block that it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window<'a> {
    /// The tokens that the model sees.
    pub tokens: &'a [u32],
    /// The first token that is predicted, at least 1.
    pub from: usize,
    /// Whether it belongs to the block of the window before it.
    pub joins: bool,
    /// Bytes of the text that the predicted tokens spell; 0 for all windows where that is not known.
    pub bytes: u32,
    /// Words that begin in that text.
    pub words: u32,
}

impl<'a> Window<'a> {
    /// A block of its own that predicts all but its first token.
    pub fn of(tokens: &'a [u32]) -> Self {
        Self { tokens, from: 1, joins: false, bytes: 0, words: 0 }
    }
}

/// The windows of a document of `len` tokens: the place of each, and of the first token that it predicts. A window begins `stride`
/// tokens behind the one before; `stride = context` gives windows that do not overlap.
///
/// # Errors
/// [`EvalError::Setting`] for a context below 2 and a stride that is not between 1 and the context.
pub fn strided(
    len: usize,
    context: usize,
    stride: usize,
) -> Result<impl Iterator<Item = (std::ops::Range<usize>, usize)> + Clone, EvalError> {
    if context < 2 {
        return Err(EvalError::Setting { field: "context", expected: "at least 2 tokens", got: context.to_string() });
    }
    if stride == 0 || stride > context {
        return Err(EvalError::Setting {
            field: "stride",
            expected: "1 token to the context",
            got: stride.to_string(),
        });
    }
    let mut before = 0;
    Ok((0..len).step_by(stride).filter_map(move |start| {
        let end = len.min(start + context);
        let from = before.max(start + 1);
        let more = from < end;
        before = before.max(end);
        more.then_some((start..end, from - start))
    }))
}

/// The windows that [`evaluate_text`] feeds to the model, in order: they do not overlap.
///
/// # Errors
/// [`EvalError::Setting`] for a context below 2, [`EvalError::TooFew`] for fewer than 2 tokens.
pub fn windows(tokens: &[u32], context: usize) -> Result<impl Iterator<Item = &[u32]> + Clone, EvalError> {
    if tokens.len() < 2 {
        return Err(EvalError::TooFew { what: "tokens of held-out text", least: 2, got: tokens.len() });
    }
    Ok(strided(tokens.len(), context, context)?.map(|(place, _)| &tokens[place]))
}

/// Collects windows one by one; for callers that batch, cache logits or show progress.
#[derive(Debug, Clone, Default)]
pub struct TextEval {
    tokens: Vec<u32>,
    nll: Vec<f64>,
    kl: Vec<f64>,
    agree: Vec<u32>,
    reference_nll: Vec<f64>,
    /// Bytes and words of the predicted text.
    bytes: Vec<u32>,
    words: Vec<u32>,
    /// Sums of squared changes of probability.
    delta: Vec<f64>,
    /// KL of each prediction and its block.
    each: Vec<(f64, u32)>,
    fed: usize,
}

/// Sums of one prediction.
struct Prediction {
    nll: f64,
    reference_nll: f64,
    kl: f64,
    agree: bool,
    /// Change of the target's probability.
    delta: f64,
}

impl TextEval {
    /// Starts with nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a block of one window, [`Window::of`]; see [`TextEval::add`].
    ///
    /// # Errors
    /// As there.
    pub fn window(&mut self, tokens: &[u32], logits: &[f32], reference: Option<&[f32]>) -> Result<(), EvalError> {
        self.add(&Window::of(tokens), logits, reference)
    }

    /// The sums so far, block by block; `None` before the first window.
    pub fn samples(&self) -> Option<Samples> {
        let (tokens, nll) = (self.tokens.clone(), self.nll.clone());
        (!tokens.is_empty()).then(|| Samples::Text { tokens, nll, kl: self.kl.clone(), agree: self.agree.clone() })
    }

    /// Adds one window of `L` tokens: the model's logits `[L, vocab]` (row major) and the reference's, of the
    /// same shape. All windows have a reference, or none.
    ///
    /// # Errors
    /// [`EvalError::Shape`] for wrong lengths, a token outside the vocabulary or a reference that comes and goes;
    /// [`EvalError::NonFinite`] for NaN or infinite logits. Nothing is added then.
    pub fn add(&mut self, window: &Window<'_>, logits: &[f32], reference: Option<&[f32]>) -> Result<(), EvalError> {
        let (tokens, len) = (window.tokens, window.tokens.len());
        if len < 2 {
            return Err(EvalError::TooFew { what: "tokens in a window", least: 2, got: len });
        }
        if window.from == 0 || window.from >= len {
            return Err(shape("the first predicted token", format!("1 to {} in the window", len - 1), window.from));
        }
        let vocab = logits.len() / len;
        if vocab == 0 || vocab * len != logits.len() {
            return Err(shape("logits", format!("a multiple of the window's {len} tokens"), logits.len()));
        }
        if let Some(r) = reference
            && r.len() != logits.len()
        {
            return Err(shape("logits of the reference", format!("{len} x {vocab} values, as the model"), r.len()));
        }
        if !self.tokens.is_empty() && reference.is_some() == self.each.is_empty() {
            return Err(shape("reference", "one for every window or for none".into(), "one for some"));
        }
        if let Some((i, &t)) = tokens.iter().enumerate().find(|(_, t)| **t as usize >= vocab) {
            return Err(shape(&format!("token {}", self.fed + i), format!("an id below {vocab} (vocabulary)"), t));
        }
        let row = |x: &'_ [f32], i: usize| -> std::ops::Range<usize> {
            debug_assert!(x.len() >= (i + 1) * vocab);
            i * vocab..(i + 1) * vocab
        };
        let predictions: Vec<Prediction> = (window.from - 1..len - 1)
            .into_par_iter()
            .map(|i| {
                let target = tokens[i + 1] as usize;
                let m = Distribution::new(&logits[row(logits, i)], "model", self.fed + i)?;
                let Some(reference) = reference else {
                    let nll = m.nll(target);
                    return Ok(Prediction { nll, reference_nll: 0.0, kl: 0.0, agree: false, delta: 0.0 });
                };
                let r = Distribution::new(&reference[row(reference, i)], "reference", self.fed + i)?;
                let (nll, reference_nll) = (m.nll(target), r.nll(target));
                Ok(Prediction {
                    nll,
                    reference_nll,
                    kl: r.kl_to(&m),
                    agree: r.first == m.first,
                    delta: (-nll).exp() - (-reference_nll).exp(),
                })
            })
            .collect::<Result<_, EvalError>>()?;
        self.fed += len;
        if !window.joins || self.tokens.is_empty() {
            for sums in [&mut self.tokens, &mut self.agree, &mut self.bytes, &mut self.words] {
                sums.push(0);
            }
            for sums in [&mut self.nll, &mut self.kl, &mut self.reference_nll, &mut self.delta] {
                sums.push(0.0);
            }
        }
        let block = self.tokens.len() - 1;
        self.tokens[block] += predictions.len() as u32;
        self.bytes[block] += window.bytes;
        self.words[block] += window.words;
        self.nll[block] += predictions.iter().map(|p| p.nll).sum::<f64>();
        if reference.is_some() {
            self.kl[block] += predictions.iter().map(|p| p.kl).sum::<f64>();
            self.agree[block] += predictions.iter().map(|p| u32::from(p.agree)).sum::<u32>();
            self.reference_nll[block] += predictions.iter().map(|p| p.reference_nll).sum::<f64>();
            self.delta[block] += predictions.iter().map(|p| p.delta * p.delta).sum::<f64>();
            self.each.extend(predictions.iter().map(|p| (p.kl, block as u32)));
        }
        Ok(())
    }

    /// Perplexity so far, for a progress bar; `None` before the first window.
    pub fn perplexity_so_far(&self) -> Option<f64> {
        let count: f64 = self.tokens.iter().map(|&t| f64::from(t)).sum();
        (count > 0.0).then(|| (self.nll.iter().sum::<f64>() / count).exp())
    }

    /// The metrics of all windows.
    ///
    /// # Errors
    /// [`EvalError::TooFew`] when there was no window.
    pub fn finish(self) -> Result<TextMetrics, EvalError> {
        let count = self.tokens.iter().map(|&t| t as usize).sum();
        let compared = !self.each.is_empty();
        let divergence = compared.then(|| self.divergence());
        let per = |of: &[u32], unit: fn(f64) -> f64| {
            let known = of.iter().any(|n| *n > 0);
            known.then(|| Estimate::of_blocks(of.len(), |ids| unit(ratio(ids, |i| (self.nll[i], f64::from(of[i]))))))
        };
        let bits_per_byte = per(&self.bytes, |nats| nats / std::f64::consts::LN_2);
        let word_perplexity = per(&self.words, f64::exp);
        let reference_samples = compared.then(|| Samples::Text {
            tokens: self.tokens.clone(),
            nll: self.reference_nll,
            kl: Vec::new(),
            agree: Vec::new(),
        });
        let (kl, agree) = if compared { (self.kl, self.agree) } else { (Vec::new(), Vec::new()) };
        let samples = Samples::Text { tokens: self.tokens, nll: self.nll, kl, agree };
        let perplexity = samples.estimate("perplexity").filter(|_| count > 0).ok_or(EvalError::TooFew {
            what: "windows of held-out text",
            least: 1,
            got: 0,
        })?;
        Ok(TextMetrics {
            perplexity,
            kl: samples.estimate("kl"),
            top1_agreement: samples.estimate("top1_agreement"),
            reference_perplexity: reference_samples.as_ref().and_then(|r| r.estimate("perplexity")),
            perplexity_difference: reference_samples.as_ref().and_then(|r| samples.paired_difference(r, "perplexity")),
            divergence,
            bits_per_byte,
            word_perplexity,
            tokens: count,
            samples,
            reference_samples,
        })
    }

    /// Quantiles of KL and the change of probability. A resample weighs each prediction by how often its block was drawn.
    fn divergence(&self) -> Divergence {
        let mut sorted = self.each.clone();
        sorted.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        let blocks = self.tokens.len();
        let quantile = |q: f64| {
            Estimate::of_blocks(blocks, |ids| {
                let (mut times, mut all) = (vec![0u32; blocks], 0.0);
                for i in ids {
                    times[i] += 1;
                    all += f64::from(self.tokens[i]);
                }
                let mut below = 0.0;
                let at = sorted.iter().find(|(_, block)| {
                    below += f64::from(times[*block as usize]);
                    below >= q * all && times[*block as usize] > 0
                });
                at.or(sorted.last()).map_or(f64::NAN, |(kl, _)| *kl)
            })
        };
        let mut histogram = vec![0; Divergence::BINS];
        for (kl, _) in &sorted {
            let bin = (0..Divergence::BINS - 1).find(|&i| *kl <= Divergence::bin(i)).unwrap_or(Divergence::BINS - 1);
            histogram[bin] += 1;
        }
        let rms =
            |ids: &mut dyn Iterator<Item = usize>| ratio(ids, |i| (self.delta[i], f64::from(self.tokens[i]))).sqrt();
        Divergence {
            kl_median: quantile(0.5),
            kl_p90: quantile(0.9),
            kl_p99: quantile(0.99),
            kl_p99_9: quantile(0.999),
            kl_max: sorted.last().map_or(f64::NAN, |(kl, _)| *kl),
            rms_delta_p: Estimate::of_blocks(blocks, rms),
            histogram,
        }
    }
}

/// A closure that gives the logits `[len, vocab]` of a window.
pub type LogitsFn<'a, E> = &'a mut dyn FnMut(&[u32]) -> Result<Vec<f32>, E>;

/// Evaluates `model` on `tokens` in windows of `context` tokens, against `reference` when there is one (see the
/// module's definitions). Each closure gets one window and returns its logits `[len, vocab]`.
///
/// # Errors
/// What the closures return, or as [`windows`] and [`TextEval::window`].
pub fn evaluate_text<E: From<EvalError>>(
    tokens: &[u32],
    context: usize,
    model: LogitsFn<'_, E>,
    mut reference: Option<LogitsFn<'_, E>>,
) -> Result<TextMetrics, E> {
    let mut eval = TextEval::new();
    for window in windows(tokens, context)? {
        let logits = model(window)?;
        let reference = reference.as_mut().map(|r| r(window)).transpose()?;
        eval.window(window, &logits, reference.as_deref())?;
    }
    Ok(eval.finish()?)
}

/// One row of logits with its log-sum-exp.
pub(crate) struct Distribution<'a> {
    logits: &'a [f32],
    lse: f64,
    /// The first choice: the lowest index at a tie.
    pub(crate) first: usize,
}

impl<'a> Distribution<'a> {
    pub(crate) fn new(logits: &'a [f32], side: &'static str, position: usize) -> Result<Self, EvalError> {
        if let Some(entry) = logits.iter().position(|x| !x.is_finite()) {
            return Err(EvalError::NonFinite { side, position, entry, value: logits[entry] });
        }
        let first = logits.iter().enumerate().fold(0, |best, (i, &x)| if x > logits[best] { i } else { best });
        let max = f64::from(logits[first]);
        let lse = max + logits.iter().map(|&x| (f64::from(x) - max).exp()).sum::<f64>().ln();
        Ok(Self { logits, lse, first })
    }

    pub(crate) fn nll(&self, target: usize) -> f64 {
        self.lse - f64::from(self.logits[target])
    }

    /// KL(self || other). A divergence is never negative; what the rounding of f64 leaves below zero is cut off.
    fn kl_to(&self, other: &Distribution<'_>) -> f64 {
        let shift = self.lse - other.lse;
        let sum: f64 = self
            .logits
            .iter()
            .zip(other.logits)
            .map(|(&r, &m)| (f64::from(r) - self.lse).exp() * (f64::from(r) - f64::from(m) - shift))
            .sum();
        sum.max(0.0)
    }
}

fn shape(what: &str, expected: String, got: impl ToString) -> EvalError {
    EvalError::Shape { what: what.into(), expected, got: got.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    type Fed<'a> = Result<Vec<f32>, EvalError>;

    #[test]
    fn perplexity_and_kl_of_a_case_worked_by_hand() {
        // Vocabulary 2, window [0, 1, 0]: predictions of 1 and of 0. Model logits (0, ln 3): p = (1/4, 3/4).
        // Reference logits (0, 0): p = (1/2, 1/2).
        let l3 = 3f32.ln();
        let mut model = |w: &[u32]| -> Fed<'_> { Ok(w.iter().flat_map(|_| [0.0, l3]).collect()) };
        let mut reference = |w: &[u32]| -> Fed<'_> { Ok(vec![0.0; w.len() * 2]) };
        let got = evaluate_text(&[0, 1, 0], 8, &mut model, Some(&mut reference)).unwrap();
        // exp(-(ln 3/4 + ln 1/4) / 2) = sqrt(16/3); KL = 1/2 ln(2) + 1/2 ln(2/3) = 1/2 ln(4/3).
        // ln 3 in f32 is off by at most 6e-8, which is the bound on both.
        assert!((got.perplexity.value - (16f64 / 3.0).sqrt()).abs() < 2e-7, "{got:?}");
        assert!((got.kl.unwrap().value - 0.5 * (4f64 / 3.0).ln()).abs() < 1e-7);
        assert!((got.reference_perplexity.unwrap().value - 2.0).abs() < 1e-15);
        // First choices: model 1, reference 0 (the lowest index at a tie).
        assert_eq!(got.top1_agreement.unwrap().value, 0.0);
        assert_eq!(got.tokens, 2);
        assert!(!got.perplexity.has_interval(), "one window");
    }

    #[test]
    fn uniform_logits_have_the_vocabulary_as_perplexity() {
        let tokens: Vec<u32> = (0..1000).map(|i| i % 37).collect();
        let mut model = |w: &[u32]| -> Fed<'_> { Ok(vec![1.5; w.len() * 37]) };
        let got = evaluate_text(&tokens, 64, &mut model, None).unwrap();
        assert!((got.perplexity.value - 37.0).abs() < 1e-11, "{:?}", got.perplexity);
        assert!((got.perplexity.high - got.perplexity.low).abs() < 1e-10);
        // 15 windows of 63 predictions and one of 40 tokens with 39.
        assert_eq!(got.tokens, 15 * 63 + 39);
        assert!(got.kl.is_none() && got.top1_agreement.is_none());
    }

    #[test]
    fn windows_start_afresh_and_a_lone_last_token_is_left_out() {
        let tokens: Vec<u32> = (0..9).collect();
        let lens: Vec<usize> = windows(&tokens, 4).unwrap().map(<[u32]>::len).collect();
        assert_eq!(lens, [4, 4]);
        assert!(matches!(windows(&tokens, 1).map(|_| ()), Err(EvalError::Setting { field: "context", .. })));
        assert!(matches!(windows(&tokens[..1], 4).map(|_| ()), Err(EvalError::TooFew { got: 1, .. })));
    }

    #[test]
    fn a_stride_predicts_every_token_but_the_first_once() {
        for (len, context, stride) in
            [(10, 4, 2), (9, 4, 4), (11, 5, 3), (7, 8, 1), (6, 2, 1), (1, 4, 2), (0, 4, 4), (9, 4, 1)]
        {
            let mut predicted = Vec::new();
            for (place, from) in strided(len, context, stride).unwrap() {
                assert!(place.len() <= context && place.end <= len && place.start % stride == 0);
                predicted.extend(place.start + from..place.end);
                assert!(
                    place.start == 0 || from + stride >= context || stride == context,
                    "as much context as there is"
                );
            }
            let expected: Vec<usize> = (1..len).filter(|i| stride < context || i % context != 0).collect();
            assert_eq!(predicted, expected, "{len} {context} {stride}");
        }
        for stride in [0, 5] {
            assert!(matches!(strided(9, 4, stride).map(|_| ()), Err(EvalError::Setting { field: "stride", .. })));
        }
    }

    #[test]
    fn joined_windows_are_one_block_and_bytes_and_words_divide_the_same_sum() {
        let (tokens, logits) = ([0u32, 1, 2, 3], noise(4 * 5, 3));
        let mut eval = TextEval::new();
        let window = |from, joins, bytes, words| Window { tokens: &tokens, from, joins, bytes, words };
        eval.add(&window(1, false, 7, 2), &logits, None).unwrap();
        eval.add(&window(3, true, 4, 1), &logits, None).unwrap();
        eval.add(&window(2, false, 5, 1), &logits, None).unwrap();
        let got = eval.finish().unwrap();
        let Samples::Text { tokens: counts, nll, kl, .. } = &got.samples else { unreachable!() };
        assert_eq!((&counts[..], nll.len(), kl.len(), got.tokens), (&[4u32, 2][..], 2, 0, 6));
        let all: f64 = nll.iter().sum();
        assert!((got.bits_per_byte.unwrap().value - all / 16.0 / 2f64.ln()).abs() < 1e-12);
        assert!((got.word_perplexity.unwrap().value - (all / 4.0).exp()).abs() < 1e-9);
        assert!(got.divergence.is_none());
        for from in [0, 4] {
            let e = TextEval::new().add(&window(from, false, 0, 0), &logits, None).unwrap_err().to_string();
            assert!(e.contains("1 to 3 in the window"), "{e}");
        }
    }

    #[test]
    fn quantiles_of_kl_and_the_change_of_probability() {
        // 200 windows of one prediction: the model is the reference with one logit raised by i/100.
        let mut eval = TextEval::new();
        let (mut kls, mut squares) = (Vec::new(), 0.0);
        for i in 0..200 {
            let raised = i as f32 / 100.0;
            let (model, reference) = ([raised, 0.0, 0.0, 0.0], [0.0f32; 4]);
            eval.window(&[1, 0], &model, Some(&reference)).unwrap();
            // Vocabulary 2: p = (1/2, 1/2), q_0 = e^r / (1 + e^r); KL = -ln 2 - (ln q_0 + ln q_1) / 2.
            let (r, q) = (f64::from(raised), 1.0 / (1.0 + (-f64::from(raised)).exp()));
            kls.push((1.0 + r.exp()).ln() - r / 2.0 - 2f64.ln());
            squares += (q - 0.5).powi(2);
        }
        let d = eval.finish().unwrap().divergence.unwrap();
        assert_eq!(d.histogram.iter().sum::<u32>(), 200);
        // KL of up to 0.1 nats and more than 0.056: bin 28.
        let held = kls.iter().filter(|k| **k > Divergence::bin(27) && **k <= Divergence::bin(28)).count();
        assert!((Divergence::bin(28) - 0.1).abs() < 1e-15 && held > 10 && d.histogram[28] as usize == held, "{d:?}");
        for (got, at) in [(d.kl_median, 99), (d.kl_p90, 179), (d.kl_p99, 197), (d.kl_p99_9, 199)] {
            assert!(
                (got.value - kls[at]).abs() < 1e-7 && got.low <= got.value && got.value <= got.high,
                "{at} {got:?}"
            );
        }
        // The median of 200 independent draws: ranks 100 +- 1.96 * sqrt(50), give or take two for the bootstrap's own noise.
        let rank = |x: f64| kls.iter().filter(|k| **k < x - 1e-12).count() as f64;
        assert!((rank(d.kl_median.low) - 86.0).abs() < 4.0 && (rank(d.kl_median.high) - 113.0).abs() < 4.0, "{d:?}");
        assert!((d.kl_max - kls[199]).abs() < 1e-7 && (d.rms_delta_p.value - (squares / 200.0).sqrt()).abs() < 1e-7);
    }

    #[test]
    fn f112_non_finite_logits_end_with_exit_6_and_name_the_place() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut eval = TextEval::new();
            eval.window(&[0, 1], &[0.0; 6], None).unwrap();
            let mut logits = [0.0f32; 12];
            logits[4] = bad;
            let err = eval.window(&[0, 1, 2, 0], &logits, None).unwrap_err();
            assert!(matches!(err, EvalError::NonFinite { position: 3, entry: 1, .. }), "{err}");
            assert_eq!(err.exit_code(), 6);
            let err = TextEval::new().window(&[0, 1], &[0.0; 6], Some(&[bad; 6])).unwrap_err();
            assert!(err.to_string().starts_with("logits of the reference: position 0, entry 0"), "{err}");
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let mut eval = TextEval::new();
        assert_eq!(eval.window(&[0, 1], &[0.0; 5], None).unwrap_err().exit_code(), 3);
        assert!(eval.window(&[0, 1], &[0.0; 6], Some(&[0.0; 4])).is_err());
        assert!(eval.window(&[0, 3], &[0.0; 6], None).unwrap_err().to_string().contains("below 3"));
        eval.window(&[0, 1], &[0.0; 6], None).unwrap();
        assert!(eval.window(&[0, 1], &[0.0; 6], Some(&[0.0; 6])).is_err());
        assert_eq!(TextEval::new().finish().unwrap_err().exit_code(), 3);
    }

    /// Pseudo-random logits in [-8, 8).
    fn noise(len: usize, seed: u64) -> Vec<f32> {
        (0..len as u64)
            .map(|i| {
                let mut s = (seed << 32 | i).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
                s = (s ^ s >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9);
                ((s ^ s >> 32) >> 40) as f32 / (1u64 << 20) as f32 - 8.0
            })
            .collect()
    }

    #[test]
    fn bits_do_not_depend_on_the_number_of_threads() {
        let tokens: Vec<u32> = (0..64).map(|i| i * 5 % 50).collect();
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                let mut eval = TextEval::new();
                eval.window(&tokens, &noise(64 * 50, 1), Some(&noise(64 * 50, 2))).unwrap();
                eval.finish().unwrap()
            })
        };
        assert_eq!(run(1), run(3));
    }

    proptest! {
        #[test]
        fn constants_do_not_matter_and_kl_is_zero_only_on_the_same(seed in 0u64..10_000, shift in -100i32..100) {
            let (len, vocab) = (12, 33);
            let tokens: Vec<u32> = (0..len as u32).map(|i| i * 7 % vocab as u32).collect();
            let (a, b) = (noise(len * vocab, seed), noise(len * vocab, seed + 10_000));
            // The logits are multiples of 2^-20 below 8 and the shift an integer below 128: a step of 2^-16 keeps the sum exact in f32.
            let coarse: Vec<f32> = a.iter().map(|x| (x * 65536.0).round() / 65536.0).collect();
            let moved: Vec<f32> = coarse.iter().map(|x| x + shift as f32).collect();
            let eval = |m: &[f32], r: &[f32]| {
                let mut e = TextEval::new();
                e.window(&tokens, m, Some(r)).unwrap();
                e.finish().unwrap()
            };
            let (plain, shifted) = (eval(&coarse, &b), eval(&moved, &b));
            prop_assert!((plain.perplexity.value / shifted.perplexity.value - 1.0).abs() < 1e-12);
            prop_assert!((plain.kl.unwrap().value - shifted.kl.unwrap().value).abs() < 1e-12);
            prop_assert_eq!(plain.top1_agreement, shifted.top1_agreement);
            prop_assert!(plain.kl.unwrap().value > 0.0);
            let same = eval(&coarse, &coarse);
            prop_assert_eq!(same.kl.unwrap().value, 0.0);
            prop_assert_eq!(same.top1_agreement.unwrap().value, 1.0);
            prop_assert_eq!(same.perplexity_difference.unwrap().value, 0.0);
            // The same against a constant: zero but for the rounding of f64.
            prop_assert!(eval(&moved, &coarse).kl.unwrap().value < 1e-12);
        }
    }
}
