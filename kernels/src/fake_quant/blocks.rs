//! Fake quantization by blocks of rows and columns, whose values lie in one run for each row: the parameters are those of the
//! gathered block, the walk goes run by run. Not the learned scales of blocks (see `learned.rs`).

use super::{poison, qparams, range, walk};
use dsq_quant::{QuantArgs, QuantError};
use rayon::prelude::*;

/// [`super::fake_quant_weight`] of a weight with `k` columns and scales of blocks, a band of blocks a task.
pub(super) fn fake_quant(
    w: &[f32],
    k: usize,
    args: &QuantArgs,
    [rows, columns]: [usize; 2],
    out: &mut [f32],
    inside: &mut [u8],
) -> Result<(), QuantError> {
    let band = rows * k;
    w.par_chunks(band)
        .zip(out.par_chunks_mut(band).zip(inside.par_chunks_mut(band)))
        .enumerate()
        .map(|(i, (w, (out, inside)))| {
            let mut first = Ok(());
            for (j, left) in (0..k).step_by(columns).enumerate() {
                let width = columns.min(k - left);
                let block: Vec<f32> = w.chunks(k).flat_map(|row| &row[left..left + width]).copied().collect();
                let found = qparams(range(&block), args, None, 0, &block).map_err(|e| match e {
                    QuantError::NonFinite { index, value, count } => {
                        let index = i * band + index / width * k + left + index % width;
                        QuantError::NonFinite { index, value, count }
                    }
                    e => e.in_group(i * k.div_ceil(columns) + j),
                });
                for start in (left..w.len()).step_by(k) {
                    let at = start..start + width;
                    let (out, inside) = (&mut out[at.clone()], &mut inside[at.clone()]);
                    match &found {
                        Ok(p) => walk(&w[at], args, *p, out, inside),
                        Err(e) => drop(poison(out, inside, e.clone())),
                    }
                }
                first = first.and(found.map(|_| ()));
            }
            first
        })
        .reduce(|| Ok(()), Result::and)
}
