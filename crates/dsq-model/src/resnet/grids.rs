//! Learned grids of the network: the scales of weights and activations (LSQ) and the zero points of activations that have
//! a sign (LSQ+), as parameters. The formulas are `dsq_quant`'s. Not the operations that use them (see `ops.rs`) and not how
//! fast they move (see `dsq-train`).
//!
//! A weight's scale for each channel is kept as a multiple `t` of the size of batch norm's folding factor: what ships is
//! `t * |gamma / sqrt(var + eps)|`, rounded to its dtype. So codes stay where they are when the running statistics move, and
//! the weight that batch statistics normalize is the one that ships. A scale for the whole tensor is kept as it ships.

use super::prepare::{LayerPlan, Site};
use super::{GridPart, Layer, ParamMut, ResNet, Updates};
use crate::resnet::Pass;
use burn::tensor::{Device, Tensor, TensorData};
use dsq_quant::{FloatType, Mapping, QParams, QuantArgs, QuantError, WeightObserver};

/// Every learned scale and zero point; not a number until [`ResNet::start_grids`].
#[derive(Debug, Clone)]
pub(super) struct Grids {
    /// For each layer the scales of its weight, where that is quantized.
    weights: Vec<Option<Vec<f32>>>,
    /// For each site.
    sites: Vec<SiteGrid>,
}

#[derive(Debug, Clone)]
struct SiteGrid {
    /// `[1]`.
    scale: Vec<f32>,
    /// `[1]`, not rounded; `None` where values are never negative: the smallest code then stands for 0.
    zero: Option<Vec<f32>>,
}

/// [`Grids`] as tensors.
#[derive(Debug, Default)]
pub(super) struct GridLeaves {
    pub weights: Vec<Option<Tensor<1>>>,
    pub sites: Vec<(Tensor<1>, Option<Tensor<1>>)>,
}

impl Grids {
    /// Room for the grids of these layers and sites.
    ///
    /// # Errors
    /// [`QuantError::Setting`] for a scheme whose scales cannot be learned.
    pub(super) fn new(layers: &[Layer], plans: &[LayerPlan], sites: &[Site]) -> Result<Self, QuantError> {
        let mut weights = Vec::new();
        for (layer, plan) in layers.iter().zip(plans) {
            weights.push(match plan.scheme {
                None => None,
                Some(scheme) => {
                    let [rows, groups] = scheme.weights.learned_shape(layer.shape[0], layer.k())?;
                    if scheme.weights.mapping == Mapping::Asymmetric {
                        let (expected, got) = ("symmetric weights for learned scales".into(), "asymmetric".into());
                        return Err(QuantError::Setting { field: "mapping", expected, got });
                    }
                    Some(vec![f32::NAN; rows * groups])
                }
            });
        }
        let site = |s: &Site| {
            s.args.learned_shape(1, 1)?;
            if s.args.qtype.float().is_some() {
                let (expected, got) = ("integer codes for an image model".into(), s.args.qtype.name().into());
                return Err(QuantError::Setting { field: "activations", expected, got });
            }
            let zero = (s.signed && s.args.mapping == Mapping::Asymmetric).then(|| vec![f32::NAN]);
            Ok(SiteGrid { scale: vec![f32::NAN], zero })
        };
        Ok(Self { weights, sites: sites.iter().map(site).collect::<Result<_, QuantError>>()? })
    }

    /// The parameters that ship for the weight of `layers[i]`, one for each scale.
    pub(super) fn weight(&self, i: usize, layer: &Layer, args: &QuantArgs, eps: f32) -> Option<Vec<QParams>> {
        let scales = self.weights[i].as_ref()?;
        let factor = layer.fold_factor(eps).filter(|f| f.len() == scales.len());
        let scale = |(j, &t): (usize, &f32)| t * factor.as_ref().map_or(1.0, |f| f[j].abs());
        Some(scales.iter().enumerate().map(|t| args.learned_qparams(scale(t), 0.0)).collect())
    }

    /// The parameters that ship for a site.
    pub(super) fn site(&self, i: usize, args: &QuantArgs) -> QParams {
        let grid = &self.sites[i];
        let smallest = args.qtype.qmin() as f32;
        args.learned_qparams(grid.scale[0], grid.zero.as_ref().map_or(smallest, |z| z[0]))
    }

    fn set_site(&mut self, i: usize, p: QParams) {
        let grid = &mut self.sites[i];
        grid.scale = vec![p.scale];
        grid.zero.iter_mut().for_each(|z| *z = vec![p.zero as f32]);
    }

