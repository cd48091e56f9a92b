//! The weights of a Hugging Face folder: `model.safetensors`, or shards with `model.safetensors.index.json`. Not the
//! config and not what the tensors mean (see `checkpoint.rs`).

use crate::config::Stack;
use crate::config::fields::show;
use crate::json::read_json;
use crate::safetensors::{Entry, SafetensorsFile};
use crate::{CheckpointError, Fault, LlamaConfig, Severity, printable};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The open weight files of a folder.
#[derive(Debug)]
pub(crate) struct Folder {
    files: Vec<SafetensorsFile>,
    pub faults: Vec<Fault>,
}

impl Folder {
    /// Opens every weight file of `dir` and checks headers and index; reads no tensor.
    pub(crate) fn open(dir: &Path) -> Result<Self, CheckpointError> {
        let (single, index) = (dir.join(SINGLE), dir.join(INDEX));
        let mut faults = Vec::new();
        let files = match (exists(&single), exists(&index)) {
            (true, true) => {
                let problem = format!("both {SINGLE} and {INDEX} are there; expected one of them, got 2");
                return Err(CheckpointError::invalid(dir, "", problem).with_hint("remove the stale one"));
            }
            (true, false) => vec![SafetensorsFile::open(&single)?],
            (false, true) => open_shards(dir, &index, &mut faults)?,
            (false, false) => {
                let mut e = CheckpointError::invalid(dir, "", format!("no weights; expected {SINGLE} or {INDEX}"));
                if exists(&dir.join("pytorch_model.bin")) {
                    e = e.with_hint("pytorch_model.bin is not read: convert it to safetensors");
                }
                return Err(e);
            }
        };
        Ok(Self { files, faults })
    }

    /// Reads the experts of a model one by one where transformers 5 stored its own modules (`save_original_format=False`): all experts of
    /// a layer stacked in two tensors, see [`LlamaConfig::stacked`].
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for a stack of another shape than the config's, or of no floats.
    pub(crate) fn take_experts_apart(&mut self, config: &LlamaConfig) -> Result<(), CheckpointError> {
        let mut count = 0;
        for file in &mut self.files {
            for entry in file.entries() {
                let Some(Stack { shape, .. }) = config.stacked(&entry.name) else { continue };
                if entry.shape != shape || entry.dtype.float().is_none() {
                    let problem = format!(
                        "stacked experts; expected floats of shape {shape:?} (experts, outputs, inputs), got {} {:?}",
                        entry.dtype, entry.shape
                    );
                    return Err(CheckpointError::invalid(file.path(), &entry.name, problem).with_hint(
                        "transformers saves experts one by one with save_original_format=True, its default",
                    ));
                }
            }
            count += file.split(|entry| config.stacked(&entry.name).map(|stack| stack.parts))?;
        }
        if count > 0 {
            let path = self.files[0].path();
            let what = format!(
                "{count} tensors with the experts of a layer stacked, or under transformers' own names: read one by one"
            );
            self.faults.push(Fault::new(Severity::Note, path, "experts", what));
        }
        Ok(())
    }

    /// The names of the tensors, in file order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.files.iter().flat_map(SafetensorsFile::names)
    }

    /// A tensor and its file. No table of its own: each file finds a name by bisection, and a tensor is in one file only.
    pub(crate) fn find(&self, name: &str) -> Option<(&SafetensorsFile, &Entry)> {
        self.files.iter().find_map(|file| file.entry(name).map(|e| (file, e)))
    }
}

fn exists(path: &Path) -> bool {
    // A broken symlink exists too: opening it then says what is wrong with it.
    path.symlink_metadata().is_ok()
}

