//! What a store holds, as far as is known here.

use super::types::{StoreLimits, TierUse};
use crate::change::ChangeLog;
use crate::object::{ObjectKey, Part};
use crate::order::SlotOrder;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;
use kv_pool::EvictionOrder;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Being written; not to be found yet.
    Writing,
    /// Being written, and to be removed when that has ended.
    Unwanted,
    /// There.
    Present,
    /// Not to be found any more; to be removed when the last read has ended.
    Doomed,
    /// There, and not to be found for a while: it could not be read.
    Hidden,
    /// Being removed.
    Removing,
    /// It could not be removed: its bytes count, and nobody uses it until that is tried again.
    Stuck,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: ObjectKey,
    state: State,
    reads: u32,
    /// It is removed to make room, and may stay if that fails.
    for_room: bool,
    /// Times that it could not be removed.
    failed_removals: u8,
}

/// How a removal ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Removal {
    /// The object is gone; whether that made room.
    Gone { made_room: bool },
    /// It could not be removed; whether that was known of it. What is known says nothing new of its
    /// store.
    Failed { is_known: bool },
}

/// Longest time between two tries to remove an object, in pauses: what cannot be removed once may
/// never be.
const RETRY_PAUSES_MAX: u64 = 64;

/// What a store does: reads and probes, or writes and removals. Each can fail by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Up,
    Down,
}

/// What is to be done about an object that is to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Going {
    /// Remove it from the store.
    Remove(ObjectKey),
    /// Nothing: it was only forgotten, or is removed later.
    Nothing,
}

/// Whether there is room for one more object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// There is.
    Yes,
    /// This one is removed for it.
    After(Going),
    /// Not before what is being removed is gone.
    Later,
    /// No.
    Never,
}

#[derive(Debug)]
pub(super) struct Index {
    limits: StoreLimits,
    object_bytes: [u64; 2],
    ids: BTreeMap<ObjectKey, u32>,
    /// By id; ids of what was forgotten are used again.
    entries: Vec<Entry>,
    free: Vec<u32>,
    /// Present and not being read: what may go.
    idle: SlotOrder,
    used: TierUse,
    removing: usize,
    /// Motions under way.
    pub(super) reading: usize,
    pub(super) writing: usize,
    /// Failures in a row, for each [`Way`].
    failures: [u32; 2],
    paused_until: Option<u64>,
    /// What could not be removed, and when that is tried again.
    stuck: Vec<u32>,
    retry_at: Option<u64>,
    /// What could not be read, each with the time when it may be found again.
    hidden: VecDeque<(u64, u32)>,
    /// What the store turned out to have room for, in bytes, and until when that is believed.
    found_full: Option<(u64, u64)>,
    /// What can be read, and can no longer; not what was adopted.
    pub(super) changes: ChangeLog<ObjectKey>,
}

impl Index {
    pub(super) fn new(limits: StoreLimits, object_bytes: [u64; 2]) -> Self {
        Self {
            limits,
            object_bytes,
            ids: BTreeMap::new(),
            entries: Vec::new(),
            free: Vec::new(),
            idle: SlotOrder::default(),
            used: TierUse { bytes_max: limits.bytes_max.unwrap_or(0), ..TierUse::default() },
            removing: 0,
            reading: 0,
            writing: 0,
            failures: [0; 2],
            paused_until: None,
            stuck: Vec::new(),
            retry_at: None,
            hidden: VecDeque::new(),
            found_full: None,
            changes: ChangeLog::default(),
        }
    }

    pub(super) const fn limits(&self) -> &StoreLimits {
        &self.limits
    }

    pub(super) const fn used(&self) -> TierUse {
        self.used
    }

    /// Whether an object can be read.
    pub(super) fn has(&self, key: &ObjectKey) -> bool {
        self.find(key).is_some_and(|(_, entry)| entry.state == State::Present)
    }

