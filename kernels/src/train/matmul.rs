//! The dense f32 matrix product of a training step, `c = a b`, for matrices that do not fit a cache.
//!
//! - Shapes: `a [m, k]`, `b [k, n]`, `c [m, n]`. Layout: `a` and `b` with any strides (a transpose is a stride),
//!   `c` row major and contiguous.
//! - Requires: AVX2 with FMA or AVX-512 for the fast paths (found at run time); any sizes.
//! - Order: each output is one chain of fused multiply-adds over `l = 0 .. k`, from 0, on every path: neither the
//!   path, nor the blocking, nor the number of threads changes a bit.
//! - Cost: tiles of 12 x 32 (AVX-512) or 6 x 16 outputs in registers; both operands are packed once for each block of
//!   [`KC`] along `k`, `b` once for each thread.
//! - Error: `|err| <= k * 2^-24 * sum |a||b|` to first order.

use crate::Isa;
use crate::parallel::{OutPtr, split};
use crate::simd::{LANES, Simd, dispatch};
use std::cell::RefCell;
use std::ops::Range;

/// Block along `k`: a panel of `b` (32 columns) takes 32 KiB, a panel of `a` (12 rows) 12 KiB.
pub(super) const KC: usize = 256;
/// Rows of `a` packed at a time, a multiple of 12 and of 6.
const MC: usize = 96;
/// Products below this many multiply-adds run on one thread.
const PARALLEL: usize = 1 << 18;

/// A matrix as a slice and two strides, in elements.
#[derive(Debug, Clone, Copy)]
pub struct Strided<'a> {
    /// Element `(i, j)` is `data[i * row + j * col]`.
    pub data: &'a [f32],
    /// Stride of rows.
    pub row: usize,
    /// Stride of columns.
    pub col: usize,
}

impl<'a> Strided<'a> {
    /// A contiguous row-major matrix with rows of `len`.
    pub fn rows(data: &'a [f32], len: usize) -> Self {
        Self { data, row: len, col: 1 }
    }

    /// The transpose.
    pub fn t(self) -> Self {
        Self { row: self.col, col: self.row, ..self }
    }

    fn check(&self, [m, n]: [usize; 2]) {
        if m > 0 && n > 0 {
            let last = (m - 1).checked_mul(self.row).zip((n - 1).checked_mul(self.col));
            let last = last.and_then(|(a, b)| a.checked_add(b));
            assert!(last.is_some_and(|l| l < self.data.len()), "a matrix reaches past its data");
        }
    }
}

/// `a [m, k]` times `b [k, n]`, row major.
///
/// # Panics
/// When a matrix reaches past its data.
pub fn matmul(a: Strided, b: Strided, [m, n, k]: [usize; 3]) -> Vec<f32> {
    on_path(Isa::detect(), a, b, [m, n, k])
}

fn on_path(isa: Isa, a: Strided, b: Strided, [m, n, k]: [usize; 3]) -> Vec<f32> {
    a.check([m, k]);
    b.check([k, n]);
    if m == 0 || n == 0 || k == 0 {
        return vec![0.0; m * n];
    }
    let mut c: Vec<f32> = Vec::with_capacity(m * n);
    let out = OutPtr(c.as_mut_ptr());
    let run = |rows: Range<usize>, cols: Range<usize>| {
        // SAFETY: the path was detected; `check` covers every read; the parts write disjoint places of `c`.
        unsafe { block(isa, a, b, [m, n, k], rows, cols, out) }
    };
    if m * n * k < PARALLEL {
        run(0..m, 0..n);
    } else if m >= n {
        split(m, 12, &|rows| run(rows, 0..n));
    } else {
        split(n, 2 * LANES, &|cols| run(0..m, cols));
    }
    // SAFETY: every element was written: `k > 0`, and the parts cover all rows and columns.
    unsafe { c.set_len(m * n) };
    c
}

unsafe fn block(
    isa: Isa,
    a: Strided,
    b: Strided,
    size: [usize; 3],
    rows: Range<usize>,
    cols: Range<usize>,
    out: OutPtr,
) {
    // SAFETY: forwarded.
    unsafe {
        dispatch!(isa, walk(
            a: Strided<'_>, b: Strided<'_>, size: [usize; 3], rows: Range<usize>, cols: Range<usize>, out: OutPtr,
        ))
    }
}

#[inline(always)]
unsafe fn walk<S: Simd>(
    a: Strided<'_>,
    b: Strided<'_>,
    size: [usize; 3],
    rows: Range<usize>,
    cols: Range<usize>,
    out: OutPtr,
) {
    // SAFETY: forwarded.
    unsafe {
        if S::TILE_BLOCKS == 2 {
            tiled::<S, 12, 2>(a, b, size, rows, cols, out)
        } else {
            tiled::<S, 6, 1>(a, b, size, rows, cols, out)
        }
    }
}

