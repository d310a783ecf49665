//! What a peer says first, and frames, against real sockets of this host.

use crate::id::PeerId;
use crate::shm::Shm;
use crate::tcp::Tcp;
use crate::transport::{HeapRegion, Transport, TransportEvent, TransportFactory};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::string::String;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;
use std::vec::Vec;

/// Longest wait for a link to end; reaching it is a finding.
const PATIENCE: Duration = Duration::from_secs(60);
const TCP_PREAMBLE: &[u8; 8] = b"PDTCP\0\0\x02";
const SHM_PREAMBLE: &[u8; 8] = b"PDSHM\0\0\x01";
const REGION_BYTES: usize = 4096;

/// A listening transport that is fed, one link after another.
struct Victim {
    _transport: Box<dyn Transport>,
    events: Receiver<TransportEvent>,
    address: String,
}

impl Victim {
    fn new(factory: TransportFactory, address: &str) -> Self {
        let (send, events) = channel();
        let sink = Arc::new(move |event| {
            // A victim that is dropped does not listen any more.
            let _ = send.send(event);
        });
        let mut transport = factory(sink).expect("a transport starts");
        transport.register(HeapRegion::new(REGION_BYTES)).expect("a region fits");
        let address = transport.listen(address).expect("it listens");
        Self { _transport: transport, events, address }
    }

    /// Sends bytes on a link of their own, closes the sending half and waits for the end of the
    /// link: every link that came up goes down once, and only messages come between.
    fn feed<S: Read + Write>(&self, mut socket: S, close: impl Fn(&S), bytes: &[u8]) {
        // Whoever hangs up early has heard enough.
        let _ = socket.write_all(bytes);
        close(&socket);
        let mut answer = Vec::new();
        // A reset is an end too; a time-out is none, and shows below.
        let end = socket.take(64 << 20).read_to_end(&mut answer);
        let is_late = |error: &std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
        assert!(!end.is_err_and(|error| is_late(&error)), "the link does not end");
        let mut up: Option<PeerId> = None;
        // The reader of an ended link reports before it closes its socket, or at once after.
        while let Ok(event) = match up {
            Some(_) => self.events.recv_timeout(PATIENCE).map_err(|_| "no news of the end"),
            None => self.events.try_recv().map_err(|_| ""),
        } {
            match event {
                TransportEvent::PeerUp { peer, .. } => {
                    assert!(up.replace(peer).is_none(), "two links at once");
                }
                TransportEvent::Message { peer, .. } => assert_eq!(up, Some(peer)),
                TransportEvent::PeerLost { peer, .. } => {
                    assert_eq!(up.take(), Some(peer));
                }
                other => panic!("nobody asked for pages: {other:?}"),
            }
        }
        assert_eq!(up, None, "a link without an end");
    }
}

/// The victim of a target, made at the first call.
fn feed_to<S: Read + Write>(
    slot: &OnceLock<Mutex<Victim>>,
    new: fn() -> Victim,
    connect: fn(&str) -> S,
    close: fn(&S),
    bytes: &[u8],
) {
    let victim = slot.get_or_init(|| Mutex::new(new()));
    let victim = victim.lock().unwrap_or_else(PoisonError::into_inner);
    victim.feed(connect(&victim.address), close, bytes);
}

/// All that a TCP peer says, preamble included.
pub fn tcp_link(bytes: &[u8]) {
    static VICTIM: OnceLock<Mutex<Victim>> = OnceLock::new();
    let connect = |address: &str| {
        let socket = TcpStream::connect(address).expect("the victim listens");
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket takes a time-out");
        socket
    };
    // A socket that is closed already is as good.
    let close = |socket: &TcpStream| drop(socket.shutdown(Shutdown::Write));
    feed_to(&VICTIM, || Victim::new(Tcp::factory(), "127.0.0.1:0"), connect, close, bytes);
}

