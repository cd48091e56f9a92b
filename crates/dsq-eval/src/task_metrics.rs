//! What a model's log-likelihoods of answers come to: accuracy by three rules, bits per byte, greedy matches, and agreement with a
//! reference. Not the files (see `tasks.rs`), no tokenizer and no model: logits come from the caller.
//!
//! Definitions, over the items of a file. The log-likelihood of an answer is `sum_t log p(token_t | context, tokens before it)` in nats,
//! logits in f32 and everything else in f64; its bytes are the UTF-8 bytes of its continuation, a leading space among them.
//!
//! - `accuracy`: share of items whose gold answer has the largest log-likelihood;
//! - `accuracy_per_byte`, `accuracy_per_token`: the same for log-likelihoods divided by the answer's bytes, or by its tokens;
//! - `bits_per_byte`: mean over items of `-log-likelihood / (ln 2 * bytes)` of the gold answer;
//! - `greedy`: share of items of whose gold answer every token is the model's first choice;
//! - `agreement`: share of items where model and reference choose the same answer by the rule of `accuracy`; where items have one
//!   answer only, where both or neither is greedy;
//! - `x_difference`: `x` of the model minus that of the reference.
//!
//! At a tie the answer, or the token, with the lowest index is chosen. Shares have Wilson intervals, means and differences those of the
//! bootstrap over items ([`crate::bootstrap_interval`]), differences in pairs.

use crate::text::Distribution;
use crate::{Estimate, EvalError, Item, Row, Samples, wilson};
use rayon::prelude::*;

/// How a token fares in a row of logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenScore {
    /// Its log probability, nats.
    pub log_likelihood: f64,
    /// Whether it is the first choice (lowest index at a tie).
    pub first: bool,
}

/// Scores `targets[i]` in row `i` of `logits [targets, vocab]` (row major). `side` is `model` or `reference`.
///
/// # Errors
/// [`EvalError::Shape`] for a length that does not divide, or a target outside the vocabulary; [`EvalError::NonFinite`], whose position
/// counts the rows.
pub fn token_scores(logits: &[f32], targets: &[u32], side: &'static str) -> Result<Vec<TokenScore>, EvalError> {
    let vocab = logits.len() / targets.len().max(1);
    let shape = |what: String, expected: String, got: String| Err(EvalError::Shape { what, expected, got });
    if vocab * targets.len() != logits.len() || (vocab == 0 && !targets.is_empty()) {
        return shape("logits".into(), format!("a multiple of {} rows", targets.len()), logits.len().to_string());
    }
    if let Some((i, t)) = targets.iter().enumerate().find(|(_, t)| **t as usize >= vocab) {
        return shape(format!("target {i}"), format!("an id below {vocab} (vocabulary)"), t.to_string());
    }
    let score = |i: usize| {
        let row = Distribution::new(&logits[i * vocab..(i + 1) * vocab], side, i)?;
        let target = targets[i] as usize;
        Ok(TokenScore { log_likelihood: -row.nll(target), first: row.first == target })
    };
    (0..targets.len()).into_par_iter().map(score).collect()
}

/// What a model says of an answer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Answer {
    /// Log-likelihood of the continuation behind the context, nats.
    pub log_likelihood: f64,
    /// Its tokens.
    pub tokens: usize,
    /// Whether every token is the first choice.
    pub greedy: bool,
}

impl Default for Answer {
    /// Of no tokens yet.
    fn default() -> Self {
        Self { log_likelihood: 0.0, tokens: 0, greedy: true }
    }
}

impl Answer {
    /// Adds the next token.
    pub fn push(&mut self, token: TokenScore) {
        self.log_likelihood += token.log_likelihood;
        self.tokens += 1;
        self.greedy &= token.first;
    }
}

