//! Typed metadata values and the pairs of one file. Not the reader of their bytes (see `header.rs`), nor the writer (`write.rs`).

use crate::CheckpointError;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The type of a metadata value. The discriminant is the number in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    const ALL: [ValueType; 13] = [
        ValueType::U8,
        ValueType::I8,
        ValueType::U16,
        ValueType::I16,
        ValueType::U32,
        ValueType::I32,
        ValueType::F32,
        ValueType::Bool,
        ValueType::String,
        ValueType::Array,
        ValueType::U64,
        ValueType::I64,
        ValueType::F64,
    ];

    pub(crate) fn from_id(id: u32) -> Option<Self> {
        Self::ALL.get(id as usize).copied()
    }

    /// The specification's name.
    pub(crate) fn name(self) -> &'static str {
        match self {
            ValueType::U8 => "UINT8",
            ValueType::I8 => "INT8",
            ValueType::U16 => "UINT16",
            ValueType::I16 => "INT16",
            ValueType::U32 => "UINT32",
            ValueType::I32 => "INT32",
            ValueType::F32 => "FLOAT32",
            ValueType::Bool => "BOOL",
            ValueType::String => "STRING",
            ValueType::Array => "ARRAY",
            ValueType::U64 => "UINT64",
            ValueType::I64 => "INT64",
            ValueType::F64 => "FLOAT64",
        }
    }

    /// Bytes of one scalar; strings and arrays have no fixed size (0).
    pub(crate) fn bytes(self) -> usize {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 => 8,
            ValueType::String | ValueType::Array => 0,
        }
    }
}

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value {
    /// Its type.
    pub(crate) fn ty(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// What it is, for messages: `UINT32 7`, `an array of STRING`.
    pub(crate) fn describe(&self) -> String {
        match self {
            Value::U8(v) => format!("UINT8 {v}"),
            Value::I8(v) => format!("INT8 {v}"),
            Value::U16(v) => format!("UINT16 {v}"),
            Value::I16(v) => format!("INT16 {v}"),
            Value::U32(v) => format!("UINT32 {v}"),
            Value::I32(v) => format!("INT32 {v}"),
            Value::F32(v) => format!("FLOAT32 {v}"),
            Value::Bool(v) => format!("BOOL {v}"),
            Value::String(v) => format!("STRING {:?}", crate::error::printable(v)),
            Value::Array(v) => format!("an array of {} {}", v.len(), v.type_name()),
            Value::U64(v) => format!("UINT64 {v}"),
            Value::I64(v) => format!("INT64 {v}"),
            Value::F64(v) => format!("FLOAT64 {v}"),
        }
    }
}

/// An array, held in about the bytes that it takes in the file (a vocabulary has 10^5 strings; a hostile file may have more).
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Array {
    /// Scalars of one type, little-endian as in the file.
    Scalars {
        /// Element type, never `String` or `Array`.
        ty: ValueType,
        /// The elements' bytes.
        bytes: Vec<u8>,
    },
    /// Strings, one after the other.
    Strings {
        /// All of them, joined.
        text: String,
        /// Where each one ends in `text`.
        ends: Vec<usize>,
    },
}

impl Array {
    /// Number of elements.
    pub(crate) fn len(&self) -> usize {
        match self {
            Array::Scalars { ty, bytes } => bytes.len() / ty.bytes(),
            Array::Strings { ends, .. } => ends.len(),
        }
    }

    /// The type of the elements.
    pub(crate) fn element_type(&self) -> ValueType {
        match self {
            Array::Scalars { ty, .. } => *ty,
            Array::Strings { .. } => ValueType::String,
        }
    }

    fn type_name(&self) -> &'static str {
        self.element_type().name()
    }

    /// An array of these strings.
    pub(crate) fn strings<S: AsRef<str>>(items: impl IntoIterator<Item = S>) -> Self {
        let (mut text, mut ends) = (String::new(), Vec::new());
        for item in items {
            text.push_str(item.as_ref());
            ends.push(text.len());
        }
        Array::Strings { text, ends }
    }

    /// An array of INT32.
    pub(crate) fn ints(items: impl IntoIterator<Item = i32>) -> Self {
        Array::Scalars { ty: ValueType::I32, bytes: items.into_iter().flat_map(i32::to_le_bytes).collect() }
    }
}

/// The strings of one array.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Strings<'a> {
    text: &'a str,
    ends: &'a [usize],
}

