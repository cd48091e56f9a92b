//! The runtime against transformers' logits, and against itself: cut into calls, with more threads, quantized.

use dsq_checkpoint::{Checkpoint, ExportTensor, LinearWeight, ModelConfig, export_folder};
use dsq_quant::{FloatType, Granularity, Mapping, QuantArgs, QuantConfig, QuantScheme, QuantizedMatrix};
use dsq_runtime::{FinishReason, LlamaRuntime, Logits, Sampler, Sampling, generate, streamed_logits};
use std::ops::ControlFlow;
use std::path::PathBuf;

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

fn load(name: &str, threads: usize) -> LlamaRuntime {
    LlamaRuntime::load(&Checkpoint::open(&golden(name)).unwrap(), threads).unwrap()
}

fn prompts(name: &str) -> Vec<Vec<u32>> {
    serde_json::from_slice(&std::fs::read(golden(name).join("tokens.json")).unwrap()).unwrap()
}

fn logits_of(name: &str, index: usize) -> Vec<f32> {
    let file = std::fs::read(golden(name).join("logits.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let tensor = tensors.tensor(&format!("logits.{index}")).unwrap();
    tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
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
fn logits_equal_transformers() {
    for name in ALL {
        let model = load(name, 2);
        for (i, prompt) in prompts(name).iter().enumerate() {
            let want = logits_of(name, i);
            let mut cache = model.new_cache(prompt.len()).unwrap();
            let got = model.forward(prompt, &mut cache, Logits::All).unwrap();
            assert_eq!(got.len(), want.len());
            let largest = want.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            let worst = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
            // The golden logits are themselves up to 2e-5 off their f64 values (README of the vectors); so may ours be.
            assert!(worst <= 4e-5 && worst <= 1e-4 * largest, "{name} {i}: {worst:e}, largest {largest}");
        }
    }
}

/// A case of `variants.json`: the weights of one folder under another config, opened.
struct Variant {
    name: String,
    model: LlamaRuntime,
    tokens: Vec<u32>,
    rows: Vec<usize>,
    logits: Vec<f32>,
}

fn variants() -> Vec<Variant> {
    let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(golden("variants.json")).unwrap()).unwrap();
    let file = std::fs::read(golden("variants.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
    let one = |case: &serde_json::Value| {
        let (name, dir) = (case["name"].as_str().unwrap().to_owned(), tempfile::tempdir().unwrap());
        let weights = golden(case["base"].as_str().unwrap()).join("model.safetensors");
        std::fs::copy(weights, dir.path().join("model.safetensors")).unwrap();
        std::fs::write(dir.path().join("config.json"), case["config"].to_string()).unwrap();
        let data = tensors.tensor(&name).unwrap().data();
        Variant {
            model: LlamaRuntime::load(&Checkpoint::open(dir.path()).unwrap(), 2).unwrap(),
            tokens: serde_json::from_value(case["tokens"].clone()).unwrap(),
            rows: serde_json::from_value(case["rows"].clone()).unwrap(),
            logits: data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            name,
        }
    };
    cases.as_array().unwrap().iter().map(one).collect()
}

/// 150 tokens, beyond the original context of every rotary scaling, in one piece and token by token.
#[test]
fn f045_variants_of_the_config_give_the_logits_of_transformers() {
    let variants = variants();
    for v in &variants {
        let vocab = v.model.config().vocab_size;
        let mut cache = v.model.new_cache(v.tokens.len()).unwrap();
        let got = v.model.forward(&v.tokens, &mut cache, Logits::All).unwrap();
        let rows = v.rows.iter().flat_map(|r| &got[r * vocab..][..vocab]);
        let worst = rows.zip(&v.logits).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
        // transformers' own f32 logits are up to 4.2e-5 off their f64 values here; so may ours be.
        assert!(worst <= 8.4e-5, "{}: {worst:e}", v.name);
        cache.truncate(0).unwrap();
        for (id, row) in v.tokens.iter().zip(got.chunks(vocab)) {
            assert_eq!(v.model.forward(&[*id], &mut cache, Logits::Last).unwrap(), row, "{}", v.name);
        }
    }
    assert_eq!(variants.len(), 15);
}

/// What a cache holds was rotated by the frequencies of its time: dynamic scaling, which begins beyond the table, is refused.
/// A cache is of one model: windows are part of it.
#[test]
fn a_cache_with_other_windows_is_refused() {
    let variants = variants();
    let of = |name: &str| &variants.iter().find(|v| v.name == name).unwrap().model;
    let mut cache = of("mistral_full").new_cache(8).unwrap();
    let e = of("mistral_one").forward(&[1, 2], &mut cache, Logits::Last).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("Some(1)"), "{e}");
    of("mistral_full").forward(&[1, 2], &mut cache, Logits::Last).unwrap();
    // What a token reads of the cache ends with its window.
    let read = |name: &str| of(name).new_cache(8).unwrap().bytes_read(100.0);
    let (full, one) = (read("mistral_full"), read("mistral_one"));
    assert_eq!(full, 100.0 * one);
}

#[test]
fn c062_dynamic_scaling_is_refused_where_it_would_begin() {
    let variant = variants().into_iter().find(|v| v.name == "dynamic").unwrap();
    let limit = variant.model.config().max_position_embeddings;
    variant.model.new_cache(limit).unwrap();
    let e = variant.model.new_cache(limit + 1).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("dynamic rotary scaling"), "{e}");
}

#[test]
fn c062_c067_calls_threads_and_used_caches_do_not_change_a_bit() {
    for name in ALL {
        let prompt = &prompts(name)[1];
        let model = load(name, 1);
        let vocab = model.config().vocab_size;
        let mut cache = model.new_cache(64).unwrap();
        let whole = model.forward(prompt, &mut cache, Logits::All).unwrap();
        // Filled up, so that the next call does not fit.
        model.forward(&prompt[..64 - prompt.len()], &mut cache, Logits::Last).unwrap();
        for (threads, chunk) in [(1, 1), (2, 1), (3, 7), (2, 16), (2, 39)] {
            let model = load(name, threads);
            // The cache has run another sequence before.
            model.forward(&prompts(name)[0], &mut cache, Logits::Last).unwrap_err();
            cache.truncate(0).unwrap();
            model.forward(&prompts(name)[0], &mut cache, Logits::Last).unwrap();
            cache.truncate(0).unwrap();
            for (i, part) in prompt.chunks(chunk).enumerate() {
                let got = model.forward(part, &mut cache, Logits::All).unwrap();
                let want = &whole[i * chunk * vocab..(i * chunk + part.len()) * vocab];
                assert!(got.iter().zip(want).all(|(a, b)| a == b), "{name}: {threads} threads, chunks of {chunk}");
            }
            cache.truncate(30).unwrap();
            let got = model.forward(&prompt[30..], &mut cache, Logits::Last).unwrap();
            assert_eq!(got, whole[whole.len() - vocab..], "from a shared prefix");
            // Filled up again for the next round.
            model.forward(&prompt[..64 - prompt.len()], &mut cache, Logits::Last).unwrap();
        }
    }
}

#[test]
fn a_long_prompt_crosses_the_chunks_of_prefill() {
    let model = load("llama_tiny", 2);
    let tokens: Vec<u32> = (0..250).map(|i| i * 31 % model.config().vocab_size as u32).collect();
    let mut cache = model.new_cache(250).unwrap();
    let whole = model.forward(&tokens, &mut cache, Logits::All).unwrap();
    cache.truncate(0).unwrap();
    let mut single = Vec::new();
    for id in &tokens {
        single.extend(model.forward(&[*id], &mut cache, Logits::Last).unwrap());
    }
    assert!(whole.iter().zip(&single).all(|(a, b)| a == b));
    cache.truncate(0).unwrap();
    assert_eq!(model.forward(&tokens, &mut cache, Logits::Last).unwrap(), single[249 * 128..]);
}

#[test]
fn c062_positions_beyond_the_table_are_refused_by_number() {
    let model = load("llama_tiny", 1);
    let limit = model.config().max_position_embeddings;
    let e = model.new_cache(limit + 1).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains(&limit.to_string()), "{e}");
    assert!(e.to_string().contains(&(limit + 1).to_string()), "{e}");
    let mut cache = model.new_cache(64).unwrap();
    let prompt = vec![5u32; 65];
    let e = model.forward(&prompt, &mut cache, Logits::Last).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("64") && e.to_string().contains("65"), "{e}");
    model.forward(&prompt[..60], &mut cache, Logits::Last).unwrap();
    assert!(model.forward(&prompt[..10], &mut cache, Logits::Last).is_err());
    assert_eq!(cache.len(), 60, "a refused call leaves the cache as it was");
    let mut greedy = Sampler::new(Sampling::default()).unwrap();
    let mut all = |_| ControlFlow::Continue(());
    let e = generate(&model, &mut cache, &prompt, 10, 128, &mut greedy, &mut all).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("64") && e.to_string().contains("65"), "{e}");
    // 63 positions and the one of the last token that is fed back.
    let out = generate(&model, &mut cache, &prompt[..63], 10, 128, &mut greedy, &mut all).unwrap();
    assert_eq!((out.finish, out.tokens.len()), (FinishReason::Length, 2));
}

