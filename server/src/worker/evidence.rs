//! Digests of a request's pages at every stop, for requests of a worker that was told to keep them.
//! Nothing is digested otherwise.

use super::sequence::{Origin, Sequence};
use super::{PeerKey, Worker};
use crate::clock::{Clock, wall_time};
use crate::evidence::{Attempt, Book, Event, Evidence, Part, Stop};
use crate::glue::handoff::{Arrival, TagBinding, digest_of_entry};
use crate::glue::objects::{ObjectMemory, ObjectPages};
use crate::scheduler::SeqId;
use hicache::ObjectKey;
use hicache::tiers::Move;
use kv_pool::{
    BLOCK_TOKENS, ChainHash, PageDigest, PageRef, PageState, PlanEntry, PoolKind, WINDOW_PAGE_ROWS,
    written_rows,
};
use pd_transfer::wire::AttemptId;
use std::collections::VecDeque;

/// What a worker keeps of its last requests.
#[derive(Debug)]
pub(super) struct Witness {
    book: Book<SeqId>,
    clock: Clock,
    memory: ObjectMemory,
    /// Hashes of the blocks of requests, so that it is known whose an object is.
    chains: VecDeque<(SeqId, Vec<ChainHash>)>,
    most: usize,
}

impl Witness {
    pub(super) fn new(most: usize, memory: ObjectMemory) -> Self {
        let (clock, chains) = (Clock::start(), VecDeque::new());
        Self { book: Book::new(most), clock, memory, chains, most }
    }
}

impl Worker {
    /// A request has come.
    pub(super) fn witness_begin(&mut self, id: SeqId) {
        let (Some(witness), Some(seq)) = (&mut self.witness, self.sequences.get(&id)) else {
            return;
        };
        if matches!(seq.origin, Origin::Audit) {
            return;
        }
        let evidence = Evidence {
            request_id: seq.journey.request_id().to_owned(),
            role: self.config.role.name(),
            began_at: wall_time(),
            began: witness.clock.elapsed(),
            prompt_tokens: u32::try_from(seq.prompt_len).unwrap_or(u32::MAX),
            attempts: Vec::new(),
            events: Vec::new(),
            lost: 0,
            has_ended: false,
        };
        witness.book.begin(id, evidence);
        if witness.chains.len() >= witness.most {
            witness.chains.pop_front();
        }
        witness.chains.push_back((id, seq.chain.clone()));
    }

    /// A hand-off of the request begins; what lands is told by `context`.
    pub(super) fn witness_attempt(&mut self, id: SeqId, attempt: AttemptId, peer: PeerKey) {
        let Some(witness) = &mut self.witness else { return };
        let Some(evidence) = witness.book.of(&id) else { return };
        let peer_name = self.peers.get(&peer).map_or("", |peer| &peer.address).to_owned();
        let transports = self.link.as_ref().map(|link| &link.transports);
        let transport = transports.and_then(|all| all.get(peer.0)).copied().unwrap_or_default();
        let id = attempt.to_string();
        evidence.attempts.push(Attempt { id, peer: peer_name, transport });
    }

    /// Digests the rows of one page of a sequence.
    fn witness_page(&mut self, id: SeqId, stop: Stop, page: PageRef, page_no: u32, tokens: u32) {
        let geometry = std::sync::Arc::clone(self.pools.geometry());
        for section in geometry.sections(page.pool) {
            let rows = written_rows(&geometry, section.kind, page_no, tokens);
            if rows == 0 {
                continue;
            }
            let (kind, layer, pool) = (section.kind, section.layer, page.pool);
            let bytes = geometry.extents(kind, rows).bytes();
            let entry = PlanEntry { kind, layer, pool, page_no, rows, bytes };
            let Some(digest) = digest_of_entry(&self.pools, &entry, page) else { continue };
            self.witness_digest(id, stop, (&entry, tokens), digest, (None, None));
        }
    }

