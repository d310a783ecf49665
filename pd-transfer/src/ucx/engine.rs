//! The one thread that talks to UCX: takes commands, keeps a bounded number of gets under way, lets
//! UCX work for peers that read our memory, and sleeps when there is nothing to do.

use super::UcxError;
use super::hello::Card;
use super::job::{Batch, End, Next, RUNS_MAX, WORDS_BYTES};
use super::raw::{Event, NotBegun, RemoteRegion, Ucp};
use super::sys::{Api, Version};
use super::totals::Totals;
use crate::get::{Get, GetOutcome};
use crate::id::PeerId;
use crate::page_hash::{Careful, Hashing, plain};
use crate::socket::{Conn, lock};
use crate::transport::{
    Ended, EventSink, HeapRegion, LostReason, RegionOwner, TransportError, TransportEvent,
    guard_inside, inside,
};
use crate::wire::Extent;
use crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use rustix::event::EventfdFlags;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Batches under way at once, over all peers, and those of them whose data is under way. The others
/// wait for their guard words, and nothing stands still meanwhile.
const BATCHES_MAX: usize = 32;
const MOVING_MAX: usize = 8;
/// Commands taken before UCX gets its turn.
const COMMANDS_AT_ONCE: usize = 64;
/// Turns without anything to do before the thread lets others run between turns, and before it
/// sleeps: falling asleep and being woken for each transfer costs more than the transfer.
const IDLE_TURNS: u32 = 32;
const IDLE_TURNS_MAX: u32 = 256;
/// Longest sleep. Everything that matters wakes the thread; this is for what UCX does by itself.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// The same while gets are under way, in case a transport wakes nobody.
const SLEEP_BUSY_MAX: Duration = Duration::from_millis(10);
/// Mapped memory 0 of both sides holds guard words that landed, by batch; region `n` of the transport is
/// `n + 1`.
const WORDS: usize = 0;
/// A slot has so many tokens: one for its guard words, then one for each run.
const TOKENS: usize = 1 + RUNS_MAX;
/// Tokens from here on are of the first get of the peer with the rest as its number.
const FIRST_GETS: usize = BATCHES_MAX * TOKENS;
/// How long the first get of a link may take.
const OPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// What the thread is told.
enum Command {
    Register { memory: Arc<dyn RegionOwner>, answer: Sender<Result<(), UcxError>> },
    Open { conn: Arc<Conn>, card: Card, answer: Sender<Result<(), UcxError>> },
    Hash(Hashing),
    Gets { conn: Arc<Conn>, gets: Vec<Get> },
    Close { peer: PeerId, answer: Sender<()> },
    Stop,
}

/// Wakes the thread if it sleeps.
#[derive(Debug)]
struct Wake {
    fd: OwnedFd,
    is_asleep: AtomicBool,
}

/// The thread as the others see it.
#[derive(Debug)]
pub(super) struct Engine {
    commands: Sender<Command>,
    wake: Arc<Wake>,
    thread: Mutex<Option<JoinHandle<()>>>,
    version: Version,
    card: Arc<Mutex<Card>>,
}

/// Where the thread puts what it does.
struct Outputs {
    sink: EventSink,
    totals: Arc<Totals>,
    card: Arc<Mutex<Card>>,
}

