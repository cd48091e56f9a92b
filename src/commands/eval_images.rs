//! `dsq eval --images`: top-1 of an image model on labelled pictures, and its agreement with a reference. Both run in the
//! runtime. Not text (see `eval.rs`).

use super::eval::Args;
use crate::pictures::Pictures;
use crate::{Global, error::CliError, output};
use dsq_checkpoint::{Checkpoint, ModelConfig, write_atomic};
use dsq_eval::{ImageEval, Report, Row};
use dsq_runtime::EfficientNetRuntime;
use std::path::Path;

/// Runs the command.
pub fn run(args: &Args, dir: &Path, global: &Global) -> Result<u8, CliError> {
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
    let (logits, labels) = logits(&model, dir)?;
    let other = reference.as_ref().map(|r| self::logits(r, dir)).transpose()?;
    let mut eval = ImageEval::new();
    eval.batch(&logits, &labels, classes, other.as_ref().map(|(l, _)| l.as_slice()))?;
    let measured = eval.finish()?;
    let mut report = Report::new("eval")
        .about("model", args.model.display().to_string())
        .about("pictures", dir.display().to_string())
        .about("seconds", start.elapsed().as_secs_f64());
    let row = Row::new("model").image_metrics(&measured).maybe("top1_difference", measured.top1_difference.as_ref());
    report.rows.push(row.number("resident_bytes", model.resident_bytes() as f64));
    if let (Some((logits, _)), Some(r), Some(path)) = (&other, &reference, &args.reference) {
        let mut eval = ImageEval::new();
        eval.batch(logits, &labels, classes, None)?;
        let row = Row::new("reference").image_metrics(&eval.finish()?);
        report = report.about("reference", path.display().to_string());
        report.rows.push(row.number("resident_bytes", r.resident_bytes() as f64));
    }
    if let Some(out) = &args.out {
        write_atomic(out, format!("{}\n", report.to_json()).as_bytes())?;
    }
    if global.json {
        output::line(report.to_json());
    } else {
        output::line(report.table());
        output::line(format!("{} pictures; brackets: 95% Wilson interval", labels.len()));
    }
    Ok(0)
}

fn load(path: &Path) -> Result<EfficientNetRuntime, CliError> {
    let ckpt = Checkpoint::open(path)?;
    if !matches!(ckpt.config(), ModelConfig::EfficientNet(_)) {
        let problem = "model_type: --images measures efficientnet_lite0; expected that, got another architecture";
        return Err(CliError::usage(format!("{}: {problem}", path.display())));
    }
    Ok(EfficientNetRuntime::load(&ckpt)?)
}

/// Logits and labels of the pictures, read as this model takes them.
fn logits(model: &EfficientNetRuntime, dir: &Path) -> Result<(Vec<f32>, Vec<u32>), CliError> {
    let pictures = Pictures::read(dir, model.config())?;
    let labels = pictures.labels(model.config().num_classes)?;
    Ok((model.forward(&pictures.images, labels.len())?, labels))
}
