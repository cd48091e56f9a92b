//! Which layers get which scheme: named presets, targets, ignore patterns. Not a recipe file (see the `dsq` package).

use crate::{FloatType, Granularity, Mapping, QuantArgs, QuantError, QuantType};
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
    pub const PRESETS: [&'static str; 2] = ["W4A16", "W4A4"];

    /// A preset by its name (vLLM's spelling): `W4A16` symmetric INT4 weights and float activations; `W4A4`
    /// symmetric INT4 weights and asymmetric static per-tensor INT4 activations.
    ///
    /// # Errors
    /// [`QuantError::Setting`] for another name, listing the presets.
    pub fn preset(name: &str, granularity: Granularity, scale_dtype: FloatType) -> Result<Self, QuantError> {
        let weights = QuantArgs::int4(granularity, scale_dtype);
        let activations = match name {
            "W4A16" => None,
            "W4A4" => Some(QuantArgs {
                qtype: QuantType::Int4,
                granularity: Granularity::PerTensor,
                mapping: Mapping::Asymmetric,
                scale_dtype: FloatType::F32,
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

/// A scheme for every linear layer but the ignored ones.
#[derive(Debug, Clone)]
pub struct QuantConfig {
    /// The scheme.
    pub scheme: QuantScheme,
    /// Layers to leave in float.
    pub ignore: Vec<Pattern>,
}

impl QuantConfig {
    /// Makes one from the texts of the ignore patterns.
    ///
    /// # Errors
    /// As [`Pattern::new`].
    pub fn new(scheme: QuantScheme, ignore: &[String]) -> Result<Self, QuantError> {
        Ok(Self { scheme, ignore: ignore.iter().map(|t| Pattern::new(t)).collect::<Result<_, _>>()? })
    }

    /// The scheme of the layer `name`, or `None` when it stays in float.
    pub fn scheme_for(&self, name: &str) -> Option<&QuantScheme> {
        (!self.ignore.iter().any(|p| p.matches(name))).then_some(&self.scheme)
    }

    /// Ignore patterns that match none of `names`: most likely a typo.
    pub fn unmatched<'a>(&'a self, names: &[String]) -> Vec<&'a str> {
        self.ignore.iter().filter(|p| !names.iter().any(|n| p.matches(n))).map(Pattern::text).collect()
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
        assert!(matches!(Pattern::new("re:(").unwrap_err(), QuantError::Setting { field: "pattern", .. }));
    }

    #[test]
    fn unknown_presets_list_the_known() {
        let err = QuantScheme::preset("W5A5", Granularity::PerChannel, FloatType::F32).unwrap_err();
        assert!(err.to_string().contains("W4A16"), "{err}");
    }
}
