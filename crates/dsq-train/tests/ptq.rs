//! Calibrated quantization of a whole model: each layer sees the inputs that the quantized ones before it make, and what
//! comes out computes what the float model does.

use burn::tensor::{Device, Tensor};
use dsq_checkpoint::{Checkpoint, ExportTensor, LlamaConfig, ModelConfig, export_folder};
use dsq_model::layers::Embedding;
use dsq_model::{Layer, Llama, Sequences};
use dsq_quant::{
    FloatType, Granularity, InputGrid, Mapping, QuantArgs, QuantConfig, QuantScheme, QuantizedMatrix, WeightObserver,
};
use dsq_train::ptq::{
    Calibration, Factor, Hessian, PtqMethod, PtqNorm, PtqOutcome, PtqSettings, Scaling, Tuning, gptq_quantize,
    quantize_llama,
};
use dsq_train::{TrainError, qat};
use std::path::PathBuf;
use std::sync::Arc;

fn golden(name: &str) -> Checkpoint {
    Checkpoint::open(&PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)).unwrap()
}

fn model_of(ckpt: &Checkpoint) -> LlamaConfig {
    match ckpt.config() {
        ModelConfig::Llama(c) => c.clone(),
        other => panic!("{other:?}"),
    }
}

fn config(scheme: &str, granularity: Granularity, ignore: &[&str]) -> QuantConfig {
    let ignore: Vec<String> = ignore.iter().map(|s| s.to_string()).collect();
    QuantConfig::new(QuantScheme::preset(scheme, granularity, FloatType::F32).unwrap(), &ignore).unwrap()
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * i * 31 + i * 7 + i / 5) % 128).collect()
}

fn calibration(n: usize, context: usize) -> Calibration {
    calibration_of(128, n, context)
}

fn calibration_of(vocab: usize, n: usize, context: usize) -> Calibration {
    let tokens: Vec<u32> = tokens(n).into_iter().map(|t| t % vocab as u32).collect();
    Calibration::new(&tokens, n, context, vocab).unwrap()
}

/// Every method, and whether AWQ's scales come first.
const METHODS: [(PtqMethod, bool); 9] = [
    (PtqMethod::Gptq, false),
    (PtqMethod::Gptaq, false),
    (PtqMethod::Gptaq, true),
    (PtqMethod::Rtn, true),
    (PtqMethod::Gptq, true),
    (PtqMethod::Blockwise, false),
    (PtqMethod::Blockwise, true),
    (PtqMethod::AutoRound, false),
    (PtqMethod::AutoRound, true),
];

fn run(
    ckpt: &Checkpoint,
    config: &QuantConfig,
    (method, awq): (PtqMethod, bool),
    float_dtype: Option<FloatType>,
) -> PtqOutcome {
    let tuning = Tuning { steps: 3, ..Tuning::default() };
    let scaling = if awq { Scaling::Awq } else { Scaling::None };
    let settings = PtqSettings { scaling, float_dtype, tuning, ..PtqSettings::new(config, method) };
    let (mut last, mut total) = (0, 0);
    let outcome = quantize_llama(ckpt, settings, &calibration_of(model_of(ckpt).vocab_size, 600, 40), &mut |p| {
        assert!(p.done > last && p.done <= p.total);
        (last, total) = (p.done, p.total);
    });
    assert_eq!(last, total, "the bar ends at its end");
    outcome.unwrap()
}

fn host<const D: usize>(t: Tensor<D>) -> Vec<f32> {
    t.into_data().try_to_vec().unwrap()
}

