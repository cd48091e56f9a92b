//! The observers' state against ranges computed from the values themselves, and the way back from a checkpoint.

use super::*;
use crate::lm::LmPhase;
use dsq_model::Sequences;
use dsq_quant::{FloatType, Granularity, ObserverKind, Percentile, QuantScheme};
use std::path::Path;
use std::sync::Arc;

fn model(tied: bool) -> LlamaConfig {
    let text = format!(
        r#"{{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":32,"intermediate_size":48,
        "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,"vocab_size":64,
        "max_position_embeddings":32,"rms_norm_eps":1e-5,"rope_theta":10000.0,"tie_word_embeddings":{tied}}}"#
    );
    match ModelConfig::from_json(&text, Path::new("config.json")).unwrap() {
        ModelConfig::Llama(c) => c,
        _ => unreachable!("the text says llama"),
    }
}

fn config(observer: ObserverKind) -> LmTrainConfig {
    let phase = LmPhase {
        steps: 4,
        batch_size: 3,
        seq_len: 16,
        learning_rate: 1e-3,
        warmup_steps: 0,
        final_rate: 0.1,
        weight_decay: 0.0,
        grad_clip: 1.0,
    };
    LmTrainConfig {
        float: phase.clone(),
        qat: phase,
        distill: None,
        learned_scales: None,
        adapters: None,
        inputs: Some(InputRanges { calibration_batches: 5, observer, rate: 0.3, freeze_step: 2 }),
        float_equal_tokens: false,
        save_every: 4,
        seed: 5,
    }
}

fn quant(activations: QuantArgs) -> QuantConfig {
    let scheme = QuantScheme::preset("W4A16", Granularity::PerChannel, FloatType::F32).unwrap();
    QuantConfig::new(QuantScheme { activations: Some(activations), ..scheme }, &[]).unwrap()
}

fn w4a4() -> QuantArgs {
    QuantScheme::preset("W4A4", Granularity::PerChannel, FloatType::F32).unwrap().activations.unwrap()
}

fn tokens() -> Vec<u32> {
    (0..400u32).map(|i| (i * i * 7 + i / 5) % 64).collect()
}

/// The inputs of q, k and v; o; gate and up; down of each layer, and of the head: values of each batch.
fn values(llama: &Llama, config: &LmTrainConfig) -> Vec<Vec<Vec<f32>>> {
    let host = |t: &Tensor<3>| t.clone().into_data().try_to_vec::<f32>().unwrap();
    let tokens = tokens();
    let mut windows = Windows::new(&tokens, config.qat.seq_len, config.seed, 2);
    let mut out = vec![Vec::new(); 4 * llama.layers().len() + 1];
    for batch in 0..config.inputs.as_ref().unwrap().calibration_batches {
        let (ids, _) = windows.batch((batch * 3) as u64, 3);
        let (shape, mut x): (Sequences, Tensor<3>) = llama.embedded(Arc::new(ids), 3);
        for (i, layer) in llama.layers().iter().enumerate() {
            let h = layer.qkv_input(x.clone());
            let attended = layer.o_input(h.clone(), &shape);
            x = layer.after_attention(x, attended.clone());
            let g = layer.gate_up_input(x.clone());
            let inner = layer.mlp.blocks()[0].inner(g.clone());
            for (site, t) in [&h, &attended, &g, &inner].into_iter().enumerate() {
                out[4 * i + site].push(host(t));
            }
            x = layer.after_feed_forward(x);
        }
        // The norm's weight is 1 in a new model.
        let rows = host(&x);
        let normed = rows.chunks(32).flat_map(|r| {
            let rms = (r.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / 32.0 + 1e-5).sqrt();
            r.iter().map(move |v| (f64::from(*v) / rms) as f32)
        });
        out.last_mut().unwrap().push(normed.collect());
    }
    out
}

