//! Rotary positions: the keys that set them (`rope_theta`, `rope_scaling` of transformers 4, `rope_parameters` of 5) and the
//! one place where frequencies, cosines and sines are computed, for training and inference alike. Not the rotation itself,
//! which each forward pass does to its own layout.

use super::fields::Fields;
use crate::{CheckpointError, LlamaConfig};
use serde_json::{Value, json};
use std::f64::consts::PI;
use std::ops::RangeInclusive;
use std::path::Path;

/// How frequencies are changed so that a model sees more positions than it was trained on. The formulas are those of
/// `transformers` 5 (`modeling_rope_utils.py`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// All frequencies divided by `factor` (position interpolation, Chen et al., arXiv:2306.15595).
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// The base grows with the length of the sequence once that is beyond `max_position_embeddings`. dsq runs no longer
    /// sequences than that, so here nothing is scaled: keys that a cache holds would have to be rotated anew.
    Dynamic {
        /// At least 1.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones as they are, those between interpolated (Llama 3.1, arXiv:2407.21783).
    Llama3 {
        /// At least 1.
        factor: f64,
        /// Turns over the original context up to which a frequency is low.
        low_freq_factor: f64,
        /// Turns from which it is high; more than `low_freq_factor`.
        high_freq_factor: f64,
        /// The context of the training, in tokens.
        original_max_position_embeddings: usize,
    },
    /// As [`Yarn`] says.
    Yarn(Yarn),
}

/// YaRN (Peng et al., arXiv:2309.00071): frequencies between interpolated and original by a ramp over the pairs of a head, and
/// queries and keys times a factor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// At least 1.
    pub factor: f64,
    /// The context of the training, in tokens.
    pub original_max_position_embeddings: usize,
    /// Turns over that context from which a frequency stays; 32 unless given.
    pub beta_fast: f64,
    /// Turns up to which it is divided by `factor`; 1 unless given.
    pub beta_slow: f64,
    /// Whether the ends of the ramp are rounded outwards to whole pairs; true unless given.
    pub truncate: bool,
    /// What cosines and sines are multiplied by; `None`: found from `factor` and the next two.
    pub attention_factor: Option<f64>,
    /// With `mscale_all_dim`: the quotient of the two magnitudes is the attention factor. Alone it says nothing, as in transformers.
    pub mscale: Option<f64>,
    /// See `mscale`.
    pub mscale_all_dim: Option<f64>,
}

/// The rotary embedding of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    /// Angle of pair `i` for each position, `[head_dim / 2]`.
    pub frequencies: Vec<f32>,
    /// What cosines and sines are multiplied by.
    pub attention_factor: f32,
}

impl LlamaConfig {
    /// The rotary embedding: frequency `i` is `rope_theta^(-2i/d)`, in f32 as in transformers, then scaled in f64 and rounded.
    pub fn rotary(&self) -> Rotary {
        let d = self.head_dim;
        let plain = |i: usize| 1.0 / self.rope_theta.powf((2 * i) as f32 / d as f32);
        let scaled =
            |f: &dyn Fn(usize, f64) -> f64| (0..d / 2).map(|i| f(i, f64::from(plain(i))) as f32).collect::<Vec<f32>>();
        let (frequencies, attention_factor) = match self.rope_scaling {
            None | Some(RopeScaling::Dynamic { .. }) => ((0..d / 2).map(plain).collect(), 1.0),
            Some(RopeScaling::Linear { factor }) => (scaled(&|_, w| w / factor), 1.0),
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: context,
            }) => {
                let one = |_: usize, w: f64| {
                    // Turns over the original context.
                    let turns = context as f64 * w / (2.0 * PI);
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 - kept) * w / factor + kept * w
                };
                (scaled(&one), 1.0)
            }
            Some(RopeScaling::Yarn(y)) => {
                let (low, high) = y.ramp(d, f64::from(self.rope_theta));
                let one = |i: usize, w: f64| {
                    let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    w / y.factor * interpolated + w * (1.0 - interpolated)
                };
                (scaled(&one), y.attention_factor())
            }
        };
        Rotary { frequencies, attention_factor: attention_factor as f32 }
    }
}

impl Yarn {
    /// Pairs at which the ramp from original to interpolated frequencies begins and ends, for heads of width `d`.
    fn ramp(&self, d: usize, theta: f64) -> (f64, f64) {
        let context = self.original_max_position_embeddings as f64;
        let pair = |turns: f64| d as f64 * (context / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, high) = (low.max(0.0), high.min(d as f64 - 1.0));
        // A ramp of no length would divide by zero.
        (low, if low == high { high + 0.001 } else { high })
    }

