//! An f64 forward pass of a Llama, and for each logit a bound on how far an f32 forward pass may be from it. Written from
//! the formulas of the model, not from either implementation. Not a test: see `parity_llama.rs`.
//!
//! # The bound
//!
//! Let `z` run through the results of all operations of the pass, and `d(z)` bound what the roundings *of the operation
//! itself* can change in `z`. To first order in `u = 2^-24`, an f32 pass ends within
//!
//!     sum over z of |d logit / d z| * d(z)
//!
//! of the exact logit. The derivatives are those of the f64 pass, by the chain rule backwards. (Bounds carried forwards from
//! operation to operation, `|w| e` through every matrix, forget that one error reaches a logit along many ways that partly
//! cancel: they grow a hundredfold a layer and soon allow anything.)
//!
//! With `gamma(n) = n u / (1 - n u)`, a product of n factors `(1 + d)^(+-1)`, `|d| <= u`, is within `gamma(n)` of 1
//! (Higham, Accuracy and Stability of Numerical Algorithms, lemma 3.1). So, for the operations:
//!
//! - **Linear** `sum_i w_i x_i`, where each term passes at most n roundings: `gamma(n) sum |w| |x|`. The graph multiplies
//!   with the dequantized weights in one chain of fused multiply-adds (`kernels/src/train/matmul.rs`): `n = k`. The runtime
//!   (`kernels/src/linear/mod.rs`) sums segments of at most 64 within a group and adds S of them: `n = min(64, group) + S`;
//!   it never rounds `(q - zero) * scale`, the weights here are rounded once: one more.
//! - **Sum of two** (residual): `u |a + b|`.
//! - **RMSNorm** `(x r) w`, `r = (mean(x^2) + eps)^(-1/2)`: a square passes at most `n = d/16 + 18` roundings (its own, 16
//!   lanes, at most 16 sums of lanes); mean and epsilon are two more, all positive, so the argument of the root is off by a
//!   factor within `gamma(n + 2)` of 1, the root by half of it; root and quotient are two roundings, the products two:
//!   `(gamma(n + 2) / 2 + gamma(4)) |y|`.
//! - **Rotary** `a c - b s`: the frequency is `theta^(-x)`, `x = 2i/d`, in f32: the exponent rounded (`x ln(theta) u`), a power (to one ulp, at most 2 u, as glibc documents of `powf`), a quotient; the angle is one product more; sine
//!   and cosine are rounded once: `e = angle (x ln(theta) + 4) u + u`. With two products and a sum:
//!   `e (|a| + |b|) + gamma(2) (|a c| + |b s|)`.
//! - **Scores** `q k / sqrt(d)`: `gamma(d + 4) sum |q| |k| / sqrt(d)`: d products and sums; three roundings for the root, its
//!   reciprocal and the product with it. A shift common to all scores of a query changes no probability, so of the
//!   subtraction of the largest only the rounding counts, `u (top - score)`; an `exp` that is off by a factor `1 + t` is that
//!   of a score off by t, and both are within 2.5e-7 (documented in `kernels/src/elementwise` and, as 2 ulp, in
//!   `kernels/src/train/exp.rs`). All three add up. (Below -87 both `exp` saturate, which is asserted not to happen.)
//! - **Mix** `sum p v` over t positions: the sum of the weights passes `t/16 + 17`, the quotient 2, the mix t + 1 roundings:
//!   `gamma(t/16 + t + 20) sum p |v|`.
//! - **SwiGLU** `silu(g) h`: the exponential's factor and four roundings: `(2.5e-7 + gamma(4)) |silu(g) h|`.
//!
//! `u` is taken a twentieth larger. That covers the roundings of f64 (2^-29 of those of f32), results below the normal
//! numbers (2^-150 each), and the terms of second order: they are to those of first order about as the bound is to the
//! values, which the test requires to be below a twentieth.

use dsq_checkpoint::LlamaConfig;
use std::collections::BTreeMap;

const U: f64 = 1.05 / (1u64 << 24) as f64;
const EXP: f64 = 2.5e-7;

fn gamma(n: usize) -> f64 {
    let nu = n as f64 * U;
    nu / (1.0 - nu)
}

/// The f32 forward passes: the graph's and the runtime's, which sum in different orders.
pub const PASSES: [&str; 2] = ["graph", "runtime"];

/// A matrix `[n, k]` as f32 values, exactly; `group` of a quantized one.
pub struct Linear {
    w: Vec<f64>,
    k: usize,
    group: Option<usize>,
}

