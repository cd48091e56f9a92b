//! The named modes of a linear layer's input: which layers can take rounded inputs, and calls over several layers. Not the arithmetic
//! (`int.rs`, `kernel.rs`).

use super::int::{self, IntPath};
use super::layout::{Panels, Storage};
use super::{GATHERED, Linear, ROUNDED, lent, matmul_many};
use crate::fake_quant::fake_quant_rows;
use dsq_quant::{InputGrid, Mapping, QuantError, QuantType};

/// How a linear layer takes its input. Both modes read the same copy of the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Activations {
    /// As f32 (W4A16 and its kin).
    #[default]
    Float,
    /// Rounded to INT8, symmetric, one scale for each token and at most 16 values of a weight group, found when the model runs
    /// (W4A8, W8A8). Layers whose weights are not INT codes stay with f32: [`Linear::describe_in`] says which.
    Int8,
}

impl Linear {
    /// Whether the layer has an integer kernel: its weights are INT codes.
    pub fn takes_int8(&self) -> bool {
        takes_int8(self.parts().0)
    }

    /// Whether products run on the integer kernel, in a mode or (where there is one) on a checkpoint's grid.
    pub fn multiplies_int8(&self, mode: Activations, grid: Option<&InputGrid>) -> bool {
        grid.map_or(mode == Activations::Int8 && self.takes_int8(), |grid| self.refuses(grid).is_none())
    }

    /// The path that this layer runs on in a mode, and why.
    pub fn describe_in(&self, mode: Activations) -> String {
        match mode {
            Activations::Float => self.describe(),
            Activations::Int8 if self.takes_int8() => self.describe_int8("for each token and 16 inputs"),
            Activations::Int8 => format!("{}; no int8 activations: the weights are no int codes", self.describe()),
        }
    }

    /// The path that this layer runs on in [`matmul_many_on_grid`], and why.
    pub fn describe_on_grid(&self, grid: &InputGrid) -> String {
        match self.refuses(grid) {
            None if grid.params.is_some() => self.describe_int8("from the checkpoint"),
            None => self.describe_int8("for each run of the checkpoint's grid"),
            Some(why) => format!("{}; inputs rounded in f32: {why}", self.describe()),
        }
    }

    fn describe_int8(&self, scale: &str) -> String {
        let (panels, isa) = self.parts();
        let gathered = if self.order().is_some() { "; inputs gathered, groups in activation order" } else { "" };
        let weights = super::describe_weights(panels);
        format!("{weights}, int8 activations with a scale {scale}: {}{gathered}", IntPath::of(isa).describe(isa))
    }

    /// Why inputs on this grid do not reach the integer kernel.
    fn refuses(&self, grid: &InputGrid) -> Option<&'static str> {
        let (args, p) = (&grid.args, self.parts().0);
        if !self.takes_int8() {
            return Some("the weights are no int codes");
        }
        if args.qtype != QuantType::Int8 {
            return Some("the grid is not int8");
        }
        if args.mapping != Mapping::Symmetric || grid.params.is_some_and(|p| p.zero != 0) {
            return Some("the grid is asymmetric");
        }
        let Ok(run) = args.group_len(p.k) else { return Some("runs of the grid do not divide the inputs") };
        let run = run.max(1);
        if run < p.k && self.order().is_some() {
            return Some("runs of the grid are inputs, and the columns have another order");
        }
        let mut pieces = p.segments.iter().flat_map(|s| s.pieces());
        let crosses = pieces.any(|(at, len, _)| at / run != (at + len - 1) / run);
        crosses.then_some("a run of the grid ends within 16 inputs of a weight group")
    }
}

fn takes_int8(p: &Panels) -> bool {
    matches!(p.storage, Storage::Code(QuantType::Int2 | QuantType::Int3 | QuantType::Int4 | QuantType::Int8))
}

