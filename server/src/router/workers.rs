//! What the router knows about its workers.

use super::RouterError;
use axum::http::Uri;
use axum::http::uri::{Authority, PathAndQuery, Scheme};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use tokio::sync::watch;

/// Health checks in a row without an answer after which a worker counts as gone.
const GONE_AFTER: u32 = 3;

/// What a health check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WorkerHealth {
    /// Not asked yet.
    Unknown,
    /// Takes requests.
    Ready,
    /// Answers, but takes no new requests (starting, draining); says why.
    NotReady(String),
    /// Did not answer, so many times in a row; says how.
    Silent(u32, String),
}

impl WorkerHealth {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Ready => "ready",
            Self::NotReady(_) => "not ready",
            Self::Silent(..) => "silent",
        }
    }

    /// Why it takes no requests.
    pub(super) fn reason(&self) -> Option<&str> {
        match self {
            Self::Unknown => Some("not asked yet"),
            Self::Ready => None,
            Self::NotReady(reason) | Self::Silent(_, reason) => Some(reason),
        }
    }

    /// Whether waiting for an answer of this worker is in vain.
    pub(super) fn is_gone(&self) -> bool {
        matches!(self, Self::Silent(GONE_AFTER.., _))
    }
}

/// One worker.
#[derive(Debug)]
pub(super) struct Worker {
    address: Authority,
    health: watch::Sender<WorkerHealth>,
    under_way: AtomicUsize,
    requests: AtomicU64,
    failures: AtomicU64,
}

impl Worker {
    fn new(text: &str) -> Result<Self, RouterError> {
        let bad = || RouterError::BadAddress(text.to_owned());
        let uri: Uri = text.parse().map_err(|_| bad())?;
        let parts = uri.into_parts();
        let plain = parts.scheme == Some(Scheme::HTTP)
            && parts.path_and_query.is_none_or(|path| path == "/" || path == "");
        let address = parts.authority.filter(|_| plain).ok_or_else(bad)?;
        Ok(Self {
            address,
            health: watch::Sender::new(WorkerHealth::Unknown),
            under_way: AtomicUsize::new(0),
            requests: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        })
    }

    pub(super) fn address(&self) -> &str {
        self.address.as_str()
    }

    /// The address of a path on this worker.
    pub(super) fn uri(&self, path: PathAndQuery) -> Uri {
        let mut parts = axum::http::uri::Parts::default();
        parts.scheme = Some(Scheme::HTTP);
        parts.authority = Some(self.address.clone());
        parts.path_and_query = Some(path);
        Uri::from_parts(parts).expect("scheme, authority and path make an address")
    }

    pub(super) fn health(&self) -> WorkerHealth {
        self.health.borrow().clone()
    }

    /// Takes the finding of a health check in.
    pub(super) fn set_health(&self, found: WorkerHealth) {
        self.health.send_if_modified(|known| {
            let next = match (&*known, found) {
                (WorkerHealth::Silent(times, _), WorkerHealth::Silent(_, reason)) => {
                    WorkerHealth::Silent(times.saturating_add(1), reason)
                }
                (_, found) => found,
            };
            let changed = *known != next;
            if next.name() != known.name() {
                let reason = next.reason().unwrap_or_default();
                tracing::info!(worker = self.address(), health = next.name(), reason, "worker");
            }
            *known = next;
            changed
        });
    }

