//! The choice of the next token from logits: greedy, or drawn from a seeded generator, with the filters of transformers in
//! the order of transformers. Not the loop around it (see `generate.rs`, `engine.rs`).
//!
//! Order: repetition penalty; then, unless greedy, temperature, top-k, top-p, min-p, softmax over what is left, one draw. Each
//! filter sees the probabilities that the one before it left, as transformers' `LogitsProcessorList` has it. One difference:
//! of logits equal to the k-th, transformers keeps all, this the lowest ids.
//!
//! Cost: two scans of the vocabulary, and one `exp` a token of it where top-k is off. Nothing sorts the vocabulary: only what the
//! filters can keep is collected and sorted. Sums run in an order of their own, so a draw is the same on every machine.

use crate::RuntimeError;
use dsq_kernels::elementwise::exp_below;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::cmp::Ordering;

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; otherwise logits are divided by it.
    pub temperature: f32,
    /// Only this many most likely tokens; 0 for all.
    pub top_k: usize,
    /// Only the most likely tokens that together reach this probability; 1 for all.
    pub top_p: f32,
    /// Only tokens at least this likely, as a part of the most likely token's probability (arXiv 2407.01082); 0 for all.
    pub min_p: f32,
    /// Logits of tokens that the prompt or the answer holds are divided by it where positive and multiplied where
    /// negative (CTRL, arXiv 1909.05858); 1 for none. It applies to greedy choices too.
    pub repetition_penalty: f32,
    /// Seed of the generator.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 }
    }
}

/// A sampler of one sequence: its generator, and the tokens that it has seen. Two sequences never share one, so a request's
/// tokens do not depend on its neighbours.
#[derive(Debug)]
pub struct Sampler {
    settings: Sampling,
    rng: ChaCha8Rng,
    seen: Seen,
    /// Room for what the filters may keep.
    candidates: Vec<Candidate>,
}

/// A token and its logit or weight.
#[derive(Debug, Clone, Copy)]
struct Candidate {
    value: f32,
    id: u32,
}

impl Candidate {
    /// Most likely first; of equals the lowest id.
    fn order(&self, other: &Self) -> Ordering {
        other.value.total_cmp(&self.value).then(self.id.cmp(&other.id))
    }
}

/// A set of token ids.
#[derive(Debug, Default)]
struct Seen {
    bits: Vec<u64>,
    ids: Vec<u32>,
}

impl Seen {
    fn insert(&mut self, id: u32) {
        let (word, bit) = (id as usize / 64, 1 << (id % 64));
        if word >= self.bits.len() {
            self.bits.resize(word + 1, 0);
        }
        if self.bits[word] & bit == 0 {
            self.bits[word] |= bit;
            self.ids.push(id);
        }
    }
}

impl Sampler {
    /// A sampler.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] for a setting out of range.
    pub fn new(settings: Sampling) -> Result<Self, RuntimeError> {
        let Sampling { temperature, top_p, min_p, repetition_penalty, .. } = settings;
        for (what, good, expected, got) in [
            ("temperature", (0.0..=100.0).contains(&temperature), "a number from 0 to 100", temperature),
            ("top_p", top_p > 0.0 && top_p <= 1.0, "a number above 0 and at most 1", top_p),
            ("min_p", (0.0..=1.0).contains(&min_p), "a number from 0 to 1", min_p),
            (
                "repetition_penalty",
                (0.01..=100.0).contains(&repetition_penalty),
                "a number from 0.01 to 100",
                repetition_penalty,
            ),
        ] {
            if !good {
                return Err(RuntimeError::Input { what, problem: format!("expected {expected}, got {got}") });
            }
        }
        let rng = ChaCha8Rng::seed_from_u64(settings.seed);
        Ok(Self { settings, rng, seen: Seen::default(), candidates: Vec::new() })
    }

    /// Counts `ids` (the prompt) as seen, for the repetition penalty. What [`Sampler::next`] chooses counts by itself.
    pub fn observe(&mut self, ids: &[u32]) {
        if self.settings.repetition_penalty != 1.0 {
            ids.iter().for_each(|&id| self.seen.insert(id));
        }
    }

    /// The next token; `logits [vocab]` are used up. Greedy, the lowest id of equal logits wins.
    ///
    /// # Errors
    /// [`RuntimeError::Numerics`] for NaN, for infinity, and where nothing can be chosen.
    pub fn next(&mut self, logits: &mut [f32]) -> Result<u32, RuntimeError> {
        let penalty = self.settings.repetition_penalty;
        if penalty != 1.0 {
            for &id in &self.seen.ids {
                if let Some(x) = logits.get_mut(id as usize) {
                    *x = if *x < 0.0 { *x * penalty } else { *x / penalty };
                }
            }
        }
        let id = self.choose(logits)?;
        self.observe(&[id]);
        Ok(id)
    }

