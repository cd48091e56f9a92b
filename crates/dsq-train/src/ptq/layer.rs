//! How each method treats one layer of the model: the order in which inputs are measured, weights changed and codes
//! chosen. The arithmetic is in `gptq.rs` and `awq.rs`, the walk over layers in `mod.rs`.

use super::awq::{self, Consumer};
use super::{Factor, Hessian, PtqLinear, PtqMethod, PtqNorm, Rescale, Run, Scaling, gptaq, gptq, values};
use crate::TrainError;
use burn::tensor::Tensor;
use dsq_checkpoint::Dtype;
use dsq_kernels::fake_quant::largest_magnitude;
use dsq_model::layers::{Linear, RmsNorm};
use dsq_model::{Experts, FeedForward, Layer};
use dsq_quant::{FloatType, QuantArgs, QuantError, QuantizedMatrix};

const V: &str = "self_attn.v_proj";
const O: [&str; 1] = ["self_attn.o_proj"];

impl Run<'_> {
    /// Quantizes one layer, moves the residual stream past it, and returns it as it became.
    ///
    /// AWQ's scales are fused into the norm before q, k and v and before gate and up (of experts: of all of them, and the router),
    /// into those of latents, into v's rows for o, into up's rows for down; SmoothQuant's only into the norms. A set is left unscaled where one of its layers, or the one whose rows would change, stays in float: that
    /// one would have to change too.
    pub(super) fn quantize_layer(&mut self, mut layer: Layer) -> Result<Layer, TrainError> {
        let mut work = Work::new(&layer, self.settings.scaling != Scaling::None);
        self.quantize_inputs(&mut layer);
        self.quantize_attention(&mut layer, &mut work)?;
        self.pass_attention(&layer);
        self.scale_experts(&mut layer, &mut work)?;
        for j in 0..layer.mlp.blocks().len() {
            self.quantize_block(j, &mut layer, &mut work)?;
        }
        self.pass_mlp(&layer);
        Ok(layer)
    }

    /// Quantizes the linears of attention, those that read one tensor together.
    fn quantize_attention(&mut self, layer: &mut Layer, work: &mut Work) -> Result<(), TrainError> {
        let awq = self.settings.scaling == Scaling::Awq;
        let grouped = self.model.latent.is_none();
        let sets = layer.attention_sets();
        let mut h = self.observe(layer, &sets[0], None, |l, x, _| l.qkv_input(x))?;
        let mut o = None;
        self.scale_by_norm("input_layernorm", work, layer, &sets[0], h.as_mut())?;
        if awq && grouped {
            o = self.observe_alone(layer, &O, |l, x, batch| l.o_input(l.qkv_input(x), batch))?;
            let (heads, kv_heads, d) =
                (self.model.num_attention_heads, self.model.num_key_value_heads, self.model.head_dim);
            self.scale_by_rows(V, O[0], (heads, kv_heads, d), work, layer, o.as_mut())?;
        }
        self.choose(layer, &sets[0], work, h)?;
        for set in &sets[1..sets.len() - 1] {
            let mut h =
                self.observe(layer, set, None, |l, x, batch| l.attention_input(set[0], l.qkv_input(x), batch))?;
            let norm = if set[0].contains("q_b_proj") { "self_attn.q_a_layernorm" } else { "self_attn.kv_a_layernorm" };
            self.scale_by_norm(norm, work, layer, set, h.as_mut())?;
            self.choose(layer, set, work, h)?;
        }
        if self.walks_again() || !grouped {
            o = self.observe(layer, &O, work.columns(O[0]), |l, x, batch| l.o_input(l.qkv_input(x), batch))?;
        }
        self.choose(layer, &O, work, o)
    }

    /// Finds scales for the inputs of gate and up of all experts and of the shared ones, of one pass over all tokens, and fuses them
    /// into the norm before them and the router. Nothing is done where one of them stays in float.
    fn scale_experts(&mut self, layer: &mut Layer, work: &mut Work) -> Result<(), TrainError> {
        if self.settings.scaling == Scaling::None || layer.router_mut().is_none() {
            return Ok(());
        }
        let names: Vec<[String; 3]> = (0..layer.mlp.blocks().len()).map(|j| layer.block_names(j)).collect();
        let parts: Vec<&str> = names.iter().flat_map(|[gate, up, _]| [gate.as_str(), up.as_str()]).collect();
        let mut h = match self.all_args(&parts) {
            Some(_) => self.observe_alone(layer, &parts, |l, x, _| l.gate_up_input(x))?,
            None => {
                self.tick(self.stream.len());
                None
            }
        };
        self.scale_by_norm("post_attention_layernorm", work, layer, &parts, h.as_mut())
    }

    /// Quantizes block `j` of the feed-forward blocks.
    fn quantize_block(&mut self, j: usize, layer: &mut Layer, work: &mut Work) -> Result<(), TrainError> {
        let [gate, up, down] = layer.block_names(j);
        let (gate_up, down) = ([gate.as_str(), up.as_str()], [down.as_str()]);
        // Of experts the scales are in place already.
        let mut h = self.observe_block(layer, j, false, &gate_up, work.columns(&gate))?;
        let mut d = None;
        if matches!(layer.mlp, FeedForward::Dense(_)) {
            self.scale_by_norm("post_attention_layernorm", work, layer, &gate_up, h.as_mut())?;
        }
        if self.settings.scaling == Scaling::Awq {
            let float = self.float_layer.take();
            d = self.observe_block(layer, j, true, &down, None)?;
            self.float_layer = float;
            let ffn = layer.mlp.blocks()[j].down_proj.weight.dims()[1];
            self.scale_by_rows(&up, down[0], (1, 1, ffn), work, layer, d.as_mut())?;
        }
        self.choose(layer, &gate_up, work, h)?;
        if self.walks_again() {
            d = self.observe_block(layer, j, true, &down, work.columns(down[0]))?;
        }
        self.choose(layer, &down, work, d)
    }

    /// The inputs of gate and up, or of down, of block `j` of the feed-forward blocks: of an expert those of the tokens that are
    /// sent to it.
    fn observe_block(
        &mut self,
        layer: &Layer,
        j: usize,
        down: bool,
        parts: &[&str],
        scales: Option<&[f32]>,
    ) -> Result<Option<Hessian>, TrainError> {
        match &layer.mlp {
            FeedForward::Experts(experts) if j < experts.count() => {
                self.observe_expert(layer, experts, j, down, parts, scales)
            }
            _ => self.observe(layer, parts, scales, |l, x, _| {
                let h = l.gate_up_input(x);
                if down { l.mlp.blocks()[j].inner(h) } else { h }
            }),
        }
    }

    /// [`Run::observe`] of expert `j`. The float model's inputs beside are those of the same tokens, wherever it would send them.
    fn observe_expert(
        &mut self,
        layer: &Layer,
        experts: &Experts,
        j: usize,
        down: bool,
        parts: &[&str],
        scales: Option<&[f32]>,
    ) -> Result<Option<Hessian>, TrainError> {
        if !parts.iter().any(|p| self.args(&self.module(p)).is_some()) {
            self.tick(self.stream.len());
            return Ok(None);
        }
        let input = |l: &Layer, x: Tensor<2>| if down { l.mlp.blocks()[j].inner(x) } else { x };
        let block = experts.expert(j);
        let mut h = Hessian::new(if down { &block.down_proj } else { &block.gate_proj }.weight.dims()[1]);
        for i in 0..self.stream.len() {
            let routed = experts.route(layer.gate_up_input(self.stream[i].1.clone()));
            if routed.count(j) > 0 {
                let x = values(input(layer, routed.tokens_of(j)));
                match &self.float_layer {
                    None => h.add(&x),
                    Some(float) => {
                        let y = float.gate_up_input(self.float_stream[i].clone());
                        let mut y = values(input(float, routed.same_of(j, y)));
                        for row in y.chunks_mut(h.k()) {
                            row.iter_mut().zip(scales.unwrap_or_default()).for_each(|(v, s)| *v /= s);
                        }
                        h.add_beside(&x, &y);
                    }
                }
            }
            self.tick(1);
        }
        let fixed = |p: &&str| self.activations(&self.module(p)).is_some_and(|a| !a.is_dynamic());
        if h.is_empty() && parts.iter().any(fixed) {
            for (_, x) in &self.stream {
                let x = layer.gate_up_input(x.clone());
                let [b, t, d] = x.dims();
                h.widen_range(&values(input(layer, x.reshape([b * t, d]))));
            }
        }
        match h.not_finite() {
            Some(value) => Err(TrainError::Activations { module: self.module(parts[0]), value }),
            None => Ok(Some(h)),
        }
    }

    /// Whether o and down are measured once q, k and v, or gate and up, are quantized: rounding is content with what it
    /// measured for their scales.
    pub(super) fn walks_again(&self) -> bool {
        !(self.settings.scaling == Scaling::Awq && self.settings.method == PtqMethod::Rtn)
    }

    /// Chooses the codes of the linears `parts`, whose (scaled) inputs are those of `h`, and puts the values of the codes
    /// in their place.
    fn choose(&mut self, layer: &mut Layer, parts: &[&str], work: &Work, h: Option<Hessian>) -> Result<(), TrainError> {
        let Some(h) = h else { return Ok(()) };
        let method = self.settings.method;
        if self.float_layer.is_some() {
            let chosen = |part: &str| parts.contains(&part) && self.args(&self.module(part)).is_some();
            for (_, linear) in layer.linears_mut().into_iter().filter(|(part, _)| chosen(part.as_str())) {
                linear.set_values(gptaq::targets(linear.values(), &h));
            }
        }
        let chosen = layer.linears().into_iter().filter(|(part, _)| parts.contains(&part.as_str()));
        let magnitudes: Vec<(String, f32)> = chosen.map(|(part, l)| (part, l.largest_magnitude())).collect();
        let global = self.shared_global(parts, magnitudes.iter().map(|(part, m)| (part.as_str(), *m)));
        // Of plain rounding, where columns were scaled.
        let originals = work.0.iter().filter(|(part, _)| parts.contains(&part.as_str()));
        let unscaled = self.shared_global(parts, originals.map(|(p, l)| (p.as_str(), largest_magnitude(&l.original))));
        let factor = if method.factors() && !h.is_empty() { Factor::new(&h) } else { None };
        for (part, linear) in layer.linears_mut() {
            let module = self.module(&part);
            let Some(args) = self.args(&module).filter(|_| parts.contains(&part.as_str())) else { continue };
            let [n, k] = linear.weight.dims();
            if let Some(grid) = self.fix_inputs(&module, &h)? {
                linear.set_inputs(Some(grid));
            }
            let values = linear.values();
            if h.is_empty() {
                let matrix = rounded(&values, n, k, args, global)
                    .map_err(|source| TrainError::Quant { module: module.clone(), source })?;
                linear.set_values(matrix.dequantize());
                if method.trains() {
                    self.starts.push((part.clone(), values));
                }
                let rescale = work.of(&part).rescale.clone();
                self.outcome.never_hit.push(module.clone());
                self.outcome.linears.push(PtqLinear { module, matrix, fit: None, rescale });
                continue;
            }
            let weighted = self.settings.weighted;
            let (matrix, mut fit, targets) =
                gptq::quantize_and_targets(&values, n, k, &h, factor.as_ref(), args, global, weighted)
                    .map_err(|source| TrainError::Quant { module: module.clone(), source })?;
            linear.set_values(matrix.dequantize());
            if method.trains() {
                self.starts.push((part.clone(), targets));
            }
            if !method.factors() {
                // Every row is rounded, and none of them for want of something better.
                fit.plain_rows = 0;
            }
            let rescale = work.of(&part).rescale.clone();
            // GPTAQ's targets are not the weights, so that rounding these is no measure of it.
            if let Some(r) = rescale.as_ref().filter(|_| self.float_layer.is_none()) {
                fit.rtn_error = rounding_error(&work.of(&part).original, r, &h, args, unscaled)
                    .map_err(|source| TrainError::Quant { module: module.clone(), source })?;
            }
            self.outcome.linears.push(PtqLinear { module, matrix, fit: Some(fit), rescale });
        }
        Ok(())
    }

    /// The global scale of those of `parts` that have one, from the largest magnitudes of the layer's weights: they share it.
    fn shared_global<'p>(&self, parts: &[&str], magnitudes: impl Iterator<Item = (&'p str, f32)>) -> f32 {
        let with = magnitudes.filter(|(part, _)| parts.contains(part));
        awq::shared_global(with.filter_map(|(part, m)| Some((self.args(&self.module(part))?, m))))
    }

    /// The grids of `parts`, if all of them have one.
    fn all_args(&self, parts: &[&str]) -> Option<Vec<QuantArgs>> {
        parts.iter().map(|p| self.args(&self.module(p))).collect()
    }

    /// Finds scales for the inputs of `parts`, which the norm `end` makes, and fuses them; `h`, of these inputs, follows. Where a router
    /// reads them too, the scales are powers of two.
    fn scale_by_norm(
        &mut self,
        end: &str,
        work: &mut Work,
        layer: &mut Layer,
        parts: &[&str],
        h: Option<&mut Hessian>,
    ) -> Result<(), TrainError> {
        let scaling = self.settings.scaling;
        let (Some(h), Some(args)) = (h, self.all_args(parts)) else { return Ok(()) };
        if scaling == Scaling::None {
            return Ok(());
        }
        let name = self.module(&format!("{end}.weight"));
        let dtype = self.float_dtype(&name);
        let Some(old) = norm_of(layer, end).map(|norm| norm.values()) else { return Ok(()) };
        let router = layer.router_mut().filter(|_| end == "post_attention_layernorm").map(|r| r.values());
        let router_name = self.module(&format!("{}.gate.weight", self.model.feed_forward_name()));
        // A router keeps its dtype in every export.
        let router_dtype = self.checkpoint.dtype(&router_name).and_then(Dtype::float).unwrap_or(FloatType::F32);
        // The expert of gate and up: these share what they share, and no more.
        let set = |p: &str| p.rsplit_once('.').map_or("", |(block, _)| block).to_owned();
        let mut sets: Vec<String> = parts.iter().map(|p| set(p)).collect();
        sets.dedup();
        let index = |p: &str| sets.iter().position(|s| *s == set(p)).unwrap_or(0);
        let consumer = |(p, args): (&&str, QuantArgs)| Consumer { w: &work.of(p).original, args, set: index(p) };
        let consumers: Vec<Consumer> = parts.iter().zip(args).map(consumer).collect();
        let realize = |s: Vec<f32>| match &router {
            None => awq::in_effect(&old, &awq::divided(&old, &s, dtype)),
            Some(router) => awq::powers_of_two(s, &old, dtype, router, router_dtype),
        };
        let found = match scaling {
            Scaling::Smooth(alpha) => Some(realize(awq::smooth(&h.largest_magnitude(), &consumers, alpha))),
            _ => awq::search(h, &h.mean_magnitude(), &consumers, realize)
                .map_err(|(i, source)| TrainError::Quant { module: self.module(parts[i]), source })?,
        };
        let Some(s) = found else { return Ok(()) };
        // `s` is `old / stored` in f32, so this finds `stored` again: it lies on a far coarser grid.
        let values = awq::divided(&old, &s, dtype);
        if let Some(norm) = norm_of(layer, end) {
            norm.set_values(values.clone());
        }
        self.outcome.norms.push(PtqNorm { name, values, dtype });
        if let (Some(router), Some(values)) = (layer.router_mut(), router) {
            let values = awq::scale_columns(&values, &s);
            router.set_values(values.clone());
            self.outcome.norms.push(PtqNorm { name: router_name, values, dtype: router_dtype });
        }
        for part in parts {
            work.of_mut(part).scale(None, Some(&s));
        }
        h.divide_inputs(&s);
        work.put(layer, parts);
        Ok(())
    }

    /// Searches scales for the inputs of `to`, whose values are those rows of `from` (times what does not depend on them),
    /// and fuses them; `h`, of these inputs, follows. `(heads, kv_heads, d)`: input `(h, i)` of `to` comes from row `(h / (heads / kv_heads), i)`.
    fn scale_by_rows(
        &mut self,
        from: &str,
        to: &str,
        (heads, kv_heads, d): (usize, usize, usize),
        work: &mut Work,
        layer: &mut Layer,
        h: Option<&mut Hessian>,
    ) -> Result<(), TrainError> {
        let (Some(h), Some(args)) = (h, self.all_args(&[to, from])) else { return Ok(()) };
        let magnitude = awq::spread(&awq::pooled(&h.mean_magnitude(), kv_heads, d), heads, d);
        let consumers = [Consumer { w: &work.of(to).original, args: args[0], set: 0 }];
        let found = awq::search(h, &magnitude, &consumers, |s| s)
            .map_err(|(_, source)| TrainError::Quant { module: self.module(to), source })?;
        let Some(s) = found else { return Ok(()) };
        let per = heads / kv_heads.max(1);
        let rows: Vec<f32> = (0..kv_heads * d).map(|i| 1.0 / s[i / d * per * d + i % d]).collect();
        work.of_mut(from).scale(Some(&rows), None);
        work.of_mut(to).scale(None, Some(&s));
        h.divide_inputs(&s);
        work.put(layer, &[from, to]);
        // What the rows make is divided with its bias.
        for (part, linear) in layer.linears_mut() {
            let Some(bias) = linear.bias().filter(|_| part == from) else { continue };
            let name = self.module(&format!("{part}.bias"));
            let dtype = self.float_dtype(&name);
            let values: Vec<f32> = bias.iter().zip(&rows).map(|(b, r)| dtype.round(b * r)).collect();
            linear.set_bias(values.clone());
            self.outcome.norms.push(PtqNorm { name, values, dtype });
        }
        Ok(())
    }

    /// The dtype that a float tensor will be stored in.
    fn float_dtype(&self, name: &str) -> FloatType {
        let stored = || self.checkpoint.dtype(name).and_then(Dtype::float);
        self.settings.float_dtype.or_else(stored).unwrap_or(FloatType::F32)
    }
}

