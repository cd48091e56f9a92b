//! CNN runs that are stopped after any step, die in any step, or are killed with SIGKILL at random moments, and go on: the
//! log, the weights, BatchNorm's statistics, the activation ranges and the results are those of an undisturbed run, bit for
//! bit. Not what the phases compute (see `dsq_model::resnet`), and not the language model (see `lm.rs`, `kill.rs`).

use dsq_model::resnet::BnPlacement;
use dsq_quant::{FloatType, Granularity, ObserverKind, QuantConfig, QuantScheme};
use dsq_train::cnn::{CnnData, CnnPhase, CnnProgress, CnnResults};
use dsq_train::{CnnTrainConfig, Control, Distill, LearnedScales, RunDir, Snapshot, StateTensor, TrainError, run_cnn};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::RwLock;
use std::time::Duration;

const ROLE: &str = "DSQ_TEST_CNN_RUN_IN";

/// A process that is being started has, for a moment, the open files of this one, and with them the locks of the run folders
/// of other tests. So none is started (write) while a run folder is open (read).
static FOLDERS: RwLock<()> = RwLock::new(());

/// Pictures of 8 x 8 with a bright bar whose place is the label, as IDX files.
fn pictures(dir: &Path, name: &str, count: usize) -> (PathBuf, PathBuf) {
    let mut state = 77u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 24
    };
    let mut images: Vec<u8> = [0x803u32, count as u32, 8, 8].iter().flat_map(|w| w.to_be_bytes()).collect();
    let mut labels: Vec<u8> = [0x801u32, count as u32].iter().flat_map(|w| w.to_be_bytes()).collect();
    for _ in 0..count {
        let label = next() % 3;
        labels.push(label as u8);
        for pixel in 0..64 {
            let bar = pixel / 8 / 3 == label;
            images.push((next() / 3 + if bar { 150 } else { 0 }) as u8);
        }
    }
    let (i, l) = (dir.join(format!("{name}-images.idx")), dir.join(format!("{name}-labels.idx")));
    std::fs::write(&i, images).unwrap();
    std::fs::write(&l, labels).unwrap();
    (i, l)
}

/// Two seeds; every phase passes the steps at which statistics and ranges freeze, the end of an epoch, and a checkpoint.
fn config(dir: &Path) -> CnnTrainConfig {
    let (train_images, train_labels) = pictures(dir, "train", 20);
    let (test_images, test_labels) = pictures(dir, "test", 12);
    let phase = |learning_rate| CnnPhase {
        steps: 4,
        batch_size: 6,
        learning_rate,
        warmup_steps: 1,
        momentum: 0.9,
        weight_decay: 1e-3,
        grad_clip: 2.0,
        augment: true,
    };
    CnnTrainConfig {
        seeds: vec![3, 8],
        channels: vec![3, 5],
        blocks_per_stage: 1,
        num_classes: 3,
        data: CnnData { train_images, train_labels, test_images, test_labels, train_limit: None, test_limit: None },
        float: phase(0.1),
        qat: phase(0.02),
        freeze_bn_step: 2,
        freeze_ranges_step: 3,
        wrong_way: BnPlacement::BnObserved,
        calibration_batches: 2,
        observer: ObserverKind::MovingAverage,
        observer_rate: 0.1,
        learned_scales: None,
        distill: None,
        float_equal_steps: false,
        save_every: 3,
    }
}

fn quant() -> QuantConfig {
    let scheme = QuantScheme::preset("W4A4", Granularity::PerChannel, FloatType::F32).unwrap();
    QuantConfig::new(scheme, &["re:conv1$".into()]).unwrap()
}

/// Everything that a run leaves, as bytes: the log, the newest checkpoint (weights, statistics and ranges of every seed's
/// network), accuracies, and what ships.
#[derive(PartialEq)]
struct Left {
    log: String,
    checkpoint: Vec<(String, Vec<u8>)>,
    rows: String,
    shipped: Vec<u8>,
}

