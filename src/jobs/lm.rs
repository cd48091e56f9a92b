//! The language-model job: float training, QAT, export, and one table that holds them against each other on the same
//! held-out tokens. The table's order of proof: the training graph makes the codes, the export stores them, the runtime
//! runs the export.

use super::{Start, Tick, check_space, place};
use crate::error::CliError;
use crate::overlap::{self, Sketch};
use crate::plot::{Series, loss_curve};
use crate::recipe::LmJob;
use crate::{input, output, proof_logits};
use dsq_checkpoint::{
    Checkpoint, ExportTensor, FolderFormat, FolderTarget, GgufExport, GgufOptions, GgufType, Judge, ModelConfig, Proof,
    SourceRecord, export_folder, export_layers, write_atomic,
};
use dsq_eval::{Report, Row, TextEval};
use dsq_model::Llama;
use dsq_quant::{FloatType, InputGrid, QParams, QuantArgs, QuantConfig, QuantizedMatrix, WeightObserver};
use dsq_runtime::{LlamaRuntime, Logits, Specials, TextTokenizer};
use dsq_train::ptq::{Calibration, PtqMethod, PtqSettings, Scaling, quantize_llama};
use dsq_train::{Control, LmOutcome, LmTrainConfig, RunDir, StepTimes, observe_inputs, qat, train_lm};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Tokens of the training text that calibrate the rows `gptq` and `awq`.
const CALIBRATION_TOKENS: usize = 16_384;

/// Everything that is known before training.
pub struct Plan {
    /// The kind of GGUF file to export, if it is one.
    gguf: Option<GgufType>,
    /// How the exported folder stores codes.
    folder: FolderFormat,
    /// Whether it becomes an ONNX file too.
    onnx: bool,
    config: dsq_checkpoint::LlamaConfig,
    quant: QuantConfig,
    train: LmTrainConfig,
    tokenizer: Vec<u8>,
    train_tokens: Vec<u32>,
    heldout_tokens: Vec<u32>,
    /// Of the training text.
    sketch: Sketch,
}

/// All static checks of a job, cheapest first; reads the texts, trains nothing.
///
/// # Errors
/// Exit code 2 for settings that do not fit each other, 3 for data that cannot be used.
pub fn plan(job: &LmJob, recipe_path: &Path, seed: u64) -> Result<Plan, CliError> {
    let quant = job.quant.config_of(&job.model)?;
    let mut config = job.model.clone();
    let model = ModelConfig::Llama(config.clone());
    dsq_checkpoint::check_groups(recipe_path, &model, &quant)?;
    let names: Vec<String> = model.linears().into_iter().map(|l| l.module).collect();
    if let Some(pattern) = quant.unmatched(&names).first() {
        let problem =
            format!("quant.ignore: expected patterns that match a linear layer, got {pattern:?}, which matches none");
        return Err(CliError::usage(format!("{}: {problem}", recipe_path.display())));
    }
    let bytes = input::bytes(&job.tokenizer.path)?;
    let file = job.tokenizer.path.display().to_string();
    let tokenizer = TextTokenizer::from_json(&bytes, &file)?;
    if tokenizer.vocab_size() > config.vocab_size {
        return Err(CliError::usage(format!(
            "{}: model.vocab_size: expected at least the {} ids of {file}, got {}",
            recipe_path.display(),
            tokenizer.vocab_size(),
            config.vocab_size
        )));
    }
    config.eos_token_ids = tokenizer.special_id("<|endoftext|>").into_iter().collect();
    let train = LmTrainConfig {
        float: job.float.clone(),
        qat: job.qat.clone(),
        distill: job.distill.clone(),
        learned_scales: job.learned_scales.clone(),
        adapters: job.adapters.clone(),
        inputs: job.inputs.clone(),
        float_equal_tokens: job.float_equal_tokens,
        save_every: job.save_every,
        seed,
    };
    let (train_text, heldout_text) = (input::text(&job.train_text.path)?, input::text(&job.heldout_text.path)?);
    let sketch = Sketch::new(&train_text);
    let share = sketch.overlap(&heldout_text);
    if share >= overlap::TOLD {
        output::note(format!(
            "{}: {:.1}% of the lines of this text are in {}, which trains; expected held-out text that it does not hold",
            job.heldout_text.path.display(),
            100.0 * share,
            job.train_text.path.display()
        ));
    }
    let train_tokens = tokenizer.encode(&train_text, Specials::AsText)?;
    let mut heldout_tokens = tokenizer.encode(&heldout_text, Specials::AsText)?;
    heldout_tokens.truncate(job.eval_tokens);
    train.check(&config, train_tokens.len())?;
    train.check_quant(&config, &quant)?;
    if heldout_tokens.len() < 2 {
        let got = heldout_tokens.len();
        return Err(CliError::new(
            3,
            format!("{}: expected at least 2 tokens, got {got}", job.heldout_text.path.display()),
        ));
    }
    let (gguf, folder, onnx) = (job.quant.gguf, job.quant.folder, job.quant.onnx);
    Ok(Plan { gguf, folder, onnx, config, quant, train, tokenizer: bytes, train_tokens, heldout_tokens, sketch })
}

