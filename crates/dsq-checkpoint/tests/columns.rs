//! GPTQ and AWQ folders: what is written is read back, the peers' own words mean here what they mean there (see
//! `tests/golden/columns`), and damaged folders are refused by name.

mod fixtures;

use dsq_checkpoint::{
    Checkpoint, CheckpointError, ExportTensor, FolderFormat, LinearWeight, ModelConfig, NamedTensor, SafetensorsFile,
    Severity, TensorData, convert_layers, export_folder_as, write_safetensors,
};
use dsq_quant::{FloatType, Granularity, Mapping, QuantArgs, QuantType, QuantizedMatrix};
use fixtures::folder::check;
use fixtures::{llama, quantized_layers, scheme};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

const MODULE: &str = "model.layers.0.self_attn.k_proj";

fn args(qtype: QuantType, mapping: Mapping, group_size: i64) -> QuantArgs {
    let granularity =
        if group_size == -1 { Granularity::PerChannel } else { Granularity::PerGroup(group_size as usize) };
    QuantArgs { qtype, mapping, ..QuantArgs::int4(granularity, FloatType::F16) }
}

fn layers(args: QuantArgs) -> Vec<ExportTensor> {
    quantized_layers(&llama(true), FloatType::F16, &scheme(args))
}

fn matrix_of(layers: &[ExportTensor], module: &str) -> QuantizedMatrix {
    let of = |l: &ExportTensor| match l {
        ExportTensor::Linear { module: m, matrix, .. } if m == module => Some(matrix.clone()),
        _ => None,
    };
    layers.iter().find_map(of).unwrap()
}

/// A folder of [`llama`], and the tensors and settings that tests change in it.
struct Folder {
    _temp: tempfile::TempDir,
    dir: PathBuf,
}

impl Folder {
    fn new(format: FolderFormat, args: QuantArgs) -> Self {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("m");
        let mut layers = layers(args);
        let loss = convert_layers(format, &dir, &mut layers).unwrap();
        assert_eq!((loss.tensors, loss.max_abs_error), (0, 0.0));
        // AWQ layers whose zero points are all 0 become symmetric.
        let args = matrix_of(&layers, MODULE).args;
        export_folder_as(format, &dir, &ModelConfig::Llama(llama(true)), layers, Some(&scheme(args)), vec![], false)
            .unwrap();
        Self { _temp: temp, dir }
    }

    fn open(&self) -> Result<Checkpoint, CheckpointError> {
        Checkpoint::open(&self.dir)
    }

    fn tensors(&self, change: impl FnOnce(&mut Vec<NamedTensor>)) -> &Self {
        let path = self.dir.join("model.safetensors");
        let mut tensors = tensors_of(&path);
        change(&mut tensors);
        write_safetensors(&path, &tensors).unwrap();
        self
    }

    /// Changes the words of one tensor.
    fn words(&self, suffix: &str, change: impl FnOnce(&mut Vec<i32>)) -> &Self {
        self.tensors(|all| {
            let tensor = all.iter_mut().find(|t| t.name == format!("{MODULE}.{suffix}")).unwrap();
            let TensorData::Raw { shape, bytes, .. } = &tensor.data else { panic!("raw") };
            let mut data = bytes.as_chunks::<4>().0.iter().map(|&b| i32::from_le_bytes(b)).collect();
            change(&mut data);
            tensor.data = TensorData::I32 { shape: shape.clone(), data };
        })
    }

    /// Changes the settings in `config.json`, and in `quantize_config.json` too.
    fn settings(&self, change: impl Fn(&mut Value)) -> &Self {
        for (file, key) in [("config.json", Some("quantization_config")), ("quantize_config.json", None)] {
            let path = self.dir.join(file);
            let Ok(text) = std::fs::read(&path) else { continue };
            let mut value: Value = serde_json::from_slice(&text).unwrap();
            match key {
                Some(key) => change(&mut value[key]),
                None => change(&mut value),
            }
            std::fs::write(&path, value.to_string()).unwrap();
        }
        self
    }

    fn refused(&self, words: &[&str]) {
        check(self.open(), words);
    }
}

