//! Every command that writes, with its n-th file operation made to fail, for n = 1, 2, 3... until none is left: what was there
//! before is intact, nothing partial stands under a final name, no panic, and the command works again afterwards. `strace`
//! makes the system calls fail, so the program under test is the one that ships. And killed at random
//! moments. Not kills inside training (see `kill.rs` of dsq-train and `signals.rs`), and not a full disk for real (see `crates/dsq-checkpoint/tests`).
//!
//! Without strace, or where the system forbids tracing, the tests say `skipped: ...`.

use crate::command::text;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// System calls that fail together, how, and the most steps of one between two calls that fail: of calls that only read there
/// are hundreds, and every seventh after the first twenty is taken (`DSQ_EXHAUSTIVE=1`: every one).
const FAULTS: [(&str, &str, usize); 12] = [
    ("openat", "EACCES", 1),
    ("write", "ENOSPC", 1),
    ("fsync,fdatasync", "EIO", 1),
    ("mkdir,mkdirat", "ENOSPC", 1),
    ("rename,renameat,renameat2", "EIO", 1),
    ("unlink,unlinkat,rmdir", "EACCES", 1),
    ("ftruncate,fallocate", "ENOSPC", 1),
    ("chmod,fchmod,fchmodat", "EPERM", 1),
    ("getdents64", "EIO", 1),
    ("statfs,fstatfs", "EIO", 1),
    ("read,pread64", "EIO", 7),
    ("statx,newfstatat", "EACCES", 7),
];

/// What a folder holds, or a file is; `None` where there is nothing.
type Tree = Option<BTreeMap<PathBuf, Vec<u8>>>;

fn tree(path: &Path) -> Tree {
    if !path.exists() {
        return None;
    }
    let (mut out, mut todo) = (BTreeMap::new(), vec![path.to_path_buf()]);
    while let Some(at) = todo.pop() {
        if at.is_dir() {
            todo.extend(std::fs::read_dir(&at).unwrap().map(|e| e.unwrap().path()));
        } else {
            out.insert(at.strip_prefix(path).unwrap().to_path_buf(), std::fs::read(&at).unwrap());
        }
    }
    Some(out)
}

fn copy(from: &Path, to: &Path) {
    if from.is_dir() {
        std::fs::create_dir(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            copy(&entry.path(), &to.join(entry.file_name()));
        }
    } else {
        std::fs::copy(from, to).unwrap();
    }
}

fn can_trace() -> bool {
    let works = Command::new("strace").args(["-qq", "-e", "trace=none", "true"]).output();
    let reason = match works {
        Ok(out) if out.status.success() => return true,
        Ok(out) => String::from_utf8_lossy(&out.stderr).trim().to_string(),
        Err(e) => format!("strace: {e}"),
    };
    println!("skipped: {reason}");
    false
}

/// Runs a command with the `n`-th call of each thread failing: its exit code, whether any call failed, and what to say of it.
fn disturbed(dir: &Path, args: &[String], calls: &str, error: &str, n: usize) -> (Option<i32>, bool, String) {
    let log = dir.join("strace.log");
    let out = Command::new("strace")
        .args(["-f", "-qq", "-o", text(&log), "-e", &format!("trace={calls}")])
        .args(["-e", &format!("inject={calls}:error={error}:when={n}")])
        .arg(env!("CARGO_BIN_EXE_dsq"))
        .args(args)
        .current_dir(dir)
        .output()
        .unwrap();
    let log = std::fs::read_to_string(&log).unwrap();
    let hit: Vec<&str> = log.lines().filter(|l| l.contains("(INJECTED)")).collect();
    let stderr = String::from_utf8_lossy(&out.stderr);
    let case = format!("{args:?}, call {n} of {calls}: {hit:?}: {stderr}");
    assert!(!stderr.contains("panicked"), "{case}");
    (out.status.code(), !hit.is_empty(), case)
}

