//! Columns and rows of a matrix put elsewhere, with gradients: what latent attention makes heads of, and what experts see of a
//! batch; and the weights of a token's experts. The choice of experts is `dsq_checkpoint::Routing`; here is no formula but sums.

use super::slice_op::{Slice, SliceOp, apply1, apply2};
use burn::tensor::Tensor;
use dsq_checkpoint::Routing;
use std::sync::Arc;

/// Where each column of an output comes from; `None`: it is 0.
#[derive(Debug, Clone)]
pub(crate) struct Columns {
    /// For each column of the output the column of the input.
    pub from: Vec<Option<usize>>,
    /// What every value is multiplied by.
    pub factor: f32,
}

impl SliceOp for Columns {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        let (k, n) = (x[0].shape.last().copied().unwrap_or(1), self.from.len());
        let mut out = vec![0.0; x[0].data.len() / k.max(1) * n];
        for (row, out) in x[0].data.chunks_exact(k).zip(out.chunks_exact_mut(n)) {
            for (to, from) in out.iter_mut().zip(&self.from) {
                if let Some(from) = from {
                    *to = row[*from] * self.factor;
                }
            }
        }
        let mut shape = x[0].shape.to_vec();
        if let Some(last) = shape.last_mut() {
            *last = n;
        }
        (out, shape)
    }

    fn backward(&self, x: &[Slice], g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let (k, n) = (x[0].shape.last().copied().unwrap_or(1), self.from.len());
        let mut out = vec![0.0; x[0].data.len()];
        for (out, g) in out.chunks_exact_mut(k).zip(g.chunks_exact(n)) {
            for (g, from) in g.iter().zip(&self.from) {
                if let Some(from) = from {
                    out[*from] += g * self.factor;
                }
            }
        }
        vec![Some(out)]
    }
}

/// The columns of `x [.., k]` that `map` names, `[.., n]`.
pub(crate) fn columns<const D: usize>(x: Tensor<D>, map: &Arc<Columns>) -> Tensor<D> {
    apply1(map.clone(), x)
}

#[derive(Debug)]
struct Rows(Vec<usize>);

impl SliceOp for Rows {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        let k = x[0].shape[1];
        (self.0.iter().flat_map(|&r| x[0].data[r * k..][..k].iter().copied()).collect(), vec![self.0.len(), k])
    }

    fn backward(&self, x: &[Slice], g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let k = x[0].shape[1];
        let mut out = vec![0.0; x[0].data.len()];
        for (&r, g) in self.0.iter().zip(g.chunks_exact(k)) {
            out[r * k..][..k].iter_mut().zip(g).for_each(|(o, g)| *o += g);
        }
        vec![Some(out)]
    }
}

/// The rows `rows` of `x [m, k]`, `[rows, k]`.
pub(crate) fn rows(x: Tensor<2>, rows: &[usize]) -> Tensor<2> {
    apply1(Arc::new(Rows(rows.to_vec())), x)
}

/// Experts of each token with their weights, as [`Routing::choose`] gives them.
pub(crate) type Chosen = Arc<Vec<Vec<(usize, f32)>>>;

#[derive(Debug)]
struct Weights {
    routing: Routing,
    chosen: Chosen,
}

impl SliceOp for Weights {
    fn forward(&self, _x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        let out: Vec<f32> = self.chosen.iter().flatten().map(|c| c.1).collect();
        let m = self.chosen.len();
        let k = out.len().checked_div(m).unwrap_or(0);
        (out, vec![m, k])
    }

    fn backward(&self, x: &[Slice], g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let n = x[0].shape[1];
        let k = g.len().checked_div(self.chosen.len()).unwrap_or(0);
        let rows = x[0].data.chunks_exact(n).zip(self.chosen.iter()).zip(g.chunks_exact(k.max(1)));
        vec![Some(rows.flat_map(|((logits, chosen), g)| self.routing.gradient(logits, chosen, g)).collect())]
    }
}

/// The weights `[m, per_token]` of the `chosen` experts, from the router's `logits [m, experts]` that they were chosen by.
pub(crate) fn weights(logits: Tensor<2>, routing: Routing, chosen: Chosen) -> Tensor<2> {
    apply1(Arc::new(Weights { routing, chosen }), logits)
}

/// `places[t * k + s]`: the row of the experts' outputs that is the `s`-th of token `t`.
#[derive(Debug)]
struct Combine(Vec<usize>);

impl SliceOp for Combine {
    fn forward(&self, x: &[Slice]) -> (Vec<f32>, Vec<usize>) {
        let ([m, k], d) = ([x[1].shape[0], x[1].shape[1]], x[0].shape[1]);
        let mut out = vec![0.0f32; m * d];
        for (t, out) in out.chunks_exact_mut(d).enumerate() {
            for s in t * k..(t + 1) * k {
                let (w, row) = (x[1].data[s], &x[0].data[self.0[s] * d..][..d]);
                out.iter_mut().zip(row).for_each(|(o, y)| *o += w * y);
            }
        }
        (out, vec![m, d])
    }

    fn backward(&self, x: &[Slice], g: &[f32], _wanted: &[bool]) -> Vec<Option<Vec<f32>>> {
        let ([m, k], d) = ([x[1].shape[0], x[1].shape[1]], x[0].shape[1]);
        let (mut dy, mut dw) = (vec![0.0f32; x[0].data.len()], vec![0.0f32; m * k]);
        for (t, g) in g.chunks_exact(d).enumerate() {
            for s in t * k..(t + 1) * k {
                let (w, at) = (x[1].data[s], self.0[s] * d);
                dy[at..at + d].iter_mut().zip(g).for_each(|(o, g)| *o = w * g);
                let products = x[0].data[at..at + d].iter().zip(g).map(|(y, g)| f64::from(*y) * f64::from(*g));
                dw[s] = products.sum::<f64>() as f32;
            }
        }
        vec![Some(dy), Some(dw)]
    }
}

/// The sum of each token's rows of `y [rows, d]`, of which `places` names `k` for each, times `weights [m, k]`: `[m, d]`. Every
/// row belongs to one token.
pub(crate) fn combine(y: Tensor<2>, weights: Tensor<2>, places: Vec<usize>) -> Tensor<2> {
    apply2(Arc::new(Combine(places)), y, weights)
}
