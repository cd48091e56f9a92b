//! ONNX files: writing a model as a graph that onnxruntime runs, with a proof, and checking such a file against its proof. Language
//! models become `llama.rs`, image models `cnn.rs`. A graph is never read back into a model.
//!
//! - Language models: a quantized linear is one `MatMulNBits` with the codes, scales and zero points of the source; floats are
//!   `MatMul`. Activations are f32: grids of inputs and of a KV cache have no place there, and are told as left out.
//! - Image models: `QuantizeLinear` and `DequantizeLinear` around `Conv` and `Gemm`, weights in INT8 or INT4, inputs on the stored grids.
//! - A file beyond [`OnnxOptions::single_file_limit`] keeps its tensors beside it, in `FILE.onnx.data`; protobuf messages end at 2 GiB.

mod cnn;
mod export;
mod graph;
mod inspect;
mod llama;
mod proof;
mod proto;
mod source;
mod weights;

pub use export::{OnnxExport, OnnxOptions};
pub use inspect::{OnnxFile, OnnxTensor};

/// Why a linear layer of a language model, `[n, k]` on these grids, has no operator in an ONNX file; `None` if it has one.
pub fn onnx_problem(args: &dsq_quant::QuantArgs, n: usize, k: usize) -> Option<String> {
    weights::Blocks::of(args, n, k).err()
}
