//! The tensors of one `pack-quantized` module: `weight_packed`, `weight_scale`, `weight_zero_point`, `weight_shape`.
//! Not the config (see `quantization.rs`), not the files.
//!
//! A convolution `[out, in, kh, kw]` is stored as the matrix `[out, in * kh * kw]` with all four numbers in
//! `weight_shape`; the Python package packs linear layers only.

use crate::{CheckpointError, NamedTensor, TensorData};
use dsq_quant::{Granularity, Mapping, QuantArgs, QuantizedMatrix, pack_i32, pack_rows, packed_words, unpack_i32};
use std::path::Path;

/// The tensors that store `matrix` of `module`, whose weight has `shape` (its first dimension `n`, the others `k`).
pub(crate) fn pack(module: &str, shape: &[usize], matrix: &QuantizedMatrix) -> Vec<NamedTensor> {
    let (n, k, bits) = (matrix.n, matrix.k, matrix.args.qtype.bits());
    let words = pack_rows(&matrix.codes, k, bits);
    let named = |suffix: &str, data| NamedTensor { name: format!("{module}.{suffix}"), data };
    let scale_shape = stored_scale_shape(&matrix.args, n, k);
    let mut out = vec![
        named("weight_packed", TensorData::I32 { shape: vec![n, packed_words(k, bits)], data: words }),
        named(
            "weight_scale",
            TensorData::Float { shape: scale_shape, data: matrix.scales.clone(), dtype: matrix.args.scale_dtype },
        ),
        named(
            "weight_shape",
            TensorData::I64 { shape: vec![shape.len()], data: shape.iter().map(|&d| d as i64).collect() },
        ),
    ];
    if matrix.args.mapping == Mapping::Asymmetric {
        out.push(named("weight_zero_point", pack_zeros(matrix)));
    }
    out
}