    /// What cosines and sines are multiplied by.
    pub(crate) fn attention_factor(&self) -> f64 {
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(factor), ..) => factor,
            (None, Some(a), Some(b)) if a != 0.0 && b != 0.0 => self.magnitude(a) / self.magnitude(b),
            _ => self.magnitude(1.0),
        }
    }

    /// The magnitude of queries and keys for the coefficient `m`.
    pub(crate) fn magnitude(&self, m: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * m * self.factor.ln() + 1.0 }
    }
}

impl Rotary {
    /// Cosines and sines of the positions `0..positions`, `[positions, head_dim / 2]` each: the angle is the f32 product of
    /// position and frequency, as in transformers, its cosine and sine are taken in f64, then times the attention factor.
    pub fn table(&self, positions: usize) -> [Vec<f32>; 2] {
        let factor = f64::from(self.attention_factor);
        let of = |f: fn(f64) -> f64| {
            let row = |p: usize| self.frequencies.iter().map(move |w| (f(f64::from(p as f32 * w)) * factor) as f32);
            (0..positions).flat_map(row).collect()
        };
        [of(f64::cos), of(f64::sin)]
    }
}

/// Reads the base of the rotary embedding (`None`: not given) and its scaling, in both spellings. Where both are there they must say
/// the same.
///
/// # Errors
/// [`CheckpointError::Invalid`] naming the key, for a type that dsq does not know, a key that is missing or that the type does
/// not have, a value out of range, and contradictions.
pub(super) fn read(f: &Fields, file: &Path) -> Result<(Option<f32>, Option<RopeScaling>), CheckpointError> {
    let mut theta = f.number("rope_theta")?;
    let mut found: Option<(&str, Option<RopeScaling>)> = None;
    for key in ["rope_scaling", "rope_parameters"] {
        let Some(value) = f.get(key).filter(|v| v.as_object().is_none_or(|map| !map.is_empty())) else { continue };
        let inner = Fields::new(value, file, key)?;
        if let Some(here) = inner.number("rope_theta")? {
            if let Some(other) = theta.filter(|t| *t != here) {
                let problem = format!("contradicts another rope_theta; expected {other}, got {here}");
                return Err(inner.error("rope_theta", problem));
            }
            theta = Some(here);
        }
        let scaling = read_scaling(&inner)?;
        if let Some((other, before)) = found.filter(|(_, before)| *before != scaling) {
            let shown = |s: Option<RopeScaling>| s.map_or("no scaling".into(), |s| format!("{s:?}"));
            let problem = format!("contradicts {other}; expected {}, got {}", shown(before), shown(scaling));
            return Err(f.error(key, problem));
        }
        found = Some((key, scaling));
    }
    let scaling = found.and_then(|(_, scaling)| scaling);
    // YaRN divides by the logarithm of the base.
    let least = if matches!(scaling, Some(RopeScaling::Yarn(_))) { 1.0 + f64::from(f32::EPSILON) } else { 1.0 };
    match theta {
        Some(t) if !(t >= least && t <= f64::from(f32::MAX)) => {
            Err(f.error("rope_theta", format!("expected a number of at least {least}, got {t}")))
        }
        t => Ok((t.map(|t| t as f32), scaling)),
    }
}

