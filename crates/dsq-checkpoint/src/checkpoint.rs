//! [`Checkpoint`]: a model's config and tensors under their Hugging Face names, whatever the files are. Not a model
//! (no forward pass) and not a writer (see `export.rs`).

use crate::columns::{self, FolderFormat};
use crate::config::fields::Fields;
use crate::folder::Folder;
use crate::gguf::GgufFile;
use crate::json::{open_regular, parse_json, read_bounded, read_json};
use crate::packed::{
    DiskFormat, G_IDX, StoredZeros, expected_tensors, unpack, unpack_codes, unpack_scales, unpadded_bits,
};
use crate::pytorch::{PytorchFile, is_pytorch};
use crate::quantization::QuantizationConfig;
use crate::safetensors::{RUN, read_at};
use crate::tensor::{extend_floats, float_bytes, floats_from_bytes};
use crate::{CheckpointError, Dtype, Fault, ImageConfig, ModelConfig, TensorInfo};
use dsq_quant::{
    ColumnOrder, FloatType, Granularity, InputGrid, Mapping, QParams, QuantArgs, QuantizedMatrix, unpack_words,
};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// Files beside the weights that belong to a model; an export copies them byte for byte.
pub const AUX_FILES: [&str; 10] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "preprocessor_config.json",
];

/// Largest file beside the weights that is read.
const MAX_AUX_BYTES: u64 = 1 << 30;

/// A model on disk: a Hugging Face folder (float, compressed-tensors, GPTQ or AWQ), a GGUF file (of a split model its first part, with
/// the others beside it), or the state dict of an image model in a PyTorch file.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    config: ModelConfig,
    quantization: Option<QuantizationConfig>,
    source: Source,
    faults: Vec<Fault>,
}

/// Where the tensors come from.
#[derive(Debug)]
enum Source {
    Folder(Folder),
    Gguf(Box<GgufFile>),
    Pytorch(PytorchFile),
}

/// The weight of a linear or convolution module as a matrix.
#[derive(Debug, Clone, PartialEq)]
pub enum LinearWeight {
    /// Float, `[n, k]` row major.
    Float {
        /// Outputs.
        n: usize,
        /// Reduction dimension (all dimensions of the weight but the first).
        k: usize,
        /// Values.
        data: Vec<f32>,
    },
    /// Codes on a grid.
    Quantized(QuantizedMatrix),
    /// Codes on a grid whose groups are no runs of inputs (activation order): the columns of a group lie side by side here.
    Ordered {
        /// Codes, scales, zero points.
        matrix: QuantizedMatrix,
        /// Which input each column is; never the inputs as they come.
        order: ColumnOrder,
    },
}

impl LinearWeight {
    /// Codes, with the order of their columns where it is not that of the inputs.
    pub(crate) fn of_codes(matrix: QuantizedMatrix, order: Option<ColumnOrder>) -> Self {
        match order.filter(|o| !o.is_identity()) {
            None => Self::Quantized(matrix),
            Some(order) => Self::Ordered { matrix, order },
        }
    }

    /// The values, `[n, k]` row major, dequantized where they are codes.
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            LinearWeight::Float { data, .. } => data,
            LinearWeight::Quantized(q) => q.dequantize(),
            LinearWeight::Ordered { matrix, order } => order.scatter(&matrix.dequantize()),
        }
    }
}

