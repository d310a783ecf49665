//! The shared-memory transport: messages over a Unix socket, pages read where they lie.
//!
//! When a link opens, each side passes the descriptors of its regions; the other maps them
//! read-only, and gets are raw copies by a few threads. The address is `unix:/path/of/socket`.
//!
//! The fence differs from that of a socket: a peer that was cut may still read our memory until it
//! notices. It can only read, and a read that overlaps a reuse is thrown away by the reader, since
//! the guard word changes before the reuse. A peer can't make our reads fault either: a region is
//! taken only if it is sealed against shrinking.
#![expect(unsafe_code, reason = "maps memory, its own and that of peers")]

use crate::copy::{Copied, first_byte, hashed_copy};
use crate::get::{Get, GetOutcome};
use crate::id::{OpId, PeerId};
use crate::link::Side;
use crate::page_hash::{Careful, Hashing};
use crate::socket::{Conn, Links, Stream};
use crate::transport::{
    Ended, EventSink, LostReason, RegionOwner, Regions, Transport, TransportError, TransportEvent,
    TransportFactory,
};
use crate::wire::RegionId;
use crossbeam_channel::{Receiver, Sender, unbounded};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};
use std::io::{IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// First bytes of each side: the name and the version of the greeting.
const MAGIC: &[u8; 8] = b"PDSHM\0\0\x01";
/// Most regions of one side; the kernel passes at most 253 descriptors at once.
const REGIONS_MAX: usize = 128;
/// Announced instead of a length for a region that the peer can't map.
const NOT_SHARED: u64 = u64::MAX;
/// Bytes that are reported together at most: more would be late.
const REPORT_BYTES: u64 = 4 << 20;
const GREET_TIMEOUT: Duration = Duration::from_secs(5);

/// A mapping that is undone on drop.
#[derive(Debug)]
struct Mapping {
    base: *mut u8,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread; `base` is only handed out as a raw
// pointer, and unmapped once, in `drop`.
unsafe impl Send for Mapping {}
// SAFETY: as above; no method writes to the fields.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(fd: BorrowedFd<'_>, len: usize, protection: ProtFlags) -> Result<Self, Errno> {
        // SAFETY: a null hint lets the kernel choose a free range, so no mapping is replaced.
        let base =
            unsafe { rustix::mm::mmap(ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0)? };
        Ok(Self { base: base.cast(), len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped in `new` and is unmapped nowhere else. Raw pointers into it
        // are only used by copies, which hold an `Arc` of its owner. An error can only mean that
        // the arguments are wrong, which they are not.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.len) };
    }
}

/// Zeroed memory that can be shared: a memfd sealed against any change of size.
#[derive(Debug)]
pub struct SharedRegion {
    mapping: Mapping,
    fd: OwnedFd,
}

impl SharedRegion {
    /// `bytes` zero bytes, at least one.
    ///
    /// # Errors
    /// More bytes than the machine has, or the system has no memory or no descriptor.
    pub fn new(bytes: usize) -> Result<Arc<Self>, TransportError> {
        let io = |during| move |e: Errno| TransportError::Io { during, source: e.into() };
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("pd-region", flags).map_err(io("create memfd"))?;
        let len = bytes.max(1);
        // The system would first end other processes to make room that can never be enough.
        let machine = rustix::system::sysinfo();
        let memory = (machine.totalram + machine.totalswap).saturating_mul(machine.mem_unit.into());
        if len as u64 > memory {
            return Err(TransportError::TooLarge { bytes: len as u64, limit: memory });
        }
        // All pages exist from now on: no room is an error here, and not a fault of whoever touches
        // one first, which may be a peer.
        rustix::fs::fallocate(&fd, FallocateFlags::empty(), 0, len as u64)
            .map_err(io("allocate memfd"))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)
            .map_err(io("seal memfd"))?;
        let mapping = Mapping::new(fd.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)
            .map_err(io("map memfd"))?;
        Ok(Arc::new(Self { mapping, fd }))
    }
}

// SAFETY: the mapping has `len` bytes at a page-aligned address, readable and writable, and lives
// as long as the value; the memfd can't shrink (sealed in `new`). This type never makes a Rust
// reference to the bytes.
unsafe impl RegionOwner for SharedRegion {
    fn base(&self) -> *mut u8 {
        self.mapping.base
    }

    fn len(&self) -> u64 {
        self.mapping.len as u64
    }

    fn shared_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }
}

/// A region of a peer, mapped read-only; or nothing, if the peer does not share it.
#[derive(Debug)]
struct PeerRegion(Option<Mapping>);

