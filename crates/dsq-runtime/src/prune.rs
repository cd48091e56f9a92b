//! The policy [`KvPolicy::Entropy`](crate::KvPolicy): which positions each layer of a sequence holds, what the last queries gave them,
//! and which stay. Not the memory that they lie in (see `cache.rs`), not the masses of attention (see `dsq_kernels::attention`).
//!
//! What a layer holds lies in slots, in the order of the positions; a slot's key was rotated at its position, and stays so. Each time that
//! a sequence has come to a multiple of [`PERIOD`] positions it is pruned, and only then, so that what it holds depends on its
//! tokens alone and not on how they were cut into steps. The last [`OBSERVERS`] queries before that say what matters: a slot by
//! the attention that it received from them, over all heads (the observation window of SnapKV, arXiv:2404.14469; the sums
//! of H2O, arXiv:2306.14048, over these queries), a layer by the fourth root of the entropy of their attention (CAKE, arXiv:2503.12491, takes
//! a power of the entropy as part of a layer's need of positions; PyramidKV, arXiv:2406.02069, fixes the needs by the layer's number).

use dsq_kernels::attention::{PagedLayer, Queries, attention_mass};

/// Positions between two prunings.
pub(crate) const PERIOD: usize = 64;
/// Queries before a pruning that are asked.
pub(crate) const OBSERVERS: usize = 16;

/// How much a sequence keeps, see [`crate::KvPolicy::Entropy`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Budget {
    pub budget: usize,
    pub sinks: usize,
    pub recent: usize,
}

impl Budget {
    /// Positions that a layer keeps at most. All layers use the same blocks, so that the largest decides about the memory; half more than the
    /// average instead of a quarter brought nothing (docs/kernels.md).
    pub fn most(&self) -> usize {
        self.budget.saturating_add(self.budget / 4)
    }

    /// Slots that are filled at most while a sequence grows from `at` to `len` positions, of which now `filled` are held.
    pub fn peak(&self, filled: usize, at: usize, len: usize) -> usize {
        let (mut at, mut filled, mut peak) = (at, filled, filled);
        while at < len {
            let to = len.min(next_pruning(at));
            filled += to - at;
            peak = peak.max(filled);
            if to.is_multiple_of(PERIOD) {
                filled = filled.min(self.most());
            }
            at = to;
        }
        peak
    }

    /// Slots that each layer keeps of those that it has: all, where that is at most [`Budget::most`] and `budget` on average; else the
    /// first `sinks` and the last `recent`, and of the rest of `budget * layers` a share in proportion to its [`need`]. What a
    /// layer has no use for goes to the others.
    fn split(&self, needs: &[f64], filled: &[usize]) -> Vec<usize> {
        let limits: Vec<usize> = filled.iter().map(|&n| n.min(self.most())).collect();
        let total = self.budget.saturating_mul(filled.len());
        let mut kept = limits.clone();
        if limits.iter().sum::<usize>() <= total {
            return kept;
        }
        let fixed: Vec<usize> = limits.iter().map(|&l| l.min(self.sinks + self.recent)).collect();
        let mut rest = (total - fixed.iter().sum::<usize>()) as f64;
        let mut open: Vec<usize> = (0..filled.len()).collect();
        loop {
            let weight: f64 = open.iter().map(|&l| needs[l]).sum();
            let equal = !(weight > 0.0 && weight.is_finite());
            let share = |l: usize| if equal { rest / open.len() as f64 } else { rest * needs[l] / weight };
            let (full, others): (Vec<usize>, Vec<usize>) =
                open.iter().partition(|&&l| fixed[l] as f64 + share(l) >= limits[l] as f64);
            if full.is_empty() {
                others.iter().for_each(|&l| kept[l] = fixed[l] + share(l) as usize);
                return kept;
            }
            rest -= full.iter().map(|&l| (limits[l] - fixed[l]) as f64).sum::<f64>();
            open = others;
        }
    }

