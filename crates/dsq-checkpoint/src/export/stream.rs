//! Writing a model folder tensor by tensor: the layout of the weight files follows from outlines, each tensor is made when its turn
//! comes, written at its place, hashed and dropped; then the folder is re-read, and what comes back is compared with the hashes and
//! with the record of every quantized matrix. Memory is that of the tensors in flight ([`Workers`]), whatever the model's size.
//! Not what a tensor becomes (see `outline.rs`).

use super::outline::{self, Outline, Part, inputs_of, packed_tensors, parts, stored};
use super::{CODES, ExportTensor, PROOF_FILE, Proof, SourceRecord, TensorProof, ratio};
use crate::checkpoint::{hex, hex_sha256};
use crate::columns::FolderFormat;
use crate::kv_cache;
use crate::safetensors::{Pending, RUN, check_pending, header, sort};
use crate::tensor::{conversion_loss, float_bytes};
use crate::workers::Workers;
use crate::write::{FolderWriter, PlacedFile};
use crate::{Checkpoint, CheckpointError, LinearWeight, ModelConfig};
use dsq_quant::{ColumnOrder, FloatType, QParams, QuantArgs, QuantConfig, QuantizedMatrix};
use serde_json::json;
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// Name of the weight file, where there is one.
const WEIGHTS: &str = "model.safetensors";
/// Name of the list of tensors, where there are several.
const INDEX: &str = "model.safetensors.index.json";

/// What folder is written, and how.
#[derive(Debug, Clone, Copy)]
pub struct FolderTarget<'a> {
    /// How codes are stored.
    pub format: FolderFormat,
    /// The folder.
    pub out: &'a Path,
    /// The architecture.
    pub config: &'a ModelConfig,
    /// The schemes of quantized layers; without, every tensor must be float.
    pub scheme: Option<&'a QuantConfig>,
    /// Whether a folder that holds model files (and nothing else) may be replaced.
    pub overwrite: bool,
    /// Whether a folder that exists may be replaced where its proof says that it is the one which is written: what a run left that was
    /// killed after it had given its output the name.
    pub again: bool,
    /// Bytes of tensors in a weight file at most, but for one module that is larger; `None`: one file.
    pub max_shard: Option<u64>,
    /// How many tensors are in flight.
    pub workers: Workers,
    /// Asked before the folder gets its name.
    pub judge: Option<Judge<'a>>,
}

impl<'a> FolderTarget<'a> {
    /// A new compressed-tensors folder with one weight file, written by one thread.
    pub fn new(out: &'a Path, config: &'a ModelConfig, scheme: Option<&'a QuantConfig>) -> Self {
        Self {
            format: FolderFormat::CompressedTensors,
            out,
            config,
            scheme,
            overwrite: false,
            again: false,
            max_shard: None,
            workers: Workers::new(1),
            judge: None,
        }
    }
}

/// What is to be said of the model in a folder that was written and re-read, by one who can run it: it goes into the proof. An error
/// ends the export.
#[derive(Clone, Copy)]
pub struct Judge<'a>(pub &'a (dyn Fn(&Checkpoint) -> Result<serde_json::Value, CheckpointError> + Sync));

impl std::fmt::Debug for Judge<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Judge")
    }
}

/// Makes the tensor of an outline.
pub type Make<'f, 'a, E> = dyn Fn(usize) -> Result<Cow<'a, ExportTensor>, E> + Sync + 'f;

