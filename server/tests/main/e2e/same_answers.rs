//! Greedy output does not depend on company, chunks, or the way that a prompt's pages took.

use super::client::{Metrics, complete, essence, greedy, healthy, post};
use super::cluster::{Pair, Server, note};
use super::prompts::prompt;
use futures_util::future::join_all;
use serde_json::Value;

/// Prompt lengths around each border of a compressor, window page, block and chunk.
const LENGTHS: [usize; 23] = [
    1, 3, 4, 5, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513, 2046, 2047, 2048,
    2049, 2050, 64,
];
const OUTPUT: u32 = 8;

/// Answers to prompts of these lengths, one request after the other.
async fn alone(url: &str, lengths: &[usize]) -> Vec<Value> {
    let mut answers = Vec::new();
    for &length in lengths {
        answers.push(complete(url, &prompt(length), OUTPUT).await);
    }
    answers
}

/// The same, all at once.
async fn together(url: &str, lengths: &[usize]) -> Vec<Value> {
    join_all(lengths.iter().map(|&length| complete(url, &prompt(length), OUTPUT))).await
}

#[track_caller]
fn assert_same(what: &str, lengths: &[usize], expected: &[Value], found: &[Value]) {
    assert_eq!(expected.len(), found.len());
    for ((length, expected), found) in lengths.iter().zip(expected).zip(found) {
        assert_eq!(expected, found, "{what}, prompt of {length} tokens");
    }
}

#[tokio::test]
async fn output_is_equal_unified_and_apart_in_one_process_and_over_each_transport() {
    let unified = Server::worker("null", "--disable-radix-cache");
    let expected = alone(&unified.url, &LENGTHS).await;
    drop(unified);
    let both = Server::worker("both", "");
    assert_same("one process", &LENGTHS, &expected, &together(&both.url, &LENGTHS).await);
    assert_all_handed_over(&both.url, LENGTHS.len()).await;
    drop(both);
    let mut backends = vec!["shm", "tcp"];
    if std::env::var_os("DSV4_UCX_LIB").is_some_and(|path| !path.is_empty()) {
        backends.push("ucx");
    } else {
        assert!(std::env::var_os("CI").is_none(), "CI sets DSV4_UCX_LIB");
        note("ucx is left out: DSV4_UCX_LIB is not set");
    }
    for backend in backends {
        let pair = Pair::start(backend, "");
        healthy(&pair.decode.url).await;
        let found = together(&pair.decode.url, &LENGTHS).await;
        assert_same(backend, &LENGTHS, &expected, &found);
        assert_all_handed_over(&pair.decode.url, LENGTHS.len()).await;
    }
}

/// The prompts came from the prefill worker; an equal answer that was computed on the decode
/// worker would say nothing about the hand-off.
async fn assert_all_handed_over(url: &str, prompts: usize) {
    let metrics = Metrics::of(url).await;
    let decode = ["role=\"decode\""];
    assert_eq!(metrics.sum("dsv4:handoffs_total", &decode), prompts as f64);
    assert_eq!(metrics.sum("dsv4:prompts_recomputed_total", &decode), 0.0);
    assert_eq!(metrics.sum("dsv4:page_groups_quarantined_total", &decode), 0.0);
}

#[tokio::test]
async fn output_is_equal_for_every_chunk_size() {
    let whole = Server::worker("null", "--chunked-prefill-size 4096 --disable-radix-cache");
    let expected = alone(&whole.url, &LENGTHS).await;
    drop(whole);
    for (chunk, longest) in [(1, 130), (3, 385), (63, 2050), (128, 2050), (1000, 2050)] {
        let flags = format!("--chunked-prefill-size {chunk} --disable-radix-cache");
        let server = Server::worker("null", &flags);
        let lengths: Vec<usize> = LENGTHS.into_iter().filter(|n| *n <= longest).collect();
        let expected: Vec<Value> = LENGTHS
            .iter()
            .zip(&expected)
            .filter(|(n, _)| **n <= longest)
            .map(|(_, answer)| answer.clone())
            .collect();
        let found = together(&server.url, &lengths).await;
        assert_same(&format!("chunks of {chunk}"), &lengths, &expected, &found);
    }
}

#[tokio::test]
async fn thirty_two_requests_at_once_are_answered_as_if_alone() {
    let lengths: Vec<usize> = (0..32).map(|i| 3 + i * 9).collect();
    let unified = Server::worker("null", "--disable-radix-cache");
    let expected = alone(&unified.url, &lengths).await;
    let at_once = together(&unified.url, &lengths).await;
    assert_same("32 at once", &lengths, &expected, &at_once);
    drop(unified);
    let both = Server::worker("both", "");
    let at_once = together(&both.url, &lengths).await;
    assert_same("32 at once, apart", &lengths, &expected, &at_once);
}

#[tokio::test]
async fn sampled_output_follows_the_seed_wherever_the_prompt_was_computed() {
    let unified = Server::worker("null", "");
    let both = Server::worker("both", "");
    let ask = async |url: &str, seed: u64| {
        let mut body = greedy(&prompt(200), 16);
        body["temperature"] = 1.5.into();
        body["top_p"] = 0.95.into();
        body["seed"] = seed.into();
        let url = format!("{url}/v1/completions");
        essence(&post(&url, &body).await.expect("an answer").ok())
    };
    let first = ask(&unified.url, 7).await;
    assert_eq!(first, ask(&unified.url, 7).await);
    assert_eq!(first, ask(&both.url, 7).await, "the first token is drawn by the prefill worker");
    let mut others = Vec::new();
    for seed in 8..12 {
        others.push(ask(&both.url, seed).await);
    }
    assert!(others.iter().any(|other| *other != first), "the seed has an influence");
}
