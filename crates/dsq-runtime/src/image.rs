//! An image model (ResNet, MobileNetV2, EfficientNet-Lite0) as a folder or a PyTorch file holds it: float (batch norm folded on loading), or weights and static
//! activations on their grids. Not training, and not the reading of pictures.
//!
//! A quantized layer is integer arithmetic in f32: codes less zero points are multiplied and summed, which is exact while a sum
//! stays below 2^24 (with 4-bit weights and 8-bit inputs always; with 8-bit weights sums that large are rare, and then the
//! last bit is rounded), then `sum * (scale_w * scale_x) + bias`, the sum with the skip and the activation. These are the operations
//! of the graph that `dsq-train` calibrates, in the same order: the logits are bit-equal to its.

use crate::RuntimeError;
use dsq_checkpoint::{Activation, Checkpoint, ConvLayer, ImageConfig, LinearWeight, MAX_POOL, ModelConfig, Pool};
use dsq_kernels::conv::{PaddedConv, affine_forward, code_values, max_pool, mean_pool};
use dsq_quant::{Granularity, QParams, QuantArgs, QuantError};

/// Pictures that go through the network together; bounds the memory, and changes no bit.
const BATCH: usize = 8;

/// One layer as it runs.
#[derive(Debug)]
struct Layer {
    spec: ConvLayer,
    /// `[n, c, kh, kw]`: values (scale 1), or codes less their zero points.
    weight: Vec<f32>,
    /// `[n]`.
    scale: Vec<f32>,
    /// `[n]`.
    bias: Vec<f32>,
    /// Grid of the input, if it is quantized.
    input: Option<(QuantArgs, QParams)>,
    /// Largest value of each channel, where ReLU6 follows, or ReLU (infinite).
    clip: Option<Vec<f32>>,
    /// Bits of a weight code.
    bits: Option<usize>,
}

/// A loaded network.
#[derive(Debug)]
pub struct ImageRuntime {
    config: ImageConfig,
    layers: Vec<Layer>,
}

impl ImageRuntime {
    /// Loads a model: a PyTorch file, or a folder of floats or codes.
    ///
    /// # Errors
    /// [`RuntimeError::Model`] for another architecture, [`RuntimeError::Quant`] for a scheme that no kernel runs,
    /// [`RuntimeError::Checkpoint`].
    pub fn load(ckpt: &Checkpoint) -> Result<Self, RuntimeError> {
        let ModelConfig::Image(config) = ckpt.config() else {
            let problem = "model_type: expected an image model, got another architecture".into();
            return Err(RuntimeError::Model { file: ckpt.path().display().to_string(), problem });
        };
        let layers =
            config.layers().into_iter().map(|spec| Layer::load(ckpt, config, spec)).collect::<Result<_, _>>()?;
        Ok(Self { config: config.clone(), layers })
    }

    /// The architecture; `preparation.normalize` makes the input of pixels.
    pub fn config(&self) -> &ImageConfig {
        &self.config
    }

    /// Logits `[m, classes]` of `m` normalized pictures `[m, h, w, c]`.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] for a wrong length, [`RuntimeError::Numerics`] when a logit is not finite.
    pub fn forward(&self, images: &[f32], m: usize) -> Result<Vec<f32>, RuntimeError> {
        let size = self.config.preparation.size;
        let picture = size[0] * size[1] * self.config.channels;
        if images.len() != m * picture {
            let problem = format!("expected {m} pictures of {picture} values, got {} values", images.len());
            return Err(RuntimeError::Input { what: "images", problem });
        }
        let mut logits = Vec::with_capacity(m * self.config.num_classes);
        for batch in images.chunks(BATCH * picture) {
            logits.extend(self.batch(batch.to_vec(), size));
        }
        match logits.iter().find(|v| !v.is_finite()) {
            Some(&value) => Err(RuntimeError::Numerics { what: "logits".into(), value }),
            None => Ok(logits),
        }
    }

    fn batch(&self, mut x: Vec<f32>, mut size: [usize; 2]) -> Vec<f32> {
        let mut skip = (Vec::new(), size);
        for layer in &self.layers {
            let spec = &layer.spec;
            match spec.pool {
                None => {}
                Some(Pool::Max) => (x, size) = max_pool(&x, size, spec.inputs(), MAX_POOL),
                Some(Pool::Mean) => (x, size) = (mean_pool(&x, size[0] * size[1], spec.inputs()), [1; 2]),
            }
            if spec.starts_block {
                skip = (x.clone(), size);
            }
            if spec.on_skip {
                let conv = layer.conv(skip.1);
                skip = (layer.run(&skip.0, &conv, None), conv.output());
            } else {
                let conv = layer.conv(size);
                (x, size) = (layer.run(&x, &conv, spec.adds_skip.then_some(&skip.0)), conv.output());
            }
        }
        x
    }