fn left(run: &Path, results: &CnnResults) -> Left {
    let checkpoints = run.join("checkpoints");
    let mut names: Vec<PathBuf> = std::fs::read_dir(&checkpoints).unwrap().map(|e| e.unwrap().path()).collect();
    names.sort();
    let newest = names.last().unwrap();
    let checkpoint = ["state.json", "tensors.safetensors"]
        .map(|f| (format!("{}/{f}", newest.file_name().unwrap().display()), std::fs::read(newest.join(f)).unwrap()));
    let mut shipped = Vec::new();
    let mut floats = |values: &[f32]| shipped.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    for export in &results.exports {
        floats(&export.logits);
        export.master.iter().for_each(|(_, _, data)| floats(data));
        for layer in &export.layers {
            floats(&layer.weight);
            floats(&layer.bias);
            if let Some((_, p)) = layer.activation {
                floats(&[p.scale, p.zero as f32]);
            }
            if let Some(m) = &layer.matrix {
                floats(&m.scales);
                floats(&m.codes.iter().map(|c| f32::from(*c)).collect::<Vec<_>>());
            }
        }
    }
    Left {
        log: std::fs::read_to_string(run.join("log.jsonl")).unwrap(),
        checkpoint: checkpoint.into(),
        rows: serde_json::to_string(&results.rows).unwrap(),
        shipped,
    }
}

fn train(
    config: &CnnTrainConfig,
    run: &Path,
    resume: bool,
    on_step: &mut dyn FnMut(&CnnProgress) -> Control,
) -> Result<CnnResults, TrainError> {
    let _open = FOLDERS.read().unwrap();
    run_cnn(config, &quant(), run, resume, false, on_step)
}

fn assert_same(got: &Left, want: &Left, when: &str) {
    assert_eq!(got.log, want.log, "{when}: the log");
    assert_eq!(got.rows, want.rows, "{when}: accuracies");
    for (got, want) in got.checkpoint.iter().zip(&want.checkpoint) {
        assert!(got == want, "{when}: {} against {}", got.0, want.0);
    }
    assert!(got.shipped == want.shipped, "{when}: what ships");
}

/// Runs with every observer and two wrong ways, and one with learned scales, distillation and the float network of equal steps.
fn variants(dir: &Path) -> [CnnTrainConfig; 4] {
    let first = config(dir);
    let second = CnnTrainConfig {
        observer: ObserverKind::MinMax,
        wrong_way: BnPlacement::ConvObserved,
        save_every: 2,
        ..first.clone()
    };
    let third = CnnTrainConfig {
        wrong_way: BnPlacement::Skipped,
        float_equal_steps: true,
        learned_scales: Some(LearnedScales { rate: 0.01 }),
        distill: Some(Distill { weight: 0.5, temperature: 2.0, hidden_weight: 0.0 }),
        ..first.clone()
    };
    // With learned scales nothing is observed; here everything is, until ranges freeze.
    let fourth = CnnTrainConfig { observer: ObserverKind::Percentile(97.5), ..first.clone() };
    [first, second, third, fourth]
}

const STEPS: u64 = 24;

#[test]
fn c084_a_cnn_run_stopped_after_any_step_resumes_to_the_same_bits() {
    let data = tempfile::tempdir().unwrap();
    for config in variants(data.path()) {
        let straight = tempfile::tempdir().unwrap();
        let mut phases = Vec::new();
        let results = train(&config, straight.path(), false, &mut |p| {
            assert_eq!(p.steps, STEPS);
            phases.push((p.seed, p.phase));
            Control::Continue
        });
        let want = left(straight.path(), &results.unwrap());
        phases.dedup();
        let names = match config.wrong_way {
            BnPlacement::Skipped => ["float", "qat", "float_equal_steps"],
            _ => ["float", "qat_bn_observed", "qat"],
        };
        assert_eq!(phases, [3, 8].map(|s| names.map(|p| (s, p))).concat());
        assert!(want.log.lines().count() == STEPS as usize && want.log.contains("\"loss\""));
        for stop in 1..=STEPS {
            let dir = tempfile::tempdir().unwrap();
            let stopped = train(&config, dir.path(), false, &mut |p| match p.step == stop {
                true => Control::Stop,
                false => Control::Continue,
            });
            let e = stopped.unwrap_err();
            assert!(matches!(e, TrainError::Interrupted { step, .. } if step == stop), "{e}");
            assert_eq!(e.exit_code(), 130);
            let mut first = None;
            let results = train(&config, dir.path(), true, &mut |p| {
                first.get_or_insert(p.step);
                Control::Continue
            });
            assert_eq!(first, (stop < STEPS).then_some(stop + 1), "nothing is done twice");
            assert_same(&left(dir.path(), &results.unwrap()), &want, &format!("stopped after {stop}"));
        }
        // Resumed when all is done: the same results, no step.
        let again = train(&config, straight.path(), true, &mut |p| panic!("step {} is done again", p.step));
        assert_same(&left(straight.path(), &again.unwrap()), &want, "resumed at the end");
    }
}

