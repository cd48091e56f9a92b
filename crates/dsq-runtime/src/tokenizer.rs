//! Text to token ids and back, through the reference implementation of tokenizer.json. Not the chat template (see
//! `chat.rs`).

use crate::{RuntimeError, fim};
use dsq_checkpoint::{Checkpoint, ModelConfig};
use serde_json::Value;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Model, ModelWrapper, OffsetReferential, OffsetType, PreTokenizer, Tokenizer};

/// What to do with the texts of special tokens (`<|im_end|>`) inside an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// They become the special ids.
    Parse,
    /// They are text like any other.
    AsText,
}

/// A tokenizer that has passed a self test.
#[derive(Debug, Clone)]
pub struct TextTokenizer {
    parse: Tokenizer,
    as_text: Tokenizer,
    specials: Vec<(String, u32)>,
    vocab_size: usize,
    file: String,
    /// Put before every text, where tokenizer_config.json says so and the post-processor does not do it.
    bos: Option<u32>,
    /// Ids that end an answer.
    ends: Vec<u32>,
    /// Whether a character that has no token would be left out without a word.
    drops: bool,
}

/// Texts of the self test: scripts, digits, white space, an emoji, combining marks, nothing.
const PROBES: [&str; 6] = ["", " a", "Hello, world 123", "éß漢字 🙂 e\u{301}", "\r\n\t  x", "fn main() { 0xff }"];

impl TextTokenizer {
    /// The tokenizer of a model, with what `tokenizer_config.json` says of its BOS (`add_bos_token`) and what ends an
    /// answer.
    ///
    /// # Errors
    /// [`RuntimeError::Tokenizer`] when the model has none, it cannot be used, or it has an id beyond the embedding.
    pub fn new(model: &Checkpoint) -> Result<Self, RuntimeError> {
        let folder = model.path().is_dir();
        let path = if folder { model.path().join("tokenizer.json") } else { model.path().to_path_buf() };
        let file = path.display().to_string();
        let Some(bytes) = model.tokenizer_json()? else {
            let problem = if folder {
                "expected tokenizer.json, got no such file (tokenizer.model and vocab.json are not read)"
            } else {
                "expected a tokenizer in this file, got none (a GGUF file holds it in tokenizer.ggml keys; other weights need a folder with tokenizer.json)"
            };
            return Err(broken(&file, "file", problem));
        };
        let mut this = Self::from_json(&bytes, &file)?;
        if let ModelConfig::Llama(config) = model.config()
            && this.vocab_size > config.vocab_size
        {
            let (rows, id) = (config.vocab_size, this.vocab_size - 1);
            let problem = format!("expected ids below the embedding's {rows} rows, got {id}");
            return Err(broken(&file, "vocab", problem));
        }
        let config = TokenizerConfig::of(model)?;
        if let (Some(true), Some(bos)) = (config.add_bos, &config.bos)
            && this.prefix()?.is_empty()
        {
            this.bos = this.special_id(bos);
        }
        if let ModelConfig::Llama(config) = model.config() {
            this.ends.clone_from(&config.eos_token_ids);
        }
        this.ends.extend(generation_ends(model)?);
        this.ends.extend(config.eos.and_then(|text| this.special_id(&text)));
        this.ends.sort_unstable();
        this.ends.dedup();
        Ok(this)
    }

    /// Ids that end an answer: those of config.json, of generation_config.json, and the end token of tokenizer_config.json
    /// (a chat model's is often there alone). Empty for a tokenizer without a model.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// The file, for messages.
    pub(crate) fn file(&self) -> &str {
        &self.file
    }

