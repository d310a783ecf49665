//! A node of the hand-off without its threads: links, sender and receiver behind one set of calls.
//!
//! Events go in through `handle_*` and the calls of the upper layer, actions come out of
//! [`Endpoint::poll_action`]. Time is passed in. The driver, the simulator and tests run the same
//! code.

use crate::counters::Counters;
use crate::get::{Get, GetOutcome};
use crate::id::{OpId, PeerId, Time};
use crate::link::{CloseReason, Link, LinkConfig, LinkOutput, Side};
use crate::receiver::{
    FailReason, PageFault, Receiver, ReceiverConfig, ReceiverOutput, RetargetError, Start,
    StartError, Target, Verify,
};
use crate::sender::{OfferError, Proof, Sender, SenderConfig, SenderOutput};
use crate::states::LinkState;
use crate::wire::{
    AttemptId, FinalRecord, Hello, Incarnation, Item, Key, Limits, Message, RefuseReason, Role,
};
use alloc::collections::{BTreeMap, VecDeque};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

/// Everything an [`Endpoint`] is made of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct EndpointConfig {
    /// Who this node is. The role decides whether there is a sender, a receiver or both.
    pub hello: Hello,
    /// Times of the links.
    pub link: LinkConfig,
    /// Bounds of the prefill side.
    pub sender: SenderConfig,
    /// Bounds of the decode side.
    pub receiver: ReceiverConfig,
    /// Most links; one more is refused with [`RefuseReason::Busy`].
    pub peers_max: usize,
}

/// News for the upper layer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Upcall {
    /// Prefill side: compute this; see [`SenderOutput::Requested`].
    Requested {
        /// The attempt.
        attempt: AttemptId,
        /// Who wants it.
        peer: PeerId,
        /// As passed to `start`.
        request: Vec<u8>,
        /// Prefix blocks that the other side has.
        have: u32,
    },
    /// Prefill side: stop computing; see [`SenderOutput::Cancelled`].
    Cancelled {
        /// The attempt.
        attempt: AttemptId,
    },
    /// Prefill side: unpin the pages; see [`SenderOutput::Release`].
    Release {
        /// The attempt.
        attempt: AttemptId,
        /// Why.
        proof: Proof,
    },
    /// Prefill side: an alarm; see [`SenderOutput::Overdue`].
    Overdue {
        /// The attempt.
        attempt: AttemptId,
        /// How long it is in its state, in microseconds.
        held_us: u64,
    },
    /// Prefill side: pages, a record or a rejection were not taken, the attempt is unchanged.
    NotOffered {
        /// The attempt.
        attempt: AttemptId,
        /// Why.
        error: OfferError,
    },
    /// Decode side: a page is not what was offered; see [`ReceiverOutput::Wrong`].
    Wrong {
        /// The attempt.
        attempt: AttemptId,
        /// From whom it came.
        peer: PeerId,
        /// The page.
        key: Key,
        /// What is wrong.
        fault: PageFault,
    },
    /// Decode side: quarantine these targets, give fresh ones; see [`ReceiverOutput::Fresh`].
    Fresh {
        /// The attempt.
        attempt: AttemptId,
        /// Groups with all their keys.
        groups: Vec<(u32, Vec<Key>)>,
    },
    /// Decode side: targets were not taken; the caller still owns them.
    NotRetargeted {
        /// The attempt.
        attempt: AttemptId,
        /// Why.
        error: RetargetError,
    },
    /// Decode side: all pages arrived and were verified; see [`ReceiverOutput::Completed`].
    Completed {
        /// The attempt.
        attempt: AttemptId,
        /// The sender's last word.
        record: FinalRecord,
    },
    /// Decode side: given up; see [`ReceiverOutput::Failed`].
    Failed {
        /// The attempt.
        attempt: AttemptId,
        /// Why.
        why: FailReason,
    },
    /// Decode side, after `Failed`: all targets may be released.
    Quiet {
        /// The attempt.
        attempt: AttemptId,
    },
    /// A link is up and fits.
    PeerUp {
        /// Its name from now on.
        peer: PeerId,
        /// Where it is, as far as the transport knows.
        address: String,
        /// The process behind it.
        incarnation: Incarnation,
        /// What it does.
        role: Role,
        /// What it accepts.
        limits: Limits,
    },
    /// A link that was up is gone; nothing of the peer touches our memory any more.
    PeerDown {
        /// Its name.
        peer: PeerId,
        /// Where it was.
        address: String,
        /// Why.
        why: String,
        /// Whether one of the two sides had said that it is leaving; otherwise it is a loss.
        had_bye: bool,
    },
    /// A link was refused by either side.
    Refused {
        /// Where the peer is.
        address: String,
        /// Why.
        reason: RefuseReason,
        /// For people; for a layout it holds both descriptions, for a protocol both versions.
        text: String,
    },
    /// A link that is to be kept open ended before it was up. It is tried again.
    NotReached {
        /// Where to.
        address: String,
        /// What happened.
        text: String,
    },
    /// Worth a line in a log.
    Event(String),
}

