//! Writing so that nothing is lost: a file or a whole folder appears under its name complete and synced, or not at
//! all. Not what is in the files (see `safetensors.rs`, `export.rs`).

use crate::safetensors::{Pending, sort, write_tensors};
use crate::{CheckpointError, NamedTensor, printable};
use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Marks temporary siblings; followed by the process id and a counter.
const TEMP: &str = ".dsq-tmp-";
static COUNTER: AtomicU64 = AtomicU64::new(0);

/// Replaces the contents of one file: temporary sibling, fsync, rename, fsync of the folder. A file that exists keeps
/// its mode; a new one gets the umask's. A symlink is followed: its target is replaced.
///
/// # Errors
/// [`CheckpointError::Io`]; the old file is then as it was and the temporary one is gone.
pub fn write_atomic(path: &Path, bytes: &[u8]) -> Result<(), CheckpointError> {
    replace(path, |f| f.write_all(bytes).map_err(|e| CheckpointError::io(path, "write", e)))
}

/// Writes one safetensors file as [`write_atomic`] does.
///
/// # Errors
/// As [`write_atomic`]; [`CheckpointError::Usage`] for a name that occurs twice or data of another length than its shape.
pub fn write_safetensors(path: &Path, tensors: &[NamedTensor]) -> Result<(), CheckpointError> {
    let mut tensors: Vec<Pending> = tensors.iter().map(Pending::from).collect();
    sort(&mut tensors);
    replace(path, |f| write_tensors(f, path, &tensors))
}

fn replace(path: &Path, write: impl FnOnce(&mut File) -> Result<(), CheckpointError>) -> Result<(), CheckpointError> {
    let real = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
    remove_leftovers(&real);
    let temp = sibling(&real)?;
    let written = write_new(&temp, path, existing_mode(&real), write)
        .and_then(|()| std::fs::rename(&temp, &real).map_err(|e| CheckpointError::io(path, "replace", e)));
    if written.is_err() {
        let _ = std::fs::remove_file(&temp);
        return written;
    }
    sync_dir(parent(&real))
}

/// Refuses an output that would damage an input: the same path (also through a symlink), an output inside an input
/// folder, an input inside the output folder. Holds with `--overwrite` too.
///
/// # Errors
/// [`CheckpointError::Usage`].
pub fn check_output(inputs: &[&Path], out: &Path) -> Result<(), CheckpointError> {
    let real_out = resolve(out);
    for input in inputs {
        let real = resolve(input);
        let relation = if real == real_out {
            "is the input"
        } else if real_out.starts_with(&real) {
            "lies inside the input"
        } else if real.starts_with(&real_out) {
            "holds the input"
        } else {
            continue;
        };
        let problem = format!("the output {relation}; expected another folder, got input {}", input.display());
        return Err(CheckpointError::usage(out, "--out", problem));
    }
    Ok(())
}

/// The real path, of which the last parts need not exist yet; `..` after a part that does not exist undoes it.
fn resolve(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf()).components() {
        match part {
            std::path::Component::ParentDir => {
                out.pop();
            }
            other => out.push(other),
        }
        // Links are followed as they are met, so that `..` is that of the real folder.
        out = out.canonicalize().unwrap_or(out);
    }
    out
}

/// Writes a folder as a whole: into a temporary sibling, which takes the name in one step at [`FolderWriter::commit`].
/// Dropped before that, it leaves nothing behind.
#[derive(Debug)]
pub struct FolderWriter {
    out: PathBuf,
    temp: PathBuf,
    replaces: bool,
    committed: bool,
}

impl FolderWriter {
    /// Begins a folder. `overwrite` allows to replace a folder that holds model files (and nothing else);
    /// `bytes_needed` is compared with the free space of the file system.
    ///
    /// # Errors
    /// [`CheckpointError::Usage`] (2) for a folder that is not empty, [`CheckpointError::NoSpace`] or
    /// [`CheckpointError::Io`] (4).
    pub fn create(out: &Path, overwrite: bool, bytes_needed: u64) -> Result<Self, CheckpointError> {
        let replaces = Self::check(out, overwrite)?;
        let (real, temp) = begin(out, bytes_needed)?;
        std::fs::create_dir(&temp).map_err(|e| CheckpointError::io(out, "create a folder beside it", e))?;
        let writer = Self { out: real, temp, replaces, committed: false };
        set_mode(&writer.temp, existing_mode(&writer.out))?;
        Ok(writer)
    }

