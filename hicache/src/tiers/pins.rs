//! Objects that stay in host memory for a time, whatever else wants their room.

use super::Tiers;
use super::types::Tier;
use crate::object::{ObjectKey, Part};
use alloc::collections::{BTreeMap, BTreeSet};

/// How long a pin waits for an object that is not in host memory, in microseconds. Longer than a
/// prompt waits for its turn and is computed; a pin of what never comes does not keep others out
/// for the whole of its time.
pub(super) const WAIT_US: u64 = 10 * 60 * 1_000_000;

/// One pin.
#[derive(Clone, Copy, Debug)]
struct Pin {
    /// When it was wished to end.
    until_us: u64,
    /// When it ends: not later, and sooner while it waits for its object.
    ends_us: u64,
    /// The object has not been in host memory since it was pinned.
    waits: bool,
}

/// Until when objects are pinned.
#[derive(Debug)]
pub(super) struct Pins {
    all: BTreeMap<ObjectKey, Pin>,
    order: BTreeSet<(u64, ObjectKey)>,
    counts: [usize; 2],
    max: [usize; 2],
}

impl Pins {
    /// No pins, and room for so many of each part.
    pub(super) fn new(max: [usize; 2]) -> Self {
        Self { all: BTreeMap::new(), order: BTreeSet::new(), counts: [0; 2], max }
    }

    pub(super) fn has(&self, key: &ObjectKey) -> bool {
        self.all.contains_key(key)
    }

    /// Pins an object, or pins it for longer; false if there is no room for one more pin.
    fn add(&mut self, now_us: u64, key: ObjectKey, until_us: u64, is_here: bool) -> bool {
        let count = &mut self.counts[key.part.position()];
        let old = self.all.get(&key).copied();
        if old.is_none() {
            if *count >= self.max[key.part.position()] {
                return false;
            }
            *count += 1;
        }
        let until_us = old.map_or(until_us, |old| old.until_us.max(until_us));
        let waits = !is_here && old.is_none_or(|old| old.waits);
        let ends_us = if waits { until_us.min(now_us.saturating_add(WAIT_US)) } else { until_us };
        self.set(key, old, Pin { until_us, ends_us, waits });
        true
    }

    /// The object has a place in host memory: its pin, if it has one, lasts as long as was wished.
    pub(super) fn arrives(&mut self, key: &ObjectKey) {
        let Some(old) = self.all.get(key).copied() else { return };
        self.set(*key, Some(old), Pin { ends_us: old.until_us, waits: false, ..old });
    }

    fn set(&mut self, key: ObjectKey, old: Option<Pin>, pin: Pin) {
        if let Some(old) = old {
            self.order.remove(&(old.ends_us, key));
        }
        self.order.insert((pin.ends_us, key));
        self.all.insert(key, pin);
    }

    /// When the next pin ends.
    pub(super) fn due(&self) -> Option<u64> {
        self.order.first().map(|(ends, _)| *ends).filter(|ends| *ends != u64::MAX)
    }

    /// The next pin that has ended.
    fn pop_ended(&mut self, now_us: u64) -> Option<ObjectKey> {
        let (ends, key) = *self.order.first()?;
        if ends > now_us {
            return None;
        }
        self.order.pop_first();
        self.all.remove(&key);
        self.counts[key.part.position()] -= 1;
        Some(key)
    }

    pub(super) fn clear(&mut self) {
        self.all.clear();
        self.order.clear();
        self.counts = [0; 2];
    }
}

impl Tiers {
    /// Keeps an object in host memory until `until_us`, and for ever if that is [`u64::MAX`], from
    /// now on or from when it comes there; if it does not come within ten minutes, the pin is over.
    /// A pin that is there already is only made longer. False,
    /// and counted, if [`Limits::pins_max`](super::Limits::pins_max) objects are pinned; the object
    /// is then one like any other.
    ///
    /// A pin keeps nothing that turns out to be wrong, and ends with [`Tiers::flush_host`].
    pub fn pin(&mut self, now_us: u64, key: ObjectKey, until_us: u64) -> bool {
        self.now_us = self.now_us.max(now_us);
        if until_us <= self.now_us {
            return true;
        }
        let is_here = self.host.find(&key).is_some();
        let pinned = self.pins.add(self.now_us, key, until_us, is_here);
        if pinned {
            self.host.pin(&key);
        } else {
            self.counters[Tier::Host as usize].pins_refused += 1;
        }
        pinned
    }

    /// Pins there are, in the order of [`Part::ALL`].
    #[must_use]
    pub fn pins(&self) -> [u64; 2] {
        Part::ALL.map(|part| self.pins.counts[part.position()] as u64)
    }

    /// Ends the pins whose time is up.
    pub(super) fn end_pins(&mut self) {
        while let Some(key) = self.pins.pop_ended(self.now_us) {
            self.host.unpin(&key);
        }
    }
}
