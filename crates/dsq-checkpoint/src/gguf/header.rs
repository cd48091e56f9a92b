//! The strict reader of a GGUF header: version, key-value pairs, tensor table. Not the meaning of any key, and no tensor data.
//!
//! Nothing is allocated by a length that the file merely claims: every count is first held against the bytes that really
//! remain, and counts of things that grow when read (pairs, tensors) are capped. Layout of the format: the specification
//! `docs/gguf.md` of ggml, and `gguf.cpp` for what llama.cpp itself refuses.

use super::dequant::{GgmlType, foreign_type_name};
use super::value::{Array, Metadata, Value, ValueType};
use crate::CheckpointError;
use crate::error::printable;
use std::collections::HashMap;
use std::fmt::Display;
use std::io::Read;
use std::path::Path;

/// Most key-value pairs of one file. Real files have fewer than 100; the cap bounds what a hostile count can make us hold.
const MAX_PAIRS: u64 = 1 << 16;
/// Most tensors of one file. The largest public models have a few thousand.
const MAX_TENSORS: u64 = 1 << 16;
/// Longest key, by the specification.
const MAX_KEY_BYTES: u64 = 65535;
/// Longest tensor name, by the specification.
const MAX_NAME_BYTES: u64 = 64;
/// Alignment when `general.alignment` is absent.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Alignments that are accepted: the specification asks for a multiple of 8, ggml for a power of two.
const ALIGNMENTS: std::ops::RangeInclusive<u64> = 8..=65536;

/// One row of the tensor table, checked against its type and against the file's length.
#[derive(Debug, Clone)]
pub(crate) struct TensorEntry {
    /// Name in the file.
    pub(crate) name: String,
    /// Dimensions as stored: `ne[0]`, the contiguous one (in_features), first.
    pub(crate) ne: Vec<u64>,
    /// Element type.
    pub(crate) ty: GgmlType,
    /// Which of the model's files it is in: 0, but in other parts of a split model.
    pub(crate) file: usize,
    /// Position of the first byte in that file.
    pub(crate) start: u64,
    /// Length in bytes.
    pub(crate) bytes: u64,
}

impl TensorEntry {
    /// Number of values.
    pub(crate) fn elements(&self) -> u64 {
        self.ne.iter().product()
    }
}

/// Everything that precedes the tensor data.
#[derive(Debug)]
pub(crate) struct Header {
    /// The key-value pairs.
    pub(crate) metadata: Metadata,
    /// The tensor table, in file order.
    pub(crate) tensors: Vec<TensorEntry>,
    /// Bytes after the last tensor and its padding.
    pub(crate) trailing: u64,
}

impl Header {
    /// Reads and checks the header of a file of `len` bytes.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] naming the key, tensor or field; [`CheckpointError::Io`] when reading fails.
    pub(crate) fn read(source: impl Read, len: u64, path: &Path) -> Result<Self, CheckpointError> {
        let mut r = Reader { source, path, at: 0, len };
        r.version()?;
        let n_tensors = r.u64("tensor_count")?;
        let n_kv = r.u64("metadata_kv_count")?;
        // A pair takes at least 8 + 1 + 4 + 1 bytes, a tensor info 8 + 1 + 4 + 8 + 4 + 8.
        r.count("metadata_kv_count", n_kv, 14, MAX_PAIRS)?;
        r.count("tensor_count", n_tensors, 33, MAX_TENSORS)?;
        let mut metadata = Metadata::new(path);
        for i in 0..n_kv {
            let (key, value) = r.pair(i)?;
            if let Err(key) = metadata.insert(key, value) {
                return Err(CheckpointError::invalid(path, key, "the key occurs twice; expected each key once"));
            }
        }
        let alignment = alignment(&metadata)?;
        let mut infos = Vec::new();
        for i in 0..n_tensors {
            infos.push(r.tensor_info(i)?);
        }
        let (tensors, end) = place(infos, r.at, alignment, len, path)?;
        let trailing = len - end.next_multiple_of(alignment).min(len);
        Ok(Self { metadata, tensors, trailing })
    }
}

/// `general.alignment`, a power of two.
fn alignment(metadata: &Metadata) -> Result<u64, CheckpointError> {
    let key = "general.alignment";
    let found = match metadata.get(key) {
        None => return Ok(DEFAULT_ALIGNMENT),
        Some(Value::U32(n)) => u64::from(*n),
        Some(other) => return Err(metadata.wrong_type(key, "UINT32", other)),
    };
    if !found.is_power_of_two() || !ALIGNMENTS.contains(&found) {
        return Err(metadata.invalid(key, format!("expected a power of two from 8 to 65536, got {found}")));
    }
    Ok(found)
}

