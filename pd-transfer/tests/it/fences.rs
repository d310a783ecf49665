//! What keeps reads and reuse apart: guard words, the end of a link, memory that can't shrink, and
//! a verifier that dies.

use crate::it::side::{Prefill, Side, attempt, layout};
use crossbeam_channel::{Receiver, unbounded};
use pd_transfer::copy::{Copied, guarded_copy, read, set_guard, write};
use pd_transfer::driver::Verifier;
use pd_transfer::get::{Digest, Get, GetOutcome};
use pd_transfer::id::OpId;
use pd_transfer::inprocess::InProcessNet;
use pd_transfer::page_hash::{Bounced, PageHash, StreamHash};
use pd_transfer::receiver::{FailReason, Verify};
use pd_transfer::sender::SenderConfig;
use pd_transfer::shm::{SharedRegion, Shm};
use pd_transfer::tcp::Tcp;
use pd_transfer::testing::conformance::PATIENCE;
use pd_transfer::testing::pages::{PageVerifier, Request, targets};
use pd_transfer::transport::{
    HeapRegion, RegionOwner as _, Transport, TransportError, TransportEvent, TransportFactory,
};
use pd_transfer::wire::{Extent, Guard, RegionId};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

fn get(op: u64, source: Extent, target: u64, guard: u64) -> Get {
    Get {
        op: OpId(op),
        source_region: RegionId(0),
        source: source.into(),
        guard: Guard { region: RegionId(0), offset: guard, expect: 1 },
        target_region: RegionId(0),
        target: Extent { offset: target, len: source.len }.into(),
    }
}

// PD-T3
#[test]
fn a_guard_that_changes_during_the_copy_makes_it_stale() {
    // The guard word lies where the copy lands, so the copy itself changes it between both looks.
    let (source, target) = (HeapRegion::new(64), HeapRegion::new(64));
    set_guard(&*target, 16, 1).unwrap();
    let inside = get(0, Extent { offset: 0, len: 16 }, 8, 16);
    assert_eq!(guarded_copy(&*source, &*target, &*target, &inside), Ok(Copied::Stale));
    set_guard(&*target, 16, 1).unwrap();
    let beside = get(0, Extent { offset: 0, len: 8 }, 8, 16);
    assert_eq!(guarded_copy(&*source, &*target, &*target, &beside), Ok(Copied::Done));
}

fn open(factory: TransportFactory) -> (Box<dyn Transport>, Receiver<TransportEvent>) {
    let (send, events) = unbounded();
    let transport = factory(Arc::new(move |event| {
        // A test that is over does not listen any more.
        let _ = send.send(event);
    }));
    (transport.unwrap(), events)
}

const PAGE: u32 = 50_000;
const GETS: u64 = 64;

/// The source cuts the link while it is read, waits for the loss, and uses its memory for something
/// else without a word: no get may end well with bytes of the next use.
fn nothing_is_read_after_the_loss(source: TransportFactory, target: TransportFactory, at: &str) {
    let bytes = GETS as usize * PAGE as usize + 8;
    let (old, landed) = (HeapRegion::new(bytes), HeapRegion::new(bytes));
    write(&*old, 8, &vec![0xAA; bytes - 8]).unwrap();
    set_guard(&*old, 0, 1).unwrap();
    let (mut source, source_events) = open(source);
    source.register(Arc::clone(&old) as _).unwrap();
    let address = source.listen(at).unwrap();
    let (mut target, target_events) = open(target);
    target.register(Arc::clone(&landed) as _).unwrap();
    let peer = target.connect(&address).unwrap();
    let up = target_events.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(up, TransportEvent::PeerUp { .. }), "{up:?}");
    for op in 0..GETS {
        let from = Extent { offset: 8 + op * u64::from(PAGE), len: PAGE };
        target.get(peer, get(op, from, op * u64::from(PAGE), 0)).unwrap();
    }
    loop {
        match source_events.recv_timeout(PATIENCE).unwrap() {
            TransportEvent::PeerUp { peer, .. } => source.cut(peer),
            TransportEvent::PeerLost { .. } => break,
            other => panic!("{other:?}"),
        }
    }
    write(&*old, 8, &vec![0xBB; bytes - 8]).unwrap();
    loop {
        match target_events.recv_timeout(PATIENCE).unwrap() {
            TransportEvent::Ended { gets, .. } => {
                for get in gets.into_iter().filter(|get| get.outcome == GetOutcome::Done) {
                    let mut page = Vec::new();
                    let extent = Extent { offset: get.op.0 * u64::from(PAGE), len: PAGE };
                    read(&*landed, &extent, &mut page).unwrap();
                    assert!(page.iter().all(|byte| *byte == 0xAA), "{} read the next use", get.op);
                }
            }
            TransportEvent::PeerLost { .. } => return,
            other => panic!("{other:?}"),
        }
    }
}

