//! GGUF files of the `llama` architecture as a model in Hugging Face terms: config, tensors, tokenizer, chat template.
//!
//! What is read: one little-endian file of version 2 or 3 with tensors of type F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
//! Q4_K, Q5_K or Q6_K, and a byte-level BPE tokenizer (`tokenizer.ggml.model` "gpt2") whose `pre` is known. What is refused,
//! with exit code 3 and by name: other architectures and types, big-endian and split files, rotary scaling, mixtures of
//! experts, biases, SentencePiece tokenizers, and every `llama.*` key that dsq does not know, because a key that is skipped
//! is a model that computes something else.
//!
//! - **Weights** are dequantized to f32 exactly as ggml does (`dequant.rs`); a NaN or infinite value is refused on reading.
//! - **Names and shapes** are those of `LlamaForCausalLM` (`blk.0.attn_q.weight` is
//!   `model.layers.0.self_attn.q_proj.weight`, shape `[out, in]`). llama.cpp stores the rows of each query and key head
//!   interleaved; reading puts them back (`original_row` in `llama.rs`).
//! - **Tied embeddings**: a file without `output.weight` has them.
//! - **Tokenizer**: `tokenizer.json` is rebuilt from the vocabulary, the merges and the token types; control tokens become
//!   special added tokens, user-defined ones plain added tokens, unused ids stay free. An unknown or absent
//!   `tokenizer.ggml.pre` is refused, never guessed: a wrong pre-tokenizer changes ids silently.
//! - **Files are read with positioned reads**, tensor by tensor; nothing is mapped, so a file that shrinks is an error and
//!   not a signal.
//!
//! What is written: version 3 with F16, Q8_0, Q4_0, Q4_1 or llama.cpp's mix Q4_K_M ([`GgufExport`]).

mod dequant;
mod export;
mod header;
mod keys;
mod llama;
mod mix;
mod pretokenizer;
mod proof;
mod tokenizer;
mod value;
mod vocabulary;
mod write;

pub use export::{Encode, GgufExport, GgufOptions};
pub use mix::GgufType;
pub(crate) use proof::check_proof_place;
pub use proof::proof_path;

use crate::error::printable;
use crate::json::open_regular;
use crate::{CheckpointError, Fault, ModelConfig, Severity, TensorInfo};
use dsq_quant::GgufGrid;
use header::{Header, TensorEntry};
use llama::MappedTensor;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};
use tokenizer::GgufTokenizer;

/// Bytes read at a time when a tensor is hashed or decoded.
const CHUNK_BYTES: usize = 1 << 20;

/// An open GGUF file whose header has been checked. Weights are read when asked for.
#[derive(Debug)]
pub struct GgufFile {
    path: PathBuf,
    file: File,
    header: Header,
    config: ModelConfig,
    /// In file order.
    tensors: Vec<MappedTensor>,
    by_name: HashMap<String, usize>,
}

impl GgufFile {
    /// Opens a file and makes all static checks: header, tensor table, config, shapes, tokenizer arrays. Reads no weights.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] naming the key, tensor or field; [`CheckpointError::Io`] when reading fails.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let (file, len) = open_regular(path)?;
        let header = Header::read(BufReader::with_capacity(CHUNK_BYTES, &file), len, path)?;
        let config = llama::config(&header.metadata, &header.tensors)?;
        let tensors = llama::map_tensors(&header.metadata, &config, &header.tensors)?;
        GgufTokenizer::read(&header.metadata, config.vocab_size)?;
        tokenizer::chat_template(&header.metadata)?;
        let by_name = tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        Ok(Self { path: path.to_path_buf(), file, header, config: ModelConfig::Llama(config), tensors, by_name })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The model's config, from the file's keys.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Hugging Face names of the tensors, in file order.
    pub fn names(&self) -> Vec<String> {
        self.tensors.iter().map(|t| t.name.clone()).collect()
    }

    /// Type (`Q4_1`), shape in Hugging Face order and bytes on disk of a tensor.
    pub fn info(&self, name: &str) -> Option<TensorInfo> {
        let (mapped, entry) = self.find(name)?;
        Some(TensorInfo { dtype: entry.ty.name().into(), shape: mapped.shape.clone(), bytes: entry.bytes })
    }

    fn find(&self, name: &str) -> Option<(&MappedTensor, &TensorEntry)> {
        let mapped = &self.tensors[*self.by_name.get(name)?];
        Some((mapped, &self.header.tensors[mapped.index]))
    }

    fn find_or_refuse(&self, name: &str) -> Result<(&MappedTensor, &TensorEntry), CheckpointError> {
        self.find(name)
            .ok_or_else(|| CheckpointError::invalid(&self.path, name, "expected a tensor of that name, got none"))
    }

