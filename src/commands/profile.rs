//! `dsq profile`: the time of each operation of a model, layer by layer, beside what the machine's measured rates predict. Not the
//! speed as a whole (see `bench.rs`).

use super::RuntimeArgs;
use crate::{Global, error::CliError, output};
use dsq_checkpoint::{Checkpoint, write_atomic};
use dsq_kernels::{measure_rates, measure_read_bandwidth};
use dsq_runtime::{Cost, Entry, KvPool, LlamaRuntime, Logits, Op, Sequence};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Options of `dsq profile`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A model folder (float or packed) or a GGUF file.
    model: PathBuf,
    /// Write all, layer by layer, as JSON.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Tokens of the prompt, a step of its own.
    #[arg(long, default_value_t = 512, value_name = "N")]
    prompt_tokens: usize,
    /// Steps of one token after it.
    #[arg(long, default_value_t = 64, value_name = "N")]
    gen_tokens: usize,
    /// Sequences that are decoded together.
    #[arg(long, default_value_t = 1, value_name = "N")]
    batch: usize,
    #[command(flatten)]
    runtime: RuntimeArgs,
}

/// Version of the file that --out writes.
const FORMAT: u32 = 1;

/// One operation: seconds of a step.
struct Line {
    layer: Option<usize>,
    op: Op,
    measured: f64,
    predicted: f64,
    cost: Cost,
}

/// Measures and prints.
pub fn run(args: Args, global: &Global) -> Result<u8, CliError> {
    for (name, value) in
        [("--prompt-tokens", args.prompt_tokens), ("--gen-tokens", args.gen_tokens), ("--batch", args.batch)]
    {
        if value == 0 {
            return Err(CliError::usage(format!("{name}: expected at least 1, got 0")));
        }
    }
    let checkpoint = Checkpoint::open(&args.model)?;
    let limit = LlamaRuntime::context_of(&checkpoint)?;
    // Each step is run once before it is measured.
    let len = args.prompt_tokens.saturating_add(args.gen_tokens).saturating_add(1);
    if len > limit {
        let of = "--prompt-tokens and --gen-tokens";
        let message = format!("{of}: expected at most {} tokens together, got {}", limit - 1, len - 1);
        return Err(CliError::usage(message));
    }
    let model = args.runtime.load(&checkpoint, global.threads())?;
    let mut pool = args.runtime.new_pool(&model, args.batch, len)?;
    let vocab = model.config().vocab_size;
    let ids: Vec<Vec<u32>> =
        (0..args.batch).map(|b| (0..len).map(|i| ((i + 31 * b) * 7919 % vocab) as u32).collect()).collect();
    let mut sequences: Vec<Sequence> = (0..args.batch).map(|_| pool.new_sequence()).collect();
    let (bandwidth, rates) = (measure_read_bandwidth(global.threads()), measure_rates(global.threads()));
    let predict =
        |cost: &Cost| rates.region + (cost.bytes / bandwidth).max(cost.float / rates.float + cost.int8 / rates.int8);
    let mut logits = Vec::new();
    let mut step = |pool: &mut KvPool, sequences: &mut [Sequence], from: usize, to: usize| {
        let entries = sequences.iter_mut().zip(&ids);
        let mut entries: Vec<Entry> =
            entries.map(|(sequence, ids)| Entry { sequence, tokens: &ids[from..to], logits: Logits::Last }).collect();
        model.step(pool, &mut entries, &mut logits)
    };
    step(&mut pool, &mut sequences, 0, args.prompt_tokens)?;
    for sequence in &mut sequences {
        pool.truncate(sequence, 0)?;
    }
    pool.start_profile();
    step(&mut pool, &mut sequences, 0, args.prompt_tokens)?;
    let costs = model.costs(&pool, args.batch, args.prompt_tokens, 0);
    let prompt = lines(&pool, 1, &costs, &predict);
    step(&mut pool, &mut sequences, args.prompt_tokens, args.prompt_tokens + 1)?;
    pool.start_profile();
    for at in args.prompt_tokens + 1..len {
        step(&mut pool, &mut sequences, at, at + 1)?;
    }
    let costs = model.costs(&pool, args.batch, 1, args.prompt_tokens + args.gen_tokens / 2);
    let decode = lines(&pool, args.gen_tokens, &costs, &predict);
    let phases = [("prompt", &prompt), ("decode", &decode)];
    let rates = json!({
        "read_bandwidth": bandwidth, "float_multiply_adds": rates.float, "int8_multiply_adds": rates.int8,
        "region_seconds": rates.region,
    });
    if let Some(path) = &args.out {
        let all: Vec<_> = phases.iter().flat_map(|(phase, lines)| lines.iter().map(|l| row(phase, l))).collect();
        let file = json!({
            "format": FORMAT, "dsq": env!("CARGO_PKG_VERSION"), "model": args.model.display().to_string(),
            "threads": model.threads(), "batch": args.batch, "prompt_tokens": args.prompt_tokens,
            "gen_tokens": args.gen_tokens, "activations": args.runtime.activations_name(),
            "kv_type": pool.format_name(), "rates": rates, "operations": all,
        });
        write_atomic(path, format!("{file:#}\n").as_bytes())?;
    }
    let sums: Vec<_> =
        phases.iter().flat_map(|(phase, lines)| sum(lines).into_iter().map(move |l| (*phase, l))).collect();
    if global.json {
        let rows: Vec<_> = sums.iter().map(|(phase, line)| row(phase, line)).collect();
        output::line(json!({ "command": "profile", "rates": rates, "rows": rows }).to_string());
        return Ok(0);
    }
    print(&args, &model, &sums, bandwidth, &rates);
    Ok(0)
}

