//! Rotary scaling between a config and what llama.cpp honours: the keys `rope.scaling.*` and the tensor of factors. Read in
//! llama.cpp's own sources (`llama-context.cpp`, `llama-model.cpp`, `ggml_rope_yarn_corr_dims`), because its converter writes keys
//! that nothing reads. Not the frequencies (see `config/rope.rs`).

use super::arch::{Arch, Keys, Unsaid};
use super::value::Value;
use crate::config::short;
use crate::{CheckpointError, LlamaConfig, RopeScaling, Yarn};
use std::f64::consts::PI;

/// YaRN's ends of the ramp; llama.cpp takes no others for these architectures.
const BETAS: [f32; 2] = [32.0, 1.0];
/// Largest relative difference of two factors or frequencies that count as one: some roundings of f32.
const SAME: f64 = 1e-6;
/// Llama 3.1's context of the training, and its two ends of the ramp: what factors are compared with first.
const LLAMA3: (usize, f64, f64) = (8192, 1.0, 4.0);

/// What llama.cpp divides frequencies by, `[head_dim / 2]`; `None`: they follow from the keys.
pub(crate) fn factors(c: &LlamaConfig) -> Option<Vec<f32>> {
    let Some(RopeScaling::Llama3 { .. }) = c.rope_scaling else { return None };
    let plain = LlamaConfig { rope_scaling: None, ..c.clone() }.rotary().frequencies;
    Some(plain.iter().zip(c.rotary().frequencies).map(|(p, f)| p / f).collect())
}

/// The keys of a config's scaling, without the architecture in front.
///
/// # Errors
/// What llama.cpp has no key for.
pub(crate) fn pairs(c: &LlamaConfig, arch: Arch) -> Result<Vec<(&'static str, Value)>, Unsaid> {
    let refuse = |what: String| Err(Unsaid::new("rope_scaling", what));
    let text = |text: &str| Value::String(text.to_owned());
    let name = arch.name();
    match c.rope_scaling {
        None => Ok(Vec::new()),
        Some(RopeScaling::Dynamic { .. }) => {
            refuse("llama.cpp has no dynamic scaling; expected none, got dynamic".into())
        }
        Some(RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. }) if arch == Arch::Deepseek2 => {
            refuse("llama.cpp has yarn alone for deepseek2; expected yarn or none, got another".into())
        }
        Some(RopeScaling::Llama3 { .. }) if arch != Arch::Llama => refuse(format!(
            "llama.cpp takes factors of frequencies for llama alone; expected none for {name}, got llama3"
        )),
        Some(RopeScaling::Llama3 { .. }) => Ok(Vec::new()),
        Some(RopeScaling::Linear { factor }) => {
            Ok(vec![("rope.scaling.type", text("linear")), ("rope.scaling.factor", Value::F32(factor as f32))])
        }
        Some(RopeScaling::Yarn(y)) => {
            let got = [y.beta_fast as f32, y.beta_slow as f32];
            if got != BETAS || !y.truncate {
                let (want, truncate) = (BETAS, y.truncate);
                return refuse(format!(
                    "llama.cpp takes one ramp for {name}; expected beta_fast and beta_slow {want:?}, truncate true, got {got:?}, {truncate}"
                ));
            }
            let context = u32::try_from(y.original_max_position_embeddings).unwrap_or(u32::MAX);
            let mut out = vec![
                ("rope.scaling.type", text("yarn")),
                ("rope.scaling.factor", Value::F32(y.factor as f32)),
                ("rope.scaling.original_context_length", Value::U32(context)),
            ];
            let attention = y.attention_factor();
            if arch == Arch::Deepseek2 {
                // llama.cpp scales scores by the square of the magnitude of mscale_all_dim, and queries and keys by nothing.
                let Some(all) = y.mscale_all_dim.filter(|m| *m != 0.0 && (attention - 1.0).abs() < SAME) else {
                    let (a, b) = (y.mscale, y.mscale_all_dim);
                    return refuse(format!(
                        "llama.cpp takes one mscale for deepseek2; expected mscale and mscale_all_dim to be equal and not 0, got {a:?} and {b:?}"
                    ));
                };
                out.push(("rope.scaling.yarn_log_multiplier", Value::F32((0.1 * all) as f32)));
                return Ok(out);
            }
            // llama.cpp multiplies by the magnitude of 1, and by this.
            let rest = attention / y.magnitude(1.0);
            if (rest - 1.0).abs() >= SAME {
                out.push(("rope.scaling.attn_factor", Value::F32(rest as f32)));
            }
            Ok(out)
        }
    }
}