fn read_scaling(f: &Fields) -> Result<Option<RopeScaling>, CheckpointError> {
    let (new, old) = (f.string("rope_type")?, f.string("type")?);
    if let (Some(new), Some(old)) = (new, old)
        && new != old
    {
        return Err(f.error("type", format!("contradicts rope_type; expected {new:?}, got {old:?}")));
    }
    let key = if new.is_some() { "rope_type" } else { "type" };
    f.only("partial_rotary_factor", &json!(1.0), "the whole head is rotated")
        .or_else(|e| f.only("partial_rotary_factor", &json!(1), "the whole head is rotated").map_err(|_| e))?;
    const ANY: RangeInclusive<f64> = 1e-6..=1e6;
    let optional = |key: &'static str, range: RangeInclusive<f64>| match f.number(key)? {
        Some(x) if !range.contains(&x) => {
            Err(f.error(key, format!("expected a number from {} to {}, got {x}", range.start(), range.end())))
        }
        x => Ok(x),
    };
    let required = |key: &'static str, range| f.required(key, optional(key, range));
    let factor = || required("factor", 1.0..=1e6);
    const CONTEXT: &str = "original_max_position_embeddings";
    let context = || f.required(CONTEXT, f.size(CONTEXT));
    let scaling = match new.or(old).unwrap_or("default") {
        "default" => None,
        "linear" => Some(RopeScaling::Linear { factor: factor()? }),
        "dynamic" => Some(RopeScaling::Dynamic { factor: factor()? }),
        "llama3" => {
            let low = required("low_freq_factor", ANY)?;
            let high = required("high_freq_factor", ANY)?;
            if high <= low {
                let problem = format!("expected more than low_freq_factor = {low}, got {high}");
                return Err(f.error("high_freq_factor", problem));
            }
            Some(RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: context()?,
            })
        }
        "yarn" => {
            let beta_fast = optional("beta_fast", ANY)?.unwrap_or(32.0);
            let beta_slow = optional("beta_slow", ANY)?.unwrap_or(1.0);
            if beta_fast < beta_slow {
                let problem = format!("expected at least beta_slow = {beta_slow}, got {beta_fast}");
                return Err(f.error("beta_fast", problem));
            }
            Some(RopeScaling::Yarn(Yarn {
                factor: factor()?,
                original_max_position_embeddings: context()?,
                beta_fast,
                beta_slow,
                truncate: f.boolean("truncate")?.unwrap_or(true),
                attention_factor: optional("attention_factor", ANY)?,
                mscale: optional("mscale", 0.0..=1e6)?,
                mscale_all_dim: optional("mscale_all_dim", 0.0..=1e6)?,
            }))
        }
        other => {
            let known = "expected \"default\", \"linear\", \"dynamic\", \"llama3\" or \"yarn\"";
            return Err(f.error(key, format!("rotary scaling that dsq does not know; {known}, got {other:?}")));
        }
    };
    f.refuse_the_rest(&[])?;
    Ok(scaling)
}

