//! Static grids of the inputs of a language model's layers in training: an observer for each tensor that layers read, fed first by
//! batches of the float model, then, unless grids are learned, by the model in training until its ranges are frozen. Layers that
//! read one tensor share its observer, so they have one grid. The observers are those of image models (`dsq_model::RangeObserver`), the grid of a range
//! is dsq-quant's. Not the layers that use the grids.

use super::data::Windows;
use super::{InputRanges, LmTrainConfig, rebuild};
use crate::{StateTensor, TrainError};
use burn::tensor::{Device, Tensor};
use dsq_checkpoint::{LlamaConfig, ModelConfig};
use dsq_model::{Llama, RangeObserver};
use dsq_quant::{InputGrid, QuantArgs, QuantConfig, QuantError};

/// Which of the orders of windows calibration reads; training reads 0 and 1.
const CALIBRATION: u64 = 2;

/// The inputs of a model that have static grids.
#[derive(Debug, Clone)]
pub(super) struct Inputs {
    ranges: InputRanges,
    sites: Vec<Site>,
}

/// A tensor that some layers read.
#[derive(Debug, Clone)]
struct Site {
    /// The layers, by module name.
    modules: Vec<String>,
    args: QuantArgs,
    observer: RangeObserver,
}

impl Site {
    /// The grid of the range so far.
    fn grid(&self) -> Result<InputGrid, TrainError> {
        let grid = match self.observer.range() {
            Some((lo, hi)) if lo.is_finite() && hi.is_finite() => InputGrid::of_range(self.args, lo, hi),
            Some((lo, hi)) => {
                Err(QuantError::NonFinite { index: 0, value: if lo.is_finite() { hi } else { lo }, count: 1 })
            }
            None => self.observer.qparams(&self.args).map(|p| InputGrid { args: self.args, params: Some(p) }),
        };
        grid.map_err(|e| self.error(e))
    }

    fn error(&self, source: QuantError) -> TrainError {
        TrainError::Quant { module: format!("{}, input", self.modules[0]), source }
    }

    /// Under which name a checkpoint keeps the observer.
    fn name(&self) -> String {
        format!("{}.input.range", self.modules[0])
    }
}

impl Inputs {
    /// Observers that have seen nothing; `None` where no layer's inputs have static grids.
    ///
    /// # Errors
    /// [`TrainError::Setting`] as [`InputRanges::check`], and for static activations without `ranges`.
    pub(super) fn new(
        model: &LlamaConfig,
        quant: &QuantConfig,
        config: &LmTrainConfig,
    ) -> Result<Option<Self>, TrainError> {
        config.check_quant(model, quant)?;
        let Some(ranges) = &config.inputs else { return Ok(None) };
        ranges.check()?;
        let architecture = ModelConfig::Llama(model.clone());
        let mut sites: Vec<Site> = Vec::new();
        for spec in architecture.linears() {
            let scheme = quant.scheme_for(&spec.module).and_then(|s| s.activations);
            let Some(args) = scheme.filter(|a| !a.is_dynamic()) else { continue };
            let modules = architecture.fused_with(&spec.module);
            if sites.iter().all(|s| s.modules != modules) {
                let observer = RangeObserver::new(ranges.observer, ranges.rate)
                    .map_err(|source| TrainError::Quant { module: spec.module, source })?;
                sites.push(Site { modules, args, observer });
            }
        }
        // Learned grids start at the observed ranges and then go their own way.
        let freeze_step = if config.learned_scales.is_some() { 0 } else { ranges.freeze_step };
        Ok((!sites.is_empty()).then(|| Self { ranges: InputRanges { freeze_step, ..ranges.clone() }, sites }))
    }

    /// Whether the ranges follow the model in step `step` of QAT, from 0.
    pub(super) fn follow(&self, step: usize) -> bool {
        step < self.ranges.freeze_step
    }

