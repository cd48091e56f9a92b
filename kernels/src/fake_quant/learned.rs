//! Fake quantization with learned scales and zero points (LSQ, LSQ+): values on the grid that will ship, and the gradients
//! of all three. The formulas are `dsq_quant`'s `learned_qparams`, `fake_quantize` and `learned_gradients`; this module
//! walks them.
//!
//! - Shapes: `w`, `out` `[n, k]`; `scales` and `zeros` one for each group, row major; groups lie one after the other, or are blocks
//!   of rows and columns.
//! - Layout: row major, contiguous.
//! - Requires: AVX2 for the fast path (found at run time); any length, tails included.
//! - Order: a group is cut into runs of 4,096 values; in a run, lane `i` of 16 sums the values `i`, `i + 16`, ... in f32;
//!   lanes, then runs, are added in f64; of a block the runs are those of its rows, in order. Knows neither threads nor the path.
//! - Cost: forward as `fake_quant_with`; backward one division and one rounding a value, two reads, one write.
//! - Error: none against the reference (bit-equal).

use super::{TASK, check_len, range};
use dsq_quant::{Granularity, InputGrid, Mapping, QParams, QuantArgs, QuantError, with_format};
use rayon::prelude::*;

const RUN: usize = 1 << 12;
const LANES: usize = 16;

/// The learned grid of a matrix of `k` columns.
#[derive(Debug, Clone, Copy)]
pub struct Learned<'a> {
    /// The scheme.
    pub args: &'a QuantArgs,
    /// Columns; matters for blocks only.
    pub k: usize,
    /// Scales in effect as they are trained, one for each group, row major.
    pub scales: &'a [f32],
    /// Zero points; empty when symmetric.
    pub zeros: &'a [f32],
    /// The global scale under which the scales are stored, exactly where the scheme has one.
    pub global: Option<f32>,
}

impl Learned<'_> {
    /// What ships for group `i`, in effect.
    fn params(&self, i: usize) -> QParams {
        let zero = self.zeros.get(i).copied().unwrap_or(0.0);
        self.args.in_effect(self.args.stored_learned_qparams(self.scales[i], zero, self.global), self.global)
    }

    /// How a matrix of `len` values lies on the grid.
    fn split(&self, len: usize) -> Result<Split, QuantError> {
        let wanted = if self.args.mapping == Mapping::Asymmetric { self.scales.len() } else { 0 };
        check_len("zero points", wanted, self.zeros.len())?;
        self.args.check_global(self.global)?;
        if let Granularity::PerBlock(rows, columns) = self.args.granularity {
            let n = len.checked_div(self.k).unwrap_or(0);
            check_len("values of the rows", n * self.k, len)?;
            let [down, across] = self.args.scale_shape(n, self.k)?;
            check_len("scales of the blocks", down * across, self.scales.len())?;
            return Ok(Split::Blocks { rows, columns, across });
        }
        let per = len.checked_div(self.scales.len()).unwrap_or(0);
        check_len("values of the groups", per * self.scales.len(), len)?;
        Ok(Split::Runs(per.max(1)))
    }
}

/// Groups of a matrix.
enum Split {
    /// One after the other, of so many values each.
    Runs(usize),
    /// `across` blocks of `rows` rows and `columns` columns beside one another.
    Blocks { rows: usize, columns: usize, across: usize },
}

/// Gradients of [`fake_quant_learned`].
#[derive(Debug, Clone, PartialEq)]
pub struct LearnedGradients {
    /// For the values.
    pub w: Vec<f32>,
    /// For the scales.
    pub scale: Vec<f32>,
    /// For the zero points; empty when symmetric.
    pub zero: Vec<f32>,
}

