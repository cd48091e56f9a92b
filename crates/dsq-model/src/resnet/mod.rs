//! A small residual network for pictures (CIFAR-style ResNet-8, -20, ...), in float and prepared for quantization-aware
//! training. Parameters are plain f32 vectors under checkpoint names: every step makes Burn tensors of them and the
//! trainer writes the update back, so that a checkpoint holds everything and a resumed run is bit-equal.
//!
//! Not a training loop (see `dsq-train`) and not the runtime (see `dsq-runtime`).
//!
//! Names: `conv1`, `layer{s}.{b}.conv1|conv2|downsample`, `fc`, each with `.weight`; batch norm as `{module}.bn.weight`,
//! `.bias`, `.running_mean`, `.running_var`; `fc.bias`. A folder whose batch norm is already folded (an export in float)
//! has `{module}.bias` instead and loads too.

mod forward;
mod grids;
mod ops;
mod prepare;

pub use forward::{Leaves, Pass, Updates};
pub use prepare::{BnPlacement, ConvertedLayer, QatSettings};

use crate::Teacher;
use burn::tensor::Tensor;
use dsq_checkpoint::{Checkpoint, CheckpointError, ModelConfig, ResNetConfig};
use prepare::Prepared;
use rand::{Rng, SeedableRng};

/// Weight of the newest batch in the running statistics, PyTorch's default.
pub const BN_MOMENTUM: f32 = 0.1;

/// Batch norm of one convolution, `[n]` each.
#[derive(Debug, Clone, PartialEq)]
pub struct Norm {
    /// Learned factor.
    pub gamma: Vec<f32>,
    /// Running mean.
    pub mean: Vec<f32>,
    /// Running variance (unbiased, as PyTorch keeps it).
    pub var: Vec<f32>,
}

/// A convolution with batch norm, or the linear layer as a 1x1 convolution without one.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// Module name in checkpoints.
    pub module: String,
    /// `[n, c, kh, kw]` (`[n, c, 1, 1]` for `fc`).
    pub shape: [usize; 4],
    /// Stride.
    pub stride: usize,
    /// Padding.
    pub pad: usize,
    /// The weight, `[n, c, kh, kw]`.
    pub weight: Vec<f32>,
    /// Batch norm, if there is one.
    pub norm: Option<Norm>,
    /// Batch norm's beta, or the bias where there is none, `[n]`.
    pub shift: Vec<f32>,
}

impl Layer {
    /// The reduction: weights of one output.
    pub fn k(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// `gamma / sqrt(running_var + eps)`, the factor that folds batch norm into the weight; `None` without batch norm.
    pub fn fold_factor(&self, eps: f32) -> Option<Vec<f32>> {
        let norm = self.norm.as_ref()?;
        Some(norm.gamma.iter().zip(&norm.var).map(|(g, v)| g / (v + eps).sqrt()).collect())
    }

    /// Weight and bias with batch norm folded in: `w * f` and `beta - mean * f`.
    pub fn folded(&self, eps: f32) -> (Vec<f32>, Vec<f32>) {
        let (Some(factor), Some(norm)) = (self.fold_factor(eps), &self.norm) else {
            return (self.weight.clone(), self.shift.clone());
        };
        let k = self.weight.len() / self.shape[0];
        let weight = self.weight.chunks(k).zip(&factor).flat_map(|(row, f)| row.iter().map(move |w| w * f)).collect();
        let bias = (0..factor.len()).map(|j| self.shift[j] - norm.mean[j] * factor[j]).collect();
        (weight, bias)
    }
}

/// The sum over pictures of `T^2 KL(teacher || network)`, divided by `denominator`: `[1]`, of `logits [m, classes]`.
///
/// # Panics
/// When there are not as many teacher's logits as the network's.
pub fn distill(logits: Tensor<2>, teacher: Teacher, denominator: f32) -> Tensor<1> {
    crate::ops::distill::distill(logits, teacher, denominator)
}

/// Indices of a basic block's layers.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Block {
    conv1: usize,
    conv2: usize,
    downsample: Option<usize>,
}

/// The network.
#[derive(Debug, Clone)]
pub struct ResNet {
    config: ResNetConfig,
    layers: Vec<Layer>,
    blocks: Vec<Block>,
    prepared: Option<Prepared>,
}

