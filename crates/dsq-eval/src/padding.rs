//! What a batch that is padded to its longest sequence computes for nothing. A count, not a run (see `dsq_runtime`'s packed runs).

/// Positions of sequences that run in padded batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Padding {
    /// Positions of the sequences themselves.
    pub positions: usize,
    /// Positions with the padding: in each batch, its longest sequence times its sequences.
    pub padded: usize,
}

impl Padding {
    /// The share of the padded positions that are padding, 0 to 1; 0 where there is nothing.
    pub fn share(&self) -> f64 {
        if self.padded == 0 { 0.0 } else { 1.0 - self.positions as f64 / self.padded as f64 }
    }
}

/// Positions of sequences of these `lengths` in batches of `batch` (at least 1), in the order given; the last batch may be smaller.
/// No order gives less than the sorted one where all batches are full.
pub fn padding(lengths: &[usize], batch: usize) -> Padding {
    let padded = lengths.chunks(batch.max(1)).map(|b| b.len() * b.iter().copied().max().unwrap_or(0)).sum();
    Padding { positions: lengths.iter().sum(), padded }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn batches_by_hand() {
        assert_eq!(padding(&[5, 3, 8, 1], 2), Padding { positions: 17, padded: 10 + 16 });
        assert_eq!(padding(&[5, 3, 8], 2), Padding { positions: 16, padded: 10 + 8 });
        assert_eq!(
            (padding(&[4, 4, 4], 3).share(), padding(&[], 4).share(), padding(&[7, 2], 0).share()),
            (0.0, 0.0, 0.0)
        );
    }

    /// Texts of 5 to 40 tokens beside pictures of 196 or 576 patches and sounds of 1500 frames.
    #[test]
    fn texts_beside_pictures_and_sounds_are_mostly_padding() {
        let text = |i: usize| 5 + i * 7 % 36;
        let mixed: Vec<usize> = (0..64)
            .map(|i| match i % 16 {
                3 | 11 => 196,
                7 => 576,
                15 => 1500,
                _ => text(i),
            })
            .collect();
        // Every batch of 16 has one sound: 16 x 1500 positions for 12 texts, two small pictures, a large one and the sound.
        let got = padding(&mixed, 16);
        assert_eq!(got.padded, 4 * 16 * 1500);
        let texts: usize = (0..64).filter(|i| !matches!(i % 16, 3 | 7 | 11 | 15)).map(text).sum();
        assert_eq!(got.positions, texts + 4 * (2 * 196 + 576 + 1500));
        assert!((0.88..0.89).contains(&got.share()), "{}", got.share());
        // Sorted, a batch is of one kind, but for where the kinds meet.
        let mut sorted = mixed.clone();
        sorted.sort_unstable();
        let best = padding(&sorted, 16).share();
        assert!((0.40..0.60).contains(&best), "{best}");
    }

    proptest! {
        #[test]
        fn padding_is_never_less_than_the_sequences_and_sorting_never_hurts(lengths in prop::collection::vec(1usize..2000, 0..80), batch in 1usize..20) {
            let got = padding(&lengths, batch);
            prop_assert!(got.padded >= got.positions && got.share() < 1.0);
            prop_assert_eq!(padding(&lengths, 1).share(), 0.0);
            let full = &lengths[..lengths.len() / batch * batch];
            let mut sorted = full.to_vec();
            sorted.sort_unstable();
            prop_assert!(padding(&sorted, batch).padded <= padding(full, batch).padded);
        }
    }
}
