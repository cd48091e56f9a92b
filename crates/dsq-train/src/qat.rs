//! Quantization-aware training of a Llama: which layers see their weights on the grid (`prepare`), and the matrices
//! that ship (`convert`), by ranges of the weights or by learned grids. Exact: what `convert` returns dequantizes to the weights
//! of the prepared forward pass, bit for bit. Not the training loop (see `lm`).

use crate::adamw::ParamGroup;
use crate::{Adapters, TrainError};
use burn::module::Module;
use dsq_checkpoint::ModelConfig;
use dsq_model::layers::Linear;
use dsq_model::resnet::GridPart;
use dsq_model::{Llama, Lora};
use dsq_quant::{GgufGrid, InputGrid, QuantArgs, QuantConfig, QuantizedMatrix};
use std::collections::HashMap;

/// Switches fake quantization on in every linear layer that `config` names, and off in the others. Static inputs stay in float
/// until their grids are known ([`quantize_inputs`]).
///
/// # Errors
/// [`TrainError::Quant`] for blocks of GGUF that do not divide a row; [`TrainError::Setting`] for an ignore pattern that matches no layer, a scheme that leaves no layer to quantize, layers that read
/// one tensor of which not all have the same static grid, or a group size that does not divide a layer's inputs (all such layers
/// are listed).
pub fn prepare(mut model: Llama, config: &QuantConfig) -> Result<Llama, TrainError> {
    check(&model, config)?;
    for (name, layer) in model.linears_mut() {
        layer.set_quant(config.scheme_for(&name).map(|s| s.weights));
        if let Some(grid) = config.blocks_for(&name) {
            layer.set_blocks(grid).map_err(|source| TrainError::Quant { module: name, source })?;
        }
    }
    Ok(share_global_scales(quantize_inputs(model, config, &[])))
}

/// Gives the prepared layers whose scheme has a global scale (NVFP4) that of their present weights; layers that a server computes as one
/// matrix (q, k and v; gate and up) share the one of the largest magnitude of all, as in `dsq quantize`. To be called whenever the
/// weights have moved. Layers with learned grids keep the global scale that their grids started with.
pub fn share_global_scales(mut model: Llama) -> Llama {
    let has_one = |l: &Linear| l.grid().is_none() && l.quant().is_some_and(|a| a.has_global_scale());
    let layers = model.linears().into_iter().filter(|(_, l)| has_one(l));
    let largest: HashMap<String, f32> = layers.map(|(name, l)| (name, l.largest_magnitude())).collect();
    if largest.is_empty() {
        return model;
    }
    let config = ModelConfig::Llama(model.config().clone());
    for (name, layer) in model.linears_mut().into_iter().filter(|(name, _)| largest.contains_key(name)) {
        let fused = config.fused_with(&name);
        let shared = fused.iter().filter_map(|m| largest.get(m)).fold(0.0f32, |m, &x| m.max(x));
        layer.set_global_scale(QuantArgs::global_scale(shared));
    }
    model
}

/// Makes the stored scales and zero points of static inputs parameters (LSQ, LSQ+), starting at the grids that the layers have. Of
/// layers that read one tensor the first holds the grid; the others follow it ([`share_input_grids`]).
pub fn learn_inputs(mut model: Llama) -> Llama {
    let config = ModelConfig::Llama(model.config().clone());
    for (name, layer) in model.linears_mut() {
        if config.fused_with(&name)[0] == name {
            layer.learn_inputs();
        }
    }
    share_input_grids(model)
}

/// Tells the layers what ships for the learned grids of their inputs. To be called whenever these have moved.
pub fn share_input_grids(mut model: Llama) -> Llama {
    let grid = |l: &Linear| Some(l.learned_input()?.grid(l.inputs()?.args));
    let layers = model.linears().into_iter();
    let learned: HashMap<String, InputGrid> = layers.filter_map(|(name, l)| Some((name, grid(l)?))).collect();
    let config = ModelConfig::Llama(model.config().clone());
    for (name, layer) in model.linears_mut() {
        if let Some(grid) = learned.get(&config.fused_with(&name)[0]) {
            layer.follow_input(*grid);
        }
    }
    model
}

/// Makes the scales and zero points of every prepared layer parameters (LSQ, LSQ+), starting at the grids of least squared
/// error.
///
/// # Errors
/// [`TrainError::Quant`] naming the layer, for weights that are not finite or a scale that overflows its dtype.
pub fn learn_grids(mut model: Llama) -> Result<Llama, TrainError> {
    for (module, layer) in model.linears_mut() {
        layer.learn_grid().map_err(|source| TrainError::Quant { module, source })?;
    }
    Ok(model)
}

