//! `cargo xtask ab`: the corruption lab over our own server.

use crate::sh;
use anyhow::{Context as _, Result, bail};

/// What the lab runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Plan {
    /// Twelve cells of the mini model, prompts of up to 8,000 tokens.
    Full,
    /// The same with fewer conversations and short prompts.
    Quick,
    /// Faults in the test build.
    Faults,
}

/// A word that only a program with faults has.
const TRACE: &[u8] = b"half_index_key";

/// Builds server and lab, and runs a plan; more arguments go to `ab run` or `ab faults`.
pub(crate) fn run(plan: Plan, more: &[String]) -> Result<()> {
    let mut build = sh::cargo();
    build.args(["build", "--release", "--locked", "-p", "server", "-p", "ab"]);
    if plan == Plan::Faults {
        // The library with the feature is another one: the program that is released stays as it is.
        build.args(["--features", "server/faults", "--bin", "server-faulty", "--bin", "ab"]);
    }
    sh::run(&mut build)?;
    let (task, file, out) = match plan {
        Plan::Full => ("run", "ab/plans/mini.toml", "target/ab"),
        Plan::Quick => ("run", "ab/plans/mini-quick.toml", "target/ab"),
        Plan::Faults => ("faults", "ab/plans/faults.toml", "target/ab-faults"),
    };
    let root = sh::root();
    if plan != Plan::Faults {
        let server = root.join("target/release/server");
        let bytes = std::fs::read(&server).with_context(|| format!("read {}", server.display()))?;
        if has_trace(&bytes) {
            bail!("{} was built with faults: it must not be released", server.display());
        }
    }
    let mut lab = sh::command(root.join("target/release/ab"));
    lab.current_dir(&root).args([task, file, "--out", out]).args(more);
    sh::run(&mut lab)
}

/// Whether a program knows faults.
fn has_trace(program: &[u8]) -> bool {
    program.windows(TRACE.len()).any(|bytes| bytes == TRACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_faults_is_told_from_one_without() {
        assert!(has_trace(b"..half_index_key.."));
        assert!(!has_trace(b"..half_index_ke") && !has_trace(b""));
    }
}
