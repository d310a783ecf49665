//! A transport that damages what it carries: the bytes of chosen pages on their way, and chosen
//! messages. It stands between the hand-off's driver and the real transport.
//!
//! Page bytes are damaged by reading them from the wrong place or not wholly, which is what stale
//! addresses, lost packets and half-finished copies do.

use kv_pool::{CacheKind, Geometry, PoolKind};
use pd_transfer::get::Get;
use pd_transfer::id::{OpId, PeerId};
use pd_transfer::page_hash::Hashing;
use pd_transfer::transport::{
    EventSink, RegionOwner, Transport, TransportError, TransportEvent, TransportFactory,
};
use pd_transfer::wire::{self, Extent, Extents, Message, RegionId};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What happens to bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Damage {
    /// Zeros arrive.
    Zero,
    /// The bytes of another layer's page arrive.
    Swap,
    /// Only the first half arrives.
    Truncate,
    /// The bytes of an earlier read arrive again.
    Replay,
}

/// All of them.
pub(crate) const DAMAGES: [Damage; 4] =
    [Damage::Zero, Damage::Swap, Damage::Truncate, Damage::Replay];

/// A kind of page; of the kinds that hold rows of many tokens, the full or the part-filled ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Victim {
    /// Which cache.
    pub(crate) kind: CacheKind,
    /// The part-filled page at the end of the prompt.
    pub(crate) tail: bool,
}

/// What is damaged from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// Nothing.
    Nothing,
    /// Pages; each this many times.
    Pages { victim: Victim, damage: Damage, times: u32 },
    /// Bytes of the next message of this name.
    Message { name: &'static str, damage: Damage },
    /// The first token in the next final record; the envelope around it is right again.
    FirstToken,
    /// The tags of two pages in the next offer; the envelope around it is right again.
    Tags,
}

#[derive(Debug)]
struct State {
    target: Target,
    done: u32,
    /// By region and offset of the source page: times damaged.
    hits: BTreeMap<(u32, u64), u32>,
    /// First source per section and shape, to be replayed.
    seen: Vec<(u32, usize, Vec<Extent>)>,
    /// Earlier messages by name, to be replayed.
    messages: BTreeMap<&'static str, Vec<u8>>,
}

/// Remote control of all transports that it has wrapped.
#[derive(Clone, Debug)]
pub(crate) struct Tamper {
    geometry: Arc<Geometry>,
    /// Pages of the block, window and carry pool.
    pages: Arc<Mutex<[u32; 3]>>,
    state: Arc<Mutex<State>>,
}

const POOLS: [PoolKind; 3] = [PoolKind::Block, PoolKind::Window, PoolKind::Carry];

