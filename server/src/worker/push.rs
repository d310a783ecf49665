//! The prefill side of a hand-off: prompts of decode workers, and the pages lent to them.

use super::sequence::{Origin, Sequence};
use super::{PeerKey, Worker, WorkerMsg, pages};
use crate::engine::{FailureKind, Provenance};
use crate::evidence::Stop;
use crate::glue::handoff::{TagBinding, offer, page_of};
use crate::glue::order::Order;
use crate::glue::payload::{FirstToken, PrefillRequest};
use crate::grammar::{GrammarError, Live};
use crate::journey::{Outcome, Stage};
use crate::scheduler::SeqId;
use crate::trace::{Span, new_span_id};
use dsv4_model::sample::Sampled;
use kv_pool::{BLOCK_TOKENS, Owner, PageRef, PlanEntry, PoolKind, Proof, handoff_plan, plan_hash};
use pd_transfer::id::PeerId;
use pd_transfer::manifest::Manifest;
use pd_transfer::sender::Proof as ReleaseProof;
use pd_transfer::wire::AttemptId;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Pages that are offered at once: while the peer reads them the tags of the next ones are made.
pub const OFFER_PAGES: usize = 128;

/// Why a prefill worker refuses an attempt; travels in `Reject`.
pub(super) mod code {
    use pd_transfer::wire::code::UPPER;

    /// The request makes no sense to this worker.
    pub(in crate::worker) const BAD_REQUEST: u16 = UPPER;
    /// No room for it now.
    pub(in crate::worker) const BUSY: u16 = UPPER + 1;
    /// It was accepted and then failed here.
    pub(in crate::worker) const FAILED: u16 = UPPER + 2;
}

/// Pages that a peer may read until it says that it is done or its link is fenced.
#[derive(Debug)]
pub(super) struct Lent {
    /// The sequence whose promise of pages stands until they are back.
    seq: SeqId,
    reader: Owner,
    pages: BTreeSet<PageRef>,
}

/// A peer's prompt, and where it stands.
#[derive(Debug)]
pub(super) struct Asked {
    peer: PeerKey,
    request: PrefillRequest,
    /// Blocks that the peer has already.
    have: u32,
}

impl Worker {
    /// A decode worker wants a prompt computed.
    pub(super) fn requested(
        &mut self,
        driver: usize,
        attempt: AttemptId,
        peer: PeerId,
        request: &[u8],
        have: u32,
    ) {
        if self.routes.contains_key(&attempt) || self.lent.contains_key(&attempt) {
            // A driver refuses an id that it has seen; this one came through another driver.
            let handle = self.link.as_ref().and_then(|link| link.drivers.get(driver));
            let said = handle.map(|d| d.reject(attempt, code::BAD_REQUEST, "attempt id is in use"));
            tracing::warn!(%attempt, ?said, "attempt id used on two transports");
            return;
        }
        self.routes.insert(attempt, driver);
        if Order::is_one(request) {
            return self.take_order(attempt, (driver, peer), request);
        }
        if let Err((code, text)) = self.try_request((driver, peer), attempt, request, have) {
            tracing::warn!(%attempt, code, text, "prefill request refused");
            self.command(attempt, |driver| driver.reject(attempt, code, &text));
        }
    }

    fn try_request(
        &mut self,
        peer: PeerKey,
        attempt: AttemptId,
        request: &[u8],
        have: u32,
    ) -> Result<(), (u16, String)> {
        let vocab = self.model.config().vocab_size;
        let request = PrefillRequest::decode(request, vocab)
            .map_err(|error| (code::BAD_REQUEST, error.to_string()))?;
        self.could_take(&request, have)?;
        let asked = Asked { peer, request, have };
        let Some(source) = asked.request.source.clone() else {
            self.take_prompt(attempt, asked, None);
            return Ok(());
        };
        let Some((grammars, inbox)) = self.grammars.clone() else {
            let text = "this prefill worker constrains no answers".to_owned();
            return Err((code::BAD_REQUEST, text));
        };
        // What there is of the output already; a sequence that was retracted brings some along.
        let output = asked.request.prompt.len() - asked.request.output as usize;
        let output = asked.request.prompt[output..].to_vec();
        self.compiling.insert(attempt, asked);
        // Others go on while the grammar is compiled; the mask of the first token comes with it.
        grammars.compile_then(source, move |result| {
            let result = result.and_then(|constraint| constraint.resume(&output));
            // A worker that has ended needs no grammar.
            drop(inbox.send(WorkerMsg::Compiled { attempt, result }));
        });
        Ok(())
    }

