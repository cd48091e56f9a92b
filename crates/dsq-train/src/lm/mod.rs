//! Training of a Llama: a float phase, a QAT phase from its result, and a float phase of equal tokens; resumed from a
//! run folder with the same bits. Not evaluation, not export, not a recipe file.

mod config;
mod data;
mod inputs;
mod speed;

pub use config::{Adapters, Distill, InputRanges, LearnedScales, LmPhase, LmTrainConfig};
pub use inputs::observe_inputs;
pub use speed::{StepTimes, time_steps};

use crate::adamw::{AdamW, NamedGradients, ParamGroup};
use crate::qat::{GRID_GLOBAL, GRID_SCALE, GRID_ZERO, GridRates, INPUT, LORA_A, LORA_B};
use crate::{Control, RunDir, Snapshot, StateTensor, TrainError, qat};
use burn::module::Module;
use burn::tensor::{Device, Tensor};
use data::Windows;
use dsq_checkpoint::{LlamaConfig, ModelConfig};
use dsq_model::{HiddenTarget, LearnedGrid, LearnedInput, Llama, Lora, Teacher};
use dsq_quant::{QuantConfig, QuantizedMatrix};
use inputs::Inputs;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::sync::Arc;

/// AdamW's constants: the betas that language models use (GPT-3, Llama), PyTorch's eps.
const BETAS: (f64, f64) = (0.9, 0.95);
const EPS: f64 = 1e-8;

/// A phase of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Float training.
    Float,
    /// Quantization-aware training.
    Qat,
    /// Float training with the tokens of the QAT phase.
    FloatEqualTokens,
    /// Nothing left to do.
    Done,
}

impl Phase {
    /// Its name in logs and reports.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Float => "float",
            Phase::Qat => "qat",
            Phase::FloatEqualTokens => "float_equal_tokens",
            Phase::Done => "done",
        }
    }
}

/// A finished step.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// Phase of the step.
    pub phase: Phase,
    /// Number of the step in its phase, from 1.
    pub step: usize,
    /// Steps of the phase.
    pub steps: usize,
    /// Number of the step in the run, from 1.
    pub global_step: usize,
    /// Steps of the run.
    pub total_steps: usize,
    /// Mean cross-entropy over the step's tokens, before its update.
    pub loss: f32,
    /// Learning rate.
    pub learning_rate: f64,
    /// Norm of the gradient before clipping.
    pub grad_norm: f64,
    /// Tokens of the step.
    pub tokens: usize,
}

/// The trained models, without gradients: what Burn records of a forward pass for these is let go by backward passes alone, so that
/// evaluating a model that has them fills the memory.
#[derive(Debug, Clone)]
pub struct LmOutcome {
    /// After the float phase.
    pub float: Llama,
    /// After the QAT phase, fake quantization switched on, static inputs on their grids, adapters merged into the weights. [`qat::release`]
    /// gives its master weights as a float model.
    pub qat: Llama,
    /// After float training with the tokens of the QAT phase.
    pub float_equal_tokens: Option<Llama>,
    /// What ships: the quantized layers of `qat`, by module name; those on blocks of GGUF are [`qat::convert_blocks`] of it.
    pub quantized: Vec<(String, QuantizedMatrix)>,
}

#[derive(Serialize, Deserialize)]
struct State {
    phase: Phase,
    /// Finished steps of the phase: data position, schedule position and optimizer updates.
    phase_step: usize,
}

