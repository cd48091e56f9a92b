//! The hidden-state loss of distillation, with gradients: how far a student's residual stream is from a teacher's after each
//! layer. The arithmetic is `dsq_kernels::train::masked_error`; the teacher's part is a constant.

use super::slice_op::{Slice, SliceOp, apply1};
use burn::tensor::Tensor;
use dsq_kernels::train as kernel;
use std::sync::Arc;

/// What a student's residual stream is compared with.
#[derive(Debug, Clone)]
pub struct HiddenTarget {
    /// The teacher's residual stream after each layer, `[b, t, d]` each.
    pub states: Vec<Vec<f32>>,
    /// What the loss is multiplied with.
    pub weight: f32,
}

/// `weight` times the mean over layers of `sum (student - teacher)^2 / sum teacher^2`, both sums over the tokens of `labels`
/// that have one: `[1]`; 0 without layers or labels. `states` are the student's, `[b, t, d]` each.
///
/// # Panics
/// When the student has not as many layers or values as the teacher, or there is not one label for each token.
pub(crate) fn hidden_loss(states: Vec<Tensor<3>>, target: HiddenTarget, labels: &Arc<Vec<i32>>) -> Option<Tensor<1>> {
    let layers = states.len();
    assert_eq!(layers, target.states.len(), "as many layers as the teacher's");
    let errors = states.into_iter().zip(target.states).map(|(state, target)| {
        let op = RelativeError { target, labels: labels.clone() };
        apply1::<3, 1>(Arc::new(op), state)
    });
    errors.reduce(|a, b| a + b).map(|sum| sum.mul_scalar(target.weight / layers as f32))
}

/// The relative squared error of one layer.
#[derive(Debug)]
struct RelativeError {
    target: Vec<f32>,
    labels: Arc<Vec<i32>>,
}

impl RelativeError {
    /// A sum of squares as a share of the teacher's. A teacher of nothing but zeros has no size to measure by, and no tokens
    /// have no error: both give 0.
    fn share(error: f64, size: f64) -> f32 {
        if size == 0.0 { 0.0 } else { (error / size) as f32 }
    }
}

impl SliceOp for RelativeError {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        let [error, size] = kernel::masked_error(x[0].data, &self.target, &self.labels);
        (vec![Self::share(error, size)], vec![1])
    }

    fn backward(&self, x: &[Slice], g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let [_, size] = kernel::masked_error(x[0].data, &self.target, &self.labels);
        let scale = Self::share(f64::from(g[0]), size);
        vec![Some(kernel::masked_error_gradient(x[0].data, &self.target, &self.labels, scale))]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::IGNORED;
    use burn::tensor::{Device, TensorData};

    #[test]
    fn the_worked_example_of_the_documentation() {
        let device = Device::flex().autodiff();
        let s = Tensor::<3>::from_data(TensorData::new(vec![3.0f32, 5.0, 1.0, 5.0, 0.0, 0.0], [1, 3, 2]), &device);
        let s = s.require_grad();
        let target = HiddenTarget { states: vec![vec![3.0, 4.0, 0.0, 5.0, 9.0, 9.0]], weight: 0.5 };
        let loss = hidden_loss(vec![s.clone()], target, &Arc::new(vec![7, 7, IGNORED])).unwrap();
        let grads = loss.backward();
        assert_eq!(loss.into_data().try_to_vec::<f32>().unwrap(), [0.02]);
        let gradient = s.grad(&grads).unwrap().into_data().try_to_vec::<f32>().unwrap();
        assert_eq!(gradient, [0.0, 0.02, 0.02, 0.0, 0.0, 0.0]);
    }
}
