//! A run folder: checkpoints that survive a kill at any moment, and the training log. Knows tensors by name and a JSON
//! state; what they mean is the training loop's business.
//!
//! Layout:
//!
//! ```text
//! RUN/run.json                       format version, dsq version, fingerprint of the recipe
//! RUN/run.lock                       held while a process writes here
//! RUN/log.jsonl                      one line a step
//! RUN/checkpoints/step-00000050/     tensors.safetensors, then state.json (with a hash of every tensor)
//! ```
//!
//! A checkpoint is written into a temporary sibling, synced, renamed, and the folder synced: under its final name it is
//! complete. The newest is chosen by step number, never by time.

use crate::TrainError;
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

/// Version of the layout; a folder of another version is refused.
const FORMAT: u32 = 1;
/// Complete checkpoints kept.
const KEEP: usize = 2;
/// Prefix of a checkpoint that makes room for another of the same step.
const ASIDE: &str = ".aside-";
/// What a run writes into its folder before and beside its results.
const OURS: [&str; 6] = ["run.json", "run.tmp", "run.lock", "log.jsonl", "log.tmp", "checkpoints"];

/// One f32 tensor by name.
#[derive(Debug, Clone, PartialEq)]
pub struct StateTensor {
    /// Name, unique in its snapshot.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Values, row major.
    pub data: Vec<f32>,
}

/// Everything that decides how training goes on.
#[derive(Debug, Clone, PartialEq)]
pub struct Snapshot {
    /// Steps finished, over all phases.
    pub step: u64,
    /// Weights, optimizer moments, observer ranges.
    pub tensors: Vec<StateTensor>,
    /// Phase, counters, random number generators, data position.
    pub state: Value,
}

#[derive(Serialize, Deserialize)]
struct StateFile {
    format: u32,
    step: u64,
    sha256: BTreeMap<String, String>,
    state: Value,
}

#[derive(Serialize, Deserialize)]
struct RunFile {
    format: u32,
    dsq: String,
    fingerprint: Value,
}

/// An open run folder, locked against a second writer until it is dropped.
#[derive(Debug)]
pub struct RunDir {
    path: PathBuf,
    log: File,
    _lock: File,
}

impl RunDir {
    /// Opens `path` for a run whose every deciding setting is in `fingerprint`.
    ///
    /// Without `resume` the folder must be absent or empty, unless `overwrite` is set: then an earlier run's own files
    /// in it (`run.json`, `log.jsonl`, `checkpoints/`) are removed. With `resume` its fingerprint must be equal.
    ///
    /// # Errors
    /// [`TrainError::InUse`]; [`TrainError::RunFolder`] for a folder that is not empty or of another recipe (each
    /// differing field is listed); [`TrainError::Artifact`] for another format; [`TrainError::Io`].
    pub fn open(path: &Path, fingerprint: &Value, resume: bool, overwrite: bool) -> Result<Self, TrainError> {
        let refuse =
            |problem: String, hint: &str| TrainError::RunFolder { path: path.into(), problem, hint: hint.into() };
        if path.exists() && !path.is_dir() {
            return Err(refuse("expected a folder, got a file".into(), "choose another --out"));
        }
        let exists = path.join("run.json").exists();
        let empty = !path.exists() || fs::read_dir(path).map_err(TrainError::io(path, "list"))?.next().is_none();
        // What a kill leaves in the first moments of a run, or (with checkpoints) of an --overwrite.
        let remains = !empty && !exists && ours_only(path) && (overwrite || no_entries(&path.join("checkpoints")));
        if resume && !exists {
            return Err(refuse(
                "expected a run folder to resume (run.json), got none".into(),
                "start without --resume",
            ));
        }
        if !resume && !empty && !exists && !remains {
            return Err(refuse(
                "expected an empty or new folder, got one with other files".into(),
                "choose another --out",
            ));
        }
        if !resume && exists && !overwrite {
            return Err(refuse(
                "expected an empty or new folder, got one that holds a run".into(),
                "use --resume to go on, --overwrite to start again, or another --out",
            ));
        }
        fs::create_dir_all(path.join("checkpoints")).map_err(TrainError::io(path, "create"))?;
        let lock = lock(path)?;
        let run_file = path.join("run.json");
        if resume {
            let text = fs::read_to_string(&run_file).map_err(TrainError::io(&run_file, "read"))?;
            let artifact = |problem: String| TrainError::Artifact { path: run_file.clone(), problem };
            let old: RunFile =
                serde_json::from_str(&text).map_err(|e| artifact(format!("not a run description: {e}")))?;
            if old.format != FORMAT {
                return Err(artifact(format!("format: expected {FORMAT}, got {} (dsq {})", old.format, old.dsq)));
            }
            let differences = differences(&old.fingerprint, fingerprint);
            if !differences.is_empty() {
                return Err(refuse(
                    format!("made by another recipe: {}", differences.join("; ")),
                    "resume with the recipe and the --set of the first start, or choose another --out",
                ));
            }
        } else {
            if exists || remains {
                remove_run(path)?;
                fs::create_dir_all(path.join("checkpoints")).map_err(TrainError::io(path, "create"))?;
            }
            let run =
                RunFile { format: FORMAT, dsq: env!("CARGO_PKG_VERSION").into(), fingerprint: fingerprint.clone() };
            let text = serde_json::to_string_pretty(&run).unwrap_or_default();
            replace(&run_file, text.as_bytes())?;
        }
        let log_path = path.join("log.jsonl");
        let log =
            OpenOptions::new().create(true).append(true).open(&log_path).map_err(TrainError::io(&log_path, "open"))?;
        let this = Self { path: path.into(), log, _lock: lock };
        this.remove_leftovers()?;
        Ok(this)
    }