/// Zero points: I8 `[1]` for one tensor, else I32 packed along the rows, `[ceil(n * bits / 32), groups]`.
fn pack_zeros(matrix: &QuantizedMatrix) -> TensorData {
    let bits = matrix.args.qtype.bits();
    if matrix.args.granularity == Granularity::PerTensor {
        return TensorData::I8 { shape: vec![1], data: matrix.zeros.clone() };
    }
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

/// The shape of `weight_scale`: `[1]`, `[n, 1]` or `[n, k / g]`.
pub(crate) fn stored_scale_shape(args: &QuantArgs, n: usize, k: usize) -> Vec<usize> {
    match args.granularity {
        Granularity::PerTensor => vec![1],
        Granularity::PerChannel => vec![n, 1],
        Granularity::PerGroup(g) => vec![n, k.checked_div(g).unwrap_or(0)],
    }
}

/// Where the stored zero points of an `[n, k]` matrix lie: dtype name and shape.
pub(crate) fn stored_zero_shape(args: &QuantArgs, n: usize, k: usize) -> (&'static str, Vec<usize>) {
    match args.granularity {
        Granularity::PerTensor => ("I8", vec![1]),
        _ => {
            let scale = stored_scale_shape(args, n, k);
            ("I32", vec![packed_words(n, args.qtype.bits()), scale[1]])
        }
    }
}

/// Puts a matrix together from stored words; `zeros` is empty when symmetric. Lengths were checked by the caller.
pub(crate) fn unpack(
    file: &Path,
    module: &str,
    args: QuantArgs,
    n: usize,
    k: usize,
    words: &[i32],
    scales: Vec<f32>,
    zeros: &StoredZeros,
) -> Result<QuantizedMatrix, CheckpointError> {
    let bits = args.qtype.bits();
    let per_row = packed_words(k, bits);
    let mut codes = Vec::with_capacity(n * k);
    for row in words.chunks(per_row.max(1)) {
        codes.extend(unpack_i32(row, bits, k));
    }
    let zeros = match zeros {
        StoredZeros::None => Vec::new(),
        StoredZeros::One(z) => vec![*z],
        StoredZeros::Packed(words) => {
            let groups = scales.len().checked_div(n).unwrap_or(0);
            let mut out = vec![0i8; n * groups];
            for g in 0..groups {
                let column: Vec<i32> = words.iter().skip(g).step_by(groups).copied().collect();
                for (r, z) in unpack_i32(&column, bits, n).into_iter().enumerate() {
                    out[r * groups + g] = z;
                }
            }
            out
        }
    };
    let matrix = QuantizedMatrix { args, n, k, codes, scales, zeros };
    matrix.validate().map_err(|e| CheckpointError::quant(file, module, e))?;
    Ok(matrix)
}

/// Zero points as stored.
pub(crate) enum StoredZeros {
    /// Symmetric.
    None,
    /// One for the tensor.
    One(i8),
    /// Packed along the rows.
    Packed(Vec<i32>),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SafetensorsFile;

    /// Codes, scales, zero points, dequantized values and packed words of compressed-tensors, case by case.
    #[test]
    fn int4_matrices_are_those_of_compressed_tensors() {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden");
        let file = SafetensorsFile::open(&golden.join("int4_ct.safetensors")).unwrap();
        let text = std::fs::read(golden.join("int4_ct.json")).unwrap();
        let cases: Vec<serde_json::Value> = serde_json::from_slice(&text).unwrap();
        assert!(cases.len() > 50, "{}", cases.len());
        for case in &cases {
            let text = |key: &str| case[key].as_str().unwrap();
            let name = text("name");
            let [n, k] = [0, 1].map(|i| case["shape"][i].as_u64().unwrap() as usize);
            let granularity = match text("strategy") {
                "group" => Granularity::PerGroup(case["group_size"].as_u64().unwrap() as usize),
                "channel" => Granularity::PerChannel,
                "tensor" => Granularity::PerTensor,
                other => panic!("{other}"),
            };
            let mapping = if case["symmetric"] == true { Mapping::Symmetric } else { Mapping::Asymmetric };
            let args = QuantArgs { mapping, ..QuantArgs::int4(granularity, text("scale_dtype").parse().unwrap()) };
            let w = file.read_f32(&format!("{}.weight", text("matrix"))).unwrap();
            let q = QuantizedMatrix::quantize(&w, n, k, args).unwrap();
            let stored = |part: &str| file.read_stored(&format!("{name}.{part}"));
            let bytes = |codes: &[i8]| codes.iter().map(|&c| c as u8).collect::<Vec<_>>();
            assert_eq!(bytes(&q.codes), stored("codes").unwrap().1, "{name}: codes");
            assert_eq!(q.scales, file.read_f32(&format!("{name}.weight_scale")).unwrap(), "{name}: scales");
            if args.mapping == Mapping::Asymmetric {
                assert_eq!(bytes(&q.zeros), stored("zero_point").unwrap().1, "{name}: zero points");
            }
            // The sign of a zero is free; adding 0 makes it positive.
            let bits = |xs: &[f32]| xs.iter().map(|x| (x + 0.0).to_bits()).collect::<Vec<_>>();
            let want = file.read_f32(&format!("{name}.dequantized")).unwrap();
            assert_eq!(bits(&q.dequantize()), bits(&want), "{name}: values");
            let ours = pack("m", &[n, k], &q);
            assert_eq!(ours.len(), if args.mapping == Mapping::Asymmetric { 4 } else { 3 });
            for t in ours.iter().filter(|t| t.name != "m.weight_shape") {
                let part = t.name.trim_start_matches("m.");
                let theirs = file.info(&format!("{name}.{part}")).unwrap();
                assert_eq!(
                    (t.data.dtype().name(), t.data.shape()),
                    (theirs.dtype.as_str(), &theirs.shape[..]),
                    "{name}: {part}"
                );
                assert_eq!(t.data.to_bytes(), stored(part).unwrap().1, "{name}: {part}");
            }
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
        let tensors = pack("m", &[10, 8], &q);
        let zeros = tensors.iter().find(|t| t.name == "m.weight_zero_point").unwrap();
        let TensorData::I32 { shape, data } = &zeros.data else { panic!("packed") };
        assert_eq!(shape, &[2, 2]);
        let words: Vec<i32> = tensors
            .iter()
            .find_map(|t| match &t.data {
                TensorData::I32 { data, .. } if t.name == "m.weight_packed" => Some(data.clone()),
                _ => None,
            })
            .unwrap();
        let stored = StoredZeros::Packed(data.clone());
        let back = unpack(Path::new("f"), "m", args, 10, 8, &words, q.scales.clone(), &stored).unwrap();
        assert_eq!(back, q);
    }
}