    /// The grammar of a peer's prompt is there, or will not be.
    pub(super) fn compiled(&mut self, attempt: AttemptId, result: Result<Live, GrammarError>) {
        // It may have been called off meanwhile.
        let Some(asked) = self.compiling.remove(&attempt) else { return };
        let said = match result {
            Ok(live) => self.could_take(&asked.request, asked.have).map(|()| {
                self.take_prompt(attempt, asked, Some(live));
            }),
            Err(error @ GrammarError::Busy { .. }) => Err((code::BUSY, error.to_string())),
            Err(error) => Err((code::BAD_REQUEST, error.to_string())),
        };
        if let Err((code, text)) = said {
            tracing::warn!(%attempt, code, text, "prefill request refused");
            self.command(attempt, |driver| driver.reject(attempt, code, &text));
        }
    }

    /// Whether a peer's prompt can be computed here.
    fn could_take(&self, request: &PrefillRequest, have: u32) -> Result<(), (u16, String)> {
        let (tokens, limit) = (request.prompt.len(), self.config.context_length as usize);
        if tokens > limit {
            let text = format!("the prompt has {tokens} tokens, this prefill worker takes {limit}");
            return Err((code::BAD_REQUEST, text));
        }
        if have as usize > tokens / BLOCK_TOKENS as usize {
            let text = format!("{have} blocks of a prompt of {tokens} tokens are there already");
            return Err((code::BAD_REQUEST, text));
        }
        let need = pages::need(&self.config, tokens, 0);
        if !self.scheduler.could_fit(need) {
            let text = format!("a prompt of {tokens} tokens never fits this worker's pages");
            return Err((code::BAD_REQUEST, text));
        }
        if self.shared.draining.load(Ordering::Acquire) {
            return Err((code::BUSY, "this prefill worker is shutting down".to_owned()));
        }
        let waiting = self.scheduler.waiting() + self.compiling.len();
        if waiting >= self.config.max_queued as usize {
            let text = format!("{waiting} prompts are waiting already");
            return Err((code::BUSY, text));
        }
        Ok(())
    }

    /// Queues a peer's prompt.
    fn take_prompt(&mut self, attempt: AttemptId, asked: Asked, live: Option<Live>) {
        let Asked { peer, request, have } = asked;
        let Some(link) = &self.link else { return };
        let tokens = request.prompt.len();
        let need = pages::need(&self.config, tokens, 0);
        let id = self.next_id;
        self.next_id += 1;
        let context = Arc::new(TagBinding::new(link.fingerprint, &request.prompt));
        let plan = handoff_plan(self.pools.geometry(), tokens as u32, have);
        let origin = Origin::Peer { attempt, plan, blocks_offered: have, offered: Manifest::new() };
        let parent = request.trace;
        let span = parent.and_then(|parent| Some(Span::below(parent, new_span_id()?)));
        let provenance = Provenance { request_id: request.request_id.clone(), span };
        let journey = self.set_out(id, &request.id, &provenance, tokens);
        if let Some(known) = self.peers.get(&peer) {
            let transport = link.transports.get(peer.0).copied().unwrap_or_default();
            journey.meet(&known.address, transport);
        }
        let seq = Sequence::of_peer(id, request, live, origin, (peer, context), journey);
        self.sequences.insert(id, seq);
        self.attempts.insert(attempt, id);
        self.enqueue(id, need);
        self.witness_attempt(id, attempt, peer);
    }

    /// Offers blocks that have become complete, while the rest of the prompt is computed.
    pub(super) fn offer_blocks(&mut self, id: SeqId) {
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        let Origin::Peer { plan, blocks_offered, .. } = &mut seq.origin else { return };
        let complete = seq.computed / BLOCK_TOKENS;
        let from = *blocks_offered;
        if complete <= from {
            return;
        }
        let ripe: Vec<PlanEntry> = plan
            .iter()
            .filter(|e| e.pool == PoolKind::Block && (from..complete).contains(&e.page_no))
            .copied()
            .collect();
        *blocks_offered = complete;
        self.lend(id, &ripe);
    }

