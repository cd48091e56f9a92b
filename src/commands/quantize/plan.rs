//! `dsq quantize --plan`, and the room on the disk that every run asks for first: what follows from shapes, options and a short
//! measurement. Not the printing (see `src/plan.rs`).

use super::{Args, Floats, Method, calibrated::Text, journal, stream, workers};
use crate::plan::{JournalThere, Plan, stream_memory, timed, write_rate};
use crate::{Global, error::CliError};
use dsq_checkpoint::{
    Checkpoint, FolderFormat, FolderTarget, LinearSpec, ModelConfig, Outline, Workers, check_room, folder_bytes,
};
use dsq_kernels::train::{Strided, matmul};
use dsq_quant::{QuantConfig, QuantScheme};
use dsq_train::ptq::Journal;

/// What hashing, packing, writing and reading back take beside reading and rounding, as a share of these.
const BESIDE: f64 = 0.7;
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
    /// The longest row of a linear.
    longest: f64,
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
        let target = FolderTarget {
            format: FolderFormat::CompressedTensors,
            out: &self.args.out,
            config: self.model,
            scheme: Some(self.config),
            overwrite: true,
            again: false,
            max_shard: self.args.max_shard_size.map(|s| s.0),
            workers: Workers::new(1),
            judge: None,
        };
        let aux: usize = self.ckpt.aux_files()?.iter().map(|(_, bytes)| bytes.len()).sum();
        let folder = folder_bytes(&target, outlines)? + aux as u64;
        if !self.looks {
            return Ok(folder);
        }
        let s = self.sizes(outlines);
        // The streams lie there twice while they are replaced.
        let streams = 2.0 * self.streams() * 4.0 * s.tokens * s.hidden;
        let latents = if self.steps() > 0.0 { 4.0 * s.weights } else { 0.0 };
        let quantized = folder - folder.min(s.floats as u64);
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
        if self.looks || self.config.kv_cache.is_some() {
            memory += self.memory(&s) as u64;
        }
        if self.looks {
            let flops = self.flop_rate(&s)?;
            time += self.work(&s) / flops;
            measured += &format!(", products are computed at {:.1} GFLOP/s", flops / 1e9);
        }
        if self.args.calibration.target_bits.is_some() {
            memory = memory.max((8.0 * s.all) as u64 + memory / 4);
        }
        Ok(Plan { memory, disk, seconds: time, measured, journal: self.journal()? })
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
        let (hidden, vocabulary) = match self.model {
            ModelConfig::Llama(c) => (c.hidden_size as f64, c.vocab_size as f64),
            ModelConfig::ResNet(_) | ModelConfig::Image(_) => (0.0, 0.0),
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

    /// Bytes that a calibrated run holds beside what writing takes.
    fn memory(&self, s: &Sizes) -> f64 {
        // Codes and scales of the whole model, and what stays in float.
        let kept = 1.2 * s.weights + s.floats;
        // Training goes through a block with copies of its streams.
        let streams = 4.0 * s.tokens * s.hidden * self.streams() * if self.trains() { 2.0 } else { 1.0 };
        let embedding = 8.0 * s.vocabulary * s.hidden;
        // The layer in f32, as it came, as it becomes, what is rounded and its errors; the sums of its inputs and their factor.
        let mut block = 24.0 * s.block + 40.0 * s.longest * s.longest;
        let activations = 1024.0 * 4.0 * 24.0 * (s.hidden + s.longest);
        if self.trains() {
            // Latent weights with gradients and two moments, and what the way back needs.
            block += 24.0 * s.block + 3.0 * activations;
        }
        let mut most = embedding.max(block + activations);
        if self.steps() > 0.0 {
            let end_to_end = 8.0 * s.all + 24.0 * s.weights + 1024.0 * 16.0 * s.vocabulary + 8.0 * activations;
            most = most.max(end_to_end - streams) + 4.0 * s.weights;
        }
        kept + streams + most
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
        2.0 * pass + sums + 4.0 * a_row + scales + trained + self.steps() * 1024.0 * 8.0 * s.all
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