    /// Whether [`FolderWriter::create`] would accept the folder, to be asked before long work; true when it would
    /// replace one.
    ///
    /// # Errors
    /// As [`FolderWriter::create`], but for space.
    pub fn check(out: &Path, overwrite: bool) -> Result<bool, CheckpointError> {
        match out.symlink_metadata() {
            Ok(_) => check_replaceable(out, overwrite),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(false),
            Err(e) => Err(CheckpointError::io(out, "use as the output folder", e)),
        }
    }

    /// The temporary folder, to read back what was written.
    pub fn path(&self) -> &Path {
        &self.temp
    }

    /// Writes one file and syncs it.
    ///
    /// # Errors
    /// [`CheckpointError::Usage`] for a name that is no plain file name; [`CheckpointError::Io`].
    pub fn file(&mut self, name: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.with_file(name, |f, path| f.write_all(bytes).map_err(|e| CheckpointError::io(path, "write", e)))
    }

    /// Writes a safetensors file and syncs it.
    ///
    /// # Errors
    /// As [`FolderWriter::file`], and for a name that occurs twice or data of another length than its shape.
    pub fn safetensors(&mut self, name: &str, tensors: &[NamedTensor]) -> Result<(), CheckpointError> {
        let mut tensors: Vec<Pending> = tensors.iter().map(Pending::from).collect();
        sort(&mut tensors);
        self.with_file(name, |f, path| write_tensors(f, path, &tensors))
    }

    /// Begins a file of `bytes` bytes that are put at their places in any order.
    ///
    /// # Errors
    /// As [`FolderWriter::file`].
    pub(crate) fn placed(&self, name: &str, bytes: u64) -> Result<PlacedFile, CheckpointError> {
        let shown = self.out.join(name);
        let path = self.temp.join(name);
        let io = |e| CheckpointError::io(&shown, "create", e);
        let file = OpenOptions::new().write(true).create_new(true).open(&path).map_err(io)?;
        file.set_len(bytes).map_err(io)?;
        set_mode(&path, existing_mode(&shown))?;
        Ok(PlacedFile { file: std::sync::Mutex::new(file), shown })
    }

    fn with_file(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut File, &Path) -> Result<(), CheckpointError>,
    ) -> Result<(), CheckpointError> {
        let plain = Path::new(name).file_name().is_some_and(|n| n == name) && !name.contains(['\\', '\0']);
        if !plain {
            let problem = format!("expected a plain file name, got {}", printable(name));
            return Err(CheckpointError::usage(&self.out, "", problem));
        }
        // Errors name the place where the file was to be, not the temporary one.
        let shown = self.out.join(name);
        write_new(&self.temp.join(name), &shown, existing_mode(&shown), |f| write(f, &shown))
    }

    /// Gives the folder its name: syncs it, renames it (or exchanges it with the old folder, which is then removed),
    /// syncs the parent.
    ///
    /// # Errors
    /// [`CheckpointError::Io`]; the old folder is then as it was.
    pub fn commit(mut self) -> Result<(), CheckpointError> {
        sync_dir(&self.temp)?;
        let io = |e| CheckpointError::io(&self.out, "give the new folder its name", e);
        if self.replaces {
            exchange(&self.temp, &self.out).map_err(io)?;
            // The old folder has the temporary name now, and goes.
            self.committed = true;
            sync_dir(parent(&self.out))?;
            std::fs::remove_dir_all(&self.temp).map_err(|e| CheckpointError::io(&self.temp, "remove the old folder", e))
        } else {
            std::fs::rename(&self.temp, &self.out).map_err(io)?;
            self.committed = true;
            sync_dir(parent(&self.out))
        }
    }
}

impl Drop for FolderWriter {
    fn drop(&mut self) {
        if !self.committed {
            let _ = std::fs::remove_dir_all(&self.temp);
        }
    }
}

/// A file of a [`FolderWriter`] whose size is known, filled from any thread.
#[derive(Debug)]
pub(crate) struct PlacedFile {
    /// One writer at a time: the disk has one queue, and a position is set and used in one go on every system.
    file: std::sync::Mutex<File>,
    shown: PathBuf,
}

