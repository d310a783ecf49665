//! A flush of the cache: every worker of the process, and the prefill workers that a decode worker has
//! elsewhere.

use super::WorkerHandle;
use crate::engine::{FlushReport, Flushed, Flushing, PeerFlushed};
use crate::worker::order::OrderNews;
use crate::worker::{Role, WorkerMsg};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Longest wait for prefill workers, which may be in the middle of a step: less than that of a router
/// for this worker.
const PEERS_LIMIT: Duration = Duration::from_secs(30);

/// Asks all workers to forget what they keep.
pub(super) fn flush(workers: &[WorkerHandle], stores: bool) -> Flushing {
    let ask = |worker: &WorkerHandle| {
        let (done, answer) = tokio::sync::oneshot::channel();
        // A worker that has ended keeps nothing.
        drop(worker.inbox.send(WorkerMsg::Flush { stores, done }));
        answer
    };
    let answers: Vec<_> = workers.iter().map(ask).collect();
    // Where both are in one process, the prefill worker was told already.
    let is_alone = workers.iter().all(|worker| worker.role != Role::Prefill);
    let passing = workers.iter().filter(|worker| is_alone && worker.role == Role::Decode);
    let passed: Vec<_> = passing
        .map(|worker| {
            let (news, heard) = unbounded_channel();
            drop(worker.inbox.send(WorkerMsg::PassFlush { stores, news }));
            heard
        })
        .collect();
    Box::pin(async move {
        let mut report = FlushReport::default();
        for answer in answers {
            report.here = sum(report.here, answer.await.unwrap_or_default());
        }
        for heard in passed {
            report.peers.extend(collect(heard, PEERS_LIMIT).await);
        }
        report
    })
}

fn sum(a: Flushed, b: Flushed) -> Flushed {
    Flushed {
        blocks: a.blocks + b.blocks,
        boundaries: a.boundaries + b.boundaries,
        host_objects: a.host_objects + b.host_objects,
        stored_objects: a.stored_objects + b.stored_objects,
    }
}

/// What prefill workers answer within `limit`; whoever has not is named too.
async fn collect(mut heard: UnboundedReceiver<OrderNews>, limit: Duration) -> Vec<PeerFlushed> {
    let mut peers = BTreeMap::new();
    let all = async {
        while let Some(news) = heard.recv().await {
            match news {
                OrderNews::Sent { address } => drop(peers.entry(address).or_insert(None)),
                OrderNews::Ended { address, outcome } => {
                    peers.insert(address, Some(outcome));
                }
            }
        }
    };
    let is_late = tokio::time::timeout(limit, all).await.is_err();
    let missing = || {
        let seconds = limit.as_secs();
        Err(if is_late {
            format!("no answer within {seconds} s")
        } else {
            "this worker ended before there was an answer".to_owned()
        })
    };
    peers
        .into_iter()
        .map(|(address, outcome)| PeerFlushed { address, outcome: outcome.unwrap_or_else(missing) })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn who_does_not_answer_is_named() {
        let (news, heard) = unbounded_channel();
        for address in ["a", "b"] {
            news.send(OrderNews::Sent { address: address.to_owned() }).unwrap();
        }
        let flushed = Flushed { blocks: 3, ..Flushed::default() };
        news.send(OrderNews::Ended { address: "b".to_owned(), outcome: Ok(flushed) }).unwrap();
        let found = collect(heard, Duration::from_millis(1)).await;
        let of = |n: usize| (found[n].address.as_str(), found[n].outcome.clone());
        assert_eq!(of(0), ("a", Err("no answer within 0 s".to_owned())));
        assert_eq!(of(1), ("b", Ok(flushed)));
        drop(news);
    }
}
