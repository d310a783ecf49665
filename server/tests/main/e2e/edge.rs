//! The edge of real processes: what they say while they load and when they stall, TLS, probes, aborts,
//! and memory under connections that mean no good.

use super::client::{Events, Metrics, eventually, get, greedy, healthy, post};
use super::cluster::{MODEL, Pair, Process, Server};
use super::prompts::prompt;
use super::workers::Workers;
use crate::edge::Files;
use dsa_kernels::ops::*;
use dsa_kernels::{KernelError, Kernels};
use dsv4_server::engine::{Engine as _, Health};
use dsv4_server::node::NodeOptions;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::sync::{Arc, Condvar, Mutex};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

fn args(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address").port()
}

#[tokio::test]
async fn a_process_says_what_it_does_while_it_loads() {
    let port = free_port();
    let flags = format!("--port {port} --disaggregation-mode null --model-path {MODEL}");
    let _process = Process::spawn(&args(&flags));
    let url = format!("http://127.0.0.1:{port}");
    let mut reasons = Vec::new();
    eventually("it is ready", async || {
        let reply = get(&format!("{url}/readyz")).await.ok()?;
        if reply.status == 200 {
            return Some(());
        }
        assert_eq!((reply.status, &reply.json()["status"]), (503, &json!("starting")));
        reasons.push(reply.json()["reason"].as_str().expect("a reason").to_owned());
        // Before or after it became ready in between.
        let models = get(&format!("{url}/v1/models")).await.expect("an answer");
        assert!(models.status == 200 || models.headers.contains_key("retry-after"));
        None
    })
    .await;
    assert!(!reasons.is_empty(), "nothing was said while the model was loaded");
    assert!(reasons.iter().all(|reason| reason.contains("load") || reason.contains("opening")));
}