/// Trains, or goes on from the newest checkpoint of `run`. Each step is logged (`step`, `phase`, `loss`,
/// `learning_rate`, `grad_norm`) and reported to `on_step`.
///
/// # Errors
/// [`TrainError::Setting`] before any work; [`TrainError::Numerics`] or [`TrainError::Quant`] when the loss or the
/// gradient is not finite (the update is not made and the last checkpoint stays); [`TrainError::Interrupted`] after
/// [`Control::Stop`]; [`TrainError::Io`] and [`TrainError::Artifact`] from the run folder.
pub fn train_lm(
    model: &LlamaConfig,
    tokens: &[u32],
    config: &LmTrainConfig,
    quant: &QuantConfig,
    run: &mut RunDir,
    on_step: &mut dyn FnMut(&Progress) -> Control,
) -> Result<LmOutcome, TrainError> {
    config.check(model, tokens.len())?;
    config.check_quant(model, quant)?;
    if let Some((at, t)) = tokens.iter().enumerate().find(|(_, t)| **t as usize >= model.vocab_size) {
        let expected = format!("tokens below vocab_size = {}", model.vocab_size);
        return Err(TrainError::Setting { field: "data.train".into(), expected, got: format!("{t} at token {at}") });
    }
    check_space(model, config, run)?;
    let mut lm = Trainer::start(model, tokens, config, quant, run)?;
    while lm.phase != Phase::Done {
        lm.run_phase(run, on_step)?;
    }
    let released = |t: &Option<Vec<StateTensor>>| t.as_ref().map(|t| rebuild(model, t, &Device::flex())).transpose();
    let missing =
        || TrainError::Artifact { path: run.path().into(), problem: "the last checkpoint lacks a phase".into() };
    let float = released(&lm.float)?.ok_or_else(missing)?;
    let trained = lm.qat.as_deref().ok_or_else(missing)?;
    let prepared = qat::merge(lm.prepared(rebuild(model, trained, &device())?, trained)?.0).valid();
    let quantized = qat::convert(&prepared)?;
    let float_equal_tokens = match config.float_equal_tokens {
        true => Some(released(&lm.equal)?.ok_or_else(missing)?),
        false => None,
    };
    Ok(LmOutcome { float, qat: prepared, float_equal_tokens, quantized })
}

/// A run in progress.
struct Trainer<'a> {
    config: &'a LmTrainConfig,
    tokens: &'a [u32],
    quant: &'a QuantConfig,
    phase: Phase,
    phase_step: usize,
    model: Llama,
    optimizer: AdamW,
    /// Weights at the end of the phases that are over.
    float: Option<Vec<StateTensor>>,
    qat: Option<Vec<StateTensor>>,
    equal: Option<Vec<StateTensor>>,
    /// The float result, without gradients: the teacher of a QAT phase with distillation.
    teacher: Option<Llama>,
    /// The static grids of inputs in a QAT phase, if there are such.
    inputs: Option<Inputs>,
}

impl<'a> Trainer<'a> {
    /// A new model at the start of `phase`.
    ///
    /// # Errors
    /// [`TrainError`] for a scheme that does not fit the model.
    fn new(
        model: &LlamaConfig,
        tokens: &'a [u32],
        config: &'a LmTrainConfig,
        quant: &'a QuantConfig,
        phase: Phase,
    ) -> Result<Self, TrainError> {
        let model = Llama::new(model, config.seed, &device());
        qat::check(&model, quant)?;
        let optimizer = AdamW::new(BETAS.0, BETAS.1, EPS);
        let (float, qat, equal, teacher, inputs) = (None, None, None, None, None);
        let mut new =
            Self { config, tokens, quant, phase, phase_step: 0, model, optimizer, float, qat, equal, teacher, inputs };
        new.prepare_phase(&[])?;
        Ok(new)
    }

