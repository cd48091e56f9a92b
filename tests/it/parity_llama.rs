//! Parity of the language model: prepared training graph == converted matrices == exported folder read back == what the
//! runtime's layers hold, bit for bit, over many seeds and schemes; and both forward passes within a derived bound of an
//! f64 one. Ties `dsq-model` and `dsq-runtime`, which never see each other. The bound itself is `llama_bound.rs`.

use crate::llama_bound::{Linear, PASSES, Reference, Trace};
use dsq_checkpoint::{Checkpoint, ExportTensor, LinearWeight, LlamaConfig, ModelConfig, export_folder};
use dsq_kernels::{Fp4Linear, Fp8Linear, Int4Linear, Int8Linear};
use dsq_model::Llama;
use dsq_quant::{
    FloatType, Granularity, Mapping, QuantArgs, QuantConfig, QuantScheme, QuantType, QuantizedMatrix, WeightObserver,
};
use dsq_runtime::{LlamaRuntime, Logits};
use dsq_train::qat;
use std::path::Path;
use std::sync::Arc;

/// A deterministic stream of numbers in -1 .. 1.
fn numbers(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// One case: an architecture, a scheme, and a length of text.
pub(crate) struct Case {
    seed: u64,
    pub(crate) config: LlamaConfig,
    pub(crate) quant: QuantConfig,
    pub(crate) tokens: usize,
}

impl Case {
    /// The 60 seeds go through granularity x scale dtype x (tied, ignored layers, mapping, code type), sizes that only the
    /// granularity limits, and texts that end inside and at the blocks of 16 and 32 positions of the kernels.
    pub(crate) fn new(seed: u64) -> Self {
        let pick = seed as usize;
        // (granularity; hidden, inner, heads, kv heads, head width, vocabulary)
        let sizes = [
            (Granularity::PerTensor, [37, 51, 3, 1, 10, 61]),
            (Granularity::PerChannel, [100, 147, 6, 3, 14, 97]),
            (Granularity::PerGroup(16), [48, 80, 4, 2, 12, 60]),
            (Granularity::PerGroup(32), [96, 160, 4, 4, 16, 75]),
            (Granularity::PerGroup(64), [64, 192, 4, 1, 32, 50]),
        ];
        let (granularity, [hidden, inner, heads, kv, width, vocab]) = sizes[pick % 5];
        let tied = pick % 8 < 4;
        let config = LlamaConfig {
            model_type: "llama".into(),
            hidden_size: hidden,
            intermediate_size: inner,
            num_hidden_layers: 1 + pick % 3,
            num_attention_heads: heads,
            num_key_value_heads: kv,
            head_dim: width,
            vocab_size: vocab,
            max_position_embeddings: 64,
            rms_norm_eps: 1e-5,
            rope_theta: [10_000.0, 500_000.0, 50.0][pick / 7 % 3],
            rope_scaling: None,
            windows: Vec::new(),
            experts: None,
            latent: None,
            biases: Default::default(),
            tie_word_embeddings: tied,
            bos_token_id: None,
            eos_token_ids: Vec::new(),
            pad_token_id: None,
        };
        let weights = QuantArgs {
            qtype: match pick % 11 {
                10 => QuantType::Int8,
                9 => QuantType::Int3,
                8 => QuantType::Int2,
                // Float codes have neither groups nor zero points.
                7 if !matches!(granularity, Granularity::PerGroup(_)) && pick % 4 != 3 => QuantType::Fp8E4M3,
                _ => QuantType::Int4,
            },
            granularity,
            mapping: if pick % 4 == 3 { Mapping::Asymmetric } else { Mapping::Symmetric },
            scale_dtype: FloatType::ALL[pick / 5 % 3],
            observer: [WeightObserver::MinMax, WeightObserver::Mse][pick / 2 % 2],
        };
        let ignore: &[&str] = match pick / 3 % 4 {
            0 => &["lm_head"],
            1 => &["re:.*layers\\.0\\.(mlp\\.up_proj|self_attn\\.k_proj)$"],
            _ => &[],
        };
        let ignore: Vec<String> = ignore.iter().map(|s| s.to_string()).collect();
        let quant = QuantConfig::new(QuantScheme { weights, activations: None }, &ignore).unwrap();
        Self { seed, config, quant, tokens: [1, 16, 17, 32, 33, 48, 5, 23][pick % 8] }
    }

    /// Matrices of a variance that keeps activations near 1, with some rows and columns much larger and smaller; norm
    /// weights well away from 1, some negative.
    pub(crate) fn model(&self) -> Llama {
        // The device is the only CPU backend of this workspace; naming its type would take a dependency on Burn.
        let device = Default::default();
        let mut tensors = Llama::new(&self.config, self.seed, &device).named_tensors();
        let mut next = numbers(self.seed + 1000);
        for (_, shape, data) in &mut tensors {
            if shape.len() == 1 {
                data.iter_mut().for_each(|w| *w = 0.9 + 0.8 * next());
                data[0] = -0.7;
                continue;
            }
            let k = shape[1];
            let gain = 1.2 / (0.02 * (k as f32).sqrt());
            data.iter_mut().for_each(|w| *w *= gain * (1.0 + 0.3 * next()));
            data[..k].iter_mut().for_each(|w| *w *= 3.0);
            data.iter_mut().skip(k - 1).step_by(k).for_each(|w| *w *= 0.01);
        }
        let find = |name: &str| tensors.iter().find(|t| t.0 == name).map(|t| t.2.as_slice());
        Llama::from_tensors(&self.config, &device, find).unwrap()
    }

    pub(crate) fn ids(&self, sequence: u64) -> Vec<u32> {
        let mut next = numbers(self.seed * 2 + sequence + 500);
        let vocab = self.config.vocab_size;
        (0..self.tokens).map(|_| (((next() + 1.0) * 0.5 * vocab as f32) as usize).min(vocab - 1) as u32).collect()
    }

    pub(crate) fn export(&self, prepared: &Llama, converted: &[(String, QuantizedMatrix)], out: &Path) {
        let layers = prepared.linears();
        let stored = |module: &str| {
            let grid = layers.iter().find(|(name, _)| name == module)?.1.inputs()?;
            Some((grid.args, grid.params?))
        };
        let tensors = prepared.named_tensors().into_iter().map(|(name, shape, data)| {
            match converted.iter().find(|c| name.strip_suffix(".weight") == Some(&c.0)) {
                Some((module, matrix)) => ExportTensor::Linear {
                    module: module.clone(),
                    shape,
                    matrix: matrix.clone(),
                    activation: stored(module),
                    source: None,
                    order: None,
                },
                None => ExportTensor::Float { name, shape, data, dtype: FloatType::F32 },
            }
        });
        let config = ModelConfig::Llama(self.config.clone());
        export_folder(out, &config, tensors.collect(), Some(&self.quant), vec![], false).unwrap();
    }
}

pub(crate) fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// The values that the runtime's layer of this matrix holds, row by row.
fn packed_rows(matrix: &QuantizedMatrix) -> Vec<f32> {
    let mut out = vec![0.0; matrix.n * matrix.k];
    for (i, row) in out.chunks_exact_mut(matrix.k).enumerate() {
        match matrix.args.qtype {
            QuantType::Int2 | QuantType::Int3 | QuantType::Int4 => Int4Linear::new(matrix).unwrap().row(i, row),
            QuantType::Int8 => Int8Linear::new(matrix).unwrap().row(i, row),
            QuantType::Fp8E4M3 | QuantType::Fp8E5M2 => Fp8Linear::new(matrix).unwrap().row(i, row),
            QuantType::Fp4E2M1 => Fp4Linear::new(matrix).unwrap().row(i, row),
        }
    }
    out
}

/// Compares the folder with what was to be exported, exactly: scheme, codes, scales, zero points; the grid point of every
/// weight in the four places that hold it; every float tensor. The first difference, by name.
pub(crate) fn compare(
    ckpt: &Checkpoint,
    prepared: &Llama,
    converted: &[(String, QuantizedMatrix)],
) -> Result<(), String> {
    let differs = |name: &str, what: &str| Err(format!("{name}: {what}"));
    for (name, layer) in prepared.linears() {
        let read = ckpt.linear(&name).map_err(|e| e.to_string())?;
        let graph = bits(&layer.effective_weight().into_data().try_into_vec::<f32>().unwrap());
        let Some((_, matrix)) = converted.iter().find(|c| c.0 == name) else {
            if !matches!(read, LinearWeight::Float { .. }) || bits(&read.into_f32()) != graph {
                return differs(&name, "float weight");
            }
            continue;
        };
        let LinearWeight::Quantized(read) = read else { return differs(&name, "not quantized") };
        if (read.args, read.n, read.k) != (matrix.args, matrix.n, matrix.k) {
            return differs(&name, "scheme");
        }
        if read.codes != matrix.codes {
            return differs(&name, "codes");
        }
        if bits(&read.scales) != bits(&matrix.scales) {
            return differs(&name, "scales");
        }
        if read.zeros != matrix.zeros {
            return differs(&name, "zero points");
        }
        for (place, values) in [
            ("converted", matrix.dequantize()),
            ("read back", read.dequantize()),
            ("runtime", packed_rows(&read)),
            ("read as floats", LinearWeight::Quantized(read.clone()).into_f32()),
        ] {
            if bits(&values) != graph {
                return differs(&name, place);
            }
        }
    }
    for (name, _, data) in prepared.named_tensors() {
        if !converted.iter().any(|c| name.strip_suffix(".weight") == Some(&c.0))
            && bits(&ckpt.read_f32(&name).map_err(|e| e.to_string())?) != bits(&data)
        {
            return differs(&name, "float tensor");
        }
    }
    Ok(())
}

/// The f64 model of the exported folder.
fn reference<'a>(case: &'a Case, ckpt: &Checkpoint, converted: &[(String, QuantizedMatrix)]) -> Reference<'a> {
    Reference::new(&case.config, |module| match converted.iter().find(|c| c.0 == module) {
        Some((_, matrix)) => Linear::new(&matrix.dequantize(), matrix.k, Some(matrix.group_len())),
        None => {
            let name = format!("{module}.weight");
            let k = ckpt.info(&name).unwrap().shape.last().copied().unwrap();
            Linear::new(&ckpt.read_f32(&name).unwrap(), k, None)
        }
    })
}

