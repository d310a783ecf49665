//! What moves bytes between processes: the trait, its events and errors, and plain heap memory.
//!
//! A transport runs its own threads and reports through an [`EventSink`]. The contract that every
//! implementation keeps, and that the conformance suite checks:
//!
//! - No call blocks for long; `connect`, `send`, `get` and `cut` answer at once.
//! - Every accepted get is answered exactly once, in an `Ended`, and before the `PeerLost` of its
//!   peer. After the answer nothing writes the target any more.
//! - `Done` means: the bytes are in the target, visible to this process, and the guard word had
//!   the expected value before and after they were copied out. If the transport was given a
//!   [`Hashing`], the digest is that of the bytes that it put into the target.
//! - Messages of one peer arrive in order. `PeerUp` comes before, `PeerLost` after everything else
//!   of a peer, each once. After `PeerLost` no access of that peer to our memory is under way
//!   (shared memory and UCX: see [`crate::shm`] and [`crate::ucx`]).
//! - A sink may block; that slows down the peer whose event it is. A transport is dropped after
//!   its sink has stopped blocking, and joins its threads then.
#![expect(unsafe_code, reason = "declares the unsafe trait of registered memory, implements it")]

use crate::get::{Digest, Get, GetOutcome};
use crate::id::{OpId, PeerId};
use crate::link::Side;
use crate::page_hash::Hashing;
use crate::wire::{Extent, Guard, RegionDesc, RegionId, extents_bytes};
use std::fmt;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Memory that a transport may read for its peers and write for its own gets.
///
/// # Safety
/// `base()` points to `len()` bytes, aligned to 8, that stay mapped and readable and do not move
/// while the value lives; if it is registered or passed to [`crate::copy`] as a target, writable. Nobody holds a Rust reference to bytes of it while a transport
/// may access them: a get may write its target from `get` to its completion, and any peer may read
/// any byte at any time.
pub unsafe trait RegionOwner: Send + Sync + fmt::Debug {
    /// The first byte.
    fn base(&self) -> *mut u8;
    /// Bytes.
    fn len(&self) -> u64;
    /// A memfd sealed against shrinking that holds exactly these bytes, for shared memory.
    fn shared_fd(&self) -> Option<BorrowedFd<'_>>;
    /// Whether there is no byte.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where a transport reports; called from its threads.
pub type EventSink = Arc<dyn Fn(TransportEvent) + Send + Sync>;

/// Makes a transport that reports to the given sink.
pub type TransportFactory =
    Box<dyn FnOnce(EventSink) -> Result<Box<dyn Transport>, TransportError> + Send>;

/// Why a link is gone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LostReason {
    /// We cut it.
    #[error("cut by this side")]
    Cut,
    /// The peer closed it or died.
    #[error("closed by the peer")]
    Closed,
    /// It never came up.
    #[error("connect: {0}")]
    Connect(String),
    /// The operating system says so.
    #[error("{0}")]
    Io(String),
    /// The peer sent a frame that breaks the format or a limit.
    #[error("malformed frame: {0}")]
    Malformed(String),
    /// The peer does not read, and its queue is full.
    #[error("slow peer: {queued} bytes are queued, at most {limit}")]
    Slow {
        /// Waiting to be sent.
        queued: u64,
        /// Allowed.
        limit: u64,
    },
    /// Libraries of both sides do not understand each other.
    #[error("{ours} here and {theirs} at the peer do not understand each other")]
    Incompatible {
        /// Library and version of this side.
        ours: String,
        /// Library and version of the peer.
        theirs: String,
    },
    /// The peer runs as another user.
    #[error("peer has uid {0}")]
    ForeignUser(u32),
}

/// The answer to one get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Which.
    pub op: OpId,
    /// How.
    pub outcome: GetOutcome,
    /// Of the bytes that landed; only for [`GetOutcome::Done`], and only if the transport has a
    /// [`Hashing`] whose hashes say anything.
    pub digest: Option<Digest>,
}

impl Ended {
    /// The bytes are there.
    #[must_use]
    pub const fn done(op: OpId, digest: Option<Digest>) -> Self {
        Self { op, outcome: GetOutcome::Done, digest }
    }

    /// They are not.
    #[must_use]
    pub const fn without(op: OpId, outcome: GetOutcome) -> Self {
        Self { op, outcome, digest: None }
    }
}

/// Gets that end together are reported together, up to so many: a report may wake a thread, which
/// costs as much as the copy of a small page.
pub(crate) const REPORT_GETS: usize = 128;