    fn choose(&mut self, logits: &mut [f32]) -> Result<u32, RuntimeError> {
        let top = largest(logits)?;
        let Sampling { temperature, top_k, top_p, min_p, .. } = self.settings;
        if temperature == 0.0 {
            return Ok(logits.iter().position(|&x| x == top).unwrap_or(0) as u32);
        }
        // The most likely token has weight 1, so min_p is a bound on weights.
        if top_k == 0 {
            exp_below(logits, top, temperature);
            if top_p == 1.0 && min_p == 0.0 {
                return Ok(self.draw(logits) as u32);
            }
            // All tokens below a weight of (1 - top_p) / n of the total have less than 1 - top_p together, so the others reach
            // top_p; a little less than that, for the roundings.
            let total = sum(logits);
            let floor = if top_p < 1.0 { (1.0 - top_p) * total as f32 / logits.len() as f32 * 0.999 } else { 0.0 };
            let floor = floor.max(min_p).max(LEAST);
            self.candidates.clear();
            let likely = logits.iter().zip(0..).filter(|(w, _)| **w >= floor);
            self.candidates.extend(likely.map(|(&value, id)| Candidate { value, id }));
            self.candidates.sort_unstable_by(Candidate::order);
            self.draw_filtered(logits, total)
        } else {
            most_likely(logits, top_k, &mut self.candidates);
            self.candidates.sort_unstable_by(Candidate::order);
            self.candidates.truncate(top_k);
            let weights = &mut logits[..self.candidates.len()];
            weights.iter_mut().zip(&self.candidates).for_each(|(w, c)| *w = c.value);
            exp_below(weights, top, temperature);
            self.candidates.iter_mut().zip(&*weights).for_each(|(c, w)| c.value = *w);
            let total = sum(weights);
            self.draw_filtered(weights, total)
        }
    }

    /// One of the candidates, which are sorted weights, after top-p of `total` and min-p. `room` holds as many.
    fn draw_filtered(&mut self, room: &mut [f32], total: f64) -> Result<u32, RuntimeError> {
        let Sampling { top_p, min_p, .. } = self.settings;
        let (mut kept, mut mass) = (0, 0.0);
        for (w, c) in room.iter_mut().zip(&self.candidates) {
            if kept > 0 && (mass >= f64::from(top_p) * total || c.value < min_p.max(LEAST)) {
                break;
            }
            *w = c.value;
            mass += f64::from(c.value);
            kept += 1;
        }
        let drawn = self.draw(&room[..kept]);
        Ok(self.candidates[drawn].id)
    }

    /// The place of one of the weights, the first of which or a later one is at least [`LEAST`].
    fn draw(&mut self, weights: &[f32]) -> usize {
        let mut at = self.rng.random::<f64>() * sum(weights);
        // Whole parts first, by the sums that make the total.
        let mut parts = weights.chunks(PART).enumerate().peekable();
        while let Some((i, part)) = parts.next() {
            let mass = part_sum(part);
            if at >= mass && parts.peek().is_some() {
                at -= mass;
                continue;
            }
            let mut last = None;
            for (j, &w) in part.iter().enumerate().filter(|(_, w)| **w >= LEAST) {
                last = Some(i * PART + j);
                at -= f64::from(w);
                if at < 0.0 {
                    break;
                }
            }
            if let Some(found) = last {
                return found;
            }
        }
        // The roundings left something over after the last weight.
        weights.iter().rposition(|&w| w >= LEAST).unwrap_or(0)
    }
}

/// Weights below it count as zero: `exp` in f32 does not tell them apart, and such a token would come once in 10^37 draws.
const LEAST: f32 = 1e-37;

/// Values that are summed together.
const PART: usize = 1024;

/// The sum of at most [`PART`] values, in 16 lanes.
fn part_sum(part: &[f32]) -> f64 {
    let (whole, rest) = part.as_chunks::<16>();
    let mut lanes = [0.0f64; 16];
    for chunk in whole {
        lanes.iter_mut().zip(chunk).for_each(|(lane, &x)| *lane += f64::from(x));
    }
    lanes.iter_mut().zip(rest).for_each(|(lane, &x)| *lane += f64::from(x));
    lanes.iter().sum()
}

/// The sum of all values, part after part.
fn sum(values: &[f32]) -> f64 {
    values.chunks(PART).map(part_sum).sum()
}

