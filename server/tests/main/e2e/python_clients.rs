//! The official `openai` and `anthropic` Python packages as clients.

use super::client::healthy;
use super::cluster::{Pair, Server, note};
use std::process::Command;

/// Path of a Python interpreter that has the packages.
const PYTHON: &str = "DSV4_TEST_PYTHON";
const SCRIPTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python");

/// Runs a script against a router over a pair of workers; each of its checks must pass, and there
/// are at least `least`. `path` is where the package expects the API to begin.
async fn every_check_passes(script: &str, path: &str, least: usize) {
    let Some(python) = std::env::var_os(PYTHON) else {
        let missing =
            format!("{PYTHON} is not set: {script} was not tried; `cargo xtask test e2e` sets it");
        assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{missing}");
        note(&missing);
        return;
    };
    let pair = Pair::start("shm", "");
    healthy(&pair.decode.url).await;
    let router = Server::router(&[&pair.decode], "");
    healthy(&router.url).await;
    let script = format!("{SCRIPTS}/{script}");
    let text = std::fs::read_to_string(&script).expect("the script is there");
    let checks = text.lines().filter(|line| line.starts_with("def check_")).count();
    let mut command = Command::new(&python);
    command.arg(&script).arg(format!("{}{path}", router.url));
    command.env_remove("OPENAI_API_KEY").env_remove("ANTHROPIC_API_KEY");
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .expect("no panic")
        .expect("the interpreter starts");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    let passed = out.lines().filter(|line| line.starts_with("ok check_")).count();
    assert!(
        passed == checks && checks >= least,
        "{passed} of {checks} checks passed, at least {least} expected:\n{out}\n{err}"
    );
}

#[tokio::test]
async fn openai_client_chats_streams_calls_tools_thinks_and_gets_errors() {
    every_check_passes("openai_client.py", "/v1", 10).await;
}

#[tokio::test]
async fn openai_client_gets_responses_with_tools_reasoning_and_errors() {
    every_check_passes("responses_client.py", "/v1", 10).await;
}

#[tokio::test]
async fn anthropic_client_talks_streams_calls_tools_thinks_and_gets_errors() {
    every_check_passes("anthropic_client.py", "", 10).await;
}
