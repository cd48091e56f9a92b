//! The keys and values of one layer in blocks of 16 positions that any number of sequences share through their tables. Not which
//! block belongs to whom (the caller counts that), not the attention that reads them (see `fused.rs`).
//!
//! - Layout: `[block][kv head]`, and of each: keys `[d][16]`, so that 16 scores are one vector and need no horizontal sum, up to a
//!   whole cache line; then values `[16][width padded to 16]`, whose width may be another than `d`. A block is one piece of memory.
//! - A value is stored as f32, as f16 rounded to nearest even, or as the one-byte code that
//!   [`QuantArgs::quantize`](dsq_quant::QuantArgs::quantize) gives: an i8, or the byte of an E4M3 number.
//! - Padding, and positions that no query sees, may hold anything: they reach no result.

use super::sight::Sight;
use crate::memory::Lines;
use crate::simd::LANES;
use dsq_quant::KvGrid;
use half::f16;

/// Positions of a block.
pub const BLOCK: usize = LANES;

/// How a cache holds a value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum KvFormat {
    /// As it is.
    F32,
    /// IEEE binary16, rounded to nearest even; widened exactly when read.
    F16,
    /// One byte on these grids of keys and values.
    Codes(KvGrid),
}

impl KvFormat {
    /// Bytes of a value.
    pub fn bytes(&self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::Codes(_) => 1,
        }
    }

    /// The first of `values` that the format has no form for, which the caller refuses before [`PagedLayer::put`]: f16 and codes have
    /// none for what is not finite, f16 none for 65520 and more, which would round to infinity. Codes saturate.
    pub fn refused(&self, values: &[f32]) -> Option<f32> {
        let limit = match self {
            Self::F32 => return None,
            Self::F16 => 65520.0,
            Self::Codes(_) => f32::INFINITY,
        };
        // Written so that NaN is found.
        values.iter().find(|x| !matches!(x.abs().partial_cmp(&limit), Some(std::cmp::Ordering::Less))).copied()
    }
}

/// Keys and values of one layer, allocated once.
#[derive(Debug, Clone)]
pub struct PagedLayer {
    pub(super) kv_heads: usize,
    /// Width of a key head.
    pub(super) d: usize,
    /// Width of a value head.
    pub(super) value: usize,
    /// What scores are multiplied by.
    pub(super) scale: f32,
    pub(super) sight: Sight,
    pub(super) format: KvFormat,
    blocks: usize,
    pub(super) store: Lines,
}

impl PagedLayer {
    /// Room for `blocks` of [`BLOCK`] positions, for key heads and value heads of the widths `[d, value]`; scores are times `scale`.
    pub fn new(blocks: usize, kv_heads: usize, [d, value]: [usize; 2], scale: f32, format: KvFormat) -> Self {
        let sight = Sight { window: usize::MAX, sinks: 0 };
        let mut layer = Self { kv_heads, d, value, scale, sight, format, blocks, store: Lines::zeroed(0) };
        layer.store = Lines::zeroed(blocks * layer.block_bytes());
        layer
    }

    /// With a window: a query sees its own position and the `window - 1` before it, at least its own.
    pub fn windowed(mut self, window: Option<usize>) -> Self {
        self.sight.window = window.map_or(usize::MAX, |w| w.max(1));
        self
    }

    /// With attention sinks (StreamingLLM, arXiv:2309.17453): besides those of the window a query sees the first `sinks` positions.
    /// Positions are those of the sequence, not of the cache.
    pub fn with_sinks(mut self, sinks: usize) -> Self {
        self.sight.sinks = sinks;
        self
    }

    /// The last positions that a query sees; `None`: all up to its own.
    pub fn window(&self) -> Option<usize> {
        (self.sight.window < usize::MAX).then_some(self.sight.window)
    }

    /// The first positions that a query sees besides its window.
    pub fn sinks(&self) -> usize {
        self.sight.sinks
    }

    /// How values are held.
    pub fn format(&self) -> KvFormat {
        self.format
    }

    /// Blocks that fit.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// Bytes of a block.
    pub fn block_bytes(&self) -> usize {
        self.kv_heads * self.head_bytes()
    }

    /// Bytes held in memory.
    pub fn bytes(&self) -> usize {
        self.store.len()
    }