/// A job that writes one output, in a folder of its own.
struct Job {
    dir: tempfile::TempDir,
    args: Vec<String>,
    /// Output paths of the job, which appear together or one by one, each whole.
    outs: Vec<PathBuf>,
    /// What the outputs hold before.
    old: Vec<Tree>,
    /// What they hold after a run that nothing disturbs.
    new: Vec<Tree>,
}

impl Job {
    /// `prepare` fills a folder with inputs and, where something is to be replaced, the old output; `args` are the command's,
    /// with paths inside that folder.
    fn new(outs: &[&str], args: &[&str], prepare: impl Fn(&Path)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        prepare(dir.path());
        let outs: Vec<PathBuf> = outs.iter().map(|o| dir.path().join(o)).collect();
        let mut job = Self {
            args: args.iter().map(|a| a.to_string()).collect(),
            old: outs.iter().map(|o| tree(o)).collect(),
            new: Vec::new(),
            outs,
            dir,
        };
        job.keep();
        let out = Command::new(env!("CARGO_BIN_EXE_dsq")).current_dir(job.dir.path()).args(&job.args).output().unwrap();
        assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
        job.new = job.now();
        assert!(job.new.iter().all(Option::is_some) && job.new != job.old, "{args:?}: writes nothing");
        job.restore();
        job
    }

    fn now(&self) -> Vec<Tree> {
        self.outs.iter().map(|o| tree(o)).collect()
    }

    fn kept(&self, i: usize) -> PathBuf {
        self.dir.path().join(format!("kept-{i}"))
    }

    /// Copies the old outputs aside.
    fn keep(&self) {
        for (i, out) in self.outs.iter().enumerate().filter(|(_, o)| o.exists()) {
            copy(out, &self.kept(i));
        }
    }

    fn restore(&self) {
        for (i, out) in self.outs.iter().enumerate() {
            if out.is_dir() {
                std::fs::remove_dir_all(out).unwrap();
            } else if out.exists() {
                std::fs::remove_file(out).unwrap();
            }
            if self.kept(i).exists() {
                copy(&self.kept(i), out);
            }
        }
    }

    /// Runs the job with the `n`-th call of each thread failing; whether any call did.
    fn fail(&self, calls: &str, error: &str, n: usize) -> bool {
        let (code, hit, case) = disturbed(self.dir.path(), &self.args, calls, error, n);
        let now = self.now();
        self.check(&now, code == Some(4), &case);
        match code {
            Some(0) => assert_eq!(now, self.new, "code 0 without the output: {case}"),
            // 127 is the loader, which opens and reads the program's libraries first; 3 is an input that cannot be read.
            Some(3 | 4 | 127) => {}
            _ => panic!("exit code {code:?}: {case}"),
        }
        self.restore();
        hit
    }

    /// Every output is the old one or the new one, and a file lies beside its own proof. `stopped` on the way: the proof, which is the
    /// second output, may be lost.
    fn check(&self, now: &[Tree], stopped: bool, case: &str) {
        for (i, state) in now.iter().enumerate() {
            let lost = i == 1 && state.is_none() && stopped;
            assert!(
                lost || *state == self.old[i] || *state == self.new[i],
                "neither the old nor the new output: {case}"
            );
        }
        if let ([file, proof], [_, old]) = (now, self.old.as_slice()) {
            assert!(
                proof.is_none() || (proof == old) == (*file == self.old[0]),
                "a file beside the other's proof: {case}"
            );
        }
    }

    fn sweep(&self) {
        let every = std::env::var_os("DSQ_EXHAUSTIVE").is_some();
        let inputs = self.inputs();
        let mut count = 0;
        for (calls, error, stride) in FAULTS {
            let mut n = 1;
            while self.fail(calls, error, n) {
                n += if every || n < 20 { 1 } else { stride };
                count += 1;
            }
        }
        assert!(count > 50, "only {count} operations failed");
        assert_eq!(self.inputs(), inputs, "an input changed");
        // Whatever the failed runs left beside the output is not in the way.
        let out =
            Command::new(env!("CARGO_BIN_EXE_dsq")).current_dir(self.dir.path()).args(&self.args).output().unwrap();
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        assert_eq!(self.now(), self.new);
    }

