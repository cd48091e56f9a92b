//! The block grids of GGUF: values to the bytes that `llama.cpp` and the Python package `gguf` write, bytes to the values
//! that their decoders see, and fake quantization on the same grids. Not the file format (see `dsq-checkpoint`), and not
//! compressed-tensors' grids (see `args.rs`): here the bytes of a block are the quantization.
//!
//! A row is cut into blocks of 32 or 256 values that are stored one after the other, each with its own scales. Encoders
//! follow ggml's reference quantizers (`quantize_row_*_ref` in `ggml-quants.c`) in f32, operation by operation, without
//! fused multiply-add: the bytes are those of ggml built for x86-64 and of `gguf` 0.19 (`tests/golden/gguf_grids.txt`).
//! What ggml would store as an infinite scale is an error here.

mod decode;
mod encode;
pub mod q4_k;
pub mod q6_k;
mod transcode;

use crate::{FloatType, QuantError};
use half::f16;

/// Values per K-quant super-block.
pub(crate) const SUPER_BLOCK: usize = 256;

/// A block grid of GGUF.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GgufGrid {
    /// 32 codes of 4 bits and a scale.
    Q4_0,
    /// 32 codes of 4 bits, a scale and a minimum.
    Q4_1,
    /// 32 codes of 5 bits and a scale.
    Q5_0,
    /// 32 codes of 5 bits, a scale and a minimum.
    Q5_1,
    /// 32 codes of 8 bits and a scale.
    Q8_0,
    /// 256 codes of 4 bits, 8 scales and 8 minima of 6 bits, a scale for each of the two.
    Q4K,
    /// As Q4_K with codes of 5 bits.
    Q5K,
    /// 256 codes of 6 bits, 16 scales of 8 bits and their scale.
    Q6K,
}

impl GgufGrid {
    /// Every grid.
    pub const ALL: [GgufGrid; 8] = [
        GgufGrid::Q4_0,
        GgufGrid::Q4_1,
        GgufGrid::Q5_0,
        GgufGrid::Q5_1,
        GgufGrid::Q8_0,
        GgufGrid::Q4K,
        GgufGrid::Q5K,
        GgufGrid::Q6K,
    ];

