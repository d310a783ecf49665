//! An S3 server for the tests of the remote store: moto, in a Python environment of its own in the
//! target folder.

use crate::{python, sh};
use anyhow::{Result, bail};
use std::path::PathBuf;

/// Tells the tests which program is the server.
pub(crate) const VARIABLE: &str = "DSV4_MOTO_SERVER";
/// What is installed, with its version.
const PACKAGE: &str = "moto[server]==5.2.5";

/// The server: `DSV4_MOTO_SERVER` if set, otherwise that of the environment, which is made if it is
/// not there or out of date.
pub(crate) fn ensure() -> Result<PathBuf> {
    if let Some(path) = sh::named_by(VARIABLE)? {
        return Ok(path);
    }
    let server = python::environment("moto", &[PACKAGE])?.join("bin/moto_server");
    if !sh::succeeds(sh::command(&server).arg("--help")) {
        bail!("{} does not run: remove target/moto", server.display());
    }
    Ok(server)
}