/// [`matmul_many`] in a mode; layers that cannot take INT8 run in f32. Layers that follow one another with the same groups (and order
/// of columns) share one rounding of the input. The contract of the arithmetic: `kernels/src/linear/int.rs`. A value of `x` that is
/// not finite makes all outputs of its token NaN.
///
/// # Panics
/// As [`matmul_many`].
pub fn matmul_many_in(mode: Activations, layers: &[&Linear], x: &[f32], m: usize, outs: &mut [&mut [f32]]) {
    match mode {
        Activations::Float => matmul_many(layers, x, m, outs),
        Activations::Int8 => in_runs(None, layers, x, m, outs, |l| l.takes_int8()),
    }
}

/// [`matmul_many`] of inputs put on a checkpoint's grid. Where the grid is symmetric INT8 and the weights are INT codes the codes and
/// scales of the grid go to the integer kernel as they are; other layers get the values on the grid in f32, which is
/// [`fake_quant_rows`] and [`matmul_many`]. [`Linear::describe_on_grid`] says which and why. A run of values that has no scale (one is not
/// finite) makes the outputs of its token NaN.
///
/// # Errors
/// [`QuantError::GroupNotDividing`] when runs of the grid do not divide the inputs; nothing is computed then.
///
/// # Panics
/// As [`matmul_many`].
pub fn matmul_many_on_grid(
    grid: &InputGrid,
    layers: &[&Linear],
    x: &[f32],
    m: usize,
    outs: &mut [&mut [f32]],
) -> Result<(), QuantError> {
    let Some(first) = layers.first() else { return Ok(()) };
    grid.args.group_len(first.k())?;
    if layers.iter().all(|l| l.refuses(grid).is_none()) {
        in_runs(Some(grid), layers, x, m, outs, |_| true);
        return Ok(());
    }
    lent(&ROUNDED, |rounded| {
        rounded.clear();
        rounded.extend_from_slice(x);
        if first.k() > 0 {
            // A run that has no grid is NaN in `rounded`.
            let _ = fake_quant_rows(rounded, first.k(), grid);
        }
        let mut at = 0;
        while let Some(first) = layers.get(at) {
            let integer = first.refuses(grid).is_none();
            let here = layers[at..].iter().take_while(|l| l.refuses(grid).is_none() == integer).count();
            let (layers, outs) = (&layers[at..at + here], &mut outs[at..at + here]);
            if integer {
                in_runs(Some(grid), layers, x, m, outs, |_| true);
            } else {
                matmul_many(layers, rounded, m, outs);
            }
            at += here;
        }
    });
    Ok(())
}

/// Runs of layers that share a rounding go to the integer kernel, runs of layers without one to the f32 kernel.
fn in_runs(
    grid: Option<&InputGrid>,
    layers: &[&Linear],
    x: &[f32],
    m: usize,
    outs: &mut [&mut [f32]],
    integer: impl Fn(&Linear) -> bool,
) {
    assert_eq!(layers.len(), outs.len(), "one output for each layer");
    let mut at = 0;
    while let Some(first) = layers.get(at) {
        let (panels, isa) = first.parts();
        let same = |l: &&&Linear| {
            let (p, i) = l.parts();
            integer(l) == integer(first)
                && (!integer(l) || (p.group_len == panels.group_len && i == isa && l.order() == first.order()))
        };
        let here = layers[at..].iter().take_while(same).count();
        let (run, outs) = (&layers[at..at + here], &mut outs[at..at + here]);
        if integer(first) {
            let parts: Vec<&Panels> = run.iter().map(|l| l.parts().0).collect();
            match first.order() {
                None => int::matmul(IntPath::of(isa), grid, &parts, x, m, outs),
                Some(order) => lent(&GATHERED, |room| {
                    order.gather_into(x, room);
                    int::matmul(IntPath::of(isa), grid, &parts, room, m, outs);
                }),
            }
        } else {
            matmul_many(run, x, m, outs);
        }
        at += here;
    }
}
