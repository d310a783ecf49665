//! The Python environment of the end-to-end tests: `.venv` with the clients that they use.

use crate::{debian, sh};
use anyhow::{Context as _, Result, bail};
use std::path::{Path, PathBuf};

/// Tells the tests which interpreter has the clients.
pub(crate) const VARIABLE: &str = "DSV4_TEST_PYTHON";
/// What is installed, with versions.
const REQUIREMENTS: &str = "xtask/requirements.txt";
/// Succeeds where all of that is.
const IMPORTS: &str = "import anthropic, msgspec, openai, zmq";

/// The interpreter that has the clients: `DSV4_TEST_PYTHON` if set, otherwise the one in `.venv`,
/// which is made if it is not there or out of date.
pub(crate) fn ensure() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(VARIABLE).map(PathBuf::from) {
        if !sh::succeeds(sh::command(&path).args(["-c", IMPORTS])) {
            bail!("{VARIABLE} is {}, which has not all of {REQUIREMENTS}", path.display());
        }
        return Ok(path);
    }
    let root = sh::root();
    let wanted = std::fs::read_to_string(root.join(REQUIREMENTS))
        .with_context(|| format!("read {REQUIREMENTS}"))?;
    let (python, stamp) = (root.join(".venv/bin/python"), root.join(".venv/requirements.txt"));
    let is_current = std::fs::read_to_string(&stamp).is_ok_and(|have| have == wanted);
    if is_current && sh::succeeds(sh::command(&python).args(["-c", IMPORTS])) {
        return Ok(python);
    }
    make_environment()?;
    let mut install = sh::command(&python);
    install.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    sh::run(install.args(["--retries", "2", "-r", REQUIREMENTS]))?;
    std::fs::write(&stamp, wanted).context("write the stamp of the Python environment")?;
    Ok(python)
}

/// Installs wheels, and nothing that they ask for, to a folder of their own below the target folder,
/// if they are not there or out of date; gives the folder.
pub(crate) fn install(python: &Path, name: &str, wheels: &[&str]) -> Result<PathBuf> {
    let folder = sh::root().join("target").join(name);
    let (stamp, wanted) = (folder.join("wheels.txt"), wheels.join("\n"));
    if std::fs::read_to_string(&stamp).is_ok_and(|have| have == wanted) {
        return Ok(folder);
    }
    let mut pip = sh::command(python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    pip.args(["--retries", "2", "--no-deps", "--upgrade", "--target"]).arg(&folder);
    sh::run(pip.args(wheels))?;
    std::fs::write(&stamp, wanted).with_context(|| format!("write the stamp of {name}"))?;
    Ok(folder)
}

/// Installs packages and what they ask for to an environment of its own below the target folder, if
/// they are not there or out of date; gives the folder.
pub(crate) fn environment(name: &str, packages: &[&str]) -> Result<PathBuf> {
    let folder = sh::root().join("target").join(name);
    let (stamp, wanted) = (folder.join("package.txt"), packages.join("\n"));
    if std::fs::read_to_string(&stamp).is_ok_and(|have| have == wanted) {
        return Ok(folder);
    }
    let python = ensure()?;
    // Its pip installs for the other one, which needs none.
    let mut venv = sh::command(&python);
    sh::run(venv.args(["-m", "venv", "--clear", "--without-pip"]).arg(&folder))?;
    let mut pip = sh::command(&python);
    pip.args(["-m", "pip", "--python"]).arg(folder.join("bin/python"));
    pip.args(["install", "--quiet", "--disable-pip-version-check", "--retries", "2"]);
    sh::run(pip.args(packages))?;
    std::fs::write(&stamp, wanted).with_context(|| format!("write the stamp of {name}"))?;
    Ok(folder)
}

/// Makes `.venv`, by whichever way this machine has.
fn make_environment() -> Result<()> {
    let folder = sh::root().join(".venv");
    let works =
        || sh::succeeds(sh::command(folder.join("bin/python")).args(["-m", "pip", "--version"]));
    if works() {
        return Ok(());
    }
    let venv = || sh::run(sh::command("python3").args(["-m", "venv", "--clear", ".venv"]));
    if venv().is_ok() && works() {
        return Ok(());
    }
    // Debian's python3 comes without ensurepip; virtualenv brings its own pip.
    let tool = sh::root().join("target/virtualenv");
    let mut pip = sh::command("python3");
    pip.args(["-m", "pip", "install", "--quiet", "--target"]).arg(&tool).arg("virtualenv");
    let mut virtualenv = sh::command("python3");
    virtualenv.args(["-m", "virtualenv", "--quiet", "--clear", ".venv"]).env("PYTHONPATH", &tool);
    if sh::run(&mut pip).is_ok() && sh::run(&mut virtualenv).is_ok() && works() {
        return Ok(());
    }
    // Only a CI machine is ours to change.
    if debian::may_install() {
        debian::install(&["python3-venv"])?;
        venv()?;
    }
    if !works() {
        bail!("cannot make a Python environment: install python3 with its venv module");
    }
    Ok(())
}
