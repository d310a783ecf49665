//! KV events of real servers: a copy that is kept by them is what the server says of itself.

use super::client::{Metrics, complete, eventually, greedy, post};
use super::cluster::{MODEL, PATIENCE, Process, Server, note};
use super::folder::Folder;
use super::prompts::prompt;
use super::warm::talk;
use crate::kv_events::{Mirror, received, replayed, sleeper, subscribed};
use serde_json::Value;
use std::ffi::OsString;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use tokio::sync::mpsc::unbounded_channel;
use tokio::time::timeout;

/// Device memory for one long prompt or two.
const SMALL: &str =
    "--context-length 1536 --max-running-requests 2 --kv-memory-mib 7 --chunked-prefill-size 256";
const EVENTS: &str = concat!(
    "--kv-events-config ",
    r#"{"publisher":"zmq","endpoint":"tcp://*:0","replay_endpoint":"tcp://127.0.0.1:0"}"#
);
/// Python interpreter that has what `xtask/requirements.txt` names.
const PYTHON: &str = "DSV4_TEST_PYTHON";
const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/python/kv_events.py");

/// A server with its two addresses.
struct Told {
    server: Server,
    events: SocketAddr,
    replay: SocketAddr,
    mirror: Mirror,
    next_seq: u64,
}

impl Told {
    fn start(mode: &str, flags: &str) -> Self {
        let mut server = Server::worker(mode, &format!("{flags} {EVENTS}"));
        let (events, replay) = addresses(&mut server);
        Self { server, events, replay, mirror: Mirror::default(), next_seq: 0 }
    }

    fn url(&self) -> &str {
        &self.server.url
    }

    /// The mirror once so many blocks are on disk and it agrees with what the server says of itself,
    /// which it does as soon as the server has nothing more to do.
    async fn agreed(&mut self, on_disk: usize) -> &Mirror {
        let Self { server, replay, mirror, next_seq, .. } = self;
        eventually("the mirror is the server's cache", async || {
            let metrics = Metrics::of(&server.url).await;
            for (seq, payload) in replayed(*replay, *next_seq).await {
                assert_eq!(seq, *next_seq, "a gap");
                *next_seq += 1;
                mirror.apply(&payload);
            }
            let blocks = |name, labels: &[&str]| metrics.sum(name, labels) as usize;
            let objects = |tier| blocks("dsv4:cache_objects", &[tier, "part=\"block\""]);
            let device = blocks("dsv4:pages", &["block", "state=\"cached\""]);
            let disk = objects("disk");
            let there = [device, objects("host"), disk];
            let told = ["GPU", "CPU_PINNED", "DISK"].map(|medium| mirror.count(medium));
            let idle = metrics.sum("sglang:num_running_reqs", &[]) == 0.0;
            (idle && there == told && disk == on_disk).then_some(())
        })
        .await;
        &self.mirror
    }
}

fn addresses(server: &mut Server) -> (SocketAddr, SocketAddr) {
    let line = server.process.wait_for("KV events are published on");
    let mut found = line.split("tcp://").skip(1).map(|rest| {
        let end = rest.find(|c: char| c == ',' || c.is_whitespace()).unwrap_or(rest.len());
        rest[..end].parse::<SocketAddr>().expect("an address")
    });
    (found.next().expect("one"), found.next().expect("another"))
}

async fn flush(url: &str, query: &str) {
    post(&format!("{url}/flush_cache{query}"), &Value::Null).await.expect("an answer").ok();
}

