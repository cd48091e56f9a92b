//! Mixtures of experts: the keys that set them, the names of their tensors, and the one place where the experts of a token are
//! chosen and weighted, for training and inference alike. Not the experts' own forward pass.

use super::LlamaConfig;
use super::fields::Fields;
use crate::CheckpointError;
use serde_json::{Map, Value, json};

/// Feed-forward blocks of several experts, of which each token runs a few (Jiang et al., arXiv:2401.04088; Dai et al.,
/// arXiv:2401.06066).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// Experts of a layer that tokens are routed to.
    pub count: usize,
    /// Width of each of them.
    pub width: usize,
    /// Experts that every token runs. They are stored as one, of so many times the width; 0: none.
    pub shared: usize,
    /// The first layer that has experts; those before it are dense.
    pub first_layer: usize,
    /// Layers from there on whose number is a multiple of this have experts; at least 1.
    pub every: usize,
    /// Which experts a token runs.
    pub routing: Routing,
}

/// How the logits of a router become experts and their weights.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routing {
    /// Experts of each token.
    pub per_token: usize,
    /// What makes a score of a logit.
    pub scores: Scores,
    /// Experts are chosen among those of the best groups only; `None`: among all.
    pub groups: Option<Groups>,
    /// Whether the scores of the chosen experts are divided by their sum.
    pub normalized: bool,
    /// What their weights are multiplied by.
    pub scale: f32,
}

/// What makes a score of a router's logit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scores {
    /// The softmax over all experts.
    Softmax,
    /// The logistic function. Experts are chosen by their score plus a bias that is stored with the router, and weighted by the
    /// score alone (Wang et al., arXiv:2408.15664).
    Sigmoid,
}

/// Groups of neighbouring experts (DeepSeek-V2, arXiv:2405.04434).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Groups {
    /// Their number; divides that of the experts.
    pub count: usize,
    /// How many of them a token may take experts from.
    pub kept: usize,
}

/// What DeepSeek-V3 adds to a sum of scores before it divides by it.
const LEAST_SUM: f64 = 1e-20;

impl Routing {
    /// Scores of a token's `logits`, in f64 and rounded once.
    fn scores(&self, logits: &[f32]) -> Vec<f32> {
        match self.scores {
            Scores::Sigmoid => logits.iter().map(|&l| (1.0 / (1.0 + (-f64::from(l)).exp())) as f32).collect(),
            Scores::Softmax => {
                let top = logits.iter().fold(f32::NEG_INFINITY, |m, &l| m.max(l));
                let e: Vec<f64> = logits.iter().map(|&l| (f64::from(l) - f64::from(top)).exp()).collect();
                let sum: f64 = e.iter().sum();
                e.into_iter().map(|e| (e / sum) as f32).collect()
            }
        }
    }

    /// The experts that a token runs, in increasing order, with their weights: from its router `logits`, one for each expert, and
    /// with sigmoid scores the `bias` of each. Of equal scores the expert that comes first is taken.
    pub fn choose(&self, logits: &[f32], bias: Option<&[f32]>) -> Vec<(usize, f32)> {
        let scores = self.scores(logits);
        let by: Vec<f32> = match bias {
            None => scores.clone(),
            Some(bias) => scores.iter().zip(bias).map(|(s, b)| s + b).collect(),
        };
        let mut open: Vec<usize> = (0..by.len()).collect();
        if let Some(g) = self.groups {
            let size = (by.len() / g.count.max(1)).max(1);
            let of = |group: &[f32]| {
                let two: Vec<f32> = best(group, 2).into_iter().map(|i| group[i]).collect();
                // The sum of the best two where scores are sigmoids, else the best one.
                if self.scores == Scores::Sigmoid { two.iter().sum() } else { two[0] }
            };
            let kept = best(&by.chunks(size).map(of).collect::<Vec<f32>>(), g.kept);
            open.retain(|e| kept.contains(&(e / size)));
        }
        let values: Vec<f32> = open.iter().map(|&e| by[e]).collect();
        let mut chosen: Vec<usize> = best(&values, self.per_token).into_iter().map(|i| open[i]).collect();
        chosen.sort_unstable();
        let by = f64::from(self.scale) / self.divisor(&scores, &chosen);
        chosen.into_iter().map(|e| (e, (f64::from(scores[e]) * by) as f32)).collect()
    }

