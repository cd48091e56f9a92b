//! The Llama against transformers (tests/golden), its loss, its seed and its names.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Gradients, Int, Tensor};
use dsq_checkpoint::{Checkpoint, LlamaConfig, ModelConfig};
use dsq_model::{HiddenTarget, IGNORED, Llama, Teacher, next_token_labels};
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

fn read(name: &str) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(golden(name)).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |b: &[u8]| b.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
    file.iter().map(|(n, t)| (n.to_owned(), floats(t.data()))).collect()
}

fn host<const D: usize>(t: Tensor<D>) -> Vec<f32> {
    t.into_data().try_to_vec().unwrap()
}

fn largest(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |a, v| a.max(v.abs()))
}

fn worst(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    largest(&a.iter().zip(b).map(|(a, b)| a - b).collect::<Vec<_>>())
}

/// Gradients by Hugging Face name.
fn gradients(model: &Llama, grads: &Gradients) -> BTreeMap<String, Vec<f32>> {
    struct Collect<'a>(Vec<String>, &'a Gradients, BTreeMap<String, Vec<f32>>);
    impl ModuleVisitor for Collect<'_> {
        fn enter_module(&mut self, name: &str, container: &str) {
            dsq_model::enter(&mut self.0, name, container);
        }
        fn exit_module(&mut self, _name: &str, container: &str) {
            dsq_model::leave(&mut self.0, container);
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let path = self.0.join(".");
            let Some(grad) = param.val().grad(self.1) else {
                // Of an expert that no token is sent to, and of what the choice of experts alone sees.
                let spared = path.contains(".experts.") || path.ends_with("e_score_correction_bias");
                assert!(spared, "{path}: every parameter has a gradient");
                return;
            };
            self.2.insert(dsq_model::tensor_name(&path), host(grad));
        }
    }
    let mut collect = Collect(Vec::new(), grads, BTreeMap::new());
    model.visit(&mut collect);
    collect.2
}

fn tiny(device: &Device) -> Llama {
    Llama::from_checkpoint(&Checkpoint::open(&golden("llama_tiny")).unwrap(), device).unwrap()
}

fn config() -> LlamaConfig {
    match Checkpoint::open(&golden("llama_tiny_untied")).unwrap().config() {
        ModelConfig::Llama(c) => c.clone(),
        _ => unreachable!("the folder holds a Llama"),
    }
}

/// The golden models.
const ALL: [&str; 12] = [
    "llama_tiny",
    "llama_tiny_untied",
    "llama_tiny_llama3rope",
    "qwen2_tiny",
    "qwen3_tiny",
    "mistral_tiny",
    "llama_bias_tiny",
    "qwen3_bias_tiny",
    "mixtral_tiny",
    "deepseek_v2_lite_tiny",
    "deepseek_v2_tiny",
    "deepseek_v3_tiny",
];

#[test]
fn logits_are_those_of_transformers() {
    for folder in ALL {
        let checkpoint = Checkpoint::open(&golden(folder)).unwrap();
        let tokens = std::fs::read_to_string(golden(folder).join("tokens.json")).unwrap();
        let tokens: Vec<Vec<i32>> = serde_json::from_str(&tokens).unwrap();
        let want = read(&format!("{folder}/logits.safetensors"));
        for device in [Device::flex(), Device::flex().autodiff()] {
            let model = Llama::from_checkpoint(&checkpoint, &device).unwrap();
            for (i, ids) in tokens.iter().enumerate() {
                let want = &want[&format!("logits.{i}")];
                let t = Tensor::<1, Int>::from_ints(ids.as_slice(), &device).reshape([1, ids.len()]);
                let got = host(model.forward(t));
                // transformers' own f32 logits are within 2e-5 of f64; twice that for two f32 computations.
                assert!(worst(&got, want) < 4e-5, "{folder} {i}: {}", worst(&got, want));
            }
        }
    }
}

