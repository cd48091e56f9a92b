//! Writing a model folder and proving it: the folder is re-read before it gets its name, and every code, scale, zero
//! point and value is compared with what was to be written. Not the choice of codes (see `dsq-quant`).

use crate::checkpoint::hex_sha256;
use crate::columns::{self, FolderFormat};
use crate::kv_cache;
use crate::packed::{DiskFormat, pack};
use crate::quantization::QuantizationConfig;
use crate::safetensors::{Pending, check_pending, file_size, sort};
use crate::tensor::{conversion_loss, float_bytes, floats_from_bytes};
use crate::write::FolderWriter;
use crate::{Checkpoint, CheckpointError, Dtype, LinearWeight, ModelConfig, NamedTensor, TensorData, printable};
use dsq_quant::{FloatType, KvGrid, QParams, QuantArgs, QuantConfig, QuantError, QuantScheme, QuantizedMatrix};
use serde::Serialize;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the weight file.
const WEIGHTS: &str = "model.safetensors";
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
            Self::Linear { module, matrix, .. } if name.strip_suffix(".weight") == Some(module.as_str()) => {
                Some(matrix.dequantize())
            }
            _ => None,
        }
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
        Self::with_values(hex_sha256(&float_bytes(w, FloatType::F32)), "F32".into(), w, &matrix.dequantize())
    }

    /// The record of weights `w` with these stored bytes' hash and type, of which `values` is what the stored tensors stand
    /// for (rescaling undone).
    pub fn with_values(sha256: String, dtype: String, w: &[f32], values: &[f32]) -> Self {
        let (mut max, mut err, mut norm) = (0.0f64, 0.0f64, 0.0f64);
        for (v, x) in values.iter().zip(w) {
            let d = f64::from(*v) - f64::from(*x);
            max = max.max(d.abs());
            err += d * d;
            norm += f64::from(*x).powi(2);
        }
        let relative_error = if norm == 0.0 { 0.0 } else { (err / norm).sqrt() };
        Self { sha256, dtype, max_abs_error: max, relative_error, rescaled: None }
    }
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
        let mut largest = 0.0f64;
        for (a, b) in stored.iter().zip(values) {
            let (b, d) = (f64::from(*b), f64::from(*a) - f64::from(*b));
            largest = largest.max(d.abs());
            self.squares = [self.squares[0] + d * d, self.squares[1] + b * b];
        }
        self.tensors += usize::from(values != stored);
        if largest > self.max_abs_error {
            (self.max_abs_error, self.largest) = (largest, name.to_owned());
        }
    }

    /// Works out [`ExportLoss::relative_error`].
    pub(crate) fn finish(&mut self) {
        let [error, all] = self.squares;
        self.relative_error = if all == 0.0 { 0.0 } else { (error / all).sqrt() };
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
    /// Bytes by class; the sum is the size of the weight file.
    pub bytes: BTreeMap<&'static str, u64>,
    /// What became of each source tensor.
    pub tensors: Vec<TensorProof>,
    /// SHA-256 of every other file of the folder.
    pub files: BTreeMap<String, String>,
}

