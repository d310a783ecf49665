//! What went wrong in hand-offs and what followed, counted by event, peer, transport and kind.

use std::collections::BTreeMap;

/// One thing that happened to a hand-off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FaultEvent {
    /// A page arrived without its tag.
    Mismatch,
    /// A page changed at its owner while it was read.
    Stale,
    /// A page was given up while a read could still write it, and kept from others until none could.
    HeldBack,
    /// Target pages were set aside.
    Quarantine,
    /// They were asked for again into fresh pages.
    Retry,
    /// A hand-off ended without its pages.
    Failed,
    /// The prompt was asked of another prefill worker.
    AskedAgain,
    /// The prompt was computed here.
    Recompute,
    /// The client got an error.
    Error,
}

impl FaultEvent {
    /// Its label in the metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mismatch => "mismatch",
            Self::Stale => "stale",
            Self::HeldBack => "held_back",
            Self::Quarantine => "quarantine",
            Self::Retry => "retry",
            Self::Failed => "failed",
            Self::AskedAgain => "asked_again",
            Self::Recompute => "recompute",
            Self::Error => "error",
        }
    }
}

/// The prefill worker of a hand-off, for people.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerName {
    /// Where it is.
    pub address: String,
    /// How its pages travel.
    pub transport: &'static str,
}

/// Counted faults.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Faults(BTreeMap<(FaultEvent, PeerName, &'static str), u64>);

/// Most combinations that are counted apart; a peer beyond is counted under [`OTHERS`].
const COMBINATIONS_MAX: usize = 1024;
/// The address of all peers that are not counted apart.
pub const OTHERS: &str = "others";

impl Faults {
    /// Counts an event; `kind` is the name of a cache or pool, or of a reason.
    pub fn count(&mut self, event: FaultEvent, peer: &PeerName, kind: &'static str) {
        let mut key = (event, peer.clone(), kind);
        if self.0.len() >= COMBINATIONS_MAX && !self.0.contains_key(&key) {
            OTHERS.clone_into(&mut key.1.address);
        }
        *self.0.entry(key).or_default() += 1;
    }

    /// All of them in a fixed order.
    pub fn iter(&self) -> impl Iterator<Item = (FaultEvent, &PeerName, &'static str, u64)> {
        self.0.iter().map(|((event, peer, kind), count)| (*event, peer, *kind, *count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_counted_apart_up_to_a_bound() {
        let mut faults = Faults::default();
        let peer = |n: usize| PeerName { address: format!("10.0.0.{n}:1"), transport: "tcp" };
        for n in 0..2 * COMBINATIONS_MAX {
            faults.count(FaultEvent::Stale, &peer(n), "c4_kv");
            faults.count(FaultEvent::Stale, &peer(0), "c4_kv");
        }
        let count = |address: &str| {
            let found = faults.iter().find(|(_, peer, ..)| peer.address == address);
            found.map_or(0, |(.., count)| count)
        };
        assert_eq!(count("10.0.0.0:1"), 1 + 2 * COMBINATIONS_MAX as u64);
        assert_eq!(count("10.0.0.7:1"), 1);
        assert_eq!(count(OTHERS), COMBINATIONS_MAX as u64);
        assert_eq!(faults.iter().count(), COMBINATIONS_MAX + 1);
    }
}
