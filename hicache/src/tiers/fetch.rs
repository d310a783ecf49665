//! Fetches: objects on their way to device pages.

use super::host::State;
use super::index::Way;
use super::types::{Action, FetchEnd, FetchError, FetchId, Move, Outcome, Tier};
use super::{Slot, Tiers};
use crate::object::ObjectKey;
use alloc::collections::BTreeSet;
use alloc::vec::Vec;

/// One fetch.
#[derive(Debug)]
pub(super) struct Fetch {
    pub(super) deadline_us: u64,
    /// Objects that are not in the host yet.
    waiting: BTreeSet<ObjectKey>,
    /// Loads under way.
    loading: usize,
    /// The first object that could not be had.
    miss: Option<ObjectKey>,
}

impl Tiers {
    /// Brings objects to device pages of the caller, each by a [`Move::Load`] of its own, in any
    /// order. [`Action::Fetched`] says how it ended.
    ///
    /// # Errors
    ///
    /// [`FetchError`] if it can't begin; nothing is under way then.
    pub fn fetch(
        &mut self,
        now_us: u64,
        fetch: FetchId,
        keys: &[ObjectKey],
        deadline_us: u64,
    ) -> Result<(), FetchError> {
        self.now_us = self.now_us.max(now_us);
        let limit = self.limits.fetch_objects_max;
        if keys.is_empty() || keys.len() > limit {
            return Err(FetchError::Objects { objects: keys.len(), limit });
        }
        if self.fetches.contains_key(&fetch) {
            return Err(FetchError::Exists { fetch });
        }
        if self.fetches.len() >= self.limits.fetches_max {
            return Err(FetchError::Full { limit: self.limits.fetches_max });
        }
        let keys: BTreeSet<ObjectKey> = keys.iter().copied().collect();
        if let Some(key) = keys.iter().find(|key| self.holds(key).is_none()) {
            return Err(FetchError::Missing { key: *key });
        }
        let entry = Fetch { deadline_us, waiting: BTreeSet::new(), loading: 0, miss: None };
        self.fetches.insert(fetch, entry);
        for key in keys {
            match self.host.find(&key) {
                Some((slot, State::Ready)) => self.begin_load(fetch, key, slot),
                found => {
                    self.wait_for(fetch, key);
                    if found.is_none() {
                        self.want_read(key);
                    }
                }
            }
        }
        self.pump();
        Ok(())
    }

    /// Gives a fetch up; false if there is none. Pages that are in motion already belong to that
    /// motion until it has ended.
    pub fn cancel(&mut self, fetch: FetchId) -> bool {
        let Some(entry) = self.fetches.remove(&fetch) else { return false };
        self.stop_waiting(fetch, &entry.waiting);
        true
    }

    fn begin_load(&mut self, fetch: FetchId, key: ObjectKey, slot: Slot) {
        self.host.begin_use(slot);
        if let Some(entry) = self.fetches.get_mut(&fetch) {
            entry.loading += 1;
        }
        self.begin(Move::Load { key, slot, fetch });
    }

    fn wait_for(&mut self, fetch: FetchId, key: ObjectKey) {
        self.waiting.entry(key).or_default().insert(fetch);
        if let Some(entry) = self.fetches.get_mut(&fetch) {
            entry.waiting.insert(key);
        }
    }

    fn stop_waiting(&mut self, fetch: FetchId, keys: &BTreeSet<ObjectKey>) {
        let mut unwanted = BTreeSet::new();
        for key in keys {
            let Some(fetches) = self.waiting.get_mut(key) else { continue };
            fetches.remove(&fetch);
            if fetches.is_empty() {
                self.waiting.remove(key);
                unwanted.insert(*key);
            }
        }
        // Or the queue grows with every fetch that is given up.
        let queued = &mut self.queued;
        self.reads.retain(|key| !unwanted.contains(key) || !queued.remove(key));
    }

    /// Queues the read of an object that fetches wait for.
    pub(super) fn want_read(&mut self, key: ObjectKey) {
        if self.queued.insert(key) {
            self.reads.push_back(key);
        } else if let Some(position) = self.prefetches.iter().position(|other| *other == key) {
            // It is in no hurry there.
            self.prefetches.remove(position);
            self.reads.push_back(key);
        }
    }

    /// An object is in the host now.
    pub(super) fn arrived(&mut self, key: ObjectKey) {
        let Some(fetches) = self.waiting.remove(&key) else { return };
        let Some((slot, State::Ready)) = self.host.find(&key) else {
            // It was flushed while it came.
            self.waiting.insert(key, fetches);
            return self.want_read(key);
        };
        for fetch in fetches {
            if let Some(entry) = self.fetches.get_mut(&fetch) {
                entry.waiting.remove(&key);
                self.begin_load(fetch, key, slot);
            }
        }
    }

