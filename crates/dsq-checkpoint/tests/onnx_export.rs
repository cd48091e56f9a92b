//! Writing ONNX: what is in the file, read by a small walk over protobuf's wire format that shares nothing with the writer; what is
//! refused; outputs that would damage something. What onnxruntime computes is tests/conformance, the command tests/it/onnx.rs.

mod fixtures;

use dsq_checkpoint::{
    Checkpoint, CheckpointError, ExportTensor, LinearWeight, LlamaConfig, ModelConfig, OnnxExport, OnnxFile,
    OnnxOptions, Proof, ResNetConfig, Severity, export_folder,
};
use dsq_quant::{FloatType, Granularity, Mapping, QParams, QuantArgs, QuantConfig, QuantScheme, QuantType};
use fixtures::{float_layers, list, llama, quantized_layers, scheme, values};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The fields of a message: number, and a varint or bytes.
#[derive(Debug, Clone)]
enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

fn varint(bytes: &[u8], at: &mut usize) -> u64 {
    let mut value = 0;
    for shift in (0..).step_by(7) {
        let byte = bytes[*at];
        *at += 1;
        value |= u64::from(byte & 127) << shift;
        if byte < 128 {
            return value;
        }
    }
    unreachable!()
}

fn fields(bytes: &[u8]) -> Vec<(u64, Field<'_>)> {
    let (mut out, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        let key = varint(bytes, &mut at);
        let field = match key & 7 {
            0 => Field::Number(varint(bytes, &mut at)),
            2 => {
                let len = varint(bytes, &mut at) as usize;
                at += len;
                Field::Bytes(&bytes[at - len..at])
            }
            other => panic!("wire type {other}"),
        };
        out.push((key >> 3, field));
    }
    out
}

fn all<'a>(message: &'a [u8], number: u64) -> Vec<Field<'a>> {
    fields(message).into_iter().filter(|(n, _)| *n == number).map(|(_, f)| f).collect()
}

fn bytes(message: &[u8], number: u64) -> Vec<&[u8]> {
    let one = |f| match f {
        Field::Bytes(b) => b,
        Field::Number(n) => panic!("number {n}"),
    };
    all(message, number).into_iter().map(one).collect()
}

fn numbers(message: &[u8], number: u64) -> Vec<u64> {
    let one = |f| match f {
        Field::Number(n) => n,
        Field::Bytes(b) => panic!("bytes {b:?}"),
    };
    all(message, number).into_iter().map(one).collect()
}

fn text(message: &[u8], number: u64) -> String {
    bytes(message, number).first().map(|b| String::from_utf8(b.to_vec()).unwrap()).unwrap_or_default()
}

/// A tensor as it lies in the file.
#[derive(Debug, PartialEq)]
struct Tensor {
    dims: Vec<u64>,
    ty: u64,
    data: Vec<u8>,
    /// Whether it lies beside the model.
    beside: bool,
}

/// A node: operator, inputs, outputs, integer attributes.
type Node = (String, Vec<String>, Vec<String>, BTreeMap<String, Vec<u64>>);

struct Walked {
    tensors: BTreeMap<String, Tensor>,
    nodes: Vec<Node>,
    inputs: Vec<String>,
    outputs: Vec<String>,
}

