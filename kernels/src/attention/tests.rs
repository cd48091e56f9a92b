//! Tests against f64, of equal bits on every path, and of chunks against the whole.

use super::*;

fn wave(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.0 - 1.0).collect()
}

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
        let mut cache = LayerCache::new(self.positions, self.kv_heads, self.d);
        // Poison: padding that is read must not matter.
        cache.keys.as_mut_slice().fill(1e3);
        cache.values.as_mut_slice().fill(0.0);
        let row = self.kv_heads * self.d;
        for t in 0..self.positions {
            cache.put(t, &k[t * row..(t + 1) * row], &v[t * row..(t + 1) * row]);
        }
        (q, cache, k, v)
    }

    fn exact(&self, q: &[f32], k: &[f32], v: &[f32], t: usize, head: usize) -> Vec<f64> {
        let (d, kv) = (self.d, head / (self.heads / self.kv_heads));
        let at = |x: &[f32], t: usize, heads: usize, h: usize, i: usize| f64::from(x[(t * heads + h) * d + i]);
        let scores: Vec<f64> = (0..=t)
            .map(|s| {
                (0..d).map(|i| at(q, t, self.heads, head, i) * at(k, s, self.kv_heads, kv, i)).sum::<f64>()
                    / (d as f64).sqrt()
            })
            .collect();
        let top = scores.iter().fold(f64::MIN, |a, &b| a.max(b));
        let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
        let total: f64 = weights.iter().sum();
        (0..d)
            .map(|i| weights.iter().enumerate().map(|(s, w)| w * at(v, s, self.kv_heads, kv, i)).sum::<f64>() / total)
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

#[test]
fn close_to_f64_and_equal_on_every_path() {
    for case in CASES {
        let (q, cache, k, v) = case.inputs();
        let mut first = vec![f32::NAN; q.len()];
        attend_on(Isa::Scalar, &cache, &q, case.heads, 0, &mut first);
        for t in 0..case.positions {
            for head in 0..case.heads {
                let exact = case.exact(&q, &k, &v, t, head);
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
    for case in CASES {
        let (q, cache, ..) = case.inputs();
        let row = case.heads * case.d;
        let mut whole = vec![0.0; q.len()];
        attend(&cache, &q, case.heads, 0, &mut whole);
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