impl Plan {
    /// Times of `steps` training steps with and without fake quantization.
    ///
    /// # Errors
    /// Those of training.
    pub fn time_steps(&self, steps: usize) -> Result<StepTimes, CliError> {
        Ok(dsq_train::time_steps(&self.config, &self.train_tokens, &self.train, &self.quant, steps)?)
    }

    /// Static grids of the inputs of a model, observed as QAT does before it starts.
    fn inputs(&self, model: &Llama) -> Result<Vec<(String, InputGrid)>, CliError> {
        Ok(observe_inputs(model, &self.train_tokens, &self.train, &self.quant)?)
    }

    /// Values of all parameters.
    pub fn parameters(&self) -> u64 {
        let c = &self.config;
        let linears: usize = ModelConfig::Llama(c.clone()).linears().iter().map(|l| l.n() * l.k()).sum();
        let norms = (2 * c.num_hidden_layers + 1) * c.hidden_size;
        (linears + c.vocab_size * c.hidden_size + norms) as u64
    }

    /// Disk that the run needs at most: three checkpoints (two kept, one being written) of weights, two moments and the
    /// weights of two finished phases, and three exported folders, in f32.
    fn bytes_needed(&self) -> u64 {
        self.parameters() * 4 * (3 * 5 + 3) + (16 << 20)
    }
}

/// Trains, exports, evaluates; writes the run folder's `report.json` and `loss.svg`.
///
/// # Errors
/// Those of the plan, the training, the export and the runtime; exit code 130 after an interrupt.
pub fn run(job: &LmJob, start: &mut Start, recipe_path: &Path) -> Result<Report, CliError> {
    let plan = plan(job, recipe_path, start.recipe.seed)?;
    check_space(start.out, plan.bytes_needed())?;
    let fingerprint = serde_json::to_value(start.recipe).unwrap_or_default();
    let mut run = RunDir::open(start.out, &fingerprint, start.resume, start.overwrite)?;
    let on_tick = &mut *start.on_tick;
    let mut on_step = |p: &dsq_train::Progress| {
        on_tick(&Tick {
            phase: p.phase.name(),
            done: p.step as u64,
            of: p.steps as u64,
            note: format!("loss {:.4}", p.loss),
        })
    };
    let outcome = train_lm(&plan.config, &plan.train_tokens, &plan.train, &plan.quant, &mut run, &mut on_step)?;
    draw_curve(&run, &start.recipe.name)?;
    let proof = export(&plan, &outcome, run.path(), start.global.threads())?;
    let mut report = evaluate(&plan, job, &outcome, &proof, run.path(), start)?;
    report = report
        .about("recipe", start.recipe.name.clone())
        .about("recipe_sha256", start.recipe.digest())
        .about("seed", start.recipe.seed)
        .about("parameters", plan.parameters())
        .about("context", job.eval_context)
        .about("run", run.path().display().to_string());
    write_atomic(&run.path().join(place::REPORT), report.to_json().as_bytes())?;
    Ok(report)
}

