//! Writing and proving: what is exported is read back equal, nothing partial is ever seen, and what exists survives.

mod fixtures;

use dsq_checkpoint::{
    Checkpoint, CheckpointError, Dtype, ExportTensor, FolderWriter, LinearWeight, ModelConfig, NamedTensor,
    ResNetConfig, SourceRecord, TensorData, check_groups, check_output, export_folder, write_atomic,
};
use dsq_quant::{
    FloatType, Granularity, Mapping, QParams, QuantArgs, QuantConfig, QuantScheme, QuantType, QuantizedMatrix,
};
use fixtures::{float_layers, list, llama, quantized_layers, scheme, values};
use proptest::prelude::*;
use std::path::Path;

fn int4(granularity: Granularity, mapping: Mapping, scale_dtype: FloatType) -> QuantArgs {
    QuantArgs { mapping, ..QuantArgs::int4(granularity, scale_dtype) }
}

fn matrix_of(layers: &[ExportTensor], wanted: &str) -> QuantizedMatrix {
    layers
        .iter()
        .find_map(|l| match l {
            ExportTensor::Linear { module, matrix, .. } if module == wanted => Some(matrix.clone()),
            _ => None,
        })
        .unwrap()
}

#[test]
fn every_scheme_reads_back_equal() {
    let dir = tempfile::tempdir().unwrap();
    for qtype in QuantType::INTS {
        for granularity in [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(32)] {
            for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                for dtype in FloatType::ALL {
                    let args = QuantArgs { qtype, mapping, ..QuantArgs::int4(granularity, dtype) };
                    let (config, q) = (llama(false), scheme(args));
                    let layers = quantized_layers(&config, dtype, &q);
                    let out = dir.path().join("m");
                    let model = ModelConfig::Llama(config);
                    let proof = export_folder(&out, &model, layers.clone(), Some(&q), vec![], true).unwrap();
                    let ckpt = Checkpoint::open(&out).unwrap();
                    assert_eq!(ckpt.config(), &model);
                    for spec in model.linears() {
                        match ckpt.linear(&spec.module).unwrap() {
                            LinearWeight::Quantized(m) => assert_eq!(m, matrix_of(&layers, &spec.module)),
                            LinearWeight::Float { .. } => assert_eq!(spec.module, "lm_head"),
                            LinearWeight::Ordered { .. } => panic!("columns as they come"),
                        }
                    }
                    let group = ckpt.quantization().unwrap().group_for("model.layers.0.mlp.up_proj", "Linear").unwrap();
                    assert_eq!(
                        (group.weights.qtype, group.weights.granularity, group.weights.mapping),
                        (qtype, granularity, mapping)
                    );
                    assert!(ckpt.quantization().unwrap().group_for("lm_head", "Linear").is_none());
                    let (mut bits, mut n) = (0.0, 0.0);
                    for spec in model.linears().iter().filter(|s| s.module != "lm_head") {
                        let size = (spec.n() * spec.k()) as f64;
                        bits += args.bits_per_weight(spec.n(), spec.k()).unwrap() * size;
                        n += size;
                    }
                    // A per-tensor zero point is stored as one byte, not as a word.
                    if !(mapping == Mapping::Asymmetric && granularity == Granularity::PerTensor) {
                        assert!((proof.bits_per_weight - bits / n).abs() < 1e-12, "{args:?}");
                    }
                    assert!(ckpt.faults().is_empty(), "{:?}", ckpt.faults());
                }
            }
        }
    }
}

#[test]
fn f084_c022_all_layers_that_the_group_does_not_divide_are_listed() {
    let config = ModelConfig::Llama(llama(false));
    let q = scheme(int4(Granularity::PerGroup(64), Mapping::Symmetric, FloatType::F32));
    let e = check_groups(Path::new("m"), &config, &q).unwrap_err();
    assert_eq!(e.exit_code(), 2);
    let text = e.to_string();
    assert!(text.contains("2 of them: model.layers.{0..1}.mlp.down_proj (96)") && !text.contains("up_proj"), "{text}");
    assert!(
        e.hint().unwrap().ends_with("(32 divides all), or leave these layers in float: --ignore down_proj"),
        "{e:?}"
    );
    // With the entries of the hint it runs.
    let ignore = ["lm_head", "down_proj"].map(String::from);
    let q = QuantConfig::new(q.scheme, &ignore).unwrap();
    check_groups(Path::new("m"), &config, &q).unwrap();
    // A gap in the layers, and a leaf of which some layers are fine, are told apart.
    let ignore = ["lm_head", "model.layers.0.mlp.down_proj"].map(String::from);
    let q = QuantConfig::new(q.scheme, &ignore).unwrap();
    let text = check_groups(Path::new("m"), &config, &q).unwrap_err().to_string();
    assert!(text.contains("1 of them: model.layers.1.mlp.down_proj (96)"), "{text}");
}

