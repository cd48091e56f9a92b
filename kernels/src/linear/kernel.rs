//! The two loops of a linear layer, written once for every path and every storage. See the header of `mod.rs`.

use super::layout::{BLOCK, OCTET, Panels, SEGMENT, Segment};
use crate::simd::Simd;
use dsq_quant::FloatType;
use std::ops::Range;

/// Sixteen values of one column, as f32, out of an octet.
pub(crate) trait Codes {
    /// Bytes of an octet.
    const BYTES: usize;
    /// Value `j` (0 to 7) of the octet at `p`. Safety: `BYTES` readable bytes, and the path's features.
    unsafe fn column<S: Simd>(p: *const u8, j: usize) -> S::V;
}

macro_rules! codes {
    ($($name:ident, $bytes:expr, $p:ident, $j:ident => $body:expr;)*) => {$(
        pub(crate) struct $name;
        impl Codes for $name {
            const BYTES: usize = $bytes;
            #[inline(always)]
            unsafe fn column<S: Simd>($p: *const u8, $j: usize) -> S::V {
                // SAFETY: the caller's octet.
                unsafe { $body }
            }
        }
    )*};
}
codes! {
    Int4, 64, p, j => S::nibble(p, j as i32);
    // The column's quad is its parity: see `layout.rs`.
    Int8, 128, p, j => S::byte(p.add(64 * (j % 2)), (j / 2) as i32);
    Fp4, 64, p, j => S::e2m1(p, j as i32);
    E4M3, 128, p, j => S::e4m3(p.add(16 * j));
    E5M2, 128, p, j => S::e5m2(p.add(16 * j));
    F16, 256, p, j => S::f16(p.add(32 * j));
    Bf16, 256, p, j => S::bf16(p.add(32 * j));
    F32, 512, p, j => S::load(p.add(64 * j).cast());
}

/// Scales in effect of group `g` of block `b`; None for float storage.
#[inline(always)]
pub(crate) unsafe fn scale<S: Simd>(p: &Panels, b: usize, g: usize) -> Option<S::V> {
    let s = p.scales.as_ref()?;
    let cell = (b * p.groups + g) * BLOCK;
    // SAFETY: block and group are in range, so sixteen scales are readable.
    unsafe {
        let scale = match s.dtype {
            FloatType::F32 => S::load(s.bytes.as_ptr().add(4 * cell).cast()),
            FloatType::F16 => S::f16(s.bytes.as_ptr().add(2 * cell)),
            FloatType::Bf16 => S::bf16(s.bytes.as_ptr().add(2 * cell)),
            FloatType::F8E4M3 => S::e4m3(s.bytes.as_ptr().add(cell)),
            FloatType::F8E8M0 => S::e8m0(s.bytes.as_ptr().add(cell)),
        };
        Some(match s.global {
            Some(global) => S::div(scale, S::splat(global)),
            None => scale,
        })
    }
}

/// Zero points of group `g` of block `b`; None when symmetric or float.
#[inline(always)]
pub(crate) unsafe fn zero<S: Simd>(p: &Panels, b: usize, g: usize) -> Option<S::V> {
    let s = p.scales.as_ref()?;
    if s.zeros.len() == 0 {
        return None;
    }
    // SAFETY: as in `scale`.
    unsafe { Some(S::int8(s.zeros.as_ptr().add((b * p.groups + g) * BLOCK))) }
}

/// `total + scale * part`, one fused step (float storage: `total + part`).
#[inline(always)]
unsafe fn apply<S: Simd>(scale: Option<S::V>, part: S::V, total: S::V) -> S::V {
    // SAFETY: the caller runs on the path `S`.
    unsafe {
        match scale {
            Some(s) => S::fma(s, part, total),
            None => S::add(total, part),
        }
    }
}

/// `body` for the columns 0..8 of an octet, unrolled.
macro_rules! for_octet {
    ($j:ident => $body:expr) => {{
        {
            const $j: usize = 0;
            $body
        }
        {
            const $j: usize = 1;
            $body
        }
        {
            const $j: usize = 2;
            $body
        }
        {
            const $j: usize = 3;
            $body
        }
        {
            const $j: usize = 4;
            $body
        }
        {
            const $j: usize = 5;
            $body
        }
        {
            const $j: usize = 6;
            $body
        }
        {
            const $j: usize = 7;
            $body
        }
    }};
}

/// One token: the blocks of `blocks` (`out` is the whole row of `n` outputs). Several blocks run at once, so that
/// their chains of additions and their cache misses overlap.
///
/// Safety: the path's features; `x` has `p.k` values, `out` is writable for `p.n`, blocks in range.
#[inline(always)]
pub(crate) unsafe fn decode<S: Simd, C: Codes>(p: &Panels, blocks: Range<usize>, x: *const f32, out: *mut f32) {
    let mut b = blocks.start;
    // SAFETY: forwarded.
    unsafe {
        while b + 4 <= blocks.end {
            decode_blocks::<S, C, 4>(p, b, x, out);
            b += 4;
        }
        if b + 2 <= blocks.end {
            decode_blocks::<S, C, 2>(p, b, x, out);
            b += 2;
        }
        if b < blocks.end {
            decode_blocks::<S, C, 1>(p, b, x, out);
        }
    }
}

