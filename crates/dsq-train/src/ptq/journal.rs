//! The journal of a run that looks at text. It is where finished blocks go, so that one of them is in memory at a time, and from where
//! the output is written; and a run that is killed goes on from it at the block it was at: what goes on has the same bits as a run that
//! nobody disturbed. Each file is written whole or not at all and carries checksums, its name and its run (`sealed.rs`). Not the output (see
//! `dsq-checkpoint`), and no checkpoints inside a block, or between the steps that train all blocks together.
//!
//! ```text
//! JOURNAL/journal.json              what the run was started with: another run is refused
//! JOURNAL/search.safetensors        the sets of layers that the search for mixed precision has measured
//! JOURNAL/block-00000.safetensors   codes, scales, changed norms and grids of inputs of a finished block; the last one of the head
//! JOURNAL/state.safetensors         the streams, and how many blocks are finished; replaced as a whole after each
//! JOURNAL/end-00000.safetensors     a linear layer after the end-to-end steps
//! JOURNAL/end.safetensors           these are done
//! JOURNAL/cache.safetensors         grids of the KV cache so far, and the streams of that walk; replaced after each layer
//! JOURNAL/writing                   all is chosen and the output is being written
//! JOURNAL/run.lock                  held while a process writes here
//! ```

mod blocks;
mod sealed;

pub use blocks::Blocks;

use super::{PtqLinear, PtqOutcome, Run, device, values};
use crate::TrainError;
use crate::run_dir::{differences, lock, replace};
use burn::tensor::{Tensor, TensorData as BurnData};
use dsq_checkpoint::NamedTensor;
use sealed::{Sealed, damaged, floats};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

/// Version of the files.
const FORMAT: u32 = 3;
const HEAD: &str = "journal.json";
const STATE: &str = "state.safetensors";
const END: &str = "end.safetensors";
/// Of the search for mixed precision.
pub(super) const SEARCH: &str = "search.safetensors";
/// Of the walk for the KV cache.
pub(super) const CACHE: &str = "cache.safetensors";
const WRITING: &str = "writing";

/// An open journal, locked against a second writer until it is dropped.
#[derive(Debug)]
pub struct Journal {
    dir: PathBuf,
    fingerprint: Value,
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
            let differences = differences(&read_head(&head)?, fingerprint);
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
        Ok(Self { dir: dir.into(), fingerprint: fingerprint.clone(), _lock: lock })
    }

    /// What there is of a journal in the folder `dir`, for a run of this `fingerprint`; `None` where there is none.
    ///
    /// # Errors
    /// [`TrainError::Journal`] for files that are no journal's; [`TrainError::Io`].
    pub fn look(dir: &Path, fingerprint: &Value) -> Result<Option<Found>, TrainError> {
        let head = dir.join(HEAD);
        if !head.exists() {
            return Ok(None);
        }
        let started = read_head(&head)?;
        let differences = differences(&started, fingerprint);
        let state = dir.join(STATE);
        let blocks = if state.exists() { Sealed::open(&state, &started)?.about::<State>()?.next } else { 0 };
        Ok(Some(Found { blocks, bytes: Self::size(dir), differences }))
    }

    /// Bytes of the files in the folder `dir`; 0 where there is none.
    pub fn size(dir: &Path) -> u64 {
        let files = fs::read_dir(dir).into_iter().flatten().flatten();
        files.filter_map(|e| Some(e.metadata().ok()?.len())).sum()
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

    /// The quantized layers of a run whose blocks are finished, as they were after everything that is written down.
    ///
    /// # Errors
    /// [`TrainError::Journal`] naming a file that is damaged, not of this run or not the one of its name, or has a layer that another
    /// one has too.
    pub fn blocks(&self) -> Result<Blocks, TrainError> {
        let mut blocks = Blocks::new(self.fingerprint.clone());
        for i in (0..).take_while(|&i| self.block(i).exists()) {
            blocks.add(&self.block(i), false)?;
        }
        if let Some((end, _)) = self.load::<End>(END)? {
            (0..end.linears).try_for_each(|i| blocks.add(&self.end(i), true))?;
        }
        Ok(blocks)
    }

    /// [`Journal::blocks`] of a run that is done: these `modules`, each once, and no others.
    ///
    /// # Errors
    /// As there, and for other layers.
    pub fn all_blocks<'a>(&self, modules: impl Iterator<Item = &'a str>) -> Result<Blocks, TrainError> {
        let blocks = self.blocks()?;
        let wanted: BTreeSet<&str> = modules.collect();
        if let Some(module) = wanted.iter().find(|m| blocks.find(m).is_none()) {
            return Err(damaged(&self.dir, module, "expected this layer in a block, got none"));
        }
        if let Some(module) = blocks.modules().find(|m| !wanted.contains(m)) {
            return Err(damaged(&self.dir, module, "expected no layer that the scheme does not name, got this one"));
        }
        Ok(blocks)
    }

    fn end(&self, i: usize) -> PathBuf {
        self.dir.join(format!("end-{i:05}.safetensors"))
    }

    /// Writes down how far a walk is: `about` and the residual stream.
    pub(super) fn save_walk(&self, name: &str, about: &impl Serialize, streams: Streams) -> Result<(), TrainError> {
        let mut tensors = Vec::new();
        for (name, stream) in streams {
            for (i, x) in stream.into_iter().enumerate() {
                tensors.push(floats(format!("{name}.{i}"), x.dims().to_vec(), values(x.clone())));
            }
        }
        self.save(name, about, tensors)
    }

    /// Writes down what is no stream.
    pub(super) fn save(&self, name: &str, about: &impl Serialize, tensors: Vec<NamedTensor>) -> Result<(), TrainError> {
        sealed::write(&self.dir.join(name), &self.fingerprint, tensors, about)
    }

    /// What [`Journal::save_walk`] wrote, if anything.
    pub(super) fn load<T: DeserializeOwned>(&self, name: &str) -> Result<Option<(T, Saved)>, TrainError> {
        let path = self.dir.join(name);
        if !path.exists() {
            return Ok(None);
        }
        let file = Sealed::open(&path, &self.fingerprint)?;
        Ok(Some((file.about()?, Saved { file, path })))
    }
}

