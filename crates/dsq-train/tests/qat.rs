//! Prepare equals convert, and the refusals of `qat`.

use burn::tensor::{Device, Tensor};
use dsq_checkpoint::{LlamaConfig, ModelConfig};
use dsq_model::{LearnedGrid, Llama, Lora};
use dsq_quant::{
    FloatType, GgufGrid, Granularity, Mapping, QuantArgs, QuantConfig, QuantScheme, QuantType, QuantizedMatrix,
};
use dsq_train::{Adapters, NamedGradients, TrainError, qat};
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
fn what_is_trained_on_blocks_of_gguf_is_what_a_file_stores() {
    let ids = Arc::new((0..2 * 9).map(|i| i * 7 % 60).collect::<Vec<i32>>());
    let wide = LlamaConfig { hidden_size: 256, intermediate_size: 288, head_dim: 64, ..config(false) };
    for (seed, grids) in [
        [GgufGrid::Q4_0, GgufGrid::Q4_0],
        [GgufGrid::Q4_1, GgufGrid::Q8_0],
        [GgufGrid::Q4K, GgufGrid::Q5_0],
        [GgufGrid::Q6K, GgufGrid::Q8_0],
    ]
    .into_iter()
    .enumerate()
    {
        let mut quant = w4(Granularity::PerGroup(32), &["lm_head", "re:.*layers\\.1\\.mlp\\.up_proj$"]);
        let float = Llama::new(&wide, seed as u64, &Device::flex().autodiff());
        for (name, _) in float.linears() {
            if quant.scheme_for(&name).is_some() {
                // Rows of 288 have no blocks of 256.
                let grid = grids[usize::from(name.ends_with("down_proj"))];
                quant.blocks.push((name, grid));
            }
        }
        let prepared = qat::prepare(float.clone(), &quant).unwrap();
        assert!(qat::convert(&prepared).unwrap().is_empty());
        let blocks = qat::convert_blocks(&prepared).unwrap();
        assert_eq!(blocks.len(), 13);
        let mut moved = 0;
        for (name, layer) in prepared.linears() {
            let weight = host(layer.effective_weight());
            let Some((_, grid, bytes)) = blocks.iter().find(|b| b.0 == name) else {
                assert_eq!(weight, host(layer.weight.val()), "{name}");
                continue;
            };
            let mut values = vec![0.0f32; weight.len()];
            grid.dequantize(bytes, &mut values).unwrap();
            assert_eq!(weight, values.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), "{grid:?} {name}");
            // By the formula itself, on the latent weight.
            assert_eq!(*bytes, grid.quantize(&layer.values()).unwrap());
            moved += usize::from(weight != host(layer.weight.val()));
        }
        assert_eq!(moved, 13);
        // Rounding after training is the same grid, and gives the same model.
        let rounded = qat::round_to_nearest(float.clone(), &quant, &[]).unwrap();
        assert_eq!(host(rounded.logits(ids.clone(), 2)), host(prepared.logits(ids.clone(), 2)));
        // Gradients reach the latent weights.
        let loss = prepared.logits(ids.clone(), 2).mean();
        assert!(NamedGradients::take(&prepared, loss.backward()).norm() > 0.0);
        assert_eq!(host(qat::release(prepared).logits(ids.clone(), 2)), host(float.logits(ids.clone(), 2)));
    }
    // Blocks that do not divide a row are refused, by name.
    let mut quant = w4(Granularity::PerGroup(12), &[]);
    quant.blocks.push(("model.layers.0.mlp.up_proj".into(), GgufGrid::Q4_0));
    let e = qat::prepare(Llama::new(&config(true), 0, &Device::flex()), &quant).unwrap_err();
    assert!(matches!(&e, TrainError::Quant { module, .. } if module == "model.layers.0.mlp.up_proj"), "{e}");
}

