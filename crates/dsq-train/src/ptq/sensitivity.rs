//! Mixed precision: how much the model's predictions change when a few layers alone get a scheme (`sensitivity`), and which
//! scheme each gets so that a budget of bits is kept and these changes add up to the least (`allocate`). That changes of several
//! layers add up is an assumption. Not the codes of the result: any method makes these.
//!
//! Unlike calibration, which holds one layer, this holds the float model and the stream of its layers for one batch of text. Cost: for
//! each layer and scheme four passes through the rest of the model.

use super::journal::SEARCH;
use super::{Calibration, Journal, device, float_model, values};
use crate::TrainError;
use burn::tensor::Tensor;
use dsq_checkpoint::Checkpoint;
use dsq_model::{Layer, Teacher};
use dsq_quant::{InputGrid, QuantConfig, QuantScheme};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Linear layers that must share a scheme, because servers compute them as one matrix, and what each scheme does.
#[derive(Debug, Clone)]
pub struct Sensitivity {
    /// Their module names.
    pub modules: Vec<String>,
    /// Their weights.
    pub weights: usize,
    /// One for each candidate, in their order.
    pub choices: Vec<Choice>,
}

/// What a scheme does to layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Choice {
    /// Bits per weight, scales and zero points included.
    pub bits: f64,
    /// Mean divergence of the model's predictions from the float model's, in nats a token, when only these layers are rounded
    /// to nearest.
    pub divergence: f64,
}

/// Measures every set of layers to which `config` gives its common scheme, with each of the candidates, on the first batch of
/// `calibration`. Layers with a scheme of their own, and ignored ones, are left out. `on_progress`: sets of layers done, and all of them.
/// Each set that is measured is written down in the `journal`, if there is one, and not measured again.
///
/// # Errors
/// [`TrainError::Model`] for another architecture or tensors that cannot be read; [`TrainError::Quant`] naming the layer;
/// [`TrainError::Journal`].
pub fn sensitivity(
    checkpoint: &Checkpoint,
    config: &QuantConfig,
    candidates: &[QuantScheme],
    calibration: &Calibration,
    journal: Option<&Journal>,
    on_progress: &mut dyn FnMut(usize, usize),
) -> Result<Vec<Sensitivity>, TrainError> {
    let mut search = match journal {
        Some(journal) => journal.load::<Search>(SEARCH)?.map(|(search, _)| search).unwrap_or_default(),
        None => Search::default(),
    };
    if search.complete {
        return Ok(search.sets.into_iter().map(Sensitivity::from).collect());
    }
    let float = float_model(checkpoint, &device())?;
    let ids = Arc::new(calibration.batches().next().unwrap_or_default());
    let b = ids.len() / calibration.context().max(1);
    let (batch, x) = float.embedded(ids.clone(), b);
    let (states, logits) = float.states_and_logits(ids, b);
    // What each layer sees.
    let stream: Vec<Tensor<3>> = [x].into_iter().chain(states).collect();
    let teacher = Teacher { logits: Arc::new(values(logits)), temperature: 1.0 };

    // Sets of layers, each with the layer of the model that it lies in.
    let mut sets: Vec<(usize, Sensitivity)> = Vec::new();
    for (i, layer) in float.layers().iter().enumerate() {
        for (part, _) in layer.linears() {
            let module = format!("model.layers.{i}.{part}");
            if !config.is_common(&module) || sets.iter().any(|(_, s)| s.modules.contains(&module)) {
                continue;
            }
            let fused = checkpoint.config().fused_with(&module);
            let modules = fused.into_iter().filter(|m| config.is_common(m)).collect();
            sets.push((i, Sensitivity { modules, weights: 0, choices: Vec::new() }));
        }
    }
    // A weight that is not finite would spoil every prediction: named first, by rounding each set once.
    for ((i, set), scheme) in sets.iter().zip(candidates.iter().cycle()) {
        rounded(&float.layers()[*i], *i, &set.modules, scheme)?;
    }
    let (total, count) = (sets.len() * candidates.len(), sets.len());
    let mut done = 0;
    for (at, (i, set)) in sets.iter_mut().enumerate() {
        let i = *i;
        if let Some(measured) = search.sets.get(at).filter(|m| m.modules == set.modules) {
            *set = measured.clone().into();
            done += candidates.len();
            on_progress(done, total);
            continue;
        }
        for scheme in candidates {
            let (layer, weights, bits) = rounded(&float.layers()[i], i, &set.modules, scheme)?;
            set.weights = weights;
            let x: Tensor<3> = layer.forward(stream[i].clone(), &batch);
            let x = float.layers()[i + 1..].iter().fold(x, |x, layer| layer.forward(x, &batch));
            let divergence = super::blockwise::scalar(&float.divergence(x, teacher.clone()));
            if !divergence.is_finite() {
                return Err(TrainError::Activations { module: set.modules[0].clone(), value: divergence });
            }
            set.choices.push(Choice { bits: bits / weights.max(1) as f64, divergence });
            done += 1;
            on_progress(done, total);
        }
        if let Some(journal) = journal {
            search.sets.truncate(at);
            search.sets.push(Measured::from(&*set));
            search.complete = at + 1 == count;
            journal.save(SEARCH, &search, Vec::new())?;
        }
    }
    Ok(sets.into_iter().map(|(_, set)| set).collect())
}

