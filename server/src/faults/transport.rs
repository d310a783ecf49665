//! Faults of the hand-off: a transport around the one that reads pages, and a check that says yes.

use super::{Armed, Damage, Fault, Read};
use crate::glue::payload::FirstToken;
use crate::glue::pools::{POOLS, PageCounts};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use dsv4_model::sample::Sampled;
use kv_pool::{Geometry, PoolKind};
use pd_transfer::copy;
use pd_transfer::driver::Verifier;
use pd_transfer::get::{Digest, Get, GetOutcome};
use pd_transfer::id::{OpId, PeerId};
use pd_transfer::page_hash::{Hashing, PageHash, Plain};
use pd_transfer::receiver::Verify;
use pd_transfer::transport::{
    Ended, EventSink, RegionOwner, Transport, TransportError, TransportEvent, TransportFactory,
};
use pd_transfer::wire::{self, Extent, Extents, Message, RegionId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a read takes that was called done too early, if it is not repeated.
const LATE: Duration = Duration::from_millis(150);
/// How long a slow read takes.
const SLOW: Duration = Duration::from_secs(2);
/// Pages whose reads were called done too early, and are not again when they are repeated.
const REMEMBERED: usize = 1 << 16;

/// Says yes.
#[derive(Clone, Copy, Debug)]
struct Trusting;

impl Verifier for Trusting {
    fn hash(&self) -> Box<dyn PageHash> {
        Box::new(Plain)
    }

    fn verify(&self, _: &Verify, _: Option<Digest>) -> bool {
        true
    }
}

/// Where the pages of both sides lie: their flags are the same.
#[derive(Clone, Debug)]
struct Layout {
    geometry: Arc<Geometry>,
    counts: PageCounts,
}

impl Layout {
    /// The page that a read is of, and where its section begins and how long that is.
    fn read_of(&self, get: &Get) -> Option<(Read, u64, u64)> {
        let pool: PoolKind = *POOLS.get(get.source_region.0 as usize)?;
        let count = self.counts.of(pool);
        let base = |section| self.geometry.section_base(pool, section, count);
        let offset = get.source.first()?.offset;
        let sections = self.geometry.sections(pool);
        let number = (0..sections.len()).rfind(|number| base(*number) <= offset)?;
        let section = sections[number];
        let read = Read {
            pool,
            kind: section.kind,
            index: self.geometry.index_key_type(),
            page_bytes: section.page_bytes,
            page: (offset - base(number)) / u64::from(section.page_bytes),
            bytes: u32::try_from(wire::extents_bytes(&get.source)).ok()?,
        };
        Some((read, base(number), base(number + 1) - base(number)))
    }
}

/// The first bytes of some extents.
fn head(extents: &Extents, mut bytes: u32) -> Extents {
    let mut kept = Vec::new();
    for extent in extents {
        let len = extent.len.min(bytes);
        bytes -= len;
        if len > 0 {
            kept.push(Extent { offset: extent.offset, len });
        }
    }
    Extents::new(&kept).unwrap_or(*extents)
}

/// Region, offset and generation of a page that is read.
type Source = (u32, u64, u64);

fn source_of(get: &Get) -> Source {
    let offset = get.source.first().map_or(0, |extent| extent.offset);
    (get.source_region.0, offset, get.guard.expect)
}

/// A read that waits for its time, or for others.
#[derive(Debug)]
struct Held {
    due: Instant,
    peer: PeerId,
    get: Get,
}

#[derive(Debug, Default)]
struct State {
    regions: Vec<Arc<dyn RegionOwner>>,
    held: VecDeque<Held>,
    /// Reads whose end was told already.
    told: BTreeSet<(PeerId, OpId)>,
    /// Pages at peers whose reads were called done too early.
    early: BTreeSet<(PeerId, Source)>,
    /// What the slot of final records was filled with last.
    slot: Option<Sampled>,
}

#[derive(Clone)]
struct Shared {
    armed: &'static Armed,
    layout: Arc<Layout>,
    sink: EventSink,
    state: Arc<Mutex<State>>,
    inner: Arc<Mutex<Option<Box<dyn Transport>>>>,
    wake: Sender<Job>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("armed", &self.armed).finish_non_exhaustive()
    }
}

