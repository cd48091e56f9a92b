//! Training the small residual network: float, post-training quantization, and quantization-aware training with batch norm
//! observed (the wrong way, for comparison) and skipped, over several seeds. Takes plain settings and returns plain results.
//!
//! Not the network (see `dsq_model::resnet`), not the export's files (see `dsq-checkpoint`), and not the runtime.

mod data;
mod run;
mod sgd;

pub use run::run_cnn;

use crate::idx::Pictures;
use crate::{Distill, InputRanges, LearnedScales, TrainError};
use dsq_checkpoint::{CheckpointError, ExportTensor, ModelConfig, Proof, ResNetConfig, SourceRecord, export_folder};
use dsq_model::resnet::{BnPlacement, ConvertedLayer, ResNet};
use dsq_quant::{FloatType, ObserverKind, QuantConfig};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Rows of the table that training can fill.
const ROWS: usize = 5;

/// Everything that decides a CNN run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CnnTrainConfig {
    /// One complete run for each; initial weights, order and augmentation follow from it.
    pub seeds: Vec<u64>,
    /// Channels of each stage.
    pub channels: Vec<usize>,
    /// Basic blocks in a stage: 1 makes ResNet-8, 3 ResNet-20 (three stages).
    pub blocks_per_stage: usize,
    /// Classes.
    pub num_classes: usize,
    /// The data set.
    pub data: CnnData,
    /// The float phase.
    pub float: CnnPhase,
    /// The QAT phases (batch norm observed and skipped take the same steps).
    pub qat: CnnPhase,
    /// QAT step from which batch norm's statistics are frozen (batch norm skipped only; observed, it stays live).
    pub freeze_bn_step: usize,
    /// QAT step from which activation ranges are frozen.
    pub freeze_ranges_step: usize,
    /// What the wrong way observes; skipped: it is not trained.
    pub wrong_way: BnPlacement,
    /// Batches of training pictures that calibrate the activation ranges.
    pub calibration_batches: usize,
    /// Observer of the activations.
    pub observer: ObserverKind,
    /// Rate of the moving average.
    pub observer_rate: f32,
    /// Trains the scales of weights and activations as parameters of their own, where batch norm is skipped (LSQ, LSQ+);
    /// `None`: they follow observed ranges.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub learned_scales: Option<LearnedScales>,
    /// Distillation of the QAT phase (batch norm skipped) from the float result; `None`: cross-entropy only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub distill: Option<Distill>,
    /// Whether to train the float result on, with the pictures, steps and rates of the QAT phase but without the grid: QAT
    /// is more training too, and this is the float network it must be held against.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub float_equal_steps: bool,
    /// Steps between checkpoints.
    pub save_every: usize,
}

/// Files of the data set, IDX, plain or gzip'ed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CnnData {
    /// Training pictures.
    pub train_images: PathBuf,
    /// Their labels.
    pub train_labels: PathBuf,
    /// Test pictures, never trained on.
    pub test_images: PathBuf,
    /// Their labels.
    pub test_labels: PathBuf,
    /// Use only the first so many training pictures.
    pub train_limit: Option<usize>,
    /// Use only the first so many test pictures.
    pub test_limit: Option<usize>,
}

/// One phase of training: SGD with Nesterov momentum, linear warm-up, then cosine to zero.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CnnPhase {
    /// Optimizer steps.
    pub steps: usize,
    /// Pictures in a step.
    pub batch_size: usize,
    /// Peak learning rate.
    pub learning_rate: f64,
    /// Steps of linear warm-up.
    pub warmup_steps: usize,
    /// Momentum.
    pub momentum: f64,
    /// Weight decay of weights (batch norm and biases have none).
    pub weight_decay: f64,
    /// Largest joint norm of the gradients.
    pub grad_clip: f64,
    /// Mirror and shift the pictures.
    pub augment: bool,
}

