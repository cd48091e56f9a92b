//! The time of a training step of a recipe, and what fake quantization adds to it. Not a model's speed (see `bench.rs`).

use super::quantile;
use crate::jobs::lm;
use crate::recipe::{Job, Recipe};
use crate::{Global, error::CliError, output};
use serde_json::json;
use std::path::Path;
use std::time::Duration;

/// Times training steps of a recipe.
pub fn run(recipe: &Path, set: &[String], steps: usize, global: &Global) -> Result<u8, CliError> {
    if steps == 0 {
        return Err(CliError::usage("--train-steps: expected at least 1, got 0"));
    }
    let read = Recipe::load(recipe, set)?;
    let Job::Lm(job) = &read.job else {
        return Err(CliError::usage(format!(
            "{}: model.architecture: expected llama for --train-steps, got resnet",
            recipe.display()
        )));
    };
    let plan = lm::plan(job, recipe, read.seed)?;
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
