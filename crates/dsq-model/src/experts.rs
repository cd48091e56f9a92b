//! Feed-forward blocks of experts with gradients: a router, the experts that it sends tokens to, and shared ones. Which experts a
//! token runs, and with what weights, is `dsq_checkpoint::Routing`. Not dense blocks (see `layers`).

use crate::layers::{Linear, SwiGlu};
use crate::llama::host;
use crate::ops::{gather, linear::linear};
use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor, TensorData};
use dsq_checkpoint::{LlamaConfig, Routing};
use std::sync::Arc;

/// What follows attention in a layer.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum FeedForward {
    /// One block that every token runs.
    Dense(SwiGlu),
    /// Several, of which a token runs a few.
    Experts(Experts),
}

/// The router: a matrix that is never quantized, and where scores are sigmoids a bias that only the choice of experts sees.
#[derive(Module, Debug)]
pub struct Router {
    /// Weight `[experts, d]`.
    pub weight: Param<Tensor<2>>,
    e_score_correction_bias: Option<Param<Tensor<1>>>,
}

impl Router {
    /// The weight `[experts, d]`, row major.
    pub fn values(&self) -> Vec<f32> {
        host(self.weight.val())
    }

    /// Replaces the weight, of the same shape.
    pub fn set_values(&mut self, weight: Vec<f32>) {
        let old = self.weight.val();
        self.weight = Param::from_tensor(Tensor::from_data(TensorData::new(weight, old.dims()), &old.device()));
    }
}

/// Experts with their router.
#[derive(Module, Debug)]
pub struct Experts {
    gate: Router,
    experts: Vec<SwiGlu>,
    shared_experts: Option<SwiGlu>,
    #[module(skip)]
    routing: Routing,
}

/// A batch whose tokens were sent to experts.
#[derive(Debug, Clone)]
pub struct Routed {
    /// The tokens `[m, d]`.
    tokens: Tensor<2>,
    /// Weights of the experts of each token `[m, per_token]`.
    weights: Tensor<2>,
    /// The tokens of each expert, in increasing order.
    of_expert: Vec<Vec<usize>>,
    /// Where the outputs for a token lie among those of all experts, one after the other.
    places: Vec<usize>,
}

impl FeedForward {
    /// The output `[b, t, d]` of the block, from its normed input.
    pub fn forward(&self, h: Tensor<3>) -> Tensor<3> {
        match self {
            Self::Dense(block) => block.forward(h),
            Self::Experts(experts) => experts.forward(h),
        }
    }

    /// The blocks, in the order of the model: experts, then what all tokens run.
    pub fn blocks(&self) -> Vec<&SwiGlu> {
        match self {
            Self::Dense(block) => vec![block],
            Self::Experts(e) => e.experts.iter().chain(&e.shared_experts).collect(),
        }
    }

    /// The linear layers in the order of the model: gate, up and down of each block.
    pub(crate) fn linears_mut(&mut self) -> Vec<&mut Linear> {
        match self {
            Self::Dense(block) => block.linears_mut().into(),
            Self::Experts(e) => {
                e.experts.iter_mut().chain(&mut e.shared_experts).flat_map(SwiGlu::linears_mut).collect()
            }
        }
    }

    /// Excludes routers from training.
    pub(crate) fn freeze_floats(self) -> Self {
        match self {
            Self::Dense(block) => Self::Dense(block),
            Self::Experts(e) => Self::Experts(Experts { gate: e.gate.no_grad(), ..e }),
        }
    }
}

impl Experts {
    /// The block of layer `i`, whose tensors `values` gives by their names and shapes; `None` where the layer is dense.
    pub(crate) fn build<E>(
        config: &LlamaConfig,
        i: usize,
        device: &Device,
        values: &mut impl FnMut(&str, &[usize]) -> Result<Vec<f32>, E>,
    ) -> Result<Option<Self>, E> {
        let Some(&shape) = config.experts_of(i) else { return Ok(None) };
        let mut block = |names: [String; 3], ffn: usize| SwiGlu::build(config, i, names, ffn, device, values);
        let experts =
            (0..shape.count).map(|e| block(config.expert_names(e), shape.width)).collect::<Result<Vec<_>, E>>()?;
        let shared_experts = match shape.shared {
            0 => None,
            n => Some(block(LlamaConfig::dense_names(true), n * shape.width)?),
        };
        let mut tensors = Vec::new();
        for (name, dims) in config.router_tensors(i) {
            tensors.push((values(&format!("model.layers.{i}.{name}"), &dims)?, dims));
        }
        let mut tensors = tensors.into_iter();
        let (weight, dims) = tensors.next().unwrap_or_default();
        let bias = tensors.next().map(|(bias, dims)| {
            let bias = Tensor::<1>::from_data(TensorData::new(bias, dims), device);
            Param::from_tensor(bias).set_require_grad(false)
        });
        let weight = Param::from_tensor(Tensor::from_data(TensorData::new(weight, dims), device));
        let gate = Router { weight, e_score_correction_bias: bias };
        Ok(Some(Self { gate, experts, shared_experts, routing: shape.routing }))
    }

