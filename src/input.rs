//! Files that a user names: read whole, with the error that names them. Not model files (see `dsq-checkpoint`).

use crate::error::CliError;
use dsq_checkpoint::printable;
use std::path::Path;

/// The bytes of a file.
///
/// # Errors
/// Exit code 4 for a file that cannot be read.
pub fn bytes(path: &Path) -> Result<Vec<u8>, CliError> {
    std::fs::read(path)
        .map_err(|e| CliError::new(4, format!("{}: cannot read: {e}", printable(&path.to_string_lossy()))))
}

/// The text of a file.
///
/// # Errors
/// As [`bytes`]; exit code 3 for bytes that are no UTF-8, naming the first.
pub fn text(path: &Path) -> Result<String, CliError> {
    utf8(path, bytes(path)?)
}

/// `bytes` of the file `path` as text.
///
/// # Errors
/// Exit code 3, naming the first byte that is no UTF-8.
pub fn utf8(path: &Path, bytes: Vec<u8>) -> Result<String, CliError> {
    String::from_utf8(bytes).map_err(|e| {
        let (at, path) = (e.utf8_error().valid_up_to(), path.to_string_lossy());
        CliError::new(3, format!("{}: byte {at}: expected UTF-8 text, got something else", printable(&path)))
    })
}
