//! What `dsq inspect` says of a model whose every tensor can be read: signs that something went wrong on the way here, in values that
//! are legal one by one. Not what makes a model unreadable (see `checks.rs`), which stops every command.

use crate::json::parse_json;
use crate::{Checkpoint, Fault, ModelConfig, Severity};
use dsq_quant::{Mapping, QuantizedMatrix};
use std::collections::BTreeSet;

/// Modules that a finding names.
const LISTED: usize = 3;
/// Weights of a layer from which on the mean of its codes says something: it is off by 4 codes / sqrt(4096) at most, one time in three.
const ENOUGH: usize = 4096;

/// Signs in the codes of one layer; `name` is the tensor that holds them.
pub(crate) fn codes(ckpt: &Checkpoint, name: &str, matrix: &QuantizedMatrix) -> Option<Fault> {
    let global = matrix.global_scale.unwrap_or(1.0);
    let problem = if matrix.scales.iter().all(|&s| s == 1.0) && global == 1.0 {
        "every scale is 1, as tools store it where they found none; expected scales of these weights"
    } else if matrix.dequantize().iter().all(|&x| x == 0.0) {
        "every weight is 0; expected other codes"
    } else {
        return None;
    };
    Some(Fault::new(Severity::Warning, ckpt.path(), name, problem))
}

/// Signs in a float tensor: a matrix of zeros (a norm or a bias may be all zero).
pub(crate) fn floats(ckpt: &Checkpoint, name: &str, data: &[f32]) -> Option<Fault> {
    let matrix = ckpt.info(name).is_some_and(|i| i.shape.len() > 1) && !data.is_empty();
    let unused = matches!(ckpt.config(), ModelConfig::Llama(c) if c.mtp_layer(name).is_some());
    let zero = matrix && !unused && data.iter().all(|&x| x == 0.0);
    zero.then(|| Fault::new(Severity::Warning, ckpt.path(), name, "every weight is 0; expected other values"))
}

/// How many steps the weights of a layer with zero points of four bits or fewer lie beside 0 on the mean: of trained weights a small
/// part of one. `None` of other codes, and of too few.
pub(crate) fn shift(matrix: &QuantizedMatrix) -> Option<f64> {
    let args = &matrix.args;
    let told = args.mapping == Mapping::Asymmetric && args.qtype.float().is_none() && args.qtype.bits() <= 4;
    if !told || matrix.codes.len() < ENOUGH {
        return None;
    }
    let runs = args.runs(matrix.n, matrix.k);
    let sum: i64 = runs
        .map(|(scale, run)| {
            let zero = i64::from(matrix.qparams(scale).zero) * run.len() as i64;
            matrix.codes[run].iter().map(|&q| i64::from(q)).sum::<i64>() - zero
        })
        .sum();
    Some(sum as f64 / matrix.codes.len() as f64)
}

/// Zero points that are off by one everywhere: the weights of nearly all layers (by the name of the tensor of codes, with their
/// [`shift`]) lie a step to one side.
pub(crate) fn shifted(ckpt: &Checkpoint, layers: &[(String, f64)]) -> Option<Fault> {
    let off = |sign: f64| layers.iter().filter(|(_, s)| (0.6..1.4).contains(&(s * sign))).count();
    let (count, way) = [(off(1.0), "above"), (off(-1.0), "below")].into_iter().max_by_key(|c| c.0)?;
    if count == 0 || count * 10 < layers.len() * 9 {
        return None;
    }
    let mean = layers.iter().map(|(_, s)| s.abs()).sum::<f64>() / layers.len() as f64;
    let problem = format!(
        "zero points look off by one: in {count} of {} layers weights lie {mean:.2} steps {way} 0 on the mean; expected less than half a step",
        layers.len()
    );
    let hint = Some(
        "checkpoint_format \"gptq\" stores zero points less one, \"gptq_v2\", AWQ and compressed-tensors as they are"
            .to_owned(),
    );
    Some(Fault { hint, ..Fault::new(Severity::Warning, ckpt.path(), &layers[0].0, problem) })
}

/// A head beside an embedding that is to be the head: a copy says nothing, another matrix would be lost.
fn tied_head(ckpt: &Checkpoint) -> Option<Fault> {
    const HEAD: &str = "lm_head.weight";
    let tied = matches!(ckpt.config(), ModelConfig::Llama(c) if c.tie_word_embeddings);
    if !tied || ckpt.is_gguf() || ckpt.info(HEAD).is_none() {
        return None;
    }
    let (head, embedding) = (ckpt.read_f32(HEAD).ok()?, ckpt.read_f32("model.embed_tokens.weight").ok()?);
    let (severity, problem) = match head == embedding {
        true => (Severity::Note, "not used: a copy of the embedding, which is the output matrix (tie_word_embeddings)"),
        false => (
            Severity::Error,
            "not used: tie_word_embeddings is true; expected a copy of model.embed_tokens.weight, got another matrix",
        ),
    };
    Some(Fault::new(severity, ckpt.path(), HEAD, problem))
}

