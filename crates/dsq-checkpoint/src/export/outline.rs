//! What is known of an export before a value is: names, dtypes, shapes and schemes, hence the layout of the weight files, the config
//! and every refusal that needs no values. Not the writing (see `stream.rs`).

use super::ExportTensor;
use crate::columns::{self, FolderFormat};
use crate::packed::{DiskFormat, G_IDX, expected_tensors, pack};
use crate::quantization::QuantizationConfig;
use crate::safetensors::Pending;
use crate::tensor::{conversion_loss, float_bytes};
use crate::{CheckpointError, Dtype, ModelConfig, NamedTensor, TensorData, kv_cache};
use dsq_quant::{FloatType, Granularity, KvGrid, Mapping, QuantArgs, QuantConfig, QuantError, QuantScheme};
use serde_json::{Value, json};
use std::borrow::Cow;
use std::path::Path;

/// An [`ExportTensor`] without its values.
#[derive(Debug, Clone, PartialEq)]
pub enum Outline {
    /// Floats, converted, rescaled or copied, or anything else that is copied.
    Plain {
        /// Tensor name.
        name: String,
        /// Shape, outermost first.
        shape: Vec<usize>,
        /// Stored dtype.
        dtype: Dtype,
    },
    /// A quantized module.
    Linear {
        /// Module name.
        module: String,
        /// Shape of its weight: `[n, k]` or `[out, in, kh, kw]`.
        shape: Vec<usize>,
        /// Scheme of its weights.
        args: QuantArgs,
        /// Scheme of its inputs, where they are on a stored grid.
        activation: Option<QuantArgs>,
        /// Whether its columns have an order of their own.
        ordered: bool,
    },
    /// The grids of the KV cache of one layer of a language model.
    KvCache {
        /// The layer, from 0.
        layer: usize,
        /// Scheme and scales.
        grid: KvGrid,
    },
}

impl Outline {
    /// That of a tensor.
    pub fn of(tensor: &ExportTensor) -> Self {
        match tensor {
            ExportTensor::Float { name, shape, dtype, .. } | ExportTensor::Rescaled { name, shape, dtype, .. } => {
                Self::Plain { name: name.clone(), shape: shape.clone(), dtype: (*dtype).into() }
            }
            ExportTensor::Copy { name, shape, dtype, .. } => {
                Self::Plain { name: name.clone(), shape: shape.clone(), dtype: *dtype }
            }
            ExportTensor::Linear { module, shape, matrix, activation, order, .. } => Self::Linear {
                module: module.clone(),
                shape: shape.clone(),
                args: matrix.args,
                activation: activation.map(|(a, _)| a),
                ordered: order.is_some(),
            },
            ExportTensor::KvCache { layer, grid } => Self::KvCache { layer: *layer, grid: *grid },
        }
    }

    /// Tensor or module.
    pub fn name(&self) -> String {
        match self {
            Self::Plain { name, .. } => name.clone(),
            Self::Linear { module, .. } => module.clone(),
            Self::KvCache { layer, .. } => format!("model.layers.{layer}.self_attn"),
        }
    }

    /// Values of the tensor or weight.
    pub fn values(&self) -> u64 {
        match self {
            Self::Plain { shape, .. } | Self::Linear { shape, .. } => shape.iter().map(|&d| d as u64).product(),
            Self::KvCache { .. } => 0,
        }
    }

    /// Bytes that making, writing and reading back the tensor takes at a time: of a linear its values in f32 as they were and as
    /// they became, its codes and its words; of another tensor its bytes, and where they are converted those in f32.
    pub fn working_bytes(&self) -> u64 {
        match self {
            Self::Plain { dtype, .. } => self.values() * (dtype.size() as u64).max(2) * 5,
            Self::Linear { .. } => 10 * self.values(),
            Self::KvCache { .. } => 0,
        }
    }
}

/// A tensor of a weight file, without its bytes.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
}

impl Part {
    /// For the header of a file.
    pub(super) fn pending(&self) -> Pending<'static> {
        let bytes = Box::new(|| Cow::Borrowed(&[][..]));
        Pending { name: self.name.clone(), dtype: self.dtype, shape: self.shape.clone(), bytes }
    }

    /// What of the sum of bytes it is, by its name; `in_linear`: of a quantized module.
    pub(super) fn class(&self, in_linear: bool) -> &'static str {
        match self.name.rsplit('.').next().unwrap_or_default() {
            "weight" if in_linear => "codes",
            "weight_packed" | "qweight" => "codes",
            "weight_scale" | "weight_global_scale" | "scales" => "scales",
            "weight_zero_point" | "qzeros" => "zero_points",
            "weight_shape" | "weight_g_idx" | "g_idx" | "input_scale" | "input_global_scale" | "input_zero_point"
            | "k_scale" | "v_scale" => "other",
            _ => "float",
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product::<u64>() * self.dtype.size() as u64
    }
}

