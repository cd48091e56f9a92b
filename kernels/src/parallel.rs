//! Work split over outputs on the team that the thread works in (`team.rs`), else on the current rayon pool. Never
//! splits a reduction: the parts do not change any bit.

use std::ops::Range;

/// Runs `body` on ranges that partition `0..items`, of equal length up to one, cut at multiples of `grain`: one a thread
/// of the current pool; two a thread of a team, so that a thread that the system puts aside holds up little.
pub(crate) fn split(items: usize, grain: usize, body: &(impl Fn(Range<usize>) + Sync)) {
    let grains = items.div_ceil(grain.max(1));
    let Some(threads) = crate::team::current_threads() else {
        return split_into(items, grain, rayon::current_num_threads().min(grains), body);
    };
    let parts = if threads == 1 { 1 } else { 2 * threads }.min(grains);
    if parts <= 1 {
        return split_into(items, grain, parts, body);
    }
    let at = |part: usize| (grains * part / parts * grain).min(items);
    crate::team::run_on_current(parts, &|part| body(at(part)..at(part + 1)));
}

/// As [`split`], for items of unequal cost: `ends[i]` is what items `0..=i` cost together. Up to 32 parts a thread, claimed one by one on
/// a team, so that all threads end at about the same time whatever the costs turn out to be.
pub(crate) fn split_costs(ends: &[usize], body: &(impl Fn(Range<usize>) + Sync)) {
    let Some(&total) = ends.last() else { return };
    let team = crate::team::current_threads();
    let threads = team.unwrap_or_else(rayon::current_num_threads);
    let parts = if threads == 1 { 1 } else { 32 * threads }.min(ends.len());
    // A part begins with the first item that begins at or behind its share.
    let at = |part: usize| match part {
        0 => 0,
        _ if part == parts => ends.len(),
        _ => (1 + ends.partition_point(|&end| end < total * part / parts)).min(ends.len()),
    };
    if parts == 1 || team.is_none() {
        return join(0, parts, &at, body);
    }
    crate::team::run_on_current(parts, &|part| body(at(part)..at(part + 1)));
}

fn split_into(items: usize, grain: usize, parts: usize, body: &(impl Fn(Range<usize>) + Sync)) {
    let grains = items.div_ceil(grain.max(1));
    let at = |part: usize| (grains * part / parts.max(1) * grain).min(items);
    join(0, parts, &at, body);
}

/// Parts `first .. first + parts` on the rayon pool.
fn join(first: usize, parts: usize, at: &(impl Fn(usize) -> usize + Sync), body: &(impl Fn(Range<usize>) + Sync)) {
    match parts {
        0 => {}
        1 => body(at(first)..at(first + 1)),
        _ => {
            let half = parts / 2;
            rayon::join(|| join(first, half, at, body), || join(first + half, parts - half, at, body));
        }
    }
}

/// A pointer into an output buffer of which the parts write disjoint places.
#[derive(Clone, Copy)]
pub(crate) struct OutPtr(pub *mut f32);

// SAFETY: the kernels that share an `OutPtr` write disjoint places of one exclusively borrowed buffer.
unsafe impl Send for OutPtr {}
// SAFETY: as above.
unsafe impl Sync for OutPtr {}

impl OutPtr {
    /// The pointer (a method, so that closures capture the wrapper and not the raw field).
    #[inline(always)]
    pub fn get(self) -> *mut f32 {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn parts_cover_everything_once() {
        for items in [0, 1, 7, 16, 33] {
            for grain in [1, 4] {
                for parts in 1..6 {
                    let seen = Mutex::new(Vec::new());
                    split_into(items, grain, parts, &|r| seen.lock().unwrap().extend(r));
                    let mut seen = seen.into_inner().unwrap();
                    seen.sort_unstable();
                    assert_eq!(seen, (0..items).collect::<Vec<_>>(), "{items} {grain} {parts}");
                }
            }
        }
    }
    #[test]
    fn parts_of_unequal_cost_cover_everything_once() {
        for costs in [vec![], vec![5], vec![1, 1, 1, 100, 1], vec![100, 1, 1], (1..200).collect::<Vec<usize>>()] {
            let ends: Vec<usize> = costs
                .iter()
                .scan(0, |sum, c| {
                    *sum += c;
                    Some(*sum)
                })
                .collect();
            for threads in [1, 2, 3] {
                let run = || {
                    let seen = Mutex::new(Vec::new());
                    split_costs(&ends, &|r| seen.lock().unwrap().extend(r));
                    let mut seen = seen.into_inner().unwrap();
                    seen.sort_unstable();
                    assert_eq!(seen, (0..ends.len()).collect::<Vec<_>>(), "{costs:?} {threads}");
                };
                crate::Team::new(threads).unwrap().enter(run);
                rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run);
            }
        }
    }
}
