//! The projects that the hand-off is measured beside: their wheels, in the target folder.

use crate::python;
use anyhow::{Context as _, Result};
use std::path::PathBuf;

/// Tell the bench which interpreter to use, and where the packages are.
pub(crate) const PYTHON_VARIABLE: &str = "DSV4_BENCH_PYTHON";
pub(crate) const PACKAGES_VARIABLE: &str = "DSV4_BENCH_PEERS";
/// What is installed, without what it asks for: torch, which a transfer does not need.
const WHEELS: [&str; 3] =
    ["nixl-cu13==1.5.1", "mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy==2.4.6"];

/// The interpreter and the folder of the packages, which are fetched if they are not there or out
/// of date.
pub(crate) fn ensure() -> Result<(PathBuf, PathBuf)> {
    let python = python::ensure()?;
    let folder = python::install(&python, "peers", &WHEELS)
        .context("fetch NIXL and Mooncake (--no-peers leaves them out)")?;
    Ok((python, folder))
}