#[test]
fn c027_a_tied_model_has_no_head_and_keeps_its_flag() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    let config = llama(true);
    let q = scheme(int4(Granularity::PerGroup(32), Mapping::Symmetric, FloatType::Bf16));
    let mut layers = quantized_layers(&config, FloatType::Bf16, &q);
    let embedding = layers
        .iter()
        .find_map(|l| match l {
            ExportTensor::Float { name, shape, data, dtype } if name == "model.embed_tokens.weight" => {
                Some((shape.clone(), data.clone(), *dtype))
            }
            _ => None,
        })
        .unwrap();
    let head = |data| ExportTensor::Float {
        name: "lm_head.weight".into(),
        shape: embedding.0.clone(),
        data,
        dtype: embedding.2,
    };
    layers.push(head(embedding.1.clone()));
    let model = ModelConfig::Llama(config);
    let proof = export_folder(&out, &model, layers.clone(), Some(&q), vec![], false).unwrap();
    let ckpt = Checkpoint::open(&out).unwrap();
    assert!(ckpt.names().iter().all(|n| !n.contains("lm_head")));
    assert_eq!(ckpt.config(), &model);
    assert_eq!(ckpt.linear("lm_head").unwrap().into_f32(), ckpt.read_f32("model.embed_tokens.weight").unwrap());
    assert!(proof.tensors.iter().any(|t| t.name == "lm_head.weight" && t.became == "dropped"));
    // The weight file is as large as the sum of the classes says.
    let size = std::fs::metadata(out.join("model.safetensors")).unwrap().len();
    assert_eq!(proof.bytes.values().sum::<u64>(), size);
    // Another head than the embedding is not thrown away silently.
    let mut other = embedding.1.clone();
    other[3] += 1.0;
    layers.pop();
    layers.push(head(other));
    let e = export_folder(&dir.path().join("x"), &model, layers, Some(&q), vec![], false).unwrap_err();
    assert_eq!((e.exit_code(), list(dir.path())), (2, vec!["m".to_string()]));
}

#[test]
fn c001_c003_degenerate_and_constant_groups_survive_export_and_reload() {
    let dir = tempfile::tempdir().unwrap();
    let config = llama(true);
    // Groups of 32 along k = 64: all 0.25; all -0.25; zero; 0 and 0.25 in turn; tiny; one tiny value.
    let mut data = values(64 * 64, 5);
    let groups: [fn(usize) -> f32; 6] = [
        |_| 0.25,
        |_| -0.25,
        |_| 0.0,
        |i| if i % 2 == 0 { 0.0 } else { 0.25 },
        |i| if i % 2 == 0 { 1e-30 } else { -1e-30 },
        |i| if i == 5 { 1e-38 } else { 0.0 },
    ];
    for (g, f) in groups.iter().enumerate() {
        (0..32).for_each(|i| data[g * 32 + i] = f(i));
    }
    for dtype in FloatType::ALL {
        for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
            let args = int4(Granularity::PerGroup(32), mapping, dtype);
            let q = scheme(args);
            let module = "model.layers.0.self_attn.q_proj";
            let mut layers = quantized_layers(&config, FloatType::F32, &q);
            let matrix = QuantizedMatrix::quantize(&data, 64, 64, args).unwrap();
            for layer in &mut layers {
                if let ExportTensor::Linear { module: m, matrix: old, .. } = layer
                    && m == module
                {
                    *old = matrix.clone();
                }
            }
            let out = dir.path().join("m");
            export_folder(&out, &ModelConfig::Llama(config.clone()), layers, Some(&q), vec![], true).unwrap();
            let back = Checkpoint::open(&out).unwrap().linear(module).unwrap().into_f32();
            assert_eq!(back, matrix.dequantize());
            assert!(back.iter().all(|x| x.is_finite()));
            // 0 is always on the grid; a constant group is exact up to the rounding of its stored scale when asymmetric.
            for (i, x) in back[..192].iter().enumerate() {
                let want = data[i];
                let bound = match mapping {
                    Mapping::Asymmetric => want.abs() * dtype.epsilon(),
                    Mapping::Symmetric => want.abs() / 14.0, // Half of a step of absmax / 7.
                };
                assert!((x - want).abs() <= bound.max(1e-30), "{dtype} {mapping:?} {i}: {want} -> {x}");
            }
        }
    }
}

