//! Top-1 accuracy of an image classifier, and agreement with a reference. No images and no model: logits come from
//! the caller.

use crate::{Estimate, EvalError, Samples};

/// What [`ImageEval`] measured.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageMetrics {
    /// Share of images whose first choice is the label, 0 to 1, with its 95% Wilson score interval.
    pub top1: Estimate,
    /// Share of images with the same first choice as the reference, with its Wilson interval; `None` without one.
    pub top1_agreement: Option<Estimate>,
    /// Share of images whose label is among the five first choices, with its Wilson interval; `None` with five classes or fewer.
    pub top5: Option<Estimate>,
    /// `top1` of the model minus that of the reference, bootstrap interval over images; `None` without one.
    pub top1_difference: Option<Estimate>,
    /// Number of images.
    pub images: usize,
    /// Image by image, for paired comparison with another run.
    pub samples: Samples,
}

/// Collects batches of images.
#[derive(Debug, Clone, Default)]
pub struct ImageEval {
    correct: String,
    /// The same for five choices; empty with five classes or fewer.
    top5: String,
    reference_correct: String,
    agree: usize,
}

impl ImageEval {
    /// Starts with nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a batch: logits `[m, classes]` (row major), labels `[m]`, and the reference's logits of the same shape.
    /// The first choice is the lowest index at a tie.
    ///
    /// # Errors
    /// [`EvalError::Shape`] for wrong lengths, a label outside the classes, a reference that comes and goes;
    /// [`EvalError::NonFinite`]. Nothing is added then.
    pub fn batch(
        &mut self,
        logits: &[f32],
        labels: &[u32],
        classes: usize,
        reference: Option<&[f32]>,
    ) -> Result<(), EvalError> {
        let shape =
            |what: &str, expected: String, got: String| Err(EvalError::Shape { what: what.into(), expected, got });
        let m = labels.len();
        if classes == 0 || logits.len() != m * classes {
            return shape("logits", format!("{m} x {classes} values"), logits.len().to_string());
        }
        if let Some(r) = reference
            && r.len() != logits.len()
        {
            return shape("logits of the reference", format!("{m} x {classes} values"), r.len().to_string());
        }
        if !self.correct.is_empty() && reference.is_some() == self.reference_correct.is_empty() {
            return shape("reference", "one for every batch or for none".into(), "one for some".into());
        }
        if let Some((i, l)) = labels.iter().enumerate().find(|(_, l)| **l as usize >= classes) {
            return shape(&format!("label {i}"), format!("a class below {classes}"), l.to_string());
        }
        let start = self.correct.len();
        let first = |x: &[f32], side| -> Result<Vec<usize>, EvalError> {
            if let Some(i) = x.iter().position(|v| !v.is_finite()) {
                let (position, entry) = (start + i / classes, i % classes);
                return Err(EvalError::NonFinite { side, position, entry, value: x[i] });
            }
            let argmax = |row: &[f32]| (0..classes).fold(0, |best, i| if row[i] > row[best] { i } else { best });
            Ok(x.chunks(classes).map(argmax).collect())
        };
        let chosen = first(logits, "model")?;
        let reference = reference.map(|r| first(r, "reference")).transpose()?;
        if classes > 5 {
            // The rank of the label: classes with a larger logit, or the same and a lower index.
            let ahead = |row: &[f32], label: usize| {
                row.iter().enumerate().filter(|(i, z)| **z > row[label] || (**z == row[label] && *i < label)).count()
            };
            let rows = logits.chunks(classes).zip(labels);
            self.top5.extend(rows.map(|(row, l)| if ahead(row, *l as usize) < 5 { '1' } else { '0' }));
        }
        let mark = |chosen: &[usize]| -> String {
            chosen.iter().zip(labels).map(|(c, l)| if *c == *l as usize { '1' } else { '0' }).collect()
        };
        self.correct.push_str(&mark(&chosen));
        if let Some(r) = reference {
            self.reference_correct.push_str(&mark(&r));
            self.agree += r.iter().zip(&chosen).filter(|(a, b)| a == b).count();
        }
        Ok(())
    }

