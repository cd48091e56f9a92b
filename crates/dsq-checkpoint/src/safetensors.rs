//! The safetensors format: a strict reader that reads one tensor at a time with positioned reads, and a streaming
//! writer. No memory map: a file that shrinks while it is read gives an error, never a signal.
//!
//! The file is an 8-byte little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, and the
//! data. The reader refuses what the reference crate lets pass: a name or key listed twice, overlaps and holes,
//! trailing bytes, a range of another size than shape and dtype say, rank above 8, unknown dtypes.

use crate::json::{PlainU64, not_json, open_regular};
use crate::tensor::floats_from_bytes;
use crate::{CheckpointError, Dtype, NamedTensor, TensorInfo, printable};
use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, Visitor};
use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Largest header, as in the reference implementation.
const MAX_HEADER: u64 = 100_000_000;
/// Largest rank of a tensor.
const MAX_RANK: usize = 8;
/// Most tensors in a file: more than any model has, and few enough that their table stays small.
const MAX_TENSORS: usize = 1 << 17;
/// Longest tensor name, in bytes.
const MAX_NAME: usize = 4096;
/// Bytes that are read at a time where a tensor is not wanted whole: a multiple of every element size, and a part of what a core's own
/// cache holds, so that what is made of them is there too.
pub(crate) const RUN: usize = 1 << 17;
/// Bytes behind a run that the system is asked for while the run is worked on, so that the disk does not wait for the processor.
const AHEAD: u64 = 16 << 20;

/// One entry of the header: a tensor and where its bytes lie in the file.
#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    begin: u64,
    end: u64,
}

impl Entry {
    pub(crate) fn info(&self) -> TensorInfo {
        TensorInfo { dtype: self.dtype.name().into(), shape: self.shape.clone(), bytes: self.end - self.begin }
    }
}

/// An open safetensors file whose header has been checked; for single files such as golden vectors and training state
/// (a model folder is a [`crate::Checkpoint`]).
#[derive(Debug)]
pub struct SafetensorsFile {
    path: PathBuf,
    file: File,
    /// In the order of the data.
    entries: Vec<Entry>,
    /// Indices into `entries`, sorted by name.
    by_name: Vec<u32>,
    data_start: u64,
}

/// Indices of entries, sorted by name.
fn sorted(entries: &[Entry]) -> Vec<u32> {
    let mut by_name: Vec<u32> = (0..entries.len() as u32).collect();
    by_name.sort_by(|&a, &b| entries[a as usize].name.cmp(&entries[b as usize].name));
    by_name
}

