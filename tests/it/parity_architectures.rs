//! Parity of qwen2 (biases, windows), qwen3 (norms of heads), mistral (windows), mixtral (experts), deepseek_v2 and deepseek_v3 (experts,
//! latent attention) and llama with scaled rotary positions on packed W4A16 models: prepared training graph == converted matrices == exported folder read back, bit for bit; and the logits of
//! the runtime on that folder are those of the graph. Not the derived bound of the plain Llama (see `parity_llama.rs`): both
//! passes are held against transformers in `tests/golden`, and against each other here.

use crate::command::{text, works};
use crate::parity_llama::{Case, bits, compare};
use dsq_checkpoint::{
    Checkpoint, Experts, Groups, Latent, LlamaConfig, ModelConfig, RopeScaling, Routing, Scores, Yarn,
};
use dsq_model::Llama;
use dsq_runtime::{LlamaRuntime, Logits};
use dsq_train::qat;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// Largest difference of two rows of logits over the largest logit.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let largest = b.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest
}

fn yarn() -> RopeScaling {
    RopeScaling::Yarn(Yarn {
        factor: 4.0,
        original_max_position_embeddings: 16,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor: None,
        mscale: None,
        mscale_all_dim: None,
    })
}

/// Six experts of the width of the dense block, two a token.
fn experts(scores: Scores, groups: Option<Groups>) -> Routing {
    Routing { per_token: 2, scores, groups, normalized: scores == Scores::Sigmoid, scale: 1.5 }
}

fn deepseek(c: &mut LlamaConfig, q_rank: Option<usize>, routing: Routing) {
    c.num_attention_heads = 4;
    c.num_key_value_heads = 4;
    c.head_dim = 6;
    let (nope, value) = (9, 16);
    c.latent = Some(Latent { q_rank, kv_rank: 64, nope, rope: 6, value, interleaved: true, mtp_layers: 0 });
    let shared = usize::from(q_rank.is_some());
    c.experts = Some(Experts { count: 6, width: 64, shared, first_layer: 1, every: 1, routing });
}

type Change = fn(&mut LlamaConfig);

/// What makes the architecture of a case, and what would make it another one.
const ARCHITECTURES: [(&str, Change, Change); 9] = [
    (
        "mixtral",
        |c| {
            c.model_type = "mixtral".into();
            let routing = Routing { normalized: true, scale: 1.0, ..experts(Scores::Softmax, None) };
            let width = c.intermediate_size;
            c.experts = Some(Experts { count: 5, width, shared: 0, first_layer: 0, every: 1, routing });
        },
        |c| c.experts.as_mut().unwrap().routing.per_token = 3,
    ),
    (
        "deepseek_v2",
        |c| {
            c.model_type = "deepseek_v2".into();
            deepseek(c, None, experts(Scores::Softmax, None));
            let RopeScaling::Yarn(y) = yarn() else { return };
            c.rope_scaling = Some(RopeScaling::Yarn(Yarn { mscale: Some(1.0), mscale_all_dim: Some(0.7), ..y }));
        },
        |c| c.rope_scaling = Some(yarn()),
    ),
    (
        "deepseek_v3",
        |c| {
            c.model_type = "deepseek_v3".into();
            deepseek(c, Some(64), experts(Scores::Sigmoid, Some(Groups { count: 3, kept: 2 })));
        },
        |c| c.latent.as_mut().unwrap().interleaved = false,
    ),
    (
        "qwen2",
        |c| {
            c.model_type = "qwen2".into();
            c.windows = (0..c.num_hidden_layers).map(|i| (i % 2 == 0).then_some(5)).collect();
        },
        |c| c.windows = Vec::new(),
    ),
    ("qwen3", |c| c.model_type = "qwen3".into(), |c| c.rms_norm_eps = 1e-2),
    (
        "mistral",
        |c| {
            c.model_type = "mistral".into();
            c.windows = vec![Some(3); c.num_hidden_layers];
        },
        |c| c.windows = vec![Some(4); c.num_hidden_layers],
    ),
    ("yarn", |c| c.rope_scaling = Some(yarn()), |c| c.rope_scaling = None),
    (
        "llama3",
        |c| {
            c.rope_scaling = Some(RopeScaling::Llama3 {
                factor: 8.0,
                low_freq_factor: 1.0,
                high_freq_factor: 4.0,
                original_max_position_embeddings: 16,
            });
        },
        |c| c.rope_scaling = None,
    ),
    ("linear", |c| c.rope_scaling = Some(RopeScaling::Linear { factor: 3.0 }), |c| c.rope_scaling = None),
];

