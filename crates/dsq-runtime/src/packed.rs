//! Logits of the predicted tokens of many [`Continuation`]s, packed: every step of the model is full of tokens that somebody gave, from
//! as many sequences as it takes, and none is padding. What continuations have in common at their beginning goes through the model once.
//! Beside it the padded run that this replaces, for comparison. Not the metrics of the logits (the caller's), not generation (see
//! `engine.rs`).
//!
//! A token's logits have the same bits either way, and for any memory, order and number of threads: the model's depend on the tokens
//! before it only (see `llama.rs`).

use crate::llama::PREFILL;
use crate::{Continuation, Entry, KvPolicy, KvPool, KvType, LlamaRuntime, Logits, RuntimeError, Sequence};
use std::collections::VecDeque;

/// Which prediction a row of logits belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Prediction {
    /// The group.
    pub group: usize,
    /// The continuation in its group.
    pub member: usize,
    /// The token that is predicted, by its index in the continuation's tokens. Of one continuation they come in order.
    pub position: usize,
}

/// Takes some rows and their logits `[rows, vocab]`.
pub type PredictionsFn<'a, E> = &'a mut dyn FnMut(&[Prediction], &[f32]) -> Result<(), E>;

/// How [`packed`] runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Positions of keys and values in memory at a time. One group's are always there, whatever this says.
    pub positions: usize,
    /// How keys and values are held where the checkpoint stores no grid for them.
    pub kv: KvType,
    /// Whether a beginning that is common to all continuations, or to those of a group, is computed once.
    pub share: bool,
}

impl Default for Packing {
    fn default() -> Self {
        Self { positions: 4096, kv: KvType::F32, share: true }
    }
}

/// What a run computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Ran {
    /// Positions that were given: [`Continuation::fed`] of all.
    pub given: usize,
    /// Positions that went through the model: fewer where beginnings are shared, more where there is padding.
    pub computed: usize,
    /// Calls of the model.
    pub steps: usize,
}

/// A sequence that is under way: tokens `at..end` of a member are still to come.
struct Work {
    sequence: Sequence,
    group: usize,
    /// `None`: the beginning of the group, of the tokens of its first member.
    member: Option<usize>,
    at: usize,
    end: usize,
}

/// The logits of every predicted token, in steps of as many tokens as the model takes at once. `groups` are those that are likely to
/// begin alike (the answers of a question), in the order in which they run.
///
/// # Errors
/// What `each` returns, or as [`LlamaRuntime::new_pool`] and [`LlamaRuntime::step`].
pub fn packed<E: From<RuntimeError>>(
    model: &LlamaRuntime,
    groups: &[Vec<Continuation>],
    packing: Packing,
    each: PredictionsFn<'_, E>,
) -> Result<Ran, E> {
    let all = || groups.iter().flatten();
    let common = |of: &mut dyn Iterator<Item = &Continuation>| if packing.share { beginning(of) } else { 0 };
    // A few tokens are not worth a sequence.
    let root_len = Some(common(&mut all())).filter(|len| *len >= KvPool::block_len()).unwrap_or(0);
    let plans: Vec<(usize, usize)> = groups
        .iter()
        .map(|group| {
            let len = if group.len() > 1 { common(&mut group.iter()).max(root_len) } else { root_len };
            (len, blocks(group, root_len, len))
        })
        .collect();
    let Some(longest) = all().map(|c| c.fed().len()).max() else { return Ok(Ran::default()) };
    let root_blocks = root_len.div_ceil(KvPool::block_len());
    let largest = plans.iter().map(|(_, blocks)| *blocks).max().unwrap_or(0);
    let room = largest.max((packing.positions / KvPool::block_len()).saturating_sub(root_blocks));
    let room = room.min(plans.iter().map(|(_, blocks)| blocks).sum());
    let positions = (root_blocks + room) * KvPool::block_len();
    let mut pool = model.new_pool(positions, longest, packing.kv, KvPolicy::Full)?;

    let mut ran = Ran { given: all().map(|c| c.fed().len()).sum(), ..Ran::default() };
    let (mut rows, mut logits) = (Vec::new(), Vec::new());
    let mut root = pool.new_sequence();
    if root_len > 0 {
        let tokens = all().next().map_or(&[][..], |c| &c.fed()[..root_len]);
        model.step(&mut pool, &mut [Entry { sequence: &mut root, tokens, logits: Logits::None }], &mut logits)?;
        ran = Ran { computed: root_len, steps: 1, ..ran };
    }
    // What is ready to run; blocks that its groups may yet need; continuations of a group that have not ended.
    let mut ready: VecDeque<Work> = VecDeque::new();
    let (mut held, mut next) = (0, 0);
    let mut left: Vec<usize> = groups.iter().map(Vec::len).collect();
    loop {
        while next < groups.len() && (groups[next].is_empty() || held + plans[next].1 <= room) {
            if ready.iter().map(|w| w.end - w.at).sum::<usize>() >= PREFILL {
                break;
            }
            let (len, blocks) = plans[next];
            if !groups[next].is_empty() {
                held += blocks;
                if len > root_len {
                    let sequence = fork(&mut pool, &root, root_len)?;
                    ready.push_back(Work { sequence, group: next, member: None, at: root_len, end: len });
                } else {
                    for (member, c) in groups[next].iter().enumerate() {
                        let sequence = fork(&mut pool, &root, root_len)?;
                        ready.push_back(Work {
                            sequence,
                            group: next,
                            member: Some(member),
                            at: root_len,
                            end: c.fed().len(),
                        });
                    }
                }
            }
            next += 1;
        }
        if ready.is_empty() {
            return Ok(ran);
        }
        let mut entries = Vec::new();
        let mut space = PREFILL;
        rows.clear();
        for w in ready.iter_mut() {
            let taken = (w.end - w.at).min(space);
            if taken == 0 {
                break;
            }
            let c = &groups[w.group][w.member.unwrap_or(0)];
            let to = w.at + taken;
            let logits = match w.member {
                None => Logits::None,
                Some(member) => wanted(c, w.group, member, w.at, to, &mut rows),
            };
            entries.push(Entry { sequence: &mut w.sequence, tokens: &c.fed()[w.at..to], logits });
            w.at = to;
            space -= taken;
        }
        model.step(&mut pool, &mut entries, &mut logits)?;
        ran.computed += PREFILL - space;
        ran.steps += 1;
        if !rows.is_empty() {
            each(&rows, &logits)?;
        }
        // Those that ended are the first, and those that begin where they end come before the rest: their group's memory is free sooner.
        let mut begun = Vec::new();
        while ready.front().is_some_and(|w| w.at == w.end) {
            let Some(Work { sequence, group, member, end, .. }) = ready.pop_front() else { break };
            if member.is_none() {
                for (member, c) in groups[group].iter().enumerate() {
                    let sequence = fork(&mut pool, &sequence, end)?;
                    begun.push(Work { sequence, group, member: Some(member), at: end, end: c.fed().len() });
                }
            } else {
                left[group] -= 1;
                if left[group] == 0 {
                    held -= plans[group].1;
                }
            }
            pool.release(sequence);
        }
        begun.into_iter().rev().for_each(|w| ready.push_front(w));
    }
}

