//! `silu(gate) * up` with gradients; the arithmetic is `dsq_kernels::train::silu_mul`.

use super::flex::{FlexTensor, contiguous, tensor, values};
use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use dsq_kernels::train as kernel;

/// The backend side of [`silu_mul`].
#[backend_extension(Flex, Autodiff)]
pub trait SwigluOps: Backend {
    /// `silu(gate) * up`.
    fn dsq_silu_mul(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;
}

fn forward(gate: &FlexTensor, up: &FlexTensor) -> FlexTensor {
    let mut out = vec![0.0; values(gate).len()];
    kernel::silu_mul(values(gate), values(up), &mut out);
    tensor(out, gate.shape())
}

impl SwigluOps for Flex {
    fn dsq_silu_mul(gate: FlexTensor, up: FlexTensor) -> FlexTensor {
        forward(&contiguous(gate), &contiguous(up))
    }
}

impl<C: CheckpointStrategy> SwigluOps for Autodiff<Flex, C> {
    fn dsq_silu_mul(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct SwigluBackward;

        impl Backward<Flex, 2> for SwigluBackward {
            type State = (FlexTensor, FlexTensor);

            fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
                let (gate, up) = ops.state;
                let grad = contiguous(grads.consume::<Flex>(&ops.node));
                let len = values(&gate).len();
                let (mut dgate, mut dup) = (vec![0.0; len], vec![0.0; len]);
                kernel::silu_mul_gradient(values(&grad), values(&gate), values(&up), &mut dgate, &mut dup);
                for (node, d) in ops.parents.into_iter().zip([dgate, dup]) {
                    if let Some(node) = node {
                        grads.register::<Flex>(node.id, tensor(d, gate.shape()));
                    }
                }
            }
        }

        let ((gate, gate_node), (up, up_node)) = (gate.into_parts(), up.into_parts());
        let (gate, up) = (contiguous(gate), contiguous(up));
        let out = forward(&gate, &up);
        match SwigluBackward.prepare::<C>([gate_node, up_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((gate, up), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}

/// `silu(gate) * up`, two tensors of one shape.
pub(crate) fn silu_mul<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    assert_eq!(gate.dims(), up.dims(), "gate and up have one shape");
    Tensor::from_dispatch(<Dispatch as SwigluOps>::dsq_silu_mul(gate.into_dispatch(), up.into_dispatch()))
}