impl Tamper {
    /// Damages nothing yet.
    pub(crate) fn new(geometry: Geometry) -> Self {
        let state = State {
            target: Target::Nothing,
            done: 0,
            hits: BTreeMap::new(),
            seen: Vec::new(),
            messages: BTreeMap::new(),
        };
        Self {
            geometry: Arc::new(geometry),
            pages: Arc::default(),
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// Tells how many pages the block, window and carry pools have.
    pub(crate) fn set_pages(&self, pages: [u32; 3]) {
        *self.pages.lock().unwrap_or_else(PoisonError::into_inner) = pages;
    }

    /// Damages this from now on.
    pub(crate) fn aim(&self, target: Target) {
        let mut state = self.lock();
        state.target = target;
        state.done = 0;
        state.hits.clear();
        state.seen.clear();
    }

    /// Reads or messages damaged since the last [`Self::aim`].
    pub(crate) fn done(&self) -> u32 {
        self.lock().done
    }

    /// Puts itself around a transport: between it and its user for reads, between it and its event
    /// sink for messages.
    pub(crate) fn wrap(&self, inner: TransportFactory) -> TransportFactory {
        let tamper = self.clone();
        Box::new(move |sink: EventSink| {
            let messages = tamper.clone();
            let sink: EventSink = Arc::new(move |event| {
                sink(match event {
                    TransportEvent::Message { peer, bytes } => {
                        TransportEvent::Message { peer, bytes: messages.damage_message(bytes) }
                    }
                    other => other,
                });
            });
            Ok(Box::new(Tampered { inner: inner(sink)?, tamper }))
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Section of a pool that an offset lies in, and the pool's pages.
    fn section(&self, region: RegionId, offset: u64) -> Option<(PoolKind, usize, u32)> {
        let pool = *POOLS.get(region.0 as usize)?;
        let pages = self.pages.lock().unwrap_or_else(PoisonError::into_inner)[region.0 as usize];
        let base = |section| self.geometry.section_base(pool, section, pages);
        let section = (0..self.geometry.sections(pool).len()).rfind(|s| base(*s) <= offset)?;
        Some((pool, section, pages))
    }

    fn damage_get(&self, get: &mut Get) {
        let mut state = self.lock();
        let Target::Pages { victim, damage, times } = state.target else { return };
        let Some((pool, section, pages)) = self.section(get.source_region, get.source[0].offset)
        else {
            return;
        };
        let here = self.geometry.sections(pool)[section];
        let rows = self.geometry.rows_per_page(here.kind);
        let full = self.geometry.extents(here.kind, rows).bytes();
        let is_tail = wire::extents_bytes(&get.source) < u64::from(full);
        if (Victim { kind: here.kind, tail: is_tail }) != victim {
            return;
        }
        let base = |section| self.geometry.section_base(pool, section, pages);
        let moved = |from: u64, to: u64| -> Vec<Extent> {
            get.source.iter().map(|e| Extent { offset: e.offset - from + to, len: e.len }).collect()
        };
        let page = (get.source[0].offset - base(section)) / u64::from(here.page_bytes);
        let shape = |source: &[Extent]| source.iter().map(|e| e.len).collect::<Vec<_>>();
        let earlier = state.seen.iter().find(|(region, number, source)| {
            (*region, *number) == (get.source_region.0, section)
                && source[..] != get.source[..]
                && shape(source) == shape(&get.source)
        });
        let source = match damage {
            Damage::Zero => {
                // No test fills a pool; its last page was never used.
                let stride = u64::from(here.page_bytes);
                Some(moved(page * stride, u64::from(pages - 1) * stride))
            }
            Damage::Swap => {
                let is_other = |s: &kv_pool::Section| s.kind == here.kind && s.layer != here.layer;
                let other = self.geometry.sections(pool).iter().position(is_other);
                other.map(|other| moved(base(section), base(other)))
            }
            Damage::Truncate => None,
            Damage::Replay => match earlier {
                Some((_, _, source)) => Some(source.clone()),
                None => {
                    state.seen.push((get.source_region.0, section, get.source.to_vec()));
                    return;
                }
            },
        };
        let hits = state.hits.entry((get.source_region.0, get.source[0].offset)).or_default();
        if *hits >= times {
            return;
        }
        *hits += 1;
        state.done += 1;
        match source {
            Some(source) => get.source = Extents::new(&source).expect("as many as before"),
            None => {
                for extent in get.source.iter_mut().chain(get.target.iter_mut()) {
                    extent.len = extent.len.div_ceil(2);
                }
            }
        }
    }

    fn damage_message(&self, bytes: Vec<u8>) -> Vec<u8> {
        let Ok(envelope) = wire::decode(&bytes) else { return bytes };
        let name = envelope.message.name();
        let mut state = self.lock();
        let earlier = state.messages.insert(name, bytes.clone());
        let damaged = match state.target {
            Target::Message { name: victim, damage } if victim == name => {
                damage_bytes(&bytes, damage, earlier)
            }
            Target::FirstToken | Target::Tags => {
                let mut message = envelope.message;
                let was = message.clone();
                match (&mut message, state.target) {
                    (Message::Final { record, .. }, Target::FirstToken) => {
                        // Version (2 bytes), prompt length (4), then the token.
                        record.payload[6] ^= 1;
                    }
                    (Message::Ready { items, .. }, Target::Tags) if items.len() > 1 => {
                        let (head, tail) = items.split_at_mut(1);
                        std::mem::swap(&mut head[0].tag, &mut tail[0].tag);
                    }
                    _ => {}
                }
                let again = wire::encode(envelope.incarnation, envelope.seq, &message);
                (message != was).then(|| again.expect("as large as before"))
            }
            _ => None,
        };
        match damaged {
            Some(damaged) => {
                state.done += 1;
                state.target = Target::Nothing;
                damaged
            }
            None => bytes,
        }
    }
}

fn damage_bytes(bytes: &[u8], damage: Damage, earlier: Option<Vec<u8>>) -> Option<Vec<u8>> {
    let middle = wire::HEADER_BYTES + (bytes.len() - wire::HEADER_BYTES) / 2;
    match damage {
        Damage::Zero => {
            let mut bytes = bytes.to_vec();
            bytes[wire::HEADER_BYTES..].fill(0);
            Some(bytes)
        }
        Damage::Swap => {
            let (head, body) = bytes.split_at(wire::HEADER_BYTES);
            let (first, second) = body.split_at(body.len() / 2);
            Some([head, second, first].concat())
        }
        Damage::Truncate => Some(bytes[..middle].to_vec()),
        Damage::Replay => earlier,
    }
}

#[derive(Debug)]
struct Tampered {
    inner: Box<dyn Transport>,
    tamper: Tamper,
}

impl Transport for Tampered {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn register(&mut self, memory: Arc<dyn RegionOwner>) -> Result<RegionId, TransportError> {
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
        self.inner.hash_with(hashing);
    }

    fn get_many(&mut self, from: PeerId, mut gets: Vec<Get>) -> Vec<(OpId, TransportError)> {
        gets.iter_mut().for_each(|get| self.tamper.damage_get(get));
        self.inner.get_many(from, gets)
    }

    fn cut(&mut self, peer: PeerId) {
        self.inner.cut(peer);
    }
}
