//! What an export says to a fixed set of prompts or pictures, beside what its source says: the part of a proof that needs a model to
//! run. Not an evaluation: the questions are few (see `dsq eval`).

use crate::plan::{BASE_MEMORY, Plan, available_memory, duration};
use crate::{error::CliError, output};
use dsq_checkpoint::{
    Checkpoint, CheckpointError, Fault, LlamaConfig, ModelConfig, PROOF_FILE, Proof, Severity, SourceRecord, printable,
};
use dsq_eval::TextEval;
use dsq_runtime::{
    CnnRuntime, ImageRuntime, RuntimeError, Specials, TextTokenizer, streamed_bytes, streamed_logits, streamed_seconds,
};
use serde::{Deserialize, Serialize};
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
/// Pictures that an image model is asked for.
const PICTURES: usize = 4;
/// Logits of a prompt's last token that the proof holds.
const TOP: usize = 5;
/// How far a logit may be from the one in the proof, as a share of the largest: the same codes on other instructions differ by
/// the roundings of f32 sums (measured against f64: 4e-5), and a wrong code by far more.
const SAME: f64 = 1e-3;

/// What a model is asked.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Questions {
    /// Token ids of prompts.
    Prompts(Vec<Vec<u32>>),
    /// That many pictures of waves, see [`pictures`].
    Pictures(usize),
}

/// Whether a proof gets logits.
#[derive(clap::Args, Debug, Clone, Copy)]
pub struct LogitsArgs {
    /// Do not run source and output on the fixed prompts or pictures of the proof, which then says so: this reads both once more and
    /// computes, where everything else only reads and writes.
    #[arg(long)]
    no_logits: bool,
}

impl LogitsArgs {
    /// [`compare`], if it is wanted.
    ///
    /// # Errors
    /// As there.
    pub fn compare(self, source: &Checkpoint, exported: &Checkpoint, threads: usize) -> Result<Value, CheckpointError> {
        match self.no_logits {
            true => Ok(json!({"not_measured": "left out: --no-logits"})),
            false => compare(source, exported, threads),
        }
    }

    /// Adds what [`LogitsArgs::compare`] takes of a language model (an image model is small) to a plan: its memory comes after
    /// everything else, its time on top.
    pub fn plan(self, plan: &mut Plan, source: &Checkpoint, threads: usize) {
        let Questions::Prompts(prompts) = (match self.no_logits {
            true => return,
            false => Questions::of(source),
        }) else {
            return;
        };
        plan.memory = plan.memory.max(BASE_MEMORY + bytes(source, threads));
        // What cannot be run is not measured, and the proof says why.
        if let Ok(once) = streamed_seconds(source, prompts.iter().map(Vec::len).sum(), threads) {
            // Source and output.
            plan.seconds += 2.0 * once;
            plan.measured += &format!("; the prompts of the proof take {} of it", duration(2.0 * once));
        }
    }
}

/// The `logits` of a proof: how far `exported` is from `source`, or why that was not measured.
///
/// # Errors
/// Files that cannot be read (4): what cannot be read back is no export.
pub fn compare(source: &Checkpoint, exported: &Checkpoint, threads: usize) -> Result<Value, CheckpointError> {
    measure(&Questions::of(source), source, exported, threads).or_else(|e| match e {
        Why::Unread(e) => Err(e),
        Why::Other(why) => {
            // The export has the name of a temporary file yet, which is no part of what is the matter.
            let name = exported.path().to_string_lossy();
            Ok(json!({"not_measured": why.replace(&*name, "the export")}))
        }
    })
}

/// Why there are no logits.
enum Why {
    Unread(CheckpointError),
    Other(String),
}

impl From<RuntimeError> for Why {
    fn from(e: RuntimeError) -> Self {
        match e {
            RuntimeError::Checkpoint(e) if e.exit_code() == 4 => Self::Unread(e),
            e => Self::Other(e.to_string()),
        }
    }
}

impl From<String> for Why {
    fn from(why: String) -> Self {
        Self::Other(why)
    }
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Unread(e) => e.fmt(f),
            Self::Other(why) => f.write_str(why),
        }
    }
}

