//! The percentile observer of activations: a range that leaves out a share of the values at each end, from a histogram of
//! bounded memory that merges exactly. Not the range of one weight (see `weight_observer.rs`).

use crate::{QParams, QuantArgs, QuantError};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Bits of an f32 that name its bin: sign, exponent and 7 bits of the mantissa.
const KEY_BITS: u32 = 16;
const REST: u32 = 32 - KEY_BITS;
/// Bits of a part of a count in [`Percentile::state`].
const PART_BITS: u32 = 24;
const SIGN: u16 = 1 << (KEY_BITS - 1);

/// Collects values over batches and gives the range between two percentiles.
///
/// **Bins.** One for each value of the upper 16 bits of an f32, that is for each sign, exponent and the upper 7 bits of the
/// mantissa: 128 bins of equal width in each power of two. They do not depend on the data, so nothing is ever rebinned, and
/// two histograms merge by adding their counts: **merging is exact**, equal to observing both streams in one, in any order
/// and any division among workers. Only bins that hold something take memory: some 1,500 for ordinary activations, at most
/// 65,536.
///
/// **Range.** With `t` values allowed beyond each end, `t = floor(N * (100 - percentile) / 100)`, the upper end is the
/// `(N - t)`-th smallest value and the lower end the `(N - t)`-th largest (nearest rank, no interpolation). Percentile 100
/// is the exact minimum and maximum.
///
/// **Error.** A rank falls into its bin exactly; the bin is reported by its middle, limited to the exact minimum and
/// maximum. So each end is off by at most half a bin, `2^-8` (0.4%) of the exact value, or `2^-134` where that is subnormal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Percentile {
    percentile: f64,
    /// Values seen by bin; the keys ascend with the values.
    counts: BTreeMap<u16, u64>,
    /// Exact extremes, `None` before the first value.
    extremes: Option<(f32, f32)>,
}

impl Percentile {
    /// `percentile` in (50, 100]: 99.9 leaves out a thousandth of the values at each end.
    ///
    /// # Errors
    /// [`QuantError::Setting`] outside that range.
    pub fn new(percentile: f64) -> Result<Self, QuantError> {
        if !(percentile > 50.0 && percentile <= 100.0) {
            return Err(QuantError::Setting {
                field: "percentile",
                expected: "above 50, at most 100".into(),
                got: percentile.to_string(),
            });
        }
        Ok(Self { percentile, counts: BTreeMap::new(), extremes: None })
    }

    /// Takes the values of one batch.
    ///
    /// # Errors
    /// [`QuantError::NonFinite`]; nothing of such a batch is taken.
    pub fn observe(&mut self, x: &[f32]) -> Result<(), QuantError> {
        if let Some(index) = x.iter().position(|v| !v.is_finite()) {
            let count = x.iter().filter(|v| !v.is_finite()).count();
            return Err(QuantError::NonFinite { index, value: x[index], count });
        }
        let mut batch = vec![0u64; 1 << KEY_BITS];
        for &v in x {
            batch[usize::from(key(v))] += 1;
        }
        for (key, &count) in (0..=u16::MAX).zip(&batch).filter(|(_, count)| **count > 0) {
            *self.counts.entry(key).or_default() += count;
        }
        let range = x.iter().fold(None, |range, &v| widened(range, (v, v)));
        self.extremes = range.map_or(self.extremes, |r| widened(self.extremes, r));
        Ok(())
    }

    /// Takes all that `other` has seen.
    ///
    /// # Errors
    /// [`QuantError::Setting`] when the percentiles differ.
    pub fn merge(&mut self, other: &Self) -> Result<(), QuantError> {
        if self.percentile != other.percentile {
            return Err(QuantError::Setting {
                field: "percentile",
                expected: format!("{} in every histogram", self.percentile),
                got: other.percentile.to_string(),
            });
        }
        for (&key, &count) in &other.counts {
            *self.counts.entry(key).or_default() += count;
        }
        self.extremes = other.extremes.map_or(self.extremes, |r| widened(self.extremes, r));
        Ok(())
    }

    /// Everything seen so far as f32 numbers, for a file that holds such: nothing before the first value, else the exact
    /// minimum and maximum, then four numbers for each bin in use, its key and its count in three parts of 24 bits, the
    /// lowest first. These are whole numbers below 2^24, so exact.
    pub fn state(&self) -> Vec<f32> {
        let Some((min, max)) = self.extremes else { return Vec::new() };
        let part = |count: u64, i: u32| (count >> (PART_BITS * i) & ((1 << PART_BITS) - 1)) as f32;
        let bin = |(&key, &count): (&u16, &u64)| [f32::from(key), part(count, 0), part(count, 1), part(count, 2)];
        [min, max].into_iter().chain(self.counts.iter().flat_map(bin)).collect()
    }

