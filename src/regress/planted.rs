//! Planted faults: the tests edit the bytes of an exported folder between export and re-reading, and the suite's own
//! tolerances must go red and name the metric. No other path leads here: the command hands in a closure that does
//! nothing.

use super::fixed::{self, ModuleWeights};
use super::recipe::add_checks;
use crate::{Global, commands::train::train_recipe, jobs::place, recipe::Recipe};
use dsq_eval::{Baseline, Check, Report, Setup, Suite, Tolerances, compare};
use dsq_quant::{Granularity, QuantArgs, QuantizedMatrix, pack_i32};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::OnceLock;

/// The committed suite's policy and baseline.
fn suite() -> Suite {
    Suite::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("regression/quick.toml")).unwrap()
}

fn setup() -> Setup {
    super::setup::detect(&Global { json: true, threads: Some(1), device: "cpu".into() }).unwrap()
}

fn tolerances() -> Tolerances {
    suite().fixed.unwrap().tolerance
}

fn measure(exported: &mut dyn FnMut(&str, &Path)) -> Report {
    let dir = tempfile::tempdir().unwrap();
    fixed::measure(dir.path(), 2, exported).unwrap()
}

/// What fails when `plant` damages the folder of the scheme `row`, as (row, metric, note).
fn red(row: &str, plant: impl Fn(&Path)) -> Vec<(String, String, String)> {
    static BASELINE: OnceLock<Baseline> = OnceLock::new();
    let baseline = BASELINE.get_or_init(|| {
        let report = measure(&mut |_, _| {});
        let path = Path::new("fixed.json");
        Baseline::of_report(path, "quick", "fixed", &report, &tolerances(), setup(), "test").unwrap()
    });
    let report = measure(&mut |name, folder| {
        if name == row {
            plant(folder);
        }
    });
    let checks = compare(baseline, &report, &tolerances(), &setup()).unwrap();
    checks.into_iter().filter(|c| c.verdict.fails()).map(|c| (c.row, c.metric, c.note)).collect()
}

/// The metrics that failed, all of which must be of `row`.
fn metrics<'a>(row: &str, red: &'a [(String, String, String)]) -> BTreeSet<&'a str> {
    assert!(red.iter().all(|r| r.0 == row), "{red:?}");
    red.iter().map(|r| r.1.as_str()).collect()
}

/// Changes the bytes of a tensor in `model.safetensors`.
fn edit(folder: &Path, tensor: &str, change: impl FnOnce(&mut [u8])) {
    let file = folder.join("model.safetensors");
    let mut bytes = std::fs::read(&file).unwrap();
    let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let json: serde_json::Value = serde_json::from_slice(&bytes[8..header]).unwrap();
    let offset = |i: usize| header + json[tensor]["data_offsets"][i].as_u64().unwrap() as usize;
    let (start, end) = (offset(0), offset(1));
    change(&mut bytes[start..end]);
    std::fs::write(&file, bytes).unwrap();
}

const MODULE: &str = "model.layers.1.self_attn.v_proj";

#[test]
fn the_fixed_checks_give_the_committed_baseline_on_this_machine() {
    let suite = suite();
    let baseline = Baseline::load(&suite.baseline_path(env!("CARGO_PKG_VERSION"), "fixed")).unwrap();
    let report = measure(&mut |_, _| {});
    let checks = compare(&baseline, &report, &tolerances(), &setup()).unwrap();
    assert!(!checks.is_empty());
    assert!(checks.iter().all(|c| !c.verdict.fails()), "\n{}", Check::table(&checks));
}

#[test]
fn a_scale_off_by_one_ulp_is_red_and_names_metric_and_layer() {
    let bump = |bytes: usize| {
        move |folder: &Path| {
            edit(folder, &format!("{MODULE}.weight_scale"), |b| {
                let at = 5 * bytes;
                b[at] = b[at].wrapping_add(1);
                assert_ne!(b[at], 0, "a carry would be more than one ulp");
            });
        }
    };
    for (row, bytes) in [("w4_g32_f32", 4), ("w4_g32_f16", 2), ("w4_g32_bf16", 2), ("w4_channel_f32", 4)] {
        let red = red(row, bump(bytes));
        assert_eq!(metrics(row, &red), BTreeSet::from(["requantize_mismatches", "scales_sha256"]), "{red:?}");
        let note = &red.iter().find(|r| r.1 == "scales_sha256").unwrap().2;
        assert_eq!(note, &format!("differs in {MODULE}"));
    }
}

#[test]
fn a_dropped_zero_point_is_red() {
    for row in ["w4_g32_asym_f32", "w4_g32_asym_bf16"] {
        // Every zero point of the layer becomes 0, which is stored as 8.
        let red = red(row, |folder| edit(folder, &format!("{MODULE}.weight_zero_point"), |b| b.fill(0x88)));
        let metrics = metrics(row, &red);
        assert!(
            metrics.is_superset(&BTreeSet::from(["zeros_sha256", "requantize_mismatches", "perplexity"])),
            "{red:?}"
        );
        assert!(!metrics.contains("codes_sha256") && !metrics.contains("scales_sha256"), "{red:?}");
    }
}

#[test]
fn one_zero_point_off_by_one_is_red() {
    let row = "w4_g32_asym_f32";
    let red = red(row, |folder| edit(folder, &format!("{MODULE}.weight_zero_point"), |b| b[0] ^= 1));
    assert!(metrics(row, &red).is_superset(&BTreeSet::from(["zeros_sha256", "requantize_mismatches"])), "{red:?}");
}

