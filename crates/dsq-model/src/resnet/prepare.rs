//! Preparing the network for quantization: which layers get which scheme, where activations are observed, and the
//! conversion to codes. Not the forward pass (see `forward.rs`).

use super::{Layer, ResNet};
use dsq_quant::{
    MinMax, MovingAverage, Observer, ObserverKind, QParams, QuantArgs, QuantConfig, QuantError, QuantScheme,
    QuantizedMatrix,
};

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
}

/// One of the observers that a recipe names.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RangeObserver {
    /// Widest range.
    MinMax(MinMax),
    /// Moving average.
    MovingAverage(MovingAverage),
}

impl RangeObserver {
    fn new(kind: ObserverKind, rate: f32, range: Option<(f32, f32)>) -> Self {
        match kind {
            ObserverKind::MinMax => {
                let mut o = MinMax::default();
                if let Some((lo, hi)) = range {
                    o.observe(lo, hi);
                }
                RangeObserver::MinMax(o)
            }
            ObserverKind::MovingAverage => RangeObserver::MovingAverage(MovingAverage::with_range(rate, range)),
        }
    }
}

impl Observer for RangeObserver {
    fn observe(&mut self, lo: f32, hi: f32) {
        match self {
            RangeObserver::MinMax(o) => o.observe(lo, hi),
            RangeObserver::MovingAverage(o) => o.observe(lo, hi),
        }
    }
    fn range(&self) -> Option<(f32, f32)> {
        match self {
            RangeObserver::MinMax(o) => o.range(),
            RangeObserver::MovingAverage(o) => o.range(),
        }
    }
}

/// A place where an activation is observed and quantized.
#[derive(Debug, Clone)]
pub(super) struct Site {
    /// `{module}.input`, `.bn_output` or `.conv_output`.
    pub name: String,
    pub args: QuantArgs,
    pub observer: RangeObserver,
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
}

impl Prepared {
    pub(super) fn state(&self) -> Vec<(String, Vec<f32>)> {
        let range = |s: &Site| s.observer.range().map_or(vec![], |(lo, hi)| vec![lo, hi]);
        self.sites.iter().map(|s| (format!("{}.range", s.name), range(s))).collect()
    }

    pub(super) fn load_state<'a>(&mut self, find: impl Fn(&str) -> Option<&'a Vec<f32>>) -> Result<(), String> {
        for site in &mut self.sites {
            let name = format!("{}.range", site.name);
            let range = match find(&name).map(Vec::as_slice) {
                Some([]) => None,
                Some(&[lo, hi]) => Some((lo, hi)),
                _ => return Err(name),
            };
            site.observer = RangeObserver::new(self.settings.observer, self.settings.rate, range);
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
    /// float-coded weights, which convolutions do not have.
    pub fn prepare(&mut self, settings: QatSettings) -> Result<(), QuantError> {
        let mut sites: Vec<Site> = Vec::new();
        let mut site = |name: String, args: QuantArgs| {
            sites.iter().position(|s| s.name == name).unwrap_or_else(|| {
                let observer = RangeObserver::new(settings.observer, settings.rate, None);
                sites.push(Site { name, args, observer });
                sites.len() - 1
            })
        };
        let observed = settings.placement != BnPlacement::Skipped;
        let mut plans = Vec::new();
        for layer in &self.layers {
            let mut plan = LayerPlan::default();
            let scheme = settings.config.scheme_for(&layer.module).copied();
            if let Some(scheme) = scheme {
                if scheme.weights.qtype.float().is_some() {
                    let expected = "integer weights for an image model".into();
                    let got = scheme.weights.qtype.name().into();
                    return Err(QuantError::Setting { field: "scheme", expected, got });
                }
                scheme.weights.scale_shape(layer.shape[0], layer.shape[1..].iter().product())?;
                // The tensor that `downsample` reads is the block's input, as for `conv1`.
                let input = layer.module.replace(".downsample", ".conv1");
                plan.input = scheme.activations.map(|args| site(format!("{input}.input"), args));
            }
            // The wrong way observes every batch norm, that of float convolutions too.
            if let (true, Some(args), true) = (observed, settings.config.scheme.activations, layer.norm.is_some()) {
                plan.bn_output = Some(site(format!("{}.bn_output", layer.module), args));
                if settings.placement == BnPlacement::ConvAndBnObserved {
                    plan.conv_output = Some(site(format!("{}.conv_output", layer.module), args));
                }
            }
            plan.scheme = scheme;
            plans.push(plan);
        }
        self.prepared = Some(Prepared { settings, layers: plans, sites });
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
            .map(|(layer, plan)| {
                let (weight, bias) = layer.folded(eps);
                let (n, k) = (layer.shape[0], weight.len() / layer.shape[0]);
                let matrix =
                    plan.scheme.map(|s| dsq_kernels::quantize::quantize(&weight, n, k, s.weights)).transpose()?;
                let activation = plan
                    .input
                    .map(|i| {
                        let site = &prepared.sites[i];
                        site.observer.qparams(&site.args).map(|p| (site.args, p))
                    })
                    .transpose()?;
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
                let (n, k) = (layer.shape[0], layer.weight.len() / layer.shape[0]);
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
