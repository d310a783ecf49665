//! The tiers under random traffic: movers that delay, reorder, fail, tear and lie by a flipped bit,
//! against books that know what really lies where.

use hicache::tiers::{
    Action, FetchEnd, FetchId, Limits, MotionId, Move, Outcome, Slot, Store, StoreLimits, Tier,
    Tiers, WritePolicy, objects_of,
};
use hicache::{Change, ObjectKey, Part};
use kv_pool::ChainHash;
use std::collections::{BTreeMap, BTreeSet};

const BLOCK: u64 = 10;
const BOUNDARY: u64 = 35;

fn bytes_of(part: Part) -> u64 {
    match part {
        Part::Block => BLOCK,
        Part::Boundary => BOUNDARY,
    }
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Once in `n` times.
    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// What lies somewhere: which object, and whether its bytes are right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Content {
    key: ObjectKey,
    right: bool,
}

/// Some conversations of a few blocks that share beginnings.
fn chains() -> Vec<Vec<ChainHash>> {
    let hash = |path: &[u8]| {
        let mut bytes = [0; 32];
        bytes[0] = path.len() as u8;
        bytes[1..=path.len()].copy_from_slice(path);
        ChainHash(bytes)
    };
    let mut chains = Vec::new();
    for talk in 0..6_u8 {
        for turn in 0..3_u8 {
            let path = [0, talk / 3, talk, talk, turn, turn, turn];
            chains.push((1..=path.len()).map(|end| hash(&path[..end])).collect());
        }
    }
    chains
}

struct World {
    random: Random,
    tiers: Tiers,
    limits: Limits,
    now: u64,
    chains: Vec<Vec<ChainHash>>,
    slots: BTreeMap<Slot, Content>,
    stores: [BTreeMap<ObjectKey, Content>; 2],
    motions: BTreeMap<MotionId, Move>,
    /// Loads that have ended well, by fetch.
    fetches: BTreeMap<FetchId, (BTreeSet<ObjectKey>, BTreeSet<ObjectKey>)>,
    next_fetch: u64,
    /// Where wrong bytes were found: not to be used before they are written anew.
    wrong_slots: BTreeSet<Slot>,
    wrong_objects: BTreeSet<(Store, ObjectKey)>,
    seen: BTreeMap<&'static str, u64>,
    faults: bool,
    stores_down: bool,
    probes_under_way: usize,
    /// What has been in the host while it was pinned, and until when it is.
    pinned: BTreeMap<ObjectKey, u64>,
    /// What the disk really has room for.
    room: u64,
    /// What is where, by the changes that were reported.
    mirror: BTreeSet<(Tier, ObjectKey)>,
    mirror_age: u64,
}

