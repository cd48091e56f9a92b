//! Causal grouped-query attention of a batch of sequences over a paged cache, in one pass over keys and values. Not the
//! projections, not the rotary embedding, not the cache (see `paged.rs`).
//!
//! - Shapes: queries `[rows, heads, d]`, output `[rows, heads, value]`; the rows of a sequence follow one another, sequences in order.
//!   Head `h` reads the key/value head `h / (heads / kv_heads)`. The query at position `p` sees positions `0..=p`; with a window `w`
//!   the last `w` of them and the first `sinks`.
//! - Layout: see `paged.rs`. A code becomes `code value * scale`, one f32 product in registers, f16 is widened, and from there on
//!   all is as for f32: a cache of codes or of f16 gives the bits of an f32 cache that holds the same values.
//! - Requires: nothing; paths as in `linear`.
//! - Order: positions are cut into runs at multiples of [`RUN`]. In a run: score = sum over d in increasing order, fused, then times the
//!   layer's scale; the maximum over the visible positions is taken away; `exp` as in `elementwise`; the weights are summed in 16
//!   lanes (lane = position mod 16), folded in halves; values = sum over the visible positions in increasing order, fused. Runs are
//!   merged in increasing order into (maximum M, sum, values): `M' = max(M, m)`, and with `a = exp(M - M')`, `b = exp(m - M')` each
//!   becomes `fma(old, a, new * b)` (online softmax, arXiv:1805.02867; the cut into runs: FlashDecoding). At the end values are divided
//!   by the sum. So the bits of a query depend on its position and what it sees, and on nothing else: not on the other rows,
//!   sequences or threads, nor on how a prompt is cut. Positions out of sight are not read, or reach no result, NaN included.
//! - Cost: `2 * d` multiply-adds for each head and visible position. All heads that share a key/value head, and of longer pieces
//!   the queries of a tile, are worked on together: keys and values are read once a tile. Codes and f16 cost a conversion per value and
//!   tile. Work is divided by sequence, tile and kv head; where a sequence has few queries, by run as well.
//! - Error: scores `(d + 2) u * sum |q| |k|`; weights as `exp`; within a run of r positions the sums add `(r + r/16 + 5) u`, each merge
//!   another `exp` and `3 u`, relative to the largest |value|.

use super::form::{E4m3, F16, F32, Form, Int8};
use super::paged::{BLOCK, KvFormat, PagedLayer};
use crate::Isa;
use crate::elementwise::exp;
use crate::parallel::{OutPtr, split, split_costs};
use crate::simd::{LANES, Simd, dispatch, largest, sum};
use std::cell::Cell;
use std::ops::Range;

/// Positions of a run. Part of the contract: another length gives other bits.
pub(super) const RUN: usize = 256;
/// Blocks of keys that are scored together, and of values that are mixed at once.
const GROUP: usize = 4;
/// Rows (queries times heads of a kv head) of a tile, unless one query has more.
const ROWS: usize = 24;
/// Sequences of up to so many tiles are divided by run as well.
const SPLIT_TILES: usize = 2;
/// Places of a row of scores: the last group may reach beyond the run.
const SCORES: usize = RUN + GROUP * BLOCK;

/// The queries of one sequence: `tokens` of them, at positions `past .. past + tokens`.
#[derive(Debug, Clone, Copy)]
pub struct Queries<'a> {
    /// The sequence's blocks: position `p` lies in block `table[p / BLOCK]`. Entries of blocks of which no query sees a position may hold
    /// anything.
    pub table: &'a [u32],
    /// Position of the first query.
    pub past: usize,
    /// Number of queries; 0 is none.
    pub tokens: usize,
}

