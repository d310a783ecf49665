//! What the cache asks of the network: clients with threads of their own behind blocking calls.

mod config;
pub mod object_store;

pub use config::{BadObjectUrl, ObjectUrl};