    /// Kills the job with SIGKILL `times` times, each after another delay within about the time that it takes: what was there before is
    /// intact or the new output whole, and nothing else has a final name. Gives how many kills met it at work.
    fn kill(&self, times: usize) -> usize {
        let start = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_dsq"));
            let quiet = std::process::Stdio::null;
            command.current_dir(self.dir.path()).args(&self.args).stdout(quiet()).stderr(quiet()).spawn().unwrap()
        };
        let began = std::time::Instant::now();
        assert!(start().wait().unwrap().success());
        let took = began.elapsed();
        self.restore();
        let inputs = self.inputs();
        let (mut met, mut delay) = (0, 7u64);
        for round in 0..times {
            delay = (delay * 48_271) % 2_147_483_647;
            let mut child = start();
            std::thread::sleep(took.mul_f64(1.2 * delay as f64 / 2_147_483_647.0));
            let _ = child.kill();
            let ended = child.wait().unwrap();
            let now = self.now();
            self.check(&now, ended.code().is_none(), &format!("{:?}, kill {round}", self.args));
            assert_eq!(self.inputs(), inputs, "something else has a final name: {:?}, kill {round}", self.args);
            met += usize::from(ended.code().is_none() && now != self.new);
            self.restore();
        }
        assert!(start().wait().unwrap().success());
        assert_eq!(self.now(), self.new);
        let left = std::fs::read_dir(self.dir.path()).unwrap().flatten();
        let left: Vec<_> = left.map(|e| e.file_name()).filter(|n| n.to_string_lossy().contains(".dsq-tmp-")).collect();
        assert!(left.is_empty(), "the next run leaves what a kill left: {left:?}");
        self.restore();
        met
    }

    /// What is in the folder beside the outputs, but for the log and temporary names.
    fn inputs(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        let mut all = tree(self.dir.path()).unwrap();
        all.retain(|path, _| {
            let first = path.iter().next().unwrap().to_string_lossy();
            first != "strace.log" && !first.contains(".dsq-tmp-") && !self.outs.iter().any(|o| o.ends_with(&*first))
        });
        all
    }
}

/// A float model in `model`.
fn float_model(dir: &Path) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/llama_tiny");
    std::fs::create_dir(dir.join("model")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(golden.join(name), dir.join("model").join(name)).unwrap();
    }
}

fn works(dir: &Path, args: &[&str]) {
    let out = Command::new(env!("CARGO_BIN_EXE_dsq")).current_dir(dir).args(args).output().unwrap();
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stderr));
}

const QUANTIZE: [&str; 8] = ["quantize", "model", "--out", "out", "--scheme", "W4A16", "--group-size", "32"];

#[test]
fn quantize_survives_every_failing_file_operation() {
    if can_trace() {
        Job::new(&["out"], &QUANTIZE, float_model).sweep();
    }
}

#[test]
fn quantize_over_a_model_survives_every_failing_file_operation() {
    if can_trace() {
        let old = |dir: &Path| {
            float_model(dir);
            works(dir, &["quantize", "model", "--out", "out", "--scheme", "W8A16", "--granularity", "channel"]);
        };
        Job::new(&["out"], &[&QUANTIZE[..], &["--overwrite"]].concat(), old).sweep();
    }
}

/// The scales of [`QUANTIZE`] in f16, which GPTQ stores.
fn packed_model(dir: &Path) {
    float_model(dir);
    let more = ["--asymmetric", "--scale-dtype", "f16"];
    works(dir, &[&["quantize", "model", "--out", "packed"], &QUANTIZE[4..], &more].concat());
}

#[test]
fn export_survives_every_failing_file_operation() {
    if can_trace() {
        let args = ["export", "packed", "--out", "out", "--format", "gptq", "--gptq-version", "v2"];
        Job::new(&["out"], &args, packed_model).sweep();
    }
}

