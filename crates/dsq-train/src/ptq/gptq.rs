//! GPTQ: codes chosen one input column after another, each against the error that the columns before it left, so that
//! the squared error of the layer's *outputs* is small, not that of its weights. The grid is `dsq-quant`'s; this only
//! chooses points of it. Not the walk over a model (see `mod.rs`).
//!
//! Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers"
//! (arXiv:2210.17323), in the form of Babai's nearest plane that Chen et al. proved equal to it ("The Geometry of LLM
//! Quantization", arXiv:2507.18553): with `H = R R^T`, `R` upper triangular, the output error of a row with weight error
//! `e` is `|e R|^2`, and its `j`-th term holds only `e_0 .. e_j`. So column `j` takes the code nearest to
//! `w_j + sum_{i<j} e_i R_ij / R_jj`, where `e_i = w_i - q_i`. One factorization, no inverse.

use super::hessian::Hessian;
use dsq_kernels::train::{Strided, dot, matmul};
use dsq_quant::{QParams, QuantArgs, QuantError, QuantizedMatrix, WeightObserver};
use rayon::prelude::*;

/// Columns whose errors are passed on one at a time; what they do to later columns is one matrix product.
const BLOCK: usize = 128;
/// Columns of the factorization that are finished at a time.
const PANEL: usize = 64;
/// What is added to the diagonal, of its mean over live columns; ten times as much after each failure.
const DAMPING: f64 = 0.01;
/// Factorizations that are tried: damping 0.01, 0.1, 1, 10, 100.
const ATTEMPTS: usize = 5;
/// Rows of a weight that one task handles at least.
const TASK_ROWS: usize = 16;

/// How well a layer fits its calibration inputs after quantization. With GPTAQ the weight `W` here is the one that it rounds.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Fit {
    /// Squared error of the outputs, summed over calibration tokens and rows: `tr((W - Q) H (W - Q)^T)`.
    pub error: f64,
    /// The same if every weight is rounded to nearest on the grid of its own values.
    pub rtn_error: f64,
    /// Input columns that were 0 in every calibration token; their weights are rounded to nearest.
    pub dead_columns: usize,
    /// Rows that kept the plain rounding because GPTQ's codes were worse (all of them without a factor; 0 for AWQ).
    pub plain_rows: usize,
    /// Damping that the factorization took, as a share of the mean diagonal; `None`: it failed at all of
    /// [`dampings`] and the layer was rounded to nearest, or the method was AWQ, which takes none.
    pub damping: Option<f64>,
}

/// The dampings that are tried, in order.
pub fn dampings() -> impl Iterator<Item = f64> {
    (0..ATTEMPTS).map(|i| DAMPING * 10f64.powi(i as i32))
}

/// An ordered and factored Hessian; one serves all layers with the same inputs.
#[derive(Debug)]
pub struct Factor {
    /// Column that is quantized `j`-th: by falling diagonal, equal ones by index.
    order: Vec<usize>,
    /// `R_ij / R_jj` above the diagonal, `[k, k]` row major, in that order.
    coupling: Vec<f32>,
    /// `R_jj^2`, in that order.
    squares: Vec<f64>,
    /// What was added to each element of the diagonal, in that order.
    added: Vec<f64>,
    damping: f64,
}

impl Factor {
    /// Factors `h` with the least damping that works; `None` when none does.
    ///
    /// A column whose diagonal is 0 is dead: its row and column are 0, so that with any diagonal it exchanges no error
    /// with the others. Scales of groups do not depend on the order, so running the result needs no `g_idx`.
    pub fn new(h: &Hessian) -> Option<Self> {
        let k = h.k();
        let diagonal = h.diagonal();
        let mut order: Vec<usize> = (0..k).collect();
        order.sort_by(|&a, &b| diagonal[b].total_cmp(&diagonal[a]));
        let live = diagonal.iter().filter(|d| **d > 0.0).count();
        let mean = diagonal.iter().sum::<f64>() / live.max(1) as f64;
        let mean = if mean > 0.0 { mean } else { 1.0 };
        dampings().find_map(|damping| {
            let mut a = vec![0.0f64; k * k];
            let added = |column: usize| damping * mean + if diagonal[column] > 0.0 { 0.0 } else { mean };
            a.par_chunks_mut(k.max(1)).enumerate().for_each(|(i, row)| {
                for j in i..k {
                    row[j] = h.at(order[i], order[j]);
                }
                row[i] = row[i].max(0.0) + added(order[i]);
            });
            // In exact arithmetic no pivot is below what was added: half of it, and rounding has eaten the matrix.
            upper_factor(&mut a, k, damping * mean / 2.0)?;
            let pivots: Vec<f64> = (0..k).map(|j| a[j * k + j]).collect();
            let mut coupling = vec![0.0f32; k * k];
            coupling.par_chunks_mut(k.max(1)).enumerate().for_each(|(i, row)| {
                for j in i + 1..k {
                    row[j] = (a[i * k + j] / pivots[j]) as f32;
                }
            });
            let (order, squares) = (order.clone(), pivots.iter().map(|p| p * p).collect());
            let added = order.iter().map(|&c| added(c)).collect();
            coupling.iter().all(|c| c.is_finite()).then_some(Self { order, coupling, squares, added, damping })
        })
    }