/// Every scheme of float codes.
fn float_configs() -> Vec<QuantConfig> {
    let config = |name: &str, granularity: Option<Granularity>| {
        let fixed = QuantScheme::fixed_grid(name);
        let granularity = fixed.granularity.or(granularity).unwrap();
        let dtype = fixed.scale_dtype.unwrap_or(FloatType::Bf16);
        let ignore = ["lm_head", "re:.*layers\\.1\\.mlp\\.up_proj$"].map(String::from);
        QuantConfig::new(QuantScheme::preset(name, granularity, dtype).unwrap(), &ignore).unwrap()
    };
    let mut blocks = config("FP8A16_BLOCK", None);
    blocks.scheme.weights.granularity = Granularity::PerBlock(40, 24);
    vec![
        config("FP8A16", Some(Granularity::PerTensor)),
        config("FP8A16", Some(Granularity::PerChannel)),
        config("FP8A16_BLOCK", None),
        blocks,
        config("NVFP4A16", None),
        config("MXFP4A16", None),
    ]
}

fn assert_ships(model: &Llama, what: &str) -> Vec<(String, QuantizedMatrix)> {
    let converted = qat::convert(model).unwrap();
    assert_eq!(converted.len(), 13, "7 a layer but for the ignored one");
    for (name, layer) in model.linears() {
        if let Some((_, matrix)) = converted.iter().find(|c| c.0 == name) {
            matrix.validate().unwrap();
            let shipped: Vec<u32> = matrix.dequantize().iter().map(|x| x.to_bits()).collect();
            assert_eq!(host(layer.effective_weight()), shipped, "{what} {name}");
        }
    }
    converted
}

/// The global scales of layers that servers compute as one matrix: one for all that have one.
fn assert_shared(converted: &[(String, QuantizedMatrix)]) {
    let of = |module: &str| converted.iter().find(|c| c.0 == module).and_then(|c| c.1.global_scale);
    for i in 0..2 {
        let [q, k, v, gate] = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj"]
            .map(|part| of(&format!("model.layers.{i}.{part}")));
        assert!(q.is_some() && q == k && q == v && gate.is_some());
    }
    assert_eq!(of("model.layers.0.mlp.up_proj"), of("model.layers.0.mlp.gate_proj"));
}

#[test]
fn float_codes_prepare_equals_convert_by_ranges_by_learned_scales_and_with_adapters() {
    let config = LlamaConfig { hidden_size: 64, intermediate_size: 96, head_dim: 16, ..config(false) };
    let device = Device::flex().autodiff();
    for (i, quant) in float_configs().into_iter().enumerate() {
        let what = format!("{:?}", quant.scheme.weights);
        let nvfp4 = quant.scheme.weights.has_global_scale();
        let float = Llama::new(&config, i as u64, &device);
        let mut prepared = qat::prepare(float.clone(), &quant).unwrap();
        let start = assert_ships(&prepared, &what);
        if nvfp4 {
            assert_shared(&start);
        }
        // Weights that moved: the global scale follows, and only when it is told to.
        for (_, layer) in prepared.linears_mut().into_iter().take(2) {
            layer.set_values(layer.values().iter().map(|w| w * 3.0).collect());
        }
        let prepared = qat::share_global_scales(prepared);
        let moved = assert_ships(&prepared, &what);
        if nvfp4 {
            assert_shared(&moved);
            let largest = prepared.linears()[..3].iter().map(|(_, l)| l.largest_magnitude()).fold(0.0, f32::max);
            assert_eq!(moved[0].1.global_scale, Some(QuantArgs::global_scale(largest)));
            assert_ne!(moved[0].1.global_scale, start[0].1.global_scale);
        }
        let adapters = Adapters { rank: 4, alpha: 8.0 };
        let mut adapted = qat::adapt(prepared.clone(), &adapters, 3);
        move_adapters(&mut adapted, 4, 8.0, 3, &device);
        let adapted = qat::share_global_scales(adapted);
        let before = assert_ships(&adapted, &what);
        assert_ne!(before, moved);
        assert_eq!(qat::convert(&qat::merge(adapted.clone())).unwrap(), before, "merging keeps every code");

        for model in [prepared, adapted] {
            let mut learned = qat::learn_grids(model).unwrap();
            let at_start = assert_ships(&learned, &what);
            let step = |scale: Vec<f32>, i: usize| {
                scale.iter().enumerate().map(|(j, s)| s * (0.45 + 0.1 * ((i + j) % 13) as f32)).collect()
            };
            for (i, (_, layer)) in learned.linears_mut().into_iter().enumerate() {
                let Some((scale, global)) = layer.grid().map(|g| (g.values().0, g.global())) else { continue };
                layer.set_grid(LearnedGrid::from_values(step(scale, i), None, &device).under(global));
            }
            // Weights move too; a learned grid keeps its global scale.
            let mut learned = qat::share_global_scales(learned);
            for (_, layer) in learned.linears_mut().into_iter().filter(|(_, l)| l.lora().is_none()) {
                layer.set_values(layer.values().iter().map(|w| w * 1.7).collect());
            }
            let learned = qat::share_global_scales(learned);
            let after = assert_ships(&learned, &what);
            let globals = |c: &[(String, QuantizedMatrix)]| c.iter().map(|c| c.1.global_scale).collect::<Vec<_>>();
            assert_eq!(globals(&after), globals(&at_start));
            assert_ne!(after, at_start);
        }
    }
}

