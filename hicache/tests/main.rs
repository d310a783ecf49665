//! Integration tests of hicache, one module per subject.
#![forbid(unsafe_code)]

// Marked as tests so that the lint for `unwrap` knows them.
#[cfg(test)]
#[path = "main/common.rs"]
mod common;
#[cfg(test)]
#[path = "main/props.rs"]
mod props;
#[cfg(test)]
#[path = "main/scenarios.rs"]
mod scenarios;
#[cfg(test)]
#[path = "main/tiers.rs"]
mod tiers;