    /// What the scores of the chosen experts are divided by.
    fn divisor(&self, scores: &[f32], chosen: &[usize]) -> f64 {
        match self.normalized {
            false => 1.0,
            true => chosen.iter().map(|&e| f64::from(scores[e])).sum::<f64>() + LEAST_SUM,
        }
    }

    /// The gradient for a token's router logits, from that for the weights of its `chosen` experts (as [`Routing::choose`] gives
    /// them). Which experts are chosen has none.
    pub fn gradient(&self, logits: &[f32], chosen: &[(usize, f32)], grad: &[f32]) -> Vec<f32> {
        let scores = self.scores(logits);
        let experts: Vec<usize> = chosen.iter().map(|c| c.0).collect();
        let (divisor, scale) = (self.divisor(&scores, &experts), f64::from(self.scale));
        let mut by_score = vec![0.0f64; logits.len()];
        let along: f64 = match self.normalized {
            false => 0.0,
            true => experts.iter().zip(grad).map(|(&e, &g)| f64::from(g) * f64::from(scores[e]) / divisor).sum(),
        };
        for (&e, &g) in experts.iter().zip(grad) {
            by_score[e] = scale / divisor * (f64::from(g) - along);
        }
        let all = scores.iter().map(|&s| f64::from(s)).zip(&by_score);
        match self.scores {
            Scores::Sigmoid => all.map(|(s, d)| (d * s * (1.0 - s)) as f32).collect(),
            Scores::Softmax => {
                let mean: f64 = all.clone().map(|(s, d)| s * d).sum();
                all.map(|(s, d)| (s * (d - mean)) as f32).collect()
            }
        }
    }
}

/// The places of the `n` largest values, the largest first, of equal ones the first. NaN counts as the largest.
fn best(values: &[f32], n: usize) -> Vec<usize> {
    let value = |i: usize| if values[i].is_nan() { f32::INFINITY } else { values[i] };
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| value(b).total_cmp(&value(a)).then(a.cmp(&b)));
    order.truncate(n);
    order
}

impl Experts {
    /// Reads the keys of mixtral, whose experts have the width of `intermediate_size`.
    pub(super) fn of_mixtral(
        f: &Fields,
        width: usize,
        default: &mut dyn FnMut(&'static str, String),
    ) -> Result<Self, CheckpointError> {
        let count = or_default(f, "num_local_experts", 8, default)?;
        let per_token = per_token(f, or_default(f, "num_experts_per_tok", 2, default)?, count)?;
        let routing = Routing { per_token, scores: Scores::Softmax, groups: None, normalized: true, scale: 1.0 };
        Ok(Self { count, width, shared: 0, first_layer: 0, every: 1, routing })
    }

    /// The keys of mixtral.
    pub(super) fn write_mixtral(&self, map: &mut Map<String, Value>) {
        map.insert("num_local_experts".into(), json!(self.count));
        map.insert("num_experts_per_tok".into(), json!(self.routing.per_token));
    }
}

/// The size at `key`, or a default that is told.
pub(super) fn or_default(
    f: &Fields,
    key: &'static str,
    otherwise: usize,
    default: &mut dyn FnMut(&'static str, String),
) -> Result<usize, CheckpointError> {
    Ok(f.size(key)?.unwrap_or_else(|| {
        default(key, otherwise.to_string());
        otherwise
    }))
}

/// `n`, experts of each token, if there are as many.
pub(super) fn per_token(f: &Fields, n: usize, count: usize) -> Result<usize, CheckpointError> {
    match n <= count {
        true => Ok(n),
        false => {
            Err(f.error("num_experts_per_tok", format!("expected at most the {count} experts of a layer, got {n}")))
        }
    }
}

/// A tensor whose bytes are those of others, one after the other.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Stack {
    pub shape: Vec<usize>,
    /// Names and shapes.
    pub parts: Vec<(String, Vec<usize>)>,
}

/// Names of the linear layers of a feed-forward block: gate, up, down.
const DENSE: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

impl LlamaConfig {
    /// The experts of layer `i`; `None`: it is dense.
    pub fn experts_of(&self, i: usize) -> Option<&Experts> {
        self.experts.as_ref().filter(|e| i >= e.first_layer && i.is_multiple_of(e.every))
    }