fn tensors_of(path: &Path) -> Vec<NamedTensor> {
    let file = SafetensorsFile::open(path).unwrap();
    file.names()
        .map(|name| {
            let (dtype, bytes) = file.read_stored(name).unwrap();
            let shape = file.info(name).unwrap().shape;
            NamedTensor { name: name.into(), data: TensorData::Raw { shape, bytes, dtype } }
        })
        .collect()
}

fn set(key: &'static str, to: Value) -> impl Fn(&mut Value) {
    move |v| v[key] = to.clone()
}

fn gptq() -> Folder {
    Folder::new(FolderFormat::GptqV1, args(QuantType::Int4, Mapping::Symmetric, 32))
}

fn awq() -> Folder {
    Folder::new(FolderFormat::Awq, args(QuantType::Int4, Mapping::Asymmetric, 32))
}

#[test]
fn folders_of_every_kind_are_read_back() {
    use FolderFormat::{Awq, GptqV1, GptqV2};
    for format in [GptqV1, GptqV2, Awq] {
        for qtype in QuantType::INTS {
            for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                for group in [32, -1] {
                    if format == Awq && qtype != QuantType::Int4 {
                        continue;
                    }
                    let args = args(qtype, mapping, group);
                    let mut want = layers(args);
                    let temp = tempfile::tempdir().unwrap();
                    let dir = temp.path().join("m");
                    match convert_layers(format, &dir, &mut want) {
                        Ok(loss) => assert_eq!(loss.tensors, 0),
                        // Zero points of 0 occur in these weights.
                        Err(e) => {
                            assert!(format == GptqV1 && mapping == Mapping::Asymmetric, "{e}");
                            assert!(e.to_string().contains("borrow") && e.hint().unwrap().contains("v2"), "{e}");
                            continue;
                        }
                    }
                    let config = ModelConfig::Llama(llama(true));
                    export_folder_as(format, &dir, &config, want.clone(), Some(&scheme(args)), vec![], false).unwrap();
                    let ckpt = Checkpoint::open(&dir).unwrap();
                    assert!(ckpt.faults().is_empty(), "{:?}", ckpt.faults());
                    for spec in config.linears() {
                        let matrix = matrix_of(&want, &spec.module);
                        assert_eq!(
                            ckpt.linear(&spec.module).unwrap(),
                            LinearWeight::Quantized(matrix),
                            "{format:?} {args:?}"
                        );
                    }
                    assert_eq!(dir.join("quantize_config.json").exists(), format != Awq);
                }
            }
        }
    }
}

