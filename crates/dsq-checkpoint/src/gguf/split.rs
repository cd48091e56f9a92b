//! The files of a model: one, or the parts that llama.cpp's `llama-gguf-split` and PyPI `gguf` split a model into. Which files belong
//! together is found out here, and their tensor tables become one. Not the meaning of any other key, and no tensor data.
//!
//! A part is a GGUF file called `NAME-00001-of-00003.gguf` (counted from 1) with the keys `split.no` (from 0), `split.count` and
//! `split.tensors.count` (of all parts together). The first has the model's other keys, with tensors or without; the others have
//! tensors and mostly no other key. As with llama.cpp, the first part is what a model is called by.

use super::header::Header;
use super::value::{Metadata, Value};
use crate::CheckpointError;
use crate::error::printable;
use crate::json::open_regular;
use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

/// Which part a file is, from 0.
const NO: &str = "split.no";
/// How many parts there are; 0 or 1 in a file that was merged or never split.
const COUNT: &str = "split.count";
/// How many tensors all parts have together.
const TENSORS: &str = "split.tensors.count";
/// Most parts of a model: they are open at the same time, and systems allow about that many files.
const MAX_PARTS: u64 = 1000;

/// An open file of a model.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) path: PathBuf,
    pub(super) file: File,
    /// Bytes after its last tensor and the padding.
    pub(super) trailing: u64,
}

/// Opens a file and, where it is the first part of a split model, all others. The header has the keys of the first and the tensors of
/// all, in the order of the parts.
///
/// # Errors
/// [`CheckpointError::Invalid`] for another part than the first, parts that are missing (all of them by name), and what parts of one
/// model do not have: other numbers than their names say, a tensor twice, fewer or more tensors than they promise, keys that differ.
pub(super) fn open(path: &Path) -> Result<(Vec<Part>, Header), CheckpointError> {
    let (first, mut header) = open_part(path)?;
    let Some(split) = Split::read(&header.metadata)? else { return Ok((vec![first], header)) };
    let paths = split.paths(path)?;
    let missing: Vec<String> =
        paths.iter().filter(|p| p.symlink_metadata().is_err()).map(|p| name(p).to_owned()).collect();
    if !missing.is_empty() {
        let (count, list) = (split.count, missing.join(", "));
        let problem = format!("expected {count} parts in one folder, got {} missing: {list}", missing.len());
        return Err(header.metadata.invalid(COUNT, problem).with_hint("download incomplete?"));
    }
    let mut parts = vec![first];
    let mut seen: HashMap<String, usize> = header.tensors.iter().map(|t| (t.name.clone(), 0)).collect();
    for (no, path) in paths.iter().enumerate().skip(1) {
        let (part, other) = open_part(path)?;
        split.check(no, &other.metadata, &header.metadata)?;
        for mut tensor in other.tensors {
            tensor.file = no;
            if let Some(before) = seen.insert(tensor.name.clone(), no) {
                let problem = format!("the tensor is in {} too; expected each name once", name(&paths[before]));
                return Err(CheckpointError::invalid(path, &tensor.name, problem).with_hint(MIXED));
            }
            header.tensors.push(tensor);
        }
        parts.push(part);
    }
    let found = header.tensors.len() as u64;
    if found != split.tensors {
        let problem = format!("expected {} tensors in all {} parts, got {found}", split.tensors, split.count);
        return Err(header.metadata.invalid(TENSORS, problem).with_hint(MIXED));
    }
    Ok((parts, header))
}

/// What is most likely wrong with parts that do not fit together.
const MIXED: &str = "are these parts of one model, made at the same time?";

fn open_part(path: &Path) -> Result<(Part, Header), CheckpointError> {
    let (file, len) = open_regular(path)?;
    let header = Header::read(BufReader::with_capacity(super::CHUNK_BYTES, &file), len, path)?;
    Ok((Part { path: path.to_path_buf(), file, trailing: header.trailing }, header))
}