/// The cases of `variants.json`: the weights of one folder under another config. A batch of two: the second begins as the first.
#[test]
fn f045_variants_of_the_config_give_the_logits_of_transformers() {
    let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(golden("variants.json")).unwrap()).unwrap();
    let logits = read("variants.safetensors");
    let mut count = 0;
    for case in cases.as_array().unwrap() {
        let (name, base) = (case["name"].as_str().unwrap(), case["base"].as_str().unwrap());
        count += 1;
        let dir = tempfile::tempdir().unwrap();
        std::fs::copy(golden(base).join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
        std::fs::write(dir.path().join("config.json"), case["config"].to_string()).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let vocab = case["config"]["vocab_size"].as_u64().unwrap() as usize;
        let tokens: Vec<i32> = serde_json::from_value(case["tokens"].clone()).unwrap();
        let rows: Vec<usize> = serde_json::from_value(case["rows"].clone()).unwrap();
        let other: Vec<i32> = tokens.iter().enumerate().map(|(i, t)| if i < 90 { *t } else { (t + 1) % 50 }).collect();
        for device in [Device::flex(), Device::flex().autodiff()] {
            let model = Llama::from_checkpoint(&checkpoint, &device).unwrap();
            let got = host(model.logits(Arc::new([tokens.clone(), other.clone()].concat()), 2));
            let picked: Vec<f32> = rows.iter().flat_map(|r| got[r * vocab..][..vocab].to_vec()).collect();
            // transformers' own f32 logits are up to 4.2e-5 off their f64 values here; so may ours be.
            assert!(worst(&picked, &logits[name]) < 8.4e-5, "{name}: {}", worst(&picked, &logits[name]));
            let second = &got[tokens.len() * vocab..];
            assert!(worst(&got[..90 * vocab], &second[..90 * vocab]) < 8.4e-5, "{name}");
        }
    }
    assert_eq!(count, 15);
}

/// Biases, norms of heads, windows, routers, experts and latents pass gradients as in torch.
#[test]
fn gradients_of_every_architecture_are_those_of_torch() {
    let device = Device::flex().autodiff();
    for folder in &ALL[3..] {
        let folder = *folder;
        let model = Llama::from_checkpoint(&Checkpoint::open(&golden(folder)).unwrap(), &device).unwrap();
        let bytes = std::fs::read(golden(folder).join("gradients.safetensors")).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let numbers = |name: &str| -> Vec<[u8; 4]> { file.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec() };
        let ids: Vec<i32> = numbers("batch").into_iter().map(i32::from_le_bytes).collect();
        let labels = next_token_labels(&ids, 25);
        let count = labels.iter().filter(|&&l| l != IGNORED).count();
        let loss = model.loss(Arc::new(ids), Arc::new(labels), 2, count);
        let got = gradients(&model, &loss.backward());
        let first = f32::from_le_bytes(numbers("loss")[0]);
        assert!((host(loss)[0] - first).abs() < 1e-5 * first, "{folder}");
        let names: Vec<&str> = file.names().into_iter().filter_map(|n| n.strip_prefix("grad.")).collect();
        let named = |part: &str| names.iter().any(|n| n.contains(part));
        assert_eq!(named("mlp.gate.weight"), ALL[8..].contains(&folder));
        assert_eq!(named("kv_b_proj.weight"), ALL[9..].contains(&folder));
        assert_eq!(named("q_proj.bias"), folder == "qwen2_tiny" || folder.contains("bias"));
        assert_eq!(
            (named("o_proj.bias"), named("k_norm.weight")),
            (folder.contains("bias"), folder.starts_with("qwen3"))
        );
        for name in names {
            let want: Vec<f32> = numbers(&format!("grad.{name}")).into_iter().map(f32::from_le_bytes).collect();
            let error = worst(&got[name], &want);
            // The bias of k moves all scores of a query alike but for the rotation, so its gradient is what terms that nearly
            // cancel leave: it is held against that of q's.
            let size = largest(&want).max(if name.ends_with("k_proj.bias") { 1e-2 } else { 0.0 });
            assert!(error < 1e-4 * size, "{folder} {name}: {error} of {}", largest(&want));
        }
    }
}