/// The words that GPTQModel and AutoAWQ pack are those that are written here, and mean the same when they are read.
#[test]
fn peers_words_are_read_and_written() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/columns");
    let file = SafetensorsFile::open(&golden.join("layers.safetensors")).unwrap();
    let about: Value = serde_json::from_slice(&std::fs::read(golden.join("layers.json")).unwrap()).unwrap();
    let cases = about["cases"].as_array().unwrap();
    assert!(cases.len() >= 20, "{}", cases.len());
    let (n, k) = (32, 64);
    assert_eq!(about["shape"], json!([n, k]));
    for case in cases {
        let name = case["name"].as_str().unwrap();
        let (group, bits) = (case["group_size"].as_i64().unwrap(), case["bits"].as_u64().unwrap() as usize);
        let format =
            [FolderFormat::Awq, FolderFormat::GptqV1, FolderFormat::GptqV2][case["version"].as_u64().unwrap() as usize];
        let qtype = QuantType::INTS.into_iter().find(|q| q.bits() == bits).unwrap();
        let mapping = if case["sym"] == true { Mapping::Symmetric } else { Mapping::Asymmetric };
        let bytes = |part: &str| file.read_stored(&format!("{name}.{part}")).unwrap().1;
        let codes: Vec<i8> = bytes("codes").into_iter().map(|b| b as i8).collect();
        let zeros: Vec<i8> = bytes("zeros").into_iter().map(|b| b as i8).collect();
        let groups = if group == -1 { 1 } else { k / group as usize };
        let stored = file.read_f32(&format!("{name}.scales")).unwrap();
        let scales: Vec<f32> = (0..n * groups).map(|i| stored[i % groups * n + i / groups]).collect();
        let order: Vec<usize> = match format {
            FolderFormat::Awq => (0..k).map(|i| i / (k / groups)).collect(),
            _ => bytes("g_idx").as_chunks::<4>().0.iter().map(|&b| i32::from_le_bytes(b) as usize).collect(),
        };
        // The other layers have other codes; a zero point of 0 in them must not stop version 1.
        let others = args(qtype, Mapping::Symmetric, group);
        let folder = Folder::new(format, others);
        let mut written = false;
        folder.tensors(|all| {
            for t in all.iter_mut().filter(|t| t.name.starts_with(MODULE)) {
                let part = t.name.rsplit('.').next().unwrap();
                let (dtype, bytes) = file.read_stored(&format!("{name}.{part}")).unwrap();
                let TensorData::Raw { shape, dtype: d, .. } = &t.data else { panic!("raw") };
                assert_eq!(
                    (*shape == file.info(&format!("{name}.{part}")).unwrap().shape, *d),
                    (true, dtype),
                    "{name} {part}"
                );
                t.data = TensorData::Raw { shape: shape.clone(), bytes, dtype };
                written = true;
            }
        });
        assert!(written);
        folder.settings(set("sym", json!(case["sym"] == true))).settings(set("desc_act", case["order"].clone()));
        let ckpt = folder.open().unwrap();
        let value = |i: usize| {
            let g = i / k * groups + order[i % k];
            (f32::from(codes[i]) - f32::from(zeros[g])) * scales[g]
        };
        let want: Vec<f32> = (0..n * k).map(value).collect();
        let read = ckpt.linear(MODULE).unwrap();
        assert!(read.clone().into_f32() == want, "{name}");
        let (matrix, order) = match read {
            LinearWeight::Quantized(matrix) => (matrix, None),
            LinearWeight::Ordered { matrix, order } => (matrix, Some(order)),
            LinearWeight::Float { .. } => panic!("codes"),
        };
        assert_eq!(order.is_some(), case["order"] == true, "{name}");
        let by_input = order.as_ref().map_or_else(|| matrix.codes.clone(), |o| o.scatter(&matrix.codes));
        assert_eq!(by_input, codes, "{name}");
        let noted =
            ckpt.faults().iter().any(|f| f.severity == Severity::Note && f.problem.contains("activation order"));
        assert_eq!(noted, order.is_some(), "{name}");
        // Written: the same words.
        let mut layers = layers(others);
        for layer in &mut layers {
            if let ExportTensor::Linear { module, matrix: m, order: o, .. } = layer
                && module == MODULE
            {
                (*m, *o) = (matrix.clone(), order.clone());
            }
        }
        let again = folder.dir.with_file_name("again");
        convert_layers(format, &again, &mut layers).unwrap();
        let mut q = scheme(matrix_of(&layers, "model.layers.0.self_attn.q_proj").args);
        if mapping == Mapping::Asymmetric {
            let scheme = dsq_quant::QuantScheme { weights: matrix_of(&layers, MODULE).args, activations: None };
            q.overrides.push((dsq_quant::Pattern::new(MODULE).unwrap(), scheme));
        }
        let config = ModelConfig::Llama(llama(true));
        export_folder_as(format, &again, &config, layers, Some(&q), vec![], false).unwrap();
        let ours = SafetensorsFile::open(&again.join("model.safetensors")).unwrap();
        for part in ["qweight", "qzeros", "scales", "g_idx"] {
            if part != "g_idx" || format != FolderFormat::Awq {
                let ours = ours.read_stored(&format!("{MODULE}.{part}")).unwrap();
                assert!(ours == file.read_stored(&format!("{name}.{part}")).unwrap(), "{name}: {part}");
            }
        }
        assert_eq!(mapping == Mapping::Asymmetric, matrix.args.mapping == Mapping::Asymmetric);
    }
}

