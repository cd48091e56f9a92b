//! Tests against f64, of equal bits on every path, of chunks against the whole, and of codes against floats on their grid.

use super::*;
use dsq_quant::{KvGrid, MiniFloat, QuantArgs};
use proptest::prelude::*;

fn wave(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.0 - 1.0).collect()
}

#[derive(Clone, Copy)]
struct Case {
    heads: usize,
    kv_heads: usize,
    d: usize,
    positions: usize,
}

impl Case {
    fn inputs(&self) -> (Vec<f32>, LayerCache, Vec<f32>, Vec<f32>) {
        let q = wave(self.positions * self.heads * self.d, 1).iter().map(|x| 3.0 * x).collect();
        let (k, v) =
            (wave(self.positions * self.kv_heads * self.d, 2), wave(self.positions * self.kv_heads * self.d, 3));
        (q, self.filled(None, &k, &v), k, v)
    }

    fn filled(&self, grid: Option<KvGrid>, k: &[f32], v: &[f32]) -> LayerCache {
        let mut cache = LayerCache::new(self.positions, self.kv_heads, self.d, grid);
        // Poison: padding that is read must not matter.
        match &mut cache.store {
            Store::Floats { keys, .. } => keys.as_mut_slice().fill(1e3),
            Store::Codes { keys, .. } => keys.as_mut_slice().fill(0x70),
        }
        let row = self.kv_heads * self.d;
        for t in 0..self.positions {
            cache.put(t, &k[t * row..(t + 1) * row], &v[t * row..(t + 1) * row]);
        }
        cache
    }

    fn exact(&self, q: &[f32], k: &[f32], v: &[f32], seen: Range<usize>, head: usize) -> Vec<f64> {
        let t = seen.end - 1;
        let (d, kv) = (self.d, head / (self.heads / self.kv_heads));
        let at = |x: &[f32], t: usize, heads: usize, h: usize, i: usize| f64::from(x[(t * heads + h) * d + i]);
        let scores: Vec<f64> = seen
            .clone()
            .map(|s| {
                (0..d).map(|i| at(q, t, self.heads, head, i) * at(k, s, self.kv_heads, kv, i)).sum::<f64>()
                    / (d as f64).sqrt()
            })
            .collect();
        let top = scores.iter().fold(f64::MIN, |a, &b| a.max(b));
        let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
        let total: f64 = weights.iter().sum();
        (0..d)
            .map(|i| {
                let terms = weights.iter().zip(seen.clone());
                terms.map(|(w, s)| w * at(v, s, self.kv_heads, kv, i)).sum::<f64>() / total
            })
            .collect()
    }
}

const CASES: [Case; 5] = [
    Case { heads: 1, kv_heads: 1, d: 2, positions: 1 },
    Case { heads: 4, kv_heads: 2, d: 16, positions: 23 },
    Case { heads: 4, kv_heads: 2, d: 24, positions: 40 },
    Case { heads: 9, kv_heads: 3, d: 64, positions: 83 },
    Case { heads: 2, kv_heads: 1, d: 128, positions: 130 },
];

/// None, one position, ends within a block of 16 and at its edges, and longer than any sequence.
const WINDOWS: [Option<usize>; 6] = [None, Some(1), Some(15), Some(16), Some(37), Some(1000)];