#[test]
fn c082_f093_a_cnn_run_that_died_in_any_step_resumes_to_the_same_bits() {
    // A panic out of the callback stands for the kill: whatever was not yet saved is lost.
    let data = tempfile::tempdir().unwrap();
    for config in variants(data.path()) {
        let straight = tempfile::tempdir().unwrap();
        let want = train(&config, straight.path(), false, &mut |_| Control::Continue).unwrap();
        let want = left(straight.path(), &want);
        for die in 1..=STEPS {
            let dir = tempfile::tempdir().unwrap();
            let died = std::panic::catch_unwind(|| {
                train(&config, dir.path(), false, &mut |p| {
                    assert!(p.step != die, "killed");
                    Control::Continue
                })
            });
            assert!(died.is_err());
            let mut first = None;
            let results = train(&config, dir.path(), true, &mut |p| {
                first.get_or_insert(p.step);
                Control::Continue
            });
            // Checkpoints: every `save_every` steps of a phase of 4, and at its end.
            let saved = |s: u64| s == 0 || (s % 4).is_multiple_of(config.save_every as u64);
            assert_eq!(first, (0..die).rfind(|s| saved(*s)).map(|s| s + 1), "died in {die}");
            assert_same(&left(dir.path(), &results.unwrap()), &want, &format!("died in {die}"));
        }
    }
}

#[test]
fn f090_a_cnn_run_is_not_resumed_with_other_settings() {
    let data = tempfile::tempdir().unwrap();
    let config = config(data.path());
    let run = data.path().join("run");
    let stop = &mut |_: &CnnProgress| Control::Stop;
    train(&config, &run, false, stop).unwrap_err();
    type Change = fn(&mut CnnTrainConfig);
    let changes: [(&str, Change); 7] = [
        ("learned_scales", |c| c.learned_scales = Some(LearnedScales { rate: 0.01 })),
        ("distill", |c| c.distill = Some(Distill { weight: 1.0, temperature: 1.0, hidden_weight: 0.0 })),
        ("seeds", |c| c.seeds[1] = 9),
        ("qat.learning_rate", |c| c.qat.learning_rate = 0.03),
        ("freeze_bn_step", |c| c.freeze_bn_step = 1),
        ("observer", |c| c.observer = ObserverKind::MinMax),
        ("data.pictures", |c| c.data.train_limit = Some(19)),
    ];
    for (field, change) in changes {
        let mut other = config.clone();
        change(&mut other);
        let e = train(&other, &run, true, stop).unwrap_err();
        assert!(e.exit_code() == 2 && e.to_string().contains(field), "{field}: {e}");
    }
    // How often it saves, and where the same files lie, is no other run.
    let moved = tempfile::tempdir().unwrap();
    let other = CnnTrainConfig { save_every: 1, ..self::config(moved.path()) };
    train(&other, &run, true, &mut |_| Control::Continue).unwrap();
}

