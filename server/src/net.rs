//! What the cache asks of the network and tells it: clients and publishers with threads of their own
//! behind calls that block or drop.

mod bounded;
mod config;
pub mod kv_events;
pub mod object_store;

pub use config::{BadObjectUrl, ObjectUrl};