    /// The values of a tensor, row major in Hugging Face order, dequantized to f32.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for an unknown name, [`CheckpointError::Io`] when reading fails,
    /// [`CheckpointError::Quant`] when a value is NaN or infinite.
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let (_, entry) = self.find_or_refuse(name)?;
        let row = entry.ne[0] as usize;
        let mut out = vec![0f32; entry.elements() as usize];
        self.rows(name, |to, bytes| entry.ty.dequantize(bytes, &mut out[to * row..(to + 1) * row]))?;
        if let Some(index) = out.iter().position(|x| !x.is_finite()) {
            let count = out.iter().filter(|x| !x.is_finite()).count();
            let fault = dsq_quant::QuantError::NonFinite { index, value: out[index], count };
            return Err(CheckpointError::quant(&self.path, format!("{name} ({})", printable(&entry.name)), fault));
        }
        Ok(out)
    }

    /// The block grid of a tensor; `None` for plain floats, or no tensor.
    pub(crate) fn grid(&self, name: &str) -> Option<GgufGrid> {
        self.find(name)?.1.ty.grid()
    }

    /// The block grid of a tensor and its blocks, rows in Hugging Face order; `None` for plain floats.
    ///
    /// # Errors
    /// As [`GgufFile::read_f32`], but that values are not looked at.
    pub fn read_blocks(&self, name: &str) -> Result<Option<(GgufGrid, Vec<u8>)>, CheckpointError> {
        let (_, entry) = self.find_or_refuse(name)?;
        let Some(grid) = entry.ty.grid() else { return Ok(None) };
        let mut out = vec![0u8; entry.bytes as usize];
        self.rows(name, |to, bytes| out[to * bytes.len()..(to + 1) * bytes.len()].copy_from_slice(bytes))?;
        Ok(Some((grid, out)))
    }

    /// Reads a tensor and hands over each row with its place in Hugging Face order.
    fn rows(&self, name: &str, mut row: impl FnMut(usize, &[u8])) -> Result<(), CheckpointError> {
        let (mapped, entry) = self.find_or_refuse(name)?;
        let row_bytes = entry.ne[0] as usize / entry.ty.block_len() * entry.ty.block_bytes();
        let head_dim = mapped.interleaved_heads.map(|heads| mapped.shape[0] / heads);
        let rows_at_once = (CHUNK_BYTES / row_bytes).max(1);
        let mut buffer = Vec::new();
        let rows = entry.bytes as usize / row_bytes;
        for first in (0..rows).step_by(rows_at_once) {
            let count = rows_at_once.min(rows - first);
            buffer.resize(count * row_bytes, 0);
            self.read_at(&mut buffer, entry.start + (first * row_bytes) as u64)?;
            for (i, bytes) in buffer.chunks_exact(row_bytes).enumerate() {
                row(head_dim.map_or(first + i, |d| llama::original_row(first + i, d)), bytes);
            }
        }
        Ok(())
    }

    fn read_at(&self, buffer: &mut [u8], at: u64) -> Result<(), CheckpointError> {
        read_exact_at(&self.file, buffer, at).map_err(|e| CheckpointError::io(&self.path, "read", e))
    }

    /// SHA-256 of a tensor's bytes on disk, in hex.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for an unknown name, [`CheckpointError::Io`] when reading fails.
    pub fn sha256(&self, name: &str) -> Result<String, CheckpointError> {
        let (_, entry) = self.find_or_refuse(name)?;
        self.hash(entry.start, entry.bytes)
    }

    /// [`GgufFile::sha256`] by the tensor's name in the file; `None` when there is none of that name.
    pub(crate) fn sha256_as_stored(&self, name: &str) -> Result<Option<String>, CheckpointError> {
        let entry = self.header.tensors.iter().find(|t| t.name == name);
        entry.map(|e| self.hash(e.start, e.bytes)).transpose()
    }

    /// SHA-256 of the whole file.
    pub(crate) fn sha256_of_file(&self) -> Result<String, CheckpointError> {
        let len = self.file.metadata().map_err(|e| CheckpointError::io(&self.path, "read", e))?.len();
        self.hash(0, len)
    }

    fn hash(&self, start: u64, bytes: u64) -> Result<String, CheckpointError> {
        let mut hash = Sha256::new();
        let (mut at, end) = (start, start + bytes);
        let mut buffer = vec![0; CHUNK_BYTES.min(bytes as usize)];
        while at < end {
            let len = buffer.len().min((end - at) as usize);
            self.read_at(&mut buffer[..len], at)?;
            hash.update(&buffer[..len]);
            at += len as u64;
        }
        Ok(hex(hash))
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
        if self.header.trailing > 0 {
            let what =
                format!("expected the file to end with its last tensor, got {} bytes more", self.header.trailing);
            faults.push(Fault::new(Severity::Warning, &self.path, "", what));
        }
        match self.tokenizer() {
            Ok(None) => {
                faults.push(Fault::new(
                    Severity::Warning,
                    &self.path,
                    "tokenizer.ggml.model",
                    "expected a tokenizer, got none",
                ));
            }
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

/// A finished SHA-256 in hex.
fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
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