/// What was measured in `steps` steps, an average step, beside its prediction.
fn lines(
    pool: &KvPool,
    steps: usize,
    costs: &[(Option<usize>, Op, Cost)],
    predict: &dyn Fn(&Cost) -> f64,
) -> Vec<Line> {
    let line = |(layer, op, time): (Option<usize>, Op, std::time::Duration)| {
        let cost = costs.iter().find(|c| (c.0, c.1) == (layer, op)).map_or(Cost::default(), |c| c.2);
        Line { layer, op, measured: time.as_secs_f64() / steps as f64, predicted: predict(&cost), cost }
    };
    pool.profile().into_iter().map(line).collect()
}

/// All layers together, operation by operation.
fn sum(lines: &[Line]) -> Vec<Line> {
    let mut sums: BTreeMap<Op, Line> = BTreeMap::new();
    for l in lines {
        let zero = Line { layer: None, op: l.op, measured: 0.0, predicted: 0.0, cost: Cost::default() };
        let s = sums.entry(l.op).or_insert(zero);
        s.measured += l.measured;
        s.predicted += l.predicted;
        s.cost.bytes += l.cost.bytes;
        s.cost.float += l.cost.float;
        s.cost.int8 += l.cost.int8;
    }
    sums.into_values().collect()
}

fn row(phase: &str, l: &Line) -> serde_json::Value {
    let mut row = json!({
        "name": format!("{phase} {}", l.op.name()), "phase": phase, "op": l.op.name(), "measured_ms": l.measured * 1e3,
        "predicted_ms": l.predicted * 1e3, "deviation": l.measured / l.predicted - 1.0, "bytes": l.cost.bytes,
        "multiply_adds": l.cost.float + l.cost.int8,
    });
    if let Some(layer) = l.layer {
        row["layer"] = layer.into();
        row["name"] = format!("{phase} model.layers.{layer} {}", l.op.name()).into();
    }
    row
}

fn print(args: &Args, model: &LlamaRuntime, sums: &[(&str, Line)], bandwidth: f64, rates: &serde_json::Value) {
    output::line(format!(
        "{} threads read {:.1} GB/s and compute {:.0} G multiply-adds/s in f32, {:.0} in int8",
        model.threads(),
        bandwidth / 1e9,
        rates["float_multiply_adds"].as_f64().unwrap_or(0.0) / 1e9,
        rates["int8_multiply_adds"].as_f64().unwrap_or(0.0) / 1e9
    ));
    for (phase, what) in [
        ("prompt", format!("a step of {} tokens", args.prompt_tokens * args.batch)),
        ("decode", format!("a step of {} behind {}", args.batch, args.prompt_tokens)),
    ] {
        let of: Vec<&Line> = sums.iter().filter(|(p, _)| *p == phase).map(|(_, l)| l).collect();
        let total: f64 = of.iter().map(|l| l.measured).sum();
        output::line(format!("{phase}: {what}, {:.3} ms", total * 1e3));
        output::line("  operation   measured ms  predicted ms  deviation   share");
        for l in of {
            output::line(format!(
                "  {:<10} {:>12.4} {:>13.4} {:>+9.0}% {:>6.1}%",
                l.op.name(),
                l.measured * 1e3,
                l.predicted * 1e3,
                100.0 * (l.measured / l.predicted - 1.0),
                100.0 * l.measured / total
            ));
        }
    }
}
