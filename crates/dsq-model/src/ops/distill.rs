//! Distillation loss with gradients; the arithmetic is `dsq_kernels::train::distill`. The teacher's logits are constants.

use super::flex::{FlexTensor, contiguous, tensor, values};
use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind, unary},
};
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use dsq_kernels::train as kernel;
use std::sync::Arc;

/// What a student's logits are compared with.
#[derive(Debug, Clone)]
pub struct Teacher {
    /// The teacher's logits, as many as the student's.
    pub logits: Arc<Vec<f32>>,
    /// Temperature of both, positive.
    pub temperature: f32,
}

/// The backend side of [`distill`].
#[backend_extension(Flex, Autodiff)]
pub trait DistillOps: Backend {
    /// Sum of the losses of the rows, divided by `denominator`: `[1]`.
    fn dsq_distill(logits: FloatTensor<Self>, teacher: Teacher, denominator: f32) -> FloatTensor<Self>;
}

fn classes(logits: &FlexTensor) -> usize {
    logits.shape().iter().last().copied().unwrap_or(1)
}

fn forward(logits: &FlexTensor, teacher: &Teacher, denominator: f32) -> (FlexTensor, Vec<[f32; 2]>) {
    let (sum, lse) = kernel::distill(values(logits), &teacher.logits, classes(logits), teacher.temperature);
    (tensor(vec![(sum / f64::from(denominator)) as f32], [1]), lse)
}

impl DistillOps for Flex {
    fn dsq_distill(logits: FlexTensor, teacher: Teacher, denominator: f32) -> FlexTensor {
        forward(&contiguous(logits), &teacher, denominator).0
    }
}

impl<C: CheckpointStrategy> DistillOps for Autodiff<Flex, C> {
    fn dsq_distill(logits: FloatTensor<Self>, teacher: Teacher, denominator: f32) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct DistillBackward;

        impl Backward<Flex, 1> for DistillBackward {
            type State = (FlexTensor, Teacher, Vec<[f32; 2]>, f32);

            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
                let (logits, teacher, lse, denominator) = ops.state;
                unary::<Flex, _>(ops.parents, ops.node, grads, |grad| {
                    let scale = values(&contiguous(grad))[0] / denominator;
                    let student = values(&logits);
                    let mut out = vec![0.0; student.len()];
                    let n = classes(&logits);
                    kernel::distill_gradient(student, &teacher.logits, &lse, n, teacher.temperature, scale, &mut out);
                    tensor(out, logits.shape())
                });
            }
        }

        let (logits, node) = logits.into_parts();
        let logits = contiguous(logits);
        let (out, lse) = forward(&logits, &teacher, denominator);
        match DistillBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((logits, teacher, lse, denominator), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}

/// The sum over rows of `logits [.., n]` of `T^2 KL(teacher || student)`, divided by `denominator`: `[1]`.
///
/// # Panics
/// When there are not as many teacher's logits as student's.
pub(crate) fn distill<const D: usize>(logits: Tensor<D>, teacher: Teacher, denominator: f32) -> Tensor<1> {
    assert_eq!(logits.dims().iter().product::<usize>(), teacher.logits.len(), "as many logits as the teacher's");
    Tensor::from_dispatch(<Dispatch as DistillOps>::dsq_distill(logits.into_dispatch(), teacher, denominator))
}