impl Engine {
    /// Opens UCX on a thread of its own.
    pub(super) fn start(sink: EventSink, totals: Arc<Totals>) -> Result<Self, TransportError> {
        let api = Api::open()?;
        let io = |during| move |source| TransportError::Io { during, source };
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| io("create eventfd")(errno.into()))?;
        let wake = Arc::new(Wake { fd, is_asleep: AtomicBool::new(false) });
        // Gets are bounded by the receiver, the other commands wait for their answer.
        let (commands, queue) = unbounded();
        let card = Arc::new(Mutex::new(Card::default()));
        let outputs = Outputs { sink, totals, card: Arc::clone(&card) };
        let (ready, opened) = bounded(1);
        let theirs = Arc::clone(&wake);
        let thread = thread::Builder::new()
            .name(String::from("pd-ucx"))
            .spawn(move || match Turn::new(api, outputs) {
                Ok(turn) => {
                    // The other end waits for this.
                    let _ = ready.send(Ok(()));
                    turn.run(&queue, &theirs);
                }
                Err(error) => {
                    let _ = ready.send(Err(error));
                }
            })
            .map_err(io("start thread"))?;
        opened.recv().map_err(|_| UcxError::Ended)??;
        let (version, thread) = (api.version(), Mutex::new(Some(thread)));
        Ok(Self { commands, wake, thread, version, card })
    }

    pub(super) fn version(&self) -> Version {
        self.version
    }

    /// What peers are told of us.
    pub(super) fn card(&self) -> Card {
        lock(&self.card).clone()
    }

    fn tell(&self, command: Command) {
        // A thread that has ended answers nothing; who waits for an answer sees that.
        let _ = self.commands.send(command);
        if self.wake.is_asleep.swap(false, Ordering::SeqCst) {
            // It can only be full of earlier wake-ups.
            let _ = rustix::io::write(&self.wake.fd, &1_u64.to_ne_bytes());
        }
    }

    /// Maps a region and puts it on the card.
    pub(super) fn register(&self, memory: Arc<dyn RegionOwner>) -> Result<(), UcxError> {
        let (answer, answered) = bounded(1);
        self.tell(Command::Register { memory, answer });
        answered.recv().map_err(|_| UcxError::Ended)?
    }

    /// Makes an endpoint to a peer and reads a word through it: an endpoint alone says nothing,
    /// and UCX 1.13 aborts when a worker ends before its endpoints have found each other.
    pub(super) fn open(&self, conn: Arc<Conn>, card: Card) -> Result<(), UcxError> {
        let (answer, answered) = bounded(1);
        self.tell(Command::Open { conn, card, answer });
        answered.recv_timeout(OPEN_TIMEOUT).map_err(|_| UcxError::NoAnswer)?
    }

    /// What digests pages that land.
    pub(super) fn hash_with(&self, hashing: Hashing) {
        self.tell(Command::Hash(hashing));
    }

    /// Begins gets that the link has noted, as many as a batch takes.
    pub(super) fn get(&self, conn: Arc<Conn>, gets: Vec<Get>) {
        self.tell(Command::Gets { conn, gets });
    }

    /// Closes the endpoint of a peer; returns when no request of it is under way and its gets are
    /// answered.
    pub(super) fn close(&self, peer: PeerId) {
        let (answer, answered) = bounded(1);
        self.tell(Command::Close { peer, answer });
        // Without a thread there is no request either.
        let _ = answered.recv();
    }

    /// Ends the thread; every link is closed before.
    pub(super) fn stop(&self) {
        self.tell(Command::Stop);
        if let Some(thread) = lock(&self.thread).take() {
            // A panic was reported by the thread.
            let _ = thread.join();
        }
    }
}

fn first_get(text: String) -> UcxError {
    UcxError::Call { function: "first ucp_get_nbx", text }
}

/// Maps memory and puts it on the card.
fn map(ucp: &mut Ucp, outputs: &Outputs, memory: Arc<dyn RegionOwner>) -> Result<(), UcxError> {
    let (base, bytes) = (memory.base().addr() as u64, memory.len());
    let rkey = ucp.map(memory)?;
    lock(&outputs.card).regions.push(RemoteRegion { base, bytes, rkey });
    Ok(())
}

/// A peer with an endpoint.
struct Peer {
    conn: Arc<Conn>,
    /// Who waits for the first get.
    opening: Option<Sender<Result<(), UcxError>>>,
    /// Who waits for the end of the endpoint.
    closing: Option<Sender<()>>,
}

struct Running {
    conn: Arc<Conn>,
    batch: Batch,
}

/// What the thread owns. Fields are dropped in order: UCX ends before the words that it writes.
struct Turn {
    ucp: Ucp,
    outputs: Outputs,
    words: Arc<HeapRegion>,
    peers: BTreeMap<PeerId, Peer>,
    regions: Vec<Arc<dyn RegionOwner>>,
    hash: Careful,
    waiting: VecDeque<(Arc<Conn>, Vec<Get>)>,
    /// By slot, which is the token of their requests and the place of their guard words.
    batches: Vec<Option<Running>>,
    free: Vec<usize>,
    events: Vec<Event>,
    is_ending: bool,
}

impl Turn {
    fn new(api: &'static Api, outputs: Outputs) -> Result<Self, UcxError> {
        let mut ucp = Ucp::new(api)?;
        // Room for each batch, and a word for first gets, whose value does not matter.
        let words = HeapRegion::new(BATCHES_MAX * WORDS_BYTES as usize + 8);
        lock(&outputs.card).address = ucp.address()?;
        let memory = Arc::clone(&words) as Arc<dyn RegionOwner>;
        map(&mut ucp, &outputs, memory)?;
        Ok(Self {
            ucp,
            outputs,
            words,
            peers: BTreeMap::new(),
            regions: Vec::new(),
            hash: Careful::new(plain()),
            waiting: VecDeque::new(),
            batches: (0..BATCHES_MAX).map(|_| None).collect(),
            free: (0..BATCHES_MAX).rev().collect(),
            events: Vec::new(),
            is_ending: false,
        })
    }

