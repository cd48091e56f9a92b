//! Recipes: what a TOML file may say, its defaults and ranges, and the checks that need no training. The positions in
//! error messages come from `reader.rs`; what is done with a recipe stands in `commands/train.rs`.

mod reader;

use crate::error::CliError;
use dsq_checkpoint::{FolderFormat, GgufType, LlamaConfig, ModelConfig, fit_problem, hex_sha256, onnx_problem};
use dsq_model::resnet::BnPlacement;
use dsq_quant::ObserverKind;
use dsq_quant::{FloatType, Granularity, Mapping, Pattern, QuantConfig, QuantScheme, WeightObserver};
use dsq_train::cnn::{CnnData, CnnPhase};
use dsq_train::{Adapters, CnnTrainConfig, Distill, InputRanges, LearnedScales, LmPhase};
use reader::Section;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// A recipe, checked and with every default filled in.
#[derive(Debug, Clone, Serialize)]
pub struct Recipe {
    /// Its name; the run folder is called so.
    pub name: String,
    /// The seed of everything random.
    pub seed: u64,
    /// What to do.
    pub job: Job,
}

/// The kinds of model a recipe can train.
#[derive(Debug, Clone, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Job {
    /// A Llama-like language model.
    Lm(Box<LmJob>),
    /// A residual network with BatchNorm.
    Cnn(Box<CnnJob>),
}

/// A file that a recipe names. Its content, not its place, belongs to the recipe's digest.
#[derive(Debug, Clone, Serialize)]
pub struct DataFile {
    /// Where it is.
    #[serde(skip)]
    pub path: PathBuf,
    /// SHA-256 of its bytes, as hex.
    pub sha256: String,
}

/// The language-model job.
#[derive(Debug, Clone, Serialize)]
pub struct LmJob {
    /// The architecture.
    #[serde(serialize_with = "as_config_json")]
    pub model: LlamaConfig,
    /// UTF-8 text to train on.
    pub train_text: DataFile,
    /// UTF-8 text that is never trained on.
    pub heldout_text: DataFile,
    /// tokenizer.json.
    pub tokenizer: DataFile,
    /// The float phase.
    pub float: LmPhase,
    /// The QAT phase.
    pub qat: LmPhase,
    /// Distillation of the QAT phase from the float model.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub distill: Option<Distill>,
    /// How fast the scales of the QAT phase are learned, if they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learned_scales: Option<LearnedScales>,
    /// What the QAT phase trains in the place of weights, if not the weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adapters: Option<Adapters>,
    /// How the ranges of static activations are found, if there are such.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inputs: Option<InputRanges>,
    /// Whether to train a float model with the QAT phase's tokens, for an honest comparison.
    pub float_equal_tokens: bool,
    /// Steps between checkpoints.
    pub save_every: usize,
    /// The grid.
    pub quant: QuantSettings,
    /// Tokens in an evaluation window.
    pub eval_context: usize,
    /// Most held-out tokens to evaluate on.
    pub eval_tokens: usize,
}

/// The image-classification job.
#[derive(Debug, Clone, Serialize)]
pub struct CnnJob {
    /// Settings of the training crate.
    #[serde(serialize_with = "without_paths")]
    pub train: CnnTrainConfig,
    /// SHA-256 of the four data files, in the order of `CnnData`.
    pub data_sha256: Vec<String>,
    /// The grid.
    pub quant: QuantSettings,
}

/// The scheme and what it leaves in float.
#[derive(Debug, Clone, Serialize)]
pub struct QuantSettings {
    /// Weights and activations.
    pub scheme: QuantScheme,
    /// Patterns of layers to leave in float.
    pub ignore: Vec<String>,
    /// The kind of GGUF file whose blocks the weights are trained on, in the place of `scheme`'s codes, and which is exported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gguf: Option<GgufType>,
    /// How the exported folder stores codes.
    #[serde(skip_serializing_if = "is_compressed_tensors")]
    pub folder: FolderFormat,
    /// Whether the exported folder becomes an ONNX file too.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub onnx: bool,
}

