//! The text that calibration runs: which windows of it, and the batches they go through the model in. Not a tokenizer,
//! and not what is measured on the windows (see `hessian.rs`).

use crate::TrainError;
use sha2::{Digest, Sha256};

/// Windows of one length, spread evenly over a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Calibration {
    windows: Vec<Vec<i32>>,
    context: usize,
}

impl Calibration {
    /// Tokens that go through the model at a time; a longer window goes alone.
    pub const BATCH_TOKENS: usize = 1024;

    /// `count / context` windows of `context` tokens. They do not overlap, the first starts at the start of the text and
    /// the last ends at its end; what lies between them is skipped evenly, so that all parts of a text have a share.
    ///
    /// # Errors
    /// [`TrainError::Setting`] (exit code 2) when `context` is below 2 or `count` below `context`, or a token lies
    /// outside the vocabulary; [`TrainError::ShortText`] (3) when there are fewer than `count` tokens.
    pub fn new(tokens: &[u32], count: usize, context: usize, vocab_size: usize) -> Result<Self, TrainError> {
        let setting = |field: &str, expected: String, got: String| {
            Err(TrainError::Setting { field: field.into(), expected, got })
        };
        if context < 2 {
            return setting("calibration context", "at least 2 tokens".into(), context.to_string());
        }
        if count < context {
            return setting("calibration tokens", format!("at least one window of {context}"), count.to_string());
        }
        if let Some((at, t)) = tokens.iter().enumerate().find(|(_, t)| **t as usize >= vocab_size) {
            let expected = format!("tokens below vocab_size = {vocab_size}");
            return setting("calibration text", expected, format!("{t} at token {at}"));
        }
        if tokens.len() < count {
            return Err(TrainError::ShortText { expected: count, got: tokens.len() });
        }
        let n = count / context;
        let slack = tokens.len() - n * context;
        let start = |i: usize| i * context + (slack as u128 * i as u128 / (n - 1).max(1) as u128) as usize;
        let window = |i: usize| tokens[start(i)..][..context].iter().map(|&t| t as i32).collect();
        Ok(Self { windows: (0..n).map(window).collect(), context })
    }

    /// Tokens of a window.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Tokens of all windows.
    pub fn tokens(&self) -> usize {
        self.windows.len() * self.context
    }

    /// SHA-256 of the windows, in hexadecimal.
    pub fn sha256(&self) -> String {
        let mut hash = Sha256::new();
        hash.update((self.context as u64).to_le_bytes());
        self.windows.iter().flatten().for_each(|t| hash.update(t.to_le_bytes()));
        format!("{:x}", hash.finalize())
    }

    /// How many batches there are.
    pub fn batch_count(&self) -> usize {
        self.windows.len().div_ceil((Self::BATCH_TOKENS / self.context).max(1))
    }

    /// The ids of each batch, window after window.
    pub(crate) fn batches(&self) -> impl Iterator<Item = Vec<i32>> + '_ {
        self.windows.chunks((Self::BATCH_TOKENS / self.context).max(1)).map(|w| w.concat())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_lie_apart_and_reach_from_start_to_end() {
        let tokens: Vec<u32> = (0..1000).collect();
        for (count, context) in [(100, 10), (95, 10), (1000, 10), (999, 500), (64, 64), (1000, 1000)] {
            let c = Calibration::new(&tokens, count, context, 1000).unwrap();
            assert_eq!(c.windows.len(), count / context);
            assert_eq!((c.windows[0][0], c.tokens(), c.context()), (0, count / context * context, context));
            assert!(c.windows.iter().all(|w| w.windows(2).all(|p| p[1] == p[0] + 1)));
            assert!(c.windows.windows(2).all(|p| p[0][context - 1] < p[1][0]));
            if c.windows.len() > 1 {
                assert_eq!(*c.windows.last().unwrap().last().unwrap(), 999);
            }
            assert_eq!(c.batches().flatten().collect::<Vec<_>>(), c.windows.concat());
            assert!(c.batches().all(|b| b.len() <= Calibration::BATCH_TOKENS.max(context)));
        }
    }

    #[test]
    fn f088_texts_that_are_too_short_are_refused_with_both_numbers() {
        for tokens in [&[][..], &[1], &[1; 99]] {
            let e = Calibration::new(tokens, 100, 10, 8).unwrap_err();
            assert!(e.to_string().contains("100") && e.to_string().contains(&tokens.len().to_string()), "{e}");
            assert_eq!(e.exit_code(), 3);
        }
        for (count, context) in [(100, 1), (100, 0), (9, 10)] {
            assert_eq!(Calibration::new(&[1; 100], count, context, 8).unwrap_err().exit_code(), 2);
        }
        let e = Calibration::new(&[1, 2, 8, 1], 4, 2, 8).unwrap_err();
        assert!(e.to_string().contains("8 at token 2") && e.exit_code() == 2, "{e}");
    }
}
