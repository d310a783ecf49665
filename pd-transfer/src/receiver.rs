//! The decode side of all attempts: asks, pulls pages as they are offered, checks each one, and
//! says once whether everything arrived.
//!
//! A target page is written by this process only, by gets that this machine asked for. So "all
//! own gets have ended" is all the proof that is needed to let go of the targets: no timer and no
//! word of the peer is.

mod attempt;
mod ops;
mod types;

pub use types::{
    FailReason, PageFault, ReceiverConfig, ReceiverOutput, RetargetError, Start, StartError,
    Target, Verify,
};

use crate::counters::Counters;
use crate::get::{Get, GetOutcome};
use crate::id::{OpId, PeerId, Time};
use crate::states::{ReceiverEvent, ReceiverState};
use crate::wire::{
    AttemptId, FinalRecord, Item, Limits, MAX_REQUEST_BYTES, Message, RegionDesc, RegionId, clip,
    code,
};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use attempt::{Attempt, Offer};
use ops::Ops;

/// What the receiver knows of one link.
#[derive(Clone, Debug, Hash)]
struct Peer {
    regions: BTreeMap<RegionId, u64>,
    limits: Limits,
    /// Gets and verifications under way.
    in_flight: usize,
    /// Pages that may be pulled, oldest first. Entries of ended attempts are skipped.
    queue: VecDeque<(AttemptId, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Pull,
    Verify,
}

#[derive(Clone, Debug, Hash)]
struct Op {
    attempt: AttemptId,
    /// Its place in the attempt's plan.
    page: u32,
    peer: PeerId,
    step: Step,
}

/// The decode side. See the module text.
#[derive(Clone, Debug, Hash)]
pub struct Receiver {
    config: ReceiverConfig,
    peers: BTreeMap<PeerId, Peer>,
    attempts: BTreeMap<AttemptId, Attempt>,
    ended: BTreeSet<AttemptId>,
    ended_order: VecDeque<AttemptId>,
    ops: Ops<Op>,
    outputs: VecDeque<ReceiverOutput>,
    counters: Counters,
}

impl Receiver {
    /// A receiver without peers.
    #[must_use]
    pub fn new(config: ReceiverConfig) -> Self {
        Self {
            config,
            peers: BTreeMap::new(),
            attempts: BTreeMap::new(),
            ended: BTreeSet::new(),
            ended_order: VecDeque::new(),
            ops: Ops::new(),
            outputs: VecDeque::new(),
            counters: Counters::default(),
        }
    }

    /// Its part of the totals.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Attempts that are not forgotten yet.
    #[must_use]
    pub fn open_attempts(&self) -> usize {
        self.attempts.len()
    }

    /// Gets and verifications that have not ended.
    #[must_use]
    pub const fn ops_in_flight(&self) -> usize {
        self.ops.len()
    }

    /// The state of an attempt; `None` if it never was or is long forgotten.
    #[must_use]
    pub fn state(&self, attempt: &AttemptId) -> Option<ReceiverState> {
        match self.attempts.get(attempt) {
            Some(open) => Some(open.state),
            None => self.ended.contains(attempt).then_some(ReceiverState::Gone),
        }
    }

    /// A link to a sender came up.
    pub fn peer_up(&mut self, peer: PeerId, limits: Limits, regions: &[RegionDesc]) {
        let regions = regions.iter().map(|desc| (desc.region, desc.bytes)).collect();
        let entry = Peer { regions, limits, in_flight: 0, queue: VecDeque::new() };
        self.peers.insert(peer, entry);
    }

    /// A link is gone. Gets that have not ended are still waited for.
    pub fn peer_lost(&mut self, peer: PeerId) {
        self.peers.remove(&peer);
        let lost: Vec<AttemptId> = self
            .attempts
            .iter()
            .filter_map(|(id, open)| (open.peer == peer).then_some(*id))
            .collect();
        for id in lost {
            let Some(open) = self.attempts.get_mut(&id) else { continue };
            let was = open.state;
            open.state = was.after(ReceiverEvent::LinkLost).unwrap_or(was);
            match was {
                ReceiverState::Wanting | ReceiverState::Pulling => {
                    // PD-F6
                    self.report_failure(id, FailReason::PeerLost);
                    self.settle(id);
                }
                ReceiverState::Draining => self.settle(id),
                ReceiverState::Closing => self.forget(id),
                ReceiverState::Orphaned | ReceiverState::Gone => {}
            }
        }
    }

