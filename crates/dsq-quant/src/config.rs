//! Which layers get which scheme: named presets, targets, ignore patterns. Not a recipe file (see the `dsq` package).

use crate::{FloatType, Granularity, Mapping, QuantArgs, QuantError, QuantType, WeightObserver};
use serde::{Deserialize, Serialize};

/// How the weights and the input activations of a layer are quantized. `activations: None` means float activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuantScheme {
    /// Weights, `[n, k]`.
    pub weights: QuantArgs,
    /// Input activations, static.
    pub activations: Option<QuantArgs>,
}

impl QuantScheme {
    /// Names of the presets that exist.
    pub const PRESETS: [&'static str; 5] = ["W4A16", "W8A16", "W3A16", "W2A16", "W4A4"];

    /// A preset by its name (vLLM's spelling): `W8A16`, `W4A16`, `W3A16` and `W2A16` symmetric integer weights and float
    /// activations; `W4A4` symmetric INT4 weights and asymmetric static per-tensor INT4 activations.
    ///
    /// # Errors
    /// [`QuantError::Setting`] for another name, listing the presets.
    pub fn preset(name: &str, granularity: Granularity, scale_dtype: FloatType) -> Result<Self, QuantError> {
        let mut weights = QuantArgs::int4(granularity, scale_dtype);
        let activations = match name {
            "W4A16" => None,
            "W8A16" | "W3A16" | "W2A16" => {
                weights.qtype = match name {
                    "W8A16" => QuantType::Int8,
                    "W3A16" => QuantType::Int3,
                    _ => QuantType::Int2,
                };
                None
            }
            "W4A4" => Some(QuantArgs {
                qtype: QuantType::Int4,
                granularity: Granularity::PerTensor,
                mapping: Mapping::Asymmetric,
                scale_dtype: FloatType::F32,
                observer: WeightObserver::MinMax,
            }),
            _ => {
                return Err(QuantError::Setting {
                    field: "scheme",
                    expected: format!("one of {}", Self::PRESETS.join(", ")),
                    got: name.into(),
                });
            }
        };
        Ok(Self { weights, activations })
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
}

impl QuantConfig {
    /// Makes one from the texts of the ignore patterns.
    ///
    /// # Errors
    /// As [`Pattern::new`].
    pub fn new(scheme: QuantScheme, ignore: &[String]) -> Result<Self, QuantError> {
        let ignore = ignore.iter().map(|t| Pattern::new(t)).collect::<Result<_, _>>()?;
        Ok(Self { scheme, ignore, overrides: Vec::new() })
    }

    /// The scheme of the layer `name`, or `None` when it stays in float.
    pub fn scheme_for(&self, name: &str) -> Option<&QuantScheme> {
        if let Some((_, scheme)) = self.overrides.iter().find(|(p, _)| p.matches(name)) {
            return Some(scheme);
        }
        (!self.ignore.iter().any(|p| p.matches(name))).then_some(&self.scheme)
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
        assert_eq!(config.unmatched(&names), ["re:vision_.*", "layers.0", "nothing"]);
        assert!(matches!(Pattern::new("re:(").unwrap_err(), QuantError::Setting { field: "pattern", .. }));
    }

    #[test]
    fn unknown_presets_list_the_known() {
        let err = QuantScheme::preset("W5A5", Granularity::PerChannel, FloatType::F32).unwrap_err();
        assert!(err.to_string().contains("W4A16"), "{err}");
    }
}
