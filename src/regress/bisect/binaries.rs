//! Two dsq binaries on the same input: whether they give other token ids, other weights, or other logits, and for logits the first layer and
//! the kernel. Not the comparison of weights that they made (see `compare.rs`).

use super::cut::{cut, quantized, uncut};
use super::tokens::first_difference;
use super::{Cause, Finding, language};
use crate::error::CliError;
use dsq_checkpoint::{Checkpoint, SafetensorsFile, write_atomic};
use dsq_kernels::MAX_ISA;
use dsq_runtime::LlamaRuntime;
use serde_json::{Value, json};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A program and what it is called in answers.
#[derive(Debug, Clone)]
pub struct Binary {
    /// `GOOD` or `BAD`.
    pub side: &'static str,
    /// The file.
    pub path: PathBuf,
    /// Worker threads that it is given.
    pub threads: usize,
    /// The best instructions that it may use, as `DSQ_MAX_ISA` names them.
    pub max_isa: Option<&'static str>,
}

impl Binary {
    /// Runs it; what it prints.
    ///
    /// # Errors
    /// Exit code 4 where it does not start; what it says, with its own code, where it fails.
    fn run(&self, args: &[OsString]) -> Result<Vec<u8>, CliError> {
        let command = args.first().map(|a| a.to_string_lossy().into_owned()).unwrap_or_default();
        let name = format!("{} ({} binary)", self.path.display(), self.side);
        let out = Command::new(&self.path)
            .args(args)
            .args(["--threads", &self.threads.to_string()])
            .envs(self.max_isa.map(|max| (MAX_ISA, max)))
            .output()
            .map_err(|e| CliError::new(4, format!("{name}: cannot start: {e}")))?;
        if out.status.success() {
            return Ok(out.stdout);
        }
        let said = String::from_utf8_lossy(&out.stderr);
        let said = said.lines().find_map(|l| l.strip_prefix("error: ")).unwrap_or(said.trim()).to_owned();
        let code = out.status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(70);
        Err(CliError::new(code, format!("{name}: dsq {command}: {said}")))
    }

    /// Ids of each text.
    ///
    /// # Errors
    /// As [`Binary::run`]; exit code 3 for an answer that is none.
    fn ids(&self, model: &Path, texts: &Path) -> Result<Vec<Vec<u32>>, CliError> {
        let out = self.run(&[
            "tokenize".into(),
            model.into(),
            "--file".into(),
            texts.into(),
            "--literal".into(),
            "--json".into(),
        ])?;
        let answer: Value = serde_json::from_slice(&out).unwrap_or_default();
        serde_json::from_value(answer["ids"].clone()).map_err(|e| {
            CliError::new(3, format!("{} ({} binary): dsq tokenize: expected ids: {e}", self.path.display(), self.side))
        })
    }

    /// Quantizes `source` into `out`.
    ///
    /// # Errors
    /// As [`Binary::run`].
    pub fn quantize(&self, source: &Path, out: &Path, options: &[OsString]) -> Result<(), CliError> {
        let mut args: Vec<OsString> = vec!["quantize".into(), source.into(), "--out".into(), out.into()];
        args.extend(options.iter().cloned());
        self.run(&args).map(|_| ())
    }

    /// All logits of the lists of ids in `ids`.
    fn logits(&self, model: &Path, ids: &Path, scratch: &Path) -> Result<Vec<f32>, CliError> {
        self.logits_of(model, &["--tokens-file".into(), ids.into()], scratch)
    }

    /// All logits of what the options `text` name.
    fn logits_of(&self, model: &Path, text: &[OsString], scratch: &Path) -> Result<Vec<f32>, CliError> {
        let file = scratch.join(format!("{}.logits", self.side));
        let mut args: Vec<OsString> = vec!["eval".into(), model.into()];
        args.extend(text.iter().cloned());
        args.extend(["--logits-out".into(), file.clone().into(), "--json".into()]);
        self.run(&args)?;
        let logits = SafetensorsFile::open(&file)?;
        let mut out = Vec::new();
        for i in 0.. {
            let name = format!("logits.{i}");
            if logits.info(&name).is_none() {
                break;
            }
            out.extend(logits.read_f32(&name)?);
        }
        Ok(out)
    }
}

