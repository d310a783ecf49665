//! The book of one attempt at the receiver: its plan, what was offered, what is verified.

use super::types::{ReceiverConfig, RetargetError, Start, StartError, Target};
use crate::id::{PeerId, Time};
use crate::states::ReceiverState;
use crate::wire::{
    AttemptId, Extent, FinalRecord, Item, Key, MAX_EXTENTS, Message, RegionId, Tag, manifest_hash,
};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// What became of an item or a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Offer {
    New,
    Known,
    Stale,
    Mismatch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    /// Not offered, waiting in the queue, or waiting for a fresh target.
    Idle,
    Pulling,
    Verifying,
    Good,
}

#[derive(Clone, Debug, Hash)]
struct Page {
    target: Target,
    item: Option<Item>,
    stage: Stage,
}

#[derive(Clone, Debug, Default, Hash)]
struct Group {
    keys: Vec<Key>,
    in_flight: usize,
    /// A page of it failed; its other pages still have to land.
    is_broken: bool,
    /// Fresh targets were asked for and not given yet.
    is_waiting: bool,
    /// It had its one retry.
    is_retried: bool,
}

#[derive(Clone, Debug, Hash)]
pub(super) struct Attempt {
    pub(super) peer: PeerId,
    pub(super) request: Vec<u8>,
    pub(super) have: u32,
    pub(super) state: ReceiverState,
    pub(super) progress: Time,
    pub(super) in_flight: usize,
    /// Bytes of the whole plan.
    pub(super) bytes: u64,
    plan_hash: [u8; 16],
    planned: usize,
    resend_at: Time,
    pages: BTreeMap<Key, Page>,
    groups: BTreeMap<u32, Group>,
    /// Groups with `is_broken`.
    broken: BTreeSet<u32>,
    good: usize,
    /// All `Ready` numbers below were seen.
    seen_below: u32,
    /// Those seen above.
    seen: BTreeSet<u32>,
    record: Option<FinalRecord>,
    /// `Done` or `Failed`, repeated until acknowledged.
    last_word: Option<Message>,
}

fn well_formed(extents: &[Extent]) -> bool {
    (1..=MAX_EXTENTS).contains(&extents.len()) && extents.iter().all(|extent| extent.len > 0)
}

fn same_shape(a: &[Extent], b: &[Extent]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.len == b.len)
}

impl Attempt {
    pub(super) fn new(
        now: Time,
        start: Start,
        config: &ReceiverConfig,
    ) -> Result<Self, StartError> {
        let planned = start.plan.len();
        let (mut pages, mut groups) = (BTreeMap::new(), BTreeMap::<u32, Group>::new());
        let mut bytes = 0_u64;
        for target in start.plan {
            let key = target.key;
            if !well_formed(&target.extents) {
                return Err(StartError::BadTarget { key, count: target.extents.len() });
            }
            bytes += target.bytes();
            groups.entry(target.group).or_default().keys.push(key);
            let page = Page { target, item: None, stage: Stage::Idle };
            if pages.insert(key, page).is_some() {
                return Err(StartError::DuplicateKey(key));
            }
        }
        Ok(Self {
            peer: start.peer,
            request: start.request,
            have: start.have,
            state: ReceiverState::Wanting,
            progress: now,
            in_flight: 0,
            bytes,
            plan_hash: start.plan_hash,
            planned,
            resend_at: now.after(config.resend_us),
            pages,
            groups,
            broken: BTreeSet::new(),
            good: 0,
            seen_below: 0,
            seen: BTreeSet::new(),
            record: None,
            last_word: None,
        })
    }

    pub(super) const fn is_live(&self) -> bool {
        matches!(self.state, ReceiverState::Wanting | ReceiverState::Pulling)
    }

    /// When the attempt has something to do by itself.
    pub(super) fn due(&self, config: &ReceiverConfig) -> Option<Time> {
        match self.state {
            ReceiverState::Wanting | ReceiverState::Pulling => {
                Some(self.resend_at.min(self.progress.after(config.stall_us)))
            }
            ReceiverState::Closing => Some(self.resend_at),
            ReceiverState::Draining | ReceiverState::Orphaned | ReceiverState::Gone => None,
        }
    }

    /// What to say again, if it is time and something is missing.
    pub(super) fn repeat(&mut self, now: Time, id: AttemptId, resend_us: u64) -> Option<Message> {
        if self.resend_at > now {
            return None;
        }
        self.resend_at = now.after(resend_us);
        match self.state {
            ReceiverState::Wanting => {
                Some(Message::Want { attempt: id, request: self.request.clone(), have: self.have })
            }
            // With the record and all items here nothing is missing.
            ReceiverState::Pulling if self.record.is_some() && self.is_all_offered() => None,
            ReceiverState::Pulling => Some(Message::Resume { attempt: id, next: self.seen_below }),
            ReceiverState::Closing => self.last_word.clone(),
            ReceiverState::Draining | ReceiverState::Orphaned | ReceiverState::Gone => None,
        }
    }

    fn is_all_offered(&self) -> bool {
        self.pages.values().all(|page| page.item.is_some())
    }

