//! Post-training quantization of an image model (ResNet, MobileNetV2, EfficientNet-Lite0) on pictures without labels: batch norm folded,
//! channels equalised (`equalize.rs`), static activation ranges, codes rounded or chosen for the outputs (`round.rs`,
//! `learned.rs`), biases corrected. Not the reading of pictures, not the export, not the language models' walk (`ptq/mod.rs`).
//!
//! The walk is layer by layer, with two streams of all pictures: what the float network makes, and what the layers quantized
//! so far make of the same pictures. A layer is fitted to the float stream's outputs on the quantized stream's inputs, so it
//! also makes up for the layers before it. The quantized stream is computed by the operations of the runtime, in its order;
//! its logits are bit-equal to those of the exported folder.

mod equalize;
mod learned;
mod round;

use crate::TrainError;
use dsq_checkpoint::{Activation, Checkpoint, ConvLayer, ImageConfig, MAX_POOL, ModelConfig, Pool};
use dsq_kernels::conv::{PaddedConv, affine_forward, code_values, max_pool, mean_pool, min_max};
use dsq_quant::{Granularity, Percentile, QParams, QuantArgs, QuantConfig, QuantError, QuantizedMatrix};
use round::Fitted;

/// How codes are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CnnMethod {
    /// Rounded to nearest.
    Rtn,
    /// Weights refitted to the float outputs, then GPTQ.
    Gptq,
    /// Weights refitted to the float outputs, then learned rounding: AutoRound, see `learned.rs`.
    AutoRound,
}

/// What is quantized, and how.
#[derive(Debug, Clone, Copy)]
pub struct CnnSettings<'a> {
    /// Schemes and ignored layers.
    pub config: &'a QuantConfig,
    /// How codes are chosen.
    pub method: CnnMethod,
    /// Whether ranges of channels are equalised across layers first.
    pub equalize: bool,
    /// Whether biases take up the mean error of a layer's outputs.
    pub correct_bias: bool,
    /// Takes the ranges of activations between two percentiles (above 50, at most 100); `None`: the whole ranges.
    pub percentile: Option<f64>,
}

/// A layer as it ships.
#[derive(Debug, Clone)]
pub struct CnnLayer {
    /// Module name.
    pub module: String,
    /// Shape of the stored weight.
    pub shape: Vec<usize>,
    /// The float weight with batch norm folded in and channels equalised, `[n, c * kh * kw]`.
    pub weight: Vec<f32>,
    /// Its codes; `None` for a layer that stays in float.
    pub matrix: Option<QuantizedMatrix>,
    /// `[n]`, corrected.
    pub bias: Vec<f32>,
    /// Largest value of each channel behind the activation, if it is not 6.
    pub clip: Option<Vec<f32>>,
    /// Grid of the input, if it is quantized.
    pub activation: Option<(QuantArgs, QParams)>,
    /// Squared error of the outputs (before the activation, skip included) over the pictures, as a share of the variance
    /// of the float outputs.
    pub error: f64,
}

/// What a run gives.
#[derive(Debug, Clone)]
pub struct CnnOutcome {
    /// The config that the folder gets: no batch norm.
    pub config: ImageConfig,
    /// All layers in forward order.
    pub layers: Vec<CnnLayer>,
    /// Logits of the quantized network for the pictures, `[m, classes]`.
    pub logits: Vec<f32>,
}

/// A layer at work.
struct Work {
    spec: ConvLayer,
    weight: Vec<f32>,
    bias: Vec<f32>,
    clip: Option<Vec<f32>>,
}

