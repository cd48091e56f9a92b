//! The tokenizer of a GGUF file, checked and rebuilt as the files of a Hugging Face folder. Not a tokenizer itself.
//!
//! Structural faults (arrays of unequal length, merges that name no token, ids out of range) make [`GgufTokenizer::read`]
//! fail. A tokenizer that is whole but of a kind that dsq cannot rebuild (unigram, an unknown `pre`) fails only in
//! [`GgufTokenizer::files`], so that the weights remain readable; nothing is guessed.

use super::arch::SpecialIds;
use super::pretokenizer::PreTokenizer;
use super::sentencepiece;
use super::value::{Metadata, Strings, ValueType};
use crate::CheckpointError;
use crate::error::printable;
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};

pub(crate) const MODEL: &str = "tokenizer.ggml.model";
pub(crate) const PRE: &str = "tokenizer.ggml.pre";
pub(crate) const TOKENS: &str = "tokenizer.ggml.tokens";
pub(crate) const TYPES: &str = "tokenizer.ggml.token_type";
pub(crate) const SCORES: &str = "tokenizer.ggml.scores";
pub(crate) const MERGES: &str = "tokenizer.ggml.merges";
pub(crate) const TEMPLATE: &str = "tokenizer.chat_template";

/// Most tokens of a vocabulary: four times the largest public one. Bounds the index that is built over them.
const MAX_TOKENS: usize = 1 << 20;

/// What a token is, by its number in `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TokenType {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

impl TokenType {
    fn from_id(id: i32) -> Option<Self> {
        use TokenType::{Byte, Control, Normal, Unknown, Unused, UserDefined};
        [Normal, Unknown, Control, UserDefined, Unused, Byte].into_iter().find(|t| *t as i32 == id)
    }

    /// Matched as a whole in the text, before any splitting.
    fn is_added(self) -> bool {
        matches!(self, TokenType::Control | TokenType::UserDefined | TokenType::Unknown)
    }
}

/// [`MODEL`] of SentencePiece vocabularies.
pub(crate) const SENTENCEPIECE: &str = "llama";

/// A kind of tokenizer that can be rebuilt.
#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Byte-level BPE.
    Bytes(PreTokenizer),
    /// SentencePiece; whether a text gets a space in front.
    Pieces(bool),
}

/// The tokenizer keys of a file, structurally whole.
pub(crate) struct GgufTokenizer<'a> {
    metadata: &'a Metadata,
    model: &'a str,
    tokens: Strings<'a>,
    types: Option<Vec<TokenType>>,
    merges: Option<Strings<'a>>,
    ids: SpecialIds,
}

impl<'a> GgufTokenizer<'a> {
    /// Reads and checks the keys; `None` when the file has no tokenizer. `rows` is the number of embedding rows.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] naming the key and the index.
    pub(crate) fn read(metadata: &'a Metadata, rows: usize) -> Result<Option<Self>, CheckpointError> {
        let model = match metadata.string(MODEL)? {
            Some("none" | "no_vocab") => return Ok(None),
            Some(model) => model,
            None if metadata.keys().iter().any(|k| k.starts_with("tokenizer.ggml.")) => {
                return Err(metadata.missing(MODEL, "the kind of tokenizer, such as \"gpt2\""));
            }
            None => return Ok(None),
        };
        let tokens = metadata.strings(TOKENS)?.ok_or_else(|| metadata.missing(TOKENS, "an array of STRING"))?;
        if tokens.len() == 0 || tokens.len() > rows {
            let problem =
                format!("expected 1 to {rows} tokens, as many as token_embd.weight has rows, got {}", tokens.len());
            return Err(metadata.invalid(TOKENS, problem));
        }
        if tokens.len() > MAX_TOKENS {
            return Err(metadata.invalid(TOKENS, format!("expected at most {MAX_TOKENS} tokens, got {}", tokens.len())));
        }
        let types = types(metadata, tokens.len())?;
        if let Some(scores) = metadata.words(SCORES, ValueType::F32)? {
            same_length(metadata, SCORES, scores.len(), tokens.len())?;
        }
        let index = index(metadata, tokens)?;
        let merges = metadata.strings(MERGES)?;
        check_merges(metadata, merges, &index)?;
        let ids = SpecialIds::read(metadata, tokens.len())?;
        Ok(Some(Self { metadata, model, tokens, types, merges, ids }))
    }

