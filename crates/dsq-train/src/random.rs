//! Random indices from a seeded generator: the same on every machine. Not the seeds and streams (their users choose them).

use rand_chacha::{ChaCha8Rng, rand_core::RngCore};

/// A number below `n`.
pub(crate) fn below(rng: &mut ChaCha8Rng, n: usize) -> usize {
    (rng.next_u64() % n as u64) as usize
}

/// The numbers below `count` in random order.
pub(crate) fn permutation(rng: &mut ChaCha8Rng, count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    for i in (1..count).rev() {
        order.swap(i, below(rng, i + 1));
    }
    order
}