fn walk(path: &Path) -> Walked {
    let model = std::fs::read(path).unwrap();
    assert_eq!(numbers(&model, 1), [10], "ir_version");
    assert_eq!(text(&model, 2), "dsq");
    let graph = bytes(&model, 7)[0];
    let strings = |m: &[u8], n: u64| -> Vec<String> {
        bytes(m, n).into_iter().map(|b| String::from_utf8(b.to_vec()).unwrap()).collect()
    };
    let tensor = |t: &[u8]| {
        let beside = numbers(t, 14) == [1];
        let data = if beside {
            let place: BTreeMap<String, String> = bytes(t, 13).into_iter().map(|e| (text(e, 1), text(e, 2))).collect();
            let number = |key: &str| place[key].parse::<usize>().unwrap();
            assert_eq!(number("offset") % 4096, 0);
            let whole = std::fs::read(path.with_file_name(&place["location"])).unwrap();
            whole[number("offset")..][..number("length")].to_vec()
        } else {
            bytes(t, 9)[0].to_vec()
        };
        (text(t, 8), Tensor { dims: numbers(t, 1), ty: numbers(t, 2)[0], data, beside })
    };
    let attribute = |a: &[u8]| (text(a, 1), if numbers(a, 20) == [7] { numbers(a, 8) } else { numbers(a, 3) });
    let node = |n: &[u8]| {
        (text(n, 4), strings(n, 1), strings(n, 2), bytes(n, 5).into_iter().map(attribute).collect::<BTreeMap<_, _>>())
    };
    Walked {
        tensors: bytes(graph, 5).into_iter().map(tensor).collect(),
        nodes: bytes(graph, 1).into_iter().map(node).collect(),
        inputs: bytes(graph, 11).into_iter().map(|i| text(i, 1)).collect(),
        outputs: bytes(graph, 12).into_iter().map(|i| text(i, 1)).collect(),
    }
}

fn export(model: &Path, out: &Path, options: OnnxOptions) -> Result<Proof, CheckpointError> {
    OnnxExport::new(&Checkpoint::open(model)?, out, options)?.write(&mut || ())
}

fn options() -> OnnxOptions {
    OnnxOptions { overwrite: true, ..OnnxOptions::default() }
}

fn folder(dir: &Path, config: &LlamaConfig, args: QuantArgs) -> PathBuf {
    let (out, q) = (dir.join("model"), scheme(args));
    let layers = quantized_layers(config, FloatType::F32, &q);
    export_folder(&out, &ModelConfig::Llama(config.clone()), layers, Some(&q), vec![], true).unwrap();
    out
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

/// What `MatMulNBits` multiplies with, in the words of its definition.
fn operator_values(w: &Walked, module: &str) -> Vec<f32> {
    let (_, inputs, _, attributes) =
        w.nodes.iter().find(|n| n.0 == "MatMulNBits" && n.1[1] == format!("{module}.qweight")).unwrap();
    let number = |name: &str| attributes[name][0] as usize;
    let (n, k, bits, block) = (number("N"), number("K"), number("bits"), number("block_size"));
    let (codes, scales) = (&w.tensors[&inputs[1]], floats(&w.tensors[&inputs[2]].data));
    let blocks = k.div_ceil(block);
    assert_eq!(codes.dims, [n as u64, blocks as u64, (block * bits / 8) as u64]);
    let zeros = inputs.get(3).map(|z| &w.tensors[z].data);
    let field = |bytes: &[u8], i: usize| match bits {
        4 => bytes[i / 2] >> (4 * (i % 2)) & 15,
        _ => bytes[i],
    };
    let mut out = Vec::new();
    for row in 0..n {
        for column in 0..k {
            let b = column / block;
            let zero = match zeros {
                Some(z) => field(&z[row * z.len() / n..], b),
                None => 1 << (bits - 1),
            };
            let code = field(&codes.data[row * codes.data.len() / n..], column);
            out.push((f32::from(code) - f32::from(zero)) * scales[row * blocks + b]);
        }
    }
    out
}

#[test]
fn every_weight_is_in_the_file_by_the_operators_own_definition() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m.onnx");
    let config = llama(false);
    for qtype in QuantType::INTS {
        for granularity in
            [Granularity::PerTensor, Granularity::PerChannel, Granularity::PerGroup(32), Granularity::PerGroup(16)]
        {
            for mapping in [Mapping::Symmetric, Mapping::Asymmetric] {
                let args = QuantArgs { qtype, mapping, ..QuantArgs::int4(granularity, FloatType::Bf16) };
                let model = folder(dir.path(), &config, args);
                let proof = export(&model, &out, options()).unwrap();
                let (ckpt, w) = (Checkpoint::open(&model).unwrap(), walk(&out));
                for spec in ckpt.config().linears() {
                    match ckpt.linear(&spec.module).unwrap() {
                        LinearWeight::Quantized(m) => assert_eq!(operator_values(&w, &spec.module), m.dequantize()),
                        LinearWeight::Ordered { .. } => panic!("columns as they come"),
                        LinearWeight::Float { data, .. } => {
                            assert_eq!(floats(&w.tensors[&format!("{}.weight", spec.module)].data), data);
                        }
                    }
                }
                // Every tensor of the source became something, once.
                let mut told: Vec<_> = proof.tensors.iter().map(|t| t.name.clone()).collect();
                told.sort();
                let mut meant: Vec<_> = ckpt
                    .names()
                    .into_iter()
                    .filter(|n| ["weight_packed", "weight"].iter().any(|p| n.ends_with(&format!(".{p}"))))
                    .map(|n| n.replace("weight_packed", "weight"))
                    .collect();
                meant.sort();
                assert_eq!(told, meant);
                let count = |became: &str| proof.tensors.iter().filter(|t| t.became == became).count();
                assert_eq!((count("transcoded"), count("copied"), proof.tensors.len()), (14, 7, 21));
                let total: u64 = proof.bytes.values().sum();
                assert_eq!(total, w.tensors.values().map(|t| t.data.len() as u64).sum::<u64>());
            }
        }
    }
    let w = walk(&out);
    assert_eq!(w.inputs[..4], ["input_ids", "attention_mask", "past_key_values.0.key", "past_key_values.0.value"]);
    assert_eq!(w.outputs[..3], ["logits", "present.0.key", "present.0.value"]);
    assert_eq!((w.inputs.len(), w.outputs.len()), (6, 5));
}

