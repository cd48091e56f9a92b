//! What differs between two models, two binaries, or a model and its float original, and where: tokenizer, config, weights or kernel, with
//! the layer, the kind of difference and its share of the change. Each question has its file here; the command line is in
//! `commands/bisect.rs`.

pub mod binaries;
pub mod compare;
pub mod config;
pub mod cut;
pub mod patterns;
pub mod tokens;
pub mod walk;

use crate::error::CliError;
use dsq_checkpoint::{Checkpoint, LlamaConfig, ModelConfig};
use serde_json::{Value, json};

/// Where a difference lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cause {
    /// Other token ids for the same text.
    Tokenizer,
    /// Another architecture or constant in the config.
    Config,
    /// Other stored weights.
    Weights,
    /// Other numbers from the same weights and ids.
    Kernel,
}

impl Cause {
    /// The word for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tokenizer => "tokenizer",
            Self::Config => "config",
            Self::Weights => "weights",
            Self::Kernel => "kernel",
        }
    }
}

/// One difference.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// What differs.
    pub cause: Cause,
    /// Which layer, module, field or token; empty where the text says it.
    pub place: String,
    /// How it differs.
    pub kind: String,
    /// Its part of the whole change, 0 to 1 (layers that work together may add up to more or less); `None` where it was not measured.
    pub share: Option<f64>,
}

impl Finding {
    /// A difference whose share was not measured.
    pub fn new(cause: Cause, place: impl Into<String>, kind: impl Into<String>) -> Self {
        Self { cause, place: place.into(), kind: kind.into(), share: None }
    }

    /// One line for people.
    pub fn line(&self) -> String {
        let what = match (self.place.as_str(), self.kind.as_str()) {
            ("", kind) => kind.to_owned(),
            (place, "") => place.to_owned(),
            (place, kind) => format!("{place} ({kind})"),
        };
        let share = self.share.map(|s| format!(", {} of the change", percent(s))).unwrap_or_default();
        format!("{}: {what}{share}", self.cause.name())
    }

    /// The same for programs.
    pub fn json(&self) -> Value {
        json!({"cause": self.cause.name(), "place": self.place, "kind": self.kind, "share": self.share})
    }
}

/// A share in percent; small ones keep a digit.
pub fn percent(share: f64) -> String {
    let p = 100.0 * share;
    if p >= 9.95 { format!("{p:.0}%") } else { format!("{p:.1}%") }
}

/// The config of a language model.
///
/// # Errors
/// Exit code 2 for an image model.
pub fn language(model: &Checkpoint) -> Result<&LlamaConfig, CliError> {
    match model.config() {
        ModelConfig::Llama(c) => Ok(c),
        _ => {
            let problem = "--bisect walks language models; expected one, got an image model";
            Err(CliError::usage(format!("{}: {problem}", model.path().display())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_one_plain_line() {
        let mut f = Finding::new(Cause::Weights, "model.layers.7.self_attn.q_proj", "scales");
        f.share = Some(0.931);
        assert_eq!(f.line(), "weights: model.layers.7.self_attn.q_proj (scales), 93% of the change");
        f.share = Some(0.0123);
        assert!(f.line().ends_with(", 1.2% of the change"));
        let f = Finding::new(Cause::Tokenizer, "", "no BOS");
        assert_eq!((f.line().as_str(), f.json()["share"].clone()), ("tokenizer: no BOS", Value::Null));
    }
}