/// Prompts that the pages cannot all hold, host memory neither; a restart with what is on disk; and
/// what is flushed. All the while a subscriber is connected that does not read.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copy_kept_by_events_is_what_pages_host_memory_and_disk_have() {
    let dir = Folder::new();
    let flags = format!("{SMALL} --hicache-size 0.002 --hicache-storage-dir {}", dir.0.display());
    let mut told = Told::start("null", &flags);
    let asleep = sleeper(told.events);
    let mut live = subscribed(told.events).await;
    let talks: Vec<Vec<u32>> = (0..6).map(|number| talk(number, 1030)).collect();
    for (n, ids) in talks.iter().enumerate() {
        complete(told.url(), ids, 4).await;
        told.agreed(4 * (n + 1)).await;
    }
    complete(told.url(), &talks[0], 4).await;
    let mirror = told.agreed(24).await.clone();
    // Each block has the tokens of a prompt, behind those before it.
    for hashes in mirror.blocks.values() {
        for hash in hashes {
            let prefix = mirror.prefix(*hash);
            assert!(talks.iter().any(|ids| ids.starts_with(&prefix)), "{} tokens", prefix.len());
        }
    }
    assert_eq!(mirror.contents.len(), 6 * 4, "full blocks of all prompts");
    assert!(mirror.seen["BlockRemoved"] > 0 && mirror.seen["AllBlocksCleared"] == 1);
    let counts = ["GPU", "CPU_PINNED", "DISK"].map(|medium| mirror.count(medium));
    assert!(counts[0] < 24 && counts[1] < 24 && counts[2] == 24, "{counts:?}");
    // Who has listened since before the first prompt was told the same.
    let mut seq = received(&mut live).await.1;
    while seq + 1 < told.next_seq {
        let (_, next, _) = received(&mut live).await;
        assert_eq!(std::mem::replace(&mut seq, next) + 1, next);
    }
    let metrics = Metrics::of(told.url()).await;
    let count = |name: &str| metrics.sum(&format!("dsv4:kv_events_{name}"), &["unified"]);
    assert_eq!([count("dropped_total"), count("missed_total"), count("subscribers")], [0., 0., 2.]);
    drop(asleep);

    flush(told.url(), "").await;
    let mirror = told.agreed(24).await;
    assert_eq!((mirror.count("GPU"), mirror.count("CPU_PINNED")), (0, 0));
    assert!(mirror.count("DISK") == 24 && mirror.seen["AllBlocksCleared"] == 1);
    flush(told.url(), "?storage=true").await;
    let mirror = told.agreed(0).await;
    assert_eq!((mirror.count("DISK"), mirror.seen["AllBlocksCleared"]), (0, 2));
}

/// What a store has from before is told when its tokens are known, and then wherever it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_found_on_disk_are_told_when_they_are_loaded() {
    let dir = Folder::new();
    let dir_flag = format!("--hicache-storage-dir {}", dir.0.display());
    let mut told = Told::start("null", &dir_flag);
    let ids = talk(1, 1030);
    complete(told.url(), &ids, 4).await;
    let before = told.agreed(4).await.clone();
    told.server.process.terminate();
    assert!(told.server.process.wait_exit().success());
    drop(told);
    let mut told = Told::start("null", &dir_flag);
    let first: Vec<_> = replayed(told.replay, 0).await;
    first.iter().for_each(|(_, payload)| told.mirror.apply(payload));
    told.next_seq = first.len() as u64;
    assert!(told.mirror.contents.is_empty(), "nobody knows their tokens");
    complete(told.url(), &ids, 4).await;
    let after = told.agreed(4).await;
    assert_eq!((&after.blocks, &after.contents), (&before.blocks, &before.contents));
}

