//! The decode side of a hand-off: asking for prompts, landing their pages, and what follows when
//! that does not work.

use super::faults::{FaultEvent, PeerName};
use super::known::Known;
use super::pair::PairHealth;
use super::push::code;
use super::refusal::condensed;
use super::sequence::{Sequence, State};
use super::{Peer, PeerKey, Role, Worker};
use crate::engine::FailureKind;
use crate::glue::handoff::{TagBinding, group_of, page_of, targets};
use crate::glue::payload::FirstToken;
use crate::glue::pools::PoolError;
use crate::scheduler::SeqId;
use kv_pool::{
    BLOCK_TOKENS, Owner, PageRef, PageTable, PlanEntry, PoolKind, Proof, WINDOW_PAGE_ROWS,
    handoff_plan, plan_hash, window_start,
};
use pd_transfer::endpoint::Upcall;
use pd_transfer::receiver::{FailReason, PageFault, Start, Target};
use pd_transfer::wire::{AttemptId, FinalRecord, Key, RefuseReason};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Most prefill workers that are asked for one prompt.
const ASKED_MAX: usize = 3;

/// Owner of pages that reads of a sequence's hand-off may write; motions of the cache have lower numbers.
const fn landing(id: SeqId) -> Owner {
    Owner::LocalCopy(1 << 63 | id)
}

impl Worker {
    /// News from the hand-off's driver.
    pub(super) fn upcall(&mut self, driver: usize, upcall: Upcall) {
        let Some(upcall) = self.order_news(upcall) else { return };
        match upcall {
            Upcall::Requested { attempt, peer, request, have } => {
                self.requested(driver, attempt, peer, &request, have);
            }
            Upcall::Cancelled { attempt } if self.is_route(attempt, driver) => {
                self.cancelled(attempt);
            }
            Upcall::Release { attempt, proof } if self.is_route(attempt, driver) => {
                self.release(attempt, proof);
            }
            // The end of an attempt that was refused, because its id was in use.
            Upcall::Cancelled { .. } | Upcall::Release { .. } => {}
            Upcall::Wrong { attempt, key, fault, .. } => self.wrong_page(attempt, key, fault),
            Upcall::Fresh { attempt, groups } => self.retry(attempt, &groups),
            Upcall::Completed { attempt, record } => self.landed(attempt, &record),
            Upcall::Failed { attempt, why } => self.pull_failed(attempt, &why),
            Upcall::Quiet { attempt } => self.quiet(attempt),
            Upcall::Overdue { attempt, held_us } => {
                tracing::warn!(%attempt, held_us, "a peer holds pages for long");
            }
            Upcall::NotOffered { attempt, error } => {
                tracing::warn!(%attempt, %error, "pages were not offered");
                // The peer must not wait for what will not come.
                self.command(attempt, |d| d.reject(attempt, code::FAILED, "pages not offered"));
                self.cancelled(attempt);
            }
            Upcall::NotRetargeted { attempt, error } => {
                // The attempt ended while they were looked for.
                tracing::debug!(%attempt, %error, "fresh pages were not taken");
            }
            Upcall::PeerUp { .. }
            | Upcall::PeerDown { .. }
            | Upcall::Refused { .. }
            | Upcall::NotReached { .. } => self.link_news(driver, upcall),
            Upcall::Event(text) => tracing::warn!("{}", first_line(&text)),
        }
    }

