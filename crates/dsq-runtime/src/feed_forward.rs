//! Feed-forward blocks on packed weights: one that every token runs, or experts of which a token runs a few, chosen by a router
//! (`dsq_checkpoint::Routing`). Only the chosen experts are computed. Not attention (see `attention.rs`).
//!
//! A token's result does not depend on the tokens beside it: rows of a product are independent, and the experts of a token are
//! added in increasing order, whatever tokens they share a product with.

use crate::RuntimeError;
use crate::llama::{Part, WithBias, add_bias, linear, product};
use crate::profile::{Clock, Op};
use dsq_checkpoint::{Checkpoint, LlamaConfig, Routing};
use dsq_kernels::elementwise::{add, silu_mul};
use dsq_kernels::{Activations, Linear};
use dsq_quant::InputGrid;

/// What follows attention in a layer.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Dense(Box<Block>),
    Experts(Box<Experts>),
}

/// `down(silu(gate(x)) * up(x))`.
#[derive(Debug)]
pub(crate) struct Block {
    gate_up: [Linear; 2],
    down: Linear,
    /// How the input of gate and up, and that of down, are quantized.
    inputs: [Option<InputGrid>; 2],
    /// Biases of gate, up and down.
    bias: [Option<Vec<f32>>; 3],
}

/// Experts with their router.
#[derive(Debug)]
pub(crate) struct Experts {
    router: Linear,
    /// Moves the choice of experts, where scores are sigmoids.
    bias: Option<Vec<f32>>,
    routing: Routing,
    experts: Vec<Block>,
    shared: Option<Block>,
}

/// Room for gate, up and their product, as many values as the widest block needs for the tokens at hand.
pub(crate) struct Room<'a> {
    pub gate: &'a mut [f32],
    pub up: &'a mut [f32],
    pub ffn: &'a mut [f32],
    pub chosen: &'a mut Chosen,
    pub clock: &'a mut Clock,
}

/// What experts work in, kept for the next layer and step: it grows to what was ever needed.
#[derive(Debug, Clone, Default)]
pub(crate) struct Chosen {
    /// The router's `[m, experts]`.
    logits: Vec<f32>,
    /// Of each expert the tokens that run it, with their weights.
    tokens: Vec<Vec<(usize, f32)>>,
    /// An expert's inputs and outputs, `[its tokens, d]`.
    rows: Vec<f32>,
    outs: Vec<f32>,
}

impl Chosen {
    pub(crate) fn bytes(&self) -> usize {
        let tokens: usize = self.tokens.iter().map(Vec::capacity).sum();
        let floats = self.logits.capacity() + self.rows.capacity() + self.outs.capacity();
        floats * size_of::<f32>() + tokens * size_of::<(usize, f32)>() + self.tokens.capacity() * size_of::<Vec<()>>()
    }
}

impl Block {
    fn load(part: &Part, config: &LlamaConfig, names: [String; 3]) -> Result<Self, RuntimeError> {
        let [gate, up, down] = names;
        let bias = [part.bias(config, &gate)?, part.bias(config, &up)?, part.bias(config, &down)?];
        let inputs = [part.input(&[&gate, &up])?, part.input(&[&down])?];
        Ok(Self { gate_up: [part.linear(&gate)?, part.linear(&up)?], down: part.linear(&down)?, inputs, bias })
    }

    /// The outputs `out [m, d]` for `x [m, d]`, which is put on its grid in place.
    fn run(&self, mode: Activations, x: &mut [f32], m: usize, room: &mut Room, out: &mut [f32]) {
        let [gate_up, down] = &self.inputs;
        let [wg, wu] = &self.gate_up;
        let width = m * wg.n();
        let (gate, up, ffn) = (&mut room.gate[..width], &mut room.up[..width], &mut room.ffn[..width]);
        let [gate_bias, up_bias, down_bias] = &self.bias;
        product(mode, gate_up, &[wg, wu], x, m, &mut [&mut *gate, &mut *up]);
        add_bias(gate, gate_bias);
        add_bias(up, up_bias);
        room.clock.lap(Op::GateUp);
        silu_mul(gate, up, ffn);
        room.clock.lap(Op::Gate);
        product(mode, down, &[&self.down], ffn, m, &mut [&mut *out]);
        add_bias(out, down_bias);
        room.clock.lap(Op::Down);
    }

    fn linears(&self) -> [(&Linear, &Option<InputGrid>); 3] {
        let [gate_up, down] = &self.inputs;
        [(&self.gate_up[0], gate_up), (&self.gate_up[1], gate_up), (&self.down, down)]
    }

    fn linears_mut(&mut self) -> impl Iterator<Item = WithBias<'_>> {
        self.gate_up.iter_mut().chain([&mut self.down]).zip(&mut self.bias).map(|(l, bias)| (l, Some(bias)))
    }

    fn bytes(&self) -> usize {
        self.linears().iter().map(|(l, _)| l.bytes()).sum()
    }
}