    /// The name of the feed-forward block in a layer, `mlp`, or of mixtral `block_sparse_moe`.
    pub fn feed_forward_name(&self) -> &'static str {
        if self.model_type == "mixtral" { "block_sparse_moe" } else { "mlp" }
    }

    /// The ends of the module names of expert `e` within a layer: gate, up, down.
    pub fn expert_names(&self, e: usize) -> [String; 3] {
        let parts = if self.model_type == "mixtral" { ["w1", "w3", "w2"] } else { DENSE };
        parts.map(|part| format!("{}.experts.{e}.{part}", self.feed_forward_name()))
    }

    /// Those of the shared experts, or of a dense block.
    pub fn dense_names(shared: bool) -> [String; 3] {
        DENSE.map(|part| if shared { format!("mlp.shared_experts.{part}") } else { format!("mlp.{part}") })
    }

    /// What the tensor `name` is made of where it is one of transformers' own module (version 5): `mlp.experts.gate_up_proj [experts, 2 *
    /// width, d]`, gate above up, and `mlp.experts.down_proj [experts, d, width]`. Its shape, and the names and shapes of the parts
    /// that lie in it one after the other. Mixtral's router, which is called `mlp.gate` there, is one part.
    pub(crate) fn stacked(&self, name: &str) -> Option<Stack> {
        let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
        let i: usize = layer.parse().ok().filter(|i: &usize| layer == i.to_string())?;
        let e = self.experts_of(i)?;
        let part =
            part.strip_prefix("mlp.").or_else(|| part.strip_prefix(self.feed_forward_name())?.strip_prefix('.'))?;
        let (d, width) = (self.hidden_size, e.width);
        let each = |which: &[usize], shape: [usize; 2]| -> Vec<(String, Vec<usize>)> {
            let of = |e: usize| {
                let names = self.expert_names(e);
                which.iter().map(move |&w| (format!("model.layers.{i}.{}.weight", names[w]), shape.to_vec()))
            };
            (0..e.count).flat_map(of).collect()
        };
        match part {
            "experts.gate_up_proj" => {
                Some(Stack { shape: vec![e.count, 2 * width, d], parts: each(&[0, 1], [width, d]) })
            }
            "experts.down_proj" => Some(Stack { shape: vec![e.count, d, width], parts: each(&[2], [d, width]) }),
            "gate.weight" if name.contains(".mlp.") && self.feed_forward_name() != "mlp" => {
                let shape = vec![e.count, d];
                let name = format!("model.layers.{i}.{}.gate.weight", self.feed_forward_name());
                Some(Stack { shape: shape.clone(), parts: vec![(name, shape)] })
            }
            _ => None,
        }
    }

    /// The linear layers of the feed-forward block of layer `i` in the order of the model: end of the module name, outputs, inputs.
    pub(super) fn feed_forward_linears(&self, i: usize) -> Vec<(String, usize, usize)> {
        let d = self.hidden_size;
        let block = |names: [String; 3], ffn: usize| {
            let [gate, up, down] = names;
            [(gate, ffn, d), (up, ffn, d), (down, d, ffn)]
        };
        let Some(experts) = self.experts_of(i) else {
            return block(Self::dense_names(false), self.intermediate_size).into();
        };
        let mut out: Vec<_> = (0..experts.count).flat_map(|e| block(self.expert_names(e), experts.width)).collect();
        if experts.shared > 0 {
            out.extend(block(Self::dense_names(true), experts.shared * experts.width));
        }
        out
    }

    /// Width of the widest block of layer `i`: the dense one, an expert, or the shared experts.
    pub fn widest_block(&self, i: usize) -> usize {
        self.experts_of(i).map_or(self.intermediate_size, |e| e.width * e.shared.max(1))
    }

    /// The tensors of the router of layer `i` with their shapes: the end of the name of its weight, and with sigmoid scores
    /// of its bias. They are never quantized.
    pub fn router_tensors(&self, i: usize) -> Vec<(String, Vec<usize>)> {
        let Some(experts) = self.experts_of(i) else { return Vec::new() };
        let gate = format!("{}.gate", self.feed_forward_name());
        let mut out = vec![(format!("{gate}.weight"), vec![experts.count, self.hidden_size])];
        if experts.routing.scores == Scores::Sigmoid {
            out.push((format!("{gate}.e_score_correction_bias"), vec![experts.count]));
        }
        out
    }

