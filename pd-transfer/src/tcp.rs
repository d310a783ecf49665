//! The TCP transport: messages and pages over one socket per link.
//!
//! A get travels as a request; the writing thread of the source's link hands the page to the kernel
//! where it lies, between two looks at its guard word, and says what it saw in a frame behind it. The
//! fence is the end of that thread.

use crate::get::Get;
use crate::id::{OpId, PeerId};
use crate::link::Side;
use crate::page_hash::Hashing;
use crate::socket::{Conn, Links, Stream, other_greeting};
use crate::transport::{
    EventSink, LostReason, RegionOwner, Regions, Transport, TransportError, TransportFactory,
};
use crate::wire::RegionId;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// First bytes of each side: the name and the version of the framing.
const PREAMBLE: &[u8; 8] = b"PDTCP\0\0\x02";
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
const PREAMBLE_TIMEOUT: Duration = Duration::from_secs(5);

/// See the module text.
#[derive(Debug)]
pub struct Tcp {
    links: Arc<Links>,
    acceptor: Option<Acceptor>,
}

impl Tcp {
    /// A transport without links.
    #[must_use]
    pub fn new(sink: EventSink) -> Self {
        Self { links: Arc::new(Links::new(sink, true, Box::new(greet))), acceptor: None }
    }

    /// Makes TCP transports.
    #[must_use]
    pub fn factory() -> TransportFactory {
        Box::new(|sink| Ok(Box::new(Self::new(sink))))
    }
}

fn io(error: &std::io::Error) -> LostReason {
    LostReason::Io(error.to_string())
}

fn greet(
    _: &Arc<Conn>,
    stream: &Stream,
    _: &Regions,
) -> Result<Vec<Arc<dyn RegionOwner>>, LostReason> {
    let Stream::Tcp(socket) = stream else {
        return Err(LostReason::Malformed(String::from("not a tcp socket")));
    };
    socket.set_nodelay(true).map_err(|error| io(&error))?;
    let mut socket: &TcpStream = socket;
    socket.write_all(PREAMBLE).map_err(|error| io(&error))?;
    socket.set_read_timeout(Some(PREAMBLE_TIMEOUT)).map_err(|error| io(&error))?;
    let mut preamble = [0; PREAMBLE.len()];
    socket.read_exact(&mut preamble).map_err(|error| io(&error))?;
    if preamble[..7] != PREAMBLE[..7] {
        return Err(other_greeting("tcp", &preamble));
    }
    if preamble != *PREAMBLE {
        let text = format!("framing version {} at the peer, {} here", preamble[7], PREAMBLE[7]);
        return Err(LostReason::Malformed(text));
    }
    socket.set_read_timeout(None).map_err(|error| io(&error))?;
    Ok(Vec::new())
}

/// Begins a link to HOST:PORT.
pub(crate) fn connect_to(links: &Arc<Links>, address: &str) -> Result<PeerId, TransportError> {
    let target = String::from(address);
    links.begin(address.into(), Side::Connector, move || resolve(&target).map(Stream::Tcp))
}

/// Connects; may take a few seconds.
fn resolve(address: &str) -> Result<TcpStream, LostReason> {
    let connect = |text: String| LostReason::Connect(text);
    let mut last = String::from("no address");
    for socket in address.to_socket_addrs().map_err(|error| connect(error.to_string()))? {
        match TcpStream::connect_timeout(&socket, CONNECT_TIMEOUT) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error.to_string(),
        }
    }
    Err(connect(last))
}

/// A listening socket and the thread that accepts on it.
#[derive(Debug)]
pub(crate) struct Acceptor {
    local: SocketAddr,
    thread: JoinHandle<()>,
}

impl Acceptor {
    /// Starts the one listener that a transport may have; the address that peers connect to.
    pub(crate) fn fill(
        slot: &mut Option<Self>,
        links: &Arc<Links>,
        address: &str,
    ) -> Result<String, TransportError> {
        if slot.is_some() {
            return Err(TransportError::Full { what: "listeners", limit: 1 });
        }
        let acceptor = slot.insert(Self::start(links, address)?);
        Ok(acceptor.local.to_string())
    }

    fn start(links: &Arc<Links>, address: &str) -> Result<Self, TransportError> {
        let io = |during| move |source| TransportError::Io { during, source };
        let listener = TcpListener::bind(address).map_err(io("bind"))?;
        let local = listener.local_addr().map_err(io("bind"))?;
        let links = Arc::clone(links);
        let thread = thread::Builder::new()
            .name(String::from("pd-accept"))
            .spawn(move || accept(&links, &listener))
            .map_err(io("start thread"))?;
        Ok(Self { local, thread })
    }

    /// Ends the thread.
    pub(crate) fn stop(self, links: &Links) {
        links.is_ending.store(true, Ordering::SeqCst);
        let mut address = self.local;
        if address.ip().is_unspecified() {
            address.set_ip(match address {
                SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
                SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
            });
        }
        // Wakes the acceptor, which looks at `is_ending`.
        if TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).is_ok() {
            // A panic of the acceptor was reported by its thread.
            let _ = self.thread.join();
        }
    }
}

fn accept(links: &Arc<Links>, listener: &TcpListener) {
    while !links.is_ending.load(Ordering::SeqCst) {
        match listener.accept() {
            Ok((stream, address)) => {
                // Too many links, or no thread: the socket is dropped, which tells the peer.
                let _ =
                    links.begin(address.to_string(), Side::Acceptor, || Ok(Stream::Tcp(stream)));
            }
            // Out of descriptors, or the connection died before it was accepted: not at full speed.
            Err(_) => thread::park_timeout(Duration::from_millis(10)),
        }
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn register(&mut self, memory: Arc<dyn RegionOwner>) -> Result<RegionId, TransportError> {
        self.links.regions.add(memory)
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
        self.links.hash_with(hashing);
    }

    fn get_many(&mut self, from: PeerId, gets: Vec<Get>) -> Vec<(OpId, TransportError)> {
        self.links.request_gets(from, gets)
    }

    fn cut(&mut self, peer: PeerId) {
        self.links.cut(peer);
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.stop(&self.links);
        }
        self.links.end();
    }
}
