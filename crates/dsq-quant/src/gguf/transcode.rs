//! From integer codes to blocks of GGUF and back without a second rounding: codes stay, scales stay where f16 holds them. Not
//! the choice of codes (see `encode.rs`), and not the K-quants, whose scales are products.
//!
//! What both sides share is a run of 32 values that are whole multiples of one step. A grid that can hold these multiples gets
//! them; only the step, and the minimum of `Q4_1`, may have to be rounded to f16. Whether anything was lost is told by
//! comparing the values.

use super::{GgufGrid, f16_at};
use crate::{FloatType, Granularity, Mapping, QuantArgs, QuantType, QuantizedMatrix};
use half::f16;

/// Values of a run: the block of every grid here.
const LEN: usize = 32;

/// 32 values that are whole multiples of a step.
struct Multiples {
    step: f32,
    of: [i32; LEN],
    /// The unsigned code that stands for the value 0 in the source, so that `of + zero` are the source's own codes.
    zero: i32,
}

impl Multiples {
    /// The same values, the step not negative.
    fn with_positive_step(mut self) -> Self {
        if self.step < 0.0 {
            self.step = -self.step;
            self.of.iter_mut().for_each(|v| *v = -*v);
        }
        self
    }

    fn range(&self) -> (i32, i32) {
        self.of.iter().fold((i32::MAX, i32::MIN), |(lo, hi), &v| (lo.min(v), hi.max(v)))
    }
}

impl GgufGrid {
    /// The codes of `matrix` as blocks of this grid, row by row: `Q4_0`, `Q5_0` and `Q8_0` where every code less its zero point
    /// fits (-8..8, -16..16, -128..128, one end of it excluded in each block), `Q4_1` where 16 neighbours hold them. Scales and
    /// minima are rounded to f16: equal values need `scale`, and for `Q4_1` `-zero * scale`, to be f16 numbers.
    ///
    /// `None` when a block does not fit or would cross a scale, for float codes, and for the other grids.
    pub fn from_codes(self, matrix: &QuantizedMatrix) -> Option<Vec<u8>> {
        let args = &matrix.args;
        if args.qtype.float().is_some() || !matrix.k.is_multiple_of(LEN) {
            return None;
        }
        let mut bytes = Vec::with_capacity(matrix.codes.len() / LEN * self.block_bytes());
        for (scale, run) in args.runs(matrix.n, matrix.k) {
            if !run.len().is_multiple_of(LEN) {
                return None;
            }
            let p = matrix.qparams(scale);
            for codes in matrix.codes[run].chunks_exact(LEN) {
                let of = std::array::from_fn(|i| i32::from(codes[i]) - p.zero);
                self.put(&Multiples { step: p.scale, of, zero: p.zero - args.qtype.qmin() }, &mut bytes)?;
            }
        }
        Some(bytes)
    }

    /// Blocks of another grid as blocks of this one: the same multiples of the same steps. `None` as in
    /// [`GgufGrid::from_codes`], and for bytes that are no whole number of blocks.
    pub fn from_blocks(self, other: GgufGrid, blocks: &[u8]) -> Option<Vec<u8>> {
        if self == other {
            return Some(blocks.to_vec());
        }
        if other.block_len() != LEN || !blocks.len().is_multiple_of(other.block_bytes()) {
            return None;
        }
        let mut bytes = Vec::with_capacity(blocks.len() / other.block_bytes() * self.block_bytes());
        for block in blocks.chunks_exact(other.block_bytes()) {
            self.put(&other.multiples(block)?, &mut bytes)?;
        }
        Some(bytes)
    }