    fn witness_digest(
        &mut self,
        id: SeqId,
        stop: Stop,
        (entry, tokens): (&PlanEntry, u32),
        digest: PageDigest,
        (is_right, attempt): (Option<bool>, Option<u32>),
    ) {
        let Some(witness) = &mut self.witness else { return };
        let now = witness.clock.elapsed();
        let Some(evidence) = witness.book.of(&id) else { return };
        let at = now.saturating_sub(evidence.began);
        // What is fetched later is fetched for others.
        if evidence.has_ended && matches!(stop, Stop::Read | Stop::Loaded) {
            return;
        }
        let PlanEntry { kind, layer, pool, page_no, rows, .. } = *entry;
        let tokens = if pool == PoolKind::Carry { tokens } else { 0 };
        let part = Part { kind, layer, page_no, rows, tokens };
        evidence.note(Event { stop, part, digest, is_right, attempt, at });
    }

    /// A page of a sequence was sealed, or is shared with it.
    pub(super) fn witness_full(&mut self, id: SeqId, stop: Stop, page: PageRef, page_no: u32) {
        if self.witness.is_some() {
            let rows = match page.pool {
                PoolKind::Block => BLOCK_TOKENS,
                PoolKind::Window => WINDOW_PAGE_ROWS,
                PoolKind::Carry => return,
            };
            self.witness_page(id, stop, page, page_no, (page_no + 1) * rows);
        }
    }

    /// The pages that a sequence shares with others from now on.
    pub(super) fn witness_reused(&mut self, id: SeqId) {
        if self.witness.is_none() {
            return;
        }
        for (page, page_no) in self.pages_of(id) {
            // The others are still to be filled.
            if self.pools.pages(page.pool).check(page) != Ok(PageState::Sealed) {
                continue;
            }
            self.witness_full(id, Stop::Reused, page, page_no);
        }
    }

    /// Blocks and window pages of a sequence with their numbers.
    fn pages_of(&self, id: SeqId) -> Vec<(PageRef, u32)> {
        let table = self.sequences.get(&id).and_then(|seq| seq.table.as_ref());
        let Some(table) = table else { return Vec::new() };
        let blocks = table.blocks().iter().copied().zip(0..);
        blocks.chain(table.window().iter().copied().zip(table.window_first_no()..)).collect()
    }

    /// Pages of a plan at a stop, as they are now.
    pub(super) fn witness_plan(&mut self, id: SeqId, stop: Stop, entries: &[PlanEntry]) {
        if self.witness.is_none() {
            return;
        }
        let Some(seq) = self.sequences.get(&id) else { return };
        let (tokens, Some(table)) = (seq.tokens.len() as u32, &seq.table) else { return };
        let digest = |entry: &PlanEntry| {
            let page = crate::glue::handoff::page_of(table, entry)?;
            Some((*entry, digest_of_entry(&self.pools, entry, page)?))
        };
        let digests: Vec<_> = entries.iter().filter_map(digest).collect();
        for (entry, digest) in digests {
            self.witness_digest(id, stop, (&entry, tokens), digest, (None, None));
        }
    }

    /// What has landed of a sequence's pages, since the last call.
    pub(super) fn arrived(&mut self, id: SeqId) -> Vec<Arrival> {
        let Some(seq) = self.sequences.get(&id) else { return Vec::new() };
        let tokens = seq.tokens.len() as u32;
        let arrived = seq.context.as_deref().map(TagBinding::take_arrived).unwrap_or_default();
        self.witness_arrived(id, tokens, &arrived);
        arrived
    }

    fn witness_arrived(&mut self, id: SeqId, tokens: u32, arrived: &[Arrival]) {
        let Some(witness) = &mut self.witness else { return };
        let Some(evidence) = witness.book.of(&id) else { return };
        let attempt = u32::try_from(evidence.attempts.len()).ok().and_then(|n| n.checked_sub(1));
        for &(entry, digest, is_right) in arrived {
            self.witness_digest(
                id,
                Stop::Arrived,
                (&entry, tokens),
                digest,
                (Some(is_right), attempt),
            );
        }
    }

