//! Prompts that wait a moment for an answer of the store that servers share: whether another one
//! has computed their beginning.

use super::Worker;
use super::cache::Cache;
use super::sequence::State;
use crate::scheduler::SeqId;
use hicache::ObjectKey;
use hicache::tiers::{Tier, Tiers};
use std::collections::BTreeMap;
use std::time::Duration;

/// Objects of one prompt that are looked for where others write too.
pub(super) const PROBES_OF_PROMPT: usize = 64;
/// How long a prompt waits for what is looked for. Computing a block takes longer than an answer of a
/// store nearby, and a store that takes longer costs no prompt more than this.
const PATIENCE: Duration = Duration::from_millis(250);

/// Admitted sequences that wait for probes: until when, and which ones.
#[derive(Debug, Default)]
pub(super) struct Probing(BTreeMap<SeqId, (u64, Vec<ObjectKey>)>);

impl Probing {
    pub(super) fn remove(&mut self, id: SeqId) {
        self.0.remove(&id);
    }

    /// When the next one waits no longer, in microseconds of the cache's clock.
    pub(super) fn due(&self) -> Option<u64> {
        self.0.values().map(|(until, _)| *until).min()
    }

    /// One that has its answers, or has waited long enough.
    fn pop_ended(&mut self, tiers: &Tiers, now_us: u64) -> Option<SeqId> {
        let is_over = |until: u64, keys: &[ObjectKey]| {
            until <= now_us || !keys.iter().any(|key| tiers.is_probed(key))
        };
        let over = self.0.iter().find(|(_, (until, keys))| is_over(*until, keys));
        let id = *over?.0;
        self.0.remove(&id);
        Some(id)
    }
}

impl Worker {
    /// Has an admitted sequence wait for what is being looked for of its prompt; false if nothing
    /// is. It starts afterwards, whatever was found.
    pub(super) fn await_probes(&mut self, id: SeqId) -> bool {
        let (Some(cache), Some(seq)) = (&mut self.cache, self.sequences.get_mut(&id)) else {
            return false;
        };
        let was_waited_for = std::mem::replace(&mut seq.was_probed, true);
        if was_waited_for || cache.tiers.used(Tier::Remote).is_none() {
            return false;
        }
        let role = self.config.role;
        let mut keys = self.prefixes.unknown(&cache.tiers, seq, role, PROBES_OF_PROMPT);
        keys.retain(|key| cache.tiers.is_probed(key));
        if keys.is_empty() {
            return false;
        }
        seq.enter(State::Probing);
        let patience = u64::try_from(PATIENCE.as_micros()).unwrap_or(u64::MAX);
        let until = cache.now_us().saturating_add(patience);
        cache.probing.0.insert(id, (until, keys));
        true
    }

    /// Starts the sequences that have waited for their probes.
    pub(super) fn end_probing(&mut self) {
        let ended = |cache: &mut Cache| {
            let now = cache.now_us();
            cache.probing.pop_ended(&cache.tiers, now)
        };
        while let Some(id) = self.cache.as_mut().and_then(ended) {
            self.start(id);
        }
    }
}
