//! Weights whose codes lie in words down or across the columns, as GPTQ (AutoGPTQ, GPTQModel) and AWQ (AutoAWQ, version GEMM)
//! store them: the tensors of a module, and the way from a matrix to them and back. Not the config (see `config.rs`), not what a
//! matrix must become to fit (see `convert.rs`).
//!
//! Of a linear layer `[n, k]` (outputs, inputs) with groups of `g` inputs, or one group of all:
//! - GPTQ: `qweight` I32 `[k * bits / 32, n]`, the codes of a column (an output) one after the other, least significant bit first;
//!   `qzeros` I32 `[k / g, n * bits / 32]`, the zero points of a row likewise; `scales` F16 `[k / g, n]`; `g_idx` I32 `[k]`, the group
//!   of each input. Codes are unsigned: value `(q - zero) * scale`. Version 1 (`"checkpoint_format": "gptq"`) stores `zero - 1`, modulo
//!   the width of the field; version 2 stores `zero`. 3-bit codes straddle words.
//! - AWQ GEMM, 4 bits: `qweight` I32 `[k, n / 8]`, `qzeros` I32 `[k / g, n / 8]`, `scales` F16 `[k / g, n]`. Nibble `i` of word `c` is
//!   column `8c + [0, 2, 4, 6, 1, 3, 5, 7][i]`. The same value; zero points as they are.

mod config;
mod convert;

pub(crate) use config::{parse, same_settings, to_value};
pub use convert::{CommonScheme, convert_layer, convert_layers, finish_layer, fit_problem};

use crate::config::fields::show;
use crate::packed::{DiskFormat, Expected, G_IDX, expected_tensors};
use crate::tensor::floats_from_bytes;
use crate::{Checkpoint, CheckpointError, Dtype, Fault, LinearWeight, ModelConfig, Severity, TensorData, lint};
use dsq_quant::{
    ColumnOrder, FloatType, Mapping, QuantArgs, QuantType, QuantizedMatrix, pack_i32, pack_rows, packed_words,
    unpack_i32,
};
use std::collections::HashMap;

/// How a folder stores quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FolderFormat {
    /// compressed-tensors, in whatever format it has for the scheme.
    #[default]
    CompressedTensors,
    /// GPTQ as AutoGPTQ writes it: zero points less one.
    GptqV1,
    /// GPTQ as GPTQModel calls version 2: zero points as they are.
    GptqV2,
    /// AWQ, version GEMM.
    Awq,
}

impl FolderFormat {
    /// Its name for a person.
    pub fn name(self) -> &'static str {
        match self {
            Self::CompressedTensors => "compressed-tensors",
            Self::GptqV1 => "GPTQ v1",
            Self::GptqV2 => "GPTQ v2",
            Self::Awq => "AWQ",
        }
    }

    /// Whether it is a version of GPTQ.
    pub fn is_gptq(self) -> bool {
        matches!(self, Self::GptqV1 | Self::GptqV2)
    }

    /// The format of a module's tensors; `None` when there is none for its scheme.
    pub(crate) fn of_module(self, args: &QuantArgs, inputs: Option<&QuantArgs>) -> Option<DiskFormat> {
        match self {
            Self::CompressedTensors => DiskFormat::of(args, inputs),
            columns => Some(DiskFormat::Columns(columns)),
        }
    }
}

/// The file beside `config.json` in which GPTQ tools keep their settings.
pub(crate) const QUANTIZE_CONFIG: &str = "quantize_config.json";

/// The column of each nibble of a word of AWQ, of the eight that the word holds.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

/// The tensors of an `[n, k]` weight, `g_idx` last.
pub(crate) fn expected(format: FolderFormat, args: &QuantArgs, n: usize, k: usize) -> Vec<Expected> {
    let one = |suffix, dtype, shape: [usize; 2]| Expected { suffix, dtype, shape: shape.to_vec(), before: None };
    let groups = args.scale_shape(n, k).map_or(0, |[_, groups]| groups);
    let bits = args.qtype.bits();
    let codes = match format {
        FolderFormat::Awq => [k, packed_words(n, bits)],
        _ => [packed_words(k, bits), n],
    };
    let mut out = vec![
        one("qweight", Some(Dtype::I32), codes),
        one("qzeros", Some(Dtype::I32), [groups, packed_words(n, bits)]),
        one("scales", None, [groups, n]),
    ];
    if format.is_gptq() {
        out.push(Expected { suffix: "g_idx", dtype: Some(Dtype::I32), shape: vec![k], before: None });
    }
    out
}