#[test]
fn gptq_is_truly_sequential() {
    let ckpt = golden("llama_tiny");
    let (model, device) = (model_of(&ckpt), Device::flex());
    let quant = config("W4A16", Granularity::PerGroup(32), &["lm_head"]);
    let outcome = run(&ckpt, &quant, (PtqMethod::Gptq, false), None);
    assert_eq!(outcome.linears.len(), 14);
    assert!(outcome.norms.is_empty());
    // The same by hand, with all activations in memory.
    let table = ckpt.read_f32("model.embed_tokens.weight").unwrap();
    let ids: Vec<i32> = tokens(600).iter().map(|&t| t as i32).collect();
    let mut x = Embedding::from_values(table, [128, 64], &device).forward(Arc::new(ids), 15);
    let batch = Sequences::new(&model, 15, 40);
    let mut done = outcome.linears.iter();
    for i in 0..2 {
        let mut layer = Layer::from_checkpoint(&ckpt, i, &device).unwrap();
        let mut check = |layer: &mut Layer, input: Tensor<3>, parts: &[&str]| {
            let k = input.dims()[2];
            let mut h = Hessian::new(k);
            h.add(&host(input));
            let factor = Factor::new(&h).unwrap();
            for (name, linear) in layer.linears_mut().into_iter().filter(|(n, _)| parts.contains(&n.as_str())) {
                let n = linear.weight.dims()[0];
                let (want, fit) =
                    gptq_quantize(&linear.values(), n, k, &h, Some(&factor), quant.scheme.weights).unwrap();
                let got = done.next().unwrap();
                assert_eq!(got.module, format!("model.layers.{i}.{name}"));
                assert!(got.matrix == want && got.fit == Some(fit), "{}", got.module);
                linear.set_values(want.dequantize());
            }
        };
        let h = layer.qkv_input(x.clone());
        check(&mut layer, h.clone(), &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]);
        let attended = layer.o_input(h, &batch);
        check(&mut layer, attended.clone(), &["self_attn.o_proj"]);
        x = layer.after_attention(x, attended);
        let h = layer.gate_up_input(x.clone());
        check(&mut layer, h.clone(), &["mlp.gate_proj", "mlp.up_proj"]);
        let inner = layer.mlp.blocks()[0].inner(h);
        check(&mut layer, inner.clone(), &["mlp.down_proj"]);
        let before = x.clone();
        x = layer.after_feed_forward(x);
        assert_ne!(host(x.clone()), host(before));
    }
    assert!(done.next().is_none());
}

/// Float inputs.
fn plain() -> QuantConfig {
    config("W4A16", Granularity::PerChannel, &[])
}

/// Logits of the model with what `outcome` changed.
fn logits(ckpt: &Checkpoint, outcome: Option<&PtqOutcome>, norms: bool) -> Vec<f32> {
    let mut llama = Llama::from_checkpoint(ckpt, &Device::flex()).unwrap();
    if let Some(o) = outcome {
        let without = PtqOutcome { norms: Vec::new(), ..o.clone() };
        llama = if norms { o } else { &without }.model(&llama, &plain()).unwrap();
    }
    let vocab = llama.config().vocab_size as i32;
    host(llama.logits(Arc::new((0..60).map(|i| i * 11 % vocab).collect()), 2))
}

fn distance(a: &[f32], b: &[f32]) -> f64 {
    let d: f64 = a.iter().zip(b).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (d / a.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>()).sqrt()
}

