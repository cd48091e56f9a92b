//! The messages of an ONNX file that dsq writes and reads, with the field numbers of `onnx.proto` (github.com/onnx/onnx, IR version
//! 10). Fields that dsq never writes are left out; a reader skips them, so this is no complete description of the format.
//!
//! The syntax is proto2: scalars are optional, and repeated integers are not packed.

use prost::Message;

/// `Version.IR_VERSION` of opset 21.
pub(super) const IR_VERSION: i64 = 10;
/// The version of the standard operators: 21 is the first with 4-bit codes and `DequantizeLinear`.
pub(super) const OPSET: i64 = 21;
/// The domain of `MatMulNBits`, an operator of onnxruntime.
pub(super) const MICROSOFT: &str = "com.microsoft";

/// `TensorProto.DataType`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(super) enum DataType {
    Float = 1,
    Uint8 = 2,
    Int8 = 3,
    Int64 = 7,
    Bool = 9,
    Float16 = 10,
    Bfloat16 = 16,
    Int4 = 22,
}

impl DataType {
    /// Every type that dsq writes.
    const ALL: [Self; 8] =
        [Self::Float, Self::Uint8, Self::Int8, Self::Int64, Self::Bool, Self::Float16, Self::Bfloat16, Self::Int4];

    /// The type with this number.
    pub(super) fn of(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| *t as i32 == number)
    }

    /// Its name in `onnx.proto`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Float => "FLOAT",
            Self::Uint8 => "UINT8",
            Self::Int8 => "INT8",
            Self::Int64 => "INT64",
            Self::Bool => "BOOL",
            Self::Float16 => "FLOAT16",
            Self::Bfloat16 => "BFLOAT16",
            Self::Int4 => "INT4",
        }
    }

    /// Bytes of `n` values; two of four bits share one.
    pub(super) fn bytes(self, n: u64) -> u64 {
        match self {
            Self::Float => 4 * n,
            Self::Int64 => 8 * n,
            Self::Float16 | Self::Bfloat16 => 2 * n,
            Self::Uint8 | Self::Int8 | Self::Bool => n,
            Self::Int4 => n.div_ceil(2),
        }
    }
}

/// `ModelProto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ModelProto {
    #[prost(int64, optional, tag = "1")]
    pub(super) ir_version: Option<i64>,
    #[prost(string, optional, tag = "2")]
    pub(super) producer_name: Option<String>,
    #[prost(string, optional, tag = "3")]
    pub(super) producer_version: Option<String>,
    #[prost(message, optional, tag = "7")]
    pub(super) graph: Option<GraphProto>,
    #[prost(message, repeated, tag = "8")]
    pub(super) opset_import: Vec<OperatorSetIdProto>,
    #[prost(message, repeated, tag = "14")]
    pub(super) metadata_props: Vec<StringStringEntryProto>,
}

/// `GraphProto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct GraphProto {
    #[prost(message, repeated, tag = "1")]
    pub(super) node: Vec<NodeProto>,
    #[prost(string, optional, tag = "2")]
    pub(super) name: Option<String>,
    #[prost(message, repeated, tag = "5")]
    pub(super) initializer: Vec<TensorProto>,
    #[prost(message, repeated, tag = "11")]
    pub(super) input: Vec<ValueInfoProto>,
    #[prost(message, repeated, tag = "12")]
    pub(super) output: Vec<ValueInfoProto>,
}

/// `NodeProto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct NodeProto {
    #[prost(string, repeated, tag = "1")]
    pub(super) input: Vec<String>,
    #[prost(string, repeated, tag = "2")]
    pub(super) output: Vec<String>,
    #[prost(string, optional, tag = "3")]
    pub(super) name: Option<String>,
    #[prost(string, optional, tag = "4")]
    pub(super) op_type: Option<String>,
    #[prost(message, repeated, tag = "5")]
    pub(super) attribute: Vec<AttributeProto>,
    #[prost(string, optional, tag = "7")]
    pub(super) domain: Option<String>,
}