    /// What processes that died left half written in the run folder `path`; opening it ignores and removes them. Nothing
    /// when there is no such folder.
    pub fn leftovers(path: &Path) -> Vec<PathBuf> {
        let entries = fs::read_dir(path.join("checkpoints")).into_iter().flatten().flatten();
        let mut found: Vec<PathBuf> =
            entries.filter(|e| e.file_name().to_string_lossy().starts_with(".tmp-")).map(|e| e.path()).collect();
        found.sort();
        found
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// Temporary folders of a process that died (we hold the lock, so nobody else writes). A checkpoint that was put
    /// aside and whose successor never got its name is put back.
    fn remove_leftovers(&self) -> Result<(), TrainError> {
        let dir = self.checkpoints();
        for entry in fs::read_dir(&dir).map_err(TrainError::io(&dir, "list"))?.flatten() {
            let (name, path) = (entry.file_name().to_string_lossy().into_owned(), entry.path());
            match name.strip_prefix(ASIDE).map(|step| dir.join(step)) {
                Some(step) if !step.exists() => fs::rename(&path, &step).map_err(TrainError::io(&path, "put back"))?,
                None if !name.starts_with(".tmp-") => {}
                _ => {
                    let _ = fs::remove_dir_all(path);
                }
            }
        }
        Ok(())
    }

    /// Writes a checkpoint, then removes all but the newest two. When it fails, what was there before is intact.
    ///
    /// # Errors
    /// [`TrainError::Io`] (no room, no permission); the temporary folder is removed.
    pub fn save(&self, snapshot: &Snapshot) -> Result<(), TrainError> {
        let dir = self.checkpoints();
        let temp = dir.join(format!(".tmp-step-{:08}", snapshot.step));
        let last = dir.join(format!("step-{:08}", snapshot.step));
        // The end of a phase and the end of a seed are the same step, and a resumed run may reach its step again. The
        // folder of before is put aside whole: removed in place, a kill would leave half of it under a final name.
        let aside = dir.join(format!("{ASIDE}step-{:08}", snapshot.step));
        let _ = fs::remove_dir_all(&temp);
        let written = write_snapshot(&temp, snapshot).and_then(|()| {
            if last.exists() {
                let _ = fs::remove_dir_all(&aside);
                fs::rename(&last, &aside).map_err(TrainError::io(&last, "replace"))?;
            }
            fs::rename(&temp, &last).map_err(TrainError::io(&last, "rename"))?;
            sync_dir(&dir)
        });
        if let Err(e) = written {
            if !last.exists() && aside.exists() {
                let _ = fs::rename(&aside, &last);
            }
            let _ = fs::remove_dir_all(&temp);
            return Err(e);
        }
        let _ = fs::remove_dir_all(&aside);
        self.log.sync_data().map_err(TrainError::io(&self.path, "sync the log"))?;
        let steps = self.steps()?;
        for step in steps.iter().rev().skip(KEEP) {
            let old = dir.join(format!("step-{step:08}"));
            // Renamed first, so that a kill half way leaves no partial folder under a final name.
            let gone = dir.join(format!(".tmp-old-{step:08}"));
            fs::rename(&old, &gone).map_err(TrainError::io(&old, "remove"))?;
            fs::remove_dir_all(&gone).map_err(TrainError::io(&gone, "remove"))?;
        }
        Ok(())
    }

    /// Steps of the checkpoints under a final name, ascending.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn steps(&self) -> Result<Vec<u64>, TrainError> {
        let dir = self.checkpoints();
        let mut steps: Vec<u64> = fs::read_dir(&dir)
            .map_err(TrainError::io(&dir, "list"))?
            .flatten()
            .filter_map(|e| e.file_name().to_str()?.strip_prefix("step-")?.parse().ok())
            .collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// The newest checkpoint, every tensor checked against its hash; `None` when there is none.
    ///
    /// # Errors
    /// [`TrainError::Artifact`] for a broken one (it names the file; nothing falls back in silence), [`TrainError::Io`].
    pub fn latest(&self) -> Result<Option<Snapshot>, TrainError> {
        match self.steps()?.last() {
            None => Ok(None),
            Some(step) => read_snapshot(&self.checkpoints().join(format!("step-{step:08}")), *step).map(Some),
        }
    }

    /// Appends one line to the log.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn log(&mut self, line: &Value) -> Result<(), TrainError> {
        let text = format!("{line}\n");
        self.log.write_all(text.as_bytes()).map_err(TrainError::io(&self.path, "write the log"))
    }

