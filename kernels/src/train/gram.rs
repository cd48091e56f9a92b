//! The upper half of `x^T x` added to sums in f64: what calibration collects of the inputs of a layer. Not a general product
//! (see `matmul.rs`, whose tiles these are).
//!
//! - Shapes: `x [m, k]`, sums `[k, k]`. Layout: row major, contiguous.
//! - Requires: AVX2 with FMA or AVX-512 for the fast paths (found at run time); any sizes.
//! - Order: each product is one chain of fused multiply-adds over the rows of `x`, from 0, in f32, which is then added in f64:
//!   the bits of `matmul` and an addition, on every path and for any number of threads.
//! - Cost: half the multiply-adds of the whole product and a part of the tiles on the diagonal; all of `x` is packed once, strips of
//!   [`STRIP`] rows of the sums are worked on at a time.
//! - Error: `|err| <= m * 2^-24 * sum |x||x|` to first order.

use super::matmul::{KC, Strided, pack, tile};
use crate::Isa;
use crate::parallel::OutPtr;
use crate::simd::{LANES, Simd, dispatch};
use rayon::prelude::*;

/// Rows of the sums that one task works on, a multiple of 12 and of 6.
const STRIP: usize = 192;

/// Adds `x^T x` for `x [m, k]` to the upper half of `sums [k, k]`, the diagonal included; the lower half is left alone.
///
/// # Panics
/// When the lengths do not fit.
pub fn add_gram(x: &[f32], k: usize, sums: &mut [f64]) {
    on_path(Isa::detect(), x, k, sums);
}

fn on_path(isa: Isa, x: &[f32], k: usize, sums: &mut [f64]) {
    assert_eq!(sums.len(), k * k, "sums are [k, k]");
    if k == 0 || x.is_empty() {
        return;
    }
    assert_eq!(x.len() % k, 0, "x is whole rows of k values");
    let m = x.len() / k;
    let (mr, nr) = if isa == Isa::Avx512 { (12, 2 * LANES) } else { (6, LANES) };
    // Panels of `nr` columns, each with all rows; within a panel `KC` rows at a time.
    let mut packed = vec![0.0f32; k.div_ceil(nr) * nr * m];
    let columns = Strided { data: x, row: 1, col: k };
    packed.par_chunks_mut(nr * m).enumerate().for_each(|(p, out)| {
        for l0 in (0..m).step_by(KC) {
            let len = KC.min(m - l0);
            pack(columns, p * nr..((p + 1) * nr).min(k), l0, len, nr, &mut out[l0 * nr..][..len * nr]);
        }
    });
    sums.par_chunks_mut(STRIP * k).enumerate().with_max_len(1).for_each(|(s, sums)| {
        let (i0, h) = (s * STRIP, sums.len() / k);
        // From the panel in which the strip's first column lies.
        let first = i0 / nr;
        let width = k.div_ceil(nr) * nr - first * nr;
        let mut products = vec![0.0f32; h.div_ceil(mr) * mr * width];
        let out = OutPtr(products.as_mut_ptr());
        let rows = Strided { data: x, row: 1, col: k };
        // SAFETY: the path was detected; `products` holds whole tiles; the panels lie inside `packed`.
        unsafe { strip(isa, rows, &packed, [m, k], [i0, h], [first, width], out) };
        for (r, sums) in sums.chunks_mut(k).enumerate() {
            let i = i0 + r;
            let products = &products[r * width..][i - first * nr..];
            sums[i..].iter_mut().zip(products).for_each(|(s, &p)| *s += f64::from(p));
        }
    });
}

#[allow(clippy::too_many_arguments)]
unsafe fn strip(
    isa: Isa,
    x: Strided,
    packed: &[f32],
    size: [usize; 2],
    rows: [usize; 2],
    panels: [usize; 2],
    out: OutPtr,
) {
    // SAFETY: forwarded.
    unsafe {
        dispatch!(isa, walk(
            x: Strided<'_>, packed: &[f32], size: [usize; 2], rows: [usize; 2], panels: [usize; 2], out: OutPtr,
        ))
    }
}

