//! Tests of the paged cache and its attention: against f64, of equal bits however the work is cut, and of what must not be read.

use super::RUN;
use super::fused::attend_on;
use super::mass::attention_mass_on;
use super::{BLOCK, KvFormat, PagedLayer, Queries, attend, attention_mass};
use crate::{Isa, Team};
use dsq_quant::{KvGrid, MiniFloat, QParams, QuantArgs, QuantType};
use half::f16;
use proptest::prelude::*;

fn wave(len: usize, seed: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 504.5 - 1.0).collect()
}

fn grid(qtype: QuantType) -> KvGrid {
    // Less than the largest magnitude, so that some values saturate.
    KvGrid::from_absmax(QuantArgs::kv_cache(qtype).unwrap(), 0.9, 0.7).unwrap()
}

fn formats() -> [KvFormat; 6] {
    let codes = [QuantType::Int8, QuantType::Fp8E4M3].map(|qtype| KvFormat::Codes(grid(qtype)));
    let dynamic = [QuantArgs::kv_int8(), QuantArgs::kv_fp8()].map(KvFormat::Dynamic);
    [KvFormat::F32, KvFormat::F16, codes[0], codes[1], dynamic[0], dynamic[1]]
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Keys and values, of heads of the widths `[d, value]`, as a format gives them back.
fn rounded(format: KvFormat, [d, value]: [usize; 2], mut k: Vec<f32>, mut v: Vec<f32>) -> [Vec<f32>; 2] {
    match format {
        KvFormat::F32 => {}
        KvFormat::F16 => k.iter_mut().chain(&mut v).for_each(|x| *x = f16::from_f32(*x).to_f32()),
        KvFormat::Codes(grid) => {
            grid.round(grid.k, &mut k);
            grid.round(grid.v, &mut v);
        }
        KvFormat::Dynamic(args) => {
            let absmax = |x: &[f32]| x.iter().fold(0.0f32, |a, x| a.max(x.abs()));
            for (k, v) in k.chunks_exact_mut(d).zip(v.chunks_exact_mut(value)) {
                let grid = KvGrid::from_absmax(args, absmax(k), absmax(v)).unwrap();
                grid.round(grid.k, k);
                grid.round(grid.v, v);
            }
        }
    }
    [k, v]
}

#[derive(Debug, Clone, Copy)]
struct Case {
    heads: usize,
    kv_heads: usize,
    d: usize,
    value: usize,
    positions: usize,
}

const fn case(heads: usize, kv_heads: usize, d: usize, value: usize, positions: usize) -> Case {
    Case { heads, kv_heads, d, value, positions }
}

/// One kv head, odd widths, groups of 1 to 30 heads (more than a tile has rows), lengths around blocks and runs.
const CASES: [Case; 8] = [
    case(1, 1, 2, 2, 1),
    case(4, 2, 16, 16, 23),
    case(4, 2, 24, 40, 40),
    case(2, 2, 5, 7, 64),
    case(30, 1, 8, 80, 35),
    case(9, 3, 64, 64, RUN + 3),
    case(7, 1, 16, 24, 2 * RUN),
    case(2, 1, 128, 128, 2 * RUN + 17),
];

/// Window and sinks.
const SIGHTS: [(Option<usize>, usize); 9] = [
    (None, 0),
    (None, 5),
    (Some(1), 0),
    (Some(15), 3),
    (Some(16), 0),
    (Some(37), 16),
    (Some(40), RUN + 1),
    (Some(RUN), 0),
    (Some(1000), 4),
];

struct Filled {
    case: Case,
    layer: PagedLayer,
    table: Vec<u32>,
    q: Vec<f32>,
    /// As the format gives them back.
    k: Vec<f32>,
    v: Vec<f32>,
    /// As they were put.
    put: [Vec<f32>; 2],
}

impl Case {
    fn scale(&self) -> f32 {
        1.0 / (self.d as f32).sqrt()
    }

    /// A layer whose unused places are NaN (or the code -1), its table in an order of its own.
    fn filled(&self, format: KvFormat, (window, sinks): (Option<usize>, usize)) -> Filled {
        let blocks = self.positions.div_ceil(BLOCK);
        let mut layer = PagedLayer::new(blocks + 3, self.kv_heads, [self.d, self.value], self.scale(), format)
            .windowed(window)
            .with_sinks(sinks);
        layer.store.as_mut_slice().fill(0xff);
        let table: Vec<u32> = (0..blocks).map(|b| ((b * 7 + 2) % (blocks + 3)) as u32).collect();
        let table = if (blocks + 3).is_multiple_of(7) { (1..=blocks as u32).rev().collect() } else { table };
        let (k, v) =
            (wave(self.positions * self.kv_heads * self.d, 2), wave(self.positions * self.kv_heads * self.value, 3));
        for t in 0..self.positions {
            let (k, v) = (&k[t * self.kv_heads * self.d..], &v[t * self.kv_heads * self.value..]);
            layer.put(&table, t, &k[..self.kv_heads * self.d], &v[..self.kv_heads * self.value]);
        }
        let q = wave(self.positions * self.heads * self.d, 1).iter().map(|x| 3.0 * x).collect();
        let put = [k.clone(), v.clone()];
        let [k, v] = rounded(format, [self.d, self.value], k, v);
        Filled { case: *self, layer, table, q, k, v, put }
    }
}

impl Filled {
    fn outputs(&self) -> usize {
        self.case.heads * self.case.value
    }

    /// All queries in pieces of `chunk`.
    fn attended(&self, isa: Isa, chunk: usize) -> Vec<f32> {
        let (row, wide) = (self.case.heads * self.case.d, self.outputs());
        let mut out = vec![f32::NAN; self.case.positions * wide];
        for past in (0..self.case.positions).step_by(chunk) {
            let end = (past + chunk).min(self.case.positions);
            let sequence = Queries { table: &self.table, past, tokens: end - past };
            let (q, out) = (&self.q[past * row..end * row], &mut out[past * wide..end * wide]);
            attend_on(isa, &self.layer, &[sequence], q, self.case.heads, out);
        }
        out
    }

    fn seen(&self, t: usize) -> Vec<usize> {
        let start = self.layer.window().map_or(0, |w| (t + 1).saturating_sub(w));
        (0..=t).filter(|&s| s < self.layer.sinks() || s >= start).collect()
    }

    /// The weights of `head` at `t`, by position seen.
    fn weights(&self, t: usize, head: usize) -> Vec<f64> {
        let Case { heads, kv_heads, d, .. } = self.case;
        let kv = head / (heads / kv_heads);
        let scores = self.seen(t).into_iter().map(|s| {
            let (q, k) = (&self.q[(t * heads + head) * d..][..d], &self.k[(s * kv_heads + kv) * d..][..d]);
            q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>() * f64::from(self.case.scale())
        });
        let scores: Vec<f64> = scores.collect();
        let top = scores.iter().fold(f64::MIN, |a, &b| a.max(b));
        let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
        let total: f64 = weights.iter().sum();
        weights.iter().map(|w| w / total).collect()
    }

    fn exact(&self, t: usize, head: usize) -> Vec<f64> {
        let Case { heads, kv_heads, value, .. } = self.case;
        let (kv, seen, weights) = (head / (heads / kv_heads), self.seen(t), self.weights(t, head));
        let at = |s: usize, i: usize| f64::from(self.v[(s * kv_heads + kv) * value + i]);
        (0..value).map(|i| weights.iter().zip(&seen).map(|(w, &s)| w * at(s, i)).sum()).collect()
    }
}

#[test]
fn close_to_f64_and_equal_on_every_path() {
    for case in CASES {
        for (i, sight) in SIGHTS.into_iter().enumerate() {
            // All formats without a window, one after another with.
            for format in if i == 0 { formats().to_vec() } else { vec![formats()[i % 6]] } {
                let filled = case.filled(format, sight);
                let first = filled.attended(Isa::Scalar, case.positions);
                // All of the first and of the last positions, a few between (f64 is slow).
                for t in (0..case.positions).filter(|t| *t < 20 || t % 41 == 0 || t + 20 >= case.positions) {
                    for head in 0..case.heads {
                        let exact = filled.exact(t, head);
                        for j in 0..case.value {
                            let got = f64::from(first[(t * case.heads + head) * case.value + j]);
                            // |q| <= 3, |k|, |v| <= 1: a score is off by at most (d + 2) u * 3 sqrt(d), a weight by twice that plus
                            // exp's 2.5e-7 in numerator and denominator each; the two sums add (p + p/16 + 6) u; a merge adds another
                            // exp of a difference, rounded (2.5e-7 + 6 sqrt(d) u), and 3 u, also in both.
                            let u = 2f64.powi(-24);
                            let root = (case.d as f64).sqrt();
                            let score = (case.d as f64 + 2.0) * u * 3.0 * root;
                            let (p, merges) = (t as f64 + 1.0, (t / RUN) as f64);
                            let bound = 2.0 * (2.0 * score + 2.5e-7)
                                + (p + p / 16.0 + 6.0) * u
                                + 2.0 * merges * (2.5e-7 + 6.0 * root * u + 3.0 * u);
                            let error = (got - exact[j]).abs();
                            assert!(error <= bound, "{case:?} {format:?} {sight:?} t {t}: {got} against {}", exact[j]);
                        }
                    }
                }
                for isa in Isa::supported() {
                    let got = filled.attended(isa, case.positions);
                    assert!(same_bits(&got, &first), "{case:?} {format:?} {sight:?} {isa:?}");
                }
            }
        }
    }
}

/// A whole prompt, pieces of it, token by token; one, two and three threads, on a team and on rayon.
#[test]
fn pieces_and_threads_change_no_bit() {
    for (i, (case, sight)) in CASES.into_iter().flat_map(|c| SIGHTS.map(|s| (c, s))).enumerate() {
        let filled = case.filled(formats()[i % 6], sight);
        let isa = Isa::supported()[i % Isa::supported().len()];
        let whole = filled.attended(isa, case.positions);
        for chunk in [1, 2, 5, 16, case.positions.div_ceil(2)] {
            assert!(same_bits(&filled.attended(isa, chunk), &whole), "{case:?} {sight:?} {isa:?} pieces of {chunk}");
        }
        // (Threads are slow to start.)
        for threads in if i % 3 == 0 { vec![1, 2, 3] } else { vec![] } {
            let run = || [case.positions, 7, 1].map(|chunk| filled.attended(Isa::detect(), chunk));
            let team = Team::new(threads).unwrap().enter(run);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(run);
            for got in team.iter().chain(&pool) {
                assert!(same_bits(got, &whole), "{case:?} {sight:?} {threads} threads");
            }
        }
    }
}

/// f16 and codes are an f32 cache of the same values, bit for bit; and of one run, the bits of the cache of one sequence.
#[test]
fn every_format_gives_the_bits_of_floats() {
    for (case, format) in CASES.into_iter().flat_map(|c| formats().map(|f| (c, f))) {
        let filled = case.filled(format, (None, 0));
        let mut float = case.filled(KvFormat::F32, (None, 0));
        let (kw, vw) = (case.kv_heads * case.d, case.kv_heads * case.value);
        for t in 0..case.positions {
            float.layer.put(&float.table, t, &filled.k[t * kw..][..kw], &filled.v[t * vw..][..vw]);
        }
        for chunk in [1, case.positions] {
            let (got, want) = (filled.attended(Isa::detect(), chunk), float.attended(Isa::Scalar, chunk));
            assert!(same_bits(&got, &want), "{case:?} {format:?} {chunk}");
        }
    }
}

/// Sequences of a batch do not know each other: prefill and single tokens, short and long, of shared blocks, none among them.
#[test]
fn a_batch_gives_the_bits_of_its_sequences() {
    for (case, sight) in [(CASES[5], (None, 0)), (CASES[7], (Some(37), 16)), (CASES[2], (None, 0))] {
        for format in formats() {
            let filled = case.filled(format, sight);
            let n = case.positions;
            let whole = filled.attended(Isa::Scalar, n);
            let (row, wide) = (case.heads * case.d, filled.outputs());
            let cuts = [(n - 1, 1), (0, n), (3, 0), (n / 2, 9), (0, 1), (17, 2), (n - 5, 5), (n / 3, n / 3)];
            let sequences = cuts.map(|(past, tokens)| Queries { table: &filled.table, past, tokens });
            let pick = |x: &[f32], width: usize| -> Vec<f32> {
                cuts.iter().flat_map(|&(past, tokens)| x[past * width..(past + tokens) * width].to_vec()).collect()
            };
            let (q, want) = (pick(&filled.q, row), pick(&whole, wide));
            for threads in [1, 2] {
                let mut out = vec![f32::NAN; want.len()];
                Team::new(threads).unwrap().enter(|| {
                    attend(&filled.layer, &sequences, &q, case.heads, &mut out);
                });
                assert!(same_bits(&out, &want), "{case:?} {format:?} {threads} threads");
            }
        }
    }
    let layer = PagedLayer::new(1, 1, [4, 4], 1.0, KvFormat::F16);
    attend(&layer, &[], &[], 2, &mut []);
}

/// Blocks out of sight are not read: their entries name no block, and what lies in them is NaN.
#[test]
fn what_is_out_of_sight_is_not_read() {
    for (case, format) in [CASES[5], CASES[7]].into_iter().flat_map(|c| formats().map(|f| (c, f))) {
        for sight in [(Some(1), 0), (Some(20), 1), (Some(33), 20), (Some(RUN), 17)] {
            let mut filled = case.filled(format, sight);
            let whole = filled.attended(Isa::Scalar, case.positions);
            let (row, wide) = (case.heads * case.d, filled.outputs());
            for past in [case.positions - 1, case.positions - 20] {
                let (table, mut holes) = (filled.table.clone(), filled.table.clone());
                let first = (past + 1).saturating_sub(sight.0.unwrap()) / BLOCK;
                for b in (sight.1.div_ceil(BLOCK)..first).chain(case.positions.div_ceil(BLOCK)..holes.len()) {
                    holes[b] = u32::MAX;
                }
                assert!(sight.0 >= Some(RUN) || holes.contains(&u32::MAX));
                // The same blocks hold NaN meanwhile.
                let kept = filled.layer.clone();
                let bytes = filled.layer.block_bytes();
                for (&from, _) in table.iter().zip(&holes).filter(|&(_, &h)| h == u32::MAX) {
                    filled.layer.store.as_mut_slice()[from as usize * bytes..][..bytes].fill(0xff);
                }
                for isa in Isa::supported() {
                    let mut out = vec![f32::NAN; (case.positions - past) * wide];
                    let sequence = Queries { table: &holes, past, tokens: case.positions - past };
                    attend_on(isa, &filled.layer, &[sequence], &filled.q[past * row..], case.heads, &mut out);
                    assert!(same_bits(&out, &whole[past * wide..]), "{case:?} {format:?} {sight:?} {isa:?}");
                }
                filled.layer = kept;
            }
        }
    }
}

#[test]
#[should_panic(expected = "block 4294967295 of")]
fn a_block_in_sight_must_exist() {
    let filled = CASES[5].filled(KvFormat::F16, (Some(20), 1));
    let table = vec![u32::MAX; filled.table.len()];
    let sequence = Queries { table: &table, past: 100, tokens: 1 };
    let (q, mut out) = (vec![0.0; 9 * 64], vec![0.0; 9 * 64]);
    attend(&filled.layer, &[sequence], &q, 9, &mut out);
}

/// Two sequences share a prefix; one writes on in a copy of its last block, and the other is what it was.
#[test]
fn a_copied_block_is_written_alone() {
    let case = CASES[5];
    for format in formats() {
        let mut filled = case.filled(format, (None, 0));
        let whole = filled.attended(Isa::detect(), case.positions);
        let last = filled.table.len() - 1;
        let free = (0..filled.layer.blocks() as u32).find(|b| !filled.table.contains(b)).unwrap();
        let mut other = filled.table.clone();
        other[last] = free;
        filled.layer.copy_block(filled.table[last], free);
        let shared = std::mem::replace(&mut filled.table, other);
        assert!(same_bits(&filled.attended(Isa::detect(), case.positions), &whole), "the copy holds the same");
        let (k, v) = (wave(case.kv_heads * case.d, 8), wave(case.kv_heads * case.value, 9));
        filled.layer.put(&filled.table, case.positions - 1, &k, &v);
        assert!(!same_bits(&filled.attended(Isa::detect(), case.positions), &whole));
        filled.table = shared;
        assert!(same_bits(&filled.attended(Isa::detect(), case.positions), &whole));
    }
}

#[test]
fn values_without_a_form_are_found() {
    let [f32, f16, codes @ ..] = formats();
    let values = [1.0, -65504.0, 65519.99, f32::MIN_POSITIVE];
    for format in formats() {
        assert_eq!(format.refused(&values), None);
    }
    for (x, by_codes) in [(65520.0, false), (-1e30, false), (f32::INFINITY, true), (f32::NAN, true)] {
        let with = [0.0, x, 1.0];
        assert_eq!(f32.refused(&with), None);
        assert_eq!(f16.refused(&with).map(f32::to_bits), Some(x.to_bits()));
        assert!(codes.iter().all(|codes| codes.refused(&with).is_some() == by_codes));
    }
    // The largest that is not refused stays finite.
    assert_eq!(half::f16::from_f32(65519.99).to_f32(), 65504.0);
    let mut layer = PagedLayer::new(1, 1, [1, 1], 1.0, f16);
    layer.put(&[0], 0, &[1.0], &[-65519.99]);
    let mut out = [0.0];
    attend(&layer, &[Queries { table: &[0], past: 0, tokens: 1 }], &[1.0], 1, &mut out);
    assert_eq!(out, [-65504.0]);
}

#[test]
fn masses_are_the_weights_that_positions_receive() {
    for (i, (case, sight)) in CASES.into_iter().flat_map(|c| SIGHTS.map(|s| (c, s))).enumerate() {
        let filled = case.filled(formats()[i % 6], sight);
        let tokens = case.positions.min(11);
        let past = case.positions - tokens;
        let queries = Queries { table: &filled.table, past, tokens };
        let mut mass = vec![f32::NAN; tokens * case.positions];
        let q = &filled.q[past * case.heads * case.d..];
        let entropies = attention_mass(&filled.layer, queries, q, case.heads, &mut mass);
        for (t, mass) in mass.chunks_exact(case.positions).enumerate() {
            // |q| <= 3, |k| <= 1: a score and its distance to the largest are off by `s` together, a weight by exp's error and its division
            // as well; the sums over positions and heads come on top.
            let (u, root, p) = (2f64.powi(-24), (case.d as f64).sqrt(), (past + t + 1) as f64);
            let s = 2.0 * (case.d as f64 + 3.0) * u * 3.0 * root;
            let bound = 2.0 * (s + 2.5e-7) + (p / 16.0 + 8.0 + case.heads as f64) * u;
            let mut want = vec![0.0f64; case.positions];
            for head in 0..case.heads {
                let (seen, weights) = (filled.seen(past + t), filled.weights(past + t, head));
                seen.iter().zip(&weights).for_each(|(&s, w)| want[s] += w);
                let entropy: f64 = weights.iter().map(|w| -w * w.ln()).sum();
                // Each weight's part changes by its own error times what the logarithm may be: at most 6 sqrt(d), the span of the scores,
                // and ln p.
                let off = (entropy - f64::from(entropies[t * case.heads + head])).abs();
                assert!(off <= bound * (6.0 * root + p.ln() + 2.0), "{case:?} {sight:?}: {off:e}");
            }
            for (got, want) in mass.iter().zip(&want) {
                let off = (f64::from(*got) - want).abs();
                assert!(off <= bound * want, "{case:?} {sight:?}: {got} against {want}");
            }
        }
    }
}

/// Kept positions are moved bit for bit, whatever the tables, widths and formats: attention over them is that over a cache that never held
/// another, and blocks of others stay as they are.
#[test]
fn kept_positions_are_moved_bit_for_bit() {
    for (case, format) in CASES[1..7].iter().flat_map(|c| formats().map(|f| (*c, f))) {
        let mut filled = case.filled(format, (None, 0));
        let n = case.positions;
        let before = filled.layer.store.as_slice().to_vec();
        for kept in [
            (0..n).collect(),
            (0..n).filter(|p| p % 3 != 1).collect(),
            (0..n).filter(|p| *p < 2 || *p + 5 > n || p % 7 == 0).collect(),
            vec![n - 1],
            vec![],
        ] {
            let kept: Vec<usize> = kept;
            filled.layer.store.as_mut_slice().copy_from_slice(&before);
            filled.layer.keep(&filled.table, &kept);
            let (k, v) = (case.kv_heads * case.d, case.kv_heads * case.value);
            let mut want =
                PagedLayer::new(filled.layer.blocks(), case.kv_heads, [case.d, case.value], case.scale(), format);
            for (i, &p) in kept.iter().enumerate() {
                let [keys, values] = &filled.put;
                want.put(&filled.table, i, &keys[p * k..][..k], &values[p * v..][..v]);
            }
            for s in 0..kept.len() {
                let stored = |layer: &PagedLayer| -> Vec<u8> {
                    let (block, lane, n) = (filled.table[s / BLOCK] as usize, s % BLOCK, format.bytes());
                    let block = &layer.store.as_slice()[block * layer.block_bytes()..][..layer.block_bytes()];
                    let of_head = |head: &[u8]| -> Vec<u8> {
                        let keys = (0..case.d).flat_map(|i| head[(i * BLOCK + lane) * n..][..n].to_vec());
                        let at = layer.key_bytes() + lane * layer.padded() * n;
                        let scales = head[layer.scales_at()..].chunks_exact(4 * BLOCK);
                        let scales = scales.flat_map(|of| of[4 * lane..][..4].to_vec());
                        keys.chain(head[at..][..case.value * n].to_vec()).chain(scales).collect()
                    };
                    block.chunks_exact(layer.head_bytes()).flat_map(of_head).collect()
                };
                assert_eq!(stored(&filled.layer), stored(&want), "{case:?} {format:?} slot {s}");
            }
            // Nobody else's block is touched.
            let bytes = filled.layer.block_bytes();
            for block in (0..filled.layer.blocks()).filter(|b| !filled.table.contains(&(*b as u32))) {
                let at = block * bytes..(block + 1) * bytes;
                assert_eq!(filled.layer.store.as_slice()[at.clone()], before[at]);
            }
        }
    }
}

#[test]
#[should_panic(expected = "in increasing order")]
fn kept_positions_are_in_order() {
    PagedLayer::new(1, 1, [1, 1], 1.0, KvFormat::F32).keep(&[0], &[2, 1]);
}

/// A query's masses and entropies depend on nothing beside it: other queries, threads, path.
#[test]
fn masses_of_one_query_are_those_of_many() {
    for (i, (case, sight)) in CASES.into_iter().flat_map(|c| SIGHTS.map(|s| (c, s))).enumerate() {
        let filled = case.filled(formats()[i % 6], sight);
        let (n, row) = (case.positions, case.heads * case.d);
        let tokens = n.min(11);
        let past = n - tokens;
        let queries = |past, tokens| Queries { table: &filled.table, past, tokens };
        let q = &filled.q[past * row..];
        let mut whole = vec![0.0; tokens * n];
        let team = Team::new(3).unwrap();
        let entropies = team.enter(|| attention_mass(&filled.layer, queries(past, tokens), q, case.heads, &mut whole));
        for isa in Isa::supported() {
            let mut same = vec![f32::NAN; whole.len()];
            let e = attention_mass_on(isa, &filled.layer, queries(past, tokens), q, case.heads, &mut same);
            assert!(same_bits(&e, &entropies) && same_bits(&same, &whole), "{case:?} {sight:?} {isa:?}");
        }
        for t in 0..tokens {
            let mut one = vec![0.0; past + t + 1];
            let e = attention_mass(&filled.layer, queries(past + t, 1), &q[t * row..][..row], case.heads, &mut one);
            assert!(same_bits(&e, &entropies[t * case.heads..][..case.heads]));
            assert!(same_bits(&one, &whole[t * n..][..past + t + 1]), "{case:?} {sight:?} query {t}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// Any sight, length, cut and format: every path, whole and cut, gives the same bits.
    #[test]
    fn any_cut_of_any_sequence(
        positions in 1usize..700, cut in 1usize..700, window in prop::option::of(0usize..600), sinks in 0usize..300,
        kv_heads in 1usize..3, group in 1usize..5, d in 1usize..20, value in 1usize..40, format in 0usize..4,
    ) {
        let case = case(kv_heads * group, kv_heads, d, value, positions);
        let filled = case.filled(formats()[format], (window, sinks));
        let (cut, wide, row) = (cut.min(positions), filled.outputs(), case.heads * d);
        let whole = filled.attended(Isa::detect(), positions);
        prop_assert!(whole.iter().all(|x| x.is_finite()));
        prop_assert!(same_bits(&filled.attended(Isa::detect(), cut), &whole));
        let past = positions - cut.min(8);
        let last = Queries { table: &filled.table, past, tokens: positions - past };
        let mut out = vec![f32::NAN; last.tokens * wide];
        attend_on(Isa::Scalar, &filled.layer, &[last], &filled.q[past * row..], case.heads, &mut out);
        prop_assert!(same_bits(&out, &whole[past * wide..]));
    }
}

/// Every code that a cache can hold, as a value and as a key: it is stored as itself and read as its value on every path.
#[test]
fn every_code_is_stored_and_read() {
    for qtype in [QuantType::Int8, QuantType::Fp8E4M3] {
        let grid = KvGrid::from_absmax(QuantArgs::kv_cache(qtype).unwrap(), 3.0, 0.01).unwrap();
        let codes: Vec<u8> = (0..=255).filter(|&c| qtype == QuantType::Int8 || MiniFloat::E4M3.is_finite(c)).collect();
        let d = codes.len();
        assert_eq!(d, if qtype == QuantType::Int8 { 256 } else { 254 });
        let value = |p| codes.iter().map(|&c| grid.args.dequantize(c as i8, p)).collect::<Vec<f32>>();
        let (k, v, zeros) = (value(grid.k), value(grid.v), vec![0.0; d]);
        let filled = |format| {
            let mut layer = PagedLayer::new(1, 1, [d, d], 1.0 / (d as f32).sqrt(), format);
            layer.put(&[0], 0, &k, &v);
            layer.put(&[0], 1, &zeros, &zeros);
            layer
        };
        let (codes_of, float) = (filled(KvFormat::Codes(grid)), filled(KvFormat::F32));
        let on = |isa, layer: &PagedLayer, past, q: &[f32]| {
            let mut out = vec![f32::NAN; d];
            attend_on(isa, layer, &[Queries { table: &[0], past, tokens: 1 }], q, 1, &mut out);
            out
        };
        for isa in Isa::supported() {
            // One visible position has weight 1: the output is the value.
            assert_eq!(on(isa, &codes_of, 0, &vec![0.1; d]), v, "{qtype:?} {isa:?}");
            // The keys: each code against a unit query of its own; the other position has the key 0, so the two weights tell it.
            for i in 0..d {
                let mut q = vec![0.0; d];
                q[i] = 2.0;
                let want = on(Isa::Scalar, &float, 1, &q);
                assert_eq!(on(isa, &codes_of, 1, &q), want, "{qtype:?} {isa:?} code {:#x}", codes[i]);
            }
        }
    }
}

/// Codes are those of the reference: around every value of the grids and every tie, at scales that round, and far outside.
#[test]
fn codes_are_those_of_the_reference() {
    for args in [QuantArgs::kv_int8(), QuantArgs::kv_fp8()] {
        let values: Vec<f32> = (0..=255u8).map(|b| args.code_value(b as i8, 0)).filter(|v| v.is_finite()).collect();
        let mut values: Vec<f32> = values.iter().flat_map(|a| values.iter().map(move |b| (a + b) / 2.0)).collect();
        values.extend([0.0, -0.0, f32::MIN_POSITIVE, f32::from_bits(1), 1e-9, 1e30, -1e30, f32::MAX, f32::MIN]);
        for scale in [1.0, 0.0117, 3.7e-5, 1.7e5, f32::MIN_POSITIVE, 1e30] {
            let p = QParams { scale, zero: 0 };
            let near = values.iter().flat_map(|v| {
                let x = v * scale;
                [x, f32::from_bits(x.to_bits() + 1), f32::from_bits(x.to_bits().saturating_sub(1))]
            });
            let x: Vec<f32> = near.filter(|x| x.is_finite()).collect();
            let mut got = vec![[0u8]; x.len()];
            super::paged::codes(args, p)(&x, &mut got);
            for (x, [got]) in x.iter().zip(got) {
                assert_eq!(got as i8, args.quantize(*x, p), "{:?}: {x:e} at {scale:e}", args.qtype);
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
        let qtype = if fp8 { QuantType::Fp8E4M3 } else { QuantType::Int8 };
        let grid = KvGrid::from_absmax(QuantArgs::kv_cache(qtype).unwrap(), scale, small.abs()).unwrap();
        let table: Vec<u32> = (0..rows.len().div_ceil(BLOCK) as u32).rev().collect();
        let new = |format| PagedLayer::new(table.len(), 2, [24, 24], 0.2, format);
        let (mut codes, mut float) = (new(KvFormat::Codes(grid)), new(KvFormat::F32));
        let (mut dynamic, mut wide) = (new(KvFormat::Dynamic(grid.args)), new(KvFormat::F32));
        for (t, row) in rows.iter().enumerate().rev() {
            let mut k: Vec<f32> = row.iter().map(|x| x * 1e-30 * scale).collect();
            let mut v: Vec<f32> = row.iter().map(|x| x * small).collect();
            codes.put(&table, t, row, &k);
            codes.put(&table, t, &k, &v);
            dynamic.put(&table, t, row, &k);
            dynamic.put(&table, t, &k, &v);
            let [own_k, own_v] = rounded(KvFormat::Dynamic(grid.args), [24, 24], k.clone(), v.clone());
            wide.put(&table, t, &own_k, &own_v);
            grid.round(grid.k, &mut k);
            grid.round(grid.v, &mut v);
            float.put(&table, t, &k, &v);
        }
        let q = wave(4 * 24, rows.len());
        let queries = [Queries { table: &table, past: rows.len() - 1, tokens: 1 }];
        let (mut a, mut b) = (vec![f32::NAN; q.len()], vec![f32::NAN; q.len()]);
        for (of, float) in [(&codes, &float), (&dynamic, &wide)] {
            attend_on(Isa::Scalar, float, &queries, &q, 4, &mut a);
            for isa in Isa::supported() {
                attend_on(isa, of, &queries, &q, 4, &mut b);
                prop_assert!(same_bits(&a, &b), "{:?}", isa);
            }
        }
    }
}