fn is_compressed_tensors(format: &FolderFormat) -> bool {
    *format == FolderFormat::CompressedTensors
}

impl QuantSettings {
    /// The configuration that `dsq-train` and `dsq-checkpoint` take.
    ///
    /// # Errors
    /// A pattern that does not parse (the recipe reader has checked that).
    pub fn config(&self) -> Result<QuantConfig, CliError> {
        QuantConfig::new(self.scheme, &self.ignore).map_err(|e| CliError::usage(e.to_string()))
    }

    /// [`QuantSettings::config`] of a language model, with the blocks of GGUF that each layer is put on, where there are such.
    ///
    /// # Errors
    /// As there.
    pub fn config_of(&self, model: &LlamaConfig) -> Result<QuantConfig, CliError> {
        let mut config = self.config()?;
        if let Some(ty) = self.gguf {
            let grids = ty.grids(model).into_iter();
            config.blocks = grids.filter(|(module, _)| config.scheme_for(module).is_some()).collect();
        }
        Ok(config)
    }
}

impl Recipe {
    /// Reads and checks a recipe; `overrides` are `--set key=value` texts.
    ///
    /// # Errors
    /// Exit code 2 with line, column and caret.
    pub fn load(path: &Path, overrides: &[String]) -> Result<Self, CliError> {
        reader::load(path, overrides, |root| {
            let name = root.string("name")?;
            if name.is_empty()
                || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
                || name.starts_with('.')
            {
                return Err(root.error(format!("name: expected letters, digits, `-`, `_` and `.`, got {name:?}")));
            }
            let seed = root.integer("seed", 0..=i64::MAX, Some(1))? as u64;
            let mut model = root.table("model")?;
            let job = match model.choice("architecture", &[("llama", true), ("resnet", false)], None)? {
                true => Job::Lm(Box::new(read_lm(root, model)?)),
                false => Job::Cnn(Box::new(read_cnn(root, model, seed)?)),
            };
            Ok(Self { name, seed, job })
        })
    }

    /// SHA-256 of everything that decides the result, as hex: comments, order and defaults left out make no difference.
    pub fn digest(&self) -> String {
        let text = serde_json::to_string(self).unwrap_or_default();
        hex_sha256(text.as_bytes())
    }
}

fn as_config_json<S: serde::Serializer>(config: &LlamaConfig, serializer: S) -> Result<S::Ok, S::Error> {
    ModelConfig::Llama(config.clone()).to_json().serialize(serializer)
}

/// Where the files lie is not what they say: `data_sha256` stands for them.
fn without_paths<S: serde::Serializer>(config: &CnnTrainConfig, serializer: S) -> Result<S::Ok, S::Error> {
    let mut value = serde_json::to_value(config).map_err(serde::ser::Error::custom)?;
    if let Some(data) = value.get_mut("data").and_then(|d| d.as_object_mut()) {
        data.retain(|key, _| key.ends_with("_limit"));
    }
    value.serialize(serializer)
}

