//! What the router knows about its workers.

use super::RouterError;
use super::choice::{Choice, ChoiceConfig, Chosen, HashKey, Prompt, WorkerId};
use crate::clock::Clock;
use axum::http::Uri;
use axum::http::uri::{Authority, PathAndQuery, Scheme};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
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
    /// Answers, and is not one to send requests to; says why.
    Unfit(String),
    /// Did not answer, so many times in a row; says how.
    Silent(u32, String),
}

impl WorkerHealth {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Unknown => "unknown",
            Self::Ready => "ready",
            Self::NotReady(_) => "not ready",
            Self::Unfit(_) => "unfit",
            Self::Silent(..) => "silent",
        }
    }

    /// Why it takes no requests.
    pub(super) fn reason(&self) -> Option<&str> {
        match self {
            Self::Unknown => Some("not asked yet"),
            Self::Ready => None,
            Self::NotReady(reason) | Self::Unfit(reason) | Self::Silent(_, reason) => Some(reason),
        }
    }

    /// Whether waiting for an answer of this worker is in vain.
    pub(super) fn is_gone(&self) -> bool {
        matches!(self, Self::Silent(GONE_AFTER.., _))
    }
}

/// What a worker says of itself; what it does not say is not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Facts {
    /// `null`, `prefill`, `decode` or `both`.
    pub(super) mode: Option<String>,
    /// Id of its model.
    pub(super) model: Option<String>,
}

impl Facts {
    fn is_prefill(&self) -> bool {
        self.mode.as_deref() == Some("prefill")
    }
}

/// One worker.
#[derive(Debug)]
pub(super) struct Worker {
    id: WorkerId,
    address: Authority,
    health: watch::Sender<WorkerHealth>,
    /// What it said of itself when it last answered.
    facts: Mutex<Facts>,
    /// It took requests at least once.
    was_ready: AtomicBool,
    /// It is this router, and asking it would go round for ever.
    is_self: AtomicBool,
    /// Gets no new requests, and goes when those that it has have ended.
    is_leaving: AtomicBool,
    under_way: AtomicUsize,
    requests: AtomicU64,
    failures: AtomicU64,
    prompt_blocks: AtomicU64,
    overlap_blocks: AtomicU64,
}

