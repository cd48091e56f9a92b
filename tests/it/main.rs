//! The one integration test binary: what holds across crates, and the commands as a person runs them.

mod architecture;
mod cli;
mod columns;
mod command;
mod efficientnet;
mod float_coded;
mod gguf;
mod image_models;
mod io_faults;
mod journal;
mod kv_cache;
mod llama_bound;
mod model_files;
mod onnx;
mod pairs;
mod parity_architectures;
mod parity_cnn;
mod parity_llama;
mod parity_tokens;
mod proof_logits;
mod ptq;
mod ptq_options;
mod regress;
mod requantize;
mod signals;
mod size;