/// The stored tensors, in the order of [`stored`]. Shapes were checked.
pub(super) fn parts(format: FolderFormat, outline: &Outline, scheme: Option<&QuantConfig>) -> Vec<Part> {
    let (module, shape, args, activation, ordered) = match outline {
        Outline::Plain { name, shape, dtype } => {
            return vec![Part { name: name.clone(), dtype: *dtype, shape: shape.clone() }];
        }
        Outline::KvCache { layer, grid } => {
            let part = |t: NamedTensor| Part { name: t.name, dtype: t.data.dtype(), shape: t.data.shape().to_vec() };
            return kv_cache::pack(*layer, grid).into_iter().map(part).collect();
        }
        Outline::Linear { module, shape, args, activation, ordered } => (module, shape, args, activation, *ordered),
    };
    let [n, k] = size(shape);
    let part = |suffix: &str, dtype, shape| Part { name: format!("{module}.{suffix}"), dtype, shape };
    let expected =
        expected_tensors(format.of_module(args, inputs_of(scheme, module).as_ref()), args, n, k, shape.len());
    let mut out: Vec<Part> =
        expected.into_iter().map(|e| part(e.suffix, e.dtype.unwrap_or(args.scale_dtype.into()), e.shape)).collect();
    if ordered && format == FolderFormat::CompressedTensors {
        out.push(part(G_IDX, Dtype::I32, vec![k]));
    }
    out.sort_by_key(|t| t.name.ends_with("weight_zero_point"));
    if let Some(a) = activation {
        let (suffix, dtype) = input_scale(a);
        out.push(part(suffix, dtype.into(), vec![1]));
        if a.mapping == Mapping::Asymmetric {
            out.push(part("input_zero_point", Dtype::I8, vec![1]));
        }
    }
    out
}

/// The scheme of a module's inputs.
pub(super) fn inputs_of(scheme: Option<&QuantConfig>, module: &str) -> Option<QuantArgs> {
    scheme.and_then(|s| s.scheme_for(module)).and_then(|s| s.activations)
}

/// The name of the stored scale of inputs, and its dtype.
fn input_scale(args: &QuantArgs) -> (&'static str, FloatType) {
    match args.has_global_scale() {
        true => ("input_global_scale", FloatType::F32),
        false => ("input_scale", args.scale_dtype),
    }
}

/// `[n, k]` of a weight.
fn size(shape: &[usize]) -> [usize; 2] {
    [shape.first().copied().unwrap_or(0), shape.iter().skip(1).product()]
}

/// The stored tensors of a quantized module or cache; nothing for the others.
pub(super) fn packed_tensors(
    format: FolderFormat,
    layer: &ExportTensor,
    scheme: Option<&QuantConfig>,
) -> Vec<NamedTensor> {
    let (module, shape, matrix, activation, order) = match layer {
        ExportTensor::Linear { module, shape, matrix, activation, order, .. } => {
            (module, shape, matrix, activation, order.as_ref())
        }
        ExportTensor::KvCache { layer, grid } => return kv_cache::pack(*layer, grid),
        _ => return Vec::new(),
    };
    let disk = format.of_module(&matrix.args, inputs_of(scheme, module).as_ref());
    let mut out = pack(module, shape, matrix, order, disk);
    if let Some((args, p)) = activation {
        let one = |suffix: &str, data| NamedTensor { name: format!("{module}.{suffix}"), data };
        let (part, dtype) = input_scale(args);
        out.push(one(part, TensorData::Float { shape: vec![1], data: vec![p.scale], dtype }));
        if args.mapping == Mapping::Asymmetric {
            out.push(one("input_zero_point", TensorData::I8 { shape: vec![1], data: vec![p.zero as i8] }));
        }
    }
    out
}