/// A tensor info before its place in the file is checked.
struct Info {
    name: String,
    ne: Vec<u64>,
    ty: GgmlType,
    offset: u64,
    bytes: u64,
}

/// Checks that the tensors lie one after the other, padded to the alignment, as ggml demands (so none overlaps another and
/// there are no holes), and inside the file. Gives the table and the end of the last tensor.
fn place(
    infos: Vec<Info>,
    header_end: u64,
    alignment: u64,
    len: u64,
    path: &Path,
) -> Result<(Vec<TensorEntry>, u64), CheckpointError> {
    let invalid = |name: &str, problem: String| CheckpointError::invalid(path, name, problem);
    let mut seen: HashMap<String, ()> = HashMap::with_capacity(infos.len());
    let mut tensors: Vec<TensorEntry> = Vec::with_capacity(infos.len());
    let data_start = header_end.next_multiple_of(alignment);
    let (mut expected, mut end) = (0u64, header_end);
    for info in infos {
        if seen.insert(info.name.clone(), ()).is_some() {
            return Err(invalid(&info.name, "the tensor is listed twice; expected each name once".into()));
        }
        if info.offset % alignment != 0 {
            let problem = format!("offset is not aligned; expected a multiple of {alignment}, got {}", info.offset);
            return Err(invalid(&info.name, problem));
        }
        if info.offset != expected {
            let after = match tensors.last() {
                Some(before) => format!("{expected} (the padded end of {})", printable(&before.name)),
                None => "0 (the first tensor)".into(),
            };
            let what = if info.offset < expected { "overlaps the tensor before it" } else { "leaves a hole" };
            let problem = format!("the offset {what}; expected {after}, got {}", info.offset);
            return Err(invalid(&info.name, problem));
        }
        let start = data_start.checked_add(info.offset);
        let stop = start.and_then(|s| s.checked_add(info.bytes)).filter(|stop| *stop <= len);
        let (Some(start), Some(stop)) = (start, stop) else {
            let problem = format!(
                "the data goes past the end of the file (download incomplete?); expected {} bytes from {}, got a file of {len} bytes",
                info.bytes,
                start.unwrap_or(u64::MAX),
            );
            return Err(invalid(&info.name, problem));
        };
        // `stop` lies inside the file, so padding it overflows only for a file within one alignment of 2^64 bytes.
        expected = (stop - data_start).checked_next_multiple_of(alignment).unwrap_or(u64::MAX);
        end = stop;
        tensors.push(TensorEntry { name: info.name, ne: info.ne, ty: info.ty, file: 0, start, bytes: info.bytes });
    }
    Ok((tensors, end))
}

/// A cursor over the header that knows how many bytes really remain.
struct Reader<'a, R> {
    source: R,
    path: &'a Path,
    at: u64,
    len: u64,
}

