//! Memory for packed weights, keys and values: zeroed cache lines, cut one after another from large mappings for which the
//! system is asked to use huge pages. Decoding reads all of it once a token; with 4 KiB pages the page walks alone cost it
//! a fifth of its speed (docs/results.md). Not for activations, which stay in the cache anyway.

use memmap2::MmapMut;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// A huge page of x86-64 and of most AArch64 systems.
const HUGE_PAGE: usize = 2 << 20;
/// Address space of an ordinary mapping; only what is written becomes resident.
const MAPPING: usize = 64 << 20;
const LINE: usize = 64;

/// A mapping that several [`Lines`] share. Nothing in it is handed out twice.
#[derive(Debug)]
struct Mapping {
    /// The first huge page boundary of `map`.
    base: *mut u8,
    len: usize,
    /// Whether it was another's before, so that it is not zero.
    used: bool,
    /// `None` only while it is dropped.
    map: Option<MmapMut>,
}

/// Mappings that nobody uses, with their lengths, and how many [`KeepMemory`] there are.
static SPARE: Mutex<(Vec<(usize, MmapMut)>, usize)> = Mutex::new((Vec::new(), 0));

/// While one lives, memory of packed weights that are dropped is given to the next and not back to the system, which takes longer to
/// give it again than weights take to be packed: for one who has layer after layer. There is never more of it than was in use at a time.
#[derive(Debug)]
pub struct KeepMemory(());

impl KeepMemory {
    /// From now on.
    #[allow(clippy::new_without_default)] // It is made for what it does, not for a value.
    pub fn new() -> Self {
        SPARE.lock().unwrap_or_else(PoisonError::into_inner).1 += 1;
        Self(())
    }

    /// A spare mapping of this length. Where there is none, others make room for a new one: as many bytes, or all of them.
    fn take(len: usize) -> Option<MmapMut> {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = spare.0.iter().position(|(l, _)| *l == len) {
            return Some(spare.0.swap_remove(at).1);
        }
        let mut room = 0;
        while room < len
            && let Some((l, _)) = spare.0.pop()
        {
            room += l;
        }
        None
    }
}

impl Drop for KeepMemory {
    fn drop(&mut self) {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        spare.1 -= 1;
        if spare.1 == 0 {
            spare.0 = Vec::new();
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let mut spare = SPARE.lock().unwrap_or_else(PoisonError::into_inner);
        if let (1.., Some(map)) = (spare.1, self.map.take()) {
            spare.0.push((self.len, map));
        }
    }
}

// SAFETY: `base` points into `map`, which lives as long; a `Lines` touches only the part it was given.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize) -> Self {
        let spare = KeepMemory::take(len);
        let used = spare.is_some();
        // Enough for the boundary that an ordinary mapping does not have.
        let Ok(mut map) = spare.map_or_else(|| MmapMut::map_anon(len + HUGE_PAGE), Ok) else {
            // As a vector would end: there is no memory.
            let layout = std::alloc::Layout::from_size_align(len, LINE).unwrap_or(std::alloc::Layout::new::<u8>());
            std::alloc::handle_alloc_error(layout)
        };
        let skip = map.as_ptr().align_offset(HUGE_PAGE).min(HUGE_PAGE);
        #[cfg(target_os = "linux")]
        {
            // A wish: without it, or where the system has no huge pages, the same bytes are read more slowly.
            let _ = map.advise_range(memmap2::Advice::HugePage, skip, len);
        }
        // SAFETY: `skip <= HUGE_PAGE`, and the map is `len + HUGE_PAGE` long.
        let base = unsafe { map.as_mut_ptr().add(skip) };
        Self { base, len, used, map: Some(map) }
    }
}

/// The newest mapping and how much of it is given away. Weak: the last `Lines` of a model frees its memory.
static NEWEST: Mutex<(Weak<Mapping>, usize)> = Mutex::new((Weak::new(), 0));

/// Zeroed bytes at a cache-line boundary.
#[derive(Debug)]
pub(crate) struct Lines {
    mapping: Arc<Mapping>,
    at: usize,
    len: usize,
}

impl Lines {
    /// `bytes`, rounded up to whole cache lines, all zero.
    pub(crate) fn zeroed(bytes: usize) -> Self {
        let mut lines = Self::any(bytes);
        if lines.mapping.used {
            lines.as_mut_slice().fill(0);
        }
        lines
    }

    /// `bytes`, rounded up to whole cache lines, of any values.
    pub(crate) fn any(bytes: usize) -> Self {
        let len = bytes.next_multiple_of(LINE);
        let mut newest = NEWEST.lock().unwrap_or_else(PoisonError::into_inner);
        let (mapping, at) = match newest.0.upgrade() {
            Some(mapping) if len <= mapping.len - newest.1 => (mapping, newest.1),
            _ => (Arc::new(Mapping::new(len.next_multiple_of(HUGE_PAGE).max(MAPPING))), 0),
        };
        *newest = (Arc::downgrade(&mapping), at + len);
        Self { mapping, at, len }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        // SAFETY: `at + len` lies within the mapping.
        unsafe { self.mapping.base.add(self.at) }
    }

    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: initialized (zeroed by the system, or written since) memory of the mapping, which no other `Lines` has a part of.
        unsafe { std::slice::from_raw_parts(self.as_ptr(), self.len) }
    }

    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.base.add(self.at), self.len) }
    }
}

impl Clone for Lines {
    fn clone(&self) -> Self {
        let mut copy = Self::zeroed(self.len);
        copy.as_mut_slice().copy_from_slice(self.as_slice());
        copy
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_aligned_zeroed_and_disjoint() {
        let mut parts: Vec<Lines> = [1, 64, 65, 0, 5000, MAPPING + 1, 64].into_iter().map(Lines::zeroed).collect();
        for (i, p) in parts.iter_mut().enumerate() {
            assert_eq!((p.as_ptr() as usize % LINE, p.len() % LINE), (0, 0));
            assert!(p.as_slice().iter().all(|&b| b == 0), "part {i}");
            p.as_mut_slice().fill(i as u8 + 1);
        }
        for (i, p) in parts.iter().enumerate() {
            assert!(p.as_slice().iter().all(|&b| b == i as u8 + 1), "part {i}");
            assert_eq!(p.clone().as_slice(), p.as_slice());
        }
    }

    #[test]
    fn memory_that_was_kept_is_zeroed_again() {
        let _keep = KeepMemory::new();
        for round in 0..3u8 {
            for len in [MAPPING + 1, 2 * MAPPING, 64] {
                let mut lines = Lines::zeroed(len);
                assert!(lines.as_slice().iter().all(|&b| b == 0), "round {round}");
                lines.as_mut_slice().fill(round + 1);
            }
        }
    }

    #[test]
    fn threads_get_parts_of_their_own() {
        std::thread::scope(|s| {
            for t in 0..4u8 {
                s.spawn(move || {
                    let mut parts: Vec<Lines> = (0..50).map(|i| Lines::zeroed(i * 37)).collect();
                    parts.iter_mut().for_each(|p| p.as_mut_slice().fill(t));
                    assert!(parts.iter().all(|p| p.as_slice().iter().all(|&b| b == t)));
                });
            }
        });
    }
}
