//! Rotary position embedding, Hugging Face convention (the two halves of a head rotate together). Not attention.

/// Cosines and sines of the positions `0..positions`.
#[derive(Debug, Clone)]
pub(crate) struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// Frequency `i` is `1 / theta^(2i/d)`; the angle is the f32 product of position and frequency, as in transformers.
    pub(crate) fn new(positions: usize, d: usize, theta: f32) -> Self {
        let half = d / 2;
        let frequencies: Vec<f32> =
            (0..half).map(|i| 1.0 / f64::from(theta).powf((2 * i) as f64 / d as f64) as f32).collect();
        let angles = (0..positions).flat_map(|p| frequencies.iter().map(move |f| f64::from(p as f32 * f)));
        let (sin, cos) = angles.map(|a| (a.sin() as f32, a.cos() as f32)).unzip();
        Self { half, cos, sin }
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

    pub(crate) fn bytes(&self) -> usize {
        (self.cos.len() + self.sin.len()) * size_of::<f32>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn position_zero_changes_nothing_and_a_quarter_turn_swaps_the_halves() {
        let table = RopeTable::new(4, 4, 10_000.0);
        let mut row = [1.0, 2.0, 3.0, 4.0];
        table.rotate(&mut row, 0);
        assert_eq!(row, [1.0, 2.0, 3.0, 4.0]);
        // Frequencies 1 and 0.01; the pairs are (0, 2) and (1, 3).
        table.rotate(&mut row, 3);
        let (s, c) = 3f64.sin_cos();
        let (s2, c2) = 0.03f64.sin_cos();
        let want = [c - 3.0 * s, 2.0 * c2 - 4.0 * s2, 3.0 * c + s, 4.0 * c2 + 2.0 * s2];
        for (got, want) in row.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 1e-6, "{got} {want}");
        }
    }
}
