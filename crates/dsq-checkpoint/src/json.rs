//! Strict JSON: one value, no duplicate keys, bounded size and depth. Not a schema.

use crate::CheckpointError;
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::cell::Cell;
use std::path::Path;

/// Largest config or index file that is read.
pub(crate) const MAX_JSON_BYTES: u64 = 100 << 20;
/// A parsed value takes 72 bytes however short its text is; these two bound the memory by about twice the text and 30
/// MB. An index of shards has some 100 bytes of text for each of its values.
const BYTES_A_NODE: usize = 64;
const MIN_NODES: usize = 200_000;

/// Parses one JSON value and refuses what serde_json lets pass: a key that occurs twice. Depth is bounded by
/// serde_json itself (128).
///
/// # Errors
/// [`CheckpointError::Invalid`] naming `file` with line and column.
pub(crate) fn parse_json(bytes: &[u8], file: &Path) -> Result<Value, CheckpointError> {
    if bytes.starts_with(b"\xef\xbb\xbf") {
        return Err(CheckpointError::invalid(file, "", "starts with a byte order mark; expected JSON"));
    }
    if let Some(what) = not_json(bytes) {
        return Err(CheckpointError::invalid(file, "", format!("looks like {what}; expected JSON"))
            .with_hint("fetch the real file: git lfs pull, or download it again"));
    }
    let mut de = serde_json::Deserializer::from_slice(bytes);
    let left = Cell::new(MIN_NODES.max(bytes.len() / BYTES_A_NODE));
    let value = Strict { left: &left }.deserialize(&mut de).and_then(|v| de.end().map(|()| v));
    value.map_err(|e| CheckpointError::invalid(file, "", format!("not valid JSON: {e}")))
}

/// Reads and parses a JSON file.
///
/// # Errors
/// As [`parse_json`]; a missing file is [`CheckpointError::Invalid`].
pub(crate) fn read_json(path: &Path) -> Result<Value, CheckpointError> {
    parse_json(&read_bounded(path, MAX_JSON_BYTES)?, path)
}

/// Reads a regular file of at most `limit` bytes.
///
/// # Errors
/// [`CheckpointError::Invalid`] for a missing file, something that is no regular file, or a larger one.
pub(crate) fn read_bounded(path: &Path, limit: u64) -> Result<Vec<u8>, CheckpointError> {
    use std::io::Read;
    let (file, len) = open_regular(path)?;
    if len > limit {
        return Err(CheckpointError::invalid(path, "", format!("expected at most {limit} bytes, got {len}")));
    }
    let mut bytes = Vec::with_capacity(len as usize);
    file.take(limit).read_to_end(&mut bytes).map_err(|e| CheckpointError::io(path, "read", e))?;
    Ok(bytes)
}

/// Opens a regular file and gives its length; never blocks on a FIFO or a device (F025).
///
/// # Errors
/// [`CheckpointError::Invalid`] for a missing file and for a FIFO, folder, device or symlink loop, named as such.
pub(crate) fn open_regular(path: &Path) -> Result<(std::fs::File, u64), CheckpointError> {
    let meta = std::fs::metadata(path).map_err(|e| open_error(path, e))?;
    check_regular(path, &meta)?;
    let file = std::fs::File::open(path).map_err(|e| open_error(path, e))?;
    // Asked again of the open file: the path may have been replaced in between.
    let meta = file.metadata().map_err(|e| CheckpointError::io(path, "stat", e))?;
    check_regular(path, &meta)?;
    Ok((file, meta.len()))
}

fn open_error(path: &Path, e: std::io::Error) -> CheckpointError {
    match e.kind() {
        std::io::ErrorKind::NotFound => CheckpointError::invalid(path, "", "no such file"),
        _ if is_symlink_loop(&e) => CheckpointError::invalid(path, "", "expected a regular file, got a symlink loop"),
        std::io::ErrorKind::NotADirectory | std::io::ErrorKind::InvalidFilename => {
            CheckpointError::invalid(path, "", format!("expected a regular file, got a bad path ({e})"))
        }
        _ => CheckpointError::io(path, "open", e),
    }
}

/// The kind of this error has no stable name in std yet.
#[cfg(unix)]
fn is_symlink_loop(e: &std::io::Error) -> bool {
    e.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error())
}

