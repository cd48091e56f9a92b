//! Which weights of two checkpoints differ, module by module, and how. Codes, scales and zero points are compared where both store them on
//! the same grid, values elsewhere. Not what a difference does to the logits (see `walk.rs`).

use super::language;
use super::patterns::{CodeChange, factor, moved, row_digests};
use crate::error::CliError;
use dsq_checkpoint::{Checkpoint, LinearWeight, LlamaConfig};
use dsq_quant::{FloatType, Granularity, QuantArgs, QuantizedMatrix};
use dsq_runtime::ModelPart;
use std::collections::BTreeSet;

/// A share of the norms, and of the modules, from which on their differing means another base model.
const ANOTHER_BASE: f64 = 0.9;

/// A module or tensor that differs.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The module, or the tensor where it is none of a module.
    pub name: String,
    /// Where it is in the model.
    pub part: ModelPart,
    /// What differs: `codes`, `scales`, `zero points`, `values`, `input grid`... joined with commas.
    pub kinds: String,
    /// The pattern, where it can be told.
    pub pattern: Option<String>,
    /// Values that differ (of codes, scales and zero points together).
    pub differ: usize,
    /// Values compared.
    pub of: usize,
    /// The largest difference of a value of the weight.
    pub largest: f64,
    /// Relative error of GOOD's and BAD's values to the float original.
    pub errors: Option<[f64; 2]>,
    rows: Option<Rows>,
}

/// Digests of the rows of a module that is stored in one form in both.
#[derive(Debug, Clone, PartialEq)]
struct Rows {
    k: usize,
    good: Vec<[u8; 16]>,
    bad: Vec<[u8; 16]>,
}

impl Difference {
    /// Kinds and pattern in one text.
    pub fn kind(&self) -> String {
        match &self.pattern {
            Some(pattern) => format!("{}: {pattern}", self.kinds),
            None => self.kinds.clone(),
        }
    }
}

/// All that differs in the weights.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Compared {
    /// In the order of the model.
    pub differences: Vec<Difference>,
    /// Modules compared.
    pub modules: usize,
    /// What all of them together say, where they do.
    pub verdict: Option<String>,
}

/// Compares two models of one shape; `float` are the weights that both were made from.
///
/// # Errors
/// Tensors that cannot be read.
pub fn compare(good: &Checkpoint, bad: &Checkpoint, float: Option<&Checkpoint>) -> Result<Compared, CliError> {
    let config = language(good)?;
    let mut modules: Vec<String> = good.config().linears().into_iter().map(|l| l.module).collect();
    for more in ["model.embed_tokens", "lm_head"] {
        if (good.is_quantized(more) || bad.is_quantized(more)) && !modules.iter().any(|m| m == more) {
            modules.push(more.into());
        }
    }
    let mut differences = Vec::new();
    for module in &modules {
        differences.extend(weight(good, bad, float, module, config)?);
        let (a, b) = (good.input_grid(module)?, bad.input_grid(module)?);
        if a != b {
            let pattern = Some(format!("{a:?} in GOOD, {b:?} in BAD"));
            let found = Difference::plain(module, rest_of(part_of(module, config)), "input grid", pattern);
            differences.push(found);
        }
    }
    for i in 0..config.num_hidden_layers {
        let (a, b) = (good.kv_grid(i)?, bad.kv_grid(i)?);
        if a != b {
            let pattern = Some(format!("{a:?} in GOOD, {b:?} in BAD"));
            let name = format!("model.layers.{i}.self_attn");
            differences.push(Difference::plain(&name, ModelPart::Rest(i), "KV grid", pattern));
        }
    }
    let (mut norms, mut other_norms) = (0, 0);
    for name in others(good, bad, &modules) {
        let found = tensor(good, bad, &name, config)?;
        if name.contains("norm") {
            norms += 1;
            other_norms += usize::from(found.is_some());
        }
        differences.extend(found);
    }
    let verdict = verdict(&differences, modules.len(), (other_norms, norms));
    name_moves(&mut differences, config);
    differences.sort_by_key(|d| (place(d.part), d.name.clone()));
    Ok(Compared { differences, modules: modules.len(), verdict })
}

/// Where a part stands in the order of the model.
pub fn place(part: ModelPart) -> (usize, usize) {
    match part {
        ModelPart::Embedding => (0, 0),
        ModelPart::Layer(i) | ModelPart::Rest(i) => (i + 1, 0),
        ModelPart::Linear(i, at) => (i + 1, at + 1),
        ModelPart::Output => (usize::MAX, 0),
    }
}

