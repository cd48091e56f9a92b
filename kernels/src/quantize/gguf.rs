//! Blocks of GGUF on all threads: [`GgufGrid::quantize`] and [`GgufGrid::fake_quantize`], some blocks a task, bit for bit.
//! Not another formula, and no wider vectors: the sums of the K-quants have a fixed order.

use dsq_quant::{GgufGrid, QuantError};
use rayon::prelude::*;

/// Values that one task takes: a whole number of blocks of every grid.
const TASK: usize = 1 << 13;

/// [`GgufGrid::quantize`].
///
/// # Errors
/// As there: what cannot be quantized is handed to it whole, and it names the place.
pub fn quantize_blocks(grid: GgufGrid, x: &[f32]) -> Result<Vec<u8>, QuantError> {
    let parts: Result<Vec<Vec<u8>>, QuantError> = x.par_chunks(TASK).map(|x| grid.quantize(x)).collect();
    match parts {
        Ok(parts) if !parts.is_empty() => Ok(parts.concat()),
        _ => grid.quantize(x),
    }
}

/// [`GgufGrid::fake_quantize`].
///
/// # Errors
/// As there, and `out` and `inside` are then as there too.
pub fn fake_quantize_blocks(grid: GgufGrid, x: &[f32], out: &mut [f32], inside: &mut [u8]) -> Result<(), QuantError> {
    let fits =
        !x.is_empty() && x.len().is_multiple_of(grid.block_len()) && out.len() == x.len() && inside.len() == x.len();
    if fits {
        let tasks = x.par_chunks(TASK).zip(out.par_chunks_mut(TASK).zip(inside.par_chunks_mut(TASK)));
        if tasks.try_for_each(|(x, (out, inside))| grid.fake_quantize(x, out, inside)).is_ok() {
            return Ok(());
        }
    }
    grid.fake_quantize(x, out, inside)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Walk<'a> = &'a dyn Fn(&mut [f32], &mut [u8]) -> Result<(), QuantError>;

    #[test]
    fn blocks_on_all_threads_are_the_blocks_one_after_the_other() {
        let mut s = 1u32;
        let mut uniform = || {
            s = s.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (s >> 8) as f32 / (1 << 24) as f32 - 0.5
        };
        for len in [0, 32, 256, TASK, 3 * TASK + 256, 3 * TASK + 257] {
            let x: Vec<f32> = (0..len).map(|_| uniform() + uniform()).collect();
            let mut large = x.clone();
            if let Some(v) = large.last_mut() {
                *v = 1e9;
            }
            for grid in GgufGrid::ALL {
                for x in [&x, &large] {
                    assert_eq!(quantize_blocks(grid, x), grid.quantize(x), "{grid:?} {len}");
                    let run = |f: Walk| {
                        let (mut out, mut inside) = (vec![7.0; len], vec![9; len]);
                        let done = f(&mut out, &mut inside);
                        (done, out.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), inside)
                    };
                    let ours = run(&|out, inside| fake_quantize_blocks(grid, x, out, inside));
                    assert_eq!(ours, run(&|out, inside| grid.fake_quantize(x, out, inside)), "{grid:?} {len}");
                }
            }
        }
        let (mut out, mut inside) = ([0.0; 32], [0; 31]);
        assert!(fake_quantize_blocks(GgufGrid::Q4_0, &[0.0; 32], &mut out, &mut inside).is_err());
    }
}
