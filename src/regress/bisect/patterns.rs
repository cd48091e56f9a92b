//! What kind of change turned one weight into another, where it can be told exactly: a constant factor on scales, zero points that were
//! dropped, ties rounded half away, rows that were moved. Pure functions of values; which modules are compared is in `compare.rs`.

use dsq_quant::{FloatType, QuantizedMatrix};
use sha2::{Digest, Sha256};
use std::collections::HashMap;

/// Codes this near to a tie (in steps of the grid) count as rounded at one: float weights are seldom exactly there.
const NEAR_TIE: f64 = 1.0 / 32.0;

/// The factor between scales that changed, where it is one: 0.002 apart at most, or what the scales' dtype cannot tell apart.
/// `changed` are pairs of good and bad.
pub fn factor(changed: &[(f32, f32)], dtype: FloatType) -> Option<f64> {
    let mut ratios: Vec<f64> = changed.iter().map(|(g, b)| f64::from(*b) / f64::from(*g)).collect();
    ratios.sort_by(f64::total_cmp);
    let (first, last) = (*ratios.first()?, *ratios.last()?);
    // Each of two roundings moves a scale by half an epsilon.
    let room = 1.0 + f64::from(dtype.epsilon()).max(1e-6) * 2.0;
    (first > 0.0 && last.is_finite() && last / first <= room).then(|| ratios[ratios.len() / 2])
}

/// How codes differ.
#[derive(Debug, Clone, PartialEq)]
pub struct CodeChange {
    /// Codes that differ.
    pub differ: usize,
    /// The largest difference, in steps.
    pub largest: i32,
    /// All by one step, and away from the zero point.
    pub away: bool,
    /// With the float weights: the largest distance from a tie of those that differ, in steps, and how many lie exactly there.
    pub ties: Option<(f64, usize)>,
}

impl CodeChange {
    /// Compares codes on the same grid; `float` are the weights that both were made from.
    pub fn of(good: &QuantizedMatrix, bad: &QuantizedMatrix, float: Option<&[f32]>) -> Self {
        let mut out = Self { differ: 0, largest: 0, away: true, ties: float.map(|_| (0.0, 0)) };
        for (scale, run) in good.args.runs(good.n, good.k) {
            let p = good.qparams(scale);
            for i in run {
                let (a, b) = (i32::from(good.codes[i]), i32::from(bad.codes[i]));
                if a == b {
                    continue;
                }
                out.differ += 1;
                out.largest = out.largest.max((a - b).abs());
                out.away &= (a - b).abs() == 1 && (b - p.zero).abs() > (a - p.zero).abs();
                if let (Some(w), Some((distance, exact))) = (float, &mut out.ties) {
                    let d = ((f64::from(w[i]) / f64::from(p.scale)).abs().fract() - 0.5).abs();
                    *distance = distance.max(d);
                    *exact += usize::from(d == 0.0);
                }
            }
        }
        out
    }

    /// In words, after the count.
    pub fn words(&self) -> Option<String> {
        match self.ties {
            _ if self.differ == 0 || !self.away => None,
            Some((distance, exact)) if distance <= NEAR_TIE => Some(format!(
                "ties rounded half away from zero: {exact} of {} lie exactly between two codes, all within {distance:.4} of a step",
                self.differ
            )),
            Some(_) => None,
            None => Some("all by one, away from zero, as ties do that are rounded half away; --reference tells".into()),
        }
    }
}

/// Where each row of a matrix came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moved {
    /// `(module, row there)` for each row that differs, in order: `(row, source module, source row)`.
    pub rows: Vec<(usize, usize, usize)>,
}

/// Digests of the rows of `[n, k]` values.
pub fn row_digests(values: &[f32], k: usize) -> Vec<[u8; 16]> {
    let digest = |row: &[f32]| {
        let mut hash = Sha256::new();
        row.iter().for_each(|x| hash.update(x.to_bits().to_le_bytes()));
        let mut out = [0; 16];
        out.copy_from_slice(&hash.finalize()[..16]);
        out
    };
    values.chunks_exact(k.max(1)).map(digest).collect()
}

/// Where the rows of `bad` that are not those of `good[own]` stand in `good`, the row digests of some modules; `None` unless every one of
/// them is found. Where a row stands in several places its own module's is taken, at the lowest row.
pub fn moved(bad: &[[u8; 16]], own: usize, good: &[Vec<[u8; 16]>]) -> Option<Moved> {
    let mut places: HashMap<&[u8; 16], (usize, usize)> = HashMap::new();
    let order = std::iter::once(own).chain((0..good.len()).filter(|m| *m != own));
    for m in order {
        for (row, digest) in good[m].iter().enumerate() {
            places.entry(digest).or_insert((m, row));
        }
    }
    let mut rows = Vec::new();
    for (row, digest) in bad.iter().enumerate() {
        if good[own].get(row) != Some(digest) {
            let (m, from) = places.get(digest)?;
            rows.push((row, *m, *from));
        }
    }
    (!rows.is_empty()).then_some(Moved { rows })
}

