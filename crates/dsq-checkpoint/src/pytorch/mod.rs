//! PyTorch files (`.pth`, `.pt`) that hold a state dict: names, shapes and values of its tensors. Nothing in the file is run:
//! see `pickle.rs`. Not pickled models, optimizers or checkpoints with other things beside the tensors.
//!
//! There are two formats. The legacy one is five pickles (a magic number, a version, the writer's byte order, the state dict,
//! the list of storage keys) and then, for each key, the number of elements and the elements. That of torch 1.6 and later is a
//! ZIP archive without compression (`zip.rs`): `data.pkl` is the state dict, `data/KEY` the elements of a storage.
//!
//! A tensor is an offset, sizes and strides into a storage; it is read contiguous, row major, whatever its strides. Sizes,
//! offsets and strides are held against the storage and the storages against the file before anything is read or allocated.
//! Files are read with positioned reads; the pickles alone are held in memory, at most [`MAX_PICKLES`] bytes.

mod pickle;
mod zip;

use crate::json::open_regular;
use crate::safetensors::read_at;
use crate::{CheckpointError, Dtype, Fault, Severity, TensorInfo, printable};
use pickle::{Pickle, Value, kind};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};

/// How a legacy file begins: protocol 2, the magic number 0x1950a86a20f9469cfc6c, stop.
const MAGIC: [u8; 15] = [0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, b'.'];
/// How an archive begins.
const ZIP: &[u8] = b"PK\x03\x04";
/// Version of the legacy format.
const VERSION: i64 = 1001;
/// Most bytes before the first storage. A state dict takes some 150 bytes for each tensor.
const MAX_PICKLES: u64 = 16 << 20;
/// Most tensors.
const MAX_TENSORS: usize = 1 << 16;

/// Where a tensor lies: all numbers in elements, but `start`.
#[derive(Debug)]
struct Entry {
    name: String,
    dtype: Dtype,
    /// First byte of the storage in the file.
    start: u64,
    offset: usize,
    shape: Vec<usize>,
    stride: Vec<usize>,
}

impl Entry {
    fn len(&self) -> usize {
        self.shape.iter().product()
    }
}

/// An open file whose pickles have been read and checked. Values are read when asked for.
#[derive(Debug)]
pub(crate) struct PytorchFile {
    path: PathBuf,
    file: File,
    entries: Vec<Entry>,
    by_name: HashMap<String, usize>,
    trailing: u64,
}

/// Whether a file that begins with `head` is one of PyTorch, by its content.
pub(crate) fn is_pytorch(head: &[u8]) -> bool {
    head.starts_with(&[0x80, 2]) || head.starts_with(ZIP)
}

/// Reads every tensor of a file, whatever model it holds: what `fuzz/` needs, because [`crate::Checkpoint`] only opens
/// image models, and no mutation of a small file is one. Each tensor is read once, up to 1 MiB of values.
///
/// # Errors
/// As [`PytorchFile::open`]; I/O errors.
#[cfg(fuzzing)]
pub fn read_pytorch(path: &Path) -> Result<(), CheckpointError> {
    let file = PytorchFile::open(path)?;
    for name in file.names() {
        if file.info(&name).is_some_and(|i| i.bytes <= 1 << 20) {
            file.read(&name)?;
        }
    }
    file.faults();
    Ok(())
}