/// The scaling of a file: its keys, and the `factors` that it has as a tensor.
///
/// # Errors
/// [`CheckpointError::Invalid`] naming the key, or the tensor of factors, that no config says.
pub(crate) fn read(
    keys: &mut Keys,
    c: &LlamaConfig,
    arch: Arch,
    factors: Option<&[f32]>,
) -> Result<Option<RopeScaling>, CheckpointError> {
    let metadata = keys.metadata;
    let kind = keys.text("rope.scaling.type")?.unwrap_or("linear");
    // llama.cpp reads a factor even without a type, as linear scaling, and under two names; 0 means none.
    let (new, old) = (keys.float("rope.scaling.factor")?, keys.float("rope.scale_linear")?);
    let factor = f64::from(new.or(old).filter(|f| *f != 0.0 && kind != "none").unwrap_or(1.0));
    let (name, key) = (keys.name("rope.scaling.type"), keys.name("rope.scaling.factor"));
    if !(factor.is_finite() && factor >= 1.0) {
        return Err(metadata.invalid(&key, format!("expected a number of at least 1, got {factor}")));
    }
    let context = keys.size("rope.scaling.original_context_length")?.unwrap_or(c.max_position_embeddings);
    let rest = keys.float("rope.scaling.attn_factor")?.unwrap_or(1.0);
    let log_multiplier = keys.float("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0);
    let [ext, attention] =
        ["rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor"].map(|key| keys.float(key).transpose());
    let betas = ["rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"].map(|key| keys.float(key).transpose());
    let scaling = match kind {
        "none" => None,
        "linear" if factor == 1.0 => None,
        "linear" => Some(RopeScaling::Linear { factor: short(factor as f32) }),
        "yarn" => {
            let mut y = Yarn {
                factor: short(factor as f32),
                original_max_position_embeddings: context,
                beta_fast: f64::from(BETAS[0]),
                beta_slow: f64::from(BETAS[1]),
                truncate: true,
                attention_factor: None,
                mscale: None,
                mscale_all_dim: None,
            };
            if arch == Arch::Deepseek2 {
                if !(log_multiplier.is_finite() && log_multiplier > 0.0) {
                    let problem = "yarn without a multiplier is no deepseek of transformers; expected more than 0, got";
                    return Err(metadata.invalid(
                        &keys.name("rope.scaling.yarn_log_multiplier"),
                        format!("{problem} {log_multiplier}"),
                    ));
                }
                // A tenth of the coefficient, as the converter writes it.
                (y.mscale, y.mscale_all_dim) = (Some(short(log_multiplier / 0.1)), Some(short(log_multiplier / 0.1)));
            } else if rest != 1.0 {
                y.attention_factor = Some(y.magnitude(1.0) * f64::from(rest));
            }
            Some(RopeScaling::Yarn(y))
        }
        other => {
            let problem =
                format!("expected \"none\", \"linear\" or \"yarn\", got {:?}", crate::error::printable(other));
            return Err(metadata.invalid(&name, problem));
        }
    };
    let yarn = match scaling {
        Some(RopeScaling::Yarn(y)) => Some(y),
        _ => None,
    };
    // Keys that nothing in llama.cpp reads for these architectures must say what it does, or they would be lost in silence.
    let magnitude = yarn.map_or(1.0, |y| y.attention_factor()) as f32;
    let said = [
        ("rope.scaling.yarn_ext_factor", ext, if yarn.is_some() { vec![1.0] } else { vec![0.0, 1.0] }),
        ("rope.scaling.yarn_attn_factor", attention, vec![1.0, magnitude]),
    ];
    let betas = ["rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"].into_iter().zip(betas).zip(BETAS);
    let betas = betas.map(|((key, got), want)| (key, got, vec![want]));
    for (key, got, allowed) in said.into_iter().chain(betas) {
        let Some(got) = got.transpose()? else { continue };
        if !allowed.iter().any(|want| f64::from(got - want).abs() <= SAME * f64::from(want.abs())) {
            let problem =
                format!("llama.cpp does not read it for this architecture; expected {}, got {got}", allowed[0]);
            return Err(metadata.invalid(&keys.name(key), problem));
        }
    }
    let unused = [("rope.scaling.attn_factor", rest, 1.0, yarn.is_some() && arch != Arch::Deepseek2)];
    let unused =
        unused.into_iter().chain([("rope.scaling.yarn_log_multiplier", log_multiplier, 0.0, arch == Arch::Deepseek2)]);
    for (key, got, none, used) in unused {
        if !used && got != none {
            let problem = format!("dsq has no such scaling here; expected {none}, got {got}");
            return Err(metadata.invalid(&keys.name(key), problem));
        }
    }
    match (scaling, factors) {
        (scaling, None) => Ok(scaling),
        (None, Some(factors)) => {
            fit(c, factors).map_err(|problem| metadata.invalid(super::layout::ROPE_FACTORS, problem))
        }
        (Some(_), Some(_)) => {
            let problem = "expected rotary scaling by keys or by this tensor, got both";
            Err(metadata.invalid(super::layout::ROPE_FACTORS, problem))
        }
    }
}

/// The scaling of Llama 3 that has these factors: between 1 and a largest factor `f`, with `(1 - s) / f + s` as the inverse, where `s` is
/// linear in the frequency. Contexts and ends of the ramp that give one line are one scaling, so the context is taken to be Llama 3.1's.
fn fit(c: &LlamaConfig, factors: &[f32]) -> Result<Option<RopeScaling>, String> {
    let plain = LlamaConfig { rope_scaling: None, ..c.clone() };
    let largest = factors.iter().fold(1.0f32, |m, f| m.max(*f));
    if factors.len() != plain.head_dim / 2 || factors.iter().any(|f| !(f.is_finite() && *f >= 1.0)) {
        return Err(format!("expected {} finite numbers of at least 1, got others", plain.head_dim / 2));
    }
    if largest == 1.0 {
        return Ok(None);
    }
    let factor = f64::from(largest);
    let frequencies: Vec<f64> = plain.rotary().frequencies.iter().map(|w| f64::from(*w)).collect();
    let (context, low, high) = LLAMA3;
    let mut ends = vec![(low, high)];
    // The line through the frequencies that are scaled in part; of fewer than two, through those next to them too.
    let part = |f: f32| (1.0 / f64::from(f) - 1.0 / factor) / (1.0 - 1.0 / factor);
    let inner: Vec<(f64, f64)> = frequencies
        .iter()
        .zip(factors)
        .map(|(w, f)| (context as f64 * w / (2.0 * PI), part(*f)))
        .filter(|(_, s)| *s > 1e-4 && *s < 1.0 - 1e-4)
        .collect();
    let turns: Vec<f64> = frequencies.iter().map(|w| context as f64 * w / (2.0 * PI)).collect();
    let whole = turns.iter().zip(factors).filter(|(_, f)| **f == 1.0).map(|(t, _)| *t).fold(f64::INFINITY, f64::min);
    let scaled = turns.iter().zip(factors).filter(|(_, f)| **f == largest).map(|(t, _)| *t).fold(0.0, f64::max);
    match inner.as_slice() {
        [] => ends.push((scaled + (whole - scaled) * 0.25, scaled + (whole - scaled) * 0.75)),
        // One point: the line through it that begins halfway to the next frequency that is scaled whole.
        [(t, s)] => {
            let low = (scaled + t) / 2.0;
            ends.push((low, low + (t - low) / s));
            let high = if whole.is_finite() { (whole + t) / 2.0 } else { 2.0 * t };
            ends.push((high - (high - t) / (1.0 - s), high));
        }
        [first, .., last] => {
            let slope = (first.1 - last.1) / (first.0 - last.0);
            let low = last.0 - last.1 / slope;
            ends.push((low, low + 1.0 / slope));
        }
    }
    for (low_freq_factor, high_freq_factor) in ends {
        let found = RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings: context,
        };
        if !(low_freq_factor > 0.0 && high_freq_factor > low_freq_factor) {
            continue;
        }
        let with = LlamaConfig { rope_scaling: Some(found), ..plain.clone() };
        if same_factors(&with, factors, 10.0 * SAME) {
            return Ok(Some(found));
        }
    }
    Err(format!(
        "dsq has the scaling of Llama 3 alone; expected factors from 1 to {largest} whose inverses lie on a ramp over the frequencies, got others"
    ))
}

