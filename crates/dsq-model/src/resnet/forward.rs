//! The forward pass, in float and with fake quantization, and the leaves that carry gradients.
//!
//! Fake quantization works in the code domain: a quantized convolution multiplies integers held in f32 (`code - zero` of
//! the input, codes of the weight), and the scales come after it. Where every partial sum is an integer of at most 2^24 (with
//! weights of four bits practically always), the convolution is exact in whatever order it is summed, and the epilogue
//! `sum * (scale_w * scale_x) + bias` is one multiplication and one addition: the runtime's i32 path gives the same bits.
//! Where sums could be larger, the runtime runs the same f32 convolution.

use super::grids::{GridLeaves, best_grid, gradient_factor};
use super::prepare::{BnPlacement, LayerPlan, Prepared};
use super::{BN_MOMENTUM, ResNet, ops};
use crate::RangeObserver;
use burn::tensor::activation::relu;
use burn::tensor::{Device, Gradients, Tensor, TensorData};
use dsq_quant::{QParams, QuantArgs, QuantError, QuantizedMatrix};

/// Which forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// Float with batch statistics.
    FloatTrain,
    /// Float with running statistics.
    FloatEval,
    /// As [`Pass::FloatEval`], and every site observes.
    Calibrate,
    /// As [`Pass::FloatEval`], and every site finds its grid of least squared error (see [`ResNet::start_grids`]).
    StartGrids,
    /// Fake quantization.
    QatTrain {
        /// Use the running statistics and leave them alone (only where batch norm is skipped: observed batch norm stays live).
        bn_frozen: bool,
        /// Leave the activation ranges alone.
        ranges_frozen: bool,
    },
    /// Fake quantization with running statistics and the ranges as they are.
    QatEval,
}

/// What a pass wants to write back: the trainer gives it to [`ResNet::apply`] before the next pass that observes, which starts
/// from there.
#[derive(Debug, Default)]
pub struct Updates {
    /// Layer, batch mean, unbiased batch variance.
    norms: Vec<(usize, Vec<f32>, Vec<f32>)>,
    /// Site and its observer, this batch seen.
    observers: Vec<(usize, RangeObserver)>,
    /// Site and its grid of least squared error.
    pub(super) grids: Vec<(usize, QParams)>,
}

/// The parameters as tensors.
#[derive(Debug)]
pub struct Leaves {
    layers: Vec<Leaf>,
    grids: GridLeaves,
    device: Device,
}

#[derive(Debug)]
struct Leaf {
    weight: Tensor<4>,
    gamma: Option<Tensor<1>>,
    shift: Tensor<1>,
}

impl Leaves {
    /// The gradients, in the order of [`ResNet::params_mut`]; zeros where the loss does not depend on a parameter.
    pub fn gradients(&self, grads: &Gradients) -> Vec<Vec<f32>> {
        fn values<const D: usize>(leaf: &Tensor<D>, grads: &Gradients) -> Vec<f32> {
            let len = leaf.dims().iter().product();
            leaf.grad(grads).and_then(|g| g.into_data().try_into_vec().ok()).unwrap_or_else(|| vec![0.0; len])
        }
        let mut out = Vec::new();
        for leaf in &self.layers {
            out.push(values(&leaf.weight, grads));
            out.extend(leaf.gamma.as_ref().map(|g| values(g, grads)));
            out.push(values(&leaf.shift, grads));
        }
        out.extend(self.grids.each().map(|grid| values(grid, grads)));
        out
    }

    fn vector(&self, data: Vec<f32>) -> Tensor<1> {
        let len = data.len();
        Tensor::from_data(TensorData::new(data, [len]), &self.device)
    }
}

/// A convolution's input: as it is, or codes on a grid and their scale `[1]`.
#[derive(Clone)]
struct Input {
    x: Tensor<4>,
    scale: Option<Tensor<1>>,
}

impl ResNet {
    /// The parameters as tensors on `device`; on an autodiff device they collect gradients.
    pub fn leaves(&self, device: &Device) -> Leaves {
        let track = device.is_autodiff();
        let vector = |v: &Vec<f32>| {
            let t = Tensor::<1>::from_data(TensorData::new(v.clone(), [v.len()]), device);
            if track { t.require_grad() } else { t }
        };
        let layers = self
            .layers
            .iter()
            .map(|l| {
                let weight = Tensor::<4>::from_data(TensorData::new(l.weight.clone(), l.shape), device);
                Leaf {
                    weight: if track { weight.require_grad() } else { weight },
                    gamma: l.norm.as_ref().map(|n| vector(&n.gamma)),
                    shift: vector(&l.shift),
                }
            })
            .collect();
        let grids = self.prepared.as_ref().and_then(|p| p.grids.as_ref()).map(|g| g.leaves(device));
        Leaves { layers, grids: grids.unwrap_or_default(), device: device.clone() }
    }

