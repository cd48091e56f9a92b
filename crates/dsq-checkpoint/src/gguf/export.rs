//! Writing a GGUF file from any model that can be opened, tensor by tensor. Which type a tensor gets is decided in `mix.rs`, the
//! keys are made in `keys.rs`, the file is read back in `proof.rs`. Not the arithmetic (see `dsq_quant::GgufGrid`).
//!
//! A source with codes (compressed-tensors, or a GGUF file with blocks) is *transcoded*: its codes are carried over where the
//! target's grid holds them. What would change a value is told with its size before anything is written, and done only when
//! [`GgufOptions::requantize`] allows it.

use super::dequant::GgmlType;
use super::layout::{FileTensor, Layout, Order, file_tensors, original_row};
use super::mix::GgufType;
use super::proof::{Meant, MeantPart, prove};
use super::value::Metadata;
use super::write::{ALIGNMENT, TableRow, header};
use super::{GgufFile, keys, rope};
use crate::checkpoint::{hex, hex_sha256};
use crate::export::{CODES, ExportLoss, Judge, Proof, SourceRecord, TensorProof};
use crate::tensor::{conversion_loss, float_bytes};
use crate::write::{FileWriter, check_output};
use crate::{Checkpoint, CheckpointError, LinearWeight, LlamaConfig, ModelConfig};
use dsq_quant::{FloatType, GgufGrid, QuantError};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// What a GGUF file begins with.
const MAGIC: &[u8] = b"GGUF";

/// From values to the blocks of a grid: [`GgufGrid::quantize`], perhaps on more threads.
pub type Encode<'a> = dyn Fn(GgufGrid, &[f32]) -> Result<Vec<u8>, QuantError> + 'a;

/// What to write.
#[derive(Debug, Clone)]
pub struct GgufOptions {
    /// The kind of file.
    pub ty: GgufType,
    /// Dtype of the matrices that a quantized source has in float; `None`: as stored. Only without `requantize`.
    pub dtype: Option<FloatType>,
    /// Whether values of a quantized source may change. Every matrix then gets the type of `ty`, also those that the source
    /// has in float.
    pub requantize: bool,
    /// Modules (`model.embed_tokens` too) that a float source's file keeps in the floats of the source.
    pub keep: Vec<String>,
    /// Whether a GGUF file of that name may be replaced.
    pub overwrite: bool,
}

/// How the source stores a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Floats, with the type that holds them as they are.
    Float(GgmlType),
    /// Codes of compressed-tensors.
    Codes,
    /// Blocks of GGUF.
    Blocks(GgufGrid),
}

/// A tensor to write.
#[derive(Debug)]
pub(super) struct Planned {
    /// What it holds.
    pub(super) tensor: FileTensor,
    /// Its type in the file.
    pub(super) ty: GgmlType,
    /// How the source stores each of its parts; of what is computed one, in F32.
    kinds: Vec<Kind>,
}

impl Planned {
    /// The Hugging Face name of a part; of what has none that in the file.
    pub(super) fn name(&self, part: usize) -> &str {
        self.tensor.parts.get(part).unwrap_or(&self.tensor.file)
    }

    /// Parts, at least one.
    pub(super) fn parts(&self) -> usize {
        self.kinds.len()
    }

    fn row(&self) -> TableRow<'_> {
        TableRow { name: &self.tensor.file, shape: &self.tensor.shape, ty: self.ty }
    }
}

/// A part of a tensor as it is to be stored.
struct Encoded {
    /// Rows in Hugging Face order, but for halves of `kv_b_proj`.
    bytes: Vec<u8>,
    /// What the source holds, and what the bytes stand for.
    values: Vec<f32>,
    stored: Vec<f32>,
    /// Whether the bytes are the source's own.
    copied: bool,
}

impl Encoded {
    fn exact(&self) -> bool {
        self.values == self.stored
    }
}

