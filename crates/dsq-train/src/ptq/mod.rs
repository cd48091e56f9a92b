//! Post-training quantization of a Llama with calibration data: scaled input columns (`awq.rs`), and then rounding, GPTQ
//! (`gptq.rs`, `gptaq.rs`), learned rounding (`autoround.rs`) or training of weights, scales and zero points on the grid, block by block
//! and then end to end (`blockwise.rs`); static grids of inputs. But for the steps end to end, one layer of the
//! model is in memory at a time, beside the residual stream of all calibration windows; the activations inside a layer are
//! run again for each set of linears that share inputs, and never kept. What a layer became goes into the journal, where there is one. Not rounding to nearest (that needs no data:
//! `QuantizedMatrix::quantize`), not the export.
//!
//! The walk is *truly sequential*: q, k and v are quantized first, o sees the inputs that they make once quantized, then
//! gate and up, then down, and the next layer sees the output of the quantized one. So what is measured of a layer's
//! inputs is what the exported model will feed it. (AWQ scales v for o and up for down, so there o and down are measured
//! before v and up are rounded.)

mod autoround;
mod awq;
mod blockwise;
mod calibration;
pub mod cnn;
mod gptaq;
mod gptq;
mod hessian;
mod journal;
mod kv_cache;
mod layer;
mod refit;
mod sensitivity;

pub use blockwise::{BlockFit, Tuning};
pub use calibration::Calibration;
pub use gptq::{Factor, Fit, dampings, quantize as gptq_quantize};
pub use hessian::Hessian;
pub use journal::{Blocks, Found, Journal};
pub use kv_cache::kv_grids;
pub use sensitivity::{Choice, Sensitivity, allocate, sensitivity};

use crate::TrainError;
use crate::qat::quantize_inputs;
use burn::tensor::{Device, Tensor};
use dsq_checkpoint::{Checkpoint, LlamaConfig, ModelConfig};
use dsq_kernels::fake_quant::largest_magnitude;
use dsq_model::layers::{Embedding, RmsNorm};
use dsq_model::{Layer, Llama, ModelError, Sequences};
use dsq_quant::{FloatType, InputGrid, QuantArgs, QuantConfig, QuantizedMatrix};
use rayon::prelude::*;
use std::sync::Arc;

/// How codes are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PtqMethod {
    /// Rounded to nearest: with [`Scaling::Awq`], AWQ; without, nothing that needs data.
    Rtn,
    /// Column by column, each against the error of the columns before it.
    Gptq,
    /// The same, for weights that first take up what the layers before them got wrong: see `gptaq.rs`.
    Gptaq,
    /// By training, from GPTAQ's codes on: see [`Tuning`].
    Blockwise,
    /// By learned rounding, block by block, from the nearest codes on: AutoRound, see `autoround.rs`.
    AutoRound,
}

impl PtqMethod {
    /// Whether GPTQ chooses codes, or those that training starts from.
    fn factors(self) -> bool {
        matches!(self, Self::Gptq | Self::Gptaq | Self::Blockwise)
    }

    /// Whether GPTQ's targets are those of the float model's inputs.
    fn follows_float(self) -> bool {
        matches!(self, Self::Gptaq | Self::Blockwise)
    }

    /// Whether blocks are trained.
    fn trains(self) -> bool {
        matches!(self, Self::Blockwise | Self::AutoRound)
    }
}

/// What input columns are multiplied by before a method chooses codes, and what makes them divided by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scaling {
    /// Nothing.
    None,
    /// AWQ's scales: weights of inputs of large magnitude become larger, so that their error is smaller.
    Awq,
    /// SmoothQuant's with this alpha, 0 to 1: inputs of large magnitude become smaller, so that their own grid is finer.
    Smooth(f64),
}

/// How far a run is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PtqProgress {
    /// Batches done, over all walks of all layers, and steps of the training after them.
    pub done: usize,
    /// All of them.
    pub total: usize,
    /// Layer at work, from 0; the number of layers for the head.
    pub layer: usize,
}

