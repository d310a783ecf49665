//! A reader that copies a page, and an owner that takes the page back and writes its next life.

use crate::guard_word::{change, changed, copied, holds};
use crate::is_refuted;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;

/// Generation of the page that was offered, and of its next life.
const OFFERED: u64 = 1;
const NEXT: u64 = 2;
/// What the bytes are in the two lives.
const OLD: u64 = 10;
const NEW: u64 = 20;

/// Two bytes of a page and its guard word. A copy of bytes that are written meanwhile may see any
/// of them: relaxed atomics allow exactly that.
struct Page {
    word: AtomicU64,
    bytes: [AtomicU64; 2],
}

impl Page {
    fn new() -> Arc<Self> {
        let bytes = [AtomicU64::new(OLD), AtomicU64::new(OLD)];
        Arc::new(Self { word: AtomicU64::new(OFFERED), bytes })
    }

    fn write(&self) {
        for byte in &self.bytes {
            byte.store(NEW, Ordering::Relaxed);
        }
    }

    fn copy(&self) -> [u64; 2] {
        [0, 1].map(|at: usize| self.bytes[at].load(Ordering::Relaxed))
    }
}

/// The order of `copy::guarded_copy`: what was copied, if it may be used.
fn read(page: &Page, between: impl Fn()) -> Option<[u64; 2]> {
    if !holds(&page.word, OFFERED) {
        return None;
    }
    let bytes = page.copy();
    between();
    holds(&page.word, OFFERED).then_some(bytes)
}

/// An owner and a reader at once: bytes that may be used are those of the first life.
fn race(owner: fn(&Page), between: fn()) {
    let page = Page::new();
    let next = Arc::clone(&page);
    let thread = thread::spawn(move || {
        owner(&next);
        next.write();
    });
    if let Some(bytes) = read(&page, between) {
        assert_eq!(bytes, [OLD; 2], "bytes of the next life under the first one's guard");
    }
    thread.join().expect("the owner does not panic");
}

#[test]
fn no_byte_of_the_next_life_passes_the_guard() {
    loom::model(|| race(|page| change(&page.word, NEXT), copied));
}

#[test]
fn words_of_several_pages_may_be_changed_before_one_fence() {
    let owner = |page: &Page| {
        page.word.store(NEXT, Ordering::Release);
        changed();
    };
    loom::model(move || race(owner, copied));
}

#[test]
fn a_word_that_does_not_change_hides_nothing() {
    assert!(is_refuted(|| race(|_| changed(), copied)));
}

#[test]
fn without_the_owners_fence_new_bytes_overtake_the_word() {
    assert!(is_refuted(|| race(|page| page.word.store(NEXT, Ordering::Release), copied)));
}

#[test]
fn without_the_readers_fence_the_word_may_be_older_than_the_bytes() {
    assert!(is_refuted(|| race(|page| change(&page.word, NEXT), || {})));
}

/// A reader that looks only once, before it copies.
#[test]
fn without_the_second_look_a_reused_page_is_taken() {
    assert!(is_refuted(|| {
        let page = Page::new();
        let next = Arc::clone(&page);
        let thread = thread::spawn(move || {
            change(&next.word, NEXT);
            next.write();
        });
        if holds(&page.word, OFFERED) {
            assert_eq!(page.copy(), [OLD; 2]);
        }
        thread.join().expect("the owner does not panic");
    }));
}

/// A reader that sees the value of the next life sees its bytes too, once they are offered again.
#[test]
fn a_copy_before_the_first_look_would_be_of_another_life() {
    let late_look = |page: &Page| {
        let bytes = page.copy();
        copied();
        holds(&page.word, NEXT).then_some(bytes)
    };
    assert!(is_refuted(move || {
        let page = Page::new();
        let next = Arc::clone(&page);
        let thread = thread::spawn(move || {
            change(&next.word, NEXT);
            next.write();
        });
        if let Some(bytes) = late_look(&page) {
            assert_eq!(bytes, [NEW; 2]);
        }
        thread.join().expect("the owner does not panic");
    }));
}
