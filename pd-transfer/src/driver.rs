//! The thread that drives an endpoint over a transport, and the handle of the upper layer.

use crate::counters::Counters;
use crate::endpoint::{Action, Endpoint, EndpointConfig, PeerSnapshot, Upcall};
use crate::get::{Digest, Get, GetOutcome};
use crate::id::{PeerId, Time};
use crate::link::LinkConfig;
use crate::page_hash::{Hashing, PageHash};
use crate::receiver::{ReceiverConfig, Start, Target, Verify};
use crate::sender::SenderConfig;
use crate::states::LinkState;
use crate::transport::{
    Ended, EventSink, LostReason, RegionOwner, Transport, TransportError, TransportEvent,
    TransportFactory, describe,
};
use crate::wire::{
    AttemptId, FinalRecord, Fingerprint, Hello, Incarnation, Item, Limits, MAX_LAYOUT_BYTES,
    PROTO_VERSION, RefuseReason, Role,
};
use crossbeam_channel::{Receiver, Sender, bounded, select};
use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle, ThreadId};
use std::time::{Duration, Instant};

/// Where the driver's time comes from.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Now.
    fn now(&self) -> Time;
}

/// The system's monotonic clock, from zero.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock(Instant);

impl SystemClock {
    /// Starts now.
    #[must_use]
    pub fn new() -> Self {
        Self(Instant::now())
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Time {
        Time(u64::try_from(self.0.elapsed().as_micros()).unwrap_or(u64::MAX))
    }
}

/// Says whether bytes that landed are the page they should be.
pub trait Verifier: Send + Sync {
    /// What digests pages, made once per thread that copies them. See [`crate::page_hash::Bounced`] for
    /// digests over slices.
    fn hash(&self) -> Box<dyn PageHash>;

