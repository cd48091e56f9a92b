//! The tensors of one quantized module, format by format: which there are, and the way from a matrix to them and back. Not
//! the config (see `quantization.rs`), not the files.
//!
//! - `pack-quantized` (INT): `weight_packed` I32 `[n, words]`, `weight_scale`, `weight_zero_point` if asymmetric,
//!   `weight_shape` I64; of groups in activation order (`"actorder": "group"`) also `weight_g_idx` I32 `[k]`, the group of each input. A convolution `[out, in, kh, kw]` is stored as the matrix `[out, in * kh * kw]` with all four numbers
//!   in `weight_shape`; the Python package packs linear layers only.
//! - `int-quantized` (INT behind activations that are quantized too): `weight` I8 `[n, k]`, a code in each byte,
//!   `weight_scale`, `weight_zero_point` I8 of the shape of the scales if asymmetric.
//! - `float-quantized` (FP8 E4M3): `weight` F8_E4M3 `[n, k]`, `weight_scale` `[1]`, `[n, 1]` or the blocks down and across.
//! - `nvfp4-pack-quantized`: `weight_packed` U8 `[n, k / 2]`, the even column in the low nibble, `weight_scale` F8_E4M3
//!   `[n, k / 16]`, `weight_global_scale` F32 `[1]`, a divisor.
//! - `mxfp4-pack-quantized`: `weight_packed` as above, `weight_scale` U8 `[n, k / 32]`, the biased exponents.
//! - GPTQ and AWQ: see `columns/mod.rs`.

use crate::columns::{self, FolderFormat};
use crate::safetensors::RUN;
use crate::tensor::flat;
use crate::{CheckpointError, Dtype, NamedTensor, TensorData};
use dsq_quant::{
    ColumnOrder, FloatType, Granularity, Mapping, MiniFloat, QuantArgs, QuantType, QuantizedMatrix, e8m0_decode,
    e8m0_encode, pack_i32, pack_rows, packed_words, unpack_i32,
};
use std::path::Path;

/// A disk format of a quantized module: one of compressed-tensors, or that of a GPTQ or AWQ folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DiskFormat {
    PackQuantized,
    IntQuantized,
    FloatQuantized,
    Nvfp4,
    Mxfp4,
    /// Not compressed-tensors.
    Columns(FolderFormat),
}

impl DiskFormat {
    /// The format of weights and what their inputs are quantized to; `None` when compressed-tensors has none for it. Servers
    /// take packed integers for weights with float inputs, whatever the config says of these.
    pub(crate) fn of(args: &QuantArgs, inputs: Option<&QuantArgs>) -> Option<Self> {
        // Static asymmetric inputs are those of dsq's own image models.
        let integers = inputs.is_some_and(|a| a.is_dynamic() || a.mapping == Mapping::Symmetric);
        match (args.qtype, args.scale_dtype) {
            (QuantType::Int2 | QuantType::Int3 | QuantType::Int4 | QuantType::Int8, _) if integers => {
                Some(Self::IntQuantized)
            }
            (QuantType::Int2 | QuantType::Int3 | QuantType::Int4 | QuantType::Int8, _) => Some(Self::PackQuantized),
            (QuantType::Fp8E4M3, _) => Some(Self::FloatQuantized),
            (QuantType::Fp4E2M1, FloatType::F8E8M0) => Some(Self::Mxfp4),
            (QuantType::Fp4E2M1, _) => Some(Self::Nvfp4),
            (QuantType::Fp8E5M2, _) => None,
        }
    }

    /// Its name in a config.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::PackQuantized => "pack-quantized",
            Self::IntQuantized => "int-quantized",
            Self::FloatQuantized => "float-quantized",
            Self::Nvfp4 => "nvfp4-pack-quantized",
            Self::Mxfp4 => "mxfp4-pack-quantized",
            Self::Columns(format) => format.name(),
        }
    }

    /// Whether a config may give this name to the format. What compressed-tensors calls FP8 weights when nothing says
    /// otherwise is `naive-quantized`; the tensors are those of `float-quantized`.
    pub(crate) fn is_called(self, name: &str) -> bool {
        name == self.name() || (self == Self::FloatQuantized && name == "naive-quantized")
    }
}

