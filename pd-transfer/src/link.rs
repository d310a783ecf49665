//! One link: greeting, order of envelopes, liveness. Knows nothing of attempts.

use crate::counters::Counters;
use crate::id::Time;
use crate::states::{LinkEvent, LinkState};
use crate::wire::{
    self, DecodeError, EncodeError, Hello, Incarnation, Message, PROTO_VERSION, RefuseReason,
    decode,
};
use alloc::collections::VecDeque;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

/// Times of a link, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LinkConfig {
    /// A link that is not up after this time is closed.
    pub handshake_us: u64,
    /// `Hello` is said again after this time.
    pub hello_resend_us: u64,
    /// `Ping` after this time without a word from the peer.
    pub ping_after_us: u64,
    /// The peer is suspect, and the link closed, after this time without a word.
    pub suspect_after_us: u64,
}

impl Default for LinkConfig {
    fn default() -> Self {
        Self {
            handshake_us: 5_000_000,
            hello_resend_us: 1_000_000,
            ping_after_us: 1_000_000,
            suspect_after_us: 5_000_000,
        }
    }
}

/// Who opened a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// This node connected.
    Connector,
    /// The peer connected.
    Acceptor,
}

/// Why a link has to be cut.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum CloseReason {
    /// Not up in time.
    #[error("no agreement within {0} us")]
    Handshake(u64),
    /// Refused by either side.
    #[error("refused: {0}")]
    Refused(String),
    /// Nothing heard.
    #[error("silent for {0} us")]
    Suspect(u64),
    /// The peer said `Bye`.
    #[error("the peer is leaving")]
    Bye,
    /// The peer sent bytes that are no message.
    #[error("malformed: {0}")]
    Malformed(String),
}

/// What a link wants done.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum LinkOutput {
    /// Give these bytes to the transport.
    Transmit(Vec<u8>),
    /// Both sides agreed; this is the peer.
    Up(Hello),
    /// A message for the machines.
    Deliver(Message),
    /// One side refused; for a layout the text holds both descriptions.
    Refused {
        /// Why.
        reason: RefuseReason,
        /// For people.
        text: String,
    },
    /// Cut the link.
    Close(CloseReason),
}

/// Which sequence numbers were seen: the highest, and a bit for each of the 1024 below it.
#[derive(Clone, Debug, Default, Hash)]
struct Window {
    next: u64,
    seen: [u64; 16],
}

impl Window {
    const SIZE: u64 = 1024;

    /// Notes `seq`; false if it was seen, or is too old to tell.
    fn accept(&mut self, seq: u64) -> bool {
        if seq == u64::MAX || seq.saturating_add(Self::SIZE) < self.next {
            return false;
        }
        if seq >= self.next {
            let skipped = (seq - self.next).min(Self::SIZE);
            for step in 0..skipped {
                self.clear(self.next + step);
            }
            self.next = seq + 1;
            self.set(seq);
            return true;
        }
        if self.next - seq > Self::SIZE || self.is_set(seq) {
            return false;
        }
        self.set(seq);
        true
    }

    const fn place(seq: u64) -> (usize, u64) {
        let bit = seq % Self::SIZE;
        ((bit / 64) as usize, 1 << (bit % 64))
    }

    const fn is_set(&self, seq: u64) -> bool {
        let (word, mask) = Self::place(seq);
        self.seen[word] & mask != 0
    }

    const fn set(&mut self, seq: u64) {
        let (word, mask) = Self::place(seq);
        self.seen[word] |= mask;
    }

    const fn clear(&mut self, seq: u64) {
        let (word, mask) = Self::place(seq);
        self.seen[word] &= !mask;
    }
}

/// One link, from the first byte to the cut.
#[derive(Clone, Debug, Hash)]
pub struct Link {
    config: LinkConfig,
    own: Hello,
    side: Side,
    state: LinkState,
    /// What to say to a hello that fits, if there is no room for the link.
    full: Option<String>,
    peer: Option<Incarnation>,
    peer_max_bytes: u32,
    next_seq: u64,
    window: Window,
    opened: Time,
    heard: Time,
    hello_sent: Time,
    pinged: Time,
    outputs: VecDeque<LinkOutput>,
    counters: Counters,
}

