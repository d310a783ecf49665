//! The git hook that looks at a commit before it is made.

use crate::{sh, tidy};
use anyhow::{Context as _, Result};
use std::path::PathBuf;

/// What the hook does; everything slower belongs to CI.
const SCRIPT: &str =
    "#!/bin/sh\n# Installed by `cargo xtask hooks`.\nexec cargo xtask pre-commit\n";

/// Installs the hook.
pub(crate) fn install() -> Result<()> {
    let mut git = sh::command("git");
    git.args(["rev-parse", "--git-path", "hooks/pre-commit"]);
    let path: PathBuf = sh::root().join(sh::output(&mut git)?.trim());
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).context("create the folder of hooks")?;
    }
    std::fs::write(&path, SCRIPT).with_context(|| format!("write {}", path.display()))?;
    sh::run(sh::command("chmod").arg("+x").arg(&path))
}

/// What the hook runs: formatting and text rules, on what is staged.
pub(crate) fn pre_commit() -> Result<()> {
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))?;
    tidy::run_staged()
}
