//! A reader of the pickles in a PyTorch file that executes nothing: a small set of opcodes, four functions known by name
//! (which are data here), and refusal of everything else. Not a general unpickler, and not the tensors' bytes (see `mod.rs`).
//!
//! Values live in one list and refer to each other by index, so that neither a deep nor a circular value can make us
//! recurse, and what a pickle shares stays shared. Numbers of values, entries of the memo and items are bounded by
//! [`MAX_VALUES`], memory by about 60 bytes for each byte of the pickle.

use crate::error::printable;
use crate::{CheckpointError, Dtype};
use std::collections::HashMap;
use std::path::Path;

/// Most values, stack entries and memo entries of one pickle. A state dict takes some 15 for each tensor.
const MAX_VALUES: usize = 1 << 20;

/// Longest key of a storage, in bytes; they are decimal numbers.
const MAX_KEY: usize = 64;

/// Index of a [`Value`].
pub(super) type Id = usize;

/// What a pickle may hold.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(String),
    Tuple(Vec<Id>),
    List(Vec<Id>),
    /// A dict or an `OrderedDict`, pairs in the order in which they were set.
    Dict(Vec<(Id, Id)>),
    /// A function or class that was named.
    Global(Global),
    /// A storage: element type, key, elements.
    Storage(Dtype, String, u64),
    /// `_rebuild_tensor_v2(storage, offset, size, stride, ...)`: the storage, then elements.
    Tensor {
        storage: Id,
        offset: u64,
        shape: Vec<u64>,
        stride: Vec<u64>,
    },
}

/// The functions and classes that a state dict needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(Dtype),
}

impl Global {
    fn find(module: &str, name: &str) -> Option<Self> {
        let storage = |dtype| Some(Self::Storage(dtype));
        match (module, name) {
            ("collections", "OrderedDict") => Some(Self::OrderedDict),
            ("torch._utils", "_rebuild_tensor_v2") => Some(Self::RebuildTensor),
            ("torch._utils", "_rebuild_parameter") => Some(Self::RebuildParameter),
            ("torch", "DoubleStorage") => storage(Dtype::F64),
            ("torch", "FloatStorage") => storage(Dtype::F32),
            ("torch", "HalfStorage") => storage(Dtype::F16),
            ("torch", "BFloat16Storage") => storage(Dtype::Bf16),
            ("torch", "LongStorage") => storage(Dtype::I64),
            ("torch", "IntStorage") => storage(Dtype::I32),
            ("torch", "ShortStorage") => storage(Dtype::I16),
            ("torch", "CharStorage") => storage(Dtype::I8),
            ("torch", "ByteStorage") => storage(Dtype::U8),
            ("torch", "BoolStorage") => storage(Dtype::Bool),
            _ => None,
        }
    }
}

/// A pickle that has been read.
#[derive(Debug)]
pub(super) struct Pickle {
    pub(super) values: Vec<Value>,
    /// What it stands for.
    pub(super) top: Id,
    /// Bytes it took.
    pub(super) len: usize,
}

/// Reads the pickle at the start of `bytes`, which stand at `base` in `file`.
///
/// # Errors
/// [`CheckpointError::Invalid`] naming the byte and what was met: an opcode, function or argument that a state dict does not
/// need, an end in the middle, more values than [`MAX_VALUES`].
pub(super) fn read(bytes: &[u8], file: &Path, base: usize) -> Result<Pickle, CheckpointError> {
    let mut r = Reader {
        bytes,
        file,
        base,
        at: 0,
        values: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
    };
    loop {
        if let Some(top) = r.step()? {
            return Ok(Pickle { values: r.values, top, len: r.at });
        }
    }
}

struct Reader<'a> {
    bytes: &'a [u8],
    file: &'a Path,
    base: usize,
    at: usize,
    values: Vec<Value>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<u32, Id>,
}

type Step<T> = Result<T, CheckpointError>;

impl<'a> Reader<'a> {
    fn error(&self, problem: impl std::fmt::Display) -> CheckpointError {
        let field = format!("pickle, byte {}", self.base + self.at.saturating_sub(1));
        CheckpointError::invalid(self.file, field, problem.to_string())
    }