/// The losses of the log as `loss.svg`.
fn draw_curve(run: &RunDir, name: &str) -> Result<(), CliError> {
    let mut phases: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for line in run.read_log()? {
        if let (Some(phase), Some(step), Some(loss)) =
            (line["phase"].as_str(), line["step"].as_f64(), line["loss"].as_f64())
        {
            phases.entry(phase.to_string()).or_default().push((step, loss));
        }
    }
    let series: Vec<_> = phases.into_iter().map(|(name, points)| Series::line(name, points)).collect();
    if let Some(svg) = loss_curve(name, &series) {
        write_atomic(&run.path().join(place::CURVE), svg.as_bytes())?;
    }
    Ok(())
}

/// Writes the float model, the master weights and the export; each is re-read and proved by `export_folder`.
fn export(plan: &Plan, outcome: &LmOutcome, run: &Path, threads: usize) -> Result<Proof, CliError> {
    let config = ModelConfig::Llama(plan.config.clone());
    let sketch = plan.sketch.file()?;
    let aux = || vec![("tokenizer.json".to_string(), plan.tokenizer.clone()), sketch.clone()];
    let float = |(name, shape, data)| ExportTensor::Float { name, shape, data, dtype: FloatType::F32 };
    for (folder, model) in [(place::FLOAT, &outcome.float), (place::MASTER, &outcome.qat)] {
        let tensors = model.named_tensors().into_iter().map(float).collect();
        export_folder(&run.join(folder), &config, tensors, None, aux(), true)?;
    }
    if let Some(ty) = plan.gguf {
        return export_blocks(plan, ty, run, threads);
    }
    let mut quantized: BTreeMap<&str, &QuantizedMatrix> =
        outcome.quantized.iter().map(|(n, m)| (n.as_str(), m)).collect();
    let grids: BTreeMap<String, (QuantArgs, QParams)> = outcome
        .qat
        .linears()
        .into_iter()
        .filter_map(|(module, layer)| layer.inputs().and_then(|g| Some((module, (g.args, g.params?)))))
        .collect();
    let tensors = outcome
        .qat
        .named_tensors()
        .into_iter()
        .map(|(name, shape, data)| {
            match name.strip_suffix(".weight").and_then(|m| quantized.remove(m).map(|q| (m, q))) {
                Some((module, matrix)) => ExportTensor::Linear {
                    module: module.to_string(),
                    shape,
                    source: Some(SourceRecord::of(&data, matrix)),
                    matrix: matrix.clone(),
                    activation: grids.get(module).copied(),
                    order: None,
                },
                None => float((name, shape, data)),
            }
        })
        .collect();
    let out = run.join(place::EXPORTED);
    let master = Checkpoint::open(&run.join(place::MASTER))?;
    let judge = |exported: &Checkpoint| proof_logits::compare(&master, exported, threads);
    let target = FolderTarget {
        format: plan.folder,
        overwrite: true,
        judge: Some(Judge(&judge)),
        ..FolderTarget::new(&out, &config, Some(&plan.quant))
    };
    let proof = export_layers(&target, tensors, aux())?;
    if plan.onnx {
        super::write_onnx(&out, &run.join(place::EXPORTED_ONNX))?;
    }
    Ok(proof)
}

