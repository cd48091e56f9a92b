//! Whether a model is measured on the text that calibrated or trained it: a sketch of the lines of a text, kept beside the model, and the
//! share of another text's lines that are in it. Not a measure of likeness: lines count when they are equal.
//!
//! The sketch holds the smallest of the 64-bit hashes of all lines (a bottom-k sketch), so of a text of any length it
//! has a fixed size, and of the lines whose hash is at most its largest it knows all.

use crate::error::CliError;
use dsq_checkpoint::hex_sha256 as sha256;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// The file in a model's folder.
pub const FILE: &str = "dsq-calibration.json";
/// Hashes that are kept.
const KEPT: usize = 4096;
/// Characters that a line has at least to count: short ones (headings, markup) are in many texts.
const LEAST: usize = 24;

/// The share from which on a person is told: texts of one kind have some lines in common.
pub const TOLD: f64 = 0.1;

/// What is kept of a calibration text.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sketch {
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
    /// Whether the hashes are those of all lines.
    pub complete: bool,
    /// The smallest hashes of lines, rising, in hexadecimal.
    pub lines: Vec<String>,
}

/// The hashes of the lines that count.
fn hashes(text: &str) -> BTreeSet<String> {
    let lines = text.lines().map(str::trim).filter(|l| l.chars().count() >= LEAST);
    lines.map(|l| sha256(l.as_bytes())[..16].to_owned()).collect()
}

impl Sketch {
    /// Of a text.
    pub fn new(text: &str) -> Self {
        let all = hashes(text);
        let complete = all.len() <= KEPT;
        Self { sha256: sha256(text.as_bytes()), complete, lines: all.into_iter().take(KEPT).collect() }
    }

    /// The bytes of the file beside a model.
    ///
    /// # Errors
    /// Exit code 70 when it cannot be written as JSON.
    pub fn file(&self) -> Result<(String, Vec<u8>), CliError> {
        let bytes = serde_json::to_vec(self).map_err(|e| CliError::new(70, format!("{FILE}: {e}")))?;
        Ok((FILE.to_owned(), bytes))
    }

    /// The share, from 0 to 1, of the different lines of `text` that the sketched text has too: measured on all of them if
    /// the sketch is complete, else on those that it would hold. The same text gives 1.
    pub fn overlap(&self, text: &str) -> f64 {
        if sha256(text.as_bytes()) == self.sha256 {
            return 1.0;
        }
        let known: BTreeSet<&str> = self.lines.iter().map(String::as_str).collect();
        let last = known.last().copied().unwrap_or_default();
        let all = hashes(text);
        let seen: Vec<&String> = all.iter().filter(|h| self.complete || h.as_str() <= last).collect();
        let found = seen.iter().filter(|h| known.contains(h.as_str())).count();
        found as f64 / seen.len().max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(lines: std::ops::Range<usize>) -> String {
        lines.map(|i| format!("this is line number {i} of a long text\n")).collect()
    }

    #[test]
    fn shares_are_exact_for_short_texts_and_near_for_long_ones() {
        let short = Sketch::new(&text(0..100));
        assert!(short.complete);
        for (other, want) in [(0..100, 1.0), (50..150, 0.5), (100..200, 0.0), (0..400, 0.25)] {
            assert_eq!(short.overlap(&text(other)), want);
        }
        // 4,096 of 50,000 lines are known; of as many others that share a fifth about 4,096 / 50,000 of 50,000 are asked for,
        // so the standard deviation is sqrt(0.2 * 0.8 / 4096) = 0.00625; five of them.
        let long = Sketch::new(&text(0..50_000));
        assert!(!long.complete && long.lines.len() == KEPT);
        assert!((long.overlap(&text(40_000..90_000)) - 0.2).abs() < 0.032);
        assert_eq!((long.overlap(&text(50_000..60_000)), long.overlap(&text(0..50_000))), (0.0, 1.0));
        assert_eq!((long.overlap(""), long.overlap("short\n")), (0.0, 0.0));
    }

    #[test]
    fn it_reads_what_it_writes() {
        let sketch = Sketch::new(&text(0..10));
        let json = serde_json::to_string(&sketch).unwrap();
        assert_eq!(serde_json::from_str::<Sketch>(&json).unwrap(), sketch);
    }
}
