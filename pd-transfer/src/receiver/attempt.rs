//! The book of one attempt at the receiver: its plan, what was offered, what is verified.

use super::types::{ReceiverConfig, RetargetError, Start, StartError, Target, Verify};
use crate::get::Get;
use crate::hash::PageSum;
use crate::id::{OpId, PeerId, Time};
use crate::states::ReceiverState;
use crate::wire::{
    AttemptId, Extent, Extents, FinalRecord, Guard, Identity, Item, Key, MAX_EXTENTS, Message,
    RegionId, Tag, extents_bytes,
};
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

/// What became of an item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Offer {
    /// The place of the page in the plan.
    New(u32),
    Known,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Stage {
    /// Not offered, waiting in the queue, or waiting for a fresh target.
    Idle,
    Pulling,
    Verifying,
    Good,
}

/// What the sender said of a page.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Offered {
    identity: Identity,
    tag: Tag,
    region: RegionId,
    extents: Extents,
    guard: Guard,
}

/// All of a page in one place: with many pages each access is one to memory.
#[derive(Clone, Debug, Hash)]
struct Page {
    key: Key,
    /// Own region.
    region: RegionId,
    target: Extents,
    /// Its place among the groups.
    group: u32,
    stage: Stage,
    item: Option<Offered>,
}

#[derive(Clone, Debug, Hash)]
struct Group {
    id: u32,
    /// Its part of `Attempt::members`.
    first: usize,
    count: usize,
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
    /// Ascending by key.
    pages: Vec<Page>,
    /// Ascending by id.
    groups: Vec<Group>,
    /// Pages by group, and in each by key.
    members: Vec<u32>,
    /// Where the next offered page is looked for first.
    next_offer: Hint,
    /// Groups with `is_broken`, by place.
    broken: BTreeSet<u32>,
    good: usize,
    /// Of the pages that were offered.
    sum: PageSum,
    /// All `Ready` numbers below were seen.
    seen_below: u32,
    /// Those seen above.
    seen: BTreeSet<u32>,
    record: Option<FinalRecord>,
    /// `Done` or `Failed`, repeated until acknowledged.
    last_word: Option<Message>,
}

/// A guess; machines that differ in it only hash alike.
#[derive(Clone, Copy, Debug, Default)]
struct Hint(usize);

impl core::hash::Hash for Hint {
    fn hash<H: core::hash::Hasher>(&self, _: &mut H) {}
}

fn well_formed(extents: &[Extent]) -> bool {
    (1..=MAX_EXTENTS).contains(&extents.len()) && extents.iter().all(|extent| extent.len > 0)
}

fn same_shape(a: &[Extent], b: &[Extent]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.len == b.len)
}

/// Numbers the groups of pages that still have the ids of theirs, and lists their members.
fn group(pages: &mut [Page]) -> (Vec<Group>, Vec<u32>) {
    let mut members: Vec<u32> = (0..).take(pages.len()).collect();
    members.sort_by_key(|member| pages[*member as usize].group);
    let mut groups: Vec<Group> = Vec::new();
    for (at, member) in members.iter().enumerate() {
        let page = &mut pages[*member as usize];
        match groups.last_mut().filter(|group| group.id == page.group) {
            Some(group) => group.count += 1,
            None => groups.push(Group {
                id: page.group,
                first: at,
                count: 1,
                in_flight: 0,
                is_broken: false,
                is_waiting: false,
                is_retried: false,
            }),
        }
        page.group = groups.len() as u32 - 1;
    }
    (groups, members)
}