/// A quantized linear layer.
#[derive(Debug, Clone)]
pub struct PtqLinear {
    /// Module name.
    pub module: String,
    /// What ships.
    pub matrix: QuantizedMatrix,
    /// How well it fits the calibration data; `None` for a layer that was trained further.
    pub fit: Option<Fit>,
    /// What AWQ multiplied the weight by before it was rounded; `None`: nothing.
    pub rescale: Option<Rescale>,
}

impl PtqLinear {
    /// The values of the codes with AWQ's scales taken out again, `[n, k]`: to be compared with the source's weight.
    pub fn values(&self) -> Vec<f32> {
        let mut values = self.matrix.dequantize();
        if let Some(r) = &self.rescale {
            r.undo(&mut values);
        }
        values
    }
}

/// What a weight `[n, k]` was multiplied by.
#[derive(Debug, Clone, PartialEq)]
pub struct Rescale {
    /// Factor of each row, `[n]`.
    pub rows: Vec<f32>,
    /// Factor of each column, `[k]`.
    pub columns: Vec<f32>,
}

impl Rescale {
    fn apply(&self, values: &mut [f32]) {
        for (row, r) in values.chunks_mut(self.columns.len().max(1)).zip(&self.rows) {
            row.iter_mut().zip(&self.columns).for_each(|(v, c)| *v *= c * r);
        }
    }

    fn undo(&self, values: &mut [f32]) {
        for (row, r) in values.chunks_mut(self.columns.len().max(1)).zip(&self.rows) {
            row.iter_mut().zip(&self.columns).for_each(|(v, c)| *v = *v / c / r);
        }
    }
}

/// A norm weight, or the bias of v_proj, that AWQ divided by the scales of the layers after it; or a router whose columns were multiplied
/// by them.
#[derive(Debug, Clone, PartialEq)]
pub struct PtqNorm {
    /// Tensor name.
    pub name: String,
    /// The new values, row major, already rounded to `dtype`.
    pub values: Vec<f32>,
    /// The dtype it is to be stored in.
    pub dtype: FloatType,
}

/// What a run gives.
#[derive(Debug, Clone, Default)]
pub struct PtqOutcome {
    /// The layers that the scheme names, in the order of the model. Of a run with a journal none: they lie there ([`Journal::blocks`]).
    pub linears: Vec<PtqLinear>,
    /// Norms, biases and routers that AWQ or SmoothQuant changed.
    pub norms: Vec<PtqNorm>,
    /// Static grids of the inputs of layers whose scheme has such, by module.
    pub inputs: Vec<(String, InputGrid)>,
    /// What block-wise training did, block by block.
    pub blocks: Vec<BlockFit>,
    /// Mean divergence from the float model (nats a token) in the first and the last tenth of the end-to-end steps.
    pub end_to_end: Option<[f64; 2]>,
    /// Layers of experts that no calibration token was sent to: they are rounded to nearest. A stored grid of their inputs is that of
    /// all tokens.
    pub never_hit: Vec<String>,
}

impl PtqOutcome {
    /// The model that ships, in float: `float` with the values of the codes and the changed norms and biases, and inputs as `config`
    /// has them.
    ///
    /// # Errors
    /// As [`Llama::from_tensors`].
    pub fn model(&self, float: &Llama, config: &QuantConfig) -> Result<Llama, ModelError> {
        let mut tensors = float.named_tensors();
        for (name, _, data) in &mut tensors {
            let module = name.strip_suffix(".weight").unwrap_or(name);
            if let Some(l) = self.linears.iter().find(|l| l.module == module) {
                *data = l.matrix.dequantize();
            } else if let Some(n) = self.norms.iter().find(|n| n.name == *name) {
                data.clone_from(&n.values);
            }
        }
        let find = |name: &str| tensors.iter().find(|t| t.0 == name).map(|t| t.2.as_slice());
        Llama::from_tensors(float.config(), &device(), find).map(|m| quantize_inputs(m, config, &self.inputs))
    }
}

