//! The packing of weights as files have them: float values out of stored bytes, some rows at a time, so that no copy of the matrix in
//! f32 is made; and four-bit codes, a word at a time. The layout is that of `layout.rs`, bit for bit. Not a disk format: what bytes are
//! where is the caller's.
//!
//! - Shapes: weights `[n, k]`, row major.
//! - Layout: in: little endian, rows one after the other; out: see `layout.rs`.
//! - Requires: nothing (SSE2, which every x86-64 has, transposes values of two bytes).
//! - Order: element-wise.
//! - Cost: one read and one write of the bytes.
//! - Error: none: bits are moved.

use super::FloatLinear;
use super::layout::{BLOCK, OCTET, Panels, Storage};
use crate::Isa;
use crate::memory::Lines;
use dsq_quant::{FloatType, QuantError, nibble_word};

/// Values of a row that are taken out of it together: a cache line of two-byte values. (Sixteen rows that are powers of two apart do
/// not stay in a cache together.)
const TILE: usize = 4 * OCTET;

/// A [`FloatLinear`] that is being packed.
///
/// ```
/// # use dsq_kernels::{FloatLinear, linear::FloatPacking};
/// # use dsq_quant::FloatType;
/// let (bytes, mut packing) = ([0u8; 20 * 3 * 2], FloatPacking::new(20, 3, FloatType::Bf16)?);
/// bytes.chunks(packing.run_bytes()).for_each(|run| packing.add(run));
/// let linear: FloatLinear = packing.finish()?;
/// # assert_eq!(linear.n(), 20);
/// # Ok::<(), dsq_quant::QuantError>(())
/// ```
#[derive(Debug)]
pub struct FloatPacking {
    panels: Panels,
    dtype: FloatType,
    /// Rows that came.
    rows: usize,
}

impl FloatPacking {
    /// Of `[n, k]` weights stored as `dtype`, one of [`FloatType::ALL`].
    ///
    /// # Errors
    /// [`QuantError::Setting`] for another dtype, [`QuantError::Length`] for a shape beyond the address space.
    pub fn new(n: usize, k: usize, dtype: FloatType) -> Result<Self, QuantError> {
        // What is refused is refused there.
        let mut panels = Panels::pack_floats(&[], 0, k, dtype)?;
        debug_assert_eq!(panels.storage, Storage::Float(dtype));
        let bytes = n.div_ceil(BLOCK).checked_mul(panels.block_bytes);
        let bytes = bytes.ok_or(QuantError::Length { what: "weight", expected: usize::MAX, got: n })?;
        panels.n = n;
        // Whatever is in it: every value is written, and padding is never read as one.
        panels.weights = Lines::any(bytes);
        Ok(Self { panels, dtype, rows: 0 })
    }

    /// Bytes of a run.
    pub fn run_bytes(&self) -> usize {
        BLOCK * self.panels.k * self.dtype.bits() / 8
    }

    /// Takes in the next [`FloatPacking::run_bytes`] bytes, or what is left of them at the end.
    pub fn add(&mut self, bytes: &[u8]) {
        let (p, first) = (&mut self.panels, self.rows);
        let row_bytes = p.k * self.dtype.bits() / 8;
        let rows = bytes.len().checked_div(row_bytes).unwrap_or(0);
        self.rows = self.rows.saturating_add(if rows * row_bytes == bytes.len() { rows } else { usize::MAX });
        if self.rows > p.n || rows > BLOCK || !first.is_multiple_of(BLOCK) {
            // Told at the end.
            self.rows = usize::MAX;
            return;
        }
        let at = first / BLOCK * p.block_bytes;
        let block = &mut p.weights.as_mut_slice()[at..][..if rows == 0 { 0 } else { p.block_bytes }];
        match self.dtype {
            FloatType::F32 => put_rows::<4>(bytes, p.k, block, transpose),
            _ => put_rows::<2>(bytes, p.k, block, transpose_pairs),
        }
    }

    /// The layer.
    ///
    /// # Errors
    /// [`QuantError::Length`] when other than all rows came, or not in such runs.
    pub fn finish(self) -> Result<FloatLinear, QuantError> {
        let Self { panels, rows, .. } = self;
        if rows != panels.n {
            let got = rows.saturating_mul(panels.k);
            return Err(QuantError::Length { what: "weight", expected: panels.n * panels.k, got });
        }
        Ok(FloatLinear { panels, isa: Isa::detect() })
    }
}

/// Puts at most sixteen rows of `k` values of `N` bytes into the octets of a block.
fn put_rows<const N: usize>(
    bytes: &[u8],
    k: usize,
    block: &mut [u8],
    put: impl Fn(&[[[u8; N]; TILE]; BLOCK], usize, &mut [u8]),
) {
    let mut tile = [[[0u8; N]; TILE]; BLOCK];
    for at in (0..k).step_by(TILE) {
        let len = TILE.min(k - at);
        for (to, row) in tile.iter_mut().zip(bytes.chunks_exact(k * N)) {
            to[..len].as_flattened_mut().copy_from_slice(&row[at * N..(at + len) * N]);
        }
        let octets = block[at * BLOCK * N..].chunks_exact_mut(OCTET * BLOCK * N);
        octets.take(len.div_ceil(OCTET)).enumerate().for_each(|(i, octet)| put(&tile, i * OCTET, octet));
    }
}