#[test]
fn a_gguf_file_survives_every_failing_file_operation() {
    if can_trace() {
        let args = ["export", "packed", "--out", "out.gguf", "--format", "gguf", "--gguf-type", "Q8_0", "--overwrite"];
        let old = |dir: &Path| {
            packed_model(dir);
            works(dir, &["export", "model", "--out", "out.gguf", "--format", "gguf", "--gguf-type", "F16"]);
        };
        Job::new(&["out.gguf", "out.gguf.dsq-proof.json"], &args, old).sweep();
    }
}

#[test]
fn an_onnx_file_survives_every_failing_file_operation() {
    if can_trace() {
        let args = ["export", "packed", "--out", "out.onnx", "--format", "onnx", "--overwrite"];
        let old = |dir: &Path| {
            packed_model(dir);
            works(dir, &["export", "model", "--out", "out.onnx", "--format", "onnx"]);
        };
        Job::new(&["out.onnx", "out.onnx.dsq-proof.json"], &args, old).sweep();
    }
}

/// A job for each command that writes an output under a final name at its end.
fn jobs() -> Vec<Job> {
    let over = |out: &'static str, format: &'static str, more: &'static [&'static str]| {
        move |dir: &Path| {
            packed_model(dir);
            works(dir, &[&["export", "model", "--out", out, "--format", format], more].concat());
        }
    };
    let old = |dir: &Path| {
        float_model(dir);
        works(dir, &["quantize", "model", "--out", "out", "--scheme", "W8A16", "--granularity", "channel"]);
    };
    let export =
        |out: &'static str, more: &[&'static str]| [&["export", "packed", "--out", out, "--overwrite"], more].concat();
    let gguf = export("out.gguf", &["--format", "gguf", "--gguf-type", "Q8_0"]);
    let onnx = export("out.onnx", &["--format", "onnx"]);
    vec![
        Job::new(&["out"], &QUANTIZE, float_model),
        Job::new(&["out"], &[&QUANTIZE[..], &["--overwrite", "--max-shard-size", "20kB"]].concat(), old),
        Job::new(
            &["out"],
            &export("out", &["--format", "gptq", "--gptq-version", "v2"]),
            over("out", "safetensors", &[]),
        ),
        Job::new(&["out"], &export("out", &["--format", "safetensors"]), packed_model),
        Job::new(&["out.gguf", "out.gguf.dsq-proof.json"], &gguf, over("out.gguf", "gguf", &["--gguf-type", "F16"])),
        Job::new(&["out.onnx", "out.onnx.dsq-proof.json"], &onnx, over("out.onnx", "onnx", &[])),
    ]
}

#[test]
fn every_output_survives_kills() {
    let met: usize = jobs().iter().map(|job| job.kill(10)).sum();
    assert!(met > 10, "{met} kills met a run at work");
}

/// `cargo test --release --workspace --locked -- --ignored 200`
#[test]
#[ignore = "takes minutes; run once and reported in docs/results.md"]
fn every_output_survives_200_kills() {
    for job in jobs() {
        println!("{} of 200 kills met it at work: {}", job.kill(200), job.args.join(" "));
    }
}

/// A recipe that trains in a second.
fn micro(dir: &Path) {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes/data/pydoc");
    let train: String = std::fs::read_to_string(data.join("train.txt")).unwrap().chars().take(10_000).collect();
    std::fs::write(dir.join("short.txt"), train).unwrap();
    let data = data.display();
    let recipe = format!(
        "name = \"micro\"\n[model]\narchitecture = \"llama\"\nvocab_size = 1024\nhidden_size = 32\nintermediate_size = 32\n\
         num_hidden_layers = 1\nnum_attention_heads = 2\nmax_position_embeddings = 16\n[data]\ntrain = \"short.txt\"\n\
         heldout = \"{data}/heldout.txt\"\ntokenizer = \"{data}/tokenizer.json\"\n[train]\nsteps = 3\nbatch_size = 2\nseq_len = 16\n\
         learning_rate = 3e-3\n[qat]\nsteps = 2\nlearning_rate = 5e-4\nfloat_equal_tokens = false\n[quant]\nscheme = \"W4A16\"\n\
         group_size = 32\n[eval]\ncontext = 16\nmax_tokens = 64\n"
    );
    std::fs::write(dir.join("micro.toml"), recipe).unwrap();
}

