//! The memory layout of a packed linear layer, and the packing into it. Not a disk layout.
//!
//! Layout: rows (outputs) in blocks of 16; the reduction in groups, each cut into segments of at most
//! [`SEGMENT`] values, each segment padded to octets (8 values). One octet of one block is contiguous:
//! - INT4, and INT3 and INT2 widened to it: sixteen u32 (one cache line), word `r` holds the codes of row `r`, value `j`
//!   in bits `4j..4j+4`, plus 8; FP4 the same, its codes as they are;
//! - INT8: two cache lines of sixteen u32; word `r` of the first holds columns 0, 2, 4, 6 of row `r`, a byte each, plus 128, of the
//!   second columns 1, 3, 5, 7: the quads that a shift and a mask make of a word of INT4;
//! - FP8, f16, bf16, f32: eight runs of sixteen values, run `j` holds value `j` of the sixteen rows.
//!
//! Blocks follow one another, so a thread reads its part of the weights as one stream. Scales are kept in their
//! stored dtype and zero points as i8, both `[block][group][16]` (the scale of an FP8 block stands once for each of its
//! rows). Padding is never read as a value.

use crate::memory::Lines;
use dsq_quant::{FloatType, MiniFloat, QuantError, QuantType, QuantizedMatrix, e8m0_decode, e8m0_encode};
use half::{bf16, f16};

/// Rows of a block: the lanes of a vector.
pub(crate) const BLOCK: usize = crate::simd::LANES;
/// Longest run of the reduction that is summed before its scale is applied.
pub(crate) const SEGMENT: usize = 64;
/// Most columns of a segment whose inputs are rounded to INT8 with one scale: whole octets, and a part of [`SEGMENT`].
pub(crate) const PIECE: usize = 16;
/// Values of the reduction in one octet.
pub(crate) const OCTET: usize = 8;

/// How the values of a layer are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Storage {
    Code(QuantType),
    Float(FloatType),
}

impl Storage {
    /// Bits of the field that holds a value.
    fn bits(self) -> usize {
        match self {
            Storage::Code(q) => q.bits().max(4),
            Storage::Float(f) => f.bits(),
        }
    }
}

/// A run of the reduction dimension with one scale.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Segment {
    /// First column.
    pub at: usize,
    /// Columns, 1 to [`SEGMENT`].
    pub len: usize,
    /// Its group.
    pub group: usize,
    /// Its first octet within a block.
    pub octet: usize,
}

impl Segment {
    /// Its columns in pieces of [`PIECE`], the last one shorter: `(first column, columns, first octet)`.
    pub(crate) fn pieces(self) -> impl Iterator<Item = (usize, usize, usize)> {
        (0..self.len).step_by(PIECE).map(move |i| (self.at + i, PIECE.min(self.len - i), self.octet + i / OCTET))
    }
}

/// The scales of codes.
#[derive(Debug, Clone)]
pub(crate) struct Scales {
    pub dtype: FloatType,
    pub bytes: Lines,
    /// What divides every scale.
    pub global: Option<f32>,
    /// i8 as bytes; empty when symmetric.
    pub zeros: Lines,
}

/// A packed `[n, k]` matrix.
#[derive(Debug, Clone)]
pub(crate) struct Panels {
    pub n: usize,
    pub k: usize,
    pub storage: Storage,
    pub groups: usize,
    /// Columns of a group; with k it says what the segments are.
    pub group_len: usize,
    pub segments: Vec<Segment>,
    /// Bytes of one block of 16 rows.
    pub block_bytes: usize,
    pub weights: Lines,
    /// None for float storage.
    pub scales: Option<Scales>,
}

/// The groups of `k` columns in runs of at most [`SEGMENT`].
fn segments(k: usize, group_len: usize) -> Vec<Segment> {
    let mut out: Vec<Segment> = Vec::new();
    let mut octet = 0;
    let group_len = group_len.max(1);
    for (group, start) in (0..k).step_by(group_len).enumerate() {
        let end = (start + group_len).min(k);
        for at in (start..end).step_by(SEGMENT) {
            let len = SEGMENT.min(end - at);
            out.push(Segment { at, len, group, octet });
            octet += len.div_ceil(OCTET);
        }
    }
    out
}

impl Panels {
    fn empty(n: usize, k: usize, storage: Storage, group_len: usize) -> Self {
        let segments = segments(k, group_len);
        let octets = segments.last().map_or(0, |s| s.octet + s.len.div_ceil(OCTET));
        let block_bytes = octets * OCTET * BLOCK * storage.bits() / 8;
        let weights = Lines::zeroed(n.div_ceil(BLOCK) * block_bytes);
        let groups = segments.last().map_or(0, |s| s.group + 1);
        Self { n, k, storage, groups, group_len, segments, block_bytes, weights, scales: None }
    }

