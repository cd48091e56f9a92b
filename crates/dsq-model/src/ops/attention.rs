//! Causal attention with rotary positions, with gradients; the arithmetic is `dsq_kernels::train::Attention`.

use super::flex::{FlexTensor, contiguous, tensor, values};
use burn::backend::autodiff::{
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use dsq_kernels::train::{Attention, AttentionShape, Rope};
use dsq_quant::KvGrid;
use std::sync::Arc;

/// The backend side of [`attention`].
#[backend_extension(Flex, Autodiff)]
pub trait AttentionOps: Backend {
    /// Causal attention of `q [b, t, heads * d]` to `k`, `v` `[b, t, kv_heads * d]`.
    fn dsq_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        shape: AttentionShape,
        rope: Arc<Rope>,
        grid: Option<KvGrid>,
    ) -> FloatTensor<Self>;
}

fn forward(qkv: [&FlexTensor; 3], shape: &AttentionShape, rope: &Rope, grid: Option<&KvGrid>) -> Attention {
    Attention::forward(qkv.map(values), shape, rope, grid)
}

impl AttentionOps for Flex {
    fn dsq_attention(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        shape: AttentionShape,
        rope: Arc<Rope>,
        grid: Option<KvGrid>,
    ) -> FlexTensor {
        let q = contiguous(q);
        let done = forward([&q, &contiguous(k), &contiguous(v)], &shape, &rope, grid.as_ref());
        tensor(done.out, q.shape())
    }
}

#[derive(Debug, Clone)]
struct State {
    q: FlexTensor,
    k: FlexTensor,
    v: FlexTensor,
    done: Arc<Attention>,
    shape: AttentionShape,
    rope: Arc<Rope>,
    grid: Option<KvGrid>,
}

impl<C: CheckpointStrategy> AttentionOps for Autodiff<Flex, C> {
    fn dsq_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        shape: AttentionShape,
        rope: Arc<Rope>,
        grid: Option<KvGrid>,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct AttentionBackward;

        impl Backward<Flex, 3> for AttentionBackward {
            type State = State;

            fn backward(self, ops: Ops<Self::State, 3>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
                let s = ops.state;
                let grad = contiguous(grads.consume::<Flex>(&ops.node));
                let inputs = [values(&s.q), values(&s.k), values(&s.v)];
                let d = s.done.backward(values(&grad), inputs, &s.shape, &s.rope, s.grid.as_ref());
                let shapes = [s.q.shape(), s.k.shape(), s.v.shape()];
                for ((node, d), shape) in ops.parents.into_iter().zip([d.q, d.k, d.v]).zip(shapes) {
                    if let Some(node) = node {
                        grads.register::<Flex>(node.id, tensor(d, shape));
                    }
                }
            }
        }

        let ((q, q_node), (k, k_node), (v, v_node)) = (q.into_parts(), k.into_parts(), v.into_parts());
        let (q, k, v) = (contiguous(q), contiguous(k), contiguous(v));
        let mut done = forward([&q, &k, &v], &shape, &rope, grid.as_ref());
        let out = tensor(std::mem::take(&mut done.out), q.shape());
        match AttentionBackward.prepare::<C>([q_node, k_node, v_node]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(State { q, k, v, done: Arc::new(done), shape, rope, grid }, out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }
}

/// Causal attention with rotary positions of `q [b, t, heads * d]` to `k`, `v` `[b, t, kv_heads * d]`, with `grid` to rotated
/// keys and values as a cache of codes holds them (the gradient passes straight through).
///
/// # Panics
/// When a tensor has another shape than `shape` says.
pub(crate) fn attention(
    [q, k, v]: [Tensor<3>; 3],
    shape: AttentionShape,
    rope: Arc<Rope>,
    grid: Option<KvGrid>,
) -> Tensor<3> {
    let AttentionShape { b, t, heads, kv_heads, d, .. } = shape;
    assert_eq!(q.dims(), [b, t, heads * d]);
    assert_eq!((k.dims(), v.dims()), ([b, t, kv_heads * d], [b, t, kv_heads * d]));
    Tensor::from_dispatch(<Dispatch as AttentionOps>::dsq_attention(
        q.into_dispatch(),
        k.into_dispatch(),
        v.into_dispatch(),
        shape,
        rope,
        grid,
    ))
}
