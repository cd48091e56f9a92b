//! `dsq regress --bisect`: names what differs between two models, two binaries, or a model and its float original. The questions are asked
//! in `regress/bisect`; here are the options and the answer in print.

use crate::documents::Documents;
use crate::regress::bisect::walk::{self, Effect, Unit, Walk};
use crate::regress::bisect::{Cause, Finding, binaries, compare, config, language, percent, tokens};
use crate::{Global, error::CliError, input, output};
use binaries::Binary;
use compare::{Compared, Difference};
use dsq_checkpoint::{Checkpoint, write_atomic};
use dsq_eval::{Report, Row, Window};
use dsq_kernels::MAX_ISA_NAMES;
use dsq_runtime::{KernelCheck, LlamaRuntime, ModelPart, check_kernel};
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Characters of each text that tokenizers are compared on.
const PROMPT: usize = 20_000;

/// Differences that are told in words; the report has all.
const TOLD: usize = 5;

/// Layers that are looked into module by module.
const LOOKED_INTO: usize = 3;

/// Layers below this share are not told.
const TOLD_SHARE: f64 = 0.02;

/// Options of `dsq regress --bisect`.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Bisecting")]
pub struct Args {
    /// Name what differs between two models (any formats): tokenizer, config or weights, which layer, how, and its share of the change of
    /// the logits on --text. With one model and --reference: which layers cost the most, float layers swapped in and out. With one model
    /// and --binary-bad (or --binary-good): what two binaries make of it. With one model alone: whether its kernels compute here
    /// what the scalar reference does.
    #[arg(long, num_args = 1..=2, value_names = ["GOOD", "BAD"], conflicts_with_all = ["suite", "only", "bless", "reason", "seeds", "seed", "history", "report", "html", "junit", "keep"])]
    bisect: Vec<PathBuf>,
    /// Text that the models run on, as for `dsq eval`. May be given again.
    #[arg(long, value_name = "FILE", requires = "bisect")]
    text: Vec<PathBuf>,
    /// Token ids instead of text: a JSON list of lists.
    #[arg(long, value_name = "FILE", requires = "bisect", conflicts_with = "text")]
    tokens_file: Option<PathBuf>,
    /// The float model that GOOD and BAD were made from: tells ties that were rounded another way, and another base model.
    #[arg(long, value_name = "MODEL", requires = "bisect")]
    reference: Option<PathBuf>,
    /// Tokens of the text that run; GOOD's logits of all of them are kept in memory.
    #[arg(long, value_name = "N", requires = "bisect", default_value_t = 512, value_parser = clap::value_parser!(u64).range(2..=1 << 20))]
    max_tokens: u64,
    /// Tokens in a window [default: 256 or the models' limit, whichever is less].
    #[arg(long, value_name = "N", requires = "bisect", value_parser = clap::value_parser!(u64).range(2..))]
    context: Option<u64>,
    /// Times that the text runs through a model at most [default: 64, or the layers and 40 with --reference alone].
    #[arg(long, value_name = "N", requires = "bisect", value_parser = clap::value_parser!(u64).range(2..))]
    max_runs: Option<u64>,
    /// The dsq that is right [default: this one].
    #[arg(long, value_name = "FILE", requires = "bisect")]
    binary_good: Option<PathBuf>,
    /// The dsq that is in question [default: this one].
    #[arg(long, value_name = "FILE", requires = "bisect")]
    binary_bad: Option<PathBuf>,
    /// Logits of two binaries that are at most this far apart, over the largest, differ by rounding.
    #[arg(long, value_name = "X", requires = "bisect", default_value_t = 1e-3)]
    bound: f64,
    /// Also write the answer to this file, as JSON.
    #[arg(long, value_name = "FILE", requires = "bisect")]
    out: Option<PathBuf>,
    /// With two binaries: quantize the model with both first, with these options of `dsq quantize`, and compare what they made.
    #[arg(last = true, value_name = "QUANTIZE_OPTIONS", requires = "bisect")]
    quantize: Vec<OsString>,
}