/// Why no words hold an `[n, k]` matrix of codes of `bits`; `None` when they do.
pub(crate) fn shape_problem(format: FolderFormat, bits: usize, n: usize, k: usize) -> Option<String> {
    let odd = |d: usize| !(d * bits).is_multiple_of(32);
    let multiple = if bits == 3 { 32 } else { 32 / bits };
    let name = format.name();
    match format {
        FolderFormat::CompressedTensors => None,
        _ if odd(n) => Some(format!("{name} has whole words; expected a multiple of {multiple} outputs, got {n}")),
        FolderFormat::GptqV1 | FolderFormat::GptqV2 if odd(k) => {
            Some(format!("{name} has whole words; expected a multiple of {multiple} inputs, got {k}"))
        }
        _ => None,
    }
}

/// One tensor of a matrix that [`fit_problem`] let pass; `order` has the group of each input where groups are no runs of them.
pub(crate) fn stored(format: FolderFormat, matrix: &QuantizedMatrix, order: Option<&[i32]>, e: Expected) -> TensorData {
    let (n, k, bits) = (matrix.n, matrix.k, matrix.args.qtype.bits());
    let groups = matrix.scales.len().checked_div(n).unwrap_or(0);
    let shape = e.shape;
    let data = match (e.suffix, format) {
        ("qweight", FolderFormat::Awq) => awq_words(&transposed(&matrix.codes, n, k)),
        ("qweight", _) => transposed(&pack_rows(&matrix.codes, k, bits), n, packed_words(k, bits)),
        ("qzeros", _) => {
            let zeros = match matrix.args.mapping {
                Mapping::Symmetric => vec![0; n * groups],
                Mapping::Asymmetric => transposed(&matrix.zeros, n, groups),
            };
            match format {
                FolderFormat::Awq => awq_words(&zeros),
                FolderFormat::GptqV1 => {
                    // One less, in the field: the smallest becomes the largest.
                    let qmin = matrix.args.qtype.qmin() as i8;
                    let less = zeros.iter().map(|&z| if z == qmin { matrix.args.qtype.qmax() as i8 } else { z - 1 });
                    pack_rows(&less.collect::<Vec<i8>>(), n, bits)
                }
                _ => pack_rows(&zeros, n, bits),
            }
        }
        ("g_idx", _) => match order {
            Some(groups) => groups.to_vec(),
            None => (0..k).map(|i| (i / matrix.group_len().max(1)) as i32).collect(),
        },
        (_, _) => {
            let data = transposed(&matrix.scales, n, groups);
            return TensorData::Float { shape, data, dtype: matrix.args.scale_dtype };
        }
    };
    TensorData::I32 { shape, data }
}

/// The rows of a row-major matrix of `rows` x `columns` as columns.
fn transposed<T: Copy>(data: &[T], rows: usize, columns: usize) -> Vec<T> {
    (0..columns).flat_map(|c| (0..rows).map(move |r| data[r * columns + c])).collect()
}

/// Eight signed codes, neighbours in a row, in each word.
fn awq_words(codes: &[i8]) -> Vec<i32> {
    let reorder = |eight: &[i8]| pack_i32(&AWQ_ORDER.map(|i| eight[i]), 4)[0];
    codes.chunks_exact(8).map(reorder).collect()
}

/// The signed codes of words that [`awq_words`] made.
fn awq_codes(words: &[i32]) -> Vec<i8> {
    let mut out = vec![0; words.len() * 8];
    for (word, eight) in words.iter().zip(out.chunks_exact_mut(8)) {
        for (code, at) in unpack_i32(std::slice::from_ref(word), 4, 8).into_iter().zip(AWQ_ORDER) {
            eight[at] = code;
        }
    }
    out
}

