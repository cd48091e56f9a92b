//! The output, tensor by tensor: each layer is rounded, or taken from the journal, when its turn comes, written and dropped, so that
//! memory does not grow with the model. Not the folder and its proof (dsq-checkpoint), not the arithmetic of rounding (dsq-quant, by
//! way of dsq-kernels), not the methods that fill the journal (`calibrated.rs`).

use super::{Args, Calibrated, Floats, Layer, Weight, source_name, stored_type, workers};
use crate::{Global, error::CliError, output};
use dsq_checkpoint::{
    Checkpoint, CheckpointError, Differences, ExportTensor, FolderTarget, LinearSpec, Outline, Proof, SourceRecord,
    Workers, export_stream,
};
use dsq_quant::{Granularity, InputGrid, QuantArgs, QuantConfig, QuantScheme, QuantizedMatrix};
use dsq_train::ptq::Fit;
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Layers with groups that carry nothing, and how many.
type Degenerate = Vec<(String, usize)>;

/// Where the quantized layers come from.
pub(super) enum Layers<'a> {
    /// Rounded when they are asked for.
    Rounded(Rounding<'a>, &'a [LinearSpec]),
    /// Chosen on text, and in the journal.
    Chosen(Box<Calibrated<'a>>),
}

impl Layers<'_> {
    fn specs(&self) -> &[LinearSpec] {
        match self {
            Self::Rounded(_, specs) => specs,
            Self::Chosen(found) => &found.specs,
        }
    }

    /// Norms and biases that changed with them.
    fn norms(&self) -> &[ExportTensor] {
        match self {
            Self::Rounded(..) => &[],
            Self::Chosen(found) => &found.norms,
        }
    }

    fn layer(&self, i: usize) -> Result<Layer, CliError> {
        match self {
            Self::Rounded(rounding, specs) => rounding.layer(&specs[i], false),
            Self::Chosen(found) => found.layer(i),
        }
    }

    /// What the codes of layer `i` stand for.
    fn values(&self, i: usize) -> Result<Vec<f32>, CliError> {
        match self {
            Self::Rounded(rounding, specs) => Ok(rounding.round(&specs[i], false)?.1.dequantize()),
            Self::Chosen(found) => Ok(found.blocks.read(i)?.matrix.dequantize()),
        }
    }
}

/// All that goes into the folder but the grids of the cache.
pub(super) struct Output<'a> {
    pub(super) global: &'a Global,
    layers: Layers<'a>,
    floats: Floats<'a>,
    /// Numbers of the layers by module.
    at: HashMap<String, usize>,
}

impl<'a> Output<'a> {
    pub(super) fn new(args: &Args, global: &'a Global, ckpt: &'a Checkpoint, layers: Layers<'a>) -> Self {
        let floats = Floats::new(args, ckpt, layers.specs(), layers.norms());
        let at = layers.specs().iter().enumerate().map(|(i, l)| (l.module.clone(), i)).collect();
        Self { global, layers, floats, at }
    }

    /// What a reader of the output will get of the tensor `name`.
    pub(super) fn values(&self, name: &str) -> Result<Option<Vec<f32>>, CliError> {
        if let Some(&i) = name.strip_suffix(".weight").and_then(|module| self.at.get(module)) {
            return self.layers.values(i).map(Some);
        }
        match self.layers.norms().iter().find_map(|t| t.values_of(name)) {
            Some(values) => Ok(Some(values)),
            None => self.floats.values(name),
        }
    }

    /// The stored grid of a layer's inputs, if it has one.
    pub(super) fn stored_inputs(&self, module: &str) -> Option<InputGrid> {
        let Layers::Chosen(found) = &self.layers else { return None };
        found.inputs.get(module).map(|(args, p)| InputGrid { args: *args, params: Some(*p) })
    }

    /// How the layers fit the calibration text, by module.
    pub(super) fn fits(&self) -> Vec<(String, Fit)> {
        let Layers::Chosen(found) = &self.layers else { return Vec::new() };
        let modules = found.blocks.modules().enumerate();
        modules.filter_map(|(i, module)| Some((module.to_owned(), found.blocks.fit(i)?))).collect()
    }