/// Signs that show across tensors and files.
pub(crate) fn model(ckpt: &Checkpoint) -> Vec<Fault> {
    let mut faults = global_scales(ckpt);
    faults.extend(tied_head(ckpt));
    faults.extend(default_scales(ckpt));
    faults.extend(tokenizer(ckpt));
    faults.extend(name(ckpt));
    faults
}

/// `a, b, c and 9 more`.
pub(crate) fn some_of(modules: &[String]) -> String {
    let mut text = modules.iter().take(LISTED).map(String::as_str).collect::<Vec<_>>().join(", ");
    if modules.len() > LISTED {
        text.push_str(&format!(" and {} more", modules.len() - LISTED));
    }
    text
}

/// A server multiplies q, k and v (gate and up) as one matrix with one global scale: where they differ it takes one of them for all.
fn global_scales(ckpt: &Checkpoint) -> Vec<Fault> {
    let scale = |module: &str| {
        let name = format!("{module}.weight_global_scale");
        ckpt.info(&name).and_then(|_| ckpt.read_f32(&name).ok()?.first().copied())
    };
    let mut faults = Vec::new();
    for spec in ckpt.config().linears() {
        let set = ckpt.config().fused_with(&spec.module);
        if set.len() == 1 || set[0] != spec.module {
            continue;
        }
        // One of them in another scheme shares nothing.
        let scales: Vec<(&str, f32)> = set.iter().filter_map(|m| Some((m.as_str(), scale(m)?))).collect();
        if scales.iter().any(|s| s.1 != scales[0].1) {
            let listed: Vec<String> = scales.iter().map(|(module, s)| format!("{s} ({module})")).collect();
            let problem = format!(
                "layers that servers fuse have global scales of their own; expected one, got {}",
                listed.join(", ")
            );
            let name = format!("{}.weight_global_scale", scales[0].0);
            let hint = Some("quantize again under one global scale, as dsq quantize does".to_owned());
            faults.push(Fault { hint, ..Fault::new(Severity::Warning, ckpt.path(), name, problem) });
        }
    }
    faults
}

/// Stored scales of inputs and of KV caches that are exactly 1, or the least step of their dtype: what tools write where nothing was
/// calibrated, or an expert saw no token.
fn default_scales(ckpt: &Checkpoint) -> Option<Fault> {
    let mut names = Vec::new();
    for spec in ckpt.config().linears() {
        let Ok(Some((args, p))) = ckpt.activation(&spec.module) else { continue };
        let unseen = !args.has_global_scale() && p.scale == args.scale_dtype.epsilon();
        if p.scale == 1.0 || unseen {
            let part = if args.has_global_scale() { "input_global_scale" } else { "input_scale" };
            names.push(format!("{}.{part}", spec.module));
        }
    }
    for i in (0..).take_while(|_| ckpt.kv_cache().is_some()) {
        let Ok(Some(grid)) = ckpt.kv_grid(i) else { break };
        if grid.k.scale == 1.0 && grid.v.scale == 1.0 {
            names.push(format!("model.layers.{i}.self_attn.k_scale"));
        }
    }
    let problem = format!(
        "{} scales of 1 or the least step, as tools store them where nothing was calibrated{}; expected scales of measured values: {}",
        names.len(),
        if names.iter().all(|n| n.contains(".experts.")) { " (experts that no token reached?)" } else { "" },
        some_of(&names)
    );
    names.first().map(|first| Fault::new(Severity::Warning, ckpt.path(), first, problem))
}

impl Checkpoint {
    /// Notes on files that a language model usually has beside its weights and this one has not: a tokenizer, a chat template.
    pub fn missing_files(&self) -> Vec<Fault> {
        let note = |field: &str, problem: &str| Fault::new(Severity::Note, self.path(), field, problem);
        match (self.config(), self.tokenizer_json(), self.chat_template()) {
            (ModelConfig::Llama(_), Ok(None), _) => vec![note("tokenizer.json", "expected a tokenizer, got none")],
            (ModelConfig::Llama(_), Ok(_), Ok(None)) => {
                vec![note("chat_template", "none: right for a base model, not for one that follows instructions")]
            }
            // A file that cannot be read is a fault of its own.
            _ => Vec::new(),
        }
    }
}