/// Adapters away from where they start: A as it was, B of numbers that follow from the seed.
fn move_adapters(model: &mut Llama, rank: usize, alpha: f32, seed: u64, device: &Device) {
    for (i, (_, layer)) in model.linears_mut().into_iter().enumerate() {
        let Some([a, b]) = layer.lora().map(Lora::values) else { continue };
        let value = |j: usize| ((j * 31 + i * 7 + seed as usize * 13) % 23) as f32 / 230.0 - 0.05;
        let b = (0..b.len()).map(value).collect();
        layer.set_lora(Lora::from_values(a, b, rank, alpha, device));
    }
}

#[test]
fn adapters_prepare_equals_convert_and_merging_changes_no_bit() {
    let ids = Arc::new((0..2 * 9).map(|i| i * 7 % 60).collect::<Vec<i32>>());
    for seed in 0..40u64 {
        let tied = seed % 2 == 0;
        let mut quant = w4(
            [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(12)][seed as usize % 3],
            &["re:.*layers\\.1\\.mlp\\.up_proj$"],
        );
        quant.scheme.weights.scale_dtype = FloatType::ALL[seed as usize / 3 % 3];
        quant.scheme.weights.qtype = QuantType::INTS[seed as usize / 5 % 4];
        quant.scheme.weights.mapping = [Mapping::Symmetric, Mapping::Asymmetric][seed as usize / 7 % 2];
        let device = if seed % 4 < 2 { Device::flex() } else { Device::flex().autodiff() };
        let (rank, alpha) = ([1, 2, 8, 24][seed as usize / 2 % 4], [1.0, 16.0, 0.3][seed as usize % 3]);
        let adapters = Adapters { rank, alpha: f64::from(alpha) };
        let plain = qat::prepare(Llama::new(&config(tied), seed, &device), &quant).unwrap();
        let learn = |model: Llama| if seed % 3 == 1 { qat::learn_grids(model).unwrap() } else { model };
        let (start, mut adapted) = (learn(plain.clone()), learn(qat::adapt(plain.clone(), &adapters, seed)));
        // B is 0: the model without adapters.
        let before = host(start.logits(ids.clone(), 2));
        assert_eq!(host(adapted.logits(ids.clone(), 2)), before, "seed {seed}");
        assert_eq!(qat::convert(&adapted).unwrap(), qat::convert(&start).unwrap());

        move_adapters(&mut adapted, rank, alpha, seed, &device);
        let logits = host(adapted.logits(ids.clone(), 2));
        assert_ne!(logits, before, "adapters are visible");
        let converted = qat::convert(&adapted).unwrap();
        assert_eq!(converted.len(), if tied { 13 } else { 14 });
        for (name, layer) in adapted.linears() {
            match converted.iter().find(|c| c.0 == name) {
                Some((_, matrix)) => {
                    let shipped: Vec<u32> = matrix.dequantize().iter().map(|x| x.to_bits()).collect();
                    assert_eq!(host(layer.effective_weight()), shipped, "seed {seed} {name}");
                }
                None => assert!(layer.lora().is_none(), "{name}"),
            }
        }
        // Without its adapters the tensors are those of the float model; merged, codes and outputs stay.
        let tensors = adapted.named_tensors();
        assert_eq!(tensors, plain.named_tensors());
        let merged = qat::merge(adapted);
        assert!(merged.linears().iter().all(|(_, l)| l.lora().is_none()));
        for ((name, _, base), (merged_name, _, merged)) in tensors.into_iter().zip(merged.named_tensors()) {
            assert_eq!(name, merged_name);
            assert_eq!(base != merged, converted.iter().any(|c| name.strip_suffix(".weight") == Some(&c.0)), "{name}");
        }
        assert_eq!(qat::convert(&merged).unwrap(), converted, "seed {seed}");
        assert_eq!(host(merged.logits(ids.clone(), 2)), logits, "seed {seed}");
    }
}

