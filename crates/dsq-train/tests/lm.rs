//! Language-model training: torch's steps, resume, interruption, broken losses, settings.

use burn::tensor::Device;
use dsq_checkpoint::{Checkpoint, LlamaConfig, ModelConfig};
use dsq_model::{IGNORED, Llama, next_token_labels};
use dsq_quant::{FloatType, GgufGrid, Granularity, ObserverKind, QuantArgs, QuantConfig, QuantScheme};
use dsq_train::{
    AdamW, Adapters, Control, Distill, InputRanges, LearnedScales, LmOutcome, LmPhase, LmTrainConfig, NamedGradients,
    ParamGroup, Phase, Progress, RunDir, Snapshot, TrainError, observe_inputs, qat, train_lm,
};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

#[test]
fn ten_steps_are_those_of_torch() {
    let device = Device::flex().autodiff();
    let checkpoint = Checkpoint::open(&golden("llama_tiny")).unwrap();
    let mut model = Llama::from_checkpoint(&checkpoint, &device).unwrap();
    let text = std::fs::read_to_string(golden("llama_tiny_training/training.json")).unwrap();
    let options: serde_json::Value = serde_json::from_str(&text).unwrap();
    let batch: Vec<Vec<i32>> = serde_json::from_value(options["batch"].clone()).unwrap();
    let losses: Vec<f64> =
        serde_json::from_value(options["losses_before_each_step_and_after_the_last"].clone()).unwrap();
    let ids = Arc::new(batch.concat());
    let labels = Arc::new(next_token_labels(&ids, 25));
    let count = labels.iter().filter(|&&l| l != IGNORED).count();
    let number = |key: &str| options[key].as_f64().unwrap();
    let mut optimizer =
        AdamW::new(options["betas"][0].as_f64().unwrap(), options["betas"][1].as_f64().unwrap(), number("eps"));
    for (step, want) in losses.iter().enumerate() {
        let loss = model.loss(ids.clone(), labels.clone(), 4, count);
        let value = f64::from(loss.clone().into_data().try_to_vec::<f32>().unwrap()[0]);
        // The gradients agree to 1e-4; ten steps of Adam carry that on.
        assert!((value - want).abs() < 2e-4 * want, "step {step}: {value} against {want}");
        let grads = NamedGradients::take(&model, loss.backward());
        let norm = grads.norm();
        model = optimizer.step(model, &grads, number("lr"), norm, f64::MAX, |_, _, _| ParamGroup {
            rate: 1.0,
            decay: number("weight_decay"),
        });
    }
    assert_eq!(optimizer.updates(), losses.len() as u64);
}

#[test]
fn weights_after_ten_steps_are_near_those_of_torch() {
    let device = Device::flex().autodiff();
    let checkpoint = Checkpoint::open(&golden("llama_tiny")).unwrap();
    let mut model = Llama::from_checkpoint(&checkpoint, &device).unwrap();
    let before = model.named_tensors();
    let text = std::fs::read_to_string(golden("llama_tiny_training/training.json")).unwrap();
    let options: serde_json::Value = serde_json::from_str(&text).unwrap();
    let batch: Vec<Vec<i32>> = serde_json::from_value(options["batch"].clone()).unwrap();
    let ids = Arc::new(batch.concat());
    let labels = Arc::new(next_token_labels(&ids, 25));
    let lr = options["lr"].as_f64().unwrap();
    let mut optimizer = AdamW::new(0.9, 0.95, 1e-8);
    for _ in 0..10 {
        let loss = model.loss(ids.clone(), labels.clone(), 4, 96);
        let grads = NamedGradients::take(&model, loss.backward());
        let norm = grads.norm();
        model = optimizer.step(model, &grads, lr, norm, f64::MAX, |_, _, _| ParamGroup { rate: 1.0, decay: 0.1 });
    }
    let bytes = std::fs::read(golden("llama_tiny_training/training.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (mut off, mut moved) = (0.0f64, 0.0f64);
    for ((name, _, data), (_, _, start)) in model.named_tensors().iter().zip(&before) {
        let want = file.tensor(&format!("final.{name}")).unwrap();
        let want = want.data().chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]]));
        for ((&got, want), &start) in data.iter().zip(want).zip(start) {
            // Ten steps move a weight by at most about ten learning rates; an entry whose gradient is noise may
            // differ by a good part of that, the bulk must not.
            assert!(f64::from((got - want).abs()) < 4.0 * lr, "{name}: {got} against {want}");
            off += f64::from(got - want).powi(2);
            moved += f64::from(got - start).powi(2);
        }
    }
    assert!(off.sqrt() < 0.01 * moved.sqrt(), "off by {} of {}", off.sqrt(), moved.sqrt());
}