/// Writes a model folder of tensors that `make` gives one by one, re-reads it, proves it equal to what was given, and gives it its
/// name. `make(i)` is asked for what `outlines[i]` says, once, or of a tied `lm_head`, which is not written, and its embedding
/// again; in order, from [`FolderTarget::workers`]' threads. The bytes do not depend on these.
///
/// # Errors
/// As [`super::export_folder`], and whatever `make` fails with. Nothing is left behind.
pub fn export_stream<'a, E: From<CheckpointError> + Send>(
    target: &FolderTarget,
    mut outlines: Vec<Outline>,
    aux: Vec<(String, Vec<u8>)>,
    make: &Make<'_, 'a, E>,
) -> Result<Proof, E> {
    let (config, mut dropped) = mtp_layers(target.config, &outlines);
    let target = &FolderTarget { config: &config, ..*target };
    dropped.extend(tied_head(target, &outlines, make)?);
    // Which of the given ones each of the written ones is.
    let given: Vec<usize> = (0..outlines.len()).filter(|i| dropped.iter().all(|(at, _)| i != at)).collect();
    outlines = given.iter().map(|&i| outlines[i].clone()).collect();
    let mut session = Session::new(target, outlines, aux)?;
    let proof = {
        let files = session.files()?;
        let write = |i: usize| -> Result<Written, E> { Ok(session.write(&files, i, &*make(given[i])?)?) };
        let cost = |i: usize| session.outlines[i].working_bytes();
        let written = target.workers.run(given.len(), cost, write)?;
        // The disk takes what is read back meanwhile.
        let mut proof = std::thread::scope(|scope| -> Result<Proof, CheckpointError> {
            let synced = scope.spawn(|| files.into_iter().try_for_each(PlacedFile::finish));
            let proof = session.prove(&written);
            synced.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
            proof
        })?;
        proof.tensors.extend(dropped.into_iter().map(|(_, proof)| proof));
        proof
    };
    session.commit(&proof)?;
    Ok(proof)
}

/// Bytes that a folder of these tensors takes, small files beside the weights not counted: known before a value is.
///
/// # Errors
/// [`CheckpointError::Usage`] for names that cannot be stored.
pub fn folder_bytes(target: &FolderTarget, outlines: &[Outline]) -> Result<u64, CheckpointError> {
    for o in outlines {
        outline::check(target.out, o, target.scheme, target.format)?;
    }
    let layout = Layout::new(target, outlines)?;
    Ok(layout.shards.iter().map(|s| s.bytes).sum::<u64>() + proof_bytes(outlines))
}

/// The proof grows with the number of tensors; 1 KiB a tensor is more than it needs.
fn proof_bytes(outlines: &[Outline]) -> u64 {
    1024 * outlines.len() as u64
}

/// Finds the tensors of layers that predict tokens beyond the next, which dsq does not run and does not write, and gives the config
/// without them.
fn mtp_layers(config: &ModelConfig, outlines: &[Outline]) -> (ModelConfig, Vec<(usize, TensorProof)>) {
    let mut config = config.clone();
    let ModelConfig::Llama(c) = &mut config else { return (config, Vec::new()) };
    let name = |o: &Outline| match o {
        Outline::Linear { module, .. } => format!("{module}.weight"),
        _ => o.name(),
    };
    let reason = "a layer that predicts tokens beyond the next, which dsq does not run";
    let ahead = outlines.iter().map(name).enumerate().filter(|(_, name)| c.mtp_layer(name).is_some());
    let found = ahead.map(|(i, name)| (i, TensorProof::dropped(name, reason))).collect();
    if let Some(latent) = &mut c.latent {
        latent.mtp_layers = 0;
    }
    (config, found)
}

/// Finds `lm_head` in a tied model, which must be the embedding and is not written.
fn tied_head<E: From<CheckpointError>>(
    target: &FolderTarget,
    outlines: &[Outline],
    make: &Make<'_, '_, E>,
) -> Result<Option<(usize, TensorProof)>, E> {
    let ModelConfig::Llama(c) = target.config else { return Ok(None) };
    let head = |o: &Outline| ["lm_head", "lm_head.weight"].contains(&o.name().as_str());
    let Some(at) = outlines.iter().position(head).filter(|_| c.tie_word_embeddings) else { return Ok(None) };
    let embedding = outlines.iter().position(|o| o.name() == "model.embed_tokens.weight");
    let hash = |i: usize| -> Result<Option<String>, E> {
        Ok(match &*make(i)? {
            ExportTensor::Float { data, dtype, .. } | ExportTensor::Rescaled { data, dtype, .. } => {
                Some(hex_sha256(&float_bytes(data, *dtype)))
            }
            ExportTensor::Copy { bytes, .. } => Some(hex_sha256(bytes)),
            ExportTensor::Linear { .. } | ExportTensor::KvCache { .. } => None,
        })
    };
    let head = hash(at)?;
    if head.is_none() || embedding.map(hash).transpose()?.flatten() != head {
        let problem = "tie_word_embeddings is true; expected the embedding itself, got another matrix";
        return Err(CheckpointError::usage(target.out, "lm_head.weight", problem)
            .with_hint("set tie_word_embeddings to false to store a matrix of its own")
            .into());
    }
    let proof = TensorProof::dropped("lm_head.weight".into(), "tie_word_embeddings: it is model.embed_tokens.weight");
    Ok(Some((at, proof)))
}