    /// Which `count` of the slots with these masses stay, in order.
    fn choose(&self, mass: &[f32], count: usize) -> Vec<usize> {
        let n = mass.len();
        if count >= n {
            return (0..n).collect();
        }
        let mut middle: Vec<usize> = (self.sinks..n - self.recent).collect();
        // The most first; of equals the later.
        middle.sort_unstable_by(|&a, &b| mass[b].total_cmp(&mass[a]).then(b.cmp(&a)));
        middle.truncate(count - self.sinks - self.recent);
        middle.sort_unstable();
        (0..self.sinks).chain(middle).chain(n - self.recent..n).collect()
    }
}

/// A layer's need of positions by its entropy. The fourth root was measured (docs/kernels.md): in proportion to the entropy itself the layers
/// that look everywhere take from those that know what they look for.
fn need(entropy: f64) -> f64 {
    entropy.sqrt().sqrt()
}

/// The next position, behind `at`, at which a sequence is pruned.
pub(crate) fn next_pruning(at: usize) -> usize {
    (at / PERIOD + 1) * PERIOD
}

/// What the layers of a sequence hold.
#[derive(Debug, Clone, Default)]
pub(crate) struct Slots {
    layers: Vec<Held>,
    /// Whether queries were observed or positions pruned since [`Slots::begin`], which cannot be undone.
    changed: bool,
}

/// What one layer holds.
#[derive(Debug, Clone, Default)]
struct Held {
    /// The position of each slot, in increasing order.
    positions: Vec<u32>,
    /// What each slot has received from the observers since the last pruning; those behind the end nothing.
    mass: Vec<f32>,
    /// The sum of the entropies of the observers' heads, in nats.
    entropy: f64,
}

impl Slots {
    pub fn new(layers: usize) -> Self {
        Self { layers: vec![Held::default(); layers], changed: false }
    }

    /// A step begins.
    pub fn begin(&mut self) {
        self.changed = false;
    }

    pub fn changed(&self) -> bool {
        self.changed
    }

    /// Filled slots of a layer.
    pub fn filled(&self, layer: usize) -> usize {
        self.layers[layer].positions.len()
    }

    /// Filled slots of the layer that has the most.
    pub fn most(&self) -> usize {
        self.layers.iter().map(|l| l.positions.len()).max().unwrap_or(0)
    }

    /// The positions that a layer holds, in increasing order.
    pub fn positions(&self, layer: usize) -> impl Iterator<Item = usize> {
        self.layers[layer].positions.iter().map(|&p| p as usize)
    }

    /// Takes note of `tokens` positions from `at` on that every layer now holds.
    pub fn append(&mut self, at: usize, tokens: usize) {
        self.layers.iter_mut().for_each(|l| l.positions.extend((at..at + tokens).map(|p| p as u32)));
    }

    /// Forgets the positions from `len` on, of which nothing was observed; all for 0.
    pub fn cut(&mut self, len: usize) {
        if len == 0 {
            *self = Self::new(self.layers.len());
        }
        self.layers.iter_mut().for_each(|l| l.positions.truncate(l.positions.partition_point(|&p| (p as usize) < len)));
    }

    /// Adds what those of the queries `q [queries.tokens, heads, d]`, the first of which is at position `at`, that are observers give to the slots
    /// of `layer`, which has taken their keys. They are added one by one, so that the sums do not depend on how the queries were cut into
    /// steps.
    pub fn observe(
        &mut self,
        layer: usize,
        cache: &PagedLayer,
        queries: Queries,
        at: usize,
        (q, heads): (&[f32], usize),
    ) {
        // A piece ends where a sequence is pruned, so that observers are its last queries.
        let first = (0..queries.tokens).find(|t| (at + t) % PERIOD >= PERIOD - OBSERVERS);
        let Some(first) = first else { return };
        let held = &mut self.layers[layer];
        let (past, tokens) = (queries.past + first, queries.tokens - first);
        let (width, positions) = (q.len() / queries.tokens, past + tokens);
        let mut mass = vec![0.0; tokens * positions];
        let queries = Queries { table: queries.table, past, tokens };
        let entropies = attention_mass(cache, queries, &q[first * width..], heads, &mut mass);
        held.mass.resize(positions, 0.0);
        for of_query in mass.chunks_exact(positions) {
            held.mass.iter_mut().zip(of_query).for_each(|(sum, m)| *sum += m);
        }
        for of_query in entropies.chunks_exact(heads) {
            held.entropy += of_query.iter().map(|&e| f64::from(e)).sum::<f64>();
        }
        self.changed = true;
    }