/// What became of one source tensor.
#[derive(Debug, Clone, Serialize)]
pub struct TensorProof {
    /// Name of the source tensor.
    pub name: String,
    /// `quantized`, `copied`, `converted`, `rescaled` (changed by a method, see `source.rescaled`), `dropped`, or `kv_cache` (the
    /// scales of a layer's keys and values, which no source tensor has). Of codes that became codes of another format: `transcoded`
    /// (the values are equal) or `requantized` (they are not).
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
    mut layers: Vec<ExportTensor>,
    scheme: Option<&QuantConfig>,
    aux: Vec<(String, Vec<u8>)>,
    overwrite: bool,
) -> Result<Proof, CheckpointError> {
    let (config, mut dropped) = drop_mtp_layers(config, &mut layers);
    let config = &config;
    dropped.extend(drop_tied_head(out, config, &mut layers)?);
    for layer in &layers {
        check_layer(out, layer, scheme)?;
    }
    // Nothing is changed here, and nothing may have to be.
    let lost = columns::convert_layers(format, out, &mut layers)?.tensors;
    if lost > 0 {
        let problem = format!("{} stores scales in f16; expected such, got others in {lost} layers", format.name());
        return Err(CheckpointError::numerics(out, "", problem));
    }
    kv_cache::check_export(out, config, &layers, scheme)?;
    let packed: Vec<Vec<NamedTensor>> = layers.iter().map(|l| packed_tensors(format, l, scheme)).collect();
    let mut to_write: Vec<Pending> = layers.iter().zip(&packed).flat_map(|(l, tensors)| pending(l, tensors)).collect();
    sort(&mut to_write);
    check_pending(out, &to_write)?;
    let weights_size = file_size(&to_write);
    let files = folder_files(format, out, config, &layers, scheme, aux)?;
    // The proof grows with the number of tensors; 1 KiB a tensor is more than it needs.
    let needed = weights_size + files.iter().map(|(_, b)| b.len() as u64).sum::<u64>() + 1024 * layers.len() as u64;
    let mut writer = FolderWriter::create(out, overwrite, needed)?;
    writer.pending(WEIGHTS, to_write)?;
    for (name, bytes) in &files {
        writer.file(name, bytes)?;
    }
    let mut proof = prove(&writer, out, config, &layers, scheme, &packed, &files)?;
    let stored: u64 = proof.bytes.values().sum();
    proof.bytes.insert("header", weights_size - stored);
    proof.tensors.extend(dropped);
    let text = serde_json::to_vec_pretty(&proof).map_err(|e| CheckpointError::io(out, "write the proof", e.into()))?;
    writer.file(PROOF_FILE, &text)?;
    writer.commit()?;
    Ok(proof)
}

/// Takes out the layers that predict tokens beyond the next, which dsq does not run, and gives the config without them and
/// what is to be said of each of their tensors.
fn drop_mtp_layers(config: &ModelConfig, layers: &mut Vec<ExportTensor>) -> (ModelConfig, Vec<TensorProof>) {
    let mut config = config.clone();
    let ModelConfig::Llama(c) = &mut config else { return (config, Vec::new()) };
    let mut out = Vec::new();
    layers.retain(|l| {
        let name = match l {
            ExportTensor::Float { name, .. }
            | ExportTensor::Rescaled { name, .. }
            | ExportTensor::Copy { name, .. } => name.clone(),
            ExportTensor::Linear { module, .. } => format!("{module}.weight"),
            ExportTensor::KvCache { .. } => return true,
        };
        let ahead = c.mtp_layer(&name).is_some();
        if ahead {
            out.push(dropped(name, "a layer that predicts tokens beyond the next, which dsq does not run"));
        }
        !ahead
    });
    if let Some(latent) = &mut c.latent {
        latent.mtp_layers = 0;
    }
    (config, out)
}

/// What is said of a tensor that is not in the folder.
fn dropped(name: String, reason: &'static str) -> TensorProof {
    let (became, reason) = ("dropped", Some(reason));
    TensorProof { name, became, reason, source: None, underflow: 0, bits_per_weight: 0.0, stored: BTreeMap::new() }
}