/// The same as a padded batch gives it: `batch` continuations after one another, in the order of the groups, each filled up with `pad` on
/// the right to the longest of its batch; all positions go through the layers. Logits are made of the predicted tokens only.
///
/// # Errors
/// As [`packed`].
pub fn padded<E: From<RuntimeError>>(
    model: &LlamaRuntime,
    groups: &[Vec<Continuation>],
    (batch, pad, kv): (usize, u32, KvType),
    each: PredictionsFn<'_, E>,
) -> Result<Ran, E> {
    let all: Vec<(usize, usize, &Continuation)> =
        groups.iter().enumerate().flat_map(|(g, of)| of.iter().enumerate().map(move |(m, c)| (g, m, c))).collect();
    let width = |b: &[(usize, usize, &Continuation)]| b.iter().map(|(_, _, c)| c.fed().len()).max().unwrap_or(0);
    let batches = || all.chunks(batch.max(1));
    let block = KvPool::block_len();
    let positions = batches().map(|b| b.len() * width(b).next_multiple_of(block)).max().unwrap_or(0);
    let mut pool = model.new_pool(positions, width(&all), kv, KvPolicy::Full)?;
    let mut ran = Ran { given: all.iter().map(|(_, _, c)| c.fed().len()).sum(), ..Ran::default() };
    let (mut rows, mut logits) = (Vec::new(), Vec::new());
    for b in batches() {
        let width = width(b);
        rows.clear();
        let fill = |c: &Continuation| c.fed().iter().copied().chain(std::iter::repeat(pad)).take(width).collect();
        let tokens: Vec<Vec<u32>> = b.iter().map(|(_, _, c)| fill(c)).collect();
        let mut sequences: Vec<Sequence> = b.iter().map(|_| pool.new_sequence()).collect();
        let mut entries = Vec::with_capacity(b.len());
        for ((sequence, tokens), (group, member, c)) in sequences.iter_mut().zip(&tokens).zip(b) {
            let logits = wanted(c, *group, *member, 0, c.fed().len(), &mut rows);
            entries.push(Entry { sequence, tokens, logits });
        }
        model.step(&mut pool, &mut entries, &mut logits)?;
        ran.computed += b.len() * width;
        ran.steps += 1;
        each(&rows, &logits)?;
        sequences.into_iter().for_each(|s| pool.release(s));
    }
    Ok(ran)
}

/// Which logits are wanted of tokens `at..to` of a continuation, and their rows: the logits of a token predict the one after it.
fn wanted(c: &Continuation, group: usize, member: usize, at: usize, to: usize, rows: &mut Vec<Prediction>) -> Logits {
    let first = (c.from - 1).max(at);
    if first >= to {
        return Logits::None;
    }
    rows.extend((first..to).map(|i| Prediction { group, member, position: i + 1 }));
    Logits::Part { from: first - at, to: to - at }
}

/// How many tokens all of them begin with whose logits nobody wants.
fn beginning(of: &mut dyn Iterator<Item = &Continuation>) -> usize {
    let Some(first) = of.next() else { return 0 };
    of.fold(first.from - 1, |len, c| {
        let len = len.min(c.from - 1);
        first.tokens[..len].iter().zip(&c.tokens).take_while(|(a, b)| a == b).count()
    })
}

/// The most blocks that a group has at a time, beyond the full ones of the root, whose `root` positions it begins with: those of its
/// beginning of `len` positions, and those that its members then add to the full ones of that.
fn blocks(group: &[Continuation], root: usize, len: usize) -> usize {
    let block = KvPool::block_len();
    let own = if len > root { len.div_ceil(block) - root / block } else { 0 };
    own + group.iter().map(|c| c.fed().len().div_ceil(block) - len / block).sum::<usize>()
}

fn fork(pool: &mut KvPool, of: &Sequence, len: usize) -> Result<Sequence, RuntimeError> {
    let free = pool.free_blocks();
    pool.fork(of, len).ok_or(RuntimeError::NoBlocks { needed: 1, free })
}
