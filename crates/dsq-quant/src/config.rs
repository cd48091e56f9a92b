//! Which layers get which scheme: named presets, targets, ignore patterns. Not a recipe file (see the `dsq` package).

use crate::{FloatType, GgufGrid, Granularity, Mapping, QParams, QuantArgs, QuantError, QuantType};
use serde::{Deserialize, Serialize};

/// How the weights and the input activations of a layer are quantized. `activations: None` means float activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuantScheme {
    /// Weights, `[n, k]`.
    pub weights: QuantArgs,
    /// Input activations: static, with stored scales, or for each token ([`QuantArgs::is_dynamic`]).
    pub activations: Option<QuantArgs>,
}

impl QuantScheme {
    /// Names of the presets that exist.
    pub const PRESETS: [&'static str; 17] = [
        "W4A16",
        "W8A16",
        "W3A16",
        "W2A16",
        "W8A8",
        "W4A8",
        "W4A4",
        "W2A4",
        "FP8",
        "FP8_DYNAMIC",
        "FP8_BLOCK",
        "NVFP4",
        "MXFP4",
        "FP8A16",
        "FP8A16_BLOCK",
        "NVFP4A16",
        "MXFP4A16",
    ];

    /// A preset by its name (vLLM's and llm-compressor's spelling): `W8A16`, `W4A16`, `W3A16` and `W2A16` symmetric integer
    /// weights and float activations; `W4A4` and `W2A4` symmetric weights and asymmetric static per-tensor INT4 activations,
    /// `W8A8` and `W4A8` likewise with INT8 (a language model has them for each token, [`QuantScheme::for_tokens`]);
    /// `FP8A16` (a scale for each row or for the tensor), `FP8A16_BLOCK`, `NVFP4A16` and `MXFP4A16` float-coded weights and
    /// float activations. (No peer has a name for FP8 weights alone; `FP8A16` follows `NVFP4A16`.) The names without `A16`
    /// have activations of the weights' type too: `FP8` one stored scale for the weight and one for its input,
    /// `FP8_DYNAMIC` one for each row and one for each token, `FP8_BLOCK` one for each block of 128 x 128 and for each 128
    /// values of a token, `MXFP4` one for each 32 values of a row and of a token, `NVFP4` for each 16, under a stored global
    /// scale of the weight and of its input; those of tokens are found when the model runs.
    ///
    /// What a name fixes ([`QuantScheme::fixed_grid`]) must be what is given.
    ///
    /// # Errors
    /// [`QuantError::Setting`] for another name, listing the presets, and for a granularity or scale dtype that the preset
    /// does not have.
    pub fn preset(name: &str, granularity: Granularity, scale_dtype: FloatType) -> Result<Self, QuantError> {
        let mut weights = QuantArgs::int4(granularity, scale_dtype);
        let mut activations = None;
        match name {
            "W4A16" => {}
            "W8A16" => weights.qtype = QuantType::Int8,
            "W3A16" => weights.qtype = QuantType::Int3,
            "W2A16" => weights.qtype = QuantType::Int2,
            "W8A8" | "W4A8" | "W4A4" | "W2A4" => {
                weights.qtype = match name {
                    "W8A8" => QuantType::Int8,
                    "W2A4" => QuantType::Int2,
                    _ => QuantType::Int4,
                };
                activations = Some(QuantArgs {
                    qtype: if name.ends_with("A8") { QuantType::Int8 } else { QuantType::Int4 },
                    mapping: Mapping::Asymmetric,
                    ..QuantArgs::int4(Granularity::PerTensor, FloatType::F32)
                });
            }
            "FP8A16" | "FP8A16_BLOCK" | "FP8" | "FP8_DYNAMIC" | "FP8_BLOCK" => weights.qtype = QuantType::Fp8E4M3,
            "NVFP4A16" | "MXFP4A16" | "NVFP4" | "MXFP4" => weights.qtype = QuantType::Fp4E2M1,
            _ => {
                let expected = format!("one of {}", Self::PRESETS.join(", "));
                return Err(QuantError::Setting { field: "scheme", expected, got: name.into() });
            }
        };
        let fixed = Self::fixed_grid(name);
        let differs = |field, expected: String, got: String| Err(QuantError::Setting { field, expected, got });
        if let Some(expected) = fixed.granularity.filter(|g| *g != granularity) {
            return differs("granularity", format!("{expected:?}, which {name} fixes"), format!("{granularity:?}"));
        }
        if let Some(expected) = fixed.scale_dtype.filter(|d| *d != scale_dtype) {
            return differs("scale_dtype", format!("{expected}, which {name} fixes"), scale_dtype.to_string());
        }
        weights.check()?;
        match name {
            "FP8" => activations = Some(QuantArgs::fp8(Granularity::PerTensor, FloatType::F32)),
            "FP8_DYNAMIC" => activations = Some(QuantArgs::fp8(Granularity::PerToken, FloatType::F32)),
            "FP8_BLOCK" => activations = Some(QuantArgs::fp8(Granularity::PerTokenGroup(128), FloatType::F32)),
            "NVFP4" => activations = Some(QuantArgs::nvfp4_tokens()),
            "MXFP4" => activations = Some(QuantArgs::mxfp4_tokens()),
            _ => {}
        }
        Ok(Self { weights, activations })
    }