    /// Packs a quantized matrix.
    pub(crate) fn pack_codes(q: &QuantizedMatrix) -> Result<Self, QuantError> {
        q.validate()?;
        let mut p = Self::empty(q.n, q.k, Storage::Code(q.args.qtype), q.group_len());
        match q.args.qtype {
            QuantType::Int8 => p.fill(&q.codes, |out, lane, j, code| {
                out[int8_at(lane, j)] = (code as u8).wrapping_add(128);
            }),
            QuantType::Fp8E4M3 | QuantType::Fp8E5M2 => {
                p.fill(&q.codes, |out, lane, j, code| out[j * BLOCK + lane] = code as u8);
            }
            QuantType::Fp4E2M1 => p.fill(&q.codes, |out, lane, j, code| {
                out[lane * 4 + j / 2] |= (code as u8) << (4 * (j % 2));
            }),
            QuantType::Int2 | QuantType::Int3 | QuantType::Int4 => p.fill_words(&q.codes),
        }
        let (dtype, blocks) = (q.args.scale_dtype, q.n.div_ceil(BLOCK));
        let width = dtype.bits() / 8;
        let cells = blocks * p.groups * BLOCK;
        let mut bytes = Lines::zeroed(cells * width);
        let mut zeros = Lines::zeroed(if q.zeros.is_empty() { 0 } else { cells });
        for row in 0..q.n {
            for group in 0..p.groups {
                let cell = (row / BLOCK * p.groups + group) * BLOCK + row % BLOCK;
                let from = q.scale_index(row, group);
                put_float(&mut bytes, cell * width, q.scales[from], dtype);
                if let Some(&z) = q.zeros.get(from) {
                    zeros.as_mut_slice()[cell] = z as u8;
                }
            }
        }
        p.scales = Some(Scales { dtype, bytes, global: q.global_scale, zeros });
        Ok(p)
    }

    /// Packs a float matrix, rounding to `dtype` (nearest, ties to even), one of [`FloatType::ALL`].
    pub(crate) fn pack_floats(w: &[f32], n: usize, k: usize, dtype: FloatType) -> Result<Self, QuantError> {
        if w.len() != n * k {
            return Err(QuantError::Length { what: "weight", expected: n * k, got: w.len() });
        }
        if !FloatType::ALL.contains(&dtype) {
            let expected = "f32, f16 or bf16: one byte holds scales and codes only".into();
            return Err(QuantError::Setting { field: "dtype", expected, got: dtype.to_string() });
        }
        let mut p = Self::empty(n, k, Storage::Float(dtype), k);
        fn put<const N: usize>(out: &mut [u8], lane: usize, j: usize, bytes: [u8; N]) {
            out[(j * BLOCK + lane) * N..][..N].copy_from_slice(&bytes);
        }
        match dtype {
            FloatType::F16 => p.fill(w, |out, lane, j, x| put(out, lane, j, f16::from_f32(x).to_le_bytes())),
            FloatType::Bf16 => p.fill(w, |out, lane, j, x| put(out, lane, j, bf16::from_f32(x).to_le_bytes())),
            _ => p.fill(w, |out, lane, j, x: f32| put(out, lane, j, x.to_le_bytes())),
        }
        Ok(p)
    }

    /// Puts the values `[n, k]`, octet by octet, so that what is written lies together: `put(octet, lane, j, value)` writes value `j`
    /// of row `lane` of a block into the octet's bytes.
    fn fill<T: Copy>(&mut self, values: &[T], put: impl Fn(&mut [u8], usize, usize, T)) {
        let octet_bytes = OCTET * BLOCK * self.storage.bits() / 8;
        let weights = self.weights.as_mut_slice();
        for (block, rows) in values.chunks((BLOCK * self.k).max(1)).enumerate() {
            for s in &self.segments {
                for (i, start) in (0..s.len).step_by(OCTET).enumerate() {
                    let octet = &mut weights[block * self.block_bytes + (s.octet + i) * octet_bytes..][..octet_bytes];
                    for (lane, row) in rows.chunks(self.k).enumerate() {
                        for (j, &x) in row[s.at + start..s.at + s.len].iter().take(OCTET).enumerate() {
                            put(octet, lane, j, x);
                        }
                    }
                }
            }
        }
    }

    /// The first byte of value `j` of segment `s` of `row` (of its nibble pair for INT4).
    fn value_at(&self, row: usize, s: Segment, j: usize) -> usize {
        let octet_bytes = OCTET * BLOCK * self.storage.bits() / 8;
        let octet = row / BLOCK * self.block_bytes + (s.octet + j / OCTET) * octet_bytes;
        let (lane, j) = (row % BLOCK, j % OCTET);
        octet
            + match self.storage.bits() {
                4 => lane * 4 + j / 2,
                _ if self.storage == Storage::Code(QuantType::Int8) => int8_at(lane, j),
                bits => (j * BLOCK + lane) * bits / 8,
            }
    }