/// Takes `lm_head` out of a tied model: it must be the embedding.
fn drop_tied_head(
    out: &Path,
    config: &ModelConfig,
    layers: &mut Vec<ExportTensor>,
) -> Result<Option<TensorProof>, CheckpointError> {
    let ModelConfig::Llama(c) = config else { return Ok(None) };
    let head = |l: &ExportTensor| match l {
        ExportTensor::Float { name, .. } | ExportTensor::Rescaled { name, .. } | ExportTensor::Copy { name, .. } => {
            name == "lm_head.weight"
        }
        ExportTensor::Linear { module, .. } => module == "lm_head",
        ExportTensor::KvCache { .. } => false,
    };
    let Some(at) = layers.iter().position(head).filter(|_| c.tie_word_embeddings) else { return Ok(None) };
    let head = layers.remove(at);
    let stored = |l: &ExportTensor| match l {
        ExportTensor::Float { name, data, dtype, .. } | ExportTensor::Rescaled { name, data, dtype, .. } => {
            Some((name.clone(), float_bytes(data, *dtype)))
        }
        ExportTensor::Copy { name, bytes, .. } => Some((name.clone(), bytes.clone())),
        ExportTensor::Linear { .. } | ExportTensor::KvCache { .. } => None,
    };
    let embedding = layers.iter().filter_map(stored).find(|(n, _)| n == "model.embed_tokens.weight");
    let same = matches!((stored(&head), &embedding), (Some((_, h)), Some((_, e))) if h == *e);
    if !same {
        let problem = "tie_word_embeddings is true; expected the embedding itself, got another matrix";
        return Err(CheckpointError::usage(out, "lm_head.weight", problem)
            .with_hint("set tie_word_embeddings to false to store a matrix of its own"));
    }
    Ok(Some(dropped("lm_head.weight".into(), "tie_word_embeddings: it is model.embed_tokens.weight")))
}

fn check_layer(out: &Path, layer: &ExportTensor, scheme: Option<&QuantConfig>) -> Result<(), CheckpointError> {
    match layer {
        ExportTensor::Float { name, shape, data, dtype } | ExportTensor::Rescaled { name, shape, data, dtype, .. } => {
            let expected = shape.iter().product::<usize>();
            if expected != data.len() {
                let problem = format!("shape {shape:?}: expected {expected} values, got {}", data.len());
                return Err(CheckpointError::usage(out, name, problem));
            }
            if let Some(index) = data.iter().position(|x| !x.is_finite()) {
                let count = data.iter().filter(|x| !x.is_finite()).count();
                let e = QuantError::NonFinite { index, value: data[index], count };
                return Err(CheckpointError::quant(out, name, e));
            }
            if let Some((index, count)) = conversion_loss(data, *dtype).overflow {
                let problem = format!(
                    "{count} values overflow {dtype}; expected at most {:e}, the first is {:e} at index {index}",
                    dtype.max(),
                    data[index]
                );
                return Err(CheckpointError::numerics(out, name, problem).with_hint("store this model in bf16 or f32"));
            }
            Ok(())
        }
        ExportTensor::Copy { .. } | ExportTensor::KvCache { .. } => Ok(()),
        ExportTensor::Linear { module, shape, matrix, activation, .. } => {
            let usage = |problem: String| Err(CheckpointError::usage(out, module, problem));
            matrix.validate().map_err(|e| CheckpointError::quant(out, module, e))?;
            let size = [shape.first().copied().unwrap_or(0), shape.iter().skip(1).product()];
            if size != [matrix.n, matrix.k] {
                return usage(format!(
                    "shape {shape:?}: expected an [n, k] matrix of {size:?}, got [{}, {}]",
                    matrix.n, matrix.k
                ));
            }
            if DiskFormat::of(&matrix.args, None).is_none() {
                let name = matrix.args.qtype.name();
                return usage(format!("compressed-tensors has no format for {name} weights; expected another scheme"));
            }
            if matrix.args.qtype.float().is_some() && shape.len() != 2 {
                let name = matrix.args.qtype.name();
                return usage(format!("{name} weights of linear layers only; expected shape [n, k], got {shape:?}"));
            }
            if size[0] == 0 || size[1] == 0 {
                return usage(format!("expected at least one row and column, got shape {shape:?}"));
            }
            let Some(QuantScheme { weights, activations }) = scheme.and_then(|s| s.scheme_for(module)) else {
                return usage("quantized, though the scheme leaves it in float; expected floats, got codes".into());
            };
            // What is found when the model runs is given by nobody.
            let given = activation.map(|(a, _)| a).or(activations.filter(QuantArgs::is_dynamic));
            if activation.is_some_and(|(a, _)| a.is_dynamic()) {
                return usage("activations of each token have no stored scale; expected none, got one".into());
            }
            if *weights != matrix.args || *activations != given {
                return usage(format!(
                    "does not follow the scheme; expected {weights:?} and {activations:?}, got {:?} and {given:?}",
                    matrix.args
                ));
            }
            Ok(())
        }
    }
}