    /// The scheme as a language model has it: `W8A8` and `W4A8` with symmetric INT8 activations, a scale for each token, found
    /// when it runs (llm-compressor's presets of these names). A4 stays as it is.
    pub fn for_tokens(mut self) -> Self {
        if let Some(a) = &mut self.activations
            && a.qtype == QuantType::Int8
        {
            (a.mapping, a.granularity, a.scale_dtype) = (Mapping::Symmetric, Granularity::PerToken, FloatType::F32);
        }
        self
    }

    /// The scheme as a language model has it with static activations: symmetric integers, one stored scale for the input of
    /// a layer. That of float codes is what its name says.
    pub fn for_tensor(mut self) -> Self {
        if let Some(a) = &mut self.activations
            && a.qtype.float().is_none()
        {
            a.mapping = Mapping::Symmetric;
        }
        self
    }

    /// Whether the groups of the weights, and the runs of the activations, divide the `k` inputs of a layer.
    ///
    /// # Errors
    /// As [`QuantArgs::group_len`].
    pub fn check_length(&self, k: usize) -> Result<(), QuantError> {
        self.weights.group_len(k)?;
        self.activations.map_or(Ok(()), |a| a.group_len(k).map(|_| ()))
    }

    /// Gives activations of integer codes a zero point.
    ///
    /// # Errors
    /// [`QuantError::Setting`] for float activations, and for float codes, which have no zero point.
    pub fn with_asymmetric_activations(mut self) -> Result<Self, QuantError> {
        let Some(a) = &mut self.activations else {
            let expected = "quantized activations, for a zero point".into();
            return Err(QuantError::Setting { field: "activations", expected, got: "float ones".into() });
        };
        a.mapping = Mapping::Asymmetric;
        a.check()?;
        Ok(self)
    }

    /// What the name of a preset fixes or, for `FP8A16` and `W8A8`, does when nothing is said; nothing for the other integer presets.
    pub fn fixed_grid(name: &str) -> FixedGrid {
        let (granularity, scale_dtype, usual) = match name {
            "FP8A16" | "W8A8" => (None, None, Some(Granularity::PerChannel)),
            "FP8" => (Some(Granularity::PerTensor), None, None),
            "FP8_DYNAMIC" => (Some(Granularity::PerChannel), None, None),
            "FP8A16_BLOCK" | "FP8_BLOCK" => (Some(Granularity::PerBlock(128, 128)), None, None),
            "NVFP4A16" | "NVFP4" => (Some(QuantArgs::nvfp4().granularity), Some(FloatType::F8E4M3), None),
            "MXFP4A16" | "MXFP4" => (Some(QuantArgs::mxfp4().granularity), Some(FloatType::F8E8M0), None),
            _ => (None, None, None),
        };
        FixedGrid { granularity, scale_dtype, usual: usual.or(granularity) }
    }
}