    /// The damping that was needed, as a share of the mean diagonal.
    pub fn damping(&self) -> f64 {
        self.damping
    }
}

/// Overwrites the upper half of `a [k, k]` with the upper triangular `R` of `a = R R^T`; the lower half is neither read
/// nor written. `None` when the square of a pivot would not exceed `least`.
///
/// From the last column to the first, by panels of 64 columns. Each element is one scalar product in a fixed order, so the
/// bits do not depend on the number of threads. Cost: `k^3 / 6` multiply-adds.
fn upper_factor(a: &mut [f64], k: usize, least: f64) -> Option<()> {
    for panel in (0..k.div_ceil(PANEL)).rev() {
        let (j0, j1) = (panel * PANEL, (panel * PANEL + PANEL).min(k));
        // What the finished columns (j1 on) contribute.
        let tail: Vec<Vec<f64>> = (j0..j1).map(|j| a[j * k + j1..][..k - j1].to_vec()).collect();
        a[..j1 * k].par_chunks_mut(k).enumerate().for_each(|(i, row)| {
            let (head, done) = row.split_at_mut(j1);
            for j in j0.max(i)..j1 {
                head[j] -= dot(done, &tail[j - j0]);
            }
        });
        // The square on the diagonal, on one thread.
        for j in (j0..j1).rev() {
            let row = &a[j * k..][..j1];
            let pivot = row[j] - dot(&row[j + 1..], &row[j + 1..]);
            // Also false for NaN.
            if !(pivot > least && pivot.is_finite()) {
                return None;
            }
            let pivot = pivot.sqrt();
            let right = row[j + 1..].to_vec();
            a[j * k + j] = pivot;
            for i in j0..j {
                let row = &mut a[i * k..][..j1];
                row[j] = (row[j] - dot(&row[j + 1..], &right)) / pivot;
            }
        }
        let square: Vec<Vec<f64>> = (j0..j1).map(|j| a[j * k + j..][..j1 - j].to_vec()).collect();
        a[..j0 * k].par_chunks_mut(k).for_each(|row| {
            for j in (j0..j1).rev() {
                let right = &square[j - j0];
                row[j] = (row[j] - dot(&row[j + 1..j1], &right[1..])) / right[0];
            }
        });
    }
    Some(())
}

/// Quantizes `w [n, k]` (row major) for inputs with Hessian `h` and its `factor`; without one, rounds to nearest.
///
/// Scales and zero points are those that `w` itself gives ([`QuantizedMatrix::qparams_of`], by `args.observer`), all of
/// them fixed before the first code: the codes are chosen against stored scales. Each row is kept only if its output
/// error is below that of plain rounding, so that no row is ever worse. Any number of threads gives the same bits.
///
/// # Errors
/// As [`QuantizedMatrix::quantize`].
pub fn quantize(
    w: &[f32],
    n: usize,
    k: usize,
    h: &Hessian,
    factor: Option<&Factor>,
    args: QuantArgs,
) -> Result<(QuantizedMatrix, Fit), QuantError> {
    let global = QuantArgs::global_scale(dsq_kernels::fake_quant::largest_magnitude(w));
    quantize_and_targets(w, n, k, h, factor, args, global, false).map(|(matrix, fit, _)| (matrix, fit))
}

/// [`quantize`], and the values that were rounded: the weights with the errors of the columns before them added, `[n, k]`.
/// Rounded to nearest they are the codes, so training can start from them. `global`: the global scale, for a scheme that has
/// one (layers share it). `weighted`: where `args` searches ranges, the error of a column counts by the mean square of its
/// inputs; not under a global scale.
#[allow(clippy::too_many_arguments)]
pub(super) fn quantize_and_targets(
    w: &[f32],
    n: usize,
    k: usize,
    h: &Hessian,
    factor: Option<&Factor>,
    args: QuantArgs,
    global: f32,
    weighted: bool,
) -> Result<(QuantizedMatrix, Fit, Vec<f32>), QuantError> {
    let mut matrix = match weighted {
        false if args.has_global_scale() => QuantizedMatrix::quantize_under(w, n, k, args, Some(global))?,
        false => dsq_kernels::quantize::quantize(w, n, k, args)?,
        true => QuantizedMatrix::quantize_with(w, n, k, args, &weighted_params(w, n, k, args, &h.mean_square())?)?,
    };
    let params: Vec<QParams> = (0..matrix.scales.len()).map(|i| matrix.qparams(i)).collect();
    let plain = row_errors(w, &matrix, h);
    let rtn_error = plain.iter().sum();
    let mut fit = Fit { error: rtn_error, rtn_error, dead_columns: h.dead_columns(), plain_rows: n, damping: None };
    let Some(factor) = factor else { return Ok((matrix, fit, w.to_vec())) };
    let (chosen, mut targets, errors) = choose(w, n, k, factor, args, &params, &matrix);
    let rounded = std::mem::replace(&mut matrix.codes, chosen);
    // Where much was added to the diagonal, little may be left of the difference.
    let chosen = if factor.damping > DAMPING { row_errors(w, &matrix, h) } else { errors };
    (fit.error, fit.plain_rows, fit.damping) = (0.0, 0, Some(factor.damping));
    for (r, (&plain, &chosen)) in plain.iter().zip(&chosen).enumerate() {
        if chosen < plain {
            fit.error += chosen;
            continue;
        }
        let row = r * k..(r + 1) * k;
        // A row that GPTQ leaves as rounding has it is no loss.
        fit.plain_rows += usize::from(matrix.codes[row.clone()] != rounded[row.clone()]);
        matrix.codes[row.clone()].copy_from_slice(&rounded[row.clone()]);
        targets[row.clone()].copy_from_slice(&w[row]);
        fit.error += plain;
    }
    matrix.validate()?;
    Ok((matrix, fit, targets))
}

