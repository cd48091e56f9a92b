//! The settings of language-model training, the checks that need no training, and the learning-rate schedule.

use crate::TrainError;
use dsq_checkpoint::{LlamaConfig, ModelConfig};
use dsq_quant::{ObserverKind, QuantArgs, QuantConfig};
use serde::{Deserialize, Serialize};

/// One phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LmPhase {
    /// Optimizer steps.
    pub steps: usize,
    /// Sequences in a step.
    pub batch_size: usize,
    /// Tokens in a sequence.
    pub seq_len: usize,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Steps of linear warm-up; then half a cosine down to `final_rate`.
    pub warmup_steps: usize,
    /// Share of the peak that the last step has.
    pub final_rate: f64,
    /// AdamW weight decay of matrices (norms have none).
    pub weight_decay: f64,
    /// Largest global gradient norm.
    pub grad_clip: f64,
}

/// All phases: float training, then QAT from its result, then (if asked for) float training from the same point with
/// the tokens and the learning rates of the QAT phase, for an honest comparison.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LmTrainConfig {
    /// Float training from seeded weights.
    pub float: LmPhase,
    /// Quantization-aware training from the float result.
    pub qat: LmPhase,
    /// Distillation of the QAT phase from the float result; `None`: cross-entropy only.
    pub distill: Option<Distill>,
    /// Trains the scales and zero points of the QAT phase, of weights and of static inputs, as parameters of their own (LSQ, LSQ+);
    /// `None`: they follow the ranges of the weights and inputs.
    pub learned_scales: Option<LearnedScales>,
    /// Trains adapters in the place of weights in the QAT phase (LoRA); `None`: the weights themselves, and all else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapters: Option<Adapters>,
    /// How the ranges of static activations are found; `None`: the scheme has no such.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inputs: Option<InputRanges>,
    /// Whether to train the float model of equal tokens.
    pub float_equal_tokens: bool,
    /// Steps between checkpoints (one is also written at the end of each phase).
    pub save_every: usize,
    /// The seed of weights and data order.
    pub seed: u64,
}

/// How fast learned scales move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnedScales {
    /// Learning rate of scales as a share of their root mean square in the layer, and of zero points as a share of half
    /// the code range, at the peak of the schedule.
    pub rate: f64,
}

/// How the ranges of static activations are found: by an observer over batches of the float result, and by the same observer
/// over the batches of QAT until they are frozen. Learned grids start at the former, and nothing is observed in QAT.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InputRanges {
    /// Batches of the float result, at least 1.
    pub calibration_batches: usize,
    /// The observer.
    pub observer: ObserverKind,
    /// Rate of the moving average, more than 0, at most 1.
    pub rate: f32,
    /// QAT step (from 0) from which the ranges lie still.
    pub freeze_step: usize,
}

/// Low-rank adapters: a quantized layer works with `w + alpha / rank * B A` on its grid, and only A and B are trained.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Adapters {
    /// Rows of A and columns of B, at least 1.
    pub rank: usize,
    /// Size of the change, positive.
    pub alpha: f64,
}

/// How much of the QAT loss is distillation from the float model that QAT starts from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Distill {
    /// Share of the loss, more than 0 to 1; the rest is cross-entropy.
    pub weight: f64,
    /// Temperature of both models' predictions.
    pub temperature: f64,
    /// Weight of the squared distance of the residual streams after each layer, beside the rest of the loss; language models
    /// only. 0: none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hidden_weight: f64,
}

fn is_zero(v: &f64) -> bool {
    *v == 0.0
}

impl LearnedScales {
    /// Checks the range of the rate.
    ///
    /// # Errors
    /// [`TrainError::Setting`] naming the recipe's key.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        if self.rate > 0.0 && self.rate < 1.0 {
            return Ok(());
        }
        let (field, expected) = ("qat.scale_learning_rate".into(), "more than 0, less than 1".into());
        Err(TrainError::Setting { field, expected, got: self.rate.to_string() })
    }
}

impl InputRanges {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`TrainError::Setting`] naming the recipe's key.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        let refuse = |field: &str, expected: &str, got: String| {
            Err(TrainError::Setting { field: format!("qat.{field}"), expected: expected.into(), got })
        };
        if self.calibration_batches == 0 {
            return refuse("calibration_batches", "at least 1", "0".into());
        }
        if !(self.rate > 0.0 && self.rate <= 1.0) {
            return refuse("observer_rate", "more than 0, at most 1", self.rate.to_string());
        }
        match self.observer {
            ObserverKind::Percentile(p) if !(p > 50.0 && p <= 100.0) => {
                refuse("percentile", "above 50, at most 100", p.to_string())
            }
            _ => Ok(()),
        }
    }
}

impl Adapters {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`TrainError::Setting`] naming the recipe's key.
    fn check(&self) -> Result<(), TrainError> {
        let refuse = |field: &str, expected: &str, got: String| {
            Err(TrainError::Setting { field: field.into(), expected: expected.into(), got })
        };
        if self.rank == 0 {
            return refuse("qat.lora_rank", "at least 1", "0".into());
        }
        if !(self.alpha.is_finite() && self.alpha > 0.0) {
            return refuse("qat.lora_alpha", "a positive number", self.alpha.to_string());
        }
        Ok(())
    }
}