#[test]
fn phases_follow_from_the_settings_and_learned_scales_leave_where_they_started() {
    let data = tempfile::tempdir().unwrap();
    let learned_scales = Some(LearnedScales { rate: 0.05 });
    let config = CnnTrainConfig {
        wrong_way: BnPlacement::Skipped,
        learned_scales,
        float_equal_steps: true,
        ..config(data.path())
    };
    let scales = |rate: f64| {
        let learned_scales = Some(LearnedScales { rate });
        let config = CnnTrainConfig { learned_scales, ..config.clone() };
        let run = tempfile::tempdir().unwrap();
        let results = train(&config, run.path(), false, &mut |p| {
            assert_eq!(p.steps, 24);
            Control::Continue
        });
        let results = results.unwrap();
        let names: Vec<&str> = results.rows.iter().map(|r| r.name.as_str()).collect();
        assert_eq!(names, ["float", "ptq", "qat", "float_equal_steps"]);
        let of = |l: &dsq_model::resnet::ConvertedLayer| {
            let activation = l.activation.map_or(0.0, |(_, p)| p.scale);
            l.matrix.as_ref().map(|m| (m.scales.clone(), activation))
        };
        results.exports[0].layers.iter().filter_map(of).collect::<Vec<_>>()
    };
    let (slow, fast) = (scales(1e-9), scales(0.05));
    assert_eq!(slow.len(), 6);
    for ((a, x), (b, y)) in slow.iter().zip(&fast) {
        assert!(a.iter().zip(b).all(|(a, b)| a != b) && x != y, "{a:?} {b:?} {x} {y}");
    }
    // What the network cannot be quantized with is found before anything is written.
    let groups = QuantScheme::preset("W4A4", Granularity::PerGroup(9), FloatType::F32).unwrap();
    let groups = QuantConfig::new(groups, &["re:.*downsample".into(), "re:conv1$".into(), "fc".into()]).unwrap();
    let run = data.path().join("never");
    let e = run_cnn(&config, &groups, &run, false, false, &mut |_| panic!("no step")).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("granularity") && !run.exists(), "{e}");
    type Change = fn(&mut CnnTrainConfig);
    let bad: [(&str, Change); 3] = [
        ("qat.scale_learning_rate", |c| c.learned_scales = Some(LearnedScales { rate: 1.5 })),
        ("qat.percentile: expected above 50, at most 100, got 50", |c| c.observer = ObserverKind::Percentile(50.0)),
        ("qat.hidden_weight: expected 0 for an image model, got 0.5", |c| {
            c.distill = Some(Distill { weight: 0.5, temperature: 1.0, hidden_weight: 0.5 });
        }),
    ];
    for (words, change) in bad {
        let mut config = config.clone();
        change(&mut config);
        let e = train(&config, &run, false, &mut |_| panic!("no step")).unwrap_err();
        assert!(e.exit_code() == 2 && e.to_string().contains(words), "{e}");
    }
}

/// Runs this binary's test `name` in `dir` and kills it after `delay` milliseconds; whether it had finished before.
fn killed_after(name: &str, dir: &Path, mut delay: u64) -> bool {
    let starting = FOLDERS.write().unwrap();
    let mut child: Child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(ROLE, dir)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(starting);
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if delay == 0 => {
                child.kill().unwrap();
                break child.wait().unwrap();
            }
            None => {
                std::thread::sleep(Duration::from_millis(1));
                delay -= 1;
            }
        }
    };
    let mut text = String::new();
    std::io::Read::read_to_string(&mut child.stderr.take().unwrap(), &mut text).unwrap();
    assert!(status.success() || status.code().is_none(), "the run was killed, it did not fail: {text}");
    status.success()
}

fn kill_config(dir: &Path) -> CnnTrainConfig {
    let mut config = config(dir);
    // Saving every step makes most of the time saving time.
    (config.float.steps, config.qat.steps, config.save_every) = (9, 7, 1);
    config
}

