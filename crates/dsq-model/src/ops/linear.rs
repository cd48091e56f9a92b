//! `x w^T` for a weight `[n, k]`, with gradients that come out contiguous (Burn's own matmul would give the weight's
//! gradient as a transposed view, which every later element-wise pass walks slowly). The products are Burn's.

use super::flex::{FlexTensor, contiguous};
use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind, binary},
};
use burn::backend::{
    Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension, ops::FloatTensorOps, tensor::FloatTensor,
};
use burn::tensor::{Shape, Tensor};

/// The backend side of [`linear`].
#[backend_extension(Flex, Autodiff)]
pub trait LinearOps: Backend {
    /// `x [.., k]` times the transpose of `w [n, k]`.
    fn dsq_linear(x: FloatTensor<Self>, w: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// As `[m, last dimension]`.
fn rows(t: FlexTensor) -> FlexTensor {
    let t = contiguous(t);
    let k = t.shape().iter().last().copied().unwrap_or(1);
    let m = t.shape().num_elements().checked_div(k).unwrap_or(0);
    Flex::float_reshape(t, Shape::from([m, k]))
}

impl LinearOps for Flex {
    fn dsq_linear(x: FlexTensor, w: FlexTensor) -> FlexTensor {
        let mut shape: Vec<usize> = x.shape().iter().copied().collect();
        if let Some(last) = shape.last_mut() {
            *last = w.shape()[0];
        }
        let y = Flex::float_matmul(rows(x), Flex::float_transpose(w));
        Flex::float_reshape(y, Shape::from(shape))
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
                let shape = x.shape();
                binary::<Flex, _, _>(
                    ops.parents,
                    ops.node,
                    grads,
                    |grad| Flex::float_reshape(Flex::float_matmul(rows(grad), w), shape),
                    |grad| Flex::float_matmul(Flex::float_transpose(rows(grad)), rows(x)),
                );
            }
        }

        let ((x, x_node), (w, w_node)) = (x.into_parts(), w.into_parts());
        let out = Flex::dsq_linear(x.clone(), w.clone());
        match LinearBackward.prepare::<C>([x_node, w_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((x, w), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}

/// `x [.., k]` times the transpose of `w [n, k]`: `[.., n]`.
pub(crate) fn linear<const D: usize>(x: Tensor<D>, w: Tensor<2>) -> Tensor<D> {
    Tensor::from_dispatch(<Dispatch as LinearOps>::dsq_linear(x.into_dispatch(), w.into_dispatch()))
}
