//! The proof of a written ONNX file: it is decoded again, its graph is walked, and every tensor in it is taken apart as its operator
//! would and compared with the source. Not the writing (see `export.rs`).

use super::graph::{Declared, Graph, Make, Unit};
use super::proto::{DataType, GraphProto, ModelProto, TensorProto};
use super::source::{Source, float_type};
use super::weights::axis_holds;
use crate::checkpoint::{hex, hex_sha256};
use crate::export::{Proof, SourceRecord, TensorProof, ratio};
use crate::json::{open_regular, read_bounded};
use crate::packed::WEIGHT_PARTS;
use crate::safetensors::read_at;
use crate::tensor::{conversion_loss, floats_from_bytes};
use crate::{CheckpointError, LinearWeight, ModelConfig};
use prost::Message;
use sha2::{Digest, Sha256};
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Protobuf messages end here.
const MAX_MODEL: u64 = 1 << 31;

/// A decoded file, and the one with its tensors, if there is one.
#[derive(Debug)]
pub(super) struct Read {
    path: PathBuf,
    pub(super) model: ModelProto,
    data: Option<(PathBuf, File, u64)>,
    /// The name by which the model calls the other file.
    location: String,
}

impl Read {
    /// Decodes a model. `beside` finds the file that the model calls by a name, where it may.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for bytes that are no ONNX model, [`CheckpointError::Io`].
    pub(super) fn open(path: &Path, beside: &dyn Fn(&str) -> Option<PathBuf>) -> Result<Self, CheckpointError> {
        let bytes = read_bounded(path, MAX_MODEL)?;
        let model = ModelProto::decode(bytes.as_slice())
            .map_err(|e| CheckpointError::invalid(path, "", format!("expected an ONNX model, got other bytes: {e}")))?;
        let named = model.graph.iter().flat_map(|g| &g.initializer).find_map(|t| t.external("location"));
        let location = named.unwrap_or_default().to_owned();
        let data = match beside(&location) {
            None => None,
            Some(path) => {
                let (file, len) = open_regular(&path)?;
                Some((path, file, len))
            }
        };
        Ok(Self { path: path.to_path_buf(), model, data, location })
    }

    /// The file with its tensors, if there is one.
    pub(super) fn beside(&self) -> Option<&Path> {
        self.data.as_ref().map(|(path, ..)| path.as_path())
    }

    pub(super) fn differs(&self, what: &str) -> CheckpointError {
        let text = format!("{what}: what was read back is not what was written");
        CheckpointError::io(&self.path, "prove the export", std::io::Error::new(std::io::ErrorKind::InvalidData, text))
    }

    /// The graph.
    pub(super) fn graph(&self) -> Result<&GraphProto, CheckpointError> {
        self.model.graph.as_ref().ok_or_else(|| CheckpointError::invalid(&self.path, "graph", "expected one, got none"))
    }

    /// The bytes of a tensor, in the model or beside it.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for a place that is not in the file beside it; I/O errors.
    pub(super) fn bytes(&self, tensor: &TensorProto) -> Result<Vec<u8>, CheckpointError> {
        if tensor.data_location != Some(1) {
            return Ok(tensor.raw_data.clone().unwrap_or_default());
        }
        let name = tensor.name.clone().unwrap_or_default();
        let number = |key: &str| tensor.external(key).and_then(|v| v.parse::<u64>().ok());
        let place = (tensor.external("location"), number("offset"), number("length"));
        let (Some(location), Some(offset), Some(length)) = place else {
            return Err(CheckpointError::invalid(
                &self.path,
                name,
                format!("expected location, offset and length, got {place:?}"),
            ));
        };
        let Some((path, file, len)) = self.data.as_ref().filter(|_| location == self.location) else {
            let problem = format!("expected its bytes in one file beside the model, by its name, got {location}");
            return Err(CheckpointError::invalid(&self.path, name, problem));
        };
        if offset.checked_add(length).is_none_or(|end| end > *len) {
            let problem = format!("expected {length} bytes at {offset}, got a file of {len}");
            return Err(CheckpointError::invalid(path, name, problem));
        }
        let mut bytes = vec![0; length as usize];
        read_at(file, path, &mut bytes, offset)?;
        Ok(bytes)
    }