    /// Whether bytes with this digest are the page, that is, whether they have its tag. `None` if
    /// there is no digest, because [`Self::hash`] makes none or died on the page. Called on the
    /// driver's thread.
    fn verify(&self, page: &Verify, digest: Option<Digest>) -> bool;
}

/// Receives the news, on the driver's thread; it must not block for long. It may call the handle.
pub type UpcallSink = Arc<dyn Fn(Upcall) + Send + Sync>;

/// Everything a driver is made of.
#[derive(Clone, Debug)]
pub struct DriverConfig {
    /// What this node does.
    pub role: Role,
    /// Random per process.
    pub incarnation: Incarnation,
    /// Layout of the pages.
    pub fingerprint: Fingerprint,
    /// The same layout for people, at most [`MAX_LAYOUT_BYTES`].
    pub layout: String,
    /// What this node accepts.
    pub limits: Limits,
    /// Memory; the regions are numbered in this order, from 0.
    pub regions: Vec<Arc<dyn RegionOwner>>,
    /// Where to accept links, if anywhere.
    pub listen: Option<String>,
    /// Times of the links.
    pub link: LinkConfig,
    /// Bounds of the prefill side.
    pub sender: SenderConfig,
    /// Bounds of the decode side.
    pub receiver: ReceiverConfig,
    /// Most links.
    pub peers_max: usize,
    /// Commands that may wait; a caller beyond blocks.
    pub commands_max: usize,
    /// Transport events that may wait; the transport blocks beyond.
    pub events_max: usize,
    /// Pause before the first reconnect, in microseconds; doubles with each failure.
    pub reconnect_us_min: u64,
    /// Longest pause before a reconnect.
    pub reconnect_us_max: u64,
    /// The time.
    pub clock: Arc<dyn Clock>,
}

impl DriverConfig {
    /// A configuration with the default bounds, no memory and no listener.
    #[must_use]
    pub fn new(
        role: Role,
        incarnation: Incarnation,
        fingerprint: Fingerprint,
        layout: String,
    ) -> Self {
        let (sender, receiver) = (SenderConfig::default(), ReceiverConfig::default());
        Self {
            role,
            incarnation,
            fingerprint,
            layout,
            limits: Limits {
                max_prompt_tokens: 1 << 20,
                max_items: 1 << 20,
                max_message_bytes: crate::wire::MAX_MESSAGE_BYTES as u32,
            },
            regions: Vec::new(),
            listen: None,
            link: LinkConfig::default(),
            sender,
            receiver,
            peers_max: 256,
            commands_max: 4096,
            events_max: 4096,
            reconnect_us_min: 50_000,
            reconnect_us_max: 5_000_000,
            clock: Arc::new(SystemClock::new()),
        }
    }
}

/// Why a driver did not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DriverError {
    /// The transport said no.
    #[error(transparent)]
    Transport(#[from] TransportError),
    /// No thread could be started.
    #[error("start thread: {0}")]
    Thread(io::Error),
    /// The layout description is too long for a `Hello`.
    #[error("layout description of {0} bytes, at most {MAX_LAYOUT_BYTES}")]
    Layout(usize),
}

/// The driver's thread has ended; the command was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the driver has ended")]
pub struct DriverGone;

enum Command {
    Start(Start),
    Cancel(AttemptId),
    Retarget(AttemptId, Vec<Target>),
    Ready(AttemptId, Vec<Item>),
    Finish(AttemptId, FinalRecord),
    Reject(AttemptId, u16, String),
    Connect(String),
    Disconnect(String),
    Shutdown,
}

#[derive(Debug, Default)]
struct Snapshot {
    peers: Vec<PeerSnapshot>,
    counters: Counters,
}

struct Inner {
    commands: Sender<Command>,
    /// Commands given on the driver's own thread, from an upcall; it must not wait for itself.
    inline: Arc<Mutex<VecDeque<Command>>>,
    snapshot: Arc<Mutex<Snapshot>>,
    thread_id: ThreadId,
    thread: Mutex<Option<JoinHandle<()>>>,
    listen: Option<String>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Inner {
    fn shutdown(&self) {
        if thread::current().id() == self.thread_id {
            lock(&self.inline).push_back(Command::Shutdown);
            return;
        }
        // The driver ends with its last command sender too, so a lost command changes nothing.
        let _ = self.commands.send(Command::Shutdown);
        if let Some(thread) = lock(&self.thread).take() {
            // A panic of the driver was reported by its thread.
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls into a driver, from any thread. The driver ends with [`Self::shutdown`] or the last handle.
#[derive(Clone)]
pub struct DriverHandle(Arc<Inner>);

impl fmt::Debug for DriverHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DriverHandle").field("listen", &self.0.listen).finish_non_exhaustive()
    }
}

impl DriverHandle {
    /// Where the driver accepts links, as peers have to name it.
    #[must_use]
    pub fn listen_address(&self) -> Option<&str> {
        self.0.listen.as_deref()
    }

    /// Keeps a link to `address` open, reconnecting after losses, until `disconnect`.
    ///
    /// # Errors
    /// The driver has ended; the same for all commands below.
    pub fn connect(&self, address: &str) -> Result<(), DriverGone> {
        self.command(Command::Connect(address.into()))
    }

    /// Gives up the link to `address` and cuts it.
    ///
    /// # Errors
    /// The driver has ended.
    pub fn disconnect(&self, address: &str) -> Result<(), DriverGone> {
        self.command(Command::Disconnect(address.into()))
    }

    /// Decode side: opens an attempt.
    ///
    /// # Errors
    /// The driver has ended.
    pub fn start(&self, start: Start) -> Result<(), DriverGone> {
        self.command(Command::Start(start))
    }

    /// Decode side: gives an attempt up.
    ///
    /// # Errors
    /// The driver has ended.
    pub fn cancel(&self, attempt: AttemptId) -> Result<(), DriverGone> {
        self.command(Command::Cancel(attempt))
    }

    /// Decode side: fresh targets after [`Upcall::Fresh`].
    ///
    /// # Errors
    /// The driver has ended.
    pub fn retarget(&self, attempt: AttemptId, targets: Vec<Target>) -> Result<(), DriverGone> {
        self.command(Command::Retarget(attempt, targets))
    }

    /// Prefill side: offers sealed, pinned pages.
    ///
    /// # Errors
    /// The driver has ended.
    pub fn ready(&self, attempt: AttemptId, items: Vec<Item>) -> Result<(), DriverGone> {
        self.command(Command::Ready(attempt, items))
    }

    /// Prefill side: all pages were offered.
    ///
    /// # Errors
    /// The driver has ended.
    pub fn finish(&self, attempt: AttemptId, record: FinalRecord) -> Result<(), DriverGone> {
        self.command(Command::Finish(attempt, record))
    }

    /// Prefill side: gives an attempt up.
    ///
    /// # Errors
    /// The driver has ended.
    pub fn reject(&self, attempt: AttemptId, code: u16, text: &str) -> Result<(), DriverGone> {
        self.command(Command::Reject(attempt, code, text.into()))
    }

    /// All links, at least as of the last upcall.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerSnapshot> {
        lock(&self.0.snapshot).peers.clone()
    }

    /// The totals, at least as of the last upcall.
    #[must_use]
    pub fn counters(&self) -> Counters {
        lock(&self.0.snapshot).counters
    }

    /// Says `Bye`, cuts all links and waits for the thread; open attempts end with the links.
    /// On the driver's own thread it only asks for the end.
    pub fn shutdown(&self) {
        self.0.shutdown();
    }

    fn command(&self, command: Command) -> Result<(), DriverGone> {
        if thread::current().id() == self.0.thread_id {
            lock(&self.0.inline).push_back(command);
            return Ok(());
        }
        self.0.commands.send(command).map_err(|_| DriverGone)
    }
}

/// A link that is kept open.
#[derive(Debug)]
struct Route {
    peer: Option<PeerId>,
    retry_at: Time,
    pause_us: u64,
    /// Whoever owns the endpoint has heard how this attempt went: the link was up, or refused.
    is_told: bool,
}

/// The driver; see the module text.
pub struct Driver {
    endpoint: Endpoint,
    transport: Box<dyn Transport>,
    clock: Arc<dyn Clock>,
    upcalls: UpcallSink,
    commands: Receiver<Command>,
    inline: Arc<Mutex<VecDeque<Command>>>,
    events: Receiver<TransportEvent>,
    verifier: Arc<dyn Verifier>,
    /// Gets that are not given to the transport yet, all of one peer.
    gets: (PeerId, Vec<Get>),
    snapshot: Arc<Mutex<Snapshot>>,
    routes: BTreeMap<String, Route>,
    reconnect_us: (u64, u64),
    /// Links that the transport reported and did not report lost.
    open: BTreeMap<PeerId, ()>,
    peers_changed: bool,
    is_ending: bool,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("transport", &self.transport).finish_non_exhaustive()
    }
}

/// Messages handled in one round before the other queues are looked at.
const BATCH: usize = 256;
/// How long a driver that ends waits for its peers to hang up, and then for the transport.
const LINGER_US: u64 = 200_000;

impl Driver {
    /// Starts a driver: makes the transport, registers the regions, listens, and starts the thread.
    ///
    /// # Errors
    /// The transport or the system said no; nothing is left running then.
    pub fn spawn(
        config: DriverConfig,
        transport: TransportFactory,
        verifier: Arc<dyn Verifier>,
        upcalls: UpcallSink,
    ) -> Result<DriverHandle, DriverError> {
        if config.layout.len() > MAX_LAYOUT_BYTES {
            return Err(DriverError::Layout(config.layout.len()));
        }
        let (event_sender, events) = bounded(config.events_max);
        let sink: EventSink = Arc::new(move |event| {
            // Without a driver nobody wants the news.
            let _ = event_sender.send(event);
        });
        let mut transport = transport(sink)?;
        let hasher = Arc::clone(&verifier);
        let hashing: Hashing = Arc::new(move || hasher.hash());
        transport.hash_with(hashing);
        for region in &config.regions {
            transport.register(Arc::clone(region))?;
        }
        let listen = match &config.listen {
            Some(address) => Some(transport.listen(address)?),
            None => None,
        };
        let (commands, command_queue) = bounded(config.commands_max);
        let inline = Arc::new(Mutex::new(VecDeque::new()));
        let snapshot = Arc::new(Mutex::new(Snapshot::default()));
        let driver = Self {
            endpoint: Endpoint::new(endpoint_config(&config, transport.name())),
            transport,
            clock: Arc::clone(&config.clock),
            upcalls,
            commands: command_queue,
            inline: Arc::clone(&inline),
            events,
            verifier,
            gets: (PeerId(0), Vec::new()),
            snapshot: Arc::clone(&snapshot),
            routes: BTreeMap::new(),
            reconnect_us: (config.reconnect_us_min, config.reconnect_us_max),
            open: BTreeMap::new(),
            peers_changed: false,
            is_ending: false,
        };
        let thread = thread::Builder::new()
            .name(String::from("pd-driver"))
            .spawn(move || driver.run())
            .map_err(DriverError::Thread)?;
        Ok(DriverHandle(Arc::new(Inner {
            commands,
            inline,
            snapshot,
            thread_id: thread.thread().id(),
            thread: Mutex::new(Some(thread)),
            listen,
        })))
    }