#[test]
fn only_adapters_and_learned_scales_have_gradients() {
    let device = Device::flex().autodiff();
    let quant = w4(Granularity::PerChannel, &["lm_head", "re:.*layers\\.1\\.mlp\\.up_proj$"]);
    let adapters = Adapters { rank: 4, alpha: 8.0 };
    let adapted = || {
        let model = qat::prepare(Llama::new(&config(false), 3, &device), &quant).unwrap();
        qat::learn_grids(qat::adapt(model, &adapters, 3)).unwrap()
    };
    let first = |m: &Llama| -> Vec<Vec<f32>> {
        m.linears().iter().filter_map(|(_, l)| l.lora().map(|l| l.values()[0].clone())).collect()
    };
    let mut model = adapted();
    let a = first(&model);
    assert_eq!(a, first(&adapted()), "a seed decides every bit");
    assert!(a.iter().enumerate().all(|(i, x)| a[i + 1..].iter().all(|y| x[..8] != y[..8])), "streams of their own");
    move_adapters(&mut model, 4, 8.0, 3, &device);
    let ids = Arc::new((0..18).map(|i| i * 7 % 60).collect::<Vec<i32>>());
    let grads = NamedGradients::take(&model, model.loss(ids.clone(), ids, 2, 18).backward());
    for path in [
        "embed_tokens.weight",
        "norm.weight",
        "layers.0.input_layernorm.weight",
        "lm_head.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.1.mlp.up_proj.weight",
        "layers.1.mlp.up_proj.lora.a",
    ] {
        assert!(grads.get(path).is_none(), "{path}");
    }
    for end in ["lora.a", "lora.b", "grid.scale"] {
        let grad = grads.get(&format!("layers.0.self_attn.q_proj.{end}")).unwrap();
        assert!(grad.iter().any(|g| *g != 0.0), "{end}");
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
    let text = refused(&QuantConfig::new(w4a4, &["up_proj".to_owned()]).unwrap());
    let words = ["gate_proj and model.layers.0.mlp.up_proj read", "got static INT4 and no static grid"];
    assert!(words.iter().all(|w| text.contains(w)), "{text}");
    // Static inputs stay in float until someone has found their grids.
    let prepared = qat::prepare(model(), &QuantConfig::new(w4a4, &[]).unwrap()).unwrap();
    assert!(prepared.linears().iter().all(|(_, l)| l.quant().is_some() && l.inputs().is_none()));
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
