//! Layers of the float models, with the fake quantization that training may switch on. Not models (see `llama`,
//! `resnet`).

use crate::fake_quant::{fake_quant_activation, fake_quant_gguf, fake_quant_weight, fake_quant_weight_under};
use crate::llama::host;
use crate::ops;
use crate::{LearnedGrid, LearnedInput, Lora};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};
use dsq_checkpoint::LlamaConfig;
use dsq_quant::{GgufGrid, InputGrid, QuantArgs, QuantError, QuantizedMatrix, WeightObserver};
use std::sync::Arc;

/// A linear layer, `y = x w^T + b`; most have no bias `b`, and none is quantized.
#[derive(Module, Debug)]
pub struct Linear {
    /// Weight `[n, k]` (outputs, inputs), as checkpoints store it.
    pub weight: Param<Tensor<2>>,
    /// Bias `[n]`.
    bias: Option<Param<Tensor<1>>>,
    /// Learned scales and zero points, where fake quantization uses such.
    grid: Option<LearnedGrid>,
    /// What is trained in the place of the weight, which is frozen then.
    lora: Option<Lora>,
    /// Whether `weight` holds fixed codes (less their zero points) and only their scales are trained.
    #[module(skip)]
    codes: bool,
    #[module(skip)]
    quant: Option<QuantArgs>,
    /// The global scale of fake quantization by ranges, where the scheme has one and layers share it; `None`: the weight's own.
    #[module(skip)]
    global: Option<f32>,
    /// Blocks of GGUF that the weight is put on in the place of `quant`'s codes.
    #[module(skip)]
    blocks: Option<GgufGrid>,
    /// How the input is put on a grid.
    #[module(skip)]
    inputs: Option<InputGrid>,
    /// The learned scale and zero point of that grid, where there are such; of layers that read one tensor the first holds them.
    input: Option<LearnedInput>,
}

impl Linear {
    /// From a weight `[n, k]`, row major.
    pub fn from_values(weight: Vec<f32>, [n, k]: [usize; 2], device: &Device) -> Self {
        let weight = Param::from_tensor(Tensor::from_data(TensorData::new(weight, [n, k]), device));
        let (bias, grid, lora, quant, global, blocks) = (None, None, None, None, None, None);
        let (inputs, input) = (None, None);
        Self { weight, bias, grid, lora, codes: false, quant, global, blocks, inputs, input }
    }

    /// The linear layer `part` of layer `i` of a model, `[n, k]`, with its bias where it has one; `values` gives the tensors.
    pub(crate) fn build<E>(
        config: &LlamaConfig,
        i: usize,
        part: &str,
        [n, k]: [usize; 2],
        device: &Device,
        values: &mut impl FnMut(&str, &[usize]) -> Result<Vec<f32>, E>,
    ) -> Result<Self, E> {
        let module = format!("model.layers.{i}.{part}");
        let mut linear = Self::from_values(values(&format!("{module}.weight"), &[n, k])?, [n, k], device);
        if config.has_bias(&module) {
            linear.set_bias(values(&format!("{module}.bias"), &[n])?);
        }
        Ok(linear)
    }

    /// The bias `[n]`, if there is one.
    pub fn bias(&self) -> Option<Vec<f32>> {
        self.bias.as_ref().map(|b| host(b.val()))
    }

    /// Gives the layer a bias `[n]`, or replaces it.
    pub fn set_bias(&mut self, bias: Vec<f32>) {
        let n = bias.len();
        let bias = Tensor::from_data(TensorData::new(bias, [n]), &self.weight.val().device());
        self.bias = Some(Param::from_tensor(bias));
    }

    /// Excludes the bias from training.
    pub fn freeze_bias(&mut self) {
        self.bias = self.bias.take().map(Module::no_grad);
    }

    /// Whether, and how, the forward pass sees the weight on a grid.
    pub fn quant(&self) -> Option<&QuantArgs> {
        self.quant.as_ref()
    }

    /// The weight `[n, k]`, row major, its adapter merged in (not the fake-quantized one).
    pub fn values(&self) -> Vec<f32> {
        host(self.latent_weight())
    }

    /// Replaces the weight, `[n, k]`, row major; same shape. An adapter is dropped.
    pub fn set_values(&mut self, weight: Vec<f32>) {
        let old = self.weight.val();
        self.weight = Param::from_tensor(Tensor::from_data(TensorData::new(weight, old.dims()), &old.device()));
        self.lora = None;
    }

    /// Freezes the weight and trains an adapter of it in its place.
    pub fn set_lora(&mut self, lora: Lora) {
        self.weight = self.weight.clone().no_grad();
        self.lora = Some(lora);
    }

