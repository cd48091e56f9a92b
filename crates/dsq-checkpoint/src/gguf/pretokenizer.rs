//! The pre-tokenizers that `tokenizer.ggml.pre` names, as the `pre_tokenizer` of a `tokenizer.json`. Not a tokenizer.
//!
//! The names and what they stand for are those of llama.cpp's `llama-vocab.cpp`; the expressions are those of the
//! `tokenizer.json` of the model family concerned, where llama.cpp quotes the original beside its own rewriting. Only names
//! whose ids were held against the original tokenizer's, on llama.cpp's own vocabulary files, are listed (a test in
//! `tokenizer.rs` repeats it); any other name is refused.

use serde_json::{Value, json};

/// How a text is cut into words before byte-pair merging.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Split {
    /// GPT-2's expression alone.
    Gpt2,
    /// Every digit by itself, then GPT-2's expression.
    DigitsThenGpt2,
    /// These expressions, one after the other on the pieces of the one before.
    Regexes(&'static [&'static str]),
}

/// One pre-tokenizer and the defaults that go with its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PreTokenizer {
    split: Split,
    /// A word that is itself a token is taken whole, whatever the merges say.
    pub(crate) ignore_merges: bool,
    /// Texts are brought to Unicode normal form C first (Qwen's own tokenizer does; llama.cpp leaves it out).
    pub(crate) nfc: bool,
    /// Whether a text starts with the BOS token when `tokenizer.ggml.add_bos_token` is absent.
    pub(crate) adds_bos: bool,
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The fourth one is a range of CJK, as llama.cpp has it.
const DEEPSEEK_CODER: [&str; 5] =
    ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+", r"\p{N}"];

impl PreTokenizer {
    /// Every name that is known.
    pub(crate) const NAMES: [&str; 10] = [
        "smollm",
        "starcoder",
        "refact",
        "command-r",
        "gpt-2",
        "llama-bpe",
        "llama3",
        "llama-v3",
        "qwen2",
        "deepseek-coder",
    ];

    /// The pre-tokenizer of this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let plain = |split| Self { split, ignore_merges: false, nfc: false, adds_bos: false };
        match name {
            "smollm" | "starcoder" | "refact" | "command-r" => Some(plain(Split::DigitsThenGpt2)),
            "gpt-2" => Some(plain(Split::Gpt2)),
            "llama-bpe" | "llama3" | "llama-v3" => {
                Some(Self { ignore_merges: true, adds_bos: true, ..plain(Split::Regexes(&[LLAMA3])) })
            }
            "qwen2" => Some(Self { nfc: true, ..plain(Split::Regexes(&[QWEN2])) }),
            "deepseek-coder" => Some(plain(Split::Regexes(&DEEPSEEK_CODER))),
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
            Split::Regexes(regexes) => {
                let split = |regex: &&str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
                let parts: Vec<Value> = regexes.iter().map(split).chain([bytes(false)]).collect();
                json!({"type": "Sequence", "pretokenizers": parts})
            }
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
