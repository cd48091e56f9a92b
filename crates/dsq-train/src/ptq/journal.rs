//! The journal of a calibrated run, so that a run that is killed goes on at the block it was at: what the finished blocks became, and
//! the residual streams at the next one, each written whole or not at all. What goes on from a journal has the same bits as a run that
//! nobody disturbed. Not the output (see `dsq-checkpoint`), and no checkpoints inside a block.
//!
//! ```text
//! JOURNAL/journal.json          what the run was started with: another run is refused
//! JOURNAL/block-00000.safetensors   codes, scales, changed norms and grids of inputs of a finished block
//! JOURNAL/state.safetensors     the streams, and how many blocks are finished; replaced as a whole after each
//! JOURNAL/writing               the blocks are done and the output is being written
//! JOURNAL/run.lock              held while a process writes here
//! ```

use super::{BlockFit, Fit, PtqLinear, PtqNorm, PtqOutcome, Rescale, Run, device, values};
use crate::TrainError;
use crate::run_dir::{differences, lock, replace};
use burn::tensor::{Tensor, TensorData as BurnData};
use dsq_checkpoint::{Dtype, NamedTensor, SafetensorsFile, TensorData, write_safetensors};
use dsq_quant::{FloatType, InputGrid, QParams, QuantArgs, QuantizedMatrix, pack_rows, packed_words, unpack_i32};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Version of the files.
const FORMAT: u32 = 1;
const HEAD: &str = "journal.json";
const STATE: &str = "state.safetensors";
const WRITING: &str = "writing";

/// An open journal, locked against a second writer until it is dropped.
#[derive(Debug)]
pub struct Journal {
    dir: PathBuf,
    _lock: File,
}

#[derive(Serialize, Deserialize)]
struct Head {
    format: u32,
    fingerprint: Value,
}

impl Journal {
    /// What follows the name of an output in that of its journal.
    pub const SUFFIX: &'static str = ".journal";

    /// Begins a journal in the folder `dir`, or goes on with the one there, which must be of the same `fingerprint` (a JSON object of
    /// all that the result depends on). Nothing to go on with is no error: the run was killed before it had begun one.
    ///
    /// # Errors
    /// [`TrainError::RunFolder`] (exit code 2) for a journal without `resume`, one of another run (each field that differs is
    /// named with both values) and a folder of something else; [`TrainError::InUse`]; [`TrainError::Artifact`] for
    /// a file that is no journal; [`TrainError::Io`].
    pub fn open(dir: &Path, fingerprint: &Value, resume: bool) -> Result<Self, TrainError> {
        let refuse =
            |problem: String, hint: &str| Err(TrainError::RunFolder { path: dir.into(), problem, hint: hint.into() });
        let head = dir.join(HEAD);
        let exists = head.exists();
        if exists && !resume {
            let problem = "the journal of an interrupted run; expected --resume or no such folder, got neither";
            return refuse(problem.into(), "--resume goes on with it; remove the folder to begin again");
        }
        if dir.exists() && !exists && !ours_only(dir) {
            let problem = "the place of the journal; expected no such folder, got one with other files";
            return refuse(problem.into(), "choose another --out");
        }
        fs::create_dir_all(dir).map_err(TrainError::io(dir, "create"))?;
        let lock = lock(dir)?;
        for entry in fs::read_dir(dir).map_err(TrainError::io(dir, "list"))?.flatten() {
            let name = entry.file_name();
            // What a kill left half written; and without a head, everything.
            if is_temporary(&name.to_string_lossy()) || (!exists && name != "run.lock") {
                fs::remove_file(entry.path()).map_err(TrainError::io(dir, "remove"))?;
            }
        }
        if exists {
            let text = fs::read_to_string(&head).map_err(TrainError::io(&head, "read"))?;
            let artifact = |problem: String| TrainError::Artifact { path: head.clone(), problem };
            let old: Head = serde_json::from_str(&text).map_err(|e| artifact(format!("not a journal: {e}")))?;
            if old.format != FORMAT {
                return Err(artifact(format!("format: expected {FORMAT}, got {}", old.format)));
            }
            let differences = differences(&old.fingerprint, fingerprint);
            if !differences.is_empty() {
                let problem = format!("the journal of another run: {}", differences.join("; "));
                return refuse(
                    problem,
                    "resume with what the run was started with, or remove the folder to begin again",
                );
            }
        } else {
            let text = serde_json::to_vec_pretty(&Head { format: FORMAT, fingerprint: fingerprint.clone() });
            replace(&head, &text.unwrap_or_default())?;
        }
        Ok(Self { dir: dir.into(), _lock: lock })
    }