impl<R: Read> Reader<'_, R> {
    fn invalid(&self, field: &dyn Display, problem: impl Into<String>) -> CheckpointError {
        CheckpointError::invalid(self.path, field.to_string(), problem)
    }

    fn remaining(&self) -> u64 {
        self.len - self.at
    }

    /// Reads exactly `buffer.len()` bytes.
    fn fill(&mut self, buffer: &mut [u8], field: &dyn Display) -> Result<(), CheckpointError> {
        if buffer.len() as u64 > self.remaining() {
            let problem = format!(
                "the file ends early (download incomplete?); expected {} bytes at {}, got {}: only {} bytes remain",
                buffer.len(),
                self.at,
                self.remaining(),
                self.remaining()
            );
            return Err(self.invalid(field, problem));
        }
        self.source.read_exact(buffer).map_err(|e| CheckpointError::io(self.path, "read", e))?;
        self.at += buffer.len() as u64;
        Ok(())
    }

    fn array<const N: usize>(&mut self, field: &dyn Display) -> Result<[u8; N], CheckpointError> {
        let mut buffer = [0; N];
        self.fill(&mut buffer, field)?;
        Ok(buffer)
    }

    fn u32(&mut self, field: impl Display) -> Result<u32, CheckpointError> {
        Ok(u32::from_le_bytes(self.array(&field)?))
    }

    fn u64(&mut self, field: impl Display) -> Result<u64, CheckpointError> {
        Ok(u64::from_le_bytes(self.array(&field)?))
    }

    /// Checks that `count` items of at least `least` bytes each can still follow, and the cap.
    fn count(&self, field: &str, count: u64, least: u64, cap: u64) -> Result<(), CheckpointError> {
        let room = self.remaining() / least;
        if count > room {
            let problem =
                format!("expected at most {room}, got {count}: only {} bytes remain in the file", self.remaining());
            return Err(self.invalid(&field, problem));
        }
        if count > cap {
            return Err(self.invalid(&field, format!("expected at most {cap}, got {count}")));
        }
        Ok(())
    }

    /// Magic and version: only little-endian files of version 2 or 3, which differ in nothing that is read here.
    fn version(&mut self) -> Result<(), CheckpointError> {
        if self.len < 24 {
            let problem = format!("expected at least 24 bytes (the header of an empty model), got {}", self.len);
            return Err(self.invalid(&"GGUF header", problem));
        }
        let magic: [u8; 4] = self.array(&"magic")?;
        if &magic != b"GGUF" {
            let convert = "convert the original model to GGUF version 3 again";
            let fetch = "fetch the real file: git lfs pull, or download it again";
            let give = "give a folder with config.json, or a GGUF file";
            let (found, hint) = match &magic {
                b"lmgg" | b"fmgg" | b"tjgg" | b"algg" => {
                    ("a ggml file from before GGUF (GGML, GGMF, GGJT or GGLA)", convert)
                }
                b"FUGG" => ("the bytes of GGUF swapped", convert),
                b"vers" => ("what looks like a Git LFS pointer", fetch),
                b"<!do" | b"<!DO" | b"<htm" => ("what looks like an HTML page", fetch),
                _ => ("something else", give),
            };
            let problem = format!("expected GGUF, got {found} ({})", printable(&String::from_utf8_lossy(&magic)));
            return Err(self.invalid(&"magic", problem).with_hint(hint));
        }
        let version = self.u32("version")?;
        match version {
            2 | 3 => Ok(()),
            _ if version != 0 && version & 0xffff == 0 => {
                let problem = format!(
                    "expected a little-endian file of version 2 or 3, got a big-endian file of version {}",
                    version.swap_bytes()
                );
                Err(self.invalid(&"version", problem).with_hint("convert it with gguf-convert-endian"))
            }
            _ => Err(self.invalid(&"version", format!("expected 2 or 3, got {version}"))),
        }
    }

    /// A length-prefixed UTF-8 string of at most `most` bytes.
    fn string(&mut self, field: &dyn Display, most: u64) -> Result<String, CheckpointError> {
        let mut text = String::new();
        self.append_string(&mut text, field, most)?;
        Ok(text)
    }

    /// Appends a length-prefixed UTF-8 string to `text`.
    fn append_string(&mut self, text: &mut String, field: &dyn Display, most: u64) -> Result<(), CheckpointError> {
        let len = u64::from_le_bytes(self.array(field)?);
        if len > self.remaining() {
            let problem = format!(
                "the string is longer than the file; expected at most {} bytes, got {len}: only {} bytes remain",
                self.remaining(),
                self.remaining()
            );
            return Err(self.invalid(field, problem));
        }
        if len > most {
            return Err(self.invalid(field, format!("expected a string of at most {most} bytes, got {len}")));
        }
        let mut bytes = vec![0; len as usize];
        self.fill(&mut bytes, field)?;
        match std::str::from_utf8(&bytes) {
            Ok(part) => text.push_str(part),
            Err(e) => {
                let problem =
                    format!("expected UTF-8, got the byte {:#04x} at {}", bytes[e.valid_up_to()], e.valid_up_to());
                return Err(self.invalid(field, problem));
            }
        }
        Ok(())
    }

    /// One key and its value.
    fn pair(&mut self, index: u64) -> Result<(String, Value), CheckpointError> {
        let key = self.string(&format!("key {index}"), MAX_KEY_BYTES)?;
        if key.is_empty() {
            return Err(self.invalid(&format!("key {index}"), "expected a name, got an empty one"));
        }
        let ty = self.value_type(&key)?;
        let value = match ty {
            ValueType::U8 => Value::U8(self.array::<1>(&key)?[0]),
            ValueType::I8 => Value::I8(self.array::<1>(&key)?[0] as i8),
            ValueType::U16 => Value::U16(u16::from_le_bytes(self.array(&key)?)),
            ValueType::I16 => Value::I16(i16::from_le_bytes(self.array(&key)?)),
            ValueType::U32 => Value::U32(self.u32(&key)?),
            ValueType::I32 => Value::I32(i32::from_le_bytes(self.array(&key)?)),
            ValueType::F32 => Value::F32(f32::from_le_bytes(self.array(&key)?)),
            ValueType::U64 => Value::U64(self.u64(&key)?),
            ValueType::I64 => Value::I64(i64::from_le_bytes(self.array(&key)?)),
            ValueType::F64 => Value::F64(f64::from_le_bytes(self.array(&key)?)),
            ValueType::Bool => {
                let byte = self.array::<1>(&key)?[0];
                self.check_bools(&key, &[byte])?;
                Value::Bool(byte == 1)
            }
            ValueType::String => Value::String(self.string(&key, u64::MAX)?),
            ValueType::Array => Value::Array(self.value_array(&key)?),
        };
        Ok((key, value))
    }

    fn value_type(&mut self, key: &str) -> Result<ValueType, CheckpointError> {
        let id = self.u32(key)?;
        ValueType::from_id(id).ok_or_else(|| {
            self.invalid(&key, format!("expected a value type from 0 (UINT8) to 12 (FLOAT64), got {id}"))
        })
    }

    fn check_bools(&self, key: &str, bytes: &[u8]) -> Result<(), CheckpointError> {
        match bytes.iter().position(|b| *b > 1) {
            None => Ok(()),
            Some(i) => {
                Err(self.invalid(&key, format!("expected a boolean byte 0 or 1, got {} at index {i}", bytes[i])))
            }
        }
    }

    fn value_array(&mut self, key: &str) -> Result<Array, CheckpointError> {
        let ty = self.value_type(key)?;
        let count = self.u64(key)?;
        let least = match ty {
            ValueType::Array => {
                return Err(self.invalid(&key, "expected an array of scalars or strings, got an array of arrays"));
            }
            // The length prefix.
            ValueType::String => 8,
            scalar => scalar.bytes() as u64,
        };
        if count > self.remaining() / least {
            let problem = format!(
                "the array is longer than the file; expected at most {} elements of type {}, got {count}: only {} bytes remain",
                self.remaining() / least,
                ty.name(),
                self.remaining()
            );
            return Err(self.invalid(&key, problem));
        }
        if ty != ValueType::String {
            let mut bytes = vec![0; (count * least) as usize];
            self.fill(&mut bytes, &key)?;
            if ty == ValueType::Bool {
                self.check_bools(key, &bytes)?;
            }
            return Ok(Array::Scalars { ty, bytes });
        }
        let mut text = String::new();
        let mut ends = Vec::with_capacity(count as usize);
        for i in 0..count {
            self.append_string(&mut text, &Element { key, i }, u64::MAX)?;
            ends.push(text.len());
        }
        Ok(Array::Strings { text, ends })
    }

    fn tensor_info(&mut self, index: u64) -> Result<Info, CheckpointError> {
        let name = self.string(&format!("tensor {index}: name"), MAX_NAME_BYTES)?;
        if name.is_empty() {
            return Err(self.invalid(&format!("tensor {index}"), "expected a name, got an empty one"));
        }
        let n_dims = self.u32(&name)?;
        if !(1..=4).contains(&n_dims) {
            return Err(self.invalid(&name, format!("expected 1 to 4 dimensions, got {n_dims}")));
        }
        let mut ne = Vec::with_capacity(4);
        for _ in 0..n_dims {
            ne.push(self.u64(&name)?);
        }
        let id = self.u32(&name)?;
        let offset = self.u64(&name)?;
        let Some(ty) = GgmlType::from_id(id) else {
            let known: Vec<_> = GgmlType::ALL.iter().map(|t| t.name()).collect();
            let problem =
                format!("expected one of the types {}, got {id} ({})", known.join(", "), foreign_type_name(id));
            return Err(self.invalid(&name, problem));
        };
        if let Some(d) = ne.iter().position(|d| *d == 0) {
            return Err(self.invalid(&name, format!("expected positive dimensions, got {ne:?} (dimension {d} is 0)")));
        }
        let block = ty.block_len() as u64;
        if ne[0] % block != 0 {
            let problem = format!(
                "expected rows (ne[0]) of a multiple of {block} values, the block of {}, got {}",
                ty.name(),
                ne[0]
            );
            return Err(self.invalid(&name, problem));
        }
        // ggml counts elements in an i64; the padded size must not overflow either.
        let elements = ne.iter().try_fold(1u64, |p, d| p.checked_mul(*d)).filter(|p| *p <= i64::MAX as u64);
        let bytes = elements
            .and_then(|e| (e / block).checked_mul(ty.block_bytes() as u64))
            .filter(|b| b.checked_next_multiple_of(*ALIGNMENTS.end()).is_some());
        let Some(bytes) = bytes else {
            let problem = format!("the size overflows; expected fewer than 2^63 values, got the dimensions {ne:?}");
            return Err(self.invalid(&name, problem));
        };
        Ok(Info { name, ne, ty, offset, bytes })
    }
}

/// The name of an array element, made only when an error needs it.
struct Element<'a> {
    key: &'a str,
    i: u64,
}

impl Display for Element<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}[{}]", self.key, self.i)
    }
}
