//! The scales of a quantized KV cache: the largest magnitudes of keys (after the rotary embedding) and values over all
//! calibration tokens, layer by layer, in the model as it will ship. Not the codes of weights, which are chosen before (see
//! `layer.rs`), and not the rule that makes a scale of a magnitude (`dsq_quant::KvGrid`).
//!
//! One walk after everything else, whatever the method was: weights, norms and embedding are what the export writes, inputs lie on
//! the grids of their tokens, and each layer sees what the layers before it make with *their* keys and values on the grids just
//! found. (While codes of weights are chosen, attention sees keys and values in float.)

use super::journal::CACHE;
use super::{Calibration, Journal, PtqProgress, device, embedded};
use crate::TrainError;
use dsq_checkpoint::LlamaConfig;
use dsq_model::{Layer, ModelError};
use dsq_quant::{InputGrid, KvGrid, QParams, QuantArgs};
use serde::{Deserialize, Serialize};

/// The grids of every layer, for the scheme `args`. `values` gives a tensor of the model that ships by its Hugging Face name,
/// dequantized where it is codes; `inputs` gives the grid of a layer's inputs by its module name. Runs on the current rayon pool; any number of
/// threads gives the same bits. Each layer that is passed is written down in the `journal`, if there is one, and the walk goes on from there.
///
/// # Errors
/// [`TrainError::Keys`] (exit code 6) naming the layer for keys or values that are not finite; [`TrainError::Model`] for a tensor that
/// is missing or has another shape; [`TrainError::Quant`] for another scheme than a cache can have; [`TrainError::Journal`].
pub fn kv_grids<E: From<TrainError>>(
    model: &LlamaConfig,
    inputs: impl Fn(&str) -> Option<InputGrid>,
    args: QuantArgs,
    calibration: &Calibration,
    mut values: impl FnMut(&str) -> Result<Option<Vec<f32>>, E>,
    journal: Option<&Journal>,
    on_progress: &mut dyn FnMut(&PtqProgress),
) -> Result<Vec<KvGrid>, E> {
    let mut tensor = |name: &str, shape: &[usize]| -> Result<Vec<f32>, E> {
        let problem = |problem: String| TrainError::from(ModelError::Tensor { name: name.into(), problem });
        let data = values(name)?.ok_or_else(|| problem(format!("expected shape {shape:?}, got no such tensor")))?;
        match data.len() == shape.iter().product::<usize>() {
            true => Ok(data),
            false => Err(problem(format!("expected shape {shape:?}, got {} values", data.len())).into()),
        }
    };
    let saved = match journal {
        Some(journal) => journal.load::<Walk>(CACHE)?,
        None => None,
    };
    let grid = |[k, v]: [u32; 2]| {
        let params = |bits| QParams { scale: f32::from_bits(bits), zero: 0 };
        KvGrid { args, k: params(k), v: params(v) }
    };
    let mut grids: Vec<KvGrid> = saved.iter().flat_map(|(w, _)| w.scales.iter().copied().map(grid)).collect();
    if grids.len() >= model.num_hidden_layers {
        return Ok(grids);
    }
    let table = tensor("model.embed_tokens.weight", &[model.vocab_size, model.hidden_size])?;
    let mut stream = embedded(model, table, calibration);
    if let Some((_, saved)) = &saved {
        saved.stream("stream", stream.iter_mut().map(|(_, x)| x))?;
    }
    let (done, total) = (grids.len() * stream.len(), model.num_hidden_layers * stream.len());
    let mut progress = PtqProgress { done, total, layer: 0 };
    for i in grids.len()..model.num_hidden_layers {
        progress.layer = i;
        let mut layer = Layer::from_values(model, i, &device(), &mut tensor)?;
        for (part, linear) in layer.linears_mut() {
            linear.set_inputs(inputs(&format!("model.layers.{i}.{part}")));
        }
        let module = || format!("model.layers.{i}.self_attn");
        let mut largest = [0.0f32; 2];
        for (batch, x) in &stream {
            let found = layer.keys_and_values(layer.qkv_input(x.clone()), batch);
            for ((most, x), what) in largest.iter_mut().zip(found).zip(["keys", "values"]) {
                // A maximum would pass over NaN.
                if let Some(&value) = x.iter().find(|x| !x.is_finite()) {
                    return Err(TrainError::Keys { module: module(), what, value }.into());
                }
                *most = x.iter().fold(*most, |m, x| m.max(x.abs()));
            }
        }
        let grid = KvGrid::from_absmax(args, largest[0], largest[1])
            .map_err(|source| TrainError::Quant { module: module(), source })?;
        layer.set_kv_grid(Some(grid));
        grids.push(grid);
        for (batch, x) in &mut stream {
            *x = layer.forward(x.clone(), batch);
            progress.done += 1;
            on_progress(&progress);
        }
        if let Some(journal) = journal {
            // After the last layer nothing looks at the stream.
            let last = i + 1 == model.num_hidden_layers;
            let stream = if last { Vec::new() } else { stream.iter().map(|(_, x)| x).collect() };
            let scales = grids.iter().map(|g| [g.k.scale, g.v.scale].map(f32::to_bits)).collect();
            journal.save_walk(CACHE, &Walk { scales }, vec![("stream", stream)])?;
        }
    }
    Ok(grids)
}

/// What a journal has of the walk: the bits of the scales of keys and values of the layers that were passed.
#[derive(Serialize, Deserialize)]
struct Walk {
    scales: Vec<[u32; 2]>,
}