/// What is quantized, and how.
#[derive(Debug, Clone, Copy)]
pub struct PtqSettings<'a> {
    /// The schemes.
    pub config: &'a QuantConfig,
    /// How codes are chosen.
    pub method: PtqMethod,
    /// Whether and how input columns are scaled first.
    pub scaling: Scaling,
    /// Whether the observer `Mse` counts the error of a column by the mean square of its inputs.
    pub weighted: bool,
    /// Dtype in which float tensors will be stored; `None`: as the source stores them.
    pub float_dtype: Option<FloatType>,
    /// Static grids of inputs, by module, that are known before (of what [`crate::observe_inputs`] gives, say): codes are chosen on
    /// them, and they ship. Not with [`PtqSettings::scaling`], which makes other inputs. Other layers get their own.
    pub inputs: &'a [(String, InputGrid)],
    /// For [`PtqMethod::Blockwise`] and [`PtqMethod::AutoRound`].
    pub tuning: Tuning,
    /// Text of the end-to-end steps, of the model's vocabulary; `None`: that of the calibration.
    pub end_text: Option<&'a Calibration>,
    /// Where finished blocks are written down, and taken up from.
    pub journal: Option<&'a Journal>,
}

impl<'a> PtqSettings<'a> {
    /// `method` without scaled columns, float tensors as they are, and the usual training.
    pub fn new(config: &'a QuantConfig, method: PtqMethod) -> Self {
        let (scaling, weighted, tuning) = (Scaling::None, false, Tuning::default());
        Self {
            config,
            method,
            scaling,
            weighted,
            float_dtype: None,
            inputs: &[],
            tuning,
            end_text: None,
            journal: None,
        }
    }
}

/// Walks of the batches through layer `i`: one for the inputs of each set of linears, one to pass its attention and one to pass its
/// feed-forward block; where scales are searched (`again`), one more for o and for each down, which are measured for their scales
/// and once again for their codes, and one for what all experts read where its columns are `scaled`.
fn walks(model: &LlamaConfig, i: usize, again: bool, scaled: bool) -> usize {
    let again = usize::from(again);
    let attention = match model.latent {
        None => 2 + again,
        Some(a) => 3 + usize::from(a.q_rank.is_some()),
    };
    let blocks = model.experts_of(i).map_or(1, |e| e.count + usize::from(e.shared > 0));
    let before_experts = usize::from(scaled && model.experts_of(i).is_some());
    attention + blocks * (2 + again) + 2 + before_experts
}

/// Quantizes every linear layer of `checkpoint` that the scheme names. Runs on the current rayon pool; any number of
/// threads gives the same bits, and so does a run that goes on from a journal.
///
/// # Errors
/// [`TrainError::Setting`] for grids of inputs that do not fit, [`TrainError::Model`] for another architecture or tensors that cannot be
/// read; [`TrainError::Activations`] (exit code 6) when calibration meets a value that is not finite; [`TrainError::Quant`] naming the layer.
pub fn quantize_llama(
    checkpoint: &Checkpoint,
    settings: PtqSettings,
    calibration: &Calibration,
    on_progress: &mut dyn FnMut(&PtqProgress),
) -> Result<PtqOutcome, TrainError> {
    let model = match checkpoint.config() {
        ModelConfig::Llama(c) => c,
        other => return Err(ModelError::Architecture { expected: "llama", got: format!("{other:?}") }.into()),
    };
    check_inputs(&settings)?;
    let mut run = Run::new(checkpoint, model, settings, calibration, on_progress)?;
    let done = run.restore()?;
    for i in done..model.num_hidden_layers {
        run.progress.layer = i;
        let layer = float_layer(checkpoint, i, &device())?;
        match settings.method {
            PtqMethod::Rtn | PtqMethod::Gptq => drop(run.quantize_layer(layer)?),
            PtqMethod::Gptaq => {
                run.float_layer = Some(layer.clone());
                run.quantize_layer(layer)?;
                run.float_layer = None;
            }
            PtqMethod::Blockwise | PtqMethod::AutoRound => run.blockwise_layer(layer)?,
        }
        run.record(i)?;
    }
    run.progress.layer = model.num_hidden_layers;
    if done <= model.num_hidden_layers {
        run.head()?;
        run.record(model.num_hidden_layers)?;
    }
    if settings.method.trains() && settings.tuning.steps > 0 && !run.restore_end()? {
        run.end_to_end(settings.end_text.unwrap_or(calibration))?;
    }
    Ok(run.outcome)
}