impl<'a> Strings<'a> {
    pub(crate) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(crate) fn get(&self, i: usize) -> Option<&'a str> {
        let end = *self.ends.get(i)?;
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        Some(&self.text[start..end])
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &'a str> {
        let (text, ends) = (self.text, self.ends);
        ends.iter().scan(0, move |start, end| Some(&text[std::mem::replace(start, *end)..*end]))
    }
}

/// The key-value pairs of a file, with typed access that names the key in every error.
#[derive(Debug)]
pub(crate) struct Metadata {
    path: PathBuf,
    pairs: HashMap<String, Value>,
}

impl Metadata {
    pub(crate) fn new(path: &Path) -> Self {
        Self { path: path.to_path_buf(), pairs: HashMap::new() }
    }

    /// Adds a pair; gives the key back when it is already there.
    pub(crate) fn insert(&mut self, key: String, value: Value) -> Result<(), String> {
        if self.pairs.contains_key(&key) {
            return Err(key);
        }
        self.pairs.insert(key, value);
        Ok(())
    }

    /// Sets a key, whatever it was.
    pub(crate) fn set(&mut self, key: &str, value: Value) {
        self.pairs.insert(key.to_owned(), value);
    }

    /// The pairs, sorted by key.
    pub(crate) fn sorted(&self) -> Vec<(&str, &Value)> {
        let mut pairs: Vec<_> = self.pairs.iter().map(|(k, v)| (k.as_str(), v)).collect();
        pairs.sort_unstable_by_key(|(k, _)| *k);
        pairs
    }

    /// The keys, sorted.
    pub(crate) fn keys(&self) -> Vec<&str> {
        let mut keys: Vec<_> = self.pairs.keys().map(String::as_str).collect();
        keys.sort_unstable();
        keys
    }

    pub(crate) fn get(&self, key: &str) -> Option<&Value> {
        self.pairs.get(key)
    }

    /// An error of this file about `key`.
    pub(crate) fn invalid(&self, key: &str, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::invalid(&self.path, key, problem)
    }

    pub(crate) fn missing(&self, key: &str, expected: &str) -> CheckpointError {
        self.invalid(key, format!("the key is missing; expected {expected}, got nothing"))
    }

    pub(crate) fn wrong_type(&self, key: &str, expected: &str, found: &Value) -> CheckpointError {
        self.invalid(key, format!("wrong type; expected {expected}, got {}", found.describe()))
    }

    /// An unsigned integer (UINT32 as the specification has it, or UINT64).
    pub(crate) fn unsigned(&self, key: &str) -> Result<Option<u64>, CheckpointError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::U32(v)) => Ok(Some(u64::from(*v))),
            Some(Value::U64(v)) => Ok(Some(*v)),
            Some(other) => Err(self.wrong_type(key, "UINT32", other)),
        }
    }

    pub(crate) fn float(&self, key: &str) -> Result<Option<f32>, CheckpointError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::F32(v)) => Ok(Some(*v)),
            Some(other) => Err(self.wrong_type(key, "FLOAT32", other)),
        }
    }

    pub(crate) fn bool(&self, key: &str) -> Result<Option<bool>, CheckpointError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(v)) => Ok(Some(*v)),
            Some(other) => Err(self.wrong_type(key, "BOOL", other)),
        }
    }

    pub(crate) fn string(&self, key: &str) -> Result<Option<&str>, CheckpointError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(v)) => Ok(Some(v)),
            Some(other) => Err(self.wrong_type(key, "STRING", other)),
        }
    }

    pub(crate) fn strings(&self, key: &str) -> Result<Option<Strings<'_>>, CheckpointError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::Strings { text, ends })) => Ok(Some(Strings { text, ends })),
            Some(other) => Err(self.wrong_type(key, "an array of STRING", other)),
        }
    }

    /// The little-endian words of an array of 4-byte scalars of type `ty`.
    pub(crate) fn words(&self, key: &str, ty: ValueType) -> Result<Option<Vec<[u8; 4]>>, CheckpointError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(Array::Scalars { ty: found, bytes })) if *found == ty => {
                Ok(Some(bytes.chunks_exact(4).map(|w| [w[0], w[1], w[2], w[3]]).collect()))
            }
            Some(other) => Err(self.wrong_type(key, &format!("an array of {}", ty.name()), other)),
        }
    }
}