impl Args {
    /// Whether `--bisect` was given.
    pub fn given(&self) -> bool {
        !self.bisect.is_empty()
    }
}

/// What is said in the end.
#[derive(Default)]
struct Answer {
    findings: Vec<Finding>,
    notes: Vec<String>,
    rows: Vec<Row>,
    about: Vec<(&'static str, Value)>,
}

/// Runs the command. Exit code 0 where the question was answered, whatever the answer; 1 where a kernel of this machine is wrong.
pub fn run(args: &Args, global: &Global) -> Result<u8, CliError> {
    if !(args.bound.is_finite() && args.bound >= 0.0) {
        return Err(CliError::usage(format!("--bound: expected a number of at least 0, got {}", args.bound)));
    }
    let start = std::time::Instant::now();
    let two = args.binary_good.is_some() || args.binary_bad.is_some();
    let mut answer = Answer::default();
    let mode = match (&args.bisect[..], two, &args.reference) {
        ([model], true, _) => {
            two_binaries(args, global, model, &mut answer)?;
            "binaries"
        }
        ([good, bad], false, _) => {
            two_models(args, global, (good, bad), args.reference.as_deref(), &mut answer)?;
            "models"
        }
        ([model], false, Some(float)) => {
            costs(args, global, (float, model), &mut answer)?;
            "reference"
        }
        ([model], false, None) => {
            own_kernels(args, model, global, &mut answer)?;
            "kernels"
        }
        _ => {
            let problem = "two binaries run the same model; expected one, got two";
            return Err(CliError::usage(format!("--bisect: {problem}")));
        }
    };
    if mode != "binaries" && !args.quantize.is_empty() {
        return Err(CliError::usage(
            "--: options of dsq quantize are for two binaries; expected --binary-bad, got none",
        ));
    }
    let json = report(mode, &answer, start.elapsed().as_secs_f64());
    if let Some(file) = &args.out {
        write_atomic(file, format!("{}\n", json.to_json()).as_bytes())?;
    }
    if global.json {
        output::line(json.to_json());
    } else {
        print(&answer, &json);
    }
    Ok(u8::from(mode == "kernels" && !answer.findings.is_empty()))
}

fn report(mode: &str, answer: &Answer, seconds: f64) -> Report {
    let mut report = Report::new("regress")
        .about("bisect", mode)
        .about("findings", answer.findings.iter().map(Finding::json).collect::<Vec<Value>>())
        .about("answer", answer.findings.iter().map(|f| json!(f.line())).collect::<Vec<Value>>())
        .about("notes", answer.notes.clone())
        .about("seconds", seconds);
    for (key, value) in &answer.about {
        report = report.about(key, value.clone());
    }
    report.rows.clone_from(&answer.rows);
    report
}

fn print(answer: &Answer, report: &Report) {
    match &answer.findings[..] {
        [] => output::line("nothing differs"),
        findings => findings.iter().for_each(|f| output::line(f.line())),
    }
    answer.notes.iter().for_each(output::line);
    // Long texts make no columns.
    let mut short = report.clone();
    short.rows.retain(|r| r.get("damage").is_some() || r.get("worst").is_some_and(|w| w > 1.0));
    for row in &mut short.rows {
        row.metrics.retain(|_, v| !v.is_string());
    }
    if !short.rows.is_empty() {
        output::line(short.table());
    }
}

/// The tokens that models run on.
fn documents(args: &Args, model: &Checkpoint) -> Result<Documents, CliError> {
    let vocab = language(model)?.vocab_size;
    let mut documents = match (&args.tokens_file, &args.text[..]) {
        (Some(file), _) => Documents::of_ids(file, vocab)?,
        (None, []) => {
            return Err(CliError::usage("--text: expected a text that the models run on, got none")
                .with_hint("give --text FILE or --tokens-file IDS.json"));
        }
        (None, files) => Documents::of_texts(files, model, vocab)?,
    };
    documents.truncate(usize::try_from(args.max_tokens).unwrap_or(usize::MAX));
    Ok(documents)
}

/// Windows of the tokens, no longer than the models allow.
fn windows<'d>(args: &Args, documents: &'d Documents, models: &[&Checkpoint]) -> Result<Vec<Window<'d>>, CliError> {
    let mut limit = usize::MAX;
    for model in models {
        limit = limit.min(language(model)?.max_position_embeddings);
    }
    let context = match args.context.map(|n| usize::try_from(n).unwrap_or(usize::MAX)) {
        None => 256.min(limit),
        Some(n) if n <= limit => n,
        Some(n) => {
            let problem = format!("expected at most {limit} (the models' positions), got {n}");
            return Err(CliError::usage(format!("--context: {problem}")));
        }
    };
    let windows = documents.windows(context, context)?;
    if windows.is_empty() {
        return Err(CliError::new(3, "text: expected at least 2 tokens, got fewer"));
    }
    Ok(windows)
}

