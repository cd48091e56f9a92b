//! The quantized KV cache on disk: `quantization_config.kv_cache_scheme` and the tensors `model.layers.N.self_attn.k_scale` and
//! `v_scale`, one number each, as llm-compressor writes them and vLLM reads them (a value is code times scale). Not the grids
//! themselves (see `dsq-quant`), not the codes, which are on no disk.
//!
//! A scale may be stored as F32, F16 or BF16 and is what it widens to; dsq writes F32 (llm-compressor writes the model's dtype, vLLM
//! holds f32). vLLM documents FP8 only; INT8 is the same scheme with `"type": "int"`.

use crate::config::fields::Fields;
use crate::export::ExportTensor;
use crate::quantization::{args_value, parse_args};
use crate::tensor::floats_from_bytes;
use crate::{Checkpoint, CheckpointError, ModelConfig, NamedTensor, TensorData};
use dsq_quant::{FloatType, KvGrid, QParams, QuantArgs, QuantConfig};
use serde_json::Value;
use std::path::Path;

/// The name of `kv_cache_scheme` in a config.
pub(crate) const KEY: &str = "kv_cache_scheme";

/// Reads `kv_cache_scheme`.
///
/// # Errors
/// [`CheckpointError::Invalid`] naming the key, for anything but INT8 or FP8, symmetric, static, with one scale for the tensor.
pub(crate) fn from_value(value: &Value, file: &Path) -> Result<QuantArgs, CheckpointError> {
    let f = Fields::new(value, file, "quantization_config.kv_cache_scheme")?;
    let args = parse_args(&f, false)?;
    // The reader of weights knows more forms; of a cache there is one.
    args.check_kv_cache()
        .map_err(|e| CheckpointError::invalid(file, "quantization_config.kv_cache_scheme", e.to_string()))?;
    Ok(args)
}

/// The value of `kv_cache_scheme`.
pub(crate) fn to_value(args: Option<&QuantArgs>) -> Value {
    args.map_or(Value::Null, args_value)
}

/// The names of the scales of layer `i`: keys, values.
pub(crate) fn names(i: usize) -> [String; 2] {
    ["k_scale", "v_scale"].map(|s| format!("model.layers.{i}.self_attn.{s}"))
}

/// The stored tensors of a layer's grids.
pub(crate) fn pack(layer: usize, grid: &KvGrid) -> Vec<NamedTensor> {
    let one = |(name, p): (String, QParams)| {
        let data = TensorData::Float { shape: vec![1], data: vec![p.scale], dtype: grid.args.scale_dtype };
        NamedTensor { name, data }
    };
    names(layer).into_iter().zip([grid.k, grid.v]).map(one).collect()
}

impl Checkpoint {
    /// The scheme of the KV cache; `None`: keys and values stay in float.
    pub fn kv_cache(&self) -> Option<QuantArgs> {
        self.quantization()?.kv_cache
    }

    /// The grids of the keys and values of layer `i`, by the quantization config and the stored scales; `None`: in float.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for a scale that is absent, of another shape, zero, negative or not finite, or so large that a
    /// code stands for infinity; I/O errors.
    pub fn kv_grid(&self, i: usize) -> Result<Option<KvGrid>, CheckpointError> {
        let Some(args) = self.kv_cache() else { return Ok(None) };
        let [k, v] = names(i).map(|name| {
            let (dtype, bytes) = self.one(&name, |dtype| dtype.float().is_some())?;
            let scale = floats_from_bytes(&bytes, dtype.float().unwrap_or_default())[0];
            match KvGrid::scale_problem(&args, scale) {
                None => Ok(QParams { scale, zero: 0 }),
                Some(problem) => Err(self.invalid(&name, problem)),
            }
        });
        Ok(Some(KvGrid { args: QuantArgs { scale_dtype: FloatType::F32, ..args }, k: k?, v: v? }))
    }
}

/// Refuses grids that do not follow the scheme: each layer has them, once, or none has.
///
/// # Errors
/// [`CheckpointError::Usage`] naming the layer.
pub(crate) fn check_export(
    out: &Path,
    config: &ModelConfig,
    layers: &[ExportTensor],
    scheme: Option<&QuantConfig>,
) -> Result<(), CheckpointError> {
    let wanted = scheme.and_then(|s| s.kv_cache);
    let mut given = Vec::new();
    for layer in layers {
        let ExportTensor::KvCache { layer, grid } = layer else { continue };
        let at = format!("model.layers.{layer}.self_attn");
        if Some(grid.args) != wanted {
            let problem = format!("KV cache: does not follow the scheme; expected {wanted:?}, got {:?}", grid.args);
            return Err(CheckpointError::usage(out, at, problem));
        }
        grid.args.check_kv_cache().map_err(|e| CheckpointError::usage(out, &at, e.to_string()))?;
        for (name, p) in names(*layer).into_iter().zip([grid.k, grid.v]) {
            if let Some(problem) = KvGrid::scale_problem(&grid.args, p.scale) {
                return Err(CheckpointError::numerics(out, name, problem));
            }
        }
        given.push(*layer);
    }
    if wanted.is_none() {
        return Ok(());
    }
    given.sort_unstable();
    match config {
        ModelConfig::Llama(c) if given.iter().copied().eq(0..c.num_hidden_layers) => Ok(()),
        ModelConfig::Llama(c) => {
            let problem = format!("expected the scales of layers 0 to {}, got {given:?}", c.num_hidden_layers - 1);
            Err(CheckpointError::usage(out, KEY, problem))
        }
        _ => Err(CheckpointError::usage(out, KEY, "only language models have a KV cache; expected none, got one")),
    }
}
