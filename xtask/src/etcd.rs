//! etcd for the tests of discovery: Debian's package, unpacked in the target folder. Nothing is
//! installed, and no service is started.

use crate::sh;
use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};

/// Tells the tests which program is etcd.
pub(crate) const VARIABLE: &str = "DSV4_ETCD";
/// The package that has it.
const PACKAGE: &str = "etcd-server";
/// Where the package has it.
const PROGRAM: &str = "usr/bin/etcd";

/// The program: `DSV4_ETCD` if set, otherwise that of the package, which is fetched if it is not
/// there.
pub(crate) fn ensure() -> Result<PathBuf> {
    if let Some(path) = sh::named_by(VARIABLE)? {
        return Ok(path);
    }
    let folder = sh::root().join("target/etcd");
    let program = folder.join("root").join(PROGRAM);
    if !program.exists() {
        fetch(&folder)?;
    }
    if !sh::succeeds(sh::command(&program).arg("--version")) {
        bail!("{} does not run: remove target/etcd", program.display());
    }
    Ok(program)
}

fn fetch(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    let download =
        || sh::run(sh::command("apt-get").args(["-q", "download", PACKAGE]).current_dir(folder));
    if download().is_err() {
        // Its version may have changed since the lists of packages were read.
        sh::run(sh::command("apt-get").args(["-q", "update"]))?;
        download()?;
    }
    let files = std::fs::read_dir(folder).with_context(|| format!("list {}", folder.display()))?;
    let packages = files.filter_map(|file| Some(file.ok()?.path()));
    let package = packages
        .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .max()
        .with_context(|| format!("apt-get left no package in {}", folder.display()))?;
    sh::run(sh::command("dpkg-deb").arg("-x").arg(package).arg(folder.join("root")))
}
