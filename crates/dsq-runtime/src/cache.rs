//! The memory of sequences: keys and values of every layer in blocks of positions, allocated once for all sequences, which own
//! blocks by number and may share full ones. Not the kernels that read them (see `dsq_kernels::attention`), not which sequence
//! gets blocks when (see `engine.rs`).

use crate::attention::LatentRoom;
use crate::feed_forward::Chosen;
use crate::llama::PREFILL;
use crate::profile::{Clock, Op};
use crate::prune::{PERIOD, Slots};
use crate::rope::RopeTable;
use crate::{KvPolicy, LlamaRuntime, RuntimeError};
use dsq_kernels::attention::{BLOCK, KvFormat, PagedLayer};
use dsq_quant::QuantArgs;
use std::ops::Range;
use std::time::Duration;

/// How a model's keys and values are held where its checkpoint says nothing (a checkpoint's own grids always hold).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvType {
    /// As they are computed.
    #[default]
    F32,
    /// Rounded to f16, as llama.cpp holds them: half the memory and half the reading.
    F16,
    /// INT8 codes, each position and head with a scale of its own for its key and one for its value.
    Int8,
    /// FP8 E4M3 codes with the same scales.
    Fp8,
}

impl KvType {
    pub(crate) fn format(self) -> KvFormat {
        match self {
            Self::F32 => KvFormat::F32,
            Self::F16 => KvFormat::F16,
            Self::Int8 => KvFormat::Dynamic(QuantArgs::kv_int8()),
            Self::Fp8 => KvFormat::Dynamic(QuantArgs::kv_fp8()),
        }
    }
}

/// In a table, the place of a block that was given back.
pub(crate) const LOST: u32 = u32::MAX;

/// Keys and values of all sequences of a model, allocated once by [`LlamaRuntime::new_pool`].
#[derive(Debug)]
pub struct KvPool {
    pub(crate) layers: Vec<PagedLayer>,
    pub(crate) rope: RopeTable,
    /// Positions of the longest sequence.
    pub(crate) longest: usize,
    policy: KvPolicy,
    pub(crate) scratch: Scratch,
    /// Blocks that nobody has; the next one is the last.
    free: Vec<u32>,
    /// Sequences (and whoever [`KvPool::retain`]s) that have each block.
    users: Vec<u32>,
}

/// A sequence's blocks and length. It belongs to the pool that made it, which it must be given back to
/// ([`KvPool::release`]): dropped, its blocks are lost to the pool.
#[derive(Debug, Default)]
pub struct Sequence {
    pub(crate) table: Vec<u32>,
    pub(crate) len: usize,
    /// Under a policy that prunes: what lies where. Else the place of a position is the position.
    pub(crate) slots: Option<Box<Slots>>,
}

impl Sequence {
    /// Positions that are filled.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is filled.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Places in its blocks that are filled.
    fn filled(&self) -> usize {
        self.slots.as_ref().map_or(self.len, |s| s.most())
    }

    /// Its blocks, in the order of the positions; `u32::MAX` for one that was given back.
    pub fn blocks(&self) -> &[u32] {
        &self.table
    }
}

impl KvPool {
    pub(crate) fn new(
        layers: Vec<PagedLayer>,
        rope: RopeTable,
        longest: usize,
        blocks: usize,
        policy: KvPolicy,
    ) -> Self {
        let free = (0..blocks as u32).rev().collect();
        Self { layers, rope, longest, policy, scratch: Scratch::default(), free, users: vec![0; blocks] }
    }

    /// Positions of a block.
    pub const fn block_len() -> usize {
        BLOCK
    }

    /// Blocks in all.
    pub fn blocks(&self) -> usize {
        self.users.len()
    }

    /// Blocks that nobody has.
    pub fn free_blocks(&self) -> usize {
        self.free.len()
    }

    /// Positions of the longest sequence.
    pub fn longest(&self) -> usize {
        self.longest
    }

    /// What sequences keep.
    pub fn policy(&self) -> KvPolicy {
        self.policy
    }