/// What a transport reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransportEvent {
    /// A link is open in both directions.
    PeerUp {
        /// Its name from now on.
        peer: PeerId,
        /// Where the peer is.
        address: String,
        /// Who connected.
        side: Side,
    },
    /// A message arrived.
    Message {
        /// From whom.
        peer: PeerId,
        /// As passed to `send`.
        bytes: Vec<u8>,
    },
    /// Gets ended, in this order.
    Ended {
        /// From whom they were.
        peer: PeerId,
        /// At least one.
        gets: Vec<Ended>,
    },
    /// The link is gone.
    PeerLost {
        /// Its name.
        peer: PeerId,
        /// Why.
        why: LostReason,
    },
}

/// A call that was not done.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// No such link, or it is gone.
    #[error("{0} is not connected")]
    UnknownPeer(PeerId),
    /// No such region of ours.
    #[error("region {0} is not registered")]
    UnknownRegion(u32),
    /// Too many regions or links.
    #[error("{what}: at most {limit}")]
    Full {
        /// Of what.
        what: &'static str,
        /// Allowed.
        limit: usize,
    },
    /// A message, a get or a region is larger than it may be.
    #[error("{bytes} bytes, at most {limit}")]
    TooLarge {
        /// Its size.
        bytes: u64,
        /// Allowed.
        limit: u64,
    },
    /// The extents of a get do not match each other or our region.
    #[error("get {op}: {text}")]
    BadGet {
        /// Which.
        op: OpId,
        /// What is wrong.
        text: String,
    },
    /// The region can't be used by this transport.
    #[error("region: {0}")]
    BadRegion(String),
    /// The address can't be used by this transport.
    #[error("address {address:?}: {text}")]
    BadAddress {
        /// As given.
        address: String,
        /// What is wrong.
        text: String,
    },
    /// UCX can't be used.
    #[error(transparent)]
    Ucx(#[from] crate::ucx::UcxError),
    /// The operating system says no.
    #[error("{during}: {source}")]
    Io {
        /// What was tried.
        during: &'static str,
        /// Its answer.
        source: io::Error,
    },
}

/// Moves messages and bytes. See the module text for the contract.
pub trait Transport: Send + fmt::Debug {
    /// For logs and the `Hello`.
    fn name(&self) -> &'static str;

    /// Makes memory readable for peers and writable for own gets. Regions are numbered 0, 1, 2 …;
    /// register all before `listen` and `connect`.
    ///
    /// # Errors
    /// Too many regions, or memory that this transport can't use.
    fn register(&mut self, memory: Arc<dyn RegionOwner>) -> Result<RegionId, TransportError>;

    /// Accepts links. Returns the address that peers connect to.
    ///
    /// # Errors
    /// The address is malformed or taken.
    fn listen(&mut self, address: &str) -> Result<String, TransportError>;

    /// Begins to open a link; `PeerUp` or `PeerLost` follows.
    ///
    /// # Errors
    /// The address is malformed, or there are too many links.
    fn connect(&mut self, address: &str) -> Result<PeerId, TransportError>;

    /// Queues a message. If the queue of a peer is full, the peer is cut: it does not read.
    ///
    /// # Errors
    /// The link is gone, or the message is too large.
    fn send(&mut self, to: PeerId, message: Vec<u8>) -> Result<(), TransportError>;

    /// What digests the pages that land, from now on; call it before `listen` and `connect`.
    fn hash_with(&mut self, hashing: Hashing);

    /// Begins to copy from the peer's memory to ours. Returns the gets that were not taken because
    /// the link is gone or they are malformed; those get no other answer.
    fn get_many(&mut self, from: PeerId, gets: Vec<Get>) -> Vec<(OpId, TransportError)>;