fn read_cnn(root: &mut Section, mut model: Section, seed: u64) -> Result<CnnJob, CliError> {
    let sizes = |v: Vec<i64>| v.into_iter().map(|n| n as usize).collect();
    let channels = sizes(model.integers("channels", 1..=4096, &[16, 32, 64])?);
    let blocks_per_stage = model.count("blocks_per_stage", 1..=64, Some(1))?;
    let num_classes = model.count("num_classes", 2..=256, Some(10))?;
    model.finish()?;

    let mut data = root.table("data")?;
    let mut hashes = Vec::new();
    let mut file = |key| -> Result<PathBuf, CliError> {
        let file = data_file(&mut data, key)?;
        hashes.push(file.sha256);
        Ok(file.path)
    };
    let (train_images, train_labels) = (file("train_images")?, file("train_labels")?);
    let (test_images, test_labels) = (file("test_images")?, file("test_labels")?);
    let mut limit = |key| data.integer(key, 0..=i64::MAX, Some(0)).map(|n| (n > 0).then_some(n as usize));
    let (train_limit, test_limit) = (limit("train_limit")?, limit("test_limit")?);
    data.finish()?;

    let mut train = root.table("train")?;
    let seeds = train.integers("seeds", 0..=i64::MAX, &[seed as i64])?.into_iter().map(|s| s as u64).collect();
    let save_every = train.count("save_every", 1..=1_000_000, Some(200))?;
    let float = read_cnn_phase(&mut train)?;
    train.finish()?;

    let mut qat = root.table("qat")?;
    let freeze_bn_step = qat.count("freeze_bn_step", 0..=i64::MAX, None)?;
    let ranges = read_ranges(&mut qat, freeze_bn_step)?;
    let config = CnnTrainConfig {
        seeds,
        channels,
        blocks_per_stage,
        num_classes,
        data: CnnData { train_images, train_labels, test_images, test_labels, train_limit, test_limit },
        float,
        qat: read_cnn_phase(&mut qat)?,
        freeze_bn_step,
        freeze_ranges_step: ranges.freeze_step,
        wrong_way: qat.choice(
            "wrong_way",
            &[
                ("bn_observed", BnPlacement::BnObserved),
                ("conv_and_bn_observed", BnPlacement::ConvAndBnObserved),
                ("conv_observed", BnPlacement::ConvObserved),
                ("none", BnPlacement::Skipped),
            ],
            Some(BnPlacement::BnObserved),
        )?,
        calibration_batches: ranges.calibration_batches,
        observer: ranges.observer,
        observer_rate: ranges.rate,
        learned_scales: read_learned_scales(&mut qat)?,
        distill: read_distill(&mut qat)?,
        float_equal_steps: qat.boolean("float_equal_steps", false)?,
        save_every,
    };
    qat.finish()?;
    let mut quant = read_quant(root.table("quant")?, false)?;
    if let Some(mut export) = root.optional_table("export")? {
        quant.onnx = export.choice("format", &[("compressed-tensors", false), ("onnx", true)], Some(false))?;
        export.finish()?;
    }
    Ok(CnnJob { train: config, data_sha256: hashes, quant })
}

fn read_cnn_phase(section: &mut Section) -> Result<CnnPhase, CliError> {
    let steps = section.count("steps", 1..=100_000_000, None)?;
    Ok(CnnPhase {
        steps,
        batch_size: section.count("batch_size", 1..=65_536, Some(64))?,
        learning_rate: section.number("learning_rate", 1e-9..=10.0, None)?,
        warmup_steps: section.count("warmup_steps", 0..=steps as i64, Some(steps as i64 / 20))?,
        momentum: section.number("momentum", 0.0..=0.9999, Some(0.9))?,
        weight_decay: section.number("weight_decay", 0.0..=10.0, Some(1e-4))?,
        grad_clip: section.number("grad_clip", 1e-6..=1e6, Some(2.0))?,
        augment: section.boolean("augment", false)?,
    })
}