impl World {
    fn new(seed: u64, policy: WritePolicy, faults: bool) -> Self {
        let mut random = Random(seed);
        let limits = Limits {
            host_blocks: 3 + random.below(6) as u32,
            host_boundaries: 1 + random.below(3) as u32,
            object_bytes: [BLOCK, BOUNDARY],
            disk: (!random.one_in(5)).then_some(StoreLimits {
                bytes_max: Some(100 + random.below(200) as u64),
                objects_max: 30,
                motions_max: 1 + random.below(3),
                owned: true,
            }),
            remote: random.one_in(2).then_some(StoreLimits {
                bytes_max: None,
                objects_max: 12,
                motions_max: 2,
                owned: false,
            }),
            policy,
            saves_max: 3,
            fetches_max: 4,
            fetch_objects_max: 8,
            prefetch_max: 4,
            writes_max: 6,
            probes_max: 5,
            pins_max: [2, 1],
            pause_us: 500,
            failures_max: 3,
        };
        let room = if random.one_in(3) { 70 + random.below(60) as u64 } else { u64::MAX };
        let mut tiers = Tiers::new(limits);
        tiers.report_changes(1000);
        Self {
            random,
            tiers,
            limits,
            now: 0,
            chains: chains(),
            slots: BTreeMap::new(),
            stores: [BTreeMap::new(), BTreeMap::new()],
            motions: BTreeMap::new(),
            fetches: BTreeMap::new(),
            next_fetch: 0,
            wrong_slots: BTreeSet::new(),
            wrong_objects: BTreeSet::new(),
            seen: BTreeMap::new(),
            faults,
            stores_down: false,
            probes_under_way: 0,
            pinned: BTreeMap::new(),
            room,
            mirror: BTreeSet::new(),
            mirror_age: 0,
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    /// No two motions may meet in a slot unless both read it.
    fn check_alone(&self, slot: Slot, writes: bool) {
        for what in self.motions.values() {
            let (other, other_writes) = match what {
                Move::Save { slot, .. } | Move::Read { slot, .. } => (*slot, true),
                Move::Load { slot, .. } | Move::Write { slot, .. } => (*slot, false),
                Move::Remove { .. } | Move::Probe { .. } => continue,
            };
            assert!(other != slot || !(writes || other_writes), "two motions in {slot:?}");
        }
    }

    fn begin(&mut self, motion: MotionId, what: Move) {
        match what {
            Move::Save { slot, .. } | Move::Read { slot, .. } => {
                self.check_alone(slot, true);
                // Torn until the motion ends.
                self.slots.remove(&slot);
                self.wrong_slots.remove(&slot);
            }
            Move::Load { key, slot, .. } | Move::Write { key, slot, .. } => {
                self.check_alone(slot, false);
                let held = self.slots.get(&slot).map(|content| content.key);
                assert_eq!(held, Some(key), "{slot:?} holds something else");
                assert!(!self.wrong_slots.contains(&slot), "wrong bytes are used again");
            }
            Move::Remove { .. } => {}
            Move::Probe { store, key } => {
                assert_eq!(store, Store::Remote, "others write only there");
                assert_eq!(self.tiers.holds(&key), None, "{key} is known");
                let is_wrong = self.wrong_objects.contains(&(store, key));
                assert!(!is_wrong, "wrong bytes are looked for again");
                self.probes_under_way += 1;
                assert!(self.probes_under_way <= 2, "more probes than motions");
            }
        }
        if let Move::Read { store, key, .. } = what {
            assert!(!self.wrong_objects.contains(&(store, key)), "wrong bytes are read again");
        }
        if let Move::Write { store, key, .. } = what {
            // What others may remove, and was forgotten, may be written again.
            let is_there = self.stores[store as usize].contains_key(&key);
            assert!(store == Store::Remote || !is_there, "{key} is written twice");
            self.check_budget(store, bytes_of(key.part));
        }
        assert!(self.motions.insert(motion, what).is_none(), "a number twice");
    }

    /// What is there, what is being written and `more` fit the limit.
    fn check_budget(&self, store: Store, more: u64) {
        let limits = [self.limits.disk, self.limits.remote][store as usize];
        let Some(max) = limits.and_then(|limits| limits.bytes_max) else { return };
        let there: u64 = self.stores[store as usize].keys().map(|key| bytes_of(key.part)).sum();
        let coming: u64 = self
            .motions
            .values()
            .filter_map(|what| match what {
                Move::Write { store: other, key, .. } if *other == store => {
                    Some(bytes_of(key.part))
                }
                _ => None,
            })
            .sum();
        assert!(there + coming + more <= max, "{there} + {coming} + {more} bytes of {max}");
    }

    fn settle(&mut self) {
        while let Some(action) = self.tiers.poll_action() {
            match action {
                Action::Begin { motion, what } => self.begin(motion, what),
                Action::Fetched { fetch, end } => self.fetched(fetch, end),
            }
        }
        self.follow();
        // Nothing waits for a probe.
        assert!(
            self.motions.len() > self.probes_under_way || self.fetches.is_empty(),
            "a fetch waits and nothing is under way"
        );
        assert!(self.tiers.probes() <= self.limits.probes_max);
        assert!(self.probes_under_way > 0 || self.tiers.probes() == 0, "probes wait for nothing");
        self.check_pins();
        for tier in Tier::ALL {
            let Some(used) = self.tiers.used(tier) else { continue };
            let max = used.bytes_max;
            assert!(max == 0 || used.bytes <= max, "{tier} holds {} of {max}", used.bytes);
        }
        let [reads, disk, remote] = self.tiers.backlog();
        let reads_max =
            self.limits.fetches_max * self.limits.fetch_objects_max + self.limits.prefetch_max;
        assert!(reads <= reads_max && disk.max(remote) <= self.limits.writes_max);
    }

    /// What is pinned and was in the host is there still.
    fn check_pins(&mut self) {
        let (now, tiers) = (self.now, &self.tiers);
        self.pinned.retain(|_, until| *until > now);
        for key in self.pinned.keys() {
            assert!(tiers.in_host(key), "{key} is pinned and gone");
        }
        let max = [self.limits.host_blocks, self.limits.host_boundaries];
        for ((pins, slots), max) in tiers.pins().into_iter().zip(max).zip(self.limits.pins_max) {
            assert!(pins <= u64::from(max) && pins <= u64::from(slots / 2), "{pins} pins");
        }
    }

    /// What is on the disk, or on its way there, is not found any more.
    fn empty_disk(&mut self) {
        if self.limits.disk.is_none() {
            return;
        }
        self.tiers.want_empty(Store::Disk);
        while self.tiers.evict(Store::Disk, 3) > 0 {}
        for chain in self.chains.clone().iter().flatten() {
            for part in Part::ALL {
                let key = ObjectKey { chain: *chain, part };
                assert_ne!(self.tiers.holds(&key), Some(Tier::Disk), "{key} was to go");
            }
        }
        self.count("emptied");
    }

    fn pin(&mut self) {
        let key = self.any_key();
        let until = self.now + self.random.below(1000) as u64;
        if !self.tiers.pin(self.now, key, until) {
            return self.count("pin refused");
        }
        if self.tiers.in_host(&key) {
            let until = until.max(self.pinned.get(&key).copied().unwrap_or(0));
            self.pinned.insert(key, until);
            self.count("pinned");
        }
    }

    /// What was told of comings and goings is what is there.
    fn follow(&mut self) {
        while let Some((tier, change)) = self.tiers.poll_change() {
            match change {
                Change::Arrived(key) => {
                    assert!(self.mirror.insert((tier, key)), "{key} came to {tier} twice");
                }
                Change::Left(key) => {
                    assert!(self.mirror.remove(&(tier, key)), "{key} left {tier} twice");
                }
            }
        }
        self.mirror_age += 1;
        if !self.mirror_age.is_multiple_of(50) {
            return;
        }
        let keys: BTreeSet<ObjectKey> = (self.chains.iter().flatten())
            .flat_map(|hash| Part::ALL.map(|part| ObjectKey { chain: *hash, part }))
            .collect();
        let all = keys.into_iter().flat_map(|key| Tier::ALL.map(|tier| (tier, key)));
        let there: BTreeSet<_> = all.filter(|(tier, key)| self.tiers.is_in(*tier, key)).collect();
        assert_eq!(self.mirror, there);
        assert_eq!(self.tiers.changes_lost(), 0);
        for (tier, _) in there {
            self.count(["in host", "in disk", "in remote"][tier as usize]);
        }
    }

    fn fetched(&mut self, fetch: FetchId, end: FetchEnd) {
        let (wanted, loaded) = self.fetches.remove(&fetch).expect("it ends once");
        let in_motion = self
            .motions
            .values()
            .any(|what| matches!(what, Move::Load { fetch: other, .. } if *other == fetch));
        match end {
            FetchEnd::Complete => {
                assert_eq!(wanted, loaded, "complete without all");
                assert!(!in_motion);
                self.count("complete");
            }
            FetchEnd::Miss { key } => {
                assert!(wanted.contains(&key) && !loaded.contains(&key));
                assert!(!in_motion, "pages of an ended fetch are in motion");
                self.count("miss");
            }
            FetchEnd::TimedOut => self.count("timed out"),
        }
    }

    fn any_key(&mut self) -> ObjectKey {
        let chain = self.random.below(self.chains.len());
        let depth = self.random.below(self.chains[chain].len());
        let part = if self.random.one_in(4) { Part::Boundary } else { Part::Block };
        ObjectKey { chain: self.chains[chain][depth], part }
    }

    fn offer(&mut self) {
        let key = self.any_key();
        if let Some((motion, slot)) = self.tiers.offer(self.now, key) {
            self.begin(motion, Move::Save { key, slot });
        }
    }

    fn fetch(&mut self) {
        let n = self.random.below(self.chains.len());
        let chain = self.chains[n].clone();
        let on_device = self.random.below(3);
        let depth = self.tiers.reach(&chain, on_device, on_device, chain.len(), |_| false);
        let Some(depth) = depth else { return self.count("no prefix") };
        let keys = objects_of(&chain, on_device, depth, true);
        assert!(keys.iter().all(|key| self.tiers.holds(key).is_some()));
        let fetch = FetchId(self.next_fetch);
        let deadline = self.now + 50 + self.random.below(2000) as u64;
        if self.tiers.fetch(self.now, fetch, &keys, deadline).is_ok() {
            self.next_fetch += 1;
            self.fetches.insert(fetch, (keys.into_iter().collect(), BTreeSet::new()));
            self.tiers.touch(&chain[..depth]);
        } else {
            self.count("refused");
        }
    }

    /// Ends a motion, as likely any as another.
    fn end_one(&mut self) {
        let Some(n) = self.motions.len().checked_sub(1) else { return };
        let n = self.random.below(n + 1);
        let (&motion, &what) = self.motions.iter().nth(n).expect("counted");
        self.motions.remove(&motion);
        let outcome = self.outcome(what);
        // What could not be loaded is given up, pinned or not.
        if let Move::Load { key, .. } = what
            && outcome != Outcome::Done
        {
            self.pinned.remove(&key);
        }
        self.tiers.handle_done(self.now, motion, outcome).expect("it is under way");
        assert!(self.tiers.handle_done(self.now, motion, outcome).is_err(), "reported twice");
    }

    /// What others put into the store that they write too, now and again damaged.
    fn others_write(&mut self) {
        let key = self.any_key();
        let right = !self.faults || !self.random.one_in(8);
        // What was found to be wrong is not looked for again: nobody here can know that it is right.
        let is_known = self.wrong_objects.contains(&(Store::Remote, key));
        if !is_known && self.limits.remote.is_some() {
            self.stores[Store::Remote as usize].insert(key, Content { key, right });
        }
    }

    fn probe(&mut self) {
        let n = self.random.below(self.chains.len());
        let chain = self.chains[n].clone();
        let keys = chain.iter().flat_map(|hash| Part::ALL.map(|part| (*hash, part)));
        self.tiers.probe(self.now, keys.map(|(chain, part)| ObjectKey { chain, part }));
    }

    fn probe_ends(&mut self, store: Store, key: &ObjectKey, fails: bool) -> Outcome {
        self.probes_under_way -= 1;
        if self.stores_down || fails {
            return Outcome::Failed;
        }
        let Some(content) = self.stores[store as usize].get(key) else { return Outcome::Missing };
        // Some of what is wrong shows by its length.
        if !content.right && self.random.one_in(2) {
            self.wrong_objects.insert((store, *key));
            self.count("found wrong by a probe");
            return Outcome::Mismatch;
        }
        self.count("found by a probe");
        Outcome::Done
    }

    fn outcome(&mut self, what: Move) -> Outcome {
        let fails = self.faults && self.random.one_in(12);
        match what {
            Move::Save { key, slot } => {
                if fails {
                    return Outcome::Failed;
                }
                self.slots.insert(slot, Content { key, right: true });
                Outcome::Done
            }
            Move::Load { key, slot, fetch } => {
                let content = self.slots[&slot];
                assert_eq!(content.key, key, "the slot was reused under a load");
                if !content.right {
                    self.count("wrong in host");
                    self.wrong_slots.insert(slot);
                    return Outcome::Mismatch;
                }
                if fails {
                    return Outcome::Failed;
                }
                if let Some((_, loaded)) = self.fetches.get_mut(&fetch) {
                    assert!(loaded.insert(key), "loaded twice");
                }
                Outcome::Done
            }
            Move::Read { store, key, slot } => {
                if self.stores_down || fails {
                    return Outcome::Failed;
                }
                match self.stores[store as usize].get(&key) {
                    None => Outcome::Missing,
                    Some(content) if !content.right => {
                        self.count("wrong in store");
                        self.wrong_objects.insert((store, key));
                        Outcome::Mismatch
                    }
                    Some(content) => {
                        self.slots.insert(slot, *content);
                        Outcome::Done
                    }
                }
            }
            Move::Write { store, key, slot } => {
                let content = self.slots[&slot];
                assert_eq!(content.key, key, "the slot was reused under a write");
                if self.stores_down || fails {
                    return if self.random.one_in(2) { Outcome::NoSpace } else { Outcome::Failed };
                }
                let there: u64 = self.stores[0].keys().map(|key| bytes_of(key.part)).sum();
                if store == Store::Disk && there + bytes_of(key.part) > self.room {
                    self.count("full");
                    return Outcome::NoSpace;
                }
                self.stores[store as usize].insert(key, content);
                self.wrong_objects.remove(&(store, key));
                Outcome::Done
            }
            Move::Remove { store, key } => {
                if fails {
                    return Outcome::Failed;
                }
                self.stores[store as usize].remove(&key);
                Outcome::Done
            }
            Move::Probe { store, key } => self.probe_ends(store, &key, fails),
        }
    }

    /// A bit flips, or something else goes wrong that nobody tells the tiers.
    fn damage(&mut self) {
        let filling: BTreeSet<Slot> = self
            .motions
            .values()
            .filter_map(|what| match what {
                Move::Save { slot, .. } | Move::Read { slot, .. } => Some(*slot),
                _ => None,
            })
            .collect();
        match self.random.below(6) {
            0 => {
                let n = self.random.below(self.slots.len().max(1));
                let slot = self.slots.keys().nth(n).copied().filter(|s| !filling.contains(s));
                if let Some(content) = slot.and_then(|slot| self.slots.get_mut(&slot)) {
                    content.right = false;
                }
            }
            1 => {
                let store = self.random.below(2);
                let n = self.random.below(self.stores[store].len().max(1));
                if let Some(content) = self.stores[store].values_mut().nth(n) {
                    content.right = false;
                }
            }
            _ => {
                // Somebody else has removed it.
                let n = self.random.below(self.stores[1].len().max(1));
                if let Some(key) = self.stores[1].keys().nth(n).copied() {
                    self.stores[1].remove(&key);
                }
            }
        }
    }

    fn step(&mut self) {
        match self.random.below(27) {
            0..5 => self.offer(),
            5..8 => self.fetch(),
            8 => {
                let keys: Vec<ObjectKey> = (0..3).map(|_| self.any_key()).collect();
                self.tiers.prefetch(self.now, keys);
            }
            9 if self.random.one_in(4) => {
                let n = self.random.below(self.fetches.len().max(1));
                if let Some(fetch) = self.fetches.keys().nth(n).copied() {
                    assert!(self.tiers.cancel(fetch));
                    self.fetches.remove(&fetch);
                    self.count("cancelled");
                }
            }
            10 => {
                self.now += self.random.below(200) as u64;
                self.tiers.handle_timeout(self.now);
            }
            11 if self.random.one_in(40) => {
                self.tiers.flush_host();
                self.pinned.clear();
                assert_eq!(self.tiers.pins(), [0, 0]);
            }
            12 if self.random.one_in(30) => {
                let count = self.random.below(3);
                self.tiers.evict(Store::Disk, count);
            }
            12 if self.random.one_in(60) => self.empty_disk(),
            13 if self.faults && self.random.one_in(4) => self.damage(),
            14 if self.faults && self.random.one_in(60) => self.stores_down = !self.stores_down,
            15 if self.random.one_in(8) => {
                while !self.motions.is_empty() {
                    self.end_one();
                    self.settle();
                }
            }
            24 if self.random.one_in(3) => self.others_write(),
            25 if self.random.one_in(2) => self.probe(),
            26 => self.pin(),
            _ => self.end_one(),
        }
        self.settle();
    }

    /// Ends everything; nothing may be left.
    fn drain(&mut self) {
        self.stores_down = false;
        while !self.motions.is_empty() {
            self.end_one();
            self.settle();
        }
        // What waits for no motion waits for nothing.
        while let Some(at) = self.tiers.poll_timeout() {
            self.now = self.now.max(at);
            self.tiers.handle_timeout(self.now);
            self.settle();
            while !self.motions.is_empty() {
                self.end_one();
                self.settle();
            }
        }
        assert_eq!((self.tiers.motions(), self.tiers.fetches()), (0, 0));
        assert!(self.fetches.is_empty(), "a fetch that never ended");
        assert_eq!((self.tiers.backlog(), self.tiers.probes()), ([0, 0, 0], 0));
        for (slot, content) in &self.slots {
            if self.tiers.in_host(&content.key) {
                assert_eq!(slot.part, content.key.part);
            }
        }
    }
}

const POLICIES: [WritePolicy; 2] = [WritePolicy::Through, WritePolicy::ThroughSelective];

#[test]
fn random_traffic_with_faults_keeps_every_promise() {
    let mut seen = BTreeMap::<&str, u64>::new();
    for seed in 0..100 {
        let mut world = World::new(seed, POLICIES[seed as usize % 2], true);
        for _ in 0..10_000 {
            world.step();
        }
        world.drain();
        for (what, count) in world.seen {
            *seen.entry(what).or_default() += count;
        }
        for tier in Tier::ALL {
            let counters = world.tiers.counters(tier);
            *seen.entry("pauses").or_default() += counters.pauses;
            *seen.entry("evicted").or_default() += counters.evicted;
            *seen.entry("missing").or_default() += counters.missing;
            *seen.entry("probes").or_default() += counters.probes;
            *seen.entry("probes dropped").or_default() += counters.probes_dropped;
        }
    }
    for what in [
        "complete",
        "miss",
        "timed out",
        "cancelled",
        "refused",
        "no prefix",
        "wrong in host",
        "wrong in store",
        "pauses",
        "evicted",
        "missing",
        "probes",
        "probes dropped",
        "found by a probe",
        "full",
        "pinned",
        "pin refused",
        "emptied",
        "in host",
        "in disk",
        "in remote",
    ] {
        assert!(seen.get(what).copied().unwrap_or(0) > 100, "hardly ever: {what}; {seen:?}");
    }
}

/// Without faults and in time, what the tiers promise they keep: a miss can only follow from an
/// object that had to make room between the promise and the copy.
#[test]
fn without_faults_nothing_is_wrong_and_prefixes_are_found_again() {
    let mut totals = (0, 0);
    for seed in 0..30 {
        let mut world = World::new(1000 + seed, WritePolicy::Through, false);
        for _ in 0..5_000 {
            world.step();
        }
        world.drain();
        totals.0 += world.seen.get("complete").copied().unwrap_or(0);
        totals.1 += world.seen.get("miss").copied().unwrap_or(0);
        for tier in Tier::ALL {
            let counters = world.tiers.counters(tier);
            let full = if tier == Tier::Disk { world.seen.get("full").copied() } else { None };
            let failed = (counters.mismatches, counters.failures);
            assert_eq!(failed, (0, full.unwrap_or(0)), "{tier}");
        }
    }
    assert!(totals.0 > 20 * totals.1, "{totals:?} complete and missed");
}

/// Limits of a few slots and stores.
pub(crate) fn small_limits() -> Limits {
    World::new(1, WritePolicy::Through, false).limits
}

/// A disk that others fill has less room than the tier may take: it goes on with what there is.
#[test]
fn full_disk_keeps_what_is_new() {
    let mut world = World::new(3, WritePolicy::Through, false);
    while world.limits.disk.is_none_or(|disk| disk.bytes_max < Some(150)) {
        let seed = world.random.next();
        world = World::new(seed, WritePolicy::Through, false);
    }
    world.room = 90;
    for _ in 0..20_000 {
        world.step();
    }
    let disk = world.tiers.counters(Tier::Disk);
    assert_eq!(disk.pauses, 0, "a full disk is no broken one");
    assert!(disk.stored > 200, "{} objects were written", disk.stored);
    // Most writes fit after something had to go.
    assert!(disk.failures < disk.stored / 2, "{} of {}", disk.failures, disk.stored);
    world.drain();
}