impl PlacedFile {
    /// Writes `bytes` from byte `at` on.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub(crate) fn put(&self, bytes: &[u8], at: u64) -> Result<(), CheckpointError> {
        let mut file = self.file.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let written = file.seek(SeekFrom::Start(at)).and_then(|_| file.write_all(bytes));
        written.map_err(|e| CheckpointError::io(&self.shown, "write", e))
    }

    /// Syncs the file.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub(crate) fn finish(self) -> Result<(), CheckpointError> {
        let file = self.file.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        file.sync_all().map_err(|e| CheckpointError::io(&self.shown, "sync", e))
    }
}

/// Writes one large file piece by piece: into a temporary sibling, which takes the name in one step at
/// [`FileWriter::commit`]. Dropped before that, it leaves nothing behind.
#[derive(Debug)]
pub(crate) struct FileWriter {
    out: PathBuf,
    temp: PathBuf,
    file: File,
    committed: bool,
}

impl FileWriter {
    /// Whether [`FileWriter::create`] would accept the name, to be asked before long work. `overwrite` allows to replace a
    /// file that begins with `magic`, and no other.
    ///
    /// # Errors
    /// [`CheckpointError::Usage`] for a name in use, [`CheckpointError::Io`].
    pub(crate) fn check(out: &Path, overwrite: bool, magic: &[u8]) -> Result<(), CheckpointError> {
        let io = |e| CheckpointError::io(out, "use as the output file", e);
        match std::fs::metadata(out) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(io(e)),
            Ok(m) if !m.is_file() => {
                let problem = "expected the name of a file, got that of a folder or device";
                return Err(CheckpointError::usage(out, "--out", problem));
            }
            Ok(_) => {}
        }
        if !overwrite {
            let problem = "expected a new name, got that of a file that exists";
            return Err(
                CheckpointError::usage(out, "--out", problem).with_hint("choose another --out, or add --overwrite")
            );
        }
        let mut head = Vec::new();
        let file = File::open(out).map_err(io)?;
        file.take(magic.len() as u64).read_to_end(&mut head).map_err(io)?;
        if head != magic {
            let problem = "will not be replaced; expected a file of the same format, got another";
            return Err(CheckpointError::usage(out, "--overwrite", problem).with_hint("choose another --out"));
        }
        Ok(())
    }

    /// Begins a file of `bytes_needed` bytes, which are compared with the free space of the file system.
    ///
    /// # Errors
    /// As [`FileWriter::check`], and [`CheckpointError::NoSpace`].
    pub(crate) fn create(
        out: &Path,
        overwrite: bool,
        magic: &[u8],
        bytes_needed: u64,
    ) -> Result<Self, CheckpointError> {
        Self::check(out, overwrite, magic)?;
        let (real, temp) = begin(out, bytes_needed)?;
        let file = OpenOptions::new().write(true).create_new(true).open(&temp);
        let file = file.map_err(|e| CheckpointError::io(out, "create a file beside it", e))?;
        let writer = Self { out: real, temp, file, committed: false };
        set_mode(&writer.temp, existing_mode(&writer.out))?;
        Ok(writer)
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<(), CheckpointError> {
        self.file.write_all(bytes).map_err(|e| CheckpointError::io(&self.out, "write", e))
    }

    /// Syncs what was written, and gives the temporary file, to read it back.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub(crate) fn written(&self) -> Result<&Path, CheckpointError> {
        self.file.sync_all().map_err(|e| CheckpointError::io(&self.out, "sync", e))?;
        Ok(&self.temp)
    }

    /// [`FileWriter::commit`], with `proof` as the file `place` beside it. The proof is on the disk under another name before
    /// anything changes; the proof of an old file goes first and that of the new one comes last, so that a kill at any moment
    /// leaves a file beside its own proof, or beside none.
    ///
    /// # Errors
    /// [`CheckpointError::Io`].
    pub(crate) fn commit_proven(self, place: &Path, proof: &[u8]) -> Result<(), CheckpointError> {
        let real = place.canonicalize().unwrap_or_else(|_| place.to_path_buf());
        remove_leftovers(&real);
        let temp = sibling(&real)?;
        let mode = existing_mode(&real);
        let write = |f: &mut File| f.write_all(proof).map_err(|e| CheckpointError::io(place, "write the proof", e));
        let done = write_new(&temp, place, mode, write).and_then(|()| {
            match std::fs::remove_file(&real) {
                Ok(()) => sync_dir(parent(&real))?,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
                Err(e) => return Err(CheckpointError::io(place, "remove the old proof", e)),
            }
            self.commit()?;
            std::fs::rename(&temp, &real).map_err(|e| CheckpointError::io(place, "give the proof its name", e))
        });
        if done.is_err() {
            let _ = std::fs::remove_file(&temp);
            return done;
        }
        sync_dir(parent(&real))
    }

    /// Gives the file its name and syncs the folder.
    ///
    /// # Errors
    /// [`CheckpointError::Io`]; the old file is then as it was.
    pub(crate) fn commit(mut self) -> Result<(), CheckpointError> {
        std::fs::rename(&self.temp, &self.out)
            .map_err(|e| CheckpointError::io(&self.out, "give the new file its name", e))?;
        self.committed = true;
        sync_dir(parent(&self.out))
    }
}