impl SafetensorsFile {
    /// Opens a file and checks its whole header; reads no tensor.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] naming file and tensor; I/O errors.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let (file, len) = open_regular(path)?;
        let invalid = |field: &str, problem: String| CheckpointError::invalid(path, field, problem);
        if len < 8 {
            return Err(invalid(
                "header length",
                format!("needs 8 bytes; expected a safetensors file, file has {len} bytes"),
            ));
        }
        let mut head = [0u8; 8];
        read_at(&file, path, &mut head, 0)?;
        let header_len = u64::from_le_bytes(head);
        if header_len > MAX_HEADER || header_len > len - 8 {
            let mut start = vec![0u8; len.min(256) as usize];
            read_at(&file, path, &mut start, 0)?;
            if let Some(what) = not_json(&start) {
                return Err(invalid("", format!("looks like {what}; expected a safetensors file"))
                    .with_hint("fetch the real file: git lfs pull, or download it again"));
            }
        }
        if header_len > MAX_HEADER {
            return Err(invalid(
                "header length",
                format!("too large; expected at most {MAX_HEADER} bytes, got {header_len}"),
            ));
        }
        if header_len > len - 8 {
            let problem =
                format!("header does not fit; expected at most {} bytes (file has {len}), got {header_len}", len - 8);
            return Err(invalid("header length", problem).with_hint("download incomplete?"));
        }
        let mut text = vec![0u8; header_len as usize];
        read_at(&file, path, &mut text, 8)?;
        let mut entries = parse_header(&text, path)?;
        drop(text);
        entries.sort_by_key(|e| (e.begin, e.end));
        check_layout(&entries, path, len - 8 - header_len, len)?;
        let by_name = sorted(&entries);
        if let Some(pair) = by_name.windows(2).find(|p| entries[p[0] as usize].name == entries[p[1] as usize].name) {
            return Err(invalid(
                &entries[pair[0] as usize].name,
                "tensor listed twice; expected one entry, got 2".into(),
            ));
        }
        Ok(Self { path: path.to_path_buf(), file, entries, by_name, data_start: 8 + header_len })
    }

    /// Takes tensors apart into others that lie in their bytes one after the other: `parts` gives names and shapes of those of an entry,
    /// or `None` for one that stays. The number of tensors that were taken apart.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for parts that are not all of the bytes, and for a name that is there already.
    pub(crate) fn split(
        &mut self,
        parts: impl Fn(&Entry) -> Option<Vec<(String, Vec<usize>)>>,
    ) -> Result<usize, CheckpointError> {
        let invalid = |name: &str, problem: String| CheckpointError::invalid(&self.path, name, problem);
        let (mut entries, mut count) = (Vec::with_capacity(self.entries.len()), 0);
        for entry in &self.entries {
            let Some(parts) = parts(entry) else {
                entries.push(entry.clone());
                continue;
            };
            count += 1;
            let mut begin = entry.begin;
            for (name, shape) in parts {
                let end = begin + (shape.iter().product::<usize>() * entry.dtype.size()) as u64;
                entries.push(Entry { name, dtype: entry.dtype, shape, begin, end });
                begin = end;
            }
            if begin != entry.end {
                let problem =
                    format!("expected {} bytes for all experts, got {}", begin - entry.begin, entry.end - entry.begin);
                return Err(invalid(&entry.name, problem));
            }
        }
        if count > 0 {
            let by_name = sorted(&entries);
            if let Some(pair) = by_name.windows(2).find(|p| entries[p[0] as usize].name == entries[p[1] as usize].name)
            {
                let problem = "experts are stacked in one tensor and stored one by one; expected one of them, got both";
                return Err(invalid(&entries[pair[0] as usize].name, problem.into()));
            }
            (self.entries, self.by_name) = (entries, by_name);
        }
        Ok(count)
    }

    /// The names of the tensors, in the order of the data.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|e| e.name.as_str())
    }

    /// Dtype, shape and size of a tensor.
    pub fn info(&self, name: &str) -> Option<TensorInfo> {
        self.entry(name).map(Entry::info)
    }

    /// The stored bytes of a tensor, little endian, and their dtype.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] for a name that is absent; I/O errors.
    pub fn read_stored(&self, name: &str) -> Result<(Dtype, Vec<u8>), CheckpointError> {
        let entry = self
            .entry(name)
            .ok_or_else(|| CheckpointError::invalid(&self.path, name, "expected this tensor, got nothing"))?;
        Ok((entry.dtype, self.read(entry)?))
    }

    /// A float tensor (F32, F16, BF16) as f32, exactly.
    ///
    /// # Errors
    /// As [`SafetensorsFile::read_stored`], and for another dtype.
    pub fn read_f32(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let (dtype, bytes) = self.read_stored(name)?;
        let float = dtype.float().ok_or_else(|| {
            let problem = format!("not a float tensor that can be read; expected F32, F16 or BF16, got {dtype}");
            CheckpointError::invalid(&self.path, name, problem)
        })?;
        Ok(floats_from_bytes(&bytes, float))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The tensors, in the order of the data.
    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    pub(crate) fn entry(&self, name: &str) -> Option<&Entry> {
        let at = self.by_name.binary_search_by(|&i| self.entries[i as usize].name.as_str().cmp(name)).ok()?;
        self.entries.get(self.by_name[at] as usize)
    }

    /// The bytes of a tensor.
    pub(crate) fn read(&self, entry: &Entry) -> Result<Vec<u8>, CheckpointError> {
        // The range lies within the file as it was at open, so this allocation is bounded by bytes that were there.
        let mut bytes = vec![0u8; (entry.end - entry.begin) as usize];
        read_at(&self.file, &self.path, &mut bytes, self.data_start + entry.begin)?;
        Ok(bytes)
    }

    /// The bytes of a tensor, run by run of `most` (the last may have fewer).
    pub(crate) fn read_runs(
        &self,
        entry: &Entry,
        most: usize,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), CheckpointError> {
        let most = most.max(1) as u64;
        let mut buffer = vec![0u8; most.min(entry.end - entry.begin) as usize];
        let mut asked = entry.begin;
        for at in (entry.begin..entry.end).step_by(most as usize) {
            let run = &mut buffer[..most.min(entry.end - at) as usize];
            read_at(&self.file, &self.path, run, self.data_start + at)?;
            if at >= asked {
                // Past the end of the tensor too, which is followed by the next one; of small tensors as little.
                read_ahead(&self.file, self.data_start + at + most, AHEAD.min(entry.end - entry.begin));
                asked = at + AHEAD / 2;
            }
            take(run);
        }
        Ok(())
    }

    /// Asks the system for a tensor before it is wanted.
    pub(crate) fn read_ahead(&self, entry: &Entry) {
        read_ahead(&self.file, self.data_start + entry.begin, entry.end - entry.begin);
    }

    /// Row `row` of a tensor whose first dimension is rows.
    pub(crate) fn read_row(&self, entry: &Entry, row: usize) -> Result<Vec<u8>, CheckpointError> {
        let rows = entry.shape.first().copied().unwrap_or(1).max(1);
        if row >= rows {
            let problem = format!("expected a row below {rows}, got {row}");
            return Err(CheckpointError::invalid(&self.path, &entry.name, problem));
        }
        let len = (entry.end - entry.begin) as usize / rows;
        let mut bytes = vec![0u8; len];
        read_at(&self.file, &self.path, &mut bytes, self.data_start + entry.begin + (row * len) as u64)?;
        Ok(bytes)
    }
}