/// The stored tensors of a quantized module or cache; nothing for the others.
fn packed_tensors(format: FolderFormat, layer: &ExportTensor, scheme: Option<&QuantConfig>) -> Vec<NamedTensor> {
    let (module, shape, matrix, activation) = match layer {
        ExportTensor::Linear { module, shape, matrix, activation, .. } => (module, shape, matrix, activation),
        ExportTensor::KvCache { layer, grid } => return kv_cache::pack(*layer, grid),
        _ => return Vec::new(),
    };
    let inputs = scheme.and_then(|s| s.scheme_for(module)).and_then(|s| s.activations);
    let mut out = pack(module, shape, matrix, format.of_module(&matrix.args, inputs.as_ref()));
    if let Some((args, p)) = activation {
        let one = |suffix: &str, data| NamedTensor { name: format!("{module}.{suffix}"), data };
        let (part, dtype) = match args.has_global_scale() {
            true => ("input_global_scale", FloatType::F32),
            false => ("input_scale", args.scale_dtype),
        };
        out.push(one(part, TensorData::Float { shape: vec![1], data: vec![p.scale], dtype }));
        if args.mapping == dsq_quant::Mapping::Asymmetric {
            out.push(one("input_zero_point", TensorData::I8 { shape: vec![1], data: vec![p.zero as i8] }));
        }
    }
    out
}

fn pending<'a>(layer: &'a ExportTensor, packed: &'a [NamedTensor]) -> Vec<Pending<'a>> {
    let one = |name: &str, dtype, shape: &[usize], bytes: Box<dyn Fn() -> Cow<'a, [u8]> + 'a>| {
        vec![Pending { name: name.into(), dtype, shape: shape.to_vec(), bytes }]
    };
    match layer {
        ExportTensor::Float { name, shape, data, dtype } | ExportTensor::Rescaled { name, shape, data, dtype, .. } => {
            one(name, (*dtype).into(), shape, Box::new(|| float_bytes(data, *dtype).into()))
        }
        ExportTensor::Copy { name, dtype, shape, bytes } => {
            one(name, *dtype, shape, Box::new(|| bytes.as_slice().into()))
        }
        ExportTensor::Linear { .. } | ExportTensor::KvCache { .. } => packed.iter().map(Pending::from).collect(),
    }
}

/// `config.json` and the files beside the weights.
fn folder_files(
    format: FolderFormat,
    out: &Path,
    config: &ModelConfig,
    layers: &[ExportTensor],
    scheme: Option<&QuantConfig>,
    aux: Vec<(String, Vec<u8>)>,
) -> Result<Vec<(String, Vec<u8>)>, CheckpointError> {
    let mut value = config.to_json();
    let mut settings = None;
    if let Value::Object(map) = &mut value {
        let name = match main_dtype(layers) {
            FloatType::F32 => "float32",
            FloatType::F16 => "float16",
            FloatType::Bf16 => "bfloat16",
            // Never a dtype of most values, see `main_dtype`.
            FloatType::F8E4M3 | FloatType::F8E8M0 => "float32",
        };
        map.insert("dtype".into(), json!(name));
        map.insert("torch_dtype".into(), json!(name));
        if let Some(q) = quantization_value(format, config, layers, scheme) {
            if format.is_gptq() {
                settings = Some(q.clone());
            }
            map.insert("quantization_config".into(), q);
        }
    }
    let text = |value: &Value| {
        serde_json::to_vec_pretty(value).map_err(|e| CheckpointError::io(out, "write config.json", e.into()))
    };
    let mut files = vec![("config.json".to_owned(), text(&value)?)];
    if let Some(settings) = settings {
        files.push((columns::QUANTIZE_CONFIG.to_owned(), text(&settings)?));
    }
    for (name, bytes) in aux {
        if [WEIGHTS, PROOF_FILE].contains(&name.as_str()) || files.iter().any(|(n, _)| *n == name) {
            let problem = "this file is the export's own, or is given twice; expected another name";
            return Err(CheckpointError::usage(out, name, problem));
        }
        files.push((name, bytes));
    }
    Ok(files)
}

