//! The browser of the page's tests: Debian's Chromium, and the Node package that drives it, below the
//! target folder.

use crate::{debian, node, sh};
use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Tells the tests which program is the browser.
const PROGRAM_VARIABLE: &str = "DSV4_TEST_BROWSER";
/// Tells the tests which folder has `node_modules` with the package that drives it.
const DRIVER_VARIABLE: &str = "DSV4_TEST_PLAYWRIGHT";
/// The package that has the browser.
const PACKAGE: &str = "chromium";
/// Where that package has it.
const PROGRAM: &str = "/usr/bin/chromium";
/// What drives it, with its version. It brings no browser of its own.
const DRIVER: &str = "playwright-core@1.65.1";

/// A browser and what drives it.
#[derive(Debug)]
pub(crate) struct Browser {
    program: PathBuf,
    driver: PathBuf,
}

impl Browser {
    /// Tells a command of both.
    pub(crate) fn equip(&self, command: &mut Command) {
        command.env(PROGRAM_VARIABLE, &self.program).env(DRIVER_VARIABLE, &self.driver);
    }
}

/// The browser: `DSV4_TEST_BROWSER` if set, otherwise Debian's, which a CI machine installs; and its
/// driver: `DSV4_TEST_PLAYWRIGHT` if set, otherwise one that is fetched if it is not there.
pub(crate) fn ensure() -> Result<Browser> {
    Ok(Browser { program: program()?, driver: driver()? })
}

fn program() -> Result<PathBuf> {
    if let Some(path) = sh::named_by(PROGRAM_VARIABLE)? {
        return Ok(path);
    }
    let program = Path::new(PROGRAM);
    if !program.exists() && debian::may_install() {
        debian::install(&[PACKAGE]).context("install a browser")?;
    }
    if !program.exists() {
        bail!("there is no {PROGRAM}: install Debian's {PACKAGE}, or set {PROGRAM_VARIABLE}");
    }
    Ok(program.to_owned())
}

fn driver() -> Result<PathBuf> {
    if let Some(path) = sh::named_by(DRIVER_VARIABLE)? {
        if !path.join("node_modules/playwright-core").exists() {
            bail!("{DRIVER_VARIABLE} is {}, which has no playwright-core", path.display());
        }
        return Ok(path);
    }
    if !node::is_installed() && debian::may_install() {
        debian::install(&["nodejs", "npm"]).context("install Node")?;
    }
    if !node::is_installed() {
        bail!("there is no node with npm");
    }
    node::install("playwright", DRIVER)
}
