//! Tests by layer, through cargo-nextest where it is installed and plain `cargo test` elsewhere.
//!
//! Both run the same set, with all features: some tests need `testing`. Doc tests run first, so that the last line of the output is the closing
//! line of the test runner.

mod layers;
mod tally;

use crate::browser::{self, Browser};
use crate::sh::{self, Watch};
use crate::{etcd, metadata, moto, node, python, ucx};
use anyhow::{Context as _, Result, bail};
pub(crate) use layers::Layer;
use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;
use tally::Tally;

/// Least number of tests per layer.
const FLOOR: &str = ".config/test-floor.toml";
/// The crate of the loom models.
pub(crate) const LOOM: &str = "loom/Cargo.toml";
/// Seed of randomised tests, for those that read it.
const SEED: &str = "DSV4_TEST_SEED";
/// Requests of the simulation with every fault on, for the nightly run.
const REQUESTS: &str = "DSV4_SIM_REQUESTS";
/// Tests that call the server through a Python package have this in their name.
const PYTHON_TESTS: &str = "python_";

/// Which program runs the tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Runner {
    /// cargo-nextest where it is installed.
    Installed,
    /// Plain `cargo test`.
    Cargo,
}

/// What the tests are told. Without a number each test uses its own.
#[derive(Clone, Debug, Default)]
pub(crate) struct Numbers {
    /// Seed of every randomised test.
    pub(crate) seed: Option<u64>,
    /// Requests that the simulation, or the run under faults, has with every fault on.
    pub(crate) requests: Option<u64>,
    /// Requests of the run under faults whose client hangs up.
    pub(crate) aborts: Option<u64>,
    /// Transport of the run under faults.
    pub(crate) transport: Option<String>,
}

/// What tests are given by the environment.
#[derive(Debug, Default)]
struct Equipment {
    numbers: Numbers,
    python: Option<String>,
    ucx: Option<PathBuf>,
    moto: Option<PathBuf>,
    node: Option<PathBuf>,
    etcd: Option<PathBuf>,
    browser: Option<Browser>,
}

/// Runs the tests of `layer`.
pub(crate) fn run(layer: Layer, numbers: Numbers, runner: Runner) -> Result<()> {
    if numbers.requests.is_some() && !matches!(layer, Layer::Sim | Layer::Faults) {
        bail!("--requests is for the layers sim and faults");
    }
    if (numbers.aborts.is_some() || numbers.transport.is_some()) && layer != Layer::Faults {
        bail!("--aborts and --transport are for the layer faults");
    }
    match layer {
        Layer::Loom => return loom(),
        Layer::Load => return long("load", numbers, &[]),
        Layer::Faults => {
            let arguments = fault_arguments(&numbers);
            return long("faults", numbers, &arguments);
        }
        _ => {}
    }
    let python = if layer.has_end_to_end() { interpreter()? } else { None };
    let without = (layer.has_end_to_end() && python.is_none()).then_some(PYTHON_TESTS);
    let node = if layer.has_end_to_end() { node_package()? } else { None };
    let (moto, etcd) = (object_server(layer)?, registry(layer)?);
    let browser = browser(layer)?;
    let equipment = Equipment { numbers, python, ucx: library()?, moto, etcd, node, browser };
    let mut tally = Tally::default();
    let started = Instant::now();
    if layer.has_doc_tests() {
        let mut doc = sh::cargo();
        doc.args(["test", "--workspace", "--all-features", "--doc"]);
        equipment.equip(&mut doc);
        watch(&mut doc, Watch::Stdout, &mut tally)?;
    }
    if runner == Runner::Installed && has_nextest() {
        let mut nextest = nextest(layer, without);
        equipment.equip(&mut nextest);
        watch(&mut nextest, Watch::Stderr, &mut tally)?;
        return above_floor(layer, &tally, without);
    }
    let mut plain = Tally::default();
    for mut command in layers::libtest(layer, without) {
        equipment.equip(&mut command);
        watch(&mut command, Watch::Stdout, &mut plain)?;
    }
    tally.add(&plain);
    above_floor(layer, &tally, without)?;
    println!("\nall test binaries together:\n\n{}", plain.libtest_line(started.elapsed()));
    Ok(())
}

