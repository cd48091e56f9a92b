//! Float models with gradients on Burn: the Llama family, image models (`image`), and (see `resnet`) a small residual network. They load
//! from and save to checkpoints under the names of the public formats.
//!
//! Not quantization policy or training loops (see `dsq-train`), and not the inference runtime (see `dsq-runtime`):
//! two forward passes exist on purpose, tied by the parity test.

mod error;
mod experts;
pub mod fake_quant;
mod image;
mod latent;
pub mod layers;
mod learned_grid;
mod learned_input;
mod llama;
mod lora;
mod names;
mod ops;
mod range_observer;
pub mod resnet;

pub use dsq_kernels::train::IGNORED;
pub use error::ModelError;
pub use experts::{Experts, FeedForward, Routed, Router};
pub use image::ImageModel;
pub use latent::LatentAttention;
pub use learned_grid::LearnedGrid;
pub use learned_input::LearnedInput;
pub use llama::{Attention, Layer, Llama, SelfAttention, Sequences, Watch, next_token_labels};
pub use lora::Lora;
pub use names::{enter, leave, parameter_path, tensor_name};
pub use ops::distill::Teacher;
pub use ops::hidden::HiddenTarget;
pub use range_observer::RangeObserver;