fn model() -> LlamaConfig {
    let text = r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":32,"intermediate_size":48,
        "num_hidden_layers":2,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":8,"vocab_size":64,
        "max_position_embeddings":32,"rms_norm_eps":1e-5,"rope_theta":10000.0,"tie_word_embeddings":true}"#;
    match ModelConfig::from_json(text, Path::new("config.json")).unwrap() {
        ModelConfig::Llama(c) => c,
        _ => unreachable!("the text says llama"),
    }
}

/// A text with structure: the next token follows from the last two, with some noise.
fn text(n: usize) -> Vec<u32> {
    let mut t = vec![1u32, 2];
    for i in 2..n {
        let next = if i % 11 == 0 { i * 31 % 64 } else { (t[i - 1] * 3 + t[i - 2] * 5 + 7) as usize % 64 };
        t.push(next as u32);
    }
    t
}

fn settings() -> LmTrainConfig {
    let phase = |steps, learning_rate| LmPhase {
        steps,
        batch_size: 3,
        seq_len: 16,
        learning_rate,
        warmup_steps: 2,
        final_rate: 0.1,
        weight_decay: 0.1,
        grad_clip: 1.0,
    };
    LmTrainConfig {
        float: phase(9, 1e-2),
        qat: phase(6, 3e-3),
        distill: None,
        learned_scales: None,
        adapters: None,
        inputs: None,
        float_equal_tokens: true,
        save_every: 4,
        seed: 5,
    }
}

fn quant() -> QuantConfig {
    let scheme = QuantScheme::preset("W4A16", Granularity::PerChannel, FloatType::Bf16).unwrap();
    QuantConfig::new(scheme, &["lm_head".into()]).unwrap()
}

fn train(
    path: &Path,
    resume: bool,
    config: &LmTrainConfig,
    on_step: &mut dyn FnMut(&Progress) -> Control,
) -> Result<LmOutcome, TrainError> {
    train_as(&quant(), path, resume, config, on_step)
}

fn train_as(
    quant: &QuantConfig,
    path: &Path,
    resume: bool,
    config: &LmTrainConfig,
    on_step: &mut dyn FnMut(&Progress) -> Control,
) -> Result<LmOutcome, TrainError> {
    let fingerprint = serde_json::to_value(config).unwrap();
    let mut run = RunDir::open(path, &fingerprint, resume, false)?;
    train_lm(&model(), &text(400), config, quant, &mut run, on_step)
}

/// INT4 weights, and inputs of layers on stored grids of `activations`.
fn with_static(activations: QuantArgs) -> QuantConfig {
    let scheme = QuantScheme { activations: Some(activations), ..quant().scheme };
    QuantConfig::new(scheme, &["lm_head".into()]).unwrap()
}

fn w4a4() -> QuantConfig {
    with_static(QuantScheme::preset("W4A4", Granularity::PerChannel, FloatType::F32).unwrap().activations.unwrap())
}

fn ranges(observer: ObserverKind, freeze_step: usize) -> Option<InputRanges> {
    Some(InputRanges { calibration_batches: 3, observer, rate: 0.2, freeze_step })
}

type Bits = Vec<(String, Vec<u32>)>;

fn bits(model: &Llama) -> Bits {
    model.named_tensors().into_iter().map(|(n, _, v)| (n, v.iter().map(|x| x.to_bits()).collect())).collect()
}

fn all_bits(o: &LmOutcome) -> (Bits, Bits, Bits) {
    (bits(&o.float), bits(&o.qat), bits(o.float_equal_tokens.as_ref().unwrap()))
}

fn log(path: &Path) -> String {
    std::fs::read_to_string(path.join("log.jsonl")).unwrap()
}

