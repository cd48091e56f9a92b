//! `dsq quantize --plan` of an image model: what follows from its list of layers, the number of pictures and a short measurement. Not the
//! printing (see `src/plan.rs`).

use super::{Args, workers};
use crate::plan::{BASE_MEMORY, Plan, timed, write_rate};
use crate::{Global, error::CliError};
use dsq_checkpoint::{
    Activation, Checkpoint, FolderTarget, ImageConfig, MAX_POOL, ModelConfig, Outline, Pool, folder_bytes,
};
use dsq_kernels::conv::PaddedConv;
use dsq_quant::{FloatType, QuantConfig};
use dsq_train::ptq::cnn::CnnMethod;

/// Output pixels of a picture that codes are chosen on, see `ptq/cnn/round.rs`.
const PIXELS: usize = 256;
/// Steps of learned rounding.
const STEPS: f64 = 200.0;

/// The plan of a run on `pictures` files.
///
/// # Errors
/// What trying the disk gives.
pub(super) fn plan(
    args: &Args,
    global: &Global,
    ckpt: &Checkpoint,
    model: &ImageConfig,
    config: &QuantConfig,
    method: CnnMethod,
    pictures: usize,
) -> Result<Plan, CliError> {
    // Each counts twice, as it is and mirrored.
    let pictures = 2.0 * pictures as f64;
    let (mut size, mut skip_size, mut skip, mut weights) = (model.preparation.size, [0; 2], 0.0, 0.0);
    let (mut most, mut work) = (0.0f64, 0.0f64);
    let mut outlines = Vec::new();
    let clips = args.images.equalizes();
    for l in model.layers() {
        match l.pool {
            Some(Pool::Max) => size = size.map(|side| (side + 2 * MAX_POOL[2] - MAX_POOL[0]) / MAX_POOL[1] + 1),
            Some(Pool::Mean) => size = [1; 2],
            None => {}
        }
        let from = if l.on_skip { skip_size } else { size };
        let values = |[h, w]: [usize; 2], c: usize| (h * w * c) as f64;
        if l.starts_block {
            (skip, skip_size) = (values(size, l.inputs()), size);
        }
        let (out, n) = (l.output(from), l.shape[0]);
        let k = l.shape[1..].iter().product::<usize>();
        let (read, made) = (values(from, l.inputs()), values(out, n));
        weights += (n * k) as f64;
        let pass = 2.0 * pictures * values(out, n) * k as f64;
        // Both streams, their skips, codes and padded copies; sums, targets and outputs of both.
        let mut floats = pictures * (5.0 * read + 2.0 * skip + 7.0 * made);
        work += 2.0 * pass;
        let scheme = config.scheme_for(&l.module);
        if scheme.is_some() && method != CnnMethod::Rtn {
            let rows = pictures * values(out, 1).min(PIXELS as f64);
            let (width, groups) = if l.depthwise { (k * n, n as f64) } else { (k, 1.0) };
            let k = k as f64;
            floats += 3.0 * rows * (width as f64 + n as f64) + 10.0 * k * k;
            // The third pass, the sums over the inputs, their factors; steps.
            work += pass + 2.0 * groups * rows * k * k + 4.0 * groups * k * k * k;
            if method == CnnMethod::AutoRound {
                work += STEPS * 2.0 * n as f64 * k * k;
            }
        }
        most = most.max(4.0 * floats);
        if l.on_skip {
            (skip, skip_size) = (made, out);
        } else {
            size = out;
        }
        let shape = l.stored_shape();
        let float = |part: &str, shape: Vec<usize>| Outline::Plain {
            name: format!("{}.{part}", l.module),
            shape,
            dtype: FloatType::F32.into(),
        };
        outlines.push(float("bias", vec![n]));
        if l.activation == Some(Activation::Relu6) && (clips || model.channel_clip) {
            outlines.push(float("clip", vec![n]));
        }
        outlines.push(match scheme {
            None => float("weight", shape),
            Some(s) => Outline::Linear {
                module: l.module.clone(),
                shape,
                args: s.weights,
                activation: s.activations.filter(|a| !a.is_dynamic()),
                ordered: false,
            },
        });
    }
    let written = ModelConfig::Image(ImageConfig {
        batch_norm: false,
        channel_clip: outlines.iter().any(|o| o.name().ends_with(".clip")),
        ..model.clone()
    });
    let target = FolderTarget::new(&args.out, &written, Some(config));
    let aux: usize = ckpt.aux_files()?.iter().map(|(_, bytes)| bytes.len()).sum();
    // A thousand names of classes are no small file.
    let names = format!("{:#}", written.to_json()).len();
    let disk = folder_bytes(&target, &outlines)? + (aux + names) as u64;
    // All weights as they were folded, as they ship, and what writing takes; the pictures.
    let [h, w] = model.preparation.size;
    let kept = 14.0 * weights + 4.0 * pictures * (h * w * model.channels) as f64;
    let rate = convolution_rate(global)?;
    let disk_rate = write_rate(&args.out)?;
    let mut measured = format!("convolutions are computed at {:.1} GFLOP/s", rate / 1e9);
    if let Some(written) = disk_rate {
        measured += &format!(", the disk takes {:.0} MB/s", written / 1e6);
    }
    let seconds = work / rate + disk_rate.map_or(0.0, |w| disk as f64 / w);
    Ok(Plan { memory: BASE_MEMORY + (kept + most) as u64, disk, seconds, measured, journal: None })
}

/// Operations a second of a convolution of the middle of such networks.
fn convolution_rate(global: &Global) -> Result<f64, CliError> {
    let (input, c) = ([28; 2], 128);
    let conv = PaddedConv { input, pads: [[1; 2]; 2], c, n: c, kernel: 3, stride: 1, depthwise: false };
    let (x, w) = (vec![0.5f32; 4 * 28 * 28 * c], vec![0.25f32; c * conv.k()]);
    let pool = workers(global)?;
    let run = || pool.install(|| conv.forward(&x, &w));
    run();
    let seconds = timed(|| Ok::<_, CliError>(run()))?;
    Ok(2.0 * (4 * conv.pixels() * c * conv.k()) as f64 / seconds.max(1e-9))
}
