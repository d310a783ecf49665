//! Prefixes that come back from host memory and from disk: the answers of a cold start, or a miss.

use super::accounts::assert_all_given_back;
use super::client::{Metrics, complete, essence, eventually, greedy, healthy, post};
use super::cluster::{PATIENCE, Pair, Server};
use super::folder::Folder;
use super::prompts::prompt;
use super::warm::{OUTPUT, ask, talk, written};
use super::workers::Workers;
use dsv4_server::engine::Engine as _;
use dsv4_server::node::{NodeOptions, WrapStore};
use futures_util::future::join_all;
use hicache::ObjectKey;
use hicache::store::{BlobStore, Listed, StoreError};
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

const COLD: &str = "--disable-radix-cache";
/// Device memory for one long prompt or two.
const SMALL: &str =
    "--context-length 1536 --max-running-requests 2 --kv-memory-mib 7 --chunked-prefill-size 256";

async fn alone(url: &str, prompts: &[Vec<u32>]) -> Vec<Value> {
    let mut answers = Vec::new();
    for ids in prompts {
        answers.push(ask(url, ids).await.0);
    }
    answers
}

/// The same of a request with `cache_salt`.
async fn ask_as(url: &str, salt: &str, ids: &[u32]) -> (Value, u64) {
    let mut body = greedy(ids, OUTPUT);
    body["cache_salt"] = salt.into();
    let answer = post(&format!("{url}/v1/completions"), &body).await.expect("an answer").ok();
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    (essence(&answer), cached.as_u64().expect("cached tokens are counted"))
}

fn storage(dir: &Path) -> String {
    format!("--hicache-storage-dir {}", dir.display())
}

/// More conversations than the pages hold, one after the other and again: each second time the
/// prefix comes from host memory, or from disk where that is too small as well.
#[tokio::test]
async fn answers_are_equal_after_eviction_and_return_from_host_and_disk() {
    let cold = Server::worker("null", COLD);
    let dir = Folder::new();
    // The second time one turn longer.
    let turns: Vec<Vec<u32>> = (0..12).map(|n| talk(n % 6, 1030 + 50 * (n as usize / 6))).collect();
    let expected: Vec<Value> = alone(&cold.url, &turns).await;
    for (what, mode, flags) in [
        ("host", "null", "--hicache-size 0.2".to_owned()),
        ("host", "both", "--hicache-size 0.2".to_owned()),
        ("host", "null", "--hicache-size 0.2 --hicache-write-policy write_back".to_owned()),
        ("host", "both", "--hicache-size 0.2 --hicache-write-policy write_back".to_owned()),
        ("disk", "null", format!("--hicache-size 0.002 {}", storage(&dir.0))),
    ] {
        let warm = Server::worker(mode, &format!("{SMALL} {flags}"));
        let mut hits = 0;
        for (n, (ids, answer)) in turns.iter().zip(&expected).enumerate() {
            let (found, cached) = ask(&warm.url, ids).await;
            assert_eq!(found, *answer, "{what}, {mode}, turn {n}");
            hits += u32::from(n >= 6 && cached == 1024);
            if what == "disk" {
                written(&warm.url, "disk").await;
            }
        }
        assert!(hits >= 5, "{what}, {mode}: {hits} of 6 came back");
        let metrics = Metrics::of(&warm.url).await;
        let tokens = metrics.sum("dsv4:cache_tokens_total", &[what]);
        assert!(tokens >= 2.0 * 1024.0, "{what}, {mode}: {tokens} tokens");
        // The last answer said where its prefix came from.
        let answer = post(&format!("{}/v1/completions", warm.url), &greedy(&turns[6], 1)).await;
        let usage = answer.expect("an answer").ok()["usage"]["prompt_tokens_details"].take();
        let from = |tier: &str| usage["cached_tokens_details"][tier].as_u64().expect("a number");
        let tiers: u64 = ["device", "host", "disk", "remote"].into_iter().map(from).sum();
        assert_eq!((tiers, from("remote")), (1024, 0), "{usage}");
        assert!(from(what) >= 256, "{what}, {mode}: {usage}");
        for bad in ["mismatches", "failures", "missing"] {
            let name = format!("dsv4:cache_{bad}_total");
            assert_eq!(metrics.sum(&name, &[]), 0.0, "{bad}, {what}, {mode}");
        }
        assert_all_given_back(&[&warm.url]).await;
    }
}