/// Largest distance of `logits` from the f64 ones in bounds of `pass`, and largest bound over the largest logit. Of all
/// logits, the `count` that are farthest off and as many spread over the text get their bounds computed. NaN counts as
/// infinitely far.
fn distance(want: &Trace, logits: &[f32], pass: usize, count: usize) -> (f64, f64) {
    assert_eq!(want.logits().len(), logits.len());
    let far: Vec<f64> = want.logits().iter().zip(logits).map(|(w, g)| (w - f64::from(*g)).abs()).collect();
    let mut order: Vec<usize> = (0..far.len()).collect();
    order.sort_by(|a, b| far[*b].total_cmp(&far[*a]));
    let spread = (0..count).map(|i| (i + 1) * far.len() / count - 1);
    let largest = want.logits().iter().fold(0.0f64, |m, l| m.max(l.abs()));
    let picks = order[..count.min(far.len())].iter().copied().chain(spread);
    picks.fold((0.0, 0.0), |(ratio, loose), at| {
        let bound = want.bounds(at).0[pass];
        let here = if far[at].is_nan() { f64::INFINITY } else { far[at] / bound };
        (here.max(ratio), (bound / largest).max(loose))
    })
}

#[test]
fn training_graph_export_and_runtime_agree_over_seeds_and_schemes() {
    let dir = tempfile::tempdir().unwrap();
    // Largest error over its bound, and largest bound over the largest logit, of the graph and of the runtime.
    let (mut worst, mut loosest) = ([0.0f64; 2], [0.0f64; 2]);
    for seed in 0..60 {
        let case = Case::new(seed);
        let prepared = qat::prepare(case.model(), &case.quant).unwrap();
        let converted = qat::convert(&prepared).unwrap();
        let out = dir.path().join(seed.to_string());
        case.export(&prepared, &converted, &out);

        let ckpt = Checkpoint::open(&out).unwrap();
        compare(&ckpt, &prepared, &converted).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
        assert!(ckpt.faults().iter().all(|f| f.severity == dsq_checkpoint::Severity::Note), "{:?}", ckpt.faults());

        let (b, vocab) = (2, case.config.vocab_size);
        let sequences: Vec<Vec<u32>> = (0..b).map(|s| case.ids(s)).collect();
        let ids = Arc::new(sequences.concat().iter().map(|&id| id as i32).collect::<Vec<i32>>());
        let host = |model: &Llama| model.logits(ids.clone(), b as usize).into_data().try_into_vec::<f32>().unwrap();
        let graph = host(&prepared);
        // The float model of the folder is the prepared one: the same graph on the same values.
        let again = Llama::from_checkpoint(&ckpt, &Default::default()).unwrap();
        assert_eq!(bits(&host(&again)), bits(&graph), "seed {seed}");
        assert_ne!(bits(&host(&qat::release(prepared.clone()))), bits(&graph), "seed {seed}: quantization is visible");

        let runtime = LlamaRuntime::load(&ckpt, 2).unwrap();
        let reference = reference(&case, &ckpt, &converted);
        for (sequence, graph) in sequences.iter().zip(graph.chunks(case.tokens * vocab)) {
            let mut cache = runtime.new_cache(case.tokens).unwrap();
            let got = runtime.forward(sequence, &mut cache, Logits::All).unwrap();
            // Token by token: the same values.
            cache.truncate(0).unwrap();
            let steps = sequence.iter().flat_map(|&id| runtime.forward(&[id], &mut cache, Logits::Last).unwrap());
            assert!(steps.eq(got.iter().copied()), "seed {seed}: a prompt in one piece and token by token");
            let want = reference.run(sequence);
            for (pass, logits) in [graph, &got].into_iter().enumerate() {
                let (ratio, loose) = distance(&want, logits, pass, 4);
                assert!(ratio <= 1.0, "seed {seed}: the {} is {ratio} bounds off", PASSES[pass]);
                worst[pass] = worst[pass].max(ratio);
                loosest[pass] = loosest[pass].max(loose);
            }
        }
    }
    for pass in 0..2 {
        let (worst, loosest) = (worst[pass], loosest[pass]);
        println!(
            "{}: largest error {worst:.3} of its bound; largest bound {loosest:.1e} of the largest logit",
            PASSES[pass]
        );
    }
    // A bound as wide as the logits would let anything pass, and an error of 0 would mean that nothing was compared.
    assert!(loosest.iter().all(|l| *l < 0.05) && worst.iter().all(|w| *w > 0.0), "{loosest:?} {worst:?}");
}

