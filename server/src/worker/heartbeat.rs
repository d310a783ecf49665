//! Signs of life of a worker's thread.

use crate::clock::Clock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// When a thread last went round its loop.
#[derive(Debug)]
pub struct Heartbeat {
    clock: Clock,
    /// Microseconds on `clock`.
    last_us: AtomicU64,
}

impl Default for Heartbeat {
    /// One that has just beaten.
    fn default() -> Self {
        Self { clock: Clock::start(), last_us: AtomicU64::new(0) }
    }
}

impl Heartbeat {
    /// The thread goes round.
    pub fn beat(&self) {
        self.last_us.store(self.now_us(), Ordering::Relaxed);
    }

    /// Time since it last did.
    #[must_use]
    pub fn age(&self) -> Duration {
        Duration::from_micros(self.now_us().saturating_sub(self.last_us.load(Ordering::Relaxed)))
    }

    fn now_us(&self) -> u64 {
        self.clock.elapsed().as_micros().try_into().unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_age_is_that_of_the_last_beat() {
        let heart = Heartbeat::default();
        while heart.age() < Duration::from_millis(2) {}
        let clock = Clock::start();
        assert!(heart.age() > clock.elapsed(), "it has not beaten since");
        heart.beat();
        // Both ends are cut to microseconds.
        assert!(heart.age() <= clock.elapsed() + Duration::from_micros(1));
    }
}
