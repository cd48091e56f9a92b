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

/// Packs one row of signed codes of `bits` (1 to 8) bits, each within the range of its width.
pub fn pack_i32(codes: &[i8], bits: usize) -> Vec<i32> {
    let mut words = Vec::with_capacity(packed_words(codes.len(), bits));
    pack_row(codes, bits, &mut words);
    words
}

/// Packs the rows of an `[n, k]` matrix of codes, one after the other: each row as [`pack_i32`] does, with its own
/// padding. Nothing when `k` is 0.
pub fn pack_rows(codes: &[i8], k: usize, bits: usize) -> Vec<i32> {
    let per_row = packed_words(k, bits);
    let rows = codes.len().checked_div(k).unwrap_or(0);
    let mut words = Vec::with_capacity(rows * per_row);
    if k > 0 && (k * bits).is_multiple_of(32) {
        // No row has padding, so that the matrix is one long row.
        pack_row(codes, bits, &mut words);
    } else {
        codes.chunks(k.max(1)).for_each(|row| pack_row(row, bits, &mut words));
    }
    words
}

fn pack_row(codes: &[i8], bits: usize, words: &mut Vec<i32>) {
    // Widths that occur get a loop of their own, with constant shifts.
    match bits {
        2 => octets::<2>(codes, words),
        3 => octets::<3>(codes, words),
        4 => octets::<4>(codes, words),
        8 => octets::<8>(codes, words),
        _ => fields(codes, bits, words),
    }
}

/// Eight codes at a time: [`octet`] makes one number of them, whose bits go to the stream together.
fn octets<const BITS: usize>(codes: &[i8], words: &mut Vec<i32>) {
    let mut eights = codes.chunks_exact(8);
    let number = |c: &[i8]| octet::<BITS>(std::array::from_fn(|i| c[i] as u8));
    match BITS {
        4 => words.extend(eights.by_ref().map(|c| number(c) as u32 as i32)),
        8 => {
            for c in eights.by_ref() {
                let x = number(c);
                words.extend([x as u32 as i32, (x >> 32) as u32 as i32]);
            }
        }
        _ => {
            // Up to four eights: `BITS` whole words, so that nothing is carried from one to the next.
            let mut blocks = codes.chunks_exact(32);
            for block in blocks.by_ref() {
                let (mut pending, mut held) = (0u64, 0);
                for c in block.chunks_exact(8) {
                    // At most 31 bits held and 24 added.
                    pending |= number(c) << held;
                    held += 8 * BITS;
                    if held >= 32 {
                        words.push(pending as u32 as i32);
                        pending >>= 32;
                        held -= 32;
                    }
                }
            }
            return fields(blocks.remainder(), BITS, words);
        }
    }
    fields(eights.remainder(), BITS, words);
}

/// The stored fields of eight codes, least significant first: adding the offset flips a code's sign bit, and three steps
/// close the gaps between fields, pairs and fours.
#[inline(always)]
fn octet<const BITS: usize>(codes: [u8; 8]) -> u64 {
    const fn repeated(value: u64, every: usize) -> u64 {
        let (mut out, mut at) = (0, 0);
        while at < 64 {
            out |= value << at;
            at += every;
        }
        out
    }
    const fn ones(bits: usize) -> u64 {
        u64::MAX >> (64 - bits)
    }
    let gap = 8 - BITS;
    // Constants by force: the loops that make them are not always seen through.
    let x = u64::from_le_bytes(codes) ^ const { repeated(1 << (BITS - 1), 8) };
    let x = x & const { repeated(ones(BITS), 8) };
    let x = (x | x >> gap) & const { repeated(ones(2 * BITS), 16) };
    let x = (x | x >> (2 * gap)) & const { repeated(ones(4 * BITS), 32) };
    (x | x >> (4 * gap)) & const { ones(8 * BITS) }
}

/// Eight codes of at most four bits as fields of four, plus 8, the first in the low bits.
#[inline(always)]
pub fn nibble_word(codes: [i8; 8]) -> u32 {
    octet::<4>(codes.map(|c| c as u8)) as u32
}

/// One code at a time, for any width: the definition.
fn fields(codes: &[i8], bits: usize, words: &mut Vec<i32>) {
    let offset = 1i32 << (bits - 1);
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
}

/// Unpacks one row of `len` signed codes; padding is ignored.
///
/// # Panics
/// When `words` is shorter than [`packed_words`].
pub fn unpack_i32(words: &[i32], bits: usize, len: usize) -> Vec<i8> {
    // Widths of which whole codes fill a word, and that occur.
    let whole = |per_word: usize| &words[..len / per_word];
    let mut out: Vec<i8> = match bits {
        4 => whole(8).iter().flat_map(|&w| eight(w as u32)).collect(),
        8 => whole(4).iter().flat_map(|&w| w.to_le_bytes().map(|b| (b ^ 0x80) as i8)).collect(),
        _ => return unpack_fields(words, bits, len),
    };
    if out.len() < len {
        out.extend(unpack_fields(&words[out.len() * bits / 32..], bits, len - out.len()));
    }
    out
}

/// [`unpack_i32`] of words as stored (bytes, little endian) of 4 or 8 `bits`, of which whole codes fill a word, into `codes`.
///
/// # Panics
/// When there are other than `codes.len() * bits / 8` bytes, or no whole words, or `bits` is another width.
pub fn unpack_words(bytes: &[u8], bits: usize, codes: &mut [i8]) {
    assert!(bytes.len() * 8 == codes.len() * bits && bytes.len().is_multiple_of(4), "{} {bits}", bytes.len());
    match bits {
        4 => {
            for (codes, &word) in codes.as_chunks_mut::<8>().0.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *codes = eight(u32::from_le_bytes(word));
            }
        }
        8 => codes.iter_mut().zip(bytes).for_each(|(code, b)| *code = (b ^ 0x80) as i8),
        _ => panic!("expected 4 or 8 bits, got {bits}"),
    }
}

/// The eight 4-bit codes of a word: the steps of [`octet`] the other way round.
#[inline(always)]
fn eight(word: u32) -> [i8; 8] {
    let x = u64::from(word);
    let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    let x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
    let x = (x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f;
    x.to_le_bytes().map(|field| field as i8 - 8)
}

/// One code at a time, for any width: the definition.
fn unpack_fields(words: &[i32], bits: usize, len: usize) -> Vec<i8> {
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
    fn eight_codes_at_a_time_are_the_codes_one_by_one() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as i32
        };
        for bits in 1usize..=8 {
            let (n, offset) = (3, 1i32 << (bits - 1));
            for k in (0..140).chain([576, 577, 1001]) {
                let codes: Vec<i8> = (0..n * k).map(|_| (random().rem_euclid(2 * offset) - offset) as i8).collect();
                let mut want = Vec::new();
                for row in codes.chunks(k.max(1)) {
                    let mut one = Vec::new();
                    fields(row, bits, &mut one);
                    assert_eq!(pack_i32(row, bits), one, "{bits} bits, {k} codes");
                    want.extend(one);
                }
                assert_eq!(pack_rows(&codes, k, bits), want, "{bits} bits, {n}x{k}");
                if [4, 8].contains(&bits) && (k * bits).is_multiple_of(32) {
                    let bytes: Vec<u8> = want.iter().flat_map(|w| w.to_le_bytes()).collect();
                    let mut back = vec![0i8; codes.len()];
                    unpack_words(&bytes, bits, &mut back);
                    assert_eq!(back, codes, "{bits} bits, {n}x{k}");
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
