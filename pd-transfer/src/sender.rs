//! The prefill side of all attempts: takes requests, offers sealed pages, says when they are free.

use crate::counters::Counters;
use crate::id::{PeerId, Time};
use crate::manifest::Manifest;
use crate::states::{SenderEvent, SenderState};
use crate::wire::{
    AttemptId, FinalRecord, Item, Key, MAX_EXTENTS, MAX_PAYLOAD_BYTES, MAX_READY_ITEMS, Message,
    code, hash_request,
};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// Bounds and times of a [`Sender`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SenderConfig {
    /// Most attempts that are not released; one more is rejected with [`code::BUSY`].
    pub attempts_max: usize,
    /// Most of them that one peer may have, so that a peer that never ends its attempts does not
    /// keep the others out; one more is rejected with [`code::BUSY`].
    pub attempts_per_peer_max: usize,
    /// Most pages of one attempt.
    pub items_max: usize,
    /// Largest request in bytes.
    pub request_bytes_max: usize,
    /// How many ended attempts are remembered, so that a late message can't open them again.
    pub ended_max: usize,
    /// After this time in one state an attempt is reported as overdue, and again each time it
    /// passes. An alarm only: pages stay pinned.
    pub overdue_us: u64,
}

impl Default for SenderConfig {
    fn default() -> Self {
        Self {
            attempts_max: 256,
            attempts_per_peer_max: 256,
            items_max: 1 << 20,
            request_bytes_max: 8 << 20,
            ended_max: 4096,
            overdue_us: 30_000_000,
        }
    }
}

/// Why pages may be unpinned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Proof {
    /// The receiver said `Done` or `Failed`, which it says only when it reads nothing any more.
    PeerAcknowledged,
    /// The link is lost, and with it every access of the peer.
    LinkFenced,
}

/// What the sender wants done or known.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SenderOutput {
    /// Send a message.
    Send {
        /// To whom.
        peer: PeerId,
        /// What.
        message: Message,
    },
    /// Compute this. Answer with `ready` and `finish`, or `reject`.
    Requested {
        /// The attempt.
        attempt: AttemptId,
        /// Who wants it.
        peer: PeerId,
        /// As passed to the receiver.
        request: Vec<u8>,
        /// Prefix blocks that the receiver has.
        have: u32,
    },
    /// Stop computing this; nobody wants it. Pages stay pinned until `Release`.
    Cancelled {
        /// The attempt.
        attempt: AttemptId,
    },
    /// All pages offered for the attempt may be unpinned, and those that are passed to `ready`
    /// later at once. Once per `Requested`.
    Release {
        /// The attempt.
        attempt: AttemptId,
        /// Why.
        proof: Proof,
    },
    /// An alarm: the attempt holds its pages for long.
    Overdue {
        /// The attempt.
        attempt: AttemptId,
        /// How long it is in its state, in microseconds.
        held_us: u64,
    },
    /// Worth a line in a log.
    Event(String),
}

/// Why pages or a record were not taken. The attempt is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum OfferError {
    /// Released, withdrawn, finished, rejected, or never requested.
    #[error("attempt {0} takes nothing any more")]
    Ended(AttemptId),
    /// More pages than allowed.
    #[error("attempt {attempt}: {wanted} pages, at most {limit}")]
    TooManyItems {
        /// The attempt.
        attempt: AttemptId,
        /// With these.
        wanted: usize,
        /// Allowed.
        limit: usize,
    },
    /// A key was offered before.
    #[error("attempt {attempt}: key {key} was offered before")]
    DuplicateKey {
        /// The attempt.
        attempt: AttemptId,
        /// The key.
        key: Key,
    },
    /// No extents, too many, or an empty one.
    #[error("attempt {attempt}: key {key} has {count} extents or an empty one")]
    BadExtents {
        /// The attempt.
        attempt: AttemptId,
        /// The key.
        key: Key,
        /// How many extents.
        count: usize,
    },
    /// The record does not describe the pages that were offered.
    #[error(
        "attempt {attempt}: record says {record_items} pages of {record_bytes} bytes, offered were {items} of {bytes}, or the manifest differs"
    )]
    Record {
        /// The attempt.
        attempt: AttemptId,
        /// In the record.
        record_items: u32,
        /// In the record.
        record_bytes: u64,
        /// Offered.
        items: usize,
        /// Offered.
        bytes: u64,
    },
    /// The payload is too large.
    #[error("attempt {attempt}: payload of {bytes} bytes, at most {MAX_PAYLOAD_BYTES}")]
    Payload {
        /// The attempt.
        attempt: AttemptId,
        /// Its size.
        bytes: usize,
    },
}