    fn start(
        model: &LlamaConfig,
        tokens: &'a [u32],
        config: &'a LmTrainConfig,
        quant: &'a QuantConfig,
        run: &mut RunDir,
    ) -> Result<Self, TrainError> {
        let Some(snapshot) = run.latest()? else {
            let new = Self::new(model, tokens, config, quant, Phase::Float)?;
            run.truncate_log(0)?;
            return Ok(new);
        };
        run.truncate_log(snapshot.step)?;
        let state: State = serde_json::from_value(snapshot.state).map_err(|e| TrainError::Artifact {
            path: run.path().into(),
            problem: format!("state of step {}: {e}", snapshot.step),
        })?;
        let under = |prefix: &str| -> Vec<StateTensor> {
            let tensors = snapshot.tensors.iter().filter_map(|t| {
                let name = t.name.strip_prefix(prefix)?.to_owned();
                Some(StateTensor { name, shape: t.shape.clone(), data: t.data.clone() })
            });
            tensors.collect()
        };
        let kept = |prefix: &str| Some(under(prefix)).filter(|t| !t.is_empty());
        let mut optimizer = AdamW::new(BETAS.0, BETAS.1, EPS);
        optimizer.restore("adam.", &snapshot.tensors, state.phase_step as u64);
        let mut this = Self {
            config,
            tokens,
            quant,
            phase: state.phase,
            phase_step: state.phase_step,
            model: rebuild(model, &under("current."), &device())?,
            optimizer,
            float: kept("float."),
            qat: kept("qat."),
            equal: kept("float_equal_tokens."),
            teacher: None,
            inputs: None,
        };
        this.prepare_phase(&under("current."))?;
        Ok(this)
    }

    /// A model under fake quantization, with adapters, learned grids and static grids of inputs where the settings ask for them: those
    /// among `tensors`, else new ones; the latter then come of the float model that `model` is. Learned grids of inputs start at the
    /// observed ranges.
    fn prepared(&self, model: Llama, tensors: &[StateTensor]) -> Result<(Llama, Option<Inputs>), TrainError> {
        let inputs = self.inputs_of(&model, tensors)?;
        let mut model = qat::prepare(model, self.quant)?;
        if let Some(inputs) = &inputs {
            model = qat::quantize_inputs(model, self.quant, &inputs.grids()?);
        }
        let find = |name: String| tensors.iter().find(|t| t.name == name).map(|t| t.data.clone());
        if let Some(adapters) = &self.config.adapters {
            model = qat::adapt(model, adapters, self.config.seed);
            for (module, layer) in model.linears_mut() {
                if let (Some(a), Some(b)) = (find(format!("{module}.{LORA_A}")), find(format!("{module}.{LORA_B}"))) {
                    layer.set_lora(Lora::from_values(a, b, adapters.rank, adapters.alpha as f32, &device()));
                }
            }
        }
        if self.config.learned_scales.is_none() {
            // Adapters move what is put on the grid.
            return Ok((qat::share_global_scales(model), inputs));
        }
        for (module, layer) in model.linears_mut() {
            match find(format!("{module}.{GRID_SCALE}")) {
                Some(scale) => {
                    let zero = find(format!("{module}.{GRID_ZERO}"));
                    let global = find(format!("{module}.{GRID_GLOBAL}")).and_then(|g| g.first().copied());
                    layer.set_grid(LearnedGrid::from_values(scale, zero, &device()).under(global));
                }
                None => layer.learn_grid().map_err(|source| TrainError::Quant { module, source })?,
            }
        }
        model = qat::learn_inputs(model);
        if tensors.is_empty() {
            return Ok((model, inputs));
        }
        for (module, layer) in model.linears_mut() {
            let Some((_, zero)) = layer.learned_input().map(LearnedInput::values) else { continue };
            let saved = |end: &str| {
                let name = format!("{module}.{INPUT}.{end}");
                find(name.clone()).filter(|v| v.len() == 1).ok_or_else(|| broken(&name, "one number"))
            };
            let zero = zero.map(|_| saved(GRID_ZERO)).transpose()?;
            layer.set_learned_input(LearnedInput::from_values(saved(GRID_SCALE)?, zero, &device()));
        }
        Ok((qat::share_input_grids(model), inputs))
    }