#[test]
fn c082_f093_a_killed_cnn_run_resumes_to_the_same_bits() {
    let name = "c082_f093_a_killed_cnn_run_resumes_to_the_same_bits";
    if let Some(dir) = std::env::var_os(ROLE) {
        let (dir, run) = (Path::new(&dir), Path::new(&dir).join("run"));
        train(&kill_config(dir), &run, run.join("run.json").exists(), &mut |_| Control::Continue).unwrap();
        return;
    }
    let data = tempfile::tempdir().unwrap();
    let config = kill_config(data.path());
    let straight = data.path().join("straight");
    let want = left(&straight, &train(&config, &straight, false, &mut |_| Control::Continue).unwrap());
    let (mut kills, mut delay) = (0, 11u64);
    for _ in 0..3 {
        let dir = tempfile::tempdir().unwrap();
        let mut last = 0;
        for attempt in 0.. {
            // Varying delays, some of them before the first checkpoint; longer with each attempt, so that the run gets
            // done on a slow machine too.
            delay = (delay * 48_271) % 2_147_483_647;
            if killed_after(name, dir.path(), 3 + delay % 60 + 6 * attempt) {
                break;
            }
            kills += 1;
            let newest = std::fs::read_dir(dir.path().join("run/checkpoints"))
                .map(|entries| {
                    let names = entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned());
                    names.filter_map(|n| n.strip_prefix("step-")?.parse().ok()).max().unwrap_or(0)
                })
                .unwrap_or(0u64);
            // Progress is never lost: at most the step that was being saved a second time.
            assert!(newest + 1 >= last, "{last} -> {newest}");
            last = newest;
            assert!(attempt < 500, "no progress");
        }
        let run = dir.path().join("run");
        let results = train(&config, &run, true, &mut |p| panic!("step {} was not finished", p.step)).unwrap();
        assert_same(&left(&run, &results), &want, "killed");
    }
    assert!(kills >= 6, "{kills} kills: the delays are too long to test anything");
}

/// A network's phase and a seed end with the same step, so the same step is saved twice: a kill between the two must leave
/// one of them whole.
#[test]
fn f093_f100_a_kill_while_a_step_is_saved_again_leaves_a_complete_checkpoint() {
    let name = "f093_f100_a_kill_while_a_step_is_saved_again_leaves_a_complete_checkpoint";
    let snapshot = || Snapshot {
        step: 5,
        tensors: vec![StateTensor { name: "w".into(), shape: vec![64], data: vec![0.5; 64] }],
        state: serde_json::json!({}),
    };
    if let Some(dir) = std::env::var_os(ROLE) {
        let path = Path::new(&dir).join("run");
        let run = RunDir::open(&path, &serde_json::json!({}), path.join("run.json").exists(), false).unwrap();
        loop {
            run.save(&snapshot()).unwrap();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run");
    let open = FOLDERS.read().unwrap();
    RunDir::open(&path, &serde_json::json!({}), false, false).unwrap().save(&snapshot()).unwrap();
    drop(open);
    for i in 0..150 {
        killed_after(name, dir.path(), 4 + i % 13);
        let _open = FOLDERS.read().unwrap();
        let run = RunDir::open(&path, &serde_json::json!({}), true, false).unwrap();
        let found = run.latest().unwrap_or_else(|e| panic!("after kill {i}: {e}"));
        assert!(found == Some(snapshot()), "after kill {i}: no checkpoint is left");
    }
}

#[test]
fn f094_a_run_that_was_killed_before_it_began_can_be_started() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run");
    let _open = FOLDERS.read().unwrap();
    let open = |overwrite| RunDir::open(&path, &serde_json::json!({}), false, overwrite);
    // What the first moments of a run leave: no run.json yet.
    std::fs::create_dir_all(path.join("checkpoints")).unwrap();
    std::fs::write(path.join("run.lock"), "process 1\n").unwrap();
    std::fs::write(path.join("run.tmp"), "{").unwrap();
    open(false).unwrap();
    // What the first moments of an --overwrite leave: run.json is gone, checkpoints are not.
    std::fs::remove_file(path.join("run.json")).unwrap();
    std::fs::create_dir_all(path.join("checkpoints/step-00000003")).unwrap();
    assert_eq!(open(false).unwrap_err().exit_code(), 2, "checkpoints are not removed unasked");
    let run = open(true).unwrap();
    assert!(run.latest().unwrap().is_none());
    drop(run);
    // Anything else in the folder is somebody else's.
    std::fs::remove_file(path.join("run.json")).unwrap();
    std::fs::write(path.join("thesis.txt"), "mine").unwrap();
    assert_eq!(open(false).unwrap_err().exit_code(), 2);
    assert_eq!(open(true).unwrap_err().exit_code(), 2);
    assert!(path.join("thesis.txt").exists());
}
