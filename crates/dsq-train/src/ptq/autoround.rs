//! Learned rounding of a block, AutoRound's way: each weight may be moved by at most half a step before it is rounded, and
//! each scale (and zero point) by a share of itself; signs of gradients say which way, so that a code goes up or down by what it does
//! to the block's outputs, and no weight moves further than half of its grid's step. The steps serve convolutions too
//! (`cnn/learned.rs`). Not the walk over blocks (see `blockwise.rs`, which trains weights freely instead).
//!
//! Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs" (arXiv:2309.05516): rate
//! `1 / steps`, falling linearly to 0 (taken in the middle of each step, so that all of them add up to a half), of steps of the
//! code for rounding and of the first scale for the scale, so that neither can move further than a half. Two differences:
//! scales are moved themselves where the paper moves the ends of ranges, and what is kept is the last step, if it is better
//! than rounding, not the best one.

use super::Run;
use super::blockwise::{scalar, shuffled};
use crate::TrainError;
use crate::adamw::NamedGradients;
use crate::qat::{GRID_SCALE, GRID_ZERO};
use burn::tensor::{Device, Tensor};
use dsq_model::layers::Linear;
use dsq_model::{Layer, LearnedGrid, Sequences, parameter_path};
use dsq_quant::QuantArgs;

/// What is moved: a weight and its grid.
#[derive(Debug, Clone)]
pub(super) struct Latent {
    /// `n` and `k`.
    pub size: [usize; 2],
    /// The global scale above the others, of a grid that has one.
    pub global: Option<f32>,
    /// What is rounded, `[n, k]`.
    pub weight: Vec<f32>,
    /// One for each group.
    pub scale: Vec<f32>,
    /// As many as scales; empty when symmetric.
    pub zero: Vec<f32>,
}

impl Latent {
    /// Takes over row `r` of another, for weights `[n, k]` with one scale for each row.
    pub(super) fn copy_row(&mut self, from: &Latent, r: usize, k: usize) {
        let row = r * k..(r + 1) * k;
        self.weight[row.clone()].copy_from_slice(&from.weight[row]);
        self.scale[r] = from.scale[r];
        if let Some(zero) = self.zero.get_mut(r) {
            *zero = from.zero[r];
        }
    }

    /// One step of `rate` against the signs of the gradients `[weight, scale, zero point]`; what has none stays. `origin`: where
    /// all steps started.
    pub(super) fn move_by_signs(&mut self, origin: &Latent, args: &QuantArgs, grads: [Option<&[f32]>; 3], rate: f32) {
        let [weight, scale, zero] = grads;
        for ((s, first), g) in self.scale.iter_mut().zip(&origin.scale).zip(scale.unwrap_or_default()) {
            *s -= rate * first * sign(*g);
        }
        let half = (args.qtype.qmax() + 1) as f32;
        self.zero.iter_mut().zip(zero.unwrap_or_default()).for_each(|(z, g)| *z -= rate * half * sign(*g));
        let Some(g) = weight else { return };
        let [n, k] = self.size;
        for (group, run) in args.runs(n, k) {
            let stored = args.stored_learned_qparams(self.scale[group], 0.0, self.global);
            let scale = args.in_effect(stored, self.global).scale;
            for i in run {
                let first = origin.weight[i];
                // Numbers of a float code are as far from one another as the float value's binade has them.
                let step = args.qtype.float().map_or(scale, |f| f.step(first / scale) * scale);
                let moved = self.weight[i] - rate * step * sign(g[i]);
                self.weight[i] = moved.clamp(first - 0.5 * step, first + 0.5 * step);
            }
        }
    }
}

/// The rate of step `step` (from 0) of `steps`: falling linearly, a half in all.
pub(super) fn rate(step: usize, steps: usize) -> f32 {
    ((steps - step) as f32 - 0.5) / (steps as f32).powi(2)
}

/// -1, 0 or 1.
fn sign(g: f32) -> f32 {
    if g == 0.0 { 0.0 } else { g.signum() }
}

impl Run<'_> {
    /// Learns the rounding of a block whose linears hold the float weights and the grids to start from.
    pub(super) fn round_block(&mut self, mut student: Layer, targets: &[Tensor<3>]) -> Result<Layer, TrainError> {
        let tuning = self.settings.tuning;
        let count = self.stream.len();
        let steps = tuning.epochs * count;
        let origin = |(part, l): (String, &Linear)| latent(l).map(|origin| (part, origin));
        let origins: Vec<(String, Latent)> = student.linears().into_iter().filter_map(origin).collect();
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
            for (part, linear) in student.linears_mut() {
                if let Some((_, origin)) = origins.iter().find(|o| o.0 == part) {
                    step_linear(linear, &parameter_path(&part), origin, &grads, rate(step, steps));
                }
            }
            self.tick(1);
        }
        Ok(student)
    }
}

/// What is moved of a linear that has a grid.
fn latent(linear: &Linear) -> Option<Latent> {
    linear.grid().map(|g| {
        let (scale, zero) = g.values();
        let (size, global) = (linear.weight.dims(), g.global());
        Latent { size, global, weight: linear.values(), scale, zero: zero.unwrap_or_default() }
    })
}

/// One step of a linear, whose parameters have paths that begin with `part`.
fn step_linear(linear: &mut Linear, part: &str, origin: &Latent, grads: &NamedGradients, rate: f32) {
    let path = |what: &str| grads.get(&format!("{part}.{what}"));
    let (Some(args), Some(mut moved)) = (linear.quant().copied(), latent(linear)) else { return };
    moved.move_by_signs(origin, &args, ["weight", GRID_SCALE, GRID_ZERO].map(path), rate);
    let Latent { global, weight, scale, zero, .. } = moved;
    linear.set_values(weight);
    linear.set_grid(
        LearnedGrid::from_values(scale, (!zero.is_empty()).then_some(zero), &Device::flex().autodiff()).under(global),
    );
}