#[test]
fn large_files_keep_their_tensors_beside_them_and_nothing_else_changes() {
    let dir = tempfile::tempdir().unwrap();
    let config = llama(true);
    let model = folder(dir.path(), &config, QuantArgs::int4(Granularity::PerGroup(32), FloatType::F32));
    let (one, two) = (dir.path().join("one.onnx"), dir.path().join("two.onnx"));
    export(&model, &one, options()).unwrap();
    let proof = export(&model, &two, OnnxOptions { single_file_limit: 1 << 10, ..options() }).unwrap();
    let (a, b) = (walk(&one), walk(&two));
    assert_eq!(a.nodes, b.nodes);
    let data = |w: Walked| w.tensors.into_iter().map(|(n, t)| (n, t.dims, t.ty, t.data)).collect::<Vec<_>>();
    assert!(a.tensors.values().all(|t| !t.beside));
    assert!(b.tensors.values().all(|t| t.beside == (t.data.len() >= 1024)) && b.tensors.values().any(|t| t.beside));
    assert_eq!(data(a), data(b));
    assert_eq!(proof.files.keys().collect::<Vec<_>>(), ["two.onnx", "two.onnx.data"]);
    let names =
        ["model", "one.onnx", "one.onnx.dsq-proof.json", "two.onnx", "two.onnx.data", "two.onnx.dsq-proof.json"];
    assert_eq!(list(dir.path()), names);
    assert!(OnnxFile::open(&two).unwrap().faults().is_empty());
    // Over itself the new data have another name, so that the old model has its own until the last step; and back.
    for data in ["two.onnx.data2", "two.onnx.data"] {
        export(&model, &two, OnnxOptions { single_file_limit: 1 << 10, ..options() }).unwrap();
        assert!(OnnxFile::open(&two).unwrap().faults().is_empty());
        assert!(dir.path().join(data).exists() && list(dir.path()).len() == 6, "{:?}", list(dir.path()));
    }
    // A model that holds its tensors leaves none beside it.
    export(&model, &two, options()).unwrap();
    assert_eq!(list(dir.path()).len(), 5);
    export(&model, &two, OnnxOptions { single_file_limit: 1 << 10, ..options() }).unwrap();
    // The data of a model that is gone.
    std::fs::remove_file(&two).unwrap();
    let kept = OnnxOptions { overwrite: false, single_file_limit: 1 << 10, dtype: None };
    let e = export(&model, &two, kept).unwrap_err();
    assert!(e.exit_code() == 2 && e.to_string().contains("two.onnx.data"), "{e}");
    assert_eq!(list(dir.path()).len(), 5);
}