fn open_shards(dir: &Path, index: &Path, faults: &mut Vec<Fault>) -> Result<Vec<SafetensorsFile>, CheckpointError> {
    let value = read_json(index)?;
    let invalid = |field: &str, problem: String| CheckpointError::invalid(index, field, problem);
    let map = match value.get("weight_map") {
        Some(Value::Object(map)) if !map.is_empty() => map,
        other => {
            let got = other.map_or("nothing".into(), show);
            return Err(invalid("weight_map", format!("expected a non-empty object, got {got}")));
        }
    };
    let mut shards = BTreeSet::new();
    for (tensor, shard) in map {
        let name = shard.as_str().filter(|s| is_plain_name(s)).ok_or_else(|| {
            invalid(
                &format!("weight_map.{tensor}"),
                format!("shard must be a plain file name; expected a name inside the folder, got {}", show(shard)),
            )
        })?;
        shards.insert(name);
    }
    let missing: Vec<_> = shards.iter().filter(|s| !exists(&dir.join(s))).map(|s| printable(s)).collect();
    if !missing.is_empty() {
        let problem = format!("{} of {} shards are missing: {}", missing.len(), shards.len(), missing.join(", "));
        return Err(invalid("weight_map", problem).with_hint("download incomplete?"));
    }
    let mut files = Vec::new();
    for shard in &shards {
        let path = dir.join(shard);
        check_link(dir, &path)?;
        files.push(SafetensorsFile::open(&path)?);
    }
    check_index(index, map, &shards, &files)?;
    let total: u64 = files.iter().flat_map(SafetensorsFile::entries).map(|e| e.info().bytes).sum();
    if let Some(said) = value.pointer("/metadata/total_size").filter(|v| v.as_f64() != Some(total as f64)) {
        let problem = format!("does not match the shards; expected {total}, got {}", show(said));
        faults.push(Fault::new(Severity::Warning, index, "metadata.total_size", problem));
    }
    for stale in stale_shards(dir, &shards) {
        faults.push(Fault::new(Severity::Warning, &stale, "", "weight file that the index does not name"));
    }
    Ok(files)
}

/// Index and shards must name the same tensors in the same shards.
fn check_index(
    index: &Path,
    map: &serde_json::Map<String, Value>,
    shards: &BTreeSet<&str>,
    files: &[SafetensorsFile],
) -> Result<(), CheckpointError> {
    for (shard, file) in shards.iter().zip(files) {
        let lacks = map.iter().find(|(t, s)| s.as_str() == Some(shard) && file.entry(t).is_none());
        if let Some((tensor, _)) = lacks {
            let problem = format!("the index places this tensor in {}, which lacks it", printable(shard));
            return Err(CheckpointError::invalid(index, tensor, problem));
        }
        for entry in file.entries() {
            match map.get(&entry.name).and_then(Value::as_str) {
                Some(s) if s == *shard => {}
                Some(s) => {
                    let problem =
                        format!("tensor is in {} too; expected it in {} only", printable(shard), printable(s));
                    return Err(CheckpointError::invalid(index, &entry.name, problem));
                }
                None => {
                    let problem = format!("{} holds this tensor, which the index does not name", printable(shard));
                    return Err(CheckpointError::invalid(index, &entry.name, problem));
                }
            }
        }
    }
    Ok(())
}

fn is_plain_name(name: &str) -> bool {
    !name.is_empty()
        && name != "."
        && name != ".."
        && name.len() <= 255
        && !name.contains(['/', '\\', '\0', ':'])
        && !name.chars().any(char::is_control)
}

/// A shard may be a symlink within its folder, or in the Hugging Face cache from `snapshots/REV/` to `blobs/`.
fn check_link(dir: &Path, path: &Path) -> Result<(), CheckpointError> {
    if !path.symlink_metadata().is_ok_and(|m| m.file_type().is_symlink()) {
        return Ok(());
    }
    let (Ok(real), Ok(home)) = (path.canonicalize(), dir.canonicalize()) else {
        return Err(CheckpointError::invalid(path, "", "expected a file, got a symlink that leads nowhere"));
    };
    let cache = home
        .parent()
        .filter(|p| p.file_name().is_some_and(|n| n == "snapshots"))
        .and_then(Path::parent)
        .map(|model| model.join("blobs"));
    if real.starts_with(&home) || cache.is_some_and(|blobs| real.starts_with(blobs)) {
        return Ok(());
    }
    let problem = format!("symlink leaves the folder; expected a file inside it, got {}", real.display());
    Err(CheckpointError::invalid(path, "", problem))
}

fn stale_shards(dir: &Path, shards: &BTreeSet<&str>) -> Vec<PathBuf> {
    let mut out: Vec<PathBuf> = std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .map(|e| e.path())
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .filter(|p| p.file_name().and_then(|n| n.to_str()).is_none_or(|n| !shards.contains(n)))
        .collect();
    out.sort();
    out
}