    /// Whether anything is known of an object, so that it is not to be written.
    pub(super) fn knows(&self, key: &ObjectKey) -> bool {
        self.ids.contains_key(key)
    }

    fn find(&self, key: &ObjectKey) -> Option<(u32, Entry)> {
        let id = *self.ids.get(key)?;
        Some((id, self.entries[id as usize]))
    }

    fn bytes_of(&self, part: Part) -> u64 {
        self.object_bytes[part.position()]
    }

    fn add(&mut self, key: ObjectKey, state: State) -> u32 {
        let entry = Entry { key, state, reads: 0, for_room: false, failed_removals: 0 };
        let id = match self.free.pop() {
            Some(id) => {
                self.entries[id as usize] = entry;
                id
            }
            None => {
                self.entries.push(entry);
                u32::try_from(self.entries.len() - 1).expect("a store has fewer objects than that")
            }
        };
        self.ids.insert(key, id);
        self.used.objects[key.part.position()] += 1;
        self.used.bytes += self.bytes_of(key.part);
        id
    }

    fn forget(&mut self, id: u32) {
        let entry = self.entries[id as usize];
        if entry.state == State::Present {
            self.changes.left(entry.key);
        }
        self.ids.remove(&entry.key);
        self.idle.remove(id.into());
        self.free.push(id);
        self.used.objects[entry.key.part.position()] -= 1;
        self.used.bytes -= self.bytes_of(entry.key.part);
    }

    fn set(&mut self, id: u32, state: State) {
        let Entry { key, state: before, .. } = self.entries[id as usize];
        self.entries[id as usize].state = state;
        match (before, state) {
            (State::Present, State::Present) => {}
            (_, State::Present) => self.changes.arrived(key),
            (State::Present, _) => self.changes.left(key),
            _ => {}
        }
    }

    /// An object was found in the store; false if there is no room for it in the index.
    pub(super) fn adopt(&mut self, key: ObjectKey) -> bool {
        if self.knows(&key) {
            return true;
        }
        if self.ids.len() >= self.limits.objects_max {
            return false;
        }
        let id = self.add(key, State::Present);
        self.idle.insert(id.into());
        true
    }

    /// An object was found that others have written.
    pub(super) fn find_new(&mut self, key: ObjectKey) {
        if !self.knows(&key) && self.adopt(key) {
            self.changes.arrived(key);
        }
    }

    /// Whether an object of a part could be added, and what has to go for it.
    pub(super) fn make_room(&mut self, part: Part) -> Room {
        let wanted = self.used.bytes + self.bytes_of(part);
        let found = self.found_full.map(|(bytes, _)| bytes);
        let max = [self.limits.bytes_max, found].into_iter().flatten().min();
        let bytes_fit = max.is_none_or(|max| wanted <= max);
        if bytes_fit && self.ids.len() < self.limits.objects_max {
            return Room::Yes;
        }
        if max.is_some_and(|max| self.bytes_of(part) > max) {
            return Room::Never;
        }
        if self.removing > 0 {
            return Room::Later;
        }
        match self.idle.pop_victim() {
            Some(id) => {
                self.entries[id as usize].for_room = true;
                Room::After(self.let_go(id as u32))
            }
            None if self.reading + self.writing > 0 => Room::Later,
            None => Room::Never,
        }
    }

    /// An object that is not being read goes.
    fn let_go(&mut self, id: u32) -> Going {
        if !self.limits.owned {
            self.forget(id);
            return Going::Nothing;
        }
        self.idle.remove(id.into());
        self.set(id, State::Removing);
        self.removing += 1;
        Going::Remove(self.entries[id as usize].key)
    }

    /// The bytes of an object are not what they should be, or it is to go for another reason.
    pub(super) fn doom(&mut self, key: &ObjectKey) -> Going {
        match self.find(key) {
            Some((id, entry)) if matches!(entry.state, State::Present | State::Hidden) => {
                if entry.reads == 0 {
                    return self.let_go(id);
                }
                self.set(id, State::Doomed);
                Going::Nothing
            }
            Some((id, entry)) if entry.state == State::Writing => {
                self.set(id, State::Unwanted);
                Going::Nothing
            }
            _ => Going::Nothing,
        }
    }

