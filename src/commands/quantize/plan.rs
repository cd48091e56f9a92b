//! `dsq quantize --plan`, and the room on the disk that every run asks for first: what follows from shapes, options and short
//! measurements; what there is of a journal. Not the printing (see `src/plan.rs`).

use super::{Args, Floats, Method, calibrated::Text, journal, stream, workers};
use crate::plan::{BASE_MEMORY, JournalThere, Plan, most_resident, stream_memory, timed, write_rate};
use crate::{Global, error::CliError};
use dsq_checkpoint::{Checkpoint, FolderTarget, LinearSpec, ModelConfig, Outline, Workers, check_room, folder_bytes};
use dsq_kernels::train::{Strided, matmul};
use dsq_quant::{QuantConfig, QuantScheme};
use dsq_train::ptq::Journal;

/// What hashing, packing, writing and reading back take beside reading and rounding, as a share of these.
const BESIDE: f64 = 0.7;
/// Memory beside what is counted: threads, the journal's lists, what the system does not get back.
const MARGIN: u64 = 32 << 20;
/// Steps of learned rounding for each block, about.
const AUTOROUND_STEPS: f64 = 200.0;

/// A run of which everything but the values is known.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    pub(super) args: &'a Args,
    pub(super) global: &'a Global,
    pub(super) ckpt: &'a Checkpoint,
    pub(super) model: &'a ModelConfig,
    pub(super) config: &'a QuantConfig,
    /// Those of mixed precision, by name.
    pub(super) candidates: &'a [(String, QuantScheme)],
    pub(super) specs: &'a [LinearSpec],
    /// The text, and whether codes are chosen on it.
    pub(super) text: Option<&'a Text>,
    pub(super) looks: bool,
}

/// Sizes that memory and time follow from.
struct Sizes {
    /// Quantized weights, and those of the largest layer of the model.
    weights: f64,
    block: f64,
    /// All parameters.
    all: f64,
    /// Bytes of the tensors that stay in float.
    floats: f64,
    hidden: f64,
    /// The longest row of a linear, and the weights of the largest that is quantized.
    longest: f64,
    largest: f64,
    layers: f64,
    vocabulary: f64,
    tokens: f64,
}

