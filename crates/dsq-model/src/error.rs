//! Why a model cannot be built.

use dsq_checkpoint::CheckpointError;

/// Why a model cannot be built from a checkpoint or from tensors.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The checkpoint holds another kind of model.
    #[error("architecture: expected {expected}, got {got}")]
    Architecture {
        /// What was asked for.
        expected: &'static str,
        /// What the config says.
        got: String,
    },
    /// A tensor is missing or has another size.
    #[error("{name}: {problem}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong, with both values.
        problem: String,
    },
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

impl ModelError {
    /// The exit code of the command line.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Architecture { .. } | Self::Tensor { .. } => 3,
            Self::Checkpoint(e) => e.exit_code(),
        }
    }

    /// What to do about it, when that is known.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Checkpoint(e) => e.hint(),
            _ => None,
        }
    }
}
