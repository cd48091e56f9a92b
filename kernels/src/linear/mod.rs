//! Linear layers `out = x W^T` with weights kept packed: INT4, INT8, FP8 and FP4 codes, or f32, f16, bf16 values; f32
//! activations, f32 accumulation (W4A16 and its kin). INT weights take activations rounded to INT8 too: `int.rs` is the
//! contract of that mode, this header that of the other. Not here: biases.
//!
//! - Shapes: `x [m, k]`, `out [m, n]`, row major; any m, n, k; any group length that divides k, FP8 blocks of any size.
//! - Layout: `KernelLayout`, see `layout.rs`: blocks of 16 rows, one cache line for 16 rows x 8 INT4 or FP4 codes.
//! - Requires: nothing; AVX-512F or AVX2+FMA+F16C are found at run time, otherwise plain Rust.
//! - Order: for each output, the reduction is cut into its groups, and each group into segments of at most 64.
//!   Segment: `part = 0; part = fma(q - zero, x, part)` in increasing k, with `q - zero` an exact integer, or the exact
//!   value of an FP8 or FP4 code. Then `total = fma(scale, part, total)`, segments in increasing k (float storage: q is the
//!   value, `total + part`). The scale of NVFP4 is the stored one divided by the global one, rounded once. The order knows
//!   neither m nor the number of threads nor the path: all give the same bits.
//! - Cost: per token `n * k` multiply-adds. One token: bound by reading the weights (bits per weight of the format,
//!   scales in their stored dtype); AVX-512 widens a nibble with a shift and a table look-up in a register, AVX2 an FP4
//!   nibble so too (magnitude from a table of eight, sign beside it). An FP8 byte becomes a binary16 by shifts, which the
//!   CPU widens; E4M3 then takes one multiplication by 2^8. NVFP4 pays one division for 16 rows x 16 weights. Many
//!   tokens: each segment is widened once for 48 tokens into the L1 cache, then register tiles of 32 rows x 12
//!   tokens (AVX2: 16 x 6).
//! - Error: against exact arithmetic at most `(64 + S) u * sum |w| |x|` for S segments and u = 2^-24, to first order:
//!   a term passes at most 64 roundings in its segment and one for each segment after it, and the scale is exact.

mod input;
mod int;
#[cfg(target_arch = "x86_64")]
mod int_avx2;
#[cfg(target_arch = "aarch64")]
mod int_neon;
#[cfg(target_arch = "x86_64")]
mod int_vnni;
#[cfg(target_arch = "x86_64")]
mod int_vnni256;
mod kernel;
mod layout;
mod modes;
mod reference;
mod stored;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_int;

pub(crate) use int::IntPath;
pub use modes::{Activations, matmul_many_in, matmul_many_on_grid};
pub use reference::{matmul_int8_reference, matmul_reference};
pub use stored::FloatPacking;

use crate::parallel::{OutPtr, split};
use crate::simd::{Simd, dispatch};
use crate::{Isa, simd};
use dsq_quant::{ColumnOrder, FloatType, QuantError, QuantType, QuantizedMatrix};
use kernel::{Bf16, CHUNK, E4M3, E5M2, F16, F32, Fp4, Int4, Int8};
use layout::{BLOCK, Panels, Storage};
use std::cell::Cell;
use std::ops::Range;
use std::thread::LocalKey;

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
                matmul(&[(&self.panels, self.isa)], x, m, &mut [out]);
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
    /// A linear layer with INT4 weights, symmetric or asymmetric, any grouping (W4A16). INT3 and INT2 codes are held in
    /// the same four-bit fields: they cost the memory and the time of INT4.
    Int4Linear
}
layer! {
    /// A linear layer with INT8 weights, symmetric or asymmetric, any grouping (W8A16).
    Int8Linear
}
layer! {
    /// A linear layer with FP8 weights, E4M3 or E5M2, one scale for the tensor, a row or a block. The codes are widened to
    /// f32 in registers: no FP8 arithmetic of any CPU or GPU is used.
    Fp8Linear
}
layer! {
    /// A linear layer with FP4 weights: NVFP4 or MXFP4. The nibbles are looked up in a table in a register.
    Fp4Linear
}
layer! {
    /// A linear layer with float weights stored as f32, f16 or bf16.
    FloatLinear
}