/// The dtype of most float values, which is the dtype of the model; that of the scales when all is quantized.
fn main_dtype(layers: &[ExportTensor]) -> FloatType {
    let mut counts = [0usize; 3];
    let index = |t: FloatType| FloatType::ALL.iter().position(|a| *a == t);
    let mut count = |t: FloatType, n: usize| index(t).into_iter().for_each(|i| counts[i] += n);
    for layer in layers {
        match layer {
            ExportTensor::Float { data, dtype, .. } | ExportTensor::Rescaled { data, dtype, .. } => {
                count(*dtype, data.len())
            }
            ExportTensor::Copy { dtype, bytes, .. } => {
                if let Some(t) = dtype.float() {
                    count(t, bytes.len() / dtype.size());
                }
            }
            ExportTensor::Linear { matrix, .. } => count(matrix.args.scale_dtype, matrix.scales.len()),
            ExportTensor::KvCache { .. } => {}
        }
    }
    let best = (0..3).max_by_key(|&i| (counts[i], std::cmp::Reverse(i))).unwrap_or(0);
    FloatType::ALL[best]
}

fn quantization_value(
    format: FolderFormat,
    config: &ModelConfig,
    layers: &[ExportTensor],
    scheme: Option<&QuantConfig>,
) -> Option<Value> {
    let mut groups: Vec<(QuantArgs, Option<QuantArgs>, Vec<String>)> = Vec::new();
    let mut quantized = Vec::new();
    for layer in layers {
        let ExportTensor::Linear { module, matrix, .. } = layer else { continue };
        quantized.push(module.as_str());
        let key = (matrix.args, scheme.and_then(|s| s.scheme_for(module)).and_then(|s| s.activations));
        match groups.iter_mut().find(|(w, a, _)| (*w, *a) == key) {
            Some((_, _, modules)) => modules.push(module.clone()),
            None => groups.push((key.0, key.1, vec![module.clone()])),
        }
    }
    if groups.is_empty() {
        return None;
    }
    let mut ignore: Vec<String> =
        config.linears().into_iter().map(|l| l.module).filter(|m| !quantized.contains(&m.as_str())).collect();
    ignore.extend(config.always_float());
    if format != FolderFormat::CompressedTensors {
        ignore.retain(|m| m != "lm_head");
        return Some(columns::to_value(format, &groups[0].0, quantized.contains(&"lm_head"), &ignore));
    }
    // A tied head is a module of its own for the tools that read this.
    if matches!(config, ModelConfig::Llama(c) if c.tie_word_embeddings) {
        ignore.push("lm_head".into());
    }
    Some(QuantizationConfig::to_value(&groups, &ignore, scheme.and_then(|s| s.kv_cache.as_ref())))
}

