//! `dsq eval --tasks`: accuracy of a language model on files of log-likelihood requests, and its agreement with a reference. Both run
//! in the runtime, packed; the definitions are in `dsq_eval`'s `task_metrics.rs` and in docs/evaluation.md. Not perplexity (see
//! `eval.rs`).

use super::eval::Args;
use crate::{Global, error::CliError, output};
use dsq_checkpoint::{Checkpoint, ModelConfig, write_atomic};
use dsq_eval::{Answer, EvalError, Item, Report, Row, TaskFile, padding, task_metrics, token_scores};
use dsq_runtime::{
    Activations, Continuation, Continuations, KvType, LlamaRuntime, Packing, PredictionsFn, Ran, TextTokenizer, packed,
    padded,
};
use indicatif::ProgressBar;
use rayon::prelude::*;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Items that run one way and then the others before the next ones do, so that a change of the machine's speed meets all ways.
const TURN: usize = 64;

/// Options of `dsq eval --tasks`.
#[derive(clap::Args, Debug)]
pub struct TaskArgs {
    /// With --tasks: the first N items of each file only.
    #[arg(long, value_name = "N", requires = "tasks", value_parser = clap::value_parser!(u32).range(1..))]
    max_items: Option<u32>,
    /// With --tasks: sequences of the padded batch that `padding_share` and --compare-padded speak of. dsq itself pads nothing.
    #[arg(long, value_name = "N", requires = "tasks", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    batch: u32,
    /// With --tasks: also run the requests in padded batches, and packed without sharing what they have in common; the answers must be
    /// the same bits, and the report has how many times as long these took.
    #[arg(long, requires = "tasks")]
    compare_padded: bool,
    /// With --tasks: also write each item's answers to this file, a JSON object a line: `task`, `doc_id`, `gold`, and of `answers`, and
    /// `reference` where there is one, `log_likelihood` (nats), `tokens` and `greedy`.
    #[arg(long, value_name = "FILE", requires = "tasks")]
    answers_out: Option<PathBuf>,
}

/// Runs the command.
pub fn run(args: &Args, global: &Global) -> Result<u8, CliError> {
    let (report, items) = measure(args, global)?;
    let about = format!(
        "{items} items; brackets: 95% Wilson interval of shares, bootstrap over items of means and differences; positions a second \
         are those given"
    );
    output::report(&report, args.out.as_deref(), global.json, &about)?;
    Ok(0)
}

/// What the command reports, and of how many items.
pub fn measure(args: &Args, global: &Global) -> Result<(Report, usize), CliError> {
    global.use_threads();
    let (options, max) = (&args.task, args.task.max_items.map(|n| n as usize));
    let files = args.tasks.iter().map(|f| TaskFile::read(f, max)).collect::<Result<Vec<_>, _>>()?;
    let model = Side::open(&args.model, "model", &files)?;
    let reference = args.reference.as_deref().map(|r| Side::open(r, "reference", &files)).transpose()?;
    let batch = options.batch as usize;
    let compare = options.compare_padded.then_some(batch);
    let start = Instant::now();
    let (runs, bytes) = model.run(&files, (args.activations.into(), args.kv_type.into()), compare, global)?;
    let other = reference.as_ref().map(|r| r.run(&files, (Activations::Float, KvType::F32), None, global));
    let other = other.transpose()?;
    let mut report = Report::new("eval")
        .about("model", args.model.display().to_string())
        .about("padded_batch", batch)
        .about("resident_bytes", bytes)
        .about("seconds", start.elapsed().as_secs_f64());
    let (mut lines, mut items) = (String::new(), 0);
    for (i, (file, run)) in files.iter().zip(&runs).enumerate() {
        let theirs = other.as_ref().map(|(runs, _)| &runs[i].answers[..]);
        let measured = task_metrics(&file.items, &run.answers, theirs)?;
        report.rows.push(run.add_to(measured.row(&file.name), file, &model.asked[i], batch));
        if let Some(theirs) = theirs {
            report.rows.push(task_metrics(&file.items, theirs, None)?.row(format!("{} reference", file.name)));
        }
        items += measured.items;
        for (j, item) in file.items.iter().enumerate() {
            lines += &format!("{}\n", answer_line(file, item, &run.answers[j], theirs.map(|t| &t[j][..])));
        }
    }
    if let (Some(path), Some((_, bytes))) = (&args.reference, &other) {
        report = report.about("reference", path.display().to_string()).about("reference_resident_bytes", *bytes);
    }
    if let Some(file) = &options.answers_out {
        write_atomic(file, lines.as_bytes())?;
    }
    Ok((report, items))
}

