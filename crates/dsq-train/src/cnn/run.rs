//! The phases of a CNN run, in order: for each seed float, PTQ, QAT with batch norm observed, QAT with batch norm skipped.
//! Saves after `save_every` steps and between phases; a resumed run goes on with the same bits.

use super::data::{batch_indices, gather, images, one_hot, statistics, stream};
use super::sgd::{Rates, Sgd, clip};
use super::{CnnExport, CnnPhase, CnnProgress, CnnResults, CnnRow, CnnTrainConfig, ROWS, top1_percent};
use crate::idx::Pictures;
use crate::schedule::learning_rate;
use crate::{Control, RunDir, Snapshot, StateTensor, TrainError};
use burn::tensor::Device;
use burn::tensor::activation::log_softmax;
use dsq_checkpoint::ResNetConfig;
use dsq_model::Teacher;
use dsq_model::resnet::{BnPlacement, Pass, QatSettings, ResNet, Updates, distill};
use dsq_quant::{QuantConfig, QuantError};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

/// Pictures in an evaluation batch.
const EVAL_BATCH: usize = 250;

/// The phase that trains the float result on.
const EQUAL_STEPS: &str = "float_equal_steps";

/// Trains by `config` in the run folder `out` and returns the table's numbers and the networks to export.
///
/// # Errors
/// [`TrainError`]: settings, data, the run folder, a loss that is not finite, [`TrainError::Interrupted`] after the callback
/// has answered [`Control::Stop`].
pub fn run_cnn(
    config: &CnnTrainConfig,
    quant: &QuantConfig,
    out: &Path,
    resume: bool,
    overwrite: bool,
    callback: &mut dyn FnMut(&CnnProgress) -> Control,
) -> Result<CnnResults, TrainError> {
    config.validate()?;
    config.check_quant(quant)?;
    let d = &config.data;
    let train = Pictures::read(&d.train_images, &d.train_labels, config.num_classes, d.train_limit)?;
    let test = Pictures::read(&d.test_images, &d.test_labels, config.num_classes, d.test_limit)?;
    if test.size != train.size {
        let problem = format!("expected pictures of {:?} as in training, got {:?}", train.size, test.size);
        return Err(TrainError::Artifact { path: d.test_images.clone(), problem });
    }
    let architecture = config.architecture(&train)?;
    let mut fingerprint = serde_json::to_value(config).unwrap_or_default();
    // Where the files lie is not what they say: their statistics stand for them.
    if let Some(map) = fingerprint.as_object_mut() {
        map.remove("save_every");
        let (mean, std) = statistics(&train);
        let (test_mean, _) = statistics(&test);
        let limits = [train.len(), test.len()];
        map.insert("data".into(), json!({"pictures": limits, "mean": mean, "std": std, "test_mean": test_mean}));
        map.insert("scheme".into(), serde_json::to_value(quant.scheme).unwrap_or_default());
        map.insert("ignore".into(), json!(quant.ignore.iter().map(|p| p.text()).collect::<Vec<_>>()));
    }
    let dir = RunDir::open(out, &fingerprint, resume, overwrite)?;
    let mut job = Job { config, quant, architecture, train, test, dir, state: State::default(), callback };
    if resume {
        job.restore()?;
    }
    job.run()
}

/// How a network is prepared; scales are learned only where batch norm is skipped.
pub(super) fn settings(config: &CnnTrainConfig, quant: &QuantConfig, placement: BnPlacement) -> QatSettings {
    let learned = config.learned_scales.is_some() && placement == BnPlacement::Skipped;
    let (observer, rate) = (config.observer, config.observer_rate);
    QatSettings { config: quant.clone(), placement, observer, rate, learned }
}

/// What a checkpoint holds besides tensors of the running phase.
#[derive(Debug, Default)]
struct State {
    /// Place of the seed.
    seed: usize,
    /// Place among the phases.
    phase: usize,
    /// Steps finished in the phase.
    step: usize,
    /// Steps finished in all.
    total: u64,
    /// Accuracies so far, `[row][seed]`.
    top1: [Vec<f64>; ROWS],
    /// The running phase's network, once it has started.
    net: Option<ResNet>,
    sgd: Sgd,
    /// The float network of this seed, once trained.
    float: Option<ResNet>,
    /// The QAT networks of finished seeds.
    done: Vec<ResNet>,
}

struct Job<'a> {
    config: &'a CnnTrainConfig,
    quant: &'a QuantConfig,
    architecture: ResNetConfig,
    train: Pictures,
    test: Pictures,
    dir: RunDir,
    state: State,
    callback: &'a mut dyn FnMut(&CnnProgress) -> Control,
}