/// A tensor of a file, and where it lies.
struct Slot {
    part: Part,
    file: usize,
    at: u64,
}

/// A weight file.
struct Shard {
    name: String,
    header: Vec<u8>,
    bytes: u64,
}

/// Where every tensor lies. Modules are whole in a file; those of a file lie as [`sort`] says.
struct Layout {
    /// By outline.
    slots: Vec<Vec<Slot>>,
    shards: Vec<Shard>,
}

impl Layout {
    fn new(target: &FolderTarget, outlines: &[Outline]) -> Result<Self, CheckpointError> {
        let parts: Vec<Vec<Part>> = outlines.iter().map(|o| parts(target.format, o, target.scheme)).collect();
        check_pending(target.out, &parts.iter().flatten().map(Part::pending).collect::<Vec<_>>())?;
        let (mut shard, mut held) = (0, 0u64);
        let mut shard_of = Vec::with_capacity(parts.len());
        for bytes in parts.iter().map(|p| p.iter().map(Part::len).sum::<u64>()) {
            if held > 0 && target.max_shard.is_some_and(|most| held.saturating_add(bytes) > most) {
                (shard, held) = (shard + 1, 0);
            }
            held += bytes;
            shard_of.push(shard);
        }
        let count = shard + 1;
        let mut slots: Vec<Vec<Slot>> = parts
            .into_iter()
            .zip(&shard_of)
            .map(|(parts, &file)| parts.into_iter().map(|part| Slot { part, file, at: 0 }).collect())
            .collect();
        let mut shards = Vec::with_capacity(count);
        for file in 0..count {
            let mut here: Vec<&mut Slot> = slots.iter_mut().flatten().filter(|s| s.file == file).collect();
            let mut pending: Vec<Pending> = here.iter().map(|s| s.part.pending()).collect();
            sort(&mut pending);
            let header = header(&pending);
            let mut at = header.len() as u64;
            let mut places: BTreeMap<&str, u64> = BTreeMap::new();
            for p in &pending {
                places.insert(&p.name, at);
                at += p.len();
            }
            here.iter_mut().for_each(|s| s.at = places[s.part.name.as_str()]);
            let name = match count {
                1 => WEIGHTS.to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", file + 1),
            };
            shards.push(Shard { name, header, bytes: at });
        }
        Ok(Self { slots, shards })
    }

    /// `model.safetensors.index.json`, if there are several files.
    fn index(&self) -> Result<Option<(String, Vec<u8>)>, serde_json::Error> {
        if self.shards.len() == 1 {
            return Ok(None);
        }
        let total: u64 = self.shards.iter().map(|s| s.bytes - s.header.len() as u64).sum();
        let slots = self.slots.iter().flatten();
        let map: BTreeMap<&str, &str> =
            slots.map(|s| (s.part.name.as_str(), self.shards[s.file].name.as_str())).collect();
        let text = serde_json::to_vec_pretty(&json!({"metadata": {"total_size": total}, "weight_map": map}))?;
        Ok(Some((INDEX.to_owned(), text)))
    }
}

/// What is kept of a tensor that was written.
struct Written {
    /// SHA-256 of each stored tensor.
    stored: BTreeMap<String, String>,
    /// What is compared with the bytes that are read back, slot by slot.
    sums: Vec<Checksum>,
    /// Of a quantized module: [`digest`], and the grid of its inputs.
    matrix: Option<(Checksum, Option<(QuantArgs, QParams)>)>,
    became: &'static str,
    source: Option<SourceRecord>,
    underflow: usize,
}

