//! Linear layers `out = x W^T` with weights kept packed: INT4 and INT8 codes, or f32, f16, bf16 values; f32
//! activations, f32 accumulation (W4A16 and its kin). Not here: biases, activations quantized to integers.
//!
//! - Shapes: `x [m, k]`, `out [m, n]`, row major; any m, n, k; any group length that divides k.
//! - Layout: `KernelLayout`, see `layout.rs`: blocks of 16 rows, one cache line for 16 rows x 8 INT4 codes.
//! - Requires: nothing; AVX-512F or AVX2+FMA+F16C are found at run time, otherwise plain Rust.
//! - Order: for each output, the reduction is cut into its groups, and each group into segments of at most 64.
//!   Segment: `part = 0; part = fma(q - zero, x, part)` in increasing k, with `q - zero` an exact integer. Then
//!   `total = fma(scale, part, total)`, segments in increasing k (float storage: q is the value, `total + part`).
//!   The order knows neither m nor the number of threads nor the path: all give the same bits.
//! - Cost: per token `n * k` multiply-adds. One token: bound by reading the weights (bits per weight of the format,
//!   scales in their stored dtype); AVX-512 widens a nibble with a shift and a table look-up in a register. Many
//!   tokens: each segment is widened once for 48 tokens into the L1 cache, then register tiles of 32 rows x 12
//!   tokens (AVX2: 16 x 6).
//! - Error: against exact arithmetic at most `(64 + S) u * sum |w| |x|` for S segments and u = 2^-24, to first order:
//!   a term passes at most 64 roundings in its segment and one for each segment after it, and the scale is exact.

mod kernel;
mod layout;
mod reference;
#[cfg(test)]
mod tests;

pub use reference::matmul_reference;

use crate::parallel::{OutPtr, split};
use crate::simd::{Simd, dispatch};
use crate::{Isa, simd};
use dsq_quant::{FloatType, QuantError, QuantType, QuantizedMatrix};
use kernel::{Bf16, CHUNK, F16, F32, Int4, Int8};
use layout::{BLOCK, Panels, Storage};
use std::ops::Range;

/// Defines a public layer over [`Panels`].
macro_rules! layer {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug, Clone)]
        pub struct $name {
            panels: Panels,
            isa: Isa,
        }

        impl $name {
            /// Outputs (rows of the weight).
            pub fn n(&self) -> usize {
                self.panels.n
            }

            /// Reduction dimension (columns of the weight).
            pub fn k(&self) -> usize {
                self.panels.k
            }

            /// Bytes held in memory: weights, scales, zero points, padding.
            pub fn bytes(&self) -> usize {
                self.panels.bytes()
            }

            /// `out [m, n] = x [m, k] * W^T`, on the current rayon pool, split over outputs.
            ///
            /// # Panics
            /// When `x` or `out` has another length than its shape says (the caller's bug).
            pub fn matmul(&self, x: &[f32], m: usize, out: &mut [f32]) {
                matmul(&self.panels, self.isa, x, m, out);
            }

            /// Writes the values of one row of the weight (an embedding look-up).
            ///
            /// # Panics
            /// When `row >= n` or `out` is shorter than k.
            pub fn row(&self, row: usize, out: &mut [f32]) {
                assert!(row < self.panels.n, "row {row} of {}", self.panels.n);
                self.panels.row(row, out);
            }

            /// The path that this layer runs on, and why.
            pub fn describe(&self) -> String {
                format!("{} {}", describe(&self.panels), self.isa.describe())
            }

            /// The same layer on another path (tests and benchmarks); paths that this CPU lacks become scalar.
            pub fn with_isa(mut self, isa: Isa) -> Self {
                self.isa = if Isa::supported().contains(&isa) { isa } else { Isa::Scalar };
                self
            }
        }
    };
}

layer! {
    /// A linear layer with INT4 weights, symmetric or asymmetric, any grouping (W4A16).
    Int4Linear
}
layer! {
    /// A linear layer with INT8 weights, symmetric or asymmetric, any grouping (W8A16).
    Int8Linear
}
layer! {
    /// A linear layer with float weights stored as f32, f16 or bf16.
    FloatLinear
}

impl Int4Linear {
    /// Packs an INT4 matrix.
    ///
    /// # Errors
    /// The matrix is not valid, or its codes are not INT4.
    pub fn new(q: &QuantizedMatrix) -> Result<Self, QuantError> {
        expect_type(q, QuantType::Int4)?;
        Ok(Self { panels: Panels::pack_codes(q)?, isa: Isa::detect() })
    }
}

impl Int8Linear {
    /// Packs an INT8 matrix.
    ///
    /// # Errors
    /// The matrix is not valid, or its codes are not INT8.
    pub fn new(q: &QuantizedMatrix) -> Result<Self, QuantError> {
        expect_type(q, QuantType::Int8)?;
        Ok(Self { panels: Panels::pack_codes(q)?, isa: Isa::detect() })
    }
}

