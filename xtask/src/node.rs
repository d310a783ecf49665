//! Node packages of the end-to-end tests, below the target folder: OpenAI's client, and others by name.

use crate::sh;
use anyhow::{Context as _, Result, bail};
use std::path::PathBuf;

/// Tells the tests which folder has the package.
pub(crate) const VARIABLE: &str = "DSV4_TEST_NODE";
/// What is installed, with its version.
const PACKAGE: &str = "openai@7.59.0";

/// True where Node and its package manager work.
pub(crate) fn is_installed() -> bool {
    sh::succeeds(sh::command("node").arg("--version"))
        && sh::succeeds(sh::command("npm").arg("--version"))
}

/// The folder with `node_modules`: `DSV4_TEST_NODE` if set, otherwise one that is made if it is not
/// there or out of date.
pub(crate) fn ensure() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(VARIABLE).filter(|path| !path.is_empty()) {
        let path = PathBuf::from(path);
        if !path.join("node_modules/openai").exists() {
            bail!("{VARIABLE} is {}, which has no node_modules/openai", path.display());
        }
        return Ok(path);
    }
    install("node", PACKAGE)
}

/// Installs a package to a folder of its own below the target folder, if it is not there or out of
/// date; gives the folder. No script of the package runs.
pub(crate) fn install(name: &str, package: &str) -> Result<PathBuf> {
    let folder = sh::root().join("target").join(name);
    let stamp = folder.join("package.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|have| have == package) {
        return Ok(folder);
    }
    std::fs::create_dir_all(&folder).with_context(|| format!("make {}", folder.display()))?;
    let mut npm = sh::command("npm");
    npm.args(["install", "--no-save", "--no-audit", "--no-fund", "--ignore-scripts"]);
    npm.args(["--loglevel", "error", "--prefix"]).arg(&folder).arg(package);
    sh::run(&mut npm)?;
    std::fs::write(&stamp, package).with_context(|| format!("write the stamp of {package}"))?;
    Ok(folder)
}
