//! The beginnings of prompts that were sent to one worker: a bounded set of chained hashes.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

#[derive(Debug)]
struct Seen {
    /// Number of the touch that was the last.
    stamp: u64,
    /// When that was.
    at: Duration,
}

/// Hashes that were sent, the least recently sent first. A hash stands for the whole prompt up to
/// its block, so a beginning is here as far as its hashes are.
///
/// No hash is here without those before it: they are touched from the last to the first, so the
/// end of a beginning is always the first to go.
#[derive(Debug)]
pub(super) struct Index {
    known: HashMap<u64, Seen>,
    /// Touches in order; those that were not the last of their hash are passed over.
    touches: VecDeque<(u64, u64)>,
    stamp: u64,
    max: usize,
}

impl Index {
    /// At most `max` hashes.
    pub(super) fn new(max: usize) -> Self {
        Self { known: HashMap::new(), touches: VecDeque::new(), stamp: 0, max }
    }

    pub(super) fn len(&self) -> usize {
        self.known.len()
    }

    pub(super) fn clear(&mut self) {
        self.known.clear();
        self.touches.clear();
    }

    /// How many hashes at the beginning of a chain are here and not too old.
    pub(super) fn overlap(&self, chain: &[u64], now: Duration, ttl: Duration) -> u32 {
        let is_here = |hash: &&u64| {
            self.known.get(hash).is_some_and(|seen| now.saturating_sub(seen.at) < ttl)
        };
        // A chain has at most `BLOCKS_MAX` hashes.
        chain.iter().take_while(is_here).count() as u32
    }

    /// Takes note of a chain, as far as there may be as many hashes.
    pub(super) fn insert(&mut self, chain: &[u64], now: Duration, ttl: Duration) {
        for &hash in chain.iter().take(self.max).rev() {
            self.stamp += 1;
            self.known.insert(hash, Seen { stamp: self.stamp, at: now });
            self.touches.push_back((self.stamp, hash));
        }
        while let Some(&(stamp, hash)) = self.touches.front() {
            let seen = self.known.get(&hash).filter(|seen| seen.stamp == stamp);
            let is_old = seen.is_some_and(|seen| now.saturating_sub(seen.at) >= ttl);
            if seen.is_some() {
                if !is_old && self.known.len() <= self.max {
                    break;
                }
                self.known.remove(&hash);
            }
            self.touches.pop_front();
        }
        // Touches that a later one has made void are cleared away once they are the most.
        if self.touches.len() > 2 * self.max {
            let known = &self.known;
            let is_last =
                |(stamp, hash): &(u64, u64)| known.get(hash).is_some_and(|s| s.stamp == *stamp);
            self.touches.retain(is_last);
        }
    }

    /// Forgets hashes: the end of a chain.
    pub(super) fn remove(&mut self, end: &[u64]) {
        for hash in end {
            self.known.remove(hash);
        }
    }

    /// Touches that are kept.
    #[cfg(test)]
    pub(super) fn touches(&self) -> usize {
        self.touches.len()
    }
}
