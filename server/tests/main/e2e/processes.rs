//! Processes that do not fit together, die, and come back.

use super::accounts::assert_all_given_back;
use super::client::{
    Broken, Ending, Events, Metrics, complete, eventually, get, greedy, healthy, post, read_to_end,
};
use super::cluster::{Pair, Server, note};
use super::prompts::prompt;
use futures_util::future::join_all;
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::task::JoinHandle;

const REQUESTS: usize = 200;
const OUTPUT: u32 = 12;

#[tokio::test]
async fn workers_with_different_index_keys_are_refused_with_both_layouts() {
    let flags = "--disaggregation-transfer-backend shm --index-k-dtype";
    let mut prefill = Server::worker("prefill", &format!("{flags} bf16"));
    let mut decode = Server::decode_of(&prefill, &format!("{flags} fp8"));
    prefill.process.expect_error("refused");
    decode.process.expect_error("refused");
    let health = eventually("the refusal shows in /health", async || {
        let reply = get(&format!("{}/health", decode.url)).await.ok()?;
        (reply.status == 503 && reply.text().contains("fp8")).then(|| reply.text())
    })
    .await;
    for text in [health, decode.process.logged("page layouts differ: prefill")] {
        assert!(text.contains("bf16") && text.contains("fp8"), "both layouts in {text}");
    }
    let url = format!("{}/v1/completions", decode.url);
    let reply = post(&url, &greedy(&prompt(300), 8)).await.expect("an answer or an error");
    let metrics = Metrics::of(&decode.url).await;
    assert_eq!(metrics.sum("dsv4:handoffs_total", &[]), 0.0, "no page crossed");
    assert_eq!(metrics.sum("dsv4:transfer_bytes_pulled_total", &[]), 0.0, "no byte crossed");
    if reply.status == 200 {
        let unified = Server::worker("null", "--index-k-dtype fp8");
        let expected = complete(&unified.url, &prompt(300), 8).await;
        assert_eq!(super::client::essence(&reply.json()), expected);
    } else {
        assert!(reply.status >= 500, "{} {}", reply.status, reply.text());
        assert!(reply.json()["error"]["message"].is_string());
    }
}

/// Prompts of the flood, each asked many times, and the streamed answer of a healthy system.
async fn expected_answers(url: &str) -> Vec<(Vec<u32>, String)> {
    let mut known = Vec::new();
    for n in 0..10 {
        let ids = prompt(40 + n * 11);
        let answer = complete(url, &ids, OUTPUT).await;
        known.push((ids, answer["choice"]["text"].as_str().expect("a text").to_owned()));
    }
    known
}

/// Many streamed requests at once.
struct Flood {
    tasks: Vec<JoinHandle<Result<Ending, Broken>>>,
    expected: Vec<String>,
    ended: Arc<AtomicUsize>,
}

impl Flood {
    fn start(url: &str, known: &[(Vec<u32>, String)]) -> Self {
        let ended = Arc::new(AtomicUsize::new(0));
        let (mut tasks, mut expected) = (Vec::new(), Vec::new());
        for (ids, answer) in known.iter().cycle().take(REQUESTS) {
            let url = format!("{url}/v1/completions");
            let mut body = greedy(ids, OUTPUT);
            body["stream"] = json!(true);
            let ended = Arc::clone(&ended);
            expected.push(answer.clone());
            tasks.push(tokio::spawn(async move {
                let ending = match Events::open(&url, &body).await {
                    Ok(events) => read_to_end(events).await,
                    Err(Broken::Connection(error)) => Ok(Ending::Error(error)),
                    Err(Broken::Hangs) => Err(Broken::Hangs),
                };
                ended.fetch_add(1, Ordering::AcqRel);
                ending
            }));
        }
        Self { tasks, expected, ended }
    }

