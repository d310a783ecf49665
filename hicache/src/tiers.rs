//! The tiers below the device: which object is where, and what is to be moved.
//!
//! An object ([`ObjectKey`]) is found by its content's name, so a tier has no tree: a prefix is in
//! the tiers as far as each of its blocks is in one of them, and can be gone on from where a
//! boundary is too.
//!
//! [`Tiers`] decides and never acts. It has no clock, no thread and no IO, and knows no bytes; what
//! it wants moved comes out of [`Tiers::poll_action`], and how that ended goes into
//! [`Tiers::handle_done`]. The caller's movers copy, and check each byte that climbs.
//!
//! # An object's way
//!
//! | event | host | disk and remote |
//! |---|---|---|
//! | [`offer`](Tiers::offer) of device pages | a slot is filled ([`Move::Save`]); it can be found when that is done | written from the slot afterwards ([`Move::Write`]) |
//! | [`prefetch`](Tiers::prefetch) | filled from a store ([`Move::Read`]) | read |
//! | [`fetch`](Tiers::fetch) | as with prefetch if needed, then copied to device pages ([`Move::Load`]) | read if the host has it not |
//! | [`probe`](Tiers::probe) | nothing | looked for where others write too ([`Move::Probe`]); can be found when it is there |
//! | wrong bytes | the slot is given up | removed, or forgotten where others write too |
//! | room is needed | the least recently used object goes that is in no motion, [pinned](Tiers::pin), or about to be written | the least recently used object in no motion goes |
//!
//! # Promises
//!
//! - A slot in motion belongs to its motions: one that fills it, or any number that read it. It is
//!   used for something else only after all of them have been reported.
//! - What was not reported to be right is never loaded, and what was reported to be wrong is not
//!   found again. What is on its way into the host can be found, and a fetch waits for its report.
//! - Every fetch ends once: complete, with a miss, or at its deadline. It never waits for anything
//!   but motions under way, and it holds nothing that another one waits for.
//! - A tier never holds more than its limit, and every queue has an end.

mod fetch;
mod host;
mod index;
mod pins;
mod probe;
mod types;

use crate::change::Change;
use crate::object::{ObjectKey, Part};
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;
use fetch::Fetch;
use host::{Host, State};
use index::{Going, Index, Removal, Room, Way};
use kv_pool::ChainHash;
use pins::Pins;
use probe::Probes;
pub use types::{
    Action, FetchEnd, FetchError, FetchId, Limits, MotionId, Move, Outcome, Slot, Store,
    StoreLimits, Tier, TierCounters, TierUse, UnknownMotion, WritePolicy,
};

/// The tiers below the device. See the module's documentation for the rules.
#[derive(Debug)]
pub struct Tiers {
    limits: Limits,
    host: Host,
    stores: [Option<Index>; 2],
    /// What is under way.
    motions: BTreeMap<MotionId, Move>,
    /// Reads for which a fetch has waited too long.
    late_reads: BTreeSet<MotionId>,
    next_motion: u64,
    saving: usize,
    fetches: BTreeMap<FetchId, Fetch>,
    /// Fetches that wait for an object to come into the host.
    waiting: BTreeMap<ObjectKey, BTreeSet<FetchId>>,
    /// Objects to be read into the host: those that fetches wait for, then the others.
    reads: VecDeque<ObjectKey>,
    prefetches: VecDeque<ObjectKey>,
    /// Members of both.
    queued: BTreeSet<ObjectKey>,
    /// Objects to be written, by store, each with the slot that is held for it.
    writes: [VecDeque<(ObjectKey, Option<Slot>)>; 2],
    /// Looked for in a store, by store.
    probes: [Probes; 2],
    pins: Pins,
    /// Objects that were offered once, for the policy that saves at the second time.
    offered: BTreeSet<ObjectKey>,
    offered_order: VecDeque<ObjectKey>,
    actions: VecDeque<Action>,
    counters: [TierCounters; 3],
    now_us: u64,
}

