//! Model files: Hugging Face folders (float, compressed-tensors, GPTQ and AWQ), shards, safetensors, GGUF, PyTorch, ONNX (written only);
//! strict reading, atomic writing, and an export that re-reads itself and proves that nothing changed.
//!
//! This crate owns no formula (see `dsq-quant`), computes no forward pass and prints nothing.

mod checkpoint;
mod checks;
mod columns;
mod config;
mod error;
mod export;
mod folded;
mod folder;
pub mod gguf;
mod groups;
mod json;
mod kv_cache;
mod lint;
mod onnx;
mod packed;
mod pytorch;
mod quantization;
mod runs;
mod safetensors;
mod tensor;
mod workers;
mod write;

pub use checkpoint::{AUX_FILES, Checkpoint, LinearWeight, hex_of, hex_sha256};
pub use columns::{CommonScheme, FolderFormat, convert_layer, convert_layers, finish_layer, fit_problem};
pub use config::{
    Activation, Biases, ConvLayer, Experts, Filter, Groups, ImageConfig, ImageFamily, LATENT_NORM_EPS, Latent,
    LinearSpec, LlamaConfig, MAX_POOL, MobileNet, ModelConfig, Padding, Pool, Preparation, ResNetConfig, Residual,
    Resize, RopeScaling, Rotary, Routing, Scores, Yarn,
};
pub use error::{CheckpointError, Fault, Severity, printable};
pub use export::{
    Differences, ExportLoss, ExportTensor, FolderTarget, Judge, Outline, PROOF_FILE, Proof, SourceRecord, TensorProof,
    export_folder, export_folder_as, export_layers, export_stream, folder_bytes,
};
pub use gguf::{GgufExport, GgufOptions, GgufType};
pub use groups::check_groups;
pub use onnx::{OnnxExport, OnnxFile, OnnxOptions, OnnxTensor, onnx_problem};
#[cfg(fuzzing)]
pub use pytorch::read_pytorch;
pub use quantization::{QuantizationConfig, QuantizationGroup};
pub use safetensors::SafetensorsFile;
pub use tensor::{ConversionLoss, Dtype, NamedTensor, TensorData, TensorInfo, conversion_loss};
pub use workers::Workers;
pub use write::{FolderWriter, check_output, check_room, check_space, free_space, write_atomic, write_safetensors};
