//! What a model folder is made of, and the record that proves it: the folder is re-read before it gets its name, and every code,
//! scale, zero point and value is compared with what was to be written. How that is done tensor by tensor stands in
//! `export/stream.rs`. Not the choice of codes (see `dsq-quant`).

mod outline;
mod stream;

pub use outline::Outline;
pub use stream::{FolderTarget, Judge, export_stream, folder_bytes};

use crate::checkpoint::hex_sha256;
use crate::columns::{self, FolderFormat};
use crate::tensor::{float_bytes, floats_from_bytes};
use crate::{CheckpointError, Dtype, ModelConfig, printable};
use dsq_quant::{ColumnOrder, FloatType, KvGrid, QParams, QuantArgs, QuantConfig, QuantizedMatrix};
use serde::Serialize;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the proof beside it.
pub const PROOF_FILE: &str = "dsq-proof.json";

/// What a [`SourceRecord`] says of a source that was codes already.
pub(crate) const CODES: &str = "F32 (values of codes)";

/// One tensor or module of an export.
#[derive(Debug, Clone)]
pub enum ExportTensor {
    /// A float tensor, rounded to `dtype` (nearest even).
    Float {
        /// Tensor name.
        name: String,
        /// Shape, outermost first.
        shape: Vec<usize>,
        /// Values, row major.
        data: Vec<f32>,
        /// Stored dtype.
        dtype: FloatType,
    },
    /// A float tensor whose values a method changed, so that changed weights after it compute the same; rounded to
    /// `dtype` (nearest even).
    Rescaled {
        /// Tensor name.
        name: String,
        /// Shape, outermost first.
        shape: Vec<usize>,
        /// New values, row major.
        data: Vec<f32>,
        /// Stored dtype.
        dtype: FloatType,
        /// The tensor before it was changed, for the proof.
        source: SourceRecord,
    },
    /// Stored bytes of a source, copied bit for bit.
    Copy {
        /// Tensor name.
        name: String,
        /// Dtype.
        dtype: Dtype,
        /// Shape, outermost first.
        shape: Vec<usize>,
        /// Bytes, little endian.
        bytes: Vec<u8>,
    },
    /// A quantized linear or convolution module.
    Linear {
        /// Module name.
        module: String,
        /// Shape of its weight: `[n, k]` or `[out, in, kh, kw]`.
        shape: Vec<usize>,
        /// Codes, scales, zero points.
        matrix: QuantizedMatrix,
        /// Static quantization of its input.
        activation: Option<(QuantArgs, QParams)>,
        /// The weight before it was quantized, for the proof.
        source: Option<SourceRecord>,
        /// Which input each column of `matrix` is, where its groups are in activation order; `None`: the inputs as they come.
        order: Option<ColumnOrder>,
    },
    /// The grids of the KV cache of one layer of a language model.
    KvCache {
        /// The layer, from 0.
        layer: usize,
        /// Scheme and scales.
        grid: KvGrid,
    },
}

impl ExportTensor {
    /// What a reader of the export gets of the tensor `name`, row major: rounded to its stored dtype, or the values of its codes.
    /// `None` for another tensor or one that is no float.
    pub fn values_of(&self, name: &str) -> Option<Vec<f32>> {
        match self {
            Self::Float { name: n, data, dtype, .. } | Self::Rescaled { name: n, data, dtype, .. } if n == name => {
                Some(data.iter().map(|&x| dtype.round(x)).collect())
            }
            Self::Copy { name: n, dtype, bytes, .. } if n == name => Some(floats_from_bytes(bytes, dtype.float()?)),
            Self::Linear { module, matrix, order, .. } if name.strip_suffix(".weight") == Some(module.as_str()) => {
                Some(values_of_codes(matrix, order.as_ref()))
            }
            _ => None,
        }
    }
}

/// The values of codes, columns in the order of the inputs.
pub(crate) fn values_of_codes(matrix: &QuantizedMatrix, order: Option<&ColumnOrder>) -> Vec<f32> {
    let values = matrix.dequantize();
    match order {
        None => values,
        Some(order) => order.scatter(&values),
    }
}

/// What is known of a weight before it was quantized or rescaled.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SourceRecord {
    /// SHA-256 of its bytes (as stored, or as f32), in hex.
    pub sha256: String,
    /// Its stored type.
    pub dtype: String,
    /// Largest absolute difference to what is stored, rescaling undone.
    pub max_abs_error: f64,
    /// Frobenius norm of the difference over that of the weight (0 for a zero weight).
    pub relative_error: f64,
    /// How the weight was multiplied before it was stored, in words; `None`: not at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rescaled: Option<String>,
}

impl SourceRecord {
    /// The record of f32 weights `w` that became `matrix`.
    pub fn of(w: &[f32], matrix: &QuantizedMatrix) -> Self {
        Self::with_matrix(hex_sha256(&float_bytes(w, FloatType::F32)), "F32".into(), w, matrix)
    }

    /// [`SourceRecord::with_values`] of a matrix's values, which are not all made at once.
    pub fn with_matrix(sha256: String, dtype: String, w: &[f32], matrix: &QuantizedMatrix) -> Self {
        let mut sums = Differences::default();
        sums.add_matrix(w, matrix);
        sums.record(sha256, dtype)
    }

