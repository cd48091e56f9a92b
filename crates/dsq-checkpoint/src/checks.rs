//! Checks of a whole model: the tensors that the config calls for exist with the right types and shapes (made at
//! open), and every value can be read (asked by `dsq inspect`). Not signs in values that are legal (see `lint.rs`).

use crate::checkpoint::hex_sha256;
use crate::columns::{self, FolderFormat};
use crate::gguf::proof_path;
use crate::json::read_json;
use crate::kv_cache;
use crate::packed::{G_IDX, WEIGHT_PARTS, expected_tensors};
use crate::{
    Checkpoint, CheckpointError, Dtype, Fault, LinearSpec, LinearWeight, ModelConfig, PROOF_FILE, Severity, lint,
    printable,
};
use dsq_quant::{InputGrid, Mapping};
use serde_json::Value;
use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};

/// How many problems an error lists.
const LISTED: usize = 10;

/// Checks names, types and shapes of every tensor against the config; returns warnings.
///
/// # Errors
/// [`CheckpointError::Invalid`] listing the first ten problems.
pub(crate) fn check_tensors(ckpt: &Checkpoint) -> Result<Vec<Fault>, CheckpointError> {
    let mut problems = Vec::new();
    let mut used: HashSet<String> = HashSet::new();
    for (name, shape) in ckpt.config().other_tensors() {
        expect_float(ckpt, &name, &shape, &mut problems);
        used.insert(name);
    }
    for spec in ckpt.config().linears() {
        check_linear(ckpt, &spec, &mut problems, &mut used);
    }
    if problems.is_empty() {
        check_shared_inputs(ckpt, &mut problems);
    }
    check_kv_cache(ckpt, &mut problems, &mut used);
    let mut faults = Vec::new();
    if problems.is_empty() {
        faults = columns::check_values(ckpt)?;
        // Below 0 they make every output NaN: small tensors, read at once.
        let images = !matches!(ckpt.config(), ModelConfig::Llama(_));
        for name in ckpt.names().iter().filter(|n| images && n.ends_with(".running_var")) {
            ckpt.variances(name)?;
        }
    }
    let mut unused = Vec::new();
    let ahead: Vec<String> = match ckpt.config() {
        ModelConfig::Llama(c) => ckpt.names().into_iter().filter(|n| c.mtp_layer(n).is_some()).collect(),
        _ => Vec::new(),
    };
    if let Some(first) = ahead.first() {
        let what =
            format!("{} tensors of layers that predict tokens beyond the next: neither run nor exported", ahead.len());
        faults.push(Fault::new(Severity::Note, ckpt.path(), first, what));
    }
    used.extend(ahead);
    for name in ckpt.names() {
        if !used.contains(&name) && check_unused(ckpt, &name, &mut problems) {
            unused.push(name);
        }
    }
    if let Some(first) = unused.first() {
        let listed: Vec<_> = unused.iter().take(LISTED).map(|n| printable(n)).collect();
        let problem = format!("{} tensors that the config does not call for: {}", unused.len(), listed.join(", "));
        faults.push(Fault::new(Severity::Warning, ckpt.path(), first, problem));
    }
    if problems.is_empty() {
        return Ok(faults);
    }
    let total = problems.len();
    problems.truncate(LISTED);
    let (field, first) = problems.remove(0);
    let mut text = first;
    if total > 1 {
        let rest: Vec<_> = problems.iter().map(|(f, p)| format!("{}: {p}", printable(f))).collect();
        text = format!("{text}; {total} tensors do not fit the config, also: {}", rest.join("; "));
    }
    let mut e = ckpt.invalid(&field, text);
    if let Some(near) = nearest(ckpt, &field) {
        e = e.with_hint(format!("the nearest name in the file is {}", printable(&near)));
    }
    Err(e)
}

type Problems = Vec<(String, String)>;

/// The scales of a KV cache: two numbers a layer, so they are read at once.
fn check_kv_cache(ckpt: &Checkpoint, problems: &mut Problems, used: &mut HashSet<String>) {
    if ckpt.kv_cache().is_none() {
        return;
    }
    let ModelConfig::Llama(c) = ckpt.config() else {
        let what = "only language models have a KV cache; expected null, got a scheme";
        problems.push((kv_cache::KEY.into(), what.into()));
        return;
    };
    if c.latent.is_some() {
        let what = "scales of a latent, which dsq does not cache; expected null, got a scheme";
        problems.push((kv_cache::KEY.into(), what.into()));
        return;
    }
    for i in 0..c.num_hidden_layers {
        match ckpt.kv_grid(i) {
            Ok(_) => {}
            Err(CheckpointError::Invalid(f)) => problems.push((f.field.clone(), f.problem.clone())),
            Err(e) => problems.push((kv_cache::names(i)[0].clone(), e.to_string())),
        }
        used.extend(kv_cache::names(i));
    }
}