impl Int4Linear {
    /// Packs an INT4, INT3 or INT2 matrix.
    ///
    /// # Errors
    /// The matrix is not valid, or its codes have more than four bits.
    pub fn new(q: &QuantizedMatrix) -> Result<Self, QuantError> {
        expect_type(q, &[QuantType::Int4, QuantType::Int3, QuantType::Int2])?;
        Ok(Self { panels: Panels::pack_codes(q)?, isa: Isa::detect() })
    }
}

impl Int8Linear {
    /// Packs an INT8 matrix.
    ///
    /// # Errors
    /// The matrix is not valid, or its codes are not INT8.
    pub fn new(q: &QuantizedMatrix) -> Result<Self, QuantError> {
        expect_type(q, &[QuantType::Int8])?;
        Ok(Self { panels: Panels::pack_codes(q)?, isa: Isa::detect() })
    }
}

impl Fp8Linear {
    /// Packs an FP8 matrix.
    ///
    /// # Errors
    /// The matrix is not valid, or its codes are not FP8.
    pub fn new(q: &QuantizedMatrix) -> Result<Self, QuantError> {
        expect_type(q, &[QuantType::Fp8E4M3, QuantType::Fp8E5M2])?;
        Ok(Self { panels: Panels::pack_codes(q)?, isa: Isa::detect() })
    }
}

impl Fp4Linear {
    /// Packs an NVFP4 or MXFP4 matrix.
    ///
    /// # Errors
    /// The matrix is not valid, or its codes are not FP4.
    pub fn new(q: &QuantizedMatrix) -> Result<Self, QuantError> {
        expect_type(q, &[QuantType::Fp4E2M1])?;
        Ok(Self { panels: Panels::pack_codes(q)?, isa: Isa::detect() })
    }
}

impl FloatLinear {
    /// Packs `w [n, k]`, rounded to `dtype` (nearest, ties to even; exact when `w` came from that dtype).
    ///
    /// # Errors
    /// A wrong length, or a dtype of one byte.
    pub fn new(w: &[f32], n: usize, k: usize, dtype: FloatType) -> Result<Self, QuantError> {
        Ok(Self { panels: Panels::pack_floats(w, n, k, dtype)?, isa: Isa::detect() })
    }
}

/// Any packed layer, for a call over several.
#[derive(Debug, Clone)]
pub enum Linear {
    /// INT4 codes.
    Int4(Int4Linear),
    /// INT8 codes.
    Int8(Int8Linear),
    /// FP8 codes.
    Fp8(Fp8Linear),
    /// FP4 codes.
    Fp4(Fp4Linear),
    /// Float values.
    Float(FloatLinear),
    /// Codes whose groups are no runs of inputs: each row of the input is gathered first.
    Ordered(Box<OrderedLinear>),
}

/// A layer whose columns are inputs in another order.
#[derive(Debug, Clone)]
pub struct OrderedLinear {
    linear: Linear,
    order: ColumnOrder,
}

impl Linear {
    /// Packs a quantized matrix into the layer of its type.
    ///
    /// # Errors
    /// The matrix is not valid.
    pub fn new(q: &QuantizedMatrix) -> Result<Self, QuantError> {
        match q.args.qtype {
            QuantType::Int2 | QuantType::Int3 | QuantType::Int4 => Int4Linear::new(q).map(Linear::Int4),
            QuantType::Int8 => Int8Linear::new(q).map(Linear::Int8),
            QuantType::Fp8E4M3 | QuantType::Fp8E5M2 => Fp8Linear::new(q).map(Linear::Fp8),
            QuantType::Fp4E2M1 => Fp4Linear::new(q).map(Linear::Fp4),
        }
    }

