//! Inputs of a linear layer rounded to INT8 and laid out for the integer kernels (`int.rs`). Not a storage format, and not
//! the rounding of weights.
//!
//! - Shapes: `x [m, k]`; one scale for each token and piece (at most 16 columns) of the reduction.
//! - Layout: tiles of tokens ([`tile`]), one after another. Codes of a tile: `[octet][token][8]`, the eight values of an octet as two
//!   quads, columns 0, 2, 4, 6 and 1, 3, 5, 7 (what a shift and a mask make of a word of INT4 weights). Scales and starts of a
//!   tile: `[piece][token]`; what a zero point takes away: `[segment][token]`, written for asymmetric weights alone.
//! - Requires: nothing; AVX-512BW and AVX2 are found at run time.
//! - Order: each piece on its own, the sum of a segment over its pieces in increasing k, so neither m nor the threads change a bit.
//! - Cost: two reads of the input, one multiplication for each value (on a stored grid a division).
//! - Error: at most half a step, `absmax / 254`, for each value; see `int.rs`.
//!
//! Rule of the mode [`super::Activations::Int8`]: `scale = absmax / 127` of the piece, `code = round_ties_even(x * (127 / absmax))`,
//! which is at most 127 in magnitude. A piece whose scale would be subnormal (absmax below 1.5e-36) has scale and codes 0. On a
//! checkpoint's grid the scale and the codes are those of [`dsq_quant::InputGrid`]. A value that is not finite makes the scale of all
//! that shares it NaN, and with it every output of the token.

use super::int::IntPath;
use super::layout::{OCTET, PIECE, Panels};
use crate::fake_quant;
use crate::parallel::{OutPtr, split};
use dsq_quant::InputGrid;
use std::cell::Cell;

/// Values from which rounding is divided over the threads: below, starting them costs more.
const PARALLEL: usize = 1 << 15;

/// The tiles of `m` tokens, each of at most `widest` and none longer than another by more than one: `(first, tokens)` of tile `i`.
pub(crate) fn tile(i: usize, m: usize, widest: usize) -> (usize, usize) {
    let tiles = m.div_ceil(widest);
    let (first, end) = (i * m / tiles, (i + 1) * m / tiles);
    (first, end - first)
}

/// Rounded inputs. The buffers are kept from call to call (see [`Rounded::with`]).
#[derive(Default)]
pub(crate) struct Rounded {
    m: usize,
    widest: usize,
    octets: usize,
    pieces: usize,
    segments: usize,
    codes: Vec<u64>,
    scales: Vec<f32>,
    starts: Vec<i32>,
    minus: Vec<f32>,
}

/// A tile of [`Rounded`].
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    pub first: usize,
    pub tokens: usize,
    /// `[octet][token][8]`.
    pub codes: *const u8,
    /// `[piece][token]`.
    pub scales: *const f32,
    /// `[piece][token]`: minus 8 times the sum of the codes, where the dot product of codes of four bits starts.
    pub starts: *const i32,
    /// `[segment][token]`: minus the sum of the rounded inputs.
    pub minus: *const f32,
}

thread_local! {
    /// Taken out while it is used: a thread that waits for others may begin another product meanwhile.
    static ROOM: Cell<Rounded> = Cell::default();
}

impl Rounded {
    /// `body` on inputs `x [m, k]` rounded for layers with the same segments, in buffers that this thread keeps.
    pub(crate) fn with<R>(
        path: IntPath,
        grid: Option<&InputGrid>,
        layers: &[&Panels],
        x: &[f32],
        m: usize,
        body: impl FnOnce(&Self) -> R,
    ) -> R {
        let mut room = ROOM.take();
        room.round(path, grid, layers, x, m);
        let result = body(&room);
        ROOM.set(room);
        result
    }