    /// A request could not be delivered: no more until a health check succeeds.
    pub(super) fn unreachable(&self, reason: &str) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        self.health.send_if_modified(|known| {
            let usable = *known == WorkerHealth::Ready;
            if usable {
                tracing::warn!(worker = self.address(), reason, "worker does not answer");
                *known = WorkerHealth::Silent(1, reason.to_owned());
            }
            usable
        });
    }

    /// Resolves when the worker is gone.
    pub(super) async fn gone(&self) {
        let mut health = self.health.subscribe();
        // The sender lives as long as `self`.
        let _ = health.wait_for(WorkerHealth::is_gone).await;
    }

    pub(super) fn under_way(&self) -> usize {
        self.under_way.load(Ordering::Relaxed)
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

/// Counts a request as under way at a worker for as long as it lives.
#[derive(Debug)]
pub(super) struct UnderWay(pub(super) Arc<Worker>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

/// All workers.
#[derive(Debug)]
pub(crate) struct Workers {
    list: Vec<Arc<Worker>>,
    /// Breaks ties, so that idle workers take turns.
    turn: AtomicUsize,
    responses: Mutex<BTreeMap<(&'static str, u16), u64>>,
}

impl Workers {
    pub(super) fn new(addresses: &[String]) -> Result<Self, RouterError> {
        let mut list: Vec<Arc<Worker>> = Vec::with_capacity(addresses.len());
        for text in addresses {
            let worker = Worker::new(text)?;
            if list.iter().any(|known| known.address == worker.address) {
                return Err(RouterError::Duplicate(text.clone()));
            }
            list.push(Arc::new(worker));
        }
        if list.is_empty() {
            return Err(RouterError::NoWorkers);
        }
        Ok(Self { list, turn: AtomicUsize::new(0), responses: Mutex::default() })
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Arc<Worker>> {
        self.list.iter()
    }

    /// The ready worker with the fewest requests under way, apart from those in `tried`.
    pub(super) fn pick(&self, tried: &[Arc<Worker>]) -> Option<UnderWay> {
        let usable: Vec<(usize, &Arc<Worker>)> = self
            .list
            .iter()
            .filter(|worker| *worker.health.borrow() == WorkerHealth::Ready)
            .filter(|worker| !tried.iter().any(|other| Arc::ptr_eq(worker, other)))
            .map(|worker| (worker.under_way(), worker))
            .collect();
        let fewest = usable.iter().map(|&(under_way, _)| under_way).min()?;
        let best: Vec<_> = usable.iter().filter(|(under_way, _)| *under_way == fewest).collect();
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let (_, worker) = best[turn % best.len()];
        worker.under_way.fetch_add(1, Ordering::Relaxed);
        worker.requests.fetch_add(1, Ordering::Relaxed);
        Some(UnderWay(Arc::clone(worker)))
    }

    pub(super) fn count_response(&self, path: &'static str, status: u16) {
        let mut responses = self.responses.lock().unwrap_or_else(PoisonError::into_inner);
        *responses.entry((path, status)).or_default() += 1;
    }

    /// Responses by path and status.
    pub(super) fn responses(&self) -> BTreeMap<(&'static str, u16), u64> {
        self.responses.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workers(count: usize) -> Workers {
        let addresses: Vec<String> = (0..count).map(|i| format!("http://h:{}", i + 1)).collect();
        let workers = Workers::new(&addresses).unwrap();
        workers.iter().for_each(|worker| worker.set_health(WorkerHealth::Ready));
        workers
    }

    #[test]
    fn addresses_are_checked() {
        let new = |list: &[&str]| {
            let list: Vec<String> = list.iter().map(|&text| text.to_owned()).collect();
            Workers::new(&list).err()
        };
        assert_eq!(new(&["http://a:1", "http://b:2/"]), None);
        assert_eq!(new(&[]), Some(RouterError::NoWorkers));
        for bad in ["", "a:1", "https://a:1", "http://a:1/v1", "http://a:1?x", "unix:/x"] {
            assert_eq!(new(&[bad]), Some(RouterError::BadAddress(bad.to_owned())), "{bad}");
        }
        let twice = Some(RouterError::Duplicate("http://a:1/".to_owned()));
        assert_eq!(new(&["http://a:1", "http://a:1/"]), twice);
    }

    #[test]
    fn the_least_loaded_ready_worker_is_picked() {
        let workers = workers(3);
        let held: Vec<UnderWay> = (0..3).map(|_| workers.pick(&[]).unwrap()).collect();
        let mut names: Vec<&str> = held.iter().map(|pick| pick.0.address()).collect();
        names.sort_unstable();
        assert_eq!(names, ["h:1", "h:2", "h:3"]);
        let freed = Arc::clone(&held[1].0);
        drop(held.into_iter().nth(1));
        let next = workers.pick(&[]).unwrap();
        assert_eq!(next.0.under_way(), 1);
        assert!(workers.pick(&[]).is_some());
        freed.unreachable("test");
        assert!((0..9).all(|_| workers.pick(&[]).unwrap().0.address() != freed.address()));
        let all: Vec<Arc<Worker>> = workers.iter().cloned().collect();
        assert!(workers.pick(&all).is_none());
    }

    #[test]
    fn a_worker_is_gone_after_several_silent_checks() {
        let workers = workers(1);
        let worker = workers.iter().next().unwrap();
        let silent = || WorkerHealth::Silent(1, "no answer".to_owned());
        worker.unreachable("refused");
        worker.set_health(silent());
        assert!(!worker.health().is_gone());
        worker.set_health(silent());
        assert!(worker.health().is_gone());
        worker.set_health(WorkerHealth::Ready);
        assert!(!worker.health().is_gone() && workers.pick(&[]).is_some());
    }
}
