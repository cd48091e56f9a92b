//! Whether group sizes divide the layers they are meant for, found before any work and told of all layers at once. Not the
//! division itself (see `QuantArgs::group_len`).

use crate::{CheckpointError, ModelConfig};
use dsq_quant::{QuantArgs, QuantConfig, QuantError};
use std::collections::HashSet;
use std::path::Path;

/// Every layer of `config` that the scheme quantizes and whose reduction dimension the group size does not divide, as
/// one error that lists them all (F084). Call it before any work.
///
/// # Errors
/// [`CheckpointError::Usage`] (exit code 2).
pub fn check_groups(file: &Path, config: &ModelConfig, scheme: &QuantConfig) -> Result<(), CheckpointError> {
    check_shared_inputs(file, config, scheme)?;
    let mut bad: Vec<(String, usize)> = Vec::new();
    let mut sizes: Vec<usize> = Vec::new();
    let (mut good_leaves, mut divisor) = (HashSet::new(), 0);
    for spec in config.linears() {
        let Some(s) = scheme.scheme_for(&spec.module) else { continue };
        let k = spec.k();
        divisor = gcd(divisor, k);
        match s.check_length(k) {
            Err(QuantError::GroupNotDividing { group_size, .. }) => {
                bad.push((spec.module, k));
                if !sizes.contains(&group_size) {
                    sizes.push(group_size);
                }
            }
            Err(e) => return Err(CheckpointError::quant(file, &spec.module, e)),
            Ok(_) => {
                good_leaves.insert(leaf(&spec.module).to_owned());
            }
        }
    }
    if bad.is_empty() {
        return Ok(());
    }
    let sizes: Vec<String> = sizes.iter().map(usize::to_string).collect();
    let problem = format!(
        "expected a group size that divides in_features of every quantized layer, got {}, which does not divide {} of them: {}",
        sizes.join(" and "),
        bad.len(),
        list_layers(&bad).join(", ")
    );
    // The last part of a name stands for every layer that ends so, unless some of those are fine.
    let mut ignore: Vec<&str> = Vec::new();
    for (module, _) in bad.iter().filter(|(m, _)| !scheme.overrides.iter().any(|(p, _)| p.matches(m))) {
        let short = if good_leaves.contains(leaf(module)) { module.as_str() } else { leaf(module) };
        if !ignore.contains(&short) {
            ignore.push(short);
        }
    }
    let largest = (1..8).map(|i| 1usize << i).rfind(|g| divisor.is_multiple_of(*g));
    let fits = largest.map_or(String::new(), |g| format!(" ({g} divides all)"));
    // The group of NVFP4 and MXFP4 is part of their names.
    let mut hint = match scheme.scheme.weights.qtype.float() {
        None => format!("choose another group size{fits}"),
        Some(_) => "choose another scheme".into(),
    };
    if !ignore.is_empty() {
        let ignore: Vec<_> = ignore.iter().map(|m| format!("--ignore {m}")).collect();
        hint.push_str(&format!(", or leave these layers in float: {}", ignore.join(" ")));
    }
    Err(CheckpointError::usage(file, "--group-size", problem).with_hint(hint))
}

/// Whether layers that read one tensor (q, k and v; gate and up) read it in one form.
fn check_shared_inputs(file: &Path, config: &ModelConfig, scheme: &QuantConfig) -> Result<(), CheckpointError> {
    let form = |module: &str| scheme.scheme_for(module).and_then(|s| s.activations);
    let name =
        |a: Option<QuantArgs>| a.map_or("float".to_owned(), |a| format!("{} {:?}", a.qtype.name(), a.granularity));
    for spec in config.linears() {
        for other in config.fused_with(&spec.module) {
            let (a, b) = (form(&spec.module), form(&other));
            if a != b {
                let problem = format!(
                    "{} and {other} read one tensor; expected one form of it, got {} and {}",
                    spec.module,
                    name(a),
                    name(b)
                );
                return Err(CheckpointError::usage(file, "activations", problem)
                    .with_hint("give both the same scheme of activations, or leave both in float"));
            }
        }
    }
    Ok(())
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn leaf(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}

/// Module names with `k`; those that differ in a running number only are one entry: `model.layers.{0..29}.mlp.up_proj
/// (576)`.
fn list_layers(layers: &[(String, usize)]) -> Vec<String> {
    let mut out: Vec<(String, String, usize, usize, usize)> = Vec::new(); // head, tail, k, first, last
    let mut plain = Vec::new();
    for (module, k) in layers {
        let parts: Vec<&str> = module.split('.').collect();
        let Some((at, number)) = parts.iter().enumerate().find_map(|(i, p)| Some((i, p.parse::<usize>().ok()?))) else {
            plain.push(format!("{module} ({k})"));
            continue;
        };
        let (head, tail) = (parts[..at].join("."), parts[at + 1..].join("."));
        let run = out.iter_mut().find(|(h, t, kk, _, last)| *h == head && *t == tail && kk == k && last + 1 == number);
        match run {
            Some(run) => run.4 = number,
            None => out.push((head, tail, *k, number, number)),
        }
    }
    let numbered = out.into_iter().map(|(head, tail, k, first, last)| match first == last {
        true => format!("{head}.{first}.{tail} ({k})"),
        false => format!("{head}.{{{first}..{last}}}.{tail} ({k})"),
    });
    numbered.chain(plain).collect()
}
