//! Which slot of host memory holds which object.

use super::types::{Slot, Store};
use crate::change::ChangeLog;
use crate::object::{ObjectKey, Part};
use crate::order::SlotOrder;
use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;
use kv_pool::EvictionOrder;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// A motion writes it.
    Filling,
    /// Complete.
    Ready,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: ObjectKey,
    state: State,
    /// The store that it was read from, until it is used.
    origin: Option<Store>,
    /// Motions that write or read it.
    motions: u32,
    /// Not to be found any more; free when the last motion has ended.
    is_doomed: bool,
    /// Does not go to make room.
    is_pinned: bool,
}

/// The slots of one part.
#[derive(Debug)]
struct Slots {
    entries: Vec<Option<Entry>>,
    free: Vec<u32>,
    /// Ready, in no motion, not pinned and not held: what may go.
    idle: SlotOrder,
    /// Slots that wait to be written, see [`Host::hold`].
    held: usize,
}

impl Slots {
    fn new(count: u32) -> Self {
        Self {
            entries: vec![None; count as usize],
            free: (0..count).rev().collect(),
            idle: SlotOrder::default(),
            held: 0,
        }
    }
}

#[derive(Debug)]
pub(super) struct Host {
    by_key: BTreeMap<ObjectKey, Slot>,
    slots: [Slots; 2],
    /// What can be loaded, and can no longer.
    pub(super) changes: ChangeLog<ObjectKey>,
}

impl Host {
    pub(super) fn new(blocks: u32, boundaries: u32) -> Self {
        Self {
            by_key: BTreeMap::new(),
            slots: [Slots::new(blocks), Slots::new(boundaries)],
            changes: ChangeLog::default(),
        }
    }

    /// Slot and state of an object.
    pub(super) fn find(&self, key: &ObjectKey) -> Option<(Slot, State)> {
        let slot = *self.by_key.get(key)?;
        Some((slot, self.entry(slot).state))
    }

    /// Objects that are complete, by key.
    pub(super) fn ready(&self) -> impl Iterator<Item = ObjectKey> {
        let is_ready = |slot: &Slot| self.entry(*slot).state == State::Ready;
        self.by_key.iter().filter(move |(_, slot)| is_ready(slot)).map(|(key, _)| *key)
    }

    /// The store that an object was read from and not used since.
    pub(super) fn origin(&self, key: &ObjectKey) -> Option<Store> {
        self.by_key.get(key).and_then(|slot| self.entry(*slot).origin)
    }

    /// The object has come to use.
    pub(super) fn came_to_use(&mut self, slot: Slot) {
        self.entry_mut(slot).origin = None;
    }

    /// A slot to be filled with an object that has none, and the object that had to go for it.
    /// None if every slot is in motion, or may not go.
    pub(super) fn take(
        &mut self,
        key: ObjectKey,
        origin: Option<Store>,
        is_pinned: bool,
    ) -> Option<(Slot, Option<ObjectKey>)> {
        assert!(!self.by_key.contains_key(&key), "{key} has a slot already");
        let slots = &mut self.slots[key.part.position()];
        let (index, gone) = match slots.free.pop() {
            Some(index) => (index, None),
            None => {
                let index = slots.idle.pop_victim()? as u32;
                let gone = slots.entries[index as usize].map(|entry| entry.key);
                (index, gone)
            }
        };
        if let Some(gone) = &gone {
            self.by_key.remove(gone);
            self.changes.left(*gone);
        }
        let state = State::Filling;
        let entry = Entry { key, state, origin, motions: 1, is_doomed: false, is_pinned };
        self.slots[key.part.position()].entries[index as usize] = Some(entry);
        let slot = Slot { part: key.part, index };
        self.by_key.insert(key, slot);
        Some((slot, gone))
    }

    /// The motion that filled a slot has ended; with `good` the object can be found from now on.
    pub(super) fn filled(&mut self, slot: Slot, good: bool) {
        let entry = self.entry_mut(slot);
        assert_eq!(entry.state, State::Filling, "{slot:?} was filled before");
        if good {
            entry.state = State::Ready;
            let (key, is_doomed) = (entry.key, entry.is_doomed);
            if !is_doomed {
                self.changes.arrived(key);
            }
        } else {
            self.doom(slot);
        }
        self.end_use(slot);
    }