    fn take(&mut self, len: usize) -> Step<&'a [u8]> {
        let end = self.at.checked_add(len).filter(|&e| e <= self.bytes.len());
        let Some(end) = end else {
            let problem = format!("the pickle ends early; expected {len} bytes, got {}", self.bytes.len() - self.at);
            return Err(self.error(problem));
        };
        let out = &self.bytes[self.at..end];
        self.at = end;
        Ok(out)
    }

    fn byte(&mut self) -> Step<u8> {
        Ok(self.take(1)?[0])
    }

    fn le(&mut self, len: usize) -> Step<u64> {
        Ok(self.take(len)?.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b)))
    }

    /// A line without its end.
    fn line(&mut self) -> Step<String> {
        let rest = &self.bytes[self.at..];
        let Some(len) = rest.iter().take(256).position(|&b| b == b'\n') else {
            return Err(self.error("expected a name of at most 255 bytes and the end of its line, got none"));
        };
        let text = String::from_utf8_lossy(self.take(len)?).into_owned();
        self.take(1)?;
        Ok(text)
    }

    fn text(&mut self, len: usize) -> Step<()> {
        let text = std::str::from_utf8(self.take(len)?).map(str::to_owned);
        match text {
            Ok(text) => self.push(Value::Text(text)),
            Err(_) => Err(self.error("expected UTF-8 text, got other bytes")),
        }
    }

    fn put(&mut self, value: Value) -> Step<Id> {
        if self.values.len() >= MAX_VALUES {
            return Err(self.error(format!("expected at most {MAX_VALUES} values, got more")));
        }
        self.values.push(value);
        Ok(self.values.len() - 1)
    }

    fn push(&mut self, value: Value) -> Step<()> {
        let id = self.put(value)?;
        self.push_id(id)
    }

    fn push_id(&mut self, id: Id) -> Step<()> {
        if self.stack.len() >= MAX_VALUES {
            return Err(self.error(format!("expected at most {MAX_VALUES} values on the stack, got more")));
        }
        self.stack.push(id);
        Ok(())
    }

    /// Takes the top of the stack, not below the last mark.
    fn pop(&mut self) -> Step<Id> {
        let floor = self.marks.last().copied().unwrap_or(0);
        if self.stack.len() <= floor {
            return Err(self.error("expected a value on the stack, got none"));
        }
        self.stack.pop().ok_or_else(|| self.error("expected a value on the stack, got none"))
    }

    fn top(&self) -> Step<Id> {
        self.stack.last().copied().ok_or_else(|| self.error("expected a value on the stack, got none"))
    }

    /// Takes what lies above the last mark.
    fn since_mark(&mut self) -> Step<Vec<Id>> {
        let mark = self.marks.pop().ok_or_else(|| self.error("expected a mark on the stack, got none"))?;
        Ok(self.stack.split_off(mark))
    }

    fn tuple(&mut self, len: usize) -> Step<()> {
        let mut items = (0..len).map(|_| self.pop()).collect::<Step<Vec<Id>>>()?;
        items.reverse();
        self.push(Value::Tuple(items))
    }

    fn remember(&mut self, key: u32) -> Step<()> {
        let id = self.top()?;
        if self.memo.len() >= MAX_VALUES {
            return Err(self.error(format!("expected at most {MAX_VALUES} entries in the memo, got more")));
        }
        self.memo.insert(key, id);
        Ok(())
    }

    fn recall(&mut self, key: u32) -> Step<()> {
        match self.memo.get(&key) {
            Some(&id) => self.push_id(id),
            None => Err(self.error(format!("expected an entry {key} in the memo, got none"))),
        }
    }

    fn set(&mut self, items: &[Id]) -> Step<()> {
        let target = self.top()?;
        if !items.len().is_multiple_of(2) {
            return Err(self.error(format!("expected keys and values in pairs, got {} items", items.len())));
        }
        match &mut self.values[target] {
            Value::Dict(pairs) => pairs.extend(items.chunks_exact(2).map(|p| (p[0], p[1]))),
            other => {
                let got = kind(other);
                return Err(self.error(format!("expected a dict to set items of, got {got}")));
            }
        }
        Ok(())
    }

    fn append(&mut self, items: Vec<Id>) -> Step<()> {
        let target = self.top()?;
        match &mut self.values[target] {
            Value::List(list) => list.extend(items),
            other => {
                let got = kind(other);
                return Err(self.error(format!("expected a list to append to, got {got}")));
            }
        }
        Ok(())
    }

    /// One opcode; the value that the pickle stands for at its end.
    fn step(&mut self) -> Step<Option<Id>> {
        let op = self.byte()?;
        match op {
            0x80 => {
                let version = self.byte()?;
                if !(2..=4).contains(&version) {
                    return Err(self.error(format!("expected a pickle of protocol 2 to 4, got {version}")));
                }
            }
            b'.' => {
                let top = self.pop()?;
                return Ok(Some(top));
            }
            b'(' => {
                if self.marks.len() >= MAX_VALUES {
                    return Err(self.error(format!("expected at most {MAX_VALUES} marks, got more")));
                }
                self.marks.push(self.stack.len());
            }
            b'}' => self.push(Value::Dict(Vec::new()))?,
            b']' => self.push(Value::List(Vec::new()))?,
            b')' => self.push(Value::Tuple(Vec::new()))?,
            b't' => {
                let items = self.since_mark()?;
                self.push(Value::Tuple(items))?;
            }
            0x85..=0x87 => self.tuple(usize::from(op - 0x84))?,
            b'N' => self.push(Value::None)?,
            0x88 | 0x89 => self.push(Value::Bool(op == 0x88))?,
            b'K' => {
                let n = self.le(1)?;
                self.push(Value::Int(n as i64))?;
            }
            b'M' => {
                let n = self.le(2)?;
                self.push(Value::Int(n as i64))?;
            }
            b'J' => {
                let n = self.le(4)? as u32 as i32;
                self.push(Value::Int(n.into()))?;
            }
            0x8a => {
                let len = usize::from(self.byte()?);
                self.long(len)?;
            }
            b'G' => {
                let bits = self.le(8)?.swap_bytes();
                self.push(Value::Float(f64::from_bits(bits)))?;
            }
            b'X' => {
                let len = self.le(4)? as usize;
                self.text(len)?;
            }
            0x8c => {
                let len = usize::from(self.byte()?);
                self.text(len)?;
            }
            b'q' => {
                let key = self.byte()?.into();
                self.remember(key)?;
            }
            b'r' => {
                let key = self.le(4)? as u32;
                self.remember(key)?;
            }
            b'h' => {
                let key = self.byte()?.into();
                self.recall(key)?;
            }
            b'j' => {
                let key = self.le(4)? as u32;
                self.recall(key)?;
            }
            b's' => {
                let value = self.pop()?;
                let key = self.pop()?;
                self.set(&[key, value])?;
            }
            b'u' => {
                let items = self.since_mark()?;
                self.set(&items)?;
            }
            b'a' => {
                let item = self.pop()?;
                self.append(vec![item])?;
            }
            b'e' => {
                let items = self.since_mark()?;
                self.append(items)?;
            }
            b'c' => {
                let (module, name) = (self.line()?, self.line()?);
                let Some(global) = Global::find(&module, &name) else {
                    let problem = format!(
                        "asks for the Python function or class {}; expected only what a state dict needs \
                         (OrderedDict, _rebuild_tensor_v2, storages), and nothing was run",
                        printable(&format!("{module}.{name}"))
                    );
                    return Err(self.error(problem).with_hint("save the model's state_dict() and nothing else"));
                };
                self.push(Value::Global(global))?;
            }
            b'R' => {
                let arguments = self.pop()?;
                let function = self.pop()?;
                self.call(function, arguments)?;
            }
            // The state of an OrderedDict (torch's `_metadata`) says nothing of the tensors.
            b'b' => {
                self.pop()?;
                let target = self.top()?;
                if !matches!(self.values[target], Value::Dict(_)) {
                    let got = kind(&self.values[target]);
                    return Err(self.error(format!("expected the state of a dict, got that of {got}")));
                }
            }
            b'Q' => {
                let id = self.pop()?;
                self.storage(id)?;
            }
            _ => {
                let shown = if op.is_ascii_graphic() { format!("{:?}", op as char) } else { format!("{op:#04x}") };
                return Err(self.error(format!("expected an opcode that a state dict needs, got {shown}")));
            }
        }
        Ok(None)
    }

    /// An integer of `len` bytes.
    fn long(&mut self, len: usize) -> Step<()> {
        if len > 8 {
            return Err(self.error(format!("expected an integer of at most 8 bytes, got {len}")));
        }
        let n = self.le(len)?;
        let unused = 64 - 8 * len as u32;
        self.push(Value::Int(if len == 0 { 0 } else { ((n << unused) as i64) >> unused }))
    }

    fn call(&mut self, function: Id, arguments: Id) -> Step<()> {
        let Value::Global(global) = self.values[function] else {
            let got = kind(&self.values[function]);
            return Err(self.error(format!("expected a named function to call, got {got}")));
        };
        let Value::Tuple(arguments) = &self.values[arguments] else {
            let got = kind(&self.values[arguments]);
            return Err(self.error(format!("expected a tuple of arguments, got {got}")));
        };
        match (global, arguments.as_slice()) {
            (Global::OrderedDict, []) => self.push(Value::Dict(Vec::new())),
            (Global::RebuildTensor, &[storage, offset, shape, stride, ..]) if arguments.len() <= 7 => {
                let (offset, shape, stride) = (self.whole(offset), self.sizes(shape), self.sizes(stride));
                let (Some(offset), Some(shape), Some(stride)) = (offset, shape, stride) else {
                    return Err(self.error("_rebuild_tensor_v2: expected an offset, sizes and strides of at least 0"));
                };
                if !matches!(self.values[storage], Value::Storage(..)) || shape.len() != stride.len() {
                    return Err(self.error("_rebuild_tensor_v2: expected a storage and a stride for each dimension"));
                }
                self.push(Value::Tensor { storage, offset, shape, stride })
            }
            (Global::RebuildParameter, &[tensor, _, _]) if matches!(self.values[tensor], Value::Tensor { .. }) => {
                self.push_id(tensor)
            }
            _ => {
                let n = arguments.len();
                Err(self.error(format!("{global:?}: expected the arguments that a state dict gives, got {n} others")))
            }
        }
    }

    /// The storage that a persistent id names: `("storage", type, key, device, elements)`, and in old files a view, which
    /// must be none.
    fn storage(&mut self, id: Id) -> Step<()> {
        let parts = match &self.values[id] {
            Value::Tuple(parts) if parts.len() == 5 || parts.len() == 6 => parts.clone(),
            other => {
                let got = kind(other);
                return Err(self.error(format!("expected a persistent id of five or six parts, got {got}")));
            }
        };
        let value = |i: usize| &self.values[parts[i]];
        let view = parts.len() == 6 && *value(5) != Value::None;
        let (Value::Text(tag), Value::Global(Global::Storage(dtype)), Value::Text(key), Value::Int(n)) =
            (value(0), value(1), value(2), value(4))
        else {
            return Err(self.error("expected a persistent id (\"storage\", type, key, device, elements), got another"));
        };
        // Keys are copied, so a long one must not be named a million times.
        if tag != "storage" || *n < 0 || view || key.len() > MAX_KEY {
            let problem = format!(
                "expected a whole storage of at least 0 elements and a short key, got {n} elements, view: {view}, {} bytes of key",
                key.len()
            );
            return Err(self.error(problem));
        }
        let storage = Value::Storage(*dtype, key.clone(), *n as u64);
        self.push(storage)
    }

    fn whole(&self, id: Id) -> Option<u64> {
        if let Value::Int(n) = self.values[id] { u64::try_from(n).ok() } else { None }
    }

    fn sizes(&self, id: Id) -> Option<Vec<u64>> {
        match &self.values[id] {
            Value::Tuple(items) if items.len() <= 8 => items.iter().map(|&i| self.whole(i)).collect(),
            _ => None,
        }
    }
}

/// What a value is, for messages.
pub(super) fn kind(v: &Value) -> &'static str {
    match v {
        Value::None => "None",
        Value::Bool(_) => "a boolean",
        Value::Int(_) => "an integer",
        Value::Float(_) => "a number",
        Value::Text(_) => "a text",
        Value::Tuple(_) => "a tuple",
        Value::List(_) => "a list",
        Value::Dict(_) => "a dict",
        Value::Global(_) => "a function",
        Value::Storage(..) => "a storage",
        Value::Tensor { .. } => "a tensor",
    }
}
