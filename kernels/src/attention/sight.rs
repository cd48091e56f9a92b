//! Which positions a query sees, run by run: the last of its window and the first of the sequence (sinks). Not how they are read.

use super::RUN;
use super::paged::BLOCK;
use std::ops::Range;

/// The sight of the queries of a layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sight {
    /// The last so many positions, at least 1; `usize::MAX`: all.
    pub window: usize,
    /// And the first so many.
    pub sinks: usize,
}

impl Sight {
    /// The first position of the window of the query at `p`.
    pub fn start(&self, p: usize) -> usize {
        (p + 1).saturating_sub(self.window)
    }
}

/// What the queries at `first..=last` see.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    pub sight: Sight,
    pub first: usize,
    pub last: usize,
}

impl Seen {
    /// The blocks of a run that any of them sees, of sinks and of windows; one range where they meet. Both are in order and may be empty.
    pub fn segments(&self, run: usize) -> [Range<usize>; 2] {
        let (a, b) = (run * RUN / BLOCK, (run + 1) * RUN / BLOCK);
        let sinks = a..self.sight.sinks.min(self.last + 1).div_ceil(BLOCK).clamp(a, b);
        let window = (self.sight.start(self.first) / BLOCK).clamp(a, b)..(self.last / BLOCK + 1).clamp(a, b);
        join(sinks, window)
    }

    /// How many blocks of a run any of them sees.
    pub fn blocks(&self, run: usize) -> usize {
        self.segments(run).into_iter().map(|s| s.len()).sum()
    }

    /// The runs of which any of them sees something.
    pub fn runs(&self) -> impl Iterator<Item = usize> + use<> {
        let seen = *self;
        (0..=self.last / RUN).filter(move |&run| seen.blocks(run) > 0)
    }

    /// The positions of a run that the query at `p` sees, as [`Seen::segments`] gives blocks.
    pub fn positions(&self, run: usize, p: usize) -> [Range<usize>; 2] {
        let (a, b) = (run * RUN, (run + 1) * RUN);
        let end = (p + 1).clamp(a, b);
        join(a..self.sight.sinks.clamp(a, end), self.sight.start(p).clamp(a, end)..end)
    }

    /// The queries that see position `x`, from the first to the last of them (none: the first is behind the last), and the first position behind
    /// `x` that others see.
    pub fn seers(&self, x: usize) -> ([usize; 2], usize) {
        let leaves = x.saturating_add(self.sight.window - 1);
        let sunk = x < self.sight.sinks;
        let mut next = if x <= self.first { self.first + 1 } else { x + 1 };
        if sunk {
            next = next.min(self.sight.sinks);
        } else if leaves < self.last {
            next = x + 1;
        }
        ([self.first.max(x), if sunk { self.last } else { self.last.min(leaves) }], next)
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

#[cfg(test)]
mod tests {
    use super::*;

    /// Every position of every sight, against the sentence that defines it.
    #[test]
    fn sight_is_what_it_says() {
        for (window, sinks) in [(usize::MAX, 0), (usize::MAX, 9), (1, 0), (20, 3), (33, 270), (256, 16), (300, 1)] {
            for (first, last) in [(0, 0), (0, 30), (15, 16), (255, 256), (250, 290), (600, 607)] {
                let seen = Seen { sight: Sight { window, sinks }, first, last };
                let sees = |p: usize, s: usize| s <= p && (s < sinks || p - s < window);
                for run in 0..4 {
                    let segments = seen.segments(run);
                    assert!(segments[0].end <= segments[1].start);
                    for block in run * RUN / BLOCK..(run + 1) * RUN / BLOCK {
                        let any = (first..=last).any(|p| (block * BLOCK..(block + 1) * BLOCK).any(|s| sees(p, s)));
                        // A block between may be of nobody's sight only where the window of another query begins in it.
                        assert_eq!(segments.iter().any(|s| s.contains(&block)), any, "{seen:?} block {block}");
                    }
                    assert_eq!(seen.runs().any(|r| r == run), seen.blocks(run) > 0);
                    for p in first..=last {
                        let positions = seen.positions(run, p);
                        for s in run * RUN..(run + 1) * RUN {
                            assert_eq!(positions.iter().any(|r| r.contains(&s)), sees(p, s), "{seen:?} {p} sees {s}");
                        }
                        assert!(!positions[0].is_empty() || positions[1].is_empty());
                    }
                }
                let mut x = 0;
                while x <= last {
                    let ([from, to], next) = seen.seers(x);
                    for s in x..next.min(last + 1) {
                        for p in first..=last {
                            assert_eq!(from <= p && p <= to, sees(p, s), "{seen:?} {p} sees {s}");
                        }
                    }
                    x = next;
                }
            }
        }
    }
}
