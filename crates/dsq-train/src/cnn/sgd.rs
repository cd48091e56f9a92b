//! Stochastic gradient descent with Nesterov momentum on plain vectors, in PyTorch's order of operations; learned grids
//! take Adam, as in language models. The whole state is momentum buffers and Adam's moments, so a resumed run is bit-equal.

use crate::qat::grid_group;
use crate::{AdamW, StateTensor};
use dsq_model::resnet::ResNet;

/// Momentum buffers, one for each parameter, and Adam's moments of learned grids.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Sgd {
    /// Empty for a learned grid.
    pub(super) buffers: Vec<Vec<f32>>,
    grids: AdamW,
}

/// Beginning of the names of the moments in a checkpoint.
const MOMENTS: &str = "grids.";

impl Default for Sgd {
    fn default() -> Self {
        Self { buffers: Vec::new(), grids: AdamW::new(0.9, 0.95, 1e-8) }
    }
}

/// The rates of one step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rates {
    /// Learning rate.
    pub(super) rate: f64,
    /// That of learned grids, a share of their size (see [`grid_group`]).
    pub(super) grid_rate: f64,
    /// Momentum.
    pub(super) momentum: f64,
    /// Weight decay of weights.
    pub(super) decay: f64,
}

impl Sgd {
    /// One step: `g += decay * w`; `b = momentum * b + g`; `w -= lr * (g + momentum * b)`; learned grids by Adam.
    pub(super) fn step(&mut self, net: &mut ResNet, grads: Vec<Vec<f32>>, rates: Rates) {
        let (lr, momentum) = (rates.rate as f32, rates.momentum as f32);
        self.buffers.resize_with(grads.len(), Vec::new);
        let mut grids = Vec::new();
        for ((param, grad), buffer) in net.params_mut().into_iter().zip(grads).zip(&mut self.buffers) {
            if let Some(part) = param.grid {
                let group = grid_group(part, param.data);
                grids.push((param.name, param.data, grad, group));
                continue;
            }
            buffer.resize(grad.len(), 0.0);
            let decay = if param.decay { rates.decay as f32 } else { 0.0 };
            for ((w, g), b) in param.data.iter_mut().zip(grad).zip(buffer.iter_mut()) {
                let g = g + decay * *w;
                *b = momentum * *b + g;
                *w -= lr * (g + momentum * *b);
            }
        }
        if !grids.is_empty() {
            self.grids.step_values(grids, rates.grid_rate);
        }
    }

    /// Updates of learned grids so far, for a checkpoint.
    pub(super) fn grid_updates(&self) -> u64 {
        self.grids.updates()
    }

    /// Everything but that number, for a checkpoint.
    pub(super) fn state(&self) -> Vec<StateTensor> {
        let buffer = |(i, b): (usize, &Vec<f32>)| {
            (!b.is_empty()).then(|| StateTensor {
                name: format!("momentum.{i}"),
                shape: vec![b.len()],
                data: b.clone(),
            })
        };
        let buffers = self.buffers.iter().enumerate().filter_map(buffer);
        buffers.chain(self.grids.state(MOMENTS)).collect()
    }

    /// Takes up what [`Sgd::state`] and [`Sgd::grid_updates`] gave, with `buffers` momentum buffers.
    pub(super) fn restore(tensors: &[StateTensor], buffers: usize, grid_updates: u64) -> Self {
        let mut out = Self::default();
        let buffer = |i: usize| {
            let name = format!("momentum.{i}");
            tensors.iter().find(|t| t.name == name).map(|t| t.data.clone()).unwrap_or_default()
        };
        out.buffers = (0..buffers).map(buffer).collect();
        out.grids.restore(MOMENTS, tensors, grid_updates);
        out
    }
}

/// Scales the gradients so that their joint norm is at most `limit`; returns the norm before. Summed in f64, in order.
pub(super) fn clip(grads: &mut [Vec<f32>], limit: f64) -> f64 {
    let norm = grads.iter().flatten().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
    if norm > limit {
        let factor = (limit / norm) as f32;
        grads.iter_mut().flatten().for_each(|g| *g *= factor);
    }
    norm
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clipping_keeps_the_direction() {
        let mut g = vec![vec![3.0f32], vec![0.0, 4.0]];
        assert_eq!(clip(&mut g, 10.0), 5.0);
        assert_eq!(g, [vec![3.0], vec![0.0, 4.0]]);
        assert_eq!(clip(&mut g, 2.5), 5.0);
        assert_eq!(g, [vec![1.5], vec![0.0, 2.0]]);
    }
}