    /// The adapter, if there is one.
    pub fn lora(&self) -> Option<&Lora> {
        self.lora.as_ref()
    }

    /// Puts the adapter into the weight, for good: codes and outputs stay the same bits.
    pub fn merge_lora(&mut self) {
        if self.lora.is_some() {
            self.set_values(self.values());
        }
    }

    /// The weight `[n, k]` that is put on the grid: with the adapter merged in.
    fn latent_weight(&self) -> Tensor<2> {
        match &self.lora {
            None => self.weight.val(),
            Some(lora) => lora.merged(self.weight.val()),
        }
    }

    /// Switches fake quantization of the weight on, by its own ranges, or off. The caller has checked the shape
    /// ([`crate::fake_quant::check_shape`]).
    pub fn set_quant(&mut self, quant: Option<QuantArgs>) {
        self.quant = quant;
        self.global = None;
        self.grid = None;
        self.codes = false;
        self.blocks = None;
    }

    /// Puts the weight on blocks of GGUF instead of the codes that [`Linear::set_quant`] has named before.
    ///
    /// # Errors
    /// As [`fake_quant_gguf`].
    pub fn set_blocks(&mut self, grid: GgufGrid) -> Result<(), QuantError> {
        let k = self.weight.dims()[1];
        if !k.is_multiple_of(grid.block_len()) {
            return Err(QuantError::GroupNotDividing { k, group_size: grid.block_len() });
        }
        // No values: whether there is an encoder.
        grid.quantize(&[])?;
        self.blocks = Some(grid);
        Ok(())
    }

    /// What ships of a weight on blocks of GGUF: the grid and the blocks of the forward pass, row by row; `None` elsewhere.
    ///
    /// # Errors
    /// As [`GgufGrid::quantize`].
    pub fn quantized_blocks(&self) -> Result<Option<(GgufGrid, Vec<u8>)>, QuantError> {
        let Some(grid) = self.blocks else { return Ok(None) };
        Ok(Some((grid, dsq_kernels::quantize::quantize_blocks(grid, &self.values())?)))
    }

    /// Gives fake quantization by ranges the global scale that layers share (of schemes that have one).
    pub fn set_global_scale(&mut self, global: f32) {
        self.global = Some(global);
    }

    /// The largest magnitude of the weight, its adapter merged in.
    pub fn largest_magnitude(&self) -> f32 {
        dsq_kernels::fake_quant::largest_magnitude(&self.values())
    }

    /// Switches fake quantization of the input on or off. What was learned of its grid is dropped.
    pub fn set_inputs(&mut self, inputs: Option<InputGrid>) {
        self.inputs = inputs;
        self.input = None;
    }

    /// How the input is put on a grid; `None`: not at all. Where that grid is learned, as [`Linear::follow_input`] was told last.
    pub fn inputs(&self) -> Option<&InputGrid> {
        self.inputs.as_ref()
    }

    /// Makes the stored scale and zero point of the input's grid parameters of their own, starting where they are. Nothing happens
    /// where nothing is stored.
    pub fn learn_inputs(&mut self) {
        let device = self.weight.val().device();
        self.input = self.inputs.as_ref().and_then(|grid| LearnedInput::start(grid, &device));
    }

    /// The learned grid of the input, if there is one.
    pub fn learned_input(&self) -> Option<&LearnedInput> {
        self.input.as_ref()
    }

    /// Replaces the learned grid of the input.
    pub fn set_learned_input(&mut self, input: LearnedInput) {
        self.input = Some(input);
    }

    /// Tells the layer what ships for the learned grid of its input, which it or the layer that holds the grid has.
    pub fn follow_input(&mut self, grid: InputGrid) {
        self.inputs = Some(grid);
    }

    /// Makes the scales and zero points parameters of their own, starting where the grid of the present weight has the
    /// least squared error. Nothing happens without fake quantization.
    ///
    /// # Errors
    /// As [`QuantizedMatrix::qparams_of`].
    pub fn learn_grid(&mut self) -> Result<(), QuantError> {
        if let Some(args) = self.quant {
            let [n, k] = self.weight.dims();
            args.learned_shape(n, k)?;
            let init = QuantArgs { observer: WeightObserver::Mse, ..args };
            let values = self.values();
            let own = || QuantArgs::global_scale(dsq_kernels::fake_quant::largest_magnitude(&values));
            let global = args.has_global_scale().then(|| self.global.unwrap_or_else(own));
            let params = match global {
                None => dsq_kernels::quantize::qparams_of(&values, n, k, init)?,
                Some(_) => QuantizedMatrix::qparams_under(&values, n, k, init, global)?,
            };
            let grid = LearnedGrid::new(&params, args.mapping, &self.weight.val().device());
            self.grid = Some(grid.under(global));
        }
        Ok(())
    }

