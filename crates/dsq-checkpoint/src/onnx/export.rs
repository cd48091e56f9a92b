//! Writing an ONNX file from any model that can be opened: the graph first, then its tensors one by one, then the proof. Not the
//! graph (see `llama.rs`, `cnn.rs`) and not the layout of weights (see `weights.rs`).

use super::graph::{Graph, Make};
use super::proof::{Read, account, prove};
use super::proto::{GraphProto, IR_VERSION, MICROSOFT, ModelProto, OPSET, OperatorSetIdProto, TensorProto, entry};
use super::source::Source;
use super::{cnn, llama};
use crate::export::{Proof, TensorProof};
use crate::gguf::{check_proof_place, proof_path};
use crate::write::{FileWriter, check_output};
use crate::{Checkpoint, CheckpointError, ModelConfig};
use dsq_quant::FloatType;
use prost::Message;
use std::path::{Path, PathBuf};

/// What an ONNX file of dsq begins with: the IR version, and `dsq` as the producer. No other file is replaced.
const MAGIC: &[u8] = &[0x08, IR_VERSION as u8, 0x12, 3, b'd', b's', b'q'];
/// Tensors of fewer bytes stay in the model when the others lie beside it: onnxruntime wants shapes there.
const SMALL: u64 = 1024;
/// Tensors beside the model begin at multiples of this, so that they can be mapped (`onnx.proto`, `external_data`).
const PAGE: u64 = 4096;

/// What to write.
#[derive(Debug, Clone)]
pub struct OnnxOptions {
    /// Type of float matrices; `None`: as stored (f32 for GGUF blocks).
    pub dtype: Option<FloatType>,
    /// Whether an ONNX file of dsq's may be replaced.
    pub overwrite: bool,
    /// Bytes of tensors up to which they are in the model itself.
    pub single_file_limit: u64,
}

impl Default for OnnxOptions {
    fn default() -> Self {
        Self { dtype: None, overwrite: false, single_file_limit: 1 << 29 }
    }
}

