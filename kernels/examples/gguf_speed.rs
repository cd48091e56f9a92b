//! How fast f16 weights in memory become blocks of GGUF, in MB of f16 a second on two threads. Not a test: it asserts nothing.
//!
//!     cargo run --release -p dsq-kernels --example gguf_speed [MILLIONS SEED SECONDS [OUT]]
//!
//! Each grid is made over and over for SECONDS (default 1) of MILLIONS (32) times 2^20 values. Widening to f32 is part of the time;
//! memory is allocated before. `Q4_K_M` is the harmonic mean of Q4_K and Q6_K as llama.cpp mixes them in a Llama of 7 billion
//! weights, of which 16.6% are in Q6_K. `cpu` is by the CPU time of both threads together, which other work on the machine changes little
//! (Linux; else null). `reference` is dsq-quant's own walk, once. Prints one JSON object. With OUT, a folder, the blocks
//! are left there as `Q4_0` and so on: `tests/conformance/bench_gguf.py` makes the same values, times llama.cpp and compares.

use dsq_kernels::quantize::encode_blocks;
use dsq_quant::GgufGrid;
use half::f16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;
use std::time::Instant;

/// Values that a task takes: few enough that they stay in the first cache.
const TASK: usize = 1 << 12;

/// Value `i`: three numbers of 21 bits out of splitmix64, added and centred, times 0.04: about a bell of deviation 0.02.
fn value(seed: u64, i: u64) -> f16 {
    let mut z = seed.wrapping_add((i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    let mask = (1 << 21) - 1;
    let sum = ((z & mask) + (z >> 21 & mask) + (z >> 42 & mask)) as i64 - (3 << 20);
    f16::from_f32(sum as f32 * (0.04 / (1u32 << 21) as f32))
}

/// CPU seconds of this process, from the clock ticks (of 10 ms) in `/proc`; NaN where there is none.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks = |i: usize| after_name.split_whitespace().nth(i).and_then(|t| t.parse::<f64>().ok()).unwrap_or(f64::NAN);
    (ticks(11) + ticks(12)) / 100.0
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: u64| args.get(i).and_then(|a| a.parse().ok()).unwrap_or(default);
    let (n, seed, seconds) = ((number(0, 32) as usize) << 20, number(1, 1), number(2, 1) as f64);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("worker threads");
    let x: Vec<f16> = pool.install(|| (0..n as u64).into_par_iter().map(|i| value(seed, i)).collect());
    let mut printed: Vec<(String, [f64; 2])> = Vec::new();
    for grid in [GgufGrid::Q4_0, GgufGrid::Q4K, GgufGrid::Q6K] {
        let size = TASK / grid.block_len() * grid.block_bytes();
        let mut out = vec![0xffu8; n / grid.block_len() * grid.block_bytes()];
        let mut run = |seconds: f64, encode: &(dyn Fn(&[f32], &mut [u8]) + Sync)| {
            let (start, cpu, mut runs) = (Instant::now(), cpu_seconds(), 0);
            while runs == 0 || start.elapsed().as_secs_f64() < seconds {
                runs += 1;
                pool.install(|| {
                    x.par_chunks(TASK).zip(out.par_chunks_mut(size)).for_each_init(
                        || vec![0.0f32; TASK],
                        |wide, (x, out)| {
                            x.convert_to_f32_slice(&mut wide[..x.len()]);
                            encode(&wide[..x.len()], out);
                        },
                    );
                });
            }
            let megabytes = (runs * 2 * n) as f64 / 1e6;
            [megabytes / start.elapsed().as_secs_f64(), megabytes / (cpu_seconds() - cpu)]
        };
        let reference = run(0.0, &|x, out| out.copy_from_slice(&grid.quantize(x).expect("finite weights")));
        let rate = run(seconds, &|x, out| encode_blocks(grid, x, out).expect("finite weights"));
        printed.extend([(grid.name().to_owned(), rate), (format!("{} reference", grid.name()), reference)]);
        if let Some(folder) = args.get(3) {
            std::fs::write(std::path::Path::new(folder).join(grid.name()), &out).expect("the folder can be written");
        }
    }
    // Q4_K and Q6_K stand third and fifth.
    let mix = [0, 1].map(|i| 1.0 / (0.834 / printed[2].1[i] + 0.166 / printed[4].1[i]));
    printed.push(("Q4_K_M".into(), mix));
    let shown = |v: f64| if v.is_finite() { format!("{v:.1}") } else { "null".into() };
    let lines = printed
        .iter()
        .map(|(name, [wall, cpu])| format!("\"{name}\": {}, \"{name} cpu\": {}", shown(*wall), shown(*cpu)));
    println!("{{{}}}", lines.collect::<Vec<_>>().join(", "));
}
