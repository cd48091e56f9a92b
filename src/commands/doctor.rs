//! `dsq doctor`: the CPU's features and the kernel that each kind of layer will run on, with the reason for each fallback.

use crate::{Global, error::CliError, output};
use dsq_eval::{Hardware, Report, Row};
use dsq_kernels::{FloatLinear, Int4Linear, Int8Linear, Isa};
use dsq_quant::{FloatType, Granularity, QuantArgs, QuantType, QuantizedMatrix};

/// Options of `dsq doctor`.
#[derive(clap::Args, Debug)]
pub struct Args {}

/// Runs the command.
pub fn run(_args: Args, global: &Global) -> Result<u8, CliError> {
    let here = Hardware::detect();
    let matrix = |qtype| {
        let args = QuantArgs { qtype, ..QuantArgs::int4(Granularity::PerGroup(32), FloatType::F32) };
        QuantizedMatrix::quantize(&[0.5; 64], 2, 32, args)
    };
    let fail = |e: dsq_quant::QuantError| CliError::new(70, format!("doctor: {e}"));
    // The answer is asked of layers of each kind, so that it is the one a model gets.
    let kernels = [
        ("int4 linear", Int4Linear::new(&matrix(QuantType::Int4).map_err(fail)?).map_err(fail)?.describe()),
        ("int8 linear", Int8Linear::new(&matrix(QuantType::Int8).map_err(fail)?).map_err(fail)?.describe()),
        ("float linear", FloatLinear::new(&[0.5; 64], 2, 32, FloatType::F32).map_err(fail)?.describe()),
    ];
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