    /// Notes the number of a `Ready`; each must carry a page, so there are at most as many numbers
    /// as pages.
    pub(super) fn note_seq(&mut self, seq: u32, items: usize) -> Result<(), String> {
        // PD-R7
        if items == 0 || seq as usize >= self.planned {
            return Err(format!(
                "ready {seq} with {items} pages, the plan has {} pages",
                self.planned
            ));
        }
        // PD-R8
        if seq >= self.seen_below {
            self.seen.insert(seq);
        }
        while self.seen.remove(&self.seen_below) {
            self.seen_below += 1;
        }
        Ok(())
    }

    /// Takes one offered page.
    pub(super) fn offer(
        &mut self,
        now: Time,
        item: Item,
        regions: &BTreeMap<RegionId, u64>,
    ) -> Result<Offer, String> {
        let key = item.key;
        let Some(page) = self.pages.get_mut(&key) else {
            // PD-R3
            // Without the guard it would be skipped, as a kind that one knows nothing of.
            return if guard!(UnknownKind, false) {
                Ok(Offer::Known)
            } else {
                Err(format!("page {key} is not in the plan"))
            };
        };
        // PD-R6
        if let Some(known) = &page.item {
            return if *known == item {
                Ok(Offer::Known)
            } else {
                Err(format!("page {key} was offered twice with different content"))
            };
        }
        // PD-R4
        if !same_shape(&item.extents, &page.target.extents) {
            return Err(format!(
                "page {key} has {} bytes in {} extents, the plan has {} in {}",
                item.bytes(),
                item.extents.len(),
                page.target.bytes(),
                page.target.extents.len()
            ));
        }
        // PD-R5
        let region_bytes = regions.get(&item.region).copied().unwrap_or(0);
        for extent in &item.extents {
            let end = extent.offset.checked_add(u64::from(extent.len));
            if end.is_none_or(|end| end > region_bytes) {
                return Err(format!(
                    "page {key} at {} + {} is outside region {} of {region_bytes} bytes",
                    extent.offset, extent.len, item.region.0
                ));
            }
        }
        let guard_bytes = regions.get(&item.guard.region).copied().unwrap_or(0);
        let guard_end = item.guard.offset.checked_add(8);
        if !item.guard.offset.is_multiple_of(8) || guard_end.is_none_or(|end| end > guard_bytes) {
            return Err(format!(
                "guard of page {key} at {} is misaligned or outside its region of {guard_bytes} bytes",
                item.guard.offset
            ));
        }
        page.item = Some(item);
        self.progress = now;
        Ok(Offer::New)
    }

    /// Takes the last word of the sender. `Ok(false)` if it is known.
    pub(super) fn final_record(
        &mut self,
        now: Time,
        record: FinalRecord,
        hash: [u8; 16],
    ) -> Result<bool, String> {
        // PD-R11
        if !guard!(RecordHash, record.hash().ok() == Some(hash)) {
            return Err(String::from("the final record does not have its hash"));
        }
        if let Some(known) = &self.record {
            return if *known == record {
                Ok(false)
            } else {
                Err(String::from("two different final records"))
            };
        }
        if record.plan_hash != self.plan_hash {
            return Err(String::from("the sides made different plans"));
        }
        let counts = record.items as usize == self.planned && record.bytes == self.bytes;
        if !guard!(Count, counts) {
            return Err(format!(
                "final record says {} pages of {} bytes, the plan has {} of {}",
                record.items, record.bytes, self.planned, self.bytes
            ));
        }
        self.record = Some(record);
        self.progress = now;
        Ok(true)
    }

    /// The record, once every page is verified; an error if the manifest is not that of the pages.
    pub(super) fn complete(&self) -> Option<Result<FinalRecord, String>> {
        let record = self.record.as_ref()?;
        // PD-R10
        let is_whole = guard!(Count, self.good == self.planned) && self.in_flight == 0;
        if !is_whole || self.state != ReceiverState::Pulling {
            return None;
        }
        // PD-R11
        let items = self.pages.values().filter_map(|page| page.item.as_ref());
        let manifest = manifest_hash(items.map(|item| (item.key, item.identity, item.tag)));
        Some(if guard!(Manifest, manifest == record.manifest) {
            Ok(record.clone())
        } else {
            Err(String::from("the final manifest is not that of the offered pages"))
        })
    }

    /// Marks a queued page as being pulled. `None` if it is not to be pulled now.
    // PD-F1
    pub(super) fn pull(&mut self, key: &Key) -> Option<(&Item, &Target)> {
        if !self.is_live() {
            return None;
        }
        let page = self.pages.get_mut(key)?;
        let group = self.groups.get_mut(&page.target.group)?;
        // PD-G2
        if page.stage != Stage::Idle || group.is_broken || group.is_waiting {
            return None;
        }
        let item = page.item.as_ref()?;
        page.stage = Stage::Pulling;
        group.in_flight += 1;
        self.in_flight += 1;
        Some((item, &page.target))
    }