    /// A sequence ends: its pages as it leaves them, and no more of it.
    pub(super) fn witness_end(&mut self, id: SeqId, seq: &Sequence) {
        if self.witness.is_none() || matches!(seq.origin, Origin::Audit) {
            return;
        }
        if let Some(table) = &seq.table {
            let pages = table.blocks().iter().copied().zip(0..);
            let windows = table.window().iter().copied().zip(table.window_first_no()..);
            let pages: Vec<_> = pages.chain(windows).collect();
            for (page, page_no) in pages {
                self.witness_page(id, Stop::Ended, page, page_no, seq.computed);
            }
        }
        if let Some(evidence) = self.witness.as_mut().and_then(|w| w.book.of(&id)) {
            evidence.has_ended = true;
        }
    }

    /// The blocks of a sequence that have names by now.
    pub(super) fn witness_chain(&mut self, id: SeqId) {
        let (Some(witness), Some(seq)) = (&mut self.witness, self.sequences.get(&id)) else {
            return;
        };
        if let Some((_, chain)) = witness.chains.iter_mut().find(|(of, _)| *of == id) {
            chain.clone_from(&seq.chain);
        }
    }

    /// A motion of the cache has ended well: what its object is now.
    pub(super) fn witness_moved(&mut self, what: Move, pages: Option<ObjectPages>) {
        let Some(witness) = &self.witness else { return };
        let (stop, key, slot) = match what {
            Move::Save { key, slot } => (Stop::Saved, key, slot),
            Move::Read { key, slot, .. } => (Stop::Read, key, slot),
            Move::Load { key, .. } => {
                return pages.into_iter().for_each(|pages| self.witness_loaded(key, &pages));
            }
            Move::Write { .. } | Move::Remove { .. } | Move::Probe { .. } => return,
        };
        let object = self.cache.as_ref().and_then(|cache| cache.object(slot));
        let digests = object.and_then(|object| witness.memory.digests(object, key).ok());
        let digests = digests.unwrap_or_default();
        for (id, blocks) in self.users_of(key) {
            for (entry, digest) in &digests {
                let tokens = blocks * BLOCK_TOKENS;
                self.witness_digest(id, stop, (entry, tokens), *digest, (None, None));
            }
        }
    }

    /// Requests under way whose prompt has an object's block at its end, and how many blocks that is.
    fn users_of(&self, key: ObjectKey) -> Vec<(SeqId, u32)> {
        let Some(witness) = &self.witness else { return Vec::new() };
        let place = |(id, chain): &(SeqId, Vec<ChainHash>)| {
            let at = chain.iter().position(|hash| *hash == key.chain)?;
            Some((*id, u32::try_from(at).ok()? + 1))
        };
        witness.chains.iter().filter_map(place).collect()
    }

    fn witness_loaded(&mut self, key: ObjectKey, pages: &ObjectPages) {
        for (id, blocks) in self.users_of(key) {
            let end = blocks * (BLOCK_TOKENS / WINDOW_PAGE_ROWS);
            match *pages {
                ObjectPages::Block(page) => {
                    self.witness_full(id, Stop::Loaded, page, blocks - 1);
                }
                ObjectPages::Boundary { window, carry } => {
                    let first = end - window.len() as u32;
                    for (page, number) in window.into_iter().zip(first..) {
                        self.witness_full(id, Stop::Loaded, page, number);
                    }
                    self.witness_page(id, Stop::Loaded, carry, 0, blocks * BLOCK_TOKENS);
                }
            }
        }
    }

    /// What is known of requests of this name.
    pub(super) fn testify(&self, request_id: &str) -> Vec<Evidence> {
        let witness = self.witness.as_ref();
        witness.map(|w| w.book.named(request_id).cloned().collect()).unwrap_or_default()
    }
}