/// Asks the system to have these bytes in memory soon. A wish: nothing depends on it.
fn read_ahead(file: &File, offset: u64, len: u64) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, offset, std::num::NonZeroU64::new(len), rustix::fs::Advice::WillNeed);
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, len);
}

/// Fills `buf` from `offset`. A file that has become shorter is an I/O error.
pub(crate) fn read_at(file: &File, path: &Path, buf: &mut [u8], offset: u64) -> Result<(), CheckpointError> {
    #[cfg(unix)]
    let read = std::os::unix::fs::FileExt::read_exact_at(file, buf, offset);
    #[cfg(not(unix))]
    let read = {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = file;
        file.seek(SeekFrom::Start(offset)).and_then(|_| file.read_exact(buf))
    };
    read.map_err(|e| match e.kind() {
        std::io::ErrorKind::UnexpectedEof => {
            let problem =
                format!("the file became shorter while it was read; expected {} bytes at {offset}", buf.len());
            CheckpointError::io(path, "read", std::io::Error::new(std::io::ErrorKind::UnexpectedEof, problem))
        }
        _ => CheckpointError::io(path, "read", e),
    })
}

fn parse_header(text: &[u8], path: &Path) -> Result<Vec<Entry>, CheckpointError> {
    if text.first().is_none_or(|b| !matches!(b, b'{' | b' ')) {
        return Err(CheckpointError::invalid(path, "header", "expected a JSON object that starts with {"));
    }
    let text = std::str::from_utf8(text).map_err(|e| {
        CheckpointError::invalid(path, "header", format!("expected UTF-8, got another byte at {}", e.valid_up_to()))
    })?;
    // The tensor that is being parsed, for messages.
    let current = RefCell::new("header".to_owned());
    let mut de = serde_json::Deserializer::from_str(text);
    let parsed = HeaderSeed { current: &current }.deserialize(&mut de).and_then(|h| de.end().map(|()| h));
    parsed.map_err(|e| CheckpointError::invalid(path, current.take(), format!("bad header: {e}")))
}