    fn run(mut self) {
        while !self.is_ending {
            self.settle();
            self.wait(None);
        }
        self.end();
    }

    /// Waits for the next input or the next due time and takes what there is.
    fn wait(&mut self, until: Option<Time>) {
        let now = self.clock.now();
        let due = self
            .endpoint
            .poll_timeout()
            .into_iter()
            .chain(self.routes.values().filter(|r| r.peer.is_none()).map(|r| r.retry_at))
            .chain(until)
            .min();
        let pause = due.map_or(Duration::from_secs(1), |due| Duration::from_micros(due.since(now)));
        select! {
            recv(self.commands) -> command => match command {
                Ok(command) => self.on_command(command),
                Err(_) => self.is_ending = true,
            },
            recv(self.events) -> event => if let Ok(event) = event {
                self.on_event(event);
            },
            default(pause) => {}
        }
        for _ in 0..BATCH {
            let Ok(event) = self.events.try_recv() else { break };
            self.on_event(event);
        }
        for _ in 0..BATCH {
            let Ok(command) = self.commands.try_recv() else { break };
            self.on_command(command);
        }
        let now = self.clock.now();
        self.endpoint.handle_timeout(now);
        self.reconnect(now);
    }

    /// Does everything that the endpoint wants and publishes the state.
    fn settle(&mut self) {
        self.act();
        let counters = self.endpoint.counters();
        let peers = std::mem::take(&mut self.peers_changed).then(|| self.endpoint.peers());
        let mut snapshot = lock(&self.snapshot);
        snapshot.counters = counters;
        if let Some(peers) = peers {
            snapshot.peers = peers;
        }
    }