    fn round(&mut self, path: IntPath, grid: Option<&InputGrid>, layers: &[&Panels], x: &[f32], m: usize) {
        let p = layers[0];
        let sums = layers.iter().any(|p| p.scales.as_ref().is_some_and(|s| s.zeros.len() > 0));
        let octets = p.segments.last().map_or(0, |s| s.octet + s.len.div_ceil(OCTET));
        let pieces = p.segments.iter().map(|s| s.len.div_ceil(PIECE)).sum();
        (self.m, self.widest) = (m, path.widest());
        (self.octets, self.pieces, self.segments) = (octets, pieces, p.segments.len());
        // Every place that is read is written below, so what an earlier call left is not cleared.
        grow(&mut self.codes, m * octets);
        grow(&mut self.scales, m * pieces);
        grow(&mut self.starts, m * pieces);
        grow(&mut self.minus, m * self.segments);
        let places = Places {
            codes: OutPtr(self.codes.as_mut_ptr().cast()),
            scales: OutPtr(self.scales.as_mut_ptr()),
            starts: OutPtr(self.starts.as_mut_ptr().cast()),
            minus: OutPtr(self.minus.as_mut_ptr()),
        };
        let tokens = |range: std::ops::Range<usize>| {
            let mut scales = Vec::new();
            for i in range {
                let (first, tokens) = tile(i, m, self.widest);
                for t in 0..tokens {
                    let row = &x[(first + t) * p.k..][..p.k];
                    let fixed = grid.map(|g| runs(g, row, &mut scales)).map(|run| Runs { scales: &scales, run });
                    let (codes, cells) = (first * octets, first * pieces);
                    let sums = sums.then_some(first * p.segments.len());
                    let to = Token { p, row, fixed, places, codes, cells, sums, tokens, t };
                    // SAFETY: this part's tile lies within the buffers, which were grown for `m` tokens; tiles are disjoint.
                    unsafe { to.round(path) };
                }
            }
        };
        let tiles = self.tiles();
        if m * p.k < PARALLEL { tokens(0..tiles) } else { split(tiles, 1, &tokens) }
    }

    pub(crate) fn tiles(&self) -> usize {
        self.m.div_ceil(self.widest)
    }

    pub(crate) fn tile(&self, i: usize) -> Tile {
        let (first, tokens) = tile(i, self.m, self.widest);
        Tile {
            first,
            tokens,
            codes: self.codes[first * self.octets..].as_ptr().cast(),
            scales: self.scales[first * self.pieces..].as_ptr(),
            starts: self.starts[first * self.pieces..].as_ptr(),
            minus: self.minus[first * self.segments..].as_ptr(),
        }
    }
}

#[derive(Clone, Copy)]
struct Places {
    codes: OutPtr,
    scales: OutPtr,
    starts: OutPtr,
    minus: OutPtr,
}

fn grow<T: Copy + Default>(v: &mut Vec<T>, len: usize) {
    if v.len() < len {
        v.resize(len, T::default());
    }
}

/// The scale in effect of each run of `row` on a stored grid (NaN for one that has none), and the length of a run.
fn runs(grid: &InputGrid, row: &[f32], scales: &mut Vec<f32>) -> usize {
    let run = grid.args.group_len(row.len()).unwrap_or(row.len()).max(1);
    scales.clear();
    scales.extend(row.chunks(run).map(|values| {
        let range = fake_quant::range(values);
        let found = || grid.run_qparams(range.lo, range.hi).map_or(f32::NAN, |p| p.scale);
        if range.finite { grid.params.map_or_else(found, |p| p.scale) } else { f32::NAN }
    }));
    run
}

/// The scales of the runs of a token on a stored grid.
#[derive(Clone, Copy)]
struct Runs<'a> {
    scales: &'a [f32],
    /// Values of a run.
    run: usize,
}

/// A token that is rounded, and its place in its tile.
struct Token<'a> {
    p: &'a Panels,
    row: &'a [f32],
    fixed: Option<Runs<'a>>,
    places: Places,
    /// The tile's first octet, its first scale and, where some layer has zero points, its first sum of a segment.
    codes: usize,
    cells: usize,
    sums: Option<usize>,
    tokens: usize,
    t: usize,
}