#[derive(Clone, Debug, Hash)]
struct Attempt {
    peer: PeerId,
    request_hash: [u8; 16],
    have: u32,
    state: SenderState,
    since: Time,
    alarm_at: Time,
    /// One entry per `Ready` message.
    offers: Vec<Vec<Item>>,
    manifest: Manifest,
    last: Option<LastWord>,
}

#[derive(Clone, Debug, Hash)]
enum LastWord {
    Final(FinalRecord, [u8; 16]),
    Reject(u16, String),
}

/// The prefill side. See the module text.
#[derive(Clone, Debug, Hash)]
pub struct Sender {
    config: SenderConfig,
    peers: BTreeSet<PeerId>,
    attempts: BTreeMap<AttemptId, Attempt>,
    ended: BTreeSet<AttemptId>,
    ended_order: VecDeque<AttemptId>,
    outputs: VecDeque<SenderOutput>,
    counters: Counters,
}

impl Sender {
    /// A sender without peers.
    #[must_use]
    pub fn new(config: SenderConfig) -> Self {
        Self {
            config,
            peers: BTreeSet::new(),
            attempts: BTreeMap::new(),
            ended: BTreeSet::new(),
            ended_order: VecDeque::new(),
            outputs: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// Its part of the totals.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Attempts that hold pages.
    #[must_use]
    pub fn open_attempts(&self) -> usize {
        self.attempts.len()
    }

    /// The state of an attempt; `None` if it was never requested or is long forgotten.
    #[must_use]
    pub fn state(&self, attempt: &AttemptId) -> Option<SenderState> {
        match self.attempts.get(attempt) {
            Some(open) => Some(open.state),
            None => self.ended.contains(attempt).then_some(SenderState::Gone),
        }
    }

    /// A link to a receiver came up.
    pub fn peer_up(&mut self, peer: PeerId) {
        self.peers.insert(peer);
    }

    /// A link is gone; the transport has stopped every access of the peer.
    pub fn peer_lost(&mut self, peer: PeerId) {
        self.peers.remove(&peer);
        let lost: Vec<AttemptId> = self
            .attempts
            .iter()
            // PD-S12 PD-F6
            .filter_map(|(id, attempt)| (attempt.peer == peer).then_some(*id))
            .collect();
        for id in lost {
            self.end(id, SenderEvent::LinkLost, Proof::LinkFenced);
        }
    }

    /// A message from a receiver. Those for the other side are counted and dropped.
    pub fn handle_message(&mut self, now: Time, peer: PeerId, message: Message) {
        match message {
            Message::Want { attempt, request, have } => {
                self.on_want(now, peer, attempt, request, have);
            }
            Message::Resume { attempt, next } => self.on_resume(peer, attempt, next),
            Message::Cancel { attempt } => self.on_cancel(now, peer, attempt),
            Message::Done { attempt, bytes } => {
                if let Some(open) = self.attempts.get(&attempt)
                    && open.peer == peer
                    && open.manifest.bytes() != bytes
                {
                    let text = format!(
                        "attempt {attempt}: {peer} pulled {bytes} bytes, offered were {}",
                        open.manifest.bytes()
                    );
                    self.outputs.push_back(SenderOutput::Event(text));
                }
                self.on_ended(peer, attempt);
            }
            Message::Failed { attempt, code, text } => {
                if self.attempts.get(&attempt).is_some_and(|open| open.peer == peer) {
                    let text = format!("attempt {attempt}: {peer} gave up, code {code}: {text}");
                    self.outputs.push_back(SenderOutput::Event(text));
                }
                self.on_ended(peer, attempt);
            }
            Message::Hello(_)
            | Message::HelloAck(_)
            | Message::Refuse { .. }
            | Message::Accepted { .. }
            | Message::Ready { .. }
            | Message::Final { .. }
            | Message::Reject { .. }
            | Message::CancelAck { .. }
            | Message::Closed { .. }
            | Message::Ping { .. }
            | Message::Pong { .. }
            | Message::Bye { .. } => self.counters.dropped_late += 1,
        }
    }

    /// Offers sealed pages. They stay pinned until `Release`.
    ///
    /// # Errors
    /// The attempt takes no more, or the pages break a bound; nothing was offered then.
    pub fn ready(
        &mut self,
        now: Time,
        attempt: AttemptId,
        items: Vec<Item>,
    ) -> Result<(), OfferError> {
        let limit = self.config.items_max;
        let Some(open) = self.attempts.get_mut(&attempt) else {
            return Err(OfferError::Ended(attempt));
        };
        // PD-S7 PD-G6
        let Some(state) = open.state.after(SenderEvent::Ready) else {
            return Err(OfferError::Ended(attempt));
        };
        let wanted = open.manifest.len() + items.len();
        // PD-S5
        if wanted > limit {
            return Err(OfferError::TooManyItems { attempt, wanted, limit });
        }
        let mut fresh = BTreeSet::new();
        for item in &items {
            // PD-S4
            let count = item.extents.len();
            if count == 0 || count > MAX_EXTENTS || item.extents.iter().any(|e| e.len == 0) {
                return Err(OfferError::BadExtents { attempt, key: item.key, count });
            }
            if open.manifest.contains(&item.key) || !fresh.insert(item.key) {
                return Err(OfferError::DuplicateKey { attempt, key: item.key });
            }
        }
        open.state = state;
        open.since = now;
        open.alarm_at = now.after(self.config.overdue_us);
        open.manifest.extend(&items);
        self.counters.items_offered += items.len() as u64;
        for chunk in items.chunks(MAX_READY_ITEMS) {
            let seq = u32::try_from(open.offers.len()).unwrap_or(u32::MAX);
            open.offers.push(chunk.to_vec());
            let message = Message::Ready { attempt, seq, items: chunk.to_vec() };
            self.outputs.push_back(SenderOutput::Send { peer: open.peer, message });
        }
        Ok(())
    }

    /// Says that all pages were offered.
    ///
    /// # Errors
    /// The attempt takes no more, or the record does not describe exactly what was offered;
    /// nothing was sent then.
    pub fn finish(
        &mut self,
        now: Time,
        attempt: AttemptId,
        record: FinalRecord,
    ) -> Result<(), OfferError> {
        let Some(open) = self.attempts.get_mut(&attempt) else {
            return Err(OfferError::Ended(attempt));
        };
        let Some(state) = open.state.after(SenderEvent::Finish) else {
            return Err(OfferError::Ended(attempt));
        };
        if record.payload.len() > MAX_PAYLOAD_BYTES {
            return Err(OfferError::Payload { attempt, bytes: record.payload.len() });
        }
        // PD-S6
        let manifest = &open.manifest;
        if record.items as usize != manifest.len()
            || record.bytes != manifest.bytes()
            || record.manifest != manifest.hash()
        {
            return Err(OfferError::Record {
                attempt,
                record_items: record.items,
                record_bytes: record.bytes,
                items: manifest.len(),
                bytes: manifest.bytes(),
            });
        }
        let Ok(hash) = record.hash() else {
            return Err(OfferError::Payload { attempt, bytes: record.payload.len() });
        };
        open.state = state;
        open.since = now;
        open.alarm_at = now.after(self.config.overdue_us);
        open.last = Some(LastWord::Final(record.clone(), hash));
        let message = Message::Final { attempt, record, hash };
        self.outputs.push_back(SenderOutput::Send { peer: open.peer, message });
        Ok(())
    }

    /// Gives an attempt up. Its pages stay pinned until `Release`.
    ///
    /// # Errors
    /// The attempt ended already.
    pub fn reject(
        &mut self,
        now: Time,
        attempt: AttemptId,
        code: u16,
        text: &str,
    ) -> Result<(), OfferError> {
        let Some(open) = self.attempts.get_mut(&attempt) else {
            return Err(OfferError::Ended(attempt));
        };
        // PD-F7
        let Some(state) = open.state.after(SenderEvent::Reject) else {
            return Err(OfferError::Ended(attempt));
        };
        let text = crate::wire::clip(text);
        open.state = state;
        open.since = now;
        open.alarm_at = now.after(self.config.overdue_us);
        open.last = Some(LastWord::Reject(code, text.clone()));
        let message = Message::Reject { attempt, code, text };
        self.outputs.push_back(SenderOutput::Send { peer: open.peer, message });
        Ok(())
    }

    /// Raises the alarms that are due; early calls do nothing.
    // PD-S11
    pub fn handle_timeout(&mut self, now: Time) {
        for (id, open) in &mut self.attempts {
            if open.alarm_at <= now {
                open.alarm_at = now.after(self.config.overdue_us);
                let held_us = now.since(open.since);
                self.outputs.push_back(SenderOutput::Overdue { attempt: *id, held_us });
            }
        }
    }

    /// When [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.attempts.values().map(|open| open.alarm_at).min()
    }

    /// The next thing to do or to know.
    pub fn poll_output(&mut self) -> Option<SenderOutput> {
        self.outputs.pop_front()
    }

    fn on_want(
        &mut self,
        now: Time,
        peer: PeerId,
        attempt: AttemptId,
        request: Vec<u8>,
        have: u32,
    ) {
        let request_hash = hash_request(&request);
        if let Some(open) = self.attempts.get(&attempt) {
            // PD-S1
            if open.peer == peer && open.request_hash == request_hash && open.have == have {
                // Said again because our answer was lost.
                self.counters.dropped_duplicate += 1;
                return self.repeat(peer, attempt, 0);
            }
            return self.refuse(peer, attempt, code::DUPLICATE, "attempt id is in use");
        }
        // PD-S2
        if !guard!(SlotGeneration, !self.ended.contains(&attempt)) {
            return self.refuse(peer, attempt, code::DUPLICATE, "attempt id was used before");
        }
        if !self.peers.contains(&peer) {
            self.counters.dropped_late += 1;
            return;
        }
        // PD-S3
        if request.len() > self.config.request_bytes_max {
            let limit = self.config.request_bytes_max;
            let text = format!("request of {} bytes, at most {limit}", request.len());
            return self.refuse(peer, attempt, code::TOO_LARGE, &text);
        }
        if self.attempts.len() >= self.config.attempts_max {
            let text = format!("{} attempts are open, no more fit", self.attempts.len());
            return self.refuse(peer, attempt, code::BUSY, &text);
        }
        let own = self.attempts.values().filter(|open| open.peer == peer).count();
        if own >= self.config.attempts_per_peer_max {
            let text = format!("{own} attempts of this peer are open, no more fit");
            return self.refuse(peer, attempt, code::BUSY, &text);
        }
        let open = Attempt {
            peer,
            request_hash,
            have,
            state: SenderState::Computing,
            since: now,
            alarm_at: now.after(self.config.overdue_us),
            offers: Vec::new(),
            manifest: Manifest::new(),
            last: None,
        };
        self.attempts.insert(attempt, open);
        self.counters.requests_taken += 1;
        self.send(peer, Message::Accepted { attempt });
        self.outputs.push_back(SenderOutput::Requested { attempt, peer, request, have });
    }

    fn on_resume(&mut self, peer: PeerId, attempt: AttemptId, next: u32) {
        if self.attempts.get(&attempt).is_some_and(|open| open.peer == peer) {
            self.repeat(peer, attempt, next);
        } else {
            // PD-S9
            self.refuse(peer, attempt, code::UNKNOWN, "attempt is not known");
        }
    }

    /// Says again everything from `Ready` number `next` on.
    fn repeat(&mut self, peer: PeerId, attempt: AttemptId, next: u32) {
        let Some(open) = self.attempts.get(&attempt) else { return };
        self.outputs.push_back(SenderOutput::Send { peer, message: Message::Accepted { attempt } });
        // PD-S8
        for (seq, items) in (0_u32..).zip(&open.offers).skip(next as usize) {
            let message = Message::Ready { attempt, seq, items: items.clone() };
            self.outputs.push_back(SenderOutput::Send { peer, message });
        }
        let message = match &open.last {
            Some(LastWord::Final(record, hash)) => {
                Message::Final { attempt, record: record.clone(), hash: *hash }
            }
            Some(LastWord::Reject(code, text)) => {
                Message::Reject { attempt, code: *code, text: text.clone() }
            }
            None => return,
        };
        self.outputs.push_back(SenderOutput::Send { peer, message });
    }

    fn on_cancel(&mut self, now: Time, peer: PeerId, attempt: AttemptId) {
        self.send(peer, Message::CancelAck { attempt });
        match self.attempts.get_mut(&attempt) {
            Some(open) if open.peer == peer => {
                let was = open.state;
                // PD-S14
                let Some(state) = was.after(SenderEvent::Cancel) else {
                    self.counters.dropped_late += 1;
                    return;
                };
                open.state = state;
                if was == state {
                    self.counters.dropped_duplicate += 1;
                    return;
                }
                open.since = now;
                if was == SenderState::Computing {
                    self.outputs.push_back(SenderOutput::Cancelled { attempt });
                }
            }
            Some(_) => self.counters.dropped_late += 1,
            // PD-S15
            // The `Want` may still be on its way; it must not open the attempt.
            None => self.remember(attempt),
        }
    }

    fn on_ended(&mut self, peer: PeerId, attempt: AttemptId) {
        match self.attempts.get(&attempt) {
            Some(open) if open.peer == peer => {
                self.end(attempt, SenderEvent::Ended, Proof::PeerAcknowledged);
            }
            // Somebody else's; the peer is told all the same, or it would go on saying it.
            Some(_) => self.counters.dropped_late += 1,
            None => {
                self.counters.dropped_duplicate += 1;
                self.remember(attempt);
            }
        }
        // PD-S16
        self.send(peer, Message::Closed { attempt });
    }

    fn end(&mut self, attempt: AttemptId, event: SenderEvent, proof: Proof) {
        let Some(open) = self.attempts.remove(&attempt) else { return };
        let state = open.state.after(event);
        assert_eq!(state, Some(SenderState::Gone), "{event:?} ends an attempt in every open state");
        match proof {
            Proof::PeerAcknowledged => self.counters.released_acknowledged += 1,
            Proof::LinkFenced => self.counters.released_fenced += 1,
        }
        if open.state == SenderState::Computing {
            self.outputs.push_back(SenderOutput::Cancelled { attempt });
        }
        // PD-S10 PD-S13
        self.outputs.push_back(SenderOutput::Release { attempt, proof });
        self.remember(attempt);
    }

    fn remember(&mut self, attempt: AttemptId) {
        if self.ended.insert(attempt) {
            self.ended_order.push_back(attempt);
            if self.ended_order.len() > self.config.ended_max
                && let Some(oldest) = self.ended_order.pop_front()
            {
                self.ended.remove(&oldest);
            }
        }
    }

    fn refuse(&mut self, peer: PeerId, attempt: AttemptId, code: u16, text: &str) {
        self.counters.requests_refused += 1;
        self.send(peer, Message::Reject { attempt, code, text: text.into() });
    }

    fn send(&mut self, peer: PeerId, message: Message) {
        self.outputs.push_back(SenderOutput::Send { peer, message });
    }
}

#[cfg(test)]
#[path = "sender_tests.rs"]
mod tests;