/// The signed zero points, `[groups, n]`, of `qzeros`.
fn zeros_of(format: FolderFormat, qtype: QuantType, n: usize, words: &[i32]) -> Vec<i8> {
    if format == FolderFormat::Awq {
        return awq_codes(words);
    }
    let per_row = packed_words(n, qtype.bits()).max(1);
    let mut zeros: Vec<i8> = words.chunks(per_row).flat_map(|row| unpack_i32(row, qtype.bits(), n)).collect();
    if format == FolderFormat::GptqV1 {
        let (qmin, qmax) = (qtype.qmin() as i8, qtype.qmax() as i8);
        zeros.iter_mut().for_each(|z| *z = if *z == qmax { qmin } else { *z + 1 });
    }
    zeros
}

/// The weight of a module: codes, of groups in activation order with the order of their columns. A group whose scale is 0 gets codes
/// of 0 on another scale: the same values.
pub(crate) fn read(
    ckpt: &Checkpoint,
    module: &str,
    mut args: QuantArgs,
    format: FolderFormat,
) -> Result<LinearWeight, CheckpointError> {
    let name = |suffix: &str| format!("{module}.{suffix}");
    let [n, k] = shape_of(ckpt, module, &args, format)?;
    args.scale_shape(n, k).map_err(|e| CheckpointError::invalid(ckpt.path(), module, e.to_string()))?;
    let bits = args.qtype.bits();
    for e in expected_tensors(Some(DiskFormat::Columns(format)), &args, n, k, 2) {
        let Some(info) = ckpt.info(&name(e.suffix)) else {
            if e.suffix == "g_idx" {
                continue;
            }
            return Err(ckpt.missing(&name(e.suffix)));
        };
        if info.shape != e.shape {
            let problem = format!("expected shape {:?}, got {:?}", e.shape, info.shape);
            return Err(ckpt.invalid(&name(e.suffix), problem));
        }
    }
    let (dtype, bytes) = ckpt.read_stored(&name("scales"))?;
    args.scale_dtype = dtype
        .float()
        .ok_or_else(|| ckpt.invalid(&name("scales"), format!("expected F32, F16 or BF16, got {dtype}")))?;
    let mut scales = floats_from_bytes(&bytes, args.scale_dtype);
    let groups = scales.len() / n;
    scales = transposed(&scales, groups, n);
    let zeros = zeros_of(format, args.qtype, n, &words(ckpt, &name("qzeros"))?);
    let mut zeros = transposed(&zeros, groups, n);
    let packed = words(ckpt, &name("qweight"))?;
    let mut codes = match format {
        FolderFormat::Awq => transposed(&awq_codes(&packed), k, n),
        _ => {
            let per_row = packed_words(k, bits);
            transposed(&packed, per_row, n).chunks(per_row.max(1)).flat_map(|row| unpack_i32(row, bits, k)).collect()
        }
    };
    let group_len = k / groups.max(1);
    let order = group_order(ckpt, &name("g_idx"), k, group_len)?;
    if let Some(order) = &order {
        codes = order.gather(&codes);
    }
    if scales.contains(&0.0) {
        for (i, code) in codes.iter_mut().enumerate() {
            let at = i / k * groups + i % k / group_len;
            if scales[at] == 0.0 {
                *code = zeros[at];
            }
        }
        scales.iter_mut().filter(|s| **s == 0.0).for_each(|s| *s = args.scale_dtype.epsilon());
    }
    // AWQ has no word for "symmetric": a layer whose zero points all stand for 0 is.
    if format == FolderFormat::Awq && zeros.iter().all(|&z| z == 0) {
        args.mapping = Mapping::Symmetric;
    }
    if args.mapping == Mapping::Symmetric {
        zeros.clear();
    }
    let matrix = QuantizedMatrix { args, n, k, codes, scales, zeros, global_scale: None };
    matrix.validate().map_err(|e| CheckpointError::quant(ckpt.path(), module, e))?;
    Ok(LinearWeight::of_codes(matrix, order))
}