// SAFETY: the mapping is page aligned and readable while the value lives, and its file can't shrink
// (checked in `map_region`). It is never registered or used as a target, so it need not be
// writable. Without a mapping the length is 0 and the base is only aligned.
unsafe impl RegionOwner for PeerRegion {
    fn base(&self) -> *mut u8 {
        self.0.as_ref().map_or(ptr::without_provenance_mut(8), |mapping| mapping.base)
    }

    fn len(&self) -> u64 {
        self.0.as_ref().map_or(0, |mapping| mapping.len as u64)
    }

    fn shared_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// Gets for one copying thread, at most [`REPORT_GETS`].
type Job = (Arc<Conn>, Vec<Get>);

/// See the module text.
#[derive(Debug)]
pub struct Shm {
    links: Arc<Links>,
    acceptor: Option<(PathBuf, JoinHandle<()>)>,
    jobs: Option<Sender<Job>>,
    copiers: Vec<JoinHandle<()>>,
}

impl Shm {
    /// A transport without links, with `copy_threads` threads (at least one) that copy pages.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn new(sink: EventSink, copy_threads: usize) -> Result<Self, TransportError> {
        let links = Arc::new(Links::new(sink, false, Box::new(greet)));
        // Bounded by the gets that the receiver allows at once.
        let (jobs, queue) = unbounded();
        let mut shm = Self { links, acceptor: None, jobs: Some(jobs), copiers: Vec::new() };
        for _ in 0..copy_threads.max(1) {
            let (links, queue) = (Arc::clone(&shm.links), queue.clone());
            let thread = thread::Builder::new()
                .name(String::from("pd-copy"))
                .spawn(move || copy_pages(&links, &queue))
                .map_err(|source| TransportError::Io { during: "start thread", source })?;
            shm.copiers.push(thread);
        }
        Ok(shm)
    }

    /// Makes shared-memory transports.
    #[must_use]
    pub fn factory(copy_threads: usize) -> TransportFactory {
        Box::new(move |sink| Ok(Box::new(Self::new(sink, copy_threads)?)))
    }
}

fn copy_pages(links: &Links, queue: &Receiver<Job>) {
    let mut hash = None;
    for (conn, gets) in queue {
        let hash = hash.get_or_insert_with(|| links.hash());
        let remote = Arc::clone(&crate::socket::lock(&conn.remote));
        let own = links.regions.all();
        let count = gets.len();
        let lost = |get: &Get| Ended::without(get.op, GetOutcome::Lost);
        let gets = if conn.has_ended() {
            gets.iter().map(lost).collect()
        } else {
            let next = gets.iter().skip(1).map(Some).chain([None]);
            let mut copy = |(get, next): (&Get, Option<&Get>)| {
                let source = next.and_then(|next| {
                    let region = remote.get(next.source_region.0 as usize)?;
                    Some(first_byte(&**region, next))
                });
                hash.expect_next(source.unwrap_or(ptr::null()));
                copy_page(&remote, &own, get, hash)
            };
            gets.iter().zip(next).map(&mut copy).collect()
        };
        (links.sink)(TransportEvent::Ended { peer: conn.peer, gets });
        conn.put_back(count);
    }
}

fn copy_page(
    remote: &[Arc<dyn RegionOwner>],
    own: &[Arc<dyn RegionOwner>],
    get: &Get,
    hash: &mut Careful,
) -> Ended {
    let failed = |error: String| Ended::without(get.op, GetOutcome::Error(error));
    let source = remote.get(get.source_region.0 as usize);
    let guards = remote.get(get.guard.region.0 as usize);
    let (Some(source), Some(guards), Some(target)) =
        (source, guards, own.get(get.target_region.0 as usize))
    else {
        return failed(String::from("no such region"));
    };
    match hashed_copy(&**source, &**guards, &**target, get, hash) {
        Ok((Copied::Done, digest)) => Ended::done(get.op, digest),
        Ok((Copied::Stale, _)) => Ended::without(get.op, GetOutcome::Stale),
        Err(error) => failed(error.to_string()),
    }
}

fn lost(errno: Errno) -> LostReason {
    LostReason::Io(std::io::Error::from(errno).to_string())
}

/// Checks the user, passes our regions and maps the peer's.
fn greet(
    _: &Arc<Conn>,
    stream: &Stream,
    regions: &Regions,
) -> Result<Vec<Arc<dyn RegionOwner>>, LostReason> {
    let Stream::Unix(socket) = stream else {
        return Err(LostReason::Malformed(String::from("not a unix socket")));
    };
    let peer = rustix::net::sockopt::socket_peercred(socket).map_err(lost)?;
    if peer.uid != rustix::process::geteuid() {
        return Err(LostReason::ForeignUser(peer.uid.as_raw()));
    }
    let io = |error: std::io::Error| LostReason::Io(error.to_string());
    socket.set_read_timeout(Some(GREET_TIMEOUT)).map_err(io)?;
    pass_regions(socket, &regions.all())?;
    let remote = take_regions(socket)?;
    socket.set_read_timeout(None).map_err(io)?;
    Ok(remote)
}

