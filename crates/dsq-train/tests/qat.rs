//! Prepare equals convert, and the refusals of `qat`.

use burn::tensor::{Device, Tensor};
use dsq_checkpoint::{LlamaConfig, ModelConfig};
use dsq_model::{LearnedGrid, Llama};
use dsq_quant::{FloatType, Granularity, Mapping, QuantConfig, QuantScheme, QuantType};
use dsq_train::{TrainError, qat};
use std::path::Path;
use std::sync::Arc;

fn config(tied: bool) -> LlamaConfig {
    let text = format!(
        r#"{{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":48,"intermediate_size":72,
        "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":12,"vocab_size":60,
        "max_position_embeddings":64,"rms_norm_eps":1e-5,"rope_theta":10000.0,"tie_word_embeddings":{tied}}}"#
    );
    match ModelConfig::from_json(&text, Path::new("config.json")).unwrap() {
        ModelConfig::Llama(c) => c,
        _ => unreachable!("the text says llama"),
    }
}

fn w4(granularity: Granularity, ignore: &[&str]) -> QuantConfig {
    let ignore: Vec<String> = ignore.iter().map(|s| s.to_string()).collect();
    QuantConfig::new(QuantScheme::preset("W4A16", granularity, FloatType::Bf16).unwrap(), &ignore).unwrap()
}

fn host<const D: usize>(t: Tensor<D>) -> Vec<u32> {
    t.into_data().try_to_vec::<f32>().unwrap().iter().map(|x| x.to_bits()).collect()
}

#[test]
fn prepare_equals_convert_for_many_seeds_and_schemes() {
    let ids = Arc::new((0..2 * 9).map(|i| i * 7 % 60).collect::<Vec<i32>>());
    for seed in 0..40 {
        let tied = seed % 2 == 0;
        let mut quant = w4(
            [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(12)][seed as usize % 3],
            &["lm_head", "re:.*layers\\.1\\.mlp\\.up_proj$"],
        );
        quant.scheme.weights.scale_dtype = FloatType::ALL[seed as usize / 3 % 3];
        quant.scheme.weights.qtype = QuantType::INTS[seed as usize / 5 % 4];
        quant.scheme.weights.mapping = [Mapping::Symmetric, Mapping::Asymmetric][seed as usize / 7 % 2];
        let device = if seed % 4 < 2 { Device::flex() } else { Device::flex().autodiff() };
        let float = Llama::new(&config(tied), seed, &device);
        let plain = host(float.logits(ids.clone(), 2));
        let mut prepared = qat::prepare(float, &quant).unwrap();
        if seed % 3 == 1 {
            // Learned grids, away from where they start.
            prepared = qat::learn_grids(prepared).unwrap();
            for (i, (_, layer)) in prepared.linears_mut().into_iter().enumerate() {
                let Some((scale, zero)) = layer.grid().map(LearnedGrid::values) else { continue };
                let scale = scale.iter().enumerate().map(|(j, s)| s * (0.5 + 0.07 * ((i + j) % 11) as f32)).collect();
                let zero = zero.map(|z| z.iter().enumerate().map(|(j, z)| z + 0.3 * ((i + j) % 7) as f32).collect());
                layer.set_grid(LearnedGrid::from_values(scale, zero, &device));
            }
        }
        let converted = qat::convert(&prepared).unwrap();
        assert_eq!(converted.len(), 13, "7 a layer but for the ignored one; lm_head ignored");
        for (name, layer) in prepared.linears() {
            match converted.iter().find(|c| c.0 == name) {
                Some((_, matrix)) => {
                    let shipped: Vec<u32> = matrix.dequantize().iter().map(|x| x.to_bits()).collect();
                    assert_eq!(host(layer.effective_weight()), shipped, "seed {seed} {name}");
                }
                None => assert_eq!(host(layer.effective_weight()), host(layer.weight.val()), "{name}"),
            }
        }
        // The model of the shipped weights computes what the prepared one does, bit for bit.
        let mut tensors = prepared.named_tensors();
        for (name, _, data) in &mut tensors {
            if let Some((_, matrix)) = converted.iter().find(|c| name.strip_suffix(".weight") == Some(&c.0)) {
                *data = matrix.dequantize();
            }
        }
        let find = |name: &str| tensors.iter().find(|t| t.0 == name).map(|t| t.2.as_slice());
        let shipped = Llama::from_tensors(&config(tied), &device, find).unwrap();
        let logits = host(prepared.logits(ids.clone(), 2));
        assert_eq!(logits, host(shipped.logits(ids.clone(), 2)), "seed {seed}");
        assert_ne!(logits, plain, "quantization is visible");
        // Released, the float model is back.
        assert_eq!(host(qat::release(prepared).logits(ids.clone(), 2)), plain);
    }
}

#[test]
fn f084_f085_f086_what_cannot_work_is_refused_with_names() {
    let model = || Llama::new(&config(true), 1, &Device::flex());
    let refused = |quant: &QuantConfig| {
        let e = qat::prepare(model(), quant).unwrap_err();
        assert_eq!(e.exit_code(), 2, "{e}");
        e.to_string()
    };
    let text = refused(&w4(Granularity::PerGroup(16), &["lm_head"]));
    let bad = ["model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj", "72", "16"];
    assert!(bad.iter().all(|b| text.contains(b)) && !text.contains("up_proj"), "{text}");
    let text = refused(&w4(Granularity::PerChannel, &["lm_head", "model.layer.0"]));
    assert!(text.contains("model.layer.0") && text.contains("model.layers.0.self_attn.q_proj"), "{text}");
    assert!(refused(&w4(Granularity::PerChannel, &["re:.*"])).contains("none"));
    let w4a4 = QuantScheme::preset("W4A4", Granularity::PerChannel, FloatType::F32).unwrap();
    assert!(refused(&QuantConfig::new(w4a4, &[]).unwrap()).contains("activation"));
}

#[test]
fn f110_a_weight_that_cannot_be_stored_is_named() {
    let mut quant = w4(Granularity::PerChannel, &[]);
    quant.scheme.weights.scale_dtype = FloatType::F16;
    for (value, code) in [(1e7, 6), (f32::NAN, 6)] {
        let mut tensors = Llama::new(&config(true), 1, &Device::flex()).named_tensors();
        let at = tensors.iter().position(|t| t.0 == "model.layers.1.mlp.gate_proj.weight").unwrap();
        tensors[at].2[5] = value;
        let find = |name: &str| tensors.iter().find(|t| t.0 == name).map(|t| t.2.as_slice());
        let model = Llama::from_tensors(&config(true), &Device::flex(), find).unwrap();
        let e = qat::convert(&qat::prepare(model, &quant).unwrap()).unwrap_err();
        assert!(matches!(&e, TrainError::Quant { module, .. } if module == "model.layers.1.mlp.gate_proj"), "{e}");
        assert_eq!(e.exit_code(), code);
    }
}