    /// SHA-256 of the model, and of the other file (empty without one), in hex.
    ///
    /// # Errors
    /// I/O errors.
    pub(super) fn hashes(&self) -> Result<[String; 2], CheckpointError> {
        let of = |path: &Path| -> Result<String, CheckpointError> {
            let mut file = File::open(path).map_err(|e| CheckpointError::io(path, "read", e))?;
            let mut hash = Sha256::new();
            std::io::copy(&mut file, &mut hash).map_err(|e| CheckpointError::io(path, "read", e))?;
            Ok(hex(hash))
        };
        Ok([of(&self.path)?, self.data.as_ref().map_or(Ok(String::new()), |(path, ..)| of(path))?])
    }
}

/// Takes a written file apart. The hashes of the files are the caller's.
pub(super) fn prove(read: &Read, source: &Source, graph: &Graph) -> Result<Proof, CheckpointError> {
    let written = read.graph()?;
    check_graph(written).map_err(|what| read.differs(&what))?;
    let mut stored = written.initializer.iter();
    let mut proof = Proof {
        format_version: 1,
        dsq_version: env!("CARGO_PKG_VERSION"),
        bits_per_weight: 0.0,
        model_bits_per_weight: 0.0,
        bytes: BTreeMap::new(),
        tensors: Vec::new(),
        files: BTreeMap::new(),
        logits: Some(serde_json::json!({"not_measured": "dsq does not run ONNX files"})),
    };
    let (mut coded, mut all) = ((0u64, 0u64), (0u64, 0u64));
    for unit in &graph.units {
        let (mut parts, mut hashes, mut bits) = (Vec::new(), BTreeMap::new(), 0);
        for (i, declared) in unit.tensors.iter().enumerate() {
            let tensor = stored.next().ok_or_else(|| read.differs("the list of tensors"))?;
            let bytes = read.bytes(tensor)?;
            if !same_header(tensor, declared) || bytes.len() as u64 != declared.bytes() {
                return Err(read.differs(&declared.name));
            }
            *proof.bytes.entry(class(&unit.make, i)).or_insert(0) += bytes.len() as u64;
            bits += 8 * bytes.len() as u64;
            hashes.insert(declared.name.clone(), hex_sha256(&bytes));
            parts.push(bytes);
        }
        let Some((tensor, weights)) = taken_apart(read, source, unit, &parts, hashes, bits)? else { continue };
        all = (all.0 + bits, all.1 + weights);
        if matches!(unit.make, Make::Blocks { .. } | Make::Axis { .. }) {
            coded = (coded.0 + bits, coded.1 + weights);
        }
        proof.tensors.push(tensor);
    }
    if stored.next().is_some() {
        return Err(read.differs("the list of tensors"));
    }
    // Grids of inputs keep their names.
    for unit in &graph.units {
        let declared = &unit.tensors[0];
        if matches!(unit.make, Make::Constant(_)) && source.ckpt.info(&declared.name).is_some() {
            let bytes = source.bytes(unit)?.remove(0);
            proof.tensors.push(TensorProof {
                name: declared.name.clone(),
                became: "copied",
                reason: None,
                source: None,
                underflow: 0,
                bits_per_weight: 0.0,
                stored: BTreeMap::from([(declared.name.clone(), hex_sha256(&bytes))]),
            });
        }
    }
    proof.bits_per_weight = ratio(coded.0, coded.1);
    proof.model_bits_per_weight = ratio(all.0, all.1);
    Ok(proof)
}

