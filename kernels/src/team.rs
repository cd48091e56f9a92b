//! Threads that wait for the next piece of work awake. Not a general thread pool: one piece of work at a time.
//!
//! Decoding a token runs some hundred and fifty small products of 20 to 200 microseconds; waking a sleeping thread for
//! each costs as much as the product. A [`Team`]'s threads spin for a tenth of a millisecond before they sleep. Parts
//! of a piece of work are claimed one by one, so a thread that the system has put aside is not waited for: the others
//! take its parts. Which thread computes a part changes no bit.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Waits (of about 50 ns) before a thread sleeps.
const SPINS: usize = 2000;

thread_local! {
    /// The team that work of this thread is split over; null outside of [`Team::enter`] and inside a part.
    static CURRENT: Cell<*const Team> = const { Cell::new(std::ptr::null()) };
}

/// A fixed number of threads, the caller's included.
#[derive(Debug)]
pub struct Team {
    shared: Arc<Shared>,
    threads: usize,
    workers: Vec<JoinHandle<()>>,
    /// One caller at a time.
    turn: Mutex<()>,
}

type Call = unsafe fn(*const (), usize);

#[derive(Debug)]
struct Shared {
    /// `epoch << 32 | parts << 16 | next part`. A part is claimed by adding one; the fields below belong to the epoch
    /// and are rewritten only when all its parts are done, so a successful claim has read the right ones.
    state: AtomicU64,
    body: AtomicPtr<()>,
    call: AtomicPtr<()>,
    done: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
    sleepers: Mutex<()>,
    asleep: AtomicUsize,
    wake: Condvar,
}

fn parts_of(state: u64) -> u64 {
    state >> 16 & 0xffff
}

fn next_of(state: u64) -> u64 {
    state & 0xffff
}

impl Shared {
    fn open(&self) -> bool {
        let state = self.state.load(SeqCst);
        next_of(state) < parts_of(state)
    }

    /// Claims and runs parts until none is left.
    fn work(&self) {
        loop {
            let state = self.state.load(SeqCst);
            if next_of(state) >= parts_of(state) {
                return;
            }
            let (body, call) = (self.body.load(SeqCst), self.call.load(SeqCst));
            if self.state.compare_exchange(state, state + 1, SeqCst, SeqCst).is_err() {
                continue;
            }
            // SAFETY: the claim succeeded, so part `next_of(state)` of this epoch was open while the fields were read;
            // `call` is a `Call` made for the type behind `body`, which lives until all parts are done.
            let run = || unsafe { std::mem::transmute::<*mut (), Call>(call)(body, next_of(state) as usize) };
            if catch_unwind(AssertUnwindSafe(run)).is_err() {
                self.panicked.store(true, SeqCst);
            }
            self.done.fetch_add(1, SeqCst);
        }
    }

    fn serve(&self) {
        while !self.stop.load(SeqCst) {
            self.work();
            let mut spins = 0;
            while !self.open() && !self.stop.load(SeqCst) {
                spins += 1;
                if spins < SPINS {
                    std::hint::spin_loop();
                    continue;
                }
                let guard = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
                self.asleep.fetch_add(1, SeqCst);
                // Checked again under the lock: whoever opens work after this sees a sleeper and wakes it.
                if !self.open() && !self.stop.load(SeqCst) {
                    drop(self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner));
                }
                self.asleep.fetch_sub(1, SeqCst);
                spins = 0;
            }
        }
    }

    fn wake_all(&self) {
        if self.asleep.load(SeqCst) > 0 {
            let _guard = self.sleepers.lock().unwrap_or_else(PoisonError::into_inner);
            self.wake.notify_all();
        }
    }
}

