//! The loops of paged attention, written once for every path and form: scores, softmax of a run, weighted values, merging. Not which
//! rows and blocks they are called for (see `fused.rs`, whose header has the order of all sums).
//!
//! Each is entered through a function that enables the features of a path, some hundred multiply-adds at least at a time: what calls
//! them is compiled once.

use super::RUN;
use super::form::{Form, Kind, on_form};
use super::paged::BLOCK;
use crate::Isa;
use crate::elementwise::exp;
use crate::simd::{LANES, Simd, dispatch, largest, sum};
use std::ops::Range;

/// Blocks of keys that are scored together, and of values that are mixed at once.
pub(super) const GROUP: usize = 4;
/// Places of a row of scores: the last group may reach beyond the run.
pub(super) const SCORES: usize = RUN + GROUP * BLOCK;
/// Rows up to which codes and f16 become f32 where they are used; for more rows they are widened into a buffer once.
pub(super) const DIRECT: usize = 4;

/// Rows up to which what is read next is asked for ahead: with more, arithmetic takes longer than memory.
const AHEAD: usize = 6;

/// Whether every line of what comes next is asked for, or only the first ones, behind which the processor reads on by itself. Of codes, whose
/// conversion takes time anyway, all: measured 15% faster; of f32 and f16 the first: 10% and 6%.
const fn all_ahead<F: Form>() -> bool {
    F::BYTES == 1
}

/// A group of blocks: of their keys or of their values.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group {
    /// Where the blocks lie. Those that the group lacks repeat its last one.
    pub at: [*const u8; GROUP],
    /// What will be read next, for the cache.
    pub next: [*const u8; GROUP],
    /// The scales of each block's positions, sixteen; of floats they are not used.
    pub scales: [*const f32; GROUP],
}

/// The rows of a tile, `[query][head of the kv head]`, in a tensor `[query][head]` that begins at the tile's first row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    pub count: usize,
    /// Heads of a kv head.
    pub group: usize,
    /// Heads of all kv heads.
    pub heads: usize,
}

impl Rows {
    /// The place of a row among `[query][head]`.
    #[inline(always)]
    pub fn place(&self, row: usize) -> usize {
        row / self.group * self.heads + row % self.group
    }
}

/// Rows that are worked on at once: as many as the registers take beside GROUP vectors each.
#[inline(always)]
const fn rows_at_once<S: Simd, F: Form>() -> usize {
    match (S::VECTORS >= 32, S::VECTORS >= 8) {
        (true, _) => {
            if F::BYTES == 4 {
                6
            } else {
                DIRECT
            }
        }
        (_, true) => 3,
        _ => 1,
    }
}

/// `$body` for pieces of `$rows` of about equal size, `$first` their first row and `$R` how many as a constant.
macro_rules! by_rows {
    ($S:ident, $F:ident, $rows:expr, |$first:ident, $R:ident| $body:expr) => {{
        let (rows, most): (Range<usize>, usize) = ($rows, const { rows_at_once::<$S, $F>() });
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
            // (An arm above `most` is never taken, and not built.)
            match take {
                2 if most >= 2 => piece!(2),
                3 if most >= 3 => piece!(3),
                4 if most >= 4 => piece!(4),
                5 if most >= 5 => piece!(5),
                6 if most >= 6 => piece!(6),
                _ => piece!(1),
            }
            $first += take;
        }
    }};
}

/// Scores of `rows` queries (`[rows][d]` at `q`) against the first `blocks` blocks of `keys`, times `scale`; row `r` of scores
/// begins at `scores + r * SCORES`, and has room for a whole group.
///
/// Safety: the CPU has the path; all pointers are valid for what they name, keys of the form `kind`.
pub(super) unsafe fn score(
    isa: Isa,
    kind: Kind,
    q: *const f32,
    rows: usize,
    keys: &Group,
    blocks: usize,
    d: usize,
    scale: f32,
    scores: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        on_form!(isa, kind, score_group(q: *const f32, rows: usize, keys: &Group, blocks: usize, d: usize, scale: f32, scores: *mut f32))
    }
}