impl Distill {
    /// Checks the ranges.
    ///
    /// # Errors
    /// [`TrainError::Setting`] naming the recipe's key.
    pub(crate) fn check(&self) -> Result<(), TrainError> {
        let refuse = |field: &str, expected: &str, got: f64| {
            let field = format!("qat.{field}");
            Err(TrainError::Setting { field, expected: expected.into(), got: got.to_string() })
        };
        if !(self.weight > 0.0 && self.weight <= 1.0) {
            return refuse("distill_weight", "more than 0, at most 1", self.weight);
        }
        if !(self.temperature.is_finite() && self.temperature >= 0.01) {
            return refuse("distill_temperature", "a finite number of at least 0.01", self.temperature);
        }
        if !(self.hidden_weight.is_finite() && self.hidden_weight >= 0.0) {
            return refuse("hidden_weight", "a finite number of at least 0", self.hidden_weight);
        }
        Ok(())
    }
}

impl LmPhase {
    /// The learning rate of step `step` (from 1).
    pub fn rate(&self, step: usize) -> f64 {
        if step <= self.warmup_steps {
            return self.learning_rate * step as f64 / self.warmup_steps as f64;
        }
        let rest = (self.steps - self.warmup_steps) as f64;
        let done = (step - self.warmup_steps) as f64 / rest;
        let share = 0.5 * (1.0 + (std::f64::consts::PI * done).cos());
        self.learning_rate * (self.final_rate + (1.0 - self.final_rate) * share)
    }

    /// Tokens of one step.
    pub fn tokens(&self) -> usize {
        self.batch_size * self.seq_len
    }

    fn check(&self, phase: &str, model: &LlamaConfig, tokens: usize) -> Result<(), TrainError> {
        let refuse = |field: &str, expected: String, got: String| {
            Err(TrainError::Setting { field: format!("{phase}.{field}"), expected, got })
        };
        let count = |field: &str, value: usize, lo: usize, hi: usize| match (lo..=hi).contains(&value) {
            true => Ok(()),
            false => refuse(field, format!("{lo} to {hi}"), value.to_string()),
        };
        count("steps", self.steps, 1, usize::MAX)?;
        count("batch_size", self.batch_size, 1, usize::MAX)?;
        count("seq_len", self.seq_len, 2, model.max_position_embeddings)?;
        count("warmup_steps", self.warmup_steps, 0, self.steps)?;
        let number = |field: &str, value: f64, lo: f64| match value.is_finite() && value >= lo {
            true => Ok(()),
            false => refuse(field, format!("a finite number of at least {lo:e}"), value.to_string()),
        };
        number("learning_rate", self.learning_rate, f64::MIN_POSITIVE)?;
        number("weight_decay", self.weight_decay, 0.0)?;
        number("final_rate", self.final_rate, 0.0)?;
        number("grad_clip", self.grad_clip, f64::MIN_POSITIVE)?;
        if tokens <= self.seq_len {
            let expected = format!("a text of more than {} tokens", self.seq_len);
            return refuse("seq_len", expected, tokens.to_string());
        }
        Ok(())
    }
}

impl LmTrainConfig {
    /// Checks every setting against the model and the number of training tokens.
    ///
    /// # Errors
    /// [`TrainError::Setting`] naming the field.
    pub fn check(&self, model: &LlamaConfig, tokens: usize) -> Result<(), TrainError> {
        self.float.check("train", model, tokens)?;
        self.qat.check("qat", model, tokens)?;
        self.distill.as_ref().map_or(Ok(()), Distill::check)?;
        self.learned_scales.as_ref().map_or(Ok(()), LearnedScales::check)?;
        self.adapters.as_ref().map_or(Ok(()), Adapters::check)?;
        self.inputs.as_ref().map_or(Ok(()), InputRanges::check)?;
        if self.save_every == 0 {
            let (expected, got) = ("at least 1".into(), "0".into());
            return Err(TrainError::Setting { field: "train.save_every".into(), expected, got });
        }
        Ok(())
    }

    /// Checks what is trained against the layers that `quant` names.
    ///
    /// # Errors
    /// [`TrainError::Setting`] for a rank above the lesser side of a quantized layer (the smallest one is named), and for static
    /// activations without [`LmTrainConfig::inputs`]; for learned scales of blocks of GGUF.
    pub fn check_quant(&self, model: &LlamaConfig, quant: &QuantConfig) -> Result<(), TrainError> {
        let schemes = quant.overrides.iter().map(|(_, s)| s).chain([&quant.scheme]);
        let fixed = schemes.filter_map(|s| s.activations).find(|a: &QuantArgs| !a.is_dynamic());
        if let (None, Some(a)) = (&self.inputs, fixed) {
            let expected = format!("an observer of the ranges of static {} activations", a.qtype.name());
            return Err(TrainError::Setting { field: "qat.observer".into(), expected, got: "none".into() });
        }
        if let (Some(_), Some((_, grid))) = (&self.learned_scales, quant.blocks.first()) {
            let expected = format!("false: the scales of {} follow from the weights", grid.name());
            return Err(TrainError::Setting { field: "qat.learned_scales".into(), expected, got: "true".into() });
        }
        let Some(Adapters { rank, .. }) = self.adapters else { return Ok(()) };
        let linears = ModelConfig::Llama(model.clone()).linears().into_iter();
        let quantized = linears.filter(|l| quant.scheme_for(&l.module).is_some());
        match quantized.min_by_key(|l| l.n().min(l.k())) {
            Some(l) if l.n().min(l.k()) < rank => {
                let (most, module, n, k) = (l.n().min(l.k()), &l.module, l.n(), l.k());
                let expected = format!("at most {most}, the lesser side of {module} ({n} x {k})");
                Err(TrainError::Setting { field: "qat.lora_rank".into(), expected, got: rank.to_string() })
            }
            _ => Ok(()),
        }
    }
}