/// All that a shared-memory peer says, without descriptors.
pub fn shm_link(bytes: &[u8]) {
    static VICTIM: OnceLock<Mutex<Victim>> = OnceLock::new();
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let new = || {
        let (process, number) = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(std::format!("pd-fuzz-{process}-{number}.sock"));
        Victim::new(Shm::factory(1), &std::format!("unix:{}", path.display()))
    };
    let connect = |address: &str| {
        let path = address.trim_start_matches("unix:");
        let socket = UnixStream::connect(path).expect("the victim listens");
        socket.set_read_timeout(Some(PATIENCE)).expect("a socket takes a time-out");
        socket
    };
    // As above.
    let close = |socket: &UnixStream| drop(socket.shutdown(Shutdown::Write));
    feed_to(&VICTIM, new, connect, close, bytes);
}

/// What a UCX peer says first. An odd first byte puts the right header and hash before the rest.
pub fn ucx_greeting(bytes: &[u8]) {
    crate::ucx::hear(bytes);
}

fn frame(kind: u8, op: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![kind, 0, 0, 0];
    bytes.extend_from_slice(&u32::try_from(payload.len()).unwrap_or(u32::MAX).to_le_bytes());
    bytes.extend_from_slice(&op.to_le_bytes());
    bytes.extend_from_slice(payload);
    bytes
}

pub(super) fn tcp_seeds(messages: &[Vec<u8>], read: &[u8]) -> Vec<Vec<u8>> {
    let said = |frames: &[Vec<u8>]| [&TCP_PREAMBLE[..], &frames.concat()].concat();
    let all: Vec<_> = messages.iter().map(|message| frame(1, 0, message)).collect();
    vec![
        TCP_PREAMBLE.to_vec(),
        said(&all[..2]),
        said(&[frame(2, 5, read), frame(2, 6, read)]),
        said(&[frame(3, 5, &[0; 64])]),
        said(&[frame(4, 5, &[]), frame(5, 6, b"no")]),
        said(&[frame(3, 5, &[0; 64]), frame(6, 5, &[])]),
        // Lengths that lie.
        said(&[vec![1, 0, 0, 0, 0xFF, 0xFF, 0xFF, 0xFF, 0, 0, 0, 0, 0, 0, 0, 0]]),
        said(&[vec![1, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0]]),
    ]
}

pub(super) fn shm_seeds() -> Vec<Vec<u8>> {
    let said = |count: u32, lengths: &[u64], frames: &[u8]| {
        let mut bytes = SHM_PREAMBLE.to_vec();
        bytes.extend_from_slice(&count.to_le_bytes());
        lengths.iter().for_each(|length| bytes.extend_from_slice(&length.to_le_bytes()));
        bytes.extend_from_slice(frames);
        bytes
    };
    vec![
        said(0, &[], &frame(1, 0, b"a message")),
        said(1, &[u64::MAX], &frame(1, 0, b"a message")),
        said(1, &[4096], &[]),
        said(u32::MAX, &[], &[]),
        said(0, &[], &frame(2, 5, &[0; 40])),
    ]
}

pub(super) fn ucx_seeds() -> Vec<Vec<u8>> {
    let mut card = vec![1];
    card.extend_from_slice(&3_u32.to_le_bytes());
    card.extend_from_slice(b"abc");
    card.extend_from_slice(&1_u32.to_le_bytes());
    card.extend_from_slice(&4096_u64.to_le_bytes());
    card.extend_from_slice(&4096_u64.to_le_bytes());
    card.extend_from_slice(&2_u32.to_le_bytes());
    card.extend_from_slice(b"rk");
    let mut raw = vec![0];
    raw.extend_from_slice(b"PDUCX\0\0\x01");
    [1_u32, 22, 0, 16].iter().for_each(|n| raw.extend_from_slice(&n.to_le_bytes()));
    raw.extend_from_slice(&[0; 16]);
    vec![card, raw]
}
