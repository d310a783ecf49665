//! A transport between endpoints of one process: copies by address, no sockets.

use crate::copy::{Copied, hashed_copy};
use crate::get::{Get, GetOutcome};
use crate::id::{OpId, PeerId};
use crate::link::Side;
use crate::page_hash::{Careful, Hashing, plain};
use crate::transport::{
    Ended, EventSink, LostReason, REPORT_GETS, RegionOwner, Regions, Transport, TransportError,
    TransportEvent, TransportFactory, no_peer,
};
use crate::wire::{MAX_MESSAGE_BYTES, RegionId};
use crossbeam_channel::{Receiver, Sender, unbounded};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};

/// Bytes of messages that may wait for one side of a link.
const QUEUE_BYTES_MAX: u64 = 64 << 20;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The addresses of one process; transports of different nets do not see each other.
#[derive(Clone, Debug, Default)]
pub struct InProcessNet {
    /// Guards the listeners; taken before any other lock of this file.
    listeners: Arc<Mutex<BTreeMap<String, Weak<Node>>>>,
}

impl InProcessNet {
    /// A net without addresses.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes transports of this net.
    #[must_use]
    pub fn factory(&self) -> TransportFactory {
        let net = self.clone();
        Box::new(move |sink| Ok(Box::new(InProcess::new(net, sink)?)))
    }
}

enum Job {
    Up { peer: PeerId, address: String, side: Side },
    Message { peer: PeerId, bytes: Vec<u8> },
    Gets { peer: PeerId, gets: Vec<Get> },
    Lost { peer: PeerId, why: LostReason },
    Stop,
}

#[derive(Debug)]
struct Gate {
    is_closed: bool,
}

/// What the two ends of a link share. Index 0 is the connector's side.
#[derive(Debug)]
struct Shared {
    /// Held to queue a message or a get, and to close: nothing is queued behind the loss.
    gate: Mutex<Gate>,
    /// Held while the side copies from the other; whoever closes waits for it.
    copying: [Mutex<()>; 2],
    /// Message bytes that wait for the side.
    queued: [AtomicU64; 2],
}

#[derive(Clone, Debug)]
struct End {
    shared: Arc<Shared>,
    side: usize,
    other: Arc<Node>,
    other_peer: PeerId,
}

/// The part of a transport that its thread and its peers see.
struct Node {
    jobs: Sender<Job>,
    regions: Regions,
    hashing: Mutex<Hashing>,
    /// Links by our name for them.
    ends: Mutex<BTreeMap<PeerId, End>>,
    next_peer: AtomicU64,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("regions", &self.regions).finish_non_exhaustive()
    }
}

impl Node {
    fn end(&self, peer: PeerId) -> Option<End> {
        lock(&self.ends).get(&peer).cloned()
    }

    fn next(&self) -> PeerId {
        PeerId(self.next_peer.fetch_add(1, Ordering::Relaxed))
    }

    fn queue(&self, job: Job) {
        // A node whose thread has ended is gone with all its links; nobody waits for the job.
        let _ = self.jobs.send(job);
    }

    /// Closes a link and tells both sides, once.
    fn close(&self, peer: PeerId, why: LostReason) {
        let Some(end) = self.end(peer) else { return };
        let mut gate = lock(&end.shared.gate);
        if !gate.is_closed {
            gate.is_closed = true;
            self.queue(Job::Lost { peer, why });
            end.other.queue(Job::Lost { peer: end.other_peer, why: LostReason::Closed });
        }
    }

    fn run_get(&self, end: &End, get: &Get, hash: &mut Careful) -> Ended {
        let op = get.op;
        let failed = |error: String| Ended::without(op, GetOutcome::Error(error));
        let (Some(source), Some(guards)) =
            (end.other.regions.find(get.source_region), end.other.regions.find(get.guard.region))
        else {
            return failed(String::from("the peer has no such region"));
        };
        let Some(target) = self.regions.find(get.target_region) else {
            return failed(String::from("no such target region"));
        };
        let _copying = lock(&end.shared.copying[end.side]);
        if lock(&end.shared.gate).is_closed {
            return Ended::without(op, GetOutcome::Lost);
        }
        match hashed_copy(&*source, &*guards, &*target, get, hash) {
            Ok((Copied::Done, digest)) => Ended::done(op, digest),
            Ok((Copied::Stale, _)) => Ended::without(op, GetOutcome::Stale),
            Err(error) => failed(error.to_string()),
        }
    }

    fn run(&self, jobs: &Receiver<Job>, sink: &EventSink) {
        let mut hash = None;
        for job in jobs {
            match job {
                Job::Up { peer, address, side } => {
                    sink(TransportEvent::PeerUp { peer, address, side });
                }
                Job::Message { peer, bytes } => {
                    if let Some(end) = self.end(peer) {
                        let queued = &end.shared.queued[end.side];
                        queued.fetch_sub(bytes.len() as u64, Ordering::Relaxed);
                        sink(TransportEvent::Message { peer, bytes });
                    }
                }
                Job::Gets { peer, gets } => {
                    if let Some(end) = self.end(peer) {
                        let hash =
                            hash.get_or_insert_with(|| Careful::new(lock(&self.hashing).clone()));
                        for gets in gets.chunks(REPORT_GETS) {
                            let gets = gets.iter().map(|get| self.run_get(&end, get, hash));
                            sink(TransportEvent::Ended { peer, gets: gets.collect() });
                        }
                    }
                }
                Job::Lost { peer, why } => {
                    if let Some(end) = lock(&self.ends).remove(&peer) {
                        // PD-T7
                        // The link is closed, so no new copy begins; wait for one that runs.
                        drop(lock(&end.shared.copying[1 - end.side]));
                    }
                    sink(TransportEvent::PeerLost { peer, why });
                }
                Job::Stop => return,
            }
        }
    }
}