    /// Waits until the workers have all requests, and some of the prompts were handed over.
    async fn is_under_way(&self, decoders: &[&str], handoffs_before: f64) {
        eventually("the requests are in flight", async || {
            let (mut known, mut handoffs) = (self.ended.load(Ordering::Acquire) as f64, 0.0);
            for url in decoders {
                let metrics = Metrics::of(url).await;
                known += metrics.sum("sglang:num_running_reqs", &["decode"]);
                known += metrics.sum("sglang:num_queue_reqs", &["decode"]);
                handoffs += metrics.sum("dsv4:handoffs_total", &["decode"]);
            }
            (known >= REQUESTS as f64 * 0.95 && handoffs > handoffs_before).then_some(())
        })
        .await;
        let ended = self.ended.load(Ordering::Acquire);
        assert!(ended < REQUESTS / 2, "{ended} requests ended before anything was killed");
    }

    /// Waits for all ends: right, or an error; returns how many were right.
    async fn settle(self) -> usize {
        let mut right = 0;
        for (end, expected) in join_all(self.tasks).await.into_iter().zip(self.expected) {
            match end.expect("a client does not panic").expect("no request hangs") {
                Ending::Whole(text) => {
                    assert_eq!(text, expected, "a different answer");
                    right += 1;
                }
                Ending::Error(_) => {}
            }
        }
        right
    }
}

async fn handoffs(url: &str) -> f64 {
    Metrics::of(url).await.sum("dsv4:handoffs_total", &["decode"])
}