#[test]
fn a_zero_point_tensor_that_is_gone_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let err = fixed::measure(dir.path(), 1, &mut |name, folder| {
        if name == "w4_g32_asym_f32" {
            let file = folder.join("model.safetensors");
            let bytes = std::fs::read(&file).unwrap();
            let name = format!("{MODULE}.weight_zero_point");
            let at = bytes.windows(name.len()).position(|w| w == name.as_bytes()).unwrap();
            let mut bytes = bytes;
            bytes[at..at + name.len()].copy_from_slice(name.replace("_point", "_paint").as_bytes());
            std::fs::write(&file, bytes).unwrap();
        }
    })
    .unwrap_err();
    assert_eq!(err.code(), 3, "{err}");
    assert!(err.to_string().contains(MODULE), "{err}");
}

#[test]
fn c010_rounding_half_away_from_zero_is_red() {
    let ModuleWeights { n, k, data } = fixed::module_weights(MODULE);
    for (row, args) in
        fixed::schemes().into_iter().filter(|(_, a)| a.qtype.bits() == 4 && a.granularity != Granularity::PerChannel)
    {
        let q = QuantizedMatrix::quantize(&data, n, k, args).unwrap();
        let away = half_away(&data, &q, args);
        let changed = away.iter().zip(&q.codes).filter(|(a, b)| a != b).count();
        assert!(changed > 0, "{row}: no tie in the weights");
        let red = red(row, |folder| {
            let words: Vec<u8> = away.chunks(k).flat_map(|r| pack_i32(r, 4)).flat_map(|w| w.to_le_bytes()).collect();
            edit(folder, &format!("{MODULE}.weight_packed"), |b| b.copy_from_slice(&words));
        });
        assert!(metrics(row, &red).is_superset(&BTreeSet::from(["codes_sha256", "requantize_mismatches"])), "{red:?}");
        let note = &red.iter().find(|r| r.1 == "requantize_mismatches").unwrap().2;
        assert_eq!(note, &format!("expected at most 0, got {changed}"));
    }
}

/// The codes that a plain `round()` would choose.
fn half_away(w: &[f32], q: &QuantizedMatrix, args: QuantArgs) -> Vec<i8> {
    w.iter()
        .enumerate()
        .map(|(i, &x)| {
            let p = q.qparams(q.scale_index(i / q.k, i % q.k / q.group_len()));
            let (lo, hi) = (args.qtype.qmin() as f32, args.qtype.qmax() as f32);
            (x / p.scale + p.zero as f32).clamp(lo, hi).round() as i8
        })
        .collect()
}

#[test]
fn a_float_tensor_that_moved_is_red() {
    let row = "w4_g32_f32";
    let red = red(row, |folder| edit(folder, "model.norm.weight", |b| b[0] ^= 1));
    assert_eq!(metrics(row, &red), BTreeSet::from(["floats_sha256"]), "{red:?}");
    assert_eq!(red[0].2, "differs in model.norm.weight F32");
}

/// One layer, five steps, on the text of the repository.
const MICRO: &str = r#"
name = "micro"
[model]
architecture = "llama"
vocab_size = 1024
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 32
[data]
train = "DATA/train.txt"
heldout = "DATA/heldout.txt"
tokenizer = "DATA/tokenizer.json"
[train]
steps = 3
batch_size = 4
seq_len = 32
learning_rate = 3e-3
[qat]
steps = 2
learning_rate = 5e-4
float_equal_tokens = false
[quant]
scheme = "W4A16"
group_size = 32
[eval]
context = 32
max_tokens = 256
"#;

#[test]
fn a_fault_in_the_export_of_a_trained_recipe_is_red() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("micro.toml");
    std::fs::write(&file, MICRO.replace("DATA", &format!("{}/recipes/data/pydoc", env!("CARGO_MANIFEST_DIR"))))
        .unwrap();
    let recipe = Recipe::load(&file, &[]).unwrap();
    let global = Global { json: true, threads: Some(2), device: "cpu".into() };
    let run = dir.path().join("run");
    let trained = train_recipe(&recipe, &run, &global).unwrap();
    let policy = &suite().recipes[0].tolerance;
    let good = add_checks(trained.clone(), &run).unwrap();
    let path = Path::new("micro.json");
    let baseline = Baseline::of_report(path, "quick", "micro", &good, policy, setup(), "test").unwrap();
    let red = |report: &Report| -> BTreeSet<String> {
        let checks = compare(&baseline, report, policy, &setup()).unwrap();
        checks.into_iter().filter(|c| c.verdict.fails()).map(|c| format!("{}/{}", c.row, c.metric)).collect()
    };
    assert_eq!(red(&good), BTreeSet::new());
    let expected = |metrics: [&str; 2]| metrics.map(|m| format!("exported/{m}")).into();
    let module = "model.layers.0.mlp.down_proj";
    let exported = run.join(place::EXPORTED);
    // A bf16 scale by one ulp, then back; then one code by one step.
    edit(&exported, &format!("{module}.weight_scale"), |b| b[0] ^= 1);
    assert_eq!(red(&add_checks(trained.clone(), &run).unwrap()), expected(["requantize_mismatches", "scales_sha256"]));
    edit(&exported, &format!("{module}.weight_scale"), |b| b[0] ^= 1);
    edit(&exported, &format!("{module}.weight_packed"), |b| b[0] ^= 1);
    assert_eq!(red(&add_checks(trained.clone(), &run).unwrap()), expected(["codes_sha256", "requantize_mismatches"]));
    edit(&exported, &format!("{module}.weight_packed"), |b| b[0] ^= 1);
    assert_eq!(red(&add_checks(trained, &run).unwrap()), BTreeSet::new());
}