/// A folder that is being written.
struct Session<'a> {
    target: &'a FolderTarget<'a>,
    outlines: Vec<Outline>,
    layout: Layout,
    files: Vec<(String, Vec<u8>)>,
    writer: FolderWriter,
}

impl<'a> Session<'a> {
    /// Makes all checks that need no values, and begins the folder.
    fn new(
        target: &'a FolderTarget<'a>,
        outlines: Vec<Outline>,
        aux: Vec<(String, Vec<u8>)>,
    ) -> Result<Self, CheckpointError> {
        let FolderTarget { format, out, config, scheme, .. } = *target;
        for o in &outlines {
            outline::check(out, o, scheme, format)?;
        }
        let cache = |o: &Outline| match o {
            Outline::KvCache { layer, grid } => Some(ExportTensor::KvCache { layer: *layer, grid: *grid }),
            _ => None,
        };
        kv_cache::check_export(out, config, &outlines.iter().filter_map(cache).collect::<Vec<_>>(), scheme)?;
        let layout = Layout::new(target, &outlines)?;
        let mut taken: Vec<&str> = layout.shards.iter().map(|s| s.name.as_str()).collect();
        taken.extend([WEIGHTS, INDEX, PROOF_FILE]);
        let mut files = outline::folder_files(format, out, config, &outlines, scheme, aux, &taken)?;
        files.extend(layout.index().map_err(|e| CheckpointError::io(out, "write the index", e.into()))?);
        let needed = layout.shards.iter().map(|s| s.bytes).sum::<u64>()
            + files.iter().map(|(_, b)| b.len() as u64).sum::<u64>()
            + proof_bytes(&outlines);
        let writer = FolderWriter::create(out, target.overwrite || target.again, needed)?;
        Ok(Self { target, outlines, layout, files, writer })
    }

    /// Writes the files beside the weights, and the headers of these.
    fn files(&mut self) -> Result<Vec<PlacedFile>, CheckpointError> {
        for (name, bytes) in &self.files {
            self.writer.file(name, bytes)?;
        }
        let place = |s: &Shard| {
            let file = self.writer.placed(&s.name, s.bytes)?;
            file.put(&s.header, 0).map(|()| file)
        };
        self.layout.shards.iter().map(place).collect()
    }

    /// Writes tensor `i` at its place.
    fn write(&self, files: &[PlacedFile], i: usize, layer: &ExportTensor) -> Result<Written, CheckpointError> {
        let FolderTarget { format, out, scheme, .. } = *self.target;
        outline::check_values(out, layer)?;
        let (meant, got) = (&self.outlines[i], Outline::of(layer));
        if *meant != got {
            return Err(CheckpointError::usage(out, meant.name(), format!("expected {meant:?}, got {got:?}")));
        }
        let packed = packed_tensors(format, layer, scheme);
        let (mut hashes, mut sums) = (BTreeMap::new(), Vec::new());
        for (p, slot) in stored(layer, &packed).into_iter().zip(&self.layout.slots[i]) {
            let bytes = (p.bytes)();
            let part = Part { name: p.name, dtype: p.dtype, shape: p.shape };
            if part != slot.part || bytes.len() as u64 != part.len() {
                let problem =
                    format!("shape {:?}: expected {} bytes, got {}", part.shape, slot.part.len(), bytes.len());
                return Err(CheckpointError::usage(out, &part.name, problem));
            }
            let (mut hash, mut sum, mut at) = (Sha256::new(), Checksum::new(), slot.at);
            // All while it is in the cache.
            for run in bytes.chunks(RUN) {
                hash.update(run);
                sum.add_bytes(run);
                files[slot.file].put(run, at)?;
                at += run.len() as u64;
            }
            hashes.insert(part.name, hex(hash));
            sums.push(sum);
        }
        let (became, source, matrix) = match layer {
            ExportTensor::Float { dtype: FloatType::F32, .. } | ExportTensor::Copy { .. } => ("copied", None, None),
            ExportTensor::Float { data, dtype, .. } => {
                let hash = hex_sha256(&float_bytes(data, FloatType::F32));
                let rounded: Vec<f32> = data.iter().map(|&x| dtype.round(x)).collect();
                ("converted", Some(SourceRecord::with_values(hash, "F32".into(), data, &rounded)), None)
            }
            ExportTensor::Rescaled { source, .. } => ("rescaled", Some(source.clone()), None),
            ExportTensor::Linear { matrix, activation, source, order, .. } => {
                let became = match source {
                    Some(s) if s.dtype == CODES && s.max_abs_error == 0.0 => "transcoded",
                    Some(s) if s.dtype == CODES => "requantized",
                    _ => "quantized",
                };
                (became, source.clone(), Some((digest(matrix, order.as_ref()), *activation)))
            }
            ExportTensor::KvCache { .. } => ("kv_cache", None, None),
        };
        let underflow = match layer {
            ExportTensor::Float { data, dtype, .. } | ExportTensor::Rescaled { data, dtype, .. } => {
                conversion_loss(data, *dtype).underflow
            }
            _ => 0,
        };
        Ok(Written { stored: hashes, sums, matrix, became, source, underflow })
    }

