//! Rows of an embedding by token, forward and backward. The backward sum goes over tokens in order.

/// `out[i] = table[ids[i]]`, rows of length `d`.
///
/// # Panics
/// When an id lies outside the table: the caller checks data.
pub fn gather_rows(table: &[f32], d: usize, ids: &[i32], out: &mut [f32]) {
    for (out, &id) in out.chunks_exact_mut(d).zip(ids) {
        out.copy_from_slice(&table[id as usize * d..][..d]);
    }
}

/// `table[ids[i]] += grad[i]`, the gradient of [`gather_rows`].
///
/// # Panics
/// As [`gather_rows`].
pub fn scatter_rows(grad: &[f32], d: usize, ids: &[i32], table: &mut [f32]) {
    for (grad, &id) in grad.chunks_exact(d).zip(ids) {
        for (t, &g) in table[id as usize * d..][..d].iter_mut().zip(grad) {
            *t += g;
        }
    }
}