#[test]
fn c019_per_channel_with_bias_survives_a_save() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    let config = ModelConfig::ResNet(ResNetConfig {
        in_channels: 1,
        image_size: 8,
        channels: vec![4, 8],
        blocks_per_stage: 1,
        num_classes: 3,
        norm_eps: 1e-5,
        mean: vec![0.25],
        std: vec![0.3],
    });
    let weights = int4(Granularity::PerChannel, Mapping::Symmetric, FloatType::F32);
    let activations = int4(Granularity::PerTensor, Mapping::Asymmetric, FloatType::F32);
    let q = QuantConfig::new(QuantScheme { weights, activations: Some(activations) }, &[]).unwrap();
    let mut layers = Vec::new();
    let mut biases = Vec::new();
    for (i, spec) in config.linears().into_iter().enumerate() {
        let w = values(spec.n() * spec.k(), i as u64 + 1);
        let bias = values(spec.n(), i as u64 + 50);
        let p = QParams { scale: 0.01 + i as f32 * 0.003, zero: i as i32 - 8 };
        let matrix = QuantizedMatrix::quantize(&w, spec.n(), spec.k(), weights).unwrap();
        assert!(matrix.codes.iter().any(|&c| c != 0));
        biases.push((spec.module.clone(), bias.clone(), matrix.clone(), p));
        layers.push(ExportTensor::Float {
            name: format!("{}.bias", spec.module),
            shape: vec![spec.n()],
            data: bias,
            dtype: FloatType::F32,
        });
        layers.push(ExportTensor::Linear {
            module: spec.module,
            shape: spec.shape,
            matrix,
            activation: Some((activations, p)),
            source: None,
            order: None,
        });
    }
    export_folder(&out, &config, layers, Some(&q), vec![], false).unwrap();
    let ckpt = Checkpoint::open(&out).unwrap();
    assert_eq!(ckpt.config(), &config);
    for (module, bias, matrix, p) in biases {
        assert_eq!(ckpt.bias(&module).unwrap().unwrap(), bias);
        assert_eq!(matrix.scales.len(), matrix.n);
        assert_eq!(ckpt.linear(&module).unwrap(), LinearWeight::Quantized(matrix));
        assert_eq!(ckpt.activation(&module).unwrap(), Some((activations, p)));
    }
}

#[test]
fn rescaled_tensors_are_stored_as_they_became_and_the_proof_names_what_they_were() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    let config = llama(false);
    let name = "model.layers.1.input_layernorm.weight";
    let mut before = Vec::new();
    let layers = float_layers(&config, FloatType::Bf16).into_iter().map(|l| match l {
        ExportTensor::Float { name: n, shape, data, dtype } if n == name => {
            before = data.clone();
            let data: Vec<f32> = data.iter().map(|v| dtype.round(v / 3.0)).collect();
            let mut source = SourceRecord::with_values("0123".into(), "BF16".into(), &before, &data);
            source.rescaled = Some("divided by 3".into());
            ExportTensor::Rescaled { name: n, shape, data, dtype, source }
        }
        other => other,
    });
    let layers: Vec<ExportTensor> = layers.collect();
    let proof = export_folder(&out, &ModelConfig::Llama(config), layers, None, vec![], false).unwrap();
    let got = Checkpoint::open(&out).unwrap().read_f32(name).unwrap();
    assert!(got.iter().zip(&before).all(|(v, w)| *v == FloatType::Bf16.round(w / 3.0)));
    let tensor = proof.tensors.iter().find(|t| t.name == name).unwrap();
    let source = tensor.source.as_ref().unwrap();
    assert_eq!((tensor.became, source.sha256.as_str()), ("rescaled", "0123"));
    assert_eq!(source.rescaled.as_deref(), Some("divided by 3"));
    assert!((source.relative_error - 2.0 / 3.0).abs() < 0.01, "{}", source.relative_error);
    assert!(Checkpoint::open(&out).unwrap().faults().is_empty());
    assert_eq!(proof.tensors.iter().filter(|t| t.became == "rescaled").count(), 1);
}