    /// Hash and type of `w`, which is what the codes of a source stand for.
    pub fn stored_codes(w: &[f32]) -> (String, String) {
        (hex_sha256(&float_bytes(w, FloatType::F32)), CODES.into())
    }

    /// The record of weights `w` with these stored bytes' hash and type, of which `values` is what the stored tensors stand
    /// for (rescaling undone).
    pub fn with_values(sha256: String, dtype: String, w: &[f32], values: &[f32]) -> Self {
        let mut sums = Differences::default();
        sums.add(values, w);
        sums.record(sha256, dtype)
    }
}

/// What differences between values amount to. Eight sums side by side, in an order that the data alone decide: a single one would
/// wait for each addition.
#[derive(Debug, Clone, Default)]
pub struct Differences {
    max: [f64; 8],
    err: [f64; 8],
    norm: [f64; 8],
}

impl Differences {
    /// Takes in weights `w` and the matrix that they became, or some of its groups after the others: the sums are the same.
    pub fn add_matrix(&mut self, w: &[f32], matrix: &QuantizedMatrix) {
        matrix.for_each_run(|at, values| self.add(values, &w[at..at + values.len()]));
    }

    fn add(&mut self, values: &[f32], w: &[f32]) {
        let ((values, last_values), (w, last_w)) = (values.as_chunks::<8>(), w.as_chunks::<8>());
        for (values, w) in values.iter().zip(w) {
            for lane in 0..8 {
                self.one(lane, values[lane], w[lane]);
            }
        }
        for (lane, (v, x)) in last_values.iter().zip(last_w).enumerate() {
            self.one(lane, *v, *x);
        }
    }

    #[inline(always)]
    fn one(&mut self, lane: usize, value: f32, x: f32) {
        let (x, d) = (f64::from(x), f64::from(value) - f64::from(x));
        // As f64::max where no value is NaN, and one instruction.
        self.max[lane] = if d.abs() > self.max[lane] { d.abs() } else { self.max[lane] };
        self.err[lane] += d * d;
        self.norm[lane] += x * x;
    }

    /// The record of weights with these stored bytes' hash and type.
    pub fn record(self, sha256: String, dtype: String) -> SourceRecord {
        let relative_error = relative(self.squares());
        SourceRecord { sha256, dtype, max_abs_error: self.largest(), relative_error, rescaled: None }
    }

    fn largest(&self) -> f64 {
        self.max.into_iter().fold(0.0, f64::max)
    }

    /// Sums of squares, of differences and of weights.
    fn squares(&self) -> [f64; 2] {
        [self.err.iter().sum(), self.norm.iter().sum()]
    }
}

/// Frobenius norm over Frobenius norm, of sums of squares (0 for zero weights).
fn relative([error, all]: [f64; 2]) -> f64 {
    if all == 0.0 { 0.0 } else { (error / all).sqrt() }
}

/// How far the values of a quantized source are from what would be written.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ExportLoss {
    /// Tensors whose values change; none when all is transcoded exactly.
    pub tensors: usize,
    /// The one that changes most, by its Hugging Face name.
    pub largest: String,
    /// Largest absolute difference.
    pub max_abs_error: f64,
    /// Frobenius norm of the difference over that of the weights, over all tensors compared.
    pub relative_error: f64,
    /// Sums of squares, of differences and of weights.
    squares: [f64; 2],
}

impl ExportLoss {
    /// Compares one tensor.
    pub(crate) fn add(&mut self, name: &str, values: &[f32], stored: &[f32]) {
        let mut sums = Differences::default();
        sums.add(stored, values);
        let (largest, squares) = (sums.largest(), sums.squares());
        self.squares = [0, 1].map(|i| self.squares[i] + squares[i]);
        self.tensors += usize::from(values != stored);
        if largest > self.max_abs_error {
            (self.max_abs_error, self.largest) = (largest, name.to_owned());
        }
    }

    /// Takes in what `other`, of tensors after those of `self`, found.
    pub fn merge(&mut self, other: &Self) {
        self.tensors += other.tensors;
        if other.max_abs_error > self.max_abs_error {
            (self.max_abs_error, self.largest) = (other.max_abs_error, other.largest.clone());
        }
        self.squares = [0, 1].map(|i| self.squares[i] + other.squares[i]);
        self.finish();
    }

    /// Works out [`ExportLoss::relative_error`].
    pub(crate) fn finish(&mut self) {
        self.relative_error = relative(self.squares);
    }
}

impl std::fmt::Display for ExportLoss {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "values change in {} tensors: max abs error {:e} (in {}), relative Frobenius error {:e}",
            self.tensors,
            self.max_abs_error,
            printable(&self.largest),
            self.relative_error
        )
    }
}

