//! Integration tests of hicache, one module per subject.
#![forbid(unsafe_code)]

// Marked as tests so that the lint for `unwrap` knows them.
#[cfg(test)]
#[path = "main/common.rs"]
mod common;
#[cfg(feature = "testing")]
#[cfg(test)]
#[path = "main/conformance.rs"]
mod conformance;
#[cfg(feature = "testing")]
#[cfg(test)]
#[path = "main/crash.rs"]
mod crash;
#[cfg(feature = "testing")]
#[cfg(test)]
#[path = "main/files.rs"]
mod files;
#[cfg(feature = "testing")]
#[cfg(test)]
#[path = "main/folder.rs"]
mod folder;
#[cfg(feature = "testing")]
#[cfg(test)]
#[path = "main/format_cases.rs"]
mod format_cases;
#[cfg(test)]
#[path = "main/golden.rs"]
mod golden;
#[cfg(test)]
#[path = "main/properties.rs"]
mod properties;
#[cfg(test)]
#[path = "main/props.rs"]
mod props;
#[cfg(test)]
#[path = "main/scenarios.rs"]
mod scenarios;
#[cfg(test)]
#[path = "main/tiers.rs"]
mod tiers;
#[cfg(test)]
#[path = "main/tiers_cases.rs"]
mod tiers_cases;