    /// Opens an attempt. It ends with exactly one `Completed`, or one `Failed` and later `Quiet`.
    ///
    /// # Errors
    /// The attempt breaks a bound or is malformed; nothing was opened and no output follows.
    pub fn start(&mut self, now: Time, start: Start) -> Result<(), StartError> {
        let Some(peer) = self.peers.get(&start.peer) else {
            return Err(StartError::UnknownPeer(start.peer));
        };
        let (open, limit) = (self.attempts.len(), self.config.attempts_max);
        if open >= limit {
            return Err(StartError::Busy { open, limit });
        }
        // PD-R1
        if self.attempts.contains_key(&start.attempt)
            || !guard!(SlotGeneration, !self.ended.contains(&start.attempt))
        {
            return Err(StartError::DuplicateAttempt(start.attempt));
        }
        // PD-R2
        let peer_items = usize::try_from(peer.limits.max_items).unwrap_or(usize::MAX);
        let limit = self.config.items_max.min(peer_items);
        if start.plan.len() > limit {
            return Err(StartError::TooManyItems { wanted: start.plan.len(), limit });
        }
        let peer_bytes = usize::try_from(peer.limits.max_message_bytes).unwrap_or(usize::MAX);
        let limit = MAX_REQUEST_BYTES.min(peer_bytes.saturating_sub(256));
        if start.request.len() > limit {
            return Err(StartError::RequestTooLarge { bytes: start.request.len(), limit });
        }
        let (id, peer) = (start.attempt, start.peer);
        let attempt = Attempt::new(now, start, &self.config)?;
        let want =
            Message::Want { attempt: id, request: attempt.request.clone(), have: attempt.have };
        self.attempts.insert(id, attempt);
        self.counters.attempts_started += 1;
        self.send(peer, want);
        Ok(())
    }

    /// Gives fresh targets for the groups named in a `Fresh`.
    ///
    /// # Errors
    /// The targets are not exactly those that were asked for; nothing changed then. An attempt that
    /// ended in the meantime takes no targets: the caller keeps them.
    pub fn retarget(
        &mut self,
        now: Time,
        attempt: AttemptId,
        targets: Vec<Target>,
    ) -> Result<(), RetargetError> {
        let Some(open) = self.attempts.get_mut(&attempt) else {
            return Err(RetargetError::Ended(attempt));
        };
        let ready = open.retarget(now, attempt, targets)?;
        let peer = open.peer;
        self.enqueue(peer, attempt, ready);
        Ok(())
    }

    /// Gives an attempt up. `Failed` follows unless it ended already, then `Quiet`.
    pub fn cancel(&mut self, now: Time, attempt: AttemptId) {
        self.fail(now, attempt, FailReason::Cancelled);
    }

    /// A message from a sender. Those for the other side are counted and dropped.
    pub fn handle_message(&mut self, now: Time, peer: PeerId, message: Message) {
        match message {
            Message::Accepted { attempt } => {
                self.answered(now, peer, attempt);
            }
            Message::Ready { attempt, seq, items } => {
                if self.answered(now, peer, attempt) {
                    self.on_ready(now, peer, attempt, seq, items);
                }
            }
            Message::Final { attempt, record, hash } => {
                if self.answered(now, peer, attempt) {
                    self.on_final(now, attempt, record, hash);
                }
            }
            Message::Reject { attempt, code, text } => {
                // PD-R13
                if self.attempts.get(&attempt).is_some_and(|open| open.peer == peer) {
                    self.fail(now, attempt, FailReason::Rejected { code, text });
                } else {
                    self.counters.dropped_late += 1;
                }
            }
            Message::Closed { attempt } => {
                match self.attempts.get(&attempt).filter(|open| open.peer == peer) {
                    Some(open) if open.state.after(ReceiverEvent::Acknowledged).is_some() => {
                        self.forget(attempt);
                    }
                    Some(_) | None => self.counters.dropped_late += 1,
                }
            }
            // PD-F3
            // Only a hint: the proof is `Closed`.
            Message::CancelAck { .. } => {}
            Message::Hello(_)
            | Message::HelloAck(_)
            | Message::Refuse { .. }
            | Message::Want { .. }
            | Message::Resume { .. }
            | Message::Cancel { .. }
            | Message::Done { .. }
            | Message::Failed { .. }
            | Message::Ping { .. }
            | Message::Pong { .. }
            | Message::Bye { .. } => self.counters.dropped_late += 1,
        }
    }

