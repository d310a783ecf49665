//! UCX for the tests of its transport: a wheel, which has headers too, in the target folder; and on
//! a CI machine Debian's older library, which does not understand the wheel's.

use crate::{debian, python, sh};
use anyhow::{Result, bail};
use std::path::PathBuf;

/// Tells the tests, as it tells the transport, which library to open.
pub(crate) const VARIABLE: &str = "DSV4_UCX_LIB";
/// What is installed, with its version.
const WHEEL: &str = "libucx-cu13==1.22.0";
/// Where the wheel has the library.
const LIBRARY: &str = "libucx/lib/libucp.so.0";

/// The library: `DSV4_UCX_LIB` if set, otherwise that of the wheel, which is fetched if it is not
/// there or out of date.
pub(crate) fn ensure() -> Result<PathBuf> {
    if let Some(path) = sh::named_by(VARIABLE)? {
        return Ok(path);
    }
    let library = python::install(&python::ensure()?, "ucx", &[WHEEL])?.join(LIBRARY);
    if !library.exists() {
        bail!("{} is not there: remove target/ucx", library.display());
    }
    second_version();
    Ok(library)
}

/// Only a CI machine is ours to change. Without the second library one test has nothing to do.
fn second_version() {
    let loaded = sh::output(sh::command("ldconfig").arg("-p")).unwrap_or_default();
    if !sh::is_ci() || loaded.contains("libucp.so.0") {
        return;
    }
    if let Err(error) = debian::install(&["libucx0"]) {
        println!("only one version of UCX is tested: {error:#}");
    }
}