/// Asks until a prompt is handed over again; every answer on the way is right.
async fn handed_over_again(front: &str, decode: &str, known: &[(Vec<u32>, String)]) {
    let before = handoffs(decode).await;
    eventually("prompts are handed over again", async || {
        let answer = complete(front, &known[0].0, OUTPUT).await;
        assert_eq!(answer["choice"]["text"], known[0].1);
        (handoffs(decode).await > before).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_prefill_worker_costs_no_answer_and_is_used_again_after_its_restart() {
    let mut pair = Pair::start("shm", "");
    let decode = pair.decode.url.clone();
    healthy(&decode).await;
    let known = expected_answers(&decode).await;
    let before = handoffs(&decode).await;
    let flood = Flood::start(&decode, &known);
    flood.is_under_way(&[&decode], before).await;
    pair.prefill.process.kill();
    let right = flood.settle().await;
    note(&format!("prefill worker killed: {right} of {REQUESTS} requests ended right"));
    assert!(right * 10 >= REQUESTS * 9, "the decode worker computes prompts itself: {right}");
    assert_eq!(complete(&decode, &known[1].0, OUTPUT).await["choice"]["text"], known[1].1);
    assert_all_given_back(&[&decode]).await;
    tokio::task::block_in_place(|| pair.prefill.restart());
    handed_over_again(&decode, &decode, &known).await;
    assert_all_given_back(&[&decode, &pair.prefill.url]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_decode_worker_leaves_the_others_serving_and_is_used_again_after_its_restart() {
    let prefill = Server::worker("prefill", "--disaggregation-transfer-backend tcp");
    let flags = "--disaggregation-transfer-backend tcp";
    let mut first = Server::decode_of(&prefill, flags);
    let second = Server::decode_of(&prefill, flags);
    for decode in [&first, &second] {
        healthy(&decode.url).await;
    }
    let router = Server::router(&[&first, &second], "");
    healthy(&router.url).await;
    let known = expected_answers(&router.url).await;
    let before = handoffs(&first.url).await + handoffs(&second.url).await;
    let flood = Flood::start(&router.url, &known);
    flood.is_under_way(&[&first.url, &second.url], before).await;
    first.process.kill();
    let right = flood.settle().await;
    note(&format!("decode worker killed: {right} of {REQUESTS} requests ended right"));
    assert!(right * 3 >= REQUESTS, "the other decode worker serves on: {right}");
    assert_eq!(complete(&router.url, &known[1].0, OUTPUT).await["choice"]["text"], known[1].1);
    assert_all_given_back(&[&prefill.url, &second.url]).await;
    tokio::task::block_in_place(|| first.restart());
    healthy(&first.url).await;
    handed_over_again(&router.url, &first.url, &known).await;
    assert_all_given_back(&[&prefill.url, &first.url, &second.url]).await;
}

/// One of two prefill workers takes two prompts at a time: what it refuses the other computes, and
/// the decode worker computes nothing.
#[tokio::test]
async fn a_prompt_that_one_worker_refuses_is_asked_of_another() {
    let flags = "--disaggregation-transfer-backend tcp";
    let few = "--max-running-requests 1 --max-queued-requests 1";
    let small = Server::worker("prefill", &format!("{flags} {few}"));
    let large = Server::worker("prefill", flags);
    let second = large.bootstrap.as_ref().expect("a prefill worker has one");
    let more = format!("{flags} --disaggregation-bootstrap {second}");
    let decode = Server::decode_of(&small, &more);
    let unified = Server::worker("null", "");
    eventually("both prefill workers are connected", async || {
        let metrics = Metrics::of(&decode.url).await;
        (metrics.sum("dsv4:peers", &["decode"]) == 2.0).then_some(())
    })
    .await;
    let prompts: Vec<Vec<u32>> = (0..12).map(|n| prompt(300 + n)).collect();
    let answers = join_all(prompts.iter().map(|ids| complete(&decode.url, ids, 4))).await;
    for (ids, answer) in prompts.iter().zip(answers) {
        assert_eq!(answer, complete(&unified.url, ids, 4).await);
    }
    let metrics = Metrics::of(&decode.url).await;
    let faults = |event: &str| {
        let address = small.bootstrap.as_deref().expect("a prefill worker has one");
        metrics.sum("dsv4:handoff_faults_total", &[event, address])
    };
    assert!(faults("failed") >= 1.0, "the small one was asked and refused");
    assert_eq!(metrics.sum("dsv4:prompts_recomputed_total", &["decode"]), 0.0);
    assert_eq!(metrics.sum("dsv4:handoffs_total", &["decode"]), 12.0);
    let again = faults("asked_again");
    assert_eq!(again, faults("failed"), "each refusal was followed by another worker");
}

/// What takes less to compute than to hand over is computed by the decode worker, with the same answer.
#[tokio::test]
async fn a_short_prompt_stays_with_the_decode_worker() {
    let pair = Pair::start("tcp", "--max-local-prefill-length 200");
    let unified = Server::worker("null", "");
    eventually("the workers are connected", async || {
        let metrics = Metrics::of(&pair.decode.url).await;
        (metrics.sum("dsv4:peers", &["decode"]) == 1.0).then_some(())
    })
    .await;
    for length in [200, 201, 150, 600] {
        let ids = prompt(length);
        let answer = complete(&pair.decode.url, &ids, 4).await;
        assert_eq!(answer, complete(&unified.url, &ids, 4).await, "{length} tokens");
    }
    let metrics = Metrics::of(&pair.decode.url).await;
    assert_eq!(metrics.sum("dsv4:prompts_kept_local_total", &["decode"]), 2.0);
    assert_eq!(metrics.sum("dsv4:handoffs_total", &["decode"]), 2.0);
    assert_eq!(metrics.sum("dsv4:prompts_without_peer_total", &["decode"]), 0.0);
    assert_all_given_back(&[&pair.decode.url, &pair.prefill.url]).await;
}

/// A prefill worker that is told to end hands over what it computes, also within its first step.
#[tokio::test]
async fn a_prefill_worker_that_ends_hands_over_what_it_has_begun() {
    let pair = Pair::start("tcp", "");
    let unified = Server::worker("null", "");
    eventually("the workers are connected", async || {
        let metrics = Metrics::of(&pair.decode.url).await;
        (metrics.sum("dsv4:peers", &["decode"]) == 1.0).then_some(())
    })
    .await;
    let ids = prompt(1500);
    let (url, asked) = (pair.decode.url.clone(), ids.clone());
    let answer = tokio::spawn(async move { complete(&url, &asked, 4).await });
    eventually("the prompt is being computed", async || {
        let metrics = Metrics::of(&pair.prefill.url).await;
        (metrics.sum("sglang:num_running_reqs", &["prefill"]) >= 1.0).then_some(())
    })
    .await;
    pair.prefill.process.terminate();
    let answer = answer.await.expect("no panic");
    assert_eq!(answer, complete(&unified.url, &ids, 4).await);
    let metrics = Metrics::of(&pair.decode.url).await;
    assert_eq!(metrics.sum("dsv4:handoffs_total", &["decode"]), 1.0);
    assert_eq!(metrics.sum("dsv4:prompts_recomputed_total", &["decode"]), 0.0);
}
