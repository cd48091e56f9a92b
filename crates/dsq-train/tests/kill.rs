//! A training process killed with SIGKILL at random moments, saves included, always resumes, and ends with the bits of
//! an undisturbed run. The process is this test binary itself, told by an environment variable to train.

use dsq_checkpoint::{LlamaConfig, ModelConfig};
use dsq_quant::{FloatType, Granularity, QuantConfig, QuantScheme};
use dsq_train::{Control, LearnedScales, LmPhase, LmTrainConfig, RunDir, train_lm};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const ROLE: &str = "DSQ_TEST_TRAIN_INTO";

fn model() -> LlamaConfig {
    let text = r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":16,"intermediate_size":24,
        "num_hidden_layers":1,"num_attention_heads":2,"num_key_value_heads":1,"head_dim":8,"vocab_size":32,
        "max_position_embeddings":16,"rms_norm_eps":1e-5,"rope_theta":10000.0,"tie_word_embeddings":true}"#;
    match ModelConfig::from_json(text, Path::new("config.json")).unwrap() {
        ModelConfig::Llama(c) => c,
        _ => unreachable!("the text says llama"),
    }
}

fn settings() -> LmTrainConfig {
    let phase = |steps| LmPhase {
        steps,
        batch_size: 2,
        seq_len: 8,
        learning_rate: 1e-2,
        warmup_steps: 2,
        final_rate: 0.1,
        weight_decay: 0.1,
        grad_clip: 1.0,
    };
    // Saving every step makes most of the time saving time.
    LmTrainConfig {
        float: phase(30),
        qat: phase(20),
        distill: None,
        learned_scales: Some(LearnedScales { rate: 1e-2 }),
        adapters: None,
        inputs: None,
        float_equal_tokens: true,
        save_every: 1,
        seed: 3,
    }
}

fn train(path: &Path) -> Vec<u8> {
    let scheme = QuantScheme::preset("W4A16", Granularity::PerChannel, FloatType::Bf16).unwrap();
    let quant = QuantConfig::new(scheme, &[]).unwrap();
    let fingerprint = serde_json::to_value(settings()).unwrap();
    let resume = path.join("run.json").exists();
    let mut run = RunDir::open(path, &fingerprint, resume, false).unwrap();
    let tokens: Vec<u32> = (0..300u32).map(|i| (i * i * 7 + i / 5) % 32).collect();
    let out = train_lm(&model(), &tokens, &settings(), &quant, &mut run, &mut |_| Control::Continue).unwrap();
    let models = [Some(out.float), Some(out.qat), out.float_equal_tokens];
    models
        .iter()
        .flatten()
        .flat_map(|m| m.named_tensors())
        .flat_map(|(_, _, data)| data.into_iter().flat_map(f32::to_le_bytes))
        .collect()
}

#[test]
fn c082_f093_kill_at_random_moments_then_resume() {
    if let Some(path) = std::env::var_os(ROLE) {
        let bytes = train(Path::new(&path));
        std::fs::write(Path::new(&path).join("weights.bin"), bytes).unwrap();
        return;
    }
    let straight = tempfile::tempdir().unwrap();
    let want = train(straight.path());
    let want_log = std::fs::read_to_string(straight.path().join("log.jsonl")).unwrap();
    let mut kills = 0;
    let mut delay = 7u64;
    for _ in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let mut last = 0;
        for attempt in 0.. {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "c082_f093_kill_at_random_moments_then_resume", "--nocapture"])
                .env(ROLE, dir.path())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            // Varying delays; longer with each attempt, so that the run gets done on a slow machine too.
            delay = (delay * 48_271) % 2_147_483_647;
            let mut left = 20 + delay % 60 + 10 * attempt;
            let status = loop {
                match child.try_wait().unwrap() {
                    Some(status) => break status,
                    None if left == 0 => {
                        child.kill().unwrap();
                        break child.wait().unwrap();
                    }
                    None => {
                        std::thread::sleep(Duration::from_millis(1));
                        left -= 1;
                    }
                }
            };
            if status.success() {
                break;
            }
            let mut text = String::new();
            std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut text).unwrap();
            assert_eq!(status.code(), None, "the run was killed, it did not fail: {text}");
            kills += 1;
            // Progress is never lost: the newest complete checkpoint only moves forward.
            let steps: Vec<u64> = std::fs::read_dir(dir.path().join("checkpoints"))
                .map(|entries| {
                    entries
                        .flatten()
                        .filter_map(|e| e.file_name().to_str()?.strip_prefix("step-")?.parse().ok())
                        .collect()
                })
                .unwrap_or_default();
            let newest = steps.into_iter().max().unwrap_or(0);
            assert!(newest >= last, "{last} -> {newest}");
            last = newest;
            assert!(attempt < 500, "no progress");
        }
        assert!(std::fs::read(dir.path().join("weights.bin")).unwrap() == want);
        assert_eq!(std::fs::read_to_string(dir.path().join("log.jsonl")).unwrap(), want_log);
    }
    assert!(kills >= 6, "{kills} kills: the delays are too long to test anything");
}

/// The checkpoints of the QAT phase also hold the float result. With a limit on the size of files between the two,
/// the disk is full, as far as the process can tell, at the first of them.
#[test]
#[cfg(unix)]
fn c090_f091_a_failing_save_keeps_the_last_checkpoint_and_resumes() {
    let straight = tempfile::tempdir().unwrap();
    let want = train(straight.path());
    let dir = tempfile::tempdir().unwrap();
    let limited = |blocks: Option<usize>| {
        let limit = blocks.map_or(String::new(), |b| format!("trap '' XFSZ; ulimit -f {b}; "));
        Command::new("sh")
            .args([
                "-c",
                &format!("{limit}exec \"$0\" --exact c082_f093_kill_at_random_moments_then_resume --nocapture"),
            ])
            .arg(std::env::current_exe().unwrap())
            .env(ROLE, dir.path())
            .output()
            .unwrap()
    };
    // 2,480 weights: three copies are 29,760 bytes and a header, four 39,680; blocks of 512 bytes.
    let out = limited(Some(76));
    let text = String::from_utf8_lossy(&out.stderr);
    assert!(!out.status.success() && text.contains("Io {") && text.contains("tensors.safetensors"), "{text}");
    let names = |d: &Path| -> Vec<String> {
        let mut names: Vec<String> =
            std::fs::read_dir(d).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    // Step 30 ends the float phase, its moments are gone: two copies. Step 31 has four.
    assert_eq!(names(&dir.path().join("checkpoints")), ["step-00000029", "step-00000030"], "no temporary is left");
    let out = limited(None);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(std::fs::read(dir.path().join("weights.bin")).unwrap() == want);
}