    /// Bytes held in memory.
    pub fn bytes(&self) -> usize {
        let lists = (self.free.capacity() + self.users.capacity()) * size_of::<u32>();
        self.layers.iter().map(PagedLayer::bytes).sum::<usize>() + self.rope.bytes() + self.scratch.bytes() + lists
    }

    /// Measures the operations of the steps that follow, from zero.
    pub fn start_profile(&mut self) {
        self.scratch.clock = Clock::start(self.layers.len());
    }

    /// What was measured since [`KvPool::start_profile`]: layer (`None`: outside of the layers), operation, time.
    pub fn profile(&self) -> Vec<(Option<usize>, Op, Duration)> {
        self.scratch.clock.times().collect()
    }

    /// How keys and values are held: `f32`, `f16`, the type of their codes on the checkpoint's grids (`int8`, `fp8 e4m3`), or that of codes
    /// with scales of their own (`int8, dynamic`), of the first layer.
    pub fn format_name(&self) -> String {
        match self.layers.first().map(PagedLayer::format) {
            None | Some(KvFormat::F32) => "f32".into(),
            Some(KvFormat::F16) => "f16".into(),
            Some(KvFormat::Codes(grid)) => grid.args.qtype.name().to_ascii_lowercase(),
            Some(KvFormat::Dynamic(args)) => format!("{}, dynamic", args.qtype.name().to_ascii_lowercase()),
        }
    }

    /// Bytes that a decoded token reads of a sequence of `positions`: keys and values of all layers, as far as it sees; under a policy
    /// that prunes on average between two prunings.
    pub fn bytes_read(&self, positions: f64) -> f64 {
        let of = |(i, l): (usize, &PagedLayer)| l.block_bytes() as f64 / BLOCK as f64 * self.seen(i, positions);
        self.layers.iter().enumerate().map(of).sum()
    }

    /// Of `positions`, those that a token sees in a layer; under a policy that prunes on average between two prunings.
    pub(crate) fn seen(&self, layer: usize, positions: f64) -> f64 {
        let layer = &self.layers[layer];
        let kept = self.policy.budget().map(|b| b.budget.saturating_add(PERIOD / 2));
        let most = layer.window().map(|w| w.saturating_add(layer.sinks())).or(kept);
        most.map_or(positions, |most| positions.min(most as f64))
    }

    /// An empty sequence.
    pub fn new_sequence(&self) -> Sequence {
        Sequence { table: Vec::with_capacity(self.longest.div_ceil(BLOCK)), len: 0, slots: None }
    }

    /// Blocks that `sequence` lacks for `len` positions.
    pub fn lacking(&self, sequence: &Sequence, len: usize) -> usize {
        let places = self.policy.peak(sequence.filled(), sequence.len, len);
        places.div_ceil(BLOCK).saturating_sub(sequence.table.len())
    }

    /// Gives `sequence` the blocks of `len` positions, or changes nothing and says false.
    pub(crate) fn grow(&mut self, sequence: &mut Sequence, len: usize) -> bool {
        let lacking = self.lacking(sequence, len);
        if lacking > self.free.len() {
            return false;
        }
        for _ in 0..lacking {
            let Some(block) = self.free.pop() else { return false };
            self.users[block as usize] = 1;
            sequence.table.push(block);
        }
        true
    }

    /// A sequence with the first `len` positions of another: its full blocks are shared, the rest of a block is copied. What both
    /// then append is their own. `None` where a block for the copy is lacking, and where the other has given back what a token
    /// behind those positions sees, and of some positions under a policy that prunes.
    pub fn fork(&mut self, of: &Sequence, len: usize) -> Option<Sequence> {
        let len = len.min(of.len);
        if !self.holds(of, len) || (len > 0 && !self.policy.shares()) {
            return None;
        }
        let full = len / BLOCK;
        let mut sequence = self.share(&of.table[..full]);
        if !len.is_multiple_of(BLOCK) {
            if !self.grow(&mut sequence, len) {
                self.release(sequence);
                return None;
            }
            for layer in &mut self.layers {
                layer.copy_block(of.table[full], sequence.table[full]);
            }
        }
        sequence.len = len;
        Some(sequence)
    }