/// Writes the values of `w` on a learned grid.
///
/// # Errors
/// [`QuantError::Length`] when the scales do not divide the values into equal groups (or are not those of the blocks), or
/// another length is wrong; as [`QuantArgs::check_global`].
pub fn fake_quant_learned(w: &[f32], grid: &Learned, out: &mut [f32]) -> Result<(), QuantError> {
    check_len("output", w.len(), out.len())?;
    let args = grid.args;
    let per = match grid.split(w.len())? {
        Split::Runs(per) => per,
        Split::Blocks { rows, columns, across } => {
            let k = grid.k.max(1);
            w.par_chunks(k).zip(out.par_chunks_mut(k)).enumerate().for_each(|(row, (w, out))| {
                for (j, (w, out)) in w.chunks(columns).zip(out.chunks_mut(columns)).enumerate() {
                    values(w, args, grid.params(row / rows * across + j), out);
                }
            });
            return Ok(());
        }
    };
    if per > 4 * TASK {
        for (i, (w, out)) in w.chunks(per).zip(out.chunks_mut(per)).enumerate() {
            let p = grid.params(i);
            w.par_chunks(TASK).zip(out.par_chunks_mut(TASK)).for_each(|(w, out)| values(w, args, p, out));
        }
        return Ok(());
    }
    let run = (TASK / per).max(1);
    w.par_chunks(per * run).zip(out.par_chunks_mut(per * run)).enumerate().for_each(|(task, (w, out))| {
        for (i, (w, out)) in w.chunks(per).zip(out.chunks_mut(per)).enumerate() {
            values(w, args, grid.params(task * run + i), out);
        }
    });
    Ok(())
}

/// The gradients of [`fake_quant_learned`] for the gradient `g` of its output.
///
/// # Errors
/// As [`fake_quant_learned`].
pub fn fake_quant_learned_gradient(w: &[f32], g: &[f32], grid: &Learned) -> Result<LearnedGradients, QuantError> {
    check_len("gradient", w.len(), g.len())?;
    let (args, mut dw) = (grid.args, vec![0.0f32; w.len()]);
    let mut sums = vec![[0.0f32; 2]; grid.scales.len()];
    match grid.split(w.len())? {
        Split::Blocks { rows, columns, across } => {
            let k = grid.k.max(1);
            let lines = w.par_chunks(k).zip(g.par_chunks(k)).zip(dw.par_chunks_mut(k)).enumerate();
            let parts: Vec<Vec<[f64; 2]>> = lines
                .map(|(row, ((w, g), dw))| {
                    let runs = w.chunks(columns).zip(g.chunks(columns)).zip(dw.chunks_mut(columns)).enumerate();
                    runs.map(|(j, ((w, g), dw))| group(w, g, args, grid.params(row / rows * across + j), dw)).collect()
                })
                .collect();
            for (band, parts) in parts.chunks(rows).enumerate() {
                for j in 0..across {
                    sums[band * across + j] = total(parts.iter().map(|row| row[j])).map(|v| v as f32);
                }
            }
        }
        Split::Runs(per) if per > 4 * TASK => {
            for (i, sum) in sums.iter_mut().enumerate() {
                let (p, at) = (grid.params(i), i * per..(i + 1) * per);
                let runs =
                    w[at.clone()].par_chunks(RUN).zip(g[at.clone()].par_chunks(RUN)).zip(dw[at].par_chunks_mut(RUN));
                let parts: Vec<[f64; 2]> = runs.map(|((w, g), dw)| gradient_run(w, g, args, p, dw)).collect();
                *sum = total(parts.into_iter()).map(|v| v as f32);
            }
        }
        Split::Runs(per) => {
            let run = (TASK / per).max(1);
            let tasks = w.par_chunks(per * run).zip(g.par_chunks(per * run)).zip(dw.par_chunks_mut(per * run));
            tasks.zip(sums.par_chunks_mut(run)).enumerate().for_each(|(task, (((w, g), dw), sums))| {
                let groups = w.chunks(per).zip(g.chunks(per)).zip(dw.chunks_mut(per));
                for (i, (((w, g), dw), sum)) in groups.zip(sums).enumerate() {
                    *sum = group(w, g, args, grid.params(task * run + i), dw).map(|v| v as f32);
                }
            });
        }
    }
    let scale = sums.iter().map(|s| s[0]).collect();
    let zero = match args.mapping {
        Mapping::Symmetric => Vec::new(),
        Mapping::Asymmetric => sums.iter().map(|s| s[1]).collect(),
    };
    Ok(LearnedGradients { w: dw, scale, zero })
}