    /// The learned scales and zero points, if there are such.
    pub fn grid(&self) -> Option<&LearnedGrid> {
        self.grid.as_ref()
    }

    /// Replaces the learned scales and zero points.
    pub fn set_grid(&mut self, grid: LearnedGrid) {
        self.grid = Some(grid);
    }

    /// Trains `weight` (as the layer's, `[n, k]`) and a grid that starts at the one of `matrix`.
    pub fn learn_from(&mut self, weight: Vec<f32>, matrix: &QuantizedMatrix) {
        self.set_values(weight);
        self.set_quant(Some(matrix.args));
        let params: Vec<_> = (0..matrix.scales.len()).map(|i| matrix.qparams(i)).collect();
        let grid = LearnedGrid::new(&params, matrix.args.mapping, &self.weight.val().device());
        self.grid = Some(grid.under(matrix.global_scale));
    }

    /// Puts the codes of a matrix in the place of the weight, for good: from here on only their scales are trained. The
    /// weight must not be read as one any more.
    pub fn freeze_codes(&mut self, matrix: &QuantizedMatrix) {
        let mut codes = Vec::with_capacity(matrix.codes.len());
        for (i, run) in matrix.args.runs(matrix.n, matrix.k) {
            let zero = matrix.qparams(i).zero;
            // `+ 0.0`: a float code of -0 becomes the 0 that its value is quantized to.
            codes.extend(matrix.codes[run].iter().map(|&q| matrix.args.code_value(q, zero) + 0.0));
        }
        self.learn_from(codes, matrix);
        self.weight = self.weight.clone().no_grad();
        self.codes = true;
    }

    /// What ships: the codes, scales and zero points of the forward pass; `None` without fake quantization, and on blocks of GGUF
    /// ([`Linear::quantized_blocks`]).
    ///
    /// # Errors
    /// As [`QuantizedMatrix::quantize`] and [`QuantizedMatrix::quantize_with`].
    pub fn quantized(&self) -> Result<Option<QuantizedMatrix>, QuantError> {
        let Some(args) = self.quant.filter(|_| self.blocks.is_none()) else { return Ok(None) };
        let ([n, k], mut values) = (self.weight.dims(), self.values());
        if let (true, Some(grid)) = (self.codes, &self.grid) {
            // A code is the nearest one to its own value: the quotient is off by far less than a half.
            grid.dequantize(&mut values, k, &args);
        }
        match (&self.grid, self.global) {
            (None, None) => dsq_kernels::quantize::quantize(&values, n, k, args),
            (None, global) => QuantizedMatrix::quantize_under(&values, n, k, args, global),
            (Some(grid), _) if grid.global().is_some() => {
                QuantizedMatrix::quantize_on(&values, n, k, args, &grid.qparams(&args), grid.global())
            }
            (Some(grid), _) => dsq_kernels::quantize::quantize_with(&values, n, k, args, &grid.qparams(&args)),
        }
        .map(Some)
    }

    /// The weight that the forward pass multiplies with: on the grid when fake quantization is on.
    pub fn effective_weight(&self) -> Tensor<2> {
        if let Some(grid) = self.blocks {
            let weight = self.latent_weight();
            return fake_quant_gguf(weight, grid).expect("set_blocks has checked the shape and the grid");
        }
        match (&self.quant, &self.grid) {
            (Some(args), Some(grid)) if self.codes => grid.scaled_codes(self.weight.val(), args),
            (Some(args), Some(grid)) => grid.fake_quant(self.latent_weight(), args),
            (Some(args), None) => fake_quant_weight_under(self.latent_weight(), args, self.global),
            (None, _) => self.latent_weight(),
        }
    }

    /// `x [.., k]` to `[.., n]`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.multiply(self.input(x))
    }

    /// `x [.., k]` as the layer multiplies it: on the learned or the stored grid, or each token on its own, when fake quantization of the
    /// input is on.
    fn input<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let Some(InputGrid { args, params }) = &self.inputs else { return x };
        if let Some(learned) = &self.input {
            return learned.fake_quant(x, args);
        }
        if let Some(p) = params {
            return fake_quant_activation(x, args, *p);
        }
        let dims = x.dims();
        let k = dims[D - 1];
        let rows = dims[..D - 1].iter().product();
        fake_quant_weight(x.reshape([rows, k]), args).reshape(dims)
    }

    fn multiply<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let y = ops::linear::linear(x, self.effective_weight());
        match &self.bias {
            None => y,
            Some(bias) => y + bias.val().unsqueeze::<D>(),
        }
    }
}