impl CnnTrainConfig {
    /// Checks everything that needs no file.
    ///
    /// # Errors
    /// [`TrainError::Setting`] naming the key.
    pub fn validate(&self) -> Result<(), TrainError> {
        let check = |ok: bool, field: &str, expected: &str, got: String| {
            if ok { Ok(()) } else { Err(TrainError::Setting { field: field.into(), expected: expected.into(), got }) }
        };
        let unique: std::collections::BTreeSet<_> = self.seeds.iter().collect();
        check(!self.seeds.is_empty(), "seeds", "at least one", "none".into())?;
        check(unique.len() == self.seeds.len(), "seeds", "different numbers", format!("{:?}", self.seeds))?;
        let stages = !self.channels.is_empty() && self.channels.iter().all(|c| (1..=4096).contains(c));
        check(stages, "channels", "1 to 4096 for each stage", format!("{:?}", self.channels))?;
        check(self.blocks_per_stage > 0, "blocks_per_stage", "at least 1", self.blocks_per_stage.to_string())?;
        check((2..=256).contains(&self.num_classes), "num_classes", "2 to 256", self.num_classes.to_string())?;
        for (name, phase) in [("train", &self.float), ("qat", &self.qat)] {
            let key = |k: &str| format!("{name}.{k}");
            check(phase.steps > 0, &key("steps"), "at least 1", phase.steps.to_string())?;
            // Batch statistics of a single picture's last stage would be those of a few pixels.
            check(phase.batch_size > 1, &key("batch_size"), "at least 2", phase.batch_size.to_string())?;
            let lr = phase.learning_rate;
            check(lr.is_finite() && lr > 0.0, &key("learning_rate"), "a positive number", lr.to_string())?;
            let clip = phase.grad_clip;
            check(clip > 0.0, &key("grad_clip"), "a positive number", clip.to_string())?;
            let m = phase.momentum;
            check((0.0..1.0).contains(&m), &key("momentum"), "0 to 1, 1 excluded", m.to_string())?;
            let d = phase.weight_decay;
            check((0.0..1.0).contains(&d), &key("weight_decay"), "0 to 1, 1 excluded", d.to_string())?;
        }
        self.learned_scales.as_ref().map_or(Ok(()), LearnedScales::check)?;
        self.distill.as_ref().map_or(Ok(()), Distill::check)?;
        let hidden = self.distill.as_ref().map_or(0.0, |d| d.hidden_weight);
        check(hidden == 0.0, "qat.hidden_weight", "0 for an image model", hidden.to_string())?;
        self.ranges().check()?;
        check(self.save_every > 0, "save_every", "at least 1", "0".into())
    }

    /// Checks that the network can be quantized so, which needs no file either.
    ///
    /// # Errors
    /// [`TrainError::Quant`] for a scheme, granularity or learned scales that convolutions do not have.
    pub fn check_quant(&self, quant: &QuantConfig) -> Result<(), TrainError> {
        // What a layer is quantized with does not depend on the size of pictures.
        let mut blank = ResNet::new(&self.network(1, [0.0, 1.0]), 0);
        for placement in [BnPlacement::Skipped, self.wrong_way] {
            blank.prepare(run::settings(self, quant, placement)).map_err(run::quant_error)?;
        }
        Ok(())
    }

    /// How activation ranges are found, in one piece.
    fn ranges(&self) -> InputRanges {
        InputRanges {
            calibration_batches: self.calibration_batches,
            observer: self.observer,
            rate: self.observer_rate,
            freeze_step: self.freeze_ranges_step,
        }
    }

    /// The phases of a seed, in order.
    fn phases(&self) -> &'static [&'static str] {
        match (self.wrong_way, self.float_equal_steps) {
            (BnPlacement::Skipped, false) => &["float", "qat"],
            (BnPlacement::Skipped, true) => &["float", "qat", "float_equal_steps"],
            (_, false) => &["float", "qat_bn_observed", "qat"],
            (_, true) => &["float", "qat_bn_observed", "qat", "float_equal_steps"],
        }
    }

    /// Row names, in order; the wrong way by what it observes.
    fn row_names(&self) -> [&'static str; ROWS] {
        let wrong = match self.wrong_way {
            BnPlacement::Skipped | BnPlacement::BnObserved => "qat_bn_observed",
            BnPlacement::ConvAndBnObserved => "qat_conv_and_bn_observed",
            BnPlacement::ConvObserved => "qat_conv_observed",
        };
        ["float", "ptq", wrong, "qat", "float_equal_steps"]
    }

    /// The architecture for pictures like these.
    fn architecture(&self, train: &Pictures) -> Result<ResNetConfig, TrainError> {
        if train.size[0] != train.size[1] {
            let problem = format!("expected square pictures, got {} x {}", train.size[0], train.size[1]);
            return Err(TrainError::Artifact { path: self.data.train_images.clone(), problem });
        }
        let (mean, std) = data::statistics(train);
        Ok(self.network(train.size[0], [mean, std]))
    }

    fn network(&self, image_size: usize, [mean, std]: [f32; 2]) -> ResNetConfig {
        ResNetConfig {
            in_channels: 1,
            image_size,
            channels: self.channels.clone(),
            blocks_per_stage: self.blocks_per_stage,
            num_classes: self.num_classes,
            norm_eps: 1e-5,
            mean: vec![mean],
            std: vec![std],
        }
    }
}