impl Drop for FileWriter {
    fn drop(&mut self) {
        if !self.committed {
            let _ = std::fs::remove_file(&self.temp);
        }
    }
}

/// Makes the way for an output of `bytes_needed` bytes: the folder that will hold it, room, no leftovers. Gives its real path and
/// that of the temporary sibling, which is not there yet.
fn begin(out: &Path, bytes_needed: u64) -> Result<(PathBuf, PathBuf), CheckpointError> {
    let real = resolve(out);
    let dir = parent(&real);
    std::fs::create_dir_all(dir).map_err(|e| CheckpointError::io(dir, "create the folder", e))?;
    check_space(dir, bytes_needed)?;
    remove_leftovers(&real);
    let temp = sibling(&real)?;
    Ok((real, temp))
}

/// File name endings that a model folder holds; a folder with anything else is never replaced.
const MODEL_FILES: [&str; 16] = [
    "safetensors",
    "json",
    "jsonl",
    "bin",
    "pt",
    "pth",
    "gguf",
    "onnx",
    "h5",
    "msgpack",
    "model",
    "jinja",
    "txt",
    "md",
    "toml",
    "csv",
];

/// Whether `out`, which exists, would be replaced (true) or is an empty folder (false).
fn check_replaceable(out: &Path, overwrite: bool) -> Result<bool, CheckpointError> {
    let entries = std::fs::read_dir(out).map_err(|e| CheckpointError::io(out, "use as the output folder", e))?;
    let mut first = None;
    for entry in entries {
        let entry = entry.map_err(|e| CheckpointError::io(out, "list", e))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let known = Path::new(&name).extension().is_some_and(|e| MODEL_FILES.iter().any(|m| e == *m))
            || name == "LICENSE"
            || name == ".gitattributes";
        let is_file = entry.file_type().is_ok_and(|t| !t.is_dir());
        if overwrite && !(known && is_file) {
            let problem = format!(
                "will not be replaced; expected a folder with model files only, got {} in it",
                printable(&name)
            );
            return Err(CheckpointError::usage(out, "--overwrite", problem).with_hint("choose another --out"));
        }
        first.get_or_insert(name);
    }
    match first {
        None => Ok(false),
        Some(_) if overwrite => Ok(true),
        Some(name) => {
            let problem = format!("expected a new or empty folder, got one with {} in it", printable(&name));
            Err(CheckpointError::usage(out, "--out", problem).with_hint("choose another --out, or add --overwrite"))
        }
    }
}

/// Compares the free space of the file system that holds `dir` with `needed` bytes, before work starts.
///
/// # Errors
/// [`CheckpointError::NoSpace`] with both numbers.
#[cfg(unix)]
pub fn check_space(dir: &Path, needed: u64) -> Result<(), CheckpointError> {
    let stat = rustix::fs::statvfs(dir).map_err(|e| CheckpointError::io(dir, "ask for free space", e.into()))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free < needed {
        return Err(CheckpointError::NoSpace { dir: dir.to_path_buf(), needed, free });
    }
    Ok(())
}

/// As on Unix, but free space is unknown here: always succeeds.
#[cfg(not(unix))]
pub fn check_space(_: &Path, _: u64) -> Result<(), CheckpointError> {
    Ok(())
}

/// The nearest folder around `out` that is there.
fn existing_folder(out: &Path) -> PathBuf {
    let real = resolve(out);
    real.ancestors().skip(1).find(|d| d.is_dir()).unwrap_or(Path::new(".")).to_path_buf()
}

