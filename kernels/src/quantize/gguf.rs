//! Blocks of GGUF on all threads, bit for bit: [`GgufGrid::quantize`] (Q4_0, Q4_K and Q6_K on wide registers, `blocks.rs`) and
//! [`GgufGrid::fake_quantize`] (the reference itself). Not another formula.

use dsq_quant::{GgufGrid, QuantError};
use rayon::prelude::*;

/// Values that one task takes: a whole number of blocks of every grid.
const TASK: usize = 1 << 13;

/// [`GgufGrid::quantize`] on all threads.
///
/// # Errors
/// As there: what cannot be quantized is handed to it whole, and it names the place.
pub fn quantize_blocks(grid: GgufGrid, x: &[f32]) -> Result<Vec<u8>, QuantError> {
    let (len, size) = (grid.block_len(), grid.block_bytes());
    if x.is_empty() || !x.len().is_multiple_of(len) {
        return grid.quantize(x);
    }
    let mut bytes = vec![0u8; x.len() / len * size];
    let tasks = x.par_chunks(TASK).zip(bytes.par_chunks_mut(TASK / len * size));
    match tasks.try_for_each(|(x, bytes)| encode(grid, x, bytes)) {
        Some(()) => Ok(bytes),
        None => grid.quantize(x),
    }
}

/// [`GgufGrid::quantize`] on this thread alone, into `bytes`, whatever they hold.
///
/// # Errors
/// As there, and [`QuantError::Length`] when `bytes` is not as long as the blocks of `x` are; `bytes` is then of no use.
pub fn encode_blocks(grid: GgufGrid, x: &[f32], bytes: &mut [u8]) -> Result<(), QuantError> {
    let (len, size) = (grid.block_len(), grid.block_bytes());
    let whole = x.len().is_multiple_of(len);
    if whole && bytes.len() != x.len() / len * size {
        return Err(QuantError::Length { what: "bytes of blocks", expected: x.len() / len * size, got: bytes.len() });
    }
    if x.is_empty() || !whole || encode(grid, x, bytes).is_none() {
        bytes.copy_from_slice(&grid.quantize(x)?);
    }
    Ok(())
}

