//! Preparing the network for quantization: which layers get which scheme, where activations are observed, and the
//! conversion to codes. Not the forward pass (see `forward.rs`).

use super::grids::Grids;
use super::{Layer, ResNet};
use crate::RangeObserver;
use dsq_quant::{ObserverKind, QParams, QuantArgs, QuantConfig, QuantError, QuantScheme, QuantizedMatrix};

/// What the observers see of batch norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BnPlacement {
    /// Batch norm is folded into the quantized weight; activations are observed only where a convolution reads them, behind
    /// the ReLU. The right way.
    #[default]
    Skipped,
    /// The wrong way, for comparison: batch norm is not folded and keeps live statistics, its output is observed and
    /// quantized, and again behind the ReLU.
    BnObserved,
    /// As [`BnPlacement::BnObserved`], and the convolution's output in front of batch norm is observed and quantized too.
    ConvAndBnObserved,
    /// The other half of that: the convolution's output is observed and quantized, batch norm's is not.
    ConvObserved,
}

/// How to prepare.
#[derive(Debug, Clone)]
pub struct QatSettings {
    /// Scheme and ignored layers.
    pub config: QuantConfig,
    /// What the observers see.
    pub placement: BnPlacement,
    /// Observer of the activations.
    pub observer: ObserverKind,
    /// Rate of the moving average.
    pub rate: f32,
    /// Whether the scales of weights and activations are parameters (LSQ, LSQ+) instead of following observed ranges: only
    /// with batch norm skipped, and from [`ResNet::start_grids`] on.
    pub learned: bool,
}

/// A place where an activation is observed and quantized.
#[derive(Debug, Clone)]
pub(super) struct Site {
    /// `{module}.input`, `.bn_output` or `.conv_output`.
    pub name: String,
    pub args: QuantArgs,
    pub observer: RangeObserver,
    /// Whether values may be negative: the pictures; everything else has passed a ReLU.
    pub signed: bool,
}

/// The quantization of one layer.
#[derive(Debug, Clone, Default)]
pub(super) struct LayerPlan {
    /// Scheme, or `None` for a float layer.
    pub scheme: Option<QuantScheme>,
    /// Site of the input; `conv1` and `downsample` of a block share one, because they read the same tensor.
    pub input: Option<usize>,
    /// Site of the convolution's output (wrong way only).
    pub conv_output: Option<usize>,
    /// Site of batch norm's output (wrong way only).
    pub bn_output: Option<usize>,
}

/// The prepared state of a network.
#[derive(Debug, Clone)]
pub(super) struct Prepared {
    pub settings: QatSettings,
    pub layers: Vec<LayerPlan>,
    pub sites: Vec<Site>,
    /// Learned grids, with [`QatSettings::learned`].
    pub grids: Option<Grids>,
}

impl Prepared {
    pub(super) fn state(&self) -> Vec<(String, Vec<f32>)> {
        self.sites.iter().map(|s| (format!("{}.range", s.name), s.observer.state())).collect()
    }

    pub(super) fn load_state<'a>(&mut self, find: impl Fn(&str) -> Option<&'a Vec<f32>>) -> Result<(), String> {
        for site in &mut self.sites {
            let name = format!("{}.range", site.name);
            let (kind, rate) = (self.settings.observer, self.settings.rate);
            match find(&name).and_then(|state| RangeObserver::from_state(kind, rate, state)) {
                Some(observer) => site.observer = observer,
                None => return Err(name),
            }
        }
        Ok(())
    }
}

/// A layer as it ships: codes on their grid (or a folded float weight), the bias with batch norm folded in, and the grid of
/// the input.
#[derive(Debug, Clone, PartialEq)]
pub struct ConvertedLayer {
    /// Module name.
    pub module: String,
    /// Stored shape: `[n, c, kh, kw]`, `[n, c]` for `fc`.
    pub shape: Vec<usize>,
    /// Codes `[n, c * kh * kw]`, or `None` for a float layer.
    pub matrix: Option<QuantizedMatrix>,
    /// The folded float weight (what the codes were chosen for).
    pub weight: Vec<f32>,
    /// `[n]`.
    pub bias: Vec<f32>,
    /// Grid of the input, if it is quantized.
    pub activation: Option<(QuantArgs, QParams)>,
}

