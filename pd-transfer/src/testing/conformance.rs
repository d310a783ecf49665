//! One suite for all transports: what every implementation of the trait has to do.
//!
//! Each check panics with what went wrong. A report that does not come within [`PATIENCE`] counts
//! as missing; nothing else depends on time.

use super::Rng;
use crate::copy::{read, set_guard, write};
use crate::get::{Get, GetOutcome};
use crate::id::{OpId, PeerId};
use crate::link::Side;
use crate::transport::{
    Ended, EventSink, HeapRegion, LostReason, RegionOwner, Transport, TransportError,
    TransportEvent, TransportFactory,
};
use crate::wire::{Extent, Extents, Guard, MAX_MESSAGE_BYTES, RegionId};
use crossbeam_channel::{Receiver, bounded, unbounded};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How long a report may take before it counts as missing.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// What a transport under test needs.
#[derive(Debug)]
pub struct Subject {
    /// A fresh transport of the kind.
    pub factory: fn() -> TransportFactory,
    /// An address to listen at that no other test uses.
    pub address: String,
    /// A well-formed address where nobody listens.
    pub nowhere: String,
    /// Zeroed memory that the transport can use as a source.
    pub memory: fn(usize) -> Arc<dyn RegionOwner>,
}

/// A transport with its memory and its reports.
#[derive(Debug)]
struct End {
    transport: Box<dyn Transport>,
    events: Receiver<TransportEvent>,
    memory: Arc<dyn RegionOwner>,
}

/// A report without gets, or of a single one.
fn alone(peer: PeerId, get: Ended) -> TransportEvent {
    TransportEvent::Ended { peer, gets: vec![get] }
}

fn done(peer: PeerId, op: u64) -> TransportEvent {
    alone(peer, Ended::done(OpId(op), None))
}

impl End {
    fn new(factory: TransportFactory, memory: Arc<dyn RegionOwner>) -> Self {
        let (sender, events) = unbounded();
        let sink: EventSink = Arc::new(move |event| {
            // A test that is over does not listen any more.
            match event {
                TransportEvent::Ended { peer, gets } => {
                    assert!(!gets.is_empty(), "a report of nothing");
                    for get in gets {
                        let _ = sender.send(alone(peer, get));
                    }
                }
                other => {
                    let _ = sender.send(other);
                }
            }
        });
        let mut transport = factory(sink).expect("transport");
        assert_eq!(transport.register(Arc::clone(&memory)).expect("register"), RegionId(0));
        Self { transport, events, memory }
    }

    fn next(&self) -> TransportEvent {
        self.events.recv_timeout(PATIENCE).expect("a report in time")
    }

    fn up(&self) -> PeerId {
        match self.next() {
            TransportEvent::PeerUp { peer, .. } => peer,
            other => panic!("{other:?} instead of PeerUp"),
        }
    }

    fn lost(&self, want: PeerId) -> LostReason {
        match self.next() {
            TransportEvent::PeerLost { peer, why } if peer == want => why,
            other => panic!("{other:?} instead of PeerLost of {want}"),
        }
    }

    fn bytes(&self, offset: u64, len: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        read(&*self.memory, &Extent { offset, len }, &mut bytes).expect("inside");
        bytes
    }
}

const REGION_BYTES: usize = 4 << 20;

struct Pair {
    source: End,
    target: End,
    /// The target's name for the source.
    at_source: PeerId,
    /// The source's name for the target.
    at_target: PeerId,
    /// Where the source listens.
    address: String,
}

fn pair(subject: &Subject) -> Pair {
    let mut source = End::new((subject.factory)(), (subject.memory)(REGION_BYTES));
    let mut target = End::new((subject.factory)(), (subject.memory)(REGION_BYTES));
    let mut rng = Rng::new(7);
    let bytes: Vec<u8> = (0..REGION_BYTES / 8).flat_map(|_| rng.next().to_le_bytes()).collect();
    write(&*source.memory, 0, &bytes).expect("fill");
    set_guard(&*source.memory, 0, 1).expect("guard");
    let address = source.transport.listen(&subject.address).expect("listen");
    let asked = target.transport.connect(&address).expect("connect");
    let at_source = target.up();
    assert_eq!(asked, at_source, "connect names the link that comes up");
    let at_target = source.up();
    Pair { source, target, at_source, at_target, address }
}