    /// Whether the folder `dir` is the journal of a run that had begun to write its output.
    pub fn is_writing(dir: &Path) -> bool {
        dir.join(HEAD).exists() && dir.join(WRITING).exists()
    }

    /// Says that the output is being written from now on.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn writing(&self) -> Result<(), TrainError> {
        replace(&self.dir.join(WRITING), b"")
    }

    /// Removes the journal. It goes out of the way in one step, so that a kill leaves it whole or, under a name that the next output
    /// of that name removes, in part.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn remove(self) -> Result<(), TrainError> {
        let name = self.dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let output = name.strip_suffix(Self::SUFFIX).unwrap_or(&name);
        let aside = self.dir.with_file_name(format!(".{output}.dsq-tmp-{}-journal", std::process::id()));
        fs::rename(&self.dir, &aside).map_err(TrainError::io(&self.dir, "remove"))?;
        fs::remove_dir_all(&aside).map_err(TrainError::io(&aside, "remove"))
    }

    fn block(&self, i: usize) -> PathBuf {
        self.dir.join(format!("block-{i:05}.safetensors"))
    }
}

/// A temporary sibling of `write_safetensors`, or of [`replace`].
fn is_temporary(name: &str) -> bool {
    name.contains(".dsq-tmp-") || ["journal.tmp", "writing.tmp"].contains(&name)
}