    /// The bytes of `key` are in its target. In a live attempt the page stays in flight until it
    /// is verified.
    pub(super) fn landed(&mut self, now: Time, key: &Key) -> u64 {
        self.progress = now;
        let bytes = self.pages.get(key).map_or(0, |page| page.target.bytes());
        if !self.is_live() {
            self.op_over(key);
        }
        bytes
    }

    pub(super) fn begin_verify(&mut self, key: &Key) -> Option<(Tag, RegionId, Vec<Extent>)> {
        let page = self.pages.get_mut(key)?;
        let tag = page.item.as_ref()?.tag;
        page.stage = Stage::Verifying;
        Some((tag, page.target.region, page.target.extents.clone()))
    }

    pub(super) fn verified(&mut self, now: Time, key: &Key) {
        self.progress = now;
        self.op_over(key);
        let Some(page) = self.pages.get_mut(key) else { return };
        page.stage = Stage::Good;
        self.good += 1;
    }

    /// The operation on `key` is over, whatever came of it.
    pub(super) fn op_over(&mut self, key: &Key) {
        let Some(page) = self.pages.get_mut(key) else { return };
        assert!(
            matches!(page.stage, Stage::Pulling | Stage::Verifying),
            "page {key} ended an operation it did not have"
        );
        page.stage = Stage::Idle;
        self.in_flight -= 1;
        if let Some(group) = self.groups.get_mut(&page.target.group) {
            group.in_flight -= 1;
        }
    }

    /// Notes that a page is wrong. True if its group had its retry already.
    pub(super) fn page_failed(&mut self, now: Time, key: &Key) -> bool {
        self.progress = now;
        self.op_over(key);
        let Some(page) = self.pages.get(key) else { return false };
        let id = page.target.group;
        let Some(group) = self.groups.get_mut(&id) else { return false };
        if group.is_retried {
            return true;
        }
        group.is_broken = true;
        self.broken.insert(id);
        false
    }

    /// Broken groups with nothing in flight: from here on they wait for fresh targets.
    pub(super) fn take_fresh(&mut self) -> Vec<(u32, Vec<Key>)> {
        let mut fresh = Vec::new();
        for id in core::mem::take(&mut self.broken) {
            let Some(group) = self.groups.get_mut(&id) else { continue };
            // PD-V4 PD-G4
            if !guard!(SiblingCompletion, group.in_flight == 0) {
                self.broken.insert(id);
                continue;
            }
            group.is_broken = false;
            group.is_retried = true;
            group.is_waiting = true;
            for key in &group.keys {
                if let Some(page) = self.pages.get_mut(key) {
                    if page.stage == Stage::Good {
                        self.good -= 1;
                    }
                    page.stage = Stage::Idle;
                }
            }
            fresh.push((id, group.keys.clone()));
        }
        fresh
    }

    /// Replaces the targets of waiting groups, whole groups only. Returns the pages to pull.
    pub(super) fn retarget(
        &mut self,
        now: Time,
        id: AttemptId,
        targets: Vec<Target>,
    ) -> Result<Vec<Key>, RetargetError> {
        if !self.is_live() {
            return Err(RetargetError::Ended(id));
        }
        let mut given = BTreeMap::new();
        let mut touched = BTreeSet::new();
        for target in targets {
            let key = target.key;
            let Some(page) = self.pages.get(&key) else {
                return Err(RetargetError::NotAsked(key));
            };
            let group = page.target.group;
            if !self.groups.get(&group).is_some_and(|group| group.is_waiting) {
                return Err(RetargetError::NotAsked(key));
            }
            let (new_group, bytes) = (target.group, target.bytes());
            // PD-V5
            if new_group != group || !same_shape(&target.extents, &page.target.extents) {
                return Err(RetargetError::Shape { key, group: new_group, bytes });
            }
            touched.insert(group);
            if given.insert(key, target).is_some() {
                return Err(RetargetError::NotAsked(key));
            }
        }
        for group in &touched {
            let keys = self.groups.get(group).map_or(&[][..], |entry| &entry.keys);
            // PD-V5
            if let Some(key) = keys.iter().find(|key| !given.contains_key(*key)) {
                return Err(RetargetError::Missing { key: *key, group: *group });
            }
        }
        for group in &touched {
            if let Some(entry) = self.groups.get_mut(group) {
                entry.is_waiting = false;
            }
        }
        self.progress = now;
        let mut ready = Vec::new();
        for (key, target) in given {
            if let Some(page) = self.pages.get_mut(&key) {
                page.target = target;
                if page.item.is_some() {
                    ready.push(key);
                }
            }
        }
        Ok(ready)
    }

    /// Notes the last word and when to say it again.
    pub(super) fn close(&mut self, now: Time, message: Message, resend_us: u64) {
        self.last_word = Some(message);
        self.resend_at = now.after(resend_us);
        self.request = Vec::new();
        if self.in_flight == 0 {
            self.pages = BTreeMap::new();
            self.groups = BTreeMap::new();
        }
    }

    /// Nothing is in flight any more; only the last word is kept.
    pub(super) fn drained(&mut self) -> Option<Message> {
        self.pages = BTreeMap::new();
        self.groups = BTreeMap::new();
        self.last_word.clone()
    }
}