    /// News of links rather than of attempts.
    fn link_news(&mut self, driver: usize, upcall: Upcall) {
        match upcall {
            Upcall::PeerUp { peer, address, incarnation, role, limits } => {
                // That a process has reached its own other half is no news.
                let transport = self.link.as_ref().and_then(|link| link.transports.get(driver));
                if transport == Some(&"inprocess") {
                    tracing::debug!(address, %incarnation, ?role, "peer connected");
                } else {
                    tracing::info!(address, %incarnation, ?role, "peer connected");
                }
                self.shared.had_peer.store(true, Ordering::Release);
                self.shared.clear_refusal();
                self.shared.reached(&address);
                self.peers.insert(
                    (driver, peer),
                    Peer {
                        address,
                        pending: 0,
                        pair: PairHealth::default(),
                        tokens_max: limits.max_prompt_tokens,
                    },
                );
            }
            Upcall::PeerDown { peer, address, why, had_bye } => {
                // One of the two leaves in good order; everything else is a loss.
                if had_bye || self.shared.draining.load(Ordering::Acquire) {
                    tracing::info!(address, why = first_line(&why), "peer gone");
                } else {
                    tracing::warn!(address, why = first_line(&why), "peer lost");
                }
                self.shared.note_lost(&address, first_line(&why));
                self.peers.remove(&(driver, peer));
            }
            Upcall::Refused { address, reason, text } => {
                // The driver goes on trying, since the peer may be restarted with other flags.
                let full = text;
                let text = condensed(&full);
                if self.shared.note_refusal(&address, &text) {
                    tracing::debug!(address, "the whole refusal: {full}");
                    let hint = if reason == RefuseReason::Layout {
                        "; both sides need the same model, --numerics and --index-k-dtype"
                    } else {
                        ""
                    };
                    tracing::error!(address, ?reason, "hand-off refused{hint}: {text}");
                } else {
                    tracing::debug!(address, "hand-off still refused");
                }
            }
            Upcall::NotReached { address, text } => {
                // It is tried again for as long as the worker runs.
                if self.shared.note_unreached(&address, &text) {
                    tracing::warn!(
                        address,
                        "no prefill worker is reached there: {}; is it the address that the worker \
                         says decode workers connect to? It is tried again. Workers of one host \
                         that have another user, TMPDIR or container reach each other over TCP \
                         alone, which --disaggregation-transfer-backend auto tries by itself",
                        first_line(&text)
                    );
                } else {
                    tracing::debug!(address, "still not reached");
                }
            }
            _ => {}
        }
    }

    fn is_route(&self, attempt: AttemptId, driver: usize) -> bool {
        self.routes.get(&attempt) == Some(&driver)
    }

    /// Whether so little of a prompt is to be computed that asking another would take longer.
    pub(super) fn is_short(&mut self, id: SeqId) -> bool {
        let most = self.config.local_prefill_max as usize;
        if most == 0 {
            return false;
        }
        let Some(seq) = self.sequences.get_mut(&id) else { return false };
        // What would be needed to go on from a prefix here, which is more than its blocks.
        let here = self.prefixes.reach(None, seq, Role::Unified) as usize;
        seq.tokens.len().saturating_sub(here) <= most
    }

    /// The least busy prefill worker that a sequence was not asked of yet, one whose hand-offs fail
    /// last.
    fn best_peer(&self, seq: &Sequence) -> Option<(PeerKey, &Peer)> {
        if seq.tried.len() >= ASKED_MAX {
            return None;
        }
        let now = self.clock.elapsed();
        let untried = self.peers.iter().map(|(key, peer)| (*key, peer)).filter(|(_, peer)| {
            seq.tokens.len() <= peer.tokens_max as usize && !seq.tried.contains(&peer.address)
        });
        untried.min_by_key(|(key, peer)| (peer.pair.is_resting(now), peer.pending, *key))
    }