/// What the name of a preset leaves no choice in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FixedGrid {
    /// Which weights share a scale.
    pub granularity: Option<Granularity>,
    /// Dtype of the scales.
    pub scale_dtype: Option<FloatType>,
    /// Which weights share a scale when nothing is said; `None`: the caller's own default.
    pub usual: Option<Granularity>,
}

/// How the input of a layer is put on a grid.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct InputGrid {
    /// The scheme.
    pub args: QuantArgs,
    /// The stored scale and zero point of a static one, of NVFP4 the global scale, a divisor; `None`: found when the model
    /// runs ([`QuantArgs::is_dynamic`]).
    pub params: Option<QParams>,
}

impl InputGrid {
    /// What is known of the inputs of a layer with this scheme before the model has run: nothing of static ones.
    pub fn dynamic(activations: Option<QuantArgs>) -> Option<Self> {
        activations.filter(QuantArgs::is_dynamic).map(|args| Self { args, params: None })
    }

    /// Static, with the scale and zero point of the range `[lo, hi]`.
    ///
    /// # Errors
    /// As [`QuantArgs::qparams`].
    pub fn of_range(args: QuantArgs, lo: f32, hi: f32) -> Result<Self, QuantError> {
        if args.has_global_scale() {
            let scale = QuantArgs::global_scale(hi.max(-lo));
            return Ok(Self { args, params: Some(QParams { scale, zero: 0 }) });
        }
        Ok(Self { args, params: Some(args.qparams(lo, hi)?) })
    }

    /// Static, with what ships for a learned scale and zero point: [`QuantArgs::learned_qparams`]. Of NVFP4 the learned scale is the
    /// largest that a run can have in effect, 448 over the global one that ships; at least 1e-30, so that this is a number.
    pub fn of_learned(args: QuantArgs, scale: f32, zero: f32) -> Self {
        let params = match args.has_global_scale() {
            false => args.learned_qparams(scale, zero),
            // The comparison leaves NaN alone.
            true => QParams { scale: args.scale_dtype.max() / if scale < 1e-30 { 1e-30 } else { scale }, zero: 0 },
        };
        Self { args, params: Some(params) }
    }

    /// The scale and zero point at which learning starts, such that [`InputGrid::of_learned`] gives this grid (of NVFP4 but for
    /// the last bit); `None` where nothing is stored.
    pub fn learned_params(&self) -> Option<QParams> {
        let p = self.params?;
        Some(match self.args.has_global_scale() {
            false => p,
            true => QParams { scale: self.args.scale_dtype.max() / p.scale, ..p },
        })
    }

    /// Whether a run of this largest magnitude would have a scale above the largest that a stored global scale allows, and so has
    /// that largest one.
    pub fn is_capped(&self, absmax: f32) -> bool {
        let scale = absmax / self.args.qtype.qmax() as f32;
        self.args.has_global_scale() && self.params.is_some_and(|p| p.scale * scale > self.args.scale_dtype.max())
    }

    /// The parameters in effect of a run of values in `[lo, hi]` whose scale is found when the model runs. Under a global
    /// scale the run's own is at most the largest E4M3 number: values beyond what calibration met clip, as on any stored grid.
    ///
    /// # Errors
    /// As [`QuantArgs::qparams`].
    pub fn run_qparams(&self, lo: f32, hi: f32) -> Result<QParams, QuantError> {
        let Some(global) = self.params.filter(|_| self.args.has_global_scale()).map(|p| p.scale) else {
            return self.args.qparams(lo, hi);
        };
        let stored = match self.args.stored_qparams(lo, hi, Some(global)) {
            Err(QuantError::ScaleOverflow { .. }) => QParams { scale: self.args.scale_dtype.max(), zero: 0 },
            stored => stored?,
        };
        Ok(self.args.in_effect(stored, Some(global)))
    }
}

