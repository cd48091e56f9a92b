//! What is in an ONNX file, and whether it is still what its export wrote. Not a model: nothing of it can be run here.

use super::export::{beside, data_paths};
use super::proof::{Read, check_graph, type_name};
use super::proto::DataType;
use crate::checkpoint::hex_sha256;
use crate::gguf::proof_path;
use crate::json::read_json;
use crate::{CheckpointError, Fault, Severity};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OnnxTensor {
    /// Its name.
    pub name: String,
    /// Its type, by the name in `onnx.proto`.
    pub dtype: String,
    /// Its shape, outermost first.
    pub shape: Vec<usize>,
    /// Bytes of its values.
    pub bytes: u64,
}

/// An ONNX file that was decoded.
#[derive(Debug)]
pub struct OnnxFile {
    path: PathBuf,
    read: Read,
}

impl OnnxFile {
    /// Decodes a file.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] (3) for bytes that are no ONNX model, [`CheckpointError::Io`] (4).
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let read = Read::open(path, &|name| beside(path, name))?;
        read.graph()?;
        Ok(Self { path: path.to_path_buf(), read })
    }

    /// `dsq 0.1.0: ir 10, operators: 12 Add, 7 MatMulNBits...`.
    pub fn describe(&self) -> String {
        let m = &self.read.model;
        let mut operators: BTreeMap<&str, usize> = BTreeMap::new();
        for node in m.graph.iter().flat_map(|g| &g.node) {
            *operators.entry(node.op_type.as_deref().unwrap_or_default()).or_insert(0) += 1;
        }
        let operators: Vec<String> = operators.iter().map(|(name, n)| format!("{n} {name}")).collect();
        let (by, version) = (m.producer_name.as_deref().unwrap_or("?"), m.producer_version.as_deref().unwrap_or("?"));
        format!("ONNX of {by} {version}, IR {}: {}", m.ir_version.unwrap_or(0), operators.join(", "))
    }

    /// The tensors, in the order of the file.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for a shape below 0 or bytes that are not there.
    pub fn tensors(&self) -> Result<Vec<OnnxTensor>, CheckpointError> {
        let mut out = Vec::new();
        for t in &self.read.graph()?.initializer {
            let name = t.name.clone().unwrap_or_default();
            let shape = t.dims.iter().map(|&d| usize::try_from(d)).collect::<Result<Vec<_>, _>>();
            let shape = shape.map_err(|_| {
                CheckpointError::invalid(&self.path, &name, format!("expected sizes from 0, got {:?}", t.dims))
            })?;
            let bytes = self.read.bytes(t)?.len() as u64;
            out.push(OnnxTensor { name, dtype: type_name(t.data_type), shape, bytes });
        }
        Ok(out)
    }

    /// What is wrong with it: a graph that does not hang together, and differences to the proof beside it.
    pub fn faults(&self) -> Vec<Fault> {
        let fault = |severity, field: &str, problem: String| Fault::new(severity, &self.path, field, problem);
        let mut faults = Vec::new();
        let Ok(graph) = self.read.graph() else { return faults };
        if let Err(problem) = check_graph(graph) {
            faults.push(fault(Severity::Error, "graph", format!("expected inputs that are there, got {problem}")));
        }
        for t in &graph.initializer {
            let known = t.data_type.and_then(DataType::of);
            let values = t.dims.iter().try_fold(1u64, |n, &d| n.checked_mul(u64::try_from(d).ok()?));
            let (Some(ty), Some(n), Ok(bytes)) = (known, values, self.read.bytes(t)) else { continue };
            // (Other tools may keep values in typed fields.)
            if !bytes.is_empty() && bytes.len() as u64 != ty.bytes(n) {
                let problem = format!("expected {} bytes of {}, got {}", ty.bytes(n), ty.name(), bytes.len());
                faults.push(fault(Severity::Error, t.name.as_deref().unwrap_or_default(), problem));
            }
        }
        let path = proof_path(&self.path);
        if path.symlink_metadata().is_err() {
            faults.push(fault(
                Severity::Note,
                "",
                "no proof beside the file: its values are compared with nothing".into(),
            ));
            return faults;
        }
        let proof = match read_json(&path) {
            Ok(proof) => proof,
            Err(e) => {
                faults.push(fault(Severity::Warning, "", e.to_string()));
                return faults;
            }
        };
        faults.extend(self.against(&proof));
        faults
    }

    /// Differences to a proof: a changed tensor is an error, another change of a file a warning.
    fn against(&self, proof: &Value) -> Vec<Fault> {
        let mut faults = Vec::new();
        let tensors = proof.get("tensors").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        for (name, expected) in tensors.iter().filter_map(|t| t.get("stored")?.as_object()).flatten() {
            let tensor =
                self.read.model.graph.iter().flat_map(|g| &g.initializer).find(|t| t.name.as_ref() == Some(name));
            let problem = match tensor.map(|t| self.read.bytes(t)) {
                Some(Ok(bytes)) if *expected == hex_sha256(&bytes).as_str() => continue,
                Some(Ok(bytes)) => {
                    format!(
                        "not the tensor that was exported; expected SHA-256 {expected}, got \"{}\"",
                        hex_sha256(&bytes)
                    )
                }
                Some(Err(e)) => e.to_string(),
                None => "expected this tensor, got nothing".into(),
            };
            faults.push(Fault::new(Severity::Error, &self.path, name, problem));
        }
        let files = proof.get("files").and_then(Value::as_object);
        let found = match self.read.hashes() {
            Ok(hashes) => hashes,
            Err(e) => return [faults, vec![Fault::new(Severity::Error, &self.path, "", e.to_string())]].concat(),
        };
        for (name, expected) in files.into_iter().flatten() {
            // The files may have other names by now.
            let (path, got) = match data_paths(Path::new("")).iter().any(|p| name.ends_with(&*p.to_string_lossy())) {
                true => (self.read.beside().unwrap_or(&self.path), &found[1]),
                false => (self.path.as_path(), &found[0]),
            };
            if *expected != got.as_str() {
                faults.push(Fault::new(Severity::Warning, path, "", "changed since the export"));
            }
        }
        faults
    }
}