    /// What gave this [`Percentile::state`]; `None` when nothing can have.
    pub fn from_state(percentile: f64, state: &[f32]) -> Option<Self> {
        let mut out = Self::new(percentile).ok()?;
        let [min, max, bins @ ..] = state else { return state.is_empty().then_some(out) };
        let whole = |v: f32, most: f32| v >= 0.0 && v <= most && v.fract() == 0.0;
        let largest = ((1u32 << PART_BITS) - 1) as f32;
        for bin in bins.chunks(4) {
            let &[key, low, middle, high] = bin else { return None };
            // 24 + 24 + 16 bits are a u64.
            let parts = whole(low, largest) && whole(middle, largest) && whole(high, f32::from(u16::MAX));
            if !parts || !whole(key, f32::from(u16::MAX)) {
                return None;
            }
            let count = [low, middle, high].iter().rev().fold(0u64, |sum, &p| sum << PART_BITS | p as u64);
            out.counts.insert(key as u16, count);
        }
        out.extremes = (min <= max && (max - min).is_finite()).then_some((*min, *max));
        (out.extremes.is_some() && out.count() > 0).then_some(out)
    }

    /// How many values were seen.
    pub fn count(&self) -> u64 {
        self.counts.values().sum()
    }

    /// The range so far; `None` before the first value.
    pub fn range(&self) -> Option<(f32, f32)> {
        let (min, max) = self.extremes?;
        let count = self.count();
        // The small term absorbs the rounding of a product that is a whole number, as of 1,000 values and 99.9%.
        let beyond = (count as f64 * (100.0 - self.percentile) / 100.0 + 1e-6) as u64;
        if beyond == 0 {
            return Some((min, max));
        }
        let rank = count - beyond;
        let lo = middle_at(self.counts.iter().rev(), rank);
        let hi = middle_at(self.counts.iter(), rank);
        Some((lo.clamp(min, max), hi.clamp(min, max)))
    }

    /// The quantization parameters of the range so far.
    ///
    /// # Errors
    /// [`QuantError::Setting`] before the first value, or as [`QuantArgs::qparams`].
    pub fn qparams(&self, args: &QuantArgs) -> Result<QParams, QuantError> {
        let (lo, hi) = self.range().ok_or_else(|| QuantError::Setting {
            field: "observer",
            expected: "at least one value".into(),
            got: "none".into(),
        })?;
        args.qparams(lo, hi)
    }
}

fn widened(range: Option<(f32, f32)>, (lo, hi): (f32, f32)) -> Option<(f32, f32)> {
    Some(range.map_or((lo, hi), |(a, b)| (a.min(lo), b.max(hi))))
}

/// The bin of a value: its upper bits, turned so that they ascend with the value.
fn key(x: f32) -> u16 {
    let bits = (x.to_bits() >> REST) as u16;
    if bits & SIGN == 0 { bits | SIGN } else { !bits }
}

/// The middle of a bin, whose values share sign and exponent.
fn middle(key: u16) -> f32 {
    let bits = if key & SIGN != 0 { key & !SIGN } else { !key };
    f32::from_bits(u32::from(bits) << REST | 1 << (REST - 1))
}

