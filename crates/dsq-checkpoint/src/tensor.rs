//! Stored tensors: dtype, shape, raw bytes, and the exact conversions to and from f32. Not a tensor library.

use dsq_quant::{FloatType, MiniFloat, e8m0_decode, e8m0_encode};
use half::{bf16, f16};

/// A dtype of a safetensors file that dsq can carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names are those of the format.
pub enum Dtype {
    F64,
    F32,
    F16,
    Bf16,
    F8E4m3,
    F8E5m2,
    F8E8m0,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
}

impl Dtype {
    /// Every dtype.
    pub const ALL: [Dtype; 16] = [
        Dtype::F64,
        Dtype::F32,
        Dtype::F16,
        Dtype::Bf16,
        Dtype::F8E4m3,
        Dtype::F8E5m2,
        Dtype::F8E8m0,
        Dtype::I64,
        Dtype::I32,
        Dtype::I16,
        Dtype::I8,
        Dtype::U64,
        Dtype::U32,
        Dtype::U16,
        Dtype::U8,
        Dtype::Bool,
    ];

    /// The name in a safetensors header.
    pub fn name(self) -> &'static str {
        match self {
            Dtype::F64 => "F64",
            Dtype::F32 => "F32",
            Dtype::F16 => "F16",
            Dtype::Bf16 => "BF16",
            Dtype::F8E4m3 => "F8_E4M3",
            Dtype::F8E5m2 => "F8_E5M2",
            Dtype::F8E8m0 => "F8_E8M0",
            Dtype::I64 => "I64",
            Dtype::I32 => "I32",
            Dtype::I16 => "I16",
            Dtype::I8 => "I8",
            Dtype::U64 => "U64",
            Dtype::U32 => "U32",
            Dtype::U16 => "U16",
            Dtype::U8 => "U8",
            Dtype::Bool => "BOOL",
        }
    }

    /// The dtype with this exact name.
    pub fn parse(name: &str) -> Option<Dtype> {
        Dtype::ALL.into_iter().find(|d| d.name() == name)
    }

    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F64 | Dtype::I64 | Dtype::U64 => 8,
            Dtype::F32 | Dtype::I32 | Dtype::U32 => 4,
            Dtype::F16 | Dtype::Bf16 | Dtype::I16 | Dtype::U16 => 2,
            Dtype::F8E4m3 | Dtype::F8E5m2 | Dtype::F8E8m0 | Dtype::I8 | Dtype::U8 | Dtype::Bool => 1,
        }
    }

    /// The float type, where `read_f32` can read it.
    pub fn float(self) -> Option<FloatType> {
        match self {
            Dtype::F32 => Some(FloatType::F32),
            Dtype::F16 => Some(FloatType::F16),
            Dtype::Bf16 => Some(FloatType::Bf16),
            _ => None,
        }
    }

    /// The names of all dtypes, for messages.
    pub(crate) fn names() -> String {
        Dtype::ALL.map(Dtype::name).join(", ")
    }
}