/// The beginnings of the texts.
fn texts(args: &Args) -> Result<Vec<String>, CliError> {
    args.text.iter().map(|file| Ok(input::text(file)?.chars().take(PROMPT).collect())).collect()
}

/// Two models: tokenizer, config, weights, and what each does.
fn two_models(
    args: &Args,
    global: &Global,
    (good, bad): (&Path, &Path),
    float: Option<&Path>,
    answer: &mut Answer,
) -> Result<(), CliError> {
    let (good, bad) = (Checkpoint::open(good)?, Checkpoint::open(bad)?);
    let float = float.map(Checkpoint::open).transpose()?;
    let documents = documents(args, &good)?;
    let windows = windows(args, &documents, &[&good, &bad])?;
    answer.findings.extend(tokens::differing(&good, &bad, &texts(args)?)?);
    let (a, b) = (language(&good)?, language(&bad)?);
    let fields = config::differing(a, b);
    if !config::exchangeable(a, b) {
        answer.findings.extend(fields);
        answer.notes.push("the shapes differ: weights cannot be compared, nor layers exchanged".into());
        return Ok(());
    }
    if let Some(float) = &float
        && !config::exchangeable(a, language(float)?)
    {
        let name = float.path().display();
        return Err(CliError::new(3, format!("{name}: config.json: expected the shapes of GOOD and BAD, got others")));
    }
    let compared = compare::compare(&good, &bad, float.as_ref())?;
    answer.rows.extend(compared.differences.iter().map(row_of));
    if fields.is_empty() && compared.differences.is_empty() {
        let same = if answer.findings.is_empty() { "tokenizer, config and weights" } else { "config and weights" };
        answer.notes.push(format!("{same} are the same in both, {} modules compared", compared.modules));
        return Ok(());
    }
    let most = args.max_runs.map_or(64, |n| usize::try_from(n).unwrap_or(usize::MAX));
    let threads = global.threads();
    let mut walk = Walk::new(LlamaRuntime::load(&good, threads)?, LlamaRuntime::load(&bad, threads)?, &windows, most)?;
    answer.notes.push(change(&walk, windows.iter().map(|w| w.tokens.len() - w.from).sum()));
    if !walk.differs() {
        answer.findings.extend(fields);
        answer.findings.extend(told(&compared));
        answer.notes.push("no difference has an effect on the logits of this text".into());
        return Ok(());
    }
    let units = blocks(&compared);
    // What is left when BAD has GOOD's weights is the config's.
    let by_config = if fields.is_empty() { None } else { Some(walk.repaired(&units)?.kl / walk.after.kl) };
    let one = fields.len() == 1;
    for mut f in fields {
        f.share = by_config.filter(|_| one);
        answer.findings.push(f);
    }
    if let Some(share) = by_config.filter(|_| !one) {
        answer.notes.push(format!("config: {} of the change, all fields together", percent(share)));
    }
    let effects = walk_weights(&mut walk, &units, &compared, a.num_hidden_layers)?;
    if let Some(verdict) = &compared.verdict {
        answer.findings.push(Finding::new(Cause::Weights, "", verdict.clone()));
    }
    answer
        .findings
        .extend(effects.inside.iter().filter(|e| e.damage >= TOLD_SHARE).take(TOLD).map(|e| finding(e, &compared)));
    if effects.inside.is_empty() {
        answer.findings.extend(told(&compared));
    }
    if let Some(d) = compared.differences.first() {
        answer.notes.push(format!(
            "first in the model that differs: {} ({}), {} in all",
            d.name,
            d.kind(),
            compared.differences.len()
        ));
    }
    sum_up(answer, &effects, &walk);
    Ok(())
}