impl Linear {
    pub fn new(w: &[f32], k: usize, group: Option<usize>) -> Self {
        Self { w: w.iter().map(|&w| f64::from(w)).collect(), k, group }
    }

    /// Roundings that a term of a sum passes, in each pass.
    fn depths(&self) -> [usize; 2] {
        let group = self.group.unwrap_or(self.k);
        let segments = (self.k / group) * group.div_ceil(64);
        [self.k, group.min(64) + segments + usize::from(self.group.is_some())]
    }

    fn times(&self, x: &[f64]) -> Stage {
        let g = self.depths().map(gamma);
        let mut out = Stage::default();
        for x in x.chunks_exact(self.k) {
            for w in self.w.chunks_exact(self.k) {
                let size: f64 = w.iter().zip(x).map(|(w, x)| (w * x).abs()).sum();
                out.push(dot(w, x), g.map(|g| g * size));
            }
        }
        out
    }

    /// Adds the derivative by the input to `into`, given the one by the output.
    fn back(&self, by_output: &[f64], into: &mut [f64]) {
        let n = self.w.len() / self.k;
        for (by_output, into) in by_output.chunks_exact(n).zip(into.chunks_exact_mut(self.k)) {
            for (w, &c) in self.w.chunks_exact(self.k).zip(by_output) {
                if c != 0.0 {
                    into.iter_mut().zip(w).for_each(|(i, w)| *i += c * w);
                }
            }
        }
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The results of an operation, and what its own roundings can change in each, in each pass.
#[derive(Default)]
struct Stage {
    x: Vec<f64>,
    d: [Vec<f64>; 2],
}

impl Stage {
    fn push(&mut self, x: f64, d: [f64; 2]) {
        self.x.push(x);
        self.d.iter_mut().zip(d).for_each(|(to, d)| to.push(d));
    }

    fn sum(a: &[f64], b: &[f64]) -> Self {
        let mut out = Self::default();
        a.iter().zip(b).for_each(|(a, b)| out.push(a + b, [U * (a + b).abs(); 2]));
        out
    }

    /// Adds `sum |derivative| d` to the bounds.
    fn charge(&self, by: &[f64], bounds: &mut [f64; 2]) {
        for (bound, d) in bounds.iter_mut().zip(&self.d) {
            *bound += by.iter().zip(d).map(|(c, d)| c.abs() * d).sum::<f64>();
        }
    }
}

/// What a layer computed.
struct LayerTrace {
    normed: Stage,
    qkv: [Stage; 3],
    /// Queries and keys, rotated.
    rotated: [Stage; 2],
    /// `[t, heads, t]`: scores' own error, and probabilities.
    scores: Vec<f64>,
    probs: Vec<f64>,
    mixed: Stage,
    o: Stage,
    middle: Stage,
    normed2: Stage,
    gate: Stage,
    up: Stage,
    ffn: Stage,
    down: Stage,
    out: Stage,
}

/// The model.
pub struct Reference<'a> {
    config: &'a LlamaConfig,
    tensors: BTreeMap<String, Linear>,
}

/// A forward pass, from which the bound of any logit follows.
pub struct Trace<'a> {
    model: &'a Reference<'a>,
    embedded: Vec<f64>,
    layers: Vec<LayerTrace>,
    normed: Stage,
    logits: Stage,
}

impl<'a> Reference<'a> {
    /// Asks for every tensor by its module's Hugging Face name.
    pub fn new(config: &'a LlamaConfig, mut tensor: impl FnMut(&str) -> Linear) -> Self {
        let mut names = vec!["model.embed_tokens".to_owned(), "model.norm".to_owned()];
        if !config.tie_word_embeddings {
            names.push("lm_head".into());
        }
        for i in 0..config.num_hidden_layers {
            let attention = ["q", "k", "v", "o"].map(|p| format!("self_attn.{p}_proj"));
            let rest = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"];
            let parts = attention.into_iter().chain(rest.map(String::from));
            names.extend(parts.map(|part| format!("model.layers.{i}.{part}")));
        }
        let tensors = names.into_iter().map(|name| (name.clone(), tensor(&name))).collect();
        Self { config, tensors }
    }

    fn part(&self, layer: usize, part: &str) -> &Linear {
        &self.tensors[&format!("model.layers.{layer}.{part}")]
    }

