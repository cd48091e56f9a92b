//! Causal grouped-query attention of a batch of sequences over a paged cache, in one pass over keys and values. Not the
//! projections, not the rotary embedding, not the cache (see `paged.rs`).
//!
//! - Shapes: queries `[rows, heads, d]`, output `[rows, heads, value]`; the rows of a sequence follow one another, sequences in order.
//!   Head `h` reads the key/value head `h / (heads / kv_heads)`. The query at position `p` sees positions `0..=p`; with a window `w`
//!   the last `w` of them and the first `sinks`.
//! - Layout: see `paged.rs`. A code becomes `code value * scale` (the layer's, or that of its position and head), one f32 product in
//!   registers, f16 is widened, and from there on all is as for f32: a cache of codes or of f16 gives the bits of an f32 cache that
//!   holds the same values.
//! - Requires: nothing; paths as in `linear`.
//! - Order: positions are cut into runs at multiples of `RUN`. In a run: score = sum over d in increasing order, fused, then times the
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

use super::RUN;
use super::form::Kind;
use super::kernel::{DIRECT, GROUP, Group, Rows, SCORES, divide, merge, mix, score, soften, widen_keys, widen_values};
use super::paged::{BLOCK, KvFormat, PagedLayer};
use super::sight::Seen;
use crate::Isa;
use crate::parallel::{OutPtr, split, split_costs};
use crate::simd::LANES;
use std::cell::Cell;
use std::ops::Range;

/// Rows (queries times heads of a kv head) of a tile, unless one query has more; of f32, and of what is widened once a tile.
const ROWS: [usize; 2] = [24, 48];
/// Sequences of up to so many tiles are divided by run as well.
const SPLIT_TILES: usize = 2;

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
pub fn attend(layer: &PagedLayer, sequences: &[Queries<'_>], q: &[f32], heads: usize, out: &mut [f32]) {
    attend_on(Isa::detect(), layer, sequences, q, heads, out);
}

/// A piece of work: some queries of a sequence, the heads of one kv head, some runs.
#[derive(Debug, Clone)]
pub(super) struct Unit {
    pub sequence: usize,
    pub kv: usize,
    /// Row of the first query, its position, and how many.
    pub row: usize,
    pub position: usize,
    pub queries: usize,
    /// Those of the runs that the queries see are visited, in this order, and merged at once.
    pub runs: Range<usize>,
    /// Where the result of a single run goes that is merged later, and not to the output.
    pub partial: Option<usize>,
}

/// Results of runs to be merged: `runs` units, the first of which is `unit`.
#[derive(Debug)]
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

pub(super) struct Job<'a> {
    pub isa: Isa,
    pub layer: &'a PagedLayer,
    kind: Kind,
    /// Scales of keys and of values, sixteen times each, where all positions have the same.
    scales: Option<[[f32; BLOCK]; 2]>,
    pub sequences: &'a [Queries<'a>],
    heads: usize,
    /// Heads of a kv head.
    pub group: usize,
    /// Address of the queries (a pointer is not Sync).
    q: usize,
    out: OutPtr,
    partials: OutPtr,
    /// Floats of a row of a state: values, then a vector that holds the maximum and the sum.
    pub state: usize,
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
    assert_eq!(out.len(), rows * heads * layer.value, "out: [rows, heads, value]");
    let mut job = Job::new(isa, layer, sequences, q, heads);
    let mut plan = PLAN.take();
    plan.make(layer, sequences, job.group, job.state);
    (job.out, job.partials) = (OutPtr(out.as_mut_ptr()), OutPtr(plan.partials.as_mut_ptr()));
    let (job, units, merges) = (&job, &plan.units[..], &plan.merges[..]);
    split_costs(&plan.ends, &|range| {
        let mut scratch = SCRATCH.take();
        // SAFETY: the asserts above; `make` has checked tables and blocks; units write disjoint rows and heads, or partials of their own.
        unsafe { job.run(&units[range], &mut scratch) };
        SCRATCH.set(scratch);
    });
    // A thread is worth waking for some ten thousand values.
    let grain = ((1 << 16) * merges.len()).div_ceil(plan.partials.len().max(1));
    split(merges.len(), grain, &|range| {
        for &Merge { unit, runs } in &merges[range] {
            // SAFETY: as above; the partials of these units are nobody else's.
            unsafe { job.merge_runs(&units[unit..unit + runs]) };
        }
    });
    PLAN.set(plan);
}

