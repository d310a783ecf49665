//! Helpers that work on something of their caller's, which must not go away under them.

use crate::gate::{Closing, Gate};
use crate::is_refuted;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

/// Helpers that come at any moment; the caller's frame is over once `close` returns.
fn race(helpers: usize, close: fn(&Gate)) {
    let gate = Arc::new(Gate::new());
    let over = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = (0..helpers)
        .map(|_| {
            let (gate, over) = (Arc::clone(&gate), Arc::clone(&over));
            thread::spawn(move || {
                if let Some(_inside) = gate.enter() {
                    assert_eq!(over.load(Ordering::Relaxed), 0, "inside after the end");
                }
            })
        })
        .collect();
    close(&gate);
    over.store(1, Ordering::Relaxed);
    for thread in threads {
        thread.join().expect("a helper does not panic");
    }
}

#[test]
fn nobody_is_inside_after_the_gate_is_closed() {
    loom::model(|| race(2, |gate| drop(Closing(gate))));
}

#[test]
fn a_caller_that_does_not_wait_leaves_somebody_inside() {
    assert!(is_refuted(|| race(1, |_| {})));
}

/// What a helper wrote is the caller's to read when the gate is closed: loom's cell reports an
/// access that no order of the gate puts apart.
#[test]
fn what_a_helper_wrote_is_seen_behind_the_gate() {
    loom::model(|| {
        let gate = Arc::new(Gate::new());
        let cell = Arc::new(UnsafeCell::new(0));
        let (helper, written) = (Arc::clone(&gate), Arc::clone(&cell));
        let thread = thread::spawn(move || {
            if let Some(_inside) = helper.enter() {
                written.with_mut(|_| ());
            }
        });
        drop(Closing(&gate));
        cell.with_mut(|_| ());
        thread.join().expect("a helper does not panic");
    });
}

#[test]
fn without_the_gate_the_two_accesses_collide() {
    assert!(is_refuted(|| {
        let cell = Arc::new(UnsafeCell::new(0));
        let written = Arc::clone(&cell);
        let thread = thread::spawn(move || written.with_mut(|_| ()));
        cell.with_mut(|_| ());
        thread.join().expect("a helper does not panic");
    }));
}
