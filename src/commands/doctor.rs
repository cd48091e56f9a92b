//! `dsq doctor`: the CPU's features and the kernel that each kind of layer will run on, with the reason for each fallback.

use crate::{Global, error::CliError, output};
use dsq_eval::{Hardware, Report, Row};
use dsq_kernels::{FloatLinear, Isa, Linear};
use dsq_quant::{FloatType, Granularity, QuantArgs, QuantType, QuantizedMatrix};

/// Options of `dsq doctor`.
#[derive(clap::Args, Debug)]
pub struct Args {}

/// The kinds of layer, and the kernel that each runs on here. The answer is asked of layers of each kind, so that it is the one a model
/// gets.
pub fn kernels() -> Result<Vec<(&'static str, String)>, CliError> {
    let fail = |e: dsq_quant::QuantError| CliError::new(70, format!("doctor: {e}"));
    let layer = |args| {
        let matrix = QuantizedMatrix::quantize(&[0.5; 64], 2, 32, args).map_err(fail)?;
        Linear::new(&matrix).map(|l| l.describe()).map_err(fail)
    };
    let int4 = QuantArgs::int4(Granularity::PerGroup(32), FloatType::F32);
    Ok(vec![
        ("int4 linear", layer(int4)?),
        ("int8 linear", layer(QuantArgs { qtype: QuantType::Int8, ..int4 })?),
        ("fp8 linear", layer(QuantArgs::fp8(Granularity::PerChannel, FloatType::F32))?),
        ("nvfp4 linear", layer(QuantArgs::nvfp4())?),
        ("mxfp4 linear", layer(QuantArgs::mxfp4())?),
        ("float linear", FloatLinear::new(&[0.5; 64], 2, 32, FloatType::F32).map_err(fail)?.describe()),
    ])
}

/// Runs the command.
pub fn run(_args: Args, global: &Global) -> Result<u8, CliError> {
    let here = Hardware::detect();
    let kernels = kernels()?;
    let features = here.features.join(" ");
    let mut report = Report::new("doctor")
        .about("arch", here.arch.clone())
        .about("os", here.os.clone())
        .about("cpu_features", features.clone())
        .about("threads", global.threads() as u64)
        .about("isa", Isa::detect().describe())
        .about("gpu", "none: this build runs on the CPU only");
    report.rows.extend(kernels.iter().map(|(kind, kernel)| Row::new(*kind).text("kernel", kernel.clone())));
    if global.json {
        output::line(report.to_json());
        return Ok(0);
    }
    output::line(format!("{} {}, {} threads, CPU features: {features}", here.arch, here.os, global.threads()));
    for (kind, kernel) in kernels {
        output::line(format!("{kind}: {kernel}"));
    }
    output::line("GPU: none (this build runs on the CPU only)");
    Ok(0)
}
