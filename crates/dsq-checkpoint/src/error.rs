//! What can be wrong with a file, and the one error type of this crate. Not printing: the `dsq` package does that.

use dsq_quant::QuantError;
use std::path::{Path, PathBuf};

/// How bad a [`Fault`] is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Severity {
    /// Worth knowing; the model loads and means what it says.
    Note,
    /// The model loads, and something in it is most likely not what its author meant.
    Warning,
    /// The model cannot be used.
    Error,
}

/// One thing that is wrong with an artifact: `FILE: FIELD OR TENSOR: what is wrong; expected X, got Y`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// How bad it is.
    pub severity: Severity,
    /// The file or folder.
    pub file: PathBuf,
    /// The field or tensor; empty when the whole file is meant.
    pub field: String,
    /// What is wrong, with the expected and the found value.
    pub problem: String,
    /// What to do about it.
    pub hint: Option<String>,
}

impl Fault {
    /// A fault without a hint.
    pub fn new(severity: Severity, file: &Path, field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { severity, file: file.to_path_buf(), field: field.into(), problem: problem.into(), hint: None }
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: ", printable(&self.file.to_string_lossy()))?;
        if !self.field.is_empty() {
            write!(f, "{}: ", printable(&self.field))?;
        }
        // A problem is our own text around names from the file; it may be long (a list of shards), but not several lines.
        f.write_str(&escaped(&self.problem))
    }
}

/// Longest name, in characters, that is printed whole.
const PRINTED_NAME: usize = 200;

/// A name from a file, fit for a terminal: control and bidirectional characters escaped, and cut when very long.
pub fn printable(name: &str) -> String {
    if name.chars().count() <= PRINTED_NAME {
        return escaped(name);
    }
    let head: String = name.chars().take(PRINTED_NAME).collect();
    format!("{}... ({} bytes)", escaped(&head), name.len())
}

fn escaped(text: &str) -> String {
    let hostile = |c: char| {
        c.is_control() || matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if hostile(c) { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}

/// Why a checkpoint cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The artifact is invalid (exit code 3).
    #[error("{0}")]
    Invalid(Box<Fault>),
    /// A recipe or a command line asks for what cannot be done (exit code 2).
    #[error("{0}")]
    Usage(Box<Fault>),
    /// Values that cannot be stored without becoming something else (exit code 6).
    #[error("{0}")]
    Numerics(Box<Fault>),
    /// The operating system refused (exit code 4).
    #[error("{}: cannot {action}: {source}", printable(&file.to_string_lossy()))]
    Io {
        /// File or folder.
        file: PathBuf,
        /// What was tried: "open", "read", ...
        action: &'static str,
        /// Why not.
        source: std::io::Error,
    },
    /// Not enough room for the output (exit code 4).
    #[error(
        "{}: not enough free space; expected at least {needed} bytes, got {free} bytes",
        printable(&dir.to_string_lossy())
    )]
    NoSpace {
        /// The folder that would be written in.
        dir: PathBuf,
        /// Bytes the output needs.
        needed: u64,
        /// Bytes the file system has free for us.
        free: u64,
    },
    /// The arithmetic refused a tensor (exit code 6 for NaN, infinity and overflow; 2 for a setting; 3 for stored
    /// parameters that cannot be used).
    #[error("{}: {}: {source}", printable(&file.to_string_lossy()), printable(tensor))]
    Quant {
        /// File or folder.
        file: PathBuf,
        /// Tensor.
        tensor: String,
        /// What is wrong with it.
        source: QuantError,
    },
}

impl CheckpointError {
    /// An invalid artifact: `file: field: problem`. Put the expected and the found value into `problem`.
    pub fn invalid(file: &Path, field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid(Box::new(Fault::new(Severity::Error, file, field, problem)))
    }

    /// A request that cannot be carried out.
    pub fn usage(file: &Path, field: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Usage(Box::new(Fault::new(Severity::Error, file, field, problem)))
    }

    /// Values that cannot be stored.
    pub fn numerics(file: &Path, tensor: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Numerics(Box::new(Fault::new(Severity::Error, file, tensor, problem)))
    }

    /// A refusal by the operating system.
    pub fn io(file: &Path, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { file: file.to_path_buf(), action, source }
    }

    /// A refusal by the arithmetic.
    pub fn quant(file: &Path, tensor: impl Into<String>, source: QuantError) -> Self {
        Self::Quant { file: file.to_path_buf(), tensor: tensor.into(), source }
    }

    /// Adds a hint to an invalid artifact or a usage error; the others have their own.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        if let Self::Invalid(fault) | Self::Usage(fault) | Self::Numerics(fault) = &mut self {
            fault.hint = Some(hint.into());
        }
        self
    }

    /// The exit code of the command that meets this error.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Invalid(_) => 3,
            Self::Usage(_) => 2,
            Self::Numerics(_) => 6,
            Self::Io { .. } | Self::NoSpace { .. } => 4,
            Self::Quant { source, .. } => match source {
                QuantError::NonFinite { .. } | QuantError::ScaleOverflow { .. } => 6,
                QuantError::GroupNotDividing { .. } | QuantError::Setting { .. } => 2,
                QuantError::Length { .. } | QuantError::BadQParam { .. } | QuantError::BadCode { .. } => 3,
            },
        }
    }

    /// What the user can do about it.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Invalid(fault) | Self::Usage(fault) | Self::Numerics(fault) => fault.hint.clone(),
            Self::NoSpace { .. } => Some("free some space or choose another --out; nothing was written".into()),
            Self::Quant { source: QuantError::ScaleOverflow { .. }, .. } => {
                Some("store the scales in bf16 or f32 (--scale-dtype bf16)".into())
            }
            Self::Quant { source: QuantError::NonFinite { .. }, .. } => {
                Some("repair the checkpoint, or keep this layer in float with --ignore".into())
            }
            Self::Quant { source: QuantError::GroupNotDividing { .. }, .. } => {
                Some("choose a group size that divides in_features, or keep this layer in float with --ignore".into())
            }
            Self::Io { .. } | Self::Quant { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f023_names_from_files_are_escaped_and_cut() {
        let e = CheckpointError::invalid(Path::new("a\nb"), "x\u{1b}[31m\u{202e}", "bad\0name; expected a, got b");
        assert_eq!(e.to_string(), "a\\nb: x\\u{1b}[31m\\u{202e}: bad\\u{0}name; expected a, got b");
        let long = printable(&"n".repeat(65536));
        assert!(long.len() < 300 && long.ends_with("(65536 bytes)"), "{long}");
    }

    #[test]
    fn exit_codes_follow_the_table() {
        let p = Path::new("m");
        let io = CheckpointError::io(p, "read", std::io::ErrorKind::NotFound.into());
        let nan = QuantError::NonFinite { index: 3, value: f32::NAN, count: 1 };
        let codes = [
            CheckpointError::invalid(p, "", "x").exit_code(),
            CheckpointError::usage(p, "", "x").exit_code(),
            io.exit_code(),
            CheckpointError::NoSpace { dir: p.into(), needed: 2, free: 1 }.exit_code(),
            CheckpointError::quant(p, "w", nan).exit_code(),
            CheckpointError::quant(p, "w", QuantError::GroupNotDividing { k: 3, group_size: 2 }).exit_code(),
        ];
        assert_eq!(codes, [3, 2, 4, 4, 6, 2]);
    }
}