/// [`check_space`] for an output `out`, whose folder need not be there yet.
///
/// # Errors
/// As there.
pub fn check_room(out: &Path, needed: u64) -> Result<(), CheckpointError> {
    check_space(&existing_folder(out), needed)
}

/// Bytes that the file system of an output `out` has free for us; `None` where that is not known.
///
/// # Errors
/// [`CheckpointError::Io`].
pub fn free_space(out: &Path) -> Result<Option<u64>, CheckpointError> {
    match check_room(out, u64::MAX) {
        Ok(()) => Ok(None),
        Err(CheckpointError::NoSpace { free, .. }) => Ok(Some(free)),
        Err(e) => Err(e),
    }
}

/// Swaps two folders in one step where the system can, else with two renames (undone when the second fails).
fn exchange(new: &Path, old: &Path) -> std::io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        match renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE) {
            Ok(()) => return Ok(()),
            Err(e) if e == rustix::io::Errno::INVAL || e == rustix::io::Errno::NOSYS => {}
            Err(e) => return Err(e.into()),
        }
    }
    let mut aside = new.as_os_str().to_owned();
    aside.push("-old");
    let aside = PathBuf::from(aside);
    std::fs::rename(old, &aside)?;
    if let Err(e) = std::fs::rename(new, old) {
        let _ = std::fs::rename(&aside, old);
        return Err(e);
    }
    std::fs::rename(&aside, new)
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(p) if !p.as_os_str().is_empty() => p,
        _ => Path::new("."),
    }
}

fn temp_prefix(path: &Path) -> Result<OsString, CheckpointError> {
    let name = path.file_name().ok_or_else(|| CheckpointError::usage(path, "", "expected a path with a name"))?;
    let mut prefix = OsString::from(".");
    prefix.push(name);
    prefix.push(TEMP);
    Ok(prefix)
}

fn sibling(path: &Path) -> Result<PathBuf, CheckpointError> {
    let mut name = temp_prefix(path)?;
    name.push(format!("{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed)));
    Ok(parent(path).join(name))
}

/// Removes temporary folders and files of `path` whose process is gone (F094); one whose owner lives is left alone.
fn remove_leftovers(path: &Path) {
    let (Ok(prefix), Ok(entries)) = (temp_prefix(path), std::fs::read_dir(parent(path))) else { return };
    let prefix = prefix.to_string_lossy().into_owned();
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let pid = name.strip_prefix(&prefix).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        let Some(pid) = pid else { continue };
        // Without /proc nobody can be told dead, and nothing is removed.
        let dead = Path::new("/proc/self").exists() && !Path::new(&format!("/proc/{pid}")).exists();
        match entry.file_type() {
            Ok(t) if dead && t.is_dir() => drop(std::fs::remove_dir_all(entry.path())),
            Ok(t) if dead && t.is_file() => drop(std::fs::remove_file(entry.path())),
            _ => {}
        }
    }
}

/// Creates a file that does not exist, fills and syncs it; errors name the place `shown`, where it will be.
fn write_new(
    path: &Path,
    shown: &Path,
    mode: Option<u32>,
    write: impl FnOnce(&mut File) -> Result<(), CheckpointError>,
) -> Result<(), CheckpointError> {
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)
        .map_err(|e| CheckpointError::io(shown, "create", e))?;
    set_mode(path, mode)?;
    write(&mut file)?;
    file.sync_all().map_err(|e| CheckpointError::io(shown, "sync", e))
}

fn sync_dir(dir: &Path) -> Result<(), CheckpointError> {
    File::open(dir).and_then(|d| d.sync_all()).map_err(|e| CheckpointError::io(dir, "sync", e))
}

/// Permission bits of what exists under this name.
#[cfg(unix)]
fn existing_mode(path: &Path) -> Option<u32> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::metadata(path).ok().map(|m| m.permissions().mode() & 0o777)
}

#[cfg(unix)]
fn set_mode(path: &Path, mode: Option<u32>) -> Result<(), CheckpointError> {
    use std::os::unix::fs::PermissionsExt;
    let Some(mode) = mode else { return Ok(()) };
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))
        .map_err(|e| CheckpointError::io(path, "set the mode", e))
}

#[cfg(not(unix))]
fn existing_mode(_: &Path) -> Option<u32> {
    None
}

#[cfg(not(unix))]
fn set_mode(_: &Path, _: Option<u32>) -> Result<(), CheckpointError> {
    Ok(())
}