    /// Keeps the log lines whose `step` is at most `step`: what came after the checkpoint will be done again.
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn truncate_log(&mut self, step: u64) -> Result<(), TrainError> {
        let kept: String = self
            .read_log()?
            .into_iter()
            .filter(|l| l.get("step").and_then(Value::as_u64).is_some_and(|s| s <= step))
            .map(|l| format!("{l}\n"))
            .collect();
        let path = self.path.join("log.jsonl");
        replace(&path, kept.as_bytes())?;
        self.log = OpenOptions::new().append(true).open(&path).map_err(TrainError::io(&path, "open"))?;
        Ok(())
    }

    /// The lines of the log that are whole (a kill may leave half a line at the end).
    ///
    /// # Errors
    /// [`TrainError::Io`].
    pub fn read_log(&self) -> Result<Vec<Value>, TrainError> {
        let path = self.path.join("log.jsonl");
        let file = File::open(&path).map_err(TrainError::io(&path, "read"))?;
        let lines = BufReader::new(file).lines().map_while(Result::ok);
        Ok(lines.filter_map(|l| serde_json::from_str(&l).ok()).collect())
    }
}

/// Whether every entry of the folder has a name that [`RunDir`] gives.
fn ours_only(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut d| d.all(|e| e.is_ok_and(|e| OURS.iter().any(|o| e.file_name() == *o))))
}

/// Whether the folder is absent or empty.
fn no_entries(path: &Path) -> bool {
    !path.exists() || fs::read_dir(path).is_ok_and(|mut d| d.next().is_none())
}

pub(crate) fn lock(path: &Path) -> Result<File, TrainError> {
    let lock_path = path.join("run.lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true)
        .open(&lock_path)
        .map_err(TrainError::io(&lock_path, "open"))?;
    // The system drops the lock with the process, so a dead owner never blocks.
    if let Err(e) = file.try_lock() {
        let owner = fs::read_to_string(&lock_path).unwrap_or_default();
        return match e {
            fs::TryLockError::WouldBlock => {
                let owner = if owner.trim().is_empty() { "another process" } else { owner.trim() };
                Err(TrainError::InUse { path: path.into(), owner: owner.into() })
            }
            fs::TryLockError::Error(source) => Err(TrainError::Io { path: lock_path, action: "lock", source }),
        };
    }
    let _ = fs::write(&lock_path, format!("process {}\n", std::process::id()));
    Ok(file)
}

fn remove_run(path: &Path) -> Result<(), TrainError> {
    // run.json goes first: without it the folder is no run any more.
    for name in ["run.json", "log.jsonl"] {
        let file = path.join(name);
        match fs::remove_file(&file) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(TrainError::io(&file, "remove")(e)),
            _ => {}
        }
    }
    let dir = path.join("checkpoints");
    fs::remove_dir_all(&dir).map_err(TrainError::io(&dir, "remove"))
}