/// The name of a file, where it is one that can be the name of a part.
fn name(path: &Path) -> &str {
    path.file_name().and_then(|n| n.to_str()).unwrap_or_default()
}

/// What the first part says of all.
struct Split {
    no: u64,
    count: u64,
    tensors: u64,
}

impl Split {
    /// `None` for a model in one file.
    fn read(metadata: &Metadata) -> Result<Option<Self>, CheckpointError> {
        let count = number(metadata, COUNT)?.unwrap_or(1);
        if count <= 1 {
            return Ok(None);
        }
        if count > MAX_PARTS {
            return Err(metadata.invalid(COUNT, format!("expected at most {MAX_PARTS} parts, got {count}")));
        }
        let need = |key: &str| number(metadata, key)?.ok_or_else(|| metadata.missing(key, "that of a part"));
        let (no, tensors) = (need(NO)?, need(TENSORS)?);
        if no >= count {
            return Err(metadata.invalid(NO, format!("expected a number below split.count = {count}, got {no}")));
        }
        Ok(Some(Self { no, count, tensors }))
    }

    /// The end of the name of part `no`.
    fn ending(&self, no: u64) -> String {
        format!("-{:05}-of-{:05}.gguf", no + 1, self.count)
    }

    /// Where all parts lie, if `path` is the first of them.
    fn paths(&self, path: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
        let invalid = |problem: String| CheckpointError::invalid(path, NO, problem);
        let ending = self.ending(self.no);
        let Some(stem) = name(path).strip_suffix(&ending) else {
            let got = path.file_name().unwrap_or_default().to_string_lossy();
            let problem = format!(
                "part {} of {} by its keys; expected a file called NAME{ending}, got {}",
                self.no + 1,
                self.count,
                printable(&got)
            );
            return Err(invalid(problem).with_hint("parts are found by their names: give it the name that it had"));
        };
        let paths: Vec<PathBuf> =
            (0..self.count).map(|no| path.with_file_name(format!("{stem}{}", self.ending(no)))).collect();
        if self.no != 0 {
            let problem =
                format!("expected the first part of a split model, got part {} of {}", self.no + 1, self.count);
            let first = printable(&paths[0].to_string_lossy());
            return Err(invalid(problem).with_hint(format!("the first part stands for the model: {first}")));
        }
        Ok(paths)
    }

    /// Whether another part's keys are those of part `no` of this model.
    fn check(&self, no: usize, part: &Metadata, first: &Metadata) -> Result<(), CheckpointError> {
        for (key, want) in [(NO, no as u64), (COUNT, self.count), (TENSORS, self.tensors)] {
            match number(part, key)? {
                Some(got) if got == want => {}
                Some(got) => return Err(part.invalid(key, format!("expected {want}, got {got}")).with_hint(MIXED)),
                None => return Err(part.missing(key, &want.to_string()).with_hint(MIXED)),
            }
        }
        for (key, got) in part.sorted() {
            // The alignment is that of each file.
            if [NO, COUNT, TENSORS, "general.alignment"].contains(&key) || first.get(key) == Some(got) {
                continue;
            }
            let want = first.get(key).map_or("no such key".into(), Value::describe);
            let problem = format!("expected what the first part says ({want}), got another: {}", got.describe());
            return Err(part.invalid(key, problem).with_hint(MIXED));
        }
        Ok(())
    }
}

/// A key of the split: UINT16 as the splitters write it, the number of tensors INT32; other whole numbers are taken too.
fn number(metadata: &Metadata, key: &str) -> Result<Option<u64>, CheckpointError> {
    match metadata.get(key) {
        Some(Value::U16(n)) => Ok(Some(u64::from(*n))),
        Some(Value::I32(n)) if *n >= 0 => Ok(Some(*n as u64)),
        None | Some(Value::U32(_) | Value::U64(_)) => metadata.unsigned(key),
        Some(other) => {
            Err(metadata.wrong_type(key, if key == TENSORS { "INT32 of at least 0" } else { "UINT16" }, other))
        }
    }
}
