//! The official `openai` package for Node as a client.

use super::client::healthy;
use super::cluster::{Pair, Server, note};
use std::path::Path;
use std::process::Command;

/// Folder whose `node_modules` has the package.
const NODE: &str = "DSV4_TEST_NODE";
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/node/openai_client.cjs");

/// Each check of the script must pass, against a router over a pair of workers.
#[tokio::test]
async fn node_client_chats_streams_calls_tools_thinks_and_gets_structure_and_errors() {
    let Some(folder) = std::env::var_os(NODE).filter(|folder| !folder.is_empty()) else {
        note(&format!("{NODE} is not set: the Node client was not tried"));
        return;
    };
    let pair = Pair::start("shm", "");
    healthy(&pair.decode.url).await;
    let router = Server::router(&[&pair.decode], "");
    healthy(&router.url).await;
    let text = std::fs::read_to_string(SCRIPT).expect("the script is there");
    let checks = text.lines().filter(|line| line.starts_with("  async check_")).count();
    let mut command = Command::new("node");
    command.arg(SCRIPT).arg(format!("{}/v1", router.url)).env_remove("OPENAI_API_KEY");
    command.env("NODE_PATH", Path::new(&folder).join("node_modules"));
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .expect("no panic")
        .expect("node starts");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{out}\n{err}");
    let passed = out.lines().filter(|line| line.starts_with("ok check_")).count();
    assert!(passed == checks && checks >= 12, "{passed} of {checks} checks passed:\n{out}\n{err}");
}