/// Quantizes a float image model on `m` normalized pictures `images [m, h, w, c]`. `progress` is told the layers done
/// and all of them. Any number of threads gives the same bits.
///
/// # Errors
/// [`TrainError::Setting`] for no or torn pictures, another architecture or a granularity other than per channel,
/// [`TrainError::Quant`] naming the layer, [`TrainError::Numerics`], [`TrainError::Checkpoint`].
pub fn quantize_images(
    ckpt: &Checkpoint,
    settings: CnnSettings,
    images: &[f32],
    progress: &mut dyn FnMut(usize, usize),
) -> Result<CnnOutcome, TrainError> {
    let setting = |field: &str, expected: &str, got: String| TrainError::Setting {
        field: field.into(),
        expected: expected.into(),
        got,
    };
    let ModelConfig::Image(model) = ckpt.config() else {
        return Err(setting("model_type", "an image model", "another architecture".into()));
    };
    let [h, w] = model.preparation.size;
    let picture = h * w * model.channels;
    if images.is_empty() || !images.len().is_multiple_of(picture) {
        let expected = format!("a whole number of pictures of {picture} values, at least one");
        return Err(setting("pictures", &expected, format!("{} values", images.len())));
    }
    let mut work = Vec::new();
    for spec in model.layers() {
        let (weight, bias) = ckpt.folded(&spec)?;
        let clip = match (spec.activation, model.channel_clip) {
            (None, _) => None,
            (Some(Activation::Relu), _) => Some(vec![f32::INFINITY; spec.shape[0]]),
            (Some(Activation::Relu6), false) => Some(vec![6.0; spec.shape[0]]),
            (Some(Activation::Relu6), true) => Some(ckpt.read_f32(&format!("{}.clip", spec.module))?),
        };
        if let Some(args) = settings.config.scheme_for(&spec.module).map(|s| s.weights)
            && args.granularity != Granularity::PerChannel
        {
            return Err(setting("granularity", "channel, for a convolution", format!("{:?}", args.granularity)));
        }
        work.push(Work { spec, weight, bias, clip });
    }
    if settings.equalize {
        equalize::equalize(&mut work);
    }
    let clips = work.iter().any(|w| w.spec.activation == Some(Activation::Relu6));
    let config = ImageConfig {
        batch_norm: false,
        channel_clip: model.channel_clip || settings.equalize && clips,
        ..model.clone()
    };
    let mut walk = Walk {
        settings,
        size: model.preparation.size,
        float: images.to_vec(),
        quantized: images.to_vec(),
        skips: Default::default(),
        skip_size: model.preparation.size,
    };
    let total = work.len();
    let mut layers = Vec::with_capacity(total);
    for (i, mut w) in work.into_iter().enumerate() {
        let module = w.spec.module.clone();
        let fitted = walk.layer(&mut w).map_err(|source| TrainError::Quant { module: module.clone(), source })?;
        if let Some(&value) = walk.latest(&w.spec).into_iter().flatten().find(|v| !v.is_finite()) {
            let (what, value) = (format!("{module}: outputs for the calibration pictures"), f64::from(value));
            return Err(TrainError::Numerics { what, step: 0, value });
        }
        let clip = w.clip.filter(|_| config.channel_clip && w.spec.activation == Some(Activation::Relu6));
        let (shape, Done { matrix, activation, error }) = (w.spec.stored_shape(), fitted);
        layers.push(CnnLayer { module, shape, weight: w.weight, matrix, bias: w.bias, clip, activation, error });
        progress(i + 1, total);
    }
    Ok(CnnOutcome { config, layers, logits: walk.quantized })
}

/// What became of a layer.
struct Done {
    matrix: Option<QuantizedMatrix>,
    activation: Option<(QuantArgs, QParams)>,
    error: f64,
}

/// The two streams, `[m, h, w, c]` each.
struct Walk<'a> {
    settings: CnnSettings<'a>,
    size: [usize; 2],
    float: Vec<f32>,
    quantized: Vec<f32>,
    /// What the block will add to its outputs: float, quantized.
    skips: [Vec<f32>; 2],
    skip_size: [usize; 2],
}

