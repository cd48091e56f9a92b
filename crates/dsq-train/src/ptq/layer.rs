//! How each method treats one layer of the model: the order in which inputs are measured, weights changed and codes
//! chosen. The arithmetic is in `gptq.rs` and `awq.rs`, the walk over layers in `mod.rs`.

use super::awq::{self, Consumer};
use super::{Factor, Hessian, PtqLinear, PtqMethod, PtqNorm, Rescale, Run, Scaling, gptaq, gptq};
use crate::TrainError;
use dsq_checkpoint::Dtype;
use dsq_kernels::fake_quant::largest_magnitude;
use dsq_model::Layer;
use dsq_model::layers::{Linear, RmsNorm};
use dsq_quant::{FloatType, QuantArgs, QuantError, QuantizedMatrix};

const QKV: [&str; 3] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
const V: &str = "self_attn.v_proj";
const O: [&str; 1] = ["self_attn.o_proj"];
const GATE_UP: [&str; 2] = ["mlp.gate_proj", "mlp.up_proj"];
const UP: &str = "mlp.up_proj";
const DOWN: [&str; 1] = ["mlp.down_proj"];

impl Run<'_> {
    /// Quantizes one layer, moves the residual stream past it, and returns it as it became.
    ///
    /// AWQ's scales are fused into the norm before q, k and v and before gate and up, into v's rows for o, into up's rows
    /// for down; SmoothQuant's only into the norms. A set is left unscaled where one of its layers, or the one whose rows would change, stays in float: that
    /// one would have to change too.
    pub(super) fn quantize_layer(&mut self, mut layer: Layer) -> Result<Layer, TrainError> {
        let mut work = Work::new(&layer);
        self.quantize_inputs(&mut layer);
        let awq = self.settings.scaling == Scaling::Awq;
        let mut h = self.observe(&layer, &QKV, None, |l, x, _| l.qkv_input(x))?;
        let mut o = None;
        let norm = "input_layernorm";
        self.scale_by_norm(norm, |l| &mut l.input_layernorm, &mut work, &mut layer, &QKV, h.as_mut())?;
        if awq {
            o = self.observe_alone(&layer, &O, |l, x, batch| l.o_input(l.qkv_input(x), batch))?;
            let (heads, kv_heads, d) =
                (self.model.num_attention_heads, self.model.num_key_value_heads, self.model.head_dim);
            self.scale_by_rows(V, O[0], (heads, kv_heads, d), &mut work, &mut layer, o.as_mut())?;
        }
        self.choose(&mut layer, &QKV, &work, h)?;
        if self.walks_again() {
            o = self.observe(&layer, &O, work.columns(O[0]), |l, x, batch| l.o_input(l.qkv_input(x), batch))?;
        }
        self.choose(&mut layer, &O, &work, o)?;
        self.pass_attention(&layer);
        let mut h = self.observe(&layer, &GATE_UP, None, |l, x, _| l.gate_up_input(x))?;
        let mut down = None;
        let norm = "post_attention_layernorm";
        self.scale_by_norm(norm, |l| &mut l.post_attention_layernorm, &mut work, &mut layer, &GATE_UP, h.as_mut())?;
        if awq {
            down = self.observe_alone(&layer, &DOWN, |l, x, _| l.down_input(l.gate_up_input(x)))?;
            let ffn = self.model.intermediate_size;
            self.scale_by_rows(UP, DOWN[0], (1, 1, ffn), &mut work, &mut layer, down.as_mut())?;
        }
        self.choose(&mut layer, &GATE_UP, &work, h)?;
        if self.walks_again() {
            down = self.observe(&layer, &DOWN, work.columns(DOWN[0]), |l, x, _| l.down_input(l.gate_up_input(x)))?;
        }
        self.choose(&mut layer, &DOWN, &work, down)?;
        self.pass_mlp(&layer);
        Ok(layer)
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
            for (_, linear) in layer.linears_mut().into_iter().filter(|(part, _)| chosen(part)) {
                linear.set_values(gptaq::targets(linear.values(), &h));
            }
        }
        let magnitudes = layer.linears().map(|(part, l)| (part, l.largest_magnitude()));
        let global = self.shared_global(parts, magnitudes.into_iter());
        // Of plain rounding, where columns were scaled.
        let unscaled =
            self.shared_global(parts, work.0.iter().map(|(part, l)| (*part, largest_magnitude(&l.original))));
        let factor = if method.factors() { Factor::new(&h) } else { None };
        for (part, linear) in layer.linears_mut() {
            let module = self.module(part);
            let Some(args) = self.args(&module).filter(|_| parts.contains(&part)) else { continue };
            let [n, k] = linear.weight.dims();
            if let Some(grid) = self.fix_inputs(&module, &h)? {
                linear.set_inputs(Some(grid));
            }
            let values = linear.values();
            let weighted = self.settings.weighted;
            let (matrix, mut fit, targets) =
                gptq::quantize_and_targets(&values, n, k, &h, factor.as_ref(), args, global, weighted)
                    .map_err(|source| TrainError::Quant { module: module.clone(), source })?;
            linear.set_values(matrix.dequantize());
            if method.trains() {
                self.starts.push((part, targets));
            }
            if !method.factors() {
                // Every row is rounded, and none of them for want of something better.
                fit.plain_rows = 0;
            }
            let rescale = work.of(part).rescale.clone();
            // GPTAQ's targets are not the weights, so that rounding these is no measure of it.
            if let Some(r) = rescale.as_ref().filter(|_| self.float_layer.is_none()) {
                fit.rtn_error = rounding_error(&work.of(part).original, r, &h, args, unscaled)
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

    /// Finds scales for the inputs of `parts`, which `norm` makes, and fuses them; `h`, of these inputs, follows.
    fn scale_by_norm(
        &mut self,
        name: &str,
        norm: fn(&mut Layer) -> &mut RmsNorm,
        work: &mut Work,
        layer: &mut Layer,
        parts: &[&'static str],
        h: Option<&mut Hessian>,
    ) -> Result<(), TrainError> {
        let scaling = self.settings.scaling;
        let (Some(h), Some(args)) = (h, self.all_args(parts)) else { return Ok(()) };
        if scaling == Scaling::None {
            return Ok(());
        }
        let name = self.module(&format!("{name}.weight"));
        let dtype = self.float_dtype(&name);
        let old = norm(layer).values();
        let consumers: Vec<Consumer> =
            parts.iter().zip(args).map(|(p, args)| Consumer { w: &work.of(p).original, args }).collect();
        let realize = |s: Vec<f32>| awq::in_effect(&old, &awq::divided(&old, &s, dtype));
        let found = match scaling {
            Scaling::Smooth(alpha) => Some(realize(awq::smooth(&h.largest_magnitude(), &consumers, alpha))),
            _ => awq::search(h, &h.mean_magnitude(), &consumers, realize)
                .map_err(|(i, source)| TrainError::Quant { module: self.module(parts[i]), source })?,
        };
        let Some(s) = found else { return Ok(()) };
        // `s` is `old / stored` in f32, so this finds `stored` again: it lies on a far coarser grid.
        let values = awq::divided(&old, &s, dtype);
        norm(layer).set_values(values.clone());
        self.outcome.norms.push(PtqNorm { name, values, dtype });
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
        from: &'static str,
        to: &'static str,
        (heads, kv_heads, d): (usize, usize, usize),
        work: &mut Work,
        layer: &mut Layer,
        h: Option<&mut Hessian>,
    ) -> Result<(), TrainError> {
        let (Some(h), Some(args)) = (h, self.all_args(&[to, from])) else { return Ok(()) };
        let magnitude = awq::spread(&awq::pooled(&h.mean_magnitude(), kv_heads, d), heads, d);
        let consumers = [Consumer { w: &work.of(to).original, args: args[0] }];
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
    let rounded = match args.has_global_scale() {
        true => QuantizedMatrix::quantize_under(original, n, k, args, Some(global))?,
        false => dsq_kernels::quantize::quantize(original, n, k, args)?,
    };
    let rounded = rounded.dequantize();
    let mut errors: Vec<f32> = original.iter().zip(rounded).map(|(w, v)| w - v).collect();
    scales.apply(&mut errors);
    Ok(h.output_errors(&errors).iter().sum())
}

/// The linears of a layer under AWQ: their weights as they came, and what has been done to them.
struct Work(Vec<(&'static str, LinearWork)>);

struct LinearWork {
    original: Vec<f32>,
    rescale: Option<Rescale>,
    size: [usize; 2],
}

impl LinearWork {
    fn new(linear: &Linear) -> Self {
        Self { original: linear.values(), rescale: None, size: linear.weight.dims() }
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
    fn new(layer: &Layer) -> Self {
        Self(layer.linears().map(|(name, l)| (name, LinearWork::new(l))).into())
    }

    fn at(&self, part: &str) -> usize {
        self.0.iter().position(|(name, _)| *name == part).unwrap_or(0)
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
        for (part, linear) in layer.linears_mut().into_iter().filter(|(p, _)| parts.contains(p)) {
            linear.set_values(self.of(part).scaled());
        }
    }
}