impl Moved {
    /// In words: `names` are those of the modules, `own` the module's own place, `n` its rows, `head` the rows of a head.
    pub fn words(&self, own: usize, names: &[String], n: usize, head: usize) -> String {
        let from = self.rows[0].1;
        let (all_own, all_from) = (self.rows.iter().all(|r| r.1 == own), self.rows.iter().all(|r| r.1 == from));
        let (first, last) = (self.rows[0].0, self.rows[self.rows.len() - 1].0);
        if !all_own {
            let other =
                names.get(if from == own { self.rows.iter().find(|r| r.1 != own).map_or(from, |r| r.1) } else { from });
            let other = other.map(String::as_str).unwrap_or_default();
            let straight = all_from && self.rows.iter().all(|r| r.2 == r.0);
            return match (self.rows.len() == n && straight, straight) {
                (true, _) => format!("all rows are those of {other}: exchanged"),
                (false, true) => format!("rows {first} to {last} are those of {other}: swapped"),
                (false, false) => format!("{} rows between {first} and {last} are rows of {other}", self.rows.len()),
            };
        }
        if let Some(way) = self.rotary(n, head) {
            return format!("rows permuted: {way}");
        }
        let shown: Vec<String> = self.rows.iter().take(4).map(|(row, _, from)| format!("{row} from {from}")).collect();
        let more = if self.rows.len() > 4 { ", ..." } else { "" };
        format!("rows permuted: {} of {n}, {}{more}", self.rows.len(), shown.join(", "))
    }