    /// A get ended. Unknown operations are counted and dropped.
    pub fn handle_got(&mut self, now: Time, op: OpId, outcome: GetOutcome) {
        let Some(Op { attempt, page, peer, .. }) = self.take_op(op, Step::Pull) else { return };
        let Some(open) = self.attempts.get_mut(&attempt) else {
            return self.op_ended(peer);
        };
        if outcome == GetOutcome::Done {
            self.counters.bytes_pulled += open.landed(now, page);
            // Its place in the window passes to the verification.
            if let Some(verify) = open.begin_verify(attempt, page) {
                let op = self.ops.insert(Op { attempt, page, peer, step: Step::Verify });
                let verify = Verify { op, ..verify };
                return self.outputs.push_back(ReceiverOutput::Verify(verify));
            }
        }
        let key = open.key(page);
        if matches!(outcome, GetOutcome::Lost | GetOutcome::Error(_)) {
            open.op_over(page);
        }
        self.op_ended(peer);
        match outcome {
            GetOutcome::Done => self.settle(attempt),
            GetOutcome::Stale => {
                self.counters.stale_gets += 1;
                self.page_failed(now, attempt, page, PageFault::Stale);
            }
            // Not pulled again: the loss of the link ends the attempt.
            GetOutcome::Lost => return self.settle(attempt),
            GetOutcome::Error(text) => {
                self.counters.failed_gets += 1;
                self.fail(now, attempt, FailReason::Get { key, text });
                self.settle(attempt);
            }
        }
        self.pump(peer);
    }

    /// A get ended well, and `check` says at once whether the bytes in the target have the tag:
    /// [`Self::handle_got`] and [`Self::handle_verified`] in one. `check` is not asked for a page that
    /// nobody wants any more.
    pub fn handle_landed(&mut self, now: Time, op: OpId, check: impl FnOnce(&Verify) -> bool) {
        let Some(Op { attempt, page, peer, .. }) = self.take_op(op, Step::Pull) else { return };
        let Some(open) = self.attempts.get_mut(&attempt) else {
            return self.op_ended(peer);
        };
        self.counters.bytes_pulled += open.landed(now, page);
        match open.begin_verify(attempt, page) {
            Some(verify) => {
                let ok = check(&Verify { op, ..verify });
                self.checked(now, attempt, page, peer, ok);
            }
            None => {
                self.op_ended(peer);
                self.settle(attempt);
                self.pump(peer);
            }
        }
    }

    /// A verification ended: `ok` says whether the bytes in the target have the tag.
    pub fn handle_verified(&mut self, now: Time, op: OpId, ok: bool) {
        let Some(Op { attempt, page, peer, .. }) = self.take_op(op, Step::Verify) else { return };
        self.checked(now, attempt, page, peer, ok);
    }

    /// Takes an operation out of the table; one that is not there, or not at this step, is counted.
    // PD-R16 PD-V1
    fn take_op(&mut self, op: OpId, step: Step) -> Option<Op> {
        if self.ops.get(op).is_none_or(|op| op.step != step) {
            self.counters.dropped_duplicate += 1;
            return None;
        }
        self.ops.remove(op)
    }

    fn checked(&mut self, now: Time, attempt: AttemptId, page: u32, peer: PeerId, ok: bool) {
        self.op_ended(peer);
        self.counters.items_checked += 1;
        if !self.attempts.contains_key(&attempt) {
            return;
        }
        if ok {
            if let Some(open) = self.attempts.get_mut(&attempt) {
                open.verified(now, page);
            }
            self.settle(attempt);
            self.check_complete(now, attempt);
        } else {
            // PD-V2
            self.counters.mismatches += 1;
            self.page_failed(now, attempt, page, PageFault::Mismatch);
        }
        self.pump(peer);
    }