impl Plan {
    /// Divides the work.
    fn make(&mut self, layer: &PagedLayer, sequences: &[Queries<'_>], group: usize, state: usize) {
        let rows = ROWS[usize::from(layer.format != KvFormat::F32)];
        let (sight, tile) = (layer.sight, (rows / group).max(1));
        self.units.clear();
        self.ends.clear();
        self.merges.clear();
        let (mut row, mut cost, mut partials) = (0, 0, 0);
        for (sequence, s) in sequences.iter().enumerate() {
            if s.tokens == 0 {
                continue;
            }
            let by_run = s.tokens.div_ceil(tile) <= SPLIT_TILES;
            for first in (0..s.tokens).step_by(tile) {
                let (position, queries) = (s.past + first, tile.min(s.tokens - first));
                let sees = Seen { sight, first: position, last: position + queries - 1 };
                let (runs, visited) = (sees.last / RUN + 1, sees.runs().count());
                for kv in 0..layer.kv_heads {
                    let unit = Unit { sequence, kv, row: row + first, position, queries, runs: 0..runs, partial: None };
                    let mut add = |unit: Unit, blocks: usize| {
                        // Scoring and mixing, and what a unit costs besides.
                        cost += (blocks + 1) * (queries * group + 2);
                        self.units.push(unit);
                        self.ends.push(cost);
                    };
                    if !by_run || visited == 1 {
                        add(unit.clone(), sees.runs().map(|run| sees.blocks(run)).sum());
                        continue;
                    }
                    for run in sees.runs() {
                        add(Unit { runs: run..run + 1, partial: Some(partials), ..unit.clone() }, sees.blocks(run));
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

/// Buffers of a thread, cut from one piece of memory.
pub(super) struct Room {
    /// `[rows][SCORES]`.
    pub scores: *mut f32,
    /// `[rows][state]` of a run and of all runs so far.
    pub run: *mut f32,
    pub total: *mut f32,
    /// Keys or values of [`GROUP`] blocks as f32.
    pub wide: *mut f32,
    /// The queries `[rows][d]` of a tile.
    pub q: *mut f32,
}

impl Room {
    /// Cuts `memory` into the buffers for `rows`, and `more` values behind them.
    pub(super) fn cut(
        memory: &mut Vec<f32>,
        rows: usize,
        state: usize,
        layer: &PagedLayer,
        more: usize,
    ) -> (Self, *mut f32) {
        let wide = GROUP * BLOCK * layer.d.max(layer.padded());
        let sizes = [rows * SCORES, rows * state, rows * state, wide, rows * layer.d, more];
        let sizes = sizes.map(|n| n.next_multiple_of(LANES));
        let need = sizes.iter().sum::<usize>() + LANES;
        if memory.len() < need {
            memory.resize(need, 0.0);
        }
        let skip = memory.as_ptr().align_offset(64).min(LANES);
        let mut rest = &mut memory[skip..];
        let [scores, run, total, wide, q, more] = sizes.map(|n| {
            let (part, more) = std::mem::take(&mut rest).split_at_mut(n);
            rest = more;
            part.as_mut_ptr()
        });
        (Self { scores, run, total, wide, q }, more)
    }
}

impl<'a> Job<'a> {
    /// The work of attention, or of its first half: scores. Where results go is set by the caller. Checks lengths, and that every block
    /// that will be read exists.
    pub(super) fn new(isa: Isa, layer: &'a PagedLayer, sequences: &'a [Queries<'a>], q: &[f32], heads: usize) -> Self {
        let rows: usize = sequences.iter().map(|s| s.tokens).sum();
        assert!(heads > 0 && heads.is_multiple_of(layer.kv_heads), "heads: a multiple of the key/value heads");
        assert_eq!(q.len(), rows * heads * layer.d, "queries: [rows, heads, d]");
        for s in sequences.iter().filter(|s| s.tokens > 0) {
            let last = s.past + s.tokens - 1;
            assert!(last / BLOCK < s.table.len(), "position {last}: a table of {} blocks", s.table.len());
            let sinks = layer.sight.sinks.min(last + 1).div_ceil(BLOCK);
            let window = layer.sight.start(s.past) / BLOCK;
            for &block in s.table[..sinks].iter().chain(&s.table[window..=last / BLOCK]) {
                assert!((block as usize) < layer.blocks(), "block {block} of {}", layer.blocks());
            }
        }
        let kind = Kind::of(&layer.format);
        Self {
            isa,
            layer,
            kind,
            scales: kind.scales(&layer.format).map(|both| both.map(|scale| [scale; BLOCK])),
            sequences,
            heads,
            group: heads / layer.kv_heads,
            q: q.as_ptr() as usize,
            out: OutPtr(std::ptr::null_mut()),
            partials: OutPtr(std::ptr::null_mut()),
            state: layer.padded() + LANES,
        }
    }
}

impl Job<'_> {
    pub(super) fn rows(&self, unit: &Unit) -> Rows {
        Rows { count: unit.queries * self.group, group: self.group, heads: self.heads }
    }

    /// Place of the unit's first row among `[row][head]`.
    fn first(&self, unit: &Unit) -> usize {
        unit.row * self.heads + unit.kv * self.group
    }

    pub(super) fn seen(&self, unit: &Unit) -> Seen {
        Seen { sight: self.layer.sight, first: unit.position, last: unit.position + unit.queries - 1 }
    }

    /// Safety: `units` are of the plan, and no other thread's.
    unsafe fn run(&self, units: &[Unit], memory: &mut Vec<f32>) {
        let most = units.iter().map(|u| u.queries * self.group).max().unwrap_or(0);
        let (room, _) = Room::cut(memory, most, self.state, self.layer, 0);
        for (i, unit) in units.iter().enumerate() {
            let next = units.get(i + 1).unwrap_or(unit);
            // SAFETY: the room is large enough for the rows of every unit.
            let q = unsafe { self.gather(unit, &room) };
            let tile = Tile { job: self, unit, next, room: &room, seen: self.seen(unit), rows: self.rows(unit), q };
            // SAFETY: the room is large enough for the rows of every unit; the partials of `unit` are `rows` states.
            unsafe {
                if let Some(partial) = unit.partial {
                    tile.run(unit.runs.start, self.partials.get().add(partial));
                    continue;
                }
                for row in 0..tile.rows.count {
                    // A state that has seen nothing.
                    *room.total.add((row + 1) * self.state - LANES + 1) = 0.0;
                }
                for run in tile.seen.runs() {
                    tile.run(run, room.run);
                    merge(self.isa, room.total, room.run, tile.rows.count, self.state);
                }
                self.write_out(unit, room.total);
            }
        }
    }

    /// The unit's queries `[rows][d]`, one after another.
    ///
    /// Safety: the room has place for its rows.
    pub(super) unsafe fn gather(&self, unit: &Unit, room: &Room) -> *const f32 {
        let (rows, d) = (self.rows(unit), self.layer.d);
        let q = (self.q as *const f32).wrapping_add(self.first(unit) * d);
        // Those of one query lie together already.
        if unit.queries == 1 {
            return q;
        }
        for row in 0..rows.count {
            // SAFETY: rows and heads of the unit are in range.
            unsafe { std::ptr::copy_nonoverlapping(q.add(rows.place(row) * d), room.q.add(row * d), d) };
        }
        room.q
    }

    /// Safety: as [`Job::run`]; the runs of `units` are done.
    unsafe fn merge_runs(&self, units: &[Unit]) {
        let states = |unit: &Unit| self.partials.get().wrapping_add(unit.partial.unwrap_or(0));
        let total = states(&units[0]);
        // SAFETY: states of the plan.
        unsafe {
            for unit in &units[1..] {
                merge(self.isa, total, states(unit), unit.queries * self.group, self.state);
            }
            self.write_out(&units[0], total);
        }
    }

    /// Safety: as [`Job::run`]; `states` of the unit's rows.
    unsafe fn write_out(&self, unit: &Unit, states: *const f32) {
        let d = self.layer.value;
        // SAFETY: rows and heads of the unit are in range.
        unsafe {
            let out = self.out.get().add(self.first(unit) * d);
            divide(self.isa, states, self.state, &self.rows(unit), d, out);
        }
    }

    /// Keys of a block of a unit's sequence and kv head.
    fn keys(&self, unit: &Unit, block: usize) -> *const u8 {
        let layer = self.layer;
        let id = self.sequences[unit.sequence].table[block] as usize;
        // (Wrapping: what is only asked for ahead may be no block.)
        layer.store.as_ptr().wrapping_add(id * layer.block_bytes() + unit.kv * layer.head_bytes())
    }

    /// Values, in the same way.
    fn values(&self, unit: &Unit, block: usize) -> *const u8 {
        self.keys(unit, block).wrapping_add(self.layer.key_bytes())
    }

    /// Scales of the positions of the block whose keys are at `keys`: of its keys, or of its values.
    fn scales(&self, keys: *const u8, of: Scales) -> *const f32 {
        match &self.scales {
            Some(both) => both[of as usize].as_ptr(),
            None => keys.wrapping_add(self.layer.scales_at()).cast::<f32>().wrapping_add(of as usize * BLOCK),
        }
    }
}

/// Whose scales.
#[derive(Clone, Copy)]
enum Scales {
    Keys,
    Values,
}

/// A unit at work.
pub(super) struct Tile<'a> {
    pub job: &'a Job<'a>,
    pub unit: &'a Unit,
    /// What this thread does next.
    pub next: &'a Unit,
    pub room: &'a Room,
    pub seen: Seen,
    pub rows: Rows,
    /// The queries `[rows][d]`.
    pub q: *const f32,
}

/// Pointers to the blocks of `from` on, up to `GROUP` of those before `end`; the last is repeated.
fn group_of(from: usize, end: usize, at: impl Fn(usize) -> *const u8) -> [*const u8; GROUP] {
    std::array::from_fn(|b| at((from + b).min(end - 1)))
}

impl Tile<'_> {
    /// The states `[rows][state]` of one run that the unit sees something of.
    ///
    /// Safety: as [`Job::run`]; `states` has room.
    unsafe fn run(&self, run: usize, states: *mut f32) {
        let (job, unit, start) = (self.job, self.unit, run * RUN);
        let segments = self.seen.segments(run);
        for segment in segments.iter().filter(|s| !s.is_empty()) {
            // SAFETY: blocks in sight; scores have room.
            unsafe { self.score(segment, run) };
        }
        let relative = |r: Range<usize>| r.start - start..r.end - start;
        let places = segments.clone().map(|s| relative(s.start * BLOCK..s.end * BLOCK));
        // Queries that see all of the blocks are softened together.
        let first = self.seen.positions(run, unit.position).map(relative);
        let last = self.seen.positions(run, self.seen.last).map(relative);
        let step = if first == places && last == places { unit.queries } else { 1 };
        for query in (0..unit.queries).step_by(step) {
            let seen = self.seen.positions(run, unit.position + query).map(relative);
            let (row, rows) = (query * job.group, step * job.group);
            // SAFETY: scores and states of the rows.
            unsafe {
                let to = states.add(row * job.state);
                std::slice::from_raw_parts_mut(to, rows * job.state).fill(0.0);
                if !seen[0].is_empty() {
                    soften(job.isa, self.room.scores.add(row * SCORES), rows, &places, &seen, to, job.state);
                }
            }
        }
        for segment in segments.iter().filter(|s| !s.is_empty()) {
            // SAFETY: as above; weights of all rows are set.
            unsafe { self.mix(segment, run, states) };
        }
    }

    /// Scores of all rows against the blocks `segment` of the run.
    ///
    /// Safety: as [`Job::run`]; scores have room for a group behind the run.
    pub(super) unsafe fn score(&self, segment: &Range<usize>, run: usize) {
        let (job, unit, layer) = (self.job, self.unit, self.job.layer);
        let size = layer.d * BLOCK;
        for block in segment.clone().step_by(GROUP) {
            let n = GROUP.min(segment.end - block);
            let at = group_of(block, block + n, |b| job.keys(unit, b));
            let next = if block + n < segment.end {
                group_of(block + n, segment.end, |b| job.keys(unit, b))
            } else {
                group_of(segment.start, segment.end, |b| job.values(unit, b))
            };
            let scales = at.map(|keys| job.scales(keys, Scales::Keys));
            let mut keys = Group { at, next, scales };
            let mut kind = job.kind;
            // SAFETY: blocks of the plan; scores have room for a group behind the run.
            unsafe {
                if kind != Kind::F32 && self.rows.count > DIRECT {
                    for b in 0..n {
                        widen_keys(job.isa, kind, at[b], layer.d, scales[b], self.room.wide.add(b * size));
                    }
                    kind = Kind::F32;
                    keys.at = group_of(0, n, |b| self.room.wide.wrapping_add(b * size).cast_const().cast());
                }
                let scores = self.room.scores.add(block * BLOCK - run * RUN);
                score(job.isa, kind, self.q, self.rows.count, &keys, n, layer.d, layer.scale, scores);
            }
        }
    }

    /// Adds the values of the blocks `segment` of the run, weighted, to the states of the rows that see them.
    unsafe fn mix(&self, segment: &Range<usize>, run: usize, states: *mut f32) {
        let (group, first) = (self.job.group, self.seen.first);
        let (mut x, end) = (segment.start * BLOCK, (segment.end * BLOCK).min(self.seen.last + 1));
        while x < end {
            let ([from, to], next) = self.seen.seers(x);
            let next = next.min(end);
            if from <= to {
                let rows = (from - first) * group..(to + 1 - first) * group;
                // In pieces of a group of blocks.
                let mut at = x;
                while at < next {
                    let piece = at..next.min((at / (GROUP * BLOCK) + 1) * GROUP * BLOCK);
                    at = piece.end;
                    // SAFETY: visible positions of the run.
                    unsafe { self.mix_piece(piece, segment, run, rows.clone(), states) };
                }
            }
            x = next;
        }
    }

    /// Positions within a group of blocks, all seen by `rows`.
    unsafe fn mix_piece(
        &self,
        positions: Range<usize>,
        segment: &Range<usize>,
        run: usize,
        rows: Range<usize>,
        states: *mut f32,
    ) {
        let (job, unit, padded) = (self.job, self.unit, self.job.layer.padded());
        let (block, end) = (positions.start / BLOCK, (positions.end - 1) / BLOCK + 1);
        let at = group_of(block, end, |b| job.values(unit, b));
        let next =
            if end < segment.end { group_of(end, segment.end, |b| job.values(unit, b)) } else { self.keys_after(run) };
        let scales = group_of(block, end, |b| job.keys(unit, b)).map(|keys| job.scales(keys, Scales::Values));
        let mut values = Group { at, next, scales };
        let mut kind = job.kind;
        let within = positions.start - block * BLOCK..positions.end - block * BLOCK;
        // SAFETY: blocks of the plan; scores and states of the rows are set.
        unsafe {
            if kind != Kind::F32 && rows.len() > DIRECT && within.len() >= BLOCK {
                let size = padded * BLOCK;
                for b in 0..end - block {
                    widen_values(job.isa, kind, at[b], padded, scales[b], self.room.wide.add(b * size));
                }
                kind = Kind::F32;
                values.at = group_of(0, end - block, |b| self.room.wide.wrapping_add(b * size).cast_const().cast());
            }
            let weights = self.room.scores.add(positions.start - run * RUN);
            mix(job.isa, kind, weights, &values, within, rows, padded, states, job.state);
        }
    }

    /// The keys that this thread reads first after the values of `run`: of the next run, or of the next unit.
    fn keys_after(&self, run: usize) -> [*const u8; GROUP] {
        let sees = |unit: &Unit, run| self.job.seen(unit).blocks(run) > 0;
        let (unit, run) = match (run + 1..self.unit.runs.end).find(|&run| sees(self.unit, run)) {
            Some(run) => (self.unit, run),
            None => (self.next, self.next.runs.clone().find(|&run| sees(self.next, run)).unwrap_or(0)),
        };
        let segment = &self.job.seen(unit).segments(run)[0];
        group_of(segment.start, segment.end, |b| self.job.keys(unit, b))
    }
}