    fn act(&mut self) {
        let now = self.clock.now();
        loop {
            self.drain(now);
            if !self.gets.1.is_empty() {
                self.begin_gets(now);
                continue;
            }
            let Some(command) = lock(&self.inline).pop_front() else { return };
            self.on_command(command);
        }
    }

    /// Does what the endpoint wants, but keeps gets back so that they begin together.
    fn drain(&mut self, now: Time) {
        while let Some(action) = self.endpoint.poll_action() {
            self.on_action(now, action);
        }
    }

    /// Gives the transport the gets that were kept back.
    fn begin_gets(&mut self, now: Time) {
        let (peer, gets) = (self.gets.0, std::mem::take(&mut self.gets.1));
        for (op, error) in self.transport.get_many(peer, gets) {
            let outcome = match error {
                TransportError::UnknownPeer(_) => GetOutcome::Lost,
                error => GetOutcome::Error(error.to_string()),
            };
            self.endpoint.handle_got(now, op, outcome);
        }
    }

    fn on_action(&mut self, now: Time, action: Action) {
        match action {
            Action::Transmit { peer, bytes } => match self.transport.send(peer, bytes) {
                // The loss of the link is on its way.
                Ok(()) | Err(TransportError::UnknownPeer(_)) => {}
                Err(error) => {
                    (self.upcalls)(Upcall::Event(format!("send to {peer}: {error}")));
                    self.transport.cut(peer);
                }
            },
            Action::Get { peer, get, .. } => {
                if self.gets.0 != peer && !self.gets.1.is_empty() {
                    self.begin_gets(now);
                }
                self.gets.0 = peer;
                self.gets.1.push(get);
            }
            // Pages are checked when their gets end; nobody vouches for another one.
            Action::Verify(page) => self.endpoint.handle_verified(now, page.op, false),
            Action::Cut { peer } => {
                self.peers_changed = true;
                self.transport.cut(peer);
            }
            Action::Upcall(upcall) => {
                if let Upcall::PeerUp { peer, .. } = &upcall {
                    self.peers_changed = true;
                    for route in self.routes.values_mut().filter(|r| r.peer == Some(*peer)) {
                        route.pause_us = self.reconnect_us.0;
                        route.is_told = true;
                    }
                }
                if let Upcall::Refused { address, .. } = &upcall
                    && let Some(route) = self.routes.get_mut(address)
                {
                    route.is_told = true;
                }
                // The snapshot is never older than the news.
                let mut snapshot = lock(&self.snapshot);
                snapshot.counters = self.endpoint.counters();
                if matches!(upcall, Upcall::PeerUp { .. } | Upcall::PeerDown { .. }) {
                    snapshot.peers = self.endpoint.peers();
                }
                drop(snapshot);
                (self.upcalls)(upcall);
            }
        }
    }