#[inline(always)]
unsafe fn decode_blocks<S: Simd, C: Codes, const B: usize>(p: &Panels, first: usize, x: *const f32, out: *mut f32) {
    // SAFETY: `first + B` blocks exist; every octet read belongs to a segment of them; `x` holds k values.
    unsafe {
        let base: [*const u8; B] = std::array::from_fn(|b| p.weights.as_ptr().add((first + b) * p.block_bytes));
        // The octet at the same place of the next B blocks: read next by this thread (or past the end: harmless).
        let ahead = B * p.block_bytes;
        let mut total = [S::splat(0.0); B];
        for s in &p.segments {
            let mut part = [S::splat(0.0); B];
            let zeros: [Option<S::V>; B] = std::array::from_fn(|b| zero::<S>(p, first + b, s.group));
            let (full, tail) = (s.len / OCTET, s.len % OCTET);
            let mut at = s.octet * C::BYTES;
            let mut xp = x.add(s.at);
            if zeros[0].is_none() {
                for _ in 0..full {
                    for b in 0..B {
                        for line in 0..C::BYTES / 64 {
                            S::prefetch(base[b].wrapping_add(at + ahead + 64 * line));
                        }
                    }
                    for_octet!(J => {
                        let xv = S::splat(*xp.add(J));
                        for b in 0..B {
                            part[b] = S::fma(C::column::<S>(base[b].add(at), J), xv, part[b]);
                        }
                    });
                    at += C::BYTES;
                    xp = xp.add(OCTET);
                }
            } else {
                for _ in 0..full {
                    for_octet!(J => {
                        let xv = S::splat(*xp.add(J));
                        for b in 0..B {
                            let q = C::column::<S>(base[b].add(at), J);
                            part[b] = S::fma(S::sub(q, zeros[b].unwrap_or(S::splat(0.0))), xv, part[b]);
                        }
                    });
                    at += C::BYTES;
                    xp = xp.add(OCTET);
                }
            }
            for j in 0..tail {
                let xv = S::splat(*xp.add(j));
                for b in 0..B {
                    let q = C::column::<S>(base[b].add(at), j);
                    let q = match zeros[b] {
                        Some(z) => S::sub(q, z),
                        None => q,
                    };
                    part[b] = S::fma(q, xv, part[b]);
                }
            }
            for b in 0..B {
                total[b] = apply::<S>(scale::<S>(p, first + b, s.group), part[b], total[b]);
            }
        }
        for b in 0..B {
            store_row::<S>(p, first + b, total[b], out);
        }
    }
}

/// Writes the outputs of a block to its place in a row of `n` outputs.
#[inline(always)]
pub(crate) unsafe fn store_row<S: Simd>(p: &Panels, block: usize, v: S::V, row: *mut f32) {
    let at = block * BLOCK;
    // SAFETY: the row is writable for n values; a partial block goes through a buffer.
    unsafe {
        if at + BLOCK <= p.n {
            S::store(row.add(at), v);
        } else {
            let mut lanes = [0.0f32; BLOCK];
            S::store(lanes.as_mut_ptr(), v);
            for (i, &lane) in lanes.iter().take(p.n - at).enumerate() {
                *row.add(at + i) = lane;
            }
        }
    }
}

/// Tokens that are worked on together: their inputs and partial outputs stay in the cache.
pub(crate) const CHUNK: usize = 48;

/// The tiles of `m` tokens (at most `CHUNK`): `(first token, tokens)`, tokens one of 12, 6, 4, 2, 1.
pub(crate) fn tiles(m: usize, widest: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let len = [12, 6, 4, 2, 1].into_iter().find(|&t| t <= widest && t <= m - at)?;
        at += len;
        Some((at - len, len))
    })
}

/// Reorders the inputs `[m, k]` tile by tile into `[k][tokens of the tile]`, so that a tile reads one stream.
pub(crate) fn pack_tokens(x: &[f32], m: usize, k: usize, widest: usize, out: &mut Vec<f32>) {
    out.clear();
    out.reserve(m * k);
    for (first, len) in tiles(m, widest) {
        let rows: Vec<&[f32]> = (first..first + len).map(|t| &x[t * k..(t + 1) * k]).collect();
        for i in 0..k {
            out.extend(rows.iter().map(|r| r[i]));
        }
    }
}

#[repr(C, align(64))]
struct Scratch {
    /// Codes of one segment as f32, `[len][V * 16]`.
    codes: [f32; SEGMENT * 2 * BLOCK],
    /// Running outputs, `[token][V * 16]`.
    totals: [f32; CHUNK * 2 * BLOCK],
}