#[test]
fn awq_moves_scales_without_changing_what_the_model_computes() {
    for model in ["llama_tiny", "llama_tiny_untied", "qwen2_tiny", "qwen3_tiny", "mistral_tiny"] {
        let ckpt = golden(model);
        let layers = Llama::from_checkpoint(&ckpt, &Device::flex()).unwrap().config().num_hidden_layers as f64;
        let float = logits(&ckpt, None, true);
        // Eight bits: what is left is rounding, so a scale that went missing would show.
        let methods = METHODS.into_iter().filter(|(_, awq)| *awq);
        for (float_dtype, method) in [None, Some(FloatType::F16), Some(FloatType::Bf16)]
            .into_iter()
            .flat_map(|d| methods.clone().map(move |m| (d, m)))
        {
            let quant = config("W8A16", Granularity::PerGroup(16), &["lm_head"]);
            let outcome = run(&ckpt, &quant, method, float_dtype);
            let scaled = outcome.linears.iter().filter(|l| l.rescale.is_some()).count();
            assert!(scaled > 0, "{model}: nothing was scaled");
            let exact = distance(&float, &logits(&ckpt, Some(&outcome), true));
            let rounded =
                qat::round_to_nearest(Llama::from_checkpoint(&ckpt, &Device::flex()).unwrap(), &quant, &[]).unwrap();
            let ids = Arc::new((0..60).map(|i| i * 11 % 128).collect());
            let rounded = distance(&float, &host(rounded.logits(ids, 2)));
            assert!(
                // 3% for two layers; errors of more layers add up like their number's root.
                exact < 2.0 * rounded && rounded < 0.03 * (layers / 2.0).sqrt(),
                "{model} {method:?} {float_dtype:?}: {exact}, rounding {rounded}"
            );
            if !outcome.norms.is_empty() {
                let without = distance(&float, &logits(&ckpt, Some(&outcome), false));
                assert!(without > 3.0 * exact, "{model}: {without} against {exact}: norms matter");
            }
            for norm in &outcome.norms {
                assert!(norm.values.iter().all(|v| norm.dtype.round(*v) == *v));
            }
            // The bias of a scaled v follows its rows: without it the model would be another one.
            let is_bias = |n: &PtqNorm| n.name.ends_with(".bias");
            let (biases, norms): (Vec<PtqNorm>, Vec<PtqNorm>) = outcome.norms.iter().cloned().partition(is_bias);
            assert_eq!(biases.is_empty(), model != "qwen2_tiny", "{biases:?}");
            assert!(biases.iter().all(|b| b.name.ends_with("v_proj.bias")));
            for bias in &biases {
                let v = outcome.linears.iter().find(|l| bias.name == format!("{}.bias", l.module)).unwrap();
                let rows = &v.rescale.as_ref().unwrap().rows;
                let want = ckpt.read_f32(&bias.name).unwrap();
                let want: Vec<f32> = want.iter().zip(rows).map(|(b, r)| bias.dtype.round(b * r)).collect();
                assert!(bias.values == want && rows.iter().any(|r| *r != 1.0), "{}", bias.name);
            }
            if !biases.is_empty() {
                let without = PtqOutcome { norms, ..outcome.clone() };
                let without = distance(&float, &logits(&ckpt, Some(&without), true));
                assert!(without > exact, "{model}: {without} against {exact}: biases matter");
            }
            // With the scales taken out, the values are near the source's weights.
            for l in &outcome.linears {
                let w = ckpt.linear(&l.module).unwrap().into_f32();
                assert!(distance(&w, &l.values()) < 0.03, "{}", l.module);
            }
        }
    }
}

#[test]
fn every_method_and_grid_stays_near_the_float_model() {
    every_method_stays_near("llama_tiny", &METHODS);
}

/// Biases, norms of heads and windows.
#[test]
fn every_method_stays_near_the_float_model_of_every_architecture() {
    for model in ["qwen2_tiny", "qwen3_tiny", "mistral_tiny"] {
        every_method_stays_near(model, &METHODS[4..7]);
    }
}

fn every_method_stays_near(model: &str, methods: &[(PtqMethod, bool)]) {
    let ckpt = golden(model);
    let float = logits(&ckpt, None, true);
    for granularity in [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(16)] {
        for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
            let mut quant = config("W4A16", granularity, &["lm_head"]);
            quant.scheme.weights.mapping = mapping;
            quant.scheme.weights.observer = WeightObserver::Mse;
            for &method in methods {
                let outcome = run(&ckpt, &quant, method, None);
                outcome.linears.iter().for_each(|l| l.matrix.validate().unwrap());
                let d = distance(&float, &logits(&ckpt, Some(&outcome), true));
                assert!(d < 0.6, "{model} {method:?} {granularity:?} {mapping:?}: {d}");
            }
        }
    }
}

/// The preset of a scheme of float codes.
fn float_config(name: &str) -> QuantConfig {
    let fixed = QuantScheme::fixed_grid(name);
    let granularity = fixed.usual.unwrap_or(Granularity::PerChannel);
    let scheme = QuantScheme::preset(name, granularity, fixed.scale_dtype.unwrap_or(FloatType::F32)).unwrap();
    QuantConfig::new(scheme, &["lm_head".to_owned()]).unwrap()
}

#[test]
fn every_method_on_float_codes_stays_near_the_float_model_and_layers_share_global_scales() {
    let ckpt = golden("llama_tiny");
    let float = logits(&ckpt, None, true);
    for (name, most) in [("FP8A16", 0.2), ("FP8A16_BLOCK", 0.2), ("MXFP4A16", 0.6), ("NVFP4A16", 0.6)] {
        let mut quant = float_config(name);
        quant.scheme.weights.observer = WeightObserver::Mse;
        for method in METHODS {
            let outcome = run(&ckpt, &quant, method, None);
            outcome.linears.iter().for_each(|l| l.matrix.validate().unwrap());
            let d = distance(&float, &logits(&ckpt, Some(&outcome), true));
            assert!(d < most, "{method:?} {name}: {d}");
            let global =
                |part: &str| outcome.linears.iter().find(|l| l.module.ends_with(part)).unwrap().matrix.global_scale;
            assert_eq!(global("q_proj").is_some(), name == "NVFP4A16");
            assert!(global("q_proj") == global("k_proj") && global("q_proj") == global("v_proj"));
            assert_eq!(global("gate_proj"), global("up_proj"));
        }
    }
}

