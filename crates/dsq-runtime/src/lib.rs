//! Inference: a packed or float model as kernels want it, tokenizer, chat template, sampler. Reads models through
//! `dsq-checkpoint` only, knows no training and prints nothing.

mod attention;
mod cache;
mod chat;
mod cnn;
mod continuation;
mod engine;
mod error;
mod feed_forward;
mod fim;
mod generate;
mod image;
mod json;
mod kernel_check;
mod kv_report;
mod llama;
mod packed;
mod policy;
mod prefix;
mod profile;
mod prune;
mod rope;
mod sampler;
mod stop;
mod streamed;
mod strftime;
mod template_guard;
mod tokenizer;

pub use cache::{KvCache, KvPool, KvType, Sequence};
pub use chat::{Chat, ChatTemplate, Message};
pub use cnn::CnnRuntime;
pub use continuation::{Continuation, Continuations};
#[doc(no_inline)]
pub use dsq_kernels::Activations;
pub use engine::{Engine, EngineSettings, Finished, Output, Request, RequestId, RequestStats};
pub use error::RuntimeError;
pub use fim::FillInMiddle;
pub use generate::{FinishReason, Generated, generate};
pub use image::ImageRuntime;
pub use json::Json;
pub use kernel_check::{KernelCheck, check_kernel};
pub use kv_report::PolicyRun;
pub use llama::{Entry, LlamaRuntime, Logits, ModelPart};
pub use packed::{Packing, Prediction, PredictionsFn, Ran, packed, padded};
pub use policy::KvPolicy;
pub use profile::{Cost, Op};
pub use sampler::{Sampler, Sampling};
pub use stop::{StopStrings, TextStream};
pub use streamed::{streamed_bytes, streamed_logits, streamed_seconds};
pub use tokenizer::{Specials, StreamDecoder, TextTokenizer};