/// Many tokens: the blocks of `blocks` for `m <= CHUNK` tokens packed by [`pack_tokens`]; `out` is `[m, n]`.
///
/// Safety: the path's features; `x` has `m * p.k` values, `out` is writable for `m * p.n`, blocks in range.
#[inline(always)]
pub(crate) unsafe fn multiply<S: Simd, C: Codes>(
    p: &Panels,
    blocks: Range<usize>,
    x: *const f32,
    m: usize,
    out: *mut f32,
) {
    let mut scratch = Scratch { codes: [0.0; SEGMENT * 2 * BLOCK], totals: [0.0; CHUNK * 2 * BLOCK] };
    let mut b = blocks.start;
    // SAFETY: forwarded.
    unsafe {
        while S::TILE_BLOCKS == 2 && b + 2 <= blocks.end {
            multiply_blocks::<S, C, 2>(p, b, x, m, out, &mut scratch);
            b += 2;
        }
        while b < blocks.end {
            multiply_blocks::<S, C, 1>(p, b, x, m, out, &mut scratch);
            b += 1;
        }
    }
}

#[inline(always)]
unsafe fn multiply_blocks<S: Simd, C: Codes, const V: usize>(
    p: &Panels,
    first: usize,
    x: *const f32,
    m: usize,
    out: *mut f32,
    scratch: &mut Scratch,
) {
    let width = V * BLOCK;
    scratch.totals[..m * width].fill(0.0);
    // SAFETY: blocks in range; the scratch holds a segment of V <= 2 blocks and CHUNK rows of totals.
    unsafe {
        for s in &p.segments {
            for v in 0..V {
                unpack::<S, C>(p, first + v, s, scratch.codes.as_mut_ptr().add(v * BLOCK), width);
            }
            let scales: [Option<S::V>; V] = std::array::from_fn(|v| scale::<S>(p, first + v, s.group));
            let (codes, totals) = (scratch.codes.as_ptr(), scratch.totals.as_mut_ptr());
            for (t, len) in tiles(m, S::TILE_TOKENS) {
                let xt = x.add(t * p.k + s.at * len);
                let to = totals.add(t * width);
                match len {
                    12 => tile::<S, V, 12>(codes, s.len, xt, scales, to),
                    6 => tile::<S, V, 6>(codes, s.len, xt, scales, to),
                    4 => tile::<S, V, 4>(codes, s.len, xt, scales, to),
                    2 => tile::<S, V, 2>(codes, s.len, xt, scales, to),
                    _ => tile::<S, V, 1>(codes, s.len, xt, scales, to),
                }
            }
        }
        for t in 0..m {
            for v in 0..V {
                let lanes = S::load(scratch.totals.as_ptr().add(t * width + v * BLOCK));
                store_row::<S>(p, first + v, lanes, out.add(t * p.n));
            }
        }
    }
}

/// Writes a segment of a block as f32, `[len]` rows of `stride` values.
#[inline(always)]
unsafe fn unpack<S: Simd, C: Codes>(p: &Panels, block: usize, s: &Segment, to: *mut f32, stride: usize) {
    // SAFETY: the caller's scratch holds the segment.
    unsafe {
        let from = p.weights.as_ptr().add(block * p.block_bytes + s.octet * C::BYTES);
        let zero = zero::<S>(p, block, s.group);
        // No closure: one that is not inlined would lack the path's features.
        macro_rules! put {
            ($i:expr, $j:expr) => {
                let q = C::column::<S>(from.add($i / OCTET * C::BYTES), $j);
                let q = match zero {
                    Some(z) => S::sub(q, z),
                    None => q,
                };
                S::store(to.add(($i + $j) * stride), q);
            };
        }
        let full = s.len / OCTET * OCTET;
        for i in (0..full).step_by(OCTET) {
            for_octet!(J => {
                put!(i, J);
            });
        }
        for j in 0..s.len - full {
            put!(full, j);
        }
    }
}

/// `totals[t][..] += scale * sum_i codes[i][..] * x[i][t]` for V blocks and T tokens held in registers.
#[inline(always)]
unsafe fn tile<S: Simd, const V: usize, const T: usize>(
    codes: *const f32,
    len: usize,
    x: *const f32,
    scales: [Option<S::V>; V],
    totals: *mut f32,
) {
    // SAFETY: codes `[len][V * 16]`, x `[len][T]`, totals `[T][V * 16]`.
    unsafe {
        let mut part = [[S::splat(0.0); V]; T];
        for i in 0..len {
            let q: [S::V; V] = std::array::from_fn(|v| S::load(codes.add((i * V + v) * BLOCK)));
            for t in 0..T {
                let xv = S::splat(*x.add(i * T + t));
                for v in 0..V {
                    part[t][v] = S::fma(q[v], xv, part[t][v]);
                }
            }
        }
        for t in 0..T {
            for v in 0..V {
                let to = totals.add((t * V + v) * BLOCK);
                S::store(to, apply::<S>(scales[v], part[t][v], S::load(to)));
            }
        }
    }
}