    fn run(mut self, commands: &Receiver<Command>, wake: &Wake) {
        let mut idle_turns = 0;
        while !self.is_ending {
            if self.turn(commands) {
                idle_turns = 0;
                continue;
            }
            idle_turns += 1;
            if idle_turns < IDLE_TURNS_MAX {
                if idle_turns > IDLE_TURNS {
                    thread::yield_now();
                }
                continue;
            }
            // Said before the last look at the queue: a command that comes later wakes us.
            wake.is_asleep.store(true, Ordering::SeqCst);
            if commands.is_empty() {
                let is_busy = self.free.len() < BATCHES_MAX;
                self.ucp.wait(wake.fd.as_fd(), if is_busy { SLEEP_BUSY_MAX } else { SLEEP_MAX });
            }
            wake.is_asleep.store(false, Ordering::SeqCst);
            // Empty if nobody woke us.
            let _ = rustix::io::read(&wake.fd, &mut [0; 8]);
        }
    }

    /// Does what there is to do; false if there was nothing.
    fn turn(&mut self, commands: &Receiver<Command>) -> bool {
        let mut has_worked = false;
        for command in commands.try_iter().take(COMMANDS_AT_ONCE) {
            has_worked = true;
            self.handle(command);
        }
        has_worked |= self.begin_batches();
        let mut events = std::mem::take(&mut self.events);
        has_worked |= self.ucp.progress(&mut events);
        for event in events.drain(..) {
            self.handle_event(event);
        }
        self.events = events;
        has_worked
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Register { memory, answer } => {
                self.regions.push(Arc::clone(&memory));
                // The caller waits for the answer, as the ones below do.
                let _ = answer.send(map(&mut self.ucp, &self.outputs, memory));
            }
            Command::Open { conn, card, answer } => self.open(conn, card, answer),
            Command::Hash(hashing) => self.hash = Careful::new(hashing),
            Command::Gets { conn, gets } => self.waiting.push_back((conn, gets)),
            Command::Close { peer, answer } => match self.peers.get_mut(&peer) {
                Some(entry) if self.ucp.close(peer.0) => {
                    entry.opening = None;
                    entry.closing = Some(answer);
                }
                // There never was an endpoint, or it is gone.
                _ => {
                    self.peers.remove(&peer);
                    let _ = answer.send(());
                }
            },
            Command::Stop => self.is_ending = true,
        }
    }

    fn open(&mut self, conn: Arc<Conn>, card: Card, answer: Sender<Result<(), UcxError>>) {
        let peer = conn.peer;
        let begun = self.ucp.connect(peer.0, &card.address, card.regions).and_then(|()| {
            let (source, target) = ((WORDS, 0), (WORDS, BATCHES_MAX as u64 * WORDS_BYTES));
            self.ucp
                .get(peer.0, source, target, 8, FIRST_GETS + peer.0 as usize)
                .map_err(|(NotBegun::Refused(text) | NotBegun::Broken(text))| first_get(text))
        });
        let mut entry = Peer { conn, opening: None, closing: None };
        match begun {
            Ok(false) => entry.opening = Some(answer),
            done => {
                let _ = answer.send(done.map(|_| ()));
            }
        }
        self.peers.insert(peer, entry);
    }

    fn begin_batches(&mut self) -> bool {
        let mut has_begun = false;
        while !self.waiting.is_empty()
            && !self.free.is_empty()
            && self.moving() < MOVING_MAX
            && let Some((conn, gets)) = self.waiting.pop_front()
        {
            if conn.has_ended() {
                let lost = |get: Get| Ended::without(get.op, GetOutcome::Lost);
                self.report(&conn, gets.into_iter().map(lost).collect());
                continue;
            }
            let Some(slot) = self.free.pop() else { continue };
            let extents: usize = gets.iter().map(|get| get.source.len()).sum();
            Totals::add(&self.outputs.totals.gets, gets.len() as u64);
            Totals::add(&self.outputs.totals.extents, extents as u64);
            let is_up = self.peers.get(&conn.peer).is_some_and(|peer| peer.opening.is_none());
            let batch = Batch::new(gets, |get| {
                if is_up {
                    self.check(conn.peer, get)
                } else {
                    Err("the link is not up yet".into())
                }
            });
            self.batches[slot] = Some(Running { conn, batch });
            self.advance(slot);
            has_begun = true;
        }
        has_begun
    }

    /// Batches whose data is under way.
    fn moving(&self) -> usize {
        self.batches.iter().flatten().filter(|running| running.batch.is_moving()).count()
    }

    /// Whether the peer has what a get names.
    // PD-T4
    fn check(&self, peer: PeerId, get: &Get) -> Result<(), String> {
        let region = |region: crate::wire::RegionId| {
            let bytes = self.ucp.remote_bytes(peer.0, WORDS + 1 + region.0 as usize);
            bytes.ok_or_else(|| format!("the peer has no region {}", region.0))
        };
        let (guards, source) = (region(get.guard.region)?, region(get.source_region)?);
        if !guard_inside(&get.guard, guards) {
            let at = get.guard.offset;
            return Err(format!(
                "guard at {at} is outside a region of {guards} bytes, or misaligned"
            ));
        }
        match get.source.iter().find(|extent| !inside(extent, source)) {
            Some(Extent { offset, len }) => {
                Err(format!("{offset} + {len} is outside a region of {source} bytes"))
            }
            None => Ok(()),
        }
    }

    fn handle_event(&mut self, event: Event) {
        match event {
            Event::Got { token, error } if token >= FIRST_GETS => {
                let peer = self.peers.get_mut(&PeerId((token - FIRST_GETS) as u64));
                if let Some(answer) = peer.and_then(|peer| peer.opening.take()) {
                    let _ = answer.send(error.map_or(Ok(()), |text| Err(first_get(text))));
                }
            }
            Event::Got { token, error } => {
                let slot = token / TOKENS;
                match error {
                    None => self.landed(token),
                    Some(error) => {
                        if let Some(running) = &mut self.batches[slot] {
                            running.lost(&error);
                        }
                    }
                }
                self.advance(slot);
            }
            Event::Broken { endpoint, error } => {
                if let Some(peer) = self.peers.get(&PeerId(endpoint)) {
                    // Its end closes the endpoint.
                    peer.conn.abort(LostReason::Io(format!("ucx: {error}")));
                }
            }
            Event::Closed { endpoint } => {
                let peer = self.peers.remove(&PeerId(endpoint));
                if let Some(answer) = peer.and_then(|peer| peer.closing) {
                    let _ = answer.send(());
                }
            }
        }
    }

    /// A transfer of a batch ended well.
    fn landed(&mut self, token: usize) {
        let Self { batches, hash, regions, .. } = self;
        let Some(Running { batch, .. }) = &mut batches[token / TOKENS] else { return };
        let digest = |get: &Get| {
            let region = regions.get(get.target_region.0 as usize);
            let is_read = region.is_some_and(|region| hash.read(&**region, &get.target).is_ok());
            hash.finish().filter(|_| is_read)
        };
        match (token % TOKENS).checked_sub(1) {
            Some(run) => batch.handle_run(run, digest),
            None => batch.handle_words(),
        }
    }

    /// Begins whatever the batch in `slot` can do now, and answers it if it is over.
    fn advance(&mut self, slot: usize) {
        let words_at = slot as u64 * WORDS_BYTES;
        loop {
            let Some(running) = self.batches[slot].as_mut() else { return };
            let words = &*self.words;
            let next = running.batch.poll_next(|at| words.load(words_at + at).unwrap_or_default());
            let region = |region: crate::wire::RegionId| WORDS + 1 + region.0 as usize;
            let token = slot * TOKENS;
            let (token, source, target, bytes) = match next {
                Next::Wait => return,
                Next::Over => return self.answer(slot),
                Next::Words(span) => {
                    let source = (region(span.region), span.offset);
                    (token, source, (WORDS, words_at + span.at), span.bytes)
                }
                Next::Data(number, run) => {
                    let source = (region(run.source_region), run.source);
                    (token + 1 + number, source, (region(run.target_region), run.target), run.bytes)
                }
            };
            match self.ucp.get(running.conn.peer.0, source, target, bytes, token) {
                Ok(is_done) => {
                    Totals::add(&self.outputs.totals.posts, 1);
                    Totals::add(&self.outputs.totals.bytes_posted, bytes);
                    if is_done {
                        self.landed(token);
                    }
                }
                Err(NotBegun::Refused(text)) => running.batch.handle_refused(&text),
                Err(NotBegun::Broken(text)) => running.lost(&text),
            }
        }
    }

    fn answer(&mut self, slot: usize) {
        let Some(Running { conn, batch }) = self.batches[slot].take() else { return };
        self.free.push(slot);
        let mut gets = Vec::new();
        for (get, end, digest) in batch.into_ends() {
            gets.push(match end {
                End::Done => Ended::done(get.op, digest),
                End::Stale => Ended::without(get.op, GetOutcome::Stale),
                End::Failed(error) => Ended::without(get.op, GetOutcome::Error(error)),
                End::Lost => Ended::without(get.op, GetOutcome::Lost),
            });
        }
        self.report(&conn, gets);
    }

    fn report(&self, conn: &Conn, gets: Vec<Ended>) {
        let count = gets.len();
        (self.outputs.sink)(TransportEvent::Ended { peer: conn.peer, gets });
        conn.put_back(count);
    }
}

impl Running {
    /// The link is broken; its loss has to follow.
    fn lost(&mut self, error: &str) {
        self.batch.handle_lost();
        self.conn.abort(LostReason::Io(format!("ucx: {error}")));
    }
}
