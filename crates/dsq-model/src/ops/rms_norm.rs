//! RMSNorm with gradients; the arithmetic is `dsq_kernels::train::rms_norm`.

use super::flex::{FlexTensor, contiguous, tensor, values};
use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use dsq_kernels::train as kernel;

/// The backend side of [`rms_norm`].
#[backend_extension(Flex, Autodiff)]
pub trait RmsNormOps: Backend {
    /// Normalises the last dimension of `x`.
    fn dsq_rms_norm(x: FloatTensor<Self>, w: FloatTensor<Self>, eps: f32) -> FloatTensor<Self>;
}

fn forward(x: &FlexTensor, w: &FlexTensor, eps: f32) -> (FlexTensor, Vec<f32>) {
    let (xs, ws) = (values(x), values(w));
    let (mut out, mut inv) = (vec![0.0; xs.len()], vec![0.0; xs.len() / ws.len()]);
    kernel::rms_norm(xs, ws, eps, &mut out, &mut inv);
    (tensor(out, x.shape()), inv)
}

impl RmsNormOps for Flex {
    fn dsq_rms_norm(x: FlexTensor, w: FlexTensor, eps: f32) -> FlexTensor {
        forward(&contiguous(x), &contiguous(w), eps).0
    }
}

impl<C: CheckpointStrategy> RmsNormOps for Autodiff<Flex, C> {
    fn dsq_rms_norm(x: FloatTensor<Self>, w: FloatTensor<Self>, eps: f32) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct RmsNormBackward;

        impl Backward<Flex, 2> for RmsNormBackward {
            type State = (FlexTensor, FlexTensor, Vec<f32>);

            fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
                let (x, w, inv) = ops.state;
                let grad = contiguous(grads.consume::<Flex>(&ops.node));
                let mut dx = vec![0.0; values(&x).len()];
                let dw = kernel::rms_norm_gradient(values(&grad), values(&x), values(&w), &inv, &mut dx);
                let [x_node, w_node] = ops.parents;
                if let Some(node) = x_node {
                    grads.register::<Flex>(node.id, tensor(dx, x.shape()));
                }
                if let Some(node) = w_node {
                    grads.register::<Flex>(node.id, tensor(dw, w.shape()));
                }
            }
        }

        let ((x, x_node), (w, w_node)) = (x.into_parts(), w.into_parts());
        let (x, w) = (contiguous(x), contiguous(w));
        let (out, inv) = forward(&x, &w, eps);
        match RmsNormBackward.prepare::<C>([x_node, w_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((x, w, inv), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}

/// `x / sqrt(mean(x^2) + eps) * w` over the last dimension, `w` as long as it.
pub(crate) fn rms_norm<const D: usize>(x: Tensor<D>, w: Tensor<1>, eps: f32) -> Tensor<D> {
    assert_eq!(x.dims()[D - 1], w.dims()[0], "the weight is as long as the last dimension");
    Tensor::from_dispatch(<Dispatch as RmsNormOps>::dsq_rms_norm(x.into_dispatch(), w.into_dispatch(), eps))
}
