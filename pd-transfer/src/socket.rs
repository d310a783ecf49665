//! What the socket transports share: frames, one reading and one writing thread per link, bounded
//! queues, and the order in which a link ends.
//!
//! A frame is a 16-byte header (kind `u8`, three zero bytes, payload length `u32`, operation `u64`,
//! little-endian) and its payload. The writing thread is the only one that copies out of our
//! memory for the peer, the reading thread the only one that writes what the peer sent. A link
//! ends in one place, [`Conn::finish`]: writer joined, gets answered, then the loss reported.

use crate::copy::{Copied, guarded_read};
use crate::get::{Get, GetOutcome};
use crate::id::{OpId, PeerId};
use crate::link::Side;
use crate::page_hash::{Careful, Hashing, plain};
use crate::transport::{
    Ended, EventSink, LostReason, REPORT_GETS, RegionOwner, Regions, TransportError,
    TransportEvent, no_peer,
};
use crate::wire::{
    Extent, MAX_EXTENTS, MAX_MESSAGE_BYTES, ReadRequest, decode_read, encode_read, extents_bytes,
};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpStream};
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
/// Largest get.
pub(crate) const GET_BYTES_MAX: u64 = 16 << 20;
/// Bytes that may wait for one peer.
const QUEUE_BYTES_MAX: u64 = 64 << 20;
/// Reads of one peer that may wait to be served.
const SERVING_MAX: usize = 4096;
/// Links of one transport, half-open ones included.
const LINKS_MAX: usize = 1024;
/// What a link's writing thread keeps for its next frames.
const BUFFER_BYTES_KEPT: usize = 4 << 20;
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

impl Read for &Stream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).read(out),
            Stream::Unix(stream) => (&mut &*stream).read(out),
        }
    }
}