#[test]
fn c016_the_other_versions_words_are_refused() {
    for (format, said, other) in
        [(FolderFormat::GptqV1, "gptq_v2", "GPTQ v1"), (FolderFormat::GptqV2, "gptq", "GPTQ v2")]
    {
        let folder = Folder::new(format, args(QuantType::Int4, Mapping::Symmetric, 32));
        folder.settings(set("checkpoint_format", json!(said)));
        folder.refused(&["qzeros", "expected 8", &format!("these words are of {other}")]);
    }
    // A zero point that no version explains.
    let folder = gptq();
    folder.words("qzeros", |w| w[0] ^= 3);
    folder.refused(&["qzeros", "expected 8 everywhere, got 5 (group 0, output 0"]);
    // A stored 15 of version 1 is 0, and worth a word: other tools carry into the neighbour.
    let folder = gptq();
    folder.settings(set("sym", json!(false))).words("qzeros", |w| w[0] |= 15);
    let ckpt = folder.open().unwrap();
    let LinearWeight::Quantized(m) = ckpt.linear(MODULE).unwrap() else { panic!("codes") };
    assert_eq!((m.zeros[0], m.zeros[2]), (-8, 0));
    assert!(ckpt.faults().iter().any(|f| f.severity == Severity::Warning && f.problem.contains("1 zero points")));
}

#[test]
fn damaged_gptq_folders_are_refused() {
    let damaged = |words: &[&str], change: &dyn for<'a> Fn(&'a Folder) -> &'a Folder| {
        let folder = gptq();
        change(&folder);
        folder.refused(words);
    };
    damaged(&["bits", "expected 2, 3, 4 or 8, got 5"], &|f| f.settings(set("bits", json!(5))));
    damaged(&["qweight", "the shape of 4 bits, where the config says 8"], &|f| f.settings(set("bits", json!(8))));
    damaged(&["group_size", "got 0"], &|f| f.settings(set("group_size", json!(0))));
    damaged(&["q_proj", "48", "divide"], &|f| f.settings(set("group_size", json!(48))));
    damaged(&["qzeros", "expected shape [4, 8], got [2, 8]"], &|f| f.settings(set("group_size", json!(16))));
    damaged(&["checkpoint_format", "\"marlin\""], &|f| f.settings(set("checkpoint_format", json!("marlin"))));
    damaged(&["pack_dtype", "int64"], &|f| f.settings(set("pack_dtype", json!("int64"))));
    damaged(&["dynamic", "one scheme for all"], &|f| f.settings(set("dynamic", json!({"+:.*": {"bits": 8}}))));
    damaged(&["rotation", "hadamard"], &|f| f.settings(set("rotation", json!("hadamard"))));
    damaged(&["lm_head.qweight", "expected"], &|f| {
        f.settings(set("lm_head", json!(true)));
        // A tied head is no module of its own; an untied one must be there.
        let path = f.dir.join("config.json");
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, text.replace("\"tie_word_embeddings\":true", "\"tie_word_embeddings\":false")).unwrap();
        f
    });
    damaged(&["g_idx", "got nothing"], &|f| {
        f.settings(set("desc_act", json!(true))).tensors(|all| all.retain(|t| t.name != format!("{MODULE}.g_idx")))
    });
    damaged(&["g_idx", "input 3: expected a group from 0 to 1, got -1"], &|f| f.words("g_idx", |w| w[3] = -1));
    damaged(&["g_idx", "group 0: expected 32 inputs, got 33"], &|f| f.words("g_idx", |w| w[40] = 0));
    damaged(&["g_idx", "desc_act is false"], &|f| f.words("g_idx", |w| w.swap(3, 40)));
    damaged(&["scales", "expected this tensor"], &|f| {
        f.tensors(|all| all.retain(|t| t.name != format!("{MODULE}.scales")))
    });
    damaged(&["float weight beside a packed one"], &|f| {
        f.tensors(|all| {
            let data = TensorData::Float { shape: vec![32, 64], data: vec![0.0; 2048], dtype: FloatType::F16 };
            all.push(NamedTensor { name: format!("{MODULE}.weight"), data });
        })
    });
    damaged(&["bias", "no bias here"], &|f| {
        f.tensors(|all| {
            let data = TensorData::Float { shape: vec![32], data: vec![0.5; 32], dtype: FloatType::F16 };
            all.push(NamedTensor { name: format!("{MODULE}.bias"), data });
        })
    });
    // The two settings files.
    let folder = gptq();
    let path = folder.dir.join("quantize_config.json");
    let text = std::fs::read_to_string(&path).unwrap();
    for (key, from, to) in [
        ("bits", "\"bits\": 4", "\"bits\": 8"),
        ("desc_act", "\"desc_act\": false", "\"desc_act\": true"),
        ("checkpoint_format", "\"checkpoint_format\": \"gptq\"", "\"checkpoint_format\": \"gptq_v2\""),
    ] {
        assert!(text.contains(from), "{text}");
        std::fs::write(&path, text.replace(from, to)).unwrap();
        folder.refused(&["quantize_config.json", key, "differs from quantization_config in config.json"]);
    }
    // Either alone is enough.
    std::fs::write(&path, &text).unwrap();
    let config = folder.dir.join("config.json");
    let mut value: Value = serde_json::from_slice(&std::fs::read(&config).unwrap()).unwrap();
    value.as_object_mut().unwrap().remove("quantization_config");
    std::fs::write(&config, value.to_string()).unwrap();
    assert!(matches!(folder.open().unwrap().linear(MODULE).unwrap(), LinearWeight::Quantized(_)));
}

