//! A prefill worker that is frozen while its pages are being read.

use super::super::client::{Metrics, eventually, healthy};
use super::super::cluster::Server;
use super::{Bar, End, FLAGS, Figure, Known, Plan, ask, owned_at_rest};
use rustix::process::Signal;
use serde_json::Value;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;

/// Requests that may be with the frozen worker: a few prompts, each several chunks long.
const IN_TRANSFER: usize = 4;

async fn count(url: &str, name: &str) -> f64 {
    Metrics::of(url).await.sum(&format!("dsv4:{name}"), &[])
}

/// How requests ended.
#[derive(Debug, Default)]
struct Ends {
    right: usize,
    wrong: usize,
}

impl Ends {
    fn add(&mut self, end: &End) {
        self.right += usize::from(*end == End::Right);
        self.wrong += usize::from(*end == End::Wrong);
    }

    async fn ask(&mut self, url: &str, known: impl Iterator<Item = &(Vec<u32>, Value)>) {
        for (ids, answer) in known {
            self.add(&ask(url, ids, answer).await);
        }
    }
}

/// Waits until both prefill workers are peers of the decode worker.
async fn both_are_peers(url: &str) {
    eventually("both are connected", async || (count(url, "peers").await == 2.0).then_some(()))
        .await;
}

/// Requests that run by themselves, with the moments at which they end.
fn ask_at_once(url: &str, known: &Known) -> Vec<JoinHandle<(End, Instant)>> {
    let asked = known.long.iter().take(IN_TRANSFER).cloned();
    asked
        .map(|(ids, answer)| {
            let url = url.to_owned();
            tokio::spawn(async move { (ask(&url, &ids, &answer).await, Instant::now()) })
        })
        .collect()
}

/// Freezes one of two prefill workers in mid-transfer. What it had is answered before it thaws, what
/// comes meanwhile is handed over by the other, and afterwards it takes part again.
pub(super) async fn run(plan: &Plan, known: &Known) -> Vec<Figure> {
    let flags = format!("{FLAGS} --disaggregation-transfer-backend {}", plan.transport);
    let frozen = Server::worker("prefill", &flags);
    let other = Server::worker("prefill", &flags);
    let address = other.bootstrap.as_ref().expect("a prefill worker");
    let decode =
        Server::decode_of(&frozen, &format!("--disaggregation-bootstrap {address} {flags}"));
    let url = decode.url.clone();
    healthy(&url).await;
    both_are_peers(&url).await;
    let requests = ask_at_once(&url, known);
    // Pages are lent from the first complete block on until the decode worker has them all.
    eventually("pages are in transfer", async || {
        (count(&frozen.url, "prompts_lent").await > 0.0).then_some(())
    })
    .await;
    frozen.process.signal(Signal::STOP);
    let start = Instant::now();
    let before = count(&url, "handoffs_total").await;
    let lost = "transfer_failed_peer_lost_total";
    eventually("the frozen hand-offs are given up", async || {
        (count(&url, lost).await > 0.0).then_some(())
    })
    .await;
    let given_up = start.elapsed();
    let mut ends = Ends::default();
    ends.ask(&url, known.short.iter().take(8)).await;
    let mut last = Duration::ZERO;
    for request in requests {
        let (end, at) = request.await.expect("a client does not panic");
        ends.add(&end);
        last = last.max(at.saturating_duration_since(start));
    }
    let lost = count(&url, lost).await;
    let by_other = count(&url, "handoffs_total").await - before;
    let owned = owned_at_rest(&url).await;
    // All of that was before the thaw. The rest of the freeze, if there is one:
    tokio::time::sleep(plan.freeze.saturating_sub(start.elapsed())).await;
    frozen.process.signal(Signal::CONT);
    let thawed = owned_at_rest(&frozen.url).await + owned_at_rest(&other.url).await;
    both_are_peers(&url).await;
    ends.ask(&url, known.short.iter().rev().take(8)).await;
    let mut bad = 0.0;
    for name in ["mismatches", "stale_gets", "failed_violation", "group_retries"] {
        bad += count(&url, &format!("transfer_{name}_total")).await;
    }
    let all = (IN_TRANSFER + 16) as f64;
    // A freeze without a length lasts as long as the requests need.
    let bar =
        if plan.freeze.is_zero() { Bar::None } else { Bar::AtMost(plan.freeze.as_secs_f64()) };
    vec![
        Figure::plain("freeze_seconds", plan.freeze.as_secs_f64(), "s"),
        Figure { bar, ..Figure::plain("freeze_given_up_after", given_up.as_secs_f64(), "s") },
        Figure::plain("freeze_last_answer", last.as_secs_f64(), "s"),
        Figure::at_most("freeze_wrong", ends.wrong as f64, "requests", 0.0),
        Figure::at_least("freeze_right", ends.right as f64, "requests", all),
        Figure::at_least("freeze_given_up", lost, "prompts", 1.0),
        Figure::at_least("freeze_served_by_other", by_other, "prompts", 1.0),
        Figure::at_most("freeze_bad_pages", bad, "pages", 0.0),
        Figure::at_most("freeze_pages_owned", owned + thawed, "pages", 0.0),
    ]
}
