//! The fault `freed_at_abort`: a sequence lets go of its pages as soon as its client has gone, while its
//! hand-off may still write them.

use super::Worker;
use super::faults::FaultEvent;
use crate::faults::{Fault, armed};
use crate::scheduler::SeqId;
use kv_pool::Removed;

impl Worker {
    /// Frees the pages of a sequence whose hand-off has just been called off. Where the reads own what
    /// they write, the pages stay out of use all the same, and that is counted.
    pub(super) fn free_at_abort(&mut self, id: SeqId) {
        let Some(armed) = armed().filter(|armed| armed.injection.fault == Fault::FreedAtAbort)
        else {
            return;
        };
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        let Some(table) = seq.table.take() else { return };
        armed.note_strike();
        let (owner, name, asked) = (seq.owner, seq.name.clone(), seq.asked.clone());
        for page in table.all_pages() {
            let filling = self.pools.is_filling(page);
            let removed = match self.pools.remove_owner(page, owner, None) {
                Ok(removed) => removed,
                Err(error) => panic!("free a page of sequence {id} too early: {error}"),
            };
            let (Removed::StillOwned, true, Some(peer)) = (removed, filling, &asked) else {
                continue;
            };
            self.numbers.faults.count(FaultEvent::HeldBack, peer, page.pool.name());
            tracing::warn!(
                request = name,
                peer = peer.address,
                transport = peer.transport,
                kind = page.pool.name(),
                layer = "all",
                page = page.index,
                "a page was given up while a read may write it; it stays out of use until none can"
            );
        }
    }
}