/// An export of which everything is known but the bytes of the weights.
#[derive(Debug)]
pub struct OnnxExport<'a> {
    source: Source<'a>,
    out: PathBuf,
    options: OnnxOptions,
    graph: Graph,
    metadata: Vec<(&'static str, String)>,
    dropped: Vec<(String, &'static str)>,
}

impl<'a> OnnxExport<'a> {
    /// Builds the graph and makes all checks: the output, the scheme of every layer.
    ///
    /// # Errors
    /// [`CheckpointError::Usage`] (2) for an output in use and for what has no operator (float codes, groups without a block),
    /// by the name of the layer; errors of reading.
    pub fn new(source: &'a Checkpoint, out: &Path, options: OnnxOptions) -> Result<Self, CheckpointError> {
        check_output(&[source.path()], out)?;
        FileWriter::check(out, options.overwrite, MAGIC)?;
        let old = old_data(out);
        if let Some(data) = data_paths(out).into_iter().find(|d| d.exists() && old.as_ref() != Some(d)) {
            let problem = "expected no such file, or that of the model which is replaced, got another";
            return Err(CheckpointError::usage(&data, "--out", problem)
                .with_hint("move the file away, or choose another --out"));
        }
        check_proof_place(out)?;
        if let Some(FloatType::F8E4M3 | FloatType::F8E8M0) = options.dtype {
            let problem = "expected f16, bf16 or f32 for float tensors, got a type of codes";
            return Err(CheckpointError::usage(out, "--dtype", problem));
        }
        let source = Source { ckpt: source, dtype: options.dtype };
        let mut metadata = vec![("dsq.model_type", String::new())];
        let graph = match source.ckpt.config() {
            ModelConfig::Llama(c) if c.experts.is_some() || c.latent.is_some() => {
                let problem = format!(
                    "graphs with experts or latent attention are not written; expected llama, qwen2, qwen3 or mistral, got {}",
                    c.model_type
                );
                return Err(CheckpointError::usage(source.ckpt.path(), "--format", problem));
            }
            ModelConfig::Llama(c) => {
                metadata[0].1.clone_from(&c.model_type);
                metadata.push(("dsq.max_position_embeddings", c.max_position_embeddings.to_string()));
                llama::build(&source, c)?
            }
            ModelConfig::ResNet(c) => {
                metadata[0].1 = crate::ResNetConfig::MODEL_TYPE.into();
                metadata.push(("dsq.input", format!("(pixel / 255 - mean) / std, mean {:?}, std {:?}", c.mean, c.std)));
                cnn::resnet(&source, c)?
            }
            ModelConfig::Image(c) => {
                metadata[0].1 = c.model_type().into();
                metadata.push(("dsq.input", c.preparation.formula()));
                cnn::image(&source, c)?
            }
        };
        let dropped = account(&source, &graph)?;
        Ok(Self { source, out: out.to_path_buf(), options, graph, metadata, dropped })
    }

    /// Steps of [`OnnxExport::write`].
    pub fn steps(&self) -> usize {
        self.graph.units.len()
    }

    /// Modules of a quantized source that become floats, because their groups are in activation order or their minima no whole
    /// multiples of their steps.
    pub fn dequantized(&self) -> usize {
        let codes = |name: &str| {
            let block = self.source.ckpt.info(name).is_some_and(|i| FloatType::ALL.iter().all(|f| f.name() != i.dtype));
            block || name.strip_suffix(".weight").is_some_and(|m| self.source.ckpt.is_quantized(m))
        };
        let lost = |make: &Make| matches!(make, Make::Float { name } if codes(name));
        self.graph.units.iter().filter(|u| lost(&u.make)).count()
    }

    /// Writes the file (and [`data_paths`], if its tensors are too many), reads it back, proves it equal to what was meant, and
    /// gives it its name; the proof is written beside it (`FILE.onnx.dsq-proof.json`). `tick` is called after each step.
    ///
    /// # Errors
    /// [`CheckpointError::Quant`] or [`CheckpointError::Numerics`] (6) for values that cannot be stored,
    /// [`CheckpointError::NoSpace`] or [`CheckpointError::Io`] (4). Nothing is left behind.
    pub fn write(self, tick: &mut dyn FnMut()) -> Result<Proof, CheckpointError> {
        let tensors = self.graph.units.iter().flat_map(|u| &u.tensors);
        let external = tensors.map(|t| t.bytes()).sum::<u64>() > self.options.single_file_limit;
        let overwrite = self.options.overwrite;
        // Two files cannot change their names in one step: new data take the name that the old model does not use, and the old
        // model stands beside its own until the new one takes its name.
        let old = old_data(&self.out);
        let [first, second] = data_paths(&self.out);
        let data_out = if old.as_ref() == Some(&first) { second } else { first };
        let mut data = match external {
            true => Some(FileWriter::create(&data_out, overwrite, b"", self.bytes())?),
            false => None,
        };
        let (mut initializers, mut at) = (Vec::new(), 0u64);
        for unit in &self.graph.units {
            for (declared, bytes) in unit.tensors.iter().zip(self.source.bytes(unit)?) {
                let mut tensor = TensorProto {
                    dims: declared.dims.iter().map(|&d| d as i64).collect(),
                    data_type: Some(declared.ty as i32),
                    name: Some(declared.name.clone()),
                    ..TensorProto::default()
                };
                match &mut data {
                    Some(file) if declared.bytes() >= SMALL => {
                        file.write(&vec![0; (at.next_multiple_of(PAGE) - at) as usize])?;
                        at = at.next_multiple_of(PAGE);
                        file.write(&bytes)?;
                        tensor.external_data = vec![
                            entry("location", file_name(&data_out)),
                            entry("offset", at.to_string()),
                            entry("length", bytes.len().to_string()),
                        ];
                        tensor.data_location = Some(1);
                        at += bytes.len() as u64;
                    }
                    _ => tensor.raw_data = Some(bytes),
                }
                initializers.push(tensor);
            }
            tick();
        }
        let model = self.model(initializers);
        let bytes = model.encode_to_vec();
        let mut file = FileWriter::create(&self.out, overwrite, MAGIC, bytes.len() as u64)?;
        file.write(&bytes)?;
        drop(bytes);
        let data_read = data.as_ref().map(FileWriter::written).transpose()?.map(Path::to_path_buf);
        let named = |name: &str| data_read.clone().filter(|_| name == file_name(&data_out));
        let read = Read::open(file.written()?, &named)?;
        if read.model != model {
            return Err(read.differs("the graph"));
        }
        drop(model);
        let mut proof = prove(&read, &self.source, &self.graph)?;
        proof.tensors.extend(self.dropped.iter().map(|(name, reason)| TensorProof::dropped(name.clone(), reason)));
        let [model_hash, data_hash] = read.hashes()?;
        proof.files.insert(file_name(&self.out), model_hash);
        if let Some(data) = data {
            proof.files.insert(file_name(&data_out), data_hash);
            data.commit()?;
        }
        let text = serde_json::to_vec_pretty(&proof)
            .map_err(|e| CheckpointError::io(&self.out, "write the proof", e.into()))?;
        file.commit_proven(&proof_path(&self.out), &text)?;
        if let Some(old) = old {
            std::fs::remove_file(&old).map_err(|e| CheckpointError::io(&old, "remove what the old model used", e))?;
        }
        Ok(proof)
    }

    /// Bytes of the tensors as they are written, padding counted whole.
    pub fn bytes(&self) -> u64 {
        self.graph.units.iter().flat_map(|u| &u.tensors).map(|t| t.bytes() + PAGE).sum()
    }

    /// Bytes of memory that writing takes at most: the largest layer in codes and floats, and of a single file the model, its
    /// bytes, and what is read back.
    pub fn working_bytes(&self) -> u64 {
        let (mut total, mut largest) = (0, 0);
        for unit in &self.graph.units {
            let bytes = unit.tensors.iter().map(|t| t.bytes()).sum::<u64>();
            // Floats are read, rounded and stored. A code of four bits is half a byte, and a byte and up to two floats on the way.
            let times = if matches!(unit.make, Make::Float { .. }) { 3 } else { 18 };
            (total, largest) = (total + bytes, largest.max(times * bytes));
        }
        largest + if total > self.options.single_file_limit { 0 } else { 4 * total }
    }

    fn model(&self, initializer: Vec<TensorProto>) -> ModelProto {
        let opset = |domain: &str, version| OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) };
        let mut opset_import = vec![opset("", OPSET)];
        if self.graph.nodes.iter().any(|n| n.domain.as_deref() == Some(MICROSOFT)) {
            opset_import.push(opset(MICROSOFT, 1));
        }
        ModelProto {
            ir_version: Some(IR_VERSION),
            producer_name: Some("dsq".into()),
            producer_version: Some(env!("CARGO_PKG_VERSION").into()),
            graph: Some(GraphProto {
                node: self.graph.nodes.clone(),
                name: Some("dsq".into()),
                initializer,
                input: self.graph.inputs.clone(),
                output: self.graph.outputs.clone(),
            }),
            opset_import,
            metadata_props: self.metadata.iter().map(|(k, v)| entry(k, v.as_str())).collect(),
        }
    }
}