#[test]
fn the_phases_follow_one_another_and_learn() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = settings();
    config.float.steps = 120;
    config.qat.steps = 40;
    let mut seen = Vec::new();
    let out = train(dir.path(), false, &config, &mut |p| {
        seen.push(p.clone());
        Control::Continue
    })
    .unwrap();
    assert_eq!(seen.len(), 200);
    assert!(seen.iter().enumerate().all(|(i, p)| p.global_step == i + 1 && p.total_steps == 200));
    let mean = |p: Phase, from: usize, to: usize| {
        let losses: Vec<f32> =
            seen.iter().filter(|s| s.phase == p && (from..=to).contains(&s.step)).map(|s| s.loss).collect();
        losses.iter().sum::<f32>() / losses.len() as f32
    };
    assert!((mean(Phase::Float, 1, 1) - 64f32.ln()).abs() < 0.1, "a new model knows nothing");
    assert!(mean(Phase::Float, 111, 120) < 3.3, "{}", mean(Phase::Float, 111, 120));
    // QAT starts from the float result, worse by the rounding, and gets better; equal tokens start from it too.
    let rtn = mean(Phase::Qat, 1, 1);
    assert!(rtn > mean(Phase::FloatEqualTokens, 1, 1) && rtn < 4.0, "{rtn}");
    assert!(mean(Phase::Qat, 31, 40) < mean(Phase::Qat, 1, 5));
    // The same samples in the same order, at the same rates.
    let rates = |p: Phase| seen.iter().filter(|s| s.phase == p).map(|s| s.learning_rate).collect::<Vec<_>>();
    assert_eq!(rates(Phase::Qat), rates(Phase::FloatEqualTokens));
    // Evaluated for thousands of windows and never differentiated: nothing may be kept of a pass.
    for model in [&out.float, &out.qat, out.float_equal_tokens.as_ref().unwrap()] {
        assert!(!model.logits(Arc::new(vec![1, 2, 3]), 1).is_autodiff());
    }
    assert!(out.float.linears().iter().all(|l| l.1.quant().is_none()));
    assert!(out.qat.linears().iter().all(|l| l.1.quant().is_some()));
    assert_eq!(out.quantized.len(), 14);
    for (name, matrix) in &out.quantized {
        let layers = out.qat.linears();
        let layer = &layers.iter().find(|l| l.0 == *name).unwrap().1;
        let effective: Vec<f32> = layer.effective_weight().into_data().try_to_vec().unwrap();
        assert_eq!(effective, matrix.dequantize(), "{name}");
    }
}

#[test]
fn distillation_keeps_qat_at_its_teacher() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let distance = |distill: Option<Distill>, dir: &Path| {
        let out = train(dir, false, &LmTrainConfig { distill, ..settings() }, &mut |_| Control::Continue).unwrap();
        let weights = |m: &Llama| m.named_tensors().into_iter().flat_map(|t| t.2).collect::<Vec<f32>>();
        let (float, qat) = (weights(&out.float), weights(&out.qat));
        // What both phases of equal samples share: the float result, and that of equal tokens, do not know the teacher.
        (float.iter().zip(&qat).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>(), bits(&out.float))
    };
    let plain = distance(None, dirs[0].path());
    let distilled = distance(Some(Distill { weight: 1.0, temperature: 1.0, hidden_weight: 0.0 }), dirs[1].path());
    assert_eq!(plain.1, distilled.1);
    // The only pull away from the teacher is the rounding.
    assert!(distilled.0 < plain.0, "{} against {}", distilled.0, plain.0);
    let lines: Vec<serde_json::Value> = log(dirs[1].path()).lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let loss = |phase: &str| lines.iter().find(|l| l["phase"] == phase).unwrap()["loss"].as_f64().unwrap();
    assert!(loss("qat") >= 0.0 && loss("qat") < 0.2 * loss("float_equal_tokens"), "{} is a divergence", loss("qat"));
    // With the residual streams too, the student stays nearer still, and the loss is more than the divergence was.
    let dir = tempfile::tempdir().unwrap();
    let hidden = distance(Some(Distill { weight: 1.0, temperature: 1.0, hidden_weight: 1.0 }), dir.path());
    assert_eq!(hidden.1, distilled.1);
    assert!(hidden.0 < plain.0, "{} against {}", hidden.0, plain.0);
    let first = |dir: &Path| {
        let mut lines =
            log(dir).lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap()).collect::<Vec<_>>();
        lines.retain(|l| l["phase"] == "qat");
        lines[0]["loss"].as_f64().unwrap()
    };
    assert!(first(dir.path()) > first(dirs[1].path()) + 1e-4);
    for (weight, temperature, hidden_weight, field) in [
        (0.0, 1.0, 0.0, "qat.distill_weight"),
        (1.5, 1.0, 0.0, "qat.distill_weight"),
        (0.5, 0.0, 0.0, "qat.distill_temperature"),
        (0.5, 1.0, -1.0, "qat.hidden_weight"),
        (0.5, 1.0, f64::NAN, "qat.hidden_weight"),
    ] {
        let config = LmTrainConfig { distill: Some(Distill { weight, temperature, hidden_weight }), ..settings() };
        let e = config.check(&model(), 400).unwrap_err();
        assert!(e.to_string().starts_with(field) && e.exit_code() == 2, "{e}");
    }
}

