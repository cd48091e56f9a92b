//! Work on many tensors at once with a bound on the memory of all that is in flight, so that what a command needs depends on its
//! largest tensor and not on its model or its number of threads. No pool for arithmetic: that is rayon's, where there is one.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// How much is done at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Workers {
    /// Items in flight at most, each on a thread of its own.
    pub threads: usize,
    /// Bytes that the items in flight may need together; an item that needs more goes alone.
    pub memory: u64,
}

impl Workers {
    /// [`Workers::memory`] unless told otherwise: 1 GiB.
    pub const MEMORY: u64 = 1 << 30;

    /// `threads` at once within [`Workers::MEMORY`].
    pub fn new(threads: usize) -> Self {
        Self { threads, memory: Self::MEMORY }
    }

    /// `one(0)` to `one(count - 1)`, in their order. Items start in order; `cost` is what an item needs, in bytes.
    ///
    /// # Errors
    /// The first error in the order of the items, whichever thread met one first.
    pub fn run<T: Send, E: Send>(
        &self,
        count: usize,
        cost: impl Fn(usize) -> u64 + Sync,
        one: impl Fn(usize) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, E> {
        let threads = self.threads.min(count);
        if threads <= 1 {
            return (0..count).map(one).collect();
        }
        let next = Mutex::new(0usize);
        let room = Room { free: Mutex::new(self.memory), returned: Condvar::new() };
        let failed = AtomicBool::new(false);
        let results: Mutex<Vec<(usize, Result<T, E>)>> = Mutex::new(Vec::with_capacity(count));
        let work = || loop {
            let (i, lease) = {
                // Held while it waits for room: a large item is not passed by the small ones after it.
                let mut next = lock(&next);
                if *next == count || failed.load(Ordering::Relaxed) {
                    return;
                }
                let i = *next;
                *next += 1;
                (i, room.take(cost(i).min(self.memory)))
            };
            let result = one(i);
            drop(lease);
            if result.is_err() {
                failed.store(true, Ordering::Relaxed);
            }
            lock(&results).push((i, result));
        };
        std::thread::scope(|scope| (0..threads).for_each(|_| drop(scope.spawn(work))));
        let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
        results.sort_by_key(|(i, _)| *i);
        results.into_iter().map(|(_, r)| r).collect()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Room {
    free: Mutex<u64>,
    returned: Condvar,
}

impl Room {
    fn take(&self, bytes: u64) -> Lease<'_> {
        let mut free = lock(&self.free);
        while *free < bytes {
            free = self.returned.wait(free).unwrap_or_else(PoisonError::into_inner);
        }
        *free -= bytes;
        Lease { room: self, bytes }
    }
}

/// Given back when dropped, by a panic too.
struct Lease<'a> {
    room: &'a Room,
    bytes: u64,
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        *lock(&self.room.free) += self.bytes;
        self.room.returned.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn items_come_in_order_within_the_memory_and_with_the_first_error() {
        for threads in [1, 2, 7] {
            let workers = Workers { threads, memory: 10 };
            let (now, most) = (AtomicU64::new(0), AtomicU64::new(0));
            let cost = |i: usize| [3, 4, 25, 1][i % 4];
            let held = |i: usize| cost(i).min(10);
            let one = |i: usize| {
                let in_flight = now.fetch_add(held(i), Ordering::SeqCst) + held(i);
                most.fetch_max(in_flight, Ordering::SeqCst);
                std::thread::sleep(std::time::Duration::from_micros(50));
                now.fetch_sub(held(i), Ordering::SeqCst);
                Ok::<_, usize>(i * i)
            };
            let got = workers.run(100, cost, one).unwrap();
            assert_eq!(got, (0..100).map(|i| i * i).collect::<Vec<_>>());
            assert!(most.load(Ordering::SeqCst) <= 10, "{threads}: {most:?}");
            let failing = |i: usize| if i >= 40 { Err(i) } else { Ok(()) };
            assert_eq!(workers.run(100, |_| 1, failing), Err(40));
            assert_eq!(workers.run(0, |_| 1, failing), Ok(vec![]));
        }
    }
}