/// Freezes everything and gives each prepared layer an adapter (LoRA) in its weight's place: what is put on the grid is
/// `w + alpha / r * B A`. New ones are seeded and change nothing, because B is 0. Layers that stay in float, norms and the
/// embedding are not trained at all.
pub fn adapt(model: Llama, adapters: &Adapters, seed: u64) -> Llama {
    let mut model = model.freeze_floats();
    for (i, (_, layer)) in model.linears_mut().into_iter().enumerate() {
        if layer.quant().is_none() {
            *layer = layer.clone().no_grad();
            continue;
        }
        let weight = layer.weight.val();
        let (rank, alpha) = (adapters.rank, adapters.alpha as f32);
        layer.set_lora(Lora::new(weight.dims(), rank, alpha, seed, i, &weight.device()));
    }
    model
}

/// Puts every adapter into its weight, for good. Codes and outputs keep every bit; the layers stay prepared.
pub fn merge(mut model: Llama) -> Llama {
    model.linears_mut().into_iter().for_each(|(_, layer)| layer.merge_lora());
    model
}

/// Ends of the names under which checkpoints keep adapters.
pub(crate) const LORA_A: &str = "lora.a";
pub(crate) const LORA_B: &str = "lora.b";

/// What stands between the name of a layer and [`GRID_SCALE`] or [`GRID_ZERO`] where the grid is that of its input.
pub(crate) const INPUT: &str = "input";
/// Ends of the parameter paths of learned grids.
pub(crate) const GRID_SCALE: &str = "grid.scale";
pub(crate) const GRID_ZERO: &str = "grid.zero";
/// End of the name under which checkpoints keep the global scale of a learned grid.
pub(crate) const GRID_GLOBAL: &str = "grid.global";

/// How fast learned grids move, by the paths of their parameters.
pub(crate) struct GridRates {
    rate: f64,
    /// Layer names and their largest codes.
    codes: Vec<(String, f64)>,
}

impl GridRates {
    /// `rate` of the optimizer's own, for the grids of `linears` and of their inputs.
    pub(crate) fn new<'a>(rate: f64, linears: impl IntoIterator<Item = (String, &'a Linear)>) -> Self {
        let largest = |args: &QuantArgs| f64::from(args.qtype.qmax());
        let codes = |(name, l): (String, &Linear)| {
            let input = l.inputs().map(|grid| (format!("{name}.{INPUT}"), largest(&grid.args)));
            [l.quant().map(|args| (name, largest(args))), input]
        };
        Self { rate, codes: linears.into_iter().flat_map(codes).flatten().collect() }
    }

    /// [`grid_group`], by the path; `None` for another parameter.
    pub(crate) fn group(&self, path: &str, values: &[f32]) -> Option<ParamGroup> {
        let part = if path.ends_with(GRID_SCALE) {
            GridPart::Scale
        } else {
            let layer = path.strip_suffix(GRID_ZERO)?.trim_end_matches('.');
            // The path within a module is the end of the name within the model.
            let code = self.codes.iter().find(|(name, _)| name.ends_with(layer));
            GridPart::Zero { largest: code.map_or(1.0, |(_, c)| *c) }
        };
        let group = grid_group(part, values);
        Some(ParamGroup { rate: self.rate * group.rate, ..group })
    }
}

/// How a part of a learned grid moves: scales by a share of their root mean square, zero points by that share of the
/// largest code, which moves the largest value as far; the rate is the optimizer's. No decay.
pub(crate) fn grid_group(part: GridPart, values: &[f32]) -> ParamGroup {
    let rate = match part {
        GridPart::Scale => rms(values),
        GridPart::Zero { largest } => largest,
    };
    ParamGroup { rate, decay: 0.0 }
}

/// Root mean square; 0 of nothing.
pub(crate) fn rms(values: &[f32]) -> f64 {
    (values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / values.len().max(1) as f64).sqrt()
}

/// Switches fake quantization off: the float model of the same weights.
pub fn release(mut model: Llama) -> Llama {
    for (_, layer) in model.linears_mut() {
        layer.set_quant(None);
        layer.set_inputs(None);
    }
    model
}

/// Puts the inputs of the layers that `config` names on their grids, and no weight: those found when the model runs, and static
/// ones by module name from `fixed`.
pub fn quantize_inputs(mut model: Llama, config: &QuantConfig, fixed: &[(String, InputGrid)]) -> Llama {
    for (name, layer) in model.linears_mut() {
        let known = fixed.iter().find(|(module, _)| *module == name).map(|(_, grid)| *grid);
        let found = InputGrid::dynamic(config.scheme_for(&name).and_then(|s| s.activations));
        layer.set_inputs(found.or(known));
    }
    model
}