    /// An object could not be read: it is not found before `until_us`.
    pub(super) fn hide(&mut self, key: &ObjectKey, until_us: u64) {
        let Some((id, entry)) = self.find(key) else { return };
        if entry.state == State::Present {
            self.idle.remove(id.into());
            self.set(id, State::Hidden);
            self.hidden.push_back((until_us, id));
        }
    }

    /// What was hidden for long enough can be found again.
    fn unhide(&mut self, now_us: u64) {
        while let Some(&(_, id)) = self.hidden.front().filter(|(until, _)| *until <= now_us) {
            self.hidden.pop_front();
            // It may have gone meanwhile, and something else have its number.
            let Entry { state, reads, .. } = self.entries[id as usize];
            if state == State::Hidden {
                self.set(id, State::Present);
                if reads == 0 {
                    self.idle.insert(id.into());
                }
            }
        }
    }

    pub(super) fn begin_read(&mut self, key: &ObjectKey) {
        let (id, _) = self.find(key).expect("it is present");
        self.entries[id as usize].reads += 1;
        self.idle.remove(id.into());
        self.reading += 1;
    }

    /// A read has ended; `is_gone` if the store did not have the object.
    pub(super) fn end_read(&mut self, key: &ObjectKey, is_gone: bool) -> Going {
        self.reading -= 1;
        let (id, entry) = self.find(key).expect("it stays while it is read");
        let reads = entry.reads - 1;
        self.entries[id as usize].reads = reads;
        if is_gone && entry.state == State::Present {
            self.set(id, State::Doomed);
        }
        match (reads, self.entries[id as usize].state) {
            (0, State::Doomed) if is_gone => {
                self.forget(id);
                Going::Nothing
            }
            (0, State::Doomed) => self.let_go(id),
            (0, State::Present) => {
                self.idle.insert(id.into());
                Going::Nothing
            }
            _ => Going::Nothing,
        }
    }

    pub(super) fn begin_write(&mut self, key: ObjectKey) {
        self.add(key, State::Writing);
        self.writing += 1;
    }

    /// A write has ended; `good` if the object is in the store now.
    pub(super) fn end_write(&mut self, key: &ObjectKey, good: bool) -> Going {
        self.writing -= 1;
        let (id, entry) = self.find(key).expect("it stays while it is written");
        match entry.state {
            _ if !good => self.forget(id),
            State::Unwanted => return self.let_go(id),
            State::Writing => {
                self.set(id, State::Present);
                self.idle.insert(id.into());
            }
            State::Present | State::Hidden | State::Doomed | State::Removing | State::Stuck => {
                panic!("{key} was written before")
            }
        }
        Going::Nothing
    }

    /// Nothing of what is being written or read now is to be found afterwards. What is idle is for
    /// [`Index::pop_idle`].
    pub(super) fn want_empty(&mut self) {
        let all: Vec<u32> = self.ids.values().copied().collect();
        for id in all {
            let Entry { state, reads, .. } = self.entries[id as usize];
            match state {
                State::Writing => self.set(id, State::Unwanted),
                State::Present | State::Hidden if reads > 0 => self.set(id, State::Doomed),
                State::Hidden => self.get_stuck(id, 0),
                _ => {}
            }
        }
        // What could not be removed before is tried again.
        self.retry_at = self.retry_at.map(|_| 0);
    }

    /// The removal of an object is to be tried (again) at a time.
    fn get_stuck(&mut self, id: u32, at_us: u64) {
        self.set(id, State::Stuck);
        self.stuck.push(id);
        self.retry_at = Some(self.retry_at.map_or(at_us, |at| at.min(at_us)));
    }

