//! What a command will need, told before it starts: memory, disk and time, and whether they are there. The needs follow from shapes and
//! a short measurement; they are bounds and estimates, no promises. Not the work itself.

use crate::{Global, error::CliError, output, size::shown};
use dsq_checkpoint::{CheckpointError, Outline, Workers, check_room, free_space, printable};
use dsq_train::ptq::Found;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Memory that every command takes beside its tensors: the program, its threads, headers, the proof, small files.
pub const BASE_MEMORY: u64 = 96 << 20;
/// Bytes that are written to measure the disk.
const SAMPLE: usize = 64 << 20;

/// What a command will need.
pub struct Plan {
    /// Bytes of memory at most.
    pub memory: u64,
    /// Bytes of disk at most, at a time.
    pub disk: u64,
    /// Seconds, about.
    pub seconds: f64,
    /// What the time was estimated from.
    pub measured: String,
    /// The journal of an interrupted run of the same output.
    pub journal: Option<JournalThere>,
}

/// A journal that lies there.
pub struct JournalThere {
    /// Its folder.
    pub path: PathBuf,
    /// Blocks of the model.
    pub of: usize,
    /// What is in it.
    pub found: Found,
}

impl JournalThere {
    fn blocks(&self) -> usize {
        self.found.blocks.min(self.of)
    }

    fn fits(&self) -> bool {
        self.found.differences.is_empty()
    }

    fn about(&self) -> Value {
        json!({
            "path": self.path,
            "blocks": self.blocks(),
            "of": self.of,
            "bytes": self.found.bytes,
            "fits": self.fits(),
            "differences": self.found.differences,
        })
    }

    fn told(&self) -> String {
        let at = printable(&self.path.to_string_lossy());
        let done = format!("{} of {} blocks are done", self.blocks(), self.of);
        match self.fits() {
            true => format!("journal: {at}: {done}; --resume goes on with it, where the weights are the same too"),
            false => format!("journal: {at}: {done}, of another run: {}", self.found.differences.join("; ")),
        }
    }
}

impl Plan {
    /// Prints the plan; exit code 0.
    ///
    /// # Errors
    /// Exit code 5 where there is less memory, 4 where there is less room than needed at `out`, with both values.
    pub fn tell(&self, global: &Global, out: &Path) -> Result<u8, CliError> {
        let (memory, disk) = (available_memory(), free_space(out)?);
        if let Some(there) = memory.filter(|m| *m < self.memory) {
            let problem = format!("expected at least {} bytes available, got {there} bytes", self.memory);
            return Err(CliError::new(5, format!("memory: {problem}"))
                .with_hint("free some memory, or use fewer --threads; nothing was started"));
        }
        check_room(out, self.disk)?;
        if global.json {
            let mut plan = json!({
                "memory_bytes": self.memory,
                "memory_available": memory,
                "disk_bytes": self.disk,
                "disk_available": disk,
                "seconds": self.seconds,
                "measured": self.measured,
            });
            if let Some(journal) = &self.journal {
                plan["journal"] = journal.about();
            }
            output::line(json!({"out": out, "plan": plan}).to_string());
            return Ok(0);
        }
        let of = |there: Option<u64>| {
            there.map_or("how much is there is not known here".into(), |b| format!("{} there", shown(b)))
        };
        output::line(format!("plan for {}", printable(&out.to_string_lossy())));
        output::line(format!("memory: at most {} ({})", shown(self.memory), of(memory)));
        output::line(format!("disk:   at most {} ({})", shown(self.disk), of(disk)));
        output::line(format!("time:   about {} ({})", duration(self.seconds), self.measured));
        if let Some(journal) = &self.journal {
            output::line(journal.told());
        }
        Ok(0)
    }
}

/// Seconds for a person.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 90.0 => format!("{s:.0} s"),
        s if s < 5400.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// Memory of a run that makes, writes and reads back tensors one by one: of those in flight, and the rest of the program.
pub fn stream_memory(outlines: &[Outline], workers: Workers) -> u64 {
    let mut costs: Vec<u64> = outlines.iter().map(Outline::working_bytes).collect();
    costs.sort_unstable_by(|a, b| b.cmp(a));
    let largest = costs.first().copied().unwrap_or(0);
    let together: u64 = costs.iter().take(workers.threads.max(1)).sum();
    BASE_MEMORY + largest.max(together.min(workers.memory)) + 2048 * outlines.len() as u64
}

/// Bytes a second that the disk of `out` takes, synced; `None` where there is no room to try.
///
/// # Errors
/// Exit code 4 where nothing can be written.
pub fn write_rate(out: &Path) -> Result<Option<f64>, CliError> {
    let Some(dir) = out.ancestors().skip(1).find(|d| d.is_dir()).or(Some(Path::new("."))) else { return Ok(None) };
    if free_space(out)?.is_some_and(|free| free < 4 * SAMPLE as u64) {
        return Ok(None);
    }
    // A name that the next output removes, should this process be killed.
    let name = out.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let path = dir.join(format!(".{name}.dsq-tmp-{}-rate", std::process::id()));
    let mut state = 1u64;
    let run: Vec<u8> = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    })
    .take(1 << 20)
    .collect();
    let start = Instant::now();
    let wrote = std::fs::File::create(&path).and_then(|mut f| {
        (0..SAMPLE / run.len()).try_for_each(|_| f.write_all(&run))?;
        f.sync_all()
    });
    let seconds = start.elapsed().as_secs_f64();
    let _ = std::fs::remove_file(&path);
    wrote.map_err(|e| CliError::from(CheckpointError::io(&path, "write", e)))?;
    Ok(Some(SAMPLE as f64 / seconds.max(1e-9)))
}

/// Seconds that `work` takes.
pub fn timed<T, E>(work: impl FnOnce() -> Result<T, E>) -> Result<f64, E> {
    let start = Instant::now();
    work()?;
    Ok(start.elapsed().as_secs_f64())
}

/// The most bytes of memory that this process has had so far; `None` where nothing tells.
pub fn most_resident() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = text.lines().find_map(|l| l.strip_prefix("VmHWM:"))?;
    kib.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Bytes of memory that this process can still take: what the system has available, its control group and its own limit leave.
/// `None` where nothing tells.
pub fn available_memory() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let line = |text: &str, key: &str| -> Option<u64> {
        let rest = text.lines().find_map(|l| l.strip_prefix(key))?;
        rest.split_whitespace().next()?.parse().ok()
    };
    let system = read("/proc/meminfo").and_then(|t| line(&t, "MemAvailable:")).map(|kib| kib * 1024);
    let group = || -> Option<u64> {
        let number = |path: &str| read(path)?.trim().parse::<u64>().ok();
        let (limit, used) = (number("/sys/fs/cgroup/memory.max")?, number("/sys/fs/cgroup/memory.current")?);
        // What is only a copy of files gives way.
        let files = read("/sys/fs/cgroup/memory.stat").and_then(|t| line(&t, "inactive_file ")).unwrap_or(0);
        Some(limit.saturating_sub(used.saturating_sub(files)))
    };
    let own = || {
        let limit = read("/proc/self/limits").and_then(|t| line(&t, "Max address space"))?;
        let used = read("/proc/self/status").and_then(|t| line(&t, "VmSize:")).map_or(0, |kib| kib * 1024);
        Some(limit.saturating_sub(used))
    };
    [system, group(), own()].into_iter().flatten().min()
}