/// `dsq train` with its export, killed and taken up again until it is done: the exported folder is not there or whole, and in the end has
/// the bytes of an undisturbed run. Gives how many kills met it at work.
fn kill_training(times: usize) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    micro(dir);
    let began = std::time::Instant::now();
    works(dir, &["train", "micro.toml", "--out", "run"]);
    let took = began.elapsed();
    let run = dir.join("run");
    let want = tree(&run.join("exported"));
    assert!(want.is_some());
    std::fs::remove_dir_all(&run).unwrap();
    let (mut met, mut delay) = (0, 7u64);
    for round in 0.. {
        let resume = if run.join("run.json").exists() { &["--resume"][..] } else { &[] };
        let mut child = Command::new(env!("CARGO_BIN_EXE_dsq"))
            .current_dir(dir)
            .args([&["train", "micro.toml", "--out", "run"], resume].concat())
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        if round < times {
            delay = (delay * 48_271) % 2_147_483_647;
            std::thread::sleep(took.mul_f64(1.2 * delay as f64 / 2_147_483_647.0));
            let _ = child.kill();
        }
        let ended = child.wait().unwrap();
        met += usize::from(ended.code().is_none());
        let now = tree(&run.join("exported"));
        assert!(now.is_none() || now == want, "neither nothing nor the whole export, kill {round}");
        if ended.success() {
            assert_eq!(now, want, "kill {round}");
            if round >= times {
                return met;
            }
            std::fs::remove_dir_all(&run).unwrap();
        } else {
            assert_eq!(ended.code(), None, "ended by itself, kill {round}");
        }
    }
    met
}

#[test]
fn training_and_its_export_survive_kills() {
    assert!(kill_training(15) > 5);
}

/// `cargo test --release --workspace --locked -- --ignored 200`
#[test]
#[ignore = "takes minutes; run once and reported in docs/results.md"]
fn training_and_its_export_survive_200_kills() {
    println!("{} of 200 kills met the training at work", kill_training(200));
}

/// A run folder has more states than old and new: whatever fails, the run goes on from it (or begins again, where it had not
/// begun), and ends with the bytes of an undisturbed run.
#[test]
fn training_goes_on_after_failing_file_operations() {
    if !can_trace() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    micro(dir);
    let of = |more: &[&str]| -> Vec<String> {
        ["train", "micro.toml", "--out", "run"].iter().chain(more).map(|a| a.to_string()).collect()
    };
    let run = dir.join("run");
    works(dir, &["train", "micro.toml", "--out", "run"]);
    let want = tree(&run.join("exported"));
    assert!(want.is_some());
    let stride = if std::env::var_os("DSQ_EXHAUSTIVE").is_some() { 1 } else { 17 };
    let mut count = 0;
    for (i, (calls, error, _)) in FAULTS.into_iter().enumerate() {
        for n in (1 + i..).step_by(stride) {
            std::fs::remove_dir_all(&run).unwrap();
            let (code, hit, case) = disturbed(dir, &of(&[]), calls, error, n);
            assert!(matches!(code, Some(0 | 2 | 3 | 4 | 127)), "exit code {code:?}: {case}");
            let again = if run.join("run.json").exists() { of(&["--resume"]) } else { of(&[]) };
            let out = Command::new(env!("CARGO_BIN_EXE_dsq")).current_dir(dir).args(&again).output().unwrap();
            assert!(out.status.success(), "{again:?}: {}\nafter {case}", String::from_utf8_lossy(&out.stderr));
            assert_eq!(tree(&run.join("exported")), want, "after {case}");
            count += 1;
            if !hit {
                break;
            }
        }
    }
    assert!(count > 20, "only {count} operations failed");
}