/// Refuses grids that cannot be those of the inputs.
fn check_inputs(settings: &PtqSettings) -> Result<(), TrainError> {
    let refuse = |expected: String, got: String| Err(TrainError::Setting { field: "inputs".into(), expected, got });
    if let (Some((module, _)), true) = (settings.inputs.first(), settings.scaling != Scaling::None) {
        let expected = "no grids known before, where input columns are scaled".into();
        return refuse(expected, format!("one of {module} and {:?}", settings.scaling));
    }
    for (module, grid) in settings.inputs {
        let scheme = settings.config.scheme_for(module).and_then(|s| s.activations);
        if scheme != Some(grid.args) || grid.params.is_none() {
            let shown = |args: Option<QuantArgs>| {
                args.map_or("float".into(), |a| format!("{} {:?}", a.qtype.name(), a.granularity))
            };
            let expected = format!("a stored grid of the scheme's activations for {module} ({})", shown(scheme));
            return refuse(expected, shown(Some(grid.args)));
        }
    }
    Ok(())
}

/// Layer `i` of a checkpoint in float: of a source that is codes the values of these, its inputs and its cache on no grid.
fn float_layer(checkpoint: &Checkpoint, i: usize, device: &Device) -> Result<Layer, TrainError> {
    Ok(Layer::from_checkpoint(checkpoint, i, device)?.without_grids())
}

/// [`float_layer`] of a whole model.
fn float_model(checkpoint: &Checkpoint, device: &Device) -> Result<Llama, TrainError> {
    Ok(Llama::from_checkpoint(checkpoint, device)?.without_grids())
}

/// A float device without gradients.
fn device() -> Device {
    Device::flex()
}

/// The values of a tensor, row major.
fn values<const D: usize>(t: Tensor<D>) -> Vec<f32> {
    t.into_data().try_into_vec::<f32>().expect("models are f32")
}

/// The residual stream of each batch before the first layer; `table` is the embedding.
fn embedded(model: &LlamaConfig, table: Vec<f32>, calibration: &Calibration) -> Vec<(Sequences, Tensor<3>)> {
    let embedding = Embedding::from_values(table, [model.vocab_size, model.hidden_size], &device());
    let t = calibration.context();
    let mut stream: Vec<(Sequences, Tensor<3>)> = Vec::new();
    for ids in calibration.batches() {
        let b = ids.len() / t;
        // All batches but the last have one shape.
        let like = stream.last().filter(|(_, x)| x.dims()[0] == b).map(|(s, _)| s.clone());
        let batch = like.unwrap_or_else(|| Sequences::new(model, b, t));
        stream.push((batch, embedding.forward(Arc::new(ids), b)));
    }
    stream
}

/// A run at the input of a layer.
struct Run<'a> {
    checkpoint: &'a Checkpoint,
    model: &'a LlamaConfig,
    settings: PtqSettings<'a>,
    /// The residual stream of each batch.
    stream: Vec<(Sequences, Tensor<3>)>,
    /// The same in the float model, for block-wise training and GPTAQ.
    float_stream: Vec<Tensor<3>>,
    /// The layer at work as it came, where GPTAQ is choosing codes.
    float_layer: Option<Layer>,
    /// Where the training of the layer at work starts: what was rounded, by part.
    starts: Vec<(String, Vec<f32>)>,
    /// Trained weights before they are rounded, by module, kept for the end-to-end steps.
    latents: Vec<(String, Vec<f32>)>,
    progress: PtqProgress,
    on_progress: &'a mut dyn FnMut(&PtqProgress),
    outcome: PtqOutcome,
}

