//! The serving engine: workers, scheduler, HTTP, router, and the adapters between the crates.

pub mod audit;
pub mod cache_command;
pub mod clock;
pub mod config;
pub mod engine;
pub mod evidence;
#[cfg(feature = "faults")]
pub mod faults;
pub mod glue;
pub mod grammar;
pub mod http;
pub mod journey;
pub mod net;
pub mod node;
pub mod router;
pub mod scheduler;
pub mod trace;
pub mod verify_command;
pub mod worker;
