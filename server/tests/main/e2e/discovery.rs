//! Workers that come and go, found through etcd or a router's own registry.

use super::client::{Metrics, complete, essence, eventually, get, greedy, healthy, post};
use super::cluster::{Server, note};
use super::prompts::prompt;
use crate::etcd::Etcd;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;
use tokio::task::{JoinHandle, block_in_place};

/// Tokens of an answer.
const OUTPUT: u32 = 6;
/// Clients that ask one request after the other.
const CLIENTS: usize = 4;
/// For several processes on one machine.
const SMALL: &str = "--threads 1 --kv-memory-mib 96 --context-length 4096";

fn worker(mode: &str, discovery: &str) -> Server {
    let flags = "--disaggregation-transfer-backend tcp";
    block_in_place(|| Server::worker(mode, &format!("{flags} {SMALL} --discovery {discovery}")))
}

/// Prompts of a few lengths with the answers of a worker that does all by itself.
async fn known() -> Vec<(Vec<u32>, Value)> {
    let unified = block_in_place(|| Server::worker("null", SMALL));
    let mut known = Vec::new();
    for n in 0..8 {
        let ids = prompt(60 + n * 90);
        let answer = complete(&unified.url, &ids, OUTPUT).await;
        known.push((ids, answer));
    }
    known
}

/// Clients that ask without end and compare each answer.
struct Load {
    ends: Arc<AtomicBool>,
    right: Arc<AtomicUsize>,
    clients: Vec<JoinHandle<Vec<String>>>,
}

impl Load {
    fn start(url: &str, known: &[(Vec<u32>, Value)]) -> Self {
        let (ends, right) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let ask = |client: usize| {
            let (url, known) = (format!("{url}/v1/completions"), known.to_vec());
            let (ends, right) = (Arc::clone(&ends), Arc::clone(&right));
            tokio::spawn(async move {
                let mut failed = Vec::new();
                for (ids, expected) in known.iter().cycle().skip(client * 2) {
                    if ends.load(Ordering::Acquire) {
                        break;
                    }
                    let reply = post(&url, &greedy(ids, OUTPUT)).await.expect("the router answers");
                    if reply.status == 200 {
                        assert_eq!(essence(&reply.json()), *expected, "a wrong answer");
                        right.fetch_add(1, Ordering::AcqRel);
                    } else {
                        failed.push(reply.text());
                    }
                }
                failed
            })
        };
        let clients = (0..CLIENTS).map(ask).collect();
        Self { ends, right, clients }
    }

    /// Waits for more answers.
    async fn goes_on(&self, what: &str) {
        let (before, start) = (self.right.load(Ordering::Acquire), Instant::now());
        eventually("right answers go on", async || {
            assert!(self.clients.iter().all(|client| !client.is_finished()), "a client panicked");
            (self.right.load(Ordering::Acquire) >= before + 2 * CLIENTS).then_some(())
        })
        .await;
        note(&format!("{what}: {} right answers within {:?}", 2 * CLIENTS, start.elapsed()));
    }

    /// Ends it: right answers, and what was said instead of others.
    async fn end(self) -> (usize, Vec<String>) {
        self.ends.store(true, Ordering::Release);
        let mut failed = Vec::new();
        for client in self.clients {
            failed.extend(client.await.expect("no client panics"));
        }
        (self.right.load(Ordering::Acquire), failed)
    }
}

/// Waits until a router has as many ready workers.
async fn has_ready(router: &Server, count: usize) {
    let start = Instant::now();
    eventually("the router has its workers", async || {
        let health = get(&format!("{}/health", router.url)).await.ok()?.json();
        let workers = health["workers"].as_array().expect("a list").iter();
        let ready = workers.filter(|worker| worker["status"] == "ready").count();
        (ready == count).then_some(())
    })
    .await;
    note(&format!("the router has {count} ready workers after {:?}", start.elapsed()));
}

/// Waits until a decode worker is connected to as many prefill workers.
async fn has_peers(decode: &Server, count: f64) {
    eventually("the decode worker has its peers", async || {
        let metrics = Metrics::of(&decode.url).await;
        (metrics.sum("dsv4:peers", &["decode"]) == count).then_some(())
    })
    .await;
}

/// Waits until a worker has got requests.
async fn is_used(router: &Server, worker: &Server) {
    let address = worker.url.strip_prefix("http://").expect("an address");
    eventually("the worker is used", async || {
        let metrics = Metrics::of(&router.url).await;
        (metrics.sum("dsv4_router:num_requests_total", &[address]) >= 1.0).then_some(())
    })
    .await;
}

