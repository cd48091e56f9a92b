//! The operations of a training step that Burn's CPU backend runs slowly (scalar, one thread, or decomposed): forward
//! and backward of RMSNorm, SwiGLU, rotary causal attention, cross-entropy, distillation, embedding rows, the AdamW update, and the
//! dense matrix product and the half of it that calibration adds up. Not inference (see the other folders).
//!
//! Every function is plain Rust that the compiler vectorises: separate multiplications and additions, sums over
//! sixteen fixed lanes. The AVX2 build of a function gives the bits of the baseline build, and any thread count gives
//! the same bits: work is split over rows, and sums over rows go by blocks of a fixed size, added in order. (Attention
//! uses the small matrix product, which fuses multiply-adds where the CPU can: there the CPU decides the last bits.)

mod adamw;
mod attention;
mod cross_entropy;
mod distill;
mod dot;
mod embedding;
mod exp;
mod gram;
mod hidden;
mod matmul;
mod rms_norm;
mod swiglu;

pub use adamw::{AdamW, adamw, sum_of_squares};
pub use attention::{Attention, AttentionGradients, AttentionShape, Rope};
pub use cross_entropy::{IGNORED, cross_entropy, cross_entropy_gradient};
pub use distill::{distill, distill_gradient};
pub use dot::dot;
pub use embedding::{gather_rows, scatter_rows};
pub use gram::add_gram;
pub use hidden::{masked_error, masked_error_gradient};
pub use matmul::{Strided, matmul};
pub use rms_norm::{rms_norm, rms_norm_gradient};
pub use swiglu::{silu_mul, silu_mul_gradient};

/// Rows of a block over which a sum is taken before the blocks are added in order.
const ROW_BLOCK: usize = 32;
/// Values that one parallel task handles at least.
const TASK: usize = 1 << 14;

use crate::simd::vectorized;

/// `sum f(i)` for `i` in `0..n`, over sixteen lanes that are then added in order.
#[inline(always)]
fn lane_sum(n: usize, f: impl Fn(usize) -> f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    let whole = n / 16 * 16;
    for i in (0..whole).step_by(16) {
        for (j, lane) in lanes.iter_mut().enumerate() {
            *lane += f(i + j);
        }
    }
    for i in whole..n {
        lanes[i - whole] += f(i);
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests;
