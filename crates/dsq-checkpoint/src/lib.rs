//! Model files: Hugging Face folders (float and compressed-tensors), shards, safetensors, GGUF; strict reading,
//! atomic writing, and an export that re-reads itself and proves that nothing changed.
//!
//! This crate owns no formula (see `dsq-quant`), computes no forward pass and prints nothing.

mod config;
mod error;
mod json;
mod tensor;

pub use config::{LinearSpec, LlamaConfig, ModelConfig, ResNetConfig};
pub use error::{CheckpointError, Fault, Severity, printable};
pub use tensor::{ConversionLoss, Dtype, NamedTensor, TensorData, TensorInfo, conversion_loss};