    /// Reads the text of a tokenizer.json; `file` is for messages. Truncation and padding in it are switched off.
    ///
    /// # Errors
    /// [`RuntimeError::Tokenizer`], also where the tokenizer panics or fails on one of a few plain texts.
    pub fn from_json(bytes: &[u8], file: &str) -> Result<Self, RuntimeError> {
        let load = || -> Result<Tokenizer, RuntimeError> {
            let mut t =
                Tokenizer::from_bytes(bytes).map_err(|e| broken(file, "file", format!("cannot be read: {e}")))?;
            t.with_truncation(None).map_err(|e| broken(file, "truncation", e.to_string()))?;
            t.with_padding(None);
            check_added_tokens(&t, bytes, file)?;
            if t.get_vocab_size(true) == 0 {
                return Err(broken(file, "vocab", "expected at least one token, got none"));
            }
            let added = t.get_added_tokens_decoder().into_values();
            let unmarked: Vec<_> = added.filter(|t| !t.special && fim::is_token(&t.content)).collect();
            t.add_special_tokens(&unmarked.into_iter().map(|t| AddedToken { special: true, ..t }).collect::<Vec<_>>());
            for text in PROBES {
                let ids = t.encode(text, true).map_err(|e| broken(file, "self test", format!("{text:?}: {e}")))?;
                t.decode(ids.get_ids(), false).map_err(|e| broken(file, "self test", format!("{text:?}: {e}")))?;
            }
            Ok(t)
        };
        // Some files make the crate panic (shared/faults: F054); the process must live.
        let parse = catch_unwind(AssertUnwindSafe(load)).unwrap_or_else(|panic| {
            let what = panic.downcast_ref::<String>().cloned();
            let what = what.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_string())).unwrap_or_default();
            Err(broken(file, "self test", format!("a part of it cannot work: {what}")))
        })?;
        let mut specials: Vec<_> = parse
            .get_added_tokens_decoder()
            .into_iter()
            .filter(|(_, t)| parse.get_added_vocabulary().is_special_token(&t.content))
            .map(|(id, t)| (t.content, id))
            .collect();
        // Longest first, so that `<|im_end|>` is not cut by a token `<|im`.
        specials.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then(a.1.cmp(&b.1)));
        let mut as_text = parse.clone();
        as_text.set_encode_special_tokens(true);
        let drops = drops(&parse);
        let vocab_size = parse.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1);
        Ok(Self { vocab_size, parse, as_text, specials, file: file.into(), bos: None, ends: Vec::new(), drops })
    }

    /// Number of ids (the largest plus one).
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Special tokens, longest text first.
    pub fn specials(&self) -> &[(String, u32)] {
        &self.specials
    }

    /// The id of a special token's text.
    pub fn special_id(&self, text: &str) -> Option<u32> {
        self.specials.iter().find(|(t, _)| t == text).map(|(_, id)| *id)
    }

    /// Ids of `text` alone: nothing is put before or after it.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] for a text that this tokenizer cannot take (a pattern that runs too long, say).
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, RuntimeError> {
        self.run(if specials == Specials::Parse { &self.parse } else { &self.as_text }, text, false)
    }

    /// As [`TextTokenizer::encode`] of plain text, with the end of each token in the bytes of `text` (never before that of the token
    /// before it; tokens that share a character all end behind it).
    ///
    /// # Errors
    /// As there.
    pub fn encode_with_ends(&self, text: &str) -> Result<(Vec<u32>, Vec<usize>), RuntimeError> {
        let input = |problem: String| RuntimeError::Input { what: "text", problem };
        if self.drops {
            self.check_characters(&self.as_text, text)?;
        }
        let encoding = catch_unwind(AssertUnwindSafe(|| self.as_text.encode(text, false)))
            .map_err(|_| input(format!("{} cannot tokenize it", self.file)))?
            .map_err(|e| input(format!("{} cannot tokenize it: {e}", self.file)))?;
        let mut end = 0;
        let ends = encoding.get_offsets().iter().map(|(_, e)| {
            end = end.max(*e);
            end
        });
        Ok((encoding.get_ids().to_vec(), ends.collect()))
    }

    /// Ids of a plain prompt: special texts are text, and what the tokenizer adds to every text (a BOS) is added.
    ///
    /// # Errors
    /// As [`TextTokenizer::encode`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>, RuntimeError> {
        let ids = self.run(&self.as_text, text, true)?;
        Ok(self.bos.into_iter().chain(ids).collect())
    }

    fn run(&self, tokenizer: &Tokenizer, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, RuntimeError> {
        let input = |problem: String| RuntimeError::Input { what: "text", problem };
        if self.drops {
            self.check_characters(tokenizer, text)?;
        }
        catch_unwind(AssertUnwindSafe(|| tokenizer.encode_fast(text, add_special_tokens)))
            .map_err(|_| input(format!("{} cannot tokenize it", self.file)))?
            .map(|e| e.get_ids().to_vec())
            .map_err(|e| input(format!("{} cannot tokenize it: {e}", self.file)))
    }

    /// Whether every character has a token, of a tokenizer that says nothing where one has none.
    fn check_characters(&self, tokenizer: &Tokenizer, text: &str) -> Result<(), RuntimeError> {
        let cut = || {
            let mut parts = tokenizer.get_added_vocabulary().extract_and_normalize(tokenizer.get_normalizer(), text);
            tokenizer.get_pre_tokenizer().map_or(Ok(()), |p| p.pre_tokenize(&mut parts)).map(|()| parts)
        };
        // What cannot be cut cannot be tokenized either, which is told there.
        let Ok(Ok(parts)) = catch_unwind(AssertUnwindSafe(cut)) else { return Ok(()) };
        let splits = parts.get_splits(OffsetReferential::Normalized, OffsetType::None);
        let plain = splits.into_iter().filter(|(_, _, added)| added.is_none());
        // A part's tokens cover as many bytes as it has, unless some have none.
        let short = |part: &&str| covered(tokenizer, part) < part.len();
        let missing: Vec<char> = plain
            .map(|(part, ..)| part)
            .filter(short)
            .flat_map(|part| part.chars().filter(|c| covered(tokenizer, c.encode_utf8(&mut [0; 4])) == 0))
            .collect();
        let Some(first) = missing.first() else { return Ok(()) };
        let problem = format!(
            "no unk_token, no byte_fallback; expected a token for every character of the text, got none for {} of them, the \
             first {first:?}",
            missing.len()
        );
        Err(broken(&self.file, "model", problem))
    }

    /// What is put before every text.
    pub(crate) fn prefix(&self) -> Result<Vec<u32>, RuntimeError> {
        // The empty text's ids are prefix and suffix together; a probe's own ids tell them apart.
        let (bare, full) = (self.run(&self.as_text, "x", false)?, self.run(&self.as_text, "x", true)?);
        let at = full.windows(bare.len().max(1)).position(|w| w == bare).unwrap_or(0);
        Ok(self.bos.into_iter().chain(full[..at].iter().copied()).collect())
    }

    /// The text of ids; special tokens are left out. Bytes that are no UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] for ids that cannot be decoded.
    pub fn decode(&self, ids: &[u32]) -> Result<String, RuntimeError> {
        let problem = |p: String| RuntimeError::Input { what: "token ids", problem: p };
        catch_unwind(AssertUnwindSafe(|| self.parse.decode(ids, true)))
            .map_err(|_| problem(format!("{} cannot decode them", self.file)))?
            .map_err(|e| problem(format!("{} cannot decode them: {e}", self.file)))
    }
}