impl<'a> Run<'a> {
    fn new(
        checkpoint: &'a Checkpoint,
        model: &'a LlamaConfig,
        settings: PtqSettings<'a>,
        calibration: &Calibration,
        on_progress: &'a mut dyn FnMut(&PtqProgress),
    ) -> Result<Self, TrainError> {
        let stream = embedded(model, checkpoint.read_f32("model.embed_tokens.weight")?, calibration);
        let trains = settings.method.trains();
        let (tuned, steps) = if trains { (settings.tuning.walks(), settings.tuning.steps) } else { (0, 0) };
        let again = settings.scaling == Scaling::Awq && settings.method != PtqMethod::Rtn;
        let scaled = settings.scaling != Scaling::None;
        let walks = (0..model.num_hidden_layers).map(|i| walks(model, i, again, scaled) + tuned).sum::<usize>()
            + usize::from(settings.config.scheme_for("lm_head").is_some());
        let progress = PtqProgress { done: 0, total: walks * stream.len() + steps, layer: 0 };
        let beside = trains || settings.method == PtqMethod::Gptaq;
        let float_stream = if beside { stream.iter().map(|(_, x)| x.clone()).collect() } else { Vec::new() };
        let (starts, latents, outcome) = (Vec::new(), Vec::new(), PtqOutcome::default());
        let float_layer = None;
        Ok(Self {
            checkpoint,
            model,
            settings,
            stream,
            float_stream,
            float_layer,
            starts,
            latents,
            progress,
            on_progress,
            outcome,
        })
    }

    /// The grid of a layer of the model, if it gets one.
    fn args(&self, module: &str) -> Option<QuantArgs> {
        self.settings.config.scheme_for(module).map(|s| s.weights)
    }

    /// The full name of a linear of the layer at work.
    fn module(&self, part: &str) -> String {
        format!("model.layers.{}.{part}", self.progress.layer)
    }

    /// Puts the inputs of a layer's linears on their grids, as far as these are known: what is measured is what the
    /// exported model will compute.
    fn quantize_inputs(&self, layer: &mut Layer) {
        for (part, linear) in layer.linears_mut() {
            let module = self.module(&part);
            let fixed = self.outcome.inputs.iter().find(|(m, _)| *m == module).map(|(_, grid)| *grid);
            linear.set_inputs(fixed.or(InputGrid::dynamic(self.activations(&module))));
        }
    }

    /// The scheme of a layer's inputs.
    fn activations(&self, module: &str) -> Option<QuantArgs> {
        self.settings.config.scheme_for(module).and_then(|s| s.activations)
    }

    /// The static grid of the inputs of `module`, known before or from the range that calibration met; kept for the export.
    fn fix_inputs(&mut self, module: &str, h: &Hessian) -> Result<Option<InputGrid>, TrainError> {
        let Some(args) = self.activations(module).filter(|a| !a.is_dynamic()) else { return Ok(None) };
        let [lo, hi] = h.range();
        let grid = match self.settings.inputs.iter().find(|(m, _)| m == module) {
            Some((_, grid)) => *grid,
            None => InputGrid::of_range(args, lo, hi)
                .map_err(|source| TrainError::Quant { module: format!("{module}, input"), source })?,
        };
        self.outcome.inputs.push((module.to_owned(), grid));
        Ok(Some(grid))
    }

    fn tick(&mut self, batches: usize) {
        self.progress.done += batches;
        (self.on_progress)(&self.progress);
    }

    /// What the inputs that `input` makes of the residual stream in `layer` are like; their columns were divided by `scales`, if
    /// there are such. `parts` share them; where none of them is quantized, nothing is run.
    fn observe(
        &mut self,
        layer: &Layer,
        parts: &[&str],
        scales: Option<&[f32]>,
        input: impl Fn(&Layer, Tensor<3>, &Sequences) -> Tensor<3>,
    ) -> Result<Option<Hessian>, TrainError> {
        if !parts.iter().any(|p| self.args(&self.module(p)).is_some()) {
            self.tick(self.stream.len());
            return Ok(None);
        }
        let float = self.float_layer.take();
        let of_float = float.as_ref().map(|float| {
            |x: Tensor<3>, batch: &Sequences| {
                let mut y = values(input(float, x, batch));
                if let Some(s) = scales {
                    y.par_chunks_mut(s.len()).for_each(|row| row.iter_mut().zip(s).for_each(|(v, s)| *v /= s));
                }
                y
            }
        });
        let h = self.hessian(|x, batch| input(layer, x, batch), of_float);
        self.float_layer = float;
        match h.as_ref().and_then(Hessian::not_finite) {
            Some(value) => Err(TrainError::Activations { module: self.module(parts[0]), value }),
            None => Ok(h),
        }
    }