impl Link {
    /// A new link. A connector says `Hello` at once.
    #[must_use]
    pub fn new(now: Time, config: LinkConfig, own: Hello, side: Side) -> Self {
        let state = match side {
            Side::Connector => LinkState::Greeting,
            Side::Acceptor => LinkState::Listening,
        };
        let mut link = Self {
            config,
            own,
            side,
            state,
            full: None,
            peer: None,
            peer_max_bytes: wire::MAX_MESSAGE_BYTES as u32,
            next_seq: 0,
            window: Window::default(),
            opened: now,
            heard: now,
            hello_sent: now,
            pinged: now,
            outputs: VecDeque::new(),
            counters: Counters::default(),
        };
        if side == Side::Connector {
            link.say_hello();
        }
        link
    }

    /// A link that a peer opened and for which there is no room: it answers any hello with
    /// [`RefuseReason::Busy`] and `text`.
    #[must_use]
    pub fn full(now: Time, config: LinkConfig, own: Hello, text: String) -> Self {
        Self { full: Some(text), ..Self::new(now, config, own, Side::Acceptor) }
    }

    /// The state.
    #[must_use]
    pub const fn state(&self) -> LinkState {
        self.state
    }

    /// Who opened it.
    #[must_use]
    pub const fn side(&self) -> Side {
        self.side
    }

    /// Its part of the totals.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The bytes of a message for the peer; `None` before agreement and after the end, when
    /// messages are dropped, since the protocol repeats what matters.
    ///
    /// # Errors
    /// The message exceeds the format's limits or the peer's.
    pub fn seal(&mut self, message: &Message) -> Result<Option<Vec<u8>>, EncodeError> {
        if self.state != LinkState::Up {
            return Ok(None);
        }
        let bytes = wire::encode(self.own.incarnation, self.next_seq, message)?;
        // PD-W7
        if bytes.len() > self.peer_max_bytes as usize {
            let limit = self.peer_max_bytes as usize;
            return Err(EncodeError::Peer { kind: message.name(), bytes: bytes.len(), limit });
        }
        self.next_seq += 1;
        Ok(Some(bytes))
    }

    /// Bytes of one envelope from the peer.
    pub fn handle_bytes(&mut self, now: Time, bytes: &[u8]) {
        if self.state == LinkState::Closed {
            self.counters.dropped_late += 1;
            return;
        }
        let envelope = match decode(bytes) {
            Ok(envelope) => envelope,
            // PD-L2
            Err(DecodeError::Version(theirs)) if self.state != LinkState::Up => {
                return self.other_version(theirs);
            }
            // PD-L13
            Err(error) => return self.malformed(error.to_string()),
        };
        // PD-L8
        if !guard!(Incarnation, self.peer.is_none_or(|peer| peer == envelope.incarnation)) {
            self.counters.dropped_foreign += 1;
            return;
        }
        // PD-L10 PD-L11
        if !self.window.accept(envelope.seq) {
            self.counters.dropped_duplicate += 1;
            return;
        }
        self.heard = self.heard.max(now);
        self.on_message(envelope.incarnation, envelope.message);
    }

    /// Acts on everything that is due; early calls do nothing.
    pub fn handle_timeout(&mut self, now: Time) {
        match self.state {
            LinkState::Greeting | LinkState::Listening | LinkState::Refusing => {
                // PD-L7
                if now.since(self.opened) >= self.config.handshake_us {
                    if self.moves(LinkEvent::Silence) {
                        self.close(CloseReason::Handshake(self.config.handshake_us));
                    }
                } else if self.state == LinkState::Greeting
                    && now.since(self.hello_sent) >= self.config.hello_resend_us
                {
                    self.hello_sent = now;
                    self.say_hello();
                }
            }
            LinkState::Up => {
                // PD-L12
                if now.since(self.heard) >= self.config.suspect_after_us {
                    if self.moves(LinkEvent::Silence) {
                        self.counters.links_suspect += 1;
                        self.close(CloseReason::Suspect(now.since(self.heard)));
                    }
                } else if now.since(self.heard) >= self.config.ping_after_us
                    && now.since(self.pinged) >= self.config.ping_after_us
                {
                    self.pinged = now;
                    self.transmit_small(&Message::Ping { n: now.0 });
                }
            }
            LinkState::Closed => {}
        }
    }

