//! Quantization by training with little compute: first one block (layer of the model) at a time against the float block's
//! outputs, then end to end against the float model's predictions. Weights, scales and zero points are trained on the grid
//! that ships, and what was trained is exported, codes and scales. Not the training of a model from a recipe (see `lm`).
//!
//! A block starts at GPTAQ's codes: its latent weights are the values that GPTQ rounded. Its inputs are the outputs of the
//! quantized blocks before it, its targets those of the float block on float inputs, so it also makes up for what the
//! blocks before it got wrong (Li et al., BRECQ, arXiv:2102.05426; Chen et al., EfficientQAT, arXiv:2407.11062). A block
//! that training did not bring nearer to its targets keeps these codes.

use super::{Blocks, PtqLinear, PtqMethod, Run, device, float_layer, float_model};
use crate::TrainError;
use crate::adamw::{AdamW, NamedGradients, ParamGroup};
use crate::qat::{GridRates, quantize_inputs, rms};
use crate::random::permutation;
use crate::schedule::learning_rate;
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use dsq_model::layers::Linear;
use dsq_model::{Layer, Sequences, Teacher, parameter_path};
use rand_chacha::{ChaCha8Rng, rand_core::SeedableRng};
use std::sync::Arc;

/// How much is trained, and how fast.
///
/// Learning rates are relative: a step of Adam moves a weight by about `rate` times the root mean square of its matrix. They
/// rise over the first twentieth of the steps and fall to zero along half a cosine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tuning {
    /// Passes over the calibration windows for each block.
    pub epochs: usize,
    /// Learning rate of the weights of a block.
    pub weight_rate: f64,
    /// Learning rate of the scales and zero points of a block.
    pub scale_rate: f64,
    /// Steps of end-to-end training after the last block, one batch of windows each; 0: none.
    pub steps: usize,
    /// Learning rate of the weights in these steps; 0: the codes stay as they are and only the scales are trained.
    pub end_weight_rate: f64,
    /// Learning rate of scales and zero points in these steps.
    pub end_scale_rate: f64,
    /// Seed of the order of the batches.
    pub seed: u64,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            epochs: 2,
            weight_rate: 2e-3,
            scale_rate: 1e-3,
            steps: 0,
            end_weight_rate: 0.0,
            end_scale_rate: 1e-3,
            seed: 0,
        }
    }
}

impl Tuning {
    /// Walks of the batches through a layer beyond those that choose codes: targets, the error before and after, the epochs, and the
    /// way on.
    pub(super) fn walks(&self) -> usize {
        self.epochs + 4
    }
}

/// What training did to a block: the squared error of its outputs over the square of what the float block adds to its
/// input, both summed over the calibration tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockFit {
    /// Layer, from 0.
    pub layer: usize,
    /// With the codes that training starts from, GPTAQ's or the nearest.
    pub before: f64,
    /// After training.
    pub after: f64,
    /// Whether the trained codes are kept.
    pub kept: bool,
}

/// `count` indices in random order.
pub(super) fn shuffled(count: usize, seed: u64, stream: u64) -> Vec<usize> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(stream);
    permutation(&mut rng, count)
}

/// AdamW without decay for latent weights and grids, `steps` of it.
struct Tuner {
    /// What is trained, for messages.
    what: String,
    adam: AdamW,
    weight_rate: f64,
    grids: GridRates,
    steps: usize,
}

impl Tuner {
    fn new(what: String, weight_rate: f64, grids: GridRates, steps: usize) -> Self {
        Self { what, adam: AdamW::new(0.9, 0.95, 1e-8), weight_rate, grids, steps }
    }

    /// Update number `step` (from 0); gives the loss before it too.
    fn step<M: Module>(&mut self, module: M, loss: Tensor<1>, step: usize) -> Result<(M, f64), TrainError> {
        let error = |value| TrainError::Numerics { what: self.what.clone(), step: step as u64 + 1, value };
        let value = scalar(&loss);
        if !value.is_finite() {
            return Err(error(value));
        }
        let grads = NamedGradients::take(&module, loss.backward());
        let norm = grads.norm();
        if !norm.is_finite() {
            return Err(error(norm));
        }
        let group = |path: &str, _: usize, values: &[f32]| {
            let weight = || ParamGroup { rate: self.weight_rate * rms(values), decay: 0.0 };
            self.grids.group(path, values).unwrap_or_else(weight)
        };
        let rate = learning_rate(step, self.steps, (self.steps / 20).max(1), 1.0);
        // Adam does not know the size of a gradient: nothing to clip.
        Ok((self.adam.step(module, &grads, rate, norm, f64::INFINITY, group), value))
    }
}

/// Linears by the paths of their parameters.
fn by_path(linears: Vec<(String, &Linear)>) -> impl Iterator<Item = (String, &Linear)> {
    linears.into_iter().map(|(name, l)| (parameter_path(&name), l))
}