/// The numbers of a proof's `logits`, for `--json`.
pub fn brief(proof: &Proof) -> Value {
    let mut value = proof.logits.clone().unwrap_or_default();
    if let Some(object) = value.as_object_mut() {
        object.retain(|key, _| !["questions", "last"].contains(&key.as_str()));
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
        "logits on {} fixed {}: KL to the source {:.4}, {:.1}% the same first choice, {:.1e} apart at most",
        logits["last"].as_array().map_or(0, Vec::len),
        if logits["questions"]["pictures"].is_null() { "prompts" } else { "pictures" },
        number("kl"),
        100.0 * number("top1_agreement"),
        number("max_abs_difference"),
    ));
}

/// Memory that [`compare`] takes.
fn bytes(source: &Checkpoint, threads: usize) -> u64 {
    let ModelConfig::Llama(c) = source.config() else { return 0 };
    // Of both, and of all prompts together before they are taken apart.
    let logits = 3 * 4 * (TEXTS.len() * MOST * c.vocab_size) as u64;
    streamed_bytes(source, threads) + logits
}

fn measure(questions: &Questions, source: &Checkpoint, exported: &Checkpoint, threads: usize) -> Result<Value, Why> {
    let reference = questions.ask(source, threads)?;
    let logits = questions.ask(exported, threads)?;
    let mut eval = TextEval::new();
    let (mut largest, mut apart) = (0.0f64, 0.0f64);
    for (i, (ours, theirs)) in logits.iter().zip(&reference).enumerate() {
        eval.window(&questions.tokens(i), ours, Some(theirs)).map_err(|e| e.to_string())?;
        for (a, b) in ours.iter().zip(theirs) {
            apart = apart.max(f64::from((a - b).abs()));
            largest = largest.max(f64::from(b.abs()));
        }
    }
    let metrics = eval.finish().map_err(|e| e.to_string())?;
    let value = |e: Option<dsq_eval::Estimate>| e.map(|e| e.value);
    Ok(json!({
        "questions": questions,
        "predictions": metrics.tokens,
        "kl": value(metrics.kl),
        "top1_agreement": value(metrics.top1_agreement),
        "max_abs_difference": apart,
        "largest_logit": largest,
        "last": logits.iter().enumerate().map(|(i, l)| top(questions.last(i, l))).collect::<Vec<_>>(),
    }))
}

impl Questions {
    /// Those that a model is asked.
    fn of(model: &Checkpoint) -> Self {
        match model.config() {
            ModelConfig::Llama(c) => Self::Prompts(prompts(model, c)),
            ModelConfig::Image(_) | ModelConfig::ResNet(_) => Self::Pictures(PICTURES),
        }
    }

    /// The logits after every token of every prompt; of pictures, those of each, twice (one row more than is looked at, see
    /// [`TextEval::window`]).
    fn ask(&self, model: &Checkpoint, threads: usize) -> Result<Vec<Vec<f32>>, Why> {
        let count = match self {
            Self::Prompts(prompts) => {
                let needed = bytes(model, threads);
                if let Some(there) = available_memory().filter(|there| *there < needed) {
                    return Err(format!("expected {needed} bytes of memory, got {there}").into());
                }
                return Ok(streamed_logits(model, prompts, threads)?);
            }
            Self::Pictures(count) => *count,
        };
        let logits = match model.config() {
            ModelConfig::Image(c) => {
                let [h, w] = c.preparation.size;
                ImageRuntime::load(model).and_then(|r| r.forward(&pictures(count, h * w * c.channels), count))
            }
            ModelConfig::ResNet(c) => {
                let picture = c.image_size * c.image_size * c.in_channels;
                CnnRuntime::load(model).and_then(|r| r.forward(&pictures(count, picture), count))
            }
            ModelConfig::Llama(_) => {
                return Err(Why::Other("expected an image model, got a language model".into()));
            }
        }?;
        Ok(logits.chunks((logits.len() / count.max(1)).max(1)).map(|row| row.repeat(2)).collect())
    }

    /// Tokens in whose place the logits of question `i` stand.
    fn tokens(&self, i: usize) -> Vec<u32> {
        match self {
            Self::Prompts(prompts) => prompts[i].clone(),
            Self::Pictures(_) => vec![0; 2],
        }
    }

    /// The last row of the logits of question `i`.
    fn last<'l>(&self, i: usize, logits: &'l [f32]) -> &'l [f32] {
        &logits[logits.len() - logits.len() / self.tokens(i).len().max(1)..]
    }
}

