//! Threads, per-thread scratch memory, and outputs that several threads fill.

#![expect(unsafe_code, reason = "outputs filled by several threads")]

use super::gate::{Closing, Gate};
use crate::error::KernelError;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use std::{fmt, hint};

/// Nanoseconds of estimated work below which waking another thread does not pay.
const WORTH_WAKING_NS: usize = 25_000;
/// Nanoseconds of estimated work below which telling a thread that is awake does not pay.
const WORTH_SHARING_NS: usize = 4_000;
/// How long a helper without work stays awake: longer than the pauses inside of a decode step.
const AWAKE: Duration = Duration::from_micros(60);

/// The calling thread and `threads - 1` helpers of its own.
#[derive(Debug)]
pub(crate) struct Team {
    board: Arc<Board>,
    helpers: Vec<JoinHandle<()>>,
}

/// Where callers put up work and helpers look for it.
#[derive(Debug, Default)]
struct Board {
    /// At most one job a caller.
    jobs: Mutex<Vec<Arc<Job>>>,
    /// Number of the last job; helpers that are awake watch it.
    last: AtomicUsize,
    asleep: AtomicUsize,
    is_over: AtomicBool,
}

/// Work of a caller, which waits until nobody is inside of the gate.
struct Job {
    number: usize,
    gate: Gate,
    work: &'static (dyn Fn() + Sync),
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job").field("number", &self.number).finish_non_exhaustive()
    }
}

impl Board {
    fn jobs(&self) -> MutexGuard<'_, Vec<Arc<Job>>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A helper's life. A panic in it ends the process: its caller would go on with half a result.
    fn help(&self) {
        let _fatal = Fatal;
        let mut seen = 0;
        while !self.is_over.load(Ordering::Acquire) {
            let last = self.last.load(Ordering::SeqCst);
            if last == seen {
                self.wait(seen);
                continue;
            }
            seen = last;
            // The jobs of now, each once; newer ones change the number again.
            let mut done = 0;
            while let Some(job) = self.next(done) {
                done = job.number;
                if let Some(_inside) = job.gate.enter() {
                    (job.work)();
                }
            }
        }
    }

    /// The first job after number `done`.
    fn next(&self, done: usize) -> Option<Arc<Job>> {
        let jobs = self.jobs();
        jobs.iter().filter(|job| job.number > done).min_by_key(|job| job.number).map(Arc::clone)
    }