/// A tensor that a quantized module must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Expected {
    /// What follows the module's name and a dot.
    pub suffix: &'static str,
    /// Its dtype; `None`: F32, F16 or BF16.
    pub dtype: Option<Dtype>,
    pub shape: Vec<usize>,
    /// Another shape that is read: that of words before 2026.
    pub before: Option<Vec<usize>>,
}

impl Expected {
    /// Whether a tensor of this shape can be read.
    pub(crate) fn fits(&self, shape: &[usize]) -> bool {
        shape == self.shape || self.before.as_deref() == Some(shape)
    }
}

/// Every part of a module's name that a quantized weight may have on the disk, in any format.
pub(crate) const WEIGHT_PARTS: [&str; 11] = [
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
];

/// The tensors of an `[n, k]` weight of `rank` dimensions (2 for a linear layer). The shape was checked against `args`.
pub(crate) fn expected_tensors(
    format: Option<DiskFormat>,
    args: &QuantArgs,
    n: usize,
    k: usize,
    rank: usize,
) -> Vec<Expected> {
    let one = |suffix, dtype, shape: &[usize]| Expected { suffix, dtype, shape: shape.to_vec(), before: None };
    let scale = stored_scale_shape(args, n, k);
    match format {
        Some(DiskFormat::IntQuantized) => {
            let mut out = vec![one("weight", Some(Dtype::I8), &[n, k]), one("weight_scale", None, &scale)];
            if args.mapping == Mapping::Asymmetric {
                out.push(one("weight_zero_point", Some(Dtype::I8), &scale));
            }
            out
        }
        Some(DiskFormat::PackQuantized) => {
            let bits = args.qtype.bits();
            let codes = one("weight_packed", Some(Dtype::I32), &[n, packed_words(k, bits)]);
            let mut out = vec![
                Expected { before: Some(vec![n, words_before(k, bits)]), ..codes },
                one("weight_scale", None, &scale),
                one("weight_shape", Some(Dtype::I64), &[rank]),
            ];
            if args.mapping == Mapping::Asymmetric {
                let (dtype, shape) = stored_zero_shape(args, n, k);
                let before = (dtype == Dtype::I32).then(|| vec![words_before(n, bits), shape[1]]);
                out.push(Expected { before, ..one("weight_zero_point", Some(dtype), &shape) });
            }
            out
        }
        Some(DiskFormat::FloatQuantized) => {
            vec![one("weight", Some(Dtype::F8E4m3), &[n, k]), one("weight_scale", None, &scale)]
        }
        Some(DiskFormat::Nvfp4) => vec![
            one("weight_packed", Some(Dtype::U8), &[n, k / 2]),
            one("weight_scale", Some(Dtype::F8E4m3), &scale),
            one("weight_global_scale", Some(Dtype::F32), &[1]),
        ],
        Some(DiskFormat::Mxfp4) => {
            vec![one("weight_packed", Some(Dtype::U8), &[n, k / 2]), one("weight_scale", Some(Dtype::U8), &scale)]
        }
        Some(DiskFormat::Columns(format)) => columns::expected(format, args, n, k),
        None => Vec::new(),
    }
}

/// The name of the list of groups in a compressed-tensors folder.
pub(crate) const G_IDX: &str = "weight_g_idx";

/// The group of each input.
fn group_of_inputs(order: &ColumnOrder, matrix: &QuantizedMatrix) -> Vec<i32> {
    order.groups(matrix.group_len()).into_iter().map(|g| g as i32).collect()
}

