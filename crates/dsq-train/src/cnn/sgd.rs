//! Stochastic gradient descent with Nesterov momentum on plain vectors, in PyTorch's order of operations. Its
//! whole state is the momentum buffers, so a resumed run is bit-equal.

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