#[test]
fn f021_c036_a_copied_tensor_keeps_every_bit() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    let config = llama(false);
    let patterns = [0x0001u16, 0x8001, 0x007f, 0x0080, 0x8000, 0x7f7f, 0x7f81, 0xffc1];
    let bytes: Vec<u8> = patterns.iter().cycle().take(64).flat_map(|p| p.to_le_bytes()).collect();
    let mut layers = float_layers(&config, FloatType::Bf16);
    layers.retain(|l| !matches!(l, ExportTensor::Float { name, .. } if name == "model.norm.weight"));
    layers.push(ExportTensor::Copy {
        name: "model.norm.weight".into(),
        dtype: Dtype::Bf16,
        shape: vec![64],
        bytes: bytes.clone(),
    });
    export_folder(&out, &ModelConfig::Llama(config), layers, None, vec![], false).unwrap();
    let ckpt = Checkpoint::open(&out).unwrap();
    assert_eq!(ckpt.read_stored("model.norm.weight").unwrap(), (Dtype::Bf16, bytes));
    let faults = ckpt.faults();
    assert!(faults.iter().any(|f| f.field == "model.norm.weight" && f.problem.contains("16 non-finite")), "{faults:?}");
}

#[test]
fn c036_values_that_overflow_the_dtype_are_refused_not_clamped() {
    let dir = tempfile::tempdir().unwrap();
    let config = llama(false);
    let mut layers = float_layers(&config, FloatType::F16);
    for (value, word) in [(70000.0, "overflow"), (f32::NAN, "non-finite")] {
        let ExportTensor::Float { data, .. } = &mut layers[1] else { panic!("float") };
        data[5] = value;
        let e = export_folder(
            &dir.path().join("m"),
            &ModelConfig::Llama(config.clone()),
            layers.clone(),
            None,
            vec![],
            false,
        )
        .unwrap_err();
        assert_eq!(e.exit_code(), 6);
        let text = e.to_string();
        assert!(text.contains("model.norm.weight") && text.contains(word) && text.contains("index 5"), "{text}");
        assert!(list(dir.path()).is_empty());
    }
}

#[test]
fn layers_that_contradict_the_scheme_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let config = ModelConfig::Llama(llama(false));
    let q = scheme(int4(Granularity::PerGroup(32), Mapping::Symmetric, FloatType::F32));
    let other = scheme(int4(Granularity::PerChannel, Mapping::Symmetric, FloatType::F32));
    let layers = quantized_layers(&llama(false), FloatType::F32, &q);
    for wrong in [None, Some(&other)] {
        let e = export_folder(&dir.path().join("m"), &config, layers.clone(), wrong, vec![], false).unwrap_err();
        assert_eq!(e.exit_code(), 2, "{e}");
    }
    assert!(list(dir.path()).is_empty());
}