    /// The prompt is computed: offers the rest and the first token.
    pub(super) fn finish_push(&mut self, id: SeqId, sampled: Sampled) {
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        let Origin::Peer { plan, blocks_offered, .. } = &mut seq.origin else { return };
        let from = *blocks_offered;
        let rest: Vec<PlanEntry> = plan
            .iter()
            .filter(|e| e.pool != PoolKind::Block || e.page_no >= from)
            .copied()
            .collect();
        let Some(table) = &seq.table else { return };
        // The part-filled pages are snapshots from now on: nothing writes to them any more.
        let open: Vec<PageRef> =
            table.all_pages().filter(|page| self.pools.is_filling(*page)).collect();
        for page in open {
            if let Err(error) = self.pools.seal(page) {
                panic!("seal the pages of sequence {id}: {error}");
            }
        }
        let is_open = |entry: &PlanEntry| {
            let rows = self.pools.geometry().rows_per_page(entry.kind);
            entry.pool == PoolKind::Carry || entry.rows < rows
        };
        let snapshots: Vec<PlanEntry> = rest.iter().copied().filter(is_open).collect();
        self.witness_plan(id, Stop::Sealed, &snapshots);
        if !self.lend(id, &rest) {
            return;
        }
        let Some(seq) = self.sequences.get(&id) else { return };
        let Origin::Peer { attempt, plan, offered, .. } = &seq.origin else { return };
        let first = FirstToken {
            tokens: seq.tokens.len() as u32,
            cached: seq.cached(),
            cached_below: seq.cached_below(),
            sampled,
        };
        let record = offered.record(plan_hash(plan), first.encode());
        let attempt = *attempt;
        seq.journey.enter(Stage::HandOff);
        seq.journey.conclude(Outcome::Finished, None);
        self.command(attempt, |driver| driver.finish(attempt, record));
        self.numbers.ended[0] += 1;
        self.numbers.handoffs += 1;
        self.drop_sequence(id);
    }

    /// Offers pages and marks them as read by the peer; false if the sequence failed over it.
    fn lend(&mut self, id: SeqId, entries: &[PlanEntry]) -> bool {
        entries.chunks(OFFER_PAGES).all(|entries| self.lend_some(id, entries))
    }

    fn lend_some(&mut self, id: SeqId, entries: &[PlanEntry]) -> bool {
        let Some(seq) = self.sequences.get_mut(&id) else { return false };
        let (Some(table), Some(context)) = (&seq.table, &seq.context) else { return false };
        let items = match offer(&self.pools, table, context, entries) {
            Ok(items) => items,
            Err(error) => {
                tracing::error!(%error, sequence = id, "offer pages");
                self.end_failed(id, FailureKind::Internal, "the pages could not be offered");
                return false;
            }
        };
        let Origin::Peer { attempt, offered, .. } = &mut seq.origin else { return false };
        let attempt = *attempt;
        let lent = self.lent.entry(attempt).or_insert_with(|| Lent {
            seq: id,
            reader: Owner::RemoteReader(id),
            pages: BTreeSet::new(),
        });
        for entry in entries {
            let Some(page) = page_of(table, entry) else { continue };
            if !lent.pages.insert(page) {
                continue;
            }
            if let Err(error) = self.pools.add_owner(page, lent.reader) {
                panic!("lend a page of sequence {id}: {error}");
            }
        }
        offered.extend(&items);
        self.witness_plan(id, Stop::Offered, entries);
        self.command(attempt, |driver| driver.ready(attempt, items));
        true
    }

    /// The peer has called the attempt off, or is gone: stop computing.
    pub(super) fn cancelled(&mut self, attempt: AttemptId) {
        self.compiling.remove(&attempt);
        if let Some(id) = self.attempts.get(&attempt).copied() {
            self.cancel(id);
        }
    }

    /// No read of the attempt's pages can happen any more.
    pub(super) fn release(&mut self, attempt: AttemptId, proof: ReleaseProof) {
        self.cancelled(attempt);
        self.routes.remove(&attempt);
        let proof = match proof {
            ReleaseProof::PeerAcknowledged => Proof::PeerAcknowledged,
            ReleaseProof::LinkFenced => Proof::LinkFenced,
        };
        let Some(lent) = self.lent.remove(&attempt) else { return };
        self.scheduler.remove(lent.seq);
        self.shared.journeys.end(lent.seq);
        for page in lent.pages {
            if let Err(error) = self.pools.remove_owner(page, lent.reader, Some(proof)) {
                panic!("take back a page of attempt {attempt}: {error}");
            }
        }
    }
}