    /// The observers of static inputs: those saved among `tensors`, else calibrated on `model`.
    fn inputs_of(&self, model: &Llama, tensors: &[StateTensor]) -> Result<Option<Inputs>, TrainError> {
        let Some(mut inputs) = Inputs::new(model.config(), self.quant, self.config)? else { return Ok(None) };
        let saved = inputs.restore(tensors).map_err(|name| broken(&name, "the state of the recipe's observer"))?;
        if !saved {
            inputs.calibrate(model, self.tokens, self.config)?;
        }
        Ok(Some(inputs))
    }

    /// What a QAT phase needs, whether it begins or goes on (with what `tensors` hold): fake quantization, and the teacher.
    fn prepare_phase(&mut self, tensors: &[StateTensor]) -> Result<(), TrainError> {
        (self.teacher, self.inputs) = (None, None);
        if self.phase == Phase::Qat {
            (self.model, self.inputs) = self.prepared(self.model.clone(), tensors)?;
            if let (Some(_), Some(float)) = (&self.config.distill, &self.float) {
                self.teacher = Some(rebuild(self.model.config(), float, &Device::flex())?);
            }
        }
        Ok(())
    }

    fn settings(&self) -> &'a LmPhase {
        if self.phase == Phase::Float { &self.config.float } else { &self.config.qat }
    }

    /// Steps of the run before this phase, and of the whole run.
    fn steps(&self) -> (usize, usize) {
        let (float, qat) = (self.config.float.steps, self.config.qat.steps);
        let total = float + qat + if self.config.float_equal_tokens { qat } else { 0 };
        let before = match self.phase {
            Phase::Float => 0,
            Phase::Qat => float,
            Phase::FloatEqualTokens => float + qat,
            Phase::Done => total,
        };
        (before, total)
    }

    /// Runs the rest of the phase and enters the next one.
    fn run_phase(&mut self, run: &mut RunDir, on_step: &mut dyn FnMut(&Progress) -> Control) -> Result<(), TrainError> {
        let phase = self.settings();
        // The QAT phase and the float phase of equal tokens see the same samples in the same order.
        let stream = u64::from(self.phase != Phase::Float);
        let mut windows = Windows::new(self.tokens, phase.seq_len, self.config.seed, stream);
        let (before, total) = self.steps();
        while self.phase_step < phase.steps {
            let global_step = before + self.phase_step + 1;
            let first = (self.phase_step * phase.batch_size) as u64;
            let (ids, labels) = windows.batch(first, phase.batch_size);
            let (loss, grad_norm) = self.step(ids, labels, phase, global_step)?;
            let learning_rate = phase.rate(self.phase_step);
            let name = self.phase.name();
            run.log(&json!({
                "step": global_step, "phase": name, "loss": loss, "learning_rate": learning_rate, "grad_norm": grad_norm,
            }))?;
            let progress = Progress {
                phase: self.phase,
                step: self.phase_step,
                steps: phase.steps,
                global_step,
                total_steps: total,
                loss,
                learning_rate,
                grad_norm,
                tokens: phase.tokens(),
            };
            let control = on_step(&progress);
            let over = self.phase_step == phase.steps;
            if over {
                self.enter_next()?;
            }
            if over || control == Control::Stop || global_step.is_multiple_of(self.config.save_every) {
                run.save(&self.snapshot(global_step))?;
            }
            if control == Control::Stop && self.phase != Phase::Done {
                return Err(TrainError::Interrupted { step: global_step as u64, path: run.path().into() });
            }
            if over {
                return Ok(());
            }
        }
        Ok(())
    }

    /// One step; gives the loss before the update and the norm of the gradient.
    fn step(
        &mut self,
        ids: Vec<i32>,
        labels: Vec<i32>,
        phase: &LmPhase,
        global_step: usize,
    ) -> Result<(f32, f64), TrainError> {
        let (ids, labels, b) = (Arc::new(ids), Arc::new(labels), phase.batch_size);
        let seen = match &mut self.inputs {
            Some(inputs) if inputs.follow(self.phase_step) => {
                self.model.watched(ids.clone(), b, &mut |modules, x| inputs.observe(modules, x))?
            }
            _ => self.model.states_and_logits(ids.clone(), b),
        };
        let loss = match (&self.teacher, &self.config.distill) {
            (Some(teacher), Some(d)) => {
                let host = |t: Tensor<3>| t.into_data().try_into_vec::<f32>().expect("models are f32");
                let (states, logits) = teacher.states_and_logits(ids, b);
                let hidden = (d.hidden_weight > 0.0).then(|| HiddenTarget {
                    states: states.into_iter().map(host).collect(),
                    weight: d.hidden_weight as f32,
                });
                let teacher = Teacher { logits: Arc::new(host(logits)), temperature: d.temperature as f32 };
                Llama::distill_loss_of(seen, labels, teacher, d.weight as f32, hidden)
            }
            _ => {
                let count = labels.len();
                Llama::loss_of(seen.1, labels, count)
            }
        };
        let value = loss.clone().into_data().try_to_vec::<f32>().map_or(f32::NAN, |v| v[0]);
        if !value.is_finite() {
            return Err(self.numerics("loss", global_step, f64::from(value)));
        }
        let grads = NamedGradients::take(&self.model, loss.backward());
        let norm = grads.norm();
        if !norm.is_finite() {
            return Err(self.numerics("gradient norm", global_step, norm));
        }
        self.phase_step += 1;
        let rate = phase.rate(self.phase_step);
        let scale_rate = self.config.learned_scales.as_ref().map_or(0.0, |s| s.rate) / phase.learning_rate;
        let grids = GridRates::new(scale_rate, self.model.linears());
        let group = |path: &str, rank: usize, values: &[f32]| {
            let decay = if rank > 1 { phase.weight_decay } else { 0.0 };
            grids.group(path, values).unwrap_or(ParamGroup { rate: 1.0, decay })
        };
        let model = self.model.clone();
        let moved = self.optimizer.step(model, &grads, rate, norm, phase.grad_clip, group);
        self.model = qat::share_input_grids(qat::share_global_scales(moved));
        Ok((value, norm))
    }

    /// The error of a number that is not finite: a weight that cannot be quantized is named.
    fn numerics(&self, what: &str, step: usize, value: f64) -> TrainError {
        match qat::convert(&self.model).and(qat::convert_blocks(&self.model).map(drop)) {
            Err(e) => e,
            Ok(()) => TrainError::Numerics { what: what.into(), step: step as u64, value },
        }
    }

    fn enter_next(&mut self) -> Result<(), TrainError> {
        let done = self.tensors("");
        let config = self.model.config().clone();
        let phase = match self.phase {
            Phase::Float => {
                self.float = Some(done);
                Phase::Qat
            }
            Phase::Qat => {
                self.qat = Some(done);
                if self.config.float_equal_tokens { Phase::FloatEqualTokens } else { Phase::Done }
            }
            Phase::FloatEqualTokens | Phase::Done => {
                self.equal = Some(done);
                Phase::Done
            }
        };
        (self.phase, self.phase_step) = (phase, 0);
        self.optimizer = AdamW::new(BETAS.0, BETAS.1, EPS);
        // Both later phases start from the float result.
        if let Some(float) = &self.float {
            self.model = rebuild(&config, float, &device())?;
        }
        self.prepare_phase(&[])
    }

    /// The model at work: weights, adapters, learned grids, observers of its inputs.
    fn tensors(&self, prefix: &str) -> Vec<StateTensor> {
        let mut out = weights(&self.model, prefix);
        out.extend(self.inputs.iter().flat_map(|inputs| inputs.state(prefix)));
        out
    }

    fn snapshot(&self, step: usize) -> Snapshot {
        let mut tensors = self.tensors("current.");
        tensors.extend(self.optimizer.state("adam."));
        for (prefix, kept) in [("float.", &self.float), ("qat.", &self.qat), ("float_equal_tokens.", &self.equal)] {
            tensors.extend(
                kept.iter().flatten().map(|t| StateTensor { name: format!("{prefix}{}", t.name), ..t.clone() }),
            );
        }
        let state = State { phase: self.phase, phase_step: self.phase_step };
        Snapshot { step: step as u64, tensors, state: json!(state) }
    }
}

