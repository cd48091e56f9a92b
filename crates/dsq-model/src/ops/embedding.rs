//! Rows of an embedding by token, with gradients; the walk is `dsq_kernels::train::gather_rows`.

use super::flex::{FlexTensor, contiguous, tensor, values};
use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind, unary},
};
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::{Shape, Tensor};
use dsq_kernels::train as kernel;
use std::sync::Arc;

/// The backend side of [`embedding`].
#[backend_extension(Flex, Autodiff)]
pub trait EmbeddingOps: Backend {
    /// Rows `ids` of `table [v, d]` as `[b, t, d]`.
    fn dsq_embedding(table: FloatTensor<Self>, ids: Arc<Vec<i32>>, b: usize) -> FloatTensor<Self>;
}

impl EmbeddingOps for Flex {
    fn dsq_embedding(table: FlexTensor, ids: Arc<Vec<i32>>, b: usize) -> FlexTensor {
        let table = contiguous(table);
        let d = table.shape()[1];
        let mut out = vec![0.0; ids.len() * d];
        kernel::gather_rows(values(&table), d, &ids, &mut out);
        tensor(out, Shape::from([b, ids.len() / b.max(1), d]))
    }
}

impl<C: CheckpointStrategy> EmbeddingOps for Autodiff<Flex, C> {
    fn dsq_embedding(table: FloatTensor<Self>, ids: Arc<Vec<i32>>, b: usize) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct EmbeddingBackward;

        impl Backward<Flex, 1> for EmbeddingBackward {
            type State = (Shape, Arc<Vec<i32>>);

            fn backward(self, ops: Ops<Self::State, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
                let (shape, ids) = ops.state;
                unary::<Flex, _>(ops.parents, ops.node, grads, |grad| {
                    let grad = contiguous(grad);
                    let mut table = vec![0.0; shape.num_elements()];
                    kernel::scatter_rows(values(&grad), shape[1], &ids, &mut table);
                    tensor(table, shape)
                });
            }
        }

        let (table, node) = table.into_parts();
        let shape = table.shape();
        let out = Flex::dsq_embedding(table, ids.clone(), b);
        match EmbeddingBackward.prepare::<C>([node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((shape, ids), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}

/// Rows `ids` (`b` sequences of one length) of `table [v, d]`: `[b, t, d]`.
///
/// # Panics
/// When an id lies outside the table.
pub(crate) fn embedding(table: Tensor<2>, ids: Arc<Vec<i32>>, b: usize) -> Tensor<3> {
    Tensor::from_dispatch(<Dispatch as EmbeddingOps>::dsq_embedding(table.into_dispatch(), ids, b))
}
