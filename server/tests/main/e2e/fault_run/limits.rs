//! Processes under limits of the operating system, as a full machine or disk would impose them.

use super::super::cluster::{MODEL, Process};

/// Starts a unified worker under a shell's `ulimit`, which must end it before it serves; its last
/// word.
pub(crate) fn last_word(limit: &str, flags: &str) -> String {
    let flags = format!("--port 0 --disaggregation-mode null --model-path {MODEL} {flags}");
    let mut process = Process::spawn_limited(limit, &flags);
    let status = process.wait_exit();
    let log = process.log_text();
    assert_eq!(status.code(), Some(1), "{status}: {log}");
    let word = log.lines().find(|line| line.starts_with("error: "));
    word.unwrap_or_else(|| panic!("no last word in {log}")).to_owned()
}