fn expect_float(ckpt: &Checkpoint, name: &str, shape: &[usize], problems: &mut Problems) {
    let Some(info) = ckpt.info(name) else {
        problems.push((name.into(), "expected this tensor, got nothing".into()));
        return;
    };
    if info.shape != shape {
        problems.push((name.into(), format!("expected shape {shape:?}, got {:?}", info.shape)));
    } else if ckpt.dtype(name).is_some_and(|d| d.float().is_none()) {
        problems.push((name.into(), format!("expected F32, F16 or BF16, got {}", info.dtype)));
    }
}

fn check_linear(ckpt: &Checkpoint, spec: &LinearSpec, problems: &mut Problems, used: &mut HashSet<String>) {
    let name = |suffix: &str| ckpt.part(&spec.module, suffix);
    let (n, k) = (spec.n(), spec.k());
    used.extend(WEIGHT_PARTS.into_iter().chain(["bias"]).map(name));
    if ckpt.info(&name("bias")).is_some() {
        match ckpt.config() {
            // One that the config calls for was looked at with the other tensors.
            ModelConfig::Llama(c) if c.has_bias(&spec.module) => {}
            // AutoGPTQ wrote one for layers that have none.
            _ if columns::is_zero_bias(ckpt, &spec.module) => {}
            ModelConfig::Llama(c) => {
                let problem = format!("{} has no bias here; expected no such tensor, got one", c.model_type);
                problems.push((name("bias"), problem));
            }
            _ => expect_float(ckpt, &name("bias"), &[n], problems),
        }
    }
    let class = if spec.shape.len() == 4 { "Conv2d" } else { "Linear" };
    let group = ckpt.quantization().and_then(|q| q.group_for(&spec.module, class));
    let Some(group) = group else {
        if ckpt.is_quantized(&spec.module) {
            let what = "codes of a module that quantization_config does not name; expected a scheme, got none";
            let part = ["weight_packed", "qweight"].into_iter().find(|p| ckpt.info(&name(p)).is_some());
            problems.push((name(part.unwrap_or("weight")), what.into()));
        } else {
            expect_float(ckpt, &name("weight"), &spec.shape, problems);
        }
        return;
    };
    let packed = ["weight_packed", "qweight"].iter().any(|p| ckpt.info(&name(p)).is_some());
    if ckpt.info(&name("weight")).is_some() && packed {
        problems.push((name("weight"), "float weight beside a packed one; expected one of them, got both".into()));
    }
    let inputs = group.activations.as_ref().map_or(Ok(k), |a| a.group_len(k));
    if let Err(e) = group.weights.scale_shape(n, k).and(inputs) {
        problems.push((spec.module.clone(), e.to_string()));
        return;
    }
    let layout = ckpt.folder_format();
    if layout != FolderFormat::CompressedTensors {
        let problem = match spec.shape.len() {
            2 => columns::shape_problem(layout, group.weights.qtype.bits(), n, k),
            _ => Some(format!("{} holds linear layers; expected shape [out, in], got {:?}", layout.name(), spec.shape)),
        };
        if let Some(problem) = problem {
            problems.push((spec.module.clone(), problem));
            return;
        }
    }
    let format = layout.of_module(&group.weights, group.activations.as_ref());
    let expected = expected_tensors(format, &group.weights, n, k, spec.shape.len());
    for e in &expected {
        let (name, wanted) = (name(e.suffix), e.dtype.map_or("F32, F16 or BF16", Dtype::name));
        let problem = match ckpt.info(&name) {
            // Groups that are runs of inputs need no list.
            None if e.suffix == "g_idx" && !group.act_order => continue,
            None => "expected this tensor, got nothing".into(),
            Some(i) if !e.fits(&i.shape) => {
                let meant = columns::other_bits(layout, &group.weights, n, k, e, &i.shape);
                format!("expected shape {:?}, got {:?}{meant}", e.shape, i.shape)
            }
            Some(i) => match (Dtype::parse(&i.dtype), e.dtype) {
                (got, Some(dtype)) if got == Some(dtype) => continue,
                (Some(got), None) if got.float().is_some() => continue,
                _ => format!("expected {wanted}, got {}", i.dtype),
            },
        };
        problems.push((name, problem));
    }
    // A float weight beside a packed one was told above.
    for suffix in WEIGHT_PARTS.into_iter().filter(|s| *s != "weight" && !expected.iter().any(|e| e.suffix == *s)) {
        if ckpt.info(&name(suffix)).is_some() {
            let what = match suffix {
                // Tools leave it out where groups are runs of inputs; values are looked at with all tensors.
                G_IDX if group.act_order && layout == FolderFormat::CompressedTensors && spec.shape.len() == 2 => {
                    continue;
                }
                G_IDX if layout == FolderFormat::CompressedTensors => {
                    "groups in activation order, where actorder is not \"group\"; expected no such tensor, got one"
                        .into()
                }
                "weight_zero_point" => "zero points of a symmetric scheme; expected no such tensor, got one".into(),
                _ => format!("{} weights have no such tensor; expected none, got one", group.weights.qtype.name()),
            };
            problems.push((name(suffix), what));
        }
    }
    if let Some(activations) = group.activations.as_ref().filter(|a| !a.is_dynamic()) {
        let scale = if activations.has_global_scale() { "input_global_scale" } else { "input_scale" };
        let (scale, zero) = (name(scale), name("input_zero_point"));
        expect_one(ckpt, &scale, problems);
        if activations.mapping == Mapping::Asymmetric {
            expect_one(ckpt, &zero, problems);
        } else if ckpt.info(&zero).is_some() {
            problems.push((zero.clone(), "zero point of a symmetric scheme; expected no such tensor, got one".into()));
        }
        used.extend([scale, zero]);
    }
}