/// A layer name pattern as compressed-tensors spells it: a full module name, the last part of one (`lm_head`
/// matches `lm_head` and `model.lm_head`), or `re:` and a regular expression anchored at the start.
#[derive(Debug, Clone)]
pub struct Pattern {
    text: String,
    regex: Option<regex::Regex>,
}

impl Pattern {
    /// Reads a pattern.
    ///
    /// # Errors
    /// [`QuantError::Setting`] for an expression that does not parse.
    pub fn new(text: &str) -> Result<Self, QuantError> {
        let regex = match text.strip_prefix("re:") {
            None => None,
            Some(expr) => Some(regex::Regex::new(&format!("^(?:{expr})")).map_err(|e| QuantError::Setting {
                field: "pattern",
                expected: "a regular expression after re:".into(),
                got: format!("{text:?} ({})", e.to_string().lines().last().unwrap_or_default()),
            })?),
        };
        Ok(Self { text: text.into(), regex })
    }

    /// As it was written.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Whether `name` (a full module name, without `.weight`) matches.
    pub fn matches(&self, name: &str) -> bool {
        match &self.regex {
            Some(re) => re.is_match(name),
            None => name == self.text || name.strip_suffix(&self.text).is_some_and(|head| head.ends_with('.')),
        }
    }
}

/// A scheme for every linear layer but the ignored ones, and other schemes for some.
#[derive(Debug, Clone)]
pub struct QuantConfig {
    /// The scheme.
    pub scheme: QuantScheme,
    /// Layers to leave in float.
    pub ignore: Vec<Pattern>,
    /// Layers with a scheme of their own, also when `ignore` matches them; the first that matches counts.
    pub overrides: Vec<(Pattern, QuantScheme)>,
    /// How the KV cache of a language model holds keys and values ([`QuantArgs::kv_cache`]); `None`: in float.
    pub kv_cache: Option<QuantArgs>,
    /// Layers whose weights are put on blocks of GGUF in training, by their full names, and on which; their scheme then says only that
    /// they are quantized, and that 32 values are the least that belong together.
    pub blocks: Vec<(String, GgufGrid)>,
}

impl QuantConfig {
    /// Makes one from the texts of the ignore patterns.
    ///
    /// # Errors
    /// As [`Pattern::new`].
    pub fn new(scheme: QuantScheme, ignore: &[String]) -> Result<Self, QuantError> {
        let ignore = ignore.iter().map(|t| Pattern::new(t)).collect::<Result<_, _>>()?;
        Ok(Self { scheme, ignore, overrides: Vec::new(), kv_cache: None, blocks: Vec::new() })
    }

    /// The scheme of the layer `name`, or `None` when it stays in float.
    pub fn scheme_for(&self, name: &str) -> Option<&QuantScheme> {
        if let Some((_, scheme)) = self.overrides.iter().find(|(p, _)| p.matches(name)) {
            return Some(scheme);
        }
        (!self.ignore.iter().any(|p| p.matches(name))).then_some(&self.scheme)
    }

    /// The blocks of GGUF that the layer `name` is put on, if that is so.
    pub fn blocks_for(&self, name: &str) -> Option<GgufGrid> {
        self.blocks.iter().find(|(module, _)| module == name).map(|(_, grid)| *grid)
    }

    /// Whether the layer `name` gets the common scheme: neither ignored nor overridden.
    pub fn is_common(&self, name: &str) -> bool {
        self.scheme_for(name).is_some() && !self.overrides.iter().any(|(p, _)| p.matches(name))
    }