/// The tensors that store `matrix` of `module` in `format`, whose weight has `shape` (its first dimension `n`, the others `k`). Its
/// columns are the inputs in `order`, where there is one. None without a format.
pub(crate) fn pack(
    module: &str,
    shape: &[usize],
    matrix: &QuantizedMatrix,
    order: Option<&ColumnOrder>,
    format: Option<DiskFormat>,
) -> Vec<NamedTensor> {
    // Files hold codes in the order of the inputs.
    let placed = order.map(|o| QuantizedMatrix { codes: o.scatter(&matrix.codes), ..matrix.clone() });
    let matrix = placed.as_ref().unwrap_or(matrix);
    let groups = order.map(|o| group_of_inputs(o, matrix));
    let mut out: Vec<NamedTensor> = expected_tensors(format, &matrix.args, matrix.n, matrix.k, shape.len())
        .into_iter()
        .map(|e| NamedTensor {
            name: format!("{module}.{}", e.suffix),
            data: match format {
                Some(DiskFormat::Columns(format)) => columns::stored(format, matrix, groups.as_deref(), e),
                _ => stored(matrix, shape, e),
            },
        })
        .collect();
    if let (Some(DiskFormat::PackQuantized | DiskFormat::IntQuantized), Some(data)) = (format, groups) {
        let data = TensorData::I32 { shape: vec![matrix.k], data };
        out.push(NamedTensor { name: format!("{module}.{G_IDX}"), data });
    }
    // Zero points last, as they always were.
    out.sort_by_key(|t| t.name.ends_with("weight_zero_point"));
    out
}

fn stored(matrix: &QuantizedMatrix, weight_shape: &[usize], e: Expected) -> TensorData {
    let Expected { suffix, dtype, shape, .. } = e;
    let bytes = |codes: &[i8]| codes.iter().map(|&c| c as u8).collect::<Vec<u8>>();
    match (suffix, dtype) {
        ("weight", Some(Dtype::I8)) => TensorData::I8 { shape, data: matrix.codes.clone() },
        ("weight", _) => TensorData::Raw { shape, bytes: bytes(&matrix.codes), dtype: Dtype::F8E4m3 },
        ("weight_packed", Some(Dtype::U8)) => {
            // k is a multiple of the group, so a pair of codes never straddles rows.
            let bytes = bytes(&matrix.codes).chunks(2).map(|pair| pair[0] & 15 | pair[pair.len() - 1] << 4).collect();
            TensorData::Raw { shape, bytes, dtype: Dtype::U8 }
        }
        ("weight_packed", _) => {
            // Some rows at a time, so that their words are in the cache when they become bytes.
            let (k, bits) = (matrix.k, matrix.args.qtype.bits());
            let mut bytes = Vec::with_capacity(4 * shape.iter().product::<usize>());
            for rows in matrix.codes.chunks((RUN / k.max(1)).max(1) * k.max(1)) {
                bytes.extend(flat(pack_rows(rows, k, bits).into_iter().map(i32::to_le_bytes)));
            }
            TensorData::Raw { shape, bytes, dtype: Dtype::I32 }
        }
        ("weight_scale", Some(Dtype::U8)) => {
            TensorData::Raw { shape, bytes: matrix.scales.iter().map(|&s| e8m0_encode(s)).collect(), dtype: Dtype::U8 }
        }
        ("weight_scale", _) => TensorData::Float { shape, data: matrix.scales.clone(), dtype: matrix.args.scale_dtype },
        ("weight_global_scale", _) => {
            TensorData::Float { shape, data: matrix.global_scale.into_iter().collect(), dtype: FloatType::F32 }
        }
        ("weight_zero_point", Some(Dtype::I8)) => TensorData::I8 { shape, data: matrix.zeros.clone() },
        ("weight_zero_point", _) => pack_zeros(matrix),
        (_, _) => TensorData::I64 { shape, data: weight_shape.iter().map(|&d| d as i64).collect() },
    }
}

/// The width of codes of which whole ones fill a word and whole words a row, so that a matrix is one stream of codes; `None` where it
/// is not.
pub(crate) fn unpadded_bits(format: Option<DiskFormat>, args: &QuantArgs, k: usize) -> Option<usize> {
    let bits = args.qtype.bits();
    let whole = [4, 8].contains(&bits) && (k * bits).is_multiple_of(32);
    (format == Some(DiskFormat::PackQuantized) && args.qtype.float().is_none() && whole).then_some(bits)
}

