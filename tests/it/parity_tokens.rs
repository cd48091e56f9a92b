//! Parity of language models whose activations are quantized, for each token (W8A8, W4A8, FP8_DYNAMIC) or on stored grids
//! (W8A8, W4A8, W4A4, FP8): the same codes and grids in the training graph, in the folder and in the runtime, and logits that
//! differ by no more than a code of an activation here and there. Float activations are `parity_llama.rs`.

use crate::parity_llama::{Case, bits, compare};
use dsq_checkpoint::Checkpoint;
use dsq_model::Llama;
use dsq_quant::{FloatType, Granularity, InputGrid, Mapping, ObserverKind, QuantConfig, QuantScheme};
use dsq_runtime::{LlamaRuntime, Logits};
use dsq_train::{InputRanges, LmPhase, LmTrainConfig, observe_inputs, qat};
use std::path::Path;
use std::sync::Arc;

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let d: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (d / a.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>()).sqrt()
}

/// Both passes round the same numbers but for the last bits of their sums. Where such a number lies on the edge of two codes
/// they choose different ones, which moves the numbers of later layers and so their codes: at the worst the passes round
/// independently of each other and are sqrt(2) times as far apart as either is from the model with float activations. Without
/// such a number, which is the usual case for a single token, they differ by the rounding of f32 alone.
fn agree(case: &Case, inputs: &[(String, InputGrid)], out: &Path) -> bool {
    let seed = out.display();
    let prepared = qat::prepare(case.model(), &case.quant).unwrap();
    let prepared = qat::quantize_inputs(prepared, &case.quant, inputs);
    let converted = qat::convert(&prepared).unwrap();
    case.export(&prepared, &converted, out);

    let ckpt = Checkpoint::open(out).unwrap();
    compare(&ckpt, &prepared, &converted).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    assert!(ckpt.faults().iter().all(|f| f.severity == dsq_checkpoint::Severity::Note), "{:?}", ckpt.faults());
    for (module, layer) in prepared.linears() {
        assert_eq!(ckpt.input_grid(&module).unwrap().as_ref(), layer.inputs(), "seed {seed}: {module}");
    }
    let ids = case.ids(0);
    let tokens: Arc<Vec<i32>> = Arc::new(ids.iter().map(|&id| id as i32).collect());
    let host = |model: &Llama| model.logits(tokens.clone(), 1).into_data().try_into_vec::<f32>().unwrap();
    let graph = host(&prepared);
    assert_eq!(bits(&host(&Llama::from_checkpoint(&ckpt, &Default::default()).unwrap())), bits(&graph), "{seed}");
    let rounded = qat::round_to_nearest(case.model(), &case.quant, inputs).unwrap();
    assert_eq!(bits(&host(&rounded)), bits(&graph), "seed {seed}: rounding to nearest");

    let runtime = LlamaRuntime::load(&ckpt, 2).unwrap();
    let mut cache = runtime.new_cache(case.tokens).unwrap();
    let got = runtime.forward(&ids, &mut cache, Logits::All).unwrap();
    let float = host(&qat::quantize_inputs(rounded, &weights_only(&case.quant), &[]));
    let (apart, rounding) = (distance(&graph, &got), distance(&float, &graph));
    assert!(rounding > 1e-4, "seed {seed}: activations are not quantized: {rounding}");
    assert!(apart < 1.5 * rounding, "seed {seed}: graph and runtime {apart}, quantization {rounding}");
    let vocab = case.config.vocab_size;
    distance(&graph[..vocab], &got[..vocab]) < 1e-5
}

fn with_scheme(mut case: Case, scheme: QuantScheme) -> Case {
    let ignore = if case.config.tie_word_embeddings { vec![] } else { vec!["lm_head".to_owned()] };
    case.quant = QuantConfig::new(scheme, &ignore).unwrap();
    case
}

#[test]
fn graph_folder_and_runtime_agree_where_activations_are_quantized_for_each_token() {
    let dir = tempfile::tempdir().unwrap();
    let (mut near, mut count) = (0, 0);
    for seed in 0..24 {
        let name = ["W8A8", "W4A8", "FP8_DYNAMIC"][seed as usize % 3];
        let case = Case::new(seed);
        let granularity = case.quant.scheme.weights.granularity;
        let granularity = if name == "W4A8" { granularity } else { Granularity::PerChannel };
        let mut scheme = QuantScheme::preset(name, granularity, FloatType::Bf16).unwrap().for_tokens();
        if seed % 4 == 0 && name != "FP8_DYNAMIC" {
            scheme.weights.mapping = Mapping::Asymmetric;
        }
        if seed % 5 == 0 && name != "FP8_DYNAMIC" {
            scheme = scheme.with_asymmetric_activations().unwrap();
        }
        near += usize::from(agree(&with_scheme(case, scheme), &[], &dir.path().join(seed.to_string())));
        count += 1;
    }
    assert!(2 * near > count, "only {near} of {count} differ by rounding alone");
}

#[test]
fn graph_folder_and_runtime_agree_where_activations_have_stored_grids() {
    let dir = tempfile::tempdir().unwrap();
    let (mut near, mut count) = (0, 0);
    for seed in 0..24 {
        let name = ["W8A8", "FP8", "W4A4", "W4A8"][seed as usize % 4];
        let case = Case::new(seed);
        let granularity = match name {
            "FP8" => Granularity::PerTensor,
            "W8A8" => Granularity::PerChannel,
            _ => case.quant.scheme.weights.granularity,
        };
        let scheme = QuantScheme::preset(name, granularity, FloatType::Bf16).unwrap();
        let mut scheme = if name == "W4A4" { scheme } else { scheme.for_tensor() };
        if seed % 3 == 0 && name != "FP8" {
            scheme = scheme.with_asymmetric_activations().unwrap();
        }
        let case = with_scheme(case, scheme);
        // As QAT starts: ranges of the float model, one observer or another, on a text that holds the one below.
        let observer = [ObserverKind::MinMax, ObserverKind::MovingAverage, ObserverKind::Percentile(99.9)];
        let inputs = InputRanges {
            calibration_batches: 2,
            observer: observer[seed as usize / 4 % 3],
            rate: 0.5,
            freeze_step: 0,
        };
        let phase = LmPhase {
            steps: 1,
            batch_size: 2,
            seq_len: 16,
            learning_rate: 1e-3,
            warmup_steps: 0,
            final_rate: 0.1,
            weight_decay: 0.0,
            grad_clip: 1.0,
        };
        let config = LmTrainConfig {
            float: phase.clone(),
            qat: phase,
            distill: None,
            learned_scales: None,
            adapters: None,
            inputs: Some(inputs),
            float_equal_tokens: false,
            save_every: 1,
            seed,
        };
        let text: Vec<u32> = (0..6).flat_map(|i| case.ids(i)).cycle().take(96).collect();
        let grids = observe_inputs(&case.model(), &text, &config, &case.quant).unwrap();
        assert_eq!(grids.len(), 7 * case.config.num_hidden_layers);
        near += usize::from(agree(&case, &grids, &dir.path().join(seed.to_string())));
        count += 1;
    }
    assert!(2 * near > count, "only {near} of {count} differ by rounding alone");
}

fn weights_only(quant: &QuantConfig) -> QuantConfig {
    let scheme = QuantScheme { activations: None, ..quant.scheme };
    QuantConfig { scheme, ..quant.clone() }
}
