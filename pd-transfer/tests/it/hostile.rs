//! Peers that send nonsense, send nothing or read nothing: they lose their own link only.

use crossbeam_channel::{Receiver, unbounded};
use pd_transfer::copy::{read, write};
use pd_transfer::get::{Get, GetOutcome};
use pd_transfer::id::{OpId, PeerId};
use pd_transfer::shm::{SharedRegion, Shm};
use pd_transfer::tcp::Tcp;
use pd_transfer::testing::conformance::PATIENCE;
use pd_transfer::transport::{
    HeapRegion, LostReason, RegionOwner, Transport, TransportEvent, TransportFactory,
};
use pd_transfer::wire::{Extent, Guard, MAX_MESSAGE_BYTES, RegionId};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;

const PREAMBLE: &[u8; 8] = b"PDTCP\0\0\x02";

struct Victim {
    transport: Box<dyn Transport>,
    events: Receiver<TransportEvent>,
    address: String,
}

impl Victim {
    fn new(factory: TransportFactory, address: &str, memory: Arc<dyn RegionOwner>) -> Self {
        let (send, events) = unbounded();
        let mut transport = factory(Arc::new(move |event| {
            // A test that is over does not listen any more.
            let _ = send.send(event);
        }))
        .unwrap();
        transport.register(memory).unwrap();
        let address = transport.listen(address).unwrap();
        Self { transport, events, address }
    }

    fn tcp() -> Self {
        Self::new(Tcp::factory(), "127.0.0.1:0", HeapRegion::new(4096))
    }

    fn next(&self) -> TransportEvent {
        self.events.recv_timeout(PATIENCE).unwrap()
    }

    /// A raw socket that has passed the preamble.
    fn raw(&self) -> (TcpStream, PeerId) {
        let mut socket = TcpStream::connect(&self.address).unwrap();
        socket.write_all(PREAMBLE).unwrap();
        let mut answer = [0; 8];
        socket.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, PREAMBLE);
        match self.next() {
            TransportEvent::PeerUp { peer, .. } => (socket, peer),
            other => panic!("{other:?}"),
        }
    }

    fn lost(&self) -> LostReason {
        match self.next() {
            TransportEvent::PeerLost { why, .. } => why,
            other => panic!("{other:?}"),
        }
    }
}