    /// The values of one row, as [`QuantizedMatrix::dequantize`] gives them.
    pub(crate) fn row(&self, row: usize, out: &mut [f32]) {
        for s in &self.segments {
            let (scale, zero) = self.scale_and_zero(row, s.group);
            for j in 0..s.len {
                let at = self.value_at(row, *s, j);
                let b = |i: usize| self.weights.as_slice()[at + i];
                out[s.at + j] = match self.storage {
                    Storage::Code(QuantType::Int2 | QuantType::Int3 | QuantType::Int4) => {
                        (i32::from((b(0) >> (4 * (j % 2))) & 15) - 8 - zero) as f32 * scale
                    }
                    Storage::Code(QuantType::Int8) => (i32::from(b(0)) - 128 - zero) as f32 * scale,
                    Storage::Code(QuantType::Fp8E4M3) => MiniFloat::E4M3.decode(b(0)) * scale,
                    Storage::Code(QuantType::Fp8E5M2) => MiniFloat::E5M2.decode(b(0)) * scale,
                    Storage::Code(QuantType::Fp4E2M1) => MiniFloat::E2M1.decode(b(0) >> (4 * (j % 2))) * scale,
                    Storage::Float(dtype) => get_float(&b, dtype),
                };
            }
        }
    }

    /// Scale and zero point of a row's group; 1 and 0 for float storage.
    pub(crate) fn scale_and_zero(&self, row: usize, group: usize) -> (f32, i32) {
        let Some(s) = &self.scales else { return (1.0, 0) };
        let cell = (row / BLOCK * self.groups + group) * BLOCK + row % BLOCK;
        let b = |i: usize| s.bytes.as_slice()[cell * s.dtype.bits() / 8 + i];
        let scale = get_float(&b, s.dtype);
        let scale = s.global.map_or(scale, |g| scale / g);
        (scale, if s.zeros.len() == 0 { 0 } else { i32::from(s.zeros.as_slice()[cell] as i8) })
    }

    /// Bytes held in memory.
    pub(crate) fn bytes(&self) -> usize {
        self.weights.len()
            + self.scales.as_ref().map_or(0, |s| s.bytes.len() + s.zeros.len())
            + std::mem::size_of_val(&self.segments[..])
    }

    /// Overwrites every byte that holds no value: the nibbles, values, scales and zero points of padding.
    #[cfg(test)]
    pub(crate) fn poison_padding(&mut self) {
        let mut used = vec![0u8; self.weights.len()];
        for row in 0..self.n {
            for s in &self.segments {
                for j in 0..s.len {
                    let at = self.value_at(row, *s, j);
                    match self.storage.bits() {
                        4 => used[at] |= 15 << (4 * (j % 2)),
                        bits => used[at..at + bits / 8].fill(0xff),
                    }
                }
            }
        }
        for (at, &mask) in used.iter().enumerate() {
            self.weights.as_mut_slice()[at] |= !mask;
        }
        let (n, groups) = (self.n, self.groups);
        if let Some(s) = &mut self.scales {
            let width = s.dtype.bits() / 8;
            for row in n..n.div_ceil(BLOCK) * BLOCK {
                for group in 0..groups {
                    let cell = (row / BLOCK * groups + group) * BLOCK + row % BLOCK;
                    s.bytes.as_mut_slice()[cell * width..][..width].fill(0xff);
                    if s.zeros.len() > 0 {
                        s.zeros.as_mut_slice()[cell] = 0x7f;
                    }
                }
            }
        }
    }
}

/// The byte of an octet of INT8 that holds value `j` of a lane.
fn int8_at(lane: usize, j: usize) -> usize {
    j % 2 * 4 * BLOCK + lane * 4 + j / 2
}

fn put_float(to: &mut Lines, at: usize, x: f32, dtype: FloatType) {
    let to = &mut to.as_mut_slice()[at..];
    match dtype {
        FloatType::F32 => to[..4].copy_from_slice(&x.to_le_bytes()),
        FloatType::F16 => to[..2].copy_from_slice(&f16::from_f32(x).to_le_bytes()),
        FloatType::Bf16 => to[..2].copy_from_slice(&bf16::from_f32(x).to_le_bytes()),
        FloatType::F8E4M3 => to[0] = MiniFloat::E4M3.encode(x),
        FloatType::F8E8M0 => to[0] = e8m0_encode(x),
    }
}

/// The value whose bytes are `b(0)`, `b(1)`, ...
fn get_float(b: &impl Fn(usize) -> u8, dtype: FloatType) -> f32 {
    match dtype {
        FloatType::F32 => f32::from_le_bytes([b(0), b(1), b(2), b(3)]),
        FloatType::F16 => f16::from_le_bytes([b(0), b(1)]).to_f32(),
        FloatType::Bf16 => bf16::from_le_bytes([b(0), b(1)]).to_f32(),
        FloatType::F8E4M3 => MiniFloat::E4M3.decode(b(0)),
        FloatType::F8E8M0 => e8m0_decode(b(0)),
    }
}