impl Attempt {
    pub(super) fn new(
        now: Time,
        start: Start,
        config: &ReceiverConfig,
    ) -> Result<Self, StartError> {
        let planned = start.plan.len();
        let mut pages = Vec::with_capacity(planned);
        let mut bytes = 0_u64;
        for target in &start.plan {
            let Target { key, group, region, .. } = *target;
            let extents = Some(&target.extents[..]).filter(|extents| well_formed(extents));
            let Some(extents) = extents.and_then(Extents::new) else {
                return Err(StartError::BadTarget { key, count: target.extents.len() });
            };
            bytes += target.bytes();
            // Named by its id until the groups are known.
            pages.push(Page {
                key,
                region,
                target: extents,
                group,
                stage: Stage::Idle,
                item: None,
            });
        }
        pages.sort_unstable_by_key(|page| page.key);
        if let Some(twice) = pages.windows(2).find(|pair| pair[0].key == pair[1].key) {
            return Err(StartError::DuplicateKey(twice[0].key));
        }
        let (groups, members) = group(&mut pages);
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
            members,
            next_offer: Hint::default(),
            broken: BTreeSet::new(),
            good: 0,
            sum: PageSum::default(),
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
        self.pages.iter().all(|page| page.item.is_some())
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

    /// The place of a page. Offers mostly come in the order of the plan.
    fn find(&self, key: &Key) -> Option<usize> {
        let Hint(next) = self.next_offer;
        if self.pages.get(next).is_some_and(|page| page.key == *key) {
            return Some(next);
        }
        self.pages.binary_search_by_key(key, |page| page.key).ok()
    }

    /// The key of a page of the plan.
    pub(super) fn key(&self, place: u32) -> Key {
        self.pages.get(place as usize).map_or(Key([0; 16]), |page| page.key)
    }

    /// Takes one offered page.
    pub(super) fn offer(
        &mut self,
        now: Time,
        item: Item,
        regions: &BTreeMap<RegionId, u64>,
    ) -> Result<Offer, String> {
        let key = item.key;
        let Some(place) = self.find(&key) else {
            // PD-R3
            // Without the guard it would be skipped, as a kind that one knows nothing of.
            return if guard!(UnknownKind, false) {
                Ok(Offer::Known)
            } else {
                Err(format!("page {key} is not in the plan"))
            };
        };
        let page = &mut self.pages[place];
        let Some(extents) = Extents::new(&item.extents) else {
            return Err(format!("page {key} has {} extents", item.extents.len()));
        };
        let Item { identity, tag, region, guard, .. } = item;
        let offered = Offered { identity, tag, region, extents, guard };
        // PD-R6
        if let Some(known) = &page.item {
            return if *known == offered {
                Ok(Offer::Known)
            } else {
                Err(format!("page {key} was offered twice with different content"))
            };
        }
        // PD-R4
        if !same_shape(&extents, &page.target) {
            return Err(format!(
                "page {key} has {} bytes in {} extents, the plan has {} in {}",
                item.bytes(),
                item.extents.len(),
                extents_bytes(&page.target),
                page.target.len()
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
        self.sum.add(&key, &offered.identity, &offered.tag);
        page.item = Some(offered);
        self.next_offer = Hint(place + 1);
        self.progress = now;
        Ok(Offer::New(place as u32))
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
        Some(if guard!(Manifest, self.sum.hash() == record.manifest) {
            Ok(record.clone())
        } else {
            Err(String::from("the final manifest is not that of the offered pages"))
        })
    }

    /// Marks a queued page as being pulled. `None` if it is not to be pulled now.
    // PD-F1
    pub(super) fn pull(&mut self, place: u32) -> Option<Get> {
        if !self.is_live() {
            return None;
        }
        let page = self.pages.get_mut(place as usize)?;
        let group = self.groups.get_mut(page.group as usize)?;
        // PD-G2
        if page.stage != Stage::Idle || group.is_broken || group.is_waiting {
            return None;
        }
        let item = page.item.as_ref()?;
        page.stage = Stage::Pulling;
        group.in_flight += 1;
        self.in_flight += 1;
        Some(Get {
            // The caller gives it its number.
            op: OpId(0),
            source_region: item.region,
            source: item.extents,
            guard: item.guard,
            target_region: page.region,
            target: page.target,
        })
    }

    /// The bytes of a page are in its target. In a live attempt the page stays in flight until it
    /// is verified.
    pub(super) fn landed(&mut self, now: Time, place: u32) -> u64 {
        self.progress = now;
        let bytes = self.pages.get(place as usize).map_or(0, |page| extents_bytes(&page.target));
        if !self.is_live() {
            self.op_over(place);
        }
        bytes
    }

    /// What is to be checked of a page that landed. `None` if nobody wants it any more.
    pub(super) fn begin_verify(&mut self, attempt: AttemptId, place: u32) -> Option<Verify> {
        if !self.is_live() {
            return None;
        }
        let page = self.pages.get_mut(place as usize)?;
        let tag = page.item.as_ref()?.tag;
        page.stage = Stage::Verifying;
        let (key, region, extents) = (page.key, page.region, page.target);
        // The caller gives it its number.
        Some(Verify { op: OpId(0), attempt, key, tag, region, extents })
    }

    pub(super) fn verified(&mut self, now: Time, place: u32) {
        self.progress = now;
        self.op_over(place);
        let Some(page) = self.pages.get_mut(place as usize) else { return };
        page.stage = Stage::Good;
        self.good += 1;
    }

    /// The operation on a page is over, whatever came of it.
    pub(super) fn op_over(&mut self, place: u32) {
        let Some(page) = self.pages.get_mut(place as usize) else { return };
        assert!(
            matches!(page.stage, Stage::Pulling | Stage::Verifying),
            "page {} ended an operation it did not have",
            page.key
        );
        page.stage = Stage::Idle;
        self.in_flight -= 1;
        if let Some(group) = self.groups.get_mut(page.group as usize) {
            group.in_flight -= 1;
        }
    }

    /// Notes that a page is wrong. True if its group had its retry already.
    pub(super) fn page_failed(&mut self, now: Time, place: u32) -> bool {
        self.progress = now;
        self.op_over(place);
        let Some(page) = self.pages.get(place as usize) else { return false };
        let Some(group) = self.groups.get_mut(page.group as usize) else { return false };
        if group.is_retried {
            return true;
        }
        group.is_broken = true;
        self.broken.insert(page.group);
        false
    }

    /// Broken groups with nothing in flight: from here on they wait for fresh targets.
    pub(super) fn take_fresh(&mut self) -> Vec<(u32, Vec<Key>)> {
        let mut fresh = Vec::new();
        for place in core::mem::take(&mut self.broken) {
            let Some(group) = self.groups.get_mut(place as usize) else { continue };
            // PD-V4 PD-G4
            if !guard!(SiblingCompletion, group.in_flight == 0) {
                self.broken.insert(place);
                continue;
            }
            group.is_broken = false;
            group.is_retried = true;
            group.is_waiting = true;
            let members = &self.members[group.first..group.first + group.count];
            let mut keys = Vec::with_capacity(members.len());
            for member in members {
                let page = &mut self.pages[*member as usize];
                if page.stage == Stage::Good {
                    self.good -= 1;
                }
                page.stage = Stage::Idle;
                keys.push(page.key);
            }
            fresh.push((group.id, keys));
        }
        fresh
    }

    /// Replaces the targets of waiting groups, whole groups only. Returns the pages to pull.
    pub(super) fn retarget(
        &mut self,
        now: Time,
        id: AttemptId,
        targets: Vec<Target>,
    ) -> Result<Vec<u32>, RetargetError> {
        if !self.is_live() {
            return Err(RetargetError::Ended(id));
        }
        let mut given = BTreeMap::new();
        let mut touched = BTreeSet::new();
        for target in targets {
            let key = target.key;
            let Some(place) = self.find(&key) else {
                return Err(RetargetError::NotAsked(key));
            };
            let page = &self.pages[place];
            let group = &self.groups[page.group as usize];
            if !group.is_waiting {
                return Err(RetargetError::NotAsked(key));
            }
            // PD-V5
            let extents = Extents::new(&target.extents)
                .filter(|new| target.group == group.id && same_shape(new, &page.target));
            let Some(extents) = extents else {
                let (group, bytes) = (target.group, target.bytes());
                return Err(RetargetError::Shape { key, group, bytes });
            };
            touched.insert(page.group);
            if given.insert(place as u32, (target.region, extents)).is_some() {
                return Err(RetargetError::NotAsked(key));
            }
        }
        for place in &touched {
            let group = &self.groups[*place as usize];
            let members = &self.members[group.first..group.first + group.count];
            // PD-V5
            if let Some(missing) = members.iter().find(|member| !given.contains_key(*member)) {
                let key = self.pages[*missing as usize].key;
                return Err(RetargetError::Missing { key, group: group.id });
            }
        }
        for place in &touched {
            self.groups[*place as usize].is_waiting = false;
        }
        self.progress = now;
        let mut ready = Vec::new();
        for (place, (region, extents)) in given {
            let page = &mut self.pages[place as usize];
            (page.region, page.target) = (region, extents);
            if page.item.is_some() {
                ready.push(place);
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
            self.forget_pages();
        }
    }

    fn forget_pages(&mut self) {
        (self.pages, self.groups, self.members) = (Vec::new(), Vec::new(), Vec::new());
        self.broken = BTreeSet::new();
    }

    /// Nothing is in flight any more; only the last word is kept.
    pub(super) fn drained(&mut self) -> Option<Message> {
        self.forget_pages();
        self.last_word.clone()
    }
}
