//! The journal of `dsq quantize`: where it lies and what a run is known by. What is in it is dsq-train's.

use super::{Args, Run, calibrated::Text};
use crate::{Global, error::CliError, output};
use dsq_checkpoint::{Checkpoint, Workers, hex_sha256};
use dsq_train::ptq::{Found, Journal};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// `OUT.journal`.
pub(super) fn path(out: &Path) -> PathBuf {
    let out = std::path::absolute(out).unwrap_or_else(|_| out.to_path_buf());
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(Journal::SUFFIX);
    out.with_file_name(name)
}

/// Begins the journal, or with `--resume` goes on with the one there.
///
/// # Errors
/// Exit code 2 for a journal without `--resume` or of another run, 3 for one that is damaged, 4 where it cannot be written.
pub(super) fn open(run: &Run, text: &Text) -> Result<Journal, CliError> {
    let dir = path(&run.args.out);
    let fingerprint = fingerprint(run, text, Value::String(tensors(run.global, run.ckpt)?))?;
    Ok(Journal::open(&dir, &fingerprint, run.args.calibration.resume)?)
}

/// What there is of a journal of this output, for the plan. The weights are not read for it: they are compared when the run goes on.
///
/// # Errors
/// Exit code 3 for one that is damaged.
pub(super) fn look(run: &Run, text: &Text) -> Result<Option<Found>, CliError> {
    let found = Journal::look(&path(&run.args.out), &fingerprint(run, text, Value::Null)?)?;
    Ok(found.map(|mut found| {
        found.differences.retain(|d| !d.starts_with("model.tensors: "));
        found
    }))
}

/// SHA-256 over names and hashes of all tensors.
fn tensors(global: &Global, ckpt: &Checkpoint) -> Result<String, CliError> {
    let names = ckpt.names();
    let bar = output::progress(names.len() as u64, "read {bar:30} {pos}/{len} tensors {eta}");
    let hash = |i: usize| {
        bar.inc(1);
        ckpt.sha256(&names[i])
    };
    let cost = |i: usize| ckpt.info(&names[i]).map_or(0, |t| t.bytes);
    let hashes = Workers::new(global.threads()).run(names.len(), cost, hash)?;
    bar.finish_and_clear();
    let tensors: String = names.iter().zip(hashes).map(|(name, hash)| format!("{name:?} {hash}\n")).collect();
    Ok(hex_sha256(tensors.as_bytes()))
}

/// All that the bytes of the result depend on.
fn fingerprint(run: &Run, text: &Text, tensors: Value) -> Result<Value, CliError> {
    let Run { args, ckpt, config, candidates, .. } = *run;
    let files: String = ckpt.aux_files()?.iter().map(|(name, b)| format!("{name:?} {}\n", hex_sha256(b))).collect();
    Ok(json!({
        "dsq": env!("CARGO_PKG_VERSION"),
        "model": {
            "config": hex_sha256(format!("{:?}", ckpt.config()).as_bytes()),
            "tensors": tensors,
            "files": hex_sha256(files.as_bytes()),
        },
        "calibration": text.fingerprint(),
        "options": options(args),
        "schemes": hex_sha256(format!("{config:?} {candidates:?}").as_bytes()),
    }))
}

/// The options, by their names.
fn options(args: &Args) -> Value {
    let text = |value: &dyn std::fmt::Debug| Value::String(format!("{value:?}"));
    let mut all = json!({
        "--method": text(&args.method),
        "--scheme": args.scheme(),
        "--granularity": text(&args.granularity),
        "--group-size": args.group_size,
        "--kv-cache": text(&args.kv_cache),
        "--asymmetric": args.asymmetric,
        "--static-activations": args.static_activations,
        "--asymmetric-activations": args.asymmetric_activations,
        "--observer": text(&args.observer),
        "--scale-dtype": text(&args.scale_dtype),
        "--dtype": text(&args.dtype),
        "--ignore": args.ignore,
        "--override": args.overrides,
        "--max-shard-size": args.max_shard_size.map(|s| s.0),
    });
    if let (Some(all), Value::Object(more)) = (all.as_object_mut(), args.calibration.options()) {
        all.extend(more);
    }
    all
}