#[test]
fn inputs_that_cannot_be_run_are_errors() {
    let model = load("llama_tiny", 1);
    let mut cache = model.new_cache(8).unwrap();
    let too_large = model.config().vocab_size as u32;
    for tokens in [&[][..], &[too_large], &[u32::MAX]] {
        assert_eq!(model.forward(tokens, &mut cache, Logits::Last).unwrap_err().exit_code(), 2);
    }
}

#[test]
fn c076_rows_that_the_tokenizer_does_not_know_are_never_chosen() {
    let model = load("llama_tiny", 1);
    let mut cache = model.new_cache(16).unwrap();
    let prompt = [3u32, 4, 5];
    let logits = model.forward(&prompt, &mut cache, Logits::Last).unwrap();
    let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
    let mut greedy = Sampler::new(Sampling::default()).unwrap();
    let mut all = |_| ControlFlow::Continue(());
    let out = generate(&model, &mut cache, &prompt, 1, best, &mut greedy, &mut all).unwrap();
    assert!((out.tokens[0] as usize) < best, "row {best} is masked");
    let out = generate(&model, &mut cache, &prompt, 1, best + 1, &mut greedy, &mut all).unwrap();
    assert_eq!(out.tokens, [best as u32]);
}

/// Exports `name` with its linears quantized, and with the same grid values in float.
fn export_pair(name: &str, args: QuantArgs) -> (tempfile::TempDir, LlamaRuntime, LlamaRuntime) {
    let model = Checkpoint::open(&golden(name)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let (mut packed, mut float) = (Vec::new(), Vec::new());
    for tensor in model.names() {
        let shape = model.info(&tensor).unwrap().shape.clone();
        let data = model.read_f32(&tensor).unwrap();
        let module = tensor.strip_suffix(".weight").unwrap_or("").to_string();
        let keep =
            |data| ExportTensor::Float { name: tensor.clone(), shape: shape.clone(), data, dtype: FloatType::F32 };
        if !module.ends_with("_proj") {
            float.push(keep(data.clone()));
            packed.push(keep(data));
            continue;
        }
        let LinearWeight::Float { n, k, data } = model.linear(&module).unwrap() else { panic!("a float model") };
        let matrix = QuantizedMatrix::quantize(&data, n, k, args).unwrap();
        float.push(keep(matrix.dequantize()));
        packed.push(ExportTensor::Linear { module, shape, matrix, activation: None, source: None, order: None });
    }
    let scheme =
        QuantConfig::new(QuantScheme { weights: args, activations: None }, &["lm_head".into(), "embed_tokens".into()])
            .unwrap();
    export_folder(&dir.path().join("packed"), model.config(), packed, Some(&scheme), Vec::new(), false).unwrap();
    export_folder(&dir.path().join("float"), model.config(), float, None, Vec::new(), false).unwrap();
    let [packed, float] =
        ["packed", "float"].map(|d| LlamaRuntime::load(&Checkpoint::open(&dir.path().join(d)).unwrap(), 2).unwrap());
    (dir, packed, float)
}

#[test]
fn layers_read_one_by_one_give_the_same_bits() {
    let check = |model: &Checkpoint, sequences: &[Vec<u32>]| {
        let runtime = LlamaRuntime::load(model, 2).unwrap();
        for threads in [1, 3] {
            let streamed = streamed_logits(model, sequences, threads).unwrap();
            for (ids, logits) in sequences.iter().zip(&streamed) {
                let mut cache = runtime.new_cache(ids.len()).unwrap();
                let whole = runtime.forward(ids, &mut cache, Logits::All).unwrap();
                assert!(whole.iter().map(|x| x.to_bits()).eq(logits.iter().map(|x| x.to_bits())), "{:?}", model.path());
            }
        }
    };
    for name in ALL {
        check(&Checkpoint::open(&golden(name)).unwrap(), &prompts(name));
        let (dir, ..) = export_pair(name, QuantArgs::int4(Granularity::PerGroup(32), FloatType::F16));
        check(&Checkpoint::open(&dir.path().join("packed")).unwrap(), &prompts(name));
    }
    let model = Checkpoint::open(&golden("llama_tiny")).unwrap();
    let limit = LlamaRuntime::context_of(&model).unwrap();
    for (wrong, word) in [(vec![], "at least one"), (vec![1 << 20], "below"), (vec![1; limit + 1], "at most")] {
        let e = streamed_logits(&model, &[vec![1, 2], wrong], 1).unwrap_err();
        assert!(e.to_string().contains(word), "{e}");
    }
}

#[test]
fn packed_weights_give_the_logits_of_their_dequantized_values() {
    assert!(matches!(Checkpoint::open(&golden("llama_tiny")).unwrap().config(), ModelConfig::Llama(_)));
    for name in ALL {
        for granularity in [Granularity::PerGroup(32), Granularity::PerChannel, Granularity::PerTensor] {
            for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                let args = QuantArgs { mapping, ..QuantArgs::int4(granularity, FloatType::F16) };
                let (_dir, packed, float) = export_pair(name, args);
                assert!(packed.kernels().iter().any(|(_, k)| k.contains("int4")), "{:?}", packed.kernels());
                assert!(packed.resident_bytes() < float.resident_bytes());
                let prompt = &prompts(name)[1];
                let run =
                    |m: &LlamaRuntime| m.forward(prompt, &mut m.new_cache(prompt.len()).unwrap(), Logits::All).unwrap();
                let (a, b) = (run(&packed), run(&float));
                let largest = b.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
                // The same real numbers with other roundings: as far apart as the f32 model is from f64.
                assert!(
                    worst <= 4e-5 && worst > 0.0 || worst == 0.0 && largest == 0.0,
                    "{name}: {worst:e} of {largest}"
                );
            }
        }
    }
}

