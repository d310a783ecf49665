//! What two processes say when one of them leaves, and what is in the way when one starts.

use super::client::{Metrics, complete, eventually, get, healthy};
use super::cluster::{MODEL, Pair, Process, Server};
use super::folder::Folder;
use super::prompts::prompt;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};

async fn peers(url: &str) -> f64 {
    Metrics::of(url).await.sum("dsv4:peers", &[])
}

#[tokio::test]
async fn a_clean_stop_is_no_warning_on_either_side() {
    for backend in ["shm", "tcp"] {
        let mut pair = Pair::start(backend, "");
        healthy(&pair.decode.url).await;
        complete(&pair.decode.url, &prompt(40), 2).await;
        pair.prefill.process.terminate();
        assert!(pair.prefill.process.wait_exit().success());
        let decode = &mut pair.decode;
        eventually("the peer is gone", async || (peers(&decode.url).await == 0.0).then_some(()))
            .await;
        decode.process.terminate();
        assert!(decode.process.wait_exit().success());
        for log in [pair.prefill.process.log_text(), decode.process.log_text()] {
            assert!(!log.contains(" WARN "), "{backend}: {log}");
            assert!(log.contains("peer gone"), "{backend}: {log}");
        }
    }
}

/// The socket of its shared memory is in another folder than the decode worker looks into.
#[tokio::test]
async fn without_the_others_shared_memory_auto_uses_tcp() {
    let folder = Folder::new();
    let elsewhere = folder.0.display().to_string();
    let mut prefill = Server::worker_with("prefill", "", &[("TMPDIR", &elsewhere)]);
    let mut decode = Server::decode_of(&prefill, "");
    healthy(&decode.url).await;
    decode.process.logged("pages come over TCP");
    let connected = async |url: &str, transport: &str| {
        let metrics = Metrics::of(url).await;
        metrics.try_sum("dsv4:peer_connected", &[&format!("transport=\"{transport}\"")])
    };
    eventually("one connection, over TCP", async || {
        let ways = (connected(&decode.url, "tcp").await, connected(&decode.url, "shm").await);
        (ways == (Some(1.0), None) && peers(&decode.url).await == 1.0).then_some(())
    })
    .await;
    complete(&decode.url, &prompt(40), 2).await;
    let handed = Metrics::of(&decode.url).await.sum("dsv4:handoffs_total", &["decode"]);
    assert_eq!(handed, 1.0, "{}", decode.process.log_text());
    // It comes back in a place that both see.
    prefill.process.variables.clear();
    prefill.process.terminate();
    assert!(prefill.process.wait_exit().success());
    prefill.restart();
    eventually("it is reached through shared memory", async || {
        (connected(&decode.url, "shm").await == Some(1.0)
            && connected(&decode.url, "tcp").await.is_none())
        .then_some(())
    })
    .await;
    complete(&decode.url, &prompt(50), 2).await;
    decode.process.terminate();
    assert!(decode.process.wait_exit().success());
}

#[tokio::test]
async fn a_killed_peer_is_a_warning() {
    let mut pair = Pair::start("tcp", "");
    healthy(&pair.decode.url).await;
    pair.prefill.process.kill();
    let decode = &mut pair.decode;
    eventually("the peer is gone", async || (peers(&decode.url).await == 0.0).then_some(())).await;
    decode.process.terminate();
    assert!(decode.process.wait_exit().success());
    let log = decode.process.log_text();
    assert!(log.lines().any(|line| line.contains(" WARN ") && line.contains("peer lost")), "{log}");
}

#[tokio::test]
async fn a_decode_worker_says_where_it_reaches_nobody_and_why() {
    // Nobody listens there; somebody does who is no prefill worker.
    let other = Server::worker("null", "");
    let nowhere = "127.0.0.1:1".to_owned();
    for address in [nowhere, other.url.trim_start_matches("http://").to_owned()] {
        let flags =
            format!("--disaggregation-bootstrap {address} --disaggregation-transfer-backend tcp");
        let mut decode = Server::worker("decode", &flags);
        decode.process.expect_error("does not speak this protocol");
        let health = format!("{}/health", decode.url);
        let reason = eventually("it says where", async || {
            let reply = get(&health).await.expect("an answer");
            assert_eq!(reply.status, 503);
            let reason = reply.json()["reason"].as_str().expect("a reason").to_owned();
            reason.contains(&address).then_some(reason)
        })
        .await;
        assert!(reason.len() > address.len() + 10, "no cause: {reason}");
        decode.process.logged(&format!("address=\"{address}\""));
    }
}

