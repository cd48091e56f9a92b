//! Linear layers with INT8 activations (W4A8, W8A8): integer dot products of the packed weights of `layout.rs` with the rounded
//! inputs of `input.rs`. Not here: float activations (`kernel.rs`), weights of FP8, FP4 or floats.
//!
//! - Shapes: `x [m, k]` rounded, `out [m, n]`; any m, n, k, any grouping, symmetric or asymmetric.
//! - Layout: weights as they are for f32 activations, one copy for both modes. A word of INT4 holds eight values of a row: `w & 0x0f0f0f0f`
//!   are columns 0, 2, 4, 6 and `w >> 4 & 0x0f0f0f0f` columns 1, 3, 5, 7, each code plus 8. INT8 has those quads in two lines, plus 128.
//! - Requires: nothing; AVX-512 VNNI, AVX-VNNI, AVX2 and NEON dot products are found at run time. AVX-512 without VNNI takes the AVX2 form.
//! - Order: per output and segment the exact integer `dot = sum (code - zero) * input code`, then
//!   `total = fma(weight_scale, input_scale * dot, total)` from 0 in f32, segments in increasing k. On a grid with one scale for a token
//!   that scale is the input scale of each of its segments. All paths give the same bits, for any m and any number of threads.
//! - Cost: one `vpdpbusd` for 16 rows x 4 columns x 1 token, and for each segment four instructions a token. One token: bound by
//!   reading the weights. Many: tiles of 16 rows x 12 tokens with sums and totals in registers (AVX2: 16 x 4), the weights of a
//!   block in the cache.
//! - Error: against exact arithmetic on the rounded inputs at most `(S + 2) u * sum |w| |x'|` for S segments and u = 2^-24, to first
//!   order (`dot` is exact in f32: below 2^22). The rounding of the inputs adds at most `sum |w| scale / 2 * (1 + 2^-14)`.
//!
//! The offset of the unsigned codes is taken back by where a sum starts: `sum (u - c) x = sum u x + c * (-sum x)` with `c = 8 + zero`
//! (INT8: 128 + zero).

use super::input::{Rounded, Tile};
use super::layout::{BLOCK, OCTET, Panels, Segment};
use crate::Isa;
use crate::parallel::{OutPtr, split};
use dsq_quant::{InputGrid, QuantType};
use std::ops::Range;

/// What the integer kernels run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IntPath {
    Scalar,
    /// NEON with dot products.
    #[cfg(target_arch = "aarch64")]
    Neon,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// AVX2 and AVX-VNNI.
    #[cfg(target_arch = "x86_64")]
    Vnni256,
    /// The arithmetic of `Vnni256` in the encoding of AVX-512VL.
    #[cfg(all(test, target_arch = "x86_64"))]
    Vnni256Vl,
    /// AVX-512F, BW and VNNI.
    #[cfg(target_arch = "x86_64")]
    Vnni512,
}

impl IntPath {
    /// The best of this CPU on a path of the f32 kernels.
    pub(crate) fn of(isa: Isa) -> Self {
        match isa {
            #[cfg(target_arch = "aarch64")]
            _ if std::arch::is_aarch64_feature_detected!("dotprod") => IntPath::Neon,
            Isa::Scalar => IntPath::Scalar,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if is_x86_feature_detected!("avx512vnni") && is_x86_feature_detected!("avx512bw") => {
                IntPath::Vnni512
            }
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 if is_x86_feature_detected!("avxvnni") => IntPath::Vnni256,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 => IntPath::Avx2,
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Avx512 | Isa::Avx2 => IntPath::Scalar,
        }
    }

    /// Products of one instruction of the path.
    pub(crate) fn products(self) -> usize {
        match self {
            IntPath::Scalar => 1,
            #[cfg(target_arch = "x86_64")]
            IntPath::Vnni512 => 64,
            #[cfg(target_arch = "x86_64")]
            _ => 32,
        }
    }

    /// Most tokens of a tile.
    pub(crate) fn widest(self) -> usize {
        match self {
            IntPath::Scalar => 4,
            #[cfg(target_arch = "aarch64")]
            IntPath::Neon => 4,
            #[cfg(target_arch = "x86_64")]
            IntPath::Avx2 | IntPath::Vnni256 => 4,
            #[cfg(all(test, target_arch = "x86_64"))]
            IntPath::Vnni256Vl => 4,
            #[cfg(target_arch = "x86_64")]
            IntPath::Vnni512 => 12,
        }
    }