impl Checkpoint {
    /// Opens a model and makes all static checks: headers, index, config, shapes of every tensor that the config calls
    /// for. Reads no weight.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] (exit code 3) or [`CheckpointError::Io`] (4).
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let meta = std::fs::metadata(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => CheckpointError::invalid(path, "", "no such file or folder"),
            _ => CheckpointError::io(path, "open", e),
        })?;
        if meta.is_dir() { Self::open_folder(path) } else { Self::open_file(path) }
    }

    fn open_folder(dir: &Path) -> Result<Self, CheckpointError> {
        let file = dir.join("config.json");
        let value = read_json(&file)?;
        let (mut config, mut faults) = ModelConfig::from_value(&value, &file)?;
        if let ModelConfig::Image(c) = &mut config {
            c.read_preparation(dir, &mut faults)?;
        }
        let quantization = match value.get("quantization_config").filter(|v| !v.is_null()) {
            Some(v) => Some(QuantizationConfig::from_value(v, &file)?),
            None => None,
        };
        let quantization = with_quantize_config(dir, quantization)?;
        let mut folder = Folder::open(dir)?;
        if let ModelConfig::Llama(c) = &config
            && c.experts.is_some()
        {
            folder.take_experts_apart(c)?;
        }
        faults.append(&mut folder.faults);
        let mut out = Self { path: dir.to_path_buf(), config, quantization, source: Source::Folder(folder), faults };
        let found = crate::checks::check_tensors(&out)?;
        out.faults.extend(found);
        Ok(out)
    }

    fn open_file(path: &Path) -> Result<Self, CheckpointError> {
        if path.extension().is_some_and(|e| e == "safetensors" || e == "json") {
            let problem = "expected a model folder or a GGUF file, got one file of a folder";
            let hint = "give the folder that holds config.json and the weights";
            return Err(CheckpointError::invalid(path, "", problem).with_hint(hint));
        }
        if is_pytorch(&head(path)?) {
            return Self::open_pytorch(path);
        }
        let file = GgufFile::open(path)?;
        let config = file.config().clone();
        let source = Source::Gguf(Box::new(file));
        Ok(Self { path: path.to_path_buf(), config, quantization: None, source, faults: Vec::new() })
    }

    /// A PyTorch file has no config: the architecture is told by the names and shapes of its tensors, which get the names of a
    /// Hugging Face folder where the architecture has such.
    fn open_pytorch(path: &Path) -> Result<Self, CheckpointError> {
        let mut file = PytorchFile::open(path)?;
        let found = ImageConfig::detect(&file.names(), |name| file.info(name).map(|i| i.shape));
        let (config, renamed) = found.ok_or_else(|| {
            let first = file.names().into_iter().next().unwrap_or_default();
            let problem = "expected the tensors of a ResNet or MobileNetV2 (names of torchvision or timm) or an \
                           EfficientNet-Lite0 (names of efficientnet-lite-pytorch), and no others; got something else";
            CheckpointError::invalid(path, first, problem)
                .with_hint("other PyTorch models are not known here: give a Hugging Face folder with safetensors")
        })?;
        file.rename(renamed);
        let (config, source, faults) = (ModelConfig::Image(config), Source::Pytorch(file), Vec::new());
        let mut out = Self { path: path.to_path_buf(), config, quantization: None, source, faults };
        let found = crate::checks::check_tensors(&out)?;
        out.faults.extend(found);
        Ok(out)
    }

    /// The folder or file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The architecture.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The parsed `quantization_config` (or `quantize_config.json`), if it is a folder with codes.
    pub fn quantization(&self) -> Option<&QuantizationConfig> {
        self.quantization.as_ref()
    }

    /// The names of all tensors, in file order.
    pub fn names(&self) -> Vec<String> {
        match &self.source {
            Source::Folder(f) => f.names().map(str::to_owned).collect(),
            Source::Gguf(g) => g.names(),
            Source::Pytorch(p) => p.names(),
        }
    }

    /// Type, shape and size of a tensor.
    pub fn info(&self, name: &str) -> Option<TensorInfo> {
        match &self.source {
            Source::Folder(f) => f.find(name).map(|(_, e)| e.info()),
            Source::Gguf(g) => g.info(name),
            Source::Pytorch(p) => p.info(name),
        }
    }

    /// The stored dtype of a tensor, where it is one of safetensors (not in a GGUF file).
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        match &self.source {
            Source::Folder(f) => f.find(name).map(|(_, e)| e.dtype),
            Source::Gguf(_) => None,
            Source::Pytorch(p) => p.dtype(name),
        }
    }

    /// A float tensor as f32, row major. F16 and BF16 widen exactly; GGUF blocks are dequantized.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for a tensor that is absent or no float; I/O errors.
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        match &self.source {
            Source::Folder(_) | Source::Pytorch(_) => {
                let (dtype, bytes) = self.read_stored(name)?;
                let float = dtype.float().ok_or_else(|| {
                    self.invalid(
                        name,
                        format!("not a float tensor that can be read; expected F32, F16 or BF16, got {dtype}"),
                    )
                })?;
                Ok(floats_from_bytes(&bytes, float))
            }
            Source::Gguf(g) => g.read_f32(name),
        }
    }

    /// [`Checkpoint::read_f32`] into `out`, whose memory is used again, and [`Checkpoint::sha256`]; of a folder in one reading.
    ///
    /// # Errors
    /// As these.
    pub fn read_f32_hashed(&self, name: &str, out: &mut Vec<f32>) -> Result<String, CheckpointError> {
        out.clear();
        if let Source::Folder(f) = &self.source
            && let Some((file, entry)) = f.find(name)
            && let Some(dtype) = entry.dtype.float()
        {
            let mut hash = Sha256::new();
            out.reserve(entry.shape.iter().product());
            file.read_runs(entry, RUN, |run| {
                hash.update(run);
                extend_floats(out, run, dtype);
            })?;
            return Ok(hex(hash));
        }
        *out = self.read_f32(name)?;
        self.sha256(name)
    }

    /// The stored bytes of a tensor (little endian, row major) and their dtype; only of safetensors and PyTorch files.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for a tensor that is absent; I/O errors.
    pub fn read_stored(&self, name: &str) -> Result<(Dtype, Vec<u8>), CheckpointError> {
        match &self.source {
            Source::Folder(f) => {
                let (file, entry) = f.find(name).ok_or_else(|| self.missing(name))?;
                Ok((entry.dtype, file.read(entry)?))
            }
            Source::Gguf(_) => Err(self.invalid(name, "expected a safetensors tensor, got a GGUF block type")),
            Source::Pytorch(p) => p.read(name)?.ok_or_else(|| self.missing(name)),
        }
    }

    /// SHA-256 of a tensor's bytes on disk, in hex.
    ///
    /// # Errors
    /// As [`Checkpoint::read_stored`].
    pub fn sha256(&self, name: &str) -> Result<String, CheckpointError> {
        match &self.source {
            Source::Folder(f) => {
                let (file, entry) = f.find(name).ok_or_else(|| self.missing(name))?;
                let mut hash = Sha256::new();
                file.read_runs(entry, RUN, |run| hash.update(run))?;
                Ok(hex(hash))
            }
            Source::Pytorch(_) => Ok(hex_sha256(&self.read_stored(name)?.1)),
            Source::Gguf(g) => g.sha256(name),
        }
    }

    /// SHA-256 of a tensor's values as f32, little endian, in hex.
    ///
    /// # Errors
    /// As [`Checkpoint::read_f32`].
    pub fn sha256_as_f32(&self, name: &str) -> Result<String, CheckpointError> {
        Ok(hex_sha256(&float_bytes(&self.read_f32(name)?, FloatType::F32)))
    }

    /// Whether this is a GGUF file.
    pub fn is_gguf(&self) -> bool {
        matches!(self.source, Source::Gguf(_))
    }

    /// The folder, if it is one.
    pub(crate) fn folder(&self) -> Option<&Folder> {
        match &self.source {
            Source::Folder(f) => Some(f),
            Source::Gguf(_) | Source::Pytorch(_) => None,
        }
    }

    /// The GGUF file, if it is one.
    pub(crate) fn gguf(&self) -> Option<&GgufFile> {
        match &self.source {
            Source::Gguf(g) => Some(g),
            Source::Folder(_) | Source::Pytorch(_) => None,
        }
    }

    /// The weight of a module as GGUF blocks of 32 values store it, in integer codes (`GgufGrid::to_codes`); `None` when it is
    /// stored otherwise.
    ///
    /// # Errors
    /// As [`Checkpoint::read_f32`].
    pub fn block_codes(&self, module: &str) -> Result<Option<QuantizedMatrix>, CheckpointError> {
        let name = format!("{module}.weight");
        let (Some(file), Some(info)) = (self.gguf(), self.info(&name)) else { return Ok(None) };
        let (Some((grid, blocks)), &[n, k]) = (file.read_blocks(&name)?, info.shape.as_slice()) else {
            return Ok(None);
        };
        Ok(grid.to_codes(&blocks, n, k))
    }

    /// Whether [`Checkpoint::block_codes`] gives something, told without reading the blocks.
    pub fn has_block_codes(&self, module: &str) -> bool {
        let name = format!("{module}.weight");
        let grid = self.gguf().and_then(|g| g.grid(&name));
        let shape = self.info(&name).map(|i| i.shape).unwrap_or_default();
        // One block of zeros: what decides is the grid and its fit to a row.
        grid.is_some_and(|g| shape.len() == 2 && g.to_codes(&vec![0; g.block_bytes()], 1, g.block_len()).is_some())
    }

    /// Whether the weight of a module is stored as codes of compressed-tensors, GPTQ or AWQ.
    pub fn is_quantized(&self, module: &str) -> bool {
        let packed = ["weight_packed", "qweight"].iter().any(|p| self.info(&format!("{module}.{p}")).is_some());
        packed || self.is_codes(module)
    }

    /// How a folder stores codes.
    pub(crate) fn folder_format(&self) -> FolderFormat {
        self.quantization.as_ref().map(|q| q.format).unwrap_or_default()
    }

    /// Whether a module has a bias of zeros that stands for none, as some tools write.
    pub fn has_empty_bias(&self, module: &str) -> bool {
        columns::is_zero_bias(self, module)
    }

    /// Whether a module's `weight` holds FP8 or INT8 codes, which mean nothing without their scale.
    fn is_codes(&self, module: &str) -> bool {
        matches!(self.dtype(&format!("{module}.weight")), Some(Dtype::F8E4m3 | Dtype::F8E5m2 | Dtype::I8))
    }

    /// The weight of a linear or convolution module. `lm_head` of a tied model is the embedding.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for tensors that are absent or do not fit together, [`CheckpointError::Quant`] for
    /// scales and zero points that cannot be used; I/O errors.
    pub fn linear(&self, module: &str) -> Result<LinearWeight, CheckpointError> {
        if self.is_quantized(module) {
            return self.quantized(module);
        }
        let mut name = format!("{module}.weight");
        if module == "lm_head" && matches!(&self.config, ModelConfig::Llama(c) if c.tie_word_embeddings) {
            name = "model.embed_tokens.weight".into();
        }
        let info = self.info(&name).ok_or_else(|| self.missing(&name))?;
        let (Some(&n), true) = (info.shape.first(), info.shape.len() >= 2) else {
            return Err(self.invalid(&name, format!("expected a matrix, got shape {:?}", info.shape)));
        };
        let data = self.read_f32(&name)?;
        Ok(LinearWeight::Float { n, k: info.shape[1..].iter().product(), data })
    }

    /// The bias of a module, `[n]`.
    ///
    /// # Errors
    /// As [`Checkpoint::read_f32`].
    pub fn bias(&self, module: &str) -> Result<Option<Vec<f32>>, CheckpointError> {
        let name = format!("{module}.bias");
        if self.info(&name).is_none() { Ok(None) } else { self.read_f32(&name).map(Some) }
    }

    /// Quantization of a module's input for each token, when it runs: its scheme, by the quantization config.
    pub fn dynamic_activation(&self, module: &str) -> Option<QuantArgs> {
        self.group_args(module).and_then(|(_, a)| a).filter(QuantArgs::is_dynamic)
    }

    /// How a module's input is quantized, static or dynamic.
    ///
    /// # Errors
    /// As [`Checkpoint::activation`].
    pub fn input_grid(&self, module: &str) -> Result<Option<InputGrid>, CheckpointError> {
        let fixed = self.activation(module)?.map(|(args, p)| InputGrid { args, params: Some(p) });
        Ok(fixed.or(InputGrid::dynamic(self.dynamic_activation(module))))
    }

    /// Static quantization of a module's input: scheme, scale and zero point (`input_scale`, `input_zero_point`; of NVFP4
    /// the global scale alone, `input_global_scale`).
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] when the config calls for them and they are absent or cannot be used.
    pub fn activation(&self, module: &str) -> Result<Option<(QuantArgs, QParams)>, CheckpointError> {
        let args = self.group_args(module).and_then(|(_, a)| a).filter(|a| !a.is_dynamic());
        let Some(mut args) = args else { return Ok(None) };
        let global = args.has_global_scale();
        let name = format!("{module}.{}", if global { "input_global_scale" } else { "input_scale" });
        let (dtype, bytes) =
            self.one(&name, |dtype| if global { dtype == Dtype::F32 } else { dtype.float().is_some() })?;
        let dtype = dtype.float().unwrap_or_default();
        if !global {
            args.scale_dtype = dtype;
        }
        let scale = floats_from_bytes(&bytes, dtype)[0];
        if !(scale.is_finite() && scale > 0.0) {
            return Err(self.invalid(&name, format!("expected a finite positive number, got {scale}")));
        }
        let zero = if args.mapping == Mapping::Asymmetric {
            let name = format!("{module}.input_zero_point");
            let zero = i32::from(self.one(&name, |dtype| dtype == Dtype::I8)?.1[0] as i8);
            let range = args.qtype.qmin()..=args.qtype.qmax();
            if !range.contains(&zero) {
                let problem = format!("expected {} to {}, got {zero}", range.start(), range.end());
                return Err(self.invalid(&name, problem));
            }
            zero
        } else {
            0
        };
        Ok(Some((args, QParams { scale, zero })))
    }

    /// A tensor of one element and a dtype that `allowed` accepts.
    pub(crate) fn one(&self, name: &str, allowed: impl Fn(Dtype) -> bool) -> Result<(Dtype, Vec<u8>), CheckpointError> {
        let info = self.info(name).ok_or_else(|| self.missing(name))?;
        let (dtype, bytes) = self.read_stored(name)?;
        if info.shape.iter().product::<usize>() != 1 || !allowed(dtype) {
            let problem = format!("expected one value of the scheme's dtype, got {dtype} {:?}", info.shape);
            return Err(self.invalid(name, problem));
        }
        Ok((dtype, bytes))
    }

    /// The name of a tensor of a module; scales have another one in FP8 folders of DeepSeek.
    pub fn part(&self, module: &str, suffix: &str) -> String {
        let inv = suffix == "weight_scale" && self.quantization.as_ref().is_some_and(|q| q.scale_inv);
        if inv { format!("{module}.weight_scale_inv") } else { format!("{module}.{suffix}") }
    }

    /// Weight and activation scheme of a module, by the quantization config.
    pub(crate) fn group_args(&self, module: &str) -> Option<(QuantArgs, Option<QuantArgs>)> {
        let rank = self.info(&format!("{module}.weight_shape")).and_then(|i| i.shape.first().copied());
        let class = if rank == Some(4) { "Conv2d" } else { "Linear" };
        self.quantization.as_ref()?.group_for(module, class).map(|g| (g.weights, g.activations))
    }

    fn quantized(&self, module: &str) -> Result<LinearWeight, CheckpointError> {
        let name = |suffix: &str| self.part(module, suffix);
        let Some((mut args, inputs)) = self.group_args(module) else {
            let problem = "codes of a module that quantization_config does not name; expected a scheme, got none";
            return Err(self.invalid(&name(if self.is_codes(module) { "weight" } else { "weight_packed" }), problem));
        };
        let format = self.folder_format().of_module(&args, inputs.as_ref());
        if let Some(DiskFormat::Columns(format)) = format {
            return columns::read(self, module, args, format);
        }
        let [n, k, rank] = self.quantized_shape(module, format, &args)?;
        args.scale_shape(n, k).map_err(|e| CheckpointError::invalid(&self.path, module, e.to_string()))?;
        for e in expected_tensors(format, &args, n, k, rank) {
            let name = name(e.suffix);
            let info = self.info(&name).ok_or_else(|| self.missing(&name))?;
            let float = self.dtype(&name).is_some_and(|d| d.float().is_some());
            let wanted = e.dtype.map_or("F32, F16 or BF16", Dtype::name);
            if !e.fits(&info.shape) || e.dtype.map_or(!float, |d| d.name() != info.dtype) {
                let problem = format!("expected {wanted} {:?}, got {} {:?}", e.shape, info.dtype, info.shape);
                return Err(self.invalid(&name, problem));
            }
        }
        let (dtype, bytes) = self.read_stored(&name("weight_scale"))?;
        args.scale_dtype = dtype.float().unwrap_or(args.scale_dtype);
        let scales = unpack_scales(&bytes, args.scale_dtype);
        let zeros = self.stored_zeros(module, &args)?;
        let global = match args.has_global_scale() {
            false => None,
            true => Some(self.read_f32(&name("weight_global_scale"))?[0]),
        };
        let from = name(if self.is_codes(module) { "weight" } else { "weight_packed" });
        let mut codes = match unpadded_bits(format, &args, k) {
            Some(bits) if matches!(self.source, Source::Folder(_)) => {
                let mut codes = vec![0i8; n * k];
                let mut left = &mut codes[..];
                self.read_runs(&from, RUN, |run| {
                    let (now, after) = std::mem::take(&mut left).split_at_mut(run.len() * 8 / bits);
                    unpack_words(run, bits, now);
                    left = after;
                })?;
                codes
            }
            _ => unpack_codes(format, &args, n, k, &self.read_stored(&from)?.1),
        };
        let ordered =
            self.quantization.as_ref().and_then(|q| q.group_for(module, "Linear")).is_some_and(|g| g.act_order);
        let order = match args.granularity {
            Granularity::PerGroup(len) if ordered => columns::group_order(self, &name(G_IDX), k, len)?,
            _ => None,
        };
        if let Some(order) = &order {
            codes = order.gather(&codes);
        }
        let matrix = unpack(&self.path, module, args, [n, k], codes, scales, &zeros, global)?;
        Ok(LinearWeight::of_codes(matrix, order))
    }

    /// Rows, columns and number of dimensions of a quantized weight: what `weight_shape` says, or the codes where there is
    /// none.
    fn quantized_shape(
        &self,
        module: &str,
        format: Option<DiskFormat>,
        args: &QuantArgs,
    ) -> Result<[usize; 3], CheckpointError> {
        let name = |suffix: &str| format!("{module}.{suffix}");
        let (from, shape) = match args.qtype.float() {
            None if format != Some(DiskFormat::IntQuantized) => {
                let shape = self.ints::<8>(&name("weight_shape"), Dtype::I64)?;
                let shape = shape.into_iter().map(|b| i64::from_le_bytes(b).try_into().unwrap_or(usize::MAX));
                (name("weight_shape"), shape.collect::<Vec<usize>>())
            }
            float => {
                let bits = float.map_or(8, |f| f.bits());
                let from = name(if bits == 8 { "weight" } else { "weight_packed" });
                let mut shape = self.info(&from).ok_or_else(|| self.missing(&from))?.shape;
                if shape.len() != 2 {
                    return Err(self.invalid(&from, format!("expected a matrix, got shape {shape:?}")));
                }
                shape[1] = shape[1].saturating_mul(8 / bits);
                (from, shape)
            }
        };
        // 2^48 elements: far above any tensor, and far below where word counts would overflow.
        let size = shape.iter().try_fold(1usize, |acc, &d| acc.checked_mul(d)).filter(|&s| s <= 1 << 48);
        let (Some(&n), Some(size), 2..) = (shape.first(), size, shape.len()) else {
            return Err(self.invalid(&from, format!("expected [out, in], got {shape:?}")));
        };
        let k = size.checked_div(n).unwrap_or(0);
        if n == 0 || k == 0 {
            return Err(self.invalid(&from, format!("expected at least one row and column, got {shape:?}")));
        }
        Ok([n, k, shape.len()])
    }

    fn stored_zeros(&self, module: &str, args: &QuantArgs) -> Result<StoredZeros, CheckpointError> {
        let name = format!("{module}.weight_zero_point");
        if args.mapping == Mapping::Symmetric {
            if self.info(&name).is_some() {
                let problem = "zero points of a symmetric scheme; expected no such tensor, got one";
                return Err(self.invalid(&name, problem));
            }
            return Ok(StoredZeros::None);
        }
        if self.dtype(&name) == Some(Dtype::I8) {
            return Ok(StoredZeros::Plain(self.read_stored(&name)?.1.into_iter().map(|b| b as i8).collect()));
        }
        let words = self.ints::<4>(&name, Dtype::I32)?.into_iter().map(i32::from_le_bytes).collect();
        Ok(StoredZeros::Packed(words))
    }

    fn ints<const N: usize>(&self, name: &str, dtype: Dtype) -> Result<Vec<[u8; N]>, CheckpointError> {
        let (got, bytes) = self.read_stored(name)?;
        if got != dtype {
            return Err(self.invalid(name, format!("expected {dtype}, got {got}")));
        }
        let (chunks, _) = bytes.as_chunks::<N>();
        Ok(chunks.to_vec())
    }

    /// `tokenizer.json`: the file of the folder, or rebuilt from a GGUF file's keys.
    ///
    /// # Errors
    /// I/O errors; [`CheckpointError::Invalid`] when it cannot be rebuilt.
    pub fn tokenizer_json(&self) -> Result<Option<Vec<u8>>, CheckpointError> {
        match &self.source {
            Source::Folder(_) => self.aux_file("tokenizer.json"),
            Source::Gguf(g) => g.tokenizer_json(),
            Source::Pytorch(_) => Ok(None),
        }
    }

    /// The chat template: `chat_template.jinja`, or the one in `tokenizer_config.json`, or the GGUF key.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for a template that is no text; I/O errors.
    pub fn chat_template(&self) -> Result<Option<String>, CheckpointError> {
        match &self.source {
            Source::Folder(_) => {
                if let Some(bytes) = self.aux_file("chat_template.jinja")? {
                    let file = self.path.join("chat_template.jinja");
                    let text = String::from_utf8(bytes)
                        .map_err(|_| CheckpointError::invalid(&file, "", "expected UTF-8 text, got other bytes"))?;
                    return Ok(Some(text));
                }
                let file = self.path.join("tokenizer_config.json");
                let Some(bytes) = self.aux_file("tokenizer_config.json")? else { return Ok(None) };
                chat_template_of(&parse_json(&bytes, &file)?, &file)
            }
            Source::Gguf(g) => g.chat_template(),
            Source::Pytorch(_) => Ok(None),
        }
    }

    /// A file beside the weights by its name in [`AUX_FILES`]; `None` when the model has none.
    ///
    /// # Errors
    /// As [`Checkpoint::tokenizer_json`].
    pub fn aux_file(&self, name: &str) -> Result<Option<Vec<u8>>, CheckpointError> {
        match &self.source {
            Source::Folder(_) => {
                let path = self.path.join(name);
                // The name may come from a file: it stays inside the folder.
                if Path::new(name).file_name().is_none_or(|n| n != name) || path.symlink_metadata().is_err() {
                    return Ok(None);
                }
                read_bounded(&path, MAX_AUX_BYTES).map(Some)
            }
            Source::Gguf(_) | Source::Pytorch(_) => {
                Ok(self.aux_files()?.into_iter().find(|(n, _)| n == name).map(|(_, bytes)| bytes))
            }
        }
    }

    /// All files beside the weights that the model has, with their names.
    ///
    /// # Errors
    /// As [`Checkpoint::aux_file`].
    pub fn aux_files(&self) -> Result<Vec<(String, Vec<u8>)>, CheckpointError> {
        match &self.source {
            Source::Folder(_) => {
                let mut out = Vec::new();
                for name in AUX_FILES {
                    if let Some(bytes) = self.aux_file(name)? {
                        out.push((name.to_owned(), bytes));
                    }
                }
                Ok(out)
            }
            Source::Gguf(g) => g.aux_files(),
            Source::Pytorch(_) => match &self.config {
                ModelConfig::Image(c) => Ok(c.preparation_file().into_iter().collect()),
                _ => Ok(Vec::new()),
            },
        }
    }

    /// The dtype of most weights, for the keys `dtype` and `torch_dtype`; F32 for a GGUF file.
    pub fn main_dtype(&self) -> FloatType {
        let mut bytes = [0u64; 3];
        for name in self.names() {
            let float = self.dtype(&name).and_then(Dtype::float);
            if let (Some(t), Some(info)) = (float, self.info(&name)) {
                bytes[FloatType::ALL.iter().position(|a| *a == t).unwrap_or(0)] += info.bytes;
            }
        }
        let best = (0..3).max_by_key(|&i| (bytes[i], std::cmp::Reverse(i))).unwrap_or(0);
        FloatType::ALL[best]
    }

    /// What is worth knowing or wrong, found at open and by reading every tensor: non-finite values, values so large
    /// that the bytes are most likely swapped, parameters that cannot be used.
    pub fn faults(&self) -> Vec<Fault> {
        let mut faults = self.faults.clone();
        if let Source::Gguf(g) = &self.source {
            faults.extend(g.faults());
        }
        if let Source::Pytorch(p) = &self.source {
            faults.extend(p.faults());
        }
        faults.extend(crate::checks::lint(self));
        faults
    }

    pub(crate) fn invalid(&self, field: &str, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::invalid(&self.path, field, problem)
    }

    pub(crate) fn missing(&self, name: &str) -> CheckpointError {
        self.invalid(name, "expected this tensor, got nothing")
    }
}

