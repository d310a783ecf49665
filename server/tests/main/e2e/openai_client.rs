//! The official `openai` Python package as a client.

use super::client::healthy;
use super::cluster::{Pair, Server, note};
use std::process::Command;

/// Path of a Python interpreter that has the `openai` package.
const PYTHON: &str = "DSV4_TEST_PYTHON";
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/openai_client.py");

#[tokio::test]
async fn python_openai_client_chats_streams_calls_tools_thinks_and_gets_errors() {
    let Some(python) = std::env::var_os(PYTHON) else {
        let missing = format!(
            "{PYTHON} is not set: the openai client was not tried; `cargo xtask test e2e` sets it"
        );
        assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{missing}");
        note(&missing);
        return;
    };
    let pair = Pair::start("shm", "");
    healthy(&pair.decode.url).await;
    let router = Server::router(&[&pair.decode], "");
    healthy(&router.url).await;
    let script = std::fs::read_to_string(SCRIPT).expect("the script is there");
    let checks = script.lines().filter(|line| line.starts_with("def check_")).count();
    let mut command = Command::new(&python);
    command.arg(SCRIPT).arg(format!("{}/v1", router.url)).env_remove("OPENAI_API_KEY");
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .expect("no panic")
        .expect("the interpreter starts");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    let passed = out.lines().filter(|line| line.starts_with("ok check_")).count();
    assert!(passed == checks && checks >= 10, "{passed} of {checks} checks passed:\n{out}\n{err}");
}