#[test]
fn frozen_floats_leave_the_weights_of_linears_to_train() {
    let device = Device::flex().autodiff();
    // Of every expert of mixtral some token is sent to: 2 x (4 + 6 x 3).
    for (folder, linears) in [("qwen2_tiny", 21), ("qwen3_tiny", 21), ("mixtral_tiny", 44)] {
        let model = Llama::from_checkpoint(&Checkpoint::open(&golden(folder)).unwrap(), &device).unwrap();
        let model = model.freeze_floats();
        let ids: Vec<i32> = (0..20).collect();
        let grads = model.loss(Arc::new(ids.clone()), Arc::new(next_token_labels(&ids, 10)), 2, 18).backward();
        struct Collect<'a>(Vec<String>, &'a Gradients, Vec<String>);
        impl ModuleVisitor for Collect<'_> {
            fn enter_module(&mut self, name: &str, container: &str) {
                dsq_model::enter(&mut self.0, name, container);
            }
            fn exit_module(&mut self, _name: &str, container: &str) {
                dsq_model::leave(&mut self.0, container);
            }
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
                if param.val().grad(self.1).is_some() {
                    self.2.push(self.0.join("."));
                }
            }
        }
        let mut collect = Collect(Vec::new(), &grads, Vec::new());
        model.visit(&mut collect);
        assert_eq!(collect.2.len(), linears, "{folder}: {:?}", collect.2);
        assert!(collect.2.iter().all(|n| n.ends_with("_proj.weight")), "{:?}", collect.2);
    }
}

#[test]
fn a_batch_gives_the_logits_of_its_sequences() {
    let device = Device::flex();
    let model = tiny(&device);
    let ids: Vec<i32> = (0..3 * 40).map(|i| (i * 37 + 5) % 128).collect();
    let all = host(model.logits(Arc::new(ids.clone()), 3));
    let each: Vec<f32> = ids.chunks(40).flat_map(|s| host(model.logits(Arc::new(s.to_vec()), 1))).collect();
    assert!(worst(&all, &each) < 4e-5);
}

#[test]
fn loss_and_gradients_are_those_of_torch() {
    let device = Device::flex().autodiff();
    let model = tiny(&device);
    let options = std::fs::read_to_string(golden("llama_tiny_training/training.json")).unwrap();
    let options: serde_json::Value = serde_json::from_str(&options).unwrap();
    let batch: Vec<Vec<i32>> = serde_json::from_value(options["batch"].clone()).unwrap();
    let want = read("llama_tiny_training/training.safetensors");
    // As in torch: the model sees 24 tokens of 25 ... or all 25 with the last unlabelled; both give the same loss.
    let ids: Vec<i32> = batch.concat();
    let labels = next_token_labels(&ids, 25);
    let count = labels.iter().filter(|&&l| l != IGNORED).count();
    let loss = model.loss(Arc::new(ids), Arc::new(labels), 4, count);
    let got = gradients(&model, &loss.backward());
    let first = options["losses_before_each_step_and_after_the_last"][0].as_f64().unwrap();
    assert!((f64::from(host(loss)[0]) - first).abs() < 1e-5 * first);
    let names: Vec<&str> = want.keys().filter_map(|n| n.strip_prefix("grad.")).collect();
    assert_eq!(names, got.keys().map(String::as_str).collect::<Vec<_>>());
    for name in names {
        let want = &want[&format!("grad.{name}")];
        let error = worst(&got[name], want);
        assert!(error < 1e-4 * largest(want), "{name}: {error} of {}", largest(want));
    }
}

