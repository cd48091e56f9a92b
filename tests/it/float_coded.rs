//! `dsq quantize --scheme FP8A16` and its kin, through `inspect`, `export`, `eval`, `run` and `bench`. The numbers themselves are
//! tested in dsq-quant, the bytes in dsq-checkpoint, the products in dsq-kernels.

use crate::command::{fails, faults_of, text, works};
use dsq_checkpoint::{Checkpoint, LinearWeight};
use dsq_quant::QuantArgs;
use serde_json::Value;
use std::path::{Path, PathBuf};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn json(args: &[&str]) -> Value {
    serde_json::from_str(&works(&[args, &["--json"]].concat())).unwrap()
}

#[test]
fn every_float_coded_scheme_goes_through_all_commands() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let model = golden("llama_tiny");
    let ids = path("ids.json");
    std::fs::copy(golden("llama_tiny/tokens.json"), &ids).unwrap();
    for (scheme, more, kind, bits) in [
        // One scale for a row of 64, or of 96.
        ("FP8A16", &["--scale-dtype", "bf16"][..], "FP8 E4M3 channel, BF16 scales", 8.0 + 16.0 / 64.0),
        ("FP8A16", &["--granularity", "tensor"], "FP8 E4M3 tensor, F32 scales", 8.0 + 32.0 / 4096.0),
        ("FP8A16_BLOCK", &["--scale-dtype", "f16"], "FP8 E4M3 block 128x128, F16 scales", 8.0 + 16.0 / 4096.0),
        ("NVFP4A16", &[], "NVFP4: FP4 E2M1 group 16, F8_E4M3 scales over one F32", 4.5 + 32.0 / 4096.0),
        ("MXFP4A16", &["--observer", "mse"], "MXFP4: FP4 E2M1 group 32, F8_E8M0 scales", 4.25),
    ] {
        let (q, again, float) = (path("q"), path("again"), path("float"));
        let quantize = ["quantize", text(&model), "--out", text(&q), "--scheme", scheme, "--overwrite"];
        works(&[&quantize, more].concat());
        let seen = json(&["inspect", text(&q)]);
        let row =
            seen["rows"].as_array().unwrap().iter().find(|r| r["name"] == "model.layers.1.self_attn.q_proj.weight");
        assert_eq!((&row.unwrap()["type"], &row.unwrap()["bits_per_weight"]), (&kind.into(), &bits.into()));
        assert!(faults_of(&seen).is_empty(), "{seen}");
        let export = |out: &Path, format| {
            works(&["export", text(&q), "--out", text(out), "--format", format, "--overwrite"]);
        };
        export(&again, "compressed-tensors");
        for name in ["config.json", "model.safetensors"] {
            assert_eq!(std::fs::read(q.join(name)).unwrap(), std::fs::read(again.join(name)).unwrap(), "{name}");
        }
        export(&float, "safetensors");
        // The packed kernels and the float ones on the values of the codes: the same logits but for rounding.
        let logits = |model: &Path| {
            let out = path("logits.safetensors");
            works(&["eval", text(model), "--logits-out", text(&out), "--tokens-file", text(&ids)]);
            let file = std::fs::read(&out).unwrap();
            let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            file[8 + header..].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>()
        };
        let (a, b) = (logits(&q), logits(&float));
        let worst = a.iter().zip(&b).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
        assert!(a.len() == b.len() && worst <= 4e-5, "{scheme}: {worst}");
        let speed = json(&["bench", text(&q), "--prompt-tokens", "8", "--gen-tokens", "4"]);
        assert!(speed["rows"][0]["tokens_per_second"].as_f64().unwrap() > 0.0, "{speed}");
    }
}

#[test]
fn layers_that_run_as_one_matrix_share_a_global_scale() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (golden("llama_tiny_untied"), dir.path().join("q"));
    // k has another scheme, so it shares nothing.
    works(&["quantize", text(&model), "--out", text(&out), "--scheme", "NVFP4A16", "--override", "k_proj=FP8A16"]);
    let (source, quantized) = (Checkpoint::open(&model).unwrap(), Checkpoint::open(&out).unwrap());
    let largest = |module: &str| {
        let w = source.read_f32(&format!("{module}.weight")).unwrap();
        w.iter().fold(0.0f32, |m, x| m.max(x.abs()))
    };
    let global = |module: &str| match quantized.linear(module).unwrap() {
        LinearWeight::Quantized(q) => q.global_scale,
        LinearWeight::Float { .. } | LinearWeight::Ordered { .. } => panic!("{module} is quantized"),
    };
    for layer in ["model.layers.0", "model.layers.1"] {
        for fused in
            [&["self_attn.q_proj", "self_attn.v_proj"][..], &["mlp.gate_proj", "mlp.up_proj"], &["mlp.down_proj"]]
        {
            let all: Vec<String> = fused.iter().map(|p| format!("{layer}.{p}")).collect();
            let want = QuantArgs::global_scale(all.iter().map(|m| largest(m)).fold(0.0, f32::max));
            assert!(all.iter().all(|m| global(m) == Some(want)), "{layer} {fused:?}");
        }
        assert_eq!(global(&format!("{layer}.self_attn.k_proj")), None);
    }
    let config: Value = serde_json::from_slice(&std::fs::read(out.join("config.json")).unwrap()).unwrap();
    assert_eq!(config["quantization_config"]["format"], "mixed-precision");
    assert!(works(&["inspect", text(&out)]).contains("no faults found"));
}

#[test]
fn f084_f085_what_a_float_coded_scheme_does_not_have_is_refused_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (golden("llama_tiny"), dir.path().join("out"));
    let run = |more: &[&str], words: &[&str]| {
        fails(&[&["quantize", text(&model), "--out", text(&out)], more].concat(), 2, words);
        assert!(!out.exists());
    };
    run(&["--scheme", "NVFP4"], &["--calib", "static activations", "got none"]);
    run(&["--scheme", "FP8A16", "--group-size", "32"], &["--scheme", "granularity", "a row or a block"]);
    run(&["--scheme", "NVFP4A16", "--group-size", "32"], &["--scheme", "PerGroup(16)", "NVFP4A16 fixes"]);
    run(&["--scheme", "MXFP4A16", "--scale-dtype", "bf16"], &["scale_dtype", "F8_E8M0", "BF16"]);
    run(&["--scheme", "FP8A16", "--asymmetric"], &["--asymmetric", "no zero point"]);
    run(&["--group-size", "32", "--override", "lm_head=NVFP4A16:32"], &["--override", "PerGroup(16)"]);
    run(&["--group-size", "32", "--override", "lm_head=NVFP5"], &["--override", "NVFP4A16"]);
}