#[test]
fn damaged_awq_folders_are_refused() {
    let damaged = |words: &[&str], change: &dyn for<'a> Fn(&'a Folder) -> &'a Folder| {
        let folder = awq();
        change(&folder);
        folder.refused(words);
    };
    damaged(&["version", "expected \"gemm\", got \"gemv\""], &|f| f.settings(set("version", json!("gemv"))));
    damaged(&["bits", "expected 4 for AWQ, got 8"], &|f| f.settings(set("bits", json!(8))));
    damaged(&["zero_point", "true"], &|f| f.settings(set("zero_point", json!(false))));
    damaged(&["backend", "llm-awq"], &|f| f.settings(set("backend", json!("llm-awq"))));
    damaged(&["group_size", "got 0"], &|f| f.settings(set("group_size", json!(0))));
    damaged(&["q_proj", "48", "divide"], &|f| f.settings(set("group_size", json!(48))));
    damaged(&["qzeros", "expected shape [1, 8], got [2, 8]"], &|f| f.settings(set("group_size", json!(-1))));
    damaged(&["weight", "codes of a module that quantization_config does not name"], &|f| {
        f.settings(set("modules_to_not_convert", json!(["k_proj"])))
    });
    damaged(&["quant_method", "\"awq\" or \"fp8\""], &|f| f.settings(set("quant_method", json!("hqq"))));
    damaged(&["qzeros", "expected this tensor"], &|f| {
        f.tensors(|all| all.retain(|t| t.name != format!("{MODULE}.qzeros")))
    });
    damaged(&["g_idx", "have no such tensor"], &|f| {
        f.tensors(|all| {
            all.push(NamedTensor {
                name: format!("{MODULE}.g_idx"),
                data: TensorData::I32 { shape: vec![64], data: vec![0; 64] },
            });
        })
    });
    // A scale that is no number is found when the layer is read, and told by the lint.
    let folder = awq();
    folder.tensors(|all| {
        let t = all.iter_mut().find(|t| t.name == format!("{MODULE}.scales")).unwrap();
        let TensorData::Raw { bytes, .. } = &mut t.data else { panic!("raw") };
        bytes[..2].copy_from_slice(&0x7e00u16.to_le_bytes());
    });
    let ckpt = folder.open().unwrap();
    assert_eq!(ckpt.linear(MODULE).unwrap_err().exit_code(), 3);
    assert!(ckpt.faults().iter().any(|f| f.severity == Severity::Error && f.problem.contains("scale")));
}