/// The change in words.
fn change(walk: &Walk<'_>, predictions: usize) -> String {
    format!(
        "change on the text: KL {:.4e} over {predictions} predictions, perplexity {:.4} to {:.4}",
        walk.after.kl, walk.before.perplexity, walk.after.perplexity
    )
}

/// Differences as findings without a share.
fn told(compared: &Compared) -> Vec<Finding> {
    let all = &compared.differences;
    let mut out: Vec<Finding> =
        all.iter().take(TOLD).map(|d| Finding::new(Cause::Weights, &d.name, d.kind())).collect();
    if all.len() > TOLD {
        out.push(Finding::new(Cause::Weights, "", format!("{} more modules and tensors differ", all.len() - TOLD)));
    }
    out
}

fn row_of(d: &Difference) -> Row {
    let mut row = Row::new(&d.name).text("differs", d.kinds.clone());
    if let Some(pattern) = &d.pattern {
        row = row.text("pattern", pattern.clone());
    }
    row = row.number("differ", d.differ as f64).number("of", d.of as f64).number("largest", d.largest);
    match d.errors {
        Some([good, bad]) => row.number("relative_error_good", good).number("relative_error_bad", bad),
        None => row,
    }
}

/// The layers (and embedding and output) that hold differences.
fn blocks(compared: &Compared) -> Vec<Unit> {
    let mut out: Vec<Unit> = Vec::new();
    for d in &compared.differences {
        let unit = match d.part {
            ModelPart::Linear(i, _) | ModelPart::Rest(i) | ModelPart::Layer(i) => {
                Unit { name: format!("model.layers.{i}"), part: ModelPart::Layer(i) }
            }
            part => Unit { name: d.name.clone(), part },
        };
        if !out.iter().any(|u| u.part == unit.part) {
            out.push(unit);
        }
    }
    out
}

/// Effects of layers, and of what is in those that do most.
struct Effects {
    layers: Vec<Effect>,
    inside: Vec<Effect>,
}

fn walk_weights(walk: &mut Walk<'_>, units: &[Unit], compared: &Compared, layers: usize) -> Result<Effects, CliError> {
    // With few layers a group is no shorter than its members.
    let by_layer = walk.effects(units, units.len() <= 4 && layers <= 4)?;
    let mut inside = Vec::new();
    for (rank, effect) in by_layer.iter().enumerate() {
        let parts = parts(effect, compared);
        match &parts[..] {
            [] => inside.push(effect.clone()),
            [one] => inside.push(Effect { unit: one.clone(), ..effect.clone() }),
            _ if rank < LOOKED_INTO && walk.may_run() => inside.extend(walk.effects(&parts, false)?),
            _ => inside.push(effect.clone()),
        }
    }
    inside.sort_by(|a, b| b.damage.total_cmp(&a.damage));
    for effect in inside.iter_mut().take(TOLD) {
        walk.add_repair(effect)?;
    }
    Ok(Effects { layers: by_layer, inside })
}