    fn token(&self, id: Option<u32>) -> Option<&'a str> {
        id.and_then(|id| self.tokens.get(id as usize))
    }

    /// What of tokenizers that can be rebuilt this is.
    fn kind(&self) -> Result<Kind, CheckpointError> {
        let metadata = self.metadata;
        let space = "tokenizer.ggml.add_space_prefix";
        if self.model == SENTENCEPIECE {
            return Ok(Kind::Pieces(metadata.bool(space)?.unwrap_or(true)));
        }
        if self.model != "gpt2" {
            let problem = format!(
                "expected \"gpt2\" (byte-level BPE) or {SENTENCEPIECE:?} (SentencePiece), got {:?}",
                printable(self.model)
            );
            return Err(metadata
                .invalid(MODEL, problem)
                .with_hint("give a folder with the model's own tokenizer.json"));
        }
        let known = format!("one of {}", PreTokenizer::NAMES.join(", "));
        let name = metadata.string(PRE)?.ok_or_else(|| metadata.missing(PRE, &known))?;
        let hint = "dsq does not guess a pre-tokenizer; give a folder with the model's own tokenizer.json";
        let found = PreTokenizer::named(name).ok_or_else(|| {
            metadata.invalid(PRE, format!("expected {known}, got {:?}", printable(name))).with_hint(hint)
        })?;
        if metadata.bool(space)? == Some(true) {
            let problem = "expected false (byte-level BPE adds no space), got true";
            return Err(metadata.invalid(space, problem));
        }
        Ok(Kind::Bytes(found))
    }

    /// The merges of a SentencePiece vocabulary, which llama.cpp has as scores.
    fn pieces(&self) -> Result<Vec<String>, CheckpointError> {
        let scores = self.metadata.words(SCORES, ValueType::F32)?;
        let scores = scores.ok_or_else(|| self.metadata.missing(SCORES, "an array of FLOAT32"))?;
        let types = self.types.as_ref().ok_or_else(|| self.metadata.missing(TYPES, "an array of INT32"))?;
        let joins = |(text, (word, ty)): (&'a str, ([u8; 4], &TokenType))| {
            (text, (*ty == TokenType::Normal).then(|| f32::from_le_bytes(word)))
        };
        let tokens: Vec<(&str, Option<f32>)> =
            self.tokens.iter().zip(scores.into_iter().zip(types)).map(joins).collect();
        if let Some(id) = tokens.iter().position(|(_, score)| score.is_some_and(f32::is_nan)) {
            return Err(self.metadata.invalid(&format!("{SCORES}[{id}]"), "expected a number, got NaN"));
        }
        let texts: HashSet<&str> = self.tokens.iter().collect();
        if let Some(text) = (0..=u8::MAX).map(sentencepiece::byte_token).find(|text| !texts.contains(text.as_str())) {
            let problem = format!("expected a token for each byte, got none of {text}");
            return Err(self.metadata.invalid(TOKENS, problem));
        }
        sentencepiece::merges_of(&tokens, self.merges.map(|m| m.iter().collect())).ok_or_else(|| {
            self.metadata.invalid(MERGES, "expected the merges that the scores give, or no such key, got others")
        })
    }

    /// Added tokens: id, text, whether it is a control token.
    fn added(&self) -> Result<Vec<(usize, &'a str, bool)>, CheckpointError> {
        let types = self.types.as_ref().ok_or_else(|| self.metadata.missing(TYPES, "an array of INT32"))?;
        let all = self.tokens.iter().zip(types).enumerate();
        Ok(all
            .filter(|(_, (_, ty))| ty.is_added())
            .map(|(id, (text, ty))| (id, text, *ty != TokenType::UserDefined))
            .collect())
    }

    /// Whether a text gets a BOS token in front, and an EOS token behind it.
    fn frame(&self, kind: Kind) -> Result<(bool, bool), CheckpointError> {
        let flag = |name: &str, default: bool| {
            Ok::<_, CheckpointError>(self.metadata.bool(&format!("tokenizer.ggml.{name}"))?.unwrap_or(default))
        };
        let adds_bos = match kind {
            Kind::Bytes(pre) => pre.adds_bos,
            Kind::Pieces(_) => true,
        };
        Ok((flag("add_bos_token", adds_bos)?, flag("add_eos_token", false)?))
    }

    /// `tokenizer.json` of the `tokenizers` library.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for a kind of tokenizer that dsq does not rebuild.
    pub(crate) fn tokenizer_json(&self) -> Result<Vec<u8>, CheckpointError> {
        let kind = self.kind()?;
        let merges = match (kind, self.merges) {
            (Kind::Pieces(_), _) => self.pieces()?,
            (Kind::Bytes(_), Some(merges)) => merges.iter().map(str::to_owned).collect(),
            (Kind::Bytes(_), None) => return Err(self.metadata.missing(MERGES, "an array of STRING")),
        };
        let added = self.added()?;
        let types = self.types.as_deref().unwrap_or_default();
        // Unused ids are gaps of the original vocabulary that the converter filled with made-up names.
        let vocab: Map<String, Value> = self
            .tokens
            .iter()
            .zip(types)
            .enumerate()
            .filter(|(_, (_, ty))| **ty != TokenType::Unused)
            .map(|(id, (text, _))| (text.to_owned(), id.into()))
            .collect();
        let added: Vec<Value> = added
            .into_iter()
            .map(|(id, text, special)| {
                json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": special})
            })
            .collect();
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        let (normalizer, pre_tokenizer, decoder, ignore_merges) = match kind {
            Kind::Bytes(pre) => {
                (if pre.nfc { json!({"type": "NFC"}) } else { Value::Null }, pre.to_json(), bytes, pre.ignore_merges)
            }
            Kind::Pieces(prefix) => {
                (sentencepiece::normalizer(prefix), Value::Null, sentencepiece::decoder(prefix), false)
            }
        };
        let pieces = matches!(kind, Kind::Pieces(_));
        let unknown = self.token(self.ids.unk).filter(|_| pieces);
        let tokenizer = json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": self.post_processor(kind)?,
            "decoder": decoder,
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": unknown,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": pieces,
                "byte_fallback": pieces,
                "ignore_merges": ignore_merges,
                "vocab": vocab,
                "merges": merges,
            },
        });
        Ok(to_bytes(&tokenizer))
    }

    /// The template that puts BOS and EOS around a text; null when there are none.
    fn post_processor(&self, kind: Kind) -> Result<Value, CheckpointError> {
        let (bos, eos) = self.frame(kind)?;
        let mut single = vec![json!({"Sequence": {"id": "A", "type_id": 0}})];
        let mut pair = vec![single[0].clone(), json!({"Sequence": {"id": "B", "type_id": 1}})];
        let mut special = Map::new();
        let frames = [(bos, "bos", self.ids.bos, false), (eos, "eos", self.ids.eos.first().copied(), true)];
        for (wanted, name, id, at_end) in frames {
            if !wanted {
                continue;
            }
            let (Some(id), Some(token)) = (id, self.token(id)) else {
                let key = format!("tokenizer.ggml.{name}_token_id");
                return Err(self.metadata.missing(&key, "the token that add_bos_token or add_eos_token asks for"));
            };
            for list in [&mut single, &mut pair] {
                let at = if at_end { list.len() } else { 0 };
                list.insert(at, json!({"SpecialToken": {"id": token, "type_id": 0}}));
            }
            special.insert(token.to_owned(), json!({"id": token, "ids": [id], "tokens": [token]}));
        }
        if special.is_empty() {
            return Ok(Value::Null);
        }
        Ok(json!({"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}))
    }

    /// The tokenizer files of a Hugging Face folder; `context` is the longest context.
    ///
    /// # Errors
    /// As [`GgufTokenizer::tokenizer_json`].
    pub(crate) fn files(&self, context: usize) -> Result<Vec<(String, Vec<u8>)>, CheckpointError> {
        let (add_bos, add_eos) = self.frame(self.kind()?)?;
        let named = [
            ("bos_token", self.ids.bos),
            ("eos_token", self.ids.eos.first().copied()),
            ("unk_token", self.ids.unk),
            ("pad_token", self.ids.pad),
        ];
        let named: Map<String, Value> = named
            .into_iter()
            .filter_map(|(name, id)| self.token(id).map(|token| (name.to_owned(), token.into())))
            .collect();
        let decoder: Map<String, Value> = self
            .added()?
            .into_iter()
            .map(|(id, text, special)| {
                (id.to_string(), json!({"content": text, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false, "special": special}))
            })
            .collect();
        let mut config = Map::new();
        // This class takes tokenizer.json as it is; GPT2Tokenizer of transformers 5 would put its own pre-tokenizer.
        config.insert("tokenizer_class".into(), "PreTrainedTokenizerFast".into());
        config.insert("added_tokens_decoder".into(), decoder.into());
        config.insert("add_bos_token".into(), add_bos.into());
        config.insert("add_eos_token".into(), add_eos.into());
        config.insert("clean_up_tokenization_spaces".into(), false.into());
        config.insert("model_max_length".into(), context.into());
        config.extend(named.clone());
        if let Some(template) = chat_template(self.metadata)? {
            config.insert("chat_template".into(), template.into());
        }
        Ok(vec![
            ("tokenizer.json".into(), self.tokenizer_json()?),
            ("tokenizer_config.json".into(), to_bytes(&Value::Object(config))),
            ("special_tokens_map.json".into(), to_bytes(&Value::Object(named))),
        ])
    }

    /// Bytes that no token spells: a text loses them, as it does with llama.cpp. Empty for other kinds of tokenizer.
    pub(crate) fn lost_bytes(&self) -> Vec<u8> {
        if self.model != "gpt2" {
            return Vec::new();
        }
        let single: HashSet<char> = self
            .tokens
            .iter()
            .filter_map(|t| {
                let mut chars = t.chars();
                chars.next().filter(|_| chars.next().is_none())
            })
            .collect();
        (0..=u8::MAX).filter(|b| !single.contains(&byte_char(*b))).collect()
    }
}

/// The template of the file, if any.
pub(crate) fn chat_template(metadata: &Metadata) -> Result<Option<&str>, CheckpointError> {
    metadata.string(TEMPLATE)
}

/// The character that stands for a byte in a byte-level vocabulary (GPT-2's `bytes_to_unicode`): printable Latin-1 stands for
/// itself, the other 68 follow from U+0100.
fn byte_char(byte: u8) -> char {
    let itself = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if itself(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|b| !itself(*b)).count() as u32;
    char::from_u32(256 + before).unwrap_or(char::REPLACEMENT_CHARACTER)
}

fn to_bytes(value: &Value) -> Vec<u8> {
    let mut text = format!("{value:#}");
    text.push('\n');
    text.into_bytes()
}

fn same_length(metadata: &Metadata, key: &str, found: usize, tokens: usize) -> Result<(), CheckpointError> {
    if found == tokens {
        return Ok(());
    }
    Err(metadata.invalid(key, format!("expected {tokens} elements, one for each token, got {found}")))
}

fn types(metadata: &Metadata, tokens: usize) -> Result<Option<Vec<TokenType>>, CheckpointError> {
    let Some(words) = metadata.words(TYPES, ValueType::I32)? else { return Ok(None) };
    same_length(metadata, TYPES, words.len(), tokens)?;
    let mut out = Vec::with_capacity(words.len());
    for (i, word) in words.into_iter().enumerate() {
        let id = i32::from_le_bytes(word);
        let Some(ty) = TokenType::from_id(id) else {
            return Err(metadata.invalid(&format!("{TYPES}[{i}]"), format!("expected 1 to 6, got {id}")));
        };
        out.push(ty);
    }
    Ok(Some(out))
}

/// Each token's id; no two tokens may have one text.
fn index<'a>(metadata: &Metadata, tokens: Strings<'a>) -> Result<HashMap<&'a str, usize>, CheckpointError> {
    let mut index = HashMap::with_capacity(tokens.len());
    for (id, text) in tokens.iter().enumerate() {
        if text.is_empty() {
            return Err(metadata.invalid(&format!("{TOKENS}[{id}]"), "expected a text, got an empty one"));
        }
        if let Some(first) = index.insert(text, id) {
            let problem = format!("the token {:?} is already token {first}; expected each token once", printable(text));
            return Err(metadata.invalid(&format!("{TOKENS}[{id}]"), problem));
        }
    }
    Ok(index)
}

