//! What the socket transports share: frames, one reading and one writing thread per link, bounded
//! queues, and the order in which a link ends.
//!
//! A frame is a 16-byte header (kind `u8`, three zero bytes, payload length `u32`, operation `u64`,
//! little-endian) and its payload. The writing thread is the only one that hands our memory to the
//! peer, the reading thread the only one that writes what the peer sent. A link ends in one place,
//! [`Conn::finish`]: writer joined, gets answered, then the loss reported.

mod incoming;
mod outgoing;

use crate::get::{Get, GetOutcome};
use crate::id::{OpId, PeerId};
use crate::link::Side;
use crate::page_hash::{Careful, Hashing, plain};
use crate::transport::{
    Ended, EventSink, LostReason, REPORT_GETS, RegionOwner, Regions, TransportError,
    TransportEvent, no_peer,
};
use crate::wire::{MAX_MESSAGE_BYTES, ReadRequest, encode_read, extents_bytes};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

const HEADER_BYTES: usize = 16;
const MESSAGE: u8 = 1;
const READ: u8 = 2;
const DATA: u8 = 3;
const STALE: u8 = 4;
const REFUSED: u8 = 5;
const HELD: u8 = 6;
/// Largest get.
pub(crate) const GET_BYTES_MAX: u64 = 16 << 20;
/// Bytes that may wait for one peer.
const QUEUE_BYTES_MAX: u64 = 64 << 20;
/// Reads of one peer that may wait to be served.
const SERVING_MAX: usize = 4096;
/// Links of one transport, half-open ones included.
const LINKS_MAX: usize = 1024;
/// Bytes read from the socket at a time.
const CHUNK_BYTES: usize = 256 << 10;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connected stream socket.
#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Stream {
    fn shutdown(&self) {
        // A socket that is not connected any more is as shut down as it can be.
        let _ = match self {
            Self::Tcp(stream) => stream.shutdown(Shutdown::Both),
            Self::Unix(stream) => stream.shutdown(Shutdown::Both),
        };
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl Read for &Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).read(out),
            Stream::Unix(stream) => (&mut &*stream).read(out),
        }
    }
}

#[derive(Debug)]
enum Frame {
    Message(Vec<u8>),
    Read(OpId, Vec<u8>),
    Serve(OpId, ReadRequest),
}

#[derive(Debug, Default)]
struct Outbox {
    frames: VecDeque<Frame>,
    bytes: u64,
    serving: usize,
    is_closed: bool,
}

#[derive(Debug)]
struct Pending {
    /// Gets without an answer that the peer has to answer.
    gets: BTreeMap<OpId, Get>,
    /// Gets that copying threads have to answer.
    running: usize,
    is_closed: bool,
}

/// One link.
#[derive(Debug)]
pub(crate) struct Conn {
    pub(crate) peer: PeerId,
    pub(crate) side: Side,
    address: Mutex<String>,
    stream: Mutex<Option<Arc<Stream>>>,
    outbox: Mutex<Outbox>,
    outbox_filled: Condvar,
    pending: Mutex<Pending>,
    pending_idle: Condvar,
    /// The first reason given wins.
    why: Mutex<Option<LostReason>>,
    /// The peer's regions where they can be mapped.
    pub(crate) remote: Mutex<Arc<Vec<Arc<dyn RegionOwner>>>>,
}

impl Conn {
    fn new(peer: PeerId, side: Side, address: String) -> Arc<Self> {
        Arc::new(Self {
            peer,
            side,
            address: Mutex::new(address),
            stream: Mutex::new(None),
            outbox: Mutex::default(),
            outbox_filled: Condvar::new(),
            pending: Mutex::new(Pending { gets: BTreeMap::new(), running: 0, is_closed: false }),
            pending_idle: Condvar::new(),
            why: Mutex::new(None),
            remote: Mutex::default(),
        })
    }

    /// Begins the end of the link.
    pub(crate) fn abort(&self, why: LostReason) {
        lock(&self.why).get_or_insert(why);
        lock(&self.outbox).is_closed = true;
        self.outbox_filled.notify_all();
        if let Some(stream) = &*lock(&self.stream) {
            stream.shutdown();
        }
    }