impl PytorchFile {
    /// Opens a file and checks everything but the values.
    ///
    /// # Errors
    /// [`CheckpointError::Invalid`] naming what was met and where; I/O errors.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let (file, len) = open_regular(path)?;
        let mut head = vec![0u8; len.min(MAX_PICKLES) as usize];
        read_at(&file, path, &mut head, 0)?;
        let (entries, end) = if head.starts_with(ZIP) {
            (zip_entries(&file, len, path)?, len)
        } else {
            legacy_entries(&head, len, path, |at| {
                let mut bytes = [0u8; 8];
                read_at(&file, path, &mut bytes, at).map(|()| u64::from_le_bytes(bytes))
            })?
        };
        let by_name = entries.iter().enumerate().map(|(i, e)| (e.name.clone(), i)).collect();
        Ok(Self { path: path.to_path_buf(), file, entries, by_name, trailing: len - end })
    }

    /// Names in the order of the state dict.
    pub(crate) fn names(&self) -> Vec<String> {
        self.entries.iter().map(|e| e.name.clone()).collect()
    }

    /// Gives tensors other names: (in the file, from now on). Names that are not in the file are passed over.
    pub(crate) fn rename(&mut self, names: Vec<(String, String)>) {
        for (theirs, ours) in names {
            if let Some(at) = self.by_name.remove(&theirs) {
                self.entries[at].name.clone_from(&ours);
                self.by_name.insert(ours, at);
            }
        }
    }

    fn find(&self, name: &str) -> Option<&Entry> {
        self.by_name.get(name).map(|&i| &self.entries[i])
    }

    /// Type, shape and size of a tensor.
    pub(crate) fn info(&self, name: &str) -> Option<TensorInfo> {
        self.find(name).map(|e| TensorInfo {
            dtype: e.dtype.name().into(),
            shape: e.shape.clone(),
            bytes: (e.len() * e.dtype.size()) as u64,
        })
    }

    /// The dtype of a tensor.
    pub(crate) fn dtype(&self, name: &str) -> Option<Dtype> {
        self.find(name).map(|e| e.dtype)
    }

    /// Dtype and bytes (little endian) of a tensor, contiguous and row major; `None` for a name that is not there.
    pub(crate) fn read(&self, name: &str) -> Result<Option<(Dtype, Vec<u8>)>, CheckpointError> {
        let Some(e) = self.find(name) else { return Ok(None) };
        if e.len() == 0 {
            // Its other sizes were held against nothing: their products may overflow.
            return Ok(Some((e.dtype, Vec::new())));
        }
        let size = e.dtype.size();
        // From the first element to the last; the whole storage may be larger.
        let span = last(&e.shape, &e.stride) + 1;
        let mut stored = vec![0u8; span * size];
        read_at(&self.file, &self.path, &mut stored, e.start + (e.offset * size) as u64)?;
        if contiguous(&e.shape, &e.stride) {
            return Ok(Some((e.dtype, stored)));
        }
        let mut out = Vec::with_capacity(e.len() * size);
        let mut index = vec![0usize; e.shape.len()];
        for _ in 0..e.len() {
            let at: usize = index.iter().zip(&e.stride).map(|(i, s)| i * s).sum();
            out.extend_from_slice(&stored[at * size..(at + 1) * size]);
            for (i, &d) in index.iter_mut().zip(&e.shape).rev() {
                *i += 1;
                if *i < d {
                    break;
                }
                *i = 0;
            }
        }
        Ok(Some((e.dtype, out)))
    }

    /// What is odd in a file that opens: bytes after the last storage.
    pub(crate) fn faults(&self) -> Vec<Fault> {
        let what = format!("expected the file to end with its last storage, got {} bytes more", self.trailing);
        let fault = Fault::new(Severity::Warning, &self.path, "", what);
        if self.trailing > 0 { vec![fault] } else { Vec::new() }
    }
}

/// The largest index that these sizes and strides reach. Only for sizes that were checked and are not 0.
fn last(shape: &[usize], stride: &[usize]) -> usize {
    shape.iter().zip(stride).map(|(&d, &s)| (d - 1) * s).sum()
}

fn contiguous(shape: &[usize], stride: &[usize]) -> bool {
    let mut expected = 1;
    shape.iter().zip(stride).rev().all(|(&d, &s)| {
        let ok = d == 1 || s == expected;
        expected *= d;
        ok
    })
}