#[test]
fn close_to_f64_and_equal_on_every_path() {
    for (case, window) in CASES.into_iter().flat_map(|c| WINDOWS.map(|w| (c, w))) {
        let (q, cache, k, v) = case.inputs();
        let cache = cache.windowed(window);
        let mut first = vec![f32::NAN; q.len()];
        attend_on(Isa::Scalar, &cache, &q, case.heads, 0, &mut first);
        for t in 0..case.positions {
            for head in 0..case.heads {
                let start = window.map_or(0, |w| (t + 1).saturating_sub(w));
                let exact = case.exact(&q, &k, &v, start..t + 1, head);
                for i in 0..case.d {
                    let got = f64::from(first[(t * case.heads + head) * case.d + i]);
                    // |q| <= 3, |k|, |v| <= 1: a score is off by at most (d + 2) u * 3 sqrt(d), a weight by twice that plus
                    // exp's 2.5e-7 in numerator and denominator each; the two sums add (p + p/16 + 6) u.
                    let u = 2f64.powi(-24);
                    let score = (case.d as f64 + 2.0) * u * 3.0 * (case.d as f64).sqrt();
                    let p = t as f64 + 1.0;
                    let bound = 2.0 * (2.0 * score + 2.5e-7) + (p + p / 16.0 + 6.0) * u;
                    assert!((got - exact[i]).abs() <= bound, "d {} t {t}: {got} against {}", case.d, exact[i]);
                }
            }
        }
        for isa in Isa::supported() {
            let mut out = vec![f32::NAN; q.len()];
            attend_on(isa, &cache, &q, case.heads, 0, &mut out);
            assert!(out.iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits()), "{isa:?}");
        }
    }
}

#[test]
fn chunks_and_single_tokens_give_the_bits_of_the_whole() {
    for (case, window) in CASES.into_iter().flat_map(|c| WINDOWS.map(|w| (c, w))) {
        let (q, cache, ..) = case.inputs();
        let cache = cache.windowed(window);
        let row = case.heads * case.d;
        let mut whole = vec![0.0; q.len()];
        attend(&cache, &q, case.heads, 0, &mut whole);
        if window.is_some_and(|w| w >= case.positions) {
            let mut all = vec![0.0; q.len()];
            attend(&cache.clone().windowed(None), &q, case.heads, 0, &mut all);
            assert!(same_bits(&all, &whole), "a window as long as the sequence is none");
        }
        for chunk in [1, 3, 7, 16] {
            let mut out = vec![0.0; q.len()];
            for at in (0..case.positions).step_by(chunk) {
                let end = (at + chunk).min(case.positions);
                attend(&cache, &q[at * row..end * row], case.heads, at, &mut out[at * row..end * row]);
            }
            assert_eq!(out, whole, "chunk {chunk}");
        }
    }
}

const TYPES: [QuantType; 2] = [QuantType::Int8, QuantType::Fp8E4M3];