fn read_lm(root: &mut Section, model: Section) -> Result<LmJob, CliError> {
    let config = read_llama(model)?;

    let mut data = root.table("data")?;
    let (train_text, heldout_text, tokenizer) =
        (data_file(&mut data, "train")?, data_file(&mut data, "heldout")?, data_file(&mut data, "tokenizer")?);
    data.finish()?;

    let mut train = root.table("train")?;
    let float = read_phase(&mut train, &config, None)?;
    let save_every = train.count("save_every", 1..=1_000_000, Some(50))?;
    train.finish()?;

    let mut quant = read_quant(root.table("quant")?, true)?;
    let mut qat_section = root.table("qat")?;
    let qat = read_phase(&mut qat_section, &config, Some(&float))?;
    let float_equal_tokens = qat_section.boolean("float_equal_tokens", true)?;
    let distill = read_lm_distill(&mut qat_section)?;
    let learned_scales = read_learned_scales(&mut qat_section)?;
    let adapters = read_adapters(&mut qat_section)?;
    let inputs = read_inputs(&mut qat_section, &quant.scheme, qat.steps)?;
    qat_section.finish()?;

    if let Some(mut export) = root.optional_table("export")? {
        let folders = [
            ("compressed-tensors", (Some(FolderFormat::CompressedTensors), false)),
            ("gptq", (Some(FolderFormat::GptqV1), false)),
            ("gptq_v2", (Some(FolderFormat::GptqV2), false)),
            ("awq", (Some(FolderFormat::Awq), false)),
            ("gguf", (None, false)),
            ("onnx", (Some(FolderFormat::CompressedTensors), true)),
        ];
        let (format, onnx) = export.choice("format", &folders, Some(folders[0].1))?;
        quant.onnx = onnx;
        check_format(&export, format.is_none(), &quant)?;
        quant.folder = format.unwrap_or_default();
        check_folder(&export, &quant, &config)?;
        check_onnx(&export, &quant, &config)?;
        export.finish()?;
    } else {
        check_format(root, false, &quant)?;
    }

    let (mut eval_context, mut eval_tokens) = (float.seq_len, 32_768);
    if let Some(mut eval) = root.optional_table("eval")? {
        let longest = config.max_position_embeddings as i64;
        eval_context = eval.count("context", 2..=longest, Some(float.seq_len as i64))?;
        eval_tokens = eval.count("max_tokens", 1..=i64::MAX, Some(32_768))?;
        eval.finish()?;
    }
    Ok(LmJob {
        model: config,
        train_text,
        heldout_text,
        tokenizer,
        float,
        qat,
        distill,
        learned_scales,
        adapters,
        inputs,
        float_equal_tokens,
        save_every,
        quant,
        eval_context,
        eval_tokens,
    })
}

/// GPTQ and AWQ folders hold integer codes with scales in f16, and no grids of inputs.
fn check_folder(section: &Section, quant: &QuantSettings, model: &LlamaConfig) -> Result<(), CliError> {
    let format = quant.folder;
    if is_compressed_tensors(&format) {
        return Ok(());
    }
    let refuse = |problem: String| Err(section.error(format!("export.format: {problem}")));
    let QuantScheme { weights, activations } = &quant.scheme;
    if activations.is_some() {
        return refuse(format!("{} has no grids of inputs; expected float activations, as W4A16", format.name()));
    }
    if weights.scale_dtype != FloatType::F16 {
        let got = weights.scale_dtype;
        return refuse(format!(
            "{} stores scales in f16; expected quant.scale_dtype = \"f16\", got {got}",
            format.name()
        ));
    }
    if format == FolderFormat::GptqV1 && weights.mapping == Mapping::Asymmetric {
        return refuse(
            "GPTQ v1 has no zero point of 0, which training may find; expected \"gptq_v2\", got \"gptq\"".into(),
        );
    }
    let scheme = quant.config()?;
    for spec in ModelConfig::Llama(model.clone()).linears() {
        if scheme.scheme_for(&spec.module).is_none() {
            continue;
        }
        if format == FolderFormat::Awq && spec.module == "lm_head" {
            return refuse("AWQ has no quantized output matrix; expected \"lm_head\" in quant.ignore, got none".into());
        }
        if let Some(problem) = fit_problem(format, weights, spec.n(), spec.k()) {
            return refuse(format!("{}: {problem}", spec.module));
        }
    }
    Ok(())
}

