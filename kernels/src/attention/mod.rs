//! Causal grouped-query attention of many sequences over a paged cache of keys and values. Not the projections, not the rotary
//! embedding, not which block belongs to which sequence. The contract of the kernel is the header of `fused.rs`; docs/kernels.md has
//! the layout drawn and what was measured.

mod form;
mod fused;
mod kernel;
mod mass;
mod paged;
mod sight;
#[cfg(test)]
mod tests;

pub use fused::{Queries, attend};
pub use mass::attention_mass;
pub use paged::{BLOCK, KvFormat, PagedLayer};

/// Positions of a run of `fused.rs`. Part of its contract: another length gives other bits.
const RUN: usize = 256;
