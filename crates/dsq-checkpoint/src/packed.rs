//! The tensors of one `pack-quantized` module: `weight_packed`, `weight_scale`, `weight_zero_point`, `weight_shape`.
//! Not the config (see `quantization.rs`), not the files.
//!
//! A convolution `[out, in, kh, kw]` is stored as the matrix `[out, in * kh * kw]` with all four numbers in
//! `weight_shape`; the Python package packs linear layers only.

use crate::{CheckpointError, NamedTensor, TensorData};
use dsq_quant::{Granularity, Mapping, QuantArgs, QuantizedMatrix, pack_i32, packed_words, unpack_i32};
use std::path::Path;

/// The tensors that store `matrix` of `module`, whose weight has `shape` (its first dimension `n`, the others `k`).
pub(crate) fn pack(module: &str, shape: &[usize], matrix: &QuantizedMatrix) -> Vec<NamedTensor> {
    let (n, k, bits) = (matrix.n, matrix.k, matrix.args.qtype.bits());
    let words: Vec<i32> =
        if k == 0 { Vec::new() } else { matrix.codes.chunks(k).flat_map(|row| pack_i32(row, bits)).collect() };
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