/// What the export wrote and what the re-read found; also written as `dsq-proof.json`.
#[derive(Debug, Clone, Serialize)]
pub struct Proof {
    /// Version of this record.
    pub format_version: u32,
    /// Version of dsq.
    pub dsq_version: &'static str,
    /// Bits per quantized weight, scales and zero points counted; 0 when nothing is quantized.
    pub bits_per_weight: f64,
    /// Bits per weight over all tensors of the model.
    pub model_bits_per_weight: f64,
    /// Bytes by class; the sum is the size of the weight files.
    pub bytes: BTreeMap<&'static str, u64>,
    /// What became of each source tensor.
    pub tensors: Vec<TensorProof>,
    /// SHA-256 of every other file of the folder.
    pub files: BTreeMap<String, String>,
    /// How far its logits are from the source's on fixed prompts, where both were run (see [`Judge`]).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logits: Option<serde_json::Value>,
}

impl Proof {
    /// How many source tensors became what.
    pub fn became(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        self.tensors.iter().for_each(|t| *counts.entry(t.became).or_insert(0) += 1);
        counts
    }
}

/// What became of one source tensor.
#[derive(Debug, Clone, Serialize)]
pub struct TensorProof {
    /// Name of the source tensor.
    pub name: String,
    /// `quantized`, `copied`, `converted`, `rescaled` (changed by a method, see `source.rescaled`), `dropped`, or `kv_cache` (the
    /// scales of a layer's keys and values, which no source tensor has). Of codes that became codes of another format: `transcoded`
    /// (the values are equal) or `requantized` (they are not). In an ONNX file `folded`: with its batch norm in it.
    pub became: &'static str,
    /// Why it was dropped.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<&'static str>,
    /// The source, where it is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub source: Option<SourceRecord>,
    /// Values that are not zero and became zero in a narrower dtype.
    #[serde(skip_serializing_if = "is_zero")]
    pub underflow: usize,
    /// Bits per weight as stored.
    pub bits_per_weight: f64,
    /// SHA-256 of each stored tensor.
    pub stored: BTreeMap<String, String>,
}

impl TensorProof {
    /// What is said of a tensor that is not in the output.
    pub(crate) fn dropped(name: String, reason: &'static str) -> Self {
        let (became, reason) = ("dropped", Some(reason));
        Self { name, became, reason, source: None, underflow: 0, bits_per_weight: 0.0, stored: BTreeMap::new() }
    }
}

/// Writes a model folder, re-reads it, proves it equal to what was given, and gives it its name. A tied `lm_head` is
/// not written. Without `scheme` every tensor must be float.
///
/// # Errors
/// [`CheckpointError::Usage`] (2) for an output folder in use or layers that contradict the scheme,
/// [`CheckpointError::Numerics`] or [`CheckpointError::Quant`] (6) for values that cannot be stored,
/// [`CheckpointError::NoSpace`] or [`CheckpointError::Io`] (4). Nothing is left behind.
pub fn export_folder(
    out: &Path,
    config: &ModelConfig,
    layers: Vec<ExportTensor>,
    scheme: Option<&QuantConfig>,
    aux: Vec<(String, Vec<u8>)>,
    overwrite: bool,
) -> Result<Proof, CheckpointError> {
    export_folder_as(FolderFormat::CompressedTensors, out, config, layers, scheme, aux, overwrite)
}

/// [`export_folder`] with codes stored in `format`; for GPTQ and AWQ layers in the form that [`crate::convert_layers`] gives them.
///
/// # Errors
/// As [`export_folder`]; [`CheckpointError::Usage`] for layers that the format does not hold.
pub fn export_folder_as(
    format: FolderFormat,
    out: &Path,
    config: &ModelConfig,
    layers: Vec<ExportTensor>,
    scheme: Option<&QuantConfig>,
    aux: Vec<(String, Vec<u8>)>,
    overwrite: bool,
) -> Result<Proof, CheckpointError> {
    let target = FolderTarget { format, overwrite, ..FolderTarget::new(out, config, scheme) };
    export_layers(&target, layers, aux)
}

/// [`export_stream`] of tensors that are all in memory.
///
/// # Errors
/// As [`export_folder_as`].
pub fn export_layers(
    target: &FolderTarget,
    mut layers: Vec<ExportTensor>,
    aux: Vec<(String, Vec<u8>)>,
) -> Result<Proof, CheckpointError> {
    let (format, out) = (target.format, target.out);
    // Before anything is written, all at once: they are here.
    for layer in &layers {
        outline::check(out, &Outline::of(layer), target.scheme, FolderFormat::CompressedTensors)?;
        outline::check_values(out, layer)?;
    }
    // Nothing is changed here, and nothing may have to be.
    let lost = columns::convert_layers(format, out, &mut layers)?.tensors;
    if lost > 0 {
        let problem = format!("{} stores scales in f16; expected such, got others in {lost} layers", format.name());
        return Err(CheckpointError::numerics(out, "", problem));
    }
    let outlines = layers.iter().map(Outline::of).collect();
    export_stream(target, outlines, aux, &|i| Ok::<_, CheckpointError>(Cow::Borrowed(&layers[i])))
}

pub(crate) fn ratio(bits: u64, weights: u64) -> f64 {
    if weights == 0 { 0.0 } else { bits as f64 / weights as f64 }
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}