#[test]
fn adapters_alone_are_trained_and_what_ships_has_them_merged() {
    let dir = tempfile::tempdir().unwrap();
    let config = LmTrainConfig { adapters: Some(Adapters { rank: 4, alpha: 8.0 }), ..settings() };
    let out = train(dir.path(), false, &config, &mut |_| Control::Continue).unwrap();
    for ((name, float), (_, qat)) in bits(&out.float).into_iter().zip(bits(&out.qat)) {
        assert_eq!(float == qat, !name.contains("proj"), "{name}");
    }
    assert!(out.qat.linears().iter().all(|(_, l)| l.lora().is_none()));
    assert_eq!(out.quantized.len(), 14);
    for ((name, matrix), (module, layer)) in out.quantized.iter().zip(out.qat.linears()) {
        let effective: Vec<f32> = layer.effective_weight().into_data().try_to_vec().unwrap();
        assert!(*name == module && effective == matrix.dequantize(), "{name}");
    }
    // The checkpoint holds the adapters; those of the last QAT step are what was merged.
    let run = RunDir::open(dir.path(), &serde_json::to_value(&config).unwrap(), true, false).unwrap();
    let tensors = run.latest().unwrap().unwrap().tensors;
    let find = |name: String| tensors.iter().find(|t| t.name == name).unwrap();
    let module = "model.layers.1.mlp.down_proj";
    let [a, b] = ["a", "b"].map(|end| find(format!("qat.{module}.lora.{end}")));
    assert_eq!((a.shape.as_slice(), b.shape.as_slice()), (&[4, 48][..], &[32, 4][..]));
    let float = find(format!("float.{module}.weight"));
    let merged = out.qat.named_tensors().into_iter().find(|t| t.0 == format!("{module}.weight")).unwrap().2;
    for (i, (&w, got)) in float.data.iter().zip(merged).enumerate() {
        let change: f64 = (0..4).map(|r| f64::from(b.data[i / 48 * 4 + r]) * f64::from(a.data[r * 48 + i % 48])).sum();
        assert!((f64::from(w) + 2.0 * change - f64::from(got)).abs() < 1e-6, "{i}");
    }
    let most = "at most 16, the lesser side of model.layers.0.self_attn.k_proj (16 x 32)";
    for (rank, alpha, words) in [
        (0, 1.0, "qat.lora_rank: expected at least 1, got 0"),
        (17, 1.0, &format!("qat.lora_rank: expected {most}, got 17")),
        (4, 0.0, "qat.lora_alpha: expected a positive number, got 0"),
    ] {
        let config = LmTrainConfig { adapters: Some(Adapters { rank, alpha }), ..settings() };
        let dir = tempfile::tempdir().unwrap();
        let e = train(dir.path(), false, &config, &mut |_| Control::Continue).unwrap_err();
        assert_eq!((e.exit_code(), e.to_string().as_str()), (2, words));
    }
}

#[test]
fn c084_a_run_stopped_after_any_step_resumes_to_the_same_bits() {
    // With distillation and learned scales, so that a resumed run must find its teacher and its grids again.
    resumes_after_every_step(
        &quant(),
        &LmTrainConfig {
            distill: Some(Distill { weight: 0.5, temperature: 2.0, hidden_weight: 0.3 }),
            learned_scales: Some(LearnedScales { rate: 1e-2 }),
            ..settings()
        },
    );
}

#[test]
fn c084_a_run_with_adapters_stopped_after_any_step_resumes_to_the_same_bits() {
    let with = LmTrainConfig { adapters: Some(Adapters { rank: 3, alpha: 6.0 }), ..settings() };
    resumes_after_every_step(&quant(), &with);
    resumes_after_every_step(&quant(), &LmTrainConfig { learned_scales: Some(LearnedScales { rate: 1e-2 }), ..with });
}

/// A global scale that follows the weights, one that learned scales keep, and scales of blocks: nothing of them is lost.
/// Blocks of GGUF of every kind that divides rows of 32; the down projections, of 48, have codes.
fn blocks() -> QuantConfig {
    let mut quant = quant();
    for (part, grid) in [
        ("self_attn.q_proj", GgufGrid::Q4_0),
        ("self_attn.v_proj", GgufGrid::Q4_1),
        ("self_attn.o_proj", GgufGrid::Q8_0),
        ("mlp.up_proj", GgufGrid::Q5_0),
    ] {
        quant.blocks.extend((0..2).map(|i| (format!("model.layers.{i}.{part}"), grid)));
    }
    quant
}

#[test]
fn c084_a_run_on_blocks_of_gguf_stopped_after_any_step_resumes_to_the_same_bits() {
    resumes_after_every_step(&blocks(), &settings());
    let learned = LmTrainConfig { learned_scales: Some(LearnedScales { rate: 1e-2 }), ..settings() };
    let dir = tempfile::tempdir().unwrap();
    let e = train_as(&blocks(), dir.path(), false, &learned, &mut |_| Control::Continue).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("qat.learned_scales"), "{e}");
}