    /// Acts on everything that is due; early calls do nothing.
    pub fn handle_timeout(&mut self, now: Time) {
        let due: Vec<AttemptId> = self
            .attempts
            .iter()
            .filter_map(|(id, open)| {
                open.due(&self.config).is_some_and(|at| at <= now).then_some(*id)
            })
            .collect();
        for id in due {
            let Some(open) = self.attempts.get_mut(&id) else { continue };
            // PD-F5
            if open.is_live() && now.since(open.progress) >= self.config.stall_us {
                let reason = FailReason::Timeout { silent_us: now.since(open.progress) };
                self.fail(now, id, reason);
            // PD-R14 PD-F4
            } else if let Some(message) = open.repeat(now, id, self.config.resend_us) {
                let peer = open.peer;
                self.counters.resends += 1;
                self.send(peer, message);
            }
        }
    }

    /// When [`Self::handle_timeout`] has something to do.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.attempts.values().filter_map(|open| open.due(&self.config)).min()
    }

    /// The next thing to do or to know.
    pub fn poll_output(&mut self) -> Option<ReceiverOutput> {
        self.outputs.pop_front()
    }

    /// Whether a message of the sender meets a live attempt on its own link. Anything else is
    /// counted, and a sender that believes in an attempt that is not here is told so: with no
    /// attempt there is no read either.
    fn answered(&mut self, now: Time, peer: PeerId, attempt: AttemptId) -> bool {
        let Some(open) = self.attempts.get_mut(&attempt).filter(|open| open.peer == peer) else {
            self.counters.dropped_late += 1;
            // PD-R15
            let text = String::from("attempt is not known");
            self.send(peer, Message::Failed { attempt, code: code::UNKNOWN, text });
            return false;
        };
        let Some(state) = open.state.after(ReceiverEvent::Answered) else {
            self.counters.dropped_late += 1;
            return false;
        };
        if open.state != state {
            open.progress = now;
        }
        open.state = state;
        true
    }

    fn on_ready(
        &mut self,
        now: Time,
        peer: PeerId,
        attempt: AttemptId,
        seq: u32,
        items: Vec<Item>,
    ) {
        let Some(open) = self.attempts.get_mut(&attempt) else { return };
        let Some(regions) = self.peers.get(&peer).map(|peer| &peer.regions) else { return };
        if let Err(text) = open.note_seq(seq, items.len()) {
            return self.fail(now, attempt, FailReason::Violation(text));
        }
        let mut ready = Vec::new();
        for item in items {
            match open.offer(now, item, regions) {
                Ok(Offer::New(page)) => {
                    self.counters.items_received += 1;
                    ready.push(page);
                }
                Ok(_) => self.counters.dropped_duplicate += 1,
                Err(text) => return self.fail(now, attempt, FailReason::Violation(text)),
            }
        }
        self.enqueue(peer, attempt, ready);
    }

    fn on_final(&mut self, now: Time, attempt: AttemptId, record: FinalRecord, hash: [u8; 16]) {
        let Some(open) = self.attempts.get_mut(&attempt) else { return };
        match open.final_record(now, record, hash) {
            Ok(true) => self.check_complete(now, attempt),
            Ok(false) => self.counters.dropped_duplicate += 1,
            Err(text) => self.fail(now, attempt, FailReason::Violation(text)),
        }
    }

    fn check_complete(&mut self, now: Time, attempt: AttemptId) {
        let Some(open) = self.attempts.get_mut(&attempt) else { return };
        if !open.is_live() {
            return;
        }
        match open.complete() {
            None => {}
            Some(Err(text)) => self.fail(now, attempt, FailReason::Violation(text)),
            Some(Ok(record)) => {
                // PD-R12
                open.state = open.state.after(ReceiverEvent::Complete).unwrap_or(open.state);
                let message = Message::Done { attempt, bytes: open.bytes };
                let peer = open.peer;
                open.close(now, message.clone(), self.config.resend_us);
                self.counters.attempts_completed += 1;
                self.send(peer, message);
                self.outputs.push_back(ReceiverOutput::Completed { attempt, record });
            }
        }
    }