    /// Prunes a sequence that has come to a multiple of [`PERIOD`].
    pub fn prune(&mut self, budget: &Budget, caches: &mut [PagedLayer], table: &[u32]) {
        let needs: Vec<f64> = self.layers.iter().map(|l| need(l.entropy)).collect();
        let filled: Vec<usize> = self.layers.iter().map(|l| l.positions.len()).collect();
        let counts = budget.split(&needs, &filled);
        for ((held, cache), count) in self.layers.iter_mut().zip(caches).zip(counts) {
            held.mass.resize(held.positions.len(), 0.0);
            let kept = budget.choose(&held.mass, count);
            if kept.len() < held.positions.len() {
                cache.keep(table, &kept);
                kept.iter().enumerate().for_each(|(to, &from)| held.positions[to] = held.positions[from]);
                held.positions.truncate(kept.len());
            }
            held.mass.clear();
            held.entropy = 0.0;
        }
        self.changed = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsq_kernels::attention::{BLOCK, KvFormat, attend};

    const BUDGET: Budget = Budget { budget: 20, sinks: 2, recent: 4 };

    #[test]
    fn budgets_follow_the_entropies_within_their_limits() {
        // 60 slots for three layers: 6 of each are fixed, of the other 42 a share each.
        let split = |entropies: [f64; 3], filled: [usize; 3]| BUDGET.split(&entropies, &filled);
        assert_eq!(split([2.0, 3.0, 3.0], [64, 64, 64]), [6 + 10, 6 + 15, 6 + 15]);
        assert_eq!(split([0.0, 0.0, 0.0], [64, 64, 64]), [20, 20, 20]);
        assert_eq!(split([f64::NAN, 1.0, 1.0], [64, 64, 64]), [20, 20, 20]);
        // At most 25: what the last one leaves goes to the others, 23 in the ratio 1 to 2.
        assert_eq!(split([1.0, 2.0, 9.0], [64, 64, 64]), [6 + 7, 6 + 15, 25]);
        assert_eq!(split([1.0, 9.0, 9.0], [64, 64, 64]), [6 + 4, 25, 25]);
        // A layer that has few keeps them; nobody has too many.
        assert_eq!(split([1.0, 1.0, 5.0], [64, 64, 5]), [25, 25, 5]);
        assert_eq!(split([1.0, 1.0, 5.0], [20, 15, 25]), [20, 15, 25]);
        assert_eq!(split([1.0, 1.0, 5.0], [10, 10, 40]), [10, 10, 25]);
    }

    #[test]
    fn a_sequence_has_at_most_what_it_kept_and_a_period() {
        assert_eq!(BUDGET.peak(0, 0, 60), 60);
        assert_eq!(BUDGET.peak(0, 0, 64), 64);
        assert_eq!(BUDGET.peak(0, 0, 10_000), 25 + PERIOD);
        assert_eq!(BUDGET.peak(12, 128, 130), 14);
        assert_eq!(BUDGET.peak(30, 128, 193), 94);
        assert_eq!(BUDGET.peak(0, 0, 0), 0);
        let most = Budget { budget: usize::MAX, sinks: 0, recent: 1 };
        assert_eq!((most.most(), most.peak(0, 0, 1000)), (usize::MAX, 1000));
    }

    #[test]
    fn the_slots_with_most_mass_stay_in_order() {
        let mut mass = vec![0.5f32; 20];
        (mass[7], mass[12], mass[3]) = (2.0, 3.0, f32::NAN);
        // NaN counts as the most; of equals the later.
        assert_eq!(BUDGET.choose(&mass, 10), [0, 1, 3, 7, 12, 15, 16, 17, 18, 19]);
        assert_eq!(BUDGET.choose(&mass, 6), [0, 1, 16, 17, 18, 19]);
        assert_eq!(BUDGET.choose(&mass, 20), (0..20).collect::<Vec<_>>());
    }

    /// Attention that is planted at three positions keeps them, in the layer that has it; the layer that looks everywhere keeps more.
    #[test]
    fn planted_attention_keeps_its_positions_and_their_bits() {
        let planted = [9usize, 17, 30];
        let table: Vec<u32> = vec![3, 1, 0, 2, 4];
        let new = || PagedLayer::new(5, 1, [4, 4], 1.0, KvFormat::F32);
        let key =
            |layer: usize, p: usize| if layer == 0 && planted.contains(&p) { [9.0, 0.0, 0.0, 1.0] } else { [0.0; 4] };
        let value = |p: usize| [p as f32 + 0.25, -(p as f32), 1.0 / (p as f32 + 1.0), 3.0];
        let mut caches = vec![new(), new()];
        for (layer, cache) in caches.iter_mut().enumerate() {
            (0..PERIOD).for_each(|p| cache.put(&table, p, &key(layer, p), &value(p)));
        }
        let mut slots = Slots::new(2);
        let q: Vec<f32> = (0..PERIOD * 2).flat_map(|_| [1.0, 0.0, 0.0, 0.0]).collect();
        slots.begin();
        for (layer, cache) in caches.iter().enumerate() {
            // In two pieces, the second of which begins amid the observers.
            let mut once = Slots::new(2);
            once.observe(layer, cache, Queries { table: &table, past: 0, tokens: PERIOD }, 0, (&q, 2));
            for (from, to) in [(0, 40), (40, 55), (55, PERIOD)] {
                let queries = Queries { table: &table, past: from, tokens: to - from };
                slots.observe(layer, cache, queries, from, (&q[from * 8..to * 8], 2));
                assert_eq!(slots.changed(), layer == 1 || to > PERIOD - OBSERVERS);
            }
            assert_eq!(once.layers[layer].mass, slots.layers[layer].mass);
            assert_eq!(once.layers[layer].entropy, slots.layers[layer].entropy);
            let total: f32 = slots.layers[layer].mass.iter().sum();
            assert!((total - (OBSERVERS * 2) as f32).abs() < 1e-3, "{total}");
        }
        slots.append(0, PERIOD);
        slots.prune(&BUDGET, &mut caches, &table);
        let held = [0, 1].map(|layer| slots.positions(layer).collect::<Vec<_>>());
        // Entropies: 1.12 (ln 3 and a little) and 4.03 (about ln 57), whose fourth roots are as 1 to 1.38: of 28 that are shared out 11 and 16.
        assert_eq!(held.each_ref().map(Vec::len), [6 + 11, 6 + 16]);
        for p in planted.into_iter().chain([0, 1, 60, 61, 62, 63]) {
            assert!(held[0].contains(&p), "{p}: {held:?}");
        }
        // What no observer saw all of has less: those of the others that all saw, the latest first.
        assert!(held[0].contains(&48) && held[0].contains(&47) && !held[0].contains(&49), "{held:?}");
        for (layer, (cache, held)) in caches.iter().zip(&held).enumerate() {
            let mut fresh = new();
            held.iter().enumerate().for_each(|(slot, &p)| fresh.put(&table, slot, &key(layer, p), &value(p)));
            let last = Queries { table: &table, past: held.len() - 1, tokens: 1 };
            let [mut a, mut b] = [[0.0f32; 4]; 2];
            for q in [[0.3, 0.1, 2.0, -1.0], [1.0, 0.0, 0.0, 0.0]] {
                attend(cache, &[last], &q, 1, &mut a);
                attend(&fresh, &[last], &q, 1, &mut b);
                assert_eq!(a.map(f32::to_bits), b.map(f32::to_bits), "layer {layer}");
            }
        }
        assert_eq!(slots.most().div_ceil(BLOCK), 2);
        slots.cut(0);
        assert_eq!((slots.most(), slots.filled(1)), (0, 0));
    }
}
