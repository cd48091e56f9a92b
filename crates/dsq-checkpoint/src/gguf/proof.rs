//! The proof of a written GGUF file: it is opened by the reader, and its keys, config, types, bytes and dequantized values are
//! compared with what was meant. Not the writing (see `export.rs`).

use super::GgufFile;
use super::export::{Planned, hash_values};
use super::value::Metadata;
use crate::export::{PROOF_FILE, Proof, SourceRecord, TensorProof, ratio};
use crate::{CheckpointError, LlamaConfig, ModelConfig};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What a tensor was to become.
pub(super) struct Meant {
    /// SHA-256 of its bytes in the file.
    pub(super) bytes: String,
    /// SHA-256 of its values as f32, in Hugging Face order.
    pub(super) values: String,
    /// As in [`TensorProof`].
    pub(super) became: &'static str,
    /// The source, unless it was copied.
    pub(super) source: Option<SourceRecord>,
    /// Values that became zero in a narrower float.
    pub(super) underflow: usize,
}

/// Where the proof of a GGUF file lies: `FILE.dsq-proof.json`.
pub fn proof_path(file: &Path) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(format!(".{PROOF_FILE}"));
    PathBuf::from(name)
}

/// Reads the file back. The proof has the SHA-256 of the whole file under the empty name, which the caller gives a better one.
pub(super) fn prove(
    path: &Path,
    config: &LlamaConfig,
    metadata: &Metadata,
    plan: &[Planned],
    meant: &[Meant],
    size: u64,
) -> Result<Proof, CheckpointError> {
    let differs = |what: &str| {
        let text = format!("{what}: what was read back is not what was written");
        Err(CheckpointError::io(path, "prove the export", std::io::Error::new(std::io::ErrorKind::InvalidData, text)))
    };
    let file = GgufFile::open(path)?;
    if *file.config() != ModelConfig::Llama(config.clone()) {
        return differs("the config");
    }
    if file.header.metadata.sorted() != metadata.sorted() {
        return differs("the keys");
    }
    if file.names() != plan.iter().map(|p| p.name.clone()).collect::<Vec<_>>() || file.header.trailing > 0 {
        return differs("the list of tensors");
    }
    let mut bytes: BTreeMap<&'static str, u64> = BTreeMap::new();
    let mut tensors = Vec::with_capacity(plan.len());
    let (mut coded, mut all) = ((0u64, 0u64), (0u64, 0u64));
    for (p, m) in plan.iter().zip(meant) {
        let entry = file.find_or_refuse(&p.name)?.1;
        if entry.ty != p.ty || entry.name != p.file || file.sha256(&p.name)? != m.bytes {
            return differs(&p.name);
        }
        if hash_values(&file.read_f32(&p.name)?) != m.values {
            return differs(&format!("the values of {}", p.name));
        }
        let (bits, weights) = (entry.bytes * 8, entry.elements());
        all = (all.0 + bits, all.1 + weights);
        if p.ty.grid().is_some() {
            coded = (coded.0 + bits, coded.1 + weights);
        }
        *bytes.entry(p.ty.name()).or_insert(0) += entry.bytes;
        tensors.push(TensorProof {
            name: p.name.clone(),
            became: m.became,
            reason: None,
            source: m.source.clone(),
            underflow: m.underflow,
            bits_per_weight: ratio(bits, weights),
            stored: BTreeMap::from([(p.file.clone(), m.bytes.clone())]),
        });
    }
    // Keys, table and padding.
    bytes.insert("header", size - bytes.values().sum::<u64>());
    Ok(Proof {
        format_version: 1,
        dsq_version: env!("CARGO_PKG_VERSION"),
        bits_per_weight: ratio(coded.0, coded.1),
        model_bits_per_weight: ratio(all.0, all.1),
        bytes,
        tensors,
        files: BTreeMap::from([(String::new(), file.sha256_of_file()?)]),
    })
}