/// Codes out of the bytes of `weight` or `weight_packed`.
pub(crate) fn unpack_codes(format: Option<DiskFormat>, args: &QuantArgs, n: usize, k: usize, bytes: &[u8]) -> Vec<i8> {
    match args.qtype.float() {
        None if format == Some(DiskFormat::IntQuantized) => bytes.iter().map(|&b| b as i8).collect(),
        Some(MiniFloat::E2M1) => bytes.iter().flat_map(|&b| [(b & 15) as i8, (b >> 4) as i8]).collect(),
        Some(_) => bytes.iter().map(|&b| b as i8).collect(),
        None => {
            let words: Vec<i32> = bytes.as_chunks::<4>().0.iter().map(|&b| i32::from_le_bytes(b)).collect();
            let bits = args.qtype.bits();
            let mut codes = Vec::with_capacity(n * k);
            let per_row = (words.len() / n.max(1)).max(1);
            words.chunks(per_row).for_each(|row| codes.extend(row_codes(row, bits, k)));
            codes
        }
    }
}

/// Words of a row of `len` codes as compressed-tensors wrote them before 2026, under the same format name: only whole codes lie in a
/// word, ten of 3 bits. Of the other widths both ways are one.
fn words_before(len: usize, bits: usize) -> usize {
    len.div_ceil(32 / bits)
}

/// The `len` codes of a row in the words of today, or, where their number says so, in those of before. Some lengths below 160 take as
/// many words in both ways, none of them a multiple of 32; then those of today are meant.
fn row_codes(words: &[i32], bits: usize, len: usize) -> Vec<i8> {
    if words.len() == packed_words(len, bits) {
        return unpack_i32(words, bits, len);
    }
    let whole = 32 / bits;
    words.iter().enumerate().flat_map(|(i, w)| unpack_i32(&[*w], bits, whole.min(len - i * whole))).collect()
}

/// Scales out of the bytes of `weight_scale`, of MX groups too.
pub(crate) fn unpack_scales(bytes: &[u8], dtype: FloatType) -> Vec<f32> {
    match dtype {
        FloatType::F8E8M0 => bytes.iter().map(|&b| e8m0_decode(b)).collect(),
        _ => crate::tensor::floats_from_bytes(bytes, dtype),
    }
}

/// Zero points packed along the rows, `[ceil(n * bits / 32), groups]`.
fn pack_zeros(matrix: &QuantizedMatrix) -> TensorData {
    let bits = matrix.args.qtype.bits();
    let n = matrix.n;
    let groups = matrix.zeros.len().checked_div(n).unwrap_or(0);
    let rows = packed_words(n, bits);
    let mut words = vec![0i32; rows * groups];
    for g in 0..groups {
        let column: Vec<i8> = (0..n).map(|r| matrix.zeros[r * groups + g]).collect();
        for (r, w) in pack_i32(&column, bits).into_iter().enumerate() {
            words[r * groups + g] = w;
        }
    }
    TensorData::I32 { shape: vec![rows, groups], data: words }
}

/// The shape of `weight_scale`: `[1]`, `[n, 1]`, `[n, k / g]`, or the blocks down and across.
fn stored_scale_shape(args: &QuantArgs, n: usize, k: usize) -> Vec<usize> {
    match args.granularity {
        Granularity::PerTensor => vec![1],
        Granularity::PerChannel | Granularity::PerToken => vec![n, 1],
        Granularity::PerGroup(g) | Granularity::PerTokenGroup(g) => vec![n, k.checked_div(g).unwrap_or(0)],
        Granularity::PerBlock(r, c) => vec![n.div_ceil(r.max(1)), k.div_ceil(c.max(1))],
    }
}

/// Where the stored zero points of an `[n, k]` matrix lie: dtype and shape.
fn stored_zero_shape(args: &QuantArgs, n: usize, k: usize) -> (Dtype, Vec<usize>) {
    match args.granularity {
        Granularity::PerTensor => (Dtype::I8, vec![1]),
        _ => {
            let scale = stored_scale_shape(args, n, k);
            (Dtype::I32, vec![packed_words(n, args.qtype.bits()), scale[1]])
        }
    }
}