    /// Returns when there may be a job after number `seen`.
    fn wait(&self, seen: usize) {
        let start = Instant::now();
        while start.elapsed() < AWAKE {
            for _ in 0..32 {
                if self.last.load(Ordering::Relaxed) != seen {
                    return;
                }
                hint::spin_loop();
            }
        }
        self.asleep.fetch_add(1, Ordering::SeqCst);
        // Whoever changes the number after this looks at `asleep` after it was raised.
        while self.last.load(Ordering::SeqCst) == seen && !self.is_over.load(Ordering::SeqCst) {
            thread::park();
        }
        self.asleep.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Team {
    /// A team of `threads`; a smaller one if the system gives fewer threads.
    pub(crate) fn new(threads: usize) -> Self {
        let board = Arc::new(Board::default());
        let start = |i: usize| {
            let board = Arc::clone(&board);
            let named = thread::Builder::new().name(format!("dsa-kernels-{i}"));
            named.spawn(move || board.help()).ok()
        };
        let helpers = (1..threads).map_while(start).collect();
        Self { board, helpers }
    }

    /// Runs `work` here and, if they come before it is over, on the helpers. Those asleep are woken
    /// if the work is worth it.
    fn together(&self, ns: usize, work: &(dyn Fn() + Sync)) {
        // SAFETY: only the lifetime changes. A helper calls it while it is inside of the gate, and
        // `Closing` keeps this frame alive until the gate is closed with nobody inside.
        let shared: &'static (dyn Fn() + Sync) = unsafe { std::mem::transmute(work) };
        let gate = Gate::new();
        let job = {
            let mut jobs = self.board.jobs();
            let number = self.board.last.load(Ordering::Relaxed) + 1;
            let job = Arc::new(Job { number, gate, work: shared });
            jobs.push(Arc::clone(&job));
            // Under the lock, so that numbers are given once.
            self.board.last.store(number, Ordering::SeqCst);
            job
        };
        let closing = Closing(&job.gate);
        if ns >= WORTH_WAKING_NS && self.board.asleep.load(Ordering::SeqCst) > 0 {
            self.helpers.iter().for_each(|h| h.thread().unpark());
        }
        let listed = Listed { board: &self.board, number: job.number };
        work();
        drop(listed);
        drop(closing);
    }

    pub(crate) fn threads(&self) -> usize {
        1 + self.helpers.len()
    }

    /// Whether `ns` nanoseconds of single-threaded work are worth more than one thread.
    pub(crate) fn shares(&self, ns: usize) -> bool {
        let are_awake = self.board.asleep.load(Ordering::Relaxed) < self.helpers.len();
        ns >= if are_awake { WORTH_SHARING_NS } else { WORTH_WAKING_NS } && !self.helpers.is_empty()
    }

    /// Runs `task(0..tasks)` in any order, on several threads if `ns` of work are worth it. Which
    /// thread runs a task must not change its result. Returns one of the errors.
    pub(crate) fn run(
        &self,
        tasks: usize,
        ns: usize,
        task: impl Fn(usize) -> Result<(), KernelError> + Sync,
    ) -> Result<(), KernelError> {
        if tasks < 2 || !self.shares(ns) {
            return (0..tasks).try_for_each(task);
        }
        let next = AtomicUsize::new(0);
        let failed = Mutex::new(None);
        let work = || {
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                if i >= tasks {
                    return;
                }
                if let Err(e) = task(i) {
                    next.store(tasks, Ordering::Relaxed);
                    *failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(e);
                }
            }
        };
        self.together(ns, &work);
        let error = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        error.map_or(Ok(()), Err)
    }

    /// Splits `0..rows` into ranges whose lengths are multiples of `unit` (the last may be shorter)
    /// and runs them; `row_ns` is the work of a row.
    pub(crate) fn run_rows(
        &self,
        rows: usize,
        unit: usize,
        row_ns: usize,
        task: impl Fn(Range<usize>) -> Result<(), KernelError> + Sync,
    ) -> Result<(), KernelError> {
        let ns = rows * row_ns;
        if !self.shares(ns) {
            return if rows == 0 { Ok(()) } else { task(0..rows) };
        }
        let chunk = rows.div_ceil(4 * self.threads()).next_multiple_of(unit);
        self.run(rows.div_ceil(chunk), ns, |i| task(i * chunk..rows.min((i + 1) * chunk)))
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.board.is_over.store(true, Ordering::SeqCst);
        self.board.last.fetch_add(1, Ordering::SeqCst);
        for helper in self.helpers.drain(..) {
            helper.thread().unpark();
            // No helper ends by a panic.
            let _ = helper.join();
        }
    }
}

/// Ends the process where a panic comes by.
struct Fatal;

impl Drop for Fatal {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}

/// A job on the board, taken down when this is dropped, also when the caller panics.
struct Listed<'a> {
    board: &'a Board,
    number: usize,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.board.jobs().retain(|job| job.number != self.number);
    }
}

/// Sixteen floats on one cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [f32; 16]);