/// Layers that read one tensor (q, k and v; gate and up) must read it in one form. Asked once all tensors are there.
fn check_shared_inputs(ckpt: &Checkpoint, problems: &mut Problems) {
    for spec in ckpt.config().linears() {
        for other in ckpt.config().fused_with(&spec.module) {
            let (Ok(a), Ok(b)) = (ckpt.input_grid(&spec.module), ckpt.input_grid(&other)) else { continue };
            if a != b {
                let form = |g: Option<InputGrid>| match g {
                    None => "float".to_owned(),
                    Some(InputGrid { args, params: None }) => format!("{} {:?}", args.qtype.name(), args.granularity),
                    Some(InputGrid { args, params: Some(p) }) => {
                        format!("{} at scale {} and zero point {}", args.qtype.name(), p.scale, p.zero)
                    }
                };
                let what =
                    format!("{other} reads the same tensor; expected one form of it, got {} and {}", form(a), form(b));
                problems.push((spec.module.clone(), what));
                return;
            }
        }
    }
}

fn expect_one(ckpt: &Checkpoint, name: &str, problems: &mut Problems) {
    match ckpt.info(name) {
        None => problems.push((name.into(), "expected this tensor, got nothing".into())),
        Some(i) if i.shape.iter().product::<usize>() != 1 => {
            problems.push((name.into(), format!("expected one value, got shape {:?}", i.shape)));
        }
        Some(_) => {}
    }
}

/// A tensor that the config does not call for: more layers than the config has is an error, a bias or quantization
/// tensor that would be ignored too. True for anything else, which is worth a warning.
fn check_unused(ckpt: &Checkpoint, name: &str, problems: &mut Problems) -> bool {
    if let ModelConfig::Llama(c) = ckpt.config() {
        if name.ends_with("rotary_emb.inv_freq") {
            return false; // Written by old versions of transformers; follows from the config.
        }
        if name == "lm_head.weight" && c.tie_word_embeddings {
            return false; // The lint compares it with the embedding.
        }
        let layer = name.strip_prefix("model.layers.").and_then(|r| r.split('.').next()).and_then(|i| i.parse().ok());
        if let Some(i) = layer.filter(|i: &usize| *i >= c.num_hidden_layers) {
            let what = format!("expected layers below num_hidden_layers = {}, got layer {i}", c.num_hidden_layers);
            problems.push((name.into(), what));
            return false;
        }
    }
    if matches!(ckpt.config(), ModelConfig::Image(c) if c.is_counter(name)) {
        return false;
    }
    let last = name.rsplit('.').next().unwrap_or_default();
    let parts = [
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_global_scale",
        "weight_zero_point",
        "weight_g_idx",
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "input_scale",
        "k_scale",
        "v_scale",
    ];
    if parts.contains(&last) || last == "input_global_scale" {
        problems.push((name.into(), "quantization tensor that quantization_config does not call for".into()));
        return false;
    }
    let known_cnn = matches!(ckpt.config(), ModelConfig::ResNet(_)) && name.contains("bn");
    !known_cnn
}

