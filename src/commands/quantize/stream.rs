//! Rounding to nearest, tensor by tensor: each is read, rounded, written and dropped, so that memory does not grow with the model.
//! Not the folder and its proof (dsq-checkpoint), not the arithmetic (dsq-quant, by way of dsq-kernels).

use super::{
    Args, Layer, default_dtype, float_names, float_outline, float_tensor, hashed_record, source_name, workers,
};
use crate::{Global, error::CliError, output};
use dsq_checkpoint::{
    Checkpoint, CheckpointError, ExportTensor, FolderTarget, LinearSpec, Outline, Proof, Workers, export_stream,
};
use dsq_quant::{QuantArgs, QuantConfig, QuantScheme, QuantizedMatrix};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

/// Layers with groups that carry nothing, and how many.
type Degenerate = Vec<(String, usize)>;

/// Writes the folder; gives the layers that hold groups of nothing.
pub(super) fn quantize(
    args: &Args,
    global: &Global,
    ckpt: &Checkpoint,
    target: &FolderTarget,
    specs: &[LinearSpec],
    aux: Vec<(String, Vec<u8>)>,
) -> Result<(Proof, Degenerate), CliError> {
    let Some(config) = target.scheme else { return Err(CliError::new(70, "rounding without a scheme")) };
    let rounding = Rounding::new(args, global, ckpt, config, specs)?;
    let dtype = args.dtype.or(default_dtype(ckpt));
    let floats = float_names(ckpt, specs, &[]);
    let mut outlines = outlines(config, specs)?;
    outlines.extend(floats.iter().map(|name| float_outline(ckpt, name.clone(), dtype)));
    let bar = output::progress(outlines.len() as u64, "quantize {bar:30} {pos}/{len} tensors {eta}");
    let degenerate = Mutex::new(BTreeMap::new());
    let make = |i: usize| -> Result<Cow<ExportTensor>, CliError> {
        bar.inc(1);
        let Some(spec) = specs.get(i) else {
            return float_tensor(ckpt, floats[i - specs.len()].clone(), dtype).map(Cow::Owned);
        };
        let layer = rounding.layer(spec, false)?;
        if layer.degenerate > 0 {
            let mut all = degenerate.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            all.insert(i, (spec.module.clone(), layer.degenerate));
        }
        Ok(Cow::Owned(layer.tensor))
    };
    let proof = export_stream(target, outlines, aux, &make)?;
    bar.finish_and_clear();
    let degenerate = degenerate.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    Ok((proof, degenerate.into_values().collect()))
}

/// What the layers will be.
pub(super) fn outlines(config: &QuantConfig, specs: &[LinearSpec]) -> Result<Vec<Outline>, CliError> {
    let one = |spec: &LinearSpec| {
        let (module, shape) = (spec.module.clone(), spec.shape.clone());
        let activation = config.scheme_for(&module).and_then(|s| s.activations).filter(|a| !a.is_dynamic());
        Ok(Outline::Linear { args: weights_of(config, &module)?, module, shape, activation, ordered: false })
    };
    specs.iter().map(one).collect()
}

/// Every layer that the scheme names, in memory.
pub(super) fn layers(
    args: &Args,
    global: &Global,
    ckpt: &Checkpoint,
    config: &QuantConfig,
    specs: &[LinearSpec],
) -> Result<Vec<Layer>, CliError> {
    let bar = output::progress(specs.len() as u64, "quantize {bar:30} {pos}/{len} layers {eta}");
    let rounding = Rounding::new(args, global, ckpt, config, specs)?;
    let all = Workers::new(global.threads()).run(
        specs.len(),
        |i| bytes(&specs[i]),
        |i| {
            bar.inc(1);
            rounding.layer(&specs[i], false)
        },
    );
    bar.finish_and_clear();
    all
}

/// What rounding a layer needs, see [`Outline::working_bytes`].
fn bytes(spec: &LinearSpec) -> u64 {
    10 * (spec.n() * spec.k()) as u64
}