/// Whether the checkpoints to come have room: three at the worst moment (two kept, one being written), each with the
/// weights, two moments, and the results of the phases that are over; adapters, where there are such, have moments of their own
/// and lie in two of these.
fn check_space(model: &LlamaConfig, config: &LmTrainConfig, run: &RunDir) -> Result<(), TrainError> {
    let matrices = ModelConfig::Llama(model.clone()).linears();
    let weights: u64 = matrices.iter().map(|l| l.n() as u64 * l.k() as u64).sum::<u64>()
        + model.vocab_size as u64 * model.hidden_size as u64
        + (2 * model.num_hidden_layers as u64 + 1) * model.hidden_size as u64;
    let rank = config.adapters.as_ref().map_or(0, |a| a.rank as u64);
    let adapters: u64 = matrices.iter().map(|l| (l.n() + l.k()) as u64 * rank).sum();
    let copies = if config.float_equal_tokens { 6 } else { 5 };
    let missing = 3u64.saturating_sub(run.steps()?.len() as u64);
    Ok(dsq_checkpoint::check_space(run.path(), missing * 4 * (copies * weights + 4 * adapters))?)
}

fn device() -> Device {
    Device::flex().autodiff()
}

/// The error of a checkpoint whose tensor `name` is not what this version saves.
fn broken(name: &str, expected: &str) -> TrainError {
    TrainError::Artifact {
        path: "checkpoints".into(),
        problem: format!("{name}: expected {expected}, got another or none"),
    }
}