/// A tokenizer with more tokens than there are embeddings.
fn tokenizer(ckpt: &Checkpoint) -> Option<Fault> {
    let ModelConfig::Llama(config) = ckpt.config() else { return None };
    let file = ckpt.path().join("tokenizer.json");
    let fault = |field: &str, problem: String| Some(Fault::new(Severity::Error, &file, field, problem));
    let value = match ckpt.tokenizer_json().and_then(|bytes| bytes.map(|b| parse_json(&b, &file)).transpose()) {
        Ok(value) => value?,
        Err(e) => return fault("", e.to_string()),
    };
    let vocab = value.get("model").and_then(|m| m.get("vocab"));
    let of_object = vocab.and_then(|v| v.as_object()).and_then(|v| v.values().filter_map(|id| id.as_u64()).max());
    let of_list = vocab.and_then(|v| v.as_array()).and_then(|v| (v.len() as u64).checked_sub(1));
    let added = value.get("added_tokens").and_then(|a| a.as_array()).into_iter().flatten();
    let largest = added.filter_map(|t| t.get("id")?.as_u64()).chain(of_object).chain(of_list).max();
    let id = largest.filter(|&id| id >= config.vocab_size as u64)?;
    fault("model.vocab", format!("expected ids below the embedding's {} rows, got {id}", config.vocab_size))
}

/// A name that promises other bits than the weights have.
fn name(ckpt: &Checkpoint) -> Option<Fault> {
    let name = ckpt.path().file_name()?.to_string_lossy().to_lowercase();
    let promised = promised_bits(&name);
    let linears = ckpt.config().linears();
    let stored: BTreeSet<usize> = linears
        .iter()
        .filter_map(|l| match ckpt.gguf() {
            Some(_) => gguf_bits(&ckpt.info(&format!("{}.weight", l.module))?.dtype),
            None => ckpt.quantization()?.group_for(&l.module, "Linear").map(|g| g.weights.qtype.bits()),
        })
        .collect();
    // The name may speak of inputs or of the KV cache.
    let groups = linears.iter().filter_map(|l| ckpt.quantization()?.group_for(&l.module, "Linear"));
    let others = groups.filter_map(|g| Some(g.activations?.qtype.bits()));
    let mut found: BTreeSet<usize> = others.chain(ckpt.kv_cache().map(|kv| kv.qtype.bits())).collect();
    found.extend(&stored);
    if promised.is_empty() || !promised.is_disjoint(&found) {
        return None;
    }
    let bits = |set: &BTreeSet<usize>| set.iter().map(|b| format!("{b} bits")).collect::<Vec<_>>().join(", ");
    let got = if stored.is_empty() { "float weights".to_owned() } else { bits(&stored) };
    let problem = format!("the name promises other weights than there are; expected {}, got {got}", bits(&promised));
    Some(Fault::new(Severity::Warning, ckpt.path(), "", problem))
}

/// The bits of a GGUF type: `Q4_K` is 4; none for floats.
fn gguf_bits(dtype: &str) -> Option<usize> {
    dtype.strip_prefix('Q')?.chars().next()?.to_digit(10).map(|d| d as usize)
}

/// Bits of weights that a name speaks of: `w4a16`, `int4`, `4bit`, `4-bit`, `fp8`, `nvfp4`, `q4_0`.
fn promised_bits(name: &str) -> BTreeSet<usize> {
    let bytes = name.as_bytes();
    let digit = |i: usize| bytes.get(i).filter(|b| b.is_ascii_digit()).map(|b| (b - b'0') as usize);
    // A number of one digit, so that `llama-4bit` counts and `layers-24bit`, `int16` and `w16a16` do not.
    let alone = |i: usize| (i == 0 || digit(i - 1).is_none()) && digit(i + 1).is_none();
    let follows = |i: usize, what: &str| name.get(i..).is_some_and(|rest| rest.starts_with(what));
    let starts = |i: usize| i == 0 || !bytes[i - 1].is_ascii_alphanumeric();
    let mut out = BTreeSet::new();
    for i in (0..bytes.len()).filter(|&i| alone(i)) {
        let Some(bits) = digit(i).filter(|b| (2..=8).contains(b)) else { continue };
        let before = &name[..i];
        let weight = before.ends_with('w') && starts(i - 1) && follows(i + 1, "a") && digit(i + 2).is_some();
        let q = before.ends_with('q') && starts(i - 1) && follows(i + 1, "_");
        let typed =
            before.ends_with("int") && !before.ends_with("uint") || before.ends_with("fp") && !before.ends_with("bfp");
        if weight || q || typed || follows(i + 1, "bit") || follows(i + 1, "-bit") {
            out.insert(bits);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_promise_bits() {
        for (name, bits) in [
            ("qwen3-w4a16", vec![4]),
            ("llama-3.1-8b-instruct-int4", vec![4]),
            ("mistral-7b-awq-4bit", vec![4]),
            ("x-8-bit", vec![8]),
            ("deepseek-fp8", vec![8]),
            ("m-nvfp4", vec![4]),
            ("model.q4_0.gguf", vec![4]),
            ("model-q8_0.gguf", vec![8]),
            ("w4a16-kv-int8", vec![4, 8]),
            ("llama-3.1-8b", vec![]),
            ("int16-w16a16-bf16", vec![]),
            ("out-4", vec![]),
            ("layers24bit", vec![]),
            ("\u{e9}4bit", vec![4]),
        ] {
            assert_eq!(promised_bits(name).into_iter().collect::<Vec<_>>(), bits, "{name}");
        }
    }
}