#[test]
fn a_changed_bit_is_found_by_inspect() {
    let dir = tempfile::tempdir().unwrap();
    let model = folder(dir.path(), &llama(true), QuantArgs::int4(Granularity::PerGroup(32), FloatType::F32));
    let out = dir.path().join("m.onnx");
    export(&model, &out, OnnxOptions { single_file_limit: 0, ..options() }).unwrap();
    let file = OnnxFile::open(&out).unwrap();
    assert!(file.faults().is_empty() && file.describe().contains("14 MatMulNBits"), "{}", file.describe());
    let rows = file.tensors().unwrap();
    let codes = rows.iter().find(|r| r.name == "model.layers.0.mlp.down_proj.qweight").unwrap();
    assert_eq!((codes.dtype.as_str(), &codes.shape[..], codes.bytes), ("UINT8", &[64, 3, 16][..], 3072));
    let data = dir.path().join("m.onnx.data");
    let whole = std::fs::read(&data).unwrap();
    // The first byte of its codes: pages of others lie before them.
    let stored = walk(&out).tensors.remove("model.layers.0.mlp.down_proj.qweight").unwrap().data;
    let at = whole.chunks(4096).position(|page| page.starts_with(&stored[..64])).unwrap() * 4096;
    let mut changed = whole.clone();
    changed[at] ^= 1;
    std::fs::write(&data, &changed).unwrap();
    let faults = OnnxFile::open(&out).unwrap().faults();
    assert!(faults.len() == 2 && faults[0].severity == Severity::Error, "{faults:?}");
    assert!(faults[0].problem.contains("SHA-256") && faults[1].problem == "changed since the export", "{faults:?}");
    std::fs::write(&data, &whole[..100]).unwrap();
    assert!(OnnxFile::open(&out).unwrap().tensors().is_err());
    std::fs::write(&data, &whole).unwrap();
    let model_bytes = std::fs::read(&out).unwrap();
    // Any changed byte of the model is seen, or no model any more; never a panic.
    for at in (0..model_bytes.len()).step_by(7) {
        let mut changed = model_bytes.clone();
        changed[at] ^= 1 << (at % 8);
        std::fs::write(&out, &changed).unwrap();
        let seen = OnnxFile::open(&out).map(|f| (f.faults().len(), f.tensors().is_ok()));
        assert!(seen.as_ref().is_ok_and(|(n, _)| *n > 0) || seen.is_err(), "byte {at}: {seen:?}");
    }
    std::fs::write(&out, b"GGUF").unwrap();
    assert_eq!(OnnxFile::open(&out).unwrap_err().exit_code(), 3);
}

#[test]
fn what_has_no_operator_is_refused_by_name_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("m.onnx");
    for (args, words) in [
        (QuantArgs::int4(Granularity::PerGroup(8), FloatType::F32), &["q_proj", "blocks of 16", "got 8"][..]),
        (QuantArgs::fp8(Granularity::PerChannel, FloatType::F32), &["q_proj", "FP8 E4M3"]),
        (QuantArgs::nvfp4(), &["q_proj", "FP4 E2M1"]),
        (QuantArgs::mxfp4(), &["q_proj", "FP4 E2M1"]),
    ] {
        let model = folder(dir.path(), &llama(true), args);
        let e = export(&model, &out, options()).unwrap_err();
        assert!(e.exit_code() == 2 && words.iter().all(|w| e.to_string().contains(w)), "{e}");
        assert!(e.hint().unwrap().contains("--format safetensors"));
        assert_eq!(list(dir.path()), ["model"]);
    }
    let model = folder(dir.path(), &llama(true), QuantArgs::int4(Granularity::PerGroup(32), FloatType::F32));
    // A file that is no ONNX file of dsq's.
    std::fs::write(&out, b"something else").unwrap();
    let e = export(&model, &out, options()).unwrap_err();
    assert!(e.exit_code() == 2 && std::fs::read(&out).unwrap() == b"something else", "{e}");
    std::fs::remove_file(&out).unwrap();
    export(&model, &out, OnnxOptions::default()).unwrap();
    let before = std::fs::read(&out).unwrap();
    assert_eq!(export(&model, &out, OnnxOptions::default()).unwrap_err().exit_code(), 2);
    export(&model, &out, options()).unwrap();
    assert_eq!(std::fs::read(&out).unwrap(), before);
    // The output is the input.
    assert_eq!(export(&model, &model.join("m.onnx"), options()).unwrap_err().exit_code(), 2);
}