fn get(op: u64, source: &[(u64, u32)], target: u64, expect: u64) -> Get {
    let (mut from, mut to, mut offset) = (Vec::new(), Vec::new(), target);
    for (source, len) in source {
        from.push(Extent { offset: *source, len: *len });
        to.push(Extent { offset, len: *len });
        offset += u64::from(*len);
    }
    let extents = |all: &[Extent]| Extents::new(all).expect("no test has more");
    Get {
        op: OpId(op),
        source_region: RegionId(0),
        source: extents(&from),
        guard: Guard { region: RegionId(0), offset: 0, expect },
        target_region: RegionId(0),
        target: extents(&to),
    }
}

/// Runs every check. `subject` is asked for a fresh one each time, with an unused address.
pub fn run(subject: impl Fn(&str) -> Subject) {
    names_and_sides(&subject("sides"));
    messages_arrive_in_order(&subject("order"));
    gets_bring_the_bytes(&subject("gets"));
    a_changed_guard_is_stale(&subject("stale"));
    a_reused_page_is_never_done(&subject("reuse"));
    bad_sources_fail_and_leave_the_link_alone(&subject("bad"));
    malformed_gets_are_refused_at_once(&subject("refuse"));
    a_cut_by_the_source_answers_every_get(&subject("cutsource"));
    a_cut_by_the_target_answers_every_get(&subject("cuttarget"));
    nobody_at_the_address_is_a_loss(&subject("nowhere"));
    links_are_independent(&subject("many"));
    a_dropped_transport_is_a_loss(&subject("drop"));
}

fn names_and_sides(subject: &Subject) {
    let mut listener = End::new((subject.factory)(), (subject.memory)(4096));
    let mut connector = End::new((subject.factory)(), HeapRegion::new(4096));
    assert!(!connector.transport.name().is_empty());
    let address = listener.transport.listen(&subject.address).expect("listen");
    connector.transport.connect(&address).expect("connect");
    match (listener.next(), connector.next()) {
        (
            TransportEvent::PeerUp { side: Side::Acceptor, .. },
            TransportEvent::PeerUp { side: Side::Connector, address: seen, .. },
        ) => assert_eq!(seen, address),
        other => panic!("{other:?}"),
    }
}

// PD-T6
fn messages_arrive_in_order(subject: &Subject) {
    let mut pair = pair(subject);
    let sizes = [0, 1, 100, 65_536, MAX_MESSAGE_BYTES, 3];
    for (n, size) in sizes.iter().enumerate() {
        let fill = |base: u8| vec![base + n as u8; *size];
        pair.target.transport.send(pair.at_source, fill(1)).expect("send");
        pair.source.transport.send(pair.at_target, fill(100)).expect("send");
    }
    for (n, size) in sizes.iter().enumerate() {
        for (end, base, peer) in
            [(&pair.source, 1, pair.at_target), (&pair.target, 100, pair.at_source)]
        {
            match end.next() {
                TransportEvent::Message { peer: from, bytes } => {
                    assert_eq!(from, peer);
                    assert_eq!(bytes.len(), *size);
                    assert!(bytes.iter().all(|byte| *byte == base + n as u8));
                }
                other => panic!("{other:?} instead of a message"),
            }
        }
    }
    let huge = pair.target.transport.send(pair.at_source, vec![0; MAX_MESSAGE_BYTES + 1]);
    assert!(matches!(huge, Err(TransportError::TooLarge { .. })), "{huge:?}");
}

// PD-T2
fn gets_bring_the_bytes(subject: &Subject) {
    let mut pair = pair(subject);
    let mut open = BTreeSet::new();
    let from = |op: u64| (4096 + op * 16_001, 4096 + op * 15_000 + 7);
    for op in 0..200 {
        let (a, b) = from(op);
        let get = get(op, &[(a, 8448), (b, 1 + op as u32)], op * 9000, 1);
        pair.target.transport.get(pair.at_source, get).expect("get");
        open.insert(op);
    }
    while !open.is_empty() {
        match pair.target.next() {
            TransportEvent::Ended { peer, gets } => {
                assert_eq!((peer, &gets[0].outcome), (pair.at_source, &GetOutcome::Done));
                assert!(open.remove(&gets[0].op.0), "{} was answered twice", gets[0].op);
            }
            other => panic!("{other:?} instead of the end of a get"),
        }
    }
    for op in 0..200 {
        let (a, b) = from(op);
        assert_eq!(pair.target.bytes(op * 9000, 8448), pair.source.bytes(a, 8448), "get {op}");
        let len = 1 + op as u32;
        assert_eq!(pair.target.bytes(op * 9000 + 8448, len), pair.source.bytes(b, len));
    }
}

