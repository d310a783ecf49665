//! A transport that damages what chosen gets brought, after it landed and before it is reported.

use crate::copy::{read, write};
use crate::get::Get;
use crate::id::{OpId, PeerId};
use crate::transport::{
    EventSink, RegionOwner, Regions, Transport, TransportError, TransportEvent, TransportFactory,
};
use crate::wire::{Extent, RegionId};
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
    target: Vec<Extent>,
    before: Vec<u8>,
}

struct State {
    choose: Chooser,
    count: u64,
    marked: BTreeMap<(PeerId, OpId), Marked>,
    targets: BTreeMap<(PeerId, OpId), (RegionId, Vec<Extent>)>,
    last: Vec<u8>,
    regions: Regions,
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

    fn landed(&mut self, peer: PeerId, op: OpId) {
        let Some((region, target)) = self.targets.remove(&(peer, op)) else { return };
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
            for extent in target {
                let (part, tail) = rest.split_at(extent.len as usize);
                write(&*memory, extent.offset, part).expect("the transport took the get");
                rest = tail;
            }
        }
        self.last = landed;
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
            }));
            let seen = Arc::clone(&state);
            let filter: EventSink = Arc::new(move |event| {
                match &event {
                    TransportEvent::GetDone { peer, op } => lock(&seen).landed(*peer, *op),
                    TransportEvent::GetStale { peer, op }
                    | TransportEvent::GetLost { peer, op }
                    | TransportEvent::GetFailed { peer, op, .. } => {
                        let mut state = lock(&seen);
                        state.targets.remove(&(*peer, *op));
                        state.marked.remove(&(*peer, *op));
                    }
                    TransportEvent::PeerUp { .. }
                    | TransportEvent::Message { .. }
                    | TransportEvent::PeerLost { .. } => {}
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

    fn get(&mut self, from: PeerId, get: Get) -> Result<(), TransportError> {
        let mut state = lock(&self.state);
        state.regions.target(&get)?;
        let (op, region, target) = (get.op, get.target_region, get.target.clone());
        let count = state.count;
        state.count += 1;
        if let Some(fault) = (state.choose)(count, &get) {
            let before = state.bytes(region, &target);
            let marked = Marked { fault, region, target: target.clone(), before };
            state.marked.insert((from, op), marked);
        }
        state.targets.insert((from, op), (region, target));
        drop(state);
        let result = self.inner.get(from, get);
        if result.is_err() {
            let mut state = lock(&self.state);
            state.targets.remove(&(from, op));
            state.marked.remove(&(from, op));
        }
        result
    }

    fn cut(&mut self, peer: PeerId) {
        self.inner.cut(peer);
    }
}