/// See the module text.
#[derive(Debug)]
pub struct InProcess {
    net: InProcessNet,
    node: Arc<Node>,
    address: Option<String>,
    worker: Option<JoinHandle<()>>,
}

impl InProcess {
    /// A transport of `net`.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn new(net: InProcessNet, sink: EventSink) -> Result<Self, TransportError> {
        let (jobs, queue) = unbounded();
        let node = Arc::new(Node {
            jobs,
            regions: Regions::default(),
            hashing: Mutex::new(plain()),
            ends: Mutex::default(),
            next_peer: AtomicU64::new(0),
        });
        let run = Arc::clone(&node);
        let worker = thread::Builder::new()
            .name(String::from("pd-inprocess"))
            .spawn(move || run.run(&queue, &sink))
            .map_err(|source| TransportError::Io { during: "start thread", source })?;
        Ok(Self { net, node, address: None, worker: Some(worker) })
    }
}

impl Transport for InProcess {
    fn name(&self) -> &'static str {
        "inprocess"
    }

    fn register(&mut self, memory: Arc<dyn RegionOwner>) -> Result<RegionId, TransportError> {
        self.node.regions.add(memory)
    }

    fn listen(&mut self, address: &str) -> Result<String, TransportError> {
        let mut listeners = lock(&self.net.listeners);
        if listeners.get(address).is_some_and(|node| node.strong_count() > 0) {
            let text = String::from("is taken");
            return Err(TransportError::BadAddress { address: address.into(), text });
        }
        listeners.insert(address.into(), Arc::downgrade(&self.node));
        self.address = Some(address.into());
        Ok(address.into())
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, TransportError> {
        let peer = self.node.next();
        let other = lock(&self.net.listeners).get(address).and_then(Weak::upgrade);
        let Some(other) = other else {
            let why = LostReason::Connect(format!("nobody listens at {address:?}"));
            self.node.queue(Job::Lost { peer, why });
            return Ok(peer);
        };
        let other_peer = other.next();
        let shared = Arc::new(Shared {
            gate: Mutex::new(Gate { is_closed: false }),
            copying: [Mutex::new(()), Mutex::new(())],
            queued: [AtomicU64::new(0), AtomicU64::new(0)],
        });
        let end = |side: usize, other: &Arc<Node>, other_peer| End {
            shared: Arc::clone(&shared),
            side,
            other: Arc::clone(other),
            other_peer,
        };
        lock(&self.node.ends).insert(peer, end(0, &other, other_peer));
        lock(&other.ends).insert(other_peer, end(1, &self.node, peer));
        let up = |peer, address: &str, side| Job::Up { peer, address: address.into(), side };
        other.queue(up(other_peer, "inprocess", Side::Acceptor));
        self.node.queue(up(peer, address, Side::Connector));
        Ok(peer)
    }

    fn send(&mut self, to: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        let bytes = message.len() as u64;
        if message.len() > MAX_MESSAGE_BYTES {
            return Err(TransportError::TooLarge { bytes, limit: MAX_MESSAGE_BYTES as u64 });
        }
        let end = self.node.end(to).ok_or(TransportError::UnknownPeer(to))?;
        let gate = lock(&end.shared.gate);
        if gate.is_closed {
            return Err(TransportError::UnknownPeer(to));
        }
        let waiting = &end.shared.queued[1 - end.side];
        let queued = waiting.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if queued > QUEUE_BYTES_MAX {
            drop(gate);
            self.node.close(to, LostReason::Slow { queued, limit: QUEUE_BYTES_MAX });
            return Ok(());
        }
        end.other.queue(Job::Message { peer: end.other_peer, bytes: message });
        Ok(())
    }

    fn hash_with(&mut self, hashing: Hashing) {
        *lock(&self.node.hashing) = hashing;
    }

    fn get_many(&mut self, from: PeerId, gets: Vec<Get>) -> Vec<(OpId, TransportError)> {
        let Some(end) = self.node.end(from) else { return no_peer(gets, from) };
        let (gets, refused) = self.node.regions.sift(gets, u64::MAX);
        let gate = lock(&end.shared.gate);
        if gate.is_closed {
            return refused.into_iter().chain(no_peer(gets, from)).collect();
        }
        if !gets.is_empty() {
            self.node.queue(Job::Gets { peer: from, gets });
        }
        refused
    }

    fn cut(&mut self, peer: PeerId) {
        self.node.close(peer, LostReason::Cut);
    }
}

impl Drop for InProcess {
    fn drop(&mut self) {
        if let Some(address) = self.address.take() {
            lock(&self.net.listeners).remove(&address);
        }
        let peers: Vec<PeerId> = lock(&self.node.ends).keys().copied().collect();
        for peer in peers {
            self.node.close(peer, LostReason::Cut);
        }
        self.node.queue(Job::Stop);
        if let Some(worker) = self.worker.take() {
            // A panic of the worker was reported by its thread; there is nothing to add.
            let _ = worker.join();
        }
        lock(&self.node.ends).clear();
    }
}
