//! GGUF files as a model in Hugging Face terms: config, tensors, tokenizer, chat template.
//!
//! What is read: little-endian files of version 2 or 3, one for a model or the parts of a split one (`split.rs`), of the architectures `llama` (llama, mistral, mixtral), `qwen2`, `qwen3` or
//! `deepseek2` (deepseek_v2, deepseek_v3), with tensors of type F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K, and a
//! byte-level BPE tokenizer (`tokenizer.ggml.model` "gpt2") whose `pre` is known or a SentencePiece one ("llama"). What is refused, with
//! exit code 3 and by name: other architectures and types, big-endian files, what no config of `transformers` says (`arch.rs`,
//! `rope.rs`), other tokenizers, and every key of the architecture that dsq does not know, because a key that is skipped is a model that
//! computes something else.
//!
//! - **Weights** are dequantized to f32 exactly as ggml does (`dequant.rs`); a NaN or infinite value is refused on reading.
//! - **Names and shapes** are those of `transformers` (`blk.0.attn_q.weight` is `model.layers.0.self_attn.q_proj.weight`, shape
//!   `[out, in]`). In `llama` the rows of each query and key head are interleaved, the layers of experts lie one behind the
//!   other in one tensor, and `kv_b_proj` is in two; reading puts all that back (`layout.rs`).
//! - **Tied embeddings**: a file without `output.weight` has them.
//! - **Tokenizer**: `tokenizer.json` is rebuilt from the vocabulary, the merges and the token types; control tokens become
//!   special added tokens, user-defined ones plain added tokens, unused ids stay free. An unknown or absent
//!   `tokenizer.ggml.pre` is refused, never guessed: a wrong pre-tokenizer changes ids silently.
//! - **Files are read with positioned reads**, tensor by tensor; nothing is mapped, so a file that shrinks is an error and
//!   not a signal.
//!
//! What is written: version 3 with F16, Q8_0, Q4_0, Q4_1 or llama.cpp's mix Q4_K_M ([`GgufExport`]).

mod arch;
mod dequant;
mod export;
mod header;
mod keys;
mod layout;
mod mix;
mod pretokenizer;
mod proof;
mod rope;
mod sentencepiece;
mod split;
mod tokenizer;
mod value;
mod vocabulary;
mod write;

pub use export::{Encode, GgufExport, GgufOptions};
pub use mix::GgufType;
pub(crate) use proof::check_proof_place;
pub use proof::proof_path;

use crate::checkpoint::hex;
use crate::error::printable;
use crate::{CheckpointError, Fault, ModelConfig, Severity, TensorInfo};
use arch::Arch;
use dequant::GgmlType;
use dsq_quant::GgufGrid;
use header::{Header, TensorEntry};
use layout::{FileTensor, Layout, Order, ROPE_FACTORS};
use sha2::{Digest, Sha256};
use split::Part;
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use tokenizer::GgufTokenizer;

/// Bytes read at a time when a tensor is hashed or decoded.
const CHUNK_BYTES: usize = 1 << 20;

/// An open GGUF file, or the parts of a split one, whose header has been checked. Weights are read when asked for.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    /// The file, or all parts.
    files: Vec<Part>,
    /// Of all parts together.
    header: Header,
    config: ModelConfig,
    layout: Layout,
    /// What rotary frequencies are divided by, where the file says it.
    rope_factors: Option<Vec<f32>>,
    /// In file order, each with its place in the header's table.
    tensors: Vec<(usize, FileTensor)>,
    /// Hugging Face names, as they come in the file.
    names: Vec<String>,
    /// The tensors of the file that hold one of a name, and as which of their parts: two for `kv_b_proj` in two, else one.
    by_name: HashMap<String, Vec<(usize, usize)>>,
}