#[cfg(not(unix))]
fn is_symlink_loop(_: &std::io::Error) -> bool {
    false
}

fn check_regular(path: &Path, meta: &std::fs::Metadata) -> Result<(), CheckpointError> {
    if meta.is_file() {
        return Ok(());
    }
    let kind = if meta.is_dir() { "a folder" } else { special_kind(meta) };
    Err(CheckpointError::invalid(path, "", format!("expected a regular file, got {kind}")))
}

#[cfg(unix)]
fn special_kind(meta: &std::fs::Metadata) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    let t = meta.file_type();
    if t.is_fifo() {
        "a FIFO"
    } else if t.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

#[cfg(not(unix))]
fn special_kind(_: &std::fs::Metadata) -> &'static str {
    "something else"
}

/// Names what stands in place of a model file when a download went wrong (F035).
pub(crate) fn not_json(bytes: &[u8]) -> Option<&'static str> {
    let head = &bytes[..bytes.len().min(256)];
    let text = String::from_utf8_lossy(head).trim_start().to_ascii_lowercase();
    if text.starts_with("version https://git-lfs") {
        Some("a Git LFS pointer")
    } else if text.starts_with("<!doctype") || text.starts_with("<html") || text.starts_with("<?xml") {
        Some("an HTML page")
    } else {
        None
    }
}

/// Deserializes any JSON value, refusing duplicate keys and more values than are left.
#[derive(Clone, Copy)]
struct Strict<'a> {
    left: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Value, D::Error> {
        let left = self.left.get().checked_sub(1).ok_or_else(|| D::Error::custom("too many values"))?;
        self.left.set(left);
        d.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;
    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON value")
    }
    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }
    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }
    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }
    fn visit_f64<E: Error>(self, v: f64) -> Result<Value, E> {
        Number::from_f64(v).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }
    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::String(v.to_owned()))
    }
    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(Value::String(v))
    }
    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut out = Vec::new();
        while let Some(v) = seq.next_element_seed(self)? {
            out.push(v);
        }
        Ok(Value::Array(out))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut out = Map::new();
        while let Some(key) = map.next_key::<String>()? {
            let value = map.next_value_seed(self)?;
            if out.contains_key(&key) {
                return Err(A::Error::custom(format!("key {key:?} occurs twice")));
            }
            out.insert(key, value);
        }
        Ok(Value::Object(out))
    }
}

/// A `u64` of a JSON header, refusing what is not written as a plain non-negative integer.
pub(crate) struct PlainU64(pub u64);

impl<'de> Deserialize<'de> for PlainU64 {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl Visitor<'_> for V {
            type Value = PlainU64;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an integer from 0 to 2^64-1")
            }
            fn visit_u64<E>(self, v: u64) -> Result<PlainU64, E> {
                Ok(PlainU64(v))
            }
        }
        d.deserialize_any(V)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &[u8]) -> String {
        parse_json(text, Path::new("c.json")).unwrap_err().to_string()
    }

    #[test]
    fn f037_what_is_not_strict_json_is_refused() {
        assert!(error(b"").contains("not valid JSON"));
        assert!(error(b"{\"a\": 1, \"a\": 1}").contains("occurs twice"));
        assert!(error(b"{\"b\": {\"a\": 1, \"a\": 1}}").contains("occurs twice"));
        assert!(error(b"{} // comment").contains("not valid JSON"));
        assert!(error(b"{\"a\": NaN}").contains("not valid JSON"));
        assert!(error(b"\xef\xbb\xbf{}").contains("byte order mark"));
        assert!(error(b"{\"a\": \"\xff\"}").contains("not valid JSON"));
        assert!(error(&[b'['; 100_000]).contains("not valid JSON"));
        // A million empty lists in 3 MB would take 72 MB and more.
        assert!(error(format!("[{}[]]", "[],".repeat(1_000_000)).as_bytes()).contains("too many values"));
        let value = parse_json(b"{\"a\": [1, -2, 0.5, null, true, \"x\"]}", Path::new("c")).unwrap();
        assert_eq!(value, serde_json::json!({"a": [1, -2, 0.5, null, true, "x"]}));
    }

    #[test]
    fn f035_pointers_and_pages_are_named() {
        assert!(error(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n").contains("Git LFS pointer"));
        assert!(error(b"<!DOCTYPE html><html>").contains("HTML page"));
    }
}