    /// Asks the least busy prefill worker for a prompt, of those that were not asked for it yet;
    /// false if there is none to ask.
    pub(super) fn start_pull(&mut self, id: SeqId) -> bool {
        let Some(seq) = self.sequences.get(&id) else { return false };
        let Some((key, chosen)) = self.best_peer(seq) else { return false };
        let address = chosen.address.clone();
        let key @ (driver, peer) = key;
        let (table, have) = match self.reserve_targets(id) {
            Ok(Some(reserved)) => reserved,
            Ok(None) => return false,
            Err(error) => {
                let text = error.to_string();
                self.end_failed(id, FailureKind::Unavailable, &text);
                return true;
            }
        };
        let (Some(link), Some(seq)) = (&self.link, self.sequences.get_mut(&id)) else {
            return false;
        };
        let n = seq.tokens.len() as u32;
        let plan = handoff_plan(self.pools.geometry(), n, have);
        let landing = match targets(&self.pools, &table, &plan) {
            Ok(landing) => landing,
            Err(error) => panic!("plan the hand-off of sequence {id}: {error}"),
        };
        let mut bytes = [0; 16];
        if let Err(error) = getrandom::fill(&mut bytes) {
            panic!("read random bytes for an attempt's id: {error}");
        }
        let attempt = AttemptId(bytes);
        let context = Arc::new(TagBinding::new(link.fingerprint, &seq.tokens));
        link.verifier.expect(attempt, Arc::clone(&context));
        let fresh: Vec<PageRef> =
            table.all_pages().filter(|page| self.pools.is_filling(*page)).collect();
        seq.journey.land(context.landed(), landing.len(), have * BLOCK_TOKENS);
        let request = seq.as_request();
        let start = Start {
            attempt,
            peer,
            request: request.encode(),
            have,
            plan_hash: plan_hash(&plan),
            plan: landing,
        };
        seq.table = Some(table);
        seq.blocks_sealed = have;
        seq.context = Some(context);
        seq.peer = Some(key);
        seq.tried.push(address.clone());
        let transport = link.transports.get(driver).copied().unwrap_or_default();
        seq.journey.meet(&address, transport);
        seq.asked = Some(PeerName { address, transport });
        seq.enter(State::Pulling { attempt });
        self.attempts.insert(attempt, id);
        self.routes.insert(attempt, driver);
        self.keep_landing(attempt, id, &fresh);
        self.witness_attempt(id, attempt, key);
        self.witness_reused(id);
        self.command(attempt, |driver| driver.start(start));
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.pending += 1;
        }
        true
    }

    /// The reads of an attempt own the pages that they write: whatever becomes of the sequence, nobody
    /// else gets these before the reads have ended.
    fn keep_landing(&mut self, attempt: AttemptId, id: SeqId, pages: &[PageRef]) {
        #[cfg(feature = "faults")]
        if crate::faults::is_trusting() {
            return;
        }
        for &page in pages {
            if let Err(error) = self.pools.add_owner(page, landing(id)) {
                panic!("give a page to the reads of sequence {id}: {error}");
            }
        }
        self.landing.entry(attempt).or_default().extend(pages);
    }

    /// No read of an attempt is under way any more.
    fn free_landing(&mut self, attempt: AttemptId, id: SeqId) {
        for page in self.landing.remove(&attempt).unwrap_or_default() {
            let proof = Some(Proof::OwnCompletionDrained);
            if let Err(error) = self.pools.remove_owner(page, landing(id), proof) {
                panic!("take a page from the reads of sequence {id}: {error}");
            }
        }
    }

    /// Pages for a whole prompt: its blocks, its last window rows, its carry; and how many of the
    /// blocks are here already.
    fn reserve_targets(&mut self, id: SeqId) -> Result<Option<(PageTable, u32)>, PoolError> {
        let Some(seq) = self.sequences.get(&id) else { return Ok(None) };
        let (owner, n) = (seq.owner, seq.tokens.len() as u32);
        let carry = self.prefixes.take(&mut self.pools, PoolKind::Carry, 1, owner)?;
        let window_first = window_start(n) / WINDOW_PAGE_ROWS;
        let mut table = PageTable::new(carry[0]);
        table.start_window(window_first);
        let mut fill = || {
            let known = self.reuse_blocks(id)?;
            let have = known.len() as u32;
            for page in known {
                table.push_block(page);
            }
            let (blocks, pools) = (n.div_ceil(BLOCK_TOKENS) - have, &mut self.pools);
            for page in self.prefixes.take(pools, PoolKind::Block, blocks, owner)? {
                table.push_block(page);
            }
            let windows = n.div_ceil(WINDOW_PAGE_ROWS) - window_first;
            for page in self.prefixes.take(pools, PoolKind::Window, windows, owner)? {
                table.push_window(page);
            }
            Ok(have)
        };
        match fill() {
            Ok(have) => Ok(Some((table, have))),
            Err(error) => {
                self.pools.free_table(&table, owner)?;
                Err(error)
            }
        }
    }

    /// Counts what happened to the hand-off of a sequence.
    fn count_fault(&mut self, id: SeqId, event: FaultEvent, kind: &'static str) {
        if let Some(peer) = self.sequences.get(&id).and_then(|seq| seq.asked.as_ref()) {
            self.numbers.faults.count(event, peer, kind);
        }
    }

    /// A page that was read is not the one that was offered.
    fn wrong_page(&mut self, attempt: AttemptId, key: Key, fault: PageFault) {
        let Some(id) = self.attempts.get(&attempt).copied() else { return };
        let Ok(entry) = PlanEntry::from_key(key.0) else { return };
        let PlanEntry { kind, layer, page_no, .. } = entry;
        let (event, advice) = match fault {
            PageFault::Mismatch => (
                FaultEvent::Mismatch,
                "bytes were lost or mixed on the way: if this peer shows more of them, take it out \
                 of service and test its memory and the link",
            ),
            PageFault::Stale => (
                FaultEvent::Stale,
                "the peer gave the page away while it was read: it was restarted, or gave this \
                 worker up",
            ),
        };
        self.count_fault(id, event, kind.name());
        let Some(seq) = self.sequences.get(&id) else { return };
        let Some(PeerName { address, transport }) = &seq.asked else { return };
        tracing::warn!(
            request = seq.name,
            peer = address,
            transport,
            kind = kind.name(),
            layer,
            page = page_no,
            "a page {fault}; it is set aside and read again; {advice}"
        );
    }

    /// Pages did not arrive as they were meant: sets them aside and gives the attempt fresh ones.
    fn retry(&mut self, attempt: AttemptId, groups: &[(u32, Vec<Key>)]) {
        let Some(id) = self.attempts.get(&attempt).copied() else { return };
        let mut landing = Vec::new();
        for (group, keys) in groups {
            self.numbers.quarantined_total += 1;
            let first = keys.first().and_then(|key| PlanEntry::from_key(key.0).ok());
            let pool = first.map_or("unknown", |entry| entry.pool.name());
            self.count_fault(id, FaultEvent::Quarantine, pool);
            match self.replace_group((attempt, id), *group, keys) {
                Ok(mut fresh) => {
                    self.count_fault(id, FaultEvent::Retry, pool);
                    landing.append(&mut fresh);
                }
                Err(error) => {
                    tracing::warn!(%error, %attempt, "no fresh pages for a retry");
                    self.command(attempt, |driver| driver.cancel(attempt));
                    if let Some(seq) = self.sequences.get_mut(&id)
                        && seq.state == (State::Pulling { attempt })
                    {
                        seq.enter(State::Unwinding { recompute: true });
                    }
                    return;
                }
            }
        }
        self.command(attempt, |driver| driver.retarget(attempt, landing));
    }

    fn replace_group(
        &mut self,
        (attempt, id): (AttemptId, SeqId),
        group: u32,
        keys: &[Key],
    ) -> Result<Vec<Target>, PoolError> {
        let Some(seq) = self.sequences.get_mut(&id) else { return Ok(Vec::new()) };
        let entries: Vec<PlanEntry> =
            keys.iter().filter_map(|key| PlanEntry::from_key(key.0).ok()).collect();
        let Some(table) = seq.table.as_mut() else { return Ok(Vec::new()) };
        let Some(entry) = entries.iter().find(|e| group_of(e) == group) else {
            return Ok(Vec::new());
        };
        let Some(old) = page_of(table, entry) else { return Ok(Vec::new()) };
        let fresh = self.prefixes.take(&mut self.pools, entry.pool, 1, seq.owner)?[0];
        match entry.pool {
            PoolKind::Block => table.replace_block(entry.page_no, fresh),
            PoolKind::Window => table.replace_window(entry.page_no, fresh),
            PoolKind::Carry => table.replace_carry(fresh),
        };
        self.pools.quarantine(old)?;
        self.pools.remove_owner(old, seq.owner, None)?;
        seq.quarantined.push(old);
        let landing = match targets(&self.pools, table, &entries) {
            Ok(landing) => landing,
            Err(error) => panic!("plan the retry of sequence {id}: {error}"),
        };
        self.keep_landing(attempt, id, &[fresh]);
        Ok(landing)
    }

    /// All pages of a prompt are here and verified.
    fn landed(&mut self, attempt: AttemptId, record: &FinalRecord) {
        let arrived = self.attempts.get(&attempt).copied().map(|id| self.arrived(id));
        let Some(id) = self.end_attempt(attempt) else { return };
        let vocab = self.model.config().vocab_size;
        self.free_quarantined(id);
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        if seq.state != (State::Pulling { attempt }) {
            // Called off while the last page landed.
            return self.unwound(id);
        }
        let first = match FirstToken::decode(&record.payload, vocab) {
            Ok(first) if first.tokens as usize == seq.tokens.len() => first,
            Ok(first) => {
                tracing::warn!(
                    sequence = id,
                    computed = first.tokens,
                    "peer computed another prompt length"
                );
                seq.enter(State::Unwinding { recompute: true });
                return self.unwound(id);
            }
            Err(error) => {
                tracing::warn!(sequence = id, %error, "first token unreadable");
                seq.enter(State::Unwinding { recompute: true });
                return self.unwound(id);
            }
        };
        // A worker that understood the request otherwise must not decide how its answer begins.
        if let Err(error) = seq.check_first(first.sampled.token, vocab) {
            tracing::warn!(sequence = id, %error, "first token refused");
            seq.enter(State::Unwinding { recompute: true });
            return self.unwound(id);
        }
        let seq_peer = seq.peer;
        seq.computed = first.tokens;
        seq.cached = first.cached;
        seq.from_tiers = first.cached_below;
        seq.tell_reach();
        seq.windows_sealed = seq.table.as_ref().map_or(0, PageTable::window_first_no);
        let known = Known::of(self.pools.geometry(), &arrived.unwrap_or_default());
        let sealed = self.settle_known(id, &known);
        if let Err(error) = sealed.and_then(|()| self.keep_blocks(id)) {
            panic!("seal and keep the pages of sequence {id}: {error}");
        }
        self.numbers.handoffs += 1;
        if let Some(peer) = seq_peer.and_then(|peer| self.peers.get_mut(&peer)) {
            peer.pair.handle_done();
        }
        self.deliver(id, first.sampled);
    }

    /// A hand-off ended without its pages.
    fn pull_failed(&mut self, attempt: AttemptId, why: &FailReason) {
        let Some(id) = self.attempts.get(&attempt).copied() else { return };
        self.count_fault(id, FaultEvent::Failed, reason(why));
        self.pair_failed(id, why);
        if let Some(seq) = self.sequences.get_mut(&id)
            && seq.state == (State::Pulling { attempt })
        {
            // What was wrong with pages is not tried elsewhere: the prompt is computed here.
            seq.may_ask_again = matches!(
                why,
                FailReason::PeerLost
                    | FailReason::Rejected { .. }
                    | FailReason::Timeout { .. }
                    | FailReason::Get { .. }
                    | FailReason::NotStarted(_)
            );
            let peer = seq.asked.as_ref();
            tracing::warn!(
                request = seq.name,
                peer = peer.map_or("", |peer| &peer.address),
                transport = peer.map_or("", |peer| peer.transport),
                "hand-off failed: {why}"
            );
            seq.enter(State::Unwinding { recompute: true });
        }
    }

    /// Takes note that a hand-off failed, unless it was called off here.
    fn pair_failed(&mut self, id: SeqId, why: &FailReason) {
        let now = self.clock.elapsed();
        let peer = self.sequences.get(&id).and_then(|seq| seq.peer);
        let Some(peer) = peer.and_then(|peer| self.peers.get_mut(&peer)) else { return };
        if !matches!(why, FailReason::Cancelled) && peer.pair.handle_failed(now) {
            let address = peer.address.as_str();
            tracing::warn!(address, "hand-offs from this peer fail: others are asked before it");
        }
    }

    /// None of our reads for this attempt is under way any more.
    fn quiet(&mut self, attempt: AttemptId) {
        let Some(id) = self.end_attempt(attempt) else { return };
        self.free_quarantined(id);
        self.unwound(id);
    }

    fn end_attempt(&mut self, attempt: AttemptId) -> Option<SeqId> {
        if let Some(link) = &self.link {
            link.verifier.forget(attempt);
        }
        self.routes.remove(&attempt);
        let id = self.attempts.remove(&attempt)?;
        self.free_landing(attempt, id);
        // Of an attempt that failed; what was made on its way is of no use.
        drop(self.arrived(id));
        if let Some(peer) = self.sequences.get(&id).and_then(|s| s.peer)
            && let Some(peer) = self.peers.get_mut(&peer)
        {
            peer.pending = peer.pending.saturating_sub(1);
        }
        Some(id)
    }

    fn free_quarantined(&mut self, id: SeqId) {
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        for page in std::mem::take(&mut seq.quarantined) {
            if let Err(error) = self.pools.release_quarantined(page, Proof::OwnCompletionDrained) {
                panic!("free a quarantined page of sequence {id}: {error}");
            }
        }
    }

    /// Frees what an attempt had reserved; goes on by computing the prompt here, or ends.
    fn unwound(&mut self, id: SeqId) {
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        if let Some(table) = seq.table.take() {
            let owner: Owner = seq.owner;
            if let Err(error) = self.pools.free_table(&table, owner) {
                panic!("free the pages of sequence {id}: {error}");
            }
        }
        seq.blocks_sealed = 0;
        seq.windows_sealed = 0;
        match seq.state {
            State::Unwinding { recompute: true } => {
                let (name, failed) = (seq.name.clone(), seq.asked.clone());
                if std::mem::take(&mut seq.may_ask_again) && self.start_pull(id) {
                    // Counted for the one that could not.
                    if let Some(failed) = &failed {
                        self.numbers.faults.count(FaultEvent::AskedAgain, failed, "request");
                    }
                    let peer = self.sequences.get(&id).and_then(|seq| seq.asked.as_ref());
                    let peer = peer.map_or("", |peer| &peer.address);
                    tracing::info!(request = name, peer, "another prefill worker is asked");
                    return;
                }
                tracing::info!(request = name, "the prompt is computed here");
                self.numbers.recomputed += 1;
                self.count_fault(id, FaultEvent::Recompute, "request");
                self.start_local(id);
            }
            State::Unwinding { recompute: false }
            | State::Pulling { .. }
            | State::Loading { .. }
            | State::Probing
            | State::Waiting
            | State::Prefilling
            | State::Decoding => self.drop_sequence(id),
        }
    }
}

/// A word for why a hand-off failed, for a label.
const fn reason(why: &FailReason) -> &'static str {
    match why {
        FailReason::NotStarted(_) => "not_started",
        FailReason::Rejected { .. } => "rejected",
        FailReason::PeerLost => "peer_lost",
        FailReason::Timeout { .. } => "timeout",
        FailReason::Violation(_) => "violation",
        FailReason::Mismatch { .. } => "mismatch",
        FailReason::Stale { .. } => "stale",
        FailReason::Get { .. } => "get",
        FailReason::Cancelled => "cancelled",
        _ => "other",
    }
}

/// The first line of a text that may hold whole layouts.
fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}