/// Grids of inputs that are known before are those on which codes are chosen, and those that ship.
#[test]
fn codes_are_chosen_on_the_input_grids_that_are_given() {
    let ckpt = golden("llama_tiny");
    let scheme = QuantScheme::preset("W4A4", Granularity::PerChannel, FloatType::F32).unwrap();
    let quant = QuantConfig::new(scheme, &["lm_head".to_owned()]).unwrap();
    let quantize = |settings: PtqSettings| quantize_llama(&ckpt, settings, &calibration(600, 40), &mut |_| ());
    let own = quantize(PtqSettings::new(&quant, PtqMethod::Gptq)).unwrap();
    // The very grids that it finds itself change nothing; others give other codes, and stay as they are.
    let of = |inputs: &[(String, InputGrid)]| {
        let out = quantize(PtqSettings { inputs, ..PtqSettings::new(&quant, PtqMethod::Gptq) }).unwrap();
        assert_eq!(out.inputs, inputs);
        out.linears.into_iter().map(|l| l.matrix).collect::<Vec<_>>()
    };
    let codes = |out: &PtqOutcome| out.linears.iter().map(|l| l.matrix.clone()).collect::<Vec<_>>();
    assert_eq!(of(&own.inputs), codes(&own));
    let mut narrow = own.inputs.clone();
    narrow.iter_mut().for_each(|(_, grid)| grid.params.as_mut().unwrap().scale *= 0.7);
    let with = of(&narrow);
    // q, k and v of the first layer see no quantized layer before them, and their own inputs in float.
    assert!(with[..3] == codes(&own)[..3] && with[3..].iter().zip(&codes(&own)[3..]).all(|(a, b)| a != b));
    let refused = |settings: PtqSettings, word: &str| {
        let e = quantize(settings).unwrap_err();
        assert!(e.to_string().contains(word) && e.exit_code() == 2, "{e}");
    };
    let given = PtqSettings { inputs: &narrow, ..PtqSettings::new(&quant, PtqMethod::Gptq) };
    refused(PtqSettings { scaling: Scaling::Awq, ..given }, "Awq");
    refused(PtqSettings { config: &plain(), ..given }, "float");
}

/// The scaled weights of a set are rounded under one global scale: what ships is that rounding, and it is nearer than the plain one.
#[test]
fn awq_on_nvfp4_ships_the_scaled_weights_under_the_largest_of_the_set() {
    let ckpt = golden("llama_tiny");
    let quant = float_config("NVFP4A16");
    let outcome = run(&ckpt, &quant, (PtqMethod::Rtn, true), None);
    assert!(!outcome.norms.is_empty());
    for i in 0..model_of(&ckpt).num_hidden_layers {
        let of = |part: &str| {
            let module = format!("model.layers.{i}.{part}");
            outcome.linears.iter().find(|l| l.module == module).unwrap()
        };
        for set in [
            &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"][..],
            &["self_attn.o_proj"],
            &["mlp.gate_proj", "mlp.up_proj"],
            &["mlp.down_proj"],
        ] {
            let scaled: Vec<Vec<f32>> = set
                .iter()
                .map(|part| {
                    let (l, mut w) = (of(part), ckpt.linear(&format!("model.layers.{i}.{part}")).unwrap().into_f32());
                    for (r, row) in w.chunks_mut(l.matrix.k).enumerate() {
                        let scales = l.rescale.iter().flat_map(|s| s.columns.iter().map(|c| c * s.rows[r]));
                        row.iter_mut().zip(scales).for_each(|(v, s)| *v *= s);
                    }
                    w
                })
                .collect();
            let largest = scaled.iter().flatten().fold(0.0f32, |m, v| m.max(v.abs()));
            let global = Some(QuantArgs::global_scale(largest));
            for (part, w) in set.iter().zip(&scaled) {
                let matrix = &of(part).matrix;
                let want = QuantizedMatrix::quantize_under(w, matrix.n, matrix.k, matrix.args, global).unwrap();
                assert_eq!(*matrix, want, "{i} {part}");
            }
        }
    }
    let (error, rounded) = outcome.linears.iter().filter_map(|l| l.fit).fold((0.0, 0.0), |(e, p), fit| {
        assert!(fit.rtn_error > 0.0);
        (e + fit.error, p + fit.rtn_error)
    });
    assert!(error < rounded, "{error} against {rounded}");
    // The model that ships computes with these values.
    let llama = Llama::from_checkpoint(&ckpt, &Device::flex()).unwrap();
    let model = outcome.model(&llama, &plain()).unwrap();
    for ((_, layer), l) in model.linears().into_iter().zip(&outcome.linears) {
        assert_eq!(layer.values(), l.matrix.dequantize());
    }
}