#[inline(always)]
unsafe fn walk<S: Simd>(
    x: Strided<'_>,
    packed: &[f32],
    size: [usize; 2],
    rows: [usize; 2],
    panels: [usize; 2],
    out: OutPtr,
) {
    // SAFETY: forwarded.
    unsafe {
        if S::TILE_BLOCKS == 2 {
            tiles::<S, 12, 2>(x, packed, size, rows, panels, out)
        } else {
            tiles::<S, 6, 1>(x, packed, size, rows, panels, out)
        }
    }
}

/// The products of rows `i0 .. i0 + h` with the columns from panel `first` on, where they lie right of the diagonal.
#[inline(always)]
unsafe fn tiles<S: Simd, const MR: usize, const NV: usize>(
    x: Strided<'_>,
    packed: &[f32],
    [m, k]: [usize; 2],
    [i0, h]: [usize; 2],
    [first, width]: [usize; 2],
    out: OutPtr,
) {
    let nr = NV * LANES;
    let mut ap = vec![0.0f32; h.div_ceil(MR) * MR * KC];
    for l0 in (0..m).step_by(KC) {
        let len = KC.min(m - l0);
        for (p, i) in (i0..i0 + h).step_by(MR).enumerate() {
            pack(x, i..(i + MR).min(i0 + h), l0, len, MR, &mut ap[p * MR * len..][..MR * len]);
        }
        for panel in first..k.div_ceil(nr) {
            let b = &packed[panel * nr * m + l0 * nr..][..nr * len];
            for (p, i) in (i0..i0 + h).step_by(MR).enumerate() {
                if (panel + 1) * nr <= i {
                    // All of the tile lies left of the diagonal, and so do those below it.
                    break;
                }
                let a = &ap[p * MR * len..][..MR * len];
                // SAFETY: the panels hold `len` steps; the tile lies inside the products.
                unsafe {
                    let c = out.get().add(p * MR * width + (panel - first) * nr);
                    tile::<S, MR, NV>(len, a.as_ptr(), b.as_ptr(), c, width, l0 == 0);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::matmul::matmul;
    use super::super::tests::uniform;
    use super::*;

    #[test]
    fn the_upper_half_has_the_bits_of_the_product_on_every_path_and_the_lower_is_untouched() {
        for (m, k) in [(1, 1), (3, 7), (300, 33), (257, 200), (513, 420), (5, 392)] {
            let x = uniform(m * k, 5);
            let whole = matmul(Strided::rows(&x, k).t(), Strided::rows(&x, k), [k, k, m]);
            for isa in Isa::supported() {
                for threads in [1, 3] {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    let mut sums = vec![0.5f64; k * k];
                    pool.install(|| on_path(isa, &x, k, &mut sums));
                    for (at, (&s, &p)) in sums.iter().zip(&whole).enumerate() {
                        let want = if at % k >= at / k { 0.5 + f64::from(p) } else { 0.5 };
                        assert!(s.to_bits() == want.to_bits(), "{isa:?} {m} {k} {at}: {s} {want}");
                    }
                }
            }
        }
        add_gram(&[], 3, &mut [0.0; 9]);
        add_gram(&[], 0, &mut []);
    }

    /// `cargo test --release --workspace speed_of_gram -- --ignored --nocapture`
    #[test]
    #[ignore = "a measurement"]
    fn speed_of_gram() {
        let (m, k) = (2048, 4096);
        let x = uniform(m * k, 1);
        let mut sums = vec![0.0f64; k * k];
        for isa in Isa::supported() {
            let best = (0..3)
                .map(|_| {
                    let t = std::time::Instant::now();
                    on_path(isa, &x, k, &mut sums);
                    t.elapsed().as_secs_f64()
                })
                .fold(f64::MAX, f64::min);
            println!("{isa:?}: {:.1} GFLOP/s of the half", (m * k * k) as f64 / best / 1e9);
        }
    }
}
