//! `x w^T` for a weight `[n, k]`, with gradients; the products are `dsq_kernels::train::matmul`. (Burn's matmul on this
//! backend clears and copies each result once more, uses AVX2 at most, and would give the weight's gradient as a
//! transposed view, which every later element-wise pass walks slowly.)

use super::flex::{FlexTensor, contiguous, tensor, values};
use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind, binary},
};
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::{Shape, Tensor};
use dsq_kernels::train::{Strided, matmul};

/// The backend side of [`linear`].
#[backend_extension(Flex, Autodiff)]
pub trait LinearOps: Backend {
    /// `x [.., k]` times the transpose of `w [n, k]`.
    fn dsq_linear(x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self>;
}

fn forward(x: &FlexTensor, w: &FlexTensor) -> FlexTensor {
    let [n, k] = [w.shape()[0], w.shape()[1]];
    let x_values = values(x);
    let m = x_values.len().checked_div(k).unwrap_or(0);
    let y = matmul(Strided::rows(x_values, k), Strided::rows(values(w), k).t(), [m, n, k]);
    let mut shape: Vec<usize> = x.shape().iter().copied().collect();
    if let Some(last) = shape.last_mut() {
        *last = n;
    }
    tensor(y, Shape::from(shape))
}

impl LinearOps for Flex {
    fn dsq_linear(x: FlexTensor, w: FlexTensor) -> FlexTensor {
        forward(&contiguous(x), &contiguous(w))
    }
}

impl<C: CheckpointStrategy> LinearOps for Autodiff<Flex, C> {
    fn dsq_linear(x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct LinearBackward;

        impl Backward<Flex, 2> for LinearBackward {
            type State = (FlexTensor, FlexTensor);

            fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
                let (x, w) = ops.state;
                let [n, k] = [w.shape()[0], w.shape()[1]];
                let m = values(&x).len().checked_div(k).unwrap_or(0);
                binary::<Flex, _, _>(
                    ops.parents,
                    ops.node,
                    grads,
                    |grad| {
                        let grad = contiguous(grad);
                        let dx = matmul(Strided::rows(values(&grad), n), Strided::rows(values(&w), k), [m, k, n]);
                        tensor(dx, x.shape())
                    },
                    |grad| {
                        let grad = contiguous(grad);
                        let dw = matmul(Strided::rows(values(&grad), n).t(), Strided::rows(values(&x), k), [n, k, m]);
                        tensor(dw, w.shape())
                    },
                );
            }
        }

        let ((x, x_node), (w, w_node)) = (x.into_parts(), w.into_parts());
        let (x, w) = (contiguous(x), contiguous(w));
        let out = forward(&x, &w);
        match LinearBackward.prepare::<C>([x_node, w_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((x, w), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}

/// `x [.., k]` times the transpose of `w [n, k]`: `[.., n]`.
///
/// # Panics
/// When the last dimension of `x` is not `k`.
pub(crate) fn linear<const D: usize>(x: Tensor<D>, w: Tensor<2>) -> Tensor<D> {
    assert_eq!(x.dims()[D - 1], w.dims()[1], "the input is as wide as the weight");
    Tensor::from_dispatch(<Dispatch as LinearOps>::dsq_linear(x.into_dispatch(), w.into_dispatch()))
}
