//! The codes of one convolution, learned against the outputs that it should give. GPTQ itself is `gptq.rs`, learned rounding
//! `learned.rs`; this makes their inputs of pictures and pixels. Not the walk over the network.
//!
//! With `x` the inputs of an output pixel (on the quantized stream, less their mean where the bias will take that up) and `d`
//! what the float weight `W` then misses of the target, the weight that fits best is `W + D X^T (X X^T + lambda I)^-1`. That
//! one is rounded. `lambda` is a tenth of the mean diagonal: there are fewer pixels than inputs in the last blocks, and what
//! pictures do not say about a weight must leave it alone.

use crate::ptq::hessian::Hessian;
use crate::ptq::refit::refit;
use crate::ptq::{Factor, gptq_quantize};
use dsq_kernels::conv::PaddedConv;
use dsq_kernels::train::{Strided, matmul};
use dsq_quant::{QuantArgs, QuantError, QuantizedMatrix};
use rayon::prelude::*;

/// Output pixels of a picture that are looked at.
const PIXELS: usize = 256;
/// `lambda`, as a share of the mean diagonal.
const RIDGE: f64 = 0.1;

/// A weight that fits the outputs best, and what its codes are judged by.
pub(super) struct Refitted {
    /// `[n, k]`.
    pub weight: Vec<f32>,
    pub n: usize,
    pub k: usize,
    /// Of the inputs.
    pub h: Hessian,
}

/// Chooses codes, one scale for each row.
pub(super) type Choose = fn(&Refitted, QuantArgs) -> Result<QuantizedMatrix, QuantError>;

/// GPTQ's codes.
pub(super) fn gptq(r: &Refitted, args: QuantArgs) -> Result<QuantizedMatrix, QuantError> {
    Ok(gptq_quantize(&r.weight, r.n, r.k, &r.h, Factor::new(&r.h).as_ref(), args)?.0)
}

/// A layer, what it reads and what it should give.
#[derive(Clone, Copy)]
pub(super) struct Fitted<'a> {
    pub conv: &'a PaddedConv,
    /// `[m, h, w, c]`, in units of `step`.
    pub input: &'a [f32],
    pub step: f32,
    /// `[m, oh, ow, n]`, without the bias.
    pub target: &'a [f32],
    /// `[n, c, k, k]`.
    pub weight: &'a [f32],
}

impl Fitted<'_> {
    /// Codes for the weight; `centred`: means do not matter.
    pub(super) fn codes(&self, args: QuantArgs, centred: bool, choose: Choose) -> Result<QuantizedMatrix, QuantError> {
        let (conv, n) = (self.conv, self.conv.n);
        let (mut rows, each) = conv.columns(self.input, PIXELS);
        rows.iter_mut().for_each(|v| *v *= self.step);
        let mut missing = self.missing(each);
        if centred {
            centre(&mut rows, conv.kernel * conv.kernel * conv.c);
            centre(&mut missing, n);
        }
        match conv.depthwise {
            true => self.depthwise(&rows, &missing, args, choose),
            false => self.dense(rows, &missing, args, choose),
        }
    }

    /// What the float weight misses of the target on the layer's inputs, `[m * each, n]`, at the pixels of `columns`.
    fn missing(&self, each: usize) -> Vec<f32> {
        let (n, pixels) = (self.conv.n, self.conv.pixels());
        let got = self.conv.forward(self.input, self.weight);
        let pictures = self.target.chunks_exact(pixels * n).zip(got.chunks_exact(pixels * n));
        pictures
            .flat_map(|(t, g)| (0..each).flat_map(move |i| (0..n).map(move |j| (t, g, i * pixels / each * n + j))))
            .map(|(t, g, at)| t[at] - g[at] * self.step)
            .collect()
    }

    fn dense(
        &self,
        rows: Vec<f32>,
        missing: &[f32],
        args: QuantArgs,
        choose: Choose,
    ) -> Result<QuantizedMatrix, QuantError> {
        let (conv, n, k) = (self.conv, self.conv.n, self.conv.k());
        let rows = stored_order(rows, conv.kernel * conv.kernel, conv.c);
        let mut h = Hessian::new(k);
        h.add(&rows);
        let count = rows.len() / k;
        let cross = matmul(Strided::rows(missing, n).t(), Strided::rows(&rows, k), [n, k, count]);
        choose(&Refitted { weight: refit(self.weight, &cross, &h, RIDGE), n, k, h }, args)
    }

    /// Every channel is a layer of its own with one output.
    fn depthwise(
        &self,
        rows: &[f32],
        missing: &[f32],
        args: QuantArgs,
        choose: Choose,
    ) -> Result<QuantizedMatrix, QuantError> {
        let (n, k) = (self.conv.n, self.conv.k());
        let one = |j: usize| {
            let inputs: Vec<f32> =
                rows.chunks_exact(k * n).flat_map(|r| r.iter().skip(j).step_by(n)).copied().collect();
            let mut h = Hessian::new(k);
            h.add(&inputs);
            let mut cross = vec![0.0f32; k];
            for (x, d) in inputs.chunks_exact(k).zip(missing.iter().skip(j).step_by(n)) {
                cross.iter_mut().zip(x).for_each(|(c, x)| *c += x * d);
            }
            let weight = refit(&self.weight[j * k..(j + 1) * k], &cross, &h, RIDGE);
            choose(&Refitted { weight, n: 1, k, h }, args)
        };
        let channels = (0..n).into_par_iter().map(one).collect::<Result<Vec<_>, QuantError>>()?;
        let mut out = QuantizedMatrix {
            args,
            n,
            k,
            codes: Vec::with_capacity(n * k),
            scales: Vec::with_capacity(n),
            zeros: Vec::new(),
            global_scale: None,
        };
        for c in channels {
            out.codes.extend(c.codes);
            out.scales.extend(c.scales);
            out.zeros.extend(c.zeros);
        }
        out.validate()?;
        Ok(out)
    }
}