/// The tensors of a model, its adapters and the learned grids of its weights and inputs.
fn weights(model: &Llama, prefix: &str) -> Vec<StateTensor> {
    let mut out: Vec<StateTensor> = model
        .named_tensors()
        .into_iter()
        .map(|(name, shape, data)| StateTensor { name: format!("{prefix}{name}"), shape, data })
        .collect();
    for (module, lora) in model.linears().into_iter().filter_map(|(m, l)| Some((m, l.lora()?))) {
        let shapes = [lora.a.dims(), lora.b.dims()];
        for ((end, data), shape) in [LORA_A, LORA_B].into_iter().zip(lora.values()).zip(shapes) {
            out.push(StateTensor { name: format!("{prefix}{module}.{end}"), shape: shape.to_vec(), data });
        }
    }
    for (module, grid) in model.linears().into_iter().filter_map(|(m, l)| Some((m, l.grid()?))) {
        let (scale, zero) = grid.values();
        let global = grid.global().map(|g| vec![g]);
        for (end, data) in [(GRID_SCALE, Some(scale)), (GRID_ZERO, zero), (GRID_GLOBAL, global)] {
            out.extend(data.map(|data| StateTensor {
                name: format!("{prefix}{module}.{end}"),
                shape: vec![data.len()],
                data,
            }));
        }
    }
    for (module, input) in model.linears().into_iter().filter_map(|(m, l)| Some((m, l.learned_input()?))) {
        let (scale, zero) = input.values();
        for (end, data) in [(GRID_SCALE, Some(scale)), (GRID_ZERO, zero)] {
            let name = format!("{prefix}{module}.{INPUT}.{end}");
            out.extend(data.map(|data| StateTensor { name, shape: vec![data.len()], data }));
        }
    }
    out
}

fn rebuild(config: &LlamaConfig, tensors: &[StateTensor], device: &Device) -> Result<Llama, TrainError> {
    let find = |name: &str| tensors.iter().find(|t| t.name == name).map(|t| t.data.as_slice());
    Ok(Llama::from_tensors(config, device, find)?)
}
