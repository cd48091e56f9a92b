//! Linear layers with INT8 activations (W4A8, W8A8): integer dot products of the packed weights of `layout.rs` with the rounded
//! inputs of `input.rs`. Not here: float activations (`kernel.rs`), weights of FP8, FP4 or floats.
//!
//! - Shapes: `x [m, k]` rounded, `out [m, n]`; any m, n, k, any grouping, symmetric or asymmetric.
//! - Layout: weights as they are for f32 activations, one copy for both modes. A word of INT4 holds eight values of a row: `w & 0x0f0f0f0f`
//!   are columns 0, 2, 4, 6 and `w >> 4 & 0x0f0f0f0f` columns 1, 3, 5, 7, each code plus 8. INT8 has those quads in two lines, plus 128.
//! - Requires: nothing; AVX-512 VNNI, AVX-VNNI, AVX2 and NEON dot products are found at run time. AVX-512 without VNNI takes the AVX2 form.
//! - Order: the groups are cut into segments of at most 64 columns, these into pieces of at most 16, whose inputs share a scale. Per
//!   output and segment, in f32: `part = zero * minus`, where `minus` is minus the sum of the segment's rounded inputs (from 0,
//!   `minus = fma(input_scale, -sum of codes, minus)` piece by piece; symmetric: `part = 0`); then for each piece the exact integer
//!   `dot = sum code * input code` and `part = fma(dot, input_scale, part)`. Then `total = fma(weight_scale, part, total)` from 0,
//!   all in increasing k. On a grid with one scale for a token that scale is the input scale of each of its pieces. All
//!   paths give the same bits, for any m and any number of threads.
//! - Cost: one `vpdpbusd` for 16 rows x 4 columns x 1 token, for each piece a conversion and a fused multiply-add a token, for each segment
//!   one more. One token: bound by reading the weights. Many: tiles of 16 rows x 12 tokens with parts and totals in registers
//!   (in 256 bits 16 x 8, partly in the cache), for each tile as many blocks of rows as a quarter of the second-level cache holds.
//! - Error: against exact arithmetic on the rounded inputs at most `(S + 9) u * sum (|q| + |z|) scale |x'|` for S segments, weights
//!   `scale * (q - z)` and u = 2^-24, to first order; symmetric `(S + 4) u * sum |w| |x'|`. `dot` is exact in f32 (at most 2^18), a
//!   part sees at most 4 roundings, what is taken for the zero point 4 in its sum and 1 in the product, a total one for each
//!   segment. The rounding of the inputs adds at most `sum |w| scale / 2 * (1 + 2^-14)`.
//!
//! The offset of the unsigned codes is taken back by where a dot product starts: `sum (u - 8) x = -8 sum x + sum u x` (INT8: 128). That
//! is exact, and no dearer than to start from 0; in f32 beside the zero point it would lose digits where codes are small beside 128.

use super::input::{Rounded, Tile};
use super::kernel::{scale, store_row, zero};
use super::layout::{BLOCK, OCTET, PIECE, Panels};
use crate::Isa;
#[cfg(target_arch = "x86_64")]
use crate::isa::{has_avx_vnni, has_avx512_vnni};
use crate::parallel::{OutPtr, split};
use crate::simd::{Scalar, Simd};
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
            _ if crate::isa::has_dotprod() => IntPath::Neon,
            Isa::Scalar => IntPath::Scalar,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 if has_avx512_vnni() => IntPath::Vnni512,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 if has_avx_vnni() => IntPath::Vnni256,
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
            // `roofline.rs` measures plain multiply-adds there.
            #[cfg(target_arch = "aarch64")]
            IntPath::Neon => 1,
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
            IntPath::Avx2 | IntPath::Vnni256 => 8,
            #[cfg(all(test, target_arch = "x86_64"))]
            IntPath::Vnni256Vl => 8,
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