/// What the owner of an endpoint has to do.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Give these bytes to the transport.
    Transmit {
        /// To whom.
        peer: PeerId,
        /// One envelope.
        bytes: Vec<u8>,
    },
    /// Start a get.
    Get {
        /// From whom.
        peer: PeerId,
        /// For which attempt.
        attempt: AttemptId,
        /// What.
        get: Get,
    },
    /// Check a page.
    Verify(Verify),
    /// Cut a link; the transport answers with its loss.
    Cut {
        /// Which.
        peer: PeerId,
    },
    /// Tell the upper layer.
    Upcall(Upcall),
}

/// Links beyond the limit that are kept for the moment that a refusal takes; more are cut.
const REFUSING_MAX: usize = 16;

#[derive(Clone, Debug, Hash)]
struct PeerEntry {
    link: Link,
    address: String,
    is_up: bool,
    /// Only here to be refused: there is no room for it.
    is_extra: bool,
    hello: Option<Hello>,
    close: Option<CloseReason>,
}

/// A link as seen from outside.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PeerSnapshot {
    /// Its name.
    pub peer: PeerId,
    /// Where it is.
    pub address: String,
    /// Its state.
    pub state: LinkState,
    /// Who it said it is, once it is up.
    pub hello: Option<Hello>,
}

/// See the module text.
#[derive(Clone, Debug, Hash)]
pub struct Endpoint {
    config: EndpointConfig,
    peers: BTreeMap<PeerId, PeerEntry>,
    sender: Option<Sender>,
    receiver: Option<Receiver>,
    actions: VecDeque<Action>,
    /// Whether `Bye` was said on every link.
    is_leaving: bool,
    /// Of links that are gone, and of failures outside of the machines.
    counters: Counters,
}

impl Endpoint {
    /// An endpoint without links.
    #[must_use]
    pub fn new(config: EndpointConfig) -> Self {
        let role = config.hello.role;
        let sender = role.sends().then(|| Sender::new(config.sender));
        let receiver = role.receives().then(|| Receiver::new(config.receiver));
        Self {
            config,
            peers: BTreeMap::new(),
            sender,
            receiver,
            actions: VecDeque::new(),
            is_leaving: false,
            counters: Counters::default(),
        }
    }

    /// The totals of all parts.
    #[must_use]
    pub fn counters(&self) -> Counters {
        let mut total = self.counters;
        for entry in self.peers.values() {
            total = total.plus(entry.link.counters());
        }
        if let Some(sender) = &self.sender {
            total = total.plus(sender.counters());
        }
        if let Some(receiver) = &self.receiver {
            total = total.plus(receiver.counters());
        }
        total
    }

    /// All links.
    #[must_use]
    pub fn peers(&self) -> Vec<PeerSnapshot> {
        let snapshot = |(peer, entry): (&PeerId, &PeerEntry)| PeerSnapshot {
            peer: *peer,
            address: entry.address.clone(),
            state: entry.link.state(),
            hello: entry.hello.clone(),
        };
        self.peers.iter().map(snapshot).collect()
    }

    /// The prefill side, if the role has one.
    #[must_use]
    pub const fn sender(&self) -> Option<&Sender> {
        self.sender.as_ref()
    }

    /// The decode side, if the role has one.
    #[must_use]
    pub const fn receiver(&self) -> Option<&Receiver> {
        self.receiver.as_ref()
    }