/// What both make of texts with the tokenizer of `model`.
///
/// # Errors
/// As [`Binary::run`].
pub fn tokenizer(
    good: &Binary,
    bad: &Binary,
    model: &Checkpoint,
    texts: &[String],
    scratch: &Path,
) -> Result<Vec<Finding>, CliError> {
    if texts.is_empty() || model.tokenizer_json()?.is_none() {
        return Ok(Vec::new());
    }
    let file = scratch.join("texts.json");
    write_atomic(&file, json!(texts).to_string().as_bytes())?;
    let (a, b) = (good.ids(model.path(), &file)?, bad.ids(model.path(), &file)?);
    let found = a.iter().zip(&b).enumerate().find_map(|(i, (a, b))| Some((i, first_difference(a, b)?)));
    Ok(found.map(|(i, kind)| Finding::new(Cause::Tokenizer, format!("ids of text {i}"), kind)).into_iter().collect())
}

/// Tokens of a text that both read by themselves.
const READ: usize = 64;

/// Whether both, which agree on ids, make the same of a text that they read by themselves: what a binary puts before a text, and where it
/// cuts it, shows in logits alone.
///
/// # Errors
/// As [`Binary::run`].
pub fn reading(
    (good, bad): (&Binary, &Binary),
    model: &Checkpoint,
    text: &Path,
    scratch: &Path,
    bound: f64,
) -> Result<Option<Finding>, CliError> {
    let tokens = READ.min(language(model)?.max_position_embeddings);
    let options = ["--text".into(), text.into(), "--max-tokens".into(), tokens.to_string().into()];
    let good = good.logits_of(model.path(), &options, scratch)?;
    let apart = Apart::of(&good, &bad.logits_of(model.path(), &options, scratch)?);
    let kind = "both agree on the same ids, and not on this text: another BOS before it, or another cut";
    let differs = apart.relative > bound;
    Ok(differs.then(|| Finding::new(Cause::Tokenizer, text.display().to_string(), kind)))
}

/// How far two lists of logits are apart.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Apart {
    /// Logits whose bits differ, of how many.
    bits: (usize, usize),
    /// The largest difference over GOOD's largest logit; infinite where one is NaN or there are more of one.
    relative: f64,
}

impl Apart {
    fn of(good: &[f32], bad: &[f32]) -> Self {
        let bits = good.iter().zip(bad).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        let largest = good.iter().fold(0.0f64, |m, z| m.max(f64::from(z.abs())));
        let apart = |(a, b): (&f32, &f32)| (f64::from(*a) - f64::from(*b)).abs();
        // NaN must not be lost in a maximum.
        let worst = good.iter().zip(bad).map(apart).fold(0.0f64, |m, x| if x.is_nan() || x > m { x } else { m });
        let relative = if bits == 0 && good.len() == bad.len() {
            0.0
        } else if good.len() != bad.len() || worst.is_nan() || largest == 0.0 {
            f64::INFINITY
        } else {
            worst / largest
        };
        Self { bits: (bits, good.len()), relative }
    }
}

/// What is known of the logits of two binaries.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Kernels {
    /// The layer and kernel that is beyond the bound.
    pub findings: Vec<Finding>,
    /// What else was seen.
    pub notes: Vec<String>,
    /// Times that each binary ran.
    pub runs: usize,
}

/// Both on the same checkpoint and ids, and, where logits are more than `bound` of the largest apart, on parts of it.
struct Pair<'a> {
    good: &'a Binary,
    bad: &'a Binary,
    model: &'a Checkpoint,
    ids: &'a Path,
    scratch: &'a Path,
    bound: f64,
    runs: usize,
}

impl Pair<'_> {
    fn apart(&mut self, model: &Path) -> Result<Apart, CliError> {
        self.runs += 1;
        let good = self.good.logits(model, self.ids, self.scratch)?;
        let bad = self.bad.logits(model, self.ids, self.scratch)?;
        Ok(Apart::of(&good, &bad))
    }

    /// Of the first `layers` layers, with `floats` in float.
    fn apart_in(&mut self, layers: usize, floats: &[String]) -> Result<Apart, CliError> {
        let folder = self.scratch.join("cut");
        cut(self.model, layers, floats, &folder)?;
        let apart = self.apart(&folder);
        std::fs::remove_dir_all(&folder)
            .map_err(|e| CliError::new(4, format!("{}: cannot remove: {e}", folder.display())))?;
        apart
    }

    fn agrees(&mut self, layers: usize, floats: &[String]) -> Result<bool, CliError> {
        Ok(self.apart_in(layers, floats)?.relative <= self.bound)
    }
}

