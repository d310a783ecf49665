//! Running other programs: everything xtask does in the end is a child process.

use anyhow::{Context as _, Result, bail};
use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Root of the workspace: the folder above this crate.
pub(crate) fn root() -> PathBuf {
    let here = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    here.parent().map(Path::to_path_buf).unwrap_or(here)
}

/// The cargo that runs us, or the one on the path.
pub(crate) fn cargo() -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    command(program)
}

/// A command that runs in the workspace root.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    command.current_dir(root()).stdin(Stdio::null());
    command
}

/// Runs `command` with its output shown; an exit code other than 0 is an error.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = show(command);
    println!("$ {line}");
    std::io::stdout().flush().context("flush standard output")?;
    let status = command.status().with_context(|| format!("start {line}"))?;
    if !status.success() {
        bail!("{line}: {status}");
    }
    Ok(())
}

/// Runs `command` quietly and gives its standard output; an exit code other than 0 is an error.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let line = show(command);
    let output = command.output().with_context(|| format!("start {line}"))?;
    if !output.status.success() {
        bail!("{line}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// True if `command` can be started and ends with exit code 0; its output is dropped.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// Which stream of the child [`run_watched`] looks at; the other one is inherited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Watch {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

/// Runs `command`, shows one of its streams line by line and hands each line to `see`.
///
/// Returns whether the exit code was 0, so that the caller can say what it saw first.
pub(crate) fn run_watched(
    command: &mut Command,
    watch: Watch,
    see: &mut dyn FnMut(&str),
) -> Result<bool> {
    let line = show(command);
    println!("$ {line}");
    match watch {
        Watch::Stdout => command.stdout(Stdio::piped()),
        Watch::Stderr => command.stderr(Stdio::piped()),
    };
    let mut child = command.spawn().with_context(|| format!("start {line}"))?;
    let stream: Option<Box<dyn Read>> = match watch {
        Watch::Stdout => child.stdout.take().map(|s| Box::new(s) as Box<dyn Read>),
        Watch::Stderr => child.stderr.take().map(|s| Box::new(s) as Box<dyn Read>),
    };
    if let Some(stream) = stream {
        let mut reader = BufReader::new(stream);
        let mut bytes = Vec::new();
        while reader.read_until(b'\n', &mut bytes).context("read from the child")? > 0 {
            let text = String::from_utf8_lossy(&bytes);
            print!("{text}");
            std::io::stdout().flush().context("flush standard output")?;
            see(text.trim_end());
            bytes.clear();
        }
    }
    let status = child.wait().with_context(|| format!("wait for {line}"))?;
    if !status.success() {
        println!("{line}: {status}");
    }
    Ok(status.success())
}

/// The command line as a person would type it, without the folder of the program.
fn show(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let mut line = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
    for argument in command.get_args() {
        let argument = argument.to_string_lossy();
        line.push(' ');
        if argument.contains([' ', '(', '|', '*']) {
            line.push('\'');
            line.push_str(&argument);
            line.push('\'');
        } else {
            line.push_str(&argument);
        }
    }
    line
}

/// True where the environment says that this is a continuous-integration run.
pub(crate) fn is_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| value == "true" || value == "1")
}

/// The file that a variable names, if it is set: what somebody has already is not fetched again.
pub(crate) fn named_by(variable: &str) -> Result<Option<PathBuf>> {
    let Some(path) = std::env::var_os(variable).filter(|path| !path.is_empty()) else {
        return Ok(None);
    };
    let path = PathBuf::from(path);
    if !path.exists() {
        bail!("{variable} is {}, which does not exist", path.display());
    }
    Ok(Some(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_holds_the_workspace() {
        let text = std::fs::read_to_string(root().join("Cargo.toml")).unwrap();
        assert!(text.contains("[workspace]"));
    }

    #[test]
    fn a_shown_command_is_quoted_where_a_shell_would_need_it() {
        let mut command = Command::new("/usr/bin/env");
        command.args(["a", "b c"]);
        assert_eq!(show(&command), "env a 'b c'");
    }

    #[test]
    fn watched_lines_arrive_and_the_exit_code_is_told() {
        let mut seen = Vec::new();
        let mut child = command("sh");
        child.args(["-c", "echo one; echo two; exit 3"]);
        let ok = run_watched(&mut child, Watch::Stdout, &mut |line| seen.push(line.to_owned()));
        assert!(!ok.unwrap());
        assert_eq!(seen, ["one", "two"]);
    }
}
