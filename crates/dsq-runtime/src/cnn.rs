//! The small residual network from an exported folder: integer weights (INT2 to INT8) and static INT4 or INT8 activation codes
//! through exact integer convolutions, float layers through the f32 kernel. Not training, and no batch norm: an export has it
//! folded into weight and bias.
//!
//! Parity with the training graph: integer sums are exact, and the epilogue `sum * (scale_w * scale_x) + bias`, the residual
//! sum, ReLU, the codes and the mean are the same f32 operations in the same order, so the logits are bit-equal. The graph adds
//! its integers up in f32, which is exact below 2^24. A layer whose codes could add up to more (in theory from 515 INT8 products
//! on, with trained weights several times later) therefore runs on that same f32 kernel here, and says so.

use crate::RuntimeError;
use dsq_checkpoint::{Checkpoint, LinearWeight, ModelConfig, ResNetConfig};
use dsq_kernels::conv::{self, ConvShape, IntConv};
use dsq_quant::{QParams, QuantArgs, QuantError};

/// Pictures that go through the network together; bounds the memory, and changes no bit.
const BATCH: usize = 64;

/// Up to this magnitude integers are exact in f32.
const EXACT: i64 = 1 << 24;

/// One convolution (or `fc` as a 1x1 convolution) as it runs.
#[derive(Debug)]
enum Kernel {
    /// Integer codes in, exact integer sums out.
    Int { conv: IntConv, input: QuantArgs, grid: QParams, scale: Vec<f32> },
    /// f32 sums; `weight [n, c, kh, kw]` holds values (scale 1) or codes. The input is as it is, or codes of a grid whose sums may
    /// pass [`EXACT`].
    Float { weight: Vec<f32>, scale: Vec<f32>, codes: bool, input: Option<(QuantArgs, QParams)> },
}

#[derive(Debug)]
struct Layer {
    module: String,
    kernel: Kernel,
    bias: Vec<f32>,
    stride: usize,
    pad: usize,
    /// `[n, c, kh, kw]`.
    shape: [usize; 4],
}

#[derive(Debug)]
struct Block {
    conv1: usize,
    conv2: usize,
    downsample: Option<usize>,
}

/// A loaded network.
#[derive(Debug)]
pub struct CnnRuntime {
    config: ResNetConfig,
    layers: Vec<Layer>,
    blocks: Vec<Block>,
}

/// A batch of feature maps, `[m, side, side, c]`.
struct Maps {
    side: usize,
    c: usize,
    data: Vec<f32>,
}