/// The stored tensors of a layer, with their bytes on demand; `packed` are its [`packed_tensors`].
pub(super) fn stored<'a>(layer: &'a ExportTensor, packed: &'a [NamedTensor]) -> Vec<Pending<'a>> {
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

/// Refuses what no values are needed for: a linear that contradicts the scheme, or that `format` does not hold. Layers of GPTQ
/// and AWQ were converted from the scheme's own form, so that of these the scheme is not compared.
///
/// # Errors
/// [`CheckpointError::Usage`], [`CheckpointError::Quant`] for groups that do not divide.
pub(super) fn check(
    out: &Path,
    outline: &Outline,
    scheme: Option<&QuantConfig>,
    format: FolderFormat,
) -> Result<(), CheckpointError> {
    let Outline::Linear { module, shape, args, activation, ordered } = outline else { return Ok(()) };
    let usage = |problem: String| Err(CheckpointError::usage(out, module, problem));
    let [n, k] = size(shape);
    if n == 0 || k == 0 {
        return usage(format!("expected at least one row and column, got shape {shape:?}"));
    }
    args.scale_shape(n, k).map_err(|e| CheckpointError::quant(out, module, e))?;
    if DiskFormat::of(args, None).is_none() {
        let name = args.qtype.name();
        return usage(format!("compressed-tensors has no format for {name} weights; expected another scheme"));
    }
    if args.qtype.float().is_some() && shape.len() != 2 {
        let name = args.qtype.name();
        return usage(format!("{name} weights of linear layers only; expected shape [n, k], got {shape:?}"));
    }
    let grouped = matches!(args.granularity, Granularity::PerGroup(_)) && args.qtype.float().is_none();
    if *ordered && (!grouped || shape.len() != 2 || format == FolderFormat::Awq) {
        let problem = "expected groups of integers of a linear layer, got others in activation order";
        return usage(format!("{}: {problem}", format.name()));
    }
    let Some(QuantScheme { weights, activations }) = scheme.and_then(|s| s.scheme_for(module)) else {
        return usage("quantized, though the scheme leaves it in float; expected floats, got codes".into());
    };
    // What is found when the model runs is given by nobody.
    let given = activation.or(activations.filter(QuantArgs::is_dynamic));
    if activation.is_some_and(|a| a.is_dynamic()) {
        return usage("activations of each token have no stored scale; expected none, got one".into());
    }
    if format == FolderFormat::CompressedTensors && (weights != args || *activations != given) {
        return usage(format!(
            "does not follow the scheme; expected {weights:?} and {activations:?}, got {args:?} and {given:?}"
        ));
    }
    Ok(())
}

/// Refuses values that cannot be stored, and lengths that are not those of the shape.
///
/// # Errors
/// [`CheckpointError::Usage`], [`CheckpointError::Quant`], [`CheckpointError::Numerics`].
pub(super) fn check_values(out: &Path, layer: &ExportTensor) -> Result<(), CheckpointError> {
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
        ExportTensor::Linear { module, shape, matrix, order, .. } => {
            matrix.validate().map_err(|e| CheckpointError::quant(out, module, e))?;
            if let Some(order) = order.as_ref().filter(|o| o.k() != matrix.k) {
                let problem = format!("order of columns: expected {} of them, got {}", matrix.k, order.k());
                return Err(CheckpointError::usage(out, module, problem));
            }
            let size = size(shape);
            if size != [matrix.n, matrix.k] {
                let got = [matrix.n, matrix.k];
                let problem = format!("shape {shape:?}: expected an [n, k] matrix of {size:?}, got {got:?}");
                return Err(CheckpointError::usage(out, module, problem));
            }
            Ok(())
        }
    }
}

/// `config.json` and the files beside the weights, whose own names are `taken`.
pub(super) fn folder_files(
    format: FolderFormat,
    out: &Path,
    config: &ModelConfig,
    layers: &[Outline],
    scheme: Option<&QuantConfig>,
    aux: Vec<(String, Vec<u8>)>,
    taken: &[&str],
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
        if taken.contains(&name.as_str()) || files.iter().any(|(n, _)| *n == name) {
            let problem = "this file is the export's own, or is given twice; expected another name";
            return Err(CheckpointError::usage(out, name, problem));
        }
        files.push((name, bytes));
    }
    Ok(files)
}

/// The dtype of most float values, which is the dtype of the model; that of the scales when all is quantized.
fn main_dtype(layers: &[Outline]) -> FloatType {
    let mut counts = [0u64; 3];
    let index = |t: FloatType| FloatType::ALL.iter().position(|a| *a == t);
    let mut count = |t: FloatType, n: u64| index(t).into_iter().for_each(|i| counts[i] += n);
    for layer in layers {
        match layer {
            Outline::Plain { dtype, .. } => {
                if let Some(t) = dtype.float() {
                    count(t, layer.values());
                }
            }
            Outline::Linear { shape, args, .. } => {
                let [n, k] = size(shape);
                count(args.scale_dtype, args.scale_shape(n, k).map_or(0, |[rows, groups]| (rows * groups) as u64));
            }
            Outline::KvCache { .. } => {}
        }
    }
    let best = (0..3).max_by_key(|&i| (counts[i], std::cmp::Reverse(i))).unwrap_or(0);
    FloatType::ALL[best]
}

fn quantization_value(
    format: FolderFormat,
    config: &ModelConfig,
    layers: &[Outline],
    scheme: Option<&QuantConfig>,
) -> Option<Value> {
    let mut groups: Vec<(QuantArgs, Option<QuantArgs>, bool, Vec<String>)> = Vec::new();
    let mut quantized = Vec::new();
    for layer in layers {
        let Outline::Linear { module, args, ordered, .. } = layer else { continue };
        quantized.push(module.as_str());
        let key = (*args, inputs_of(scheme, module), *ordered);
        match groups.iter_mut().find(|(w, a, o, _)| (*w, *a, *o) == key) {
            Some((.., modules)) => modules.push(module.clone()),
            None => groups.push((key.0, key.1, key.2, vec![module.clone()])),
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
        let act_order = groups.iter().any(|g| g.2);
        return Some(columns::to_value(format, &groups[0].0, act_order, quantized.contains(&"lm_head"), &ignore));
    }
    // A tied head is a module of its own for the tools that read this.
    if matches!(config, ModelConfig::Llama(c) if c.tie_word_embeddings) {
        ignore.push("lm_head".into());
    }
    Some(QuantizationConfig::to_value(&groups, &ignore, scheme.and_then(|s| s.kv_cache.as_ref())))
}
