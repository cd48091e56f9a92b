//! The image-classification job: for each seed float, PTQ, QAT with batch norm observed and skipped; then the export of
//! every seed, run by the integer runtime on the same test pictures.

use super::{Start, Tick, place};
use crate::error::CliError;
use crate::plot::{Series, loss_curve};
use crate::proof_logits;
use crate::recipe::CnnJob;
use dsq_checkpoint::{
    Checkpoint, ExportTensor, FolderTarget, Judge, ModelConfig, export_folder, export_layers, write_atomic,
};
use dsq_eval::{ImageEval, Report, Row};
use dsq_quant::FloatType;
use dsq_runtime::CnnRuntime;
use dsq_train::cnn::{CnnExport, CnnProgress, CnnResults};
use dsq_train::run_cnn;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

/// Pictures that the runtime takes at a time.
const BATCH: usize = 100;

/// The static checks of a job that read no data.
///
/// # Errors
/// Exit code 2.
pub fn check(job: &CnnJob) -> Result<(), CliError> {
    let quant = job.quant.config()?;
    job.train.validate()?;
    Ok(job.train.check_quant(&quant)?)
}

/// Trains, exports and evaluates; writes the run folder's `report.json` and `loss.svg`.
///
/// # Errors
/// Those of the training, the export and the runtime; exit code 130 after an interrupt.
pub fn run(job: &CnnJob, start: &mut Start) -> Result<Report, CliError> {
    check(job)?;
    let quant = job.quant.config()?;
    let on_tick = &mut *start.on_tick;
    let mut on_step = |p: &CnnProgress| {
        let note = format!("seed {} {} loss {:.4}", p.seed, p.phase, p.loss);
        on_tick(&Tick { phase: "train", done: p.step, of: p.steps, note })
    };
    let results = run_cnn(&job.train, &quant, start.out, start.resume, start.overwrite, &mut on_step)?;

    let mut report = Report::new("train")
        .about("recipe", start.recipe.name.clone())
        .about("recipe_sha256", start.recipe.digest())
        .about("seed", start.recipe.seed)
        .about("seeds", job.train.seeds.clone())
        .about("run", start.out.display().to_string());
    let float = results.rows.first().map_or(f64::NAN, |r| r.mean());
    let row = |name: &str, top1: &[f64], bits: f64| {
        let (mean, spread) = mean_and_spread(top1);
        let mut row = Row::new(name).number("top1", mean / 100.0).number("top1_spread", spread / 100.0);
        row.set("difference_to_float", (mean - float) / 100.0);
        row.set("bits_per_weight", bits);
        row
    };
    for r in &results.rows {
        report.rows.push(row(&r.name, &r.top1, r.bits_per_weight));
    }
    let (exported, clock) = export_and_run(&results, &quant, job.quant.onnx, start)?;
    let bits = results.rows.iter().find(|r| r.name == "qat").map_or(f64::NAN, |r| r.bits_per_weight);
    let pictures = (results.test.labels.len() * results.exports.len()) as f64;
    let disagreements: usize = exported.iter().map(|e| e.disagreements).sum();
    let top1: Vec<f64> = exported.iter().map(|e| e.top1).collect();
    report.rows.push(
        row("exported", &top1, bits)
            .number("top1_disagreements_with_training_graph", disagreements as f64)
            .number("images_per_second", pictures / clock.as_secs_f64()),
    );
    draw_curve(start)?;
    write_atomic(&start.out.join(place::REPORT), report.to_json().as_bytes())?;
    Ok(report)
}

fn mean_and_spread(values: &[f64]) -> (f64, f64) {
    let n = values.len().max(1) as f64;
    let mean = values.iter().sum::<f64>() / n;
    let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    (mean, if values.len() < 2 { 0.0 } else { (squares / (n - 1.0)).sqrt() })
}

/// What the runtime made of one seed's export.
struct Exported {
    /// Top-1 in percent.
    top1: f64,
    /// Pictures whose class differs from the training graph's.
    disagreements: usize,
}