/// An export of which everything is known but the weights.
#[derive(Debug)]
pub struct GgufExport<'a> {
    source: &'a Checkpoint,
    config: LlamaConfig,
    rope_factors: Vec<f32>,
    out: PathBuf,
    options: GgufOptions,
    plan: Vec<Planned>,
    metadata: Metadata,
    dropped: Vec<(String, &'static str)>,
    quantized: bool,
    judge: Option<Judge<'a>>,
}

impl<'a> GgufExport<'a> {
    /// The same, with one who is asked about the file before it gets its name.
    pub fn judged(self, judge: Judge<'a>) -> Self {
        Self { judge: Some(judge), ..self }
    }

    /// Makes all checks that need no weight: the architecture, the output, the rows of every matrix, the tokenizer.
    ///
    /// # Errors
    /// [`CheckpointError::Usage`] (2) for an output in use, an image model, what llama.cpp would not honour of a config, or rows
    /// that no block divides;
    /// [`CheckpointError::Invalid`] (3) for a tokenizer that GGUF cannot say.
    pub fn new(source: &'a Checkpoint, out: &Path, options: GgufOptions) -> Result<Self, CheckpointError> {
        check_output(&source.gguf().map_or(vec![source.path()], GgufFile::paths), out)?;
        FileWriter::check(out, options.overwrite, MAGIC)?;
        super::check_proof_place(out)?;
        let usage = |field: &str, problem: String| Err(CheckpointError::usage(source.path(), field, problem));
        let ModelConfig::Llama(config) = source.config() else {
            return usage("--format", "GGUF files hold language models here; expected a llama, got another".into());
        };
        if config.biases != Default::default() {
            let problem =
                "GGUF files hold models without biases here; expected attention_bias and mlp_bias false, got true";
            return usage("--format", problem.into());
        }
        let mut config = config.clone();
        // Layers for predictions beyond the next token are left out, by name.
        config.latent.iter_mut().for_each(|a| a.mtp_layers = 0);
        // An id named twice has one key.
        let mut seen = HashSet::new();
        config.eos_token_ids.retain(|id| seen.insert(*id));
        let factors = match source.gguf() {
            Some(file) => file.rope_factors.clone(),
            None => rope::factors(&config),
        };
        let usual = Layout { split_kv_b: true, rope_factors: factors.is_some() };
        let layout = source.gguf().map_or(usual, |file| file.layout);
        let metadata = keys::metadata(source, &config, layout, options.ty, out)?;
        let tensors = file_tensors(&config, layout);
        let kinds = tensors.iter().map(|t| kinds(source, t)).collect::<Result<Vec<Vec<Kind>>, CheckpointError>>()?;
        let quantized = kinds.iter().flatten().any(|k| !matches!(k, Kind::Float(_)));
        let lossless = quantized && !options.requantize;
        if let Some(dtype) = options.dtype.filter(|_| !lossless) {
            let why = if quantized { "--requantize" } else { "a float source" };
            return usage(
                "--dtype",
                format!("expected no such option with {why}: {} says all, got {dtype}", options.ty.name()),
            );
        }
        let (mut plan, mut odd) = (Vec::new(), Vec::new());
        for (t, kinds) in tensors.into_iter().zip(kinds) {
            let (columns, module) = (t.columns(), t.parts.first().map_or("", |name| module(name)));
            let wanted = options.ty.of_tensor(&t.file, columns, &config);
            let embedding = t.file == "token_embd.weight" || t.file == "output.weight";
            let floats = kinds.iter().all(|k| matches!(k, Kind::Float(_)));
            if lossless && !floats && kinds.iter().any(|k| matches!(k, Kind::Float(_))) {
                let problem = format!(
                    "{}: a GGUF file has one type for all experts of a layer; expected codes for all, got floats for some",
                    t.file
                );
                return Err(CheckpointError::usage(source.path(), "--gguf-type", problem)
                    .with_hint("--requantize quantizes these too"));
            }
            // Of several floats the one that holds all.
            let stored = match kinds[0] {
                Kind::Float(ty) if kinds.iter().all(|k| *k == Kind::Float(ty)) => ty,
                _ => GgmlType::F32,
            };
            let kept = || t.parts.iter().all(|name| options.keep.iter().any(|m| self::module(name) == m));
            let ty = match kinds[0] {
                _ if wanted == Some(GgmlType::F32) => GgmlType::F32,
                Kind::Float(_) if lossless && floats => options.dtype.and_then(GgmlType::of_float).unwrap_or(stored),
                Kind::Float(_) if floats && kept() => stored,
                // llama.cpp's mixes want these finer than the rest; what the source has is kept.
                Kind::Blocks(grid) if lossless && embedding => GgmlType::of_grid(grid),
                Kind::Codes if lossless && embedding && options.ty.has_blocks() => finest(source, module, options.ty),
                _ => match wanted {
                    Some(ty) => ty,
                    None => {
                        odd.push(format!("{} ({columns})", t.parts.first().unwrap_or(&t.file)));
                        continue;
                    }
                },
            };
            plan.push(Planned { tensor: t, ty, kinds });
        }
        if !odd.is_empty() {
            let listed = odd[..odd.len().min(10)].join(", ");
            let problem = format!(
                "expected rows of a multiple of 32 values for {}, got {} matrices of others: {listed}",
                options.ty.name(),
                odd.len()
            );
            return Err(CheckpointError::usage(source.path(), "--gguf-type", problem).with_hint("F16 takes any shape"));
        }
        let dropped = dropped(source, &config, &plan)?;
        let (out, rope_factors) = (out.to_path_buf(), factors.unwrap_or_default());
        Ok(Self { source, config, rope_factors, out, options, plan, metadata, dropped, quantized, judge: None })
    }