impl CnnRuntime {
    /// Loads a folder whose batch norm is folded: quantized in compressed-tensors form, or float.
    ///
    /// # Errors
    /// [`RuntimeError::Model`] for another architecture, [`RuntimeError::Quant`] for a scheme that has no convolution kernel,
    /// [`RuntimeError::Checkpoint`].
    pub fn load(ckpt: &Checkpoint) -> Result<Self, RuntimeError> {
        let file = ckpt.path().display().to_string();
        let ModelConfig::ResNet(config) = ckpt.config() else {
            let problem = "model_type: expected dsq_resnet, got a language model".into();
            return Err(RuntimeError::Model { file, problem });
        };
        let mut out = Self { config: config.clone(), layers: Vec::new(), blocks: Vec::new() };
        let mut side = config.image_size;
        let mut input_side = side;
        for spec in ckpt.config().linears() {
            let module = spec.module;
            let shape = match spec.shape[..] {
                [n, c, kh, kw] => [n, c, kh, kw],
                [n, c] => [n, c, 1, 1],
                _ => {
                    let problem = format!("{module}: expected 2 or 4 dimensions, got {:?}", spec.shape);
                    return Err(RuntimeError::Model { file, problem });
                }
            };
            if ckpt.info(&format!("{module}.bn.weight")).is_some() {
                let problem =
                    format!("{module}: expected batch norm folded into weight and bias, got {module}.bn.weight");
                return Err(RuntimeError::Model { file, problem });
            }
            let first = module.ends_with(".0.conv1") || module.ends_with(".0.downsample");
            let stride = if first && !module.starts_with("layer1.") { 2 } else { 1 };
            let pad = shape[2] / 2;
            // `downsample` reads what the block's first convolution read.
            let at = if module.ends_with(".downsample") { input_side } else { side };
            let at = if module == "fc" { 1 } else { at };
            let geometry =
                ConvShape { input: [at, at], c: shape[1], n: shape[0], kernel: [shape[2], shape[3]], stride, pad };
            if !geometry.is_valid() {
                let problem = format!("{module}: expected maps of at least one pixel, got {at} x {at}");
                return Err(RuntimeError::Model { file, problem });
            }
            if module.ends_with(".conv1") {
                input_side = at;
            }
            if !module.ends_with(".downsample") {
                side = geometry.output()[0];
            }
            let index = out.layers.len();
            if let Some((_, part)) = module.rsplit_once('.') {
                match (part, out.blocks.last_mut()) {
                    ("conv2", Some(block)) => block.conv2 = index,
                    ("downsample", Some(block)) => block.downsample = Some(index),
                    _ => out.blocks.push(Block { conv1: index, conv2: index, downsample: None }),
                }
            }
            let quant = |source| RuntimeError::Quant { module: module.clone(), source };
            let bias = ckpt.bias(&module)?.unwrap_or_else(|| vec![0.0; shape[0]]);
            let kernel = match (ckpt.linear(&module)?, ckpt.activation(&module)?) {
                (LinearWeight::Float { n, data, .. }, None) => {
                    Kernel::Float { weight: data, scale: vec![1.0; n], codes: false, input: None }
                }
                (LinearWeight::Ordered { matrix, .. }, _) => {
                    return Err(quant(QuantError::Setting {
                        field: "granularity",
                        expected: "per channel or per tensor for a convolution".into(),
                        got: format!("{:?} in activation order", matrix.args.granularity),
                    }));
                }
                (LinearWeight::Float { .. }, Some(_)) => {
                    return Err(quant(QuantError::Setting {
                        field: "activations",
                        expected: "quantized activations only in front of quantized weights".into(),
                        got: "float weights".into(),
                    }));
                }
                (LinearWeight::Quantized(w), activation) => {
                    if w.args.qtype.float().is_some() {
                        return Err(quant(QuantError::Setting {
                            field: "weights",
                            expected: "integer codes for the layers of an image model".into(),
                            got: w.args.qtype.name().into(),
                        }));
                    }
                    let scales = w.scales.len();
                    if scales != 1 && scales != w.n {
                        return Err(quant(QuantError::Setting {
                            field: "granularity",
                            expected: "per channel or per tensor for a convolution".into(),
                            got: format!("{:?}", w.args.granularity),
                        }));
                    }
                    let scale = |input: f32| (0..w.n).map(|j| w.scales[j.min(scales - 1)] * input).collect();
                    let values = || w.codes.iter().map(|&q| f32::from(q)).collect();
                    match activation {
                        Some((input, grid)) => {
                            let scale = scale(grid.scale);
                            let conv = IntConv::new(&w, geometry, &input, grid).map_err(quant)?;
                            match conv.largest_sum() <= EXACT {
                                true => Kernel::Int { conv, input, grid, scale },
                                false => {
                                    Kernel::Float { weight: values(), scale, codes: true, input: Some((input, grid)) }
                                }
                            }
                        }
                        None if w.zeros.is_empty() => {
                            Kernel::Float { weight: values(), scale: scale(1.0), codes: true, input: None }
                        }
                        None => {
                            return Err(quant(QuantError::Setting {
                                field: "weights",
                                expected: "symmetric weights for a convolution".into(),
                                got: "asymmetric".into(),
                            }));
                        }
                    }
                }
            };
            out.layers.push(Layer { module, kernel, bias, stride, pad, shape });
        }
        Ok(out)
    }

    /// The architecture; [`ResNetConfig::normalize`] makes the input of pixels.
    pub fn config(&self) -> &ResNetConfig {
        &self.config
    }

