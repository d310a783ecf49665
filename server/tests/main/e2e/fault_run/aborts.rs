//! Clients that hang up: before the answer, within the hand-off, within the output.

use super::super::client::{Broken, Events, complete, greedy, healthy};
use super::super::cluster::{Pair, note};
use super::super::prompts::prompt;
use super::process::Usage;
use super::{FLAGS, Figure, GROWTH_MAX_KIB, Known, LONG, Plan, Rng, SETTLED_MAX, owned_at_rest};
use serde_json::json;
use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;

/// Tokens that nobody stays for.
const OUTPUT: u32 = 400;
/// Requests after which the processes are looked at.
const PART: usize = 500;

/// A prompt that no other request has: a stretch of a conversation with a mark in front.
fn fresh(number: usize, rng: &mut Rng) -> Vec<u32> {
    let all = prompt(LONG);
    // Mostly short, so that many requests are affordable; some with a whole block.
    let longest = if rng.below(8) == 0 { 300 } else { 40 };
    let length = 8 + rng.below(longest) as usize;
    let from = rng.below((all.len() - length) as u64) as usize;
    let mut ids = all[from..from + length].to_vec();
    for (place, id) in ids.iter_mut().take(4).enumerate() {
        *id = all[(number >> (3 * place)) % 8];
    }
    ids
}

/// Sends a request and hangs up at a moment that the seed decides on.
async fn hang_up(url: &str, number: usize, rng: &mut Rng) -> Result<(), Broken> {
    let mut body = greedy(&fresh(number, rng), OUTPUT);
    body["stream"] = json!(true);
    let endpoint = format!("{url}/v1/completions");
    match rng.below(4) {
        // Before the first token, within the hand-off: nobody reads what comes.
        0 | 1 => {
            let address = url.trim_start_matches("http://");
            let connection = |error: std::io::Error| Broken::Connection(error.to_string());
            let socket = TcpStream::connect(address).await.map_err(connection)?;
            let body = body.to_string();
            let head = format!(
                "POST /v1/completions HTTP/1.1\r\nhost: {address}\r\n\
                 content-type: application/json\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            let request = head + &body;
            let mut rest = request.as_bytes();
            while !rest.is_empty() {
                socket.writable().await.map_err(connection)?;
                match socket.try_write(rest) {
                    Ok(sent) => rest = &rest[sent..],
                    Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                    Err(error) => return Err(connection(error)),
                }
            }
            // When a client leaves is part of the fault; nothing waits for it.
            tokio::time::sleep(Duration::from_micros(rng.below(30_000))).await;
        }
        // With the head of the answer.
        2 => drop(Events::open(&endpoint, &body).await?),
        // After a few tokens.
        _ => {
            let mut events = Events::open(&endpoint, &body).await?;
            for _ in 0..1 + rng.below(4) {
                events.next().await?;
            }
        }
    }
    Ok(())
}

/// The processes at rest: nothing runs, and the sockets of the clients that left are closed.
async fn at_rest(pair: &Pair, descriptors: Option<[f64; 2]>) -> ([Usage; 2], f64) {
    let mut owned = 0.0;
    for server in [&pair.decode, &pair.prefill] {
        owned += owned_at_rest(&server.url).await;
    }
    let deadline = Instant::now() + SETTLED_MAX;
    loop {
        let usages = [&pair.decode, &pair.prefill].map(|server| Usage::of(&server.process));
        let is_closed = descriptors.is_none_or(|most| {
            usages.iter().zip(most).all(|(usage, most)| usage.descriptors <= most)
        });
        if is_closed || Instant::now() > deadline {
            return (usages, owned);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Hangs up on as many requests as the plan says, and sees what the workers keep of them.
pub(super) async fn run(plan: &Plan, known: &Known) -> Vec<Figure> {
    let start = Instant::now();
    let pair = Pair::start(&plan.transport, FLAGS);
    healthy(&pair.decode.url).await;
    for (ids, _) in &known.short {
        complete(&pair.decode.url, ids, 2).await;
    }
    let (before, mut owned) = at_rest(&pair, None).await;
    let descriptors = before.map(|usage| usage.descriptors);
    let (mut middle, mut after, mut errors) = (before, before, 0);
    // An even number, so that one part ends in the middle.
    let parts = plan.aborts.div_ceil(2 * PART) * 2;
    for part in 0..parts {
        let numbers = plan.aborts * part / parts..plan.aborts * (part + 1) / parts;
        let (next, end) = (Arc::new(AtomicUsize::new(numbers.start)), numbers.end);
        let clients: Vec<_> = (0..plan.at_once)
            .map(|_| {
                let (url, next, seed) = (pair.decode.url.clone(), Arc::clone(&next), plan.seed);
                tokio::spawn(async move {
                    let mut errors = 0;
                    loop {
                        let number = next.fetch_add(1, Ordering::AcqRel);
                        if number >= end {
                            return errors;
                        }
                        let mut rng = Rng(seed ^ ((number as u64) << 24));
                        errors += usize::from(hang_up(&url, number, &mut rng).await.is_err());
                    }
                })
            })
            .collect();
        for client in clients {
            errors += client.await.expect("a client does not panic");
        }
        let (usages, left) = at_rest(&pair, Some(descriptors)).await;
        owned += left;
        if part + 1 == parts / 2 {
            middle = usages;
        }
        after = usages;
        let [decode, prefill] = usages;
        note(&format!("after {end} aborts: decode {decode:?}, prefill {prefill:?}"));
    }
    let (mut right, all) = (0, known.short.len());
    for (ids, answer) in &known.short {
        right += usize::from(super::ask(&pair.decode.url, ids, answer).await == super::End::Right);
    }
    let growth = |n: usize| after[n].anonymous_kib - middle[n].anonymous_kib;
    vec![
        Figure::at_least("aborts", plan.aborts as f64, "requests", plan.aborts as f64),
        Figure::at_most("abort_errors", errors as f64, "requests", 0.0),
        Figure::at_least("right_after_aborts", right as f64, "requests", all as f64),
        Figure::at_most("decode_growth", growth(0), "KiB", GROWTH_MAX_KIB),
        Figure::at_most("prefill_growth", growth(1), "KiB", GROWTH_MAX_KIB),
        Figure::plain("decode_rss_anon", after[0].anonymous_kib, "KiB"),
        Figure::plain("prefill_rss_anon", after[1].anonymous_kib, "KiB"),
        Figure::plain("decode_rss_shared", after[0].shared_kib, "KiB"),
        Figure::plain("decode_fds_before", before[0].descriptors, "fds"),
        Figure::at_most("decode_fds_after", after[0].descriptors, "fds", before[0].descriptors),
        Figure::plain("prefill_fds_before", before[1].descriptors, "fds"),
        Figure::at_most("prefill_fds_after", after[1].descriptors, "fds", before[1].descriptors),
        Figure::plain("decode_threads_before", before[0].threads, "threads"),
        Figure::plain("decode_threads_after", after[0].threads, "threads"),
        Figure::at_most("abort_pages_owned", owned, "pages", 0.0),
        Figure::plain("abort_seconds", start.elapsed().as_secs_f64(), "s"),
    ]
}
