//! Benches: run them, keep a record, compare two records.
//!
//! A bench prints lines `figure NAME VALUE UNIT`; those are what a record holds.

mod machine;
mod record;

use crate::metadata::{self, Package, Target};
use crate::sh::{self, Watch};
use crate::{cpu_peers, peers, ucx};
use anyhow::{Context as _, Result, bail};
pub(crate) use record::compare;
use record::{Figure, Record};
use std::process::Command;

/// Features that ask for something which not every machine has.
const NOT_EVERYWHERE: [&str; 2] = ["cuda", "ucx"];

/// Which benches to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Suite {
    /// Cache tiers: restores beside plain copies and reads, lookups, pauses, and what requests see.
    Cache,
    /// Speed, memory and start of the engine.
    Engine,
    /// Operations of dsa-kernels.
    Kernels,
    /// Pool, digests, plans.
    KvPool,
    /// Plans of the scheduler and streams through HTTP, without a model; sessions beyond what may
    /// wait, and tokens while long prompts arrive.
    Serving,
    /// Hand-off between two processes over each transport, from request to verified page, beside
    /// NIXL and Mooncake; and what the transports do alone.
    Transfer,
    /// The transports alone.
    PdTransfer,
    /// Forward pass.
    Model,
    /// The prefix tree.
    Hicache,
    /// Every bench that this machine can run.
    All,
}

impl Suite {
    /// Crate whose benches make up the suite; `None` for all crates.
    fn package(self) -> Option<&'static str> {
        match self {
            Self::Cache | Self::Engine | Self::Serving => Some("server"),
            Self::Kernels => Some("dsa-kernels"),
            Self::KvPool => Some("kv-pool"),
            Self::PdTransfer => Some("pd-transfer"),
            Self::Model => Some("dsv4-model"),
            Self::Hicache => Some("hicache"),
            Self::Transfer | Self::All => None,
        }
    }

    /// Whether a bench target of its crates belongs to it.
    fn has(self, target: &str) -> bool {
        match self {
            Self::Cache => target == "cache",
            Self::Engine => target == "engine",
            Self::Serving => matches!(target, "serving" | "overload"),
            Self::Transfer => target == "transfer",
            _ => target != "load", // that run belongs to the tests
        }
    }
}

/// How much of the suites transfer and engine runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// The suite transfer with NIXL and Mooncake.
    pub(crate) has_peers: bool,
    /// The suite engine with llama.cpp and transformers.
    pub(crate) has_engine_peers: bool,
    /// Only whether it works.
    pub(crate) is_quick: bool,
}

/// Whether a bench compares with other projects.
fn compares(package: &Package, target: &Target) -> bool {
    (package.name.as_str(), target.name.as_str()) == ("server", "transfer")
}

/// The bench that can be set beside other engines.
fn is_engine(package: &Package, target: &Target) -> bool {
    (package.name.as_str(), target.name.as_str()) == ("server", "engine")
}

/// Fetches what the comparison with other projects needs, and hands it over.
fn equip(command: &mut Command, extent: Extent) -> Result<()> {
    command.env(ucx::VARIABLE, ucx::ensure()?);
    if extent.has_peers {
        let (python, packages) = peers::ensure()?;
        command.env(peers::PYTHON_VARIABLE, python).env(peers::PACKAGES_VARIABLE, packages);
    }
    Ok(())
}

/// Runs the benches of `suite`, writes a record and prints all figures once more.
pub(crate) fn run(suite: Suite, extent: Extent) -> Result<()> {
    if extent.is_quick && suite != Suite::Transfer {
        bail!("--quick is for the suite transfer");
    }
    if extent.has_engine_peers && suite != Suite::Engine {
        bail!("--peers is for the suite engine");
    }
    let packages = metadata::packages()?;
    let mut figures = Vec::new();
    let mut failed = Vec::new();
    let mut runs = 0;
    for (package, target) in benches(&packages, suite) {
        let needs = |feature: &&String| NOT_EVERYWHERE.contains(&feature.as_str());
        if let Some(feature) = target.required_features.iter().find(needs) {
            println!("{} {} is left out: it needs {feature}", package.name, target.name);
            continue;
        }
        runs += 1;
        let mut command = sh::cargo();
        command.args(["bench", "-p", &package.name, "--bench", &target.name]);
        if !target.required_features.is_empty() {
            command.args(["--features", &target.required_features.join(",")]);
        }
        command.arg("--");
        if extent.is_quick {
            command.arg("--quick");
        }
        if compares(package, target) {
            equip(&mut command, extent)?;
            if !extent.has_peers {
                command.arg("--no-peers");
            }
        }
        if extent.has_engine_peers && is_engine(package, target) {
            command.env(cpu_peers::VARIABLE, cpu_peers::ensure()?);
        }
        let ok = sh::run_watched(&mut command, Watch::Stdout, &mut |line| {
            figures.extend(Figure::parse(line));
        })?;
        if !ok {
            failed.push(format!("{} {}", package.name, target.name));
        }
    }
    if runs == 0 {
        bail!("there is no such bench");
    }
    if !extent.is_quick {
        let record = Record::now(figures)?;
        let path = record.write()?;
        println!("\nrecord {}", path.display());
        for figure in &record.figures {
            println!("{figure}");
        }
    }
    if !failed.is_empty() {
        bail!("benches failed: {}", failed.join(", "));
    }
    Ok(())
}

