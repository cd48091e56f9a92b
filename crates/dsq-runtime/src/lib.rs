//! Inference: a packed or float model as kernels want it, tokenizer, chat template, sampler. Reads models through
//! `dsq-checkpoint` only, knows no training and prints nothing.

mod attention;
mod cache;
mod chat;
mod cnn;
mod error;
mod feed_forward;
mod generate;
mod image;
mod llama;
mod profile;
mod rope;
mod sampler;
mod streamed;
mod tokenizer;

pub use cache::{KvCache, KvPool, KvType, Sequence, Sight};
pub use chat::{ChatTemplate, Message};
pub use cnn::CnnRuntime;
pub use error::RuntimeError;
pub use generate::{FinishReason, Generated, generate};
pub use image::ImageRuntime;
pub use llama::{Entry, LlamaRuntime, Logits};
#[doc(no_inline)]
pub use dsq_kernels::Activations;
pub use profile::{Cost, Op};
pub use sampler::{Sampler, Sampling};
pub use streamed::{streamed_bytes, streamed_logits};
pub use tokenizer::{Specials, StreamDecoder, TextTokenizer};