impl ResNet {
    /// Prepares for calibration and QAT: every layer that `ignore` does not name gets the scheme, observers start empty.
    ///
    /// # Errors
    /// [`QuantError::GroupNotDividing`] when a group size does not divide a layer's reduction; [`QuantError::Setting`] for
    /// a percentile out of range, float-coded weights and scales of groups, which convolutions do not have, and for learned
    /// scales where batch norm is observed.
    pub fn prepare(&mut self, settings: QatSettings) -> Result<(), QuantError> {
        let mut sites: Vec<Site> = Vec::new();
        let refused =
            |field, expected: &str, got: String| Err(QuantError::Setting { field, expected: expected.into(), got });
        if settings.learned && settings.placement != BnPlacement::Skipped {
            return refused("learned_scales", "batch norm skipped", format!("{:?}", settings.placement));
        }
        let unused = RangeObserver::new(settings.observer, settings.rate)?;
        let mut site = |name: String, args: QuantArgs, signed: bool| {
            sites.iter().position(|s| s.name == name).unwrap_or_else(|| {
                sites.push(Site { name, args, observer: unused.clone(), signed });
                sites.len() - 1
            })
        };
        let observed = settings.placement != BnPlacement::Skipped;
        let mut plans = Vec::new();
        for (i, layer) in self.layers.iter().enumerate() {
            let mut plan = LayerPlan::default();
            let scheme = settings.config.scheme_for(&layer.module).copied();
            if let Some(scheme) = scheme {
                if scheme.weights.qtype.float().is_some() {
                    return refused("scheme", "integer weights for an image model", scheme.weights.qtype.name().into());
                }
                let [rows, groups] = scheme.weights.scale_shape(layer.shape[0], layer.k())?;
                if rows * groups > layer.shape[0] {
                    // The sums of different groups cannot share a factor behind the convolution.
                    let expected = "per channel or per tensor for a convolution";
                    return refused("granularity", expected, format!("{:?}", scheme.weights.granularity));
                }
                // The tensor that `downsample` reads is the block's input, as for `conv1`.
                let input = layer.module.replace(".downsample", ".conv1");
                plan.input = scheme.activations.map(|args| site(format!("{input}.input"), args, i == 0));
            }
            // The wrong way observes every batch norm, that of float convolutions too.
            if let (true, Some(args), true) = (observed, settings.config.scheme.activations, layer.norm.is_some()) {
                if settings.placement != BnPlacement::ConvObserved {
                    plan.bn_output = Some(site(format!("{}.bn_output", layer.module), args, true));
                }
                if settings.placement != BnPlacement::BnObserved {
                    plan.conv_output = Some(site(format!("{}.conv_output", layer.module), args, true));
                }
            }
            plan.scheme = scheme;
            plans.push(plan);
        }
        let grids = settings.learned.then(|| Grids::new(&self.layers, &plans, &sites)).transpose()?;
        self.prepared = Some(Prepared { settings, layers: plans, sites, grids });
        Ok(())
    }

    /// How the network was prepared, if it was.
    pub fn settings(&self) -> Option<&QatSettings> {
        self.prepared.as_ref().map(|p| &p.settings)
    }

    /// The layers as they ship. Codes and grids are exactly those of the prepared forward pass with frozen statistics
    /// ([`super::Pass::QatEval`]).
    ///
    /// # Errors
    /// [`QuantError::Setting`] before preparation, before the first observed batch, or when batch norm is observed (that
    /// graph cannot be folded); [`QuantError::NonFinite`] and the like from the weights.
    pub fn convert(&self) -> Result<Vec<ConvertedLayer>, QuantError> {
        let refused = |expected: &str, got: &str| QuantError::Setting {
            field: "convert",
            expected: expected.into(),
            got: got.into(),
        };
        let prepared = self.prepared.as_ref().ok_or_else(|| refused("a prepared network", "a float one"))?;
        if prepared.settings.placement != BnPlacement::Skipped {
            return Err(refused("batch norm folded", "batch norm observed"));
        }
        let eps = self.config.norm_eps;
        self.layers
            .iter()
            .zip(&prepared.layers)
            .enumerate()
            .map(|(i, (layer, plan))| {
                let (weight, bias) = layer.folded(eps);
                let (n, k) = (layer.shape[0], layer.k());
                let learned = |args: &QuantArgs| prepared.grids.as_ref()?.weight(i, layer, args, eps);
                let matrix = plan.scheme.map(|s| match learned(&s.weights) {
                    None => dsq_kernels::quantize::quantize(&weight, n, k, s.weights),
                    Some(params) => dsq_kernels::quantize::quantize_with(&weight, n, k, s.weights, &params),
                });
                let matrix = matrix.transpose()?;
                let activation = plan.input.map(|i| {
                    let site = &prepared.sites[i];
                    let p = match &prepared.grids {
                        None => site.observer.qparams(&site.args)?,
                        Some(grids) => grids.site(i, &site.args),
                    };
                    Ok::<_, QuantError>((site.args, p))
                });
                let activation = activation.transpose()?;
                let shape = stored_shape(layer);
                Ok(ConvertedLayer { module: layer.module.clone(), shape, matrix, weight, bias, activation })
            })
            .collect()
    }

    /// Bits per weight over the quantized layers' weights, scales counted (4 and the scales for INT4); `None` when nothing is
    /// quantized.
    ///
    /// # Errors
    /// As [`QuantArgs::bits_per_weight`].
    pub fn bits_per_weight(&self) -> Result<Option<f64>, QuantError> {
        let Some(prepared) = &self.prepared else { return Ok(None) };
        let (mut bits, mut count) = (0.0, 0usize);
        for (layer, plan) in self.layers.iter().zip(&prepared.layers) {
            if let Some(scheme) = plan.scheme {
                let (n, k) = (layer.shape[0], layer.k());
                bits += scheme.weights.bits_per_weight(n, k)? * (n * k) as f64;
                count += n * k;
            }
        }
        Ok((count > 0).then(|| bits / count as f64))
    }
}

fn stored_shape(layer: &Layer) -> Vec<usize> {
    if layer.norm.is_some() { layer.shape.to_vec() } else { layer.shape[..2].to_vec() }
}