/// The first bytes of a file, by which its kind is told.
fn head(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    let (file, len) = open_regular(path)?;
    let mut bytes = vec![0u8; len.min(4) as usize];
    read_at(&file, path, &mut bytes, 0)?;
    Ok(bytes)
}

/// What a GPTQ folder says of its codes in `quantize_config.json`, which must be what `config.json` says where both do.
fn with_quantize_config(
    dir: &Path,
    said: Option<QuantizationConfig>,
) -> Result<Option<QuantizationConfig>, CheckpointError> {
    let file = dir.join(columns::QUANTIZE_CONFIG);
    if file.symlink_metadata().is_err() {
        return Ok(said);
    }
    let Some(config) = said else {
        return QuantizationConfig::from_quantize_config(&read_json(&file)?, &file).map(Some);
    };
    if config.format.is_gptq() {
        columns::same_settings(&config, &QuantizationConfig::from_quantize_config(&read_json(&file)?, &file)?, &file)?;
    }
    Ok(Some(config))
}

/// SHA-256 in lower-case hex.
pub fn hex_sha256(bytes: &[u8]) -> String {
    hex(Sha256::new_with_prefix(bytes))
}

/// What was hashed, in hex.
pub(crate) fn hex(hash: Sha256) -> String {
    hex_of(&hash.finalize())
}

/// Bytes in lower-case hex.
pub fn hex_of(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// The template in `tokenizer_config.json`: a string, or a list of named ones, of which `default` counts.
fn chat_template_of(value: &serde_json::Value, file: &Path) -> Result<Option<String>, CheckpointError> {
    let f = Fields::new(value, file, "")?;
    match f.get("chat_template") {
        Some(serde_json::Value::Array(list)) => {
            let named = list.iter().find(|t| t.get("name").and_then(|n| n.as_str()) == Some("default"));
            let text = named.and_then(|t| t.get("template")).and_then(|t| t.as_str());
            text.map(|t| Some(t.to_owned()))
                .ok_or_else(|| f.error("chat_template", "expected a template named \"default\", got none"))
        }
        _ => Ok(f.string("chat_template")?.map(str::to_owned)),
    }
}