#[inline(always)]
unsafe fn score_group<S: Simd, F: Form>(
    q: *const f32,
    rows: usize,
    keys: &Group,
    blocks: usize,
    d: usize,
    scale: f32,
    scores: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        by_rows!(S, F, 0..rows, |first, R| {
            let q: [*const f32; R] = std::array::from_fn(|r| q.add((first + r) * d));
            let (scores, ahead) = (scores.add(first * SCORES), first == 0 && rows <= AHEAD);
            if S::VECTORS >= 32 && blocks > 2 {
                score_blocks::<S, F, R, GROUP>(&q, &keys.at, &keys.next, &keys.scales, ahead, scale, d, scores);
            } else {
                // As many blocks at once as the registers take.
                for b in (0..blocks).step_by(2) {
                    let pair = |x: &[*const u8; GROUP]| [x[b], x[b + 1]];
                    let (at, next, scales) = (pair(&keys.at), pair(&keys.next), [keys.scales[b], keys.scales[b + 1]]);
                    score_blocks::<S, F, R, 2>(&q, &at, &next, &scales, ahead, scale, d, scores.add(b * LANES));
                }
            }
        });
    }
}

/// Scores of R rows against B blocks of 16 keys of these `scales`, times `scale`.
#[inline(always)]
unsafe fn score_blocks<S: Simd, F: Form, const R: usize, const B: usize>(
    q: &[*const f32; R],
    keys: &[*const u8; B],
    next: &[*const u8; B],
    scales: &[*const f32; B],
    ahead: bool,
    scale: f32,
    d: usize,
    scores: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe {
        let scales: [S::V; B] = std::array::from_fn(|b| S::load(scales[b]));
        let mut dot = [[S::splat(0.0); B]; R];
        // In steps of four, which read `F::BYTES` cache lines of each block. (No closure: one that is not inlined has not the path's features.)
        let mut i = 0;
        while i < d {
            if ahead && (i == 0 || all_ahead::<F>()) {
                for line in 0..B * F::BYTES {
                    S::prefetch(next[line % B].wrapping_add(i * LANES * F::BYTES + line / B * 64));
                }
            }
            let end = if i + 4 <= d { i + 4 } else { d };
            while i < end {
                let k: [S::V; B] = std::array::from_fn(|b| F::load::<S>(keys[b].add(i * LANES * F::BYTES), scales[b]));
                for r in 0..R {
                    let qv = S::splat(*q[r].add(i));
                    for b in 0..B {
                        dot[r][b] = S::fma(qv, k[b], dot[r][b]);
                    }
                }
                i += 1;
            }
        }
        let scale = S::splat(scale);
        for r in 0..R {
            for b in 0..B {
                S::store(scores.add(r * SCORES + b * LANES), S::mul(dot[r][b], scale));
            }
        }
    }
}

/// Turns the scores of the positions `seen` in `rows` rows into `exp(score - largest)`, the others of `places` (multiples of 16) into 0, and
/// writes the largest and the sum to the end of each row's state of `len` values. `seen` lies within `places`, its first range is not empty.
///
/// Safety: the CPU has the path; scores of `places` are set; states of `rows`.
pub(super) unsafe fn soften(
    isa: Isa,
    scores: *mut f32,
    rows: usize,
    places: &[Range<usize>; 2],
    seen: &[Range<usize>; 2],
    states: *mut f32,
    len: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        dispatch!(isa, soften_on(scores: *mut f32, rows: usize, places: &[Range<usize>; 2], seen: &[Range<usize>; 2], states: *mut f32, len: usize))
    }
}