impl FloatLinear {
    /// Packs `w [n, k]`, rounded to `dtype` (nearest, ties to even; exact when `w` came from that dtype).
    ///
    /// # Errors
    /// A wrong length.
    pub fn new(w: &[f32], n: usize, k: usize, dtype: FloatType) -> Result<Self, QuantError> {
        Ok(Self { panels: Panels::pack_floats(w, n, k, dtype)?, isa: Isa::detect() })
    }
}

fn expect_type(q: &QuantizedMatrix, want: QuantType) -> Result<(), QuantError> {
    if q.args.qtype == want {
        return Ok(());
    }
    Err(QuantError::Setting { field: "qtype", expected: format!("{want:?}"), got: format!("{:?}", q.args.qtype) })
}

fn describe(p: &Panels) -> String {
    match p.storage {
        Storage::Int(q) => {
            let zeros = if p.scales.as_ref().is_some_and(|s| s.zeros.len() > 0) { " asymmetric" } else { "" };
            format!("int{}{zeros} weights, f32 activations:", q.bits())
        }
        Storage::Float(f) => format!("{} weights, f32 activations:", f.name().to_ascii_lowercase()),
    }
}

fn matmul(p: &Panels, isa: Isa, x: &[f32], m: usize, out: &mut [f32]) {
    assert_eq!(x.len(), m * p.k, "x: [m, k]");
    assert_eq!(out.len(), m * p.n, "out: [m, n]");
    let blocks = p.n.div_ceil(BLOCK);
    if m == 1 {
        let to = OutPtr(out.as_mut_ptr());
        // SAFETY: x has k values, out n, and the ranges of blocks are disjoint.
        split(blocks, 1, &|r| unsafe { decode(p, isa, r, x.as_ptr(), to.get()) });
        return;
    }
    let widest = widest(isa);
    let mut packed = Vec::new();
    for (x, out) in x.chunks(CHUNK * p.k.max(1)).zip(out.chunks_mut(CHUNK * p.n.max(1))) {
        let m = out.len() / p.n.max(1);
        kernel::pack_tokens(x, m, p.k, widest, &mut packed);
        let to = OutPtr(out.as_mut_ptr());
        let from = &packed;
        // SAFETY: `packed` has m * k values, out m * n, and the ranges of blocks write disjoint columns.
        split(blocks, 2, &|r| unsafe { multiply(p, isa, r, from.as_ptr(), m, to.get()) });
    }
    if p.k == 0 {
        out.fill(0.0);
    }
}

fn widest(isa: Isa) -> usize {
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => simd::Avx512::TILE_TOKENS,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => simd::Avx2::TILE_TOKENS,
        _ => simd::Scalar::TILE_TOKENS,
    }
}

/// Safety: as [`kernel::decode`], and the CPU supports `isa`.
unsafe fn decode(p: &Panels, isa: Isa, r: Range<usize>, x: *const f32, out: *mut f32) {
    use kernel::decode as run;
    // SAFETY: forwarded.
    unsafe {
        match p.storage {
            Storage::Int(QuantType::Int4) => {
                dispatch!(isa, run::<Int4>(p: &Panels, r: Range<usize>, x: *const f32, out: *mut f32))
            }
            Storage::Int(QuantType::Int8) => {
                dispatch!(isa, run::<Int8>(p: &Panels, r: Range<usize>, x: *const f32, out: *mut f32))
            }
            Storage::Float(FloatType::F16) => {
                dispatch!(isa, run::<F16>(p: &Panels, r: Range<usize>, x: *const f32, out: *mut f32))
            }
            Storage::Float(FloatType::Bf16) => {
                dispatch!(isa, run::<Bf16>(p: &Panels, r: Range<usize>, x: *const f32, out: *mut f32))
            }
            Storage::Float(FloatType::F32) => {
                dispatch!(isa, run::<F32>(p: &Panels, r: Range<usize>, x: *const f32, out: *mut f32))
            }
        }
    }
}

/// Safety: as [`kernel::multiply`], and the CPU supports `isa`.
unsafe fn multiply(p: &Panels, isa: Isa, r: Range<usize>, x: *const f32, m: usize, out: *mut f32) {
    use kernel::multiply as run;
    // SAFETY: forwarded.
    unsafe {
        match p.storage {
            Storage::Int(QuantType::Int4) => {
                dispatch!(isa, run::<Int4>(p: &Panels, r: Range<usize>, x: *const f32, m: usize, out: *mut f32))
            }
            Storage::Int(QuantType::Int8) => {
                dispatch!(isa, run::<Int8>(p: &Panels, r: Range<usize>, x: *const f32, m: usize, out: *mut f32))
            }
            Storage::Float(FloatType::F16) => {
                dispatch!(isa, run::<F16>(p: &Panels, r: Range<usize>, x: *const f32, m: usize, out: *mut f32))
            }
            Storage::Float(FloatType::Bf16) => {
                dispatch!(isa, run::<Bf16>(p: &Panels, r: Range<usize>, x: *const f32, m: usize, out: *mut f32))
            }
            Storage::Float(FloatType::F32) => {
                dispatch!(isa, run::<F32>(p: &Panels, r: Range<usize>, x: *const f32, m: usize, out: *mut f32))
            }
        }
    }
}