impl Tiers {
    /// Empty tiers.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        let index = |limits_of: Option<StoreLimits>| {
            limits_of.map(|store| Index::new(store, limits.object_bytes))
        };
        Self {
            host: Host::new(limits.host_blocks, limits.host_boundaries),
            stores: [index(limits.disk), index(limits.remote)],
            motions: BTreeMap::new(),
            late_reads: BTreeSet::new(),
            next_motion: 0,
            saving: 0,
            fetches: BTreeMap::new(),
            waiting: BTreeMap::new(),
            reads: VecDeque::new(),
            prefetches: VecDeque::new(),
            queued: BTreeSet::new(),
            writes: [VecDeque::new(), VecDeque::new()],
            probes: [Probes::default(), Probes::default()],
            pins: Pins::new([0, 1].map(|n| {
                limits.pins_max[n].min([limits.host_blocks, limits.host_boundaries][n] / 2) as usize
            })),
            offered: BTreeSet::new(),
            offered_order: VecDeque::new(),
            actions: VecDeque::new(),
            counters: [TierCounters::default(); 3],
            now_us: 0,
            limits,
        }
    }

    /// The limits.
    #[must_use]
    pub const fn limits(&self) -> &Limits {
        &self.limits
    }

    /// An object that a store holds from before; those used longest ago first. False if the index
    /// of that store is full or there is no such store, and the object stays unknown.
    pub fn adopt(&mut self, store: Store, key: ObjectKey) -> bool {
        self.stores[store as usize].as_mut().is_some_and(|index| index.adopt(key))
    }

    /// The nearest tier from which an object could be had.
    #[must_use]
    pub fn holds(&self, key: &ObjectKey) -> Option<Tier> {
        if self.host.find(key).is_some() {
            return Some(Tier::Host);
        }
        self.source(key).map(Store::tier)
    }

    /// The tier that an object comes from: the nearest one that has it, or the store that it was
    /// read from ahead of need.
    #[must_use]
    pub fn origin(&self, key: &ObjectKey) -> Option<Tier> {
        self.host.origin(key).map(Store::tier).or_else(|| self.holds(key))
    }

    /// The nearest store from which an object could be read.
    fn source(&self, key: &ObjectKey) -> Option<Store> {
        Store::ALL.into_iter().find(|store| {
            let index = self.stores[*store as usize].as_ref();
            index.is_some_and(|index| !index.is_paused() && index.has(key))
        })
    }

    /// How many blocks of `chain`, of at most `max_blocks`, can be had, the first `on_device` of
    /// them from the device.
    #[must_use]
    pub fn reach_blocks(&self, chain: &[ChainHash], on_device: usize, max_blocks: usize) -> usize {
        let most = chain.len().min(max_blocks);
        let more = chain[..most].iter().skip(on_device);
        let found = more.take_while(|hash| self.holds(&ObjectKey::block(**hash)).is_some()).count();
        most.min(on_device + found)
    }

    /// The longest prefix of `chain`, of more than `floor` and at most `max_blocks` blocks, that
    /// can be gone on from: all its blocks can be had, the first `on_device` of them from the
    /// device, and the boundary at its end is in a tier or, as `has_boundary` says of its hash, on
    /// the device.
    #[must_use]
    pub fn reach(
        &self,
        chain: &[ChainHash],
        on_device: usize,
        floor: usize,
        max_blocks: usize,
        has_boundary: impl Fn(&ChainHash) -> bool,
    ) -> Option<usize> {
        let top = self.reach_blocks(chain, on_device, max_blocks);
        (floor + 1..=top).rev().find(|&depth| {
            let end = chain[depth - 1];
            has_boundary(&end) || self.holds(&ObjectKey::boundary(end)).is_some()
        })
    }

    /// The device has an object's pages, sealed. If they are to be saved, the caller copies them
    /// into the slot, keeps them until then, and reports the motion.
    pub fn offer(&mut self, now_us: u64, key: ObjectKey) -> Option<(MotionId, Slot)> {
        self.now_us = self.now_us.max(now_us);
        if let Some((slot, _)) = self.host.find(&key) {
            self.host.touch(slot);
            return None;
        }
        for index in self.stores.iter_mut().flatten() {
            index.touch(&key);
        }
        let is_selective = self.limits.policy == WritePolicy::ThroughSelective;
        if is_selective && !self.pins.has(&key) && !self.was_offered(key) {
            return None;
        }
        self.save(key)
    }

    /// Notes an offer; whether there was one before.
    fn was_offered(&mut self, key: ObjectKey) -> bool {
        if !self.offered.insert(key) {
            return true;
        }
        self.offered_order.push_back(key);
        if self.offered_order.len() > self.limits.writes_max.max(1)
            && let Some(oldest) = self.offered_order.pop_front()
        {
            self.offered.remove(&oldest);
        }
        false
    }

    fn save(&mut self, key: ObjectKey) -> Option<(MotionId, Slot)> {
        if self.host.count(key.part) == 0 {
            return None;
        }
        if self.saving >= self.limits.saves_max {
            self.counters[Tier::Host as usize].dropped += 1;
            return None;
        }
        let Some(slot) = self.take_slot(key, None) else {
            self.counters[Tier::Host as usize].dropped += 1;
            return None;
        };
        self.saving += 1;
        let motion = self.begin(Move::Save { key, slot });
        Some((motion, slot))
    }

    fn take_slot(&mut self, key: ObjectKey, origin: Option<Store>) -> Option<Slot> {
        let (slot, gone) = self.host.take(key, origin, self.pins.has(&key))?;
        self.pins.arrives(&key);
        self.counters[Tier::Host as usize].evicted += u64::from(gone.is_some());
        Some(slot)
    }

    /// Numbers a motion. All but saves come out as actions.
    fn begin(&mut self, what: Move) -> MotionId {
        self.next_motion += 1;
        let motion = MotionId(self.next_motion);
        self.motions.insert(motion, what);
        if !matches!(what, Move::Save { .. }) {
            self.actions.push_back(Action::Begin { motion, what });
        }
        motion
    }

    /// A motion has ended. Every motion is reported once.
    ///
    /// # Errors
    ///
    /// [`UnknownMotion`] if there is none of this number.
    pub fn handle_done(
        &mut self,
        now_us: u64,
        motion: MotionId,
        outcome: Outcome,
    ) -> Result<(), UnknownMotion> {
        self.now_us = self.now_us.max(now_us);
        let what = self.motions.remove(&motion).ok_or(UnknownMotion { motion })?;
        match what {
            Move::Save { key, slot } => self.saved(key, slot, outcome),
            Move::Load { key, slot, fetch } => self.loaded(key, slot, fetch, outcome),
            Move::Read { store, key, slot } => {
                let was_late = self.late_reads.remove(&motion);
                self.read(store, key, slot, outcome, was_late);
            }
            Move::Write { store, key, slot } => self.written(store, key, slot, outcome),
            Move::Remove { store, key } => self.removed(store, key, outcome),
            Move::Probe { store, key } => self.probed(store, key, outcome),
        }
        self.pump();
        Ok(())
    }

    fn saved(&mut self, key: ObjectKey, slot: Slot, outcome: Outcome) {
        self.saving -= 1;
        let good = outcome == Outcome::Done;
        self.host.filled(slot, good);
        if good {
            self.count_stored(Tier::Host, key.part);
            self.arrived(key);
            for store in Store::ALL {
                self.want_write(store, key);
            }
        } else {
            self.count_failure(Tier::Host, outcome);
            self.fail_waiting(key);
        }
    }

    fn want_write(&mut self, store: Store, key: ObjectKey) {
        let Some(index) = &self.stores[store as usize] else { return };
        if index.knows(&key) {
            return;
        }
        // It may have been flushed while it was saved.
        let Some((slot, State::Ready)) = self.host.find(&key) else { return };
        let queue = &mut self.writes[store as usize];
        if queue.len() >= self.limits.writes_max {
            self.counters[store.tier() as usize].dropped += 1;
        } else {
            queue.push_back((key, self.host.hold(slot).then_some(slot)));
        }
    }

    fn read(&mut self, store: Store, key: ObjectKey, slot: Slot, outcome: Outcome, was_late: bool) {
        let good = outcome == Outcome::Done;
        self.host.filled(slot, good);
        let index = self.stores[store as usize].as_mut().expect("it was read from");
        let going = match outcome {
            Outcome::Done => index.end_read(&key, false),
            Outcome::Missing => index.end_read(&key, true),
            Outcome::Mismatch => {
                // Wrong bytes stay wrong.
                self.probes[store as usize].note_wrong(key);
                let doomed = index.doom(&key);
                let ended = index.end_read(&key, false);
                if doomed == Going::Nothing { ended } else { doomed }
            }
            Outcome::NoSpace | Outcome::Failed => index.end_read(&key, false),
        };
        self.go(store, going);
        if good {
            // One that came too late for whoever wanted it does not speak for the store.
            if !was_late {
                self.worked(store, Way::Up);
            }
            let counters = &mut self.counters[store.tier() as usize];
            counters.hits += 1;
            counters.hit_bytes += self.limits.object_bytes[key.part.position()];
            self.arrived(key);
            return;
        }
        self.count_failure(store.tier(), outcome);
        if outcome == Outcome::Failed || outcome == Outcome::NoSpace {
            self.did_not_work(store, Way::Up);
            // Whoever wants it would come back to it for ever; and perhaps it can be read later.
            let until = self.now_us.saturating_add(self.limits.pause_us);
            if let Some(index) = &mut self.stores[store as usize] {
                index.hide(&key, until);
            }
        }
        if self.waiting.contains_key(&key) {
            self.want_read(key);
        }
    }

    fn written(&mut self, store: Store, key: ObjectKey, slot: Slot, outcome: Outcome) {
        self.host.end_use(slot);
        let good = outcome == Outcome::Done;
        let index = self.stores[store as usize].as_mut();
        let going = index.map_or(Going::Nothing, |index| index.end_write(&key, good));
        self.go(store, going);
        if good {
            self.worked(store, Way::Down);
            self.probes[store as usize].note_written(&key);
            self.count_stored(store.tier(), key.part);
        } else {
            self.counters[store.tier() as usize].dropped += 1;
            self.count_failure(store.tier(), outcome);
            self.write_failed(store, outcome);
        }
    }

    fn removed(&mut self, store: Store, key: ObjectKey, outcome: Outcome) {
        let good = matches!(outcome, Outcome::Done | Outcome::Missing);
        let Some(index) = &mut self.stores[store as usize] else { return };
        match index.end_remove(&key, good, self.now_us, self.limits.pause_us) {
            Removal::Gone { made_room } => {
                self.counters[store.tier() as usize].evicted += u64::from(made_room);
            }
            Removal::Failed { is_known } => {
                self.count_failure(store.tier(), outcome);
                if !is_known {
                    self.did_not_work(store, Way::Down);
                }
            }
        }
    }

    fn go(&mut self, store: Store, going: Going) {
        if let Going::Remove(key) = going {
            self.begin(Move::Remove { store, key });
        }
    }

    fn worked(&mut self, store: Store, way: Way) {
        if let Some(index) = &mut self.stores[store as usize] {
            index.succeeded(way);
        }
    }

    /// A full store that removes its own objects goes on with less room; any other failure counts.
    fn write_failed(&mut self, store: Store, outcome: Outcome) {
        let (now, pause) = (self.now_us, self.limits.pause_us);
        match &mut self.stores[store as usize] {
            Some(index) if outcome == Outcome::NoSpace && index.limits().owned => {
                index.is_full(now, pause);
            }
            _ => self.did_not_work(store, Way::Down),
        }
    }

    /// Counts a failure of a store, which is left alone after some.
    fn did_not_work(&mut self, store: Store, way: Way) {
        let max = self.limits.failures_max;
        let Some(index) = &mut self.stores[store as usize] else { return };
        if index.failed(way, self.now_us, self.limits.pause_us, max) {
            self.counters[store.tier() as usize].pauses += 1;
        }
    }

    fn count_stored(&mut self, tier: Tier, part: Part) {
        let counters = &mut self.counters[tier as usize];
        counters.stored += 1;
        counters.stored_bytes += self.limits.object_bytes[part.position()];
    }

    fn count_failure(&mut self, tier: Tier, outcome: Outcome) {
        let counters = &mut self.counters[tier as usize];
        match outcome {
            Outcome::Done => {}
            Outcome::Missing => counters.missing += 1,
            Outcome::Mismatch => counters.mismatches += 1,
            Outcome::NoSpace | Outcome::Failed => counters.failures += 1,
        }
    }

    /// Begins what can begin.
    fn pump(&mut self) {
        self.pump_reads();
        for store in Store::ALL {
            while self.pump_write(store) {}
            while self.pump_probe(store) {}
        }
    }

    /// The first object that waits to be written waits no longer.
    fn pop_write(&mut self, store: Store) {
        if let Some((_, Some(held))) = self.writes[store as usize].pop_front() {
            self.host.release(held);
        }
    }

    /// Begins the next write to a store; false if none can begin now.
    fn pump_write(&mut self, store: Store) -> bool {
        let Some(&(key, _)) = self.writes[store as usize].front() else { return false };
        let Some(index) = &mut self.stores[store as usize] else { return false };
        if index.writing >= index.limits().motions_max {
            return false;
        }
        let slot = match self.host.find(&key) {
            _ if index.knows(&key) => None,
            // A store that fails is spared what comes meanwhile.
            Some((slot, State::Ready)) if !index.is_paused() => Some(slot),
            _ => {
                self.counters[store.tier() as usize].dropped += 1;
                None
            }
        };
        let Some(slot) = slot else {
            self.pop_write(store);
            return true;
        };
        match index.make_room(key.part) {
            Room::Yes => {
                index.begin_write(key);
                self.host.begin_use(slot);
                self.pop_write(store);
                self.begin(Move::Write { store, key, slot });
                true
            }
            Room::After(going) => {
                // Of others' objects nothing is removed: this one is only forgotten.
                let is_gone = going == Going::Nothing;
                self.counters[store.tier() as usize].evicted += u64::from(is_gone);
                self.go(store, going);
                true
            }
            Room::Later => false,
            Room::Never => {
                self.pop_write(store);
                self.counters[store.tier() as usize].dropped += 1;
                true
            }
        }
    }

    /// Ends fetches and pins whose time is up, and pauses of stores that are over.
    pub fn handle_timeout(&mut self, now_us: u64) {
        self.now_us = self.now_us.max(now_us);
        for store in Store::ALL {
            let Some(index) = &mut self.stores[store as usize] else { continue };
            index.resume(self.now_us);
            for going in index.retry(self.now_us) {
                self.go(store, going);
            }
        }
        self.end_late_fetches();
        self.end_pins();
        self.pump();
    }

    /// When [`Tiers::handle_timeout`] wants to be called next.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        let pauses = self.stores.iter().flatten().filter_map(Index::due);
        let fetches = self.fetches.values().map(|fetch| fetch.deadline_us);
        pauses.chain(fetches).chain(self.pins.due()).min()
    }

    /// What is to be done, or has happened, next.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// Forgets all objects in host memory, and all pins. Those in motion go when the motion has
    /// ended.
    pub fn flush_host(&mut self) {
        self.pins.clear();
        self.host.clear();
    }

    /// Objects that are complete in host memory, by key.
    pub fn host_objects(&self) -> impl Iterator<Item = ObjectKey> {
        self.host.ready()
    }

    /// The slot of an object that is complete in host memory.
    #[must_use]
    pub fn host_slot(&self, key: &ObjectKey) -> Option<Slot> {
        self.host.find(key).filter(|(_, state)| *state == State::Ready).map(|(slot, _)| slot)
    }

    /// An object in host memory has turned out to be wrong: it is not found there any more.
    pub fn found_wrong(&mut self, key: &ObjectKey) {
        if let Some((slot, _)) = self.host.find(key) {
            self.counters[Tier::Host as usize].mismatches += 1;
            self.host.doom(slot);
        }
    }

    /// An object was made of what has turned out to be wrong: no tier is to have it. What a store
    /// shares with others is only not looked for again.
    pub fn give_up(&mut self, key: ObjectKey) {
        if let Some((slot, _)) = self.host.find(&key) {
            self.host.doom(slot);
        }
        for store in Store::ALL {
            self.probes[store as usize].note_wrong(key);
            let index = self.stores[store as usize].as_mut();
            let going = index.map_or(Going::Nothing, |index| index.doom(&key));
            self.go(store, going);
        }
        self.pump();
    }

    /// Sees to it that nothing a store holds now, or is about to hold, is found afterwards, but for
    /// what is in no motion: that is for [`Tiers::evict`], as many at a time as the caller likes.
    /// What is offered later is stored as always.
    pub fn want_empty(&mut self, store: Store) {
        while !self.writes[store as usize].is_empty() {
            self.pop_write(store);
        }
        if let Some(index) = &mut self.stores[store as usize] {
            index.want_empty();
        }
        self.pump();
    }

    /// Whether a store is left alone for a while because it failed.
    #[must_use]
    pub fn is_paused(&self, store: Store) -> bool {
        self.stores[store as usize].as_ref().is_some_and(Index::is_paused)
    }

    /// Begins to remove the least recently used objects of a store that holds more than its limit,
    /// at most so many: after a start with a lower one.
    pub fn trim(&mut self, store: Store, most: usize) {
        let index = self.stores[store as usize].as_mut();
        for going in index.map(|index| index.trim(most)).unwrap_or_default() {
            self.go(store, going);
        }
    }

    /// Removes up to `count` objects of a store that are in no motion, least recently used first;
    /// how many.
    pub fn evict(&mut self, store: Store, count: usize) -> usize {
        let mut gone = 0;
        while gone < count
            && let Some(going) =
                self.stores[store as usize].as_mut().and_then(|index| index.pop_idle())
        {
            self.go(store, going);
            gone += 1;
        }
        gone
    }

    /// From now on notes which objects come and go, for [`Tiers::poll_change`]; in each tier at most
    /// `most` of these notes wait, 0 for none.
    pub fn report_changes(&mut self, most: usize) {
        self.host.changes.follow(most);
        for index in self.stores.iter_mut().flatten() {
            index.changes.follow(most);
        }
    }

    /// The next object that has come to a tier or left it since [`Tiers::report_changes`]; in order
    /// as far as one tier is concerned. What is in motion has not come yet, and what is to go has
    /// left. A store that is left alone keeps what it has, and [`Tiers::adopt`] is no news to its
    /// caller, so neither is a change.
    pub fn poll_change(&mut self) -> Option<(Tier, Change<ObjectKey>)> {
        if let Some(change) = self.host.changes.poll() {
            return Some((Tier::Host, change));
        }
        Store::ALL.into_iter().find_map(|store| {
            let change = self.stores[store as usize].as_mut()?.changes.poll()?;
            Some((store.tier(), change))
        })
    }

    /// Changes that found no room to wait. When it has grown, whoever follows has to look at all
    /// that it knows anew, with [`Tiers::is_in`].
    #[must_use]
    pub fn changes_lost(&self) -> u64 {
        let stores = self.stores.iter().flatten().map(|index| index.changes.lost());
        self.host.changes.lost() + stores.sum::<u64>()
    }

    /// Whether a tier has an object, complete and not about to go; also while the tier is left
    /// alone.
    #[must_use]
    pub fn is_in(&self, tier: Tier, key: &ObjectKey) -> bool {
        let store = match tier {
            Tier::Host => return self.in_host(key),
            Tier::Disk => Store::Disk,
            Tier::Remote => Store::Remote,
        };
        self.stores[store as usize].as_ref().is_some_and(|index| index.has(key))
    }

    /// Counters of a tier.
    #[must_use]
    pub const fn counters(&self, tier: Tier) -> TierCounters {
        self.counters[tier as usize]
    }

    /// What a tier holds; none if there is no such tier.
    #[must_use]
    pub fn used(&self, tier: Tier) -> Option<TierUse> {
        match tier {
            Tier::Host => {
                let objects = self.host.used();
                let bytes = |counts: [u64; 2]| {
                    counts.iter().zip(self.limits.object_bytes).map(|(n, bytes)| n * bytes).sum()
                };
                let all = Part::ALL.map(|part| self.host.count(part) as u64);
                Some(TierUse { objects, bytes: bytes(objects), bytes_max: bytes(all) })
            }
            Tier::Disk => self.stores[0].as_ref().map(Index::used),
            Tier::Remote => self.stores[1].as_ref().map(Index::used),
        }
    }

    /// Motions under way.
    #[must_use]
    pub fn motions(&self) -> usize {
        self.motions.len()
    }

    /// Fetches under way.
    #[must_use]
    pub fn fetches(&self) -> usize {
        self.fetches.len()
    }

    /// Objects that wait: for a read, and for a write to each store.
    #[must_use]
    pub fn backlog(&self) -> [usize; 3] {
        let reads = self.reads.len() + self.prefetches.len();
        [reads, self.writes[0].len(), self.writes[1].len()]
    }

    /// Whether an object is complete in host memory.
    #[must_use]
    pub fn in_host(&self, key: &ObjectKey) -> bool {
        self.host.find(key).is_some_and(|(_, state)| state == State::Ready)
    }

    /// Notes a use of a prefix: what comes late in it goes before what comes early, without which
    /// it is of no use.
    pub fn touch(&mut self, chain: &[ChainHash]) {
        let keys = chain.iter().rev().flat_map(|hash| Part::ALL.map(|part| (part, *hash)));
        for (part, chain) in keys {
            let key = ObjectKey { chain, part };
            if let Some((slot, _)) = self.host.find(&key) {
                self.host.touch(slot);
            }
            for index in self.stores.iter_mut().flatten() {
                index.touch(&key);
            }
        }
    }

    /// Starts to bring objects into host memory that a fetch will want soon. What is there already,
    /// or nowhere, or too many, is left out.
    pub fn prefetch(&mut self, now_us: u64, keys: impl IntoIterator<Item = ObjectKey>) {
        self.now_us = self.now_us.max(now_us);
        for key in keys {
            if let Some((slot, _)) = self.host.find(&key) {
                self.host.touch(slot);
            } else if self.prefetches.len() >= self.limits.prefetch_max {
                break;
            } else if self.source(&key).is_some() && self.queued.insert(key) {
                self.prefetches.push_back(key);
            }
        }
        self.pump();
    }
}

/// Objects of a chain in the order in which a fetch wants them: the boundary at its end is needed
/// last.
#[must_use]
pub fn objects_of(
    chain: &[ChainHash],
    from: usize,
    to: usize,
    with_boundary: bool,
) -> Vec<ObjectKey> {
    let blocks = chain[..to].iter().skip(from).map(|hash| ObjectKey::block(*hash));
    let boundary = chain[..to].last().filter(|_| with_boundary);
    blocks.chain(boundary.map(|hash| ObjectKey::boundary(*hash))).collect()
}
