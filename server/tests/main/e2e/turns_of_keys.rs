//! Who waits for whom: priorities, turns of users, and ends of patience.

use super::accounts::assert_all_given_back;
use super::client::{Events, Metrics, Reply, eventually, greedy, post};
use super::cluster::Server;
use super::prompts::prompt;
use serde_json::{Value, json};
use tokio::sync::mpsc::unbounded_channel;

/// A streamed request that runs until its client leaves.
async fn busy(url: &str) -> Events {
    let mut body = greedy(&prompt(20), 1400);
    body["stream"] = json!(true);
    body["logit_bias"] = json!({"1": -100});
    let mut events = Events::open(&format!("{url}/v1/completions"), &body).await.expect("a stream");
    events.next().await.expect("a token").expect("a token");
    events
}

async fn waiting(url: &str, count: f64) {
    eventually("they wait", async || {
        let metrics = Metrics::of(url).await;
        (metrics.sum("sglang:num_queue_reqs", &[]) == count).then_some(())
    })
    .await;
}

/// Sends requests one after the other while a worker is busy, and says in which order they ended.
async fn order(url: &str, bodies: &[Value]) -> Vec<usize> {
    let running = busy(url).await;
    let (send, mut ended) = unbounded_channel();
    for (n, body) in bodies.iter().enumerate() {
        let (send, body) = (send.clone(), body.clone());
        let path = format!("{url}/v1/completions");
        tokio::spawn(async move {
            post(&path, &body).await.expect("an answer").ok();
            send.send(n).expect("the test listens");
        });
        waiting(url, n as f64 + 1.0).await;
    }
    drop(running);
    let mut order = Vec::new();
    while order.len() < bodies.len() {
        order.push(ended.recv().await.expect("all end"));
    }
    order
}

fn wish(tokens: usize, name: &str, value: Value) -> Value {
    let mut body = greedy(&prompt(tokens), 1);
    body[name] = value;
    body
}

#[tokio::test]
async fn requests_come_by_priority_and_users_take_turns() {
    let server = Server::worker("null", "--max-running-requests 1 --context-length 1536");
    let priorities = [3, 0, -1, 3].map(|number| wish(300, "priority", json!(number)));
    assert_eq!(order(&server.url, &priorities).await, [2, 1, 0, 3]);
    // One user's five prompts, then one of another.
    let users = ["a", "a", "a", "a", "a", "b"];
    let mut bodies: Vec<Value> = users.iter().map(|user| wish(600, "user", json!(user))).collect();
    // None of them is in the cache.
    for (n, body) in bodies.iter_mut().enumerate() {
        body["prompt"][0] = json!(500 + n);
    }
    let found = order(&server.url, &bodies).await;
    let place = |n: usize| found.iter().position(|other| *other == n).expect("it ended");
    assert!(place(5) <= 1, "the other user waits behind all of the first: {found:?}");
    assert!((0..4).all(|n| place(n) < place(n + 1)), "{found:?}");
    let bad = wish(10, "priority", json!(1_u64 << 40));
    let refused = post(&format!("{}/v1/completions", server.url), &bad).await.expect("an answer");
    assert_eq!((refused.status, refused.text().contains("priority")), (400, true));
    assert_all_given_back(&[&server.url]).await;
}

async fn late(url: &str, flag: &str) -> Reply {
    let reply = post(&format!("{url}/v1/completions"), &greedy(&prompt(30), 1)).await;
    let reply = reply.expect("an answer");
    assert_eq!(reply.status, 503, "{}", reply.text());
    assert!(reply.text().contains(flag), "{}", reply.text());
    reply
}

#[tokio::test]
async fn requests_that_wait_too_long_get_503() {
    for flag in ["--queue-timeout", "--first-token-timeout"] {
        let flags = format!("--max-running-requests 1 --context-length 1536 {flag} 1");
        let mut server = Server::worker("null", &flags);
        let running = busy(&server.url).await;
        late(&server.url, flag).await;
        eventually("it is counted", async || {
            let metrics = Metrics::of(&server.url).await;
            (metrics.sum("dsv4:requests_late_total", &[]) == 1.0).then_some(())
        })
        .await;
        // Who had a token is not late, however long it runs.
        drop(running);
        let url = format!("{}/v1/completions", server.url);
        post(&url, &greedy(&prompt(30), 2)).await.expect("an answer").ok();
        assert_all_given_back(&[&server.url]).await;
        server.process.terminate();
        assert!(server.process.wait_exit().success());
    }
}

#[tokio::test]
async fn queue_has_a_limit_of_tokens() {
    let flags = "--max-running-requests 1 --context-length 1536 --max-queued-tokens 500";
    let server = Server::worker("null", flags);
    let running = busy(&server.url).await;
    let url = format!("{}/v1/completions", server.url);
    let ask = |tokens: usize| {
        let (url, body) = (url.clone(), greedy(&prompt(tokens), 1));
        tokio::spawn(async move { post(&url, &body).await.expect("an answer") })
    };
    // One that is longer may wait alone.
    let alone = ask(700);
    waiting(&server.url, 1.0).await;
    let refused = ask(10).await.expect("it does not panic");
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert!(refused.text().contains("700") && refused.text().contains("500"), "{}", refused.text());
    drop(running);
    assert_eq!(alone.await.expect("it does not panic").status, 200);
    assert_eq!(ask(10).await.expect("it does not panic").status, 200);
    assert_all_given_back(&[&server.url]).await;
}