/// What the runtime takes from tokenizer_config.json.
#[derive(Debug, Default)]
pub(crate) struct TokenizerConfig {
    pub(crate) bos: Option<String>,
    pub(crate) eos: Option<String>,
    add_bos: Option<bool>,
}

impl TokenizerConfig {
    /// That of a model; all absent where it has no such file.
    ///
    /// # Errors
    /// [`RuntimeError::Tokenizer`] for text that is no JSON object.
    pub(crate) fn of(model: &Checkpoint) -> Result<Self, RuntimeError> {
        let Some(json) = json_file(model, "tokenizer_config.json")? else { return Ok(Self::default()) };
        // A token is its text, or an object that holds it.
        let text = |name: &str| {
            let value = json.get(name)?;
            value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_owned)
        };
        let add_bos = json.get("add_bos_token").and_then(Value::as_bool);
        Ok(Self { bos: text("bos_token"), eos: text("eos_token"), add_bos })
    }
}

/// `eos_token_id` of generation_config.json: none, one or several.
fn generation_ends(model: &Checkpoint) -> Result<Vec<u32>, RuntimeError> {
    const NAME: &str = "generation_config.json";
    let value = json_file(model, NAME)?.and_then(|mut v| v.get_mut("eos_token_id").map(Value::take));
    let list = match value {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(list)) => list,
        Some(one) => vec![one],
    };
    let id = |v: &Value| v.as_u64().and_then(|id| u32::try_from(id).ok());
    let of = |v: &Value| {
        let file = model.path().join(NAME).display().to_string();
        id(v).ok_or_else(|| broken(&file, "eos_token_id", format!("expected token ids, got {v}")))
    };
    list.iter().map(of).collect()
}