/// Columns `at..at + 8` of a tile, each a run of sixteen values.
fn transpose<const N: usize>(tile: &[[[u8; N]; TILE]; BLOCK], at: usize, octet: &mut [u8]) {
    for (j, run) in octet.chunks_exact_mut(BLOCK * N).enumerate() {
        for (value, row) in run.as_chunks_mut::<N>().0.iter_mut().zip(tile) {
            *value = row[at + j];
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
use transpose as transpose_pairs;

/// [`transpose`] of values of two bytes: eight rows of eight at a time, by three steps of interleaving.
#[cfg(target_arch = "x86_64")]
fn transpose_pairs(tile: &[[[u8; 2]; TILE]; BLOCK], at: usize, octet: &mut [u8]) {
    use std::arch::x86_64::*;
    let octet = &mut octet[..OCTET * BLOCK * 2];
    for (half, rows) in tile.as_chunks::<8>().0.iter().enumerate() {
        let load = |r: usize| {
            let eight = &rows[r][at..at + OCTET];
            // SAFETY: eight values of two bytes; loads need no alignment; SSE2 is part of x86-64.
            unsafe { _mm_loadu_si128(eight.as_ptr().cast()) }
        };
        let v: [__m128i; 8] = std::array::from_fn(load);
        // SAFETY: SSE2 is part of x86-64; these only move bits between registers.
        let columns = unsafe {
            let (mut a, mut b, mut c) = (v, v, v);
            for i in 0..4 {
                // Rows 0 and 4, 1 and 5, ...: after three such steps every column has its rows in order.
                a[2 * i] = _mm_unpacklo_epi16(v[i], v[i + 4]);
                a[2 * i + 1] = _mm_unpackhi_epi16(v[i], v[i + 4]);
            }
            for i in 0..4 {
                b[2 * i] = _mm_unpacklo_epi16(a[i], a[i + 4]);
                b[2 * i + 1] = _mm_unpackhi_epi16(a[i], a[i + 4]);
            }
            for i in 0..4 {
                c[2 * i] = _mm_unpacklo_epi16(b[i], b[i + 4]);
                c[2 * i + 1] = _mm_unpackhi_epi16(b[i], b[i + 4]);
            }
            c
        };
        for (j, column) in columns.into_iter().enumerate() {
            let eight = &mut octet[(j * BLOCK + half * 8) * 2..][..16];
            // SAFETY: sixteen bytes; stores need no alignment.
            unsafe { _mm_storeu_si128(eight.as_mut_ptr().cast(), column) };
        }
    }
}

impl Panels {
    /// Puts four-bit codes (or fewer bits), octet by octet a word for each row.
    pub(super) fn fill_words(&mut self, codes: &[i8]) {
        let weights = self.weights.as_mut_slice();
        for (block, rows) in codes.chunks((BLOCK * self.k).max(1)).enumerate() {
            for s in &self.segments {
                // A row's codes of a segment are a cache line, and read once.
                let octets = &mut weights[block * self.block_bytes + s.octet * 4 * BLOCK..];
                for (lane, row) in rows.chunks(self.k).enumerate() {
                    for (i, codes) in row[s.at..s.at + s.len].chunks(OCTET).enumerate() {
                        let word = match <[i8; OCTET]>::try_from(codes) {
                            Ok(eight) => nibble_word(eight),
                            Err(_) => {
                                let mut eight = [-8i8; OCTET];
                                eight[..codes.len()].copy_from_slice(codes);
                                nibble_word(eight)
                            }
                        };
                        octets[(i * BLOCK + lane) * 4..][..4].copy_from_slice(&word.to_le_bytes());
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    /// Stored bytes of any bit patterns but NaN, at ragged shapes, are packed as the values in f32 are; into memory that was used before.
    #[test]
    fn bytes_are_packed_as_values_are() {
        let _keep = crate::KeepMemory::new();
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as u32
        };
        for (n, k) in [(1, 1), (2, 7), (3, 8), (15, 31), (16, 32), (17, 33), (33, 64), (48, 100), (40, 129)] {
            for dtype in FloatType::ALL {
                let values: Vec<f32> = (0..n * k)
                    .map(|_| match dtype {
                        FloatType::F32 => f32::from_bits(next() << 7 & 0xbfff_ffff),
                        FloatType::F16 => f16::from_bits(next() as u16 & 0xbbff).to_f32(),
                        _ => bf16::from_bits(next() as u16 & 0xbfff).to_f32(),
                    })
                    .collect();
                let bytes: Vec<u8> = match dtype {
                    FloatType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
                    FloatType::F16 => values.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
                    _ => values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
                };
                let mut want = Panels::pack_floats(&values, n, k, dtype).unwrap();
                let mut packing = FloatPacking::new(n, k, dtype).unwrap();
                bytes.chunks(packing.run_bytes()).for_each(|run| packing.add(run));
                let mut got = packing.finish().unwrap().panels;
                // What is no value may be anything.
                want.poison_padding();
                got.poison_padding();
                assert_eq!(got.weights.as_slice(), want.weights.as_slice(), "{dtype} {n}x{k}");
                assert_eq!((got.n, got.k, got.groups), (want.n, want.k, want.groups));
            }
        }
    }

    #[test]
    fn other_than_all_rows_are_refused() {
        let of = |runs: &[usize]| {
            let mut packing = FloatPacking::new(18, 4, FloatType::Bf16).unwrap();
            runs.iter().for_each(|&bytes| packing.add(&vec![0; bytes]));
            packing.finish().map(|l| l.n())
        };
        assert_eq!(of(&[128, 16]), Ok(18));
        for wrong in [&[][..], &[128], &[128, 8], &[128, 24], &[128, 15], &[16, 128], &[136, 8], &[144]] {
            assert!(matches!(of(wrong), Err(QuantError::Length { .. })), "{wrong:?}");
        }
        assert!(FloatPacking::new(1, 1, FloatType::F8E4M3).is_err());
    }
}