/// `AttributeProto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct AttributeProto {
    #[prost(string, optional, tag = "1")]
    pub(super) name: Option<String>,
    #[prost(int64, optional, tag = "3")]
    pub(super) i: Option<i64>,
    #[prost(int64, repeated, packed = "false", tag = "8")]
    pub(super) ints: Vec<i64>,
    /// `AttributeType`: INT 2, INTS 7.
    #[prost(int32, optional, tag = "20")]
    pub(super) r#type: Option<i32>,
}

impl AttributeProto {
    /// An integer.
    pub(super) fn int(name: &str, i: i64) -> Self {
        Self { name: Some(name.into()), i: Some(i), r#type: Some(2), ..Self::default() }
    }

    /// A list of integers.
    pub(super) fn ints(name: &str, ints: &[i64]) -> Self {
        Self { name: Some(name.into()), ints: ints.to_vec(), r#type: Some(7), ..Self::default() }
    }
}

/// `TensorProto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorProto {
    #[prost(int64, repeated, packed = "false", tag = "1")]
    pub(super) dims: Vec<i64>,
    #[prost(int32, optional, tag = "2")]
    pub(super) data_type: Option<i32>,
    #[prost(string, optional, tag = "8")]
    pub(super) name: Option<String>,
    #[prost(bytes = "vec", optional, tag = "9")]
    pub(super) raw_data: Option<Vec<u8>>,
    /// `location` (a file beside the model), `offset`, `length`.
    #[prost(message, repeated, tag = "13")]
    pub(super) external_data: Vec<StringStringEntryProto>,
    /// `DataLocation`: DEFAULT 0, EXTERNAL 1.
    #[prost(int32, optional, tag = "14")]
    pub(super) data_location: Option<i32>,
}

impl TensorProto {
    /// The value of a key of `external_data`.
    pub(super) fn external(&self, key: &str) -> Option<&str> {
        self.external_data.iter().find(|e| e.key.as_deref() == Some(key)).and_then(|e| e.value.as_deref())
    }
}

/// `StringStringEntryProto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct StringStringEntryProto {
    #[prost(string, optional, tag = "1")]
    pub(super) key: Option<String>,
    #[prost(string, optional, tag = "2")]
    pub(super) value: Option<String>,
}

/// A key and its value.
pub(super) fn entry(key: &str, value: impl Into<String>) -> StringStringEntryProto {
    StringStringEntryProto { key: Some(key.into()), value: Some(value.into()) }
}

/// `ValueInfoProto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ValueInfoProto {
    #[prost(string, optional, tag = "1")]
    pub(super) name: Option<String>,
    #[prost(message, optional, tag = "2")]
    pub(super) r#type: Option<TypeProto>,
}

/// `TypeProto`, of a tensor.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TypeProto {
    #[prost(message, optional, tag = "1")]
    pub(super) tensor_type: Option<TensorTypeProto>,
}

/// `TypeProto.Tensor`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorTypeProto {
    #[prost(int32, optional, tag = "1")]
    pub(super) elem_type: Option<i32>,
    #[prost(message, optional, tag = "2")]
    pub(super) shape: Option<TensorShapeProto>,
}

/// `TensorShapeProto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct TensorShapeProto {
    #[prost(message, repeated, tag = "1")]
    pub(super) dim: Vec<DimensionProto>,
}

/// `TensorShapeProto.Dimension`: a number, or a name.
#[derive(Clone, PartialEq, Message)]
pub(super) struct DimensionProto {
    #[prost(int64, optional, tag = "1")]
    pub(super) dim_value: Option<i64>,
    #[prost(string, optional, tag = "2")]
    pub(super) dim_param: Option<String>,
}