    fn head(&self) -> &Linear {
        self.tensors.get("lm_head").unwrap_or(&self.tensors["model.embed_tokens"])
    }

    /// Runs the model on a text.
    pub fn run(&self, ids: &[u32]) -> Trace<'_> {
        self.run_embedded(self.embed(ids))
    }

    /// The rows of the embedding.
    pub fn embed(&self, ids: &[u32]) -> Vec<f64> {
        let (d, table) = (self.config.hidden_size, &self.tensors["model.embed_tokens"].w);
        ids.iter().flat_map(|&id| &table[id as usize * d..][..d]).copied().collect()
    }

    /// Runs the model on rows of width `hidden_size`.
    pub fn run_embedded(&self, embedded: Vec<f64>) -> Trace<'_> {
        let mut layers: Vec<LayerTrace> = Vec::new();
        for i in 0..self.config.num_hidden_layers {
            let x = layers.last().map_or(&embedded, |l| &l.out.x);
            let normed = self.norm(x, self.part(i, "input_layernorm"));
            let qkv = ["q", "k", "v"].map(|p| self.part(i, &format!("self_attn.{p}_proj")).times(&normed.x));
            let heads = [self.config.num_attention_heads, self.config.num_key_value_heads];
            let rotated = [0, 1].map(|j| self.rotate(&qkv[j].x, heads[j]));
            let (scores, probs, mixed) = self.attend(&rotated, &qkv[2].x);
            let o = self.part(i, "self_attn.o_proj").times(&mixed.x);
            let middle = Stage::sum(x, &o.x);
            let normed2 = self.norm(&middle.x, self.part(i, "post_attention_layernorm"));
            let (gate, up) =
                (self.part(i, "mlp.gate_proj").times(&normed2.x), self.part(i, "mlp.up_proj").times(&normed2.x));
            let mut ffn = Stage::default();
            for (g, h) in gate.x.iter().zip(&up.x) {
                assert!(g.abs() < 86.0, "a gate of {g}: the exponential saturates");
                let y = g / (1.0 + (-g).exp()) * h;
                ffn.push(y, [(EXP + gamma(4)) * y.abs(); 2]);
            }
            let down = self.part(i, "mlp.down_proj").times(&ffn.x);
            let out = Stage::sum(&middle.x, &down.x);
            layers.push(LayerTrace {
                normed,
                qkv,
                rotated,
                scores,
                probs,
                mixed,
                o,
                middle,
                normed2,
                gate,
                up,
                ffn,
                down,
                out,
            });
        }
        let normed = self.norm(layers.last().map_or(&embedded, |l| &l.out.x), &self.tensors["model.norm"]);
        let logits = self.head().times(&normed.x);
        Trace { model: self, embedded, layers, normed, logits }
    }

    fn inverse_rms(&self, x: &[f64]) -> f64 {
        1.0 / (dot(x, x) / x.len() as f64 + f64::from(self.config.rms_norm_eps)).sqrt()
    }

    fn norm(&self, x: &[f64], w: &Linear) -> Stage {
        let d = self.config.hidden_size;
        let factor = gamma(d / 16 + 20) / 2.0 + gamma(4);
        let mut out = Stage::default();
        for x in x.chunks_exact(d) {
            let r = self.inverse_rms(x);
            x.iter().zip(&w.w).for_each(|(x, w)| out.push(x * r * w, [factor * (x * r * w).abs(); 2]));
        }
        out
    }

    fn norm_back(&self, x: &[f64], w: &Linear, by: &[f64], into: &mut [f64]) {
        let d = self.config.hidden_size;
        for ((x, by), into) in x.chunks_exact(d).zip(by.chunks_exact(d)).zip(into.chunks_exact_mut(d)) {
            let r = self.inverse_rms(x);
            let along: f64 = x.iter().zip(by.iter().zip(&w.w)).map(|(x, (c, w))| x * c * w).sum::<f64>() / d as f64;
            for i in 0..d {
                into[i] += r * by[i] * w.w[i] - r.powi(3) * x[i] * along;
            }
        }
    }

    /// Cosine, sine and the bound of their error at a position, for component i of a half head.
    fn angle(&self, position: usize, i: usize) -> (f64, f64, f64) {
        let theta = f64::from(self.config.rope_theta);
        let x = 2.0 * i as f64 / self.config.head_dim as f64;
        let angle = position as f64 * theta.powf(-x);
        (angle.cos(), angle.sin(), angle * (x * theta.ln() + 4.0) * U + U)
    }

    fn rotate(&self, x: &[f64], heads: usize) -> Stage {
        let d = self.config.head_dim;
        let mut out = Stage::default();
        for (row, x) in x.chunks_exact(d).enumerate() {
            for j in 0..d {
                let (c, s, e) = self.angle(row / heads, j % (d / 2));
                let (a, b, s) = (x[j], x[(j + d / 2) % d], if j < d / 2 { -s } else { s });
                let own = e * (a.abs() + b.abs()) + gamma(2) * ((a * c).abs() + (b * s).abs());
                out.push(a * c + b * s, [own; 2]);
            }
        }
        out
    }

    fn rotate_back(&self, by: &[f64], heads: usize) -> Vec<f64> {
        let d = self.config.head_dim;
        let mut out = vec![0.0; by.len()];
        for (row, (by, out)) in by.chunks_exact(d).zip(out.chunks_exact_mut(d)).enumerate() {
            for j in 0..d {
                let (c, s, _) = self.angle(row / heads, j % (d / 2));
                out[j] = by[j] * c + by[(j + d / 2) % d] * if j < d / 2 { s } else { -s };
            }
        }
        out
    }

    fn attend(&self, [q, k]: &[Stage; 2], v: &[f64]) -> (Vec<f64>, Vec<f64>, Stage) {
        let c = self.config;
        let (d, heads, kv_heads) = (c.head_dim, c.num_attention_heads, c.num_key_value_heads);
        let tokens = q.x.len() / (heads * d);
        let root = (d as f64).sqrt();
        let (mut errors, mut probs) = (vec![0.0; tokens * heads * tokens], vec![0.0; tokens * heads * tokens]);
        let mut mixed = Stage::default();
        for t in 0..tokens {
            for h in 0..heads {
                let kv = h / (heads / kv_heads);
                let at = (t * heads + h) * tokens;
                let (errors, p) = (&mut errors[at..at + tokens], &mut probs[at..at + tokens]);
                let query = &q.x[(t * heads + h) * d..][..d];
                for j in 0..=t {
                    let key = &k.x[(j * kv_heads + kv) * d..][..d];
                    p[j] = dot(query, key) / root;
                    errors[j] = gamma(d + 4) * query.iter().zip(key).map(|(q, k)| (q * k).abs()).sum::<f64>() / root;
                }
                let top = p[..=t].iter().fold(f64::NEG_INFINITY, |m, s| m.max(*s));
                for j in 0..=t {
                    assert!(top - p[j] < 86.0, "scores {} apart: the exponential saturates", top - p[j]);
                    errors[j] += U * (top - p[j]) + EXP;
                    p[j] = (p[j] - top).exp();
                }
                let total: f64 = p[..=t].iter().sum();
                p.iter_mut().for_each(|p| *p /= total);
                for i in 0..d {
                    let terms = || (0..=t).map(|j| p[j] * v[(j * kv_heads + kv) * d + i]);
                    let own = gamma(t / 16 + t + 21) * terms().map(f64::abs).sum::<f64>();
                    mixed.push(terms().sum(), [own; 2]);
                }
            }
        }
        (errors, probs, mixed)
    }
}