/// The graph of a language model has integer codes in blocks, and no grids of inputs.
fn check_onnx(section: &Section, quant: &QuantSettings, model: &LlamaConfig) -> Result<(), CliError> {
    if !quant.onnx {
        return Ok(());
    }
    if quant.scheme.activations.is_some() {
        let problem = "ONNX has no grids of inputs for a language model; expected float activations, as W4A16";
        return Err(section.error(format!("export.format: {problem}")));
    }
    let scheme = quant.config()?;
    for spec in ModelConfig::Llama(model.clone()).linears() {
        let args = scheme.scheme_for(&spec.module).map(|s| s.weights);
        if let Some(problem) = args.and_then(|a| onnx_problem(&a, spec.n(), spec.k())) {
            return Err(section.error(format!("export.format: {}: {problem}", spec.module)));
        }
    }
    Ok(())
}

/// Blocks of GGUF are exported as a GGUF file, codes as a folder.
fn check_format(section: &Section, gguf: bool, quant: &QuantSettings) -> Result<(), CliError> {
    let problem = match (gguf, quant.gguf) {
        (false, Some(ty)) => {
            format!("expected \"gguf\" with quant.scheme = \"{}\", got \"compressed-tensors\"", ty.name())
        }
        (true, None) => {
            format!("expected \"compressed-tensors\" but with quant.scheme one of {}, got \"gguf\"", gguf_names())
        }
        _ => return Ok(()),
    };
    Err(section.error(format!("export.format: {problem}")))
}

/// The kinds of GGUF file whose blocks can be trained on.
fn gguf_names() -> String {
    let names = GgufType::ALL.into_iter().filter(|t| t.has_blocks()).map(GgufType::name);
    names.collect::<Vec<_>>().join(", ")
}

fn read_distill(qat: &mut Section) -> Result<Option<Distill>, CliError> {
    let weight = qat.number("distill_weight", 0.0..=1.0, Some(0.0))?;
    let temperature = qat.number("distill_temperature", 0.01..=1000.0, Some(1.0))?;
    Ok((weight > 0.0).then_some(Distill { weight, temperature, hidden_weight: 0.0 }))
}

/// Distillation of a language model, which also knows the residual streams.
fn read_lm_distill(qat: &mut Section) -> Result<Option<Distill>, CliError> {
    let distill = read_distill(qat)?;
    let hidden_weight = qat.number("hidden_weight", 0.0..=1e6, Some(0.0))?;
    if distill.is_none() && hidden_weight > 0.0 {
        let problem = "hidden_weight: expected distill_weight above 0 beside it, got";
        return Err(qat.error(format!("{problem} hidden_weight = {hidden_weight} and distill_weight = 0")));
    }
    Ok(distill.map(|d| Distill { hidden_weight, ..d }))
}

/// The observer of static activations, and the rate of a moving average.
fn read_observer(qat: &mut Section) -> Result<(ObserverKind, f32), CliError> {
    // Absent: 0, which the range does not hold.
    let given = qat.number("percentile", 50.0..=100.0, Some(0.0))?;
    let percentile = ObserverKind::Percentile(if given == 0.0 { 99.99 } else { given });
    let rated = qat.given("observer_rate");
    let rate = qat.number("observer_rate", 1e-6..=1.0, Some(0.05))?;
    let choices = [
        ("moving_average", ObserverKind::MovingAverage),
        ("min_max", ObserverKind::MinMax),
        ("percentile", percentile),
    ];
    let observer = qat.choice("observer", &choices, Some(ObserverKind::MovingAverage))?;
    let name = choices.iter().find(|c| c.1 == observer).map_or("another", |c| c.0);
    for (key, said, value, owner) in
        [("percentile", given != 0.0, given, "percentile"), ("observer_rate", rated, rate, "moving_average")]
    {
        if said && name != owner {
            let problem = format!("{key}: expected observer = {owner:?} beside it, got");
            return Err(qat.error(format!("{problem} {key} = {value} and observer = {name:?}")));
        }
    }
    Ok((observer, rate as f32))
}