#[test]
fn graph_export_and_runtime_agree_on_every_architecture() {
    let dir = tempfile::tempdir().unwrap();
    for (name, make, spoil) in ARCHITECTURES {
        // INT4 by groups and by channel, symmetric and asymmetric; texts of 33, 23, 32 and 48 tokens.
        for seed in [4, 7, 11, 13] {
            let mut case = Case::new(seed);
            make(&mut case.config);
            let prepared = qat::prepare(case.model(), &case.quant).unwrap();
            let converted = qat::convert(&prepared).unwrap();
            let out = dir.path().join(format!("{name}-{seed}"));
            case.export(&prepared, &converted, &out);
            let ckpt = Checkpoint::open(&out).unwrap();
            assert_eq!(ckpt.config(), &ModelConfig::Llama(case.config.clone()), "{name} {seed}");
            compare(&ckpt, &prepared, &converted).unwrap_or_else(|e| panic!("{name} {seed}: {e}"));

            let sequences = [case.ids(0), case.ids(1)];
            let ids = Arc::new(sequences.concat().iter().map(|&id| id as i32).collect::<Vec<i32>>());
            let host = |model: &Llama| model.logits(ids.clone(), 2).into_data().try_into_vec::<f32>().unwrap();
            let graph = host(&prepared);
            let again = Llama::from_checkpoint(&ckpt, &Default::default()).unwrap();
            assert_eq!(bits(&host(&again)), bits(&graph), "{name} {seed}");
            let runtime = |folder: &Path| -> Vec<f32> {
                let model = LlamaRuntime::load(&Checkpoint::open(folder).unwrap(), 2).unwrap();
                let mut cache = model.new_cache(case.tokens).unwrap();
                let mut run = |ids: &[u32]| {
                    cache.truncate(0).unwrap();
                    let whole = model.forward(ids, &mut cache, Logits::All).unwrap();
                    cache.truncate(0).unwrap();
                    let steps = ids.iter().flat_map(|&id| model.forward(&[id], &mut cache, Logits::Last).unwrap());
                    assert!(steps.eq(whole.iter().copied()), "{name} {seed}: token by token");
                    whole
                };
                sequences.iter().flat_map(|ids| run(ids)).collect()
            };
            // Two f32 passes of up to three layers; what the fault moves is far more.
            let distance = apart(&runtime(&out), &graph);
            assert!(distance < 1e-4, "{name} {seed}: {distance:e}");
            let mut spoilt = Case::new(seed);
            make(&mut spoilt.config);
            spoil(&mut spoilt.config);
            let out = dir.path().join(format!("{name}-{seed}-spoilt"));
            spoilt.export(&prepared, &converted, &out);
            let distance = apart(&runtime(&out), &graph);
            assert!(distance > 1e-3, "{name} {seed}: the fault moves the logits by {distance:e} only");
        }
    }
}

