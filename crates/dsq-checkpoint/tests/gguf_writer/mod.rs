//! Writes small GGUF files for tests, valid by default and wrong in any single way a test asks for. Not for the product.
#![allow(dead_code)] // Each test binary uses its own part.

use dsq_checkpoint::CheckpointError;
use dsq_checkpoint::gguf::GgufFile;
use std::path::PathBuf;

pub const UINT8: u32 = 0;
pub const INT8: u32 = 1;
pub const UINT32: u32 = 4;
pub const INT32: u32 = 5;
pub const FLOAT32: u32 = 6;
pub const BOOL: u32 = 7;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;

pub const F32: u32 = 0;
pub const Q4_0: u32 = 2;
pub const Q8_0: u32 = 8;
pub const Q4_K: u32 = 12;

/// A tensor to write; `offset` and `data` may disagree with the rest.
#[derive(Clone)]
pub struct Tensor {
    pub name: Vec<u8>,
    pub ne: Vec<u64>,
    pub ty: u32,
    /// `None`: where it belongs.
    pub offset: Option<u64>,
    pub data: Vec<u8>,
}

/// A file to write.
#[derive(Clone)]
pub struct Writer {
    pub magic: [u8; 4],
    pub version: u32,
    /// Counts that differ from the truth.
    pub n_kv: Option<u64>,
    pub n_tensors: Option<u64>,
    /// Key, value type, value.
    pub pairs: Vec<(Vec<u8>, u32, Vec<u8>)>,
    pub tensors: Vec<Tensor>,
    /// What offsets and padding really follow.
    pub alignment: usize,
}

/// A length-prefixed string.
pub fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}

/// An array: element type, count, elements.
pub fn array(ty: u32, elements: &[Vec<u8>]) -> Vec<u8> {
    let mut out = ty.to_le_bytes().to_vec();
    out.extend((elements.len() as u64).to_le_bytes());
    out.extend(elements.concat());
    out
}

pub fn strings(texts: &[&str]) -> Vec<u8> {
    array(STRING, &texts.iter().map(string).collect::<Vec<_>>())
}

pub fn ints(values: &[i32]) -> Vec<u8> {
    array(INT32, &values.iter().map(|v| v.to_le_bytes().to_vec()).collect::<Vec<_>>())
}

pub fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

impl Writer {
    /// A file without pairs and tensors.
    pub fn empty() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            n_kv: None,
            n_tensors: None,
            pairs: Vec::new(),
            tensors: Vec::new(),
            alignment: 32,
        }
    }

    /// Sets a key, in place when it is there already.
    pub fn set(mut self, key: &str, ty: u32, value: Vec<u8>) -> Self {
        match self.pairs.iter_mut().find(|p| p.0 == key.as_bytes()) {
            Some(pair) => (pair.1, pair.2) = (ty, value),
            None => self.pairs.push((key.into(), ty, value)),
        }
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.set(key, UINT32, value.to_le_bytes().to_vec())
    }

    pub fn f32(self, key: &str, value: f32) -> Self {
        self.set(key, FLOAT32, value.to_le_bytes().to_vec())
    }

    pub fn text(self, key: &str, value: &str) -> Self {
        self.set(key, STRING, string(value))
    }

    pub fn without(mut self, key: &str) -> Self {
        let before = self.pairs.len();
        self.pairs.retain(|p| p.0 != key.as_bytes());
        assert_ne!(before, self.pairs.len(), "{key} was not there");
        self
    }

    pub fn tensor(mut self, name: &str, ne: &[u64], ty: u32, data: Vec<u8>) -> Self {
        self.tensors.push(Tensor { name: name.into(), ne: ne.to_vec(), ty, offset: None, data });
        self
    }

    /// The tensor of that name, to change it.
    pub fn change(mut self, name: &str, change: impl FnOnce(&mut Tensor)) -> Self {
        change(self.tensors.iter_mut().find(|t| t.name == name.as_bytes()).expect(name));
        self
    }

    pub fn without_tensor(mut self, name: &str) -> Self {
        self.tensors.retain(|t| t.name != name.as_bytes());
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.n_tensors.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.n_kv.unwrap_or(self.pairs.len() as u64).to_le_bytes());
        for (key, ty, value) in &self.pairs {
            out.extend(string(key));
            out.extend(ty.to_le_bytes());
            out.extend(value);
        }
        let mut data = Vec::new();
        for t in &self.tensors {
            out.extend(string(&t.name));
            out.extend((t.ne.len() as u32).to_le_bytes());
            out.extend(t.ne.iter().flat_map(|d| d.to_le_bytes()));
            out.extend(t.ty.to_le_bytes());
            out.extend(t.offset.unwrap_or(data.len() as u64).to_le_bytes());
            data.extend(&t.data);
            data.resize(data.len().next_multiple_of(self.alignment), 0);
        }
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(data);
        out
    }
}