    /// The transport has a new link.
    pub fn handle_peer_up(&mut self, now: Time, peer: PeerId, address: String, side: Side) {
        if self.peers.contains_key(&peer) {
            self.upcall(Upcall::Event(format!("{address}: {peer} names two links, cut")));
            self.actions.push_back(Action::Cut { peer });
            return;
        }
        let open = self.peers.values().filter(|entry| !entry.is_extra).count();
        let extra = self.peers.len() - open;
        let is_full = open >= self.config.peers_max;
        // PD-L6
        if is_full && (side == Side::Connector || extra >= REFUSING_MAX) {
            let text = format!("{open} links are open, at most {}", self.config.peers_max);
            let reason = RefuseReason::Busy;
            self.upcall(Upcall::Refused { address, reason, text });
            self.actions.push_back(Action::Cut { peer });
            return;
        }
        let (config, hello) = (self.config.link, self.config.hello.clone());
        let link = if is_full {
            Link::full(
                now,
                config,
                hello,
                format!("the refusing side has {open} links, no more fit"),
            )
        } else {
            Link::new(now, config, hello, side)
        };
        let is_extra = is_full;
        let entry = PeerEntry { link, address, is_up: false, is_extra, hello: None, close: None };
        self.peers.insert(peer, entry);
        self.pump_link(now, peer);
    }

