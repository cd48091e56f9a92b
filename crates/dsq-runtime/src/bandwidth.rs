//! How fast this machine reads memory: what decoding is measured against. Not a model's speed.

use rayon::prelude::*;
use std::time::Instant;

/// Bytes a second that `threads` threads read in order from a buffer larger than most caches (256 MiB), the best of
/// five passes. 0 when the threads cannot be started.
pub fn measure_read_bandwidth(threads: usize) -> f64 {
    let Ok(pool) = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).build() else { return 0.0 };
    let buffer: Vec<u64> = (0..1u64 << 25).collect();
    let part = buffer.len() / threads.max(1);
    let mut best = 0.0f64;
    for _ in 0..5 {
        let start = Instant::now();
        let sum = pool.install(|| {
            buffer
                .par_chunks(part)
                .map(|part| {
                    let mut lanes = [0u64; 16];
                    for line in part.chunks_exact(16) {
                        for (lane, &x) in lanes.iter_mut().zip(line) {
                            *lane = lane.wrapping_add(x);
                        }
                    }
                    lanes.iter().fold(0u64, |a, &b| a.wrapping_add(b))
                })
                .reduce(|| 0, u64::wrapping_add)
        });
        std::hint::black_box(sum);
        best = best.max(size_of_val(&buffer[..]) as f64 / start.elapsed().as_secs_f64());
    }
    best
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_machine_reads_between_a_hundred_megabytes_and_ten_terabytes_a_second() {
        let b = super::measure_read_bandwidth(1);
        assert!((1e8..1e13).contains(&b), "{b:e}");
    }
}