fn pass_regions(socket: &UnixStream, regions: &[Arc<dyn RegionOwner>]) -> Result<(), LostReason> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&(regions.len() as u32).to_le_bytes());
    let mut fds = Vec::new();
    for region in regions {
        match region.shared_fd() {
            Some(fd) => {
                bytes.extend_from_slice(&region.len().to_le_bytes());
                fds.push(fd);
            }
            None => bytes.extend_from_slice(&NOT_SHARED.to_le_bytes()),
        }
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(REGIONS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(LostReason::Io(format!("{} descriptors are too many", fds.len())));
    }
    // The descriptors go with the first byte, so the rest may follow in pieces.
    let sent =
        rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
            .map_err(lost)?;
    let mut rest: &UnixStream = socket;
    std::io::Write::write_all(&mut rest, &bytes[sent..])
        .map_err(|error| LostReason::Io(error.to_string()))
}

fn take_regions(socket: &UnixStream) -> Result<Vec<Arc<dyn RegionOwner>>, LostReason> {
    let malformed = |text: String| LostReason::Malformed(text);
    let mut head = [0; MAGIC.len() + 4];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(REGIONS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut head)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    )
    .map_err(lost)?;
    if received.bytes == 0 {
        return Err(LostReason::Closed);
    }
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            fds.extend(passed);
        }
    }
    let mut rest: &UnixStream = socket;
    let io = |error: std::io::Error| LostReason::Io(error.to_string());
    rest.read_exact(&mut head[received.bytes..]).map_err(io)?;
    let (magic, count) = head.split_at(MAGIC.len());
    let count = u32::from_le_bytes(count.try_into().expect("four bytes are left")) as usize;
    if magic != MAGIC || count > REGIONS_MAX {
        return Err(malformed(format!("the peer greets with {count} regions or another protocol")));
    }
    let mut fds = fds.into_iter();
    let mut remote: Vec<Arc<dyn RegionOwner>> = Vec::new();
    for region in 0..count {
        let mut len = [0; 8];
        rest.read_exact(&mut len).map_err(io)?;
        let len = u64::from_le_bytes(len);
        let mapping = if len == NOT_SHARED {
            None
        } else {
            let fd = fds
                .next()
                .ok_or_else(|| malformed(format!("no descriptor for region {region}")))?;
            Some(
                map_region(&fd, len)
                    .map_err(|text| malformed(format!("region {region}: {text}")))?,
            )
        };
        remote.push(Arc::new(PeerRegion(mapping)));
    }
    if fds.next().is_some() {
        return Err(malformed(String::from("more descriptors than regions")));
    }
    Ok(remote)
}

/// Maps a peer's region if it really has its bytes and can't lose them.
fn map_region(fd: &OwnedFd, len: u64) -> Result<Mapping, String> {
    let seals = rustix::fs::fcntl_get_seals(fd).map_err(|e| format!("no memfd: {e}"))?;
    // PD-T10
    if !seals.contains(SealFlags::SHRINK) {
        return Err(String::from("not sealed against shrinking"));
    }
    let stat = rustix::fs::fstat(fd).map_err(|e| e.to_string())?;
    let actual = u64::try_from(stat.st_size).unwrap_or(0);
    let bytes = usize::try_from(len).map_err(|e| e.to_string())?;
    if len == 0 || actual < len {
        return Err(format!("{actual} bytes, announced were {len}"));
    }
    // PD-T10
    Mapping::new(fd.as_fd(), bytes, ProtFlags::READ).map_err(|e| format!("map: {e}"))
}

fn path_of(address: &str) -> Result<PathBuf, TransportError> {
    match address.strip_prefix("unix:") {
        Some(path) if !path.is_empty() => Ok(PathBuf::from(path)),
        _ => Err(TransportError::BadAddress {
            address: address.into(),
            text: String::from("want unix:/path/of/socket"),
        }),
    }
}

/// Connects or fails at once: a listener whose queue is full (a stopped process) must not hold the
/// caller up; the driver tries again later.
fn connect_now(path: &Path) -> std::io::Result<UnixStream> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// Whether something other than a socket lies where `address` (`unix:/path`) points. Nothing can
/// listen there until somebody removes it; it is not ours to remove.
#[must_use]
pub fn has_foreign_file(address: &str) -> bool {
    let file = path_of(address).ok().and_then(|path| std::fs::symlink_metadata(path).ok());
    file.is_some_and(|file| !file.file_type().is_socket())
}

