//! Seeded values for the tests of this crate. Not random numbers for anything else.

/// Uniform numbers in [0, 1), from xorshift.
pub(crate) fn uniforms(seed: u64) -> impl FnMut() -> f32 {
    let mut s = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    move || {
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        (s >> 40) as f32 / (1u64 << 24) as f32
    }
}

/// `n` values of mean 0 and deviation 1: sums of twelve uniforms, near enough to normal.
pub(crate) fn normal(n: usize, seed: u64) -> Vec<f32> {
    let mut uniform = uniforms(seed);
    (0..n).map(|_| (0..12).map(|_| uniform()).sum::<f32>() - 6.0).collect()
}
