//! The one error type of the runtime. Its texts name file, field and both values; it never prints.

use dsq_checkpoint::CheckpointError;
use dsq_quant::QuantError;

/// Why a model cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// tokenizer.json or the chat template cannot be used (exit code 3).
    #[error("{file}: {part}: {problem}")]
    Tokenizer {
        /// The file.
        file: String,
        /// Which part of it.
        part: String,
        /// What is wrong, with both values.
        problem: String,
    },
    /// A text that this tokenizer or template cannot take (exit code 2).
    #[error("{what}: {problem}")]
    Input {
        /// Which input.
        what: &'static str,
        /// What is wrong, with both values.
        problem: String,
    },
    /// More tokens than the model or the cache has positions (exit code 2).
    #[error("{what}: expected at most {limit} tokens ({of}), got {got}")]
    TooLong {
        /// `prompt`, `prompt + max tokens`...
        what: &'static str,
        /// Largest number.
        limit: usize,
        /// What sets it.
        of: &'static str,
        /// Number asked for.
        got: usize,
    },
    /// A pool of keys and values that is full (exit code 5).
    #[error("KV cache: expected at most {free} new blocks (what is free), got {needed}")]
    NoBlocks {
        /// Blocks that the step needs.
        needed: usize,
        /// Blocks that are free.
        free: usize,
    },
    /// A model that this runtime does not run (exit code 3).
    #[error("{file}: {problem}")]
    Model {
        /// The file or folder.
        file: String,
        /// What is wrong, with both values.
        problem: String,
    },
    /// NaN or infinity where a number must be (exit code 6).
    #[error("{what}: expected finite numbers, got {value}")]
    Numerics {
        /// Where.
        what: String,
        /// The value.
        value: f32,
    },
    /// A tensor that a kernel cannot take.
    #[error("{module}: {source}")]
    Quant {
        /// The layer.
        module: String,
        /// Why.
        source: QuantError,
    },
    /// A model file.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

impl RuntimeError {
    /// The exit code of the command line.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Input { .. } | Self::TooLong { .. } => 2,
            Self::Tokenizer { .. } | Self::Model { .. } | Self::Quant { .. } => 3,
            Self::NoBlocks { .. } => 5,
            Self::Numerics { .. } => 6,
            Self::Checkpoint(e) => e.exit_code(),
        }
    }

    /// What to do about it, when that is known.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::TooLong { .. } => Some("shorten the prompt or ask for fewer tokens".into()),
            Self::Checkpoint(e) => e.hint(),
            _ => None,
        }
    }
}
