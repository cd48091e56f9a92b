//! The memory of one sequence: keys and values of every layer in blocks of 16 positions, allocated once, as f32 or as the
//! codes of the model's KV scheme, and the buffers of a forward pass. Not shared between sequences.

use crate::rope::RopeTable;
use dsq_kernels::attention::LayerCache;

/// Keys and values of a sequence. Made by [`crate::LlamaRuntime::new_cache`] for one model.
#[derive(Debug, Clone)]
pub struct KvCache {
    pub(crate) layers: Vec<LayerCache>,
    pub(crate) rope: RopeTable,
    pub(crate) len: usize,
    pub(crate) capacity: usize,
    pub(crate) scratch: Scratch,
}

impl KvCache {
    /// Positions that are filled.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is filled.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets all positions from `len` on; 0 starts a new sequence. What remains gives the same bits as a fresh run.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Bytes held in memory.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerCache::bytes).sum::<usize>() + self.rope.bytes() + self.scratch.bytes()
    }
}

/// Buffers of a forward pass over `m` tokens; they grow to the largest chunk seen and stay.
#[derive(Debug, Clone, Default)]
pub(crate) struct Scratch {
    pub hidden: Vec<f32>,
    pub normed: Vec<f32>,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub mixed: Vec<f32>,
    pub gate: Vec<f32>,
    pub up: Vec<f32>,
    pub ffn: Vec<f32>,
}

impl Scratch {
    fn all(&mut self) -> [&mut Vec<f32>; 9] {
        let Self { hidden, normed, q, k, v, mixed, gate, up, ffn } = self;
        [hidden, normed, q, k, v, mixed, gate, up, ffn]
    }

    /// Sets the lengths for `m` tokens of the given row widths, in the order of the fields.
    pub(crate) fn resize(&mut self, m: usize, widths: [usize; 9]) {
        for (buffer, width) in self.all().into_iter().zip(widths) {
            buffer.resize(m * width, 0.0);
        }
    }

    fn bytes(&self) -> usize {
        let Self { hidden, normed, q, k, v, mixed, gate, up, ffn } = self;
        [hidden, normed, q, k, v, mixed, gate, up, ffn].iter().map(|b| b.capacity() * size_of::<f32>()).sum()
    }
}