/// Re-reads the temporary folder and compares everything with what was to be written.
fn prove(
    writer: &FolderWriter,
    out: &Path,
    config: &ModelConfig,
    layers: &[ExportTensor],
    scheme: Option<&QuantConfig>,
    packed: &[Vec<NamedTensor>],
    files: &[(String, Vec<u8>)],
) -> Result<Proof, CheckpointError> {
    let differs = |what: &str| {
        let text = format!("{what}: what was read back is not what was written");
        Err(CheckpointError::io(out, "prove the export", std::io::Error::new(std::io::ErrorKind::InvalidData, text)))
    };
    let ckpt = Checkpoint::open(writer.path())?;
    if ckpt.config() != config {
        return differs("config.json");
    }
    for (name, bytes) in files {
        let path = writer.path().join(name);
        let back = std::fs::read(&path).map_err(|e| CheckpointError::io(&path, "read back", e))?;
        if back != *bytes {
            return differs(name);
        }
    }
    let mut bytes = BTreeMap::new();
    let mut tensors = Vec::new();
    let (mut quantized_bits, mut quantized_weights, mut bits, mut weights) = (0u64, 0u64, 0u64, 0u64);
    let mut count = 0;
    for (layer, named) in layers.iter().zip(packed) {
        let mut stored = BTreeMap::new();
        let mut layer_bits = 0;
        for p in pending(layer, named) {
            let (dtype, back) = ckpt.read_stored(&p.name)?;
            if dtype != p.dtype || back != *(p.bytes)() {
                return differs(&p.name);
            }
            count += 1;
            let class = match p.name.rsplit('.').next().unwrap_or_default() {
                "weight" if matches!(layer, ExportTensor::Linear { .. }) => "codes",
                "weight_packed" | "qweight" => "codes",
                "weight_scale" | "weight_global_scale" | "scales" => "scales",
                "weight_zero_point" | "qzeros" => "zero_points",
                "weight_shape" | "g_idx" | "input_scale" | "input_global_scale" | "input_zero_point" | "k_scale"
                | "v_scale" => "other",
                _ => "float",
            };
            *bytes.entry(class).or_insert(0) += p.len();
            if class != "other" {
                layer_bits += p.len() * 8;
            }
            stored.insert(p.name, hex_sha256(&back));
        }
        let (name, became, source, n) = match layer {
            ExportTensor::Float { name, data, dtype, .. } => {
                let became = if *dtype == FloatType::F32 { "copied" } else { "converted" };
                (name.clone(), became, None, data.len())
            }
            ExportTensor::Rescaled { name, data, source, .. } => {
                (name.clone(), "rescaled", Some(source.clone()), data.len())
            }
            ExportTensor::Copy { name, dtype, bytes, .. } => (name.clone(), "copied", None, bytes.len() / dtype.size()),
            ExportTensor::Linear { module, matrix, activation, source, .. } => {
                let LinearWeight::Quantized(back) = ckpt.linear(module)? else { return differs(module) };
                let values = back.dequantize();
                let same = values.iter().zip(matrix.dequantize()).all(|(a, b)| a.to_bits() == b.to_bits());
                let inputs = scheme.and_then(|s| s.scheme_for(module)).and_then(|s| s.activations);
                let dynamic = ckpt.dynamic_activation(module) == inputs.filter(QuantArgs::is_dynamic);
                if back != *matrix || !same || !dynamic || ckpt.activation(module)? != *activation {
                    return differs(module);
                }
                quantized_bits += layer_bits;
                quantized_weights += values.len() as u64;
                let became = match source {
                    Some(s) if s.dtype == CODES && s.max_abs_error == 0.0 => "transcoded",
                    Some(s) if s.dtype == CODES => "requantized",
                    _ => "quantized",
                };
                (format!("{module}.weight"), became, source.clone(), values.len())
            }
            ExportTensor::KvCache { layer, grid } => {
                let module = format!("model.layers.{layer}.self_attn");
                if ckpt.kv_grid(*layer)? != Some(*grid) {
                    return differs(&module);
                }
                (module, "kv_cache", None, 0)
            }
        };
        bits += layer_bits;
        weights += n as u64;
        let bits_per_weight = ratio(layer_bits, n as u64);
        let underflow = match layer {
            ExportTensor::Float { data, dtype, .. } | ExportTensor::Rescaled { data, dtype, .. } => {
                conversion_loss(data, *dtype).underflow
            }
            _ => 0,
        };
        tensors.push(TensorProof { name, became, reason: None, source, underflow, bits_per_weight, stored });
    }
    if ckpt.names().len() != count {
        return differs("the list of tensors");
    }
    Ok(Proof {
        format_version: 1,
        dsq_version: env!("CARGO_PKG_VERSION"),
        bits_per_weight: ratio(quantized_bits, quantized_weights),
        model_bits_per_weight: ratio(bits, weights),
        bytes,
        tensors,
        files: files.iter().map(|(n, b)| (n.clone(), hex_sha256(b))).collect(),
    })
}