impl Trace<'_> {
    /// The logits `[tokens, vocab]`.
    pub fn logits(&self) -> &[f64] {
        &self.logits.x
    }

    /// The bounds of logit number `at`, for each of [`PASSES`], and its derivative by the embedded text.
    pub fn bounds(&self, at: usize) -> ([f64; 2], Vec<f64>) {
        let model = self.model;
        let mut bounds = [0.0; 2];
        let mut by = vec![0.0; self.logits.x.len()];
        by[at] = 1.0;
        self.logits.charge(&by, &mut bounds);
        let by_normed = through(model.head(), &by, self.normed.x.len());
        self.normed.charge(&by_normed, &mut bounds);
        let mut by_x = vec![0.0; self.embedded.len()];
        let last = self.layers.last().map_or(&self.embedded, |l| &l.out.x);
        model.norm_back(last, &model.tensors["model.norm"], &by_normed, &mut by_x);
        for (i, layer) in self.layers.iter().enumerate().rev() {
            let input = if i == 0 { &self.embedded } else { &self.layers[i - 1].out.x };
            layer.out.charge(&by_x, &mut bounds);
            layer.down.charge(&by_x, &mut bounds);
            self.mlp_back(i, &mut by_x, &mut bounds);
            layer.middle.charge(&by_x, &mut bounds);
            layer.o.charge(&by_x, &mut bounds);
            let by_normed = self.attention_back(i, &by_x, &mut bounds);
            model.norm_back(input, model.part(i, "input_layernorm"), &by_normed, &mut by_x);
        }
        (bounds, by_x)
    }

    /// From the derivative by a layer's output to that by its middle.
    fn mlp_back(&self, i: usize, by_x: &mut [f64], bounds: &mut [f64; 2]) {
        let (model, l) = (self.model, &self.layers[i]);
        let by_ffn = through(model.part(i, "mlp.down_proj"), by_x, l.ffn.x.len());
        l.ffn.charge(&by_ffn, bounds);
        let (mut by_gate, mut by_up) = (by_ffn.clone(), by_ffn);
        for j in 0..by_gate.len() {
            let (g, h) = (l.gate.x[j], l.up.x[j]);
            let s = 1.0 / (1.0 + (-g).exp());
            by_gate[j] *= h * s * (1.0 + g * (1.0 - s));
            by_up[j] *= g * s;
        }
        l.gate.charge(&by_gate, bounds);
        l.up.charge(&by_up, bounds);
        let mut by_normed = through(model.part(i, "mlp.gate_proj"), &by_gate, l.normed2.x.len());
        model.part(i, "mlp.up_proj").back(&by_up, &mut by_normed);
        l.normed2.charge(&by_normed, bounds);
        model.norm_back(&l.middle.x, model.part(i, "post_attention_layernorm"), &by_normed, by_x);
    }

    /// From the derivative by the output projection's result to that by the first norm's.
    fn attention_back(&self, i: usize, by_x: &[f64], bounds: &mut [f64; 2]) -> Vec<f64> {
        let (model, l, c) = (self.model, &self.layers[i], self.model.config);
        let (d, heads, kv_heads) = (c.head_dim, c.num_attention_heads, c.num_key_value_heads);
        let (tokens, root) = (l.mixed.x.len() / (heads * d), (d as f64).sqrt());
        let by_mixed = through(model.part(i, "self_attn.o_proj"), by_x, l.mixed.x.len());
        l.mixed.charge(&by_mixed, bounds);
        let mut by = l.qkv.each_ref().map(|s| vec![0.0; s.x.len()]);
        let mut of_scores = 0.0;
        for t in 0..tokens {
            for h in 0..heads {
                let at = (t * heads + h) * d;
                let by_mixed = &by_mixed[at..at + d];
                if by_mixed.iter().all(|c| *c == 0.0) {
                    continue;
                }
                let key = |j: usize| (j * kv_heads + h / (heads / kv_heads)) * d;
                let row = (t * heads + h) * tokens;
                let (errors, p) = (&l.scores[row..row + tokens], &l.probs[row..row + tokens]);
                let by_p: Vec<f64> = (0..=t).map(|j| dot(by_mixed, &l.qkv[2].x[key(j)..][..d])).collect();
                let mean: f64 = by_p.iter().zip(p).map(|(c, p)| c * p).sum();
                for j in 0..=t {
                    let by_score = p[j] * (by_p[j] - mean);
                    of_scores += by_score.abs() * errors[j];
                    for n in 0..d {
                        by[0][at + n] += by_score / root * l.rotated[1].x[key(j) + n];
                        by[1][key(j) + n] += by_score / root * l.rotated[0].x[at + n];
                        by[2][key(j) + n] += p[j] * by_mixed[n];
                    }
                }
            }
        }
        bounds.iter_mut().for_each(|b| *b += of_scores);
        for (j, heads) in [heads, kv_heads].into_iter().enumerate() {
            l.rotated[j].charge(&by[j], bounds);
            by[j] = model.rotate_back(&by[j], heads);
        }
        let mut by_normed = vec![0.0; l.normed.x.len()];
        for (j, part) in ["q", "k", "v"].into_iter().enumerate() {
            l.qkv[j].charge(&by[j], bounds);
            model.part(i, &format!("self_attn.{part}_proj")).back(&by[j], &mut by_normed);
        }
        l.normed.charge(&by_normed, bounds);
        by_normed
    }
}

/// The derivative by a layer's input of `len` values, given the one by its output.
fn through(layer: &Linear, by_output: &[f64], len: usize) -> Vec<f64> {
    let mut out = vec![0.0; len];
    layer.back(by_output, &mut out);
    out
}