#[inline(always)]
unsafe fn soften_on<S: Simd>(
    scores: *mut f32,
    rows: usize,
    places: &[Range<usize>; 2],
    seen: &[Range<usize>; 2],
    states: *mut f32,
    len: usize,
) {
    /// Rows whose foldings of lanes overlap.
    const AT_ONCE: usize = 8;
    let masked = places != seen;
    for first in (0..rows).step_by(AT_ONCE) {
        let n = AT_ONCE.min(rows - first);
        // SAFETY: the caller's.
        unsafe {
            let row = |r: usize| scores.add((first + r) * SCORES);
            let mut tops = [0.0; AT_ONCE];
            for r in 0..n {
                // Masked places repeat a visible score, which changes no maximum and stays finite in exp.
                let any = *row(r).add(seen[0].start);
                if masked {
                    mask(row(r), places, seen, any);
                }
                let mut top = S::splat(any);
                for place in places {
                    for i in place.clone().step_by(LANES) {
                        top = S::max(S::load(row(r).add(i)), top);
                    }
                }
                tops[r] = largest::<S>(top);
            }
            let mut totals = [S::splat(0.0); AT_ONCE];
            for r in 0..n {
                let (top, mut total) = (S::splat(tops[r]), S::splat(0.0));
                for place in places {
                    for i in place.clone().step_by(LANES) {
                        let e = exp::<S>(S::sub(S::load(row(r).add(i)), top));
                        S::store(row(r).add(i), e);
                        total = S::add(total, e);
                    }
                }
                totals[r] = total;
            }
            for r in 0..n {
                if masked {
                    mask(row(r), places, seen, 0.0);
                    totals[r] = S::splat(0.0);
                    for place in places {
                        for i in place.clone().step_by(LANES) {
                            totals[r] = S::add(totals[r], S::load(row(r).add(i)));
                        }
                    }
                }
                let end = states.add((first + r + 1) * len - LANES);
                *end = tops[r];
                *end.add(1) = sum::<S>(totals[r]);
            }
        }
    }
}

/// Sets what of `places` is not seen.
unsafe fn mask(scores: *mut f32, places: &[Range<usize>; 2], seen: &[Range<usize>; 2], to: f32) {
    for place in places {
        let mut at = place.start;
        for s in seen.iter().filter(|s| !s.is_empty()).chain([&(place.end..place.end)]) {
            for i in at..s.start.clamp(at, place.end) {
                // SAFETY: `places` are the caller's.
                unsafe { *scores.add(i) = to };
            }
            at = s.end.clamp(at, place.end);
        }
    }
}

/// Adds the values (rows of `padded`) of the positions `within` (of the first block of `values`) to the states of `rows`, weighted. Row
/// `r` of the weights, whose first is that of the first position, begins at `weights + r * SCORES`, of the states at `states + r * state`.
///
/// Safety: as [`score`].
pub(super) unsafe fn mix(
    isa: Isa,
    kind: Kind,
    weights: *const f32,
    values: &Group,
    within: Range<usize>,
    rows: Range<usize>,
    padded: usize,
    states: *mut f32,
    state: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        on_form!(isa, kind, mix_group(weights: *const f32, values: &Group, within: Range<usize>, rows: Range<usize>, padded: usize, states: *mut f32, state: usize))
    }
}

#[inline(always)]
unsafe fn mix_group<S: Simd, F: Form>(
    weights: *const f32,
    values: &Group,
    within: Range<usize>,
    rows: Range<usize>,
    padded: usize,
    states: *mut f32,
    state: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        by_rows!(S, F, rows.clone(), |first, R| {
            let (weights, states) = (weights.add(first * SCORES), states.add(first * state));
            let ahead = first == rows.start && rows.len() <= AHEAD;
            let mut at = 0;
            while at < padded {
                if S::VECTORS >= 32 && at + 4 * LANES <= padded {
                    mix_rows::<S, F, R, 4>(weights, values, &within, ahead, padded, at, states, state);
                    at += 4 * LANES;
                } else if S::VECTORS >= 8 && S::VECTORS < 32 && at + 2 * LANES <= padded {
                    mix_rows::<S, F, R, 2>(weights, values, &within, ahead, padded, at, states, state);
                    at += 2 * LANES;
                } else {
                    mix_rows::<S, F, R, 1>(weights, values, &within, ahead, padded, at, states, state);
                    at += LANES;
                }
            }
        });
    }
}