/// The norm of a layer whose name ends so.
fn norm_of<'a>(layer: &'a mut Layer, end: &str) -> Option<&'a mut RmsNorm> {
    layer.norms_mut().into_iter().find(|(name, _)| *name == end).map(|(_, norm)| norm)
}

/// A weight rounded to nearest, under `global` for a scheme that has a global scale.
fn rounded(w: &[f32], n: usize, k: usize, args: QuantArgs, global: f32) -> Result<QuantizedMatrix, QuantError> {
    match args.has_global_scale() {
        true => QuantizedMatrix::quantize_under(w, n, k, args, Some(global)),
        false => dsq_kernels::quantize::quantize(w, n, k, args),
    }
}

/// The output error of the unscaled weight `original`, rounded to nearest (under `global`, for a scheme that has a global scale), where
/// inputs (those of `h`) and outputs are the scaled ones.
fn rounding_error(
    original: &[f32],
    scales: &Rescale,
    h: &Hessian,
    args: QuantArgs,
    global: f32,
) -> Result<f64, QuantError> {
    let (n, k) = (scales.rows.len(), scales.columns.len());
    let values = rounded(original, n, k, args, global)?.dequantize();
    let mut errors: Vec<f32> = original.iter().zip(values).map(|(w, v)| w - v).collect();
    scales.apply(&mut errors);
    Ok(h.output_errors(&errors).iter().sum())
}

