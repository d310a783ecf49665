//! More sessions than may run and wait: who is too many is told so at once, the others are served as
//! if they were alone. And the time between tokens while long prompts arrive.
//!
//! A prefill and a decode worker over shared memory, `--max-running-requests 16
//! --max-queued-requests 32`; sessions that are refused do not come back.
#![expect(clippy::print_stdout, reason = "figures are the output of a bench")]

#[path = "../tests/main/e2e/client.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod client;
#[path = "../tests/main/e2e/cluster.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod cluster;
#[path = "../tests/main/e2e/prompts.rs"]
mod prompts;

use client::{Events, essence, greedy, healthy, post};
use cluster::{Pair, Server};
use futures_util::future::join_all;
use prompts::prompt;
use serde_json::{Value, json};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const RUNNING: usize = 16;
const QUEUED: usize = 32;
const SESSIONS: usize = 80;
const TURNS: usize = 4;
/// Prompt tokens that each turn adds.
const TURN_TOKENS: usize = 300;
const OUTPUT: u32 = 48;
/// Streams that run while long prompts arrive, and their tokens.
const STREAMS: usize = 8;
const STREAM_TOKENS: u32 = 400;
const LONG_PROMPT: usize = 4096;

fn figure(name: &str, value: f64, unit: &str) {
    println!("figure overload.{name} {value:.3} {unit}");
}

/// What became of one request.
struct Done {
    session: usize,
    turn: usize,
    status: u16,
    has_retry_after: bool,
    took: Duration,
    answer: Value,
}

/// A session's own prompt, as long as this turn is.
fn body(session: usize, turn: usize) -> Value {
    let mut ids = prompt(20 + TURN_TOKENS * TURNS);
    // Sessions share nothing but the first token; a turn goes on from the one before.
    ids[1..].rotate_left(7 + session);
    ids[1] = 1000 + session as u32;
    ids.truncate(20 + TURN_TOKENS * (turn + 1));
    let mut body = greedy(&ids, OUTPUT);
    body["logit_bias"] = json!({"1": -100});
    body
}

async fn hold(url: &str, session: usize) -> Vec<Done> {
    let mut all = Vec::new();
    for turn in 0..TURNS {
        let started = Instant::now();
        let reply = post(url, &body(session, turn)).await.expect("every request is answered");
        let (status, took) = (reply.status, started.elapsed());
        let has_retry_after = reply.headers.contains_key("retry-after");
        let answer = if status == 200 { essence(&reply.json()) } else { Value::Null };
        all.push(Done { session, turn, status, has_retry_after, took, answer });
        if status != 200 {
            break;
        }
    }
    all
}

/// All sessions at once; what became of their requests, and whole answers per second.
async fn load(sessions: usize) -> (Vec<Done>, f64) {
    let flags = format!("--max-running-requests {RUNNING} --max-queued-requests {QUEUED}");
    let pair = Pair::start("shm", &flags);
    healthy(&pair.decode.url).await;
    let url = format!("{}/v1/completions", pair.decode.url);
    let started = Instant::now();
    let all = join_all((0..sessions).map(|session| hold(&url, session))).await;
    let seconds = started.elapsed().as_secs_f64();
    let all: Vec<Done> = all.into_iter().flatten().collect();
    let whole = all.iter().filter(|done| done.status == 200).count();
    (all, whole as f64 / seconds)
}

/// Answers that are not those of a worker which computes everything alone.
async fn different(all: &[Done]) -> usize {
    let alone = Server::worker("null", "--disable-radix-cache");
    let url = format!("{}/v1/completions", alone.url);
    let mut different = 0;
    for done in all.iter().filter(|done| done.status == 200).step_by(5) {
        let reply = post(&url, &body(done.session, done.turn)).await.expect("an answer");
        different += usize::from(essence(&reply.ok()) != done.answer);
    }
    different
}

/// Seconds between the tokens of streams while long prompts arrive.
async fn gaps() -> Vec<f64> {
    let pair = Pair::start("shm", "");
    healthy(&pair.decode.url).await;
    let url = format!("{}/v1/completions", pair.decode.url);
    let stream = async |n: usize| {
        let mut body = body(n, 0);
        (body["stream"], body["max_tokens"]) = (json!(true), json!(STREAM_TOKENS));
        let mut events = Events::open(&url, &body).await.expect("a stream");
        let (mut last, mut gaps) = (None::<Instant>, Vec::new());
        while let Some(event) = events.next().await.expect("a whole stream") {
            if event.contains("\"text\"") {
                let now = Instant::now();
                gaps.extend(last.replace(now).map(|last| (now - last).as_secs_f64()));
            }
        }
        gaps
    };
    let long = async {
        for n in 0.. {
            let mut ids = prompt(LONG_PROMPT / 2).repeat(2);
            ids[1] = 1500 + n;
            post(&url, &greedy(&ids, 1)).await.expect("an answer").ok();
        }
    };
    tokio::select! {
        all = join_all((0..STREAMS).map(stream)) => all.into_iter().flatten().collect(),
        () = long => Vec::new(),
    }
}

fn percentile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() - 1) * percent / 100]
}

async fn run() -> bool {
    let (_, alone) = load(RUNNING + QUEUED).await;
    let (all, beside) = load(SESSIONS).await;
    let refused: Vec<&Done> = all.iter().filter(|done| done.status != 200).collect();
    let mut waited: Vec<f64> = refused.iter().map(|done| done.took.as_secs_f64() * 1e3).collect();
    let odd = refused.iter().filter(|done| done.status != 503 || !done.has_retry_after).count();
    let different = different(&all).await;
    figure("refused", refused.len() as f64, "requests");
    figure("refused_otherwise", odd as f64, "requests");
    figure("refused_ms_p99", percentile(&mut waited, 99), "ms");
    figure("different", different as f64, "requests");
    figure("goodput_alone", alone, "requests/s");
    figure("goodput_of_alone", beside / alone, "ratio");
    let mut gaps = gaps().await;
    let (median, p99) = (percentile(&mut gaps, 50), percentile(&mut gaps, 99));
    figure("gap_ms", median * 1e3, "ms");
    figure("gap_p99_of_median", p99 / median, "ratio");
    odd == 0 && different == 0
}

fn main() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("start the client's thread");
    if runtime.block_on(run()) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