/// The scaling in the keys of `rope_scaling`, which transformers 5 has in `rope_parameters` beside `rope_theta`.
pub(super) fn to_json(scaling: Option<&RopeScaling>) -> Value {
    match scaling {
        None => json!({"rope_type": "default"}),
        Some(RopeScaling::Linear { factor }) => json!({"rope_type": "linear", "factor": factor}),
        Some(RopeScaling::Dynamic { factor }) => json!({"rope_type": "dynamic", "factor": factor}),
        Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position_embeddings }) => {
            json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_max_position_embeddings,
            })
        }
        Some(RopeScaling::Yarn(y)) => {
            let mut keys = json!({
                "rope_type": "yarn",
                "factor": y.factor,
                "original_max_position_embeddings": y.original_max_position_embeddings,
                "beta_fast": y.beta_fast,
                "beta_slow": y.beta_slow,
                "truncate": y.truncate,
            });
            let optional =
                [("attention_factor", y.attention_factor), ("mscale", y.mscale), ("mscale_all_dim", y.mscale_all_dim)];
            for (key, value) in optional {
                if let Some(value) = value {
                    keys[key] = json!(value);
                }
            }
            keys
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelConfig;

    fn config(head_dim: usize, theta: f64, scaling: Value) -> Result<LlamaConfig, CheckpointError> {
        let text = json!({"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
            "num_attention_heads": 4, "head_dim": head_dim, "vocab_size": 40, "max_position_embeddings": 256,
            "rope_theta": theta, "rope_scaling": scaling});
        match ModelConfig::from_json(&text.to_string(), Path::new("config.json"))? {
            ModelConfig::Llama(c) => Ok(c),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn c058_the_table_of_llama3() {
        let scaling = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64});
        let rotary = config(8, 1e4, scaling).unwrap().rotary();
        for (got, want) in rotary.frequencies.iter().zip([1.0, 0.013_042_256, 0.00125, 0.000_125]) {
            assert!((f64::from(*got) / want - 1.0).abs() < 1e-6, "{got} {want}");
        }
    }

    #[test]
    fn position_zero_is_the_attention_factor_and_a_turn_is_the_product() {
        let scaling = json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
        let rotary = config(8, 1e4, scaling).unwrap().rotary();
        let factor = 0.1 * 4f64.ln() + 1.0;
        let [cos, sin] = rotary.table(3);
        assert_eq!((cos.len(), sin.len()), (12, 12));
        assert!(cos[..4].iter().all(|c| f64::from(*c) == f64::from(factor as f32)) && sin[..4] == [0.0; 4]);
        let (s, c) = 2f64.sin_cos();
        assert!((f64::from(cos[8]) - factor * c).abs() < 2e-7 && (f64::from(sin[8]) - factor * s).abs() < 2e-7);
    }

    #[test]
    fn every_scaling_survives_json_in_both_spellings() {
        for scaling in [
            json!({"type": "linear", "factor": 2.0}),
            json!({"rope_type": "dynamic", "factor": 2}),
            json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64}),
            json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7,
                "mscale_all_dim": 1.3, "truncate": false, "beta_fast": 20, "beta_slow": 2}),
            json!({"rope_type": "yarn", "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                "attention_factor": 1.1}),
        ] {
            let read = config(16, 1e4, scaling.clone()).unwrap();
            assert!(read.rope_scaling.is_some());
            let model = ModelConfig::Llama(read.clone());
            let json = model.to_json();
            assert_eq!(json["rope_scaling"]["rope_type"], json["rope_parameters"]["rope_type"]);
            assert_eq!(ModelConfig::from_json(&json.to_string(), Path::new("x")).unwrap(), model, "{scaling}");
            for gone in ["rope_scaling", "rope_parameters"] {
                let mut json = json.clone();
                json.as_object_mut().unwrap().remove(gone);
                assert_eq!(ModelConfig::from_json(&json.to_string(), Path::new("x")).unwrap(), model, "{scaling}");
            }
        }
    }

    #[test]
    fn f044_f045_f046_what_is_not_honoured_is_named() {
        let llama3 = |key: &str, value: Value| {
            let mut all = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64});
            all[key] = value;
            all
        };
        let yarn = |key: &str, value: Value| {
            let mut all = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64});
            all[key] = value;
            all
        };
        for (scaling, words) in [
            (json!({"rope_type": "longrope", "factor": 2.0}), vec!["rope_type", "longrope", "yarn"]),
            (json!({"type": "foo"}), vec!["rope_scaling.type", "foo"]),
            (json!({"type": "linear", "rope_type": "dynamic", "factor": 2.0}), vec!["contradicts rope_type"]),
            (json!({"type": "linear"}), vec!["rope_scaling.factor", "missing"]),
            (json!({"type": "dynamic", "factor": null}), vec!["rope_scaling.factor", "null"]),
            (json!({"type": "linear", "factor": 0.5}), vec!["rope_scaling.factor", "0.5"]),
            (json!({"type": "linear", "factor": 2.0, "original_max_position_embeddings": 64}), vec!["original_max"]),
            (
                json!({"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}),
                vec!["partial_rotary_factor", "0.5"],
            ),
            (json!({"type": "linear", "factor": 2.0, "rope_theta": 2.0}), vec!["rope_scaling.rope_theta", "10000"]),
            (llama3("factor", json!(0)), vec!["factor", "got 0"]),
            (llama3("low_freq_factor", json!(4.0)), vec!["high_freq_factor", "more than low_freq_factor = 4"]),
            (llama3("low_freq_factor", Value::Null), vec!["low_freq_factor", "null"]),
            (llama3("original_max_position_embeddings", json!(0)), vec!["original_max_position_embeddings"]),
            (llama3("mrope_section", json!([1, 2])), vec!["rope_scaling.mrope_section"]),
            (yarn("original_max_position_embeddings", Value::Null), vec!["original_max_position_embeddings"]),
            (yarn("beta_slow", json!(40)), vec!["beta_fast", "beta_slow = 40", "got 32"]),
            (yarn("beta_slow", json!(0)), vec!["beta_slow"]),
            (yarn("truncate", json!(1)), vec!["truncate"]),
            (yarn("attention_factor", json!(-1.0)), vec!["attention_factor", "-1"]),
            (yarn("short_factor", json!([1.0])), vec!["rope_scaling.short_factor"]),
        ] {
            let e = config(16, 1e4, scaling.clone()).expect_err(&scaling.to_string());
            let text = e.to_string();
            assert!(e.exit_code() == 3 && words.iter().all(|w| text.contains(w)), "{scaling}: {text}");
        }
        let e = config(16, 1.0, yarn("factor", json!(2.0))).unwrap_err().to_string();
        assert!(e.contains("rope_theta") && e.contains("got 1"), "{e}");
    }
}
