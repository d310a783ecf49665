//! A gate for helpers: who comes in time works along, who comes late stays outside.
//!
//! The folder `loom` of the repository tries every order of its accesses.

#[cfg(loom)]
use loom::{
    hint,
    sync::atomic::{AtomicUsize, Ordering},
    thread::{self, Thread},
};
#[cfg(not(loom))]
use std::{
    hint,
    sync::atomic::{AtomicUsize, Ordering},
    thread::{self, Thread},
};

/// Looks at the gate before its caller lies down.
const SPINS: u32 = if cfg!(loom) { 1 } else { 2000 };

/// Lets pool threads into one operation, and its caller out when nobody is left inside. A caller
/// never waits for a thread that has not come: on a busy machine that could take milliseconds.
#[derive(Debug)]
pub(crate) struct Gate {
    /// Threads inside, plus [`Gate::CLOSED`].
    state: AtomicUsize,
    caller: Thread,
}

impl Gate {
    pub(crate) const CLOSED: usize = 1 << 31;

    pub(crate) fn new() -> Self {
        Self { state: AtomicUsize::new(0), caller: thread::current() }
    }

    /// Comes in, unless the gate is closed; the thread is inside until the result is dropped.
    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        let one_more = |s: usize| (s & Self::CLOSED == 0).then_some(s + 1);
        let entered = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more);
        entered.is_ok().then(|| Inside(self))
    }
}

/// A thread inside of a gate; it is out when this is dropped.
#[derive(Debug)]
pub(crate) struct Inside<'a>(&'a Gate);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        if self.0.state.fetch_sub(1, Ordering::AcqRel) == Gate::CLOSED + 1 {
            self.0.caller.unpark();
        }
    }
}

/// Closes the gate when dropped and waits until nobody is inside, also when the caller panics.
#[derive(Debug)]
pub(crate) struct Closing<'a>(pub(crate) &'a Gate);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.state.fetch_or(Gate::CLOSED, Ordering::AcqRel);
        let mut tries = 0;
        while self.0.state.load(Ordering::Acquire) != Gate::CLOSED {
            tries += 1;
            if tries < SPINS {
                hint::spin_loop();
            } else {
                thread::park();
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_comes_late_stays_outside() {
        let gate = Gate::new();
        let inside = gate.enter();
        assert!(inside.is_some());
        assert_eq!(gate.state.load(Ordering::Acquire), 1);
        drop(inside);
        drop(Closing(&gate));
        assert!(gate.enter().is_none());
        assert_eq!(gate.state.load(Ordering::Acquire), Gate::CLOSED);
    }

    #[test]
    fn the_caller_waits_for_a_thread_inside() {
        for _ in 0..200 {
            let (gate, done) = (Gate::new(), AtomicUsize::new(0));
            thread::scope(|scope| {
                let inside = gate.enter();
                scope.spawn(|| {
                    thread::yield_now();
                    done.store(1, Ordering::Relaxed);
                    drop(inside);
                });
                drop(Closing(&gate));
                assert_eq!(done.load(Ordering::Relaxed), 1);
            });
        }
    }
}