/// `OperatorSetIdProto`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct OperatorSetIdProto {
    /// Empty: the standard operators.
    #[prost(string, optional, tag = "1")]
    pub(super) domain: Option<String>,
    #[prost(int64, optional, tag = "2")]
    pub(super) version: Option<i64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The file of `tests/golden/onnx/make_golden.py`, in our structs.
    fn golden() -> ModelProto {
        let text = |s: &str| Some(s.to_owned());
        let tensor = |name: &str, ty: DataType, dims: &[i64], raw: &[u8]| TensorProto {
            dims: dims.to_vec(),
            data_type: Some(ty as i32),
            name: text(name),
            raw_data: Some(raw.to_vec()),
            ..TensorProto::default()
        };
        let info = |name: &str, dims: [Result<i64, &str>; 2]| {
            let dim =
                |d: Result<i64, &str>| DimensionProto { dim_value: d.ok(), dim_param: d.err().map(str::to_owned) };
            let shape = TensorShapeProto { dim: dims.into_iter().map(dim).collect() };
            let tensor_type = Some(TensorTypeProto { elem_type: Some(1), shape: Some(shape) });
            ValueInfoProto { name: text(name), r#type: Some(TypeProto { tensor_type }) }
        };
        let node = |inputs: &[&str], output: &str, op: &str, attribute, domain| NodeProto {
            input: inputs.iter().map(|&s| s.to_owned()).collect(),
            output: vec![output.to_owned()],
            name: text(output),
            op_type: text(op),
            attribute,
            domain,
        };
        let sizes = vec![AttributeProto::int("K", 16), AttributeProto::int("N", 2)];
        let external = [("location", "tiny.onnx.data"), ("offset", "4096"), ("length", "2400")];
        let beside = TensorProto {
            dims: vec![2, 300],
            data_type: Some(1),
            name: text("beside"),
            external_data: external.map(|(k, v)| entry(k, v)).to_vec(),
            data_location: Some(1),
            raw_data: None,
        };
        let graph = GraphProto {
            node: vec![
                node(&["x", "codes", "scales"], "product", "MatMulNBits", sizes, text(MICROSOFT)),
                node(&["product"], "y", "Transpose", vec![AttributeProto::ints("perm", &[1, 0])], None),
            ],
            name: text("tiny"),
            initializer: vec![
                tensor("codes", DataType::Uint8, &[2, 1, 8], &(0..16).collect::<Vec<u8>>()),
                tensor("four", DataType::Int4, &[3], &[0x78, 0x0f]),
                tensor("scales", DataType::Float, &[2, 1], &[0.5f32.to_le_bytes(), (-1f32).to_le_bytes()].concat()),
                beside,
            ],
            input: vec![info("x", [Err("batch"), Ok(16)])],
            output: vec![info("y", [Ok(2), Err("batch")])],
        };
        let opset = |domain: &str, version| OperatorSetIdProto { domain: text(domain), version: Some(version) };
        ModelProto {
            ir_version: Some(IR_VERSION),
            producer_name: text("golden"),
            producer_version: text("1"),
            graph: Some(graph),
            opset_import: vec![opset("", OPSET), opset(MICROSOFT, 1)],
            metadata_props: vec![entry("key", "value")],
        }
    }

    #[test]
    fn a_file_of_the_python_package_is_read_and_written_byte_for_byte() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/onnx/tiny.onnx");
        let bytes = std::fs::read(path).unwrap();
        assert_eq!(ModelProto::decode(bytes.as_slice()).unwrap(), golden());
        assert_eq!(golden().encode_to_vec(), bytes);
    }

    #[test]
    fn broken_messages_are_errors() {
        let bytes = golden().encode_to_vec();
        for end in 1..bytes.len() {
            // (An end between two fields is a message.)
            let _ = ModelProto::decode(&bytes[..end]);
        }
        assert!(ModelProto::decode(&bytes[..bytes.len() - 1]).is_err());
        assert!(ModelProto::decode(&[0xff; 12][..]).is_err());
        assert!(DataType::of(22) == Some(DataType::Int4) && DataType::of(4).is_none());
    }
}