/// Binds a socket that only this user can connect to, replacing one that nobody serves.
fn bind(path: &Path) -> std::io::Result<UnixListener> {
    if std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
        && connect_now(path)
            .is_err_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused)
    {
        std::fs::remove_file(path)?;
    }
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    // The bound file takes its mode from the socket, so it is never open to others.
    rustix::fs::fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 64)?;
    Ok(UnixListener::from(socket))
}

fn accept(links: &Arc<Links>, listener: &UnixListener) {
    while !links.is_ending.load(Ordering::SeqCst) {
        match listener.accept() {
            Ok((stream, _)) => {
                let address = rustix::net::sockopt::socket_peercred(&stream).map_or_else(
                    |_| String::from("pid ?"),
                    |peer| format!("pid {}", peer.pid.as_raw_nonzero()),
                );
                // Too many links, or no thread: the socket is dropped, which tells the peer.
                let _ = links.begin(address, Side::Acceptor, || Ok(Stream::Unix(stream)));
            }
            // Out of descriptors, or the connection died before it was accepted: not at full speed.
            Err(_) => thread::park_timeout(Duration::from_millis(10)),
        }
    }
}

impl Transport for Shm {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn register(&mut self, memory: Arc<dyn RegionOwner>) -> Result<RegionId, TransportError> {
        if self.links.regions.all().len() >= REGIONS_MAX {
            return Err(TransportError::Full { what: "regions", limit: REGIONS_MAX });
        }
        if let Some(fd) = memory.shared_fd() {
            let is_sealed = |fd| {
                rustix::fs::fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(SealFlags::SHRINK))
            };
            if !is_sealed(fd) && rustix::fs::fcntl_add_seals(fd, SealFlags::SHRINK).is_err() {
                let text = String::from("no memfd, or it can't be sealed against shrinking");
                return Err(TransportError::BadRegion(text));
            }
        }
        self.links.regions.add(memory)
    }

    fn listen(&mut self, address: &str) -> Result<String, TransportError> {
        if self.acceptor.is_some() {
            return Err(TransportError::Full { what: "listeners", limit: 1 });
        }
        let path = path_of(address)?;
        if has_foreign_file(address) {
            return Err(TransportError::BadAddress {
                address: address.into(),
                text: String::from("a file that is no socket lies there; move it away"),
            });
        }
        let io = |during| move |source| TransportError::Io { during, source };
        let listener = bind(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::AddrInUse => TransportError::BadAddress {
                address: address.into(),
                text: String::from("another process listens there"),
            },
            _ => io("bind")(error),
        })?;
        let links = Arc::clone(&self.links);
        let thread = thread::Builder::new()
            .name(String::from("pd-accept"))
            .spawn(move || accept(&links, &listener))
            .map_err(io("start thread"))?;
        self.acceptor = Some((path, thread));
        Ok(address.into())
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, TransportError> {
        let path = path_of(address)?;
        self.links.begin(address.into(), Side::Connector, move || {
            let stream = connect_now(&path);
            stream.map(Stream::Unix).map_err(|error| LostReason::Connect(error.to_string()))
        })
    }

    fn send(&mut self, to: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        self.links.send(to, message)
    }

    fn hash_with(&mut self, hashing: Hashing) {
        self.links.hash_with(hashing);
    }

    fn get_many(&mut self, from: PeerId, gets: Vec<Get>) -> Vec<(OpId, TransportError)> {
        self.links.copy_gets(from, gets, u64::MAX, REPORT_BYTES, |conn, gets| {
            if let Some(jobs) = &self.jobs {
                // The copying threads live as long as this sender.
                let _ = jobs.send((conn, gets));
            }
        })
    }

    fn cut(&mut self, peer: PeerId) {
        self.links.cut(peer);
    }
}

impl Drop for Shm {
    fn drop(&mut self) {
        self.links.is_ending.store(true, Ordering::SeqCst);
        if let Some((path, thread)) = self.acceptor.take() {
            // Wakes the acceptor, which looks at `is_ending`.
            if UnixStream::connect(&path).is_ok() {
                // A panic of the acceptor was reported by its thread.
                let _ = thread.join();
            }
            // Someone else may have removed it.
            let _ = std::fs::remove_file(&path);
        }
        self.jobs = None;
        self.links.end();
        for thread in self.copiers.drain(..) {
            // A panic of a copying thread was reported by that thread.
            let _ = thread.join();
        }
    }
}