/// What differs in a layer.
fn parts(effect: &Effect, compared: &Compared) -> Vec<Unit> {
    let ModelPart::Layer(layer) = effect.unit.part else { return Vec::new() };
    let mut out: Vec<Unit> = Vec::new();
    for d in &compared.differences {
        let here = match d.part {
            ModelPart::Linear(i, _) | ModelPart::Rest(i) => i == layer,
            _ => false,
        };
        match out.iter_mut().find(|u| u.part == d.part) {
            _ if !here => {}
            Some(u) if !u.name.contains(&d.name) => u.name = format!("{}, {}", u.name, d.name),
            Some(_) => {}
            None => out.push(Unit { name: d.name.clone(), part: d.part }),
        }
    }
    out
}

fn finding(effect: &Effect, compared: &Compared) -> Finding {
    let of = compared.differences.iter().filter(|d| d.part == effect.unit.part);
    let mut kinds: Vec<String> = of.map(Difference::kind).collect();
    kinds.truncate(2);
    let mut found = Finding::new(Cause::Weights, &effect.unit.name, kinds.join("; "));
    found.share = Some(effect.damage);
    found
}

/// Adds what the walk found to the answer's notes and rows.
fn sum_up(answer: &mut Answer, effects: &Effects, walk: &Walk<'_>) {
    let place = |e: &&Effect| compare::place(e.unit.part);
    if let Some(first) = effects.layers.iter().min_by_key(place) {
        let share = percent(first.damage);
        answer.notes.push(format!("first with at least 1% of the change: {}, {share}", first.unit.name));
    }
    let mut told: Vec<&Effect> = effects.layers.iter().collect();
    let known: Vec<&str> = effects.layers.iter().map(|e| e.unit.name.as_str()).collect();
    told.extend(effects.inside.iter().filter(|e| !known.contains(&e.unit.name.as_str())));
    for e in told {
        let repair = effects.inside.iter().find(|i| i.unit == e.unit).and_then(|i| i.repair).or(e.repair);
        let at = answer.rows.iter().position(|r| r.name == e.unit.name);
        let mut row = at.map_or_else(|| Row::new(&e.unit.name), |at| answer.rows.remove(at));
        row = row.number("damage", e.damage).number("perplexity", e.perplexity);
        if let Some(repair) = repair {
            row = row.number("repair", repair);
        }
        answer.rows.push(row);
    }
    if !walk.may_run() {
        answer.notes.push(format!("the walk ended after {} runs; --max-runs allows more", walk.runs));
    }
    answer.about.push(("kl", json!(walk.after.kl)));
    answer.about.push(("perplexity_good", json!(walk.before.perplexity)));
    answer.about.push(("perplexity_bad", json!(walk.after.perplexity)));
    answer.about.push(("runs", json!(walk.runs)));
}

