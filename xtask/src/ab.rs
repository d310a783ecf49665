//! `cargo xtask ab`: the corruption lab over our own server.

use crate::sh;
use anyhow::Result;

/// Builds server and lab, and runs the plan of the mini model; with `quick` with fewer conversations.
/// More arguments go to `ab run`.
pub(crate) fn run(quick: bool, more: &[String]) -> Result<()> {
    sh::run(sh::cargo().args(["build", "--release", "--locked", "-p", "server", "-p", "ab"]))?;
    let plan = if quick { "ab/plans/mini-quick.toml" } else { "ab/plans/mini.toml" };
    let root = sh::root();
    let mut lab = sh::command(root.join("target/release/ab"));
    lab.current_dir(&root).args(["run", plan, "--out", "target/ab"]).args(more);
    sh::run(&mut lab)
}
