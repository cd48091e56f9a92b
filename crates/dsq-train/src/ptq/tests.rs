//! What the tests of post-training quantization share.

/// Values of mean 0 and deviation 1: sums of twelve uniforms.
pub(crate) fn normal(len: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut uniform = || {
        s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (s >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..len).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
}

/// Runs on a pool of this many threads.
pub(crate) fn with_threads<R: Send>(threads: usize, body: impl FnOnce() -> R + Send) -> R {
    rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(body)
}