/// Takes the mean of each column away.
fn centre(rows: &mut [f32], len: usize) {
    let mean = super::means(rows, len);
    for row in rows.chunks_exact_mut(len) {
        row.iter_mut().zip(&mean).for_each(|(v, m)| *v = (f64::from(*v) - m) as f32);
    }
}

/// Rows `[taps, c]` as `[c, taps]`, the order of a stored weight.
fn stored_order(rows: Vec<f32>, taps: usize, c: usize) -> Vec<f32> {
    if taps == 1 {
        return rows;
    }
    let turn = |row: &[f32]| (0..c * taps).map(|i| row[i % taps * c + i / taps]).collect::<Vec<f32>>();
    rows.par_chunks(taps * c).flat_map_iter(turn).collect()
}

#[cfg(test)]
mod tests {
    use super::super::learned;
    use super::*;
    use crate::ptq::tests::{normal, with_threads};
    use dsq_quant::{FloatType, Granularity};

    /// Squared error of a weight against the target, means taken out.
    fn error(f: &Fitted, weight: &[f32]) -> f64 {
        let got = f.conv.forward(f.input, weight);
        let mut d: Vec<f32> = f.target.iter().zip(got).map(|(t, g)| t - g * f.step).collect();
        centre(&mut d, f.conv.n);
        d.iter().map(|v| f64::from(*v).powi(2)).sum()
    }

    #[test]
    fn learned_codes_fit_the_outputs_better_than_rounded_ones() {
        let args = QuantArgs::int4(Granularity::PerChannel, FloatType::F32);
        for (kernel, n, depthwise) in [(1, 6, false), (3, 6, false), (3, 12, true)] {
            let conv = PaddedConv { input: [9; 2], pads: [[kernel / 2; 2]; 2], c: 12, n, kernel, stride: 1, depthwise };
            let x = normal(6 * 81 * 12, 1);
            // Inputs that depend on each other, and an input of the layer that is off from the float one.
            let x: Vec<f32> = x.iter().enumerate().map(|(i, v)| v + 2.0 * x[i / 12 * 12] + 1.0).collect();
            let off: Vec<f32> = x.iter().zip(normal(x.len(), 2)).map(|(x, e)| ((x + 0.3 * e) / 0.05).round()).collect();
            let weight = normal(n * conv.k(), 3);
            let target = conv.forward(&x, &weight);
            let fitted = Fitted { conv: &conv, input: &off, step: 0.05, target: &target, weight: &weight };
            let rounded = QuantizedMatrix::quantize(&weight, n, conv.k(), args).unwrap();
            for choose in [gptq as Choose, learned::round] {
                let run = |threads| with_threads(threads, || fitted.codes(args, true, choose).unwrap());
                let learned = run(1);
                assert_eq!(run(3), learned);
                // Without the refit: nothing is missing where the target is what the float weight gives on these inputs.
                let own: Vec<f32> = conv.forward(&off, &weight).iter().map(|v| v * 0.05).collect();
                let alone = Fitted { target: &own, ..fitted }.codes(args, true, choose).unwrap();
                let [learned, alone, rounded] = [&learned, &alone, &rounded].map(|q| error(&fitted, &q.dequantize()));
                assert!(
                    learned < alone && alone < rounded,
                    "kernel {kernel}: {learned}, not refitted {alone}, rounding {rounded}"
                );
            }
        }
    }

    #[test]
    fn columns_turn_to_the_order_of_stored_weights() {
        // Two taps of three channels: [t0c0 t0c1 t0c2 t1c0 t1c1 t1c2] to [c0t0 c0t1 c1t0 ...].
        assert_eq!(stored_order(vec![0.0, 1.0, 2.0, 10.0, 11.0, 12.0], 2, 3), [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]);
    }
}