    /// A motion reads the slot from now on.
    pub(super) fn begin_use(&mut self, slot: Slot) {
        let entry = self.entry_mut(slot);
        assert!(entry.state == State::Ready && !entry.is_doomed, "{slot:?} is not to be read");
        entry.motions += 1;
        self.slots[slot.part.position()].idle.remove(slot.index.into());
    }

    /// A motion of the slot has ended.
    pub(super) fn end_use(&mut self, slot: Slot) {
        let entry = self.entry_mut(slot);
        entry.motions -= 1;
        let Entry { motions, is_doomed, is_pinned, .. } = *entry;
        if motions > 0 {
            return;
        }
        let slots = &mut self.slots[slot.part.position()];
        if is_doomed {
            slots.entries[slot.index as usize] = None;
            slots.free.push(slot.index);
        } else if !is_pinned {
            slots.idle.insert(slot.index.into());
        }
    }

    /// Keeps a slot until it is written to a store, or has turned out not to be, as if it was in
    /// motion: so that a burst of saves does not drive out what it has brought. False if a quarter
    /// of the slots are held already, which is as much as a store that is slow may block.
    pub(super) fn hold(&mut self, slot: Slot) -> bool {
        let slots = &mut self.slots[slot.part.position()];
        if slots.held >= slots.entries.len() / 4 {
            return false;
        }
        slots.held += 1;
        self.begin_use(slot);
        true
    }

    /// The slot is not held any more.
    pub(super) fn release(&mut self, slot: Slot) {
        self.slots[slot.part.position()].held -= 1;
        self.end_use(slot);
    }

    /// The object, if it is here, does not go to make room.
    pub(super) fn pin(&mut self, key: &ObjectKey) {
        let Some(&slot) = self.by_key.get(key) else { return };
        self.entry_mut(slot).is_pinned = true;
        self.slots[slot.part.position()].idle.remove(slot.index.into());
    }

    /// The object is like any other again.
    pub(super) fn unpin(&mut self, key: &ObjectKey) {
        let Some(&slot) = self.by_key.get(key) else { return };
        let entry = self.entry_mut(slot);
        entry.is_pinned = false;
        if entry.motions == 0 {
            self.slots[slot.part.position()].idle.insert(slot.index.into());
        }
    }

    /// The object is not to be found any more.
    pub(super) fn doom(&mut self, slot: Slot) {
        let entry = self.entry_mut(slot);
        if core::mem::replace(&mut entry.is_doomed, true) {
            return;
        }
        let (key, motions, state) = (entry.key, entry.motions, entry.state);
        self.by_key.remove(&key);
        if state == State::Ready {
            self.changes.left(key);
        }
        if motions == 0 {
            let slots = &mut self.slots[slot.part.position()];
            slots.idle.remove(slot.index.into());
            slots.entries[slot.index as usize] = None;
            slots.free.push(slot.index);
        }
    }

    /// Notes a use.
    pub(super) fn touch(&mut self, slot: Slot) {
        self.slots[slot.part.position()].idle.touch(slot.index.into());
    }

    /// Nothing can be found any more.
    pub(super) fn clear(&mut self) {
        let all: Vec<Slot> = self.by_key.values().copied().collect();
        for slot in all {
            self.doom(slot);
        }
    }

    /// Slots that are not free, in the order of [`Part::ALL`].
    pub(super) fn used(&self) -> [u64; 2] {
        [0, 1].map(|n| (self.slots[n].entries.len() - self.slots[n].free.len()) as u64)
    }

    /// Slots there are.
    pub(super) fn count(&self, part: Part) -> usize {
        self.slots[part.position()].entries.len()
    }

    fn entry(&self, slot: Slot) -> &Entry {
        let entry = self.slots[slot.part.position()].entries[slot.index as usize].as_ref();
        entry.expect("a slot that is named holds something")
    }

    fn entry_mut(&mut self, slot: Slot) -> &mut Entry {
        let entry = self.slots[slot.part.position()].entries[slot.index as usize].as_mut();
        entry.expect("a slot that is named holds something")
    }
}