/// A process that ends in good order and starts again has what it had.
#[tokio::test]
async fn conversation_goes_on_from_disk_after_a_restart() {
    let cold = Server::worker("null", COLD);
    let dir = Folder::new();
    let mut server = Server::worker("null", &storage(&dir.0));
    let ids = prompt(2300);
    let (answer, _) = ask(&cold.url, &ids[..2100]).await;
    assert_eq!(ask(&server.url, &ids[..2100]).await, (answer, 0));
    server.process.terminate();
    assert!(server.process.wait_exit().success());
    server.restart();
    for n in [2100, 2049, 2300, 600] {
        let (answer, _) = ask(&cold.url, &ids[..n]).await;
        let (found, cached) = ask(&server.url, &ids[..n]).await;
        assert_eq!(found, answer, "{n} tokens");
        // Of 600 tokens no boundary was ever kept.
        let expected = if n == 600 { 0 } else { 2048 };
        assert_eq!(cached, expected, "{n} tokens");
    }
    let metrics = Metrics::of(&server.url).await;
    assert_eq!(metrics.sum("dsv4:cache_tokens_total", &["disk"]), 2048.0);
    assert_all_given_back(&[&server.url]).await;
}

/// Killed at any moment, also with half of its writes under way.
#[tokio::test]
async fn killed_server_finds_only_what_is_whole() {
    let cold = Server::worker("null", COLD);
    let dir = Folder::new();
    let mut server = Server::worker("null", &storage(&dir.0));
    for round in 0..3 {
        let asked: Vec<_> = (0..3).map(|number| talk(round * 3 + number, 800)).collect();
        join_all(asked.iter().map(|ids| complete(&server.url, ids, OUTPUT))).await;
        server.process.kill();
        server.restart();
        for ids in &asked {
            let (answer, _) = ask(&cold.url, ids).await;
            assert_eq!(ask(&server.url, ids).await.0, answer);
        }
        let metrics = Metrics::of(&server.url).await;
        assert_eq!(metrics.sum("dsv4:cache_mismatches_total", &[]), 0.0, "round {round}");
    }
    assert_all_given_back(&[&server.url]).await;
}

/// Every object on disk is damaged in another place: each is noticed, none is used.
#[tokio::test]
async fn damaged_objects_are_misses_that_are_counted() {
    let cold = Server::worker("null", COLD);
    let dir = Folder::new();
    let mut server = Server::worker("null", &storage(&dir.0));
    let ids = prompt(1300);
    let (answer, _) = ask(&cold.url, &ids).await;
    assert_eq!(ask(&server.url, &ids).await, (answer.clone(), 0));
    written(&server.url, "disk").await;
    server.process.terminate();
    assert!(server.process.wait_exit().success());
    let mut damaged = 0;
    for file in objects_below(&dir.0) {
        let mut bytes = std::fs::read(&file).expect("an object");
        let at = (damaged * 9_973 + 777) % bytes.len();
        bytes[at] ^= 1 << (damaged % 8);
        std::fs::write(&file, bytes).expect("damage it");
        damaged += 1;
    }
    assert!(damaged > 5, "{damaged} objects");
    server.restart();
    assert_eq!(ask(&server.url, &ids).await, (answer.clone(), 0), "nothing of use is left");
    let metrics = Metrics::of(&server.url).await;
    let mismatches = metrics.sum("dsv4:cache_mismatches_total", &["disk"]);
    assert!(mismatches >= 1.0, "{mismatches}");
    assert_eq!(metrics.sum("dsv4:cache_tokens_total", &[]), 0.0);
    // What was found to be wrong is written anew, and right.
    assert_eq!(ask(&server.url, &ids).await.0, answer);
    assert_all_given_back(&[&server.url]).await;
}