fn write_snapshot(dir: &Path, snapshot: &Snapshot) -> Result<(), TrainError> {
    fs::create_dir(dir).map_err(TrainError::io(dir, "create"))?;
    let bytes: Vec<Vec<u8>> =
        snapshot.tensors.iter().map(|t| t.data.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
    let sha256 =
        snapshot.tensors.iter().zip(&bytes).map(|(t, b)| (t.name.clone(), dsq_checkpoint::hex_sha256(b))).collect();
    let file = dir.join("tensors.safetensors");
    let views: Result<Vec<_>, _> = snapshot
        .tensors
        .iter()
        .zip(&bytes)
        .map(|(t, b)| TensorView::new(Dtype::F32, t.shape.clone(), b).map(|v| (t.name.as_str(), v)))
        .collect();
    let packed = views
        .and_then(|v| safetensors::serialize(v, None))
        .map_err(|e| TrainError::Artifact { path: file.clone(), problem: format!("cannot be written: {e}") })?;
    write_synced(&file, &packed)?;
    let state = StateFile { format: FORMAT, step: snapshot.step, sha256, state: snapshot.state.clone() };
    write_synced(&dir.join("state.json"), serde_json::to_string(&state).unwrap_or_default().as_bytes())?;
    sync_dir(dir)
}

fn read_snapshot(dir: &Path, step: u64) -> Result<Snapshot, TrainError> {
    let state_path = dir.join("state.json");
    let broken = |path: &Path, problem: String| TrainError::Artifact { path: path.into(), problem };
    let text = fs::read_to_string(&state_path).map_err(TrainError::io(&state_path, "read"))?;
    let state: StateFile = serde_json::from_str(&text).map_err(|e| broken(&state_path, format!("not a state: {e}")))?;
    if (state.format, state.step) != (FORMAT, step) {
        let got = (state.format, state.step);
        return Err(broken(&state_path, format!("format and step: expected {:?}, got {got:?}", (FORMAT, step))));
    }
    let path = dir.join("tensors.safetensors");
    let bytes = fs::read(&path).map_err(TrainError::io(&path, "read"))?;
    let file = SafeTensors::deserialize(&bytes).map_err(|e| broken(&path, format!("not safetensors: {e}")))?;
    let mut tensors = Vec::new();
    for (name, want) in &state.sha256 {
        let view = file.tensor(name).map_err(|e| broken(&path, format!("{name}: {e}")))?;
        let got = dsq_checkpoint::hex_sha256(view.data());
        if view.dtype() != Dtype::F32 || got != *want {
            return Err(broken(&path, format!("{name}: expected SHA-256 {want}, got {got}")));
        }
        let data = view.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        tensors.push(StateTensor { name: name.clone(), shape: view.shape().to_vec(), data });
    }
    if file.len() != tensors.len() {
        return Err(broken(&path, format!("tensors: expected {}, got {}", tensors.len(), file.len())));
    }
    Ok(Snapshot { step, tensors, state: state.state })
}

fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    let mut file = File::create(path).map_err(TrainError::io(path, "create"))?;
    file.write_all(bytes).map_err(TrainError::io(path, "write"))?;
    file.sync_all().map_err(TrainError::io(path, "sync"))
}

pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<(), TrainError> {
    let temp = path.with_extension("tmp");
    write_synced(&temp, bytes)?;
    fs::rename(&temp, path).map_err(TrainError::io(path, "rename"))?;
    sync_dir(path.parent().unwrap_or(path))
}

fn sync_dir(path: &Path) -> Result<(), TrainError> {
    File::open(path).and_then(|d| d.sync_all()).map_err(TrainError::io(path, "sync"))
}