    /// A sequence that begins with full blocks of others. It keeps those of them that the policy keeps; under one that prunes it is empty.
    pub fn share(&mut self, blocks: &[u32]) -> Sequence {
        let mut sequence = self.new_sequence();
        let blocks = if self.policy.shares() { blocks } else { &[] };
        for &block in blocks {
            if block != LOST {
                self.retain(block);
            }
            sequence.table.push(block);
        }
        sequence.len = blocks.len() * BLOCK;
        self.settle(&mut sequence);
        sequence
    }

    /// Gives back the blocks of which no later token of the sequence sees a position, and those behind what is held.
    pub(crate) fn settle(&mut self, sequence: &mut Sequence) {
        if sequence.slots.is_some() {
            self.trim(sequence);
        }
        for at in self.hidden(sequence.len).rev() {
            let block = std::mem::replace(&mut sequence.table[at], LOST);
            if block == LOST {
                // All before it are lost, too.
                break;
            }
            self.drop_block(block);
        }
    }

    /// The blocks of which no token from position `len` on sees a position, in any layer.
    fn hidden(&self, len: usize) -> Range<usize> {
        if !matches!(self.policy, KvPolicy::Window { .. }) {
            return 0..0;
        }
        let window = self.layers.iter().map(|l| l.window().unwrap_or(usize::MAX)).max().unwrap_or(usize::MAX);
        let sinks = self.layers.iter().map(PagedLayer::sinks).max().unwrap_or(0);
        let end = (len + 1).saturating_sub(window) / BLOCK;
        sinks.div_ceil(BLOCK).min(end)..end
    }

    /// Whether the first `len` positions of a sequence are there, as far as a token behind them sees them.
    fn holds(&self, sequence: &Sequence, len: usize) -> bool {
        if sequence.slots.is_some() {
            return len == 0 || len == sequence.len;
        }
        let hidden = self.hidden(len);
        let mut blocks = sequence.table[..len.div_ceil(BLOCK)].iter().enumerate();
        blocks.all(|(at, &block)| block != LOST || hidden.contains(&at))
    }

    fn give_back(&mut self, block: u32) {
        if block != LOST {
            self.drop_block(block);
        }
    }

    /// Keeps a block that a sequence has, beyond the sequence; to be undone by [`KvPool::drop_block`].
    pub fn retain(&mut self, block: u32) {
        self.users[block as usize] += 1;
    }

    /// Undoes [`KvPool::retain`].
    pub fn drop_block(&mut self, block: u32) {
        let users = &mut self.users[block as usize];
        *users -= 1;
        if *users == 0 {
            self.free.push(block);
        }
    }

    /// How many have a block.
    pub fn users(&self, block: u32) -> u32 {
        self.users[block as usize]
    }

    /// Forgets all positions of a sequence from `len` on and gives back the blocks that it then does not need. A block that it
    /// shares with others and would write into is copied first; where there is none for the copy, `len` becomes the start of the
    /// block, whose positions have to be computed again, or 0 where what they see was given back.
    ///
    /// # Errors
    /// [`RuntimeError::Input`] where what a token behind the shorter sequence sees was given back; the sequence stays as it was. To
    /// length 0 all can be cut.
    pub fn truncate(&mut self, sequence: &mut Sequence, len: usize) -> Result<(), RuntimeError> {
        let (len, got) = (len.min(sequence.len), sequence.len);
        if !self.holds(sequence, len) {
            let name = self.policy.name();
            return Err(RuntimeError::Input {
                what: "KV cache",
                problem: format!(
                    "cut from {got} to {len} positions: expected what the next token sees, which the policy {name} has given back"
                ),
            });
        }
        self.cut(sequence, len);
        if !self.holds(sequence, sequence.len) {
            self.cut(sequence, 0);
        }
        Ok(())
    }

    fn trim(&mut self, sequence: &mut Sequence) {
        while sequence.table.len() > sequence.filled().div_ceil(BLOCK) {
            if let Some(block) = sequence.table.pop() {
                self.give_back(block);
            }
        }
    }