    /// [`Linear::new`] of a matrix whose column `j` is input `order.inputs()[j]`. An input costs one copy of its row.
    ///
    /// # Errors
    /// The matrix is not valid, or the order is that of another number of columns.
    pub fn ordered(q: &QuantizedMatrix, order: ColumnOrder) -> Result<Self, QuantError> {
        if order.k() != q.k {
            return Err(QuantError::Length { what: "column order", expected: q.k, got: order.k() });
        }
        Ok(Linear::Ordered(Box::new(OrderedLinear { linear: Self::new(q)?, order })))
    }

    /// The order of the columns, where it is not that of the inputs.
    fn order(&self) -> Option<&ColumnOrder> {
        match self {
            Linear::Ordered(l) => Some(&l.order),
            _ => None,
        }
    }

    fn parts(&self) -> (&Panels, Isa) {
        match self {
            Linear::Int4(l) => (&l.panels, l.isa),
            Linear::Int8(l) => (&l.panels, l.isa),
            Linear::Fp8(l) => (&l.panels, l.isa),
            Linear::Fp4(l) => (&l.panels, l.isa),
            Linear::Float(l) => (&l.panels, l.isa),
            Linear::Ordered(l) => l.linear.parts(),
        }
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.parts().0.n
    }

    /// Reduction dimension.
    pub fn k(&self) -> usize {
        self.parts().0.k
    }

    /// Bytes held in memory.
    pub fn bytes(&self) -> usize {
        self.parts().0.bytes() + self.order().map_or(0, |o| size_of_val(o.inputs()))
    }

    /// The path that this layer runs on, and why.
    pub fn describe(&self) -> String {
        let (panels, isa) = self.parts();
        let gathered = if self.order().is_some() { "; inputs gathered, groups in activation order" } else { "" };
        format!("{} {}{gathered}", describe(panels), isa.describe())
    }

    /// Writes the values of one row of the weight (an embedding look-up).
    ///
    /// # Panics
    /// When `row >= n` or `out` is shorter than k.
    pub fn row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.n(), "row {row} of {}", self.n());
        self.parts().0.row(row, out);
        if let Some(order) = self.order() {
            let inputs = order.scatter(&out[..self.k()]);
            out[..self.k()].copy_from_slice(&inputs);
        }
    }

    /// `out [m, n] = x [m, k] * W^T`; see [`Int4Linear::matmul`].
    ///
    /// # Panics
    /// As [`Int4Linear::matmul`].
    pub fn matmul(&self, x: &[f32], m: usize, out: &mut [f32]) {
        matmul_many(&[self], x, m, &mut [out]);
    }
}

thread_local! {
    /// Inputs in the order of a tile's tokens, in that of a layer's columns, and on a grid: kept for the next call.
    static PACKED: Cell<Vec<f32>> = Cell::default();
    static GATHERED: Cell<Vec<f32>> = Cell::default();
    static ROUNDED: Cell<Vec<f32>> = Cell::default();
}

/// `body` with a room of this thread, which is taken out meanwhile: a thread that waits for others may begin another product.
fn lent<R>(room: &'static LocalKey<Cell<Vec<f32>>>, body: impl FnOnce(&mut Vec<f32>) -> R) -> R {
    let mut taken = room.take();
    let result = body(&mut taken);
    room.set(taken);
    result
}

