//! `dsq eval --kv-report`: what each policy of the cache of keys and values costs on the same text, beside the full cache. The
//! definitions are in `dsq_runtime::PolicyRun` and docs/evaluation.md. Not perplexity alone (see `eval.rs`).

use super::policy::PolicySizes;
use crate::{Global, error::CliError, output};
use dsq_eval::{Report, Row, TextEval};
use dsq_runtime::{KvPolicy, KvType, LlamaRuntime};

/// Times that a prompt is read; the median counts.
const ROUNDS: usize = 5;

/// The policies `full`, `window` and `entropy` of these sizes.
///
/// # Errors
/// Exit code 2 where --kv-budget is not given, and for numbers that make no sense.
pub(super) fn policies(sizes: &PolicySizes) -> Result<[KvPolicy; 3], CliError> {
    let policies = [KvPolicy::Full, sizes.window()?, sizes.entropy()?];
    for policy in &policies {
        policy.check()?;
    }
    Ok(policies)
}

/// What a policy costs, over all windows.
#[derive(Default)]
struct Costs {
    eval: TextEval,
    hits: f64,
    weight: f64,
    positions: f64,
    bytes: usize,
    allocated: usize,
}

/// Adds a row for each policy, and how it was measured, to `report`; says how many predictions there were.
pub(super) fn measure(
    mut report: Report,
    windows: &[&[u32]],
    (model, kv): (&LlamaRuntime, KvType),
    policies: &[KvPolicy],
    global: &Global,
) -> Result<(Report, usize), CliError> {
    let total: usize = windows.iter().map(|w| w.len()).sum();
    let bar = match global.json {
        true => indicatif::ProgressBar::hidden(),
        false => output::progress(total as u64, "eval {bar:30} {pos}/{len} tokens {eta}"),
    };
    let mut costs: Vec<Costs> = policies.iter().map(|_| Costs::default()).collect();
    for window in windows {
        let runs = model.run_policies(window, kv, policies)?;
        for (costs, run) in costs.iter_mut().zip(&runs) {
            // The first policy is `full`.
            costs.eval.window(window, &run.logits, Some(&runs[0].logits))?;
            costs.hits += run.hits;
            costs.weight += run.weight;
            // Of the longest window.
            costs.positions = costs.positions.max(run.positions);
            costs.bytes = costs.bytes.max(run.bytes);
            costs.allocated = costs.allocated.max(run.allocated);
        }
        bar.inc(window.len() as u64);
    }
    bar.finish_and_clear();
    let longest = windows.iter().max_by_key(|w| w.len()).copied().unwrap_or_default();
    let times = model.first_token(longest, kv, policies, ROUNDS)?;
    let mut predictions = 0;
    for ((policy, costs), time) in policies.iter().zip(costs).zip(times) {
        let measured = costs.eval.finish()?;
        predictions = measured.tokens;
        let row = Row::new(policy.name())
            .text_metrics(&measured)
            .maybe("perplexity_difference", measured.perplexity_difference.as_ref())
            .number("hit_rate", costs.hits / costs.weight)
            .number("first_token_ms", time.as_secs_f64() * 1e3)
            .number("kv_positions", costs.positions)
            .number("kv_bytes", costs.bytes as f64)
            .number("kv_bytes_allocated", costs.allocated as f64);
        report.rows.push(row);
    }
    Ok((report.about("first_token_rounds", ROUNDS).about("first_token_prompt", longest.len()), predictions))
}