fn objects_below(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).expect("a folder") {
        let path = entry.expect("an entry").path();
        let kind = path.extension().and_then(|kind| kind.to_str()).unwrap_or_default();
        if path.is_dir() {
            found.append(&mut objects_below(&path));
        } else if ["block", "boundary"].contains(&kind) {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// A decode worker keeps blocks only, and pulls what it has not.
#[tokio::test]
async fn decode_worker_asks_only_for_what_no_tier_of_its_own_has() {
    let cold = Server::worker("null", COLD);
    let flags = format!("{SMALL} --hicache-size 0.2");
    let pair = Pair::start("shm", &flags);
    healthy(&pair.decode.url).await;
    for round in 0..2 {
        for number in 0..6 {
            let ids = talk(number, 1030 + round * 50);
            let (answer, _) = ask(&cold.url, &ids).await;
            let (found, _) = ask(&pair.decode.url, &ids).await;
            assert_eq!(found, answer, "talk {number}, round {round}");
        }
    }
    // A decode worker's pages hold more blocks, since it keeps no boundaries.
    for (url, role, least) in
        [(&pair.prefill.url, "prefill", 2 * 1024), (&pair.decode.url, "decode", 512)]
    {
        let metrics = Metrics::of(url).await;
        let tokens = metrics.sum("dsv4:cache_tokens_total", &["host", role]);
        assert!(tokens >= f64::from(least), "{role}: {tokens}");
        assert_eq!(metrics.sum("dsv4:prompts_recomputed_total", &[role]), 0.0);
    }
    assert_all_given_back(&[&pair.prefill.url, &pair.decode.url]).await;
}

/// A client that hangs up while its prefix is loaded leaves nothing behind.
#[tokio::test]
async fn clients_that_leave_while_a_prefix_is_loaded_leave_nothing() {
    let dir = Folder::new();
    let flags = format!("{SMALL} --hicache-size 0.01 {}", storage(&dir.0));
    let warm = Server::worker("null", &flags);
    for number in 0..4 {
        complete(&warm.url, &talk(number, 1300), 1).await;
    }
    written(&warm.url, "disk").await;
    let url = format!("{}/v1/completions", warm.url);
    for turn in 0..40_u32 {
        let body = greedy(&talk(turn % 4, 1310), OUTPUT);
        let patience = std::time::Duration::from_micros(u64::from(turn) * 300);
        // Whether it answers in time says nothing.
        let _ = tokio::time::timeout(patience, post(&url, &body)).await;
    }
    assert_all_given_back(&[&warm.url]).await;
    let cold = Server::worker("null", COLD);
    let ids = talk(1, 1320);
    assert_eq!(ask(&warm.url, &ids).await.0, ask(&cold.url, &ids).await.0);
}

/// Requests of another salt share nothing, on the device, below it and over a hand-off.
#[tokio::test]
async fn prefixes_are_shared_only_with_requests_of_the_same_salt() {
    let both = Server::worker("both", "--hicache-size 0.2");
    let ids = prompt(600);
    let (answer, cached) = ask(&both.url, &ids).await;
    assert_eq!(cached, 0);
    for (salt, expected) in [("a", 0), ("b", 0), ("a", 512), ("b", 512)] {
        assert_eq!(ask_as(&both.url, salt, &ids).await, (answer.clone(), expected), "{salt}");
    }
    assert_eq!(ask(&both.url, &ids).await, (answer, 512));
    for bad in [Value::from(""), Value::from("x".repeat(257)), Value::from(7)] {
        let mut body = greedy(&ids, 1);
        body["cache_salt"] = bad.clone();
        let reply = post(&format!("{}/v1/completions", both.url), &body).await.expect("an answer");
        assert_eq!(reply.status, 400, "{bad}");
        assert!(reply.text().contains("cache_salt"), "{}", reply.text());
    }
}

/// Host memory for a few prompts, and many that come by: what was pinned stays, until its time is
/// over or the cache is flushed.
#[tokio::test]
async fn pinned_prefixes_outlive_others_in_host_memory() {
    let cold = Server::worker("null", COLD);
    let (pinned, short) = (talk(100, 1100), talk(101, 600));
    let (expected, _) = ask(&cold.url, &pinned).await;
    for (mode, policy) in
        [("null", "write_through"), ("null", "write_back"), ("both", "write_through_selective")]
    {
        let flags = format!("{SMALL} --hicache-size 0.005 --hicache-write-policy {policy}");
        let warm = Server::worker(mode, &flags);
        let what = format!("{mode}, {policy}");
        let url = format!("{}/v1/completions", warm.url);
        let wish = |ids: &[u32], wish: Value| {
            let mut body = greedy(ids, OUTPUT);
            body["cache_control"] = wish;
            body
        };
        post(&url, &wish(&pinned, json!({"ttl": "1h"}))).await.expect("an answer").ok();
        post(&url, &wish(&short, json!({"ttl": 1}))).await.expect("an answer").ok();
        for number in 0..7 {
            complete(&warm.url, &talk(number, 1200), 1).await;
        }
        assert_eq!(ask(&warm.url, &pinned).await, (expected.clone(), 1024), "{what}");
        // It was no longer on the device.
        let metrics = Metrics::of(&warm.url).await;
        let tokens = metrics.sum("dsv4:cache_tokens_total", &["host"]);
        assert!(tokens >= 512.0, "{what}: {tokens} tokens from host memory");
        eventually("the short pin is over", async || {
            let metrics = Metrics::of(&warm.url).await;
            (metrics.sum("dsv4:cache_pinned_objects", &["block"]) == 4.0).then_some(())
        })
        .await;
        post(&format!("{}/flush_cache", warm.url), &Value::Null).await.expect("an answer").ok();
        eventually("no pin is left", async || {
            let metrics = Metrics::of(&warm.url).await;
            (metrics.sum("dsv4:cache_pinned_objects", &[]) == 0.0).then_some(())
        })
        .await;
        assert_eq!(ask(&warm.url, &pinned).await.1, 0, "{what}");
        // Pins end where others would find no room, and a refused one is an answer as well.
        for number in 0..4 {
            let body = wish(&talk(number, 1100), json!({"pin": true}));
            post(&url, &body).await.expect("an answer").ok();
        }
        let metrics = Metrics::of(&warm.url).await;
        assert!(metrics.sum("dsv4:cache_pins_refused_total", &[]) > 0.0, "{what}");
        let reply = post(&url, &wish(&short, json!({"ttl": "soon"}))).await.expect("an answer");
        assert_eq!(reply.status, 400);
        assert!(reply.text().contains("cache_control.ttl"), "{}", reply.text());
        assert_all_given_back(&[&warm.url]).await;
    }
}

/// What is saved when a second prompt uses it, is: wherever its pages are, and not before.
#[tokio::test]
async fn selective_policy_saves_what_is_used_twice() {
    for mode in ["null", "both"] {
        let flags = "--hicache-write-policy write_through_selective";
        let server = Server::worker(mode, flags);
        let stored =
            async || Metrics::of(&server.url).await.sum("dsv4:cache_objects", &["host", "block"]);
        ask(&server.url, &prompt(1000)).await;
        ask(&server.url, &talk(3, 1000)).await;
        assert_eq!(stored().await, 0.0, "{mode}: nobody has used it again");
        assert_eq!(ask(&server.url, &prompt(1000)).await.1, 768, "{mode}");
        eventually("it is saved", async || (stored().await == 3.0).then_some(())).await;
        assert_all_given_back(&[&server.url]).await;
    }
}

/// The policy that saves before pages go saves nothing while there are enough.
#[tokio::test]
async fn write_back_leaves_an_empty_worker_alone() {
    let server = Server::worker("null", "--hicache-write-policy write_back");
    for number in 0..3 {
        ask(&server.url, &talk(number, 700)).await;
    }
    let metrics = Metrics::of(&server.url).await;
    assert_eq!(metrics.sum("dsv4:cache_stored_total", &["host"]), 0.0);
    assert_all_given_back(&[&server.url]).await;
}

/// What is flushed is not found again: on the device and in host memory, or on disk as well.
#[tokio::test]
async fn flushed_prefixes_are_computed_again() {
    let dir = Folder::new();
    let server = Server::worker("null", &storage(&dir.0));
    let ids = prompt(800);
    let (answer, _) = ask(&server.url, &ids).await;
    written(&server.url, "disk").await;
    let flush = async |query: &str| {
        let url = format!("{}/flush_cache{query}", server.url);
        post(&url, &Value::Null).await.expect("an answer").ok()
    };
    let flushed = flush("").await;
    assert_eq!(
        (flushed["device_blocks"].as_u64(), flushed["disk_objects"].as_u64()),
        (Some(3), Some(0))
    );
    assert!(flushed["host_objects"].as_u64() >= Some(4), "{flushed}");
    // It is on disk still.
    assert_eq!(ask(&server.url, &ids).await, (answer.clone(), 768));
    written(&server.url, "disk").await;
    let flushed = flush("?storage=true").await;
    assert!(flushed["disk_objects"].as_u64() >= Some(4), "{flushed}");
    eventually("the folder is empty", async || objects_below(&dir.0).is_empty().then_some(()))
        .await;
    assert_eq!(ask(&server.url, &ids).await, (answer, 0));
    // Nor what was on its way when it was flushed.
    for number in 0..6 {
        ask(&server.url, &talk(40 + number, 1000)).await;
        flush("?storage=true").await;
    }
    let gone = async || {
        let metrics = Metrics::of(&server.url).await;
        let objects = metrics.sum("dsv4:cache_objects", &["disk"]);
        (objects == 0.0 && objects_below(&dir.0).is_empty()).then_some(())
    };
    eventually("nothing is left", gone).await;
    let bad = post(&format!("{}/flush_cache?storage=maybe", server.url), &Value::Null).await;
    assert_eq!(bad.expect("an answer").status, 400);
    assert_all_given_back(&[&server.url]).await;
}

/// A store that does not answer any more once it is told so.
#[derive(Debug)]
struct Silent(Arc<dyn BlobStore>, Arc<AtomicBool>);

impl BlobStore for Silent {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn read(&self, key: &ObjectKey, into: &mut [u8]) -> Result<(), StoreError> {
        while self.1.load(Ordering::Acquire) {
            std::thread::park();
        }
        self.0.read(key, into)
    }

    fn write(&self, key: &ObjectKey, bytes: &[u8]) -> Result<(), StoreError> {
        self.0.write(key, bytes)
    }

    fn remove(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.0.remove(key)
    }

    fn list(&self, found: &mut dyn FnMut(Listed)) -> Result<(), StoreError> {
        self.0.list(found)
    }

    fn size(&self, key: &ObjectKey) -> Result<Option<u64>, StoreError> {
        self.0.size(key)
    }

    fn touch(&self, key: &ObjectKey) -> Result<(), StoreError> {
        self.0.touch(key)
    }
}

/// A disk that never answers costs prefixes, then is left alone, and keeps no process alive.
#[tokio::test(flavor = "multi_thread")]
async fn silent_disk_is_left_alone_and_keeps_no_process() {
    let is_silent = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&is_silent);
    let wrap_store: WrapStore =
        Box::new(move |store| Arc::new(Silent(store, Arc::clone(&flag))) as Arc<dyn BlobStore>);
    let options = NodeOptions { wrap_store: Some(wrap_store), ..NodeOptions::default() };
    let dir = Folder::new();
    let workers = Workers::start("null", &storage(&dir.0), &options);
    let mut answers = Vec::new();
    for number in 0..5_u32 {
        let (answer, _) = workers.answer(talk(number, 600), 8).await.expect("an answer");
        answers.push(answer);
    }
    let engine = workers.node().engine();
    let stored = async || (objects_below(&dir.0).len() >= 10).then_some(());
    eventually("all is on disk", stored).await;
    engine.flush_cache(false).await;
    is_silent.store(true, Ordering::Release);
    for (number, expected) in (0..).zip(&answers) {
        let (answer, usage) = workers.answer(talk(number, 600), 8).await.expect("an answer");
        assert_eq!((&answer, usage.cached_tokens), (expected, 0));
    }
    eventually("the store is left alone", async || {
        let late = workers.metric("dsv4:cache_late_total", "disk");
        let pauses = workers.metric("dsv4:cache_pauses_total", "disk");
        (late >= 3 && pauses >= 1).then_some(())
    })
    .await;
    let started = Instant::now();
    drop(workers);
    assert!(started.elapsed() < PATIENCE / 2, "its threads keep nobody from ending");
}

/// A file size limit is an error of the write, and not the end of the process.
#[tokio::test]
async fn file_size_limit_does_not_end_the_process() {
    let cold = Server::worker("null", COLD);
    let dir = Folder::new();
    let mut server = Server::worker("null", &storage(&dir.0));
    let pid = Pid::from_child(&server.process.child);
    let limit = Rlimit { current: Some(50_000), maximum: None };
    prlimit(Some(pid), Resource::Fsize, limit).expect("set a limit");
    for number in 0..3 {
        let ids = talk(number, 600);
        assert_eq!(ask(&server.url, &ids).await.0, ask(&cold.url, &ids).await.0);
    }
    eventually("writes fail and are counted", async || {
        let metrics = Metrics::of(&server.url).await;
        (metrics.sum("dsv4:cache_failures_total", &["disk"]) > 0.0).then_some(())
    })
    .await;
    server.process.terminate();
    assert!(server.process.wait_exit().success());
}