/// True where `cargo nextest` works.
fn has_nextest() -> bool {
    sh::succeeds(sh::cargo().args(["nextest", "--version"]))
}

fn nextest(layer: Layer, without: Option<&str>) -> Command {
    let mut command = sh::cargo();
    command.args(["nextest", "run", "--workspace", "--all-features", "--no-fail-fast"]);
    command.args(["--color", "never"]);
    if sh::is_ci() {
        command.args(["--profile", "ci"]);
    }
    if let Some(filter) = layers::nextest_filter(layer, without) {
        command.args(["-E", &filter]);
    }
    command
}

impl Equipment {
    fn equip(&self, command: &mut Command) {
        if let Some(seed) = self.numbers.seed {
            command.env(SEED, seed.to_string()).env("PROPTEST_RNG_SEED", seed.to_string());
        }
        if let Some(requests) = self.numbers.requests {
            command.env(REQUESTS, requests.to_string());
        }
        if let Some(python) = &self.python {
            command.env(python::VARIABLE, python);
        }
        if let Some(ucx) = &self.ucx {
            command.env(ucx::VARIABLE, ucx);
        }
        if let Some(moto) = &self.moto {
            command.env(moto::VARIABLE, moto);
        }
        if let Some(node) = &self.node {
            command.env(node::VARIABLE, node);
        }
        if let Some(etcd) = &self.etcd {
            command.env(etcd::VARIABLE, etcd);
        }
        if let Some(browser) = &self.browser {
            browser.equip(command);
        }
    }
}

fn watch(command: &mut Command, stream: Watch, tally: &mut Tally) -> Result<()> {
    if !sh::run_watched(command, stream, &mut |line| tally.see(line))? {
        bail!("tests failed");
    }
    Ok(())
}

/// The interpreter for tests through Python clients; in CI it must be there.
fn interpreter() -> Result<Option<String>> {
    match python::ensure() {
        Ok(path) => Ok(Some(path.to_string_lossy().into_owned())),
        Err(error) if sh::is_ci() => Err(error.context("the Python clients are required in CI")),
        Err(error) => {
            println!("tests named {PYTHON_TESTS} are left out: {error:#}");
            Ok(None)
        }
    }
}

/// The S3 server for the tests of the remote store; in CI it must be there, elsewhere they leave
/// themselves out without it.
fn object_server(layer: Layer) -> Result<Option<PathBuf>> {
    if !layer.has_object_server() {
        return Ok(None);
    }
    match moto::ensure() {
        Ok(path) => Ok(Some(path)),
        Err(error) if sh::is_ci() => Err(error.context("an S3 server is required in CI")),
        Err(error) => {
            println!("the remote store is not tested: {error:#}");
            Ok(None)
        }
    }
}

/// The Node package for the tests through it. Where there is no Node they leave themselves out, in CI
/// as well: a bare machine has none.
fn node_package() -> Result<Option<PathBuf>> {
    if !node::is_installed() {
        println!("the Node client is not tested: there is no node with npm");
        return Ok(None);
    }
    match node::ensure() {
        Ok(path) => Ok(Some(path)),
        Err(error) if sh::is_ci() => Err(error.context("the Node client is required in CI")),
        Err(error) => {
            println!("the Node client is not tested: {error:#}");
            Ok(None)
        }
    }
}

/// etcd for the tests of discovery; in CI it must be there, elsewhere they leave themselves out
/// without it.
fn registry(layer: Layer) -> Result<Option<PathBuf>> {
    if !layer.has_etcd() {
        return Ok(None);
    }
    match etcd::ensure() {
        Ok(path) => Ok(Some(path)),
        Err(error) if sh::is_ci() => Err(error.context("etcd is required in CI")),
        Err(error) => {
            println!("discovery by etcd is not tested: {error:#}");
            Ok(None)
        }
    }
}

/// A browser for the tests of the page; in CI it must be there, elsewhere they leave themselves out
/// without it.
fn browser(layer: Layer) -> Result<Option<Browser>> {
    if !layer.has_browser() {
        return Ok(None);
    }
    match browser::ensure() {
        Ok(browser) => Ok(Some(browser)),
        Err(error) if sh::is_ci() => Err(error.context("a browser is required in CI")),
        Err(error) => {
            println!("the page is not tested in a browser: {error:#}");
            Ok(None)
        }
    }
}