    /// [`Self::get_many`] for one.
    ///
    /// # Errors
    /// The link is gone or the get is malformed; no answer follows then.
    fn get(&mut self, from: PeerId, get: Get) -> Result<(), TransportError> {
        match self.get_many(from, vec![get]).pop() {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    /// Begins to close a link; `PeerLost` follows. Unknown links are ignored.
    fn cut(&mut self, peer: PeerId);
}

/// Registered regions, shared between a transport and its threads.
#[derive(Clone, Debug, Default)]
pub(crate) struct Regions(pub(crate) Arc<std::sync::RwLock<Vec<Arc<dyn RegionOwner>>>>);

impl Regions {
    /// Most regions; equal to what a `Hello` can announce.
    const MAX: usize = crate::wire::MAX_REGIONS;

    pub(crate) fn add(&self, memory: Arc<dyn RegionOwner>) -> Result<RegionId, TransportError> {
        if memory.base().align_offset(8) != 0 {
            return Err(TransportError::BadRegion(String::from("base is not aligned to 8")));
        }
        let mut regions = self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner);
        if regions.len() >= Self::MAX {
            return Err(TransportError::Full { what: "regions", limit: Self::MAX });
        }
        regions.push(memory);
        Ok(RegionId(regions.len() as u32 - 1))
    }

    pub(crate) fn find(&self, region: RegionId) -> Option<Arc<dyn RegionOwner>> {
        let regions = self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        regions.get(region.0 as usize).cloned()
    }

    pub(crate) fn all(&self) -> Vec<Arc<dyn RegionOwner>> {
        self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone()
    }

    /// Checks our half of gets: splits them into those that fit and those that do not.
    pub(crate) fn sift(
        &self,
        gets: Vec<Get>,
        bytes_max: u64,
    ) -> (Vec<Get>, Vec<(OpId, TransportError)>) {
        let regions = self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        sift(gets, |get| {
            Self::check(&regions, get)?;
            let bytes = extents_bytes(&get.source);
            if bytes > bytes_max {
                return Err(TransportError::TooLarge { bytes, limit: bytes_max });
            }
            Ok(())
        })
    }

    // PD-T5
    fn check(regions: &[Arc<dyn RegionOwner>], get: &Get) -> Result<(), TransportError> {
        let Some(memory) = regions.get(get.target_region.0 as usize) else {
            return Err(TransportError::UnknownRegion(get.target_region.0));
        };
        let bad = |text: String| TransportError::BadGet { op: get.op, text };
        if get.source.is_empty()
            || get.source.len() != get.target.len()
            || get.source.iter().zip(&get.target).any(|(s, t)| s.len != t.len || s.len == 0)
        {
            return Err(bad(String::from("source and target differ in shape")));
        }
        if let Some(extent) = get.target.iter().find(|extent| !inside(extent, memory.len())) {
            return Err(bad(format!(
                "target {} + {} is outside the region of {} bytes",
                extent.offset,
                extent.len,
                memory.len()
            )));
        }
        Ok(())
    }
}

/// Splits gets into those that `check` takes and those that it does not.
fn sift(
    gets: Vec<Get>,
    check: impl Fn(&Get) -> Result<(), TransportError>,
) -> (Vec<Get>, Vec<(OpId, TransportError)>) {
    let mut refused = Vec::new();
    let mut taken = gets;
    taken.retain(|get| match check(get) {
        Ok(()) => true,
        Err(error) => {
            refused.push((get.op, error));
            false
        }
    });
    (taken, refused)
}

/// The answer to gets from a peer that is not there.
pub(crate) fn no_peer(gets: Vec<Get>, from: PeerId) -> Vec<(OpId, TransportError)> {
    gets.into_iter().map(|get| (get.op, TransportError::UnknownPeer(from))).collect()
}

/// Whether an extent lies inside `len` bytes.
pub(crate) fn inside(extent: &Extent, len: u64) -> bool {
    extent.offset.checked_add(u64::from(extent.len)).is_some_and(|end| end <= len)
}

/// Whether a guard word lies inside `len` bytes, aligned.
pub(crate) fn guard_inside(guard: &Guard, len: u64) -> bool {
    guard.offset.is_multiple_of(8) && guard.offset.checked_add(8).is_some_and(|end| end <= len)
}

/// The regions as a `Hello` announces them.
pub(crate) fn describe(regions: &[Arc<dyn RegionOwner>]) -> Vec<RegionDesc> {
    (0_u32..)
        .zip(regions)
        .map(|(region, memory)| RegionDesc { region: RegionId(region), bytes: memory.len() })
        .collect()
}

/// Zeroed heap memory as a region; for tests, tools and transports that need no descriptor.
#[derive(Debug)]
pub struct HeapRegion {
    words: Box<[AtomicU64]>,
}

impl HeapRegion {
    /// At least `bytes` zero bytes, rounded up to a multiple of 8.
    #[must_use]
    pub fn new(bytes: usize) -> Arc<Self> {
        let words = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Self { words })
    }

    /// The word at a byte offset; `None` if it is not inside, or misaligned.
    #[must_use]
    pub fn load(&self, offset: u64) -> Option<u64> {
        let at = usize::try_from(offset).ok().filter(|at| at.is_multiple_of(8))?;
        self.words.get(at / 8).map(|word| word.load(Ordering::Acquire))
    }
}

// SAFETY: the boxed words are never moved or freed while the value lives, `u64` is aligned to 8,
// and the only references to them that this type makes are to atomics, in `base`, which may be
// written through a shared reference.
unsafe impl RegionOwner for HeapRegion {
    fn base(&self) -> *mut u8 {
        self.words.as_ptr().cast_mut().cast()
    }

    fn len(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    fn shared_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}