thread_local! {
    static FREE: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

/// A cache-aligned buffer from the thread's free list, back there when dropped. Its contents are
/// unspecified.
#[derive(Debug)]
pub(crate) struct Scratch {
    lines: Vec<Line>,
    len: usize,
}

/// Buffers kept by a thread, and the size in lines above which a buffer is not kept (16 MiB).
const KEPT: usize = 12;
const KEPT_LINES: usize = 1 << 18;

impl Scratch {
    pub(crate) fn new(len: usize) -> Self {
        let want = len.div_ceil(16);
        let mut lines = FREE.with_borrow_mut(|free| {
            let fitting = free.iter().enumerate().filter(|(_, v)| v.len() >= want);
            let best = fitting.min_by_key(|(_, v)| v.len()).map(|(i, _)| i);
            best.map(|i| free.swap_remove(i)).unwrap_or_default()
        });
        if lines.len() < want {
            lines.resize(want.next_power_of_two(), Line([0.0; 16]));
        }
        Self { lines, len }
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let lines = std::mem::take(&mut self.lines);
        if lines.len() <= KEPT_LINES {
            FREE.with_borrow_mut(|free| {
                if free.len() >= KEPT {
                    free.remove(0);
                }
                free.push(lines);
            });
        }
    }
}

impl Deref for Scratch {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: `lines` holds at least `len` floats (`new`), and `Line` is a plain array.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

/// A slice whose disjoint parts are filled by different tasks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Parts<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: the tasks of one operation take disjoint ranges (the contract of `range` and `at`), so
// sharing the handle shares no element.
unsafe impl<T: Send> Sync for Parts<'_, T> {}
// SAFETY: as above; the handle is a borrowed slice in effect.
unsafe impl<T: Send> Send for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), borrow: PhantomData }
    }

    /// The elements `range`.
    ///
    /// # Safety
    /// While the result lives, no other task may hold an overlapping range.
    #[expect(clippy::mut_from_ref, reason = "exclusive use of the range is the caller's promise")]
    pub(crate) unsafe fn range(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part outside of the output");
        // SAFETY: inside of the slice by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// Address of element `i`, for kernels that write a tile of a matrix.
    pub(crate) fn at(&self, i: usize) -> *mut T {
        assert!(i <= self.len, "part outside of the output");
        self.start.wrapping_add(i)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: usize = usize::MAX / 2;

    #[test]
    fn every_task_runs_once_for_callers_that_share_a_team() {
        let team = Team::new(3);
        thread::scope(|scope| {
            for caller in 0..4usize {
                let team = &team;
                scope.spawn(move || {
                    for round in 0..500 {
                        let mut counts = vec![0u32; 1 + (caller + round) % 40];
                        let n = counts.len();
                        let parts = Parts::new(&mut counts);
                        team.run(n, LONG, |i| {
                            // SAFETY: each task has its own element.
                            unsafe { parts.range(i..i + 1)[0] += 1 };
                            Ok(())
                        })
                        .unwrap();
                        assert!(counts.iter().all(|c| *c == 1));
                    }
                });
            }
        });
    }

    #[test]
    fn ranges_cover_all_rows_in_units() {
        let team = Team::new(2);
        for rows in [0, 1, 5, 24, 25, 1000] {
            let seen = Mutex::new(vec![0; rows]);
            team.run_rows(rows, 8, LONG / 1000, |r| {
                assert!(r.start % 8 == 0 && (r.end % 8 == 0 || r.end == rows));
                r.for_each(|i| seen.lock().unwrap()[i] += 1);
                Ok(())
            })
            .unwrap();
            assert!(seen.into_inner().unwrap().iter().all(|n| *n == 1));
        }
    }

    #[test]
    fn an_error_of_a_task_is_returned() {
        let team = Team::new(2);
        let error = team.run(50, LONG, |i| match i {
            7 => Err(KernelError::Argument { op: "test", what: "seven" }),
            _ => Ok(()),
        });
        assert_eq!(error.unwrap_err().to_string(), "test: seven");
    }

    #[test]
    fn scratch_is_reused_and_has_the_length_asked_for() {
        let first = Scratch::new(100);
        let address = first.as_ptr();
        assert_eq!((first.len(), address as usize % 64), (100, 0));
        drop(first);
        assert_eq!(Scratch::new(90).as_ptr(), address);
        assert_eq!(Scratch::new(0).len(), 0);
    }
}