/// Whole blocks; `None` where the reference refuses something.
fn encode(grid: GgufGrid, x: &[f32], bytes: &mut [u8]) -> Option<()> {
    #[cfg(target_arch = "x86_64")]
    if matches!(grid, GgufGrid::Q4_0 | GgufGrid::Q4K | GgufGrid::Q6K) && crate::isa::has_avx2() {
        // SAFETY: AVX2 and F16C were found.
        return unsafe { super::blocks::encode(grid, x, bytes) };
    }
    bytes.copy_from_slice(&grid.quantize(x).ok()?);
    Some(())
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
    use proptest::prelude::*;

    /// The bytes of the reference, or its error; where it refuses, so does the fast path, and nowhere else. An error may hold a
    /// NaN, which equals nothing, so errors are compared as text.
    fn check(grid: GgufGrid, x: &[f32], what: &str) {
        let want = grid.quantize(x);
        let mut bytes = vec![0xa5; x.len() / grid.block_len() * grid.block_bytes()];
        assert_eq!(encode(grid, x, &mut bytes).is_some(), want.is_ok(), "{grid:?} {what}");
        let done = encode_blocks(grid, x, &mut bytes);
        let threads = quantize_blocks(grid, x);
        match want {
            Ok(want) => {
                assert!(done.is_ok() && bytes == want, "{grid:?} {what}");
                assert!(threads.unwrap() == want, "{grid:?} {what}");
            }
            Err(e) => {
                assert_eq!(format!("{:?}", done.unwrap_err()), format!("{e:?}"), "{grid:?} {what}");
                assert_eq!(format!("{:?}", threads.unwrap_err()), format!("{e:?}"), "{grid:?} {what}");
            }
        }
    }

    /// What a search meets: noise of several sizes, ties, one sign, constants, zeros of both signs, one large value, numbers at the
    /// ends of what f32 and f16 hold.
    #[test]
    fn wide_registers_give_the_bytes_of_the_reference() {
        let mut s = 1u64;
        let mut uniform = || {
            s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (s >> 40) as f32 / (1u64 << 24) as f32 - 0.5
        };
        let mut rows: Vec<Vec<f32>> = Vec::new();
        for scale in [1e-44f32, 1e-38, 1e-30, 1e-15, 1e-9, 1e-6, 0.02, 1.0, 300.0, 6e4, 5e5, 1e7, 1e18, 1e30, 3e38] {
            for _ in 0..40 {
                rows.push((0..256).map(|_| scale * (uniform() + uniform() + uniform()) / 1.5).collect());
            }
            rows.push((0..256).map(|_| scale * (uniform() * 8.0).round() / 8.0).collect());
            rows.push((0..256).map(|_| scale * uniform().abs()).collect());
            rows.push((0..256).map(|_| -scale * uniform().abs()).collect());
            // A narrow range far from zero, where products with the reciprocal are large.
            rows.push((0..256).map(|_| -scale * (1.0 + 1e-6 * uniform())).collect());
            rows.push((0..256).map(|i| if i % 32 == 7 { -scale } else { -scale * (1.0 - f32::EPSILON) }).collect());
            rows.push(vec![scale; 256]);
            rows.push(vec![-scale; 256]);
            rows.push((0..256).map(|i| if i % 2 == 0 { scale } else { -scale }).collect());
            rows.push(
                (0..256).map(|i| if i % 37 == 5 { -scale } else { scale / 40.0 * (i as f32 * 0.7).sin() }).collect(),
            );
            rows.push((0..256).map(|i| if i < 100 { 0.0 } else { scale * (i as f32).cos() }).collect());
            rows.push((0..256).map(|i| if i % 64 < 32 { -0.0 } else { scale / 2.0 * (i % 3) as f32 }).collect());
            // Sub-blocks whose scale is stored as zero beside one that is large.
            rows.push((0..256).map(|i| if i < 16 { scale * uniform() } else { 1e-4 * scale * uniform() }).collect());
        }
        rows.push(vec![0.0; 256]);
        rows.push(vec![-0.0; 256]);
        rows.push((0..256).map(|i| if i % 2 == 0 { -0.0 } else { 0.0 }).collect());
        rows.push((0..256).map(|i| f32::from_bits(i * 3)).collect());
        rows.push((0..256).map(|i| f32::from_bits(i << 31 | i)).collect());
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 200, 255] {
                rows.push((0..256).map(|i| if i == at { bad } else { 1.0 }).collect());
            }
        }
        for grid in GgufGrid::ALL {
            for (i, row) in rows.iter().enumerate() {
                check(grid, row, &format!("row {i}"));
            }
            let mut bytes = vec![0; grid.block_bytes() - 1];
            assert!(encode_blocks(grid, &vec![0.0; grid.block_len()], &mut bytes).is_err());
            assert!(encode_blocks(grid, &vec![0.0; grid.block_len() - 1], &mut bytes).is_err());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        /// Any bits, their exponents within `spread` of `exponent` (255 is what is not finite).
        #[test]
        fn wide_registers_give_the_bytes_of_the_reference_for_any_bits(
            bits in prop::collection::vec(any::<u32>(), 512),
            exponent in 0u32..254,
            spread in prop::sample::select(vec![1u32, 3, 12, 255]),
            signs in any::<u32>(),
        ) {
            let value = |b: u32| {
                let e = (exponent + (b >> 23 & 255) % spread).min(255);
                f32::from_bits((b & (signs | 0x7fff_ffff) & 0x807f_ffff) | e << 23)
            };
            let x: Vec<f32> = bits.into_iter().map(value).collect();
            for grid in [GgufGrid::Q4_0, GgufGrid::Q4K, GgufGrid::Q6K] {
                check(grid, &x, "of any bits");
            }
        }
    }

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