/// How the ranges of static activations are found; `freeze_step`: from when they lie still unless something is said.
fn read_ranges(qat: &mut Section, freeze_step: usize) -> Result<InputRanges, CliError> {
    let calibration_batches = qat.count("calibration_batches", 1..=100_000, Some(8))?;
    let (observer, rate) = read_observer(qat)?;
    Ok(InputRanges {
        calibration_batches,
        observer,
        rate,
        freeze_step: qat.count("freeze_ranges_step", 0..=i64::MAX, Some(freeze_step as i64))?,
    })
}

/// [`read_ranges`] of a language model, which has static activations or not; unless it is said, ranges lie still in the second half
/// of QAT.
fn read_inputs(qat: &mut Section, scheme: &QuantScheme, steps: usize) -> Result<Option<InputRanges>, CliError> {
    if scheme.activations.is_some_and(|a| !a.is_dynamic()) {
        return read_ranges(qat, steps / 2).map(Some);
    }
    let keys = ["calibration_batches", "observer", "percentile", "observer_rate", "freeze_ranges_step"];
    match keys.into_iter().find(|key| qat.given(key)) {
        Some(key) => {
            let expected = "no such key without static activations (quant.static_activations = true, FP8, W4A4, NVFP4)";
            Err(qat.refused(key, expected))
        }
        None => Ok(None),
    }
}

fn read_learned_scales(qat: &mut Section) -> Result<Option<LearnedScales>, CliError> {
    let rate = qat.number("scale_learning_rate", 1e-9..=0.999, Some(1e-3))?;
    Ok(qat.boolean("learned_scales", false)?.then_some(LearnedScales { rate }))
}

fn read_adapters(qat: &mut Section) -> Result<Option<Adapters>, CliError> {
    let rank = qat.count("lora_rank", 0..=65_536, Some(0))?;
    // Absent: 0, which the range does not hold.
    let alpha = qat.number("lora_alpha", 1e-6..=1e6, Some(0.0))?;
    match (rank, alpha) {
        (0, 0.0) => Ok(None),
        (0, _) => {
            let problem = "lora_alpha: expected lora_rank of at least 1 beside it, got";
            Err(qat.error(format!("{problem} lora_alpha = {alpha} and lora_rank = 0")))
        }
        (_, 0.0) => Ok(Some(Adapters { rank, alpha: rank as f64 })),
        _ => Ok(Some(Adapters { rank, alpha })),
    }
}

fn data_file(section: &mut Section, key: &'static str) -> Result<DataFile, CliError> {
    let path = section.existing_path(key)?;
    let bytes = std::fs::read(&path).map_err(|e| CliError::new(4, format!("{}: cannot read: {e}", path.display())))?;
    Ok(DataFile { sha256: hex_sha256(&bytes), path })
}

fn read_llama(mut model: Section) -> Result<LlamaConfig, CliError> {
    let hidden_size = model.count("hidden_size", 2..=65_536, None)?;
    let heads = model.count("num_attention_heads", 1..=1024, None)?;
    let kv_heads = model.count("num_key_value_heads", 1..=1024, Some(heads as i64))?;
    let head_dim = model.count("head_dim", 2..=4096, Some((hidden_size / heads) as i64))?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(model.error(format!(
            "num_key_value_heads: expected a divisor of num_attention_heads = {heads}, got {kv_heads}"
        )));
    }
    if !head_dim.is_multiple_of(2) {
        return Err(model.error(format!("head_dim: expected an even number, got {head_dim}")));
    }
    let config = LlamaConfig {
        hidden_size,
        intermediate_size: model.count("intermediate_size", 1..=1_048_576, None)?,
        num_hidden_layers: model.count("num_hidden_layers", 1..=1024, None)?,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim,
        vocab_size: model.count("vocab_size", 2..=1_048_576, None)?,
        max_position_embeddings: model.count("max_position_embeddings", 2..=1_048_576, None)?,
        rms_norm_eps: model.number("rms_norm_eps", 1e-12..=1.0, Some(1e-5))? as f32,
        rope_theta: model.number("rope_theta", 1.0..=1e12, Some(10_000.0))? as f32,
        rope_scaling: None,
        windows: Vec::new(),
        experts: None,
        latent: None,
        biases: Default::default(),
        tie_word_embeddings: model.boolean("tie_word_embeddings", true)?,
        model_type: "llama".into(),
        bos_token_id: None,
        eos_token_ids: Vec::new(),
        pad_token_id: None,
    };
    model.finish()?;
    Ok(config)
}

