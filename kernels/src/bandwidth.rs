//! How fast this machine reads memory laid out as the weights are: what decoding is measured against. Not a model's
//! speed.

use crate::memory::Lines;
use rayon::prelude::*;
use std::time::Instant;

/// Larger than most caches.
const BYTES: usize = 256 << 20;
/// Bytes that are added lane by lane: two cache lines.
const STRIDE: usize = 128;

/// Bytes a second that `threads` threads read from a buffer of 256 MiB, each its part in order, as one stream or as four
/// side by side, whichever is faster; the best of five passes. 0 when the threads cannot be started.
pub fn measure_read_bandwidth(threads: usize) -> f64 {
    let Ok(pool) = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).build() else { return 0.0 };
    let mut buffer = Lines::zeroed(BYTES);
    let part = (BYTES / threads.max(1)).next_multiple_of(4 * STRIDE);
    pool.install(|| buffer.as_mut_slice().par_chunks_mut(part).for_each(|part| part.fill(1)));
    let mut best = 0.0f64;
    for _ in 0..5 {
        for streams in [1, 4] {
            let start = Instant::now();
            let sum: u64 = pool.install(|| buffer.as_slice().par_chunks(part).map(|p| read(p, streams)).sum());
            let time = start.elapsed().as_secs_f64();
            std::hint::black_box(sum);
            best = best.max(BYTES as f64 / time);
        }
    }
    best
}

/// Reads `part` as `streams` runs of equal length side by side (a rest that does not divide is left out: it is short).
fn read(part: &[u8], streams: usize) -> u64 {
    let run = part.len() / streams / STRIDE * STRIDE;
    let mut lanes = [0u64; STRIDE / 8];
    for at in (0..run).step_by(STRIDE) {
        for stream in 0..streams {
            let line = &part[stream * run + at..][..STRIDE];
            for (lane, bytes) in lanes.iter_mut().zip(line.chunks_exact(8)) {
                *lane = lane.wrapping_add(u64::from_le_bytes([
                    bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7],
                ]));
            }
        }
    }
    lanes.iter().fold(0u64, |a, &b| a.wrapping_add(b)) & 0xff
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_machine_reads_between_a_hundred_megabytes_and_ten_terabytes_a_second() {
        let b = super::measure_read_bandwidth(1);
        assert!((1e8..1e13).contains(&b), "{b:e}");
    }
}
