//! `dsq quantize --kv-cache`: the scales of a quantized KV cache, found on the calibration text when all else of the model is
//! chosen. The walk is dsq-train's, the rule and the codes are dsq-quant's.

use super::{Output, calibrated::Text, workers};
use crate::error::CliError;
use crate::output::progress;
use dsq_checkpoint::{ExportTensor, ModelConfig};
use dsq_quant::{InputGrid, QuantArgs, QuantConfig, QuantType};
use dsq_train::ptq::{self, Journal, PtqProgress};
use serde_json::{Value, json};

/// Codes of a KV cache.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KvCacheName {
    /// INT8, symmetric.
    Int8,
    /// FP8 E4M3.
    Fp8,
}

impl KvCacheName {
    /// The scheme of this name.
    pub(super) fn scheme(self) -> Result<QuantArgs, CliError> {
        let qtype = match self {
            Self::Int8 => QuantType::Int8,
            Self::Fp8 => QuantType::Fp8E4M3,
        };
        QuantArgs::kv_cache(qtype).map_err(|e| CliError::usage(format!("--kv-cache: {e}")))
    }
}

/// Refuses the option for an image model.
pub(super) fn check_images(given: Option<KvCacheName>) -> Result<(), CliError> {
    match given {
        None => Ok(()),
        Some(_) => Err(CliError::usage("--kv-cache: an image model has no KV cache; expected no such option, got one")),
    }
}

/// The grids of every layer of the model that `output` will be, if `config` asks for such.
pub(super) fn grids(
    output: &Output,
    model: &ModelConfig,
    config: &QuantConfig,
    text: &Text,
    journal: Option<&Journal>,
) -> Result<Vec<ExportTensor>, CliError> {
    let (ModelConfig::Llama(model), Some(args)) = (model, config.kv_cache) else { return Ok(Vec::new()) };
    let bar = progress(1, "KV cache {bar:30} {percent}% {eta}");
    let mut on_progress = |p: &PtqProgress| {
        bar.set_length(p.total as u64);
        bar.set_position(p.done as u64);
    };
    let values = |name: &str| output.values(name);
    let inputs = |module: &str| {
        let dynamic = || InputGrid::dynamic(config.scheme_for(module).and_then(|s| s.activations));
        output.stored_inputs(module).or_else(dynamic)
    };
    let walk = || ptq::kv_grids(model, inputs, args, text.calibration(), values, journal, &mut on_progress);
    let found = workers(output.global)?.install(walk);
    bar.finish_and_clear();
    Ok(found?.into_iter().enumerate().map(|(layer, grid)| ExportTensor::KvCache { layer, grid }).collect())
}

/// For a person.
pub(super) fn note(cache: &[ExportTensor]) -> Option<String> {
    let Some(ExportTensor::KvCache { grid, .. }) = cache.first() else { return None };
    Some(format!("KV cache: {}, scales of keys and values from the calibration text", grid.args.qtype.name()))
}

/// For `--json`: into what is told of the calibration.
pub(super) fn tell(cache: &[ExportTensor], about: Option<&mut Value>) {
    let (Some(ExportTensor::KvCache { grid, .. }), Some(about)) = (cache.first(), about) else { return };
    let row = |t: &ExportTensor| match t {
        ExportTensor::KvCache { layer, grid } => {
            Some(json!({"layer": layer, "k_scale": grid.k.scale, "v_scale": grid.v.scale}))
        }
        _ => None,
    };
    let layers: Vec<Value> = cache.iter().filter_map(row).collect();
    about["kv_cache"] = json!({"type": grid.args.qtype.name(), "layers": layers});
}