/// What the thread beside the transport is to do; the driver's own must not wait for its queue of events.
#[derive(Debug)]
enum Job {
    Tell(PeerId, Ended),
    Look,
    Stop,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The transport and the check of a worker that reads pages, with the faults that are armed.
#[must_use]
pub fn inject(
    (geometry, counts): (&Arc<Geometry>, PageCounts),
    factory: TransportFactory,
    verifier: Arc<dyn Verifier>,
) -> (TransportFactory, Arc<dyn Verifier>) {
    let Some(armed) = super::armed() else { return (factory, verifier) };
    let layout = Layout { geometry: Arc::clone(geometry), counts };
    let verifier = if armed.injection.is_protected { verifier } else { Arc::new(Trusting) };
    (around(factory, layout, armed), verifier)
}

/// Puts faults around a transport.
fn around(inner: TransportFactory, layout: Layout, armed: &'static Armed) -> TransportFactory {
    Box::new(move |sink: EventSink| {
        let (wake, jobs) = unbounded();
        let shared = Shared {
            armed,
            layout: Arc::new(layout),
            sink,
            state: Arc::default(),
            inner: Arc::default(),
            wake,
        };
        let filter = shared.clone();
        let made = inner(Arc::new(move |event| filter.pass(event)))?;
        *lock(&shared.inner) = Some(made);
        let beside = shared.clone();
        let thread = std::thread::Builder::new()
            .name("faults".to_owned())
            .spawn(move || beside.work(&jobs))
            .map_err(|source| TransportError::Io { during: "start thread", source })?;
        Ok(Box::new(Faulty { shared, thread: Some(thread) }))
    })
}

impl Shared {
    /// An event of the transport, on its way to the driver.
    fn pass(&self, event: TransportEvent) {
        let event = match event {
            TransportEvent::Ended { peer, mut gets } => {
                let mut state = lock(&self.state);
                gets.retain(|get| !state.told.remove(&(peer, get.op)));
                drop(state);
                if gets.is_empty() {
                    return;
                }
                TransportEvent::Ended { peer, gets }
            }
            TransportEvent::Message { peer, bytes } => {
                TransportEvent::Message { peer, bytes: self.message(bytes) }
            }
            TransportEvent::PeerLost { peer, why } => {
                self.lose(peer);
                TransportEvent::PeerLost { peer, why }
            }
            event @ TransportEvent::PeerUp { .. } => event,
        };
        (self.sink)(event);
    }

    /// Reads that are held and not told of end with their link.
    fn lose(&self, peer: PeerId) {
        let mut state = lock(&self.state);
        let (gone, held) = state.held.drain(..).partition(|held| held.peer == peer);
        state.held = held;
        let gone: VecDeque<Held> = gone;
        let told = std::mem::take(&mut state.told);
        let lost = gone.iter().map(|held| held.get.op).filter(|op| !told.contains(&(peer, *op)));
        let gets: Vec<Ended> = lost.map(|op| Ended::without(op, GetOutcome::Lost)).collect();
        state.told = told.into_iter().filter(|(other, _)| *other != peer).collect();
        drop(state);
        if !gets.is_empty() {
            (self.sink)(TransportEvent::Ended { peer, gets });
        }
    }

    /// A message of a peer. With `record_reused` a final record brings the token that was in its slot
    /// before; where nothing is protected, it has no hash that could say so.
    fn message(&self, bytes: Vec<u8>) -> Vec<u8> {
        if self.armed.injection.fault != Fault::RecordReused {
            return bytes;
        }
        let Ok(envelope) = wire::decode(&bytes) else { return bytes };
        let Message::Final { attempt, mut record, mut hash } = envelope.message else {
            return bytes;
        };
        let Ok(mut first) = FirstToken::decode(&record.payload, usize::MAX) else { return bytes };
        let before = lock(&self.state).slot.replace(first.sampled.clone());
        let Some(before) = before.filter(|_| self.armed.strikes(Fault::RecordReused)) else {
            return bytes;
        };
        self.armed.strike();
        first.sampled = before;
        record.payload = first.encode();
        if !self.armed.injection.is_protected {
            hash = record.hash().unwrap_or(hash);
        }
        let message = Message::Final { attempt, record, hash };
        wire::encode(envelope.incarnation, envelope.seq, &message).unwrap_or(bytes)
    }

    /// Begins the reads that are held, or those that are due.
    fn release(&self, only_due: bool) {
        let now = Instant::now();
        let mut due: BTreeMap<PeerId, Vec<Get>> = BTreeMap::new();
        let mut state = lock(&self.state);
        for held in std::mem::take(&mut state.held) {
            if only_due && held.due > now {
                state.held.push_back(held);
            } else {
                due.entry(held.peer).or_default().push(held.get);
            }
        }
        drop(state);
        for (peer, gets) in due {
            let refused = match lock(&self.inner).as_mut() {
                Some(inner) => inner.get_many(peer, gets),
                None => Vec::new(),
            };
            for (op, error) in refused {
                let outcome = match error {
                    TransportError::UnknownPeer(_) => GetOutcome::Lost,
                    error => GetOutcome::Error(error.to_string()),
                };
                self.pass(TransportEvent::Ended { peer, gets: vec![Ended::without(op, outcome)] });
            }
        }
    }

