//! The lab against a server with a planted fault, over HTTP.

use ab::drive::{Subject, run};
use ab::judge::{Sign, Truth, Verdict};
use ab::record::{self, Line};
use ab::report::{CellLines, Report};
use ab::tally::Tally;
use ab::workload::{Burst, Kind, Workload};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::post;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::mpsc::unbounded_channel;

const SEED: u64 = 11;

fn workload(sessions: u32) -> Workload {
    Workload {
        kind: Kind::Agents,
        sessions,
        turns: 3,
        tokens_first: 400,
        tokens_last: 600,
        requests: None,
        recorded: Arc::default(),
        burst: None,
        aborts: 0.0,
        hang_ups: 0.0,
        logprobs: false,
        model: "m".to_owned(),
    }
}

/// What the server does with the requests that come to it, by their number.
type Fault = fn(u32) -> Mischief;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mischief {
    None,
    /// Garbles the stream.
    Garble,
    /// Says something else that is as well-formed.
    Change,
    /// Says that the queue is full.
    Refuse,
    /// Ends the stream in the middle.
    Break,
    /// Says nothing.
    Hang,
}

struct Served {
    /// Right answers by the body of the request.
    truths: HashMap<String, Truth>,
    count: AtomicU32,
    fault: Fault,
}

/// A chat server that knows every right answer.
async fn serve(workload: &Workload, fault: Fault) -> String {
    let truths = workload.all(SEED).map(|ask| (ask.body.to_string(), ask.truth)).collect();
    let served = Arc::new(Served { truths, count: AtomicU32::new(0), fault });
    let app = Router::new().route("/v1/chat/completions", post(answer)).with_state(served);
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a free port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    tokio::spawn(async move { axum::serve(listener, app).await });
    url
}

async fn answer(State(served): State<Arc<Served>>, body: Bytes) -> Response {
    let truth = &served.truths[std::str::from_utf8(&body).expect("JSON")];
    let mischief = (served.fault)(served.count.fetch_add(1, Ordering::Relaxed));
    let event = |value: Value| format!("data: {value}\n\n");
    let mut events = String::new();
    let finish = match truth {
        Truth::Calls(name, arguments) => {
            let other = json!({"nothing": "of the kind"});
            let given = if mischief == Mischief::Change { &other } else { arguments };
            let function = json!({"name": name, "arguments": given.to_string()});
            let call = json!({"index": 0, "id": "c", "function": function});
            events += &event(json!({"choices": [{"delta": {"tool_calls": [call]}}]}));
            "tool_calls"
        }
        Truth::Says(said) => {
            let said = match mischief {
                Mischief::Garble => "the the the ".repeat(9),
                Mischief::Change => format!("{said} Surely."),
                _ => said.clone(),
            };
            for word in said.split_inclusive(' ') {
                events += &event(json!({"choices": [{"delta": {"content": word}}]}));
            }
            "stop"
        }
        _ => unreachable!("agents say or call"),
    };
    match mischief {
        Mischief::Refuse => return (StatusCode::SERVICE_UNAVAILABLE, "full").into_response(),
        Mischief::Hang => std::future::pending::<()>().await,
        Mischief::Garble if finish == "tool_calls" => {
            events = event(json!({"choices": [{"delta": {"content": "<｜DSML｜invoke"}}]}));
            events += &event(json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}));
        }
        _ => events += &event(json!({"choices": [{"delta": {}, "finish_reason": finish}]})),
    }
    events +=
        &event(json!({"choices": [], "usage": {"prompt_tokens": 400, "completion_tokens": 9}}));
    if mischief != Mischief::Break {
        events += "data: [DONE]\n\n";
    }
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from(events)).into_response()
}

async fn lines(workload: &Workload, fault: Fault, answer: Duration) -> Vec<Line> {
    let url = serve(workload, fault).await;
    let subject = Subject { url, api_key: None, answer };
    let (send, mut receive) = unbounded_channel();
    let what = ("c".to_owned(), workload.clone(), SEED);
    let asked = tokio::spawn(run(subject, what, 0..workload.sessions, 8, send));
    let mut lines = Vec::new();
    while let Some(line) = receive.recv().await {
        lines.push(line);
    }
    asked.await.expect("no panic").expect("a client");
    lines.sort_by_key(Line::place);
    lines
}