/// `dsq quantize`, `inspect`, `export` and `eval` of each as a person runs them: biases and norms of heads stay what they were.
#[test]
fn the_commands_take_every_architecture() {
    let dir = tempfile::tempdir().unwrap();
    for (name, about) in [
        (
            "qwen2_tiny",
            "qwen2: 3 layers, hidden 64, ffn 96, heads 4/2 of 16, vocabulary 128, context 256, windows of 8 in 2 layers, tied",
        ),
        ("qwen3_tiny", "qwen3: 3 layers, hidden 64, ffn 96, heads 4/2 of 24, vocabulary 128, context 256\n"),
        (
            "mistral_tiny",
            "mistral: 3 layers, hidden 64, ffn 96, heads 4/2 of 16, vocabulary 128, context 256, windows of 8 in 3 layers",
        ),
        ("llama_tiny_llama3rope", "context 256, rotary scaling llama3, tied"),
        (
            "mixtral_tiny",
            "mixtral: 2 layers, hidden 32, ffn 32, heads 4/2 of 8, 6 experts of 32 (2 a token) in 2 layers, vocabulary 96",
        ),
        (
            "deepseek_v2_lite_tiny",
            "ffn 64, 4 heads of 24+8, values 16, latents 32, 6 experts of 32 (3 a token, 2 shared) in 1 layers, vocabulary 96",
        ),
        (
            "deepseek_v2_tiny",
            "4 heads of 24+8, values 40, latents 32, of queries 32, 8 experts of 32 (3 a token, 1 shared)",
        ),
        ("deepseek_v3_tiny", "context 256, rotary scaling yarn"),
    ] {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
        let at = |what: &str| dir.path().join(format!("{name}-{what}"));
        let (packed, again, float) = (at("packed"), at("again"), at("float"));
        works(&["quantize", text(&model), "--out", text(&packed), "--group-size", "32"]);
        let seen = works(&["inspect", text(&packed)]);
        assert!(seen.contains(about) && seen.contains("no faults found"), "{seen}");
        works(&["export", text(&packed), "--out", text(&again), "--format", "compressed-tensors"]);
        works(&["export", text(&packed), "--out", text(&float), "--format", "safetensors"]);
        let [source, packed, again, float] = [&model, &packed, &again, &float].map(|d| Checkpoint::open(d).unwrap());
        let ModelConfig::Llama(mut config) = source.config().clone() else { panic!("{name}") };
        // Layers for predictions beyond the next token are left out, by name.
        let (ahead, mut kept): (Vec<String>, Vec<String>) =
            source.names().into_iter().partition(|n| config.mtp_layer(n).is_some());
        assert_eq!(ahead.len(), if name == "deepseek_v3_tiny" { 7 } else { 0 });
        let proof: Value =
            serde_json::from_slice(&std::fs::read(at("packed").join("dsq-proof.json")).unwrap()).unwrap();
        let rows = proof["tensors"].as_array().unwrap();
        assert!(ahead.iter().all(|n| rows.iter().any(|r| r["name"] == n.as_str() && r["became"] == "dropped")));
        config.latent.iter_mut().for_each(|a| a.mtp_layers = 0);
        let config = ModelConfig::Llama(config);
        assert!([&packed, &again, &float].iter().all(|c| *c.config() == config), "{name}");
        kept.retain(|n| !packed.is_quantized(n.strip_suffix(".weight").unwrap_or(n)));
        // Routers and what makes keys and values of latents stay in float, and are named so.
        assert_eq!(
            kept.iter().any(|n| n.ends_with("gate.weight")),
            name.starts_with("mixtral") || name.starts_with("deepseek")
        );
        assert_eq!(kept.iter().any(|n| n.ends_with("kv_b_proj.weight")), name.starts_with("deepseek"));
        let ignored = &packed.quantization().unwrap().ignore_texts;
        let inner = |n: &String| n.ends_with("gate.weight") || n.ends_with("kv_b_proj.weight");
        assert!(kept.iter().filter(|n| inner(n)).all(|n| ignored.iter().any(|i| n.strip_suffix(".weight") == Some(i))));
        assert_eq!(kept.iter().any(|n| n.ends_with(".bias")), name == "qwen2_tiny");
        assert_eq!(kept.iter().any(|n| n.ends_with("k_norm.weight")), name == "qwen3_tiny");
        for tensor in kept {
            let bytes = source.read_stored(&tensor).unwrap();
            assert!([&packed, &again, &float].iter().all(|c| c.read_stored(&tensor).unwrap() == bytes), "{tensor}");
        }
        // The config of the export, in the words of transformers.
        let config = std::fs::read(at("packed").join("config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        let model_type = config["model_type"].as_str().unwrap();
        assert!(name.starts_with(model_type) && model_type.len() > 4);
    }
}

/// Renames tensors of a folder's one file and replaces its config's `quantization_config`.
pub(super) fn rewrite(folder: &Path, rename: impl Fn(&str) -> String, quantization: Value) {
    let file = folder.join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&bytes[8..end]).unwrap();
    let renamed: serde_json::Map<String, Value> = header.into_iter().map(|(k, v)| (rename(&k), v)).collect();
    let mut text = serde_json::to_vec(&renamed).unwrap();
    text.resize(text.len().next_multiple_of(8), b' ');
    let out = [&(text.len() as u64).to_le_bytes()[..], &text, &bytes[end..]].concat();
    std::fs::write(&file, out).unwrap();
    let at = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&at).unwrap()).unwrap();
    config["quantization_config"] = quantization;
    std::fs::write(&at, config.to_string()).unwrap();
    std::fs::remove_file(folder.join("dsq-proof.json")).unwrap();
}

