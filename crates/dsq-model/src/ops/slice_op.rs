//! A custom Burn operation whose forward and backward passes are plain functions on f32 slices: what Burn does slowly or
//! not at all (NHWC convolution, fused batch norm, codes) runs on `dsq-kernels` and still takes part in autodiff. Runs on
//! the Flex backend and under autodiff over it; on other devices the call panics with Burn's message.

use super::flex::{contiguous, tensor, values};
use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::backend::autodiff::{NodeId, ops::NodeGuard};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Flex, backend_extension};
use burn::tensor::Tensor;
use std::sync::Arc;

/// One input: its values, contiguous, and its shape.
#[derive(Debug, Clone, Copy)]
pub struct Slice<'a> {
    /// Values, row major.
    pub data: &'a [f32],
    /// Extents.
    pub shape: &'a [usize],
}

/// The two passes of an operation with one output.
pub trait SliceOp: Send + Sync + std::fmt::Debug {
    /// The output and its shape.
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>);
    /// Gradients for the inputs from the output's gradient `g`; those not `wanted` may be `None`.
    fn backward(&self, x: &[Slice], g: &[f32], wanted: &[bool]) -> Vec<Option<Vec<f32>>>;
}

/// A shared operation.
pub type SharedOp = Arc<dyn SliceOp>;

/// Runs `op` on one tensor.
pub fn apply1<const D: usize, const E: usize>(op: SharedOp, x: Tensor<D>) -> Tensor<E> {
    Tensor::from_dispatch(burn::backend::Dispatch::slice_op1(x.into_dispatch(), op))
}

/// Runs `op` on two tensors.
pub fn apply2<const D: usize, const A: usize, const E: usize>(op: SharedOp, x: Tensor<D>, a: Tensor<A>) -> Tensor<E> {
    Tensor::from_dispatch(burn::backend::Dispatch::slice_op2(x.into_dispatch(), a.into_dispatch(), op))
}

/// Runs `op` on three tensors.
pub fn apply3<const D: usize, const A: usize, const E: usize>(
    op: SharedOp,
    x: Tensor<D>,
    a: Tensor<A>,
    b: Tensor<A>,
) -> Tensor<E> {
    let (x, a, b) = (x.into_dispatch(), a.into_dispatch(), b.into_dispatch());
    Tensor::from_dispatch(burn::backend::Dispatch::slice_op3(x, a, b, op))
}

/// The extension as Burn dispatches it.
#[backend_extension(Flex, Autodiff)]
pub trait SliceOps: Backend {
    /// One input.
    fn slice_op1(x: FloatTensor<Self>, op: SharedOp) -> FloatTensor<Self>;
    /// Two inputs.
    fn slice_op2(x: FloatTensor<Self>, a: FloatTensor<Self>, op: SharedOp) -> FloatTensor<Self>;
    /// Three inputs.
    fn slice_op3(x: FloatTensor<Self>, a: FloatTensor<Self>, b: FloatTensor<Self>, op: SharedOp) -> FloatTensor<Self>;
}

/// Both passes on a backend whose tensors can be read as slices.
trait SlicePasses: Backend {
    fn run(op: &SharedOp, inputs: Vec<FloatTensor<Self>>) -> FloatTensor<Self>;
    fn run_backward(
        op: &SharedOp,
        inputs: Vec<FloatTensor<Self>>,
        grad: FloatTensor<Self>,
        wanted: &[bool],
    ) -> Vec<Option<FloatTensor<Self>>>;
}

impl SlicePasses for Flex {
    fn run(op: &SharedOp, inputs: Vec<FloatTensor<Self>>) -> FloatTensor<Self> {
        let (out, shape) = with_slices(inputs, |slices| op.forward(slices));
        tensor(out, shape)
    }