    /// ggml's name: `Q4_0`, `Q4_K`.
    pub fn name(self) -> &'static str {
        match self {
            GgufGrid::Q4_0 => "Q4_0",
            GgufGrid::Q4_1 => "Q4_1",
            GgufGrid::Q5_0 => "Q5_0",
            GgufGrid::Q5_1 => "Q5_1",
            GgufGrid::Q8_0 => "Q8_0",
            GgufGrid::Q4K => "Q4_K",
            GgufGrid::Q5K => "Q5_K",
            GgufGrid::Q6K => "Q6_K",
        }
    }

    /// Values per block; a row is a whole number of blocks.
    pub fn block_len(self) -> usize {
        match self {
            GgufGrid::Q4_0 | GgufGrid::Q4_1 | GgufGrid::Q5_0 | GgufGrid::Q5_1 | GgufGrid::Q8_0 => 32,
            GgufGrid::Q4K | GgufGrid::Q5K | GgufGrid::Q6K => SUPER_BLOCK,
        }
    }

    /// Bytes per block.
    pub fn block_bytes(self) -> usize {
        match self {
            GgufGrid::Q4_0 => 2 + 16,
            GgufGrid::Q4_1 => 2 + 2 + 16,
            GgufGrid::Q5_0 => 2 + 4 + 16,
            GgufGrid::Q5_1 => 2 + 2 + 4 + 16,
            GgufGrid::Q8_0 => 2 + 32,
            GgufGrid::Q4K => 2 + 2 + 12 + 128,
            GgufGrid::Q5K => 2 + 2 + 12 + 32 + 128,
            GgufGrid::Q6K => 128 + 64 + 16 + 2,
        }
    }

    /// Bits per weight, everything counted: 4.5 for `Q4_0` and `Q4_K`, 6.5625 for `Q6_K`, 8.5 for `Q8_0`.
    pub fn bits_per_weight(self) -> f64 {
        (8 * self.block_bytes()) as f64 / self.block_len() as f64
    }

    /// The blocks of `x`: whole rows, one after the other, so that no block crosses a row when
    /// [`GgufGrid::block_len`] divides it.
    ///
    /// # Errors
    /// [`QuantError::Length`] when `x` is no whole number of
    /// blocks, [`QuantError::NonFinite`], and [`QuantError::ScaleOverflow`] (the group is the block) when a scale or a
    /// minimum does not fit f16.
    pub fn quantize(self, x: &[f32]) -> Result<Vec<u8>, QuantError> {
        let encode = self.encoder();
        self.whole(x.len())?;
        if let Some(index) = x.iter().position(|v| !v.is_finite()) {
            let count = x.iter().filter(|v| !v.is_finite()).count();
            return Err(QuantError::NonFinite { index, value: x[index], count });
        }
        let (len, size) = (self.block_len(), self.block_bytes());
        let mut bytes = vec![0u8; x.len() / len * size];
        let mut inside = [0u8; SUPER_BLOCK];
        for (group, (x, bytes)) in x.chunks_exact(len).zip(bytes.chunks_exact_mut(size)).enumerate() {
            encode(x, bytes, &mut inside[..len]).map_err(|scale| overflow(x, group, scale))?;
        }
        Ok(bytes)
    }

    /// The values of whole blocks. Every decoder is exact up to its last operation: an f16 scale has 11 significant bits, a
    /// block scale at most 8 and a code at most 8, so each product fits the 24 bits of an f32 and only the addition of a
    /// minimum rounds, once. The result therefore does not depend on the order of the products or on fused multiply-add,
    /// and equals ggml's on every machine.
    ///
    /// # Errors
    /// [`QuantError::Length`] when `out` is no whole number of blocks or `bytes` holds another number of them.
    pub fn dequantize(self, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
        self.whole(out.len())?;
        let expected = out.len() / self.block_len() * self.block_bytes();
        if bytes.len() != expected {
            return Err(QuantError::Length { what: "bytes of blocks", expected, got: bytes.len() });
        }
        let decode = self.decoder();
        for (block, values) in bytes.chunks_exact(self.block_bytes()).zip(out.chunks_exact_mut(self.block_len())) {
            decode(block, values);
        }
        Ok(())
    }

    /// Quantize then dequantize, for training: `out` gets what a decoder of the blocks sees, `inside` 1 where the
    /// straight-through gradient passes, else 0. It passes where the rounded code needs no clipping (these formats round
    /// first and clip then; scales and minima are constants of the step). What clips: in `Q4_0` values beyond 7.5 steps on
    /// the side away from the value of largest magnitude (15.5 in `Q5_0`), in `Q4_K` and `Q6_K` values that the fitted scale
    /// leaves out; in `Q4_1`
    /// and `Q8_0` nothing.
    ///
    /// A block that cannot be quantized becomes NaN with an open mask, so that a training loop sees it in its loss; the
    /// error of the first such block is returned once everything else is done.
    ///
    /// # Errors
    /// As [`GgufGrid::quantize`] (nothing is written for a wrong length); [`QuantError::NonFinite`] counts one
    /// block only.
    pub fn fake_quantize(self, x: &[f32], out: &mut [f32], inside: &mut [u8]) -> Result<(), QuantError> {
        let (encode, decode) = (self.encoder(), self.decoder());
        self.whole(x.len())?;
        for (what, got) in [("output", out.len()), ("mask", inside.len())] {
            if got != x.len() {
                return Err(QuantError::Length { what, expected: x.len(), got });
            }
        }
        let len = self.block_len();
        let mut bytes = [0u8; SUPER_BLOCK];
        let bytes = &mut bytes[..self.block_bytes()];
        let mut first = Ok(());
        let blocks = x.chunks_exact(len).zip(out.chunks_exact_mut(len).zip(inside.chunks_exact_mut(len)));
        for (group, (x, (out, inside))) in blocks.enumerate() {
            let done = match x.iter().position(|v| !v.is_finite()) {
                Some(at) => {
                    let count = x.iter().filter(|v| !v.is_finite()).count();
                    Err(QuantError::NonFinite { index: group * len + at, value: x[at], count })
                }
                None => {
                    bytes.fill(0);
                    encode(x, bytes, inside).map_err(|scale| overflow(x, group, scale))
                }
            };
            match done {
                Ok(()) => decode(bytes, out),
                Err(e) => {
                    out.fill(f32::NAN);
                    inside.fill(1);
                    first = first.and(Err(e));
                }
            }
        }
        first
    }

    fn whole(self, len: usize) -> Result<(), QuantError> {
        let block = self.block_len();
        if len.is_multiple_of(block) {
            return Ok(());
        }
        Err(QuantError::Length { what: "values of whole blocks", expected: len.next_multiple_of(block), got: len })
    }

    fn encoder(self) -> Encoder {
        match self {
            GgufGrid::Q4_0 => encode::q4_0,
            GgufGrid::Q4_1 => encode::q4_1,
            GgufGrid::Q5_0 => encode::q5_0,
            GgufGrid::Q5_1 => encode::q5_1,
            GgufGrid::Q8_0 => encode::q8_0,
            GgufGrid::Q4K => q4_k::encode,
            GgufGrid::Q5K => q4_k::encode_q5,
            GgufGrid::Q6K => q6_k::encode,
        }
    }

    fn decoder(self) -> fn(&[u8], &mut [f32]) {
        match self {
            GgufGrid::Q4_0 => decode::q4_0,
            GgufGrid::Q4_1 => decode::q4_1,
            GgufGrid::Q5_0 => decode::q5_0,
            GgufGrid::Q5_1 => decode::q5_1,
            GgufGrid::Q8_0 => decode::q8_0,
            GgufGrid::Q4K => decode::q4_k,
            GgufGrid::Q5K => decode::q5_k,
            GgufGrid::Q6K => decode::q6_k,
        }
    }
}

/// From the finite values of one block to its bytes (zeroed before) and the straight-through mask. The error is the
/// scale or minimum that does not fit f16.
type Encoder = fn(&[f32], &mut [u8], &mut [u8]) -> Result<(), f32>;

fn overflow(x: &[f32], group: usize, scale: f32) -> QuantError {
    let (lo, hi) = x.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), &v| (l.min(v), h.max(v)));
    QuantError::ScaleOverflow { group, lo, hi, scale, dtype: FloatType::F16 }
}

/// Writes a scale or a minimum as f16 (nearest, ties to even). The error is `x`, when it does not fit.
fn put_f16(bytes: &mut [u8], at: usize, x: f32) -> Result<(), f32> {
    let half = f16::from_f32(x);
    if !half.is_finite() {
        return Err(x);
    }
    bytes[at..at + 2].copy_from_slice(&half.to_le_bytes());
    Ok(())
}

fn f16_at(b: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
}

/// The nearest integer, ties to even, read from the low bits of `x + 1.5 * 2^23`: right for |x| up to 2^22 and, beyond,
/// what ggml gives too.
fn nearest(x: f32) -> i32 {
    ((x + 12_582_912.0).to_bits() & 0x007f_ffff) as i32 - 0x0040_0000
}

#[cfg(test)]
mod tests;
