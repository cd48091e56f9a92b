//! What of a source is in float in the output: tensors that no scheme names, copied or converted, and layers of a source of codes
//! that the new schemes leave in float. Not what a scheme names (see `stream.rs`).

use super::{Args, default_dtype, float_outline, float_tensor};
use crate::commands::export::packed_names;
use crate::error::CliError;
use dsq_checkpoint::{Checkpoint, Dtype, ExportTensor, LinearSpec, ModelConfig, Outline};
use dsq_quant::FloatType;
use std::collections::HashSet;

/// The float tensors of an output, in their order; each is read when it is asked for.
pub(super) struct Floats<'a> {
    ckpt: &'a Checkpoint,
    dtype: Option<FloatType>,
    names: Vec<String>,
    /// Layers whose codes become floats.
    decoded: Vec<LinearSpec>,
}

impl<'a> Floats<'a> {
    /// All but what is `quantized` or `changed`.
    pub(super) fn new(args: &Args, ckpt: &'a Checkpoint, quantized: &[LinearSpec], changed: &[ExportTensor]) -> Self {
        let mut done: HashSet<String> = quantized.iter().map(|l| format!("{}.weight", l.module)).collect();
        done.extend(changed.iter().filter_map(|t| match t {
            ExportTensor::Rescaled { name, .. } => Some(name.clone()),
            _ => None,
        }));
        let mut decoded = Vec::new();
        if ckpt.quantization().is_some() {
            let packed: Vec<LinearSpec> =
                ckpt.config().linears().into_iter().filter(|l| ckpt.is_quantized(&l.module)).collect();
            done.extend(packed_names(ckpt, &packed));
            done.extend(cache_names(ckpt));
            let chosen: HashSet<&str> = quantized.iter().map(|l| l.module.as_str()).collect();
            decoded.extend(packed.into_iter().filter(|l| !chosen.contains(l.module.as_str())));
        }
        let names = ckpt.names().into_iter().filter(|n| !done.contains(n)).collect();
        Self { ckpt, dtype: args.dtype.or(default_dtype(ckpt)), names, decoded }
    }

    /// What they will be.
    pub(super) fn outlines(&self) -> Vec<Outline> {
        let named = self.names.iter().map(|name| float_outline(self.ckpt, name.clone(), self.dtype));
        let decoded = self.decoded.iter().map(|l| Outline::Plain {
            name: format!("{}.weight", l.module),
            shape: l.shape.clone(),
            dtype: Dtype::from(self.decoded_dtype()),
        });
        named.chain(decoded).collect()
    }

    /// That of values of codes: as the rest of the model has it.
    fn decoded_dtype(&self) -> FloatType {
        self.dtype.unwrap_or_else(|| self.ckpt.main_dtype())
    }

    /// Tensor `i`.
    pub(super) fn tensor(&self, i: usize) -> Result<ExportTensor, CliError> {
        let Some(name) = self.names.get(i) else {
            let spec = &self.decoded[i - self.names.len()];
            let (name, shape) = (format!("{}.weight", spec.module), spec.shape.clone());
            let data = self.ckpt.linear(&spec.module)?.into_f32();
            return Ok(ExportTensor::Float { name, shape, data, dtype: self.decoded_dtype() });
        };
        float_tensor(self.ckpt, name.clone(), self.dtype)
    }

    /// The values of the tensor `name` as the output has them, if it is one of these.
    pub(super) fn values(&self, name: &str) -> Result<Option<Vec<f32>>, CliError> {
        let decoded = || self.decoded.iter().position(|l| name.strip_suffix(".weight") == Some(&l.module));
        let at = self.names.iter().position(|n| n == name).or_else(|| Some(self.names.len() + decoded()?));
        Ok(at.map(|i| self.tensor(i)).transpose()?.and_then(|t| t.values_of(name)))
    }
}

/// The scales of the KV cache of a source, by name.
fn cache_names(ckpt: &Checkpoint) -> Vec<String> {
    let ModelConfig::Llama(c) = ckpt.config() else { return Vec::new() };
    let of = |i: usize| ["k_scale", "v_scale"].map(|s| format!("model.layers.{i}.self_attn.{s}"));
    let layers = 0..if ckpt.kv_cache().is_some() { c.num_hidden_layers } else { 0 };
    layers.flat_map(of).collect()
}

/// For a person: what of a source of codes the output does not have.
pub(super) fn lost_note(ckpt: &Checkpoint) -> Option<String> {
    ckpt.quantization()?;
    let inputs = ckpt.config().linears().iter().any(|l| matches!(ckpt.input_grid(&l.module), Ok(Some(_))));
    let lost = match (inputs, ckpt.kv_cache().is_some()) {
        (false, false) => "its codes were read as the values that they stand for",
        (true, false) => "its grids of inputs are not carried over",
        (false, true) => "its scales of a KV cache are not carried over",
        (true, true) => "its grids of inputs and its scales of a KV cache are not carried over",
    };
    Some(format!("note: the source was quantized already; {lost}"))
}