#[test]
fn c087_the_mean_goes_over_all_label_tokens_of_the_micro_batches() {
    // Losses 5 (one label) and 1 (nine labels): the mean over tokens is 1.4, the mean of means 3. Here with the
    // losses that a model gives; the identity is the same.
    let device = Device::flex().autodiff();
    let model = tiny(&device);
    let ids: Vec<i32> = (0..20).map(|i| (i * 29 + 3) % 128).collect();
    let mut labels = [IGNORED; 20];
    labels[3] = 77;
    labels[10..19].copy_from_slice(&ids[11..20]);
    let run = |range: std::ops::Range<usize>| {
        let b = range.len() / 10;
        let loss = model.loss(Arc::new(ids[range.clone()].to_vec()), Arc::new(labels[range].to_vec()), b, 10);
        let grads = gradients(&model, &loss.backward());
        (host(loss)[0], grads)
    };
    let (whole, (a, b)) = (run(0..20), (run(0..10), run(10..20)));
    assert!((whole.0 - (a.0 + b.0)).abs() < 1e-6 * whole.0);
    assert!((whole.0 - (10.0 * a.0 + 10.0 * b.0 / 9.0) / 2.0).abs() > 0.01, "the mean of means differs");
    for (name, want) in &whole.1 {
        let sum: Vec<f32> = a.1[name].iter().zip(&b.1[name]).map(|(a, b)| a + b).collect();
        assert!(worst(&sum, want) < 2e-6 * largest(want).max(1.0), "{name}");
    }
}

#[test]
fn c066_f114_samples_without_labels_change_nothing_and_are_zero_alone() {
    let device = Device::flex().autodiff();
    let model = tiny(&device);
    let ids: Vec<i32> = (0..30).map(|i| (i * 41 + 1) % 128).collect();
    let mut labels = vec![IGNORED; 30];
    labels[..9].copy_from_slice(&ids[1..10]);
    let alone = model.loss(Arc::new(ids[..10].to_vec()), Arc::new(labels[..10].to_vec()), 1, 9);
    let with = model.loss(Arc::new(ids.clone()), Arc::new(labels.clone()), 3, 9);
    assert!((host(alone.clone())[0] - host(with.clone())[0]).abs() < 1e-6);
    let (a, b) = (gradients(&model, &alone.backward()), gradients(&model, &with.backward()));
    for (name, want) in &a {
        assert!(worst(&b[name], want) < 2e-6 * largest(want).max(1.0), "{name}");
    }
    let none = model.loss(Arc::new(ids[10..].to_vec()), Arc::new(labels[10..].to_vec()), 2, 0);
    let grads = gradients(&model, &none.backward());
    assert_eq!(host(none), [0.0]);
    assert!(grads.values().flatten().all(|&g| g == 0.0));
}

/// The teacher's logits and residual streams for a batch of `b` sequences.
fn taught(teacher: &Llama, ids: &[i32], b: usize, weight: f32) -> (Teacher, HiddenTarget) {
    let (states, logits) = teacher.states_and_logits(Arc::new(ids.to_vec()), b);
    let states = states.into_iter().map(host).collect();
    (Teacher { logits: Arc::new(host(logits)), temperature: 1.0 }, HiddenTarget { states, weight })
}

/// `tiny` with every matrix moved a little along `direction`, by `step`.
fn moved(from: &Llama, direction: &dyn Fn(&str, usize) -> f32, step: f32, device: &Device) -> Llama {
    let mut tensors = from.named_tensors();
    for (name, _, data) in &mut tensors {
        data.iter_mut().enumerate().for_each(|(i, v)| *v += step * direction(name, i));
    }
    let find = |name: &str| tensors.iter().find(|t| t.0 == name).map(|t| t.2.as_slice());
    Llama::from_tensors(from.config(), device, find).unwrap()
}