    fn on_ended(&mut self, now: Time, gets: Vec<Ended>) {
        let gets = gets.into_iter().map(|Ended { op, outcome, digest }| (op, outcome, digest));
        let verifier = &self.verifier;
        self.endpoint.handle_ended(now, gets, |page, digest| {
            // PD-V1 PD-V6
            let verify = || verifier.verify(page, digest);
            panic::catch_unwind(AssertUnwindSafe(verify)).unwrap_or(false)
        });
        self.act();
    }

    fn on_event(&mut self, event: TransportEvent) {
        let now = self.clock.now();
        match event {
            TransportEvent::PeerUp { peer, address, side } => {
                self.peers_changed = true;
                self.open.insert(peer, ());
                self.endpoint.handle_peer_up(now, peer, address, side);
            }
            TransportEvent::Message { peer, bytes } => {
                self.endpoint.handle_bytes(now, peer, &bytes);
            }
            TransportEvent::Ended { gets, .. } => return self.on_ended(now, gets),
            TransportEvent::PeerLost { peer, why } => {
                self.peers_changed = true;
                let was_up = self.open.remove(&peer).is_some();
                let route = self.routes.iter().find(|(_, route)| route.peer == Some(peer));
                let address = route.map(|(address, _)| address.clone());
                // Nobody else hears of a link that never came up, and this one never will. A
                // stranger at our own door is no news.
                let is_hopeless = match &why {
                    LostReason::Incompatible { .. } => true,
                    LostReason::Malformed(_) => address.is_some(),
                    _ => false,
                };
                let is_told = route.is_some_and(|(_, route)| route.is_told);
                if is_hopeless && !was_up {
                    let address = address.unwrap_or_default();
                    let (reason, text) = (RefuseReason::Protocol, why.to_string());
                    (self.upcalls)(Upcall::Refused { address, reason, text });
                } else if let Some(address) = address.filter(|_| !is_told) {
                    (self.upcalls)(Upcall::NotReached { address, text: why.to_string() });
                }
                self.endpoint.handle_peer_lost(now, peer, &why.to_string());
                let longest = self.reconnect_us.1;
                for route in self.routes.values_mut().filter(|r| r.peer == Some(peer)) {
                    route.peer = None;
                    route.retry_at = now.after(route.pause_us);
                    route.pause_us = route.pause_us.saturating_mul(2).min(longest);
                }
            }
        }
        self.act();
    }