impl Write for &Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Stream::Tcp(stream) => (&mut &*stream).write(bytes),
            Stream::Unix(stream) => (&mut &*stream).write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
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
            .spawn(move || write_frames(&links, &writing, &out));
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
        if let Err(why) = read_frames(self, conn, &stream) {
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

/// Waits for frames and takes as many as go well into one write. None once the link has ended.
fn next_frames(conn: &Conn) -> Option<Vec<Frame>> {
    let mut outbox = lock(&conn.outbox);
    loop {
        if outbox.is_closed {
            return None;
        }
        if !outbox.frames.is_empty() {
            break;
        }
        outbox = conn.outbox_filled.wait(outbox).unwrap_or_else(PoisonError::into_inner);
    }
    let (mut frames, mut bytes) = (Vec::new(), 0);
    while bytes < CHUNK_BYTES as u64 {
        let Some(frame) = outbox.frames.pop_front() else { break };
        bytes += match &frame {
            Frame::Message(payload) | Frame::Read(_, payload) => payload.len() as u64,
            Frame::Serve(_, request) => extents_bytes(&request.extents),
        };
        frames.push(frame);
    }
    Some(frames)
}

fn write_frames(links: &Links, conn: &Conn, stream: &Stream) {
    let mut buffer = Vec::new();
    while let Some(frames) = next_frames(conn) {
        buffer.clear();
        let (mut queued, mut served) = (0, 0);
        for frame in frames {
            let start = buffer.len();
            match frame {
                Frame::Message(message) => {
                    buffer.extend_from_slice(&header(MESSAGE, message.len(), OpId(0)));
                    buffer.extend_from_slice(&message);
                    queued += buffer.len() - start;
                }
                Frame::Read(op, request) => {
                    buffer.extend_from_slice(&header(READ, request.len(), op));
                    buffer.extend_from_slice(&request);
                    queued += buffer.len() - start;
                }
                Frame::Serve(op, request) => {
                    serve(&links.regions, op, &request, &mut buffer);
                    served += 1;
                }
            }
        }
        let mut out = stream;
        if let Err(error) = out.write_all(&buffer) {
            return conn.abort(lost(&error));
        }
        let mut outbox = lock(&conn.outbox);
        outbox.bytes -= queued as u64;
        outbox.serving -= served;
        drop(outbox);
        // A single large frame does not keep its memory for the life of the link; pages of usual
        // sizes do, since memory that comes and goes costs more than their copy.
        buffer.shrink_to(BUFFER_BYTES_KEPT);
    }
}

/// Appends the answer to a read to `buffer`.
fn serve(regions: &Regions, op: OpId, request: &ReadRequest, buffer: &mut Vec<u8>) {
    let start = buffer.len();
    let payload = start + HEADER_BYTES;
    buffer.extend_from_slice(&[0; HEADER_BYTES]);
    let source = regions.find(request.region);
    let guards = regions.find(request.guard.region);
    let copied = match (source, guards) {
        (Some(source), Some(guards)) => {
            guarded_read(&*source, &*guards, &request.extents, &request.guard, buffer)
                .map_err(|error| error.to_string())
        }
        _ => Err(String::from("no such region")),
    };
    let kind = match copied {
        Ok(Copied::Done) => DATA,
        Ok(Copied::Stale) => {
            buffer.truncate(payload);
            STALE
        }
        Err(text) => {
            buffer.truncate(payload);
            buffer.extend_from_slice(text.as_bytes());
            REFUSED
        }
    };
    let head = header(kind, buffer.len() - payload, op);
    buffer[start..payload].copy_from_slice(&head);
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

/// Reads `len` bytes without trusting `len` for an allocation.
fn read_bytes(reader: &mut impl Read, len: usize) -> Result<Vec<u8>, LostReason> {
    let mut bytes = Vec::with_capacity(len.min(CHUNK_BYTES));
    let got = reader.by_ref().take(len as u64).read_to_end(&mut bytes).map_err(|e| lost(&e))?;
    if got == len { Ok(bytes) } else { Err(LostReason::Closed) }
}

/// What the reading thread of a link has at hand.
struct Incoming<'a> {
    links: &'a Links,
    conn: &'a Conn,
    reader: BufReader<&'a Stream>,
    hash: Careful,
    /// Answers that are not reported yet.
    ended: Vec<Ended>,
}

fn read_frames(links: &Links, conn: &Conn, stream: &Stream) -> Result<(), LostReason> {
    let reader = BufReader::with_capacity(CHUNK_BYTES, stream);
    let mut incoming = Incoming { links, conn, reader, hash: links.hash(), ended: Vec::new() };
    let why = loop {
        if let Err(why) = incoming.frame() {
            break why;
        }
    };
    incoming.report();
    Err(why)
}

impl Incoming<'_> {
    fn frame(&mut self) -> Result<(), LostReason> {
        let malformed = |text: String| Err(LostReason::Malformed(text));
        // What has come is told before more is waited for.
        if self.ended.len() >= REPORT_GETS || self.reader.buffer().len() < HEADER_BYTES {
            self.report();
        }
        let mut head = [0; HEADER_BYTES];
        self.reader.read_exact(&mut head).map_err(|error| lost(&error))?;
        let [kind, a, b, c, l0, l1, l2, l3, op @ ..] = head;
        let len = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        let op = OpId(u64::from_le_bytes(op));
        // PD-T9
        if [a, b, c] != [0; 3] {
            return malformed(String::from("reserved bytes are not zero"));
        }
        let is_serving = self.links.is_serving;
        match kind {
            MESSAGE if len <= MAX_MESSAGE_BYTES => {
                let bytes = read_bytes(&mut self.reader, len)?;
                self.report();
                (self.links.sink)(TransportEvent::Message { peer: self.conn.peer, bytes });
            }
            READ if is_serving && len <= 256 => {
                let bytes = read_bytes(&mut self.reader, len)?;
                let request = decode_read(&bytes)
                    .map_err(|error| LostReason::Malformed(error.to_string()))?;
                queue_read(self.conn, op, request)?;
            }
            DATA if is_serving => {
                let ended = self.receive(op, len)?;
                self.ended.push(ended);
            }
            STALE if is_serving && len == 0 => {
                take_pending(self.conn, op)?;
                self.ended.push(Ended::without(op, GetOutcome::Stale));
            }
            REFUSED if is_serving && len <= 4096 => {
                let bytes = read_bytes(&mut self.reader, len)?;
                take_pending(self.conn, op)?;
                let error = String::from_utf8_lossy(&bytes).into_owned();
                self.ended.push(Ended::without(op, GetOutcome::Error(error)));
            }
            _ => return malformed(format!("kind {kind} with {len} bytes")),
        }
        Ok(())
    }

    fn report(&mut self) {
        if !self.ended.is_empty() {
            let (peer, gets) = (self.conn.peer, std::mem::take(&mut self.ended));
            (self.links.sink)(TransportEvent::Ended { peer, gets });
        }
    }

    /// Copies the payload of a `DATA` frame to the target of its get.
    fn receive(&mut self, op: OpId, len: usize) -> Result<Ended, LostReason> {
        let (target_region, target) = {
            let pending = lock(&self.conn.pending);
            let Some(get) = pending.gets.get(&op) else {
                return Err(LostReason::Malformed(format!("data for {op}, which was not asked")));
            };
            (get.target_region, get.target)
        };
        let wanted = extents_bytes(&target);
        let Some(memory) = self.links.regions.find(target_region).filter(|_| wanted == len as u64)
        else {
            let text = format!("{len} bytes for {op}, which wants {wanted}");
            return Err(LostReason::Malformed(text));
        };
        self.hash.clear();
        for &Extent { offset, len } in &target {
            let mut written = 0;
            while written < len as usize {
                // Straight from what the socket gave.
                let bytes = self.reader.fill_buf().map_err(|error| lost(&error))?;
                if bytes.is_empty() {
                    return Err(LostReason::Closed);
                }
                let part = &bytes[..bytes.len().min(len as usize - written)];
                self.hash
                    .write(&*memory, offset + written as u64, part)
                    .map_err(|error| LostReason::Io(error.to_string()))?;
                let part = part.len();
                self.reader.consume(part);
                written += part;
            }
        }
        // PD-T2
        // Removed only now: if the link breaks in the middle, its end answers the get.
        take_pending(self.conn, op)?;
        Ok(Ended::done(op, self.hash.finish()))
    }
}

fn queue_read(conn: &Conn, op: OpId, request: ReadRequest) -> Result<(), LostReason> {
    let bytes = extents_bytes(&request.extents);
    let count = request.extents.len();
    if bytes > GET_BYTES_MAX || count == 0 || count > MAX_EXTENTS {
        return Err(LostReason::Malformed(format!("read of {bytes} bytes in {count} extents")));
    }
    let mut outbox = lock(&conn.outbox);
    if outbox.serving >= SERVING_MAX {
        return Err(LostReason::Malformed(format!("more than {SERVING_MAX} reads at once")));
    }
    outbox.serving += 1;
    outbox.frames.push_back(Frame::Serve(op, request));
    drop(outbox);
    conn.outbox_filled.notify_one();
    Ok(())
}

fn take_pending(conn: &Conn, op: OpId) -> Result<Get, LostReason> {
    lock(&conn.pending)
        .gets
        .remove(&op)
        .ok_or_else(|| LostReason::Malformed(format!("answer to {op}, which was not asked")))
}