/// A JSON object beside the weights, if the model has it. Of a GGUF file it would say what its config and tokenizer do.
fn json_file(model: &Checkpoint, name: &str) -> Result<Option<Value>, RuntimeError> {
    if !model.path().is_dir() {
        return Ok(None);
    }
    let Some(bytes) = model.aux_file(name)? else { return Ok(None) };
    let file = model.path().join(name).display().to_string();
    let value: Value = serde_json::from_slice(&bytes).map_err(|e| broken(&file, "file", e.to_string()))?;
    if !value.is_object() {
        return Err(broken(&file, "file", "expected a JSON object, got something else"));
    }
    Ok(Some(value))
}

/// The crate gives an added token whose text is not in the vocabulary another id than the file declares, in silence, and
/// that id may be another token's.
fn check_added_tokens(t: &Tokenizer, bytes: &[u8], file: &str) -> Result<(), RuntimeError> {
    #[derive(serde::Deserialize)]
    struct Added {
        id: u32,
        content: String,
    }
    #[derive(serde::Deserialize)]
    struct File {
        #[serde(default)]
        added_tokens: Vec<Added>,
    }
    let declared: File = serde_json::from_slice(bytes).map_err(|e| broken(file, "added_tokens", e.to_string()))?;
    let mut by_id = HashMap::new();
    for token in declared.added_tokens {
        let got = t.token_to_id(&token.content);
        if got != Some(token.id) {
            let got = got.map_or("none".into(), |id| id.to_string());
            return Err(broken(
                file,
                "added_tokens",
                format!("{:?}: expected id {}, got {got}", token.content, token.id),
            ));
        }
        by_id.insert(token.id, token.content);
    }
    let twice = |(text, id): &(String, u32)| by_id.get(id).is_some_and(|content| content != text);
    if let Some((other, id)) = t.get_vocab(false).into_iter().find(twice) {
        let problem = format!("{:?}: id {id} is also that of {other:?}", by_id[&id]);
        return Err(broken(file, "added_tokens", problem));
    }
    Ok(())
}

/// Bytes of `part` that have tokens.
fn covered(tokenizer: &Tokenizer, part: &str) -> usize {
    tokenizer.get_model().tokenize(part).map_or(0, |tokens| tokens.last().map_or(0, |t| t.offsets.1))
}

/// Whether characters can get lost: BPE alone leaves out what it has no token for, unless it has one for the unknown, or texts
/// come as bytes that all have one.
fn drops(t: &Tokenizer) -> bool {
    let ModelWrapper::BPE(bpe) = t.get_model() else { return false };
    let cut = serde_json::to_string(&(t.get_normalizer(), t.get_pre_tokenizer())).unwrap_or_default();
    let bytes = cut.contains("\"ByteLevel\"");
    let whole = || ByteLevel::alphabet().into_iter().all(|c| covered(t, c.encode_utf8(&mut [0; 4])) > 0);
    bpe.unk_token.is_none() && !(bytes && whole())
}

fn broken(file: &str, part: &str, problem: impl Into<String>) -> RuntimeError {
    RuntimeError::Tokenizer { file: file.into(), part: part.into(), problem: problem.into() }
}

/// Turns a stream of ids into text that never splits a character.
#[derive(Debug)]
pub struct StreamDecoder<'t> {
    tokenizer: &'t TextTokenizer,
    ids: Vec<u32>,
    /// Ids before this were handed out, and one text of them is the context of the next.
    prefix: usize,
    read: usize,
}

impl<'t> StreamDecoder<'t> {
    /// A decoder at the start of a text.
    pub fn new(tokenizer: &'t TextTokenizer) -> Self {
        Self { tokenizer, ids: Vec::new(), prefix: 0, read: 0 }
    }

