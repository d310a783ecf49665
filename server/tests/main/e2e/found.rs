//! Faults that trials of the running server found; each has its test.

use super::accounts::assert_all_given_back;
use super::client::{Metrics, complete, eventually, get, greedy, post};
use super::cluster::Server;
use super::prompts::prompt;
use serde_json::json;
use std::io::Write;
use std::net::TcpStream;

/// Every transport numbers its peers by itself: the first of each has the same number.
#[tokio::test]
async fn peers_of_two_transports_are_kept_apart() {
    let mut near = Server::worker("prefill", "");
    let far = Server::worker("prefill", "--disaggregation-transfer-backend tcp");
    let port = far.bootstrap.as_ref().and_then(|a| a.rsplit_once(':')).expect("HOST:PORT").1;
    // An address of this host that is not seen to be local, so that it goes over TCP.
    let mut decode =
        Server::decode_of(&near, &format!("--disaggregation-bootstrap 0.0.0.0:{port}"));
    let peers = async |wanted: f64| {
        eventually(&format!("{wanted} peers"), async || {
            let peers = Metrics::of(&decode.url).await.sum("dsv4:peers", &["decode"]);
            (peers == wanted).then_some(())
        })
        .await;
    };
    peers(2.0).await;
    let expected = complete(&decode.url, &prompt(200), 4).await;
    near.process.kill();
    peers(1.0).await;
    let before = Metrics::of(&far.url).await.sum("dsv4:handoffs_total", &["prefill"]);
    assert_eq!(complete(&decode.url, &prompt(200), 4).await, expected);
    let after = Metrics::of(&far.url).await.sum("dsv4:handoffs_total", &["prefill"]);
    assert_eq!(after, before + 1.0, "the worker that is left computes");
    let metrics = Metrics::of(&decode.url).await;
    assert_eq!(metrics.sum("dsv4:prompts_without_peer_total", &["decode"]), 0.0);
    assert_all_given_back(&[&decode.url, &far.url]).await;
    decode.process.terminate();
    assert!(decode.process.wait_exit().success());
}

#[tokio::test]
async fn drain_ends_although_a_connection_says_nothing() {
    let mut server = Server::worker("null", "--drain-timeout 1");
    let address = server.url.trim_start_matches("http://").to_owned();
    let mut silent = TcpStream::connect(&address).expect("the server listens");
    silent.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n").expect("written");
    assert_eq!(get(&format!("{}/health", server.url)).await.expect("an answer").status, 200);
    server.process.terminate();
    assert!(server.process.wait_exit().success(), "a bounded drain is an orderly end");
}

/// Texts that cannot fit whatever their tokens are must not be tokenised first.
#[tokio::test]
async fn text_far_beyond_the_context_is_refused_at_once() {
    let server = Server::worker("null", "--context-length 2048");
    let text = "a b ".repeat(4 << 20);
    let body = json!({"model": "dsv4-mini", "max_tokens": 1, "prompt": text});
    let reply = post(&format!("{}/v1/completions", server.url), &body).await.expect("an answer");
    assert_eq!(
        (reply.status, reply.json()["error"]["code"].as_str()),
        (400, Some("context_length_exceeded"))
    );
    let body = json!({"model": "dsv4-mini", "messages": [{"role": "user", "content": text}]});
    let reply =
        post(&format!("{}/v1/chat/completions", server.url), &body).await.expect("an answer");
    assert_eq!(
        (reply.status, reply.json()["error"]["code"].as_str()),
        (400, Some("context_length_exceeded"))
    );
    let reply = post(&format!("{}/v1/completions", server.url), &greedy(&prompt(20), 2)).await;
    assert_eq!(reply.expect("an answer").status, 200);
}