/// Outputs and inputs, by `qweight`.
fn shape_of(
    ckpt: &Checkpoint,
    module: &str,
    args: &QuantArgs,
    format: FolderFormat,
) -> Result<[usize; 2], CheckpointError> {
    let name = format!("{module}.qweight");
    let shape = ckpt.info(&name).ok_or_else(|| ckpt.missing(&name))?.shape;
    let bits = args.qtype.bits();
    match (shape.as_slice(), format) {
        (&[k, words], FolderFormat::Awq) if k > 0 && words > 0 => Ok([words * 32 / bits, k]),
        (&[words, n], _) if n > 0 && words > 0 && (words * 32).is_multiple_of(bits) => Ok([n, words * 32 / bits]),
        _ => Err(ckpt.invalid(&name, format!("expected a matrix of words of {bits}-bit codes, got {shape:?}"))),
    }
}

fn words(ckpt: &Checkpoint, name: &str) -> Result<Vec<i32>, CheckpointError> {
    let (dtype, bytes) = ckpt.read_stored(name)?;
    if dtype != Dtype::I32 {
        return Err(ckpt.invalid(name, format!("expected I32, got {dtype}")));
    }
    Ok(bytes.as_chunks::<4>().0.iter().map(|&b| i32::from_le_bytes(b)).collect())
}

/// The order in which the columns of a group lie side by side, where the list `name` (the group of each input) says another than
/// `i / group_len`; `None` where groups are runs of inputs, or there is no list.
///
/// # Errors
/// [`CheckpointError::Invalid`] for groups that are not there or do not have `group_len` inputs each.
pub(crate) fn group_order(
    ckpt: &Checkpoint,
    name: &str,
    k: usize,
    group_len: usize,
) -> Result<Option<ColumnOrder>, CheckpointError> {
    let Some(info) = ckpt.info(name) else { return Ok(None) };
    if info.shape != [k] {
        return Err(ckpt.invalid(name, format!("expected shape [{k}], got {:?}", info.shape)));
    }
    let groups = k / group_len.max(1);
    let mut count = vec![0; groups];
    let mut group_of = Vec::with_capacity(k);
    for (i, g) in words(ckpt, name)?.into_iter().enumerate() {
        let group = usize::try_from(g).ok().filter(|&g| g < groups);
        let group = group.ok_or_else(|| {
            ckpt.invalid(name, format!("input {i}: expected a group from 0 to {}, got {g}", groups.saturating_sub(1)))
        })?;
        count[group] += 1;
        group_of.push(group);
    }
    if let Some(g) = count.iter().position(|&c| c != group_len) {
        return Err(ckpt.invalid(name, format!("group {g}: expected {group_len} inputs, got {}", count[g])));
    }
    Ok(Some(ColumnOrder::from_groups(&group_of)).filter(|order| !order.is_identity()))
}

/// Whether a module's bias is there and all zeros, as AutoGPTQ wrote one for layers that have none.
pub(crate) fn is_zero_bias(ckpt: &Checkpoint, module: &str) -> bool {
    let columns = ckpt.quantization().is_some_and(|q| q.format != FolderFormat::CompressedTensors);
    let bias = || ckpt.read_f32(&format!("{module}.bias"));
    let wanted = matches!(ckpt.config(), ModelConfig::Llama(c) if c.has_bias(module));
    columns && !wanted && bias().is_ok_and(|b| !b.is_empty() && b.iter().all(|&x| x == 0.0))
}

