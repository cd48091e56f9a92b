//! The tokenizer files of a folder as the `tokenizer.*` keys of a GGUF file: byte-level BPE with a pre-tokenizer that has a
//! name, or a SentencePiece vocabulary as BPE with byte fallback. Not the way back (see `tokenizer.rs`), which checks here, before anything is written, that it gives the same tokenizer.
//!
//! What the keys cannot say is refused by name: other models than BPE, a pre-tokenizer that is none of
//! [`PreTokenizer::NAMES`], added tokens that take the space beside them or
//! are looked for behind a normalizer that changes them, post-processors but BOS in front and EOS behind.

use super::pretokenizer::PreTokenizer;
use super::sentencepiece;
use super::tokenizer::{GgufTokenizer, MERGES, MODEL, PRE, SCORES, SENTENCEPIECE, TEMPLATE, TOKENS, TYPES, TokenType};
use super::value::{Array, Metadata, Value as Pair, ValueType};
use crate::json::parse_json;
use crate::{Checkpoint, CheckpointError, LlamaConfig, printable};
use serde_json::{Map, Value, json};
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

/// Adds the keys. A folder without `tokenizer.json` gets `tokenizer.ggml.model` = "none": llama.cpp then takes token ids only.
///
/// # Errors
/// [`CheckpointError::Invalid`] naming the file and the field.
pub(crate) fn add(source: &Checkpoint, config: &LlamaConfig, metadata: &mut Metadata) -> Result<(), CheckpointError> {
    let text = |text: &str| Pair::String(text.to_owned());
    special_ids(source, config, metadata)?;
    let Some(bytes) = source.tokenizer_json()? else {
        metadata.set(MODEL, text("none"));
        return Ok(());
    };
    let path = source.path().join("tokenizer.json");
    let value = parse_json(&bytes, &path)?;
    let file = File { path: &path };
    let model = file.object(&value, "model")?;
    file.only(model, "model", "type", &[json!("BPE")], "byte-level BPE")?;
    let nothing = [Value::Null, json!("")];
    file.only(model, "model", "continuing_subword_prefix", &nothing, "byte-level BPE")?;
    file.only(model, "model", "end_of_word_suffix", &nothing, "byte-level BPE")?;
    file.only(model, "model", "dropout", &[Value::Null, json!(0.0)], "the same ids for a text each time")?;
    file.only(model, "model", "byte_fallback", &[json!(false), json!(true), Value::Null], "bytes or none")?;
    let pieces = model.get("byte_fallback").and_then(Value::as_bool).unwrap_or(false);
    let (tokens, types) = file.tokens(&value, model, config.vocab_size)?;
    let merges = file.merges(model)?;
    metadata.set(TOKENS, Pair::Array(Array::strings(&tokens)));
    metadata.set(TYPES, Pair::Array(Array::ints(types.iter().map(|&t| t as i32))));
    metadata.set(MERGES, Pair::Array(Array::strings(&merges)));
    let nfc = match pieces {
        true => {
            file.pieces(&value, model, &tokens, &types, &merges, metadata)?;
            false
        }
        false => {
            let (name, pre) = file.pre_tokenizer(&value, model)?;
            metadata.set(MODEL, text("gpt2"));
            metadata.set(PRE, text(name));
            pre.nfc
        }
    };
    let (bos, eos) = file.frame(&value, config)?;
    metadata.set("tokenizer.ggml.add_bos_token", Pair::Bool(bos));
    if eos {
        metadata.set("tokenizer.ggml.add_eos_token", Pair::Bool(true));
    }
    if let Some(template) = source.chat_template()? {
        metadata.set(TEMPLATE, Pair::String(template));
    }
    same_tokenizer(metadata, config, &file, &value, (pieces, nfc))
}

/// Ids of special tokens: those of `config.json`. The ends of a sequence take the places of the end of a text, of a turn and of
/// a message, in which order the reader finds them.
fn special_ids(source: &Checkpoint, config: &LlamaConfig, metadata: &mut Metadata) -> Result<(), CheckpointError> {
    let mut set = |name: &str, id: u32| metadata.set(&format!("tokenizer.ggml.{name}_token_id"), Pair::U32(id));
    let ids = &config.eos_token_ids;
    if ids.len() > 3 {
        let problem =
            format!("GGUF has places for the ends of a text, a turn and a message; expected 3 ids, got {ids:?}");
        return Err(source.invalid("eos_token_id", problem));
    }
    for (name, &id) in ["eos", "eot", "eom"].iter().zip(ids) {
        set(name, id);
    }
    if let Some(id) = config.bos_token_id {
        set("bos", id);
    }
    if let Some(id) = config.pad_token_id {
        set("padding", id);
    }
    Ok(())
}