/// What a journal has of the search.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Search {
    sets: Vec<Measured>,
    complete: bool,
}

/// A [`Sensitivity`], its floats as bits.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Measured {
    modules: Vec<String>,
    weights: usize,
    choices: Vec<[u64; 2]>,
}

impl From<&Sensitivity> for Measured {
    fn from(s: &Sensitivity) -> Self {
        let choices = s.choices.iter().map(|c| [c.bits.to_bits(), c.divergence.to_bits()]).collect();
        Self { modules: s.modules.clone(), weights: s.weights, choices }
    }
}

impl From<Measured> for Sensitivity {
    fn from(m: Measured) -> Self {
        let choice = |[bits, divergence]: [u64; 2]| Choice {
            bits: f64::from_bits(bits),
            divergence: f64::from_bits(divergence),
        };
        Self { modules: m.modules, weights: m.weights, choices: m.choices.into_iter().map(choice).collect() }
    }
}

/// Layer `i` with the linears `modules` rounded to nearest, the number of their weights and of their bits.
fn rounded(
    layer: &Layer,
    i: usize,
    modules: &[String],
    scheme: &QuantScheme,
) -> Result<(Layer, usize, f64), TrainError> {
    let mut layer = layer.clone();
    let (mut weights, mut bits) = (0, 0.0);
    for (part, linear) in layer.linears_mut() {
        let module = format!("model.layers.{i}.{part}");
        if !modules.contains(&module) {
            continue;
        }
        let [n, k] = linear.weight.dims();
        let quant = |source| TrainError::Quant { module: module.clone(), source };
        let matrix = dsq_kernels::quantize::quantize(&linear.values(), n, k, scheme.weights).map_err(quant)?;
        bits += scheme.weights.bits_per_weight(n, k).map_err(quant)? * (n * k) as f64;
        weights += n * k;
        linear.set_values(matrix.dequantize());
        linear.set_inputs(InputGrid::dynamic(scheme.activations));
    }
    Ok((layer, weights, bits))
}

