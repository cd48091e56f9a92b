//! Fused operations on Burn's CPU backend (Flex), with gradients. Each file holds one operation: its fused form (a
//! backend extension whose arithmetic lives in `dsq-kernels`), the backward pass, and the form of plain tensor
//! operations that it is tested against. Not layers (see `layers`), and no arithmetic of its own.

pub(crate) mod flex;

pub(crate) mod attention;
pub(crate) mod cross_entropy;
pub(crate) mod distill;
pub(crate) mod embedding;
pub(crate) mod gather;
pub(crate) mod hidden;
pub(crate) mod linear;
pub(crate) mod rms_norm;
pub(crate) mod slice_op;
pub(crate) mod swiglu;