    /// Bytes of the keys of a block and head, whole cache lines: then follow the values.
    pub(super) fn key_bytes(&self) -> usize {
        (self.d * BLOCK * self.format.bytes()).next_multiple_of(64)
    }

    /// Width of a stored value row.
    pub(super) fn padded(&self) -> usize {
        self.value.next_multiple_of(LANES)
    }

    pub(super) fn head_bytes(&self) -> usize {
        self.key_bytes() + BLOCK * self.padded() * self.format.bytes()
    }

    /// Writes the key and value rows (`[kv_heads, d]` and `[kv_heads, value]`) of a position of the sequence whose blocks are `table`.
    /// [`KvFormat::refused`] has found nothing in them.
    ///
    /// # Panics
    /// When the position, its block or a length is out of range (the caller's bug).
    pub fn put(&mut self, table: &[u32], position: usize, key: &[f32], value: &[f32]) {
        assert!(key.len() == self.kv_heads * self.d && value.len() == self.kv_heads * self.value, "key and value rows");
        let block = table[position / BLOCK] as usize;
        assert!(block < self.blocks, "block {block} of {}", self.blocks);
        match self.format {
            KvFormat::F32 => self.write(block, position, key, value, f32::to_ne_bytes, f32::to_ne_bytes),
            KvFormat::F16 => {
                let stored = |x| f16::from_f32(x).to_ne_bytes();
                self.write(block, position, key, value, stored, stored);
            }
            KvFormat::Codes(KvGrid { args, k, v }) => {
                let (k, v) = (|x| [args.quantize(x, k) as u8], |x| [args.quantize(x, v) as u8]);
                self.write(block, position, key, value, k, v);
            }
        }
    }

    fn write<const N: usize>(
        &mut self,
        block: usize,
        position: usize,
        key: &[f32],
        value: &[f32],
        k: impl Fn(f32) -> [u8; N],
        v: impl Fn(f32) -> [u8; N],
    ) {
        let (d, width, lane) = (self.d, self.value, position % BLOCK);
        let (keys, row, head_bytes) = (self.key_bytes(), self.padded() * N, self.head_bytes());
        let at = block * self.block_bytes();
        let block = &mut self.store.as_mut_slice()[at..at + self.kv_heads * head_bytes];
        for (head, bytes) in block.chunks_exact_mut(head_bytes).enumerate() {
            let (to_keys, to_values) = bytes.split_at_mut(keys);
            for (to, &x) in to_keys.chunks_exact_mut(BLOCK * N).zip(&key[head * d..][..d]) {
                to[lane * N..][..N].copy_from_slice(&k(x));
            }
            for (to, &x) in to_values[lane * row..].chunks_exact_mut(N).zip(&value[head * width..][..width]) {
                to.copy_from_slice(&v(x));
            }
        }
    }

    /// Makes block `to` a copy of block `from`: before one of several sequences that share a block writes into it.
    ///
    /// # Panics
    /// When a block is out of range (the caller's bug).
    pub fn copy_block(&mut self, from: u32, to: u32) {
        let (from, to, bytes) = (from as usize, to as usize, self.block_bytes());
        assert!(from < self.blocks && to < self.blocks, "blocks {from} and {to} of {}", self.blocks);
        self.store.as_mut_slice().copy_within(from * bytes..(from + 1) * bytes, to * bytes);
    }

    /// The stored key head of a position, widened: plain code for statistics and tests.
    pub(super) fn key(&self, block: u32, head: usize, lane: usize) -> impl Iterator<Item = f32> {
        let at = block as usize * self.block_bytes() + head * self.head_bytes();
        (0..self.d).map(move |i| self.widened(at, i * BLOCK + lane, 0))
    }

    /// Value `i` behind byte `at`; `which`: 0 of the keys, 1 of the values.
    fn widened(&self, at: usize, i: usize, which: usize) -> f32 {
        let n = self.format.bytes();
        let bytes = &self.store.as_slice()[at + i * n..][..n];
        match self.format {
            KvFormat::F32 => f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
            KvFormat::F16 => f16::from_ne_bytes([bytes[0], bytes[1]]).to_f32(),
            KvFormat::Codes(grid) => grid.args.dequantize(bytes[0] as i8, [grid.k, grid.v][which]),
        }
    }
}