#[test]
fn the_state_after_calibration_is_that_of_the_values_themselves() {
    for observer in [ObserverKind::MinMax, ObserverKind::MovingAverage, ObserverKind::Percentile(99.0)] {
        for tied in [true, false] {
            let (config, model) = (config(observer), model(tied));
            let llama = Llama::new(&model, 7, &Device::flex());
            let mut inputs = Inputs::new(&model, &quant(w4a4()), &config).unwrap().unwrap();
            inputs.calibrate(&llama, &tokens(), &config).unwrap();
            assert_eq!(
                inputs.sites.len(),
                if tied { 8 } else { 9 },
                "4 in each layer, and the head where it is a layer"
            );
            for (i, (site, batches)) in inputs.sites.iter().zip(values(&llama, &config)).enumerate() {
                let ends = |b: &Vec<f32>| b.iter().fold((f32::MAX, f32::MIN), |(l, h), v| (l.min(*v), h.max(*v)));
                let want = match observer {
                    ObserverKind::MinMax => ends(&batches.concat()),
                    ObserverKind::MovingAverage => {
                        let follow = |a: f32, b: f32| a + (b - a) * 0.3;
                        batches.iter().map(ends).reduce(|a, b| (follow(a.0, b.0), follow(a.1, b.1))).unwrap()
                    }
                    ObserverKind::Percentile(p) => {
                        let mut all = Percentile::new(p).unwrap();
                        all.observe(&batches.concat()).unwrap();
                        all.range().unwrap()
                    }
                };
                let got = site.observer.range().unwrap();
                if i == 8 {
                    // A norm computed by another formula: 2^-8 is half a bin of the percentiles.
                    assert!((got.0 - want.0).abs() < 0.01 * want.0.abs() && (got.1 - want.1).abs() < 0.01 * want.1);
                } else {
                    assert_eq!(got, want, "{observer:?} {:?}", site.modules);
                }
            }
            let grids = inputs.grids().unwrap();
            assert_eq!(grids.len(), llama.linears().len());
            for ((module, grid), (name, _)) in grids.iter().zip(llama.linears()) {
                let site = inputs.sites.iter().find(|s| s.modules.contains(module)).unwrap();
                let (lo, hi) = site.observer.range().unwrap();
                assert_eq!((*grid, module.as_str()), (InputGrid::of_range(w4a4(), lo, hi).unwrap(), name.as_str()));
            }
            assert_eq!(grids, observe_inputs(&llama, &tokens(), &config, &quant(w4a4())).unwrap());
        }
    }
}

#[test]
fn a_step_that_follows_sees_its_own_batch_first_and_then_uses_the_grid() {
    let (config, model, quant) = (config(ObserverKind::MovingAverage), model(true), quant(w4a4()));
    let bits = |t: Tensor<3>| -> Vec<u32> {
        t.into_data().try_to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
    };
    let mut llama = Llama::new(&model, 7, &Device::flex().autodiff());
    let mut inputs = Inputs::new(&model, &quant, &config).unwrap().unwrap();
    inputs.calibrate(&llama, &tokens(), &config).unwrap();
    assert!(inputs.follow(0) && inputs.follow(1) && !inputs.follow(2));
    let before = inputs.grids().unwrap();
    let ids = Arc::new((0..32).map(|i| i * 5 % 64).collect::<Vec<i32>>());
    let (states, logits) = llama.watched(ids.clone(), 2, &mut |modules, x| inputs.observe(modules, x)).unwrap();
    let after = inputs.grids().unwrap();
    assert!(before.iter().zip(&after).all(|(a, b)| a.0 == b.0 && a.1 != b.1));
    // The pass itself put its inputs on the new grids, and they stay.
    for (module, layer) in llama.linears() {
        assert_eq!(layer.inputs(), after.iter().find(|(m, _)| *m == module).map(|(_, g)| g));
    }
    let (again, plain) = llama.states_and_logits(ids, 2);
    assert_eq!(bits(logits), bits(plain));
    assert!(states.into_iter().zip(again).all(|(a, b)| bits(a) == bits(b)));
}