/// The bench that [`smoke`] runs.
pub(crate) const SMOKE: &str = "transfer";

/// Sees in a debug build whether the suite transfer works, as `cargo xtask ci` does: the same
/// features as the tests, so that nothing is built again, and without NIXL and Mooncake, which are
/// half a gigabyte.
pub(crate) fn smoke() -> Result<()> {
    let mut command = sh::cargo();
    command.args(["test", "--workspace", "--all-features", "--locked", "--bench", SMOKE]);
    command.args(["--", "--quick", "--no-peers"]);
    command.env(ucx::VARIABLE, ucx::ensure()?);
    sh::run(&mut command)
}

/// Bench targets of a suite.
fn benches(packages: &[Package], suite: Suite) -> Vec<(&Package, &Target)> {
    let wanted = |package: &&Package| suite.package().is_none_or(|name| package.name == name);
    let mut benches = Vec::new();
    for package in packages.iter().filter(wanted) {
        let targets = package.targets_of("bench").filter(|target| suite.has(&target.name));
        benches.extend(targets.map(|target| (package, target)));
    }
    benches
}

/// Commit of the tree, with `-dirty` where files differ from it.
fn commit() -> Result<String> {
    let mut git = sh::command("git");
    git.args(["rev-parse", "--short=12", "HEAD"]);
    let Ok(hash) = sh::output(&mut git) else { return Ok("uncommitted".to_owned()) };
    let mut git = sh::command("git");
    git.args(["status", "--porcelain", "--untracked-files=no"]);
    let changes = sh::output(&mut git).context("ask git for changes")?;
    let dirty = if changes.trim().is_empty() { "" } else { "-dirty" };
    Ok(format!("{}{dirty}", hash.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suite_names_a_crate_of_the_workspace() {
        use clap::ValueEnum as _;
        let packages = metadata::packages().unwrap();
        for suite in Suite::value_variants() {
            if let Some(name) = suite.package() {
                assert!(packages.iter().any(|package| package.name == name), "{name}");
            }
        }
    }

    #[test]
    fn suites_of_one_crate_are_kept_apart() {
        let packages = metadata::packages().unwrap();
        let of = |suite| -> Vec<(String, String)> {
            let found = benches(&packages, suite);
            found.iter().map(|(p, t)| (p.name.clone(), t.name.clone())).collect()
        };
        let pair = |package: &str, target: &str| (package.to_owned(), target.to_owned());
        assert_eq!(of(Suite::Engine), [pair("server", "engine")]);
        assert_eq!(of(Suite::Cache), [pair("server", "cache")]);
        let mut transfer = of(Suite::Transfer);
        transfer.sort();
        assert_eq!(transfer, [pair("pd-transfer", "transfer"), pair("server", "transfer")]);
    }

    #[test]
    fn one_bench_compares_with_other_projects() {
        let packages = metadata::packages().unwrap();
        let all = benches(&packages, Suite::All);
        assert_eq!(all.iter().filter(|(package, target)| compares(package, target)).count(), 1);
    }

    #[test]
    fn only_the_suite_transfer_is_ever_quick() {
        let quick = Extent { has_peers: false, has_engine_peers: false, is_quick: true };
        assert!(run(Suite::Engine, quick).is_err());
    }

    #[test]
    fn only_the_suite_engine_has_other_engines_beside_it() {
        let beside = Extent { has_peers: false, has_engine_peers: true, is_quick: false };
        assert!(run(Suite::Model, beside).is_err());
        let packages = metadata::packages().unwrap();
        let all = benches(&packages, Suite::All);
        assert_eq!(all.iter().filter(|(package, target)| is_engine(package, target)).count(), 1);
    }

    #[test]
    fn the_load_run_is_no_bench() {
        let packages = metadata::packages().unwrap();
        assert!(benches(&packages, Suite::All).iter().all(|(_, target)| target.name != "load"));
    }
}
