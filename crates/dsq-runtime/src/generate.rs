//! Generation of tokens: prompt, then one token after another until an end token, a limit or the end of the context.
//! Not the text (see `tokenizer.rs`), not the choice of a token (see `sampler.rs`).

use crate::{KvCache, LlamaRuntime, Logits, RuntimeError, Sampler};
use std::ops::ControlFlow;

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model made an end-of-sequence token.
    Stop,
    /// The token limit or the end of the context was reached.
    Length,
    /// The caller said so.
    Cancelled,
}

/// What generation made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Generated {
    /// New tokens, without the end token.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
}

/// Generates at most `max_tokens` tokens after `prompt`, which starts a new sequence in `cache`. Ids from
/// `vocabulary` on (rows of the embedding that the tokenizer does not know) are never chosen. `on_token` sees every
/// token as it is made. The last token is not fed back, so a prompt of 63 in a context of 64 gives two tokens.
///
/// # Errors
/// [`RuntimeError::TooLong`] for a prompt longer than the context, naming both numbers; errors of the forward pass and
/// the sampler.
pub fn generate(
    model: &LlamaRuntime,
    cache: &mut KvCache,
    prompt: &[u32],
    max_tokens: usize,
    vocabulary: usize,
    sampler: &mut Sampler,
    on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
) -> Result<Generated, RuntimeError> {
    if prompt.len() > cache.capacity() {
        let of = "positions of the context";
        return Err(RuntimeError::TooLong { what: "prompt", limit: cache.capacity(), of, got: prompt.len() });
    }
    cache.truncate(0)?;
    let known = vocabulary.min(model.config().vocab_size);
    let mut tokens = Vec::new();
    sampler.observe(prompt);
    let mut logits = model.forward(prompt, cache, Logits::Last)?;
    while tokens.len() < max_tokens {
        let id = sampler.next(&mut logits[..known])?;
        if model.config().eos_token_ids.contains(&id) {
            return Ok(Generated { tokens, finish: FinishReason::Stop });
        }
        tokens.push(id);
        if on_token(id).is_break() {
            return Ok(Generated { tokens, finish: FinishReason::Cancelled });
        }
        if tokens.len() == max_tokens || cache.len() == cache.capacity() {
            break;
        }
        logits = model.forward(&[id], cache, Logits::Last)?;
    }
    Ok(Generated { tokens, finish: FinishReason::Length })
}
