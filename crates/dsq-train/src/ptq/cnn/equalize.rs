//! Cross-layer equalisation: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction"
//! (arXiv:1906.04721), for convolutions with ReLU or ReLU6 between them. Not a quantization, and no data: it changes no output.

use super::Work;

/// Rounds over all pairs; the ranges have settled long before.
const ROUNDS: usize = 20;
/// Ranges below this count as nothing, and factors stay within this and its inverse.
const LEAST: f32 = 1e-3;

/// Divides output channel `i` of a layer by `s_i` and multiplies input channel `i` of the next by it, for every pair of layers
/// inside a block (expansion and depthwise, depthwise and projection; the convolutions of a residual block), with `s_i = sqrt(r1_i / r2_i)` of the largest magnitudes
/// `r1` of the first layer's rows and `r2` of the second's columns: both are `sqrt(r1_i r2_i)` then.
///
/// ReLU6 is no obstacle: `min(max(x, 0), 6) / s = min(max(x / s, 0), 6 / s)`, so the clip of a channel is divided too. (The
/// paper puts ReLU in its place, which changes what the network computes.)
pub(super) fn equalize(layers: &mut [Work]) {
    for _ in 0..ROUNDS {
        for i in 1..layers.len() {
            let (head, tail) = layers.split_at_mut(i);
            let (first, second) = (&mut head[i - 1], &mut tail[0]);
            // The input of a block is read twice: it ends no pair. A shortcut has no activation, and is read by no layer.
            if !second.spec.starts_block && first.clip.is_some() && second.spec.pool.is_none() {
                pair(first, second);
            }
        }
    }
}

fn pair(first: &mut Work, second: &mut Work) {
    let n = first.spec.shape[0];
    let k = first.weight.len() / n;
    let [_, c, kh, kw] = second.spec.shape;
    // Input channel of a weight of the second layer.
    let (depthwise, taps) = (second.spec.depthwise, kh * kw);
    let channel = |at: usize| if depthwise { at / taps } else { at / taps % c };
    let mut columns = vec![0.0f32; n];
    for (at, w) in second.weight.iter().enumerate() {
        let r = &mut columns[channel(at)];
        *r = r.max(w.abs());
    }
    let factors: Vec<f32> = first
        .weight
        .chunks_exact(k)
        .zip(&columns)
        .map(|(row, &r2)| {
            let r1 = row.iter().fold(0.0f32, |m, w| m.max(w.abs()));
            // A channel that is off stays as it is.
            if r1 < LEAST * LEAST || r2 < LEAST * LEAST { 1.0 } else { (r1 / r2).sqrt().clamp(LEAST, 1.0 / LEAST) }
        })
        .collect();
    for (row, s) in first.weight.chunks_exact_mut(k).zip(&factors) {
        row.iter_mut().for_each(|w| *w /= s);
    }
    first.bias.iter_mut().chain(first.clip.iter_mut().flatten()).zip(factors.iter().cycle()).for_each(|(v, s)| *v /= s);
    second.weight.iter_mut().enumerate().for_each(|(at, w)| *w *= factors[channel(at)]);
}