/// One parameter, as the trainer and checkpoints see it.
#[derive(Debug)]
pub struct ParamMut<'a> {
    /// Checkpoint name.
    pub name: String,
    /// Values.
    pub data: &'a mut Vec<f32>,
    /// Whether weight decay applies (weights, not batch norm and biases).
    pub decay: bool,
    /// What it is of a learned grid, if it is.
    pub grid: Option<GridPart>,
}

/// Parts of a learned grid.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum GridPart {
    /// Scales.
    Scale,
    /// A zero point in the domain of codes.
    Zero {
        /// The largest code.
        largest: f64,
    },
}

impl ResNet {
    /// A network with He-normal weights (fan out for convolutions, fan in for `fc`), gamma 1 and beta 0, the same for the same
    /// seed.
    pub fn new(config: &ResNetConfig, seed: u64) -> Self {
        let mut net = Self::zeros(config);
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(seed);
        for layer in &mut net.layers {
            let [n, c, kh, kw] = layer.shape;
            let fan = if layer.norm.is_some() { n * kh * kw } else { 2 * c };
            let std = (2.0 / fan as f64).sqrt();
            for w in &mut layer.weight {
                // Box and Muller: the sum of the logarithm and the angle needs two uniform numbers.
                let (u, v): (f64, f64) = (rng.random::<f64>().max(1e-300), rng.random());
                *w = (std * (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32;
            }
        }
        net
    }

    /// Reads a float checkpoint, with batch norm or with it already folded.
    ///
    /// # Errors
    /// [`CheckpointError`] for another architecture, absent tensors or wrong lengths.
    pub fn from_checkpoint(ckpt: &Checkpoint) -> Result<Self, CheckpointError> {
        let ModelConfig::ResNet(config) = ckpt.config() else {
            return Err(CheckpointError::invalid(ckpt.path(), "model_type", "expected dsq_resnet, got another"));
        };
        let mut net = Self::zeros(config);
        let eps = config.norm_eps;
        let read = |name: String, len: usize| -> Result<Vec<f32>, CheckpointError> {
            let data = ckpt.read_f32(&name)?;
            if data.len() != len {
                let problem = format!("expected {len} values, got {}", data.len());
                return Err(CheckpointError::invalid(ckpt.path(), name, problem));
            }
            Ok(data)
        };
        for layer in &mut net.layers {
            let (m, n) = (layer.module.clone(), layer.shape[0]);
            layer.weight = read(format!("{m}.weight"), layer.weight.len())?;
            let folded = ckpt.info(&format!("{m}.bn.weight")).is_none();
            layer.shift = read(if folded { format!("{m}.bias") } else { format!("{m}.bn.bias") }, n)?;
            if let Some(norm) = &mut layer.norm {
                if folded {
                    // Batch norm that changes nothing: the factor is 1 / sqrt((1 - eps) + eps).
                    *norm = Norm { gamma: vec![1.0; n], mean: vec![0.0; n], var: vec![1.0 - eps; n] };
                } else {
                    norm.gamma = read(format!("{m}.bn.weight"), n)?;
                    norm.mean = read(format!("{m}.bn.running_mean"), n)?;
                    norm.var = read(format!("{m}.bn.running_var"), n)?;
                }
            }
        }
        Ok(net)
    }

    /// Every tensor of the float checkpoint: name, shape, values.
    pub fn named_tensors(&self) -> Vec<(String, Vec<usize>, Vec<f32>)> {
        let mut out = Vec::new();
        for layer in &self.layers {
            let (m, n) = (&layer.module, layer.shape[0]);
            let shape = if layer.norm.is_some() { layer.shape.to_vec() } else { layer.shape[..2].to_vec() };
            out.push((format!("{m}.weight"), shape, layer.weight.clone()));
            match &layer.norm {
                None => out.push((format!("{m}.bias"), vec![n], layer.shift.clone())),
                Some(norm) => {
                    out.push((format!("{m}.bn.weight"), vec![n], norm.gamma.clone()));
                    out.push((format!("{m}.bn.bias"), vec![n], layer.shift.clone()));
                    out.push((format!("{m}.bn.running_mean"), vec![n], norm.mean.clone()));
                    out.push((format!("{m}.bn.running_var"), vec![n], norm.var.clone()));
                }
            }
        }
        out
    }

    /// The architecture.
    pub fn config(&self) -> &ResNetConfig {
        &self.config
    }

    /// The layers, in forward order; `fc` is the last.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// The trained parameters, in the order of the gradients that [`Leaves::gradients`] returns: those of the layers, then
    /// learned grids.
    pub fn params_mut(&mut self) -> Vec<ParamMut<'_>> {
        let mut out = Vec::new();
        let modules: Vec<String> = self.layers.iter().map(|l| l.module.clone()).collect();
        for layer in &mut self.layers {
            let m = &layer.module;
            let param = |name, data, decay| ParamMut { name, data, decay, grid: None };
            out.push(param(format!("{m}.weight"), &mut layer.weight, true));
            let shift = if layer.norm.is_some() { format!("{m}.bn.bias") } else { format!("{m}.bias") };
            if let Some(norm) = &mut layer.norm {
                out.push(param(format!("{m}.bn.weight"), &mut norm.gamma, false));
            }
            out.push(param(shift, &mut layer.shift, false));
        }
        if let Some(Prepared { grids: Some(grids), sites, .. }) = &mut self.prepared {
            out.extend(grids.params_mut(&modules, sites));
        }
        out
    }

    /// Everything that training changes, for checkpoints: parameters, running statistics, observed ranges and learned grids.
    pub fn state(&self) -> Vec<(String, Vec<f32>)> {
        let mut out: Vec<_> = self.named_tensors().into_iter().map(|(name, _, data)| (name, data)).collect();
        out.extend(self.prepared.iter().flat_map(Prepared::state));
        // Names are those of `params_mut`, which needs the network for itself.
        let mut copy = self.clone();
        let grids = copy.params_mut().into_iter().filter(|p| p.grid.is_some());
        out.extend(grids.map(|p| (p.name, p.data.clone())));
        out
    }

    /// Puts back what [`ResNet::state`] gave, into a network of the same config and preparation.
    ///
    /// # Errors
    /// The name of the first entry that is absent or has another length.
    pub fn load_state(&mut self, state: &[(String, Vec<f32>)]) -> Result<(), String> {
        let find = |name: &str| state.iter().find(|(n, _)| n == name).map(|(_, d)| d);
        let put = |name: String, into: &mut Vec<f32>| match find(&name) {
            Some(data) if data.len() == into.len() => {
                into.clone_from(data);
                Ok(())
            }
            _ => Err(name),
        };
        for layer in &mut self.layers {
            let m = layer.module.clone();
            put(format!("{m}.weight"), &mut layer.weight)?;
            match &mut layer.norm {
                None => put(format!("{m}.bias"), &mut layer.shift)?,
                Some(norm) => {
                    put(format!("{m}.bn.weight"), &mut norm.gamma)?;
                    put(format!("{m}.bn.bias"), &mut layer.shift)?;
                    put(format!("{m}.bn.running_mean"), &mut norm.mean)?;
                    put(format!("{m}.bn.running_var"), &mut norm.var)?;
                }
            }
        }
        self.prepared.as_mut().map_or(Ok(()), |p| p.load_state(find))?;
        self.params_mut().into_iter().filter(|p| p.grid.is_some()).try_for_each(|p| put(p.name, p.data))
    }

    /// Layers of the config with zero weights.
    fn zeros(config: &ResNetConfig) -> Self {
        let mut layers = Vec::new();
        let mut blocks = Vec::new();
        let mut push = |module: String, [n, c, side]: [usize; 3], stride: usize| {
            let norm = (module != "fc").then(|| Norm { gamma: vec![1.0; n], mean: vec![0.0; n], var: vec![1.0; n] });
            let weight = vec![0.0; n * c * side * side];
            let shape = [n, c, side, side];
            layers.push(Layer { module, shape, stride, pad: side / 2, weight, norm, shift: vec![0.0; n] });
            layers.len() - 1
        };
        let mut width = config.channels.first().copied().unwrap_or(1);
        push("conv1".into(), [width, config.in_channels, 3], 1);
        for (s, &n) in config.channels.iter().enumerate() {
            for b in 0..config.blocks_per_stage {
                let name = format!("layer{}.{b}", s + 1);
                let stride = if s > 0 && b == 0 { 2 } else { 1 };
                blocks.push(Block {
                    conv1: push(format!("{name}.conv1"), [n, width, 3], stride),
                    conv2: push(format!("{name}.conv2"), [n, n, 3], 1),
                    downsample: (stride > 1 || width != n)
                        .then(|| push(format!("{name}.downsample"), [n, width, 1], stride)),
                });
                width = n;
            }
        }
        push("fc".into(), [config.num_classes, width, 1], 1);
        Self { config: config.clone(), layers, blocks, prepared: None }
    }
}

#[cfg(test)]
mod grid_tests;
#[cfg(test)]
mod tests;