fn weights_of(config: &QuantConfig, module: &str) -> Result<QuantArgs, CliError> {
    let Some(&QuantScheme { weights, .. }) = config.scheme_for(module) else {
        return Err(CliError::new(70, format!("{module}: no scheme names this layer")));
    };
    Ok(weights)
}

/// All that rounding a layer takes.
pub(super) struct Rounding<'a> {
    args: &'a Args,
    ckpt: &'a Checkpoint,
    config: &'a QuantConfig,
    pool: rayon::ThreadPool,
    /// Global scales, by module.
    globals: HashMap<String, f32>,
}

impl<'a> Rounding<'a> {
    pub(super) fn new(
        args: &'a Args,
        global: &Global,
        ckpt: &'a Checkpoint,
        config: &'a QuantConfig,
        specs: &[LinearSpec],
    ) -> Result<Self, CliError> {
        let globals = global_scales(global, ckpt, config, specs)?;
        Ok(Self { args, ckpt, config, pool: workers(global)?, globals })
    }

    /// Rounds one layer; the codes do not depend on the number of threads. `alone`: under a global scale of its own, where there is
    /// one, to see how long it takes.
    pub(super) fn layer(&self, spec: &LinearSpec, alone: bool) -> Result<Layer, CliError> {
        let ckpt = self.ckpt;
        let name = source_name(ckpt, &spec.module);
        let refuse = |e| CliError::from(CheckpointError::quant(&self.args.model, &name, e));
        if ckpt.is_quantized(&spec.module) {
            return Err(CliError::usage(format!("{name}: expected float weights, got codes")));
        }
        let (n, k) = (spec.n(), spec.k());
        let (data, sha256) = ckpt.read_f32_hashed(&name)?;
        let weights = weights_of(self.config, &spec.module)?;
        let matrix = match self.globals.get(&spec.module).copied() {
            None if weights.has_global_scale() && alone => QuantizedMatrix::quantize(&data, n, k, weights),
            None => self.pool.install(|| dsq_kernels::quantize::quantize(&data, n, k, weights)),
            global => QuantizedMatrix::quantize_under(&data, n, k, weights, global),
        }
        .map_err(refuse)?;
        let degenerate = QuantizedMatrix::degenerate_groups(&data, n, k, weights).map_err(refuse)?.len();
        let source = Some(hashed_record(ckpt, &name, sha256, &data, &matrix.dequantize()));
        let (module, shape) = (spec.module.clone(), spec.shape.clone());
        let tensor = ExportTensor::Linear { module, shape, matrix, activation: None, source, order: None };
        Ok(Layer { tensor, degenerate, fit: None })
    }
}

/// The global scales of the layers that have one. Layers that a server computes as one matrix share the one of the largest
/// magnitude of all, as far as they have one.
fn global_scales(
    global: &Global,
    ckpt: &Checkpoint,
    config: &QuantConfig,
    specs: &[LinearSpec],
) -> Result<HashMap<String, f32>, CliError> {
    let has_one = |s: &&LinearSpec| config.scheme_for(&s.module).is_some_and(|c| c.weights.has_global_scale());
    let with: Vec<&LinearSpec> = specs.iter().filter(has_one).collect();
    let largest = |i: usize| -> Result<(String, f32), CliError> {
        let w = ckpt.linear(&with[i].module)?.into_f32();
        Ok((with[i].module.clone(), w.iter().fold(0.0f32, |m, x| m.max(x.abs()))))
    };
    let workers = Workers::new(global.threads());
    let largest: HashMap<String, f32> = workers.run(with.len(), |i| bytes(with[i]), largest)?.into_iter().collect();
    let shared = |module: &String| {
        let fused = ckpt.config().fused_with(module);
        QuantArgs::global_scale(fused.iter().filter_map(|m| largest.get(m)).fold(0.0, |m, &x| m.max(x)))
    };
    Ok(largest.keys().map(|m| (m.clone(), shared(m))).collect())
}
