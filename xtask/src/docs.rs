//! The documentation of all crates, with warnings as errors.

use crate::sh;
use anyhow::Result;

/// Builds it; a broken link between items is an error.
pub(crate) fn run() -> Result<()> {
    sh::run(
        sh::cargo()
            .args(["doc", "--workspace", "--all-features", "--no-deps", "--locked"])
            .env("RUSTDOCFLAGS", "-D warnings"),
    )
}