#[test]
fn c084_runs_on_float_codes_resume_to_the_same_bits_and_ship_what_they_train() {
    let of = |name: &str, learned: bool, adapters: bool| {
        let fixed = QuantScheme::fixed_grid(name);
        let dtype = fixed.scale_dtype.unwrap_or(FloatType::F32);
        let scheme = QuantScheme::preset(name, fixed.granularity.unwrap(), dtype).unwrap();
        let config = LmTrainConfig {
            learned_scales: learned.then_some(LearnedScales { rate: 1e-2 }),
            adapters: adapters.then_some(Adapters { rank: 3, alpha: 6.0 }),
            ..settings()
        };
        (QuantConfig::new(scheme, &["lm_head".into()]).unwrap(), config)
    };
    for (quant, config) in [
        of("NVFP4A16", false, false),
        of("NVFP4A16", true, false),
        of("NVFP4A16", false, true),
        of("NVFP4A16", true, true),
        of("FP8A16_BLOCK", false, false),
        of("FP8A16_BLOCK", true, false),
    ] {
        let straight = tempfile::tempdir().unwrap();
        let want = train_as(&quant, straight.path(), false, &config, &mut |_| Control::Continue).unwrap();
        for (name, matrix) in &want.quantized {
            let layers = want.qat.linears();
            let layer = &layers.iter().find(|l| l.0 == *name).unwrap().1;
            let effective: Vec<f32> = layer.effective_weight().into_data().try_to_vec().unwrap();
            assert_eq!(effective, matrix.dequantize(), "{name}");
        }
        for stop in [9, 11, 14, 15, 17] {
            let dir = tempfile::tempdir().unwrap();
            let stopped = train_as(&quant, dir.path(), false, &config, &mut |p| match p.global_step == stop {
                true => Control::Stop,
                false => Control::Continue,
            });
            assert!(matches!(stopped, Err(TrainError::Interrupted { .. })));
            let got = train_as(&quant, dir.path(), true, &config, &mut |_| Control::Continue).unwrap();
            assert!(all_bits(&got) == all_bits(&want) && got.quantized == want.quantized, "stopped after {stop}");
            assert_eq!(log(dir.path()), log(straight.path()), "stopped after {stop}");
        }
    }
}

#[test]
fn c084_a_run_with_static_inputs_stopped_after_any_step_resumes_to_the_same_bits() {
    // Frozen in the middle of QAT (steps 10 to 15), so that a run stops before, at and after it.
    let observers = [ObserverKind::MovingAverage, ObserverKind::MinMax, ObserverKind::Percentile(99.0)];
    for (i, observer) in observers.into_iter().enumerate() {
        let config = LmTrainConfig {
            inputs: ranges(observer, 3),
            distill: (i == 0).then_some(Distill { weight: 0.5, temperature: 1.0, hidden_weight: 0.3 }),
            learned_scales: (i == 1).then_some(LearnedScales { rate: 1e-2 }),
            adapters: (i == 2).then_some(Adapters { rank: 3, alpha: 6.0 }),
            ..settings()
        };
        resumes_after_every_step(&w4a4(), &config);
    }
    // Learned grids of every kind (those with a zero point were among the above).
    for activations in [QuantArgs::fp8(Granularity::PerTensor, FloatType::F32), QuantArgs::nvfp4_tokens()] {
        let config = LmTrainConfig {
            inputs: ranges(ObserverKind::MovingAverage, 3),
            learned_scales: Some(LearnedScales { rate: 1e-2 }),
            ..settings()
        };
        resumes_after_every_step(&with_static(activations), &config);
    }
}

/// What ships computes what was trained, bit for bit: the matrices of `convert` behind inputs on the stored grids.
fn assert_ships(out: &LmOutcome, quant: &QuantConfig) {
    let grids: Vec<_> = out.qat.linears().into_iter().map(|(m, l)| (m, *l.inputs().unwrap())).collect();
    let mut tensors = out.qat.named_tensors();
    for (name, _, data) in &mut tensors {
        if let Some((_, matrix)) = out.quantized.iter().find(|c| name.strip_suffix(".weight") == Some(&c.0)) {
            *data = matrix.dequantize();
        }
    }
    let find = |name: &str| tensors.iter().find(|t| t.0 == name).map(|t| t.2.as_slice());
    let shipped = Llama::from_tensors(&model(), &Device::flex(), find).unwrap();
    let shipped = qat::quantize_inputs(shipped, quant, &grids);
    let ids = Arc::new((0..32).map(|i| i * 7 % 64).collect::<Vec<i32>>());
    let logits = |m: &Llama| m.logits(ids.clone(), 2).into_data().try_to_vec::<f32>().unwrap();
    assert_eq!(logits(&out.qat), logits(&shipped));
    assert_ne!(logits(&out.qat), logits(&qat::quantize_inputs(shipped, quant, &[])), "inputs are on their grids");
}