/// Steps into which a budget is divided at most. Where the bits of all choices are whole numbers of some larger step (as they are
/// where groups are of one size), that is taken and nothing is lost; else they are rounded up, so that the budget is kept, and
/// what is lost is at most a step for each set of layers.
const STEPS: usize = 1 << 16;

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The index of the choice for each set of layers whose bits per weight, over all of them, are at most `bits` and whose
/// divergences add up to the least (dynamic programming over the budget).
///
/// # Errors
/// [`TrainError::Setting`] when even the fewest bits are more.
pub fn allocate(table: &[Sensitivity], bits: f64) -> Result<Vec<usize>, TrainError> {
    let size = |s: &Sensitivity, c: &Choice| c.bits * s.weights as f64;
    let total: f64 = table.iter().map(|s| s.weights as f64).sum();
    let least: f64 =
        table.iter().map(|s| s.choices.iter().map(|c| size(s, c)).fold(f64::INFINITY, f64::min)).sum::<f64>();
    let refuse = |least: f64| TrainError::Setting {
        field: "target bits".into(),
        expected: format!("at least {:.4}, the fewest that the candidates allow", least / total.max(1.0)),
        got: bits.to_string(),
    };
    let budget = bits * total;
    // What is asked for to the last digit is not refused for the rounding of a sum.
    if budget.is_nan() || least > budget * (1.0 + 1e-9) {
        return Err(refuse(least));
    }
    // Measured from the least of each set, so that a budget that is just enough is one.
    let spare = (budget - least).max(0.0);
    // Bits are whole, whatever the quotient by the weights lost.
    let over: Vec<Vec<u64>> = table
        .iter()
        .map(|s| {
            let base = s.choices.iter().map(|c| size(s, c)).fold(f64::INFINITY, f64::min);
            s.choices.iter().map(|c| (size(s, c) - base).round() as u64).collect()
        })
        .collect();
    let common = over.iter().flatten().fold(0, |g, &o| gcd(g, o)).max(1) as f64;
    let whole = spare * (1.0 + 1e-9) / common;
    let (step, steps) = if whole < STEPS as f64 { (common, whole as usize) } else { (spare / STEPS as f64, STEPS) };
    let cost = |o: u64| if o == 0 { 0 } else { (o as f64 / step).ceil().min((steps + 1) as f64) as usize };
    let extra: Vec<Vec<usize>> = over.iter().map(|o| o.iter().map(|&o| cost(o)).collect()).collect();
    // best[j]: the least sum of divergences of the sets so far with at most j steps.
    let mut best = vec![0.0f64; steps + 1];
    let mut taken: Vec<Vec<u8>> = Vec::with_capacity(table.len());
    for (s, extra) in table.iter().zip(&extra) {
        let mut next = vec![f64::INFINITY; steps + 1];
        let mut choice = vec![0u8; steps + 1];
        for (c, (option, &cost)) in s.choices.iter().zip(extra).enumerate() {
            for j in cost..=steps {
                let sum = best[j - cost] + option.divergence;
                if sum < next[j] {
                    (next[j], choice[j]) = (sum, c as u8);
                }
            }
        }
        best = next;
        taken.push(choice);
    }
    let mut left = steps;
    let mut out = vec![0; table.len()];
    for (i, choice) in taken.iter().enumerate().rev() {
        out[i] = usize::from(choice[left]);
        left -= extra[i][out[i]];
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn table(seed: u64, sets: usize) -> Vec<Sensitivity> {
        let mut s = seed | 1;
        let mut uniform = || {
            s = s.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (s >> 40) as f64 / (1u64 << 24) as f64
        };
        (0..sets)
            .map(|i| {
                let scale = uniform().powi(4);
                let choices = [2.25, 3.25, 4.25, 8.25]
                    .map(|bits| Choice { bits, divergence: scale * uniform() * 0.25f64.powf(bits) })
                    .to_vec();
                Sensitivity { modules: vec![i.to_string()], weights: 100 + (uniform() * 1000.0) as usize, choices }
            })
            .collect()
    }

    fn sums(table: &[Sensitivity], chosen: &[usize]) -> (f64, f64) {
        let of =
            |f: fn(&Sensitivity, &Choice) -> f64| table.iter().zip(chosen).map(|(s, &c)| f(s, &s.choices[c])).sum();
        (of(|s, c| c.bits * s.weights as f64), of(|_, c| c.divergence))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        #[test]
        fn the_budget_is_kept_and_nothing_cheaper_is_better(seed: u64, bits in 2.25f64..8.25) {
            let table = table(seed, 5);
            let total: f64 = table.iter().map(|s| s.weights as f64).sum();
            let chosen = allocate(&table, bits).unwrap();
            let (size, found) = sums(&table, &chosen);
            // Half a bit of each set is what whole numbers of bits can lose.
            prop_assert!(size <= bits * total + 5.0);
            // Every allocation, within the budget less what rounding up may take.
            let slack = (bits * total) * 5.0 / STEPS as f64;
            for code in 0..4usize.pow(5) {
                let other: Vec<usize> = (0..5).map(|i| code / 4usize.pow(i) % 4).collect();
                let (size, sum) = sums(&table, &other);
                prop_assert!(size > bits * total - slack || sum >= found * (1.0 - 1e-12), "{other:?} {sum} {chosen:?} {found}");
            }
        }
    }

    #[test]
    fn budgets_at_and_below_the_least_are_kept_and_refused() {
        let table = table(3, 4);
        assert_eq!(allocate(&table, 2.25).unwrap(), [0; 4]);
        assert_eq!(allocate(&[], 4.0).unwrap(), [0; 0]);
        for bits in [2.2, f64::NAN, -1.0] {
            let e = allocate(&table, bits).unwrap_err();
            assert!(e.to_string().contains("2.25") && e.exit_code() == 2, "{e}");
        }
        let rich = allocate(&table, 100.0).unwrap();
        let best = |s: &Sensitivity| s.choices.iter().map(|c| c.divergence).fold(f64::INFINITY, f64::min);
        assert!(table.iter().zip(&rich).all(|(s, &c)| s.choices[c].divergence == best(s)));
    }
}