    /// As [`KvPool::truncate`] of a sequence that holds what is needed; of one that is pruned, also to a length from which on nothing was observed.
    pub(crate) fn cut(&mut self, sequence: &mut Sequence, len: usize) {
        sequence.len = sequence.len.min(len);
        if let Some(slots) = &mut sequence.slots {
            slots.cut(sequence.len);
        }
        self.trim(sequence);
        let Some(&last) = sequence.table.last() else { return };
        if sequence.len.is_multiple_of(BLOCK) || self.users(last) == 1 {
            return;
        }
        sequence.table.pop();
        if self.free.is_empty() {
            sequence.len = sequence.table.len() * BLOCK;
        } else {
            let len = sequence.len;
            self.grow(sequence, len);
            for layer in &mut self.layers {
                layer.copy_block(last, sequence.table[sequence.table.len() - 1]);
            }
        }
        self.drop_block(last);
    }

    /// Takes the blocks of a sequence back.
    pub fn release(&mut self, mut sequence: Sequence) {
        for block in sequence.table.drain(..) {
            self.give_back(block);
        }
    }
}

/// Keys and values of one sequence with memory of its own. Made by [`LlamaRuntime::new_cache`] for one model.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) pool: KvPool,
    pub(crate) sequence: Sequence,
    capacity: usize,
}

impl KvCache {
    pub(crate) fn new(model: &LlamaRuntime, tokens: usize, kv: KvType, policy: KvPolicy) -> Result<Self, RuntimeError> {
        policy.check_model(model.config())?;
        let pool = model.new_pool(policy.blocks(tokens, PREFILL) * BLOCK, tokens, kv, policy)?;
        let sequence = pool.new_sequence();
        Ok(Self { pool, sequence, capacity: tokens })
    }

    /// Positions that are filled.
    pub fn len(&self) -> usize {
        self.sequence.len()
    }

    /// Whether no position is filled.
    pub fn is_empty(&self) -> bool {
        self.sequence.is_empty()
    }

    /// Positions that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// What it keeps.
    pub fn policy(&self) -> KvPolicy {
        self.pool.policy
    }

    /// Forgets all positions from `len` on; 0 starts a new sequence. What remains gives the same bits as a fresh run.
    ///
    /// # Errors
    /// As [`KvPool::truncate`]; none for 0.
    pub fn truncate(&mut self, len: usize) -> Result<(), RuntimeError> {
        self.pool.truncate(&mut self.sequence, len)
    }

    /// Bytes held in memory.
    pub fn bytes(&self) -> usize {
        self.pool.bytes()
    }

    /// As [`KvPool::bytes_read`].
    pub fn bytes_read(&self, positions: f64) -> f64 {
        self.pool.bytes_read(positions)
    }
}

/// Buffers of a forward pass; they grow to the largest chunk seen and stay.
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
    /// What the last block of a layer adds to the residual stream.
    pub delta: Vec<f32>,
    /// The position of each row.
    pub positions: Vec<usize>,
    pub latent: LatentRoom,
    pub chosen: Chosen,
    pub clock: Clock,
}

impl Scratch {
    /// Sets the lengths for `m` tokens of the given row widths, in the order of the fields.
    pub(crate) fn resize(&mut self, m: usize, widths: [usize; 10]) {
        let Self { hidden, normed, q, k, v, mixed, gate, up, ffn, delta, .. } = self;
        for (buffer, width) in [hidden, normed, q, k, v, mixed, gate, up, ffn, delta].into_iter().zip(widths) {
            buffer.resize(m * width, 0.0);
        }
    }

    fn bytes(&self) -> usize {
        let Self { hidden, normed, q, k, v, mixed, gate, up, ffn, delta, positions, latent, chosen, clock: _ } = self;
        let floats = [hidden, normed, q, k, v, mixed, gate, up, ffn, delta].iter().map(|b| b.capacity()).sum::<usize>();
        let rest = positions.capacity() * size_of::<usize>() + latent.bytes() + chosen.bytes();
        floats * size_of::<f32>() + rest
    }
}