/// Each merge is two tokens with one space between, and what they make is a token.
fn check_merges(
    metadata: &Metadata,
    merges: Option<Strings>,
    index: &HashMap<&str, usize>,
) -> Result<(), CheckpointError> {
    let mut joined = String::new();
    for (i, merge) in merges.iter().flat_map(|m| m.iter()).enumerate() {
        let error = |problem: String| metadata.invalid(&format!("{MERGES}[{i}]"), problem);
        let halves = merge.split_once(' ').filter(|(a, b)| !a.is_empty() && !b.is_empty() && !b.contains(' '));
        let Some((a, b)) = halves else {
            return Err(error(format!("expected two tokens with one space between, got {:?}", printable(merge))));
        };
        joined.clear();
        joined.push_str(a);
        joined.push_str(b);
        if let Some(absent) = [a, b, &joined].into_iter().find(|part| !index.contains_key(part)) {
            let problem =
                format!("expected tokens of the vocabulary, got {:?} with {:?}", printable(merge), printable(absent));
            return Err(error(problem));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::header::Header;
    use super::*;

    #[test]
    fn bytes_have_gpt2s_characters() {
        // Spot values of bytes_to_unicode: space, newline, NUL, DEL, no-break space, soft hyphen, A.
        let found: String = [b' ', b'\n', 0, 0x7f, 0xa0, 0xad, b'A'].map(byte_char).into_iter().collect();
        assert_eq!(found, "\u{120}\u{10a}\u{100}\u{121}\u{142}\u{143}A");
        let all: std::collections::HashSet<char> = (0..=255).map(byte_char).collect();
        assert_eq!(all.len(), 256);
    }

    /// llama.cpp's own vocabulary files (`models/ggml-vocab-*.gguf` of its source, for instance in the source distribution
    /// of PyPI `llama-cpp-python`) with their texts (`.inp`) and the ids of the original tokenizers (`.out`).
    #[test]
    fn f063_llama_cpp_vocabularies_give_the_original_ids() {
        let Some(folder) = std::env::var_os("DSQ_LLAMA_VOCABS").map(std::path::PathBuf::from) else {
            println!("skipped: DSQ_LLAMA_VOCABS names no folder with llama.cpp's ggml-vocab-*.gguf");
            return;
        };
        for name in ["llama-spm", "gpt-2", "starcoder", "refact", "command-r", "llama-bpe", "qwen2", "deepseek-coder"] {
            let path = folder.join(format!("ggml-vocab-{name}.gguf"));
            let bytes = std::fs::read(&path).unwrap();
            let header = Header::read(&bytes[..], bytes.len() as u64, &path).unwrap();
            let tokenizer = GgufTokenizer::read(&header.metadata, usize::MAX).unwrap().unwrap();
            let tokenizer = tokenizers::Tokenizer::from_bytes(tokenizer.tokenizer_json().unwrap()).unwrap();
            let text = |suffix: &str| std::fs::read_to_string(path.with_extension(suffix)).unwrap();
            let (texts, ids) = (text("gguf.inp"), text("gguf.out"));
            let end = "\n__ggml_vocab_test__\n";
            let texts: Vec<_> = texts.strip_suffix(end).unwrap().split(end).collect();
            let ids: Vec<_> = ids.lines().collect();
            assert_eq!(texts.len(), ids.len(), "{name}");
            let mut wrong = Vec::new();
            for (text, ids) in texts.iter().zip(&ids) {
                let want: Vec<u32> = ids.split_whitespace().map(|id| id.parse().unwrap()).collect();
                let found = tokenizer.encode(*text, false).unwrap();
                if found.get_ids() != want {
                    wrong.push(text);
                }
            }
            assert!(wrong.is_empty(), "{name}: {} of {} texts: {wrong:?}", wrong.len(), texts.len());
        }
    }
}