#[test]
fn c053_f089_a_folder_in_use_is_refused_or_replaced_as_a_whole() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    std::fs::create_dir(&out).unwrap();
    for old in ["pytorch_model.bin", "model-00002-of-00002.safetensors", "model.safetensors.index.json"] {
        std::fs::write(out.join(old), "old").unwrap();
    }
    let before = list(&out);
    let config = ModelConfig::Llama(llama(true));
    let layers = float_layers(&llama(true), FloatType::F32);
    let aux = vec![("tokenizer.json".to_owned(), b"{}".to_vec())];
    let e = export_folder(&out, &config, layers.clone(), None, aux.clone(), false).unwrap_err();
    assert_eq!((e.exit_code(), list(&out)), (2, before.clone()));
    assert!(e.to_string().contains("--out"), "{e}");
    // A folder that holds more than a model is never replaced.
    std::fs::create_dir(out.join("photos")).unwrap();
    let e = export_folder(&out, &config, layers.clone(), None, aux.clone(), true).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("photos"), "{e}");
    std::fs::remove_dir(out.join("photos")).unwrap();
    export_folder(&out, &config, layers, None, aux, true).unwrap();
    assert_eq!(list(&out), ["config.json", "dsq-proof.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(list(dir.path()), ["m"]);
}

#[test]
fn f089_the_input_survives() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("in");
    std::fs::create_dir(&input).unwrap();
    let code = |out: &Path| check_output(&[&input], out).map_err(|e| e.exit_code());
    assert_eq!(code(&input), Err(2));
    assert_eq!(code(&input.join("sub/deeper")), Err(2));
    assert_eq!(code(dir.path()), Err(2));
    assert_eq!(code(&dir.path().join("other/../in")), Err(2));
    assert_eq!(code(&dir.path().join("out")), Ok(()));
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&input, dir.path().join("link")).unwrap();
        assert_eq!(code(&dir.path().join("link")), Err(2));
        assert_eq!(code(&dir.path().join("link/x")), Err(2));
    }
}

#[test]
fn f092_too_little_space_is_refused_before_any_work() {
    let dir = tempfile::tempdir().unwrap();
    let e = FolderWriter::create(&dir.path().join("m"), false, u64::MAX / 2).unwrap_err();
    assert!(matches!(e, CheckpointError::NoSpace { needed, free, .. } if needed > free && free > 0), "{e}");
    assert_eq!(e.exit_code(), 4);
    assert!(list(dir.path()).is_empty());
}

#[test]
fn f091_c090_a_full_disk_leaves_the_old_folder_and_no_temporary() {
    let dir = tempfile::tempdir().unwrap();
    let mount = dir.path().join("small");
    std::fs::create_dir(&mount).unwrap();
    let mounted = std::process::Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=256k", "tmpfs"])
        .arg(&mount)
        .stderr(std::process::Stdio::null())
        .status();
    if !mounted.is_ok_and(|s| s.success()) {
        eprintln!("skipped: cannot mount a tmpfs here");
        return;
    }
    let out = mount.join("m");
    let outcome = std::panic::catch_unwind(|| {
        let mut w = FolderWriter::create(&out, false, 0).unwrap();
        w.file("config.json", b"old").unwrap();
        w.commit().unwrap();
        // A writer that was promised space which is gone by the time it writes.
        let mut w = FolderWriter::create(&out, true, 0).unwrap();
        let big =
            NamedTensor { name: "x".into(), data: TensorData::I8 { shape: vec![1 << 20], data: vec![0; 1 << 20] } };
        let e = w.safetensors("model.safetensors", &[big]).unwrap_err();
        assert_eq!(e.exit_code(), 4, "{e}");
        drop(w);
        assert_eq!(list(&mount), ["m"]);
        assert_eq!(std::fs::read(out.join("config.json")).unwrap(), b"old");
        let e = write_atomic(&out.join("config.json"), &vec![0u8; 1 << 20]).unwrap_err();
        assert_eq!(e.exit_code(), 4, "{e}");
        assert_eq!(list(&out), ["config.json"]);
        assert_eq!(std::fs::read(out.join("config.json")).unwrap(), b"old");
        // And the whole export, which is told beforehand.
        let layers = float_layers(&llama(true), FloatType::F32);
        let e = export_folder(&out, &ModelConfig::Llama(llama(true)), layers, None, vec![], true).unwrap_err();
        assert!(matches!(e, CheckpointError::NoSpace { .. }), "{e}");
        assert_eq!(list(&mount), ["m"]);
    });
    let unmounted = std::process::Command::new("umount").arg(&mount).status();
    assert!(unmounted.is_ok_and(|s| s.success()));
    outcome.unwrap();
}

#[test]
fn f096_paths_that_cannot_be_written_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "mine").unwrap();
    for out in [file.clone(), file.join("inside")] {
        let e = FolderWriter::create(&out, true, 0).unwrap_err();
        assert_eq!(e.exit_code(), 4, "{e}");
        assert!(e.to_string().contains("file"), "{e}");
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"mine");
    // The parent vanishes while the folder is written.
    let out = dir.path().join("parent/m");
    let mut w = FolderWriter::create(&out, false, 0).unwrap();
    w.file("a.json", b"{}").unwrap();
    std::fs::remove_dir_all(dir.path().join("parent")).unwrap();
    assert_eq!(w.file("b.json", b"{}").unwrap_err().exit_code(), 4);
    assert_eq!(w.commit().unwrap_err().exit_code(), 4);
}

