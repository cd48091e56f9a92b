//! `dsq run`: generates text after a prompt, streamed to stdout as it is made.

use super::RuntimeArgs;
use crate::{Global, error::CliError, output};
use dsq_checkpoint::{Checkpoint, printable};
use dsq_runtime::{
    Chat, ChatTemplate, FillInMiddle, FinishReason, Json, LlamaRuntime, Message, Sampler, Sampling, StopStrings,
    TextStream, TextTokenizer, generate,
};
use serde_json::json;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
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
    /// A JSON file with a list of tools that the model may call, given to the chat template.
    #[arg(long, value_name = "FILE", requires = "chat")]
    tools: Option<PathBuf>,
    /// Fill in the middle: the prompt is what stands before it, this is what stands after it. For models with tokens for that.
    #[arg(long, value_name = "TEXT", conflicts_with = "chat")]
    fim_suffix: Option<String>,
    /// End before this text (may be given several times).
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,
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
    /// Draw only from tokens at least this likely, as a part of the most likely one's probability; 0 for all.
    #[arg(long, default_value_t = 0.0, value_name = "P")]
    min_p: f32,
    /// Divide positive logits of tokens that were there already by it and multiply negative ones; 1 for none.
    #[arg(long, default_value_t = 1.0, value_name = "R")]
    repetition_penalty: f32,
    /// Seed of the draws.
    #[arg(long, default_value_t = 0, value_name = "S")]
    seed: u64,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Generates and prints.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    let checkpoint = Checkpoint::open(&args.model)?;
    let settings = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        min_p: args.min_p,
        repetition_penalty: args.repetition_penalty,
        seed: args.seed,
    };
    let mut sampler = Sampler::new(settings)?;
    let stops = StopStrings::new(args.stop.clone())?;
    let tokenizer = TextTokenizer::new(&checkpoint)?;
    let (prompt, ends) = prompt_ids(&args, &checkpoint, &tokenizer)?;
    // All checks of the request come before the weights are read.
    let limit = LlamaRuntime::context_of(&checkpoint)?;
    if prompt.len() > limit {
        let message = format!("--prompt: expected at most {limit} tokens (the model's context), got {}", prompt.len());
        return Err(CliError::usage(message).with_hint("shorten the prompt"));
    }
    let model = args.runtime.load(&checkpoint, global.threads())?;
    let len = limit.min(prompt.len().saturating_add(args.max_tokens));
    let mut cache = model.new_cache_of(len, args.runtime.kv_type(), args.runtime.policy()?)?;
    let mut stream = TextStream::new(&tokenizer, stops);
    let (mut text, mut failed, mut ended) = (String::new(), None, false);
    let start = Instant::now();
    let mut made =
        generate(&model, &mut cache, &prompt, args.max_tokens, tokenizer.vocab_size(), &mut sampler, &mut |id| {
            if ends.contains(&id) {
                ended = true;
                return ControlFlow::Break(());
            }
            match stream.push(id) {
                Ok(piece) => {
                    if !global.json {
                        output::piece(&piece);
                    }
                    text.push_str(&piece);
                    if stream.stopped() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
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
    if ended {
        made.tokens.pop();
    }
    let rest = stream.finish()?;
    text.push_str(&rest);
    let seconds = start.elapsed().as_secs_f64();
    if !global.json {
        output::line(rest);
        return Ok(0);
    }
    let stopped = ended || stream.stopped() || made.finish == FinishReason::Stop;
    let finish = if stopped { "stop" } else { "length" };
    let row = json!({
        "name": "model", "text": text, "tokens": made.tokens, "finish_reason": finish,
        "prompt_tokens": prompt.len(), "seconds": seconds,
    });
    output::line(json!({ "command": "run", "rows": [row] }).to_string());
    Ok(0)
}

/// The prompt, and the ids that end the answer.
fn prompt_ids(args: &Args, model: &Checkpoint, tokenizer: &TextTokenizer) -> Result<(Vec<u32>, Vec<u32>), CliError> {
    let mut ends = tokenizer.ends().to_vec();
    let ids = if args.chat {
        let Some(template) = ChatTemplate::of_model(model, tokenizer)? else {
            let message = format!("{}: chat template: expected one, got none", args.model.display());
            return Err(CliError::new(3, message).with_hint("leave out --chat"));
        };
        let system = args.system.iter().map(|s| Message::new("system", s.as_str()));
        let messages: Vec<Message> = system.chain([Message::new("user", args.prompt.as_str())]).collect();
        let tools = args.tools.as_deref().map_or_else(|| Ok(Vec::new()), read_tools)?;
        let chat = Chat { messages: &messages, tools: &tools, add_generation_prompt: true, variables: &[] };
        template.encode(tokenizer, &chat)?
    } else if let Some(suffix) = &args.fim_suffix {
        let fim = FillInMiddle::new(tokenizer, &args.prompt, suffix)?;
        ends.extend(fim.ends);
        fim.prompt
    } else {
        tokenizer.encode_prompt(&args.prompt)?
    };
    if ids.is_empty() {
        return Err(CliError::usage("--prompt: expected at least one token, got none")
            .with_hint("this tokenizer adds no beginning-of-sequence token; give some text"));
    }
    Ok((ids, ends))
}

/// A list of tools, as the chat APIs write them.
fn read_tools(file: &Path) -> Result<Vec<Json>, CliError> {
    let name = printable(&file.to_string_lossy());
    let bytes = std::fs::read(file).map_err(|e| CliError::new(4, format!("{name}: cannot read: {e}")))?;
    serde_json::from_slice(&bytes)
        .map_err(|e| CliError::usage(format!("{name}: expected a JSON list of tools, got: {e}")))
}