    /// When [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        match self.state {
            LinkState::Greeting => Some(
                self.opened
                    .after(self.config.handshake_us)
                    .min(self.hello_sent.after(self.config.hello_resend_us)),
            ),
            LinkState::Listening | LinkState::Refusing => {
                Some(self.opened.after(self.config.handshake_us))
            }
            LinkState::Up => Some(
                self.heard
                    .after(self.config.suspect_after_us)
                    .min(self.heard.max(self.pinged).after(self.config.ping_after_us)),
            ),
            LinkState::Closed => None,
        }
    }

    /// The next thing to do.
    pub fn poll_output(&mut self) -> Option<LinkOutput> {
        self.outputs.pop_front()
    }

    fn on_message(&mut self, incarnation: Incarnation, message: Message) {
        match message {
            Message::Hello(hello) => self.on_hello(incarnation, hello),
            Message::HelloAck(hello) => self.on_hello_ack(incarnation, hello),
            Message::Refuse { reason, text } => {
                if self.moves(LinkEvent::Refused) {
                    self.counters.links_refused += 1;
                    self.outputs.push_back(LinkOutput::Refused { reason, text: text.clone() });
                    self.close(CloseReason::Refused(text));
                }
            }
            Message::Bye { .. } => {
                // PD-L15
                if self.moves(LinkEvent::Bye) {
                    self.close(CloseReason::Bye);
                }
            }
            Message::Ping { n } => {
                if self.moves(LinkEvent::Message) {
                    self.transmit_small(&Message::Pong { n });
                }
            }
            Message::Pong { .. } => {
                self.moves(LinkEvent::Message);
            }
            Message::Want { .. }
            | Message::Accepted { .. }
            | Message::Ready { .. }
            | Message::Final { .. }
            | Message::Reject { .. }
            | Message::Resume { .. }
            | Message::Cancel { .. }
            | Message::CancelAck { .. }
            | Message::Done { .. }
            | Message::Failed { .. }
            | Message::Closed { .. } => {
                // PD-L1
                if self.moves(LinkEvent::Message) {
                    self.outputs.push_back(LinkOutput::Deliver(message));
                }
            }
        }
    }

    fn on_hello(&mut self, incarnation: Incarnation, hello: Hello) {
        // PD-L9
        if hello.incarnation != incarnation {
            return self.malformed("hello names another incarnation".to_string());
        }
        let was = self.state;
        // PD-L6
        let full = || self.full.clone().map(|text| (RefuseReason::Busy, text));
        if let Some((reason, text)) = misfit(&self.own, &hello).or_else(full) {
            if self.moves(LinkEvent::Misfit) {
                self.refuse(was, reason, text);
            }
        } else if self.moves(LinkEvent::Greeted) {
            match was {
                LinkState::Listening => {
                    self.agree(hello);
                    self.transmit_hello_ack();
                }
                // PD-L14
                // Our answer was lost.
                LinkState::Up => self.transmit_hello_ack(),
                LinkState::Greeting | LinkState::Refusing | LinkState::Closed => {
                    self.counters.links_malformed += 1;
                    self.close(CloseReason::Malformed("hello from both sides".to_string()));
                }
            }
        }
    }

    fn on_hello_ack(&mut self, incarnation: Incarnation, hello: Hello) {
        // PD-L9
        if hello.incarnation != incarnation {
            return self.malformed("hello names another incarnation".to_string());
        }
        let was = self.state;
        if let Some((reason, text)) = misfit(&self.own, &hello) {
            if self.moves(LinkEvent::Misfit) {
                self.refuse(was, reason, text);
            }
        } else if self.moves(LinkEvent::Agreed) {
            if self.state == LinkState::Up {
                self.agree(hello);
            } else {
                self.counters.links_malformed += 1;
                self.close(CloseReason::Malformed("answer without a hello".to_string()));
            }
        }
    }

    /// The peer's first words are in another version. What they say can't be read, but the start
    /// of a header is the same in every version, and so is how to say no.
    fn other_version(&mut self, theirs: u32) {
        let was = self.state;
        if self.moves(LinkEvent::Misfit) {
            let text = versions_differ(self.own.proto, theirs);
            self.refuse(was, RefuseReason::Protocol, text);
        }
    }

    fn agree(&mut self, hello: Hello) {
        self.peer = Some(hello.incarnation);
        self.peer_max_bytes = hello.limits.max_message_bytes;
        self.counters.links_up += 1;
        self.outputs.push_back(LinkOutput::Up(hello));
    }

    /// Says no. A listener lingers so that the peer can read the reason.
    fn refuse(&mut self, was: LinkState, reason: RefuseReason, text: String) {
        self.transmit_small(&Message::Refuse { reason, text: text.clone() });
        if was != LinkState::Refusing {
            self.counters.links_refused += 1;
            self.outputs.push_back(LinkOutput::Refused { reason, text: text.clone() });
        }
        if self.state == LinkState::Closed {
            self.close(CloseReason::Refused(text));
        }
    }

    fn malformed(&mut self, text: String) {
        if self.moves(LinkEvent::Malformed) {
            self.counters.links_malformed += 1;
            self.close(CloseReason::Malformed(text));
        }
    }

    fn close(&mut self, reason: CloseReason) {
        self.outputs.push_back(LinkOutput::Close(reason));
    }

    /// Moves by the table; false if the event is late.
    // PD-F8
    fn moves(&mut self, event: LinkEvent) -> bool {
        match self.state.after(event) {
            Some(state) => {
                self.state = state;
                true
            }
            None => {
                self.counters.dropped_late += 1;
                false
            }
        }
    }

    fn say_hello(&mut self) {
        let hello = Message::Hello(self.own.clone());
        self.transmit_small(&hello);
    }

    fn transmit_hello_ack(&mut self) {
        let ack = Message::HelloAck(self.own.clone());
        self.transmit_small(&ack);
    }

    /// For messages of this file, whose sizes were checked when the link was configured.
    fn transmit_small(&mut self, message: &Message) {
        if let Err(error) = self.transmit(message) {
            self.state = LinkState::Closed;
            self.close(CloseReason::Malformed(error.to_string()));
        }
    }

    fn transmit(&mut self, message: &Message) -> Result<(), EncodeError> {
        let bytes = wire::encode(self.own.incarnation, self.next_seq, message)?;
        self.next_seq += 1;
        self.outputs.push_back(LinkOutput::Transmit(bytes));
        Ok(())
    }
}