/// The tensors of an archive. All names in it have the same first folder.
fn zip_entries(file: &File, len: u64, path: &Path) -> Result<Vec<Entry>, CheckpointError> {
    let invalid = |field: &str, problem: String| CheckpointError::invalid(path, field, problem);
    let directory = zip::directory(file, len, path)?;
    let folder = directory.keys().find_map(|name| name.strip_suffix("/data.pkl").filter(|f| !f.contains('/')));
    let Some(folder) = folder else {
        return Err(invalid("ZIP", "expected FOLDER/data.pkl in a PyTorch archive, got none".into()));
    };
    let read = |name: &str, most: u64| -> Result<Option<Vec<u8>>, CheckpointError> {
        let Some(&(start, size)) = directory.get(&format!("{folder}/{name}")) else { return Ok(None) };
        if size > most {
            return Err(invalid(name, format!("expected at most {most} bytes, got {size}")));
        }
        let mut bytes = vec![0u8; size as usize];
        read_at(file, path, &mut bytes, start).map(|()| Some(bytes))
    };
    if let Some(order) = read("byteorder", 64)?.filter(|o| o != b"little") {
        return Err(invalid(
            "byteorder",
            format!("expected little, got {}", printable(&String::from_utf8_lossy(&order))),
        ));
    }
    let dict = pickle::read(&read("data.pkl", MAX_PICKLES)?.unwrap_or_default(), path, 0)?;
    let mut starts = BTreeMap::new();
    for (key, (dtype, n)) in named_storages(&dict, path)? {
        let name = format!("{folder}/data/{key}");
        let bytes = n.checked_mul(dtype.size() as u64);
        match directory.get(&name) {
            Some(&(start, size)) if bytes.is_some_and(|b| b <= size) => starts.insert(key.to_owned(), start),
            Some((_, size)) => {
                return Err(invalid(&printable(&name), format!("expected {n} elements of {dtype}, got {size} bytes")));
            }
            None => return Err(invalid(&printable(&name), "expected this storage, got nothing".into())),
        };
    }
    tensors(&dict, &starts, path)
}

/// The storages that a state dict names: element type and number of elements, by key.
fn named_storages<'a>(dict: &'a Pickle, path: &Path) -> Result<BTreeMap<&'a str, (Dtype, u64)>, CheckpointError> {
    let mut out: BTreeMap<&str, (Dtype, u64)> = BTreeMap::new();
    for value in &dict.values {
        let Value::Storage(dtype, key, n) = value else { continue };
        if out.insert(key, (*dtype, *n)).is_some_and(|other| other != (*dtype, *n)) {
            let problem = "named with two types or sizes; expected one";
            return Err(CheckpointError::invalid(path, format!("storage {}", printable(key)), problem));
        }
    }
    Ok(out)
}

/// The tensors of a legacy file of `len` bytes that begins with `head`, and where its last storage ends. `word` reads eight
/// bytes.
fn legacy_entries(
    head: &[u8],
    len: u64,
    path: &Path,
    word: impl Fn(u64) -> Result<u64, CheckpointError>,
) -> Result<(Vec<Entry>, u64), CheckpointError> {
    let invalid = |field: &str, problem: String| CheckpointError::invalid(path, field, problem);
    if !head.starts_with(&MAGIC) {
        let got = head.iter().take(MAGIC.len()).map(|b| format!("{b:02x}")).collect::<String>();
        return Err(invalid("", format!("expected the magic number of a PyTorch file, got bytes {got}")));
    }
    let mut at = MAGIC.len();
    let mut next = |what: &str| -> Result<Pickle, CheckpointError> {
        let pickle = pickle::read(&head[at..], path, at).map_err(|e| match head.len() as u64 == MAX_PICKLES {
            true => e.with_hint(format!("{what}: at most {MAX_PICKLES} bytes before the tensors are read")),
            false => e,
        })?;
        at += pickle.len;
        Ok(pickle)
    };
    let version = next("version")?;
    if version.values[version.top] != Value::Int(VERSION) {
        return Err(invalid("version", format!("expected {VERSION}, got {:?}", version.values[version.top])));
    }
    let system = next("byte order")?;
    if let Value::Dict(pairs) = &system.values[system.top] {
        let is = |id: &usize, text: &str| matches!(&system.values[*id], Value::Text(t) if t == text);
        if pairs.iter().any(|(k, v)| is(k, "little_endian") && system.values[*v] == Value::Bool(false)) {
            return Err(invalid("little_endian", "expected little-endian storages, got big-endian".into()));
        }
    }
    let dict = next("state dict")?;
    let keys = next("storage keys")?;
    let (storages, end) = storages(&dict, &keys, at as u64, len, path, word)?;
    Ok((tensors(&dict, &storages, path)?, end))
}