    /// The name, and why this path was chosen.
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
    pub(crate) fn describe(self, isa: Isa) -> &'static str {
        match self {
            IntPath::Scalar => "scalar (this CPU has no AVX2 and no NEON dot products)",
            #[cfg(target_arch = "aarch64")]
            IntPath::Neon => "neon dot products",
            #[cfg(target_arch = "x86_64")]
            IntPath::Avx2 if isa == Isa::Avx512 => "avx2 (this CPU has no AVX-512 VNNI)",
            #[cfg(target_arch = "x86_64")]
            IntPath::Avx2 => "avx2 (this CPU has no AVX-512F)",
            #[cfg(target_arch = "x86_64")]
            IntPath::Vnni256 => "avx2 with vnni (this CPU has no AVX-512 VNNI)",
            #[cfg(all(test, target_arch = "x86_64"))]
            IntPath::Vnni256Vl => "avx512vl vnni",
            #[cfg(target_arch = "x86_64")]
            IntPath::Vnni512 => "avx512 vnni",
        }
    }
}

/// Bytes of rounded inputs that are worked on together: half of a second-level cache of 1 MB.
const CHUNK_BYTES: usize = 512 << 10;
/// Tokens that are rounded together: what the buffers hold at most.
const PASS: usize = 1024;

/// `outs[i] [m, n_i] = x [m, k] * W_i^T` with rounded inputs: by the rule of the mode, or on `grid`. The layers have INT codes, the same
/// k and the same segments.
pub(crate) fn matmul(
    path: IntPath,
    grid: Option<&InputGrid>,
    layers: &[&Panels],
    x: &[f32],
    m: usize,
    outs: &mut [&mut [f32]],
) {
    let Some(&first) = layers.first() else { return };
    let k = first.k;
    assert_eq!(x.len(), m * k, "x: [m, k]");
    for (p, out) in layers.iter().zip(outs.iter_mut()) {
        assert_eq!((p.k, p.group_len), (k, first.group_len), "layers of one rounding: the same segments");
        assert_eq!(out.len(), m * p.n, "out: [m, n]");
        if k == 0 {
            out.fill(0.0);
        }
    }
    if k == 0 {
        return;
    }
    let blocks: usize = layers.iter().map(|p| p.n.div_ceil(BLOCK)).sum();
    for start in (0..m).step_by(PASS) {
        let tokens = PASS.min(m - start);
        let jobs: Vec<(&Panels, OutPtr)> =
            layers.iter().zip(outs.iter_mut()).map(|(&p, o)| (p, OutPtr(o[start * p.n..].as_mut_ptr()))).collect();
        Rounded::with(path, grid, first, &x[start * k..(start + tokens) * k], tokens, |rounded| {
            // The one case that sixteen bits do not hold: see `input.rs`.
            let path = if rounded.wide() { path.exact() } else { path };
            split(blocks, 1, &|range| {
                let mut offset = 0;
                for &(p, out) in &jobs {
                    let here = p.n.div_ceil(BLOCK);
                    let r = range.start.clamp(offset, offset + here) - offset
                        ..range.end.clamp(offset, offset + here) - offset;
                    offset += here;
                    multiply(path, p, r, rounded, out);
                }
            });
        });
    }
}

/// The blocks of `blocks` for all tokens: chunk by chunk of tokens, in each block by block.
fn multiply(path: IntPath, p: &Panels, blocks: Range<usize>, rounded: &Rounded, out: OutPtr) {
    let tiles = rounded.tiles();
    let chunk = (CHUNK_BYTES / (p.k * path.widest())).max(4);
    // With one tile there is nothing to come back for.
    let step = if tiles == 1 { blocks.len() } else { 1 }.max(1);
    for from in (0..tiles).step_by(chunk) {
        for block in blocks.clone().step_by(step) {
            for i in from..tiles.min(from + chunk) {
                // SAFETY: the blocks exist, the tile is of inputs of these segments, `out` holds m rows of n, and the ranges of
                // blocks of the parts are disjoint; the path was detected.
                unsafe { tile(path, p, block..blocks.end.min(block + step), rounded.tile(i), out.get()) };
            }
        }
    }
}