/// [`mix`] of R rows and W vectors from column `at` on.
#[inline(always)]
unsafe fn mix_rows<S: Simd, F: Form, const R: usize, const W: usize>(
    weights: *const f32,
    values: &Group,
    within: &Range<usize>,
    ahead: bool,
    padded: usize,
    at: usize,
    states: *mut f32,
    state: usize,
) {
    // SAFETY: the caller's.
    unsafe {
        let mut acc: [[S::V; W]; R] =
            std::array::from_fn(|r| std::array::from_fn(|w| S::load(states.add(r * state + at + w * LANES))));
        let mut t = within.start;
        while t < within.end {
            let end = within.end.min((t / BLOCK + 1) * BLOCK);
            let (block, next, scales) = (values.at[t / BLOCK], values.next[t / BLOCK], values.scales[t / BLOCK]);
            while t < end {
                let row = (t % BLOCK * padded + at) * F::BYTES;
                if ahead && (t % BLOCK < 2 || all_ahead::<F>()) {
                    for w in 0..W {
                        if (w * LANES * F::BYTES).is_multiple_of(64) {
                            S::prefetch(next.wrapping_add(row + w * LANES * F::BYTES));
                        }
                    }
                }
                let scale = S::splat(*scales.add(t % BLOCK));
                let v: [S::V; W] = std::array::from_fn(|w| F::load::<S>(block.add(row + w * LANES * F::BYTES), scale));
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

/// The keys `[d][16]` of a block as f32; `scales` are those of its positions.
///
/// Safety: as [`score`].
pub(super) unsafe fn widen_keys(isa: Isa, kind: Kind, from: *const u8, d: usize, scales: *const f32, to: *mut f32) {
    // SAFETY: the caller's.
    unsafe { on_form!(isa, kind, widen_keys_on(from: *const u8, d: usize, scales: *const f32, to: *mut f32)) }
}

#[inline(always)]
unsafe fn widen_keys_on<S: Simd, F: Form>(from: *const u8, d: usize, scales: *const f32, to: *mut f32) {
    // SAFETY: the caller's.
    unsafe {
        let scales = S::load(scales);
        for i in (0..d * BLOCK).step_by(LANES) {
            S::store(to.add(i), F::load::<S>(from.add(i * F::BYTES), scales));
        }
    }
}

/// The values `[16][padded]` of a block as f32; `scales` are those of its positions.
///
/// Safety: as [`score`].
pub(super) unsafe fn widen_values(
    isa: Isa,
    kind: Kind,
    from: *const u8,
    padded: usize,
    scales: *const f32,
    to: *mut f32,
) {
    // SAFETY: the caller's.
    unsafe { on_form!(isa, kind, widen_values_on(from: *const u8, padded: usize, scales: *const f32, to: *mut f32)) }
}

#[inline(always)]
unsafe fn widen_values_on<S: Simd, F: Form>(from: *const u8, padded: usize, scales: *const f32, to: *mut f32) {
    for t in 0..BLOCK {
        // SAFETY: the caller's.
        unsafe {
            let scale = S::splat(*scales.add(t));
            for i in (t * padded..(t + 1) * padded).step_by(LANES) {
                S::store(to.add(i), F::load::<S>(from.add(i * F::BYTES), scale));
            }
        }
    }
}

/// Adds `rows` states of `len` values (values, then a vector of the maximum, the sum and zeros) to others. A sum of 0 is a
/// state that has seen nothing: any other's is positive or NaN.
///
/// Safety: the CPU has the path; `rows * len` values at both.
pub(super) unsafe fn merge(isa: Isa, old: *mut f32, new: *const f32, rows: usize, len: usize) {
    // SAFETY: the caller's.
    unsafe { dispatch!(isa, merge_on(old: *mut f32, new: *const f32, rows: usize, len: usize)) }
}

#[inline(always)]
unsafe fn merge_on<S: Simd>(old: *mut f32, new: *const f32, rows: usize, len: usize) {
    let (top, total) = (len - LANES, len - LANES + 1);
    for row in 0..rows {
        // SAFETY: the caller's states.
        unsafe {
            let (old, new) = (old.add(row * len), new.add(row * len));
            if *new.add(total) == 0.0 {
                continue;
            }
            if *old.add(total) == 0.0 {
                std::ptr::copy_nonoverlapping(new, old, len);
                continue;
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
}

/// The output rows (of width `d`) of states of `len` values: values divided by the sum.
///
/// Safety: the CPU has the path; states and outputs of `rows`.
pub(super) unsafe fn divide(isa: Isa, states: *const f32, len: usize, rows: &Rows, d: usize, out: *mut f32) {
    // SAFETY: the caller's.
    unsafe { dispatch!(isa, divide_on(states: *const f32, len: usize, rows: &Rows, d: usize, out: *mut f32)) }
}

#[inline(always)]
unsafe fn divide_on<S: Simd>(states: *const f32, len: usize, rows: &Rows, d: usize, out: *mut f32) {
    for row in 0..rows.count {
        // SAFETY: the caller's.
        unsafe {
            let (state, out) = (states.add(row * len), out.add(rows.place(row) * d));
            let total = S::splat(*state.add(len - LANES + 1));
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