    /// The blocks of an `[n, k]` matrix as integer codes with an f16 scale for each 32: `Q4_0` and `Q4_1` as INT4 (symmetric
    /// if no block needs a zero point), `Q5_0`, `Q5_1` and `Q8_0` as symmetric INT8. The values are equal but for minima of `Q4_1`
    /// and `Q5_1` that are no whole multiple of the step (taken to the nearest), or that lie too far from 0.
    ///
    /// `Q4_0` has steps of either sign and reaches -8 steps: with a negative step that is +8 positive ones, which INT4 holds with the
    /// zero point -1.
    ///
    /// `None` for K-quants and for another number of bytes.
    pub fn to_codes(self, blocks: &[u8], n: usize, k: usize) -> Option<QuantizedMatrix> {
        if self.block_len() != LEN || !k.is_multiple_of(LEN) || blocks.len() != n * k / LEN * self.block_bytes() {
            return None;
        }
        let four = matches!(self, GgufGrid::Q4_0 | GgufGrid::Q4_1);
        let qtype = if four { QuantType::Int4 } else { QuantType::Int8 };
        let (qmin, qmax) = (qtype.qmin(), qtype.qmax());
        let (mut codes, mut scales, mut zeros) = (Vec::with_capacity(n * k), Vec::new(), Vec::new());
        for block in blocks.chunks_exact(self.block_bytes()) {
            let m = self.multiples(block)?.with_positive_step();
            let (lo, hi) = m.range();
            // Of the zero points that keep every code in range, the source's own or the next to it.
            let zero = match four {
                true => (m.zero + qmin).min(qmax - hi).max(qmin - lo).clamp(qmin, qmax),
                false => 0,
            };
            codes.extend(m.of.iter().map(|v| (v + zero).clamp(qmin, qmax) as i8));
            scales.push(if m.step == 0.0 { FloatType::F16.epsilon() } else { m.step });
            zeros.push(zero as i8);
        }
        let mapping = if zeros.iter().all(|&z| z == 0) { Mapping::Symmetric } else { Mapping::Asymmetric };
        if mapping == Mapping::Symmetric {
            zeros.clear();
        }
        let args = QuantArgs { qtype, mapping, ..QuantArgs::int4(Granularity::PerGroup(LEN), FloatType::F16) };
        let matrix = QuantizedMatrix { args, n, k, codes, scales, zeros, global_scale: None };
        matrix.validate().is_ok().then_some(matrix)
    }

    /// A block of 32 as multiples of its step; a minimum becomes the nearest multiple. `None` for K-quants.
    fn multiples(self, block: &[u8]) -> Option<Multiples> {
        let high = |at: usize, i: usize| i32::from(block[at + i / 8] >> (i % 8) & 1) << 4;
        let low = |at: usize, i: usize| i32::from(block[at + i % 16] >> (4 * (i / 16)) & 15);
        let (zero, codes): (i32, [i32; LEN]) = match self {
            GgufGrid::Q4_0 => (8, std::array::from_fn(|i| low(2, i))),
            GgufGrid::Q5_0 => (16, std::array::from_fn(|i| low(6, i) | high(2, i))),
            GgufGrid::Q8_0 => (0, std::array::from_fn(|i| i32::from(block[2 + i] as i8))),
            GgufGrid::Q4_1 => (0, std::array::from_fn(|i| low(4, i))),
            GgufGrid::Q5_1 => (0, std::array::from_fn(|i| low(8, i) | high(4, i))),
            GgufGrid::Q4K | GgufGrid::Q5K | GgufGrid::Q6K => return None,
        };
        let mut out = Multiples { step: f16_at(block, 0), of: codes, zero };
        if matches!(self, GgufGrid::Q4_1 | GgufGrid::Q5_1) {
            let min = f16_at(block, 2);
            if out.step == 0.0 {
                // Every value is the minimum: one step of it.
                return Some(Multiples { step: min, of: [i32::from(min != 0.0); LEN], zero: 0 });
            }
            // Farther from 0 than any code could be is all the same.
            out.zero = (-min / out.step).clamp(-65536.0, 65536.0).round_ties_even() as i32;
        }
        out.of.iter_mut().for_each(|v| *v -= out.zero);
        Some(out)
    }

