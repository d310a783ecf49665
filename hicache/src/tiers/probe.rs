//! Looking for what others have put into a store since its index was made.

use super::Tiers;
use super::index::{Index, Way};
use super::types::{Move, Outcome, Store};
use crate::object::ObjectKey;
use alloc::collections::{BTreeSet, VecDeque};

/// Objects of wrong bytes that are remembered, so that no probe finds them again; beyond that the
/// one that was found first is forgotten.
const WRONG_MAX: usize = 4096;

/// Probes of one store.
#[derive(Debug, Default)]
pub(super) struct Probes {
    waiting: VecDeque<ObjectKey>,
    /// Those that wait and those under way.
    all: BTreeSet<ObjectKey>,
    under_way: usize,
    /// What this store has with wrong bytes, and in which order that was found.
    wrong: BTreeSet<ObjectKey>,
    wrong_order: VecDeque<ObjectKey>,
}

impl Probes {
    /// An object's bytes were found to be wrong.
    pub(super) fn note_wrong(&mut self, key: ObjectKey) {
        if !self.wrong.insert(key) {
            return;
        }
        self.wrong_order.push_back(key);
        if self.wrong_order.len() > WRONG_MAX
            && let Some(oldest) = self.wrong_order.pop_front()
        {
            self.wrong.remove(&oldest);
        }
    }

    /// An object was written anew.
    pub(super) fn note_written(&mut self, key: &ObjectKey) {
        if self.wrong.remove(key) {
            self.wrong_order.retain(|other| other != key);
        }
    }
}

impl Tiers {
    /// Looks for objects that no tier is known to have in the stores that others write too. What is
    /// found can be had from then on; nobody waits for it. Objects beyond
    /// [`Limits::probes_max`](super::Limits::probes_max) are left out, and so are all while a store
    /// is left alone, and those that it is known to have with wrong bytes.
    pub fn probe(&mut self, now_us: u64, keys: impl IntoIterator<Item = ObjectKey>) {
        self.now_us = self.now_us.max(now_us);
        for key in keys {
            if self.holds(&key).is_some() {
                continue;
            }
            for store in Store::ALL {
                self.want_probe(store, key);
            }
        }
        self.pump();
    }

    /// Whether an object is still being looked for.
    #[must_use]
    pub fn is_probed(&self, key: &ObjectKey) -> bool {
        self.probes.iter().any(|probes| probes.all.contains(key))
    }

    /// Probes that wait or are under way.
    #[must_use]
    pub fn probes(&self) -> usize {
        self.probes.iter().map(|probes| probes.all.len()).sum()
    }

    fn want_probe(&mut self, store: Store, key: ObjectKey) {
        let Some(index) = &self.stores[store as usize] else { return };
        let probes = &mut self.probes[store as usize];
        if index.limits().owned || !is_wanted(index, probes, &key) || probes.all.contains(&key) {
            return;
        }
        if index.is_paused() || probes.all.len() >= self.limits.probes_max {
            self.counters[store.tier() as usize].probes_dropped += 1;
            return;
        }
        probes.all.insert(key);
        probes.waiting.push_back(key);
    }

    /// Begins the next probe of a store; false if none can begin now.
    pub(super) fn pump_probe(&mut self, store: Store) -> bool {
        let Some(index) = &self.stores[store as usize] else { return false };
        let probes = &mut self.probes[store as usize];
        if probes.under_way >= index.limits().motions_max {
            return false;
        }
        let Some(key) = probes.waiting.pop_front() else { return false };
        let (is_paused, is_wanted) = (index.is_paused(), is_wanted(index, probes, &key));
        // It may have become known meanwhile; that is no drop.
        if is_paused || !is_wanted || self.holds(&key).is_some() {
            self.counters[store.tier() as usize].probes_dropped += u64::from(is_paused);
            self.probes[store as usize].all.remove(&key);
            return true;
        }
        self.probes[store as usize].under_way += 1;
        self.begin(Move::Probe { store, key });
        true
    }

    pub(super) fn probed(&mut self, store: Store, key: ObjectKey, outcome: Outcome) {
        let probes = &mut self.probes[store as usize];
        probes.under_way -= 1;
        probes.all.remove(&key);
        let is_wrong = probes.wrong.contains(&key);
        let counters = &mut self.counters[store.tier() as usize];
        counters.probes += 1;
        match outcome {
            // That a store answers such a question says little of how it reads.
            Outcome::Done => {
                counters.probes_found += 1;
                let index = self.stores[store as usize].as_mut();
                if let Some(index) = index.filter(|_| !is_wrong) {
                    index.find_new(key);
                }
            }
            Outcome::Missing => {}
            // Of another length: it is no use to read it.
            Outcome::Mismatch => {
                counters.mismatches += 1;
                probes.note_wrong(key);
            }
            Outcome::NoSpace | Outcome::Failed => {
                counters.failures += 1;
                self.did_not_work(store, Way::Up);
            }
        }
    }
}

/// Whether it is worth a probe.
fn is_wanted(index: &Index, probes: &Probes, key: &ObjectKey) -> bool {
    !index.knows(key) && !probes.wrong.contains(key)
}
