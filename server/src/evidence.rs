//! Evidence of the pages of one request: the digest of each at every stop of its way, so that the
//! stop at which bytes changed can be named.

use kv_pool::{CacheKind, PageDigest};
use std::collections::VecDeque;
use std::pin::Pin;
use std::time::{Duration, SystemTime};

/// Events that are kept of one request; more are counted.
pub const EVENTS_MAX: usize = 1 << 16;

/// Where a page was when it was digested.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stop {
    /// A sequence had filled it here, and it was sealed.
    Sealed,
    /// It was kept from another request, and is shared.
    Reused,
    /// It was offered to a peer.
    Offered,
    /// It was read from a peer and checked.
    Arrived,
    /// It was saved to host memory.
    Saved,
    /// It was read from a store into host memory.
    Read,
    /// It was loaded from host memory to the device.
    Loaded,
    /// Its request let go of it.
    Ended,
}

impl Stop {
    /// Name in answers.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sealed => "sealed",
            Self::Reused => "reused",
            Self::Offered => "offered",
            Self::Arrived => "arrived",
            Self::Saved => "saved",
            Self::Read => "read",
            Self::Loaded => "loaded",
            Self::Ended => "ended",
        }
    }
}

/// What was digested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Cache.
    pub kind: CacheKind,
    /// Layer.
    pub layer: u16,
    /// Block or window page number, 0 for a carry.
    pub page_no: u32,
    /// Rows that were digested.
    pub rows: u32,
    /// Tokens that a carry stands behind; 0 for pages of rows, which stay what they are.
    pub tokens: u32,
}

/// One page at one stop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// Where it was.
    pub stop: Stop,
    /// What.
    pub part: Part,
    /// Its digest there.
    pub digest: PageDigest,
    /// For what is checked: whether it was what it was meant to be.
    pub is_right: Option<bool>,
    /// Where it came from and how: position in [`Evidence::attempts`].
    pub attempt: Option<u32>,
    /// Since the request came.
    pub at: Duration,
}

/// A hand-off of the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attempt {
    /// Its id.
    pub id: String,
    /// The other worker.
    pub peer: String,
    /// How pages travel between them.
    pub transport: &'static str,
}

/// What one worker knows of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Evidence {
    /// Name of the request in logs.
    pub request_id: String,
    /// `unified`, `prefill` or `decode`.
    pub role: &'static str,
    /// When it came.
    pub began_at: SystemTime,
    /// The same by the worker's clock.
    pub began: Duration,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Its hand-offs, in order.
    pub attempts: Vec<Attempt>,
    /// In order.
    pub events: Vec<Event>,
    /// Events that found no room.
    pub lost: u64,
    /// Whether it is over.
    pub has_ended: bool,
}

impl Evidence {
    /// Takes note of a page.
    pub fn note(&mut self, event: Event) {
        if self.events.len() < EVENTS_MAX {
            self.events.push(event);
        } else {
            self.lost += 1;
        }
    }
}

/// The last requests of a worker, by the key that it has for them.
#[derive(Debug)]
pub struct Book<K> {
    most: usize,
    all: VecDeque<(K, Evidence)>,
}

impl<K: PartialEq> Book<K> {
    /// Of at most so many requests.
    #[must_use]
    pub const fn new(most: usize) -> Self {
        Self { most, all: VecDeque::new() }
    }

    /// A request has come; the one that came first goes if there are too many.
    pub fn begin(&mut self, key: K, evidence: Evidence) {
        if self.all.len() >= self.most {
            self.all.pop_front();
        }
        self.all.push_back((key, evidence));
    }

    /// What is known of one, also when it has ended.
    pub fn of(&mut self, key: &K) -> Option<&mut Evidence> {
        self.all.iter_mut().rev().find(|(known, _)| known == key).map(|(_, evidence)| evidence)
    }

    /// All that is known of requests of this name, the first one first.
    pub fn named<'a>(&'a self, request_id: &'a str) -> impl Iterator<Item = &'a Evidence> {
        self.all.iter().map(|(_, evidence)| evidence).filter(move |e| e.request_id == request_id)
    }
}

/// What all workers of a process know of a request.
pub type Witnessing = Pin<Box<dyn Future<Output = Vec<Evidence>> + Send>>;

#[cfg(test)]
mod tests {
    use super::*;

    fn evidence(name: &str) -> Evidence {
        Evidence {
            request_id: name.to_owned(),
            role: "decode",
            began_at: SystemTime::UNIX_EPOCH,
            began: Duration::ZERO,
            prompt_tokens: 5,
            attempts: Vec::new(),
            events: Vec::new(),
            lost: 0,
            has_ended: false,
        }
    }

    #[test]
    fn a_book_keeps_the_last_requests() {
        let mut book = Book::new(2);
        book.begin(1, evidence("a"));
        book.begin(2, evidence("b"));
        book.of(&1).expect("it is there").has_ended = true;
        assert!(book.named("a").next().is_some_and(|evidence| evidence.has_ended));
        book.begin(3, evidence("b"));
        assert_eq!((book.named("a").count(), book.named("b").count()), (0, 2));
        assert!(book.of(&1).is_none() && book.of(&2).is_some_and(|evidence| !evidence.has_ended));
    }

    #[test]
    fn events_beyond_the_bound_are_counted() {
        let mut one = evidence("a");
        let part = Part { kind: CacheKind::C4Kv, layer: 1, page_no: 0, rows: 64, tokens: 0 };
        let event = Event {
            stop: Stop::Sealed,
            part,
            digest: PageDigest([0; 16]),
            is_right: None,
            attempt: None,
            at: Duration::ZERO,
        };
        (0..EVENTS_MAX + 3).for_each(|_| one.note(event.clone()));
        assert_eq!((one.events.len(), one.lost), (EVENTS_MAX, 3));
    }
}