#[test]
fn learned_inputs_start_at_the_observed_ranges_move_and_ship() {
    for activations in [
        w4a4().scheme.activations.unwrap(),
        QuantArgs { qtype: dsq_quant::QuantType::Int8, ..QuantArgs::int4(Granularity::PerTensor, FloatType::F32) },
        QuantArgs::fp8(Granularity::PerTensor, FloatType::F32),
        QuantArgs::nvfp4_tokens(),
    ] {
        let quant = with_static(activations);
        let run = |rate: f64, freeze_step: usize| {
            let dir = tempfile::tempdir().unwrap();
            let inputs = ranges(ObserverKind::MovingAverage, freeze_step);
            let config = LmTrainConfig { inputs, learned_scales: Some(LearnedScales { rate }), ..settings() };
            let out = train_as(&quant, dir.path(), false, &config, &mut |_| Control::Continue).unwrap();
            let grids: Vec<_> = out.qat.linears().into_iter().map(|(m, l)| (m, *l.inputs().unwrap())).collect();
            let calibrated = observe_inputs(&out.float, &text(400), &config, &quant).unwrap();
            (out, grids, calibrated)
        };
        // So slow that no f32 moves.
        let (_, start, calibrated) = run(1e-12, 3);
        for ((module, a), (_, b)) in start.iter().zip(&calibrated) {
            let (a, b) = (a.params.unwrap(), b.params.unwrap());
            assert!(a.zero == b.zero && (a.scale / b.scale - 1.0).abs() < 2e-7, "{module}: {a:?} {b:?}");
        }
        let (out, grids, calibrated) = run(2e-2, 3);
        for layer in grids.chunks(7) {
            assert!(layer[0].1 == layer[1].1 && layer[1].1 == layer[2].1 && layer[4].1 == layer[5].1, "one tensor");
        }
        // Of NVFP4 an input moves only where some run is capped.
        let moved = grids.iter().zip(&calibrated).filter(|(a, b)| a != b).count();
        let least = if activations.has_global_scale() { 1 } else { 14 };
        assert!(moved >= least, "{activations:?}: {moved} of 14");
        for (module, layer) in out.qat.linears() {
            let first = ["q_proj", "o_proj", "gate_proj", "down_proj"].iter().any(|end| module.ends_with(end));
            assert_eq!(
                layer.learned_input().is_some(),
                first,
                "{module}: the first that reads a tensor holds its grid"
            );
        }
        assert_ships(&out, &quant);
        let other = run(2e-2, 0);
        assert!(other.1 == grids && bits(&other.0.qat) == bits(&out.qat), "nothing is observed in QAT");
    }
}

#[test]
fn a_checkpoint_without_the_learned_grid_of_an_input_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let config = LmTrainConfig {
        inputs: ranges(ObserverKind::MinMax, 3),
        learned_scales: Some(LearnedScales { rate: 1e-2 }),
        ..settings()
    };
    let stopped = train_as(&w4a4(), dir.path(), false, &config, &mut |p| match p.global_step == 12 {
        true => Control::Stop,
        false => Control::Continue,
    });
    assert!(matches!(stopped, Err(TrainError::Interrupted { .. })));
    let name = "model.layers.1.mlp.gate_proj.input.grid.zero";
    {
        let run = RunDir::open(dir.path(), &serde_json::to_value(&config).unwrap(), true, false).unwrap();
        let Snapshot { step, mut tensors, state } = run.latest().unwrap().unwrap();
        let before = tensors.len();
        tensors.retain(|t| t.name != format!("current.{name}"));
        assert_eq!(tensors.len(), before - 1);
        run.save(&Snapshot { step: step + 1, tensors, state }).unwrap();
    }
    let e = train_as(&w4a4(), dir.path(), true, &config, &mut |_| Control::Continue).unwrap_err();
    assert!(e.to_string().contains(&format!("{name}: expected one number")) && e.exit_code() == 3, "{e}");
}

