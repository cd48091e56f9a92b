//! Fast paths per operation, one folder each, and the one home of `unsafe` in dsq: packed linear layers,
//! convolutions, element-wise operations, attention. The path (scalar, AVX2, AVX-512) is chosen at run time.
//!
//! Where every path gives the same bits (linear layers and all that a language model runs on): such a kernel is
//! written once, over a vector of 16 f32 lanes (`simd`), whose
//! lane-wise operations are IEEE operations on every path. The order of the operations is part of each kernel's
//! contract (its header), depends on the shape of one row only, and never on the number of threads or of rows.
//!
//! Not here: file formats (a disk layout never reaches a kernel), models, training loops.

pub mod attention;
mod bandwidth;
pub mod conv;
pub mod elementwise;
pub mod fake_quant;
mod isa;
pub mod linear;
mod memory;
mod parallel;
pub mod quantize;
mod roofline;
mod simd;
mod team;
pub mod train;

pub use bandwidth::measure_read_bandwidth;
pub use isa::{Isa, MAX_ISA, MAX_ISA_NAMES};
pub use linear::{
    Activations, FloatLinear, FloatPacking, Fp4Linear, Fp8Linear, Int4Linear, Int8Linear, Linear, matmul_many,
    matmul_many_in, matmul_many_on_grid,
};
pub use memory::KeepMemory;
pub use roofline::{Rates, measure_rates};
pub use team::Team;
