//! Learned rounding of a block, AutoRound's way: each weight may be moved by at most half a step before it is rounded, and
//! each scale (and zero point) by a share of itself; signs of gradients say which way, so that a code goes up or down by what it does
//! to the block's outputs, and no weight moves further than half of its grid's step. Not the walk over blocks (see `blockwise.rs`, which trains
//! weights freely instead).
//!
//! Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs" (arXiv:2309.05516): rate
//! `1 / steps`, falling linearly to 0 (taken in the middle of each step, so that all of them add up to a half), of steps of the code for rounding and of the first scale for the scale, so that neither can
//! move further than a half. Two differences: scales are moved themselves where the paper moves the ends of ranges,
//! and what is kept is the last step, if it is better than rounding, not the best one.

use super::Run;
use super::blockwise::{scalar, shuffled};
use crate::TrainError;
use crate::adamw::NamedGradients;
use crate::qat::{GRID_SCALE, GRID_ZERO};
use burn::tensor::{Device, Tensor};
use dsq_model::layers::Linear;
use dsq_model::{Layer, LearnedGrid, Sequences};

/// Where a linear started.
struct Origin {
    part: &'static str,
    /// Weight `[n, k]`.
    weight: Vec<f32>,
    scale: Vec<f32>,
}

impl Run<'_> {
    /// Learns the rounding of a block whose linears hold the float weights and the grids to start from.
    pub(super) fn round_block(&mut self, mut student: Layer, targets: &[Tensor<3>]) -> Result<Layer, TrainError> {
        let tuning = self.settings.tuning;
        let count = self.stream.len();
        let steps = tuning.epochs * count;
        let origin = |(part, l): (&'static str, &Linear)| {
            l.grid().map(|g| Origin { part, weight: l.values(), scale: g.values().0 })
        };
        let origins: Vec<Origin> = student.linears().into_iter().filter_map(origin).collect();
        let tracked = |x: &Tensor<3>| x.clone().autodiff();
        for step in 0..steps {
            let stream = (self.progress.layer * tuning.epochs + step / count) as u64;
            let i = shuffled(count, tuning.seed, stream)[step % count];
            let (batch, x): &(Sequences, Tensor<3>) = &self.stream[i];
            let loss = (student.forward(tracked(x), batch) - tracked(&targets[i])).powi_scalar(2).mean();
            let error = |value| TrainError::Numerics {
                what: format!("model.layers.{}: learned rounding", self.progress.layer),
                step: step as u64 + 1,
                value,
            };
            let value = scalar(&loss);
            if !value.is_finite() {
                return Err(error(value));
            }
            let grads = NamedGradients::take(&student, loss.backward());
            if !grads.norm().is_finite() {
                return Err(error(grads.norm()));
            }
            let rate = ((steps - step) as f32 - 0.5) / (steps as f32).powi(2);
            for (part, linear) in student.linears_mut() {
                if let Some(origin) = origins.iter().find(|o| o.part == part) {
                    move_by_signs(linear, origin, &grads, rate);
                }
            }
            self.tick(1);
        }
        Ok(student)
    }
}

/// -1, 0 or 1.
fn sign(g: f32) -> f32 {
    if g == 0.0 { 0.0 } else { g.signum() }
}

/// One step of a linear, against the signs of its gradients.
fn move_by_signs(linear: &mut Linear, origin: &Origin, grads: &NamedGradients, rate: f32) {
    let path = |what: &str| grads.get(&format!("{}.{what}", origin.part));
    let (Some(args), Some(grid)) = (linear.quant().copied(), linear.grid()) else { return };
    let (global, (mut scale, mut zero)) = (grid.global(), grid.values());
    if let Some(g) = path(GRID_SCALE) {
        scale.iter_mut().zip(&origin.scale).zip(g).for_each(|((s, first), g)| *s -= rate * first * sign(*g));
    }
    if let (Some(zero), Some(g)) = (&mut zero, path(GRID_ZERO)) {
        let half = (args.qtype.qmax() + 1) as f32;
        zero.iter_mut().zip(g).for_each(|(z, g)| *z -= rate * half * sign(*g));
    }
    let mut weight = linear.values();
    if let Some(g) = path("weight") {
        let [n, k] = linear.weight.dims();
        for (group, run) in args.runs(n, k) {
            let stored = args.stored_learned_qparams(scale[group], 0.0, global);
            let scale = args.in_effect(stored, global).scale;
            for i in run {
                let first = origin.weight[i];
                // Numbers of a float code are as far from one another as the float value's binade has them.
                let step = args.qtype.float().map_or(scale, |f| f.step(first / scale) * scale);
                let moved = weight[i] - rate * step * sign(g[i]);
                weight[i] = moved.clamp(first - 0.5 * step, first + 0.5 * step);
            }
        }
    }
    linear.set_values(weight);
    linear.set_grid(LearnedGrid::from_values(scale, zero, &Device::flex().autodiff()).under(global));
}