impl Run<'_> {
    fn outlines(&self) -> Result<Vec<Outline>, CliError> {
        let mut outlines = stream::outlines(self.config, self.specs)?;
        outlines.extend(Floats::new(self.args, self.ckpt, self.specs, &[]).outlines());
        Ok(outlines)
    }

    /// Bytes that the output takes, and a journal beside it.
    fn disk(&self, outlines: &[Outline]) -> Result<u64, CliError> {
        let max_shard = self.args.max_shard_size.map(|s| s.0);
        let target = FolderTarget { max_shard, ..FolderTarget::new(&self.args.out, self.model, Some(self.config)) };
        let aux: usize = self.ckpt.aux_files()?.iter().map(|(_, bytes)| bytes.len()).sum();
        let folder = folder_bytes(&target, outlines)? + aux as u64;
        if self.text.is_none() {
            return Ok(folder);
        }
        let s = self.sizes(outlines);
        // The streams lie there twice while they are replaced.
        let streams = 2.0 * self.streams() * 4.0 * s.tokens * s.hidden;
        // With steps the trained weights lie there, and the layers as they were before these.
        let (latents, times) = if self.steps() > 0.0 { (4.0 * s.weights, 2) } else { (0.0, 1) };
        let quantized = if self.looks { times * (folder - folder.min(s.floats as u64)) } else { 0 };
        Ok(folder + quantized + (streams + latents) as u64)
    }

    /// Refuses a disk that will not hold the output. What a journal takes that the run goes on with is there already.
    ///
    /// # Errors
    /// Exit code 4 with both values.
    pub(super) fn check_room(&self) -> Result<(), CliError> {
        let there = if self.args.calibration.resume { Journal::size(&journal::path(&self.args.out)) } else { 0 };
        Ok(check_room(&self.args.out, self.disk(&self.outlines()?)?.saturating_sub(there))?)
    }

    /// What is said of a journal that is there.
    fn journal(&self) -> Result<Option<JournalThere>, CliError> {
        let Some(text) = self.text else { return Ok(None) };
        let of = match self.model {
            ModelConfig::Llama(c) => c.num_hidden_layers,
            ModelConfig::ResNet(_) | ModelConfig::Image(_) => 0,
        };
        let there = journal::look(self, text)?;
        Ok(there.map(|found| JournalThere { path: journal::path(&self.args.out), of, found }))
    }

    /// The plan.
    ///
    /// # Errors
    /// What reading a layer or trying the disk gives.
    pub(super) fn plan(&self) -> Result<Plan, CliError> {
        let held = most_resident();
        let outlines = self.outlines()?;
        let disk = self.disk(&outlines)?;
        let s = self.sizes(&outlines);
        // A layer of the usual size is rounded for the time, the disk is tried.
        let mut by_size: Vec<&LinearSpec> = self.specs.iter().collect();
        by_size.sort_by_key(|l| l.n() * l.k());
        let rounding = stream::Rounding::new(self.args, self.global, self.ckpt, self.config, &[])?;
        let sample = by_size[by_size.len() / 2];
        let seconds = timed(|| rounding.layer(sample, true))?;
        let bytes: u64 = self.ckpt.names().iter().filter_map(|n| self.ckpt.info(n)).map(|i| i.bytes).sum();
        let per_value = bytes as f64 / s.all.max(1.0);
        let rate = (sample.n() * sample.k()) as f64 * per_value / seconds.max(1e-9);
        let threads = (self.global.threads() as f64).min(self.specs.len() as f64).max(1.0);
        let written = write_rate(&self.args.out)?;
        let mut time = bytes as f64 / rate * (1.0 + BESIDE) / threads;
        time += written.map_or(0.0, |w| disk as f64 / w);
        let mut measured = format!("a layer is read and rounded at {:.0} MB/s a thread", rate / 1e6);
        if let Some(written) = written {
            measured += &format!(", the disk takes {:.0} MB/s", written / 1e6);
        }
        let mut memory = stream_memory(&outlines, Workers::new(self.global.threads()));
        if self.text.is_some() {
            // What was read so far is read by every run with this text, and the system does not get all of it back.
            let writing = memory.saturating_sub(BASE_MEMORY) as f64;
            memory = held.unwrap_or(BASE_MEMORY) + MARGIN + self.phases(&s, writing) as u64;
        }
        if self.text.is_some() {
            let flops = self.flop_rate(&s)?;
            time += self.work(&s) / flops;
            measured += &format!(", products are computed at {:.1} GFLOP/s", flops / 1e9);
        }
        let mut plan = Plan { memory, disk, seconds: time, measured, journal: self.journal()? };
        self.args.logits.plan(&mut plan, self.ckpt, self.global.threads());
        Ok(plan)
    }

    fn sizes(&self, outlines: &[Outline]) -> Sizes {
        let size = |l: &LinearSpec| (l.n() * l.k()) as f64;
        let mut blocks = std::collections::BTreeMap::new();
        for spec in self.model.linears() {
            // `model.layers.N`: all linears of a layer, also those that stay in float.
            let block: Vec<&str> = spec.module.split('.').take(3).collect();
            *blocks.entry(block.join(".")).or_insert(0.0) += size(&spec);
        }
        blocks.remove("lm_head");
        let [hidden, vocabulary, layers] = match self.model {
            ModelConfig::Llama(c) => [c.hidden_size, c.vocab_size, c.num_hidden_layers].map(|n| n as f64),
            ModelConfig::ResNet(_) | ModelConfig::Image(_) => [0.0; 3],
        };
        let floats = outlines.iter().map(|o| match o {
            Outline::Plain { dtype, .. } => o.values() as f64 * dtype.size() as f64,
            Outline::Linear { .. } | Outline::KvCache { .. } => 0.0,
        });
        Sizes {
            weights: self.specs.iter().map(size).sum(),
            block: blocks.into_values().fold(0.0, f64::max),
            all: outlines.iter().map(|o| o.values() as f64).sum(),
            floats: floats.sum(),
            hidden,
            longest: self.model.linears().iter().map(|l| l.k() as f64).fold(0.0, f64::max),
            largest: self.specs.iter().map(size).fold(0.0, f64::max),
            layers,
            vocabulary,
            tokens: self.text.map_or(0.0, |t| t.calibration().tokens() as f64),
        }
    }

    fn trains(&self) -> bool {
        matches!(self.args.method, Method::Blockwise | Method::Autoround)
    }

    /// Residual streams that a run holds.
    fn streams(&self) -> f64 {
        if self.trains() || self.args.method == Method::Gptaq { 2.0 } else { 1.0 }
    }

    fn steps(&self) -> f64 {
        if self.trains() { self.args.calibration.steps() as f64 } else { 0.0 }
    }

    /// Bytes that a run with a text takes at most beside what reading that text took: those of the largest of its phases. One layer of the
    /// model is there at a time, but where all of it is trained or searched.
    fn phases(&self, s: &Sizes, writing: f64) -> f64 {
        let streams = 4.0 * s.tokens * s.hidden * self.streams();
        // A batch of 1,024 tokens: heads, norms and the feed-forward block.
        let activations = 4096.0 * (8.0 * s.hidden + 4.0 * s.longest);
        // The table, and what it is made of.
        let embedding = 8.0 * s.vocabulary * s.hidden + streams;
        let mut most = writing.max(embedding);
        // The streams are there twice while they are written down.
        let mut walk = |bytes: f64| most = most.max(bytes + 2.0 * streams);
        let (layer, square) = (4.0 * s.block, s.longest * s.longest);
        if self.looks {
            // What is scaled is kept as it came, and a candidate is made of it.
            let scaled = self.args.calibration.scales() || self.args.method == Method::Awq;
            let original = if scaled { layer + 8.0 * s.largest } else { 0.0 };
            // The float layer, and how far its inputs are off.
            let follows = matches!(self.args.method, Method::Gptaq | Method::Blockwise);
            let float = if follows { layer + 14.0 * square } else { 0.0 };
            // The sums over the inputs, while they are made; then with their factor, the codes that are chosen and their errors.
            let measured = 12.0 * square + activations;
            let chosen = 20.0 * square + 20.0 * s.largest;
            // And the codes of the block so far.
            walk(layer + 1.25 * s.block + original + float + measured.max(chosen));
        }
        if self.trains() {
            // The float block, the quantized one, the one that is trained and where it began, with gradients and two moments; what the
            // way back needs; and the streams at the block's inputs beside those behind it.
            walk(9.0 * layer + 2.0 * activations + 2.0 * streams);
        }
        if self.config.kv_cache.is_some() {
            walk(layer + 12.0 * s.largest + activations);
        }
        if self.args.calibration.target_bits.is_some() {
            // The float model, what each of its layers sees of one batch, and predictions.
            most = most.max(4.5 * s.all + 4096.0 * (s.layers * s.hidden + 4.0 * s.vocabulary) + layer + activations);
        }
        if self.steps() > 0.0 {
            // Both models, and gradients and moments of what is trained.
            most = most.max(8.0 * s.all + 24.0 * s.weights + 4096.0 * 4.0 * s.vocabulary + 2.0 * activations);
        }
        most
    }

    /// Operations of a calibrated run, about.
    fn work(&self, s: &Sizes) -> f64 {
        // A forward pass of all layers over all tokens; a layer costs two of them, and sums over its inputs.
        let pass = 2.0 * s.tokens * s.weights;
        let sums = 2.0 * s.tokens * s.weights * 0.5;
        let a_row = 2.0 * s.weights * s.longest.min(2.0 * s.hidden);
        let scales =
            if self.args.calibration.awq_scales() || self.args.method == Method::Awq { 20.0 * a_row } else { 0.0 };
        let epochs = self.args.calibration.epochs();
        let trained = match self.args.method {
            Method::Blockwise => 3.0 * pass * epochs.unwrap_or(2.0) + 5.0 * pass,
            Method::Autoround => {
                let steps = epochs.map_or(AUTOROUND_STEPS * 1024.0, |e| e * s.tokens);
                6.0 * s.weights * steps + 5.0 * pass
            }
            Method::Gptaq => 2.0 * pass,
            Method::Rtn | Method::Gptq | Method::Awq => 0.0,
        };
        let chosen = if self.looks { 2.0 * pass + sums + 4.0 * a_row + scales + trained } else { 0.0 };
        let cache = if self.config.kv_cache.is_some() { 1.5 * pass } else { 0.0 };
        // Four sets of a layer, each with every candidate: a batch through the half of the layers that follow on average, and the head.
        let searched = 4.0 * s.layers * self.candidates.len() as f64;
        let search = searched * 1024.0 * (s.weights + 2.0 * s.vocabulary * s.hidden);
        chosen + cache + search + self.steps() * 1024.0 * 8.0 * s.all
    }

    /// Operations a second of the product that calibration mostly does.
    fn flop_rate(&self, s: &Sizes) -> Result<f64, CliError> {
        let (m, k) = (512, (s.hidden as usize).clamp(64, 2048));
        let (x, w) = (vec![0.5f32; m * k], vec![0.25f32; k * k]);
        let pool = workers(self.global)?;
        let product = || pool.install(|| matmul(Strided::rows(&x, k), Strided::rows(&w, k), [m, k, k]));
        product();
        let seconds = timed(|| Ok::<_, CliError>(product()))?;
        Ok(2.0 * (m * k * k) as f64 / seconds.max(1e-9))
    }
}