    /// Writes the folder, with the grids of the `cache`; gives the layers that hold groups of nothing.
    pub(super) fn write(
        &self,
        target: &FolderTarget,
        cache: Vec<ExportTensor>,
        aux: Vec<(String, Vec<u8>)>,
    ) -> Result<(Proof, Degenerate), CliError> {
        let Some(config) = target.scheme else { return Err(CliError::new(70, "quantizing without a scheme")) };
        let (specs, norms) = (self.layers.specs(), self.layers.norms());
        let mut outlines = outlines(config, specs)?;
        outlines.extend(norms.iter().map(Outline::of));
        let first = outlines.len();
        outlines.extend(self.floats.outlines());
        let last = outlines.len();
        outlines.extend(cache.iter().map(Outline::of));
        let bar = output::progress(outlines.len() as u64, "write {bar:30} {pos}/{len} tensors {eta}");
        let degenerate = Mutex::new(BTreeMap::new());
        let make = |i: usize| -> Result<Cow<ExportTensor>, CliError> {
            bar.inc(1);
            match specs.get(i) {
                None if i >= last => return Ok(Cow::Borrowed(&cache[i - last])),
                None if i >= first => return self.floats.tensor(i - first).map(Cow::Owned),
                None => return Ok(Cow::Borrowed(&norms[i - specs.len()])),
                Some(_) => {}
            }
            let layer = self.layers.layer(i)?;
            if layer.degenerate > 0 {
                let mut all = degenerate.lock().unwrap_or_else(PoisonError::into_inner);
                all.insert(i, (specs[i].module.clone(), layer.degenerate));
            }
            Ok(Cow::Owned(layer.tensor))
        };
        let proof = export_stream(target, outlines, aux, &make)?;
        bar.finish_and_clear();
        let degenerate = degenerate.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok((proof, degenerate.into_values().collect()))
    }
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
    /// Memory for the values of a layer, one for each layer in flight: memory from the system costs as much as rounding does.
    spare: Mutex<Vec<Vec<f32>>>,
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
        Ok(Self { args, ckpt, config, pool: workers(global)?, globals, spare: Mutex::new(Vec::new()) })
    }

    /// Rounds one layer; the codes do not depend on the number of threads. `alone`: under a global scale of its own, where there is
    /// one, to see how long it takes.
    pub(super) fn layer(&self, spec: &LinearSpec, alone: bool) -> Result<Layer, CliError> {
        if let Some(layer) = self.layer_in_runs(spec)? {
            return Ok(layer);
        }
        let (weight, matrix) = self.round(spec, alone)?;
        let (sha256, dtype) = weight.stored.clone();
        let source = SourceRecord::with_matrix(sha256, dtype, &weight.data, &matrix);
        let layer = Layer::new(self.args, spec, &weight, matrix, source, None);
        self.spare().push(weight.data);
        layer
    }

    /// [`Rounding::layer`] of a weight whose groups are runs of a row: each run of groups is read, hashed, rounded and compared with
    /// its codes while it is in the cache. `None` for other weights, and for such as are refused: then the whole tells why.
    fn layer_in_runs(&self, spec: &LinearSpec) -> Result<Option<Layer>, CliError> {
        /// Values of a run: with their codes and what is read they take half of a core's own cache.
        const RUN: usize = 1 << 16;
        let (n, k, args) = (spec.n(), spec.k(), weights_of(self.config, &spec.module)?);
        let group = match args.granularity {
            Granularity::PerGroup(len) if len > 0 && k % len == 0 => len,
            Granularity::PerChannel if k > 0 => k,
            _ => return Ok(None),
        };
        if args.has_global_scale() || self.ckpt.is_quantized(&spec.module) {
            return Ok(None);
        }
        let name = source_name(self.ckpt, &spec.module);
        let (codes, zeros) = (Vec::with_capacity(n * k), Vec::new());
        let mut matrix = QuantizedMatrix { args, n, k, codes, scales: Vec::new(), zeros, global_scale: None };
        let (mut sums, mut degenerate, mut refused) = (Differences::default(), 0, false);
        let sha256 = self.ckpt.read_f32_runs(&name, group * (RUN / group).max(1), |w| {
            let groups = w.len() / group;
            let rounded = dsq_kernels::quantize::quantize_here(w, groups, group, args);
            let nothing = QuantizedMatrix::degenerate_groups(w, groups, group, args);
            let (Ok(part), Ok(nothing), false) = (rounded, nothing, refused) else {
                refused = true;
                return;
            };
            sums.add_matrix(w, &part);
            degenerate += nothing.len();
            matrix.codes.extend_from_slice(&part.codes);
            matrix.scales.extend_from_slice(&part.scales);
            matrix.zeros.extend_from_slice(&part.zeros);
        })?;
        if refused || matrix.codes.len() != n * k {
            return Ok(None);
        }
        let source = Some(sums.record(sha256, stored_type(self.ckpt, &name)));
        let (module, shape) = (spec.module.clone(), spec.shape.clone());
        let tensor = ExportTensor::Linear { module, shape, matrix, activation: None, source, order: None };
        Ok(Some(Layer { tensor, degenerate }))
    }

    /// The weight of the source and what it becomes.
    fn round(&self, spec: &LinearSpec, alone: bool) -> Result<(Weight, QuantizedMatrix), CliError> {
        let spare = self.spare().pop();
        let weight = Weight::read(self.ckpt, &spec.module, spare.unwrap_or_default())?;
        let (n, k, data) = (spec.n(), spec.k(), &weight.data);
        let args = weights_of(self.config, &spec.module)?;
        let matrix = match self.globals.get(&spec.module).copied() {
            None if args.has_global_scale() && alone => QuantizedMatrix::quantize(data, n, k, args),
            None => self.pool.install(|| dsq_kernels::quantize::quantize(data, n, k, args)),
            global => QuantizedMatrix::quantize_under(data, n, k, args, global),
        };
        let matrix = matrix.map_err(|e| CliError::from(CheckpointError::quant(&self.args.model, &weight.name, e)))?;
        Ok((weight, matrix))
    }

    fn spare(&self) -> MutexGuard<'_, Vec<Vec<f32>>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
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