/// The gradients of [`super::fake_quant_rows`] under a stored global scale (NVFP4 activations `x [m, k]`) for the gradient `g` of its
/// output: for the values, and for the largest scale that a run can have in effect, 448 over the global one. That is the scale of
/// the runs that are capped ([`InputGrid::is_capped`]), whose values have [`QuantArgs::learned_gradients`]; the others find their own
/// and do not depend on it. Runs are added in f64 in each row, then rows. A run that has no scale passes its gradient through.
///
/// # Errors
/// [`QuantError::Length`] when the gradient has another length or `k` does not divide the values, [`QuantError::GroupNotDividing`]
/// when the runs do not divide `k`.
pub fn fake_quant_rows_gradient(
    x: &[f32],
    g: &[f32],
    k: usize,
    grid: &InputGrid,
) -> Result<(Vec<f32>, f32), QuantError> {
    check_len("gradient", x.len(), g.len())?;
    if k == 0 || !x.len().is_multiple_of(k) {
        check_len("activations", k, x.len())?;
    }
    let run = grid.args.group_len(k)?.max(1);
    let row = |((x, g), dx): ((&[f32], &[f32]), &mut [f32])| {
        let mut sum = 0.0f64;
        for ((x, g), dx) in x.chunks(run).zip(g.chunks(run)).zip(dx.chunks_mut(run)) {
            let seen = range(x);
            match grid.run_qparams(seen.lo, seen.hi) {
                Ok(p) if seen.finite => {
                    let [scale, _] = gradient_run(x, g, &grid.args, p, dx);
                    sum += if grid.is_capped(seen.hi.max(-seen.lo)) { scale } else { 0.0 };
                }
                _ => dx.copy_from_slice(g),
            }
        }
        sum
    };
    let (k, mut dx) = (k.max(1), vec![0.0f32; x.len()]);
    let rows: Vec<f64> = x
        .par_chunks(k)
        .zip(g.par_chunks(k))
        .zip(dx.par_chunks_mut(k))
        .with_min_len((TASK / k).max(1))
        .map(row)
        .collect();
    Ok((dx, rows.iter().sum::<f64>() as f32))
}

/// Writes the values of fixed codes (`code - zero`, or what a float code stands for: exact in f32) on the scales of a learned
/// grid: `code * scale`.
///
/// # Errors
/// As [`fake_quant_learned`].
pub fn scaled_codes(codes: &[f32], grid: &Learned, out: &mut [f32]) -> Result<(), QuantError> {
    check_len("output", codes.len(), out.len())?;
    let scaled = |codes: &[f32], scale: f32, out: &mut [f32]| {
        out.iter_mut().zip(codes).for_each(|(o, c)| *o = c * scale);
    };
    match grid.split(codes.len())? {
        Split::Runs(per) => {
            out.par_chunks_mut(per).zip(codes.par_chunks(per)).enumerate().with_min_len((TASK / per).max(1)).for_each(
                |(i, (out, codes))| {
                    scaled(codes, grid.params(i).scale, out);
                },
            );
        }
        Split::Blocks { rows, columns, across } => {
            let k = grid.k.max(1);
            codes.par_chunks(k).zip(out.par_chunks_mut(k)).enumerate().for_each(|(row, (codes, out))| {
                for (j, (codes, out)) in codes.chunks(columns).zip(out.chunks_mut(columns)).enumerate() {
                    scaled(codes, grid.params(row / rows * across + j).scale, out);
                }
            });
        }
    }
    Ok(())
}

/// The gradient of [`scaled_codes`] for the scales, from that of its output: the sum of `g * code` over the group.
///
/// # Errors
/// As [`scaled_codes`].
pub fn scaled_codes_gradient(codes: &[f32], g: &[f32], grid: &Learned) -> Result<Vec<f32>, QuantError> {
    check_len("gradient", codes.len(), g.len())?;
    let dot = |(codes, g): (&[f32], &[f32])| {
        let run = |(c, g): (&[f32], &[f32])| {
            let mut lanes = [0.0f32; LANES];
            for (c, g) in c.chunks(LANES).zip(g.chunks(LANES)) {
                lanes.iter_mut().zip(c.iter().zip(g)).for_each(|(l, (c, g))| *l += c * g);
            }
            lanes.iter().map(|&l| f64::from(l)).sum::<f64>()
        };
        codes.chunks(RUN).zip(g.chunks(RUN)).map(run).sum::<f64>()
    };
    Ok(match grid.split(codes.len())? {
        Split::Runs(per) => codes
            .par_chunks(per)
            .zip(g.par_chunks(per))
            .with_min_len((TASK / per).max(1))
            .map(|run| dot(run) as f32)
            .collect(),
        Split::Blocks { rows, columns, across } => {
            let k = grid.k.max(1);
            let mut sums = vec![0.0f64; grid.scales.len()];
            for (row, (codes, g)) in codes.chunks(k).zip(g.chunks(k)).enumerate() {
                let at = row / rows * across;
                sums[at..at + across]
                    .iter_mut()
                    .zip(codes.chunks(columns).zip(g.chunks(columns)))
                    .for_each(|(sum, run)| *sum += dot(run));
            }
            sums.into_iter().map(|s| s as f32).collect()
        }
    })
}