/// What zero points and group indices say beyond their shapes, which were checked: small tensors, read when a model is opened.
///
/// # Errors
/// [`CheckpointError::Invalid`]: zero points of a symmetric file that are not the middle code, with the version whose words they
/// are; groups out of order in a file that says it has none.
pub(crate) fn check_values(ckpt: &Checkpoint) -> Result<Vec<Fault>, CheckpointError> {
    let mut faults = Vec::new();
    let Some(q) = ckpt.quantization() else { return Ok(faults) };
    let columns = q.format != FolderFormat::CompressedTensors;
    let (mut ordered, mut wrapped, mut first) = (0, 0usize, HashMap::new());
    let (mut listed, mut unlisted) = (0, Vec::new());
    for spec in ckpt.config().linears() {
        let Some(group) = q.group_for(&spec.module, "Linear") else { continue };
        let (args, n, k) = (group.weights, spec.n(), spec.k());
        let groups = args.scale_shape(n, k).map_or(1, |[_, groups]| groups);
        let name = format!("{}.{}", spec.module, if columns { "g_idx" } else { G_IDX });
        if !columns && group.act_order && spec.shape.len() == 2 && groups > 1 {
            match ckpt.info(&name) {
                Some(_) => listed += 1,
                None => unlisted.push(spec.module.clone()),
            }
        }
        if (columns || group.act_order) && group_order(ckpt, &name, k, k / groups)?.is_some() {
            if !group.act_order {
                let problem = "desc_act is false; expected input i in group i / group_size, got another order";
                return Err(ckpt.invalid(&name, problem));
            }
            ordered += 1;
            first.entry("order").or_insert(name);
        }
        if !columns {
            continue;
        }
        let qzeros = format!("{}.qzeros", spec.module);
        let words = words(ckpt, &qzeros)?;
        let zeros = zeros_of(q.format, args.qtype, n, &words);
        let symmetric = args.mapping == Mapping::Symmetric;
        if let Some(i) = zeros.iter().position(|&z| z != 0).filter(|_| symmetric) {
            let middle = -args.qtype.qmin();
            let got = i32::from(zeros[i]) + middle;
            let word = words[i / n * packed_words(n, args.qtype.bits())] as u32;
            let mut problem = format!(
                "sym is true and the zero points are those of {}; expected {middle} everywhere, got {got} (group {}, output {}; \
                 first word 0x{word:08x})",
                q.format.name(),
                i / n,
                i % n
            );
            let other = if q.format == FolderFormat::GptqV1 { FolderFormat::GptqV2 } else { FolderFormat::GptqV1 };
            if zeros_of(other, args.qtype, n, &words).iter().all(|&z| z == 0) {
                problem.push_str(&format!(": these words are of {}", other.name()));
            }
            return Err(ckpt
                .invalid(&qzeros, problem)
                .with_hint("checkpoint_format \"gptq\" (v1) stores the zero point less one, \"gptq_v2\" as it is"));
        }
        if q.format == FolderFormat::GptqV1 && !symmetric {
            let smallest = zeros.iter().filter(|&&z| i32::from(z) == args.qtype.qmin()).count();
            if smallest > 0 {
                wrapped += smallest;
                first.entry("zero").or_insert(qzeros);
            }
        }
    }
    if let Some(name) = first.get("order") {
        let problem = format!(
            "{ordered} layers have groups in activation order (desc_act, actorder): their inputs are gathered before each product"
        );
        faults.push(Fault::new(Severity::Note, ckpt.path(), name, problem));
    }
    // Tools leave the list out of a model whose groups are all runs of inputs; not out of some layers.
    if listed > 0 && !unlisted.is_empty() {
        let problem = format!(
            "actorder is \"group\" and {listed} layers have {G_IDX}; expected it in all, got none in {}, read as runs of inputs: {}",
            unlisted.len(),
            lint::some_of(&unlisted)
        );
        faults.push(Fault::new(Severity::Warning, ckpt.path(), format!("{}.{G_IDX}", unlisted[0]), problem));
    }
    if let Some(name) = first.get("zero") {
        let problem = format!(
            "{wrapped} zero points are stored as 0 - 1 (all ones), read here as 0; tools that add one to whole words carry into the neighbour"
        );
        faults.push(Fault::new(Severity::Warning, ckpt.path(), name, problem));
    }
    Ok(faults)
}

/// What a shape that is not the expected one may mean: the codes of another width.
pub(crate) fn other_bits(
    format: FolderFormat,
    args: &QuantArgs,
    n: usize,
    k: usize,
    e: &Expected,
    got: &[usize],
) -> String {
    if format == FolderFormat::CompressedTensors {
        return String::new();
    }
    let said = args.qtype.bits();
    let other = QuantType::INTS.into_iter().filter(|q| q.bits() != said).find(|&qtype| {
        let args = QuantArgs { qtype, ..*args };
        expected(format, &args, n, k).iter().any(|x| x.suffix == e.suffix && x.shape == got)
    });
    other.map_or(String::new(), |q| format!(": the shape of {} bits, where the config says {said}", q.bits()))
}

/// A value of a config in a message.
fn shown(v: Option<&serde_json::Value>) -> String {
    v.map_or("nothing".into(), show)
}

/// The dtype of scales in these formats.
pub(crate) const SCALES: FloatType = FloatType::F16;

#[cfg(test)]
mod tests;