    /// Re-reads the temporary folder and compares everything with what was to be written.
    fn prove(&self, written: &[Written]) -> Result<Proof, CheckpointError> {
        let ckpt = Checkpoint::open(self.writer.path())?;
        if ckpt.config() != self.target.config {
            return self.differs("config.json");
        }
        for (name, bytes) in &self.files {
            let path = self.writer.path().join(name);
            let back = std::fs::read(&path).map_err(|e| CheckpointError::io(&path, "read back", e))?;
            if back != *bytes {
                return self.differs(name);
            }
        }
        if ckpt.names().len() != self.layout.slots.iter().map(Vec::len).sum::<usize>() {
            return self.differs("the list of tensors");
        }
        // What is no matrix is read run by run.
        let cost = |i: usize| match &self.outlines[i] {
            Outline::Linear { .. } => self.outlines[i].working_bytes(),
            _ => RUN as u64,
        };
        self.target.workers.run(written.len(), cost, |i| self.prove_tensor(&ckpt, i, &written[i]))?;
        let mut bytes = BTreeMap::new();
        let mut tensors = Vec::new();
        let (mut quantized_bits, mut quantized_weights, mut bits, mut weights) = (0u64, 0u64, 0u64, 0u64);
        for ((outline, slots), w) in self.outlines.iter().zip(&self.layout.slots).zip(written) {
            let linear = matches!(outline, Outline::Linear { .. });
            let mut layer_bits = 0;
            for slot in slots {
                let class = slot.part.class(linear);
                *bytes.entry(class).or_insert(0) += slot.part.len();
                layer_bits += if class == "other" { 0 } else { slot.part.len() * 8 };
            }
            let n = outline.values();
            if linear {
                quantized_bits += layer_bits;
                quantized_weights += n;
            }
            bits += layer_bits;
            weights += n;
            tensors.push(TensorProof {
                name: if linear { format!("{}.weight", outline.name()) } else { outline.name() },
                became: w.became,
                reason: None,
                source: w.source.clone(),
                underflow: w.underflow,
                bits_per_weight: ratio(layer_bits, n),
                stored: w.stored.clone(),
            });
        }
        bytes.insert("header", self.layout.shards.iter().map(|s| s.header.len() as u64).sum());
        Ok(Proof {
            format_version: 1,
            dsq_version: env!("CARGO_PKG_VERSION"),
            bits_per_weight: ratio(quantized_bits, quantized_weights),
            model_bits_per_weight: ratio(bits, weights),
            bytes,
            tensors,
            files: self.files.iter().map(|(n, b)| (n.clone(), hex_sha256(b))).collect(),
            logits: self.target.judge.map(|judge| judge.0(&ckpt)).transpose()?,
        })
    }

