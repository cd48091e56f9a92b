//! Stochastic gradient descent with Nesterov momentum on plain vectors, in PyTorch's order of operations, and the learning
//! rate schedule. Its whole state is the momentum buffers, so a resumed run is bit-equal.

use dsq_model::resnet::ResNet;

/// Momentum buffers, one for each parameter.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Sgd {
    pub(super) buffers: Vec<Vec<f32>>,
}

impl Sgd {
    /// One step: `g += decay * w`; `b = momentum * b + g`; `w -= lr * (g + momentum * b)`.
    pub(super) fn step(&mut self, net: &mut ResNet, grads: Vec<Vec<f32>>, lr: f64, momentum: f64, decay: f64) {
        let (lr, momentum) = (lr as f32, momentum as f32);
        self.buffers.resize_with(grads.len(), Vec::new);
        for ((param, grad), buffer) in net.params_mut().into_iter().zip(grads).zip(&mut self.buffers) {
            buffer.resize(grad.len(), 0.0);
            let decay = if param.decay { decay as f32 } else { 0.0 };
            for ((w, g), b) in param.data.iter_mut().zip(grad).zip(buffer.iter_mut()) {
                let g = g + decay * *w;
                *b = momentum * *b + g;
                *w -= lr * (g + momentum * *b);
            }
        }
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

/// The learning rate of step `step` of `steps`: linear up to `peak` over `warmup` steps, then half a cosine down to zero.
pub(super) fn learning_rate(step: usize, steps: usize, warmup: usize, peak: f64) -> f64 {
    if step < warmup {
        return peak * (step + 1) as f64 / warmup as f64;
    }
    let t = (step - warmup) as f64 / (steps - warmup.min(steps - 1)) as f64;
    peak * 0.5 * (1.0 + (std::f64::consts::PI * t).cos())
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

    #[test]
    fn the_rate_rises_then_falls() {
        let rates: Vec<f64> = (0..10).map(|s| learning_rate(s, 10, 2, 1.0)).collect();
        assert_eq!(rates[..3], [0.5, 1.0, 1.0]);
        assert!(rates[2..].windows(2).all(|w| w[1] < w[0]) && rates[9] > 0.0 && rates[9] < 0.1);
        assert_eq!(learning_rate(0, 1, 0, 0.3), 0.3);
        assert!(learning_rate(3, 4, 9, 1.0).is_finite());
    }
}
