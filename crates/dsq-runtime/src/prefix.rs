//! Which full blocks of keys and values hold which tokens, so that a sequence that begins as another did takes its blocks. Not
//! the memory itself (see `cache.rs`), not who runs when (see `engine.rs`).
//!
//! A block's values depend on all tokens up to its end, so its name is its own tokens and the block before it. Names are compared
//! whole: no two texts ever share a block by a collision of hashes.

use crate::cache::LOST;
use crate::{KvPool, Sequence};
use dsq_kernels::attention::BLOCK;
use std::collections::HashMap;

/// The block before the first.
const ROOT: u64 = 0;

/// What a full block holds: its tokens, after those of the block with the number `after`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Name {
    after: u64,
    tokens: [u32; BLOCK],
}

#[derive(Debug)]
struct Entry {
    /// Its own number; never given twice, so that what followed a forgotten block is not found any more.
    number: u64,
    block: u32,
    /// When it was used last.
    used: u64,
}

/// How far a sequence's blocks are known here.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Known {
    blocks: usize,
    after: u64,
}

impl Known {
    /// Of an empty sequence.
    pub(crate) const NONE: Self = Self { blocks: 0, after: ROOT };
}

/// The full blocks of running and past sequences. Each is retained in the pool, until its memory is needed.
#[derive(Debug, Default)]
pub(crate) struct Prefixes {
    entries: HashMap<Name, Entry>,
    /// Grows with every use; the number of the last entry.
    clock: u64,
    /// Room for [`Prefixes::forget`].
    idle: Vec<(u64, Name)>,
}

impl Prefixes {
    /// Room for the blocks of a pool, which never grows.
    pub(crate) fn new(blocks: usize) -> Self {
        Self { entries: HashMap::with_capacity(blocks), clock: ROOT, idle: Vec::with_capacity(blocks) }
    }

    /// A sequence that begins with the known blocks of `tokens`, as many as there are; the last token is never among
    /// them, because its logits are to be computed.
    pub(crate) fn share(&mut self, pool: &mut KvPool, tokens: &[u32]) -> (Sequence, Known) {
        let mut known = Known::NONE;
        let mut blocks = Vec::new();
        for tokens in tokens[..tokens.len().saturating_sub(1)].as_chunks::<BLOCK>().0 {
            let Some(entry) = self.entries.get(&Name { after: known.after, tokens: *tokens }) else { break };
            blocks.push(entry.block);
            known = Known { blocks: known.blocks + 1, after: entry.number };
        }
        (pool.share(&blocks), known)
    }

    /// Takes note of the full blocks of a sequence that holds `tokens` and counts all of them as used now. Of two sequences
    /// that computed the same block, the first one's is kept. Behind a block that the sequence has given back nothing is noted.
    pub(crate) fn note(&mut self, pool: &mut KvPool, sequence: &Sequence, tokens: &[u32], known: &mut Known) {
        let full = &tokens[..sequence.len()].as_chunks::<BLOCK>().0[known.blocks..];
        for (tokens, &block) in full.iter().zip(&sequence.blocks()[known.blocks..]) {
            if block == LOST {
                break;
            }
            self.clock += 1;
            let number = self.clock;
            let entry = self.entries.entry(Name { after: known.after, tokens: *tokens }).or_insert_with(|| {
                pool.retain(block);
                Entry { number, block, used: number }
            });
            *known = Known { blocks: known.blocks + 1, after: entry.number };
        }
    }

    /// Counts the blocks of a sequence as used now, the first ones last: what is forgotten first is an end, because without its
    /// beginning nothing is found.
    pub(crate) fn touch(&mut self, tokens: &[u32], known: Known) {
        self.clock += known.blocks as u64;
        let mut after = ROOT;
        for (i, tokens) in tokens.as_chunks::<BLOCK>().0[..known.blocks].iter().enumerate() {
            let Some(entry) = self.entries.get_mut(&Name { after, tokens: *tokens }) else { return };
            entry.used = self.clock - i as u64;
            after = entry.number;
        }
    }

    /// Blocks that only this list keeps.
    pub(crate) fn idle(&self, pool: &KvPool) -> usize {
        self.entries.values().filter(|e| pool.users(e.block) == 1).count()
    }

    /// Gives back the `count` blocks longest not used of those that only this list keeps, or all there are; says how many.
    pub(crate) fn forget(&mut self, pool: &mut KvPool, count: usize) -> usize {
        self.idle.clear();
        let idle = self.entries.iter().filter(|(_, e)| pool.users(e.block) == 1);
        self.idle.extend(idle.map(|(name, e)| (e.used, *name)));
        if count < self.idle.len() {
            self.idle.select_nth_unstable_by_key(count, |(used, _)| *used);
            self.idle.truncate(count);
        }
        for (_, name) in &self.idle {
            if let Some(entry) = self.entries.remove(name) {
                pool.drop_block(entry.block);
            }
        }
        self.idle.len()
    }
}
