//! Packing of signed codes into 32-bit words, as compressed-tensors stores them. Not a kernel layout.
//!
//! Code `q` is stored as `q + 2^(bits-1)`; the fields of a row follow one another without gaps, least significant bit
//! first, so element `i` is bits `i*bits .. (i+1)*bits` of the row's stream and may straddle two words (3 bits do, 2, 4
//! and 8 do not); the tail is padded with zero bits after the offset. Source: compressed-tensors 0.20 `pack_to_int32`.
//! Before 2026 it put only ten 3-bit codes into a word, under the same format name: the shape of `weight_packed` tells.

/// Words for a row of `len` codes of `bits` (1 to 8) bits.
pub fn packed_words(len: usize, bits: usize) -> usize {
    (len * bits).div_ceil(32)
}

/// Packs one row of signed codes of `bits` (1 to 8) bits.
pub fn pack_i32(codes: &[i8], bits: usize) -> Vec<i32> {
    let offset = 1i32 << (bits - 1);
    let mut words = Vec::with_capacity(packed_words(codes.len(), bits));
    let (mut pending, mut held) = (0u64, 0);
    for &q in codes {
        pending |= u64::from((i32::from(q) + offset) as u32) << held;
        held += bits;
        if held >= 32 {
            words.push(pending as u32 as i32);
            pending >>= 32;
            held -= 32;
        }
    }
    if held > 0 {
        words.push(pending as u32 as i32);
    }
    words
}

/// Unpacks one row of `len` signed codes; padding is ignored.
///
/// # Panics
/// When `words` is shorter than [`packed_words`].
pub fn unpack_i32(words: &[i32], bits: usize, len: usize) -> Vec<i8> {
    let (offset, mask) = (1i32 << (bits - 1), (1u64 << bits) - 1);
    let mut words = words.iter();
    let (mut pending, mut held) = (0u64, 0);
    (0..len)
        .map(|_| {
            if held < bits {
                let word = words.next().expect("as many words as the codes need");
                pending |= u64::from(*word as u32) << held;
                held += 32;
            }
            let field = (pending & mask) as i32;
            pending >>= bits;
            held -= bits;
            (field - offset) as i8
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_case_of_the_format() {
        assert_eq!(pack_i32(&[-8, -1, 0, 7, 1, -2, 3, -4], 4), [0x4b69_f870]);
    }

    #[test]
    fn three_bit_codes_straddle_words() {
        // Code 10 of 11 has its two low bits in word 0 and its high bit in word 1.
        let mut codes = vec![-4i8; 11];
        codes[10] = 3;
        assert_eq!(pack_i32(&codes, 3), [0xc000_0000u32 as i32, 1]);
        assert_eq!((packed_words(32, 3), packed_words(33, 3)), (3, 4));
    }

    #[test]
    fn every_code_at_every_place_survives() {
        for bits in 1usize..=8 {
            let (lo, hi) = (-(1i32 << (bits - 1)), (1i32 << (bits - 1)) - 1);
            for len in 1..40 {
                for q in lo..=hi {
                    for at in 0..len {
                        let mut codes = vec![hi as i8; len];
                        codes[at] = q as i8;
                        let words = pack_i32(&codes, bits);
                        assert_eq!(words.len(), packed_words(len, bits));
                        assert_eq!(unpack_i32(&words, bits, len), codes);
                    }
                }
            }
        }
    }

    #[test]
    fn the_tail_is_padded_with_zero_bits() {
        assert_eq!(pack_i32(&[7], 4), [0x0000_000f]);
        assert_eq!(pack_i32(&[-128], 8), [0]);
    }
}