    /// Ignore and override patterns that match none of `names`: most likely a typo.
    pub fn unmatched<'a>(&'a self, names: &[String]) -> Vec<&'a str> {
        let patterns = self.ignore.iter().chain(self.overrides.iter().map(|(p, _)| p));
        patterns.filter(|p| !names.iter().any(|n| p.matches(n))).map(Pattern::text).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c029_patterns_are_anchored_and_named_when_they_match_nothing() {
        let scheme = QuantScheme::preset("W4A16", Granularity::PerGroup(32), FloatType::Bf16).unwrap();
        let texts = ["re:.*down_proj$", "lm_head", "re:vision_.*", "layers.0"].map(String::from);
        let config = QuantConfig::new(scheme, &texts).unwrap();
        let names = ["model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj", "model.lm_head", "a.vision_b"];
        let names = names.map(String::from).to_vec();
        let kept: Vec<_> = names.iter().filter(|n| config.scheme_for(n).is_none()).map(String::as_str).collect();
        assert_eq!(kept, ["model.layers.0.mlp.down_proj", "model.lm_head"]);
        assert_eq!(config.unmatched(&names), ["re:vision_.*", "layers.0"]);
        let w8 = QuantScheme::preset("W8A16", Granularity::PerChannel, FloatType::Bf16).unwrap();
        let overrides = ["lm_head", "nothing"].map(|t| (Pattern::new(t).unwrap(), w8)).to_vec();
        let config = QuantConfig { overrides, ..config };
        assert_eq!(config.scheme_for("model.lm_head"), Some(&w8), "an override goes before ignore");
        assert_eq!(config.scheme_for("model.layers.0.mlp.up_proj"), Some(&scheme));
        let common = names.iter().filter(|n| config.is_common(n)).map(String::as_str).collect::<Vec<_>>();
        assert_eq!(common, ["model.layers.0.mlp.up_proj", "a.vision_b"], "not the ignored, not the overridden");
        assert_eq!(config.unmatched(&names), ["re:vision_.*", "layers.0", "nothing"]);
        assert!(matches!(Pattern::new("re:(").unwrap_err(), QuantError::Setting { field: "pattern", .. }));
    }

    #[test]
    fn unknown_presets_list_the_known() {
        let err = QuantScheme::preset("W5A5", Granularity::PerChannel, FloatType::F32).unwrap_err();
        assert!(err.to_string().contains("W4A16"), "{err}");
    }

    #[test]
    fn presets_that_would_lie_or_contradict_themselves_are_refused() {
        let preset = QuantScheme::preset;
        for name in QuantScheme::PRESETS {
            let fixed = QuantScheme::fixed_grid(name);
            let granularity = fixed.usual.unwrap_or(Granularity::PerGroup(32));
            let dtype = fixed.scale_dtype.unwrap_or(FloatType::Bf16);
            let scheme = preset(name, granularity, dtype).unwrap();
            assert_eq!((scheme.weights.granularity, scheme.weights.scale_dtype), (granularity, dtype), "{name}");
            assert_eq!(scheme.activations.is_none(), name.contains("A16"));
        }
        let group = Granularity::PerGroup(32);
        for (name, granularity, dtype) in [
            ("FP8A16", group, FloatType::F32),
            ("FP8A16", Granularity::PerChannel, FloatType::F8E4M3),
            ("FP8A16_BLOCK", Granularity::PerChannel, FloatType::F32),
            ("FP8", Granularity::PerChannel, FloatType::F32),
            ("FP8_DYNAMIC", Granularity::PerTensor, FloatType::F32),
            ("FP8_BLOCK", Granularity::PerChannel, FloatType::F32),
            ("NVFP4A16", group, FloatType::F8E4M3),
            ("NVFP4A16", Granularity::PerGroup(16), FloatType::F32),
            ("MXFP4A16", Granularity::PerGroup(16), FloatType::F8E8M0),
            ("W4A16", Granularity::PerBlock(128, 128), FloatType::F32),
            ("W4A16", Granularity::PerChannel, FloatType::F8E8M0),
        ] {
            let err = preset(name, granularity, dtype).unwrap_err();
            assert!(matches!(err, QuantError::Setting { .. }), "{name}: {err}");
        }
        let tensor = preset("FP8A16", Granularity::PerTensor, FloatType::F32).unwrap();
        assert_eq!(tensor.weights, QuantArgs::fp8(Granularity::PerTensor, FloatType::F32));
    }
}