    /// Appends a block that holds these multiples; `None` when they do not fit or the step overflows f16.
    fn put(self, m: &Multiples, bytes: &mut Vec<u8>) -> Option<()> {
        let (lo, hi) = m.range();
        let stored = f16::from_f32(m.step);
        if !stored.is_finite() {
            return None;
        }
        let half = match self {
            GgufGrid::Q4_0 => 8,
            GgufGrid::Q5_0 => 16,
            GgufGrid::Q8_0 => 128,
            GgufGrid::Q4_1 => {
                let zero = if lo + m.zero >= 0 && hi + m.zero <= 15 { m.zero } else { -lo };
                let min = f16::from_f32(-(zero as f32) * stored.to_f32());
                if hi + zero > 15 || !min.is_finite() {
                    return None;
                }
                bytes.extend(stored.to_le_bytes());
                bytes.extend(min.to_le_bytes());
                bytes.extend((0..LEN / 2).map(|j| (m.of[j] + zero) as u8 | ((m.of[j + 16] + zero) as u8) << 4));
                return Some(());
            }
            GgufGrid::Q5_1 | GgufGrid::Q4K | GgufGrid::Q5K | GgufGrid::Q6K => return None,
        };
        // The range is -half..half; with the step negated it is -half + 1 ..= half.
        let (stored, sign) = match (lo >= -half && hi < half, lo > -half && hi <= half) {
            (true, _) => (stored, 1),
            (false, true) => (-stored, -1),
            (false, false) => return None,
        };
        let code = |i: usize| sign * m.of[i] + half;
        bytes.extend(stored.to_le_bytes());
        match self {
            GgufGrid::Q8_0 => bytes.extend((0..LEN).map(|i| (code(i) - half) as i8 as u8)),
            _ => {
                if self == GgufGrid::Q5_0 {
                    let high = (0..LEN).fold(0u32, |bits, i| bits | (code(i) as u32 >> 4) << i);
                    bytes.extend(high.to_le_bytes());
                }
                bytes.extend((0..LEN / 2).map(|j| (code(j) & 15) as u8 | ((code(j + 16) & 15) as u8) << 4));
            }
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_values::normal;

    fn values(grid: GgufGrid, bytes: &[u8]) -> Vec<f32> {
        let mut out = vec![f32::NAN; bytes.len() / grid.block_bytes() * grid.block_len()];
        grid.dequantize(bytes, &mut out).unwrap();
        out
    }

    fn quantized(qtype: QuantType, mapping: Mapping, granularity: Granularity, dtype: FloatType) -> QuantizedMatrix {
        let args = QuantArgs { qtype, mapping, ..QuantArgs::int4(granularity, dtype) };
        let w: Vec<f32> = normal(24 * 128, 3).iter().map(|v| v * 0.05 + 0.01).collect();
        QuantizedMatrix::quantize(&w, 24, 128, args).unwrap()
    }

    #[test]
    fn integer_codes_with_f16_scales_become_blocks_of_equal_values() {
        use Mapping::{Asymmetric, Symmetric};
        use QuantType::{Int2, Int3, Int4, Int8};
        for granularity in [32, 64, 128].map(Granularity::PerGroup).into_iter().chain([Granularity::PerChannel]) {
            for (qtype, mapping, grids) in [
                (Int4, Symmetric, &[GgufGrid::Q4_0, GgufGrid::Q4_1, GgufGrid::Q5_0, GgufGrid::Q8_0][..]),
                (Int3, Symmetric, &[GgufGrid::Q4_0, GgufGrid::Q8_0]),
                (Int2, Asymmetric, &[GgufGrid::Q4_0, GgufGrid::Q8_0]),
                (Int8, Symmetric, &[GgufGrid::Q8_0]),
                (Int4, Asymmetric, &[GgufGrid::Q5_0, GgufGrid::Q8_0]),
            ] {
                let matrix = quantized(qtype, mapping, granularity, FloatType::F16);
                for grid in grids {
                    let blocks = grid.from_codes(&matrix).unwrap();
                    assert_eq!(values(*grid, &blocks), matrix.dequantize(), "{qtype:?} {granularity:?} {grid:?}");
                }
            }
        }
        // Codes are kept: nibble j of a Q4_0 block is code + 8, a byte of Q8_0 the code.
        let four = quantized(Int4, Symmetric, Granularity::PerGroup(32), FloatType::F16);
        let blocks = GgufGrid::Q4_0.from_codes(&four).unwrap();
        assert!((0..16).all(|j| i32::from(blocks[2 + j] & 15) - 8 == i32::from(four.codes[j])));
        let eight = quantized(Int8, Symmetric, Granularity::PerGroup(32), FloatType::F16);
        let blocks = GgufGrid::Q8_0.from_codes(&eight).unwrap();
        assert!((0..32).all(|j| blocks[2 + j] as i8 == eight.codes[j]));
    }

    #[test]
    fn a_scale_or_a_minimum_that_f16_does_not_hold_is_the_only_loss() {
        let four = quantized(QuantType::Int4, Mapping::Symmetric, Granularity::PerGroup(32), FloatType::F32);
        let blocks = GgufGrid::Q4_0.from_codes(&four).unwrap();
        let (got, want) = (values(GgufGrid::Q4_0, &blocks), four.dequantize());
        assert_ne!(got, want);
        assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() <= w.abs() / 2048.0));
        // bf16 scales of ordinary size are f16 numbers.
        let four = quantized(QuantType::Int4, Mapping::Symmetric, Granularity::PerGroup(32), FloatType::Bf16);
        assert_eq!(values(GgufGrid::Q4_0, &GgufGrid::Q4_0.from_codes(&four).unwrap()), four.dequantize());
        // Q4_1: exact where -zero * scale is an f16 number, as it is for a scale of 0.25.
        let mut four = quantized(QuantType::Int4, Mapping::Asymmetric, Granularity::PerGroup(32), FloatType::F16);
        let blocks = GgufGrid::Q4_1.from_codes(&four).unwrap();
        assert_ne!(values(GgufGrid::Q4_1, &blocks), four.dequantize());
        four.scales.fill(0.25);
        let blocks = GgufGrid::Q4_1.from_codes(&four).unwrap();
        assert_eq!(values(GgufGrid::Q4_1, &blocks), four.dequantize());
        assert!((0..16).all(|j| i32::from(blocks[4 + j] & 15) - 8 == i32::from(four.codes[j])));
    }