#[test]
fn float_codes_give_the_logits_of_their_values() {
    let fp8 = |granularity| QuantArgs::fp8(granularity, FloatType::Bf16);
    for name in ["llama_tiny", "llama_tiny_untied"] {
        for (args, kernel) in [
            (fp8(Granularity::PerTensor), "fp8 e4m3"),
            (fp8(Granularity::PerChannel), "fp8 e4m3"),
            (fp8(Granularity::PerBlock(128, 128)), "fp8 e4m3"),
            (fp8(Granularity::PerBlock(24, 40)), "fp8 e4m3"),
            (QuantArgs::nvfp4(), "fp4 e2m1"),
            (QuantArgs::mxfp4(), "fp4 e2m1"),
        ] {
            let (_dir, packed, float) = export_pair(name, args);
            assert!(packed.kernels().iter().any(|(_, k)| k.contains(kernel)), "{:?}", packed.kernels());
            assert!(packed.resident_bytes() < float.resident_bytes());
            let prompt = &prompts(name)[1];
            let run =
                |m: &LlamaRuntime| m.forward(prompt, &mut m.new_cache(prompt.len()).unwrap(), Logits::All).unwrap();
            let (a, b) = (run(&packed), run(&float));
            let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
            // As in the test above.
            assert!(worst <= 4e-5 && worst > 0.0, "{name} {args:?}: {worst:e}");
        }
    }
}