#[test]
fn the_hidden_state_loss_is_its_formula_and_its_gradient_the_slope() {
    let device = Device::flex().autodiff();
    let teacher = tiny(&Device::flex());
    let noise = |name: &str, i: usize| ((i * 37 + name.len() * 11) % 17) as f32 / 8.0 - 1.0;
    let student = moved(&teacher, &noise, 0.02, &device);
    let ids: Vec<i32> = (0..24).map(|i| (i * 29 + 3) % 128).collect();
    let mut labels = next_token_labels(&ids, 8);
    labels[9] = IGNORED;
    let weight = 0.7;
    let loss = |model: &Llama, weight: f32| {
        let (target, hidden) = taught(&teacher, &ids, 3, weight);
        let hidden = (weight > 0.0).then_some(hidden);
        model.distill_loss(Arc::new(ids.clone()), Arc::new(labels.clone()), 3, target, 1.0, hidden)
    };
    let (without, with) = (loss(&student, 0.0), loss(&student, weight));
    // The formula in f64, from the streams of both models.
    let streams = |model: &Llama| -> Vec<Vec<f32>> {
        model.states_and_logits(Arc::new(ids.clone()), 3).0.into_iter().map(host).collect()
    };
    let d = teacher.config().hidden_size;
    let mut want = 0.0f64;
    let (ours, theirs) = (streams(&student), streams(&teacher));
    for (s, t) in ours.iter().zip(&theirs) {
        let (mut error, mut size) = (0.0f64, 0.0f64);
        for (i, (s, t)) in s.iter().zip(t).enumerate().filter(|(i, _)| labels[i / d] != IGNORED) {
            assert!(i / d != 9 && i / d % 8 != 7);
            error += (f64::from(*s) - f64::from(*t)).powi(2);
            size += f64::from(*t).powi(2);
        }
        want += error / size / ours.len() as f64;
    }
    let got = f64::from(host(with.clone())[0] - host(without.clone())[0]);
    assert!(ours.len() == teacher.config().num_hidden_layers && want > 1e-4);
    assert!((got - f64::from(weight) * want).abs() < 1e-5 * want + 1e-6, "{got} against {want}");

    // The slope along the gradient of what the hidden states add (in the loss's own f32, so a step that is not too small).
    let (a, b) = (gradients(&student, &with.backward()), gradients(&student, &without.backward()));
    let part: BTreeMap<String, Vec<f32>> =
        a.into_iter().map(|(name, a)| (name.clone(), a.iter().zip(&b[&name]).map(|(a, b)| a - b).collect())).collect();
    let norm = part.values().flatten().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    let along = |name: &str, i: usize| (f64::from(part[name][i]) / norm) as f32;
    let at = |step: f32| {
        let model = moved(&student, &along, step, &device);
        f64::from(host(loss(&model, weight))[0]) - f64::from(host(loss(&model, 0.0))[0])
    };
    let h = 2e-3;
    let slope = (at(h) - at(-h)) / (2.0 * f64::from(h));
    assert!((slope - norm).abs() < 0.01 * norm, "slope {slope}, gradient {norm}");
    assert!(part["model.norm.weight"].iter().all(|v| v.abs() < 1e-6), "behind the last residual stream");
}

