//! `dsq bench`: tokens per second of a model, and which share of the machine's read bandwidth decoding uses; or, of a
//! recipe, the time of a training step and what fake quantization adds to it.

use crate::jobs::lm;
use crate::recipe::{Job, Recipe};
use crate::{Global, error::CliError, output};
use dsq_checkpoint::Checkpoint;
use dsq_kernels::measure_read_bandwidth;
use dsq_runtime::{LlamaRuntime, Logits};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Options of `dsq bench`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A model folder (float or packed) or a GGUF file; with --train-steps a recipe.
    model: PathBuf,
    /// Time this many steps of the recipe's QAT phase, each beside one in float.
    #[arg(long, value_name = "N", conflicts_with_all = ["prompt_tokens", "gen_tokens", "repeat"])]
    train_steps: Option<usize>,
    /// With --train-steps, change a value of the recipe, as in `model.hidden_size=256`; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", requires = "train_steps")]
    set: Vec<String>,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 512, value_name = "N")]
    prompt_tokens: usize,
    /// Tokens to generate after it.
    #[arg(long, default_value_t = 128, value_name = "N")]
    gen_tokens: usize,
    /// Times to do both; the figures are medians (latencies: percentiles over all tokens).
    #[arg(long, default_value_t = 5, value_name = "N")]
    repeat: usize,
}

/// Measures and prints one row, `batch 1`, or `train step` of a recipe.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    if let Some(steps) = args.train_steps {
        return train_step(&args, steps, global);
    }
    for (name, value) in
        [("--prompt-tokens", args.prompt_tokens), ("--gen-tokens", args.gen_tokens), ("--repeat", args.repeat)]
    {
        if value == 0 {
            return Err(CliError::usage(format!("{name}: expected at least 1, got 0")));
        }
    }
    let checkpoint = Checkpoint::open(&args.model)?;
    let limit = LlamaRuntime::context_of(&checkpoint)?;
    let asked = args.prompt_tokens.saturating_add(args.gen_tokens);
    if asked > limit {
        let of = "--prompt-tokens and --gen-tokens";
        return Err(CliError::usage(format!(
            "{of}: expected at most {limit} tokens together (the model's context), got {asked}"
        )));
    }
    let start = Instant::now();
    let model = LlamaRuntime::load(&checkpoint, global.threads())?;
    let load_seconds = start.elapsed().as_secs_f64();
    let mut cache = model.new_cache(asked)?;
    // The ids decide nothing about the speed; a fixed walk through the vocabulary avoids a hot embedding row.
    let vocab = model.config().vocab_size;
    let ids: Vec<u32> = (0..asked).map(|i| (i * 7919 % vocab) as u32).collect();
    let (mut prompt, mut decode, mut latencies) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.repeat {
        cache.truncate(0);
        let start = Instant::now();
        model.forward(&ids[..args.prompt_tokens], &mut cache, Logits::Last)?;
        prompt.push(args.prompt_tokens as f64 / start.elapsed().as_secs_f64());
        let start = Instant::now();
        for id in &ids[args.prompt_tokens..] {
            let token = Instant::now();
            model.forward(&[*id], &mut cache, Logits::Last)?;
            latencies.push(token.elapsed().as_secs_f64() * 1e3);
        }
        decode.push(args.gen_tokens as f64 / start.elapsed().as_secs_f64());
    }
    let tokens_per_second = quantile(&mut decode, 0.5);
    // Weights are read once a token, keys and values up to the position (on average: the middle of the generation).
    let mean_positions = args.prompt_tokens as f64 + (args.gen_tokens as f64 + 1.0) / 2.0;
    let kv = model.kv_bytes(mean_positions);
    let bytes_per_token = model.bytes_per_token() as f64 + kv;
    let bandwidth = measure_read_bandwidth(global.threads());
    let bytes_per_second = bytes_per_token * tokens_per_second;
    let mut kernels: BTreeMap<String, usize> = BTreeMap::new();
    for (_, kernel) in model.kernels() {
        *kernels.entry(kernel).or_default() += 1;
    }
    let row = json!({
        "name": "batch 1",
        "prompt_tokens": args.prompt_tokens,
        "gen_tokens": args.gen_tokens,
        "repeat": args.repeat,
        "threads": model.threads(),
        "prompt_tokens_per_second": quantile(&mut prompt, 0.5),
        "tokens_per_second": tokens_per_second,
        "latency_p50_ms": quantile(&mut latencies, 0.5),
        "latency_p99_ms": quantile(&mut latencies, 0.99),
        "resident_bytes": model.resident_bytes(),
        "kv_cache_bytes": cache.bytes(),
        "bytes_per_token": bytes_per_token,
        "bytes_per_second": bytes_per_second,
        "read_bandwidth": bandwidth,
        "bandwidth_share": bytes_per_second / bandwidth,
        "load_seconds": load_seconds,
        "kernels": kernels,
    });
    if global.json {
        output::line(json!({ "command": "bench", "rows": [row] }).to_string());
        return Ok(0);
    }
    let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
    output::line(format!("batch 1, {} threads, medians of {}", model.threads(), args.repeat));
    output::line(format!(
        "  prompt      {:>10.1} tokens/s  ({} tokens)",
        number("prompt_tokens_per_second"),
        args.prompt_tokens
    ));
    output::line(format!("  generation  {:>10.1} tokens/s  ({} tokens)", tokens_per_second, args.gen_tokens));
    output::line(format!(
        "  latency     {:>10.2} ms p50, {:.2} ms p99",
        number("latency_p50_ms"),
        number("latency_p99_ms")
    ));
    output::line(format!(
        "  reads       {:>10.2} GB/s, {:.0}% of the {:.2} GB/s that this machine reads with as many threads",
        bytes_per_second / 1e9,
        100.0 * bytes_per_second / bandwidth,
        bandwidth / 1e9
    ));
    output::line(format!("  weights     {:>10.1} MB in memory", model.resident_bytes() as f64 / 1e6));
    for (kernel, layers) in kernels {
        output::line(format!("  kernel      {layers:>10} layers: {kernel}"));
    }
    Ok(0)
}