#[test]
fn the_derivatives_behind_the_bound_are_those_of_the_pass() {
    let case = Case::new(12);
    assert!(case.config.num_hidden_layers == 1 && case.tokens == 33);
    let case = Case { config: LlamaConfig { num_hidden_layers: 2, ..case.config.clone() }, tokens: 7, ..case };
    let tensors = case.model().named_tensors();
    let reference = Reference::new(&case.config, |module| {
        let (_, shape, data) = tensors.iter().find(|t| t.0.strip_suffix(".weight") == Some(module)).unwrap();
        Linear::new(data, *shape.last().unwrap(), None)
    });
    let x = reference.embed(&case.ids(0));
    let mut next = numbers(9);
    let way: Vec<f64> = x.iter().map(|_| f64::from(next())).collect();
    let moved = |by: f64| reference.run_embedded(x.iter().zip(&way).map(|(x, w)| x + by * w).collect());
    let (here, ahead, back) = (moved(0.0), moved(1e-5), moved(-1e-5));
    for at in (3..here.logits().len()).step_by(41) {
        let want = (ahead.logits()[at] - back.logits()[at]) / 2e-5;
        let got: f64 = here.bounds(at).1.iter().zip(&way).map(|(d, w)| d * w).sum();
        // The difference quotient is off by its third derivative times 1e-10, and by 2^-53 / 1e-5.
        assert!((want - got).abs() < 1e-5 * (1.0 + want.abs()), "logit {at}: {got}, difference quotient {want}");
    }
}