/// Writes each seed's export (the first seed's as `exported`, the others as `exported-seed-N`; as ONNX files too where the recipe asks) and its folded master
/// weights, and runs the exports. Returns the time spent in the runtime too.
fn export_and_run(
    results: &CnnResults,
    quant: &dsq_quant::QuantConfig,
    onnx: bool,
    start: &Start,
) -> Result<(Vec<Exported>, Duration), CliError> {
    let test = &results.test;
    let picture = test.size[0] * test.size[1];
    let mut out = Vec::new();
    let mut clock = Duration::ZERO;
    for (i, export) in results.exports.iter().enumerate() {
        let named = |name: &str| match i {
            0 => start.out.join(name),
            _ => start.out.join(format!("{name}-seed-{}", export.seed)),
        };
        write_master(export, &named(place::MASTER))?;
        let folder = named(place::EXPORTED);
        let master = Checkpoint::open(&named(place::MASTER))?;
        let judge = |exported: &Checkpoint| proof_logits::compare(&master, exported, start.global.threads());
        let config = ModelConfig::ResNet(export.config.clone());
        let target = FolderTarget {
            overwrite: true,
            judge: Some(Judge(&judge)),
            ..FolderTarget::new(&folder, &config, Some(quant))
        };
        export_layers(&target, export.tensors(), Vec::new())?;
        if onnx {
            super::write_onnx(&folder, &folder.with_extension("onnx"))?;
        }
        let runtime = CnnRuntime::load(&Checkpoint::open(&folder)?)?;
        let classes = export.config.num_classes;
        let (mut eval, mut done) = (ImageEval::new(), 0);
        let mut disagreements = 0;
        for (pixels, labels) in test.pixels.chunks(BATCH * picture).zip(test.labels.chunks(BATCH)) {
            let m = labels.len();
            let images = export.config.normalize(pixels);
            let begun = Instant::now();
            let logits = runtime.forward(&images, m)?;
            clock += begun.elapsed();
            let reference = &export.logits[done * classes..(done + m) * classes];
            disagreements += logits
                .chunks(classes)
                .zip(reference.chunks(classes))
                .filter(|(a, b)| dsq_train::cnn::argmax(a) != dsq_train::cnn::argmax(b))
                .count();
            let wanted: Vec<u32> = labels.iter().map(|&l| u32::from(l)).collect();
            eval.batch(&logits, &wanted, classes, Some(reference))?;
            done += m;
        }
        out.push(Exported { top1: 100.0 * eval.finish()?.top1.value, disagreements });
    }
    Ok((out, clock))
}

/// The folded f32 weights that the export's codes were computed from, as a float folder.
fn write_master(export: &CnnExport, folder: &Path) -> Result<(), CliError> {
    let float =
        |name, shape, data: &[f32]| ExportTensor::Float { name, shape, data: data.to_vec(), dtype: FloatType::F32 };
    let tensors = export
        .layers
        .iter()
        .flat_map(|l| {
            let weight = float(format!("{}.weight", l.module), l.shape.clone(), &l.weight);
            [weight, float(format!("{}.bias", l.module), vec![l.bias.len()], &l.bias)]
        })
        .collect();
    export_folder(folder, &ModelConfig::ResNet(export.config.clone()), tensors, None, Vec::new(), true)?;
    Ok(())
}

/// The losses of the log as `loss.svg`, one line for each phase of each seed.
fn draw_curve(start: &Start) -> Result<(), CliError> {
    let path = start.out.join("log.jsonl");
    let text = std::fs::read_to_string(&path)
        .map_err(|e| CliError::new(4, format!("{}: cannot read: {e}", path.display())))?;
    let mut lines: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for line in text.lines().filter_map(|l| serde_json::from_str::<serde_json::Value>(l).ok()) {
        if let (Some(seed), Some(phase), Some(step), Some(loss)) =
            (line["seed"].as_u64(), line["phase"].as_str(), line["step"].as_f64(), line["loss"].as_f64())
        {
            lines.entry(format!("seed {seed} {phase}")).or_default().push((step, loss));
        }
    }
    let series: Vec<_> = lines.into_iter().map(|(name, points)| Series::line(name, points)).collect();
    if let Some(svg) = loss_curve(&start.recipe.name, &series) {
        write_atomic(&start.out.join(place::CURVE), svg.as_bytes())?;
    }
    Ok(())
}
