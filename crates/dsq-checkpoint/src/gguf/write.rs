//! The bytes of a GGUF header: magic, version 3, key-value pairs, tensor table. The inverse of `header.rs`; not the meaning of
//! any key, and no tensor data.

use super::dequant::GgmlType;
use super::value::{Array, Metadata, Value, ValueType};

/// Where tensor data begins and each tensor starts: a multiple of this, the default of the format.
pub(crate) const ALIGNMENT: u64 = 32;

/// A row of the tensor table.
pub(crate) struct TableRow<'a> {
    /// Name in the file.
    pub(crate) name: &'a str,
    /// Shape, outermost first (the file has it the other way round).
    pub(crate) shape: &'a [usize],
    /// Element type.
    pub(crate) ty: GgmlType,
}

impl TableRow<'_> {
    /// Bytes of the data, without padding. The shape must hold whole blocks.
    pub(crate) fn bytes(&self) -> u64 {
        let elements: u64 = self.shape.iter().map(|&d| d as u64).product();
        elements / self.ty.block_len() as u64 * self.ty.block_bytes() as u64
    }
}

/// Everything before the data of the first tensor, padded. Tensors follow in the order of the table, each padded to
/// [`ALIGNMENT`].
pub(crate) fn header(metadata: &Metadata, table: &[TableRow]) -> Vec<u8> {
    let pairs = metadata.sorted();
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((table.len() as u64).to_le_bytes());
    out.extend((pairs.len() as u64).to_le_bytes());
    for (key, value) in pairs {
        put_string(&mut out, key);
        out.extend((value.ty() as u32).to_le_bytes());
        put_value(&mut out, value);
    }
    let mut offset = 0u64;
    for row in table {
        put_string(&mut out, row.name);
        out.extend((row.shape.len() as u32).to_le_bytes());
        out.extend(row.shape.iter().rev().flat_map(|&d| (d as u64).to_le_bytes()));
        out.extend((row.ty as u32).to_le_bytes());
        out.extend(offset.to_le_bytes());
        offset += row.bytes().next_multiple_of(ALIGNMENT);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
    out
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put_value(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.push(*v as u8),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
        Value::String(v) => put_string(out, v),
        Value::Array(array) => {
            let ty: ValueType = array.element_type();
            out.extend((ty as u32).to_le_bytes());
            out.extend((array.len() as u64).to_le_bytes());
            match array {
                Array::Scalars { bytes, .. } => out.extend(bytes),
                Array::Strings { text, ends } => {
                    let mut start = 0;
                    for &end in ends {
                        put_string(out, &text[start..end]);
                        start = end;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::header::Header;
    use super::*;
    use std::path::Path;

    #[test]
    fn what_is_written_is_read() {
        let path = Path::new("x.gguf");
        let mut metadata = Metadata::new(path);
        for (key, value) in [
            ("a.u8", Value::U8(200)),
            ("a.i8", Value::I8(-3)),
            ("a.u16", Value::U16(60_000)),
            ("a.i16", Value::I16(-30_000)),
            ("a.u32", Value::U32(u32::MAX)),
            ("a.i32", Value::I32(-7)),
            ("a.f32", Value::F32(1.5)),
            ("a.bool", Value::Bool(true)),
            ("a.string", Value::String("é\n".into())),
            ("a.strings", Value::Array(Array::strings(["", "b", "Ġc"]))),
            ("a.ints", Value::Array(Array::ints([1, -1]))),
            ("a.bytes", Value::Array(Array::Scalars { ty: ValueType::U8, bytes: vec![1, 2, 3] })),
            ("a.u64", Value::U64(u64::MAX)),
            ("a.i64", Value::I64(i64::MIN)),
            ("a.f64", Value::F64(0.1)),
        ] {
            metadata.set(key, value);
        }
        let rows = [
            TableRow { name: "x", shape: &[3, 32], ty: GgmlType::Q4_0 },
            TableRow { name: "y", shape: &[5], ty: GgmlType::F32 },
            TableRow { name: "z", shape: &[2, 256], ty: GgmlType::Q6K },
        ];
        let mut bytes = header(&metadata, &rows);
        let start = bytes.len() as u64;
        bytes.resize(bytes.len() + 64 + 32 + 448, 0);
        let back = Header::read(&bytes[..], bytes.len() as u64, path).unwrap();
        assert_eq!(back.metadata.sorted(), metadata.sorted());
        let table: Vec<_> =
            back.tensors.iter().map(|t| (t.name.as_str(), t.ne.clone(), t.ty, t.start, t.bytes)).collect();
        assert_eq!(
            table,
            [
                ("x", vec![32, 3], GgmlType::Q4_0, start, 54),
                ("y", vec![5], GgmlType::F32, start + 64, 20),
                ("z", vec![256, 2], GgmlType::Q6K, start + 96, 420),
            ]
        );
    }
}
