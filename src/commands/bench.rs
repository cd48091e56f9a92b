//! `dsq bench`: tokens per second of a model for prompts and batches, and which share of the machine's read bandwidth decoding
//! uses; or, of a recipe, the time of a training step (`bench/train_step.rs`). Not the time of single operations (see `profile.rs`).

mod engine;
mod train_step;

use super::RuntimeArgs;
use crate::plot::{Series, curves};
use crate::{Global, error::CliError, output};
use dsq_checkpoint::{Checkpoint, write_atomic};
use dsq_kernels::measure_read_bandwidth;
use dsq_runtime::{Entry, LlamaRuntime, Logits, Sequence};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Options of `dsq bench`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A model folder (float or packed) or a GGUF file; with --train-steps a recipe.
    model: PathBuf,
    /// Time this many steps of the recipe's QAT phase, each beside one in float.
    #[arg(long, value_name = "N", conflicts_with_all = ["prompt_tokens", "gen_tokens", "repeat", "batch", "csv", "plot"])]
    train_steps: Option<usize>,
    /// With --train-steps, change a value of the recipe, as in `model.hidden_size=256`; may be given several times.
    #[arg(long, value_name = "KEY=VALUE", requires = "train_steps")]
    set: Vec<String>,
    /// Tokens of the prompt; several lengths give a row each.
    #[arg(long, default_value = "512", value_name = "N,N,...", value_delimiter = ',')]
    prompt_tokens: Vec<usize>,
    /// Tokens to generate after it.
    #[arg(long, default_value_t = 128, value_name = "N")]
    gen_tokens: usize,
    /// Sequences that are decoded together; several numbers give a row each.
    #[arg(long, default_value = "1", value_name = "N,N,...", value_delimiter = ',')]
    batch: Vec<usize>,
    /// Times to do all; the figures are medians (latencies: percentiles over all steps).
    #[arg(long, default_value_t = 5, value_name = "N")]
    repeat: usize,
    /// Instead: this many steps of an engine that --batch sequences run on at once, while requests of random lengths (up to
    /// --prompt-tokens and --gen-tokens) come and go; tells how evenly the steps take.
    #[arg(long, value_name = "N", conflicts_with_all = ["repeat", "plot"])]
    engine_steps: Option<usize>,
    #[command(flatten)]
    runtime: RuntimeArgs,
    /// Write the rows as CSV.
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Draw tokens a second over the batch (or, of one batch, over the length of the prompt) as SVG.
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

/// Measures and prints rows `batch N`, or `train step` of a recipe.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    if let Some(steps) = args.train_steps {
        return train_step::run(&args.model, &args.set, steps, global);
    }
    let numbers = [("--gen-tokens", args.gen_tokens), ("--repeat", args.repeat)].into_iter();
    let lists =
        args.prompt_tokens.iter().map(|&n| ("--prompt-tokens", n)).chain(args.batch.iter().map(|&n| ("--batch", n)));
    if let Some((name, _)) = numbers.chain(lists).find(|&(_, n)| n == 0) {
        return Err(CliError::usage(format!("{name}: expected at least 1, got 0")));
    }
    let checkpoint = Checkpoint::open(&args.model)?;
    let limit = LlamaRuntime::context_of(&checkpoint)?;
    let asked = args.prompt_tokens.iter().max().unwrap_or(&1).saturating_add(args.gen_tokens);
    if asked > limit {
        let of = "--prompt-tokens and --gen-tokens";
        return Err(CliError::usage(format!(
            "{of}: expected at most {limit} tokens together (the model's context), got {asked}"
        )));
    }
    let start = Instant::now();
    let model = args.runtime.load(&checkpoint, global.threads())?;
    let load_seconds = start.elapsed().as_secs_f64();
    let mut kernels: BTreeMap<String, usize> = BTreeMap::new();
    for (_, kernel) in model.kernels() {
        *kernels.entry(kernel).or_default() += 1;
    }
    let mut rows = Vec::new();
    if let Some(steps) = args.engine_steps {
        for &sequences in &args.batch {
            let row = engine::measure(&model, &args, sequences, steps)?;
            if !global.json {
                print_engine(&row);
            }
            rows.push(row);
        }
    }
    let measured: &[usize] = if args.engine_steps.is_some() { &[] } else { &args.prompt_tokens };
    for &prompt in measured {
        for &batch in &args.batch {
            let mut row = measure(&model, &args, prompt, batch, global.threads())?;
            row["load_seconds"] = load_seconds.into();
            row["kernels"] = json!(kernels);
            if !global.json {
                print(&row);
            }
            rows.push(row);
        }
    }
    write_files(&args, &rows)?;
    if global.json {
        output::line(json!({ "command": "bench", "rows": rows }).to_string());
        return Ok(0);
    }
    output::line(format!("weights {:.1} MB in memory", model.resident_bytes() as f64 / 1e6));
    for (kernel, layers) in kernels {
        output::line(format!("{layers:>5} layers: {kernel}"));
    }
    Ok(0)
}

