//! Integration tests of kv-pool, one module per subject.
#![forbid(unsafe_code)]

// Marked as tests so that the lint for `unwrap` knows them.
#[cfg(test)]
#[path = "main/common.rs"]
mod common;
#[cfg(test)]
#[path = "main/digests.rs"]
mod digests;
#[cfg(test)]
#[path = "main/plans.rs"]
mod plans;
#[cfg(test)]
#[path = "main/pools.rs"]
mod pools;
#[cfg(test)]
#[path = "main/states.rs"]
mod states;
#[cfg(test)]
#[path = "main/vectors.rs"]
mod vectors;
