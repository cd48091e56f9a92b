//! The keys and values of one layer in blocks of 16 positions that any number of sequences share through their tables. Not which
//! block belongs to whom (the caller counts that), not the attention that reads them (see `fused.rs`).
//!
//! - Layout: `[block][kv head]`, and of each: keys `[d][16]`, so that 16 scores are one vector and need no horizontal sum, up to a
//!   whole cache line; then values `[16][width padded to 16]`, whose width may be another than `d`. A block is one piece of memory.
//! - A value is stored as f32, as f16 rounded to nearest even, or as the one-byte code that
//!   [`QuantArgs::quantize`] gives: an i8, or the byte of an E4M3 number.
//! - Where positions have scales of their own, those of a head's 16 keys and 16 values follow as f32: two cache lines.
//! - Padding, and positions that no query sees, may hold anything: they reach no result.

use super::form::Kind;
use super::fused::Queries;
use super::sight::Sight;
use crate::memory::Lines;
use crate::parallel::split;
use crate::simd::{LANES, vectorized};
use dsq_quant::{KvGrid, QParams, QuantArgs, QuantType};
use half::f16;
use half::slice::HalfFloatSliceExt;

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
    /// One byte of this type, each position and head with a grid for its key and one for its value, of their own largest magnitudes
    /// ([`KvGrid::from_absmax`]): [`QuantArgs::kv_int8`] or [`QuantArgs::kv_fp8`].
    Dynamic(QuantArgs),
}