#[test]
fn end_to_end_steps_that_move_weights_ship_float_codes_too() {
    let ckpt = golden("llama_tiny");
    for name in ["FP8A16_BLOCK", "MXFP4A16", "NVFP4A16"] {
        let quant = float_config(name);
        let tuning = Tuning { steps: 4, end_weight_rate: 1e-3, ..Tuning::default() };
        let settings = PtqSettings { tuning, ..PtqSettings::new(&quant, PtqMethod::Blockwise) };
        let outcome = quantize_llama(&ckpt, settings, &calibration(600, 40), &mut |_| ()).unwrap();
        outcome.linears.iter().for_each(|l| l.matrix.validate().unwrap());
        let [first, last] = outcome.end_to_end.unwrap();
        assert!(first.is_finite() && last < 2.0 * first, "{name}: {first} {last}");
    }
}

#[test]
fn layers_that_stay_in_float_are_not_touched_and_heads_are_reached() {
    let ckpt = golden("llama_tiny_untied");
    // Only up_proj of layer 1 and the head.
    let quant = config("W4A16", Granularity::PerGroup(16), &["re:.*layers\\.0.*", "re:.*(attn|gate|down).*"]);
    for method in METHODS {
        let outcome = run(&ckpt, &quant, method, None);
        let names: Vec<&str> = outcome.linears.iter().map(|l| l.module.as_str()).collect();
        assert_eq!(names, ["model.layers.1.mlp.up_proj", "lm_head"]);
        assert!(outcome.norms.is_empty() && outcome.linears.iter().all(|l| l.rescale.is_none()));
    }
}

#[test]
fn c022_f084_a_group_size_that_does_not_divide_names_the_layer() {
    let ckpt = golden("llama_tiny");
    let quant = config("W4A16", Granularity::PerGroup(20), &["lm_head"]);
    for method in METHODS {
        let scaling = if method.1 { Scaling::Awq } else { Scaling::None };
        let settings = PtqSettings { scaling, ..PtqSettings::new(&quant, method.0) };
        let e = quantize_llama(&ckpt, settings, &calibration(600, 40), &mut |_| ()).unwrap_err();
        assert!(matches!(&e, TrainError::Quant { module, .. } if module == "model.layers.0.self_attn.q_proj"), "{e}");
        assert_eq!(e.exit_code(), 2);
    }
}

#[test]
fn gptaq_comes_nearer_to_the_float_model_than_gptq() {
    let ckpt = golden("llama_tiny");
    let llama = Llama::from_checkpoint(&ckpt, &Device::flex()).unwrap();
    let ids: Arc<Vec<i32>> = Arc::new(tokens(600).into_iter().map(|t| t as i32).collect());
    let float = host(llama.logits(ids.clone(), 15));
    for scheme in ["W3A16", "W2A16"] {
        let quant = config(scheme, Granularity::PerChannel, &["lm_head"]);
        let of = |method, awq| {
            let outcome = run(&ckpt, &quant, (method, awq), None);
            distance(&float, &host(outcome.model(&llama, &plain()).unwrap().logits(ids.clone(), 15)))
        };
        for awq in [false, true] {
            let (gptq, gptaq) = (of(PtqMethod::Gptq, awq), of(PtqMethod::Gptaq, awq));
            assert!(gptaq < gptq, "{scheme}, AWQ {awq}: GPTQ {gptq}, GPTAQ {gptaq}");
        }
    }
}