    /// The router, to change it.
    pub(crate) fn router_mut(&mut self) -> &mut Router {
        &mut self.gate
    }

    /// Expert `e`.
    pub fn expert(&self, e: usize) -> &SwiGlu {
        &self.experts[e]
    }

    /// The number of experts that tokens are sent to.
    pub fn count(&self) -> usize {
        self.experts.len()
    }

    /// The experts that every token runs, as one block.
    pub fn shared(&self) -> Option<&SwiGlu> {
        self.shared_experts.as_ref()
    }

    /// Sends the tokens of `h [b, t, d]`, the block's normed input, to their experts.
    pub fn route(&self, h: Tensor<3>) -> Routed {
        let [b, t, d] = h.dims();
        let m = b * t;
        let tokens = h.reshape([m, d]);
        let logits = linear(tokens.clone(), self.gate.weight.val());
        let bias = self.gate.e_score_correction_bias.as_ref().map(|b| host(b.val()));
        let chosen: Vec<Vec<(usize, f32)>> = host(logits.clone())
            .chunks_exact(self.count().max(1))
            .map(|logits| self.routing.choose(logits, bias.as_deref()))
            .collect();
        let mut of_expert = vec![Vec::new(); self.count()];
        for (t, chosen) in chosen.iter().enumerate() {
            chosen.iter().for_each(|(e, _)| of_expert[*e].push(t));
        }
        let mut next = Vec::with_capacity(self.count());
        let mut at = 0;
        for tokens in &of_expert {
            next.push(at);
            at += tokens.len();
        }
        let mut places = Vec::with_capacity(m * self.routing.per_token);
        for (e, _) in chosen.iter().flatten() {
            places.push(next[*e]);
            next[*e] += 1;
        }
        let weights = gather::weights(logits, self.routing, Arc::new(chosen));
        Routed { tokens, weights, of_expert, places }
    }

    /// The output `[b, t, d]` of the block, from its normed input.
    pub fn forward(&self, h: Tensor<3>) -> Tensor<3> {
        let routed = self.route(h.clone());
        let outs = routed.hit().into_iter().map(|e| self.experts[e].forward(routed.tokens_of(e))).collect();
        let sum = routed.combine(outs, h.dims());
        match &self.shared_experts {
            None => sum,
            Some(shared) => sum + shared.forward(h),
        }
    }
}

impl Routed {
    /// The weighted sums `[b, t, d]` of the outputs of the experts that were hit, in order.
    pub(crate) fn combine(&self, outs: Vec<Tensor<2>>, dims: [usize; 3]) -> Tensor<3> {
        gather::combine(Tensor::cat(outs, 0), self.weights.clone(), self.places.clone()).reshape(dims)
    }

    /// The experts that have tokens, in increasing order.
    pub fn hit(&self) -> Vec<usize> {
        (0..self.of_expert.len()).filter(|&e| self.count(e) > 0).collect()
    }

    /// The tokens of expert `e`, `[tokens, d]`.
    pub fn tokens_of(&self, e: usize) -> Tensor<2> {
        gather::rows(self.tokens.clone(), &self.of_expert[e])
    }

    /// What stands in `other [b, t, k]` in the places of the tokens of expert `e`, `[tokens, k]`.
    pub fn same_of(&self, e: usize, other: Tensor<3>) -> Tensor<2> {
        let [b, t, k] = other.dims();
        gather::rows(other.reshape([b * t, k]), &self.of_expert[e])
    }

    /// How many tokens expert `e` has.
    pub fn count(&self, e: usize) -> usize {
        self.of_expert[e].len()
    }
}