/// Post-training quantization by rounding: the model that `convert` and an export of `model` would give, its float weights on
/// their grids and its inputs put on theirs, static ones on those of `fixed` ([`crate::observe_inputs`]).
///
/// # Errors
/// As [`prepare`] and [`convert`].
pub fn round_to_nearest(
    model: Llama,
    config: &QuantConfig,
    fixed: &[(String, InputGrid)],
) -> Result<Llama, TrainError> {
    let model = prepare(model, config)?;
    let quantized = convert(&model)?;
    let blocks = convert_blocks(&model)?;
    let mut model = quantize_inputs(release(model), config, fixed);
    let mut next = quantized.into_iter().peekable();
    for (name, layer) in model.linears_mut() {
        if let Some((_, matrix)) = next.next_if(|(n, _)| *n == name) {
            layer.set_values(matrix.dequantize());
        }
        if let Some((_, grid, bytes)) = blocks.iter().find(|(n, ..)| *n == name) {
            let mut values = vec![0.0; layer.weight.dims().iter().product()];
            grid.dequantize(bytes, &mut values).map_err(|source| TrainError::Quant { module: name, source })?;
            layer.set_values(values);
        }
    }
    Ok(model)
}

/// The matrices that ship, by module name: the weights of the prepared layers, quantized by the formula that the
/// forward pass used.
///
/// # Errors
/// [`TrainError::Quant`] naming the layer, for weights that are not finite or a scale that overflows its dtype.
pub fn convert(model: &Llama) -> Result<Vec<(String, QuantizedMatrix)>, TrainError> {
    let mut out = Vec::new();
    for (name, layer) in model.linears() {
        match layer.quantized() {
            Ok(None) => {}
            Ok(Some(matrix)) => out.push((name, matrix)),
            Err(source) => return Err(TrainError::Quant { module: name, source }),
        }
    }
    Ok(out)
}

/// [`convert`] for the layers on blocks of GGUF: module, grid, and the blocks row by row, as a GGUF file stores them but for the order of
/// query and key rows.
///
/// # Errors
/// As [`convert`].
pub fn convert_blocks(model: &Llama) -> Result<Vec<(String, GgufGrid, Vec<u8>)>, TrainError> {
    let mut out = Vec::new();
    for (name, layer) in model.linears() {
        match layer.quantized_blocks() {
            Ok(None) => {}
            Ok(Some((grid, bytes))) => out.push((name, grid, bytes)),
            Err(source) => return Err(TrainError::Quant { module: name, source }),
        }
    }
    Ok(out)
}

/// Whether `config` fits the model.
///
/// # Errors
/// As [`prepare`].
pub fn check(model: &Llama, config: &QuantConfig) -> Result<(), TrainError> {
    let setting =
        |field: &str, expected: String, got: String| TrainError::Setting { field: field.into(), expected, got };
    let names: Vec<String> = model.linears().into_iter().map(|l| l.0).collect();
    // A tied model has no lm_head of its own; ignoring it by name is still right.
    let known: Vec<String> = names.iter().cloned().chain(["lm_head".to_owned()]).collect();
    let unmatched = config.unmatched(&known);
    if !unmatched.is_empty() {
        let expected = format!("patterns that match a layer ({}, ...)", names[..names.len().min(7)].join(", "));
        return Err(setting("quant.ignore", expected, unmatched.join(", ")));
    }
    let architecture = ModelConfig::Llama(model.config().clone());
    let form = |module: &str| config.scheme_for(module).and_then(|s| s.activations).filter(|a| !a.is_dynamic());
    let mut bad = Vec::new();
    let mut any = false;
    for (name, layer) in model.linears() {
        if let Some(other) = architecture.fused_with(&name).into_iter().find(|other| form(other) != form(&name)) {
            // One stored grid for what is one tensor.
            let expected = format!("one form of the tensor that {name} and {other} read");
            let shown = |module| form(module).map_or("no static grid".into(), |a| format!("static {}", a.qtype.name()));
            return Err(setting("activations", expected, format!("{} and {}", shown(&name), shown(&other))));
        }
        if let Some(scheme) = config.scheme_for(&name) {
            any = true;
            if let Err(e) = scheme.check_length(layer.weight.dims()[1]) {
                bad.push(format!("{name} ({e})"));
            }
        }
    }
    if !bad.is_empty() {
        let expected = "a divisor of every quantized layer's inputs".into();
        return Err(setting("quant.group_size", expected, bad.join("; ")));
    }
    if !any {
        return Err(setting("quant.ignore", "at least one layer left to quantize".into(), "none".into()));
    }
    Ok(())
}