/// Where a run stands.
#[derive(Debug, Clone, PartialEq)]
pub struct CnnProgress {
    /// The seed, and its place among the seeds.
    pub seed: u64,
    /// Place of the seed, from 0.
    pub seed_index: usize,
    /// `float`, `qat_bn_observed` (whatever the wrong way observes), `qat` or `float_equal_steps`.
    pub phase: &'static str,
    /// Steps finished, over all seeds and phases.
    pub step: u64,
    /// Steps in all.
    pub steps: u64,
    /// Loss of the step's batch.
    pub loss: f64,
    /// Learning rate of the step.
    pub learning_rate: f64,
}

/// Accuracy of one kind of model over the seeds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CnnRow {
    /// `float`, `ptq`, `qat_bn_observed` (or `qat_conv_and_bn_observed`, `qat_conv_observed`), `qat`, `float_equal_steps`.
    pub name: String,
    /// Top-1 accuracy in percent, one for each seed.
    pub top1: Vec<f64>,
    /// Bits per quantized weight, scales counted; 32 for float.
    pub bits_per_weight: f64,
}

impl CnnRow {
    /// Mean over the seeds.
    pub fn mean(&self) -> f64 {
        self.top1.iter().sum::<f64>() / self.top1.len().max(1) as f64
    }

    /// Sample standard deviation over the seeds; 0 for one seed.
    pub fn spread(&self) -> f64 {
        let mean = self.mean();
        let n = self.top1.len();
        if n < 2 { 0.0 } else { (self.top1.iter().map(|t| (t - mean).powi(2)).sum::<f64>() / (n - 1) as f64).sqrt() }
    }
}

/// A finished seed's quantized network, as it ships.
#[derive(Debug, Clone, PartialEq)]
pub struct CnnExport {
    /// The seed.
    pub seed: u64,
    /// Architecture.
    pub config: ResNetConfig,
    /// Layers in forward order.
    pub layers: Vec<ConvertedLayer>,
    /// Name, shape and values of the f32 master network that the layers were converted from.
    pub master: Vec<(String, Vec<usize>, Vec<f32>)>,
    /// Logits `[m, classes]` of the training graph on the test pictures.
    pub logits: Vec<f32>,
}

impl CnnExport {
    /// The tensors of the exported folder: batch norm folded, codes where a layer is quantized.
    pub fn tensors(&self) -> Vec<ExportTensor> {
        let float = |name: String, shape: Vec<usize>, data: &[f32]| ExportTensor::Float {
            name,
            shape,
            data: data.to_vec(),
            dtype: FloatType::F32,
        };
        let mut out = Vec::new();
        for layer in &self.layers {
            out.push(match &layer.matrix {
                None => float(format!("{}.weight", layer.module), layer.shape.clone(), &layer.weight),
                Some(matrix) => ExportTensor::Linear {
                    module: layer.module.clone(),
                    shape: layer.shape.clone(),
                    matrix: matrix.clone(),
                    activation: layer.activation,
                    order: None,
                    source: Some(SourceRecord::of(&layer.weight, matrix)),
                },
            });
            out.push(float(format!("{}.bias", layer.module), vec![layer.bias.len()], &layer.bias));
        }
        out
    }

    /// Writes the network as a compressed-tensors folder and proves it (see `dsq_checkpoint::export_folder`).
    ///
    /// # Errors
    /// As `export_folder`.
    pub fn write(&self, out: &Path, quant: &QuantConfig, overwrite: bool) -> Result<Proof, CheckpointError> {
        let config = ModelConfig::ResNet(self.config.clone());
        export_folder(out, &config, self.tensors(), Some(quant), Vec::new(), overwrite)
    }
}

/// What a run gives.
#[derive(Debug, Clone, PartialEq)]
pub struct CnnResults {
    /// In the order of their names in [`CnnRow`], without those that were not trained.
    pub rows: Vec<CnnRow>,
    /// One for each seed.
    pub exports: Vec<CnnExport>,
    /// The test pictures, to run the exports on.
    pub test: Pictures,
}

/// Fraction of rows of `logits [m, classes]` whose largest entry is the label, in percent; the first of equals counts.
pub fn top1_percent(logits: &[f32], labels: &[u8]) -> f64 {
    let classes = logits.len() / labels.len().max(1);
    let right =
        logits.chunks(classes.max(1)).zip(labels).filter(|(row, label)| argmax(row) == usize::from(**label)).count();
    100.0 * right as f64 / labels.len().max(1) as f64
}

/// Place of the largest value, the first of equals.
pub fn argmax(row: &[f32]) -> usize {
    row.iter().enumerate().fold(0, |best, (i, v)| if *v > row[best] { i } else { best })
}
