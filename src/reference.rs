//! The logits of a reference model: computed now, computed and kept in a file, or read from that file. Not their form (see
//! `dsq_eval::LogitsWriter`).

use crate::error::CliError;
use dsq_checkpoint::{Checkpoint, CheckpointError, check_room, printable};
use dsq_eval::{EvalError, LogitsOf, LogitsReader, LogitsWriter, Window};
use dsq_runtime::{KvPolicy, KvType, LlamaRuntime, Logits};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};

/// Where logits come from.
pub enum Reference {
    /// From the model.
    Run(LlamaRuntime),
    /// From the model, into a file.
    Keep(LlamaRuntime, LogitsWriter<BufWriter<File>>, Partial),
    /// From a file.
    Read(LogitsReader<BufReader<File>>, PathBuf),
}

/// A file under a temporary name, removed unless it gets its own.
pub struct Partial {
    temp: PathBuf,
    path: PathBuf,
}

impl Drop for Partial {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.temp);
    }
}

impl Reference {
    /// The reference `model`; with `cache`, the file is read where it is there, and else written.
    ///
    /// # Errors
    /// Exit code 3 for a file of something else, 4 for one that cannot be read or has no room; as loading a model.
    pub fn open(
        model: &Checkpoint,
        cache: Option<&Path>,
        of: &LogitsOf,
        windows: &[Window<'_>],
        threads: usize,
    ) -> Result<Self, CliError> {
        let Some(path) = cache else { return Ok(Self::Run(LlamaRuntime::load(model, threads)?)) };
        let of = LogitsOf { model_sha256: digest(model)?, ..of.clone() };
        match File::open(path) {
            Ok(file) => {
                let reader = LogitsReader::new(BufReader::new(file), &of).map_err(|e| wrong(path, e))?;
                Ok(Self::Read(reader, path.into()))
            }
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                let predictions: usize = windows.iter().map(|w| w.tokens.len() - w.from).sum();
                // What zlib makes of the codes is about two thirds of this.
                check_room(path, predictions as u64 * (2 * of.vocab as u64 + 600))?;
                let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let temp = path.with_file_name(format!(".{name}.dsq-tmp-{}", std::process::id()));
                let file = File::create(&temp).map_err(|e| CheckpointError::io(&temp, "write", e))?;
                let partial = Partial { temp, path: path.into() };
                let writer = LogitsWriter::new(BufWriter::new(file), &of).map_err(|e| unwritten(path, e))?;
                Ok(Self::Keep(LlamaRuntime::load(model, threads)?, writer, partial))
            }
            Err(e) => Err(CheckpointError::io(path, "read", e).into()),
        }
    }

    /// The logits `[L, vocab]` of the next window of `L` tokens. Those of a file are the same whether it is written or read now.
    ///
    /// # Errors
    /// What running the model, or the file, gives.
    pub fn logits(&mut self, window: &Window<'_>) -> Result<Vec<f32>, CliError> {
        match self {
            Self::Run(runtime) => forward((runtime, KvType::F32), window.tokens),
            Self::Keep(runtime, writer, partial) => {
                let mut logits = forward((runtime, KvType::F32), window.tokens)?;
                writer.window(window, &mut logits).map_err(|e| unwritten(&partial.path, e))?;
                Ok(logits)
            }
            Self::Read(reader, path) => reader.window(window).map_err(|e| wrong(path, e)),
        }
    }

    /// Bytes that the loaded model takes; `None` where only its logits are read.
    pub fn resident_bytes(&self) -> Option<usize> {
        match self {
            Self::Run(runtime) | Self::Keep(runtime, ..) => Some(runtime.resident_bytes()),
            Self::Read(..) => None,
        }
    }

    /// Gives the file its name, after the last window.
    ///
    /// # Errors
    /// Exit code 4 where that fails.
    pub fn finish(self) -> Result<(), CliError> {
        let Self::Keep(_, writer, partial) = self else { return Ok(()) };
        let place = || -> std::io::Result<()> {
            let file = writer.finish()?.into_inner().map_err(|e| e.into_error())?;
            file.sync_all()?;
            std::fs::rename(&partial.temp, &partial.path)
        };
        place().map_err(|e| unwritten(&partial.path, e))
    }
}

/// Logits `[len, vocab]` of a sequence from an empty cache.
pub fn forward((runtime, kv): (&LlamaRuntime, KvType), tokens: &[u32]) -> Result<Vec<f32>, CliError> {
    let mut cache = runtime.new_cache_of(tokens.len(), kv, KvPolicy::Full)?;
    Ok(runtime.forward(tokens, &mut cache, Logits::All)?)
}

/// Digest of a model's config and stored tensors.
pub fn digest(model: &Checkpoint) -> Result<String, CliError> {
    let mut hash = Sha256::new();
    hash.update(format!("{:?}", model.config()));
    let mut names = model.names();
    names.sort_unstable();
    for name in names {
        hash.update(&name);
        hash.update([0]);
        hash.update(model.sha256(&name)?);
    }
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

fn unwritten(path: &Path, e: std::io::Error) -> CliError {
    CheckpointError::io(path, "write", e).into()
}

fn wrong(path: &Path, e: EvalError) -> CliError {
    CliError::new(3, format!("{}: {e}", printable(&path.to_string_lossy())))
        .with_hint("give another file for these logits, or remove this one")
}