impl Job<'_> {
    fn run(mut self) -> Result<CnnResults, TrainError> {
        while self.state.seed < self.config.seeds.len() {
            while self.state.phase < self.config.phases().len() {
                self.phase()?;
            }
            self.state.seed += 1;
            self.state.phase = 0;
            self.state.float = None;
            self.save()?;
        }
        self.results()
    }

    fn seed(&self) -> u64 {
        self.config.seeds[self.state.seed]
    }

    fn settings(&self, placement: BnPlacement) -> QatSettings {
        settings(self.config, self.quant, placement)
    }

    /// A network prepared as the phase needs it, with the parameters of `from`.
    fn start(&self, from: Option<&ResNet>) -> Result<ResNet, TrainError> {
        let Some(float) = from else { return Ok(ResNet::new(&self.architecture, self.seed())) };
        let mut net = float.clone();
        let name = self.config.phases()[self.state.phase];
        if name == EQUAL_STEPS {
            return Ok(net);
        }
        let right = name == "qat";
        let placement = if right { BnPlacement::Skipped } else { self.config.wrong_way };
        net.prepare(self.settings(placement)).map_err(quant_error)?;
        if right && self.config.learned_scales.is_some() {
            net.start_grids(&self.calibration_batch(0)).map_err(quant_error)?;
        } else {
            self.calibrate(&mut net)?;
        }
        Ok(net)
    }

    /// Batch `b` of the pictures to calibrate with, as they are: training pictures, normalized.
    fn calibration_batch(&self, b: usize) -> Vec<f32> {
        let (size, seed) = (self.config.qat.batch_size, self.seed());
        let picks = batch_indices(self.train.len(), size, seed, "calibration", b as u64);
        self.architecture.normalize(&gather(&self.train, &picks, None))
    }

    /// Observes activation ranges of the float network on training pictures, as they are.
    fn calibrate(&self, net: &mut ResNet) -> Result<(), TrainError> {
        for b in 0..self.config.calibration_batches {
            let mut found = Updates::default();
            net.logits(&self.calibration_batch(b), Pass::Calibrate, &mut found).map_err(quant_error)?;
            net.apply(found);
        }
        Ok(())
    }

    /// Logits of the test pictures.
    fn logits(&self, net: &ResNet, pass: Pass) -> Result<Vec<f32>, TrainError> {
        let all: Vec<usize> = (0..self.test.len()).collect();
        let mut out = Vec::with_capacity(all.len() * self.architecture.num_classes);
        for picks in all.chunks(EVAL_BATCH) {
            let x = self.architecture.normalize(&gather(&self.test, picks, None));
            out.extend(net.logits(&x, pass, &mut Updates::default()).map_err(quant_error)?);
        }
        Ok(out)
    }

    fn accuracy(&self, net: &ResNet, pass: Pass) -> Result<f64, TrainError> {
        Ok(top1_percent(&self.logits(net, pass)?, &self.test.labels))
    }

    /// One training phase of the current seed, from where it stands to its end.
    fn phase(&mut self) -> Result<(), TrainError> {
        let name = self.config.phases()[self.state.phase];
        let phase = if name == "float" { &self.config.float } else { &self.config.qat };
        let mut net = match self.state.net.take() {
            Some(net) => net,
            None => {
                self.state.sgd = Sgd::default();
                self.start(self.state.float.as_ref())?
            }
        };
        let device = Device::flex().autodiff();
        while self.state.step < phase.steps {
            let (loss, rate) = self.step(&mut net, name, phase, &device)?;
            self.state.step += 1;
            self.state.total += 1;
            self.dir.log(&json!({
                "step": self.state.total, "seed": self.seed(), "phase": name, "loss": loss, "learning_rate": rate,
            }))?;
            let progress = CnnProgress {
                seed: self.seed(),
                seed_index: self.state.seed,
                phase: name,
                step: self.state.total,
                steps: self.steps(),
                loss,
                learning_rate: rate,
            };
            let stop = (self.callback)(&progress) == Control::Stop;
            if stop || (self.state.step.is_multiple_of(self.config.save_every) && self.state.step < phase.steps) {
                self.state.net = Some(net);
                self.save()?;
                if stop {
                    let (step, path) = (self.state.total, self.dir.path().to_path_buf());
                    return Err(TrainError::Interrupted { step, path });
                }
                match self.state.net.take() {
                    Some(saved) => net = saved,
                    None => return Ok(()),
                }
            }
        }
        self.finish(name, net)?;
        self.state.phase += 1;
        self.state.step = 0;
        self.state.sgd = Sgd::default();
        self.save()
    }

    /// Evaluates a finished phase and keeps what later ones need.
    fn finish(&mut self, name: &str, net: ResNet) -> Result<(), TrainError> {
        match name {
            "float" => {
                let float = self.accuracy(&net, Pass::FloatEval)?;
                let mut ptq = net.clone();
                let observed = QatSettings { learned: false, ..self.settings(BnPlacement::Skipped) };
                ptq.prepare(observed).map_err(quant_error)?;
                self.calibrate(&mut ptq)?;
                let ptq = self.accuracy(&ptq, Pass::QatEval)?;
                self.state.top1[0].push(float);
                self.state.top1[1].push(ptq);
                self.state.float = Some(net);
            }
            "qat_bn_observed" => {
                let top1 = self.accuracy(&net, Pass::QatEval)?;
                self.state.top1[2].push(top1);
            }
            EQUAL_STEPS => {
                let top1 = self.accuracy(&net, Pass::FloatEval)?;
                self.state.top1[4].push(top1);
            }
            _ => {
                let top1 = self.accuracy(&net, Pass::QatEval)?;
                self.state.top1[3].push(top1);
                self.state.done.push(net);
            }
        }
        Ok(())
    }

    /// One optimizer step; the loss and the learning rate.
    fn step(
        &mut self,
        net: &mut ResNet,
        name: &str,
        phase: &CnnPhase,
        device: &Device,
    ) -> Result<(f64, f64), TrainError> {
        let (seed, step) = (self.seed(), self.state.step);
        let pictures_of = if name == EQUAL_STEPS { "qat" } else { name };
        let picks = batch_indices(self.train.len(), phase.batch_size, seed, pictures_of, step as u64);
        let augment = phase.augment.then(|| stream(seed, &format!("{pictures_of} augmentation"), step as u64));
        let pictures = self.architecture.normalize(&gather(&self.train, &picks, augment));
        let x = images(&pictures, self.train.size, device);
        let target = one_hot(&self.train, &picks, self.architecture.num_classes, device);
        let pass = if matches!(name, "float" | EQUAL_STEPS) {
            Pass::FloatTrain
        } else {
            Pass::QatTrain {
                bn_frozen: step >= self.config.freeze_bn_step,
                ranges_frozen: step >= self.config.freeze_ranges_step,
            }
        };
        let leaves = net.leaves(device);
        let mut updates = Updates::default();
        let logits = net.forward(&leaves, x, pass, &mut updates).map_err(quant_error)?;
        let mut loss = (log_softmax(logits.clone(), 1) * target).sum().mul_scalar(-1.0 / picks.len() as f32);
        if let (Some(d), Some(float), "qat") = (&self.config.distill, &self.state.float, name) {
            let known = float.logits(&pictures, Pass::FloatEval, &mut Updates::default()).map_err(quant_error)?;
            let teacher = Teacher { logits: Arc::new(known), temperature: d.temperature as f32 };
            let distilled = distill(logits, teacher, picks.len() as f32).mul_scalar(d.weight as f32);
            loss = distilled + loss.mul_scalar(1.0 - d.weight as f32);
        }
        let value = f64::from(loss.clone().into_scalar::<f32>());
        if !value.is_finite() {
            return Err(TrainError::Numerics { what: format!("{name}: loss"), step: self.state.total + 1, value });
        }
        let mut grads = leaves.gradients(&loss.backward());
        let norm = clip(&mut grads, phase.grad_clip);
        if !norm.is_finite() {
            let what = format!("{name}: gradient norm");
            return Err(TrainError::Numerics { what, step: self.state.total + 1, value: norm });
        }
        let rate = learning_rate(step, phase.steps, phase.warmup_steps, phase.learning_rate);
        // On the schedule of the weights' rate.
        let grid_rate = self.config.learned_scales.as_ref().map_or(0.0, |s| s.rate) * (rate / phase.learning_rate);
        net.apply(updates);
        let rates = Rates { rate, grid_rate, momentum: phase.momentum, decay: phase.weight_decay };
        self.state.sgd.step(net, grads, rates);
        Ok((value, rate))
    }

    fn steps(&self) -> u64 {
        let qat = self.config.phases().len() - 1;
        ((self.config.float.steps + qat * self.config.qat.steps) * self.config.seeds.len()) as u64
    }

    fn save(&self) -> Result<(), TrainError> {
        let s = &self.state;
        let mut tensors = Vec::new();
        let mut put = |prefix: &str, net: &ResNet| {
            tensors.extend(net.state().into_iter().map(|(name, data)| StateTensor {
                name: format!("{prefix}.{name}"),
                shape: vec![data.len()],
                data,
            }));
        };
        s.net.iter().for_each(|n| put("net", n));
        s.float.iter().for_each(|n| put("float", n));
        s.done.iter().enumerate().for_each(|(i, n)| put(&format!("done{i}"), n));
        tensors.extend(s.sgd.state());
        let state = json!({
            "seed": s.seed, "phase": s.phase, "step": s.step, "top1": s.top1, "running": s.net.is_some(),
            "float": s.float.is_some(), "done": s.done.len(), "buffers": s.sgd.buffers.len(),
            "grid_updates": s.sgd.grid_updates(),
        });
        self.dir.save(&Snapshot { step: s.total, tensors, state })
    }

    /// Takes up the newest checkpoint; without one the run starts from the beginning.
    fn restore(&mut self) -> Result<(), TrainError> {
        let Some(snapshot) = self.dir.latest()? else { return self.dir.truncate_log(0) };
        let path = self.dir.path().join("checkpoints");
        let broken = |what: &str| TrainError::Artifact {
            path: path.clone(),
            problem: format!("step {}: {what}: expected what this version saves, got something else", snapshot.step),
        };
        let number = |key: &str| snapshot.state[key].as_u64().map(|v| v as usize).ok_or_else(|| broken(key));
        let flag = |key: &str| snapshot.state[key].as_bool().ok_or_else(|| broken(key));
        self.state.seed = number("seed")?;
        self.state.phase = number("phase")?;
        self.state.step = number("step")?;
        self.state.total = snapshot.step;
        self.state.top1 = serde_json::from_value(snapshot.state["top1"].clone()).map_err(|_| broken("top1"))?;
        let load = |prefix: &str, placement: Option<BnPlacement>| -> Result<ResNet, TrainError> {
            let mut net = ResNet::new(&self.architecture, 0);
            if let Some(placement) = placement {
                net.prepare(self.settings(placement)).map_err(quant_error)?;
            }
            let head = format!("{prefix}.");
            let state: Vec<(String, Vec<f32>)> = snapshot
                .tensors
                .iter()
                .filter_map(|t| Some((t.name.strip_prefix(&head)?.to_string(), t.data.clone())))
                .collect();
            net.load_state(&state).map_err(|name| broken(&format!("{prefix}.{name}")))?;
            Ok(net)
        };
        let placement = match self.config.phases().get(self.state.phase) {
            Some(&"qat") => Some(BnPlacement::Skipped),
            Some(&"qat_bn_observed") => Some(self.config.wrong_way),
            _ => None,
        };
        let net = if flag("running")? { Some(load("net", placement)?) } else { None };
        let float = if flag("float")? { Some(load("float", None)?) } else { None };
        let done = (0..number("done")?)
            .map(|i| load(&format!("done{i}"), Some(BnPlacement::Skipped)))
            .collect::<Result<Vec<_>, _>>()?;
        (self.state.net, self.state.float, self.state.done) = (net, float, done);
        self.state.sgd = Sgd::restore(&snapshot.tensors, number("buffers")?, number("grid_updates")? as u64);
        self.dir.truncate_log(snapshot.step)
    }

    fn results(self) -> Result<CnnResults, TrainError> {
        let bits = match self.state.done.first() {
            Some(net) => net.bits_per_weight().map_err(quant_error)?.unwrap_or(32.0),
            None => 32.0,
        };
        let names = self.config.row_names();
        let rows = names
            .iter()
            .zip(&self.state.top1)
            .filter(|(_, top1)| !top1.is_empty())
            .map(|(name, top1)| CnnRow {
                name: (*name).into(),
                top1: top1.clone(),
                bits_per_weight: if name.starts_with("float") { 32.0 } else { bits },
            })
            .collect();
        let exports = self
            .state
            .done
            .iter()
            .zip(&self.config.seeds)
            .map(|(net, &seed)| {
                Ok(CnnExport {
                    seed,
                    config: self.architecture.clone(),
                    layers: net.convert().map_err(quant_error)?,
                    master: net.named_tensors(),
                    logits: self.logits(net, Pass::QatEval)?,
                })
            })
            .collect::<Result<Vec<_>, TrainError>>()?;
        Ok(CnnResults { rows, exports, test: self.test })
    }
}

pub(super) fn quant_error(source: QuantError) -> TrainError {
    TrainError::Quant { module: "network".into(), source }
}
