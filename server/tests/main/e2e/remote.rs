//! Prefixes that servers share through an object store, which may die at any time.

use super::accounts::assert_all_given_back;
use super::client::{Metrics, complete, eventually, greedy, post};
use super::cluster::Server;
use super::prompts::prompt;
use super::warm::{OUTPUT, ask, written};
use crate::moto::{BUCKET, Moto};
use rustix::process::Signal;

const COLD: &str = "--disable-radix-cache";

fn server(moto: &Moto, prefix: &str, flags: &str) -> Server {
    server_of(moto, "null", prefix, flags)
}

fn server_of(moto: &Moto, mode: &str, prefix: &str, flags: &str) -> Server {
    let variables = moto.variables();
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let flags = format!("--hicache-object-store s3://{BUCKET}/{prefix} {flags}");
    Server::worker_with(mode, &flags, &variables)
}

/// A prompt that shares no block with those of another `talk`.
fn talk(number: u32, tokens: usize) -> Vec<u32> {
    let mut ids = prompt(2300)[..tokens].to_vec();
    ids[0] ^= number;
    ids
}

async fn remote(url: &str, name: &str) -> f64 {
    Metrics::of(url).await.sum(name, &["remote"])
}

#[tokio::test]
async fn fresh_server_has_what_another_one_computed() {
    let Some(moto) = Moto::start() else { return };
    let cold = Server::worker("null", COLD);
    let first = server(&moto, "shared", "");
    for number in 0..2 {
        let ids = talk(number, 2100);
        let (answer, _) = ask(&cold.url, &ids).await;
        assert_eq!(ask(&first.url, &ids).await, (answer, 0));
    }
    written(&first.url, "remote").await;
    let second = server(&moto, "shared", "");
    for number in 0..2 {
        let ids = talk(number, 2150);
        let (answer, _) = ask(&cold.url, &ids).await;
        assert_eq!(ask(&second.url, &ids).await, (answer, 2048), "talk {number}");
    }
    assert_eq!(remote(&second.url, "dsv4:cache_tokens_total").await, 2.0 * 2048.0);
    for server in [&first, &second] {
        for bad in ["mismatches", "failures", "missing"] {
            let name = format!("dsv4:cache_{bad}_total");
            assert_eq!(remote(&server.url, &name).await, 0.0, "{bad}");
        }
    }
    assert_all_given_back(&[&first.url, &second.url]).await;
}

/// The second server knows nothing of what the first one writes after its start; a prompt waits a
/// moment for the answer whether it is there.
#[tokio::test]
async fn prompts_find_what_another_server_wrote_later() {
    let Some(moto) = Moto::start() else { return };
    let cold = Server::worker("null", COLD);
    for mode in ["null", "both"] {
        let first = server_of(&moto, mode, mode, "");
        let second = server_of(&moto, mode, mode, "");
        for number in 0..4 {
            complete(&first.url, &talk(number, 1100), OUTPUT).await;
        }
        written(&first.url, "remote").await;
        let mut hits = 0;
        for number in 0..4 {
            let ids = talk(number, 1150);
            let (found, cached) = ask(&second.url, &ids).await;
            assert_eq!(found, ask(&cold.url, &ids).await.0, "{mode}, talk {number}");
            hits += u32::from(cached == 1024);
        }
        // A machine may be so slow that an answer comes too late.
        assert!(hits >= 1, "{mode}: no prompt found anything");
        assert!(remote(&second.url, "dsv4:cache_probes_found_total").await >= 5.0, "{mode}");
        assert!(remote(&second.url, "dsv4:cache_tokens_total").await >= 1024.0, "{mode}");
        assert_eq!(remote(&second.url, "dsv4:cache_mismatches_total").await, 0.0, "{mode}");
        assert_all_given_back(&[&first.url, &second.url]).await;
    }
}

/// Clients that leave while their prompt waits for the store leave nothing behind.
#[tokio::test]
async fn clients_that_leave_while_the_store_is_asked_leave_nothing() {
    let Some(moto) = Moto::start() else { return };
    let silent = server(&moto, "silent", "");
    complete(&silent.url, &talk(0, 300), 1).await;
    moto.signal(Signal::STOP);
    let url = format!("{}/v1/completions", silent.url);
    for number in 1..9 {
        let body = greedy(&talk(number, 600), OUTPUT);
        let patience = std::time::Duration::from_millis(u64::from(number) * 40);
        // Whether it answers in time says nothing.
        let _ = tokio::time::timeout(patience, post(&url, &body)).await;
    }
    assert_all_given_back(&[&silent.url]).await;
    moto.signal(Signal::CONT);
}

/// New prompts until the store holds more than before, and more than what was under way then.
async fn writes_again(url: &str, cold: &str, from: u32) {
    let (before, mut number) = (remote(url, "dsv4:cache_stored_total").await, from);
    let mut again = async || {
        let ids = talk(number, 520);
        number += 1;
        assert_eq!(ask(url, &ids).await.0, ask(cold, &ids).await.0);
        (remote(url, "dsv4:cache_stored_total").await > before + 8.0).then_some(())
    };
    eventually("the store is used again", &mut again).await;
}

#[tokio::test]
async fn dead_or_silent_object_store_costs_prefixes_and_no_answers() {
    let Some(mut moto) = Moto::start() else { return };
    let cold = Server::worker("null", COLD);
    let first = server(&moto, "mortal", "");
    for number in 0..6 {
        complete(&first.url, &talk(number, 600), OUTPUT).await;
    }
    written(&first.url, "remote").await;
    let second = server(&moto, "mortal", "");
    for (number, dies) in [(0, false), (2, true)] {
        // It works, then it does not, in the middle of its use.
        let ids = talk(number, 600);
        assert_eq!(ask(&second.url, &ids).await, (ask(&cold.url, &ids).await.0, 512));
        if dies {
            moto.kill();
        } else {
            moto.signal(Signal::STOP);
        }
        let ids = talk(number + 1, 600);
        assert_eq!(ask(&second.url, &ids).await, (ask(&cold.url, &ids).await.0, 0));
        for new in 0..3 {
            let ids = talk(20 + number * 3 + new, 600);
            assert_eq!(ask(&second.url, &ids).await.0, ask(&cold.url, &ids).await.0);
        }
        eventually("the store is left alone", async || {
            (remote(&second.url, "dsv4:cache_pauses_total").await > 0.0).then_some(())
        })
        .await;
        if dies {
            let third = server(&moto, "mortal", "");
            third.process.logged("cannot be used now");
            assert_eq!(ask(&third.url, &ids).await.0, ask(&cold.url, &ids).await.0);
            moto.restart();
        } else {
            moto.signal(Signal::CONT);
        }
        writes_again(&second.url, &cold.url, 60 + 40 * number).await;
    }
    assert_eq!(remote(&second.url, "dsv4:cache_mismatches_total").await, 0.0);
    assert!(remote(&second.url, "dsv4:cache_failures_total").await >= 3.0);
    assert_all_given_back(&[&first.url, &second.url]).await;
}
