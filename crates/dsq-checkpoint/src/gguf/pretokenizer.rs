//! The pre-tokenizers that `tokenizer.ggml.pre` names, as the `pre_tokenizer` of a `tokenizer.json`. Not a tokenizer.
//!
//! The names and what they stand for are those of llama.cpp's `llama-vocab.cpp`; the expressions are those of the
//! `tokenizer.json` of the model family concerned, where llama.cpp quotes the original beside its own rewriting.

use serde_json::{Value, json};

/// How a text is cut into words before byte-pair merging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Split {
    /// GPT-2's expression alone.
    Gpt2,
    /// Every digit by itself, then GPT-2's expression.
    DigitsThenGpt2,
    /// One expression.
    Regex(&'static str),
}

/// One pre-tokenizer and the defaults that go with its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PreTokenizer {
    split: Split,
    /// A word that is itself a token is taken whole, whatever the merges say.
    pub(crate) ignore_merges: bool,
    /// Whether a text starts with the BOS token when `tokenizer.ggml.add_bos_token` is absent.
    pub(crate) adds_bos: bool,
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

impl PreTokenizer {
    /// Every name that is known.
    pub(crate) const NAMES: [&str; 13] = [
        "smollm",
        "starcoder",
        "refact",
        "command-r",
        "gpt-2",
        "llama-bpe",
        "llama3",
        "llama-v3",
        "falcon3",
        "smaug-bpe",
        "qwen2",
        "megrez",
        "tekken",
    ];

    /// The pre-tokenizer of this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let plain = |split| Self { split, ignore_merges: false, adds_bos: false };
        match name {
            "smollm" | "starcoder" | "refact" | "command-r" => Some(plain(Split::DigitsThenGpt2)),
            "gpt-2" => Some(plain(Split::Gpt2)),
            "llama-bpe" | "llama3" | "llama-v3" | "falcon3" => {
                Some(Self { split: Split::Regex(LLAMA3), ignore_merges: true, adds_bos: true })
            }
            "smaug-bpe" => Some(plain(Split::Regex(LLAMA3))),
            "qwen2" | "megrez" => Some(plain(Split::Regex(QWEN2))),
            "tekken" => Some(Self { split: Split::Regex(TEKKEN), ignore_merges: true, adds_bos: true }),
            _ => None,
        }
    }

    /// The `pre_tokenizer` object of a `tokenizer.json`.
    pub(crate) fn to_json(self) -> Value {
        let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
        match self.split {
            Split::Gpt2 => bytes(true),
            Split::DigitsThenGpt2 => json!({
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": true}, bytes(true)],
            }),
            Split::Regex(regex) => json!({
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false},
                    bytes(false),
                ],
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_listed_name_is_known_and_nothing_else() {
        for name in PreTokenizer::NAMES {
            assert!(PreTokenizer::named(name).is_some(), "{name}");
        }
        for name in ["", "default", "SmolLM", "unknown"] {
            assert!(PreTokenizer::named(name).is_none(), "{name}");
        }
    }
}