    fn prove_tensor(&self, ckpt: &Checkpoint, i: usize, w: &Written) -> Result<(), CheckpointError> {
        if w.sums.len() != self.layout.slots[i].len() {
            return self.differs(&self.outlines[i].name());
        }
        for (Slot { part, .. }, meant) in self.layout.slots[i].iter().zip(&w.sums) {
            let mut back = Checksum::new();
            let read = ckpt.read_runs(&part.name, RUN, |run| back.add_bytes(run))?;
            if !read || ckpt.dtype(&part.name) != Some(part.dtype) || back != *meant {
                return self.differs(&part.name);
            }
        }
        match (&self.outlines[i], &w.matrix) {
            (Outline::Linear { module, .. }, Some((meant, activation))) => {
                let (back, order) = match ckpt.linear(module)? {
                    LinearWeight::Quantized(matrix) => (matrix, None),
                    LinearWeight::Ordered { matrix, order } => (matrix, Some(order)),
                    LinearWeight::Float { .. } => return self.differs(module),
                };
                let inputs = inputs_of(self.target.scheme, module);
                let dynamic = ckpt.dynamic_activation(module) == inputs.filter(QuantArgs::is_dynamic);
                if digest(&back, order.as_ref()) != *meant || !dynamic || ckpt.activation(module)? != *activation {
                    return self.differs(module);
                }
            }
            (Outline::KvCache { layer, grid }, _) if ckpt.kv_grid(*layer)? != Some(*grid) => {
                return self.differs(&self.outlines[i].name());
            }
            _ => {}
        }
        Ok(())
    }

    fn differs<T>(&self, what: &str) -> Result<T, CheckpointError> {
        let text = format!("{what}: what was read back is not what was written");
        let e = std::io::Error::new(std::io::ErrorKind::InvalidData, text);
        Err(CheckpointError::io(self.target.out, "prove the export", e))
    }

    fn commit(mut self, proof: &Proof) -> Result<(), CheckpointError> {
        let text = serde_json::to_vec_pretty(proof);
        let text = text.map_err(|e| CheckpointError::io(self.target.out, "write the proof", e.into()))?;
        let out = self.target.out;
        if self.target.again
            && !self.target.overwrite
            && out.exists()
            && std::fs::read(out.join(PROOF_FILE)).ok() != Some(text.clone())
        {
            let problem = "holds another model than this run's; expected the output that it had written, or none";
            return Err(
                CheckpointError::usage(out, "--out", problem).with_hint("move that folder away, or add --overwrite")
            );
        }
        self.writer.file(PROOF_FILE, &text)?;
        self.writer.commit()
    }
}

/// A checksum over everything that a matrix is, scheme and parameters included, and the order of its columns where that is not the
/// inputs'. The values of its codes follow from these.
fn digest(m: &QuantizedMatrix, order: Option<&ColumnOrder>) -> Checksum {
    let mut sum = Checksum::new();
    sum.add(format!("{:?} {} {} {:?}", m.args, m.n, m.k, m.global_scale.map(f32::to_bits)).bytes());
    for codes in [&m.codes, &m.zeros] {
        sum.add_codes(codes);
    }
    sum.add(m.scales.iter().flat_map(|s| s.to_le_bytes()));
    if let Some(order) = order.filter(|o| !o.is_identity()) {
        sum.add(order.inputs().iter().flat_map(|i| i.to_le_bytes()));
    }
    sum
}

/// Tells what was read from what was meant, within one run of the program: at the speed of memory, against faults and not
/// against an adversary (what is stored has a SHA-256). Every step is a bijection of its lane's 64 bits and of the eight bytes that
/// come in, so that one changed word changes the sum for certain, and others with a probability of 1 - 2^-64.
#[derive(Debug, PartialEq, Eq)]
struct Checksum([u64; 4]);

impl Checksum {
    fn new() -> Self {
        Self([1, 2, 3, 4])
    }

    #[inline(always)]
    fn step(lane: u64, word: u64) -> u64 {
        // The multiplier of Knuth's MMIX generator; odd, hence invertible.
        (lane ^ word).wrapping_mul(6_364_136_223_846_793_005).rotate_left(29)
    }

    /// Codes, and how many they are.
    fn add_codes(&mut self, codes: &[i8]) {
        self.add_all(codes, |c| c as u8);
    }

    /// Bytes, and how many they are.
    fn add_bytes(&mut self, bytes: &[u8]) {
        self.add_all(bytes, |b| b);
    }