pub(crate) fn ratio(bits: u64, weights: u64) -> f64 {
    if weights == 0 { 0.0 } else { bits as f64 / weights as f64 }
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ResNetConfig;
    use dsq_quant::{Granularity, Mapping};

    /// The proof can fail: one changed bit anywhere in the written tensors, a tensor too many, another config or another
    /// file beside the weights is told.
    #[test]
    fn a_folder_that_differs_in_one_bit_is_not_proven() {
        let config = ModelConfig::ResNet(ResNetConfig {
            in_channels: 1,
            image_size: 4,
            channels: vec![4],
            blocks_per_stage: 1,
            num_classes: 10,
            norm_eps: 1e-5,
            mean: vec![0.0],
            std: vec![1.0],
        });
        let args =
            QuantArgs { mapping: Mapping::Asymmetric, ..QuantArgs::int4(Granularity::PerChannel, FloatType::F32) };
        let layers: Vec<ExportTensor> = config
            .linears()
            .into_iter()
            .map(|spec| {
                let data: Vec<f32> = (0..spec.n() * spec.k()).map(|i| (i as f32 * 0.37).sin()).collect();
                if spec.module == "fc" {
                    let matrix = QuantizedMatrix::quantize(&data, spec.n(), spec.k(), args).unwrap();
                    let (module, shape) = (spec.module, spec.shape);
                    return ExportTensor::Linear { module, shape, matrix, activation: None, source: None };
                }
                let name = format!("{}.weight", spec.module);
                ExportTensor::Float { name, shape: spec.shape, data, dtype: FloatType::Bf16 }
            })
            .collect();
        let packed: Vec<Vec<NamedTensor>> =
            layers.iter().map(|l| packed_tensors(FolderFormat::default(), l, None)).collect();
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("m");
        let aux = vec![("tokenizer.json".to_owned(), b"{}".to_vec())];
        let files = folder_files(FolderFormat::default(), &out, &config, &layers, None, aux).unwrap();
        let mut writer = FolderWriter::create(&out, false, 0).unwrap();
        let tensors = || layers.iter().zip(&packed).flat_map(|(l, t)| pending(l, t)).collect::<Vec<_>>();
        writer.pending(WEIGHTS, tensors()).unwrap();
        for (name, bytes) in &files {
            writer.file(name, bytes).unwrap();
        }
        let proven = |files: &[(String, Vec<u8>)]| prove(&writer, &out, &config, &layers, None, &packed, files).is_ok();
        assert!(proven(&files));
        let path = writer.path().join(WEIGHTS);
        let whole = std::fs::read(&path).unwrap();
        let data = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        for at in data..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1 << (at % 8);
            std::fs::write(&path, changed).unwrap();
            assert!(!proven(&files), "byte {at}");
        }
        let extra = NamedTensor { name: "x".into(), data: TensorData::I8 { shape: vec![1], data: vec![1] } };
        let mut more = tensors();
        more.push(Pending::from(&extra));
        crate::safetensors::sort(&mut more);
        let mut file = std::fs::File::create(&path).unwrap();
        crate::safetensors::write_tensors(&mut file, &path, &more).unwrap();
        assert!(!proven(&files));
        std::fs::write(&path, &whole).unwrap();
        std::fs::write(writer.path().join("tokenizer.json"), "{ }").unwrap();
        assert!(!proven(&files));
        std::fs::write(writer.path().join("tokenizer.json"), "{}").unwrap();
        assert!(proven(&files));
    }
}