    /// Tensors of the file.
    pub fn tensors(&self) -> usize {
        self.plan.len()
    }

    /// Bytes of the file, with its proof.
    pub fn bytes(&self) -> u64 {
        let table: Vec<TableRow> = self.plan.iter().map(Planned::row).collect();
        file_bytes(&table, &header(&self.metadata, &table)) + proof_bytes(&table)
    }

    /// Bytes that reading, encoding and writing the largest tensor takes: its values, what became of them, its bytes before and after.
    pub fn working_bytes(&self) -> u64 {
        self.plan.iter().map(|p| 14 * p.tensor.part_shape.iter().product::<usize>() as u64).max().unwrap_or(0)
    }

    /// The blocks that most values get, and how many values get blocks; `None` where none does.
    pub fn main_grid(&self) -> Option<(GgufGrid, u64)> {
        let sized = |p: &Planned| Some((p.ty.grid()?, p.tensor.shape.iter().product::<usize>() as u64));
        let all: Vec<(GgufGrid, u64)> = self.plan.iter().filter_map(sized).collect();
        let of = |grid: GgufGrid| all.iter().filter(|(g, _)| *g == grid).map(|(_, n)| n).sum::<u64>();
        let main = all.iter().map(|(g, _)| *g).max_by_key(|g| of(*g))?;
        Some((main, all.iter().map(|(_, n)| n).sum()))
    }

    /// Whether the source holds codes.
    pub fn is_quantized(&self) -> bool {
        self.quantized
    }

    /// Compares a quantized source with what would be written, tensor by tensor; `None` for a float source, which is
    /// quantized here for the first time. `tick` is called after each tensor.
    ///
    /// # Errors
    /// Those of reading and quantizing.
    pub fn loss(&self, encode: &Encode, tick: &mut dyn FnMut()) -> Result<Option<ExportLoss>, CheckpointError> {
        if !self.quantized {
            return Ok(None);
        }
        let mut loss = ExportLoss::default();
        for p in &self.plan {
            for (part, kind) in p.kinds.iter().enumerate() {
                if !matches!(kind, Kind::Float(_)) || (self.options.requantize && p.tensor.columns() > 0) {
                    let encoded = self.encode(p, part, encode)?;
                    loss.add(p.name(part), &encoded.values, &encoded.stored);
                }
            }
            tick();
        }
        loss.finish();
        Ok(Some(loss))
    }

