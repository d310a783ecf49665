//! Prompts that go on from what earlier ones have left: the same answers, less work, no page lost.

use super::accounts::assert_all_given_back;
use super::client::{Metrics, complete, healthy};
use super::cluster::{Pair, Server};
use super::prompts::prompt;
use super::warm::{OUTPUT, ask};
use super::workers::Workers;
use dsv4_server::node::NodeOptions;
use futures_util::future::join_all;
use std::collections::BTreeSet;

const COLD: &str = "--disable-radix-cache";

/// Where prompts can go on after one of `n` tokens: DESIGN's marked boundaries.
fn boundaries(n: usize) -> impl Iterator<Item = usize> {
    let last = (n - 1) / 256 * 256;
    let marks = (1..).map(|k| k * 2048).take_while(move |mark| *mark < n);
    marks.chain((last > 0).then_some(last)).chain(n.is_multiple_of(256).then_some(n))
}

#[tokio::test]
async fn answers_are_equal_from_whatever_is_kept_and_cached_tokens_are_right() {
    let cold = Server::worker("null", COLD);
    let warm = Server::worker("null", "");
    let both = Server::worker("both", "");
    let pair = Pair::start("shm", "--index-k-dtype fp8");
    let cold_fp8 = Server::worker("null", &format!("{COLD} --index-k-dtype fp8"));
    healthy(&pair.decode.url).await;
    let base = prompt(2100);
    let lengths = [300, 300, 256, 255, 257, 512, 511, 513, 1300, 1030, 1024, 2040, 2049, 2100];
    let mut kept = BTreeSet::new();
    for n in lengths {
        let ids = &base[..n];
        let expected = kept.range(..n).next_back().copied().unwrap_or(0) as u64;
        let (answer, cached) = ask(&cold.url, ids).await;
        assert_eq!(cached, 0, "nothing is kept with {COLD}");
        for url in [&warm.url, &both.url] {
            assert_eq!(ask(url, ids).await, (answer.clone(), expected), "{n} tokens, {kept:?}");
        }
        let (answer, _) = ask(&cold_fp8.url, ids).await;
        assert_eq!(ask(&pair.decode.url, ids).await, (answer, expected), "{n} tokens, {kept:?}");
        kept.extend(boundaries(n));
    }
    assert_all_given_back(&[&warm.url, &both.url, &pair.prefill.url, &pair.decode.url]).await;
    let decode = Metrics::of(&pair.decode.url).await;
    // The decode worker had every full block of each prompt that it had seen already.
    let mut seen = 0;
    let expected: usize = lengths
        .iter()
        .map(|n| {
            let known = seen.min(n / 256);
            seen = seen.max(n / 256);
            known * 256
        })
        .sum();
    assert_eq!(decode.sum("dsv4:prefix_reused_tokens_total", &["decode"]), expected as f64);
    assert_eq!(decode.sum("dsv4:prompts_recomputed_total", &["decode"]), 0.0);
}

#[tokio::test]
async fn prompts_at_once_share_a_prefix() {
    let cold = Server::worker("null", COLD);
    let both = Server::worker("both", "");
    let prompts: Vec<Vec<u32>> = (0..24)
        .map(|i| {
            let mut ids = prompt(1100);
            ids.extend(&prompt(600)[..40 + i * 19]);
            ids[1030 + i] ^= 1; // from here on each is its own
            ids
        })
        .collect();
    let expected = join_all(prompts.iter().map(|ids| complete(&cold.url, ids, OUTPUT))).await;
    for round in 0..3 {
        let asked = prompts.iter().map(|ids| complete(&both.url, ids, OUTPUT));
        assert_eq!(join_all(asked).await, expected, "round {round}");
    }
    assert_all_given_back(&[&both.url]).await;
    let metrics = Metrics::of(&both.url).await;
    for role in ["prefill", "decode"] {
        let reused = metrics.sum("dsv4:prefix_reused_tokens_total", &[role]);
        // The second and third rounds at least: all but the tail of every prompt.
        assert!(reused >= (2 * 24 * 1024) as f64, "{role}: {reused}");
    }
}

/// Memory for one sequence: each prompt takes its pages from those kept for earlier ones.
#[tokio::test]
async fn kept_pages_are_given_back_when_a_sequence_needs_them() {
    let cold = Server::worker("null", COLD);
    let flags = "--context-length 2560 --max-running-requests 2 --kv-memory-mib 8";
    let small = Server::worker("both", flags);
    for round in 0..2 {
        for n in [2000, 1501, 2001, 1502, 2002, 1503] {
            let ids = prompt(n);
            let expected = complete(&cold.url, &ids, OUTPUT).await;
            assert_eq!(complete(&small.url, &ids, OUTPUT).await, expected, "{n}, round {round}");
        }
    }
    assert_all_given_back(&[&small.url]).await;
    let metrics = Metrics::of(&small.url).await;
    for role in ["prefill", "decode"] {
        let evicted = metrics.sum("dsv4:prefix_blocks_evicted_total", &[role]);
        assert!(evicted > 10.0, "{role}: {evicted} blocks were given back");
        assert_eq!(metrics.sum("dsv4:requests_ended_total", &[role, "failed"]), 0.0);
    }
}

/// The next turn's prompt holds the last answer: a worker that generated it goes on from there.
#[tokio::test]
async fn output_is_kept_up_to_its_last_full_block() {
    let cold = Workers::start("null", COLD, &NodeOptions::default());
    for (mode, role) in [("null", "unified"), ("both", "decode")] {
        let workers = Workers::start(mode, "", &NodeOptions::default());
        workers.ready().await;
        let mut ids = prompt(200);
        let (answer, usage) = workers.answer(ids.clone(), 400).await.expect("an answer");
        assert_eq!((answer.len(), usage.cached_tokens), (400, 0));
        ids.extend(answer.iter().map(|(token, _)| token));
        let before = workers.metric("dsv4:prefix_reused_tokens_total", role);
        let (found, usage) = workers.answer(ids.clone(), OUTPUT).await.expect("an answer");
        let (expected, _) = cold.answer(ids, OUTPUT).await.expect("an answer");
        assert_eq!(found, expected, "{mode}");
        let reused = workers.metric("dsv4:prefix_reused_tokens_total", role) - before;
        assert_eq!(reused, 512, "{mode}: two full blocks, the second one of output alone");
        let cached = if mode == "null" { 512 } else { 0 };
        assert_eq!(usage.cached_tokens, cached, "the prefill worker has not seen the output");
        // Of the two places in the output only the last was kept.
        let taken = workers.metric("dsv4:prefix_boundaries_taken_total", role);
        let given_up = workers.metric("dsv4:prefix_boundaries_evicted_total", role);
        assert_eq!((taken, given_up), (2, 1), "{mode}");
    }
}