/// Of two workers in a process it is the one that computes prompts that publishes; and nobody is told
/// of blocks under a salt.
#[tokio::test]
async fn prefill_worker_publishes_for_both_and_nothing_that_is_salted() {
    let told = Told::start("both", "--hicache-size 0.2");
    let ids = talk(2, 600);
    let mut salted = greedy(&ids, 4);
    salted["cache_salt"] = "tenant".into();
    post(&format!("{}/v1/completions", told.url()), &salted).await.expect("an answer").ok();
    complete(told.url(), &talk(3, 300), 4).await;
    let mut mirror = Mirror::default();
    let (url, replay) = (told.url(), told.replay);
    let mut next_seq = 0;
    eventually("the prompt without a salt is told", async || {
        for (seq, payload) in replayed(replay, next_seq).await {
            next_seq = seq + 1;
            mirror.apply(&payload);
        }
        assert!(mirror.contents.len() <= 1, "a salted block is told");
        (mirror.count("CPU_PINNED") == 1).then_some(())
    })
    .await;
    let [(_, tokens)] = &mirror.contents.values().collect::<Vec<_>>()[..] else {
        panic!("{mirror:?}");
    };
    assert_eq!(tokens[..], talk(3, 300)[..256]);
    let metrics = Metrics::of(url).await;
    let published = metrics.sum("dsv4:kv_events_published_total", &[]);
    assert!(published >= 2.0);
    assert_eq!(metrics.sum("dsv4:kv_events_published_total", &["prefill"]), published);
    assert_eq!(metrics.sum("dsv4:pages", &["prefill", "block", "state=\"cached\""]), 3.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_fields_and_taken_endpoints_are_said_at_start() {
    let taken = std::net::TcpListener::bind(("0.0.0.0", 0)).expect("a port");
    let port = taken.local_addr().expect("it has an address").port();
    for (config, says) in [
        (r#"{"publisher":"zmq","hwm":"many"}"#.to_owned(), "hwm: a number"),
        (r#"{"publisher":"zmq","topics":"a"}"#.to_owned(), "unknown field \"topics\""),
        (format!(r#"{{"publisher":"zmq","endpoint":"tcp://*:{port}"}}"#), "endpoint tcp://*:"),
    ] {
        let args = ["--port", "0", "--model-path", MODEL, "--kv-events-config", &config];
        let mut process = Process::spawn(&args.map(str::to_owned));
        let status = tokio::task::block_in_place(|| process.wait_exit());
        assert!(!status.success(), "{config}");
        let log = process.log_text();
        assert!(log.contains("--kv-events-config") && log.contains(says), "{config}: {log}");
    }
}

/// The interpreter; without one a test says that it did nothing, except in CI.
fn python() -> Option<OsString> {
    let python = std::env::var_os(PYTHON);
    if python.is_none() {
        let missing =
            format!("{PYTHON} is not set: libzmq was not tried; `cargo xtask test e2e` sets it");
        assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{missing}");
        note(&missing);
    }
    python
}

/// The same with libzmq, and with a decoder that is told the types of SGLang's events.
#[tokio::test]
async fn python_subscriber_with_libzmq_and_msgspec_reads_what_is_published() {
    let Some(python) = python() else { return };
    let told = Told::start("null", "");
    let (url, events, replay) = (told.url().to_owned(), told.events.port(), told.replay.port());
    let mut command = Command::new(&python);
    command.arg(SCRIPT).arg(url).arg(events.to_string()).arg(replay.to_string());
    let output = tokio::task::spawn_blocking(move || command.output());
    let output = output.await.expect("no panic").expect("the interpreter starts");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("all is well"), "{out}\n{err}");
}

/// Ends a process, also when a test fails.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn python_example_says_what_a_cache_holds() {
    let Some(python) = python() else { return };
    let told = Told::start("null", "--enable-hierarchical-cache=false");
    let prompt = prompt(700);
    let path = format!("{}/v1/completions", told.url());
    // What is asked for before the example comes is replayed, and what is asked for later heard.
    post(&path, &greedy(&prompt[..300], 1)).await.expect("an answer").ok();
    let mut command = Command::new(&python);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/kv_events.py"));
    command.arg(format!("tcp://{}", told.events)).arg(format!("tcp://{}", told.replay));
    let mut example = Killed(command.stdout(Stdio::piped()).spawn().expect("the interpreter"));
    let lines = BufReader::new(example.0.stdout.take().expect("it is piped")).lines();
    let (send, mut said) = unbounded_channel();
    std::thread::spawn(move || {
        // The test may have what it wants.
        lines.map_while(Result::ok).try_for_each(|line| send.send(line))
    });
    let mut until = async |part: &str| loop {
        let line = timeout(PATIENCE, said.recv()).await.expect("it says something");
        if line.expect("it goes on").ends_with(part) {
            return;
        }
    };
    until("1 came, 0 went; there are 1 GPU").await;
    post(&path, &greedy(&prompt, 1)).await.expect("an answer").ok();
    until("there are 2 GPU").await;
    let flush = format!("{}/flush_cache", told.url());
    post(&flush, &serde_json::json!({})).await.expect("an answer").ok();
    until("there are none").await;
}
