//! The long load run: sessions with tool calls, a unified worker beside a prefill and a decode
//! worker, for each type of index keys. Any difference between the two is a failure.
//!
//! Arguments: types of index keys (`fp4`, `fp8`, `bf16`; all by default), `--sessions N`,
//! `--turns N`, `--at-once N`, `--transport shm|tcp`. `DSV4_TEST_SEED` changes the conversations.
#![expect(clippy::print_stdout, reason = "figures are the output of a bench")]

#[path = "../tests/main/e2e/accounts.rs"]
mod accounts;
#[path = "../tests/main/e2e/client.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod client;
#[path = "../tests/main/e2e/cluster.rs"]
#[expect(dead_code, reason = "the tests use more of it")]
mod cluster;
#[path = "../tests/main/e2e/corpus.rs"]
mod corpus;
#[path = "../tests/main/e2e/sessions.rs"]
mod sessions;

use accounts::{assert_all_given_back, assert_all_pages_checked};
use client::{Metrics, healthy};
use cluster::{MODEL, Pair, Server, note};
use corpus::Session;
use dsv4_model::text::Tokenizer;
use futures_util::stream::{StreamExt as _, iter};
use sessions::{Tally, hold};
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

const SHORTEST: usize = 2048;
const LONGEST: usize = 8000;

/// What is run.
#[derive(Debug)]
struct Plan {
    types: Vec<String>,
    sessions: usize,
    turns: usize,
    at_once: usize,
    transport: String,
    seed: u64,
}

impl Plan {
    fn read(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let seed = std::env::var("DSV4_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
        let (types, transport) = (Vec::new(), "shm".to_owned());
        let seed = seed.unwrap_or(1);
        let mut plan = Self { types, sessions: 60, turns: 4, at_once: 6, transport, seed };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            let number = |text: String| match text.parse::<usize>() {
                Ok(n) if n > 0 => Ok(n),
                _ => Err(format!("{text:?} is not a positive number")),
            };
            match word.as_str() {
                "--bench" => {} // from cargo
                "fp4" | "fp8" | "bf16" => plan.types.push(word),
                "--sessions" => plan.sessions = number(value()?)?,
                "--turns" => plan.turns = number(value()?)?,
                "--at-once" => plan.at_once = number(value()?)?,
                "--transport" => plan.transport = value()?,
                _ => return Err(format!("unknown argument {word:?}")),
            }
        }
        if plan.types.is_empty() {
            plan.types = ["fp4", "fp8", "bf16"].map(str::to_owned).to_vec();
        }
        Ok(plan)
    }
}

/// Result of one type of index keys.
struct Row {
    index_keys: String,
    tally: Tally,
    pages: f64,
    mismatches: f64,
    gib: f64,
    seconds: f64,
}

async fn run(plan: &Plan, index_keys: &str) -> Row {
    let flags = format!("--index-k-dtype {index_keys}");
    // Computes every prompt anew; the pair goes on from what it has.
    let unified = Server::worker("null", &format!("{flags} --disable-radix-cache"));
    let pair = Pair::start(&plan.transport, &flags);
    healthy(&pair.decode.url).await;
    let tokenizer = Tokenizer::from_dir(Path::new(MODEL)).expect("the mini model's tokenizer");
    let session = |n: usize| {
        let tokens = SHORTEST + n * (LONGEST - SHORTEST) / plan.sessions.saturating_sub(1).max(1);
        Session::new(plan.seed * 1_000_003 + n as u64, &tokenizer, tokens, plan.turns)
    };
    let sessions: Vec<Session> = (0..plan.sessions).map(session).collect();
    let start = Instant::now();
    let mut held = iter(&sessions)
        .map(|one| hold(one, &unified.url, &pair.decode.url))
        .buffer_unordered(plan.at_once);
    let mut tally = Tally::default();
    let mut done = 0;
    while let Some(one) = held.next().await {
        tally.add(one);
        done += 1;
        println!("{index_keys}: session {done} of {}, {:?}", plan.sessions, start.elapsed());
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("{index_keys}: {tally:?}");
    assert_all_given_back(&[&unified.url, &pair.decode.url, &pair.prefill.url]).await;
    if tally.different == 0 {
        assert_all_pages_checked(&pair.prefill.url, &pair.decode.url).await;
    }
    let decode = Metrics::of(&pair.decode.url).await;
    let count = |name: &str| decode.sum(&format!("dsv4:transfer_{name}_total"), &["decode"]);
    Row {
        index_keys: index_keys.to_owned(),
        tally,
        pages: count("items_checked"),
        mismatches: count("mismatches"),
        gib: count("bytes_pulled") / f64::from(1 << 30),
        seconds,
    }
}

fn print(rows: &[Row]) {
    println!();
    println!(
        "| index keys | requests | different | right | tool calls | prompt tokens | longest | pages checked | mismatches | GiB moved | s |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for Row { index_keys, tally: t, pages, mismatches, gib, seconds } in rows {
        println!(
            "| {index_keys} | {} | {} | {} | {} | {} | {} | {pages} | {mismatches} | {gib:.2} | {seconds:.0} |",
            t.requests, t.different, t.right, t.calls, t.prompt_tokens, t.longest
        );
    }
    println!();
    for Row { index_keys, tally, pages, mismatches, seconds, .. } in rows {
        println!("figure load.{index_keys}.requests {} requests", tally.requests);
        println!("figure load.{index_keys}.different {} requests", tally.different);
        println!("figure load.{index_keys}.right {} requests", tally.right);
        println!("figure load.{index_keys}.pages_checked {pages} pages");
        println!("figure load.{index_keys}.mismatches {mismatches} pages");
        println!("figure load.{index_keys}.seconds {seconds:.1} s");
    }
}

fn main() -> ExitCode {
    let plan = match Plan::read(std::env::args().skip(1)) {
        Ok(plan) => plan,
        Err(error) => {
            note(&format!("error: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .expect("start the client's thread");
    let rows: Vec<Row> = plan.types.iter().map(|one| runtime.block_on(run(&plan, one))).collect();
    print(&rows);
    if rows.iter().all(|row| row.tally.different == 0) {
        return ExitCode::SUCCESS;
    }
    println!("answers differ from the unified worker's");
    ExitCode::FAILURE
}