/// Times training steps of a recipe.
fn train_step(args: &Args, steps: usize, global: &Global) -> Result<u8, CliError> {
    if steps == 0 {
        return Err(CliError::usage("--train-steps: expected at least 1, got 0"));
    }
    let recipe = Recipe::load(&args.model, &args.set)?;
    let Job::Lm(job) = &recipe.job else {
        return Err(CliError::usage(format!(
            "{}: model.architecture: expected llama for --train-steps, got resnet",
            args.model.display()
        )));
    };
    let plan = lm::plan(job, &args.model, recipe.seed)?;
    global.use_threads();
    let times = plan.time_steps(steps)?;
    let ms = |times: &[Duration]| -> f64 {
        quantile(&mut times.iter().map(|t| t.as_secs_f64() * 1e3).collect::<Vec<_>>(), 0.5)
    };
    let (float_ms, step_ms) = (ms(&times.float), ms(&times.qat));
    // Pairs see the same moment of the machine.
    let pairs = times.float.iter().zip(&times.qat);
    let overhead = quantile(&mut pairs.map(|(f, q)| q.as_secs_f64() / f.as_secs_f64()).collect::<Vec<_>>(), 0.5);
    let tokens_per_second = times.tokens as f64 / step_ms * 1e3;
    if global.json {
        let row = json!({
            "name": "train step",
            "steps": steps,
            "tokens": times.tokens,
            "parameters": plan.parameters(),
            "threads": global.threads(),
            "step_ms": step_ms,
            "float_step_ms": float_ms,
            "fake_quant_overhead": overhead,
            "tokens_per_second": tokens_per_second,
        });
        output::line(json!({ "command": "bench", "rows": [row] }).to_string());
        return Ok(0);
    }
    output::line(format!(
        "train step of {} tokens, {} parameters, {} threads, medians of {steps}",
        times.tokens,
        plan.parameters(),
        global.threads()
    ));
    output::line(format!("  float               {float_ms:>10.1} ms"));
    output::line(format!("  with fake quant     {step_ms:>10.1} ms  ({tokens_per_second:.0} tokens/s)"));
    output::line(format!("  fake quant overhead {overhead:>10.3} of the float step (median over pairs)"));
    Ok(0)
}

/// The value at a quantile (nearest rank); sorts `values`, which holds at least one.
fn quantile(values: &mut [f64], q: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (q * values.len() as f64).ceil() as usize;
    values[rank.clamp(1, values.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::quantile;

    #[test]
    fn quantiles_are_nearest_ranks() {
        let mut v = [3.0, 1.0, 2.0, 4.0, 5.0];
        assert_eq!(quantile(&mut v, 0.5), 3.0);
        assert_eq!(quantile(&mut v, 0.99), 5.0);
        assert_eq!(quantile(&mut [7.0], 0.5), 7.0);
    }
}
