//! Rotary position embedding, Hugging Face convention (the two halves of a head rotate together), or DeepSeek's (neighbours do). Not attention, and not the
//! angles, which come from the model's config.

use dsq_checkpoint::Rotary;

/// Cosines and sines of the positions `0..positions`.
#[derive(Debug, Clone)]
pub(crate) struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    pub(crate) fn new(positions: usize, rotary: &Rotary) -> Self {
        let [cos, sin] = rotary.table(positions);
        Self { half: rotary.frequencies.len(), cos, sin }
    }

    /// The positions of each of some tables, one after the other; all of one model.
    pub(crate) fn joined(tables: &[Self]) -> Self {
        Self {
            half: tables.first().map_or(0, |t| t.half),
            cos: tables.iter().flat_map(|t| &t.cos).copied().collect(),
            sin: tables.iter().flat_map(|t| &t.sin).copied().collect(),
        }
    }

    /// Rotates the heads of one token's row `[heads, d]` in place.
    pub(crate) fn rotate(&self, row: &mut [f32], position: usize) {
        let at = position * self.half..(position + 1) * self.half;
        let (cos, sin) = (&self.cos[at.clone()], &self.sin[at]);
        for head in row.chunks_exact_mut(2 * self.half) {
            let (a, b) = head.split_at_mut(self.half);
            for i in 0..self.half {
                let (x, y) = (a[i], b[i]);
                a[i] = x * cos[i] - y * sin[i];
                b[i] = y * cos[i] + x * sin[i];
            }
        }
    }

    /// [`RopeTable::rotate`]; pairs are neighbours where heads are `interleaved`.
    pub(crate) fn rotate_as(&self, row: &mut [f32], position: usize, interleaved: bool) {
        if !interleaved {
            return self.rotate(row, position);
        }
        let at = position * self.half..(position + 1) * self.half;
        let (cos, sin) = (&self.cos[at.clone()], &self.sin[at]);
        for head in row.chunks_exact_mut(2 * self.half) {
            for (pair, (cos, sin)) in head.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
                let (x, y) = (pair[0], pair[1]);
                pair[0] = x * cos - y * sin;
                pair[1] = y * cos + x * sin;
            }
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        (self.cos.len() + self.sin.len()) * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_zero_changes_nothing_and_a_quarter_turn_swaps_the_halves() {
        let rotary = Rotary { frequencies: vec![1.0, 0.01], attention_factor: 1.0 };
        let table = RopeTable::new(4, &rotary);
        let mut row = [1.0, 2.0, 3.0, 4.0];
        table.rotate(&mut row, 0);
        assert_eq!(row, [1.0, 2.0, 3.0, 4.0]);
        // The pairs are (0, 2) and (1, 3).
        table.rotate(&mut row, 3);
        let (s, c) = 3f64.sin_cos();
        let (s2, c2) = 0.03f64.sin_cos();
        let want = [c - 3.0 * s, 2.0 * c2 - 4.0 * s2, 3.0 * c + s, 4.0 * c2 + 2.0 * s2];
        for (got, want) in row.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 1e-6, "{got} {want}");
        }
        // The same pairs as neighbours.
        let mut neighbours = [1.0, 3.0, 2.0, 4.0];
        table.rotate_as(&mut neighbours, 3, true);
        assert_eq!(neighbours, [row[0], row[2], row[1], row[3]]);
    }
}
