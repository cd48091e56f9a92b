//! A checkpoint with its first layers only, and with some of its quantized modules in float: what two binaries are given to find the layer
//! and the kernel that they disagree on. Not an export: nothing is proved of it, and it lives in a temporary folder.

use super::language;
use crate::error::CliError;
use dsq_checkpoint::{Checkpoint, NamedTensor, TensorData, write_atomic, write_safetensors};
use dsq_quant::FloatType;
use serde_json::{Value, json};
use std::path::Path;

/// Why [`cut`] cannot cut this model; `None` where it can.
///
/// # Errors
/// Those of reading its config.
pub fn uncut(model: &Checkpoint) -> Result<Option<&'static str>, CliError> {
    let Some(bytes) = model.aux_file("config.json")? else {
        return Ok(Some("layers are found in a folder with config.json, and this is another file"));
    };
    let config: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let quantized = config.get("quantization_config");
    let lists = quantized.is_none_or(|q| q.get("ignore").is_some_and(Value::is_array));
    Ok((!lists).then_some("quantization_config.ignore is no list, as compressed-tensors has it"))
}

/// Writes to the empty folder `out` the first `layers` layers of `model` with its embedding and head, the modules `floats` as the float
/// values of their codes.
///
/// # Errors
/// Exit code 2 for a model that is no folder, or whose config has no list of modules to leave in float; I/O errors.
pub fn cut(model: &Checkpoint, layers: usize, floats: &[String], out: &Path) -> Result<(), CliError> {
    let name = model.path().display();
    let Some(bytes) = model.aux_file("config.json")? else {
        let problem =
            "two binaries are told apart layer by layer in a folder; expected one with config.json, got another file";
        return Err(CliError::usage(format!("{name}: {problem}"))
            .with_hint("give a folder that `dsq export` or `dsq quantize` wrote"));
    };
    let mut config: Value = serde_json::from_slice(&bytes)
        .map_err(|e| CliError::new(3, format!("{name}/config.json: expected JSON, got {e}")))?;
    config["num_hidden_layers"] = json!(layers);
    if let Some(types) = config.get_mut("layer_types").and_then(Value::as_array_mut) {
        types.truncate(layers);
    }
    if !floats.is_empty() {
        let ignore = config.pointer_mut("/quantization_config/ignore").and_then(Value::as_array_mut);
        let Some(ignore) = ignore else {
            let problem = "quantization_config.ignore: expected a list, as compressed-tensors has it, got none";
            return Err(CliError::usage(format!("{name}/config.json: {problem}")));
        };
        ignore.extend(floats.iter().map(|m| json!(m)));
    }
    let mut tensors = Vec::new();
    for name in model.names() {
        let of =
            |module: &String| name.strip_prefix(module.as_str()).is_some_and(|r| r.starts_with('.') && r != ".bias");
        if layer_of(&name).is_some_and(|i| i >= layers) || floats.iter().any(of) {
            continue;
        }
        let shape = model.info(&name).map(|i| i.shape).unwrap_or_default();
        let (dtype, bytes) = model.read_stored(&name)?;
        tensors.push(NamedTensor { name, data: TensorData::Raw { shape, bytes, dtype } });
    }
    for module in floats {
        let spec = model.config().linears().into_iter().find(|l| l.module == *module);
        let shape = spec.map(|l| l.shape).unwrap_or_default();
        let data = model.linear(module)?.into_f32();
        let data = TensorData::Float { shape, data, dtype: FloatType::F32 };
        tensors.push(NamedTensor { name: format!("{module}.weight"), data });
    }
    std::fs::create_dir_all(out).map_err(|e| CliError::new(4, format!("{}: cannot create: {e}", out.display())))?;
    write_safetensors(&out.join("model.safetensors"), &tensors)?;
    write_atomic(&out.join("config.json"), config.to_string().as_bytes())?;
    Ok(())
}

/// Quantized modules of a layer.
///
/// # Errors
/// Exit code 2 for an image model.
pub fn quantized(model: &Checkpoint, layer: usize) -> Result<Vec<String>, CliError> {
    let names = language(model)?.layer_linears(layer).into_iter();
    Ok(names.map(|(name, ..)| format!("model.layers.{layer}.{name}")).filter(|m| model.is_quantized(m)).collect())
}

fn layer_of(name: &str) -> Option<usize> {
    name.strip_prefix("model.layers.")?.split('.').next()?.parse().ok()
}