fn answer_line(file: &TaskFile, item: &Item, answers: &[Answer], reference: Option<&[Answer]>) -> Value {
    let list = |answers: &[Answer]| -> Value {
        let one = |a: &Answer| json!({"log_likelihood": a.log_likelihood, "tokens": a.tokens, "greedy": a.greedy});
        answers.iter().map(one).collect()
    };
    let mut line = json!({"task": file.name, "doc_id": item.id, "gold": item.gold, "answers": list(answers)});
    if let Some(reference) = reference {
        line["reference"] = list(reference);
    }
    line
}

/// A model that was opened and not yet loaded, and what it is asked: of each file, of each item, its answers as tokens.
struct Side {
    checkpoint: Checkpoint,
    name: &'static str,
    asked: Vec<Vec<Vec<Continuation>>>,
}

impl Side {
    fn open(path: &Path, name: &'static str, files: &[TaskFile]) -> Result<Self, CliError> {
        let checkpoint = Checkpoint::open(path)?;
        let ModelConfig::Llama(config) = checkpoint.config() else {
            let problem = "model_type: tasks ask language models; expected one, got an image model";
            return Err(CliError::usage(format!("{}: {problem}", path.display())));
        };
        let (limit, bos) = (config.max_position_embeddings, config.bos_token_id);
        let tokenizer = TextTokenizer::new(&checkpoint)?;
        let encoder = Continuations::new(&tokenizer, bos, limit)?;
        let mut asked = Vec::new();
        for file in files {
            let item = |item: &Item| -> Result<Vec<Continuation>, CliError> {
                let choices = item.choices.iter().enumerate();
                let one = |(idx, c): (usize, &dsq_eval::Request)| {
                    encoder.encode(&c.context, &c.continuation).map_err(|e| {
                        let (file, line, id) = (file.path.display(), item.line, item.id);
                        CliError::new(e.exit_code(), format!("{file}: line {line}: doc_id {id}, idx {idx}: {e}"))
                    })
                };
                choices.map(one).collect()
            };
            let groups = file.items.par_iter().map(item).collect::<Result<Vec<_>, _>>()?;
            let cut = groups.iter().flatten().filter(|c| c.cut > 0).count();
            if cut > 0 {
                let (file, path) = (file.path.display(), path.display());
                output::note(format!("{file}: {cut} contexts lost their first tokens: {path} has {limit} positions"));
            }
            asked.push(groups);
        }
        Ok(Self { checkpoint, name, asked })
    }

    /// Loads the model and runs all files; also says how many bytes it has in memory. `compare`: sequences of a padded batch.
    fn run(
        &self,
        files: &[TaskFile],
        (activations, kv): (Activations, KvType),
        compare: Option<usize>,
        global: &Global,
    ) -> Result<(Vec<Run>, usize), CliError> {
        let runtime = LlamaRuntime::load(&self.checkpoint, global.threads())?.with_activations(activations);
        let total: usize = self.asked.iter().flatten().flatten().map(|c| c.targets().len()).sum();
        let bar = match global.json {
            true => ProgressBar::hidden(),
            false => {
                let ways = if compare.is_some() { 3 } else { 1 };
                output::progress(
                    ways * total as u64,
                    &format!("{} {{bar:30}} {{pos}}/{{len}} tokens {{eta}}", self.name),
                )
            }
        };
        let mut runs = Vec::new();
        for (file, groups) in files.iter().zip(&self.asked) {
            let mut run = Run::default();
            let turn = if compare.is_some() { TURN } else { groups.len().max(1) };
            for (groups, items) in groups.chunks(turn).zip(file.items.chunks(turn)) {
                let side = Turn { file, items, groups, side: self.name, bar: &bar };
                let packing = Packing { kv, ..Packing::default() };
                let answers = side.time(&mut run.shared, &mut |each| packed(&runtime, groups, packing, each))?;
                if let Some(batch) = compare {
                    let alone = Packing { share: false, ..packing };
                    let packed = side.time(&mut run.packed, &mut |each| packed(&runtime, groups, alone, each))?;
                    let batch = (batch, 0, kv);
                    let padded = side.time(&mut run.padded, &mut |each| padded(&runtime, groups, batch, each))?;
                    side.check("packed without sharing", &packed, &answers)?;
                    side.check("padded", &padded, &answers)?;
                }
                run.answers.extend(answers);
            }
            runs.push(run);
        }
        bar.finish_and_clear();
        Ok((runs, runtime.resident_bytes()))
    }
}