/// One row: `batch` sequences, each with a prompt of its own.
fn measure(model: &LlamaRuntime, args: &Args, prompt: usize, batch: usize, threads: usize) -> Result<Value, CliError> {
    let len = prompt + args.gen_tokens;
    let mut pool = args.runtime.new_pool(model, batch, len)?;
    // The ids decide nothing about the speed; a fixed walk through the vocabulary avoids a hot embedding row.
    let vocab = model.config().vocab_size;
    let ids: Vec<Vec<u32>> =
        (0..batch).map(|b| (0..len).map(|i| ((i + 31 * b) * 7919 % vocab) as u32).collect()).collect();
    let mut sequences: Vec<Sequence> = (0..batch).map(|_| pool.new_sequence()).collect();
    let (mut prompts, mut decode, mut latencies, mut logits) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for round in 0..=args.repeat {
        // The first round touches all memory; it does not count.
        if round == 1 {
            [&mut prompts, &mut decode, &mut latencies].into_iter().for_each(Vec::clear);
        }
        for sequence in &mut sequences {
            pool.truncate(sequence, 0)?;
        }
        let start = Instant::now();
        for (sequence, ids) in sequences.iter_mut().zip(&ids) {
            model.step(
                &mut pool,
                &mut [Entry { sequence, tokens: &ids[..prompt], logits: Logits::Last }],
                &mut logits,
            )?;
        }
        prompts.push((batch * prompt) as f64 / start.elapsed().as_secs_f64());
        let start = Instant::now();
        for at in prompt..len {
            let step = Instant::now();
            let mut entries: Vec<Entry> = sequences
                .iter_mut()
                .zip(&ids)
                .map(|(sequence, ids)| Entry { sequence, tokens: &ids[at..=at], logits: Logits::Last })
                .collect();
            model.step(&mut pool, &mut entries, &mut logits)?;
            latencies.push(step.elapsed().as_secs_f64() * 1e3);
        }
        decode.push((batch * args.gen_tokens) as f64 / start.elapsed().as_secs_f64());
    }
    let tokens_per_second = quantile(&mut decode, 0.5);
    // Weights are read once a step, keys and values of each sequence up to its position (on average: the middle of the generation).
    let kv = pool.bytes_read(prompt as f64 + (args.gen_tokens as f64 + 1.0) / 2.0);
    let bytes_per_step = model.bytes_per_token() as f64 + batch as f64 * kv;
    let bandwidth = measure_read_bandwidth(threads);
    let bytes_per_second = bytes_per_step * tokens_per_second / batch as f64;
    let name = match args.prompt_tokens.len() {
        1 => format!("batch {batch}"),
        _ => format!("batch {batch}, prompt {prompt}"),
    };
    Ok(json!({
        "name": name,
        "batch": batch,
        "prompt_tokens": prompt,
        "gen_tokens": args.gen_tokens,
        "repeat": args.repeat,
        "threads": model.threads(),
        "activations": args.runtime.activations_name(),
        "kv_type": pool.format_name(),
        "prompt_tokens_per_second": quantile(&mut prompts, 0.5),
        "tokens_per_second": tokens_per_second,
        "latency_p50_ms": quantile(&mut latencies, 0.5),
        "latency_p99_ms": quantile(&mut latencies, 0.99),
        "resident_bytes": model.resident_bytes(),
        "kv_cache_bytes": pool.bytes(),
        "bytes_per_token": bytes_per_step / batch as f64,
        "bytes_per_second": bytes_per_second,
        "read_bandwidth": bandwidth,
        "bandwidth_share": bytes_per_second / bandwidth,
    }))
}

