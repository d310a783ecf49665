//! For tests of stores and of what is built on them: one suite for all stores, a store in memory
//! with faults, and places at which a process dies on demand.

mod config;
pub mod conformance;
mod mem;

pub use config::{FAILPOINT_VARIABLE, FAILPOINTS};
pub use mem::{Fault, MemStore};

/// Aborts the process if the environment names this place, see [`FAILPOINT_VARIABLE`].
pub fn failpoint(name: &str) {
    debug_assert!(FAILPOINTS.contains(&name), "{name} is not in the list of failpoints");
    if config::failpoint_wanted() == Some(name) {
        std::process::abort();
    }
}