#[test]
fn block_wise_training_comes_nearer_to_the_float_model_than_gptq() {
    let ckpt = golden("llama_tiny");
    let device = Device::flex();
    let llama = Llama::from_checkpoint(&ckpt, &device).unwrap();
    // On the calibration text itself: a model of random weights has nothing that carries over to another.
    let ids: Arc<Vec<i32>> = Arc::new(tokens(600).into_iter().map(|t| t as i32).collect());
    let float = host(llama.logits(ids.clone(), 15));
    let integers = |scheme, mapping| {
        let mut quant = config(scheme, Granularity::PerGroup(32), &["lm_head"]);
        quant.scheme.weights.mapping = mapping;
        (scheme, quant)
    };
    for (scheme, mut quant) in [
        integers("W4A16", Mapping::Symmetric),
        integers("W3A16", Mapping::Asymmetric),
        integers("W2A16", Mapping::Symmetric),
        ("MXFP4A16", float_config("MXFP4A16")),
        ("NVFP4A16", float_config("NVFP4A16")),
    ] {
        quant.scheme.weights.observer = WeightObserver::Mse;
        let of = |method| run(&ckpt, &quant, (method, false), None);
        let (gptq, trained) = (of(PtqMethod::Gptq), of(PtqMethod::Blockwise));
        let [a, b] = [&gptq, &trained]
            .map(|o| distance(&float, &host(o.model(&llama, &plain()).unwrap().logits(ids.clone(), 15))));
        assert!(b < a, "{scheme}: GPTQ {a}, block-wise {b}");
        // What is told is true: the codes of the start where a block is not better, and never a worse block.
        assert_eq!(trained.blocks.len(), 2);
        assert!(trained.blocks.iter().all(|f| f.kept == (f.after < f.before)), "{:?}", trained.blocks);
        assert!(trained.blocks.iter().any(|f| f.kept) && trained.end_to_end.is_some());
        trained.linears.iter().for_each(|l| l.matrix.validate().unwrap());
    }
}

/// The same function in weights that are harder to round: some columns of the norm before experts are 32 times as large, and what reads
/// them, the router too, has them as much smaller.
fn skewed(model: &str, dir: &std::path::Path) -> Checkpoint {
    let (from, out) = (golden(model), dir.join(model));
    let c = model_of(&from);
    let layers = from.names().into_iter().map(|name| {
        let (shape, mut data) = (from.info(&name).unwrap().shape, from.read_f32(&name).unwrap());
        let moe = name.split('.').nth(2).and_then(|i| i.parse().ok()).is_some_and(|i: usize| c.experts_of(i).is_some());
        let part = name.trim_end_matches(".weight").rsplit('.').next().unwrap_or_default();
        let by = match part {
            _ if !moe => 1.0,
            "post_attention_layernorm" => 32.0,
            "gate" | "gate_proj" | "up_proj" | "w1" | "w3" => 1.0 / 32.0,
            _ => 1.0,
        };
        let k = *shape.last().unwrap();
        data.iter_mut().enumerate().filter(|(j, _)| j % k % 8 == 5).for_each(|(_, v)| *v *= by);
        ExportTensor::Float { name, shape, data, dtype: FloatType::F32 }
    });
    export_folder(&out, from.config(), layers.collect(), None, vec![], true).unwrap();
    Checkpoint::open(&out).unwrap()
}

