//! Writing to stdout, reports, and progress bars. A closed pipe ends the process quietly; bars appear only on a terminal.

use crate::error::CliError;
use dsq_eval::Report;
use std::io::{IsTerminal, Write};
use std::path::Path;

/// Writes `text` and a newline to stdout. When the reader is gone (`dsq ... | head`) the process ends with code 0.
pub fn line(text: impl AsRef<str>) {
    piece(&format!("{}\n", text.as_ref()));
}

/// Writes `text` to stdout at once (generated text as it is made); a closed pipe is handled as by [`line`].
pub fn piece(text: &str) {
    let mut out = std::io::stdout().lock();
    let wrote = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    if let Err(e) = wrote {
        std::process::exit(if e.kind() == std::io::ErrorKind::BrokenPipe { 0 } else { 4 });
    }
}

/// Writes a report: to a file as JSON, if there is one, and to stdout, as JSON or as a table with a last line `about` it.
///
/// # Errors
/// Exit code 4 when the file cannot be written.
pub fn report(report: &Report, file: Option<&Path>, json: bool, about: &str) -> Result<(), CliError> {
    if let Some(file) = file {
        dsq_checkpoint::write_atomic(file, format!("{}\n", report.to_json()).as_bytes())?;
    }
    if json {
        line(report.to_json());
    } else {
        line(report.table());
        line(about);
    }
    Ok(())
}

/// A line for people on stderr.
pub fn note(text: impl AsRef<str>) {
    let _ = writeln!(std::io::stderr(), "note: {}", text.as_ref());
}

/// A progress bar on stderr with the time left; hidden when stderr is no terminal.
pub fn progress(total: u64, template: &str) -> indicatif::ProgressBar {
    if !std::io::stderr().is_terminal() {
        return indicatif::ProgressBar::hidden();
    }
    let bar = indicatif::ProgressBar::new(total);
    if let Ok(style) = indicatif::ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}
