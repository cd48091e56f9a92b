//! What an export says to a fixed set of prompts, beside what its source says: the part of a proof that needs a model to run. Not
//! an evaluation: the prompts are few (see `dsq eval`).

use crate::plan::available_memory;
use crate::{error::CliError, output};
use dsq_checkpoint::{Checkpoint, CheckpointError, Fault, ModelConfig, PROOF_FILE, Proof, Severity, printable};
use dsq_eval::TextEval;
use dsq_runtime::{RuntimeError, Specials, TextTokenizer, streamed_bytes, streamed_logits};
use serde_json::{Value, json};
use std::path::Path;

/// The prompts, where the model has a tokenizer.
const TEXTS: [&str; 4] = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) +",
    "Once upon a time, in a village by the sea, there lived an old man who",
    "1 + 1 = 2, 2 + 2 = 4, 4 + 4 = 8, 8 + 8 =",
];
/// Lengths of the prompts of ids, where it has none.
const LENGTHS: [usize; 4] = [5, 16, 23, 48];
/// Tokens of a prompt at most.
const MOST: usize = 64;
/// Logits of a prompt's last token that the proof holds.
const TOP: usize = 5;
/// How far a logit may be from the one in the proof, as a share of the largest: the same codes on other instructions differ by
/// the roundings of f32 sums (measured against f64: 4e-5), and a wrong code by far more.
const SAME: f64 = 1e-3;

/// The `logits` of a proof: how far `exported` is from `source`, or why that was not measured.
pub fn compare(source: &Checkpoint, exported: &Checkpoint, threads: usize) -> Value {
    measure(source, exported, threads).unwrap_or_else(|why| json!({"not_measured": why}))
}

/// The numbers of a proof's `logits`, for `--json`.
pub fn brief(proof: &Proof) -> Value {
    let mut value = proof.logits.clone().unwrap_or_default();
    if let Some(object) = value.as_object_mut() {
        object.retain(|key, _| !["prompts", "last"].contains(&key.as_str()));
    }
    value
}

/// Prints them.
pub fn tell(proof: &Proof) {
    let Some(logits) = &proof.logits else { return };
    if let Some(why) = logits["not_measured"].as_str() {
        return output::note(format!("logits on fixed prompts: not measured: {}", printable(why)));
    }
    let number = |key: &str| logits[key].as_f64().unwrap_or(f64::NAN);
    output::line(format!(
        "logits on {} fixed prompts: KL to the source {:.4}, {:.1}% the same first choice, {:.1e} apart at most",
        TEXTS.len(),
        number("kl"),
        100.0 * number("top1_agreement"),
        number("max_abs_difference"),
    ));
}

/// Memory that [`compare`] takes.
pub fn bytes(source: &Checkpoint, threads: usize) -> u64 {
    let ModelConfig::Llama(c) = source.config() else { return 0 };
    let logits = 2 * 4 * (TEXTS.len() * MOST * c.vocab_size) as u64;
    streamed_bytes(source, threads) + logits
}

fn measure(source: &Checkpoint, exported: &Checkpoint, threads: usize) -> Result<Value, String> {
    let ModelConfig::Llama(_) = source.config() else { return Err("an image model".into()) };
    room(source, threads)?;
    let prompts = prompts(source);
    let reference = streamed_logits(source, &prompts, threads).map_err(|e| format!("the source: {e}"))?;
    let logits = streamed_logits(exported, &prompts, threads).map_err(|e| format!("the export: {e}"))?;
    let mut eval = TextEval::new();
    let (mut largest, mut apart) = (0.0f64, 0.0f64);
    for ((prompt, ours), theirs) in prompts.iter().zip(&logits).zip(&reference) {
        eval.window(prompt, ours, Some(theirs)).map_err(|e| e.to_string())?;
        for (a, b) in ours.iter().zip(theirs) {
            apart = apart.max(f64::from((a - b).abs()));
            largest = largest.max(f64::from(b.abs()));
        }
    }
    let metrics = eval.finish().map_err(|e| e.to_string())?;
    let value = |e: Option<dsq_eval::Estimate>| e.map(|e| e.value);
    Ok(json!({
        "prompts": prompts,
        "predictions": metrics.tokens,
        "kl": value(metrics.kl),
        "top1_agreement": value(metrics.top1_agreement),
        "max_abs_difference": apart,
        "largest_logit": largest,
        "last": logits.iter().zip(&prompts).map(|(l, p)| top(&l[l.len() - l.len() / p.len()..])).collect::<Vec<_>>(),
    }))
}

/// Refuses a model that is too large for the memory that is there.
fn room(model: &Checkpoint, threads: usize) -> Result<(), String> {
    let needed = bytes(model, threads);
    match available_memory().filter(|there| *there < needed) {
        Some(there) => Err(format!("expected {needed} bytes of memory, got {there}")),
        None => Ok(()),
    }
}

/// The first choices after a prompt, `[[id, logit], ...]`.
fn top(logits: &[f32]) -> Vec<(usize, f32)> {
    let mut all: Vec<(usize, f32)> = logits.iter().copied().enumerate().collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all.truncate(TOP);
    all
}

