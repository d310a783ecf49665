//! Objects that stay in host memory for a time, whatever else wants their room.

use super::Tiers;
use super::types::Tier;
use crate::object::{ObjectKey, Part};
use alloc::collections::{BTreeMap, BTreeSet};

/// Until when which objects are pinned. They need not be in host memory.
#[derive(Debug)]
pub(super) struct Pins {
    until: BTreeMap<ObjectKey, u64>,
    order: BTreeSet<(u64, ObjectKey)>,
    counts: [usize; 2],
    max: [usize; 2],
}

impl Pins {
    /// No pins, and room for so many of each part.
    pub(super) fn new(max: [usize; 2]) -> Self {
        Self { until: BTreeMap::new(), order: BTreeSet::new(), counts: [0; 2], max }
    }

    pub(super) fn has(&self, key: &ObjectKey) -> bool {
        self.until.contains_key(key)
    }

    /// Pins an object, or pins it for longer; false if there is no room for one more pin.
    fn add(&mut self, key: ObjectKey, until_us: u64) -> bool {
        if let Some(until) = self.until.get_mut(&key) {
            if *until < until_us {
                self.order.remove(&(*until, key));
                self.order.insert((until_us, key));
                *until = until_us;
            }
            return true;
        }
        let count = &mut self.counts[key.part.position()];
        if *count >= self.max[key.part.position()] {
            return false;
        }
        *count += 1;
        self.until.insert(key, until_us);
        self.order.insert((until_us, key));
        true
    }

    /// When the next pin ends.
    pub(super) fn due(&self) -> Option<u64> {
        self.order.first().map(|(until, _)| *until).filter(|until| *until != u64::MAX)
    }

    /// The next pin that has ended.
    fn pop_ended(&mut self, now_us: u64) -> Option<ObjectKey> {
        let (until, key) = *self.order.first()?;
        if until > now_us {
            return None;
        }
        self.order.pop_first();
        self.until.remove(&key);
        self.counts[key.part.position()] -= 1;
        Some(key)
    }

    pub(super) fn clear(&mut self) {
        self.until.clear();
        self.order.clear();
        self.counts = [0; 2];
    }
}

impl Tiers {
    /// Keeps an object in host memory until `until_us`, and for ever if that is [`u64::MAX`], from
    /// now on or from when it comes there. A pin that is there already is only made longer. False,
    /// and counted, if [`Limits::pins_max`](super::Limits::pins_max) objects are pinned; the object
    /// is then one like any other.
    ///
    /// A pin keeps nothing that turns out to be wrong, and ends with [`Tiers::flush_host`].
    pub fn pin(&mut self, now_us: u64, key: ObjectKey, until_us: u64) -> bool {
        self.now_us = self.now_us.max(now_us);
        if until_us <= self.now_us {
            return true;
        }
        let pinned = self.pins.add(key, until_us);
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