impl From<FloatType> for Dtype {
    fn from(t: FloatType) -> Self {
        match t {
            FloatType::F32 => Dtype::F32,
            FloatType::F16 => Dtype::F16,
            FloatType::Bf16 => Dtype::Bf16,
            FloatType::F8E4M3 => Dtype::F8E4m3,
            FloatType::F8E8M0 => Dtype::F8E8m0,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What a checkpoint says about one tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name of the stored type: a safetensors dtype, or a GGUF type such as `Q4_1`.
    pub dtype: String,
    /// Shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// Bytes on disk.
    pub bytes: u64,
}

/// A tensor to write.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedTensor {
    /// Its name in the file.
    pub name: String,
    /// Shape and values.
    pub data: TensorData,
}

/// Shape and values of a tensor to write.
#[derive(Debug, Clone, PartialEq)]
pub enum TensorData {
    /// Floats, rounded to `dtype` (nearest even) when written.
    Float {
        /// Shape, outermost first.
        shape: Vec<usize>,
        /// Values, row major.
        data: Vec<f32>,
        /// Stored dtype.
        dtype: FloatType,
    },
    /// 32-bit integers.
    I32 {
        /// Shape, outermost first.
        shape: Vec<usize>,
        /// Values, row major.
        data: Vec<i32>,
    },
    /// 64-bit integers.
    I64 {
        /// Shape, outermost first.
        shape: Vec<usize>,
        /// Values, row major.
        data: Vec<i64>,
    },
    /// 8-bit integers.
    I8 {
        /// Shape, outermost first.
        shape: Vec<usize>,
        /// Values, row major.
        data: Vec<i8>,
    },
    /// Stored bytes, little endian, copied as they are.
    Raw {
        /// Shape, outermost first.
        shape: Vec<usize>,
        /// Bytes.
        bytes: Vec<u8>,
        /// Their dtype.
        dtype: Dtype,
    },
}

impl TensorData {
    /// The shape.
    pub fn shape(&self) -> &[usize] {
        match self {
            TensorData::Float { shape, .. }
            | TensorData::I32 { shape, .. }
            | TensorData::I64 { shape, .. }
            | TensorData::I8 { shape, .. }
            | TensorData::Raw { shape, .. } => shape,
        }
    }

    /// The stored dtype.
    pub fn dtype(&self) -> Dtype {
        match self {
            TensorData::Float { dtype, .. } => (*dtype).into(),
            TensorData::I32 { .. } => Dtype::I32,
            TensorData::I64 { .. } => Dtype::I64,
            TensorData::I8 { .. } => Dtype::I8,
            TensorData::Raw { dtype, .. } => *dtype,
        }
    }

    /// How many values it holds (for raw bytes: whole values).
    pub(crate) fn len(&self) -> usize {
        match self {
            TensorData::Float { data, .. } => data.len(),
            TensorData::I32 { data, .. } => data.len(),
            TensorData::I64 { data, .. } => data.len(),
            TensorData::I8 { data, .. } => data.len(),
            TensorData::Raw { bytes, dtype, .. } => bytes.len() / dtype.size(),
        }
    }

    /// Bytes on disk.
    pub fn bytes_len(&self) -> u64 {
        match self {
            TensorData::Raw { bytes, .. } => bytes.len() as u64,
            other => (other.len() * other.dtype().size()) as u64,
        }
    }

    /// The stored bytes, little endian.
    pub fn to_bytes(&self) -> std::borrow::Cow<'_, [u8]> {
        match self {
            TensorData::Float { data, dtype, .. } => float_bytes(data, *dtype).into(),
            TensorData::I32 { data, .. } => flat(data.iter().map(|v| v.to_le_bytes())).into(),
            TensorData::I64 { data, .. } => flat(data.iter().map(|v| v.to_le_bytes())).into(),
            TensorData::I8 { data, .. } => data.iter().map(|&v| v as u8).collect::<Vec<_>>().into(),
            TensorData::Raw { bytes, .. } => bytes.as_slice().into(),
        }
    }
}

/// Elements of `N` bytes one after the other. (Not `flat_map`, which goes byte by byte.)
pub(crate) fn flat<const N: usize>(elements: impl Iterator<Item = [u8; N]>) -> Vec<u8> {
    elements.collect::<Vec<_>>().into_flattened()
}

/// Floats as stored bytes, rounded to `dtype`.
pub(crate) fn float_bytes(data: &[f32], dtype: FloatType) -> Vec<u8> {
    match dtype {
        FloatType::F32 => flat(data.iter().map(|v| v.to_le_bytes())),
        FloatType::F16 => flat(data.iter().map(|&v| f16::from_f32(v).to_le_bytes())),
        FloatType::Bf16 => flat(data.iter().map(|&v| bf16::from_f32(v).to_le_bytes())),
        FloatType::F8E4M3 => data.iter().map(|&v| MiniFloat::E4M3.encode(v)).collect(),
        FloatType::F8E8M0 => data.iter().map(|&v| e8m0_encode(dtype.round(v))).collect(),
    }
}

