//! Training windows of a token text. The order is a function of seed, stream and sample number alone: a resumed run
//! needs nothing but its step, and no other use of random numbers can disturb it.

use crate::random::{below, permutation};
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};

/// Windows of one length, shuffled anew in each pass over the text.
#[derive(Debug)]
pub(crate) struct Windows<'a> {
    tokens: &'a [u32],
    len: usize,
    seed: u64,
    stream: u64,
    epoch: Option<Epoch>,
}

#[derive(Debug)]
struct Epoch {
    number: u64,
    /// Where the first window starts: moves in each pass, so that windows differ between passes.
    offset: usize,
    order: Vec<usize>,
}

impl<'a> Windows<'a> {
    /// Windows of `len` inputs over `tokens` (more than `len` of them).
    pub(crate) fn new(tokens: &'a [u32], len: usize, seed: u64, stream: u64) -> Self {
        Self { tokens, len, seed, stream, epoch: None }
    }

    /// How many offsets there are.
    fn slack(&self) -> usize {
        self.len.min(self.tokens.len() - self.len)
    }

    fn epoch(&mut self, number: u64) -> &Epoch {
        if self.epoch.as_ref().is_none_or(|e| e.number != number) {
            let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
            // Streams of initial weights are small numbers; these lie far above.
            rng.set_stream((self.stream + 1) << 32 | number);
            let offset = below(&mut rng, self.slack());
            let order = permutation(&mut rng, self.per_pass() as usize);
            self.epoch = Some(Epoch { number, offset, order });
        }
        self.epoch.as_ref().expect("just set")
    }

    /// Inputs and labels of samples `first .. first + n`, one after another.
    pub(crate) fn batch(&mut self, first: u64, n: usize) -> (Vec<i32>, Vec<i32>) {
        let (len, count) = (self.len, self.per_pass());
        let (mut ids, mut labels) = (Vec::with_capacity(n * len), Vec::with_capacity(n * len));
        for sample in first..first + n as u64 {
            let epoch = self.epoch(sample / count);
            let start = epoch.offset + epoch.order[(sample % count) as usize] * len;
            let window = &self.tokens[start..=start + len];
            ids.extend(window[..len].iter().map(|&t| t as i32));
            labels.extend(window[1..].iter().map(|&t| t as i32));
        }
        (ids, labels)
    }

    /// Windows that every pass has, whatever its offset.
    fn per_pass(&self) -> u64 {
        let largest = self.slack() - 1;
        ((self.tokens.len() - 1 - largest) / self.len).max(1) as u64
    }
}

/// A number below `n` (at least 1), without bias worth naming: 64 random bits modulo `n`.
#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_pass_sees_each_window_once_in_another_order() {
        let tokens: Vec<u32> = (0..1003).collect();
        let mut w = Windows::new(&tokens, 10, 1, 0);
        let per_pass = w.per_pass();
        assert_eq!(per_pass, 99);
        let pass = |w: &mut Windows, e: u64| -> Vec<i32> {
            (0..per_pass).map(|s| w.batch(e * per_pass + s, 1).0[0]).collect()
        };
        let (a, b) = (pass(&mut w, 0), pass(&mut w, 1));
        for p in [&a, &b] {
            assert_eq!(p.iter().collect::<BTreeSet<_>>().len(), 99);
            assert!(p.windows(2).any(|x| x[1] != x[0] + 10), "shuffled");
        }
        assert_ne!(a, b);
    }

    #[test]
    fn c084_a_sample_depends_on_its_number_only() {
        let tokens: Vec<u32> = (0..500).collect();
        let mut straight = Windows::new(&tokens, 16, 3, 1);
        let all: Vec<_> = (0..40).map(|s| straight.batch(s * 4, 4)).collect();
        for s in [0u64, 1, 6, 7, 8, 13, 20, 39] {
            let mut again = Windows::new(&tokens, 16, 3, 1);
            assert_eq!(again.batch(s * 4, 4), all[s as usize]);
        }
        assert_ne!(Windows::new(&tokens, 16, 4, 1).batch(0, 4), all[0]);
        assert_ne!(Windows::new(&tokens, 16, 3, 2).batch(0, 4), all[0]);
    }

    #[test]
    fn labels_are_the_next_tokens_and_short_texts_work() {
        for n in 6..40u32 {
            let tokens: Vec<u32> = (0..n).collect();
            let mut w = Windows::new(&tokens, 5, 9, 0);
            for s in 0..30 {
                let (ids, labels) = w.batch(s, 2);
                assert_eq!((ids.len(), labels.len()), (10, 10));
                assert!(ids.iter().zip(&labels).all(|(a, b)| a + 1 == *b));
            }
        }
    }
}