/// What [`task_metrics`] measured. The module's head defines the words.
#[derive(Debug, Clone, PartialEq)]
pub struct TaskMetrics {
    /// Items.
    pub items: usize,
    /// Answers of all items.
    pub requests: usize,
    /// Tokens of all answers.
    pub tokens: usize,
    /// `None` where every item has one answer.
    pub accuracy: Option<Estimate>,
    /// As `accuracy`, by bytes.
    pub accuracy_per_byte: Option<Estimate>,
    /// As `accuracy`, by tokens.
    pub accuracy_per_token: Option<Estimate>,
    /// Of the gold answers.
    pub bits_per_byte: Estimate,
    /// Of the gold answers.
    pub greedy: Estimate,
    /// `None` without a reference, as the differences.
    pub agreement: Option<Estimate>,
    /// Names of the metrics (`accuracy`...) and model minus reference.
    pub differences: Vec<(&'static str, Estimate)>,
    /// Item by item, for paired comparison with another run.
    pub samples: Samples,
}

impl TaskMetrics {
    /// A row of a report.
    pub fn row(&self, name: impl Into<String>) -> Row {
        let mut row = Row::new(name)
            .maybe("accuracy", self.accuracy.as_ref())
            .maybe("accuracy_per_byte", self.accuracy_per_byte.as_ref())
            .maybe("accuracy_per_token", self.accuracy_per_token.as_ref())
            .estimate("bits_per_byte", &self.bits_per_byte)
            .estimate("greedy", &self.greedy)
            .maybe("agreement", self.agreement.as_ref());
        for (metric, difference) in &self.differences {
            row = row.estimate(&format!("{metric}_difference"), difference);
        }
        let (items, requests, tokens) = (self.items as f64, self.requests as f64, self.tokens as f64);
        row.samples = Some(self.samples.clone());
        row.number("items", items).number("requests", requests).number("tokens", tokens)
    }
}

/// The metrics of a file whose answers, item by item, have been scored; against a reference that scored the same items, if there is one.
///
/// # Errors
/// [`EvalError::TooFew`] for no items, [`EvalError::Shape`] for answers that are not those of the items.
pub fn task_metrics(
    items: &[Item],
    answers: &[Vec<Answer>],
    reference: Option<&[Vec<Answer>]>,
) -> Result<TaskMetrics, EvalError> {
    if items.is_empty() {
        return Err(EvalError::TooFew { what: "items of a task", least: 1, got: 0 });
    }
    let (model, other) = (PerItem::new(items, answers)?, reference.map(|r| PerItem::new(items, r)).transpose()?);
    let choosing = items.iter().any(|i| i.choices.len() > 1);
    let n = items.len();
    let share = |hits: &[bool]| wilson(hits.iter().filter(|h| **h).count(), n);
    let rule = |i: usize| choosing.then(|| share(&model.correct[i]));
    let mean = |ids: &mut dyn Iterator<Item = usize>, of: &dyn Fn(usize) -> f64| {
        let (sum, count) = ids.fold((0.0, 0usize), |(sum, count), i| (sum + of(i), count + 1));
        sum / count as f64
    };
    let over_items = |of: &dyn Fn(usize) -> f64| Estimate::of_blocks(n, |ids| mean(ids, of));
    let mut differences = Vec::new();
    let mut agreement = None;
    if let Some(r) = &other {
        let shares = |a: &[bool], b: &[bool]| over_items(&|i| f64::from(u8::from(a[i])) - f64::from(u8::from(b[i])));
        if choosing {
            for (i, rule) in RULES.into_iter().enumerate() {
                differences.push((rule, shares(&model.correct[i], &r.correct[i])));
            }
        }
        differences.push(("bits_per_byte", over_items(&|i| model.bits_per_byte[i] - r.bits_per_byte[i])));
        differences.push(("greedy", shares(&model.greedy, &r.greedy)));
        let same = |i: usize| {
            if choosing { model.chosen[i] == r.chosen[i] } else { model.greedy[i] == r.greedy[i] }
        };
        agreement = Some(share(&(0..n).map(same).collect::<Vec<_>>()));
    }
    Ok(TaskMetrics {
        items: n,
        requests: answers.iter().map(Vec::len).sum(),
        tokens: answers.iter().flatten().map(|a| a.tokens).sum(),
        accuracy: rule(0),
        accuracy_per_byte: rule(1),
        accuracy_per_token: rule(2),
        bits_per_byte: over_items(&|i| model.bits_per_byte[i]),
        greedy: share(&model.greedy),
        agreement,
        differences,
        samples: Samples::Items {
            accuracy: if choosing { marks(&model.correct[0]) } else { String::new() },
            greedy: marks(&model.greedy),
        },
    })
}

fn marks(hits: &[bool]) -> String {
    hits.iter().map(|h| if *h { '1' } else { '0' }).collect()
}

/// The rules by which an answer is chosen.
const RULES: [&str; 3] = ["accuracy", "accuracy_per_byte", "accuracy_per_token"];

/// What counts of each item.
struct PerItem {
    /// By the first rule.
    chosen: Vec<usize>,
    /// By each rule.
    correct: [Vec<bool>; 3],
    bits_per_byte: Vec<f64>,
    greedy: Vec<bool>,
}

impl PerItem {
    fn new(items: &[Item], answers: &[Vec<Answer>]) -> Result<Self, EvalError> {
        let shape = |what: String, expected: usize, got: usize| {
            Err(EvalError::Shape { what, expected: expected.to_string(), got: got.to_string() })
        };
        if answers.len() != items.len() {
            return shape("items with answers".into(), items.len(), answers.len());
        }
        let mut out =
            Self { chosen: Vec::new(), correct: Default::default(), bits_per_byte: Vec::new(), greedy: Vec::new() };
        for (item, answers) in items.iter().zip(answers) {
            if answers.len() != item.choices.len() || answers.is_empty() {
                return shape(format!("answers of doc_id {}", item.id), item.choices.len(), answers.len());
            }
            let bytes = |i: usize| item.choices[i].continuation.len() as f64;
            let best = |of: &dyn Fn(usize) -> f64| (0..answers.len()).fold(0, |b, i| if of(i) > of(b) { i } else { b });
            let by_rule = [
                best(&|i| answers[i].log_likelihood),
                best(&|i| answers[i].log_likelihood / bytes(i)),
                best(&|i| answers[i].log_likelihood / answers[i].tokens as f64),
            ];
            out.chosen.push(by_rule[0]);
            for (correct, chosen) in out.correct.iter_mut().zip(by_rule) {
                correct.push(chosen == item.gold);
            }
            let gold = &answers[item.gold];
            out.bits_per_byte.push(-gold.log_likelihood / (std::f64::consts::LN_2 * bytes(item.gold)));
            out.greedy.push(gold.greedy);
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Request;

    fn item(id: i64, gold: usize, continuations: &[&str]) -> Item {
        let choices =
            continuations.iter().map(|c| Request { context: "x".into(), continuation: (*c).into() }).collect();
        Item { id, line: 1, choices, gold }
    }

    fn answer(log_likelihood: f64, tokens: usize, greedy: bool) -> Answer {
        Answer { log_likelihood, tokens, greedy }
    }

    #[test]
    fn token_scores_by_hand() {
        // Vocabulary 2: logits (0, ln 3) are (1/4, 3/4), (0, 0) a tie.
        let got = token_scores(&[0.0, 3f32.ln(), 0.0, 0.0, 0.0, 0.0], &[1, 1, 0], "model").unwrap();
        let want = [(0.75f64, true), (0.5, false), (0.5, true)];
        for (g, (p, first)) in got.iter().zip(want) {
            assert!((g.log_likelihood - p.ln()).abs() < 1e-7 && g.first == first, "{got:?}");
        }
        let mut a = Answer::default();
        got.into_iter().for_each(|t| a.push(t));
        assert!((a.log_likelihood - (0.75f64 * 0.25).ln()).abs() < 1e-7 && a.tokens == 3 && !a.greedy);
        assert!(token_scores(&[], &[], "model").unwrap().is_empty());
        let e = token_scores(&[0.0, 1.0], &[2], "model").unwrap_err();
        assert!(e.to_string().contains("target 0: expected an id below 2"), "{e}");
        assert_eq!(token_scores(&[0.0; 3], &[0, 0], "model").unwrap_err().exit_code(), 3);
        let e = token_scores(&[0.0, 1.0, f32::NAN, 0.0], &[0, 0], "reference").unwrap_err();
        assert!(e.exit_code() == 6 && e.to_string().contains("reference: position 1, entry 0"), "{e}");
    }

    #[test]
    fn the_three_rules_choose_differently() {
        // Log-likelihoods -4, -5, -6 over 2, 4, 10 bytes and 1, 5, 2 tokens: by itself 0; by byte -2, -1.25, -0.6: 2; by token -4, -1, -3: 1.
        let answers = [vec![answer(-4.0, 1, true), answer(-5.0, 5, false), answer(-6.0, 2, false)]];
        for (gold, want) in [(0, [1.0, 0.0, 0.0]), (1, [0.0, 0.0, 1.0]), (2, [0.0, 1.0, 0.0])] {
            let m = task_metrics(&[item(0, gold, &[" a", " abc", " abcdefgh\u{e4}"][..])], &answers, None);
            // A character of two bytes counts as two.
            let m = m.unwrap();
            let got = [m.accuracy, m.accuracy_per_byte, m.accuracy_per_token].map(|e| e.unwrap().value);
            assert_eq!(got, want, "gold {gold}");
            assert_eq!((m.greedy.value, m.agreement, m.tokens), (f64::from(u8::from(gold == 0)), None, 8));
        }
        let m = task_metrics(&[item(0, 2, &[" a", " abc", " abcdefgh\u{e4}"])], &answers, None).unwrap();
        assert!((m.bits_per_byte.value - 6.0 / (11.0 * std::f64::consts::LN_2)).abs() < 1e-15);
        // At a tie the first.
        let tie = [vec![answer(-2.0, 1, true), answer(-2.0, 1, true)]];
        assert_eq!(task_metrics(&[item(0, 1, &["a", "b"])], &tie, None).unwrap().accuracy.unwrap().value, 0.0);
    }

    #[test]
    fn agreement_and_differences_are_paired() {
        let items: Vec<Item> = (0..40).map(|i| item(i, 0, &["a", "b"])).collect();
        let with = |right: &dyn Fn(usize) -> bool, shift: f64| -> Vec<Vec<Answer>> {
            let of = |i: usize| if right(i) { [-1.0, -2.0] } else { [-3.0, -2.0] };
            (0..40).map(|i| of(i).map(|l| answer(l + shift, 1, right(i))).to_vec()).collect()
        };
        let (model, reference) = (with(&|i| i % 2 == 0, -0.1), with(&|i| i % 2 == 0 || i == 1, 0.0));
        let m = task_metrics(&items, &model, Some(&reference)).unwrap();
        assert_eq!(m.agreement.unwrap().value, 39.0 / 40.0);
        let difference = |name: &str| m.differences.iter().find(|(n, _)| *n == name).unwrap().1;
        assert!((difference("accuracy").value + 1.0 / 40.0).abs() < 1e-15);
        assert!(difference("accuracy").high <= 0.0 && difference("accuracy").low < 0.0);
        // The shift of 0.1 nats a byte is on every item but one, which differs by 2.1.
        let bits = difference("bits_per_byte");
        assert!(
            (bits.value - (0.1 * 39.0 + 2.1) / 40.0 / std::f64::consts::LN_2).abs() < 1e-12 && bits.low > 0.0,
            "{bits:?}"
        );
        let row = m.row("t");
        assert_eq!((row.get("accuracy"), row.get("items"), row.get("tokens")), (Some(0.5), Some(40.0), Some(80.0)));
        assert!(row.get("accuracy_difference_low").is_some() && row.get("greedy").is_some());
    }

    #[test]
    fn texts_to_be_predicted_have_no_accuracy() {
        let items = [item(0, 0, &[" sun"]), item(1, 0, &[" moon"])];
        let (a, b) = (
            [vec![answer(-1.0, 1, true)], vec![answer(-2.0, 2, false)]],
            [vec![answer(-1.0, 1, false)], vec![answer(-9.0, 2, false)]],
        );
        let m = task_metrics(&items, &a, Some(&b)).unwrap();
        assert_eq!((m.accuracy, m.greedy.value, m.agreement.unwrap().value), (None, 0.5, 0.5));
        assert!(m.row("t").get("accuracy").is_none() && m.differences.iter().all(|(n, _)| !n.starts_with("accuracy")));
        let e = task_metrics(&items, &a[..1], None).unwrap_err();
        assert!(e.to_string().contains("items with answers: expected 2, got 1"), "{e}");
        let e = task_metrics(&[item(5, 0, &["a", "b"])], &[vec![answer(-1.0, 1, true)]], None).unwrap_err();
        assert!(e.to_string().contains("answers of doc_id 5: expected 2, got 1"), "{e}");
        assert_eq!(task_metrics(&[], &[], None).unwrap_err().exit_code(), 3);
    }
}
