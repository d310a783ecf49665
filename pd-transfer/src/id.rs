//! Names for moments, peers and operations that never leave the process.

use core::fmt;

/// A moment in microseconds since an arbitrary start; always passed in, never read from a clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

impl Time {
    /// The moment `micros` later; saturates at the end of time.
    #[must_use]
    pub const fn after(self, micros: u64) -> Self {
        Self(self.0.saturating_add(micros))
    }

    /// Microseconds since `earlier`, zero if `earlier` is in the future.
    #[must_use]
    pub const fn since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// One link to a peer. A reconnect gets a new value; values are not reused in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PeerId(pub u64);

/// One get or verification, unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OpId(pub u64);

impl fmt::Display for PeerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "peer {}", self.0)
    }
}

impl fmt::Display for OpId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "op {}", self.0)
    }
}
