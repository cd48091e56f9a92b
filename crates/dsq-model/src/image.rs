//! The float forward pass of an image model (ResNet, MobileNetV2, EfficientNet-Lite0) in Burn's own operations, with batch norm as it
//! is stored (running statistics) or folded, and gradients for every parameter on a device that keeps them. It follows the list of
//! layers that `dsq-checkpoint` gives. Not the small network that recipes train (see `resnet`), and no batch statistics.

use burn::tensor::activation::relu;
use burn::tensor::module::{conv2d, max_pool2d};
use burn::tensor::ops::{ConvOptions, MaxPoolOptions};
use burn::tensor::{Device, Tensor, TensorData};
use dsq_checkpoint::{Activation, Checkpoint, CheckpointError, ConvLayer, ImageConfig, MAX_POOL, ModelConfig, Pool};

/// A layer and its parameters.
#[derive(Debug, Clone)]
struct Layer {
    spec: ConvLayer,
    /// `[n, c, kh, kw]`.
    weight: Tensor<4>,
    /// Factor, shift, mean and variance, `[n]` each; without batch norm the shift alone.
    norm: Option<[Tensor<1>; 3]>,
    shift: Tensor<1>,
    /// Largest value of each channel behind ReLU6, where it is not 6, `[n]`.
    clip: Option<Tensor<1>>,
}

/// A network.
#[derive(Debug, Clone)]
pub struct ImageModel {
    config: ImageConfig,
    layers: Vec<Layer>,
}

impl ImageModel {
    /// Reads a float checkpoint. Parameters (weights, factors, shifts) want gradients where the device keeps them.
    ///
    /// # Errors
    /// [`CheckpointError`] for another architecture, codes, and tensors that are absent.
    pub fn from_checkpoint(ckpt: &Checkpoint, device: &Device) -> Result<Self, CheckpointError> {
        let ModelConfig::Image(config) = ckpt.config() else {
            let problem = "expected an image model, got another architecture";
            return Err(CheckpointError::invalid(ckpt.path(), "model_type", problem));
        };
        if ckpt.quantization().is_some() {
            let problem = "expected float weights, got codes";
            return Err(CheckpointError::invalid(ckpt.path(), "quantization_config", problem));
        }
        let list = |name: &str| -> Result<Tensor<1>, CheckpointError> {
            let data = ckpt.read_f32(name)?;
            let len = data.len();
            Ok(Tensor::from_data(TensorData::new(data, [len]), device))
        };
        let parameter = |name: &str| list(name).map(Tensor::require_grad);
        let read = |spec: ConvLayer| {
            let weight = TensorData::new(ckpt.linear(&spec.module)?.into_f32(), spec.shape);
            let weight = Tensor::from_data(weight, device).require_grad();
            let part = |norm: &str, part: &str| format!("{norm}.{part}");
            let (norm, shift) = match spec.norm.as_ref().filter(|_| config.batch_norm) {
                None => (None, parameter(&part(&spec.module, "bias"))?),
                Some(n) => {
                    let statistics = [list(&part(n, "running_mean"))?, list(&part(n, "running_var"))?];
                    let [mean, var] = statistics;
                    (Some([parameter(&part(n, "weight"))?, mean, var]), parameter(&part(n, "bias"))?)
                }
            };
            let clipped = config.channel_clip && spec.activation == Some(Activation::Relu6);
            let clip = clipped.then(|| list(&part(&spec.module, "clip"))).transpose()?;
            Ok(Layer { spec, weight, norm, shift, clip })
        };
        let layers = config.layers().into_iter().map(read).collect::<Result<_, CheckpointError>>()?;
        Ok(Self { config: config.clone(), layers })
    }

    /// The architecture.
    pub fn config(&self) -> &ImageConfig {
        &self.config
    }

    /// The weight of a module, whose gradient can be asked for.
    pub fn weight(&self, module: &str) -> Option<&Tensor<4>> {
        self.layers.iter().find(|l| l.spec.module == module).map(|l| &l.weight)
    }

    /// Logits `[m, classes]` of normalized pictures `[m, c, h, w]`, of any height and width.
    ///
    /// # Panics
    /// For pictures with other channels than the model's.
    pub fn forward(&self, images: Tensor<4>) -> Tensor<2> {
        let mut x = images;
        let mut skip = x.clone();
        for layer in &self.layers {
            match layer.spec.pool {
                None => {}
                Some(Pool::Max) => {
                    let [kernel, stride, pad] = MAX_POOL.map(|v| [v; 2]);
                    x = max_pool2d(x, MaxPoolOptions::new(kernel).with_stride(stride).with_padding(pad));
                }
                Some(Pool::Mean) => x = x.mean_dim(3).mean_dim(2),
            }
            if layer.spec.starts_block {
                skip = x.clone();
            }
            if layer.spec.on_skip {
                skip = layer.forward(skip, None, self.config.norm_eps);
            } else {
                x = layer.forward(x, layer.spec.adds_skip.then(|| skip.clone()), self.config.norm_eps);
            }
        }
        let [m, classes, ..] = x.dims();
        x.reshape([m, classes])
    }
}

impl Layer {
    fn forward(&self, x: Tensor<4>, skip: Option<Tensor<4>>, eps: f32) -> Tensor<4> {
        let [_, _, h, w] = x.dims();
        let (stride, pads) = ([self.spec.stride; 2], self.spec.pads([h, w]).map(|[before, after]| (before, after)));
        let groups = if self.spec.depthwise { self.spec.shape[0] } else { 1 };
        let mut y = conv2d(x, self.weight.clone(), None, ConvOptions::new_with_padding(stride, pads, [1; 2], groups));
        let channels = |t: &Tensor<1>| t.clone().reshape([1, self.spec.shape[0], 1, 1]);
        if let Some([factor, mean, var]) = &self.norm {
            y = (y - channels(mean)) / (channels(var) + eps).sqrt() * channels(factor);
        }
        y = y + channels(&self.shift);
        if let Some(skip) = skip {
            y = y + skip;
        }
        match (self.spec.activation, &self.clip) {
            (None, _) => y,
            (Some(Activation::Relu), _) => relu(y),
            (Some(Activation::Relu6), None) => y.clamp(0.0, 6.0),
            (Some(Activation::Relu6), Some(clip)) => relu(y).min_pair(channels(clip)),
        }
    }
}