#[tokio::test]
async fn a_certificate_is_read_at_the_start_and_on_sighup() {
    let files = Files::new();
    let flags = format!(
        "--port 0 --disaggregation-mode null --kv-memory-mib 192 --context-length 16384 \
         --model-path {MODEL} --ssl-certfile {} --ssl-keyfile {}",
        files.cert().display(),
        files.key().display()
    );
    let mut process = Process::spawn(&args(&flags));
    let line = process.wait_for(" is ready on https://");
    let address = line.split("https://").nth(1).and_then(|rest| rest.split(' ').next());
    let address = address.and_then(|text| text.parse().ok()).expect("an address");
    assert!(process.wait_for("curl ").contains("https://"));
    let mut stream = files.connect(address, &[b"http/1.1"]).await.expect("a handshake");
    stream
        .write_all(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await
        .expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    files.renew();
    process.signal(Signal::HUP);
    eventually("the new certificate", async || files.connect(address, &[]).await.ok().map(drop))
        .await;
    std::fs::write(files.key(), "no key").expect("write a file");
    process.signal(Signal::HUP);
    process.logged("the old certificate stays");
    files.connect(address, &[]).await.expect("the old one is in use");
    // A start with such files is an error that names the file.
    process.terminate();
    assert!(process.wait_exit().success());
    let mut refused = Process::spawn(&args(&flags));
    refused.expect_error("--ssl-keyfile");
    assert!(!refused.wait_exit().success());
    let log = refused.log_text();
    assert!(log.contains("error: --ssl-keyfile ") && log.contains("no private key"), "{log}");
}

#[tokio::test]
async fn probes_facts_and_aborts_of_real_workers() {
    let mut pair = Pair::start("tcp", "");
    healthy(&pair.decode.url).await;
    let router = Server::router(&[&pair.prefill, &pair.decode], "");
    healthy(&router.url).await;
    for url in [&pair.prefill.url, &pair.decode.url, &router.url] {
        let reply = get(&format!("{url}/health_generate")).await.expect("an answer").ok();
        assert_eq!(reply["status"], "ready", "{url}");
        assert_eq!(get(&format!("{url}/readyz")).await.expect("an answer").status, 200);
    }
    let info = get(&format!("{}/server_info", pair.decode.url)).await.expect("an answer").ok();
    assert_eq!(info["disaggregation_mode"], "decode");
    assert_eq!(info["flags"]["context-length"]["values"], json!(["16384"]));
    assert_eq!(info["limits"]["context_length"], 16384);
    let prefill = get(&format!("{}/server_info", pair.prefill.url)).await.expect("an answer").ok();
    assert_eq!(
        (&prefill["takes_requests"], &info["takes_requests"]),
        (&json!(false), &json!(true))
    );
    assert_eq!(prefill["fingerprint"], info["fingerprint"]);
    let age = Metrics::of(&pair.prefill.url).await.sum("dsv4:heartbeat_age_seconds", &["prefill"]);
    assert!((0.0..60.0).contains(&age), "{age}");
    // The prefill worker was named to the router by mistake.
    let health = get(&format!("{}/health", router.url)).await.expect("an answer").ok();
    let reason = health["workers"][0]["reason"].as_str().expect("a reason");
    assert!(reason.starts_with("is a prefill worker"), "{reason}");
    router.process.logged("is a prefill worker");
    // An answer that would take long is ended through the router.
    let mut body = greedy(&prompt(20), 4000);
    body["stream"] = json!(true);
    body["logit_bias"] = json!({"1": -100});
    let mut events =
        Events::open(&format!("{}/v1/completions", router.url), &body).await.expect("a stream");
    let first = events.next().await.expect("no break").expect("an event");
    let id = serde_json::from_str::<Value>(&first).expect("JSON")["id"].clone();
    let wish = json!({"rid": id});
    let told = post(&format!("{}/abort_request", router.url), &wish).await.expect("an answer").ok();
    assert_eq!(told["aborted"], 1, "{told}");
    let mut last = first;
    while let Some(event) = events.next().await.expect("no break") {
        last = event;
    }
    assert!(last.contains("request_aborted"), "{last}");
    eventually("its pages are free", async || {
        let metrics = Metrics::of(&pair.decode.url).await;
        (metrics.sum("sglang:num_running_reqs", &[]) == 0.0).then_some(())
    })
    .await;
    let flushed = post(&format!("{}/flush_cache", router.url), &json!({})).await.expect("it").ok();
    assert_eq!(flushed["workers"].as_array().expect("a list").len(), 2);
    pair.decode.process.kill();
}

#[tokio::test]
async fn a_signal_while_the_model_is_loaded_ends_the_process_in_good_order() {
    let port = free_port();
    let flags = format!("--port {port} --disaggregation-mode null --model-path {MODEL}");
    let mut process = Process::spawn(&args(&flags));
    let url = format!("http://127.0.0.1:{port}");
    // The port answers before the model is there.
    eventually("it listens", async || get(&format!("{url}/readyz")).await.ok().map(drop)).await;
    process.terminate();
    assert!(process.wait_exit().success());
    let log = process.log_text();
    // It may have been ready just before.
    let said = ["stopped by a signal while the model was loaded", "stopped"];
    assert!(said.iter().any(|line| log.contains(line)), "{log}");
}

#[tokio::test]
async fn the_line_to_try_has_what_keys_and_certificates_need() {
    let files = Files::new();
    let cert = files.cert().display().to_string();
    let flags = format!(
        "--port 0 --disaggregation-mode null --kv-memory-mib 192 --context-length 16384 \
         --model-path {MODEL} --ssl-certfile {cert} --ssl-keyfile {} --api-key secret",
        files.key().display()
    );
    let mut process = Process::spawn(&args(&flags));
    let line = process.wait_for("try: curl https://");
    assert!(line.contains(&format!(" --cacert '{cert}' ")), "{line}");
    assert!(line.contains(" -H \"authorization: Bearer $DSV4_API_KEY\" "), "{line}");
    assert!(!line.contains("secret"), "{line}");
    // What it says is what works, but for the name in the certificate.
    let command = line[line.find("curl").expect("a command")..].replace("127.0.0.1", "localhost");
    let shell = format!("{command} -sS --max-time 60");
    let ran = std::process::Command::new("sh")
        .args(["-c", &shell])
        .env("DSV4_API_KEY", "secret")
        .output();
    match ran {
        Ok(output) if output.status.code() != Some(127) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(text.contains("chat.completion"), "{shell}: {text} {errors}");
        }
        _ => eprintln!("skipped: there is no curl"),
    }
}

