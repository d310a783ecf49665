//! What came in over HTTP and how that ended, whoever answered: the endpoints, the guard before them, or
//! what stands there while the model is loaded.
//!
//! Probes are counted apart: they come every second from every side, and would hide what clients ask.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Whether a path is asked by what watches a process: kubelets, load balancers, routers, collectors of
/// metrics, the page.
pub(crate) fn is_probe(path: &str) -> bool {
    matches!(path, "/health" | "/readyz" | "/health_generate" | "/metrics" | "/stats.json")
}

/// Why a connection was ended before its client wanted that.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Closed {
    /// No TLS handshake within its limit.
    HandshakeSlow,
    /// No TLS handshake that could be understood.
    HandshakeFailed,
    /// No head of a request within its limit.
    Idle,
    /// What came is no HTTP, or breaks its rules.
    Malformed,
    /// The client takes nothing of an answer.
    Unread,
}

impl Closed {
    const ALL: [Self; 5] =
        [Self::HandshakeSlow, Self::HandshakeFailed, Self::Idle, Self::Malformed, Self::Unread];

    /// Its label in the metrics.
    const fn name(self) -> &'static str {
        match self {
            Self::HandshakeSlow => "handshake_timeout",
            Self::HandshakeFailed => "handshake_failed",
            Self::Idle => "idle",
            Self::Malformed => "malformed",
            Self::Unread => "unread",
        }
    }
}

/// Responses by method, path and status.
pub(crate) type Responses = BTreeMap<(&'static str, &'static str, u16), u64>;

/// The counts of a process.
#[derive(Debug, Default)]
pub struct HttpCounts {
    responses: Mutex<Responses>,
    closed: [AtomicU64; Closed::ALL.len()],
}

impl HttpCounts {
    fn lock(&self) -> MutexGuard<'_, Responses> {
        // Only additions happen under the lock.
        self.responses.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a response. Methods and paths are free text; the number of label values is not.
    pub(crate) fn count_response(&self, method: &str, path: &str, status: u16) {
        let method = match method {
            "GET" => "GET",
            "HEAD" => "HEAD",
            "POST" => "POST",
            _ => "other",
        };
        *self.lock().entry((method, super::known_path(path), status)).or_default() += 1;
    }

    pub(crate) fn count_closed(&self, why: Closed) {
        self.closed[why as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Responses to what clients asked, and those to probes.
    pub(crate) fn responses(&self) -> (Responses, Responses) {
        let all = self.lock().clone();
        all.into_iter().partition(|((_, path, _), _)| !is_probe(path))
    }

    /// Connections that were ended, by why.
    pub(crate) fn closed(&self) -> impl Iterator<Item = (&'static str, u64)> {
        Closed::ALL
            .into_iter()
            .map(|why| (why.name(), self.closed[why as usize].load(Ordering::Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probes_are_apart_and_labels_are_few() {
        let counts = HttpCounts::default();
        for n in 0..100 {
            counts.count_response(&format!("M{n}"), &format!("/{n}"), 404);
            counts.count_response("GET", "/health", 200);
        }
        counts.count_response("POST", "/generate", 401);
        let (requests, probes) = counts.responses();
        let expected = [(("POST", "/generate", 401), 1), (("other", "other", 404), 100)];
        assert_eq!(requests.into_iter().collect::<Vec<_>>(), expected);
        assert_eq!(probes.into_iter().collect::<Vec<_>>(), [(("GET", "/health", 200), 100)]);
    }

    #[test]
    fn every_reason_has_its_place() {
        let counts = HttpCounts::default();
        for (n, why) in Closed::ALL.into_iter().enumerate() {
            assert_eq!(why as usize, n);
            (0..=n).for_each(|_| counts.count_closed(why));
        }
        let found: Vec<u64> = counts.closed().map(|(_, count)| count).collect();
        assert_eq!(found, [1, 2, 3, 4, 5]);
    }
}