impl Token<'_> {
    /// Rounds all pieces and sums the segments up.
    ///
    /// Safety: the CPU has the path; the token's places are writable.
    unsafe fn round(&self, path: IntPath) {
        // SAFETY: forwarded.
        unsafe {
            match path {
                #[cfg(target_arch = "x86_64")]
                IntPath::Vnni512 => x86::token_avx512(self),
                #[cfg(target_arch = "x86_64")]
                IntPath::Avx2 | IntPath::Vnni256 => x86::token_avx2(self),
                #[cfg(all(test, target_arch = "x86_64"))]
                IntPath::Vnni256Vl => x86::token_avx2(self),
                #[cfg(target_arch = "aarch64")]
                IntPath::Neon => plain_token(self),
                IntPath::Scalar => plain_token(self),
            }
        }
    }

    /// `piece` rounds one: its codes go to the pointer, an octet every so many bytes, the last filled up with zeros. It is given
    /// the scale (`None`: that of the piece's own largest magnitude) and gives the scale and the sum of the codes.
    ///
    /// Safety: the token's places are writable.
    #[inline(always)]
    unsafe fn each(&self, piece: impl Fn(&[f32], Option<f32>, *mut u8, usize) -> (f32, i32)) {
        for (i, (at, len, octet)) in self.p.segments.iter().flat_map(|s| s.pieces()).enumerate() {
            let fixed = self.fixed.map(|f| f.scales[at / f.run]);
            // SAFETY: a tile holds the octets, scales and starts of all pieces for each of its tokens.
            unsafe {
                let (scale, sum) = piece(&self.row[at..at + len], fixed, self.octet(octet), self.tokens * OCTET);
                self.put(i, scale, -8 * sum);
            }
        }
    }

    /// Where an octet of the token stands.
    ///
    /// Safety: the token has it.
    #[inline(always)]
    unsafe fn octet(&self, octet: usize) -> *mut u8 {
        // SAFETY: as told.
        unsafe { self.places.codes.get().cast::<u8>().add((self.codes + octet * self.tokens + self.t) * OCTET) }
    }

    /// Writes what belongs to piece `i`.
    ///
    /// Safety: the token has it, its places are writable.
    #[inline(always)]
    unsafe fn put(&self, i: usize, scale: f32, start: i32) {
        let cell = self.cells + i * self.tokens + self.t;
        // SAFETY: as told.
        unsafe {
            *self.places.scales.get().add(cell) = scale;
            *self.places.starts.get().cast::<i32>().add(cell) = start;
        }
    }

    /// Writes the sums of the segments, where they are wanted, from the scales and starts.
    ///
    /// Safety: the token's places are writable, its scales and starts written.
    #[inline(always)]
    unsafe fn sum(&self) {
        let Some(first) = self.sums else { return };
        let mut cell = self.cells + self.t;
        for (i, s) in self.p.segments.iter().enumerate() {
            let mut minus = 0.0f32;
            // SAFETY: a tile holds scales and starts of all pieces and a sum for each segment.
            unsafe {
                for _ in s.pieces() {
                    let start = *self.places.starts.get().cast::<i32>().add(cell);
                    minus = (*self.places.scales.get().add(cell)).mul_add((start >> 3) as f32, minus);
                    cell += self.tokens;
                }
                *self.places.minus.get().add(first + i * self.tokens + self.t) = minus;
            }
        }
    }
}

/// What values are multiplied by (`fixed`: divided by), and the scale. NaN for both when a value is not finite.
#[inline(always)]
fn scales_of(absmax_bits: u32, fixed: Option<f32>) -> (f32, f32) {
    if let Some(scale) = fixed {
        return (scale, scale);
    }
    let absmax = f32::from_bits(absmax_bits);
    if !absmax.is_finite() {
        return (f32::NAN, f32::NAN);
    }
    let scale = absmax / 127.0;
    if scale < f32::MIN_POSITIVE { (0.0, 0.0) } else { (127.0 / absmax, scale) }
}

/// Safety: as [`Token::each`].
#[inline(always)]
unsafe fn plain_token(token: &Token) {
    // SAFETY: forwarded.
    unsafe {
        token.each(|x, fixed, to, stride| plain_piece(x, fixed, to, stride));
        token.sum();
    }
}