/// The UCX library for the tests of its transport; in CI it must be there. Without it they still use
/// the one that the loader finds.
fn library() -> Result<Option<PathBuf>> {
    match ucx::ensure() {
        Ok(path) => Ok(Some(path)),
        Err(error) if sh::is_ci() => Err(error.context("UCX is required in CI")),
        Err(error) => {
            println!("there is no UCX wheel for the tests: {error:#}");
            Ok(None)
        }
    }
}

/// Compares the tests that ran with the committed floor.
fn above_floor(layer: Layer, tally: &Tally, without: Option<&str>) -> Result<()> {
    let text =
        std::fs::read_to_string(sh::root().join(FLOOR)).with_context(|| format!("read {FLOOR}"))?;
    let floor = layers::floor(&text, layer).with_context(|| FLOOR.to_owned())?;
    let floor =
        if without.is_some() { floor.saturating_sub(layers::PYTHON_TESTS_MAX) } else { floor };
    if tally.passed == 0 {
        bail!("there is no test in layer {layer}");
    }
    if tally.passed < floor {
        bail!("{} tests ran, {FLOOR} asks for {floor} in layer {layer}", tally.passed);
    }
    Ok(())
}

/// The models of the crate in the folder `loom`, a workspace of its own.
fn loom() -> Result<()> {
    let target = std::env::var_os("CARGO_TARGET_DIR")
        .map_or_else(|| sh::root().join("target"), |target| sh::root().join(target));
    let mut command = sh::cargo();
    command.args(["test", "--locked", "--lib", "--manifest-path", LOOM]);
    command.env("CARGO_TARGET_DIR", target.join("loom"));
    let mut tally = Tally::default();
    watch(&mut command, Watch::Stdout, &mut tally)?;
    if tally.passed == 0 {
        bail!("there is no model in {LOOM}");
    }
    Ok(())
}

/// What the run under faults is told on its command line; the seed is in the environment.
fn fault_arguments(numbers: &Numbers) -> Vec<String> {
    let Numbers { requests, aborts, transport, seed: _ } = numbers;
    let number = |n: &u64| n.to_string();
    let all = [
        ("--requests", requests.as_ref().map(number)),
        ("--aborts", aborts.as_ref().map(number)),
        ("--transport", transport.clone()),
    ];
    let given = all.into_iter().filter_map(|(flag, value)| Some([flag.to_owned(), value?]));
    given.flatten().collect()
}

/// A long run: every test or bench target of this name, in release.
fn long(name: &str, numbers: Numbers, arguments: &[String]) -> Result<()> {
    let needs_ucx = numbers.transport.as_deref() == Some("ucx");
    let ucx = if needs_ucx { library()? } else { None };
    let equipment = Equipment { numbers, ucx, ..Equipment::default() };
    let mut runs = 0;
    for package in metadata::packages()? {
        for target in package.targets.iter().filter(|target| target.name == name) {
            let mut command = sh::cargo();
            match target.kind.as_str() {
                "bench" => command.args(["bench", "-p", &package.name, "--bench", name]),
                "test" => command.args(["test", "--release", "-p", &package.name, "--test", name]),
                _ => continue,
            };
            if !arguments.is_empty() {
                command.arg("--").args(arguments);
            }
            equipment.equip(&mut command);
            sh::run(&mut command)?;
            runs += 1;
        }
    }
    if runs == 0 {
        bail!("no crate has a test or bench target called {name}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_run_under_faults_is_told_what_was_given() {
        assert!(fault_arguments(&Numbers::default()).is_empty());
        let numbers = Numbers {
            seed: Some(3),
            requests: Some(20),
            aborts: None,
            transport: Some("tcp".to_owned()),
        };
        assert_eq!(fault_arguments(&numbers), ["--requests", "20", "--transport", "tcp"]);
        assert!(run(Layer::Unit, numbers, Runner::Cargo).is_err(), "another layer");
    }
}