/// The largest logit.
///
/// # Errors
/// As [`Sampler::next`].
fn largest(logits: &[f32]) -> Result<f32, RuntimeError> {
    let (whole, rest) = logits.as_chunks::<16>();
    let (mut lanes, mut sound) = ([f32::NEG_INFINITY; 16], [true; 16]);
    let mut take = |chunk: &[f32]| {
        for (j, &x) in chunk.iter().enumerate() {
            lanes[j] = if x > lanes[j] { x } else { lanes[j] };
            sound[j] &= x < f32::INFINITY;
        }
    };
    whole.iter().for_each(|chunk| take(chunk));
    take(rest);
    let top = lanes.into_iter().fold(f32::NEG_INFINITY, f32::max);
    let broken = if sound == [true; 16] { None } else { logits.iter().find(|x| x.is_nan() || **x == f32::INFINITY) };
    match broken.copied().or((top == f32::NEG_INFINITY).then_some(top)) {
        Some(value) => Err(RuntimeError::Numerics { what: "logits".into(), value }),
        None => Ok(top),
    }
}

/// The `k` most likely tokens and perhaps others, in no order, in room for twice as many.
fn most_likely(logits: &[f32], k: usize, out: &mut Vec<Candidate>) {
    out.clear();
    let full = k.saturating_mul(2);
    let mut floor = f32::NEG_INFINITY;
    for (&logit, id) in logits.iter().zip(0..) {
        // Ids come in order, so a later logit equal to the k-th does not displace it.
        if logit > floor {
            out.push(Candidate { value: logit, id });
            if out.len() == full {
                floor = out.select_nth_unstable_by(k - 1, Candidate::order).1.value;
                out.truncate(k);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draw(settings: Sampling, logits: &[f32], times: usize) -> Vec<usize> {
        let mut sampler = Sampler::new(settings).unwrap();
        let mut counts = vec![0; logits.len()];
        for _ in 0..times {
            counts[sampler.next(&mut logits.to_vec()).unwrap() as usize] += 1;
        }
        counts
    }

    /// Probabilities by the definition: everything sorted, filter after filter, in f64.
    fn reference(s: Sampling, logits: &[f32]) -> Vec<f64> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
        order.truncate(if s.top_k > 0 { s.top_k } else { usize::MAX });
        let top = f64::from(logits[order[0]]);
        let weight = |i: usize| ((f64::from(logits[i]) - top) / f64::from(s.temperature)).exp();
        let total: f64 = order.iter().map(|&i| weight(i)).sum();
        let mut mass = 0.0;
        order.retain(|&i| {
            let keep = mass == 0.0 || mass < f64::from(s.top_p) * total;
            mass += weight(i);
            keep
        });
        order.retain(|&i| weight(i) >= f64::from(s.min_p));
        let total: f64 = order.iter().map(|&i| weight(i)).sum();
        let mut out = vec![0.0; logits.len()];
        order.iter().for_each(|&i| out[i] = weight(i) / total);
        out
    }

    fn check(settings: Sampling, logits: &[f32], n: usize) {
        let counts = draw(settings, logits, n);
        for (i, (&c, p)) in counts.iter().zip(reference(settings, logits)).enumerate() {
            // Five standard deviations of a binomial; what has probability 0 is never drawn.
            let bound = 5.0 * (p * (1.0 - p) * n as f64).sqrt() + f64::from(u8::from(p > 0.0));
            assert!((c as f64 - p * n as f64).abs() <= bound, "{settings:?}: token {i}, {c} times, p = {p}");
        }
        assert_eq!(counts, draw(settings, logits, n), "the seed decides");
        assert_ne!(counts, draw(Sampling { seed: settings.seed + 1, ..settings }, logits, n));
    }

    #[test]
    fn greedy_takes_the_first_of_the_best() {
        assert_eq!(draw(Sampling::default(), &[0.0, 2.0, 2.0, -1.0], 3), [0, 3, 0, 0]);
    }

    #[test]
    fn frequencies_are_those_of_the_definition_for_every_filter() {
        // Values in no order, with ties, a far tail and tokens that are impossible.
        let mut logits: Vec<f32> = (0..60).map(|i| ((i * 37 % 60) as f32) * 0.15 - 4.0).collect();
        logits[7] = 5.0;
        logits[20] = logits[41];
        logits[33] = f32::NEG_INFINITY;
        logits[50] = -80.0;
        let base = Sampling { temperature: 1.0, seed: 7, ..Default::default() };
        for temperature in [0.7, 1.0, 2.5] {
            for (top_k, top_p, min_p) in [
                (0, 1.0, 0.0),
                (5, 1.0, 0.0),
                (59, 1.0, 0.0),
                (1000, 1.0, 0.0),
                (0, 0.8, 0.0),
                (0, 0.999, 0.0),
                (0, 1.0, 0.1),
                (12, 0.7, 0.0),
                (12, 0.9, 0.05),
                (0, 0.95, 0.2),
            ] {
                check(Sampling { temperature, top_k, top_p, min_p, ..base }, &logits, 8000);
            }
        }
        // All alike: top-p keeps the lowest ids.
        check(Sampling { top_p: 0.5, ..base }, &[1.0; 10], 4000);
        check(Sampling { top_k: 3, ..base }, &[1.0; 10], 4000);
    }

    #[test]
    fn top_k_and_top_p_cut_the_tail() {
        let logits = [(0.5f32).ln(), (0.3f32).ln(), (0.2f32).ln()];
        let base = Sampling { temperature: 1.0, ..Default::default() };
        assert_eq!(draw(Sampling { top_k: 1, ..base }, &logits, 50), [50, 0, 0]);
        assert_eq!(draw(Sampling { top_p: 0.6, ..base }, &logits, 500)[2], 0);
        assert_eq!(draw(Sampling { top_p: 0.4, ..base }, &logits, 50), [50, 0, 0]);
        assert_eq!(draw(Sampling { min_p: 0.5, ..base }, &logits, 500)[2], 0);
        assert_eq!(draw(Sampling { min_p: 1.0, ..base }, &logits, 50), [50, 0, 0]);
    }

    #[test]
    fn a_wide_vocabulary_gives_what_a_sort_of_it_gives() {
        let n = 40_000usize;
        let logits: Vec<f32> = (0..n).map(|i| ((i * 7919 % 10_007) as f32).sqrt() * 0.2).collect();
        for top_k in [1, 2, 40, 4096] {
            let mut found = Vec::new();
            most_likely(&logits, top_k, &mut found);
            found.sort_unstable_by(Candidate::order);
            let mut order: Vec<u32> = (0..n as u32).collect();
            order.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]).then(a.cmp(&b)));
            assert!(found.iter().map(|c| c.id).take(top_k).eq(order.into_iter().take(top_k)), "{top_k}");
        }
        // After the first tokens no room grows any more.
        let settings = Sampling { temperature: 1.0, top_k: 40, repetition_penalty: 1.1, ..Default::default() };
        let mut sampler = Sampler::new(settings).unwrap();
        sampler.next(&mut logits.clone()).unwrap();
        let room = sampler.candidates.capacity();
        for _ in 0..20 {
            sampler.next(&mut logits.clone()).unwrap();
        }
        assert_eq!(sampler.candidates.capacity(), room);
    }

    #[test]
    fn the_penalty_is_that_of_transformers_for_prompt_and_answer() {
        let settings = Sampling { repetition_penalty: 2.0, ..Default::default() };
        let mut s = Sampler::new(settings).unwrap();
        s.observe(&[1, 1, 3, 99]);
        // 1 has 4 / 2 and 3 has -1 * 2, once each; 99 is beyond the vocabulary.
        let mut logits = vec![1.5, 4.0, 1.9, -1.0];
        assert_eq!(s.next(&mut logits).unwrap(), 1);
        assert_eq!(logits, [1.5, 2.0, 1.9, -2.0]);
        let mut logits = vec![1.5, 3.6, 1.9, -1.0];
        assert_eq!(s.next(&mut logits).unwrap(), 2, "1.8 is below 1.9");
        let mut logits = vec![1.5, 0.0, 1.9, -1.0];
        assert_eq!(s.next(&mut logits).unwrap(), 0, "2 counts as seen now");
        let mut s = Sampler::new(Sampling::default()).unwrap();
        s.observe(&[1]);
        assert_eq!(s.next(&mut [1.5, 4.0]).unwrap(), 1);
    }

    #[test]
    fn f120_settings_out_of_range_and_broken_logits_are_refused() {
        let d = Sampling::default();
        for settings in [
            Sampling { temperature: f32::NAN, ..d },
            Sampling { temperature: -1.0, ..d },
            Sampling { temperature: 1e9, ..d },
            Sampling { top_p: 0.0, ..d },
            Sampling { top_p: 2.0, ..d },
            Sampling { min_p: -0.1, ..d },
            Sampling { min_p: f32::NAN, ..d },
            Sampling { repetition_penalty: 0.0, ..d },
            Sampling { repetition_penalty: f32::INFINITY, ..d },
        ] {
            assert_eq!(Sampler::new(settings).unwrap_err().exit_code(), 2);
        }
        for temperature in [0.0, 1.0] {
            let mut s = Sampler::new(Sampling { temperature, top_p: 0.9, ..d }).unwrap();
            assert_eq!(s.next(&mut [0.0, f32::NAN]).unwrap_err().exit_code(), 6);
            assert_eq!(s.next(&mut []).unwrap_err().exit_code(), 6);
            assert_eq!(s.next(&mut [f32::NEG_INFINITY; 2]).unwrap_err().exit_code(), 6);
        }
    }
}
