//! Inference: a packed or float model as kernels want it, tokenizer, chat template, sampler. Reads models through
//! `dsq-checkpoint` only, knows no training and prints nothing.

mod chat;
mod error;
mod sampler;
mod tokenizer;

pub use chat::{ChatTemplate, Message};
pub use error::RuntimeError;
pub use sampler::{Sampler, Sampling};
pub use tokenizer::{Specials, StreamDecoder, TextTokenizer};