impl Walk<'_> {
    /// What a layer has just made, quantized and float.
    fn latest(&self, spec: &ConvLayer) -> [&[f32]; 2] {
        let [float, quantized] = &self.skips;
        if spec.on_skip { [quantized, float] } else { [&self.quantized, &self.float] }
    }

    /// Quantizes a layer, corrects its bias and moves both streams past it.
    fn layer(&mut self, w: &mut Work) -> Result<Done, QuantError> {
        let (spec, n) = (&w.spec, w.spec.shape[0]);
        match spec.pool {
            None => {}
            Some(Pool::Max) => {
                let pool = |x: &[f32]| max_pool(x, self.size, spec.inputs(), MAX_POOL);
                let (float, (quantized, size)) = (pool(&self.float).0, pool(&self.quantized));
                (self.float, self.quantized, self.size) = (float, quantized, size);
            }
            Some(Pool::Mean) => {
                let pool = |x: &[f32]| mean_pool(x, self.size[0] * self.size[1], spec.inputs());
                (self.float, self.quantized, self.size) = (pool(&self.float), pool(&self.quantized), [1; 2]);
            }
        }
        if spec.starts_block {
            self.skips = [self.float.clone(), self.quantized.clone()];
            self.skip_size = self.size;
        }
        // What the layer reads is not needed behind it; a layer on the skip reads and makes that.
        let (before, quantized, size) = match spec.on_skip {
            true => {
                let [float, quantized] = std::mem::take(&mut self.skips);
                (float, quantized, self.skip_size)
            }
            false => (std::mem::take(&mut self.float), std::mem::take(&mut self.quantized), self.size),
        };
        let conv = PaddedConv {
            input: size,
            pads: spec.pads(size),
            c: spec.inputs(),
            n,
            kernel: spec.shape[2],
            stride: spec.stride,
            depthwise: spec.depthwise,
        };
        let scheme = self.settings.config.scheme_for(&spec.module);
        let activation = match scheme.and_then(|s| s.activations) {
            None => None,
            Some(args) => {
                let grid = match self.settings.percentile {
                    None => {
                        let (lo, hi) = min_max(&quantized);
                        args.qparams(lo, hi)?
                    }
                    Some(percentile) => {
                        let mut observer = Percentile::new(percentile)?;
                        observer.observe(&quantized)?;
                        observer.qparams(&args)?
                    }
                };
                Some((args, grid))
            }
        };
        // What the layer reads: integers, of which one is worth `step`.
        let (input, step) = match &activation {
            Some((args, grid)) => (code_values(&quantized, args, &[*grid]), grid.scale),
            None => (quantized, 1.0),
        };
        let float = conv.forward(&before, &w.weight);
        // What it should give, bias left out: in front of the sum with the skip also what that lacks.
        let mut target = float.clone();
        if spec.adds_skip {
            let [f, q] = &self.skips;
            target.iter_mut().zip(f.iter().zip(q)).for_each(|(t, (f, q))| *t += f - q);
        }
        let matrix = match scheme {
            None => None,
            Some(scheme) => {
                let fitted = Fitted { conv: &conv, input: &input, step, target: &target, weight: &w.weight };
                Some(match self.settings.method {
                    CnnMethod::Rtn => QuantizedMatrix::quantize(&w.weight, n, conv.k(), scheme.weights)?,
                    CnnMethod::Gptq => fitted.codes(scheme.weights, self.settings.correct_bias, round::gptq)?,
                    CnnMethod::AutoRound => fitted.codes(scheme.weights, self.settings.correct_bias, learned::round)?,
                })
            }
        };
        let (weight, scale): (Vec<f32>, Vec<f32>) = match &matrix {
            None => (w.weight.clone(), vec![step; n]),
            Some(q) => {
                let value = |(i, &code): (usize, &i8)| q.args.code_value(code, q.qparams(i / q.k).zero);
                (q.codes.iter().enumerate().map(value).collect(), (0..n).map(|i| q.qparams(i).scale * step).collect())
            }
        };
        let sums = conv.forward(&input, &weight);
        let original = w.bias.clone();
        if self.settings.correct_bias && matrix.is_some() {
            let (wanted, got) = (means(&target, n), means(&sums, n));
            for (j, bias) in w.bias.iter_mut().enumerate() {
                *bias = (f64::from(*bias) + wanted[j] - got[j] * f64::from(scale[j])) as f32;
            }
        }
        let y = affine_forward(&sums, &scale, &w.bias);
        let error = share(&y, &target, &original, &float, n);
        let float = affine_forward(&float, &vec![1.0; n], &original);
        let made = [(float, 0), (y, 1)].map(|(mut y, stream)| {
            if spec.adds_skip {
                y.iter_mut().zip(&self.skips[stream]).for_each(|(y, s)| *y += s);
            }
            if let Some(clip) = &w.clip {
                for row in y.chunks_exact_mut(n) {
                    row.iter_mut().zip(clip).for_each(|(v, c)| *v = v.max(0.0).min(*c));
                }
            }
            y
        });
        if spec.on_skip {
            (self.skips, self.skip_size) = (made, conv.output());
        } else {
            ([self.float, self.quantized], self.size) = (made, conv.output());
        }
        Ok(Done { matrix, activation, error })
    }
}

/// The mean of each channel of `x [rows, n]`, summed in f64.
fn means(x: &[f32], n: usize) -> Vec<f64> {
    let mut sum = vec![0.0f64; n];
    for row in x.chunks_exact(n) {
        sum.iter_mut().zip(row).for_each(|(s, &v)| *s += f64::from(v));
    }
    let rows = (x.len() / n).max(1) as f64;
    sum.iter().map(|s| s / rows).collect()
}

/// The squared error of `y` against `target + bias`, as a share of the variance of `float` within its channels.
fn share(y: &[f32], target: &[f32], bias: &[f32], float: &[f32], n: usize) -> f64 {
    let mean = means(float, n);
    let (mut error, mut variance) = (0.0f64, 0.0f64);
    for ((y, t), f) in y.chunks_exact(n).zip(target.chunks_exact(n)).zip(float.chunks_exact(n)) {
        for j in 0..n {
            error += (f64::from(y[j]) - f64::from(t[j]) - f64::from(bias[j])).powi(2);
            variance += (f64::from(f[j]) - mean[j]).powi(2);
        }
    }
    if variance > 0.0 { error / variance } else { 0.0 }
}