/// The tensor name most like `wanted`, when it is near enough to be meant.
fn nearest(ckpt: &Checkpoint, wanted: &str) -> Option<String> {
    if ckpt.info(wanted).is_some() {
        return None;
    }
    // A missing or another prefix is the usual cause: `layers.0...` for `model.layers.0...`.
    let bare = wanted.strip_prefix("model.").unwrap_or(wanted);
    let names = ckpt.names();
    if let Some(name) = names.iter().find(|n| n.ends_with(bare)) {
        return Some(name.clone());
    }
    let scored = names.into_iter().take(100_000).map(|n| (strsim::jaro_winkler(&n, wanted), n));
    scored.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(score, _)| *score > 0.9).map(|(_, n)| n)
}

impl Checkpoint {
    /// Where the proof of an export lies: in the folder, or beside the file.
    pub fn proof_file(&self) -> PathBuf {
        self.gguf().map_or_else(|| self.path().join(PROOF_FILE), |g| proof_path(g.path()))
    }

    /// The proof of an export, if there is one.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for what is no JSON file of reasonable size; I/O errors.
    pub fn proof(&self) -> Result<Option<Value>, CheckpointError> {
        let file = self.proof_file();
        if file.symlink_metadata().is_err() { Ok(None) } else { read_json(&file).map(Some) }
    }
}

/// Compares a folder or a GGUF file with the proof that its export wrote beside it, if there is one: a changed tensor is an error, a
/// changed file a warning (people edit those). A proof that cannot be read is a warning.
fn check_proof(ckpt: &Checkpoint) -> Vec<Fault> {
    let gguf = ckpt.gguf();
    let fault = |severity, file: &Path, field: &str, problem: String| Fault::new(severity, file, field, problem);
    let proof = match ckpt.proof() {
        Ok(Some(proof)) => proof,
        Ok(None) => return Vec::new(),
        Err(e) => return vec![fault(Severity::Warning, ckpt.path(), PROOF_FILE, e.to_string())],
    };
    let mut faults = Vec::new();
    let tensors = proof.get("tensors").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    // Each once: a tensor of a GGUF file may hold many of the source's.
    let stored = tensors.iter().filter_map(|t| t.get("stored")?.as_object()).flatten();
    let stored: BTreeSet<(&str, &str)> =
        stored.map(|(name, hash)| (name.as_str(), hash.as_str().unwrap_or_default())).collect();
    let proven: HashSet<&str> = stored.iter().map(|(name, _)| *name).collect();
    for name in gguf.map_or_else(|| ckpt.names(), |g| g.stored_names()) {
        if !proven.contains(name.as_str()) {
            let problem = "a tensor that the proof does not name; expected its hash, got none".into();
            faults.push(fault(Severity::Error, ckpt.path(), &name, problem));
        }
    }
    let files = proof.get("files").and_then(Value::as_object);
    let named =
        |f: &serde_json::Map<String, Value>| if gguf.is_some() { !f.is_empty() } else { f.contains_key("config.json") };
    if !files.is_some_and(named) {
        let what = if gguf.is_some() { "the file" } else { "config.json" };
        let problem = format!("expected the hash of {what}, got none");
        faults.push(fault(Severity::Error, &ckpt.proof_file(), "files", problem));
    }
    for (name, expected) in stored {
        let found = match gguf {
            // By its name in the file.
            Some(g) => g.sha256_as_stored(name).and_then(|found| found.ok_or_else(|| ckpt.missing(name))),
            None => ckpt.sha256(name),
        };
        let problem = match found {
            Ok(got) if expected == got => continue,
            Ok(got) => format!("not the tensor that was exported; expected SHA-256 {expected:?}, got \"{got}\""),
            Err(e) => e.to_string(),
        };
        faults.push(fault(Severity::Error, ckpt.path(), name, problem));
    }
    let parts = gguf.map_or(1, |g| g.paths().len());
    if parts > 1 {
        let what = format!(
            "split since the export; expected the one file of the proof, got {parts} parts: only tensors are compared"
        );
        faults.push(fault(Severity::Note, ckpt.path(), "", what));
        return faults;
    }
    for (name, expected) in files.into_iter().flatten() {
        let found = match gguf {
            // The proof of a GGUF file names the file itself, perhaps before it was given another name.
            Some(g) => g.sha256_of_file().map(Some),
            None => ckpt.aux_file(name).map(|bytes| bytes.map(|b| hex_sha256(&b))),
        };
        let problem = match found {
            Ok(Some(hash)) if *expected == hash.as_str() => continue,
            Ok(Some(_)) => "changed since the export".into(),
            Ok(None) => "was exported and is missing".into(),
            Err(e) => e.to_string(),
        };
        let path = if gguf.is_some() { ckpt.path().to_path_buf() } else { ckpt.path().join(name) };
        faults.push(fault(Severity::Warning, &path, "", problem));
    }
    faults
}

