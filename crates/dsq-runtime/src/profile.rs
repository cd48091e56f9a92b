//! Where the time of a forward pass goes, operation by operation and layer by layer, and what each ought to take. Not the measuring
//! of the machine (see `dsq_kernels::roofline`), not the printing.

use crate::attention;
use crate::{KvPool, LlamaRuntime};
use dsq_kernels::{Activations, Linear};
use dsq_quant::InputGrid;
use std::time::{Duration, Instant};

/// The operations that a profile tells apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Op {
    /// Rows of the embedding.
    Embed,
    /// RMSNorm of a layer's input, of what attention left, or before the head; the sums with the residual stream among them.
    Norm,
    /// The projections to queries, keys and values (of latent attention all before the cache), biases and norms of heads.
    Qkv,
    /// Rotary embedding.
    Rotate,
    /// Keys and values into the cache.
    Put,
    /// Attention over the cache.
    Attend,
    /// The projection of attention's output.
    Output,
    /// The projections gate and up (of all experts that run).
    GateUp,
    /// SiLU of the gate times up.
    Gate,
    /// The projection down.
    Down,
    /// The choice of experts, and their sums.
    Route,
    /// Sums with the residual stream.
    Add,
    /// The logits.
    Head,
}

impl Op {
    /// All of them, in the order of a pass.
    pub const ALL: [Self; 13] = [
        Self::Embed,
        Self::Norm,
        Self::Qkv,
        Self::Rotate,
        Self::Put,
        Self::Attend,
        Self::Output,
        Self::Route,
        Self::GateUp,
        Self::Gate,
        Self::Down,
        Self::Add,
        Self::Head,
    ];

    /// Its name in a profile.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::Norm => "norm",
            Self::Qkv => "qkv",
            Self::Rotate => "rotate",
            Self::Put => "put",
            Self::Attend => "attend",
            Self::Output => "o",
            Self::Route => "route",
            Self::GateUp => "gate_up",
            Self::Gate => "gate",
            Self::Down => "down",
            Self::Add => "add",
            Self::Head => "head",
        }
    }
}

/// Times of one layer's operations.
type Times = [Duration; Op::ALL.len()];

/// A stopwatch that follows a forward pass. Off, it costs a branch an operation.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clock {
    /// Of each layer, and of what lies outside of the layers at the end; empty: off.
    times: Vec<Times>,
    layer: usize,
    last: Option<Instant>,
}

impl Clock {
    pub(crate) fn start(layers: usize) -> Self {
        Self { times: vec![Times::default(); layers + 1], layer: layers, last: None }
    }

    /// Begins to count for a layer (`usize::MAX`: for what lies outside).
    pub(crate) fn enter(&mut self, layer: usize) {
        if !self.times.is_empty() {
            self.layer = layer.min(self.times.len() - 1);
            self.last = Some(Instant::now());
        }
    }

    /// What has passed since the last call was `op`.
    pub(crate) fn lap(&mut self, op: Op) {
        if let (Some(last), Some(times)) = (self.last, self.times.get_mut(self.layer)) {
            let now = Instant::now();
            times[op as usize] += now - last;
            self.last = Some(now);
        }
    }

    /// The times, of each layer and of what lies outside of them (`None`), where there are any.
    pub(crate) fn times(&self) -> impl Iterator<Item = (Option<usize>, Op, Duration)> {
        let layers = self.times.len().saturating_sub(1);
        self.times.iter().enumerate().flat_map(move |(i, times)| {
            let layer = (i < layers).then_some(i);
            let of = Op::ALL.into_iter().map(move |op| (layer, op, times[op as usize]));
            of.filter(|(.., time)| !time.is_zero())
        })
    }
}

/// What an operation of one step reads and computes: what it ought to take follows from the machine's rates.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Cost {
    /// Bytes read from memory: weights, keys and values; activations stay in the cache.
    pub bytes: f64,
    /// Multiply-adds in f32.
    pub float: f64,
    /// Multiply-adds of eight-bit integers.
    pub int8: f64,
}

impl Cost {
    fn add(&mut self, other: Cost) {
        self.bytes += other.bytes;
        self.float += other.float;
        self.int8 += other.int8;
    }
}

impl LlamaRuntime {
    /// What each operation of a step costs that appends `tokens` tokens to each of `sequences` sequences of `past` positions: layer
    /// (`None`: outside of the layers), operation, cost. Logits are those of the last tokens. Weights are read once a step, however
    /// many tokens share them; of experts those are counted that the tokens run on average.
    pub fn costs(&self, pool: &KvPool, sequences: usize, tokens: usize, past: usize) -> Vec<(Option<usize>, Op, Cost)> {
        let (c, m) = (self.config(), (sequences * tokens) as f64);
        let mode = self.activations();
        let [q, k, v, mixed] = attention::widths(c).map(|w| w as f64);
        let h = c.hidden_size as f64;
        let of = |list: &[(&Linear, &Option<InputGrid>)], rows: f64, share: f64| {
            list.iter().fold(Cost::default(), |mut sum, (l, grid)| {
                sum.add(product(l, grid, mode, rows, share));
                sum
            })
        };
        let values = |count: f64| Cost { bytes: 4.0 * count, ..Cost::default() };
        let mut out = vec![(None, Op::Embed, values(m * h))];
        for (i, layer) in self.layers().iter().enumerate() {
            let mut push = |op, cost| out.push((Some(i), op, cost));
            let linears = layer.attention.linears();
            let (output, before) =
                linears.split_last().map_or((&[][..], &[][..]), |(o, rest)| (std::slice::from_ref(o), rest));
            push(Op::Norm, values(m * 7.0 * h));
            push(Op::Qkv, of(before, m, 1.0));
            push(Op::Rotate, values(m * 2.0 * (q + k)));
            push(Op::Put, values(m * 2.0 * (k + v)));
            let seen: f64 = (0..tokens).map(|t| pool.seen(i, (past + t + 1) as f64)).sum();
            let read = pool.bytes_read((past + tokens) as f64) / self.layers().len() as f64;
            let float = sequences as f64 * seen * (q + mixed);
            push(Op::Attend, Cost { bytes: sequences as f64 * read, float, int8: 0.0 });
            push(Op::Output, of(output, m, 1.0));
            let (list, runs) = layer.feed_forward.linears_and_share();
            for (op, which) in [(Op::GateUp, [0, 1].as_slice()), (Op::Down, &[2])] {
                let some: Vec<_> =
                    list.iter().enumerate().filter(|(j, _)| which.contains(&(j % 3))).map(|(_, l)| *l).collect();
                push(op, of(&some, m * runs, if runs < 1.0 { (m * runs).min(1.0) } else { 1.0 }));
            }
            let width = list.iter().step_by(3).map(|(l, _)| l.n() as f64).sum::<f64>() * runs;
            push(Op::Gate, values(m * 3.0 * width));
            push(Op::Add, values(m * 3.0 * h));
        }
        let (head, grid) = self.head();
        out.push((None, Op::Head, product(head, grid, mode, sequences as f64, 1.0)));
        out
    }
}

/// A product of `rows` inputs with a layer of whose weights a step reads a share.
fn product(l: &Linear, grid: &Option<InputGrid>, mode: Activations, rows: f64, share: f64) -> Cost {
    let adds = rows * (l.n() * l.k()) as f64;
    let bytes = l.bytes() as f64 * share + 4.0 * rows * (l.n() + l.k()) as f64;
    match l.multiplies_int8(mode, grid.as_ref()) {
        true => Cost { bytes, float: 0.0, int8: adds },
        false => Cost { bytes, float: adds, int8: 0.0 },
    }
}