/// The middle of the bin in which the `rank`-th value lies.
fn middle_at<'a>(bins: impl Iterator<Item = (&'a u16, &'a u64)>, rank: u64) -> f32 {
    let mut seen = 0;
    for (&key, &count) in bins {
        seen += count;
        if seen >= rank {
            return middle(key);
        }
    }
    0.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FloatType, Granularity};
    use proptest::prelude::*;

    fn values(n: usize, seed: u64) -> Vec<f32> {
        let mut uniform = crate::test_values::uniforms(seed);
        // Heavy tails of both signs over many powers of two.
        (0..n).map(|_| (uniform() - 0.4) * 10f32.powf(6.0 * uniform() - 4.0)).collect()
    }

    /// Nearest ranks of the sorted values.
    fn exact(mut x: Vec<f32>, percentile: f64) -> (f32, f32) {
        x.sort_by(f32::total_cmp);
        let rank = x.len() - (x.len() as f64 * (100.0 - percentile) / 100.0 + 1e-6) as usize;
        (x[x.len() - rank], x[rank - 1])
    }

    fn seen(x: &[f32], percentile: f64) -> Percentile {
        let mut p = Percentile::new(percentile).unwrap();
        p.observe(x).unwrap();
        p
    }

    #[test]
    fn the_worked_example_of_the_documentation() {
        // 0.01, 0.02, ... 10.00 and one outlier of each sign.
        let x: Vec<f32> = (1..=998).map(|i| i as f32 / 100.0).chain([-50.0, 300.0]).collect();
        let args = QuantArgs::int4(Granularity::PerTensor, FloatType::F32);
        let p = seen(&x, 99.9);
        assert_eq!(exact(x.clone(), 99.9), (0.01, 9.98));
        let (lo, hi) = p.range().unwrap();
        assert_eq!((lo, hi), (0.009_979_248, 9.968_75));
        assert_eq!(p.qparams(&args).unwrap().scale, 9.968_75 / 7.5);
        assert_eq!(seen(&x, 100.0).range(), Some((-50.0, 300.0)));
    }

    #[test]
    fn every_bin_holds_its_middle_and_lies_in_order() {
        let mut last = f32::NEG_INFINITY;
        for k in 0..=u16::MAX {
            let m = middle(k);
            if m.is_finite() {
                assert_eq!(key(m), k);
                assert!(m > last, "{k}");
                last = m;
            }
        }
        assert_eq!([0.0f32, 1.0, -1.0, f32::MAX, f32::MIN].map(|x| key(middle(key(x))) == key(x)), [true; 5]);
    }

    #[test]
    fn a_state_comes_back_and_what_cannot_be_one_is_refused() {
        let mut p = seen(&values(5000, 3), 99.0);
        assert_eq!(Percentile::from_state(99.0, &p.state()), Some(p.clone()));
        assert_eq!(Percentile::from_state(99.0, &[]), Some(Percentile::new(99.0).unwrap()));
        // Counts that no f32 holds.
        let key = *p.counts.keys().next().unwrap();
        for count in [1 << 24, (1 << 24) + 1, (1 << 52) + 12345, u64::MAX >> 1] {
            p.counts.insert(key, count);
            assert_eq!(Percentile::from_state(99.0, &p.state()).unwrap().counts[&key], count);
        }
        let good = seen(&[1.0, -2.0], 99.0).state();
        assert_eq!(good.len(), 2 + 2 * 4);
        assert!(Percentile::from_state(40.0, &good).is_none());
        for (at, value) in
            [(0, 5.0), (1, f32::NAN), (2, 65_536.0), (3, -1.0), (4, 0.5), (5, 65_536.0), (6, f32::INFINITY)]
        {
            let mut bad = good.clone();
            bad[at] = value;
            assert_eq!(Percentile::from_state(99.0, &bad), None, "{at}");
        }
        for len in [1, 2, 3, 9] {
            assert_eq!(Percentile::from_state(99.0, &good[..len]), None, "{len} numbers");
        }
    }

    #[test]
    fn what_is_wrong_is_refused_and_changes_nothing() {
        for bad in [50.0, 0.0, 100.1, f64::NAN, -1.0] {
            assert!(Percentile::new(bad).is_err());
        }
        let mut p = Percentile::new(99.0).unwrap();
        assert_eq!(p.range(), None);
        assert!(p.qparams(&QuantArgs::int4(Granularity::PerTensor, FloatType::F32)).is_err());
        p.observe(&[]).unwrap();
        assert_eq!(p.range(), None);
        p.observe(&[1.0, -2.0]).unwrap();
        let before = p.clone();
        let err = p.observe(&[3.0, f32::NAN, f32::INFINITY]).unwrap_err();
        assert!(matches!(err, QuantError::NonFinite { index: 1, count: 2, .. }));
        assert!(p.merge(&Percentile::new(98.0).unwrap()).is_err());
        assert_eq!(p, before);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn each_end_is_within_half_a_bin_of_the_exact_rank(n in 1usize..3000, seed in 0u64..1_000_000, percentile in 50.1f64..=100.0) {
            let x = values(n, seed);
            let (lo, hi) = seen(&x, percentile).range().unwrap();
            for (ours, exact) in [lo, hi].into_iter().zip(<[f32; 2]>::from(exact(x, percentile))) {
                prop_assert!((ours - exact).abs() <= exact.abs() / 256.0, "{} for {}", ours, exact);
            }
        }

        #[test]
        fn any_division_into_batches_and_workers_gives_the_same_histogram(seed in 0u64..1_000_000, cuts in prop::collection::vec(0usize..2000, 1..6)) {
            let x = values(2000, seed);
            let whole = seen(&x, 99.5);
            let mut cuts = [cuts, vec![0, 2000]].concat();
            cuts.sort_unstable();
            let mut streamed = Percentile::new(99.5).unwrap();
            let mut merged = Percentile::new(99.5).unwrap();
            for pair in cuts.windows(2) {
                streamed.observe(&x[pair[0]..pair[1]]).unwrap();
            }
            for pair in cuts.windows(2).rev() {
                merged.merge(&seen(&x[pair[0]..pair[1]], 99.5)).unwrap();
            }
            prop_assert_eq!(&streamed, &whole);
            prop_assert_eq!(&merged, &whole);
            prop_assert_eq!(merged.range(), whole.range());
            prop_assert_eq!(merged.count(), 2000);
        }

        #[test]
        fn a_lower_percentile_never_widens_the_range(seed in 0u64..1_000_000, p in 50.1f64..100.0, q in 50.1f64..100.0) {
            let x = values(700, seed);
            let ([a, b], [c, d]) = (
                <[f32; 2]>::from(seen(&x, p.min(q)).range().unwrap()),
                <[f32; 2]>::from(seen(&x, p.max(q)).range().unwrap()),
            );
            prop_assert!(a >= c && b <= d);
        }
    }
}
