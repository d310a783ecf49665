//! The web page in a real browser, at workers and at a router.

use super::cluster::{Pair, Server, note};
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The browser's program.
const BROWSER: &str = "DSV4_TEST_BROWSER";
/// Folder whose `node_modules` has the package that drives it.
const DRIVER: &str = "DSV4_TEST_PLAYWRIGHT";
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/node/page.cjs");

/// Steps so small that a long prompt is on its way for as long as somebody needs to see it.
const SLOW: &str = "--threads 1 --chunked-prefill-size 64";

const TALKING: &[&str] = &[
    "check_loads_alone_and_without_errors",
    "check_chat_recalls_and_goes_on",
    "check_thinking_is_shown",
    "check_tool_call_is_shown_and_answered",
    "check_tools_that_are_no_list_are_refused",
    "check_stop_ends_the_request",
    "check_an_error_is_shown_and_the_text_kept",
    "check_a_server_that_is_gone_is_said",
];
const LOOKING: &[&str] = &[
    "check_a_hand_off_is_seen_while_it_happens",
    "check_a_phone_shows_all_of_it",
    "check_the_keyboard_is_enough",
    "check_everything_has_a_name",
    "check_dark_and_light_can_be_read",
    "check_a_mismatch_is_loud",
];
const WAITING: &[&str] = &["check_a_request_waits_in_the_queue"];
const BOTH: &[&str] = &["check_chat_recalls_and_goes_on", "check_both_workers_show_their_side"];
const ROUTED: &[&str] = &[
    "check_loads_alone_and_without_errors",
    "check_topology_of_a_router",
    "check_tool_call_is_shown_and_answered",
    "check_a_hand_off_is_seen_while_it_happens",
    "check_a_mismatch_is_loud",
];
const LOCKED: &[&str] = &["check_a_key_is_asked_for_in_the_page"];
const STARTING: &[&str] = &["check_a_start_is_progress"];

/// A browser and what drives it.
struct Browser {
    program: PathBuf,
    driver: PathBuf,
}

impl Browser {
    /// None where there is no browser.
    fn found() -> Option<Self> {
        let path = |name| std::env::var_os(name).filter(|path| !path.is_empty()).map(PathBuf::from);
        let found = path(BROWSER).zip(path(DRIVER));
        if found.is_none() {
            let missing = format!(
                "{BROWSER} and {DRIVER} are not set: the page was not tried in a browser; `cargo \
                 xtask test e2e` sets them"
            );
            assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{missing}");
            note(&missing);
        }
        found.map(|(program, driver)| Self { program, driver })
    }

    /// Each of these checks must hold at the page of a server; `hear` is told each line of output as
    /// it comes.
    fn checks(&self, server: &Server, names: &[&str], mut hear: impl FnMut(&str)) {
        let mut command = Command::new("node");
        command.arg(SCRIPT).arg(&server.url).args(names);
        command.env(BROWSER, &self.program);
        command.env("NODE_PATH", Path::new(&self.driver).join("node_modules"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("node starts");
        let mut complaints = child.stderr.take().expect("stderr is piped");
        let reader = std::thread::spawn(move || {
            let mut text = String::new();
            // What is no text ends the reading; the exit code tells all the same.
            let _ = complaints.read_to_string(&mut text);
            text
        });
        let mut said = Vec::new();
        let out = BufReader::new(child.stdout.take().expect("stdout is piped"));
        for line in out.lines().map_while(Result::ok) {
            hear(&line);
            said.push(line);
        }
        let status = child.wait().expect("wait for node");
        let error = reader.join().expect("no panic");
        assert!(status.success(), "{}\n{error}", said.join("\n"));
        for name in names {
            let wanted = format!("ok {name}");
            assert!(said.contains(&wanted), "no {wanted}:\n{}\n{error}", said.join("\n"));
        }
    }

    fn all(&self, server: &Server, names: &[&str]) {
        self.checks(server, names, |_| {});
    }
}

#[test]
fn every_check_of_the_page_is_asked_for() {
    let text = std::fs::read_to_string(SCRIPT).expect("the script is there");
    let asked = [TALKING, LOOKING, WAITING, BOTH, ROUTED, LOCKED, STARTING].concat();
    let checks: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("  async check_")?.split_once('('))
        .map(|(name, _)| name)
        .collect();
    for check in &checks {
        assert!(asked.contains(&format!("check_{check}").as_str()), "nobody asks for {check}");
    }
    assert!(checks.len() >= 17, "{checks:?}");
}

#[test]
fn page_chats_thinks_calls_tools_stops_and_shows_errors() {
    let Some(browser) = Browser::found() else { return };
    let pair = Pair::start("shm", SLOW);
    browser.all(&pair.decode, TALKING);
}

#[test]
fn page_shows_a_hand_off_while_it_happens_to_everybody_everywhere() {
    let Some(browser) = Browser::found() else { return };
    let pair = Pair::start("tcp", SLOW);
    browser.all(&pair.decode, LOOKING);
}

#[test]
fn page_shows_who_waits_in_the_queue() {
    let Some(browser) = Browser::found() else { return };
    let pair = Pair::start("tcp", &format!("{SLOW} --max-running-requests 1"));
    browser.all(&pair.decode, WAITING);
}

#[test]
fn page_shows_both_workers_of_one_process() {
    let Some(browser) = Browser::found() else { return };
    browser.all(&Server::worker("both", SLOW), BOTH);
}

#[test]
fn page_of_a_router_shows_its_workers() {
    let Some(browser) = Browser::found() else { return };
    let pair = Pair::start("tcp", SLOW);
    browser.all(&Server::router(&[&pair.decode], ""), ROUTED);
}

/// The router passes the key on to a worker that wants it too.
#[test]
fn page_asks_for_a_key_where_one_is_wanted() {
    let Some(browser) = Browser::found() else { return };
    let worker = Server::worker("null", "--api-key sk-page");
    browser.all(&worker, LOCKED);
    browser.all(&Server::router(&[&worker], "--api-key sk-page"), LOCKED);
}

#[test]
fn page_shows_a_start_as_progress() {
    let Some(browser) = Browser::found() else { return };
    let flags = "--disaggregation-transfer-backend tcp";
    let mut prefill = Server::worker("prefill", flags);
    prefill.process.kill();
    let decode = Server::decode_of(&prefill, flags);
    browser.checks(&decode, STARTING, |line| {
        if line == "seen starting" {
            prefill.restart();
        }
    });
}