/// Checks that the ranges cover the data exactly, in any order of names.
fn check_layout(entries: &[Entry], path: &Path, data_len: u64, file_len: u64) -> Result<(), CheckpointError> {
    let mut at = 0u64;
    let mut last = "the header";
    for e in entries {
        let invalid = |problem: String| Err(CheckpointError::invalid(path, &e.name, problem));
        if e.begin > e.end {
            return invalid(format!("data_offsets: expected begin <= end, got [{}, {}]", e.begin, e.end));
        }
        if e.begin < at {
            return invalid(format!(
                "overlaps {}; expected data_offsets from {at}, got [{}, {}]",
                printable(last),
                e.begin,
                e.end
            ));
        }
        if e.begin > at {
            return invalid(format!(
                "hole after {}; expected data_offsets from {at}, got [{}, {}]",
                printable(last),
                e.begin,
                e.end
            ));
        }
        // One zero-sized dimension must not hide an overflow of the others.
        let product = |skip_zero: bool| {
            let dims = e.shape.iter().filter(|&&d| d != 0 || !skip_zero);
            dims.copied().try_fold(e.dtype.size() as u64, |acc, d| acc.checked_mul(d as u64))
        };
        let (Some(_), Some(size)) = (product(true), product(false)) else {
            return invalid(format!("shape {:?} overflows; expected a size below 2^64 bytes", e.shape));
        };
        if size != e.end - e.begin {
            return invalid(format!(
                "shape {:?} of {} does not match data_offsets [{}, {}]; expected {size} bytes, got {}",
                e.shape,
                e.dtype,
                e.begin,
                e.end,
                e.end - e.begin
            ));
        }
        at = e.end;
        last = &e.name;
    }
    let head = file_len - data_len;
    if at > data_len {
        return Err(CheckpointError::invalid(
            path,
            last,
            format!("file is cut; expected {} bytes by the header, file has {file_len}", head.saturating_add(at)),
        )
        .with_hint("download incomplete?"));
    }
    if at < data_len {
        let problem =
            format!("bytes after the last tensor; expected {} bytes by the header, file has {file_len}", head + at);
        return Err(CheckpointError::invalid(path, "", problem));
    }
    Ok(())
}

struct HeaderSeed<'a> {
    current: &'a RefCell<String>,
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Vec<Entry>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Vec<Entry>, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Vec<Entry>;
    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a JSON object of tensors")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Vec<Entry>, A::Error> {
        let mut entries = Vec::new();
        let mut metadata = false;
        while let Some(name) = map.next_key::<String>()? {
            self.current.replace(name.clone());
            if name == "__metadata__" {
                if std::mem::replace(&mut metadata, true) {
                    return Err(A::Error::custom("__metadata__ listed twice"));
                }
                map.next_value::<Metadata>()?;
                continue;
            }
            if name.is_empty() || name.len() > MAX_NAME || name.contains('\0') {
                let problem = format!("expected a name of 1 to {MAX_NAME} bytes without NUL, got {} bytes", name.len());
                return Err(A::Error::custom(problem));
            }
            if entries.len() == MAX_TENSORS {
                return Err(A::Error::custom(format!("expected at most {MAX_TENSORS} tensors, got more")));
            }
            let fields = map.next_value::<EntryFields>()?;
            entries.push(Entry {
                name,
                dtype: fields.dtype,
                shape: fields.shape,
                begin: fields.offsets[0],
                end: fields.offsets[1],
            });
        }
        self.current.replace("header".into());
        Ok(entries)
    }
}

/// `__metadata__`: strings only, each key once. dsq reads nothing from it.
struct Metadata;

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = Metadata;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of strings")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Metadata, A::Error> {
                let mut seen = BTreeMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if seen.insert(key, value.len()).is_some() {
                        return Err(A::Error::custom("a key of __metadata__ occurs twice"));
                    }
                }
                Ok(Metadata)
            }
        }
        d.deserialize_map(V)
    }
}

struct EntryFields {
    dtype: Dtype,
    shape: Vec<usize>,
    offsets: [u64; 2],
}

impl<'de> Deserialize<'de> for EntryFields {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct V;
        impl<'de> Visitor<'de> for V {
            type Value = EntryFields;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object with dtype, shape and data_offsets")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<EntryFields, A::Error> {
                let (mut dtype, mut shape, mut offsets) = (None, None, None);
                while let Some(key) = map.next_key::<String>()? {
                    let twice = match key.as_str() {
                        "dtype" => {
                            let name = map.next_value::<String>()?;
                            let parsed = Dtype::parse(&name).ok_or_else(|| {
                                let known = Dtype::names();
                                A::Error::custom(format!("dtype: expected one of {known}, got {}", printable(&name)))
                            })?;
                            dtype.replace(parsed).is_some()
                        }
                        "shape" => shape.replace(dims(map.next_value()?)?).is_some(),
                        "data_offsets" => {
                            let list = map.next_value::<Vec<PlainU64>>()?;
                            let [PlainU64(begin), PlainU64(end)] = list[..] else {
                                let problem = format!("data_offsets: expected 2 numbers, got {}", list.len());
                                return Err(A::Error::custom(problem));
                            };
                            offsets.replace([begin, end]).is_some()
                        }
                        other => return Err(A::Error::custom(format!("unknown key {:?}", printable(other)))),
                    };
                    if twice {
                        return Err(A::Error::custom(format!("{key} listed twice; expected one, got 2")));
                    }
                }
                let missing = |what| A::Error::custom(format!("{what}: expected a value, got nothing"));
                Ok(EntryFields {
                    dtype: dtype.ok_or_else(|| missing("dtype"))?,
                    shape: shape.ok_or_else(|| missing("shape"))?,
                    offsets: offsets.ok_or_else(|| missing("data_offsets"))?,
                })
            }
        }
        d.deserialize_map(V)
    }
}