    /// A removal has ended. One that failed is tried again after a pause, and a longer one each
    /// time, unless the object was only in the way.
    pub(super) fn end_remove(
        &mut self,
        key: &ObjectKey,
        good: bool,
        now_us: u64,
        pause_us: u64,
    ) -> Removal {
        self.removing -= 1;
        let (id, old) = self.find(key).expect("it stays while it is removed");
        if good {
            self.forget(id);
            return Removal::Gone { made_room: old.for_room };
        }
        let entry = &mut self.entries[id as usize];
        entry.for_room = false;
        entry.failed_removals = old.failed_removals.saturating_add(1);
        if old.for_room {
            self.set(id, State::Present);
            self.idle.insert(id.into());
        } else {
            let pauses = (1_u64 << old.failed_removals.min(63)).min(RETRY_PAUSES_MAX);
            self.get_stuck(id, now_us.saturating_add(pause_us.saturating_mul(pauses)));
        }
        Removal::Failed { is_known: old.failed_removals > 0 }
    }

    /// What is to be removed once more, if its time has come.
    pub(super) fn retry(&mut self, now_us: u64) -> Vec<Going> {
        if self.retry_at.is_none_or(|at| at > now_us) {
            return Vec::new();
        }
        self.retry_at = None;
        core::mem::take(&mut self.stuck).into_iter().map(|id| self.let_go(id)).collect()
    }

    /// The least recently used objects that are too many, at most so many.
    pub(super) fn trim(&mut self, most: usize) -> Vec<Going> {
        let max = self.limits.bytes_max.unwrap_or(u64::MAX);
        let (mut bytes, mut gone) = (self.used.bytes, Vec::new());
        while bytes > max
            && gone.len() < most
            && let Some(id) = self.idle.pop_victim()
        {
            let id = id as u32;
            bytes -= self.bytes_of(self.entries[id as usize].key.part);
            self.entries[id as usize].for_room = true;
            gone.push(self.let_go(id));
        }
        gone
    }

    /// Notes a use.
    pub(super) fn touch(&mut self, key: &ObjectKey) {
        if let Some((id, _)) = self.find(key) {
            self.idle.touch(id.into());
        }
    }

    /// The object that may go first.
    pub(super) fn pop_idle(&mut self) -> Option<Going> {
        let id = self.idle.pop_victim()?;
        Some(self.let_go(id as u32))
    }

    /// Whether the store is to be left alone.
    pub(super) const fn is_paused(&self) -> bool {
        self.paused_until.is_some()
    }

    /// The store has no room for more than what is in it, whatever its limit says; for a while that
    /// is believed, and older objects make room for new ones.
    pub(super) fn is_full(&mut self, now_us: u64, pause_us: u64) {
        self.found_full = Some((self.used.bytes, now_us.saturating_add(pause_us)));
    }

    /// When a pause, or the belief that the store is full, ends.
    pub(super) fn due(&self) -> Option<u64> {
        let full = self.found_full.map(|(_, until)| until);
        let hidden = self.hidden.front().map(|(until, _)| *until);
        let ends = [self.paused_until, full, hidden, self.retry_at];
        ends.into_iter().flatten().min()
    }

    /// Ends a pause whose time has come. The next failure begins another one.
    pub(super) fn resume(&mut self, now_us: u64) {
        if self.found_full.is_some_and(|(_, until)| until <= now_us) {
            self.found_full = None;
        }
        if self.paused_until.is_some_and(|until| until <= now_us) {
            self.paused_until = None;
        }
        self.unhide(now_us);
    }

    pub(super) fn succeeded(&mut self, way: Way) {
        self.failures[way as usize] = 0;
    }

    /// Counts a failure; true if a pause begins by it.
    pub(super) fn failed(&mut self, way: Way, now_us: u64, pause_us: u64, max: u32) -> bool {
        let failures = &mut self.failures[way as usize];
        *failures = (*failures + 1).min(max);
        if *failures < max || self.is_paused() {
            return false;
        }
        self.paused_until = Some(now_us.saturating_add(pause_us));
        true
    }
}