    fn push(&self, frames: impl IntoIterator<Item = Frame>, bytes: u64) -> Result<(), LostReason> {
        let mut outbox = lock(&self.outbox);
        if outbox.is_closed {
            return Ok(());
        }
        let queued = outbox.bytes + bytes;
        // PD-T8
        if queued > QUEUE_BYTES_MAX {
            return Err(LostReason::Slow { queued, limit: QUEUE_BYTES_MAX });
        }
        outbox.bytes = queued;
        outbox.frames.extend(frames);
        drop(outbox);
        self.outbox_filled.notify_one();
        Ok(())
    }

    /// Queues a message; a peer whose queue is full is cut.
    pub(crate) fn send(&self, message: Vec<u8>) {
        let bytes = (message.len() + HEADER_BYTES) as u64;
        if let Err(why) = self.push([Frame::Message(message)], bytes) {
            self.abort(why);
        }
    }

    /// Notes gets; gives them back if the link has ended.
    fn begin_gets(&self, gets: Vec<Get>) -> Result<(), Vec<Get>> {
        let mut pending = lock(&self.pending);
        if pending.is_closed {
            return Err(gets);
        }
        pending.gets.extend(gets.into_iter().map(|get| (get.op, get)));
        Ok(())
    }

    /// Asks the peer for the bytes of gets.
    pub(crate) fn request(&self, reads: &[(OpId, ReadRequest)]) {
        let (mut frames, mut queued) = (Vec::with_capacity(reads.len()), 0);
        for (op, read) in reads {
            match encode_read(read) {
                Ok(bytes) => {
                    queued += (bytes.len() + HEADER_BYTES) as u64;
                    frames.push(Frame::Read(*op, bytes));
                }
                Err(error) => return self.abort(LostReason::Malformed(error.to_string())),
            }
        }
        if let Err(why) = self.push(frames, queued) {
            self.abort(why);
        }
    }

    /// Notes so many gets for copying threads, which answer all of them; false if the link has
    /// ended. The end of the link waits until they are put back.
    fn begin_jobs(&self, gets: usize) -> bool {
        let mut pending = lock(&self.pending);
        if !pending.is_closed {
            pending.running += gets;
        }
        !pending.is_closed
    }

    /// Whether the link has ended: gets that a copying thread still has are lost.
    pub(crate) fn has_ended(&self) -> bool {
        lock(&self.pending).is_closed
    }

    /// A copying thread is done with so many gets and has reported them.
    pub(crate) fn put_back(&self, gets: usize) {
        lock(&self.pending).running -= gets;
        self.pending_idle.notify_all();
    }

    /// The one way a link ends: no access of the peer, every get answered, then the news.
    fn finish(&self, links: &Links, writer: Option<JoinHandle<()>>, was_up: bool) {
        self.abort(LostReason::Closed);
        if let Some(writer) = writer {
            // A panic of the writer was reported by its thread; either way it reads nothing now.
            // PD-T1 PD-T7
            let _ = writer.join();
        }
        let mut pending = lock(&self.pending);
        pending.is_closed = true;
        let gets = std::mem::take(&mut pending.gets);
        drop(pending);
        // After this nothing writes the target of a running get, and it will be put back.
        if let Some(fence) = &links.fence {
            fence(self);
        }
        let mut pending = lock(&self.pending);
        while pending.running > 0 {
            pending = self.pending_idle.wait(pending).unwrap_or_else(PoisonError::into_inner);
        }
        drop(pending);
        let peer = self.peer;
        let gets: Vec<Ended> =
            gets.into_keys().map(|op| Ended::without(op, GetOutcome::Lost)).collect();
        if !gets.is_empty() {
            (links.sink)(TransportEvent::Ended { peer, gets });
        }
        lock(&links.table).remove(&peer);
        *lock(&self.stream) = None;
        *lock(&self.remote) = Arc::default();
        let why = lock(&self.why).take().unwrap_or(LostReason::Closed);
        // Nobody was told of an incoming link that never came up.
        if was_up || self.side == Side::Connector {
            (links.sink)(TransportEvent::PeerLost { peer, why });
        }
    }
}

/// What a link does before its first frame: checks the peer, and returns regions to map.
pub(crate) type Greet = dyn Fn(&Arc<Conn>, &Stream, &Regions) -> Result<Vec<Arc<dyn RegionOwner>>, LostReason>
    + Send
    + Sync;

/// What a link does at its end, beside its socket, to stop what it still does with memory.
pub(crate) type Fence = dyn Fn(&Conn) + Send + Sync;