    /// An object that fetches wait for can't be had.
    pub(super) fn fail_waiting(&mut self, key: ObjectKey) {
        let Some(fetches) = self.waiting.remove(&key) else { return };
        if self.source(&key).is_some() {
            self.waiting.insert(key, fetches);
            return self.want_read(key);
        }
        for fetch in fetches {
            self.miss(fetch, key);
        }
    }

    /// A fetch will not be complete; it ends when none of its pages is in motion.
    fn miss(&mut self, fetch: FetchId, key: ObjectKey) {
        let Some(entry) = self.fetches.get_mut(&fetch) else { return };
        entry.miss.get_or_insert(key);
        let waiting = core::mem::take(&mut entry.waiting);
        self.stop_waiting(fetch, &waiting);
        self.end_if_over(fetch);
    }

    fn end_if_over(&mut self, fetch: FetchId) {
        let Some(entry) = self.fetches.get(&fetch) else { return };
        if entry.loading > 0 || !entry.waiting.is_empty() {
            return;
        }
        let end = entry.miss.map_or(FetchEnd::Complete, |key| FetchEnd::Miss { key });
        self.fetches.remove(&fetch);
        self.actions.push_back(Action::Fetched { fetch, end });
    }

    pub(super) fn loaded(&mut self, key: ObjectKey, slot: Slot, fetch: FetchId, outcome: Outcome) {
        if outcome == Outcome::Done {
            self.host.came_to_use(slot);
            let counters = &mut self.counters[Tier::Host as usize];
            counters.hits += 1;
            counters.hit_bytes += self.limits.object_bytes[key.part.position()];
        } else {
            self.count_failure(Tier::Host, outcome);
            self.host.doom(slot);
        }
        self.host.end_use(slot);
        let Some(entry) = self.fetches.get_mut(&fetch) else { return };
        entry.loading -= 1;
        if outcome == Outcome::Done {
            self.end_if_over(fetch);
        } else {
            self.miss(fetch, key);
        }
    }

    pub(super) fn end_late_fetches(&mut self) {
        let now = self.now_us;
        let late: Vec<FetchId> = self
            .fetches
            .iter()
            .filter(|(_, entry)| entry.deadline_us <= now)
            .map(|(fetch, _)| *fetch)
            .collect();
        for fetch in late {
            self.blame_stores(fetch);
            self.cancel(fetch);
            self.actions.push_back(Action::Fetched { fetch, end: FetchEnd::TimedOut });
        }
    }

    /// A fetch is late: the stores that it waits for did not do what they should.
    fn blame_stores(&mut self, fetch: FetchId) {
        let Some(entry) = self.fetches.get(&fetch) else { return };
        let mut slow = BTreeSet::new();
        for (motion, what) in &self.motions {
            if let Move::Read { store, key, .. } = what
                && entry.waiting.contains(key)
            {
                self.late_reads.insert(*motion);
                slow.insert(*store);
            }
        }
        // What has not begun waits for reads that do not end.
        for store in entry.waiting.iter().filter_map(|key| self.source(key)) {
            let index = self.stores[store as usize].as_ref();
            if index.is_some_and(|index| index.reading >= index.limits().motions_max) {
                slow.insert(store);
            }
        }
        for store in slow {
            self.counters[store.tier() as usize].late += 1;
            self.did_not_work(store, Way::Up);
        }
    }

    /// Begins the reads that can begin: those that fetches wait for first.
    pub(super) fn pump_reads(&mut self) {
        loop {
            let is_wanted = !self.reads.is_empty();
            let queue = if is_wanted { &self.reads } else { &self.prefetches };
            let Some(&key) = queue.front() else { return };
            if !self.pump_read(key, is_wanted) {
                return;
            }
            if is_wanted {
                self.reads.pop_front()
            } else {
                self.prefetches.pop_front()
            };
            self.queued.remove(&key);
            if is_wanted && self.host.find(&key).is_none() {
                self.fail_waiting_now(key);
            }
        }
    }

    /// Nothing is going to bring an object that fetches may wait for.
    fn fail_waiting_now(&mut self, key: ObjectKey) {
        let Some(fetches) = self.waiting.remove(&key) else { return };
        for fetch in fetches {
            self.miss(fetch, key);
        }
    }

    /// Begins a read, or finds that there is nothing to read; false if it has to wait.
    fn pump_read(&mut self, key: ObjectKey, is_wanted: bool) -> bool {
        if is_wanted && !self.waiting.contains_key(&key) {
            return true;
        }
        if let Some((_, state)) = self.host.find(&key) {
            if state == State::Ready {
                self.arrived(key);
            }
            return true;
        }
        let Some(store) = self.source(&key) else { return true };
        let Some(index) = &self.stores[store as usize] else { return true };
        if index.reading >= index.limits().motions_max {
            return false;
        }
        let Some(slot) = self.take_slot(key, Some(store)) else { return false };
        if let Some(index) = &mut self.stores[store as usize] {
            index.begin_read(&key);
        }
        self.begin(Move::Read { store, key, slot });
        true
    }
}
