//! Sessions with tool calls, growing turn by turn, for each type of index keys.

use super::accounts::{assert_all_given_back, assert_all_pages_checked};
use super::client::{Metrics, healthy};
use super::cluster::{MODEL, Pair, Server, note};
use super::corpus::Session;
use super::sessions::{Tally, hold};
use dsv4_model::text::Tokenizer;
use futures_util::stream::{StreamExt as _, iter};
use std::path::Path;

const SESSIONS: u64 = 12;
const TURNS: usize = 3;
/// Sessions that are held at a time.
const AT_ONCE: usize = 4;

async fn sessions_are_answered_alike(index_keys: &str) {
    let flags = format!("--index-k-dtype {index_keys}");
    // Computes every prompt anew; the pair goes on from what it has.
    let unified = Server::worker("null", &format!("{flags} --disable-radix-cache"));
    let pair = Pair::start("shm", &flags);
    healthy(&pair.decode.url).await;
    let tokenizer = Tokenizer::from_dir(Path::new(MODEL)).expect("the mini model's tokenizer");
    let session = |n: u64| {
        let tokens = 512 + n as usize * (2048 - 512) / (SESSIONS as usize - 1);
        Session::new(1000 + n, &tokenizer, tokens, TURNS)
    };
    let sessions: Vec<Session> = (0..SESSIONS).map(session).collect();
    let held = iter(&sessions).map(|one| hold(one, &unified.url, &pair.decode.url));
    let mut all = Tally::default();
    for tally in held.buffer_unordered(AT_ONCE).collect::<Vec<_>>().await {
        all.add(tally);
    }
    note(&format!("index keys {index_keys}: {all:?}"));
    assert_eq!(all.different, 0, "answers differ from the unified worker's: {all:?}");
    assert!(all.calls * 4 >= all.requests, "the model calls tools: {all:?}");
    assert!(all.right * 10 >= all.requests * 7, "the model knows what it is asked: {all:?}");
    assert!((1400..=2400).contains(&all.longest), "sessions grow to 2k tokens: {all:?}");
    assert_all_given_back(&[&unified.url, &pair.decode.url, &pair.prefill.url]).await;
    assert_all_pages_checked(&pair.prefill.url, &pair.decode.url).await;
    let decode = Metrics::of(&pair.decode.url).await;
    assert_eq!(decode.sum("dsv4:handoffs_total", &["decode"]), all.requests as f64);
    assert_eq!(decode.sum("dsv4:prompts_recomputed_total", &["decode"]), 0.0);
}

#[tokio::test]
async fn sessions_with_fp4_index_keys_are_answered_as_by_one_worker() {
    sessions_are_answered_alike("fp4").await;
}

#[tokio::test]
async fn sessions_with_fp8_index_keys_are_answered_as_by_one_worker() {
    sessions_are_answered_alike("fp8").await;
}

#[tokio::test]
async fn sessions_with_bf16_index_keys_are_answered_as_by_one_worker() {
    sessions_are_answered_alike("bf16").await;
}