/// The gradients of a group's run, and the sums for its scale and zero point.
fn group(w: &[f32], g: &[f32], args: &QuantArgs, p: QParams, dw: &mut [f32]) -> [f64; 2] {
    let runs = w.chunks(RUN).zip(g.chunks(RUN)).zip(dw.chunks_mut(RUN));
    total(runs.map(|((w, g), dw)| gradient_run(w, g, args, p, dw)))
}

fn total(parts: impl Iterator<Item = [f64; 2]>) -> [f64; 2] {
    parts.fold([0.0f64; 2], |a, b| [a[0] + b[0], a[1] + b[1]])
}

fn values(w: &[f32], args: &QuantArgs, p: QParams, out: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if crate::isa::has_avx2() {
        // SAFETY: AVX2 was found.
        return unsafe { values_avx2(w, args, p, out) };
    }
    values_plain(w, args, p, out);
}

/// As `QuantArgs::fake_quantize`, without a branch, so that it vectorizes; NaN values and scales stay visible.
#[inline(always)]
fn values_plain(w: &[f32], args: &QuantArgs, p: QParams, out: &mut [f32]) {
    if let Some(f) = args.qtype.float() {
        return with_format!(f, F => for (out, &x) in out.iter_mut().zip(w) {
            let c = x / p.scale;
            *out = if c.is_nan() { c } else { F.round(c) * p.scale };
        });
    }
    let (qmin, qmax, zero) = (args.qtype.qmin() as f32, args.qtype.qmax() as f32, p.zero as f32);
    for (out, &x) in out.iter_mut().zip(w) {
        let c = x / p.scale + zero;
        let q = c.max(qmin).min(qmax).round_ties_even();
        // `q + (0 - zero)`: a code of -0.0 becomes +0.0, as an integer code does.
        *out = if c.is_nan() { c } else { (q + (0.0 - zero)) * p.scale };
    }
}

/// # Safety
/// AVX2 must be present.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn values_avx2(w: &[f32], args: &QuantArgs, p: QParams, out: &mut [f32]) {
    values_plain(w, args, p, out);
}

fn gradient_run(w: &[f32], g: &[f32], args: &QuantArgs, p: QParams, dw: &mut [f32]) -> [f64; 2] {
    #[cfg(target_arch = "x86_64")]
    if crate::isa::has_avx2() {
        // SAFETY: AVX2 was found.
        return unsafe { gradient_avx2(w, g, args, p, dw) };
    }
    gradient_plain(w, g, args, p, dw)
}

#[inline(always)]
fn gradient_plain(w: &[f32], g: &[f32], args: &QuantArgs, p: QParams, dw: &mut [f32]) -> [f64; 2] {
    match args.qtype.float() {
        None => gradient_of(w, g, dw, |x| args.integer_gradients(x, p)),
        Some(f) => with_format!(f, F => gradient_of(w, g, dw, |x| F.learned_gradients(x, p.scale))),
    }
}

#[inline(always)]
fn gradient_of(w: &[f32], g: &[f32], dw: &mut [f32], gradients: impl Fn(f32) -> [f32; 3]) -> [f64; 2] {
    let (mut scale, mut zero) = ([0.0f32; LANES], [0.0f32; LANES]);
    let mut walk = |w: &[f32], g: &[f32], dw: &mut [f32]| {
        for i in 0..w.len().min(LANES) {
            let [dx, ds, dz] = gradients(w[i]);
            // A closed gate gives 0, whatever the gradient is.
            dw[i] = if dx == 0.0 { 0.0 } else { g[i] };
            scale[i] += g[i] * ds;
            zero[i] += g[i] * dz;
        }
    };
    let whole = w.len() / LANES * LANES;
    let blocks = w[..whole].chunks_exact(LANES).zip(g[..whole].chunks_exact(LANES));
    for ((w, g), dw) in blocks.zip(dw[..whole].chunks_exact_mut(LANES)) {
        walk(w, g, dw);
    }
    walk(&w[whole..], &g[whole..], &mut dw[whole..]);
    [scale, zero].map(|lanes| lanes.iter().map(|&l| f64::from(l)).sum())
}