/// `tokenizer.json`, for messages.
struct File<'a> {
    path: &'a Path,
}

impl File<'_> {
    fn refuse(&self, field: &str, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::invalid(self.path, field, problem)
            .with_hint("the keys of a GGUF file cannot say this; convert the model with the tool of its authors")
    }

    fn object<'v>(&self, value: &'v Value, key: &str) -> Result<&'v Map<String, Value>, CheckpointError> {
        value.get(key).and_then(Value::as_object).ok_or_else(|| self.refuse(key, "expected an object, got none"))
    }

    /// Accepts a key only if it is absent (null) or has one of these values.
    fn only(
        &self,
        object: &Map<String, Value>,
        parent: &str,
        key: &str,
        allowed: &[Value],
        what: &str,
    ) -> Result<(), CheckpointError> {
        let found = object.get(key).unwrap_or(&Value::Null);
        if allowed.contains(found) {
            return Ok(());
        }
        let problem = format!("expected {} ({what}), got {}", allowed[0], printable(&found.to_string()));
        Err(self.refuse(&format!("{parent}.{key}"), problem))
    }

    /// The name of the pre-tokenizer, normal form and merge rule of this file.
    fn pre_tokenizer(
        &self,
        value: &Value,
        model: &Map<String, Value>,
    ) -> Result<(&'static str, PreTokenizer), CheckpointError> {
        let nfc = match parts(value.get("normalizer"), "normalizers").as_slice() {
            [] => false,
            [one] if one["type"] == "NFC" => true,
            other => {
                let problem = format!("expected null or NFC, got {}", printable(&json!(other).to_string()));
                return Err(self.refuse("normalizer", problem));
            }
        };
        let ignores = model.get("ignore_merges").and_then(Value::as_bool).unwrap_or(false);
        let found = pre_parts(value.get("pre_tokenizer"));
        let known = PreTokenizer::NAMES.iter().filter_map(|&n| Some((n, PreTokenizer::named(n)?)));
        let alike: Vec<_> = known.filter(|(_, p)| pre_parts(Some(&p.to_json())) == found).collect();
        if let Some(&exact) = alike.iter().find(|(_, p)| p.nfc == nfc && p.ignore_merges == ignores) {
            return Ok(exact);
        }
        let Some((name, near)) = alike.first() else {
            let names = PreTokenizer::NAMES.join(", ");
            let problem = format!(
                "expected the splitting of one of {names}, got {}",
                printable(&value.get("pre_tokenizer").unwrap_or(&Value::Null).to_string())
            );
            return Err(self.refuse("pre_tokenizer", problem));
        };
        let (field, want, got) = match near.nfc == nfc {
            true => ("model.ignore_merges", near.ignore_merges, ignores),
            false => ("normalizer (NFC)", near.nfc, nfc),
        };
        Err(self.refuse(field, format!("expected {want}, as {name} has it in llama.cpp, got {got}")))
    }

    /// Text and kind of every id; ids that have none get made-up names, as many as the embedding has rows.
    fn tokens(
        &self,
        value: &Value,
        model: &Map<String, Value>,
        rows: usize,
    ) -> Result<(Vec<String>, Vec<TokenType>), CheckpointError> {
        let mut all: Vec<Option<(String, TokenType)>> = vec![None; rows];
        let mut put = |text: &str, id: Option<u64>, ty: TokenType| {
            let place = id.and_then(|id| all.get_mut(id as usize));
            let problem = match place {
                None => format!("expected an id below the {rows} rows of the embedding, got {}", json!(id)),
                Some(Some((other, _))) if other != text => {
                    format!("expected an id of its own, got {}, which is that of {:?}", json!(id), printable(other))
                }
                Some(place) => {
                    *place = Some((text.to_owned(), ty));
                    return Ok(());
                }
            };
            Err(self.refuse(&format!("model.vocab: {:?}", printable(text)), problem))
        };
        let vocab = model.get("vocab").and_then(Value::as_object);
        let vocab = vocab.ok_or_else(|| self.refuse("model.vocab", "expected an object, got none"))?;
        let pieces = model.get("byte_fallback").and_then(Value::as_bool).unwrap_or(false);
        let unknown = model.get("unk_token").and_then(Value::as_str).filter(|_| pieces);
        let bytes: HashSet<String> = (0..=u8::MAX).filter(|_| pieces).map(sentencepiece::byte_token).collect();
        for (text, id) in vocab {
            put(text, id.as_u64(), if bytes.contains(text) { TokenType::Byte } else { TokenType::Normal })?;
        }
        let steps = parts(value.get("normalizer"), "normalizers");
        let (size, mut largest) = (vocab.len() as u64, None::<u64>);
        for token in value.get("added_tokens").and_then(Value::as_array).into_iter().flatten() {
            let text = token.get("content").and_then(Value::as_str).unwrap_or_default();
            let field = |key: &str| format!("added_tokens: {:?}: {key}", printable(text));
            for key in ["lstrip", "rstrip", "single_word"] {
                if token.get(key).and_then(Value::as_bool).unwrap_or(false) {
                    return Err(self.refuse(&field(key), "expected false, got true"));
                }
            }
            let normalized = token.get("normalized").and_then(Value::as_bool).unwrap_or(false);
            if let Some(step) = steps.iter().find(|step| normalized && !keeps(step, text)) {
                let problem = format!(
                    "expected false, as the normalizer ({}) can change the token's text and llama.cpp looks for it as it is, \
                     got true",
                    printable(step["type"].as_str().unwrap_or_default())
                );
                return Err(self
                    .refuse(&field("normalized"), problem)
                    .with_hint("set it to false if the token is meant wherever its text stands"));
            }
            // The `tokenizers` library numbers tokens that the vocabulary lacks itself, whatever the file says.
            let next = largest.filter(|l| *l >= size).map_or(size, |l| l + 1);
            let given = vocab.get(text).and_then(Value::as_u64).unwrap_or(next);
            let id = token.get("id").and_then(Value::as_u64);
            if id != Some(given) {
                let problem = format!("expected {given}, which the tokenizers library gives it, got {}", json!(id));
                return Err(self.refuse(&field("id"), problem));
            }
            largest = largest.max(Some(given));
            let special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
            let ty = match special {
                true if unknown == Some(text) => TokenType::Unknown,
                true => TokenType::Control,
                false => TokenType::UserDefined,
            };
            put(text, id, ty)?;
        }
        let free = |id: usize| (format!("[PAD{id}]"), TokenType::Unused);
        Ok(all.into_iter().enumerate().map(|(id, t)| t.unwrap_or_else(|| free(id))).unzip())
    }

    /// The keys of a SentencePiece vocabulary beside tokens, types and merges; [`MERGES`] stay, so that the file comes back as it was.
    fn pieces(
        &self,
        value: &Value,
        model: &Map<String, Value>,
        tokens: &[String],
        types: &[TokenType],
        merges: &[String],
        metadata: &mut Metadata,
    ) -> Result<(), CheckpointError> {
        self.only(model, "model", "ignore_merges", &[json!(false), Value::Null], "SentencePiece joins by scores")?;
        let steps = |key: &str, list: &str| parts(value.get(key), list);
        let (normalizers, splits) = (steps("normalizer", "normalizers"), steps("pre_tokenizer", "pretokenizers"));
        let prefix = sentencepiece::prefix_of(&normalizers, &splits).ok_or_else(|| {
            let want = "Prepend and Replace, Replace, or Metaspace without splitting and with prepend_scheme never";
            let got = json!([normalizers, splits]).to_string();
            let why = sentencepiece::metaspace_differs(&splits).map(|why| format!(" ({why})")).unwrap_or_default();
            let error = self.refuse(
                "normalizer, pre_tokenizer",
                format!("expected {want}, as llama.cpp does it, got {}{why}", printable(&got)),
            );
            match why.is_empty() {
                true => error,
                false => error.with_hint(
                    "if the model was trained with a space before every text, say so by a normalizer of Prepend and Replace",
                ),
            }
        })?;
        let ids: HashMap<&str, usize> = tokens.iter().enumerate().map(|(id, text)| (text.as_str(), id)).collect();
        let id = |text: &str| ids.get(text).copied();
        let unknown = model.get("unk_token").and_then(Value::as_str).and_then(id);
        let unknown = unknown.filter(|id| types[*id] == TokenType::Unknown).ok_or_else(|| {
            self.refuse("model.unk_token", format!("expected a special token, got {}", json!(model.get("unk_token"))))
        })?;
        if let Some(byte) =
            (0..=u8::MAX).find(|b| id(&sentencepiece::byte_token(*b)).is_none_or(|id| types[id] != TokenType::Byte))
        {
            let problem = format!("expected a token {} for each byte, got none", sentencepiece::byte_token(byte));
            return Err(self.refuse("model.vocab", problem));
        }
        let texts: Vec<&str> = tokens.iter().map(String::as_str).collect();
        let joins: Vec<bool> = types.iter().map(|t| *t == TokenType::Normal).collect();
        let scores = sentencepiece::scores_of(&texts, &joins, merges).ok_or_else(|| {
            self.refuse(
                "model.merges",
                "expected every way to make a token of two, in an order that scores of tokens give, got others",
            )
        })?;
        let bytes = scores.into_iter().flat_map(f32::to_le_bytes).collect();
        metadata.set(MODEL, Pair::String(SENTENCEPIECE.into()));
        metadata.set(PRE, Pair::String("default".into()));
        metadata.set(SCORES, Pair::Array(Array::Scalars { ty: ValueType::F32, bytes }));
        metadata.set("tokenizer.ggml.unknown_token_id", Pair::U32(unknown as u32));
        metadata.set("tokenizer.ggml.add_space_prefix", Pair::Bool(prefix));
        Ok(())
    }

    /// Merges as two tokens with one space between.
    fn merges(&self, model: &Map<String, Value>) -> Result<Vec<String>, CheckpointError> {
        let list = model.get("merges").and_then(Value::as_array);
        let list = list.ok_or_else(|| self.refuse("model.merges", "expected an array, got none"))?;
        let one = |(i, merge): (usize, &Value)| {
            let halves = merge.as_array().map(|pair| pair.iter().filter_map(Value::as_str).collect::<Vec<_>>());
            match (merge.as_str(), halves.as_deref()) {
                (Some(text), _) => Ok(text.to_owned()),
                (_, Some([a, b])) if !a.contains(' ') && !b.contains(' ') => Ok(format!("{a} {b}")),
                _ => {
                    let problem = format!("expected two tokens without spaces, got {}", printable(&merge.to_string()));
                    Err(self.refuse(&format!("model.merges[{i}]"), problem))
                }
            }
        };
        list.iter().enumerate().map(one).collect()
    }

    /// Whether a text gets BOS in front and EOS behind.
    fn frame(&self, value: &Value, config: &LlamaConfig) -> Result<(bool, bool), CheckpointError> {
        let field = "post_processor";
        let (mut bos, mut eos) = (false, false);
        for part in parts(value.get(field), "processors") {
            if part["type"] == "ByteLevel" {
                continue; // Offsets only.
            }
            if part["type"] != "TemplateProcessing" {
                let problem = format!(
                    "expected null, ByteLevel or TemplateProcessing, got {}",
                    printable(&part["type"].to_string())
                );
                return Err(self.refuse(field, problem));
            }
            let single = part["single"].as_array().map(Vec::as_slice).unwrap_or_default();
            let ids = |item: &Value| {
                let token = item["SpecialToken"]["id"].as_str().unwrap_or_default();
                part["special_tokens"][token]["ids"].as_array().and_then(|ids| match ids.as_slice() {
                    [id] => id.as_u64(),
                    _ => None,
                })
            };
            let is_text = |item: &Value| item.get("Sequence").is_some();
            let frame = match single {
                [text] if is_text(text) => (None, None),
                [first, text] if is_text(text) => (Some(ids(first)), None),
                [text, last] if is_text(text) => (None, Some(ids(last))),
                [first, text, last] if is_text(text) => (Some(ids(first)), Some(ids(last))),
                _ => {
                    return Err(
                        self.refuse(field, "expected at most one token before and one behind a text, got others")
                    );
                }
            };
            for (what, got, want) in
                [("BOS", frame.0, config.bos_token_id), ("EOS", frame.1, config.eos_token_ids.first().copied())]
            {
                if got.is_some_and(|id| id.is_none() || id != want.map(u64::from)) {
                    let problem =
                        format!("the {what} token: expected {}, as in config.json, got {}", json!(want), json!(got));
                    return Err(self.refuse(field, problem));
                }
            }
            (bos, eos) = (bos || frame.0.is_some(), eos || frame.1.is_some());
        }
        Ok((bos, eos))
    }
}