    /// [`Run::observe`] of what only AWQ's scales are searched on: the float model's inputs are not asked for.
    fn observe_alone(
        &mut self,
        layer: &Layer,
        parts: &[&str],
        input: impl Fn(&Layer, Tensor<3>, &Sequences) -> Tensor<3>,
    ) -> Result<Option<Hessian>, TrainError> {
        let float = self.float_layer.take();
        let h = self.observe(layer, parts, None, input);
        self.float_layer = float;
        h
    }

    /// Of the inputs that `input` makes of the residual stream, and beside them those that `float` makes of the float model's.
    fn hessian(
        &mut self,
        input: impl Fn(Tensor<3>, &Sequences) -> Tensor<3>,
        float: Option<impl Fn(Tensor<3>, &Sequences) -> Vec<f32>>,
    ) -> Option<Hessian> {
        let mut h: Option<Hessian> = None;
        for i in 0..self.stream.len() {
            let (batch, x) = &self.stream[i];
            let x = input(x.clone(), batch);
            let k = x.dims()[2];
            let h = h.get_or_insert_with(|| Hessian::new(k));
            match &float {
                None => h.add(&values(x)),
                Some(float) => h.add_beside(&values(x), &float(self.float_stream[i].clone(), batch)),
            }
            self.tick(1);
        }
        h
    }

    /// Replaces the residual stream.
    fn advance(&mut self, next: impl Fn(Tensor<3>, &Sequences) -> Tensor<3>) {
        for i in 0..self.stream.len() {
            let (batch, x) = &self.stream[i];
            self.stream[i].1 = next(x.clone(), batch);
            self.tick(1);
        }
    }

    /// Moves the residual streams past a part of a layer.
    fn pass(&mut self, layer: &Layer, part: impl Fn(&Layer, Tensor<3>, &Sequences) -> Tensor<3>) {
        if let Some(float) = &self.float_layer {
            for (x, (batch, _)) in self.float_stream.iter_mut().zip(&self.stream) {
                *x = part(float, x.clone(), batch);
            }
        }
        self.advance(|x, batch| part(layer, x, batch));
    }

    /// Moves the residual stream past the attention of a layer.
    fn pass_attention(&mut self, layer: &Layer) {
        self.pass(layer, |layer, x, batch| {
            let attended = layer.o_input(layer.qkv_input(x.clone()), batch);
            layer.after_attention(x, attended)
        });
    }

    /// Moves the residual stream past the feed-forward block of a layer.
    fn pass_mlp(&mut self, layer: &Layer) {
        self.pass(layer, |layer, x, _| layer.after_feed_forward(x));
    }

    /// Quantizes the head, if it gets a grid. AWQ rounds it: a tied head's norm has no scales to take, and the head is
    /// one layer of many.
    fn head(&mut self) -> Result<(), TrainError> {
        let module = "lm_head".to_owned();
        let Some(args) = self.args(&module) else { return Ok(()) };
        let (n, k) = (self.model.vocab_size, self.model.hidden_size);
        let norm = self.checkpoint.read_f32("model.norm.weight")?;
        let norm = RmsNorm::from_values(norm, self.model.rms_norm_eps, &device());
        let float =
            self.settings.method.follows_float().then_some(|x: Tensor<3>, _: &Sequences| values(norm.forward(x)));
        let h = self.hessian(|x, _| norm.forward(x), float).unwrap_or_else(|| Hessian::new(k));
        if let Some(value) = h.not_finite() {
            return Err(TrainError::Activations { module, value });
        }
        let w = gptaq::targets(self.checkpoint.linear(&module)?.into_f32(), &h);
        self.fix_inputs(&module, &h)?;
        let factor = if self.settings.method.factors() { Factor::new(&h) } else { None };
        let global = QuantArgs::global_scale(largest_magnitude(&w));
        let (matrix, mut fit, _) =
            gptq::quantize_and_targets(&w, n, k, &h, factor.as_ref(), args, global, self.settings.weighted)
                .map_err(|source| TrainError::Quant { module: module.clone(), source })?;
        if !self.settings.method.factors() {
            fit.plain_rows = 0;
        }
        self.outcome.linears.push(PtqLinear { module, matrix, fit: Some(fit), rescale: None });
        Ok(())
    }
}

#[cfg(test)]
mod tests;