// PD-T7
#[test]
fn a_lost_peer_reads_nothing_over_tcp() {
    nothing_is_read_after_the_loss(Tcp::factory(), Tcp::factory(), "127.0.0.1:0");
}

// PD-T7
#[test]
fn a_lost_peer_reads_nothing_in_process() {
    let net = InProcessNet::new();
    nothing_is_read_after_the_loss(net.factory(), net.factory(), "fence");
}

fn greet(path: &std::path::Path, fd: BorrowedFd<'_>, len: u64) -> UnixStream {
    let socket = UnixStream::connect(path).unwrap();
    let mut bytes = b"PDSHM\0\0\x01\x01\0\0\0".to_vec();
    bytes.extend_from_slice(&len.to_le_bytes());
    // Whoever is taken by mistake is not hung up on.
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let parts = [IoSlice::new(&bytes)];
    let sent = rustix::net::sendmsg(&socket, &parts, &mut control, SendFlags::empty()).unwrap();
    assert_eq!(sent, bytes.len());
    socket
}

// PD-T10
#[test]
fn memory_that_could_shrink_under_the_reader_is_not_mapped() {
    let path = std::env::temp_dir().join(format!("pd-fences-{}", std::process::id()));
    let (mut transport, events) = open(Shm::factory(1));
    transport.register(SharedRegion::new(4096).unwrap()).unwrap();
    transport.listen(&format!("unix:{}", path.display())).unwrap();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let fd = rustix::fs::memfd_create("pd-test", flags).unwrap();
    rustix::fs::ftruncate(&fd, 4096).unwrap();
    for len in [4096, 8192] {
        // First without a seal, then sealed but shorter than announced.
        let mut socket = greet(&path, fd.as_fd(), len);
        // The other side's own greeting, then the end.
        let _ = socket.read_to_end(&mut Vec::new());
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
    }
    let _socket = greet(&path, fd.as_fd(), 4096);
    // Links that never came up are not reported, so this is the first event.
    let up = events.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(up, TransportEvent::PeerUp { .. }), "{up:?}");
    assert!(events.is_empty());
}

#[test]
fn shared_memory_is_there_before_it_is_touched() {
    let region = SharedRegion::new(3 << 20).unwrap();
    let stat = rustix::fs::fstat(region.shared_fd().unwrap()).unwrap();
    assert!(stat.st_blocks as u64 * 512 >= 3 << 20, "{} blocks", stat.st_blocks);
    let refused = SharedRegion::new(usize::MAX / 2).expect_err("no machine has that");
    assert!(matches!(refused, TransportError::TooLarge { .. }), "{refused}");
}

/// Dies when it is asked, or while it digests.
struct Dying {
    in_hash: bool,
}

struct DyingHash;

impl StreamHash for DyingHash {
    fn update(&mut self, bytes: &[u8]) {
        panic!("a hash that dies on {} bytes", bytes.len())
    }

    fn finish(&mut self) -> Digest {
        [0; 16]
    }
}

impl Verifier for Dying {
    fn hash(&self) -> Box<dyn PageHash> {
        if self.in_hash { Box::new(Bounced::new(DyingHash)) } else { PageVerifier.hash() }
    }

    fn verify(&self, page: &Verify, digest: Option<Digest>) -> bool {
        assert!(self.in_hash, "a verifier that dies on {}", page.key);
        // A page without a digest is asked for too; nothing vouches for it.
        digest.is_some()
    }
}

// PD-V6
#[test]
fn a_verifier_that_dies_has_said_no() {
    for in_hash in [false, true] {
        says_no(Arc::new(Dying { in_hash }));
    }
}

fn says_no(dying: Arc<Dying>) {
    let prefill = Prefill::new(Tcp::factory(), "127.0.0.1:0", SenderConfig::default());
    let mut decode = Side::decode(Tcp::factory(), Some(dying), layout());
    decode.connect(prefill.address());
    let request = Request { pages: 1, page_bytes: 64 };
    decode.start(attempt(1), request);
    decode.fresh(attempt(1));
    // Its thread still answers the next check.
    decode.handle.retarget(attempt(1), targets(request, RegionId(0), 4096)).unwrap();
    let why = decode.failed(attempt(1));
    assert!(matches!(why, FailReason::Mismatch { .. }), "{why}");
    prefill.released(attempt(1));
}