    #[inline(always)]
    fn add_all<T: Copy>(&mut self, values: &[T], byte: impl Fn(T) -> u8) {
        let (blocks, rest) = values.as_chunks::<32>();
        let mut lanes = self.0;
        for block in blocks {
            for (lane, word) in lanes.iter_mut().zip(block.as_chunks::<8>().0) {
                *lane = Self::step(*lane, u64::from_le_bytes(word.map(&byte)));
            }
        }
        self.0 = lanes;
        self.add(rest.iter().map(|&v| byte(v)));
        self.add((values.len() as u64).to_le_bytes().into_iter());
    }

    fn add(&mut self, bytes: impl Iterator<Item = u8>) {
        for (i, b) in bytes.enumerate() {
            let lane = &mut self.0[i % 4];
            *lane = Self::step(*lane, u64::from(b));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{NamedTensor, ResNetConfig, TensorData};
    use dsq_quant::{Granularity, Mapping, QuantScheme};

    fn model() -> (ModelConfig, QuantConfig, Vec<ExportTensor>) {
        let config = ModelConfig::ResNet(ResNetConfig {
            in_channels: 1,
            image_size: 4,
            channels: vec![4],
            blocks_per_stage: 1,
            num_classes: 10,
            norm_eps: 1e-5,
            mean: vec![0.0],
            std: vec![1.0],
        });
        let args =
            QuantArgs { mapping: Mapping::Asymmetric, ..QuantArgs::int4(Granularity::PerChannel, FloatType::F32) };
        let layers: Vec<ExportTensor> = config
            .linears()
            .into_iter()
            .map(|spec| {
                let data: Vec<f32> = (0..spec.n() * spec.k()).map(|i| (i as f32 * 0.37).sin()).collect();
                if spec.module == "fc" {
                    let matrix = QuantizedMatrix::quantize(&data, spec.n(), spec.k(), args).unwrap();
                    let (module, shape) = (spec.module, spec.shape);
                    return ExportTensor::Linear { module, shape, matrix, activation: None, source: None, order: None };
                }
                let name = format!("{}.weight", spec.module);
                ExportTensor::Float { name, shape: spec.shape, data, dtype: FloatType::Bf16 }
            })
            .collect();
        let scheme = QuantConfig::new(QuantScheme { weights: args, activations: None }, &[]).unwrap();
        (config, scheme, layers)
    }

    fn target<'a>(out: &'a Path, config: &'a ModelConfig, scheme: &'a QuantConfig) -> FolderTarget<'a> {
        FolderTarget::new(out, config, Some(scheme))
    }