    /// The modules that route tokens to experts: `model.layers.0.block_sparse_moe.gate`.
    pub fn routers(&self) -> Vec<String> {
        let layers = (0..self.num_hidden_layers).filter(|&i| self.experts_of(i).is_some());
        layers.map(|i| format!("model.layers.{i}.{}.gate", self.feed_forward_name())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: u64) -> Vec<f32> {
        let mut s = seed.wrapping_mul(2).wrapping_add(1);
        let mut next = || {
            s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (s >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        };
        (0..n).map(|_| 2.0 * next()).collect()
    }

    fn routings() -> Vec<Routing> {
        let mut out = Vec::new();
        for scores in [Scores::Softmax, Scores::Sigmoid] {
            for groups in [None, Some(Groups { count: 4, kept: 2 })] {
                for (normalized, scale) in [(true, 1.0), (false, 2.5), (true, 2.5)] {
                    out.push(Routing { per_token: 3, scores, groups, normalized, scale });
                }
            }
        }
        out
    }

    #[test]
    fn experts_are_chosen_within_the_best_groups_and_by_the_bias() {
        let one = |scores, groups, logits: &[f32], bias: Option<&[f32]>| {
            let routing = Routing { per_token: 2, scores, groups, normalized: true, scale: 1.0 };
            let chosen = routing.choose(logits, bias);
            let sum: f32 = chosen.iter().map(|c| c.1).sum();
            assert!((sum - 1.0).abs() < 1e-6, "{chosen:?}");
            chosen.into_iter().map(|c| c.0).collect::<Vec<_>>()
        };
        let logits = [1.0, 1.1, 2.0, -3.0, 0.9, 0.8];
        assert_eq!(one(Scores::Softmax, None, &logits, None), [1, 2]);
        let groups = |kept| Some(Groups { count: 3, kept });
        // The group of the best one; with sigmoids the group of the best two.
        assert_eq!(one(Scores::Softmax, groups(1), &logits, None), [2, 3]);
        assert_eq!(one(Scores::Sigmoid, groups(1), &logits, None), [0, 1]);
        assert_eq!(one(Scores::Sigmoid, groups(2), &logits, None), [0, 1]);
        let bias = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0];
        assert_eq!(one(Scores::Sigmoid, None, &logits, Some(&bias)), [2, 5]);
        assert_eq!(one(Scores::Softmax, None, &[1.0; 4], None), [0, 1], "of equal scores the first");
        // The bias moves the choice, not the weights.
        let routing = Routing { per_token: 1, scores: Scores::Sigmoid, groups: None, normalized: false, scale: 1.0 };
        assert_eq!(routing.choose(&[0.0, 3.0], Some(&[1.0, 0.0])), [(0, 0.5)]);
    }

    #[test]
    fn the_gradient_is_the_slope_of_the_weights() {
        for (seed, routing) in routings().into_iter().enumerate() {
            let (logits, grad) = (numbers(12, seed as u64), numbers(3, 100 + seed as u64));
            let bias = numbers(12, 50);
            let bias = (routing.scores == Scores::Sigmoid).then_some(bias.as_slice());
            let chosen = routing.choose(&logits, bias);
            assert!(chosen.len() == 3 && chosen.is_sorted_by_key(|c| c.0));
            let got = routing.gradient(&logits, &chosen, &grad);
            let value = |logits: &[f32]| -> f64 {
                let now = routing.choose(logits, bias);
                assert!(now.iter().zip(&chosen).all(|(a, b)| a.0 == b.0), "the step changes no choice");
                now.iter().zip(&grad).map(|(c, g)| f64::from(c.1) * f64::from(*g)).sum()
            };
            for i in 0..12 {
                let (mut up, mut down) = (logits.clone(), logits.clone());
                (up[i], down[i]) = (up[i] + 1e-3, down[i] - 1e-3);
                let slope = (value(&up) - value(&down)) / f64::from(up[i] - down[i]);
                assert!((f64::from(got[i]) - slope).abs() < 1e-3, "{routing:?} {i}: {} against {slope}", got[i]);
            }
        }
    }

    #[test]
    fn a_logit_that_is_not_finite_makes_weights_that_are_not() {
        for routing in routings() {
            let mut logits = numbers(12, 1);
            logits[4] = f32::NAN;
            assert!(routing.choose(&logits, None).iter().any(|c| c.1.is_nan()), "{routing:?}");
        }
    }
}