    /// Bytes that weights, scales and biases hold.
    pub fn resident_bytes(&self) -> usize {
        let floats = |l: &Layer| l.weight.len() + l.scale.len() + l.bias.len() + l.clip.as_ref().map_or(0, Vec::len);
        self.layers.iter().map(|l| 4 * floats(l)).sum()
    }

    /// Which kernel each layer runs on.
    pub fn kernels(&self) -> Vec<(String, String)> {
        let name = |l: &Layer| match (l.bits, &l.input) {
            (Some(w), Some((a, _))) => format!("int{w} weights x int{} codes, as integers in f32", a.qtype.bits()),
            (Some(w), None) => format!("f32, int{w} codes as f32 (float activations)"),
            _ => "f32 (layer is not quantized)".into(),
        };
        self.layers.iter().map(|l| (l.spec.module.clone(), name(l))).collect()
    }
}

impl Layer {
    fn load(ckpt: &Checkpoint, config: &ImageConfig, spec: ConvLayer) -> Result<Self, RuntimeError> {
        let n = spec.shape[0];
        let clip = match (spec.activation, config.channel_clip) {
            (None, _) => None,
            (Some(Activation::Relu), _) => Some(vec![f32::INFINITY; n]),
            (Some(Activation::Relu6), false) => Some(vec![6.0; n]),
            (Some(Activation::Relu6), true) => Some(ckpt.read_f32(&format!("{}.clip", spec.module))?),
        };
        if !ckpt.is_quantized(&spec.module) {
            let (weight, bias) = ckpt.folded(&spec)?;
            return Ok(Self { spec, weight, scale: vec![1.0; n], bias, input: None, clip, bits: None });
        }
        let quant = |field, expected: &str, got: String| RuntimeError::Quant {
            module: spec.module.clone(),
            source: QuantError::Setting { field, expected: expected.into(), got },
        };
        let LinearWeight::Quantized(w) = ckpt.linear(&spec.module)? else {
            return Err(quant("weights", "codes", "floats".into()));
        };
        if w.args.qtype.float().is_some() {
            return Err(quant("weights", "integer codes for the layers of an image model", w.args.qtype.name().into()));
        }
        if !matches!(w.args.granularity, Granularity::PerChannel | Granularity::PerTensor) {
            let got = format!("{:?}", w.args.granularity);
            return Err(quant("granularity", "per channel or per tensor for a convolution", got));
        }
        let bias = ckpt.bias(&spec.module)?.unwrap_or_else(|| vec![0.0; n]);
        let input = ckpt.activation(&spec.module)?;
        let by = input.as_ref().map_or(1.0, |(_, grid)| grid.scale);
        let params = |row: usize| w.qparams(w.scale_index(row, 0));
        let scale = (0..n).map(|row| params(row).scale * by).collect();
        let values = w.codes.iter().enumerate().map(|(i, &q)| w.args.code_value(q, params(i / w.k).zero)).collect();
        let bits = Some(w.args.qtype.bits());
        Ok(Self { spec, weight: values, scale, bias, input, clip, bits })
    }

    fn conv(&self, input: [usize; 2]) -> PaddedConv {
        let ([n, _, kernel, _], pads) = (self.spec.shape, self.spec.pads(input));
        let ConvLayer { stride, depthwise, .. } = self.spec;
        PaddedConv { input, pads, c: self.spec.inputs(), n, kernel, stride, depthwise }
    }

    fn run(&self, x: &[f32], conv: &PaddedConv, skip: Option<&Vec<f32>>) -> Vec<f32> {
        let sums = match &self.input {
            Some((args, grid)) => conv.forward(&code_values(x, args, &[*grid]), &self.weight),
            None => conv.forward(x, &self.weight),
        };
        let mut y = affine_forward(&sums, &self.scale, &self.bias);
        if let Some(skip) = skip {
            y.iter_mut().zip(skip).for_each(|(y, s)| *y += s);
        }
        if let Some(clip) = &self.clip {
            for row in y.chunks_exact_mut(clip.len()) {
                row.iter_mut().zip(clip).for_each(|(v, c)| *v = v.max(0.0).min(*c));
            }
        }
        y
    }
}