/// A folder as DeepSeek publishes V3 (E4M3 in blocks of 128, `weight_scale_inv`): the same weights as in compressed-tensors, run,
/// and exported as floats or as compressed-tensors. What its config says otherwise is refused by name.
#[test]
fn fp8_folders_of_deepseek_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let at = |what: &str| dir.path().join(what);
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/deepseek_v3_tiny");
    let block = "FP8A16_BLOCK";
    let more = ["--scheme", block, "--override", "kv_b_proj=FP8A16_BLOCK", "--scale-dtype", "f32"];
    for out in ["ours", "fp8"] {
        works(&[&["quantize", text(&model), "--out", text(&at(out))], &more[..]].concat());
    }
    let settings = serde_json::json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
        "weight_block_size": [128, 128]});
    rewrite(&at("fp8"), |name| name.replace("weight_scale", "weight_scale_inv"), settings.clone());
    assert!(works(&["inspect", text(&at("fp8"))]).contains("no faults found"));
    works(&["export", text(&at("fp8")), "--out", text(&at("again")), "--format", "compressed-tensors"]);
    works(&["export", text(&at("fp8")), "--out", text(&at("float")), "--format", "safetensors"]);
    let [ours, fp8, again, float] = ["ours", "fp8", "again", "float"].map(|d| Checkpoint::open(&at(d)).unwrap());
    assert!(fp8.info("model.layers.1.mlp.experts.3.up_proj.weight_scale_inv").is_some());
    for spec in ours.config().linears() {
        let (module, want) = (&spec.module, ours.linear(&spec.module).unwrap());
        assert_eq!(fp8.is_quantized(module), module != "lm_head");
        assert_eq!(fp8.linear(module).unwrap(), want, "{module}");
        assert_eq!(again.linear(module).unwrap(), want, "{module}");
        assert_eq!(float.linear(module).unwrap().into_f32(), want.into_f32(), "{module}");
    }
    let logits = |ckpt: &Checkpoint| {
        let runtime = LlamaRuntime::load(ckpt, 1).unwrap();
        let mut cache = runtime.new_cache(20).unwrap();
        runtime.forward(&(0..20).collect::<Vec<u32>>(), &mut cache, Logits::All).unwrap()
    };
    assert_eq!(bits(&logits(&fp8)), bits(&logits(&ours)));
    for (key, value, words) in [
        ("weight_block_size", serde_json::json!([64, 64]), ["weight_block_size", "[64,64]"]),
        ("weight_block_size", Value::Null, ["weight_block_size", "null"]),
        ("activation_scheme", serde_json::json!("static"), ["activation_scheme", "static"]),
        ("fmt", serde_json::json!("e5m2"), ["fmt", "e5m2"]),
        ("scale_fmt", serde_json::json!("int"), ["scale_fmt", "int"]),
        ("more", serde_json::json!(1), ["more", "does not know"]),
    ] {
        let mut config: Value = serde_json::from_slice(&std::fs::read(at("fp8").join("config.json")).unwrap()).unwrap();
        config["quantization_config"] = settings.clone();
        config["quantization_config"][key] = value;
        std::fs::write(at("fp8").join("config.json"), config.to_string()).unwrap();
        let e = Checkpoint::open(&at("fp8")).unwrap_err().to_string();
        assert!(words.iter().all(|w| e.contains(w)), "{key}: {e}");
    }
}