#[test]
fn static_inputs_are_calibrated_in_float_followed_and_frozen() {
    let per_tensor = |args: QuantArgs| QuantArgs { granularity: Granularity::PerTensor, ..args };
    for quant in [
        w4a4(),
        with_static(QuantArgs::fp8(Granularity::PerTensor, FloatType::F32)),
        with_static(per_tensor(QuantArgs::int4(Granularity::PerTensor, FloatType::F32))),
        with_static(QuantArgs::nvfp4_tokens()),
    ] {
        let run = |freeze_step: usize| {
            let dir = tempfile::tempdir().unwrap();
            let config = LmTrainConfig { inputs: ranges(ObserverKind::MovingAverage, freeze_step), ..settings() };
            let out = train_as(&quant, dir.path(), false, &config, &mut |_| Control::Continue).unwrap();
            let grids: Vec<_> = out.qat.linears().into_iter().map(|(m, l)| (m, *l.inputs().unwrap())).collect();
            let calibrated = observe_inputs(&out.float, &text(400), &config, &quant).unwrap();
            (out, grids, calibrated)
        };
        let (frozen, grids, calibrated) = run(0);
        assert_eq!(grids, calibrated, "frozen before the first step: the ranges of the float result");
        assert_eq!(grids.len(), 14);
        for layer in grids.chunks(7) {
            assert!(layer[0].1 == layer[1].1 && layer[1].1 == layer[2].1 && layer[4].1 == layer[5].1, "one tensor");
        }
        let ([half, whole], all) = ([run(3), run(6)], run(100));
        assert!(half.1 != grids && half.1 != whole.1, "{quant:?}");
        assert_eq!((&whole.1, bits(&whole.0.qat)), (&all.1, bits(&all.0.qat)), "a phase has six steps");
        assert_ne!(bits(&frozen.qat), bits(&half.0.qat));
        let (out, _, _) = half;
        assert_ships(&out, &quant);
        // Rounding of the float result: its weights, on the grids that QAT starts from.
        let rounded = qat::round_to_nearest(out.float.clone(), &quant, &calibrated).unwrap();
        assert_eq!(rounded.linears()[3].1.inputs(), Some(&calibrated[3].1));
    }
}

fn resumes_after_every_step(quant: &QuantConfig, config: &LmTrainConfig) {
    let train = |path: &Path, resume: bool, config: &LmTrainConfig, on_step: &mut dyn FnMut(&Progress) -> Control| {
        train_as(quant, path, resume, config, on_step)
    };
    let all_bits = |o: &LmOutcome| {
        let grids = o.qat.linears().into_iter().filter_map(|(_, l)| l.inputs()?.params);
        (all_bits(o), grids.map(|p| (p.scale.to_bits(), p.zero)).collect::<Vec<_>>())
    };
    let straight = tempfile::tempdir().unwrap();
    let want = all_bits(&train(straight.path(), false, config, &mut |_| Control::Continue).unwrap());
    let want_log = log(straight.path());
    assert_eq!(want_log.lines().count(), 21);
    for stop in 1..=21 {
        let dir = tempfile::tempdir().unwrap();
        let stopped = train(dir.path(), false, config, &mut |p| match p.global_step == stop {
            true => Control::Stop,
            false => Control::Continue,
        });
        match stopped {
            Err(e) => {
                assert!(matches!(e, TrainError::Interrupted { step, .. } if step == stop as u64), "{e}");
                assert_eq!(e.exit_code(), 130);
            }
            Ok(_) => assert_eq!(stop, 21, "only a stop after the last step has nothing left to do"),
        }
        let mut first = None;
        let got = train(dir.path(), true, config, &mut |p| {
            first.get_or_insert(p.global_step);
            Control::Continue
        });
        assert_eq!(first, (stop < 21).then_some(stop + 1), "nothing is done twice");
        assert!(all_bits(&got.unwrap()) == want, "stopped after {stop}");
        assert_eq!(log(dir.path()), want_log, "stopped after {stop}");
    }
}

#[test]
fn c082_f093_a_run_that_died_after_any_step_resumes_to_the_same_bits() {
    // A panic out of the callback stands for the kill: whatever was not yet saved is lost. (The kill -9 of a real
    // process is tests/kill.rs.)
    let straight = tempfile::tempdir().unwrap();
    let config = settings();
    let want = all_bits(&train(straight.path(), false, &config, &mut |_| Control::Continue).unwrap());
    for die in [1, 3, 4, 5, 9, 10, 14, 15, 16, 20, 21] {
        let dir = tempfile::tempdir().unwrap();
        let died = std::panic::catch_unwind(|| {
            train(dir.path(), false, &config, &mut |p| {
                assert!(p.global_step != die, "killed");
                Control::Continue
            })
        });
        assert!(died.is_err());
        let mut first = None;
        let got = train(dir.path(), true, &config, &mut |p| {
            first.get_or_insert(p.global_step);
            Control::Continue
        });
        // Checkpoints: every 4 steps and at the ends of phases, 9, 15, 21.
        let saved = [0, 4, 8, 9, 12, 15, 16, 20].into_iter().rfind(|s| *s < die).unwrap();
        assert_eq!(first, Some(saved + 1));
        assert!(all_bits(&got.unwrap()) == want, "died in {die}");
        assert_eq!(log(dir.path()), log(straight.path()));
    }
}

