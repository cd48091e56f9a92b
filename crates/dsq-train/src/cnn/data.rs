//! Batches of pictures for the CNN: order, augmentation, normalization. Stateless: which pictures a step sees follows from
//! seed, phase and step alone, so a resumed run sees the same ones.

use crate::idx::Pictures;
use burn::tensor::{Device, Int, Tensor, TensorData};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Pixels by which augmentation may shift a picture.
const SHIFT: i32 = 2;

/// A generator for one purpose: seeds that differ in any part give unrelated streams.
pub(super) fn stream(seed: u64, purpose: &str, index: u64) -> ChaCha8Rng {
    use sha2::{Digest, Sha256};
    let digest = Sha256::digest(format!("{seed}/{purpose}/{index}"));
    ChaCha8Rng::from_seed(digest.into())
}

/// Mean and standard deviation of the pixels, as fractions of 255.
pub(super) fn statistics(p: &Pictures) -> (f32, f32) {
    let n = p.pixels.len() as f64;
    let mean = p.pixels.iter().map(|&v| f64::from(v) / 255.0).sum::<f64>() / n;
    let var = p.pixels.iter().map(|&v| (f64::from(v) / 255.0 - mean).powi(2)).sum::<f64>() / n;
    (mean as f32, (var.sqrt() as f32).max(1e-6))
}

/// The pictures of training step `step`: epochs are permutations, the last incomplete batch of an epoch is left out.
pub(super) fn batch_indices(len: usize, batch: usize, seed: u64, purpose: &str, step: u64) -> Vec<usize> {
    let batch = batch.min(len);
    let per_epoch = (len / batch) as u64;
    let mut order: Vec<usize> = (0..len).collect();
    order.shuffle(&mut stream(seed, purpose, step / per_epoch));
    let at = (step % per_epoch) as usize * batch;
    order[at..at + batch].to_vec()
}

/// The pixels of these pictures, `[m, 1, h, w]`; with a generator, each is mirrored half of the time and shifted by up to
/// 2 pixels, black coming in.
pub(super) fn gather(p: &Pictures, indices: &[usize], mut augment: Option<ChaCha8Rng>) -> Vec<u8> {
    let [h, w] = p.size;
    let mut out = Vec::with_capacity(indices.len() * h * w);
    for &i in indices {
        let picture = p.picture(i);
        let Some(rng) = &mut augment else {
            out.extend(picture);
            continue;
        };
        let mirror: bool = rng.random();
        let (dy, dx) = (rng.random_range(-SHIFT..=SHIFT), rng.random_range(-SHIFT..=SHIFT));
        for y in 0..h as i32 {
            for x in 0..w as i32 {
                let (sy, sx) = (y + dy, if mirror { w as i32 - 1 - x } else { x } + dx);
                let inside = (0..h as i32).contains(&sy) && (0..w as i32).contains(&sx);
                out.push(if inside { picture[sy as usize * w + sx as usize] } else { 0 });
            }
        }
    }
    out
}

/// Normalized pictures as a tensor `[m, 1, h, w]`.
pub(super) fn images(normalized: &[f32], size: [usize; 2], device: &Device) -> Tensor<4> {
    let m = normalized.len() / (size[0] * size[1]);
    Tensor::from_data(TensorData::new(normalized.to_vec(), [m, 1, size[0], size[1]]), device)
}

/// Labels of these pictures, one-hot, `[m, classes]`.
pub(super) fn one_hot(p: &Pictures, indices: &[usize], classes: usize, device: &Device) -> Tensor<2> {
    let labels: Vec<i64> = indices.iter().map(|&i| i64::from(p.labels[i])).collect();
    let m = labels.len();
    Tensor::<1, Int>::from_data(TensorData::new(labels, [m]), device).one_hot(classes).float()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pictures(m: usize) -> Pictures {
        Pictures { size: [3, 2], pixels: (0..m * 6).map(|v| v as u8).collect(), labels: vec![0; m] }
    }

    #[test]
    fn an_epoch_visits_every_picture_once_in_another_order() {
        let epoch = |e: u64| -> Vec<usize> { (0..4).flat_map(|s| batch_indices(8, 2, 3, "x", e * 4 + s)).collect() };
        let (first, second) = (epoch(0), epoch(1));
        assert_ne!(first, second);
        for mut order in [first, second] {
            order.sort_unstable();
            assert_eq!(order, (0..8).collect::<Vec<_>>());
        }
        assert_eq!(batch_indices(8, 2, 3, "x", 5), batch_indices(8, 2, 3, "x", 5));
        assert_ne!(batch_indices(800, 2, 3, "x", 5), batch_indices(800, 2, 3, "y", 5));
        assert_eq!(batch_indices(3, 64, 1, "x", 7).len(), 3);
    }

    #[test]
    fn augmentation_moves_pixels_and_makes_none_up() {
        let p = pictures(40);
        let plain = gather(&p, &[3, 1], None);
        assert_eq!(plain, [p.picture(3), p.picture(1)].concat());
        let all: Vec<usize> = (0..40).collect();
        let moved = gather(&p, &all, Some(stream(1, "a", 0)));
        assert_eq!(moved, gather(&p, &all, Some(stream(1, "a", 0))));
        assert_ne!(moved, p.pixels);
        for (i, picture) in moved.chunks(6).enumerate() {
            assert!(picture.iter().all(|v| *v == 0 || p.picture(i).contains(v)));
        }
    }
}
