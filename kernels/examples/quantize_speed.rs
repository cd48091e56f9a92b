//! How fast weights are rounded and packed, in GB of f32 input per second. Not a test: it asserts nothing.
//!
//!     cargo run --release -p dsq-kernels --example quantize_speed [N K ROUNDS]
//!
//! For each scheme and number of threads: the best of the rounds, which are interleaved over the schemes, so that other
//! work on the machine does not fall on one of them alone. Rounding makes codes and scales, packing the words of
//! `weight_packed`; memory for the results is allocated inside.

use dsq_kernels::quantize::quantize;
use dsq_quant::{
    FloatType, Granularity, Mapping, QuantArgs, QuantType, QuantizedMatrix, WeightObserver, pack_rows, packed_words,
};
use std::time::Instant;

fn main() {
    let given: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let [n, k, rounds] = given.try_into().unwrap_or([4096, 4096, 15]);
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let w: Vec<f32> = (0..n * k).map(|_| uniform() + uniform() + uniform()).collect();
    let int4 = |g| QuantArgs::int4(Granularity::PerGroup(g), FloatType::Bf16);
    let schemes = [
        ("INT4 symmetric, group 128", int4(128)),
        ("INT4 symmetric, group 32", int4(32)),
        ("INT4 symmetric, group 32, f16 scales", QuantArgs { scale_dtype: FloatType::F16, ..int4(32) }),
        ("INT4 asymmetric, group 128", QuantArgs { mapping: Mapping::Asymmetric, ..int4(128) }),
        ("INT4 symmetric, per channel", QuantArgs { granularity: Granularity::PerChannel, ..int4(1) }),
        (
            "INT8 symmetric, per channel",
            QuantArgs { qtype: QuantType::Int8, granularity: Granularity::PerChannel, ..int4(1) },
        ),
        ("INT3 symmetric, group 128", QuantArgs { qtype: QuantType::Int3, ..int4(128) }),
        ("INT4 symmetric, group 128, mse", QuantArgs { observer: WeightObserver::Mse, ..int4(128) }),
    ];
    let gigabytes = (4 * n * k) as f64 / 1e9;
    println!("{n} x {k} f32, best of {rounds} interleaved rounds, GB/s of f32 input");
    println!("{:38} {:>8} {:>8} {:>8} {:>10}", "scheme", "threads", "round", "pack", "together");
    for threads in [1, 2] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("worker threads");
        let mut best = [[f64::INFINITY; 3]; 8];
        for _ in 0..rounds {
            for (best, (_, args)) in best.iter_mut().zip(&schemes) {
                let start = Instant::now();
                let matrix = pool.install(|| quantize(&w, n, k, *args)).expect("finite weights");
                let rounded = start.elapsed().as_secs_f64();
                let words = pack_rows(&matrix.codes, k, args.qtype.bits());
                let both = start.elapsed().as_secs_f64();
                assert_eq!(words.len(), n * packed_words(k, args.qtype.bits()));
                for (best, time) in best.iter_mut().zip([rounded, both - rounded, both]) {
                    *best = best.min(time);
                }
            }
        }
        for (best, (name, _)) in best.iter().zip(&schemes) {
            let [round, pack, both] = best.map(|t| gigabytes / t);
            println!("{name:38} {threads:>8} {round:>8.2} {pack:>8.2} {both:>10.2}");
        }
    }
    let start = Instant::now();
    let matrix = QuantizedMatrix::quantize(&w, n, k, int4(128)).expect("finite weights");
    println!("reference, INT4 symmetric, group 128: {:.2}", gigabytes / start.elapsed().as_secs_f64());
    drop(matrix);
}