/// Where the tensors of a large model lie: `FILE.onnx.data`, or `FILE.onnx.data2` where they replace those.
pub(super) fn data_paths(file: &Path) -> [PathBuf; 2] {
    [".data", ".data2"].map(|end| {
        let mut name = file.as_os_str().to_owned();
        name.push(end);
        PathBuf::from(name)
    })
}

/// The file beside a model that exists which holds its tensors.
fn old_data(file: &Path) -> Option<PathBuf> {
    let read = Read::open(file, &|name| beside(file, name)).ok()?;
    read.beside().map(Path::to_path_buf)
}

/// The file beside a model that it calls by this name, if it is there. No other name is followed: it comes from a file.
pub(super) fn beside(file: &Path, name: &str) -> Option<PathBuf> {
    data_paths(file).into_iter().find(|p| file_name(p) == name && p.is_file())
}

/// The name of a file without its folders.
pub(super) fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ExportTensor, export_folder};
    use dsq_quant::{Granularity, QuantArgs, QuantConfig, QuantScheme, QuantizedMatrix};

    /// The proof can fail: one changed bit of any tensor in the file beside the model, of whatever kind, and one changed bit
    /// anywhere in the model, is told or makes the file unreadable.
    #[test]
    fn a_file_that_differs_in_one_bit_is_not_proven() {
        let dir = tempfile::tempdir().unwrap();
        let (model, out) = (dir.path().join("m"), dir.path().join("m.onnx"));
        let text = r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":64,"intermediate_size":96,
            "num_hidden_layers":1,"num_attention_heads":4,"num_key_value_heads":2,"head_dim":16,"vocab_size":9,
            "max_position_embeddings":64,"rms_norm_eps":1e-5,"rope_theta":10000.0,"tie_word_embeddings":false}"#;
        let config = ModelConfig::from_json(text, Path::new("config.json")).unwrap();
        let args = QuantArgs {
            mapping: dsq_quant::Mapping::Asymmetric,
            ..QuantArgs::int4(Granularity::PerGroup(16), FloatType::F32)
        };
        let scheme = QuantConfig::new(QuantScheme { weights: args, activations: None }, &["lm_head".into()]).unwrap();
        let values = |n: usize| (0..n).map(|i| (i as f32 * 0.37 + 0.1).sin()).collect::<Vec<f32>>();
        let mut layers = Vec::new();
        let linears = config.linears().into_iter().map(|l| (format!("{}.weight", l.module), l.shape));
        for (name, shape) in linears.chain(config.other_tensors()) {
            let data = values(shape.iter().product());
            layers.push(match name.strip_suffix(".weight").and_then(|m| scheme.scheme_for(m).map(|_| m)) {
                Some(module) if name.contains("_proj") => ExportTensor::Linear {
                    module: module.into(),
                    matrix: QuantizedMatrix::quantize(&data, shape[0], shape[1], args).unwrap(),
                    shape,
                    activation: None,
                    source: None,
                    order: None,
                },
                _ => ExportTensor::Float { name, shape, data, dtype: FloatType::Bf16 },
            });
        }
        export_folder(&model, &config, layers, Some(&scheme), vec![], false).unwrap();
        let ckpt = Checkpoint::open(&model).unwrap();
        let options = OnnxOptions { single_file_limit: 0, overwrite: true, dtype: None };
        let export = || OnnxExport::new(&ckpt, &out, options.clone()).unwrap();
        export().write(&mut || ()).unwrap();
        let (export, [data, _]) = (export(), data_paths(&out));
        let open = || Read::open(&out, &|_| Some(data.clone()));
        let written = open().unwrap();
        let proven = || {
            let Ok(read) = open() else { return false };
            read.model == written.model && prove(&read, &export.source, &export.graph).is_ok()
        };
        assert!(proven());
        let whole = std::fs::read(&data).unwrap();
        let number = |t: &TensorProto, key: &str| t.external(key).and_then(|v| v.parse::<usize>().ok());
        let mut checked = 0;
        for t in written.graph().unwrap().initializer.iter().filter(|t| t.data_location == Some(1)) {
            let (start, len) = (number(t, "offset").unwrap(), number(t, "length").unwrap());
            for at in (start..start + len).step_by(97) {
                let mut changed = whole.clone();
                changed[at] ^= 1 << (at % 8);
                std::fs::write(&data, &changed).unwrap();
                assert!(!proven(), "{:?} byte {at}", t.name);
            }
            checked += 1;
        }
        assert!(checked >= 7, "{checked} tensors beside the model");
        std::fs::write(&data, &whole[..whole.len() - 1]).unwrap();
        assert!(!proven());
        std::fs::write(&data, &whole).unwrap();
        let model = std::fs::read(&out).unwrap();
        for at in 0..model.len() {
            let mut changed = model.clone();
            changed[at] ^= 1 << (at % 8);
            std::fs::write(&out, &changed).unwrap();
            assert!(!proven(), "byte {at} of {}", model.len());
        }
        std::fs::write(&out, &model).unwrap();
        assert!(proven());
    }
}