fn grid(qtype: QuantType, k: f32, v: f32) -> KvGrid {
    KvGrid::from_absmax(QuantArgs::kv_cache(qtype).unwrap(), k, v).unwrap()
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// A cache of codes is a float cache of their values, bit for bit: the whole kernel, every shape and path, a prompt in one
/// piece and token by token, and at a quarter of the memory.
#[test]
fn codes_give_the_bits_of_floats_on_their_grid() {
    for case in CASES {
        let (q, float, mut k, mut v) = case.inputs();
        for qtype in TYPES {
            // Less than the largest magnitude, so that some values saturate.
            let grid = grid(qtype, 0.9, 0.7);
            let codes = case.filled(Some(grid), &k, &v);
            // (Of the smallest case the rounding up to a cache line.)
            assert!(4 * codes.bytes() == float.bytes() || case.d == 2, "one byte a value");
            grid.round(grid.k, &mut k);
            grid.round(grid.v, &mut v);
            let float = case.filled(None, &k, &v);
            let mut want = vec![f32::NAN; q.len()];
            attend_on(Isa::Scalar, &float, &q, case.heads, 0, &mut want);
            for isa in Isa::supported() {
                let mut got = vec![f32::NAN; q.len()];
                attend_on(isa, &codes, &q, case.heads, 0, &mut got);
                assert!(same_bits(&got, &want), "{qtype:?} {isa:?} d {}", case.d);
            }
            let (row, mut single) = (case.heads * case.d, vec![f32::NAN; q.len()]);
            for t in 0..case.positions {
                let at = t * row..(t + 1) * row;
                attend(&codes, &q[at.clone()], case.heads, t, &mut single[at]);
            }
            assert_eq!(single, want, "{qtype:?} token by token");
        }
    }
}

/// Every code that a cache can hold, as a value and as a key: it is stored as itself and read as its value on every path.
#[test]
fn every_code_is_stored_and_read() {
    for qtype in TYPES {
        let grid = grid(qtype, 3.0, 0.01);
        let codes: Vec<u8> = (0..=255).filter(|&c| qtype == QuantType::Int8 || MiniFloat::E4M3.is_finite(c)).collect();
        let d = codes.len();
        assert_eq!(d, if qtype == QuantType::Int8 { 256 } else { 254 });
        let value = |p| codes.iter().map(|&c| grid.args.dequantize(c as i8, p)).collect::<Vec<f32>>();
        let (k, v) = (value(grid.k), value(grid.v));
        let mut cache = LayerCache::new(2, 1, d, Some(grid));
        cache.put(0, &k, &v);
        let Store::Codes { keys, values, .. } = &cache.store else { panic!("codes") };
        for (i, &c) in codes.iter().enumerate() {
            assert_eq!([keys.as_slice()[i * LANES], values.as_slice()[i]], [c, c], "{qtype:?}");
        }
        // One visible position has weight 1: the output is the value.
        for isa in Isa::supported() {
            let mut out = vec![f32::NAN; d];
            attend_on(isa, &cache, &vec![0.1; d], 1, 0, &mut out);
            assert_eq!(out, v, "{qtype:?} {isa:?}");
        }
        // The keys: each code against a unit query of its own; the other position has the key 0, so the two weights tell it.
        cache.put(1, &vec![0.0; d], &vec![0.0; d]);
        let mut float = LayerCache::new(2, 1, d, None);
        float.put(0, &k, &v);
        float.put(1, &vec![0.0; d], &vec![0.0; d]);
        for i in 0..d {
            let mut q = vec![0.0; d];
            q[i] = 2.0;
            let mut want = vec![f32::NAN; d];
            attend_on(Isa::Scalar, &float, &q, 1, 1, &mut want);
            for isa in Isa::supported() {
                let mut out = vec![f32::NAN; d];
                attend_on(isa, &cache, &q, 1, 1, &mut out);
                assert_eq!(out, want, "{qtype:?} {isa:?} code {:#x}", codes[i]);
            }
        }
    }
}

proptest! {
    /// Any finite values, far outside the grid and subnormal ones too, in any order of writing, over older values.
    #[test]
    fn what_is_written_last_is_read_on_its_grid(
        rows in prop::collection::vec(prop::collection::vec(-1e30f32..1e30, 48), 1..40),
        small in -1e-3f32..1e-3, fp8: bool, scale in 1e-6f32..1e6,
    ) {
        let grid = grid(TYPES[usize::from(fp8)], scale, small.abs());
        let (mut codes, mut float) =
            (LayerCache::new(rows.len(), 2, 24, Some(grid)), LayerCache::new(rows.len(), 2, 24, None));
        for (t, row) in rows.iter().enumerate().rev() {
            let mut k: Vec<f32> = row.iter().map(|x| x * 1e-30 * scale).collect();
            let mut v: Vec<f32> = row.iter().map(|x| x * small).collect();
            codes.put(t, row, &k);
            codes.put(t, &k, &v);
            grid.round(grid.k, &mut k);
            grid.round(grid.v, &mut v);
            float.put(t, &k, &v);
        }
        let q = wave(4 * 24, rows.len());
        let (mut a, mut b) = (vec![f32::NAN; q.len()], vec![f32::NAN; q.len()]);
        attend_on(Isa::Scalar, &float, &q, 4, rows.len() - 1, &mut a);
        for isa in Isa::supported() {
            attend_on(isa, &codes, &q, 4, rows.len() - 1, &mut b);
            prop_assert!(same_bits(&a, &b), "{:?}", isa);
        }
    }
}