fn same_header(tensor: &TensorProto, declared: &Declared) -> bool {
    let dims = tensor.dims.iter().map(|&d| usize::try_from(d).ok()).collect::<Option<Vec<_>>>();
    tensor.name.as_deref() == Some(&declared.name)
        && tensor.data_type == Some(declared.ty as i32)
        && dims.as_ref() == Some(&declared.dims)
}

/// What the bytes of a tensor count as.
fn class(make: &Make, part: usize) -> &'static str {
    match (make, part) {
        (Make::Blocks { .. } | Make::Axis { .. }, 0) => "codes",
        (Make::Blocks { .. } | Make::Axis { .. }, 1) => "scales",
        (Make::Blocks { .. } | Make::Axis { .. }, _) => "zero_points",
        (Make::Float { .. } | Make::Folded { .. }, _) => "float",
        (Make::Constant(_), _) => "other",
    }
}

/// Compares the bytes of a unit with the source: the record, and how many weights it holds; `None` of a constant.
fn taken_apart(
    read: &Read,
    source: &Source,
    unit: &Unit,
    parts: &[Vec<u8>],
    stored: BTreeMap<String, String>,
    bits: u64,
) -> Result<Option<(TensorProof, u64)>, CheckpointError> {
    let ckpt = source.ckpt;
    let name = &unit.tensors[0].name;
    let record = |name: String, became, weights: usize, source, underflow| {
        let bits_per_weight = ratio(bits, weights as u64);
        let stored = stored.clone();
        Ok(Some((
            TensorProof { name, became, reason: None, source, underflow, bits_per_weight, stored },
            weights as u64,
        )))
    };
    match &unit.make {
        Make::Constant(bytes) if parts[0] == *bytes => Ok(None),
        Make::Constant(_) => Err(read.differs(name)),
        Make::Float { name } => {
            let (values, ty) = (source.values(name)?, float_type(unit.tensors[0].ty));
            let back = floats_from_bytes(&parts[0], ty);
            let meant = values.iter().map(|&x| ty.round(x));
            if back.len() != values.len() || !back.iter().zip(meant).all(|(a, b)| a.to_bits() == b.to_bits()) {
                return Err(read.differs(name));
            }
            let underflow = conversion_loss(&values, ty).underflow;
            if ckpt.info(name).is_some_and(|i| i.dtype == ty.name()) {
                return record(name.clone(), "copied", values.len(), None, underflow);
            }
            let source = match ckpt.info(name) {
                Some(info) => Some(SourceRecord::with_values(ckpt.sha256(name)?, info.dtype, &values, &back)),
                None => {
                    Some(SourceRecord::with_values(hex_sha256(&parts[0]), crate::export::CODES.into(), &values, &back))
                }
            };
            record(name.clone(), "converted", values.len(), source, underflow)
        }
        Make::Blocks { module, .. } | Make::Axis { module } => {
            let (LinearWeight::Quantized(matrix) | LinearWeight::Ordered { matrix, .. }) = source.weight(module)?
            else {
                return Err(read.differs(module));
            };
            let same = match &unit.make {
                Make::Blocks { layout, .. } => layout.holds(parts, &matrix),
                _ => axis_holds(parts, &matrix),
            };
            if !same {
                return Err(read.differs(module));
            }
            record(format!("{module}.weight"), "transcoded", matrix.codes.len(), None, 0)
        }
        Make::Folded { layer } => {
            let (weight, bias) = ckpt.folded(layer)?;
            for ((meant, part), tensor) in [&weight, &bias].into_iter().zip(parts).zip(&unit.tensors) {
                let ty = float_type(tensor.ty);
                let back = floats_from_bytes(part, ty);
                let meant = meant.iter().map(|&x| ty.round(x).to_bits());
                if !meant.eq(back.iter().map(|x| x.to_bits())) {
                    return Err(read.differs(name));
                }
            }
            let became = if has_norm(source, layer) { "folded" } else { "converted" };
            record(format!("{}.weight", layer.module), became, weight.len(), None, 0)
        }
    }
}

