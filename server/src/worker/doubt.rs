//! What follows when bytes of a sealed page have turned out to be wrong: nothing that was made of
//! them serves anybody from then on.
//!
//! Nobody knows since when a page is wrong. So its prefix goes with all that follows it, from every
//! tier; answers that have begun to rest on it end with an error; prompts begin again.

use super::sequence::{Origin, State};
use super::{Worker, pages};
use crate::engine::FailureKind;
use crate::scheduler::SeqId;
use kv_pool::{Owner, PageRef, PageState, Proof};
use std::collections::BTreeSet;

/// What a client is told whose answer may rest on wrong bytes.
const DAMAGED: &str = "a page that the answer rests on was found damaged in memory";

impl Worker {
    /// Sets a page aside whose bytes are wrong, with all that may rest on it.
    pub(super) fn condemn(&mut self, page: PageRef) {
        let Ok(state) = self.pools.pages(page.pool).check(page) else { return };
        if state == PageState::Quarantined {
            return;
        }
        let owners = self.pools.pages(page.pool).owners(page).map(<[Owner]>::to_vec);
        let owners = owners.unwrap_or_default();
        if let Err(error) = self.pools.quarantine(page) {
            panic!("set {page} aside: {error}");
        }
        self.auditor.condemned.push(page);
        let mut doubted = BTreeSet::new();
        for owner in owners {
            match owner {
                Owner::Sequence(id) => {
                    doubted.insert(id);
                }
                Owner::Tree(node) => self.give_up_prefix(node, &mut doubted),
                // They end by themselves: a copy with its motion, which finds that the bytes are not
                // those that were sealed, a reader when its peer says so.
                Owner::LocalCopy(_) | Owner::RemoteReader(_) => {}
            }
        }
        for id in doubted {
            self.doubt(id);
        }
    }

    /// Gives up a node of the prefix tree and what follows it, in all tiers. Whoever uses one of its
    /// blocks may have computed with what is wrong.
    fn give_up_prefix(&mut self, node: u64, doubted: &mut BTreeSet<SeqId>) {
        let gone = match self.prefixes.give_up(&mut self.pools, node, doubted) {
            Ok(gone) => gone,
            Err(error) => panic!("give up the prefix of a damaged page: {error}"),
        };
        self.forget_below(&gone);
    }

    /// A sequence may have computed with wrong bytes.
    fn doubt(&mut self, id: SeqId) {
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        let has_begun = seq.tokens.len() > seq.prompt_len || seq.was_running();
        match seq.state {
            State::Prefilling | State::Decoding => match seq.origin {
                Origin::Client { .. } if !has_begun => self.begin_again(id),
                Origin::Client { .. } | Origin::Peer { .. } => {
                    self.end_failed(id, FailureKind::Integrity, DAMAGED);
                }
                Origin::Audit => self.drop_sequence(id),
            },
            State::Pulling { attempt } => {
                seq.enter(State::Unwinding { recompute: true });
                self.command(attempt, |driver| driver.cancel(attempt));
            }
            // The first two own no pages; what is loaded is looked at before it is used; the last
            // one's pages are freed when its reads have ended.
            State::Waiting | State::Probing | State::Loading { .. } | State::Unwinding { .. } => {}
        }
    }

    /// Computes a prompt again from its first token, or from what is left of its prefix.
    fn begin_again(&mut self, id: SeqId) {
        let Some(seq) = self.sequences.get_mut(&id) else { return };
        tracing::info!(request = seq.journey.request_id(), "its prompt is computed again");
        if let Some(table) = seq.table.take()
            && let Err(error) = self.pools.free_table(&table, seq.owner)
        {
            panic!("free the pages of sequence {id}: {error}");
        }
        seq.retracted();
        seq.blocks_saved = 0;
        let start = pages::start(&self.config, seq.tokens.len(), seq.most);
        self.scheduler.retract(id, start);
    }

    /// Frees condemned pages that nobody holds any more.
    pub(super) fn free_condemned(&mut self) {
        let pages = std::mem::take(&mut self.auditor.condemned);
        for page in pages {
            match self.pools.pages(page.pool).owners(page) {
                Ok([]) => {
                    let proof = Proof::OwnCompletionDrained;
                    if let Err(error) = self.pools.release_quarantined(page, proof) {
                        panic!("free {page}, which was set aside: {error}");
                    }
                }
                Ok(_) => self.auditor.condemned.push(page),
                // Somebody else freed it.
                Err(_) => {}
            }
        }
    }
}