    /// Logits `[m, classes]` of `m` normalized pictures `[m, c, h, w]`.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] for a wrong length, [`RuntimeError::Numerics`] when a logit is not finite.
    pub fn forward(&self, images: &[f32], m: usize) -> Result<Vec<f32>, RuntimeError> {
        let (side, c) = (self.config.image_size, self.config.in_channels);
        let picture = side * side * c;
        if images.len() != m * picture {
            let problem = format!("expected {m} pictures of {picture} values, got {} values", images.len());
            return Err(RuntimeError::Input { what: "images", problem });
        }
        let mut logits = Vec::with_capacity(m * self.config.num_classes);
        for batch in images.chunks(BATCH * picture) {
            let mut data = vec![0.0f32; batch.len()];
            for (from, to) in batch.chunks_exact(picture).zip(data.chunks_exact_mut(picture)) {
                for (i, v) in to.iter_mut().enumerate() {
                    *v = from[i % c * side * side + i / c];
                }
            }
            logits.extend(self.batch(Maps { side, c, data }));
        }
        match logits.iter().find(|v| !v.is_finite()) {
            Some(&value) => Err(RuntimeError::Numerics { what: "logits".into(), value }),
            None => Ok(logits),
        }
    }

    fn batch(&self, images: Maps) -> Vec<f32> {
        let mut x = relu(self.layers[0].run(&images));
        for block in &self.blocks {
            let y = relu(self.layers[block.conv1].run(&x));
            let mut y = self.layers[block.conv2].run(&y);
            let skip = block.downsample.map(|d| self.layers[d].run(&x)).unwrap_or(x);
            y.data.iter_mut().zip(&skip.data).for_each(|(y, s)| *y += s);
            x = relu(y);
        }
        let pooled = Maps { side: 1, c: x.c, data: conv::mean_pool(&x.data, x.side * x.side, x.c) };
        self.layers.last().map(|fc| fc.run(&pooled).data).unwrap_or_default()
    }

    /// Bytes that weights, scales and biases hold.
    pub fn resident_bytes(&self) -> usize {
        let kernel = |k: &Kernel| match k {
            Kernel::Int { conv, scale, .. } => conv.resident_bytes() + 4 * scale.len(),
            Kernel::Float { weight, scale, .. } => 4 * (weight.len() + scale.len()),
        };
        self.layers.iter().map(|l| kernel(&l.kernel) + 4 * l.bias.len()).sum()
    }

    /// Which kernel each layer runs on, and why.
    pub fn kernels(&self) -> Vec<(String, String)> {
        let name = |k: &Kernel| match k {
            Kernel::Int { conv, .. } => conv.describe().to_string(),
            Kernel::Float { input: Some(_), .. } => "f32, codes as f32 (sums may pass 2^24)".into(),
            Kernel::Float { codes: true, .. } => "f32, codes as f32 (float activations)".into(),
            Kernel::Float { .. } => "f32 (layer is not quantized)".into(),
        };
        self.layers.iter().map(|l| (l.module.clone(), name(&l.kernel))).collect()
    }
}

impl Layer {
    fn run(&self, x: &Maps) -> Maps {
        let [n, c, kh, kw] = self.shape;
        let s = ConvShape { input: [x.side, x.side], c, n, kernel: [kh, kw], stride: self.stride, pad: self.pad };
        let data = match &self.kernel {
            Kernel::Int { conv, input, grid, scale } => {
                let codes = conv::code_bytes(&x.data, input, *grid);
                let sums = conv.forward(&codes, codes.len() / s.input_len());
                conv::affine_sums(&sums, scale, &self.bias)
            }
            Kernel::Float { weight, scale, input, .. } => {
                let codes = input.as_ref().map(|(args, grid)| conv::code_values(&x.data, args, &[*grid]));
                let x = codes.as_deref().unwrap_or(&x.data);
                conv::affine_forward(&conv::conv_f32(x, weight, &s), scale, &self.bias)
            }
        };
        Maps { side: s.output()[0], c: n, data }
    }
}

fn relu(mut x: Maps) -> Maps {
    x.data.iter_mut().for_each(|v| *v = v.max(0.0));
    x
}
