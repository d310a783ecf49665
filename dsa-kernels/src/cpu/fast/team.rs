//! Threads, per-thread scratch memory, and outputs that several threads fill.

#![expect(unsafe_code, reason = "outputs filled by several threads")]

use super::gate::{Closing, Gate};
use crate::error::KernelError;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Nanoseconds of estimated work below which waking another thread does not pay.
const WORTH_SHARING_NS: usize = 25_000;

/// The calling thread and `threads - 1` pool threads.
#[derive(Debug)]
pub(crate) struct Team {
    pool: Option<rayon::ThreadPool>,
    threads: usize,
    /// Calls for help that no pool thread has answered yet.
    unanswered: Arc<AtomicUsize>,
}

impl Team {
    /// A team of `threads`; of the caller alone if the system gives no thread.
    pub(crate) fn new(threads: usize) -> Self {
        let build = |n: usize| {
            let name = |i| format!("dsa-kernels-{i}");
            rayon::ThreadPoolBuilder::new().num_threads(n).thread_name(name).build().ok()
        };
        let pool = if threads > 1 { build(threads - 1) } else { None };
        let threads = if pool.is_some() { threads } else { 1 };
        Self { pool, threads, unanswered: Arc::default() }
    }

    /// Runs `work` here and, if they come before it is over, on up to `helpers` pool threads.
    fn together(&self, pool: &rayon::ThreadPool, helpers: usize, work: &(dyn Fn() + Sync)) {
        let gate = Arc::new(Gate::new());
        // SAFETY: only the lifetime changes. A pool thread calls it while it is inside of the gate,
        // and `Closing` keeps this frame alive until the gate is closed with nobody inside.
        let shared: &'static (dyn Fn() + Sync) = unsafe { std::mem::transmute(work) };
        let closing = Closing(&gate);
        for _ in 0..helpers {
            // Threads that are behind with answering would not come in time for this either.
            if self.unanswered.load(Ordering::Relaxed) >= 2 * self.threads {
                break;
            }
            self.unanswered.fetch_add(1, Ordering::Relaxed);
            let (gate, unanswered) = (Arc::clone(&gate), Arc::clone(&self.unanswered));
            pool.spawn(move || {
                unanswered.fetch_sub(1, Ordering::Relaxed);
                if let Some(_inside) = gate.enter() {
                    shared();
                }
            });
        }
        work();
        drop(closing);
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Whether `ns` nanoseconds of single-threaded work are worth more than one thread.
    pub(crate) fn shares(&self, ns: usize) -> bool {
        self.threads > 1 && ns >= WORTH_SHARING_NS
    }

    /// Runs `task(0..tasks)` in any order, on several threads if `ns` of work are worth it. Which
    /// thread runs a task must not change its result. Returns one of the errors.
    pub(crate) fn run(
        &self,
        tasks: usize,
        ns: usize,
        task: impl Fn(usize) -> Result<(), KernelError> + Sync,
    ) -> Result<(), KernelError> {
        let pool = match &self.pool {
            Some(pool) if tasks > 1 && self.shares(ns) => pool,
            _ => return (0..tasks).try_for_each(task),
        };
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
                    *failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(e);
                }
            }
        };
        self.together(pool, self.threads.min(tasks) - 1, &work);
        let error = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
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
        let chunk = rows.div_ceil(4 * self.threads).next_multiple_of(unit);
        self.run(rows.div_ceil(chunk), ns, |i| task(i * chunk..rows.min((i + 1) * chunk)))
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
    use std::thread;

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
