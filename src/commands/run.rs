//! `dsq run`: generates text after a prompt, streamed to stdout as it is made.

use crate::{Global, error::CliError, output};
use dsq_checkpoint::Checkpoint;
use dsq_runtime::{
    ChatTemplate, FinishReason, LlamaRuntime, Message, Sampler, Sampling, StreamDecoder, TextTokenizer, generate,
};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

/// Options of `dsq run`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A model folder (float or packed) or a GGUF file.
    model: PathBuf,
    /// The prompt. Texts of special tokens inside it are text.
    #[arg(long, value_name = "TEXT")]
    prompt: String,
    /// Put the prompt into the model's chat template as a user's message.
    #[arg(long)]
    chat: bool,
    /// A system message before it.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Most tokens to generate.
    #[arg(long, default_value_t = 128, value_name = "N")]
    max_tokens: usize,
    /// 0 takes the most likely token each time; above 0 tokens are drawn.
    #[arg(long, default_value_t = 0.0, value_name = "T")]
    temperature: f32,
    /// Draw from the N most likely tokens only; 0 for all.
    #[arg(long, default_value_t = 0, value_name = "N")]
    top_k: usize,
    /// Draw from the most likely tokens that together have this probability; 1 for all.
    #[arg(long, default_value_t = 1.0, value_name = "P")]
    top_p: f32,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0, value_name = "S")]
    seed: u64,
}

/// Generates and prints.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    let checkpoint = Checkpoint::open(&args.model)?;
    let settings = Sampling { temperature: args.temperature, top_k: args.top_k, top_p: args.top_p, seed: args.seed };
    let mut sampler = Sampler::new(settings)?;
    let tokenizer = TextTokenizer::new(&checkpoint)?;
    let prompt = prompt_ids(&args, &checkpoint, &tokenizer)?;
    // All checks of the request come before the weights are read.
    let limit = LlamaRuntime::context_of(&checkpoint)?;
    if prompt.len() > limit {
        let message = format!("--prompt: expected at most {limit} tokens (the model's context), got {}", prompt.len());
        return Err(CliError::usage(message).with_hint("shorten the prompt"));
    }
    let model = LlamaRuntime::load(&checkpoint, global.threads())?;
    let mut cache = model.new_cache(limit.min(prompt.len() + args.max_tokens))?;
    let mut stream = StreamDecoder::new(&tokenizer);
    let (mut text, mut failed) = (String::new(), None);
    let start = Instant::now();
    let made =
        generate(&model, &mut cache, &prompt, args.max_tokens, tokenizer.vocab_size(), &mut sampler, &mut |id| {
            match stream.push(id) {
                Ok(piece) => {
                    if !global.json {
                        output::piece(&piece);
                    }
                    text.push_str(&piece);
                    ControlFlow::Continue(())
                }
                Err(e) => {
                    failed = Some(e);
                    ControlFlow::Break(())
                }
            }
        })?;
    if let Some(e) = failed {
        return Err(e.into());
    }
    let rest = stream.finish()?;
    text.push_str(&rest);
    let seconds = start.elapsed().as_secs_f64();
    if !global.json {
        output::line(rest);
        return Ok(0);
    }
    let finish = match made.finish {
        FinishReason::Stop => "stop",
        FinishReason::Length | FinishReason::Cancelled => "length",
    };
    let row = json!({
        "name": "model", "text": text, "tokens": made.tokens, "finish_reason": finish,
        "prompt_tokens": prompt.len(), "seconds": seconds,
    });
    output::line(json!({ "command": "run", "rows": [row] }).to_string());
    Ok(0)
}

fn prompt_ids(args: &Args, model: &Checkpoint, tokenizer: &TextTokenizer) -> Result<Vec<u32>, CliError> {
    let ids = if args.chat {
        let Some(template) = ChatTemplate::of_model(model, tokenizer)? else {
            let message = format!("{}: chat template: expected one, got none", args.model.display());
            return Err(CliError::new(3, message).with_hint("leave out --chat"));
        };
        let system = args.system.iter().map(|s| Message::new("system", s.as_str()));
        let messages: Vec<Message> = system.chain([Message::new("user", args.prompt.as_str())]).collect();
        template.encode(tokenizer, &messages, true)?
    } else {
        tokenizer.encode_prompt(&args.prompt)?
    };
    if ids.is_empty() {
        return Err(CliError::usage("--prompt: expected at least one token, got none")
            .with_hint("this tokenizer adds no beginning-of-sequence token; give some text"));
    }
    Ok(ids)
}