/// Blocks of 16 rows for one tile of tokens.
///
/// Safety: the CPU has the path; the blocks exist; the tile is of `p`'s segments; `out` is writable for the rows of the tile.
unsafe fn tile(path: IntPath, p: &Panels, blocks: Range<usize>, t: Tile, out: *mut f32) {
    // SAFETY: forwarded.
    unsafe {
        match path {
            IntPath::Scalar => blocks.for_each(|block| scalar_tile(p, block, t, out)),
            #[cfg(target_arch = "aarch64")]
            IntPath::Neon => super::int_neon::tile(p, blocks, t, out),
            #[cfg(target_arch = "x86_64")]
            IntPath::Avx2 => super::int_avx2::tile(p, blocks, t, out),
            #[cfg(target_arch = "x86_64")]
            IntPath::Vnni256 => super::int_vnni256::tile(p, blocks, t, out),
            #[cfg(all(test, target_arch = "x86_64"))]
            IntPath::Vnni256Vl => super::int_vnni256::tile_vl(p, blocks, t, out),
            #[cfg(target_arch = "x86_64")]
            IntPath::Vnni512 => super::int_vnni::tile(p, blocks, t, out),
        }
    }
}

impl IntPath {
    /// The path for inputs that [`Rounded::wide`] tells of.
    fn exact(self) -> Self {
        match self {
            #[cfg(target_arch = "x86_64")]
            // The tiles are those of this path.
            IntPath::Avx2 => IntPath::Scalar,
            path => path,
        }
    }
}

/// What is subtracted from an unsigned code, without the zero point.
#[inline(always)]
pub(crate) fn offset(p: &Panels) -> i32 {
    if is_int8(p) { 128 } else { 8 }
}

#[inline(always)]
pub(crate) fn is_int8(p: &Panels) -> bool {
    p.storage == super::layout::Storage::Code(QuantType::Int8)
}

/// Bytes of an octet of weights.
#[inline(always)]
pub(crate) fn octet_bytes(p: &Panels) -> usize {
    if is_int8(p) { 128 } else { 64 }
}

/// The contract in plain Rust.
///
/// Safety: as [`tile`].
unsafe fn scalar_tile(p: &Panels, block: usize, tile: Tile, out: *mut f32) {
    let weights = &p.weights.as_slice()[block * p.block_bytes..][..p.block_bytes];
    let rows = BLOCK.min(p.n - block * BLOCK);
    for t in 0..tile.tokens {
        for lane in 0..rows {
            let row = block * BLOCK + lane;
            let mut total = 0.0f32;
            for (i, s) in p.int_segments.iter().enumerate() {
                let (scale, zero) = p.scale_and_zero(row, s.group);
                // SAFETY: the tile has a scale and sums for each segment, and `octets(s)` octets of codes.
                let (input_scale, sums) = unsafe {
                    let cell = i * tile.tokens + t;
                    (*tile.scales.add(cell), *tile.sums.add(cell))
                };
                let mut dot = (offset(p) + zero) * (i32::from(sums as i16) + (sums >> 16));
                for o in 0..octets(s) {
                    // SAFETY: as above.
                    let x = unsafe {
                        tile.codes.add(((s.octet + o) * tile.tokens + t) * OCTET).cast::<[i8; OCTET]>().read()
                    };
                    let w = &weights[(s.octet + o) * octet_bytes(p)..][..octet_bytes(p)];
                    for j in 0..4 {
                        let byte = w[4 * lane + j];
                        let (even, odd) =
                            if is_int8(p) { (byte, w[64 + 4 * lane + j]) } else { (byte & 15, byte >> 4) };
                        dot += i32::from(even) * i32::from(x[j]) + i32::from(odd) * i32::from(x[4 + j]);
                    }
                }
                total = scale.mul_add(input_scale * dot as f32, total);
            }
            // SAFETY: the caller's output.
            unsafe { *out.add((tile.first + t) * p.n + row) = total };
        }
    }
}

/// Octets of a segment.
#[inline(always)]
pub(crate) fn octets(s: &Segment) -> usize {
    s.len.div_ceil(OCTET)
}
