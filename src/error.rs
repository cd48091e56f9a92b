//! The one error type of the command line: exit code, one line, hint. Library errors convert into it; their texts
//! already name file, field and both values.

/// An error that ends a command.
#[derive(Debug)]
pub struct CliError {
    code: u8,
    message: String,
    hint: Option<String>,
}

impl CliError {
    /// An error with an exit code (design: 1 gate, 2 usage or recipe, 3 input artifact, 4 I/O, 5 device or memory,
    /// 6 numerics, 130 interrupted: `main` makes it 143 after SIGTERM).
    pub fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), hint: None }
    }

    /// A usage or recipe error (exit code 2).
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(2, message)
    }

    /// Adds a hint line.
    pub fn with_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// The exit code.
    pub fn code(&self) -> u8 {
        self.code
    }

    /// Writes the error to stderr: one line and the hint, or one JSON object. Control characters of untrusted
    /// names are escaped, so that a file cannot write to the terminal.
    pub fn print(&self, json: bool) {
        if json {
            let object = serde_json::json!({"error": {"code": self.code, "message": self.message, "hint": self.hint}});
            complain(&object.to_string());
            return;
        }
        complain(&format!("error: {}", escape(&self.message)));
        if let Some(hint) = &self.hint {
            complain(&format!("hint: {}", escape(hint)));
        }
    }
}

/// Writes a line to stderr. Where that cannot be written either, the exit code has to do.
pub fn complain(line: &str) {
    use std::io::Write;
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Escapes control characters except newlines (recipe errors show a caret under the line).
fn escape(text: &str) -> String {
    text.chars()
        .flat_map(|c| {
            let keep = !c.is_control() || c == '\n';
            let bidi = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
            if keep && !bidi { vec![c] } else { c.escape_default().collect() }
        })
        .collect()
}

impl std::fmt::Display for CliError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

/// Library errors carry their own exit code and hint.
macro_rules! from_library {
    ($($error:ty),* $(,)?) => {$(
        impl From<$error> for CliError {
            fn from(e: $error) -> Self {
                Self { code: e.exit_code(), message: e.to_string(), hint: e.hint() }
            }
        }
    )*};
}
from_library!(dsq_checkpoint::CheckpointError, dsq_eval::EvalError, dsq_runtime::RuntimeError, dsq_train::TrainError,);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f023_names_from_files_cannot_write_to_the_terminal() {
        assert_eq!(escape("a\u{1b}[31mb\u{202e}c\n^"), "a\\u{1b}[31mb\\u{202e}c\n^");
    }
}