fn read_phase(section: &mut Section, model: &LlamaConfig, float: Option<&LmPhase>) -> Result<LmPhase, CliError> {
    let steps = section.count("steps", 1..=100_000_000, None)?;
    let default = |f: fn(&LmPhase) -> usize, otherwise: i64| Some(float.map_or(otherwise, |p| f(p) as i64));
    let longest = model.max_position_embeddings as i64;
    Ok(LmPhase {
        steps,
        batch_size: section.count("batch_size", 1..=65_536, default(|p| p.batch_size, 8))?,
        seq_len: section.count("seq_len", 2..=longest, default(|p| p.seq_len, longest.min(128)))?,
        learning_rate: section.number("learning_rate", 1e-9..=10.0, None)?,
        warmup_steps: section.count("warmup_steps", 0..=steps as i64, Some(steps as i64 / 20))?,
        final_rate: section.number("final_rate", 0.0..=1.0, Some(0.1))?,
        weight_decay: section.number("weight_decay", 0.0..=10.0, Some(float.map_or(0.1, |p| p.weight_decay)))?,
        grad_clip: section.number("grad_clip", 1e-6..=1e6, Some(1.0))?,
    })
}

/// `language`: of a language model, whose INT8 activations have scales of their own for each token unless something else is said.
fn read_quant(mut quant: Section, language: bool) -> Result<QuantSettings, CliError> {
    let name = quant.string("scheme")?;
    if let Some(ty) = GgufType::ALL.into_iter().find(|t| t.has_blocks() && t.name() == name) {
        return read_gguf_quant(quant, ty, language);
    }
    // What the name leaves no choice in need not be said.
    let fixed = QuantScheme::fixed_grid(&name);
    let scale_dtype = quant.choice(
        "scale_dtype",
        &[("f32", FloatType::F32), ("f16", FloatType::F16), ("bf16", FloatType::Bf16)],
        Some(fixed.scale_dtype.unwrap_or(FloatType::Bf16)),
    )?;
    let granularity = read_granularity(&mut quant, &name)?;
    if ["weighted-mse", "weighted_mse"].iter().any(|o| quant.says("observer", o)) {
        let expected = "minmax or mse (weighted-mse of dsq quantize measures the inputs of layers on --calib once, and weights in \
                        training get their ranges anew in each step)";
        return Err(quant.refused("observer", expected));
    }
    let observer = quant.choice(
        "observer",
        &[("minmax", WeightObserver::MinMax), ("mse", WeightObserver::Mse)],
        Some(WeightObserver::MinMax),
    )?;
    // Weights of image models have no zero points, their activations always have.
    let asymmetric = language && quant.boolean("asymmetric", false)?;
    let asymmetric_activations = language && quant.boolean("asymmetric_activations", false)?;
    let said = quant.given("static_activations");
    let static_activations = language && quant.boolean("static_activations", false)?;
    let ignore = quant.strings("ignore")?;
    for text in &ignore {
        Pattern::new(text).map_err(|e| quant.error(e))?;
    }
    let mut scheme = QuantScheme::preset(&name, granularity, scale_dtype).map_err(|e| match language {
        true if !QuantScheme::PRESETS.contains(&name.as_str()) => {
            quant.error(format!("{e} (on the blocks of a GGUF file: {})", gguf_names()))
        }
        _ => quant.error(e),
    })?;
    if language {
        scheme = if static_activations { scheme.for_tensor() } else { scheme.for_tokens() };
    }
    if language && said && !static_activations && scheme.activations.is_some_and(|a| !a.is_dynamic()) {
        let expected = format!("expected true or no such key, because {name} has static activations");
        return Err(quant.error(format!("static_activations: {expected}, got false")));
    }
    if static_activations && scheme.activations.is_none_or(|a| a.is_dynamic()) {
        let expected = "expected a scheme with INT8 activations (W8A8 or W4A8), or FP8, W4A4 or NVFP4";
        return Err(quant.error(format!("static_activations: {expected}, got {name}")));
    }
    if asymmetric_activations {
        scheme = scheme.with_asymmetric_activations().map_err(|e| quant.error(e))?;
    }
    scheme.weights.observer = observer;
    if asymmetric {
        scheme.weights.mapping = Mapping::Asymmetric;
        scheme.weights.check().map_err(|e| quant.error(e))?;
    }
    quant.finish()?;
    Ok(QuantSettings { scheme, ignore, gguf: None, folder: FolderFormat::default(), onnx: false })
}