    pub(super) fn leaves(&self, device: &Device) -> GridLeaves {
        let vector = |v: &Vec<f32>| {
            let t = Tensor::<1>::from_data(TensorData::new(v.clone(), [v.len()]), device);
            if device.is_autodiff() { t.require_grad() } else { t }
        };
        GridLeaves {
            weights: self.weights.iter().map(|w| w.as_ref().map(vector)).collect(),
            sites: self.sites.iter().map(|s| (vector(&s.scale), s.zero.as_ref().map(vector))).collect(),
        }
    }

    /// In the order of [`GridLeaves::each`].
    pub(super) fn params_mut<'a>(&'a mut self, layers: &[String], sites: &[Site]) -> Vec<ParamMut<'a>> {
        let mut out = Vec::new();
        for (scales, module) in self.weights.iter_mut().zip(layers) {
            let name = format!("{module}.weight.grid.scale");
            out.extend(scales.iter_mut().map(|data| ParamMut {
                name: name.clone(),
                data,
                decay: false,
                grid: Some(GridPart::Scale),
            }));
        }
        for (grid, site) in self.sites.iter_mut().zip(sites) {
            let largest = f64::from(site.args.qtype.qmax());
            let name = format!("{}.grid.scale", site.name);
            out.push(ParamMut { name, data: &mut grid.scale, decay: false, grid: Some(GridPart::Scale) });
            out.extend(grid.zero.iter_mut().map(|data| ParamMut {
                name: format!("{}.grid.zero", site.name),
                data,
                decay: false,
                grid: Some(GridPart::Zero { largest }),
            }));
        }
        out
    }
}

impl GridLeaves {
    /// Every tensor, in order.
    pub(super) fn each(&self) -> impl Iterator<Item = &Tensor<1>> {
        let sites = self.sites.iter().flat_map(|(scale, zero)| std::iter::once(scale).chain(zero));
        self.weights.iter().flatten().chain(sites)
    }
}

/// LSQ's factor of a scale's gradient, for a scale of `values` values: their number in one picture for activations, because
/// the loss is a mean over pictures.
pub(super) fn gradient_factor(values: usize, args: &QuantArgs) -> f32 {
    1.0 / (values.max(1) as f32 * args.qtype.qmax() as f32).sqrt()
}

/// The grid of least squared error of a tensor.
pub(super) fn best_grid(x: &[f32], args: &QuantArgs) -> Result<QParams, QuantError> {
    let args = QuantArgs { observer: WeightObserver::Mse, ..*args };
    let params = dsq_kernels::quantize::qparams_of(x, 1, x.len(), args)?;
    params.first().copied().ok_or(QuantError::Length { what: "scales", expected: 1, got: 0 })
}

impl ResNet {
    /// Starts the learned grids where weights and activations of the float network have the least squared error: the
    /// activations of these normalized pictures `[m, c, h, w]`. Nothing happens without learned grids.
    ///
    /// # Errors
    /// [`QuantError`] from weights or activations that have no grid.
    pub fn start_grids(&mut self, images: &[f32]) -> Result<(), QuantError> {
        let Some(mut grids) = self.prepared.as_ref().and_then(|p| p.grids.clone()) else { return Ok(()) };
        let eps = self.config.norm_eps;
        let mut updates = Updates::default();
        self.logits(images, Pass::StartGrids, &mut updates)?;
        updates.grids.iter().for_each(|&(site, p)| grids.set_site(site, p));
        let plans = self.prepared.iter().flat_map(|p| &p.layers);
        for ((layer, plan), scales) in self.layers.iter().zip(plans).zip(&mut grids.weights) {
            let (Some(scheme), Some(scales)) = (plan.scheme, scales) else { continue };
            let (n, k) = (layer.shape[0], layer.k());
            let values = match layer.fold_factor(eps).filter(|_| scales.len() == n) {
                // What is folded has the sign of the factor, and codes have one more negative value than positive ones.
                Some(f) => layer.weight.chunks(k).zip(&f).flat_map(|(r, f)| r.iter().map(|w| w * f.signum())).collect(),
                None => layer.folded(eps).0,
            };
            // Not rounded to the stored dtype: this is a multiple of the factor.
            let args = QuantArgs { observer: WeightObserver::Mse, scale_dtype: FloatType::F32, ..scheme.weights };
            let params = dsq_kernels::quantize::qparams_of(&values, n, k, args)?;
            *scales = params.iter().map(|p| p.scale).collect();
        }
        if let Some(prepared) = &mut self.prepared {
            prepared.grids = Some(grids);
        }
        Ok(())
    }
}