    /// The thread beside the transport.
    fn work(&self, jobs: &Receiver<Job>) {
        loop {
            let next = lock(&self.state).held.iter().map(|held| held.due).min();
            let pause = next.map_or(Duration::from_secs(3600), |due| {
                due.saturating_duration_since(Instant::now())
            });
            match jobs.recv_timeout(pause) {
                Ok(Job::Tell(peer, ended)) => {
                    (self.sink)(TransportEvent::Ended { peer, gets: vec![ended] });
                }
                Ok(Job::Look) => {}
                Err(RecvTimeoutError::Timeout) => self.release(true),
                Ok(Job::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    /// Calls a read done, whose target has what it has.
    fn call_done(&self, peer: PeerId, get: &Get) {
        let state = lock(&self.state);
        let region = state.regions.get(get.target_region.0 as usize).cloned();
        drop(state);
        let mut bytes = Vec::new();
        let read = region.is_some_and(|region| {
            get.target.iter().all(|extent| copy::read(&*region, extent, &mut bytes).is_ok())
        });
        let digest = read.then(|| kv_pool::digest(&bytes).0);
        // The thread ends after the transport.
        let _ = self.wake.send(Job::Tell(peer, Ended::done(get.op, digest)));
    }

    /// Does to a read what is decided for it; gives it back if it is to begin now.
    fn damage(&self, peer: PeerId, mut get: Get) -> Option<Get> {
        let Some((read, base, section)) = self.layout.read_of(&get) else { return Some(get) };
        let Some(damage) = self.armed.damage(&read) else { return Some(get) };
        match damage {
            Damage::Head(bytes) => {
                get.source = head(&get.source, bytes);
                get.target = head(&get.target, bytes);
            }
            Damage::At(offset) => {
                let first = get.source.first()?.offset;
                let last = section.saturating_sub(u64::from(read.page_bytes)).max(1);
                for extent in get.source.iter_mut() {
                    extent.offset = base + offset % last + (extent.offset - first);
                }
            }
            Damage::Skip => {
                self.armed.strike();
                self.call_done(peer, &get);
                return None;
            }
            Damage::Late => {
                let page = (peer, source_of(&get));
                let mut state = lock(&self.state);
                // One that repeats it is in time, and its bytes come after those of the first.
                if state.early.len() >= REMEMBERED || !state.early.insert(page) {
                    return Some(get);
                }
                state.told.insert((peer, get.op));
                drop(state);
                self.armed.strike();
                self.call_done(peer, &get);
                self.hold(peer, get, LATE);
                return None;
            }
            Damage::Slow => {
                self.hold(peer, get, SLOW);
                return None;
            }
        }
        self.armed.strike();
        Some(get)
    }

    fn hold(&self, peer: PeerId, get: Get, time: Duration) {
        lock(&self.state).held.push_back(Held { due: Instant::now() + time, peer, get });
        // The thread ends after the transport.
        let _ = self.wake.send(Job::Look);
    }
}

/// See the module text.
#[derive(Debug)]
struct Faulty {
    shared: Shared,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Faulty {
    fn with<R>(&self, call: impl FnOnce(&mut dyn Transport) -> R) -> R {
        let mut inner = lock(&self.shared.inner);
        call(&mut **inner.as_mut().expect("it is there until this value goes"))
    }
}

impl Transport for Faulty {
    fn name(&self) -> &'static str {
        self.with(|inner| inner.name())
    }

    fn register(&mut self, memory: Arc<dyn RegionOwner>) -> Result<RegionId, TransportError> {
        lock(&self.shared.state).regions.push(Arc::clone(&memory));
        self.with(|inner| inner.register(memory))
    }

    fn listen(&mut self, address: &str) -> Result<String, TransportError> {
        self.with(|inner| inner.listen(address))
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, TransportError> {
        self.with(|inner| inner.connect(address))
    }

    fn send(&mut self, to: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        self.with(|inner| inner.send(to, message))
    }

    fn hash_with(&mut self, hashing: Hashing) {
        self.with(|inner| inner.hash_with(hashing));
    }

    fn get_many(&mut self, from: PeerId, gets: Vec<Get>) -> Vec<(OpId, TransportError)> {
        let is_repeated = {
            let state = lock(&self.shared.state);
            gets.iter().any(|get| state.early.contains(&(from, source_of(get))))
        };
        if is_repeated {
            self.shared.release(false);
        }
        let gets = gets.into_iter().filter_map(|get| self.shared.damage(from, get));
        let gets: Vec<Get> = gets.collect();
        self.with(|inner| inner.get_many(from, gets))
    }

    fn cut(&mut self, peer: PeerId) {
        self.with(|inner| inner.cut(peer));
    }
}

impl Drop for Faulty {
    fn drop(&mut self) {
        let _ = self.shared.wake.send(Job::Stop);
        if let Some(thread) = self.thread.take() {
            // A panic was reported by the thread.
            let _ = thread.join();
        }
        // Its threads hold the sink, which holds what is dropped here.
        let inner = lock(&self.shared.inner).take();
        drop(inner);
    }
}