impl Worker {
    fn new(id: WorkerId, text: &str) -> Result<Self, RouterError> {
        let bad = || RouterError::BadAddress(text.to_owned());
        let uri: Uri = text.parse().map_err(|_| bad())?;
        let parts = uri.into_parts();
        let plain = parts.scheme == Some(Scheme::HTTP)
            && parts.path_and_query.is_none_or(|path| path == "/" || path == "");
        let address = parts.authority.filter(|_| plain).ok_or_else(bad)?;
        Ok(Self {
            id,
            address,
            health: watch::Sender::new(WorkerHealth::Unknown),
            facts: Mutex::default(),
            was_ready: AtomicBool::new(false),
            is_self: AtomicBool::new(false),
            is_leaving: AtomicBool::new(false),
            under_way: AtomicUsize::new(0),
            requests: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            prompt_blocks: AtomicU64::new(0),
            overlap_blocks: AtomicU64::new(0),
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

    /// Whether it took requests at least once.
    pub(super) fn was_ready(&self) -> bool {
        self.was_ready.load(Ordering::Relaxed)
    }

    /// Whether it is this router.
    pub(super) fn is_self(&self) -> bool {
        self.is_self.load(Ordering::Relaxed)
    }

    pub(super) fn set_self(&self, is_self: bool) {
        self.is_self.store(is_self, Ordering::Relaxed);
    }

    pub(super) fn health(&self) -> WorkerHealth {
        self.health.borrow().clone()
    }

    /// What it said of itself when it last answered.
    pub(super) fn facts(&self) -> Facts {
        lock(&self.facts).clone()
    }

    /// Takes the finding of a health check in.
    pub(super) fn set_health(&self, found: WorkerHealth) {
        if found == WorkerHealth::Ready {
            self.was_ready.store(true, Ordering::Relaxed);
        }
        self.health.send_if_modified(|known| {
            let next = match (&*known, found) {
                (WorkerHealth::Silent(times, _), WorkerHealth::Silent(_, reason)) => {
                    WorkerHealth::Silent(times.saturating_add(1), reason)
                }
                (_, found) => found,
            };
            let changed = *known != next;
            if next.name() != known.name() {
                let (reason, worker) = (next.reason().unwrap_or_default(), self.address());
                match next {
                    WorkerHealth::Unfit(_) => {
                        tracing::warn!(worker, "worker is not used: {reason}");
                    }
                    _ => tracing::info!(worker, health = next.name(), reason, "worker"),
                }
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

    /// Whether it gets no new requests, because it has left.
    pub(super) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Acquire)
    }

    pub(super) fn under_way(&self) -> usize {
        self.under_way.load(Ordering::Relaxed)
    }

    pub(super) fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }

    /// A request of a client is sent there; probes that are passed on are none.
    pub(super) fn count_request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Blocks of the prompts that were sent.
    pub(super) fn prompt_blocks(&self) -> u64 {
        self.prompt_blocks.load(Ordering::Relaxed)
    }

    /// Those of them that the worker was believed to have.
    pub(super) fn overlap_blocks(&self) -> u64 {
        self.overlap_blocks.load(Ordering::Relaxed)
    }
}

/// Counts a request as under way at a worker for as long as it lives.
#[derive(Debug)]
pub(super) struct UnderWay {
    /// Who has it.
    pub(super) worker: Arc<Worker>,
    /// None once it was given back.
    chosen: Option<Chosen>,
    choice: Arc<Mutex<Choice>>,
}

impl UnderWay {
    /// The first piece of the answer is there.
    pub(super) fn first_token(&mut self) {
        if let Some(chosen) = &mut self.chosen {
            lock(&self.choice).handle_first_token(chosen);
        }
    }

    /// The worker did not take it.
    pub(super) fn refused(&self, prompt: &Prompt) {
        if let Some(chosen) = &self.chosen {
            lock(&self.choice).handle_refused(chosen, prompt);
        }
    }

    /// The worker cannot be reached: no more requests until a health check succeeds.
    pub(super) fn unreachable(&self, reason: &str) {
        lock(&self.choice).handle_lost(self.worker.id);
        self.worker.unreachable(reason);
    }
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.worker.under_way.fetch_sub(1, Ordering::Relaxed);
        if let Some(chosen) = self.chosen.take() {
            lock(&self.choice).handle_ended(chosen);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// All workers: those that were named at the start, which never leave, and those that come and go.
#[derive(Debug)]
pub(crate) struct Workers {
    list: Mutex<List>,
    choice: Arc<Mutex<Choice>>,
    key: HashKey,
    clock: Clock,
    /// The model of all workers that get requests, once one is known.
    model: Mutex<Option<String>>,
}

#[derive(Debug, Default)]
struct List {
    workers: Vec<Arc<Worker>>,
    /// How many of them, at the beginning, never leave.
    fixed: usize,
    next_id: u64,
}

impl List {
    fn add(&mut self, text: &str, choice: &mut Choice) -> Result<Arc<Worker>, RouterError> {
        let worker = Arc::new(Worker::new(WorkerId(self.next_id), text)?);
        if self.workers.iter().any(|known| known.address == worker.address) {
            return Err(RouterError::Duplicate(text.to_owned()));
        }
        self.next_id += 1;
        choice.handle_joined(worker.id);
        self.workers.push(Arc::clone(&worker));
        Ok(worker)
    }
}

impl Workers {
    /// Those at `addresses` never leave.
    pub(super) fn new(
        addresses: &[String],
        config: ChoiceConfig,
        key: HashKey,
    ) -> Result<Self, RouterError> {
        let (mut list, mut choice) = (List::default(), Choice::new(config));
        for text in addresses {
            list.add(text, &mut choice)?;
        }
        list.fixed = list.workers.len();
        let (list, choice) = (Mutex::new(list), Arc::new(Mutex::new(choice)));
        Ok(Self { list, choice, key, clock: Clock::start(), model: Mutex::default() })
    }

    /// Those that are there now, also those that are leaving.
    pub(super) fn all(&self) -> Vec<Arc<Worker>> {
        lock(&self.list).workers.clone()
    }

    /// A worker at `HOST:PORT` has come; it, if it was not there already.
    pub(super) fn join(&self, address: &str) -> Result<Option<Arc<Worker>>, RouterError> {
        let mut list = lock(&self.list);
        if let Some(known) = list.workers.iter().find(|worker| worker.address() == address) {
            if known.is_leaving.swap(false, Ordering::AcqRel) {
                tracing::info!(worker = address, "worker has come back");
            }
            return Ok(None);
        }
        let worker = list.add(&format!("http://{address}"), &mut lock(&self.choice))?;
        tracing::info!(worker = address, "worker has joined");
        Ok(Some(worker))
    }

    /// A worker has left: it gets no new requests.
    pub(super) fn leave(&self, address: &str) {
        let list = lock(&self.list);
        let mut moving = list.workers.iter().skip(list.fixed);
        if let Some(worker) = moving.find(|worker| worker.address() == address) {
            worker.is_leaving.store(true, Ordering::Release);
            tracing::info!(worker = address, under_way = worker.under_way(), "worker has left");
        }
    }

    /// Workers have forgotten what they were sent.
    pub(super) fn forget(&self, addresses: &[&str]) {
        let list = lock(&self.list);
        let mut choice = lock(&self.choice);
        for worker in list.workers.iter().filter(|worker| addresses.contains(&worker.address())) {
            choice.handle_lost(worker.id);
        }
    }

    /// Forgets those that have left and whose requests have ended.
    pub(super) fn clear_away(&self) {
        let mut list = lock(&self.list);
        let fixed = list.fixed;
        let mut choice = lock(&self.choice);
        let mut place = 0;
        list.workers.retain(|worker| {
            place += 1;
            let is_gone = place > fixed && worker.is_leaving() && worker.under_way() == 0;
            if is_gone {
                choice.handle_left(worker.id);
            }
            !is_gone
        });
    }

    /// Takes in what a health check found. A prefill worker is unfit, and so is a worker with another
    /// model than the first one that was found.
    pub(super) fn take_in(&self, worker: &Worker, found: WorkerHealth, facts: Facts) {
        if matches!(found, WorkerHealth::Silent(..)) {
            return worker.set_health(found);
        }
        let why = if facts.is_prefill() {
            Some("is a prefill worker: it takes no requests; name decode workers".to_owned())
        } else {
            self.misfit(worker, facts.model.as_deref())
        };
        *lock(&worker.facts) = facts;
        worker.set_health(why.map_or(found, WorkerHealth::Unfit));
    }

    /// Why a worker with this model is not to be mixed with the others. The first model is that of
    /// all, for as long as a worker that is not gone has it.
    fn misfit(&self, worker: &Worker, model: Option<&str>) -> Option<String> {
        let model = model?;
        let others: Vec<Facts> = self
            .all()
            .iter()
            .filter(|other| other.id != worker.id && !other.is_leaving())
            .filter(|other| !other.health.borrow().is_gone())
            .map(|other| other.facts())
            .filter(|facts| !facts.is_prefill())
            .collect();
        let is_taken = |first: &&String| others.iter().any(|o| o.model.as_ref() == Some(*first));
        let mut first = lock(&self.model);
        match first.as_ref().filter(is_taken) {
            Some(first) if first != model => {
                Some(format!("serves {model:?}, and the others serve {first:?}"))
            }
            _ => {
                *first = Some(model.to_owned());
                None
            }
        }
    }

    /// The model of the workers that get requests, once it is known.
    pub(super) fn model(&self) -> Option<String> {
        lock(&self.model).clone()
    }

    /// Time since the start.
    pub(super) fn now(&self) -> Duration {
        self.clock.elapsed()
    }

    /// Key of the hashes of prompts.
    pub(super) const fn key(&self) -> HashKey {
        self.key
    }

    /// Blocks that a worker is believed to have, and those that it computes.
    pub(super) fn blocks_of(&self, worker: &Worker) -> (usize, u64) {
        let choice = lock(&self.choice);
        (choice.remembered(worker.id), choice.uncached_under_way(worker.id))
    }

    /// The ready worker that is to have a request, apart from those in `tried`.
    pub(super) fn pick(&self, prompt: &Prompt, tried: &[Arc<Worker>]) -> Option<UnderWay> {
        let list = lock(&self.list);
        let usable: Vec<WorkerId> = list
            .workers
            .iter()
            .filter(|worker| *worker.health.borrow() == WorkerHealth::Ready)
            .filter(|worker| !worker.is_leaving())
            .filter(|worker| !tried.iter().any(|other| Arc::ptr_eq(worker, other)))
            .map(|worker| worker.id)
            .collect();
        let chosen = lock(&self.choice).choose(self.clock.elapsed(), prompt, &usable)?;
        let worker = list.workers.iter().find(|worker| worker.id == chosen.worker)?;
        worker.under_way.fetch_add(1, Ordering::Relaxed);
        worker.prompt_blocks.fetch_add(chosen.prompt_blocks.into(), Ordering::Relaxed);
        worker.overlap_blocks.fetch_add(chosen.overlap_blocks.into(), Ordering::Relaxed);
        let (worker, choice) = (Arc::clone(worker), Arc::clone(&self.choice));
        Some(UnderWay { worker, chosen: Some(chosen), choice })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(addresses: &[String]) -> Result<Workers, RouterError> {
        Workers::new(addresses, ChoiceConfig::default(), HashKey([1; 32]))
    }

    fn pick(workers: &Workers) -> Option<UnderWay> {
        workers.pick(&Prompt::none(), &[])
    }

    fn workers(count: usize) -> Workers {
        let addresses: Vec<String> = (0..count).map(|i| format!("http://h:{}", i + 1)).collect();
        let workers = new(&addresses).unwrap();
        workers.all().iter().for_each(|worker| worker.set_health(WorkerHealth::Ready));
        workers
    }

    #[test]
    fn addresses_are_checked() {
        let new = |list: &[&str]| {
            let list: Vec<String> = list.iter().map(|&text| text.to_owned()).collect();
            new(&list).err()
        };
        assert_eq!(new(&["http://a:1", "http://b:2/"]), None);
        for bad in ["", "a:1", "https://a:1", "http://a:1/v1", "http://a:1?x", "unix:/x"] {
            assert_eq!(new(&[bad]), Some(RouterError::BadAddress(bad.to_owned())), "{bad}");
        }
        let twice = Some(RouterError::Duplicate("http://a:1/".to_owned()));
        assert_eq!(new(&["http://a:1", "http://a:1/"]), twice);
    }

    #[test]
    fn the_least_loaded_ready_worker_is_picked() {
        let workers = workers(3);
        let held: Vec<UnderWay> = (0..3).map(|_| pick(&workers).unwrap()).collect();
        let mut names: Vec<&str> = held.iter().map(|pick| pick.worker.address()).collect();
        names.sort_unstable();
        assert_eq!(names, ["h:1", "h:2", "h:3"]);
        let freed = Arc::clone(&held[1].worker);
        drop(held.into_iter().nth(1));
        let next = pick(&workers).unwrap();
        assert_eq!(next.worker.under_way(), 1);
        assert!(pick(&workers).is_some());
        freed.unreachable("test");
        assert!((0..9).all(|_| pick(&workers).unwrap().worker.address() != freed.address()));
        assert!(workers.pick(&Prompt::none(), &workers.all()).is_none());
    }

    fn facts(mode: &str, model: &str) -> Facts {
        Facts { mode: Some(mode.to_owned()), model: Some(model.to_owned()) }
    }

    #[test]
    fn prefill_workers_and_other_models_get_no_requests() {
        let workers = workers(3);
        let all = workers.all();
        let ready = |at: usize, mode, model| {
            workers.take_in(&all[at], WorkerHealth::Ready, facts(mode, model));
        };
        ready(0, "prefill", "other");
        ready(1, "decode", "m");
        ready(2, "null", "n");
        assert!(all[0].health().reason().unwrap().starts_with("is a prefill worker"));
        let reason = "serves \"n\", and the others serve \"m\"";
        assert_eq!(all[2].health(), WorkerHealth::Unfit(reason.to_owned()));
        assert!((0..9).all(|_| pick(&workers).unwrap().worker.address() == "h:2"));
        // Nobody has the first model any more: the next one is that of all.
        ready(1, "decode", "n");
        ready(2, "null", "n");
        assert_eq!((all[1].health().reason(), workers.model().as_deref()), (None, Some("n")));
        let used: Vec<UnderWay> = (0..2).map(|_| pick(&workers).unwrap()).collect();
        assert_ne!(used[0].worker.address(), used[1].worker.address());
    }

    #[test]
    fn a_model_stays_the_first_until_its_last_worker_is_gone() {
        let workers = workers(2);
        let all = workers.all();
        let ready = |at: usize, model| {
            workers.take_in(&all[at], WorkerHealth::Ready, facts("null", model));
        };
        ready(0, "m");
        for _ in 0..3 {
            ready(1, "n");
            assert!(matches!(all[1].health(), WorkerHealth::Unfit(_)));
            let silent = WorkerHealth::Silent(1, "no answer".to_owned());
            workers.take_in(&all[0], silent, Facts::default());
        }
        ready(1, "n");
        assert_eq!(all[1].health(), WorkerHealth::Ready);
        ready(0, "m");
        assert!(matches!(all[0].health(), WorkerHealth::Unfit(_)));
        // What a worker does not say is held against nobody.
        workers.take_in(&all[0], WorkerHealth::Ready, Facts::default());
        assert_eq!(all[0].health(), WorkerHealth::Ready);
    }

    #[test]
    fn a_worker_is_gone_after_several_silent_checks() {
        let workers = workers(1);
        let worker = workers.all().remove(0);
        let silent = || WorkerHealth::Silent(1, "no answer".to_owned());
        worker.unreachable("refused");
        worker.set_health(silent());
        assert!(!worker.health().is_gone());
        worker.set_health(silent());
        assert!(worker.health().is_gone());
        worker.set_health(WorkerHealth::Ready);
        assert!(!worker.health().is_gone() && pick(&workers).is_some());
    }

    #[test]
    fn a_worker_that_has_left_ends_what_it_has() {
        let workers = workers(1);
        assert!(workers.join("h:1").unwrap().is_none(), "it was there");
        let second = workers.join("h:2").unwrap().unwrap();
        second.set_health(WorkerHealth::Ready);
        let held: Vec<UnderWay> = (0..2).map(|_| pick(&workers).unwrap()).collect();
        assert_eq!(second.under_way(), 1);
        workers.leave("h:2");
        workers.leave("h:3");
        assert!((0..9).all(|_| pick(&workers).unwrap().worker.address() == "h:1"));
        workers.clear_away();
        assert_eq!(workers.all().len(), 2, "a request is under way");
        workers.join("h:2").unwrap();
        assert!((0..9).any(|_| pick(&workers).unwrap().worker.address() == "h:2"));
        workers.leave("h:2");
        drop(held);
        workers.clear_away();
        assert_eq!(workers.all().len(), 1);
        // Those that were named at the start stay.
        workers.leave("h:1");
        workers.clear_away();
        assert_eq!(pick(&workers).unwrap().worker.address(), "h:1");
        assert!(workers.join("not an address").is_err());
    }
}