#[cfg(unix)]
#[test]
fn c039_f096_an_existing_mode_is_kept() {
    use std::os::unix::fs::PermissionsExt;
    let mode = |p: &Path| std::fs::metadata(p).unwrap().permissions().mode() & 0o777;
    let set = |p: &Path, m| std::fs::set_permissions(p, std::fs::Permissions::from_mode(m)).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m");
    let write = |overwrite| {
        let mut w = FolderWriter::create(&out, overwrite, 0).unwrap();
        w.file("config.json", b"{}").unwrap();
        w.safetensors("model.safetensors", &[]).unwrap();
        w.commit().unwrap();
    };
    write(false);
    // Whatever the umask of this process is, new files follow it like any other.
    let plain = dir.path().join("plain");
    std::fs::write(&plain, "").unwrap();
    assert_eq!(mode(&out.join("config.json")), mode(&plain));
    assert_eq!(mode(&out.join("model.safetensors")), mode(&plain));
    set(&out.join("config.json"), 0o640);
    set(&out.join("model.safetensors"), 0o604);
    set(&out, 0o750);
    write(true);
    assert_eq!(
        (mode(&out), mode(&out.join("config.json")), mode(&out.join("model.safetensors"))),
        (0o750, 0o640, 0o604)
    );
    write_atomic(&out.join("config.json"), b"{ }").unwrap();
    assert_eq!((mode(&out.join("config.json")), list(&out).len()), (0o640, 2));
}

#[test]
fn f094_a_leftover_of_a_dead_process_goes_and_that_of_a_living_one_stays() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let dead = child.id();
    child.wait().unwrap();
    let leftovers = [format!(".m.dsq-tmp-{dead}-0"), format!(".m.dsq-tmp-{}-999", std::process::id())];
    for name in &leftovers {
        std::fs::create_dir(dir.path().join(name)).unwrap();
    }
    let w = FolderWriter::create(&dir.path().join("m"), false, 0).unwrap();
    w.commit().unwrap();
    assert_eq!(list(dir.path()), [leftovers[1].as_str(), "m"]);
}

#[test]
fn names_that_are_paths_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let mut w = FolderWriter::create(&dir.path().join("m"), false, 0).unwrap();
    for name in ["", ".", "..", "a/b", "/etc/x", "../x", "a\0"] {
        assert_eq!(w.file(name, b"").unwrap_err().exit_code(), 2, "{name:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// What is written is what is read, for any dtypes, shapes and values.
    #[test]
    fn written_tensors_read_back_identical(
        shapes in proptest::collection::vec((0usize..5, proptest::collection::vec(0usize..5, 0..4)), 1..6),
        seed in any::<u64>(),
    ) {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("m");
        let config = llama(true);
        let mut layers = float_layers(&config, FloatType::F32);
        let extra: Vec<_> = shapes.iter().enumerate().map(|(i, (dtype, shape))| {
            let dtype = [Dtype::F32, Dtype::Bf16, Dtype::I64, Dtype::Bool, Dtype::F8E4m3][*dtype];
            let len = shape.iter().product::<usize>() * dtype.size();
            let bytes: Vec<u8> = (0..len as u64).map(|j| (seed.wrapping_mul(j + 1 + i as u64) >> 33) as u8).collect();
            (format!("extra.{i}"), dtype, shape.clone(), bytes)
        }).collect();
        for (name, dtype, shape, bytes) in extra.clone() {
            layers.push(ExportTensor::Copy { name, dtype, shape, bytes });
        }
        export_folder(&out, &ModelConfig::Llama(config), layers, None, vec![], false).unwrap();
        let ckpt = Checkpoint::open(&out).unwrap();
        for (name, dtype, shape, bytes) in extra {
            prop_assert_eq!(&ckpt.info(&name).unwrap().shape, &shape);
            prop_assert_eq!(ckpt.read_stored(&name).unwrap(), (dtype, bytes));
        }
    }
}