/// The rounding in plain Rust, written so that a compiler can use vectors.
///
/// Safety: as [`Token::each`].
#[inline(always)]
unsafe fn plain_piece(x: &[f32], fixed: Option<f32>, to: *mut u8, stride: usize) -> (f32, i32) {
    let mut values = [0.0f32; PIECE];
    values[..x.len()].copy_from_slice(x);
    let absmax = values.iter().fold(0u32, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
    let (by, scale) = scales_of(absmax, fixed);
    let mut codes = [0i32; PIECE];
    if !scale.is_nan() {
        // 1.5 * 2^23: a sum with it has the integer nearest to the other term, ties to even, in its low bits.
        const MAGIC: f32 = 12_582_912.0;
        let nearest = |c: f32| (c + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32;
        if fixed.is_some() {
            for (code, &v) in codes.iter_mut().zip(&values) {
                *code = nearest((v / by).clamp(-128.0, 127.0));
            }
        } else {
            for (code, &v) in codes.iter_mut().zip(&values) {
                *code = nearest(v * by);
            }
        }
    }
    for (i, octet) in codes.chunks_exact(OCTET).take(x.len().div_ceil(OCTET)).enumerate() {
        let quads = [0, 2, 4, 6, 1, 3, 5, 7].map(|j: usize| octet[j] as u8);
        // SAFETY: the caller's octets.
        unsafe { to.add(i * stride).cast::<[u8; OCTET]>().write(quads) };
    }
    (scale, codes.iter().sum())
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{OCTET, PIECE, Token, plain_token, scales_of};
    use std::arch::x86_64::*;

    /// Safety: as [`Token::round`], with AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn token_avx2(token: &Token) {
        // SAFETY: forwarded.
        unsafe { plain_token(token) }
    }

    /// Safety: as [`Token::round`], with AVX-512F, BW and VNNI, AVX2 and FMA.
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma")]
    pub(super) unsafe fn token_avx512(token: &Token) {
        // SAFETY: forwarded. Where all pieces are full, piece `i` has columns from 16 i and octets from 2 i.
        unsafe {
            let full = token.p.group_len.is_multiple_of(PIECE) && token.row.len().is_multiple_of(PIECE);
            if full && token.fixed.is_none() {
                let (fours, rest) = token.row.as_chunks::<{ 4 * PIECE }>();
                for (i, x) in fours.iter().enumerate() {
                    four_pieces(token, 4 * i, x);
                }
                for (i, x) in (4 * fours.len()..).zip(rest.as_chunks::<PIECE>().0) {
                    let (scale, sum) = piece_avx512::<true>(x, None, token.octet(2 * i), token.tokens * OCTET);
                    token.put(i, scale, -8 * sum);
                }
            } else {
                token.each(|x, fixed, to, stride| match x.len() {
                    PIECE => piece_avx512::<true>(x, fixed, to, stride),
                    _ => piece_avx512::<false>(x, fixed, to, stride),
                });
            }
            token.sum();
        }
    }

    /// [`piece_avx512`] without a fixed scale for four pieces from the one numbered `first`, whose horizontal steps they share.
    ///
    /// Safety: the token has the pieces, all full, and its places are writable; AVX-512F, BW and VNNI, AVX2 and FMA.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vnni,avx2,fma")]
    unsafe fn four_pieces(token: &Token, first: usize, x: &[f32; 4 * PIECE]) {
        // SAFETY: four pieces of inputs are read, eight octets, four scales and starts written.
        unsafe {
            let mut values = [_mm512_setzero_ps(); 4];
            let mut halves = [_mm256_setzero_si256(); 4];
            for i in 0..4 {
                values[i] = _mm512_loadu_ps(x.as_ptr().add(i * PIECE));
                let bits = _mm512_and_si512(_mm512_castps_si512(values[i]), _mm512_set1_epi32(0x7fff_ffff));
                halves[i] = _mm256_max_epu32(_mm512_castsi512_si256(bits), _mm512_extracti64x4_epi64::<1>(bits));
            }
            // Two, then four maxima beside one another.
            let pair = |a, b| _mm256_max_epu32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
            let (a, b) = (pair(halves[0], halves[1]), pair(halves[2], halves[3]));
            let four = _mm256_max_epu32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
            let absmax = _mm_max_epu32(_mm256_castsi256_si128(four), _mm256_extracti128_si256::<1>(four));
            let absmax = _mm_castsi128_ps(absmax);
            if _mm_movemask_ps(_mm_cmplt_ps(absmax, _mm_set1_ps(f32::INFINITY))) != 15 {
                for (i, x) in (first..).zip(x.as_chunks::<PIECE>().0) {
                    let (scale, sum) = piece_avx512::<true>(x, None, token.octet(2 * i), token.tokens * OCTET);
                    token.put(i, scale, -8 * sum);
                }
                return;
            }
            // `scales_of`
            let scale = _mm_div_ps(absmax, _mm_set1_ps(127.0));
            let tiny = _mm_cmplt_ps(scale, _mm_set1_ps(f32::MIN_POSITIVE));
            let (mut by, mut scales, mut starts) = ([0.0f32; 4], [0.0f32; 4], [0i32; 4]);
            _mm_storeu_ps(scales.as_mut_ptr(), _mm_andnot_ps(tiny, scale));
            _mm_storeu_ps(by.as_mut_ptr(), _mm_andnot_ps(tiny, _mm_div_ps(_mm_set1_ps(127.0), absmax)));
            let code = |i: usize| _mm512_cvtps_epi32(_mm512_mul_ps(values[i], _mm512_set1_ps(by[i])));
            let (a, b) = (_mm512_packs_epi32(code(0), code(1)), _mm512_packs_epi32(code(2), code(3)));
            // In each quarter four codes of each piece; then in quarter `i` those of piece `i`.
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            let codes = _mm512_permutexvar_epi32(order, _mm512_packs_epi16(a, b));
            let eights = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(8), codes);
            let eights = _mm512_add_epi32(eights, _mm512_shuffle_epi32::<0b10_11_00_01>(eights));
            let eights = _mm512_add_epi32(eights, _mm512_shuffle_epi32::<0b01_00_11_10>(eights));
            let firsts =
                _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0), eights);
            let minus = _mm_sub_epi32(_mm_setzero_si128(), _mm512_castsi512_si128(firsts));
            _mm_storeu_si128(starts.as_mut_ptr().cast(), minus);
            let quads = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
            let codes = _mm512_shuffle_epi8(codes, _mm512_broadcast_i32x4(quads));
            let mut octets = [0u64; 8];
            _mm512_storeu_si512(octets.as_mut_ptr().cast(), codes);
            for (i, octet) in octets.into_iter().enumerate() {
                token.octet(2 * first + i).cast::<u64>().write_unaligned(octet);
            }
            for i in 0..4 {
                token.put(first + i, scales[i], starts[i]);
            }
        }
    }

    /// Safety: as [`Token::each`], with AVX-512F and AVX2; `FULL`: the piece has its greatest length.
    #[inline]
    #[target_feature(enable = "avx512f,avx2")]
    unsafe fn piece_avx512<const FULL: bool>(x: &[f32], fixed: Option<f32>, to: *mut u8, stride: usize) -> (f32, i32) {
        let len = if FULL { PIECE } else { x.len() };
        // SAFETY: a masked load reads values of `x` alone; octets are written as far as `x` goes.
        unsafe {
            let values = _mm512_maskz_loadu_ps(if FULL { 0xffff } else { (1u16 << len) - 1 }, x.as_ptr());
            let absmax = match fixed {
                None => _mm512_reduce_max_epu32(_mm512_and_si512(
                    _mm512_castps_si512(values),
                    _mm512_set1_epi32(0x7fff_ffff),
                )),
                Some(_) => 0,
            };
            let (by, scale) = scales_of(absmax, fixed);
            let factor = _mm512_set1_ps(by);
            let scaled = if fixed.is_some() {
                let c = _mm512_max_ps(_mm512_div_ps(values, factor), _mm512_set1_ps(-128.0));
                _mm512_min_ps(c, _mm512_set1_ps(127.0))
            } else {
                _mm512_mul_ps(values, factor)
            };
            // A piece without a scale has codes 0.
            let codes = _mm512_maskz_cvtps_epi32(if scale.is_nan() { 0 } else { 0xffff }, scaled);
            let quads = _mm_setr_epi8(0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15);
            let bytes = _mm_shuffle_epi8(_mm512_cvtepi32_epi8(codes), quads);
            _mm_storel_epi64(to.cast(), bytes);
            if len > OCTET {
                _mm_storel_epi64(to.add(stride).cast(), _mm_unpackhi_epi64(bytes, bytes));
            }
            (scale, _mm512_reduce_add_epi32(codes))
        }
    }
}