// PD-T3 PD-G1
fn a_changed_guard_is_stale(subject: &Subject) {
    let mut pair = pair(subject);
    let peer = pair.at_source;
    pair.target.transport.get(peer, get(1, &[(4096, 64)], 0, 1)).expect("get");
    assert_eq!(pair.target.next(), done(peer, 1));
    set_guard(&*pair.source.memory, 0, 2).expect("guard");
    pair.target.transport.get(peer, get(2, &[(4096, 64)], 0, 1)).expect("get");
    assert_eq!(pair.target.next(), alone(peer, Ended::without(OpId(2), GetOutcome::Stale)));
    pair.target.transport.get(peer, get(3, &[(4096, 64)], 0, 2)).expect("get");
    assert_eq!(pair.target.next(), done(peer, 3));
}

/// The owner gives a page away and fills it again, every second time while it is read.
fn a_reused_page_is_never_done(subject: &Subject) {
    const PAGE_BYTES: usize = 64 << 10;
    let mut pair = pair(subject);
    let memory = Arc::clone(&pair.source.memory);
    let (offer, offers) = bounded(0);
    let (release, released) = bounded(1);
    let owner = std::thread::spawn(move || {
        for generation in 2..100_u64 {
            set_guard(&*memory, 0, generation).expect("guard");
            write(&*memory, 4096, &vec![generation as u8; PAGE_BYTES]).expect("fill");
            let is_heard = offer.send(generation).is_ok();
            if !is_heard || (generation % 2 == 0 && released.recv().is_err()) {
                return;
            }
        }
    });
    for generation in offers {
        let get = get(generation, &[(4096, PAGE_BYTES as u32)], 0, generation);
        pair.target.transport.get(pair.at_source, get).expect("get");
        match pair.target.next() {
            TransportEvent::Ended { gets, .. } if gets[0].outcome == GetOutcome::Done => {
                let bytes = pair.target.bytes(0, PAGE_BYTES as u32);
                assert!(bytes.iter().all(|byte| *byte == generation as u8), "mixed page");
            }
            TransportEvent::Ended { gets, .. }
                if gets[0].outcome == GetOutcome::Stale && generation % 2 == 1 => {}
            other => panic!("{other:?} of a page that is {generation}"),
        }
        if generation % 2 == 0 {
            release.send(()).expect("the owner waits");
        }
    }
    owner.join().expect("the owner ends");
}

// PD-T4
fn bad_sources_fail_and_leave_the_link_alone(subject: &Subject) {
    let mut pair = pair(subject);
    let peer = pair.at_source;
    let mut region = get(2, &[(0, 8)], 0, 1);
    region.source_region = RegionId(9);
    let mut guard = get(3, &[(0, 8)], 0, 1);
    guard.guard.offset = REGION_BYTES as u64;
    let mut misaligned = get(4, &[(0, 8)], 0, 1);
    misaligned.guard.offset = 4;
    let outside = get(1, &[(REGION_BYTES as u64 - 4, 8)], 0, 1);
    let overflow = get(5, &[(u64::MAX - 3, 8)], 0, 1);
    for bad in [outside, region, guard, misaligned, overflow] {
        let op = bad.op;
        pair.target.transport.get(peer, bad).expect("taken");
        match pair.target.next() {
            TransportEvent::Ended { gets, .. }
                if gets[0].op == op && matches!(gets[0].outcome, GetOutcome::Error(_)) => {}
            other => panic!("{other:?} instead of an error of {op}"),
        }
    }
    pair.target.transport.get(peer, get(6, &[(4096, 8)], 0, 1)).expect("get");
    assert_eq!(pair.target.next(), done(peer, 6));
}