/// Bytes of weights that are worked on together: a quarter of a second-level cache of 1 MB.
const CHUNK_BYTES: usize = 256 << 10;
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
        Rounded::with(path, grid, layers, &x[start * k..(start + tokens) * k], tokens, |rounded| {
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

/// The blocks of `blocks` for all tokens: some blocks, whose weights stay in the cache, for tile after tile.
fn multiply(path: IntPath, p: &Panels, blocks: Range<usize>, rounded: &Rounded, out: OutPtr) {
    let tiles = rounded.tiles();
    // With one tile there is nothing to come back for.
    let step = if tiles == 1 { blocks.len() } else { CHUNK_BYTES / p.block_bytes }.max(1);
    for from in blocks.clone().step_by(step) {
        for i in 0..tiles {
            // SAFETY: the blocks exist, the tile is of inputs of these segments, `out` holds m rows of n, and the ranges of
            // blocks of the parts are disjoint; the path was detected.
            unsafe { tile(path, p, from..blocks.end.min(from + step), rounded.tile(i), out.get()) };
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
            IntPath::Scalar => plain::tile(p, blocks, t, out),
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

#[inline(always)]
pub(crate) fn is_int8(p: &Panels) -> bool {
    p.storage == super::layout::Storage::Code(QuantType::Int8)
}

/// What a path brings: the integer dot products of a piece. The rest of the kernel, [`tokens`], is written once. All is inlined
/// into an entry function that enables the features (`tiles!`).
///
/// Safety of the methods: the CPU has the path; pointers are readable as told.
pub(super) trait Dots {
    /// The f32 part of the path.
    type S: Simd;
    /// The unsigned codes of 16 rows x 8 columns: the even and the odd quads of each row.
    type Octet: Copy;
    /// How far ahead of what is multiplied weights are asked for.
    const AHEAD: usize;

    /// An octet of weights, 64 bytes (INT8: 128).
    unsafe fn octet<const INT8: bool>(w: *const u8) -> Self::Octet;

    /// The dot products of 16 rows with a token in `N` octets, exact, as f32. The token's octets lie every `T` octets from `x`;
    /// `start` is minus 8 times the sum of the token's codes.
    unsafe fn dots<const T: usize, const INT8: bool, const N: usize>(
        w: [Self::Octet; N],
        x: *const u8,
        start: *const i32,
    ) -> <Self::S as Simd>::V;
}

/// A block of 16 rows for a tile of `T` tokens.
///
/// Safety: as [`tile`], on the path `D`; the tile has `T` tokens, the weights are INT8 or not as told.
#[inline(always)]
pub(super) unsafe fn tokens<D: Dots, const T: usize, const INT8: bool>(
    p: &Panels,
    block: usize,
    tile: Tile,
    out: *mut f32,
) {
    // SAFETY: the octets of the segments lie in the block and in the tile, with scales and starts for each piece and a sum for each
    // segment; scales and zero points exist for the block's groups.
    unsafe {
        let bytes = if INT8 { 128 } else { 64 };
        let mut w = p.weights.as_ptr().add(block * p.block_bytes);
        let (mut x, mut scales, mut starts, mut minus) = (tile.codes, tile.scales, tile.starts, tile.minus);
        let mut totals = [D::S::splat(0.0); T];
        for s in &p.segments {
            let mut parts = [D::S::splat(0.0); T];
            if let Some(zero) = zero::<D::S>(p, block, s.group) {
                for t in 0..T {
                    parts[t] = D::S::mul(zero, D::S::splat(*minus.add(t)));
                }
            }
            macro_rules! piece {
                ($octets:literal) => {
                    let mut codes = [D::octet::<INT8>(w); $octets];
                    for (i, codes) in codes.iter_mut().enumerate() {
                        let w = w.add(i * bytes);
                        D::S::prefetch(w.wrapping_add(D::AHEAD));
                        if INT8 {
                            D::S::prefetch(w.wrapping_add(D::AHEAD + 64));
                        }
                        *codes = D::octet::<INT8>(w);
                    }
                    for t in 0..T {
                        let dots = D::dots::<T, INT8, $octets>(codes, x.add(t * OCTET), starts.add(t));
                        parts[t] = D::S::fma(dots, D::S::splat(*scales.add(t)), parts[t]);
                    }
                    w = w.add($octets * bytes);
                    x = x.add($octets * T * OCTET);
                    (scales, starts) = (scales.add(T), starts.add(T));
                };
            }
            let octets = s.len.div_ceil(OCTET);
            for _ in 0..octets / 2 {
                piece!(2);
            }
            if octets % 2 == 1 {
                piece!(1);
            }
            let scale = scale::<D::S>(p, block, s.group).unwrap_or(D::S::splat(1.0));
            for t in 0..T {
                totals[t] = D::S::fma(scale, parts[t], totals[t]);
            }
            minus = minus.add(T);
        }
        for (t, &total) in totals.iter().enumerate() {
            store_row::<D::S>(p, block, total, out.add((tile.first + t) * p.n));
        }
    }
}

const _: () = assert!(PIECE == 2 * OCTET);

/// Defines the entry `tile` of a path for the listed numbers of tokens: blocks of 16 rows for one tile. With the features of the path,
/// where it has some.
macro_rules! tiles {
    ($(#[$features:meta])? $name:ident, $dots:ty, $($t:literal)*) => {
        /// Blocks of 16 rows for one tile of tokens.
        ///
        /// Safety: the features; the rest as `tile` in `int.rs`.
        $(#[$features])?
        pub(super) unsafe fn $name(p: &Panels, blocks: Range<usize>, tile: Tile, out: *mut f32) {
            for block in blocks {
                // SAFETY: forwarded.
                unsafe {
                    match (tile.tokens, is_int8(p)) {
                        $(($t, false) => tokens::<$dots, $t, false>(p, block, tile, out),
                        ($t, true) => tokens::<$dots, $t, true>(p, block, tile, out),)*
                        _ => unreachable!("tiles have no more tokens than `widest`"),
                    }
                }
            }
        }
    };
}
pub(super) use tiles;

/// The dot products in plain Rust.
mod plain {
    use super::*;

    struct Plain;

    tiles!(tile, Plain, 1 2 3 4);

    impl Dots for Plain {
        type S = Scalar;
        type Octet = [[[u8; 4]; BLOCK]; 2];
        const AHEAD: usize = 0;

        #[inline(always)]
        unsafe fn octet<const INT8: bool>(w: *const u8) -> Self::Octet {
            // SAFETY: the caller's 64 or 128 bytes.
            unsafe {
                if INT8 {
                    return w.cast::<Self::Octet>().read();
                }
                let words = w.cast::<[[u8; 4]; BLOCK]>().read();
                [words.map(|quad| quad.map(|b| b & 15)), words.map(|quad| quad.map(|b| b >> 4))]
            }
        }

        #[inline(always)]
        unsafe fn dots<const T: usize, const INT8: bool, const N: usize>(
            w: [Self::Octet; N],
            x: *const u8,
            start: *const i32,
        ) -> [f32; BLOCK] {
            // SAFETY: the caller's octets and start.
            unsafe {
                let mut dots = [if INT8 { 16 * *start } else { *start }; BLOCK];
                for (i, octet) in w.iter().enumerate() {
                    let x = x.add(i * T * OCTET).cast::<[[i8; 4]; 2]>().read();
                    for (codes, x) in octet.iter().zip(x) {
                        for (dot, quad) in dots.iter_mut().zip(codes) {
                            *dot += quad.iter().zip(x).map(|(&u, x)| i32::from(u) * i32::from(x)).sum::<i32>();
                        }
                    }
                }
                dots.map(|dot| dot as f32)
            }
        }
    }
}