impl KvFormat {
    /// Bytes of a value, without scales.
    pub fn bytes(&self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 => 2,
            Self::Codes(_) | Self::Dynamic(_) => 1,
        }
    }

    /// The first of `values` that the format has no form for, which the caller refuses before [`PagedLayer::put`]: f16 and codes have
    /// none for what is not finite, f16 none for 65520 and more, which would round to infinity. Codes saturate.
    pub fn refused(&self, values: &[f32]) -> Option<f32> {
        let limit = match self {
            Self::F32 => return None,
            Self::F16 => 65520.0,
            Self::Codes(_) | Self::Dynamic(_) => f32::INFINITY,
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
    /// What a stored scale of a position is multiplied by, as kernels want it.
    unit: f32,
    blocks: usize,
    pub(super) store: Lines,
}

impl PagedLayer {
    /// Room for `blocks` of [`BLOCK`] positions, for key heads and value heads of the widths `[d, value]`; scores are times `scale`.
    pub fn new(blocks: usize, kv_heads: usize, [d, value]: [usize; 2], scale: f32, format: KvFormat) -> Self {
        let sight = Sight { window: usize::MAX, sinks: 0 };
        let (unit, store) = (Kind::of(&format).unit(), Lines::zeroed(0));
        let mut layer = Self { kv_heads, d, value, scale, sight, format, unit, blocks, store };
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

    /// Key/value heads.
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
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

    /// Where the scales of a block and head begin: those of its keys, then those of its values.
    pub(super) fn scales_at(&self) -> usize {
        self.key_bytes() + BLOCK * self.padded() * self.format.bytes()
    }

    pub(super) fn head_bytes(&self) -> usize {
        let scales = if matches!(self.format, KvFormat::Dynamic(_)) { 2 * BLOCK * size_of::<f32>() } else { 0 };
        self.scales_at() + scales
    }

    /// Writes the key and value rows (`[kv_heads, d]` and `[kv_heads, value]`) of a position of the sequence whose blocks are `table`.
    /// [`KvFormat::refused`] has found nothing in them.
    ///
    /// # Panics
    /// When the position, its block or a length is out of range (the caller's bug).
    pub fn put(&mut self, table: &[u32], position: usize, key: &[f32], value: &[f32]) {
        self.put_rows(&[Queries { table, past: position, tokens: 1 }], key, value);
    }

    /// [`PagedLayer::put`] of the rows of all `sequences` (`keys [rows, kv_heads, d]`, `values [rows, kv_heads, value]`, rows as in
    /// [`super::attend`]) at their positions, split over blocks.
    ///
    /// # Panics
    /// As there, and when two sequences write into one block.
    pub fn put_rows(&mut self, sequences: &[Queries<'_>], keys: &[f32], values: &[f32]) {
        let [k, v] = [self.d, self.value].map(|width| self.kv_heads * width);
        let rows: usize = sequences.iter().map(|s| s.tokens).sum();
        assert!(keys.len() == rows * k && values.len() == rows * v, "key and value rows");
        // What is written into each block: its number, the first row, the first lane, and how many.
        let mut writes = Vec::with_capacity(sequences.len() + rows / BLOCK);
        let mut row = 0;
        for s in sequences {
            let (mut at, end) = (s.past, s.past + s.tokens);
            while at < end {
                let len = (BLOCK - at % BLOCK).min(end - at);
                writes.push((s.table[at / BLOCK] as usize, row, at % BLOCK, len));
                (at, row) = (at + len, row + len);
            }
        }
        if writes.len() > 1 {
            writes.sort_unstable_by_key(|w| w.0);
            assert!(writes.windows(2).all(|w| w[0].0 != w[1].0), "blocks: each written by one sequence");
        }
        if let Some(&(block, ..)) = writes.last() {
            assert!(block < self.blocks, "block {block} of {}", self.blocks);
        }
        let bytes = self.block_bytes();
        let store = self.store.as_mut_slice().as_mut_ptr() as usize;
        split(writes.len(), 1, &|parts| {
            for &(block, row, lane, len) in &writes[parts] {
                // SAFETY: a block of the store, which is borrowed exclusively; no two of `writes` are of one block.
                let to = unsafe { std::slice::from_raw_parts_mut((store + block * bytes) as *mut u8, bytes) };
                for i in 0..len {
                    let (key, value) = (&keys[(row + i) * k..][..k], &values[(row + i) * v..][..v]);
                    match self.format {
                        KvFormat::F32 => self.write(to, lane + i, key, value, |_, _| ([copy; 2], None)),
                        KvFormat::F16 => self.write(to, lane + i, key, value, |_, _| ([half; 2], None)),
                        KvFormat::Codes(grid) => {
                            self.write(to, lane + i, key, value, |_, _| {
                                ([grid.k, grid.v].map(|p| codes(grid.args, p)), None)
                            });
                        }
                        KvFormat::Dynamic(args) => self.write(to, lane + i, key, value, |key, value| {
                            let [k, v] = dynamic(args, key, value);
                            ([k, v].map(|p| codes(args, p)), Some([k.scale, v.scale]))
                        }),
                    }
                }
            }
        });
    }

    /// Writes one position into a block; `of_head` gives for the key and the value of a head what makes stored values of each, and
    /// their scales where they are the head's own.
    fn write<const N: usize, E: Fn(&[f32], &mut [[u8; N]])>(
        &self,
        block: &mut [u8],
        lane: usize,
        key: &[f32],
        value: &[f32],
        of_head: impl Fn(&[f32], &[f32]) -> ([E; 2], Option<[f32; 2]>),
    ) {
        let (d, width) = (self.d, self.value);
        let (keys, row, head_bytes) = (self.key_bytes(), self.padded() * N, self.head_bytes());
        let mut room = [[0u8; N]; 128];
        for (head, bytes) in block.chunks_exact_mut(head_bytes).enumerate() {
            let (key, value) = (&key[head * d..][..d], &value[head * width..][..width]);
            let ([k, v], scales) = of_head(key, value);
            for (i, scale) in scales.into_iter().flatten().enumerate() {
                let at = self.scales_at() + (i * BLOCK + lane) * size_of::<f32>();
                bytes[at..][..size_of::<f32>()].copy_from_slice(&(scale * self.unit).to_ne_bytes());
            }
            let (to_keys, to_values) = bytes.split_at_mut(keys);
            for (at, part) in key.chunks(room.len()).enumerate() {
                let part_room = &mut room[..part.len()];
                k(part, part_room);
                let to = to_keys[at * 128 * BLOCK * N..].chunks_exact_mut(BLOCK * N);
                to.zip(part_room).for_each(|(to, x)| to[lane * N..][..N].copy_from_slice(x));
            }
            let to = to_values[lane * row..][..width * N].as_chunks_mut().0;
            v(value, to);
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

    /// Moves the positions `kept` (in increasing order) of the sequence whose blocks are `table` to its first positions, bit for bit:
    /// position `kept[i]` becomes position `i`. What lies behind them is then nothing in particular. For policies that drop positions.
    ///
    /// # Panics
    /// When the positions are not in order, or one or its block is out of range (the caller's bug).
    pub fn keep(&mut self, table: &[u32], kept: &[usize]) {
        assert!(kept.windows(2).all(|w| w[0] < w[1]), "kept positions: in increasing order");
        match self.format.bytes() {
            4 => self.move_down::<4>(table, kept),
            2 => self.move_down::<2>(table, kept),
            _ => self.move_down::<1>(table, kept),
        }
    }

    /// [`PagedLayer::keep`] of values of `N` bytes.
    fn move_down<const N: usize>(&mut self, table: &[u32], kept: &[usize]) {
        let (bytes, head, keys, row) = (self.block_bytes(), self.head_bytes(), self.key_bytes(), self.padded() * N);
        let (heads, d, scales) = (self.kv_heads, self.d, self.scales_at());
        let store = self.store.as_mut_slice();
        for (to, &from) in kept.iter().enumerate().filter(|(to, from)| to != *from) {
            let [a, b] = [from, to].map(|p| table[p / BLOCK] as usize * bytes);
            let [lane, to_lane] = [from, to].map(|p| p % BLOCK);
            for h in 0..heads {
                let [a, b] = [a, b].map(|at| at + h * head);
                for i in (0..d).map(|i| i * BLOCK * N) {
                    let mut value = [0u8; N];
                    value.copy_from_slice(&store[a + i + lane * N..][..N]);
                    store[b + i + to_lane * N..][..N].copy_from_slice(&value);
                }
                let [from, to] = [a + keys + lane * row, b + keys + to_lane * row];
                store.copy_within(from..from + row, to);
                if matches!(self.format, KvFormat::Dynamic(_)) {
                    for of in 0..2 {
                        let [from, to] = [a + scales, b + scales].map(|at| at + of * BLOCK * size_of::<f32>());
                        let [from, to] = [from + lane * size_of::<f32>(), to + to_lane * size_of::<f32>()];
                        store.copy_within(from..from + size_of::<f32>(), to);
                    }
                }
            }
        }
    }
}

/// What makes codes of values: [`QuantArgs::quantize`], for the two types of a cache, of what is not NaN.
pub(super) fn codes(args: QuantArgs, p: QParams) -> impl Fn(&[f32], &mut [[u8; 1]]) {
    let of = if args.qtype == QuantType::Int8 { int8_codes } else { e4m3_codes };
    move |x, to| of(x, p.scale, to)
}

vectorized! {
    fn int8_codes(x: &[f32], scale: f32, to: &mut [[u8; 1]]) {
        /// Makes units the last place of what is smaller, so that the sum rounds to nearest even.
        const UNITS: f32 = 1.5 * (1 << 23) as f32;
        for (to, x) in to.iter_mut().zip(x) {
            *to = [((x / scale).clamp(-128.0, 127.0) + UNITS).to_bits() as u8];
        }
    }
}

vectorized! {
    fn e4m3_codes(x: &[f32], scale: f32, to: &mut [[u8; 1]]) {
        /// Makes the steps of subnormal numbers, 2^-9, the last place.
        const STEPS: f32 = 1.5 * (1 << 14) as f32;
        for (to, x) in to.iter_mut().zip(x) {
            let x = x / scale;
            let a = if x.abs() < 448.0 { x.abs() } else { 448.0 };
            // The three highest bits of the fraction stay, rounded to nearest even; the exponent's bias is 7 and not 127.
            let kept = (a.to_bits() + 0x7_ffff + (a.to_bits() >> 20 & 1)) >> 20;
            let subnormal = (a + STEPS).to_bits() - STEPS.to_bits();
            let code = if a < f32::from_bits(121 << 23) { subnormal } else { kept.wrapping_sub(120 << 3) };
            *to = [(code | x.to_bits() >> 31 << 7) as u8];
        }
    }
}

vectorized! {
    fn absmax(x: &[f32]) -> f32 {
        let mut lanes = [0.0f32; LANES];
        for x in x.chunks(LANES) {
            lanes.iter_mut().zip(x).for_each(|(lane, x)| *lane = if x.abs() > *lane { x.abs() } else { *lane });
        }
        lanes.into_iter().fold(0.0, f32::max)
    }
}

/// The grids of a key and a value of their own.
///
/// # Panics
/// For a value that is not finite, which [`KvFormat::refused`] finds.
fn dynamic(args: QuantArgs, key: &[f32], value: &[f32]) -> [QParams; 2] {
    match KvGrid::from_absmax(args, absmax(key), absmax(value)) {
        Ok(grid) => [grid.k, grid.v],
        Err(e) => panic!("keys and values: expected finite ones, which `refused` sees to: {e}"),
    }
}

fn copy(x: &[f32], to: &mut [[u8; 4]]) {
    to.iter_mut().zip(x).for_each(|(to, x)| *to = x.to_ne_bytes());
}

fn half(x: &[f32], to: &mut [[u8; 2]]) {
    let mut room = [f16::ZERO; 128];
    for (x, to) in x.chunks(room.len()).zip(to.chunks_mut(room.len())) {
        let room = &mut room[..x.len()];
        room.convert_from_f32_slice(x);
        to.iter_mut().zip(room).for_each(|(to, x)| *to = x.to_ne_bytes());
    }
}