    /// The proof can fail: one changed bit anywhere in the written tensors, a tensor too many, another config or another
    /// file beside the weights is told.
    #[test]
    fn a_folder_that_differs_in_one_bit_is_not_proven() {
        let (config, scheme, layers) = model();
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("m");
        let aux = vec![("tokenizer.json".to_owned(), b"{}".to_vec())];
        let target = target(&out, &config, &scheme);
        let mut session = Session::new(&target, layers.iter().map(Outline::of).collect(), aux).unwrap();
        let files = session.files().unwrap();
        let written: Vec<Written> =
            layers.iter().enumerate().map(|(i, l)| session.write(&files, i, l).unwrap()).collect();
        files.into_iter().try_for_each(PlacedFile::finish).unwrap();
        let proven = || session.prove(&written).is_ok();
        let m = |l: &ExportTensor| match l {
            ExportTensor::Linear { matrix, .. } => Some(matrix.clone()),
            _ => None,
        };
        let matrix = layers.iter().find_map(m).unwrap();
        for at in 0..matrix.codes.len() {
            let mut other = matrix.clone();
            other.codes[at] ^= 1;
            assert_ne!(digest(&other, None), digest(&matrix, None), "code {at}");
        }
        let [mut fewer, mut scale, mut zero] = [matrix.clone(), matrix.clone(), matrix.clone()];
        fewer.codes.pop();
        scale.scales[0] = -scale.scales[0];
        zero.zeros[1] ^= 1;
        for other in [fewer, scale, zero] {
            assert_ne!(digest(&other, None), digest(&matrix, None));
        }
        assert!(proven());
        let path = session.writer.path().join(WEIGHTS);
        let whole = std::fs::read(&path).unwrap();
        let data = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        for at in data..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 1 << (at % 8);
            std::fs::write(&path, changed).unwrap();
            assert!(!proven(), "byte {at}");
        }
        let packed: Vec<Vec<NamedTensor>> =
            layers.iter().map(|l| packed_tensors(FolderFormat::default(), l, Some(&scheme))).collect();
        let extra = NamedTensor { name: "x".into(), data: TensorData::I8 { shape: vec![1], data: vec![1] } };
        let mut more: Vec<Pending> = layers.iter().zip(&packed).flat_map(|(l, t)| stored(l, t)).collect();
        let mut file = std::fs::File::create(&path).unwrap();
        sort(&mut more);
        crate::safetensors::write_tensors(&mut file, &path, &more).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), whole, "written at their places as one after the other");
        more.push(Pending::from(&extra));
        sort(&mut more);
        let mut file = std::fs::File::create(&path).unwrap();
        crate::safetensors::write_tensors(&mut file, &path, &more).unwrap();
        assert!(!proven());
        std::fs::write(&path, &whole).unwrap();
        std::fs::write(session.writer.path().join("tokenizer.json"), "{ }").unwrap();
        assert!(!proven());
        std::fs::write(session.writer.path().join("tokenizer.json"), "{}").unwrap();
        assert!(proven());
    }

    #[test]
    fn shards_hold_whole_modules_and_the_same_tensors() {
        let (config, scheme, layers) = model();
        let dir = tempfile::tempdir().unwrap();
        let outlines = || layers.iter().map(Outline::of).collect::<Vec<_>>();
        let make = |i: usize| Ok::<_, CheckpointError>(Cow::Borrowed(&layers[i]));
        let one = dir.path().join("one");
        export_stream(&target(&one, &config, &scheme), outlines(), vec![], &make).unwrap();
        let whole = Checkpoint::open(&one).unwrap();
        for (most, threads) in [(1, 1), (400, 2), (700, 3)] {
            let out = dir.path().join(format!("{most}"));
            let target = FolderTarget { max_shard: Some(most), ..target(&out, &config, &scheme) };
            let target = FolderTarget { workers: Workers::new(threads), ..target };
            let proof = export_stream(&target, outlines(), vec![], &make).unwrap();
            assert!(!out.join(WEIGHTS).exists() && proof.files.contains_key(INDEX));
            let shards = Checkpoint::open(&out).unwrap();
            assert!(shards.faults().is_empty(), "{:?}", shards.faults());
            let (mut a, mut b) = (whole.names(), shards.names());
            a.sort();
            b.sort();
            assert_eq!(a, b);
            for name in a {
                assert_eq!(whole.read_stored(&name).unwrap(), shards.read_stored(&name).unwrap());
            }
            let index: serde_json::Value = serde_json::from_slice(&std::fs::read(out.join(INDEX)).unwrap()).unwrap();
            let file_of = |part: &str| index["weight_map"][format!("fc.{part}")].as_str().unwrap();
            assert_eq!(file_of("weight_packed"), file_of("weight_scale"));
            let files: std::collections::BTreeSet<_> =
                index["weight_map"].as_object().unwrap().values().map(|v| v.to_string()).collect();
            let modules = outlines().len();
            assert!(if most == 1 { files.len() == modules } else { files.len() > 1 && files.len() < modules });
        }
        // What `make` gives must be what was announced, and its error is handed on.
        let out = dir.path().join("wrong");
        let wrong = |i: usize| Ok::<_, CheckpointError>(Cow::Borrowed(&layers[(i + 1) % layers.len()]));
        let e = export_stream(&target(&out, &config, &scheme), outlines(), vec![], &wrong).unwrap_err();
        assert!(e.exit_code() == 2 && e.to_string().contains("expected"), "{e}");
        let fails = |i: usize| match i {
            3 => Err(CheckpointError::invalid(Path::new("source"), "x", "broken")),
            i => Ok(Cow::Borrowed(&layers[i])),
        };
        let e = export_stream(&target(&out, &config, &scheme), outlines(), vec![], &fails).unwrap_err();
        assert_eq!(e.to_string(), "source: x: broken");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 4, "nothing is left behind");
    }
}