impl Team {
    /// A team of `threads` (at least 1), the caller being one of them.
    ///
    /// # Errors
    /// The system starts no more threads.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            body: AtomicPtr::default(),
            call: AtomicPtr::default(),
            done: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            sleepers: Mutex::new(()),
            asleep: AtomicUsize::new(0),
            wake: Condvar::new(),
        });
        let threads = threads.max(1);
        let mut team = Self { shared, threads, workers: Vec::new(), turn: Mutex::new(()) };
        for i in 1..threads {
            let shared = Arc::clone(&team.shared);
            team.workers.push(std::thread::Builder::new().name(format!("dsq-{i}")).spawn(move || shared.serve())?);
        }
        Ok(team)
    }

    /// Threads of the team.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `body`; the kernels that it calls on this thread split their work over this team. Callers take turns.
    pub fn enter<R>(&self, body: impl FnOnce() -> R) -> R {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let _restore = Restore(CURRENT.replace(self));
        body()
    }

    /// Runs `body(0..parts)`, each part once, on the threads of the team; returns when all are done.
    fn run<F: Fn(usize) + Sync>(&self, parts: usize, body: &F) {
        unsafe fn call<F: Fn(usize)>(body: *const (), part: usize) {
            // SAFETY: `body` is the `&F` of the `run` that waits for this part.
            unsafe { (*body.cast::<F>())(part) }
        }
        debug_assert!(parts < 1 << 16);
        let s = &self.shared;
        s.done.store(0, SeqCst);
        s.body.store(std::ptr::from_ref(body).cast_mut().cast(), SeqCst);
        s.call.store(call::<F> as Call as *mut (), SeqCst);
        let epoch = (s.state.load(SeqCst) >> 32).wrapping_add(1) & 0xffff_ffff;
        s.state.store(epoch << 32 | (parts as u64) << 16, SeqCst);
        s.wake_all();
        s.work();
        let mut spins = 0usize;
        while s.done.load(SeqCst) < parts {
            spins += 1;
            if spins < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        assert!(!s.panicked.swap(false, SeqCst), "a part of the work panicked");
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        self.shared.wake_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

/// Puts the thread's team back, also when a part panics.
struct Restore(*const Team);

impl Drop for Restore {
    fn drop(&mut self) {
        CURRENT.set(self.0);
    }
}

/// Threads of the team that this thread works in; `None` outside of one.
pub(crate) fn current_threads() -> Option<usize> {
    let team = CURRENT.get();
    // SAFETY: `enter` holds the team borrowed while the pointer is set.
    (!team.is_null()).then(|| unsafe { (*team).threads })
}

/// Runs `body(0..parts)` on the team that this thread works in; false, and nothing run, outside of one.
pub(crate) fn run_on_current(parts: usize, body: &(impl Fn(usize) + Sync)) -> bool {
    let team = CURRENT.get();
    if team.is_null() {
        return false;
    }
    // Inside a part there is no team: work split there goes to rayon.
    let _restore = Restore(CURRENT.replace(std::ptr::null()));
    // SAFETY: as in `current_threads`; `enter`'s turn makes this the only piece of work of the team.
    unsafe { (*team).run(parts, body) };
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_runs_once_however_many_threads_and_pieces() {
        for threads in [1, 2, 3, 5] {
            let team = Team::new(threads).unwrap();
            team.enter(|| {
                for round in 0..3000 {
                    let parts = round % 9;
                    let counts: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                    assert!(run_on_current(parts, &|i| {
                        counts[i].fetch_add(1, SeqCst);
                    }));
                    assert!(counts.iter().all(|c| c.load(SeqCst) == 1), "{threads} threads, round {round}");
                }
            });
            assert!(!run_on_current(1, &|_| {}), "outside of enter there is no team");
        }
    }

    #[test]
    fn sleeping_threads_wake_and_callers_take_turns() {
        let team = Team::new(2).unwrap();
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        team.enter(|| {
                            run_on_current(4, &|_| {
                                total.fetch_add(1, SeqCst);
                            })
                        });
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                });
            }
        });
        assert_eq!(total.load(SeqCst), 3 * 20 * 4);
    }

    #[test]
    fn a_part_that_panics_is_the_callers_panic_and_the_team_lives() {
        let team = Team::new(2).unwrap();
        let result = catch_unwind(AssertUnwindSafe(|| team.enter(|| run_on_current(3, &|i| assert_ne!(i, 1)))));
        assert!(result.is_err());
        assert!(team.enter(|| run_on_current(3, &|_| {})));
    }
}