/// The outputs of layers that read one tensor `x [.., k]`; where they take it in one form, it is made once.
pub(crate) fn forward_many<const D: usize, const N: usize>(layers: [&Linear; N], x: Tensor<D>) -> [Tensor<D>; N] {
    if layers.iter().all(|l| l.inputs == layers[0].inputs) {
        let x = layers[0].input(x);
        return layers.map(|l| l.multiply(x.clone()));
    }
    layers.map(|l| l.forward(x.clone()))
}

/// RMSNorm over the last dimension.
#[derive(Module, Debug)]
pub struct RmsNorm {
    /// Weight `[d]`.
    pub weight: Param<Tensor<1>>,
    #[module(skip)]
    eps: f32,
}

impl RmsNorm {
    /// From a weight `[d]`.
    pub fn from_values(weight: Vec<f32>, eps: f32, device: &Device) -> Self {
        let d = weight.len();
        Self { weight: Param::from_tensor(Tensor::from_data(TensorData::new(weight, [d]), device)), eps }
    }

    /// The weight `[d]`.
    pub fn values(&self) -> Vec<f32> {
        host(self.weight.val())
    }

    /// Replaces the weight, `[d]`.
    pub fn set_values(&mut self, weight: Vec<f32>) {
        *self = Self::from_values(weight, self.eps, &self.weight.val().device());
    }

    /// `x / sqrt(mean(x^2) + eps) * weight`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        ops::rms_norm::rms_norm(x, self.weight.val(), self.eps)
    }
}

/// An embedding table `[v, d]`, also the output matrix of a tied model. Never quantized.
#[derive(Module, Debug)]
pub struct Embedding {
    /// Table `[v, d]`.
    pub weight: Param<Tensor<2>>,
}

impl Embedding {
    /// Rows `[b, t, d]` of `b` sequences of one length.
    ///
    /// # Panics
    /// When an id lies outside the table.
    pub fn forward(&self, ids: Arc<Vec<i32>>, b: usize) -> Tensor<3> {
        ops::embedding::embedding(self.weight.val(), ids, b)
    }

    /// From a table `[v, d]`, row major.
    pub fn from_values(weight: Vec<f32>, [v, d]: [usize; 2], device: &Device) -> Self {
        Self { weight: Param::from_tensor(Tensor::from_data(TensorData::new(weight, [v, d]), device)) }
    }
}

/// The feed-forward block `down(silu(gate(x)) * up(x))`.
#[derive(Module, Debug)]
pub struct SwiGlu {
    /// `[ffn, d]`.
    pub gate_proj: Linear,
    /// `[ffn, d]`.
    pub up_proj: Linear,
    /// `[d, ffn]`.
    pub down_proj: Linear,
}

impl SwiGlu {
    /// The block of width `ffn` in layer `i`, whose gate, up and down have the ends `names`.
    pub(crate) fn build<E>(
        config: &LlamaConfig,
        i: usize,
        names: [String; 3],
        ffn: usize,
        device: &Device,
        values: &mut impl FnMut(&str, &[usize]) -> Result<Vec<f32>, E>,
    ) -> Result<Self, E> {
        let (d, [gate, up, down]) = (config.hidden_size, names);
        Ok(Self {
            gate_proj: Linear::build(config, i, &gate, [ffn, d], device, values)?,
            up_proj: Linear::build(config, i, &up, [ffn, d], device, values)?,
            down_proj: Linear::build(config, i, &down, [d, ffn], device, values)?,
        })
    }

    /// Gate, up and down.
    pub(crate) fn linears(&self) -> [&Linear; 3] {
        [&self.gate_proj, &self.up_proj, &self.down_proj]
    }

    /// [`SwiGlu::linears`], to change them.
    pub(crate) fn linears_mut(&mut self) -> [&mut Linear; 3] {
        [&mut self.gate_proj, &mut self.up_proj, &mut self.down_proj]
    }

    /// `x [.., d]` to `[.., d]`.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        self.down_proj.forward(self.inner(x))
    }

    /// The input `[.., ffn]` of `down`, from `x [.., d]`: `silu(gate(x)) * up(x)`.
    pub fn inner<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let [gate, up] = forward_many([&self.gate_proj, &self.up_proj], x);
        ops::swiglu::silu_mul(gate, up)
    }
}
