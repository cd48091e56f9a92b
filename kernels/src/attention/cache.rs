//! The keys and values of one layer in memory: as f32, or as one-byte codes on the grids of [`KvGrid`]. Not the attention that
//! reads them (see `mod.rs`).
//!
//! - Layout, of values or of codes alike: keys in blocks of 16 positions, `[kv head][block][d][16]`, so that 16 scores are one
//!   vector and need no horizontal sum; values `[kv head][position][width padded to 16]`, whose width may be another than `d`.
//! - A code is what [`QuantArgs::quantize`](dsq_quant::QuantArgs::quantize) gives: an i8, or the byte of an E4M3 number. Padding
//!   is 0 in every form.

use crate::memory::{Floats, Lines};
use crate::simd::LANES;
use dsq_quant::KvGrid;

/// Keys and values of one layer, allocated once.
#[derive(Debug, Clone)]
pub struct LayerCache {
    pub(super) kv_heads: usize,
    /// Width of a key head.
    pub(super) d: usize,
    /// Width of a value head.
    pub(super) value: usize,
    /// What scores are multiplied by.
    pub(super) scale: f32,
    pub(super) blocks: usize,
    pub(super) window: Option<usize>,
    pub(super) store: Store,
}

/// The two ways to hold them.
#[derive(Debug, Clone)]
pub(super) enum Store {
    Floats { keys: Floats, values: Floats },
    Codes { grid: KvGrid, keys: Lines, values: Lines },
}

impl LayerCache {
    /// Room for `positions` (rounded up to a block of 16): f32, or with a grid one byte a value. Scores are times `1 / sqrt(d)`.
    pub fn new(positions: usize, kv_heads: usize, d: usize, grid: Option<KvGrid>) -> Self {
        Self::sized(positions, kv_heads, [d, d], 1.0 / (d as f32).sqrt(), grid)
    }

    /// [`LayerCache::new`] for key heads and value heads of the widths `[d, value]`, and scores times `scale`.
    pub fn sized(positions: usize, kv_heads: usize, [d, value]: [usize; 2], scale: f32, grid: Option<KvGrid>) -> Self {
        let blocks = positions.div_ceil(LANES);
        let keys = kv_heads * blocks * d * LANES;
        let values = kv_heads * blocks * LANES * value.next_multiple_of(LANES);
        let store = match grid {
            None => Store::Floats { keys: Floats::zeroed(keys), values: Floats::zeroed(values) },
            Some(grid) => Store::Codes { grid, keys: Lines::zeroed(keys), values: Lines::zeroed(values) },
        };
        Self { kv_heads, d, value, scale, blocks, window: None, store }
    }

    /// With a window: a query sees its own position and the `window - 1` before it, at least its own. All positions stay in memory, so
    /// that a sequence can be cut back to any length.
    pub fn windowed(self, window: Option<usize>) -> Self {
        Self { window, ..self }
    }

    /// How many positions a query sees; `None`: all up to its own.
    pub fn window(&self) -> Option<usize> {
        self.window
    }

    /// Positions that fit.
    pub fn capacity(&self) -> usize {
        self.blocks * LANES
    }

    /// The grids of the codes; `None`: the cache holds f32.
    pub fn grid(&self) -> Option<KvGrid> {
        match &self.store {
            Store::Floats { .. } => None,
            Store::Codes { grid, .. } => Some(*grid),
        }
    }

    /// Bytes held in memory.
    pub fn bytes(&self) -> usize {
        match &self.store {
            Store::Floats { keys, values } => (keys.as_slice().len() + values.as_slice().len()) * size_of::<f32>(),
            Store::Codes { keys, values, .. } => keys.len() + values.len(),
        }
    }

    /// Writes the key and value rows (`[kv_heads, d]` and `[kv_heads, value]`) of one position, as codes rounded to the nearest. Codes have no form
    /// for a value that is not finite: the caller has seen to it that there is none.
    ///
    /// # Panics
    /// When the position or a length is out of range (the caller's bug).
    pub fn put(&mut self, position: usize, key: &[f32], value: &[f32]) {
        let (heads, d, width, blocks) = (self.kv_heads, self.d, self.value, self.blocks);
        assert!(position < self.capacity() && key.len() == heads * d && value.len() == heads * width);
        match &mut self.store {
            Store::Floats { keys, values } => {
                let place = Place { heads, d, width, blocks, position };
                place.key(key, keys.as_mut_slice(), |x| x);
                place.value(value, values.as_mut_slice(), |x| x);
            }
            Store::Codes { grid, keys, values } => {
                let (place, args, k, v) = (Place { heads, d, width, blocks, position }, grid.args, grid.k, grid.v);
                place.key(key, keys.as_mut_slice(), |x| args.quantize(x, k) as u8);
                place.value(value, values.as_mut_slice(), |x| args.quantize(x, v) as u8);
            }
        }
    }
}

/// Where one position lies.
struct Place {
    heads: usize,
    d: usize,
    width: usize,
    blocks: usize,
    position: usize,
}

impl Place {
    fn key<T>(&self, row: &[f32], keys: &mut [T], stored: impl Fn(f32) -> T) {
        let d = self.d;
        for head in 0..self.heads {
            let block = ((head * self.blocks + self.position / LANES) * d) * LANES + self.position % LANES;
            for i in 0..d {
                keys[block + i * LANES] = stored(row[head * d + i]);
            }
        }
    }

    fn value<T>(&self, row: &[f32], values: &mut [T], stored: impl Fn(f32) -> T) {
        let (d, padded) = (self.width, self.width.next_multiple_of(LANES));
        for head in 0..self.heads {
            let at = (head * self.blocks * LANES + self.position) * padded;
            for (to, &x) in values[at..at + d].iter_mut().zip(&row[head * d..]) {
                *to = stored(x);
            }
        }
    }
}