/// Where each storage begins, and where the last ends. The list of keys must name exactly the storages of the state dict.
fn storages(
    dict: &Pickle,
    keys: &Pickle,
    mut at: u64,
    len: u64,
    path: &Path,
    word: impl Fn(u64) -> Result<u64, CheckpointError>,
) -> Result<(BTreeMap<String, u64>, u64), CheckpointError> {
    let invalid = |key: &str, problem: String| CheckpointError::invalid(path, format!("storage {key}"), problem);
    let mut expected = named_storages(dict, path)?;
    let Value::List(list) = &keys.values[keys.top] else {
        return Err(invalid("keys", format!("expected a list, got {}", kind(&keys.values[keys.top]))));
    };
    let mut starts = BTreeMap::new();
    for &id in list {
        let Value::Text(key) = &keys.values[id] else {
            return Err(invalid("keys", format!("expected texts, got {}", kind(&keys.values[id]))));
        };
        let Some((dtype, n)) = expected.remove(key.as_str()) else {
            return Err(invalid(&printable(key), "expected a key of the state dict, named once, got another".into()));
        };
        let data = at.checked_add(8).filter(|&d| d <= len);
        let bytes = n.checked_mul(dtype.size() as u64);
        let end = data.zip(bytes).and_then(|(d, b)| d.checked_add(b)).filter(|&e| e <= len);
        let (Some(data), Some(end)) = (data, end) else {
            let left = len.saturating_sub(at);
            return Err(invalid(key, format!("expected {n} elements of {dtype} and their number, got {left} bytes")));
        };
        let stored = word(at)?;
        if stored != n {
            return Err(invalid(key, format!("expected {n} elements as the state dict says, got {stored}")));
        }
        starts.insert(key.clone(), data);
        at = end;
    }
    match expected.keys().next() {
        Some(key) => Err(invalid(key, "expected this storage in the list of keys, got nothing".into())),
        None => Ok((starts, at)),
    }
}

fn tensors(dict: &Pickle, starts: &BTreeMap<String, u64>, path: &Path) -> Result<Vec<Entry>, CheckpointError> {
    let invalid = |name: &str, problem: String| CheckpointError::invalid(path, name, problem);
    let Value::Dict(pairs) = &dict.values[dict.top] else {
        let got = kind(&dict.values[dict.top]);
        return Err(invalid("state dict", format!("expected a dict of tensors, got {got}")));
    };
    if pairs.is_empty() || pairs.len() > MAX_TENSORS {
        return Err(invalid("state dict", format!("expected 1 to {MAX_TENSORS} tensors, got {}", pairs.len())));
    }
    let mut seen = HashSet::new();
    let mut out = Vec::with_capacity(pairs.len());
    for &(key, value) in pairs {
        let Value::Text(name) = &dict.values[key] else {
            return Err(invalid("state dict", format!("expected names, got {}", kind(&dict.values[key]))));
        };
        let Value::Tensor { storage, offset, shape, stride } = &dict.values[value] else {
            let problem = format!("expected a tensor, got {}", kind(&dict.values[value]));
            return Err(invalid(name, problem).with_hint("save the model's state_dict() and nothing else"));
        };
        let Value::Storage(dtype, key, n) = &dict.values[*storage] else {
            return Err(invalid(name, "expected a storage, got something else".into()));
        };
        if name.len() > 4096 || !seen.insert(name) {
            return Err(invalid(name, "expected a short name, once, got a long one or a second".into()));
        }
        let count = shape.iter().try_fold(1u64, |c, &d| c.checked_mul(d));
        let reach = shape
            .iter()
            .zip(stride)
            .try_fold(*offset, |r, (&d, &s)| d.saturating_sub(1).checked_mul(s)?.checked_add(r));
        // A tensor may not be larger than its storage: a stride of 0 would make any number of values of one.
        let fits = count == Some(0) || count.is_some_and(|c| c <= *n) && reach.is_some_and(|r| r < *n);
        let narrow = |v: &[u64]| v.iter().map(|&d| usize::try_from(d).ok()).collect::<Option<Vec<usize>>>();
        let (true, Some(shape), Some(stride), Some(&start)) = (fits, narrow(shape), narrow(stride), starts.get(key))
        else {
            let problem = format!(
                "sizes {shape:?} with strides {stride:?} from element {offset} on; expected them within the storage of \
                 {n} elements"
            );
            return Err(invalid(name, problem));
        };
        let offset = if count == Some(0) { 0 } else { *offset as usize };
        out.push(Entry { name: name.clone(), dtype: *dtype, start, offset, shape, stride });
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