fn has_norm(source: &Source, layer: &crate::ConvLayer) -> bool {
    matches!(source.ckpt.config(), ModelConfig::Image(c) if c.batch_norm) && layer.norm.is_some()
}

/// Whether every node reads what is there before it, and no name is given twice.
pub(super) fn check_graph(graph: &GraphProto) -> Result<(), String> {
    let inputs = graph.input.iter().filter_map(|i| i.name.as_deref());
    let tensors = graph.initializer.iter().filter_map(|t| t.name.as_deref());
    let mut known = HashSet::new();
    for name in inputs.chain(tensors) {
        if !known.insert(name) {
            return Err(format!("two tensors of the name {name}"));
        }
    }
    for node in &graph.node {
        if let Some(missing) = node.input.iter().find(|i| !i.is_empty() && !known.contains(i.as_str())) {
            return Err(format!("{:?} before it is there: {missing}", node.name));
        }
        for output in &node.output {
            if !known.insert(output) {
                return Err(format!("two tensors of the name {output}"));
            }
        }
    }
    match graph.output.iter().filter_map(|o| o.name.as_deref()).find(|o| !known.contains(o)) {
        None => Ok(()),
        Some(output) => Err(format!("an output that nothing makes: {output}")),
    }
}

/// The tensors of the source that the graph has no use for, each with the reason. (All others are in it.)
///
/// # Errors
/// [`CheckpointError::Invalid`] for a head that contradicts `tie_word_embeddings`; errors of reading.
pub(super) fn account(source: &Source, graph: &Graph) -> Result<Vec<(String, &'static str)>, CheckpointError> {
    let ckpt = source.ckpt;
    let mut used = HashSet::new();
    for unit in &graph.units {
        used.extend(unit.tensors.iter().map(|t| t.name.clone()));
        match &unit.make {
            Make::Blocks { module, .. } | Make::Axis { module } => {
                used.extend(WEIGHT_PARTS.map(|part| format!("{module}.{part}")));
            }
            Make::Float { name } => {
                // Codes that are written as floats.
                if let Some(module) = name.strip_suffix(".weight") {
                    used.extend(WEIGHT_PARTS.map(|part| format!("{module}.{part}")));
                }
            }
            Make::Folded { layer } => {
                let parts = ["weight", "bias", "running_mean", "running_var"];
                used.extend(layer.norm.iter().flat_map(|norm| parts.map(|part| format!("{norm}.{part}"))));
            }
            Make::Constant(_) => {}
        }
    }
    let tied = matches!(ckpt.config(), ModelConfig::Llama(c) if c.tie_word_embeddings);
    let mut out = Vec::new();
    for name in ckpt.names().into_iter().filter(|n| !used.contains(n)) {
        let why = match name.rsplit('.').next().unwrap_or_default() {
            _ if name == "lm_head.weight" && tied => {
                if ckpt.sha256(&name)? != ckpt.sha256("model.embed_tokens.weight")? {
                    let problem = "tie_word_embeddings is true; expected the embedding itself, got another matrix";
                    return Err(ckpt.invalid(&name, problem));
                }
                "tie_word_embeddings: it is model.embed_tokens.weight"
            }
            "inv_freq" => "follows from the config",
            "input_scale" | "input_zero_point" | "input_global_scale" => "the graph has no grids of inputs",
            "k_scale" | "v_scale" => "the graph has no scales of a KV cache",
            "num_batches_tracked" => "a counter of the training",
            "bias" => "a bias of zeros that stands for none",
            _ => "the config does not call for it",
        };
        out.push((name, why));
    }
    Ok(out)
}

/// The type of a tensor, as a name; of a type that dsq does not write, its number.
pub(super) fn type_name(number: Option<i32>) -> String {
    let number = number.unwrap_or(0);
    DataType::of(number).map_or_else(|| format!("type {number}"), |t| t.name().to_owned())
}
