//! Slices in and out of Flex tensors. Not an operation.

use burn::backend::{Flex, tensor::FloatTensor};
use burn::tensor::{Shape, TensorData};

/// The float tensor of the CPU backend.
pub(crate) type FlexTensor = FloatTensor<Flex>;

/// A tensor whose values [`values`] can borrow: itself when it is contiguous, else a copy.
pub(crate) fn contiguous(t: FlexTensor) -> FlexTensor {
    if t.is_contiguous() { t } else { t.to_contiguous() }
}

/// The values of a contiguous f32 tensor.
///
/// # Panics
/// When the tensor is not contiguous f32: an operation has forgotten [`contiguous`].
pub(crate) fn values(t: &FlexTensor) -> &[f32] {
    t.as_slice::<f32>().expect("a contiguous f32 tensor")
}

/// A tensor of these values, without a copy.
pub(crate) fn tensor(data: Vec<f32>, shape: impl Into<Shape>) -> FlexTensor {
    FlexTensor::from_data(TensorData::new(data, shape))
}