/// The linears of a layer under AWQ: their weights as they came, and what has been done to them.
struct Work(Vec<(String, LinearWork)>);

struct LinearWork {
    /// Empty where nothing is scaled.
    original: Vec<f32>,
    rescale: Option<Rescale>,
    size: [usize; 2],
}

impl LinearWork {
    fn new(linear: &Linear, scales: bool) -> Self {
        let original = if scales { linear.values() } else { Vec::new() };
        Self { original, rescale: None, size: linear.weight.dims() }
    }

    /// Multiplies what has been done so far.
    fn scale(&mut self, rows: Option<&[f32]>, columns: Option<&[f32]>) {
        let [n, k] = self.size;
        let r = self.rescale.get_or_insert_with(|| Rescale { rows: vec![1.0; n], columns: vec![1.0; k] });
        for (all, by) in [(&mut r.rows, rows), (&mut r.columns, columns)] {
            all.iter_mut().zip(by.unwrap_or_default()).for_each(|(a, b)| *a *= b);
        }
    }

    fn scaled(&self) -> Vec<f32> {
        let mut out = self.original.clone();
        if let Some(r) = &self.rescale {
            r.apply(&mut out);
        }
        out
    }
}

impl Work {
    /// `scales`: whether columns will be scaled.
    fn new(layer: &Layer, scales: bool) -> Self {
        Self(layer.linears().into_iter().map(|(name, l)| (name, LinearWork::new(l, scales))).collect())
    }

    fn at(&self, part: &str) -> usize {
        self.0.iter().position(|(name, _)| name == part).unwrap_or(0)
    }

    fn of(&self, part: &str) -> &LinearWork {
        &self.0[self.at(part)].1
    }

    /// What the inputs of a linear are divided by, if by anything.
    fn columns(&self, part: &str) -> Option<&[f32]> {
        self.of(part).rescale.as_ref().map(|r| r.columns.as_slice())
    }

    fn of_mut(&mut self, part: &str) -> &mut LinearWork {
        let at = self.at(part);
        &mut self.0[at].1
    }

    /// Puts the scaled weights of `parts` into the layer.
    fn put(&self, layer: &mut Layer, parts: &[&str]) {
        for (part, linear) in layer.linears_mut().into_iter().filter(|(p, _)| parts.contains(&p.as_str())) {
            linear.set_values(self.of(&part).scaled());
        }
    }
}
