//! The proof of a written GGUF file: it is opened by the reader, and its keys, config, types, bytes and dequantized values are
//! compared with what was meant. Not the writing (see `export.rs`).

use super::GgufFile;
use super::export::{Planned, hash_values};
use super::layout::Order;
use super::value::Metadata;
use crate::export::{PROOF_FILE, Proof, SourceRecord, TensorProof, ratio};
use crate::json::read_json;
use crate::{CheckpointError, LlamaConfig, ModelConfig};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// What a tensor was to become.
pub(super) struct Meant {
    /// SHA-256 of its bytes in the file.
    pub(super) bytes: String,
    /// Its parts.
    pub(super) parts: Vec<MeantPart>,
}

/// What a part of it was to become.
pub(super) struct MeantPart {
    /// SHA-256 of its values as f32, in Hugging Face order (of a half of `kv_b_proj` in that of the file).
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

/// Refuses to write a proof over a file that is none of dsq's.
///
/// # Errors
/// [`CheckpointError::Usage`]; I/O errors.
pub(crate) fn check_proof_place(file: &Path) -> Result<(), CheckpointError> {
    let path = proof_path(file);
    if path.symlink_metadata().is_err() {
        return Ok(());
    }
    match read_json(&path) {
        Ok(proof) if proof.get("dsq_version").is_some() => return Ok(()),
        Err(e @ CheckpointError::Io { .. }) => return Err(e),
        _ => {}
    }
    let problem = "the place of the proof; expected no such file, or a proof, got another file";
    Err(CheckpointError::usage(&path, "--out", problem).with_hint("move the file away, or choose another --out"))
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
    let listed = file.header.tensors.iter().map(|t| (t.name.as_str(), t.ty));
    if !listed.eq(plan.iter().map(|p| (p.tensor.file.as_str(), p.ty))) || file.header.trailing > 0 {
        return differs("the list of tensors");
    }
    let mut bytes: BTreeMap<&'static str, u64> = BTreeMap::new();
    let mut tensors = Vec::with_capacity(plan.len());
    let (mut coded, mut all) = ((0u64, 0u64), (0u64, 0u64));
    for ((p, m), entry) in plan.iter().zip(meant).zip(&file.header.tensors) {
        if file.sha256_as_stored(&p.tensor.file)?.as_ref() != Some(&m.bytes) {
            return differs(&p.tensor.file);
        }
        let (bits, weights) = (entry.bytes * 8, entry.elements());
        all = (all.0 + bits, all.1 + weights);
        if p.ty.grid().is_some() {
            coded = (coded.0 + bits, coded.1 + weights);
        }
        *bytes.entry(p.ty.name()).or_insert(0) += entry.bytes;
        for (i, part) in m.parts.iter().enumerate() {
            let name = p.name(i);
            let values = match p.tensor.order {
                Order::Computed => file.rope_factors.clone().unwrap_or_default(),
                _ => p.tensor.take(file.read_f32(name)?),
            };
            if hash_values(&values) != part.values {
                return differs(&format!("the values of {name}"));
            }
            tensors.push(TensorProof {
                name: name.to_owned(),
                became: part.became,
                reason: None,
                source: part.source.clone(),
                underflow: part.underflow,
                bits_per_weight: ratio(bits, weights),
                stored: BTreeMap::from([(p.tensor.file.clone(), m.bytes.clone())]),
            });
        }
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
        logits: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::dequant::GgmlType;
    use crate::gguf::layout::{Layout, file_tensors};
    use crate::gguf::{GgufOptions, GgufType, export::GgufExport};
    use crate::{Checkpoint, ExportTensor, export_folder};
    use dsq_quant::FloatType;

    /// The proof can fail: one changed bit anywhere, keys and table included, is told or makes the file unreadable; so does
    /// another type, or a tensor that was to have other values.
    #[test]
    fn a_file_that_differs_in_one_bit_is_not_proven() {
        let dir = tempfile::tempdir().unwrap();
        let (model, out) = (dir.path().join("m"), dir.path().join("q.gguf"));
        let text = r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":32,"intermediate_size":32,
            "num_hidden_layers":1,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,"vocab_size":3,
            "max_position_embeddings":8,"rms_norm_eps":1e-5,"rope_theta":10000.0,"tie_word_embeddings":true}"#;
        let config = ModelConfig::from_json(text, Path::new("config.json")).unwrap();
        let ModelConfig::Llama(llama) = &config else { panic!("a llama") };
        let mut layers = Vec::new();
        for t in file_tensors(llama, Layout { split_kv_b: true, rope_factors: false }) {
            let data = (0..t.shape.iter().product()).map(|i: usize| (i as f32 * 0.37 + 0.1).sin()).collect();
            let [name] = t.parts.try_into().unwrap();
            layers.push(ExportTensor::Float { name, shape: t.shape, data, dtype: FloatType::F32 });
        }
        export_folder(&model, &config, layers, None, vec![], false).unwrap();
        let ckpt = Checkpoint::open(&model).unwrap();
        let options = GgufOptions { ty: GgufType::Q4_0, dtype: None, requantize: false, keep: vec![], overwrite: true };
        let export = || GgufExport::new(&ckpt, &out, options.clone()).unwrap();
        let encode = |grid: dsq_quant::GgufGrid, x: &[f32]| grid.quantize(x);
        export().write(&encode, &mut || ()).unwrap();
        let (mut export, mut meant) = (export(), Vec::new());
        for i in 0..export.tensors() {
            meant.push(export.meant_of(i, &encode).unwrap());
        }
        let whole = std::fs::read(&out).unwrap();
        let size = whole.len() as u64;
        let proven = |export: &GgufExport, meant: &[Meant]| {
            let (config, metadata, plan) = export.parts();
            prove(&out, config, metadata, plan, meant, size).is_ok()
        };
        assert!(proven(&export, &meant));
        // Where the data of each tensor lies, and the end of the table, which the offset of the last one is.
        let opened = GgufFile::open(&out).unwrap();
        let data: Vec<_> =
            opened.header.tensors.iter().map(|t| t.start as usize..(t.start + t.bytes) as usize).collect();
        let last = (data[data.len() - 1].start - data[0].start) as u64;
        let end_of_table =
            (data[0].start - 31..=data[0].start).find(|end| whole[end - 8..*end] == last.to_le_bytes()).unwrap();
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1 << (at % 8);
            std::fs::write(&out, &changed).unwrap();
            // Padding says nothing.
            let padding = at >= end_of_table && !data.iter().any(|r| r.contains(&at));
            assert!(padding || !proven(&export, &meant), "byte {at} of {}", whole.len());
        }
        std::fs::write(&out, &whole).unwrap();
        meant[3].parts[0].values = meant[4].parts[0].values.clone();
        assert!(!proven(&export, &meant));
        meant[3] = export.meant_of(3, &encode).unwrap();
        assert!(proven(&export, &meant));
        export.plan_mut()[3].ty = GgmlType::Q4_1;
        assert!(!proven(&export, &meant));
    }
}