/// Changes the bytes of one tensor of the folder's weight file.
fn damage(folder: &Path, tensor: &str, change: impl FnOnce(&mut [u8])) {
    let path = folder.join("model.safetensors");
    let mut file = std::fs::read(&path).unwrap();
    let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
    let entries: serde_json::Value = serde_json::from_slice(&file[8..8 + header]).unwrap();
    let at = |i: usize| 8 + header + entries[tensor]["data_offsets"][i].as_u64().unwrap() as usize;
    let range = at(0)..at(1);
    change(&mut file[range]);
    std::fs::write(&path, file).unwrap();
}

#[test]
fn a_planted_fault_in_the_folder_fails_the_comparison_by_name() {
    // Asymmetric groups of 32 with f32 scales: every kind of tensor is there.
    let case = Case { quant: Case::new(3).quant, ..Case::new(18) };
    let dir = tempfile::tempdir().unwrap();
    let prepared = qat::prepare(case.model(), &case.quant).unwrap();
    let converted = qat::convert(&prepared).unwrap();
    let last = "model.layers.0.mlp.down_proj";
    type Change = fn(&mut [u8]);
    let faults: [(&str, &str, Change); 5] = [
        // One scale moved by one ulp (the low byte of the first f32, away from a carry).
        ("weight_scale", "model.layers.0.mlp.down_proj: scales", |b| b[0] ^= 1),
        // One code moved by one; one zero point moved by one.
        ("weight_packed", "model.layers.0.mlp.down_proj: codes", |b| b[9] ^= 1),
        ("weight_zero_point", "model.layers.0.mlp.down_proj: zero points", |b| b[0] ^= 1),
        ("norm", "model.norm.weight: float tensor", |b| b[0] ^= 1),
        ("nothing", "", |_| ()),
    ];
    for (i, (tensor, want, change)) in faults.into_iter().enumerate() {
        let out = dir.path().join(i.to_string());
        case.export(&prepared, &converted, &out);
        match tensor {
            "nothing" => {}
            "norm" => damage(&out, "model.norm.weight", change),
            part => damage(&out, &format!("{last}.{part}"), change),
        }
        let found = compare(&Checkpoint::open(&out).unwrap(), &prepared, &converted);
        assert_eq!(found.err().as_deref(), (!want.is_empty()).then_some(want));
    }
}