    /// Writes the file, reads it back, proves it equal to what was meant, and gives it its name; the proof is written beside it
    /// (`FILE.dsq-proof.json`). `tick` is called after each tensor.
    ///
    /// # Errors
    /// [`CheckpointError::Quant`] or [`CheckpointError::Numerics`] (6) for values that cannot be stored,
    /// [`CheckpointError::Numerics`] for a quantized source whose values would change without
    /// [`GgufOptions::requantize`], [`CheckpointError::NoSpace`] or [`CheckpointError::Io`] (4). Nothing is left behind.
    pub fn write(self, encode: &Encode, tick: &mut dyn FnMut()) -> Result<Proof, CheckpointError> {
        let table: Vec<TableRow> = self.plan.iter().map(Planned::row).collect();
        let head = header(&self.metadata, &table);
        let size = file_bytes(&table, &head);
        let mut writer = FileWriter::create(&self.out, self.options.overwrite, MAGIC, size + proof_bytes(&table))?;
        writer.write(&head)?;
        let mut meant = Vec::with_capacity(self.plan.len());
        for p in &self.plan {
            let (mut hash, mut len, mut parts) = (Sha256::new(), 0, Vec::with_capacity(p.parts()));
            for (part, kind) in p.kinds.iter().enumerate() {
                let encoded = self.encode(p, part, encode)?;
                if !matches!(kind, Kind::Float(_)) && !self.options.requantize && !encoded.exact() {
                    let problem =
                        format!("{} does not hold these values; expected equal values, got others", p.ty.name());
                    return Err(CheckpointError::numerics(self.source.path(), p.name(part), problem)
                        .with_hint("--requantize allows values to change"));
                }
                let bytes = in_file_order(&encoded.bytes, p);
                writer.write(&bytes)?;
                hash.update(&bytes);
                len += bytes.len();
                parts.push(self.meant(p, part, &encoded)?);
            }
            writer.write(&[0; ALIGNMENT as usize][..len.next_multiple_of(ALIGNMENT as usize) - len])?;
            meant.push(Meant { bytes: hex(hash), parts });
            tick();
        }
        let mut proof = prove(writer.written()?, &self.config, &self.metadata, &self.plan, &meant, size)?;
        proof.tensors.extend(self.dropped.iter().map(|(name, reason)| TensorProof::dropped(name.clone(), reason)));
        let name = self.out.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if let Some(hash) = proof.files.remove("") {
            proof.files.insert(name, hash);
        }
        if let Some(judge) = self.judge {
            proof.logits = Some(judge.0(&Checkpoint::open(writer.written()?)?)?);
        }
        let text = serde_json::to_vec_pretty(&proof)
            .map_err(|e| CheckpointError::io(&self.out, "write the proof", e.into()))?;
        writer.commit_proven(&super::proof_path(&self.out), &text)?;
        Ok(proof)
    }

    #[cfg(test)]
    pub(super) fn parts(&self) -> (&LlamaConfig, &Metadata, &[Planned]) {
        (&self.config, &self.metadata, &self.plan)
    }

    #[cfg(test)]
    pub(super) fn plan_mut(&mut self) -> &mut [Planned] {
        &mut self.plan
    }

    /// What tensor `i` is to become.
    #[cfg(test)]
    pub(super) fn meant_of(&self, i: usize, encode: &Encode) -> Result<Meant, CheckpointError> {
        let (p, mut bytes, mut parts) = (&self.plan[i], Vec::new(), Vec::new());
        for part in 0..p.parts() {
            let encoded = self.encode(p, part, encode)?;
            bytes.extend_from_slice(&in_file_order(&encoded.bytes, p));
            parts.push(self.meant(p, part, &encoded)?);
        }
        Ok(Meant { bytes: hex_sha256(&bytes), parts })
    }

