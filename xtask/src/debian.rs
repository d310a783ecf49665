//! Packages of Debian on machines that are ours to change: those of CI.

use crate::sh;
use anyhow::Result;

/// True where packages may be installed: in CI, where there is apt-get.
pub(crate) fn may_install() -> bool {
    sh::is_ci() && sh::succeeds(sh::command("apt-get").arg("--version"))
}

/// Installs packages and what they need.
pub(crate) fn install(packages: &[&str]) -> Result<()> {
    sh::run(sh::command("apt-get").args(["-q", "update"]))?;
    let mut install = sh::command("apt-get");
    install.env("DEBIAN_FRONTEND", "noninteractive");
    sh::run(install.args(["-qy", "install", "--no-install-recommends"]).args(packages))
}