pub(super) fn scalar(t: &Tensor<1>) -> f64 {
    t.clone().into_data().try_to_vec::<f32>().map_or(f64::NAN, |v| f64::from(v[0]))
}

impl Run<'_> {
    /// Quantizes one layer, trains it, and moves both residual streams past it.
    pub(super) fn blockwise_layer(&mut self, float: Layer) -> Result<(), TrainError> {
        let inputs = (self.stream.clone(), self.float_stream.clone());
        self.float_layer = self.settings.method.follows_float().then(|| float.clone());
        let first = self.outcome.linears.len();
        self.starts.clear();
        let mut quantized = self.quantize_layer(float.clone())?;
        self.float_layer = None;
        let passed = std::mem::replace(&mut self.float_stream, inputs.1);
        self.stream = inputs.0;

        let targets = match self.settings.method.follows_float() {
            // GPTAQ took the float model's stream past the layer.
            true => passed,
            false => {
                self.float_stream.iter().zip(&self.stream).map(|(x, (b, _))| float.forward(x.clone(), b)).collect()
            }
        };
        self.tick(self.stream.len());
        if self.starts.is_empty() {
            // The whole block stays in float.
            self.advance(|x, batch| float.forward(x, batch));
            self.tick((self.settings.tuning.walks() - 2) * self.stream.len());
            self.float_stream = targets;
            return Ok(());
        }
        let mut student = float_layer(self.checkpoint, self.progress.layer, &Device::flex().autodiff())?;
        // AWQ's scales, if there are such, lie in the norms, in the router and in the bias of v.
        for ((_, norm), (_, from)) in student.norms_mut().into_iter().zip(quantized.norms_mut()) {
            norm.set_values(from.values());
        }
        if let (Some(router), Some(from)) = (student.router_mut(), quantized.router_mut()) {
            router.set_values(from.values());
        }
        self.quantize_inputs(&mut student);
        for ((_, linear), (_, from)) in student.linears_mut().into_iter().zip(quantized.linears()) {
            from.bias().into_iter().for_each(|bias| linear.set_bias(bias));
        }
        student = student.freeze_floats();
        for (part, linear) in student.linears_mut() {
            let module = self.module(&part);
            let start = self.starts.iter().position(|(p, _)| *p == part).map(|i| self.starts.swap_remove(i).1);
            let done = self.outcome.linears[first..].iter().find(|l| l.module == module);
            let (Some(start), Some(done)) = (start, done) else {
                // A layer that stays in float is not trained either.
                *linear = linear.clone().no_grad();
                continue;
            };
            linear.learn_from(start, &done.matrix);
        }
        let mut fit = BlockFit { layer: self.progress.layer, before: 0.0, after: 0.0, kept: false };
        fit.before = self.block_error(&student, &targets);
        let start = student.clone();
        let trained = match self.settings.method {
            PtqMethod::AutoRound => self.round_block(student, &targets)?,
            _ => self.train_block(student, &targets)?,
        };
        fit.after = self.block_error(&trained, &targets);
        fit.kept = fit.after < fit.before;
        let student = if fit.kept { trained } else { start };
        self.outcome.blocks.push(fit);

        for ((part, linear), (_, out)) in student.linears().into_iter().zip(quantized.linears_mut()) {
            let module = self.module(&part);
            let quant = |source| TrainError::Quant { module: module.clone(), source };
            let Some(matrix) = linear.quantized().map_err(quant)? else { continue };
            out.set_values(matrix.dequantize());
            if self.settings.tuning.steps > 0 {
                self.latents.push((module.clone(), linear.values()));
            }
            if let Some(done) = self.outcome.linears[first..].iter_mut().find(|l| l.module == module) {
                if fit.kept {
                    done.fit = None;
                }
                done.matrix = matrix;
            }
        }
        self.advance(|x, batch| quantized.forward(x, batch));
        self.float_stream = targets;
        Ok(())
    }

    /// The squared error of the outputs of `layer`, over what the float block adds to its input, squared.
    fn block_error(&mut self, layer: &Layer, targets: &[Tensor<3>]) -> f64 {
        let layer = layer.valid();
        let (mut error, mut size) = (0.0f64, 0.0f64);
        for i in 0..self.stream.len() {
            let (batch, x) = &self.stream[i];
            let y = layer.forward(x.clone(), batch);
            error += scalar(&(y - targets[i].clone()).powi_scalar(2).sum());
            size += scalar(&(targets[i].clone() - self.float_stream[i].clone()).powi_scalar(2).sum());
            self.tick(1);
        }
        if size > 0.0 { error / size } else { 0.0 }
    }

    fn train_block(&mut self, mut student: Layer, targets: &[Tensor<3>]) -> Result<Layer, TrainError> {
        let tuning = self.settings.tuning;
        let steps = tuning.epochs * self.stream.len();
        let grids = GridRates::new(tuning.scale_rate, by_path(student.linears()));
        let what = format!("model.layers.{}: block-wise training", self.progress.layer);
        let mut tuner = Tuner::new(what, tuning.weight_rate, grids, steps);
        let tracked = |x: &Tensor<3>| x.clone().autodiff();
        for step in 0..steps {
            let epoch = step / self.stream.len();
            let stream = (self.progress.layer * tuning.epochs + epoch) as u64;
            let i = shuffled(self.stream.len(), tuning.seed, stream)[step % self.stream.len()];
            let (batch, x): &(Sequences, Tensor<3>) = &self.stream[i];
            let y = student.forward(tracked(x), batch);
            let loss = (y - tracked(&targets[i])).powi_scalar(2).mean();
            student = tuner.step(student, loss, step)?.0;
            self.tick(1);
        }
        Ok(student)
    }

    /// Trains all quantized layers together against the float model's predictions on the windows of `text`.
    pub(super) fn end_to_end(&mut self, text: &super::Calibration) -> Result<(), TrainError> {
        // What the blocks needed is in the way of what this needs.
        self.float_stream.clear();
        self.stream.clear();
        let tuning = self.settings.tuning;
        let written = self.settings.journal.map(|j| j.blocks()).transpose()?;
        if self.latents.is_empty() && !written.as_ref().is_some_and(Blocks::has_latents) {
            self.tick(tuning.steps);
            return self.finish_end(0);
        }
        let teacher = float_model(self.checkpoint, &device())?;
        let mut student = float_model(self.checkpoint, &Device::flex().autodiff())?;
        for (name, norm) in student.norms_mut() {
            if let Some(changed) = self.outcome.norms.iter().find(|n| n.name == name) {
                norm.set_values(changed.values.clone());
            }
        }
        for (name, router) in student.routers_mut() {
            if let Some(changed) = self.outcome.norms.iter().find(|n| n.name == name) {
                router.set_values(changed.values.clone());
            }
        }
        for (module, linear) in student.linears_mut() {
            if let Some(changed) = self.outcome.norms.iter().find(|n| n.name == format!("{module}.bias")) {
                linear.set_bias(changed.values.clone());
            }
        }
        let mut student = quantize_inputs(student, self.settings.config, &self.outcome.inputs).freeze_floats();
        let mut latents = std::mem::take(&mut self.latents);
        for (module, linear) in student.linears_mut() {
            let latent = match &written {
                Some(written) => written.latent(&module)?,
                None => latents.iter_mut().find(|(m, _)| *m == module).map(|(_, v)| std::mem::take(v)),
            };
            let (Some(latent), Some(done)) = (latent, self.finished(written.as_ref(), &module)?) else {
                *linear = linear.clone().no_grad();
                continue;
            };
            match tuning.end_weight_rate {
                0.0 => linear.freeze_codes(&done.matrix),
                _ => linear.learn_from(latent, &done.matrix),
            }
        }
        let batches: Vec<Vec<i32>> = text.batches().collect();
        let grids = GridRates::new(tuning.end_scale_rate, by_path(student.linears()));
        let mut tuner = Tuner::new("end-to-end training".into(), tuning.end_weight_rate, grids, tuning.steps);
        let mut losses = Vec::with_capacity(tuning.steps);
        for step in 0..tuning.steps {
            let order = shuffled(batches.len(), tuning.seed, u64::MAX - (step / batches.len()) as u64);
            let ids = Arc::new(batches[order[step % batches.len()]].clone());
            let b = ids.len() / text.context();
            let logits = teacher.logits(ids.clone(), b).into_data().try_into_vec::<f32>().expect("models are f32");
            let labels = Arc::new(vec![dsq_model::IGNORED; ids.len()]);
            let target = Teacher { logits: Arc::new(logits), temperature: 1.0 };
            let loss = student.distill_loss(ids, labels, b, target, 1.0, None);
            let (trained, value) = tuner.step(student, loss, step)?;
            student = trained;
            losses.push(value);
            self.tick(1);
        }
        drop(teacher);
        let mut count = 0;
        for (module, linear) in student.linears() {
            let quant = |source| TrainError::Quant { module: module.clone(), source };
            let Some(matrix) = linear.quantized().map_err(quant)? else { continue };
            let Some(mut done) = self.finished(written.as_ref(), &module)? else { continue };
            (done.matrix, done.fit) = (matrix, None);
            match self.outcome.linears.iter_mut().find(|l| l.module == module) {
                Some(old) => *old = done,
                None => self.record_end(count, done)?,
            }
            count += 1;
        }
        let tenth = losses.len().div_ceil(10);
        let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len().max(1) as f64;
        self.outcome.end_to_end = Some([mean(&losses[..tenth]), mean(&losses[losses.len() - tenth..])]);
        self.finish_end(count)
    }

    /// What a layer became, from the journal where it was `written`.
    fn finished(&self, written: Option<&Blocks>, module: &str) -> Result<Option<PtqLinear>, TrainError> {
        match written {
            Some(blocks) => blocks.find(module).map(|i| blocks.read(i)).transpose(),
            None => Ok(self.outcome.linears.iter().find(|l| l.module == module).cloned()),
        }
    }
}