    /// A page is wrong or stale: its group gets fresh pages once, then the attempt fails.
    fn page_failed(&mut self, now: Time, attempt: AttemptId, page: u32, fault: PageFault) {
        let Some(open) = self.attempts.get_mut(&attempt) else { return };
        let peer = open.peer;
        if !open.is_live() {
            open.op_over(page);
            return self.settle(attempt);
        }
        let key = open.key(page);
        self.outputs.push_back(ReceiverOutput::Wrong { attempt, peer, key, fault });
        // PD-V3
        let second = open.page_failed(now, page);
        if second {
            let reason = match fault {
                PageFault::Stale => FailReason::Stale { key },
                PageFault::Mismatch => FailReason::Mismatch { key },
            };
            self.fail(now, attempt, reason);
        }
        self.settle(attempt);
    }

    /// Gives up: no new gets; the rest of the end comes when the own operations have ended.
    fn fail(&mut self, now: Time, attempt: AttemptId, reason: FailReason) {
        let Some(open) = self.attempts.get_mut(&attempt) else { return };
        let Some(state) = open.state.after(ReceiverEvent::Fail) else {
            self.counters.dropped_late += 1;
            return;
        };
        open.state = state;
        let text = clip(&reason.to_string());
        open.close(
            now,
            Message::Failed { attempt, code: reason.code(), text },
            self.config.resend_us,
        );
        let peer = open.peer;
        self.send(peer, Message::Cancel { attempt });
        self.report_failure(attempt, reason);
        self.settle(attempt);
    }

    fn report_failure(&mut self, attempt: AttemptId, why: FailReason) {
        self.counters.attempts_failed += 1;
        *why.counter(&mut self.counters) += 1;
        self.outputs.push_back(ReceiverOutput::Failed { attempt, why });
    }

    /// Says what became possible because an operation ended: fresh targets, or quiet.
    fn settle(&mut self, attempt: AttemptId) {
        let Some(open) = self.attempts.get_mut(&attempt) else { return };
        match open.state {
            ReceiverState::Pulling | ReceiverState::Wanting => {
                let groups = open.take_fresh();
                if !groups.is_empty() {
                    self.counters.group_retries += groups.len() as u64;
                    self.outputs.push_back(ReceiverOutput::Fresh { attempt, groups });
                }
            }
            // PD-F2 PD-G3 PD-G5
            ReceiverState::Draining | ReceiverState::Orphaned
                if guard!(DrainProof, open.in_flight == 0) =>
            {
                let was = open.state;
                open.state = was.after(ReceiverEvent::Drained).unwrap_or(was);
                let peer = open.peer;
                let last = open.drained();
                self.outputs.push_back(ReceiverOutput::Quiet { attempt });
                match last {
                    Some(message) if was == ReceiverState::Draining => self.send(peer, message),
                    Some(_) | None => self.forget(attempt),
                }
            }
            ReceiverState::Draining
            | ReceiverState::Orphaned
            | ReceiverState::Closing
            | ReceiverState::Gone => {}
        }
    }

    fn enqueue(&mut self, peer: PeerId, attempt: AttemptId, pages: Vec<u32>) {
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.queue.extend(pages.into_iter().map(|page| (attempt, page)));
        }
        self.pump(peer);
    }

    /// Starts gets while there is room.
    fn pump(&mut self, id: PeerId) {
        let Some(peer) = self.peers.get_mut(&id) else { return };
        // PD-R9
        while peer.in_flight < self.config.in_flight_max {
            let Some((attempt, page)) = peer.queue.pop_front() else { return };
            let Some(open) = self.attempts.get_mut(&attempt) else { continue };
            let Some(get) = open.pull(page) else { continue };
            peer.in_flight += 1;
            let op = self.ops.insert(Op { attempt, page, peer: id, step: Step::Pull });
            let get = Get { op, ..get };
            self.outputs.push_back(ReceiverOutput::Get { peer: id, attempt, get });
        }
    }

    fn op_ended(&mut self, peer: PeerId) {
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.in_flight = entry.in_flight.saturating_sub(1);
        }
    }

    fn forget(&mut self, attempt: AttemptId) {
        self.attempts.remove(&attempt);
        if self.ended.insert(attempt) {
            self.ended_order.push_back(attempt);
            if self.ended_order.len() > self.config.ended_max
                && let Some(oldest) = self.ended_order.pop_front()
            {
                self.ended.remove(&oldest);
            }
        }
    }

    fn send(&mut self, peer: PeerId, message: Message) {
        self.outputs.push_back(ReceiverOutput::Send { peer, message });
    }
}

#[cfg(test)]
mod tests;