/// Compares the logits of two binaries, `ids` a file of lists of ids, and names the first layer and the kernel that are apart.
///
/// # Errors
/// As [`Binary::run`]; what [`cut`] refuses.
pub fn kernels(
    (good, bad): (&Binary, &Binary),
    model: &Checkpoint,
    ids: &Path,
    scratch: &Path,
    bound: f64,
) -> Result<Kernels, CliError> {
    let mut pair = Pair { good, bad, model, ids, scratch, bound, runs: 0 };
    let all = pair.apart(model.path())?;
    let mut out = Kernels::default();
    let size = |apart: &Apart| {
        let (differ, of) = apart.bits;
        format!("{differ} of {of} logits have other bits, by {:.2e} of the largest logit at most", apart.relative)
    };
    if all.relative <= bound {
        let note = match all.bits.0 {
            0 => format!("kernels: both binaries give the same bits, {} logits", all.bits.1),
            _ => format!("kernels: {}: rounding, within the bound {bound:e}", size(&all)),
        };
        out.notes.push(note);
        out.runs = pair.runs;
        return Ok(out);
    }
    out.notes.push(format!("kernels: {}: beyond the bound {bound:e}", size(&all)));
    if let Some(why) = uncut(model)? {
        out.findings.push(Finding::new(Cause::Kernel, "", format!("which layer is not known: {why}")));
        out.runs = pair.runs;
        return Ok(out);
    }
    // The fewest layers that are apart: `low` agree (none is taken to), `high` do not.
    let (mut low, mut high) = (0, language(model)?.num_hidden_layers);
    while high - low > 1 {
        let middle = (low + high) / 2;
        if pair.agrees(middle, &[])? {
            low = middle;
        } else {
            high = middle;
        }
    }
    let layer = high - 1;
    out.notes.push(format!("kernels: the first {layer} layers agree, the first {high} do not"));
    let modules = quantized(model, layer)?;
    let mut alone = Vec::new();
    for group in together(model, &modules)? {
        if pair.agrees(high, &group)? {
            alone.push(group);
        }
    }
    let place = format!("model.layers.{layer}");
    let found = if !alone.is_empty() {
        let kernels = LlamaRuntime::load(model, good.threads)?.kernels();
        let name = |group: &Vec<String>| {
            let kernel = kernels.iter().find(|(name, _)| *name == group[0]).map_or("unknown", |(_, k)| k.as_str());
            let what = if group.len() == 1 { "this module is" } else { "these modules are" };
            Finding::new(Cause::Kernel, group.join(", "), format!("{kernel}; both agree where {what} float"))
        };
        alone.iter().map(name).collect()
    } else if !modules.is_empty() && pair.agrees(high, &modules)? {
        let kind = format!("more than one of its quantized modules: {}", modules.join(", "));
        vec![Finding::new(Cause::Kernel, place, kind)]
    } else {
        let what = if layer == 0 {
            "embedding, head, attention, norms or a float product"
        } else {
            "attention, norms or a float product"
        };
        vec![Finding::new(Cause::Kernel, place, format!("{what}: both disagree with all of its modules in float"))]
    };
    out.findings = found;
    out.runs = pair.runs;
    Ok(out)
}

/// The modules of a layer, those together that can be float only together: where inputs are quantized, what reads one tensor reads one form
/// of it.
fn together(model: &Checkpoint, modules: &[String]) -> Result<Vec<Vec<String>>, CliError> {
    let mut groups: Vec<Vec<String>> = Vec::new();
    for module in modules {
        let reads = |names: &[&str]| names.iter().any(|n| module.ends_with(n));
        let shared =
            [&["q_proj", "k_proj", "v_proj"][..], &["gate_proj", "up_proj"]].into_iter().find(|names| reads(names));
        let stem = |m: &str| m.rsplit_once('.').map(|(stem, _)| stem.to_owned());
        let beside = groups.iter_mut().find(|g| {
            stem(&g[0]) == stem(module) && shared.is_some_and(|names| names.iter().any(|n| g[0].ends_with(n)))
        });
        match beside {
            Some(group) if model.input_grid(module)?.is_some() => group.push(module.clone()),
            _ => groups.push(vec![module.clone()]),
        }
    }
    Ok(groups)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_of_logits_lose_no_nan_and_no_missing_ones() {
        let same = Apart::of(&[1.0, -4.0], &[1.0, -4.0]);
        assert_eq!((same.bits, same.relative), ((0, 2), 0.0));
        assert_eq!(Apart::of(&[1.0, -4.0], &[1.5, -4.0]).relative, 0.125);
        assert_eq!(Apart::of(&[1.0, -4.0], &[f32::NAN, -4.0]).relative, f64::INFINITY);
        assert_eq!(Apart::of(&[1.0, -4.0], &[1.0]).relative, f64::INFINITY);
        assert_eq!(Apart::of(&[0.0], &[0.1]).relative, f64::INFINITY);
    }
}