#[test]
fn floats_keep_their_type_or_get_the_one_that_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model"), dir.path().join("m.onnx"));
    let config = llama(true);
    let layers = || float_layers(&config, FloatType::Bf16);
    export_folder(&model, &ModelConfig::Llama(config.clone()), layers(), None, vec![], false).unwrap();
    let ckpt = Checkpoint::open(&model).unwrap();
    let q = "model.layers.0.self_attn.q_proj.weight";
    for (dtype, ty) in [(None, 16), (Some(FloatType::F32), 1), (Some(FloatType::F16), 10)] {
        let proof = export(&model, &out, OnnxOptions { dtype, ..options() }).unwrap();
        let w = walk(&out);
        assert_eq!(w.tensors[q].ty, ty);
        // Lists are always f32.
        let norm = &w.tensors["model.norm.weight"];
        assert_eq!((norm.ty, floats(&norm.data)), (1, ckpt.read_f32("model.norm.weight").unwrap()));
        let record = proof.tensors.iter().find(|t| t.name == q).unwrap();
        assert_eq!(record.became, if dtype.is_none() { "copied" } else { "converted" });
        let casts = w.nodes.iter().filter(|n| n.0 == "Cast" && n.1[0].ends_with("proj.weight")).count();
        assert_eq!(casts, if ty == 1 { 0 } else { 14 });
    }
    // A value that f16 does not hold.
    let mut layers = layers();
    if let ExportTensor::Float { data, .. } = &mut layers[0] {
        data[3] = 1e6;
    }
    export_folder(&model, &ModelConfig::Llama(config.clone()), layers, None, vec![], true).unwrap();
    let before = std::fs::read(&out).unwrap();
    let e = export(&model, &out, OnnxOptions { dtype: Some(FloatType::F16), ..options() }).unwrap_err();
    assert!(e.exit_code() == 6 && e.to_string().contains("model.embed_tokens.weight"), "{e}");
    assert!(std::fs::read(&out).unwrap() == before && list(dir.path()).len() == 3);
}