/// The prompts as ids: [`TEXTS`], or numbers that follow from the size of the vocabulary.
fn prompts(model: &Checkpoint) -> Vec<Vec<u32>> {
    let ModelConfig::Llama(c) = model.config() else { return Vec::new() };
    let most = MOST.min(c.max_position_embeddings);
    let texts = || -> Result<Vec<Vec<u32>>, RuntimeError> {
        let tokenizer = TextTokenizer::new(model)?;
        TEXTS.iter().map(|t| tokenizer.encode(t, Specials::AsText)).collect()
    };
    let usable = |all: &Vec<Vec<u32>>| all.iter().all(|p| p.len() >= 2);
    let mut prompts = texts().ok().filter(usable).unwrap_or_else(|| {
        // The generator of Knuth's MMIX, whose high bits are good.
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 33) % c.vocab_size.max(1) as u64) as u32
        };
        LENGTHS.iter().map(|&n| (0..n).map(|_| next()).collect()).collect()
    });
    prompts.iter_mut().for_each(|p| p.truncate(most));
    prompts
}

/// Checks a model against the logits in its proof, and the proof against `source`: `dsq inspect --verify`.
///
/// # Errors
/// What reading the source gives.
pub fn verify(model: &Checkpoint, source: Option<&Checkpoint>, threads: usize) -> Result<Vec<Fault>, CliError> {
    let file = model.proof_file();
    let fault = |severity, field: &str, problem: String| Fault::new(severity, &file, field, problem);
    let proof = match std::fs::read(&file).ok().map(|b| serde_json::from_slice::<Value>(&b)) {
        Some(Ok(proof)) => proof,
        Some(Err(e)) => return Ok(vec![fault(Severity::Error, "", format!("expected a proof, got no JSON: {e}"))]),
        None => {
            let problem = format!("--verify: expected the proof of an export ({PROOF_FILE}), got no such file");
            return Ok(vec![fault(Severity::Error, "", problem)]);
        }
    };
    let mut faults = Vec::new();
    match recorded(&proof) {
        Ok((prompts, last)) => {
            if let Err(problem) = same_logits(model, &prompts, &last, threads) {
                faults.push(fault(Severity::Error, "logits", problem));
            }
        }
        Err(why) => faults.push(fault(Severity::Note, "logits", why)),
    }
    if let Some(source) = source {
        faults.extend(same_source(&file, &proof, source)?);
        if let Ok((prompts, _)) = recorded(&proof)
            && prompts == self::prompts(source)
        {
            let now = compare(source, model, threads);
            for key in ["kl", "max_abs_difference"] {
                let (then, now) = (&proof["logits"][key], &now[key]);
                let near = |a: f64, b: f64| (a - b).abs() <= SAME * a.abs().max(b.abs()).max(1e-3);
                if !then.as_f64().zip(now.as_f64()).is_some_and(|(a, b)| near(a, b)) {
                    let problem = format!("against the source: expected {then}, got {now}");
                    faults.push(fault(Severity::Error, &format!("logits.{key}"), problem));
                }
            }
        }
    }
    Ok(faults)
}

type Last = Vec<Vec<(usize, f64)>>;

/// Prompts and last logits of a proof, or why it has none.
fn recorded(proof: &Value) -> Result<(Vec<Vec<u32>>, Last), String> {
    let logits = &proof["logits"];
    if let Some(why) = logits["not_measured"].as_str() {
        return Err(format!("not measured when it was written: {why}"));
    }
    let read = || -> Result<_, serde_json::Error> {
        Ok((serde_json::from_value(logits["prompts"].clone())?, serde_json::from_value(logits["last"].clone())?))
    };
    read().map_err(|_| "the proof holds none".into())
}

fn same_logits(model: &Checkpoint, prompts: &[Vec<u32>], last: &Last, threads: usize) -> Result<(), String> {
    room(model, threads)?;
    let logits = streamed_logits(model, prompts, threads).map_err(|e| e.to_string())?;
    for (i, ((logits, prompt), last)) in logits.iter().zip(prompts).zip(last).enumerate() {
        let row = &logits[logits.len() - logits.len() / prompt.len()..];
        let largest = row.iter().fold(0.0f64, |m, &x| m.max(f64::from(x).abs()));
        for &(id, then) in last {
            let now = row.get(id).map_or(f64::NAN, |&x| f64::from(x));
            if !((now - then).abs() <= SAME * largest) {
                return Err(format!("prompt {i}: logit of token {id}: expected {then}, got {now}"));
            }
        }
    }
    if last.len() == prompts.len() {
        Ok(())
    } else {
        Err(format!("expected logits of {} prompts, got {}", prompts.len(), last.len()))
    }
}

/// Whether every tensor that the proof hashed is in the source as it was.
fn same_source(file: &Path, proof: &Value, source: &Checkpoint) -> Result<Vec<Fault>, CliError> {
    let mut faults = Vec::new();
    for tensor in proof["tensors"].as_array().into_iter().flatten() {
        let (Some(name), Some(hash)) = (tensor["name"].as_str(), tensor["source"]["sha256"].as_str()) else { continue };
        // What was stored as floats of another dtype was hashed as f32.
        let as_f32 = tensor["source"]["dtype"] == "F32" && source.info(name).is_none_or(|i| i.dtype != "F32");
        let got = match if as_f32 { source.sha256_as_f32(name) } else { source.sha256(name) } {
            Ok(got) => got,
            // A matrix in codes has no one tensor.
            Err(CheckpointError::Invalid(_)) => continue,
            Err(e) => return Err(e.into()),
        };
        if got != hash {
            let problem = format!("the source has other values: expected SHA-256 {hash}, got {got}");
            faults.push(Fault::new(Severity::Error, file, name, problem));
        }
    }
    Ok(faults)
}