#[test]
fn f112_a_loss_that_is_not_finite_stops_with_6_and_keeps_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = settings();
    config.float = LmPhase { learning_rate: 1e18, grad_clip: 1e18, warmup_steps: 6, ..config.float };
    config.save_every = 1;
    let mut finished = 0;
    let mut go = |resume: bool| {
        train(dir.path(), resume, &config, &mut |p| {
            finished = p.global_step;
            Control::Continue
        })
    };
    let first = go(false).unwrap_err();
    // Once more from the checkpoint: the same step fails in the same way.
    let again = go(true).unwrap_err();
    assert_eq!((first.exit_code(), first.to_string()), (6, again.to_string()));
    assert!((1..9).contains(&finished), "failed after step {finished}");
    let run = RunDir::open(dir.path(), &serde_json::to_value(&config).unwrap(), true, false).unwrap();
    let snapshot = run.latest().unwrap().unwrap();
    assert_eq!(snapshot.step, finished as u64);
    assert!(snapshot.tensors.iter().all(|t| t.data.iter().all(|x| x.is_finite())), "nothing broken was saved");
    assert_eq!(log(dir.path()).lines().count(), finished);
}

#[test]
fn f087_settings_that_cannot_work_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    type Change = fn(&mut LmTrainConfig);
    let cases: [(&str, Change); 10] = [
        ("train.steps", |c| c.float.steps = 0),
        ("train.batch_size", |c| c.float.batch_size = 0),
        ("train.seq_len", |c| c.float.seq_len = 33),
        ("qat.seq_len", |c| c.qat.seq_len = 1),
        ("train.warmup_steps", |c| c.float.warmup_steps = 10),
        ("train.learning_rate", |c| c.float.learning_rate = f64::NAN),
        ("qat.learning_rate", |c| c.qat.learning_rate = -1.0),
        ("qat.weight_decay", |c| c.qat.weight_decay = f64::INFINITY),
        ("train.grad_clip", |c| c.float.grad_clip = 0.0),
        ("train.save_every", |c| c.save_every = 0),
    ];
    for (field, change) in cases {
        let mut config = settings();
        change(&mut config);
        let mut run = RunDir::open(&dir.path().join(field), &serde_json::json!({}), false, false).unwrap();
        let e = train_lm(&model(), &text(400), &config, &quant(), &mut run, &mut |_| Control::Continue).unwrap_err();
        assert!(e.to_string().starts_with(field) && e.exit_code() == 2, "{field}: {e}");
    }
    let mut run = RunDir::open(&dir.path().join("tokens"), &serde_json::json!({}), false, false).unwrap();
    let mut run_on = |tokens: &[u32]| {
        train_lm(&model(), tokens, &settings(), &quant(), &mut run, &mut |_| Control::Continue).unwrap_err().to_string()
    };
    assert!(run_on(&text(16)).contains("more than 16 tokens"));
    assert!(run_on(&[vec![64], text(400)].concat()).contains("64 at token 0"));
    // Static activations have ranges, and someone has to find them; what one tensor is has one grid.
    let dir = tempfile::tempdir().unwrap();
    let e = train_as(&w4a4(), dir.path(), false, &settings(), &mut |_| Control::Continue).unwrap_err();
    assert!(e.to_string().starts_with("qat.observer") && e.exit_code() == 2, "{e}");
    let dir = tempfile::tempdir().unwrap();
    let config = LmTrainConfig { inputs: ranges(ObserverKind::MinMax, 0), ..settings() };
    let torn = QuantConfig::new(w4a4().scheme, &["k_proj".into()]).unwrap();
    let e = train_as(&torn, dir.path(), false, &config, &mut |_| Control::Continue).unwrap_err();
    assert!(e.to_string().contains("q_proj and model.layers.0.self_attn.k_proj read") && e.exit_code() == 2, "{e}");
}

#[test]
fn c090_f092_too_little_room_is_refused_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    // 2^38 weights: their checkpoints fit no disk of today, and neither would the model fit memory.
    let huge = LlamaConfig { hidden_size: 1 << 17, vocab_size: 1 << 21, ..model() };
    let mut run = RunDir::open(dir.path(), &serde_json::json!({}), false, false).unwrap();
    let e = train_lm(&huge, &text(400), &settings(), &quant(), &mut run, &mut |_| Control::Continue).unwrap_err();
    assert_eq!(e.exit_code(), 4, "{e}");
    assert!(e.to_string().contains("free"), "{e}");
}