/// Puts a matrix together from stored parts; `zeros` is empty when symmetric. Lengths were checked by the caller.
#[allow(clippy::too_many_arguments)]
pub(crate) fn unpack(
    file: &Path,
    module: &str,
    args: QuantArgs,
    [n, k]: [usize; 2],
    codes: Vec<i8>,
    scales: Vec<f32>,
    zeros: &StoredZeros,
    global_scale: Option<f32>,
) -> Result<QuantizedMatrix, CheckpointError> {
    let bits = args.qtype.bits();
    let zeros = match zeros {
        StoredZeros::None => Vec::new(),
        StoredZeros::Plain(zeros) => zeros.clone(),
        StoredZeros::Packed(words) => {
            let groups = scales.len().checked_div(n).unwrap_or(0);
            let mut out = vec![0i8; n * groups];
            for g in 0..groups {
                let column: Vec<i32> = words.iter().skip(g).step_by(groups).copied().collect();
                for (r, z) in row_codes(&column, bits, n).into_iter().enumerate() {
                    out[r * groups + g] = z;
                }
            }
            out
        }
    };
    let matrix = QuantizedMatrix { args, n, k, codes, scales, zeros, global_scale };
    matrix.validate().map_err(|e| CheckpointError::quant(file, module, e))?;
    Ok(matrix)
}

/// Zero points as stored.
pub(crate) enum StoredZeros {
    /// Symmetric.
    None,
    /// One in each byte: of a whole tensor, or unpacked.
    Plain(Vec<i8>),
    /// Packed along the rows.
    Packed(Vec<i32>),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SafetensorsFile;

    type Case = serde_json::Value;

    fn golden(name: &str) -> (SafetensorsFile, Vec<Case>) {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let file = SafetensorsFile::open(&golden.join(format!("{name}.safetensors"))).unwrap();
        let cases: Vec<Case> =
            serde_json::from_slice(&std::fs::read(golden.join(format!("{name}.json"))).unwrap()).unwrap();
        assert!(cases.len() > 50, "{name}: {}", cases.len());
        (file, cases)
    }

