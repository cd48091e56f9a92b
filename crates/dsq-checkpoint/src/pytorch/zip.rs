//! The directory of a ZIP archive as torch writes it: names of stored (never compressed) entries and where their bytes lie. Not
//! a ZIP reader: compression, encryption, split archives and 64-bit fields are refused by name, check sums are not looked at.

use crate::safetensors::read_at;
use crate::{CheckpointError, printable};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

/// Longest end record with its comment.
const MAX_END: u64 = 22 + 0xffff;
/// Largest directory that is read: 100 bytes for each of 65,535 entries, and long names.
const MAX_DIRECTORY: u64 = 32 << 20;

/// First byte and length of every entry, by name.
///
/// # Errors
/// [`CheckpointError::Invalid`] naming the entry or field; I/O errors.
pub(super) fn directory(file: &File, len: u64, path: &Path) -> Result<BTreeMap<String, (u64, u64)>, CheckpointError> {
    let invalid = |field: &str, problem: &str| CheckpointError::invalid(path, field, problem);
    let bytes = |at: u64, n: u64| -> Result<Vec<u8>, CheckpointError> {
        let mut out = vec![0u8; n as usize];
        read_at(file, path, &mut out, at).map(|()| out)
    };
    let tail_at = len - len.min(MAX_END);
    let tail = bytes(tail_at, len - tail_at)?;
    let end = (0..tail.len().saturating_sub(21)).rev().find(|&i| tail[i..].starts_with(b"PK\x05\x06"));
    let Some(end) = end.map(|i| &tail[i..]) else {
        return Err(invalid("ZIP", "expected the end of a ZIP directory, got none: is the file cut off?"));
    };
    let (disk, count, size, start) = (le(end, 4, 4), le(end, 10, 2), le(end, 12, 4), le(end, 16, 4));
    if count == 0xffff || size == 0xffff_ffff || start == 0xffff_ffff {
        return Err(invalid("ZIP", "expected less than 65,535 entries and 4 GiB, got an archive of 64-bit fields"));
    }
    if disk != 0 || start + size > len || size > MAX_DIRECTORY {
        return Err(invalid("ZIP", "expected a whole directory within the file, got another"));
    }
    let directory = bytes(start, size)?;
    let (mut at, mut out) = (0, BTreeMap::new());
    for _ in 0..count {
        let entry = directory.get(at..).filter(|e| e.len() >= 46 && e.starts_with(b"PK\x01\x02"));
        let Some(entry) = entry else {
            return Err(invalid("ZIP", "expected as many directory entries as the end says, got fewer"));
        };
        let whole = 46 + (le(entry, 28, 2) + le(entry, 30, 2) + le(entry, 32, 2)) as usize;
        let name = entry.get(46..46 + le(entry, 28, 2) as usize).map(String::from_utf8_lossy).unwrap_or_default();
        let (flags, method) = (le(entry, 8, 2), le(entry, 10, 2));
        let (packed, size, local) = (le(entry, 20, 4), le(entry, 24, 4), le(entry, 42, 4));
        if method != 0 || flags & 1 != 0 || packed != size {
            return Err(invalid(&printable(&name), "expected a stored entry, got a compressed or encrypted one"));
        }
        if local + 30 > len {
            return Err(invalid(&printable(&name), "expected an entry within the file, got one behind its end"));
        }
        let header = bytes(local, 30)?;
        let data = local + 30 + le(&header, 26, 2) + le(&header, 28, 2);
        if !header.starts_with(b"PK\x03\x04") || data + size > len {
            return Err(invalid(&printable(&name), "expected a header and the bytes of the entry, got something else"));
        }
        if out.insert(name.clone().into_owned(), (data, size)).is_some() {
            return Err(invalid(&printable(&name), "expected every name once, got it twice"));
        }
        at += whole;
    }
    Ok(out)
}

/// A little-endian number of `n` bytes; the caller has checked that they are there.
fn le(bytes: &[u8], at: usize, n: usize) -> u64 {
    bytes[at..at + n].iter().rev().fold(0, |v, &b| v << 8 | u64::from(b))
}