impl GgufFile {
    /// Opens a file, of a split model its first part and with it the others, and makes all static checks: header, tensor table, config, shapes, tokenizer arrays. Reads no weights.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] naming the key, tensor or field; [`CheckpointError::Io`] when reading fails.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let (files, header) = split::open(path)?;
        let rope_factors = rope_factors(&files, &header)?;
        let (config, layout) = arch::config(&header.metadata, &header.tensors, rope_factors.as_deref())?;
        let tensors = layout::map_tensors(&header.metadata, &config, layout, &header.tensors)?;
        GgufTokenizer::read(&header.metadata, config.vocab_size)?;
        tokenizer::chat_template(&header.metadata)?;
        let (mut names, mut by_name) = (Vec::new(), HashMap::<String, Vec<(usize, usize)>>::new());
        for (i, (_, t)) in tensors.iter().enumerate() {
            for (part, name) in t.parts.iter().enumerate() {
                let places = by_name.entry(name.clone()).or_default();
                if places.is_empty() {
                    names.push(name.clone());
                }
                places.push((i, part));
            }
        }
        let (path, config) = (path.to_path_buf(), ModelConfig::Llama(config));
        Ok(Self { path, files, header, config, layout, rope_factors, tensors, names, by_name })
    }

    /// The file; of a split model its first part.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file, or all parts of a split model in their order.
    pub(crate) fn paths(&self) -> Vec<&Path> {
        self.files.iter().map(|part| part.path.as_path()).collect()
    }

    /// The model's config, from the file's keys.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    pub(crate) fn arch(&self) -> Arch {
        let ModelConfig::Llama(config) = &self.config else { return Arch::Llama };
        Arch::of(config)
    }

    /// Hugging Face names of the tensors, in file order.
    pub fn names(&self) -> Vec<String> {
        self.names.clone()
    }

    /// Type (`Q4_1`; of one in two tensors of different types both, `Q5_0+Q8_0`), shape in Hugging Face order and bytes on disk of
    /// a tensor.
    pub fn info(&self, name: &str) -> Option<TensorInfo> {
        let places = self.places(name)?;
        let shape = places.first()?.0.part_shape.clone();
        let bytes = places.iter().map(|(t, entry, _)| entry.bytes / t.parts.len() as u64).sum();
        let mut types: Vec<&str> = places.iter().map(|(_, entry, _)| entry.ty.name()).collect();
        types.dedup();
        Some(TensorInfo { dtype: types.join("+"), shape, bytes })
    }

    /// The tensors of the file that hold `name`, and as which part.
    fn places(&self, name: &str) -> Option<Vec<(&FileTensor, &TensorEntry, usize)>> {
        let of = |&(i, part): &(usize, usize)| {
            let (index, tensor) = &self.tensors[i];
            (tensor, &self.header.tensors[*index], part)
        };
        Some(self.by_name.get(name)?.iter().map(of).collect())
    }

    fn places_or_refuse(&self, name: &str) -> Result<Vec<(&FileTensor, &TensorEntry, usize)>, CheckpointError> {
        self.places(name)
            .ok_or_else(|| CheckpointError::invalid(&self.path, name, "expected a tensor of that name, got none"))
    }

    /// The type of the tensor that is called so in the file.
    fn type_as_stored(&self, file: &str) -> Option<GgmlType> {
        self.header.tensors.iter().find(|t| t.name == file).map(|t| t.ty)
    }

    /// The values of a tensor, row major in Hugging Face order, dequantized to f32.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for an unknown name, [`CheckpointError::Io`] when reading fails,
    /// [`CheckpointError::Quant`] when a value is NaN or infinite.
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let places = self.places_or_refuse(name)?;
        let mut out = Vec::new();
        for (tensor, entry, part) in &places {
            let row = entry.ne[0] as usize;
            let mut values = vec![0f32; entry.elements() as usize / tensor.parts.len()];
            self.rows(tensor, entry, *part, |to, bytes| {
                entry.ty.dequantize(bytes, &mut values[to * row..(to + 1) * row]);
            })?;
            if let Some(index) = values.iter().position(|x| !x.is_finite()) {
                let count = values.iter().filter(|x| !x.is_finite()).count();
                let fault = dsq_quant::QuantError::NonFinite { index, value: values[index], count };
                let path = &self.files[entry.file].path;
                return Err(CheckpointError::quant(path, format!("{name} ({})", printable(&entry.name)), fault));
            }
            if tensor.is_half() {
                out.resize(tensor.part_shape.iter().product(), 0.0);
                tensor.put(&values, &mut out);
            } else {
                out = values;
            }
        }
        Ok(out)
    }

    /// The block grid of a tensor; `None` for plain floats, what is in two tensors, or no tensor.
    pub(crate) fn grid(&self, name: &str) -> Option<GgufGrid> {
        match self.places(name)?.as_slice() {
            [(_, entry, _)] => entry.ty.grid(),
            _ => None,
        }
    }

    /// The block grid of a tensor and its blocks, rows in Hugging Face order; `None` for plain floats, and what is in two tensors.
    ///
    /// # Errors
    /// As [`GgufFile::read_f32`], but that values are not looked at.
    pub fn read_blocks(&self, name: &str) -> Result<Option<(GgufGrid, Vec<u8>)>, CheckpointError> {
        let places = self.places_or_refuse(name)?;
        let [(tensor, entry, part)] = places.as_slice() else { return Ok(None) };
        self.blocks(tensor, entry, *part)
    }

    /// The blocks of a part of the tensor that is called so in the file, its rows in Hugging Face order but for those of halves.
    fn blocks_as_stored(&self, file: &str, part: usize) -> Result<Option<(GgufGrid, Vec<u8>)>, CheckpointError> {
        match self.tensors.iter().find(|(_, t)| t.file == file) {
            Some((index, tensor)) => self.blocks(tensor, &self.header.tensors[*index], part),
            None => Ok(None),
        }
    }

    fn blocks(
        &self,
        tensor: &FileTensor,
        entry: &TensorEntry,
        part: usize,
    ) -> Result<Option<(GgufGrid, Vec<u8>)>, CheckpointError> {
        let Some(grid) = entry.ty.grid() else { return Ok(None) };
        let mut out = vec![0u8; entry.bytes as usize / tensor.parts.len()];
        self.rows(tensor, entry, part, |to, bytes| {
            out[to * bytes.len()..(to + 1) * bytes.len()].copy_from_slice(bytes);
        })?;
        Ok(Some((grid, out)))
    }

    /// Reads a part of a tensor and hands over each row with its place in Hugging Face order (of a half in that of the file).
    fn rows(
        &self,
        tensor: &FileTensor,
        entry: &TensorEntry,
        part: usize,
        mut row: impl FnMut(usize, &[u8]),
    ) -> Result<(), CheckpointError> {
        let row_bytes = entry.ne[0] as usize / entry.ty.block_len() * entry.ty.block_bytes();
        let rows_at_once = (CHUNK_BYTES / row_bytes).max(1);
        let mut buffer = Vec::new();
        let bytes = entry.bytes / tensor.parts.len().max(1) as u64;
        let (start, rows) = (entry.start + part as u64 * bytes, bytes as usize / row_bytes);
        for first in (0..rows).step_by(rows_at_once) {
            let count = rows_at_once.min(rows - first);
            buffer.resize(count * row_bytes, 0);
            self.read_at(entry.file, &mut buffer, start + (first * row_bytes) as u64)?;
            for (i, bytes) in buffer.chunks_exact(row_bytes).enumerate() {
                let place = match tensor.order {
                    Order::Interleaved(head_dim) => layout::original_row(first + i, head_dim),
                    _ => first + i,
                };
                row(place, bytes);
            }
        }
        Ok(())
    }

    fn read_at(&self, file: usize, buffer: &mut [u8], at: u64) -> Result<(), CheckpointError> {
        let part = &self.files[file];
        read_exact_at(&part.file, buffer, at).map_err(|e| CheckpointError::io(&part.path, "read", e))
    }

    /// SHA-256 of a tensor's bytes on disk, in hex: of one in two tensors of both, one after the other.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for an unknown name, [`CheckpointError::Io`] when reading fails.
    pub fn sha256(&self, name: &str) -> Result<String, CheckpointError> {
        let mut hash = Sha256::new();
        for (tensor, entry, part) in self.places_or_refuse(name)? {
            let bytes = entry.bytes / tensor.parts.len() as u64;
            self.hash(entry.file, entry.start + part as u64 * bytes, bytes, &mut hash)?;
        }
        Ok(hex(hash))
    }

    /// The names that the file itself uses.
    pub(crate) fn stored_names(&self) -> Vec<String> {
        self.header.tensors.iter().map(|t| t.name.clone()).collect()
    }

    /// [`GgufFile::sha256`] by the tensor's name in the file; `None` when there is none of that name.
    pub(crate) fn sha256_as_stored(&self, name: &str) -> Result<Option<String>, CheckpointError> {
        let entry = self.header.tensors.iter().find(|t| t.name == name);
        let of = |e: &TensorEntry| {
            let mut hash = Sha256::new();
            self.hash(e.file, e.start, e.bytes, &mut hash).map(|()| hex(hash))
        };
        entry.map(of).transpose()
    }

    /// SHA-256 of the whole file; of a split model of the first part.
    pub(crate) fn sha256_of_file(&self) -> Result<String, CheckpointError> {
        let len = self.files[0].file.metadata().map_err(|e| CheckpointError::io(&self.path, "read", e))?.len();
        let mut hash = Sha256::new();
        self.hash(0, 0, len, &mut hash).map(|()| hex(hash))
    }

    fn hash(&self, file: usize, start: u64, bytes: u64, hash: &mut Sha256) -> Result<(), CheckpointError> {
        let (mut at, end) = (start, start + bytes);
        let mut buffer = vec![0; CHUNK_BYTES.min(bytes as usize)];
        while at < end {
            let len = buffer.len().min((end - at) as usize);
            self.read_at(file, &mut buffer[..len], at)?;
            hash.update(&buffer[..len]);
            at += len as u64;
        }
        Ok(())
    }

    fn tokenizer(&self) -> Result<Option<GgufTokenizer<'_>>, CheckpointError> {
        let ModelConfig::Llama(config) = &self.config else { return Ok(None) };
        GgufTokenizer::read(&self.header.metadata, config.vocab_size)
    }

    /// `tokenizer.json`, rebuilt; `None` when the file has no tokenizer.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for a kind of tokenizer that dsq does not rebuild.
    pub fn tokenizer_json(&self) -> Result<Option<Vec<u8>>, CheckpointError> {
        self.tokenizer()?.map(|t| t.tokenizer_json()).transpose()
    }

    /// The chat template (Jinja), if the file has one.
    ///
    /// # Errors
    /// None today: [`GgufFile::open`] has checked the key's type.
    pub fn chat_template(&self) -> Result<Option<String>, CheckpointError> {
        Ok(tokenizer::chat_template(&self.header.metadata)?.map(str::to_owned))
    }

    /// What a Hugging Face folder needs beside config and weights: tokenizer.json, tokenizer_config.json (with the chat
    /// template), special_tokens_map.json, generation_config.json.
    ///
    /// # Errors
    /// As [`GgufFile::tokenizer_json`].
    pub fn aux_files(&self) -> Result<Vec<(String, Vec<u8>)>, CheckpointError> {
        let ModelConfig::Llama(config) = &self.config else { return Ok(Vec::new()) };
        let mut files = match self.tokenizer()? {
            Some(tokenizer) => tokenizer.files(config.max_position_embeddings)?,
            None => Vec::new(),
        };
        let mut generation = serde_json::Map::new();
        if let Some(id) = config.bos_token_id {
            generation.insert("bos_token_id".into(), id.into());
        }
        match config.eos_token_ids.as_slice() {
            [] => {}
            [one] => drop(generation.insert("eos_token_id".into(), (*one).into())),
            many => drop(generation.insert("eos_token_id".into(), many.into())),
        }
        if let Some(id) = config.pad_token_id {
            generation.insert("pad_token_id".into(), id.into());
        }
        let text = format!("{:#}\n", serde_json::Value::Object(generation));
        files.push(("generation_config.json".into(), text.into_bytes()));
        Ok(files)
    }

    /// What is odd in a file that opens: a tokenizer that cannot be rebuilt, bytes that no token spells, bytes after the
    /// tensors.
    pub fn faults(&self) -> Vec<Fault> {
        let mut faults = Vec::new();
        for part in self.files.iter().filter(|part| part.trailing > 0) {
            let what = format!("expected the file to end with its last tensor, got {} bytes more", part.trailing);
            faults.push(Fault::new(Severity::Warning, &part.path, "", what));
        }
        match self.tokenizer() {
            // A file for token ids only: `Checkpoint::missing_files` notes it.
            Ok(None) => {}
            Ok(Some(tokenizer)) => {
                if let Err(CheckpointError::Invalid(fault)) = tokenizer.tokenizer_json() {
                    faults.push(*fault);
                }
                let lost = tokenizer.lost_bytes();
                if !lost.is_empty() {
                    let list: Vec<_> = lost.iter().map(|b| format!("{b:02x}")).collect();
                    let what =
                        format!("expected a token for each byte, got none for {}: text loses them", list.join(" "));
                    faults.push(Fault::new(Severity::Note, &self.path, "tokenizer.ggml.tokens", what));
                }
            }
            Err(CheckpointError::Invalid(fault)) => faults.push(*fault),
            Err(_) => {}
        }
        faults
    }
}