impl FeedForward {
    pub(crate) fn load(model: &Checkpoint, config: &LlamaConfig, i: usize) -> Result<Self, RuntimeError> {
        let part = Part { model, layer: i };
        let Some(shape) = config.experts_of(i) else {
            return Ok(Self::Dense(Box::new(Block::load(&part, config, LlamaConfig::dense_names(false))?)));
        };
        let experts = (0..shape.count).map(|e| Block::load(&part, config, config.expert_names(e)));
        let experts = experts.collect::<Result<Vec<_>, RuntimeError>>()?;
        let shared = match shape.shared {
            0 => None,
            _ => Some(Block::load(&part, config, LlamaConfig::dense_names(true))?),
        };
        let mut tensors = config.router_tensors(i).into_iter().map(|(name, _)| format!("model.layers.{i}.{name}"));
        let gate = tensors.next().unwrap_or_default();
        let router = linear(model, gate.strip_suffix(".weight").unwrap_or(&gate))?;
        let bias = tensors.next().map(|name| model.read_f32(&name)).transpose()?;
        Ok(Self::Experts(Box::new(Experts { router, bias, routing: shape.routing, experts, shared })))
    }

    /// The outputs `out [m, d]` for the normed `x [m, d]`, which is spent.
    pub(crate) fn run(&self, mode: Activations, x: &mut [f32], m: usize, room: &mut Room, out: &mut [f32]) {
        match self {
            Self::Dense(block) => block.run(mode, x, m, room, out),
            Self::Experts(experts) => experts.run(mode, x, m, room, out),
        }
    }

    /// The linear layers in the order of the model, and how their inputs are quantized.
    pub(crate) fn linears(&self) -> Vec<(&Linear, &Option<InputGrid>)> {
        match self {
            Self::Dense(block) => block.linears().into(),
            Self::Experts(e) => e.experts.iter().chain(&e.shared).flat_map(Block::linears).collect(),
        }
    }

    /// The linear layers of [`FeedForward::linears`] with their biases, to be exchanged.
    pub(crate) fn linears_mut(&mut self) -> Vec<WithBias<'_>> {
        match self {
            Self::Dense(block) => block.linears_mut().collect(),
            Self::Experts(e) => e.experts.iter_mut().chain(&mut e.shared).flat_map(Block::linears_mut).collect(),
        }
    }

    /// [`FeedForward::linears`], gate, up and down in turns, and the share of tokens that go through each on average.
    pub(crate) fn linears_and_share(&self) -> (Vec<(&Linear, &Option<InputGrid>)>, f64) {
        let runs = match self {
            Self::Dense(_) => 1.0,
            Self::Experts(e) => {
                let shared = usize::from(e.shared.is_some());
                (e.routing.per_token + shared) as f64 / (e.experts.len() + shared) as f64
            }
        };
        (self.linears(), runs)
    }

    /// Values of biases.
    pub(crate) fn bias_values(&self) -> usize {
        match self {
            Self::Dense(block) => block.bias.iter().flatten().map(Vec::len).sum(),
            // Experts have none.
            Self::Experts(_) => 0,
        }
    }

    /// Bytes of the router.
    pub(crate) fn router_bytes(&self) -> usize {
        match self {
            Self::Dense(_) => 0,
            Self::Experts(e) => e.router.bytes() + e.bias.as_ref().map_or(0, |b| size_of_val(b.as_slice())),
        }
    }

    /// Bytes of the experts that a token does not run (on average: they are of one size).
    pub(crate) fn idle_bytes(&self) -> usize {
        match self {
            Self::Dense(_) => 0,
            Self::Experts(e) => {
                let all: usize = e.experts.iter().map(Block::bytes).sum();
                all / e.experts.len().max(1) * (e.experts.len() - e.routing.per_token)
            }
        }
    }
}

impl Experts {
    fn run(&self, mode: Activations, x: &mut [f32], m: usize, room: &mut Room, out: &mut [f32]) {
        let (d, count) = (self.router.k(), self.experts.len());
        let Chosen { mut logits, mut tokens, mut rows, mut outs } = std::mem::take(room.chosen);
        logits.resize(m * count, 0.0);
        self.router.matmul(x, m, &mut logits);
        tokens.resize(count, Vec::new());
        for tokens in &mut tokens {
            tokens.clear();
            // Each may be the choice of all: a later step of as many tokens then asks for no more memory.
            tokens.reserve(m);
        }
        for (t, logits) in logits.chunks_exact(count).enumerate() {
            for (e, weight) in self.routing.choose(logits, self.bias.as_deref()) {
                tokens[e].push((t, weight));
            }
        }
        out.fill(0.0);
        rows.resize(m * d, 0.0);
        outs.resize(m * d, 0.0);
        for (block, tokens) in self.experts.iter().zip(&tokens).filter(|(_, tokens)| !tokens.is_empty()) {
            let len = tokens.len() * d;
            let (rows, outs) = (&mut rows[..len], &mut outs[..len]);
            for ((t, _), row) in tokens.iter().zip(rows.chunks_exact_mut(d)) {
                row.copy_from_slice(&x[t * d..][..d]);
            }
            room.clock.lap(Op::Route);
            block.run(mode, rows, tokens.len(), room, outs);
            for ((t, weight), y) in tokens.iter().zip(outs.chunks_exact(d)) {
                out[t * d..][..d].iter_mut().zip(y).for_each(|(o, y)| *o += weight * y);
            }
        }
        if let Some(shared) = &self.shared {
            shared.run(mode, x, m, room, &mut outs);
            add(out, &outs);
        }
        *room.chosen = Chosen { logits, tokens, rows, outs };
        room.clock.lap(Op::Route);
    }
}