/// Stored floats as f32, exactly: every f16 and bf16 value is an f32 value, subnormals and payloads included.
pub(crate) fn floats_from_bytes(bytes: &[u8], dtype: FloatType) -> Vec<f32> {
    let mut out = Vec::new();
    extend_floats(&mut out, bytes, dtype);
    out
}

/// [`floats_from_bytes`], after what `out` holds.
pub(crate) fn extend_floats(out: &mut Vec<f32>, bytes: &[u8], dtype: FloatType) {
    let two = |c: &[u8]| [c[0], c[1]];
    match dtype {
        FloatType::F32 => out.extend(bytes.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]]))),
        FloatType::F16 => out.extend(bytes.chunks_exact(2).map(|c| f16::from_le_bytes(two(c)).to_f32())),
        FloatType::Bf16 => {
            out.extend(bytes.chunks_exact(2).map(|c| f32::from_bits(u32::from(u16::from_le_bytes(two(c))) << 16)));
        }
        FloatType::F8E4M3 => out.extend(bytes.iter().map(|&b| MiniFloat::E4M3.decode(b))),
        FloatType::F8E8M0 => out.extend(bytes.iter().map(|&b| e8m0_decode(b))),
    }
}

/// What a conversion to a narrower float loses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConversionLoss {
    /// Finite values that became infinite, and the flat index of the first.
    pub overflow: Option<(usize, usize)>,
    /// Values that are not zero and became zero.
    pub underflow: usize,
}

/// Counts what rounding `data` to `dtype` loses beyond precision.
pub fn conversion_loss(data: &[f32], dtype: FloatType) -> ConversionLoss {
    let mut loss = ConversionLoss::default();
    for (i, &x) in data.iter().enumerate() {
        let y = dtype.round(x);
        if x.is_finite() && !y.is_finite() {
            loss.overflow = Some(loss.overflow.map_or((i, 1), |(first, n)| (first, n + 1)));
        }
        loss.underflow += usize::from(x != 0.0 && y == 0.0);
    }
    loss
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn c036_bf16_patterns_widen_exactly_and_narrowing_counts_its_losses() {
        let patterns = [0x0001u16, 0x8001, 0x007f, 0x0080, 0x8000, 0x7f7f, 0x7f80, 0x7fc1, 0x7f81];
        let bytes: Vec<u8> = patterns.iter().flat_map(|p| p.to_le_bytes()).collect();
        let wide = floats_from_bytes(&bytes, FloatType::Bf16);
        for (x, p) in wide.iter().zip(patterns) {
            assert_eq!(x.to_bits(), u32::from(p) << 16, "{p:#06x}");
        }
        // A copy keeps every bit, the payload of a signalling NaN included.
        let copy = TensorData::Raw { shape: vec![9], bytes: bytes.clone(), dtype: Dtype::Bf16 };
        assert_eq!(copy.to_bytes(), bytes);
        // 3e-8 is nearest to the smallest f16 subnormal, 2^-24; the smallest bf16 value becomes 0; 70000 overflows.
        assert_eq!(FloatType::F16.round(3e-8), 5.960_464_5e-8);
        let loss = conversion_loss(&[3e-8, f32::from_bits(1 << 16), 70000.0, f32::INFINITY, 0.0], FloatType::F16);
        assert_eq!(loss, ConversionLoss { overflow: Some((2, 1)), underflow: 1 });
    }

    #[test]
    fn f021_floats_written_and_read_keep_their_bits() {
        for dtype in FloatType::ALL {
            let xs: Vec<f32> = [0.0f32, -0.0, 1.0, -1.5, 6e-8, f32::INFINITY, f32::NEG_INFINITY]
                .iter()
                .map(|&x| dtype.round(x))
                .collect();
            let back = floats_from_bytes(&float_bytes(&xs, dtype), dtype);
            assert_eq!(
                xs.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                back.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            );
        }
    }
}