fn frame(kind: u8, len: u32, op: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(&op.to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

// PD-L13 PD-T9
#[test]
fn malformed_frames_close_their_link_with_a_reason() {
    let victim = Victim::tcp();
    let mut reserved = frame(1, 0, 0, &[]);
    reserved[2] = 1;
    for bad in [
        frame(0, 0, 0, &[]),
        frame(99, 0, 0, &[]),
        reserved,
        frame(1, MAX_MESSAGE_BYTES as u32 + 1, 0, &[]),
        frame(2, 3, 0, &[1, 2, 3]),
        frame(2, u32::MAX, 0, &[]),
        frame(3, 4, 7, &[0; 4]),
        frame(4, 0, 7, &[]),
        frame(5, 1, 7, b"x"),
        frame(6, 0, 7, &[]),
        frame(6, 1, 7, b"x"),
    ] {
        let (mut socket, _) = victim.raw();
        socket.write_all(&bad).unwrap();
        let why = victim.lost();
        assert!(matches!(why, LostReason::Malformed(_)), "{why:?} after {bad:?}");
        // The victim hung up; whether by reset or by end of file is the kernel's choice.
        assert!(matches!(socket.read(&mut [0; 64]), Ok(0) | Err(_)));
    }
}

#[test]
fn a_peer_without_the_preamble_is_never_up() {
    let victim = Victim::tcp();
    let mut stranger = TcpStream::connect(&victim.address).unwrap();
    stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    // The end of the stream, or a reset because bytes were left unread.
    let _ = stranger.read_to_end(&mut answer);
    assert!(answer.len() <= PREAMBLE.len());
    // The next event belongs to the next peer.
    victim.raw();
}

// PD-T6
#[test]
fn a_message_cut_short_is_not_delivered() {
    let victim = Victim::tcp();
    let (mut socket, _) = victim.raw();
    socket.write_all(&frame(1, 100, 0, &[1; 99])).unwrap();
    drop(socket);
    assert_eq!(victim.lost(), LostReason::Closed);
}

/// A victim with a get of 8 bytes under way, and the source that it asked. The target holds ones.
fn asked() -> (Victim, Arc<HeapRegion>, TcpStream, PeerId) {
    let memory = HeapRegion::new(64);
    write(&*memory, 0, &[1; 64]).unwrap();
    let mut victim =
        Victim::new(Tcp::factory(), "127.0.0.1:0", Arc::clone(&memory) as Arc<dyn RegionOwner>);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let peer = victim.transport.connect(&listener.local_addr().unwrap().to_string()).unwrap();
    let (mut source, _) = listener.accept().unwrap();
    source.write_all(PREAMBLE).unwrap();
    source.read_exact(&mut [0; 8]).unwrap();
    assert!(matches!(victim.next(), TransportEvent::PeerUp { .. }));
    let place = Extent { offset: 8, len: 8 };
    let get = Get {
        op: OpId(7),
        source_region: RegionId(0),
        source: place.into(),
        guard: Guard { region: RegionId(0), offset: 0, expect: 1 },
        target_region: RegionId(0),
        target: place.into(),
    };
    victim.transport.get(peer, get).unwrap();
    let mut head = [0; 16];
    source.read_exact(&mut head).unwrap();
    assert_eq!((head[0], head[8]), (2, 7), "the get");
    source.read_exact(&mut vec![0; usize::from(head[4])]).unwrap();
    (victim, memory, source, peer)
}

impl Victim {
    /// How the one get ended.
    fn outcome(&self) -> GetOutcome {
        match self.next() {
            TransportEvent::Ended { gets, .. } => {
                let [end] = &gets[..] else { panic!("{gets:?}") };
                assert_eq!(end.op, OpId(7));
                end.outcome.clone()
            }
            other => panic!("{other:?}"),
        }
    }
}

// PD-T3
#[test]
fn bytes_are_no_page_before_the_word_of_their_guard() {
    for (word, outcome) in [(6, GetOutcome::Done), (4, GetOutcome::Stale)] {
        let (victim, memory, mut source, _) = asked();
        source.write_all(&frame(3, 8, 7, &[9; 8])).unwrap();
        source.write_all(&frame(1, 2, 0, b"hi")).unwrap();
        let next = victim.next();
        assert!(matches!(next, TransportEvent::Message { .. }), "{next:?}");
        source.write_all(&frame(word, 0, 7, &[])).unwrap();
        assert_eq!(victim.outcome(), outcome);
        let mut bytes = Vec::new();
        read(&*memory, &Extent { offset: 0, len: 24 }, &mut bytes).unwrap();
        assert_eq!(bytes, [[1; 8], [9; 8], [1; 8]].concat());
        // The word counts once.
        source.write_all(&frame(word, 0, 7, &[])).unwrap();
        let why = victim.lost();
        assert!(matches!(why, LostReason::Malformed(_)), "{why:?}");
    }
}

// PD-T1
#[test]
fn a_get_whose_source_stops_half_way_is_lost_once_and_before_its_link() {
    let whole = frame(3, 8, 7, &[9; 8]);
    let half = &whole[..20];
    let twice = [&whole[..], &whole[..]].concat();
    let short = frame(3, 4, 7, &[9; 4]);
    for said in [&[][..], half, &whole, &twice, &short] {
        let (victim, _, mut source, _) = asked();
        source.write_all(said).unwrap();
        drop(source);
        assert_eq!(victim.outcome(), GetOutcome::Lost, "after {said:?}");
        let why = victim.lost();
        let is_malformed = matches!(why, LostReason::Malformed(_));
        assert_eq!(is_malformed, said.len() > whole.len() || said == short, "{why:?}");
    }
}

// PD-T8
#[test]
fn a_peer_that_does_not_read_is_cut_and_blocks_nobody() {
    let mut victim = Victim::tcp();
    let (_deaf, deaf_id) = victim.raw();
    let (mut good, good_id) = victim.raw();
    let mut sent = 0;
    while victim.transport.send(deaf_id, vec![0; MAX_MESSAGE_BYTES]).is_ok() {
        sent += 1;
        assert!(sent < 100, "the queue has no bound");
        if !victim.events.is_empty() {
            break;
        }
    }
    let why = victim.lost();
    assert!(matches!(why, LostReason::Slow { .. }), "{why:?}");
    victim.transport.send(good_id, vec![1, 2, 3]).unwrap();
    let mut bytes = [0; 19];
    good.read_exact(&mut bytes).unwrap();
    assert_eq!(bytes[16..], [1, 2, 3]);
}

fn path(name: &str) -> std::path::PathBuf {
    std::env::temp_dir().join(format!("pd-hostile-{}-{name}", std::process::id()))
}

fn shm(name: &str) -> (Victim, std::path::PathBuf) {
    let path = path(name);
    let address = format!("unix:{}", path.display());
    (Victim::new(Shm::factory(1), &address, SharedRegion::new(4096).unwrap()), path)
}

#[test]
fn the_socket_is_for_this_user_only_and_is_removed() {
    let (victim, path) = shm("mode");
    assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    drop(victim);
    assert!(!path.exists());
}

#[test]
fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
    let stale = path("stale");
    drop(UnixListener::bind(&stale).unwrap());
    assert!(stale.exists());
    let (victim, path) = shm("stale");
    let (send, _events) = unbounded();
    let mut second = Shm::factory(1)(Arc::new(move |event| {
        let _ = send.send(event);
    }))
    .unwrap();
    assert!(second.listen(&victim.address).is_err());
    drop(second);
    assert!(path.exists(), "the live socket is still there");
}

// PD-T10
#[test]
fn greetings_that_lie_about_regions_are_refused() {
    let (victim, path) = shm("lies");
    let greeting = |count: u32, lens: &[u64]| {
        let mut bytes = b"PDSHM\0\0\x01".to_vec();
        bytes.extend_from_slice(&count.to_le_bytes());
        lens.iter().for_each(|len| bytes.extend_from_slice(&len.to_le_bytes()));
        bytes
    };
    for bad in [greeting(1, &[4096]), greeting(u32::MAX, &[]), b"GET / HTTP/1.1\r\n\r\n".to_vec()] {
        let mut socket = UnixStream::connect(&path).unwrap();
        socket.write_all(&bad).unwrap();
        // The victim's own greeting, then the end.
        let _ = socket.read_to_end(&mut Vec::new());
    }
    let mut socket = UnixStream::connect(&path).unwrap();
    socket.write_all(&greeting(1, &[u64::MAX])).unwrap();
    assert!(matches!(victim.next(), TransportEvent::PeerUp { .. }));
    // Gets are not served over this socket.
    socket.write_all(&frame(2, 0, 0, &[])).unwrap();
    let why = victim.lost();
    assert!(matches!(why, LostReason::Malformed(_)), "{why:?}");
}