#[test]
fn the_least_memory_that_is_named_is_enough() {
    let flags = |mib: &str| {
        let flags = format!("--port 0 --disaggregation-mode null --kv-memory-mib {mib}");
        let mut args: Vec<String> = flags.split_whitespace().map(str::to_owned).collect();
        args.extend(["--model-path".to_owned(), MODEL.to_owned()]);
        args
    };
    let mut refused = Process::spawn(&flags("1"));
    refused.expect_error("--kv-memory-mib");
    assert!(!refused.wait_exit().success());
    let said = refused.log_text();
    let least = said.split("needs ").nth(1).and_then(|rest| rest.split(' ').next()).expect("it");
    let less = (least.parse::<u64>().expect("a number") - 1).to_string();
    let mut refused = Process::spawn(&flags(&less));
    refused.expect_error("--kv-memory-mib");
    assert!(!refused.wait_exit().success(), "{less} is less than what is needed");
    Process::spawn(&flags(least)).wait_for("http://");
}

/// A file of this test, removed at its end.
struct File(PathBuf);

impl Drop for File {
    fn drop(&mut self) {
        // A test that failed early may not have made it.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Where a prefill worker with this bootstrap port listens for decode workers of its host.
fn socket_of(port: &str) -> PathBuf {
    let uid = rustix::process::getuid().as_raw();
    std::env::temp_dir().join(format!("dsv4-pd-{uid}-{port}.sock"))
}

fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_socket_is_replaced_and_a_foreign_file_leaves_tcp() {
    let flags = "--disaggregation-transfer-backend auto";
    let mut prefill = Server::worker("prefill", flags);
    let bootstrap = prefill.bootstrap.clone().expect("a prefill worker has one");
    let port = bootstrap.rsplit_once(':').expect("HOST:PORT").1.to_owned();
    let file = File(socket_of(&port));
    let path = file.0.to_str().expect("a path in UTF-8");
    prefill.process.kill();
    assert!(is_socket(&file.0), "a killed process leaves its socket");
    tokio::task::block_in_place(|| prefill.restart());
    assert!(is_socket(&file.0) && !prefill.process.log_text().contains(" WARN "));

    prefill.process.kill();
    std::fs::remove_file(&file.0).expect("remove a socket");
    std::fs::write(&file.0, "mine").expect("write a file");
    tokio::task::block_in_place(|| prefill.restart());
    let decode = Server::decode_of(&prefill, flags);
    healthy(&decode.url).await;
    complete(&decode.url, &prompt(40), 2).await;
    let handoffs = Metrics::of(&decode.url).await.sum("dsv4:handoffs_total", &["decode"]);
    assert_eq!(handoffs, 1.0, "pages go over TCP");
    for process in [&prefill.process, &decode.process] {
        let log = process.logged(path);
        assert!(log.lines().any(|line| line.contains(" WARN ") && line.contains(path)), "{log}");
    }

    prefill.process.kill();
    let command = format!(
        "--port 0 --disaggregation-mode prefill --disaggregation-transfer-backend shm \
         --disaggregation-bootstrap-port {port} --kv-memory-mib 192 --context-length 16384 \
         --model-path {MODEL}"
    );
    let args: Vec<String> = command.split_whitespace().map(str::to_owned).collect();
    let mut shm = Process::spawn(&args);
    assert!(!shm.wait_exit().success(), "it has nowhere to listen");
    let log = shm.log_text();
    let complaint = log.lines().find(|line| line.starts_with("error: ")).expect("a last word");
    assert!(complaint.contains(path) && complaint.contains("no socket"), "{complaint}");
    assert_eq!(std::fs::read_to_string(&file.0).expect("it is still there"), "mine");
}

#[tokio::test]
async fn the_log_is_json_where_that_is_asked_for() {
    let worker = Server::worker("null", "--log-format json");
    let router = Server::router(&[&worker], "--log-format json");
    healthy(&router.url).await;
    for mut server in [router, worker] {
        server.process.terminate();
        assert!(server.process.wait_exit().success());
        let log = server.process.log_text();
        assert!(!log.contains(" INFO "), "{log}");
        let lines = log.lines().filter(|line| line.starts_with('{'));
        let lines: Vec<serde_json::Value> =
            lines.map(|line| serde_json::from_str(line).expect("a line of JSON")).collect();
        let is_whole = |line: &serde_json::Value| {
            ["timestamp", "level", "target"].iter().all(|name| line[name].is_string())
                && line["fields"].is_object()
        };
        assert!(!lines.is_empty() && lines.iter().all(is_whole), "{log}");
        let flags = |line: &serde_json::Value| {
            let said = line["fields"]["message"].as_str().unwrap_or_default();
            line["level"] == "INFO" && said.starts_with("flags: ")
        };
        assert!(lines.iter().any(flags), "{log}");
    }
}