/// `path: run has A, recipe says B` for every field that differs.
pub(crate) fn differences(old: &Value, new: &Value) -> Vec<String> {
    fn walk(path: &str, old: &Value, new: &Value, out: &mut Vec<String>) {
        match (old, new) {
            (Value::Object(a), Value::Object(b)) => {
                let keys: std::collections::BTreeSet<_> = a.keys().chain(b.keys()).collect();
                for key in keys {
                    let path = if path.is_empty() { key.to_string() } else { format!("{path}.{key}") };
                    walk(&path, a.get(key).unwrap_or(&Value::Null), b.get(key).unwrap_or(&Value::Null), out);
                }
            }
            _ if old == new => {}
            _ => out.push(format!("{path}: expected {old} as in the run, got {new}")),
        }
    }
    let mut out = Vec::new();
    walk("", old, new, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn snapshot(step: u64) -> Snapshot {
        let data = vec![1.5, -0.0, f32::MIN_POSITIVE / 2.0, step as f32];
        let tensor = |name: &str| StateTensor { name: name.into(), shape: vec![2, 2], data: data.clone() };
        Snapshot {
            step,
            tensors: vec![tensor("model.a"), tensor("optimizer.a")],
            state: json!({"phase": "float", "position": step}),
        }
    }

    fn open(path: &Path, resume: bool, overwrite: bool) -> Result<RunDir, TrainError> {
        RunDir::open(path, &json!({"lr": 0.1, "model": {"width": 8}}), resume, overwrite)
    }

    #[test]
    fn saves_reads_back_bit_for_bit_and_keeps_two() {
        let dir = tempfile::tempdir().unwrap();
        let run = open(&dir.path().join("r"), false, false).unwrap();
        assert!(run.latest().unwrap().is_none());
        for step in [9, 10, 100] {
            run.save(&snapshot(step)).unwrap();
        }
        assert_eq!(run.steps().unwrap(), [10, 100]);
        let got = run.latest().unwrap().unwrap();
        assert_eq!(got, snapshot(100));
        assert_eq!(got.tensors[0].data[1].to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn f090_resume_with_another_recipe_lists_each_differing_field() {
        let dir = tempfile::tempdir().unwrap();
        drop(open(dir.path(), false, false).unwrap());
        let other = json!({"lr": 0.2, "model": {"width": 16, "bias": true}});
        let text = RunDir::open(dir.path(), &other, true, false).unwrap_err().to_string();
        for want in ["lr: expected 0.1 as in the run, got 0.2", "model.width: expected 8", "model.bias: expected null"]
        {
            assert!(text.contains(want), "{text}");
        }
        assert!(open(dir.path(), true, false).is_ok());
    }

    #[test]
    fn f089_a_folder_with_other_files_or_a_run_is_not_overwritten() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("thesis.txt"), "years of work").unwrap();
        for overwrite in [false, true] {
            assert_eq!(open(dir.path(), false, overwrite).unwrap_err().exit_code(), 2);
        }
        let run = dir.path().join("run");
        drop(open(&run, false, false).unwrap());
        fs::write(run.join("notes.txt"), "mine").unwrap();
        let e = open(&run, false, false).unwrap_err();
        assert!(e.hint().unwrap().contains("--resume"));
        drop(open(&run, false, true).unwrap());
        assert_eq!(fs::read_to_string(run.join("notes.txt")).unwrap(), "mine");
        assert_eq!(open(&dir.path().join("none"), true, false).unwrap_err().exit_code(), 2);
    }

    #[test]
    fn f097_a_second_writer_is_refused_and_a_dead_one_is_not_in_the_way() {
        let dir = tempfile::tempdir().unwrap();
        let first = open(dir.path(), false, false).unwrap();
        let e = open(dir.path(), true, false).unwrap_err();
        assert!(e.to_string().contains(&format!("in use by process {}", std::process::id())), "{e}");
        assert_eq!(e.exit_code(), 4);
        drop(first);
        open(dir.path(), true, false).unwrap();
    }

    #[test]
    fn f093_f094_leftovers_of_a_kill_are_ignored_and_cleaned() {
        let dir = tempfile::tempdir().unwrap();
        let run = open(dir.path(), false, false).unwrap();
        run.save(&snapshot(5)).unwrap();
        let partial = dir.path().join("checkpoints/.tmp-step-00000006");
        fs::create_dir(&partial).unwrap();
        fs::write(partial.join("tensors.safetensors"), [0; 10]).unwrap();
        assert_eq!(run.latest().unwrap().unwrap().step, 5);
        run.save(&snapshot(6)).unwrap();
        fs::create_dir(&partial).unwrap();
        drop(run);
        assert_eq!(RunDir::leftovers(dir.path()), std::slice::from_ref(&partial));
        let run = open(dir.path(), true, false).unwrap();
        assert!(!partial.exists() && RunDir::leftovers(dir.path()).is_empty());
        assert_eq!(run.latest().unwrap().unwrap(), snapshot(6));
    }

    #[test]
    fn f099_every_flipped_bit_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let run = open(dir.path(), false, false).unwrap();
        run.save(&snapshot(5)).unwrap();
        let path = dir.path().join("checkpoints/step-00000005/tensors.safetensors");
        let good = fs::read(&path).unwrap();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &bad).unwrap();
            // A flip in the header's padding or key order may leave the same tensors; data may never differ.
            match run.latest() {
                Err(e) => assert_eq!(e.exit_code(), 3),
                Ok(got) => assert_eq!(got.unwrap(), snapshot(5), "bit {bit}"),
            }
        }
    }

    #[test]
    fn the_log_is_cut_back_to_the_checkpoint() {
        let dir = tempfile::tempdir().unwrap();
        let mut run = open(dir.path(), false, false).unwrap();
        for step in 1..=5 {
            run.log(&json!({"step": step, "loss": 1.0 / f64::from(step)})).unwrap();
        }
        fs::OpenOptions::new()
            .append(true)
            .open(dir.path().join("log.jsonl"))
            .unwrap()
            .write_all(b"{\"step\": 6, \"lo")
            .unwrap();
        run.truncate_log(3).unwrap();
        run.log(&json!({"step": 4})).unwrap();
        let steps: Vec<_> = run.read_log().unwrap().iter().map(|l| l["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, [1, 2, 3, 4]);
    }
}