    /// The record of a part that was written.
    fn meant(&self, p: &Planned, part: usize, e: &Encoded) -> Result<MeantPart, CheckpointError> {
        let (kind, name) = (p.kinds[part], p.name(part));
        let became = match kind {
            _ if p.tensor.order == Order::Computed => "computed",
            Kind::Float(stored) if stored == p.ty => "copied",
            Kind::Float(_) if p.ty.grid().is_none() => "converted",
            Kind::Float(_) => "quantized",
            Kind::Codes | Kind::Blocks(_) if e.copied => "copied",
            Kind::Codes | Kind::Blocks(_) if e.exact() => "transcoded",
            Kind::Codes | Kind::Blocks(_) => "requantized",
        };
        let source = match (became, kind) {
            ("copied" | "computed", _) => None,
            (_, Kind::Codes) => {
                let hash = hex_sha256(&float_bytes(&e.values, FloatType::F32));
                Some(SourceRecord::with_values(hash, CODES.into(), &e.values, &e.stored))
            }
            _ => {
                let dtype = self.source.info(name).map(|i| i.dtype).unwrap_or_default();
                Some(SourceRecord::with_values(self.source.sha256(name)?, dtype, &e.values, &e.stored))
            }
        };
        let underflow = match p.ty.float() {
            Some(dtype) => conversion_loss(&e.values, dtype).underflow,
            None => 0,
        };
        Ok(MeantPart { values: hash_values(&e.stored), became, source, underflow })
    }

    fn encode(&self, p: &Planned, part: usize, encode: &Encode) -> Result<Encoded, CheckpointError> {
        let (source, name) = (self.source, p.name(part));
        let path = source.path();
        let read = || Ok::<_, CheckpointError>(p.tensor.take(source.read_f32(name)?));
        let (values, carried, own) = match p.kinds[part] {
            _ if p.tensor.order == Order::Computed => (self.rope_factors.clone(), None, None),
            Kind::Float(_) => (read()?, None, None),
            Kind::Codes => match source.linear(module(name))? {
                weight @ (LinearWeight::Float { .. } | LinearWeight::Ordered { .. }) => {
                    (p.tensor.take(weight.into_f32()), None, None)
                }
                LinearWeight::Quantized(m) if p.tensor.is_half() => (p.tensor.take(m.dequantize()), None, None),
                LinearWeight::Quantized(m) => (m.dequantize(), p.ty.grid().and_then(|g| g.from_codes(&m)), None),
            },
            Kind::Blocks(grid) => {
                let blocks = source.gguf().map(|g| g.blocks_as_stored(&p.tensor.file, part)).transpose()?.flatten();
                let blocks = blocks.map(|(_, b)| b).unwrap_or_default();
                (read()?, p.ty.grid().and_then(|g| g.from_blocks(grid, &blocks)), Some(blocks))
            }
        };
        if let Some(index) = values.iter().position(|x| !x.is_finite()) {
            let count = values.iter().filter(|x| !x.is_finite()).count();
            let e = QuantError::NonFinite { index, value: values[index], count };
            return Err(CheckpointError::quant(path, name, e));
        }
        let bytes = match (carried, p.ty.grid(), p.ty.float()) {
            (Some(bytes), ..) => bytes,
            (None, Some(grid), _) => encode(grid, &values).map_err(|e| CheckpointError::quant(path, name, e))?,
            (None, None, dtype) => {
                let dtype = dtype.unwrap_or_default();
                if let Some((index, count)) = conversion_loss(&values, dtype).overflow {
                    let problem = format!(
                        "{count} values overflow {dtype}; expected at most {:e}, the first is {:e} at index {index}",
                        dtype.max(),
                        values[index]
                    );
                    return Err(CheckpointError::numerics(path, name, problem));
                }
                float_bytes(&values, dtype)
            }
        };
        let mut stored = vec![0.0f32; values.len()];
        p.ty.dequantize(&bytes, &mut stored);
        let copied = own.is_some_and(|own| own == bytes);
        Ok(Encoded { bytes, values, stored, copied })
    }
}

/// Bytes of a file with this header.
fn file_bytes(table: &[TableRow], head: &[u8]) -> u64 {
    table.iter().map(|row| row.bytes().next_multiple_of(ALIGNMENT)).sum::<u64>() + head.len() as u64
}

/// The proof grows with the number of tensors; 1 KiB a tensor is more than it needs.
fn proof_bytes(table: &[TableRow]) -> u64 {
    1024 * table.len() as u64
}