/// A router knows the decode worker alone; what its prefill worker keeps goes all the same.
#[tokio::test]
async fn a_flush_at_the_router_reaches_prefill_workers_behind_decode_workers() {
    let mut pair = Pair::start("auto", "");
    healthy(&pair.decode.url).await;
    let router = Server::router(&[&pair.decode], "");
    healthy(&router.url).await;
    let kept = async |url: &str| Metrics::of(url).await.sum("dsv4:pages", &["block", "cached"]);
    let ask = async || {
        let url = format!("{}/v1/completions", router.url);
        post(&url, &greedy(&prompt(600), 2)).await.expect("an answer").ok()
    };
    let first = ask().await;
    eventually("both keep blocks", async || {
        let both = [kept(&pair.prefill.url).await, kept(&pair.decode.url).await];
        both.iter().all(|kept| *kept > 0.0).then_some(())
    })
    .await;
    let flush = format!("{}/flush_cache", router.url);
    let told = post(&flush, &json!({})).await.expect("an answer").ok();
    let peers = told["workers"][0]["answer"]["prefill_workers"].clone();
    assert_eq!(peers.as_array().map(Vec::len), Some(1), "{told}");
    assert_eq!(peers[0]["flushed"], true, "{told}");
    assert!(peers[0]["device_blocks"].as_u64() >= Some(2), "{told}");
    for url in [&pair.prefill.url, &pair.decode.url] {
        eventually("it keeps nothing", async || (kept(url).await == 0.0).then_some(())).await;
    }
    pair.prefill.process.logged("as a decode worker asked");
    let again = ask().await;
    assert_eq!(again["choices"], first["choices"]);
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "{again}");
    // One that is gone cannot be flushed, and is named.
    pair.prefill.process.kill();
    let missed = eventually("the loss is known", async || {
        let reply = post(&flush, &json!({})).await.expect("an answer");
        (reply.status == 502).then(|| reply.json())
    })
    .await;
    let peers = &missed["workers"][0]["answer"]["prefill_workers"];
    assert_eq!(
        (&peers[0]["flushed"], &missed["workers"][0]["status"]),
        (&json!(false), &json!(502))
    );
    assert!(peers[0]["reason"].is_string() && peers[0]["address"].is_string(), "{missed}");
}

/// Stops a worker's thread in the middle of a step.
#[derive(Debug, Default)]
struct Block {
    is_blocked: Mutex<bool>,
    changed: Condvar,
}

impl Block {
    fn set(&self, blocked: bool) {
        *self.is_blocked.lock().expect("no panic") = blocked;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let blocked = self.is_blocked.lock().expect("no panic");
        drop(self.changed.wait_while(blocked, |blocked| *blocked).expect("no panic"));
    }
}

#[derive(Debug)]
struct Blocking {
    inner: Arc<dyn Kernels>,
    block: Arc<Block>,
}

macro_rules! pass_on {
    ($($name:ident: $op:ident),* $(,)?) => {
        impl Kernels for Blocking {
            fn pack(&self, desc: &WeightDesc<'_>) -> Result<Weight, KernelError> {
                self.inner.pack(desc)
            }

            fn embed(&self, a: Embed<'_>) -> Result<(), KernelError> {
                self.block.pass();
                self.inner.embed(a)
            }

            $(fn $name(&self, a: $op<'_>) -> Result<(), KernelError> {
                self.inner.$name(a)
            })*
        }
    };
}

pass_on! {
    hyper_pre: HyperPre, hyper_post: HyperPost, hyper_head: HyperHead, rms_norm: RmsNorm,
    linear: Linear, rope_table: RopeTable, rope: Rope, index_query: IndexQuery,
    store_rows: StoreRows, load_rows: LoadRows, compress: Compress, index_select: IndexSelect,
    attend: Attend, route: Route, moe: Moe,
}