    fn on_command(&mut self, command: Command) {
        let now = self.clock.now();
        match command {
            Command::Start(start) => self.endpoint.start(now, start),
            Command::Cancel(attempt) => self.endpoint.cancel(now, attempt),
            Command::Retarget(attempt, targets) => self.endpoint.retarget(now, attempt, targets),
            Command::Ready(attempt, items) => self.endpoint.ready(now, attempt, items),
            Command::Finish(attempt, record) => self.endpoint.finish(now, attempt, record),
            Command::Reject(attempt, code, text) => {
                self.endpoint.reject(now, attempt, code, &text);
            }
            Command::Connect(address) => {
                let pause_us = self.reconnect_us.0;
                let route = Route { peer: None, retry_at: now, pause_us, is_told: false };
                self.routes.entry(address).or_insert(route);
                self.reconnect(now);
            }
            Command::Disconnect(address) => {
                if let Some(Route { peer: Some(peer), .. }) = self.routes.remove(&address) {
                    self.transport.cut(peer);
                }
            }
            Command::Shutdown => self.is_ending = true,
        }
    }

    fn reconnect(&mut self, now: Time) {
        if self.is_ending {
            return;
        }
        let longest = self.reconnect_us.1;
        for (address, route) in &mut self.routes {
            if route.peer.is_some() || route.retry_at > now {
                continue;
            }
            match self.transport.connect(address) {
                Ok(peer) => (route.peer, route.is_told) = (Some(peer), false),
                Err(error) => {
                    route.retry_at = now.after(route.pause_us);
                    route.pause_us = route.pause_us.saturating_mul(2).min(longest);
                    let (address, text) = (address.clone(), error.to_string());
                    (self.upcalls)(Upcall::NotReached { address, text });
                }
            }
        }
    }

    /// Says `Bye`, waits a moment for the peers to hang up, cuts the rest.
    fn end(mut self) {
        self.routes.clear();
        self.commands = crossbeam_channel::never();
        self.endpoint.say_bye();
        self.settle();
        let bye_until = self.clock.now().after(LINGER_US);
        self.linger(bye_until);
        let open: Vec<PeerId> = self.open.keys().copied().collect();
        for peer in open {
            self.transport.cut(peer);
        }
        // Reports of lost links come as soon as their accesses have ended, which takes no longer
        // than the copy of one page.
        let cut_until = self.clock.now().after(25 * LINGER_US);
        self.linger(cut_until);
        let Self { events, transport, .. } = self;
        // In this order: a transport thread that waits in the sink is let go, then joined.
        drop(events);
        drop(transport);
    }

    fn linger(&mut self, until: Time) {
        while !self.open.is_empty() && self.clock.now() < until {
            self.wait(Some(until));
            self.settle();
        }
    }
}

fn endpoint_config(config: &DriverConfig, transport: &str) -> EndpointConfig {
    let hello = Hello {
        proto: PROTO_VERSION,
        incarnation: config.incarnation,
        fingerprint: config.fingerprint,
        layout: config.layout.clone(),
        role: config.role,
        limits: config.limits,
        regions: describe(&config.regions),
        transport: transport.into(),
    };
    EndpointConfig {
        hello,
        link: config.link,
        sender: config.sender,
        receiver: config.receiver,
        peers_max: config.peers_max,
    }
}

/// Whether a snapshot shows a link in use.
impl PeerSnapshot {
    /// Whether both sides agreed.
    #[must_use]
    pub fn is_up(&self) -> bool {
        self.state == LinkState::Up
    }
}
