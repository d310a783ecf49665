//! Requests that give their pages to others and go on later: their answers are the same.

use super::accounts::assert_all_given_back;
use super::client::{Events, Metrics, essence, eventually, greedy, healthy, post};
use super::cluster::Server;
use super::prompts::prompt;
use futures_util::future::join_all;
use serde_json::{Value, json};

/// Three of these requests begin, and there are blocks for two of them at their ends.
const SMALL: &str = "--context-length 2048 --kv-memory-mib 8 --max-running-requests 4 \
                     --num-reserved-decode-tokens 1 --chunked-prefill-size 64";
const LENGTHS: [usize; 6] = [1101, 1112, 1193, 1214, 1255, 1279];
const OUTPUT: u64 = 600;

/// Requests whose outputs are long, and end at their length.
fn bodies(lengths: &[usize], output: u64) -> Vec<Value> {
    let body = |(n, length): (usize, &usize)| {
        let mut body = greedy(&prompt(*length), output as u32);
        body["logit_bias"] = json!({"1": -100});
        // What is drawn depends on what was said before, also across a pause.
        body["frequency_penalty"] = json!(0.1 * n as f64);
        if n % 2 == 1 {
            (body["temperature"], body["seed"]) = (json!(0.8), json!(n));
        }
        body
    };
    lengths.iter().enumerate().map(body).collect()
}

async fn answers(url: &str) -> Vec<Value> {
    answers_to(url, &LENGTHS, OUTPUT).await
}

async fn answers_to(url: &str, lengths: &[usize], output: u64) -> Vec<Value> {
    let path = format!("{url}/v1/completions");
    let all = bodies(lengths, output);
    let ask = async |body: &Value| {
        let answer = post(&path, body).await.expect("an answer").ok();
        assert_eq!(answer["usage"]["completion_tokens"], output);
        (answer["usage"].clone(), essence(&answer))
    };
    let answers = join_all(all.iter().map(ask)).await;
    for (usage, _) in &answers {
        let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64();
        assert_eq!(cached.unwrap_or(0), 0, "what it finds of its own is not cached: {usage}");
    }
    answers.into_iter().map(|(_, essence)| essence).collect()
}

async fn retractions(url: &str) -> f64 {
    Metrics::of(url).await.sum("sglang:num_retracted_requests_total", &[])
}

#[tokio::test]
async fn answers_are_the_same_when_pages_go_round() {
    let roomy = Server::worker("null", "--disable-radix-cache");
    let expected = answers(&roomy.url).await;
    assert_eq!(retractions(&roomy.url).await, 0.0);
    drop(roomy);
    for flags in ["", "--enable-hierarchical-cache=false"] {
        let small = Server::worker("null", &format!("{SMALL} {flags}"));
        assert_eq!(answers(&small.url).await, expected, "{flags}");
        assert!(retractions(&small.url).await >= 1.0, "{flags}");
        let reused = Metrics::of(&small.url).await.sum("dsv4:prefix_reused_tokens_total", &[]);
        assert!(reused >= 256.0, "{flags}: {reused} tokens were not computed again");
        assert_all_given_back(&[&small.url]).await;
    }
}

#[tokio::test]
async fn what_nothing_has_kept_is_computed_again() {
    const ALONE: [usize; 2] = [2200, 2290];
    let roomy = Server::worker("null", "--disable-radix-cache");
    let expected = answers_to(&roomy.url, &ALONE, 400).await;
    drop(roomy);
    let flags = "--context-length 3072 --kv-memory-mib 7 --max-running-requests 4 \
                 --num-reserved-decode-tokens 1 --chunked-prefill-size 64 --disable-radix-cache";
    let small = Server::worker("null", flags);
    assert_eq!(answers_to(&small.url, &ALONE, 400).await, expected);
    assert_eq!(retractions(&small.url).await, 1.0);
    let computed = Metrics::of(&small.url).await.sum("sglang:prompt_tokens_total", &[]);
    assert!(computed >= (2200 + 2 * 2290) as f64, "{computed} tokens");
    assert_all_given_back(&[&small.url]).await;
}

#[tokio::test]
async fn a_decode_worker_asks_again_for_what_it_gave_away() {
    let roomy = Server::worker("null", "--disable-radix-cache");
    let expected = answers(&roomy.url).await;
    drop(roomy);
    let prefill = Server::worker("prefill", "");
    let decode = Server::decode_of(&prefill, SMALL);
    healthy(&decode.url).await;
    assert_eq!(answers(&decode.url).await, expected);
    let retracted = retractions(&decode.url).await;
    let metrics = Metrics::of(&decode.url).await;
    let handoffs = metrics.sum("dsv4:handoffs_total", &["role=\"decode\""]);
    assert!(retracted >= 1.0);
    assert_eq!(handoffs, LENGTHS.len() as f64 + retracted, "prompt and output so far are pulled");
    assert_eq!(metrics.sum("dsv4:prompts_recomputed_total", &[]), 0.0);
    assert_all_given_back(&[&prefill.url, &decode.url]).await;
}

#[tokio::test]
async fn who_leaves_while_it_waits_to_go_on_leaves_nothing_behind() {
    let small = Server::worker("null", SMALL);
    let path = format!("{}/v1/completions", small.url);
    let begin = async |mut body: Value| {
        body["stream"] = json!(true);
        let mut events = Events::open(&path, &body).await.expect("a stream");
        events.next().await.expect("a token").expect("a token");
        events
    };
    let streams = join_all(bodies(&LENGTHS[..3], OUTPUT).into_iter().map(begin)).await;
    eventually("one waits to go on", async || {
        let metrics = Metrics::of(&small.url).await;
        (metrics.sum("sglang:num_retracted_reqs", &[]) >= 1.0).then_some(())
    })
    .await;
    drop(streams);
    assert_all_given_back(&[&small.url]).await;
    assert_eq!(Metrics::of(&small.url).await.sum("sglang:num_retracted_reqs", &[]), 0.0);
    let whole = post(&path, &bodies(&LENGTHS[..1], OUTPUT)[0]).await.expect("an answer").ok();
    assert_eq!(whole["usage"]["completion_tokens"], OUTPUT);
}