/// Blocks of GGUF, which leave no choice but that of the layers.
fn read_gguf_quant(mut quant: Section, ty: GgufType, language: bool) -> Result<QuantSettings, CliError> {
    if !language {
        return Err(quant.error(format!("scheme: expected a scheme of integers for an image model, got {}", ty.name())));
    }
    let fixed =
        ["scale_dtype", "granularity", "observer", "asymmetric", "asymmetric_activations", "static_activations"];
    if let Some(key) = fixed.into_iter().find(|key| quant.given(key)) {
        return Err(quant.refused(key, &format!("no such key, because {} leaves no choice", ty.name())));
    }
    let group = quant.count("group_size", 32..=32, Some(32))?;
    let ignore = quant.strings("ignore")?;
    for text in &ignore {
        Pattern::new(text).map_err(|e| quant.error(e))?;
    }
    // What stands for the blocks where only shapes and kinds are asked for.
    let nearest = if ty == GgufType::Q8_0 { "W8A16" } else { "W4A16" };
    let scheme =
        QuantScheme::preset(nearest, Granularity::PerGroup(group), FloatType::F16).map_err(|e| quant.error(e))?;
    quant.finish()?;
    Ok(QuantSettings { scheme, ignore, gguf: Some(ty), folder: FolderFormat::default(), onnx: false })
}

/// Which weights share a scale: what `granularity` says, else groups of `group_size`, else what is usual for the scheme, as in
/// `dsq quantize`.
fn read_granularity(quant: &mut Section, scheme: &str) -> Result<Granularity, CliError> {
    let fixed = QuantScheme::fixed_grid(scheme);
    let [named, sized] = ["granularity", "group_size"].map(|key| quant.given(key));
    if let (false, true, Some(g)) = (named, sized, fixed.granularity)
        && !matches!(g, Granularity::PerGroup(_))
    {
        return Err(quant.refused("group_size", &format!("none, because {scheme} has no groups but {g:?}")));
    }
    let choices = [
        ("group", None),
        ("channel", Some(Granularity::PerChannel)),
        ("tensor", Some(Granularity::PerTensor)),
        ("block", Some(Granularity::PerBlock(128, 128))),
    ];
    let granularity = quant.choice("granularity", &choices, Some(None))?;
    let usual = match fixed.granularity {
        Some(Granularity::PerGroup(g)) => g as i64,
        _ => 128,
    };
    // Read in any case: a recipe of groups becomes one of channels by `--set quant.granularity=channel` alone.
    let group_size = quant.count("group_size", 1..=65_536, Some(usual))?;
    Ok(match (granularity, fixed.usual) {
        (Some(granularity), _) => granularity,
        (None, Some(usual)) if !named && !sized => usual,
        _ => Granularity::PerGroup(group_size),
    })
}