/// A valid one-layer model: width 32, 8 query heads and 2 kv heads of width 4, feed-forward 32, 8 rows, tied; every matrix
/// F32 and each of its rows filled with the row's index.
pub fn toy() -> Writer {
    let mut w = Writer::empty()
        .text("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.context_length", 64)
        .u32("llama.embedding_length", 32)
        .u32("llama.feed_forward_length", 32)
        .u32("llama.attention.head_count", 8)
        .u32("llama.attention.head_count_kv", 2)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5);
    let rows = |n: usize| (0..n).flat_map(|i| floats(&[i as f32; 32])).collect::<Vec<u8>>();
    w = w.tensor("token_embd.weight", &[32, 8], F32, rows(8)).tensor("output_norm.weight", &[32], F32, rows(1));
    for (name, n) in [
        ("attn_q", 32),
        ("attn_k", 8),
        ("attn_v", 8),
        ("attn_output", 32),
        ("ffn_gate", 32),
        ("ffn_up", 32),
        ("ffn_down", 32),
    ] {
        w = w.tensor(&format!("blk.0.{name}.weight"), &[32, n], F32, rows(n as usize));
    }
    for name in ["attn_norm", "ffn_norm"] {
        w = w.tensor(&format!("blk.0.{name}.weight"), &[32], F32, rows(1));
    }
    w
}

/// The toy model with a vocabulary of eight byte-level tokens, two merges, a BOS and an EOS token.
pub fn toy_with_tokenizer() -> Writer {
    toy()
        .text("tokenizer.ggml.model", "gpt2")
        .text("tokenizer.ggml.pre", "smollm")
        .set("tokenizer.ggml.tokens", ARRAY, strings(&["<s>", "</s>", "a", "b", "Ġ", "ab", "Ġab", "<tool>"]))
        .set("tokenizer.ggml.token_type", ARRAY, ints(&[3, 3, 1, 1, 1, 1, 1, 4]))
        .set("tokenizer.ggml.merges", ARRAY, strings(&["a b", "Ġ ab"]))
        .u32("tokenizer.ggml.bos_token_id", 0)
        .u32("tokenizer.ggml.eos_token_id", 1)
}

/// Writes `bytes` into a folder of its own and opens it.
pub fn open(bytes: &[u8]) -> Result<(GgufFile, tempfile::TempDir), CheckpointError> {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("toy.gguf");
    std::fs::write(&path, bytes).unwrap();
    GgufFile::open(&path).map(|file| (file, folder))
}

/// The message of a file that must be refused as an invalid artifact: one line that names the file.
#[track_caller]
pub fn refused(bytes: &[u8]) -> String {
    match open(bytes) {
        Ok(_) => panic!("the file was accepted"),
        Err(e) => {
            let message = e.to_string();
            assert_eq!(e.exit_code(), 3, "{message}");
            assert!(message.contains("toy.gguf: "), "{message}");
            assert!(!message.contains('\n') && message.len() < 4000, "{message}");
            message
        }
    }
}

/// As [`refused`], and the message has each of `parts`.
#[track_caller]
pub fn refused_with(writer: &Writer, parts: &[&str]) {
    let message = refused(&writer.bytes());
    for part in parts {
        assert!(message.contains(part), "{part:?} is missing in: {message}");
    }
}
