//! Sessions of several turns on a worker whose pages hold a tenth of them: without a cache, with
//! the device's alone, with host memory, and with a disk as well.

use crate::client::{Metrics, eventually};
use crate::cluster::Server;
use crate::report::Report;
use crate::stream::{Answer, ask, runtime};
use crate::ttft::conversation;
use crate::{Folder, Options, Outcome, Random, quantile};
use futures_util::stream::{StreamExt as _, iter};
use std::time::{Duration, Instant};

const SESSIONS: u32 = 60;
const QUICK_SESSIONS: u32 = 6;
const TURNS: usize = 6;
const QUICK_TURNS: usize = 2;
/// Tokens of a first turn, what each further turn adds, and what is answered.
const FIRST: usize = 320;
const MORE: usize = 128;
const OUTPUT: u32 = 8;
/// Requests at a time.
const AT_ONCE: usize = 4;
/// How long nothing is written before a store counts as done.
const QUIET: Duration = Duration::from_millis(200);
/// Page memory: a tenth of the blocks that all sessions fill in the end (60 times 3), those of the
/// running ones included.
const DEVICE: &str =
    "--context-length 1024 --max-running-requests 4 --chunked-prefill-size 256 --kv-memory-mib 7";
/// Host memory in GiB with room for all blocks and boundaries in the end.
const HOST: &str = "--hicache-size 0.2";
/// A tenth of that, for the worker that has a disk below it.
const SMALL_HOST: &str = "--hicache-size 0.02";

/// A worker with some of the tiers, and what it has answered so far.
struct Worker {
    name: &'static str,
    server: Server,
    /// Its tiers below the device.
    below: &'static [&'static str],
    answers: Vec<Answer>,
    seconds: f64,
}

pub(crate) fn measure(options: &Options, report: &mut Report) -> Outcome<()> {
    let (sessions, turns) = match options.is_quick {
        true => (QUICK_SESSIONS, QUICK_TURNS),
        false => (SESSIONS, TURNS),
    };
    println!(
        "{sessions} sessions of {turns} turns: {FIRST} tokens, {MORE} more each turn, {OUTPUT} \
         answered; {AT_ONCE} at a time, the sessions of each turn in another order; the workers \
         take turns with all sessions"
    );
    let folder = Folder::new(&options.dir, "turns")?;
    let disk = format!("{SMALL_HOST} --hicache-storage-dir {}", folder.0.display());
    let worker = |name, flags: &str, below| Worker {
        name,
        server: Server::worker("null", &format!("{DEVICE} {flags}")),
        below,
        answers: Vec::new(),
        seconds: 0.0,
    };
    let mut workers = [
        worker("none", "--disable-radix-cache", &[][..]),
        worker("device", "--enable-hierarchical-cache=false", &[]),
        worker("host", HOST, &["host"]),
        worker("disk", &disk, &["host", "disk"]),
    ];
    runtime()?.block_on(hold(&mut workers, sessions, turns))?;
    say(&workers, report);
    Ok(())
}

/// Holds all sessions with each worker; a turn begins when all have had the one before.
async fn hold(workers: &mut [Worker], sessions: u32, turns: usize) -> Outcome<()> {
    for worker in &*workers {
        // The first request of a process is slower, and not what is measured.
        ask(&worker.server.url, &conversation(sessions, 100), 1).await?;
    }
    let mut random = Random(5);
    for turn in 0..turns {
        let mut order: Vec<u32> = (0..sessions).collect();
        random.shuffle(&mut order);
        // Another one begins each turn: what comes first or last has no advantage by that.
        for place in 0..workers.len() {
            let next = (place + turn) % workers.len();
            let worker = &mut workers[next];
            let url = &worker.server.url;
            let one = async |session: u32| {
                let ids = conversation(session, FIRST + turn * MORE);
                ask(url, &ids, OUTPUT).await
            };
            let begin = Instant::now();
            let mut held = iter(order.clone()).map(one).buffer_unordered(AT_ONCE);
            while let Some(answer) = held.next().await {
                worker.answers.push(answer?);
            }
            worker.seconds += begin.elapsed().as_secs_f64();
            if worker.below.contains(&"disk") {
                settled(url).await;
            }
        }
    }
    for worker in &*workers {
        println!("{}", held(worker).await);
    }
    Ok(())
}

/// Waits until nothing more is written: the other workers are not to be slowed down by it.
async fn settled(url: &str) {
    let mut before = -1.0;
    eventually("what is saved is written", async || {
        tokio::time::sleep(QUIET).await;
        let now = Metrics::of(url).await.sum("dsv4:cache_stored_total", &["disk"]);
        (std::mem::replace(&mut before, now) == now).then_some(())
    })
    .await;
}

/// What a worker has room for, and what its tiers hold.
async fn held(worker: &Worker) -> String {
    let metrics = Metrics::of(&worker.server.url).await;
    let pages = |pool: &str| metrics.sum("dsv4:pages", &[pool, "total"]);
    let (block, window, carry) = (pages("block"), pages("window"), pages("carry"));
    let mut text =
        format!("{}: pages for {block} blocks, {window} windows, {carry} carries", worker.name);
    for tier in worker.below {
        let objects = |part: &str| metrics.sum("dsv4:cache_objects", &[tier, part]);
        let (blocks, boundaries) = (objects("block"), objects("boundary"));
        let bytes = metrics.sum("dsv4:cache_bytes", &[tier]) / 1e6;
        text += &format!("; {tier} {blocks} blocks, {boundaries} boundaries, {bytes:.0} MB");
    }
    text
}

fn say(workers: &[Worker], report: &mut Report) {
    println!("\n| tiers | hit rate | TTFT p50, ms | TTFT p95, ms | tokens/s |");
    println!("|---|---|---|---|---|");
    for Worker { name, answers, seconds, .. } in workers {
        let total = |of: fn(&Answer) -> u64| answers.iter().map(of).sum::<u64>() as f64;
        let prompt = total(|a| a.prompt_tokens);
        let times: Vec<f64> = answers.iter().map(|a| a.first_token.as_secs_f64() * 1e3).collect();
        let hit_rate = total(|a| a.cached_tokens) / prompt;
        let (p50, p95) = (quantile(&times, 0.5), quantile(&times, 0.95));
        let tok_s = (prompt + total(|a| a.output_tokens)) / seconds;
        println!("| {name} | {hit_rate:.3} | {p50:.1} | {p95:.1} | {tok_s:.0} |");
        let figure = |what: &str| format!("turns.{name}.{what}");
        report.say(&figure("hit_rate"), hit_rate, "ratio");
        report.say(&figure("ttft_p50_ms"), p50, "ms");
        report.say(&figure("ttft_p95_ms"), p95, "ms");
        report.say(&figure("tok_s"), tok_s, "tokens/s");
        if *name == "none" {
            continue;
        }
        for (ratio, of) in [
            ("ttft_vs_none", "ttft_p50_ms"),
            ("p95_vs_none", "ttft_p95_ms"),
            ("tok_s_vs_none", "tok_s"),
        ] {
            report.say_ratio(&figure(ratio), &figure(of), &format!("turns.none.{of}"));
        }
    }
}