#[test]
fn states_come_back_and_what_cannot_be_one_is_refused_by_name() {
    for observer in [ObserverKind::MinMax, ObserverKind::MovingAverage, ObserverKind::Percentile(99.9)] {
        let (config, model, quant) = (config(observer), model(false), quant(w4a4()));
        let llama = Llama::new(&model, 7, &Device::flex());
        let new = || Inputs::new(&model, &quant, &config).unwrap().unwrap();
        let mut inputs = new();
        inputs.calibrate(&llama, &tokens(), &config).unwrap();
        let state = inputs.state("");
        let mut back = new();
        assert_eq!(back.restore(&state), Ok(true));
        assert_eq!(back.grids().unwrap(), inputs.grids().unwrap());
        // Both go on alike.
        for inputs in [&mut inputs, &mut back] {
            inputs.calibrate(&llama, &tokens()[100..], &config).unwrap();
        }
        assert_eq!(back.state("x."), inputs.state("x."));
        assert_eq!(new().restore(&[]), Ok(false));
        let name = "model.layers.0.self_attn.o_proj.input.range".to_owned();
        for change in [|t: &mut StateTensor| t.data.truncate(1), |t: &mut StateTensor| t.name.clear()] {
            let mut broken = state.clone();
            change(broken.iter_mut().find(|t| t.name == name).unwrap());
            assert_eq!(new().restore(&broken), Err(name.clone()));
        }
    }
}

#[test]
fn only_static_grids_are_observed_and_settings_are_checked_by_name() {
    let (config, model) = (config(ObserverKind::MinMax), model(true));
    let tokens = tokens();
    let llama = Llama::new(&model, 7, &Device::flex());
    let dynamic = QuantScheme::preset("W8A8", Granularity::PerChannel, FloatType::F32).unwrap().for_tokens();
    assert!(observe_inputs(&llama, &tokens, &config, &quant(dynamic.activations.unwrap())).unwrap().is_empty());
    // The global scale of NVFP4 is a divisor of the largest magnitude.
    let grids = observe_inputs(&llama, &tokens, &config, &quant(QuantArgs::nvfp4_tokens())).unwrap();
    let (_, grid) = grids.iter().find(|(m, _)| m == "model.layers.1.mlp.down_proj").unwrap();
    let largest = values(&llama, &config)[7].concat().iter().fold(0.0f32, |m, v| m.max(v.abs()));
    assert_eq!(grid.params.unwrap().scale, QuantArgs::global_scale(largest));
    let none = LmTrainConfig { inputs: None, ..config.clone() };
    let e = observe_inputs(&llama, &tokens, &none, &quant(w4a4())).unwrap_err();
    assert_eq!(e.to_string(), "qat.observer: expected an observer of the ranges of static INT4 activations, got none");
    type Change = fn(&mut InputRanges);
    let cases: [(Change, &str); 4] = [
        (|r| r.calibration_batches = 0, "qat.calibration_batches: expected at least 1, got 0"),
        (|r| r.rate = 0.0, "qat.observer_rate: expected more than 0, at most 1, got 0"),
        (|r| r.rate = f32::NAN, "qat.observer_rate: expected more than 0, at most 1, got NaN"),
        (|r| r.observer = ObserverKind::Percentile(50.0), "qat.percentile: expected above 50, at most 100, got 50"),
    ];
    for (change, words) in cases {
        let mut config = config.clone();
        change(config.inputs.as_mut().unwrap());
        let e = observe_inputs(&llama, &tokens, &config, &quant(w4a4())).unwrap_err();
        assert_eq!((e.to_string().as_str(), e.exit_code()), (words, 2));
    }
    // A value that is not finite is told by layer.
    let mut tensors = llama.named_tensors();
    tensors.iter_mut().find(|t| t.0.ends_with("1.post_attention_layernorm.weight")).unwrap().2[3] = f32::INFINITY;
    let find = |name: &str| tensors.iter().find(|t| t.0 == name).map(|t| t.2.as_slice());
    let broken = Llama::from_tensors(&model, &Device::flex(), find).unwrap();
    let e = observe_inputs(&broken, &tokens, &config, &quant(w4a4())).unwrap_err();
    assert!(e.to_string().starts_with("model.layers.1.mlp.gate_proj, input") && e.exit_code() == 6, "{e}");
}