/// The greetings of the transports over sockets: their first bytes, and their names.
const GREETINGS: [(&[u8; 5], &str); 3] = [(b"PDTCP", "tcp"), (b"PDUCX", "ucx"), (b"PDSHM", "shm")];

/// A greeting that is not that of `ours`: it names the other transport where it is one of ours, since
/// that is a flag that differs.
pub(crate) fn other_greeting(ours: &str, found: &[u8]) -> LostReason {
    let theirs = GREETINGS.iter().find(|(greeting, _)| found.starts_with(*greeting));
    LostReason::Malformed(match theirs {
        Some((_, theirs)) => {
            format!("the peer hands over by {theirs}, this side by {ours}; both need the same")
        }
        None => String::from("the peer does not speak this protocol"),
    })
}

/// All links of one transport.
pub(crate) struct Links {
    pub(crate) sink: EventSink,
    pub(crate) regions: Regions,
    hashing: Mutex<Hashing>,
    /// Whether gets are served over the socket; otherwise frames that ask for it are malformed.
    is_serving: bool,
    greet: Box<Greet>,
    fence: Option<Box<Fence>>,
    table: Mutex<BTreeMap<PeerId, Arc<Conn>>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    next_peer: AtomicU64,
    pub(crate) is_ending: AtomicBool,
}

impl std::fmt::Debug for Links {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Links").field("table", &self.table).finish_non_exhaustive()
    }
}

impl Links {
    pub(crate) fn new(sink: EventSink, is_serving: bool, greet: Box<Greet>) -> Self {
        Self {
            sink,
            regions: Regions::default(),
            hashing: Mutex::new(plain()),
            is_serving,
            greet,
            fence: None,
            table: Mutex::default(),
            threads: Mutex::default(),
            next_peer: AtomicU64::new(0),
            is_ending: AtomicBool::new(false),
        }
    }

    /// With something that has to end before a link's gets are answered.
    pub(crate) fn with_fence(mut self, fence: Box<Fence>) -> Self {
        self.fence = Some(fence);
        self
    }

    pub(crate) fn hash_with(&self, hashing: Hashing) {
        *lock(&self.hashing) = hashing;
    }

    /// A hash for one thread.
    pub(crate) fn hash(&self) -> Careful {
        Careful::new(Arc::clone(&lock(&self.hashing)))
    }

    /// Asks the peer for gets.
    pub(crate) fn request_gets(&self, from: PeerId, gets: Vec<Get>) -> Vec<(OpId, TransportError)> {
        let Ok(conn) = self.find(from) else { return no_peer(gets, from) };
        let (gets, refused) = self.regions.sift(gets, GET_BYTES_MAX);
        let read = |get: &Get| {
            let (region, extents, guard) = (get.source_region, get.source.to_vec(), get.guard);
            (get.op, ReadRequest { region, extents, guard })
        };
        let reads: Vec<_> = gets.iter().map(read).collect();
        match conn.begin_gets(gets) {
            Ok(()) => {
                conn.request(&reads);
                refused
            }
            Err(gets) => refused.into_iter().chain(no_peer(gets, from)).collect(),
        }
    }

    /// Passes gets to copying threads, a few at a time: at most [`REPORT_GETS`], of `together` bytes.
    pub(crate) fn copy_gets(
        &self,
        from: PeerId,
        gets: Vec<Get>,
        bytes_max: u64,
        together: u64,
        pass: impl Fn(Arc<Conn>, Vec<Get>),
    ) -> Vec<(OpId, TransportError)> {
        let Ok(conn) = self.find(from) else { return no_peer(gets, from) };
        let (gets, refused) = self.regions.sift(gets, bytes_max);
        if !conn.begin_jobs(gets.len()) {
            return refused.into_iter().chain(no_peer(gets, from)).collect();
        }
        let mut gets = &gets[..];
        while !gets.is_empty() {
            let mut bytes = 0;
            let is_small = |get: &&Get| {
                bytes += extents_bytes(&get.source);
                bytes <= together
            };
            let count = gets.iter().take(REPORT_GETS).take_while(is_small).count().max(1);
            let (some, rest) = gets.split_at(count);
            pass(Arc::clone(&conn), some.to_vec());
            gets = rest;
        }
        refused
    }

    pub(crate) fn find(&self, peer: PeerId) -> Result<Arc<Conn>, TransportError> {
        lock(&self.table).get(&peer).cloned().ok_or(TransportError::UnknownPeer(peer))
    }