    /// Logits `[m, classes]` of normalized pictures `[m, c, h, w]`.
    ///
    /// # Errors
    /// [`QuantError::Setting`] for a QAT pass before preparation or calibration, [`QuantError`] from weights or ranges that have
    /// no grid.
    pub fn forward(
        &self,
        leaves: &Leaves,
        images: Tensor<4>,
        pass: Pass,
        updates: &mut Updates,
    ) -> Result<Tensor<2>, QuantError> {
        let mut x = images.permute([0, 2, 3, 1]);
        let mut run = Run { net: self, leaves, pass, updates };
        let input = run.input(0, x)?;
        x = relu(run.conv(0, input)?);
        for block in &self.blocks {
            let input = run.input(block.conv1, x.clone())?;
            let y = relu(run.conv(block.conv1, input.clone())?);
            let y = run.input(block.conv2, y)?;
            let y = run.conv(block.conv2, y)?;
            let skip = match block.downsample {
                // One tensor and one grid, unless one of the two layers stays in float.
                Some(d) if run.plan(d)?.input == run.plan(block.conv1)?.input => run.conv(d, input)?,
                Some(d) => {
                    let input = run.input(d, x)?;
                    run.conv(d, input)?
                }
                None => x,
            };
            x = relu(y + skip);
        }
        let last = self.layers.len() - 1;
        let input = run.input(last, ops::mean_pool(x))?;
        let logits = run.conv(last, input)?;
        let [m, _, _, n] = logits.dims();
        Ok(logits.reshape([m, n]))
    }

    /// [`ResNet::forward`] on the CPU without gradients, from slices: logits `[m, classes]` of normalized pictures
    /// `[m, c, h, w]` (the square side of the config; values behind the last whole picture are left out).
    ///
    /// # Errors
    /// As [`ResNet::forward`].
    pub fn logits(&self, images: &[f32], pass: Pass, updates: &mut Updates) -> Result<Vec<f32>, QuantError> {
        let (c, side) = (self.config.in_channels, self.config.image_size);
        let m = images.len() / (c * side * side).max(1);
        let device = Device::flex();
        let data = images[..m * c * side * side].to_vec();
        let x = Tensor::<4>::from_data(TensorData::new(data, [m, c, side, side]), &device);
        let y = self.forward(&self.leaves(&device), x, pass, updates)?;
        Ok(y.into_data().try_into_vec::<f32>().unwrap_or_default())
    }

    /// Writes running statistics and observers back.
    pub fn apply(&mut self, updates: Updates) {
        for (layer, mean, var) in updates.norms {
            if let Some(norm) = &mut self.layers[layer].norm {
                let blend = |old: &mut Vec<f32>, new: &[f32]| {
                    old.iter_mut().zip(new).for_each(|(o, n)| *o = *o * (1.0 - BN_MOMENTUM) + n * BN_MOMENTUM);
                };
                blend(&mut norm.mean, &mean);
                blend(&mut norm.var, &var);
            }
        }
        if let Some(prepared) = &mut self.prepared {
            for (site, observer) in updates.observers {
                prepared.sites[site].observer = observer;
            }
        }
    }
}

#[cfg(test)]
impl ResNet {
    /// One layer with its input quantization, in the frozen QAT pass.
    pub(super) fn conv_for_test(&self, leaves: &Leaves, i: usize, x: Tensor<4>) -> Result<Tensor<4>, QuantError> {
        let mut updates = Updates::default();
        let pass = Pass::QatTrain { bn_frozen: true, ranges_frozen: true };
        let mut run = Run { net: self, leaves, pass, updates: &mut updates };
        let input = run.input(i, x)?;
        run.conv(i, input)
    }
}

#[cfg(test)]
impl Updates {
    pub(super) fn norm_layers(&self) -> Vec<usize> {
        self.norms.iter().map(|n| n.0).collect()
    }
}

/// One forward pass.
struct Run<'a> {
    net: &'a ResNet,
    leaves: &'a Leaves,
    pass: Pass,
    updates: &'a mut Updates,
}