    /// The metrics of all batches.
    ///
    /// # Errors
    /// [`EvalError::TooFew`] when there was no image.
    pub fn finish(self) -> Result<ImageMetrics, EvalError> {
        let images = self.correct.len();
        if images == 0 {
            return Err(EvalError::TooFew { what: "labelled images", least: 1, got: 0 });
        }
        let hits = |marks: &str| marks.bytes().filter(|b| *b == b'1').count();
        let (top1, among5) = (hits(&self.correct), hits(&self.top5));
        let top5 = (self.top5.len() == images).then(|| wilson(among5, images));
        let samples = Samples::Images { correct: self.correct, top5: self.top5 };
        let has_reference = !self.reference_correct.is_empty();
        let reference = Samples::Images { correct: self.reference_correct, top5: String::new() };
        Ok(ImageMetrics {
            top1: wilson(top1, images),
            top5,
            top1_agreement: has_reference.then(|| wilson(self.agree, images)),
            top1_difference: if has_reference { samples.paired_difference(&reference, "top1") } else { None },
            images,
            samples,
        })
    }
}

/// The share `hits / of` with its 95% Wilson score interval (Wilson 1927): centre `(p + z2/2n) / (1 + z2/n)`, half
/// width `z/(1 + z2/n) sqrt(p(1-p)/n + z2/4n^2)`, `z = 1.959964`. `of` must be positive.
pub fn wilson(hits: usize, of: usize) -> Estimate {
    let (p, n, z) = (hits as f64 / of as f64, of as f64, 1.959_963_984_540_054f64);
    let z2n = z * z / n;
    let centre = (p + z2n / 2.0) / (1.0 + z2n);
    let half = z / (1.0 + z2n) * (p * (1.0 - p) / n + z2n / (4.0 * n)).sqrt();
    Estimate { value: p, low: (centre - half).max(0.0), high: (centre + half).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wilson_matches_published_values() {
        // Newcombe 1998, table I, method 3 (Wilson score): 81/263, 15/148, 0/20, 1/29.
        for (hits, of, low, high) in
            [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]
        {
            let e = wilson(hits, of);
            assert!((e.low - low).abs() < 5e-5 && (e.high - high).abs() < 5e-5, "{hits}/{of}: {e:?}");
        }
        assert_eq!(wilson(20, 20).high, 1.0);
    }

    #[test]
    fn top1_and_agreement_by_hand() {
        let mut eval = ImageEval::new();
        // First choices 1, 0 (a tie), 2; reference 1, 1, 2; labels 1, 1, 0.
        let logits = [0.0, 2.0, 1.0, 5.0, 5.0, 0.0, -3.0, -2.0, -1.0];
        let reference = [0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0];
        eval.batch(&logits, &[1, 1, 0], 3, Some(&reference)).unwrap();
        let got = eval.finish().unwrap();
        assert_eq!(got.top1.value, 1.0 / 3.0);
        assert_eq!(got.top1_agreement.unwrap().value, 2.0 / 3.0);
        assert!((got.top1_difference.unwrap().value + 1.0 / 3.0).abs() < 1e-15);
        assert_eq!(got.samples, Samples::Images { correct: "100".into(), top5: String::new() });
        assert_eq!(got.top5, None);
    }

    #[test]
    fn top5_counts_a_tie_for_the_lower_index() {
        let mut eval = ImageEval::new();
        // The label is fifth; sixth; sixth but for a tie with a later class; behind a tie with an earlier one.
        let rows =
            [[9., 8., 7., 6., 5., 0.], [9., 8., 7., 6., 5., 0.], [9., 8., 7., 6., 1., 1.], [9., 8., 7., 6., 1., 1.]];
        eval.batch(&rows.concat(), &[4, 5, 4, 5], 6, None).unwrap();
        let got = eval.finish().unwrap();
        assert_eq!((got.top5.unwrap().value, got.top1.value), (0.5, 0.0));
        assert_eq!(got.samples, Samples::Images { correct: "0000".into(), top5: "1010".into() });
    }

    #[test]
    fn f115_bad_logits_and_labels_are_refused() {
        let mut eval = ImageEval::new();
        let err = eval.batch(&[0.0, f32::NAN], &[1], 2, None).unwrap_err();
        assert_eq!((err.exit_code(), err.to_string().contains("position 0, entry 1")), (6, true), "{err}");
        assert_eq!(eval.batch(&[0.0, 1.0], &[2], 2, None).unwrap_err().exit_code(), 3);
        assert_eq!(eval.batch(&[0.0, 1.0], &[1, 0], 2, None).unwrap_err().exit_code(), 3);
        assert_eq!(eval.finish().unwrap_err().exit_code(), 3);
    }
}