/// The version and what the run was started with.
fn read_head(path: &Path) -> Result<Value, TrainError> {
    let text = fs::read(path).map_err(TrainError::io(path, "read"))?;
    let old: Head =
        serde_json::from_slice(&text).map_err(|e| damaged(path, "damaged", format!("not a journal: {e}")))?;
    if old.format != FORMAT {
        return Err(damaged(path, "format", format!("expected {FORMAT}, got {}", old.format)));
    }
    Ok(old.fingerprint)
}

/// What there is of a journal.
#[derive(Debug)]
pub struct Found {
    /// Finished blocks; one more than the model has where its head is done too.
    pub blocks: usize,
    /// Bytes of its files.
    pub bytes: u64,
    /// How the run that it is of differs from this one, field by field.
    pub differences: Vec<String>,
}

/// Streams by name.
pub(super) type Streams<'a> = Vec<(&'static str, Vec<&'a Tensor<3>>)>;

/// The streams of a walk that was written down.
pub(super) struct Saved {
    file: Sealed,
    path: PathBuf,
}

impl Saved {
    /// Takes up the stream `name`, whose parts must have the shapes of those of `into`.
    pub(super) fn stream<'a>(
        &self,
        name: &str,
        into: impl Iterator<Item = &'a mut Tensor<3>>,
    ) -> Result<(), TrainError> {
        for (i, x) in into.enumerate() {
            let (name, dims) = (format!("{name}.{i}"), x.dims());
            let shape = self.file.shape(&name).unwrap_or_default();
            if shape != dims {
                return Err(damaged(&self.path, &name, format!("expected shape {dims:?}, got {shape:?}")));
            }
            *x = Tensor::from_data(BurnData::new(self.file.read_f32(&name)?, dims), &device());
        }
        Ok(())
    }
}

/// How far the blocks are.
#[derive(Serialize, Deserialize)]
struct State {
    next: usize,
    done: usize,
}

/// Mean divergences of the end-to-end steps, as bits, and how many layers they trained.
#[derive(Serialize, Deserialize)]
struct End {
    divergences: Option<[u64; 2]>,
    linears: usize,
    done: usize,
}

/// A temporary sibling of `write_safetensors`, or of [`replace`].
fn is_temporary(name: &str) -> bool {
    name.contains(".dsq-tmp-") || ["journal.tmp", "writing.tmp"].contains(&name)
}

/// `block-00012.safetensors`, `end-00012.safetensors`.
fn is_block(name: &str) -> bool {
    let number = ["block-", "end-"].iter().find_map(|p| name.strip_prefix(p));
    let number = number.and_then(|n| n.strip_suffix(".safetensors"));
    number.is_some_and(|n| n.len() >= 5 && n.bytes().all(|b| b.is_ascii_digit()))
}

/// Whether a folder has nothing in it but what a journal has.
fn ours_only(dir: &Path) -> bool {
    let ours = |name: &str| {
        ["run.lock", STATE, END, SEARCH, CACHE, WRITING].contains(&name) || is_block(name) || is_temporary(name)
    };
    fs::read_dir(dir).is_ok_and(|mut d| d.all(|e| e.is_ok_and(|e| ours(&e.file_name().to_string_lossy()))))
}

