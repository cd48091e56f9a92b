//! Packing of signed codes into 32-bit words, as compressed-tensors stores them. Not a kernel layout.
//!
//! Code `q` is stored as `q + 2^(bits-1)`; field `j` of word `w` (bits `j*bits ..`) is element `w*(32/bits) + j`,
//! least significant first, no interleave; the tail is padded with zero bits after the offset.
//! Source: compressed-tensors `pack_to_int32` (widths that divide 32).

/// Words for a row of `len` codes of `bits` (4 or 8) bits.
pub fn packed_words(len: usize, bits: usize) -> usize {
    (len * bits).div_ceil(32)
}

/// Packs one row of signed codes.
///
/// # Panics
/// When `bits` does not divide 32 (the callers offer 4 and 8).
pub fn pack_i32(codes: &[i8], bits: usize) -> Vec<i32> {
    assert_eq!(32 % bits, 0, "width must divide 32");
    let offset = 1i32 << (bits - 1);
    codes
        .chunks(32 / bits)
        .map(|chunk| {
            let word =
                chunk.iter().enumerate().fold(0u32, |w, (j, &q)| w | ((i32::from(q) + offset) as u32) << (j * bits));
            word as i32
        })
        .collect()
}

/// Unpacks one row of `len` signed codes; padding is ignored.
///
/// # Panics
/// When `words` is shorter than [`packed_words`] or `bits` does not divide 32.
pub fn unpack_i32(words: &[i32], bits: usize, len: usize) -> Vec<i8> {
    assert_eq!(32 % bits, 0, "width must divide 32");
    let (per, offset, mask) = (32 / bits, 1i32 << (bits - 1), (1u32 << bits) - 1);
    (0..len).map(|i| (((words[i / per] as u32 >> (i % per * bits)) & mask) as i32 - offset) as i8).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worked_case_of_the_format() {
        assert_eq!(pack_i32(&[-8, -1, 0, 7, 1, -2, 3, -4], 4), [0x4b69_f870]);
    }

    #[test]
    fn every_code_at_every_place_survives() {
        for (bits, lo, hi) in [(4usize, -8i32, 7i32), (8, -128, 127)] {
            for len in 1..20 {
                for q in lo..=hi {
                    for at in 0..len {
                        let mut codes = vec![0i8; len];
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