fn dims<E: Error>(list: Vec<PlainU64>) -> Result<Vec<usize>, E> {
    if list.len() > MAX_RANK {
        return Err(E::custom(format!("shape: expected rank at most {MAX_RANK}, got {}", list.len())));
    }
    list.into_iter()
        .map(|PlainU64(d)| usize::try_from(d).map_err(|_| E::custom(format!("shape: dimension {d} is too large"))))
        .collect()
}

/// A tensor about to be written: its bytes are asked for when their turn comes, so that a large model is never held
/// twice.
pub(crate) struct Pending<'a> {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Box<dyn Fn() -> Cow<'a, [u8]> + 'a>,
}

impl<'a> Pending<'a> {
    /// Bytes by dtype and shape.
    pub(crate) fn len(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.size()) as u64
    }
}

impl<'a> From<&'a NamedTensor> for Pending<'a> {
    fn from(t: &'a NamedTensor) -> Self {
        let (dtype, shape) = (t.data.dtype(), t.data.shape().to_vec());
        Self { name: t.name.clone(), dtype, shape, bytes: Box::new(|| t.data.to_bytes()) }
    }
}

/// Widest dtype first, then by name, as the reference implementation does: every tensor is aligned to its element size.
pub(crate) fn sort(tensors: &mut [Pending]) {
    tensors.sort_by(|a, b| b.dtype.size().cmp(&a.dtype.size()).then_with(|| a.name.cmp(&b.name)));
}

/// The header with its length in front, padded with spaces so that the data starts at a multiple of 8.
pub(crate) fn header(tensors: &[Pending]) -> Vec<u8> {
    let mut map = serde_json::Map::new();
    map.insert("__metadata__".into(), serde_json::json!({"format": "pt"}));
    let mut at = 0u64;
    for t in tensors {
        let end = at + t.len();
        let entry = serde_json::json!({"dtype": t.dtype.name(), "shape": t.shape, "data_offsets": [at, end]});
        map.insert(t.name.clone(), entry);
        at = end;
    }
    let mut text = serde_json::Value::Object(map).to_string().into_bytes();
    text.resize(text.len().next_multiple_of(8), b' ');
    let mut out = (text.len() as u64).to_le_bytes().to_vec();
    out.extend(text);
    out
}

/// Checks what is to be written: names that can be read back and occur once, ranks within the format.
///
/// # Errors
/// [`CheckpointError::Usage`] naming the tensor.
pub(crate) fn check_pending(path: &Path, tensors: &[Pending]) -> Result<(), CheckpointError> {
    let mut names = HashSet::new();
    for t in tensors {
        if t.name.is_empty() || t.name.len() > MAX_NAME || t.name.contains('\0') || t.name == "__metadata__" {
            return Err(CheckpointError::usage(path, &t.name, "not a name that a tensor can have"));
        }
        if !names.insert(t.name.as_str()) {
            return Err(CheckpointError::usage(path, &t.name, "tensor given twice; expected one, got 2"));
        }
        if t.shape.len() > MAX_RANK {
            let problem = format!("expected rank at most {MAX_RANK}, got {}", t.shape.len());
            return Err(CheckpointError::usage(path, &t.name, problem));
        }
    }
    Ok(())
}

/// Writes `tensors` in their order (see [`sort`]).
///
/// # Errors
/// As [`check_pending`]; [`CheckpointError::Usage`] for data of another length than its shape; I/O errors.
pub(crate) fn write_tensors(file: &mut File, path: &Path, tensors: &[Pending]) -> Result<(), CheckpointError> {
    check_pending(path, tensors)?;
    let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(|e| CheckpointError::io(path, "write", e));
    put(&header(tensors))?;
    for t in tensors {
        let bytes = (t.bytes)();
        if bytes.len() as u64 != t.len() {
            let problem = format!("shape {:?}: expected {} bytes, got {}", t.shape, t.len(), bytes.len());
            return Err(CheckpointError::usage(path, &t.name, problem));
        }
        put(&bytes)?;
    }
    Ok(())
}