/// One model and its float original: which layers cost most.
fn costs(args: &Args, global: &Global, (float, model): (&Path, &Path), answer: &mut Answer) -> Result<(), CliError> {
    let (float, model) = (Checkpoint::open(float)?, Checkpoint::open(model)?);
    let (a, b) = (language(&float)?, language(&model)?);
    if !config::exchangeable(a, b) {
        let name = float.path().display();
        return Err(CliError::new(
            3,
            format!("{name}: config.json: expected the shapes of {}, got others", model.path().display()),
        ));
    }
    let documents = documents(args, &float)?;
    let windows = windows(args, &documents, &[&float, &model])?;
    let layers = a.num_hidden_layers;
    let most = args.max_runs.map_or(layers + 40, |n| usize::try_from(n).unwrap_or(usize::MAX));
    let threads = global.threads();
    let mut walk =
        Walk::new(LlamaRuntime::load(&float, threads)?, LlamaRuntime::load(&model, threads)?, &windows, most)?;
    answer.notes.push(change(&walk, windows.iter().map(|w| w.tokens.len() - w.from).sum()));
    if !walk.differs() {
        answer.notes.push("the model gives the logits of its float original on this text".into());
        return Ok(());
    }
    let mut by_layer = walk.effects(&walk::layers(layers), true)?;
    let mut inside = Vec::new();
    for effect in by_layer.iter().filter(|e| matches!(e.unit.part, ModelPart::Layer(_))).take(LOOKED_INTO) {
        let ModelPart::Layer(i) = effect.unit.part else { continue };
        let linears = a.layer_linears(i).into_iter().enumerate();
        let mut units: Vec<Unit> = linears
            .map(|(at, (name, ..))| Unit { name: format!("model.layers.{i}.{name}"), part: ModelPart::Linear(i, at) })
            .collect();
        units.push(Unit { name: format!("model.layers.{i} norms and grids"), part: ModelPart::Rest(i) });
        // Many experts are halved, a few modules are not worth it.
        inside.extend(walk.effects(&units, units.len() <= 8)?);
    }
    for effect in by_layer.iter_mut().take(TOLD) {
        walk.add_repair(effect)?;
    }
    for effect in by_layer.iter().filter(|e| e.damage >= TOLD_SHARE).take(TOLD) {
        let inner = inside.iter().filter(|e: &&Effect| e.unit.name.starts_with(&format!("{}.", effect.unit.name)));
        let most = inner.max_by(|a, b| a.damage.total_cmp(&b.damage));
        let kind = most.map(|m| format!("most of it {}, {}", m.unit.name, percent(m.damage))).unwrap_or_default();
        let mut found = Finding::new(Cause::Weights, &effect.unit.name, kind);
        found.share = Some(effect.damage);
        answer.findings.push(found);
    }
    let sum: f64 = by_layer.iter().map(|e| e.damage).sum();
    answer.notes.push(format!(
        "each layer alone, quantized in the float model; together they are {} of the change",
        percent(sum)
    ));
    sum_up(answer, &Effects { layers: by_layer, inside }, &walk);
    Ok(())
}

/// This program.
fn own() -> Result<PathBuf, CliError> {
    std::env::current_exe().map_err(|e| CliError::new(4, format!("dsq: cannot find its own program: {e}")))
}

fn scratch() -> Result<tempfile::TempDir, CliError> {
    tempfile::tempdir().map_err(|e| CliError::new(4, format!("temporary folder: cannot create: {e}")))
}

/// Two binaries: tokenizer, what they quantize, and what they compute.
fn two_binaries(args: &Args, global: &Global, model: &Path, answer: &mut Answer) -> Result<(), CliError> {
    let own = own()?;
    let binary = |side, path: &Option<PathBuf>| Binary {
        side,
        path: path.clone().unwrap_or_else(|| own.clone()),
        threads: global.threads(),
        max_isa: None,
    };
    let (good, bad) = (binary("GOOD", &args.binary_good), binary("BAD", &args.binary_bad));
    let scratch = scratch()?;
    let at = |name: &str| scratch.path().join(name);
    let source = Checkpoint::open(model)?;
    let documents = documents(args, &source)?;
    answer.findings.extend(binaries::tokenizer(&good, &bad, &source, &texts(args)?, scratch.path())?);
    let mut run = source;
    if !args.quantize.is_empty() {
        let (a, b) = (at("good"), at("bad"));
        good.quantize(model, &a, &args.quantize)?;
        bad.quantize(model, &b, &args.quantize)?;
        // The tokenizers of both are that of the source.
        two_models(args, global, (&a, &b), Some(model), answer)?;
        run = Checkpoint::open(&a)?;
    }
    // Lists of at most a window: a binary takes each as one sequence.
    let windows = windows(args, &documents, &[&run])?;
    let lists: Vec<&[u32]> = windows.iter().map(|w| w.tokens).collect();
    let ids = at("ids.json");
    write_atomic(&ids, json!(lists).to_string().as_bytes())?;
    let seen = binaries::kernels((&good, &bad), &run, &ids, scratch.path(), args.bound)?;
    let told = answer.findings.iter().any(|f| f.cause == Cause::Tokenizer) || !seen.findings.is_empty();
    if let Some(text) = args.text.first().filter(|_| !told) {
        answer.findings.extend(binaries::reading((&good, &bad), &run, text, scratch.path(), args.bound)?);
    }
    answer.findings.extend(seen.findings);
    answer.notes.extend(seen.notes);
    answer.about.push(("binary_runs", json!(seen.runs)));
    Ok(())
}

