//! The errors of evaluation, with exit codes. A verdict is no error: a check that fell is a [`crate::Check`].

use std::path::{Path, PathBuf};

/// Why something could not be measured or compared.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    /// Logits hold NaN or infinity (exit 6).
    #[error("logits of the {side}: position {position}, entry {entry}: expected a finite value, got {value}")]
    NonFinite {
        /// `model` or `reference`.
        side: &'static str,
        /// Which row of the logits: the flat position in the evaluated tokens, or the image.
        position: usize,
        /// Which vocabulary entry or class.
        entry: usize,
        /// The value.
        value: f32,
    },
    /// A buffer has another length than its shape says (exit 3).
    #[error("{what}: expected {expected}, got {got}")]
    Shape {
        /// Which buffer.
        what: String,
        /// What was expected.
        expected: String,
        /// What was there.
        got: String,
    },
    /// Nothing can be measured on this input (exit 3).
    #[error("{what}: expected at least {least}, got {got}")]
    TooFew {
        /// Of what.
        what: &'static str,
        /// The least that is needed.
        least: usize,
        /// What was there.
        got: usize,
    },
    /// A setting is out of range (exit 2).
    #[error("{field}: expected {expected}, got {got}")]
    Setting {
        /// Name of the setting.
        field: &'static str,
        /// What is allowed.
        expected: &'static str,
        /// What was given.
        got: String,
    },
    /// A baseline cannot be compared with; it never passes (exit 3).
    #[error("{}: {field}: baseline unusable: {problem}", .path.display())]
    Baseline {
        /// The file.
        path: PathBuf,
        /// Which field.
        field: String,
        /// What is wrong; expected and got.
        problem: String,
    },
    /// A file of a reference's logits is of something else or damaged (exit 3).
    #[error("logits of the reference: expected {expected}, got {got}")]
    Logits {
        /// What they should be of.
        expected: String,
        /// What they are of.
        got: String,
    },
    /// A suite file is wrong (exit 2).
    #[error("{}: {problem}", .path.display())]
    Suite {
        /// The file.
        path: PathBuf,
        /// What is wrong, with line and column where known.
        problem: String,
    },
    /// A file of requests is wrong (exit 3).
    #[error("{}: line {line}: {problem}", .path.display())]
    Tasks {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Which field is wrong, and both values.
        problem: String,
    },
    /// Reading or writing failed (exit 4).
    #[error("{}: cannot {action}: {source}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// `read` or `write`.
        action: &'static str,
        /// Why.
        source: std::io::Error,
    },
}

impl EvalError {
    /// The exit code of the command line for this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            EvalError::NonFinite { .. } => 6,
            EvalError::Shape { .. }
            | EvalError::TooFew { .. }
            | EvalError::Baseline { .. }
            | EvalError::Tasks { .. }
            | EvalError::Logits { .. } => 3,
            EvalError::Setting { .. } | EvalError::Suite { .. } => 2,
            EvalError::Io { .. } => 4,
        }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            EvalError::Baseline { .. } => Some(
                "find out why the baseline changed; to accept the present numbers as the new baseline: dsq regress --bless --reason TEXT"
                    .into(),
            ),
            EvalError::NonFinite { .. } => Some("the model overflows on this input; check its weights with dsq inspect".into()),
            _ => None,
        }
    }

    pub(crate) fn baseline(path: &Path, field: impl Into<String>, problem: impl Into<String>) -> Self {
        EvalError::Baseline { path: path.into(), field: field.into(), problem: problem.into() }
    }
}