thread_local! {
    /// Packed panels of `a` and of `b`, kept from call to call.
    static PACKED: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

#[inline(always)]
unsafe fn tiled<S: Simd, const MR: usize, const NV: usize>(
    a: Strided<'_>,
    b: Strided<'_>,
    [_, n, k]: [usize; 3],
    rows: Range<usize>,
    cols: Range<usize>,
    out: OutPtr,
) {
    let nr = NV * LANES;
    let (mut ap, mut bp) = PACKED.with(|p| p.take());
    let padded = cols.len().div_ceil(nr) * nr;
    if ap.len() < MC * KC {
        ap.resize(MC * KC, 0.0);
    }
    if bp.len() < padded * KC {
        bp.resize(padded * KC, 0.0);
    }
    for k0 in (0..k).step_by(KC) {
        let kc = KC.min(k - k0);
        for (panel, j) in cols.clone().step_by(nr).enumerate() {
            pack(b.t(), j..(j + nr).min(cols.end), k0, kc, nr, &mut bp[panel * nr * kc..][..nr * kc]);
        }
        for i0 in rows.clone().step_by(MC) {
            let i1 = (i0 + MC).min(rows.end);
            for (panel, i) in (i0..i1).step_by(MR).enumerate() {
                pack(a, i..(i + MR).min(i1), k0, kc, MR, &mut ap[panel * MR * kc..][..MR * kc]);
            }
            for (jp, j) in cols.clone().step_by(nr).enumerate() {
                let bpanel = &bp[jp * nr * kc..][..nr * kc];
                for (ip, i) in (i0..i1).step_by(MR).enumerate() {
                    let apanel = &ap[ip * MR * kc..][..MR * kc];
                    let (h, w) = (MR.min(i1 - i), nr.min(cols.end - j));
                    // SAFETY: the panels hold `kc` steps; the tile lies inside `c`, or is a buffer of full size.
                    unsafe {
                        let c = out.get().add(i * n + j);
                        if (h, w) == (MR, nr) {
                            tile::<S, MR, NV>(kc, apanel.as_ptr(), bpanel.as_ptr(), c, n, k0 == 0);
                        } else {
                            let mut edge = [[0.0f32; 32]; 12];
                            let e = edge.as_mut_ptr().cast::<f32>();
                            if k0 > 0 {
                                for r in 0..h {
                                    std::ptr::copy_nonoverlapping(c.add(r * n), e.add(r * 32), w);
                                }
                            }
                            tile::<S, MR, NV>(kc, apanel.as_ptr(), bpanel.as_ptr(), e, 32, k0 == 0);
                            for r in 0..h {
                                std::ptr::copy_nonoverlapping(e.add(r * 32), c.add(r * n), w);
                            }
                        }
                    }
                }
            }
        }
    }
    PACKED.with(|p| p.replace((ap, bp)));
}

/// Rows `rows` of `x`, columns `k0 .. k0 + kc`, as `kc` steps of `width` values; absent rows are 0.
#[inline(always)]
pub(super) fn pack(x: Strided, rows: Range<usize>, k0: usize, kc: usize, width: usize, out: &mut [f32]) {
    let h = rows.len();
    if x.row == 1 && h == width {
        for (l, out) in out.chunks_exact_mut(width).enumerate() {
            out.copy_from_slice(&x.data[rows.start + (k0 + l) * x.col..][..width]);
        }
        return;
    }
    if h < width {
        out.fill(0.0);
    }
    for (r, i) in rows.enumerate() {
        let at = i * x.row + k0 * x.col;
        if x.col == 1 {
            for (out, &v) in out[r..].iter_mut().step_by(width).zip(&x.data[at..][..kc]) {
                *out = v;
            }
        } else {
            for l in 0..kc {
                out[l * width + r] = x.data[at + l * x.col];
            }
        }
    }
}

/// One tile of outputs in registers: from 0 when `first`, else from what `c` holds.
#[inline(always)]
pub(super) unsafe fn tile<S: Simd, const MR: usize, const NV: usize>(
    kc: usize,
    a: *const f32,
    b: *const f32,
    c: *mut f32,
    ldc: usize,
    first: bool,
) {
    // SAFETY: the caller's panels hold `kc` steps of MR and NV * 16 values, and the tile is writable.
    unsafe {
        let mut acc = [[S::splat(0.0); NV]; MR];
        if !first {
            for (i, row) in acc.iter_mut().enumerate() {
                for (v, x) in row.iter_mut().enumerate() {
                    *x = S::load(c.add(i * ldc + v * LANES));
                }
            }
        }
        for l in 0..kc {
            let b: [S::V; NV] = std::array::from_fn(|v| S::load(b.add((l * NV + v) * LANES)));
            let a = a.add(l * MR);
            for (i, row) in acc.iter_mut().enumerate() {
                let x = S::splat(*a.add(i));
                for (v, sum) in row.iter_mut().enumerate() {
                    *sum = S::fma(x, b[v], *sum);
                }
            }
        }
        for (i, row) in acc.iter().enumerate() {
            for (v, x) in row.iter().enumerate() {
                S::store(c.add(i * ldc + v * LANES), *x);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{bits, uniform};
    use super::*;

    fn reference(a: Strided, b: Strided, [m, n, k]: [usize; 3]) -> Vec<f32> {
        let mut out = Vec::new();
        for i in 0..m {
            for j in 0..n {
                let at = |l: usize| (a.data[i * a.row + l * a.col], b.data[l * b.row + j * b.col]);
                out.push((0..k).fold(0.0f32, |s, l| at(l).0.mul_add(at(l).1, s)));
            }
        }
        out
    }

    #[test]
    fn every_path_layout_and_size_gives_the_bits_of_the_plain_chain() {
        let sizes = [
            [1, 1, 1],
            [12, 32, 7],
            [13, 33, 9],
            [5, 100, 300],
            [97, 31, 257],
            [200, 65, 513],
            [1, 70, 40],
            [64, 1, 30],
        ];
        for [m, n, k] in sizes {
            let (a, b) = (uniform(m * k, 1), uniform(k * n, 2));
            let lefts = [Strided::rows(&a, k), Strided::rows(&a, m).t()];
            let rights = [Strided::rows(&b, n), Strided::rows(&b, k).t()];
            for left in lefts {
                for right in rights {
                    let want = bits(&reference(left, right, [m, n, k]));
                    for isa in Isa::supported() {
                        let got = bits(&on_path(isa, left, right, [m, n, k]));
                        assert!(got == want, "{isa:?} {m} {n} {k} {} {}", left.col, right.col);
                    }
                }
            }
        }
    }

    #[test]
    fn any_thread_count_gives_the_same_bits() {
        for [m, n, k] in [[300, 70, 100], [70, 300, 100]] {
            let (a, b) = (uniform(m * k, 3), uniform(k * n, 4));
            let run = |threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                pool.install(|| bits(&matmul(Strided::rows(&a, k), Strided::rows(&b, n), [m, n, k])))
            };
            let one = run(1);
            for threads in [2, 3, 8] {
                assert!(run(threads) == one, "{threads}");
            }
        }
    }

    #[test]
    fn empty_products_are_zero() {
        let a = Strided::rows(&[], 0);
        assert_eq!(matmul(a, a, [2, 3, 0]), [0.0; 6]);
        assert_eq!(matmul(a, Strided::rows(&[1.0], 1), [0, 1, 1]), [0.0; 0]);
    }

    #[test]
    #[should_panic(expected = "past its data")]
    fn a_matrix_that_is_too_short_is_refused() {
        matmul(Strided::rows(&[1.0; 5], 3), Strided::rows(&[1.0; 9], 3), [2, 3, 3]);
    }

    /// `cargo test --release -p dsq-kernels speed_of_matmul -- --ignored --nocapture`
    #[test]
    #[ignore = "a measurement"]
    fn speed_of_matmul() {
        for [m, n, k] in [[1024, 512, 192], [1024, 192, 512], [512, 192, 1024], [1024, 1024, 192]] {
            let (a, b) = (uniform(m * k, 1), uniform(k * n, 2));
            for (what, left, right) in [
                ("nn", Strided::rows(&a, k), Strided::rows(&b, n)),
                ("nt", Strided::rows(&a, k), Strided::rows(&b, k).t()),
                ("tn", Strided::rows(&a, m).t(), Strided::rows(&b, n)),
            ] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
                let best = (0..30)
                    .map(|_| {
                        let t = std::time::Instant::now();
                        pool.install(|| std::hint::black_box(matmul(left, right, [m, n, k])));
                        t.elapsed().as_secs_f64()
                    })
                    .fold(f64::MAX, f64::min);
                println!("{m}x{n}x{k} {what}: {:.1} GFLOP/s on one thread", 2.0 * (m * n * k) as f64 / best / 1e9);
            }
        }
    }
}