/// The part that holds a module or tensor.
pub fn part_of(name: &str, config: &LlamaConfig) -> ModelPart {
    if name.starts_with("model.embed_tokens") {
        return ModelPart::Embedding;
    }
    let inside = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.'));
    let Some((i, rest)) = inside.and_then(|(i, rest)| Some((i.parse::<usize>().ok()?, rest))) else {
        return ModelPart::Output;
    };
    let module = rest.strip_suffix(".bias").unwrap_or(rest);
    let at = config.layer_linears(i).iter().position(|(name, ..)| name == module);
    at.map_or(ModelPart::Rest(i), |at| ModelPart::Linear(i, at))
}

/// The part with the roundings that modules share.
fn rest_of(part: ModelPart) -> ModelPart {
    match part {
        ModelPart::Linear(i, _) | ModelPart::Layer(i) => ModelPart::Rest(i),
        other => other,
    }
}

/// Tensors of either model that belong to no module's weight.
fn others(good: &Checkpoint, bad: &Checkpoint, modules: &[String]) -> Vec<String> {
    let mut names: Vec<String> = good.names();
    let known: BTreeSet<String> = names.iter().cloned().collect();
    names.extend(bad.names().into_iter().filter(|n| !known.contains(n)));
    let modules: BTreeSet<&str> = modules.iter().map(String::as_str).collect();
    let of_module = |name: &String| match name.rsplit_once('.') {
        Some((module, part)) => part != "bias" && modules.contains(module),
        None => false,
    };
    // Scales of the KV cache were compared as grids.
    let of_cache = |name: &String| name.ends_with(".k_scale") || name.ends_with(".v_scale");
    names.retain(|n| !of_module(n) && !of_cache(n));
    names
}

impl Difference {
    fn plain(name: &str, part: ModelPart, kinds: &str, pattern: Option<String>) -> Self {
        let (name, kinds) = (name.to_owned(), kinds.to_owned());
        Self { name, part, kinds, pattern, differ: 1, of: 1, largest: 0.0, errors: None, rows: None }
    }
}

/// Compares the weight of a module.
fn weight(
    good: &Checkpoint,
    bad: &Checkpoint,
    float: Option<&Checkpoint>,
    module: &str,
    config: &LlamaConfig,
) -> Result<Option<Difference>, CliError> {
    let (a, b) = (good.linear(module)?, bad.linear(module)?);
    if a == b {
        return Ok(None);
    }
    let float = float.map(|f| f.linear(module).map(LinearWeight::into_f32)).transpose()?;
    let part = part_of(module, config);
    let mut out = Difference::plain(module, part, "values", None);
    let k = columns(&a);
    let same_form = match (&a, &b) {
        (LinearWeight::Float { .. }, LinearWeight::Float { .. }) => true,
        (LinearWeight::Quantized(x), LinearWeight::Quantized(y)) => same_grid(x, y),
        (LinearWeight::Ordered { matrix: x, order: p }, LinearWeight::Ordered { matrix: y, order: q }) => {
            same_grid(x, y) && p == q
        }
        _ => false,
    };
    match (&a, &b) {
        (LinearWeight::Quantized(x), LinearWeight::Quantized(y)) if same_form => {
            codes(&mut out, x, y, float.as_deref());
        }
        (LinearWeight::Ordered { matrix: x, .. }, LinearWeight::Ordered { matrix: y, .. }) if same_form => {
            codes(&mut out, x, y, None);
        }
        _ if !same_form => out.pattern = Some(format!("{} in GOOD, {} in BAD", form(&a), form(&b))),
        _ => {}
    }
    let (a, b) = (a.into_f32(), b.into_f32());
    if a.len() != b.len() {
        out.pattern = Some(format!("{} values in GOOD, {} in BAD", a.len(), b.len()));
        return Ok(Some(out));
    }
    values(&mut out, &a, &b);
    if let Some(w) = &float {
        out.errors = Some([relative_error(&a, w), relative_error(&b, w)]);
    }
    if same_form {
        out.rows = Some(Rows { k, good: row_digests(&a, k), bad: row_digests(&b, k) });
    }
    // The same values in another form are no difference.
    Ok((out.differ > 0).then_some(out))
}

fn columns(w: &LinearWeight) -> usize {
    match w {
        LinearWeight::Float { k, .. } => *k,
        LinearWeight::Quantized(q) | LinearWeight::Ordered { matrix: q, .. } => q.k,
    }
}

