//! The UCX transport: messages over a TCP socket, pages by UCX's one-sided gets, which are RDMA
//! reads where the hardware has them.
//!
//! The library is opened at run time: the path in `DSV4_UCX_LIB`, or `libucp.so.0` where the loader
//! finds it. Which transports and devices it uses is UCX's own choice, from `UCX_TLS`,
//! `UCX_NET_DEVICES` and its other variables. An address is HOST:PORT of the socket. When a link
//! opens, both sides say the version of their UCX (those that differ in major or minor do not
//! understand each other and are refused), then the address of their worker and the keys of their
//! regions. Those bytes are parsed by UCX without a length, so a peer is trusted to be one of ours.
//!
//! One thread per transport calls UCX. A get copies straight into its target and is checked with
//! the guard word behind it, see `ucx/job.rs`. When a link ends, its endpoint is closed by force
//! and every request has completed before the loss is reported; memory is unmapped at the very end.
//!
//! Endpoints are of the kind that reports a lost peer, because only those can be closed by force.
//! UCX's shared memory is of that kind only with `UCX_POSIX_ERROR_HANDLING=y`.
//!
//! The fence differs from that of a socket, as for shared memory: a peer that was cut may still read
//! our memory until it notices. It can only read, and a read that overlaps a reuse is thrown away by
//! the reader, since the guard word changes before the reuse.

mod config;
mod engine;
mod hello;
mod job;
#[cfg(feature = "testing")]
pub mod plain;
mod raw;
mod sys;
mod totals;

use crate::get::Get;
use crate::id::{OpId, PeerId};
use crate::page_hash::Hashing;
use crate::socket::{Conn, GET_BYTES_MAX, Links, Stream};
use crate::tcp::{Acceptor, connect_to};
use crate::transport::{
    EventSink, LostReason, RegionOwner, Transport, TransportError, TransportFactory,
};
use crate::wire::RegionId;
use engine::Engine;
#[cfg(feature = "testing")]
pub(crate) use hello::hear;
use std::sync::Arc;
use std::time::Duration;
pub use sys::Version;
pub use totals::{Totals, UcxCounters};

/// Bytes that are fetched together, unless a page alone is larger. Fewer make more events, each of
/// which wakes the driver's thread.
const BATCH_BYTES: u64 = 1 << 20;
const GREET_TIMEOUT: Duration = Duration::from_secs(5);

/// Why UCX can't be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UcxError {
    /// There is no library.
    #[error(
        "no UCX library: looked for {looked_for} ({reason}); install one (`apt install libucx0`, or `pip install libucx-cu13`) or set DSV4_UCX_LIB to the path of its libucp.so.0"
    )]
    NotFound {
        /// The path, or the name that the loader was asked for.
        looked_for: String,
        /// The loader's words.
        reason: String,
    },
    /// The library is too old, or not UCX.
    #[error("{path} has no function {function}: UCX 1.13 or newer is needed")]
    Function {
        /// As opened.
        path: String,
        /// What is missing.
        function: &'static str,
    },
    /// UCX says no.
    #[error("{function}: {text}")]
    Call {
        /// What was called.
        function: &'static str,
        /// UCX's words and its number.
        text: String,
    },
    /// The peer's UCX did not answer the first get of a link.
    #[error("the peer's UCX can't be reached")]
    NoAnswer,
    /// The thread that calls UCX is gone.
    #[error("the thread that calls UCX has ended")]
    Ended,
}

/// The version of the library that this process uses; opens it.
///
/// # Errors
/// There is none.
pub fn version() -> Result<Version, UcxError> {
    sys::Api::open().map(sys::Api::version)
}

/// See the module text.
#[derive(Debug)]
pub struct Ucx {
    links: Arc<Links>,
    engine: Arc<Engine>,
    acceptor: Option<Acceptor>,
}

impl Ucx {
    /// A transport without links, which counts in `totals`.
    ///
    /// # Errors
    /// There is no library, or UCX finds nothing that it can use.
    pub fn new(sink: EventSink, totals: Arc<Totals>) -> Result<Self, TransportError> {
        let engine = Arc::new(Engine::start(Arc::clone(&sink), totals)?);
        let (greeting, closing) = (Arc::clone(&engine), Arc::clone(&engine));
        let links = Links::new(
            sink,
            false,
            Box::new(move |conn, stream, _| greet(&greeting, conn, stream).map(|()| Vec::new())),
        )
        .with_fence(Box::new(move |conn| closing.close(conn.peer)));
        Ok(Self { links: Arc::new(links), engine, acceptor: None })
    }

    /// Makes UCX transports.
    #[must_use]
    pub fn factory(totals: Arc<Totals>) -> TransportFactory {
        Box::new(|sink| Ok(Box::new(Self::new(sink, totals)?)))
    }
}

/// Exchanges versions and cards, makes the endpoint, and reads a word through it.
fn greet(engine: &Engine, conn: &Arc<Conn>, stream: &Stream) -> Result<(), LostReason> {
    let Stream::Tcp(socket) = stream else {
        return Err(LostReason::Malformed(String::from("not a tcp socket")));
    };
    let io = |error: std::io::Error| LostReason::Io(error.to_string());
    socket.set_nodelay(true).map_err(io)?;
    socket.set_read_timeout(Some(GREET_TIMEOUT)).map_err(io)?;
    socket.set_write_timeout(Some(GREET_TIMEOUT)).map_err(io)?;
    let card = hello::exchange(&mut &*socket, conn.side, engine.version(), &engine.card())?;
    socket.set_read_timeout(None).map_err(io)?;
    socket.set_write_timeout(None).map_err(io)?;
    engine.open(Arc::clone(conn), card).map_err(|error| LostReason::Io(error.to_string()))
}

impl Transport for Ucx {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn register(&mut self, memory: Arc<dyn RegionOwner>) -> Result<RegionId, TransportError> {
        let region = self.links.regions.add(Arc::clone(&memory))?;
        self.engine.register(memory)?;
        Ok(region)
    }

    fn listen(&mut self, address: &str) -> Result<String, TransportError> {
        Acceptor::fill(&mut self.acceptor, &self.links, address)
    }

    fn connect(&mut self, address: &str) -> Result<PeerId, TransportError> {
        connect_to(&self.links, address)
    }

    fn send(&mut self, to: PeerId, message: Vec<u8>) -> Result<(), TransportError> {
        self.links.send(to, message)
    }

    fn hash_with(&mut self, hashing: Hashing) {
        self.engine.hash_with(hashing);
    }

    fn get_many(&mut self, from: PeerId, gets: Vec<Get>) -> Vec<(OpId, TransportError)> {
        self.links.copy_gets(from, gets, GET_BYTES_MAX, BATCH_BYTES, |conn, gets| {
            self.engine.get(conn, gets);
        })
    }

    fn cut(&mut self, peer: PeerId) {
        self.links.cut(peer);
    }
}

impl Drop for Ucx {
    fn drop(&mut self) {
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.stop(&self.links);
        }
        self.links.end();
        self.engine.stop();
    }
}