fn versions_differ(own: u32, theirs: u32) -> String {
    format!("protocol versions differ: the refusing side has {own}, the other {theirs}")
}

/// Whether two nodes must not talk, and the text that both sides show.
fn misfit(own: &Hello, peer: &Hello) -> Option<(RefuseReason, String)> {
    if peer.proto != own.proto || peer.proto != PROTO_VERSION {
        return Some((RefuseReason::Protocol, versions_differ(own.proto, peer.proto)));
    }
    // PD-L5
    if peer.incarnation == own.incarnation {
        return Some((RefuseReason::SelfLink, format!("{} is this node", peer.incarnation)));
    }
    // PD-L3
    if !guard!(LayoutCheck, peer.fingerprint == own.fingerprint) {
        let text = format!(
            "page layouts differ\n{:?} {}: {}\n{:?} {}: {}",
            own.role, own.fingerprint, own.layout, peer.role, peer.fingerprint, peer.layout
        );
        return Some((RefuseReason::Layout, text));
    }
    // PD-L4
    if !own.role.fits(peer.role) {
        let text = format!("roles {:?} and {:?} have nothing to hand over", own.role, peer.role);
        return Some((RefuseReason::Role, text));
    }
    None
}

#[cfg(test)]
#[path = "link_tests.rs"]
mod tests;