// PD-T5
fn malformed_gets_are_refused_at_once(subject: &Subject) {
    let mut pair = pair(subject);
    let peer = pair.at_source;
    let mut shape = get(1, &[(0, 8)], 0, 1);
    shape.target[0].len = 9;
    let mut region = get(2, &[(0, 8)], 0, 1);
    region.target_region = RegionId(1);
    let outside = get(3, &[(0, 8)], REGION_BYTES as u64 - 7, 1);
    let empty = get(4, &[], 0, 1);
    for bad in [shape, region, outside, empty] {
        assert!(pair.target.transport.get(peer, bad).is_err());
    }
    let unknown = pair.target.transport.get(PeerId(u64::MAX), get(5, &[(0, 8)], 0, 1));
    assert!(matches!(unknown, Err(TransportError::UnknownPeer(_))), "{unknown:?}");
    pair.target.transport.get(peer, get(6, &[(4096, 8)], 0, 1)).expect("get");
    assert_eq!(pair.target.next(), done(peer, 6));
}

/// Every get that was taken is answered once, and the loss comes last.
// PD-T1
fn drain(pair: &mut Pair, taken: u64) {
    let mut answered = BTreeSet::new();
    let why = loop {
        match pair.target.next() {
            TransportEvent::Ended { gets, .. }
                if matches!(gets[0].outcome, GetOutcome::Done | GetOutcome::Lost) =>
            {
                assert!(answered.insert(gets[0].op), "{} was answered twice", gets[0].op);
            }
            TransportEvent::PeerLost { why, .. } => break why,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(answered.len() as u64, taken, "answers before {why:?}");
    let later = pair.target.transport.send(pair.at_source, vec![1]);
    assert!(matches!(later, Err(TransportError::UnknownPeer(_))), "{later:?}");
    let later = pair.target.transport.get(pair.at_source, get(9999, &[(0, 8)], 0, 1));
    assert!(matches!(later, Err(TransportError::UnknownPeer(_))), "{later:?}");
}

fn start_gets(pair: &mut Pair) -> u64 {
    (0..64)
        .map(|op| get(op, &[(4096 + op * 60_000, 50_000)], op * 60_000, 1))
        .filter(|get| pair.target.transport.get(pair.at_source, *get).is_ok())
        .count() as u64
}

fn a_cut_by_the_source_answers_every_get(subject: &Subject) {
    let mut pair = pair(subject);
    let taken = start_gets(&mut pair);
    pair.source.transport.cut(pair.at_target);
    drain(&mut pair, taken);
    assert_eq!(pair.source.lost(pair.at_target), LostReason::Cut);
}

fn a_cut_by_the_target_answers_every_get(subject: &Subject) {
    let mut pair = pair(subject);
    let taken = start_gets(&mut pair);
    pair.target.transport.cut(pair.at_source);
    pair.target.transport.cut(PeerId(u64::MAX));
    drain(&mut pair, taken);
    pair.source.lost(pair.at_target);
}

fn nobody_at_the_address_is_a_loss(subject: &Subject) {
    let mut end = End::new((subject.factory)(), HeapRegion::new(64));
    let peer = end.transport.connect(&subject.nowhere).expect("connect");
    let why = end.lost(peer);
    assert!(matches!(why, LostReason::Connect(_)), "{why:?}");
}

fn links_are_independent(subject: &Subject) {
    let mut pair = pair(subject);
    let mut other = End::new((subject.factory)(), HeapRegion::new(4096));
    let peer = other.transport.connect(&pair.address).expect("connect");
    assert_eq!(other.up(), peer);
    let at_other = pair.source.up();
    pair.source.transport.cut(pair.at_target);
    pair.source.lost(pair.at_target);
    pair.target.lost(pair.at_source);
    other.transport.get(peer, get(1, &[(4096, 64)], 0, 1)).expect("get");
    assert_eq!(other.next(), done(peer, 1));
    assert_eq!(other.bytes(0, 64), pair.source.bytes(4096, 64));
    pair.source.transport.send(at_other, vec![5]).expect("send");
    assert_eq!(other.next(), TransportEvent::Message { peer, bytes: vec![5] });
}

fn a_dropped_transport_is_a_loss(subject: &Subject) {
    let pair = pair(subject);
    let Pair { source, target, at_source, .. } = pair;
    drop(source);
    target.lost(at_source);
}