/// Several layers of the same input in one parallel region (in one for each order of columns): `outs[i] [m, n_i] = x [m, k] * W_i^T`.
/// The same bits as one by one.
///
/// # Panics
/// When the number of outputs, a `k`, or a length does not fit (the caller's bug).
pub fn matmul_many(layers: &[&Linear], x: &[f32], m: usize, outs: &mut [&mut [f32]]) {
    assert_eq!(layers.len(), outs.len(), "one output for each layer");
    let mut at = 0;
    while let Some(first) = layers.get(at) {
        // Layers that were ordered by the same inputs, as q, k and v are, share what is gathered.
        let here = layers[at..].iter().take_while(|l| l.order() == first.order()).count();
        let parts: Vec<_> = layers[at..at + here].iter().map(|l| l.parts()).collect();
        let outs = &mut outs[at..at + here];
        match first.order() {
            None => matmul(&parts, x, m, outs),
            Some(order) => lent(&GATHERED, |room| {
                order.gather_into(x, room);
                matmul(&parts, room, m, outs);
            }),
        }
        at += here;
    }
}

fn expect_type(q: &QuantizedMatrix, known: &[QuantType]) -> Result<(), QuantError> {
    if known.contains(&q.args.qtype) {
        return Ok(());
    }
    let expected = known.iter().map(|t| format!("{t:?}")).collect::<Vec<_>>().join(", ");
    Err(QuantError::Setting { field: "qtype", expected, got: format!("{:?}", q.args.qtype) })
}

fn describe(p: &Panels) -> String {
    format!("{}, f32 activations:", describe_weights(p))
}

fn describe_weights(p: &Panels) -> String {
    match p.storage {
        Storage::Code(q) => {
            let zeros = if p.scales.as_ref().is_some_and(|s| s.zeros.len() > 0) { " asymmetric" } else { "" };
            let held = match q {
                QuantType::Int2 | QuantType::Int3 => " in 4-bit fields",
                QuantType::Fp8E4M3 | QuantType::Fp8E5M2 => " widened to f32 in registers",
                QuantType::Fp4E2M1 => " looked up as f32 in a register",
                QuantType::Int4 | QuantType::Int8 => "",
            };
            format!("{}{zeros} weights{held}", q.name().to_ascii_lowercase())
        }
        Storage::Float(f) => format!("{} weights", f.name().to_ascii_lowercase()),
    }
}

fn matmul(layers: &[(&Panels, Isa)], x: &[f32], m: usize, outs: &mut [&mut [f32]]) {
    assert_eq!(layers.len(), outs.len(), "one output for each layer");
    let Some(&(first, isa)) = layers.first() else { return };
    let k = first.k;
    assert_eq!(x.len(), m * k, "x: [m, k]");
    for ((p, i), out) in layers.iter().zip(outs.iter_mut()) {
        assert_eq!((p.k, *i), (k, isa), "layers of one input: the same k and path");
        assert_eq!(out.len(), m * p.n, "out: [m, n]");
        if k == 0 {
            out.fill(0.0);
        }
    }
    lent(&PACKED, |packed| matmul_packed(layers, isa, x, [m, k], outs, packed));
}