/// Whether these are the factors of a config.
pub(crate) fn same_factors(c: &LlamaConfig, factors: &[f32], tolerance: f64) -> bool {
    let Some(mine) = self::factors(c) else { return false };
    let near = |(a, b): (&f32, &f32)| (f64::from(*a) / f64::from(*b) - 1.0).abs() <= tolerance;
    mine.len() == factors.len() && mine.iter().zip(factors).all(near)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelConfig;
    use std::path::Path;

    fn config(head_dim: usize, theta: f64, scaling: serde_json::Value) -> LlamaConfig {
        let text = serde_json::json!({"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
            "num_attention_heads": 4, "head_dim": head_dim, "vocab_size": 40, "max_position_embeddings": 256,
            "rope_theta": theta, "rope_scaling": scaling});
        match ModelConfig::from_json(&text.to_string(), Path::new("config.json")).unwrap() {
            ModelConfig::Llama(c) => c,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn factors_of_any_llama3_scaling_give_its_frequencies_back() {
        for (head_dim, theta, factor, context, low, high) in [
            (128, 5e5, 8.0, 8192, 1.0, 4.0),
            (64, 5e5, 32.0, 8192, 1.0, 4.0),
            (16, 1e4, 8.0, 32, 1.0, 4.0),
            (24, 1e6, 4.0, 64, 0.5, 6.0),
            (64, 1e4, 3.0, 4096, 2.0, 2.5),
            (8, 1e4, 8.0, 64, 1.0, 4.0),
            (128, 1e4, 10.0, 1024, 0.2, 30.0),
        ] {
            let scaling = serde_json::json!({"rope_type": "llama3", "factor": factor, "low_freq_factor": low,
                "high_freq_factor": high, "original_max_position_embeddings": context});
            let c = config(head_dim, theta, scaling.clone());
            let factors = factors(&c).unwrap();
            let found = fit(&c, &factors).unwrap_or_else(|e| panic!("{scaling}: {e} {factors:?}"));
            let with = LlamaConfig { rope_scaling: found, ..c.clone() };
            for (a, b) in with.rotary().frequencies.iter().zip(c.rotary().frequencies) {
                assert!((f64::from(*a) / f64::from(b) - 1.0).abs() < 1e-5, "{scaling}: {a} {b}");
            }
            if context == 8192 {
                assert_eq!(with.rope_scaling, c.rope_scaling);
            }
        }
        let c = config(8, 1e4, serde_json::Value::Null);
        assert_eq!(fit(&c, &[1.0; 4]), Ok(None));
        for (odd, words) in
            [(&[1.0, 2.0, 1.5, 4.0][..], "got others"), (&[0.5; 4], "at least 1"), (&[1.0; 3], "4 finite")]
        {
            assert!(fit(&c, odd).unwrap_err().contains(words), "{odd:?}");
        }
    }
}
