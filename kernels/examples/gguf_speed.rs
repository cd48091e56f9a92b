//! How fast f16 weights in memory become blocks of GGUF, in MB of f16 a second on two threads. Not a test: it asserts nothing.
//!
//!     cargo run --release -p dsq-kernels --example gguf_speed [MILLIONS SEED SECONDS [OUT]]
//!
//! Each grid is made over and over for SECONDS (default 1) of MILLIONS (32) times 2^20 values. Widening to f32 is part of the time;
//! memory is allocated before. `Q4_K_M` is the harmonic mean of Q4_K and Q6_K as llama.cpp mixes them in a Llama of 7 billion
//! weights, of which 16.6% are in Q6_K. `reference` is dsq-quant's own walk, once. Prints one JSON object. With OUT, a folder, the blocks
//! are left there as `Q4_0` and so on: `tests/conformance/bench_gguf.py` makes the same values, times llama.cpp and compares.

use dsq_kernels::quantize::encode_blocks;
use dsq_quant::GgufGrid;
use half::f16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;
use std::time::Instant;

/// Values that a task takes.
const TASK: usize = 1 << 13;

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

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default: u64| args.get(i).and_then(|a| a.parse().ok()).unwrap_or(default);
    let (n, seed, seconds) = ((number(0, 32) as usize) << 20, number(1, 1), number(2, 1) as f64);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("worker threads");
    let x: Vec<f16> = pool.install(|| (0..n as u64).into_par_iter().map(|i| value(seed, i)).collect());
    let mut printed = Vec::new();
    let mut rates = Vec::new();
    for grid in [GgufGrid::Q4_0, GgufGrid::Q4K, GgufGrid::Q6K] {
        let size = TASK / grid.block_len() * grid.block_bytes();
        let mut out = vec![0xffu8; n / grid.block_len() * grid.block_bytes()];
        let mut run = |seconds: f64, encode: &(dyn Fn(&[f32], &mut [u8]) + Sync)| {
            let (start, mut runs) = (Instant::now(), 0);
            while runs == 0 || start.elapsed().as_secs_f64() < seconds {
                runs += 1;
                pool.install(|| {
                    x.par_chunks(TASK).zip(out.par_chunks_mut(size)).for_each(|(x, out)| {
                        let mut wide = [0.0f32; TASK];
                        x.convert_to_f32_slice(&mut wide[..x.len()]);
                        encode(&wide[..x.len()], out);
                    });
                });
            }
            (runs * 2 * n) as f64 / 1e6 / start.elapsed().as_secs_f64()
        };
        let reference = run(0.0, &|x, out| out.copy_from_slice(&grid.quantize(x).expect("finite weights")));
        let rate = run(seconds, &|x, out| encode_blocks(grid, x, out).expect("finite weights"));
        printed.push(format!("\"{0}\": {rate:.1}, \"{0} reference\": {reference:.1}", grid.name()));
        rates.push(rate);
        if let Some(folder) = args.get(3) {
            std::fs::write(std::path::Path::new(folder).join(grid.name()), &out).expect("the folder can be written");
        }
    }
    println!("{{{}, \"Q4_K_M\": {:.1}}}", printed.join(", "), 1.0 / (0.834 / rates[1] + 0.166 / rates[2]));
}