#[test]
fn a_scale_of_zero_and_a_bias_of_zeros_mean_nothing() {
    for folder in [gptq(), awq()] {
        let before = folder.open().unwrap().linear(MODULE).unwrap().into_f32();
        folder.tensors(|all| {
            let t = all.iter_mut().find(|t| t.name == format!("{MODULE}.scales")).unwrap();
            let TensorData::Raw { bytes, .. } = &mut t.data else { panic!("raw") };
            bytes[..2].fill(0);
            let data = TensorData::Float { shape: vec![32], data: vec![0.0; 32], dtype: FloatType::F16 };
            all.push(NamedTensor { name: format!("{MODULE}.bias"), data });
        });
        let ckpt = folder.open().unwrap();
        let after = ckpt.linear(MODULE).unwrap().into_f32();
        assert!(after[..32].iter().all(|&x| x == 0.0) && after[32..] == before[32..]);
        assert!(ckpt.has_empty_bias(MODULE) && !ckpt.has_empty_bias("model.layers.0.self_attn.q_proj"));
        // The proof tells of the changed scales and of the tensor more, and nothing else is wrong.
        let faults = ckpt.faults();
        let told = ["scales", "bias"].map(|part| format!("{MODULE}.{part}"));
        assert!(faults.len() == 2 && faults.iter().all(|f| told.contains(&f.field)), "{faults:?}");
    }
}

#[test]
fn what_the_formats_do_not_hold_is_refused_by_name() {
    let refuse = |format, layers: &mut Vec<ExportTensor>, words: &[&str]| {
        let e = convert_layers(format, Path::new("m"), layers).unwrap_err();
        assert_eq!(e.exit_code(), 2, "{e}");
        words.iter().for_each(|w| assert!(e.to_string().contains(w), "{e} lacks {w}"));
    };
    let group = Granularity::PerGroup(32);
    refuse(FolderFormat::Awq, &mut layers(args(QuantType::Int8, Mapping::Symmetric, 32)), &["no INT8 weights", "INT4"]);
    let fp8 = QuantArgs::fp8(Granularity::PerChannel, FloatType::F32);
    refuse(FolderFormat::GptqV2, &mut layers(fp8), &["no FP8 E4M3 weights"]);
    let int4 = QuantArgs::int4(group, FloatType::F16);
    let linear = |n: usize, k: usize, module: &str, args| {
        let matrix = QuantizedMatrix::quantize(&vec![0.5; n * k], n, k, args).unwrap();
        ExportTensor::Linear {
            module: module.into(),
            shape: vec![n, k],
            matrix,
            activation: None,
            source: None,
            order: None,
        }
    };
    refuse(FolderFormat::GptqV1, &mut vec![linear(40, 64, "a", int4)], &["a: ", "multiples of 32, got 40 and 64"]);
    refuse(FolderFormat::Awq, &mut vec![linear(36, 64, "a", int4)], &["multiples of 8, got 36 and 64"]);
    let channel = QuantArgs { granularity: Granularity::PerChannel, ..int4 };
    let mut mixed = vec![linear(32, 64, "a", int4), linear(32, 64, "b", channel)];
    refuse(FolderFormat::GptqV2, &mut mixed, &["b: ", "one scheme for all", "that of a"]);
    refuse(FolderFormat::Awq, &mut vec![linear(32, 64, "lm_head", int4)], &["no quantized output matrix"]);
    // A scale for the tensor is one for each output.
    let tensor = QuantArgs { granularity: Granularity::PerTensor, mapping: Mapping::Asymmetric, ..int4 };
    let mut all = vec![linear(32, 64, "a", tensor)];
    let before = matrix_of(&all, "a").dequantize();
    assert_eq!(convert_layers(FolderFormat::GptqV2, Path::new("m"), &mut all).unwrap().tensors, 0);
    let after = matrix_of(&all, "a");
    assert!(after.args.granularity == Granularity::PerChannel && after.dequantize() == before);
    // A scale that f16 does not hold is told with the size of the change.
    let f32s = QuantArgs { scale_dtype: FloatType::F32, ..int4 };
    let mut all = layers(f32s);
    let loss = convert_layers(FolderFormat::GptqV1, Path::new("m"), &mut all).unwrap();
    assert!(loss.tensors == 14 && loss.max_abs_error > 0.0 && loss.relative_error < 1e-3, "{loss}");
}