/// How the source stores each part of a tensor.
fn kinds(source: &Checkpoint, tensor: &FileTensor) -> Result<Vec<Kind>, CheckpointError> {
    if tensor.order == Order::Computed {
        return Ok(vec![Kind::Float(GgmlType::F32)]);
    }
    if let Some(file) = source.gguf() {
        let ty = file.type_as_stored(&tensor.file).ok_or_else(|| source.missing(&tensor.file))?;
        return Ok(vec![ty.grid().map_or(Kind::Float(ty), Kind::Blocks); tensor.parts.len()]);
    }
    let one = |name: &String| {
        if name.ends_with(".weight") && source.is_quantized(module(name)) {
            return Ok(Kind::Codes);
        }
        let float = source.dtype(name).and_then(|d| d.float()).and_then(GgmlType::of_float);
        float.map(Kind::Float).ok_or_else(|| source.missing(name))
    };
    tensor.parts.iter().map(one).collect()
}

/// The module that a tensor belongs to.
fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

/// The type for a head of codes of its own: blocks of the kind's other matrices where they hold 4 bits, `Q8_0` else.
fn finest(source: &Checkpoint, module: &str, ty: GgufType) -> GgmlType {
    match source.group_args(module) {
        Some((args, _)) if args.qtype.bits() <= 4 => ty.matrices(),
        _ => GgmlType::Q8_0,
    }
}

/// Source tensors that the file has no place for, and why.
fn dropped(
    source: &Checkpoint,
    config: &LlamaConfig,
    plan: &[Planned],
) -> Result<Vec<(String, &'static str)>, CheckpointError> {
    let mut used: HashSet<String> = plan.iter().flat_map(|p| p.tensor.parts.iter().cloned()).collect();
    for p in plan {
        let codes = p.tensor.parts.iter().zip(&p.kinds).filter(|(_, k)| **k == Kind::Codes);
        used.extend(
            codes.flat_map(|(name, _)| crate::packed::WEIGHT_PARTS.map(|part| source.part(module(name), part))),
        );
    }
    let ahead = |name: &str| matches!(source.config(), ModelConfig::Llama(c) if c.mtp_layer(name).is_some());
    let mut out = Vec::new();
    for name in source.names().into_iter().filter(|n| !used.contains(n)) {
        let why = match name.rsplit('.').next().unwrap_or_default() {
            _ if name == "lm_head.weight" && config.tie_word_embeddings => {
                let embedding = "model.embed_tokens.weight";
                if source.sha256(&name)? != source.sha256(embedding)? {
                    let problem = "tie_word_embeddings is true; expected the embedding itself, got another matrix";
                    return Err(source.invalid(&name, problem));
                }
                "tie_word_embeddings: it is model.embed_tokens.weight"
            }
            _ if ahead(&name) => "predicts tokens beyond the next",
            "inv_freq" => "follows from the config",
            "input_scale" | "input_zero_point" | "input_global_scale" => "a GGUF file has no grids of inputs",
            "k_scale" | "v_scale" => "a GGUF file has no scales of a KV cache",
            _ => "the config does not call for it",
        };
        out.push((name, why));
    }
    Ok(out)
}

/// The rows of a part in the order of the file: those of query and key heads interleaved.
fn in_file_order<'a>(bytes: &'a [u8], p: &Planned) -> Cow<'a, [u8]> {
    let Order::Interleaved(head_dim) = p.tensor.order else { return bytes.into() };
    let rows = p.tensor.shape[0];
    let row_bytes = bytes.len() / rows;
    let mut out = Vec::with_capacity(bytes.len());
    for r in 0..rows {
        let from = original_row(r, head_dim) * row_bytes;
        out.extend(&bytes[from..from + row_bytes]);
    }
    out.into()
}

/// SHA-256 of values as f32, in hex.
pub(super) fn hash_values(values: &[f32]) -> String {
    let mut hash = Sha256::new();
    for run in values.chunks(1 << 16) {
        hash.update(float_bytes(run, FloatType::F32));
    }
    hex(hash)
}
