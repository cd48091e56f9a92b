//! The one error type of training. Its texts name file, field and both values; it never prints.

use dsq_checkpoint::CheckpointError;
use dsq_quant::QuantError;
use std::path::{Path, PathBuf};

/// Why training cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// A setting that cannot work (exit code 2).
    #[error("{field}: expected {expected}, got {got}")]
    Setting {
        /// Key of the recipe.
        field: String,
        /// What is allowed.
        expected: String,
        /// What was given.
        got: String,
    },
    /// The run folder cannot be used as asked (exit code 2).
    #[error("{}: {problem}", path.display())]
    RunFolder {
        /// The folder.
        path: PathBuf,
        /// What is wrong, with both values.
        problem: String,
        /// What to do.
        hint: String,
    },
    /// Another process writes to the run folder (exit code 4).
    #[error("{}: in use by {owner}", path.display())]
    InUse {
        /// The folder.
        path: PathBuf,
        /// Who holds it.
        owner: String,
    },
    /// A file of a run folder or a data set is broken (exit code 3).
    #[error("{}: {problem}", path.display())]
    Artifact {
        /// The file.
        path: PathBuf,
        /// What is wrong, with both values.
        problem: String,
    },
    /// A file of a journal is not what was written there (exit code 3).
    #[error("{}: {problem}", path.display())]
    Journal {
        /// The file.
        path: PathBuf,
        /// What is wrong, with both values.
        problem: String,
    },
    /// Reading or writing failed, or there is no room (exit code 4).
    #[error("{}: {action}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was being done.
        action: &'static str,
        /// What the system says.
        source: std::io::Error,
    },
    /// NaN or infinity during training (exit code 6).
    #[error("{what} at step {step}: expected a finite number, got {value}")]
    Numerics {
        /// What is not finite.
        what: String,
        /// Global step.
        step: u64,
        /// Its value.
        value: f64,
    },
    /// A value that is not finite in the inputs of a layer during calibration (exit code 6).
    #[error("{module}: calibration inputs: expected finite values with finite squares, got a square sum of {value}")]
    Activations {
        /// The layer.
        module: String,
        /// What the sum of the squares of an input became.
        value: f64,
    },
    /// A key or value of a KV cache that is not finite during calibration (exit code 6).
    #[error("{module}: {what} of the calibration text: expected finite numbers for a cache of codes, got {value}")]
    Keys {
        /// The attention.
        module: String,
        /// `keys` or `values`.
        what: &'static str,
        /// The first such number.
        value: f32,
    },
    /// A text has fewer tokens than are to be taken from it (exit code 3).
    #[error("calibration text: expected at least {expected} tokens, got {got}")]
    ShortText {
        /// Tokens to be taken.
        expected: usize,
        /// Tokens of the text.
        got: usize,
    },
    /// Stopped on request after a finished, saved step (exit code 130).
    #[error("interrupted after step {step}; the checkpoint is in {}", path.display())]
    Interrupted {
        /// Last finished step.
        step: u64,
        /// The run folder.
        path: PathBuf,
    },
    /// A tensor cannot be quantized.
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
    /// A model that cannot be built from its tensors.
    #[error(transparent)]
    Model(#[from] dsq_model::ModelError),
}

impl TrainError {
    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { path: path.to_path_buf(), action, source }
    }

    /// The exit code of the command line.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Setting { .. } | Self::RunFolder { .. } => 2,
            Self::Artifact { .. } | Self::Journal { .. } | Self::ShortText { .. } => 3,
            Self::Io { .. } | Self::InUse { .. } => 4,
            Self::Numerics { .. } | Self::Activations { .. } | Self::Keys { .. } => 6,
            Self::Interrupted { .. } => 130,
            Self::Quant { source: QuantError::NonFinite { .. } | QuantError::ScaleOverflow { .. }, .. } => 6,
            Self::Quant { .. } => 2,
            Self::Checkpoint(e) => e.exit_code(),
            Self::Model(e) => e.exit_code(),
        }
    }

    /// What to do about it, when that is known.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::RunFolder { hint, .. } => Some(hint.clone()),
            Self::Journal { .. } => Some("nothing of it is used; remove the journal's folder to begin again".into()),
            Self::InUse { .. } => Some("wait for it, or choose another --out".into()),
            Self::Interrupted { .. } => Some("go on with --resume".into()),
            Self::Numerics { .. } => Some("lower the learning rate, then --resume from the last checkpoint".into()),
            Self::Checkpoint(e) => e.hint(),
            Self::Model(e) => e.hint(),
            _ => None,
        }
    }
}
