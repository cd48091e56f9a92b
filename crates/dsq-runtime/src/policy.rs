//! Which keys and values a sequence keeps, and how much memory that takes. Not the memory itself (see `cache.rs`).

use crate::RuntimeError;
use crate::prune::Budget;
use dsq_checkpoint::LlamaConfig;
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
    /// In each layer the first `sinks`, the last `recent`, and of the others those that the last tokens gave most attention. A layer keeps
    /// the more the higher the entropy of its attention, at most half more than the average. A sequence is pruned
    /// each time that it has 64 positions more; what was dropped never comes back (see `prune.rs`, which also has the
    /// sources). Sequences cannot be shared, nor cut to another length than 0.
    Entropy {
        /// Positions that a layer keeps on average over the layers; 64 more come before they are pruned again.
        budget: usize,
        /// Positions at the beginning.
        sinks: usize,
        /// Positions at the end, at least 1. With the sinks at most the budget.
        recent: usize,
    },
}

impl KvPolicy {
    /// `full`, `window` or `entropy`.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window { .. } => "window",
            Self::Entropy { .. } => "entropy",
        }
    }

    /// Whether sequences that begin alike can share blocks.
    pub fn shares(&self) -> bool {
        self.budget().is_none()
    }

    /// What a pruned sequence keeps.
    pub(crate) fn budget(&self) -> Option<Budget> {
        match *self {
            Self::Entropy { budget, sinks, recent } => Some(Budget { budget, sinks, recent }),
            Self::Full | Self::Window { .. } => None,
        }
    }

    /// Whether the numbers make sense.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] for a window or recent positions of 0, and for a budget that sinks and recent positions exceed.
    pub fn check(&self) -> Result<(), RuntimeError> {
        let wrong = |what, problem: String| Err(RuntimeError::Input { what, problem });
        match *self {
            Self::Window { window: 0, .. } => wrong("KV window", "expected at least 1 position, got 0".into()),
            Self::Entropy { recent: 0, .. } => wrong("KV recent", "expected at least 1 position, got 0".into()),
            Self::Entropy { budget, sinks, recent } if sinks.saturating_add(recent) > budget => wrong(
                "KV budget",
                format!("expected at least the {sinks} sinks and {recent} recent positions, got {budget}"),
            ),
            _ => Ok(()),
        }
    }

    /// Whether a model can run under it; includes [`KvPolicy::check`].
    ///
    /// # Errors
    /// As there; [`RuntimeError::Input`] for entropy on a model with windows of its own.
    pub(crate) fn check_model(&self, config: &LlamaConfig) -> Result<(), RuntimeError> {
        self.check()?;
        let windows = (0..config.num_hidden_layers).find_map(|i| Some((i, config.window(i)?)));
        match windows {
            Some((layer, window)) if !self.shares() => Err(RuntimeError::Input {
                what: "KV policy entropy",
                problem: format!(
                    "expected a model whose layers see all positions, got a window of {window} in layer {layer}"
                ),
            }),
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
            Self::Entropy { .. } => self.peak(0, 0, len).div_ceil(BLOCK),
        }
    }

    /// Places in its blocks that a sequence of `at` positions, of which `filled` are held, needs at most while it grows to `len`.
    pub(crate) fn peak(&self, filled: usize, at: usize, len: usize) -> usize {
        self.budget().map_or(len, |b| b.peak(filled, at, len))
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
