//! `dsq eval --images`: top-1 of an image model on labelled pictures, and its agreement with a reference. Both run in the
//! runtime. Not text (see `eval.rs`).

use super::eval::Args;
use crate::{Global, error::CliError, output, pictures};
use dsq_checkpoint::{Checkpoint, ModelConfig};
use dsq_eval::{ImageEval, Report, Row};
use dsq_runtime::ImageRuntime;
use std::path::Path;

/// Most pictures of a folder.
const MAX_PICTURES: usize = 100_000;
/// Pictures that are in memory at a time.
const BATCH: usize = 64;

/// Runs the command.
pub fn run(args: &Args, dir: &Path, global: &Global) -> Result<u8, CliError> {
    let (report, pictures) = measure(args, dir, global)?;
    let about = format!("{pictures} pictures; brackets: 95% Wilson interval");
    output::report(&report, args.out.as_deref(), global.json, &about)?;
    Ok(0)
}

/// What the command reports, and of how many pictures.
pub fn measure(args: &Args, dir: &Path, global: &Global) -> Result<(Report, usize), CliError> {
    global.use_threads();
    let model = load(&args.model)?;
    let reference = args.reference.as_deref().map(load).transpose()?;
    let classes = model.config().num_classes;
    if let (Some(r), Some(path)) = (&reference, &args.reference)
        && r.config().num_classes != classes
    {
        let (at, got) = (path.display(), r.config().num_classes);
        return Err(CliError::new(3, format!("{at}: num_classes: as a reference expected {classes}, got {got}")));
    }
    let start = std::time::Instant::now();
    let files = pictures::list(dir, MAX_PICTURES)?;
    let labels = files.iter().map(|f| pictures::label(f, classes)).collect::<Result<Vec<u32>, _>>()?;
    let (mut eval, mut reference_eval) = (ImageEval::new(), ImageEval::new());
    let bar = match global.json {
        true => indicatif::ProgressBar::hidden(),
        false => output::progress(files.len() as u64, "eval {bar:30} {pos}/{len} pictures {eta}"),
    };
    for (files, labels) in files.chunks(BATCH).zip(labels.chunks(BATCH)) {
        // Each model prepares the pictures in its own way.
        let run = |r: &ImageRuntime| -> Result<Vec<f32>, CliError> {
            Ok(r.forward(&pictures::read(files, r.config())?, files.len())?)
        };
        let other = reference.as_ref().map(run).transpose()?;
        eval.batch(&run(&model)?, labels, classes, other.as_deref())?;
        if let Some(logits) = &other {
            reference_eval.batch(logits, labels, classes, None)?;
        }
        bar.inc(files.len() as u64);
    }
    bar.finish_and_clear();
    let measured = eval.finish()?;
    let mut report = Report::new("eval")
        .about("model", args.model.display().to_string())
        .about("pictures", dir.display().to_string())
        .about("seconds", start.elapsed().as_secs_f64());
    let row = Row::new("model").image_metrics(&measured).maybe("top1_difference", measured.top1_difference.as_ref());
    report.rows.push(row.number("resident_bytes", model.resident_bytes() as f64));
    if let (Some(r), Some(path)) = (&reference, &args.reference) {
        let row = Row::new("reference").image_metrics(&reference_eval.finish()?);
        report = report.about("reference", path.display().to_string());
        report.rows.push(row.number("resident_bytes", r.resident_bytes() as f64));
    }
    Ok((report, labels.len()))
}

fn load(path: &Path) -> Result<ImageRuntime, CliError> {
    let ckpt = Checkpoint::open(path)?;
    if !matches!(ckpt.config(), ModelConfig::Image(_)) {
        let problem = "model_type: --images measures resnet, mobilenet_v2 and efficientnet_lite0; expected one of them, got another architecture";
        return Err(CliError::usage(format!("{}: {problem}", path.display())));
    }
    Ok(ImageRuntime::load(&ckpt)?)
}