    /// Takes one id; returns the text that is now certain, possibly empty.
    ///
    /// # Errors
    /// As [`TextTokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String, RuntimeError> {
        self.ids.push(id);
        self.advance(false)
    }

    /// The rest, when no id follows; an incomplete character becomes U+FFFD.
    ///
    /// # Errors
    /// As [`TextTokenizer::decode`].
    pub fn finish(&mut self) -> Result<String, RuntimeError> {
        self.advance(true)
    }

    fn advance(&mut self, all: bool) -> Result<String, RuntimeError> {
        let old = self.tokenizer.decode(&self.ids[self.prefix..self.read])?;
        let new = self.tokenizer.decode(&self.ids[self.prefix..])?;
        if new.len() <= old.len() || (!all && new.ends_with('\u{fffd}')) {
            return Ok(String::new());
        }
        self.prefix = self.read;
        self.read = self.ids.len();
        Ok(new.get(old.len()..).unwrap_or_default().to_string())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// A byte-level BPE without merges, with two special tokens.
    pub(crate) fn byte_level() -> Value {
        let mut chars: Vec<char> = ('!'..='~').chain('\u{a1}'..='\u{ac}').chain('\u{ae}'..='\u{ff}').collect();
        let mut next = 256u32;
        while chars.len() < 256 {
            chars.push(char::from_u32(next).unwrap());
            next += 1;
        }
        let vocab = chars.iter().enumerate().map(|(i, c)| (c.to_string(), Value::from(i + 2)));
        let vocab: serde_json::Map<_, _> = [("<s>".to_string(), Value::from(0)), ("</s>".to_string(), Value::from(1))]
            .into_iter()
            .chain(vocab)
            .collect();
        let added = |id: u32, content: &str| json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "added_tokens": [added(0, "<s>"), added(1, "</s>")],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []}
        })
    }

    pub(crate) fn load(value: &Value) -> Result<TextTokenizer, RuntimeError> {
        TextTokenizer::from_json(value.to_string().as_bytes(), "tokenizer.json")
    }

    #[test]
    fn f063_c074_texts_of_all_kinds_survive_the_round_trip() {
        let t = load(&byte_level()).unwrap();
        for text in ["", " a", "a  b", "\n", "a\u{a0}b", "abs</s>USER", "e\u{301}\u{200b}👩‍👩‍👧", "\r\n x \t", "漢字"]
        {
            let ids = t.encode(text, Specials::AsText).unwrap();
            assert_eq!(t.decode(&ids).unwrap(), text);
            assert_eq!(ids.len(), text.len(), "no merges: one id a byte");
        }
        assert_eq!(t.encode("</s>", Specials::Parse).unwrap(), [1]);
        assert_eq!(t.encode("</s>", Specials::AsText).unwrap().len(), 4);
    }

    #[test]
    fn f126_the_stream_never_splits_a_character() {
        let t = load(&byte_level()).unwrap();
        let text = "a🙂b漢\u{301}!";
        let mut stream = StreamDecoder::new(&t);
        let mut out = String::new();
        for id in t.encode(text, Specials::AsText).unwrap() {
            let piece = stream.push(id).unwrap();
            assert!(!piece.contains('\u{fffd}'), "{piece:?}");
            out.push_str(&piece);
        }
        out.push_str(&stream.finish().unwrap());
        assert_eq!(out, text);
        // The first three bytes of an emoji and no more.
        let mut stream = StreamDecoder::new(&t);
        for id in t.encode("🙂", Specials::AsText).unwrap().into_iter().take(3) {
            assert_eq!(stream.push(id).unwrap(), "");
        }
        assert!(stream.finish().unwrap().contains('\u{fffd}'));
    }

    #[test]
    fn f052_f053_f054_c069_broken_files_are_errors_that_name_the_file() {
        let edit = |f: &dyn Fn(&mut Value)| {
            let mut v = byte_level();
            f(&mut v);
            v
        };
        let cases: Vec<(&str, Value)> = vec![
            ("empty object", json!({})),
            ("unknown model", edit(&|v| v["model"]["type"] = json!("Magic"))),
            (
                "stride not below the length",
                edit(&|v| {
                    v["truncation"] =
                        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 2});
                }),
            ),
            (
                "template names an absent token",
                edit(&|v| {
                    v["post_processor"] = json!({"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [], "special_tokens": {}});
                }),
            ),
            ("merge without its product", edit(&|v| v["model"]["merges"] = json!([["a", "b"]]))),
            ("fixed length 0", edit(&|v| v["pre_tokenizer"] = json!({"type": "FixedLength", "length": 0}))),
            (
                "charsmap that is none",
                edit(&|v| v["normalizer"] = json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"})),
            ),
        ];
        for (what, value) in cases {
            // Truncation is switched off, so a bad stride cannot hurt; everything else must be refused.
            match load(&value) {
                Err(e) => assert!(e.exit_code() == 3 && e.to_string().starts_with("tokenizer.json: "), "{what}: {e}"),
                Ok(t) => {
                    assert!(["stride not below the length", "fixed length 0"].contains(&what), "{what} was accepted");
                    assert!(t.encode("abc abc abc", Specials::AsText).is_ok(), "{what}");
                }
            }
        }
        assert_eq!(TextTokenizer::from_json(b"{\"version\": \"1.0\", \"model\": {", "t").unwrap_err().exit_code(), 3);
    }

    #[test]
    fn f059_characters_without_a_token_are_told_with_their_number() {
        let mut v = byte_level();
        v["pre_tokenizer"] = Value::Null;
        // Without bytes: characters stand for themselves.
        let t = load(&v).unwrap();
        assert_eq!(t.encode("abc", Specials::AsText).unwrap().len(), 3);
        assert_eq!(t.encode("<s>abc", Specials::Parse).unwrap().len(), 4);
        let e = t.encode("a漢b字漢", Specials::AsText).unwrap_err();
        assert_eq!(e.exit_code(), 3);
        assert!(
            e.to_string().starts_with("tokenizer.json: model: ") && e.to_string().contains("3 of them, the first '漢'")
        );
        assert_eq!(t.encode_prompt("漢").unwrap_err().exit_code(), 3);
        // A token for the unknown, or for every byte, is what the file says that happens.
        let mut unk = v.clone();
        unk["model"]["unk_token"] = json!("<s>");
        assert_eq!(load(&unk).unwrap().encode("a漢", Specials::AsText).unwrap().len(), 2);
        let mut fallback = v.clone();
        fallback["model"]["byte_fallback"] = true.into();
        assert_eq!(
            load(&fallback).unwrap().encode("漢", Specials::AsText).unwrap_err().exit_code(),
            3,
            "no byte tokens"
        );
        let vocab = fallback["model"]["vocab"].as_object_mut().unwrap();
        for b in 0..=255u32 {
            vocab.insert(format!("<0x{b:02X}>"), (300 + b).into());
        }
        assert_eq!(
            load(&fallback).unwrap().encode("漢", Specials::AsText).unwrap(),
            [0xe6, 0xbc, 0xa2].map(|b| 300 + b)
        );
        // Bytes that have no token.
        let mut gap = byte_level();
        gap["model"]["vocab"].as_object_mut().unwrap().remove("Q");
        let gap = load(&gap).unwrap();
        assert_eq!(gap.encode("abc", Specials::AsText).unwrap().len(), 3);
        assert!(gap.encode("aQ", Specials::AsText).unwrap_err().to_string().contains("1 of them, the first 'Q'"));
        assert_eq!(load(&byte_level()).unwrap().encode("Q漢", Specials::AsText).unwrap().len(), 4);
    }

    #[test]
    fn f056_f058_added_tokens_keep_their_ids_or_are_refused() {
        for (id, content) in [(900, "<pad>"), (5, "<s>"), (5, "<new>")] {
            let mut v = byte_level();
            v["added_tokens"].as_array_mut().unwrap().push(json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}));
            let e = load(&v).unwrap_err();
            assert!(e.exit_code() == 3 && e.to_string().contains("added_tokens"), "{e}");
        }
    }

    #[test]
    fn f060_a_pattern_that_backtracks_without_end_is_an_error_and_the_process_lives() {
        let mut v = byte_level();
        v["pre_tokenizer"] =
            json!({"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": false});
        let t = load(&v).unwrap();
        let text = format!("{}b", "a".repeat(26));
        // Either it answers in bounded time, or it refuses the text: both are fine, a hang or a crash is not.
        if let Err(e) = t.encode(&text, Specials::AsText) {
            assert_eq!(e.exit_code(), 2);
        }
    }
}
