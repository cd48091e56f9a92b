//! How fast linear layers run by shape, group, number of tokens, mode and path. Not a test: it asserts nothing.
//!
//!     cargo run --release -p dsq-kernels --example linear_speed -- [THREADS [FILTER...]]
//!
//! THREADS (default 1) work as a team. A line is printed when it contains every FILTER, such as `2048x2048`, `g64`, `m=1 ` or `int8`;
//! only those are measured. One token is cold: the calls walk over copies of the layer of more than 64 MB together. The modes and
//! paths of a line take turns, so that what else the machine does reaches all; a figure is the mean over the copies of the shortest call
//! of each in all rounds. GB/s are the bytes that the layer holds (weights, scales, zero points), G/s multiply-adds. `read` is how fast
//! this machine reads memory.

use dsq_kernels::{Activations, Int4Linear, Isa, Linear, Team, matmul_many_in, measure_read_bandwidth};
use dsq_quant::{FloatType, Granularity, QuantArgs, QuantizedMatrix};
use std::time::Instant;

const SHAPES: [[usize; 2]; 9] = [
    [576, 576],
    [192, 576],
    [1536, 576],
    [576, 1536],
    [49152, 576],
    [2048, 2048],
    [512, 2048],
    [8192, 2048],
    [2048, 8192],
];
const TOKENS: [usize; 16] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 15, 16, 48, 512];
/// Bytes that the copies of a layer hold at least when one token is timed.
const COLD: usize = 80 << 20;
/// Seconds a variant is timed for, over all rounds.
const SECONDS: f64 = 0.4;

fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

struct Variant {
    name: &'static str,
    mode: Activations,
    layers: Vec<Linear>,
    /// Seconds of the shortest call with each copy.
    best: Vec<f64>,
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let threads = args.first().and_then(|a| a.parse().ok()).unwrap_or(1);
    let filters = args.get(1..).unwrap_or_default();
    let team = Team::new(threads).expect("worker threads");
    println!("read {:.1} GB/s on {threads} threads", measure_read_bandwidth(threads) / 1e9);
    for [n, k] in SHAPES {
        for group in [32, 64, 128, 0] {
            let label = if group == 0 { "channel".to_string() } else { format!("g{group}") };
            let lines: Vec<(usize, String)> = TOKENS
                .into_iter()
                .map(|m| (m, format!("{n}x{k} {label} m={m} ")))
                .filter(|(_, line)| filters.iter().all(|f| line.contains(f.as_str()) || is_variant(f)))
                .collect();
            if lines.is_empty() {
                continue;
            }
            let granularity = if group == 0 { Granularity::PerChannel } else { Granularity::PerGroup(group) };
            let args = QuantArgs::int4(granularity, FloatType::F16);
            let q = QuantizedMatrix::quantize(&numbers(n * k, 1), n, k, args).expect("a matrix");
            for (m, line) in lines {
                measure(&team, &q, m, &line, filters);
            }
        }
    }
}

fn is_variant(filter: &str) -> bool {
    filter.starts_with("float") || filter.starts_with("int8")
}

fn measure(team: &Team, q: &QuantizedMatrix, m: usize, line: &str, filters: &[String]) {
    let (n, k) = (q.n, q.k);
    let mut variants = Vec::new();
    for (isa, float, int8) in [
        (Isa::Scalar, "float scalar", "int8 scalar"),
        (Isa::Avx2, "float avx2", "int8 avx2"),
        (Isa::Avx512, "float avx512", "int8 avx512"),
    ] {
        for (name, mode) in [(float, Activations::Float), (int8, Activations::Int8)] {
            let wanted = !filters.iter().any(|f| is_variant(f)) || filters.iter().any(|f| name.starts_with(f.as_str()));
            if !wanted || !Isa::supported().contains(&isa) || (isa == Isa::Scalar && m * n * k > 1 << 22) {
                continue;
            }
            let layer = Int4Linear::new(q).expect("a layer").with_isa(isa);
            let copies = if m == 1 { COLD.div_ceil(layer.bytes()) } else { 1 };
            variants.push(Variant {
                name,
                mode,
                layers: vec![Linear::Int4(layer); copies],
                best: vec![f64::INFINITY; copies],
            });
        }
    }
    let x = numbers(m * k, 2);
    let mut out = vec![0.0; m * n];
    team.enter(|| {
        let start = Instant::now();
        let mut round = 0;
        while round < 3 || start.elapsed().as_secs_f64() < SECONDS * variants.len() as f64 {
            for v in &mut variants {
                // A few milliseconds a turn, or once over all copies.
                let (from, mut calls) = (Instant::now(), 0);
                while calls == 0 || from.elapsed().as_secs_f64() < 0.004 {
                    for (l, best) in v.layers.iter().zip(&mut v.best) {
                        let call = Instant::now();
                        matmul_many_in(v.mode, &[l], &x, m, &mut [&mut out]);
                        *best = best.min(call.elapsed().as_secs_f64());
                    }
                    calls += v.layers.len();
                }
            }
            round += 1;
        }
    });
    print!("{line:24}");
    for v in &variants {
        let best = v.best.iter().sum::<f64>() / v.best.len() as f64;
        let gmac = (m * n * k) as f64 / best / 1e9;
        print!(" | {} {:.1} GB/s {gmac:.1} G/s", v.name, v.layers[0].bytes() as f64 / best / 1e9);
    }
    println!();
}