    /// Opens a link on its own thread; `open` may block for a few seconds.
    pub(crate) fn begin(
        self: &Arc<Self>,
        address: String,
        side: Side,
        open: impl FnOnce() -> Result<Stream, LostReason> + Send + 'static,
    ) -> Result<PeerId, TransportError> {
        let mut table = lock(&self.table);
        if table.len() >= LINKS_MAX {
            return Err(TransportError::Full { what: "links", limit: LINKS_MAX });
        }
        let peer = PeerId(self.next_peer.fetch_add(1, Ordering::Relaxed));
        let conn = Conn::new(peer, side, address);
        table.insert(peer, Arc::clone(&conn));
        drop(table);
        let links = Arc::clone(self);
        let run = move || links.run(&conn, open);
        let thread = thread::Builder::new().name(String::from("pd-link")).spawn(run);
        match thread {
            Ok(thread) => {
                let mut threads = lock(&self.threads);
                threads.retain(|thread| !thread.is_finished());
                threads.push(thread);
                Ok(peer)
            }
            Err(source) => {
                lock(&self.table).remove(&peer);
                Err(TransportError::Io { during: "start thread", source })
            }
        }
    }

    pub(crate) fn cut(&self, peer: PeerId) {
        if let Ok(conn) = self.find(peer) {
            conn.abort(LostReason::Cut);
        }
    }

    pub(crate) fn send(&self, to: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        if message.len() > MAX_MESSAGE_BYTES {
            let limit = MAX_MESSAGE_BYTES as u64;
            return Err(TransportError::TooLarge { bytes: message.len() as u64, limit });
        }
        self.find(to)?.send(message);
        Ok(())
    }

    /// Cuts every link and joins every thread. The sink must not block any more.
    pub(crate) fn end(&self) {
        self.is_ending.store(true, Ordering::SeqCst);
        let open: Vec<_> = lock(&self.table).values().cloned().collect();
        for conn in open {
            conn.abort(LostReason::Cut);
        }
        let threads = std::mem::take(&mut *lock(&self.threads));
        for thread in threads {
            // A panic of a link's thread was reported by that thread.
            let _ = thread.join();
        }
    }

    fn run(self: &Arc<Self>, conn: &Arc<Conn>, open: impl FnOnce() -> Result<Stream, LostReason>) {
        let opened = open().and_then(|stream| {
            let stream = Arc::new(stream);
            *lock(&conn.stream) = Some(Arc::clone(&stream));
            // A cut that came before there was a socket to shut down.
            if lock(&conn.outbox).is_closed || self.is_ending.load(Ordering::SeqCst) {
                return Err(LostReason::Cut);
            }
            let remote = (self.greet)(conn, &stream, &self.regions)?;
            *lock(&conn.remote) = Arc::new(remote);
            Ok(stream)
        });
        let stream = match opened {
            Ok(stream) => stream,
            Err(why) => {
                conn.abort(why);
                return conn.finish(self, None, false);
            }
        };
        let (links, out) = (Arc::clone(self), Arc::clone(&stream));
        let writing = Arc::clone(conn);
        let writer = thread::Builder::new()
            .name(String::from("pd-link-out"))
            .spawn(move || outgoing::write_frames(&links, &writing, &out));
        let writer = match writer {
            Ok(writer) => writer,
            Err(error) => {
                conn.abort(LostReason::Io(error.to_string()));
                return conn.finish(self, None, false);
            }
        };
        let address = lock(&conn.address).clone();
        // PD-T6
        (self.sink)(TransportEvent::PeerUp { peer: conn.peer, address, side: conn.side });
        if let Err(why) = incoming::read_frames(self, conn, &stream) {
            conn.abort(why);
        }
        conn.finish(self, Some(writer), true);
    }
}

fn header(kind: u8, len: usize, op: OpId) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[0] = kind;
    bytes[4..8].copy_from_slice(&u32::try_from(len).unwrap_or(u32::MAX).to_le_bytes());
    bytes[8..].copy_from_slice(&op.0.to_le_bytes());
    bytes
}

fn lost(error: &io::Error) -> LostReason {
    match error.kind() {
        io::ErrorKind::UnexpectedEof
        | io::ErrorKind::ConnectionReset
        | io::ErrorKind::BrokenPipe
        | io::ErrorKind::ConnectionAborted => LostReason::Closed,
        _ => LostReason::Io(error.to_string()),
    }
}
