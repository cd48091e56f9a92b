//! Which keys and values a sequence keeps, and how much memory that takes. Not the memory itself (see `cache.rs`).

use crate::RuntimeError;
use dsq_kernels::attention::BLOCK;

/// Which positions of a sequence stay in the cache of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvPolicy {
    /// All.
    #[default]
    Full,
    /// The first `sinks` (attention sinks, StreamingLLM, arXiv:2309.17453, here at their positions in the sequence) and the last `window`,
    /// a token's own among them. A token sees no other; blocks that no later token sees in any layer are given back. A window
    /// of the model's own that is shorter holds, and has no sinks: the model was trained without what lies before it.
    Window {
        /// Positions at the beginning.
        sinks: usize,
        /// Positions at the end, at least 1.
        window: usize,
    },
}

impl KvPolicy {
    /// `full` or `window`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window { .. } => "window",
        }
    }

    /// Whether the numbers make sense.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] for a window of no position.
    pub fn check(&self) -> Result<(), RuntimeError> {
        match self {
            Self::Window { window: 0, .. } => {
                Err(RuntimeError::Input { what: "KV window", problem: "expected at least 1 position, got 0".into() })
            }
            _ => Ok(()),
        }
    }

    /// Blocks that a sequence has at most on its way to `len` positions, where a step takes at most `step` of its tokens.
    pub fn blocks(&self, len: usize, step: usize) -> usize {
        let all = len.div_ceil(BLOCK);
        match *self {
            Self::Full => all,
            Self::Window { sinks, window } => {
                // What the first token of a step sees before itself, and the step, begin and end anywhere in a block.
                let seen = (window - 1).saturating_add(step.min(len));
                all.min(sinks.div_ceil(BLOCK).saturating_add(seen.saturating_add(BLOCK - 2) / BLOCK + 1))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_bounded_by_what_it_sees_and_a_step() {
        assert_eq!(KvPolicy::Full.blocks(100, 1), 7);
        let window = KvPolicy::Window { sinks: 4, window: 20 };
        // Brute force over every length: blocks of sinks, and from the first one in sight to the end of the step.
        for step in 1..60usize {
            let mut most = 0;
            let mut len = 0;
            while len < 500 {
                let end = (len + step).min(500);
                let first = (len + 1usize).saturating_sub(20) / BLOCK;
                most = most.max((0..end.div_ceil(BLOCK)).filter(|&b| b < 1 || b >= first).count());
                assert!(most <= window.blocks(end, step), "{end} {step}");
                len = end;
            }
            assert!(window.blocks(500, step) <= most + 1, "{step}");
        }
        assert_eq!(window.blocks(5, 192), 1);
        assert!(KvPolicy::Window { sinks: 0, window: 0 }.check().is_err());
    }
}
