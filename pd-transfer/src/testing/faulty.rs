//! A transport that damages what chosen gets brought, after it landed and before it is reported.

use crate::copy::{read, write};
use crate::get::{Digest, Get, GetOutcome};
use crate::id::{OpId, PeerId};
use crate::page_hash::{Careful, Hashing, plain};
use crate::transport::{
    Ended, EventSink, RegionOwner, Regions, Transport, TransportError, TransportEvent,
    TransportFactory,
};
use crate::wire::{Extent, Extents, RegionId};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What happens to the bytes of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// All bytes become zero.
    Zero,
    /// The bytes of the get before it take their place.
    Swap,
    /// The second half keeps what the target held before.
    Truncate,
    /// The whole target keeps what it held before.
    Replay,
}

/// Chooses a fault by the number of the get (from 0, over the life of the transport) and the get.
pub type Chooser = Box<dyn FnMut(u64, &Get) -> Option<Fault> + Send>;

struct Marked {
    fault: Fault,
    region: RegionId,
    target: Extents,
    before: Vec<u8>,
}

struct State {
    choose: Chooser,
    count: u64,
    marked: BTreeMap<(PeerId, OpId), Marked>,
    targets: BTreeMap<(PeerId, OpId), (RegionId, Extents)>,
    last: Vec<u8>,
    regions: Regions,
    hash: Careful,
}

impl State {
    fn bytes(&self, region: RegionId, extents: &[Extent]) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Some(memory) = self.regions.find(region) {
            for extent in extents {
                read(&*memory, extent, &mut bytes).expect("the transport took the get");
            }
        }
        bytes
    }

    /// What becomes of the digest of a get that landed: that of the damaged bytes.
    fn landed(&mut self, peer: PeerId, op: OpId, digest: Option<Digest>) -> Option<Digest> {
        let (region, target) = self.targets.remove(&(peer, op))?;
        let landed = self.bytes(region, &target);
        if let Some(Marked { fault, region, target, before }) = self.marked.remove(&(peer, op)) {
            let mut bytes = landed.clone();
            match fault {
                Fault::Zero => bytes.fill(0),
                Fault::Swap => {
                    for (byte, other) in bytes.iter_mut().zip(self.last.iter().cycle()) {
                        *byte = *other;
                    }
                }
                Fault::Truncate => {
                    let half = bytes.len() / 2;
                    bytes[half..].copy_from_slice(&before[half..]);
                }
                Fault::Replay => bytes.copy_from_slice(&before),
            }
            let memory = self.regions.find(region).expect("the transport took the get");
            let mut rest = &bytes[..];
            for extent in &target {
                let (part, tail) = rest.split_at(extent.len as usize);
                write(&*memory, extent.offset, part).expect("the transport took the get");
                rest = tail;
            }
            self.last = landed;
            self.hash.read(&*memory, &target).expect("the transport took the get");
            return self.hash.finish();
        }
        self.last = landed;
        digest
    }

    fn ended(&mut self, peer: PeerId, get: &mut Ended) {
        if get.outcome == GetOutcome::Done {
            get.digest = self.landed(peer, get.op, get.digest);
        } else {
            self.targets.remove(&(peer, get.op));
            self.marked.remove(&(peer, get.op));
        }
    }
}

/// See the module text.
pub struct Faulty {
    inner: Box<dyn Transport>,
    state: Arc<Mutex<State>>,
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faulty").field("inner", &self.inner).finish_non_exhaustive()
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Faulty {
    /// Wraps what `inner` makes.
    #[must_use]
    pub fn factory(inner: TransportFactory, choose: Chooser) -> TransportFactory {
        Box::new(move |sink: EventSink| {
            let state = Arc::new(Mutex::new(State {
                choose,
                count: 0,
                marked: BTreeMap::new(),
                targets: BTreeMap::new(),
                last: Vec::new(),
                regions: Regions::default(),
                hash: Careful::new(plain()),
            }));
            let seen = Arc::clone(&state);
            let filter: EventSink = Arc::new(move |mut event| {
                if let TransportEvent::Ended { peer, gets } = &mut event {
                    let mut state = lock(&seen);
                    gets.iter_mut().for_each(|get| state.ended(*peer, get));
                }
                sink(event);
            });
            Ok(Box::new(Self { inner: inner(filter)?, state }))
        })
    }
}

impl Transport for Faulty {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn register(&mut self, memory: Arc<dyn RegionOwner>) -> Result<RegionId, TransportError> {
        lock(&self.state).regions.add(Arc::clone(&memory))?;
        self.inner.register(memory)
    }

    fn listen(&mut self, address: &str) -> Result<String, TransportError> {
        self.inner.listen(address)
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, TransportError> {
        self.inner.connect(address)
    }

    fn send(&mut self, to: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        self.inner.send(to, message)
    }

    fn hash_with(&mut self, hashing: Hashing) {
        lock(&self.state).hash = Careful::new(Arc::clone(&hashing));
        self.inner.hash_with(hashing);
    }

    fn get_many(&mut self, from: PeerId, gets: Vec<Get>) -> Vec<(OpId, TransportError)> {
        let mut guard = lock(&self.state);
        let state = &mut *guard;
        let regions = state.regions.clone();
        let (gets, mut refused) = regions.sift(gets, u64::MAX);
        for get in &gets {
            let (region, target) = (get.target_region, get.target);
            let count = state.count;
            state.count += 1;
            if let Some(fault) = (state.choose)(count, get) {
                let before = state.bytes(region, &target);
                let marked = Marked { fault, region, target, before };
                state.marked.insert((from, get.op), marked);
            }
            state.targets.insert((from, get.op), (region, target));
        }
        drop(guard);
        let not_taken = self.inner.get_many(from, gets);
        let mut state = lock(&self.state);
        for (op, _) in &not_taken {
            state.targets.remove(&(from, *op));
            state.marked.remove(&(from, *op));
        }
        refused.extend(not_taken);
        refused
    }

    fn cut(&mut self, peer: PeerId) {
        self.inner.cut(peer);
    }
}