    #[test]
    fn what_does_not_fit_is_no_block() {
        let eight = quantized(QuantType::Int8, Mapping::Symmetric, Granularity::PerGroup(32), FloatType::F16);
        let narrow = quantized(QuantType::Int4, Mapping::Symmetric, Granularity::PerGroup(16), FloatType::F16);
        let args = QuantArgs::fp8(Granularity::PerChannel, FloatType::F16);
        let float = QuantizedMatrix::quantize(&normal(64, 1), 2, 32, args).unwrap();
        let mut large = quantized(QuantType::Int4, Mapping::Symmetric, Granularity::PerGroup(32), FloatType::Bf16);
        large.scales.fill(131_072.0);
        for grid in GgufGrid::ALL {
            assert!(grid == GgufGrid::Q8_0 || grid.from_codes(&eight).is_none(), "{grid:?}");
            for matrix in [&narrow, &float, &large] {
                assert!(grid.from_codes(matrix).is_none(), "{grid:?}");
            }
        }
        assert!(GgufGrid::Q4K.to_codes(&[0; 144], 1, 256).is_none());
        assert!(GgufGrid::Q4_0.to_codes(&[0; 17], 1, 32).is_none());
        assert!(GgufGrid::Q8_0.from_blocks(GgufGrid::Q4_0, &[0; 17]).is_none());
    }

    #[test]
    fn blocks_become_codes_of_equal_values_and_the_same_blocks_again() {
        let w = normal(32 * 300, 5);
        for grid in [GgufGrid::Q4_0, GgufGrid::Q5_0, GgufGrid::Q8_0] {
            let mut blocks = grid.quantize(&w).unwrap();
            blocks.extend(grid.quantize(&[0.0; 32]).unwrap());
            let matrix = grid.to_codes(&blocks, 7, 43 * 32).unwrap();
            assert_eq!(matrix.dequantize(), values(grid, &blocks), "{grid:?}");
            assert_eq!(matrix.args.mapping == Mapping::Asymmetric, grid == GgufGrid::Q4_0, "either sign of a step");
            let back = grid.from_codes(&matrix).unwrap();
            // The zero block has another scale now, nothing else differs.
            let last = blocks.len() - grid.block_bytes();
            assert_eq!(values(grid, &back), values(grid, &blocks), "{grid:?}");
            assert_eq!(back[..last], blocks[..last], "{grid:?}");
            for wider in [GgufGrid::Q4_1, GgufGrid::Q5_0, GgufGrid::Q8_0] {
                if let Some(other) = wider.from_blocks(grid, &blocks) {
                    assert_eq!(values(wider, &other), values(grid, &blocks), "{grid:?} {wider:?}");
                }
            }
            assert_eq!(GgufGrid::Q4_1.from_blocks(grid, &blocks).is_some(), grid == GgufGrid::Q4_0);
        }
    }

    #[test]
    fn a_minimum_that_is_a_multiple_of_the_step_is_a_zero_point() {
        // d = 0.5 and m = -2 (zero 4), m = 0.5 (zero -1, out of 0..15), d = 0 with m = 3 (a constant), m = -0.3 (no multiple).
        let block = |d: f32, m: f32| {
            let mut b = [f16::from_f32(d).to_le_bytes(), f16::from_f32(m).to_le_bytes()].concat();
            b.extend((0..16).map(|j| j | (15 - j) << 4));
            b
        };
        let exact = [block(0.5, -2.0), block(0.5, 0.0), block(0.0, 3.0), block(0.0, 0.0), block(-0.5, 7.5)].concat();
        let matrix = GgufGrid::Q4_1.to_codes(&exact, 1, 160).unwrap();
        assert_eq!(matrix.dequantize(), values(GgufGrid::Q4_1, &exact));
        assert_eq!(matrix.zeros[0], -4);
        let near = GgufGrid::Q4_1.to_codes(&block(0.5, -0.3), 1, 32).unwrap().dequantize();
        let truth = values(GgufGrid::Q4_1, &block(0.5, -0.3));
        assert!(near.iter().zip(&truth).all(|(a, b)| (a - b).abs() < 0.21 && a != b));
    }
}