/// What one way of running took.
#[derive(Default)]
struct Way {
    ran: Ran,
    seconds: f64,
}

/// What came of a file.
#[derive(Default)]
struct Run {
    answers: Vec<Vec<Answer>>,
    shared: Way,
    /// Without sharing; nothing unless compared, as `padded`.
    packed: Way,
    padded: Way,
}

impl Run {
    /// Adds to a task's row how it ran.
    fn add_to(&self, mut row: Row, file: &TaskFile, groups: &[Vec<Continuation>], batch: usize) -> Row {
        let mut lengths: Vec<usize> = groups.iter().flatten().map(|c| c.fed().len()).collect();
        let in_order = padding(&lengths, batch).share();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        let Way { ran, seconds } = self.shared;
        row = row
            .number("positions", ran.given as f64)
            .number("computed_positions", ran.computed as f64)
            .number("positions_per_second", ran.given as f64 / seconds)
            .number("padding_share", in_order)
            .number("sorted_padding_share", padding(&lengths, batch).share())
            .number("cut_contexts", groups.iter().flatten().filter(|c| c.cut > 0).count() as f64)
            .number("unconditional_requests", file.unconditional as f64);
        if self.padded.seconds > 0.0 {
            row = row
                .number("packed_speedup", self.padded.seconds / self.packed.seconds)
                .number("shared_speedup", self.padded.seconds / seconds);
        }
        row
    }
}

/// Some items of a file that run together.
struct Turn<'a> {
    file: &'a TaskFile,
    items: &'a [Item],
    groups: &'a [Vec<Continuation>],
    side: &'static str,
    bar: &'a ProgressBar,
}

impl Turn<'_> {
    /// The answers that `run` gives, whose time and work are added to `way`.
    fn time(
        &self,
        way: &mut Way,
        run: &mut dyn FnMut(PredictionsFn<'_, CliError>) -> Result<Ran, CliError>,
    ) -> Result<Vec<Vec<Answer>>, CliError> {
        let mut answers: Vec<Vec<Answer>> = self.groups.iter().map(|g| vec![Answer::default(); g.len()]).collect();
        let start = Instant::now();
        let ran = run(&mut |rows, logits| {
            let targets: Vec<u32> = rows.iter().map(|r| self.groups[r.group][r.member].tokens[r.position]).collect();
            let scores = token_scores(logits, &targets, self.side).map_err(|e| match e {
                EvalError::NonFinite { position, .. } => {
                    let (row, file) = (rows[position], self.file.path.display());
                    let id = self.items[row.group].id;
                    CliError::new(6, format!("{file}: doc_id {id}, idx {}: {e}", row.member))
                }
                e => e.into(),
            })?;
            for (row, score) in rows.iter().zip(scores) {
                answers[row.group][row.member].push(score);
            }
            self.bar.inc(rows.len() as u64);
            Ok(())
        })?;
        way.seconds += start.elapsed().as_secs_f64();
        way.ran.given += ran.given;
        way.ran.computed += ran.computed;
        way.ran.steps += ran.steps;
        Ok(answers)
    }

    /// Whether another way gave the same bits.
    fn check(&self, way: &str, got: &[Vec<Answer>], want: &[Vec<Answer>]) -> Result<(), CliError> {
        for ((item, got), want) in self.items.iter().zip(got).zip(want) {
            if got != want {
                let (file, id) = (self.file.path.display(), item.id);
                let problem = format!("expected the same answers {way} as packed, {want:?}, got {got:?}");
                return Err(CliError::new(6, format!("{file}: doc_id {id}: {problem}")));
            }
        }
        Ok(())
    }
}