/// What is in a step of `tokenizer.json`: nothing (null), itself, or the parts of a sequence, whose list is called `list`.
fn parts(value: Option<&Value>, list: &str) -> Vec<Value> {
    match value {
        None | Some(Value::Null) => Vec::new(),
        Some(v) if v["type"] == "Sequence" => {
            v[list].as_array().into_iter().flatten().flat_map(|p| parts(Some(p), list)).collect()
        }
        Some(v) => vec![v.clone()],
    }
}

/// Whether a step of a normalizer leaves a token's text as it is, and makes that text of no other.
fn keeps(step: &Value, token: &str) -> bool {
    let lacks = |part: &Value| part.as_str().is_some_and(|part| !part.is_empty() && !token.contains(part));
    match step["type"].as_str() {
        // Characters below the first combining mark are their own normal forms.
        Some("NFC") => token.chars().all(|c| c < '\u{300}'),
        Some("Replace") => lacks(&step["pattern"]["String"]) && lacks(&step["content"]),
        _ => false,
    }
}

/// The steps of a pre-tokenizer, with what does not change the words left out.
fn pre_parts(value: Option<&Value>) -> Vec<Value> {
    let mut all = parts(value, "pretokenizers");
    for part in all.iter_mut().filter(|p| p["type"] == "ByteLevel") {
        let regex = part.get("use_regex").and_then(Value::as_bool).unwrap_or(true);
        let space = part.get("add_prefix_space").and_then(Value::as_bool).unwrap_or(true);
        *part = json!({"type": "ByteLevel", "add_prefix_space": space, "use_regex": regex});
    }
    all
}