#[test]
fn a_forward_pass_of_another_model_is_outside_the_bound() {
    // One code of the first layer moved by one step; the norms' epsilon; the rotary base: each shows in the logits.
    let case = Case::new(13);
    let dir = tempfile::tempdir().unwrap();
    let prepared = qat::prepare(case.model(), &case.quant).unwrap();
    let mut converted = qat::convert(&prepared).unwrap();
    let out = dir.path().join("right");
    case.export(&prepared, &converted, &out);
    let ckpt = Checkpoint::open(&out).unwrap();
    let reference = reference(&case, &ckpt, &converted);
    let want = reference.run(&case.ids(0));
    let ratio = |folder: &Path| {
        let runtime = LlamaRuntime::load(&Checkpoint::open(folder).unwrap(), 1).unwrap();
        let mut cache = runtime.new_cache(case.tokens).unwrap();
        distance(&want, &runtime.forward(&case.ids(0), &mut cache, Logits::All).unwrap(), 1, 4).0
    };
    assert!(ratio(&out) <= 1.0);
    let with_config = |name: &str, change: fn(&mut LlamaConfig)| {
        let mut config = case.config.clone();
        change(&mut config);
        let other = Case { config, quant: case.quant.clone(), ..case };
        let out = dir.path().join(name);
        other.export(&prepared, &converted, &out);
        ratio(&out)
    };
    let eps = with_config("eps", |c| c.rms_norm_eps = 1e-3);
    let theta = with_config("theta", |c| c.rope_theta *= 1.01);
    let code = &mut converted[0].1.codes[5];
    *code += if *code < 7 { 1 } else { -1 };
    let out = dir.path().join("code");
    case.export(&prepared, &converted, &out);
    let code = ratio(&out);
    println!("bounds off: epsilon {eps:.1}, rotary base {theta:.1}, one code {code:.1}");
    assert!(eps > 1.0 && theta > 1.0 && code > 1.0);
}