/// Attention of all `sequences`, whose queries `q` are `[rows, heads, d]` and whose outputs `out` are `[rows, heads, value]`: rows of
/// the first sequence, then of the second, and so on. The positions that they see have been put.
///
/// # Panics
/// When a length, a position or a block is out of range (the caller's bug).
pub fn attend_paged(layer: &PagedLayer, sequences: &[Queries<'_>], q: &[f32], heads: usize, out: &mut [f32]) {
    attend_on(Isa::detect(), layer, sequences, q, heads, out);
}

/// A piece of work: some queries of a sequence, the heads of one kv head, some runs.
#[derive(Debug, Clone, Copy)]
struct Unit {
    sequence: usize,
    kv: usize,
    /// Row of the first query, its position, and how many.
    row: usize,
    position: usize,
    queries: usize,
    /// Runs that are visited, in this order; more than one are merged at once.
    runs: [usize; 2],
    /// Where the result of a run goes that is merged later, and not to the output.
    partial: Option<usize>,
}

/// Results of runs to be merged: the first of `runs` units that follow each other.
#[derive(Debug, Clone, Copy)]
struct Merge {
    unit: usize,
    runs: usize,
}

/// What a call plans, kept for the next one.
#[derive(Debug, Default)]
struct Plan {
    units: Vec<Unit>,
    /// What the units up to each cost together.
    ends: Vec<usize>,
    merges: Vec<Merge>,
    partials: Vec<f32>,
}

thread_local! {
    static PLAN: Cell<Plan> = Cell::default();
    static SCRATCH: Cell<Vec<f32>> = Cell::default();
}

struct Job<'a> {
    layer: &'a PagedLayer,
    sequences: &'a [Queries<'a>],
    heads: usize,
    /// Heads of a kv head.
    group: usize,
    /// Address of the queries (a pointer is not Sync).
    q: usize,
    out: OutPtr,
    partials: OutPtr,
    /// Floats of a row of a state: values, then a vector that holds the maximum and the sum.
    state: usize,
}