/// Reads the keys back and compares the tokenizer that they give with the file: vocabulary, merges and added tokens.
fn same_tokenizer(
    metadata: &Metadata,
    config: &LlamaConfig,
    file: &File,
    source: &Value,
    (pieces, nfc): (bool, bool),
) -> Result<(), CheckpointError> {
    let name = |e: CheckpointError| file.refuse("", e.to_string());
    let read = GgufTokenizer::read(metadata, config.vocab_size).map_err(name)?;
    let rebuilt = read.map(|t| t.tokenizer_json()).transpose().map_err(name)?.unwrap_or_default();
    let rebuilt = parse_json(&rebuilt, &PathBuf::from("tokenizer.json"))?;
    let added = |v: &Value| -> std::collections::BTreeMap<u64, (String, bool)> {
        let list = v["added_tokens"].as_array().into_iter().flatten();
        let one = |t: &Value| Some((t["id"].as_u64()?, (t["content"].as_str()?.to_owned(), t["special"].as_bool()?)));
        list.filter_map(one).collect()
    };
    let all = |v: &Value| -> std::collections::BTreeMap<String, u64> {
        let vocab = v["model"]["vocab"].as_object().into_iter().flatten();
        let mut all: std::collections::BTreeMap<_, _> =
            vocab.filter_map(|(t, id)| Some((t.clone(), id.as_u64()?))).collect();
        all.extend(added(v).into_iter().map(|(id, (text, _))| (text, id)));
        all
    };
    let merges = |v: &Value| v["model"].as_object().map(|m| file.merges(m)).transpose();
    let differs = match () {
        () if all(source) != all(&rebuilt) => "model.vocab",
        () if added(source) != added(&rebuilt) => "added_tokens",
        () if merges(source)? != merges(&rebuilt)? => "model.merges",
        // What of them SentencePiece has was looked at before.
        () if pieces => return Ok(()),
        () if pre_parts(rebuilt.get("pre_tokenizer")) != pre_parts(source.get("pre_tokenizer")) => "pre_tokenizer",
        () if nfc == rebuilt["normalizer"].is_null() => "normalizer",
        () => return Ok(()),
    };
    Err(file.refuse(differs, "expected keys that give the same tokenizer again, got another"))
}