/// The tensor of factors, if there is one: a list of F32.
fn rope_factors(files: &[Part], header: &Header) -> Result<Option<Vec<f32>>, CheckpointError> {
    let Some(entry) = header.tensors.iter().find(|t| t.name == ROPE_FACTORS) else { return Ok(None) };
    let Part { path, file, .. } = &files[entry.file];
    if entry.ty != GgmlType::F32 || entry.ne.len() != 1 || entry.bytes > CHUNK_BYTES as u64 {
        let problem = format!("expected a short list of F32, got {} {:?}", entry.ty.name(), entry.ne);
        return Err(CheckpointError::invalid(path, ROPE_FACTORS, problem));
    }
    let mut bytes = vec![0; entry.bytes as usize];
    read_exact_at(file, &mut bytes, entry.start).map_err(|e| CheckpointError::io(path, "read", e))?;
    let mut out = vec![0.0; entry.elements() as usize];
    GgmlType::F32.dequantize(&bytes, &mut out);
    Ok(Some(out))
}

#[cfg(unix)]
fn read_exact_at(file: &File, buffer: &mut [u8], at: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, at)
}

#[cfg(windows)]
fn read_exact_at(file: &File, mut buffer: &mut [u8], mut at: u64) -> std::io::Result<()> {
    while !buffer.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, buffer, at)? {
            0 => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            n => (buffer, at) = (&mut buffer[n..], at + n as u64),
        }
    }
    Ok(())
}