/// Reads every tensor and lists what is wrong with the values.
pub(crate) fn lint(ckpt: &Checkpoint) -> Vec<Fault> {
    let mut faults = check_proof(ckpt);
    let mut shifts = Vec::new();
    for name in ckpt.names() {
        let codes = [".weight_packed", ".weight", ".qweight"].iter().find_map(|part| name.strip_suffix(part));
        if let Some(module) = codes.filter(|m| ckpt.is_quantized(m)) {
            match ckpt.linear(module).and_then(|weight| ckpt.activation(module).map(|_| weight)) {
                Ok(LinearWeight::Quantized(matrix) | LinearWeight::Ordered { matrix, .. }) => {
                    faults.extend(lint::codes(ckpt, &name, &matrix));
                    shifts.extend(lint::shift(&matrix).map(|shift| (name.clone(), shift)));
                }
                Ok(LinearWeight::Float { .. }) => {}
                Err(e) => faults.push(fault_of(ckpt, &name, &e)),
            }
            continue;
        }
        // Scales of a KV cache are no weights; they were checked when the model was opened.
        let cache_scale = ckpt.kv_cache().is_some() && (name.ends_with(".k_scale") || name.ends_with(".v_scale"));
        if cache_scale || ckpt.dtype(&name).is_some_and(|d| d.float().is_none()) {
            continue;
        }
        match ckpt.read_f32(&name) {
            Ok(data) => faults.extend(lint_values(ckpt, &name, &data).or_else(|| lint::floats(ckpt, &name, &data))),
            Err(e) => faults.push(fault_of(ckpt, &name, &e)),
        }
    }
    faults.extend(lint::shifted(ckpt, &shifts));
    faults.extend(lint::model(ckpt));
    faults
}

fn fault_of(ckpt: &Checkpoint, name: &str, e: &CheckpointError) -> Fault {
    match e {
        CheckpointError::Invalid(f) | CheckpointError::Usage(f) => (**f).clone(),
        CheckpointError::Quant { tensor, source, .. } => {
            Fault::new(Severity::Error, ckpt.path(), tensor, source.to_string())
        }
        other => Fault::new(Severity::Error, ckpt.path(), name, other.to_string()),
    }
}

/// Weights larger than this are most likely bytes in the wrong order (F027).
const PLAUSIBLE_ABSMAX: f32 = 1e6;

fn lint_values(ckpt: &Checkpoint, name: &str, data: &[f32]) -> Option<Fault> {
    let fault = |severity, problem| Some(Fault::new(severity, ckpt.path(), name, problem));
    if let Some(i) = data.iter().position(|x| !x.is_finite()) {
        let count = data.iter().filter(|x| !x.is_finite()).count();
        let problem = format!("expected finite values, got {count} non-finite, the first is {} at index {i}", data[i]);
        return fault(Severity::Error, problem);
    }
    let absmax = data.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    if absmax > PLAUSIBLE_ABSMAX {
        let problem = format!("expected magnitudes of weights, got {absmax:e}: are the bytes in the wrong order?");
        return fault(Severity::Warning, problem);
    }
    if !data.is_empty() && absmax > 0.0 && absmax < f32::MIN_POSITIVE {
        return fault(Severity::Warning, "all values are subnormal: are the bytes in the wrong order?".into());
    }
    None
}