    /// The permutation between halves (Hugging Face) and pairs (GGUF, original Llama) of a head's rows, where it is that.
    fn rotary(&self, n: usize, head: usize) -> Option<&'static str> {
        if head < 4 || !head.is_multiple_of(2) || !n.is_multiple_of(head) {
            return None;
        }
        let half = head / 2;
        // In pairs, row `j` of a head is row `(j % 2) half + j / 2` of halves.
        let in_halves = |row: usize| row / head * head + (row % 2) * half + row % head / 2;
        let in_pairs = |row: usize| row / head * head + 2 * (row % half) + row % head / half;
        let expected = |of: &dyn Fn(usize) -> usize| {
            let want: Vec<(usize, usize)> = (0..n).map(|r| (r, of(r))).filter(|(a, b)| a != b).collect();
            want.len() == self.rows.len() && self.rows.iter().zip(want).all(|(a, b)| (a.0, a.2) == b)
        };
        if expected(&in_halves) {
            Some("the halves of each head are in pairs, as GGUF files have q and k")
        } else if expected(&in_pairs) {
            Some("the pairs of each head are in halves, as Hugging Face folders have q and k")
        } else {
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dsq_quant::{Granularity, Mapping, QParams, QuantArgs};
    use rand::seq::SliceRandom;
    use rand::{Rng, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    fn args() -> QuantArgs {
        QuantArgs::int4(Granularity::PerGroup(32), FloatType::F32)
    }

    #[test]
    fn a_factor_on_all_scales_is_found_and_two_are_not() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for case in 0..300 {
            let dtype = FloatType::ALL[case % 3];
            let by: f32 = if case % 2 == 0 { rng.random_range(0.5..0.98) } else { rng.random_range(1.02..2.0) };
            // f16 is coarser below 2^-14.
            let scales: Vec<f32> =
                (0..rng.random_range(2..50)).map(|_| dtype.round(rng.random_range(2e-3..1.0))).collect();
            let mut pairs: Vec<(f32, f32)> = scales.iter().map(|s| (*s, dtype.round(s * by))).collect();
            let got = factor(&pairs, dtype).unwrap_or_else(|| panic!("{by} {dtype:?} {pairs:?}"));
            assert!((got / f64::from(by) - 1.0).abs() <= 2.0 * f64::from(dtype.epsilon()).max(1e-6), "{got} {by}");
            pairs[0].1 *= 1.1;
            assert_eq!(factor(&pairs, dtype), None, "{by} {dtype:?}");
        }
    }

    #[test]
    fn half_away_is_told_from_any_other_change() {
        let mut rng = ChaCha8Rng::seed_from_u64(2);
        for _ in 0..100 {
            // Every fourth value is a tie of the grid, whose scale is 2^-5; the first is one that goes up.
            let value = |(i, x): (usize, i32)| match i {
                0 => 0.5 / 32.0,
                i if i % 4 == 0 => (x as f32 + 0.5) / 32.0,
                _ => x as f32 / 32.0,
            };
            let steps: Vec<i32> = (0..128).map(|_| rng.random_range(-7..7)).collect();
            let w: Vec<f32> = steps.into_iter().enumerate().map(value).collect();
            let params = vec![QParams { scale: 1.0 / 32.0, zero: 0 }; 4];
            let good = QuantizedMatrix::quantize_with(&w, 2, 64, args(), &params).unwrap();
            let mut bad = good.clone();
            for (q, x) in bad.codes.iter_mut().zip(&w) {
                *q = (x * 32.0).round().clamp(-8.0, 7.0) as i8;
            }
            let change = CodeChange::of(&good, &bad, Some(&w));
            assert!(change.differ > 0);
            assert_eq!(change.ties, Some((0.0, change.differ)));
            assert!(change.words().unwrap().starts_with("ties rounded half away"));
            assert!(CodeChange::of(&good, &bad, None).words().unwrap().contains("--reference tells"));
            // One code more, of a value that is no tie.
            let at = (0..128).find(|i| i % 4 != 0 && (1..7).contains(&good.codes[*i])).unwrap();
            bad.codes[at] += 1;
            assert_eq!(CodeChange::of(&good, &bad, Some(&w)).words(), None);
        }
    }

    #[test]
    fn every_permutation_of_rows_is_found() {
        let mut rng = ChaCha8Rng::seed_from_u64(3);
        let good: Vec<f32> = (0..24 * 8).map(|i| i as f32).collect();
        let rows = [row_digests(&good, 8)];
        assert_eq!(moved(&rows[0], 0, &rows), None);
        for _ in 0..100 {
            let mut order: Vec<usize> = (0..24).collect();
            order.shuffle(&mut rng);
            let mut bad: Vec<f32> = order.iter().flat_map(|r| good[r * 8..r * 8 + 8].to_vec()).collect();
            let m = moved(&row_digests(&bad, 8), 0, &rows).unwrap();
            assert!(m.rows.iter().all(|(row, module, from)| order[*row] == *from && *module == 0));
            assert_eq!(m.rows.len(), order.iter().enumerate().filter(|(i, r)| i != *r).count());
            bad[0] += 0.5;
            assert_eq!(moved(&row_digests(&bad, 8), 0, &rows), None, "a row that stands nowhere");
        }
    }

    #[test]
    fn the_rotary_order_and_an_exchange_have_names() {
        let values = |from: usize| (0..16 * 4).map(|i| (from + i) as f32).collect::<Vec<f32>>();
        let (q, k) = (values(0), values(1000));
        let digests = [row_digests(&q, 4), row_digests(&k, 4)];
        let names = ["q_proj".to_owned(), "k_proj".to_owned()];
        let row = |w: &[f32], r: usize| w[4 * r..4 * r + 4].to_vec();
        // Heads of eight rows, in pairs.
        let pairs: Vec<f32> = (0..16).flat_map(|r| row(&q, r / 8 * 8 + r % 2 * 4 + r % 8 / 2)).collect();
        let m = moved(&row_digests(&pairs, 4), 0, &digests).unwrap();
        assert_eq!(
            m.words(0, &names, 16, 8),
            "rows permuted: the halves of each head are in pairs, as GGUF files have q and k"
        );
        let m = moved(&digests[1], 0, &digests).unwrap();
        assert_eq!(m.words(0, &names, 16, 8), "all rows are those of k_proj: exchanged");
        let part = [row(&q, 0), row(&k, 1), row(&k, 2)].concat();
        let part = [part, q[12..].to_vec()].concat();
        let m = moved(&row_digests(&part, 4), 0, &digests).unwrap();
        assert_eq!(m.words(0, &names, 16, 8), "rows 1 to 2 are those of k_proj: swapped");
        let swapped = [row(&q, 1), row(&q, 0), q[8..].to_vec()].concat();
        let m = moved(&row_digests(&swapped, 4), 0, &digests).unwrap();
        assert_eq!(m.words(0, &names, 16, 8), "rows permuted: 2 of 16, 0 from 1, 1 from 0");
    }

    #[test]
    fn codes_are_compared_about_their_zero_point() {
        let w: Vec<f32> = (0..64).map(|i| 0.1 + i as f32 / 64.0).collect();
        let q = QuantizedMatrix::quantize(&w, 1, 64, QuantArgs { mapping: Mapping::Asymmetric, ..args() }).unwrap();
        let mut bad = q.clone();
        let at = (0..64).find(|i| q.codes[*i] < 7).unwrap();
        bad.codes[at] += 1;
        let change = CodeChange::of(&q, &bad, None);
        assert_eq!((change.differ, change.largest), (1, 1));
        assert_eq!(change.away, i32::from(q.codes[at]) >= i32::from(q.zeros[at / 32]));
    }
}
