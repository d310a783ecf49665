//! The only reader of the system clock.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Monotonic time since the process started measuring.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// A clock that reads zero now.
    #[must_use]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Time since [`Self::start`].
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}

/// Unix time in seconds.
#[must_use]
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// Time by which ages of files are measured.
#[must_use]
pub fn wall_time() -> SystemTime {
    SystemTime::now()
}