impl Run<'_> {
    /// The preparation, for the passes that need one.
    fn prepared(&self) -> Result<Option<&Prepared>, QuantError> {
        if matches!(self.pass, Pass::FloatTrain | Pass::FloatEval) {
            return Ok(None);
        }
        self.net.prepared.as_ref().map(Some).ok_or_else(|| QuantError::Setting {
            field: "pass",
            expected: "a prepared network".into(),
            got: "a float one".into(),
        })
    }

    fn plan(&self, layer: usize) -> Result<LayerPlan, QuantError> {
        Ok(self.prepared()?.map_or_else(LayerPlan::default, |p| p.layers[layer].clone()))
    }

    /// Observes `x` where the pass says so; the grid to quantize it on, or `None` in float passes.
    fn grid(&mut self, site: Option<usize>, x: &Tensor<4>) -> Result<Option<(QuantArgs, QParams)>, QuantError> {
        let Some(site) = site else { return Ok(None) };
        let Some(prepared) = self.prepared()? else { return Ok(None) };
        let args = prepared.sites[site].args;
        let mut observer = prepared.sites[site].observer.clone();
        let observes = matches!(self.pass, Pass::Calibrate | Pass::QatTrain { ranges_frozen: false, .. });
        if observes {
            observer.observe(x)?;
            self.updates.observers.push((site, observer.clone()));
        }
        if self.pass == Pass::StartGrids {
            let values = x.clone().into_data().try_into_vec::<f32>().unwrap_or_default();
            let grid = best_grid(&values, &args)?;
            self.updates.grids.push((site, grid));
        }
        if self.in_float() {
            return Ok(None);
        }
        Ok(Some((args, observer.qparams(&args)?)))
    }

    /// Whether the pass quantizes nothing, although the network is prepared.
    fn in_float(&self) -> bool {
        matches!(self.pass, Pass::Calibrate | Pass::StartGrids)
    }

    /// `x` as codes on the learned grid of a site, if it has one and the pass uses it.
    fn learned_input(&self, site: Option<usize>, x: &Tensor<4>) -> Result<Option<Input>, QuantError> {
        let (Some(site), Some(prepared)) = (site, self.prepared()?) else { return Ok(None) };
        let Some((scale, zero)) = self.leaves.grids.sites.get(site).filter(|_| !self.in_float()) else {
            return Ok(None);
        };
        let args = prepared.sites[site].args;
        let by = gradient_factor(x.dims()[1..].iter().product(), &args);
        let scale = ops::shipped_scale(ops::scale_gradient(scale.clone(), by), args);
        let zero = zero.clone().map(|z| ops::scale_gradient(z, by));
        Ok(Some(Input { x: ops::learned_codes(x.clone(), args, scale.clone(), zero), scale: Some(scale) }))
    }

    /// The input of layer `i`, quantized where the layer is.
    fn input(&mut self, i: usize, x: Tensor<4>) -> Result<Input, QuantError> {
        let site = self.plan(i)?.input;
        if let Some(input) = self.learned_input(site, &x)? {
            return Ok(input);
        }
        Ok(match self.grid(site, &x)? {
            Some((args, p)) => {
                let scale = Some(self.leaves.vector(vec![p.scale]));
                Input { x: ops::codes(x, args, vec![p]), scale }
            }
            None => Input { x, scale: None },
        })
    }

    /// Quantizes and dequantizes an activation (the wrong way's extra sites).
    fn fake(&mut self, site: Option<usize>, x: Tensor<4>) -> Result<Tensor<4>, QuantError> {
        Ok(match self.grid(site, &x)? {
            Some((args, p)) => ops::codes(x, args, vec![p]).mul_scalar(p.scale),
            None => x,
        })
    }

    /// Convolution and batch norm of layer `i`.
    fn conv(&mut self, i: usize, x: Input) -> Result<Tensor<4>, QuantError> {
        let plan = self.plan(i)?;
        let placement = self.prepared()?.map_or(BnPlacement::Skipped, |p| p.settings.placement);
        let live = match self.pass {
            Pass::FloatTrain => true,
            Pass::QatTrain { bn_frozen, .. } => !bn_frozen || placement != BnPlacement::Skipped,
            Pass::FloatEval | Pass::Calibrate | Pass::StartGrids | Pass::QatEval => false,
        };
        let fold =
            placement == BnPlacement::Skipped && (!live || (plan.scheme.is_some() && self.pass != Pass::FloatTrain));
        let (layer, leaf) = (&self.net.layers[i], &self.leaves.layers[i]);
        let eps = self.net.config.norm_eps;
        let (stride, pad, n) = (layer.stride, layer.pad, layer.shape[0]);
        let zero = self.leaves.vector(vec![0.0; n]);
        // The folding factor gamma / sqrt(var + eps), with gamma's gradient; statistics are constants here.
        let factor = match (&layer.norm, &leaf.gamma) {
            (Some(norm), Some(gamma)) => {
                let std = norm.var.iter().map(|v| (v + eps).sqrt()).collect();
                Some(gamma.clone() / self.leaves.vector(std))
            }
            _ => None,
        };
        // With live statistics the factor only chooses the grid, and is divided out again behind the convolution: it is a
        // constant there, or a gamma near zero would blow up its own gradient.
        let factor = if live { factor.map(Tensor::detach) } else { factor };
        let (weight, host) = match (&factor, fold) {
            (Some(f), true) => (leaf.weight.clone() * f.clone().reshape([n, 1, 1, 1]), layer.folded(eps).0),
            _ => (leaf.weight.clone(), layer.weight.clone()),
        };
        // The products of the two scales, `[n]`; None where nothing is quantized.
        let Input { x, scale: input_scale } = x;
        let (y, scales) = match plan.scheme.filter(|_| !self.in_float()) {
            Some(scheme) => {
                let args = scheme.weights;
                let (codes, scale) = match self.leaves.grids.weights.get(i).cloned().flatten() {
                    Some(t) => {
                        let per_channel = factor.as_ref().filter(|_| fold && t.dims() == [n]);
                        let t = ops::scale_gradient(t.clone(), gradient_factor(host.len() / t.dims()[0], &args));
                        let scale = per_channel.map_or(t.clone(), |f| t * f.clone().abs());
                        let scale = ops::shipped_scale(scale, args);
                        (ops::learned_codes(weight, args, scale.clone(), None), scale)
                    }
                    None => {
                        let params = QuantizedMatrix::qparams_of(&host, n, host.len() / n, args)?;
                        let scale = self.leaves.vector(params.iter().map(|p| p.scale).collect());
                        (ops::codes(weight, args, params), scale)
                    }
                };
                let scale = if scale.dims() == [n] { scale } else { scale.repeat(&[n]) };
                let scale = input_scale.map_or(scale.clone(), |s| scale * s);
                (ops::conv2d(x, codes, stride, pad), Some(scale))
            }
            // Only what a quantized layer reads is codes.
            None => (ops::conv2d(x, weight, stride, pad), None),
        };
        let scale = scales.clone().unwrap_or_else(|| self.leaves.vector(vec![1.0; n]));
        let (Some(norm), Some(factor), Some(gamma)) = (&layer.norm, factor, &leaf.gamma) else {
            return Ok(ops::affine(y, scale, leaf.shift.clone()));
        };
        // beta - mean * factor, the bias that folding leaves.
        let shift = |factor: Tensor<1>| leaf.shift.clone() - self.leaves.vector(norm.mean.clone()) * factor;
        if fold && !live {
            return Ok(ops::affine(y, scale, shift(factor)));
        }
        let y = if fold {
            // Batch statistics of the unfolded convolution. A channel whose factor is 0 is all zeros either way.
            let unfold = layer.fold_factor(eps).unwrap_or_default();
            let unfold = unfold.iter().map(|f| if *f == 0.0 { 0.0 } else { 1.0 / f }).collect();
            ops::affine(y, scale * self.leaves.vector(unfold), zero)
        } else if scales.is_some() {
            ops::affine(y, scale, zero)
        } else {
            y
        };
        let y = self.fake(plan.conv_output, y)?;
        let y = if live {
            let rows: usize = y.dims()[..3].iter().product();
            let (y, mean, var) = ops::batch_norm(y, gamma.clone(), leaf.shift.clone(), eps);
            // PyTorch keeps the unbiased variance.
            let unbiased = rows as f32 / (rows.max(2) - 1) as f32;
            self.updates.norms.push((i, mean, var.into_iter().map(|v| v * unbiased).collect()));
            y
        } else {
            let shift = shift(factor.clone());
            ops::affine(y, factor, shift)
        };
        self.fake(plan.bn_output, y)
    }
}