#[tokio::test]
async fn a_worker_that_is_stuck_in_a_step_is_told_and_one_that_goes_on_is_well() {
    for (flags, is_watched) in [("--watchdog-timeout 1", true), ("--watchdog-timeout 0", false)] {
        let block = Arc::new(Block::default());
        let shared = Arc::clone(&block);
        let wrap = move |inner| -> Arc<dyn Kernels> {
            Arc::new(Blocking { inner, block: Arc::clone(&shared) })
        };
        let options = NodeOptions { wrap_kernels: Some(Box::new(wrap)), ..NodeOptions::default() };
        let workers = Workers::start("null", flags, &options);
        workers.ready().await;
        let engine = workers.node().engine();
        block.set(true);
        let answer = workers.answer(prompt(20), 2);
        let watched = async {
            let age = || engine.stats().workers[0].beat_age.as_secs();
            if is_watched {
                while !matches!(engine.health(), Health::Failed(_)) {
                    tokio::task::yield_now().await;
                }
                let Health::Failed(reason) = engine.health() else { panic!("it is stuck") };
                assert!(
                    reason.starts_with("the unified worker makes no progress since "),
                    "{reason}"
                );
            } else {
                while age() < 2 {
                    tokio::task::yield_now().await;
                }
                assert_eq!(engine.health(), Health::Ready, "nobody watches");
            }
            assert!(age() >= 1);
            block.set(false);
        };
        let (answer, ()) = tokio::join!(answer, watched);
        assert_eq!(answer.expect("it goes on").0.len(), 2);
        workers.ready().await;
    }
}

/// Resident memory of a process, bytes.
fn resident(process: &Process) -> u64 {
    let path = format!("/proc/{}/status", process.child.id());
    let text = std::fs::read_to_string(path).expect("a running process");
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
    let kib = line.trim().trim_end_matches(" kB");
    kib.trim().parse::<u64>().expect("a number") << 10
}

/// Files and sockets that a process has open.
fn open_files(process: &Process) -> usize {
    let path = format!("/proc/{}/fd", process.child.id());
    std::fs::read_dir(path).expect("a running process").count()
}

/// Connections of one kind that are open at once.
const AT_ONCE: usize = 200;
/// The same of those that fill buffers.
const LARGE_AT_ONCE: usize = 10;

/// Connections that are slow, half closed, oversized or garbage.
async fn bad_connections(address: &str) {
    let long = format!("GET /{} HTTP/1.1\r\n", "x".repeat(300_000));
    let fields = format!("GET / HTTP/1.1\r\n{}", "x-a: b\r\n".repeat(5000));
    let kinds: [(&[u8], usize); 8] = [
        (b"", AT_ONCE),
        (b"GET /health HT", AT_ONCE),
        (b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n{\"a", AT_ONCE),
        (b"POST /generate HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nffffffff\r\nx", AT_ONCE),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", AT_ONCE),
        (b"\x16\x03\x01\x02\x00\x01\x00\xff\xfe\r\n\r\n", AT_ONCE),
        (long.as_bytes(), LARGE_AT_ONCE),
        (fields.as_bytes(), LARGE_AT_ONCE),
    ];
    for (bytes, count) in kinds {
        let mut open = Vec::with_capacity(count);
        for at in 0..count {
            let mut stream = TcpStream::connect(address).await.expect("a connection");
            // The server may have closed it by then.
            let _ = stream.write_all(bytes).await;
            if at % 2 == 0 {
                let _ = stream.shutdown().await;
            }
            open.push(stream);
        }
        // Half of them are reset with bytes unread, the others closed in order.
        drop(open);
    }
}

#[tokio::test]
async fn memory_stays_flat_under_connections_that_mean_no_good() {
    const ROUNDS: usize = 6;
    let server = Server::worker("null", "--kv-memory-mib 64 --context-length 1024");
    let address = server.url.trim_start_matches("http://").to_owned();
    healthy(&server.url).await;
    let before = open_files(&server.process);
    let mut found = Vec::new();
    for _ in 0..ROUNDS {
        bad_connections(&address).await;
        eventually("all connections have gone", async || {
            (open_files(&server.process) <= before + 2).then_some(())
        })
        .await;
        found.push(resident(&server.process));
    }
    healthy(&server.url).await;
    // The allocator keeps more or less of what is free, so the most of the first rounds is compared
    // with the least of the last ones. A round has 1220 connections: a kilobyte kept of each would be
    // five megabytes in the four rounds between.
    let first = found[..2].iter().max().expect("two rounds");
    let last = found[ROUNDS - 2..].iter().min().expect("two rounds");
    assert!(*last < first + (4 << 20), "{found:?}");
}