/// [`QuantizedMatrix::weighted_qparams_of`], some rows in each task where no scale reaches over rows.
fn weighted_params(
    w: &[f32],
    n: usize,
    k: usize,
    args: QuantArgs,
    importance: &[f32],
) -> Result<Vec<QParams>, QuantError> {
    let [rows, _] = args.scale_shape(n, k)?;
    if rows != n || w.len() != n * k || w.is_empty() {
        return QuantizedMatrix::weighted_qparams_of(w, n, k, args, importance);
    }
    // Refuses what has no grid, at its place in the whole weight; the whole range is what the search starts from.
    dsq_kernels::quantize::qparams_of(w, n, k, QuantArgs { observer: WeightObserver::MinMax, ..args })?;
    let of = |part: &[f32]| QuantizedMatrix::weighted_qparams_of(part, part.len() / k, k, args, importance);
    let parts: Result<Vec<Vec<QParams>>, QuantError> = w.par_chunks(TASK_ROWS * k).map(of).collect();
    Ok(parts?.concat())
}

/// The output error of each row.
pub(super) fn row_errors(w: &[f32], matrix: &QuantizedMatrix, h: &Hessian) -> Vec<f64> {
    let values = matrix.dequantize();
    let errors: Vec<f32> = w.iter().zip(values).map(|(w, v)| w - v).collect();
    h.output_errors(&errors)
}

/// GPTQ's codes and what they were rounded from, `[n, k]`, and the output error of each row: what is minimised, `|e R|^2`, whose
/// `j`-th term is `R_jj` times what rounding did to the target, less what the damping has of it.
fn choose(
    w: &[f32],
    n: usize,
    k: usize,
    factor: &Factor,
    args: QuantArgs,
    params: &[QParams],
    grid: &QuantizedMatrix,
) -> (Vec<i8>, Vec<f32>, Vec<f64>) {
    let Factor { order, coupling, squares, added, .. } = factor;
    let g = grid.group_len().max(1);
    // Weights in the order of the walk, to which the errors of earlier columns are added.
    let mut target: Vec<f32> = w.chunks(k.max(1)).flat_map(|row| order.iter().map(|&c| row[c])).collect();
    let mut codes = vec![0i8; n * k];
    let mut losses = vec![0.0f64; n];
    for b0 in (0..k).step_by(BLOCK) {
        let b1 = (b0 + BLOCK).min(k);
        let width = b1 - b0;
        let mut errors = vec![0.0f32; n * width];
        let rows = target.par_chunks_mut(k).zip(errors.par_chunks_mut(width)).zip(codes.par_chunks_mut(k));
        let rows = rows.zip(&mut losses).enumerate().with_min_len(TASK_ROWS);
        rows.for_each(|(r, (((target, errors), codes), loss))| {
            for j in b0..b1 {
                let c = order[j];
                let p = params[grid.scale_index(r, c / g)];
                codes[c] = args.quantize(target[j], p);
                let value = args.dequantize(codes[c], p);
                let e = w[r * k + c] - value;
                *loss += f64::from(target[j] - value).powi(2) * squares[j] - f64::from(e).powi(2) * added[j];
                errors[j - b0] = e;
                let couplings = &coupling[j * k..][j + 1..b1];
                target[j + 1..b1].iter_mut().zip(couplings).for_each(|(t, &c)| *t += e * c);
            }
        });
        if b1 < k {
            let later = k - b1;
            let couplings = Strided { data: &coupling[b0 * k + b1..], row: k, col: 1 };
            let moved = matmul(Strided::rows(&errors, width), couplings, [n, later, width]);
            target.par_chunks_mut(k).zip(moved.par_chunks(later)).for_each(|(target, moved)| {
                target[b1..].iter_mut().zip(moved).for_each(|(t, &m)| *t += m);
            });
        }
    }
    let mut targets = vec![0.0f32; n * k];
    targets.par_chunks_mut(k.max(1)).zip(target.par_chunks(k.max(1))).for_each(|(out, target)| {
        order.iter().zip(target).for_each(|(&c, &t)| out[c] = t);
    });
    losses.iter_mut().for_each(|l| *l = l.max(0.0));
    (codes, targets, losses)
}

#[cfg(test)]
mod tests;