    fn text<'a>(case: &'a Case, key: &str) -> &'a str {
        case[key].as_str().unwrap_or_default()
    }

    /// The weights of a case, and its scheme.
    fn read(file: &SafetensorsFile, case: &Case) -> (Vec<f32>, usize, usize, QuantArgs) {
        let [n, k] = [0, 1].map(|i| case["shape"][i].as_u64().unwrap() as usize);
        let granularity = match text(case, "strategy") {
            "group" => Granularity::PerGroup(case["group_size"].as_u64().unwrap() as usize),
            "channel" => Granularity::PerChannel,
            "tensor" => Granularity::PerTensor,
            "block" => Granularity::PerBlock(128, 128),
            _ => Granularity::PerGroup(0),
        };
        let args = match text(case, "scheme") {
            "nvfp4" => QuantArgs::nvfp4(),
            "mxfp4" => QuantArgs::mxfp4(),
            "fp8" => QuantArgs::fp8(granularity, text(case, "scale_dtype").parse().unwrap()),
            _ => {
                let bits = case["num_bits"].as_u64().unwrap_or(4) as usize;
                let qtype = QuantType::INTS.into_iter().find(|q| q.bits() == bits).unwrap();
                let mapping = if case["symmetric"] == true { Mapping::Symmetric } else { Mapping::Asymmetric };
                let dtype = text(case, "scale_dtype").parse().unwrap();
                QuantArgs { qtype, mapping, ..QuantArgs::int4(granularity, dtype) }
            }
        };
        (file.read_f32(&format!("{}.weight", text(case, "matrix"))).unwrap(), n, k, args)
    }

    /// Every stored tensor of `q` is byte for byte that of the case, and there is no other; and the way back gives `q`.
    fn assert_stored(file: &SafetensorsFile, name: &str, q: &QuantizedMatrix, also: usize) {
        let ours = pack("m", &[q.n, q.k], q, None, DiskFormat::of(&q.args, None));
        let prefix = format!("{name}.");
        let theirs = file.names().filter(|t| t.strip_prefix(&prefix).is_some_and(|part| !part.contains('.'))).count();
        assert_eq!(ours.iter().filter(|t| t.name != "m.weight_shape").count() + also, theirs, "{name}");
        for t in ours.iter().filter(|t| t.name != "m.weight_shape") {
            let part = format!("{name}.{}", t.name.trim_start_matches("m."));
            let info = file.info(&part).unwrap();
            assert_eq!((t.data.dtype().name(), t.data.shape()), (info.dtype.as_str(), &info.shape[..]), "{part}");
            assert_eq!(t.data.to_bytes(), file.read_stored(&part).unwrap().1, "{part}");
        }
        let part = |suffix: &str| ours.iter().find(|t| t.name.strip_prefix("m.") == Some(suffix));
        let bytes = |suffix: &str| part(suffix).map(|t| t.data.to_bytes().into_owned()).unwrap_or_default();
        let codes = if part("weight").is_some() { "weight" } else { "weight_packed" };
        let zeros = match part("weight_zero_point").map(|t| &t.data) {
            Some(TensorData::I32 { data, .. }) => StoredZeros::Packed(data.clone()),
            Some(TensorData::I8 { data, .. }) => StoredZeros::Plain(data.clone()),
            _ => StoredZeros::None,
        };
        let global = part("weight_global_scale").map(|t| unpack_scales(&t.data.to_bytes(), FloatType::F32)[0]);
        let (codes, scales) = (
            unpack_codes(DiskFormat::of(&q.args, None), &q.args, q.n, q.k, &bytes(codes)),
            unpack_scales(&bytes("weight_scale"), q.args.scale_dtype),
        );
        let back = unpack(Path::new("f"), "m", q.args, [q.n, q.k], codes, scales, &zeros, global).unwrap();
        assert_eq!(back, *q, "{name}");
    }

    /// The sign of a zero is free; adding 0 makes it positive.
    fn value_bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|v| (v + 0.0).to_le_bytes()).collect()
    }

    /// Codes, scales, zero points, dequantized values and packed words of compressed-tensors, case by case.
    #[test]
    fn int4_matrices_are_those_of_compressed_tensors() {
        let (file, cases) = golden("int4_ct");
        for case in &cases {
            let name = text(case, "name");
            let (w, n, k, args) = read(&file, case);
            let q = QuantizedMatrix::quantize(&w, n, k, args).unwrap();
            let stored = |part: &str| file.read_stored(&format!("{name}.{part}"));
            let bytes = |codes: &[i8]| codes.iter().map(|&c| c as u8).collect::<Vec<_>>();
            assert_eq!(bytes(&q.codes), stored("codes").unwrap().1, "{name}: codes");
            assert_eq!(q.scales, file.read_f32(&format!("{name}.weight_scale")).unwrap(), "{name}: scales");
            let asymmetric = args.mapping == Mapping::Asymmetric;
            if asymmetric {
                assert_eq!(bytes(&q.zeros), stored("zero_point").unwrap().1, "{name}: zero points");
            }
            let want = file.read_f32(&format!("{name}.dequantized")).unwrap();
            assert_eq!(value_bytes(&q.dequantize()), value_bytes(&want), "{name}: values");
            assert_stored(&file, name, &q, 2 + usize::from(asymmetric));
        }
    }

    #[test]
    fn int8_int3_and_int2_matrices_are_those_of_compressed_tensors() {
        let (file, cases) = golden("ints_ct");
        for case in &cases {
            let (w, n, k, args) = read(&file, case);
            let q = QuantizedMatrix::quantize(&w, n, k, args).unwrap();
            assert_stored(&file, text(case, "name"), &q, 0);
            let digest = crate::checkpoint::hex_sha256(&value_bytes(&q.dequantize()));
            assert_eq!(digest, text(case, "values_sha256"), "{}: values", text(case, "name"));
        }
    }

    #[test]
    fn float_coded_matrices_are_those_of_compressed_tensors() {
        let (file, cases) = golden("floats_ct");
        for case in &cases {
            let (w, n, k, args) = read(&file, case);
            let largest = w.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            let global = args.has_global_scale().then(|| {
                // Of the layer that shares it, with values three times as large.
                QuantArgs::global_scale(if text(case, "strategy") == "shared" { largest * 3.0 } else { largest })
            });
            let q = QuantizedMatrix::quantize_under(&w, n, k, args, global).unwrap();
            assert_stored(&file, text(case, "name"), &q, 0);
            let digest = crate::checkpoint::hex_sha256(&value_bytes(&q.dequantize()));
            assert_eq!(digest, text(case, "values_sha256"), "{}: values", text(case, "name"));
        }
    }

    #[test]
    fn c026_ten_rows_of_zero_points_fill_two_words_a_group() {
        let args = QuantArgs {
            mapping: Mapping::Asymmetric,
            ..QuantArgs::int4(Granularity::PerGroup(4), dsq_quant::FloatType::F32)
        };
        let row = |sign: f32| [1.0f32, 1.1, 1.2, 1.3].map(|x| x * sign);
        let w: Vec<f32> = (0..10).flat_map(|r| [row(if r % 3 == 0 { -1.0 } else { 1.0 }), row(1.0)].concat()).collect();
        let q = QuantizedMatrix::quantize(&w, 10, 8, args).unwrap();
        let tensors = pack("m", &[10, 8], &q, None, DiskFormat::of(&q.args, None));
        let zeros = tensors.iter().find(|t| t.name == "m.weight_zero_point").unwrap();
        let TensorData::I32 { shape, data } = &zeros.data else { panic!("packed") };
        assert_eq!(shape, &[2, 2]);
        let words = tensors.iter().find(|t| t.name == "m.weight_packed").unwrap();
        let codes = unpack_codes(DiskFormat::of(&args, None), &args, 10, 8, &words.data.to_bytes());
        let stored = StoredZeros::Packed(data.clone());
        let back = unpack(Path::new("f"), "m", args, [10, 8], codes, q.scales.clone(), &stored, None).unwrap();
        assert_eq!(back, q);
    }

    #[test]
    fn c024_three_bits_of_before_2026_are_read_ten_to_a_word() {
        // The case's word: codes 0 to 7 are -4 to 3.
        let codes: Vec<i8> = [7, 0, 1, 2, 3, 4, 5, 6, 7, 1].map(|c| c - 4).to_vec();
        assert_eq!(row_codes(&[0x0fd6_3447], 3, 10), codes);
        assert_eq!((words_before(32, 3), packed_words(32, 3)), (4, 3));
        let before = |codes: &[i8]| -> Vec<i32> { codes.chunks(10).map(|run| pack_i32(run, 3)[0]).collect() };
        let args = QuantArgs {
            qtype: QuantType::Int3,
            mapping: Mapping::Asymmetric,
            ..QuantArgs::int4(Granularity::PerGroup(32), FloatType::F32)
        };
        let (n, k) = (64, 64);
        let w: Vec<f32> = (0..n * k).map(|i| (i as f32 * 0.61).sin() + 0.3).collect();
        let q = QuantizedMatrix::quantize(&w, n, k, args).unwrap();
        let bytes: Vec<u8> = q.codes.chunks(k).flat_map(before).flat_map(i32::to_le_bytes).collect();
        let format = DiskFormat::of(&args, None);
        assert_eq!(unpack_codes(format, &args, n, k, &bytes), q.codes);
        let columns: Vec<Vec<i32>> =
            (0..2).map(|g| before(&q.zeros.iter().skip(g).step_by(2).copied().collect::<Vec<_>>())).collect();
        let words = (0..words_before(n, 3)).flat_map(|r| columns.iter().map(move |c| c[r])).collect();
        let back = unpack(
            Path::new("f"),
            "m",
            args,
            [n, k],
            q.codes.clone(),
            q.scales.clone(),
            &StoredZeros::Packed(words),
            None,
        );
        assert_eq!(back.unwrap(), q);
        let expected = expected_tensors(format, &args, n, k, 2);
        let fits = |suffix, shape: &[usize]| expected.iter().find(|e| e.suffix == suffix).unwrap().fits(shape);
        assert!(fits("weight_packed", &[n, 6]) && fits("weight_packed", &[n, 7]) && !fits("weight_packed", &[n, 8]));
        assert!(fits("weight_zero_point", &[7, 2]) && fits("weight_zero_point", &[6, 2]));
        assert!(!fits("weight_zero_point", &[5, 2]));
        assert!((1..100).all(|i| words_before(32 * i, 3) != packed_words(32 * i, 3)));
        assert!((160..4000).all(|len| words_before(len, 3) != packed_words(len, 3)));
        // Widths of which whole codes fill a word were never written another way.
        assert!((1..200).all(|len| [2, 4, 8].iter().all(|&b| words_before(len, b) == packed_words(len, b))));
    }
}