/// Ids that run through a model whose kernels are in question, where no text is given: more than a block of the KV cache, few enough for
/// plain code.
const STREAM: u32 = 24;

/// One model: its kernels against the scalar reference, module by module; then all of it, attention and norms too, against this program
/// kept to plain Rust.
fn own_kernels(args: &Args, model: &Path, global: &Global, answer: &mut Answer) -> Result<(), CliError> {
    let model = Checkpoint::open(model)?;
    language(&model)?;
    global.use_threads();
    let modules: Vec<String> = model.config().linears().into_iter().map(|l| l.module).collect();
    let bar = match global.json {
        true => indicatif::ProgressBar::hidden(),
        false => output::progress(modules.len() as u64, "kernels {bar:30} {pos}/{len} modules {eta}"),
    };
    let mut seen: Vec<(String, usize, f64)> = Vec::new();
    for module in &modules {
        let check = check_kernel(&model, module)?;
        let KernelCheck { kernel, outputs, other_bits, worst } = &check;
        let mut row = Row::new(module).text("kernel", kernel.clone());
        row = row.number("outputs", *outputs as f64).number("other_bits", *other_bits as f64);
        answer.rows.push(worst.map_or(row.clone(), |w| row.number("worst", w)));
        let worst = worst.unwrap_or(0.0);
        match seen.iter_mut().find(|s| s.0 == *kernel) {
            Some(s) => (s.1, s.2) = (s.1 + 1, s.2.max(worst)),
            None => seen.push((kernel.clone(), 1, worst)),
        }
        if !check.passes() {
            let kind = match check.worst {
                Some(w) => format!(
                    "{kernel}: {w:.2} times the bound of f32, {other_bits} of {outputs} outputs have other bits than the scalar reference"
                ),
                None => {
                    format!("{kernel}: {other_bits} of {outputs} outputs have other bits than the scalar reference")
                }
            };
            answer.findings.push(Finding::new(Cause::Kernel, module.clone(), kind));
        }
        bar.inc(1);
    }
    bar.finish_and_clear();
    for (kernel, modules, worst) in seen {
        answer.notes.push(format!("{modules} modules on {kernel}: at most {worst:.3} of the bound of f32"));
    }
    let scratch = scratch()?;
    let lists: Vec<Vec<u32>> = if args.text.is_empty() && args.tokens_file.is_none() {
        let vocab = u32::try_from(language(&model)?.vocab_size).unwrap_or(u32::MAX);
        vec![(0..STREAM).map(|i| (i + 1).wrapping_mul(2_654_435_769) % vocab).collect()]
    } else {
        let documents = documents(args, &model)?;
        windows(args, &documents, &[&model])?.iter().map(|w| w.tokens.to_vec()).collect()
    };
    let ids = scratch.path().join("ids.json");
    write_atomic(&ids, json!(lists).to_string().as_bytes())?;
    let binary = |side, max_isa| Ok::<_, CliError>(Binary { side, path: own()?, threads: global.threads(), max_isa });
    let (plain, fast) = (binary("GOOD", Some(MAX_ISA_NAMES[0]))?, binary("BAD", None)?);
    // Every path gives the same bits.
    let seen = binaries::kernels((&plain, &fast), &model, &ids, scratch.path(), 0.0)?;
    answer.findings.extend(seen.findings);
    answer.notes.extend(
        seen.notes.iter().map(|n| n.replace("both binaries give", "plain Rust and this machine's kernels give")),
    );
    Ok(())
}