    /// Takes one batch of a tensor that `modules` read; the grid of the range so far, this batch seen. `None` for a tensor without a
    /// static grid. Every token counts: windows are full, there is no padding.
    pub(super) fn observe(&mut self, modules: &[String], x: &Tensor<3>) -> Result<Option<InputGrid>, TrainError> {
        let Some(site) = self.sites.iter_mut().find(|s| s.modules == modules) else { return Ok(None) };
        site.observer.observe(x).map_err(|e| site.error(e))?;
        site.grid().map(Some)
    }

    /// Observes batches of `model`, in float. They have the size of a QAT step and an order of their own.
    pub(super) fn calibrate(
        &mut self,
        model: &Llama,
        tokens: &[u32],
        config: &LmTrainConfig,
    ) -> Result<(), TrainError> {
        // Without gradients, and without anything that puts values on a grid.
        let tensors: Vec<StateTensor> =
            model.named_tensors().into_iter().map(|(name, shape, data)| StateTensor { name, shape, data }).collect();
        let mut float = rebuild(model.config(), &tensors, &Device::flex())?;
        let (phase, count) = (&config.qat, self.ranges.calibration_batches);
        let mut windows = Windows::new(tokens, phase.seq_len, config.seed, CALIBRATION);
        for batch in 0..count {
            let (ids, _) = windows.batch((batch * phase.batch_size) as u64, phase.batch_size);
            float.watched(ids.into(), phase.batch_size, &mut |modules, x| self.observe(modules, x).map(|_| None))?;
        }
        Ok(())
    }

    /// The grids of the ranges so far, by module.
    pub(super) fn grids(&self) -> Result<Vec<(String, InputGrid)>, TrainError> {
        let mut out = Vec::new();
        for site in &self.sites {
            let grid = site.grid()?;
            out.extend(site.modules.iter().map(|m| (m.clone(), grid)));
        }
        Ok(out)
    }

    /// What a checkpoint keeps.
    pub(super) fn state(&self, prefix: &str) -> Vec<StateTensor> {
        let tensor = |site: &Site| {
            let data = site.observer.state();
            StateTensor { name: format!("{prefix}{}", site.name()), shape: vec![data.len()], data }
        };
        self.sites.iter().map(tensor).collect()
    }

    /// Goes on from [`Inputs::state`]; whether there was any.
    ///
    /// # Errors
    /// The name of a state that is absent beside others, or that nothing can have given.
    pub(super) fn restore(&mut self, tensors: &[StateTensor]) -> Result<bool, String> {
        let states: Vec<_> = self.sites.iter().map(|s| tensors.iter().find(|t| t.name == s.name())).collect();
        if states.iter().all(Option::is_none) {
            return Ok(false);
        }
        for (site, state) in self.sites.iter_mut().zip(states) {
            let (kind, rate) = (self.ranges.observer, self.ranges.rate);
            let observer = state.and_then(|t| RangeObserver::from_state(kind, rate, &t.data));
            site.observer = observer.filter(|o| o.range().is_some()).ok_or_else(|| site.name())?;
        }
        Ok(true)
    }
}

/// The static grids of the inputs of `model`'s layers that QAT would start from were `model` its float result, by module: ranges of
/// its activations, its weights as they are, over the batches of text and by the observer that `config` names. None where `quant`
/// has no static activations.
///
/// # Errors
/// [`TrainError::Setting`] as [`super::train_lm`] before its first step; [`TrainError::Quant`] naming the layer for activations that
/// are not finite.
pub fn observe_inputs(
    model: &Llama,
    tokens: &[u32],
    config: &LmTrainConfig,
    quant: &QuantConfig,
) -> Result<Vec<(String, InputGrid)>, TrainError> {
    let Some(mut inputs) = Inputs::new(model.config(), quant, config)? else { return Ok(Vec::new()) };
    config.check(model.config(), tokens.len())?;
    inputs.calibrate(model, tokens, config)?;
    inputs.grids()
}

#[cfg(test)]
mod tests;