/// `block-00012.safetensors`.
fn is_block(name: &str) -> bool {
    let number = name.strip_prefix("block-").and_then(|n| n.strip_suffix(".safetensors"));
    number.is_some_and(|n| n.len() >= 5 && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Whether a folder has nothing in it but what a journal has.
fn ours_only(dir: &Path) -> bool {
    let ours = |name: &str| ["run.lock", STATE, WRITING].contains(&name) || is_block(name) || is_temporary(name);
    fs::read_dir(dir).is_ok_and(|mut d| d.all(|e| e.is_ok_and(|e| ours(&e.file_name().to_string_lossy()))))
}

/// What is not a tensor of a block. Floats are kept as their bits: JSON has no word for those that are not finite.
#[derive(Debug, Default, Serialize, Deserialize)]
struct About {
    linears: Vec<LinearAbout>,
    norms: Vec<(String, FloatType)>,
    inputs: Vec<InputAbout>,
    fits: Vec<(usize, u64, u64, bool)>,
    latents: Vec<String>,
    never_hit: Vec<String>,
}

/// Module, scheme, and the bits of the scale with the zero point.
type InputAbout = (String, QuantArgs, Option<(u32, i32)>);

#[derive(Debug, Serialize, Deserialize)]
struct LinearAbout {
    module: String,
    args: QuantArgs,
    size: [usize; 2],
    fit: Option<FitBits>,
}

#[derive(Debug, Serialize, Deserialize)]
struct FitBits {
    error: u64,
    rtn_error: u64,
    dead_columns: usize,
    plain_rows: usize,
    damping: Option<u64>,
}

impl From<Fit> for FitBits {
    fn from(f: Fit) -> Self {
        let (dead_columns, plain_rows, damping) = (f.dead_columns, f.plain_rows, f.damping.map(f64::to_bits));
        Self { error: f.error.to_bits(), rtn_error: f.rtn_error.to_bits(), dead_columns, plain_rows, damping }
    }
}

impl From<FitBits> for Fit {
    fn from(f: FitBits) -> Self {
        let (dead_columns, plain_rows, damping) = (f.dead_columns, f.plain_rows, f.damping.map(f64::from_bits));
        let (error, rtn_error) = (f64::from_bits(f.error), f64::from_bits(f.rtn_error));
        Self { error, rtn_error, dead_columns, plain_rows, damping }
    }
}

fn floats(name: String, data: &[f32]) -> NamedTensor {
    let data = TensorData::Float { shape: vec![data.len()], data: data.to_vec(), dtype: FloatType::F32 };
    NamedTensor { name, data }
}

fn bytes(name: String, codes: &[i8]) -> NamedTensor {
    NamedTensor { name, data: TensorData::I8 { shape: vec![codes.len()], data: codes.to_vec() } }
}

/// The tensors of linear `i` of a block. Integer codes lie in words, as a folder has them.
fn pack(i: usize, l: &PtqLinear) -> Vec<NamedTensor> {
    let (m, name) = (&l.matrix, |part: &str| format!("{i}.{part}"));
    let codes = match m.args.qtype.float() {
        Some(_) => bytes(name("codes"), &m.codes),
        None => {
            let data = pack_rows(&m.codes, m.k, m.args.qtype.bits());
            NamedTensor { name: name("codes"), data: TensorData::I32 { shape: vec![data.len()], data } }
        }
    };
    let mut out = vec![codes, floats(name("scales"), &m.scales), bytes(name("zeros"), &m.zeros)];
    out.push(floats(name("global"), m.global_scale.as_slice()));
    if let Some(r) = &l.rescale {
        out.extend([floats(name("rows"), &r.rows), floats(name("columns"), &r.columns)]);
    }
    out
}

fn unpack(file: &SafetensorsFile, i: usize, about: LinearAbout) -> Result<PtqLinear, TrainError> {
    let name = |part: &str| format!("{i}.{part}");
    let LinearAbout { module, args, size: [n, k], fit } = about;
    let (_, stored) = file.read_stored(&name("codes"))?;
    let codes = match args.qtype.float() {
        Some(_) => stored.into_iter().map(|b| b as i8).collect(),
        None => {
            let words: Vec<i32> = stored.as_chunks::<4>().0.iter().map(|&b| i32::from_le_bytes(b)).collect();
            let bits = args.qtype.bits();
            words.chunks(packed_words(k, bits).max(1)).flat_map(|row| unpack_i32(row, bits, k)).collect()
        }
    };
    let zeros = file.read_stored(&name("zeros"))?.1.into_iter().map(|b| b as i8).collect();
    let (scales, global) = (file.read_f32(&name("scales"))?, file.read_f32(&name("global"))?);
    let matrix = QuantizedMatrix { args, n, k, codes, scales, zeros, global_scale: global.first().copied() };
    matrix.validate().map_err(|source| TrainError::Quant { module: module.clone(), source })?;
    let rescale = match file.info(&name("rows")) {
        None => None,
        Some(_) => Some(Rescale { rows: file.read_f32(&name("rows"))?, columns: file.read_f32(&name("columns"))? }),
    };
    Ok(PtqLinear { module, matrix, fit: fit.map(Fit::from), rescale })
}

impl Run<'_> {
    /// Writes down that block `i` is finished, if there is a journal.
    pub(super) fn record(&self, i: usize) -> Result<(), TrainError> {
        let Some(journal) = self.settings.journal else { return Ok(()) };
        let prefix = format!("model.layers.{i}.");
        let of_block = |name: &str| name.starts_with(&prefix);
        let mut about = About::default();
        let mut tensors = Vec::new();
        for l in self.outcome.linears.iter().filter(|l| of_block(&l.module)) {
            tensors.extend(pack(about.linears.len(), l));
            let (module, args, size) = (l.module.clone(), l.matrix.args, [l.matrix.n, l.matrix.k]);
            about.linears.push(LinearAbout { module, args, size, fit: l.fit.map(FitBits::from) });
        }
        for norm in self.outcome.norms.iter().filter(|n| of_block(&n.name)) {
            tensors.push(floats(format!("norm.{}", about.norms.len()), &norm.values));
            about.norms.push((norm.name.clone(), norm.dtype));
        }
        for (module, grid) in self.outcome.inputs.iter().filter(|(m, _)| of_block(m)) {
            let params = grid.params.map(|p| (p.scale.to_bits(), p.zero));
            about.inputs.push((module.clone(), grid.args, params));
        }
        let fits = self.outcome.blocks.iter().filter(|b| b.layer == i);
        about.fits.extend(fits.map(|b| (b.layer, b.before.to_bits(), b.after.to_bits(), b.kept)));
        about.never_hit.extend(self.outcome.never_hit.iter().filter(|m| of_block(m)).cloned());
        for (module, latent) in self.latents.iter().filter(|(m, _)| of_block(m)) {
            tensors.push(floats(format!("latent.{}", about.latents.len()), latent));
            about.latents.push(module.clone());
        }
        let text = serde_json::to_vec(&about).unwrap_or_default();
        let data = TensorData::Raw { shape: vec![text.len()], bytes: text, dtype: Dtype::U8 };
        tensors.push(NamedTensor { name: "about".into(), data });
        write_safetensors(&journal.block(i), &tensors)?;
        drop(tensors);

        let number = |name: &str, n: usize| {
            let data = TensorData::I64 { shape: vec![1], data: vec![n as i64] };
            NamedTensor { name: name.into(), data }
        };
        let mut state = vec![number("next", i + 1), number("done", self.progress.done)];
        let streams = [
            ("stream", self.stream.iter().map(|(_, x)| x).collect()),
            ("float", self.float_stream.iter().collect::<Vec<_>>()),
        ];
        for (name, stream) in streams {
            for (i, x) in stream.into_iter().enumerate() {
                let (shape, data) = (x.dims().to_vec(), values(x.clone()));
                let data = TensorData::Float { shape, data, dtype: FloatType::F32 };
                state.push(NamedTensor { name: format!("{name}.{i}"), data });
            }
        }
        Ok(write_safetensors(&journal.dir.join(STATE), &state)?)
    }

    /// Takes up what the journal has; gives the block to go on with.
    pub(super) fn restore(&mut self) -> Result<usize, TrainError> {
        let Some(journal) = self.settings.journal else { return Ok(0) };
        let path = journal.dir.join(STATE);
        if !path.exists() {
            return Ok(0);
        }
        let state = SafetensorsFile::open(&path)?;
        let number = |name: &str| -> Result<usize, TrainError> {
            let (_, bytes) = state.read_stored(name)?;
            let n = bytes.try_into().ok().map(i64::from_le_bytes).and_then(|n| usize::try_from(n).ok());
            n.ok_or_else(|| TrainError::Artifact { path: path.clone(), problem: format!("{name}: expected a number") })
        };
        let next = number("next")?;
        if next > self.model.num_hidden_layers {
            let problem = format!("next: expected at most {} blocks, got {next}", self.model.num_hidden_layers);
            return Err(TrainError::Artifact { path, problem });
        }
        let read = |name: String, dims: [usize; 3]| -> Result<Tensor<3>, TrainError> {
            let shape = state.info(&name).map(|i| i.shape).unwrap_or_default();
            if shape != dims {
                let problem = format!("{name}: expected shape {dims:?}, got {shape:?}");
                return Err(TrainError::Artifact { path: path.clone(), problem });
            }
            Ok(Tensor::from_data(BurnData::new(state.read_f32(&name)?, dims), &device()))
        };
        for (i, (_, x)) in self.stream.iter_mut().enumerate() {
            *x = read(format!("stream.{i}"), x.dims())?;
        }
        for (i, x) in self.float_stream.iter_mut().enumerate() {
            *x = read(format!("float.{i}"), x.dims())?;
        }
        for i in 0..next {
            let (outcome, latents) = read_block(&journal.block(i))?;
            self.outcome.linears.extend(outcome.linears);
            self.outcome.norms.extend(outcome.norms);
            self.outcome.inputs.extend(outcome.inputs);
            self.outcome.blocks.extend(outcome.blocks);
            self.outcome.never_hit.extend(outcome.never_hit);
            self.latents.extend(latents);
        }
        self.progress.done = number("done")?;
        Ok(next)
    }
}

/// Latent weights by module.
type Latents = Vec<(String, Vec<f32>)>;

/// What a finished block became, and its latent weights.
fn read_block(path: &Path) -> Result<(PtqOutcome, Latents), TrainError> {
    let file = SafetensorsFile::open(path)?;
    let (_, text) = file.read_stored("about")?;
    let about: About = serde_json::from_slice(&text)
        .map_err(|e| TrainError::Artifact { path: path.into(), problem: format!("about: not of a journal: {e}") })?;
    let mut out = PtqOutcome::default();
    for (i, linear) in about.linears.into_iter().enumerate() {
        out.linears.push(unpack(&file, i, linear)?);
    }
    for (i, (name, dtype)) in about.norms.into_iter().enumerate() {
        out.norms.push(PtqNorm { name, values: file.read_f32(&format!("norm.{i}"))?, dtype });
    }
    let params = |p: (u32, i32)| QParams { scale: f32::from_bits(p.0), zero: p.1 };
    out.inputs.extend(about.inputs.into_iter().map(|(m, args, p)| (m, InputGrid { args, params: p.map(params) })));
    let fit = |(layer, before, after, kept)| BlockFit {
        layer,
        before: f64::from_bits(before),
        after: f64::from_bits(after),
        kept,
    };
    out.blocks.extend(about.fits.into_iter().map(fit));
    out.never_hit = about.never_hit;
    let mut latents = Vec::new();
    for (i, module) in about.latents.into_iter().enumerate() {
        latents.push((module, file.read_f32(&format!("latent.{i}"))?));
    }
    Ok((out, latents))
}