/// Whether codes mean the same steps; how the range of the grid was found does not matter.
fn same_grid(a: &QuantizedMatrix, b: &QuantizedMatrix) -> bool {
    let form = |q: &QuantizedMatrix| (QuantArgs { observer: Default::default(), ..q.args }, q.n, q.k);
    form(a) == form(b)
}

/// The form of a weight in words.
fn form(w: &LinearWeight) -> String {
    let of = |q: &QuantizedMatrix, order: &str| {
        let a = &q.args;
        let runs = match a.granularity {
            Granularity::PerTensor => "tensor".to_owned(),
            Granularity::PerChannel | Granularity::PerToken => "channel".into(),
            Granularity::PerGroup(g) | Granularity::PerTokenGroup(g) => format!("{g} inputs"),
            Granularity::PerBlock(rows, columns) => format!("block of {rows} x {columns}"),
        };
        let zero = if q.zeros.is_empty() { "" } else { " and zero point" };
        format!("{} with a {} scale{zero} for each {runs}{order}", a.qtype.name(), a.scale_dtype.name())
    };
    match w {
        LinearWeight::Float { .. } => "float".into(),
        LinearWeight::Quantized(q) => of(q, ""),
        LinearWeight::Ordered { matrix, .. } => of(matrix, ", in activation order"),
    }
}

/// Compares codes on grids of one form.
fn codes(out: &mut Difference, a: &QuantizedMatrix, b: &QuantizedMatrix, float: Option<&[f32]>) {
    let (mut kinds, mut patterns) = (Vec::new(), Vec::new());
    out.differ = 0;
    out.of = a.codes.len() + a.scales.len() + a.zeros.len();
    let changed: Vec<usize> = (0..a.scales.len()).filter(|&i| a.scales[i].to_bits() != b.scales[i].to_bits()).collect();
    if let Some(&first) = changed.first() {
        kinds.push("scales");
        out.differ += changed.len();
        let pairs: Vec<(f32, f32)> = changed.iter().map(|&i| (a.scales[i], b.scales[i])).collect();
        let count = match changed.len() {
            n if n == a.scales.len() => format!("all {n}"),
            1 => format!("1 of {}, number {first}", a.scales.len()),
            n => format!("{n} of {}", a.scales.len()),
        };
        match factor(&pairs, a.args.scale_dtype) {
            Some(f) => patterns.push(format!("{count}, times {f:.4}")),
            None => patterns.push(format!("{count} scales")),
        }
    }
    if a.global_scale != b.global_scale {
        kinds.push("global scale");
        out.differ += 1;
        patterns.push(format!("global scale {:?} in GOOD, {:?} in BAD", a.global_scale, b.global_scale));
    }
    let zeros = a.zeros.iter().zip(&b.zeros).filter(|(x, y)| x != y).count();
    if zeros > 0 {
        kinds.push("zero points");
        out.differ += zeros;
        let all = b.zeros.first().filter(|z| b.zeros.iter().all(|x| x == *z));
        match all {
            Some(z) => patterns.push(format!("zero points dropped, all are {z}")),
            None => patterns.push(format!("{zeros} of {} zero points", a.zeros.len())),
        }
    }
    let change = CodeChange::of(a, b, float.filter(|_| changed.is_empty() && zeros == 0));
    if change.differ > 0 {
        kinds.push("codes");
        out.differ += change.differ;
        let count = format!("{} of {} codes, by {} at most", change.differ, a.codes.len(), change.largest);
        match change.words().filter(|_| changed.is_empty() && zeros == 0) {
            Some(words) => patterns.push(format!("{count}, {words}")),
            None => patterns.push(count),
        }
    }
    out.kinds = kinds.join(", ");
    out.pattern = Some(patterns.join("; "));
}

/// Compares values of the same place.
fn values(out: &mut Difference, a: &[f32], b: &[f32]) {
    let changed = || a.iter().zip(b).filter(|(x, y)| x.to_bits() != y.to_bits());
    out.largest = changed().map(|(x, y)| (f64::from(*x) - f64::from(*y)).abs()).fold(0.0, f64::max);
    if out.kinds != "values" {
        return;
    }
    (out.differ, out.of) = (changed().count(), a.len());
    if out.pattern.is_none() {
        let count = format!("{} of {} values, by {:.3e} at most", out.differ, out.of, out.largest);
        let pairs: Vec<(f32, f32)> = changed().filter(|(x, _)| **x != 0.0).map(|(x, y)| (*x, *y)).collect();
        let times = factor(&pairs, FloatType::F32).filter(|_| pairs.len() == out.differ);
        out.pattern = Some(times.map_or(count.clone(), |f| format!("{count}, times {f:.4}")));
    }
}