async fn says(server: &Server, part: &str) {
    eventually("the log says so", async || server.process.log_text().contains(part).then_some(()))
        .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_come_and_go_under_load_and_etcd_dies_and_returns() {
    let Some(mut etcd) = Etcd::new() else { return };
    block_in_place(|| etcd.start());
    let (known, url) = (known().await, etcd.url());
    let mut prefill: Vec<Server> = (0..3).map(|_| worker("prefill", &url)).collect();
    let mut decode: Vec<Server> = (0..2).map(|_| worker("decode", &url)).collect();
    let router = block_in_place(|| Server::router(&[], &format!("--discovery {url}")));
    has_ready(&router, 2).await;
    for decode in &decode {
        has_peers(decode, 3.0).await;
    }
    let load = Load::start(&router.url, &known);
    load.goes_on("all are there").await;
    prefill[0].process.kill();
    load.goes_on("a prefill worker was killed").await;
    prefill[1].process.terminate();
    load.goes_on("a prefill worker ended").await;
    decode[0].process.kill();
    load.goes_on("a decode worker was killed").await;
    decode.push(worker("decode", &url));
    prefill.push(worker("prefill", &url));
    has_ready(&router, 2).await;
    is_used(&router, &decode[2]).await;
    has_peers(&decode[2], 2.0).await;
    decode[1].process.terminate();
    load.goes_on("a decode worker ended").await;

    // What is known stays while etcd is dead; who comes then is known when it is back.
    etcd.kill();
    says(&router, "what is known stays").await;
    load.goes_on("etcd was killed").await;
    decode.push(worker("decode", &url));
    says(&decode[3], "what is known stays").await;
    load.goes_on("a decode worker came that nobody can hear of").await;
    block_in_place(|| etcd.start());
    has_ready(&router, 2).await;
    is_used(&router, &decode[3]).await;
    load.goes_on("etcd is back").await;
    // The same when it has lost everything.
    etcd.kill();
    etcd.forget();
    block_in_place(|| etcd.start());
    prefill.push(worker("prefill", &url));
    for decode in &decode[2..] {
        has_peers(decode, 3.0).await;
    }
    has_ready(&router, 2).await;
    load.goes_on("etcd is back without what it knew").await;

    let metrics = Metrics::of(&decode[2].url).await;
    assert!(metrics.sum("dsv4:handoffs_total", &["decode"]) >= 1.0, "prompts are handed over");
    let (right, failed) = load.end().await;
    note(&format!("{right} right answers, {} others: {failed:?}", failed.len()));
    assert_eq!(failed, Vec::<String>::new(), "there was always a worker to ask");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_that_comes_late_and_has_foreign_values_is_used_all_the_same() {
    let Some(mut etcd) = Etcd::new() else { return };
    let url = etcd.url();
    let router = block_in_place(|| Server::router(&[], &format!("--discovery {url}")));
    says(&router, "what is known stays").await;
    let health = get(&format!("{}/health", router.url)).await.expect("an answer");
    assert_eq!(health.status, 503);
    assert_eq!(health.json()["reason"], "no worker has joined yet");
    block_in_place(|| {
        etcd.start();
        etcd.put("/dsv4/test/workers/none", b"\xff not JSON");
        etcd.put("/dsv4/test/workers/other", br#"{"role":"decode"}"#);
        etcd.put("/dsv4/test-2/workers/x", b"of another namespace");
    });
    says(&router, "key=\"/dsv4/test/workers/none\"").await;
    says(&router, "key=\"/dsv4/test/workers/other\"").await;
    let unified = worker("null", &url);
    healthy(&router.url).await;
    let ids = prompt(100);
    let through = complete(&router.url, &ids, OUTPUT).await;
    assert_eq!(through, complete(&unified.url, &ids, OUTPUT).await);
    let log = router.process.log_text();
    assert!(!log.contains("test-2"), "{log}");
    assert_eq!(log.matches("workers/none").count(), 1, "it is said once: {log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_find_each_other_through_a_routers_registry() {
    let mut router = block_in_place(|| Server::router(&[], "--registry-port 0"));
    let line = block_in_place(|| router.process.wait_for("workers register with"));
    let registry = line.rsplit_once(' ').expect("an address follows").1.to_owned();
    let prefill = worker("prefill", &registry);
    let decode = worker("decode", &registry);
    has_ready(&router, 1).await;
    has_peers(&decode, 1.0).await;
    let listed = get(&format!("{registry}/workers")).await.expect("an answer").ok();
    assert_eq!(listed["workers"].as_array().map(Vec::len), Some(2), "{listed}");
    let unified = block_in_place(|| Server::worker("null", SMALL));
    let ids = prompt(700);
    let answer = complete(&router.url, &ids, OUTPUT).await;
    assert_eq!(answer, complete(&unified.url, &ids, OUTPUT).await);
    let metrics = Metrics::of(&decode.url).await;
    assert_eq!(metrics.sum("dsv4:handoffs_total", &["decode"]), 1.0);
    prefill.process.terminate();
    eventually("it is not listed any more", async || {
        let listed = get(&format!("{registry}/workers")).await.ok()?.json();
        (listed["workers"].as_array()?.len() == 1).then_some(())
    })
    .await;
    // The API's port does not take registrations.
    let reply = get(&format!("{}/workers", router.url)).await.expect("an answer");
    assert_eq!(reply.status, 404);
}
