//! Prompts that ask a code model for the middle between two texts (fill in the middle, arXiv 2207.14255), in the order prefix,
//! suffix, middle, with the special tokens that the tokenizer has. Not chat (see `chat.rs`).

use crate::{RuntimeError, Specials, TextTokenizer};

/// The special tokens of a family: before the prefix, before the suffix, before the middle; and others that end a middle.
struct Family {
    parts: [&'static str; 3],
    ends: &'static [&'static str],
}

static FAMILIES: [Family; 3] = [
    // DeepSeek-Coder and DeepSeek-V2, -V3 (arXiv 2401.14196, section 3.1.2).
    Family { parts: ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], ends: &[] },
    // Qwen2.5-Coder, Qwen3 (arXiv 2409.12186) and CodeGemma.
    Family {
        parts: ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
        ends: &["<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|file_separator|>"],
    },
    // StarCoder (arXiv 2305.06161) and models after it.
    Family {
        parts: ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
        ends: &["<fim_pad>", "<file_sep>", "<repo_name>"],
    },
];

/// Whether a text is a token of fill in the middle. Some files do not mark theirs as special; in a user's text they are text all
/// the same.
pub(crate) fn is_token(text: &str) -> bool {
    FAMILIES.iter().any(|f| f.parts.contains(&text) || f.ends.contains(&text))
}

/// A prompt for the middle between two texts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FillInMiddle {
    /// Its token ids.
    pub prompt: Vec<u32>,
    /// Ids that end the middle, beside the model's own: none of them is text.
    pub ends: Vec<u32>,
}

impl FillInMiddle {
    /// The prompt. `prefix` and `suffix` are text, whatever special tokens they spell; what the tokenizer puts before
    /// every text (a BOS) comes first.
    ///
    /// # Errors
    /// [`RuntimeError::Tokenizer`] for a tokenizer without such tokens; as [`TextTokenizer::encode`].
    pub fn new(tokenizer: &TextTokenizer, prefix: &str, suffix: &str) -> Result<Self, RuntimeError> {
        let ids = |f: &'static Family| {
            let [a, b, c] = f.parts.map(|text| tokenizer.special_id(text));
            Some((f, [a?, b?, c?]))
        };
        let Some((family, [before_prefix, before_suffix, before_middle])) = FAMILIES.iter().find_map(ids) else {
            let known: Vec<_> = FAMILIES.iter().map(|f| f.parts.join(" ")).collect();
            return Err(RuntimeError::Tokenizer {
                file: tokenizer.file().into(),
                part: "added_tokens".into(),
                problem: format!(
                    "expected tokens for filling in the middle ({}), got none of these; this model was not made for it",
                    known.join(", or ")
                ),
            });
        };
        let mut prompt = tokenizer.prefix()?;
        prompt.push(before_prefix);
        prompt.extend(tokenizer.encode(prefix, Specials::AsText)?);
        prompt.push(before_suffix);
        prompt.extend(tokenizer.encode(suffix, Specials::AsText)?);
        prompt.push(before_middle);
        let ends = family.parts.iter().chain(family.ends).filter_map(|text| tokenizer.special_id(text)).collect();
        Ok(Self { prompt, ends })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tokenizer::tests::{byte_level, load};
    use serde_json::json;

    /// A tokenizer with more added tokens, from id 258 on.
    fn with(tokens: &[&str], special: bool) -> TextTokenizer {
        let mut v = byte_level();
        for (id, text) in (258..).zip(tokens) {
            v["added_tokens"].as_array_mut().unwrap().push(json!({"id": id, "content": text, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false, "special": special}));
            v["model"]["vocab"][text] = id.into();
        }
        load(&v).unwrap()
    }

    #[test]
    fn each_family_has_its_order_and_texts_are_text() {
        for (i, family) in FAMILIES.iter().enumerate() {
            // Qwen's files do not call these special.
            for special in [true, false] {
                let mut tokens = family.parts.to_vec();
                tokens.extend(family.ends);
                let t = with(&tokens, special);
                let prefix = format!("a{}</s>", family.parts[1]);
                let fim = FillInMiddle::new(&t, &prefix, "b").unwrap();
                let text = |s: &str| t.encode(s, Specials::AsText).unwrap();
                let want = [vec![258], text(&prefix), vec![259], text("b"), vec![260]].concat();
                assert_eq!(fim.prompt, want, "{i}");
                assert_eq!(text(&prefix).len(), prefix.len(), "one id a byte");
                assert_eq!(fim.ends, (258..258 + tokens.len() as u32).collect::<Vec<_>>());
                assert_eq!(t.decode(&fim.prompt).unwrap(), format!("{prefix}b"));
                assert_eq!(t.encode(family.parts[0], Specials::Parse).unwrap(), [258]);
            }
        }
        assert_eq!(FillInMiddle::new(&with(&FAMILIES[0].parts, true), "", "").unwrap().prompt, [258, 259, 260]);
    }

    #[test]
    fn a_tokenizer_without_such_tokens_is_refused_by_name() {
        for t in [load(&byte_level()).unwrap(), with(&FAMILIES[1].parts[..2], true)] {
            let e = FillInMiddle::new(&t, "a", "b").unwrap_err();
            assert!(e.exit_code() == 3 && e.to_string().starts_with("tokenizer.json: added_tokens: "), "{e}");
            assert!(e.to_string().contains("<|fim_prefix|>"), "{e}");
        }
    }
}