/// Scales before experts and latents: with them, and not yet rounded, the float model computes what it did, and a router the same bits.
#[test]
fn scales_before_experts_and_latents_change_nothing_that_a_float_model_computes() {
    let dir = tempfile::tempdir().unwrap();
    for model in ["mixtral_tiny", "deepseek_v2_lite_tiny", "deepseek_v2_tiny", "deepseek_v3_tiny"] {
        let ckpt = skewed(model, dir.path());
        let c = model_of(&ckpt);
        for (scaling, scheme) in [(Scaling::Awq, "W4A16"), (Scaling::Smooth(0.5), "W8A8")] {
            for float_dtype in [None, Some(FloatType::F16)] {
                let quant = config(scheme, Granularity::PerChannel, &["lm_head"]);
                let settings = PtqSettings { scaling, float_dtype, ..PtqSettings::new(&quant, PtqMethod::Rtn) };
                let outcome = quantize_llama(&ckpt, settings, &calibration_of(96, 400, 40), &mut |_| {}).unwrap();
                let changed = |name: &str| outcome.norms.iter().find(|n| n.name == name);
                // The weights with their scales, before they were rounded.
                let float = Llama::from_checkpoint(&ckpt, &Device::flex()).unwrap();
                let mut tensors = float.named_tensors();
                for (name, _, data) in &mut tensors {
                    if let Some(n) = changed(name) {
                        data.clone_from(&n.values);
                    }
                    let module = name.trim_end_matches(".weight");
                    let scales = outcome.linears.iter().find(|l| l.module == module).and_then(|l| l.rescale.as_ref());
                    if let Some(r) = scales {
                        for (row, by) in data.chunks_mut(r.columns.len()).zip(&r.rows) {
                            row.iter_mut().zip(&r.columns).for_each(|(v, c)| *v *= c * by);
                        }
                    }
                }
                let find = |name: &str| tensors.iter().find(|t| t.0 == name).map(|t| t.2.as_slice());
                let scaled = Llama::from_tensors(&c, &Device::flex(), find).unwrap();
                let of = |m: &Llama| host(m.logits(Arc::new((0..60).map(|i| i * 11 % 96).collect()), 2));
                // Norms that are stored in f16 are rounded, scaled or not: there the routers see what they would without scales.
                let most = if float_dtype.is_some() { 2e-3 } else { 1e-5 };
                let d = distance(&of(&float), &of(&scaled));
                assert!(d < most, "{model} {scaling:?} {float_dtype:?}: {d}");
                let mut moved = 0;
                for i in (0..c.num_hidden_layers).filter(|&i| c.experts_of(i).is_some()) {
                    let part = |end: &str| format!("model.layers.{i}.{end}");
                    let router = format!("{}.gate.weight", c.feed_forward_name());
                    let (Some(norm), Some(router)) =
                        (changed(&part("post_attention_layernorm.weight")), changed(&part(&router)))
                    else {
                        continue;
                    };
                    moved += 1;
                    let columns = |name: &str| {
                        let l = outcome.linears.iter().find(|l| l.module == part(name)).unwrap();
                        l.rescale.as_ref().unwrap().columns.clone()
                    };
                    let [gate, up, _] = c.expert_names(0);
                    let s = columns(&gate);
                    assert_eq!(s, columns(&up));
                    assert_eq!(s, columns(&c.expert_names(c.experts.unwrap().count - 1)[1]), "all experts the same");
                    if c.experts.unwrap().shared > 0 {
                        assert_eq!(s, columns(&LlamaConfig::dense_names(true)[0]));
                    }
                    assert!(s.iter().all(|s| s.log2().fract() == 0.0) && s.iter().any(|s| *s != 1.0), "{s:?}");
                    let old = ckpt.read_f32(&norm.name).unwrap();
                    assert!(norm.values.iter().zip(&old).zip(&s).all(|((v, o), s)| v * s == norm.dtype.round(*o)));
                    let old = ckpt.read_f32(&router.name).unwrap();
                    let d = s.len();
                    assert!(router.values.iter().enumerate().all(|(j, v)| *v == old[j] * s[j % d]));
                }
                assert!(moved > 0, "{model} {scaling:?}: no experts were scaled");
                if let Some(a) = &c.latent {
                    let norm = |name: &str| changed(&format!("model.layers.0.self_attn.{name}.weight")).is_some();
                    assert!(norm("kv_a_layernorm") || scaling == Scaling::Awq, "{model}");
                    assert!(a.q_rank.is_none() || norm("q_a_layernorm") || scaling == Scaling::Awq, "{model}");
                    assert!(outcome.norms.iter().any(|n| n.name.contains("kv_a_layernorm")), "{model} {scaling:?}");
                }
            }
        }
    }
}

/// Every method with scales before experts and latents: what ships is near the float model.
#[test]
fn every_method_takes_scales_before_experts_and_latents() {
    let dir = tempfile::tempdir().unwrap();
    for model in ["mixtral_tiny", "deepseek_v3_tiny"] {
        let ckpt = skewed(model, dir.path());
        let float = logits(&ckpt, None, true);
        let quant = config("W8A16", Granularity::PerGroup(16), &["lm_head"]);
        for method in METHODS.into_iter().filter(|(_, awq)| *awq) {
            let outcome = run(&ckpt, &quant, method, None);
            assert!(outcome.norms.iter().any(|n| n.name.ends_with("gate.weight")), "{model} {method:?}");
            let d = distance(&float, &logits(&ckpt, Some(&outcome), true));
            let without = distance(&float, &logits(&ckpt, Some(&outcome), false));
            assert!(d < 0.1 && without > 3.0 * d, "{model} {method:?}: {d}, without norms and routers {without}");
        }
    }
}