#[test]
fn an_image_model_keeps_its_codes_and_its_grids() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model"), dir.path().join("m.onnx"));
    let config = ModelConfig::ResNet(ResNetConfig {
        in_channels: 1,
        image_size: 8,
        channels: vec![4, 6],
        blocks_per_stage: 1,
        num_classes: 3,
        norm_eps: 1e-5,
        mean: vec![0.5],
        std: vec![0.25],
    });
    let weights = QuantArgs::int4(Granularity::PerChannel, FloatType::F32);
    let inputs = QuantArgs {
        qtype: QuantType::Int8,
        mapping: Mapping::Asymmetric,
        ..QuantArgs::int4(Granularity::PerTensor, FloatType::F32)
    };
    let ignore = ["re:^conv1$".to_owned()];
    let q = QuantConfig::new(QuantScheme { weights, activations: Some(inputs) }, &ignore).unwrap();
    let mut layers = Vec::new();
    for (i, spec) in config.linears().into_iter().enumerate() {
        let (data, bias) = (values(spec.n() * spec.k(), i as u64), values(spec.n(), 90 + i as u64));
        let (name, shape) = (format!("{}.bias", spec.module), vec![spec.n()]);
        layers.push(ExportTensor::Float { name, shape, data: bias, dtype: FloatType::F32 });
        if spec.module == "conv1" {
            let (name, shape) = ("conv1.weight".into(), spec.shape);
            layers.push(ExportTensor::Float { name, shape, data, dtype: FloatType::F32 });
            continue;
        }
        let matrix = dsq_quant::QuantizedMatrix::quantize(&data, spec.n(), spec.k(), weights).unwrap();
        let activation = Some((inputs, QParams { scale: 0.01 + i as f32 * 0.001, zero: -100 + i as i32 }));
        layers.push(ExportTensor::Linear {
            module: spec.module,
            shape: spec.shape,
            matrix,
            activation,
            source: None,
            order: None,
        });
    }
    export_folder(&model, &config, layers, Some(&q), vec![], false).unwrap();
    let proof = export(&model, &out, options()).unwrap();
    let (ckpt, w) = (Checkpoint::open(&model).unwrap(), walk(&out));
    let mut quantized = 0;
    for spec in config.linears() {
        let Ok(LinearWeight::Quantized(m)) = ckpt.linear(&spec.module) else { continue };
        quantized += 1;
        let codes = &w.tensors[&format!("{}.weight_quantized", spec.module)];
        let shape: Vec<u64> = spec.shape.iter().map(|&d| d as u64).collect();
        assert_eq!((codes.ty, &codes.dims), (22, &shape));
        let nibble = |i: usize| ((codes.data[i / 2] >> (4 * (i % 2)) << 4) as i8) >> 4;
        assert!(m.codes.iter().enumerate().all(|(i, &q)| nibble(i) == q));
        assert_eq!(floats(&w.tensors[&format!("{}.weight_scale", spec.module)].data), m.scales);
        let (_, p) = ckpt.activation(&spec.module).unwrap().unwrap();
        let zero = &w.tensors[&format!("{}.input_zero_point", spec.module)];
        assert_eq!((zero.ty, zero.data[0] as i8), (3, p.zero as i8));
        assert_eq!(floats(&w.tensors[&format!("{}.input_scale", spec.module)].data), [p.scale]);
    }
    let count = |op: &str| w.nodes.iter().filter(|n| n.0 == op).count();
    assert_eq!((quantized, count("QuantizeLinear"), count("Conv"), count("Gemm")), (6, 6, 6, 1));
    assert_eq!(count("DequantizeLinear"), 12);
    let strides: Vec<_> = w.nodes.iter().filter(|n| n.0 == "Conv").map(|n| n.3["strides"][0]).collect();
    assert_eq!(strides, [1, 1, 1, 2, 1, 2]);
    assert_eq!((w.inputs, w.outputs), (vec!["pixel_values".to_owned()], vec!["logits".to_owned()]));
    assert!(proof.tensors.iter().all(|t| t.became != "dropped"), "{:?}", proof.tensors);
}

#[test]
fn the_past_and_windows_are_in_the_graph() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model"), dir.path().join("m.onnx"));
    let config = LlamaConfig { model_type: "mistral".into(), windows: vec![Some(8); 2], ..llama(true) };
    let layers = float_layers(&config, FloatType::F32);
    export_folder(&model, &ModelConfig::Llama(config.clone()), layers, None, vec![], false).unwrap();
    export(&model, &out, options()).unwrap();
    let w = walk(&out);
    let masks = w.nodes.iter().filter(|n| n.0 == "Where").map(|n| n.1[0].as_str()).collect::<Vec<_>>();
    assert_eq!(masks, ["window.8"; 2]);
    // The table of the whole context, as the runtime has it.
    let [cos, sin] = config.rotary().table(config.max_position_embeddings);
    for (name, table) in [("rotary.cos", cos), ("rotary.sin", sin)] {
        assert_eq!(w.tensors[name].dims, [128, 8]);
        assert_eq!(floats(&w.tensors[name].data), table);
    }
}