    /// The transport has bytes of one envelope.
    pub fn handle_bytes(&mut self, now: Time, peer: PeerId, bytes: &[u8]) {
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.link.handle_bytes(now, bytes);
            self.pump_link(now, peer);
        }
    }

    /// The transport lost a link; the peer's accesses to our memory have ended.
    pub fn handle_peer_lost(&mut self, now: Time, peer: PeerId, why: &str) {
        let Some(entry) = self.peers.remove(&peer) else { return };
        self.counters = self.counters.plus(entry.link.counters());
        if entry.is_up {
            if let Some(sender) = &mut self.sender {
                sender.peer_lost(peer);
            }
            if let Some(receiver) = &mut self.receiver {
                receiver.peer_lost(peer);
            }
            self.pump_machines(now);
            let had_bye = self.is_leaving || entry.close == Some(CloseReason::Bye);
            let why = entry.close.map_or_else(|| why.to_string(), |reason| reason.to_string());
            self.upcall(Upcall::PeerDown { peer, address: entry.address, why, had_bye });
        }
    }

    /// A get ended.
    pub fn handle_got(&mut self, now: Time, op: OpId, outcome: GetOutcome) {
        if let Some(receiver) = &mut self.receiver {
            receiver.handle_got(now, op, outcome);
        }
        self.pump_machines(now);
    }

    /// Gets ended, and the pages of those that ended well are checked at once: `check` is asked
    /// with what came along with the get. See [`Receiver::handle_landed`].
    pub fn handle_ended<T>(
        &mut self,
        now: Time,
        gets: impl IntoIterator<Item = (OpId, GetOutcome, T)>,
        mut check: impl FnMut(&Verify, T) -> bool,
    ) {
        if let Some(receiver) = &mut self.receiver {
            for (op, outcome, what) in gets {
                match outcome {
                    GetOutcome::Done => receiver.handle_landed(now, op, |page| check(page, what)),
                    other => receiver.handle_got(now, op, other),
                }
            }
        }
        self.pump_machines(now);
    }

    /// A verification ended.
    pub fn handle_verified(&mut self, now: Time, op: OpId, ok: bool) {
        if let Some(receiver) = &mut self.receiver {
            receiver.handle_verified(now, op, ok);
        }
        self.pump_machines(now);
    }

    /// Acts on everything that is due; early calls do nothing.
    pub fn handle_timeout(&mut self, now: Time) {
        let due: Vec<PeerId> = self
            .peers
            .iter()
            .filter_map(|(peer, entry)| {
                entry.link.poll_timeout().is_some_and(|at| at <= now).then_some(*peer)
            })
            .collect();
        for peer in due {
            if let Some(entry) = self.peers.get_mut(&peer) {
                entry.link.handle_timeout(now);
            }
            self.pump_link(now, peer);
        }
        if let Some(sender) = &mut self.sender {
            sender.handle_timeout(now);
        }
        if let Some(receiver) = &mut self.receiver {
            receiver.handle_timeout(now);
        }
        self.pump_machines(now);
    }

    /// When [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        let links = self.peers.values().filter_map(|entry| entry.link.poll_timeout());
        let sender = self.sender.as_ref().and_then(Sender::poll_timeout);
        let receiver = self.receiver.as_ref().and_then(Receiver::poll_timeout);
        links.chain(sender).chain(receiver).min()
    }

    /// The next thing to do.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Decode side: opens an attempt. If it can't be opened, `Failed` and `Quiet` follow.
    pub fn start(&mut self, now: Time, start: Start) {
        let attempt = start.attempt;
        let result = match &mut self.receiver {
            Some(receiver) => receiver.start(now, start),
            None => Err(StartError::NoReceiver),
        };
        if let Err(error) = result {
            self.counters.attempts_failed += 1;
            self.counters.failed_not_started += 1;
            self.upcall(Upcall::Failed { attempt, why: FailReason::NotStarted(error) });
            self.upcall(Upcall::Quiet { attempt });
        }
        self.pump_machines(now);
    }

    /// Decode side: gives an attempt up.
    pub fn cancel(&mut self, now: Time, attempt: AttemptId) {
        if let Some(receiver) = &mut self.receiver {
            receiver.cancel(now, attempt);
        }
        self.pump_machines(now);
    }

    /// Decode side: fresh targets after `Fresh`; `NotRetargeted` follows if they don't fit.
    pub fn retarget(&mut self, now: Time, attempt: AttemptId, targets: Vec<Target>) {
        let result = match &mut self.receiver {
            Some(receiver) => receiver.retarget(now, attempt, targets),
            None => Err(RetargetError::NoReceiver),
        };
        if let Err(error) = result {
            self.upcall(Upcall::NotRetargeted { attempt, error });
        }
        self.pump_machines(now);
    }

    /// Prefill side: offers sealed, pinned pages; `NotOffered` follows if they are not taken.
    pub fn ready(&mut self, now: Time, attempt: AttemptId, items: Vec<Item>) {
        self.offer(now, attempt, |sender| sender.ready(now, attempt, items));
    }

    /// Prefill side: all pages were offered; `NotOffered` follows if the record does not fit.
    pub fn finish(&mut self, now: Time, attempt: AttemptId, record: FinalRecord) {
        self.offer(now, attempt, |sender| sender.finish(now, attempt, record));
    }

    /// Prefill side: gives an attempt up.
    pub fn reject(&mut self, now: Time, attempt: AttemptId, code: u16, text: &str) {
        self.offer(now, attempt, |sender| sender.reject(now, attempt, code, text));
    }

    /// Says `Bye` on every link.
    // PD-L15
    pub fn say_bye(&mut self) {
        self.is_leaving = true;
        let incarnation = self.config.hello.incarnation;
        let peers: Vec<PeerId> = self.peers.keys().copied().collect();
        for peer in peers {
            // A `Bye` always fits; only messages of an attempt give an error.
            let _ = self.send(peer, &Message::Bye { incarnation });
        }
    }

    fn offer(
        &mut self,
        now: Time,
        attempt: AttemptId,
        call: impl FnOnce(&mut Sender) -> Result<(), OfferError>,
    ) {
        let result = match &mut self.sender {
            Some(sender) => call(sender),
            None => Err(OfferError::Ended(attempt)),
        };
        if let Err(error) = result {
            self.upcall(Upcall::NotOffered { attempt, error });
        }
        self.pump_machines(now);
    }

    fn pump_link(&mut self, now: Time, peer: PeerId) {
        while let Some(output) =
            self.peers.get_mut(&peer).and_then(|entry| entry.link.poll_output())
        {
            match output {
                LinkOutput::Transmit(bytes) => {
                    self.actions.push_back(Action::Transmit { peer, bytes });
                }
                LinkOutput::Up(hello) => self.on_up(peer, hello),
                LinkOutput::Deliver(message) => self.deliver(now, peer, message),
                LinkOutput::Refused { reason, text } => {
                    let address =
                        self.peers.get(&peer).map_or_else(String::new, |e| e.address.clone());
                    self.upcall(Upcall::Refused { address, reason, text });
                }
                LinkOutput::Close(reason) => {
                    if let Some(entry) = self.peers.get_mut(&peer) {
                        let text = format!("{} at {}: {reason}", peer, entry.address);
                        let is_loss = reason != CloseReason::Bye;
                        entry.close = Some(reason);
                        // A peer that says that it leaves is told of by `PeerDown` alone.
                        if is_loss {
                            self.upcall(Upcall::Event(text));
                        }
                    }
                    self.actions.push_back(Action::Cut { peer });
                }
            }
        }
    }

    fn on_up(&mut self, peer: PeerId, hello: Hello) {
        let Some(entry) = self.peers.get_mut(&peer) else { return };
        let address = entry.address.clone();
        entry.is_up = true;
        entry.hello = Some(hello.clone());
        if let Some(receiver) = &mut self.receiver
            && hello.role.sends()
        {
            // PD-L16
            receiver.peer_up(peer, hello.limits, &hello.regions);
        }
        if let Some(sender) = &mut self.sender
            && hello.role.receives()
        {
            sender.peer_up(peer);
        }
        let Hello { incarnation, role, limits, .. } = hello;
        self.upcall(Upcall::PeerUp { peer, address, incarnation, role, limits });
    }

    fn deliver(&mut self, now: Time, peer: PeerId, message: Message) {
        let for_sender = matches!(
            message,
            Message::Want { .. }
                | Message::Resume { .. }
                | Message::Cancel { .. }
                | Message::Done { .. }
                | Message::Failed { .. }
        );
        match (for_sender, &mut self.sender, &mut self.receiver) {
            (true, Some(sender), _) => sender.handle_message(now, peer, message),
            (false, _, Some(receiver)) => receiver.handle_message(now, peer, message),
            (true, None, _) | (false, _, None) => {
                self.counters.dropped_late += 1;
                let name = message.name();
                self.upcall(Upcall::Event(format!("{peer}: {name} is not for this role")));
            }
        }
        self.pump_machines(now);
    }

    fn pump_machines(&mut self, now: Time) {
        while let Some(output) = self.sender.as_mut().and_then(Sender::poll_output) {
            match output {
                SenderOutput::Send { peer, message } => {
                    if let Err((attempt, text)) = self.send(peer, &message)
                        && let Some(sender) = &mut self.sender
                    {
                        // A second failure means that the attempt ended; nothing is left to say.
                        // PD-S17
                        let _ = sender.reject(now, attempt, crate::wire::code::INTERNAL, &text);
                    }
                }
                SenderOutput::Requested { attempt, peer, request, have } => {
                    self.upcall(Upcall::Requested { attempt, peer, request, have });
                }
                SenderOutput::Cancelled { attempt } => self.upcall(Upcall::Cancelled { attempt }),
                SenderOutput::Release { attempt, proof } => {
                    self.upcall(Upcall::Release { attempt, proof });
                }
                SenderOutput::Overdue { attempt, held_us } => {
                    self.upcall(Upcall::Overdue { attempt, held_us });
                }
                SenderOutput::Event(text) => self.upcall(Upcall::Event(text)),
            }
        }
        while let Some(output) = self.receiver.as_mut().and_then(Receiver::poll_output) {
            match output {
                ReceiverOutput::Send { peer, message } => {
                    if let Err((attempt, text)) = self.send(peer, &message) {
                        self.upcall(Upcall::Event(text));
                        if let Some(receiver) = &mut self.receiver {
                            receiver.cancel(now, attempt);
                        }
                    }
                }
                ReceiverOutput::Get { peer, attempt, get } => {
                    self.actions.push_back(Action::Get { peer, attempt, get });
                }
                ReceiverOutput::Verify(verify) => self.actions.push_back(Action::Verify(verify)),
                ReceiverOutput::Wrong { attempt, peer, key, fault } => {
                    self.upcall(Upcall::Wrong { attempt, peer, key, fault });
                }
                ReceiverOutput::Fresh { attempt, groups } => {
                    self.upcall(Upcall::Fresh { attempt, groups });
                }
                ReceiverOutput::Completed { attempt, record } => {
                    self.upcall(Upcall::Completed { attempt, record });
                }
                ReceiverOutput::Failed { attempt, why } => {
                    self.upcall(Upcall::Failed { attempt, why });
                }
                ReceiverOutput::Quiet { attempt } => self.upcall(Upcall::Quiet { attempt }),
                ReceiverOutput::Event(text) => self.upcall(Upcall::Event(text)),
            }
        }
    }

    /// Puts a message on a link. A message that the format can't carry gives back its attempt.
    fn send(&mut self, peer: PeerId, message: &Message) -> Result<(), (AttemptId, String)> {
        let Some(entry) = self.peers.get_mut(&peer) else { return Ok(()) };
        match entry.link.seal(message) {
            Ok(Some(bytes)) => self.actions.push_back(Action::Transmit { peer, bytes }),
            Ok(None) => {}
            Err(error) => {
                if let Some(attempt) = message.attempt() {
                    return Err((attempt, error.to_string()));
                }
            }
        }
        Ok(())
    }

    fn upcall(&mut self, upcall: Upcall) {
        self.actions.push_back(Action::Upcall(upcall));
    }
}
