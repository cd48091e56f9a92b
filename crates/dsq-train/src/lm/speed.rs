//! What fake quantization costs a training step: steps of a float model and of the same model under fake quantization, in
//! turn, on the same batches. Not a training run: nothing is kept.

use super::data::Windows;
use super::{LmPhase, LmTrainConfig, Phase, Trainer};
use crate::TrainError;
use dsq_checkpoint::LlamaConfig;
use dsq_quant::QuantConfig;
use std::time::{Duration, Instant};

/// Steps before the first one that counts.
const WARM_UP: usize = 2;

/// Times of the steps, in the order in which they ran; step `i` of both had the same batch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StepTimes {
    /// Steps in float.
    pub float: Vec<Duration>,
    /// Steps under fake quantization.
    pub qat: Vec<Duration>,
    /// Tokens of a step.
    pub tokens: usize,
}

/// Times `steps` steps of the QAT phase's size, forward, backward and update, of a new model with and without fake
/// quantization (learned scales, adapters and static inputs as `config` says; cross-entropy in both, so that no teacher runs). They take turns, and
/// the one that goes first changes each time.
///
/// # Errors
/// As [`super::train_lm`] before its first step, and what a step can fail with.
pub fn time_steps(
    model: &LlamaConfig,
    tokens: &[u32],
    config: &LmTrainConfig,
    quant: &QuantConfig,
    steps: usize,
) -> Result<StepTimes, TrainError> {
    config.check(model, tokens.len())?;
    config.check_quant(model, quant)?;
    let steps = steps + WARM_UP;
    let phase = LmPhase { steps, warmup_steps: config.qat.warmup_steps.min(steps), ..config.qat.clone() };
    let config = LmTrainConfig { float: phase.clone(), qat: phase.clone(), distill: None, ..config.clone() };
    let start = |phase| Trainer::new(model, tokens, &config, quant, phase);
    let (mut float, mut qat) = (start(Phase::Float)?, start(Phase::Qat)?);
    let mut windows = Windows::new(tokens, phase.seq_len, config.seed, 0);
    let mut times = StepTimes { tokens: phase.tokens(), ..StepTimes::default() };
    for step in 0..steps {
        let (ids, labels) = windows.batch((step * phase.batch_size) as u64, phase.batch_size);
        let timed = |trainer: &mut Trainer, times: &mut Vec<Duration>| -> Result<(), TrainError> {
            let clock = Instant::now();
            trainer.step(ids.clone(), labels.clone(), &phase, step + 1)?;
            if step >= WARM_UP {
                times.push(clock.elapsed());
            }
            Ok(())
        };
        if step % 2 == 0 {
            timed(&mut float, &mut times.float)?;
            timed(&mut qat, &mut times.qat)?;
        } else {
            timed(&mut qat, &mut times.qat)?;
            timed(&mut float, &mut times.float)?;
        }
    }
    Ok(times)
}
