//! How much attention each position received: what policies that drop positions from a cache go by (H2O, arXiv:2306.14048). Scores are
//! those of `fused.rs`, bit for bit; the weights are their softmax over all positions at once, and not its bits.

use super::RUN;
use super::fused::{Job, Queries, Room, Tile, Unit};
use super::kernel::SCORES;
use super::paged::{BLOCK, PagedLayer};
use super::sight::Seen;
use crate::Isa;
use crate::elementwise::exp;
use crate::parallel::{OutPtr, split};
use crate::simd::{LANES, Simd, dispatch, largest, sum};
use std::cell::Cell;
use std::ops::Range;

/// Queries of a part of the work: keys are made f32 once for all of them.
const TILE: usize = 4;

thread_local! {
    static PARTS: Cell<Vec<f32>> = Cell::default();
    static SCRATCH: Cell<Vec<f32>> = Cell::default();
}

/// Writes the attention weight that each of the queries `q` (`[tokens, heads, d]`) of one sequence gives to each position, summed over the
/// heads, to `mass` (`[tokens, past + tokens]`), and returns the entropy of each distribution in nats, `[tokens, heads]`. Positions that a
/// query does not see receive nothing from it. A row of `mass` adds up to `heads`.
///
/// A query's numbers do not depend on the others, on the threads or on the path. Heads are added in order within a key/value head, and
/// those in order. With `p` positions a weight is off by `2 s + 5e-7 + (p / 16 + 8) u` of itself, where `s` is the error of a score.
///
/// # Panics
/// When a length, a position or a block is out of range (the caller's bug).
pub fn attention_mass(layer: &PagedLayer, queries: Queries<'_>, q: &[f32], heads: usize, mass: &mut [f32]) -> Vec<f32> {
    attention_mass_on(Isa::detect(), layer, queries, q, heads, mass)
}

pub(super) fn attention_mass_on(
    isa: Isa,
    layer: &PagedLayer,
    queries: Queries<'_>,
    q: &[f32],
    heads: usize,
    mass: &mut [f32],
) -> Vec<f32> {
    let Queries { past, tokens, .. } = queries;
    let positions = past + tokens;
    assert_eq!(mass.len(), tokens * positions, "mass: [tokens, past + tokens]");
    let mut entropies = vec![0.0f32; tokens * heads];
    if tokens == 0 {
        return entropies;
    }
    let sequences = [queries];
    let job = Job::new(isa, layer, &sequences, q, heads);
    let kv_heads = layer.kv_heads();
    // What each query gives through each key/value head, so that they can be added in order.
    let row = positions.next_multiple_of(BLOCK);
    let mut parts = PARTS.take();
    parts.clear();
    parts.resize(tokens * kv_heads * row, 0.0);
    let [to, entropy] = [&mut parts, &mut entropies].map(|x| OutPtr(x.as_mut_ptr()));
    let tiles = tokens.div_ceil(TILE);
    split(kv_heads * tiles, 1, &|range| {
        let mut scratch = SCRATCH.take();
        for i in range {
            let (kv, first) = (i / tiles, i % tiles * TILE);
            // SAFETY: `Job::new` has checked tables, blocks and lengths. A unit writes the parts and entropies of its queries and its
            // key/value head, and no other does.
            unsafe {
                weigh(&job, kv, first..(first + TILE).min(tokens), &mut scratch, |t, group| {
                    (to.get().add((t * kv_heads + kv) * row), entropy.get().add(t * heads + kv * group))
                });
            }
        }
        SCRATCH.set(scratch);
    });
    for (mass, parts) in mass.chunks_exact_mut(positions).zip(parts.chunks_exact(kv_heads * row)) {
        mass.fill(0.0);
        for part in parts.chunks_exact(row) {
            mass.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
        }
    }
    PARTS.set(parts);
    entropies
}