/// Writes the GGUF file of the master weights: the encoder is that of the forward pass, so the blocks are those that were trained on.
/// What is not quantized stays in f32.
fn export_blocks(plan: &Plan, ty: GgufType, run: &Path, threads: usize) -> Result<Proof, CliError> {
    let master = Checkpoint::open(&run.join(place::MASTER))?;
    let mut keep: Vec<String> = vec!["model.embed_tokens".into()];
    let linears = ModelConfig::Llama(plan.config.clone()).linears().into_iter();
    keep.extend(linears.map(|l| l.module).filter(|m| plan.quant.blocks_for(m).is_none()));
    let options = GgufOptions { ty, dtype: None, requantize: false, keep, overwrite: true };
    let export = GgufExport::new(&master, &run.join(place::EXPORTED_GGUF), options)?;
    let judge = |exported: &Checkpoint| proof_logits::compare(&master, exported, threads);
    Ok(export.judged(Judge(&judge)).write(&dsq_kernels::quantize::quantize_blocks, &mut || ())?)
}

/// Logits `[len, vocab]` of one window of tokens.
type Forward<'a> = Box<dyn FnMut(&[u32]) -> Result<Vec<f32>, CliError> + 'a>;

/// A row in the making.
struct Candidate<'a> {
    name: &'a str,
    bits_per_weight: f64,
    forward: Forward<'a>,
    eval: TextEval,
    time: Duration,
}

/// Evaluates every model on the same windows of the held-out tokens; KL and agreement are against `float`.
fn evaluate(
    plan: &Plan,
    job: &LmJob,
    outcome: &LmOutcome,
    proof: &Proof,
    run: &Path,
    start: &mut Start,
) -> Result<Report, CliError> {
    // What rounding alone gives: of the float model, and of the float model that saw as many tokens as the QAT one; by
    // the whole range, as is usual, and by the recipe's own observer where that is another.
    let mut whole_range = plan.quant.clone();
    whole_range.scheme.weights.observer = WeightObserver::MinMax;
    let observed = plan.inputs(&outcome.float)?;
    let mut rounded = Vec::new();
    for (suffix, model) in [("", Some(&outcome.float)), ("_equal_tokens", outcome.float_equal_tokens.as_ref())] {
        let Some(model) = model else { continue };
        let inputs = if suffix.is_empty() { observed.clone() } else { plan.inputs(model)? };
        rounded.push((format!("rtn{suffix}"), qat::round_to_nearest(model.clone(), &whole_range, &inputs)?));
        if plan.quant.scheme.weights.observer == WeightObserver::Mse {
            rounded.push((format!("rtn_mse{suffix}"), qat::round_to_nearest(model.clone(), &plan.quant, &inputs)?));
        }
    }
    let calibrated = calibrated(plan, outcome, &observed, run)?;
    let exported = run.join(if plan.gguf.is_some() { place::EXPORTED_GGUF } else { place::EXPORTED });
    let runtime = LlamaRuntime::load(&Checkpoint::open(&exported)?, start.global.threads())?;
    let mut cache = runtime.new_cache(job.eval_context)?;
    let mut candidates = vec![graph("float", 32.0, &outcome.float)];
    let of = |equal: bool| rounded.iter().filter(move |(name, _)| name.ends_with("_equal_tokens") == equal);
    candidates.extend(of(false).map(|(name, model)| graph(name, proof.bits_per_weight, model)));
    candidates.extend(calibrated.iter().map(|(name, model)| graph(name, proof.bits_per_weight, model)));
    candidates.push(graph("qat", proof.bits_per_weight, &outcome.qat));
    if let Some(model) = &outcome.float_equal_tokens {
        candidates.push(graph("float_equal_tokens", 32.0, model));
        candidates.extend(of(true).map(|(name, model)| graph(name, proof.bits_per_weight, model)));
    }
    candidates.push(Candidate {
        name: "exported",
        bits_per_weight: proof.bits_per_weight,
        forward: Box::new(move |tokens| {
            cache.truncate(0)?;
            Ok(runtime.forward(tokens, &mut cache, Logits::All)?)
        }),
        eval: TextEval::new(),
        time: Duration::ZERO,
    });

    let windows: Vec<&[u32]> = dsq_eval::windows(&plan.heldout_tokens, job.eval_context)?.collect();
    let mut tokens = 0;
    for (i, window) in windows.iter().enumerate() {
        let mut reference: Option<Vec<f32>> = None;
        for c in &mut candidates {
            let clock = Instant::now();
            let logits = (c.forward)(window)?;
            c.time += clock.elapsed();
            c.eval.window(window, &logits, reference.as_deref())?;
            if reference.is_none() {
                reference = Some(logits);
            }
        }
        tokens += window.len();
        let note = candidates[0].eval.perplexity_so_far().map_or(String::new(), |p| format!("float perplexity {p:.3}"));
        let tick = Tick { phase: "evaluate", done: i as u64 + 1, of: windows.len() as u64, note };
        if (start.on_tick)(&tick) == Control::Stop {
            return Err(CliError::new(130, "interrupted during the evaluation").with_hint("go on with --resume"));
        }
    }
    let mut report = Report::new("train");
    for c in candidates {
        report.rows.push(
            Row::new(c.name)
                .text_metrics(&c.eval.finish()?)
                .number("bits_per_weight", c.bits_per_weight)
                .number("tokens_per_second", tokens as f64 / c.time.as_secs_f64()),
        );
    }
    Ok(report)
}