    fn run_backward(
        op: &SharedOp,
        inputs: Vec<FloatTensor<Self>>,
        grad: FloatTensor<Self>,
        wanted: &[bool],
    ) -> Vec<Option<FloatTensor<Self>>> {
        let shapes: Vec<Vec<usize>> = inputs.iter().map(|t| t.layout().shape().to_vec()).collect();
        let grad = contiguous(grad);
        let grads = with_slices(inputs, |slices| op.backward(slices, values(&grad), wanted));
        grads.into_iter().zip(shapes).map(|(g, shape)| g.map(|g| tensor(g, shape))).collect()
    }
}

fn with_slices<R>(inputs: Vec<FloatTensor<Flex>>, f: impl FnOnce(&[Slice]) -> R) -> R {
    let tensors: Vec<FloatTensor<Flex>> = inputs.into_iter().map(contiguous).collect();
    let shapes: Vec<Vec<usize>> = tensors.iter().map(|t| t.layout().shape().to_vec()).collect();
    let slices: Vec<Slice> = tensors.iter().zip(&shapes).map(|(t, shape)| Slice { data: values(t), shape }).collect();
    f(&slices)
}

impl SliceOps for Flex {
    fn slice_op1(x: FloatTensor<Self>, op: SharedOp) -> FloatTensor<Self> {
        Self::run(&op, vec![x])
    }
    fn slice_op2(x: FloatTensor<Self>, a: FloatTensor<Self>, op: SharedOp) -> FloatTensor<Self> {
        Self::run(&op, vec![x, a])
    }
    fn slice_op3(x: FloatTensor<Self>, a: FloatTensor<Self>, b: FloatTensor<Self>, op: SharedOp) -> FloatTensor<Self> {
        Self::run(&op, vec![x, a, b])
    }
}

#[derive(Debug)]
struct SliceBackward;

impl<B: SlicePasses, const N: usize> Backward<B, N> for SliceBackward {
    type State = ([NodeId; N], SharedOp);

    fn backward(self, ops: Ops<Self::State, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let grad = grads.consume::<B>(&ops.node);
        let (states, op) = ops.state;
        let inputs = states.into_iter().map(|id| checkpointer.retrieve_node_output(id)).collect();
        let wanted: Vec<bool> = ops.parents.iter().map(Option::is_some).collect();
        let found = B::run_backward(&op, inputs, grad, &wanted);
        for (node, grad) in ops.parents.into_iter().zip(found) {
            if let (Some(node), Some(grad)) = (node, grad) {
                grads.register::<B>(node.id, grad);
            }
        }
    }
}

fn tracked<B: SlicePasses, C: CheckpointStrategy, const N: usize>(
    inputs: [FloatTensor<Autodiff<B, C>>; N],
    op: SharedOp,
) -> FloatTensor<Autodiff<B, C>> {
    let nodes: [NodeGuard; N] = inputs.each_ref().map(|t| t.node());
    match Backward::<B, N>::prepare::<C>(SliceBackward, nodes).compute_bound().stateful() {
        OpsKind::Tracked(mut prep) => {
            let states = inputs.each_ref().map(|t| prep.checkpoint(t));
            let out = B::run(&op, inputs.into_iter().map(|t| t.into_primitive()).collect());
            prep.finish((states, op), out)
        }
        OpsKind::UnTracked(prep) => prep.finish(B::run(&op, inputs.into_iter().map(|t| t.into_primitive()).collect())),
    }
}

impl<B: SlicePasses + SliceOps, C: CheckpointStrategy> SliceOps for Autodiff<B, C> {
    fn slice_op1(x: FloatTensor<Self>, op: SharedOp) -> FloatTensor<Self> {
        tracked::<B, C, 1>([x], op)
    }
    fn slice_op2(x: FloatTensor<Self>, a: FloatTensor<Self>, op: SharedOp) -> FloatTensor<Self> {
        tracked::<B, C, 2>([x, a], op)
    }
    fn slice_op3(x: FloatTensor<Self>, a: FloatTensor<Self>, b: FloatTensor<Self>, op: SharedOp) -> FloatTensor<Self> {
        tracked::<B, C, 3>([x, a, b], op)
    }
}
