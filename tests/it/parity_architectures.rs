//! Parity of qwen2 (biases, windows), qwen3 (norms of heads), mistral (windows) and llama with scaled rotary positions on packed
//! W4A16 models: prepared training graph == converted matrices == exported folder read back, bit for bit; and the logits of
//! the runtime on that folder are those of the graph. Not the derived bound of the plain Llama (see `parity_llama.rs`): both
//! passes are held against transformers in `tests/golden`, and against each other here.

use crate::command::{text, works};
use crate::parity_llama::{Case, bits, compare};
use dsq_checkpoint::{Checkpoint, LlamaConfig, ModelConfig, RopeScaling, Yarn};
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

type Change = fn(&mut LlamaConfig);

/// What makes the architecture of a case, and what would make it another one.
const ARCHITECTURES: [(&str, Change, Change); 6] = [
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
                    cache.truncate(0);
                    let whole = model.forward(ids, &mut cache, Logits::All).unwrap();
                    cache.truncate(0);
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
        assert!([&packed, &again, &float].iter().all(|c| c.config() == source.config()), "{name}");
        let kept: Vec<String> = source.names().into_iter().filter(|n| !n.ends_with("_proj.weight")).collect();
        assert_eq!(kept.iter().any(|n| n.ends_with(".bias")), name == "qwen2_tiny");
        assert_eq!(kept.iter().any(|n| n.ends_with("k_norm.weight")), name == "qwen3_tiny");
        for tensor in kept {
            let bytes = source.read_stored(&tensor).unwrap();
            assert!([&packed, &again, &float].iter().all(|c| c.read_stored(&tensor).unwrap() == bytes), "{tensor}");
        }
        // The config of the export, in the words of transformers.
        let config = std::fs::read(at("packed").join("config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        assert_eq!(config["model_type"], name.split('_').next().unwrap());
    }
}