const PATIENT: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_healthy_server_is_right_in_everything() {
    let workload = workload(20);
    let lines = lines(&workload, |_| Mischief::None, PATIENT).await;
    assert_eq!(lines.len(), workload.all(SEED).count());
    assert!(lines.iter().all(|line| line.verdict == Verdict::Right));
    assert!(lines.iter().all(|line| line.first_us.is_some()));
}

#[tokio::test(flavor = "multi_thread")]
async fn two_of_a_hundred_garbled_streams_are_found_and_their_rate_is_in_the_interval() {
    let workload = workload(300);
    let every_fiftieth = |number| if number % 50 == 7 { Mischief::Garble } else { Mischief::None };
    let lines = lines(&workload, every_fiftieth, PATIENT).await;
    let tally = Tally::new(&lines, None);
    assert!(tally.judged() > 1000, "{}", tally.judged());
    assert_eq!(tally.corrupted, (tally.judged() + 42) / 50);
    assert!(tally.corruption().holds(0.02), "{:?}", tally.corruption());
    assert!(tally.signs[&Sign::Loop] > 0 && tally.signs[&Sign::Markup] > 0, "{:?}", tally.signs);
    assert_eq!(tally.wrong, 0);

    // All of it can be computed again from the lines as they are written down.
    let text: String =
        lines.iter().map(|line| serde_json::to_string(line).unwrap() + "\n").collect();
    let again = record::read(&text).unwrap();
    assert!(again == lines, "another reading");
    let report = |lines: Vec<Line>| {
        let cell = CellLines { name: "c".to_owned(), lines, reference: None };
        Report::new(&[cell], None, "").markdown()
    };
    assert_eq!(report(again), report(lines));
    assert_eq!(record::read("\n{\"cell\": 1}\n").unwrap_err().number, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_broken_or_silent_server_is_not_called_corrupt() {
    let workload = workload(10);
    let fault = |number| match number % 5 {
        0 => Mischief::Refuse,
        1 => Mischief::Break,
        2 => Mischief::Hang,
        _ => Mischief::None,
    };
    let lines = lines(&workload, fault, Duration::from_millis(300)).await;
    let tally = Tally::new(&lines, None);
    assert_eq!((tally.corrupted, tally.wrong), (0, 0));
    assert!(tally.refused > 0 && tally.lost > tally.refused && tally.right > 0, "{tally:?}");
    assert_eq!(tally.refused + tally.lost + tally.right, tally.requests);
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_leave_where_they_are_to() {
    let workload = Workload { aborts: 0.4, ..workload(20) };
    let lines = lines(&workload, |_| Mischief::None, PATIENT).await;
    let leaves = workload.all(SEED).filter(|ask| ask.leaves_after.is_some()).count();
    let tally = Tally::new(&lines, None);
    // Answers of fewer pieces end before.
    assert!(tally.left > 0 && tally.left as usize <= leaves, "{} of {leaves}", tally.left);
    assert_eq!(tally.right, tally.requests);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_search_keeps_the_lines_that_it_decided_by() {
    let workload = workload(60);
    let healthy = serve(&workload, |_| Mischief::None).await;
    let bad =
        serve(&workload, |n| if n % 3 == 0 { Mischief::Garble } else { Mischief::None }).await;
    let dir = std::env::temp_dir().join(format!("ab-search-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let plan = format!(
        "seed = {SEED}\n[workload]\nkind = \"agents\"\nsessions = 60\nturns = 3\ntokens_first = 400\n\
         tokens_last = 600\nmodel = \"m\"\n[[factor]]\nname = \"host\"\nlevels = [\
         {{ name = \"good\", url = \"{healthy}\" }}, {{ name = \"bad\", url = \"{bad}\" }}]\n"
    );
    let path = dir.join("plan.toml.in");
    std::fs::write(&path, plan).expect("a plan");
    let out = dir.join("out");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ab"));
    command.arg("bisect").arg(&path).args(["--bad", "host=bad", "--out"]).arg(&out);
    let output = tokio::task::spawn_blocking(move || command.output()).await;
    let output = output.expect("no panic").expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("the fault needs: host bad"), "{said}");
    let lines = |number: usize| {
        let text = std::fs::read_to_string(out.join(format!("bisect-{number:02}.jsonl")));
        record::read(&text.expect("its lines are kept")).expect("lines")
    };
    let (reference, seen) = (Tally::new(&lines(0), None), Tally::new(&lines(1), None));
    assert_eq!((reference.corrupted, reference.judged() > 0), (0, true));
    assert!(seen.corrupted > 0, "what the bad cell was judged by");
    std::fs::remove_dir_all(&dir).expect("the test's own folder");
}

/// Runs the lab's program and returns what it said.
async fn lab(args: Vec<String>) -> std::process::Output {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ab"));
    command.args(args);
    tokio::task::spawn_blocking(move || command.output()).await.expect("no panic").expect("it runs")
}

#[tokio::test(flavor = "multi_thread")]
async fn recorded_requests_are_asked_again_and_held_against_the_first_cell() {
    // Neither server repeats itself by accident; what is right nobody has recorded.
    let workload = workload(30);
    let healthy = serve(&workload, |_| Mischief::None).await;
    let bad =
        serve(&workload, |n| if n % 10 == 3 { Mischief::Change } else { Mischief::None }).await;
    let dir = std::env::temp_dir().join(format!("ab-replay-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let log: String = workload
        .all(SEED)
        .map(|ask| json!({"session": ask.session, "body": ask.body}).to_string() + "\n")
        .collect();
    std::fs::write(dir.join("log.jsonl"), &log).expect("a log");
    let plan = format!(
        "same_answers = true\n[workload]\nkind = \"replay\"\nrequests = \"log.jsonl\"\n\
         burst = {{ size = 10, every_ms = 20 }}\n[[factor]]\nname = \"host\"\nlevels = [\
         {{ name = \"good\", url = \"{healthy}\" }}, {{ name = \"bad\", url = \"{bad}\" }}]\n"
    );
    let (path, out) = (dir.join("plan.in.toml"), dir.join("out"));
    std::fs::write(&path, plan).expect("a plan");
    let words = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
    let (path, shown) = (path.display().to_string(), out.display().to_string());
    let output = lab(words(&["run", &path, "--out", &shown])).await;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let asked = workload.all(SEED).count();
    // Each tenth from the fourth on.
    let changed = (asked + 6) / 10;
    assert!(said.contains(&format!("figure ab.judged {} answers", 2 * asked)), "{said}");
    assert!(said.contains(&format!("figure ab.corrupted {changed} answers")), "{said}");
    assert!(said.contains(&format!("differs {changed}")), "{said}");
    // The folder has all that is needed to do it again: plan, requests and lines.
    std::fs::remove_file(dir.join("log.jsonl")).expect("a log");
    let kept = out.join("plan.toml").display().to_string();
    let requests = lab(words(&["requests", &kept])).await;
    let bodies: String = workload.all(SEED).map(|ask| ask.body.to_string() + "\n").collect();
    assert!(String::from_utf8_lossy(&requests.stdout) == bodies, "other requests");
    let again = lab(words(&["report", &shown])).await;
    let table = |text: &str| text.split_once("| cell").map(|(_, table)| table.to_owned());
    assert_eq!(table(&String::from_utf8_lossy(&again.stdout)), table(&said));
    std::fs::remove_dir_all(&dir).expect("the test's own folder");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_earlier_run_has_left_is_not_taken_for_this_one() {
    let workload = workload(2);
    let healthy = serve(&workload, |_| Mischief::None).await;
    let dir = std::env::temp_dir().join(format!("ab-stale-{}", std::process::id()));
    let out = dir.join("out");
    std::fs::create_dir_all(&out).expect("a folder");
    let plan = |name: &str, second: &str| {
        let text = format!(
            "seed = {SEED}\n[workload]\nkind = \"agents\"\nsessions = 2\nturns = 3\n\
             tokens_first = 400\ntokens_last = 600\nmodel = \"m\"\n[[factor]]\n\
             name = \"{name}\"\nlevels = [{{ name = \"a\", url = \"{healthy}\" }}, \
             {{ name = \"b\", url = \"{second}\" }}]\n"
        );
        let path = dir.join(format!("{name}.toml"));
        std::fs::write(&path, text).expect("a plan");
        path.display().to_string()
    };
    std::fs::write(out.join("runs.jsonl"), "").expect("of a run of faults");
    std::fs::write(out.join("log.jsonl"), "somebody's").expect("a file of the user");
    let shown = out.display().to_string();
    let run = |plan: String| {
        lab(["run", &plan, "--out", &shown].iter().map(|word| (*word).to_owned()).collect())
    };
    assert!(run(plan("first", &healthy)).await.status.success());
    assert!(out.join("cell-01.jsonl").exists() && out.join("log.jsonl").exists());
    // Nobody answers in its second cell.
    let failed = run(plan("second", "http://127.0.0.1:1")).await;
    assert!(!failed.status.success());
    let said = lab(vec!["report".to_owned(), shown.clone()]).await;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("second=a | ") && !said.contains("first="), "{said}");
    // Lines of another plan are told by their cell.
    std::fs::copy(dir.join("first.toml"), out.join("plan.toml")).expect("another plan");
    let mixed = lab(vec!["report".to_owned(), shown]).await;
    let why = String::from_utf8_lossy(&mixed.stderr).into_owned();
    assert!(why.contains("has lines of second=a, and the plan has first=a there"), "{why}");
    std::fs::remove_dir_all(&dir).expect("the test's own folder");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_cannot_be_replayed_is_named_with_its_line() {
    let dir = std::env::temp_dir().join(format!("ab-log-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let path = dir.join("plan.toml");
    let plan = "[workload]\nkind = \"replay\"\nrequests = \"log.jsonl\"\n[[factor]]\n\
        name = \"a\"\nlevels = [{ name = \"b\" }, { name = \"c\" }]\n";
    std::fs::write(&path, plan).expect("a plan");
    for (log, part) in [
        (None, "log.jsonl: No such file"),
        (Some("{\"messages\": [{}]}\n{\"prompt\": \"x\"}\n"), "log.jsonl: line 2: neither"),
        (Some("\n"), "log.jsonl: no request in it"),
    ] {
        if let Some(log) = log {
            std::fs::write(dir.join("log.jsonl"), log).expect("a log");
        }
        let out = dir.join("out");
        let words = ["run", &path.display().to_string(), "--out", &out.display().to_string()];
        let output = lab(words.iter().map(|word| (*word).to_owned()).collect()).await;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(part), "{part:?} is not in {said:?}");
        assert!(!out.exists(), "nothing was begun");
    }
    std::fs::remove_dir_all(&dir).expect("the test's own folder");
}

#[tokio::test(flavor = "multi_thread")]
async fn bursts_come_whether_or_not_the_one_before_was_answered() {
    let burst = Burst { size: 5, every_ms: 100 };
    let workload = Workload { burst: Some(burst), turns: 1, ..workload(15) };
    // The first ones hang until they are given up.
    let fault = |number| if number < 5 { Mischief::Hang } else { Mischief::None };
    let lines = lines(&workload, fault, Duration::from_secs(2)).await;
    let tally = Tally::new(&lines, None);
    // Five of eight clients wait for nothing, and the others ask what is left.
    assert_eq!((tally.lost, tally.right + 5), (5, tally.requests));
    assert!(
        lines.iter().filter(|line| line.session >= 5).all(|line| line.verdict == Verdict::Right)
    );
}

#[test]
fn a_signal_ends_the_servers_too() {
    use std::os::unix::fs::PermissionsExt as _;
    use std::process::Command;
    let dir = std::env::temp_dir().join(format!("ab-signal-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a folder");
    let (plan, server, pid) = (dir.join("plan.toml.in"), dir.join("server"), dir.join("pid"));
    let text = "seed = 1\n[workload]\nkind = \"agents\"\nsessions = 1\nturns = 1\n\
        tokens_first = 400\ntokens_last = 600\nmodel = \"m\"\n[[factor]]\nname = \"a\"\n\
        levels = [{ name = \"b\" }, { name = \"c\" }]\n";
    std::fs::write(&plan, text).expect("a plan");
    // A server that is never ready.
    let script =
        format!("#!/bin/sh\necho $$ > {}.new\nmv {0}.new {0}\nexec sleep 600\n", pid.display());
    std::fs::write(&server, script).expect("a program");
    let runnable = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&server, runnable).expect("a program");
    let mut lab = Command::new(env!("CARGO_BIN_EXE_ab"));
    lab.arg("run").arg(&plan).arg("--server").arg(&server).arg("--out").arg(dir.join("out"));
    let mut lab = lab.spawn().expect("the lab runs");
    let started = || std::fs::read_to_string(&pid).ok();
    let server = loop {
        if let Some(pid) = started() {
            break pid.trim().to_owned();
        }
        assert!(
            lab.try_wait().expect("its state").is_none(),
            "the lab ended before it was told to"
        );
        std::thread::sleep(Duration::from_millis(10));
    };
    let told = Command::new("kill").arg(lab.id().to_string()).status().expect("kill runs");
    assert!(told.success());
    assert_eq!(lab.wait().expect("it ends").code(), Some(128 + 15));
    let is_there = std::path::Path::new("/proc").join(&server).exists();
    assert!(!is_there, "the server {server} goes on");
    std::fs::remove_dir_all(&dir).expect("the test's own folder");
}