/// # Safety
/// AVX2 must be present.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn gradient_avx2(w: &[f32], g: &[f32], args: &QuantArgs, p: QParams, dw: &mut [f32]) -> [f64; 2] {
    gradient_plain(w, g, args, p, dw)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_quant::tests::{bits, float_args, integer_args as all_args, normal};
    use dsq_quant::{Granularity, QuantizedMatrix};

    #[test]
    fn values_are_those_of_the_shipped_matrix_and_gradients_those_of_the_formula() {
        for (n, k) in [(1, 1), (3, 7), (5, 96), (33, 192), (1, 70_003)] {
            let group = if k % 32 == 0 { 32 } else { k };
            let integers = all_args(&[Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(group)]);
            let floats = float_args().into_iter().filter(|a| a.scale_shape(n, k).is_ok());
            for args in integers.into_iter().chain(floats) {
                let w = normal(n * k, (n * 31 + k) as u64);
                let g = normal(n * k, 77);
                let count = args.learned_shape(n, k).unwrap().iter().product::<usize>();
                let scales: Vec<f32> =
                    normal(count, 5).iter().map(|v| v.abs() * 3.0 / args.qtype.qmax() as f32 + 1e-3).collect();
                let zeros: Vec<f32> = match args.mapping {
                    Mapping::Symmetric => Vec::new(),
                    Mapping::Asymmetric => normal(count, 6).iter().map(|v| v * 3.0).collect(),
                };
                let global = args.has_global_scale().then_some(300.0);
                let grid = Learned { args: &args, k, scales: &scales, zeros: &zeros, global };
                let params: Vec<QParams> = (0..count)
                    .map(|i| args.stored_learned_qparams(scales[i], zeros.get(i).copied().unwrap_or(0.0), global))
                    .collect();
                let shipped = QuantizedMatrix::quantize_on(&w, n, k, args, &params, global).unwrap();
                let mut out = vec![f32::NAN; n * k];
                fake_quant_learned(&w, &grid, &mut out).unwrap();
                assert_eq!(bits(&out), bits(&shipped.dequantize()), "{n}x{k} {args:?}");

                let d = fake_quant_learned_gradient(&w, &g, &grid).unwrap();
                let group = |i: usize| shipped.scale_index(i / k, i % k / shipped.group_len());
                let mut want = vec![[0.0f64; 3]; count];
                for i in 0..n * k {
                    let [dx, ds, dz] = args.learned_gradients(w[i], shipped.qparams(group(i)));
                    assert_eq!(d.w[i], if dx == 1.0 { g[i] } else { 0.0 });
                    let terms = [f64::from(g[i]) * f64::from(ds), f64::from(g[i]) * f64::from(dz)];
                    let sum = &mut want[group(i)];
                    (sum[0], sum[1]) = (sum[0] + terms[0], sum[1] + terms[1]);
                    sum[2] += terms[0].abs() + terms[1].abs();
                }
                for (i, w) in want.iter().enumerate() {
                    // A lane adds at most 256 terms, each rounded once, and the sum is rounded once: 258 u of their size.
                    let bound = 258.0 * 2f64.powi(-24) * w[2] + 1e-30;
                    assert!((f64::from(d.scale[i]) - w[0]).abs() <= bound, "{args:?} {i}");
                    if let Some(z) = d.zero.get(i) {
                        assert!((f64::from(*z) - w[1]).abs() <= bound, "{args:?} {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn fixed_codes_take_the_values_of_the_shipped_matrix_and_give_scales_their_gradient() {
        for (n, k, granularity) in
            [(5, 96, Granularity::PerGroup(32)), (3, 7, Granularity::PerChannel), (2, 9000, Granularity::PerTensor)]
        {
            let floats = float_args().into_iter().filter(|a| a.scale_shape(n, k).is_ok());
            for args in all_args(&[granularity]).into_iter().chain(floats) {
                let q = QuantizedMatrix::quantize(&normal(n * k, 3), n, k, args).unwrap();
                let group = |i: usize| q.scale_index(i / k, i % k / q.group_len());
                let code = |(i, &c): (usize, &i8)| args.code_value(c, q.qparams(group(i)).zero);
                let codes: Vec<f32> = q.codes.iter().enumerate().map(code).collect();
                let scales: Vec<f32> = (0..q.scales.len()).map(|i| q.qparams(i).scale).collect();
                let zeros = vec![0.0; q.zeros.len()];
                let grid = Learned { args: &args, k, scales: &scales, zeros: &zeros, global: q.global_scale };
                let mut out = vec![f32::NAN; n * k];
                scaled_codes(&codes, &grid, &mut out).unwrap();
                assert_eq!(bits(&out), bits(&q.dequantize()), "{args:?}");
                let g = normal(n * k, 4);
                let got = scaled_codes_gradient(&codes, &g, &grid).unwrap();
                let mut want = vec![[0.0f64; 2]; scales.len()];
                for i in 0..n * k {
                    let term = f64::from(codes[i] * g[i]);
                    let sum = &mut want[group(i)];
                    (sum[0], sum[1]) = (sum[0] + term, sum[1] + term.abs());
                }
                for (d, [sum, size]) in got.iter().zip(want) {
                    // As for the gradients of learned grids.
                    assert!((f64::from(*d) - sum).abs() <= 258.0 * 2f64.powi(-24) * size + 1e-30, "{args:?}");
                }
            }
        }
        let args = all_args(&[Granularity::PerChannel])[0];
        let grid = Learned { args: &args, k: 1, scales: &[1.0; 2], zeros: &[], global: None };
        assert!(scaled_codes(&[0.0; 5], &grid, &mut [0.0; 5]).is_err());
        assert!(scaled_codes_gradient(&[0.0; 4], &[0.0; 3], &grid).is_err());
    }

    #[test]
    fn any_thread_count_and_path_gives_the_same_bits() {
        for (n, k) in [(257, 331), (1, 200_000)] {
            let (w, g) = (normal(n * k, 5), normal(n * k, 6));
            let integer = QuantArgs {
                mapping: Mapping::Asymmetric,
                ..QuantArgs::int4(Granularity::PerChannel, dsq_quant::FloatType::Bf16)
            };
            let blocks = QuantArgs::fp8(Granularity::PerBlock(128, 128), dsq_quant::FloatType::F32);
            for args in [integer, blocks] {
                let scales = vec![0.2f32; args.learned_shape(n, k).unwrap().iter().product()];
                let zeros = vec![0.7f32; if args == integer { n } else { 0 }];
                let grid = Learned { args: &args, k, scales: &scales, zeros: &zeros, global: None };
                let run = |threads| {
                    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                    pool.install(|| fake_quant_learned_gradient(&w, &g, &grid)).unwrap()
                };
                let one = run(1);
                for threads in [2, 3, 7] {
                    assert_eq!(run(threads), one);
                }
                let p = args.learned_qparams(0.2, 0.7);
                let (mut a, mut b) = (vec![0.0; RUN], vec![0.0; RUN]);
                let plain = gradient_plain(&w[..RUN], &g[..RUN], &args, p, &mut a);
                assert_eq!(plain, gradient_run(&w[..RUN], &g[..RUN], &args, p, &mut b));
                assert_eq!(a, b);
                values_plain(&w[..RUN], &args, p, &mut a);
                values(&w[..RUN], &args, p, &mut b);
                assert_eq!(bits(&a), bits(&b));
            }
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_refused() {
        let args = QuantArgs::int4(Granularity::PerChannel, dsq_quant::FloatType::F32);
        let mut out = [0.0; 6];
        let grid = |scales, zeros| Learned { args: &args, k: 2, scales, zeros, global: None };
        assert!(fake_quant_learned(&[0.0; 6], &grid(&[1.0; 4], &[]), &mut out).is_err());
        assert!(fake_quant_learned(&[0.0; 6], &grid(&[1.0; 3], &[0.0; 3]), &mut out).is_err());
        assert!(fake_quant_learned(&[0.0; 5], &grid(&[1.0; 3], &[]), &mut out).is_err());
        assert!(fake_quant_learned_gradient(&[0.0; 6], &[0.0; 5], &grid(&[1.0; 3], &[])).is_err());
        assert!(
            fake_quant_learned(&[0.0; 6], &Learned { global: Some(1.0), ..grid(&[1.0; 3], &[]) }, &mut out).is_err()
        );
        let blocks = QuantArgs::fp8(Granularity::PerBlock(2, 2), dsq_quant::FloatType::F32);
        let of = |k, scales| Learned { args: &blocks, k, scales, zeros: &[], global: None };
        assert!(fake_quant_learned(&[0.0; 6], &of(2, &[1.0; 2]), &mut out).is_ok());
        assert!(fake_quant_learned(&[0.0; 6], &of(3, &[1.0; 3]), &mut out).is_err());
        assert!(fake_quant_learned(&[0.0; 6], &of(4, &[1.0; 2]), &mut out).is_err());
    }
}