fn matmul_packed(
    layers: &[(&Panels, Isa)],
    isa: Isa,
    x: &[f32],
    [m, k]: [usize; 2],
    outs: &mut [&mut [f32]],
    packed: &mut Vec<f32>,
) {
    for start in (0..m).step_by(CHUNK) {
        let tokens = CHUNK.min(m - start);
        let from = if m == 1 {
            x.as_ptr() as usize
        } else {
            kernel::pack_tokens(&x[start * k..(start + tokens) * k], tokens, k, widest(isa), packed);
            packed.as_ptr() as usize
        };
        let jobs: Vec<(&Panels, OutPtr)> = layers
            .iter()
            .zip(outs.iter_mut())
            .map(|(&(p, _), out)| (p, OutPtr(out[start * p.n..].as_mut_ptr())))
            .collect();
        let blocks = jobs.iter().map(|(p, _)| p.n.div_ceil(BLOCK)).sum();
        split(blocks, if m == 1 { 1 } else { 2 }, &|range| {
            let mut offset = 0;
            for &(p, out) in &jobs {
                let here = p.n.div_ceil(BLOCK);
                let r =
                    range.start.clamp(offset, offset + here) - offset..range.end.clamp(offset, offset + here) - offset;
                offset += here;
                let (x, out) = (from as *const f32, out.get());
                // SAFETY: `x` holds tokens * k values (packed when m > 1), `out` tokens * n; the ranges of blocks of one
                // layer are disjoint.
                unsafe {
                    if m == 1 {
                        decode(p, isa, r, x, out);
                    } else {
                        multiply(p, isa, r, x, tokens, out);
                    }
                }
            }
        });
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
            Storage::Code(QuantType::Int2 | QuantType::Int3 | QuantType::Int4) => {
                dispatch!(isa, run::<Int4>(p: &Panels, r: Range<usize>, x: *const f32, out: *mut f32))
            }
            Storage::Code(QuantType::Int8) => {
                dispatch!(isa, run::<Int8>(p: &Panels, r: Range<usize>, x: *const f32, out: *mut f32))
            }
            Storage::Code(QuantType::Fp8E4M3) => {
                dispatch!(isa, run::<E4M3>(p: &Panels, r: Range<usize>, x: *const f32, out: *mut f32))
            }
            Storage::Code(QuantType::Fp8E5M2) => {
                dispatch!(isa, run::<E5M2>(p: &Panels, r: Range<usize>, x: *const f32, out: *mut f32))
            }
            Storage::Code(QuantType::Fp4E2M1) => {
                dispatch!(isa, run::<Fp4>(p: &Panels, r: Range<usize>, x: *const f32, out: *mut f32))
            }
            Storage::Float(FloatType::F16) => {
                dispatch!(isa, run::<F16>(p: &Panels, r: Range<usize>, x: *const f32, out: *mut f32))
            }
            Storage::Float(FloatType::Bf16) => {
                dispatch!(isa, run::<Bf16>(p: &Panels, r: Range<usize>, x: *const f32, out: *mut f32))
            }
            // One-byte dtypes are refused when float values are packed.
            Storage::Float(FloatType::F32 | FloatType::F8E4M3 | FloatType::F8E8M0) => {
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
            Storage::Code(QuantType::Int2 | QuantType::Int3 | QuantType::Int4) => {
                dispatch!(isa, run::<Int4>(p: &Panels, r: Range<usize>, x: *const f32, m: usize, out: *mut f32))
            }
            Storage::Code(QuantType::Int8) => {
                dispatch!(isa, run::<Int8>(p: &Panels, r: Range<usize>, x: *const f32, m: usize, out: *mut f32))
            }
            Storage::Code(QuantType::Fp8E4M3) => {
                dispatch!(isa, run::<E4M3>(p: &Panels, r: Range<usize>, x: *const f32, m: usize, out: *mut f32))
            }
            Storage::Code(QuantType::Fp8E5M2) => {
                dispatch!(isa, run::<E5M2>(p: &Panels, r: Range<usize>, x: *const f32, m: usize, out: *mut f32))
            }
            Storage::Code(QuantType::Fp4E2M1) => {
                dispatch!(isa, run::<Fp4>(p: &Panels, r: Range<usize>, x: *const f32, m: usize, out: *mut f32))
            }
            Storage::Float(FloatType::F16) => {
                dispatch!(isa, run::<F16>(p: &Panels, r: Range<usize>, x: *const f32, m: usize, out: *mut f32))
            }
            Storage::Float(FloatType::Bf16) => {
                dispatch!(isa, run::<Bf16>(p: &Panels, r: Range<usize>, x: *const f32, m: usize, out: *mut f32))
            }
            // One-byte dtypes are refused when float values are packed.
            Storage::Float(FloatType::F32 | FloatType::F8E4M3 | FloatType::F8E8M0) => {
                dispatch!(isa, run::<F32>(p: &Panels, r: Range<usize>, x: *const f32, m: usize, out: *mut f32))
            }
        }
    }
}