/// Frobenius norm of the difference over that of the weight.
fn relative_error(values: &[f32], w: &[f32]) -> f64 {
    let (mut error, mut norm) = (0.0f64, 0.0f64);
    for (v, x) in values.iter().zip(w) {
        let (v, x) = (f64::from(*v), f64::from(*x));
        error += (v - x).powi(2);
        norm += x * x;
    }
    if norm == 0.0 { error.sqrt() } else { (error / norm).sqrt() }
}

/// Compares a tensor that is of no module's weight.
fn tensor(
    good: &Checkpoint,
    bad: &Checkpoint,
    name: &str,
    config: &LlamaConfig,
) -> Result<Option<Difference>, CliError> {
    let part = part_of(name, config);
    let (a, b) = match (good.info(name), bad.info(name)) {
        (Some(a), Some(b)) => (a, b),
        (a, _) => {
            let side = if a.is_some() { "GOOD" } else { "BAD" };
            return Ok(Some(Difference::plain(name, part, "tensor", Some(format!("only in {side}")))));
        }
    };
    if a.shape != b.shape {
        let pattern = format!("{:?} in GOOD, {:?} in BAD", a.shape, b.shape);
        return Ok(Some(Difference::plain(name, part, "shape", Some(pattern))));
    }
    let (Ok(x), Ok(y)) = (good.read_f32(name), bad.read_f32(name)) else {
        // No floats: bytes are what there is to compare.
        let same = good.sha256(name)? == bad.sha256(name)?;
        return Ok((!same).then(|| Difference::plain(name, part, "bytes", None)));
    };
    let mut out = Difference::plain(name, part, "values", None);
    values(&mut out, &x, &y);
    Ok((out.differ > 0).then_some(out))
}

/// Whether all differences together have one reason.
fn verdict(differences: &[Difference], modules: usize, (other_norms, norms): (usize, usize)) -> Option<String> {
    let weights: Vec<&Difference> =
        differences.iter().filter(|d| d.kinds != "input grid" && d.kinds != "KV grid").collect();
    let other = weights.iter().filter(|d| matches!(d.part, ModelPart::Linear(..))).count();
    let share = |a: usize, b: usize| b > 0 && a as f64 >= ANOTHER_BASE * b as f64;
    if !share(other, modules) {
        return None;
    }
    if share(other_norms, norms) {
        return Some(format!(
            "another base model: {other} of {modules} modules differ, and {other_norms} of {norms} norms, which quantizing leaves alone"
        ));
    }
    let errors: Vec<[f64; 2]> = weights.iter().filter_map(|d| d.errors).collect();
    let far = errors.iter().filter(|[good, bad]| *bad > 0.5 && *good < 0.5).count();
    if share(far, errors.len()) {
        return Some(format!(
            "another base model: {far} of {} modules are not near those of the reference in BAD, and are in GOOD",
            errors.len()
        ));
    }
    None
}

/// Names rows that were moved, in the place of what their codes and scales look like.
fn name_moves(differences: &mut [Difference], config: &LlamaConfig) {
    let layer = |d: &Difference| match d.part {
        ModelPart::Linear(i, _) => Some(i),
        _ => None,
    };
    let mut found = Vec::new();
    for (at, d) in differences.iter().enumerate() {
        let Some(rows) = &d.rows else { continue };
        let here: Vec<&Difference> = differences
            .iter()
            .filter(|o| layer(o) == layer(d) && o.rows.as_ref().is_some_and(|r| r.k == rows.k))
            .collect();
        let own = here.iter().position(|o| o.name == d.name).unwrap_or(0);
        let digests: Vec<Vec<[u8; 16]>> = here.iter().filter_map(|o| o.rows.as_ref()).map(|r| r.good.clone()).collect();
        let names: Vec<String> = here.iter().map(|o| o.name.clone()).collect();
        if let Some(moved) = moved(&rows.bad, own, &digests) {
            found.push((at, moved.words(own, &names, rows.bad.len(), config.head_dim)));
            continue;
        }
        let other = differences.iter().find(|o| o.rows.as_ref().is_some_and(|r| r.good == rows.bad));
        found.extend(other.map(|o| (at, format!("all rows are those of {}: exchanged", o.name))));
    }
    for (at, words) in found {
        differences[at].pattern = Some(words);
        differences[at].kinds = "rows".into();
    }
}