fn print(row: &Value) {
    let (number, text) = (|key: &str| row[key].as_f64().unwrap_or(0.0), |key: &str| row[key].as_str().unwrap_or(""));
    output::line(format!(
        "{}, {} threads, {} activations, {} cache, medians of {}",
        text("name"),
        row["threads"],
        text("activations"),
        text("kv_type"),
        row["repeat"]
    ));
    let (prompt, generation) = (number("prompt_tokens_per_second"), number("tokens_per_second"));
    output::line(format!("  prompt      {prompt:>10.1} tokens/s  ({} tokens)", row["prompt_tokens"]));
    output::line(format!("  generation  {generation:>10.1} tokens/s  ({} tokens)", row["gen_tokens"]));
    let (p50, p99) = (number("latency_p50_ms"), number("latency_p99_ms"));
    output::line(format!("  latency     {p50:>10.2} ms p50, {p99:.2} ms p99"));
    output::line(format!(
        "  reads       {:>10.2} GB/s, {:.0}% of the {:.2} GB/s that this machine reads with as many threads",
        number("bytes_per_second") / 1e9,
        100.0 * number("bandwidth_share"),
        number("read_bandwidth") / 1e9
    ));
}

fn print_engine(row: &Value) {
    let number = |key: &str| row[key].as_f64().unwrap_or(0.0);
    output::line(format!(
        "engine, {} sequences, {} threads, {} steps, {} requests",
        row["batch"], row["threads"], row["steps"], row["requests"]
    ));
    output::line(format!("  generation  {:>10.1} tokens/s", number("tokens_per_second")));
    output::line(format!(
        "  step        {:>10.2} ms p50, {:.2} ms p99 ({:.2} of p50; the same work each time: {:.2}); {} reallocations after the warm-up",
        number("latency_p50_ms"),
        number("latency_p99_ms"),
        number("latency_p99_over_p50"),
        number("same_work_p99_over_p50"),
        row["reallocations"]
    ));
}

/// Columns of the CSV file.
const COLUMNS: [&str; 14] = [
    "batch",
    "prompt_tokens",
    "gen_tokens",
    "threads",
    "activations",
    "kv_type",
    "prompt_tokens_per_second",
    "tokens_per_second",
    "latency_p50_ms",
    "latency_p99_ms",
    "bytes_per_second",
    "read_bandwidth",
    "bandwidth_share",
    "resident_bytes",
];

fn write_files(args: &Args, rows: &[Value]) -> Result<(), CliError> {
    if let Some(path) = &args.csv {
        let line =
            |row: &Value| COLUMNS.map(|c| row[c].as_str().map_or_else(|| row[c].to_string(), str::to_owned)).join(",");
        let lines: Vec<String> = std::iter::once(COLUMNS.join(",")).chain(rows.iter().map(line)).collect();
        write(path, &(lines.join("\n") + "\n"))?;
    }
    if let Some(path) = &args.plot {
        let by_batch = args.batch.len() > 1;
        let (x, of) = if by_batch { ("batch", "prompt_tokens") } else { ("prompt_tokens", "batch") };
        let mut series: BTreeMap<u64, Vec<(f64, f64)>> = BTreeMap::new();
        for row in rows {
            let point = (row[x].as_f64().unwrap_or(0.0), row["tokens_per_second"].as_f64().unwrap_or(0.0));
            series.entry(row[of].as_u64().unwrap_or(0)).or_default().push(point);
        }
        let series: Vec<Series> =
            series.into_iter().map(|(n, points)| Series::line(format!("{of} {n}"), points)).collect();
        let title = args.model.display().to_string();
        if let Some(svg) = curves(&title, [x, "tokens per second"], &series) {
            write(path, &svg)?;
        }
    }
    Ok(())
}

fn write(path: &Path, text: &str) -> Result<(), CliError> {
    Ok(write_atomic(path, text.as_bytes())?)
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