/// The weights of `queries` through the key/value head `kv`; `to` gives the places of a query's masses, in whole blocks, to which they are
/// added, and of its entropies.
///
/// Safety: as in [`attention_mass_on`].
unsafe fn weigh(
    job: &Job<'_>,
    kv: usize,
    queries: Range<usize>,
    scratch: &mut Vec<f32>,
    to: impl Fn(usize, usize) -> (*mut f32, *mut f32),
) {
    let (layer, group, past) = (job.layer, job.group, job.sequences[0].past);
    let rows = queries.len() * group;
    let position = past + queries.start;
    let unit =
        Unit { sequence: 0, kv, row: queries.start, position, queries: queries.len(), runs: 0..0, partial: None };
    let seen = job.seen(&unit);
    // Scores of each run, `[run][row][SCORES]`, behind what a tile works in.
    let (room, scores) = Room::cut(scratch, rows, job.state, layer, (seen.last / RUN + 1) * rows * SCORES);
    let at = |run: usize| scores.wrapping_add(run * rows * SCORES);
    // SAFETY: blocks and rows of the unit exist; the room is cut for its rows, and the scores for its runs.
    unsafe {
        let q = job.gather(&unit, &room);
        for run in seen.runs() {
            let room = Room { scores: at(run), ..room };
            let tile = Tile { job, unit: &unit, next: &unit, room: &room, seen, rows: job.rows(&unit), q };
            for segment in seen.segments(run).iter().filter(|s| !s.is_empty()) {
                tile.score(segment, run);
            }
        }
        for row in 0..rows {
            let (t, g) = (row / group, row % group);
            let p = position + t;
            let sees = Seen { sight: layer.sight, first: p, last: p };
            let (mass, entropies) = to(queries.start + t, group);
            let (isa, scores) = (job.isa, scores.add(row * SCORES));
            *entropies.add(g) = soften(isa, scores, rows * SCORES, &sees, mass);
        }
    }
}

/// Adds the softmax of the scores that the query `sees` to `mass`, and returns its entropy. Run `r` begins at `scores + r * step`; scores are
/// used up.
///
/// Safety: the CPU has the path; scores of all blocks that are seen, and masses up to the last.
unsafe fn soften(isa: Isa, scores: *mut f32, step: usize, sees: &Seen, mass: *mut f32) -> f32 {
    let mut sums = [0.0f32; 2];
    let out = sums.as_mut_ptr();
    // SAFETY: the caller's; two sums.
    unsafe { dispatch!(isa, soften_on(scores: *mut f32, step: usize, sees: &Seen, mass: *mut f32, out: *mut f32)) }
    // Of weights w = exp(below) / total: - sum w ln w = ln total - sum w below.
    let [total, mean] = sums.map(f64::from);
    (total.ln() - mean / total) as f32
}

#[inline(always)]
unsafe fn soften_on<S: Simd>(scores: *mut f32, step: usize, sees: &Seen, mass: *mut f32, sums: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        let mut top = S::splat(f32::NEG_INFINITY);
        // The blocks, each with its scores, and which of its positions are seen.
        macro_rules! each_block {
            (|$block:ident, $at:ident, $seen:ident| $body:block) => {
                for run in sees.runs() {
                    let positions = sees.positions(run, sees.last);
                    for $block in sees.segments(run).into_iter().flatten() {
                        let $at = scores.add(run * step + $block * BLOCK - run * RUN);
                        let $seen = lanes($block, &positions);
                        $body
                    }
                }
            };
        }
        each_block!(|block, at, seen| {
            if seen != ALL {
                // What is not seen repeats what is, which changes no maximum and stays finite in exp.
                let any = *at.add(seen.trailing_zeros() as usize);
                set_unseen(at, seen, any);
            }
            top = S::max(S::load(at), top);
        });
        let top = S::splat(largest::<S>(top));
        let (mut total, mut mean) = (S::splat(0.0), S::splat(0.0));
        each_block!(|block, at, seen| {
            let below = S::sub(S::load(at), top);
            S::store(at, exp::<S>(below));
            if seen != ALL {
                set_unseen(at, seen, 0.0);
            }
            total = S::add(total, S::load(at));
            mean = S::fma(S::load(at), below, mean);
        });
        let total = sum::<S>(total);
        (*sums, *sums.add(1)) = (total, sum::<S>(mean));
        each_block!(|block, at, _seen| {
            let to = mass.add(block * BLOCK);
            S::store(to, S::add(S::load(to), S::div(S::load(at), S::splat(total))));
        });
    }
}

/// All positions of a block.
const ALL: u32 = (1 << LANES) - 1;

/// Which positions of a block lie in the ranges, a bit each.
fn lanes(block: usize, positions: &[Range<usize>; 2]) -> u32 {
    let start = block * BLOCK;
    let below = |p: usize| (1u32 << p.clamp(start, start + BLOCK).wrapping_sub(start)) - 1;
    positions.iter().fold(0, |bits, r| bits | (below(r.end) & !below(r.start)))
}

/// Safety: sixteen writable values.
unsafe fn set_unseen(at: *mut f32, seen: u32, to: f32) {
    for lane in (0..BLOCK).filter(|lane| seen >> lane & 1 == 0) {
        // SAFETY: the caller's.
        unsafe { *at.add(lane) = to };
    }
}
