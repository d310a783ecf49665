//! What `.ci/run` does, in order and with times.

use crate::test::{Layer, Numbers, Runner};
use crate::{
    bench, browser, docs, etcd, external, fences, kernels, moto, python, sh, test, tidy, ucx,
    versions,
};
use anyhow::{Context as _, Result};
use std::time::Instant;

/// A step with its name.
type Step = (&'static str, fn() -> Result<()>);

/// Steps in order: what fails fast first, the tests last, so that the closing line of the test
/// runner is the last output.
const STEPS: [Step; 18] = [
    ("fmt", fmt),
    ("tidy", tidy::run),
    ("fences", fences::run),
    ("versions", versions::check),
    ("clippy", clippy),
    ("each crate alone", each_crate_alone),
    ("docs", docs::run),
    ("python", || python::ensure().map(drop)),
    ("ucx", || ucx::ensure().map(drop)),
    ("moto", || moto::ensure().map(drop)),
    ("etcd", || etcd::ensure().map(drop)),
    ("browser", || browser::ensure().map(drop)),
    ("kernels", kernels::check),
    ("build", build),
    ("external", external::run),
    ("bench", bench::smoke),
    ("loom", || test::run(Layer::Loom, Numbers::default(), Runner::Cargo)),
    ("test", tests),
];

/// Runs every step; the first that fails ends the run.
pub(crate) fn run() -> Result<()> {
    let started = Instant::now();
    for (name, step) in STEPS {
        println!("\n== {name} ({:.0} s so far)", started.elapsed().as_secs_f64());
        step().with_context(|| format!("step {name}"))?;
    }
    Ok(())
}

/// `cargo xtask check`: everything but docs, builds and tests, and each crate alone.
pub(crate) fn check() -> Result<()> {
    fmt()?;
    tidy::run()?;
    fences::run()?;
    versions::check()?;
    clippy()?;
    each_crate_alone()
}

fn fmt() -> Result<()> {
    sh::run(sh::cargo().args(["fmt", "--all", "--check"]))?;
    sh::run(sh::cargo().args(["fmt", "--check", "--manifest-path", test::LOOM]))
}

fn clippy() -> Result<()> {
    let mut command = sh::cargo();
    command.args(["clippy", "--workspace", "--all-targets", "--all-features", "--locked"]);
    command.args(["--", "-D", "warnings"]);
    sh::run(&mut command)
}

/// Features of other crates in the workspace can hide a missing one; so each library is checked
/// alone, and the cores without their standard-library feature.
fn each_crate_alone() -> Result<()> {
    for package in crate::metadata::packages()?.iter().filter(|package| package.has_library()) {
        sh::run(sh::cargo().args(["check", "--locked", "-p", &package.name]))?;
    }
    each_core_without_std()
}

/// What the tests and the bench step run, in their profile, and the server as the README starts it.
/// That the other benches compile is known from clippy.
fn build() -> Result<()> {
    let mut command = sh::cargo();
    command.args(["build", "--workspace", "--all-features", "--locked"]);
    command.args(["--lib", "--bins", "--examples", "--tests", "--bench", bench::SMOKE]);
    sh::run(&mut command)?;
    sh::run(sh::cargo().args(["build", "--release", "--locked", "-p", "server"]))
}

fn each_core_without_std() -> Result<()> {
    for core in fences::CORES {
        let mut command = sh::cargo();
        command.args(["check", "--locked", "-p", core, "--lib", "--no-default-features"]);
        sh::run(&mut command)?;
    }
    Ok(())
}

fn tests() -> Result<()> {
    let numbers = Numbers { seed: commit_seed(), ..Numbers::default() };
    test::run(Layer::All, numbers, Runner::Installed)
}

/// A seed that is another one for each commit and the same for each run of it.
fn commit_seed() -> Option<u64> {
    let mut git = sh::command("git");
    let hash = sh::output(git.args(["rev-parse", "--short=12", "HEAD"])).ok()?;
    u64::from_str_radix(hash.trim().get(..12)?, 16).ok()
}