impl Run<'_> {
    /// Writes down that block `i` is finished, and drops its layers, if there is a journal. The block after the last is the head.
    pub(super) fn record(&mut self, i: usize) -> Result<(), TrainError> {
        let Some(journal) = self.settings.journal else { return Ok(()) };
        let head = i == self.model.num_hidden_layers;
        let prefix = if head { "lm_head".to_owned() } else { format!("model.layers.{i}.") };
        let of_block = |name: &str| name.starts_with(&prefix);
        blocks::write(&journal.block(i), &journal.fingerprint, i, of_block, &self.outcome, &self.latents)?;
        self.outcome.linears.clear();
        self.latents.clear();
        if head {
            // Nothing looks at the streams any more.
            self.stream.clear();
            self.float_stream.clear();
        }
        let state = State { next: i + 1, done: self.progress.done };
        let streams = vec![
            ("stream", self.stream.iter().map(|(_, x)| x).collect()),
            ("float", self.float_stream.iter().collect::<Vec<_>>()),
        ];
        journal.save_walk(STATE, &state, streams)
    }

    /// Takes up what the journal has; gives the block to go on with.
    pub(super) fn restore(&mut self) -> Result<usize, TrainError> {
        let Some(journal) = self.settings.journal else { return Ok(0) };
        let Some((state, saved)) = journal.load::<State>(STATE)? else { return Ok(0) };
        let layers = self.model.num_hidden_layers;
        if state.next > layers + 1 {
            let problem = format!("expected at most {} blocks, got {}", layers + 1, state.next);
            return Err(damaged(&saved.path, "next", problem));
        }
        if state.next <= layers {
            saved.stream("stream", self.stream.iter_mut().map(|(_, x)| x))?;
            saved.stream("float", self.float_stream.iter_mut())?;
        }
        for i in 0..state.next {
            blocks::restore(&journal.block(i), &journal.fingerprint, &mut self.outcome)?;
        }
        self.progress.done = state.done;
        Ok(state.next)
    }

    /// Writes down linear `i` of those that the end-to-end steps trained.
    pub(super) fn record_end(&self, i: usize, linear: PtqLinear) -> Result<(), TrainError> {
        let Some(journal) = self.settings.journal else { return Ok(()) };
        let made = PtqOutcome { linears: vec![linear], ..PtqOutcome::default() };
        blocks::write(&journal.end(i), &journal.fingerprint, usize::MAX, |_| true, &made, &Vec::new())
    }

    /// Writes down that the end-to-end steps are done, which trained so many `linears`.
    pub(super) fn finish_end(&self, linears: usize) -> Result<(), TrainError> {
        let Some(journal) = self.settings.journal else { return Ok(()) };
        let divergences = self.outcome.end_to_end.map(|d| d.map(f64::to_bits));
        journal.save(END, &End { divergences, linears, done: self.progress.done }, Vec::new())
    }

    /// Whether the journal has the end-to-end steps, which are taken up then.
    pub(super) fn restore_end(&mut self) -> Result<bool, TrainError> {
        let Some(journal) = self.settings.journal else { return Ok(false) };
        let Some((end, _)) = journal.load::<End>(END)? else { return Ok(false) };
        (0..end.linears).try_for_each(|i| Sealed::open(&journal.end(i), &journal.fingerprint)?.verify())?;
        self.outcome.end_to_end = end.divergences.map(|d| d.map(f64::from_bits));
        self.progress.done = end.done;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsq_quant::{FloatType, Granularity, QuantArgs, QuantizedMatrix};
    use serde_json::json;

    #[test]
    fn every_layer_is_there_once() {
        let dir = tempfile::tempdir().unwrap();
        let journal = Journal::open(&dir.path().join("out.journal"), &json!({"dsq": "1"}), false).unwrap();
        let args = QuantArgs::int4(Granularity::PerChannel, FloatType::F32);
        let write = |path: &Path, module: &str| {
            let matrix = QuantizedMatrix::quantize(&[1.0, -0.5, 0.25, 0.0], 1, 4, args).unwrap();
            let linears = vec![PtqLinear { module: module.into(), matrix, fit: None, rescale: None }];
            let made = PtqOutcome { linears, ..PtqOutcome::default() };
            blocks::write(path, &journal.fingerprint, 0, |_| true, &made, &Vec::new()).unwrap();
        };
        let refused = |modules: &[&str], words: &str| {
            let e = journal.all_blocks(modules.iter().copied()).unwrap_err();
            assert!(e.exit_code() == 3 && e.to_string().contains(words), "{e}");
        };
        write(&journal.block(0), "a");
        write(&journal.block(1), "b");
        let found = journal.all_blocks(["b", "a"].into_iter()).unwrap();
        assert_eq!(found.modules().collect::<Vec<_>>(), ["a", "b"]);
        refused(&["a", "b", "c"], "c: expected this layer in a block, got none");
        refused(&["a"], "b: expected no layer that the scheme does not name, got this one");
        // A layer that the steps after the blocks trained is there again; one of two blocks is not.
        write(&journal.end(0), "a");
        journal.save(END, &End { divergences: None, linears: 1, done: 0 }, Vec::new()).unwrap();
        assert_eq!(journal.all_blocks(["a", "b"].into_iter()).unwrap().modules().count(), 2);
        write(&journal.block(1), "a");
        refused(&["a"], "block-00001.safetensors: a: expected each layer once, got it here and in");
    }
}