/// The first choices of a row, `[[id, logit], ...]`.
fn top(logits: &[f32]) -> Vec<(usize, f32)> {
    let mut all: Vec<(usize, f32)> = logits.iter().copied().enumerate().collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    all.truncate(TOP);
    all
}

/// The prompts as ids: [`TEXTS`], or numbers that follow from the size of the vocabulary.
fn prompts(model: &Checkpoint, c: &LlamaConfig) -> Vec<Vec<u32>> {
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

/// `count` normalized pictures of `values` numbers each: a wave of another length for each, up to two standard deviations.
fn pictures(count: usize, values: usize) -> Vec<f32> {
    let one = |p: usize| (0..values).map(move |i| 2.0 * ((i * (7 * p + 3)) as f32 * 0.05).sin());
    (0..count).flat_map(one).collect()
}

/// Says that a proof has no logits, and why, where it says that itself. (That it cannot be read is told with the tensors.)
pub fn unmeasured(model: &Checkpoint) -> Option<Fault> {
    let proof = model.proof().ok().flatten()?;
    let why = proof["logits"]["not_measured"].as_str()?;
    let problem = format!("not measured when the proof was written: {}", printable(why));
    Some(Fault::new(Severity::Note, &model.proof_file(), "logits", problem))
}

/// Checks a model against the logits in its proof, and the proof against `source`: `dsq inspect --verify`. What plain `dsq inspect`
/// compares with the proof (every tensor and file by its hash) is not done again.
///
/// # Errors
/// What reading the models gives.
pub fn verify(model: &Checkpoint, source: Option<&Checkpoint>, threads: usize) -> Result<Vec<Fault>, CliError> {
    let file = model.proof_file();
    let fault = |severity, field: &str, problem: String| Fault::new(severity, &file, field, problem);
    let Some(proof) = model.proof()? else {
        let problem = format!("--verify: expected the proof of an export ({PROOF_FILE}), got no such file");
        return Ok(vec![fault(Severity::Error, "", problem)]);
    };
    let mut faults = Vec::new();
    let recorded = match Recorded::read(&proof) {
        Ok(recorded) => recorded,
        Err(problem) => {
            faults.push(fault(Severity::Error, "logits", problem));
            None
        }
    };
    faults.extend(unmeasured(model));
    if let Some(recorded) = &recorded
        && let Err(problem) = recorded.same_logits(model, threads)
    {
        faults.push(fault(Severity::Error, "logits", problem));
    }
    let Some(source) = source else { return Ok(faults) };
    faults.extend(same_source(&file, &proof, model, source)?);
    let Some(recorded) = recorded else { return Ok(faults) };
    match measure(&recorded.questions, source, model, threads) {
        Err(Why::Unread(e)) => return Err(e.into()),
        Err(Why::Other(why)) => faults.push(fault(Severity::Error, "logits", format!("against the source: {why}"))),
        Ok(now) => {
            for key in ["kl", "top1_agreement", "max_abs_difference"] {
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

/// What a proof says of logits. A proof is a file like any other: what it asks for has bounds.
struct Recorded {
    questions: Questions,
    /// Of each question the first choices, `[[id, logit], ...]`.
    last: Vec<Vec<(usize, f64)>>,
}

impl Recorded {
    /// `None`: they were not measured, or the proof is older than they are.
    fn read(proof: &Value) -> Result<Option<Self>, String> {
        let logits = match proof.get("logits") {
            None => return Ok(None),
            Some(logits) if logits.get("not_measured").is_some_and(Value::is_string) => return Ok(None),
            Some(logits) => logits,
        };
        let part = |key: &str| logits.get(key).cloned().unwrap_or_default();
        let wrong = |e: serde_json::Error| format!("expected questions and the first logits of each, got others: {e}");
        let questions: Questions = serde_json::from_value(part("questions")).map_err(wrong)?;
        let last: Vec<Vec<(usize, f64)>> = serde_json::from_value(part("last")).map_err(wrong)?;
        let sizes = match &questions {
            Questions::Prompts(prompts) => prompts.iter().map(Vec::len).collect(),
            Questions::Pictures(count) => vec![2; (*count).min(1000)],
        };
        if sizes.len() != TEXTS.len() || sizes.iter().any(|n| !(2..=MOST).contains(n)) {
            let expected = format!("expected {} questions of 2 to {MOST} tokens", TEXTS.len());
            return Err(format!("{expected}, got {} of {:?}", sizes.len(), &sizes[..sizes.len().min(8)]));
        }
        if last.len() != sizes.len() || last.iter().any(|l| l.is_empty() || l.len() > TOP) {
            let got: Vec<usize> = last.iter().map(Vec::len).take(8).collect();
            return Err(format!("last: expected 1 to {TOP} logits of each of {} questions, got {got:?}", sizes.len()));
        }
        Ok(Some(Self { questions, last }))
    }

    fn same_logits(&self, model: &Checkpoint, threads: usize) -> Result<(), String> {
        let logits = self.questions.ask(model, threads).map_err(|e| e.to_string())?;
        for (i, (logits, last)) in logits.iter().zip(&self.last).enumerate() {
            let row = self.questions.last(i, logits);
            let largest = row.iter().fold(0.0f64, |m, &x| m.max(f64::from(x).abs()));
            for &(id, then) in last {
                let now = row.get(id).map_or(f64::NAN, |&x| f64::from(x));
                let near = (now - then).abs() <= SAME * largest;
                if !near {
                    return Err(format!("question {i}: logit {id}: expected {then}, got {now}"));
                }
            }
        }
        Ok(())
    }
}

/// Whether every tensor that the proof hashed is in the source as it was, and as far from the model's as the proof says.
fn same_source(file: &Path, proof: &Value, model: &Checkpoint, source: &Checkpoint) -> Result<Vec<Fault>, CliError> {
    let mut faults = Vec::new();
    let mut tell = |name: &str, problem: String| faults.push(Fault::new(Severity::Error, file, name, problem));
    for tensor in proof["tensors"].as_array().into_iter().flatten() {
        let Some(name) = tensor["name"].as_str() else { continue };
        let record = &tensor["source"];
        // What was copied has the hash of what is stored.
        let copied = tensor["stored"][name].as_str().filter(|_| tensor["became"] == "copied");
        let Some(hash) = record["sha256"].as_str().or(copied) else { continue };
        // The head of a tied model that got codes of its own.
        let tied = name == "lm_head.weight" && source.info(name).is_none() && !source.is_quantized("lm_head");
        let from = if tied { "model.embed_tokens.weight" } else { name };
        let as_stored = match source.sha256(from) {
            Ok(got) => got,
            // A matrix in codes has no one tensor.
            Err(CheckpointError::Invalid(_)) => String::new(),
            Err(e) => return Err(e.into()),
        };
        if hash == as_stored && record.is_null() {
            continue;
        }
        let Some(values) = values_of(source, from)? else {
            tell(name, "expected this tensor in the source, got none".into());
            continue;
        };
        let (as_values, _) = SourceRecord::stored_codes(&values);
        if hash != as_stored && hash != as_values {
            tell(
                name,
                format!("the source has other values: expected SHA-256 {hash}, got {as_values} (of f32 values)"),
            );
            continue;
        }
        // Of what was rescaled or folded the values are not those of the source.
        let comparable = record["rescaled"].is_null() && matches!(model.config(), ModelConfig::Llama(_));
        let (Some(then), true) = (record["max_abs_error"].as_f64(), comparable) else { continue };
        let Some(ours) = values_of(model, name)?.filter(|v| v.len() == values.len()) else { continue };
        let now = SourceRecord::with_values(String::new(), String::new(), &values, &ours);
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * a.abs().max(b.abs());
        if !near(then, now.max_abs_error)
            || !near(record["relative_error"].as_f64().unwrap_or(f64::NAN), now.relative_error)
        {
            let then = format!("{then:e} and {}", record["relative_error"]);
            let now = format!("{:e} and {:e}", now.max_abs_error, now.relative_error);
            tell(name, format!("max_abs_error, relative_error: expected {then}, got {now}"));
        }
    }
    Ok(faults)
}

/// The values of a tensor, of codes those that they stand for; `None` where there is none.
fn values_of(model: &Checkpoint, name: &str) -> Result<Option<Vec<f32>>, CliError> {
    if let Some(module) = name.strip_suffix(".weight").filter(|m| model.is_quantized(m)) {
        return Ok(Some(model.linear(module)?.into_f32()));
    }
    if model.info(name).is_none() {
        return Ok(None);
    }
    Ok(Some(model.read_f32(name)?))
}