/// What post-training quantization with calibration on the training text gives of the float model: GPTQ with ranges of least
/// squared error, AWQ with whole ranges, which suit each best. `observed`: the static grids of the float model's inputs by the
/// recipe's observer.
fn calibrated(
    plan: &Plan,
    outcome: &LmOutcome,
    observed: &[(String, InputGrid)],
    run: &Path,
) -> Result<Vec<(&'static str, Llama)>, CliError> {
    if plan.quant.scheme.weights.qtype.float().is_some() || plan.gguf.is_some() {
        // Not compared: rounding and training are.
        return Ok(Vec::new());
    }
    let float = Checkpoint::open(&run.join(place::FLOAT))?;
    let context = plan.train.float.seq_len;
    let count = CALIBRATION_TOKENS.clamp(context, plan.train_tokens.len().max(context));
    let calibration = Calibration::new(&plan.train_tokens, count, context, plan.config.vocab_size)?;
    let methods = [("gptq", PtqMethod::Gptq, WeightObserver::Mse), ("awq", PtqMethod::Rtn, WeightObserver::MinMax)];
    methods
        .into_iter()
        .map(|(name, method, observer)| {
            let mut config = plan.quant.clone();
            config.scheme.weights.observer = observer;
            let scaled = name == "awq";
            let settings = PtqSettings {
                scaling: if scaled { Scaling::Awq } else { Scaling::None },
                float_dtype: Some(FloatType::F32),
                inputs: if scaled { &[] } else { observed },
                ..PtqSettings::new(&config, method)
            };
            let found = quantize_llama(&float, settings, &calibration, &mut |_| ())?;
            let model = found.model(&outcome.float, &config).map_err(dsq_train::TrainError::from)?;
            if !scaled {
                return Ok((name, model));
            }
            // AWQ makes inputs that nobody has observed: by the recipe's observer too, of the model with its codes.
            let inputs = plan.inputs(&model)?;
            Ok((name, qat::quantize_inputs(model, &config, &inputs)))
        })
        .collect()
}

/// A model evaluated in the training graph.
fn graph<'a>(name: &'a str, bits_per_weight: f64, model: &'a Llama) -> Candidate<'a> {
    Candidate {
        name,
        bits_per_weight,
        forward: Box::new(move |tokens| {
            let ids: Vec<i32> = tokens.iter().map(|&t| t as i32).collect();
            let logits = model.logits(Arc::new(ids), 1);
            logits.into_data().try_into_vec::<f32>().map_err(|e| CliError::new(70, format!("logits: {e:?}")))
        }),
        eval: TextEval::new(),
        time: Duration::ZERO,
    }
}