pub(super) fn attend_on(
    isa: Isa,
    layer: &PagedLayer,
    sequences: &[Queries<'_>],
    q: &[f32],
    heads: usize,
    out: &mut [f32],
) {
    let rows: usize = sequences.iter().map(|s| s.tokens).sum();
    assert!(heads > 0 && heads.is_multiple_of(layer.kv_heads), "heads: a multiple of the key/value heads");
    assert_eq!(q.len(), rows * heads * layer.d, "queries: [rows, heads, d]");
    assert_eq!(out.len(), rows * heads * layer.value, "out: [rows, heads, value]");
    let (group, state) = (heads / layer.kv_heads, layer.padded() + LANES);
    let mut plan = PLAN.take();
    plan.make(layer, sequences, group, state);
    let job = Job {
        layer,
        sequences,
        heads,
        group,
        q: q.as_ptr() as usize,
        out: OutPtr(out.as_mut_ptr()),
        partials: OutPtr(plan.partials.as_mut_ptr()),
        state,
    };
    let (job, units) = (&job, &plan.units[..]);
    split_costs(&plan.ends, &|range| {
        let mut scratch = SCRATCH.take();
        {
            let (units, room) = (&units[range], &mut scratch);
            // SAFETY: the asserts above; `make` has checked tables and blocks; units write disjoint rows and heads, or partials of their
            // own; the form is the layer's.
            unsafe {
                match layer.format {
                    KvFormat::F32 => {
                        dispatch!(isa, run_units::<F32>(job: &Job<'_>, units: &[Unit], room: &mut Vec<f32>))
                    }
                    KvFormat::F16 => {
                        dispatch!(isa, run_units::<F16>(job: &Job<'_>, units: &[Unit], room: &mut Vec<f32>))
                    }
                    KvFormat::Codes(_) if layer.format.is_fp8() => {
                        dispatch!(isa, run_units::<E4m3>(job: &Job<'_>, units: &[Unit], room: &mut Vec<f32>))
                    }
                    KvFormat::Codes(_) => {
                        dispatch!(isa, run_units::<Int8>(job: &Job<'_>, units: &[Unit], room: &mut Vec<f32>))
                    }
                }
            }
        }
        SCRATCH.set(scratch);
    });
    // A thread is worth waking for some ten thousand values.
    let grain = ((1 << 16) * plan.merges.len()).div_ceil(plan.partials.len().max(1));
    let merges = &plan.merges[..];
    split(merges.len(), grain, &|range| {
        for &Merge { unit, runs } in &merges[range] {
            let units = &units[unit..unit + runs];
            // SAFETY: as above; the partials of these units are nobody else's.
            unsafe { dispatch!(isa, merge_units(job: &Job<'_>, units: &[Unit])) };
        }
    });
    PLAN.set(plan);
}

impl Plan {
    /// Divides the work. Checks that every block that will be read exists.
    fn make(&mut self, layer: &PagedLayer, sequences: &[Queries<'_>], group: usize, state: usize) {
        let (sight, tile) = (layer.sight, (ROWS / group).max(1));
        self.units.clear();
        self.ends.clear();
        self.merges.clear();
        let (mut row, mut cost, mut partials) = (0, 0, 0);
        for (sequence, s) in sequences.iter().enumerate() {
            if s.tokens == 0 {
                continue;
            }
            let last = s.past + s.tokens - 1;
            assert!(last / BLOCK < s.table.len(), "position {last}: a table of {} blocks", s.table.len());
            let sinks = sight.sinks.min(last + 1).div_ceil(BLOCK);
            let window = sight.start(s.past) / BLOCK;
            for &block in s.table[..sinks].iter().chain(&s.table[window..=last / BLOCK]) {
                assert!((block as usize) < layer.blocks(), "block {block} of {}", layer.blocks());
            }
            let by_run = s.tokens.div_ceil(tile) <= SPLIT_TILES;
            for first in (0..s.tokens).step_by(tile) {
                let (position, queries) = (s.past + first, tile.min(s.tokens - first));
                let sees = Seen { sight, first: position, last: position + queries - 1 };
                let runs = sees.last / RUN + 1;
                let visited = (0..runs).filter(|&run| sees.blocks(run) > 0).count();
                for kv in 0..layer.kv_heads {
                    let unit =
                        Unit { sequence, kv, row: row + first, position, queries, runs: [0, runs], partial: None };
                    let mut add = |unit: Unit, blocks: usize| {
                        // Scoring and mixing, and what a unit costs besides.
                        cost += (blocks + 1) * (queries * group + 2);
                        self.units.push(unit);
                        self.ends.push(cost);
                    };
                    if !by_run || visited == 1 {
                        add(unit, (0..runs).map(|run| sees.blocks(run)).sum());
                        continue;
                    }
                    for run in (0..runs).filter(|&run| sees.blocks(run) > 0) {
                        add(Unit { runs: [run, run + 1], partial: Some(partials), ..unit }, sees.blocks(run));
                        partials += queries * group * state;
                    }
                    self.merges.push(Merge { unit: self.units.len() - visited, runs: visited });
                }
            }
            row += s.tokens;
        }
        if self.partials.len() < partials {
            self.partials.resize(partials, 0.0);
        }
    }
}

/// What the queries at `first..=last` see.
#[derive(Clone, Copy)]
struct Seen {
    sight: super::paged::Sight,
    first: usize,
    last: usize,
}

impl Seen {
    /// The blocks of a run that any of them sees, of sinks and of windows; one range where they meet. Both are in order and may be empty.
    fn segments(&self, run: usize) -> [Range<usize>; 2] {
        let (a, b) = (run * RUN / BLOCK, (run + 1) * RUN / BLOCK);
        let sinks = a..self.sight.sinks.min(self.last + 1).div_ceil(BLOCK).clamp(a, b);
        let window = (self.sight.start(self.first) / BLOCK).clamp(a, b)..(self.last / BLOCK + 1).clamp(a, b);
        join(sinks, window)
    }

    fn blocks(&self, run: usize) -> usize {
        self.segments(run).into_iter().map(|s| s.len()).sum()
    }

    /// The positions of a run that the query at `p` sees, in the same way.
    fn positions(&self, run: usize, p: usize) -> [Range<usize>; 2] {
        let (a, b) = (run * RUN, (run + 1) * RUN);
        let end = (p + 1).clamp(a, b);
        join(a..self.sight.sinks.clamp(a, end), self.sight.start(p).clamp(a, end)..end)
    }
}

/// Two ranges in order (one of which may be empty) as one where they meet; the first is empty only if both are.
fn join(x: Range<usize>, y: Range<usize>) -> [Range<usize>; 2] {
    if x.is_empty() {
        [y.clone(), y.end..y.end]
    } else if y.is_empty() {
        [x.clone(), x.end..x.end]
    } else if x.end >= y.start {
        [x.start..x.end.max(y.end), y.end..y.end]
    } else {
        [x, y]
    }
}

/// Buffers of a thread, cut from one piece of memory.
struct Room {
    /// `[rows][SCORES]`.
    scores: *mut f32,
    /// `[rows][state]` of the run and of all runs so far.
    run: *mut f32,
    total: *mut f32,
    /// Keys or values of [`GROUP`] blocks as f32.
    wide: *mut f32,
}

impl Room {
    fn cut(memory: &mut Vec<f32>, rows: usize, state: usize, wide: usize) -> Self {
        let sizes = [rows * SCORES, rows * state, rows * state, wide].map(|n| n.next_multiple_of(LANES));
        let need = sizes.iter().sum::<usize>() + LANES;
        if memory.len() < need {
            memory.resize(need, 0.0);
        }
        let skip = memory.as_ptr().align_offset(64).min(LANES);
        let mut rest = &mut memory[skip..];
        let [scores, run, total, wide] = sizes.map(|n| {
            let (part, more) = std::mem::take(&mut rest).split_at_mut(n);
            rest = more;
            part.as_mut_ptr()
        });
        Self { scores, run, total, wide }
    }
}

/// Safety: the path's features; `units` are of the plan of `job`; the layer is of the form `F`.
#[inline(always)]
unsafe fn run_units<S: Simd, F: Form>(job: &Job<'_>, units: &[Unit], memory: &mut Vec<f32>) {
    let rows = units.iter().map(|u| u.queries * job.group).max().unwrap_or(0);
    let room = Room::cut(memory, rows, job.state, GROUP * BLOCK * job.layer.d.max(job.layer.padded()));
    for unit in units {
        let rows = unit.queries * job.group;
        // SAFETY: the room is large enough for the rows of every unit; the partials of `unit` are `rows` states.
        unsafe {
            if let Some(partial) = unit.partial {
                let to = job.partials.get().add(partial);
                Tile { job, unit, room: &room }.run::<S, F>(unit.runs[0], to);
                continue;
            }
            for row in 0..rows {
                set_empty(room.total.add(row * job.state), job.state);
            }
            for run in unit.runs[0]..unit.runs[1] {
                if Tile::sees(job, unit).blocks(run) == 0 {
                    continue;
                }
                Tile { job, unit, room: &room }.run::<S, F>(run, room.run);
                for row in 0..rows {
                    let at = row * job.state;
                    merge::<S>(room.total.add(at), room.run.add(at), job.state);
                }
            }
            write_out::<S>(job, unit, room.total);
        }
    }
}

/// Safety: as `run_units`; the runs of `units` are done.
#[inline(always)]
unsafe fn merge_units<S: Simd>(job: &Job<'_>, units: &[Unit]) {
    let first = &units[0];
    let Some(total) = first.partial else { return };
    // SAFETY: states of the plan.
    unsafe {
        let total = job.partials.get().add(total);
        for unit in &units[1..] {
            let Some(partial) = unit.partial else { continue };
            for row in 0..unit.queries * job.group {
                let at = row * job.state;
                merge::<S>(total.add(at), job.partials.get().add(partial + at), job.state);
            }
        }
        write_out::<S>(job, first, total);
    }
}

/// A state that has seen nothing: the sum of any other is positive or NaN.
unsafe fn set_empty(state: *mut f32, len: usize) {
    // SAFETY: the caller's state.
    unsafe { *state.add(len - LANES + 1) = 0.0 }
}

/// Adds the state `new` to `old`. See the header.
#[inline(always)]
unsafe fn merge<S: Simd>(old: *mut f32, new: *const f32, len: usize) {
    let (top, total) = (len - LANES, len - LANES + 1);
    // SAFETY: the caller's states of `len` values.
    unsafe {
        if *new.add(total) == 0.0 {
            return;
        }
        if *old.add(total) == 0.0 {
            std::ptr::copy_nonoverlapping(new, old, len);
            return;
        }
        let largest = if *new.add(top) > *old.add(top) { *new.add(top) } else { *old.add(top) };
        let a = exp::<S>(S::splat(*old.add(top) - largest));
        let b = exp::<S>(S::splat(*new.add(top) - largest));
        // The sum goes with the values; the maximum is set behind.
        for i in (0..len).step_by(LANES) {
            let v = S::fma(S::load(old.add(i)), a, S::mul(S::load(new.add(i)), b));
            S::store(old.add(i), v);
        }
        *old.add(top) = largest;
    }
}

/// The outputs of a unit's rows: values divided by the sum.
#[inline(always)]
unsafe fn write_out<S: Simd>(job: &Job<'_>, unit: &Unit, states: *const f32) {
    let d = job.layer.value;
    // SAFETY: rows and heads of the unit are in range.
    unsafe {
        for row in 0..unit.queries * job.group {
            let state = states.add(row * job.state);
            let total = S::splat(*state.add(job.state - LANES + 1));
            let out = job.out.get().add(Tile::head_row(job, unit, row) * d);
            for at in (0..d).step_by(LANES) {
                let v = S::div(S::load(state.add(at)), total);
                if at + LANES <= d {
                    S::store(out.add(at), v);
                } else {
                    let mut lanes = [0.0f32; LANES];
                    S::store(lanes.as_mut_ptr(), v);
                    std::ptr::copy_nonoverlapping(lanes.as_ptr(), out.add(at), d - at);
                }
            }
        }
    }
}

/// Calls `$f!(R)` for `$rows` rows at once, `R` as a constant: as many as the registers take, in pieces of about equal size.
macro_rules! by_rows {
    ($S:ident, $rows:expr, |$first:ident, $R:ident| $body:expr) => {{
        let rows: Range<usize> = $rows;
        let most = if $S::VECTORS >= 32 { 6 } else { 3 };
        let mut $first = rows.start;
        while $first < rows.end {
            let left = rows.end - $first;
            let take = left.div_ceil(left.div_ceil(most));
            macro_rules! piece {
                ($n:literal) => {{
                    const $R: usize = $n;
                    $body
                }};
            }
            match take {
                1 => piece!(1),
                2 => piece!(2),
                3 => piece!(3),
                // (Never on AVX2, so these are not built for it.)
                4 if $S::VECTORS >= 32 => piece!(4),
                5 if $S::VECTORS >= 32 => piece!(5),
                _ if $S::VECTORS >= 32 => piece!(6),
                _ => unreachable!(),
            }
            $first += take;
        }
    }};
}

/// A unit at work.
struct Tile<'a> {
    job: &'a Job<'a>,
    unit: &'a Unit,
    room: &'a Room,
}

impl Tile<'_> {
    fn sees(job: &Job<'_>, unit: &Unit) -> Seen {
        Seen { sight: job.layer.sight, first: unit.position, last: unit.position + unit.queries - 1 }
    }

    /// Which of `[rows of all sequences][heads]` the row of a unit is: rows are `[query][head of the kv head]`.
    #[inline(always)]
    fn head_row(job: &Job<'_>, unit: &Unit, row: usize) -> usize {
        (unit.row + row / job.group) * job.heads + unit.kv * job.group + row % job.group
    }

    /// Keys of a block and the unit's kv head.
    #[inline(always)]
    fn keys(&self, block: usize) -> *const u8 {
        let layer = self.job.layer;
        let id = self.job.sequences[self.unit.sequence].table[block] as usize;
        // SAFETY: the plan has checked the block.
        unsafe { layer.store.as_ptr().add(id * layer.block_bytes() + self.unit.kv * layer.head_bytes()) }
    }

    /// The states `[rows][state]` of one run that the unit sees something of.
    #[inline(always)]
    unsafe fn run<S: Simd, F: Form>(&self, run: usize, states: *mut f32) {
        let (job, unit) = (self.job, self.unit);
        let sees = Self::sees(job, unit);
        let segments = sees.segments(run);
        let rows = unit.queries * job.group;
        // SAFETY: `room` and `states` hold `rows` rows.
        unsafe {
            for segment in segments.clone() {
                self.score::<S, F>(segment, run, rows);
            }
            let places = segments.clone().map(|s| s.start * BLOCK - run * RUN..s.end * BLOCK - run * RUN);
            for query in 0..unit.queries {
                let seen = sees.positions(run, unit.position + query).map(|s| s.start - run * RUN..s.end - run * RUN);
                for row in query * job.group..(query + 1) * job.group {
                    let state = states.add(row * job.state);
                    for i in (0..job.state).step_by(LANES) {
                        S::store(state.add(i), S::splat(0.0));
                    }
                    if !seen[0].is_empty() {
                        let [top, total] = soften::<S>(self.room.scores.add(row * SCORES), &places, &seen);
                        *state.add(job.state - LANES) = top;
                        *state.add(job.state - LANES + 1) = total;
                    }
                }
            }
            for segment in segments {
                self.mix_segment::<S, F>(segment, run, &sees, states);
            }
        }
    }

    /// Scores of all rows against the blocks `segment` of the run.
    #[inline(always)]
    unsafe fn score<S: Simd, F: Form>(&self, segment: Range<usize>, run: usize, rows: usize) {
        let layer = self.job.layer;
        // Where a block is read by several pieces of rows, it is widened once.
        let widen = F::BYTES < 4 && rows > if S::VECTORS >= 32 { 6 } else { 3 };
        let mut block = segment.start;
        while block < segment.end {
            let n = GROUP.min(segment.end - block);
            // Blocks that the last group lacks repeat its last one; their scores go behind the others, where nothing is read.
            let keys: [*const u8; GROUP] = std::array::from_fn(|b| self.keys(block + b.min(n - 1)));
            // SAFETY: scores have room for a group behind the run.
            unsafe {
                let scores = self.room.scores.add(block * BLOCK - run * RUN);
                if widen {
                    let scale = S::splat(layer.format.scales()[0]);
                    for b in 0..n {
                        for i in (0..layer.d * BLOCK).step_by(LANES) {
                            let wide = self.room.wide.add(b * layer.d * BLOCK + i);
                            S::store(wide, F::load::<S>(keys[b].add(i * F::BYTES), scale));
                        }
                    }
                    let keys: [*const u8; GROUP] =
                        std::array::from_fn(|b| self.room.wide.add(b.min(n - 1) * layer.d * BLOCK).cast_const().cast());
                    self.score_group::<S, F32>(&keys, n, rows, scores);
                } else {
                    self.score_group::<S, F>(&keys, n, rows, scores);
                }
            }
            block += n;
        }
    }

    #[inline(always)]
    unsafe fn score_group<S: Simd, F: Form>(&self, keys: &[*const u8; GROUP], n: usize, rows: usize, scores: *mut f32) {
        let (job, unit, layer) = (self.job, self.unit, self.job.layer);
        // SAFETY: queries of the unit; the caller's keys and scores.
        unsafe {
            let scales = [layer.format.scales()[0], layer.scale].map(|s| S::splat(s));
            by_rows!(S, 0..rows, |first, R| {
                let q: [*const f32; R] =
                    std::array::from_fn(|r| (job.q as *const f32).add(Self::head_row(job, unit, first + r) * layer.d));
                let scores = scores.add(first * SCORES);
                if S::VECTORS >= 32 && n > 1 {
                    score_blocks::<S, F, R, GROUP>(&q, keys, scales, layer.d, scores);
                } else {
                    for (pair, keys) in keys.chunks_exact(2).enumerate().take(n.div_ceil(2)) {
                        let scores = scores.add(pair * 2 * BLOCK);
                        score_blocks::<S, F, R, 2>(&q, &[keys[0], keys[1]], scales, layer.d, scores);
                    }
                }
            });
        }
    }

    /// Adds the values of the blocks `segment` of the run, weighted, to the states of the rows that see them.
    #[inline(always)]
    unsafe fn mix_segment<S: Simd, F: Form>(&self, segment: Range<usize>, run: usize, sees: &Seen, states: *mut f32) {
        let group = self.job.group;
        let (first, last, sinks) = (sees.first, sees.last, sees.sight.sinks);
        let (mut x, end) = (segment.start * BLOCK, (segment.end * BLOCK).min(last + 1));
        while x < end {
            // Queries that see position x, and up to where they are the same.
            let leaves = x.saturating_add(sees.sight.window - 1);
            let (from, to) = (first.max(x), if x < sinks { last } else { last.min(leaves) });
            let mut y = if x <= first { first + 1 } else { x + 1 };
            if x < sinks {
                y = y.min(sinks);
            } else if leaves < last {
                y = x + 1;
            }
            y = y.min(end);
            if from <= to {
                let rows = (from - first) * group..(to + 1 - first) * group;
                // In pieces of a group of blocks.
                let mut at = x;
                while at < y {
                    let next = y.min((at / (GROUP * BLOCK) + 1) * GROUP * BLOCK);
                    // SAFETY: visible positions of the run.
                    unsafe { self.mix_piece::<S, F>(at..next, run, rows.clone(), states) };
                    at = next;
                }
            }
            x = y;
        }
    }

    /// Positions within a group of blocks, all seen by `rows`.
    #[inline(always)]
    unsafe fn mix_piece<S: Simd, F: Form>(
        &self,
        positions: Range<usize>,
        run: usize,
        rows: Range<usize>,
        states: *mut f32,
    ) {
        let (layer, padded) = (self.job.layer, self.job.layer.padded());
        let widen = F::BYTES < 4 && rows.len() > if S::VECTORS >= 32 { 6 } else { 3 };
        let first = positions.start / BLOCK;
        let n = (positions.end - 1) / BLOCK + 1 - first;
        let values: [*const u8; GROUP] = std::array::from_fn(|b| {
            // SAFETY: values lie behind the keys of the block.
            unsafe { self.keys(first + b.min(n - 1)).add(layer.key_bytes()) }
        });
        let within = positions.start - first * BLOCK..positions.end - first * BLOCK;
        // SAFETY: the run's positions; scores of the rows are set.
        unsafe {
            let weights = self.room.scores.add(positions.start - run * RUN);
            if widen {
                let scale = S::splat(layer.format.scales()[1]);
                for t in within.clone() {
                    for i in (0..padded).step_by(LANES) {
                        let from = values[t / BLOCK].add((t % BLOCK * padded + i) * F::BYTES);
                        S::store(self.room.wide.add(t * padded + i), F::load::<S>(from, scale));
                    }
                }
                let values: [*const u8; GROUP] =
                    std::array::from_fn(|b| self.room.wide.add(b * BLOCK * padded).cast_const().cast());
                self.mix_rows::<S, F32>(&values, within, rows, weights, states);
            } else {
                self.mix_rows::<S, F>(&values, within, rows, weights, states);
            }
        }
    }

    #[inline(always)]
    unsafe fn mix_rows<S: Simd, F: Form>(
        &self,
        values: &[*const u8; GROUP],
        within: Range<usize>,
        rows: Range<usize>,
        weights: *const f32,
        states: *mut f32,
    ) {
        let (job, padded) = (self.job, self.job.layer.padded());
        let lanes = if S::VECTORS >= 32 { 4 } else { 2 };
        // SAFETY: the caller's rows.
        unsafe {
            let scale = S::splat(job.layer.format.scales()[1]);
            by_rows!(S, rows.clone(), |first, R| {
                let (weights, states) = (weights.add(first * SCORES), states.add(first * job.state));
                let mut at = 0;
                while at < padded {
                    if at + lanes * LANES > padded {
                        mix::<S, F, R, 1>(weights, values, within.clone(), padded, at, scale, states, job.state);
                        at += LANES;
                    } else if S::VECTORS >= 32 {
                        mix::<S, F, R, 4>(weights, values, within.clone(), padded, at, scale, states, job.state);
                        at += 4 * LANES;
                    } else {
                        mix::<S, F, R, 2>(weights, values, within.clone(), padded, at, scale, states, job.state);
                        at += 2 * LANES;
                    }
                }
            });
        }
    }
}

/// Scores of R rows against B blocks of 16 keys; `scales`: of the stored keys, and what scores are multiplied by.
#[inline(always)]
unsafe fn score_blocks<S: Simd, F: Form, const R: usize, const B: usize>(
    q: &[*const f32; R],
    keys: &[*const u8; B],
    scales: [S::V; 2],
    d: usize,
    scores: *mut f32,
) {
    // SAFETY: the caller's ranges.
    unsafe {
        let mut dot = [[S::splat(0.0); B]; R];
        for i in 0..d {
            let k: [S::V; B] = std::array::from_fn(|b| F::load::<S>(keys[b].add(i * LANES * F::BYTES), scales[0]));
            for r in 0..R {
                let qv = S::splat(*q[r].add(i));
                for b in 0..B {
                    dot[r][b] = S::fma(qv, k[b], dot[r][b]);
                }
            }
        }
        for r in 0..R {
            for b in 0..B {
                S::store(scores.add(r * SCORES + b * LANES), S::mul(dot[r][b], scales[1]));
            }
        }
    }
}

/// Turns the scores of the positions `seen` into `exp(score - largest)`, the others of `places` (multiples of 16) into 0, and returns
/// the largest and the sum. `seen` lies within `places`, and its first range is not empty.
#[inline(always)]
unsafe fn soften<S: Simd>(scores: *mut f32, places: &[Range<usize>; 2], seen: &[Range<usize>; 2]) -> [f32; 2] {
    // SAFETY: scores of `places` are set.
    unsafe {
        let fill = |x: f32| {
            for place in places {
                let mut at = place.start;
                for s in seen.iter().filter(|s| !s.is_empty()).chain([&(place.end..place.end)]) {
                    for i in at..s.start.clamp(at, place.end) {
                        *scores.add(i) = x;
                    }
                    at = s.end.clamp(at, place.end);
                }
            }
        };
        let vectors = || places.iter().flat_map(|p| p.clone().step_by(LANES));
        // Masked places repeat a visible score, which changes no maximum and stays finite in exp.
        let any = *scores.add(seen[0].start);
        fill(any);
        let mut top = S::splat(any);
        for i in vectors() {
            top = S::max(S::load(scores.add(i)), top);
        }
        let largest = largest::<S>(top);
        let top = S::splat(largest);
        for i in vectors() {
            S::store(scores.add(i), exp::<S>(S::sub(S::load(scores.add(i)), top)));
        }
        fill(0.0);
        let mut total = S::splat(0.0);
        for i in vectors() {
            total = S::add(total, S::load(scores.add(i)));
        }
        [largest, sum::<S>(total)]
    }
}

/// Adds values of the positions `within` (of the first block) to the states of R rows, weighted, W vectors from column `at` on;
/// `weights` begins at the first of the positions.
#[inline(always)]
unsafe fn mix<S: Simd, F: Form, const R: usize, const W: usize>(
    weights: *const f32,
    values: &[*const u8; GROUP],
    within: Range<usize>,
    padded: usize,
    at: usize,
    scale: S::V,
    states: *mut f32,
    state: usize,
) {
    // SAFETY: the caller's ranges.
    unsafe {
        let mut acc: [[S::V; W]; R] =
            std::array::from_fn(|r| std::array::from_fn(|w| S::load(states.add(r * state + at + w * LANES))));
        let mut t = within.start;
        while t < within.end {
            let end = within.end.min((t / BLOCK + 1) * BLOCK);
            let block = values[t / BLOCK];
            while t < end {
                let v: [S::V; W] = std::array::from_fn(|w| {
                    F::load::<S>(block.add((t % BLOCK * padded + at + w * LANES) * F::BYTES), scale)
                });
                for r in 0..R {
                    let p = S::splat(*weights.add(r * SCORES + t - within.start));
                    for w in 0..W {
                        acc[r][w] = S::fma(p, v[w], acc[r][w]);
                    }
                }
                t += 1;
            }
        }
        for r in 0..R {
            for w in 0..W {
                S::store(states.add(r * state + at + w * LANES), acc[r][w]);
            }
        }
    }
}