#[test]
fn a_student_that_is_its_teacher_has_no_hidden_state_loss_and_ignored_tokens_do_not_count() {
    let device = Device::flex().autodiff();
    let teacher = tiny(&device);
    let ids: Vec<i32> = (0..20).map(|i| (i * 41 + 1) % 128).collect();
    let labels = next_token_labels(&ids, 10);
    let (target, hidden) = taught(&teacher, &ids, 2, 3.0);
    let loss = teacher.distill_loss(Arc::new(ids.clone()), Arc::new(labels.clone()), 2, target, 1.0, Some(hidden));
    let grads = gradients(&teacher, &loss.backward());
    assert_eq!(host(loss), [0.0]);
    assert!(grads.values().flatten().all(|&g| g == 0.0));

    // A second sequence without labels changes nothing (the divergence, which counts every token, is taken off), whatever
    // the teacher says of it.
    let student = moved(&teacher, &|_, i| (i % 5) as f32 - 2.0, 0.01, &device);
    let part = |ids: &[i32], labels: &[i32], b: usize, spoil: bool| {
        let mut all = [0.0f32; 2];
        for (weight, out) in [0.0, 1.0].into_iter().zip(&mut all) {
            let (target, mut hidden) = taught(&teacher, ids, b, weight);
            if spoil {
                hidden.states.iter_mut().for_each(|s| s[10 * teacher.config().hidden_size..].fill(1e3));
            }
            let (ids, labels) = (Arc::new(ids.to_vec()), Arc::new(labels.to_vec()));
            *out = host(student.distill_loss(ids, labels, b, target, 1.0, Some(hidden)))[0];
        }
        all[1] - all[0]
    };
    let ignored = [labels[..10].to_vec(), vec![IGNORED; 10]].concat();
    let alone = part(&ids[..10], &labels[..10], 1, false);
    assert!(alone > 1e-3);
    for spoil in [false, true] {
        assert!((part(&ids, &ignored, 2, spoil) - alone).abs() < 1e-5 * alone + 1e-6);
    }
    assert!((part(&ids, &labels, 2, false) - alone).abs() > 1e-4 * alone, "with labels it does count");
    assert_eq!(part(&ids, &[IGNORED; 20], 2, true), 0.0);
}

#[test]
fn c084_a_seed_decides_every_bit() {
    let bits = |m: &Llama| -> Vec<(String, Vec<u32>)> {
        m.named_tensors().into_iter().map(|(n, _, v)| (n, v.iter().map(|x| x.to_bits()).collect())).collect()
    };
    let (c, device) = (config(), Device::flex());
    let one = bits(&Llama::new(&c, 7, &device));
    assert_eq!(one, bits(&Llama::new(&c, 7, &device.clone().autodiff())));
    let two = bits(&Llama::new(&c, 8, &device));
    for ((name, a), (_, b)) in one.iter().zip(&two) {
        assert_eq!(a == b, name.ends_with("norm.weight"), "{name}");
    }
    // No two matrices share a stream.
    for (i, (name, a)) in one.iter().enumerate().filter(|(_, (n, _))| !n.ends_with("norm.weight")) {
        assert!(one[i + 1..].iter().all(|(_, b)| a[..16] != b[..16]), "{name}");
    }
}

#[test]
fn tensors_have_the_names_and_shapes_of_the_config_and_come_back() {
    let device = Device::flex();
    for folder in ALL {
        let checkpoint = Checkpoint::open(&golden(folder)).unwrap();
        let model = Llama::from_checkpoint(&checkpoint, &device).unwrap();
        let tensors = model.named_tensors();
        let mut names: Vec<String> = tensors.iter().map(|t| t.0.clone()).collect();
        let mut want = checkpoint.names();
        want.retain(|n| model.config().mtp_layer(n).is_none());
        names.sort();
        want.sort();
        assert_eq!(names, want);
        for (name, shape, data) in &tensors {
            assert_eq!(*shape, checkpoint.info(name).unwrap().shape);
            assert_eq!(*data, checkpoint.read_f32(name).unwrap());
        }
        let find = |name: &str| tensors.iter().find(|t| t.0 == name).map(|t| t.2.as_slice());
        assert_eq!(Llama::from_tensors(model.config(), &device, find).unwrap().named_tensors(), tensors);
        let e =
            Llama::from_tensors(model.config(), &device, |n| find(n).filter(|_| n != "model.norm.weight")).unwrap_err();
        assert!(e.to_string().contains("model.norm.weight") && e.exit_code() == 3, "{e}");
        let modules: Vec<String> = model.linears().into_iter().map(|l| l.0).collect();
        let want: Vec<String> = checkpoint.config().linears().into_iter().map(|l| l.module).collect();
        assert_eq!(modules, want);
    }
}
