//! Softmax cross-entropy with gradients; the arithmetic is `dsq_kernels::train::cross_entropy`.

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

/// The backend side of [`cross_entropy`].
#[backend_extension(Flex, Autodiff)]
pub trait CrossEntropyOps: Backend {
    /// Sum of the losses of the labelled rows, divided by `denominator`: `[1]`.
    fn dsq_cross_entropy(logits: FloatTensor<Self>, labels: Arc<Vec<i32>>, denominator: f32) -> FloatTensor<Self>;
}

fn forward(logits: &FlexTensor, labels: &[i32], denominator: f32) -> (FlexTensor, Vec<f32>) {
    let n = logits.shape().iter().last().copied().unwrap_or(1);
    let (sum, lse) = kernel::cross_entropy(values(logits), labels, n);
    (tensor(vec![(sum / f64::from(denominator)) as f32], [1]), lse)
}

impl CrossEntropyOps for Flex {
    fn dsq_cross_entropy(logits: FlexTensor, labels: Arc<Vec<i32>>, denominator: f32) -> FlexTensor {
        forward(&contiguous(logits), &labels, denominator).0
    }
}

impl<C: CheckpointStrategy> CrossEntropyOps for Autodiff<Flex, C> {
    fn dsq_cross_entropy(logits: FloatTensor<Self>, labels: Arc<Vec<i32>>, denominator: f32) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct CrossEntropyBackward;

        impl Backward<Flex, 1> for CrossEntropyBackward {
            type State = (FlexTensor, Arc<Vec<i32>>, Vec<f32>, f32);

            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
                let (logits, labels, lse, denominator) = ops.state;
                unary::<Flex, _>(ops.parents, ops.node, grads, |grad| {
                    let scale = values(&contiguous(grad))[0] / denominator;
                    let n = logits.shape().iter().last().copied().unwrap_or(1);
                    let mut out = vec![0.0; labels.len() * n];
                    kernel::cross_entropy_gradient(values(&logits), &labels, &lse, n, scale, &mut out);
                    tensor(out, logits.shape())
                });
            }
        }

        let (logits, node) = logits.into_parts();
        let logits = contiguous(logits);
        let (out, lse) = forward(&logits, &labels, denominator);
        match CrossEntropyBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((logits, labels, lse, denominator), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}

/// The sum over rows of `logits [.., n]` of their cross-entropy with `labels` (one for each row,
/// [`dsq_kernels::train::IGNORED`] takes no part), divided by `denominator`: `[1]`.
///
/// The caller gives the denominator, so that several micro-batches can share the mean over all their label tokens.
///
/// # Panics
/// When there are not as many labels as rows, or a label lies outside the classes.
pub(crate) fn cross_entropy<const D: usize>(logits: Tensor<D>, labels: Arc<Vec<i32>>, denominator: f32) -> Tensor<1> {
    let dims = logits.dims();
    assert_eq!(dims[..D - 1].iter().product::<usize>(), labels.len(), "one label for each row");
    Tensor::from_dispatch(<Dispatch as CrossEntropyOps>::dsq_cross_entropy(logits.into_dispatch(), labels, denominator))
}
